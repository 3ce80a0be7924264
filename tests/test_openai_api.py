"""flatrl/chat/openai_api.py: requests as frameworks send them, by the openai client; the engine is test_chat.py's.

The constraints of response_format on the real engine stand at the end.
"""

import copy
import functools
import json
from types import SimpleNamespace

import openai
import pytest
from conftest import make_run
from test_agent_loop import (
    ANSWER,
    END,
    PROMPT,
    SUM,
    call,
    encode,
    logprobs_of,
    tool_turn,
    user_turn,
)
from test_chat import (  # noqa: F401
    CALCULATOR,
    FIRST_WITH_TOOLS,
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

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
FORCED = {"type": "function", "function": {"name": "calculator"}}
TOOL = {"type": "function"} | CALCULATOR["function"]  # of the Responses API


@pytest.fixture
def warnings(monkeypatch):
    monkeypatch.setattr(openai_api, "warned", set())
    return openai_api.warned


# ---------------------------------------------------------------------------------------------------------------------
# Chat completions


@pytest.mark.parametrize("usage", [False, True])
def test_a_reply_is_streamed(play_http, tokenizer, usage):  # noqa: F811
    options = {"stream_options": {"include_usage": True}} if usage else {}

    async def streamed(client, *messages):
        how = dict(model="x", tools=[CALCULATOR], stream=True, **options)
        stream = await client.chat.completions.create(messages=list(messages), **how)
        return [chunk async for chunk in stream]

    async def agent(client, row, *_):
        first = await streamed(client, *row["prompt"])
        (made,) = first[0].choices[0].delta.tool_calls
        assert (made.index, made.function.name, made.function.arguments) == (0, "calculator", '{"expression": "1+1"}')
        history = [*row["prompt"], {"role": "assistant", "tool_calls": [made.model_dump(exclude={"index"})]}]
        second = await streamed(client, *history, {"role": "tool", "tool_call_id": made.id, "content": "2"})
        assert second[0].choices[0].delta.content == ANSWER
        for chunks, reason in ((first, "tool_calls"), (second, "stop")):
            assert chunks[1].choices[0].finish_reason == reason and len({chunk.id for chunk in chunks}) == 1
            assert len(chunks) == 2 + usage
        if usage:
            assert second[2].choices == [] and second[2].usage.completion_tokens == len(encode(tokenizer, ANSWER + END))

    (output,), engine = play_http(agent, SUM, ANSWER)
    assert_output(output, engine, (1, SUM + END), tool_turn("2"), (2, ANSWER + END))


def test_n_replies_are_n_sequences(play_http, tokenizer):  # noqa: F811
    async def agent(client, row, *_):
        one = await client.chat.completions.create(model="x", messages=row["prompt"])
        messages = [*row["prompt"], one.choices[0].message, user("Sure?")]
        three = await client.chat.completions.create(model="x", messages=messages, n=3)
        assert [(c.index, c.message.content) for c in three.choices] == [(0, "yes"), (1, "no"), (2, "well")]
        sampled = sum(len(encode(tokenizer, text + END)) for text in ("yes", "no", "well"))
        assert three.usage.completion_tokens == sampled == three.usage.total_tokens - three.usage.prompt_tokens
        with pytest.raises(openai.BadRequestError, match="at least 1 choice"):
            await client.chat.completions.create(model="x", messages=messages, n=-1)

    outputs, engine = play_http(agent, "2", "yes", "no", "well")
    assert_output(outputs[0], engine, (1, "2" + END), user_turn("Sure?"), (2, "yes" + END))
    assert_output(outputs[1], engine, (3, "no" + END))
    assert_output(outputs[2], engine, (4, "well" + END))
    assert_exact(outputs, engine)


@pytest.mark.parametrize("choice", ["required", FORCED])
def test_a_forced_tool_choice_is_auto_with_a_warning(play_http, warnings, choice):  # noqa: F811
    async def agent(client, row, *_):
        how = dict(model="x", messages=row["prompt"], tools=[CALCULATOR, OTHER], tool_choice=choice)
        for tool_calls in (True, False):
            reply = (await client.chat.completions.create(**how)).choices[0].message
            assert bool(reply.tool_calls) == tool_calls

    outputs, engine = play_http(agent, SUM, ANSWER)
    assert_exact(outputs, engine)
    assert not any("structured_outputs" in params for params in engine.params)
    assert warnings == {"an agent forces a tool call by tool_choice, which is taken as 'auto'"}


def test_only_the_first_of_parallel_calls_where_they_are_refused(play_http):  # noqa: F811
    async def agent(client, row, *_):
        how = dict(model="x", tools=[CALCULATOR], parallel_tool_calls=False)
        first = (await client.chat.completions.create(messages=row["prompt"], **how)).choices[0].message
        assert [made.id for made in first.tool_calls] == ["000001000"]
        answer = {"role": "tool", "tool_call_id": "000001000", "content": "2"}
        await client.chat.completions.create(messages=[*row["prompt"], first, answer], **how)

    turn = SUM + "\n" + call(expression="2*3")
    (output,), engine = play_http(agent, turn, ANSWER)
    assert_output(output, engine, (1, turn + END), tool_turn("2"), (2, ANSWER + END))
    assert output.metrics == {"turns": 2, "tool_calls": 1}


def test_what_is_ignored_is_warned_of_once(play_http, warnings, capsys):  # noqa: F811
    async def agent(client, row, *_):
        how = dict(temperature=0.0, top_p=0.5, seed=7, user="u", metadata={"a": "b"}, frequency_penalty=None)
        for _ in range(2):
            await client.chat.completions.create(model="x", messages=row["prompt"], **how)

    _, engine = play_http(agent, "2", "2")
    assert [params.keys() for params in engine.params] == [{"max_tokens"}] * 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: an agent")]
    assert [line.split()[4].strip(",") for line in said] == ["seed", "temperature", "top_p"]


REFUSED = {
    "unknown": (dict(extra_body={"echo": True}), "not supported: echo"),
    "several": (dict(top_logprobs=3, logprobs=True, functions=[{"name": "f"}]), "functions, top_logprobs"),
    "required, but no tools": (dict(tool_choice="required"), "tools"),
    "an unknown tool": (dict(tools=[OTHER], tool_choice=FORCED), "does not match any"),
    "an unknown choice": (dict(tools=[OTHER], tool_choice="sometimes"), "tool_choice"),
    "an unknown format": (dict(response_format={"type": "xml"}), "response_format"),
    "a format without a schema": (dict(response_format={"type": "json_schema"}), "json_schema"),
}


@pytest.mark.parametrize("how, said", REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_told_and_costs_nothing(play_http, how, said):  # noqa: F811
    async def agent(client, row, *_):
        with pytest.raises(openai.BadRequestError, match=said):
            await client.chat.completions.create(model="x", messages=row["prompt"], **how)
        await client.chat.completions.create(model="x", messages=row["prompt"])

    (output,), engine = play_http(agent, "2")
    assert_output(output, engine, (1, "2" + END))


# ---------------------------------------------------------------------------------------------------------------------
# response_format


def test_a_reply_in_a_format_is_not_trained(play_http, warnings):  # noqa: F811
    async def agent(client, row, *_):
        text = await client.chat.completions.create(
            model="x", messages=row["prompt"], response_format={"type": "text"}, tools=[CALCULATOR]
        )
        messages = [*row["prompt"], text.choices[0].message, user("In JSON")]
        await client.chat.completions.create(model="x", messages=messages, response_format=JSON, tools=[CALCULATOR])
        return 0.5

    (output,), engine = play_http(agent, "2", '{"n": 2}')
    assert_output(output, engine, (1, "2" + END), user_turn("In JSON") + '{"n": 2}' + END)
    assert (output.messages[-1]["content"], output.reward, output.num_turns) == ('{"n": 2}', 0.5, 4)
    text, constrained = engine.params
    assert "structured_outputs" not in text and len(warnings) == 1
    tag = json.loads(constrained["structured_outputs"].structural_tag)  # a call, as the parser reads it, or the JSON
    calls, form = tag["format"]["elements"]
    assert form["json_schema"] == SCHEMA
    assert '<tool_call>\n{"name": "calculator", "arguments": ' in [begins["begin"] for begins in calls["tags"]]


def test_a_free_loop_trains_it(play_http, monkeypatch, warnings):  # noqa: F811
    async def agent(client, row, *_):
        await client.chat.completions.create(model="x", messages=row["prompt"], response_format=JSON)

    monkeypatch.setattr(EndpointLoop, "constrains", False)
    (output,), engine = play_http(agent, "2")
    assert_output(output, engine, (1, "2" + END))
    assert engine.params[0].keys() == {"max_tokens"} and not warnings


def test_the_last_words_in_a_format_after_a_rewritten_history_are_the_last_output(play_http, tokenizer):  # noqa: F811
    """Its tokens are not trained; but what it says is what the reward is asked of."""
    changing = copy.deepcopy(tokenizer)
    changing.chat_template = (
        "{% for m in messages %}{{ m.content if m.role == 'user' or loop.last else '(cut)' }}<|im_end|>{% endfor %}"
    )

    async def agent(client, row, *_):
        first = await client.chat.completions.create(model="x", messages=[user("Hi")])
        messages = [user("Hi"), first.choices[0].message, user("In JSON")]
        await client.chat.completions.create(model="x", messages=messages, response_format=JSON)

    first, last = play_http(agent, "one", '{"n": 1}', tokenizer=changing)[0]
    assert sum(first.response_mask) > 0 == sum(last.response_mask)
    assert last.messages[-1]["content"] == '{"n": 1}'


# ---------------------------------------------------------------------------------------------------------------------
# Responses


def reply_of(response) -> list[tuple]:
    return [(item.type, getattr(item, "arguments", None) or item.content[0].text) for item in response.output]


async def respond(client, stream: bool, **how):
    """A response, and its events if it was streamed."""
    if not stream:
        return await client.responses.create(model="policy", **how), []
    events = [event async for event in await client.responses.create(model="policy", stream=True, **how)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events[-1].response, events


@pytest.mark.parametrize("stream", [False, True])
def test_responses_go_on_as_one_output(play_http, tokenizer, stream):  # noqa: F811
    async def agent(client, row, *_):
        how = dict(instructions="Be brief.", tools=[TOOL], store=False)
        items = [{"role": "user", "content": [{"type": "input_text", "text": "What is 1+1?"}]}]
        for number, expected in enumerate([[("message", "Hm."), ("function_call", '{"expression": "1+1"}')],
                                           [("message", ANSWER)]]):  # fmt: skip
            response, events = await respond(client, stream, input=items, **how)
            assert reply_of(response) == expected and response.status == "completed"
            sampled = encode(tokenizer, ("Hm." + SUM, ANSWER)[number] + END)
            assert response.usage.output_tokens == len(sampled)
            if stream:
                deltas = [event.delta for event in events if event.type.endswith(".delta")]
                assert deltas == [text for _, text in expected]
                done = [event.item for event in events if event.type == "response.output_item.done"]
                assert done == response.output and events[0].type == "response.created"
            items += [item.model_dump() for item in response.output]
            if number == 0:
                made = response.output[1]
                items.append({"type": "function_call_output", "call_id": made.call_id, "output": "2"})

    (output,), engine = play_http(agent, "Hm." + SUM, ANSWER)
    start = FIRST_WITH_TOOLS.replace("Tools:", "Be brief.\nTools:")
    assert output.prompt_ids == encode(tokenizer, start)
    assert_output(output, engine, (1, "Hm." + SUM + END), tool_turn("2"), (2, ANSWER + END))


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_was_cut_is_incomplete(play_http, stream):  # noqa: F811
    async def agent(client, row, *_):
        response, events = await respond(client, stream, input="Count.", max_output_tokens=3)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert reply_of(response) == [("message", "123")] and (not stream or events[-1].type == "response.incomplete")

    (output,), engine = play_http(agent, "12345")
    assert_output(output, engine, (1, "123"))


def test_a_response_has_reasoning_logprobs_and_a_format(play_http, tokenizer):  # noqa: F811
    async def agent(client, row, *_):
        form = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
        include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
        first, events = await respond(client, True, input="Hi", include=include)
        assert reply_of(first) == [("reasoning", "Hm"), ("message", "2")]
        sampled = logprobs_of(1, len(encode(tokenizer, "<think>Hm</think>2" + END)))
        assert [entry.logprob for entry in first.output[1].content[0].logprobs] == sampled
        items = [user("Hi"), *(item.model_dump() for item in first.output), user("In JSON")]
        await respond(client, False, input=items, text={"format": form})

    (output,), engine = play_http(agent, "<think>Hm</think>2", '{"n": 2}')
    assert_output(output, engine, (1, "<think>Hm</think>2" + END), user_turn("In JSON") + '{"n": 2}' + END)
    assert engine.params[1]["structured_outputs"].json == SCHEMA


REFUSED_RESPONSES = {
    "previous": (dict(input="Hi", previous_response_id="resp_1"), "previous_response_id"),
    "background": (dict(input="Hi", background=True), "background"),
    "a tool of theirs": (dict(input="Hi", tools=[{"type": "web_search"}]), "type function, not web_search"),
    "include": (dict(input="Hi", include=["file_search_call.results"]), "include"),
    "no input": (dict(input=None), "input"),
    "an item": (dict(input=[{"type": "item_reference", "id": "msg_1"}]), "input"),
    "a file": (dict(input=[user([{"type": "input_file", "file_data": "x"}])]), "text content"),
}


@pytest.mark.parametrize("how, said", REFUSED_RESPONSES.values(), ids=REFUSED_RESPONSES)
def test_what_a_response_can_not_be_made_of_is_told(play_http, how, said):  # noqa: F811
    async def agent(client, row, *_):
        with pytest.raises(openai.BadRequestError, match=said):
            await client.responses.create(model="policy", **how)

    assert play_http(agent)[0] == []


# ---------------------------------------------------------------------------------------------------------------------
# On vLLM


def test_vllm_keeps_to_a_format(engine, background, tokenizer, tiny_model, args, endpoint, monkeypatch):  # noqa: F811
    """A random model, whose free replies are garbage: JSON by a schema, or a call of the tool; only free ones train."""
    said = {"schema": [], "schema or tool": [], "object": [], "free": []}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    wanted = (
        dict(response_format=form), dict(response_format=form, tools=[CALCULATOR]),
        dict(response_format={"type": "json_object"}), dict(response_format={"type": "text"}),
    )  # fmt: skip
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}

    class Agent(EndpointLoop):
        async def agent(self, base_url, api_key, row):
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                ask = functools.partial(client.chat.completions.create, model="x", messages=row["prompt"], max_tokens=9)
                for texts, how in zip(said.values(), wanted, strict=True):
                    texts.append((await ask(**how)).choices[0].message.content)
                with pytest.raises(openai.BadRequestError, match="nothing"):
                    await ask(response_format=broken)

    monkeypatch.setitem(agent_loop.AGENT_LOOPS, "in_a_format", Agent)
    wake(engine, hf_model(tiny_model), 0)
    task = SimpleNamespace(reward=lambda output, row: 0.0)
    run = make_run(engine, background, task, tokenizer, args)
    phase = rollout(run, [{"prompt": PROMPT, "agent_name": "in_a_format"}], 0, 2, {"temperature": 1.0})
    assert not phase.counts, phase.errors
    assert {*said["schema"]} <= {'"yes"', '"no"'}
    assert all(text in ('"yes"', '"no"') or text.startswith("<tool_cal") for text in said["schema or tool"])
    assert all(text.lstrip().startswith("{") for text in said["object"])
    assert [sum(output.response_mask) > 0 for output in phase.trained] == [False, False, False, True] * 2
    assert all(len(output.response_ids) > 0 for output in phase.trained)
