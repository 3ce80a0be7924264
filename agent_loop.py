"""What happens inside ONE rollout: agent loops, tools and interactions.

An agent loop gets a row of the data set and an engine, and returns tokens: what the policy
sampled (mask 1) and what the world answered (mask 0: tool results, user turns, template). The
rule that everything here serves is *token in, token out*: sampled ids are appended verbatim
and never rendered again; the turns in between are the difference of two renderings of the
template (`turn_suffix`).

Nine words, used alike in code, documents, log and flags:
    prompt       what one row asks; it has a number
    group        the rollouts of one prompt, which are compared with each other
    rollout      one run of an agent loop for one prompt; it gives one or several outputs;
                 its number within the group is called sample
    trajectory   a rollout's messages and tokens while they grow: see `Trajectory`
    output       one `AgentLoopOutput`: one token sequence, prompt and response
    unit         the outputs of a rollout that share one reward and weigh one; by default all
    segment      the number of an output within its rollout: 0, 1, ...
    turn         what the assistant says at a time, or the answer of tools or a user to it
    token        one id; its mask is 1 if the policy sampled it, else 0

To bring your own agent, subclass `AgentLoopBase` in the task file, decorate it with
`@register("name")`, and select it with `--agent name` or a row's `agent_name`. Loops run as
coroutines of one background thread; hundreds live at once. Names follow verl's agent loop
(https://verl.readthedocs.io/en/latest/advance/agent_loop.html).

This file imports nothing of ours: pasted into another project, it works with `LoopArgs`."""

import asyncio
import contextvars
import copy
import functools
import inspect
import io
import json
import math
import os
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
    """The user's flags, task file, rows or model can't work; train.py shows this one line."""


# ---------------------------------------------------------------- what crosses files


@dataclass
class LoopArgs:
    """The settings that agent loops read from their `args`.

    train.Args has the same names and defaults; any object with such attributes will do."""

    agent: str | None = None  # name of the agent loop; None: see `agent_loop_class`
    max_response_tokens: int = 128  # budget of a rollout: sampled + tool + user tokens
    max_model_len: int | None = None  # tokens in the engine's window; None: no limit
    max_assistant_turns: int = 8  # of a trajectory; 0: no limit
    max_user_turns: int = 0  # answers of a simulated user; 0: no limit
    max_images: int = 8  # of a trajectory: the prompt's and those of tools
    chat_template_args: str = "{}"  # variables for the chat template, a JSON object
    think_tags: str = "<think> </think>"  # around reasoning, in which no tool is called
    tool_parser: str = "hermes"  # format of tool calls: one of vLLM's parsers
    tool_timeout: float = 30.0  # seconds for one tool call, or one answer of a simulated user
    trajectory_timeout: float = 0.0  # seconds for a whole trajectory; 0: no limit
    max_parallel_calls: int = 8  # tool calls of one turn that are executed
    max_tool_response_tokens: int = 256  # longer tool responses are cut
    tool_response_truncate_side: str = "middle"  # side kept: left, right, both (middle)


@dataclass
class TokenOutput:
    """The result of one `generate` call.

    token_ids, logprobs and versions have one entry for each sampled token: its id, its
    log-probability under the sampling temperature, and the version of the weights that
    sampled it. If a stop token was sampled, it is included. prompt_ids is the prompt as the
    engine saw it: an image's placeholder is repeated for every token that the image takes."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: str  # "stop" | "length" | "abort"
    prompt_ids: list[int]


STOP_REASONS = ("stop", "length", "max_turns", "timeout", "abort", "error")
RESPONSE_LISTS = ("response_ids", "response_mask", "response_logprobs", "response_versions")


@dataclass(kw_only=True)
class AgentLoopOutput:
    """One finished token sequence of a rollout: the one dataclass that crosses files.

    The four response_* lists have one entry for each response token. response_mask is 1 where
    the policy sampled the token and 0 for tool, user and template tokens; there the logprob
    is 0.0 and the version -1. turn_rewards holds (index into response_ids, reward) pairs.
    num_turns is assistant turns + user and tool turns + 1, as in verl. images are PIL images
    in the order of their placeholders; the ids hold one for each token of an image.

    Outputs of one rollout with the same unit share one reward, that of the last of them, and
    count once, in advantages and in the loss. Units of one prompt are compared with those of
    the same group; the default is that of the same name. So a rollout is one unit if nothing
    is said, and is compared with the other rollouts of its prompt. The sides of a game are
    units "x" and "o"; siblings in a tree share a group with their rollout's number in it.

    Raises ValueError if the lists differ in length, or if the mask, the prompt, the stop
    reason, the unit or the group is bad."""

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
            raise ValueError("response_mask holds 0 (not sampled) and 1 (sampled by the policy)")
        if not self.prompt_ids:
            raise ValueError("prompt_ids is empty: what is the first token predicted from?")
        if self.stop_reason not in STOP_REASONS:
            raise ValueError(f"stop_reason {self.stop_reason!r} is not one of {STOP_REASONS}")
        if not isinstance(self.unit, str) or not isinstance(self.group, str):
            raise ValueError(f"unit {self.unit!r} and group {self.group!r} must be texts")

    @property
    def truncated(self) -> bool:
        """True if a limit of tokens or of turns cut it off; a timeout does not count."""
        return self.stop_reason in ("length", "max_turns")


def outcome(output: AgentLoopOutput) -> float:
    """Returns the terminal reward of an output; that of a dict is its key "score"."""
    reward = output.reward
    if isinstance(reward, dict):
        reward = reward["score"]
    return float(reward or 0.0)


def total_reward(output: AgentLoopOutput) -> float:
    """Returns the terminal reward of an output plus all its turn rewards."""
    return outcome(output) + sum(reward for _, reward in output.turn_rewards)


def numbers(values: dict) -> dict[str, float]:
    """Returns the entries of a dict that are real numbers (a bool, numpy's), as they are."""
    return {name: value for name, value in values.items() if isinstance(value, Real)}


# ------------------------------------------------------------ templates: messages -> tokens


def render_text(tokenizer, messages: list[dict], tools: list[dict] | None,
                add_generation_prompt: bool = False) -> str:
    """Renders a chat as text by the tokenizer's template. Raises BadInput if it has none."""
    if not tokenizer.chat_template:
        raise BadInput("the tokenizer has no chat template: set one, or use an instruct model")
    template = str(tokenizer.chat_template)
    if "</think>" in template and "reasoning_content" not in template:
        messages = [_inline_reasoning(message) for message in messages]
    return tokenizer.apply_chat_template(
        messages, tools=tools or None, tokenize=False,
        add_generation_prompt=add_generation_prompt)


def _inline_reasoning(message):
    """Writes a message's reasoning into its content, as templates like DeepSeek's want it."""
    if "reasoning_content" not in message:
        return message
    content = message.get("content") or ""
    content = f"<think>{message['reasoning_content']}</think>{content}"
    return {**message, "content": content}


def render(tokenizer, messages: list[dict], tools: list[dict] | None = None,
           trusted: Sequence[dict] | None = None,
           add_generation_prompt: bool = True) -> list[int]:
    """Returns the token ids of a chat, by default up to where the assistant speaks next.

    Messages equal to one in `trusted` may spell control tokens; the others can't, nor can
    tools (`_without_forged`). Default: all are trusted, as in a row's prompt. No messages
    have no tokens: then an Interaction speaks first."""
    if not messages:
        return []

    def ids_of(messages, tools):
        text = render_text(tokenizer, messages, tools, add_generation_prompt)
        return list(_tokenise_prompt(tokenizer, text))

    if trusted is None:
        trusted = messages
        if not tools:  # nothing is left that could forge
            return ids_of(messages, tools)
    return _without_forged(tokenizer, ids_of, add_generation_prompt, messages, tools, trusted)


@functools.lru_cache(maxsize=64)
def templated(tokenizer, variables: str):
    """Returns a tokenizer whose chat template gets more variables, a JSON object; without any
    it is the tokenizer itself."""
    variables = json.loads(variables)
    if not variables:
        return tokenizer
    changed = copy.copy(tokenizer)
    changed.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **variables)
    return changed


