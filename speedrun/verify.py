"""Runs a record of speedrun/README.md again, and then with another seed.

    python speedrun/verify.py speedrun/default.json

A record is a JSON file with a "command". The first time, what was measured is added to it, if both
seeds reach the goal. Later it is compared with that: on the same machine all digits must be the
same. The exit code is 1 if they differ, or if a run ends below the goal."""

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.append(str(REPO))
from flatrl.files import logged  # noqa: E402

GOAL = 0.9
SEED = 0
OTHER_SEED = 1


def cpu_seconds() -> float:
    """Returns the CPU time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(command: str, seed: int) -> dict:
    """Runs the command up to the goal; returns its times and the reward of each evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        # Without models in the cache, the time of making one counts.
        environment = os.environ | {"XDG_CACHE_HOME": folder}
        run = Path(folder, "run")
        command += f" --deterministic --stop_at_reward {GOAL} --seed {seed} --output_dir {run}"
        print(command, flush=True)
        cpu, start = cpu_seconds(), time.monotonic()
        subprocess.run(command, shell=True, check=True, cwd=REPO, env=environment)
        return {
            "seconds": round(time.monotonic() - start),
            "cpu_seconds": round(cpu_seconds() - cpu),
            "evaluations": {str(step): x for step, x in logged(run, "eval/reward").items()},
        }


def verify(file: Path) -> list[str]:
    """Runs the record with both seeds; returns what is wrong, a line each."""
    record = json.loads(file.read_text())
    problems = []
    measured = {}
    for seed in (SEED, OTHER_SEED):
        measured[str(seed)] = run = measure(record["command"], seed)
        *_, reached = run["evaluations"].values()
        print(f"seed {seed}: {reached:.3f} in {run['seconds']} s, {run['cpu_seconds']} s of CPU")
        if reached < GOAL:
            problems.append(f"seed {seed} ends with {reached:.3f}, below {GOAL}")
    if "runs" in record:
        for seed, run in record["runs"].items():
            if run["evaluations"] != measured[seed]["evaluations"]:
                problems.append(f"seed {seed}: other digits than in {file.name}")
    elif not problems:
        record |= {"machine": f"{os.cpu_count()} cores, {platform.machine()}", "runs": measured}
        file.write_text(json.dumps(record, indent=2) + "\n")
    return problems


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python speedrun/verify.py RECORD.json")
    found = verify(Path(sys.argv[1]))
    sys.exit("\n".join(found) or 0)
