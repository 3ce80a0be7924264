"""A known data set: GSM8K, grade-school word problems, with a calculator.

    accelerate launch train.py --task examples/gsm8k.py         # the tiny model shows that it runs
    accelerate launch train.py --task examples/gsm8k.py --model Qwen/Qwen2.5-0.5B-Instruct \\
        --train_files ~/data/gsm8k/train.parquet --val_files ~/data/gsm8k/test.parquet \\
        --max_prompt_tokens 1024 --max_response_tokens 1024

The files are those of verl's examples/data_preprocess/gsm8k.py. Without them there are 24 problems,
in data/gsm8k_sample.jsonl."""

import json
import re
from decimal import Decimal
from pathlib import Path

from examples.calculator import build_model, calculator  # noqa: F401  (train.py calls build_model)

SYSTEM_PROMPT = (
    'Solve the problem step by step with the calculator. End with "#### N", N the answer.'
)
TOOLS = [calculator]

DATA = Path(__file__).parent / "data" / "gsm8k_sample.jsonl"
HELD_OUT = 8


def load(split: str) -> list[dict]:
    """Returns the bundled problems in verl's columns: the last 8 for "val", 16 for "train"."""
    problems = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    problems = {"train": problems[:-HELD_OUT], "val": problems[-HELD_OUT:]}[split]
    rows = []
    for i, problem in enumerate(problems):
        answer = find_answer(problem["answer"])
        row = {
            "prompt": [{"role": "user", "content": problem["question"]}],
            "data_source": "gsm8k_sample",
            "reward_model": {"style": "rule", "ground_truth": str(answer)},
            "extra_info": {"split": split, "index": i, **problem},
        }
        rows.append(row)
    return rows


# The possessive *+, ++ and ?+ never backtrack, so a search takes time linear in the text.
NUMBER = r"((?:[-+]?\$?|\$[-+])(?:[0-9][0-9,]*+(?:\.[0-9]++)?+|\.[0-9]++))"
ANSWER = re.compile(rf"####\s*+{NUMBER}|<answer>\s*+{NUMBER}[^<]*+</answer>")


def find_answer(text: str) -> Decimal | None:
    """Returns the number right after "####" or at the start of <answer>...</answer>, or None.

    "####" is GSM8K's own mark; the tiny model writes <answer>. The last one counts: a model may
    correct itself, and a list of guesses is worth no more than its last. "$" and "," are stripped,
    and anything after the number ("apples", "%") is ignored."""
    numbers = [match[1] or match[2] for match in ANSWER.finditer(text)]
    return Decimal(re.sub("[$,]", "", numbers[-1])) if numbers else None


def grade(text: str, ground_truth: str) -> dict:
    """Returns {"score", "format"}: 1.0 for the right number, and for any number at all.

    Only the score is a reward; the format is logged."""
    answer = find_answer(text)
    right = answer is not None and answer == Decimal(str(ground_truth).replace(",", ""))
    return {"score": float(right), "format": float(answer is not None)}


def reward(output, row: dict) -> dict:
    """Returns the grade of the last message, which must be the assistant's."""
    last = output.messages[-1] if output.messages else {}
    text = last.get("content") if last.get("role") == "assistant" else None
    return grade(text or "", row["reward_model"]["ground_truth"])
