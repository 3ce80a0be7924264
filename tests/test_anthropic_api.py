"""flatrl/chat/anthropic_api.py: the anthropic client, and the agent that comes with it, unchanged.

The engine is test_chat.py's."""

import anthropic
import pytest
from test_agent_loop import ANSWER, END, PROMPT, SUM, call, encode, tool_turn, user_turn
from test_chat import (  # noqa: F401
    CALCULATOR,
    FIRST_WITH_TOOLS,
    assert_exact,
    assert_output,
    bearer,
    endpoint,
    make,
    play,
    post,
)
from test_openai_api import SCHEMA, warnings  # noqa: F401

from examples import calculator
from flatrl.chat import anthropic_api
from flatrl.chat.endpoint import EndpointLoop

FUNCTION = CALCULATOR["function"]
TOOL = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}
WITH_SYSTEM = FIRST_WITH_TOOLS.replace("Tools:", "Be brief.\nTools:")


@pytest.fixture
def play_anthropic(play, endpoint):  # noqa: F811
    """play_anthropic(agent, line, ..., **how as in play); the agent is called with a client."""

    def play_anthropic(agent, *lines, **how):
        async def connected(base_url, api_key, row):
            make_client = anthropic.AsyncAnthropic
            async with make_client(base_url=base_url, api_key=api_key, max_retries=0) as client:
                return await agent(client)

        return play(connected, *lines, base=EndpointLoop, **how)

    return play_anthropic


async def create(client, messages=PROMPT, **how):
    how = {"max_tokens": 1000} | how
    return await client.messages.create(model="policy", messages=messages, **how)


def parts_of(message) -> list[tuple]:
    """A message's blocks: their types, and what they hold."""
    keys = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block.type, getattr(block, keys[block.type])) for block in message.content]


@anthropic.beta_async_tool(name="calculator")
async def calculate(expression: str) -> str:
    """Evaluates an expression."""
    return calculator.calculator(expression)


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_own_agent_is_one_output(play_anthropic, tokenizer, stream):
    lines = ("Hm. é " + SUM + "\n" + call(expression="2*3"), ANSWER)
    # Claude Code's line, which differs from request to request, and a mark that moves.
    changing = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}
    brief = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}

    async def agent(client):
        run = client.beta.messages.tool_runner(
            model="policy",
            max_tokens=1000,
            messages=PROMPT,
            system=[changing, brief],
            tools=[calculate],
            stream=stream,
        )
        replies = []
        async for reply in run:
            replies.append(await reply.get_final_message() if stream else reply)
        used, ended = replies
        calls = [("tool_use", {"expression": text}) for text in ("1+1", "2*3")]
        assert parts_of(used) == [("text", "Hm. é "), *calls]
        assert used.stop_reason == "tool_use"
        assert parts_of(ended) == [("text", ANSWER)] and ended.stop_reason == "end_turn"
        assert ended.usage.output_tokens == len(encode(tokenizer, ANSWER + END))
        return 0.5

    (output,), engine = play_anthropic(agent, *lines)
    assert output.prompt_ids == encode(tokenizer, WITH_SYSTEM)
    answers = tool_turn("2", "6")
    assert_output(output, engine, (1, lines[0] + END), answers, (2, ANSWER + END))
    counted = {"turns": 2, "tool_calls": 2, "tool_calls/calculator": 2}
    assert (output.reward, output.metrics) == (0.5, counted)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_goes_back_and_forth(play_anthropic, stream):
    thought = "<think>Hm</think>2"

    async def agent(client):
        if stream:
            how = dict(model="policy", max_tokens=1000, messages=PROMPT)
            async with client.messages.stream(**how) as events:
                kinds = [event.type async for event in events]
                first = await events.get_final_message()
            assert kinds.count("thinking") == kinds.count("text") == 1
        else:
            first = await create(client)
        assert parts_of(first) == [("thinking", "Hm"), ("text", "2")]
        again = [*PROMPT, first.to_param(), {"role": "user", "content": "Sure?"}]
        await create(client, again)

    (output,), engine = play_anthropic(agent, thought, "yes")
    assert_output(output, engine, (1, thought + END), user_turn("Sure?"), (2, "yes" + END))


