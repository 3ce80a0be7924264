"""Writes the tables of README.md and docs/ from the records in results/.

    python results/tables.py            # rewrites every table
    python results/tables.py --check    # exit code 1 if a table is not that of its records
    python results/tables.py maze       # prints one

A table stands between `<!-- results: NAME -->` and `<!-- end -->`. NAME is that of a function
below; it yields the header of the table, then its rows.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median

from record import RESULTS, read_lines

REPO = RESULTS.parent
PLACE = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES: dict[str, Callable[[], Iterator[tuple]]] = {}


def table(function):
    """Registers a function whose name a page may have between its markers."""
    TABLES[function.__name__] = function
    return function


class Run:
    """What is recorded of a run: its entry of record.json, and its lines of metrics.jsonl.

    Of runs before 2026-11-26 some numbers are known and their metrics are not: these stand in
    the record's "figures", by what they are, as "max rollout/logp_diff_max".
    """

    def __init__(self, record: dict, lines: list[dict]):
        self.record = record
        self.lines = lines
        self.figures = record.get("figures", {})

    def values(self, metric: str) -> list[float]:
        return [line[metric] for line in self.lines if metric in line]

    def at(self, metric: str, step: int) -> str:
        """Returns a metric after a step with three digits, "" where it was not recorded."""
        for line in self.lines:
            if line["step"] == step and metric in line:
                return f"{line[metric]:.3f}"
        return ""

    def largest(self, metric: str) -> float:
        return self.figures.get(f"max {metric}") or max(self.values(metric))

    def total(self, metric: str) -> float:
        return self.figures.get(f"sum {metric}") or sum(self.values(metric))

    def first_step(self, metric: str, least: float) -> str:
        """Returns the first step whose metric is so large, "never" if none is."""
        figure = self.figures.get(f"first {metric} >= {least}")
        steps = [line["step"] for line in self.lines if line.get(metric, 0) >= least]
        return str(figure or min(steps, default="never"))

    def trajectories_to(self, least: float) -> str:
        """Returns how many trajectories were trained until eval/reward was so large."""
        n = 0
        for line in self.lines:
            n += line.get("rollout/trajectories", 0)
            if line.get("eval/reward", 0) >= least:
                return f"{n:,.0f}"
        return "never"

    def duration(self) -> str:
        """Returns the time that the command took."""
        minutes, seconds = divmod(round(self.record["seconds"]), 60)
        return f"{minutes} min {seconds} s"


def runs(figure: str, results: Path = RESULTS) -> dict[str, Run]:
    """Returns the runs of a figure by their names, in the order of record.json."""
    records = json.loads((results / figure / "record.json").read_text())
    lines = read_lines(results / figure / "metrics.jsonl")
    return {
        name: Run(record, [line for line in lines if line["run"] == name])
        for name, record in records.items()
    }


def spread(middle: float, least: float, most: float) -> str:
    return f"{middle:.2f} ({least:.2f} - {most:.2f})"


# ---------------------------------------------------------------- training runs


@table
def quick_start():
    """The differences of logprobs are the largest of a run's steps."""
    steps = (0, 10, 20, 40)
    kinds = ("max", "mean")
    rewards = (f"eval, step {step}" for step in steps)
    differences = (f"largest logp_diff_{kind}" for kind in kinds)
    yield "seed", *rewards, *differences, "whole command"
    for name, run in runs("quick_start").items():
        rewards = [run.at("eval/reward", step) for step in steps]
        differences = [f"{run.largest(f'rollout/logp_diff_{kind}'):.1e}" for kind in kinds]
        yield name.removeprefix("seed_"), *rewards, *differences, run.duration()


def rewards_by_step(labels: dict[str, str], figure: str, steps: tuple) -> Iterator[tuple]:
    """Yields a row of held-out rewards for each run that `labels` names."""
    known = runs(figure)
    for name, label in labels.items():
        yield label, *(known[name].at("eval/reward", step) for step in steps)


@table
def two_hops():
    steps = (0, 5, 10, 15, 20, 25)
    labels = {
        "seed_0": "seed 0",
        "seed_1": "seed 1, other jobs in the last minute",
        "seed_2": "seed 2, other jobs all the time",
        "seed_0_float32": "seed 0 in float32, AVX2 alone, other jobs in the first minutes",
    }
    yield "held-out reward after step", *map(str, steps), "whole command"
    known = runs("two_hops")
    for row, name in zip(rewards_by_step(labels, "two_hops", steps), labels, strict=True):
        yield *row, known[name].duration()


