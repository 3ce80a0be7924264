r"""Self-distillation: the calculator's questions, each with a `hint` at the answer.

    accelerate launch train.py --task examples/hints.py --algo opsd

With --algo opsd the policy is its own teacher. It samples after the question, and then scores the
sampled tokens once more, after the question with the hint. The task's reward is only logged.

    user       What is 37*48?                 the policy samples after this
    user       What is 37*48?\n\nCall 37*48.  and scores its sample after this, too

The built-in model is the calculator's, but has read hints: in every second conversation of its
warm-up the question has one, and the teacher then always calls."""

import random
from pathlib import Path

from examples import calculator
from examples.calculator import SYSTEM_PROMPT, TOOLS, expression_of, reward
from examples.tiny_models import build_warm_model
from flatrl.hints import told_prompt

__all__ = ["SYSTEM_PROMPT", "TOOLS", "reward"]


def load(split: str) -> list[dict]:
    """Returns the calculator's rows, each with a hint: the call of the worked solution."""
    rows = calculator.load(split)
    for row in rows:
        expression = expression_of(row)
        row["hint"] = f"Call {expression}."
    return rows


def demonstration(row: dict) -> list[dict]:
    """Returns a conversation: the calculator's teacher; or, told the hint, one who calls."""
    if random.random() < 0.5:
        return calculator.demonstration(row)
    chat = calculator.demonstration(row)
    while len(chat) < 4:  # the teacher has guessed
        chat = calculator.demonstration(row)
    prompt = told_prompt({**row, "prompt": chat[:2]})
    return prompt + chat[2:]


def build_model(path: str | Path) -> None:
    """Writes a model to the folder `path`, warmed up on questions with and without a hint."""
    chats = [demonstration(row) for row in random.choices(load("train"), k=1200 * 32)]
    build_warm_model(path, chats, TOOLS)
