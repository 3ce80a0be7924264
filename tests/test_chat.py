"""Agents written for the OpenAI client: flatrl/chat/client.py, flatrl/chat/endpoint.py over HTTP, LangGraph.

The engine says its lines (see test_agent_loop.py) and keeps what it was asked and what it said, so that each output can
be compared, token by token, with what the engine saw. Everything runs on one Background, as in a run of train.py.
"""

import asyncio
import base64
import copy
import dataclasses
import io
import json
import os
import random
import socket
from types import SimpleNamespace

import httpx
import openai
import pytest
from conftest import HANGS, for_ever, too_late, wait_for
from PIL import Image
from test_agent_loop import (
    ANSWER,
    ASSISTANT,
    END,
    PROMPT,
    SUM,
    Script,
    call,
    called,
    encode,
    logprobs_of,
    tool_turn,
    user_turn,
)

from agent_loop import AgentLoopOutput, as_tool
from examples import calculator
from flatrl.chat import endpoint as chat_endpoint
from flatrl.chat.client import ChatAgentLoop, OutOfBudget
from flatrl.processes import Background
from rollout import score
from train import Args

BACKGROUND = Background()
CALCULATOR = as_tool(calculator.calculator).schema
OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
FIRST = f"<|im_start|>user\nWhat is 1+1?{END}\n{ASSISTANT}"
FIRST_WITH_TOOLS = f"<|im_start|>system\nTools: calculator{END}\n{FIRST}"
NEVER = object()  # a line of the script: the engine never answers
LATE = object()  # nor here, and deadlines of up to HANGS seconds are over


def run(coroutine):
    return BACKGROUND.submit(coroutine).result(timeout=HANGS)


class Engine(Script):
    """The scripted engine for parallel calls: one at a time in the order of asking; keeps what each call said."""

    def __init__(self, *args):
        super().__init__(*args)
        self.turn, self.said, self.cancelled, self.asked = asyncio.Lock(), {}, [], asyncio.Event()

    async def generate(self, **request):
        async with self.turn:
            n = len(self.prompts) + 1
            self.asked.set()
            if n <= len(self.lines) and self.lines[n - 1] in (NEVER, LATE):
                self.prompts.append(list(request["prompt_ids"]))
                try:
                    await (too_late() if self.lines[n - 1] is LATE else for_ever())
                except asyncio.CancelledError:
                    self.cancelled.append(n)
                    raise
            out = await super().generate(**request)
            self.said[n] = out.token_ids
            return out


@pytest.fixture(scope="module")
def make(tokenizer):
    """make(agent, lines, base=, row=, sampling=, **args) -> (a coroutine that runs the loop, its engine).

    `agent` becomes the loop's method `chat` (or `agent`, with base=EndpointLoop), without self.
    """

    def make(agent, lines=(), base=ChatAgentLoop, row=None, sampling=None, tokenizer=tokenizer, **args):
        name = "agent" if issubclass(base, chat_endpoint.EndpointLoop) else "chat"
        loop_class = type("Loop", (base,), {name: staticmethod(agent)})
        engine = Engine(tokenizer, tuple(lines))
        args = Args(**{"max_response_tokens": 2000, "max_assistant_turns": 0} | args)
        loop = loop_class(engine, tokenizer, None, SimpleNamespace(), args)
        row = {"prompt": PROMPT, "step": 3, "index": 0, "rollout_n": 1, "validate": False} | (row or {})
        return loop.run(sampling or {}, **row), engine

    return make


@pytest.fixture(scope="module")
def play(make):
    """play(agent, line, line, ..., **how as in make) -> (the loop's outputs, its engine)."""

    def play(agent, *lines, **how) -> tuple[list[AgentLoopOutput], Engine]:
        running, engine = make(agent, lines, **how)
        return run(running), engine

    return play


def assert_output(output: AgentLoopOutput, engine: Engine, *parts) -> None:
    """The response is exactly these parts: (n, text) sampled in the engine's n-th call, a plain text given; and what
    the engine saw in each call is what stands before it."""
    ids, mask, logprobs, versions = [], [], [], []
    for part in parts:
        n, text = part if isinstance(part, tuple) else (None, part)
        tokens = encode(engine.tokenizer, text)
        if n:
            assert engine.prompts[n - 1] == output.prompt_ids + ids
        ids += tokens
        mask += [int(n is not None)] * len(tokens)
        logprobs += logprobs_of(n, len(tokens)) if n else [0.0] * len(tokens)
        versions += [n or -1] * len(tokens)
    assert engine.tokenizer.decode(output.response_ids) == engine.tokenizer.decode(ids)
    assert output.response_ids == ids
    assert (output.response_mask, output.response_logprobs, output.response_versions) == (mask, logprobs, versions)


def assert_exact(outputs: list[AgentLoopOutput], engine: Engine) -> None:
    """Every sampled token is in exactly one output, behind what the engine saw when it sampled it."""
    found = {}
    for output in outputs:
        starts = {}
        for at, (sampled, version) in enumerate(zip(output.response_mask, output.response_versions, strict=True)):
            assert (version > 0) == bool(sampled)
            if sampled:
                starts.setdefault(version, at)
        for n, at in starts.items():
            assert n not in found, f"call {n} is in two outputs"
            size = len(engine.said[n])
            found[n] = output.response_ids[at : at + size]
            assert output.response_versions[at : at + size] == [n] * size == [n] * output.response_versions.count(n)
            assert output.response_logprobs[at : at + size] == logprobs_of(n, size)
            assert engine.prompts[n - 1] == output.prompt_ids + output.response_ids[:at]
    assert found == engine.said


def user(text: str) -> dict:
    return {"role": "user", "content": text}


async def ask(client, *messages, **how):
    """One call; the reply's message."""
    return (await client.chat.completions.create(model="policy", messages=list(messages), **how)).choices[0].message


