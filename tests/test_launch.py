"""flatrl/launch.py: a process before torch is imported."""

import os
import signal
import subprocess
import sys

import pytest
from conftest import REPO

PROGRAM = """
import os, signal
from flatrl.launch import prepare_process
prepare_process()
print(os.environ["OMP_NUM_THREADS"], "\\u2713")
signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="ranks of CPUs share its cores")
def test_ranks_share_the_cores_print_any_letter_and_end_at_once_by_ctrl_c():
    n_cores = len(os.sched_getaffinity(0))
    env = {"PATH": os.environ["PATH"], "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=REPO, env=env | {"LOCAL_WORLD_SIZE": str(n_cores)}, capture_output=True, text=True)
    assert done.stdout.splitlines()[1:] == ["1 \\u2713"]
    assert done.returncode == -signal.SIGINT and done.stderr == ""
