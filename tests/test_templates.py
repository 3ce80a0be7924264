"""Conversations under the chat templates of fifteen models (tests/chat_templates.py).

A rollout is what the whole chat is when it is rendered at once; or it forks, where a template
rewrites the history; or the template is refused before the run.
"""

import asyncio
import copy
import random
import re
from types import SimpleNamespace

import chat_templates
import pytest
from chat_templates import FAMILIES
from conftest import HANGS, too_late
from test_agent_loop import (
    ANSWER,
    CALCULATOR,
    PROMPT,
    Quiz,
    Script,
    call,
    called,
    encode,
    loop_of,
    quiz_row,
    quiz_task,
)

from agent_loop import (
    ASKS,
    ROUNDS,
    BadInput,
    Conversation,
    Demonstration,
    LoopArgs,
    SingleTurnLoop,
    _dry_chat,
    as_tool,
    conversation,
    render,
    turn_suffix,
)
from examples import calculator
from flatrl.rows import check_tokenizer

ONE_ANSWER = (True, "", 0.5, {})
AGAIN = (False, "And again?", 0.25, {})


# How often `test_tool_turns_and_user_turns` forks. Mistral's template wants users and assistants to
# take turns: the answer to a call after a thought is a user's.
FORKS = {"qwen3": 1, "llama3.1": 0, "mistral0.3": 2, "gpt-oss": 1, "glm4": 1}


@pytest.fixture(params=list(FORKS))
def family(request, tokenizer):
    """Returns a tokenizer, the tokens that end a call and an answer, and the number of forks."""
    of = FAMILIES[request.param]
    other = chat_templates.tokenizer_for(request.param, tokenizer)
    return other, of.call_end, of.answer_end, FORKS[request.param]


def with_template(tokenizer, template: str):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


@pytest.fixture
def qwen3(tokenizer):
    return chat_templates.tokenizer_for("qwen3", tokenizer)


def as_list(outputs) -> list:
    return outputs if isinstance(outputs, list) else [outputs]


def play(tokenizer, task, row, stop_ids, *lines, **flags):
    """Runs a rollout; returns its outputs and the scripted engine."""
    engine = Script(tokenizer, lines)
    flags = {"tool_timeout": HANGS} | flags
    run = loop_of(engine, task, row, {"stop_token_ids": stop_ids}, **flags)
    return as_list(asyncio.run(run)), engine


def sampled_turns(output) -> list[tuple[list[int], list[int]]]:
    """Returns for each sampled turn the tokens before it, and its own."""
    turns = []
    ids = list(output.prompt_ids)
    was_sampled = 0
    for token, is_sampled in zip(output.response_ids, output.response_mask):
        if is_sampled and not was_sampled:
            turns.append((list(ids), []))
        if is_sampled:
            turns[-1][1].append(token)
        ids.append(token)
        was_sampled = is_sampled
    return turns


# ---------------------------------------------------------------- the whole chat at once

WITHOUT_TOOLS = ("llama2", "mistral0.1", "gemma2", "gemma3", "phi3")


def talk_of(name, tokenizer) -> Conversation:
    other = chat_templates.tokenizer_for(name, tokenizer)
    return conversation(other, chat_templates.stop_ids(name, other))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAMILIES)
