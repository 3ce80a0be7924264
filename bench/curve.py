"""Draws the README's reward curve: `reward/mean` and `eval/reward` of runs against the step.

    python bench/curve.py docs/curve.png runs/seed0 runs/seed1 runs/seed2        # needs: pip install matplotlib

The first word is the picture's file, the others are folders of runs. Sampled rewards are thin
lines, evaluations are points.
"""

import sys
from pathlib import Path

from common import metrics_of


def main(target: str, *runs: str) -> None:
    """Writes the picture `target` of the runs in these folders."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        sys.exit("bench/curve.py draws with matplotlib: pip install matplotlib")
    figure, axes = plt.subplots(figsize=(7, 3.2))
    for i, run in enumerate(runs):
        rows = metrics_of(Path(run))
        for name, style in (("reward/mean", dict(alpha=0.35, lw=1)), ("eval/reward", dict(marker="o", ms=4))):
            points = [(row["step"], row[name]) for row in rows if name in row]
            label = f"{name}, {Path(run).name}" if name == "eval/reward" else None
            axes.plot(*zip(*points, strict=True), color=f"C{i}", label=label, **style)
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1.02))
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    print(f"{target}: points are evaluations, thin lines sampled rewards")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("give the picture's file and the folders of runs: python bench/curve.py curve.png runs/calculator")
    main(*sys.argv[1:])
