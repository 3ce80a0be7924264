"""Long rollouts: turns that are cut, the last answer, compaction."""

import itertools

import pytest
from test_agent_loop import (
    ANSWER,
    ASKED,
    END,
    SUM,
    Quiz,
    assert_output,
    assert_response,
    quiz_row,
    quiz_task,
    rollout,
    task_of,
    tool_turn,
    user_turn,
)

from agent_loop import CompactingLoop

# ---------------------------------------------------------------- turns that are cut


def cut(n: int, called: str = "No tool was called. ") -> str:
    text = f"Your turn was cut at {n} tokens. {called}Continue, more briefly."
    return END + user_turn(text)


LONG = "abcdefghi"  # a token for each letter
CALLED = [SUM + END, tool_turn("2")]
DONE = ANSWER + END
NO_TOOLS = {"task": task_of(), "agent": "tool_agent"}

# name -> lines of the engine, settings, parts of the response, stop reason, metric
CUT_TURNS = {
    "after a call": ([SUM, LONG, ANSWER], {}, [*CALLED, "abcdef", cut(6), DONE], "stop", 1),
    "twice": ([LONG, LONG, "ok"], {}, ["abcdef", cut(6)] * 2 + ["ok" + END], "stop", 2),
    "a call in it": ([SUM + LONG, ANSWER], {}, [SUM + "a", cut(6), DONE], "stop", 1),
    "without tools": ([LONG, "ok"], NO_TOOLS, ["abcdef", cut(6, ""), "ok" + END], "stop", 1),
    "by the other limit": (
        [LONG, ANSWER], {"sampling": {"max_tokens": 4}}, ["abcd", cut(4), DONE], "stop", 1,
    ),
    "in the last turn": (
        [SUM, LONG], {"max_assistant_turns": 2}, [*CALLED, "abcdef"], "max_turns", 1,
    ),
    "by the budget": ([LONG], {"max_response_tokens": 6}, ["abcdef"], "length", 0),
    "no room to say so": ([LONG], {"max_response_tokens": 40}, ["abcdef"], "length", 1),
    "in another loop": ([LONG], {"agent": "single_turn"}, ["abcdef"], "length", None),
}  # fmt: skip


@pytest.mark.parametrize("lines, how, parts, reason, n", CUT_TURNS.values(), ids=CUT_TURNS)
def test_a_turn_that_is_cut(tokenizer, lines, how, parts, reason, n):
    (output,), engine = rollout(tokenizer, *lines, **{"max_turn_tokens": 6} | how)
    assert_response(output, engine, *parts)
    assert (output.stop_reason, output.num_turns) == (reason, len(parts) + 1)
    assert output.metrics.get("cut_turns") == n


def test_a_user_answers_whole_turns_only(tokenizer):
    quiz = Quiz((True, "", 1.0, {}))
    how = dict(task=quiz_task(quiz), row=quiz_row(), max_turn_tokens=6)
    (output,), engine = rollout(tokenizer, LONG, "ok", **how)
    assert_response(output, engine, "abcdef", cut(6, ""), "ok" + END)
    assert output.turn_rewards == [(len(output.response_ids) - 1, 1.0)]
    assert quiz.events == ["start", "generate_response", "finalize"]


# ---------------------------------------------------------------- the final answer

REQUEST = "Now."
KEPT = {"final_answer_tokens": 20, "final_answer_request": REQUEST}
ASKED_TOOL = tool_turn(REQUEST)  # 13 tokens
ASKED_USER = END + user_turn(REQUEST)  # 12 tokens
ONE_TURN = {"max_assistant_turns": 1}

# name -> lines of the engine, settings, parts of the response, stop reason, metric
FINAL_ANSWERS = {
    "another call is not executed": (
        [SUM, SUM], ONE_TURN, [SUM + END, ASKED_TOOL, SUM + END], "stop", 1,
    ),
    "two calls": (
        [SUM * 2, "a"], ONE_TURN,
        [SUM * 2 + END, tool_turn(REQUEST, REQUEST), "a" + END], "stop", 1,
    ),
    "the window ends a turn, and the answer": (
        [LONG, LONG], {"max_model_len": 25 + 17}, ["abcde", ASKED_USER, LONG[:8]], "length", 1,
    ),
    "a tool's answer has no room": (
        [SUM, ANSWER], {"max_response_tokens": 35}, [SUM + END, ASKED_TOOL, DONE], "stop", 1,
    ),
    "no room for the request": (
        [LONG], {"max_response_tokens": 17, "final_answer_tokens": 12}, ["abcde"], "length", 1,
    ),
    "nothing but the kept tokens": (
        [LONG * 3], {"max_model_len": 20 + 17}, [(LONG * 3)[:20]], "length", 1,
    ),
    "after a turn that was cut": (
        [LONG, "a"], ONE_TURN | {"max_turn_tokens": 4}, ["abcd", ASKED_USER, "a" + END], "stop", 1,
    ),
    "not needed": ([SUM, ANSWER], {}, [*CALLED, DONE], "stop", 0),
}  # fmt: skip


@pytest.mark.parametrize("lines, how, parts, reason, n", FINAL_ANSWERS.values(), ids=FINAL_ANSWERS)
def test_a_final_answer(tokenizer, lines, how, parts, reason, n):
    (output,), engine = rollout(tokenizer, *lines, **KEPT | how)
    assert_response(output, engine, *parts)
    assert (output.stop_reason, output.num_turns) == (reason, len(parts) + 1)
    assert output.metrics.get("final_answers") == n


