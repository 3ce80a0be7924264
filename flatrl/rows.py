"""Checks and normalises a row, with messages that tell what to change. Identifies rows."""

import hashlib
import json
import re
import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, is_dataclass
from unicodedata import normalize

from agent_loop import LoopArgs, ToolAgentLoop, agent_loop_class, row_kwargs, task_tools
from flatrl.bad_input import need, refusing
from flatrl.chat_template import chat_template
from flatrl.tables import prompt_order
from flatrl.texts import clean
from flatrl.tools import call_format

TOOL_KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
# Arguments that AgentLoopBase.run(**row) gets besides a row's columns.
RESERVED_COLUMNS = {"self", "sampling_params", "step", "rollout_n", "validate"}
OBJECTS = {"extra_info", "tools_kwargs", "interaction_kwargs"}
# JSON text of a message or of several, also if it was written as JSON twice, or as Python.
MESSAGES = re.compile(
    r"""(?s)[\s"]*(\[\s*)?\{.*["'](role|from)\\*["']\s*:\s*\\*["'](system|user|human|assistant)\b"""
)


def check_row(row, prompt_key: str, number: int, name: str, image_key: str = "images") -> dict:
    """Returns a checked copy of a row: "prompt" is a list of messages, "images" one of images.

    prompt_key, image_key: see `data.load_rows`. number: the row's index, if it has none. name: what
    messages call the row. Raises BadInput. As in csv files, prompt, demonstration and the columns
    of OBJECTS may be JSON texts."""
    need(
        isinstance(row, dict) and prompt_key in row,
        f"{name} has no column {prompt_key!r}: give --prompt_key, or files of your own for both, "
        f"--train_files and --val_files; it is {row!r:.80}",
    )
    taken = RESERVED_COLUMNS & row.keys()
    need(not taken, f"{name}: agent loops have other arguments named {taken}: rename these columns")
    row = _read_objects(row, name)
    if row.get("extra_info"):
        row["extra_info"] = _read_objects(row["extra_info"], name)
    known = row.get("index"), (row.get("extra_info") or {}).get("index"), number
    row["index"] = next(index for index in known if index is not None)

    row["prompt"] = _chat(row, prompt_key, "user", name)
    if row.get("demonstration"):
        turns = row["demonstration"] = _chat(row, "demonstration", "assistant", name)
        says = [turn.get("content") or turn.get("tool_calls") for turn in turns]
        need(
            all(says) and {turn["role"] for turn in turns} == {"assistant"},
            f"{name}: a 'demonstration' is turns of the assistant, none of them empty",
        )
    if image_key != "images":
        need(image_key in row, f"{name} has no column {image_key!r}: --image_key, of {[*row]}")
        images = row[image_key] or []
        row["images"] = images if isinstance(images, (list, tuple)) else [images]
    with refusing(name):
        _match_images(row)
    return row


def _read_objects(columns, name):
    """Returns a copy of columns, with those of OBJECTS as dicts."""
    columns = dict(columns)
    for key in OBJECTS & columns.keys():
        if isinstance(columns[key], str):
            with refusing(f"{name}: {key!r} is a text, but not JSON"):
                columns[key] = json.loads(columns[key])
        _check_object(columns[key], f"{name}: {key!r}")
        if columns[key] and key != "extra_info":  # which only the task reads
            given = {part: entry for part, entry in columns[key].items() if entry is not None}
            columns[key] = _tidied(given, keeps_none=True)  # a null may be an argument
    for tool, kwargs in (columns.get("tools_kwargs") or {}).items():
        _check_object(kwargs, f"{name}: tools_kwargs: {tool!r}")
        for key in TOOL_KWARGS:
            _check_object(kwargs.get(key), f"{name}: tools_kwargs: {tool!r}: {key!r}")
    return columns


def _check_object(value, name):
    """Raises BadInput unless a value is a dict or None. name: what the message calls it."""
    need(isinstance(value, dict | None), f"{name} must be a dict, got {value!r:.80}")


def _read_messages(value, name):
    """Returns what the JSON text of a chat or of a message holds, and any other value as it is."""
    if not isinstance(value, str) or not MESSAGES.match(value):
        return value
    with refusing(f"{name}: {value!r:.40} looks like chat messages, but is not JSON"):
        return _read_messages(json.loads(value), name)


def tool_schemas(row: dict, task) -> list[dict]:
    """Returns the schemas of the task's tools that the row has."""
    return [tool.schema for tool in task_tools(task, row_kwargs(row, "tools_kwargs")).values()]


def check_tokenizer(tokenizer, templates, row: dict, task, args=None):
    """Tries chat template, call parser and tokenizer on a row. Warns, or raises BadInput.

    The prompt's tokens, decoded, must be its text again, except for spaces and the form of
    accents, which some tokenizers normalise. templates: the tokenizer with --chat_template_args."""
    args = args or LoopArgs()
    template = chat_template(templates, think_tags=args.think_tags)
    prompt = row["prompt"] or [{"role": "user", "content": "hello"}]
    schemas = tool_schemas(row, task)
    runs_tools = issubclass(agent_loop_class(row, task, args), ToolAgentLoop)
    has_user = runs_tools and bool(getattr(task, "INTERACTIONS", None))
    found = template.check(prompt, schemas if runs_tools else [], has_user)
    if runs_tools and schemas:
        found += call_format(templates, args.tool_parser).check(schemas)
    for warning in found:
        warnings.warn(warning, stacklevel=2)
    text = template.text(prompt, schemas, True)
    decoded = tokenizer.decode(template.render(prompt, schemas))
    text, decoded = ("".join(normalize("NFKC", x).split()) for x in (text, decoded))
    need(text == decoded, f"the tokenizer turns the prompt {text!r:.80} into {decoded!r:.80}")