@table
def two_hops_imitation():
    steps = (5, 10, 15, 20, 25)
    labels = {
        "rl_beside_imitation": "40 demonstrations once, then 160 prompts with a reward",
        "imitation_40": "the same 40 demonstrations five times",
        "imitation_200": "200 demonstrations once",
    }
    yield "held-out reward after step", *map(str, steps), "seconds of steps 6 to 25"
    known = runs("two_hops")
    for row, name in zip(rewards_by_step(labels, "two_hops", steps), labels, strict=True):
        figures = known[name].figures
        yield *row, str(figures["seconds of steps 6 to 25"])


@table
def two_hops_trl():
    yield "after the demonstrations", "held-out reward at first", "seconds", "steps", "then"
    known = runs("two_hops")
    for name, label in (("trl", "TRL with vLLM"), ("flatrl_beside_trl", "flatrl")):
        first, last = known[name].lines
        steps = str(last["step"] - first["step"])
        rewards = [f"{line['held_out']:.3f}" for line in (first, last)]
        yield label, rewards[0], str(last["seconds"]), steps, rewards[1]


@table
def maze():
    steps = (0, 6, 8, 12, 18, 24)
    yield "held-out reward after step", *map(str, steps)
    for seed in range(3):
        labels = {f"{algo}_{seed}": f"`{algo}`, seed {seed}" for algo in ("gigpo", "grpo")}
        yield from rewards_by_step(labels, "maze", steps)


@table
def proposer():
    steps = (0, 20, 40)
    yield "after step", *map(str, steps)
    yield from rewards_by_step({"seed_0": "right answers"}, "proposer", steps)


@table
def echo():
    """A cell has a value for each seed."""
    loss = "observation loss, first step"
    yield "task", "`--observation_coef`", "mean reward of all steps", "held-out, last", loss, "last"
    known = runs("echo")
    for task in ("calculator", "maze"):
        for coef in ("0", "0.05"):
            cells = []
            for seed in range(3):
                run = known[f"{task}_{coef}_{seed}"]
                losses = run.values("actor/observation_loss")
                ends = [f"{losses[i]:.2f}" for i in (0, -1)] if losses else ["-", "-"]
                held_out = f"{run.values('eval/reward')[-1]:.3f}"
                cells.append((f"{fmean(run.values('reward/mean')):.3f}", held_out, *ends))
            yield f"`{task}`", coef, *(", ".join(column) for column in zip(*cells))


@table
def distillation():
    """A cell has a value for each seed."""
    bounds = (0.7, 0.8, 0.9)
    yield "`--kl_kind`", *(f"trajectories to {bound}" for bound in bounds), "at first", "at the end"
    known = runs("distillation")
    for kind in ("k1", "top16"):
        cells = []
        for seed in range(3):
            run = known[f"{kind}_{seed}"]
            rewards = run.values("eval/reward")
            ends = [f"{rewards[i]:.3f}" for i in (0, -1)]
            cells.append((*(run.trajectories_to(bound) for bound in bounds), *ends))
        yield f"`{kind}`", *(", ".join(column) for column in zip(*cells))


@table
def presets():
    """A column has a value for each seed."""
    yield "`--algo`", "eval before", "after", "steps to eval 0.9", "to sampled 0.9", "trajectories"
    by_algo: dict[str, list[Run]] = {}
    for name, run in runs("presets").items():
        by_algo.setdefault(name.rpartition("_")[0], []).append(run)
    for algo, seeds in by_algo.items():
        cells = [
            (
                run.at("eval/reward", 0),
                run.at("eval/reward", 40),
                run.first_step("eval/reward", 0.9),
                run.first_step("reward/mean", 0.9),
                f"{run.total('rollout/trajectories'):,.0f}",
            )
            for run in seeds
        ]
        yield f"`{algo}`", *(", ".join(column) for column in zip(*cells, strict=True))


@table
def staleness():
    yield "rollout", "trajectories per second", "mean staleness", "largest of a step"
    for name, run in runs("staleness").items():
        rate = run.total("rollout/trajectories") / run.total("timing/step_s")
        stale = run.values("rollout/staleness_mean")
        mean = fmean(stale) if stale else 0
        yield name, f"{rate:.0f}", f"{mean:.1f}", f"{max(stale, default=0):.1f}"


