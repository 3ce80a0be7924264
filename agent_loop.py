"""Runs ONE rollout: agent loops, tools and interactions.

An agent loop gets a row of the data set and an engine, and returns tokens: those that the
policy sampled (mask 1) and those that it was given (mask 0: tool results, user turns, and what
the template writes). One rule governs this file: *token in, token out*. Within a sequence, sampled
ids are appended verbatim and never tokenised again. The text between two sampled turns is the
difference of two renderings of the chat template (`ChatTemplate.suffix`).

In this order: settings and results; `Trajectory`; agent loops; tools and interactions. Then all
that depends on a model's chat template: `ChatTemplate` learns what it does by rendering short
made-up chats. Function tools and parsed calls are in flatrl/tools.py, deadlines and threads in
flatrl/user_code.py, images in flatrl/vision.py.

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
Names follow verl's agent loop (https://verl.readthedocs.io/en/latest/advance/agent_loop.html)."""

import asyncio
import copy
import functools
import inspect
import itertools
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from os.path import commonprefix
from typing import Any
from uuid import uuid4

# Task files import some of these names from here.
from flatrl.bad_input import BadInput
from flatrl.tools import (
    RefusedCallError,
    Signature,
    call_id,
    function_call,
    parse_tool_calls,
    set_tool_calls,
    tool_text,
)
from flatrl.user_code import (  # noqa: F401
    DEADLINE,
    TOKEN_BREAK,
    CallTimeoutError,
    call,
    checked_number,
    checked_text,
    clean,
    in_thread,
    in_time,
)
from flatrl.vision import expand, image_tokens, load_image, load_images

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
        0, "a rollout ends after this many replies of a simulated user, who is then called once "
        "more, for the reward only; 0: no limit")
    compact_at: int = setting(
        0, "tokens of prompt and response at which the agent `compacting` asks for a summary; "
        "0: three quarters of the window")
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
        8, "tool calls executed in one turn; an error tells the model how many more there were. "
        "Give 1 for templates that take one call a turn, as Llama 3.1's")
    max_tool_response_tokens: int = setting(
        256, "longer tool responses are cut to this length")
    tool_response_truncate_side: str = setting(
        "middle", "which part of a long tool response is kept: left, right, or middle (both ends)")
    prompt_truncate_side: str = setting(
        "none", "which part of an overlong prompt's longest text is kept (train.py); none: rows "
        "with such prompts are dropped")


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


# "abort": the engine gave up, or a loop went on after its demonstration. "error": never set here,
# but your own loops may use it.
STOP_REASONS = ("stop", "length", "max_turns", "timeout", "abort", "error")
RESPONSE_LISTS = ("response_ids", "response_mask", "response_logprobs", "response_versions")


