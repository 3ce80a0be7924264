"""Writes the tables of README.md and docs/ from the records in results/.

    python results/tables.py            # rewrites every table
    python results/tables.py --check    # exit code 1 if a table is not that of its records

A table stands between `<!-- results: NAME -->` and `<!-- end -->`. NAME is that of a function
below; it yields the header of the table, then its rows.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median

from record import RESULTS, read_lines, read_records

REPO = RESULTS.parent
PLACE = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES: dict[str, Callable[[], Iterator[tuple]]] = {}


def table(function):
    """Registers a function whose name a page may have between its markers."""
    TABLES[function.__name__] = function
    return function


class Run:
    """What is recorded of a run: its entry of record.json, and its lines of metrics.jsonl.

    A training run has one line, a bench a line for each row. Of runs before 2026-11-26 some
    numbers are known and their metrics are not: these stand in the record's "figures"."""

    def __init__(self, name: str, record: dict, lines: list[dict]):
        self.label = record.get("label", name)
        self.figures = record.get("figures", {})
        self.seconds = record.get("seconds", 0)
        self.lines = lines

    def values(self, metric: str) -> list[float]:
        column = self.lines[0].get(metric, [])
        return [*column.values()] if isinstance(column, dict) else column

    def at(self, metric: str, *steps: int) -> list[str]:
        """Returns a metric after each step with three digits, "" where it was not recorded."""
        known = {step: f"{x:.3f}" for step, x in self.lines[0].get(metric, {}).items()}
        return [known.get(str(step), "") for step in steps]

    def last_rewards(self) -> float:
        """Returns the mean reward of the last ten steps."""
        return fmean(self.values("reward/mean")[-10:])

    def typical(self, metric: str) -> float:
        """Returns the median of a metric without the first step."""
        return median(self.values(metric)[1:])

    def duration(self) -> str:
        """Returns the time that the command took."""
        minutes, seconds = divmod(self.seconds, 60)
        return f"{minutes} min {seconds} s"


def runs(figure: str, results: Path = RESULTS) -> dict[str, Run]:
    """Returns the runs of a figure by their names, in the order of record.json."""
    lines = read_lines(results / figure / "metrics.jsonl")
    return {
        name: Run(name, record, [line for line in lines if line["run"] == name])
        for name, record in read_records(results / figure).items()
    }


def spread(middle: float, *ends: float, digits: int = 2) -> str:
    """Returns a median, and the least and the largest value if they are known."""
    middle, *ends = (f"{value:.{digits}f}" for value in (middle, *ends))
    return f"{middle} ({' - '.join(ends)})" if ends else middle


# ---------------------------------------------------------------- training runs


@table
def quick_start():
    """The differences of logprobs are the largest of a run's steps."""
    steps = (0, 10, 20, 40)
    differences = ("largest logp_diff_max", "largest logp_diff_mean")
    yield "seed", *(f"eval, step {step}" for step in steps), *differences, "whole command"
    for run in runs("quick_start").values():
        largest = (f"{run.figures[name]:.1e}" for name in differences)
        yield run.label, *run.at("eval/reward", *steps), *largest, run.duration()


@table
def two_hops():
    steps = (0, 5, 10, 15, 20, 25)
    yield "held-out reward after step", *map(str, steps), "whole command"
    for name, run in runs("two_hops").items():
        if name.startswith("seed"):
            yield run.label, *run.at("eval/reward", *steps), run.duration()


@table
def two_hops_imitation():
    steps = (5, 10, 15, 20, 25)
    later = "seconds of steps 6 to 25"
    yield "held-out reward after step", *map(str, steps), later
    for name, run in runs("two_hops").items():
        if "imitation" in name:
            yield run.label, *run.at("eval/reward", *steps), str(run.figures[later])


@table
def maze():
    steps = (0, 6, 8, 12, 18, 24)
    yield "held-out reward after step", *map(str, steps)
    for run in runs("maze").values():
        yield run.label, *run.at("eval/reward", *steps)


