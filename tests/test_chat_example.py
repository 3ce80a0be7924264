"""examples/chat.py: conversations at the keyboard, scripted on both sides."""

import builtins
from types import SimpleNamespace
from unittest import mock

import pytest
from test_agent_loop import ANSWER, SUM, Script

from examples import calculator, chat
from train import Args


def test_conversations(tokenizer, background, monkeypatch, capsys):
    typed = ["What is 1+1?", "Sure?", "", "Hello", EOFError]
    monkeypatch.setattr(builtins, "input", mock.Mock(side_effect=typed))
    engine = Script(tokenizer, (SUM, ANSWER, "Yes.", ("cut", "length")))
    engine.step = engine.poke = lambda: None
    system = {"role": "system", "content": calculator.SYSTEM_PROMPT}
    run = SimpleNamespace(
        engine=engine,
        tokenizer=tokenizer,
        processor=None,
        task=SimpleNamespace(TOOLS=calculator.TOOLS, INTERACTIONS=[chat.Terminal()]),
        args=Args(max_response_tokens=1000, max_assistant_turns=0),
        background=background,
        rows={"val": [{"prompt": [system, {"role": "user", "content": "What is 2+2?"}]}]},
    )
    chat.converse(run)
    chat.converse(run)
    with pytest.raises(EOFError):
        chat.converse(run)
    prompts = [tokenizer.decode(prompt) for prompt in engine.prompts]
    assert all(prompt.count(calculator.SYSTEM_PROMPT) == 1 for prompt in prompts)
    assert "What is 1+1?" in prompts[2] and "Sure?" in prompts[2]
    assert "Hello" in prompts[3] and "Sure?" not in prompts[3]
    assert capsys.readouterr().out.splitlines() == [
        "assistant> ",
        "  calculator({'expression': '1+1'})",
        "tool> 2",
        f"assistant> {ANSWER}",
        "assistant> Yes.",
        "assistant> cut",
        "(this conversation ends here: length)",
    ]
