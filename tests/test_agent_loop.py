"""Agent loops against a scripted engine: exact ids, masks, logprobs, versions, rewards, counters.

`play("the first turn", "the second", ...)` runs a loop. `assert_response` rebuilds the response
lists from literal texts, and checks what the engine was asked at each turn: a token that is
dropped, doubled, shifted or tokenised again shows."""

import asyncio
import copy
import json
import math
import re
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import HANGS, output_of, too_late

import agent_loop
from agent_loop import AgentLoopOutput, CompactingLoop, LoopArgs, TokenOutput, ToolResponse
from examples import calculator
from flatrl.processes import Background

END = "<|im_end|>"
ASSISTANT = "<|im_start|>assistant\n"
PROMPT = [{"role": "user", "content": "What is 1+1?"}]
ASKED = f"<|im_start|>user\nWhat is 1+1?{END}\n{ASSISTANT}"
FIRST_WITH_TOOLS = f"<|im_start|>system\nTools: calculator{END}\n{ASKED}"  # 17 tokens


def tool_turn(*contents: str) -> str:
    """From the assistant's end-of-turn token to where it speaks again.

    The template puts the first newline after that token; it is not sampled, and easily lost."""
    responses = [f"\n<tool_response>\n{content}\n</tool_response>" for content in contents]
    return f"\n<|im_start|>user{''.join(responses)}{END}\n{ASSISTANT}"


def user_turn(text: str) -> str:
    return f"\n<|im_start|>user\n{text}{END}\n{ASSISTANT}"


def call(name: str = "calculator", /, **arguments) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def user(content) -> dict:
    return {"role": "user", "content": content}


SUM = call(expression="1+1")
TWO_NOTES = call("notes", text="a") + "\n" + call("notes", text="b")
ANSWER = "<answer>2</answer>"
SURE_TURN = user_turn("Sure?")


def called(*calls: tuple[str, dict]) -> list[dict]:
    """The tool_calls of the first message of an assistant."""
    made = []
    for i, (name, arguments) in enumerate(calls):
        function = {"name": name, "arguments": arguments}
        made.append({"type": "function", "id": f"000001{i:03d}", "function": function})
    return made


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def said_by(output, role: str) -> list[str]:
    return [message["content"] for message in output.messages if message["role"] == role]


# ---------------------------------------------------------------- the scripted engine


BACKGROUND = Background()
NEVER = object()  # a line that the engine does not finish


@dataclass
class Script:
    """An engine that says its lines: one at a time, in the order of asking.

    A line is a text, which gets an end-of-turn token and stop reason "stop", or a pair (text or
    ids, stop reason). Token k of call n has logprob -(n + k/1000) and version n, so that no
    entry can stand in for another."""

    tokenizer: object
    lines: tuple
    prompts: list[list[int]] = field(default_factory=list)
    params: list[dict] = field(default_factory=list)
    request_ids: set[str] = field(default_factory=set)
    images: list = field(default_factory=list)
    said: dict[int, TokenOutput] = field(default_factory=dict)  # by the number of the call
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def generate(self, **request):
        async with self.turn:
            n = len(self.prompts) + 1
            self.said[n] = await self.speak(n, **request)
            return self.said[n]

    async def speak(self, n, request_id, prompt_ids, sampling_params, image_data=None):
        assert n <= len(self.lines), "the script has fewer turns than the loop"
        line = self.lines[n - 1]
        self.prompts.append(list(prompt_ids))
        self.params.append(dict(sampling_params))
        self.request_ids.add(request_id)
        self.images.append(image_data)
        await asyncio.sleep(0)
        if line is NEVER:
            await too_late()
        if isinstance(line, Exception):
            raise line
        words, reason = (line + END, "stop") if isinstance(line, str) else line
        ids = encode(self.tokenizer, words) if isinstance(words, str) else list(words)
        limit = sampling_params["max_tokens"]
        if len(ids) > limit:
            ids, reason = ids[:limit], "length"
        logprobs = [-(n + k / 1000) for k in range(len(ids))]
        return TokenOutput(ids, logprobs, [n] * len(ids), reason, list(prompt_ids))


