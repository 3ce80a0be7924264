"""examples/minimal_loop.py: its command, and that it learns."""

import re
import sys

import torch
from conftest import run

import data
from examples import calculator, minimal_loop
from train import Policy

LINE = r"step +(\d+)   reward (\d\.\d{3})   loss +(-?\d+\.\d{4})   [\d.]+ s"


def test_the_command_runs(tiny_model):
    few = ["--steps", "1", "--prompts_per_step", "2", "--model", tiny_model]
    printed = run(*few, script="examples/minimal_loop.py")
    assert [step for step, _, _ in re.findall(LINE, printed)] == ["1"]


def digits(output, row) -> float:
    """The share of digits, which a random model can learn in a few steps."""
    text = "".join(turn["content"] for turn in output.messages if turn["role"] == "assistant")
    return sum(letter.isdigit() for letter in text) / max(1, len(text))


def test_the_reward_rises(session_engine, args, tokenizer, monkeypatch, capsys):
    data.register_packed_attention()
    policy = Policy(args)
    loaded = args, torch.device("cpu"), tokenizer, policy, session_engine
    monkeypatch.setattr(minimal_loop, "load", lambda model: loaded)
    monkeypatch.setattr(minimal_loop, "LEARNING_RATE", 1e-2)
    monkeypatch.setattr(calculator, "reward", digits)
    monkeypatch.setattr(sys, "argv", ["minimal_loop.py", "--steps", "5", "--prompts_per_step", "4"])
    minimal_loop.main()

    assert session_engine.state == "asleep"
    assert session_engine.version == 4
    steps = re.findall(LINE, capsys.readouterr().out)
    assert [int(step) for step, _, _ in steps] == [1, 2, 3, 4, 5]
    assert float(steps[-1][1]) > float(steps[0][1]) + 0.1