async def solve(client, messages, tools=(CALCULATOR,)) -> list:
    """An agent as people write them: calls the model and its tools until there is an answer; its messages."""
    messages = list(messages)
    while True:
        message = await ask(client, *messages, tools=list(tools))
        messages.append(message)
        if not message.tool_calls:
            return messages
        for made in message.tool_calls:
            result = calculator.calculator(**json.loads(made.function.arguments))
            messages.append({"role": "tool", "tool_call_id": made.id, "content": result})


async def asks_once(client, prompt, **row):
    """The shortest agent."""
    await ask(client, *prompt)


async def solves(client, prompt, **row):
    """The usual agent."""
    await solve(client, prompt)


# ---------------------------------------------------------------------------------------------------------------------
# One conversation


def test_a_conversation_is_one_output(play, tokenizer):
    async def chat(client, prompt, **row):
        await solve(client, prompt)
        return 0.5

    (output,), engine = play(chat, "First " + SUM, call(expression="2*3"), ANSWER)
    assert output.prompt_ids == encode(tokenizer, FIRST_WITH_TOOLS)
    assert_output(
        output, engine, (1, "First " + SUM + END), tool_turn("2"), (2, call(expression="2*3") + END), tool_turn("6"),
        (3, ANSWER + END),
    )  # fmt: skip
    assert_exact([output], engine)
    assert output.messages == [
        *PROMPT,
        {"role": "assistant", "content": output.messages[1]["content"],
         "tool_calls": called(("calculator", {"expression": "1+1"}), turn=1)},
        {"role": "tool", "content": "2", "tool_call_id": "000001000"},
        {"role": "assistant", "content": "", "tool_calls": called(("calculator", {"expression": "2*3"}), turn=2)},
        {"role": "tool", "content": "6", "tool_call_id": "000002000"},
        {"role": "assistant", "content": ANSWER},
    ]  # fmt: skip
    assert output.messages[1]["content"].strip() == "First"
    assert (output.reward, output.stop_reason, output.num_turns) == (0.5, "stop", 6)


def test_what_a_completion_holds(play, tokenizer):
    seen = []

    async def chat(client, prompt, **row):
        for how in (dict(logprobs=True), dict()):
            said = [completion.choices[0].message for completion in seen]
            answers = [{"role": "tool", "tool_call_id": said[0].tool_calls[0].id, "content": "2"}] if said else []
            seen.append(await client.chat.completions.create(
                model="x", messages=[*prompt, *said, *answers], tools=[CALCULATOR], **how
            ))  # fmt: skip

    _, engine = play(chat, SUM, ANSWER)
    first, second = seen
    ids = encode(tokenizer, SUM + END)
    choice = first.choices[0]
    assert first.prompt_token_ids == engine.prompts[0] == encode(tokenizer, FIRST_WITH_TOOLS)
    assert (first.object, first.model, len(first.choices), choice.index) == ("chat.completion", "policy", 1, 0)
    assert (choice.token_ids, choice.finish_reason, choice.message.role) == (ids, "tool_calls", "assistant")
    (made,) = choice.message.tool_calls
    assert (made.id, made.type, made.function.name) == ("000001000", "function", "calculator")
    assert made.function.arguments == '{"expression": "1+1"}'
    assert [entry.logprob for entry in choice.logprobs.content] == logprobs_of(1, len(ids))
    assert "".join(entry.token for entry in choice.logprobs.content) == SUM + END
    assert b"".join(bytes(entry.bytes) for entry in choice.logprobs.content) == (SUM + END).encode()
    usage = first.usage
    prompt = len(first.prompt_token_ids)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, len(ids), prompt + len(ids))

    choice = second.choices[0]
    assert (
        second.prompt_token_ids == engine.prompts[1] == first.prompt_token_ids + ids + encode(tokenizer, tool_turn("2"))
    )
    assert (choice.token_ids, choice.finish_reason) == (encode(tokenizer, ANSWER + END), "stop")
    assert (choice.message.content, choice.message.tool_calls, choice.logprobs) == (ANSWER, None, None)
    assert second.usage.prompt_tokens == len(second.prompt_token_ids)
    assert first.id != second.id


@pytest.mark.parametrize(
    "text", ['<tool_call>\n{"name": "calc\n</tool_call>', call() + "\n<tool_call>\n[1]\n</tool_call>"]
)
def test_a_malformed_call_is_text(play, text):
    async def chat(client, prompt, **row):
        message = await ask(client, *prompt, tools=[CALCULATOR])
        assert (message.content, message.tool_calls) == (text, None)
        await ask(client, *prompt, message, user("Again"), tools=[CALCULATOR])

    (output,), engine = play(chat, text, "ok")
    assert_output(output, engine, (1, text + END), user_turn("Again"), (2, "ok" + END))


@pytest.mark.parametrize("how", [dict(), dict(tools=[CALCULATOR], tool_choice="none")])
def test_without_tools_a_call_is_text(play, tokenizer, how):
    async def chat(client, prompt, **row):
        message = await ask(client, *prompt, **how)
        assert (message.content, message.tool_calls) == (SUM, None)

    (output,), _ = play(chat, SUM)
    assert output.prompt_ids == encode(tokenizer, FIRST)


def test_sampled_tokens_are_never_tokenised_again(play, tokenizer):
    spelled = [token for letter in SUM for token in encode(tokenizer, letter)] + [tokenizer.eos_token_id]
    assert len(spelled) > len(encode(tokenizer, SUM + END))

    (output,), engine = play(solves, (spelled, "stop"), ANSWER)
    given = encode(tokenizer, tool_turn("2"))
    assert engine.prompts[1] == output.prompt_ids + spelled + given
    assert output.response_ids == spelled + given + encode(tokenizer, ANSWER + END)


# ---------------------------------------------------------------------------------------------------------------------
# What goes on, and what forks