@table
def aged():
    """A cell has a value for each seed."""
    corrections = {
        "icepop": "`icepop:0:5`",
        "bypass": "`bypass`",
        "unclipped": "`bypass`, `--clip_c 0`",
    }
    means = ("reward, all steps", "last ten steps")
    yield "task", "`--lr`", "age", "correction", *means, "largest `actor/grad_norm`"
    by_cell: dict[str, list[Run]] = {}
    for name, run in runs("aged").items():
        by_cell.setdefault(name.rpartition("_")[0], []).append(run)
    for cell, seeds in by_cell.items():
        *settings, correction = cell.split("_")
        columns = (
            [f"{fmean(run.values('reward/mean')):.2f}" for run in seeds],
            [f"{run.last_rewards():.2f}" for run in seeds],
            [f"{max(run.values('actor/grad_norm')):.1f}" for run in seeds],
        )
        yield *settings, corrections[correction], *(", ".join(column) for column in columns)


@table
def distillation():
    """A cell has the trajectories until a held-out reward of 0.9, and the last such reward."""
    yield "trajectories to 0.9, held-out reward in the end", "seed 0", "seed 1", "seed 2"

    def numbers(run: Run) -> str:
        rewards = run.lines[0]["eval/reward"]
        reached = [int(step) for step, reward in rewards.items() if reward >= 0.9]
        trained = run.values("rollout/trajectories")
        n = f"{sum(trained[: reached[0]]):.0f}" if reached else "never"
        return f"{n}, {[*rewards.values()][-1]:.3f}"

    known = runs("distillation")
    for kind in ("k1", "top16"):
        yield f"`--kl_kind {kind}`", *(numbers(known[f"{kind}_{seed}"]) for seed in range(3))


@table
def staleness():
    yield "rollout", "trajectories per second", "mean staleness", "largest of a step"
    for run in runs("staleness").values():
        rate = sum(run.values("rollout/trajectories")) / sum(run.values("timing/step_s"))
        stale = run.values("rollout/staleness_mean") or [0.0]
        yield run.label, f"{rate:.0f}", f"{fmean(stale):.1f}", f"{max(stale):.1f}"


@table
def bisection():
    known = runs("bisection")
    yield "", "games won, sampled", "at temperature 0", "whole command"
    yield "the teacher", "0.533", "", ""
    [sampled] = known["imitation"].at("eval/reward", 0)
    greedy = known["imitation_greedy"].at("eval/reward", 0)
    yield known["imitation"].label, sampled, *greedy, known["imitation"].duration()
    for seed in range(3):
        run = known[f"seed_{seed}"]
        yield run.label, f"{run.last_rewards():.3f}", *run.at("eval/reward", 100), run.duration()
    yield "halving what is left", "0.969", "0.969", ""


@table
def gpu_steps():
    """Medians of the steps after the first."""
    steps = [run for name, run in runs("gpu").items() if name.startswith("step_")]
    rows = {
        "seconds of a step": ("timing/step_s", 1),
        "rollout": ("timing/rollout_s", 1),
        "training": ("timing/train_s", 1),
        "weight sync": ("timing/sync_s", 1),
        "tokens sampled per second": ("throughput/tokens_per_s", 0),
        "GB in use, the engine awake": ("memory/before_sleep_device_gb", 0),
        "GB in use, the engine asleep": ("memory/asleep_device_gb", 0),
    }
    yield "on one H100", *(run.label for run in steps)
    for name, (metric, digits) in rows.items():
        yield name, *(f"{run.typical(metric):,.{digits}f}" for run in steps)


@table
def gpu():
    known = runs("gpu")
    job = known["calculator"]
    yield "on one H100", "measured"
    first, *_, last = job.values("eval/reward")
    seconds = f"{job.duration()}, {job.typical('timing/step_s'):.1f} s a step"
    yield "the default job", f"held-out reward {first:.3f} -> {last:.3f} in {seconds}"
    for name in ("bench", "bench_1.5B_7B"):
        for line in known[name].lines:
            yield f"{line['section']}, {line['shape']}: {line['what']}", line["measured"]
    [line] = known["rollout"].lines
    yield "rollout, 0.5B: tokens/s, as a share of LLM.generate's", spread(*line["ratio"])
    for line in known["trl"].lines:
        parts = ", ".join(f"{part} {line[part]:.2f}" for part in ("generate", "update", "sync"))
        name = f"such a step in bench/trl.py, 0.5B: {line['side']}"
        yield name, f"{line['step']:.1f} s: {parts}"


