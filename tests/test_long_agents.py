"""Rollouts that continue from a summary when their context is long."""

import itertools

import pytest
from test_agent_loop import ANSWER, END, SUM, assert_output, rollout, tool_turn, user_turn
from test_agent_loop import FIRST_WITH_TOOLS as OPENING

from agent_loop import CompactingLoop

DONE = ANSWER + END
NOTES = "It is 2."
CALLS = [SUM + END, tool_turn("2")]  # 16 tokens
ASKED_NOTES = [SUM + END, tool_turn("2\n\nNotes?")]


def after(notes: str) -> str:
    """The prompt of a sequence that begins with notes."""
    return OPENING + notes + END + user_turn("Go.")


FIRST = [OPENING, *ASKED_NOTES, NOTES + END]

# name -> lines of the engine, settings, the texts of each output (its prompt, then sampled, given,
# sampled, ...), stop reason, compactions
COMPACTIONS = {
    "twice": (
        [SUM, NOTES, SUM, "Two.", ANSWER], {},
        [FIRST, [after(NOTES), *ASKED_NOTES, "Two." + END], [after("Two."), DONE]], "stop", 2,
    ),
    "at three quarters of the window": (
        [SUM] * 6 + [NOTES, ANSWER], {"compact_at": 0, "max_model_len": 132},
        [[OPENING, *CALLS * 5, *ASKED_NOTES, NOTES + END], [after(NOTES), DONE]], "stop", 1,
    ),
    "not before the last turn": (
        [SUM, ANSWER], {"max_assistant_turns": 2}, [[OPENING, *CALLS, DONE]], "stop", 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("lines, how, parts, reason, n", COMPACTIONS.values(), ids=COMPACTIONS)
def test_compaction(tokenizer, monkeypatch, lines, how, parts, reason, n):
    monkeypatch.setattr(CompactingLoop, "SUMMARISE", "Notes?")
    monkeypatch.setattr(CompactingLoop, "CONTINUE", "Go.")
    outputs, engine = rollout(tokenizer, *lines, **{"agent": "compacting", "compact_at": 24} | how)
    numbers = itertools.count(1)
    for output, (prompt, *texts) in zip(outputs, parts, strict=True):
        assert engine.tokenizer.decode(output.prompt_ids) == prompt
        texts[::2] = [(next(numbers), text) for text in texts[::2]]
        assert_output(output, engine, *texts)
    assert next(numbers) == len(engine.prompts) + 1
    last = outputs[-1]
    assert last.stop_reason == reason
    assert (last.metrics["compactions"], last.metrics.get("forks", 0)) == (n, n)
    assert [output.unit for output in outputs] == [""] * len(parts)
