"""examples/program.py: programs as agents; the engine is test_chat.py's script."""

import json
import shutil
import sys

import pytest
from conftest import REPO, wait_for
from test_agent_loop import ANSWER, END, PROMPT, SUM, call, tool_turn
from test_chat import Engine, assert_exact, assert_output, endpoint, run  # noqa: F401

import agent_loop
import data
from rollout import score
from train import Args

program = data.load_task(str(REPO / "examples" / "program.py"))
AGENT = ["sh", program.AGENTS / "calculator.sh"]
CURL = pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="needs curl and jq")


@pytest.fixture
def play(endpoint, tokenizer, monkeypatch):  # noqa: F811
    """play(command, line, ..., **args) -> (the loop's outputs, its engine)."""

    def play(command, *lines, **args):
        monkeypatch.setattr(program, "COMMAND", list(map(str, command)))
        engine = Engine(tokenizer, lines)
        args = Args(**{"max_response_tokens": 2000, "max_assistant_turns": 0} | args)
        row = {"prompt": PROMPT, "reward_model": {"ground_truth": "2"}, "step": 3, "index": 0, "validate": False}
        loop = program.ProgramLoop(engine, tokenizer, None, program, args)
        try:
            outputs = run(loop.run({}, **row))
        finally:
            assert endpoint.clients == {}
        if outputs:
            run(score(program, outputs, row))
        return outputs, engine

    return play


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def shell(code: str) -> list[str]:
    return ["sh", "-c", code]


ASK = """
ask() { curl -sS --fail -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \\
        -d '{"messages": [{"role": "user", "content": "What is 1+1?"}]}' "$OPENAI_BASE_URL/chat/completions"; }
"""


@CURL
def test_a_conversation_of_a_program_is_one_output_of_exact_tokens(play):
    two = "Both: " + SUM + "\n" + call(expression="20*30")
    (output,), engine = play(AGENT, two, call(expression="9-11"), ANSWER)
    assert_output(output, engine, (1, two + END), tool_turn("2", "600"), (2, call(expression="9-11") + END),
                  tool_turn("-2"), (3, ANSWER + END))  # fmt: skip
    assert output.extra["answer"] == json.dumps(ANSWER)
    assert (output.reward, output.stop_reason) == (1.0, "stop")


@CURL
@pytest.mark.parametrize("expression", ["$(touch x)", "1+1\n2+2", "a[1]+1", "", "1+1;2*2"])
def test_what_the_policy_writes_is_no_code_of_the_program(play, expression):
    (output,), engine = play(AGENT, call(expression=expression), "<answer>3</answer>\n\nor so")
    said = "Error: the expression must be like 37*48"
    assert_output(output, engine, (1, call(expression=expression) + END), tool_turn(said),
                  (2, "<answer>3</answer>\n\nor so" + END))  # fmt: skip
    assert output.reward == 0.0  # its answer is on one line, and wrong


@CURL
@pytest.mark.parametrize(
    "limits, reason", [(dict(max_assistant_turns=2), "max_turns"), (dict(max_response_tokens=70), "length")]
)
def test_a_program_out_of_budget_keeps_what_it_has(play, limits, reason):
    (output,), engine = play(AGENT, *[call(expression="1111+2222")] * 5, **limits)
    assert (output.stop_reason, output.extra["answer"], output.reward) == (reason, None, 0.0)
    assert_exact([output], engine)


def test_what_a_program_gets(play, monkeypatch):
    monkeypatch.setenv("MINE", "too")
    code = """import json, os, sys
row = json.load(sys.stdin)
e = os.environ
print("a line"); print(json.dumps([row, e["OPENAI_BASE_URL"], len(e["OPENAI_API_KEY"]), e["MINE"]])); print()"""
    said = run(program.run_program(python(code), '{"a": 1}', {"OPENAI_BASE_URL": "url", "OPENAI_API_KEY": "key"}))
    assert json.loads(said) == [{"a": 1}, "url", 3, "too"]
    assert play(python(code))[0] == []  # it asked nothing: there is nothing to train


def test_a_program_that_fails_says_why(play):
    with pytest.raises(RuntimeError, match="ended with code 3: no such thing"):
        play(shell("echo no such thing >&2; exit 3"))


def gone(file) -> bool:
    """Whether the process whose PID is in the file has ended; a zombie that nobody waits for has, too."""
    try:
        with open(f"/proc/{int(file.read_text())}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_children_die_with_their_program(tmp_path):
    """... and hold nobody up, though they have its output open."""
    code = f"sleep 1000 & echo $! > {tmp_path}/child; echo mine"
    assert run(program.run_program(shell(code), "", {})) == "mine"
    wait_for(lambda: gone(tmp_path / "child"))


@CURL
def test_at_the_time_limit_it_is_killed_with_its_children_and_keeps_what_it_has(play, tmp_path, monkeypatch):
    code = f"{ASK} ask; echo $$ > {tmp_path}/pid; sleep 1000 & echo $! > {tmp_path}/child; wait"
    (output,), engine = play(shell(code), ANSWER, trajectory_timeout=3)
    assert (output.stop_reason, output.extra["answer"], output.reward) == ("timeout", None, 0.0)
    assert_exact([output], engine)
    wait_for(lambda: gone(tmp_path / "pid") and gone(tmp_path / "child"))


@CURL
def test_a_reward_that_the_program_posts_is_the_reward(play):
    post = """ask
curl -sS --fail -H "Authorization: Bearer $OPENAI_API_KEY" -d '{"reward": 0.25}' "$OPENAI_BASE_URL/reward" """
    (output,), _ = play(shell(ASK + post), ANSWER)
    assert output.reward == 0.25


def test_a_command_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("PROGRAM", "no_such_program at all")
    with pytest.raises(agent_loop.BadInput, match="PROGRAM starts with 'no_such_program'"):
        data.load_task(str(REPO / "examples" / "program.py"))
