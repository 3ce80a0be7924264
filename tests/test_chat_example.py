"""examples/chat.py: a conversation at the keyboard, scripted on both sides, and on the engine."""

import asyncio
import builtins
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import REPO
from test_agent_loop import ANSWER, END, SUM, Script, encode, tool_turn, user_turn
from test_rollout import hf_model, wake

from data import load_task
from examples import calculator, chat
from train import Args

TASK = load_task(str(REPO / "examples/calculator.py"))


def types(monkeypatch, *lines: str) -> None:
    """Has the user type these lines, and then end the input."""
    monkeypatch.setattr(builtins, "input", mock.Mock(side_effect=[*lines, EOFError]))


def test_conversations(tokenizer, monkeypatch, capsys):
    types(monkeypatch, "What is 1+1?", "", "Sure?", "/new", "Hello", "/new", "Bye")
    engine = Script(tokenizer, (SUM, ANSWER, "Yes.", "Hi.", ("cut", "length")))
    args = Args(max_response_tokens=1000, max_assistant_turns=0)
    first, second, _ = asyncio.run(chat.converse(engine, tokenizer, None, TASK, args))
    said = SUM + END + tool_turn("2") + ANSWER + END + user_turn("Sure?") + "Yes." + END
    assert first.response_ids == encode(tokenizer, said)
    assert first.messages[0] == {"role": "system", "content": calculator.SYSTEM_PROMPT}
    assert [message["content"] for message in second.messages][1:] == ["Hello", "Hi."]
    assert capsys.readouterr().out.splitlines() == [
        '  calculator({"expression": "1+1"})',
        "  calculator> 2",
        f"policy> {ANSWER}",
        "policy> Yes.",
        "policy> Hi.",
        "policy> cut",
        "(the conversation is over: length; a new one starts)",
    ]


def test_on_the_real_engine(engine, background, tokenizer, tiny_model, args, monkeypatch, capsys):
    types(monkeypatch, "What is 1+1?")
    wake(engine, hf_model(tiny_model), 0)
    (output,) = chat.talk(engine, background, tokenizer, None, TASK, args)
    assert "user\nWhat is 1+1?" in tokenizer.decode(output.prompt_ids)
    assert set(output.response_versions) == {0}
    assert "policy> " in capsys.readouterr().out


@pytest.mark.parametrize("rows, question", [
    ([{"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1\n+ 1?"}]}],
     "1 + 1?"),
    ([{"prompt": []}], ""),  # a simulated user speaks first
    ([{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "images": ["a.png"]}], ""),
    ([], ""),
    (None, ""),  # load fails
])  # fmt: skip
def test_what_to_ask(rows, question):
    assert chat.example(SimpleNamespace(load=lambda split: rows), Args()) == question


def test_arguments(tmp_path, monkeypatch):
    """The model may be in the folder that training would write to."""
    monkeypatch.chdir(tmp_path)
    final = tmp_path / "runs/calculator/final"
    final.mkdir(parents=True)
    args = chat.read_arguments(["runs/calculator/final", "--temperature", "0.5"])
    assert (args.model, args.temperature) == ("runs/calculator/final", 0.5)
    with pytest.raises(chat.BadInput, match="MODEL --task FILE"):
        chat.main([])
