"""Writes the tables and the picture of the pages from the records.

    python results/pages.py tables                    # rewrites the tables of README.md and docs/
    python results/pages.py check                     # exit code 1 if a table is out of date
    python results/pages.py steps FOLDER              # the steps that bench/gpu.sh measured
    python results/pages.py picture RUN PICTURE.png   # how a run of examples/bisection.py learned
    python results/pages.py games ROWS.jsonl          # its teacher's games, for --train_files

A table stands between `<!-- results: FIGURE -->` and `<!-- end -->`. "gpu" has the steps of a GPU,
"fits" comes from bench/fits.py. Any other has the held-out reward of each run after some steps, and
the seconds of its command. The picture needs matplotlib.
"""

import json
import random
import re
import sys
from pathlib import Path
from statistics import median

from record import RESULTS, read_lines, read_records

REPO = RESULTS.parent
sys.path.append(str(REPO / "bench"))
import fits

PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
PLACE = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
STEPS = {  # the columns of a figure's table
    "quick_start": (0, 10, 20, 40),
    "two_hops": (0, 5, 10, 15, 20, 25),
    "maze": (0, 6, 8, 12, 18, 24),
}

PEAK = 989e12  # operations a second of an H100's dense bfloat16 products, by its data sheet
STEP = {  # the columns of a GPU's table
    "timing/step_s": "step, s",
    "timing/rollout_s": "rollout",
    "timing/train_s": "training",
    "timing/sync_s": "sync",
    "throughput/tokens_per_s": "tokens/s",
}

# ---------------------------------------------------------------- tables


def as_table(rows: list[list[str]]) -> str:
    """Returns rows as a table; the first is its header."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def mfu(step: dict[str, float], size: str, has_lora: bool) -> float:
    """Returns throughput/mfu on an H100, where metrics have none (see flatrl/peaks.py).

    By sampled tokens and the seconds of all training. size: a key of fits.SHAPES."""
    shape = fits.SHAPES[size]
    looked_up = 0 if shape.tie_word_embeddings else shape.hidden_size * shape.vocab_size
    n_tokens = step["throughput/tokens_per_s"] * step["timing/rollout_s"]
    n_operations = (4 if has_lora else 6) * (shape.parameters - looked_up) * n_tokens
    return n_operations / step["timing/train_s"] / PEAK


def gpu_steps(folder: Path) -> list[list[str]]:
    """Returns the runs step_SIZE of a GPU: medians over the steps from the second on."""
    rows = [["model", "GPU", *STEP.values(), "MFU"]]
    records = read_records(folder)
    for metrics in read_lines(folder / "metrics.jsonl"):
        name = metrics["run"]
        if not name.startswith("step_"):
            continue
        size = name.removeprefix("step_")
        has_lora = "--lora_rank" in records[name]["command"]
        card = re.search(r"NVIDIA (?:GeForce )?([^;,]+)|$", records[name]["machine"])[1]
        step = {metric: median(metrics[metric][1:]) for metric in STEP}
        share = mfu(step, size, has_lora) if card and "H100" in card else 0
        share = median(metrics.get("throughput/mfu", [share]))
        numbers = [f"{x:,.0f}" if x > 100 else f"{x:.1f}" for x in step.values()]
        rows.append([size + ", LoRA" * has_lora, card or "", *numbers, f"{share:.0%}"])
    return rows


def table(figure: str, results: Path = RESULTS) -> str:
    """Returns the table of a figure: a row for each run."""
    if figure in ("fits", "gpu"):
        return as_table(fits.rows() if figure == "fits" else gpu_steps(results / figure))
    folder = results / figure
    records = read_records(folder)
    steps = [str(step) for step in STEPS[figure]]
    is_timed = any("seconds" in record for record in records.values())
    header = ["held-out reward after step", *steps]
    if is_timed:
        header.append("seconds")
    rows = [header]
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
    return as_table(rows)


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
        case ["steps", folder]:
            print(as_table(gpu_steps(Path(folder))))
        case ["picture", run, target]:
            write_picture(Path(run), Path(target))
        case ["games", target]:
            write_games(Path(target))
        case _:
            sys.exit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
