"""Draws how a run of examples/bisection.py comes to halve what is left.

pip install matplotlib
python results/bisection_curve.py RUN docs/bisection.png    # where it guesses, step by step
python results/bisection_curve.py RUN docs/bisection.svg    # a game before, and one after
"""

import sys
from pathlib import Path

import numpy as np
from curve import pyplot
from record import read_lines

BINS = 15
CELL = 20  # pixels
SECONDS = 2  # that a guess is shown
LEFT, GONE, GUESSED, FOUND = "#cfe0f5", "#eeeeee", "#e8873a", "#3c9d4e"


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


def draw(run: Path, target: Path) -> None:
    """Writes the picture: a column for each step, darker where it guesses more often."""
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    shares = []
    for file in files:
        counts, _ = np.histogram(places(file), BINS, (0, 1))
        shares.append(counts / counts.sum())
    metrics = read_lines(run / "metrics.jsonl")
    figure, (top, bottom) = pyplot().subplots(
        2, sharex=True, figsize=(7, 4.4), height_ratios=(1.4, 1), layout="constrained"
    )
    extent = (0.5, len(files) + 0.5, 0, 1)
    style = {"cmap": "Blues", "aspect": "auto", "origin": "lower", "vmax": 0.5}
    top.imshow(np.transpose(shares), extent=extent, **style)
    top.set(yticks=(0, 0.5, 1), yticklabels=("lowest", "middle", "highest"))
    top.set_title("where it guesses, in what is left", fontsize=10)
    for name, style in {"reward/mean": "-", "eval/reward": "o"}.items():
        points = [(row["step"], row[name]) for row in metrics if name in row]
        bottom.plot(*zip(*points), style, color="C0", ms=4, label=name)
    bottom.axhline(31 / 32, color="C2", ls="--", lw=1, label="optimum")
    bottom.axhline(0.533, color="C1", ls="--", lw=1, label="teacher")
    bottom.set(xlabel="step", ylabel="games won", ylim=(0.4, 1.02))
    bottom.legend(fontsize=8, loc="lower right", ncols=2)
    figure.savefig(target, dpi=110)


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


def animated(attribute: str, values: list) -> str:
    """Returns an SVG animation that shows a value for each guess, and the last one for longer."""
    values = [*values, values[-1]]
    return (
        f'<animate attributeName="{attribute}" values="{";".join(values)}" calcMode="discrete" '
        f'dur="{SECONDS * len(values)}s" repeatCount="indefinite"/>'
    )


def board(rollout: dict, title: str, y: int, n_frames: int) -> list[str]:
    """Returns the SVG of a game: a row of numbers, and a line for what is said."""
    seen = turns(rollout)
    last = len(seen) - 1
    frames = seen + seen[-1:] * (n_frames - len(seen))
    is_won = rollout["total_reward"] == 1
    lines = [f'<text x="10" y="{y}" font-weight="bold">{title}</text>']
    for number in range(32):
        colours = []
        for i, (low, high, guess) in enumerate(frames):
            colour = LEFT if low <= number <= high else GONE
            if number == guess:
                colour = FOUND if is_won and i >= last else GUESSED
            colours.append(colour)
        x = 10 + number * CELL
        lines.append(f'<rect x="{x}" y="{y + 8}" width="{CELL - 2}" height="26" fill="{LEFT}">')
        lines.append(animated("fill", colours) + "</rect>")
        lines.append(f'<text x="{x + 3}" y="{y + 26}" font-size="11">{number}</text>')
    for i, (low, high, guess) in enumerate(frames):
        shown = ["hidden"] * n_frames
        shown[i] = "visible"  # a viewer that does not animate shows the first
        end = "found" if is_won else "no guess is left"
        said = f"{low} to {high}: {guess}" + (f", {end}" if i >= last else "")
        lines.append(f'<text x="10" y="{y + 52}" visibility="{shown[0]}">{said}')
        lines.append(animated("visibility", shown) + "</text>")
    return lines


def animate(run: Path, target: Path) -> None:
    """Writes the animated picture of one number's game before and after training."""
    before, after = games(run)
    n_frames = max(len(turns(before)), len(turns(after)))
    width = 20 + 32 * CELL
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 150" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="150" fill="white"/>',
        *board(before, "before training", 20, n_frames),
        *board(after, "after training", 94, n_frames),
        "</svg>",
    ]
    target.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python results/bisection_curve.py RUN PICTURE.png or PICTURE.svg")
    run, target = map(Path, sys.argv[1:])
    (animate if target.suffix == ".svg" else draw)(run, target)
