"""Agent loops against a scripted engine: exact ids, masks, logprobs, versions, messages, rewards and counters.

A loop is played by `play("what the model says first", "what it says next", ...)`. `assert_response` rebuilds the four
response lists from literal texts, sampled and given in turn, and checks what the engine was asked at each turn, so that
a token that is dropped, doubled, shifted or rendered again shows.
"""

import asyncio
import contextlib
import copy
import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import HANGS, REPO, clean_env, for_ever, time_passes, too_late
from hypothesis import given, settings
from hypothesis import strategies as st

import agent_loop
from agent_loop import (
    AGENT_LOOPS,
    STOP_REASONS,
    AgentLoopBase,
    AgentLoopOutput,
    BadInput,
    Interaction,
    LoopArgs,
    SingleTurnLoop,
    TokenOutput,
    Tool,
    ToolAgentLoop,
    ToolResponse,
    agent_loop_class,
    as_tool,
    in_thread,
    register,
    render,
    task_interaction,
    task_tools,
    tool_parser,
    turn_suffix,
)
from examples import calculator
from train import Args

# ---------------------------------------------------------------------------------------------------------------------
# What the template of examples/calculator.py puts around texts.

END = "<|im_end|>"
ASSISTANT = "<|im_start|>assistant\n"
PROMPT = [{"role": "user", "content": "What is 1+1?"}]


def tool_turn(*contents: str) -> str:
    """From just after the assistant's end-of-turn token to where it speaks again. The first newline is the one that
    the template puts after that token; it is not sampled, and easily lost."""
    responses = "".join(f"\n<tool_response>\n{content}\n</tool_response>" for content in contents)
    return f"\n<|im_start|>user{responses}{END}\n{ASSISTANT}"


def user_turn(text: str) -> str:
    return f"\n<|im_start|>user\n{text}{END}\n{ASSISTANT}"