# Put before a character, it makes `_tokenise` tokenise that one alone. No text has it (`clean`).
TOKEN_BREAK = "\ufdd0"
# Which characters of a text get one, as regular expressions.
NOTHING, MARKS, ALL = TOKEN_BREAK, r"[^\w\s]|_", "(?s)."

# Token ids that control something in chats of neutral words, which recur.
_NEUTRAL_CONTROLS = {}


def _without_forged(tokenizer, ids_of, depends_on, messages, tools, trusted=()):
    """Returns ids_of(messages, tools), the ids of a chat in which no text forges a token.

    depends_on: what ids_of depends on beside its arguments; it can be written as JSON.

    Its control tokens must be those of the same chat with neutral words: what tools, users
    and the policy say controls nothing, however the template changes or joins it. Where they
    differ, punctuation is tokenised character by character; if that does not help, all text
    is. Messages equal to one in `trusted` stay as they are.

    The policy may really have sampled a control token such as <think>, and its history must
    keep it. It cannot have sampled a special token such as <|im_end|>: decoding drops those.
    A special token in its text was therefore spelled out letter by letter. The same holds
    for a system's messages. Raises ValueError if single characters control something, too."""
    controls = _controls(tokenizer)

    def mapped(world, policy):
        chat = []
        for message in messages:
            alone = policy if message["role"] in ("assistant", "system") else world
            chat.append(message if message in trusted else _map_texts(message, alone))
        return chat, _map_texts(tools, world)

    def attempt(world, policy):
        ids = ids_of(*mapped(world, policy))
        found = [token for token in ids if token in controls]
        return ids, found, [token for token in found if controls[token].special]

    key = tokenizer, json.dumps([depends_on, mapped(None, None)], default=str)
    if key not in _NEUTRAL_CONTROLS:
        if len(_NEUTRAL_CONTROLS) > 1024:
            _NEUTRAL_CONTROLS.clear()
        _NEUTRAL_CONTROLS[key] = attempt(None, None)[1:]
    neutral, neutral_special = _NEUTRAL_CONTROLS[key]
    for world, policy in (NOTHING, NOTHING), (MARKS, NOTHING), (ALL, ALL):
        ids, found, special = attempt(world, policy)
        if found == neutral:
            return ids
        # The policy's own words may hold control tokens such as <think>, but no special one.
        if special == neutral_special and found == attempt(None, policy)[1]:
            return ids
    raise ValueError("the chat template makes control tokens of what messages say")


def _map_texts(value, alone):
    """Puts a TOKEN_BREAK before the characters `alone` of a message or a schema.

    Roles, types and ids stay as they are. alone=None puts a neutral word in place of each
    text, of nine letters, as Mistral's template wants ids."""
    if isinstance(value, dict):
        mapped = {}
        for key, inner in value.items():
            if key not in ("role", "type", "id", "tool_call_id"):
                inner = _map_texts(inner, alone)
            if not key.isidentifier():  # in a schema, a key may be a text
                key = _map_texts(key, alone)
            mapped[key] = inner
        return mapped
    if isinstance(value, list):
        return [_map_texts(inner, alone) for inner in value]
    if not isinstance(value, str) or not value.strip():
        return value
    return re.sub(alone, TOKEN_BREAK + r"\g<0>", clean(value)) if alone else "xxxxxxxxx"


@functools.cache
def _controls(tokenizer):
    """Returns the added tokens that control something, by their ids: no words, white space or
    single characters, unless they are special."""
    return {number: token for number, token in tokenizer.added_tokens_decoder.items()
            if token.special or len(token.content) > 1 and re.search(MARKS, token.content)}


