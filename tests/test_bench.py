"""Every bench in its smallest form: it ends with code 0 and prints its table."""

import re

import pytest
from conftest import SMALL_CACHE, run

RATIO = r"# \(# - #\)"
ENGINE = ["--engine_args", SMALL_CACHE]
SHORT = "--prompts 2 --group_size 2 --rounds 1".split()
# The script, its flags (MODEL is replaced), and a line of its table, in which # stands for a finite
# number.
RUNS = {
    "gpu": (
        "--size tiny --cycles 2".split(),
        r"logprobs, float32 \| mean #, max # (?s:.*) \| sleep \| 2 cycles \| # GiB freed, # lost",
    ),
    "models": (
        ["qwen3_moe", "nothing"],  # one with experts, and one that does not exist
        r"\| qwen3_moe \| agrees \| # \| # \|\n\| nothing \| fails: KeyError: 'nothing' \|  \|  \|",
    ),
    "rollout": (
        [*SHORT, *"--turns 2 --spread tail --tokens 4".split(), *ENGINE],
        f"^ratio {RATIO}, the engine is idle for #% of a rollout",
    ),
    "trl": (
        [*SHORT, *"--model MODEL --tokens 4 --warm_up 1 --prompt_tokens 60 --trl".split(), *ENGINE],
        "flatrl +# +# +# +# +#",
    ),
    "update": (
        [*SHORT, *"--model MODEL --prompt_tokens 8 --response_tokens 4".split()],
        f"^ +bare +# s +{RATIO} +# s +{RATIO}$",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_bench(name, tiny_model, cache):
    flags, pattern = RUNS[name]
    words = [tiny_model if flag == "MODEL" else flag for flag in flags]
    printed = run(f"bench/{name}.py", *words, script="tests/forking.py", cache=cache)
    expression = pattern.replace("#", r"(-?[\d.,]+(?:e[+-]?\d+)?)")
    assert re.search(expression, printed, re.MULTILINE), printed
