"""flatrl/chat/openai_api.py: requests as frameworks send them, by the openai client.

The engine is test_chat.py's. The constraints of response_format on the real engine stand last."""

import functools
from types import SimpleNamespace

import openai
import pytest
from conftest import make_run
from test_agent_loop import ANSWER, END, PROMPT, SUM, call, encode, tool_turn, user_turn
from test_chat import (  # noqa: F401
    CALCULATOR,
    FIRST_WITH_TOOLS,
    FORCED,
    OTHER,
    assert_exact,
    assert_output,
    endpoint,
    make,
    openai_client,
    play,
    play_http,
    user,
)
from test_rollout import hf_model, wake

import agent_loop
from flatrl.chat import openai_api
from flatrl.chat.endpoint import EndpointLoop
from rollout import rollout

SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TOOL = {"type": "function"} | CALCULATOR["function"]  # of the Responses API


@pytest.fixture
def warnings(monkeypatch):
    monkeypatch.setattr(openai_api, "warned", set())
    return openai_api.warned


async def create(client, messages, **how):
    return await client.chat.completions.create(model="x", messages=messages, **how)


# ---------------------------------------------------------------- chat completions


def test_a_streamed_reply_ends_with_its_reason_and_usage(play_http, tokenizer):  # noqa: F811
    async def agent(client, row, *_):
        how = dict(stream=True, stream_options={"include_usage": True})
        said, reason, usage = [chunk async for chunk in await create(client, row["prompt"], **how)]
        assert said.choices[0].delta.content == ANSWER
        assert reason.choices[0].finish_reason == "stop"
        assert usage.usage.completion_tokens == len(encode(tokenizer, ANSWER + END))

    (output,), engine = play_http(agent, ANSWER)
    assert_output(output, engine, (1, ANSWER + END))


def test_n_replies_are_n_sequences(play_http, tokenizer):  # noqa: F811
    async def agent(client, row, *_):
        one = await create(client, row["prompt"])
        messages = [*row["prompt"], one.choices[0].message, user("Sure?")]
        three = await create(client, messages, n=3)
        said = [(choice.index, choice.message.content) for choice in three.choices]
        assert said == [(0, "yes"), (1, "no"), (2, "well")]
        sampled = sum(len(encode(tokenizer, text + END)) for text in ("yes", "no", "well"))
        assert three.usage.completion_tokens == sampled

    outputs, engine = play_http(agent, "2", "yes", "no", "well")
    assert_output(outputs[0], engine, (1, "2" + END), user_turn("Sure?"), (2, "yes" + END))
    assert_output(outputs[1], engine, (3, "no" + END))
    assert_output(outputs[2], engine, (4, "well" + END))
    assert_exact(outputs, engine)


def test_only_the_first_of_parallel_calls_where_they_are_refused(play_http):  # noqa: F811
    async def agent(client, row, *_):
        how = dict(tools=[CALCULATOR], parallel_tool_calls=False)
        first = (await create(client, row["prompt"], **how)).choices[0].message
        assert [made.id for made in first.tool_calls] == ["000001000"]
        answer = {"role": "tool", "tool_call_id": "000001000", "content": "2"}
        await create(client, [*row["prompt"], first, answer], **how)

    turn = SUM + "\n" + call(expression="2*3")
    (output,), engine = play_http(agent, turn, ANSWER)
    assert_output(output, engine, (1, turn + END), tool_turn("2"), (2, ANSWER + END))
    assert output.metrics == {"turns": 2, "tool_calls": 1, "tool_calls/calculator": 1}


REFUSED = {
    "several": (dict(top_logprobs=3, functions=[{"name": "f"}]), "functions, top_logprobs"),
    "an unknown tool": (dict(tools=[OTHER], tool_choice=FORCED), "does not match any"),
    "an unknown format": (dict(response_format={"type": "xml"}), "response_format"),
}


