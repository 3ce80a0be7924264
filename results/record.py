"""Runs a command and keeps what it measured in results/FIGURE.

    python results/record.py quick_start/seed_0 -- python train.py --seed 0

Recording a run again replaces it, except for its label: what a table calls the run. A training run
leaves the metrics in KEPT, a bench its rows.
"""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).resolve().parent
KEPT = (  # of the metrics of a training run, those that begin like this
    "step",
    "eval/reward",
    "reward/mean",
    "batch/",
    "rollout/logp_diff",
    "rollout/staleness_mean",
    "rollout/trajectories",
    "timing/step_s",
    "actor/observation_loss",
)


def read_lines(file: Path) -> list[dict]:
    """Returns the objects of a file of JSON lines; none if it does not exist."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def thin(row: dict) -> dict:
    """Returns the metrics in KEPT, with four digits."""
    kept = {name: value for name, value in row.items() if name.startswith(KEPT)}
    return kept | {name: float(f"{x:.4g}") for name, x in kept.items() if name != "step"}


def measure(command: list[str]) -> list[dict]:
    """Runs the command; returns its metrics or rows. A training run's own --output_dir is kept."""
    with tempfile.TemporaryDirectory() as folder:
        if "train.py" in command:
            if "--output_dir" not in command:
                command = [*command, "--output_dir", f"{folder}/run"]
            subprocess.run(command, check=True)
            run = command[command.index("--output_dir") + 1]
            return [thin(row) for row in read_lines(Path(run, "metrics.jsonl"))]
        subprocess.run([*command, "--out", f"{folder}/rows.jsonl"], check=True)
        return read_lines(Path(folder, "rows.jsonl"))


def main(name: str, command: list[str], results: Path = RESULTS) -> None:
    """Runs the command and writes the two files of results/FIGURE, name being FIGURE/RUN."""
    figure, _, run = name.partition("/")
    describe = ["git", "describe", "--always", "--dirty"]
    git = subprocess.run(describe, cwd=RESULTS, capture_output=True, text=True)
    started = time.perf_counter()
    lines = [{"run": run, **line} for line in measure(command)]
    record = {
        "command": shlex.join(command),
        "commit": git.stdout.strip(),  # "" where there is no repository
        "date": str(datetime.date.today()),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.platform()}",
        "seconds": round(time.perf_counter() - started),
    }
    (folder := results / figure).mkdir(parents=True, exist_ok=True)
    records = folder / "record.json"
    known = json.loads(records.read_text()) if records.exists() else {}
    if "label" in known.get(run, {}):
        record = {"label": known[run]["label"], **record}
    records.write_text(json.dumps(known | {run: record}, indent=2) + "\n")
    others = [line for line in read_lines(folder / "metrics.jsonl") if line["run"] != run]
    text = "\n".join(map(json.dumps, others + lines))
    (folder / "metrics.jsonl").write_text(text + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 4 or "/" not in sys.argv[1] or sys.argv[2] != "--":
        sys.exit("usage: python results/record.py FIGURE/RUN -- COMMAND")
    main(sys.argv[1], sys.argv[3:])
