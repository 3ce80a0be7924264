"""Draws `reward/mean` (thin lines) and `eval/reward` (points) of runs against the step.

pip install matplotlib
python results/curve.py curve.png runs/seed0 runs/seed1    # folders of runs
python results/curve.py curve.png results/quick_start      # all runs of a figure
"""

import sys
from pathlib import Path

from record import read_lines

STYLES = {"reward/mean": {"alpha": 0.35, "lw": 1}, "eval/reward": {"marker": "o", "ms": 4}}


def curves(folder: Path) -> dict[str, list[dict]]:
    """Returns the steps of each run that a folder holds, by the run's name."""
    by_run: dict[str, list[dict]] = {}
    for row in read_lines(folder / "metrics.jsonl"):
        by_run.setdefault(row.get("run", folder.name), []).append(row)
    return by_run


def pyplot():
    """Returns matplotlib.pyplot, which flatrl does not require. Exits without it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        sys.exit(f"{sys.argv[0]} draws with matplotlib: pip install matplotlib")
    return plt


def main(target: str, *folders: str) -> None:
    """Writes the picture."""
    figure, axes = pyplot().subplots(figsize=(7, 3.2))
    known = {name: rows for folder in folders for name, rows in curves(Path(folder)).items()}
    for i, (run, rows) in enumerate(known.items()):
        for metric, style in STYLES.items():
            points = [(row["step"], row[metric]) for row in rows if metric in row]
            label = f"{metric}, {run}" if metric == "eval/reward" else None
            axes.plot(*zip(*points, strict=True), color=f"C{i}", label=label, **style)
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1.02))
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    print(f"wrote {target}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python results/curve.py PICTURE FOLDER...")
    main(*sys.argv[1:])