@pytest.mark.parametrize("how, line, said, reason, stopped_by", [
    (dict(max_tokens=3), "12345", "123", "max_tokens", None),
    (dict(stop_sequences=["x", ".", "3."]), ("123.", "stop"), "12", "stop_sequence", "3."),
    (dict(stop_sequences=["x"]), "123", "123", "end_turn", None),
    (dict(tools=[TOOL], tool_choice={"type": "none"}), SUM, SUM, "end_turn", None),
])  # fmt: skip
def test_why_a_reply_ends(play_anthropic, how, line, said, reason, stopped_by):
    async def agent(client):
        reply = await create(client, **how)
        assert parts_of(reply) == [("text", said)]
        assert (reply.stop_reason, reply.stop_sequence) == (reason, stopped_by)

    _, engine = play_anthropic(agent, line)
    assert engine.params[0].get("stop") == how.get("stop_sequences")


def test_what_is_the_runs_own_is_ignored_with_a_warning(play_anthropic, warnings):  # noqa: F811
    async def agent(client):
        forced = {"type": "any", "disable_parallel_tool_use": True}
        thinking = {"type": "enabled", "budget_tokens": 1024}
        how = dict(tools=[TOOL], tool_choice=forced, thinking=thinking, extra_body={"top_k": 3})
        reply = await create(client, **how)
        assert parts_of(reply) == [("tool_use", {"expression": "1+1"})]
        form = {"format": {"type": "json_schema", "schema": SCHEMA}}
        await create(client, output_config=form)

    line = SUM + "\n" + call(expression="2*3")
    outputs, engine = play_anthropic(agent, line, '{"n": 2}')
    assert_output(outputs[0], engine, (1, line + END))
    assert sum(outputs[1].response_mask) == 0
    assert engine.params[1]["structured_outputs"].json == SCHEMA
    for name in ("thinking", "top_k", "tool_choice", "response_format"):
        assert any(name in warning for warning in warnings)


def test_tokens_are_counted(play_anthropic, tokenizer):
    async def agent(client):
        how = dict(model="policy", messages=PROMPT, system="Be brief.", tools=[TOOL])
        count = await client.messages.count_tokens(**how)
        how["messages"] = [{"role": "system", "content": how.pop("system")}, *PROMPT]
        assert count.input_tokens == len(encode(tokenizer, WITH_SYSTEM))
        reply = await client.messages.create(max_tokens=9, **how)
        assert reply.usage.input_tokens == count.input_tokens

    (output,), engine = play_anthropic(agent, "2")
    assert_exact([output], engine)


def test_a_tool_result_and_images_as_chat_messages():
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    blocks = [{"type": "text", "text": "a"}, {"type": "image", "source": source}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": blocks}
    text = {"type": "text", "text": "And?"}
    message = {"role": "user", "content": [text, result]}
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert anthropic_api.chat_of({"messages": [message]})["messages"] == [
        {"role": "tool", "tool_call_id": "1", "content": [blocks[0], url]},
        {"role": "user", "content": [text]},
    ]


BROWSER = {"type": "web_search_20250305", "name": "web_search"}
PREFILLED = [*PROMPT, {"role": "assistant", "content": "The"}]
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "x", "media_type": "text/plain"}}
REFUSED = {
    "a tool of theirs": (dict(tools=[BROWSER]), "not 'web_search_20250305'"),
    "a prefilled reply": (dict(messages=PREFILLED), "prefills the reply"),
    "a document": (dict(messages=[{"role": "user", "content": [DOCUMENT]}]), "not 'document'"),
    "no messages": (dict(messages=[]), "IndexError"),
    "a container": (dict(container="c"), "not supported: container"),
}


@pytest.mark.parametrize("how, said", REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_refused(play_anthropic, how, said):
    async def agent(client):
        with pytest.raises(anthropic.BadRequestError, match=said) as raised:
            await create(client, **how)
        assert raised.value.body["error"]["type"] == "invalid_request_error"

    outputs, engine = play_anthropic(agent)
    assert (outputs, engine.prompts) == ([], [])


def test_keys_and_budgets(play, endpoint):  # noqa: F811
    """The key comes in either header; without room the error is the one that agents compact at."""

    async def agent(base_url, api_key, row):
        body = {"messages": PROMPT, "max_tokens": 9}
        wrong = {"x-api-key": "wrong"}
        for url in (f"{base_url}/messages", f"{base_url}/v1/messages/count_tokens"):
            for headers in ({}, wrong, bearer("wrong")):
                answer = await post(url, body, headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["type"] == "authentication_error"
        for headers in ({"x-api-key": api_key}, bearer(api_key) | wrong):
            assert (await post(f"{base_url}/v1/messages", body, headers)).status_code == 200
        body["messages"] = [{"role": "user", "content": "x" * 5000}]
        answer = await post(f"{base_url}/messages", body, bearer(api_key))
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("prompt is too long")

    outputs, engine = play(agent, "2", "3", base=EndpointLoop, max_model_len=1000)
    assert_exact(outputs, engine)
