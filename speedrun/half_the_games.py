"""The task of examples/bisection.py; its model has seen half as many of the teacher's games."""

from examples import bisection
from examples.bisection import load, reward  # noqa: F401


def build_model(path: str) -> None:
    """Writes the default model to the folder `path`."""
    bisection.GAMES //= 2
    bisection.build_model(path)
