"""Runs ONE rollout: agent loops, tools and interactions.

An agent loop gets a row of the data set and an engine, and returns tokens: those that the
policy sampled (mask 1) and those that it was given (mask 0: tool results, user turns, the
template's own). One rule governs this file: *token in, token out*. Sampled ids are appended
verbatim and never tokenised again. The text between two sampled turns is the difference of
two renderings of the chat template (`turn_suffix`).

The words that code, documents, log and flags share:
    prompt      the chat messages in one row of the data set, and the task that they pose
    group       the units that are compared; by default all those of one prompt
    rollout     one run of an agent loop; `sample` is its number within the group
    trajectory  the messages and tokens of a rollout while it runs (`Trajectory`)
    turn        one message of the assistant, or the reply of tools or of a user
    token       one id; its mask is 1 if the policy sampled it, else 0
    output      one finished token sequence (`AgentLoopOutput`). A rollout has one or more
                of them, numbered by `segment`
    unit        the outputs of a rollout that share one reward; by default all of them

To write your own agent, subclass `AgentLoopBase` in the task file, decorate the class with
`@register("name")`, and select it with `--agent name` or with a row's `agent_name`. Loops are
coroutines on one background thread. Hundreds of them run at once, so they must not block.
Names follow verl's agent loop (https://verl.readthedocs.io/en/latest/advance/agent_loop.html).

This file imports nothing else from this repository. Pasted into another project, it works
with `LoopArgs` as its settings."""

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
    """An error in the user's flags, task file, rows or model. train.py prints only its message."""


# ---------------------------------------------------------------- settings and results


def setting(default, help: str):
    """Returns a dataclass field with a default and a help text."""
    return field(default=default, metadata={"help": help})


@dataclass
class LoopArgs:
    """The settings that agent loops read from their `args`.

    train.Args inherits from this class. Any object with these attributes works as well."""

    agent: str | None = setting(
        None, "agent loop; default: tool_agent with TOOLS or INTERACTIONS, else single_turn")
    max_response_tokens: int = setting(
        128, "token budget of a rollout: sampled, tool and user tokens together")
    max_model_len: int | None = setting(
        None, "the engine's window: tokens of prompt and response together; default: no limit "
        "(train.py: max_prompt_tokens + max_response_tokens)")
    max_assistant_turns: int = setting(
        8, "a rollout ends after this many turns, with stop reason max_turns; 0: no limit")
    max_user_turns: int = setting(
        0, "a rollout ends after this many answers of a simulated user. One more is asked for, but "
        "only its reward counts; 0: no limit")
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
        0.0, "seconds for a whole rollout. A tool_agent then ends, and keeps its tokens; other "
        "loops are cancelled later. With --max_staleness, updates count as well; 0: no limit")
    max_parallel_calls: int = setting(
        8, "tool calls executed in one turn; others return an error to the model")
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
    """One finished token sequence. An agent loop returns one or more of them for a rollout.

    The four response_* lists have one entry for each response token. response_mask is 1 for
    tokens that the policy sampled and 0 for those of tools, users and the template, whose
    logprob is 0.0 and whose version is -1. turn_rewards holds pairs (index into response_ids,
    reward). num_turns is the number of assistant, user and tool turns + 1, as in verl. images
    are PIL images in the order of their placeholders; the ids repeat a placeholder for each
    token of its image.

    unit: outputs of one rollout with the same unit share one reward, that of the last of
        them, and count once in advantages and in the loss. By default the whole rollout is
        one unit.
    group: units of the same prompt and the same group are compared with each other. By
        default the group has the unit's name, so that a rollout is compared with all other
        rollouts of its prompt.
    docs/units.md has examples: the two sides of a game, the branches of a tree.

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
    """Returns the terminal reward of an output. None counts as 0, a dict as its "score"."""
    reward = output.reward
    if isinstance(reward, dict):
        reward = reward["score"]
    return float(reward or 0.0)


def total_reward(output: AgentLoopOutput) -> float:
    """Returns the terminal reward of an output plus the sum of its turn rewards."""
    return outcome(output) + sum(reward for _, reward in output.turn_rewards)


def numeric_entries(values: dict) -> dict[str, float]:
    """Returns the entries of a dict that are real numbers, including bools and numpy's numbers."""
    return {name: value for name, value in values.items() if isinstance(value, Real)}


# ---------------------------------------------------------------- texts and numbers of user code


# Marks that the next character is tokenised alone (`_tokenise`). It is a Unicode noncharacter.
# `clean` removes it from texts, so each one in a rendered chat was inserted by this file.
TOKEN_BREAK = "\ufdd0"

FLOAT32_LIMIT = 1e38  # for numbers that become float32 tensors, whose largest value is 3.4e38


def clean(text: str) -> str:
    """Returns the text without TOKEN_BREAK and in a form that every tokenizer accepts.

    Lone surrogates become "?". They come from garbage bytes, or from "\\ud83d" in JSON."""
    return text.encode(errors="replace").decode().replace(TOKEN_BREAK, "")


def checked_text(text, name: str) -> str:
    """Returns a str from user code, cleaned by `clean`.

    Raises ValueError for any other type. `name` identifies the text in its message."""
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a str, got {text!r:.80}")
    return clean(text)


def checked_number(value, name: str) -> float:
    """Returns a number from user code as a float.

    Raises ValueError for NaN, for numbers of 1e38 or more, and for all other values, even a
    str that spells a number. `name` identifies the value in its message."""
    number = math.nan
    if not isinstance(value, (str, bytes)):
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value)
    if not abs(number) < FLOAT32_LIMIT:  # true for NaN as well
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return number


# ---------------------------------------------------------------- chat templates


def render_text(
    tokenizer,
    messages: list[dict],
    tools: list[dict] | None,
    add_generation_prompt: bool = False,
) -> str:
    """Renders a chat as text with the tokenizer's template. (`render` returns token ids.)

    Raises BadInput if the tokenizer has no chat template."""
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
    """Returns the token ids of a chat, by default with the generation prompt at its end.

    trusted: messages in which a text like "<|im_end|>" becomes that control token. In all
    other messages, and in tools, it stays text (`_ids_without_forged_tokens`). By default
    all messages are trusted, as in a row's prompt.

    An empty chat has no tokens. Its rollout begins with an Interaction's message."""
    if not messages:
        return []

    def ids_of(messages, tools):
        text = render_text(tokenizer, messages, tools, add_generation_prompt)
        return list(_tokenise_prompt(tokenizer, text))

    if trusted is None:
        trusted = messages
        if not tools:  # all texts are trusted
            return ids_of(messages, tools)
    return _ids_without_forged_tokens(
        tokenizer, ids_of, add_generation_prompt, messages, tools, trusted)