def test_a_rollout_has_the_ids_of_the_whole_chat(name, seed, tokenizer):
    """The policy says each turn as the template writes it. Empty blocks of thought may stay."""
    talk = talk_of(name, tokenizer)
    loop = SingleTurnLoop(None, talk.tokenizer, None, None, LoopArgs(max_response_tokens=10**6))
    player = Demonstration([], loop, talk.stops)
    names = [each for each in ROUNDS if talk.takes(each)]
    if name in ("qwen3", "glm4"):
        names.append("reasoning")  # which they drop with the next question
    rounds = [ROUNDS[each] for each in names]
    random_numbers = random.Random(seed)
    chat, _ = _dry_chat([ASKS, *sum(random_numbers.choices(rounds, k=8), ())])
    trajectory = loop.start({"prompt": chat[:1]})
    n_appended = 0
    n = 1
    while n < len(chat):
        ids = player.turn_ids(chat[n])
        if talk.tokenizer.decode(trajectory.engine_ids).endswith("<think>\n"):
            ids = encode(talk.tokenizer, "</think>") + ids
        trajectory.add_given(ids)
        trajectory.stop = ids[-1]
        trajectory.messages.append(chat[n])
        n += 1
        new = []
        while n < len(chat) and chat[n]["role"] != "assistant":
            new.append(chat[n])
            n += 1
        assert loop.append(trajectory, new, None, talk.stops)
        n_appended += "forks" not in trajectory.metrics
        ids = [talk.tokenizer.decode(trajectory.engine_ids), talk.text(chat[:n], None, True)]
        fed, whole = (re.sub(r"<think>\s*</think>(\n\n)?", "", text) for text in ids)
        assert fed == whole
    assert n_appended or name in ("gpt-oss", "qwen3", "glm4")


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_dry_conversation_tells(name, tokenizer):
    talk = talk_of(name, tokenizer)
    of = FAMILIES[name]
    assert talk.tokenizer.decode([talk.answer_end]) == of.answer_end
    if talk.call_end is not None:
        assert talk.tokenizer.decode([talk.call_end]) == of.call_end
    assert talk.is_local
    assert talk.writes_date == (name in ("llama3.2", "gpt-oss"))
    task = SimpleNamespace(TOOLS=[calculator.calculator])
    row = {"prompt": PROMPT}
    if name in WITHOUT_TOOLS:
        with pytest.raises(BadInput, match="chat template does not take a tool's answer: it "):
            check_tokenizer(talk.tokenizer, talk.tokenizer, row, task)
    else:
        check_tokenizer(talk.tokenizer, talk.tokenizer, row, task)


def test_tool_turns_and_user_turns(family):
    other, call_end, answer_end, forks = family
    stops = [other.convert_tokens_to_ids(token) for token in {call_end, answer_end}]
    task = quiz_task(Quiz(AGAIN, ONE_ANSWER), calculator.calculator)
    said = [
        "<think>sum</think>\n" + call(expression="1+1") + call_end,
        "<think>easy</think>\n" + ANSWER + answer_end,
        "It is 2" + answer_end,
    ]
    lines = [(words, "stop") for words in said]
    outputs, engine = play(other, task, quiz_row(), stops, *lines)

    # Every sampled token is in exactly one output, verbatim and in order. Each turn continues
    # what the engine saw and said before in its own output.
    turns = [turn for output in outputs for turn in sampled_turns(output)]
    assert [before for before, _ in turns] == engine.prompts
    assert [sampled for _, sampled in turns] == [encode(other, words) for words in said]

    # Between the turns stands what the template puts there.
    whole = render(other, outputs[-1].messages[:-1], [as_tool(calculator.calculator).schema])
    rewards = [[reward for _, reward in output.turn_rewards] for output in outputs]
    if forks:
        *_, first, second = outputs
        assert len(outputs) == 1 + forks
        assert engine.prompts[2] == whole == second.prompt_ids
        assert first.messages == second.messages[: len(first.messages)]
        assert second.metrics["forks"] == forks
        assert first.metrics == {}
        assert rewards[-2:] == [[0.25], [0.5]]
    else:
        start = len(engine.prompts[1]) + len(encode(other, said[1]))
        between = other.decode(engine.prompts[2][start:])
        assert other.decode(whole).endswith(between)
        assert "And again?" in between
        assert rewards == [[0.25, 0.5]]


