"""Anthropic's Messages API over HTTP, on top of the chat requests of flatrl/chat/openai_api.py.

In Anthropic's words:

    system, messages   have blocks of text, image (base64), tool_use, tool_result and thinking.
                       A prefilled reply is refused. is_error is ignored: the text has to say it
    tools              have an input_schema; the tools that Anthropic runs are refused
    tool_choice        "any" and a named tool count as "auto", with a warning
    stream             works, but every block arrives as one delta
    thinking, output_config.effort, context_management
                       are ignored, with one warning for each name
    output_config.format, thread
                       are refused

A reply has a thinking block if the model reasons, whatever the request says."""

import json
import re
from collections.abc import Iterator

from agent_loop import function_call

STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}

# Claude Code's line in the system prompt, which some proxies join with the text that follows. It
# differs from request to request, so each request would begin a token sequence of its own.
CHANGING_LINE = r"(?im)^[ \t]*x-anthropic-billing-header:([ \t]*[\w-]+=[^;\s]*;?)*\s*"


def chat_of(body: dict) -> dict:
    """Returns a Messages request as a chat request. Raises ValueError if there is none."""
    chat = dict(body)
    chat["messages"] = _messages(chat.pop("system", None), body["messages"])
    chat["tools"] = [_function(tool) for tool in body.get("tools") or ()]
    chat["stop"] = chat.pop("stop_sequences", None)

    choice = body.get("tool_choice") or {"type": None}
    chat["tool_choice"] = choice["type"]
    chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")

    for name, value in (chat.pop("output_config", None) or {}).items():
        chat[f"output_config.{name}"] = value
    return chat


def _messages(system, given):
    """Returns the system prompt and the messages of a request as chat messages."""
    texts = [re.sub(CHANGING_LINE, "", block["text"]) for block in _blocks(system)]
    system = "".join(texts)
    messages = [{"role": "system", "content": system}] if system else []
    for message in given:
        messages += _chat_messages(message)
    if messages[-1]["role"] == "assistant":
        raise ValueError("not supported: a last message by the assistant, which prefills the reply")
    return messages


def _chat_messages(message):
    """Returns a message as chat messages: a tool's for each of its tool results, and the rest."""
    results = []
    content = []
    chat = {"role": message["role"], "content": content}
    for block in _blocks(message["content"]):
        if block["type"] == "tool_result":
            told = [_part(part) for part in _blocks(block.get("content"))]
            id = block["tool_use_id"]
            results.append({"role": "tool", "tool_call_id": id, "content": told})
        elif block["type"] == "tool_use":
            made = function_call(block["id"], block["name"], block["input"])
            chat.setdefault("tool_calls", []).append(made)
        elif block["type"] == "thinking":
            chat["reasoning_content"] = chat.get("reasoning_content", "") + block["thinking"]
        else:
            content.append(_part(block))
    return results if results and not content else [*results, chat]


def _blocks(content):
    """Returns the blocks of a content, which may be a text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content or []


def _part(block):
    """Returns a block as a part of a chat message. ChatClient refuses what is no text or image."""
    if block["type"] != "image":
        return block
    source = block["source"]
    url = f"data:{source['media_type']};base64,{source['data']}"
    return {"type": "image_url", "image_url": url}


def _function(tool):
    """Returns a tool as one of chat completions."""
    function = {key: tool[key] for key in ("name", "description") if tool.get(key)}
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}


def message_of(completion) -> dict:
    """Returns the message that answers a request: reasoning, text and tool calls."""
    choice = completion.choices[0]
    reply = choice.message
    blocks = []
    reasoning = getattr(reply, "reasoning_content", None)
    if reasoning:
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if reply.content or not reply.tool_calls:
        blocks.append({"type": "text", "text": reply.content, "citations": None})
    for made in reply.tool_calls or ():
        arguments = json.loads(made.function.arguments)
        block = {"type": "tool_use", "id": made.id, "name": made.function.name, "input": arguments}
        blocks.append(block)

    reason = STOP_REASONS[choice.finish_reason]
    if reason == "end_turn" and choice.stop_reason:
        reason = "stop_sequence"
    return {
        "id": completion.id.replace("chatcmpl-", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": choice.stop_reason if reason == "stop_sequence" else None,
        "usage": {
            "input_tokens": completion.usage.prompt_tokens,
            "output_tokens": completion.usage.completion_tokens,
        },
    }


# A block's type: what it has at its start, the type of its delta, and the delta's key.
DELTAS = {
    "text": ({"text": ""}, "text_delta", "text"),
    "thinking": ({"thinking": ""}, "thinking_delta", "thinking"),
    "tool_use": ({"input": {}}, "input_json_delta", "partial_json"),
}


def events(message: dict, request: dict) -> Iterator[dict]:
    """Yields a message as it is streamed."""
    end = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    usage = message["usage"] | {"output_tokens": 0}
    begun = message | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield {"type": "message_start", "message": begun}
    for i, block in enumerate(message["content"]):
        empty, kind, key = DELTAS[block["type"]]
        said = json.dumps(block["input"]) if block["type"] == "tool_use" else block[key]
        yield {"type": "content_block_start", "index": i, "content_block": block | empty}
        yield {"type": "content_block_delta", "index": i, "delta": {"type": kind, key: said}}
        yield {"type": "content_block_stop", "index": i}
    yield {"type": "message_delta", "delta": end, "usage": message["usage"]}
    yield {"type": "message_stop"}


def error(message: str, code: str) -> dict:
    """Returns an error in Anthropic's form; code: as from flatrl.chat.openai_api.error."""
    kind = "authentication_error" if code == "invalid_api_key" else "invalid_request_error"
    if message.endswith("not supported: thread"):
        code = "thread_unsupported_request"  # the client then sends the whole conversation
    if code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # agents that compact look for these words
    details = {"error_code": code}
    return {"type": "error", "error": {"type": kind, "message": message, "details": details}}
