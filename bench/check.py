"""Repeats a figure of the README or the docs, and says whether it holds.

    python bench/check.py                         # lists the figures
    python bench/check.py quick_start_0           # by its name: results/quick_start_0.json
    python bench/check.py all                     # one after the other; hours

A file of results/ has a figure's page, its command, and how it was measured: commit, machine,
versions, seeds. Each of its numbers has

    shown           as it stands on the page
    from            where a repetition finds it: NAME@STEP, a metric after a step of the run that the
                    command trains; max NAME, of all its steps; seconds, the command's; or a regular
                    expression on what the command prints, whose group is the number
    least, most     between these a repeated number holds: seeds, threads and machines differ
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import REPO, metrics_of

RESULTS = REPO / "results"


def load(name: str) -> dict:
    """Returns the result of this name, or in this file. Raises SystemExit if there is none."""
    file = Path(name) if name.endswith(".json") else RESULTS / f"{name}.json"
    if not file.is_file():
        sys.exit(f"{file} is not there; python bench/check.py lists the figures")
    return json.loads(file.read_text())


def repeat(command: str) -> tuple[str, list[dict], float]:
    """Runs a command with this Python; returns what it printed, the rows of metrics.jsonl that it
    wrote if it trains, and its seconds. Raises SystemExit if it fails."""
    words = shlex.split(command)
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), 0)
    launcher, script = words[:at], words[at:]
    if launcher not in (["python"], ["accelerate", "launch"]):
        sys.exit(f"this command is not repeated by bench/check.py: {command}")
    with tempfile.TemporaryDirectory() as folder:
        if script[0] == "train.py":
            script += ["--output_dir", folder]
        start = time.perf_counter()
        done = subprocess.run([sys.executable, *script], cwd=REPO, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)  # fmt: skip
        seconds = time.perf_counter() - start
        if done.returncode:
            sys.exit(f"{done.stdout}\n{command}\nended with code {done.returncode}")
        return done.stdout, metrics_of(Path(folder)), seconds


def found(source: str, printed: str, rows: list[dict], seconds: float) -> float:
    """Returns a number of a repetition, see "from" above. Raises SystemExit if it is not there."""
    if source == "seconds":
        return seconds
    values = []
    if source.startswith("max "):
        values = [max(row[source[4:]] for row in rows if source[4:] in row)]
    elif re.fullmatch(r"\w+/\w+@\d+", source):
        name, _, step = source.partition("@")
        values = [row[name] for row in rows if row["step"] == int(step) and name in row]
    elif match := re.search(source, printed):
        values = [float(match[1].replace(",", ""))]
    if not values:
        sys.exit(f"the repetition has no {source}")
    return values[0]


def check(name: str) -> bool:
    """Repeats a result, prints a line for each of its numbers, and returns whether all hold."""
    result = load(name)
    print(f"{name}: {result['page']}\n    {result['command']}", flush=True)
    repetition = repeat(result["command"])
    all_hold = True
    for number in result["numbers"]:
        value = found(number["from"], *repetition)
        holds = number["least"] <= value <= number["most"]
        all_hold &= holds
        print(f"{'holds' if holds else 'FAILS':>7}  {number['from']:<32} {value:.4g}, on the page {number['shown']}, "
              f"holds from {number['least']:g} to {number['most']:g}", flush=True)  # fmt: skip
    return all_hold


def main() -> None:
    """Lists the figures, or checks those named; exits with 1 if one does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="of results/, without .json; or all; or a file's path")
    names = parser.parse_args().names
    there = sorted(file.stem for file in RESULTS.glob("*.json"))
    if not names:
        for name in there:
            result = load(name)
            print(f"{name:<24} {result['page']:<20} {result['measured_by']}\n    {result['command']}")
        return
    if not all([check(name) for name in (there if names == ["all"] else names)]):
        sys.exit(1)


if __name__ == "__main__":
    main()