BACK = {
    "pydantic": lambda message: message,
    "all keys": lambda message: message.model_dump(),
    "keys with a value": lambda message: message.model_dump(exclude_none=True),
    "content None": lambda message: message.model_dump() | {"content": message.content or None},
    "content in parts": lambda message: message.model_dump() | {"content": [{"type": "text", "text": message.content}]},
    "extra keys": lambda message: message.model_dump() | {"refusal": None, "audio": None, "name": "solver", "x": [1]},
    "compact arguments": lambda message: message.model_dump() | {"tool_calls": [
        made | {"function": {"name": made["function"]["name"],
                             "arguments": json.dumps(json.loads(made["function"]["arguments"]), separators=(",", ":"))}}
        for made in message.model_dump()["tool_calls"] or ()
    ]},
    "ids of its own": lambda message: message.model_dump() | {"tool_calls": [
        made | {"id": "call_1", "index": 0} for made in message.model_dump()["tool_calls"] or ()
    ]},
}  # fmt: skip


@pytest.mark.parametrize("back", BACK.values(), ids=list(BACK))
def test_the_reply_as_clients_send_it_back_goes_on(play, back):
    async def chat(client, prompt, **row):
        first = await ask(client, *prompt, tools=[CALCULATOR])
        history = [*prompt, back(first), {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "2"}]
        second = await ask(client, *history, tools=[CALCULATOR])
        await ask(client, *history, back(second), user("Sure?"), tools=[CALCULATOR])

    (output,), engine = play(chat, SUM, "é 2", ANSWER)
    assert_output(
        output, engine, (1, SUM + END), tool_turn("2"), (2, "é 2" + END), user_turn("Sure?"), (3, ANSWER + END)
    )


def test_messages_that_the_agent_made_up_are_given(play):
    """An assistant's message that the policy did not say goes in as it is, with mask 0."""

    async def chat(client, prompt, **row):
        message = await ask(client, *prompt)
        await ask(client, *prompt, message, user("Guess"), {"role": "assistant", "content": "7"}, user("Really?"))

    (output,), engine = play(chat, "3", "2")
    given = f"\n<|im_start|>user\nGuess{END}\n{ASSISTANT}7{END}" + user_turn("Really?")
    assert_output(output, engine, (1, "3" + END), given, (2, "2" + END))


@pytest.mark.parametrize("changed", ["the user's", "the system's", "the reply", "the call", "the role", "cut", "tools"])
def test_a_changed_history_forks(play, tokenizer, changed):
    async def chat(client, **row):
        history = [{"role": "system", "content": "Be brief."}, *PROMPT]
        history = (await solve(client, history))[:-1]
        tools = [CALCULATOR]
        reply = history[2].model_dump()
        if changed == "the user's":
            history[1] = user("What is 1+2?")
        if changed == "the system's":
            history[0] = {"role": "system", "content": "Be long."}
        if changed == "the reply":
            history[2] = reply | {"content": "Hm."}
        if changed == "the call":
            reply["tool_calls"][0]["function"]["arguments"] = '{"expression": "1+2"}'
            history[2] = reply
        if changed == "the role":
            history[1] = {"role": "tool", "content": history[1]["content"]}
        if changed == "cut":
            del history[0]
        if changed == "tools":
            tools = [CALCULATOR, OTHER]
        await ask(client, *history, user("Again"), tools=tools)
        return 1.0

    outputs, engine = play(chat, SUM, "2", "again")
    assert len(outputs) == 2
    assert_output(outputs[0], engine, (1, SUM + END), tool_turn("2"), (2, "2" + END))
    assert_output(outputs[1], engine, (3, "again" + END))
    assert tokenizer.decode(outputs[1].prompt_ids).endswith(user_turn("Again"))
    assert [output.reward for output in outputs] == [None, 1.0]
    assert [output.num_turns for output in outputs] == [4, 2]


def test_parallel_calls_never_share_a_sequence(play):
    """Both go on from one reply: the first takes its sequence, the other starts one of its own; so again from there."""

    async def chat(client, prompt, **row):
        first = await ask(client, *prompt)
        left, right = [*prompt, first, user("left")], [*prompt, first, user("right")]
        said = await asyncio.gather(ask(client, *left), ask(client, *right))
        await asyncio.gather(ask(client, *left, said[0], user("more")), ask(client, *right, said[1], user("more")))

    outputs, engine = play(chat, "one", "L1", "R1", "L2", "R2")
    assert len(outputs) == 2
    more = user_turn("more")
    assert_output(
        outputs[0], engine, (1, "one" + END), user_turn("left"), (2, "L1" + END), more, (4, "L2" + END)
    )  # fmt: skip
    assert_output(outputs[1], engine, (3, "R1" + END), more, (5, "R2" + END))
    assert_exact(outputs, engine)


def test_sub_agents_are_outputs_of_their_own_and_the_last_speaker_is_last(play, tokenizer):
    async def chat(client, prompt, **row):
        plan = await ask(client, *prompt)
        for name in ("A", "B"):
            await solve(client, [{"role": "system", "content": f"You are {name}."}, user("Help.")])
        await ask(client, *prompt, plan, user("They are done."))
        return 0.25

    outputs, engine = play(chat, "plan", SUM, "a", "b", ANSWER)
    assert len(outputs) == 3
    assert_output(outputs[0], engine, (2, SUM + END), tool_turn("2"), (3, "a" + END))
    assert_output(outputs[1], engine, (4, "b" + END))
    assert_output(outputs[2], engine, (1, "plan" + END), user_turn("They are done."), (5, ANSWER + END))
    assert_exact(outputs, engine)
    assert [output.reward for output in outputs] == [None, None, 0.25]
    assert outputs[2].messages[-1] == {"role": "assistant", "content": ANSWER}
    assert tokenizer.decode(outputs[1].prompt_ids).startswith("<|im_start|>system\nYou are B.")
    run(score(SimpleNamespace(), outputs, {}))  # one rollout, one reward
    assert [output.reward for output in outputs] == [0.25] * 3


