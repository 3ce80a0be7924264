"""Repeats a figure of the README or the docs, and says whether it holds.

    python bench/check.py                         # lists the figures
    python bench/check.py quick_start_0           # by its name: results/quick_start_0.json
    python bench/check.py all                     # one after the other; a day on two cores

A file of results/ has a figure's page (with the section: docs/lora.md#adapters-lora), its command,
and how it was measured: commit, machine, versions, seeds. Commands that belong together are joined
by &&. What they would write under runs/ goes into a folder of its own, and a task file that they
name and that is none of ours is that of the page. Each of the figure's numbers has

    shown           as it stands on the page
    from            where a repetition finds it, see below
    least, most     between these a repeated number holds: seeds, threads and machines differ

"from" is one of these. RUN, the name of a run's folder, is left out where the command trains once:

    [RUN: ]NAME@STEP        a metric after a step of the run that the command trains
    [RUN: ]max NAME         the largest of all its steps
    [RUN: ]sum KEY until NAME >= X      of the lines of rollouts/step_*.jsonl, up to the first step
                            whose metric is so large: a list's numbers (count: their number)
    [RUN: ]FILE REGEX       what the expression's group finds in a file of the run: rollouts/...
    seconds                 the command's
    REGEX                   what the expression's group finds in what the command prints
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

from common import REPO, first_step, metrics_of

RESULTS = REPO / "results"
LAUNCHERS = ["python"], ["accelerate", "launch"]  # whatever these are, this Python is taken
RUN = r"(?:(?P<run>[\w./-]+): )?"
METRIC = re.compile(RUN + r"(?P<name>\w+(?:/\w+)+)@(?P<step>\d+)")
LARGEST = re.compile(RUN + r"max (?P<name>\w+(?:/\w+)+)")
IN_FILE = re.compile(RUN + r"(?P<file>[\w/]+\.jsonl) (?P<regex>.+)")
SUM = re.compile(RUN + r"(?P<how>sum|count) (?P<key>[\w.]+) until (?P<name>\w+(?:/\w+)+) >= (?P<least>[\d.]+)")


def load(name: str) -> dict:
    """Returns the result of this name, or in this file. Raises SystemExit if there is none."""
    file = Path(name) if name.endswith(".json") else RESULTS / f"{name}.json"
    if not file.is_file():
        sys.exit(f"{file} is not there; python bench/check.py lists the figures")
    return json.loads(file.read_text())


def launcher_and_words(command: str) -> tuple[list[str], list[str]]:
    """Splits a command before its script: ["accelerate", "launch"], ["train.py", "--seed", "0"]."""
    words = shlex.split(command)
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), 0)
    return words[:at], words[at:]


def in_folder(word: str, page: str, folder: Path) -> str:
    """Returns a word of a command, with what is under runs/ in the folder, and so a task file that
    only the page has, whose blocks of Python are written there."""
    if word.removeprefix("./").startswith("runs/"):
        return str(folder / word.removeprefix("./"))
    if word.endswith(".py") and not (REPO / word).is_file():
        blocks = re.findall(r"```python\n(.*?)```", (REPO / page.partition("#")[0]).read_text(), re.DOTALL)
        (folder / word).write_text("\n".join(blocks))
        return str(folder / word)
    return word


def repeat(command: str, page: str, folder: Path) -> tuple[str, float]:
    """Runs a command's parts with this Python, its runs in the folder; returns what they printed,
    and their seconds. Raises SystemExit if one fails."""
    printed = ""
    start = time.perf_counter()
    for part in command.split(" && "):
        launcher, script = launcher_and_words(part)
        if launcher not in LAUNCHERS:
            sys.exit(f"this command is not repeated by bench/check.py: {command}")
        script = [script[0], *(in_folder(word, page, folder) for word in script[1:])]
        if script[0] == "train.py" and "--output_dir" not in script:
            script += ["--output_dir", str(folder / "runs" / "run")]
        done = subprocess.run([sys.executable, *script], cwd=REPO, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)  # fmt: skip
        printed += done.stdout
        if done.returncode:
            sys.exit(f"{printed}\n{part}\nended with code {done.returncode}")
    return printed, time.perf_counter() - start


def run_folder(folder: Path, name: str | None) -> Path:
    """Returns the folder of the run of this name, or of the only one, or one that is empty."""
    files = folder.rglob("metrics.jsonl")
    runs = [file.parent for file in files if not name or str(file.parent).endswith(f"/{name}")]
    return runs[0] if len(runs) == 1 else folder / "none"


def total(run: Path, how: str, key: str, name: str, least: float) -> list[float]:
    """Returns the sum of a key over the lines of a run's rollouts, see "from" above; [] if no step gets there.

    how: "sum" or, of lists, "count". key: "metrics.tool_calls" is in a line's `metrics`."""
    last = first_step(metrics_of(run), name, least)
    if last is None:
        return []
    values = []
    for file in (run / "rollouts").glob("step_*.jsonl"):
        if int(file.stem.removeprefix("step_")) > last:
            continue
        for line in map(json.loads, file.open()):
            value = line
            for part in key.split("."):
                value = value.get(part, {})
            if isinstance(value, list):
                values += value
            elif value:
                values.append(value)
    return [len(values) if how == "count" else sum(values)]


def found(source: str, printed: str, folder: Path, seconds: float) -> float:
    """Returns a number of a repetition, see "from" above. Raises SystemExit if it is not there."""
    if source == "seconds":
        return seconds
    values = []
    if match := METRIC.fullmatch(source):
        rows = metrics_of(run_folder(folder, match["run"]))
        values = [row[match["name"]] for row in rows if row["step"] == int(match["step"]) and match["name"] in row]
    elif match := LARGEST.fullmatch(source):
        rows = metrics_of(run_folder(folder, match["run"]))
        values = sorted((row[match["name"]] for row in rows if match["name"] in row), reverse=True)
    elif match := SUM.fullmatch(source):
        run = run_folder(folder, match["run"])
        values = total(run, match["how"], match["key"], match["name"], float(match["least"]))
    else:
        text, regex = printed, source
        if match := IN_FILE.fullmatch(source):
            file = run_folder(folder, match["run"]) / match["file"]
            text, regex = file.read_text() if file.is_file() else "", match["regex"]
        if match := re.search(regex, text):
            values = [float(match[1].replace(",", ""))]
    if not values:
        sys.exit(f"the repetition has no {source}")
    return values[0]


def check(name: str) -> bool:
    """Repeats a result, prints a line for each of its numbers, and returns whether all hold."""
    result = load(name)
    if not result["command"]:
        print(f"{name}: {result['page']}\n    it can't be repeated: {result['why']}")
        return True
    print(f"{name}: {result['page']}\n    {result['command']}", flush=True)
    all_hold = True
    with tempfile.TemporaryDirectory() as folder:
        printed, seconds = repeat(result["command"], result["page"], Path(folder))
        for number in result["numbers"]:
            value = found(number["from"], printed, Path(folder), seconds)
            holds = number["least"] <= value <= number["most"]
            all_hold &= holds
            print(f"{'holds' if holds else 'FAILS':>7}  {number['from']:<32} {value:.4g}, on the page "
                  f"{number['shown']}, holds from {number['least']:g} to {number['most']:g}", flush=True)  # fmt: skip
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
            command = result["command"] or f"not repeated: {result['why']}"
            print(f"{name:<24} {result['page']:<20} {result['measured_by']}\n    {command}")
        return
    if not all([check(name) for name in (there if names == ["all"] else names)]):
        sys.exit(1)


if __name__ == "__main__":
    main()
