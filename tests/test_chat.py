"""Agents written for the OpenAI client, in process: flatrl/chat/client.py.

The engine says its lines (see test_agent_loop.py). All runs on one Background, as in a run."""

import asyncio
import json
import random

import pytest
from conftest import HANGS, too_late
from test_agent_loop import (
    ANSWER,
    END,
    FIRST_WITH_TOOLS,
    NEVER,
    SUM,
    assert_exact,
    assert_output,
    called,
    rollout,
    tool_turn,
    user,
    user_turn,
)

from agent_loop import as_tool, register
from examples import calculator
from flatrl.chat.client import ChatAgentLoop, OutOfBudget

CALCULATOR = as_tool(calculator.calculator).schema


def player(tokenizer, base=ChatAgentLoop, method="chat"):
    """Returns play(agent, line, line, ..., row=, sampling=, **args) -> (outputs, the engine).

    `agent` becomes this method of the loop, without self."""

    def play(agent, *lines, **how):
        register("test_chat")(type("Loop", (base,), {method: staticmethod(agent)}))
        return rollout(tokenizer, *lines, agent="test_chat", **how)

    return play


@pytest.fixture(scope="module")
def play(tokenizer):
    return player(tokenizer)


async def ask(client, *messages, **how):
    """One call; returns the reply's message."""
    create = client.chat.completions.create
    return (await create(model="policy", messages=list(messages), **how)).choices[0].message


async def solve(client, messages, tools=(CALCULATOR,)) -> list:
    """An agent as people write them: calls the model and its tools until there is an answer."""
    messages = list(messages)
    while True:
        message = await ask(client, *messages, tools=list(tools))
        messages.append(message)
        if not message.tool_calls:
            return messages
        for made in message.tool_calls:
            result = calculator.calculator(**json.loads(made.function.arguments))
            messages.append({"role": "tool", "tool_call_id": made.id, "content": result})


def as_a_framework_sends_it(message) -> dict:
    """With ids, keys and parts of its own, and trimmed."""
    words = message.content.strip()
    parts = [{"type": "text", "text": text} for text in (words[:1], words[1:])]
    message = message.model_dump() | {"content": parts, "refusal": None, "name": "solver"}
    for made in message["tool_calls"] or ():
        made |= {"id": "call_1", "index": 0}
    return message


@pytest.mark.parametrize("back", [lambda message: message, as_a_framework_sends_it])
def test_a_conversation_is_one_output(play, tokenizer, back):
    """What the agent made up for the assistant is given."""
    made_up = {"role": "assistant", "content": "7", "reasoning": "A lucky one."}
    completions = []

    async def chat(client, prompt, **row):
        completions.append(await client.create(messages=prompt, tools=[CALCULATOR]))
        first = completions[0].choices[0].message
        answer = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "2"}
        history = [*prompt, back(first), answer]
        second = await ask(client, *history, tools=[CALCULATOR])
        history += [back(second), user("Guess"), made_up, user("Sure?")]
        await ask(client, *history, tools=[CALCULATOR])
        return 0.5

    said = "Hm.\n" + SUM + END
    (output,), engine = play(chat, "Hm.\n" + SUM, "\n é 2 ", ANSWER)
    parts = [(1, said), tool_turn("2"), (2, "\n é 2 " + END)]
    thought = "<think>A lucky one.</think>"
    given = user_turn("Guess") + thought + "7" + END + user_turn("Sure?")
    assert tokenizer.decode(output.prompt_ids) == FIRST_WITH_TOOLS
    assert_output(output, engine, *parts, given, (3, ANSWER + END))
    assert output.messages[1]["tool_calls"] == called(("calculator", {"expression": "1+1"}))
    assert (output.reward, output.stop_reason, output.num_turns) == (0.5, "stop", 6)

    (choice,) = completions[0].choices
    ids = engine.said[1].token_ids
    assert completions[0].prompt_token_ids == engine.prompts[0]
    assert (choice.token_ids, choice.finish_reason) == (ids, "tool_calls")
    assert completions[0].usage.total_tokens == len(engine.prompts[0] + ids)


# In place: the client got the same objects in an earlier call.
CHANGES = {
    "the user's": lambda history: history[1].update(content="What is 1+2?"),
    "the call": lambda history: setattr(history[2].tool_calls[0].function, "arguments", "{}"),
    "tools": lambda history: None,
}


@pytest.mark.parametrize("changed", CHANGES)
def test_a_changed_history_forks(play, tokenizer, changed):
    async def chat(client, **row):
        system = {"role": "system", "content": "Be brief."}
        history = await solve(client, [system, user("What is 1+1?")])
        CHANGES[changed](history)
        tools = [] if changed == "tools" else [CALCULATOR]
        await ask(client, *history, user("Again"), tools=tools)
        return 1.0

    outputs, engine = play(chat, SUM, "2", "again")
    assert len(outputs) == 2
    assert_output(outputs[0], engine, (1, SUM + END), tool_turn("2"), (2, "2" + END))
    assert_output(outputs[1], engine, (3, "again" + END))
    assert tokenizer.decode(outputs[1].prompt_ids).endswith(user_turn("Again"))
    assert [output.reward for output in outputs] == [None, 1.0]