def test_a_template_that_rewrites_history_forks_inside_a_trajectory(play, tokenizer):
    """As Qwen3's, which keeps the last reply as it was and cuts the reasoning of earlier ones."""
    changing = copy.deepcopy(tokenizer)
    changing.chat_template = (
        "{% for m in messages %}{{ m.content if m.role == 'user' or loop.last else '(cut)' }}<|im_end|>{% endfor %}"
    )

    async def chat(client, **row):
        history = [user("Hi")]
        for text in ("go on", "and", None):
            message = await ask(client, *history)
            history += [message] + ([user(text)] if text else [])
        return 1.0

    outputs, engine = play(chat, "one", "two", "three", tokenizer=changing, row={"prompt": [user("Hi")]})
    prompts = [changing.decode(output.prompt_ids) for output in outputs]
    assert prompts == [f"Hi{END}", f"Hi{END}(cut){END}go on{END}", f"Hi{END}(cut){END}go on{END}(cut){END}and{END}"]
    for n, (output, text) in enumerate(zip(outputs, ("one", "two", "three"), strict=True), start=1):
        assert_output(output, engine, (n, text + END))
        assert [message["content"] for message in output.messages] == ["Hi", "one", "go on", "two", "and", "three"][
            : 2 * n
        ]
    assert_exact(outputs, engine)
    assert [output.reward for output in outputs] == [None, None, 1.0]
    assert [output.metrics.get("forks", 0) for output in outputs] == [0, 0, 2]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_an_agent_does_each_token_is_in_one_output(make, seed):
    """Agents that go on from any point of any conversation they had, alone or in parallel, with any tools."""
    draw = random.Random(seed)
    histories = [([{"role": "system", "content": "S"}, user("0")], []), ([user("1")], [CALCULATOR])]

    async def one(client, number):
        history, tools = draw.choice(histories)
        history = [*history[: draw.randint(1, len(history))], user(str(number))]
        completion = await client.chat.completions.create(messages=history, tools=tools)
        said = completion.choices[0]
        assert completion.prompt_token_ids in engine.prompts and said.token_ids in engine.said.values()
        histories.append(([*history, said.message], tools))

    async def chat(client, **row):
        for number in range(10):
            await asyncio.gather(*(one(client, 10 * number + k) for k in range(draw.choice([1, 1, 2, 3]))))

    lines = [draw.choice([SUM, ANSWER, "", "é", (SUM, "stop"), ("cut", "length")]) for _ in range(30)]
    running, engine = make(chat, lines)
    outputs = run(running)
    assert len(engine.said) >= 10
    assert_exact(outputs, engine)
    assert sum(sum(output.response_mask) for output in outputs) == sum(map(len, engine.said.values()))
    assert max(engine.said) == max(outputs[-1].response_versions)  # who spoke last is last


# ---------------------------------------------------------------------------------------------------------------------
# Sampling parameters, and what is refused


@pytest.mark.parametrize("how, expected", [
    (dict(), dict(max_tokens=50)),
    (dict(max_tokens=10), dict(max_tokens=10)),
    (dict(max_completion_tokens=20), dict(max_tokens=20)),
    (dict(max_tokens=10, max_completion_tokens=20), dict(max_tokens=20)),  # the first is OpenAI's old name
    (dict(max_tokens=99), dict(max_tokens=50)),
    (dict(stop="x"), dict(max_tokens=50, stop=["x"])),
    (dict(stop=["x", "yz"]), dict(max_tokens=50, stop=["x", "yz"])),
    (dict(stop=[], max_tokens=None, n=None, stream=None, tool_choice=None, tools=None), dict(max_tokens=50)),
    (dict(temperature=0.1, top_p=0.5, seed=7, user="u", frequency_penalty=1.0), dict(max_tokens=50)),
])  # fmt: skip
def test_max_tokens_and_stop_are_the_agents_and_the_rest_is_the_runs(play, how, expected):
    async def chat(client, prompt, **row):
        await ask(client, *prompt, **how)

    sampling = {"temperature": 0.7, "max_tokens": 50}
    _, engine = play(chat, "2", sampling=sampling)
    assert engine.params == [{"temperature": 0.7} | expected]
    assert sampling == {"temperature": 0.7, "max_tokens": 50}


def test_a_reply_that_was_cut_goes_on(play):
    async def chat(client, prompt, **row):
        completion = await client.chat.completions.create(messages=prompt, max_tokens=3)
        choice = completion.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("length", "123")
        await ask(client, *prompt, choice.message, user("Go on"))

    (output,), engine = play(chat, "12345", "ok")
    assert_output(output, engine, (1, "123"), END + user_turn("Go on"), (2, "ok" + END))
    assert output.stop_reason == "stop"


def test_a_stop_string_leaves_the_end_of_turn_token_to_the_suffix(play):
    async def chat(client, prompt, **row):
        completion = await client.chat.completions.create(messages=prompt, stop=".")
        choice = completion.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("stop", "3")  # as OpenAI: without the stop string
        await ask(client, *prompt, choice.message, user("Sure?"))

    (output,), engine = play(chat, ("3.", "stop"), "2")
    assert_output(output, engine, (1, "3."), END + user_turn("Sure?"), (2, "2" + END))


def test_nothing_goes_on_from_a_call_that_was_cancelled(play):
    """An agent gives up on a reply after a deadline of its own and asks again, with a further message."""

    async def chat(client, prompt, **row):
        first = await ask(client, *prompt)
        again = [*prompt, first, user("And?")]
        call = asyncio.ensure_future(ask(client, *again))
        while len(client.loop.engine.prompts) < 2:
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await ask(client, *again, user("Hurry."))

    outputs, engine = play(chat, "2", "never said", "fast")
    assert outputs[-1].messages[-1]["content"] == "fast" and len(engine.prompts) == 3
    hanging = ASSISTANT + user_turn("Hurry.").removeprefix("\n")  # a turn of nobody's, which no template writes
    assert hanging not in engine.tokenizer.decode(engine.prompts[2])
    sampled = [t for o in outputs for t, m in zip(o.response_ids, o.response_mask, strict=True) if m]
    assert engine.tokenizer.decode(sampled) == f"2{END}fast{END}"


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
REFUSED = {
    "n": dict(n=2),
    "stream": dict(stream=True),
    "required": dict(tools=[CALCULATOR], tool_choice="required"),
    "forced": dict(tools=[CALCULATOR], tool_choice={"type": "function", "function": {"name": "calculator"}}),
    "image": dict(messages=[*PROMPT, IMAGE]),
    "max_tokens 0": dict(max_tokens=0),
    "max_tokens -1": dict(max_tokens=-1),
    "response_format": dict(response_format={"type": "json_object"}),
}


