"""A task for the tests: a random model, two short turns, a dense reward."""

import asyncio
import os
import random

import data
from agent_loop import AgentLoopBase, register
from examples import calculator
from examples.tiny_models import init_model


def load(split: str) -> list[dict]:
    """The first TINY_TASK_SHOWN prompts of a run have a demonstration."""
    if split == "val":
        return calculator.load(split)[:8]
    rows = calculator.load(split)[:24]
    for number in data.prompt_order(24, 0, int(os.environ.get("TINY_TASK_SHOWN", 0)), 0):
        rows[number]["demonstration"] = ["12", "<answer>3</answer>"]
    return rows


def reward(output, row) -> float:
    """The share of digits in the text. TINY_TASK_REWARD=raise makes the grader fail for some rows,
    =any pays 1 for any digit, so that many groups have no signal."""
    if os.environ.get("TINY_TASK_REWARD") == "any":
        return float(any(c.isdigit() for c in output.text))
    if os.environ.get("TINY_TASK_REWARD") == "raise" and row["index"] % 3 == 0:
        raise RuntimeError("the grader broke")
    return sum(c.isdigit() for c in output.text) / max(1, len(output.text))


def build_model(path: str) -> None:
    init_model(path)


@register("two_turns")
class TwoTurns(AgentLoopBase):
    """Two turns of at most eight tokens with a given question between them."""

    async def run(self, sampling_params, **row):
        trajectory = self.start(row)
        for turn in range(2):
            await self.assistant_turn(trajectory, {**sampling_params, "max_tokens": 8})
            if turn == 0:
                await self.between(trajectory)
                ids = self.tokenizer("and?", add_special_tokens=False)["input_ids"]
                trajectory.add_given(ids)
                trajectory.user_turns += 1
        trajectory.stop_reason = "stop"
        return trajectory.output()

    async def between(self, trajectory) -> None: ...


@register("slow_turns")
class SlowTurns(TwoTurns):
    """Waits between its turns for up to TINY_TASK_PAUSE seconds. The file TINY_TASK_DIARY gets a
    + from each trajectory that starts, and a - from each that ends."""

    async def run(self, sampling_params, **row):
        self.write("+")
        try:
            return await super().run(sampling_params, **row)
        finally:
            self.write("-")

    async def between(self, trajectory) -> None:
        await asyncio.sleep(random.random() * float(os.environ["TINY_TASK_PAUSE"]))

    def write(self, sign: str) -> None:
        with open(os.environ["TINY_TASK_DIARY"], "a") as diary:
            diary.write(sign)