def test_whatever_an_agent_does_each_token_is_in_one_output(play):
    """It continues any point of any conversation, alone or in parallel, with any tools."""
    draw = random.Random(0)
    system = {"role": "system", "content": "S"}
    histories = [([system, user("0")], []), ([user("1")], [CALCULATOR])]

    async def one(client, number):
        history, tools = draw.choice(histories)
        history = [*history[: draw.randint(1, len(history))], user(str(number))]
        histories.append(([*history, await ask(client, *history, tools=tools)], tools))

    async def chat(client, **row):
        for number in range(10):
            n = draw.choice([1, 1, 2, 3])
            await asyncio.gather(*(one(client, 10 * number + k) for k in range(n)))

    texts = [SUM, ANSWER, "", "é", (SUM, "stop"), ("cut", "length")]
    lines = [draw.choice(texts) for _ in range(30)]
    outputs, engine = play(chat, *lines, max_response_tokens=2000, max_assistant_turns=0)
    assert len(engine.said) >= 10
    assert_exact(outputs, engine.said)
    assert max(engine.said) == max(outputs[-1].response_versions)  # who spoke last is last


@pytest.mark.parametrize("how, params, line, said, reason", [
    (dict(temperature=0.1, seed=7), dict(max_tokens=50), "12" + END, "12", "stop"),
    (dict(max_tokens=99, stop="."), dict(max_tokens=50, stop=["."]), "12.", "12", "stop"),
    (dict(max_completion_tokens=3), dict(max_tokens=3), "12345", "123", "length"),
])  # fmt: skip
def test_max_tokens_and_stop_are_the_agents(play, how, params, line, said, reason):
    """The rest is the run's. A reply without an end of turn continues; the stop string is cut."""

    async def chat(client, prompt, **row):
        completion = await client.chat.completions.create(messages=prompt, **how)
        choice = completion.choices[0]
        assert (choice.finish_reason, choice.message.content) == (reason, said)
        await ask(client, *prompt, choice.message, user("More"))

    sampling = {"temperature": 0.7, "max_tokens": 50}
    (output,), engine = play(chat, (line, "stop"), "ok", sampling=sampling)
    assert engine.params[0] == {"temperature": 0.7} | params
    sampled = said if reason == "length" else line
    end = "" if END in line else END
    assert_output(output, engine, (1, sampled), end + user_turn("More"), (2, "ok" + END))


def test_an_agent_that_runs_out_of_budget_keeps_what_it_has(play):
    async def chat(client, prompt, **row):
        try:
            await solve(client, prompt)
        except OutOfBudget:  # as a framework hides it
            raise ExceptionGroup("errors in a TaskGroup", [KeyError("state")]) from None

    (output,), engine = play(chat, SUM, max_response_tokens=16)  # of the call and its answer
    assert_output(output, engine, (1, SUM + END))
    assert (output.stop_reason, output.truncated, output.reward) == ("length", True, None)


def test_a_call_without_a_reply_leaves_no_trace(play):
    """The agent gives it up, the engine fails, or the agent ends without waiting."""

    async def chat(client, prompt, **row):
        history = [*prompt, await ask(client, *prompt), user("More.")]
        await ask(client, user("Help."))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(client, *history), 0.01)
        with pytest.raises(RuntimeError, match="out of memory"):
            await ask(client, *history)
        history.append(await ask(client, *history))
        background.append(asyncio.ensure_future(ask(client, *history, user("Bye."))))
        await asyncio.sleep(0.01)
        return 0.5

    background = []
    lines = ("plan", "yes", NEVER, RuntimeError("out of memory"), "done", NEVER)
    (helper, main), engine = play(chat, *lines)
    assert_output(helper, engine, (2, "yes" + END))
    assert_output(main, engine, (1, "plan" + END), user_turn("More."), (5, "done" + END))
    assert [helper.reward, main.reward] == [None, 0.5]
    assert background[0].cancelled()


def test_an_error_of_the_agent_drops_its_rollout_and_a_timeout_keeps_it(play):
    async def fails(client, prompt, **row):
        await ask(client, *prompt)
        raise TimeoutError("a bug")

    async def hangs(client, prompt, **row):
        await ask(client, *prompt)
        await too_late()

    with pytest.raises(TimeoutError, match="a bug"):
        play(fails, "2", trajectory_timeout=HANGS)
    (output,), engine = play(hangs, "2", trajectory_timeout=HANGS)
    assert_output(output, engine, (1, "2" + END))
    assert (output.stop_reason, output.reward, output.truncated) == ("timeout", None, False)
