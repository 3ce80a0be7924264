"""Runs a bench for tests/test_bench.py: `bench_script.py bench/NAME.py FLAGS` is `python
bench/NAME.py FLAGS`, faster.

What the bench starts with this Python is forked, as by tests/forking.py, and so are the
processes of multiprocessing's "spawn". Packages that only draw pictures or make questions, and
that need not be installed for the tests, are replaced.
"""

import json
import multiprocessing
import sys
from types import SimpleNamespace

from forking import fork_scripts
from zygote import leave, main_module, run_as_main


class Picture:
    """Has what the benches use of a matplotlib figure and its axes; savefig writes the points of
    every curve as JSON."""

    def __init__(self):
        self.curves = []

    def __getattr__(self, name):
        return lambda *args, **options: None

    def plot(self, xs, ys, **style) -> None:
        self.curves.append(list(zip(xs, ys, strict=True)))

    def savefig(self, target, dpi) -> None:
        with open(target, "w") as file:
            json.dump(self.curves, file)


class Needles(list):
    """Has what bench/real.py uses of reasoning_gym's needle_haystack: two questions of a split."""

    def __init__(self, name, seed, size, **limits):
        super().__init__({"question": f"Ann is {i}. Who is {i}?", "answer": "Ann"} for i in (seed, seed + 1))

    def score_answer(self, answer: str, entry: dict) -> float:
        return len(set(answer)) / 100 if answer != entry["answer"] else 1.0


def subplots(figsize) -> tuple[Picture, Picture]:
    picture = Picture()
    return picture, picture


if __name__ == "__main__":
    fork_scripts()
    multiprocessing.get_context = lambda method, get=multiprocessing.get_context: get("fork")
    pyplot = SimpleNamespace(subplots=subplots)
    sys.modules |= {"reasoning_gym": SimpleNamespace(create_dataset=Needles), "matplotlib.pyplot": pyplot,
                    "matplotlib": SimpleNamespace(pyplot=pyplot)}  # fmt: skip
    leave(run_as_main(*main_module(sys.argv[1:])))
