"""Every bench in its smallest form: it ends with code 0 and prints its table."""

import importlib.metadata
import json
import math
import re
import sys
from pathlib import Path

import pytest
from conftest import REPO, SMALL_CACHE, run

TRL = any(importlib.metadata.distributions(name="trl"))
RATIO = r"# \(# - #\)"
ENGINE = ["--engine_args", SMALL_CACHE]
OUT = ["--out", "FOLDER/rows.jsonl"]
SHORT = "--prompts 2 --group_size 2 --rounds 1".split()
# One step of train.py on few short trajectories. MODEL and FOLDER are replaced.
STEP = [
    *"--model MODEL --prompts_per_step 2 --group_size 2 --max_response_tokens 4".split(),
    *"--train_files FOLDER/few.jsonl --val_files FOLDER/few.jsonl".split(),
    *ENGINE,
]

# The script, its flags, and what it prints: patterns in which # stands for a finite number.
RUNS = {
    "gpu": (
        "--device cpu --cycles 2".split(),
        [
            r"\| sleep \| tiny \| 2 cycles \| # GiB freed, # lost",
            r"\| sync \| tiny \| .* \| # GB in # s, # times a plain copy",
            r"\| agree \| tiny \| .*float32 \| mean #, max # over # tokens",
            r"\| agree \| tiny \| 16 tokens, a sync, 24 \| mean #, max # over 40 tokens",
        ],
    ),
    "horizon": (
        "--template qwen2.5 --turns 10 --rounds 1".split(),
        [
            r"qwen2\.5 tool: append +# +# +# +#$",
            *[r"qwen2\.5 tool: TRL +# +# +# +#$"] * TRL,
            r"qwen2\.5 reasoning: verl +# +# +# +#$",
        ],
    ),
    "models": (["qwen2"], [r"\| qwen2 \| agrees \| # \| # \|"]),
    "rollout": (
        [*SHORT, *"--turns 2 --spread even --tokens 4".split(), *ENGINE],
        [
            "2 turns of 2 to 6 tokens, #M parameters",
            "round 1 +rollout +# tokens/s +LLM.generate +# +ratio #",
            f"ratio {RATIO}",
            "idle for #%",
        ],
    ),
    "tools": (
        [
            *"--model MODEL --trajectories 4 --group_size 2 --slots 2".split(),
            *"--tokens 2 --rounds 1 --slowest 0.1".split(),
            *ENGINE,
        ],
        [
            f"4 turns, no latency: lock step +flatrl is faster by {RATIO}",
            f"4 turns, slow tool: lock step +flatrl is faster by {RATIO}",
            "waiting alone, .* #",
        ],
    ),
    "trl": (
        [
            *SHORT,
            *"--model MODEL --tokens 4 --warm_up 1 --prompt_tokens 60 --trl".split(),
            *(["generate"] if TRL else []),
            *ENGINE,
        ],
        ["flatrl +# +# +# +# +#"] + [f"TRL, generate +# +# +# +# +# +{RATIO}"] * TRL,
    ),
    "update": (
        [*SHORT, *"--model MODEL --prompt_tokens 8 --response_tokens 4".split()],
        [
            f"^ +{side} +# s +{RATIO} +# s +{RATIO} +# tokens in # passes, # MB"
            for side in ("flatrl", "unshared", "bare")
        ],
    ),
    "zoo": (
        ["--only", "a layer not sent", "--", *STEP],
        [r"\| a layer not sent \| .*layers\.1\.", "1 of 1 named"],
    ),
}