@table
def aged():
    """A column has a value for each seed."""
    labels = {
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
        example, lr, age, correction = cell.split("_")
        lines = [run.lines[0] for run in seeds]
        rewards = [line["reward/mean"] for line in lines]
        yield (
            example,
            lr,
            age,
            labels[correction],
            ", ".join(f"{fmean(each):.2f}" for each in rewards),
            ", ".join(f"{fmean(each[-10:]):.2f}" for each in rewards),
            ", ".join(f"{max(line['actor/grad_norm']):.1f}" for line in lines),
        )


@table
def real():
    """CPU seconds, of the first twenty steps: median, least and most."""
    yield "SmolLM2 on needle_haystack", "held-out before", "after", "steps", "CPU seconds", "a step"
    for name, run in runs("real").items():
        lines = run.lines[:21]
        held_out = [f"{line['held_out']:.3f}" if "held_out" in line else "" for line in lines]
        steps = [after["cpu"] - before["cpu"] for before, after in zip(lines, lines[1:])]
        cost = f"{median(steps):.1f} ({min(steps):.1f} - {max(steps):.1f})"
        total = f"{lines[-1]['cpu']:.0f}"
        side, seed = name.split("_")
        yield f"{side}, seed {seed}", held_out[0], held_out[-1], str(len(steps)), total, cost


# ---------------------------------------------------------------- benches: rows that they wrote


@table
def rollout():
    labels = {
        "turns": "tokens per second, four turns against one `generate` a turn",
        "single": "the same, one turn",
        "even": "four turns of 16 to 48 tokens",
        "tail": "four turns of 1 to 256 tokens, 32 on average",
        "wide": "four turns, a larger model",
        "many": "128 trajectories against 8,192 in a step",
        "sync": "seconds of a weight sync against a copy of the same 559 MB",
    }
    yield "flatrl against plain vLLM", "ratio (min - max)", "engine idle"
    known = runs("rollout")
    for name, label in labels.items():
        row = known[name].lines[0]
        idle = f"{row['idle']:.0%}" if "idle" in row else ""
        yield label, spread(*row["ratio"]), idle


@table
def update():
    """Ratios: how many times flatrl's seconds, of scoring and of an update."""
    yield "prompt + response tokens", "tokens, unique", "flatrl, s", "unshared", "bare", "TRL", "MB"
    for name in ("shared", "distinct"):
        by_case: dict[tuple, dict[str, dict]] = {}
        for line in runs("update")[name].lines:
            case = (line["prompt_tokens"], line["response_tokens"])
            by_case.setdefault(case, {})[line["side"]] = line
        for (prompt, response), sides in by_case.items():
            ours = sides["flatrl"]
            tokens = f"{sides['unshared']['tokens']:,}, {ours['tokens']:,}"
            seconds = f"{ours['score_s']:.2f} / {ours['update_s']:.2f}"
            ratios = []
            for side in ("unshared", "bare", "TRL"):
                line = sides.get(side)
                ratios.append(line and f"{line['score_ratio']:.2f} / {line['update_ratio']:.2f}")
            memory = f"{ours['mb']:,.0f}, {sides['unshared']['mb']:,.0f}"
            label = f"{prompt:,} + {response}{', distinct prompts' * (name == 'distinct')}"
            yield label, tokens, seconds, *(ratio or "" for ratio in ratios), memory


@table
def micro_batches():
    sizes = (2048, 4096, 8192, 16384)
    known = runs("update")
    yield "prompt + response tokens", *(f"{size:,}" for size in sizes)
    for i in range(2):
        lines = [known[f"micro_batch_{size}"].lines[i] for size in sizes]
        label = f"{lines[0]['prompt_tokens']:,} + {lines[0]['response_tokens']}"
        yield label, *(f"{line['update_s']:.2f} s, {line['mb']:,.0f} MB" for line in lines)


@table
def trl():
    labels = {
        "agent_prompts": "prompts of 300 tokens, 64 sampled",
        "short_prompts": "prompts of 13 tokens, 64 sampled, one thread",
        "two_threads": "the same, two threads",
        "vllm": "the same, one thread",
        "free_lengths": "lengths of the model's own, 210 on average",
    }
    yield "a step", "compared with", "flatrl, s", "TRL, s", "flatrl is faster by (min - max)"
    known = runs("trl")
    for name, label in labels.items():
        ours, *others = known[name].lines
        for theirs in others:
            seconds = [
                f"{side['step']:.2f} ({side['generate']:.2f}, {side['update']:.2f})"
                for side in (ours, theirs)
            ]
            yield label, theirs["side"], *seconds, spread(*theirs["ratio"])


@table
def tools():
    yield "flatrl against", "how many times faster (min - max)"
    known = runs("tools")
    for name, label in (("rounds", ""), ("waves", ", waves of 64 of 512")):
        for line in known[name].lines:
            middle, *ends = line["ratio"]
            ratio = spread(middle, *ends) if ends else f"{middle:.2f}"
            yield f"{line['side']}{label}", ratio


@table
def bisection():
    known = runs("bisection")
    yield "", "games won, sampled", "at temperature 0", "whole command"
    yield "the teacher", "0.533", "", ""
    run = known["imitation"]
    greedy = known["imitation_greedy"].at("eval/reward", 0)
    yield "imitation of 76,800 games", run.at("eval/reward", 0), greedy, run.duration()
    for seed in range(3):
        run = known[f"seed_{seed}"]
        sampled = f"{fmean(run.values('reward/mean')[-10:]):.3f}"
        yield f"the reward, seed {seed}", sampled, run.at("eval/reward", 100), run.duration()
    yield "halving what is left", "0.969", "0.969", ""


def credit(game: str) -> Iterator[tuple]:
    """Yields correlation, bias and noise by turn. A bias that may be chance is "<" its limit.

    Estimators that differ in scale only, and so have the same cells, share a row."""
    known = {
        (line["estimator"], line["turn"]): line
        for line in runs("credit")["turns"].lines
        if line["game"] == game and line["turn"] <= 5
    }
    turns = sorted({turn for _, turn in known})
    yield "", "all turns", *(f"turn {turn}" for turn in turns if turn)
    yield "true advantage", *(f"{known['grpo', turn]['truth']:.2f}" for turn in turns)
    names: dict[tuple, list[str]] = {}
    for name in dict.fromkeys(name for name, _ in known):
        cells = []
        for line in (known[name, turn] for turn in turns):
            limit = max(line["bias_limit"], 0.01)
            bias = f"{line['bias']:.2f}" if line["bias"] > limit else f"<{limit:.2f}"
            cells.append(f"{line['correlation']:.2f}, {bias}, {line['noise']:.2f}")
            if not line["truth"]:
                cells[-1] = "-"
        names.setdefault(tuple(cells), []).append(name)
    for cells, equal in names.items():
        yield ", ".join(equal), *cells


@table
def credit_bisection():
    return credit("bisection")


@table
def credit_nim():
    return credit("nim")


@table
def host():
    [line] = runs("host")["host"].lines
    parts = ("send", "receive", "write", "collate", "credit", "deal", "pack", "all")
    yield parts
    yield tuple(f"{line[part]:.1f} s" for part in parts)


@table
def horizon_turns():
    """Of the latest run, beside turn 200 of the run before the change."""
    turns = (2, 10, 50, 100, 200)
    yield "CPU ms of turn", *map(str, turns), "200 before", "TRL", "verl"

    def costs(run: Run) -> dict[str, dict[int, float]]:
        lines = [line for line in run.lines if line["part"] == "turns" and line["numbers"]]
        return {line["label"]: dict(zip(line["turns"], line["numbers"])) for line in lines}

    known = runs("horizon")
    before = costs(known["before"])
    *_, now = map(costs, known.values())
    for label, ms in now.items():
        what, _, way = label.partition(": ")
        if way == "append":
            others = [now.get(f"{what}: {side}", {}) for side in ("TRL", "verl")]
            cells = [ms[turn] for turn in turns]
            cells += [before[label][200], *(other.get(200) for other in others)]
            yield what, *("" if cell is None else f"{cell:.1f}" for cell in cells)


@table
def horizon_engine():
    """Pairs: trajectories of few turns, of many. The growth is that of all but the model."""
    parts = ("elapsed", "model", "rest of the engine", "loops")
    yield "ms a turn", *parts, "growth: elapsed", "CPU"
    for name, run in runs("horizon").items():
        lines = [line for line in run.lines if line["part"] == "engine"]
        for few, many in zip(lines[::2], lines[1::2], strict=True):
            pairs = [*zip(few["numbers"], many["numbers"], strict=True)]
            waiting = [line[0] - line[1] for line in zip(*pairs, strict=True)]
            busy = [line[2] + line[3] for line in zip(*pairs, strict=True)]
            label = f"{name}: {few['label']}".removesuffix("turns") + "and "
            label += many["label"].partition(", ")[2]
            growth = [f"{late / early:.1f}" for early, late in (waiting, busy)]
            yield label, *(f"{early:.1f}, {late:.1f}" for early, late in pairs), *growth


@table
def horizon_memory():
    yield "256 outputs", "MB", "bytes a token"
    for name, run in runs("horizon").items():
        for line in run.lines:
            if line["part"] == "memory":
                yield f"{name}: {line['label']}", *(f"{x:.0f}" for x in line["numbers"])


@table
def models():
    yield "architecture", "engine and trainer", "mean", "max"
    for line in runs("models")["models"].lines:
        numbers = [f"{line[key]:.1e}" if key in line else "" for key in ("mean", "max")]
        yield line["name"], line["verdict"], *numbers


@table
def templates():
    """What dry conversations tell of the templates in tests/chat_templates.py. Not recorded."""
    sys.path[:0] = [str(REPO), str(REPO / "tests")]
    import chat_templates

    from agent_loop import MALFORMED, ROUNDS, conversation
    from examples.tiny_models import make_tokenizer

    yield "template", "a turn ends with", "tools", "reasoning", "forks at", "writes the date"
    for name in chat_templates.FAMILIES:
        tokenizer = chat_templates.tokenizer_for(name, make_tokenizer())
        talk = conversation(tokenizer, chat_templates.stop_ids(name, tokenizer))
        ends = dict.fromkeys(end for end in (talk.answer_end, talk.call_end) if end is not None)
        shows_calls = talk.shows_calls
        if not talk.takes("a tool's answer" if shows_calls else MALFORMED):
            tools = "refused"
        elif not shows_calls:
            tools = "calls stay text"
        else:
            tools = "several calls" if talk.takes_two_calls else "one call a turn"
        shown = "apart" if talk.shows_reasoning else "in the text"
        forks = [each for each in ROUNDS if tools != "refused" or ROUNDS[each][1]["role"] == "user"]
        forks = [each for each in forks if talk.forks_at(each)]
        yield (
            name,
            ", ".join(f"`{tokenizer.decode([end])}`" for end in ends),
            tools,
            shown,
            ", ".join(forks),
            "yes" if talk.writes_date else "",
        )


@table
def compare_errors():
    """Effect: the mean difference by its standard deviation from pair to pair."""
    verdicts = "A is better", "B is better", "not told apart"
    yield "factor", "seeds of A and B", "effect", *verdicts, "median pairs to a verdict"
    for line in runs("compare")["errors"].lines:
        a, b = line["a_better"], line["b_better"]
        yield (
            f"{line['factor']:g}",
            "equal" if line["equal_seeds"] else "different",
            f"{line['mean'] / line['sd']:.2f}",
            *(str(n) for n in (a, b, line["comparisons"] - a - b)),
            f"{line['median_pairs']:g}",
        )


@table
def maze_pairs():
    """Of flatrl.compare: after each pair, how much better gigpo is than grpo."""
    yield "seed", "`grpo`", "`gigpo`", "`gigpo` is better by, so far"
    for line in runs("compare")["maze"].lines:
        numbers = [f"{line[key]:.3f}" for key in ("a", "b", "mean", "low", "high")]
        a, b, mean, low, high = numbers
        yield str(line["seed"]), a, b, f"{mean} ({low} to {high})"


# ---------------------------------------------------------------- writing


def as_markdown(name: str) -> str:
    """Returns the table of this name. Raises KeyError if there is none."""
    header, *rows = TABLES[name]()
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rewrite(text: str) -> str:
    """Returns a page's text with the tables of the records."""
    return PLACE.sub(lambda found: found[1] + as_markdown(found[2]) + found[3], text)


def main(words: list[str], pages: list[Path]) -> int:
    """Rewrites the pages, checks them, or prints the tables that are named."""
    if words and words != ["--check"]:
        print("\n".join(as_markdown(name) for name in words))
        return 0
    different = [page for page in pages if rewrite(page.read_text()) != page.read_text()]
    for page in different:
        print(f"{page.name}: a table differs from results/")
        if not words:
            page.write_text(rewrite(page.read_text()))
    return int(bool(words and different))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]))