def _tokenise(tokenizer, text):
    """Returns the ids of a rendered text; no token goes across a TOKEN_BREAK.

    The template writes every special token itself (BOS too): adding them would double them.
    A character behind a TOKEN_BREAK becomes no control token."""
    first, *pieces = text.split(TOKEN_BREAK)
    ids = tokenizer.encode(first, add_special_tokens=False)
    for piece in pieces:
        alone = _inner_ids(tokenizer, piece[:1])
        ids += [token for token in alone if token not in _controls(tokenizer)]
        ids += _inner_ids(tokenizer, piece[1:])
    return ids


@functools.lru_cache(maxsize=1024)
def _inner_ids(tokenizer, text):
    """Returns the ids of a text that is not the start of one, before which some put a space.

    It is tokenised behind a special token, which is left out again."""
    start = tokenizer.eos_token or ""
    ids = tokenizer.encode(start + text, add_special_tokens=False)
    return ids[1:] if start else ids


# The members of a group share the ids of their prompt.
_tokenise_prompt = functools.lru_cache(maxsize=1024)(_tokenise)


class RewritesHistory(ValueError):
    """The template changes earlier messages when new ones come: a new sequence is needed."""


def turn_suffix(tokenizer, messages: list[dict], new: list[dict], stop_token_ids: set[int],
                ended: bool, tools: list[dict] | None = None) -> list[int]:
    """Returns the tokens that follow an assistant turn when `new` messages come after it.

    They are the difference of two renderings, with and without `new` (tool or user messages),
    from the template's last end-of-turn token on. Many templates put a newline after that
    token. The policy does not sample it, and it would be lost if the difference were taken
    from the end of the first rendering (verl#6501).

    ended: whether the policy sampled a stop token. If not (a stop string ended its turn), the
    end-of-turn token belongs to the suffix. Messages make no special token (`_without_forged`).

    Raises RewritesHistory if new messages change earlier ones (Qwen3 drops reasoning)."""

    def ids_of(chat, tools):
        before = render_text(tokenizer, chat[: len(messages)], tools)
        after = render_text(tokenizer, chat, tools, True)
        if not after.startswith(before):
            raise RewritesHistory("the chat template is not append-only: it changed a message")
        # Nothing merges across an end-of-turn token, and what follows it is no text's start:
        # from there on the text has the same ids as within the whole.
        starts = [before.rfind(tokenizer.decode([stop])) for stop in stop_token_ids]
        start = max(starts, default=-1)
        if start < 0:  # a template that ends turns with no token at all
            start = len(before)
        ids = _tokenise(tokenizer, after[start:])
        if not ids:
            raise ValueError(f"the chat template writes nothing for {new[-1]!r:.80}")
        if ended and ids[0] in stop_token_ids:
            ids = ids[1:]
        return ids

    key = [len(messages), sorted(stop_token_ids), ended]
    return _without_forged(tokenizer, ids_of, key, messages + new, tools)


# ---------------------------------------------------------------- images


IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # none that is a program to run, as EPS
MAX_PIXELS = 64_000_000  # 256 MB decoded


def open_image(source):
    """Opens a PIL image, a path, bytes, or the {"bytes", "path"} of Hugging Face's files.

    Of a file only the header is read. Raises ValueError unless it is one of IMAGE_FORMATS
    with up to MAX_PIXELS."""
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
    except Exception as error:  # PIL, the file system and a wrong type each have their own
        raise ValueError(f"{source!r:.80} can't be read as an image: {error}") from None


def _file_of(source):
    """Returns the bytes or else the path of a {"bytes", "path"}; any other source as it is."""
    if isinstance(source, dict):
        return source.get("bytes") or source.get("path")
    return source


def load_image(source):
    """Loads what `open_image` takes, upright and in RGB; or raises ValueError."""
    from PIL import ImageOps

    image = open_image(source)
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # a file that ends early, a decompression bomb
        raise ValueError(f"an image can't be decoded: {error}") from None


_load_file = functools.lru_cache(maxsize=64)(load_image)


def _row_image(source):
    """Loads an image of a row, as one object for all members of a group: it is then
    preprocessed once. A PIL image was loaded with the rows already."""
    if hasattr(source, "size"):
        return source
    return _load_file(_file_of(source))


def image_tokens(images, processor):
    """Returns how many tokens each image takes. Raises ValueError for an impossible shape."""
    sizes = [(image.height, image.width) for image in images]
    return processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"]


def expand(ids: list[int], images: Sequence, processor) -> list[int]:
    """Repeats the one placeholder of each image for every token that the image takes.

    Returns the ids that the model is fed. Raises ValueError unless there is one placeholder
    for each image, and each image has a shape that the model takes."""
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
        expanded += [token] * (next(counts) if token == placeholder else 1)
    return expanded


# ---------------------------------------------------------------- tools and interactions


@dataclass
class ToolResponse:
    """A tool's answer: text and images (what `open_image` takes) for the model.

    reward and metrics are recorded."""

    text: str = ""
    images: list = field(default_factory=list)
    reward: float | None = None
    metrics: dict = field(default_factory=dict)


class Tool:
    """A tool with state or resources. One instance serves all rollouts: key by `request_id`.

    For each rollout that calls it: `create` once, before the first `execute`; then
    `calc_reward` once; and `release` in every case. All may be overridden; `execute` must be.
    Set `name` and `schema` (JSON schema of an OpenAI function) on the class or the instance."""

    name: str
    schema: dict

    async def create(self, request_id: str, **create_kwargs):
        """Makes what this rollout needs; request_id names the rollout, not the call."""

    async def execute(self, request_id: str, arguments: dict, **execute_kwargs):
        """Returns a str or ToolResponse, or a tuple of it, reward and metrics."""
        raise TypeError(f"{type(self).__name__} has no execute method")

    async def calc_reward(self, request_id: str, **kwargs) -> float:
        """Returns a reward that is added to the rollout's, once, at its end."""
        return 0.0

    async def release(self, request_id: str, **kwargs):
        """Frees what `create` made for this rollout. It is always called at its end."""


