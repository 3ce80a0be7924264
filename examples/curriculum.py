"""A curriculum: a sampler chooses the next row, here one whose groups disagree.

    accelerate launch train.py --task examples/curriculum.py

The questions are the calculator's, but fifteen in sixteen of the 512 training rows have no right
answer, like some rows of real data. They are never rewarded, so they teach nothing. The sampler
finds out by trying which rows these are."""

import random

from examples import calculator
from examples.calculator import SYSTEM_PROMPT, TOOLS, build_model, reward  # noqa: F401


def load(split: str) -> list[dict]:
    """Returns 512 of the calculator's rows; only every sixteenth training row is solvable."""
    rows = calculator.load(split)[:512]
    for i, row in enumerate(rows):
        if split == "train" and i % 16:
            row["reward_model"]["ground_truth"] = str(10**30)  # more digits than an answer may have
    return rows


def sampler(history: list[list]) -> int:
    """Returns the index of the training row to draw next.

    history has a list for each group that was drawn so far: [row, step, reward, reward, ...].
    While a group is in progress it has no rewards, and its row is not drawn again.

    Half of the draws are rows that were never tried, as long as there are any. Nine in ten of the
    others are the row with different rewards that was not drawn for longest; one in ten is a row
    with equal rewards, which may differ by now."""
    # The choice depends on the history alone, so that a resumed run draws the same rows.
    generator = random.Random(len(history))
    last_rewards = {}  # of each row, in the order of the last draws
    for row, _, *rewards in history:
        last_rewards.pop(row, None)
        last_rewards[row] = rewards
    untried = sorted(set(range(512)) - last_rewards.keys())
    different = []
    equal = []
    for row, rewards in last_rewards.items():
        n_values = len(set(rewards))
        if n_values > 1:
            different.append(row)
        elif n_values == 1:
            equal.append(row)
    if untried and (generator.random() < 0.5 or not different):
        return generator.choice(untried)
    if equal and (generator.random() < 0.1 or not different):
        return generator.choice(equal)
    return different[0] if different else generator.randrange(512)