@pytest.mark.parametrize("how", REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_refused_and_costs_nothing(play, how):
    async def chat(client, prompt, **row):
        with pytest.raises(ValueError, match="support|max_tokens must"):
            await client.chat.completions.create(**{"messages": prompt} | how)
        assert client.loop.engine.prompts == []
        await ask(client, *prompt)

    (output,), engine = play(chat, "2")
    assert_output(output, engine, (1, "2" + END))


# ---------------------------------------------------------------------------------------------------------------------
# Budgets, errors, time


async def lets_it_through(call):
    await call


async def wraps_it(call):
    try:
        await call
    except OutOfBudget as error:
        raise RuntimeError("node 'model' failed") from error


async def hides_it(call):
    try:
        await call
    except OutOfBudget:
        raise ExceptionGroup("unhandled errors in a TaskGroup", [KeyError("state")]) from None


@pytest.mark.parametrize("framework", [lets_it_through, wraps_it, hides_it])
@pytest.mark.parametrize("limit", ["length", "max_turns", "max_model_len"])
def test_an_agent_that_runs_out_of_budget_keeps_what_it_has(play, tokenizer, framework, limit):
    async def chat(client, prompt, **row):
        await framework(solve(client, prompt))
        return 1.0

    size = len(encode(tokenizer, SUM + END + tool_turn("2")))  # no room for a token of reply behind it
    limits = {
        "length": dict(max_response_tokens=size),
        "max_turns": dict(max_assistant_turns=1),
        "max_model_len": dict(max_model_len=size + len(encode(tokenizer, FIRST_WITH_TOOLS))),
    }[limit]
    (output,), engine = play(chat, SUM, **limits)
    assert_output(output, engine, (1, SUM + END))
    assert output.stop_reason == ("max_turns" if limit == "max_turns" else "length")
    assert (output.reward, output.truncated, output.num_turns) == (None, True, 2)
    assert [message["role"] for message in output.messages] == ["user", "assistant"]


def test_one_token_of_room_is_enough(play, tokenizer):
    size = len(encode(tokenizer, SUM + END + tool_turn("2")))
    (output,), engine = play(solves, SUM, "12", max_response_tokens=size + 1)
    assert_output(output, engine, (1, SUM + END), tool_turn("2"), (2, "1"))
    assert output.stop_reason == "length"


def test_turns_of_all_sub_agents_count(play):
    async def chat(client, prompt, **row):
        for number in range(5):
            await ask(client, user(str(number)))

    outputs, _ = play(chat, *"abc", max_assistant_turns=3)
    assert [output.stop_reason for output in outputs] == ["stop", "stop", "max_turns"]


def test_an_agent_may_go_on_without_a_sub_agent_that_ran_out(play, tokenizer):
    async def chat(client, prompt, **row):
        plan = await ask(client, *prompt)
        with pytest.raises(OutOfBudget, match="length"):
            await ask(client, user("x" * 5000))
        await ask(client, *prompt, plan, user("Alone, then."))
        return 0.5

    (output,), engine = play(chat, "plan", "done", max_model_len=1000)
    assert_output(output, engine, (1, "plan" + END), user_turn("Alone, then."), (2, "done" + END))
    assert (output.reward, output.stop_reason) == (0.5, "stop")


def test_an_error_about_a_reply_that_took_the_last_token_is_the_end(play):
    """Frameworks raise on half a tool call or half a JSON."""

    async def chat(client, prompt, **row):
        raise KeyError(await ask(client, *prompt))

    (output,), engine = play(chat, "12345", max_response_tokens=3)
    assert_output(output, engine, (1, "123"))
    assert (output.stop_reason, output.reward) == ("length", None)


def test_an_error_after_a_survived_budget_is_an_error(play):
    async def chat(client, prompt, **row):
        with pytest.raises(OutOfBudget):
            await ask(client, user("x" * 5000))
        await ask(client, *prompt)
        raise KeyError("a bug of the agent's")

    with pytest.raises(KeyError, match="a bug of the agent's"):
        play(chat, "2", max_model_len=1000)


@pytest.mark.parametrize("error", [KeyError("lost"), TimeoutError("no route to host"), RuntimeError("broken")])
def test_another_exception_of_the_agent_is_raised(play, error):
    async def chat(client, prompt, **row):
        await ask(client, *prompt)
        raise error

    with pytest.raises(type(error), match=str(error.args[0])):
        play(chat, "2", trajectory_timeout=HANGS)


@pytest.mark.parametrize("how", ["the engine fails", "the agent gives up"])
def test_a_conversation_that_failed_stands_first(play, how):
    """The task's reward is asked of the last output: never of one whose last question has no answer."""

    async def chat(client, prompt, **row):
        plan = await ask(client, *prompt)
        helper = await ask(client, user("Help."))
        if how == "the engine fails":
            with pytest.raises(RuntimeError, match="out of memory"):
                await ask(client, user("Help."), helper, user("More."))
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask(client, user("Help."), helper, user("More.")), HANGS)
        assert plan.content == "plan"
        return 0.5

    fails = RuntimeError("out of memory") if how == "the engine fails" else LATE
    (failed, whole), engine = play(chat, "plan", "yes", fails)
    assert_output(failed, engine, (2, "yes" + END), user_turn("More."))
    assert [m["content"] for m in whole.messages] == ["What is 1+1?", "plan"]
    assert [failed.reward, whole.reward] == [None, 0.5]


def pixels(*colours: int) -> list[dict]:
    """Content parts: an image of one pixel for each colour."""
    parts = []
    for colour in colours:
        file = io.BytesIO()
        Image.new("RGB", (1, 1), (colour, 0, 0)).save(file, "png")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts


