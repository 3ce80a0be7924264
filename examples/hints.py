r"""Self-distillation: the calculator's questions, each with a `hint` at the answer.

    accelerate launch train.py --task examples/hints.py --algo opsd
    accelerate launch train.py --task examples/hints.py --algo opsd --agent feedback

With --algo opsd the policy is its own teacher. It samples after the question, and then scores the
sampled tokens once more, after the question with the hint. The task's reward is only logged.

    user       What is 37*48?                 the policy samples after this
    user       What is 37*48?\n\nCall 37*48.  and scores its sample after this, too

The agent `feedback` decides itself what the teacher is told (SDPO, arXiv 2601.20802): it grades its
answer, and the hint is told only where that was wrong.

The built-in model of examples/calculator.py guesses on about half of the questions. This one has
also read hints: in every second conversation of its warm-up the question has one, and the teacher
then always calls the calculator."""

import random
from pathlib import Path

from agent_loop import AgentLoopOutput, ToolAgentLoop, register
from examples import calculator
from examples.calculator import SYSTEM_PROMPT, TOOLS, expression_of, reward
from examples.tiny_models import build_warm_model
from flatrl.hints import told_prompt

__all__ = ["SYSTEM_PROMPT", "TOOLS", "reward"]


def load(split: str) -> list[dict]:
    """Returns the calculator's rows, each with a hint: the call of the worked solution."""
    rows = calculator.load(split)
    for row in rows:
        expression = expression_of(row)
        row["hint"] = f"Call {expression}."
    return rows


@register("feedback")
class Feedback(ToolAgentLoop):
    """The tool agent, whose teacher is told the hint only if the answer was wrong."""

    async def run(self, sampling_params, **row) -> list[AgentLoopOutput]:
        """Runs a rollout. The teacher of a right answer is told nothing but the prompt itself.

        All other outputs get the row's hint."""
        outputs = await super().run(sampling_params, **row)
        if isinstance(outputs, AgentLoopOutput):  # the template has not rewritten the history
            outputs = [outputs]
        if reward(outputs[-1], row) == 1:
            for output in outputs:
                output.extra["told_prompt_ids"] = output.prompt_ids
        return outputs


def demonstration(row: dict) -> list[dict]:
    """Returns a conversation: the calculator's teacher; or, told the hint, one who calls."""
    if random.random() < 0.5:
        return calculator.demonstration(row)
    chat = calculator.demonstration(row)
    while len(chat) < 4:  # the teacher has guessed
        chat = calculator.demonstration(row)
    prompt = told_prompt({**row, "prompt": chat[:2]})
    return prompt + chat[2:]


def build_model(path: str | Path) -> None:
    """Writes a model to the folder `path`, warmed up on questions with and without a hint."""
    chats = [demonstration(row) for row in random.choices(load("train"), k=1200 * 32)]
    build_warm_model(path, chats, TOOLS, batch_size=32)
