"""Agents over HTTP, flatrl/chat/: the clients of OpenAI and Anthropic, unpatched.

The engine says its lines (see test_chat.py)."""

import dataclasses

import anthropic
import httpx
import openai
import pytest
from conftest import HANGS
from test_agent_loop import ANSWER, BACKGROUND, END, NEVER, SUM, encode, tool_turn, user, user_turn
from test_chat import CALCULATOR, FIRST_WITH_TOOLS, ask, assert_output, player, solve

from examples import calculator
from flatrl.chat import endpoint as chat_endpoint
from flatrl.chat.endpoint import EndpointLoop

FUNCTION = CALCULATOR["function"]
PARALLEL = SUM + "\n" + SUM.replace("1+1", "2*3")
WITH_SYSTEM = FIRST_WITH_TOOLS.replace("Tools:", "Be brief.\nTools:")


@pytest.fixture
def endpoint(monkeypatch):
    """A fresh endpoint, closed in the end. A proxy that is not there stands in the environment."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    endpoint = chat_endpoint.ChatEndpoint()
    monkeypatch.setattr(chat_endpoint, "ENDPOINT", endpoint)
    yield endpoint
    if endpoint.started is not None:
        BACKGROUND.submit(endpoint.runner.cleanup()).result(HANGS)


@pytest.fixture
def play(endpoint, tokenizer):
    """play(agent, line, ...): the agent is called with (a client, the row's prompt)."""
    play_url = player(tokenizer, EndpointLoop, "agent")

    def play(agent, *lines, client_class=openai.AsyncOpenAI, **how):
        async def connected(base_url, api_key, row):
            async with client_class(base_url=base_url, api_key=api_key, max_retries=0) as client:
                return await agent(client, row["prompt"])

        outputs, engine = play_url(connected, *lines, **how)
        assert endpoint.clients == {}
        return outputs, engine

    return play


async def post(client, path: str, body: dict, key: str | None = None) -> httpx.Response:
    """Sends a request as it is, by default with the client's key; returns the answer."""
    key = client.api_key if key is None else key
    headers = {"Authorization": f"Bearer {key}".encode("latin-1")} if key else {}
    async with httpx.AsyncClient(trust_env=False, timeout=HANGS) as http:
        return await http.post(f"{client.base_url}{path}", json=body, headers=headers)


def test_http_gives_the_same_outputs_as_in_process(play, tokenizer):
    async def agent(client, prompt, **row):
        history = await solve(client, prompt)
        await ask(client, user("Is that right?"), max_tokens=4)
        await ask(client, *history, user("Sure?"), tools=[CALCULATOR], temperature=0.3)
        return 0.5

    lines = ("Hm. é " + SUM, ANSWER, "certainly", "yes")
    here, engine = player(tokenizer)(agent, *lines)
    there, remote = play(agent, *lines)
    assert list(map(dataclasses.asdict, there)) == list(map(dataclasses.asdict, here))
    assert (remote.prompts, remote.params) == (engine.prompts, engine.params)


def test_only_the_key_lets_in_and_a_posted_reward_is_used(play, endpoint):
    """From loopback only. A reward that the agent returns counts more."""

    async def agent(client, prompt):
        endpoint.clients["another"] = None, "its key"
        for key in ("wrong", "\xe9", "its key", ""):
            for path in ("chat/completions", "messages", "reward"):
                body = {"messages": [user("hi")], "reward": 9.0}
                assert (await post(client, path, body, key)).status_code == 401
        del endpoint.clients["another"]
        await ask(client, *prompt)
        bad = {"reward": "high"}, {"reward": 10**400}, {}
        for body in ({"reward": 0.5}, {"reward": 0.75}, *bad):
            answer = await post(client, "reward", body)
            assert answer.status_code == (200 if isinstance(body.get("reward"), float) else 400)
        ((bound, _),) = endpoint.runner.addresses
        assert bound == "127.0.0.1"
        return rewards.pop()

    rewards = [None, 0.0]
    for expected in (0.0, 0.75):
        (output,), engine = play(agent, "2")
        assert_output(output, engine, (1, "2" + END))
        assert output.reward == expected


def test_a_reply_that_nobody_read_is_not_trained(play):
    async def agent(client, prompt):
        with pytest.raises(openai.APITimeoutError):
            await ask(client.with_options(timeout=0.2), *prompt)
        await ask(client, *prompt, await ask(client, *prompt), user("More"))

    (output,), engine = play(agent, NEVER, "2", "ok")
    assert_output(output, engine, (2, "2" + END), user_turn("More"), (3, "ok" + END))


def test_a_plain_agent_in_a_thread_reads_a_stream(endpoint, tokenizer):
    def agent(base_url, api_key, row):
        how = dict(stream=True, stream_options={"include_usage": True}, tools=[CALCULATOR])
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            create = client.chat.completions.create
            said, usage = create(model="policy", messages=row["prompt"], **how)
        (choice,) = said.choices
        assert (choice.delta.content.strip(), choice.finish_reason) == ("Hm.", "tool_calls")
        assert [call.index for call in choice.delta.tool_calls] == [0, 1]
        assert usage.usage.completion_tokens == len(encode(tokenizer, "Hm." + PARALLEL + END))
        return 0.5

    (output,), engine = player(tokenizer, EndpointLoop, "agent")(agent, "Hm." + PARALLEL)
    assert_output(output, engine, (1, "Hm." + PARALLEL + END))
    assert output.reward == 0.5


def test_responses_continue_as_one_output(play, tokenizer):
    lines = "Hm." + SUM, "<think>Hm</think>2", "12345"
    turns = [
        [("message", "Hm."), ("function_call", '{"expression": "1+1"}')],
        [("reasoning", "Hm"), ("message", "2")],
        [("message", "123")],
    ]

    async def agent(client, prompt):
        tool = {"type": "function"} | FUNCTION
        how = dict(instructions="Be brief.", tools=[tool], include=["reasoning.encrypted_content"])
        items = [{"role": "user", "content": [{"type": "input_text", "text": "What is 1+1?"}]}]
        for expected, limit in zip(turns, (None, None, 3)):
            how |= dict(input=items, max_output_tokens=limit)
            stream = await client.responses.create(model="policy", stream=True, **how)
            events = [event async for event in stream]
            response = events[-1].response
            made = response.output
            texts = [getattr(item, "arguments", "") or item.content[0].text for item in made]
            assert list(zip([item.type for item in made], texts)) == expected
            assert [event.delta for event in events if event.type.endswith(".delta")] == texts
            items += [item.model_dump() for item in made]
            if made[-1].type == "function_call":
                told = {"type": "function_call_output", "output": "2"}
                items.append(told | {"call_id": made[-1].call_id})
            else:
                items.append(user("Count."))
        assert (response.status, events[-1].type) == ("incomplete", "response.incomplete")
        assert response.usage.output_tokens == len(encode(tokenizer, "123"))

    (output,), engine = play(agent, *lines)
    assert output.prompt_ids == encode(tokenizer, WITH_SYSTEM)
    parts = [(1, lines[0] + END), tool_turn("2"), (2, lines[1] + END), user_turn("Count.")]
    assert_output(output, engine, *parts, (3, "123"))


def parts_of(message) -> list[tuple]:
    """A message's blocks: their types, and what they hold."""
    keys = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block.type, getattr(block, keys[block.type])) for block in message.content]


