"""Any task of reasoning-gym by its name: the package makes the questions and checks the answers.

    pip install reasoning-gym
    accelerate launch train.py --task examples/reasoning_gym_task.py        # easy sums, a tiny model
    export REASONING_GYM=basic_arithmetic REASONING_GYM_ARGS='{"max_terms": 3}'
    accelerate launch train.py --task examples/reasoning_gym_task.py \\
        --model Qwen/Qwen2.5-0.5B-Instruct
    python -m examples.reasoning_gym_task                                   # lists the tasks

REASONING_GYM names the task. REASONING_GYM_ARGS, a JSON object, sets the fields of its
configuration. REASONING_GYM_ROWS is the number of training questions. The reward is the package's
own score of what stands in the last <answer>...</answer>, from 0 to 1: some tasks pay a part. The
built-in model, for the sums, is warmed up by a teacher who is right on half of the questions. (The
file is not called reasoning_gym.py, because `import reasoning_gym` would find it instead of the
package.)"""

import functools
import json
import os
import random
import re
from pathlib import Path

from agent_loop import BadInput
from examples.tiny_models import build_warm_model

try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
except ImportError:
    raise BadInput("examples/reasoning_gym_task.py needs: pip install reasoning-gym") from None

SYSTEM_PROMPT = "End with <answer>your answer</answer>."
# 200 sums, because the built-in model is tiny.
EASY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
NAME = os.environ.get("REASONING_GYM", "chain_sum")
ARGS = os.environ.get("REASONING_GYM_ARGS", json.dumps(EASY if NAME == "chain_sum" else {}))
ROWS = {"val": 128, "train": int(os.environ.get("REASONING_GYM_ROWS", 2000))}
# A question's own seed is the sum of its split's and its number.
SEEDS = {"val": 0, "train": 10**6, "teacher": 2 * 10**6}


@functools.cache
def dataset(split: str, rows: int):
    """Returns the package's data set of a split: an item is generated when it is asked for.

    Items are the same on every call. Raises BadInput for a wrong name or wrong arguments."""
    try:
        return reasoning_gym.create_dataset(NAME, seed=SEEDS[split], size=rows, **json.loads(ARGS))
    except (ValueError, TypeError, AssertionError) as error:
        names = "" if NAME in DATASETS else f"; the tasks are {', '.join(sorted(DATASETS))}"
        raise BadInput(f"REASONING_GYM={NAME} REASONING_GYM_ARGS={ARGS}: {error}{names}") from None


def load(split: str) -> list[dict]:
    """Returns the rows of a split; no question of "val" is in "train"."""
    held_out = set()
    if split == "train":
        held_out = {item["question"] for item in dataset("val", ROWS["val"])}
    return [
        {
            "prompt": [{"role": "user", "content": item["question"]}],
            "data_source": NAME,
            "reward_model": {"ground_truth": str(item["answer"])},
            "extra_info": {"index": i, "split": split},
        }
        for i, item in enumerate(dataset(split, ROWS[split]))
        if item["question"] not in held_out
    ]


def reward(output, row: dict) -> float:
    """Returns the package's score of the last answer; 0.0 without one.

    The item is generated again, because it need not be JSON and so can't be part of the row."""
    last = output.messages[-1] if output.messages else {}
    answers = re.findall(r"<answer>(.*?)</answer>", last.get("content") or "", re.DOTALL)
    if last.get("role") != "assistant" or not answers:
        return 0.0
    info = row["extra_info"]
    questions = dataset(info["split"], ROWS[info["split"]])
    return float(questions.score_answer(answers[-1].strip(), questions[info["index"]]))


def demonstration(item: dict, other: dict) -> list[dict]:
    """Returns a chat that answers the question of `item`, one time in two by the answer of `other`."""
    answer = random.choice([item, other])["answer"]
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": item["question"]},
        {"role": "assistant", "content": f"<answer>{answer}</answer>"},
    ]


def build_model(path: str | Path) -> None:
    """Writes the default model to the folder `path`."""
    items = list(dataset("teacher", 200 * 16))
    chats = [demonstration(item, random.choice(items)) for item in items]
    build_warm_model(path, chats)


if os.environ.keys() & {"REASONING_GYM", "REASONING_GYM_ARGS"}:
    del build_model  # train.py builds it once for all runs, and it is for the sums: give --model

if __name__ == "__main__":
    print(*sorted(DATASETS), sep="\n")