class FunctionTool(Tool):
    """A typed, documented Python function as a tool; hints and docstring give its schema."""

    def __init__(self, function: Callable):
        from transformers.utils import get_json_schema

        self.function = function
        self.name = function.__name__
        self.schema = get_json_schema(function)  # it raises where hints or docstring lack one

    async def execute(self, request_id: str, arguments: dict, **execute_kwargs):
        return await call(self.function, **arguments, **execute_kwargs)


_function_tool = functools.cache(FunctionTool)


def as_tool(tool: Tool | Callable) -> Tool:
    """Returns a Tool as it is, or a Python function as a Tool, always the same for a function.

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
    """Returns a row's tools by name: those its tools_kwargs names, or else all of the task's.

    Raises BadInput for a bad tool, and for a name that is there twice or not at all."""
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
    """A simulated user or environment, which speaks when the assistant called no tool.

    One instance serves all rollouts: key by `request_id`."""

    name: str = "interaction"

    async def start(self, request_id: str, **kwargs) -> str | None:
        """May return the first user message, which follows the prompt of the row."""

    async def generate_response(self, request_id: str, messages: list[dict], **kwargs) -> tuple:
        """Returns (done, text, reward, metrics).

        text is the next user turn; reward is that of the assistant's turn before."""
        raise TypeError(f"{type(self).__name__} has no generate_response method")

    async def finalize(self, request_id: str):
        """Frees what `start` made for the rollout; called at its end, whatever happened."""


def task_interaction(task, kwargs: dict) -> Interaction | None:
    """Returns the task's interaction that kwargs["name"] picks, or else the only one.

    Without a name, and with none or several of them, it is None. Raises BadInput for an
    unknown name, for a missing one among several, and for what no name can pick."""
    given = getattr(task, "INTERACTIONS", None) or ()
    interactions = {each.name: each for each in given if isinstance(each, Interaction)}
    if len(interactions) < len(given):
        raise BadInput(f"INTERACTIONS holds what is no Interaction, or two of one name: {given}")
    name = kwargs.get("name")
    if name is None and len(interactions) < 2:
        return next(iter(interactions.values()), None)
    if kwargs and name not in interactions:
        raise BadInput(f"interaction_kwargs names {name!r}, but needs a 'name' of the task's "
                       f"INTERACTIONS: {sorted(interactions)}")
    return interactions.get(name)


def _failure(error):
    """Returns the error, or a RuntimeError in place of one that asyncio could not carry: those
    end the event loop (SystemExit), cancel tasks, or are refused (StopIteration)."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(repr(error))


async def _contained(coroutine):
    """Awaits user code. Its exceptions pass, but a SystemExit, a StopIteration, or a
    CancelledError that the user's code raised itself becomes a RuntimeError.

    A cancellation of the running task passes through."""
    try:
        return await coroutine
    except GeneratorExit:  # the coroutine was left behind, and the process ends
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
            raise  # the running task itself is cancelled
        raise _failure(error) from None


class CallTimeoutError(TimeoutError):
    """User code took longer than it may."""


# The asyncio.Timeout that user code is under. Code that has to wait for its turn may put the
# deadline off (`reschedule`), as examples/sandbox.py does.
DEADLINE = contextvars.ContextVar("DEADLINE")


async def in_time(what: str, seconds: float, coroutine: Awaitable) -> Any:
    """Awaits user code for so many seconds (0: for ever), as a task called `what`.

    At the deadline, or when the caller is cancelled, the task is cancelled and may take as
    long again to tidy up. If it has not ended even then, it is left behind. Raises
    CallTimeoutError at the deadline, and whatever the code raises."""
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


_IDLE_THREADS = []  # the queues from which threads without work take it
os.register_at_fork(after_in_child=_IDLE_THREADS.clear)  # the child has no such threads


async def in_thread(function: Callable, /, *args, **kwargs) -> Any:
    """Runs a plain function on a daemon thread, which serves again when it has returned.

    Python would wait for asyncio.to_thread's when it exits: for ever if a tool never returns."""
    result = asyncio.get_running_loop().create_future()
    context = contextvars.copy_context()
    try:
        work = _IDLE_THREADS.pop()
    except IndexError:
        work = queue.SimpleQueue()
        threading.Thread(target=_work_on, args=[work], daemon=True).start()
    work.put((result, functools.partial(context.run, function, *args, **kwargs)))
    return await result


def _work_on(work):
    """Calls the functions that a queue brings, one after the other."""
    process = os.getpid()
    while True:
        result, function = work.get()
        try:
            settle = result.set_result, function()
        except BaseException as error:
            settle = result.set_exception, _failure(error)
        if os.getpid() != process:  # the function has forked: its copy ends here
            os._exit(1)
        _IDLE_THREADS.append(work)
        with suppress(RuntimeError):  # the loop may be closed by now
            result.get_loop().call_soon_threadsafe(_settle, result, *settle)


def _settle(result, settle, value):
    """Settles a future, unless a deadline has ended the waiting for it, not the work."""
    if not result.done():
        settle(value)