async def calculate(expression: str) -> str:
    """Evaluates an expression."""
    return calculator.calculator(expression)


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_own_agent_is_one_output(play, tokenizer, stream):
    lines = ("<think>Hm</think>é " + PARALLEL, ANSWER)
    # Claude Code's line, which differs from request to request, and a mark that moves.
    changing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1;"}
    joined = changing["text"] + ("\n" if stream else "") + "Be brief."  # as proxies send it
    brief = {"type": "text", "text": joined, "cache_control": {"type": "ephemeral"}}

    async def agent(client, prompt):
        tools = [anthropic.beta_async_tool(calculate, name="calculator")]
        how = dict(model="policy", max_tokens=1000, system=[changing, brief], tools=tools)
        runner = client.beta.messages.tool_runner(messages=prompt, stream=stream, **how)
        replies = [await reply.get_final_message() if stream else reply async for reply in runner]
        used, ended = replies
        calls = [("tool_use", {"expression": text}) for text in ("1+1", "2*3")]
        assert parts_of(used) == [("thinking", "Hm"), ("text", "é "), *calls]
        assert parts_of(ended) == [("text", ANSWER)]
        assert (used.stop_reason, ended.stop_reason) == ("tool_use", "end_turn")
        assert ended.usage.output_tokens == len(encode(tokenizer, ANSWER + END))

    (output,), engine = play(agent, *lines, client_class=anthropic.AsyncAnthropic)
    assert output.prompt_ids == encode(tokenizer, WITH_SYSTEM)
    answers = tool_turn("2", "6")
    assert_output(output, engine, (1, lines[0] + END), answers, (2, ANSWER + END))
    assert output.metrics == {"turns": 2, "tool_calls": 2, "tool_calls/calculator": 2}


def test_a_prompt_that_is_too_long_is_the_error_that_agents_compact_at(endpoint, play):
    """It is not even tokenised."""

    async def agent(client, prompt):
        ((chat, _),) = endpoint.clients.values()
        chat.loop.start = None
        counted = await post(client, "messages/count_tokens", {"messages": [user("x" * 70_000)]})
        assert counted.status_code == 400 and chat.refused is None  # no reply was asked for
        for long in ([user("x" * 70_000)], [user("x")] * 1001):
            answer = await post(client, "messages", {"messages": long, "max_tokens": 9})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith("prompt is too long")

    assert play(agent, max_model_len=1000)[0] == []