@table
def bisection_smollm2_gpu():
    """Sampled games of the last ten steps; those at temperature 0 at each evaluation."""
    known = runs("bisection_smollm2")
    steps = (0, 10, 20, 30, 40)
    yield "", *(f"step {step}" for step in steps), "sampled", "both commands"
    for seed in range(3):
        then = known[f"gpu_{seed}"]
        then.seconds += known[f"gpu_imitation_{seed}"].seconds
        sampled = f"{then.last_rewards():.3f}"
        yield f"seed {seed}", *then.at("eval/reward", *steps), sampled, then.duration()


@table
def bisection_smollm2():
    known = runs("bisection_smollm2")
    yield "", "after 20 steps of imitation", "in the end", "both commands"
    long = known["imitation_long"]
    yield "80 steps of imitation", "", *long.at("eval/reward", 80), long.duration()
    for seed in range(3):
        first, then = known[f"imitation_{seed}"], known[f"seed_{seed}"]
        then.seconds += first.seconds
        yield f"the reward, seed {seed}", *then.at("eval/reward", 0, 20), then.duration()
    others = {"again": "seed 0 once more", "avx2": "seed 0 in float32, AVX2 alone"}
    for run, label in others.items():
        first, then = known[f"{run}_imitation_0"], known[f"{run}_0"]
        then.seconds += first.seconds
        yield label, *then.at("eval/reward", 0, 20), then.duration()


@table
def speedrun():
    """A cell has a value for each seed."""
    yield "record", "evaluation that reaches 0.9", "reward", "seconds", "CPU seconds"
    for file in sorted((REPO / "speedrun").glob("*.json")):
        seeds = json.loads(file.read_text())["runs"].values()
        last = [list(run["evaluations"].items())[-1] for run in seeds]
        columns = [
            [f"step {step}" for step, _ in last],
            [f"{reward:.3f}" for _, reward in last],
            [str(run["seconds"]) for run in seeds],
            [str(run["cpu_seconds"]) for run in seeds],
        ]
        yield f"[{file.stem}]({file.name})", *(", ".join(cells) for cells in columns)


# ---------------------------------------------------------------- benches: rows that they wrote


@table
def rollout():
    yield "flatrl against plain vLLM", "ratio (min - max)", "engine idle"
    for run in runs("rollout").values():
        [row] = run.lines
        yield run.label, spread(*row["ratio"]), f"{row['idle']:.0%}" if "idle" in row else ""


@table
def update():
    """Ratios: how many times flatrl's seconds, of scoring and of an update."""
    yield "prompt + response tokens", "tokens, unique", "flatrl, s", "unshared", "bare", "TRL", "MB"

    def ratios(line: dict | None) -> str:
        return f"{line['score_ratio']:.2f} / {line['update_ratio']:.2f}" if line else ""

    for name, run in runs("update").items():
        cases: dict[str, dict[str, dict]] = {}
        for line in run.lines:
            label = f"{line['prompt_tokens']:,} + {line['response_tokens']}"
            label += ", distinct prompts" * (name == "distinct")
            cases.setdefault(label, {})[line["side"]] = line
        for label, sides in cases.items():
            ours = sides["flatrl"]
            unshared = sides["unshared"]
            yield (
                label,
                f"{unshared['tokens']:,}, {ours['tokens']:,}",
                f"{ours['score_s']:.2f} / {ours['update_s']:.2f}",
                *(ratios(sides.get(side)) for side in ("unshared", "bare", "TRL")),
                f"{ours['mb']:,.0f}, {unshared['mb']:,.0f}",
            )


@table
def trl():
    yield "a step", "compared with", "flatrl, s", "TRL, s", "flatrl is faster by (min - max)"

    def seconds(side: dict) -> str:
        return f"{side['step']:.2f} ({side['generate']:.2f}, {side['update']:.2f})"

    for run in runs("trl").values():
        ours, *others = run.lines
        for theirs in others:
            sides = theirs["side"], seconds(ours), seconds(theirs)
            yield run.label, *sides, spread(*theirs["ratio"])


@table
def horizon():
    turns = (2, 10, 50, 100, 200)
    yield "CPU ms of turn", *map(str, turns), "200 in TRL", "in verl"
    lines = [line for line in runs("horizon")["turns"].lines if line.get("numbers")]
    known = {line["label"]: dict(zip(line["turns"], line["numbers"])) for line in lines}
    for label, ms in known.items():
        what, _, way = label.partition(": ")
        if way == "append":
            others = [known.get(f"{what}: {side}", {}).get(200) for side in ("TRL", "verl")]
            cells = [*(ms[turn] for turn in turns), *others]
            yield what, *("" if cell is None else f"{cell:.1f}" for cell in cells)


