"""Every script of bench/ in its smallest form: it ends with code 0 and prints its table, with
finite numbers in it.

No time is asserted. The runs that do not depend on each other go on two at a time; each is a
process of its own.
"""

import concurrent.futures
import importlib.metadata
import json
import math
import re
from pathlib import Path

import pytest
from conftest import HANGS, REPO, SMALL_CACHE, started, zygote

TRL = any(importlib.metadata.distributions(name="trl"))
DATASETS = any(importlib.metadata.distributions(name="datasets"))
RATIO = r"# \(# - #\)"
ENGINE = ["--engine_args", SMALL_CACHE]
# One step of train.py on few short trajectories. MODEL and FOLDER are replaced.
STEP = ["--model", "MODEL", "--prompts_per_step", "2", "--group_size", "2", "--max_response_tokens", "4",
        "--val_files", "FOLDER/rows.jsonl", *ENGINE]  # fmt: skip
FEW_ROWS = [*STEP, "--train_files", "FOLDER/rows.jsonl"]
KILLED = ["--num_steps", "1", "--model", "MODEL", "--prompts_per_step", "1", "--group_size", "2"]

# Script, flags, and what it prints: regular expressions in which # stands for a finite number.
RUNS = {
    "check": (["FOLDER/tiny.json"], [
        r"^  holds  reward/mean@1 +#, on the page 0.5, holds from 0 to 1$", r"^  holds  seconds +#, on the page 1 s",
        r"^  holds  .*\(0\)/1 +0, on the page 1, holds from 0 to 0$",
    ]),
    "algos": (
        ["--only", "opd", "--seeds", "1", "--steps", "1", "--teacher", "MODEL", "--out", "FOLDER/algos",
         "--", *FEW_ROWS],
        ["opd seed 0: eval reward # at the end", r"\| `opd` \| # \| # \| # \| \S+ \| \S+ \| # \|"],
    ),
    "curriculum": (
        ["--seeds", "1", "--steps", "1", "--at", "0", "--out", "FOLDER/curriculum", "--", *STEP],
        [r"\| the sampler \| # \| # \| # \|", r"\| the shuffle \| # \| # \| # \|"],
    ),
    "endpoint": (
        ["--trajectories", "2", "--rounds", "1", "--agents", "http", *ENGINE],
        ["in process +# +#$", f"http +# +# +{RATIO}"],
    ),
    "gpu": (
        ["--device", "cpu", "--tiny", "--sizes", "tiny", "--cycles", "1", "--only", "suspended", "update", "run"],
        [r"\| suspended \| tiny \| level 1: .* \| mean #, max # over # tokens \|", r"\| update \| .* \| # tokens/s",
         r"a bare loop.* \| # s a step, ours #: #x \|", r"ends with code 0 \| # s the second step, of it sync # \|"],
    ),
    "host": (
        ["--trajectories", "16", "--tokens", "64"],
        ["write +# s", "pack +# s", "all +# s; rollouts file # MB",
         "7B +on 8 GPUs: rollout and update +# s, the host's part is #% of it"],
    ),
    "kills": (["--kills", "1", *KILLED], ["1 of 1 killed; different: nothing"]),
    "load": (
        ["--ranks", "2", "--layers", "1"],
        ["rank 1: # GiB at most, # its share when loaded", "the weights are the same each time"],
    ),
    "logprobs": (
        ["--T", "8", "--V", "512", "--H", "16", "--repeats", "2"],
        ["plain +# +# +# +# +# +#%", "token_logprobs +# +# +# +# +# +#%", "time: # times plain"],
    ),
    "models": (["qwen2"], [r"\| qwen2 \| agrees \| # \| # \|"]),
    "mutants": (
        ["--files", "data.py", "--mutants", "2", "--tests", "tests/test_units.py"],
        ["^no change: # tests pass in # s$", r"^data.py:\d+  .*  ->  .*\n    (?:killed by|survived)",
         "^data.py: # of 2 killed$"],
    ),
    "plan": (["--model", "0.5B"], ["total +# +# +# +# +# +#$", "it fits"]),
    "real": (
        ["run", "--model", "MODEL", "--steps", "1", "--prompts", "2", "--group_size", "2",
         "--out", "FOLDER/flatrl_0.jsonl", *ENGINE],
        ["'step': 0, 'seconds': #, 'cpu': #, 'held_out': #",
         "'step': 1, 'seconds': #, 'cpu': #, 'reward': #, 'held_out': #"],
    ),
    "rollout": (
        ["--turns", "2", "--prompts", "2", "--group_size", "2", "--tokens", "4", "--rounds", "1", *ENGINE],
        ["round 1 +rollout +# tokens/s", r"median ratio # \(min #, max #\)", "idle share of the engine .*: median #"],
    ),
    "rollout, spread": (
        ["--turns", "2", "--spread", "even", "--prompts", "2", "--group_size", "2", "--tokens", "4", "--rounds", "1",
         *ENGINE],
        ["2 turns of 2 to 6 tokens", "round 1 +rollout +# tokens/s, idle # +LLM.generate +# +ratio #"],
    ),
    "rollout, many": (
        ["--prompts", "1", "--many", "3", "--group_size", "2", "--tokens", "4", "--rounds", "1",
         "--width", "128", *ENGINE],
        ["1 turns of 4 tokens, #M parameters",
         "round 1 +rollout +# tokens/s, idle #   of 3 prompts +# +ratio #", r"median ratio # \(min #, max #\)"],
    ),
    "rollout, sync": (
        ["--sync_mb", "1", "--model", "MODEL", "--rounds", "1", *ENGINE],
        ["round 1 +sync +# ms +plain copy +# ms +ratio #", r"median ratio # \(min #, max #\)"],
    ),
    "rows": (["--rows", "50", "--folder", "FOLDER/rows"], [r"\| # \| # \| list \| # \| # \| # \| # \| # \|"]),
    "staleness": (
        ["--steps", "1", "--rounds", "1", "--slowest", "0.1", "--", *FEW_ROWS],
        ["^synchronous +# trajectories/s", "^asynchronous +# trajectories/s", f"asynchronous / synchronous {RATIO}"],
    ),
    "start": (
        ["--rounds", "1", "--only", "a refused flag", "--base", str(REPO)],
        [r"a refused flag +# \(# - #\) s   base # \(# - #\) s   ratio # \(# - #\)"],
    ),
    "stress": (
        ["--prompts", "3", "--group_size", "2", "--deadline", "0.1", *ENGINE],
        ["6 trajectories in, 6 out, {} failed", "# s; the deadlines allow # s", "tool calls #, errors #, timeouts #",
         r"create 6, release 6 \(of which failed #\)"],
    ),
    "symbols": ([], ["^site-packages: 0 missing$"]),
    "zoo": (
        ["--only", "a reward that is constant", "--", *FEW_ROWS],
        [r"\| a reward that is constant \| 1 \| step 1 taught nothing: ", "1 of 1 named"],
    ),
    "tools": (
        ["--model", "MODEL", "--trajectories", "4", "--group_size", "2", "--slots", "2", "--tokens", "2",
         "--rounds", "1", "--slowest", "0.1", *ENGINE, *([] if TRL else ["--no_trl"])],
        ["4 turns, slow tool: flatrl +# +# *$", f"4 turns, slow tool: lock step +# +# +{RATIO}",
         f"one call at a time +# +# +{RATIO}", "bound of lock step .*: #"],
    ),
    "trl": (
        ["--model", "MODEL", "--trl", *(["generate"] if TRL else []), "--prompts", "2", "--group_size", "2",
         "--tokens", "4", "--rounds", "1", "--warm_up", "1", "--prompt_tokens", "60", *ENGINE],
        ["flatrl +# +# +# +# +# +#"] + [f"TRL, generate +# +# +# +# +# +# +{RATIO}"] * TRL,
    ),
    "update": (
        ["--model", "MODEL", "--prompts", "2", "--group_size", "2", "--prompt_tokens", "8", "--response_tokens", "4",
         "--rounds", "1", "--sides", "unshared", "bare", *(["TRL"] if TRL else [])],
        [f"^ +{side} +# s +{RATIO} +# s +{RATIO} +# tokens in # passes, +# MB" for side in
         ("flatrl", "unshared", "bare", *(["TRL"] if TRL else []))],
    ),
}  # fmt: skip


