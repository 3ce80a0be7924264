"""What user code returns is checked where it comes in: a bad output costs its rollout, by name."""

import asyncio
import re
from types import SimpleNamespace

import pytest
from test_agent_loop import PROMPT, Script, call

import rollout
from agent_loop import AgentLoopBase, register
from rollout import Context, Member, grade_rollout, run_agent_loop
from train import Args

# What is done to a good output, and what is said about it.
SPOILT = {
    "beyond the vocabulary": (
        lambda output: output.response_ids.append(10**6),
        "the token id 1000000 is not in [0, ",
    ),
    "not an output": (
        lambda output: "2",
        "Spoilt.run returned '2', not an AgentLoopOutput",
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
        engine.version = 1
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

    class Growing(Script):
        vocab_size = len(tokenizer)
        stop_token_ids = (tokenizer.eos_token_id,)
        version = property(lambda self: len(self.prompts))

    monkeypatch.setattr(rollout, "PRINTED_TOOLS", set())
    turn = "\n".join([call("divide", to=1), call("lend"), call("divide", by=0)])
    for _ in range(2):
        task = SimpleNamespace(TOOLS=[divide])
        args = Args(max_model_len=4000, max_response_tokens=2000)
        context = Context(Growing(tokenizer, [turn, "ok"]), task, tokenizer, None, args)
        member = Member("train/0/0/0", prompt=0, sample=0, step=0, validate=False)
        asyncio.run(run_agent_loop(context, member, {"prompt": PROMPT}, {}))
    printed = capsys.readouterr().err
    assert printed.count("the tool 'divide' raised its first exception:") == 1
    assert f'"{__file__}", line {divide.__code__.co_firstlineno + 6}, in divide' in printed
    assert printed.count("\nZeroDivisionError: division by zero") == 1