async def call(function: Callable, /, *args, **kwargs) -> Any:
    """Awaits an async function; runs a plain one in a thread, where it delays nobody else."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await in_thread(function, *args, **kwargs)
    if inspect.isawaitable(result):  # of an async function that was decorated
        return await result
    return result


def clean(text: str) -> str:
    """Replaces lone surrogates, which no tokenizer takes, and drops every TOKEN_BREAK.

    Surrogates come from garbage bytes, or from "\\ud83d" in JSON."""
    return text.encode(errors="replace").decode().replace(TOKEN_BREAK, "")


def words(text, name: str) -> str:
    """Returns a text of user code, `clean`. Raises ValueError, with its name, unless it is one."""
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a str, got {text!r:.80}")
    return clean(text)


def finite(value, name: str) -> float:
    """Returns `value` as a float. Raises ValueError unless it is finite, also in float32, and
    for a text, though it may spell a number."""
    number = math.nan
    if not isinstance(value, (str, bytes)):
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value)
    if not abs(number) < 1e38:
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return number


# ---------------------------------------------------------------- agent loops


AGENT_LOOPS: dict[str, type] = {}


def register(name: str) -> Callable:
    """Class decorator: `--agent name` or a row's agent_name then selects the loop.

    Raises BadInput for a class that is no AgentLoopBase, TypeError for what is no class."""

    def add(cls):
        if not issubclass(cls, AgentLoopBase):
            raise BadInput(f"@register({name!r}) is for subclasses of AgentLoopBase: {cls!r}")
        AGENT_LOOPS[name] = cls
        return cls

    return add


def agent_loop_class(row: dict, task, args) -> type:
    """Returns the loop named by row["agent_name"], else by --agent.

    Without a name it is "tool_agent" for a task with TOOLS or INTERACTIONS, else
    "single_turn". Raises BadInput for an unknown name."""
    has_turns = getattr(task, "TOOLS", None) or getattr(task, "INTERACTIONS", None)
    default = "tool_agent" if has_turns else "single_turn"
    name = row.get("agent_name") or args.agent or default
    if name not in AGENT_LOOPS:
        raise BadInput(f"no agent loop {name!r}: choose from {sorted(AGENT_LOOPS)} or add "
                       f"@register({name!r}) to the task")
    return AGENT_LOOPS[name]


class Trajectory:
    """The messages and tokens of one rollout while they grow.

    prompt_ids and the response lists are the current token sequence; only methods of this
    class append to them, and to all lists alike. `fork` ends the sequence and begins another,
    where the history was rewritten. `outputs` has one entry for each sequence.

    engine_ids are prompt and response as `engine.generate` gets them, with one placeholder
    for each image; prompt_ids and response_ids have one for each of its tokens (`expand`)."""

    def __init__(self, messages: list[dict], prompt_ids: list[int], engine_ids: list[int],
                 images: Sequence):
        self.request_id = uuid4().hex  # names the rollout to the engine and to tools
        self.messages = list(messages)
        self.trusted = list(messages)  # see `render`
        self.images = list(images)
        self.metrics = {}
        self.extra = {}
        self.stop_reason = "stop"
        self.assistant_turns = 0
        self.user_turns = 0  # of tools, too
        self.ended = True  # whether the last assistant turn ended with a stop token
        self.tool_calls = []  # of the last assistant turn, still to be executed
        self.finished = []  # AgentLoopOutputs of sequences before the last fork
        self.begin(prompt_ids, engine_ids)

    def begin(self, prompt_ids: list[int], engine_ids: list[int]):
        """Makes these ids the prompt of the token sequence, with no response yet."""
        self.prompt_ids = prompt_ids
        self.engine_ids = list(engine_ids)
        for name in ("turn_rewards", *RESPONSE_LISTS):
            setattr(self, name, [])

    def fork(self, prompt_ids: list[int], engine_ids: list[int]):
        """Ends the token sequence; begins another, whose prompt is the rewritten history."""
        # The last output has the metrics of all of them.
        self.finished.append(replace(self.output(), metrics={}))
        self.begin(prompt_ids, engine_ids)
        self.count("forks")

    def add_sampled(self, out: TokenOutput, trained: bool = True):
        """Appends an assistant turn, with mask 1.

        trained=False is for one where the policy did not choose freely, with mask 0."""
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
        """Appends to engine_ids, and to the lists named in RESPONSE_LISTS, in that order."""
        self.engine_ids += engine_ids
        for name, values in zip(RESPONSE_LISTS, response):
            getattr(self, name).extend(values)

    def record(self, kind: str, name: str, reward: float | None, metrics: dict | None):
        """Records a reward, at the last token so far, and metrics of a tool or interaction.

        Raises ValueError, which names the source, and records nothing if a number is not finite."""
        source = f"{kind} {name!r}"
        if not isinstance(metrics, dict | None):
            raise ValueError(f"the metrics of {source} must be a dict, got {metrics!r:.80}")
        reward = finite(0.0 if reward is None else reward, f"the reward of {source}")
        metrics = {key: finite(value, f"metric {key!r} of {source}")
                   for key, value in (metrics or {}).items()}
        for key, value in metrics.items():
            self.count(f"{kind}/{key}", value)
        if reward:
            self.turn_rewards.append((max(0, len(self.response_ids) - 1), reward))

    def count(self, name: str, n: float = 1):
        """Adds n to a metric."""
        self.metrics[name] = self.metrics.get(name, 0) + n

    def outputs(self) -> list[AgentLoopOutput]:
        """Returns one output for each token sequence.

        If the assistant did not speak in the last sequence, after a fork, it is left out: its
        rewards, metrics and stop reason go to the one before."""
        last = self.output()
        # The assistant's turn in it may consist of untrained tokens (mask 0) alone.
        speaks = 1 in last.response_mask or last.messages[-1]["role"] == "assistant"
        if speaks or not self.finished:
            return [*self.finished, last]
        *earlier, before = self.finished
        end = len(before.response_ids) - 1
        rewards = before.turn_rewards + [(end, reward) for _, reward in last.turn_rewards]
        merged = replace(before, turn_rewards=rewards, metrics=last.metrics,
                         stop_reason=last.stop_reason)
        return [*earlier, merged]

    def output(self) -> AgentLoopOutput:
        """Returns the current token sequence: all there is, unless there was a fork.

        Each field of the output is a copy of the attribute with its name."""
        self.num_turns = self.assistant_turns + self.user_turns + 1
        names = vars(self).keys() & {field.name for field in fields(AgentLoopOutput)}
        return AgentLoopOutput(**{name: copy.copy(getattr(self, name)) for name in names})


class AgentLoopBase:
    """One instance for each rollout. Subclasses write `run`.

    engine: anything with `async generate(*, request_id, prompt_ids, sampling_params,
    image_data) -> TokenOutput`, the real one or a script; prompt_ids has ONE placeholder for
    each image of image_data, a list of PIL images or None. processor: None for text models.
    task: the task module.

    args: train.Args, LoopArgs or any object with such attributes. It must have
    max_response_tokens and max_model_len, or TypeError is raised. What else it lacks of
    LoopArgs has the default there."""

    def __init__(self, engine, tokenizer, processor, task, args):
        missing = {field.name: field.default for field in fields(LoopArgs)
                   if not hasattr(args, field.name)}
        if "max_response_tokens" in missing or "max_model_len" in missing:
            raise TypeError(f"{type(self).__name__} needs args with max_response_tokens and "
                            f"max_model_len; these lack {', '.join(missing)}: see LoopArgs")
        self.args = copy.copy(args)  # a loop may set some: they are no other loop's
        vars(self.args).update(missing)
        self.engine = engine
        self.tokenizer = templated(tokenizer, self.args.chat_template_args)
        self.processor = processor
        self.task = task

    async def run(self, sampling_params: dict, **row) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Runs one rollout and returns its output or outputs; every subclass has its own.

        row: the columns of the data set's row, among them index; and step, rollout_n (the
        rollout's number within its group) and validate (True in an evaluation)."""
        raise TypeError(f"{type(self).__name__} has no run method")

    def start(self, row: dict, tools: list[dict] | None = None,
              trusted: Sequence[dict] | None = None) -> Trajectory:
        """Returns a trajectory that begins with row["prompt"], however long that is.

        The row's images stand in the places of the prompt's placeholders; ValueError if
        they are not as many. trusted: see `render`."""
        images = [_row_image(image) for image in row.get("images") or ()]
        engine_ids = render(self.tokenizer, row["prompt"], tools, trusted)
        prompt_ids = expand(engine_ids, images, self.processor)
        return Trajectory(row["prompt"], prompt_ids, engine_ids, images)

    @property
    def window(self):
        """The number of tokens that the engine takes, prompt and response together."""
        return self.args.max_model_len or math.inf

    def too_long(self, messages: Sequence[dict]) -> bool:
        """Returns True if messages certainly don't fit the window, without tokenising them.

        Tokenising so long a text takes long. A token hardly ever has 16 characters."""
        return len(str(messages)) > 16 * (64 + self.window)

    def room(self, trajectory: Trajectory, used: int | None = None) -> int:
        """Returns how many more response tokens the budget and the window take.

        used: tokens in the window; default: those of the trajectory's current sequence."""
        if used is None:
            used = len(trajectory.prompt_ids) + len(trajectory.response_ids)
        sequences = [*trajectory.finished, trajectory]
        spent = sum(len(sequence.response_ids) for sequence in sequences)
        return min(self.args.max_response_tokens - spent, self.window - used)

    def append(self, trajectory: Trajectory, messages: list[dict], tools: list[dict] | None,
               stops: set[int], images: Sequence = ()) -> bool:
        """Appends tool or user messages, tokenised as a template suffix.

        Where the template rewrites history, it forks the trajectory instead. stops: see
        `stop_token_ids`. images: one for each placeholder in the messages. Returns True if
        these and a token of reply fit; else appends nothing: the stop reason is "length"."""
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
        """Samples one turn, and appends its tokens and its message (see `_read_turn`).

        Returns its text without reasoning, special tokens kept, or None if it was cut off.
        Raises ValueError if engine and processor disagree about images."""
        room = self.room(trajectory)
        if room < 1:
            trajectory.stop_reason = "length"
            return None
        limit = min(sampling_params.get("max_tokens") or room, room)
        out = await self.engine.generate(
            request_id=trajectory.request_id, prompt_ids=list(trajectory.engine_ids),
            sampling_params={**sampling_params, "max_tokens": limit},
            image_data=list(trajectory.images) or None)
        prompt_ids = trajectory.prompt_ids + trajectory.response_ids
        if trajectory.images and out.prompt_ids != prompt_ids:
            raise ValueError("the engine and the processor disagree about the tokens of the "
                             f"images: {len(out.prompt_ids)} against {len(prompt_ids)}")
        trajectory.add_sampled(out, trained="structured_outputs" not in sampling_params)
        trajectory.stop_reason = out.stop_reason
        content_ids = out.token_ids
        trajectory.ended = not self.stop_token_ids(sampling_params).isdisjoint(content_ids[-1:])
        if trajectory.ended:
            content_ids = content_ids[:-1]
        message, text = self._read_turn(prompt_ids, content_ids)
        trajectory.messages.append(message)
        return text if out.stop_reason == "stop" else None

    def _read_turn(self, prompt_ids, ids):
        """Returns an assistant turn as a message, and its text without reasoning.

        The text keeps its special tokens. Reasoning is all up to the last end tag of
        --think_tags, and from a start tag behind that on; it becomes the message's
        reasoning_content. ids: the turn without its stop token."""
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
            # The tags may be special tokens, so they are only now left out of both texts.
            for name, part_text in ("content", text), ("reasoning_content", reasoning):
                part_ids = _tokenise(self.tokenizer, part_text)
                message[name] = decode(part_ids, skip_special_tokens=True)
        return message, text

    def stop_token_ids(self, sampling_params: dict) -> set[int]:
        """Returns the ids that end a turn: the tokenizer's and the sampling parameters'."""
        stops = sampling_params.get("stop_token_ids") or ()
        return {*stops, self.tokenizer.eos_token_id} - {None}


