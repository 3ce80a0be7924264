"""A verdict on two commands: pairs of runs with equal seeds, until a sequential test decides.

    python -m flatrl.compare "python train.py" "python train.py --lr 1e-3"

The shell runs both commands with `--seed I --output_dir FOLDER` appended, so the two runs of a
pair have the same prompts and sampling seeds. More pairs follow until the test decides or
--pairs is reached. The last line is the verdict:

    B is better by 0.041 (0.012 to 0.07) after 7 pairs
    not told apart after 10 pairs: B is better by 0.01 (-0.02 to 0.04)

A run counts with one number: the mean of --metric over its evaluations after step 0. That is
the area under its learning curve, so a faster run is better, too. It varies less from seed to
seed than the last evaluation alone (--last 1).

Finished runs are kept in --output_dir, and the same command continues from them. More --pairs
may be asked for later: the error of the test holds for any number of looks at any time."""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from math import inf, isfinite, sqrt
from pathlib import Path
from statistics import fmean, pstdev

from agent_loop import BadInput
from flatrl.bad_input import need
from flatrl.files import logged, to_json_lines, write_whole

PRIOR = 0.25  # c^2 of the test: differences of about 1 / c = 2 standard deviations are expected
SHOWN = 15  # last lines of a run that failed


@dataclass
class Pair:
    """What is known after a pair of runs.

    a, b: the numbers of its two runs. mean, low, high: how much better B is than A, over all
    pairs so far, with its confidence interval."""

    seed: int
    a: float
    b: float
    pairs: int
    mean: float
    low: float
    high: float

    @property
    def decided(self) -> bool:
        return self.low > 0 or self.high < 0

    def __str__(self):
        name, mean, low, high = "B", self.mean, self.low, self.high
        if mean < 0:
            name, mean, low, high = "A", -mean, -high, -low
        return f"{name} is better by {mean:.2g} ({low:.2g} to {high:.2g})"


def interval(differences: list[float], error: float) -> tuple[float, float]:
    """Returns the ends of a confidence interval for the mean of differences.

    It is valid at all numbers of pairs together: if differences are Gaussian, of any variance,
    the probability that the interval of some n excludes their true mean is at most `error`. With
    few differences it is infinite (three, for an error of 0.05).

    It holds the means m that the t-test of Wang and Ramdas (2310.03722) with a Gaussian mixture
    does not reject. With S and V the sums of (x - m) and (x - m)^2, these are the m for which

        sqrt(c^2 / (n + c^2)) ((n + c^2) V / ((n + c^2) V - S^2))^(n / 2) < 1 / error

    The left side is a likelihood ratio, in which the unknown variance cancels out: of a mean that
    is drawn, in standard deviations from m, from a Gaussian of variance 1 / c^2, to the mean m.
    With d = mean - m and the standard deviation s, V is n (s^2 + d^2) and S is n d. So it holds
    where d^2 < s^2 (1 - root) / (root - share)."""
    n = len(differences)
    mean = fmean(differences)
    share = PRIOR / (n + PRIOR)
    root = (share * error**2) ** (1 / n)
    if root <= share:
        return -inf, inf
    half = pstdev(differences) * sqrt((1 - root) / (root - share))
    return mean - half, mean + half


def compare(
    run: Callable[[str, int], float],
    seeds: Iterable[int],
    error: float = 0.05,
    smaller: bool = False,
) -> Iterator[Pair]:
    """Yields a Pair for each seed, until the interval excludes 0 or the seeds end.

    run: takes "A" or "B" and a seed, returns a number. smaller: smaller numbers are better.
    The order of A and B alternates, so a machine that becomes slower favours neither."""
    differences = []
    for seed in seeds:
        order = "BA" if len(differences) % 2 else "AB"
        numbers = {name: run(name, seed) for name in order}
        a, b = numbers["A"], numbers["B"]
        differences.append(a - b if smaller else b - a)
        low, high = interval(differences, error)
        pair = Pair(seed, a, b, len(differences), fmean(differences), low, high)
        yield pair
        if pair.decided:
            return


