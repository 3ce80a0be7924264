"""The task of examples/bisection.py; its model has seen three times as many of the teacher's games.

It shows what imitation alone reaches in the time of a training run: see docs/credit.md.

    python -m results.imitation games.jsonl     # the teacher's games, as rows for --train_files"""

import json
import random
import sys
from pathlib import Path

from examples import bisection
from examples.bisection import Game, load, reward, teach  # noqa: F401


def build_model(path: str) -> None:
    """Writes the default model to the folder `path`."""
    bisection.GAMES *= 3
    bisection.build_model(path)


def with_guesses(row: dict) -> dict:
    """Returns a row with a game of the teacher, which an imitating model learns from."""
    chat = teach(Game(row["extra_info"]["number"]))
    guesses = [message["content"] for message in chat if message["role"] == "assistant"]
    return row | {"demonstration": guesses}


if __name__ == "__main__":
    random.seed(0)
    rows = [*map(with_guesses, load("train"))]
    Path(sys.argv[1]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"wrote {len(rows)} games to {sys.argv[1]}")