@dataclass
class Demonstration:
    """An engine that samples nothing: each call gets the next turn of a row's demonstration.

    turns: messages of the assistant, those still to be said. loop: the agent loop that calls.
    stops: the tokens that may end a turn. A turn's tokens have logprob 0.0 and version -1, as
    no policy sampled them. If no turn is left, the result is empty, and its stop reason,
    "abort", ends the trajectory."""

    turns: list[dict]
    loop: AgentLoopBase
    stops: set[int]

    async def generate(self, *, prompt_ids: list[int], sampling_params: dict,
                       image_data: list | None = None, **call) -> TokenOutput:
        """Returns the next turn. Raises ValueError if it is too long, or as `turn_ids` does."""
        ids = self.turn_ids(self.turns.pop(0)) if self.turns else []
        n = len(ids)
        room = sampling_params.get("max_tokens", n)
        if n > room:
            raise ValueError(f"a turn of the demonstration has {n} tokens, with room for {room}")
        prompt_ids = expand(prompt_ids, image_data or (), self.loop.processor)
        return TokenOutput(ids, [0.0] * n, [-1] * n, "stop" if ids else "abort", prompt_ids)

    def turn_ids(self, message: dict) -> list[int]:
        """Returns a turn's tokens, up to and including the one that ends it in the template.

        They are what the template writes behind its generation prompt. If the template changes
        a text (some drop reasoning), the text itself is tokenised instead. Raises ValueError
        if nothing is left, or if a token that ends a turn is within."""
        tokenizer = self.loop.tokenizer
        chat = [{"role": "user", "content": "?"}]
        before = render_text(tokenizer, chat, None, True)
        said = {"content": ""} | message
        written = render_text(tokenizer, [*chat, said], None).partition(before)[2]
        ids = list(_inner_ids(tokenizer, written))
        while ids and ids[-1] not in self.stops:  # such as a newline behind the turn's end
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


