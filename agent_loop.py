"""What happens inside ONE rollout: agent loops, tools and interactions.

An agent loop gets a row of the data set and an engine, and returns tokens: those that the
policy sampled (mask 1) and those that it was given (mask 0: tool results, user turns, the
template's own). One rule governs this file: *token in, token out*. Sampled ids are appended
verbatim and never tokenised again. The text between two sampled turns is the difference of
two renderings of the chat template (`turn_suffix`).

The words that code, documents, log and flags share:
    prompt    the task in one row of the data set
    group     all rollouts of one prompt, which are compared with each other
    rollout   one run of an agent loop; its number within the group is called `sample`
    turn      one message of the assistant, or the reply of tools or of a user
    token     one id; its mask is 1 if the policy sampled it, else 0
    output    one token sequence (`AgentLoopOutput`); a rollout has one or more of them,
              which are numbered by `segment`
    unit      the outputs of a rollout that share one reward; by default all of them

To write your own agent, subclass `AgentLoopBase` in the task file, decorate the class with
`@register("name")`, and select it with `--agent name` or with a row's `agent_name`. Loops are
coroutines on one background thread; hundreds are alive at once. Names follow verl's agent
loop (https://verl.readthedocs.io/en/latest/advance/agent_loop.html).

This file imports nothing of ours. Pasted into another project, it works with `LoopArgs`."""

import asyncio
import contextvars
import copy
import functools
import inspect
import io
import json
import logging
import math
import queue
import re
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any
from uuid import uuid4


class BadInput(ValueError):
    """An error in the user's flags, task file, rows or model; train.py prints its one line."""


# ---------------------------------------------------------------- settings and results


def setting(default, help: str):
    """Returns a dataclass field with a default and a help text."""
    return field(default=default, metadata={"help": help})


@dataclass
class LoopArgs:
    """The settings that agent loops read from their `args`.

    train.Args inherits them; any object with these attributes will do."""

    agent: str | None = setting(
        None, "agent loop; default: tool_agent with TOOLS or INTERACTIONS, else single_turn")
    max_response_tokens: int = setting(
        128, "token budget of a rollout: sampled, tool and user tokens together")
    max_model_len: int | None = setting(
        None, "the engine's window: tokens of prompt and response together; default: no limit, "
        "in train.py max_prompt_tokens + max_response_tokens")
    max_assistant_turns: int = setting(
        8, "a rollout ends after so many turns, with stop reason max_turns; 0: no limit")
    max_user_turns: int = setting(
        0, "a rollout ends after so many answers of a simulated user; 0: no limit")
    max_images: int = setting(
        8, "images in one rollout, those of the prompt and of tools together")
    chat_template_args: str = setting(
        "{}", 'variables for the chat template, a JSON object: {"enable_thinking": false}')
    think_tags: str = setting(
        "<think> </think>", "the tags around reasoning; tool calls inside it are not executed")
    tool_parser: str = setting(
        "hermes", "the format of tool calls: any of vLLM's parsers")
    tool_timeout: float = setting(
        30.0, "seconds for one tool call, or for one answer of a simulated user")
    trajectory_timeout: float = setting(
        0.0, "seconds for a whole rollout, which then ends with the tokens it has; "
        "with --max_staleness this includes updates; 0: no limit")
    max_parallel_calls: int = setting(
        8, "tool calls executed in one turn; the model is told about the others")
    max_tool_response_tokens: int = setting(
        256, "longer tool responses are cut to this length")
    tool_response_truncate_side: str = setting(
        "middle", "which part of a long tool response is kept: left, right, or middle (both ends)")


@dataclass
class TokenOutput:
    """The result of one `generate` call.

    token_ids, logprobs and versions have one entry for each sampled token: its id, its
    log-probability under the sampling temperature, and the version of the weights that
    sampled it. A sampled stop token is included. prompt_ids is the prompt as the engine saw
    it: an image's placeholder is repeated for every token of the image."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: str  # "stop" | "length" | "abort"
    prompt_ids: list[int]


STOP_REASONS = ("stop", "length", "max_turns", "timeout", "abort", "error")
RESPONSE_LISTS = ("response_ids", "response_mask", "response_logprobs", "response_versions")


@dataclass(kw_only=True)
class AgentLoopOutput:
    """One finished token sequence of a rollout; the one dataclass that crosses files.

    The four response_* lists have one entry for each response token. response_mask is 1 for
    tokens that the policy sampled and 0 for those of tools, users and the template, whose
    logprob is 0.0 and whose version is -1. turn_rewards holds pairs (index into response_ids,
    reward). num_turns is the number of assistant, user and tool turns + 1, as in verl. images
    are PIL images in the order of their placeholders; the ids repeat a placeholder for each
    token of its image.

    unit: outputs of one rollout with the same unit share one reward, that of the last of
        them, and count once in advantages and in the loss. By default the whole rollout is
        one unit.
    group: units of one prompt are compared with those of the same group. By default the
        group has the unit's name, so that a rollout is compared with the other rollouts of
        its prompt.
    The two sides of a game, for example, are units "x" and "o". Siblings in a search tree
    share a group whose name contains the number of their rollout.

    Raises ValueError if the lists differ in length, or if the mask, the prompt, the stop
    reason, the unit or the group is invalid."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    response_versions: list[int]
    reward: float | dict | None = None
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    messages: list[dict] = field(default_factory=list)
    text: str = ""
    num_turns: int = 0
    stop_reason: str = "stop"
    metrics: dict[str, Any] = field(default_factory=dict)
    images: list = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    unit: str = ""
    group: str = ""

    def __post_init__(self):
        lengths = {name: len(getattr(self, name)) for name in RESPONSE_LISTS}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"the response lists of an output must have one length, got {lengths}")
        if not {0, 1}.issuperset(self.response_mask):
            raise ValueError("response_mask may hold only 0 (not sampled) and 1 (sampled)")
        if not self.prompt_ids:
            raise ValueError("prompt_ids is empty: the first token must be predicted from one")
        if self.stop_reason not in STOP_REASONS:
            raise ValueError(f"stop_reason {self.stop_reason!r} is not one of {STOP_REASONS}")
        if not isinstance(self.unit, str) or not isinstance(self.group, str):
            raise ValueError(f"unit {self.unit!r} and group {self.group!r} must be texts")

    @property
    def truncated(self) -> bool:
        """True if a limit on tokens or turns ended the output. A timeout does not count."""
        return self.stop_reason in ("length", "max_turns")


def outcome(output: AgentLoopOutput) -> float:
    """Returns the terminal reward of an output; if that is a dict, its key "score"."""
    reward = output.reward
    if isinstance(reward, dict):
        reward = reward["score"]
    return float(reward or 0.0)


def total_reward(output: AgentLoopOutput) -> float:
    """Returns the terminal reward of an output plus the sum of its turn rewards."""
    return outcome(output) + sum(reward for _, reward in output.turn_rewards)


def numbers(values: dict) -> dict[str, float]:
    """Returns the entries of a dict that are real numbers, bools and numpy's included."""
    return {name: value for name, value in values.items() if isinstance(value, Real)}


# ---------------------------------------------------------------- texts and numbers of user code


# Before a character, it makes `_tokenise` tokenise that character by itself. It is a Unicode
# noncharacter, and `clean` removes it from all texts, so that it is always ours.
TOKEN_BREAK = "\ufdd0"