@functools.lru_cache(maxsize=64)
def with_template_variables(tokenizer, variables: str):
    """Returns a copy of the tokenizer whose chat template gets these variables.

    variables: a JSON object. If it is empty, the tokenizer itself is returned."""
    variables = json.loads(variables)
    if not variables:
        return tokenizer
    changed = copy.copy(tokenizer)
    changed.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **variables)
    return changed


# Regular expressions for the characters of a text that are tokenised alone.
NO_CHARACTER = r"(?!)"
PUNCTUATION = r"[^\w\s]|_"
ANY_CHARACTER = r"(?s:.)"

# Pairs (characters of user texts, characters of policy texts), from mild to strict. User texts
# are those of users and tools, policy texts those of the assistant and of system messages.
SPLIT_LEVELS = (
    (NO_CHARACTER, NO_CHARACTER),
    (PUNCTUATION, NO_CHARACTER),
    (ANY_CHARACTER, ANY_CHARACTER),
)
POLICY_ROLES = ("assistant", "system")

# The control tokens of neutral chats, cached because the rollouts of a group repeat chats.
_NEUTRAL_CONTROLS = {}


def _ids_without_forged_tokens(tokenizer, ids_of, depends_on, messages, tools, trusted=()):
    """Returns the ids of a chat, with only those control tokens that the template writes.

    A control token is an added token that structures a chat, such as <|im_end|> or
    <tool_call>. Which ones the template writes is seen in a neutral chat: the same messages
    and tools, with "xxxxxxxxx" in place of each text. Any further one is forged: a text
    spells it, perhaps only after the template has changed or joined texts.

    The SPLIT_LEVELS are tried from mild to strict, and the first ids without forged tokens
    are returned. Further tokens are accepted if the policy wrote them (`only_policy_adds`).

    ids_of: a function of (messages, tools) that renders and tokenises a chat.
    depends_on: what else ids_of reads, as a value that JSON can hold: part of a cache's key.
    trusted: messages whose texts stay as they are, at each level and in the neutral chat.

    Raises ValueError if no level is accepted."""
    controls = _control_tokens(tokenizer)

    def edited(edit_user, edit_policy):
        """Returns messages and tools with their texts edited by these two functions."""
        chat = []
        for message in messages:
            edit = edit_policy if message["role"] in POLICY_ROLES else edit_user
            chat.append(message if message in trusted else _edit_texts(message, edit))
        return chat, _edit_texts(tools, edit_user)

    def controls_of(ids):
        return [token for token in ids if token in controls]

    def special_of(ids):
        return [token for token in controls_of(ids) if controls[token].special]

    def only_policy_adds(ids, edit_policy):
        """Returns whether all control tokens would still be there if user texts were neutral.

        Then the further ones come from policy texts. None of them may be special.

        The policy may have sampled a token such as <think>, and its history must keep it.
        Special tokens such as <|im_end|> are different: decoding drops those that were
        sampled, so a text that still has one spelled it out."""
        if special_of(ids) != special_of(neutral_controls):
            return False
        without_user_texts = ids_of(*edited(_neutral, edit_policy))
        return controls_of(ids) == controls_of(without_user_texts)

    neutral_chat = edited(_neutral, _neutral)
    key = tokenizer, json.dumps([depends_on, neutral_chat], default=str)
    if key not in _NEUTRAL_CONTROLS:
        if len(_NEUTRAL_CONTROLS) > 1024:
            _NEUTRAL_CONTROLS.clear()
        _NEUTRAL_CONTROLS[key] = controls_of(ids_of(*neutral_chat))
    neutral_controls = _NEUTRAL_CONTROLS[key]
    for user_characters, policy_characters in SPLIT_LEVELS:
        split_user = functools.partial(_split, user_characters)
        split_policy = functools.partial(_split, policy_characters)
        ids = ids_of(*edited(split_user, split_policy))
        if controls_of(ids) == neutral_controls or only_policy_adds(ids, split_policy):
            return ids
    raise ValueError("the chat template makes control tokens of what messages say")


def _neutral(text):
    """Returns a text that spells no control token, in place of any text."""
    return "xxxxxxxxx"


def _split(characters, text):
    """Puts a TOKEN_BREAK before each character that matches the regular expression."""
    return re.sub(characters, TOKEN_BREAK + r"\g<0>", clean(text))


def _edit_texts(value, edit):
    """Returns a message, or tools' schemas, with edit(text) in place of each text.

    Blank texts, roles, types and ids stay. So do keys, unless they are free text, as keys in
    a schema can be."""
    if isinstance(value, str):
        return edit(value) if value.strip() else value
    if isinstance(value, list):
        return [_edit_texts(inner, edit) for inner in value]
    if not isinstance(value, dict):
        return value
    edited = {}
    for key, inner in value.items():
        if key not in ("role", "type", "id", "tool_call_id"):
            inner = _edit_texts(inner, edit)
        if not key.isidentifier():
            key = _edit_texts(key, edit)
        edited[key] = inner
    return edited


@functools.cache
def _control_tokens(tokenizer):
    """Returns the tokenizer's control tokens by id.

    They are its special tokens, and all other added tokens that have punctuation and more
    than one character. The rest are plain words, white space and single characters."""
    controls = {}
    for number, token in tokenizer.added_tokens_decoder.items():
        is_markup = len(token.content) > 1 and re.search(PUNCTUATION, token.content)
        if token.special or is_markup:
            controls[number] = token
    return controls


def _tokenise(tokenizer, text):
    """Returns the ids of a rendered text, in which no token spans a TOKEN_BREAK.

    A character after a TOKEN_BREAK never becomes a control token. If the tokenizer has no
    other token for it (it is a special token itself, or unknown), the character is dropped.

    No special tokens are added, because the template writes them all, BOS included."""
    first, *pieces = text.split(TOKEN_BREAK)
    ids = tokenizer.encode(first, add_special_tokens=False)
    for piece in pieces:
        character_ids = _inner_ids(tokenizer, piece[:1])
        ids += [token for token in character_ids if token not in _control_tokens(tokenizer)]
        ids += _inner_ids(tokenizer, piece[1:])
    return ids


