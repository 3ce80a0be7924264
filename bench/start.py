"""Measures the seconds from a command to its first answer: --help, a flag that is refused, the default job's opening
lines, which say what is about to be trained.

    python bench/start.py [--rounds 3]
    python bench/start.py --base FOLDER         # the same of another checkout, in turns, and the ratio of each two

The job is `accelerate launch train.py`, and `python train.py`, which is the same without the launcher; it is ended at
its opening lines. Its model must have been built before: a first job whose seconds don't count does that.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import REPO, spread

# name -> (words after the Python, what a line of the answer begins with, which ends the measurement)
CASES = {
    "--help": (["train.py", "--help"], "usage: "),
    "a refused flag": (["train.py", "--lrr", "1"], "train.py: error: "),
    "python train.py": (["train.py", "--num_steps", "1"], "grpo: "),
    "accelerate launch train.py": (["-m", "accelerate.commands.launch", "train.py", "--num_steps", "1"], "grpo: "),
}


def seconds(checkout: Path, words: list[str], last_line: str) -> float:
    """Returns the seconds until a process of this Python, started in the checkout, has printed a line that begins like
    this. What is left of it is killed.

    Raises RuntimeError if it ends without such a line."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *words, "--output_dir", f"{folder}/run"]
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=checkout, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   start_new_session=True)  # fmt: skip
        printed = ""
        for line in process.stdout:
            printed += line
            if line.startswith(last_line):
                elapsed = time.perf_counter() - started
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return elapsed
        process.wait()
    raise RuntimeError(f"{' '.join(command)} printed no line that begins with {last_line!r}:\n{printed[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", type=Path, help="another checkout, to be compared with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES])
    options = parser.parse_args()
    checkouts = [checkout for checkout in (options.base, REPO) if checkout]
    for case in options.only:
        for checkout in checkouts:
            seconds(checkout, *CASES[case])  # files come into the operating system's cache, models are built
        rounds = [[seconds(checkout, *CASES[case]) for checkout in checkouts] for _ in range(options.rounds)]
        line = f"{case:<27} {spread([times[-1] for times in rounds])} s"
        if options.base:
            line += f"   base {spread([times[0] for times in rounds])} s"
            line += f"   ratio {spread([times[-1] / times[0] for times in rounds])}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
