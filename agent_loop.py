"""What happens inside ONE trajectory: agent loops, tools and interactions.

An agent loop gets a row of the data set and an engine, and returns tokens: what the policy sampled (mask 1) and what
the world answered (mask 0: tool results, user turns, template). The rule that everything here serves is *token in,
token out*: sampled ids are appended verbatim and never rendered again; the turns in between are tokenised as a
difference of two template renderings (`turn_suffix`).

To bring your own agent, subclass `AgentLoopBase` in the task file, decorate it with `@register("name")`, and select it
with `--agent name` or a row's `agent_name`. Loops run as coroutines of one background thread; hundreds live at once.
Names follow verl's agent loop (https://verl.readthedocs.io/en/latest/advance/agent_loop.html).
"""

import asyncio
import base64
import contextvars
import copy
import enum
import functools
import hashlib
import inspect
import io
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4


class BadInput(ValueError):
    """The user's flags, task file, rows or model can't work as given; train.py shows only its one-line message."""


# ---------------------------------------------------------------- what crosses files


@dataclass
class TokenOutput:
    """What one `generate` call returns.

    token_ids, logprobs, versions have one entry a sampled token: its id, its log-probability under the sampling
    temperature, and the version of the weights that sampled it. The stop token, if one was sampled, is included.
    prompt_ids is the prompt as the engine saw it: an image's placeholder repeated for every token the image takes.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: str  # "stop" | "length" | "abort"
    prompt_ids: list[int]


class GeneratesTokens(Protocol):
    """Any object with this method is an engine: the real one, or a scripted one in a test.

    prompt_ids has ONE placeholder for each image of image_data, a list of PIL images.
    """

    async def generate(
        self, *, request_id: str, prompt_ids: list[int], sampling_params: dict, image_data: list | None = None
    ) -> TokenOutput: ...


STOP_REASONS = ("stop", "length", "max_turns", "timeout", "abort", "error")


@dataclass(kw_only=True)
class AgentLoopOutput:
    """One finished trajectory: the one dataclass that crosses files.

    The four response_* lists have one entry a response token. response_mask is 1 where the policy sampled the token,
    0 for tool, user and template tokens; there the logprob is 0.0 and the version -1. turn_rewards holds
    (index into response_ids, reward) pairs. num_turns = assistant turns + user/tool turns + 1, as in verl.
    images: PIL images in the order of their placeholders, which the ids have in full, one for each token of an image.

    Raises ValueError if the lists disagree in length, a mask entry is neither 0 nor 1, or the stop reason is unknown.
    """

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

    def __post_init__(self) -> None:
        names = ("response_ids", "response_mask", "response_logprobs", "response_versions")
        lengths = {name: len(getattr(self, name)) for name in names}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"the response lists of an AgentLoopOutput must have one length, got {lengths}")
        if any(m not in (0, 1) for m in self.response_mask):
            raise ValueError("response_mask holds 0 (not sampled) and 1 (sampled by the policy) only")
        if not self.prompt_ids:
            raise ValueError("prompt_ids is empty: the first response token needs a token to be predicted from")
        if self.stop_reason not in STOP_REASONS:
            raise ValueError(f"stop_reason {self.stop_reason!r} is not one of {STOP_REASONS}")

    @property
    def truncated(self) -> bool:
        return self.stop_reason in ("length", "max_turns")


# ---------------------------------------------------------------- templates: messages -> tokens


def render_text(tokenizer, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool = False) -> str:
    """A chat as text under the tokenizer's template. Raises BadInput if the tokenizer has no template."""
    if not tokenizer.chat_template:
        raise BadInput("the tokenizer has no chat template: use an instruct model, or set tokenizer.chat_template")
    return tokenizer.apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=add_generation_prompt, tokenize=False
    )


