"""Every bench in its smallest form: it ends with code 0 and prints its table."""

import json
import re
import sys

import pytest
from conftest import REPO, SMALL_CACHE, run

RATIO = r"# \(# - #\)"
ENGINE = ["--engine_args", SMALL_CACHE]
SHORT = "--prompts 2 --group_size 2 --rounds 1".split()
# The script, its flags (MODEL is replaced), and a line of its table, in which # stands for a finite
# number.
RUNS = {
    "gpu": (
        "--device cpu --cycles 2".split(),
        r"logprobs, float32 \| mean #, max # (?s:.*) \| sleep \| 2 cycles \| # GiB freed, # lost",
    ),
    "horizon": (
        "--template qwen2.5 --turns 10 --rounds 1".split(),
        r"qwen2\.5 reasoning: verl +# +# +# +#$",
    ),
    "models": (
        ["qwen3_moe", "nothing"],  # one with experts, and one that does not exist
        r"\| qwen3_moe \| agrees \| # \| # \|\n\| nothing \| fails: KeyError: 'nothing' \|  \|  \|",
    ),
    "rollout": (
        [
            *SHORT,
            *"--turns 2 --spread tail --tokens 4 --sliding_window 8 --cpu_seconds".split(),
            *ENGINE,
        ],
        "prefill apart: # s a turn, of LLM.generate #",
    ),
    "trl": (
        [*SHORT, *"--model MODEL --tokens 4 --warm_up 1 --prompt_tokens 60 --trl".split(), *ENGINE],
        "flatrl +# +# +# +# +#",
    ),
    "update": (
        [*SHORT, *"--model MODEL --prompt_tokens 8 --response_tokens 4".split()],
        f"^ +bare +# s +{RATIO} +# s +{RATIO} +# tokens in # passes, # MB",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_bench(name, tiny_model, cache):
    flags, pattern = RUNS[name]
    words = [tiny_model if flag == "MODEL" else flag for flag in flags]
    printed = run(f"bench/{name}.py", *words, script="tests/forking.py", cache=cache)
    expression = pattern.replace("#", r"(-?[\d.,]+(?:e[+-]?\d+)?)")
    assert re.search(expression, printed, re.MULTILINE), printed


OWN_ESTIMATOR = """
from losses import estimator, grpo_advantages

@estimator("mine")
def mine(rewards, groups):
    return 3 * grpo_advantages(rewards, groups, normalize_std=False)
"""


def test_credit_is_compared_with_values_known_by_hand(monkeypatch, tmp_path, registries):
    monkeypatch.syspath_prepend(str(REPO / "bench"))
    import credit

    teacher, nim = credit.GAMES["bisection"], credit.GAMES["nim"]
    assert credit.value(teacher, (0, 2, 3)) == pytest.approx(7 / 9)  # three numbers, two guesses
    assert credit.action_value(teacher, (0, 2, 3), 1) == 1
    assert credit.value(teacher, (0, 31, 0)) == pytest.approx(0.5326, abs=1e-4)
    assert credit.value(nim, (4,)) == 0
    assert credit.action_value(nim, (5,), 1) == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)

    monkeypatch.setattr(credit, "GAMES", {"nim": nim})
    (tmp_path / "own.py").write_text(OWN_ESTIMATOR)
    critics = ["ppo, exact critic, lam 0", "ppo, exact critic, lam 1"]
    flags = ["--task", str(tmp_path / "own.py"), "--prompts", "12", "--rounds", "4"]
    flags += ["--out", str(tmp_path / "rows"), "--estimators", "mine", "drgrpo", "grpo", *critics]
    monkeypatch.setattr(sys, "argv", ["credit.py", *flags])
    credit.main()
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    rows = {row["estimator"]: row for row in rows}
    noise = [rows[name]["noise"] for name in ("mine", "drgrpo")]
    assert noise[0] == pytest.approx(noise[1], abs=1e-3)  # an estimator's scale does not matter
    totals = {
        name: {key: row[key][0] for key in ("correlation", "truth", "bias", "noise")}
        for name, row in rows.items()
    }
    exact, returns, grpo = (totals[name] for name in (*critics, "grpo"))
    assert exact["correlation"] > returns["correlation"] > grpo["correlation"] > 0.4
    assert exact["bias"] < 0.02 and returns["bias"] < 0.02
    assert totals["drgrpo"]["bias"] < 0.03  # its baseline is wrong in most states, which is noise
    error = exact["bias"] ** 2 + exact["noise"] ** 2
    explained = exact["truth"] ** 2 / (exact["truth"] ** 2 + error)
    assert exact["correlation"] ** 2 == pytest.approx(explained, abs=0.02)