@functools.lru_cache(maxsize=1024)
def _inner_ids(tokenizer, text):
    """Returns the ids of a text that does not begin a sequence.

    Some tokenizers put a space before the first word of a sequence. So the text is tokenised
    after the EOS token, whose id is then left out."""
    start = tokenizer.eos_token or ""
    ids = tokenizer.encode(start + text, add_special_tokens=False)
    return ids[1:] if start else ids


# Cached, because the rollouts of a group have the same prompt.
_tokenise_prompt = functools.lru_cache(maxsize=1024)(_tokenise)


class RewritesHistory(ValueError):
    """New messages make the template change earlier ones, so a new sequence must begin."""


def turn_suffix(
    tokenizer,
    messages: list[dict],
    new: list[dict],
    stop_token_ids: set[int],
    ended: bool,
    tools: list[dict] | None = None,
) -> list[int]:
    """Returns the tokens that `new` messages (of tools or users) add after an assistant turn.

    Many templates end a turn with an end-of-turn token and a newline, but the policy samples
    only the token. The suffix must therefore begin with that newline. So the chat is rendered
    without and with `new`. In the second text, the suffix begins at the last end-of-turn
    token of the first. (Starting at the end of the first text would lose the newline:
    verl#6501.) Texts can't forge control tokens (`_ids_without_forged_tokens`).

    stop_token_ids: the ids that may end a turn.
    ended: whether the policy sampled a stop token, which the suffix must not repeat. If not
        (a stop string ended its turn), the suffix begins with the end-of-turn token.

    Raises RewritesHistory if new messages change earlier ones, as where Qwen3 drops earlier
    reasoning, and ValueError if the template writes nothing for them."""

    def ids_of(chat, tools):
        before = render_text(tokenizer, chat[: len(messages)], tools)
        after = render_text(tokenizer, chat, tools, True)
        if not after.startswith(before):
            raise RewritesHistory("the chat template is not append-only: it changed a message")
        # No token spans an end-of-turn token. So the text from there on gets the same ids
        # as it would within the whole text.
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
    return _ids_without_forged_tokens(tokenizer, ids_of, depends_on, messages + new, tools)


# ---------------------------------------------------------------- images


# Others are excluded: decoding EPS, for example, runs programs.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 64_000_000  # 256 MB decoded


def open_image(source):
    """Opens an image from a path, bytes, or a dict {"bytes", "path"} as in Hugging Face's files.

    Reads only the header. Raises ValueError unless the file has one of IMAGE_FORMATS and at
    most MAX_PIXELS. A PIL image is returned as it is, without these checks."""
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
    """Returns the bytes or the path of a dict {"bytes", "path"}, and any other source as it is."""
    if isinstance(source, dict):
        return source.get("bytes") or source.get("path")
    return source


def load_image(source):
    """Opens an image (`open_image`) and decodes it, upright and in RGB.

    Raises ValueError if that fails."""
    from PIL import ImageOps

    image = open_image(source)
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # a file that ends early, a decompression bomb
        raise ValueError(f"an image can't be decoded: {error}") from None


_cached_image = functools.lru_cache(maxsize=64)(load_image)


def _load_row_image(source):
    """Loads an image of a row (`load_image`). A PIL image has been loaded, and is returned.

    All rollouts of a group get the same object, so that it is preprocessed only once."""
    from PIL import Image

    if isinstance(source, Image.Image):
        return source
    return _cached_image(_file_of(source))


def image_tokens(images, processor):
    """Returns the number of tokens of each image. Raises ValueError for an impossible shape."""
    sizes = [(image.height, image.width) for image in images]
    return processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"]


def expand(ids: list[int], images: Sequence, processor) -> list[int]:
    """Repeats each image's placeholder for every token of the image, as the model expects.

    processor: the model's image processor; None for text models. Raises ValueError unless
    there is one placeholder for each image, and the model accepts each image's shape."""
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
    """A tool with state or resources.

    One instance serves all rollouts, so keep each rollout's state under its request_id.

    Each rollout that calls the tool runs `create` once before the first `execute`,
    `calc_reward` once at its end, and then `release`, even after a failure. Subclasses must
    override `execute`, and set `name` and `schema` (the JSON schema of an OpenAI function) on
    the class or the instance."""

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
        """Frees what `create` made for this rollout, even if the rollout failed."""


class FunctionTool(Tool):
    """A Python function as a tool. Its type hints and docstring give the schema."""

    def __init__(self, function: Callable):
        from transformers.utils import get_json_schema

        self.function = function
        self.name = function.__name__
        self.schema = get_json_schema(function)  # raises if a parameter has no hint or description

    async def execute(self, request_id: str, arguments: dict, **execute_kwargs):
        return await call(self.function, **arguments, **execute_kwargs)


_function_tool = functools.cache(FunctionTool)


def as_tool(tool: Tool | Callable) -> Tool:
    """Returns a Tool unchanged, and a function as a Tool (cached).

    Raises BadInput for anything else."""
    if isinstance(tool, Tool):
        return tool
    if inspect.isroutine(tool):
        return _function_tool(tool)
    raise BadInput(f"TOOLS holds {tool!r}, which is neither a Tool instance nor a function")


def row_kwargs(row: dict, name: str) -> dict:
    """Returns a row's tools_kwargs or interaction_kwargs.

    They are stored in a column of that name, or, as in verl, under that key of extra_info.
    A row without them has {}."""
    return row.get(name) or (row.get("extra_info") or {}).get(name) or {}


def task_tools(task, tools_kwargs: dict | None = None) -> dict[str, Tool]:
    """Returns the task's tools by name: those that are keys of tools_kwargs, or all if it is empty.

    Raises BadInput for an invalid tool, two tools of the same name, and an unknown key."""
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

    One instance serves all rollouts, so keep each rollout's state under its request_id."""

    name: str = "interaction"

    async def start(self, request_id: str, **kwargs) -> str | None:
        """Returns a first user message, which follows the row's prompt, or None."""

    async def generate_response(self, request_id: str, messages: list[dict], **kwargs) -> tuple:
        """Returns (done, text, reward, metrics).

        done: whether the rollout ends here. text: the next user message; if done, it may be None.
        reward: for the assistant's last turn, or None. metrics: a dict of numbers, or None."""
        raise TypeError(f"{type(self).__name__} has no generate_response method")

    async def finalize(self, request_id: str):
        """Frees what `start` made for this rollout, even if the rollout failed."""


