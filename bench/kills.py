"""Kills a run again and again while it saves, resumes it, and compares it with one left alone.

    python bench/kills.py [--kills 30] [--ranks 2] [--shard] [--tp 2] [any other flag of train.py]

Kills are aimed, not timed. A killed process dies by SIGKILL just before its n-th operation on
a file under checkpoints/ (it opens, renames, deletes, ...), and n is drawn anew each time. Of
several ranks one is drawn and killed; the others find out. After --kills of them the run goes
on to its end. Printed is how many were killed, and what is different from the undisturbed run:
metrics, rollouts or weights, each compared to the last bit. The exit code is 1 if anything is.
tests/test_folder.py does the same with a few kills.
"""

import argparse
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import common  # first: it puts the repository on the path

REPO = Path(__file__).parent.parent
OPERATIONS = 10  # n is at most this: about what rank 0 does in one save
TIMINGS = ("timing/", "throughput/", "memory/")  # the metrics that differ between equal runs
FLAGS = ["--task", "tests/tiny_task.py", "--agent", "two_turns", "--deterministic", "--prompts_per_step", "4",
         "--group_size", "4", "--max_prompt_tokens", "32", "--max_response_tokens", "32", "--tokens_per_micro_batch",
         "256", "--eval_every", "5", "--save_every", "1", "--keep_checkpoints", "1", "--show_every", "0",
         "--engine_args", json.dumps({"kv_cache_memory_bytes": 1 << 25})]  # fmt: skip


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


def kill_loop(run: Callable[..., list[int]], folder: Path, kills: int, ranks: int = 1, seed: int = 0) -> int:
    """Calls run(n, rank, *flags) -> exit codes `kills` times, each of which is to end by a
    kill, then run(0, 0, *flags) to the end; returns how many were killed."""
    generator = random.Random(seed)
    n_killed = 0
    for kills_left in range(kills, -1, -1):
        resume = ["--resume"] if any(folder.glob("checkpoints/step_*")) else []
        victim = generator.randrange(ranks)
        n = generator.randint(1, OPERATIONS if victim == 0 else 2)  # other ranks than 0 only write their part
        codes = run(n if kills_left else 0, victim, *resume)
        if any(codes):
            n_killed += 1
        assert kills_left or not any(codes), codes
    return n_killed


def metrics_without_times(run: Path) -> list[dict]:
    rows = common.metrics_of(run)
    return [{name: value for name, value in row.items() if not name.startswith(TIMINGS)} for row in rows]


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


def start(ranks: int, n: int, victim: int, *flags: str) -> list[int]:
    """Runs train.py on so many ranks and returns their exit codes; `victim` dies at its n-th
    operation (0: never)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        env = dict(os.environ, OMP_NUM_THREADS="1")
        if ranks > 1:
            env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}  # fmt: skip
        command = [sys.executable, __file__, "die", str(n), str(victim), *map(str, flags)]
        process = subprocess.Popen(command, cwd=REPO, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        processes.append(process)
    return [process.wait() for process in processes]


def main() -> None:
    """Makes the undisturbed run and the killed one, and prints how they differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=1)
    options, train_flags = parser.parse_known_args()
    flags = [*FLAGS, *train_flags]
    if "--num_steps" not in train_flags:
        flags += ["--num_steps", str(2 * options.kills)]
    with tempfile.TemporaryDirectory() as temporary:
        undisturbed = Path(temporary, "undisturbed")
        killed = Path(temporary, "killed")
        codes = start(options.ranks, 0, 0, *flags, "--output_dir", undisturbed)
        assert not any(codes), codes

        def run(n: int, victim: int, *resume: str) -> list[int]:
            return start(options.ranks, n, victim, *flags, "--output_dir", killed, *resume)

        n_killed = kill_loop(run, killed, options.kills, options.ranks)
        different = differences(undisturbed, killed)
        print(f"{n_killed} of {options.kills} killed; different: {different or 'nothing'}")
    sys.exit(bool(different))


if __name__ == "__main__":
    if sys.argv[1:2] == ["die"]:  # a rank of `start`: die N VICTIM, then train.py's flags
        n, victim = map(int, sys.argv[2:4])
        if n and int(os.environ.get("RANK", 0)) == victim:
            die_at(n)
        sys.argv = ["train.py", *sys.argv[4:]]
        sys.path[0] = str(REPO)
        runpy.run_path(str(REPO / "train.py"), run_name="__main__")
    else:
        main()