def check_lines(printed: str, patterns: list[str]) -> None:
    """Asserts that each pattern is found, and that its numbers are finite."""
    for pattern in patterns:
        expression = pattern.replace("#", r"(-?[\d.,]+(?:e[+-]?\d+)?|-?inf|nan)")
        match = re.search(expression, printed, re.MULTILINE)
        assert match, f"{pattern} is not in:\n{printed}"
        numbers = [float(number.strip(",.").replace(",", "")) for number in match.groups()]
        assert all(math.isfinite(number) for number in numbers), match[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder in which the benches write; FOLDER in their flags."""
    path = tmp_path_factory.mktemp("bench")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {i}+1?"}],
            "reward_model": {"ground_truth": str(i + 1)},
        }
        for i in (10, 20)
    ]
    (path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def bench(folder, tiny_model, cache):
    """bench(script, *flags): what it prints. Raises AssertionError if it fails."""

    def run_bench(script: str, *flags: str) -> str:
        words = [flag.replace("MODEL", tiny_model).replace("FOLDER", str(folder)) for flag in flags]
        return run(script, *words, script="tests/bench_script.py", cache=cache)

    return run_bench


@pytest.mark.parametrize("name", RUNS)
def test_bench(name, bench):
    flags, patterns = RUNS[name]
    check_lines(bench(f"bench/{name}.py", *flags), patterns)


def test_a_figure_is_recorded_and_drawn(bench, folder, tiny_model, monkeypatch):
    """A training run by results/record.py, a bench's rows, and the curves of the run."""
    monkeypatch.syspath_prepend(str(REPO / "results"))
    import record

    words = [word.replace("MODEL", tiny_model).replace("FOLDER", str(folder)) for word in STEP]
    command = [sys.executable, "train.py", "--num_steps", "1", *words]
    monkeypatch.chdir(REPO)
    record.main("small/seed_0", command, folder)
    records = folder / "small/record.json"
    entry = json.loads(records.read_text())["seed_0"]
    records.write_text(json.dumps({"seed_0": {"label": "seed 0", "seconds": 0}}))
    metrics = folder / "small/metrics.jsonl"
    other = {"run": "seed_1", "step": 9, "reward/mean": 0.5, "eval/reward": 0.5}
    metrics.write_text(json.dumps(other) + "\n" + metrics.read_text())
    record.main("small/seed_0", command, folder)  # replaces all but the label
    first, *lines = record.read_lines(metrics)
    assert first == other
    assert [(line["run"], line["step"]) for line in lines] == [("seed_0", 0), ("seed_0", 1)]
    assert lines[1]["rollout/trajectories"] == 4 and "timing/rollout_s" not in lines[1]
    again = json.loads(records.read_text())["seed_0"]
    assert again["label"] == "seed 0" and again.keys() - entry.keys() == {"label"}
    assert again["command"].split()[1] == "train.py" and again["seconds"] > 0
    bench("results/curve.py", "FOLDER/pictures/curve.png", "FOLDER/small")
    *_, sampled, evaluated = json.loads((folder / "pictures/curve.png").read_text())
    assert [step for step, _ in sampled] == [1] and [step for step, _ in evaluated] == [0, 1]
    bench("results/credit_curve.py", "FOLDER/credit.png")
    first, *_ = json.loads((folder / "credit.png").read_text())
    assert [turn for turn, _ in first] == [1, 2, 3, 4]  # in turn 5, all guesses are equally good
    bench("bench/models.py", "no such architecture", *OUT)
    [row] = record.read_lines(folder / "rows.jsonl")
    assert row["verdict"] == "fails: KeyError: 'no such architecture'"


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
    start = (0, 31, 0)
    assert credit.value(teacher, (0, 2, 3)) == pytest.approx(7 / 9)  # three numbers, two guesses
    assert credit.action_value(teacher, (0, 2, 3), 1) == 1
    assert credit.value(teacher, start) == pytest.approx(0.5326, abs=1e-4)
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
    rows = {(row["estimator"], row["turn"]): row for row in rows}
    for turn in range(6):  # an estimator's scale does not matter
        mine, same = (rows[name, turn]["noise"] for name in ("mine", "drgrpo"))
        assert mine == pytest.approx(same, abs=1e-3)
    exact, returns, grpo = (rows[name, 0] for name in (*critics, "grpo"))
    assert exact["correlation"] > returns["correlation"] > grpo["correlation"] > 0.4
    assert exact["bias"] < 0.02 and returns["bias"] < 0.02
    assert rows["drgrpo", 0]["bias"] < 0.03  # its baseline is wrong in most states, which is noise
    error = exact["bias"] ** 2 + exact["noise"] ** 2
    explained = exact["truth"] ** 2 / (exact["truth"] ** 2 + error)
    assert exact["correlation"] ** 2 == pytest.approx(explained, abs=0.02)