def test_the_suffix_is_the_templates_text_behind_the_end_of_turn(family):
    """The newline after the end-of-turn token (verl#6501), the next header, and nothing else."""
    other, call_end, _, _ = family
    stop = other.convert_tokens_to_ids(call_end)
    calls = called(("calculator", {"expression": "1+1"}))
    asked = [
        *PROMPT,
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    new = [{"role": "tool", "name": "calculator", "content": "2", "tool_call_id": "000001000"}]
    schemas = [as_tool(calculator.calculator).schema]
    suffix = turn_suffix(other, asked, new, {stop}, ended=True, tools=schemas)
    how = dict(tools=schemas, tokenize=False)
    rendered = other.apply_chat_template(asked + new, add_generation_prompt=True, **how)
    start = rendered.index(call_end, rendered.rindex("1+1")) + len(call_end)
    assert other.decode(suffix) == rendered[start:]
    cut = turn_suffix(other, asked, new, {stop}, ended=False, tools=schemas)
    assert cut == [stop, *suffix]


def test_a_malformed_call_is_answered(family):
    """Mistral's template requires an id of every tool message."""
    other, call_end, answer_end, _ = family
    stops = [other.convert_tokens_to_ids(token) for token in {call_end, answer_end}]
    lines = ("<tool_call>{broken" + call_end, "stop"), (ANSWER + answer_end, "stop")
    outputs, engine = play(other, CALCULATOR, {}, stops, *lines)
    assert "not valid JSON" in other.decode(engine.prompts[1])
    assert outputs[-1].metrics["tool_errors"] == 1
    assert outputs[-1].stop_reason == "stop"


def test_turns_of_a_demonstration_are_written_as_the_template_writes_them(family):
    other, call_end, answer_end, _ = family
    stops = {other.convert_tokens_to_ids(token) for token in (call_end, answer_end)}
    loop = SingleTurnLoop(None, other, None, None, LoopArgs())
    player = Demonstration([], loop, stops)
    calls = called(("calculator", {"expression": "1+1"}))
    before = other.apply_chat_template(PROMPT, tokenize=False, add_generation_prompt=True)
    for said, end in (
        ({"content": "", "tool_calls": calls}, call_end),
        ({"content": "It is 2."}, answer_end),
    ):
        message = {"role": "assistant", **said}
        text = other.apply_chat_template([*PROMPT, message], tokenize=False)
        assert text.startswith(before)
        ids = player.turn_ids(message)
        written = text.removeprefix(before).rstrip("\n").removesuffix(end)
        assert other.decode(ids) == written + end
        assert ids[-1] == other.convert_tokens_to_ids(end)


@pytest.mark.parametrize("room", [0, 1, "budget"])
def test_a_fork_without_room_for_a_reply_ends_the_rollout(qwen3, room):
    question = "And again? " * 30
    history = [*PROMPT, {"role": "assistant", "content": ANSWER}]
    needed = len(render(qwen3, [*history, {"role": "user", "content": question}]))
    words = "<think>long</think>" + ANSWER
    if room == "budget":  # it counts what was sampled before the fork
        flags = {"max_response_tokens": len(encode(qwen3, words + "<|im_end|>"))}
    else:
        flags = {"max_model_len": needed + room}
    task = quiz_task(Quiz((False, question, 0.0, {}), ONE_ANSWER))
    outputs, engine = play(qwen3, task, quiz_row(), [], words, ("x", "stop"), **flags)
    assert len(outputs) == len(engine.prompts) == 1 + (room == 1)
    assert outputs[-1].stop_reason == ("stop" if room == 1 else "length")


def test_a_fork_in_which_nothing_was_sampled_is_left_out(qwen3):
    """Its rewards, metrics and stop reason go to the output before."""

    class Slow(Script):
        async def generate(self, **call):
            if self.prompts:
                await too_late()
            return await super().generate(**call)

    engine = Slow(qwen3, ("<think>long</think>\n" + ANSWER, "late"))
    task = quiz_task(Quiz(AGAIN, ONE_ANSWER))
    run = loop_of(engine, task, quiz_row(), trajectory_timeout=HANGS)
    (output,) = asyncio.run(run)
    assert output.stop_reason == "timeout"
    assert output.metrics["forks"] == 1
    assert output.turn_rewards == [(len(output.response_ids) - 1, 0.25)]
    assert 0 not in output.response_mask
    assert output.messages[-1]["content"] == "\n" + ANSWER