def task_interaction(task, kwargs: dict) -> Interaction | None:
    """Returns the task's interaction named kwargs["name"], or its only one if there is no name.

    Returns None if the task has no interactions, or if kwargs are empty and it has several.
    Raises BadInput for an unknown name, for kwargs without a name if the task has several
    interactions, and for invalid INTERACTIONS."""
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

    A SystemExit would end the event loop, and a CancelledError would cancel the task. A future
    does not accept a StopIteration."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(repr(error))


async def _contained(coroutine):
    """Awaits user code, and raises its exceptions as ones that asyncio passes on (`_failure`).

    If the running task itself is cancelled, CancelledError passes through unchanged."""
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


# The asyncio.Timeout of the running user code. Code that must first wait for a slot may
# postpone the deadline with `reschedule`, as examples/sandbox.py does.
DEADLINE = contextvars.ContextVar("DEADLINE")


async def in_time(name: str, seconds: float, coroutine: Awaitable) -> Any:
    """Awaits user code under a deadline, and returns its result.

    The code runs as a task called `name`. The task is cancelled at the deadline, or if the
    caller is cancelled. It then has `seconds` once more for its cleanup, and after that it
    is abandoned. seconds 0 means no deadline and no limit on the cleanup.

    Raises CallTimeoutError at the deadline, and whatever the code raises."""
    try:
        async with asyncio.timeout(seconds or None) as deadline:
            previous = DEADLINE.set(deadline)
            task = asyncio.create_task(_contained(coroutine), name=name)  # copies the context
            DEADLINE.reset(previous)
            await asyncio.wait([task])
    except TimeoutError:
        if not task.done():  # else it finished just in time
            raise CallTimeoutError(f"{name} took longer than {seconds:g} seconds") from None
    finally:
        if task.cancel():  # False if it is done
            await asyncio.wait([task], timeout=seconds or None)
    return await _contained(task)


_IDLE_THREADS: list[queue.SimpleQueue] = []  # for each idle thread, the queue of its jobs


async def in_thread(function: Callable, /, *args, **kwargs) -> Any:
    """Runs a plain function in a daemon thread, so that it does not block the event loop.

    Not asyncio.to_thread: Python waits for its threads when it exits, forever if a tool never
    returns. It does not wait for daemon threads. An idle thread is reused, because starting
    a new one takes far longer.

    Raises whatever the function raises (see `_failure`)."""
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
    """Runs the jobs from a thread's queue, forever. Between two jobs the thread is idle."""
    while True:
        result, function = jobs.get()
        try:
            value = function()
            deliver = result.set_result
        except BaseException as error:
            value = _failure(error)
            deliver = result.set_exception
        _IDLE_THREADS.append(jobs)  # before the result is known: the next call finds it idle
        with suppress(RuntimeError):  # the event loop may be closed by now
            result.get_loop().call_soon_threadsafe(_deliver_once, result, deliver, value)


def _deliver_once(result, deliver, value):
    """Calls deliver(value), which sets the result of a future, unless that is cancelled."""
    if not result.done():
        deliver(value)


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
    """Class decorator: makes a loop available to `--agent name` and to a row's agent_name.

    Raises BadInput unless the class is a subclass of AgentLoopBase."""

    def add(cls):
        if not issubclass(cls, AgentLoopBase):
            raise BadInput(f"@register({name!r}) is for subclasses of AgentLoopBase: {cls!r}")
        AGENT_LOOPS[name] = cls
        return cls

    return add


