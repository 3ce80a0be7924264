"""Trains every preset of --algo on the built-in task: docs/algorithms.md's table of rewards.

    python bench/algos.py [--steps 40] [--jobs 2] [--only grpo ppo] [--seeds 1] [--out runs/algos] [-- train.py's flags]

The presets of THREE_SEEDS are trained with three seeds each, the others with one. --jobs is
how many runs go on at a time; they share the cores. Runs that are complete in --out are not
repeated. Each run is evaluated greedily on the 512 held-out questions after every second step.
The teacher of opd is by default what grpo with seed 0 has made of its model in the same --out.
The table has a row for each preset: the reward before and after, the sampled reward of the
last ten steps, the steps until both rewards reach --at, and the number of trajectories. opsd
wants a task whose rows have hints: -- --task examples/hints.py.
"""

import argparse
import concurrent.futures
import os
import sys
from pathlib import Path
from statistics import fmean

from common import REPO, THREADS_ASKED_FOR, first_step, metrics_of, split_flags, train_once

from train import PRESETS

THREE_SEEDS = ("grpo", "ppo", "dapo", "gspo", "sapo", "gigpo", "opd", "opsd")


def table_row(algo: str, runs: list[list[dict]], at: float) -> str:
    """Returns a preset's row of the table, made from the metrics of its runs, one run a seed."""
    cells = []
    for rows in runs:
        trajectories = sum(row.get("rollout/trajectories", 0) for row in rows)
        sampled = [row["reward/mean"] for row in rows if "reward/mean" in row]  # not before the first step
        cells.append((
            f"{rows[0]['eval/reward']:.3f}",
            f"{rows[-1]['eval/reward']:.3f}",
            f"{fmean(sampled[-10:]):.3f}",
            str(first_step(rows, "eval/reward", at) or "-"),
            str(first_step(rows, "reward/mean", at) or "-"),
            f"{trajectories:,}",
        ))  # fmt: skip
    columns = [", ".join(column) for column in zip(*cells, strict=True)]
    return f"| `{algo}` | {' | '.join(columns)} |"


def main() -> None:
    """Trains what --only names, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    without_columns = [algo for algo in PRESETS if algo not in ("opsd", "sft")]
    parser.add_argument("--only", nargs="+", default=without_columns, choices=list(PRESETS),
                        help="these presets; default: all but opsd and sft, whose rows need hints, demonstrations")
    parser.add_argument("--seeds", type=int, help="for every preset")
    parser.add_argument("--teacher", type=Path, help="opd's: a model folder")
    parser.add_argument("--at", type=float, default=0.9, help="the reward whose first step is counted")
    parser.add_argument("--out", type=Path, default=REPO / "runs" / "algos")
    words, train_flags = split_flags(sys.argv[1:])
    options = parser.parse_args(words)
    cores = len(os.sched_getaffinity(0))
    threads = THREADS_ASKED_FOR or str(max(1, cores // options.jobs))

    def run(algo: str, seed: int) -> list[dict]:
        """Trains one preset with one seed; returns its metrics."""
        flags = ["--algo", algo, "--seed", str(seed), "--eval_every", "2", *train_flags]
        if algo == "opd":
            teacher = options.teacher or options.out / "grpo-0" / "final"
            flags += ["--ref_model", str(teacher.resolve())]
        rows = train_once(options.out / f"{algo}-{seed}", options.steps, flags, threads)
        print(f"{algo} seed {seed}: eval reward {rows[-1]['eval/reward']:.3f} at the end", flush=True)
        return rows

    seeds = {}
    for algo in options.only:
        seeds[algo] = range(options.seeds or (3 if algo in THREE_SEEDS else 1))
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        jobs = [pool.submit(run, algo, seed) for algo in options.only for seed in seeds[algo]]
        for job in concurrent.futures.as_completed(jobs):
            job.result()

    print(f"\n| `--algo` | eval reward before | after | sampled, mean of the last 10 steps | "
          f"steps to eval {options.at} | steps to sampled {options.at} | trajectories |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for algo in options.only:
        runs = [metrics_of(options.out / f"{algo}-{seed}") for seed in seeds[algo]]
        print(table_row(algo, runs, options.at))


if __name__ == "__main__":
    main()