@dataclass(kw_only=True)
class AgentLoopOutput:
    """One finished token sequence. An agent loop returns one or more of them for a rollout.

    The four response_* lists have one entry for each response token. response_mask is 1 for
    tokens that the policy sampled and 0 for those of tools, users and the template, whose
    logprob is 0.0 and whose version is -1.

    turn_rewards: pairs (index into response_ids, reward).
    text: the whole response decoded, with what tools and users said. A reward reads the policy's
        words from messages instead.
    num_turns: the number of assistant, user and tool turns + 1, as in verl.
    images: PIL images in the order of their placeholders. The ids repeat a placeholder for each
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


@dataclass
class ToolResponse:
    """A tool's answer: text (see `tool_text`) and images (see `load_image`) for the model to read.

    reward and metrics are recorded, and the model does not see them."""

    text: str = ""
    images: list = field(default_factory=list)
    reward: float | None = None
    metrics: dict = field(default_factory=dict)


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

    trusted: the messages in which a text like "<|im_end|>" becomes that token (`render`), by
    default those that are given here. Messages that are appended later are not trusted.

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
        self.user_turns = 0  # as in verl, replies of tools count; for max_user_turns they do not
        self.stop_id = None  # the stop token that ended the last assistant turn
        self.recent = None  # a Recent, which makes late turns fast
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
        # Only the last output has reward and metrics. The rollout continues: this one is not cut.
        so_far = replace(self.output(), reward=None, metrics={}, stop_reason="stop")
        self.finished.append(so_far)
        self.begin(prompt_ids, engine_ids)
        self.count("forks")

    def add_sampled(self, out: TokenOutput, trained: bool = True):
        """Appends the tokens of an assistant turn, with mask 1.

        trained=False (mask 0): for constrained decoding, whose logprobs are not the policy's."""
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

    def record(
        self,
        kind: str,
        name: str,
        reward: float | None,
        metrics: dict | None,
    ):
        """Records a turn reward, at the last token so far, and adds metrics to the rollout's.

        kind and name identify the source, such as "tool" and "calculator". A metric becomes
        "kind/name/key"; the source's rewards are added up in "kind_reward/name". Raises
        ValueError, which names the source, and records nothing if reward or metrics are not
        finite numbers."""
        source = f"{kind} {name!r}"
        reward = checked_number(0.0 if reward is None else reward, f"the reward of {source}")
        checked = {}
        for key, value in (metrics or {}).items():
            checked[f"{kind}/{name}/{key}"] = checked_number(value, f"metric {key!r} of {source}")
        for key, value in checked.items():
            self.count(key, value)
        if reward:
            self.count(f"{kind}_reward/{name}", reward)
            last = max(0, len(self.response_ids) - 1)
            self.turn_rewards.append((last, reward))

    def count(self, name: str, n: float = 1):
        """Adds n to a metric."""
        self.metrics[name] = self.metrics.get(name, 0) + n

    def outputs(self) -> list[AgentLoopOutput]:
        """Returns the outputs of all token sequences: those before each fork, and the current one.

        If the assistant said nothing after the last fork (there was no room for a turn), that
        sequence is left out. Its reward, turn rewards, unit, group, metrics, extra and stop reason
        then move to the one before; its messages and images are dropped."""
        last = self.output()
        # The mask alone does not tell: turns of constrained decoding have mask 0.
        speaks = 1 in last.response_mask or last.messages[-1]["role"] == "assistant"
        if speaks or not self.finished:
            return [*self.finished, last]
        *earlier, before = self.finished
        end = len(before.response_ids) - 1
        rewards = [(end, reward) for _, reward in last.turn_rewards]
        merged = replace(
            before,
            reward=last.reward,
            turn_rewards=before.turn_rewards + rewards,
            unit=last.unit,
            group=last.group,
            metrics=last.metrics,
            extra=last.extra,
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


END_OF_PROMPT = 64  # tokens in which the prompt may open a thought


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
        known = {each.name: each.default for each in fields(LoopArgs)}
        missing = {name: known[name] for name in known if not hasattr(args, name)}
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
        self.tool_exceptions = {}  # by tool name, the first exception that it raised here

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

        trusted: messages that may contain the text of control tokens, now and after a fork; by
        default all of the prompt. Raises ValueError unless the prompt has one placeholder for each
        of the row's images."""
        images = load_images(row.get("images") or ())
        prompt = self.prompt(row["prompt"], tools, images, trusted)
        return Trajectory(row["prompt"], *prompt, images, trusted)

    def prompt(self, messages, tools, images, trusted) -> tuple[list[int], list[int]]:
        """Returns the ids of messages as a prompt: the trainer's, and the engine's."""
        engine_ids = self.chat_template().render(messages, tools, trusted)
        return expand(engine_ids, images, self.processor), engine_ids

    @property
    def window(self):
        """The most tokens that the engine takes, prompt and response together; inf: no limit."""
        return self.args.max_model_len or math.inf

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
        images = load_images(images)
        template = self.chat_template(stops)
        try:
            fits = self._append_suffix(trajectory, template, messages, tools, images)
        except RewritesHistory:
            fits = self._fork_with(trajectory, messages, tools, images)
        if not fits:
            trajectory.stop_reason = "length"
            return False
        trajectory.images += images
        trajectory.messages += messages
        trajectory.user_turns += 1
        return True

    def _append_suffix(self, trajectory, template, messages, tools, images):
        """Appends the tokens of messages, if they fit. Raises RewritesHistory."""
        if not trajectory.recent:
            trajectory.recent = Recent(template.form_of)
        engine_ids = template.suffix(
            trajectory.messages, messages, trajectory.stop_id, tools, trajectory.recent)
        ids = expand(engine_ids, images, self.processor)
        if self.room(trajectory) - len(ids) < 1:
            return False
        trajectory.add_given(ids, engine_ids)
        return True

    def _fork_with(self, trajectory, messages, tools, images):
        """Forks the trajectory: the new prompt is its history with messages, if they fit."""
        chat = trajectory.messages + messages
        all_images = trajectory.images + images
        prompt = self.prompt(chat, tools, all_images, trajectory.trusted)
        if self.room(trajectory, used=len(prompt[0])) < 1:
            return False
        trajectory.fork(*prompt)
        return True

    async def assistant_turn(self, trajectory: Trajectory, sampling_params: dict) -> str | None:
        """Samples one assistant turn, and appends its tokens and its message.

        Returns its text without reasoning but with special tokens (see `_read_turn`). Returns None
        if the turn was cut off (its tokens and its message are there), or had no room (nothing was
        sampled). Sets the stop reason.

        Raises ValueError if engine and processor expand an image to different numbers of
        tokens."""
        room = self.room(trajectory)
        if room < 1:
            trajectory.stop_reason = "length"
            return None
        max_tokens = min(room, sampling_params.get("max_tokens") or room)
        out = await self.engine.generate(
            request_id=trajectory.request_id,
            prompt_ids=list(trajectory.engine_ids),
            sampling_params={**sampling_params, "max_tokens": max_tokens},
            image_data=list(trajectory.images) or None,
        )
        if trajectory.images:
            prompt_ids = trajectory.prompt_ids + trajectory.response_ids
            if out.prompt_ids != prompt_ids:
                raise ValueError(
                    "the engine and the processor disagree about the tokens of the images: "
                    f"{len(out.prompt_ids)} against {len(prompt_ids)}")
        before = trajectory.engine_ids[-END_OF_PROMPT:]  # may end with an opening <think> tag
        is_constrained = "structured_outputs" in sampling_params
        trajectory.add_sampled(out, trained=not is_constrained)
        trajectory.stop_reason = out.stop_reason
        content_ids = out.token_ids
        stops = self.stop_token_ids(sampling_params)
        trajectory.stop_id = None
        if content_ids and content_ids[-1] in stops:
            *content_ids, trajectory.stop_id = content_ids
        message, text = self._read_turn(before, content_ids)
        trajectory.messages.append(message)
        return text if out.stop_reason == "stop" else None

    def _read_turn(self, before, ids):
        """Returns (message, text) for the ids of an assistant turn without its stop token.

        The message's content and reasoning_content are separated by `split_reasoning`, and
        have no special tokens. A turn without reasoning has no reasoning_content. text is
        the turn without its reasoning, with special tokens, because tool calls may need them.

        before: the last tokens before the turn. Some templates end them with the start tag."""
        decode = self.tokenizer.decode
        message = {"role": "assistant", "content": decode(ids, skip_special_tokens=True)}
        start, end = self.args.think_tags.split()
        opened = decode(before).rstrip().endswith(start)
        reasoning, text = split_reasoning(decode(ids), start, end, opened)
        if reasoning is not None:
            # The tags may be special tokens, so these are dropped only now. `decode` does that.
            for name, part in (("content", text), ("reasoning_content", reasoning)):
                part_ids = _tokenise(self.tokenizer, part)
                message[name] = decode(part_ids, skip_special_tokens=True)
        return message, text

    def stop_token_ids(self, sampling_params: dict) -> set[int]:
        """Returns the ids that end a turn: the tokenizer's, the sampling parameters' and those
        with which the chat template ends one."""
        stops = {*(sampling_params.get("stop_token_ids") or ()), self.tokenizer.eos_token_id}
        if self.tokenizer.chat_template:
            stops |= self.chat_template(stops - {None}).stops
        return stops - {None}

    def chat_template(self, stops: Iterable[int] = ()) -> "ChatTemplate":
        """Returns the ChatTemplate of the loop's tokenizer."""
        return chat_template(self.tokenizer, stops, self.args.think_tags)


def split_reasoning(
    text: str,
    start: str,
    end: str,
    opened: bool,
) -> tuple[str | None, str]:
    """Splits an assistant's text into (reasoning, the rest). Reasoning is None without tags.

    Reasoning is everything up to the last end tag, plus anything after a later start tag:
        "<think>why</think>so"        ("why", "so")
        "why</think>so"               ("why", "so")
        "\\n<think>why</think>so"      ("why", "so"): GLM writes the newline
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
    start_tag = r"^\s*" + re.escape(start)
    return re.sub(start_tag, "", before + unfinished), rest


@register("single_turn")
class SingleTurnLoop(AgentLoopBase):
    """Samples one answer to the prompt."""

    async def run(self, sampling_params, **row):
        trajectory = self.start(row)
        await self.assistant_turn(trajectory, sampling_params)
        return trajectory.output()


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Turns of sampling, tool calls and simulated users: a state machine, as in verl.

        pending -> generating -> processing_tools -> generating ...   the model calls tools
                              -> interacting -> generating ...        a simulated user answers
                              -> None                                 the end

    The states have verl's names. A state is a method that gets the trajectory and returns the next
    state. A subclass adds one by returning it from another: `return self.reflecting`. If a tool
    raises, exceeds its deadline or is called wrongly, the model reads a message about it, and a
    metric counts it."""

    def __init__(self, engine, tokenizer, processor, task, args):
        super().__init__(engine, tokenizer, processor, task, args)
        # `run` sets these for its row.
        self.sampling_params = {}
        self.stops = set()  # the ids that end a turn
        self.tools = {}  # by name
        self.tools_kwargs = {}
        self.schemas = []  # of the tools
        self.interaction = None
        self.interaction_kwargs = {}
        self.user_answers = 0  # answers of the simulated user so far
        self.created = {}  # by tool name: why its `create` failed, or None
        self.creating = asyncio.Lock()

    async def run(self, sampling_params, **row) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Runs one rollout: its turns, then the tools' `calc_reward`, then their `release`.

        Returns one output, or a list of several if the template rewrote the history."""
        self.sampling_params = sampling_params
        self.stops = self.stop_token_ids(sampling_params)
        self.tools_kwargs = row_kwargs(row, "tools_kwargs")
        self.tools = task_tools(self.task, self.tools_kwargs)
        self.schemas = [tool.schema for tool in self.tools.values()]
        self.interaction_kwargs = dict(row_kwargs(row, "interaction_kwargs"))
        self.interaction = task_interaction(self.task, self.interaction_kwargs)
        self.interaction_kwargs.pop("name", None)
        trajectory = self.start(row, self.schemas)
        try:
            await self._run_states(trajectory)
            for name, problem in self.created.items():
                if not problem:
                    reward = await self._call_at_end(trajectory, name, "calc_reward")
                    trajectory.record("tool", name, reward, None)
        finally:
            await self.close(trajectory)
        if trajectory.finished:
            return trajectory.outputs()
        return trajectory.output()  # a single one, as most loops return

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
            prompt = self.prompt(
                trajectory.messages, self.schemas, trajectory.images, trajectory.trusted)
            trajectory.begin(*prompt)
        if self.tools:
            trajectory.count("tool_calls", 0)  # so that the metric exists
        for name in self.tools:
            trajectory.count(f"tool_calls/{name}", 0)
        return self.generating

    async def generating(self, trajectory):
        """Samples an assistant turn. Next, its tools are called, or the user answers."""
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

    def parse(self, trajectory, text):
        """Returns the tool calls of a turn, including malformed ones (see `parse_tool_calls`).

        Puts those that will be executed into the trajectory's last message if one of them has a
        name, and the chat template shows the message. Otherwise they stay in its text."""
        content, calls = parse_tool_calls(text, self.args.tool_parser, self.tokenizer, self.schemas)
        shown = calls[: self.args.max_parallel_calls]
        if any(tool_call["name"] for tool_call in shown):
            message = trajectory.messages[-1]
            called = dict(message)
            set_tool_calls(called, content, shown, trajectory.assistant_turns)
            if self.chat_template(self.stops).shows(called, self.schemas):
                message.update(called)
        return calls

    async def processing_tools(self, trajectory):
        """Executes the turn's tool calls concurrently, and appends the responses in order."""
        limit = self.args.max_parallel_calls
        calls = trajectory.tool_calls[:limit]
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
                "tool_call_id": call_id(trajectory.assistant_turns, number),
            })
            images += response.images
        n_left_out = len(trajectory.tool_calls) - len(calls)
        if n_left_out:
            trajectory.count("tool_errors", n_left_out)
            note = f"Error: {n_left_out} more calls were not executed: the limit is {limit} a turn"
            messages[-1]["content"] = _join_contents([messages[-1]["content"], note], "\n")
        calls_are_in_text = "tool_calls" not in trajectory.messages[-1]
        if calls_are_in_text and not self.chat_template(self.stops).accepts(AFTER_PLAIN_TURN):
            # The template refuses tool messages after a plain turn, so a user's has the results.
            contents = [message["content"] for message in messages]
            messages = [{"role": "user", "content": _join_contents(contents, "\n")}]
        return self.reply(trajectory, messages, images)

    def _record_response(self, trajectory, name, response, n_images):
        """Counts a tool call, records its response's reward and metrics, and returns the response.

        response: a ToolResponse or an exception. For an exception, and for a response that is
        invalid, returns one with the error: the model reads it, and the rollout continues.
        n_images: images in the rollout so far."""
        is_known = name in self.tools  # the model may write any name
        if is_known:
            trajectory.count(f"tool_calls/{name}")
        error = None
        if isinstance(response, BaseException):
            error = response
        elif n_images + len(response.images) > self.args.max_images:
            error = RefusedCallError(
                f"no room for {len(response.images)} more images: {n_images} of "
                f"{self.args.max_images} are there")
        else:
            try:
                trajectory.record("tool", name, response.reward, response.metrics)
            except ValueError as problem:
                error = problem
        if not error:
            return response
        kind = "tool_timeouts" if isinstance(error, CallTimeoutError) else "tool_errors"
        trajectory.count(kind)
        if is_known:
            trajectory.count(f"{kind}/{name}")
            if not isinstance(error, (CallTimeoutError, RefusedCallError)):
                trajectory.count(f"tool_exceptions/{name}")
                self.tool_exceptions.setdefault(name, error)
        return ToolResponse(f"Error: {str(error) or repr(error)}")

    def _content(self, response):
        """Returns the content of a tool's message: a text, or a list of parts with images."""
        limit = self.args.max_tool_response_tokens
        side = self.args.tool_response_truncate_side
        text = shorten(response.text, limit, side, self.tokenizer)
        if not response.images:
            return text
        content = [{"type": "image"} for _ in response.images]
        if text:
            content.insert(0, {"type": "text", "text": text})
        return content

    async def call_tool(self, trajectory, tool_call) -> ToolResponse:
        """Executes a tool call, and returns a ToolResponse whose images are loaded.

        tool_call: as from `parse_tool_calls`. Raises RefusedCallError if it is malformed or names
        an unknown tool, CallTimeoutError after tool_timeout, and whatever the tool raises."""
        name = tool_call["name"]
        if tool_call["error"]:
            raise RefusedCallError(tool_call["error"])
        if name not in self.tools:
            raise RefusedCallError(f"there is no tool {name!r}; the tools are {sorted(self.tools)}")
        execution = self._execute(trajectory, name, tool_call["arguments"])
        return await in_time(name, self.args.tool_timeout, execution)

    async def _execute(self, trajectory, name, arguments):
        """Runs a tool's `execute`, after its `create`, and returns a ToolResponse."""
        async with self.creating:  # parallel calls wait for the same `create`
            if name not in self.created:
                await self._create(trajectory, name)
        if self.created[name]:
            raise self.created[name]
        response = await self._tool_method(trajectory, name, "execute", copy.deepcopy(arguments))
        reward = metrics = None  # a tuple's come before those of a ToolResponse in it
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
            text=tool_text(response.text),
            images=images,
            reward=response.reward if reward is None else reward,
            metrics={**response.metrics, **(metrics or {})},
        )

    async def _create(self, trajectory, name):
        """Runs a tool's `create`. If that raises, the error is kept for every call of the tool."""
        self.created[name] = RuntimeError(f"the tool {name!r} was cancelled in its `create`")
        try:
            await self._tool_method(trajectory, name, "create")
            self.created[name] = None
        except Exception as error:
            self.created[name] = error

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

    async def interacting(self, trajectory):
        """Lets the simulated user answer and reward the assistant's turn. Returns the next state:
        `generating`, or None if the user is done or at a limit."""
        name = self.interaction.name
        done, text, reward, metrics = await self._ask_interaction(
            self.interaction.generate_response,
            trajectory.request_id,
            copy.deepcopy(trajectory.messages),  # an Interaction may modify them
            **self.interaction_kwargs,
        )
        trajectory.record("interaction", name, reward, metrics)
        text = "" if done and text is None else text
        text = checked_text(text, f"the text of interaction {name!r}")
        at_user_limit = 0 < self.args.max_user_turns <= self.user_answers
        if not done and (at_user_limit or self._at_assistant_limit(trajectory)):
            trajectory.stop_reason = "max_turns"
            done = True
        if done:
            trajectory.extra["unread"] = text  # the policy never reads it; the report shows it
            return None
        self.user_answers += 1
        return self.reply(trajectory, [{"role": "user", "content": text}])

    def reply(self, trajectory, messages, images=()):
        """Appends what tools or the user said. Returns the next state: `generating`, or None if
        the messages and an answer to them do not fit."""
        fits = self.append(trajectory, messages, self.schemas, self.stops, images)
        return self.generating if fits else None

    async def close(self, trajectory):
        """Releases the tools and the interaction, even after a failure or a cancellation.

        Errors are counted, and not raised."""
        closers = [self._call_at_end(trajectory, name, "release") for name in self.created]
        if self.interaction:
            finalize = self.interaction.finalize
            closers.append(self._ask_interaction(finalize, trajectory.request_id))
        for result in await asyncio.gather(*closers, return_exceptions=True):
            if isinstance(result, BaseException):
                trajectory.count("release_errors")