def agent_loop_class(row: dict, task, args) -> type:
    """Returns the agent loop's class, selected by row["agent_name"], else by args.agent.

    If both are None, it is "tool_agent" for a task with TOOLS or INTERACTIONS, else
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
    """The messages and tokens of one rollout while it runs.

    Only methods of this class append tokens, and always to all five lists together:
    engine_ids and the four response_* lists. These are the current token sequence. If the
    template rewrites the history, `fork` ends the sequence and starts another. `outputs`
    returns one AgentLoopOutput for each sequence.

    For an image, the engine gets one placeholder, and the trainer gets one for each token of
    the image (`expand`):
    - engine_ids: prompt and response as `engine.generate` gets them
    - prompt_ids, response_ids: prompt and response as the trainer gets them

    trusted: the messages that may spell control tokens (`render`). By default these are the
    messages that are given here. Messages appended later are not trusted.

    reward, unit and group are those of its outputs (see AgentLoopOutput)."""

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
        self.reward = None
        self.unit = ""
        self.group = ""
        self.assistant_turns = 0
        self.user_turns = 0  # replies, those of tools included; max_user_turns counts users' only
        self.ended = True  # whether the last assistant turn ended with a stop token
        self.tool_calls = []  # in the last assistant turn, not executed yet
        self.finished = []  # AgentLoopOutputs of the sequences before the last fork
        self.begin(prompt_ids, engine_ids)

    def begin(self, prompt_ids: list[int], engine_ids: list[int]):
        """Starts the token sequence with this prompt and an empty response."""
        self.prompt_ids = prompt_ids
        self.engine_ids = list(engine_ids)
        self.turn_rewards = []
        self.response_ids = []
        self.response_mask = []
        self.response_logprobs = []
        self.response_versions = []

    def fork(self, prompt_ids: list[int], engine_ids: list[int]):
        """Ends the token sequence, and starts one whose prompt is the rewritten history."""
        # Metrics go to the last output only.
        self.finished.append(replace(self.output(), metrics={}))
        self.begin(prompt_ids, engine_ids)
        self.count("forks")

    def add_sampled(self, out: TokenOutput, trained: bool = True):
        """Appends the tokens of an assistant turn, with mask 1.

        trained=False gives them mask 0. It is for constrained decoding, whose logprobs are
        not those of the policy."""
        self.assistant_turns += 1
        if not trained:
            self.add_given(out.token_ids)
            return
        self._add(
            engine_ids=out.token_ids,
            ids=out.token_ids,
            mask=[1] * len(out.token_ids),
            logprobs=out.logprobs,
            versions=out.versions,
        )

    def add_given(self, ids: list[int], engine_ids: list[int] | None = None):
        """Appends tokens of a tool, a user or the template, with mask 0.

        engine_ids: the same tokens with one placeholder for each image; default: ids."""
        n = len(ids)
        self._add(
            engine_ids=engine_ids or ids,
            ids=ids,
            mask=[0] * n,
            logprobs=[0.0] * n,
            versions=[-1] * n,
        )

    def _add(self, engine_ids, ids, mask, logprobs, versions):
        """Appends to all five lists."""
        self.engine_ids.extend(engine_ids)
        self.response_ids.extend(ids)
        self.response_mask.extend(mask)
        self.response_logprobs.extend(logprobs)
        self.response_versions.extend(versions)

    def record(self, kind: str, name: str, reward: float | None, metrics: dict | None):
        """Records a turn reward, at the last token so far, and adds metrics to the rollout's.

        kind and name identify the source, such as "tool" and "calculator". A metric is
        recorded as "kind/key". Raises ValueError, which names the source, and records
        nothing if reward or metrics are not finite numbers."""
        source = f"{kind} {name!r}"
        if not isinstance(metrics, dict | None):
            raise ValueError(f"the metrics of {source} must be a dict, got {metrics!r:.80}")
        reward = checked_number(0.0 if reward is None else reward, f"the reward of {source}")
        checked = {}
        for key, value in (metrics or {}).items():
            checked[key] = checked_number(value, f"metric {key!r} of {source}")
        for key, value in checked.items():
            self.count(f"{kind}/{key}", value)
        if reward:
            last = max(0, len(self.response_ids) - 1)
            self.turn_rewards.append((last, reward))

    def count(self, name: str, n: float = 1):
        """Adds n to a metric."""
        self.metrics[name] = self.metrics.get(name, 0) + n

    def outputs(self) -> list[AgentLoopOutput]:
        """Returns the outputs of all token sequences: those before each fork, and the current one.

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
        """Returns the current token sequence alone as an output, with copies of all lists.

        Without forks, it is the whole rollout."""
        return AgentLoopOutput(
            prompt_ids=list(self.prompt_ids),
            response_ids=list(self.response_ids),
            response_mask=list(self.response_mask),
            response_logprobs=list(self.response_logprobs),
            response_versions=list(self.response_versions),
            reward=copy.copy(self.reward),
            turn_rewards=list(self.turn_rewards),
            messages=list(self.messages),
            num_turns=self.assistant_turns + self.user_turns + 1,
            stop_reason=self.stop_reason,
            metrics=dict(self.metrics),
            images=list(self.images),
            extra=dict(self.extra),
            unit=self.unit,
            group=self.group,
        )


MAX_TOKEN_CHARACTERS = 16  # hardly any token is longer