def check_lines(printed: str, patterns: list[str]) -> None:
    """Asserts that each pattern is found in what was printed, and that the numbers in it are
    finite."""
    for pattern in patterns:
        expression = pattern.replace("#", r"(-?[\d.,]+(?:e[+-]?\d+)?|-?inf|nan)")
        match = re.search(expression, printed, re.MULTILINE)
        assert match, f"{pattern} is not in:\n{printed}"
        for number in match.groups():
            assert math.isfinite(float(number.strip(",.").replace(",", ""))), match[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model) -> Path:
    """Where the benches write; FOLDER in their flags."""
    path = tmp_path_factory.mktemp("bench")
    rows = [{"prompt": [{"role": "user", "content": f"What is {i}+1?"}], "reward_model": {"ground_truth": str(i + 1)}}
            for i in (10, 20)]  # fmt: skip
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = " ".join(FEW_ROWS).replace(SMALL_CACHE, f"'{SMALL_CACHE}'")
    flags = flags.replace("MODEL", tiny_model).replace("FOLDER", str(path))
    numbers = [{"shown": "0.5", "from": "reward/mean@1", "least": 0, "most": 1},
               {"shown": "1", "from": r"\n +(0)/1 ", "least": 0, "most": 0},
               {"shown": "1 s", "from": "seconds", "least": 0, "most": HANGS}]  # fmt: skip
    result = {"page": "README.md", "command": f"accelerate launch train.py --num_steps 1 {flags}", "numbers": numbers}
    (path / "tiny.json").write_text(json.dumps(result))
    return path