def assert_output(output: AgentLoopOutput, engine: Script, *parts) -> None:
    """The response is exactly these parts, and the engine saw what precedes each sampled one.

    A part is (n, text) if it was sampled in the engine's n-th call, and a plain text if given."""
    ids = []
    versions = []
    for part in parts:
        n, text = part if isinstance(part, tuple) else (-1, part)
        tokens = encode(engine.tokenizer, text)
        ids += tokens
        versions += [n] * len(tokens)
    assert output.response_ids == ids
    assert output.response_versions == versions
    assert_exact([output], {n: engine.said[n] for n in versions if n > 0})


def assert_response(output: AgentLoopOutput, engine: Script, *parts: str) -> None:
    """The response is exactly these texts: sampled, given, sampled, ..."""
    numbered = list(parts)
    numbered[::2] = enumerate(parts[::2], 1)
    assert_output(output, engine, *numbered)
    assert len(engine.prompts) == len(parts[::2])


def assert_exact(outputs: list[AgentLoopOutput], said: dict[int, TokenOutput]):
    """Every sampled token is in exactly one output, behind what the engine saw when sampling.

    said: what the engine said in each call, whose number is the version of its tokens."""
    found = []
    for output in outputs:
        versions = output.response_versions
        assert output.response_mask == [int(version > 0) for version in versions]
        given = zip(output.response_logprobs, versions)
        assert all(logprob == 0.0 for logprob, version in given if version < 0)
        for n in {version for version in versions if version > 0}:
            found.append(n)
            start = versions.index(n)
            end = start + versions.count(n)
            assert versions[start:end] == said[n].versions
            assert output.response_ids[start:end] == said[n].token_ids
            assert output.response_logprobs[start:end] == said[n].logprobs
            assert output.prompt_ids + output.response_ids[:start] == said[n].prompt_ids
    assert sorted(found) == sorted(said)


def task_of(*tools, interactions=()) -> SimpleNamespace:
    return SimpleNamespace(TOOLS=list(tools), INTERACTIONS=list(interactions))


CALCULATOR = task_of(calculator.calculator)
ROW = {"prompt": PROMPT, "step": 3, "index": 0, "rollout_n": 1, "validate": False}


def rollout(tokenizer, *lines, task=CALCULATOR, row=None, sampling=None, **args):
    """Returns the outputs of a rollout, in which the engine says these lines, and the engine."""
    args = LoopArgs(**{"max_response_tokens": 1000, "tool_timeout": 4 * HANGS} | args)
    row = ROW | (row or {})
    engine = Script(tokenizer, lines)
    loop = agent_loop.agent_loop_class(row, task, args)(engine, tokenizer, None, task, args)
    outputs = BACKGROUND.submit(loop.run(sampling or {}, **row)).result(HANGS)
    return (outputs if isinstance(outputs, list) else [outputs]), engine


@pytest.fixture(scope="module")
def play(tokenizer):
    """play(line, line, ..., task=, row=, sampling=, **args) -> (the only output, the engine)."""

    def play(*lines, **how) -> tuple[AgentLoopOutput, Script]:
        (output,), engine = rollout(tokenizer, *lines, **how)
        return output, engine

    return play