class AgentLoopBase:
    """The base class of agent loops. Subclasses override `run`.

    Each rollout has its own instance.

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
        self.args = copy.copy(args)  # a copy, because other loops share args
        vars(self.args).update(missing)
        self.engine = engine
        self.tokenizer = with_template_variables(tokenizer, self.args.chat_template_args)
        self.processor = processor
        self.task = task

    async def run(self, sampling_params: dict, **row) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Runs one rollout, and returns its output or outputs. Must be overridden.

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

        trusted: messages that may spell control tokens, now and after a fork; by default all
        of the prompt. Raises ValueError unless the prompt has one placeholder for each of the
        row's images."""
        prompt = row["prompt"]
        images = [_load_row_image(image) for image in row.get("images") or ()]
        engine_ids = render(self.tokenizer, prompt, tools, trusted)
        prompt_ids = expand(engine_ids, images, self.processor)
        return Trajectory(prompt, prompt_ids, engine_ids, images, trusted)

    @property
    def window(self):
        """The most tokens that the engine takes, prompt and response together; inf: no limit."""
        return self.args.max_model_len or math.inf

    def too_long(self, messages: Sequence[dict]) -> bool:
        """Returns True if messages are far too long for the window, without tokenising them.

        Tokenising a very long text is slow."""
        n_tokens = self.window + 64  # 64 is for the keys and brackets that `str` writes
        return len(str(messages)) > MAX_TOKEN_CHARACTERS * n_tokens

    def room(self, trajectory: Trajectory, used: int | None = None) -> int:
        """Returns how many more response tokens fit both the rollout's budget and the window.

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
        messages and at least one token of a reply fit. If not, nothing is appended, and the
        stop reason becomes "length".

        stops: see `stop_token_ids`. images: one for each placeholder in the messages."""
        if self.too_long(messages):
            trajectory.stop_reason = "length"
            return False
        images = [_load_row_image(image) for image in images]
        history = trajectory.messages
        try:
            engine_ids = turn_suffix(
                self.tokenizer, history, messages, stops, trajectory.ended, tools)
            rewritten = False
        except RewritesHistory:
            engine_ids = render(self.tokenizer, history + messages, tools, trajectory.trusted)
            rewritten = True
        if rewritten:
            ids = expand(engine_ids, [*trajectory.images, *images], self.processor)
            room = self.room(trajectory, used=len(ids))
        else:
            ids = expand(engine_ids, images, self.processor)
            room = self.room(trajectory) - len(ids)
        if room < 1:
            trajectory.stop_reason = "length"
            return False
        if rewritten:
            trajectory.fork(ids, engine_ids)
        else:
            trajectory.add_given(ids, engine_ids)
        trajectory.images += images
        trajectory.messages += messages
        trajectory.user_turns += 1
        return True

    async def assistant_turn(self, trajectory: Trajectory, sampling_params: dict) -> str | None:
        """Samples one assistant turn, and appends its tokens and its message.

        Returns its text without reasoning but with special tokens (see `_read_turn`), or None
        if the turn was cut off or had no room. Sets the stop reason.

        Raises ValueError if engine and processor expand an image to different numbers of
        tokens."""
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
        is_constrained = "structured_outputs" in sampling_params
        trajectory.add_sampled(out, trained=not is_constrained)
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

        The message's content and reasoning_content are separated by `split_reasoning`, and
        have no special tokens. A turn without reasoning has no reasoning_content. text is
        the turn without its reasoning, with special tokens, because tool calls may need them.

        prompt_ids: the tokens before the turn. Some templates end them with the start tag."""
        decode = self.tokenizer.decode
        message = {"role": "assistant", "content": decode(ids, skip_special_tokens=True)}
        start, end = self.args.think_tags.split()
        opened = decode(prompt_ids[-64:]).rstrip().endswith(start)
        reasoning, text = split_reasoning(decode(ids), start, end, opened)
        if reasoning is not None:
            # The tags may be special tokens, so these are dropped only now.
            for name, part in (("content", text), ("reasoning_content", reasoning)):
                part_ids = _tokenise(self.tokenizer, part)
                message[name] = decode(part_ids, skip_special_tokens=True)
        return message, text

    def stop_token_ids(self, sampling_params: dict) -> set[int]:
        """Returns the ids that end a turn: the tokenizer's and the sampling parameters'."""
        stops = sampling_params.get("stop_token_ids") or ()
        return {*stops, self.tokenizer.eos_token_id} - {None}


def split_reasoning(text: str, start: str, end: str, opened: bool) -> tuple[str | None, str]:
    """Splits an assistant's text into (reasoning, the rest). Reasoning is None without tags.

    Reasoning is everything up to the last end tag, plus anything after a later start tag:
        "<think>why</think>so"        ("why", "so")
        "why</think>so"               ("why", "so")
        "why</think>so<think>or"      ("whyor", "so")
        "why", opened                 ("why", "")
        "so", not opened              (None, "so")

    start, end: the tags. opened: whether the prompt ends with the start tag."""
    if opened:
        text = start + text
    before, has_end, after_end = text.rpartition(end)
    rest, has_start, unfinished = after_end.partition(start)
    if not has_end and not has_start:
        return None, text
    reasoning = before + unfinished
    return reasoning.removeprefix(start), rest


@dataclass
class Demonstration:
    """An engine that replays a demonstration: each call returns its next turn.

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
        **ignored,
    ) -> TokenOutput:
        """Returns the next turn. Raises ValueError if it is too long, and as `turn_ids` does."""
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
        """Returns the ids of a turn, including the stop token that ends it in the template.

        They are the ids of the text that the template writes for the turn. If that text lacks
        the message's content (some templates drop reasoning), they are the ids of the content
        itself. Raises ValueError if the policy could not sample the turn: if it is empty, if
        a stop token occurs inside it, or if the template does not end it with one."""
        turn = {"content": ""} | message
        written = self._written(turn)
        ids, stop = self._split_stop(_inner_ids(self.loop.tokenizer, written))
        if "tool_calls" not in turn and turn["content"] not in written:
            ids = _inner_ids(self.loop.tokenizer, turn["content"])
        if not ids or not self.stops.isdisjoint(ids):
            raise ValueError(f"the policy could not say this turn of a demonstration: {message}")
        return [*ids, stop]

    def _written(self, turn):
        """Returns the text that the template writes for a turn, after its generation prompt."""
        tokenizer = self.loop.tokenizer
        chat = [{"role": "user", "content": "?"}]
        before = render_text(tokenizer, chat, None, add_generation_prompt=True)
        whole = render_text(tokenizer, [*chat, turn], None)
        return whole.partition(before)[2]

    def _split_stop(self, ids):
        """Returns (the ids before the last stop token, that stop token).

        Ids after it, such as those of a newline, are dropped. Without a stop token, returns
        ([], the EOS token)."""
        for place in reversed(range(len(ids))):
            if ids[place] in self.stops:
                return ids[:place], ids[place]
        return [], self.loop.tokenizer.eos_token_id


@register("single_turn")
class SingleTurnLoop(AgentLoopBase):
    """Samples one answer to the prompt."""

    async def run(self, sampling_params, **row):
        trajectory = self.start(row)
        await self.assistant_turn(trajectory, sampling_params)
        return trajectory.output()


# ---------------------------------------------------------------- tool calls


@functools.cache
def tool_parser(name: str, tokenizer):
    """Returns the parser that `vllm serve --tool-call-parser` selects by this name.

    Raises BadInput if there is none, if the tokenizer lacks the tokens of its format, or if
    it can't parse plain text."""
    from vllm.tool_parsers import ToolParserManager

    flag = f"--tool_parser {name}"
    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
        parser.extract_tool_calls("", _parser_request("[]"))
    except KeyError:
        names = ", ".join(sorted(ToolParserManager.list_registered()))
        raise BadInput(f"{flag}: choose from {names}") from None
    except NotImplementedError:  # it needs vLLM's own chat server
        raise BadInput(f"{flag} does not parse plain text: choose another") from None
    except (RuntimeError, ValueError) as error:  # the tokenizer lacks a token of its format
        raise BadInput(f"{flag} does not fit the model: {error}") from None
    return parser


@functools.cache
def _parser_request(schemas):
    """Returns a chat request for `extract_tool_calls`, because some parsers read tools from it.

    schemas: the tools' schemas, as a JSON list so that requests can be cached."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(
        messages=[{"role": "user", "content": ""}],
        tools=json.loads(schemas) or None,
    )


def parse_tool_calls(text: str, parser_name: str, tokenizer, schemas: list[dict]) -> tuple:
    """Returns (the text outside of tool calls, [{"name", "arguments", "error"}, ...]).

    arguments is a dict. error is None, or tells the model why the call can't be executed. A
    call that the parser does not recognise becomes one with the name "" and an error."""
    # vLLM logs each malformed call with a traceback. Here the model reads the error instead.
    # A new vLLM engine resets the level. Setting it clears all loggers' caches, so look first.
    logger = logging.getLogger("vllm.tool_parsers")
    if logger.level != logging.CRITICAL:
        logger.setLevel(logging.CRITICAL)
    parser = tool_parser(parser_name, tokenizer)
    malformed = {
        "name": "",
        "arguments": {},
        "error": "the tool call is not valid JSON with name and arguments",
    }
    try:
        parsed = parser.extract_tool_calls(text, _parser_request(json.dumps(schemas)))
    except Exception:  # some texts of a model make some parsers raise
        return text, [malformed]
    if not parsed.tools_called:
        # A start token shows that the model tried to call a tool. Not all parsers have one.
        start = getattr(parser, "tool_call_start_token", None)
        if start and start in text:
            return text, [malformed]
        return text, []
    calls = []
    for parsed_call in parsed.tool_calls:
        function = parsed_call.function
        arguments = {}
        error = None
        try:
            arguments = _parse_arguments(function.arguments)
        except (ValueError, RecursionError) as problem:
            error = f"wrong arguments: {problem}"
        calls.append({"name": clean(function.name), "arguments": arguments, "error": error})
    return parsed.content or "", calls


def _parse_arguments(text):
    """Returns the arguments of a tool call, a JSON text, as a dict. Raises ValueError."""
    # `clean` would miss a surrogate that JSON escapes ("\ud83d"), so the text is unescaped first.
    unescaped = json.dumps(json.loads(text), ensure_ascii=False)
    arguments = json.loads(clean(unescaped))
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be a JSON object")
    return arguments


def _call_id(turn, number):
    """Returns the id of a tool call: nine characters, as Mistral's template requires.

    turn: the number of the assistant's turn. number: that of the call within the turn. The
    id depends on nothing else, so that it is the same in every run."""
    return f"{turn:06d}{number:03d}"


def function_call(call_id: str, name: str, arguments: dict) -> dict:
    """Returns a tool call for an assistant's message, in the form that chat templates read."""
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": call_id, "function": function}