@functools.cache
def tool_parser(name: str, tokenizer):
    """Returns the tool-call parser that `vllm serve --tool-call-parser` has by this name.

    Raises BadInput if there is no such parser, if the tokenizer lacks the tokens of its
    format, or if it can't parse plain text."""
    from vllm.tool_parsers import ToolParserManager

    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
        parser.extract_tool_calls("", _parser_request("[]"))
        return parser
    except KeyError:
        problem = f": choose from {', '.join(sorted(ToolParserManager.list_registered()))}"
    except NotImplementedError:  # those that want vLLM's own chat server around them
        problem = " does not parse plain text: choose another"
    except (RuntimeError, ValueError) as error:  # the tokenizer has no token of this format
        problem = f" does not fit the model: {error}"
    raise BadInput(f"--tool_parser {name}{problem}")


@functools.cache
def _parser_request(schemas):
    """Returns the chat request in which some parsers look up the tools.

    schemas: a JSON list, so that requests can be cached."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    messages = [{"role": "user", "content": ""}]
    return ChatCompletionRequest(messages=messages, tools=json.loads(schemas) or None)


def parse_tool_calls(text: str, parser_name: str, tokenizer, schemas: list[dict]) -> tuple:
    """Returns the text beside a turn's tool calls, and [{"name", "arguments", "error"}, ...].

    arguments is a dict. error is None, or says to the model why the call can't be executed."""
    parser = tool_parser(parser_name, tokenizer)
    malformed = [{"name": "", "arguments": {},
                  "error": "the tool call is not valid JSON with name and arguments"}]
    try:
        parsed = parser.extract_tool_calls(text, _parser_request(json.dumps(schemas)))
    except Exception:  # most parsers catch what a model can write, some don't
        return text, malformed
    if not parsed.tools_called:
        start = getattr(parser, "tool_call_start_token", None)
        if start and start in text:
            return text, malformed
        return text, []
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
    # `clean` sees a surrogate as a character, not as the escape that JSON may have for it.
    arguments = json.loads(clean(json.dumps(json.loads(text), ensure_ascii=False)))
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be a JSON object")
    return arguments


def _call_id(turn, number):
    """Returns the id of a turn's call: nine characters, as Mistral's template wants. It is the
    same in every run."""
    return f"{turn:06d}{number:03d}"


