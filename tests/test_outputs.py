"""What user code returns is checked where it comes in: a bad output costs its rollout, by name."""

import asyncio
import math
import re
import threading
from types import SimpleNamespace

import pytest
import torch
from test_agent_loop import PROMPT, Script, call

import rollout
from agent_loop import AgentLoopBase, Trajectory, register
from rollout import Context, Member, grade_rollout, run_agent_loop
from train import Args

VERSION = 1  # of the scripted engine's weights; the window is 128 tokens


def at(name, index, value):
    return lambda output: getattr(output, name).__setitem__(index, value)


def to(name, value):
    return lambda output: setattr(output, name, value)


def extra(**more):
    return lambda output: output.extra.update(more)


# What is done to a good output, and what is said about it.
SPOILT = {
    "beyond the vocabulary": (
        at("response_ids", 0, 10**6),
        "response_ids has 1000000: must be int in [0, ",
    ),
    "floats": (at("response_ids", 0, 5.0), "response_ids has 5.0: must be int"),
    "a tensor": (to("response_ids", torch.ones(2)), "response_ids must be a list"),
    "nan": (at("response_logprobs", -1, math.nan), "response_logprobs has nan: must be float"),
    "an old version": (at("response_versions", 0, 0), "is 1, has 0: must be int in [1, 1]"),
    "a future one": (at("response_versions", 0, 2), "has 2: must be int in [-1, 1]"),
    "lengths": (lambda output: output.response_ids.append(5), "the response lists of an output"),
    "window": (lambda output: output.prompt_ids.extend([5] * 500), "more than the window's 128"),
    "metrics": (to("metrics", None), "'metrics' must be a dict, got None"),
    "a long told prompt": (extra(told_prompt_ids=[5] * 200), "more than the window's 128"),
    "no told ids": (extra(told_prompt_ids=["a"]), "told_prompt_ids has 'a': must be int"),
    "a mark of ours": (extra(filtered=True), "for something else: unit or extra {'filtered'}"),
    "a lock": (extra(lock=threading.Lock()), "cannot pickle '_thread.lock' object"),
    "twice": (lambda output: [output, output], "Spoilt.run returned one output twice"),
    "a trajectory": (
        lambda output: Trajectory([], [1], [1], []),
        "Spoilt.run returned <class 'agent_loop.Trajectory'>, not an AgentLoopOutput",
    ),
}


@register("test_spoilt")
class Spoilt(AgentLoopBase):
    """Says "2", and lets the row's function `spoil` change, or replace, the output."""

    async def run(self, sampling_params, **row):
        trajectory = self.start(row)
        await self.assistant_turn(trajectory, sampling_params)
        output = trajectory.output()
        return row["spoil"](output) or output


@pytest.fixture
def play(tokenizer):
    """play(spoil) -> the outputs of a rollout."""

    def play(spoil):
        engine = Script(tokenizer, ["2"])
        engine.version = VERSION
        engine.vocab_size = len(tokenizer)
        engine.stop_token_ids = [tokenizer.eos_token_id]
        args = Args(max_model_len=128)
        context = Context(engine, SimpleNamespace(), tokenizer, None, args)
        member = Member("train/0/0/0", prompt=0, sample=0, step=0, validate=False)
        row = {"prompt": PROMPT, "agent_name": "test_spoilt", "spoil": spoil}
        return asyncio.run(run_agent_loop(context, member, row, {}))

    return play


@pytest.mark.parametrize("spoil, said", SPOILT.values(), ids=SPOILT)
def test_a_bad_output_is_refused(play, spoil, said):
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        play(spoil)


def test_states_are_one_for_each_turn(play):
    def grade(*states):
        (output,) = play(lambda output: None)
        output.metrics["states"] = [*states]
        task = SimpleNamespace(reward=lambda output, row: 1.0)
        context = Context(None, task, None, None, Args(algo="gigpo"))
        asyncio.run(grade_rollout(context, [output], {}))
        return output.reward

    assert grade(1) == grade(None) == 1.0
    with pytest.raises(ValueError, match="has 2 states for 1 turns"):
        grade(1, 2)


def test_the_first_exception_of_a_tool_is_printed_with_its_line(tokenizer, monkeypatch, capsys):
    def divide(by: int) -> float:
        """Divide.

        Args:
            by: The divisor.
        """
        return 1 / by

    def leave() -> str:
        """Leave."""
        raise SystemExit(3)

    class Growing(Script):
        vocab_size = len(tokenizer)
        stop_token_ids = (tokenizer.eos_token_id,)
        version = property(lambda self: len(self.prompts))

    monkeypatch.setattr(rollout, "PRINTED_TOOLS", set())
    turn = "\n".join([call("divide", to=1), call("lend"), call("divide", by=0), call("leave")])
    for _ in range(2):
        task = SimpleNamespace(TOOLS=[divide, leave])
        args = Args(max_model_len=4000, max_response_tokens=2000)
        context = Context(Growing(tokenizer, [turn, "ok"]), task, tokenizer, None, args)
        member = Member("train/0/0/0", prompt=0, sample=0, step=0, validate=False)
        asyncio.run(run_agent_loop(context, member, {"prompt": PROMPT}, {}))
    first = divide.__code__.co_firstlineno
    places = [first + 6, first + 8]  # where it raised; the function, as sys.exit leaves no frame
    reasons = ["ZeroDivisionError: division by zero", "RuntimeError: SystemExit(3)"]
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert lines == [
        f"the tool {name!r} raised its first exception, which the model reads: {__file__}, "
        f"line {place}: {reason}"
        for name, place, reason in zip(["divide", "leave"], places, reasons)
    ]
