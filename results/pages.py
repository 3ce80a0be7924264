"""Writes the tables and the picture of the pages from the records.

    python results/pages.py tables                    # rewrites the tables of README.md and docs/
    python results/pages.py check                     # exit code 1 if a table is out of date
    python results/pages.py picture RUN PICTURE.png   # how a run of examples/bisection.py learned
    python results/pages.py games ROWS.jsonl          # its teacher's games, for --train_files

A table stands between `<!-- results: NAME -->` and `<!-- end -->`; NAME is one of TABLES. The
picture needs matplotlib.
"""

import json
import random
import re
import sys
from pathlib import Path
from statistics import fmean

from record import RESULTS, read_lines, read_records

REPO = RESULTS.parent
PLACE = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Table = list[list[str]]  # its header, then its rows

# ---------------------------------------------------------------- what is recorded


class Run:
    """A training run's entry of record.json, and its line of metrics.jsonl."""

    def __init__(self, name: str, record: dict, metrics: dict):
        self.label = record.get("label", name)
        self.figures = record.get("figures", {})  # of runs whose metrics were not kept
        self.seconds = record.get("seconds", 0)
        self.metrics = metrics

    def evaluations(self, *steps: int) -> list[str]:
        """Returns the held-out reward after each step, "" where there was no evaluation."""
        known = self.metrics["eval/reward"]
        texts = {int(step): f"{reward:.3f}" for step, reward in known.items()}
        return [texts.get(step, "") for step in steps]

    def last_rewards(self) -> str:
        """Returns the mean sampled reward of the last ten steps."""
        rewards = self.metrics["reward/mean"]
        return f"{fmean(rewards[-10:]):.3f}"


def runs(figure: str, results: Path = RESULTS) -> dict[str, Run]:
    """Returns the runs of a figure by their names, in the order of record.json."""
    folder = results / figure
    lines = read_lines(folder / "metrics.jsonl")
    metrics = {line["run"]: line for line in lines}
    records = read_records(folder)
    return {
        name: Run(name, record, metrics.get(name, {})) for name, record in records.items()
    }


def duration(*commands: Run) -> str:
    """Returns the time that the commands took together."""
    total = sum(run.seconds for run in commands)
    return f"{total // 60} min {total % 60} s"


# ---------------------------------------------------------------- tables


def quick_start() -> Table:
    """The differences of logprobs are the largest of a run's steps."""
    steps = (0, 10, 20, 40)
    differences = ("largest logp_diff_max", "largest logp_diff_mean")
    evals = [f"eval, step {step}" for step in steps]
    rows = [["seed", *evals, *differences, "whole command"]]
    for run in runs("quick_start").values():
        largest = [f"{run.figures[name]:.1e}" for name in differences]
        rows.append([run.label, *run.evaluations(*steps), *largest, duration(run)])
    return rows


def evaluations(figure: str, *steps: int) -> Table:
    """Returns a row for each run: its held-out reward after some steps."""
    rows = [["held-out reward after step", *map(str, steps)]]
    for run in runs(figure).values():
        rows.append([run.label, *run.evaluations(*steps)])
    return rows


def two_hops() -> Table:
    return evaluations("two_hops", 0, 5, 10, 15, 20, 25)


def maze() -> Table:
    return evaluations("maze", 0, 6, 8, 12, 18, 24)


def bisection() -> Table:
    known = runs("bisection")
    copy = known["imitation"]
    [sampled] = copy.evaluations(0)
    [greedy] = known["imitation_greedy"].evaluations(0)
    rows = [
        ["", "games won, sampled", "at temperature 0", "whole command"],
        ["the teacher", "0.533", "", ""],
        [copy.label, sampled, greedy, duration(copy)],
    ]
    for seed in range(3):
        run = known[f"seed_{seed}"]
        [greedy] = run.evaluations(100)
        rows.append([run.label, run.last_rewards(), greedy, duration(run)])
    return [*rows, ["halving what is left", "0.969", "0.969", ""]]