@table
def horizon_memory():
    yield "MB of a step", "batch", "layout", "peak"
    [line] = [line for line in runs("horizon")["turns"].lines if line["label"] == "memory"]
    sizes = (str(line[f"{name}_mb"]) for name in ("batch", "layout", "peak"))
    yield "a trajectory of 32k tokens, 255 of 2k", *sizes


@table
def horizon_engine():
    yield "turns", "seconds a turn", "of LLM.generate alone", "generate / flatrl"
    for turns in (10, 40, 160):
        [line] = runs("horizon")[f"turns_{turns}"].lines
        seconds, ratio = line["turn_s"][0], line["ratio"][0]
        yield str(turns), f"{seconds:.3f}", f"{seconds * ratio:.3f}", spread(*line["ratio"])


@table
def horizon_window():
    yield "turns", "CPU seconds a turn", "prefill apart", "of LLM.generate, prefill apart"
    for turns in (10, 160):
        [line] = runs("horizon")[f"window_{turns}"].lines
        keys = ("turn_s", "apart_s", "generate_apart_s")
        yield str(turns), *(spread(*line[key], digits=3) for key in keys)


def credit(game: str) -> Iterator[tuple]:
    """Yields correlation, bias and noise by turn. A bias that may be chance is "<" its limit.

    Estimators that differ in scale only, and so have the same cells, share a row."""
    lines = [line for line in runs("credit")["turns"].lines if line["game"] == game]
    truth = lines[0]["truth"][:6]  # of all turns, then of each
    yield "", "all turns", *(f"turn {turn}" for turn in range(1, len(truth)))
    yield "true advantage", *(f"{size:.2f}" for size in truth)

    def cell(line: dict, turn: int) -> str:
        if not line["truth"][turn]:
            return "-"
        bias, limit = line["bias"][turn], max(line["bias_limit"][turn], 0.01)
        bias = f"{bias:.2f}" if bias > limit else f"<{limit:.2f}"
        return f"{line['correlation'][turn]:.2f}, {bias}, {line['noise'][turn]:.2f}"

    names: dict[tuple, list[str]] = {}
    for line in lines:
        cells = tuple(cell(line, turn) for turn in range(len(truth)))
        names.setdefault(cells, []).append(line["estimator"])
    for cells, equal in names.items():
        yield ", ".join(equal), *cells


@table
def credit_bisection():
    return credit("bisection")


@table
def credit_nim():
    return credit("nim")


@table
def models():
    """A row for each verdict; its numbers are the largest of its architectures."""
    yield "architecture", "engine and trainer", "mean", "max"
    by_verdict: dict[str, list[dict]] = {}
    lines = [line for run in runs("models").values() for line in run.lines]
    for line in lines:
        by_verdict.setdefault(line["verdict"], []).append(line)
    for verdict, lines in by_verdict.items():
        names = ", ".join(line["name"] for line in lines)
        numbers = "", ""
        if "mean" in lines[0]:
            numbers = (f"{max(line[key] for line in lines):.1e}" for key in ("mean", "max"))
        yield names, verdict, *numbers


# ---------------------------------------------------------------- writing


def as_markdown(name: str) -> str:
    """Returns the table of this name. Raises KeyError if there is none."""
    header, *rows = TABLES[name]()
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rewrite(text: str) -> str:
    """Returns a page's text with the tables of the records."""
    return PLACE.sub(lambda found: found[1] + as_markdown(found[2]) + found[3], text)


def main(pages: list[Path], only_check: bool = False) -> int:
    """Rewrites the pages; returns 1 if they are only checked and one differs."""
    different = [page for page in pages if rewrite(page.read_text()) != page.read_text()]
    for page in different:
        print(f"{page.name}: a table differs from results/")
        if not only_check:
            page.write_text(rewrite(page.read_text()))
    return int(only_check and bool(different))


if __name__ == "__main__":
    pages = [REPO / "README.md", REPO / "speedrun/README.md", *sorted((REPO / "docs").glob("*.md"))]
    sys.exit(main(pages, only_check=sys.argv[1:] == ["--check"]))
