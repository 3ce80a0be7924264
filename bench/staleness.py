"""Trajectories per second of whole training steps with slow tools: asynchronous (--max_staleness) against synchronous.

    python bench/staleness.py [--steps 12] [--rounds 2] [--slowest 5] [-- further flags of train.py]

Runs train.py, A B A B ..., on the built-in task whose tool takes 0-5 s (uniform, seeded by the round). Both sides train
on the same number of trajectories; timed are rollouts and updates, from the first to the last step, so that filling
the pipeline at the start and emptying it at the end count; evaluations and start-up don't. Ratios are taken round by
round. What the policy samples, and so its calls, has the same distribution on both sides, but is not the same.

This file is the task too. It learns as the built-in one does, asynchronously:

    python train.py --task bench/staleness.py --max_staleness 2 --oversample 1.5
"""

import argparse
import asyncio
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).parent.parent
sys.path.insert(0, str(REPO))

from examples import calculator as example
from examples.calculator import SYSTEM_PROMPT, build_model, load, reward  # noqa: F401

latencies = random.Random(int(os.environ.get("STALENESS_SEED", 0)))


@functools.wraps(example.calculator)
async def calculator(expression: str) -> str:
    await asyncio.sleep(latencies.uniform(0, float(os.environ.get("STALENESS_SLOWEST", 5))))
    return example.calculator(expression)


TOOLS = [calculator]

ASYNCHRONOUS = ["--max_staleness", "2", "--oversample", "1.5"]


def train(flags: list[str], seed: int, slowest: float) -> list[dict]:
    """The metrics of each step of a run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "train.py", "--task", "bench/staleness.py", "--eval_every", "0", "--save_every", "0",
                   "--show_every", "0", "--output_dir", str(out), *flags]  # fmt: skip
        env = {**os.environ, "STALENESS_SEED": str(seed), "STALENESS_SLOWEST": str(slowest)}
        done = subprocess.run(command, cwd=REPO, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            sys.exit(done.stdout)
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--slowest", type=float, default=5.0, help="seconds")
    parser.add_argument("flags", nargs="*", help="of train.py, for both sides, after --")
    options = parser.parse_args()
    rates: dict[str, list[float]] = {"synchronous": [], "asynchronous": []}
    for i in range(1, options.rounds + 1):
        for name, own in (("synchronous", []), ("asynchronous", ASYNCHRONOUS)):
            flags = ["--num_steps", str(options.steps), *own, *options.flags]
            rows = train(flags, i, options.slowest)

            def total(key: str, rows=rows) -> float:
                return sum(row.get(key, 0) for row in rows)

            seconds, n = total("timing/step_s"), total("rollout/trajectories")
            rates[name].append(n / seconds)
            rollout_s = total("timing/rollout_s")
            idle = sum(row["throughput/idle_share"] * row["timing/rollout_s"] for row in rows) / rollout_s
            print(
                f"round {i}, {name:12}: {n:.0f} trajectories in {seconds:.1f} s, {n / seconds:.1f}/s; rollouts "
                f"{rollout_s:.1f} s, of which idle {idle:.0%}; updates {total('timing/train_s'):.1f} s; "
                f"calls/trajectory {total('rollout/tool_calls') / len(rows):.2f}; staleness mean "
                f"{total('rollout/staleness_mean') / len(rows):.2f}, max "
                f"{max(row.get('rollout/staleness_max', 0) for row in rows)}; "
                f"failed {total('rollout/failed_agent_loop'):.0f}; "
                f"reward of the last step {rows[-1]['reward/mean']:.3f}",
                flush=True,
            )
    ratios = [a / s for a, s in zip(rates["asynchronous"], rates["synchronous"], strict=True)]
    for name, values in rates.items():
        print(f"{name:12} {statistics.median(values):7.1f} trajectories/s (median of {len(values)})")
    print(f"asynchronous / synchronous {statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})")


if __name__ == "__main__":
    main()
