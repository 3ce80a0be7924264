"""The task of examples/bisection.py; its model has seen three times as many of the teacher's games.

It shows what imitation alone reaches in the time of a training run: see docs/credit.md."""

from examples import bisection
from examples.bisection import load, reward  # noqa: F401


def build_model(path: str) -> None:
    """Writes the default model to the folder `path`."""
    bisection.GAMES *= 3
    bisection.build_model(path)
