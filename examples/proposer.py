"""Proposer and solver: one policy makes up problems, and solves them.

    accelerate launch train.py --task examples/proposer.py --max_response_tokens 8 \\
        --prompts_per_step 16 --lr 1e-3 --num_steps 40

    proposer    user       7+?          it proposes a problem that begins so
                assistant  8
    solver 0    user       7+8=         SOLVERS attempts at it
                assistant  15
    solver 1    user       7+8=
                assistant  14

A rollout is a problem and the attempts at it. An attempt is right or wrong, and is compared with
the others at its own problem. The proposer's reward is 1 if half of the attempts are right, and
falls to 0 towards all and none, as in R-Zero (https://arxiv.org/abs/2508.05004). It is compared
with the other problems that begin with the same number. A proposal that is no problem has reward 0.

In an evaluation the policy solves given problems. The built-in model has seen a poor teacher, who
can only add 0, 1 and 2. Of other sums he is mostly one short. Problems that all attempts solve, or
none, teach nothing; the proposer learns to avoid them."""

import asyncio
import random
import re
from pathlib import Path
from statistics import fmean

from agent_loop import AgentLoopBase, register
from examples.tiny_models import build_warm_model

SOLVERS = 6


def user(text: str) -> list[dict]:
    """Returns a prompt."""
    return [{"role": "user", "content": text}]


def load(split: str) -> list[dict]:
    """Returns the first numbers of problems for "train", whole problems for "val"."""
    texts = [f"{a}+?" for a in range(20)]
    if split == "val":
        texts = [f"{a}+{b}=" for a in range(20) for b in range(10)]
    return [{"prompt": user(text), "agent_name": "proposer"} for text in texts]


def reward(output, row: dict):
    """Is not called: the agent loop sets each reward."""


@register("proposer")
class Proposer(AgentLoopBase):
    """A problem, and the attempts at it; in an evaluation a single attempt."""

    async def run(self, sampling_params, **row):
        """Returns an output for the proposal, and one for each attempt."""
        if row["validate"]:
            return await self.attempt(row["prompt"], sampling_params)
        proposal = await self.turn(row["prompt"], sampling_params)
        proposal.unit = "proposer"
        proposal.reward = 0.0
        number = proposal.messages[-1]["content"]
        if not re.fullmatch("[0-9]", number):
            return proposal

        problem = row["prompt"][0]["content"].replace("?", f"{number}=")
        attempts = await asyncio.gather(
            *(self.attempt(user(problem), sampling_params) for _ in range(SOLVERS))
        )
        for i, attempt in enumerate(attempts):
            attempt.unit = f"solver {i}"
            attempt.group = f"{row['rollout_n']}/solver"  # only this rollout's attempts
        solved = fmean(attempt.reward for attempt in attempts)
        proposal.reward = 1 - 2 * abs(solved - 0.5)
        return [proposal, *attempts]

    async def turn(self, prompt: list[dict], sampling_params: dict):
        """Returns the output of one turn of the policy."""
        trajectory = self.start({"prompt": prompt})
        await self.assistant_turn(trajectory, sampling_params)
        return trajectory.output()

    async def attempt(self, prompt: list[dict], sampling_params: dict):
        """Returns the output of an attempt at a problem, with its reward."""
        output = await self.turn(prompt, sampling_params)
        a, b = re.findall("[0-9]+", prompt[0]["content"])
        output.reward = float(output.messages[-1]["content"] == str(int(a) + int(b)))
        return output


def demonstration() -> list[dict]:
    """Returns a proposal, or the solution of a poor teacher."""
    a = random.randrange(20)
    b = random.randrange(10)
    if random.random() < 0.5:
        return [*user(f"{a}+?"), {"role": "assistant", "content": str(b)}]
    answer = a + b
    if b > 2 and random.random() < 0.7:
        answer = random.choice([answer - 1, answer - 1, a + random.randrange(10)])
    return [*user(f"{a}+{b}="), {"role": "assistant", "content": str(answer)}]


def build_model(path: str | Path) -> None:
    """Writes the default model to the folder `path`: train.py calls it without a --model."""
    build_warm_model(path, [demonstration() for _ in range(600 * 32)])
