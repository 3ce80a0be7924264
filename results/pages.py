"""Writes the tables and the picture of the pages from the records.

    python results/pages.py tables                    # rewrites the tables of README.md and docs/
    python results/pages.py check                     # exit code 1 if a table is out of date
    python results/pages.py picture RUN PICTURE.png   # how a run of examples/bisection.py learned
    python results/pages.py games ROWS.jsonl          # its teacher's games, for --train_files

A table stands between `<!-- results: FIGURE -->` and `<!-- end -->`. It has the held-out reward of
each run after some steps, and the seconds of its command. The picture needs matplotlib.
"""

import json
import random
import re
import sys
from pathlib import Path

from record import RESULTS, read_lines, read_records

REPO = RESULTS.parent
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
PLACE = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
STEPS = {  # the columns of a figure's table
    "quick_start": (0, 10, 20, 40),
    "two_hops": (0, 5, 10, 15, 20, 25),
    "maze": (0, 6, 8, 12, 18, 24),
}

# ---------------------------------------------------------------- tables


def table(figure: str, results: Path = RESULTS) -> str:
    """Returns the table of a figure: a row for each run."""
    folder = results / figure
    records = read_records(folder)
    steps = [str(step) for step in STEPS[figure]]
    is_timed = any("seconds" in record for record in records.values())
    header = ["held-out reward after step", *steps]
    if is_timed:
        header.append("seconds")
    rows = [header, ["---"] * len(header)]
    for metrics in read_lines(folder / "metrics.jsonl"):
        name = metrics["run"]
        record = records[name]
        rewards = metrics["eval/reward"]
        row = [record.get("label", name)]
        for step in steps:
            row.append(f"{rewards[step]:.3f}" if step in rewards else "")
        if is_timed:
            row.append(str(record.get("seconds", "")))
        rows.append(row)
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    return "".join(lines)


def rewrite(text: str) -> str:
    """Returns a page's text with the tables of the records."""
    return PLACE.sub(lambda place: place[1] + table(place[2]) + place[3], text)


def write_tables(pages: list[Path], only_check: bool = False) -> int:
    """Rewrites the pages; returns 1 if they are only checked and one differs."""
    exit_code = 0
    for page in pages:
        text = page.read_text()
        new = rewrite(text)
        if new == text:
            continue
        print(f"{page.name}: a table differs from results/")
        if only_check:
            exit_code = 1
        else:
            page.write_text(new)
    return exit_code


# ---------------------------------------------------------------- bisection: picture and games


def places(file: Path) -> list[float]:
    """Returns where the guesses of a step lie in what is left, from 0 (lowest) to 1 (highest).

    Guesses among fewer than 15 numbers would fall on a few bins, and are left out."""
    found = []
    for rollout in read_lines(file):
        said = [message["content"] for message in rollout["messages"]]
        for seen, guess in zip(said[::2], said[1::2]):
            low, high = map(int, seen.split(" to "))
            possible = map(str, range(low, high + 1))
            if high - low >= 14 and guess in possible:
                found.append((int(guess) - low) / (high - low))
    return found


def write_picture(run: Path, target: Path) -> None:
    """Draws a column for each step, darker where it guesses more often; below, the games won."""
    import matplotlib.pyplot as plt

    steps = []
    guesses = []
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    for step, file in enumerate(files, 1):
        of_step = places(file)
        guesses += of_step
        steps += [step] * len(of_step)
    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(7, 4.4), layout="constrained")
    area = ((0.5, len(files) + 0.5), (0, 1))
    top.hist2d(steps, guesses, bins=(len(files), 15), range=area, cmap="Blues")
    top.set_yticks((0, 0.5, 1), ("lowest", "middle", "highest"))
    top.set_title("where it guesses, in what is left")
    metrics = read_lines(run / "metrics.jsonl")
    for name, style in {"reward/mean": "-", "eval/reward": "o"}.items():
        rows = [row for row in metrics if name in row]
        steps = [row["step"] for row in rows]
        rewards = [row[name] for row in rows]
        bottom.plot(steps, rewards, style, color="C0", label=name)
    bottom.axhline(31 / 32, color="C2", ls="--", label="optimum")
    bottom.axhline(0.533, color="C1", ls="--", label="teacher")
    bottom.set(xlabel="step", ylabel="games won", ylim=(0.4, 1.02))
    bottom.legend(loc="lower right", ncols=2)
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
            return write_tables(PAGES, only_check=words == ["check"])
        case ["picture", run, target]:
            write_picture(Path(run), Path(target))
        case ["games", target]:
            write_games(Path(target))
        case _:
            sys.exit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
