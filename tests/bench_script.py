"""Runs a bench for tests/test_bench.py: `bench_script.py bench/NAME.py FLAGS` is `python
bench/NAME.py FLAGS`, but faster.

Whatever the bench starts with this Python is forked, as by tests/forking.py, and so are the
processes of multiprocessing's "spawn"."""

import multiprocessing
import sys

from forking import fork_scripts
from zygote import leave, main_module, run_as_main

if __name__ == "__main__":
    fork_scripts()
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method: get_context("fork")
    leave(run_as_main(*main_module(sys.argv[1:])))
