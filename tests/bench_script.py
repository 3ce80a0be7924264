"""Runs a bench for tests/test_bench.py: `bench_script.py bench/NAME.py FLAGS` is `python
bench/NAME.py FLAGS`, but faster.

Whatever the bench starts with this Python is forked, as by tests/forking.py, and so are the
processes of multiprocessing's "spawn". matplotlib, which need not be installed, is replaced.
"""

import json
import multiprocessing
import sys
from types import SimpleNamespace

from forking import fork_scripts
from zygote import leave, main_module, run_as_main


class Picture:
    """Stands in for a figure and its axes; savefig writes the points of every curve as JSON."""

    def __init__(self):
        self.curves = []

    def __getattr__(self, name):
        return lambda *args, **options: None

    def plot(self, xs, ys, **style) -> None:
        self.curves.append(list(zip(xs, ys, strict=True)))

    def savefig(self, target, dpi) -> None:
        with open(target, "w") as file:
            json.dump(self.curves, file)


def subplots(*shape, figsize) -> tuple:
    picture = Picture()
    return picture, [picture, picture] if shape else picture


if __name__ == "__main__":
    fork_scripts()
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method: get_context("fork")
    pyplot = SimpleNamespace(subplots=subplots)
    sys.modules["matplotlib"] = SimpleNamespace(pyplot=pyplot)
    sys.modules["matplotlib.pyplot"] = pyplot
    leave(run_as_main(*main_module(sys.argv[1:])))
