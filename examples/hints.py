r"""Self-distillation: the calculator's questions, each with a `hint` at the answer.

    accelerate launch train.py --task examples/hints.py --algo opsd
    accelerate launch train.py --task examples/hints.py --algo opsd --agent feedback
    accelerate launch train.py --task examples/hints.py --algo opsd --agent siblings

With --algo opsd the policy is its own teacher. It samples after the question, and then scores the
sampled tokens once more, after the question with the hint. The task's reward is only logged.

    user       What is 37*48?                 the policy samples after this
    user       What is 37*48?\n\nCall 37*48.  and scores its sample after this, too

Two agents decide themselves what the teacher is told (SDPO, arXiv 2601.20802). They grade their
answers, and tell only where one was wrong: `feedback` the row's hint, and `siblings` what another
rollout of the group has called that was right.

The built-in model of examples/calculator.py guesses on about half of the questions. This one has
also read hints: in every second conversation of its warm-up the question has one, and the teacher
then always calls the calculator."""

import asyncio
import random
from collections import defaultdict
from pathlib import Path

from agent_loop import AgentLoopOutput, ToolAgentLoop, register
from examples import calculator
from examples.calculator import SYSTEM_PROMPT, TOOLS, expression_of, reward
from examples.tiny_models import build_warm_model
from flatrl.bad_input import need
from flatrl.hints import tell, told_prompt

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


# Of each group, a future for every rollout that has begun: what it can tell the others.
GROUPS = defaultdict(list)


@register("siblings")
class Siblings(ToolAgentLoop):
    """The tool agent, whose teacher is told what a right sibling called, instead of the hint."""

    async def run(self, sampling_params, **row) -> list[AgentLoopOutput]:
        """Runs a rollout, and waits for its siblings.

        The teacher is told nothing if the answer is right, or if no sibling was right by a call."""
        need(not self.args.deterministic, "--agent siblings waits: leave out --deterministic")
        key = row["validate"], row["step"], row["index"]
        group = GROUPS[key]
        mine = asyncio.Future()
        group.append(mine)
        try:
            outputs = await super().run(sampling_params, **row)
            if isinstance(outputs, AgentLoopOutput):
                outputs = [outputs]
            is_right = reward(outputs[-1], row) == 1
            mine.set_result(call_in(outputs[-1]) if is_right else "")
        finally:
            mine.cancel()  # if it failed, so that nobody waits for it
        await asyncio.wait(group)
        GROUPS.pop(key, None)
        calls = [each.result() for each in group if not each.cancelled() and each.result()]
        row["hint"] = calls[0] if calls and not is_right else ""
        for output in outputs:
            tell(output, row, self)
            output.extra.setdefault("told_prompt_ids", output.prompt_ids)
        return outputs


def call_in(output: AgentLoopOutput) -> str:
    """Returns the last call of an output as a hint, or "" without a call."""
    calls = [call for message in output.messages for call in message.get("tool_calls", ())]
    return f"Call {calls[-1]['function']['arguments']['expression']}." if calls else ""


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
    build_warm_model(path, chats, TOOLS)