def bisection_smollm2() -> Table:
    """Games at temperature 0 at each evaluation, and those sampled in the last ten steps."""
    known = runs("bisection_smollm2")
    steps = (0, 10, 20, 30, 40)
    names = [f"step {step}" for step in steps]
    rows = [["", *names, "sampled", "both commands"]]
    for seed in range(3):
        first = known[f"gpu_imitation_{seed}"]
        then = known[f"gpu_{seed}"]
        greedy = then.evaluations(*steps)
        time = duration(first, then)
        rows.append([f"seed {seed}", *greedy, then.last_rewards(), time])
    return rows


TABLES = {
    "quick_start": quick_start,
    "two_hops": two_hops,
    "maze": maze,
    "bisection": bisection,
    "bisection_smollm2": bisection_smollm2,
}


def rewrite(text: str) -> str:
    """Returns a page's text with the tables of the records."""

    def with_table(place: re.Match) -> str:
        header, *rows = TABLES[place[2]]()
        line = ["---"] * len(header)
        written = [f"| {' | '.join(row)} |\n" for row in (header, line, *rows)]
        return place[1] + "".join(written) + place[3]

    return PLACE.sub(with_table, text)


def write_tables(pages: list[Path], only_check: bool = False) -> int:
    """Rewrites the pages; returns 1 if they are only checked and one differs."""
    different = [page for page in pages if rewrite(page.read_text()) != page.read_text()]
    for page in different:
        print(f"{page.name}: a table differs from results/")
        if not only_check:
            page.write_text(rewrite(page.read_text()))
    return int(only_check and bool(different))


# ---------------------------------------------------------------- bisection: picture and games


def places(file: Path) -> list[float]:
    """Returns where the guesses of a step lie in what is left, from 0 (lowest) to 1 (highest).

    Guesses among fewer than 15 numbers would fall on a few bins, and are left out."""
    found = []
    for rollout in read_lines(file):
        said = [message["content"] for message in rollout["messages"]]
        for seen, guess in zip(said[::2], said[1::2]):
            low, high = map(int, seen.split(" to "))
            if high - low >= 14 and guess in map(str, range(low, high + 1)):
                found.append((int(guess) - low) / (high - low))
    return found


def write_picture(run: Path, target: Path) -> None:
    """Draws a column for each step, darker where it guesses more often; below, the games won."""
    import matplotlib.pyplot as plt

    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    steps = [(step, place) for step, file in enumerate(files, 1) for place in places(file)]
    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(7, 4.4), layout="constrained")
    top.hist2d(*zip(*steps), bins=(len(files), 15), cmap="Blues")
    top.set_yticks((0, 0.5, 1), ("lowest", "middle", "highest"))
    top.set_title("where it guesses, in what is left", fontsize=10)
    metrics = read_lines(run / "metrics.jsonl")
    for name, style in {"reward/mean": "-", "eval/reward": "o"}.items():
        points = [(row["step"], row[name]) for row in metrics if name in row]
        bottom.plot(*zip(*points), style, color="C0", ms=4, label=name)
    bottom.axhline(31 / 32, color="C2", ls="--", label="optimum")
    bottom.axhline(0.533, color="C1", ls="--", label="teacher")
    bottom.set(xlabel="step", ylabel="games won", ylim=(0.4, 1.02))
    bottom.legend(fontsize=8, loc="lower right", ncols=2)
    figure.savefig(target, dpi=110)


def write_games(target: Path) -> None:
    """Writes bisection's training rows with a game of its teacher as demonstration of each."""
    sys.path.insert(0, str(REPO))
    from examples.bisection import Game, load, teach

    random.seed(0)
    lines = []
    for row in load("train"):
        chat = teach(Game(row["extra_info"]["number"]))
        row["demonstration"] = [turn["content"] for turn in chat if turn["role"] == "assistant"]
        lines.append(json.dumps(row) + "\n")
    target.write_text("".join(lines))


def main(words: list[str]) -> int:
    match words:
        case ["tables" | "check"]:
            pages = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
            return write_tables(pages, only_check=words == ["check"])
        case ["picture", run, target]:
            write_picture(Path(run), Path(target))
        case ["games", target]:
            write_games(Path(target))
        case _:
            sys.exit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
