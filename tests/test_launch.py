"""Processes: before torch is imported, and ranks that were started differently."""

import os
import signal
import subprocess
import sys

import pytest
from conftest import REPO

from flatrl import processes
from flatrl.bad_input import BadInput
from flatrl.rows import hash_of_rows

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


@pytest.mark.parametrize("lr, texts, said", [
    (0.1, "abc", "rank 2 differs from rank 0 in --lr:"),
    (0.2, "acb", "rank 2 differs from rank 0 in train rows:"),
    (0.1, "ab", "rank 2 differs from rank 0 in --lr, train rows:"),
])  # fmt: skip
def test_ranks_with_other_flags_or_rows_are_refused(monkeypatch, lr, texts, said):
    def told(lr, texts):
        rows = [{"prompt": text} for text in texts]
        return {"--seed": 0, "--lr": lr, "train rows": hash_of_rows(rows, seed=0)}

    ranks = [told(0.2, "abc")] * 2
    monkeypatch.setattr(processes, "all_gather", lambda values: [*ranks, values])
    processes.check_ranks_agree(told(0.2, "abc"))
    with pytest.raises(BadInput, match=said):
        processes.check_ranks_agree(told(lr, texts))
