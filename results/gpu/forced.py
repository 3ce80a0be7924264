"""The task of the run `step`: calculator's questions, and rewards that differ in every group."""

from examples.calculator import load  # noqa: F401


def reward(output, row: dict) -> float:
    return sum(output.response_ids) % 101 / 101