def copy_row(row: dict) -> dict:
    """Returns a deep copy of a row. Raises BadInput for a lock, a connection and the like."""
    with refusing("a row can't be copied for each rollout: keep its objects in the task's module"):
        return deepcopy(row)


def _chat(row, column, role, name):
    """Returns a copy of the messages in a column, which may be a text of this role."""
    value = _read_messages(row[column], name)
    is_list = isinstance(value, (list, tuple))
    messages = []
    for message in value if is_list else [value]:
        message = _read_messages(message, name)
        if isinstance(message, str) and (role == "assistant" or not is_list):
            message = {"role": role, "content": message}
        messages.append(message)
    need(
        all(map(_is_message, messages)),
        f"{name}: {column!r} must be a text or a list of chat messages, got {value!r:.80}",
    )
    messages = _tidied(messages)
    with refusing(f"{name}: {column!r}, a tool call"):
        for message in messages:
            if "reasoning" in message:  # vLLM's new name
                message.setdefault("reasoning_content", message.pop("reasoning"))
            if message.get("tool_calls") == []:  # some templates take it for a call
                del message["tool_calls"]
            for call in message.get("tool_calls", ()):
                if "function" not in call:
                    call["function"] = {key: call.pop(key) for key in ("name", "arguments")}
                function = call["function"]
                if isinstance(function["arguments"], str):
                    function["arguments"] = json.loads(function["arguments"])
                need(isinstance(function["arguments"], dict), "its arguments must be an object")
    return messages


def _is_message(message):
    """Returns True for a dict with a role, and with a content or tool calls."""
    match message:
        case {"role": str(), "content": str() | list() | tuple()}:
            return True
        case {"role": str(), "tool_calls": [_, *_]}:
            return True
    return False


def _tidied(value, keeps_none=False):
    """Returns a copy with clean texts and no entries that are None: a template would print None."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, (list, tuple)):
        return [_tidied(entry, keeps_none) for entry in value]
    if not isinstance(value, dict):
        return value
    tidied = {}
    for key, entry in value.items():
        if entry is not None or keeps_none:
            tidied[key] = _tidied(entry, keeps_none or key == "arguments")
    return tidied


def _match_images(row):
    """Gives placeholders of images one form. Raises ValueError unless each image has one."""
    images = row.get("images") or []
    n_placeholders = 0
    for message in row["prompt"]:
        parts = message.get("content")
        if images and isinstance(parts, str):  # verl's form
            parts = [
                {"type": "image"} if text == "<image>" else {"type": "text", "text": text}
                for text in re.split("(<image>)", parts)
                if text
            ]
        if not isinstance(parts, (list, tuple)):
            continue
        texts = [part["text"] for part in parts if part["type"] == "text"]
        n_images = [part["type"] for part in parts].count("image")
        if len(texts) + n_images < len(parts):
            raise ValueError(f"a part of a message is neither text nor image: {parts!r:.80}")
        n_placeholders += n_images
        # Templates of text models know no parts.
        message["content"] = parts if n_images else "".join(texts)
    if n_placeholders != len(images):
        raise ValueError(f"{n_placeholders} placeholders of images, but {len(images)} images")


def hash_of_rows(rows: Sequence[dict], seed: int) -> str:
    """Returns a hash of rows, in their order; of rows on disk, of the first thousand drawn."""
    n = len(rows)
    numbers = range(n) if isinstance(rows, list) else prompt_order(n, 0, min(n, 1000), seed)
    digest = hashlib.sha256(str(n).encode())
    for number in numbers:
        text = re.sub(" at 0x[0-9A-Fa-f]+", "", as_text(rows[number]))  # the address of an object
        digest.update(text.encode(errors="backslashreplace"))
    return digest.hexdigest()[:16]


def as_text(value) -> str:
    """Returns a text that depends on type and value alone; objects need a repr of their own.

    The order of a dict or a set does not count, and all values of arrays and images do."""
    match value:
        case dict():
            items = [f"{as_text(key)}: {as_text(part)}" for key, part in value.items()]
            return f"dict({', '.join(sorted(items))})"
        case set() | frozenset():
            return f"set({', '.join(sorted(map(as_text, value)))})"
        case list() | tuple():
            return f"[{', '.join(map(as_text, value))}]"
        case bytes():
            return hashlib.sha256(value).hexdigest()
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__} {as_text(asdict(value))}"
    if hasattr(value, "tolist"):
        return as_text(value.tolist())
    if hasattr(value, "tobytes"):
        return f"{value.size} {as_text(value.tobytes())}"
    return repr(value)
