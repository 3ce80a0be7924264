"""Checks of a row, with messages that say what to change, the one form that it gets, and copies."""

import json
import re
import warnings
from copy import copy
from pathlib import Path
from unicodedata import normalize

from agent_loop import BadInput, load_image, render, render_text, row_kwargs, task_tools
from flatrl.bad_input import check_types, need, refusing

# Types of a row's (or its extra_info's) columns and of a message's entries; None is fine.
ROW_TYPES = {"extra_info": dict, "tools_kwargs": dict, "interaction_kwargs": dict,
             "agent_name": str, "index": int | str, "data_source": str,
             "demonstration": str | list | tuple}
MESSAGE_TYPES = {"role": str, "content": str | list | tuple, "tool_calls": list | tuple,
                 "name": str, "tool_call_id": str}
# AgentLoopBase.run(**row) has arguments of these names beside a row's columns.
RESERVED_COLUMNS = ["self", "sampling_params", "step", "rollout_n", "validate"]


def check_row(row, prompt_key: str, number: int, name: str) -> dict:
    """Returns a checked copy of a row, in which "prompt" is a list of messages.

    The column prompt_key has the prompt, a chat or a text; a row without an index gets its
    number. See `data.load_rows` for images. Raises BadInput, which calls the row `name`."""
    # The row itself is not written: its images may be megabytes, and this text is always made.
    need(isinstance(row, dict),
         f"{name} is no dict with a column {prompt_key!r}, but a {type(row).__name__}")
    for column in row:
        need(isinstance(column, str) and column not in RESERVED_COLUMNS,
             f"{name}: a column's name is a str, and none of {RESERVED_COLUMNS}; "
             f"it has {[*row]}")
    need(prompt_key in row,
         f"{name} has no column {prompt_key!r}; give --prompt_key one of {sorted(row)}, "
         "or files of your own for both, --train_files and --val_files")
    row = dict(row)
    extra_info = row.get("extra_info") or {}
    for columns in (row, extra_info):
        check_types(columns, ROW_TYPES, name)
        for key in ("tools_kwargs", "interaction_kwargs"):
            if key in columns:
                columns[key] = _without_none(columns[key])
    row.setdefault("index", extra_info.get("index", number))
    for tool in row_kwargs(row, "tools_kwargs").values():
        need(isinstance(tool, dict)
             and all(isinstance(value, dict) for value in tool.values()),
             f"{name}: tools_kwargs has dicts like {{'create_kwargs': {{}}}}, not {tool!r:.80}")
    prompt = row[prompt_key]
    if isinstance(prompt, str):
        need(prompt, f"{name}: its prompt is empty")
        prompt = [{"role": "user", "content": prompt}]
    row["prompt"] = _chat(prompt, name, prompt_key)
    turns = row.get("demonstration")
    if turns not in (None, ""):
        turns = [turns] if isinstance(turns, str) else turns
        need(turns and all(turns), f"{name}: its 'demonstration', or a turn of it, is empty")
        turns = [{"role": "assistant", "content": turn} if isinstance(turn, str) else turn
                 for turn in turns]
        row["demonstration"] = _chat(turns, name, "demonstration", "assistant")
    _check_images(row, name)
    return row


def tool_schemas(row: dict, task) -> list[dict]:
    """Returns the schemas of the tools that the row has of the task's."""
    return [tool.schema for tool in task_tools(task, row_kwargs(row, "tools_kwargs")).values()]


def check_tokenizer(tokenizer, templates, row: dict, task):
    """Raises BadInput if a row's prompt does not reach the model as it is.

    Its tokens, decoded, must be the text that was tokenised, but for spaces and the form of
    accents: some tokenizers normalise them. The template must show what the last message says.
    Warns if it shows none of the row's tools. templates: the tokenizer with the variables of
    --chat_template_args."""
    prompt = row["prompt"] or [{"role": "user", "content": "hello"}]
    schemas = tool_schemas(row, task)
    text = render_text(templates, prompt, schemas, True)
    if schemas and text == render_text(templates, prompt, None, True):
        warnings.warn(
            "the model's chat template ignores tools: the policy does not see that it has any. "
            "Take another model or template, or describe them in the prompt", stacklevel=2)
    if not row["prompt"]:  # an Interaction speaks first
        return
    other = [*prompt[:-1], {**prompt[-1], "content": "Something else?"}]
    need(text != render_text(templates, other, schemas, True),
         f"the chat template does not show the model what a message says: {text!r:.80}")
    decoded = tokenizer.decode(render(templates, prompt, schemas))
    text, decoded = ("".join(normalize("NFKC", x).split()) for x in (text, decoded))
    need(text == decoded, f"the tokenizer does not give a prompt back: {text!r:.80} is "
         f"{decoded!r:.80} when decoded")