@register("compacting")
class CompactingLoop(ToolAgentLoop):
    """A tool_agent that continues from a summary when its context is long.

    When a reply of tools or of a user would bring prompt and response to compact_at tokens,
    SUMMARISE is appended to that reply, unless only one turn is left. The policy answers with a
    summary. A new sequence then begins with the opening messages (system message and task), the
    summary and CONTINUE:

        processing_tools or interacting -> compacting -> generating ...

    The sequences are outputs of one rollout and share its reward, so a summary is rewarded for what
    follows it. It counts as a turn of the assistant. The request and the summary need room in the
    window beyond compact_at."""

    SUMMARISE = (
        "Your context is full. Call no tool now, but write a summary: what you did, what you found "
        "out, and what is left to do. You will continue from the task and this summary alone.")
    CONTINUE = "Continue from your summary."

    async def pending(self, trajectory):
        """Remembers how the conversation begins, with an interaction's opening message."""
        next_state = await super().pending(trajectory)
        trajectory.count("compactions", 0)
        self.opening = list(trajectory.messages)
        self.opening_images = list(trajectory.images)
        return next_state

    def reply(self, trajectory, messages, images=()):
        """As in ToolAgentLoop; asks for a summary if the context is long with these messages."""
        n_tokens = len(trajectory.prompt_ids) + len(trajectory.response_ids)
        for message in messages:
            n_tokens += len(_tokenise(self.tokenizer, str(message["content"])))
        limit = self.args.max_assistant_turns
        is_last_turn = 0 < limit <= trajectory.assistant_turns + 1
        if is_last_turn or n_tokens < (self.args.compact_at or 0.75 * self.window):
            return super().reply(trajectory, messages, images)
        *others, last = messages
        # Not a message of its own: some templates refuse two of a user in a row.
        content = _join_contents([last["content"], self.SUMMARISE], "\n\n")
        last = {**last, "content": content}
        fits = super().reply(trajectory, [*others, last], images)
        return self.compacting if fits else None

    async def compacting(self, trajectory):
        """Samples the summary, and begins a new sequence with it."""
        text = await self.assistant_turn(trajectory, self.sampling_params)
        if text is None:
            return None
        trajectory.count("compactions")
        messages = [
            *self.opening,
            {"role": "assistant", "content": trajectory.messages[-1]["content"]},
            {"role": "user", "content": self.CONTINUE},
        ]
        prompt = self.prompt(messages, self.schemas, self.opening_images, trajectory.trusted)
        trajectory.fork(*prompt)
        trajectory.messages = messages
        trajectory.images = list(self.opening_images)
        return self.generating


# ---------------------------------------------------------------- tools and interactions


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
        """Returns a ToolResponse or its text, or a tuple (response, reward, metrics)."""
        raise TypeError(f"{type(self).__name__} has no execute method")

    async def calc_reward(self, request_id: str, **kwargs) -> float:
        """Returns a reward that is added to the rollout's, once, at its end."""
        return 0.0

    async def release(self, request_id: str, **kwargs):
        """Frees what `create` made for this rollout, even if the rollout failed."""


class FunctionTool(Tool):
    """A Python function as a tool (see `Signature`).

    Raises BadInput if the function has no schema, or can't be called by it."""

    def __init__(self, function: Callable):
        self.function = function
        self.signature = Signature(function)
        self.name = self.signature.name
        self.schema = self.signature.schema

    async def execute(self, request_id: str, arguments: dict, /, **execute_kwargs):
        """Calls the function. execute_kwargs win over the model's arguments.

        A tuple that is not (response, reward, metrics) is returned as a list. Raises
        RefusedCallError for wrong arguments, and whatever the function raises."""
        values = self.signature.arguments(arguments, execute_kwargs)
        result = await call(self.function, **values)
        if isinstance(result, tuple):
            is_triple = len(result) == 3 and isinstance(result[2], dict | None)
            return result if is_triple else list(result)
        return result


