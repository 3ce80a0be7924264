"""Runs a record of speedrun/README.md again, and then with another seed.

    python speedrun/verify.py speedrun/default.json

A record is a JSON file with a "command". The first time, what was measured is added to it, if both
seeds reach the goal. Later it is compared with that: on the same machine all digits must be the
same; another one gives other digits, so there only the goal counts. The exit code is 1 if digits
differ, or if a run fails or ends below the goal."""

import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.append(str(REPO))
from agent_loop import BadInput  # noqa: E402
from flatrl.bad_input import need, refusing  # noqa: E402
from flatrl.files import logged  # noqa: E402
from results.record import write_entries  # noqa: E402

GOAL = 0.9
SEED = 0
OTHER_SEED = 1


def this_machine() -> str:
    """Returns the number of cores and the processor, on which the digits of a run depend."""
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    processor = models[0] if models else platform.machine()
    return f"{os.cpu_count()} cores, {processor}"


def cpu_seconds() -> float:
    """Returns the CPU time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(command: str, seed: int) -> dict:
    """Runs the command up to the goal; returns its times and the reward of each evaluation.

    Raises BadInput if it fails or evaluates nothing."""
    with tempfile.TemporaryDirectory() as folder:
        # Without models in the cache, the time of making one counts.
        environment = os.environ | {"XDG_CACHE_HOME": folder}
        run = Path(folder, "run")
        command += f" --deterministic --stop_at_reward {GOAL} --seed {seed} --output_dir {run}"
        print(command, flush=True)
        cpu, start = cpu_seconds(), time.monotonic()
        code = subprocess.run(command, shell=True, cwd=REPO, env=environment).returncode
        need(code == 0, f"seed {seed}: the command ended with exit code {code}")
        rewards = logged(run, "eval/reward")
        need(rewards, f"seed {seed}: the run has no eval/reward; give its command --eval_every")
        return {
            "seconds": round(time.monotonic() - start),
            "cpu_seconds": round(cpu_seconds() - cpu),
            "evaluations": {str(step): reward for step, reward in rewards.items()},
        }


def verify(file: Path) -> list[str]:
    """Runs the record with both seeds; returns what is wrong, a line each.

    Raises BadInput if the file is no record, or as `measure` does."""
    with refusing(f'{file} is no record, a JSON file with a "command"'):
        record = json.loads(file.read_text())
        command = record["command"]
        runs = record.get("runs", {})
        digits = {seed: run["evaluations"] for seed, run in runs.items()}
    machine = this_machine()
    if runs and record.get("machine") != machine:
        print(f"{file.name} is from {record.get('machine')}, not {machine}: only the goal counts")
        digits = {}
    problems = []
    measured = {}
    for seed in (SEED, OTHER_SEED):
        measured[str(seed)] = run = measure(command, seed)
        *_, reached = run["evaluations"].values()
        print(f"seed {seed}: {reached:.3f} in {run['seconds']} s, {run['cpu_seconds']} s of CPU")
        if reached < GOAL:
            problems.append(f"seed {seed} ends with {reached:.3f}, below {GOAL}")
        if digits.get(str(seed), run["evaluations"]) != run["evaluations"]:
            problems.append(f"seed {seed}: other digits than in {file.name}")
    if not runs and not problems:
        record |= {"machine": machine, "runs": measured}
        write_entries(file, record)
    return problems


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python speedrun/verify.py RECORD.json")
    try:
        found = verify(Path(sys.argv[1]))
    except BadInput as error:
        found = [f"verify.py: error: {error}"]
    sys.exit("\n".join(found) or 0)
