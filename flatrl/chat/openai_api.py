"""OpenAI's chat completions and Responses, both made by ChatClient.create.

Besides its messages, a request may hold:

    stream             works over HTTP, but the whole reply arrives as one chunk
    tools, max_tokens, max_completion_tokens, max_output_tokens, stop, chat_template_kwargs
                       work as OpenAI's and vLLM's
    parallel_tool_calls=false
                       keeps only the first of several calls
    tool_choice        "none" works; "required" and a named tool count as "auto", with a
                       warning, so the reply is sampled freely and trained
    RUNS_OWN           is ignored, with one warning for each name: the run's values are used
    NO_MATTER          is ignored: it makes no difference here
    anything else      is refused if it is set: n > 1, for example, and a response_format, whose
                       constrained tokens the trainer could not score. So is a reference to an
                       earlier response, because none is stored"""

import itertools
import json
import warnings
from collections.abc import Iterator

USED = set(
    "messages tools tool_choice parallel_tool_calls stop max_tokens max_completion_tokens "
    "chat_template_kwargs".split()
)
RUNS_OWN = set(
    "temperature top_p top_k min_p seed frequency_penalty presence_penalty repetition_penalty "
    "logit_bias reasoning reasoning_effort output_config.effort verbosity thinking "
    "context_management".split()
)
NO_MATTER = set(
    "model user metadata store service_tier safety_identifier prompt_cache_key "
    "prompt_cache_retention return_token_ids prediction truncation stream_options cache_control "
    "inference_geo speed".split()
)
# The values that ask for nothing special.
USUAL = {"n": 1, "response_format": {"type": "text"}}


def error(message: str, code: str) -> dict:
    """Returns an error in OpenAI's form."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": code}}


def read_request(body: dict) -> dict:
    """Returns {name in USED: its value or None}. Raises ValueError for what is not supported."""
    asked = {name for name, value in body.items() if value and value != USUAL.get(name)}
    unknown = asked - USED - RUNS_OWN - NO_MATTER
    if unknown:
        raise ValueError(f"not supported: {', '.join(sorted(unknown))}")
    for name in sorted(RUNS_OWN & body.keys()):
        if body[name] is not None:
            problem = f"an agent sets {name}, which is ignored: the run's own is taken"
            warnings.warn(problem, stacklevel=2)
    if body.get("tool_choice") not in (None, "auto", "none"):
        problem = "an agent forces a tool call by tool_choice, which is taken as 'auto'"
        warnings.warn(problem, stacklevel=2)
    return {name: body.get(name) for name in USED}


def chunks(whole: dict, request: dict) -> Iterator[dict]:
    """Yields a chat completion as it is streamed: its message, then its usage, if asked for."""
    head = {key: whole[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    (choice,) = whole["choices"]
    message = choice.pop("message")
    delta = {key: value for key, value in message.items() if value is not None}
    for i, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = i
    yield head | {"choices": [choice | {"delta": delta}]}
    if (request.get("stream_options") or {}).get("include_usage"):
        yield head | {"choices": [], "usage": whole["usage"]}


def server_sent(events: Iterator[dict]) -> Iterator[str]:
    """Yields server-sent events: named by their type, or, of chat completions, ended by [DONE]."""
    for event in events:
        if "type" in event:
            yield f"event: {event['type']}\n"
        yield f"data: {json.dumps(event)}\n\n"
    if "type" not in event:
        yield "data: [DONE]\n\n"


# ------------------------------------ the Responses API, as the OpenAI Agents SDK uses it


def chat_of(body: dict) -> dict:
    """Returns a Responses request as a chat request. Raises ValueError if there is none."""
    chat = dict(body)
    chat["messages"] = _messages(chat.pop("input"), chat.pop("instructions", None))
    chat["tools"] = [_function(tool) for tool in body.get("tools") or ()]
    text = chat.pop("text", None) or {}
    chat["verbosity"] = text.get("verbosity")
    chat["response_format"] = text.get("format")
    chat["max_completion_tokens"] = chat.pop("max_output_tokens", None)
    chat["include"] = set(body.get("include") or ()) - {"reasoning.encrypted_content"}
    return chat


def _messages(input, instructions):
    """Returns the input of a Responses request as chat messages."""
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import construct_input_messages

    try:
        request = ResponsesRequest(input=input, instructions=instructions)
        return construct_input_messages(
            request_instructions=request.instructions, request_input=request.input
        )
    except Exception as error:  # vLLM's own have no common base
        raise ValueError(f"input: {error}") from None


def _function(tool):
    """Returns a tool of the Responses API as one of chat completions."""
    if tool["type"] != "function":
        raise ValueError(f"supported are tools of type function, not {tool['type']!r:.80}")
    keys = ("name", "description", "parameters")
    function = {key: tool[key] for key in keys if tool.get(key) is not None}
    return {"type": "function", "function": function}


def response_of(completion) -> dict:
    """Returns the response to a Responses request."""
    choice = completion.choices[0]
    usage = completion.usage
    is_cut = choice.finish_reason == "length"
    number = completion.id.removeprefix("chatcmpl-")
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": completion.created,
        "model": "policy",
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(choice, number),
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _items(choice, number):
    """Returns a choice's reasoning, text and tool calls as the items of a response."""
    message = choice.message
    items = []

    def add(kind, prefix, **content):
        item = {"type": kind, "id": f"{prefix}_{number}", "status": "completed"}
        items.append(item | content)

    reasoning = getattr(message, "reasoning_content", None)
    if reasoning:
        part = {"type": "reasoning_text", "text": reasoning}
        add("reasoning", "rs", summary=[], content=[part])
    if message.content or not message.tool_calls:
        part = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        add("message", "msg", role="assistant", content=[part])
    for call in message.tool_calls or ():
        made = call.function.model_dump(include={"name", "arguments"})
        add("function_call", f"fc_{call.id}", call_id=call.id, **made)
    return items


def events(response: dict, request: dict) -> Iterator[dict]:
    """Yields a response as it is streamed; every text is one delta."""
    numbers = itertools.count()

    def event(kind, **content):
        return {"type": f"response.{kind}", "sequence_number": next(numbers)} | content

    yield event("created", response=response | {"status": "in_progress", "output": []})
    for i, item in enumerate(response["output"]):
        is_call = item["type"] == "function_call"
        place = {"item_id": item["id"], "output_index": i}
        empty = {"status": "in_progress"} | ({"arguments": ""} if is_call else {"content": []})
        yield event("output_item.added", output_index=i, item=item | empty)
        if is_call:
            kind = "function_call_arguments"
            text = item["arguments"]
            yield event(f"{kind}.delta", **place, delta=text)
            yield event(f"{kind}.done", **place, name=item["name"], arguments=text)
        for j, part in enumerate(item.get("content", ())):
            place["content_index"] = j
            kind = part["type"]
            logprobs = {"logprobs": []} if kind == "output_text" else {}
            yield event("content_part.added", **place, part=part | {"text": ""})
            yield event(f"{kind}.delta", **place, **logprobs, delta=part["text"])
            yield event(f"{kind}.done", **place, **logprobs, text=part["text"])
            yield event("content_part.done", **place, part=part)
        yield event("output_item.done", output_index=i, item=item)
    yield event(response["status"], response=response)