_function_tool = functools.cache(FunctionTool)


def as_tool(tool: Tool | Callable) -> Tool:
    """Returns a Tool unchanged, and a function as a Tool (cached).

    Raises BadInput for anything else, and for a function that can't be a tool."""
    if isinstance(tool, Tool):
        return tool
    if not inspect.isroutine(tool):
        raise BadInput(f"TOOLS holds {tool!r}, which is neither a Tool instance nor a function")
    return _function_tool(tool)


def row_kwargs(row: dict, name: str) -> dict:
    """Returns a row's tools_kwargs or interaction_kwargs.

    They are stored in a column of that name, or, as in verl, under that key of extra_info.
    A row without them has {}."""
    extra_info = row.get("extra_info") or {}
    return row.get(name) or extra_info.get(name) or {}


def task_tools(task, tools_kwargs: dict | None = None) -> dict[str, Tool]:
    """Returns the task's tools by name: those that are keys of tools_kwargs, or all if it is empty.

    Raises BadInput for what can't be a tool, two tools of the same name, and an unknown key."""
    tools = {}
    for tool in map(as_tool, getattr(task, "TOOLS", None) or ()):
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

    async def generate_response(
        self,
        request_id: str,
        messages: list[dict],
        **kwargs,
    ) -> tuple:
        """Returns (done, text, reward, metrics).

        done: whether the rollout ends here. text: the next user message; if done, it may be None.
        reward: for the assistant's last turn, or None. metrics: a dict of numbers, or None."""
        raise TypeError(f"{type(self).__name__} has no generate_response method")

    async def finalize(self, request_id: str):
        """Frees what `start` made for this rollout, even if the rollout failed."""


def task_interaction(task, kwargs: dict) -> Interaction | None:
    """Returns the task's interaction named kwargs["name"] or, without a name, its only one.

    Returns None if the task has no interactions, or if kwargs are empty and it has several.
    Raises BadInput for an unknown name, and for kwargs without a name if there are several."""
    interactions = {each.name: each for each in getattr(task, "INTERACTIONS", None) or ()}
    name = kwargs.get("name")
    if name is None and len(interactions) < 2:
        return next(iter(interactions.values()), None)
    if kwargs and name not in interactions:
        raise BadInput(
            f"interaction_kwargs names {name!r}, but needs a 'name' of the task's "
            f"INTERACTIONS: {sorted(interactions)}")
    return interactions.get(name)


# ---------------------------------------------------------------- the chat template


@functools.lru_cache(maxsize=64)
def with_template_variables(tokenizer, variables: str):
    """Returns a copy of the tokenizer whose chat template gets these variables.

    variables: a JSON object. If it is empty, the tokenizer itself is returned. "strftime_now" is
    the date to write in place of today's."""
    variables = json.loads(variables)
    if not variables:
        return tokenizer
    date = variables.get("strftime_now")
    if date is not None:
        variables["strftime_now"] = lambda form: date
    changed = copy.copy(tokenizer)
    changed.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **variables)
    return changed


class RewritesHistory(ValueError):
    """New messages make the template change earlier ones, so a new sequence must begin."""


