"""Architectures whose engine needs a process to itself: the first model built in one decides about vLLM's groups."""

from conftest import run


def test_engine_and_trainer_agree_in_a_process_of_their_own(cache):
    printed = run("-q", "-p", "no:cacheprovider", "tests/models_cases.py", script="tests/run_pytest.py", cache=cache)
    assert " passed" in printed and " failed" not in printed
