"""Every example on the real engine: its outputs hold exactly the tokens that the engine saw.

llm_judge has single turns, and would need a judge."""

import collections
import dataclasses

import pytest
import torch
from conftest import KEPT, REPO, make_run
from test_rollout import hf_model, wake

import agent_loop
import data
from flatrl.chat import client as chat_client
from rollout import Engine, rollout

# The example, and its --agent.
EXAMPLES = {
    "calculator": None,
    "hints": None,
    "gsm8k": None,
    "gsm8k_user": None,
    "retool": None,
    "mcp_tools": None,
    "langgraph_math": "langgraph",
    "maze": None,
}


class Recorder:
    """An engine that writes down what it was asked and what it said, per trajectory."""

    def __init__(self, engine):
        self.engine, self.calls = engine, collections.defaultdict(list)

    def __getattr__(self, name):
        return getattr(self.engine, name)

    async def generate(self, *, request_id, prompt_ids, sampling_params, **request):
        short = sampling_params | {"max_tokens": min(sampling_params["max_tokens"], 12)}
        request |= {"request_id": request_id, "prompt_ids": prompt_ids, "sampling_params": short}
        out = await self.engine.generate(**request)
        out.stop_reason = "stop"  # a short turn of a random model, which never ends one by itself
        assert out.prompt_ids == prompt_ids  # the engine's own record of them
        self.calls[request_id].append((list(prompt_ids), out))
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
    args = dataclasses.replace(args, agent=EXAMPLES[name], max_assistant_turns=4)
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
    assert len(recorder.calls) == 6

    assert sum(len(calls) - 1 for calls in recorder.calls.values()) >= 6
    for output in rollouts.outputs:
        place = f"{output.extra['prompt']:06d}-{output.extra['sample']:04d}"
        calls = recorder.calls[f"train-00000000-{place}"]
        ids = output.prompt_ids + output.response_ids
        mask = [0] * len(output.prompt_ids) + output.response_mask
        logprobs = [0.0] * len(output.prompt_ids) + output.response_logprobs
        where = []
        for prompt, out in calls:
            start, end = len(prompt), len(prompt) + len(out.token_ids)
            assert ids[:end] == prompt + out.token_ids and logprobs[start:end] == out.logprobs
            where += range(start, end)
        assert [i for i, m in enumerate(mask) if m] == where
