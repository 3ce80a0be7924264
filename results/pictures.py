"""Draws the pictures of the pages.

pip install matplotlib
python results/pictures.py credit docs/credit.png             # from the record of bench/credit.py
python results/pictures.py guesses docs/bisection.png RUN     # from a run of examples/bisection.py
python results/pictures.py game docs/bisection.svg RUN        # a game before, and one after
"""

import sys
from pathlib import Path

from record import read_lines
from tables import runs

# ---------------------------------------------------------------- credit by turn

CREDIT = {  # dashed: with a critic that no run has
    "reinforce_pp": "-",
    "grpo": "-",
    "gigpo": "-",
    "ppo, critic off, lam 1": "-",
    "ppo, critic off, lam 0": "-",
    "ppo, played on, lam 0": "-",
    "ppo, exact critic, lam 1": "--",
    "ppo, exact critic, lam 0": "--",
}


def correlations(game: str, estimator: str) -> dict[int, float]:
    """Returns an estimator's correlation with the true advantage, by turn."""
    lines = runs("credit")["turns"].lines
    [line] = [each for each in lines if (each["game"], each["estimator"]) == (game, estimator)]
    turns = range(1, 6)  # 0 is all turns together
    return {turn: line["correlation"][turn] for turn in turns if line["truth"][turn]}


def credit(target: Path) -> None:
    """Writes the picture of docs/credit.md: correlations, turn by turn."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="tight")
    for game, ax in zip(("bisection", "nim"), axes):
        for estimator, style in CREDIT.items():
            points = correlations(game, estimator)
            ax.plot(*zip(*points.items()), ls=style, marker="o", ms=3, label=estimator)
        ax.set(title=game, xlabel="turn", xticks=range(1, 6), ylim=(0, 1.02))
        ax.grid(alpha=0.3)
    axes[0].set(ylabel="correlation with the true advantage")
    axes[0].legend(fontsize=8, loc="upper left")
    figure.savefig(target, dpi=110)


# ---------------------------------------------------------------- how bisection is learned

BINS = 15


def turns(rollout: dict) -> list[tuple[int, int, int]]:
    """Returns (low, high, guess) of the turns whose guess is among what is left."""
    said = [message["content"] for message in rollout["messages"]]
    found = []
    for seen, guess in zip(said[::2], said[1::2]):
        low, high = map(int, seen.split(" to "))
        if guess in map(str, range(low, high + 1)):
            found.append((low, high, int(guess)))
    return found


def places(file: Path) -> list[float]:
    """Returns where each guess of a step lies in what is left: 0 is its lowest number, 1 its
    highest."""
    return [
        (guess - low) / (high - low)
        for rollout in read_lines(file)
        for low, high, guess in turns(rollout)
        if high - low >= BINS - 1  # fewer numbers would fall on a few bins
    ]


def guesses(target: Path, run: Path) -> None:
    """Writes a picture with a column for each step, darker where it guesses more often."""
    import matplotlib.pyplot as plt
    import numpy as np

    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    shares = []
    for file in files:
        counts, _ = np.histogram(places(file), BINS, (0, 1))
        shares.append(counts / counts.sum())
    figure, (top, bottom) = plt.subplots(
        2, sharex=True, figsize=(7, 4.4), height_ratios=(1.4, 1), layout="constrained"
    )
    extent = (0.5, len(files) + 0.5, 0, 1)
    style = {"cmap": "Blues", "aspect": "auto", "origin": "lower", "vmax": 0.5}
    top.imshow(np.transpose(shares), extent=extent, **style)
    top.set(yticks=(0, 0.5, 1), yticklabels=("lowest", "middle", "highest"))
    top.set_title("where it guesses, in what is left", fontsize=10)
    metrics = read_lines(run / "metrics.jsonl")
    for name, style in {"reward/mean": "-", "eval/reward": "o"}.items():
        points = [(row["step"], row[name]) for row in metrics if name in row]
        bottom.plot(*zip(*points), style, color="C0", ms=4, label=name)
    bottom.axhline(31 / 32, color="C2", ls="--", lw=1, label="optimum")
    bottom.axhline(0.533, color="C1", ls="--", lw=1, label="teacher")
    bottom.set(xlabel="step", ylabel="games won", ylim=(0.4, 1.02))
    bottom.legend(fontsize=8, loc="lower right", ncols=2)
    figure.savefig(target, dpi=110)


# ---------------------------------------------------------------- a game before and after

CELL = 20  # pixels
SECONDS = 2  # that a guess is shown
LEFT, GONE, GUESSED, FOUND = "#cfe0f5", "#eeeeee", "#e8873a", "#3c9d4e"


def games(run: Path) -> list[dict]:
    """Returns the games of a number that the run lost before training, and won after it."""
    first, *_, last = sorted((run / "rollouts").glob("eval_*.jsonl"))
    learned = [
        [before, after]
        for before, after in zip(read_lines(first), read_lines(last))
        if after["total_reward"] > before["total_reward"]
    ]
    if not learned:
        sys.exit(f"{run}: no game was lost before training and won after it")
    return learned[len(learned) // 2]


def cells(first: int, last: int, y: int, colour: str) -> str:
    """Returns the SVG of a bar behind the numbers from first to last."""
    x, width = 10 + first * CELL, (last + 1 - first) * CELL
    return f'<rect x="{x}" y="{y + 8}" width="{width}" height="26" fill="{colour}"/>'


def board(rollout: dict, title: str, y: int, n_frames: int) -> list[str]:
    """Returns the SVG of a game: in each frame, what is left, the guess, and what is said."""
    seen = turns(rollout)
    lines = [f'<text x="10" y="{y}" font-weight="bold">{title}</text>', cells(0, 31, y, GONE)]
    for i, (low, high, guess) in enumerate(seen):
        said = f"{low} to {high}: {guess}"
        colour = GUESSED
        frames = [i]
        if i == len(seen) - 1:
            is_won = rollout["total_reward"] == 1
            said += ", found" if is_won else ", no guess is left"
            colour = FOUND if is_won else GUESSED
            frames = range(i, n_frames)
        shown = ["visible" if frame in frames else "hidden" for frame in range(n_frames)]
        lines += [
            f'<g visibility="{shown[0]}">',  # a viewer that does not animate shows the first
            f'<animate attributeName="visibility" values="{";".join(shown)}" '
            f'calcMode="discrete" dur="{SECONDS * n_frames}s" repeatCount="indefinite"/>',
            cells(low, high, y, LEFT),
            cells(guess, guess, y, colour),
            f'<text x="10" y="{y + 52}">{said}</text>',
            "</g>",
        ]
    return [*lines, f'<use href="#numbers" y="{y + 26}"/>']


def game(target: Path, run: Path) -> None:
    """Writes the animated picture of one number's game before and after training."""
    before, after = games(run)
    n_frames = max(len(turns(before)), len(turns(after))) + 1  # the last one is shown for longer
    width = 20 + 32 * CELL
    numbers = [f'<text x="{14 + n * CELL}" font-size="11">{n}</text>' for n in range(32)]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 150" '
        'font-family="sans-serif" font-size="13">',
        '<defs><g id="numbers">',
        *numbers,
        "</g></defs>",
        f'<rect width="{width}" height="150" fill="white"/>',
        *board(before, "before training", 20, n_frames),
        *board(after, "after training", 94, n_frames),
        "</svg>",
    ]
    target.write_text("\n".join(lines) + "\n")


PICTURES = {"credit": credit, "guesses": guesses, "game": game}

if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in PICTURES:
        sys.exit(__doc__)
    PICTURES[sys.argv[1]](*map(Path, sys.argv[2:]))