def test_images_are_kept_as_long_as_a_conversation_needs_them(tokenizer, monkeypatch):
    """max_images bound each conversation, the same image counting each time; refused ones leave nothing behind."""

    class Seeing(ChatAgentLoop):
        async def chat(self, client, prompt, **row):
            for colours in ([7] * 4, range(1000)):
                with pytest.raises(ValueError, match="supported are 3 images"):
                    await ask(client, {"role": "user", "content": pixels(*colours)})
            assert len(decoded) == 3 + 3  # no more than the limit of either
            question = {"role": "user", "content": pixels(7, 7)}
            reply = await ask(client, question)
            with pytest.raises(ValueError, match="supported are 3 images"):
                await ask(client, question, reply, question)
            for _ in range(2):
                await ask(client, question)
            clients.append(client)

    decoded, clients, decode = [], [], base64.b64decode
    monkeypatch.setattr(base64, "b64decode", lambda data: decoded.append(data) or decode(data))
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}#{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    )
    (placeholder,) = encode(tokenizer, "#")
    processor = SimpleNamespace(image_token="#", image_token_id=placeholder)
    processor._get_num_multimodal_tokens = lambda image_sizes: {"num_image_tokens": [2] * len(image_sizes)}

    class Sees(Engine):
        async def generate(self, *, prompt_ids, image_data, **request):
            out = await super().generate(prompt_ids=prompt_ids, **request)
            twice = [i for i in prompt_ids for _ in range(1 + (i == placeholder))]
            return dataclasses.replace(out, prompt_ids=twice)

    engine = Sees(tokenizer, ("a", "b", "c"))
    args = Args(max_response_tokens=2000, max_assistant_turns=0, max_images=3)
    outputs = run(Seeing(engine, tokenizer, processor, SimpleNamespace(), args).run({}, prompt=PROMPT))
    assert [[i.getpixel((0, 0)) for i in output.images] for output in outputs] == [[(7, 0, 0)] * 2] * 3
    assert [output.prompt_ids.count(placeholder) for output in outputs] == [4] * 3
    (client,) = clients
    assert len(client.trajectories) == 3 and not any(isinstance(x, (bytes, dict)) for x in vars(client).values() if x)


def test_a_timeout_in_a_tool_keeps_what_was_sampled(play):
    async def chat(client, prompt, **row):
        await ask(client, *prompt)
        await too_late()
        return 1.0

    (output,), engine = play(chat, "2", trajectory_timeout=HANGS)
    assert_output(output, engine, (1, "2" + END))
    assert (output.stop_reason, output.reward, output.truncated) == ("timeout", None, False)


def test_a_timeout_that_the_agent_wraps_is_one(play):
    async def chat(client, prompt, **row):
        await ask(client, *prompt)
        try:
            await too_late()
        except asyncio.CancelledError:
            raise RuntimeError("the graph was cancelled") from None

    (output,), _ = play(chat, "2", trajectory_timeout=HANGS)
    assert output.stop_reason == "timeout"


def test_calls_that_outlive_the_agent_are_ended(play):
    async def chat(client, prompt, **row):
        first = await ask(client, *prompt)
        chat.left = asyncio.create_task(ask(client, *prompt, first, user("And?")))
        while len(client.loop.engine.prompts) < 2:
            await asyncio.sleep(0)
        return 1.0

    outputs, engine = play(chat, "2", NEVER)
    assert engine.cancelled == [2]
    assert_output(outputs[-1], engine, (1, "2" + END), user_turn("And?"))


@pytest.fixture(scope="module")
def strict(tokenizer):
    """Its template raises an error, as many do, where the roles are in an order that it does not like."""
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('the system message must be the first') }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    return strict


def test_a_template_that_refuses_a_message_loses_nothing(play, strict):
    async def chat(client, prompt, **row):
        first = await ask(client, *prompt)
        with pytest.raises(Exception, match="must be the first"):
            await ask(client, *prompt, first, {"role": "system", "content": "Be brief."})
        await ask(client, *prompt, first, user("Be brief."))

    outputs, engine = play(chat, "one", "two", tokenizer=strict)
    assert_exact(outputs, engine)


def test_an_agent_that_never_asks_is_skipped(play):
    async def chat(client, **row):
        return 1.0

    assert play(chat)[0] == []


def test_a_prompt_that_fills_the_window_is_skipped(play, tokenizer):
    outputs, engine = play(asks_once, max_model_len=len(encode(tokenizer, FIRST)))
    assert (outputs, engine.prompts) == ([], [])


def test_an_aborted_reply(play):
    (output,), engine = play(asks_once, ("ab", "abort"))
    assert_output(output, engine, (1, "ab"))
    assert output.stop_reason == "abort"


