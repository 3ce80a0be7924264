"""Every bench in its smallest form: it ends with code 0 and prints its table."""

import os
import re
import subprocess
import sys

import pytest
from conftest import REPO, SMALL_CACHE

ENGINE = ["--engine_args", SMALL_CACHE]
SHORT = "--prompts 2 --group_size 2 --rounds 1 --tokens 4".split()
RATIO = r"# \(# - #\)"
# A bench with its flags, and a line of its table, in which # stands for a finite number.
TABLES = [
    (
        ["gpu", *"--size tiny --cycles 2".split()],
        r"agree \| logprobs, float32 \| mean #, max # (?s:.*) \| sleep \| 2 cycles \| # GiB freed",
    ),
    (
        ["models", "qwen3_moe"],
        r"\| qwen3_moe \| agrees \| # \| # \|",
    ),
    (
        ["rollout", *SHORT, *"--turns 2 --spread tail".split()],
        f"^ratio {RATIO}, the engine is idle for #% of a rollout",
    ),
    (
        ["trl", *SHORT, *"--warm_up 1 --prompt_tokens 60 --trl".split(), *ENGINE],
        "^flatrl +# +# +# +# +#",
    ),
    (
        ["update", *"--rounds 1 --cases 1".split()],
        "^ +bare +score # s, # +update # s, #$",
    ),
]


@pytest.mark.parametrize("words, pattern", TABLES, ids=[words[0] for words, _ in TABLES])
def test_bench(words, pattern):
    name, *flags = words
    command = [sys.executable, REPO / f"bench/{name}.py", *flags]
    env = os.environ | {"ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    expression = pattern.replace("#", r"-?[\d.,]+(?:e[+-]?\d+)?")
    assert re.search(expression, done.stdout, re.MULTILINE), done.stdout
