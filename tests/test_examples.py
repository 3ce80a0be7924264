"""Every example on the real engine: its outputs hold exactly the tokens that the engine saw.

llm_judge has single turns, and would need a judge."""

import dataclasses
import re
import sys

import pytest
import torch
from conftest import KEPT, REPO, make_run, run
from test_agent_loop import assert_exact
from test_rollout import hf_model, wake

import agent_loop
import data
from examples import calculator, minimal_loop
from flatrl.chat import client as chat_client
from rollout import Engine, rollout
from train import Policy

EXAMPLES = "calculator hints gsm8k gsm8k_user retool mcp_tools langgraph_math maze".split()


@pytest.fixture(scope="module")
def wide_engine(args, tiny_model, tokenizer, process_group):
    lengths = dict(max_prompt_tokens=512, max_model_len=1024, max_response_tokens=512)
    limits = dataclasses.replace(args, **lengths)
    engine = Engine(tiny_model, limits, torch.device("cpu"), [tokenizer.eos_token_id])
    KEPT.append(engine)
    return engine, limits


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, wide_engine, background, tokenizer, tiny_model, monkeypatch):
    task = data.load_task(str(REPO / "examples" / f"{name}.py"), ("load", "reward", "build_model"))
    engine, args = wide_engine
    agent = "langgraph" if name == "langgraph_math" else None
    args = dataclasses.replace(args, agent=agent, max_assistant_turns=4)
    rows = data.load_rows(task, "train")[:40]  # to render thousands takes seconds
    rows = data.filter_overlong(rows, tokenizer, task, args)[:3]
    assert data.load_rows(task, "val")

    def calls_something(text, parser, tokenizer, schemas):
        """The random model calls nothing: so each turn calls the first tool, without arguments."""
        call = {"name": schemas[0]["function"]["name"], "arguments": {}, "error": None}
        return "", [call] if schemas else []

    generate = engine.generate
    said = {}
    request_ids = set()

    async def recorded(*, sampling_params, **request):
        """Numbers the calls, and writes down what the engine says in each."""
        short = sampling_params | {"max_tokens": min(sampling_params["max_tokens"], 12)}
        out = await generate(sampling_params=short, **request)
        out.stop_reason = "stop"  # a short turn of a random model, which never ends one by itself
        assert out.prompt_ids == request["prompt_ids"]  # the engine's own record of them
        n = len(said) + 1
        out.versions = [n] * len(out.token_ids)
        said[n] = out
        request_ids.add(request["request_id"])
        return out

    monkeypatch.setattr(engine, "generate", recorded)
    for module in (agent_loop, chat_client):
        monkeypatch.setattr(module, "parse_tool_calls", calls_something)
    wake(engine, hf_model(tiny_model), 0)
    run = make_run(engine, background, task, tokenizer, args)
    rollouts = rollout(run, rows, 0, 2, {"temperature": 1.0})
    engine.sleep()
    assert not rollouts.errors, rollouts.errors[0]["error"]
    assert len(request_ids) == 6
    assert len(said) >= 12
    assert_exact(rollouts.outputs, said)


# ---------------------------------------------------------------- minimal_loop.py

LINE = r"step +(\d+)   reward (\d\.\d{3})   loss +(-?\d+\.\d{4})   [\d.]+ s"


def test_the_minimal_loop_runs(tiny_model):
    few = ["--steps", "1", "--prompts_per_step", "2", "--model", tiny_model]
    printed = run(*few, script="examples/minimal_loop.py")
    assert [step for step, _, _ in re.findall(LINE, printed)] == ["1"]


def digits(output, row) -> float:
    """The share of digits, which a random model can learn in a few steps."""
    text = "".join(turn["content"] for turn in output.messages if turn["role"] == "assistant")
    return sum(letter.isdigit() for letter in text) / max(1, len(text))


def test_the_minimal_loop_learns(session_engine, args, tokenizer, monkeypatch, capsys):
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