def call(name: str = "calculator", /, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SUM = call(expression="1+1")
ANSWER = "<answer>2</answer>"


def called(*calls: tuple[str, dict], turn: int = 1) -> list[dict]:
    """The tool_calls of an assistant's message, the turn-th of its trajectory."""
    return [
        {"type": "function", "id": f"{turn:06d}{i:03d}", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# ---------------------------------------------------------------------------------------------------------------------
# The scripted engine.


@dataclass
class Script:
    """An engine that says its lines. A line is a text, which gets an end-of-turn token and stop reason "stop", a pair
    (text or ids, stop reason) that is said as it is, or an exception. max_tokens cuts a line, as in a real engine.

    Token k of call n has logprob -(n + k/1000) and version n, so that no entry of a list can stand in for another.
    """

    tokenizer: object
    lines: tuple
    prompts: list[list[int]] = field(default_factory=list)
    params: list[dict] = field(default_factory=list)
    request_ids: set[str] = field(default_factory=set)

    async def generate(self, *, request_id, prompt_ids, sampling_params, image_data=None) -> TokenOutput:
        assert len(self.prompts) < len(self.lines), "the loop asked for more turns than the script has"
        line = self.lines[len(self.prompts)]
        self.prompts.append(list(prompt_ids))
        self.params.append(dict(sampling_params))
        self.request_ids.add(request_id)
        await asyncio.sleep(0)
        if isinstance(line, Exception):
            raise line
        words, reason = (line + END, "stop") if isinstance(line, str) else line
        ids = encode(self.tokenizer, words) if isinstance(words, str) else words
        if len(ids) > sampling_params["max_tokens"]:
            ids, reason = ids[: sampling_params["max_tokens"]], "length"
        n = len(self.prompts)
        return TokenOutput(list(ids), logprobs_of(n, len(ids)), [n] * len(ids), reason, list(prompt_ids))


def logprobs_of(n: int, length: int) -> list[float]:
    return [-(n + k / 1000) for k in range(length)]


def assert_response(output: AgentLoopOutput, engine: Script, *parts: str) -> None:
    """The response is exactly these texts: sampled, given, sampled, ... and each turn continued what stood before."""
    ids, mask, logprobs, versions = [], [], [], []
    for i, part in enumerate(parts):
        tokens, n = encode(engine.tokenizer, part), i // 2 + 1
        if i % 2 == 0:
            assert engine.prompts[n - 1] == output.prompt_ids + ids
        ids += tokens
        mask += [1 - i % 2] * len(tokens)
        logprobs += logprobs_of(n, len(tokens)) if i % 2 == 0 else [0.0] * len(tokens)
        versions += [n if i % 2 == 0 else -1] * len(tokens)
    assert engine.tokenizer.decode(output.response_ids) == "".join(parts)
    assert output.response_ids == ids
    assert output.response_mask == mask
    assert output.response_logprobs == logprobs
    assert output.response_versions == versions
    assert len(engine.prompts) == (len(parts) + 1) // 2


def task_of(*tools, **attributes) -> SimpleNamespace:
    return SimpleNamespace(TOOLS=list(tools), **attributes)


CALCULATOR = task_of(calculator.calculator)


@pytest.fixture(scope="module")
def prepare(tokenizer):
    """prepare(lines, ...) -> (a coroutine that runs the loop, its engine)."""
    def prepare(lines, task=CALCULATOR, row=None, sampling=None, **args):
        args = Args(**{"max_response_tokens": 1000, "tool_timeout": 4 * HANGS} | args)
        row = {"prompt": PROMPT} | (row or {})
        engine = Script(tokenizer, tuple(lines))
        loop = agent_loop_class(row, task, args)(engine, tokenizer, None, task, args)
        return loop.run(sampling or {}, **row, step=3, index=0, rollout_n=1, validate=False), engine

    return prepare


@pytest.fixture(scope="module")
def play(prepare):
    """play(line, line, ..., task=, row=, sampling=, **args) -> (the loop's output, its engine)."""

    def play(*lines, **how) -> tuple[AgentLoopOutput, Script]:
        run, engine = prepare(lines, **how)
        return asyncio.run(run), engine

    return play


class Notes(Tool):
    """A tool that writes down what is done with it; `answers` are what its calls give, an exception is raised."""

    def __init__(self, *answers, name: str = "notes", calc_reward: float = 0.0):
        self.name, self.answers, self.final = name, list(answers), calc_reward
        self.schema = {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        self.log: list[tuple] = []
        self.request_ids: set[str] = set()

    def note(self, request_id: str, *event) -> None:
        self.log.append(event)
        self.request_ids.add(request_id)

    async def create(self, request_id, **kwargs):
        self.note(request_id, "create", kwargs)

    async def execute(self, request_id, arguments, **kwargs):
        self.note(request_id, "execute", arguments, kwargs)
        answer = self.answers.pop(0) if self.answers else "noted"
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def calc_reward(self, request_id, **kwargs):
        self.note(request_id, "calc_reward", kwargs)
        return self.final

    async def release(self, request_id, **kwargs):
        self.note(request_id, "release", kwargs)

    @property
    def events(self) -> list[str]:
        return [event[0] for event in self.log]


# ---------------------------------------------------------------------------------------------------------------------
# Templates


def test_render_is_the_template_and_nothing_else(tokenizer):
    schemas = [as_tool(calculator.calculator).schema]
    ids = render(tokenizer, PROMPT, schemas)
    text = f"<|im_start|>system\nTools: calculator{END}\n<|im_start|>user\nWhat is 1+1?{END}\n{ASSISTANT}"
    assert ids == encode(tokenizer, text)
    assert render(tokenizer, PROMPT) == encode(tokenizer, f"<|im_start|>user\nWhat is 1+1?{END}\n{ASSISTANT}")


def test_render_without_a_template_is_bad_input(tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(BadInput, match="no chat template"):
        render(bare, PROMPT)


def test_turn_suffix_starts_after_the_end_of_turn_token(tokenizer):
    messages, new = [*PROMPT, {"role": "assistant", "content": ANSWER}], [{"role": "user", "content": "Sure?"}]
    stops = {tokenizer.eos_token_id}
    suffix = turn_suffix(tokenizer, messages, new, stops, ended=True)
    assert tokenizer.decode(suffix) == user_turn("Sure?")  # with the newline behind the end-of-turn token
    suffix = turn_suffix(tokenizer, messages, new, stops, ended=False)
    assert tokenizer.decode(suffix) == END + user_turn("Sure?")  # nobody sampled the end-of-turn token


def test_turn_suffix_where_turns_end_without_a_token(tokenizer):
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    messages, new = [*PROMPT, {"role": "assistant", "content": ANSWER}], [{"role": "user", "content": "Sure?"}]
    for ended in (True, False):
        suffix = turn_suffix(plain, messages, new, {tokenizer.eos_token_id}, ended)
        assert tokenizer.decode(suffix) == "[user]Sure?[assistant]"


@pytest.mark.parametrize("template", [
    "{{ messages | length }} turns: {% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
    "{% for m in messages %}{{ m.content if m.role == 'user' or loop.last else '(cut)' }}<|im_end|>{% endfor %}",
])  # fmt: skip
def test_turn_suffix_raises_where_the_template_is_not_append_only(tokenizer, template):
    changing = copy.deepcopy(tokenizer)
    changing.chat_template = template
    messages = [*PROMPT, {"role": "assistant", "content": "thinking aloud"}]
    with pytest.raises(ValueError, match="not append-only"):
        turn_suffix(changing, messages, [{"role": "user", "content": "go on"}], {tokenizer.eos_token_id}, True)


# ---------------------------------------------------------------------------------------------------------------------
# Single turn, and limits that every loop shares


def test_single_turn(play, tokenizer):
    output, engine = play("2", task=task_of(), sampling={"temperature": 0.5})
    assert output.prompt_ids == encode(tokenizer, f"<|im_start|>user\nWhat is 1+1?{END}\n{ASSISTANT}")
    assert_response(output, engine, "2" + END)
    assert output.messages == [*PROMPT, {"role": "assistant", "content": "2"}]
    assert (output.num_turns, output.stop_reason, output.truncated) == (2, "stop", False)
    assert (output.reward, output.turn_rewards) == (None, [])
    assert engine.params == [{"temperature": 0.5, "max_tokens": 1000}]


def test_the_rows_prompt_is_not_changed(play):
    prompt = copy.deepcopy(PROMPT)
    play(SUM, ANSWER, row={"prompt": prompt})
    assert prompt == PROMPT


@pytest.mark.parametrize("loop", ["single_turn", "tool_agent"])
@pytest.mark.parametrize("limits", [
    dict(sampling={"max_tokens": 3}),
    dict(max_response_tokens=3),
    dict(sampling={"max_tokens": 9}, max_response_tokens=3),
    dict(sampling={"max_tokens": 3}, max_response_tokens=9),
    "window",
])  # fmt: skip
def test_the_smallest_limit_cuts_the_turn(play, loop, limits):
    if limits == "window":
        output, _ = play("x", agent=loop)
        limits = dict(max_model_len=len(output.prompt_ids) + 3)
    output, engine = play("12345", agent=loop, **limits)
    assert engine.params[0]["max_tokens"] == 3
    assert_response(output, engine, "123")
    assert output.messages[-1] == {"role": "assistant", "content": "123"}
    assert (output.stop_reason, output.truncated, output.num_turns) == ("length", True, 2)


@pytest.mark.parametrize("loop", ["single_turn", "tool_agent"])
def test_a_prompt_that_fills_the_window_is_not_sampled_from(play, loop):
    length = len(play("x", agent=loop)[0].prompt_ids)
    output, engine = play(agent=loop, max_model_len=length)
    assert_response(output, engine)
    assert (output.stop_reason, output.num_turns) == ("length", 1)


def test_an_aborted_turn_ends_the_trajectory(play):
    output, engine = play((SUM, "abort"))
    assert_response(output, engine, SUM)
    assert (output.stop_reason, output.truncated) == ("abort", False)
    assert output.metrics == {"tool_calls": 0}


def test_the_budget_left_shrinks_by_sampled_and_given_tokens(play, tokenizer):
    output, engine = play(SUM, ANSWER, max_response_tokens=60, sampling={"max_tokens": 50})
    used = len(encode(tokenizer, SUM + END + tool_turn("2")))
    assert [params["max_tokens"] for params in engine.params] == [50, 60 - used]


def test_an_engine_that_miscounts_is_refused(prepare):
    class Miscounts(Script):
        async def generate(self, **kwargs):
            out = await super().generate(**kwargs)
            return TokenOutput(out.token_ids, out.logprobs[1:], out.versions, "stop", [])

    run, engine = prepare(["2"])
    engine.__class__ = Miscounts
    with pytest.raises(ValueError, match="must have one length, got .*'response_mask': 2, 'response_logprobs': 1"):
        asyncio.run(run)


# ---------------------------------------------------------------------------------------------------------------------
# Tools


def test_one_tool_call(play):
    output, engine = play(SUM, ANSWER)
    assert_response(output, engine, SUM + END, tool_turn("2"), ANSWER + END)
    assert output.messages == [
        *PROMPT,
        {"role": "assistant", "content": "", "tool_calls": called(("calculator", {"expression": "1+1"}))},
        {"role": "tool", "name": "calculator", "content": "2", "tool_call_id": "000001000"},
        {"role": "assistant", "content": ANSWER},
    ]
    assert (output.num_turns, output.stop_reason) == (4, "stop")
    assert output.metrics.pop("tool_s") > 0
    assert output.metrics == {"tool_calls": 1}
    assert len(engine.request_ids) == 1  # the trajectory's


def test_sampled_tokens_are_never_tokenised_again(play, tokenizer):
    """The policy may spell a text in other tokens than the tokenizer would: they stay as they are."""
    spelled = [token for letter in SUM for token in encode(tokenizer, letter)] + [tokenizer.eos_token_id]
    assert len(spelled) > len(encode(tokenizer, SUM + END)) and tokenizer.decode(spelled) == SUM + END
    output, engine = play((spelled, "stop"), ANSWER)
    given = encode(tokenizer, tool_turn("2"))
    assert engine.prompts[1] == output.prompt_ids + spelled + given
    assert output.response_ids == spelled + given + encode(tokenizer, ANSWER + END)
    assert output.messages[2]["content"] == "2"


def test_tool_calls_are_counted_also_where_there_are_none(play):
    assert play("2")[0].metrics == {"tool_calls": 0}
    assert play("2", task=SimpleNamespace())[0].metrics == {}


def test_no_tool_call_is_one_turn(play):
    output, engine = play(ANSWER)
    assert_response(output, engine, ANSWER + END)
    assert (output.num_turns, output.stop_reason, output.metrics) == (2, "stop", {"tool_calls": 0})


def test_several_turns_with_a_text_before_the_call(play):
    output, engine = play("First " + SUM, call(expression="2*3"), "6")
    assert_response(
        output, engine, "First " + SUM + END, tool_turn("2"), call(expression="2*3") + END, tool_turn("6"), "6" + END
    )
    assert output.num_turns == 6
    assert output.messages[1]["content"].strip() == "First"
    assert [m["content"] for m in output.messages if m["role"] == "tool"] == ["2", "6"]
    assert output.metrics["tool_calls"] == 2


def test_parallel_calls_run_together_and_answer_in_order(play):
    here, left = asyncio.Barrier(2), asyncio.Event()

    async def meet(name: str, first: bool) -> str:
        """Wait for the other one.

        Args:
            name: Who waits.
            first: Whether to leave first.
        """
        await here.wait()  # one after the other would wait here until the deadline
        await (asyncio.sleep(0) if first else left.wait())
        left.set()
        return f"{name} was here"

    turn = call("meet", name="Ann", first=False) + "\n" + call("meet", name="Bob", first=True)
    output, engine = play(turn, "ok", task=task_of(meet))
    assert_response(output, engine, turn + END, tool_turn("Ann was here", "Bob was here"), "ok" + END)
    assert output.messages[1]["tool_calls"] == called(
        ("meet", {"name": "Ann", "first": False}), ("meet", {"name": "Bob", "first": True})
    )
    assert output.num_turns == 4  # one tool turn, whatever the number of calls
    assert output.metrics["tool_calls"] == 2


def test_a_stop_string_leaves_the_end_of_turn_token_to_the_suffix(play):
    output, engine = play((SUM, "stop"), ANSWER, sampling={"stop": ["</tool_call>"]})
    assert_response(output, engine, SUM, END + tool_turn("2"), ANSWER + END)
    assert output.messages[1]["tool_calls"] == called(("calculator", {"expression": "1+1"}))


def test_a_stop_token_of_the_sampling_parameters_ends_a_turn(play, tokenizer):
    stop = tokenizer.pad_token
    output, engine = play((SUM + stop, "stop"), ANSWER, sampling={"stop_token_ids": [tokenizer.pad_token_id]})
    assert_response(output, engine, SUM + stop, tool_turn("2"), ANSWER + END)


def add(a: int, b: int = 0) -> str:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return str(a + b)


def broken(reason: str) -> str:
    """Raise.

    Args:
        reason: Why.
    """
    special = {"empty": RuntimeError(), "exit": SystemExit(3), "cancel": asyncio.CancelledError()}
    raise {**special, "timeout": TimeoutError("no route to host")}.get(reason, RuntimeError(reason))


async def broken_async(reason: str) -> str:
    """Raise.

    Args:
        reason: Why.
    """
    return broken(reason)


BROKEN = task_of(add, broken, broken_async)
ERRORS = {
    "unknown tool": (call("subtract", a=1), r"subtract.*add"),
    "malformed JSON": ('<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>', "JSON"),
    "not JSON at all": ("<tool_call>\nadd 1 and 2\n</tool_call>", "JSON"),
    "unclosed": ("<tool_call>", "JSON"),
    "no arguments": ('<tool_call>\n{"name": "add"}\n</tool_call>', "arguments"),
    "arguments are a list": ('<tool_call>\n{"name": "add", "arguments": [1, 2]}\n</tool_call>', "arguments.*object"),
    "arguments are a string": ('<tool_call>\n{"name": "add", "arguments": "1"}\n</tool_call>', "arguments.*object"),
    "a missing argument": (call("add", b=1), r"add\(\) missing 1 required positional argument: 'a'"),
    "an unexpected argument": (call("add", a=1, c=2), r"add\(\) got an unexpected keyword argument 'c'"),
    "a wrong type": (call("add", a="x"), "str"),
    "raises": (call("broken", reason="the disk is full"), "the disk is full"),
    "raises in a coroutine": (call("broken_async", reason="the disk is full"), "the disk is full"),
    "SystemExit in a function": (call("broken", reason="exit"), r"SystemExit\(3\)"),
    "nothing to say": pytest.param(
        call("broken", reason="empty"), "RuntimeError",
    ),
    "a timeout of its own": pytest.param(
        call("broken", reason="timeout"), "no route to host",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "turn, said", [p if hasattr(p, "marks") else pytest.param(*p) for p in ERRORS.values()], ids=list(ERRORS)
)
def test_a_failed_call_is_a_message_and_a_counter(play, turn, said):
    output, engine = play(turn, "sorry", task=BROKEN)
    message = output.messages[2]
    assert message["role"] == "tool"
    assert re.search(said, message["content"], re.DOTALL), message["content"]
    assert message["content"].startswith("Error")
    assert_response(output, engine, turn + END, tool_turn(message["content"]), "sorry" + END)
    assert output.metrics["tool_errors"] == 1
    assert output.metrics.get("tool_timeouts", 0) == 0
    assert (output.stop_reason, output.num_turns) == ("stop", 4)


@pytest.mark.parametrize("reason, said", [("exit", "SystemExit"), ("cancel", "CancelledError")])
def test_an_async_tool_ends_neither_the_event_loop_nor_the_trajectory(play, reason, said):
    try:
        output, _ = play(call("broken_async", reason=reason), "sorry", task=BROKEN)
    except (SystemExit, asyncio.CancelledError) as error:
        pytest.fail(f"{error!r} came out of the loop")
    assert said in output.messages[2]["content"]
    assert output.metrics["tool_errors"] == 1


def test_a_failed_call_does_not_take_its_neighbour_along(play):
    turn = call("broken", reason="no") + "\n" + call("add", a=1, b=2)
    output, engine = play(turn, "3", task=BROKEN)
    assert_response(output, engine, turn + END, tool_turn("Error: no", "3"), "3" + END)
    assert (output.metrics["tool_errors"], output.metrics["tool_calls"]) == (1, 2)


def test_the_calculator_explains_itself(play):
    turn = call(expression="1/0")
    output, engine = play(turn, "sorry")
    assert_response(output, engine, turn + END, tool_turn("Error: division by zero"), "sorry" + END)


def test_a_call_past_its_deadline(play):
    blocked, release = threading.Event(), threading.Event()

    def blocks() -> str:
        """Wait for long."""
        blocked.set()
        release.wait()
        return "late"

    async def hangs() -> str:
        """Wait for long."""
        while not blocked.is_set():
            await asyncio.sleep(0)
        await too_late()  # for both of them: one deadline after the other would never pass

    turn = call("blocks") + "\n" + call("hangs")
    output, engine = play(turn, "sorry", task=task_of(blocks, hangs), tool_timeout=HANGS)
    assert not release.is_set()  # nobody waited for it
    release.set()
    said = [m["content"] for m in output.messages if m["role"] == "tool"]
    assert said == [f"Error: {name} took longer than {HANGS} seconds" for name in ("blocks", "hangs")]
    assert_response(output, engine, turn + END, tool_turn(*said), "sorry" + END)
    assert output.metrics["tool_timeouts"] == 2
    assert "tool_errors" not in output.metrics
    assert output.metrics["tool_s"] > 0


def recite(n: int) -> str:
    """Count.

    Args:
        n: How far.
    """
    return "".join(str(i % 10) for i in range(n))


@pytest.mark.parametrize("n, limit, said", [
    (10, 10, "0123456789"),  # fits
    (20, 10, "01234...56789"),  # both ends, 5 tokens each
    (20, 9, "01234...6789"),  # the odd one goes to the front
    (20, 1, "0..."),
])  # fmt: skip
def test_the_middle_of_a_long_tool_response_is_cut(play, n, limit, said):
    turn = call("recite", n=n)
    output, engine = play(turn, "ok", task=task_of(recite), max_tool_response_tokens=limit)
    assert_response(output, engine, turn + END, tool_turn(said), "ok" + END)
    assert output.messages[2]["content"] == said


@pytest.mark.parametrize("side, said", [("left", "0123456789..."), ("right", "...0123456789")])
def test_which_end_of_a_tool_response_stays(play, side, said):
    turn = call("recite", n=20)
    flags = {"max_tool_response_tokens": 10, "tool_response_truncate_side": side}
    output, engine = play(turn, "ok", task=task_of(recite), **flags)
    assert_response(output, engine, turn + END, tool_turn(said), "ok" + END)


@pytest.mark.parametrize(
    "text, cut, tokenised", [("0123456789", False, 0), ("01234567890", True, 1), ("€" * 4, True, 1)]
)
def test_a_short_tool_response_is_not_even_tokenised(play, monkeypatch, text, cut, tokenised):
    """No token is less than a byte, so that a text of few bytes fits unseen."""
    seen, tokenise = [], agent_loop._tokenise
    monkeypatch.setattr(agent_loop, "_tokenise", lambda tokenizer, text: seen.append(text) or tokenise(tokenizer, text))
    output, _ = play(call("notes"), "ok", task=task_of(Notes(text)), max_tool_response_tokens=10)
    assert seen.count(text) == tokenised
    assert (output.messages[2]["content"] == text) == (not cut)


def test_of_a_huge_tool_response_only_the_ends_are_tokenised(play, monkeypatch):
    seen, tokenise = [], agent_loop._tokenise
    monkeypatch.setattr(agent_loop, "_tokenise", lambda tokenizer, text: seen.append(text) or tokenise(tokenizer, text))
    notes = Notes("01234" + "x" * 10**6 + "56789")
    output, _ = play(call("notes"), "ok", task=task_of(notes), max_tool_response_tokens=10)
    assert output.messages[2]["content"] == "01234...56789"
    assert max(map(len, seen)) < 2000


def test_a_response_of_few_characters_and_many_tokens_is_cut(play, tokenizer):
    notes = Notes("€" * 20)  # 60 tokens
    output, _ = play(call("notes"), "ok", task=task_of(notes), max_tool_response_tokens=30)
    content = output.messages[2]["content"]
    assert len(encode(tokenizer, content)) <= 30 + len("...")
    assert content.startswith("€€€€") and content.endswith("€€€€") and "..." in content


# ---------------------------------------------------------------------------------------------------------------------
# Limits of a trajectory with tools


@pytest.mark.parametrize("room, fits", [(-1, False), (1, True)])
@pytest.mark.parametrize("limit", ["max_response_tokens", "max_model_len"])
def test_a_suffix_that_does_not_fit_is_not_appended(play, tokenizer, limit, room, fits):
    """room: tokens left after the tool turn."""
    full, _ = play(SUM, ANSWER)
    size = len(encode(tokenizer, SUM + END + tool_turn("2"))) + room
    size += len(full.prompt_ids) if limit == "max_model_len" else 0
    output, engine = play(SUM, ANSWER, **{limit: size})
    if fits:
        assert_response(output, engine, SUM + END, tool_turn("2"), "<answer>")  # one token of the answer
        assert (output.num_turns, len(output.messages)) == (4, 4)
    else:
        assert_response(output, engine, SUM + END)
        assert (output.num_turns, len(output.messages)) == (2, 2)
    assert (output.stop_reason, output.truncated) == ("length", True)


def test_a_suffix_that_leaves_no_room_for_a_reply_is_not_appended_either(play, tokenizer):
    output, engine = play(SUM, max_response_tokens=len(encode(tokenizer, SUM + END + tool_turn("2"))))
    assert_response(output, engine, SUM + END)
    assert output.stop_reason == "length"


@pytest.mark.parametrize("limit, parts", [
    (1, [SUM + END]),
    (2, [SUM + END, tool_turn("2"), SUM + END]),
])  # fmt: skip
def test_max_assistant_turns(play, limit, parts):
    output, engine = play(SUM, SUM, SUM, max_assistant_turns=limit)
    assert_response(output, engine, *parts)
    assert (output.stop_reason, output.truncated, output.num_turns) == ("max_turns", True, 2 * limit)
    assert output.metrics.get("tool_calls", 0) == limit - 1  # the last call had nobody left to read its result


def test_an_answer_in_the_last_turn_is_no_truncation(play):
    output, _ = play(SUM, ANSWER, max_assistant_turns=2)
    assert (output.stop_reason, output.num_turns) == ("stop", 4)


def test_calls_beyond_the_limit_are_told_so(play):
    sums = [call(expression=f"{n}+{n}") for n in (1, 2, 3)]
    output, engine = play("\n".join(sums), "ok", max_parallel_calls=2)
    said = ["2", "4", "Error: only 2 tool calls at a time are executed"]
    assert_response(output, engine, "\n".join(sums) + END, tool_turn(*said), "ok" + END)
    assert output.metrics["tool_calls"] == 3 and output.metrics["tool_errors"] == 1
    made = [call["id"] for call in output.messages[1]["tool_calls"]]
    assert (
        [m["tool_call_id"] for m in output.messages if m["role"] == "tool"]
        == made
        == ["000001000", "000001001", "000001002"]
    )


def test_a_trajectory_past_its_budget_keeps_what_it_has(play):
    class Late(Notes):
        execute = staticmethod(too_late)

    notes, turn = Late(), call("notes")
    output, engine = play(SUM, turn, task=task_of(calculator.calculator, notes), trajectory_timeout=HANGS)
    assert output.stop_reason == "timeout" and not output.truncated
    assert_response(output, engine, SUM + END, tool_turn("2"), turn + END)
    assert notes.events == ["create", "calc_reward", "release"]


def test_a_tools_own_timeout_is_not_the_trajectorys(play):
    async def hangs() -> str:
        """Wait for long."""
        await too_late()

    output, _ = play(call("hangs"), "ok", task=task_of(hangs), trajectory_timeout=4 * HANGS, tool_timeout=HANGS)
    assert output.stop_reason == "stop" and output.metrics["tool_timeouts"] == 1


def test_a_subclass_adds_a_state(play, monkeypatch):
    class Reflecting(ToolAgentLoop):
        """Asks once whether the answer is right before it ends."""

        async def generating(self, trajectory):
            state = await super().generating(trajectory)
            return self.reflecting if state is None and trajectory.user_turns < 2 else state

        async def reflecting(self, trajectory):
            trajectory.count("reflections")
            return self.answer(trajectory, [{"role": "user", "content": "Sure?"}])

    monkeypatch.setitem(AGENT_LOOPS, "reflecting", Reflecting)
    output, engine = play(SUM, "3", ANSWER, row={"agent_name": "reflecting"})
    assert_response(output, engine, SUM + END, tool_turn("2"), "3" + END, user_turn("Sure?"), ANSWER + END)
    assert output.metrics["reflections"] == 1 and output.num_turns == 3 + 2 + 1


def test_no_turn_limit(play):
    output, _ = play(*[SUM] * 12, ANSWER, max_assistant_turns=0)
    assert (output.stop_reason, output.num_turns) == ("stop", 13 + 12 + 1)


# ---------------------------------------------------------------------------------------------------------------------
# The life of a Tool


NOTES_KWARGS = {
    "create_kwargs": {"size": 1}, "execute_kwargs": {"user": "u"}, "calc_reward_kwargs": {"scale": 2},
    "release_kwargs": {"force": True},
}  # fmt: skip
TWO_NOTES = call("notes", text="a") + "\n" + call("notes", text="b")


def test_a_tool_is_created_once_executed_often_rewarded_once_and_released(play):
    notes = Notes("one", "two", "three", calc_reward=0.75)
    row = {"extra_info": {"tools_kwargs": {"notes": NOTES_KWARGS}}}
    third = call("notes", text="c")
    output, engine = play(TWO_NOTES, third, "bye", task=task_of(notes), row=row)
    assert notes.log == [
        ("create", {"size": 1}),
        ("execute", {"text": "a"}, {"user": "u"}),
        ("execute", {"text": "b"}, {"user": "u"}),
        ("execute", {"text": "c"}, {"user": "u"}),
        ("calc_reward", {"scale": 2}),
        ("release", {"force": True}),
    ]
    assert notes.request_ids == engine.request_ids  # one, the same everywhere
    assert_response(
        output, engine, TWO_NOTES + END, tool_turn("one", "two"), third + END, tool_turn("three"), "bye" + END
    )
    assert output.turn_rewards == [(len(output.response_ids) - 1, 0.75)]


def test_a_tool_that_is_not_called_is_left_alone(play):
    notes, other = Notes(), Notes(name="other")
    play(call("notes"), "bye", task=task_of(notes, other))
    assert notes.events == ["create", "execute", "calc_reward", "release"]
    assert other.log == []


def test_two_trajectories_share_the_instance_not_the_life(prepare):
    notes = Notes()

    async def both():
        runs = [prepare([call("notes"), "bye"], task=task_of(notes))[0] for _ in range(2)]
        await asyncio.gather(*runs)

    asyncio.run(both())
    assert sorted(notes.events) == sorted(["create", "execute", "calc_reward", "release"] * 2)
    assert len(notes.request_ids) == 2


def test_no_call_is_executed_before_create_is_done(play):
    class Slow(Notes):
        async def create(self, request_id, **kwargs):
            for _ in range(10):
                await asyncio.sleep(0)
            await super().create(request_id, **kwargs)

    slow = Slow()
    play(TWO_NOTES, "bye", task=task_of(slow))
    assert slow.events == ["create", "execute", "execute", "calc_reward", "release"]


class FailsToCreate(Notes):
    async def create(self, request_id, **kwargs):
        await super().create(request_id, **kwargs)
        raise OSError("no space left")


def test_a_create_that_raises_is_told_and_released(play):
    notes = FailsToCreate()
    output, engine = play(call("notes"), "bye", task=task_of(notes))
    assert_response(output, engine, call("notes") + END, tool_turn("Error: no space left"), "bye" + END)
    assert output.metrics["tool_errors"] == 1
    assert notes.events[0] == "create" and notes.events[-1] == "release"
    assert notes.events.count("create") == notes.events.count("release") == 1
    assert "execute" not in notes.events


def test_a_tool_that_could_not_be_created_is_not_used(play):
    notes = FailsToCreate()
    output, _ = play(TWO_NOTES, call("notes"), "bye", task=task_of(notes))
    assert set(notes.events) == {"create", "release"}
    assert output.metrics["tool_errors"] == 3


@pytest.mark.parametrize("how", ["the engine raises", "calc_reward raises"])
def test_a_failing_loop_releases_its_tools(play, how):
    class Fails(Notes):
        async def calc_reward(self, request_id, **kwargs):
            raise RuntimeError("calc_reward raises")

    notes, other = Fails(), Notes(name="other")
    turn = call("notes") + "\n" + call("other")
    with pytest.raises(RuntimeError, match=how):
        play(turn, RuntimeError(how) if "engine" in how else "bye", task=task_of(notes, other))
    assert notes.events == ["create", "execute", "release"]
    assert other.events == ["create", "execute", "release"]


@pytest.mark.parametrize("where", ["create", "execute", "generate"])
def test_a_cancelled_loop_releases_its_tools(prepare, where):
    class Hangs(Notes):
        async def create(self, request_id, **kwargs):
            await super().create(request_id, **kwargs)
            await reached("create")

        async def execute(self, request_id, arguments, **kwargs):
            await reached("execute")
            return await super().execute(request_id, arguments, **kwargs)

    arrived = asyncio.Event()

    async def reached(place: str) -> None:
        if place == where:
            arrived.set()
            await for_ever()

    class HangsAtTheSecondTurn(Script):
        async def generate(self, **kwargs):
            out = await super().generate(**kwargs)
            if len(self.prompts) == 2:
                await reached("generate")
            return out

    async def scenario(run):
        playing = asyncio.create_task(run)
        await arrived.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    notes, other = Hangs(), Notes(name="other")
    run, engine = prepare([call("notes"), "bye"], task=task_of(notes, other))
    engine.__class__ = HangsAtTheSecondTurn
    asyncio.run(scenario(run))
    assert notes.events == {
        "create": ["create", "release"], "execute": ["create", "release"], "generate": ["create", "execute", "release"]
    }[where]  # fmt: skip
    assert other.log == []


def test_a_deadline_does_not_prevent_the_release(play):
    class Late(Notes):
        execute = staticmethod(too_late)

    late = Late()
    play(call("notes"), "bye", task=task_of(late), tool_timeout=HANGS)
    assert late.events == ["create", "calc_reward", "release"]


def test_a_failing_release_is_counted_and_the_others_are_released(play):
    class Fails(Notes):
        async def release(self, request_id, **kwargs):
            await super().release(request_id, **kwargs)
            raise OSError("gone already")

    notes, other = Fails(), Notes(name="other")
    output, _ = play(call("notes") + "\n" + call("other"), "bye", task=task_of(notes, other))
    assert notes.events[-1] == other.events[-1] == "release"
    assert output.metrics["release_errors"] == 1
    assert output.stop_reason == "stop"


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_wrong_release_kwargs_leave_the_other_tools_released(play):
    class Strict(Notes):
        async def release(self, request_id):
            await super().release(request_id)

    row = {"extra_info": {"tools_kwargs": {"notes": {"release_kwargs": {"force": True}}, "other": {}}}}
    notes, other = Strict(), Notes(name="other")
    output, _ = play(call("other") + "\n" + call("notes"), "bye", task=task_of(other, notes), row=row)
    assert other.events[-1] == "release"
    assert output.metrics["release_errors"] == 1


# ---------------------------------------------------------------------------------------------------------------------
# What tools give back, and which tools a row has


@pytest.mark.parametrize("answer, text, reward, metrics", [
    ("plain", "plain", None, {}),
    (7, "7", None, {}),
    (ToolResponse(text="full", reward=0.5, metrics={"rows": 3}), "full", 0.5, {"rows": 3}),
    (("tuple", 0.25, {"rows": 2}), "tuple", 0.25, {"rows": 2}),
    (("tuple", None, None), "tuple", None, {}),
    ((ToolResponse(text="both", reward=0.5, metrics={"a": 1}), -1, {"b": 2}), "both", -1.0, {"a": 1, "b": 2}),
    ((ToolResponse(text="both", reward=0.5), None, {}), "both", 0.5, {}),
    (ToolResponse(), "", None, {}),
])  # fmt: skip
def test_results_of_a_tool(play, tokenizer, answer, text, reward, metrics):
    turn = call("notes", text="a")
    output, engine = play(turn, "bye", task=task_of(Notes(answer)))
    assert_response(output, engine, turn + END, tool_turn(text), "bye" + END)
    at = len(encode(tokenizer, turn + END)) - 1  # the token that made the call
    assert output.turn_rewards == ([] if reward is None else [(at, reward)])
    own = {k: v for k, v in output.metrics.items() if k not in ("tool_s", "tool_calls")}
    assert own == {f"tool/{name}": value for name, value in metrics.items()}


def test_rewards_of_a_trajectory_fall_on_the_turns_that_earned_them(play, tokenizer):
    """Two parallel calls share the turn's last token; metrics add up; calc_reward is on the last sampled token."""
    notes = Notes(("a", 1.0, {"n": 1}), ("b", 2.0, {"n": 1}), ("c", 0.5, {"n": 1}), calc_reward=4.0)
    output, engine = play(TWO_NOTES, call("notes"), "bye", task=task_of(notes))
    first = len(encode(tokenizer, TWO_NOTES + END))
    second = first + len(encode(tokenizer, tool_turn("a", "b") + call("notes") + END))
    assert output.turn_rewards == [
        (first - 1, 1.0), (first - 1, 2.0), (second - 1, 0.5), (len(output.response_ids) - 1, 4.0)
    ]  # fmt: skip
    assert all(output.response_mask[at] == 1 and output.response_ids[at] == tokenizer.eos_token_id
               for at, _ in output.turn_rewards)  # fmt: skip
    assert output.metrics["tool/n"] == 3


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_finite_number_goes_no_further(play, reward):
    with contextlib.suppress(ValueError):  # it may cost the call or the trajectory, but not the batch
        output, _ = play(call("notes"), "bye", task=task_of(Notes(("fine", reward, {}))))
        assert all(math.isfinite(reward) for _, reward in output.turn_rewards)


@pytest.mark.parametrize("answer", [("fine", "high", {}), ("fine", 1.0, {"status": "ok"})])
def test_a_reward_or_metric_that_is_no_number_costs_no_trajectory(play, answer):
    output, _ = play(call("notes"), "bye", task=task_of(Notes(answer)))
    assert output.stop_reason == "stop"


@pytest.mark.parametrize("answer, said", [
    (("fine", math.nan, {}), "Error: the reward of tool 'notes' must be a finite number, got nan"),
    (("fine", 1.0, {"rows": math.inf}), "Error: metric 'rows' of tool 'notes' must be a finite number, got inf"),
])  # fmt: skip
def test_a_number_that_is_not_finite_names_its_tool(play, answer, said):
    output, _ = play(call("notes"), "bye", task=task_of(Notes(answer)))
    assert output.messages[2]["content"] == said
    assert (output.turn_rewards, output.metrics["tool_errors"], "tool/rows" in output.metrics) == ([], 1, False)


def test_a_reward_that_is_not_finite_names_the_tool_or_interaction_that_ends_the_run(play):
    with pytest.raises(ValueError, match="the reward of tool 'notes' must be a finite number, got inf"):
        play(call("notes"), "bye", task=task_of(Notes(calc_reward=math.inf)))
    quiz = Quiz((True, "", math.nan, {}))
    with pytest.raises(ValueError, match="the reward of interaction 'quiz' must be a finite number, got nan"):
        play("3", task=quiz_task(quiz), row=quiz_row())
    with pytest.raises(ValueError, match="the reward of interaction 'quiz' must be a finite number, got {}"):
        play("3", task=quiz_task(Quiz((True, "", {}, {}))), row=quiz_row())  # no number, and not taken for 0
    with pytest.raises(ValueError, match=r"the metrics of interaction 'quiz' must be a dict, got \[1\]"):
        play("3", task=quiz_task(Quiz((True, "", 0, [1]))), row=quiz_row())
    assert quiz.events[-1] == "finalize"


@pytest.mark.parametrize("text", [None, 5, ["more"], b"more"])
def test_what_a_simulated_user_says_is_a_text(play, text):
    said = re.escape(f"the text of interaction 'quiz' must be a str, got {text!r}")
    for done in (False, True)[: 1 + (text is not None)]:  # at the end it may say nothing
        with pytest.raises(ValueError, match=said):
            play("3", "4", task=quiz_task(Quiz((done, text, 0.0, {}))), row=quiz_row())
    host = Host((True, None, 0.0, {}))
    host.said = text
    if text is not None:  # then the row's prompt comes first
        with pytest.raises(ValueError, match=said):
            play("3", task=quiz_task(host), row=quiz_row())
    else:
        assert play("3", task=quiz_task(host), row=quiz_row())[0].extra == {"unread": ""}


@pytest.mark.parametrize("answer", [
    ("False", "more", 0.0, {}), ("", "more", 0.0, {}), (None, "more", 0.0, {}), (2, "more", 0.0, {}), "done",
    (True, "more", 0.0), None, 5, {"done": True}])  # fmt: skip
def test_whether_a_simulated_user_is_done_is_a_bool(play, answer):
    said = re.escape(f"interaction 'quiz' returned {answer!r}: must be (done, text, reward, metrics), and done True or")
    with pytest.raises(ValueError, match=said):
        play("3", "4", task=quiz_task(Quiz(answer)), row=quiz_row())
    output, _ = play("3", "4", task=quiz_task(Quiz((np.False_, "x", 0, {}), [np.True_, "y", 0, {}])), row=quiz_row())
    assert output.num_turns == 4 and output.extra == {"unread": "y"}


def test_a_tools_arguments_may_have_any_name(play):
    def ask(function: str):
        """Ask.

        Args:
            function: whom.
        """
        return f"{function} was asked"

    output, _ = play(call("ask", function="f"), "bye", task=task_of(ask))
    assert output.messages[2]["content"] == "f was asked" and "tool_errors" not in output.metrics


def test_a_tuple_of_the_wrong_length_is_a_failed_call(play):
    output, _ = play(call("notes"), "bye", task=task_of(Notes(("text", 1.0))))
    assert output.metrics["tool_errors"] == 1


def test_tools_kwargs_choose_the_tools_of_a_row(play, tokenizer):
    notes, other = Notes(), Notes(name="other")
    row = {"extra_info": {"tools_kwargs": {"other": {"create_kwargs": {"x": 1}}}}}
    turn = call("notes") + "\n" + call("other")
    output, _ = play(turn, "bye", task=task_of(notes, other), row=row)
    assert tokenizer.decode(output.prompt_ids).startswith(f"<|im_start|>system\nTools: other{END}")
    assert "there is no tool 'notes'" in output.messages[2]["content"]
    assert output.messages[3]["content"] == "noted"
    assert notes.log == []
    assert other.log[0] == ("create", {"x": 1})


def test_no_tools_kwargs_means_all_tools(play, tokenizer):
    output, _ = play("hello", task=task_of(Notes(), Notes(name="other")))
    assert tokenizer.decode(output.prompt_ids).startswith(f"<|im_start|>system\nTools: notes, other{END}")


def test_tools_kwargs_that_name_no_tool():
    with pytest.raises(BadInput, match=r"\['abacus'\].*\['calculator'\]"):
        task_tools(CALCULATOR, {"abacus": {}})


def test_execute_kwargs_reach_a_function(play):
    row = {"extra_info": {"tools_kwargs": {"add": {"execute_kwargs": {"b": 40}}}}}
    output, _ = play(call("add", a=2), "42", task=task_of(add), row=row)
    assert output.messages[2]["content"] == "42"


def test_a_function_is_a_tool_with_a_schema():
    tool = as_tool(add)
    assert tool is as_tool(add) and tool.name == "add"
    assert tool.schema["function"]["name"] == "add"
    assert tool.schema["function"]["parameters"]["required"] == ["a"]
    assert tool.schema["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "One."}
    notes = Notes()
    assert as_tool(notes) is notes


def test_a_function_without_documentation_is_bad_input():
    def bare(x):
        return x

    with pytest.raises(Exception, match="for bare because it has no docstring"):  # load_task makes it BadInput
        as_tool(bare)
    with pytest.raises(BadInput, match="neither a Tool instance nor a function"):
        as_tool("calculator")


def test_tools_that_cannot_be_hashed():
    with pytest.raises(BadInput, match="neither a Tool instance nor a function"):
        as_tool({"type": "function"})

    @dataclass
    class Counter(Tool):
        n: int = 0

    counter = Counter()
    assert as_tool(counter) is counter


def test_an_unknown_tool_parser_is_bad_input(tokenizer):
    with pytest.raises(BadInput, match="herms.*hermes"):
        tool_parser("herms", tokenizer)


# ---------------------------------------------------------------------------------------------------------------------
# Interactions


class Quiz(Interaction):
    """A user with a script of (done, text, reward, metrics), who writes down what happens."""

    name = "quiz"

    def __init__(self, *answers):
        self.answers, self.log, self.heard = list(answers), [], []
        self.request_ids: set[str] = set()

    async def start(self, request_id, **kwargs):
        self.log.append(("start", kwargs))
        self.request_ids.add(request_id)

    async def generate_response(self, request_id, messages, **kwargs):
        self.log.append(("generate_response", kwargs))
        self.heard.append(copy.deepcopy(messages))
        self.request_ids.add(request_id)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def finalize(self, request_id):
        self.log.append(("finalize", {}))
        self.request_ids.add(request_id)

    @property
    def events(self) -> list[str]:
        return [event for event, _ in self.log]


def quiz_task(quiz: Quiz, *tools) -> SimpleNamespace:
    return task_of(*tools, INTERACTIONS=[quiz])


def quiz_row(**kwargs) -> dict:
    return {"extra_info": {"interaction_kwargs": {"name": "quiz", **kwargs}}}


def test_methods_that_are_not_async_run_in_threads(play, tokenizer):
    class Plain(Notes):
        def execute(self, request_id, arguments, **kwargs):
            self.note(request_id, "execute", threading.current_thread() is threading.main_thread())
            return "plain"

        def release(self, request_id, **kwargs):
            return super().release(request_id, **kwargs)  # a coroutine, as of a decorated method

    class PlainQuiz(Quiz):
        def generate_response(self, request_id, messages, **kwargs):
            return True, "", 0.5, {}

    tool = Plain()
    output, _ = play(call("notes"), "bye", task=quiz_task(PlainQuiz(), tool), row=quiz_row())
    assert [message["content"] for message in output.messages if message["role"] == "tool"] == ["plain"]
    assert ("execute", False) in tool.log and tool.log[-1][0] == "release"
    assert "release_errors" not in output.metrics and output.turn_rewards[-1][1] == 0.5


def test_a_template_that_writes_nothing_for_a_tools_answer_is_named(play, tokenizer):
    silent = copy.copy(tokenizer)

    def render(messages, **kwargs):
        return "".join(message["content"] for message in messages if message["role"] != "tool")

    silent.apply_chat_template = render
    new = [{"role": "tool", "content": "85"}]
    with pytest.raises(ValueError, match="writes nothing for {'role': 'tool', 'content': '85'}"):
        turn_suffix(silent, PROMPT, new, set(), False)


def test_interaction_until_it_is_done(play, tokenizer):
    quiz = Quiz((False, "Sure?", -0.5, {"asked": 1}), (True, "Good.", 1.0, {"asked": 1}))
    output, engine = play("3", "2", task=quiz_task(quiz), row=quiz_row())
    assert_response(output, engine, "3" + END, user_turn("Sure?"), "2" + END)
    assert output.messages == [
        *PROMPT,
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "2"},
    ]
    assert quiz.heard == [output.messages[:2], output.messages[:4]]  # each time up to the assistant's turn
    assert quiz.events == ["start", "generate_response", "generate_response", "finalize"]
    assert quiz.request_ids == engine.request_ids
    first = len(encode(tokenizer, "3" + END))
    assert output.turn_rewards == [(first - 1, -0.5), (len(output.response_ids) - 1, 1.0)]
    assert (output.num_turns, output.stop_reason) == (4, "stop")
    assert output.metrics == {"interaction/asked": 2}
    assert output.extra == {"unread": "Good."}  # its last word, which the policy does not read


def test_interaction_after_a_stop_string(play):
    quiz = Quiz((False, "Sure?", 0.0, {}), (True, "", 0.0, {}))
    output, engine = play(("3.", "stop"), "2", task=quiz_task(quiz), row=quiz_row(), sampling={"stop": ["."]})
    assert_response(output, engine, "3.", END + user_turn("Sure?"), "2" + END)


@pytest.mark.parametrize("limit", [1, 2])
def test_max_user_turns(play, limit):
    """The last assistant turn is still judged; the user's next words are not heard any more."""
    quiz = Quiz(*[(False, "Sure?", 1.0, {})] * 5)
    output, engine = play(*["3"] * (limit + 1), task=quiz_task(quiz), row=quiz_row(), max_user_turns=limit)
    assert_response(output, engine, *["3" + END, user_turn("Sure?")] * limit, "3" + END)
    assert (output.stop_reason, output.truncated) == ("max_turns", True)
    assert output.num_turns == (limit + 1) + limit + 1
    assert [reward for _, reward in output.turn_rewards] == [1.0] * (limit + 1)
    assert quiz.events[-1] == "finalize"


def test_max_assistant_turns_ends_an_interaction(play):
    quiz = Quiz(*[(False, "Sure?", 0.0, {})] * 5)
    output, engine = play("3", "3", "3", task=quiz_task(quiz), row=quiz_row(), max_assistant_turns=2)
    assert_response(output, engine, "3" + END, user_turn("Sure?"), "3" + END)
    assert (output.stop_reason, output.num_turns) == ("max_turns", 4)


def test_the_last_turn_of_an_interaction_has_its_reward_too(play):
    quiz = Quiz((False, "no", 0.25, {}), (True, "right", 1.0, {}))
    output, _ = play("3", ANSWER, task=quiz_task(quiz), row=quiz_row(), max_assistant_turns=2)
    assert [reward for _, reward in output.turn_rewards] == [0.25, 1.0] and output.stop_reason == "stop"
    quiz = Quiz((False, "no", 0.25, {}), (False, "no", 0.5, {}))
    output, _ = play("3", "4", task=quiz_task(quiz), row=quiz_row(), max_assistant_turns=2)
    assert [reward for _, reward in output.turn_rewards] == [0.25, 0.5] and output.stop_reason == "max_turns"
    assert output.messages[-1]["content"] == "4"


def test_two_tools_of_one_name_are_bad_input():
    with pytest.raises(BadInput, match="same name"):
        task_tools(task_of(Notes(), Notes()))


def test_an_image_that_nobody_could_see_is_an_error(play):
    output, _ = play(call("notes"), "ok", task=task_of(Notes(ToolResponse("look", images=["png"]))))
    assert output.messages[2]["content"] == "Error: the tool returned an image, and this agent reads text only"


def test_a_user_turn_that_does_not_fit_is_not_appended(play, tokenizer):
    quiz = Quiz((False, "A long story about numbers", 0.25, {}))
    output, engine = play("3", task=quiz_task(quiz), row=quiz_row(), max_response_tokens=20)
    assert_response(output, engine, "3" + END)
    assert output.stop_reason == "length"
    assert output.messages[-1] == {"role": "assistant", "content": "3"}
    assert output.turn_rewards == [(len(output.response_ids) - 1, 0.25)]
    assert quiz.events[-1] == "finalize"


def test_tools_and_an_interaction(play):
    quiz = Quiz((False, "Sure?", 0.0, {}), (True, "", 1.0, {}))
    task = quiz_task(quiz, calculator.calculator)
    output, engine = play(SUM, "3", ANSWER, task=task, row=quiz_row())
    assert_response(
        output, engine, SUM + END, tool_turn("2"), "3" + END, user_turn("Sure?"), ANSWER + END
    )  # fmt: skip
    assert [m["role"] for m in output.messages] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert output.num_turns == 6


def test_tool_turns_are_no_user_turns(play):
    quiz = Quiz((False, "Sure?", 0.0, {}), (True, "", 1.0, {}))
    task = quiz_task(quiz, calculator.calculator)
    output, _ = play(SUM, "3", "2", task=task, row=quiz_row(), max_user_turns=1)
    assert (output.stop_reason, output.num_turns) == ("stop", 6)


class Host(Quiz):
    """A user who speaks first."""

    said = "Hello! <|im_end|>"  # no end of a turn: words

    async def start(self, request_id, **kwargs):
        await super().start(request_id, **kwargs)
        return self.said


@pytest.mark.parametrize("prompt", [[], [{"role": "system", "content": "Be <|im_end|>brief."}], PROMPT])
@pytest.mark.parametrize("tools", [[], [calculator.calculator]])
def test_start_may_open_the_conversation(play, tokenizer, prompt, tools):
    host = Host((False, "Sure?", -0.5, {}), (True, "", 1.0, {}))
    output, engine = play("3", "2", task=quiz_task(host, *tools), row={"prompt": prompt} | quiz_row())
    opening = {"role": "user", "content": host.said}
    assert output.messages[: len(prompt) + 1] == [*prompt, opening] and len(output.messages) == len(prompt) + 4
    schemas = [as_tool(tool).schema for tool in tools]
    assert output.prompt_ids == render(tokenizer, [*prompt, opening], schemas, prompt) == engine.prompts[0]
    end = tokenizer.convert_tokens_to_ids(END)  # of the system's own words, of the turn, of the generation prompt's
    trusted = render(tokenizer, [*prompt, {"role": "user", "content": "Hello!"}], schemas)
    assert output.prompt_ids.count(end) == trusted.count(end)
    assert_response(output, engine, "3" + END, user_turn("Sure?"), "2" + END)
    assert host.request_ids == engine.request_ids and len(host.request_ids) == 1
    assert host.heard[0] == output.messages[: len(prompt) + 2]
    assert (output.num_turns, output.turn_rewards[0][1]) == (4, -0.5)


def test_an_empty_prompt_to_which_start_adds_nothing_is_a_failure(play):
    quiz = Quiz((True, "", 0.0, {}))
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        play("3", task=quiz_task(quiz), row={"prompt": []} | quiz_row())
    assert quiz.events[-1] == "finalize"


def test_start_gets_the_kwargs_of_the_row(play):
    quiz = Quiz((True, "", 0.0, {}))
    play("3", task=quiz_task(quiz), row=quiz_row(ground_truth="2"))
    assert quiz.log[0] == ("start", {"ground_truth": "2"})


def test_an_interaction_gets_the_same_kwargs_each_time(play):
    quiz = Quiz((True, "", 0.0, {}))
    play("3", task=quiz_task(quiz), row=quiz_row(ground_truth="2"))
    assert quiz.log[1] == ("generate_response", {"ground_truth": "2"})


def test_a_failing_interaction_is_finalized(play):
    quiz, notes = Quiz(RuntimeError("lost for words")), Notes()
    with pytest.raises(RuntimeError, match="lost for words"):
        play(call("notes"), "3", task=quiz_task(quiz, notes), row=quiz_row())
    assert quiz.events == ["start", "generate_response", "finalize"]
    assert notes.events == ["create", "execute", "release"]


def test_a_cancelled_interaction_is_finalized(prepare):
    class Hangs(Quiz):
        async def generate_response(self, request_id, messages, **kwargs):
            arrived.set()
            await for_ever()

    async def scenario(run):
        playing = asyncio.create_task(run)
        await arrived.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    arrived, quiz = asyncio.Event(), Hangs()
    run, _ = prepare(["3"], task=quiz_task(quiz), row=quiz_row())
    asyncio.run(scenario(run))
    assert quiz.events == ["start", "finalize"]


def test_which_interaction():
    quiz, chat = Quiz(), Quiz()
    chat.name = "chat"
    both = SimpleNamespace(INTERACTIONS=[quiz, chat])
    with pytest.raises(BadInput, match="holds what is no Interaction, or two of one name"):
        task_interaction(SimpleNamespace(INTERACTIONS=[quiz, chat, Quiz()]), {"name": "chat"})
    assert task_interaction(both, {"name": "chat"}) is chat
    assert task_interaction(SimpleNamespace(INTERACTIONS=[quiz]), {}) is quiz
    assert task_interaction(both, {}) is None
    assert task_interaction(SimpleNamespace(), {}) is None
    with pytest.raises(BadInput, match=r"'chess'.*\['chat', 'quiz'\]"):
        task_interaction(both, {"name": "chess"})
    with pytest.raises(BadInput, match=r"needs a 'name'.*\['chat', 'quiz'\]"):
        task_interaction(both, {"level": 3})


# ---------------------------------------------------------------------------------------------------------------------
# AgentLoopOutput, and which loop runs


def make_output(**changes) -> AgentLoopOutput:
    lists = dict(response_ids=[7, 8], response_mask=[1, 0], response_logprobs=[-0.5, 0.0], response_versions=[4, -1])
    return AgentLoopOutput(**{"prompt_ids": [1]} | lists | changes)


@pytest.mark.parametrize("name", ["response_ids", "response_mask", "response_logprobs", "response_versions"])
def test_an_output_with_unequal_lists_is_refused(name):
    with pytest.raises(ValueError, match=rf"one length.*'{name}': 1"):
        make_output(**{name: [1]})


@pytest.mark.parametrize("changes, said", [
    (dict(response_mask=[1, 2]), "response_mask holds 0"),
    (dict(prompt_ids=[]), "prompt_ids is empty"),
    (dict(stop_reason="tired"), "'tired' is not one of"),
])  # fmt: skip
def test_an_output_that_makes_no_sense_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        make_output(**changes)


def test_defaults_of_an_output_are_its_own():
    one, two = make_output(), make_output()
    for name, empty in dict(turn_rewards=[], messages=[], metrics={}, images=[], extra={}).items():
        assert getattr(one, name) == empty
        assert getattr(one, name) is not getattr(two, name)
    assert (one.reward, one.text, one.num_turns, one.stop_reason) == (None, "", 0, "stop")
    with pytest.raises(TypeError):
        AgentLoopOutput([1], [], [], [], [])  # keywords only


def test_truncated_is_length_or_max_turns():
    assert STOP_REASONS == ("stop", "length", "max_turns", "timeout", "abort", "error")
    assert [make_output(stop_reason=r).truncated for r in STOP_REASONS] == [False, True, True, False, False, False]


def test_which_loop_runs():
    args, plain = Args(), SimpleNamespace()
    assert agent_loop_class({}, plain, args) is SingleTurnLoop
    assert agent_loop_class({}, task_of(), args) is SingleTurnLoop
    assert agent_loop_class({}, CALCULATOR, args) is ToolAgentLoop
    assert agent_loop_class({}, SimpleNamespace(INTERACTIONS=[Quiz()]), args) is ToolAgentLoop
    assert agent_loop_class({"agent_name": None}, CALCULATOR, args) is ToolAgentLoop  # a parquet column with gaps
    assert agent_loop_class({}, CALCULATOR, Args(agent="single_turn")) is SingleTurnLoop
    assert agent_loop_class({"agent_name": "tool_agent"}, plain, Args(agent="single_turn")) is ToolAgentLoop
    with pytest.raises(BadInput, match=r"no agent loop 'swarm'.*'single_turn'.*'tool_agent'"):
        agent_loop_class({}, plain, Args(agent="swarm"))


def test_what_loops_read_of_their_args_has_one_default_everywhere():
    args = Args()
    assert {field.name: getattr(args, field.name) for field in dataclasses.fields(LoopArgs)} == vars(LoopArgs())


def test_args_may_be_any_object_with_a_budget_and_a_window(tokenizer):
    """What else it lacks has the default of LoopArgs; what it has besides stays there, and it is not changed itself."""
    given = SimpleNamespace(max_response_tokens=50, max_model_len=None, max_assistant_turns=1, colour="green")
    loop = ToolAgentLoop(Script(tokenizer, (SUM,)), tokenizer, None, CALCULATOR, given)
    output = asyncio.run(loop.run({}, prompt=PROMPT, step=0, index=0, rollout_n=0, validate=False))
    assert (output.stop_reason, loop.args.colour, loop.args.tool_timeout) == ("max_turns", "green", 30.0)
    assert "tool_timeout" not in vars(given)
    for args in (Args(), LoopArgs()):
        own = SingleTurnLoop(None, tokenizer, None, None, args).args
        own.max_images = 99
        assert (own.tool_timeout, args.max_images) == (30.0, 8)


@pytest.mark.parametrize("name", ["max_response_tokens", "max_model_len"])
def test_args_without_a_budget_or_a_window_are_refused_at_once(tokenizer, name):
    args = SimpleNamespace(**{key: value for key, value in vars(LoopArgs()).items() if key != name})
    with pytest.raises(TypeError, match=f"^ToolAgentLoop needs args with .*; these lack {name}: see LoopArgs$"):
        ToolAgentLoop(None, tokenizer, None, CALCULATOR, args)


PASTED = """
import asyncio, json, sys
from types import SimpleNamespace
from transformers import AutoTokenizer
from agent_loop import LoopArgs, TokenOutput, ToolAgentLoop

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
lines = [CALL + tokenizer.eos_token, "It is 2." + tokenizer.eos_token]

def add(a: int, b: int) -> int:
    '''Adds two numbers.

    Args:
        a: One.
        b: The other.
    '''
    return a + b

class Script:
    async def generate(self, *, request_id, prompt_ids, sampling_params, image_data=None):
        ids = tokenizer(lines.pop(0), add_special_tokens=False)["input_ids"]
        return TokenOutput(ids, [-0.5] * len(ids), [0] * len(ids), "stop", prompt_ids)

loop = ToolAgentLoop(Script(), tokenizer, None, SimpleNamespace(TOOLS=[add]), LoopArgs(max_response_tokens=1000))
row = {"prompt": [{"role": "user", "content": "What is 1+1?"}]}
output = asyncio.run(loop.run({}, **row))
ours = [name for name in ("train", "rollout", "data", "losses", "flatrl") if name in sys.modules]
print(json.dumps([output.stop_reason, output.num_turns, [m["content"] for m in output.messages], ours]))
"""


def test_the_file_works_pasted_alone_into_another_project(tiny_model, tmp_path):
    shutil.copy(agent_loop.__file__, tmp_path / "agent_loop.py")
    command = [sys.executable, "-c", PASTED, tiny_model]
    done = subprocess.run(command, cwd=tmp_path, env=clean_env(), capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    said = ["What is 1+1?", "", "2", "It is 2."]
    assert json.loads(done.stdout.splitlines()[-1]) == ["stop", 4, said, []]


def test_a_registered_loop_is_found_and_gets_the_row(play, monkeypatch):
    monkeypatch.setattr("agent_loop.AGENT_LOOPS", dict(AGENT_LOOPS))
    seen = {}

    @register("parrot")
    class Parrot(AgentLoopBase):
        async def run(self, sampling_params, **row):
            seen.update(row, sampling=sampling_params, task=self.task, processor=self.processor)
            trajectory = self.start(row)
            await self.assistant_turn(trajectory, sampling_params)
            return trajectory.output()

    row = {"agent_name": "parrot", "colour": "green"}
    output, engine = play("hello", row=row, sampling={"temperature": 2.0})
    assert_response(output, engine, "hello" + END)
    assert seen == {
        "prompt": PROMPT, "agent_name": "parrot", "colour": "green", "step": 3, "index": 0, "rollout_n": 1,
        "validate": False, "sampling": {"temperature": 2.0}, "task": CALCULATOR, "processor": None,
    }  # fmt: skip


def test_the_outputs_of_a_trajectory(play, tokenizer, monkeypatch):

    class Returns(AgentLoopBase):
        async def run(self, sampling_params, **row):
            trajectory = self.start(row)
            trajectory.extra["mood"] = "good"
            await self.assistant_turn(trajectory, sampling_params)
            trajectory.record("tool", "notes", 0.5, None)
            if row["forks"]:
                prompt = encode(tokenizer, "rewritten")
                trajectory.fork(prompt, prompt)
                await self.assistant_turn(trajectory, sampling_params)
            return trajectory

    monkeypatch.setitem(AGENT_LOOPS, "returns", Returns)
    trajectory, engine = play("hello", row={"agent_name": "returns", "forks": False})
    (output,) = trajectory.outputs()
    assert_response(output, engine, "hello" + END)
    assert type(output) is AgentLoopOutput and output == trajectory.output()
    assert (output.num_turns, output.extra, output.turn_rewards) == (2, {"mood": "good"}, [(5, 0.5)])

    trajectory, engine = play("hello", "again", row={"agent_name": "returns", "forks": True})
    first, second = trajectory.outputs()
    assert tokenizer.decode(first.response_ids) == "hello" + END and first.turn_rewards == [(5, 0.5)]
    assert tokenizer.decode(second.prompt_ids + second.response_ids) == "rewrittenagain" + END
    assert (first.metrics, second.metrics, second.turn_rewards) == ({}, {"forks": 1}, [])


def test_a_deadline_that_is_over_is_not_its_callers():
    async def scenario():
        async with asyncio.timeout(HANGS) as mine:
            agent_loop.DEADLINE.set(mine)
            await agent_loop.in_time("start", HANGS, asyncio.sleep(0))
            assert agent_loop.DEADLINE.get() is mine

    asyncio.run(scenario())


def test_reasoning_of_a_message_without_content_is_rendered():
    chat = agent_loop._inline_reasoning({"role": "assistant", "reasoning_content": "hm", "tool_calls": []})
    assert chat["content"] == "<think>hm</think>"


# ---------------------------------------------------------------------------------------------------------------------
# in_thread


def test_in_thread_returns_what_the_function_returns():
    def describe(a, b=0):
        return a, b, threading.current_thread().daemon, threading.current_thread() is threading.main_thread()

    assert asyncio.run(in_thread(describe, 1, b=2)) == (1, 2, True, False)


@pytest.mark.parametrize("raised, arrives, said", [
    (ValueError("wrong"), ValueError, "wrong"),
    (StopIteration("over"), RuntimeError, r"StopIteration\('over'\)"),  # asyncio refuses to carry it
    (SystemExit(3), RuntimeError, r"SystemExit\(3\)"),  # would end the event loop
    (KeyboardInterrupt(), RuntimeError, "KeyboardInterrupt"),
    (asyncio.CancelledError(), RuntimeError, "CancelledError"),  # nobody cancelled us
])  # fmt: skip
def test_in_thread_brings_exceptions_back(raised, arrives, said):
    def fail():
        raise raised

    with pytest.raises(arrives, match=said):
        asyncio.run(asyncio.wait_for(in_thread(fail), HANGS))


def test_in_thread_blocks_neither_the_loop_nor_each_other():
    both, ticked = threading.Barrier(2), threading.Event()

    async def scenario():
        waiting = asyncio.gather(*(in_thread(wait, HANGS) for wait in (both.wait, both.wait, ticked.wait)))
        for _ in range(5):
            await asyncio.sleep(0)
        ticked.set()
        return await waiting  # a BrokenBarrierError if they ran one after the other

    *places, in_time = asyncio.run(scenario())
    assert sorted(places) == [0, 1] and in_time


@pytest.mark.parametrize("loop_is_gone", [False, True])
def test_in_thread_can_be_cancelled_and_its_late_result_harms_nobody(monkeypatch, loop_is_gone):
    release, complaints, threads = threading.Event(), [], []
    monkeypatch.setattr(threading, "excepthook", complaints.append)

    def work(loop):
        threads.append(threading.current_thread())
        loop.call_soon_threadsafe(time_passes)
        release.wait()
        raise RuntimeError("late, and wrong")

    async def scenario():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(in_thread(work, asyncio.get_running_loop()), HANGS)
        if not loop_is_gone:
            release.set()
            await until_idle()
            assert await in_thread(threading.current_thread) is threads[0]  # it serves the next call

    async def until_idle():
        while not agent_loop._IDLE_THREADS:
            await asyncio.sleep(0.001)

    agent_loop._IDLE_THREADS.clear()
    asyncio.run(asyncio.wait_for(scenario(), 2 * HANGS))
    release.set()
    asyncio.run(asyncio.wait_for(until_idle(), HANGS))
    assert complaints == []


def test_a_thread_serves_again_when_its_function_has_returned():
    agent_loop._IDLE_THREADS.clear()
    released, barrier = threading.Event(), threading.Barrier(4)

    def meet():
        barrier.wait(HANGS)
        return threading.get_ident()

    async def scenario():
        hung = asyncio.ensure_future(in_thread(released.wait))  # has a thread of its own, and nobody waits for it
        await asyncio.sleep(0)  # it has started
        one = [await in_thread(threading.get_ident) for _ in range(5)]
        four = await asyncio.gather(*(in_thread(meet) for _ in range(4)))
        assert not hung.done()
        released.set()
        return one, four, await hung

    one, four, _ = asyncio.run(scenario())
    assert len(set(one)) == 1 and len(set(four)) == 4 and one[0] in four
    assert len(agent_loop._IDLE_THREADS) >= 4


def test_a_forked_child_starts_threads_of_its_own():
    program = """if True:
        import asyncio, os
        from agent_loop import in_thread
        asyncio.run(in_thread(int))
        if os.fork() == 0:
            os._exit(asyncio.run(asyncio.wait_for(in_thread(lambda: 7), 20)))
        print(os.waitstatus_to_exitcode(os.wait()[1]))"""
    printed = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True)
    assert printed.stdout == "7\n", printed.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Whatever the model says


TURNS = [
    SUM,
    call(expression="1/0"),
    call("nobody"),
    SUM + SUM,
    "<tool_call>\nbroken\n</tool_call>",
    "<tool_call>",
    ANSWER,
    "",
    "\n",
    "é€😀",
    "<|im_start|>user\n",
    "</tool_response>",
]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_script_gives_aligned_lists(play, tokenizer, data):
    ids = st.integers(0, len(tokenizer) - 1).filter(lambda token: token != tokenizer.eos_token_id)
    text = st.lists(st.sampled_from(TURNS), max_size=3).map("".join).map(lambda text: encode(tokenizer, text))
    words = st.one_of(text, text, st.lists(ids, max_size=12))
    # An engine stops at a stop token or elsewhere, at a limit, or because somebody aborts it.
    ends = st.sampled_from([([tokenizer.eos_token_id], "stop")] * 4 + [([], "stop"), ([], "length"), ([], "abort")])
    line = st.tuples(words, ends).map(lambda pair: (pair[0] + pair[1][0], pair[1][1]))
    lines = data.draw(st.lists(line, min_size=5, max_size=5))
    answers = [(False, "Sure?", 0.5, {})] * 3 + [(True, "", 1.0, {})] * 2
    task = data.draw(st.sampled_from([CALCULATOR, None]))
    task = task or quiz_task(Quiz(*answers), calculator.calculator)
    limits = data.draw(st.fixed_dictionaries({
        "max_response_tokens": st.integers(1, 150),
        "max_model_len": st.one_of(st.none(), st.integers(1, 150)),
        "max_assistant_turns": st.integers(1, 5),
        "max_user_turns": st.integers(0, 3),
        "max_tool_response_tokens": st.integers(1, 40),
    }))  # fmt: skip
    output, engine = play(*lines, task=task, **limits)

    size = len(output.response_ids)
    assert size == len(output.response_mask) == len(output.response_logprobs) == len(output.response_versions)
    for mask, logprob, version in zip(output.response_mask, output.response_logprobs, output.response_versions):
        assert (logprob < 0 and version > 0) if mask else (logprob, version) == (0.0, -1)
    # Each turn: the engine saw prompt + everything before it, within the limits, and what it said follows verbatim.
    assert size <= limits["max_response_tokens"]
    if size:
        assert len(output.prompt_ids) + size <= (limits["max_model_len"] or 10**9)
    sampled = [(at, v) for at, v in enumerate(output.response_versions) if v > 0]
    for n, (prompt, params, (said, _)) in enumerate(zip(engine.prompts, engine.params, lines), start=1):
        said = said[: params["max_tokens"]]
        before = len(prompt) - len(output.prompt_ids)
        assert prompt == output.prompt_ids + output.response_ids[:before]
        assert output.response_ids[before : before + len(said)] == said
        assert [at for at, v in sampled if v == n] == list(range(before, before + len(said)))
    # No given token follows the last turn: a suffix is there to be answered.
    assert not output.response_mask or output.response_mask[-1] == 1 or not lines[len(engine.prompts) - 1][0]
    roles = [message["role"] for message in output.messages]
    assert roles.count("assistant") == len(engine.prompts) <= limits["max_assistant_turns"]
    given = sum(1 for a, b in zip(roles, roles[1:]) if a == "assistant")
    assert output.num_turns == roles.count("assistant") + given + 1
    assert all(0 <= at < size for at, _ in output.turn_rewards) or not size
