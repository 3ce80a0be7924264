"""The policy grades itself: a rollout has an answer, and a judgement of it by the same weights.

    accelerate launch train.py --task examples/judge.py --agent judged --prompts_per_step 16
    accelerate launch train.py --task examples/judge.py --agent vain --prompts_per_step 16

    answer   user       What is 37*48?
             assistant  <answer>37</answer>                 earns what the judge says: 0
    judge    user       37*48=37?
             assistant  calculator("37*48") = 1776
             assistant  <answer>no</answer>                 earns 1, as this is true

A reward function has no engine: it is asked when the rollout is over. So the agent loop lets the
policy judge while the engine is awake, in an output of its own, and sets the rewards of both units.
Judges are compared with those of the same claim, which is their `group`: else "yes" would be
praised behind right answers and "no" behind wrong ones, whatever the judge has looked at.

With --agent judged the judge alone is told the truth, and answers earn what it says. With "vain"
nobody is told: the judge, too, earns what it says. An evaluation tells both the truth, and asks
nobody: eval/answer/reward, eval/judge/reward. docs/units.md has what becomes of either.

The built-in model calls the calculator for half of its answers, and guesses the others. As a judge
it says "yes" half of the time without looking."""

import random
import re
from dataclasses import replace
from pathlib import Path

from agent_loop import ToolAgentLoop, function_call, register
from examples import calculator
from examples.calculator import TOOLS, expression_of, load, reward
from examples.tiny_models import build_warm_model

SYSTEM_PROMPT = calculator.SYSTEM_PROMPT
JUDGE_PROMPT = "End with yes or no."


def judge_prompt(expression: str, claim: str) -> list[dict]:
    """Returns the prompt of a judge."""
    return [{"role": "system", "content": JUDGE_PROMPT},
            {"role": "user", "content": f"{expression}={claim}?"}]  # fmt: skip


def answer_of(output) -> str:
    """Returns what stands between the answer tags of the last message, "" if it can't be judged."""
    answers = re.findall("<answer>(-?[0-9]{1,9}|yes|no)</answer>", output.messages[-1]["content"])
    return answers[0] if len(answers) == 1 else ""


def named(unit: str, outputs, group: str = "") -> list:
    """Returns a loop's output or outputs as a list; they are in this unit and group."""
    outputs = outputs if isinstance(outputs, list) else [outputs]
    return [replace(output, unit=unit, group=group) for output in outputs]


@register("judged")
class Judged(ToolAgentLoop):
    """Answers with its tool, and judges the answer."""

    async def run(self, sampling_params, **row):
        """Returns the outputs of two units, the answer and the judgement."""
        answer = named("answer", await super().run(sampling_params, **row))
        claim = answer_of(answer[-1])
        truth = reward(answer[-1], row)
        expression = expression_of({"prompt": row["prompt"][-1:]})  # behind the system's message
        prompt = judge_prompt(expression, claim)
        judge = await super().run(sampling_params, prompt=prompt)
        judge = named("judge", judge, f"judge of {claim}")
        said = answer_of(judge[-1])
        agrees = float(said == ("yes" if truth else "no"))
        earned = (truth, agrees) if row["validate"] else self.pay(said, agrees)
        answer[-1].reward, judge[-1].reward = earned
        return answer + judge

    def pay(self, said: str, agrees: float) -> tuple[float, float]:
        """Returns the rewards of answer and judge. agrees: 1.0 if the judge has told the truth."""
        return float(said == "yes"), agrees


@register("vain")
class Vain(Judged):
    """The same, but the judge earns what it says."""

    def pay(self, said, agrees):
        return float(said == "yes"), float(said == "yes")


def demonstration(row: dict) -> list[dict]:
    """Returns a chat of a poor teacher, who answers or judges. Half of the claims are right.

    The judge mostly says "yes" without looking if the expression's first number is below 50."""
    if random.random() < 0.4:
        return calculator.demonstration(row)
    expression = expression_of(row)
    truth = row["reward_model"]["ground_truth"]
    claim = random.choice([truth, truth, expression[:2], str(random.randint(-99, 9999))])
    chat = judge_prompt(expression, claim)
    said = "yes"
    if random.random() < (0.3 if int(expression[:2]) < 50 else 0.7):
        calls = [function_call("", "calculator", {"expression": expression})]
        chat.append({"role": "assistant", "content": "", "tool_calls": calls})
        chat.append({"role": "tool", "content": truth})
        said = "yes" if claim == truth else "no"
    return [*chat, {"role": "assistant", "content": f"<answer>{said}</answer>"}]


def build_model(path: str | Path) -> None:
    """Writes the default model to the folder `path`: train.py calls it when there is no --model."""
    chats = [demonstration(row) for row in random.choices(load("train"), k=1000 * 32)]
    build_warm_model(path, chats, TOOLS, batch_size=32)