def clean(text: str) -> str:
    """Returns a text that any tokenizer takes, without the file's own TOKEN_BREAK.

    Lone surrogates become "?". They come from garbage bytes, or from "\\ud83d" in JSON."""
    return text.encode(errors="replace").decode().replace(TOKEN_BREAK, "")


def words(text, name: str) -> str:
    """Returns a str from user code, cleaned by `clean`.

    Raises ValueError, which contains `name`, for anything but a str."""
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a str, got {text!r:.80}")
    return clean(text)


def finite(value, name: str) -> float:
    """Returns a number from user code as a float.

    Raises ValueError, which contains `name`, for anything but a number that is finite in
    float32, and for a str, even if it spells a number."""
    number = math.nan
    if not isinstance(value, (str, bytes)):
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value)
    if not abs(number) < 1e38:
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return number


# ---------------------------------------------------------------- chat templates


def render_text(
    tokenizer,
    messages: list[dict],
    tools: list[dict] | None,
    add_generation_prompt: bool = False,
) -> str:
    """Renders a chat as text by the tokenizer's template. Raises BadInput if it has none."""
    if not tokenizer.chat_template:
        raise BadInput("the tokenizer has no chat template: set one, or use an instruct model")
    template = str(tokenizer.chat_template)
    if "</think>" in template and "reasoning_content" not in template:
        messages = [_inline_reasoning(message) for message in messages]
    return tokenizer.apply_chat_template(
        messages,
        tools=tools or None,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
    )


def _inline_reasoning(message):
    """Moves a message's reasoning into its content, where templates like DeepSeek's read it."""
    if "reasoning_content" not in message:
        return message
    content = message.get("content") or ""
    content = f"<think>{message['reasoning_content']}</think>{content}"
    return {**message, "content": content}