@pytest.mark.parametrize("how, said", REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_told_and_costs_nothing(play_http, how, said):  # noqa: F811
    async def agent(client, row, *_):
        with pytest.raises(openai.BadRequestError, match=said):
            await create(client, row["prompt"], **how)

    outputs, engine = play_http(agent)
    assert (outputs, engine.prompts) == ([], [])


# ---------------------------------------------------------------- response_format


def test_a_free_loop_trains_it(play_http, monkeypatch, warnings):  # noqa: F811
    async def agent(client, row, *_):
        await create(client, row["prompt"], response_format=JSON)

    monkeypatch.setattr(EndpointLoop, "constrains", False)
    (output,), engine = play_http(agent, "2")
    assert_output(output, engine, (1, "2" + END))
    assert engine.params[0].keys() == {"max_tokens"} and not warnings


# ---------------------------------------------------------------- Responses


def reply_of(response) -> list[tuple]:
    items = response.output
    return [(item.type, getattr(item, "arguments", "") or item.content[0].text) for item in items]


async def respond(client, stream: bool, **how):
    """Returns a response, and its events if it was streamed."""
    create = functools.partial(client.responses.create, model="policy", **how)
    if not stream:
        return await create(), []
    events = [event async for event in await create(stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events[-1].response, events


def test_responses_continue_as_one_output(play_http, tokenizer):  # noqa: F811
    turns = [
        [("message", "Hm."), ("function_call", '{"expression": "1+1"}')],
        [("message", ANSWER)],
    ]

    async def agent(client, row, *_):
        how = dict(instructions="Be brief.", tools=[TOOL], store=False)
        text = {"type": "input_text", "text": "What is 1+1?"}
        items = [{"role": "user", "content": [text]}]
        for line, expected in zip(("Hm." + SUM, ANSWER), turns):
            response, events = await respond(client, True, input=items, **how)
            assert reply_of(response) == expected and response.status == "completed"
            assert response.usage.output_tokens == len(encode(tokenizer, line + END))
            deltas = [event.delta for event in events if event.type.endswith(".delta")]
            assert deltas == [text for _, text in expected]
            items += [item.model_dump() for item in response.output]
            for made in response.output[1:]:
                answer = {"type": "function_call_output", "call_id": made.call_id, "output": "2"}
                items.append(answer)

    (output,), engine = play_http(agent, "Hm." + SUM, ANSWER)
    start = FIRST_WITH_TOOLS.replace("Tools:", "Be brief.\nTools:")
    assert output.prompt_ids == encode(tokenizer, start)
    assert_output(output, engine, (1, "Hm." + SUM + END), tool_turn("2"), (2, ANSWER + END))


def test_a_response_that_was_cut_is_incomplete(play_http):  # noqa: F811
    async def agent(client, row, *_):
        response, events = await respond(client, True, input="Count.", max_output_tokens=3)
        assert response.incomplete_details.reason == "max_output_tokens"
        assert reply_of(response) == [("message", "123")]
        assert response.status == "incomplete" and events[-1].type == "response.incomplete"

    (output,), engine = play_http(agent, "12345")
    assert_output(output, engine, (1, "123"))


def test_a_response_has_reasoning_and_a_format(play_http):  # noqa: F811
    async def agent(client, row, *_):
        form = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
        include = ["reasoning.encrypted_content"]
        first, _ = await respond(client, True, input="Hi", include=include)
        assert reply_of(first) == [("reasoning", "Hm"), ("message", "2")]
        items = [user("Hi"), *(item.model_dump() for item in first.output), user("In JSON")]
        await respond(client, False, input=items, text={"format": form})

    thought = "<think>Hm</think>2"
    (output,), engine = play_http(agent, thought, '{"n": 2}')
    given = user_turn("In JSON") + '{"n": 2}' + END
    assert_output(output, engine, (1, thought + END), given)
    assert engine.params[1]["structured_outputs"].json == SCHEMA


REFUSED_RESPONSES = {
    "previous": (dict(input="Hi", previous_response_id="resp_1"), "previous_response_id"),
    "a tool of theirs": (dict(input="Hi", tools=[{"type": "web_search"}]), "not web_search"),
    "an item": (dict(input=[{"type": "item_reference", "id": "msg_1"}]), "input"),
}


@pytest.mark.parametrize("how, said", REFUSED_RESPONSES.values(), ids=REFUSED_RESPONSES)
def test_a_response_that_can_not_be_made_is_refused(play_http, how, said):  # noqa: F811
    async def agent(client, row, *_):
        with pytest.raises(openai.BadRequestError, match=said):
            await client.responses.create(model="policy", **how)

    assert play_http(agent)[0] == []


# ---------------------------------------------------------------- on vLLM


def test_vllm_keeps_to_a_format(
    engine,
    background,
    tokenizer,
    tiny_model,
    args,
    endpoint,  # noqa: F811
    monkeypatch,
):
    """A random model, whose free replies are garbage: only these are trained."""
    answers = ('"yes"', '"no"')
    said = {"schema": [], "schema or tool": [], "object": [], "free": []}
    schema = {"name": "x", "schema": {"enum": ["yes", "no"]}}
    form = {"type": "json_schema", "json_schema": schema}
    wanted = [
        dict(response_format=form),
        dict(response_format=form, tools=[CALCULATOR]),
        dict(response_format={"type": "json_object"}),
        dict(response_format={"type": "text"}),
    ]

    class Agent(EndpointLoop):
        async def agent(self, base_url, api_key, row):
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
                for texts, how in zip(said.values(), wanted, strict=True):
                    reply = await create(client, row["prompt"], max_tokens=9, **how)
                    texts.append(reply.choices[0].message.content)

    monkeypatch.setitem(agent_loop.AGENT_LOOPS, "in_a_format", Agent)
    wake(engine, hf_model(tiny_model), 0)
    task = SimpleNamespace(reward=lambda output, row: 0.0)
    run = make_run(engine, background, task, tokenizer, args)
    row = {"prompt": PROMPT, "agent_name": "in_a_format"}
    rollouts = rollout(run, [row], 0, 2, {"temperature": 1.0})
    assert not rollouts.errors
    assert {*said["schema"]} <= {*answers}
    for text in said["schema or tool"]:
        assert text in answers or text.startswith("<tool_cal")
    assert all(text.lstrip().startswith("{") for text in said["object"])
    is_trained = [sum(output.response_mask) > 0 for output in rollouts.trained]
    assert is_trained == [False, False, False, True] * 2
