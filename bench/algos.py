"""Every preset of --algo on the built-in task: rewards at the end, steps to 0.9: docs/algorithms.md's table.

    python bench/algos.py [--steps 40] [--jobs 2] [--only grpo ppo] [--seeds 1] [--out runs/algos] [-- train.py's flags]

Those of THREE_SEEDS over three seeds, the others over one; --jobs runs at a time, sharing the cores. Runs that are
complete in --out are not repeated. Greedy evaluation on the 512 held-out questions every second step. opd's --teacher
is by default what grpo with seed 0 made of its model, in the same --out.
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

REPO = Path(__file__).parent.parent
sys.path.insert(0, str(REPO))

import train

THREE_SEEDS = ("grpo", "ppo", "dapo", "gspo", "sapo", "gigpo", "opd")


def rows_of(folder: Path) -> list[dict]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def first_step(rows: list[dict], name: str, least: float) -> int | None:
    return next((row["step"] for row in rows if row.get(name, 0) >= least), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=list(train.PRESETS), choices=list(train.PRESETS))
    parser.add_argument("--seeds", type=int, help="for every preset")
    parser.add_argument("--teacher", type=Path, help="opd's: a model folder")
    parser.add_argument("--at", type=float, default=0.9, help="the reward whose first step is counted")
    parser.add_argument("--out", type=Path, default=REPO / "runs" / "algos")
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // options.jobs))

    def run(algo: str, seed: int) -> None:
        folder = options.out / f"{algo}-{seed}"
        command = [sys.executable, "train.py", "--algo", algo, "--seed", str(seed), "--num_steps", str(options.steps),
                   "--eval_every", "2", "--save_every", "0", "--show_every", "0", "--output_dir", str(folder.resolve()),
                   *flags]  # fmt: skip
        if algo == "opd":
            teacher = options.teacher or options.out / "grpo-0" / "final"
            command += ["--ref_model", str(teacher.resolve())]
        if rows_of(folder)[-1:] and rows_of(folder)[-1]["step"] == options.steps:
            if json.loads((folder / "args.json").read_text())["command"] != command[1:]:
                raise RuntimeError(f"{folder} was run with other flags: give another --out")
            return
        env = {**os.environ, "OMP_NUM_THREADS": threads}
        done = subprocess.run(command, cwd=REPO, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")
        print(f"{algo} seed {seed}: {done.stdout.strip().splitlines()[-1]}", flush=True)

    seeds = {algo: range(options.seeds or (3 if algo in THREE_SEEDS else 1)) for algo in options.only}
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        jobs = [pool.submit(run, algo, seed) for algo in options.only for seed in seeds[algo]]
        for job in concurrent.futures.as_completed(jobs):
            job.result()

    at = options.at
    print(f"\n| `--algo` | eval reward before | after | sampled, mean of the last 10 steps | steps to eval {at} | "
          f"steps to sampled {at} | trajectories |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for algo in options.only:
        runs = [rows_of(options.out / f"{algo}-{seed}") for seed in seeds[algo]]
        columns = (
            [f"{rows[0]['eval/reward']:.3f}" for rows in runs],
            [f"{rows[-1]['eval/reward']:.3f}" for rows in runs],
            [f"{fmean(row['reward/mean'] for row in rows[-10:]):.3f}" for rows in runs],
            [str(first_step(rows, "eval/reward", at) or "-") for rows in runs],
            [str(first_step(rows, "reward/mean", at) or "-") for rows in runs],
            [f"{sum(row.get('rollout/trajectories', 0) for row in rows):,}" for rows in runs],
        )
        print(f"| `{algo}` | " + " | ".join(", ".join(column) for column in columns) + " |")


if __name__ == "__main__":
    main()
