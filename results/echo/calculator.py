"""examples/calculator.py, with a model that predicts what it is told (all_tokens.py)."""

from all_tokens import build

from examples import calculator as example
from examples.calculator import SYSTEM_PROMPT, TOOLS, load, reward  # noqa: F401


def build_model(path) -> None:
    """Writes the model to the folder `path`."""
    build(example, path)