def render(tokenizer, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    """Token ids of a chat up to where the assistant speaks next."""
    return list(_prompt_ids(tokenizer, render_text(tokenizer, messages, tools, True)))


@functools.lru_cache(maxsize=1024)  # the members of a group share their prompt
def _prompt_ids(tokenizer, text: str) -> tuple[int, ...]:
    # The template writes every special token itself (BOS too); letting the tokenizer add them again would double them.
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


class RewritesHistory(ValueError):
    """The chat template changes earlier messages when new ones are added: what follows needs a sequence of its own."""


def turn_suffix(
    tokenizer, messages: list[dict], new: list[dict], stop_token_ids: set[int], ended: bool, tools=None
) -> list[int]:
    """Tokens that follow an assistant turn when `new` messages (tool or user) come after it.

    Renders `messages` (ending with the assistant's) with and without `new`, and takes the difference from the
    template's last end-of-turn token on: the newline that many templates put after that token is not sampled by the
    policy, and would be lost if the difference were taken from the end of the rendering (verl#6501). `ended` says
    whether the policy sampled a stop token; if not (a stop string), the end-of-turn token belongs to the suffix.

    Raises RewritesHistory if the template changes earlier messages when new ones are added (Qwen3 drops reasoning).
    """
    before = render_text(tokenizer, messages, tools)
    after = render_text(tokenizer, messages + new, tools, add_generation_prompt=True)
    if not after.startswith(before):
        raise RewritesHistory(
            "the chat template is not append-only: adding a message changes earlier ones, so the turns of this "
            "conversation can't be one token sequence"
        )
    start, stop = max(((before.rfind(tokenizer.decode([t])), t) for t in stop_token_ids), default=(-1, None))
    if start < 0:  # a template that ends turns with no token at all
        return tokenizer(after[len(before) :], add_special_tokens=False)["input_ids"]
    # Tokenised from the end-of-turn token on: nothing merges across it, and no tokenizer takes what follows for the
    # start of a text (some would put a space there).
    ids = tokenizer(after[start:], add_special_tokens=False)["input_ids"]
    return ids[1:] if ended and ids[0] == stop else ids


# ---------------------------------------------------------------- images


IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # tools' and data's: nothing that runs a program (EPS) to decode
MAX_PIXELS = 64_000_000  # 256 MB decoded


def open_image(source):
    """A PIL image from a PIL image, a path, bytes, or the {"bytes", "path"} dict of Hugging Face's data files.

    Of a file only the header is read: enough for its size. Raises ValueError if it is no image in one of IMAGE_FORMATS,
    or has more than MAX_PIXELS.
    """
    from PIL import Image

    source = _file_of(source)
    if isinstance(source, Image.Image):
        return source
    try:
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=IMAGE_FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels are more than {MAX_PIXELS:,}")
        return image
    except Exception as error:  # PIL, the file system and a wrong type each have their own
        said = f"{len(source)} bytes" if isinstance(source, bytes) else repr(source)[:80]
        raise ValueError(f"{said} can't be read as an image: {error}") from None


def _file_of(source):
    return (source.get("bytes") or source.get("path")) if isinstance(source, dict) else source


def load_image(source):
    """`open_image`, upright and in RGB: pixels that the engine and the trainer see alike. Raises ValueError."""
    from PIL import ImageOps

    image = open_image(source)
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # a file that ends early, a decompression bomb
        raise ValueError(f"an image can't be decoded: {error}") from None


def row_image(source):
    """`load_image` of a row's image, one object for all members of a group: it is sent and preprocessed once.

    A PIL image is what `data.load_rows` has made of it: loaded already.
    """
    source = _file_of(source)
    return _row_image(source) if isinstance(source, (bytes, str, Path)) else source


_row_image = functools.lru_cache(maxsize=64)(load_image)


def expand(ids: list[int], images: Sequence, processor) -> list[int]:
    """Repeats the one placeholder of each image for every token that the image takes: what the model is fed.

    Raises ValueError if there are not as many placeholders as images, or an image has a shape the model does not take.
    """
    if processor is None:  # a text model
        if images:
            raise ValueError("there are images, and this model reads text only")
        return ids
    placeholder = processor.image_token_id
    if ids.count(placeholder) != len(images):
        raise ValueError(f"there are {len(images)} images, but {ids.count(placeholder)} placeholders in the text")
    if not images:
        return ids
    sizes = [(image.height, image.width) for image in images]
    counts = iter(processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"])
    return [token for i in ids for token in ([i] * next(counts) if i == placeholder else [i])]


def check_images(output: AgentLoopOutput, processor) -> None:
    """Raises ValueError unless an output's ids have a placeholder for every token of its images, and no other."""
    placeholder = processor.image_token_id
    found = (output.prompt_ids + output.response_ids).count(placeholder)
    expected = len(expand([placeholder] * len(output.images), output.images, processor))
    if found != expected:
        raise ValueError(
            f"the ids have {found} placeholders, but the {len(output.images)} images of AgentLoopOutput.images take "
            f"{expected} tokens: return both as the trainer needs them (see Trajectory)"
        )


# ---------------------------------------------------------------- tools and interactions


@dataclass
class ToolResponse:
    """What a tool says back: text and images for the model, and optionally a reward and metrics for the trajectory.

    images: anything `open_image` takes.
    """

    text: str = ""
    images: list = field(default_factory=list)
    reward: float | None = None
    metrics: dict = field(default_factory=dict)


class Tool:
    """A tool with state or resources. One shared instance serves all trajectories; keep state by `request_id`.

    For each trajectory that calls it: `create` once, before the first `execute`; then `calc_reward` once; and
    `release` in every case. All may be overridden; `execute` must be. Set `name` and `schema` (the JSON schema of an
    OpenAI function tool) on the class or the instance.
    """

    name: str
    schema: dict

    async def create(self, request_id: str, **create_kwargs) -> None: ...

    async def execute(self, request_id: str, arguments: dict, **execute_kwargs) -> str | ToolResponse | tuple:
        """Returns the response, or (response, reward, metrics)."""
        raise TypeError(f"{type(self).__name__} has no execute method")

    async def calc_reward(self, request_id: str, **kwargs) -> float:
        return 0.0

    async def release(self, request_id: str, **kwargs) -> None: ...


class FunctionTool(Tool):
    """A typed, documented Python function as a tool; its schema comes from the type hints and the docstring."""

    def __init__(self, function: Callable):
        from transformers.utils import get_json_schema

        self.function, self.name = function, function.__name__
        try:
            self.schema = get_json_schema(function)
        except Exception as error:  # transformers' own exception types differ between its versions
            raise BadInput(
                f"tool {self.name!r} needs type hints and a Google-style docstring with an Args section: {error}"
            ) from error

    async def execute(self, request_id: str, arguments: dict, **execute_kwargs) -> str | ToolResponse | tuple:
        try:
            bound = inspect.signature(self.function).bind(**arguments, **execute_kwargs)
        except TypeError as error:
            raise ValueError(f"wrong arguments: {error}") from None
        return await call(self.function, *bound.args, **bound.kwargs)


_function_tool = functools.cache(FunctionTool)


def as_tool(tool: Tool | Callable) -> Tool:
    """The Tool itself, or the one Tool made of a Python function."""
    if isinstance(tool, Tool):
        return tool
    if inspect.isroutine(tool):
        return _function_tool(tool)
    raise BadInput(f"TOOLS holds {tool!r}, which is neither a Tool instance nor a function")


def row_kwargs(row: dict, name: str) -> dict:
    """A row's "tools_kwargs" or "interaction_kwargs": a column of its own or, as in verl, a key of extra_info."""
    return row.get(name) or (row.get("extra_info") or {}).get(name) or {}


def task_tools(task, tools_kwargs: dict | None = None) -> dict[str, Tool]:
    """The tools of a row by name: those its tools_kwargs names, all of the task's when it has none."""
    all_tools = [as_tool(tool) for tool in getattr(task, "TOOLS", None) or []]
    tools = {tool.name: tool for tool in all_tools}
    if len(tools) < len(all_tools):
        raise BadInput(f"two of the task's TOOLS have the same name: {sorted(tool.name for tool in all_tools)}")
    if not tools_kwargs:
        return tools
    if unknown := set(tools_kwargs) - set(tools):
        raise BadInput(f"tools_kwargs names {sorted(unknown)}, but the task's TOOLS are {sorted(tools)}")
    return {name: tool for name, tool in tools.items() if name in tools_kwargs}


class Interaction:
    """A simulated user (or environment) that speaks when the assistant made no tool call. One shared instance."""

    name: str = "interaction"

    async def start(self, request_id: str, **kwargs) -> None: ...

    async def generate_response(self, request_id: str, messages: list[dict], **kwargs) -> tuple[bool, str, float, dict]:
        """Returns (done, text of the next user turn, reward of the assistant turn just made, metrics)."""
        raise TypeError(f"{type(self).__name__} has no generate_response method")

    async def finalize(self, request_id: str) -> None: ...


def task_interaction(task, kwargs: dict | None) -> Interaction | None:
    """The interaction that kwargs["name"] picks from the task's INTERACTIONS; the only one if there is just one."""
    known = getattr(task, "INTERACTIONS", None) or {}
    known = known if isinstance(known, dict) else {interaction.name: interaction for interaction in known}
    name = (kwargs or {}).get("name")
    if name is None:
        if len(known) > 1 and kwargs:
            raise BadInput(f"interaction_kwargs needs a 'name', one of {sorted(known)}")
        return next(iter(known.values())) if len(known) == 1 else None
    if name not in known:
        raise BadInput(f"interaction_kwargs names {name!r}, but the task's INTERACTIONS are {sorted(known)}")
    return known[name]


def reraise_cancellation(error: BaseException) -> None:
    """Raises `error` again if it cancels the running task; any other error of user code is a failure to count."""
    if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
        raise error


async def contained(coroutine) -> Any:
    """Awaits user code: SystemExit, which would end the event loop, and a CancelledError of its own become errors."""
    try:
        return await coroutine
    except BaseException as error:
        reraise_cancellation(error)
        raise error if isinstance(error, Exception) else RuntimeError(repr(error)) from None


async def in_thread(function: Callable, *args, **kwargs) -> Any:
    """Runs a plain function without blocking the event loop, on a daemon thread of its own.

    asyncio.to_thread's pool is joined when Python exits, so a tool that never returns would keep the process alive.
    """
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result, error):
        if not future.done():  # cancelled meanwhile: a deadline passed
            future.set_exception(error) if error else future.set_result(result)

    def work():
        result = error = None
        try:
            result = context.run(function, *args, **kwargs)
        except BaseException as caught:
            # asyncio refuses to carry StopIteration, and SystemExit would end the event loop: here both are failures.
            plain = isinstance(caught, Exception) and not isinstance(caught, StopIteration)
            error = caught if plain else RuntimeError(repr(caught))
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=work, daemon=True, name=getattr(function, "__name__", "tool")).start()
    return await future