def copy_containers(tree):
    """Returns a copy of nested dicts, lists and tuples; it shares their images and arrays."""
    if type(tree) in (list, tuple):
        return type(tree)(map(copy_containers, tree))
    if not isinstance(tree, dict):
        return tree
    copied = copy(tree)  # a Counter stays one
    for key, value in tree.items():
        copied[key] = copy_containers(value)
    return copied


def _chat(messages, name, column, role=None):
    """Returns a copy of a chat's messages, with the arguments of tool calls as dicts: many data
    sets have them as JSON. Raises BadInput if it is no chat, or not that of this role alone."""
    need(isinstance(messages, (list, tuple)) and all(map(_is_message, messages)),
         f"{name}: {column!r} must be a text or a list of chat messages, got {messages!r:.80}")
    messages = [_without_none(message) for message in messages]
    for message in messages:
        check_types(message, MESSAGE_TYPES, f"{name}, a message")
        need(role in (None, message["role"]),
             f"{name}: {column!r} has a message that is not the {role}'s")
        with refusing(f"{name}: {column!r}, a tool call"):
            for call in message.get("tool_calls", ()):
                function = call.get("function", call)
                if isinstance(function.get("arguments"), str):
                    function["arguments"] = json.loads(function["arguments"])
    return messages


def _is_message(message):
    """Returns True for a dict with a role, and with a content or tool calls."""
    if not isinstance(message, dict) or not message.get("role"):
        return False
    return bool(message.get("tool_calls")) or message.get("content") is not None


def _without_none(value):
    """Returns a copy of a dict, and of dicts and lists in it, without entries that are None.

    Parquet gives every row the keys of all rows, with None where a row had no such key."""
    if isinstance(value, list):
        return [_without_none(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_none(entry) for key, entry in value.items() if entry is not None}


def _check_images(row, name):
    """Gives images and placeholders of a row one form; raises BadInput if they don't match.

    PIL images become upright and RGB; others (files, bytes) are opened where they are used. In
    messages "<image>" becomes {"type": "image"}, and a content without placeholders a text."""
    images = row.get("images")
    if images is None:
        images = []
    need(isinstance(images, (list, tuple)),
         f"{name}: 'images' must be a list of images, got a {type(images).__name__}")
    with refusing(name):
        images = [image if isinstance(image, (bytes, str, Path, dict)) else load_image(image)
                  for image in images]
    if images:
        row["images"] = images
    n_placeholders = 0
    for message in row["prompt"]:
        content = message.get("content")
        if images and isinstance(content, str):  # verl's form
            content = [
                {"type": "image"} if text == "<image>" else {"type": "text", "text": text}
                for text in re.split("(<image>)", content) if text]
        if not isinstance(content, (list, tuple)):
            continue
        parts = [_without_none(part) for part in content]
        texts = []
        for part in parts:
            match part:
                case {"type": "image"}:
                    n_placeholders += 1
                case {"type": "text", "text": str(text)}:
                    texts.append(text)
                case _:
                    raise BadInput(f"{name}: a part of a message is {{'type': 'image'}} or "
                                   f"{{'type': 'text', 'text': ...}}, not {part!r:.80}")
        # Templates of text models know no parts.
        message["content"] = parts if len(texts) < len(parts) else "".join(texts)
    need(n_placeholders == len(images),
         f"{name}: the prompt has {n_placeholders} placeholders of images "
         f"({{'type': 'image'}} or <image>), its column 'images' {len(images)}")