class ChatTemplate:
    """What a model's chat template does. It learns this in milliseconds by rendering probe chats.

    Use `text` and `render` for a whole chat, and `suffix` for what new messages add to one. This is
    learned about the template:
        answer_end, call_end    the ids that end an answer and a turn with tool calls, or None
        ends                    the texts that the template writes after a turn
        closing                 what it writes only at the end of a whole chat, usually ""
        accepts(name)           whether it accepts one of the ROUNDS
        shows_reasoning         whether it knows reasoning_content
        writes_date             whether it writes today's date
        needs_only_recent       whether a suffix depends on the `Recent` part of a chat alone
        control                 a pattern of all control tokens: special ones and markup
        special, markup         patterns of these two

    tokenizer: with the variables of the template (`with_template_variables`).
    stops: the ids that end a turn. The attribute also contains those of the template.
    think_tags: the tags around reasoning.

    Raises BadInput if the tokenizer has no chat template."""

    def __init__(self, tokenizer, stops: Iterable[int] = (), think_tags: str = "<think> </think>"):
        """Learns what ends a turn. Everything else is learned when it is needed."""
        if not tokenizer.chat_template:
            raise BadInput("the tokenizer has no chat template: set one, or use an instruct model")
        self.tokenizer = tokenizer
        self.think_start, self.think_end = think_tags.split()
        tags = re.escape(self.think_start) + r"\s*" + re.escape(self.think_end)
        # Blocks of reasoning without a word, with the white space that templates write after them.
        self.empty_thoughts = [re.compile(tags + end) for end in ("\n\n", "\n", "")]
        self.controls = _control_tokens(tokenizer)
        controls = self.controls.values()
        self.control = _any_of(token.content for token in controls)
        self.special = _any_of(token.content for token in controls if token.special)
        self.markup = _any_of(token.content for token in controls if not token.special)
        # The ways to divide a text: not, before each control token, and before each character.
        before_match = TOKEN_BREAK + r"\g<0>"
        self.divisions = (
            _unchanged,
            functools.partial(self.control.sub, before_match),
            functools.partial(re.compile(r"\S").sub, before_match),
        )
        self.rendered_ids = {}  # of chats that `render` has seen
        self.known_controls = {}  # see `_without_forged_tokens`
        self.made_of_tools = {}  # see `_of_tools`
        self.checked_forms = set()  # of prompts that `check_prompt` has seen
        given = {*stops}
        # A template for chats with tools alone (Hermes-2-Pro) raises without a list: [] will do.
        self.no_tools = None
        if self.problem_with([PROBE_USER]):
            self.no_tools = []
        self.answer_end = self._turn_end(PROBE_ANSWER, PROBE_USER, given)
        # After a call, only a known stop ends the turn, or what ends an answer: another special
        # token may be part of the call, as </tool_call> is.
        call, result = ROUNDS["a tool's answer"]
        self.call_end = self._turn_end(call, result, {*given, self.answer_end})
        self.stops = {*given, self.answer_end, self.call_end} - {None}

    # -- rendering

    def text(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Returns a chat as the template writes it. Raises whatever the template raises.

        Reasoning moves into the content first, if the template has no place for it (`as_shown`)."""
        messages = [self.as_shown(message) for message in messages]
        return self._written(messages, tools, add_generation_prompt)

    def _written(self, messages, tools=None, add_generation_prompt=False, **variables):
        """As `text`, but does not move reasoning. `shows_reasoning` needs that."""
        return self.tokenizer.apply_chat_template(
            messages,
            tools=tools or self.no_tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )

    def as_shown(self, message: dict) -> dict:
        """Returns a message with its reasoning in the content, if the template does not know
        reasoning_content."""
        shown = dict(message)
        if "reasoning_content" in shown and not self.shows_reasoning:
            thought = f"{self.think_start}{shown.pop('reasoning_content')}{self.think_end}"
            shown["content"] = _join_contents([thought, shown.get("content") or ""], "")
        return shown

    def render(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        trusted: Sequence[dict] | None = None,
    ) -> list[int]:
        """Returns the token ids of a chat, see the function `render`.

        The latest results are cached, because the rollouts of a group begin with the same
        prompt."""
        if not messages:
            return []

        def ids_of(chat, schemas):  # also called with edited copies of messages and tools
            return _tokenise(self.tokenizer, self.text(chat, schemas, True))

        def protected_ids():
            if trusted is None and not tools:  # nothing to protect from, and faster
                return ids_of(messages, tools)
            unchanged = messages if trusted is None else trusted
            return self._without_forged_tokens(ids_of, set(), messages, tools, unchanged)

        key = json.dumps([messages, tools, trusted], default=repr)
        return list(_cached(self.rendered_ids, 64, key, protected_ids))

    # -- the suffix of a turn

    def suffix(
        self,
        messages: list[dict],
        new: list[dict],
        stop: int | None,
        tools: list[dict] | None = None,
        recent: "Recent | None" = None,
    ) -> list[int]:
        """Returns the tokens that `new` messages (of tools or users) add after an assistant turn.

        Many templates end a turn with an end-of-turn token and a newline, but the policy samples
        only the token. The suffix must therefore begin with that newline (verl#6501). Where a
        turn ends at the marker of the next speaker (GLM), and the policy sampled the marker,
        the suffix begins after it. With Qwen2.5, if the policy sampled "Hi<|im_end|>" and the user
        says "2?", it is

            "\\n<|im_start|>user\\n2?<|im_end|>\\n<|im_start|>assistant\\n"

        stop: the stop token with which the turn ended. Without one (a stop string ended it, or a
            limit), the suffix begins with the end-of-turn token.
        recent: the Recent of this chat, the same object in each call, which is updated here. By
            default a new one walks over the whole chat.

        Raises RewritesHistory if the template would now write the chat so far in another way, its
        stop token included: Qwen3 drops earlier reasoning, for example. Raises ValueError if the
        template writes nothing for `new`."""
        history = messages
        if self.needs_only_recent:
            history = (recent or Recent(self.form_of)).update(messages)
        n = len(history)

        def ids_of(chat, tools):  # also called with an edited copy of the chat
            return self._suffix_ids(chat[:n], chat[n:], stop, tools)

        chat = history + new
        structures = map(_structure, chat)
        form = json.dumps([n, stop, len(tools or ()), *structures])
        known = _cached(self.known_controls, 1024, form, set)
        return self._without_forged_tokens(ids_of, known, chat, tools)

    def _suffix_ids(self, messages, new, stop, tools):
        """Returns the ids of `suffix`, without its protection against forged control tokens."""
        before = self.text(messages, tools).removesuffix(self.closing)
        if self._leaves_out(before, messages, tools):
            raise RewritesHistory("the chat template leaves out what the assistant said")
        added = self._added(before, self.text(messages + new, tools, True))
        # The suffix begins inside the turn's end, after the stop token. The end is "" if the turn
        # ends at the next speaker's marker.
        end = self.end_of(before)
        if end is None:
            raise RewritesHistory("the chat template ends this turn in its own way")
        ids = _tokenise(self.tokenizer, end + added, begins=False)
        if not ids:
            role = new[-1]["role"]
            raise ValueError(f"the chat template writes nothing for a message of role {role!r}")
        if stop is None:
            return ids
        if ids[0] != stop:
            raise RewritesHistory("the policy ended its turn with another token than the template")
        return ids[1:]

    def _added(self, before, after):
        """Returns what the text `after` adds to the text `before`.

        Both must begin with the same history. Only empty blocks of reasoning may differ, because
        Qwen3 writes one into the last turn alone: "U: 1+1 A: <think></think>2" becomes
        "U: 1+1 A: 2 U: Sure?", which adds " U: Sure?". Raises RewritesHistory if the history
        differs."""
        for block in self.empty_thoughts:
            kept = block.sub("", before)
            # Where this history ends in `after`, with the blocks that lie within it.
            end = len(kept)
            for match in block.finditer(after):
                if match.start() < end:
                    end += len(match[0])
            if block.sub("", after[:end]) == kept:
                return after[end:]
        raise RewritesHistory("the chat template is not append-only: it changed a message")

    def _leaves_out(self, text, messages, tools):
        """Returns whether the text of a chat lacks what its last turn says."""
        *earlier, last = messages or [{}]
        said = {key: last.get(key) for key in ("content", "reasoning_content")}
        said = {key: value for key, value in said.items() if isinstance(value, str)}
        if not all(value.strip() in text for value in said.values()):
            return True
        # DeepSeek-R1's template leaves out reasoning, and Mistral's a text beside calls. A short
        # one may stand in the chat by chance, so other words are tried.
        words = {key: f"other {key}" for key, value in said.items() if value.strip()}
        may_hide_some = last.get("tool_calls") or "reasoning_content" in words
        if not words or not may_hide_some:
            return False
        text = self.text([*earlier, last | words], tools)
        return not all(word in text for word in words.values())

    def end_of(self, text: str) -> str | None:
        """Returns which of `ends` a text has at its end, or None."""
        return next((end for end in self.ends if text.endswith(end)), None)

    @functools.cached_property
    def ends(self) -> list[str]:
        """The texts that the template writes after a turn, from its stop token on; longest first.

        Qwen: ["<|im_end|>\\n"]. gpt-oss: ["<|call|>", ""]. One is empty if a turn ends nowhere, or
        at the marker of the next speaker (GLM)."""
        stops = _any_of(self.tokenizer.decode([stop]) for stop in self.stops)
        ends = set()
        for turn, *_ in ROUNDS.values():
            text = self._text_after(turn)
            if text is not None:
                text = text.removesuffix(self.closing)
                stop = stops.search(text)
                ends.add(text[stop.start() :] if stop else "")
        return sorted(ends, key=len, reverse=True)

    @functools.cached_property
    def closing(self) -> str:
        """What the template writes after a whole chat, and not between turns.

        That is Phi-3's EOS, or gpt-oss's <|return|>, which becomes <|end|> when messages follow."""
        alone = self._text_after(PROBE_ANSWER) or ""
        answered = self._text_after(PROBE_ANSWER, PROBE_USER) or ""
        if answered.startswith(alone):
            return ""
        starts = [match.start() for match in self.special.finditer(alone)]
        fitting = [start for start in starts if answered.startswith(alone[:start])]
        return alone[max(fitting, default=len(alone)) :]

    # -- a turn that is given

    def turn_ids(
        self,
        turn: dict,
        prompt_ids: Sequence[int] = (),
        number: int = 1,
    ) -> list[int]:
        """Returns the ids of an assistant's turn, including the stop token that ends it.

        They are the ids of what the template writes after a generation prompt or, if that lacks
        the turn's content (some templates drop reasoning), of the content itself. A thought that
        the prompt opens, and the turn does not have, ends at once.

        prompt_ids: what precedes the turn, by default a user's question. number: that of the turn,
        for the ids of its calls, which their results repeat.

        Raises ValueError if the policy could not sample the turn: if it is empty, if the template
        does not show its calls, or if a stop token occurs inside it."""
        turn = {"content": ""} | turn
        content = turn["content"]
        calls = [call["function"] for call in turn.get("tool_calls", ())]
        if calls:
            set_tool_calls(turn, content, calls, number)
        written = self._written_turn(turn, prompt_ids)
        beside_content = written.replace(content.strip(), "", 1)
        shows_calls = all(call["name"] in beside_content for call in calls)
        # After the prompt, because some tokenizers put a space before words in other places.
        prompt = self._probe_prompt
        start = _tokenise(self.tokenizer, prompt)
        ids = _tokenise(self.tokenizer, prompt + written)
        if ids[: len(start)] == start:
            ids = ids[len(start) :]
        else:  # a token spans the border
            ids = _inner_ids(self.tokenizer, written)
        if not (ids and shows_calls) or not self.stops.isdisjoint(ids):
            raise ValueError(f"the policy could not say this turn of a demonstration: {turn}")
        stop = self.call_end if calls else self.answer_end
        return [*ids, self.tokenizer.eos_token_id if stop is None else stop]

    @functools.cached_property
    def _probe_prompt(self):
        """The text of a prompt, with the generation prompt at its end."""
        return self.text([PROBE_USER], None, True)

    def _written_turn(self, turn, prompt_ids):
        """Returns the text of an assistant's turn that follows a prompt, without the turn's end.

        See `turn_ids`. `opened` is what the generation prompt has beyond the history, such as the
        "<think>" that opens a thought."""
        content = turn["content"]
        reasoning = turn.get("reasoning_content", "")
        has_thought = reasoning or self.think_end in content
        opened, written = self._opened_and_written([PROBE_USER], turn)
        # R1's prompt opens no thought after a tool's answer. The end of a tag tells.
        end_of_prompt = self.tokenizer.decode(prompt_ids[-END_OF_PROMPT:]).rstrip()
        if end_of_prompt and not end_of_prompt.endswith(opened[-9:]):
            opened = ""
        if opened and self.shows_reasoning and not has_thought:
            # The template writes the whole thought, an empty one here, with both tags.
            thinking = turn | {"reasoning_content": "probe"}
            opened, written = self._opened_and_written([PROBE_USER], thinking)
            written = written.replace("probe", "", 1)
        written = written.removesuffix(self.closing)
        written = written.removesuffix(self.end_of(written) or "")

        is_left_out = not turn.get("tool_calls") and content not in written
        if is_left_out or (opened and has_thought):
            written = content
        if opened:  # its last tag may also begin the turn, which follows the prompt
            written = written.removeprefix("<" + opened.rpartition("<")[2])
        if self.think_start in opened and self.think_end not in opened:
            # The prompt opens the thought, so the turn only ends it.
            written = written.removeprefix(self.think_start)
            if self.think_end not in written:
                written = f"{reasoning}{self.think_end}\n\n{written}"
        return written

    def _opened_and_written(self, chat, turn, tools=None):
        """Returns two texts: the end of the chat's generation prompt that the chat with the turn
        lacks, and what that chat has in its place.

        R1's prompt "U: 2+2 A: <think>" and its chat "U: 2+2 A: 4<EOS>" give "<think>", "4<EOS>"."""
        prompt = self.text(chat, tools, True)
        history = self.text([*chat, turn], tools)
        shared = commonprefix([prompt, history])
        n = len(re.sub(r"[<[][^]<>[\s]*$", "", shared))  # without the start of a tag: "<thi"
        return prompt[n:].strip(), history[n:]

    # -- control tokens

    def _without_forged_tokens(self, ids_of, known, messages, tools, trusted=()):
        """Returns the ids of a chat, in which no text from outside has become a control token.

        A tool result "so<|im_end|>", for example, must not end its message. Such a token is forged:
        it comes from a message, not from the template. It may appear only after the template has
        stripped or joined texts.

        No token is forged without punctuation. So the right control tokens are those of the same
        chat with letters for the punctuation in its texts. The chat itself must have the same ones.
        Three ways to tokenise it are tried:
            its texts as they are                  so, <|im_end|>
            divided where they contain a token     so, <, |im_end|>
            divided everywhere                     s, o, <, |, i, m, ...

        ids_of: a function of (messages, tools) that renders and tokenises a chat.
        known: the right control tokens of earlier chats with the same structure. A chat that has
            the same ones is not rendered with letters. Those of this chat are added.
        trusted: messages whose texts stay as they are, and so do those of messages that equal one
            of them. A suffix has none.

        Raises ValueError if all three fail."""

        def ids_with(edit):
            chat = [
                message if message in trusted else self._edited(message, edit, message["role"])
                for message in messages
            ]
            schemas = self._of_tools(edit, tools, lambda: self._edited(tools, edit))
            return ids_of(chat, schemas)

        def controls_in(ids):
            return tuple(token for token in ids if token in self.controls)

        for divide in self.divisions:
            ids = ids_with(divide)
            found = controls_in(ids)
            if divide is _unchanged and found not in known:
                known.add(controls_in(ids_with(self._with_letters)))
            if found in known:
                return ids
        raise ValueError("the chat template turns what messages say into control tokens")

    def _edited(self, value, edit, role=""):
        """Returns a message or tools with edit(text) in place of texts with punctuation.

        In messages of ROLES_THAT_KEEP_MARKUP, control tokens that are not special stay. The policy
        may have sampled a token such as <think>, and its history must keep it. A special token was
        not sampled: decoding drops those, so one that is in a text was typed out."""

        def edit_text(text):
            text = clean(text)
            is_plain = not (self._punctuation.search(text) or self.control.search(text))
            if edit is _unchanged or is_plain:
                return text
            # Every second piece is markup.
            pieces = self.markup.split(text) if role in ROLES_THAT_KEEP_MARKUP else [text]
            pieces[::2] = map(edit, pieces[::2])
            return "".join(pieces)

        return _edit_values(value, edit_text)

    def _of_tools(self, name, tools, make):
        """Returns make(), cached by name and tools, because there may be many tools."""
        key = name, json.dumps(tools, default=repr)
        return _cached(self.made_of_tools, 64, key, make)

    def _with_letters(self, text):
        """Returns a text with letters in place of punctuation, and of control tokens without any.

        The letters differ, because Mistral's template compares messages. Switches such as
        "/no_think" stay, because they decide what the template writes."""

        def letter(match):
            switch = match[1]
            return switch or chr(ord("a") + ord(match[0]) % 26)

        return self.control.sub("x", self._punctuation.sub(letter, text))

    # -- what the template accepts

    def check(
        self,
        prompt: list[dict],
        tools: list[dict],
        has_user: bool,
    ) -> list[str]:
        """Checks a task's chats: a prompt, calls of tools, replies of a simulated user.

        Returns warnings. Raises BadInput if the template does not accept them."""
        self.check_prompt(prompt, tools)
        warnings = []
        rounds = {}  # name in the messages below -> the key of ROUNDS that is tried
        if tools:
            tried = "a tool's answer" if self.shows_calls else AFTER_PLAIN_TURN
            rounds["a tool's answer"] = tried
        if has_user:
            rounds["a user's answer"] = "a user's answer"
        for name, tried in rounds.items():
            # The prompt may end with a message that the round can't follow.
            problem = self.problems[tried] or self.problem_with([*prompt, *ROUNDS[tried]], tools)
            if problem:
                raise BadInput(
                    f"the model's chat template does not take {name}: {problem}. Choose another "
                    "model, or change the template (chat_template.jinja in the model's folder)")
            chat, _ = _probe_chat([PROBE_USER, *ROUNDS[tried]])
            stop = self.call_end if "tool_calls" in chat[1] else self.answer_end
            if self._suffix_or_error(chat[:2], chat[2:], stop, tools) is RewritesHistory:
                warnings.append(
                    f"the chat template rewrites the history at {name}: the rollout goes on in a "
                    "new token sequence")
        if rounds and self.answer_end is None:
            warnings.append(
                "the chat template ends the assistant's turns without a token: each turn begins a "
                "new token sequence")
        elif lost := self._lost_from_prompts(rounds.values(), tools):
            warnings.append(
                f"the chat template's history lacks {lost!r:.80} of its generation prompt: "
                "the rollout keeps it")
        if tools and self.shows_calls and not self.accepts("two calls in a turn"):
            warnings.append(
                "the chat template takes one tool call in a turn: give --agent_args "
                "'{\"max_parallel_calls\": 1}'")
        if tools and self.text(prompt, tools, True) == self.text(prompt, None, True):
            warnings.append(
                "the chat template ignores tools: the policy does not see that it has any. Take "
                "another model or template, or describe them in the prompt")
        if self.writes_date:
            warnings.append(
                "the chat template writes today's date. So that runs can be repeated, fix it: "
                """--chat_template_args '{"strftime_now": "26 Jul 2024"}'""")
        chat, words = _probe_chat([PROBE_USER, PROBE_ANSWER, PROBE_USER])
        text = self.text(chat)
        if any(text.count(word) > 1 for word in words):
            warnings.append(f"the chat template writes a message twice: {text!r:.200}")
        return warnings

    def _lost_from_prompts(self, rounds, tools):
        """Returns what a generation prompt has and the history lacks, beside tags of reasoning.

        "" if there is no such text, before any of the rounds or after one. rounds: their names."""
        for name in rounds:
            chat, _ = _probe_chat([PROBE_USER, *ROUNDS[name]])
            for history in ([PROBE_USER], chat):
                turns = (PROBE_ANSWER, PROBE_REASONING)
                opened = [self._opened_and_written(history, turn, tools)[0] for turn in turns]
                lost = min(opened, key=len)
                if lost.replace(self.think_start, "").replace(self.think_end, "").strip():
                    return lost
        return ""

    def check_prompt(self, prompt: list[dict], tools: list[dict] | None = None):
        """Raises BadInput if the template does not show what each message of a prompt says.

        Reasoning is not checked, because many templates drop it in earlier turns. Prompts with
        the same roles and calls, all with tools or all without, are checked once."""
        probe = []
        for message in prompt:
            message = _edit_said(message, lambda text: "?")
            message.pop("reasoning_content", None)
            for tool_call in message.get("tool_calls", ()):
                tool_call["function"] |= {"arguments": {"text": "?"}}
            probe.append(message)
        form = json.dumps([probe, bool(tools)], default=repr)
        if probe and form not in self.checked_forms:
            problem = self.problem_with(probe, tools)
            if not tools and self.no_tools is not None:
                problem = problem or "it takes chats with tools only"
            if problem:
                raise BadInput(f"the model's chat template does not take this prompt: {problem}")
            self.checked_forms.add(form)

    def problem_with(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
    ) -> str:
        """Returns why the template does not accept messages of a probe chat, or "" if it does."""
        chat, words = _probe_chat(messages)
        try:
            text = self.text(chat, tools)
        except Exception as error:  # templates raise whatever they like
            return f"it raises {error!r:.200}"
        for word, role in words.items():
            if word not in text:
                return f"it leaves out what a message of role {role!r} says"
        return ""

    @functools.cached_property
    def problems(self) -> dict[str, str]:
        """{name of one of the ROUNDS: why the template does not accept it, "" if it does}"""
        # Some templates accept a round, and refuse the turn after it.
        return {
            name: self.problem_with([PROBE_USER, *messages, PROBE_ANSWER, PROBE_USER])
            for name, messages in ROUNDS.items()
        }

    def accepts(self, name: str) -> bool:
        """Returns whether the template accepts the round of this name."""
        return not self.problems[name]

    @functools.cached_property
    def shows_reasoning(self) -> bool:
        """Whether the template knows reasoning_content."""
        chat, words = _probe_chat([PROBE_USER, PROBE_REASONING])
        with suppress(Exception):  # templates raise whatever they like
            text = self._written(chat)
            return all(word in text for word in words)
        return False

    @functools.cached_property
    def shows_calls(self) -> bool:
        """Whether the template shows tool_calls in a message without text."""
        return not self.problem_with([PROBE_USER, _probe_calls(1)])

    def shows(self, message: dict, tools: list[dict]) -> bool:
        """Returns whether the template accepts a message with calls, and shows all of it."""
        reasoning = message.get("reasoning_content", "")
        said = [message["content"].strip(), reasoning.strip()]
        said += [call["function"]["name"] for call in message["tool_calls"]]
        with suppress(Exception):  # templates raise whatever they like
            text = self.text([PROBE_USER, message], tools)
            # The tools' schemas also contain the names.
            before = self._of_tools("shows", tools, lambda: self.text([PROBE_USER], tools))
            return all(text.count(each) > before.count(each) for each in said)
        return False

    @functools.cached_property
    def writes_date(self) -> bool:
        """Whether the template writes today's date."""
        variables = getattr(self.tokenizer.apply_chat_template, "keywords", {})
        if "strftime_now" in variables:  # see `with_template_variables`
            return False
        chat, _ = _probe_chat([PROBE_USER])
        with suppress(Exception):
            return "probe date" in self._written(chat, strftime_now=lambda form: "probe date")
        return False

    def _turn_end(self, turn, reply, stops):
        """Returns the id of the token that ends a turn of a probe chat, or None.

        It is the first of these that exists:
        1. a known stop in the text after the turn
        2. for an answer, any special token there
        3. if no special token is there, the one with which the reply begins (GLM)

        stops: the known ids."""
        alone = self._text_after(turn)
        answered = self._text_after(turn, reply)
        if alone is None:
            return None
        # Phi-3's closing is its EOS, which does not end a turn.
        special = self._special_in(alone.removesuffix(self.closing) or alone)
        found = [token for token in special if token in stops]
        if turn is PROBE_ANSWER:
            found += special
        if answered and answered.startswith(alone) and not special:
            marker = self.special.match(answered[len(alone) :])  # of the next speaker
            if marker:
                found += self._special_in(marker[0])
        return found[0] if found else None

    def _text_after(self, turn, *replies):
        """Returns the text after the last word of a probe turn, or None if there is none.

        For Qwen that is "<|im_end|>\\n", followed by the replies."""
        _, words = _probe_chat([PROBE_USER, turn])
        _, *words = words  # the turn's own
        with suppress(Exception):
            chat, _ = _probe_chat([PROBE_USER, turn, *replies])
            text = self.text(chat)
            if words[-1] in text:
                # The last in the text: R1-Distill-Qwen writes calls before the text beside them.
                end = max(text.rfind(word) + len(word) for word in words)
                return text[end:]
        return None

    def _special_in(self, text):
        """Returns the ids of the special tokens in a text."""
        return [self.tokenizer.convert_tokens_to_ids(token) for token in self.special.findall(text)]

    # -- how far back the template looks (for speed only, see `Recent`)

    @functools.cached_property
    def needs_only_recent(self) -> bool:
        """Whether the template's suffixes depend on the `Recent` part of a chat alone.

        This is tested, not proved, in probe chats with up to 33 rounds of one kind or all kinds."""
        rounds = [each for each in ROUNDS.values() if self._text_after(*each) is not None]
        random_numbers = random.Random(0)
        for n in (3, 9, 33):
            chats = [[each] * n for each in rounds]
            if rounds:
                chats.append(random_numbers.choices(rounds, k=n))
            for chosen in chats:
                chat, _ = _probe_chat([PROBE_USER, *itertools.chain(*chosen)])
                chat[len(chat) // 3]["content"] += " and so on" * 100  # it may measure texts
                n_new = len(chosen[-1]) - 1  # what answers the last turn
                history, new = chat[:-n_new], chat[-n_new:]
                part = Recent(self.form_of).update(history)
                if self._suffix_or_error(history, new) != self._suffix_or_error(part, new):
                    return False
        return True

    def _suffix_or_error(self, messages, new, stop=None, tools=None):
        """Returns the ids of a suffix in a probe chat, or the type of the error that it raises."""
        try:
            return self._suffix_ids(messages, new, stop, tools)
        except Exception as error:
            return type(error)

    def form_of(self, message: dict) -> tuple:
        """Returns what the template can tell from a message, except words that it only copies.

        That is its role, keys and calls, and which texts it has of those that the template may
        look for: with Qwen3, for example, an answer with "</think>" has a form of its own."""
        found = {text.lower() for text in self._looked_for.findall(str(message))}
        return *_structure(message), *sorted(found)

    @functools.cached_property
    def _texts_looked_for(self):
        """The strings that the template may look for in a message.

        These are the strings in the template's code, except for those that do not change the suffix
        of a later turn (`_is_without_consequence`)."""
        from jinja2 import Environment

        template = self.tokenizer.chat_template
        if isinstance(template, dict):  # several, by name
            template = "".join(template.values())
        tokens = Environment().lexer.tokenize(template)
        texts = {token.value for token in tokens if token.type == "string"}
        return {text for text in texts if text.strip() and not self._is_without_consequence(text)}

    @functools.cached_property
    def _looked_for(self):
        return _any_of(self._texts_looked_for, re.IGNORECASE)

    @functools.cached_property
    def _punctuation(self):
        """A pattern of a switch, which is its group 1, or of a punctuation mark."""
        switches = {text for text in self._texts_looked_for if not self.control.search(text)}
        return re.compile(rf"{_any_of(switches).pattern}|[^\w\s]", re.IGNORECASE)

    def _is_without_consequence(self, text):
        """Returns whether a common text in messages does not change the suffix of a later turn.

        Without this check nearly every message would have a form of its own. It compares two probe
        chats, with and without the messages in the middle that contain the text.

        Only words, punctuation, and texts of at most 2 characters are tried. Others count as having
        a consequence, because two of them may matter together, as <tool_response> and
        </tool_response> do for Qwen3."""
        if len(text) > 2 and not re.fullmatch(r"[\w\s]+|\W+", text):
            return False
        rounds = []  # all have the text
        for said in (text, f"{text} so", f"so {text}", f"so {text} so"):
            rounds += [{**PROBE_ANSWER, "content": said}, {**PROBE_USER, "content": said}]
            if self.accepts("a tool's answer"):
                rounds += [_probe_calls(1), {**_probe_result(), "content": said}]
        chat, _ = _probe_chat([PROBE_USER, *rounds, PROBE_ANSWER, PROBE_USER])
        ends = [chat[0], chat[-2]]
        new = chat[-1:]
        return self._suffix_or_error(ends, new) == self._suffix_or_error(chat[:-1], new)


@functools.lru_cache(maxsize=64)
def _chat_template(tokenizer, template, stops, think_tags):
    """Returns a ChatTemplate (cached). template: a changed one is learned again."""
    return ChatTemplate(tokenizer, stops, think_tags)


def chat_template(
    tokenizer,
    stops: Iterable[int] = (),
    think_tags: str = LoopArgs.think_tags,
) -> ChatTemplate:
    """Returns the tokenizer's ChatTemplate, which is made once for the same arguments.

    stops: the ids that end a turn, in addition to the tokenizer's EOS."""
    stops = frozenset({*stops, tokenizer.eos_token_id} - {None})
    return _chat_template(tokenizer, str(tokenizer.chat_template), stops, think_tags)


def render(
    tokenizer,
    messages: list[dict],
    tools: list[dict] | None = None,
    trusted: Sequence[dict] | None = None,
) -> list[int]:
    """Returns the token ids of a chat, with the generation prompt at its end.

    trusted: messages in which a text like "<|im_end|>" becomes that control token. In all
    other messages, and in tools, it stays text. By default all messages are trusted, as in a
    row's prompt.

    An empty chat has no tokens: an Interaction must then speak first."""
    return chat_template(tokenizer).render(messages, tools, trusted)


# ---------------------------------------------------------------- probe chats


# A probe chat is made up, and rendered only to see what the template does with it. These are its
# messages. Each "?" becomes a word of its own (`_probe_chat`). A word that is missing from the
# rendering was dropped by the template. In [PROBE_USER, _probe_calls(1), _probe_result()] the user
# says probe000, the assistant calls probe(text="probe001"), and the tool says probe002.
PROBE_USER = {"role": "user", "content": "?"}
PROBE_ANSWER = {"role": "assistant", "content": "?"}
PROBE_REASONING = {"role": "assistant", "reasoning_content": "?", "content": "?"}


def _probe_calls(n, **others):
    """Returns the message of an assistant that calls a tool n times."""
    calls = []
    for number in range(n):
        calls.append(function_call(call_id(1, number), "probe", {"text": "?"}))
    return {"role": "assistant", "content": "", **others, "tool_calls": calls}


def _probe_result(number=0):
    """Returns the message of a tool that answers a call of `_probe_calls`."""
    return {"role": "tool", "name": "probe", "content": "?", "tool_call_id": call_id(1, number)}


AFTER_PLAIN_TURN = "an answer to a call in the text"
# A round is a message of the assistant and what answers it.
ROUNDS = {
    "a user's answer": (PROBE_ANSWER, PROBE_USER),
    "reasoning": (PROBE_REASONING, PROBE_USER),
    "a tool's answer": (_probe_calls(1), _probe_result()),
    "reasoning before a call": (_probe_calls(1, reasoning_content="?"), _probe_result()),
    "text before a call": (_probe_calls(1, content="?"), _probe_result()),
    "two calls in a turn": (_probe_calls(2), _probe_result(), _probe_result(1)),
    AFTER_PLAIN_TURN: (PROBE_ANSWER, _probe_result()),  # the call stayed in the text
}


def _probe_chat(messages):
    """Returns messages with words in place of "?", and {word: its message's role}."""
    words = {}
    chat = []
    for message in messages:

        def next_word(text, role=message["role"]):
            if text != "?":
                return text
            word = f"probe{len(words):03d}"
            words[word] = role
            return word

        chat.append(_edit_values(message, next_word))
    return chat, words


# ---------------------------------------------------------------- the recent part of a chat


class Recent:
    """The part of a growing chat that the suffix of its next turn depends on.

    This class is for speed only. A template renders the whole history at each turn, so a late turn
    would cost more than an early one. `ChatTemplate.suffix` therefore gives the template less of
    it: enough to look back at the system message, say, or at the last turn that had reasoning.
    That is
    - the messages before the assistant's first,
    - the latest round, which is a message of the assistant with what answers it,
    - the last earlier round of each form.

    Two rounds have the same form if the template can't distinguish them, except by words that it
    only copies. Probe chats show whether this is enough for a template
    (`ChatTemplate.needs_only_recent`). If not, the template gets the whole history.

    form_of: returns the form of a message (`ChatTemplate.form_of`)."""

    def __init__(self, form_of: Callable):
        self.form_of = form_of
        self._clear()

    def __deepcopy__(self, memo):
        """A copied trajectory gets a new one, because form_of must not be copied."""
        return Recent(self.form_of)

    def _clear(self):
        """Forgets all messages."""
        self.n_seen = 0  # messages so far
        self.last_seen = None  # the last of them
        self.start = []  # the messages before the assistant's first
        self.rounds = {}  # the last round of each form, the latest one excluded
        self.latest = []  # the latest round

    def update(self, messages: list[dict]) -> list[dict]:
        """Returns the recent part of a chat. Walks only over messages that it has not seen."""
        n = self.n_seen
        grows = len(messages) >= n
        if n and not (grows and messages[n - 1] is self.last_seen):
            self._clear()  # it is another history
        for message in messages[self.n_seen :]:
            if message["role"] == "assistant":
                self._end_round()
                self.latest = [message]
            elif self.latest:
                self.latest.append(message)
            else:
                self.start.append(message)
            self.last_seen = message
        self.n_seen = len(messages)
        earlier = itertools.chain(*self.rounds.values())
        return [*self.start, *earlier, *self.latest]

    def _end_round(self):
        """Moves the latest round to `rounds`, where it replaces the earlier one of its form."""
        if self.latest:
            form = tuple(map(self.form_of, self.latest))
            self.rounds.pop(form, None)
            self.rounds[form] = self.latest


# ---------------------------------------------------------------- texts of messages


def _cached(cache, limit, key, make):
    """Returns cache[key], which is make() the first time. A cache at its limit is emptied."""
    if key not in cache:
        if len(cache) >= limit:
            cache.clear()
        cache[key] = make()
    return cache[key]


# In messages of these roles, markup such as <tool_call> stays a control token: the policy samples
# it, and system prompts show it in examples.
ROLES_THAT_KEEP_MARKUP = ("assistant", "system")


def _structure(message):
    """Returns what a template can tell from a message without reading its words.

    That is its role, its keys that are not blank, its number of calls, and the kinds of its
    content's parts."""
    values = {key: value for key, value in message.items() if value}
    keys = tuple(key for key, value in values.items() if str(value).strip())
    n_calls = len(message.get("tool_calls") or ())
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    kinds = tuple((part.get("type"), *part) for part in parts)
    return message["role"], keys, n_calls, kinds


def _unchanged(text):
    """Returns a text as it is: an edit that edits nothing."""
    return text


def _edit_said(message, edit):
    """Returns a copy of a message with edit(text) in place of each text that it says.

    These are its content, the texts among the parts of its content, and its reasoning. Blank ones
    stay."""
    edited = _edit_values(message, _unchanged)
    places = [(edited, "content"), (edited, "reasoning_content")]
    if isinstance(edited.get("content"), list):
        places += [(part, "text") for part in edited["content"]]
    for holder, key in places:
        text = holder.get(key)
        if isinstance(text, str) and text.strip():
            holder[key] = edit(text)
    return edited


def _edit_values(value, edit):
    """Returns nested lists and dicts with edit(text) in place of each text and each key."""
    if isinstance(value, str):
        return edit(value)
    if isinstance(value, list):
        return [_edit_values(inner, edit) for inner in value]
    if not isinstance(value, dict):
        return value
    edited = {}
    for key, inner in value.items():
        key = _edit_values(key, edit)
        while key in edited:  # two keys became equal, and both must stay
            key += "x"
        edited[key] = _edit_values(inner, edit)
    return edited


def _join_contents(contents, separator):
    """Returns the contents of several messages as one. Each is a text or a list of parts.

    If all are texts, the separator stands between them. Otherwise the result is a list of parts."""
    if all(isinstance(content, str) for content in contents):
        return separator.join(contents)
    parts = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


# ---------------------------------------------------------------- tokens of texts


@functools.cache
def _control_tokens(tokenizer):
    """Returns the tokenizer's control tokens by id, such as <|im_end|> or <tool_call>.

    They are its special tokens, and all other added tokens that have punctuation and more
    than one character. The rest are plain words, white space and single characters."""
    controls = {}
    for number, token in tokenizer.added_tokens_decoder.items():
        has_punctuation = re.search(r"[^\w\s]|_", token.content)
        is_markup = len(token.content) > 1 and has_punctuation
        if token.special or is_markup:
            controls[number] = token
    return controls


def _any_of(texts, flags=0):
    """Returns a regular expression for any of the texts, the longest first, as its group 1."""
    longest_first = sorted(texts, key=len, reverse=True)
    any_text = "|".join(map(re.escape, longest_first)) or "(?!)"  # without texts nothing matches
    return re.compile(f"({any_text})", flags)


def _tokenise(tokenizer, text, begins=True):
    """Returns the ids of a rendered text, in which no token spans a TOKEN_BREAK.

    begins: whether the text begins a sequence. If not, no tokenizer may put a space before it.

    A character after a TOKEN_BREAK never becomes a control token. If the tokenizer has no
    other token for it (it is a special token itself, or unknown), the character is dropped.

    No special tokens are added, because the template writes them all, BOS included."""
    first, *pieces = text.split(TOKEN_BREAK)
    if begins:
        ids = tokenizer.encode(first, add_special_tokens=False)
    else:
        ids = _inner_ids(tokenizer, first)
    for piece in pieces:
        ids += _character_ids(tokenizer, piece[:1])
        ids += _inner_ids(tokenizer, piece[1:])
    return ids


@functools.lru_cache(maxsize=1024)
def _character_ids(tokenizer, character):
    """Returns the ids of a character as text. A control token is not one of them."""
    ids = _inner_ids(tokenizer, character)
    return [token for token in ids if token not in _control_tokens(tokenizer)]


def _inner_ids(tokenizer, text):
    """Returns the ids of a text that does not begin a sequence.

    Some tokenizers put a space before the first word of a sequence. So the text is tokenised
    after the EOS token, whose id is then left out."""
    start = tokenizer.eos_token or ""
    ids = tokenizer.encode(start + text, add_special_tokens=False)
    return ids[1:] if start else ids


def shorten(text: str, limit: int, side: str, tokenizer) -> str:
    """Cuts a long text to `limit` tokens, with "..." for the rest.

    side: the part that is kept, as in verl: "left" keeps the start, "right" the end, and
    "middle" both."""
    text = clean(text)
    if len(text.encode()) <= limit:  # a token has at least one byte
        return text
    # Tokenising a huge text is slow, so its middle is cut out first.
    n_kept = 64 * limit  # characters at either end
    if len(text) > 2 * n_kept:
        text = f"{text[:n_kept]}...{text[-n_kept:]}"
    ids = _tokenise(tokenizer, text)
    if len(ids) <= limit:
        return text
    n_heads = {"left": limit, "middle": (limit + 1) // 2, "right": 0}
    n_head = n_heads[side]
    n_tail = limit - n_head
    head = tokenizer.decode(ids[:n_head])
    tail = tokenizer.decode(ids[len(ids) - n_tail :])
    return f"{head}...{tail}"