def set_tool_calls(message: dict, content: str, calls: list[dict], turn: int):
    """Sets content and tool_calls of an assistant's message, in place.

    content, calls: as from `parse_tool_calls`. turn: the number of the assistant's turn, for
    the ids of the calls."""
    message["content"] = content
    message["tool_calls"] = [
        function_call(_call_id(turn, number), tool_call["name"], tool_call["arguments"])
        for number, tool_call in enumerate(calls)
    ]


def _copied(value):
    """Returns a copy of nested dicts and lists, several times faster than deepcopy."""
    if isinstance(value, dict):
        return {key: x if type(x) is str else _copied(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_copied(x) for x in value]
    return value


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Turns of sampling, tool calls and simulated users: a state machine, as in verl.

        pending -> generating -> processing_tools -> generating ...   the model calls tools
                              -> interacting -> generating ...        a simulated user answers
                              -> None                                 the end

    The names of the states are verl's. A state is a method that gets the trajectory and
    returns the next state. A subclass adds one by returning it from another:
    `return self.reflecting`. If a tool raises, exceeds its deadline or is called wrongly, the
    model reads a message about it, and a metric counts it."""

    def __init__(self, engine, tokenizer, processor, task, args):
        super().__init__(engine, tokenizer, processor, task, args)
        # `run` sets these for its row.
        self.sampling_params = {}
        self.tools = {}  # by name
        self.tools_kwargs = {}
        self.schemas = []  # of the tools
        self.interaction = None
        self.interaction_kwargs = {}
        self.user_answers = 0  # answers of the simulated user so far
        self.create_tasks = {}  # by tool name, the asyncio task that runs its `create`

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
        self.create_tasks = {}
        trajectory = self.start(row, self.schemas)
        try:
            await self._run_states(trajectory)
            for name, task in self.create_tasks.items():
                succeeded = task.done() and not task.exception()
                if succeeded:
                    reward = await self._call_at_end(trajectory, name, "calc_reward")
                    trajectory.record("tool", name, reward, None)
        finally:
            await self.close(trajectory)
        if trajectory.finished:
            return trajectory.outputs()
        return trajectory.output()

    async def _run_states(self, trajectory):
        """Goes from state to state until the end, or until trajectory_timeout has passed."""
        state = self.pending
        try:
            async with asyncio.timeout(self.args.trajectory_timeout or None) as budget:
                while state:
                    state = await state(trajectory)
        except TimeoutError:
            if not budget.expired():  # user code raised it, so the rollout fails
                raise
            trajectory.stop_reason = "timeout"  # the tokens so far are kept and graded

    async def pending(self, trajectory):
        """The first state: lets the interaction speak first, if it has an opening message."""
        text = None
        if self.interaction:
            text = await self._ask_interaction(
                self.interaction.start, trajectory.request_id, **self.interaction_kwargs)
        if text is not None:
            text = checked_text(text, f"the text of interaction {self.interaction.name!r}")
            trajectory.messages.append({"role": "user", "content": text})
            engine_ids = render(
                self.tokenizer, trajectory.messages, self.schemas, trajectory.trusted)
            prompt_ids = expand(engine_ids, trajectory.images, self.processor)
            trajectory.begin(prompt_ids, engine_ids)
        if self.tools:
            trajectory.count("tool_calls", 0)  # so that the metric exists
        return self.generating

    async def generating(self, trajectory):
        """Samples an assistant turn. Next, its tools are called, or else the user answers."""
        text = await self.assistant_turn(trajectory, self.sampling_params)
        if text is None:
            return None
        trajectory.tool_calls = self.parse(trajectory, text) if self.tools else []
        if not trajectory.tool_calls:
            return self.interacting if self.interaction else None
        if self._at_assistant_limit(trajectory):
            trajectory.stop_reason = "max_turns"
            return None
        return self.processing_tools

    def _at_assistant_limit(self, trajectory):
        """Returns whether max_assistant_turns is reached."""
        limit = self.args.max_assistant_turns
        return limit > 0 and trajectory.assistant_turns >= limit

    def _at_user_limit(self):
        """Returns whether max_user_turns is reached."""
        limit = self.args.max_user_turns
        return limit > 0 and self.user_answers >= limit

    def parse(self, trajectory, text):
        """Returns the tool calls of a turn, including malformed ones (see `parse_tool_calls`).

        Puts them into the trajectory's last message if at least one has a name."""
        content, calls = parse_tool_calls(text, self.args.tool_parser, self.tokenizer, self.schemas)
        if any(tool_call["name"] for tool_call in calls):
            set_tool_calls(trajectory.messages[-1], content, calls, trajectory.assistant_turns)
        return calls

    async def processing_tools(self, trajectory):
        """Executes the turn's tool calls concurrently, and appends the responses in order."""
        calls = trajectory.tool_calls
        limit = self.args.max_parallel_calls
        for tool_call in calls[limit:]:
            tool_call["error"] = f"only {limit} tool calls at a time are executed"
        started = time.perf_counter()
        responses = await asyncio.gather(
            *(self.call_tool(trajectory, tool_call) for tool_call in calls),
            return_exceptions=True,
        )
        trajectory.count("tool_s", time.perf_counter() - started)
        trajectory.count("tool_calls", len(calls))
        messages = []
        images = []
        for number, (tool_call, response) in enumerate(zip(calls, responses)):
            name = tool_call["name"]
            n_images = len(trajectory.images) + len(images)
            response = self._record_response(trajectory, name, response, n_images)
            messages.append({
                "role": "tool",
                "name": name,
                "content": self._content(response),
                "tool_call_id": _call_id(trajectory.assistant_turns, number),
            })
            images += response.images
        return self.answer(trajectory, messages, images)

    def _record_response(self, trajectory, name, response, n_images):
        """Records the reward and metrics of a tool's response, and returns the response.

        If it is an exception, or is invalid, returns a response with the error instead: the
        model reads it, and the rollout continues. n_images: images in the rollout so far."""
        if isinstance(response, Exception):
            return self._error_response(trajectory, response)
        try:
            trajectory.record("tool", name, response.reward, response.metrics)
            self._check_room_for_images(n_images, len(response.images))
        except Exception as error:
            return self._error_response(trajectory, error)
        return response

    def _check_room_for_images(self, n_images, n_new):
        """Raises ValueError if more images would exceed max_images."""
        limit = self.args.max_images
        if n_images + n_new > limit:
            raise ValueError(f"no room for {n_new} more images: {n_images} of {limit} are there")

    def _error_response(self, trajectory, error):
        """Counts an error, and returns a ToolResponse that tells the model about it."""
        is_timeout = isinstance(error, CallTimeoutError)
        trajectory.count("tool_timeouts" if is_timeout else "tool_errors")
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

    async def call_tool(self, trajectory, tool_call):
        """Executes a tool call, and returns a ToolResponse whose images are loaded.

        tool_call: as from `parse_tool_calls`. Raises ValueError if it is malformed or names
        an unknown tool, CallTimeoutError after tool_timeout, and whatever the tool raises."""
        name = tool_call["name"]
        if tool_call["error"]:
            raise ValueError(tool_call["error"])
        if name not in self.tools:
            raise ValueError(f"there is no tool {name!r}; the tools are {sorted(self.tools)}")
        execution = self._execute(trajectory, name, tool_call["arguments"])
        return await in_time(name, self.args.tool_timeout, execution)

    async def _execute(self, trajectory, name, arguments):
        """Runs a tool's `execute`, after its `create`, and returns a ToolResponse."""
        if name not in self.create_tasks:
            create = self._tool_method(trajectory, name, "create")
            self.create_tasks[name] = asyncio.ensure_future(_contained(create))
        # Parallel calls wait for the same `create`, so the timeout of one must not cancel it.
        await asyncio.shield(self.create_tasks[name])
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
        """Calls a method of a tool with its keyword arguments in the row's tools_kwargs."""
        kwargs = self.tools_kwargs.get(name, {}).get(f"{method}_kwargs", {})
        function = getattr(self.tools[name], method)
        return await call(function, trajectory.request_id, *arguments, **kwargs)

    async def _call_at_end(self, trajectory, name, method):
        """Calls `calc_reward` or `release` of a tool, limited by tool_timeout."""
        coroutine = self._tool_method(trajectory, name, method)
        return await in_time(f"{method} of tool {name!r}", self.args.tool_timeout, coroutine)

    async def _ask_interaction(self, method, *args, **kwargs):
        """Calls a method of the interaction, limited by tool_timeout."""
        coroutine = call(method, *args, **kwargs)
        return await in_time(method.__qualname__, self.args.tool_timeout, coroutine)

    def _shorten(self, text):
        """Cuts a long text to max_tool_response_tokens tokens, with "..." for the rest.

        tool_response_truncate_side is the side that is kept, as in verl: "left" keeps the
        start, "right" the end, and "middle" both."""
        limit = self.args.max_tool_response_tokens
        text = clean(text)
        if len(text.encode()) <= limit:  # a token has at least one byte
            return text
        # Tokenising a huge text is slow, so its middle is cut out first.
        n_kept = 64 * limit  # characters at either end
        if len(text) > 2 * n_kept:
            text = f"{text[:n_kept]}...{text[-n_kept:]}"
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
        """Lets the simulated user answer and reward the assistant's turn."""
        reply = await self._ask_interaction(
            self.interaction.generate_response,
            trajectory.request_id,
            _copied(trajectory.messages),
            **self.interaction_kwargs,
        )
        name = self.interaction.name
        if not isinstance(reply, Sequence) or len(reply) != 4 or reply[0] not in (True, False):
            raise ValueError(
                f"interaction {name!r} returned {reply!r:.80}: must be (done, text, "
                "reward, metrics), and done True or False")
        done, text, reward, metrics = reply
        trajectory.record("interaction", name, reward, metrics)
        if done and text is None:
            text = ""
        text = checked_text(text, f"the text of interaction {name!r}")
        if not done and (self._at_assistant_limit(trajectory) or self._at_user_limit()):
            trajectory.stop_reason = "max_turns"
            done = True
        if done:
            trajectory.extra["unread"] = text  # the report shows it
            return None
        self.user_answers += 1
        return self.answer(trajectory, [{"role": "user", "content": text}])

    def answer(self, trajectory, messages, images=()):
        """Appends messages, and returns the next state: `generating` if they and a reply fit."""
        stops = self.stop_token_ids(self.sampling_params)
        fits = self.append(trajectory, messages, self.schemas, stops, images)
        return self.generating if fits else None

    async def close(self, trajectory):
        """Releases the tools and the interaction, even after a failure or a cancellation.

        Errors are counted, and not raised."""
        for task in self.create_tasks.values():
            task.cancel()  # it may have outlived its deadline
        closers = [self._call_at_end(trajectory, name, "release") for name in self.create_tasks]
        if self.interaction:
            finalize = self.interaction.finalize
            closers.append(self._ask_interaction(finalize, trajectory.request_id))
        for result in await asyncio.gather(*closers, return_exceptions=True):
            if isinstance(result, BaseException):
                trajectory.count("release_errors")