@pytest.mark.parametrize("done", [False, True])
def test_a_user_judges_the_final_answer(tokenizer, done):
    quiz = Quiz((False, "Sure?", 1.0, {}), (done, "No.", 2.0, {}))
    how = dict(task=quiz_task(quiz), row=quiz_row(), **ONE_TURN, **KEPT)
    (output,), engine = rollout(tokenizer, "2", "3", **how)
    assert_response(output, engine, "2" + END, ASKED_USER.removeprefix(END), "3" + END)
    last = len(output.response_ids) - 1
    assert output.turn_rewards == [(1, 1.0), (last, 2.0)]
    assert (output.stop_reason, output.extra["unread"]) == ("stop", "No.")


# ---------------------------------------------------------------- compaction

NOTES = "It is 2."
TOOLS = "<|im_start|>system\nTools: calculator<|im_end|>\n"
OPENING = TOOLS + ASKED  # 17 tokens
CALLS = [SUM + END, tool_turn("2")]  # 16 tokens
ASKED_NOTES = [SUM + END, tool_turn("2\n\nNotes?")]


def after(notes: str, tools: str = TOOLS) -> str:
    """The prompt of a sequence that begins with notes."""
    return tools + ASKED + notes + END + user_turn("Go.")


def assert_outputs(outputs, engine, parts: list[list[str]]) -> None:
    """The outputs are exactly these texts: each one's prompt, then sampled, given, sampled, ..."""
    numbers = itertools.count(1)
    for output, (prompt, *texts) in zip(outputs, parts, strict=True):
        assert engine.tokenizer.decode(output.prompt_ids) == prompt
        texts[::2] = [(next(numbers), text) for text in texts[::2]]
        assert_output(output, engine, *texts)
    assert next(numbers) == len(engine.prompts) + 1


FIRST = [OPENING, *ASKED_NOTES, NOTES + END]

# name -> lines of the engine, settings, prompt and parts of each output, stop reason, compactions
COMPACTIONS = {
    "at so many tokens": ([SUM, NOTES, ANSWER], {}, [FIRST, [after(NOTES), DONE]], "stop", 1),
    "not below": ([SUM, ANSWER], {"compact_at": 25}, [[OPENING, *CALLS, DONE]], "stop", 0),
    "twice": (
        [SUM, NOTES, SUM, "Two.", ANSWER], {},
        [FIRST, [after(NOTES), *ASKED_NOTES, "Two." + END], [after("Two."), DONE]], "stop", 2,
    ),
    "at three quarters of the window": (
        [SUM] * 6 + [NOTES, ANSWER], {"compact_at": 0, "max_model_len": 132},
        [[OPENING, *CALLS * 5, *ASKED_NOTES, NOTES + END], [after(NOTES), DONE]], "stop", 1,
    ),
    "notes that are cut": (
        [SUM, NOTES, ANSWER], {"max_turn_tokens": 6},
        [[OPENING, *ASKED_NOTES, "It is "], [after("It is "), DONE]], "stop", 1,
    ),
    "the budget ends in the notes": (
        [SUM, NOTES], {"max_response_tokens": 30},
        [[OPENING, *ASKED_NOTES, NOTES[:6]]], "length", 0,
    ),
    "no room for notes": ([SUM], {"max_response_tokens": 24}, [[OPENING, SUM + END]], "length", 0),
    "not before the last turn": (
        [SUM, ANSWER], {"max_assistant_turns": 2}, [[OPENING, *CALLS, DONE]], "stop", 0,
    ),
}  # fmt: skip


@pytest.fixture
def short_words(monkeypatch):
    monkeypatch.setattr(CompactingLoop, "SUMMARISE", "Notes?")
    monkeypatch.setattr(CompactingLoop, "CONTINUE", "Go.")


@pytest.mark.parametrize("lines, how, parts, reason, n", COMPACTIONS.values(), ids=COMPACTIONS)
def test_compaction(tokenizer, short_words, lines, how, parts, reason, n):
    outputs, engine = rollout(tokenizer, *lines, **{"agent": "compacting", "compact_at": 24} | how)
    assert_outputs(outputs, engine, parts)
    last = outputs[-1]
    assert last.stop_reason == reason
    assert (last.metrics["compactions"], last.metrics.get("forks", 0)) == (n, n)
    assert [output.unit for output in outputs] == [""] * len(parts)


def test_compaction_of_a_talk_with_a_user(tokenizer, short_words):
    quiz = Quiz((False, "Sure?", 1.0, {}), (True, "", 2.0, {}))
    quiz.opening = "Ready?"
    how = dict(task=quiz_task(quiz), row=quiz_row(), agent="compacting", compact_at=24)
    outputs, engine = rollout(tokenizer, "2", NOTES, "3", **how)
    start = ASKED.removesuffix("<|im_start|>assistant\n") + user_turn("Ready?")[1:]
    first = [start, "2" + END, user_turn("Sure?\n\nNotes?"), NOTES + END]
    second = [start + NOTES + END + user_turn("Go."), "3" + END]
    assert_outputs(outputs, engine, [first, second])
    assert [output.turn_rewards for output in outputs] == [[(1, 1.0)], [(1, 2.0)]]
    said = [message["content"] for message in outputs[1].messages]
    assert said == ["What is 1+1?", "Ready?", NOTES, "Go.", "3"]