async def call(function: Callable, *args, **kwargs) -> Any:
    """Awaits an async function; runs a plain one in a thread, so that a slow one delays nobody else."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    return await in_thread(function, *args, **kwargs)


# ---------------------------------------------------------------- agent loops


def clean(text: str) -> str:
    """The text without lone surrogates (of a tool's garbage bytes, or "\\ud83d" in JSON): no tokenizer takes them."""
    return str(text).encode(errors="replace").decode()


def finite(value, name: str) -> float:
    """`value` as a float. Raises ValueError unless it is a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return number


AGENT_LOOPS: dict[str, type["AgentLoopBase"]] = {}


def register(name: str) -> Callable:
    """Class decorator: `@register("name")` makes an agent loop selectable by `--agent name` or a row's agent_name."""

    def add(cls: type["AgentLoopBase"]) -> type["AgentLoopBase"]:
        AGENT_LOOPS[name] = cls
        return cls

    return add


def agent_loop_class(row: dict, task, args) -> type["AgentLoopBase"]:
    """row["agent_name"], else --agent, else "tool_agent" if the task has TOOLS or INTERACTIONS, else "single_turn"."""
    has_turns = getattr(task, "TOOLS", None) or getattr(task, "INTERACTIONS", None)
    name = row.get("agent_name") or args.agent or ("tool_agent" if has_turns else "single_turn")
    if name not in AGENT_LOOPS:
        raise BadInput(
            f"no agent loop {name!r}: choose from {sorted(AGENT_LOOPS)} or add @register({name!r}) to the task"
        )
    return AGENT_LOOPS[name]


class Trajectory:
    """The growing token lists of one trajectory; the only place where they are appended to, in lock step.

    `fork` starts a new token sequence where the history was rewritten; `outputs` then has one entry for each.
    request_ids are prompt and response as the engine is asked, with one placeholder an image; see `expand`.
    """

    def __init__(
        self, messages: list[dict], prompt_ids: list[int], request_ids: list[int] | None = None, images: Sequence = ()
    ):
        self.request_id = uuid4().hex
        self.messages = list(messages)
        self.images = list(images)
        self.finished: list[AgentLoopOutput] = []  # sequences before the last fork
        self.metrics: dict[str, Any] = {}
        self.assistant_turns = self.user_turns = 0
        self.stop_reason = "stop"
        self.ended = True  # whether the last assistant turn ended with a stop token
        self.tool_calls: list[dict] = []  # of the last assistant turn, still to be executed
        self.extra: dict[str, Any] = {}
        self._begin(prompt_ids, request_ids)

    def _begin(self, prompt_ids: list[int], request_ids: list[int] | None) -> None:
        self.prompt_ids = prompt_ids
        self.request_ids = list(prompt_ids if request_ids is None else request_ids)
        self.response_ids: list[int] = []
        self.response_mask: list[int] = []
        self.response_logprobs: list[float] = []
        self.response_versions: list[int] = []
        self.turn_rewards: list[tuple[int, float]] = []

    @property
    def n_response(self) -> int:
        """Response tokens so far, over all sequences."""
        return sum(len(output.response_ids) for output in self.finished) + len(self.response_ids)

    def fork(self, prompt_ids: list[int], request_ids: list[int] | None = None) -> None:
        """Ends the token sequence here and starts another one whose prompt is the rewritten history."""
        metrics, self.metrics = self.metrics, {}  # they are the trajectory's: on its last output only
        self.finished.append(self.output())
        self.metrics = metrics
        self._begin(prompt_ids, request_ids)
        self.count("forks")

    def add_sampled(self, out: TokenOutput) -> None:
        if not len(out.token_ids) == len(out.logprobs) == len(out.versions):
            raise ValueError(
                f"the engine returned {len(out.token_ids)} tokens, but {len(out.logprobs)} logprobs and "
                f"{len(out.versions)} versions"
            )
        self.request_ids += out.token_ids
        self.response_ids += out.token_ids
        self.response_mask += [1] * len(out.token_ids)
        self.response_logprobs += out.logprobs
        self.response_versions += out.versions
        self.assistant_turns += 1

    def add_given(self, ids: list[int], request_ids: list[int] | None = None) -> None:
        """Tokens of a tool, a user or the template; request_ids: the same with one placeholder an image."""
        self.request_ids += ids if request_ids is None else request_ids
        self.response_ids += ids
        self.response_mask += [0] * len(ids)
        self.response_logprobs += [0.0] * len(ids)
        self.response_versions += [-1] * len(ids)

    def add_reward(self, reward: float | None) -> None:
        """A reward for the assistant turn just made, at its last token. Raises ValueError if it is no finite number."""
        if reward := finite(reward or 0.0, "a turn's reward"):
            self.turn_rewards.append((max(0, len(self.response_ids) - 1), reward))

    def count(self, name: str, n: float = 1) -> None:
        self.metrics[name] = self.metrics.get(name, 0) + n

    def outputs(self) -> list[AgentLoopOutput]:
        """All sequences; a last one in which nothing was sampled leaves what it has to the one before."""
        if not self.finished or 1 in self.response_mask:
            return [*self.finished, self.output()]
        last = self.finished[-1]
        last.turn_rewards += [(len(last.response_ids) - 1, reward) for _, reward in self.turn_rewards]
        last.metrics, last.stop_reason = self.metrics, self.stop_reason
        return list(self.finished)

    def output(self) -> AgentLoopOutput:
        """The current token sequence: all there is without a fork."""
        return AgentLoopOutput(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            response_mask=self.response_mask,
            response_logprobs=self.response_logprobs,
            response_versions=self.response_versions,
            turn_rewards=self.turn_rewards,
            messages=list(self.messages),
            num_turns=self.assistant_turns + self.user_turns + 1,
            stop_reason=self.stop_reason,
            metrics=self.metrics,
            images=list(self.images),
            extra=dict(self.extra),  # each output of a fork gets its own number
        )


class AgentLoopBase:
    """One instance a trajectory. Subclasses write `run`.

    engine: anything with `generate`; processor: None for text models; task: the task module; args: train.Args.
    """

    def __init__(self, engine: GeneratesTokens, tokenizer, processor, task, args):
        self.engine, self.tokenizer, self.processor, self.task, self.args = engine, tokenizer, processor, task, args

    async def run(self, sampling_params: dict, **row) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Runs one trajectory of a row (its columns, and step, index, rollout_n, validate) to its end."""
        raise TypeError(f"{type(self).__name__} has no run method")

    def start(self, row: dict, tools: list[dict] | None = None) -> Trajectory:
        return self.begin(list(row["prompt"]), tools, [row_image(image) for image in row.get("images") or ()])

    def begin(self, messages: list[dict], tools: list[dict] | None = None, images: Sequence = ()) -> Trajectory:
        """A trajectory with these messages as its prompt; images: PIL images, one for each placeholder in them."""
        ids = render(self.tokenizer, messages, tools)
        return Trajectory(messages, expand(ids, images, self.processor), ids, images)

    def room(self, trajectory: Trajectory) -> int:
        """Response tokens that still fit: the smaller of the response budget and the model's window."""
        room = self.args.max_response_tokens - trajectory.n_response
        if self.args.max_model_len:
            used = len(trajectory.prompt_ids) + len(trajectory.response_ids)
            room = min(room, self.args.max_model_len - used)
        return room

    def append(
        self,
        trajectory: Trajectory,
        messages: list[dict],
        tools: list[dict] | None,
        stops: set[int],
        images: Sequence = (),
    ) -> bool:
        """Appends tool or user messages as a template suffix, or forks where the template rewrites the history.

        images: PIL images, one for each placeholder in the messages.
        False if no room would be left for a token of reply: then nothing is appended, and the stop reason is "length".
        """
        try:
            request = turn_suffix(self.tokenizer, trajectory.messages, messages, stops, trajectory.ended, tools)
            ids = expand(request, images, self.processor)
            fits, take = len(ids) < self.room(trajectory), trajectory.add_given
        except RewritesHistory:
            request = render(self.tokenizer, trajectory.messages + messages, tools)
            ids = expand(request, [*trajectory.images, *images], self.processor)
            window = self.args.max_model_len or len(ids) + 1
            fits, take = len(ids) < window and trajectory.n_response < self.args.max_response_tokens, trajectory.fork
        if not fits:
            trajectory.stop_reason = "length"
            return False
        take(ids, request)
        trajectory.images += images
        trajectory.messages += messages
        trajectory.user_turns += 1
        return True

    async def assistant_turn(self, trajectory: Trajectory, sampling_params: dict) -> str | None:
        """Samples one assistant turn; returns its text, special tokens kept, or None if it was cut off."""
        max_tokens = min(sampling_params.get("max_tokens") or self.args.max_response_tokens, self.room(trajectory))
        if max_tokens < 1:
            trajectory.stop_reason = "length"
            return None
        images = {"image_data": list(trajectory.images)} if trajectory.images else {}
        out = await self.engine.generate(
            request_id=trajectory.request_id,
            prompt_ids=list(trajectory.request_ids),
            sampling_params={**sampling_params, "max_tokens": max_tokens},
            **images,
        )
        if images and out.prompt_ids != trajectory.prompt_ids + trajectory.response_ids:
            raise ValueError(
                f"the engine and the processor disagree about the tokens of the images: {len(out.prompt_ids)} prompt "
                f"tokens against {len(trajectory.prompt_ids) + len(trajectory.response_ids)}"
            )
        trajectory.add_sampled(out)
        stops = self.stop_token_ids(sampling_params)
        trajectory.ended = bool(out.token_ids) and out.token_ids[-1] in stops
        content = out.token_ids[:-1] if trajectory.ended else out.token_ids
        trajectory.messages.append(
            {"role": "assistant", "content": self.tokenizer.decode(content, skip_special_tokens=True)}
        )
        if out.stop_reason != "stop":
            trajectory.stop_reason = out.stop_reason
            return None
        return self.tokenizer.decode(content, skip_special_tokens=False)

    def plain(self, text: str) -> str:
        """`clean`, and nothing in it that the tokenizer would take for the placeholder of an image."""
        text, placeholder = clean(text), getattr(self.processor, "image_token", None)
        return text.replace(placeholder, " ") if placeholder else text

    def stop_token_ids(self, sampling_params: dict) -> set[int]:
        eos = self.tokenizer.eos_token_id
        return set(sampling_params.get("stop_token_ids") or []) | ({eos} if eos is not None else set())


@register("single_turn")
class SingleTurnLoop(AgentLoopBase):
    """One prompt, one answer."""

    async def run(self, sampling_params: dict, **row) -> AgentLoopOutput:
        trajectory = self.start(row)
        await self.assistant_turn(trajectory, sampling_params)
        return trajectory.output()


class AgentState(enum.Enum):
    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


@functools.cache
def tool_parser(name: str, tokenizer):
    """One of vLLM's tool-call parsers, by the name that `vllm serve --tool-call-parser` uses."""
    from vllm.tool_parsers import ToolParserManager

    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
        parser.extract_tool_calls("", parser_request("[]"))
        return parser
    except KeyError:
        known = ", ".join(sorted(ToolParserManager.list_registered()))
        raise BadInput(f"--tool_parser {name}: choose from {known}") from None
    except NotImplementedError:  # those that want vLLM's own chat server around them
        raise BadInput(f"--tool_parser {name} does not parse plain text: choose another") from None
    except (RuntimeError, ValueError) as error:  # the tokenizer has none of the tokens that this format is made of
        raise BadInput(f"--tool_parser {name} does not fit the model: {error}") from None


@functools.cache
def parser_request(schemas: str):
    """The chat request that some of vLLM's parsers look up the tools in; schemas as JSON, to be cached."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(messages=[{"role": "user", "content": ""}], tools=json.loads(schemas) or None)


def parse_tool_calls(text: str, parser_name: str, tokenizer, schemas: list[dict]) -> tuple[str, list[dict]]:
    """The text beside the tool calls of an assistant turn, and [{"name", "arguments", "error"}].

    arguments is a dict; error says, for the model to read, why a call can't be executed, else it is None.
    """
    parser = tool_parser(parser_name, tokenizer)
    malformed = [{"name": "", "arguments": {}, "error": "the tool call is not valid JSON with name and arguments"}]
    try:
        found = parser.extract_tool_calls(text, parser_request(json.dumps(schemas)))
    except Exception:  # most parsers catch what a model can write, some don't
        return text, malformed
    start = getattr(parser, "tool_call_start_token", None)
    if not found.tools_called:
        return text, malformed if start and start in text else []
    calls = []
    for call in found.tool_calls:
        arguments, error = {}, None
        try:
            arguments = json.loads(call.function.arguments)
            arguments = json.loads(clean(json.dumps(arguments, ensure_ascii=False)))
            if not isinstance(arguments, dict):
                raise ValueError("arguments must be a JSON object")
        except (ValueError, RecursionError) as caught:
            arguments, error = {}, f"wrong arguments: {caught}"
        calls.append({"name": clean(call.function.name), "arguments": arguments, "error": error})
    return found.content or "", calls


def call_id(turn: int, i: int) -> str:
    """Of the i-th call of an assistant turn: nine characters, as Mistral's template wants, the same in every run."""
    return f"{turn:06d}{i:03d}"


def calling_message(content: str, calls: list[dict], turn: int) -> dict:
    """The assistant's message that makes these calls, as chat templates want it: arguments as a dict."""
    made = []
    for i, call in enumerate(calls):
        function = {"name": call["name"], "arguments": call["arguments"]}
        made.append({"type": "function", "id": call_id(turn, i), "function": function})
    return {"role": "assistant", "content": content, "tool_calls": made}


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Turns of sampling, tool calls and simulated users, as a state machine (verl's tool_agent_loop).

        PENDING -> GENERATING -> PROCESSING_TOOLS -> GENERATING ...   while the model calls tools
                              -> INTERACTING -> GENERATING ...        while a simulated user answers
                              -> TERMINATED

    A tool that raises, passes its deadline or is called wrongly becomes a message the model reads, and a counter.
    A subclass adds states of its own: a method, and its name in `handlers`; any handler may return the new state.
    """

    handlers: dict[Any, str] = {
        AgentState.PENDING: "pending",
        AgentState.GENERATING: "generating",
        AgentState.PROCESSING_TOOLS: "processing_tools",
        AgentState.INTERACTING: "interacting",
    }

    async def run(self, sampling_params: dict, **row) -> AgentLoopOutput | list[AgentLoopOutput]:
        self.sampling_params = sampling_params
        self.tools_kwargs = row_kwargs(row, "tools_kwargs")
        self.interaction_kwargs = row_kwargs(row, "interaction_kwargs")
        self.tools = task_tools(self.task, self.tools_kwargs)
        self.schemas = [tool.schema for tool in self.tools.values()]
        self.interaction = task_interaction(self.task, self.interaction_kwargs)
        self.interaction_kwargs = {k: v for k, v in self.interaction_kwargs.items() if k != "name"}
        self.user_answers = 0
        self.created: dict[str, asyncio.Future] = {}  # tool name -> its `create` for this trajectory
        trajectory = self.start(row, self.schemas)
        state = AgentState.PENDING
        try:
            try:
                async with asyncio.timeout(self.args.trajectory_timeout or None) as budget:
                    while state is not AgentState.TERMINATED:
                        state = await getattr(self, self.handlers[state])(trajectory)
            except TimeoutError:
                if not budget.expired():  # someone else's, a tool's or an interaction's: a failure
                    raise
                trajectory.stop_reason = "timeout"  # what it has so far is kept, and graded
            for name, created in self.created.items():
                if created.done() and not created.exception():
                    kwargs = self.tools_kwargs.get(name, {}).get("calc_reward_kwargs", {})
                    reward = self.tools[name].calc_reward(trajectory.request_id, **kwargs)
                    trajectory.add_reward(await self.in_time(reward))
        finally:
            await self.close(trajectory)
        return trajectory.outputs() if trajectory.finished else trajectory.output()

    async def pending(self, trajectory: Trajectory) -> AgentState:
        if self.interaction:
            await self.in_time(self.interaction.start(trajectory.request_id, **self.interaction_kwargs))
        return AgentState.GENERATING

    async def generating(self, trajectory: Trajectory) -> AgentState:
        text = await self.assistant_turn(trajectory, self.sampling_params)
        if text is None:
            return AgentState.TERMINATED
        trajectory.tool_calls = self.parse(trajectory, text) if self.tools else []
        if not trajectory.tool_calls:
            return AgentState.INTERACTING if self.interaction else AgentState.TERMINATED
        return self.out_of_turns(trajectory) or AgentState.PROCESSING_TOOLS

    def out_of_turns(self, trajectory: Trajectory) -> AgentState | None:
        limit = self.args.max_assistant_turns
        if limit and trajectory.assistant_turns >= limit:
            trajectory.stop_reason = "max_turns"
            return AgentState.TERMINATED

    def parse(self, trajectory: Trajectory, text: str) -> list[dict]:
        """The tool calls of an assistant turn, [{"name", "arguments" (a dict), "error"}]; the message gets them too."""
        content, calls = parse_tool_calls(text, self.args.tool_parser, self.tokenizer, self.schemas)
        if any(call["name"] for call in calls):
            trajectory.messages[-1] = calling_message(content, calls, trajectory.assistant_turns)
        return calls

    async def processing_tools(self, trajectory: Trajectory) -> AgentState:
        calls = trajectory.tool_calls
        started = time.perf_counter()
        limit = self.args.max_parallel_calls
        for call in calls[limit:]:
            call["error"] = f"only {limit} tool calls at a time are executed"
        responses = await asyncio.gather(*(self.call_tool(trajectory, call) for call in calls))
        trajectory.count("tool_s", time.perf_counter() - started)
        trajectory.count("tool_calls", len(calls))
        messages, images = [], []
        for i, (call, response) in enumerate(zip(calls, responses, strict=True)):
            trajectory.add_reward(response.reward)
            for name, value in response.metrics.items():
                trajectory.count(f"tool/{name}", value)
            made = call_id(trajectory.assistant_turns, i)  # a malformed call has one too: templates may ask for it
            seen = len(trajectory.images) + len(images)
            if response.images and seen + len(response.images) > self.args.max_images:
                trajectory.count("tool_errors")
                said = f"no room for {len(response.images)} more images: {seen} of {self.args.max_images} are there"
                response = ToolResponse(text=f"Error: {said}")
            content = said = self.shorten(response.text)
            if response.images:
                content = [{"type": "text", "text": said}] if said else []
                content += [{"type": "image"} for _ in response.images]
                images += response.images
            messages.append({"role": "tool", "name": call["name"], "content": content, "tool_call_id": made})
        return self.answer(trajectory, messages, images)

    async def call_tool(self, trajectory: Trajectory, call: dict) -> ToolResponse:
        """Executes one call under its deadline; whatever goes wrong is told to the model and counted."""
        error = call["error"]
        if not error and call["name"] not in self.tools:
            error = f"there is no tool {call['name']!r}; the tools are {sorted(self.tools)}"
        if error:
            trajectory.count("tool_errors")
            return ToolResponse(text=f"Error: {error}")
        try:
            async with asyncio.timeout(self.args.tool_timeout) as deadline:
                return await self.execute(trajectory, self.tools[call["name"]], call["arguments"])
        except BaseException as caught:  # whatever a tool does wrong is the model's to read, not the run's to die of
            reraise_cancellation(caught)
            if deadline.expired():
                trajectory.count("tool_timeouts")
                return ToolResponse(text=f"Error: {call['name']} took longer than {self.args.tool_timeout:g} seconds")
            trajectory.count("tool_errors")
            said = str(caught) if isinstance(caught, Exception) and str(caught) else repr(caught)
            return ToolResponse(text=f"Error: {said}")

    async def execute(self, trajectory: Trajectory, tool: Tool, arguments: dict) -> ToolResponse:
        kwargs = self.tools_kwargs.get(tool.name, {})
        if tool.name not in self.created:
            create = tool.create(trajectory.request_id, **kwargs.get("create_kwargs", {}))
            self.created[tool.name] = asyncio.ensure_future(contained(create))
        await asyncio.shield(self.created[tool.name])  # parallel calls wait for the same one; a failed one stays failed
        result = await tool.execute(trajectory.request_id, arguments, **kwargs.get("execute_kwargs", {}))
        response, reward, metrics = result if isinstance(result, tuple) else (result, None, None)
        if not isinstance(response, ToolResponse):
            response = ToolResponse(text=str(response))
        if response.images and self.processor is None:
            raise ValueError("the tool returned an image, and this agent reads text only")
        images = [load_image(image) for image in response.images]
        if images:  # a shape that the model does not take is found here, where it is the tool's error
            expand([self.processor.image_token_id] * len(images), images, self.processor)
        reward = response.reward if reward is None else reward
        metrics = {**response.metrics, **(metrics or {})}
        return ToolResponse(
            text=response.text,
            images=images,
            reward=None if reward is None else finite(reward, f"the reward of {tool.name}"),
            metrics={name: finite(value, f"{tool.name}'s metric {name}") for name, value in metrics.items()},
        )

    async def in_time(self, coroutine):
        """Awaits a tool's or interaction's coroutine under the deadline of a tool call."""
        async with asyncio.timeout(self.args.tool_timeout):
            return await contained(coroutine)

    def shorten(self, text: str) -> str:
        """A tool response of at most max_tool_response_tokens: a longer one keeps its left, its right or (middle) both
        ends, as in verl's tool_response_truncate_side."""
        limit, side = self.args.max_tool_response_tokens, self.args.tool_response_truncate_side
        text = self.plain(text)
        if len(text.encode()) <= limit:  # a token is at least a byte
            return text
        far = 64 * limit  # characters at either end; of megabytes the rest is not even tokenised
        left = self.tokenizer(text[:far], add_special_tokens=False)["input_ids"]
        if len(text) <= far and len(left) <= limit:
            return text
        right = self.tokenizer(text[-far:], add_special_tokens=False)["input_ids"]
        kept = {"left": limit, "middle": (limit + 1) // 2, "right": 0}[side]  # at the left end
        return f"{self.tokenizer.decode(left[:kept])}...{self.tokenizer.decode(right[len(right) - (limit - kept) :])}"

    async def interacting(self, trajectory: Trajectory) -> AgentState:
        limit = self.args.max_user_turns
        done, text, reward, metrics = await self.in_time(
            self.interaction.generate_response(trajectory.request_id, trajectory.messages, **self.interaction_kwargs)
        )
        trajectory.add_reward(reward)
        for name, value in (metrics or {}).items():
            trajectory.count(f"interaction/{name}", finite(value, f"the interaction's metric {name}"))
        if done or self.out_of_turns(trajectory):  # asked first: the last turn too has its reward
            return AgentState.TERMINATED
        if limit and self.user_answers >= limit:
            trajectory.stop_reason = "max_turns"
            return AgentState.TERMINATED
        self.user_answers += 1
        return self.answer(trajectory, [{"role": "user", "content": self.plain(text)}])

    def answer(self, trajectory: Trajectory, messages: list[dict], images: Sequence = ()) -> AgentState:
        stops = self.stop_token_ids(self.sampling_params)
        fits = self.append(trajectory, messages, self.schemas, stops, images)
        return AgentState.GENERATING if fits else AgentState.TERMINATED

    async def close(self, trajectory: Trajectory) -> None:
        """Releases what the trajectory created, also when it is cancelled or fails; a failing release is counted."""

        async def release(name: str) -> None:
            kwargs = self.tools_kwargs.get(name, {}).get("release_kwargs", {})
            self.created[name].cancel()  # a `create` that outlived its deadline
            await self.in_time(self.tools[name].release(trajectory.request_id, **kwargs))

        async def finalize() -> None:
            await self.in_time(self.interaction.finalize(trajectory.request_id))

        closers = [release(name) for name in self.created] + ([finalize()] if self.interaction else [])
        for result in await asyncio.gather(*closers, return_exceptions=True):
            if isinstance(result, BaseException):
                trajectory.count("release_errors")


# ---------------------------------------------------------------- agents written for the OpenAI client


class OutOfBudget(RuntimeError):
    """No tokens ("length") or turns ("max_turns") are left for another reply."""


def _plain_message(message, images: dict[str, Any] | None = None, max_images: int = 0) -> dict:
    """A chat message of any client as templates want it: text or parts as content, tool calls with dict arguments.

    images: receives the images of data: URLs under a digest, which takes the image's place, max_images in all; None for
    a text model.
    """
    message = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    content = message.get("content") or ""
    if not isinstance(content, str):
        kinds = {part.get("type") for part in content}
        if images is None and kinds - {"text"}:
            raise ValueError("only text content is supported in chat messages")
        if kinds - {"text", "image_url", "image"}:
            raise ValueError(f"supported in chat messages are text and image_url, not {sorted(map(str, kinds))}")
        if kinds - {"text"}:
            content = [part if part["type"] == "text" else _image_part(part, images, max_images) for part in content]
        else:
            content = "".join(part["text"] for part in content)
    plain = {"role": message["role"], "content": content}
    plain |= {name: message[name] for name in ("name", "tool_call_id") if message.get(name)}
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:  # what the policy wrote, sent back as it was
            pass
        function = {"name": call["function"]["name"], "arguments": arguments}
        calls.append({"id": call["id"], "type": "function", "function": function})
    return plain | ({"tool_calls": calls} if calls else {})


def _image_part(part: dict, images: dict[str, Any], max_images: int) -> dict:
    if part["type"] == "image":  # of the row's own prompt: see `ChatClient.place`
        if not isinstance(part.get("image"), str) or part["image"] not in images:
            raise ValueError("a part of type image is supported as the row's prompt has it; send others as image_url")
        return part
    url = part["image_url"]["url"] if isinstance(part.get("image_url"), dict) else part.get("image_url")
    head, _, data = str(url).partition(";base64,")
    if not head.startswith("data:image/"):
        raise ValueError("of image_urls only data:image/...;base64 is supported")
    key = hashlib.sha256(data.encode()).hexdigest()
    if key not in images:
        if len(images) >= max_images:  # before any is decoded
            raise ValueError(f"more than {max_images} images: see --max_images")
        images[key] = load_image(base64.b64decode(data))
    return {"type": "image", "image": key}


def _said(message: dict) -> tuple:
    """What makes two messages the same: ids of calls and names of tools, which clients add and drop, don't count."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return message["role"], message["content"], json.dumps(calls, sort_keys=True)


class ChatClient:
    """`AsyncOpenAI` as far as agents use it: `await client.chat.completions.create(messages=..., tools=...)`.

    Runs in process and records exact tokens. A call whose messages go on from those of an earlier one (its reply
    included) continues that token sequence; any other starts one of its own, so rewritten histories and sub-agents
    become several outputs. max_tokens and stop are the agent's; temperature and the like stay the run's, because the
    trainer has to know them. Raises OutOfBudget when the trajectory is used up.
    """

    def __init__(self, loop: AgentLoopBase, sampling_params: dict):
        self.loop, self.sampling_params = loop, sampling_params
        self.trajectories: list[tuple[Trajectory, list[dict]]] = []  # with their tools; the last one spoke last
        self.sampling: set[asyncio.Future] = set()  # calls under way
        self.images: dict[str, Any] | None = {} if loop.processor else None  # see _plain_message
        self.turns = 0
        self.over = False  # the agent is done
        self.reward: float | None = None  # what the task is asked for otherwise
        self.exhausted: str | None = None  # "length" | "max_turns" while the last call raised OutOfBudget
        self.chat = self.completions = self  # client.chat.completions.create

    async def create(
        self, *, messages, tools=None, tool_choice="auto", n=1, stream=False, logprobs=False, max_tokens=None,
        max_completion_tokens=None, stop=None, response_format=None, **others,
    ):  # fmt: skip
        """One reply, as an openai ChatCompletion with vLLM's prompt_token_ids and choices[0].token_ids.

        Raises ValueError on what is not supported: n > 1, stream, a forced tool_choice, content other than text (and,
        if the model has vision, images as data: URLs).
        """
        if (n or 1) != 1 or stream or tool_choice not in (None, "auto", "none") or response_format:
            raise ValueError("supported are n=1, stream=False, tool_choice 'auto' or 'none', and no response_format")
        max_tokens = max_tokens if max_completion_tokens is None else max_completion_tokens
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        messages = [_plain_message(message, self.images, self.loop.args.max_images) for message in messages]
        tools = list(tools or ()) if tool_choice != "none" else []
        if self.images and (n := len(self.images_of(messages))) > self.loop.args.max_images:
            raise ValueError(f"{n} images: supported are {self.loop.args.max_images}, see --max_images")
        limit = self.loop.args.max_assistant_turns
        if self.over or limit and self.turns >= limit:
            self.give_up("max_turns")
        trajectory = self.resume(messages, tools)
        if self.loop.room(trajectory) < 1:
            self.give_up("length")
        self.turns += 1
        turn = self.turns
        sampling = dict(self.sampling_params)
        if max_tokens:
            sampling["max_tokens"] = min(max_tokens, sampling.get("max_tokens") or max_tokens)
        if stop:
            sampling["stop"] = [stop] if isinstance(stop, str) else list(stop)
        trajectory.stop_reason = "stop"
        before = len(trajectory.response_ids)

        def sampled(task: asyncio.Future) -> None:  # others may go on from it now; what it has is recorded
            self.sampling.discard(task)
            if task.cancelled() or task.exception():  # its last turn is missing: nothing can go on from it
                self.trajectories.insert(0, (trajectory, None))
            else:
                self.trajectories.append((trajectory, tools))

        task = asyncio.ensure_future(self.loop.assistant_turn(trajectory, sampling))
        self.sampling.add(task)
        task.add_done_callback(sampled)
        try:
            text = await task
        except asyncio.CancelledError as error:
            reraise_cancellation(error)
            raise OutOfBudget("the trajectory is over") from None
        self.exhausted = None
        for string in sampling.get("stop", []) if text else []:  # sampled, and so in the tokens, but not said
            text = text.split(string)[0]
            trajectory.messages[-1]["content"] = trajectory.messages[-1]["content"].split(string)[0]
        content, calls = "", []
        if text and tools:
            content, calls = parse_tool_calls(text, self.loop.args.tool_parser, self.loop.tokenizer, tools)
        if calls and not any(call["error"] for call in calls):  # a malformed one is text, as from vLLM's server
            trajectory.messages[-1] = calling_message(content, calls, turn)
        return self.completion(trajectory, before, logprobs)

    def place(self, prompt: list[dict], images: Sequence) -> list[dict]:
        """A row's prompt with its images named in their placeholders, so that its messages can be sent as they are."""
        loaded = [row_image(image) for image in images]
        keys = [hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest() for image in loaded]
        self.images |= zip(keys, loaded, strict=True)
        names = iter(keys)
        placed = []
        for message in prompt:
            if isinstance(content := message.get("content"), list):
                content = [{**part, "image": next(names)} if part["type"] == "image" else part for part in content]
                message = {**message, "content": content}
            placed.append(message)
        return placed

    async def close(self) -> None:
        """Ends the calls that outlived the agent (a thread's, a task's, those over HTTP), and refuses others."""
        self.over = True
        for task in self.sampling:
            task.cancel()
        await asyncio.gather(*self.sampling, return_exceptions=True)

    def give_up(self, reason: str) -> None:
        self.exhausted = reason
        raise OutOfBudget(f"the trajectory has no room for another reply: {reason}")

    def resume(self, messages: list[dict], tools: list[dict]) -> Trajectory:
        """The trajectory to sample the next turn in; taken off the list, so that parallel calls never share one."""
        said = [_said(message) for message in messages]
        for i in sorted(range(len(self.trajectories)), key=lambda i: -len(self.trajectories[i][0].messages)):
            trajectory, known = self.trajectories[i]
            n = len(trajectory.messages)
            if known == tools and n < len(said) and said[:n] == [_said(message) for message in trajectory.messages]:
                stops = self.loop.stop_token_ids(self.sampling_params)
                fits = self.loop.append(trajectory, messages[n:], tools, stops, self.images_of(messages[n:]))
                del self.trajectories[i]
                if not fits:
                    self.trajectories.append((trajectory, tools))  # it spoke last, so to say
                    self.give_up("length")
                return trajectory
        return self.loop.begin(messages, tools, self.images_of(messages))

    def images_of(self, messages: list[dict]) -> list:
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        return [self.images[part["image"]] for part in parts if part["type"] == "image"]

    def completion(self, trajectory: Trajectory, before: int, logprobs: bool):
        from openai.types.chat import ChatCompletion

        ids, tokenizer = trajectory.response_ids[before:], self.loop.tokenizer
        message = copy.deepcopy(trajectory.messages[-1])
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        reason = "tool_calls" if "tool_calls" in message else "length" if trajectory.stop_reason == "length" else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason, "token_ids": ids, "logprobs": None}
        if logprobs:
            pieces = [tokenizer.decode([i]) for i in ids]
            choice["logprobs"] = {"content": [
                {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
                for piece, logprob in zip(pieces, trajectory.response_logprobs[before:], strict=True)
            ]}  # fmt: skip
        prompt = trajectory.prompt_ids + trajectory.response_ids[:before]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        return ChatCompletion.model_validate({
            "id": f"chatcmpl-{trajectory.request_id}-{self.turns}", "object": "chat.completion", "model": "policy",
            "created": int(time.time()), "choices": [choice], "usage": usage, "prompt_token_ids": prompt,
        })  # fmt: skip

    def outputs(self) -> list[AgentLoopOutput]:
        """All token sequences, those of the trajectory that spoke last at the end."""
        spoke = [trajectory for trajectory, _ in self.trajectories if trajectory.assistant_turns]
        return [output for trajectory in spoke for output in trajectory.outputs()]


class ChatAgentLoop(AgentLoopBase):
    """Base class for agents written for the OpenAI client: subclasses write `chat`, in a task file, with @register.

    An agent that runs out of tokens, turns or time keeps what it has; any other exception drops the trajectory.
    """

    async def chat(self, client: ChatClient, **row) -> float | None:
        """The whole conversation of one row; may return its reward, else the task's is asked."""
        raise TypeError(f"{type(self).__name__} has no chat method")

    async def run(self, sampling_params: dict, **row) -> list[AgentLoopOutput]:
        client, reward, cut_off = ChatClient(self, sampling_params), None, None
        if row.get("images"):
            row["prompt"] = client.place(row["prompt"], row["images"])
        try:
            async with asyncio.timeout(self.args.trajectory_timeout or None) as budget:
                reward = await self.chat(client, **row)
        except Exception:  # frameworks wrap our OutOfBudget in errors of their own
            if not client.exhausted and not budget.expired():
                raise
            cut_off = client.exhausted or "timeout"
        finally:
            await client.close()
        outputs = client.outputs()
        for output in outputs[-1:]:
            output.reward = client.reward if reward is None else reward
            output.stop_reason = cut_off or output.stop_reason
        return outputs
