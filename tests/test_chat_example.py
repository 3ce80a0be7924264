"""examples/chat.py: a conversation at the keyboard, scripted on both sides, and one with the real engine."""

import asyncio
import builtins

import pytest
from conftest import REPO
from test_agent_loop import ANSWER, END, SUM, encode, tool_turn, user_turn
from test_example_tasks import Script
from test_rollout import hf_model, wake

import train
from data import load_task
from examples import calculator, chat
from train import Args


@pytest.fixture
def task():
    return load_task(str(REPO / "examples" / "calculator.py"))


@pytest.fixture
def types(monkeypatch):
    """types(line, ...): what the user will type, and the end of the input."""

    def types(*lines):
        left = list(lines)

        def typed(prompt):
            assert prompt == "you> "
            if not left:
                raise EOFError
            return left.pop(0)

        monkeypatch.setattr(builtins, "input", typed)

    return types


def test_a_conversation_with_a_tool_and_a_second_one(task, tokenizer, types, capsys):
    types("What is 1+1?", "", "Sure?", "/new", "Hello", "/quit")
    engine = Script(tokenizer, (SUM, ANSWER, "Yes.", "Hi."))
    args = Args(max_response_tokens=1000, max_assistant_turns=0, max_user_turns=0, tool_timeout=0.5)
    first, second = asyncio.run(chat.converse(engine, tokenizer, None, task, args))
    assert first.response_ids == encode(
        tokenizer, SUM + END + tool_turn("2") + ANSWER + END + user_turn("Sure?") + "Yes." + END
    )
    assert first.messages[0] == {"role": "system", "content": calculator.SYSTEM_PROMPT}
    assert [m["content"] for m in second.messages][1:] == ["Hello", "Hi."]
    assert capsys.readouterr().out.splitlines() == [
        '  calculator({"expression": "1+1"})', "  calculator> 2", f"policy> {ANSWER}", "policy> Yes.", "policy> Hi.",
    ]  # fmt: skip


def test_a_policy_in_a_runs_folder_can_be_talked_to(tmp_path, monkeypatch):
    """As the last lines of a run and the file's docstring have it."""
    monkeypatch.chdir(tmp_path)
    final = tmp_path / "runs/calculator/final"
    final.mkdir(parents=True)
    args = chat.read_arguments(["runs/calculator/final", "--task", str(REPO / "examples/calculator.py")])
    train.complete_flags(args, False)
    assert args.model == str(final)


def test_a_conversation_that_is_full_ends_and_says_so(task, tokenizer, types, capsys):
    types("What is 1+1?")
    engine = Script(tokenizer, (("wh", "length"),))
    asyncio.run(chat.converse(engine, tokenizer, None, task, Args(max_response_tokens=2)))
    assert capsys.readouterr().out == "policy> wh\n(the conversation is over: length; a new one starts)\n"


def test_on_the_real_engine(task, engine, background, tokenizer, tiny_model, args, types, capsys):
    types("What is 1+1?")
    wake(engine, hf_model(tiny_model), 0)
    (output,) = chat.talk(engine, background, tokenizer, None, task, args)
    start = f"<|im_start|>system\n{calculator.SYSTEM_PROMPT}\nTools: calculator{END}\n<|im_start|>user\nWhat is 1+1?"
    assert tokenizer.decode(output.prompt_ids).startswith(start)
    assert 1 <= len(output.response_ids) <= args.max_response_tokens and set(output.response_versions) == {0}
    assert "policy> " in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--task", "x.py"]])
def test_without_a_model_it_says_how_it_is_called(argv):
    with pytest.raises(chat.BadInput, match="MODEL --task FILE"):
        chat.main(argv)