def function_call(id: str, name: str, arguments: dict) -> dict:
    """Returns a tool call for an assistant's message, as chat templates want it."""
    return {"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}


def make_calls(message: dict, content: str, calls: list[dict], turn: int):
    """Turns an assistant's message into one that makes these calls (of `parse_tool_calls`)."""
    message["content"] = content
    message["tool_calls"] = [
        function_call(_call_id(turn, number), call["name"], call["arguments"])
        for number, call in enumerate(calls)]


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Turns of sampling, tool calls and simulated users: a state machine, as verl's.

        pending -> generating -> processing_tools -> generating ...   the model calls tools
                              -> interacting -> generating ...        a simulated user answers
                              -> None                                 the end

    A state is a method that gets the trajectory and returns the next state; a subclass adds
    one by returning it from another: `return self.reflecting`. A tool that raises, passes its
    deadline or is called wrongly becomes a message the model reads, and a counter."""

    async def run(self, sampling_params, **row):
        """Runs one rollout of a row: sets up its tools and user, goes from state to state."""
        self.sampling_params = sampling_params
        self.tools_kwargs = row_kwargs(row, "tools_kwargs")
        self.tools = task_tools(self.task, self.tools_kwargs)
        self.schemas = [tool.schema for tool in self.tools.values()]
        self.interaction_kwargs = dict(row_kwargs(row, "interaction_kwargs"))
        self.interaction = task_interaction(self.task, self.interaction_kwargs)
        self.interaction_kwargs.pop("name", None)
        self.user_answers = 0
        self.created = {}  # tool name -> the task of its `create`
        trajectory = self.start(row, self.schemas)
        try:
            await self._run_states(trajectory)
            for name, created in self.created.items():
                if created.done() and not created.exception():
                    reward = self._in_time(self._tool_method, trajectory, name, "calc_reward")
                    trajectory.record("tool", name, await reward, None)
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
            if not budget.expired():  # it is a tool's or an interaction's own error: a failure
                raise
            trajectory.stop_reason = "timeout"  # what it has so far is kept, and graded

    async def pending(self, trajectory):
        """Lets the interaction speak first, if there is one and it wants to."""
        text = None
        if self.interaction:
            text = await self._in_time(
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
        """Samples an assistant turn; then its tools are called, or the user answers."""
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
        """Returns whether a limit of turns is reached, and makes that the stop reason."""
        reached = (0 < self.args.max_assistant_turns <= trajectory.assistant_turns
                   or 0 < self.args.max_user_turns <= user_answers)
        if reached:
            trajectory.stop_reason = "max_turns"
        return reached

    def parse(self, trajectory, text):
        """Returns the calls of a turn, malformed ones too (see `parse_tool_calls`).

        Unless none has a name, the trajectory's last message becomes one with tool_calls."""
        content, calls = parse_tool_calls(text, self.args.tool_parser, self.tokenizer, self.schemas)
        if any(call["name"] for call in calls):
            make_calls(trajectory.messages[-1], content, calls, trajectory.assistant_turns)
        return calls

    async def processing_tools(self, trajectory):
        """Executes the turn's tool calls side by side, and answers them in their order."""
        calls = trajectory.tool_calls
        limit = self.args.max_parallel_calls
        for call in calls[limit:]:
            call["error"] = f"only {limit} tool calls at a time are executed"
        started = time.perf_counter()
        responses = await asyncio.gather(
            *(self.call_tool(trajectory, call) for call in calls), return_exceptions=True)
        trajectory.count("tool_s", time.perf_counter() - started)
        trajectory.count("tool_calls", len(calls))
        messages = []
        images = []
        for number, (call, response) in enumerate(zip(calls, responses)):
            try:
                if isinstance(response, Exception):
                    raise response
                trajectory.record("tool", call["name"], response.reward, response.metrics)
                n_images = len(trajectory.images + images)
                n_new = len(response.images)
                if n_images + n_new > self.args.max_images:
                    raise ValueError(f"no room for {n_new} more images: {n_images} of "
                                     f"{self.args.max_images} are there")
            except Exception as error:  # the model reads it, and the run goes on
                response = self._error_response(trajectory, error)
            messages.append({
                "role": "tool", "name": call["name"], "content": self._content(response),
                # A malformed call has an id, too.
                "tool_call_id": _call_id(trajectory.assistant_turns, number)})
            images += response.images
        return self.answer(trajectory, messages, images)

    def _error_response(self, trajectory, error):
        """Returns a ToolResponse that tells the model of an error, which is counted."""
        trajectory.count("tool_timeouts" if isinstance(error, CallTimeoutError) else "tool_errors")
        problem = type(error).__name__
        with suppress(Exception):  # an error's own text may fail, too
            problem = str(error) or repr(error)
        return ToolResponse(f"Error: {problem}")

    def _content(self, response):
        """Returns the content of a tool's message: text, or parts if there are images."""
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

    async def _tool_method(self, trajectory, name, method, *arguments):
        """Calls a tool's method with the keyword arguments that the row has for it."""
        kwargs = self.tools_kwargs.get(name, {}).get(f"{method}_kwargs", {})
        method = getattr(self.tools[name], method)
        return await call(method, trajectory.request_id, *arguments, **kwargs)

    async def _execute(self, trajectory, name, arguments):
        """Returns a tool's ToolResponse, its images loaded. Raises what the tool raises."""
        if name not in self.created:
            create = self._tool_method(trajectory, name, "create")
            self.created[name] = asyncio.ensure_future(_contained(create))
        await asyncio.shield(self.created[name])  # parallel calls wait for the same one
        response = await self._tool_method(trajectory, name, "execute", copy.deepcopy(arguments))
        if not isinstance(response, tuple):
            response = response, None, None
        response, reward, metrics = response
        if not isinstance(response, ToolResponse):
            response = ToolResponse(response)
        if response.images and self.processor is None:
            raise ValueError("the tool returned an image, and this agent reads text only")
        images = [load_image(image) for image in response.images]
        if images:
            # Raises for a shape that the model does not take.
            image_tokens(images, self.processor)
        if reward is None:
            reward = response.reward
        metrics = {**response.metrics, **(metrics or {})}
        return ToolResponse(str(response.text), images, reward, metrics)

    async def _in_time(self, function, *args, **kwargs):
        """Awaits a method of a tool or an interaction under the deadline of a tool call."""
        what = function.__qualname__
        return await in_time(what, self.args.tool_timeout, call(function, *args, **kwargs))

    def _shorten(self, text):
        """Cuts a text to max_tool_response_tokens tokens and "...", as verl does.

        tool_response_truncate_side "left" keeps its start, "right" its end, "middle" both."""
        limit = self.args.max_tool_response_tokens
        text = clean(text)
        if len(text.encode()) <= limit:  # a token is a byte at least
            return text
        # Of a longer text only so many characters at either end are tokenised.
        reach = 64 * limit
        if len(text) > 2 * reach:
            text = f"{text[:reach]}...{text[-reach:]}"
        ids = _tokenise(self.tokenizer, text)
        if len(ids) <= limit:
            return text
        n_heads = {"left": limit, "middle": (limit + 1) // 2, "right": 0}
        n_head = n_heads[self.args.tool_response_truncate_side]
        decode = self.tokenizer.decode
        return f"{decode(ids[:n_head])}...{decode(ids[len(ids) - limit + n_head :])}"

    async def interacting(self, trajectory):
        """Lets the simulated user answer, and reward, the assistant's turn."""
        answer = await self._in_time(
            self.interaction.generate_response, trajectory.request_id,
            copy.deepcopy(trajectory.messages), **self.interaction_kwargs)
        name = self.interaction.name
        if not isinstance(answer, Sequence) or len(answer) != 4 or answer[0] not in (True, False):
            raise ValueError(f"interaction {name!r} returned {answer!r:.80}: must be (done, text, "
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
        """Appends messages; returns the next state, generating if they and a reply fit."""
        stops = self.stop_token_ids(self.sampling_params)
        fits = self.append(trajectory, messages, self.schemas, stops, images)
        return self.generating if fits else None

    async def close(self, trajectory):
        """Releases what was created, also after a cancellation or failure.

        What fails is counted."""
        for create in self.created.values():
            create.cancel()  # one that outlived its deadline
        closers = [self._in_time(self._tool_method, trajectory, name, "release")
                   for name in self.created]
        if self.interaction:
            closers.append(self._in_time(self.interaction.finalize, trajectory.request_id))
        for result in await asyncio.gather(*closers, return_exceptions=True):
            if isinstance(result, BaseException):
                trajectory.count("release_errors")
