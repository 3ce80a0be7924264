"""Kills a run while it saves, for tests/test_folder.py, and compares two runs.

`kills.py die N VICTIM FLAGS` is train.py, whose rank VICTIM is killed just before its N-th
operation on a file under checkpoints/.
"""

import json
import os
import random
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).parent.parent
OPERATIONS = 10  # n is at most this: about what rank 0 does in one save
TIMINGS = ("timing/", "throughput/", "memory/")  # the metrics that differ between equal runs


def die_at(n: int) -> None:
    """From now on this process gets SIGKILL before its n-th operation on a path under
    checkpoints/."""
    n_left = n

    def hook(event: str, arguments: tuple) -> None:
        """Is called before every operation that Python audits."""
        nonlocal n_left
        if not event.startswith(("open", "os.", "shutil.")):
            return
        if any("/checkpoints/" in f"{argument}/" for argument in arguments[:2]):
            n_left -= 1
            if n_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kill_loop(
    run: Callable[..., list[int]], folder: Path, kills: int, ranks: int = 1, seed: int = 0
) -> int:
    """Calls run(n, rank, *flags) -> exit codes `kills` times, each of which is to end by a
    kill, then run(0, 0, *flags) to the end; returns how many were killed."""
    generator = random.Random(seed)
    n_killed = 0
    for kills_left in range(kills, -1, -1):
        resume = ["--resume"] if any(folder.glob("checkpoints/step_*")) else []
        victim = generator.randrange(ranks)
        n = generator.randint(
            1, OPERATIONS if victim == 0 else 2
        )  # other ranks than 0 only write their part
        codes = run(n if kills_left else 0, victim, *resume)
        if any(codes):
            n_killed += 1
        assert kills_left or not any(codes), codes
    return n_killed


def metrics_without_times(run: Path) -> list[dict]:
    rows = map(json.loads, (run / "metrics.jsonl").open())
    return [
        {name: value for name, value in row.items() if not name.startswith(TIMINGS)} for row in rows
    ]


def sampled_tokens(file: Path) -> list | None:
    """Returns the token ids and logprobs of each line of a file of rollouts, None where there
    is no such file."""
    if not file.exists():
        return None
    rows = list(map(json.loads, file.open()))
    return [[row["response_ids"], row["response_logprobs"]] for row in rows]


def differences(folder: Path, other: Path) -> list[str]:
    """Names what is not the same to the last bit in two runs: their metrics, files of
    rollouts, and final weights."""
    found = []
    if metrics_without_times(folder) != metrics_without_times(other):
        found.append("metrics")
    names = {file.name for run in (folder, other) for file in (run / "rollouts").glob("step_*")}
    for name in sorted(names):
        if sampled_tokens(folder / "rollouts" / name) != sampled_tokens(other / "rollouts" / name):
            found.append(name)
    weights = [(run / "final/model.safetensors").read_bytes() for run in (folder, other)]
    if weights[0] != weights[1]:
        found.append("weights")
    return found


if __name__ == "__main__":
    n, victim = map(int, sys.argv[2:4])
    if n and int(os.environ.get("RANK", 0)) == victim:
        die_at(n)
    sys.argv = ["train.py", *sys.argv[4:]]
    sys.path[0] = str(REPO)
    runpy.run_path(str(REPO / "train.py"), run_name="__main__")