def test_the_agent_gets_the_row(play):
    async def chat(client, **row):
        seen.update(row)

    seen = {}
    play(chat, row={"extra_info": {"index": 7}})
    assert seen == {
        "prompt": PROMPT, "extra_info": {"index": 7}, "step": 3, "index": 0, "rollout_n": 1, "validate": False
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Over HTTP


@pytest.fixture
def endpoint(monkeypatch):
    """A fresh endpoint, closed in the end; no proxy in between."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    endpoint = chat_endpoint.ChatEndpoint()
    monkeypatch.setattr(chat_endpoint, "ENDPOINT", endpoint)
    yield endpoint
    if endpoint.started is not None:
        endpoint.server.should_exit = endpoint.server.force_exit = True  # its task sees it in a moment


@pytest.fixture(scope="module")
def openai_client():
    """One connection pool for all tests; `with_options` gives a trajectory its url and key."""
    return openai.AsyncOpenAI(base_url="http://127.0.0.1:1", api_key="none", max_retries=0)


@pytest.fixture
def play_http(play, endpoint, openai_client):
    """As `play`, the agent being called with (client, row, base_url, api_key)."""

    def play_http(agent, *lines, **how):
        async def connected(base_url, api_key, row):
            client = openai_client.with_options(base_url=base_url, api_key=api_key)
            return await agent(client, row, base_url, api_key)

        outputs, engine = play(connected, *lines, base=chat_endpoint.EndpointLoop, **how)
        assert endpoint.clients == {}
        return outputs, engine

    return play_http


def test_no_proxy_gets_calls_to_loopback(monkeypatch):
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "mine.org,127.0.0.1")
    for _ in range(2):
        chat_endpoint._bypass_proxies()
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "mine.org,127.0.0.1"
    monkeypatch.setenv("no_proxy", "*")
    chat_endpoint._bypass_proxies()
    assert os.environ["no_proxy"] == "*"


async def post(client, path: str, body):
    return await client.post(path, body=body, cast_to=object)


async def raw(method: str, url: str, body, headers: dict) -> httpx.Response:
    """A request as it is, and its answer, whatever the status."""
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=HANGS) as client:
        return await client.request(method, url, content=content, headers=headers)


def test_http_gives_the_same_outputs_as_in_process(play, play_http):
    async def agent(client, prompt):
        history = await solve(client, prompt)
        await ask(client, user("Is that right?"), max_tokens=4)
        await ask(client, *history, user("Sure?"), tools=[CALCULATOR], tool_choice="auto", temperature=0.3)
        return 0.5

    async def chat(client, prompt, **row):
        return await agent(client, prompt)

    async def over_http(client, row, base_url, api_key):
        return await agent(client, row["prompt"])

    lines = ("Hm. é " + SUM, ANSWER, "certainly", "yes")
    here, engine = play(chat, *lines)
    there, remote = play_http(over_http, *lines)
    assert [dataclasses.asdict(output) for output in there] == [dataclasses.asdict(output) for output in here]
    assert (remote.prompts, remote.params) == (engine.prompts, engine.params)
    assert_exact(there, remote)
    assert [output.reward for output in there] == [None, 0.5]


def test_nobody_gets_in_without_the_key(play_http):
    async def agent(client, row, base_url, api_key):
        mine = base_url.split("/")[-2]
        nobody = base_url.replace(mine, "0" * len(mine))
        bearer = {"Authorization": f"Bearer {api_key}"}
        strangers = [(base_url, {"Authorization": f"Bearer {key}"}) for key in ("wrong", "\xe9", api_key[:-1])]
        strangers += [(base_url, {}), (nobody, bearer), (nobody, {}), (nobody, {"Authorization": "Bearer"})]
        for url, headers in strangers:
            headers = {name: value.encode("latin-1") for name, value in headers.items()}
            for method, path, body in (
                ("POST", "/chat/completions", {"messages": PROMPT}), ("POST", "/reward", {"reward": 9.0}),
                ("GET", "/models", None),
            ):  # fmt: skip
                answer = await raw(method, url + path, body, headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        with pytest.raises(openai.AuthenticationError):
            await ask(client.with_options(api_key="wrong"), *row["prompt"])
        await ask(client, *row["prompt"])

    (output,), engine = play_http(agent, "2")
    assert_output(output, engine, (1, "2" + END))
    assert output.reward is None


def test_a_trajectory_that_is_over_is_unknown(play_http, openai_client):
    async def agent(client, row, base_url, api_key):
        kept.update(base_url=base_url, api_key=api_key)
        await ask(client, *row["prompt"])

    kept = {}
    play_http(agent, "2")
    with pytest.raises(openai.AuthenticationError):
        run(ask(openai_client.with_options(**kept), *PROMPT))
    with pytest.raises(openai.AuthenticationError):
        run(post(openai_client.with_options(**kept), "/reward", {"reward": 1.0}))


def test_one_trajectory_has_no_key_to_another(make, endpoint, openai_client):
    async def agent(base_url, api_key, row):
        known.append((base_url, api_key))
        await both.wait()
        other_url = next(url for url, key in known if key != api_key)
        with pytest.raises(openai.AuthenticationError):
            await ask(openai_client.with_options(base_url=other_url, api_key=api_key), *row["prompt"])

    async def scenario():
        return await asyncio.gather(*(make(agent, base=chat_endpoint.EndpointLoop)[0] for _ in range(2)))

    known, both = [], asyncio.Barrier(2)
    assert run(scenario()) == [[], []]


@pytest.mark.parametrize("limit", [dict(max_assistant_turns=1), "length"])
def test_a_budget_over_http(play_http, tokenizer, limit):
    async def agent(client, row, *_):
        try:
            await solve(client, row["prompt"])
        except openai.BadRequestError as error:
            raised.append((error.status_code, error.code))
            raise

    raised = []
    reason = "length" if limit == "length" else "max_turns"
    if limit == "length":
        limit = dict(max_response_tokens=len(encode(tokenizer, SUM + END + tool_turn("2"))))
    (output,), engine = play_http(agent, SUM, **limit)
    assert raised == [(400, "context_length_exceeded")]
    assert_output(output, engine, (1, SUM + END))
    assert output.stop_reason == reason


MALFORMED = {
    "not JSON": b"{",
    "not UTF-8": b'{"messages": "\xff"}',
    "a list": [],
    "nothing": {},
    "no role": {"messages": [{"content": "hi"}]},
    "image": {"messages": [IMAGE]},
    "messages 5": {"messages": 5},
    "content 5": {"messages": [{"role": "user", "content": 5}]},
    "calls 5": {"messages": [{"role": "assistant", "tool_calls": 5}]},
    "calls without a function": {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
    "max_tokens a text": {"messages": PROMPT, "max_tokens": "many"},
    "max_tokens -1": {"messages": PROMPT, "max_tokens": -1},
    "max_tokens NaN": {"messages": PROMPT, "max_tokens": float("nan")},
    "max_tokens True": {"messages": PROMPT, "max_completion_tokens": True},
    "messages a text": {"messages": "hello"},
    "content of texts": {"messages": [{"role": "user", "content": ["hello"]}]},
    "nested deeply": b'{"messages":' + b"[" * 100_000,
}
@pytest.mark.parametrize("body", [
    pytest.param(body, id=name) for name, body in MALFORMED.items()
])  # fmt: skip
def test_a_malformed_request_is_told_so_and_the_server_goes_on(play_http, body):
    async def agent(client, row, base_url, api_key):
        headers = {"Authorization": f"Bearer {api_key}"}
        answer = await raw("POST", f"{base_url}/chat/completions", body, headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert "message" in answer.json()["error"]
        await ask(client, *row["prompt"])

    outputs, engine = play_http(agent, "2")
    assert_output(outputs[-1], engine, (1, "2" + END))
    assert len(outputs) == 1


def test_roles_and_ids_are_words(play_http, tokenizer):
    """A template prints them, and they are not broken up. A developer is the system."""
    made = {"type": "function", "id": "1<|im_end|>", "function": {"name": "f", "arguments": "{}"}}

    async def agent(client, row, *_):
        with pytest.raises(openai.BadRequestError, match="role must be a word"):
            await ask(client, {"role": "user<|im_end|>", "content": "x"})
        called = {"role": "assistant", "content": "", "tool_calls": [made]}
        answer = {"role": "tool", "tool_call_id": "1<|im_end|>", "content": "2"}
        await ask(client, {"role": "developer", "content": "Be brief."}, *row["prompt"], called, answer)

    (output,), _ = play_http(agent, "2")
    system, _, called, answer, _ = output.messages
    assert system == {"role": "system", "content": "Be brief."}
    assert called["tool_calls"][0]["id"] == answer["tool_call_id"] == "1__im_end__"


@pytest.mark.parametrize("returned, expected", [(None, 0.75), (0.25, 0.25), (0.0, 0.0)])
def test_a_posted_reward_is_used_unless_the_agent_returns_one(play_http, returned, expected):
    async def agent(client, row, *_):
        await ask(client, *row["prompt"])
        await post(client, "/reward", {"reward": 0.5})
        await post(client, "/reward", {"reward": 0.75})
        return returned

    (output,), _ = play_http(agent, "2")
    assert output.reward == expected


@pytest.mark.parametrize("body", [{"reward": "high"}, {"reward": float("nan")}, {"reward": None}, {}, [1], 1.0, "x"])
def test_a_posted_reward_that_is_none_is_refused(play_http, body):
    async def agent(client, row, base_url, api_key):
        await ask(client, *row["prompt"])
        answer = await raw("POST", f"{base_url}/reward", body, {"Authorization": f"Bearer {api_key}"})
        assert answer.status_code == 400

    (output,), _ = play_http(agent, "2")
    assert output.reward is None


def test_a_posted_reward_survives_the_budget(play_http):
    async def agent(client, row, *_):
        await ask(client, *row["prompt"])
        await post(client, "/reward", {"reward": 0.5})
        await ask(client, *row["prompt"])

    (output,), _ = play_http(agent, "2", max_assistant_turns=1)
    assert (output.reward, output.stop_reason) == (0.5, "max_turns")


def test_the_server_listens_on_loopback_only(play_http, endpoint):
    async def agent(client, row, base_url, api_key):
        assert base_url == f"{endpoint.url}/{next(iter(endpoint.clients))}/v1"
        bound.extend(sock.getsockname() for server in endpoint.server.servers for sock in server.sockets)

    bound = []
    play_http(agent)
    ((host, port),) = bound
    assert host == "127.0.0.1"
    assert endpoint.url == f"http://127.0.0.1:{port}"
    with pytest.raises(ConnectionRefusedError):  # an address of this machine as well
        socket.create_connection(("127.0.0.2", port)).close()


def test_a_plain_agent(play, endpoint):
    """Not async: it runs in a thread of its own, with the blocking client."""

    def agent(base_url, api_key, row):
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            completion = client.chat.completions.create(model="policy", messages=row["prompt"])
            answer = completion.choices[0].message
            client.chat.completions.create(model="policy", messages=[*row["prompt"], answer, user("Sure?")])
        return 0.5

    (output,), engine = play(agent, "2", "Yes", base=chat_endpoint.EndpointLoop)
    assert_output(output, engine, (1, "2" + END), user_turn("Sure?"), (2, "Yes" + END))
    assert (output.reward, endpoint.clients) == (0.5, {})


def test_a_failing_agent_is_raised_and_removed(play_http, endpoint):
    async def agent(client, row, *_):
        await ask(client, *row["prompt"])
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        play_http(agent, "2")
    assert endpoint.clients == {}


def test_an_agent_cancelled_while_the_engine_samples_leaves_no_request(make, endpoint, openai_client):
    async def agent(base_url, api_key, row):
        await ask(openai_client.with_options(base_url=base_url, api_key=api_key), *row["prompt"])

    async def scenario():
        running, engine = make(agent, [NEVER], base=chat_endpoint.EndpointLoop)
        playing = asyncio.create_task(running)
        while not engine.prompts:
            await asyncio.sleep(0.005)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        return engine

    engine = run(scenario())
    assert endpoint.clients == {}
    wait_for(lambda: engine.cancelled == [1])


@pytest.mark.parametrize("plain", [False, True])
def test_a_timeout_over_http_while_the_engine_samples(make, endpoint, openai_client, plain):
    async def agent(base_url, api_key, row):
        await solve(openai_client.with_options(base_url=base_url, api_key=api_key), row["prompt"])

    def plain_agent(base_url, api_key, row):
        asyncio.run(agent_with_a_client_of_its_own(base_url, api_key, row))

    async def agent_with_a_client_of_its_own(base_url, api_key, row):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            await solve(client, row["prompt"])

    running, engine = make(
        plain_agent if plain else agent, [SUM, LATE], base=chat_endpoint.EndpointLoop, trajectory_timeout=HANGS
    )
    outputs = run(running)
    assert len(outputs) == 1
    assert_output(outputs[0], engine, (1, SUM + END), tool_turn("2"))
    assert (outputs[0].stop_reason, engine.cancelled, endpoint.clients) == ("timeout", [2], {})


