"""Runs tests/models_cases.py, whose engines need a process to themselves.

The first model that is built in a process decides about vLLM's groups."""

from conftest import run


def test_engine_and_trainer_agree_in_a_process_of_their_own(cache):
    flags = ["-q", "-p", "no:cacheprovider", "tests/models_cases.py"]
    printed = run(*flags, script="tests/run_pytest.py", cache=cache)
    assert " passed" in printed and " failed" not in printed