def render(
    tokenizer,
    messages: list[dict],
    tools: list[dict] | None = None,
    trusted: Sequence[dict] | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Returns the token ids of a chat, by default up to where the assistant speaks next.

    trusted: messages in which a text like "<|im_end|>" becomes that control token. In all
    other messages, and in tools, it stays text (`_without_forged`). By default all messages
    are trusted, as in a row's prompt.

    An empty chat has no tokens; an Interaction then speaks first."""
    if not messages:
        return []

    def ids_of(messages, tools):
        text = render_text(tokenizer, messages, tools, add_generation_prompt)
        return list(_tokenise_prompt(tokenizer, text))

    if trusted is None:
        trusted = messages
        if not tools:  # nothing is left that could forge a token
            return ids_of(messages, tools)
    return _without_forged(tokenizer, ids_of, add_generation_prompt, messages, tools, trusted)


@functools.lru_cache(maxsize=64)
def templated(tokenizer, variables: str):
    """Returns a tokenizer whose chat template gets more variables, given as a JSON object.

    Without variables, it is the tokenizer itself."""
    variables = json.loads(variables)
    if not variables:
        return tokenizer
    changed = copy.copy(tokenizer)
    changed.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **variables)
    return changed


# Regular expressions for the characters that get a TOKEN_BREAK.
NO_CHARACTER = TOKEN_BREAK  # a clean text has none
PUNCTUATION = r"[^\w\s]|_"
ANY_CHARACTER = "(?s)."

# The control tokens of chats with neutral words: see `_without_forged`. Chats recur.
_NEUTRAL_CONTROLS = {}


def _without_forged(tokenizer, ids_of, depends_on, messages, tools, trusted=()):
    """Returns ids_of(messages, tools), the ids of a chat, with no control token forged.

    A control token is an added token that structures a chat, such as <|im_end|> or
    <tool_call>. A text that spells one must not become one, even if the template changes or
    joins texts. So the control tokens must be those of the same chat with neutral words. If
    they are not, the punctuation of users' and tools' texts is tokenised one character at a
    time; if that is not enough, so is every character of all texts.

    Texts of the assistant and of system messages get more freedom: the policy may really
    have sampled a control token such as <think>, and its history must keep it. Only special
    tokens such as <|im_end|> are forged there: decoding drops those that were sampled, so
    one that is still in the text was spelled out.

    depends_on: all else that ids_of depends on, as a value that JSON can hold.
    trusted: messages that stay as they are.

    Raises ValueError if even single characters become control tokens."""
    controls = _controls(tokenizer)

    def changed(of_others, of_policy):
        """Returns messages and tools with these characters of their texts set apart."""
        chat = []
        for message in messages:
            characters = of_policy if message["role"] in ("assistant", "system") else of_others
            chat.append(message if message in trusted else _separate(message, characters))
        return chat, _separate(tools, of_others)

    def attempt(of_others, of_policy):
        """Returns the ids, their control tokens, and the special ones among those."""
        ids = ids_of(*changed(of_others, of_policy))
        found = [token for token in ids if token in controls]
        special = [token for token in found if controls[token].special]
        return ids, found, special

    key = tokenizer, json.dumps([depends_on, changed(None, None)], default=str)
    if key not in _NEUTRAL_CONTROLS:
        if len(_NEUTRAL_CONTROLS) > 1024:
            _NEUTRAL_CONTROLS.clear()
        _NEUTRAL_CONTROLS[key] = attempt(None, None)[1:]
    neutral, neutral_special = _NEUTRAL_CONTROLS[key]
    for of_others, of_policy in (
        (NO_CHARACTER, NO_CHARACTER),
        (PUNCTUATION, NO_CHARACTER),
        (ANY_CHARACTER, ANY_CHARACTER),
    ):
        ids, found, special = attempt(of_others, of_policy)
        if found == neutral:
            return ids
        # The rest may come from the policy: is it there if the others' words are neutral?
        if special == neutral_special and found == attempt(None, of_policy)[1]:
            return ids
    raise ValueError("the chat template makes control tokens of what messages say")


def _separate(value, characters):
    """Puts a TOKEN_BREAK before certain characters of all texts in a message or a schema.

    characters: a regular expression. None replaces each text by a neutral word instead, of
    nine letters because Mistral's template requires that of ids. Roles, types and ids stay."""
    if isinstance(value, dict):
        changed = {}
        for key, inner in value.items():
            if key not in ("role", "type", "id", "tool_call_id"):
                inner = _separate(inner, characters)
            if not key.isidentifier():  # in a schema, a key may be free text
                key = _separate(key, characters)
            changed[key] = inner
        return changed
    if isinstance(value, list):
        return [_separate(inner, characters) for inner in value]
    if not isinstance(value, str) or not value.strip():
        return value
    if characters is None:
        return "xxxxxxxxx"
    return re.sub(characters, TOKEN_BREAK + r"\g<0>", clean(value))


@functools.cache
def _controls(tokenizer):
    """Returns the tokenizer's control tokens by id.

    They are the added tokens without those that are mere text: words, white space and single
    characters, unless they are special."""
    return {
        number: token
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special or len(token.content) > 1 and re.search(PUNCTUATION, token.content)
    }


def _tokenise(tokenizer, text):
    """Returns the ids of a rendered text, in which no token spans a TOKEN_BREAK.

    A character after a TOKEN_BREAK never becomes a control token. The template writes all
    special tokens itself, BOS included, so none is added."""
    first, *pieces = text.split(TOKEN_BREAK)
    ids = tokenizer.encode(first, add_special_tokens=False)
    for piece in pieces:
        character_ids = _inner_ids(tokenizer, piece[:1])
        ids += [token for token in character_ids if token not in _controls(tokenizer)]
        ids += _inner_ids(tokenizer, piece[1:])
    return ids


@functools.lru_cache(maxsize=1024)
def _inner_ids(tokenizer, text):
    """Returns the ids of a text that does not begin a sequence.

    Some tokenizers put a space before the first word. So the text is tokenised after a
    special token, whose id is left out."""
    start = tokenizer.eos_token or ""
    ids = tokenizer.encode(start + text, add_special_tokens=False)
    return ids[1:] if start else ids


# The members of a group share the ids of their prompt.
_tokenise_prompt = functools.lru_cache(maxsize=1024)(_tokenise)


class RewritesHistory(ValueError):
    """The template changes earlier messages when new ones come: a new sequence is needed."""


def turn_suffix(
    tokenizer,
    messages: list[dict],
    new: list[dict],
    stop_token_ids: set[int],
    ended: bool,
    tools: list[dict] | None = None,
) -> list[int]:
    """Returns the tokens that `new` messages (of tools or users) add after an assistant turn.

    They are the difference of two renderings, with and without `new`, starting at the
    template's last end-of-turn token. Many templates write a newline after that token. The
    policy does not sample it, and it would be lost if the difference started at the end of
    the first rendering (verl#6501). Texts can't forge control tokens (`_without_forged`).

    ended: whether the policy sampled a stop token. If not (a stop string ended its turn), the
    suffix begins with the end-of-turn token.

    Raises RewritesHistory if new messages change earlier ones (Qwen3 drops reasoning)."""

    def ids_of(chat, tools):
        before = render_text(tokenizer, chat[: len(messages)], tools)
        after = render_text(tokenizer, chat, tools, True)
        if not after.startswith(before):
            raise RewritesHistory("the chat template is not append-only: it changed a message")
        # No token spans an end-of-turn token. So the text from there on has the same ids
        # alone as within the whole.
        starts = [before.rfind(tokenizer.decode([stop])) for stop in stop_token_ids]
        start = max(starts, default=-1)
        if start < 0:  # the template ends turns without a token
            start = len(before)
        ids = _tokenise(tokenizer, after[start:])
        if not ids:
            raise ValueError(f"the chat template writes nothing for {new[-1]!r:.80}")
        if ended and ids[0] in stop_token_ids:
            ids = ids[1:]
        return ids

    depends_on = [len(messages), sorted(stop_token_ids), ended]
    return _without_forged(tokenizer, ids_of, depends_on, messages + new, tools)


# ---------------------------------------------------------------- images


IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # not EPS and others that run programs
MAX_PIXELS = 64_000_000  # 256 MB decoded


def open_image(source):
    """Opens a PIL image, a path, bytes, or the {"bytes", "path"} of Hugging Face's files.

    Reads only the header of a file. Raises ValueError unless the image has one of
    IMAGE_FORMATS and at most MAX_PIXELS."""
    from PIL import Image

    source = _file_of(source)
    if isinstance(source, Image.Image):
        return source
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        image = Image.open(file, formats=IMAGE_FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels: more than {MAX_PIXELS:,}")
        return image
    except Exception as error:  # PIL, the file system and a wrong type each raise their own
        raise ValueError(f"{source!r:.80} can't be read as an image: {error}") from None


def _file_of(source):
    """Returns the bytes or the path of a {"bytes", "path"}, and any other source as it is."""
    if isinstance(source, dict):
        return source.get("bytes") or source.get("path")
    return source


def load_image(source):
    """Loads an image (see `open_image`), upright and in RGB. Raises ValueError if it can't."""
    from PIL import ImageOps

    image = open_image(source)
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # a file that ends early, a decompression bomb
        raise ValueError(f"an image can't be decoded: {error}") from None


_load_file = functools.lru_cache(maxsize=64)(load_image)


def _row_image(source):
    """Loads an image of a row.

    All members of a group get the same object, so that it is preprocessed only once."""
    if hasattr(source, "size"):  # a PIL image, which was loaded with the rows
        return source
    return _load_file(_file_of(source))


def image_tokens(images, processor):
    """Returns the number of tokens of each image. Raises ValueError for an impossible shape."""
    sizes = [(image.height, image.width) for image in images]
    return processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"]


def expand(ids: list[int], images: Sequence, processor) -> list[int]:
    """Repeats each image's placeholder for every token of the image, as the model is fed.

    Raises ValueError unless there is one placeholder for each image, and the model accepts
    the shape of each image."""
    if processor is None:
        if images:
            raise ValueError("there are images, and this model reads text only")
        return ids
    placeholder = processor.image_token_id
    n_found = ids.count(placeholder)
    if n_found != len(images):
        raise ValueError(f"there are {len(images)} images, but {n_found} placeholders")
    counts = iter(image_tokens(images, processor))
    expanded = []
    for token in ids:
        n = next(counts) if token == placeholder else 1
        expanded += [token] * n
    return expanded


# ---------------------------------------------------------------- tools and interactions


@dataclass
class ToolResponse:
    """A tool's answer: text and images (see `open_image`) for the model to read.

    reward and metrics are recorded, and the model does not see them."""

    text: str = ""
    images: list = field(default_factory=list)
    reward: float | None = None
    metrics: dict = field(default_factory=dict)


class Tool:
    """A tool with state or resources. One instance serves all rollouts: key by `request_id`.

    Each rollout that calls the tool runs `create` once before the first `execute`,
    `calc_reward` once at its end, and then always `release`. Subclasses must override
    `execute`, and set `name` and `schema` (the JSON schema of an OpenAI function) on the
    class or the instance."""

    name: str
    schema: dict

    async def create(self, request_id: str, **create_kwargs):
        """Prepares the tool for one rollout. request_id names the rollout, not the call."""

    async def execute(self, request_id: str, arguments: dict, **execute_kwargs):
        """Returns a str or a ToolResponse, or a tuple (response, reward, metrics)."""
        raise TypeError(f"{type(self).__name__} has no execute method")

    async def calc_reward(self, request_id: str, **kwargs) -> float:
        """Returns a reward that is added to the rollout's, once, at its end."""
        return 0.0

    async def release(self, request_id: str, **kwargs):
        """Frees what `create` made for this rollout, also if the rollout failed."""


class FunctionTool(Tool):
    """A Python function as a tool; its type hints and docstring give the schema."""

    def __init__(self, function: Callable):
        from transformers.utils import get_json_schema

        self.function = function
        self.name = function.__name__
        self.schema = get_json_schema(function)  # raises if hints or the docstring lack one

    async def execute(self, request_id: str, arguments: dict, **execute_kwargs):
        return await call(self.function, **arguments, **execute_kwargs)


_function_tool = functools.cache(FunctionTool)


def as_tool(tool: Tool | Callable) -> Tool:
    """Returns a Tool unchanged, and a function as a Tool (always the same one).

    Raises BadInput for anything else."""
    if isinstance(tool, Tool):
        return tool
    if inspect.isroutine(tool):
        return _function_tool(tool)
    raise BadInput(f"TOOLS holds {tool!r}, which is neither a Tool instance nor a function")


def row_kwargs(row: dict, name: str) -> dict:
    """Returns a row's tools_kwargs or interaction_kwargs.

    They are a column or, as in verl, a key of extra_info."""
    return row.get(name) or (row.get("extra_info") or {}).get(name) or {}


def task_tools(task, tools_kwargs: dict | None = None) -> dict[str, Tool]:
    """Returns a row's tools by name: those that its tools_kwargs name, else all of the task's.

    Raises BadInput for an invalid tool, a name that two tools share, and an unknown name."""
    tools = {}
    for tool in map(as_tool, getattr(task, "TOOLS", None) or ()):
        if not (isinstance(tool.name, str) and isinstance(tool.schema, dict)):
            raise BadInput(f"a tool needs a `name`, a str, and a `schema`, a dict: {tool!r}")
        if tool.name in tools:
            raise BadInput(f"two of the task's TOOLS have the same name, {tool.name!r}")
        tools[tool.name] = tool
    if not tools_kwargs:
        return tools
    unknown = sorted(tools_kwargs.keys() - tools)
    if unknown:
        raise BadInput(f"tools_kwargs names {unknown}, but the task's TOOLS are {sorted(tools)}")
    return {name: tool for name, tool in tools.items() if name in tools_kwargs}


class Interaction:
    """A simulated user or environment, which answers when the assistant calls no tool.

    One instance serves all rollouts: key by `request_id`."""

    name: str = "interaction"

    async def start(self, request_id: str, **kwargs) -> str | None:
        """May return a first user message, which is put after the row's prompt."""

    async def generate_response(self, request_id: str, messages: list[dict], **kwargs) -> tuple:
        """Returns (done, text, reward, metrics).

        text is the next user message; reward is for the assistant's last turn."""
        raise TypeError(f"{type(self).__name__} has no generate_response method")

    async def finalize(self, request_id: str):
        """Frees what `start` made for this rollout, also if the rollout failed."""


def task_interaction(task, kwargs: dict) -> Interaction | None:
    """Returns the task's interaction that kwargs["name"] names, or else the only one.

    Returns None if no name is given and the task has none, or several. Raises BadInput for
    an unknown name, for other kwargs without a name, and for invalid INTERACTIONS."""
    given = getattr(task, "INTERACTIONS", None) or ()
    interactions = {each.name: each for each in given if isinstance(each, Interaction)}
    if len(interactions) < len(given):
        raise BadInput(f"INTERACTIONS holds what is no Interaction, or two of one name: {given}")
    name = kwargs.get("name")
    if name is None and len(interactions) < 2:
        return next(iter(interactions.values()), None)
    if kwargs and name not in interactions:
        raise BadInput(
            f"interaction_kwargs names {name!r}, but needs a 'name' of the task's "
            f"INTERACTIONS: {sorted(interactions)}")
    return interactions.get(name)


# ---------------------------------------------------------------- running user code


def _failure(error):
    """Returns the error, or a RuntimeError in its place if asyncio treats it specially.

    SystemExit ends the event loop, CancelledError cancels tasks, StopIteration is refused."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(repr(error))


async def _contained(coroutine):
    """Awaits user code, and raises its exceptions in a form that asyncio can carry.

    A cancellation of the running task passes through unchanged."""
    try:
        return await coroutine
    except GeneratorExit:  # the process ends, and the coroutine is abandoned
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
            raise
        raise _failure(error) from None


class CallTimeoutError(TimeoutError):
    """User code took longer than its deadline."""


# The asyncio.Timeout of the running user code. Code that must wait for its turn may postpone
# the deadline with `reschedule`, as examples/sandbox.py does.
DEADLINE = contextvars.ContextVar("DEADLINE")


async def in_time(what: str, seconds: float, coroutine: Awaitable) -> Any:
    """Awaits user code under a deadline (0: none), as a task named `what`.

    At the deadline, or if the caller is cancelled, the task is cancelled. It gets as long
    again to tidy up; then it is left behind. Raises CallTimeoutError at the deadline, and
    whatever the code raises."""
    try:
        async with asyncio.timeout(seconds or None) as deadline:
            previous = DEADLINE.set(deadline)
            task = asyncio.create_task(_contained(coroutine), name=what)  # it copies the context
            DEADLINE.reset(previous)
            await asyncio.wait([task])
    except TimeoutError:
        if not task.done():
            raise CallTimeoutError(f"{what} took longer than {seconds:g} seconds") from None
    finally:
        if task.cancel():
            await asyncio.wait([task], timeout=seconds or None)
    return await _contained(task)


_IDLE_THREADS: list[queue.SimpleQueue] = []  # each thread is known by the queue of its jobs


async def in_thread(function: Callable, /, *args, **kwargs) -> Any:
    """Runs a plain function in a daemon thread, so that it does not block the event loop.

    Python waits for the threads of asyncio.to_thread when it exits: forever if a tool never
    returns. It does not wait for daemon threads. An idle thread is reused, because starting
    one takes far longer."""
    result = asyncio.get_running_loop().create_future()
    context = contextvars.copy_context()
    try:
        jobs = _IDLE_THREADS.pop()
    except IndexError:
        jobs = queue.SimpleQueue()
        threading.Thread(target=_run_jobs, args=[jobs], daemon=True).start()
    jobs.put((result, functools.partial(context.run, function, *args, **kwargs)))
    return await result


def _run_jobs(jobs):
    """The life of a thread: takes a job from its queue, runs it, becomes idle, and so on."""
    while True:
        result, function = jobs.get()
        try:
            settle = result.set_result, function()
        except BaseException as error:
            settle = result.set_exception, _failure(error)
        _IDLE_THREADS.append(jobs)  # before the result is known: the next call finds it idle
        with suppress(RuntimeError):  # the event loop may be closed by now
            result.get_loop().call_soon_threadsafe(_settle, result, *settle)


def _settle(result, settle, value):
    """Sets the result or exception of a future, unless its deadline has passed."""
    if not result.done():
        settle(value)


async def call(function: Callable, /, *args, **kwargs) -> Any:
    """Awaits an async function, or runs a plain one `in_thread`."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await in_thread(function, *args, **kwargs)
    if inspect.isawaitable(result):  # from a decorated async function
        return await result
    return result


# ---------------------------------------------------------------- agent loops


AGENT_LOOPS: dict[str, type] = {}


def register(name: str) -> Callable:
    """Class decorator: `--agent name` or a row's agent_name then selects the loop.

    Raises BadInput for a class that is no AgentLoopBase, TypeError for anything but a class."""

    def add(cls):
        if not issubclass(cls, AgentLoopBase):
            raise BadInput(f"@register({name!r}) is for subclasses of AgentLoopBase: {cls!r}")
        AGENT_LOOPS[name] = cls
        return cls

    return add


def agent_loop_class(row: dict, task, args) -> type:
    """Returns the agent loop that row["agent_name"] names, else the one of --agent.

    Without a name it is "tool_agent" for a task with TOOLS or INTERACTIONS, else
    "single_turn". Raises BadInput for an unknown name."""
    has_turns = getattr(task, "TOOLS", None) or getattr(task, "INTERACTIONS", None)
    default = "tool_agent" if has_turns else "single_turn"
    name = row.get("agent_name") or args.agent or default
    if name not in AGENT_LOOPS:
        raise BadInput(
            f"no agent loop {name!r}: choose from {sorted(AGENT_LOOPS)} or add "
            f"@register({name!r}) to the task")
    return AGENT_LOOPS[name]


class Trajectory:
    """The messages and tokens of one rollout while they grow.

    prompt_ids and the four response lists are the current token sequence. Only methods of
    this class append to them, and always to all lists alike. `fork` ends the sequence and
    starts another, when the history was rewritten. `outputs` returns one output for each
    sequence.

    engine_ids are prompt and response as `engine.generate` gets them, with one placeholder
    for each image; in prompt_ids and response_ids it is repeated for all tokens of the image
    (`expand`). trusted: the messages that may spell control tokens (`render`), by default
    all that are given here; messages that are appended later are not trusted."""

    def __init__(
        self,
        messages: list[dict],
        prompt_ids: list[int],
        engine_ids: list[int],
        images: Sequence,
        trusted: Sequence[dict] | None = None,
    ):
        self.request_id = uuid4().hex  # names the rollout for the engine and for tools
        self.messages = list(messages)
        self.trusted = list(messages if trusted is None else trusted)
        self.images = list(images)
        self.metrics = {}
        self.extra = {}
        self.stop_reason = "stop"
        self.assistant_turns = 0
        self.user_turns = 0  # includes those of tools
        self.ended = True  # whether the last assistant turn ended with a stop token
        self.tool_calls = []  # of the last assistant turn, still to be executed
        self.finished = []  # AgentLoopOutputs of the sequences before the last fork
        self.begin(prompt_ids, engine_ids)

    def begin(self, prompt_ids: list[int], engine_ids: list[int]):
        """Starts the token sequence with this prompt and an empty response."""
        self.prompt_ids = prompt_ids
        self.engine_ids = list(engine_ids)
        self.turn_rewards = []
        for name in RESPONSE_LISTS:
            setattr(self, name, [])

    def fork(self, prompt_ids: list[int], engine_ids: list[int]):
        """Ends the token sequence, and starts one whose prompt is the rewritten history."""
        # The last output has the metrics of the whole rollout.
        self.finished.append(replace(self.output(), metrics={}))
        self.begin(prompt_ids, engine_ids)
        self.count("forks")

    def add_sampled(self, out: TokenOutput, trained: bool = True):
        """Appends an assistant turn, with mask 1.

        trained=False is for a turn that the policy did not choose freely. It gets mask 0."""
        ids = out.token_ids
        if trained:
            self._add(ids, ids, [1] * len(ids), out.logprobs, out.versions)
        else:
            self.add_given(ids)
        self.assistant_turns += 1

    def add_given(self, ids: list[int], engine_ids: list[int] | None = None):
        """Appends tokens of a tool, a user or the template, with mask 0.

        engine_ids: the same tokens with one placeholder for each image; default: ids."""
        n = len(ids)
        self._add(engine_ids or ids, ids, [0] * n, [0.0] * n, [-1] * n)

    def _add(self, engine_ids, *response):
        """Appends to engine_ids, and to the lists of RESPONSE_LISTS in their order."""
        self.engine_ids += engine_ids
        for name, values in zip(RESPONSE_LISTS, response):
            getattr(self, name).extend(values)

    def record(self, kind: str, name: str, reward: float | None, metrics: dict | None):
        """Records a reward, at the last token so far, and metrics.

        kind and name tell where they come from: "tool", "calculator". Raises ValueError, with
        that name, and records nothing if a number is not finite."""
        source = f"{kind} {name!r}"
        if not isinstance(metrics, dict | None):
            raise ValueError(f"the metrics of {source} must be a dict, got {metrics!r:.80}")
        reward = finite(0.0 if reward is None else reward, f"the reward of {source}")
        checked = {}
        for key, value in (metrics or {}).items():
            checked[key] = finite(value, f"metric {key!r} of {source}")
        for key, value in checked.items():
            self.count(f"{kind}/{key}", value)
        if reward:
            last = max(0, len(self.response_ids) - 1)
            self.turn_rewards.append((last, reward))

    def count(self, name: str, n: float = 1):
        """Adds n to a metric."""
        self.metrics[name] = self.metrics.get(name, 0) + n

    def outputs(self) -> list[AgentLoopOutput]:
        """Returns one output for each token sequence.

        If the assistant said nothing after the last fork, that sequence is left out. Its
        rewards, metrics and stop reason then go to the sequence before."""
        last = self.output()
        # A turn of the assistant may consist of untrained tokens (mask 0) alone.
        speaks = 1 in last.response_mask or last.messages[-1]["role"] == "assistant"
        if speaks or not self.finished:
            return [*self.finished, last]
        *earlier, before = self.finished
        end = len(before.response_ids) - 1
        rewards = [(end, reward) for _, reward in last.turn_rewards]
        merged = replace(
            before,
            turn_rewards=before.turn_rewards + rewards,
            metrics=last.metrics,
            stop_reason=last.stop_reason,
        )
        return [*earlier, merged]

    def output(self) -> AgentLoopOutput:
        """Returns the current token sequence as an output. Without forks, it is the only one.

        Each field of the output is a copy of the attribute with the same name."""
        self.num_turns = self.assistant_turns + self.user_turns + 1
        names = vars(self).keys() & {each.name for each in fields(AgentLoopOutput)}
        return AgentLoopOutput(**{name: copy.copy(getattr(self, name)) for name in names})


class AgentLoopBase:
    """The base class of agent loops: subclasses write `run`. Each rollout has its own instance.

    engine: any object with `async generate(*, request_id, prompt_ids, sampling_params,
        image_data) -> TokenOutput`. prompt_ids has ONE placeholder for each image of
        image_data, which is a list of PIL images or None.
    processor: the model's image processor; None for text models.
    task: the task module.
    args: train.Args, LoopArgs or any object with some of LoopArgs' attributes. Those that it
        lacks get their defaults, except max_response_tokens and max_model_len: without them
        TypeError is raised."""

    def __init__(self, engine, tokenizer, processor, task, args):
        missing = {}
        for each in fields(LoopArgs):
            if not hasattr(args, each.name):
                missing[each.name] = each.default
        if "max_response_tokens" in missing or "max_model_len" in missing:
            raise TypeError(
                f"{type(self).__name__} needs args with max_response_tokens and "
                f"max_model_len; these lack {', '.join(missing)}: see LoopArgs")
        self.args = copy.copy(args)  # a loop may change its settings, but not those of others
        vars(self.args).update(missing)
        self.engine = engine
        self.tokenizer = templated(tokenizer, self.args.chat_template_args)
        self.processor = processor
        self.task = task

    async def run(self, sampling_params: dict, **row) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Runs one rollout and returns its output or outputs; every subclass writes its own.

        row: the columns of the data set's row, and index, step, rollout_n (the rollout's
        number within its group) and validate (True in an evaluation)."""
        raise TypeError(f"{type(self).__name__} has no run method")

    def start(
        self,
        row: dict,
        tools: list[dict] | None = None,
        trusted: Sequence[dict] | None = None,
    ) -> Trajectory:
        """Returns a trajectory that begins with row["prompt"], even if that is too long.

        trusted: messages that may spell control tokens; by default all of the prompt. The
        trajectory keeps them. Raises ValueError unless the prompt has one placeholder for
        each of the row's images."""
        prompt = row["prompt"]
        images = [_row_image(image) for image in row.get("images") or ()]
        engine_ids = render(self.tokenizer, prompt, tools, trusted)
        prompt_ids = expand(engine_ids, images, self.processor)
        return Trajectory(prompt, prompt_ids, engine_ids, images, trusted)

    @property
    def window(self):
        """The number of tokens that the engine takes, prompt and response together."""
        return self.args.max_model_len or math.inf

    def too_long(self, messages: Sequence[dict]) -> bool:
        """Returns True if messages certainly don't fit the window, without tokenising them.

        Tokenising a very long text is slow, and hardly any token has 16 characters."""
        return len(str(messages)) > 16 * (64 + self.window)

    def room(self, trajectory: Trajectory, used: int | None = None) -> int:
        """Returns how many more response tokens fit the budget and the window.

        used: tokens in the window; default: those of the trajectory's current sequence."""
        if used is None:
            used = len(trajectory.prompt_ids) + len(trajectory.response_ids)
        spent = len(trajectory.response_ids)
        for output in trajectory.finished:
            spent += len(output.response_ids)
        return min(self.args.max_response_tokens - spent, self.window - used)

    def append(
        self,
        trajectory: Trajectory,
        messages: list[dict],
        tools: list[dict] | None,
        stops: set[int],
        images: Sequence = (),
    ) -> bool:
        """Appends messages of tools or a user to the trajectory, with their tokens.

        Forks the trajectory if the template rewrites its history. Returns True if the
        messages and one token of reply fit. If not, nothing is appended, and the stop reason
        becomes "length".

        stops: see `stop_token_ids`. images: one for each placeholder in the messages."""
        if self.too_long(messages):
            trajectory.stop_reason = "length"
            return False
        images = [_row_image(image) for image in images]
        history = trajectory.messages
        try:
            engine_ids = turn_suffix(
                self.tokenizer, history, messages, stops, trajectory.ended, tools)
            ids = expand(engine_ids, images, self.processor)
            room = self.room(trajectory) - len(ids)
            add = trajectory.add_given
        except RewritesHistory:
            engine_ids = render(self.tokenizer, history + messages, tools, trajectory.trusted)
            ids = expand(engine_ids, [*trajectory.images, *images], self.processor)
            room = self.room(trajectory, used=len(ids))
            add = trajectory.fork
        if room < 1:
            trajectory.stop_reason = "length"
            return False
        add(ids, engine_ids)
        trajectory.images += images
        trajectory.messages += messages
        trajectory.user_turns += 1
        return True

    async def assistant_turn(self, trajectory: Trajectory, sampling_params: dict) -> str | None:
        """Samples one assistant turn, and appends its tokens and its message.

        Returns its text without reasoning but with special tokens (see `_read_turn`), or None
        if the turn was cut off. Raises ValueError if engine and processor expand an image to
        different numbers of tokens."""
        room = self.room(trajectory)
        if room < 1:
            trajectory.stop_reason = "length"
            return None
        max_tokens = min(sampling_params.get("max_tokens") or room, room)
        out = await self.engine.generate(
            request_id=trajectory.request_id,
            prompt_ids=list(trajectory.engine_ids),
            sampling_params={**sampling_params, "max_tokens": max_tokens},
            image_data=list(trajectory.images) or None,
        )
        prompt_ids = trajectory.prompt_ids + trajectory.response_ids
        if trajectory.images and out.prompt_ids != prompt_ids:
            raise ValueError(
                "the engine and the processor disagree about the tokens of the images: "
                f"{len(out.prompt_ids)} against {len(prompt_ids)}")
        trajectory.add_sampled(out, trained="structured_outputs" not in sampling_params)
        trajectory.stop_reason = out.stop_reason
        content_ids = out.token_ids
        stops = self.stop_token_ids(sampling_params)
        trajectory.ended = not stops.isdisjoint(content_ids[-1:])
        if trajectory.ended:
            content_ids = content_ids[:-1]
        message, text = self._read_turn(prompt_ids, content_ids)
        trajectory.messages.append(message)
        return text if out.stop_reason == "stop" else None

    def _read_turn(self, prompt_ids, ids):
        """Returns (message, text) for the ids of an assistant turn without its stop token.

        Reasoning is everything up to the last end tag of --think_tags, plus anything after a
        later start tag. It becomes the message's reasoning_content, without special tokens.
        text is the rest of the turn, with special tokens."""
        decode = self.tokenizer.decode
        message = {"role": "assistant", "content": decode(ids, skip_special_tokens=True)}
        text = decode(ids)
        start, end = self.args.think_tags.split()
        if decode(prompt_ids[-64:]).rstrip().endswith(start):  # the template has opened it
            text = start + text
        before, has_end, rest = text.rpartition(end)
        text, has_start, after = rest.partition(start)
        if has_end or has_start:
            reasoning = (before + after).removeprefix(start)
            # The tags may be special tokens, so these are dropped only now.
            for name, part in (("content", text), ("reasoning_content", reasoning)):
                part_ids = _tokenise(self.tokenizer, part)
                message[name] = decode(part_ids, skip_special_tokens=True)
        return message, text

    def stop_token_ids(self, sampling_params: dict) -> set[int]:
        """Returns the ids that end a turn: the tokenizer's and the sampling parameters'."""
        stops = sampling_params.get("stop_token_ids") or ()
        return {*stops, self.tokenizer.eos_token_id} - {None}


@dataclass
class Demonstration:
    """An engine that samples nothing: each call returns the next turn of a demonstration.

    turns: the assistant's messages that are still to come.
    loop: the agent loop that calls the engine.
    stops: the ids that may end a turn.

    No policy sampled these tokens, so their logprob is 0.0 and their version -1. If no turn
    is left, the result is empty, and its stop reason "abort" ends the rollout."""

    turns: list[dict]
    loop: AgentLoopBase
    stops: set[int]

    async def generate(
        self,
        *,
        prompt_ids: list[int],
        sampling_params: dict,
        image_data: list | None = None,
        **call,
    ) -> TokenOutput:
        """Returns the next turn. Raises ValueError if it is too long, or as `turn_ids` does."""
        ids = self.turn_ids(self.turns.pop(0)) if self.turns else []
        n = len(ids)
        room = sampling_params.get("max_tokens", n)
        if n > room:
            raise ValueError(f"a turn of the demonstration has {n} tokens, with room for {room}")
        return TokenOutput(
            token_ids=ids,
            logprobs=[0.0] * n,
            versions=[-1] * n,
            stop_reason="stop" if ids else "abort",
            prompt_ids=expand(prompt_ids, image_data or (), self.loop.processor),
        )

    def turn_ids(self, message: dict) -> list[int]:
        """Returns the ids of a turn, including the token that ends it in the template.

        They are what the template writes after its generation prompt. If the template changes
        the text (some drop reasoning), the text itself is tokenised instead. Raises ValueError
        if the turn is empty, or if a token that ends a turn occurs inside it."""
        tokenizer = self.loop.tokenizer
        chat = [{"role": "user", "content": "?"}]
        before = render_text(tokenizer, chat, None, True)
        said = {"content": ""} | message
        written = render_text(tokenizer, [*chat, said], None).partition(before)[2]
        ids = list(_inner_ids(tokenizer, written))
        while ids and ids[-1] not in self.stops:  # such as a newline after the turn's end
            ids.pop()
        end = ids.pop() if ids else tokenizer.eos_token_id
        if "tool_calls" not in said and said["content"] not in written:
            ids = list(_inner_ids(tokenizer, said["content"]))
        if not ids or not self.stops.isdisjoint(ids):
            raise ValueError(f"the policy could not say this turn of a demonstration: {message}")
        return [*ids, end]


@register("single_turn")
class SingleTurnLoop(AgentLoopBase):
    """One prompt, one answer."""

    async def run(self, sampling_params, **row):
        trajectory = self.start(row)
        await self.assistant_turn(trajectory, sampling_params)
        return trajectory.output()


# ---------------------------------------------------------------- tool calls


@functools.cache
def tool_parser(name: str, tokenizer):
    """Returns the parser that `vllm serve --tool-call-parser` has under this name.

    Raises BadInput if there is none, if the tokenizer lacks the tokens of its format, or if
    it can't parse plain text."""
    from vllm.tool_parsers import ToolParserManager

    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
        parser.extract_tool_calls("", _parser_request("[]"))
        return parser
    except KeyError:
        problem = f": choose from {', '.join(sorted(ToolParserManager.list_registered()))}"
    except NotImplementedError:  # it needs vLLM's own chat server
        problem = " does not parse plain text: choose another"
    except (RuntimeError, ValueError) as error:  # the tokenizer lacks a token of its format
        problem = f" does not fit the model: {error}"
    raise BadInput(f"--tool_parser {name}{problem}")


@functools.cache
def _parser_request(schemas):
    """Returns the chat request in which some parsers look up the tools.

    schemas: the tools' schemas as a JSON list, so that requests can be cached."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(
        messages=[{"role": "user", "content": ""}],
        tools=json.loads(schemas) or None,
    )


def parse_tool_calls(text: str, parser_name: str, tokenizer, schemas: list[dict]) -> tuple:
    """Returns (the text outside of tool calls, [{"name", "arguments", "error"}, ...]).

    arguments is a dict. error is None, or tells the model why the call can't be executed."""
    # The model reads what is wrong with a call. vLLM would log it, with a traceback. This is
    # set each time because a new vLLM engine resets it.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    parser = tool_parser(parser_name, tokenizer)
    malformed = {
        "name": "",
        "arguments": {},
        "error": "the tool call is not valid JSON with name and arguments",
    }
    try:
        parsed = parser.extract_tool_calls(text, _parser_request(json.dumps(schemas)))
    except Exception:  # some parsers don't catch all that a model can write
        return text, [malformed]
    if not parsed.tools_called:
        start = getattr(parser, "tool_call_start_token", None)
        is_malformed = start and start in text
        return text, [malformed] if is_malformed else []
    calls = []
    for call in parsed.tool_calls:
        arguments = {}
        error = None
        try:
            arguments = _parse_arguments(call.function.arguments)
        except (ValueError, RecursionError) as problem:
            error = f"wrong arguments: {problem}"
        calls.append({"name": clean(call.function.name), "arguments": arguments, "error": error})
    return parsed.content or "", calls


def _parse_arguments(text):
    """Returns the arguments of a tool call, a JSON text, as a dict. Raises ValueError."""
    # `clean` would miss a surrogate in JSON's escaped form, so the text is unescaped first.
    unescaped = json.dumps(json.loads(text), ensure_ascii=False)
    arguments = json.loads(clean(unescaped))
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be a JSON object")
    return arguments


def _call_id(turn, number):
    """Returns the id of a turn's call: nine characters, as Mistral's template requires.

    It is the same in every run."""
    return f"{turn:06d}{number:03d}"


def function_call(id: str, name: str, arguments: dict) -> dict:
    """Returns a tool call for an assistant's message, in the form that chat templates read."""
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": id, "function": function}


def make_calls(message: dict, content: str, calls: list[dict], turn: int):
    """Puts calls, as from `parse_tool_calls`, into an assistant's message.

    content: the text that remains. turn: the number of the assistant's turn, for the ids."""
    message["content"] = content
    message["tool_calls"] = [
        function_call(_call_id(turn, number), call["name"], call["arguments"])
        for number, call in enumerate(calls)
    ]


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Turns of sampling, tool calls and simulated users: a state machine, as in verl.

        pending -> generating -> processing_tools -> generating ...   the model calls tools
                              -> interacting -> generating ...        a simulated user answers
                              -> None                                 the end

    A state is a method that gets the trajectory and returns the next state. A subclass adds
    one by returning it from another: `return self.reflecting`. If a tool raises, passes its
    deadline or is called wrongly, the model reads a message about it, and a metric counts it."""

    async def run(self, sampling_params, **row) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Runs one rollout: its turns, then the tools' `calc_reward`, then their `release`.

        Returns one output, or a list of several if the template rewrote the history."""
        self.sampling_params = sampling_params
        self.tools_kwargs = row_kwargs(row, "tools_kwargs")
        self.tools = task_tools(self.task, self.tools_kwargs)
        self.schemas = [tool.schema for tool in self.tools.values()]
        self.interaction_kwargs = dict(row_kwargs(row, "interaction_kwargs"))
        self.interaction = task_interaction(self.task, self.interaction_kwargs)
        self.interaction_kwargs.pop("name", None)
        self.user_answers = 0
        self.created = {}  # by tool name, the asyncio task that runs its `create`
        trajectory = self.start(row, self.schemas)
        try:
            await self._run_states(trajectory)
            for name, created in self.created.items():
                if created.done() and not created.exception():
                    reward = await self._end_tool(trajectory, name, "calc_reward")
                    trajectory.record("tool", name, reward, None)
        finally:
            await self.close(trajectory)
        return trajectory.outputs() if trajectory.finished else trajectory.output()

    async def _run_states(self, trajectory):
        """Goes from state to state until the end, or until --trajectory_timeout has passed."""
        state = self.pending
        try:
            async with asyncio.timeout(self.args.trajectory_timeout or None) as budget:
                while state:
                    state = await state(trajectory)
        except TimeoutError:
            if not budget.expired():  # a TimeoutError of a tool or an interaction: a failure
                raise
            trajectory.stop_reason = "timeout"  # the tokens so far are kept and graded

    async def pending(self, trajectory):
        """Lets the interaction speak first, if there is one and it wants to."""
        text = None
        if self.interaction:
            text = await self._ask_interaction(
                self.interaction.start, trajectory.request_id, **self.interaction_kwargs)
        if text is not None:
            text = words(text, f"the text of interaction {self.interaction.name!r}")
            trajectory.messages.append({"role": "user", "content": text})
            engine_ids = render(
                self.tokenizer, trajectory.messages, self.schemas, trajectory.trusted)
            prompt_ids = expand(engine_ids, trajectory.images, self.processor)
            trajectory.begin(prompt_ids, engine_ids)
        if self.tools:
            trajectory.count("tool_calls", 0)
        return self.generating

    async def generating(self, trajectory):
        """Samples an assistant turn. Next, its tools are called, or else the user answers."""
        text = await self.assistant_turn(trajectory, self.sampling_params)
        if text is None:
            return None
        trajectory.tool_calls = self.parse(trajectory, text) if self.tools else []
        if not trajectory.tool_calls:
            return self.interacting if self.interaction else None
        if self._out_of_turns(trajectory):
            return None
        return self.processing_tools

    def _out_of_turns(self, trajectory, user_answers=0):
        """Returns whether a limit on turns is reached; if so, sets the stop reason."""
        reached = (
            0 < self.args.max_assistant_turns <= trajectory.assistant_turns
            or 0 < self.args.max_user_turns <= user_answers)
        if reached:
            trajectory.stop_reason = "max_turns"
        return reached

    def parse(self, trajectory, text):
        """Returns the calls of a turn, malformed ones too (see `parse_tool_calls`).

        Puts them into the trajectory's last message if at least one has a name."""
        content, calls = parse_tool_calls(text, self.args.tool_parser, self.tokenizer, self.schemas)
        if any(call["name"] for call in calls):
            make_calls(trajectory.messages[-1], content, calls, trajectory.assistant_turns)
        return calls

    async def processing_tools(self, trajectory):
        """Executes the turn's tool calls concurrently; answers them in their order."""
        calls = trajectory.tool_calls
        limit = self.args.max_parallel_calls
        for call in calls[limit:]:
            call["error"] = f"only {limit} tool calls at a time are executed"
        started = time.perf_counter()
        responses = await asyncio.gather(
            *(self.call_tool(trajectory, call) for call in calls),
            return_exceptions=True,
        )
        trajectory.count("tool_s", time.perf_counter() - started)
        trajectory.count("tool_calls", len(calls))
        messages = []
        images = []
        for number, (call, response) in enumerate(zip(calls, responses)):
            try:
                if isinstance(response, Exception):
                    raise response
                trajectory.record("tool", call["name"], response.reward, response.metrics)
                self._check_room_for_images(trajectory.images + images, response.images)
            except Exception as error:  # the model reads it, and the rollout continues
                response = self._error_response(trajectory, error)
            messages.append({
                "role": "tool",
                "name": call["name"],
                "content": self._content(response),
                "tool_call_id": _call_id(trajectory.assistant_turns, number),
            })
            images += response.images
        return self.answer(trajectory, messages, images)

    def _check_room_for_images(self, images, new):
        """Raises ValueError if `new` images would exceed --max_images."""
        limit = self.args.max_images
        if len(images) + len(new) > limit:
            raise ValueError(
                f"no room for {len(new)} more images: {len(images)} of {limit} are there")

    def _error_response(self, trajectory, error):
        """Counts an error, and returns a ToolResponse that tells the model about it."""
        trajectory.count("tool_timeouts" if isinstance(error, CallTimeoutError) else "tool_errors")
        return ToolResponse(f"Error: {str(error) or repr(error)}")

    def _content(self, response):
        """Returns the content of a tool's message: a text, or a list of parts with images."""
        text = self._shorten(response.text)
        if not response.images:
            return text
        content = [{"type": "image"} for _ in response.images]
        if text:
            content.insert(0, {"type": "text", "text": text})
        return content

    async def call_tool(self, trajectory, call):
        """Executes a call under its deadline; returns a ToolResponse with its images loaded.

        Raises ValueError for a malformed call or an unknown tool, CallTimeoutError at the
        deadline, and whatever the tool raises."""
        name = call["name"]
        if call["error"]:
            raise ValueError(call["error"])
        if name not in self.tools:
            raise ValueError(f"there is no tool {name!r}; the tools are {sorted(self.tools)}")
        execution = self._execute(trajectory, name, call["arguments"])
        return await in_time(name, self.args.tool_timeout, execution)

    async def _execute(self, trajectory, name, arguments):
        """Runs a tool's `execute`, after its `create`, and returns a ToolResponse."""
        if name not in self.created:
            create = self._tool_method(trajectory, name, "create")
            self.created[name] = asyncio.ensure_future(_contained(create))
        await asyncio.shield(self.created[name])  # parallel calls wait for the same one
        response = await self._tool_method(trajectory, name, "execute", copy.deepcopy(arguments))
        reward = metrics = None
        if isinstance(response, tuple):
            response, reward, metrics = response
        if not isinstance(response, ToolResponse):
            response = ToolResponse(response)
        if response.images and self.processor is None:
            raise ValueError("the tool returned an image, and this agent reads text only")
        images = [load_image(image) for image in response.images]
        if images:
            image_tokens(images, self.processor)  # raises if the model does not accept a shape
        return ToolResponse(
            text=str(response.text),
            images=images,
            reward=response.reward if reward is None else reward,
            metrics={**response.metrics, **(metrics or {})},
        )

    async def _tool_method(self, trajectory, name, method, *arguments):
        """Calls a method of a tool with the keyword arguments that the row has for it."""
        kwargs = self.tools_kwargs.get(name, {}).get(f"{method}_kwargs", {})
        function = getattr(self.tools[name], method)
        return await call(function, trajectory.request_id, *arguments, **kwargs)

    async def _end_tool(self, trajectory, name, method):
        """Calls `calc_reward` or `release` of a tool, under the deadline of a tool call."""
        what = f"{method} of tool {name!r}"
        coroutine = self._tool_method(trajectory, name, method)
        return await in_time(what, self.args.tool_timeout, coroutine)

    async def _ask_interaction(self, method, *args, **kwargs):
        """Calls a method of the interaction, under the deadline of a tool call."""
        coroutine = call(method, *args, **kwargs)
        return await in_time(method.__qualname__, self.args.tool_timeout, coroutine)

    def _shorten(self, text):
        """Cuts a text to max_tool_response_tokens tokens and "...", as verl does.

        tool_response_truncate_side "left" keeps its start, "right" its end, "middle" both."""
        limit = self.args.max_tool_response_tokens
        text = clean(text)
        if len(text.encode()) <= limit:  # a token has at least one byte
            return text
        # Tokenising a huge text is slow, so only this many characters at either end are.
        reach = 64 * limit
        if len(text) > 2 * reach:
            text = f"{text[:reach]}...{text[-reach:]}"
        ids = _tokenise(self.tokenizer, text)
        if len(ids) <= limit:
            return text
        n_heads = {"left": limit, "middle": (limit + 1) // 2, "right": 0}
        n_head = n_heads[self.args.tool_response_truncate_side]
        n_tail = limit - n_head
        head = self.tokenizer.decode(ids[:n_head])
        tail = self.tokenizer.decode(ids[len(ids) - n_tail :])
        return f"{head}...{tail}"

    async def interacting(self, trajectory):
        """Lets the simulated user answer, and reward, the assistant's turn."""
        answer = await self._ask_interaction(
            self.interaction.generate_response,
            trajectory.request_id,
            copy.deepcopy(trajectory.messages),
            **self.interaction_kwargs,
        )
        name = self.interaction.name
        if not isinstance(answer, Sequence) or len(answer) != 4 or answer[0] not in (True, False):
            raise ValueError(
                f"interaction {name!r} returned {answer!r:.80}: must be (done, text, "
                "reward, metrics), and done True or False")
        done, text, reward, metrics = answer
        trajectory.record("interaction", name, reward, metrics)
        if done and text is None:
            text = ""
        text = words(text, f"the text of interaction {name!r}")
        if done or self._out_of_turns(trajectory, self.user_answers):
            trajectory.extra["unread"] = text  # the report shows it
            return None
        self.user_answers += 1
        return self.answer(trajectory, [{"role": "user", "content": text}])

    def answer(self, trajectory, messages, images=()):
        """Appends messages; returns the next state: `generating` if they and a reply fit."""
        stops = self.stop_token_ids(self.sampling_params)
        fits = self.append(trajectory, messages, self.schemas, stops, images)
        return self.generating if fits else None

    async def close(self, trajectory):
        """Releases what was created, also after a failure or a cancellation.

        Errors are counted, and not raised."""
        for create in self.created.values():
            create.cancel()  # it may have outlived its deadline
        closers = [self._end_tool(trajectory, name, "release") for name in self.created]
        if self.interaction:
            finalize = self.interaction.finalize
            closers.append(self._ask_interaction(finalize, trajectory.request_id))
        for result in await asyncio.gather(*closers, return_exceptions=True):
            if isinstance(result, BaseException):
                trajectory.count("release_errors")
