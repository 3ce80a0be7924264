"""Draws the correlation of estimates with the true advantage, turn by turn (docs/credit.md).

pip install matplotlib
python results/credit_curve.py docs/credit.png
"""

import sys
from pathlib import Path

from curve import pyplot
from tables import runs

GAMES = ("bisection", "nim")
DRAWN = {  # dashed: with a critic that no run has
    "reinforce_pp": "-",
    "grpo": "-",
    "gigpo": "-",
    "ppo, critic off, lam 1": "-",
    "ppo, critic off, lam 0": "-",
    "ppo, played on, lam 0": "-",
    "ppo, exact critic, lam 1": "--",
    "ppo, exact critic, lam 0": "--",
}


def main(target: str) -> None:
    """Writes the picture."""
    lines = runs("credit")["turns"].lines
    figure, axes = pyplot().subplots(1, 2, figsize=(9, 3.6))
    for game, ax in zip(GAMES, axes, strict=True):
        for estimator, style in DRAWN.items():
            points = [
                (line["turn"], line["correlation"])
                for line in lines
                if (line["game"], line["estimator"]) == (game, estimator)
                and 1 <= line["turn"] <= 5
                and line["truth"]
            ]
            ax.plot(*zip(*points, strict=True), ls=style, marker="o", ms=3, label=estimator)
        ax.set(title=game, xlabel="turn", xticks=range(1, 6), ylim=(0, 1.02))
        ax.grid(alpha=0.3)
    axes[0].set(ylabel="correlation with the true advantage")
    axes[0].legend(fontsize=8, loc="upper left")
    figure.tight_layout()
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python results/credit_curve.py PICTURE")
    main(sys.argv[1])
