"""examples/maze.py, with a model that predicts what it is told (all_tokens.py)."""

from all_tokens import build

from examples import maze as example
from examples.maze import INTERACTIONS, SYSTEM_PROMPT, load, reward  # noqa: F401


def build_model(path) -> None:
    """Writes the model to the folder `path`."""
    build(example, path)