def verdict(pair: Pair) -> str:
    """Returns the sentence about the last pair of a comparison."""
    if pair.decided:
        return f"{pair} after {pair.pairs} pairs"
    if not isfinite(pair.low):
        return f"no verdict: {pair.pairs} pair(s) are too few for the test; give more --pairs"
    return f"not told apart after {pair.pairs} pairs: {pair}"


def run_once(command: str, folder: Path):
    """Runs a command in the shell, unless it has finished before. Raises BadInput if it fails.

    folder: that of the run. Next to it are its output, FOLDER.log, and FOLDER.done, which holds
    the command once it has finished."""
    log, done = (folder.with_name(folder.name + end) for end in (".log", ".done"))
    if folder.exists() and done.exists() and done.read_text() == command:
        print(f"{folder.name} is kept as it is; to run it again, remove {done}", flush=True)
        return
    done.unlink(missing_ok=True)  # of another command, or of a folder that is gone
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"{folder.name} runs; its output is in {log}", flush=True)
    with log.open("w") as stream:
        code = subprocess.run(command, shell=True, stdout=stream, stderr=stream).returncode
    if code:
        lines = log.read_text(errors="replace").splitlines()[-SHOWN:]
        raise BadInput(
            "\n".join(lines) + f"\nrun {folder.name} failed with exit code {code}, see {log}: "
            f"{command}\nFinished runs are kept. The same comparison continues from them."
        )
    write_whole(done, command)


def number_of(folder: Path, metric: str, last: int | None) -> float:
    """Returns the mean of a metric after step 0, over its last values or all.

    Raises BadInput if the run's metrics.jsonl has none, or if the mean is not finite."""
    values = [value for step, value in logged(folder, metric).items() if step > 0]
    need(values, f"{folder}/metrics.jsonl has no {metric} after step 0")
    mean = fmean(values[-last:] if last else values)
    need(isfinite(mean), f"{folder}/metrics.jsonl: {metric} is {mean}")
    return mean


def main(arguments: list[str] | None = None):
    """The command: see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("A", help="a command that takes --seed and --output_dir")
    parser.add_argument("B", help="another one")
    parser.add_argument("--pairs", type=int, default=10, help="the most pairs (%(default)s)")
    parser.add_argument("--metric", default="eval/reward", help="(%(default)s)")
    parser.add_argument("--last", type=int, help="take the mean of the last values (all)")
    parser.add_argument("--smaller", action="store_true", help="smaller numbers are better")
    parser.add_argument("--first_seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--error", type=float, default=0.05, help="the test's level (%(default)s)")
    parser.add_argument("--output_dir", type=Path, default="runs/compare", help="(%(default)s)")
    args = parser.parse_args(arguments)
    if args.pairs < 1:
        parser.error("--pairs must be at least 1")
    if not 0 < args.error < 1:
        parser.error("--error must be between 0 and 1")
    home = args.output_dir.resolve()

    def run(name: str, seed: int) -> float:
        folder = home / f"{name}_{seed}"
        command = f"{getattr(args, name)} --seed {seed} --output_dir {shlex.quote(str(folder))}"
        run_once(command, folder)
        return number_of(folder, args.metric, args.last)

    seeds = range(args.first_seed, args.first_seed + args.pairs)
    pairs = []
    try:
        for pair in compare(run, seeds, args.error, args.smaller):
            print(f"seed {pair.seed}: A {pair.a:.4g}, B {pair.b:.4g}; so far {pair}", flush=True)
            pairs.append(asdict(pair))
            write_whole(home / "pairs.jsonl", to_json_lines(pairs))
    except BadInput as error:
        sys.exit(f"compare: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    print(verdict(pair))


if __name__ == "__main__":
    main()