class Records:
    """Writes down what is done with it, and for which rollouts; then spoils what it was given."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.log: list[tuple] = []
        self.request_ids: set[str] = set()

    def note(self, request_id: str, *event) -> None:
        self.log.append(copy.deepcopy(event))
        self.request_ids.add(request_id)

    def next_answer(self):
        answer = self.answers.pop(0) if self.answers else "noted"
        if isinstance(answer, BaseException):
            raise answer
        return answer

    @property
    def events(self) -> list[str]:
        return [event[0] for event in self.log]


class Notes(Records, agent_loop.Tool):
    """A tool whose calls give `answers`, or raise them."""

    def __init__(self, *answers, name: str = "notes", calc_reward: float = 0.0):
        super().__init__(*answers)
        self.name = name
        self.final = calc_reward
        function = {"name": name, "parameters": {"type": "object"}}
        self.schema = {"type": "function", "function": function}

    async def create(self, request_id, **kwargs):
        for _ in range(10):  # calls have to wait for it
            await asyncio.sleep(0)
        self.note(request_id, "create", kwargs)

    async def execute(self, request_id, arguments, **kwargs):
        self.note(request_id, "execute", arguments, kwargs)
        arguments.clear()
        answer = self.next_answer()
        if answer is NEVER:
            await too_late()
        return answer

    async def calc_reward(self, request_id, **kwargs):
        self.note(request_id, "calc_reward", kwargs)
        return self.final

    async def release(self, request_id, **kwargs):
        self.note(request_id, "release", kwargs)


class Quiz(Records, agent_loop.Interaction):
    """A user who answers (done, text, reward, metrics)."""

    name = "quiz"
    opening = None

    async def start(self, request_id, **kwargs):
        self.note(request_id, "start", kwargs)
        return self.opening

    async def generate_response(self, request_id, messages, **kwargs):
        self.note(request_id, "generate_response", messages, kwargs)
        messages.clear()
        return self.next_answer()

    async def finalize(self, request_id):
        self.note(request_id, "finalize")


def quiz_task(quiz: Quiz, *tools) -> SimpleNamespace:
    return task_of(*tools, interactions=[quiz])


def quiz_row(**kwargs) -> dict:
    return {"extra_info": {"interaction_kwargs": {"name": "quiz", **kwargs}}}


def with_template(tokenizer, template: str):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def test_sampled_tokens_are_never_tokenised_again(play, tokenizer):
    """The policy may spell a text in other tokens than the tokenizer would."""
    spelled = [token for letter in SUM for token in encode(tokenizer, letter)]
    spelled.append(tokenizer.eos_token_id)
    assert len(spelled) > len(encode(tokenizer, SUM + END))
    assert tokenizer.decode(spelled) == SUM + END
    output, engine = play((spelled, "stop"), ANSWER)
    given = encode(tokenizer, tool_turn("2"))
    assert engine.prompts[1] == output.prompt_ids + spelled + given
    assert output.response_ids == spelled + given + encode(tokenizer, ANSWER + END)
    assert said_by(output, "tool") == ["2"]


def test_parallel_calls_run_together_and_answer_in_order(play):
    here = threading.Barrier(2)

    class Meets(Notes):
        def execute(self, request_id, arguments):  # not async, so in a thread
            here.wait(HANGS)  # one after the other would break it
            return f"{arguments['text']} was here"

    output, engine = play(TWO_NOTES, "ok", task=task_of(Meets()))
    said = tool_turn("a was here", "b was here")
    assert_response(output, engine, TWO_NOTES + END, said, "ok" + END)


# The model may make up a name, and its arguments may be wrong: no tool raised then.
WRONG = {"tool_calls": 1, "tool_errors": 1, "tool_calls/calculator": 0, "tool_calls/notes": 0}
NO_ARGUMENT = WRONG | {"tool_calls/calculator": 1, "tool_errors/calculator": 1}
RAISED = WRONG | {f"{kind}/notes": 1 for kind in ("tool_calls", "tool_errors", "tool_exceptions")}
LATE = {"tool_calls": 1, "tool_timeouts": 1, "tool_calls/calculator": 0}
LATE |= {"tool_calls/notes": 1, "tool_timeouts/notes": 1}
# name: (what the model says, what the tool "notes" answers, what the model reads, metrics)
ERRORS = {
    "unknown tool": (call("subtract", a=1), None, r"subtract.*calculator", WRONG),
    "a missing argument": (call(), None, "missing a required argument: 'expression'", NO_ARGUMENT),
    "raises": (call("notes"), OSError("the disk is full"), "the disk is full", RAISED),
    "cancels itself": (call("notes"), asyncio.CancelledError("by itself"), "by itself", RAISED),
    "a bad reward": (call("notes"), ("fine", math.nan, {}), "tool 'notes' .* got nan", RAISED),
    "late": (call("notes"), NEVER, f"notes took longer than {HANGS} seconds", LATE),
}


@pytest.mark.parametrize("turn, answer, said, metrics", ERRORS.values(), ids=ERRORS)
def test_a_failed_call_is_a_message_and_a_counter(play, turn, answer, said, metrics):
    task = task_of(calculator.calculator, Notes(answer))
    output, engine = play(turn, "sorry", task=task, tool_timeout=HANGS)
    (content,) = said_by(output, "tool")
    assert re.search(f"^Error: .*{said}", content, re.DOTALL)
    assert_response(output, engine, turn + END, tool_turn(content), "sorry" + END)
    assert output.metrics.pop("tool_s") >= 0
    assert output.metrics == metrics
    assert output.stop_reason == "stop"
    assert output.turn_rewards == []


@pytest.mark.parametrize("text, limit, side, said", [
    ("0123456789", 10, "middle", "0123456789"),  # fits
    ("0123456789" * 2, 9, "middle", "01234...6789"),  # the odd token goes to the front
    ("0123456789" * 2, 10, "left", "0123456789..."),
    ("0123456789" * 2, 10, "right", "...0123456789"),
])  # fmt: skip
def test_a_long_tool_response_is_cut(play, text, limit, side, said):
    notes = Notes(text)
    flags = dict(max_tool_response_tokens=limit, tool_response_truncate_side=side)
    output, engine = play(call("notes"), "ok", task=task_of(notes), **flags)
    assert_response(output, engine, call("notes") + END, tool_turn(said), "ok" + END)
    assert output.metrics.get("tool_responses_cut", 0) == (said != text)


SUMS = "\n".join(call(expression=f"{n}+{n}") for n in (1, 2, 3))
LEFT_OUT = "Error: 1 more calls were not executed: the limit is 2 a turn"
SURE_ANSWER = (np.False_, "Sure?", 0.25, {})
# name: (lines, flags, the texts of the response, the stop reason, what the user says, if any)
ROLLOUTS = {
    "the turn's limit": (["12345"], {"sampling": {"max_tokens": 3}}, ["123"], "length", None),
    "the window": (["12345"], {"max_model_len": 17 + 3}, ["123"], "length", None),
    "no room at all": ([], {"max_model_len": 17}, [], "length", None),
    "room for one more token": (
        [SUM, ANSWER], {"max_response_tokens": 17},
        [SUM + END, tool_turn("2"), ANSWER[:8]], "length", None,
    ),
    "an aborted turn": ([(SUM, "abort")], {}, [SUM], "abort", None),
    "a stop string": (
        [(SUM, "stop"), ANSWER], {"sampling": {"stop": ["</tool_call>"]}},
        [SUM, END + tool_turn("2"), ANSWER + END], "stop", None,
    ),
    "calls beyond the limit": (
        [SUMS, "ok"], {"max_parallel_calls": 2},
        [SUMS + END, tool_turn("2", "4\n" + LEFT_OUT), "ok" + END], "stop", None,
    ),
    "two assistant turns": (
        [SUM, SUM], {"max_assistant_turns": 2},
        [SUM + END, tool_turn("2"), SUM + END], "max_turns", None,
    ),
    "one user turn": (  # the last assistant turn is still judged
        ["3", "4"], {"max_user_turns": 1},
        ["3" + END, SURE_TURN, "4" + END], "max_turns", [SURE_ANSWER, SURE_ANSWER],
    ),
    "a user's words that are too long": (
        ["3"], {"max_model_len": 60},
        ["3" + END], "length", [(False, "Sure? " * 100, 1, {})],
    ),
}  # fmt: skip


@pytest.mark.parametrize("lines, flags, parts, reason, answers", ROLLOUTS.values(), ids=ROLLOUTS)
def test_a_rollout(play, lines, flags, parts, reason, answers):
    quiz = Quiz(*answers or ())
    if answers:
        flags = dict(task=quiz_task(quiz, calculator.calculator), row=quiz_row(), **flags)
    output, engine = play(*lines, **flags)
    assert_response(output, engine, *parts)
    assert (output.stop_reason, output.num_turns) == (reason, len(parts) + 1)
    assert output.truncated == (reason in ("length", "max_turns"))
    n_calls = sum(turn.count("<tool_response>") for turn in parts)
    assert output.metrics["tool_calls"] == n_calls  # also 0
    assert output.metrics.get("tool_errors", 0) == "".join(parts).count(LEFT_OUT)
    assert [reward for _, reward in output.turn_rewards] == [a[2] for a in answers or ()]


def test_a_late_rollout_keeps_and_grades_what_it_has(play):
    notes = Notes(NEVER)
    task = task_of(calculator.calculator, notes)
    output, engine = play(SUM, call("notes"), task=task, trajectory_timeout=HANGS)
    assert_response(output, engine, SUM + END, tool_turn("2"), call("notes") + END)
    assert output.stop_reason == "timeout" and not output.truncated
    assert notes.events == ["create", "execute", "calc_reward", "release"]


BOTH = ToolResponse("both", reward=0.5, metrics={"a": 1})


def test_a_tool_is_created_once_executed_often_rewarded_once_and_released(play):
    methods = ("create", "execute", "calc_reward", "release")
    kwargs = {f"{method}_kwargs": {method: 1} for method in methods}
    answers = ("one", 0.25, {"rows": 2}), (BOTH, -1, {"b": 2}), BOTH
    notes, other = Notes(*answers, calc_reward=0.75), Notes(name="other")
    tools = notes, other, Notes(name="not of this row")
    row = {"extra_info": {"tools_kwargs": {"notes": kwargs, "other": {}}}}
    third = call("notes", text="c")
    output, engine = play(TWO_NOTES, third, "bye", task=task_of(*tools), row=row)
    prompt = engine.tokenizer.decode(output.prompt_ids)
    assert prompt.startswith(f"<|im_start|>system\nTools: notes, other{END}")
    executed = [("execute", {"text": text}, {"execute": 1}) for text in "abc"]
    ended = [("calc_reward", {"calc_reward": 1}), ("release", {"release": 1})]
    assert notes.log == [("create", {"create": 1}), *executed, *ended]
    assert notes.request_ids == engine.request_ids and len(engine.request_ids) == 1
    assert other.log == []  # a tool that is not called is left alone
    parts = [TWO_NOTES + END, tool_turn("one", "both"), third + END, tool_turn("both"), "bye" + END]
    assert_response(output, engine, *parts)
    # At the last tokens of the turns that made the calls, and of the response.
    first, second, last = [
        len(encode(engine.tokenizer, "".join(parts[:n]))) - 1 for n in (1, 3, 5)
    ]
    expected = [(first, 0.25), (first, -1.0), (second, 0.5), (last, 0.75)]
    assert output.turn_rewards == expected
    assert output.metrics.pop("tool_s") > 0
    assert output.metrics == {
        "tool_calls": 3,
        "tool_calls/notes": 3,
        "tool_calls/other": 0,
        "tool/notes/rows": 2,
        "tool/notes/a": 2,
        "tool/notes/b": 2,
        "tool_reward/notes": 0.5,
    }
    calls = ("notes", {"text": "a"}), ("notes", {"text": "b"})
    assert output.messages[1]["tool_calls"] == called(*calls)  # the tool has copies
    answered = [m["tool_call_id"] for m in output.messages if m["role"] == "tool"]
    assert answered == ["000001000", "000001001", "000002000"]


def test_a_tool_that_could_not_be_created_is_not_used_but_released(play):
    class Fails(Notes):
        async def create(self, request_id, **kwargs):
            await super().create(request_id, **kwargs)
            raise OSError("no space left")

        async def release(self, request_id):
            await super().release(request_id)
            raise OSError("gone already")

    notes = Fails()
    output, _ = play(TWO_NOTES, "bye", task=task_of(notes))
    assert notes.events == ["create", "release"]
    assert said_by(output, "tool") == ["Error: no space left"] * 2
    assert (output.metrics["tool_errors"], output.metrics["release_errors"]) == (2, 1)


def test_a_user_opens_the_conversation_answers_and_pays_until_it_is_done(play, tokenizer):
    system = {"role": "system", "content": "Be brief."}
    quiz = Quiz((False, "Sure?", -0.5, {"asked": 1}), (True, "Good.", 1.0, {"asked": 1}))
    quiz.opening = "Hello!"
    row = {"prompt": [system]} | quiz_row(truth="2")
    output, engine = play("3", "2", task=quiz_task(quiz), row=row)

    assert output.prompt_ids == agent_loop.render(tokenizer, [system, user("Hello!")])
    assert_response(output, engine, "3" + END, SURE_TURN, "2" + END)
    assert output.messages == [
        system,
        user("Hello!"),
        {"role": "assistant", "content": "3"},
        user("Sure?"),
        {"role": "assistant", "content": "2"},
    ]
    assert quiz.log == [
        ("start", {"truth": "2"}),
        ("generate_response", output.messages[:3], {"truth": "2"}),
        ("generate_response", output.messages[:5], {"truth": "2"}),
        ("finalize",),
    ]
    assert quiz.request_ids == engine.request_ids
    first = len(encode(tokenizer, "3" + END))
    assert output.turn_rewards == [(first - 1, -0.5), (len(output.response_ids) - 1, 1.0)]
    assert output.metrics == {"interaction/quiz/asked": 2, "interaction_reward/quiz": 0.5}


@pytest.mark.parametrize("changes", [
    {"response_logprobs": [1]}, {"mask": [1, 2]}, {"prompt": []}, {"stop_reason": "tired"},
])  # fmt: skip
def test_an_output_that_makes_no_sense_is_refused(changes):
    with pytest.raises(ValueError, match="response|prompt_ids|tired"):
        output_of(**{"mask": [1, 0]} | changes)


def test_what_a_loop_sets_after_the_last_word_goes_to_the_output_that_has_it():
    trajectory = agent_loop.Trajectory(list(PROMPT), [1, 2], [1, 2], [])
    trajectory.add_sampled(TokenOutput([3], [-1.0], [0], "stop", [1, 2]))
    trajectory.messages.append({"role": "assistant", "content": "2"})
    trajectory.reward, trajectory.stop_reason = 0.2, "length"  # the turn is cut, and goes on
    trajectory.fork([1, 2, 4], [1, 2, 4])  # the template has rewritten the answer
    trajectory.messages.append({"role": "user", "content": "Sure?"})
    trajectory.reward, trajectory.unit, trajectory.group = 0.7, "white", "first"
    trajectory.extra["told"] = 1
    trajectory.record("interaction", "quiz", 0.25, {})
    [output] = trajectory.outputs()
    assert (output.reward, output.unit, output.group) == (0.7, "white", "first")
    assert (output.response_ids, output.extra) == ([3], {"told": 1})
    assert (output.stop_reason, output.turn_rewards) == ("length", [(0, 0.25)])
    assert output.metrics == {"forks": 1, "interaction_reward/quiz": 0.25}
    assert output.messages[-1]["content"] == "2"

    trajectory.add_sampled(TokenOutput([5], [-1.0], [0], "stop", [1, 2, 4]))
    outputs = trajectory.outputs()
    assert [output.reward for output in outputs] == [None, 0.7]
    assert [(output.unit, output.group) for output in outputs] == [("white", "first")] * 2
    assert [output.truncated for output in outputs] == [False, True]


# ---------------------------------------------------------------- compaction

CALLED = SUM + END + tool_turn("2")  # 16 tokens
ASKED_NOTES = SUM + END + tool_turn("2\n\nNotes?")


def continued(notes: str) -> str:
    """The prompt of a sequence that begins with notes."""
    return FIRST_WITH_TOOLS + notes + END + user_turn("Go.")


# name: (lines, flags, the texts of the outputs)
COMPACTIONS = {
    "twice": (
        [SUM, "It is 2.", SUM, "Two.", ANSWER], {"compact_at": 24},
        [FIRST_WITH_TOOLS + ASKED_NOTES + "It is 2." + END,
         continued("It is 2.") + ASKED_NOTES + "Two." + END,
         continued("Two.") + ANSWER + END],
    ),
    "at three quarters of the window": (
        [SUM] * 6 + ["It is 2.", ANSWER], {"max_model_len": 132},
        [FIRST_WITH_TOOLS + CALLED * 5 + ASKED_NOTES + "It is 2." + END,
         continued("It is 2.") + ANSWER + END],
    ),
    "not before the last turn": (
        [SUM, ANSWER], {"compact_at": 24, "max_assistant_turns": 2},
        [FIRST_WITH_TOOLS + CALLED + ANSWER + END],
    ),
}  # fmt: skip


@pytest.mark.parametrize("lines, flags, texts", COMPACTIONS.values(), ids=COMPACTIONS)
def test_a_rollout_continues_from_a_summary(tokenizer, monkeypatch, lines, flags, texts):
    monkeypatch.setattr(CompactingLoop, "SUMMARISE", "Notes?")
    monkeypatch.setattr(CompactingLoop, "CONTINUE", "Go.")
    outputs, engine = rollout(tokenizer, *lines, agent="compacting", **flags)
    assert [tokenizer.decode(each.prompt_ids + each.response_ids) for each in outputs] == texts
    assert_exact(outputs, engine.said)
    assert all(output.response_mask[0] and output.unit == "" for output in outputs)
    assert (outputs[-1].stop_reason, outputs[-1].metrics["compactions"]) == ("stop", len(texts) - 1)
