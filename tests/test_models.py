"""Architectures whose engine needs a process to itself: the first model built in one decides about vLLM's groups."""

import subprocess
import sys

from conftest import HANGS, REPO


def test_engine_and_trainer_agree_in_a_process_of_their_own():
    cases = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/models_cases.py"]
    done = subprocess.run(cases, cwd=REPO, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
