"""Every example on the real engine: its outputs hold exactly the tokens that the engine saw.

llm_judge has single turns, and would need a judge."""

import dataclasses

import pytest
import torch
from conftest import KEPT, REPO, make_run
from test_agent_loop import assert_exact
from test_rollout import hf_model, wake

import agent_loop
import data
from flatrl.chat import client as chat_client
from rollout import Engine, rollout

EXAMPLES = "calculator hints gsm8k gsm8k_user retool mcp_tools langgraph_math maze".split()


class Recorder:
    """An engine that numbers its calls, and writes down what it said in each."""

    def __init__(self, engine):
        self.engine = engine
        self.said = {}
        self.request_ids = set()

    def __getattr__(self, name):
        return getattr(self.engine, name)

    async def generate(self, *, sampling_params, **request):
        short = sampling_params | {"max_tokens": min(sampling_params["max_tokens"], 12)}
        out = await self.engine.generate(sampling_params=short, **request)
        out.stop_reason = "stop"  # a short turn of a random model, which never ends one by itself
        assert out.prompt_ids == request["prompt_ids"]  # the engine's own record of them
        n = len(self.said) + 1
        out.versions = [n] * len(out.token_ids)
        self.said[n] = out
        self.request_ids.add(request["request_id"])
        return out


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

    for module in (agent_loop, chat_client):
        monkeypatch.setattr(module, "parse_tool_calls", calls_something)
    wake(engine, hf_model(tiny_model), 0)
    recorder = Recorder(engine)
    run = make_run(recorder, background, task, tokenizer, args)
    rollouts = rollout(run, rows, 0, 2, {"temperature": 1.0})
    engine.sleep()
    assert not rollouts.errors, rollouts.errors[0]["error"]
    assert len(recorder.request_ids) == 6
    assert len(recorder.said) >= 12
    assert_exact(rollouts.outputs, recorder.said)
