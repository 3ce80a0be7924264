"""Self-play: both sides of a game are the same policy, and each has a baseline of its own.

    accelerate launch train.py --task examples/nim.py --agent self_play --max_response_tokens 4 \\
        --prompts_per_step 16 --group_size 16 --lr 1e-3 --num_steps 24

    first    user       u           21 sticks are on the table; a move takes one, two or three
             assistant  2
    second   user       s           19; who takes the last one wins
             assistant  3

A game is one rollout, each move an output, and each side a unit: the moves of a side share the
reward of its game, 1 for a win, 0 for a loss. The first side is compared with the first sides of
the other games from the same number of sticks, the second with the second ones. A move that breaks
the rules loses.

In an evaluation the policy moves first, against a perfect player, from numbers where a win is
possible. A number is a letter, because that is one token. See docs/units.md#self-play."""

import random
from pathlib import Path

from agent_loop import AgentLoopBase, register
from examples.tiny_models import build_warm_model

OTHER = {"first": "second", "second": "first"}


def load(split: str) -> list[dict]:
    """Returns games: one from each number up to 21 for "train", 20 for "val"."""
    winnable = [n for n in range(21, 4, -1) if n % 4]
    numbers = {"train": range(1, 22), "val": (2 * winnable)[:20]}
    rows = []
    for i, sticks in enumerate(numbers[split]):
        rows.append({"prompt": shown(sticks), "extra_info": {"sticks": sticks, "game": i}})
    return rows


def shown(sticks: int) -> list[dict]:
    """Returns the prompt of a move: a letter."""
    return [{"role": "user", "content": chr(ord("a") + sticks - 1)}]


def allowed(sticks: int) -> list[str]:
    """Returns the moves that the rules allow."""
    return ["1", "2", "3"][:sticks]


def perfect_move(sticks: int, generator: random.Random) -> str:
    """Returns a move that leaves a multiple of four, or any move if there is none."""
    if sticks % 4:
        return str(sticks % 4)
    return generator.choice(allowed(sticks))


def reward(output, row: dict):
    """Is not called: the agent loop sets each reward."""


@register("self_play")
class SelfPlay(AgentLoopBase):
    """A game; in an evaluation the second side is the perfect player."""

    async def run(self, sampling_params, **row):
        """Returns an output for each of the policy's moves."""
        sticks = row["extra_info"]["sticks"]
        generator = random.Random(row["extra_info"]["game"])
        outputs = []
        side = "first"
        while sticks:
            if row["validate"] and side == "second":
                move = perfect_move(sticks, generator)
            else:
                trajectory = self.start({"prompt": shown(sticks)})
                await self.assistant_turn(trajectory, sampling_params)
                move = trajectory.messages[-1]["content"]
                outputs.append(trajectory.output())
                outputs[-1].unit = side
            if move not in allowed(sticks):
                break
            sticks -= int(move)
            side = OTHER[side]

        # The side to move has lost: it has no stick to take, or has broken the rules.
        for output in outputs:
            output.reward = float(output.unit != side)
        return outputs


def demonstration(sticks: int) -> list[dict]:
    """Returns a move of a poor teacher: three in ten are perfect, half of the others take one."""
    move = random.choice(["1", random.choice(allowed(sticks))])
    if random.random() < 0.3:
        move = perfect_move(sticks, random)
    return [*shown(sticks), {"role": "assistant", "content": move}]


def build_model(path: str | Path) -> None:
    """Writes the default model to the folder `path`: train.py calls it without a --model."""
    chats = [demonstration(random.randint(1, 21)) for _ in range(600 * 32)]
    build_warm_model(path, chats)