@pytest.fixture(scope="module")
def bench(folder, tiny_model, cache):
    """bench(script, *flags): what it prints. Raises AssertionError if it fails."""

    def run(script: str, *flags: str) -> str:
        words = [flag.replace("MODEL", tiny_model).replace("FOLDER", str(folder)) for flag in flags]
        with started(f"bench/{script}.py", *words, script="tests/bench_script.py", cache=cache) as process:
            printed, _ = process.communicate(timeout=HANGS)
        assert process.returncode == 0, printed
        return printed

    zygote(cache)  # by this thread, before others ask for it
    return run


@pytest.fixture(scope="module")
def printed(bench, request):
    """printed(name): what a run of RUNS prints. Those whose tests were chosen go on two at a
    time from now on."""
    chosen = [item.callspec.params.get("name") for item in request.session.items
              if item.module is request.module and hasattr(item, "callspec")]  # fmt: skip
    runs = {}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:

        def result(name: str) -> str:
            if name not in runs:
                runs[name] = pool.submit(bench, name.split(",")[0], *RUNS[name][0])
            return runs[name].result()

        for name in RUNS:
            if name in chosen:
                runs[name] = pool.submit(bench, name.split(",")[0], *RUNS[name][0])
        yield result
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", RUNS)
def test_bench(name, printed):
    check_lines(printed(name), RUNS[name][1])


def test_complete_runs_are_not_repeated(bench, printed, folder):
    metrics = folder / "algos/opd-0/metrics.jsonl"
    first = printed("algos")
    before = metrics.stat().st_mtime_ns
    assert bench("algos", *RUNS["algos"][0]) == first and metrics.stat().st_mtime_ns == before
    with pytest.raises(AssertionError, match="was run with other flags: give another --out"):
        bench("algos", *RUNS["algos"][0], "--lr", "1")


def test_pictures(bench, printed, folder):
    """Of curves, each a list of (x, y); tests/bench_script.py has matplotlib's stand-in."""
    printed("algos")
    bench("curve", "FOLDER/pictures/curve.png", "FOLDER/algos/opd-0")
    sampled, evaluated = json.loads((folder / "pictures/curve.png").read_text())
    assert [step for step, _ in sampled] == [1] and [step for step, _ in evaluated] == [0, 1]
    printed("real")
    bench("real", "draw", "FOLDER/real.png", "FOLDER/flatrl_0.jsonl")
    sampled, held_out = json.loads((folder / "real.png").read_text())
    assert len(sampled) == 1 and len(held_out) == 2
    assert all(math.isfinite(x) and math.isfinite(y) for x, y in [*evaluated, *sampled, *held_out])


def test_a_section_of_gpu_that_fails_leaves_a_line(bench):
    row = r"\| sync \| nothing \| FAILED \| exit code 1: .*BadInput: --model nothing: give a folder"
    with pytest.raises(AssertionError, match=row):
        bench("gpu", "--device", "cpu", "--tiny", "--only", "sync", "--sizes", "nothing")


@pytest.mark.skipif(TRL, reason="TRL is installed")
@pytest.mark.parametrize("script", ["trl", "tools", "update"])
def test_without_trl_it_says_what_to_install(script, bench):
    with pytest.raises(AssertionError, match="trl.* missing: pip install trl==1.16.0 datasets"):
        bench(script)


def test_every_bench_is_tested():
    scripts = {file.stem for file in (REPO / "bench").glob("*.py")} - {"common"}
    assert {name.split(",")[0] for name in RUNS} | {"curve", "two_hops"} == scripts  # two_hops: tests/test_real.py
