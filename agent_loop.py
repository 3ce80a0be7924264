"""Runs ONE rollout: agent loops, tools and interactions.

An agent loop gets a row of the data set and an engine, and returns tokens: those that the
policy sampled (mask 1) and those that it was given (mask 0: tool results, user turns, and what
the template writes). One rule governs this file: *token in, token out*. Within a sequence, sampled
ids are appended verbatim and never tokenised again. The text between two sampled turns is the
difference of two renderings of the chat template (`ChatTemplate.suffix`).

The words that code, documents, log and flags share:
    prompt      the chat messages in one row of the data set, and the task that they pose
    group       the units that are compared; by default all those of one prompt
    rollout     one run of an agent loop; `sample` is its number among those of its prompt
    trajectory  the messages and tokens of a rollout while it runs (`Trajectory`)
    turn        one message of the assistant, or the reply of tools or of a user
    token       one id; its mask is 1 if the policy sampled it, else 0
    output      a finished token sequence (`AgentLoopOutput`); `segment`: its number in the rollout
    unit        the outputs of a rollout that share one reward; by default all of them

To write your own agent, subclass `AgentLoopBase` in the task file, decorate the class with
`@register("name")`, and select it with `--agent name` or with a row's `agent_name`. Loops are
coroutines on one background thread. Hundreds of them run at once, so they must not block.
Names follow verl's agent loop (https://verl.readthedocs.io/en/latest/advance/agent_loop.html)."""

import asyncio
import copy
import functools
import inspect
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any
from uuid import uuid4

import numpy as np

# Task files import some of these names from here.
from flatrl.bad_input import BadInput, last_line, need, reason, text_of
from flatrl.chat_template import (  # noqa: F401
    IN_TEXT,
    PROMPT_TAIL,
    ChatTemplate,
    Recent,
    RewritesHistory,
    call_id,
    chat_template,
    function_call,
    render,
    split_reasoning,
    with_template_variables,
)
from flatrl.compact import Numbers, compact
from flatrl.flags import flag
from flatrl.routes import encode_routes, join_routes
from flatrl.texts import clean
from flatrl.tools import (
    RefusedCallError,
    Signature,
    join_contents,
    parse_tool_calls,
    set_tool_calls,
    shorten,
    tool_text,
)
from flatrl.user_code import DEADLINE, CallTimeoutError, call, checked_number, in_thread, in_time  # noqa: F401
from flatrl.vision import expand, image_tokens, load_image, load_images

# ---------------------------------------------------------------- settings and results

SIDES = ("left", "middle", "right")


@dataclass
class LoopArgs:
    """The settings that agent loops read from their `args`. train.Args inherits from this class."""

    agent: str | None = flag(
        None, "agent loop; default: tool_agent with TOOLS or INTERACTIONS, else single_turn")
    max_response_tokens: int = flag(
        128, "token budget of a rollout: sampled, tool and user tokens together", low=1)
    max_model_len: int | None = flag(
        None, "the engine's window: tokens of prompt and response together; default: no limit "
        "(train.py: max_prompt_tokens + max_response_tokens)", low=1)
    max_assistant_turns: int = flag(
        8, "a rollout ends after this many turns, with stop reason max_turns; 0: no limit")
    max_user_turns: int = flag(
        0, "replies of a simulated user in a rollout; one more is for the reward only; 0: no limit")
    compact_at: int = flag(
        0, "tokens of a sequence at which `compacting` asks for a summary; 0: 3/4 of the window")
    max_images: int = flag(
        8, "images in one rollout, those of the prompt and of tools together", low=1)
    chat_template_args: str = flag(
        "{}", 'variables for the chat template, a JSON object: {"enable_thinking": false}')
    think_tags: str = flag(
        "<think> </think>", "the tags around reasoning; tool calls inside it are not executed")
    tool_parser: str = flag(
        "auto", "the format of tool calls: one of vLLM's parsers; template: as the chat template "
        "writes them, as JSON; auto: the first that reads what the template writes")
    tool_timeout: float = flag(
        30.0, "seconds for one tool call, or for one answer of a simulated user", low=1e-3)
    trajectory_timeout: float = flag(
        0.0, "seconds for a whole rollout. A tool_agent then ends, and keeps its tokens; other "
        "loops are cancelled later. With --max_staleness, updates count as well; 0: no limit")
    max_parallel_calls: int = flag(
        8, "tool calls executed in one turn; an error tells the model how many more there were. "
        "Give 1 for templates that take one call a turn, as Llama 3.1's", low=1)
    max_tool_response_tokens: int = flag(
        256, "longer tool responses are cut to this length", low=1)
    tool_response_truncate_side: str = flag(
        "middle", "what is kept of a long tool response: left (its start), right, or middle (both)",
        SIDES)
    prompt_truncate_side: str = flag(
        "none", "what is kept of an overlong prompt's longest text; none: its row is dropped",
        (*SIDES, "none"))


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
    routes: Any = None  # with --router_replay those of prompt and tokens: see flatrl/routes.py


# "abort": the engine gave up, or a loop went on after its demonstration. "error": never set here,
# but your own loops may use it.
STOP_REASONS = ("stop", "length", "max_turns", "timeout", "abort", "error")
RESPONSE_LISTS = ("response_ids", "response_mask", "response_logprobs", "response_versions")


@dataclass(kw_only=True)
class AgentLoopOutput:
    """One finished token sequence. An agent loop returns one or more of them for a rollout.

    The four response_* lists have one entry for each response token. response_mask is 1 for the
    assistant's tokens and 0 for those of tools, users and the template. Tokens that no policy
    sampled have logprob 0.0 and version -1. With mask 1 they are imitated, whatever `extra` says.

    turn_rewards: pairs (index into response_ids, reward).
    text: the whole response decoded, with what tools and users said. A reward reads the policy's
        words from messages instead.
    num_turns: the number of assistant, user and tool turns + 1, as in verl.
    images: PIL images in the order of their placeholders. The ids repeat a placeholder for each
        token of its image.
    unit: outputs of one rollout with the same unit share one reward, that of the last of them, and
        count once in advantages and in the loss; by default all outputs of the rollout.
    group: units of one prompt and one group are compared with each other; by default those of
        equal names, and without names all rollouts of the prompt. docs/units.md has examples.

    Raises ValueError if the lists differ in length, or if a field is invalid."""

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
    """Returns the entries of a dict that are real numbers. Bools, also numpy's, become 0 or 1."""
    kinds = Real | np.bool_
    return {name: value + 0 for name, value in values.items() if isinstance(value, kinds)}


def visible_text(tokenizer, ids: Sequence[int], mask: Sequence[int] | None = None) -> str:
    """Decodes ids as rewards read them, with special tokens such as <answer> that were sampled.

    Sampled tokens lose those of the template's frame, and given tokens all special tokens.
    mask: 1 where the policy sampled, by default everywhere. Without a chat template it has no
    effect: all special tokens are left out."""
    if not tokenizer.chat_template:
        return tokenizer.decode(ids, skip_special_tokens=True)
    template = chat_template(tokenizer)
    kept = []
    for number, is_sampled in zip(ids, mask or [1] * len(ids)):
        hidden = template.frame_ids if is_sampled else template.texts.special
        if number not in hidden:
            kept.append(number)
    return tokenizer.decode(kept)


# ---------------------------------------------------------------- agent loops

AGENT_LOOPS: dict[str, type] = {}


def register(name: str) -> Callable:
    """Class decorator: makes a loop available to `--agent name` and to a row's agent_name."""

    def add(cls):
        AGENT_LOOPS[name] = cls
        return cls

    return add


def default_agent(task) -> str:
    """Returns "tool_agent" for a task with TOOLS or INTERACTIONS, else "single_turn"."""
    has_turns = getattr(task, "TOOLS", None) or getattr(task, "INTERACTIONS", None)
    return "tool_agent" if has_turns else "single_turn"


def agent_loop_class(row: dict, task, args) -> type:
    """Returns the agent loop's class, selected by row["agent_name"], else by args.agent.

    If both are None, it is the `default_agent`. Raises BadInput for an unknown name."""
    name = row.get("agent_name") or args.agent or default_agent(task)
    need(
        name in AGENT_LOOPS,
        f"no agent loop {name!r}: choose from {sorted(AGENT_LOOPS)} or add "
        f"@register({name!r}) to the task")
    return AGENT_LOOPS[name]


class Trajectory:
    """The messages and tokens of one rollout while it runs.

    Its methods append tokens to all five lists together: engine_ids and the four response_* lists.
    These are the current token sequence. If the template rewrites the history, `fork` ends the
    sequence and starts another. `outputs` returns one AgentLoopOutput for each.

    engine_ids: prompt and response as `engine.generate` gets them, with one placeholder for each
        image. prompt_ids and response_ids have one for each token of the image (`expand`).
    trusted: the messages in which a text like "<|im_end|>" becomes that token (`render`), by
    default those that are given here. Messages that are appended later are not trusted.

    reward, unit and group are those of its outputs (see AgentLoopOutput)."""

    def __init__(
        self, messages: list[dict], prompt_ids: list[int], engine_ids: list[int], images: Sequence,
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
        self.user_turns = 0  # of tools and users, as in verl: max_user_turns does not limit these
        self.stop_id = None  # the stop token that ended the last assistant turn
        self.tool_calls = []  # in the last assistant turn, not executed yet
        self.finished = []  # AgentLoopOutputs of the sequences before the last fork
        self.begin(prompt_ids, engine_ids)

    def begin(self, prompt_ids: list[int], engine_ids: list[int]):
        """Starts the token sequence with this prompt and an empty response."""
        self.prompt_ids = Numbers("i", prompt_ids)
        self.engine_ids = Numbers("i", engine_ids)
        self.recent = Recent()  # see ChatTemplate.suffix
        self.turn_rewards = []
        self.response_ids = Numbers("i")
        self.response_mask = Numbers("b")
        self.response_logprobs = Numbers("d")
        self.response_versions = Numbers("i")
        self.routes = None  # only with --router_replay

    def copy(self) -> "Trajectory":
        """Returns a copy with lists of its own; messages and images are shared."""
        copied = copy.copy(self)
        vars(copied).update({name: copy.copy(value) for name, value in vars(self).items()})
        copied.recent = Recent()
        return copied

    def fork(self, prompt_ids: list[int], engine_ids: list[int]):
        """Ends the token sequence, and starts one whose prompt is the rewritten history."""
        # Only the last output has reward and metrics. The rollout continues: this one is not cut.
        so_far = replace(self.output(), reward=None, metrics={}, stop_reason="stop")
        self.finished.append(compact(so_far))
        self.begin(prompt_ids, engine_ids)
        self.count("forks")

    def add_sampled(self, out: TokenOutput):
        """Appends the tokens of an assistant turn, with mask 1."""
        self.assistant_turns += 1
        self.routes = join_routes(self.routes, out.routes)
        mask = [1] * len(out.token_ids)
        self._add(out.token_ids, out.token_ids, mask, out.logprobs, out.versions)

    def add_given(self, ids: list[int], engine_ids: list[int] | None = None):
        """Appends tokens of a tool, a user or the template, with mask 0.

        engine_ids: the same tokens with one placeholder for each image; default: ids."""
        n = len(ids)
        self._add(engine_ids or ids, ids, [0] * n, [0.0] * n, [-1] * n)

    def _add(self, engine_ids, ids, mask, logprobs, versions):
        """Appends to all five lists."""
        self.engine_ids.extend(engine_ids)
        self.response_ids.extend(ids)
        self.response_mask.extend(mask)
        self.response_logprobs.extend(logprobs)
        self.response_versions.extend(versions)

    def record(self, kind: str, name: str, reward: float | None, metrics: dict | None):
        """Records a turn reward, at the last token so far, and adds metrics to the rollout's.

        kind and name identify the source, such as "tool" and "calculator". A metric becomes
        "kind/name/key"; the source's rewards are added up in "kind_reward/name". Raises ValueError,
        and records nothing, if reward or metrics are not finite numbers."""
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
        """Returns the outputs of all token sequences, which share the trajectory's unit and group.

        If the assistant said nothing after the last fork, that sequence is left out. The one before
        then ends the rollout, and its last token gets the turn rewards."""
        finished = [replace(each, unit=self.unit, group=self.group) for each in self.finished]
        last = self.output()
        speaks = 1 in last.response_mask or last.messages[-1]["role"] == "assistant"
        if speaks or not finished:
            return [*finished, last]
        *earlier, before = finished
        ended = {name: getattr(last, name) for name in ("reward", "metrics", "stop_reason")}
        end = len(before.response_ids) - 1
        ended["turn_rewards"] = before.turn_rewards + [(end, x) for _, x in last.turn_rewards]
        return [*earlier, replace(before, extra=before.extra | last.extra, **ended)]

    def output(self) -> AgentLoopOutput:
        """Returns the current token sequence, without those before forks, as an output."""
        lists = ("prompt_ids", *RESPONSE_LISTS, "turn_rewards", "messages", "images")
        return AgentLoopOutput(
            **{name: list(getattr(self, name)) for name in lists},
            reward=copy.copy(self.reward),
            num_turns=self.assistant_turns + self.user_turns + 1,
            stop_reason=self.stop_reason,
            metrics=dict(self.metrics),
            extra=self.extra | encode_routes(self.routes),
            unit=self.unit,
            group=self.group,
        )


class AgentLoopBase:
    """The base class of agent loops. Subclasses override `run`. Each rollout has its own instance.

    engine: any object with `async generate(*, request_id, prompt_ids, sampling_params,
        image_data) -> TokenOutput`. prompt_ids has ONE placeholder for each image of
        image_data, which is a list of PIL images or None.
    processor: the model's image processor; None for text models. task: the module.
    args: train.Args, LoopArgs or any object with some of LoopArgs' attributes; others get their
        defaults. Raises TypeError without max_response_tokens and max_model_len."""

    def __init__(self, engine, tokenizer, processor, task, args):
        known = {each.name: each.default for each in fields(LoopArgs)}
        missing = {name: known[name] for name in known if not hasattr(args, name)}
        if "max_response_tokens" in missing or "max_model_len" in missing:
            raise TypeError(f"the args of {type(self).__name__} lack {missing}: see LoopArgs")
        self.args = copy.copy(args)  # a copy, because other loops share args
        vars(self.args).update(missing)
        self.engine = engine
        self.tokenizer = with_template_variables(tokenizer, self.args.chat_template_args)
        self.processor = processor
        self.task = task

    async def run(self, sampling_params: dict, **row) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Runs one rollout, and returns its output or outputs. Must be overridden.

        row: the columns of the data set's row, and index, step, rollout_n (the rollout's
        number among those of its prompt) and validate (True in an evaluation)."""
        raise TypeError(f"{type(self).__name__} has no run method")

    def start(
        self, row: dict, tools: list[dict] | None = None, trusted: Sequence[dict] | None = None
    ) -> Trajectory:
        """Returns a trajectory that begins with row["prompt"], even if that is too long.

        trusted: see Trajectory. Raises ValueError unless the prompt has one placeholder for each of
        the row's images."""
        images = load_images(row.get("images") or ())
        prompt = self.prompt(row["prompt"], tools, images, trusted)
        return Trajectory(row["prompt"], *prompt, images, trusted)

    def prompt(self, messages, tools, images, trusted) -> tuple[list[int], list[int]]:
        """Returns (prompt_ids, engine_ids) of messages. These and `trusted`: see Trajectory."""
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
        before = trajectory.messages
        try:
            suffix = template.suffix(before, messages, trajectory.stop_id, tools, trajectory.recent)
        except RewritesHistory:
            all_images = trajectory.images + images
            prompt = self.prompt(before + messages, tools, all_images, trajectory.trusted)
            fits = self.room(trajectory, used=len(prompt[0])) > 0
            if fits:
                trajectory.fork(*prompt)
        else:
            ids = expand(suffix, images, self.processor)
            fits = self.room(trajectory) > len(ids)
            if fits:
                trajectory.add_given(ids, suffix)
        if not fits:
            trajectory.stop_reason = "length"
            return False
        trajectory.images += images
        trajectory.messages += messages
        trajectory.user_turns += 1
        return True

    async def assistant_turn(self, trajectory: Trajectory, sampling_params: dict) -> str | None:
        """Samples one assistant turn, and appends its tokens and its message.

        Returns its text without reasoning but with special tokens (see `_read_turn`), or None if
        the turn was cut off (its tokens and its message are there), or had no room (nothing was
        sampled). Sets the stop reason. Raises ValueError if engine and processor count an image's
        tokens differently."""
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
        before = trajectory.engine_ids[-PROMPT_TAIL:]  # may end with an opening <think> tag
        trajectory.add_sampled(out)
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

        Content and reasoning_content (if any) are a `visible_text`. text is the turn without its
        reasoning, with all special tokens, because tool calls may need them."""
        decode = self.tokenizer.decode
        # before: the last tokens before the turn. Some templates end them with the start tag.
        opened = decode(before).rstrip().endswith(self.args.think_tags.split()[0])
        whole = decode(ids)
        reasoning, text = None, whole
        if self.tokenizer.chat_template:
            reasoning, text = self.chat_template().read(whole, opened)

        def visible(part):
            part_ids = ids
            if part != whole:
                part_ids = self.tokenizer.encode(part, add_special_tokens=False)
            return visible_text(self.tokenizer, part_ids)

        message = {"role": "assistant", "content": visible(text)}
        if reasoning is not None:
            message["reasoning_content"] = visible(reasoning)
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

    A state is a method that gets the trajectory and returns the next state, so a subclass can add
    one: `return self.reflecting`. If a tool raises, exceeds its deadline or is called wrongly, the
    model reads a message about it, and a metric counts it."""

    def __init__(self, engine, tokenizer, processor, task, args):
        super().__init__(engine, tokenizer, processor, task, args)
        self.tools_kwargs = {}  # of the row
        self.interaction_turns = 0  # replies of the simulated user: max_user_turns limits them
        self.created = {}  # tool -> the error of its `create`, or None
        self.creating = defaultdict(asyncio.Lock)  # by tool name

    async def run(self, sampling_params, **row) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Runs one rollout: its turns, then the tools' `calc_reward`, then their `release`."""
        self.sampling_params = sampling_params
        self.stops = self.stop_token_ids(sampling_params)  # the ids that end a turn
        self.tools_kwargs = row_kwargs(row, "tools_kwargs")
        self.tools = task_tools(self.task, self.tools_kwargs)  # by name
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
        outputs = trajectory.outputs()
        return outputs if len(outputs) > 1 else outputs[0]

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
        if self.interaction:
            text = await self._ask_interaction(
                self.interaction.start, trajectory.request_id, **self.interaction_kwargs)
            if text is not None:
                trajectory.messages.append({"role": "user", "content": clean(text)})
                prompt = self.prompt(
                    trajectory.messages, self.schemas, trajectory.images, trajectory.trusted)
                trajectory.begin(*prompt)
        if self.tools:
            trajectory.count("tool_calls", 0)  # so that the metric exists
        for name in self.tools:
            trajectory.count(f"tool_calls/{name}", 0)
        return self.generating

    async def generating(self, trajectory):
        """Samples an assistant turn. Next come its tools, the user's answer or the end."""
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

    def _at_assistant_limit(self, trajectory, more=0):
        """Returns whether `more` further turns would reach max_assistant_turns."""
        return 0 < self.args.max_assistant_turns <= trajectory.assistant_turns + more

    def parse(self, trajectory, text):
        """Returns the tool calls of a turn, including malformed ones (see `parse_tool_calls`).

        Puts those that will be executed into the trajectory's last message if one of them has a
        name, and the chat template shows tool calls. Otherwise they stay in its text."""
        content, calls = parse_tool_calls(text, self.args.tool_parser, self.tokenizer, self.schemas)
        shown = calls[: self.args.max_parallel_calls]
        has_name = any(tool_call["name"] for tool_call in shown)
        if has_name and self.chat_template(self.stops).shows_calls:
            turn = trajectory.assistant_turns
            set_tool_calls(trajectory.messages[-1], content, shown, turn)
        return calls

    async def processing_tools(self, trajectory):
        """Executes the first max_parallel_calls calls at once, and appends their responses."""
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
                "content": self._content(trajectory, response),
                "tool_call_id": tool_call.get("id") or call_id(trajectory.assistant_turns, number),
            })
            images += response.images
        n_left_out = len(trajectory.tool_calls) - len(calls)
        if n_left_out:
            trajectory.count("tool_errors", n_left_out)
            note = f"Error: {n_left_out} more calls were not executed: the limit is {limit} a turn"
            messages[-1]["content"] = join_contents([messages[-1]["content"], note], "\n")
        # Some templates refuse tool messages after a turn whose calls stayed in its text (`parse`).
        calls_are_in_text = "tool_calls" not in trajectory.messages[-1]
        if calls_are_in_text and not self.chat_template(self.stops).accepts(IN_TEXT):
            contents = [message["content"] for message in messages]
            messages = [{"role": "user", "content": join_contents(contents, "\n")}]
        return self.reply(trajectory, messages, images)

    def _record_response(self, trajectory, name, response, n_images):
        """Counts a tool call, records its reward and metrics, and returns what the model reads.

        response: a ToolResponse, or an exception. n_images: images in the rollout so far."""
        is_known = name in self.tools  # the model may write any name
        if is_known:
            trajectory.count(f"tool_calls/{name}")
        try:
            if isinstance(response, BaseException):
                raise response
            n_more = len(response.images)
            limit = self.args.max_images
            if n_images + n_more > limit:
                raise RefusedCallError(f"no room for {n_more} more images: {n_images} of {limit}")
            trajectory.record("tool", name, response.reward, response.metrics)
            return response
        except BaseException as error:
            kind = "tool_timeouts" if isinstance(error, CallTimeoutError) else "tool_errors"
            trajectory.count(kind)
            if is_known:
                trajectory.count(f"{kind}/{name}")
                if not isinstance(error, (CallTimeoutError, RefusedCallError)):
                    trajectory.count(f"tool_exceptions/{name}")
                    print_first_exception(name, error, self.task)
            return ToolResponse(f"Error: {text_of(error)}")

    def _content(self, trajectory, response):
        """Returns the content of a tool's message: a text, or a list of parts with images."""
        limit = self.args.max_tool_response_tokens
        side = self.args.tool_response_truncate_side
        text = shorten(response.text, limit, side, self.tokenizer)
        if text != clean(response.text):
            trajectory.count("tool_responses_cut")
        if not response.images:
            return text
        images = [{"type": "image"} for _ in response.images]
        return join_contents([text, images], "") if text else images

    async def call_tool(self, trajectory, tool_call) -> ToolResponse:
        """Executes a call of `parse_tool_calls`. Returns a ToolResponse whose images are loaded.

        Raises RefusedCallError if it is malformed or names an unknown tool, CallTimeoutError after
        tool_timeout, and whatever the tool raises."""
        name = tool_call["name"]
        if tool_call["error"]:
            raise RefusedCallError(tool_call["error"])
        if name not in self.tools:
            raise RefusedCallError(f"there is no tool {name!r}; the tools are {sorted(self.tools)}")
        execution = self._execute(trajectory, name, tool_call["arguments"])
        return await in_time(name, self.args.tool_timeout, execution)

    async def _execute(self, trajectory, name, arguments):
        """Runs a tool's `execute`, after its `create`, and returns a ToolResponse."""
        async with self.creating[name]:  # parallel calls wait for the same `create`
            if name not in self.created:
                cancelled = RuntimeError(f"the tool {name!r} was cancelled in its `create`")
                self.created[name] = cancelled
                try:
                    await self._tool_method(trajectory, name, "create")
                    self.created[name] = None
                except Exception as error:
                    self.created[name] = error  # for every call of the tool
        if self.created[name]:
            raise self.created[name]
        response = await self._tool_method(trajectory, name, "execute", copy.deepcopy(arguments))
        reward = metrics = None  # a tuple's win over those of a ToolResponse in it
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

    async def _tool_method(self, trajectory, name, method, *arguments):
        """Calls a method of a tool with its keyword arguments in the row's tools_kwargs."""
        kwargs = self.tools_kwargs.get(name, {}).get(f"{method}_kwargs") or {}
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
        """Lets the simulated user answer and reward the assistant's turn."""
        done, text, reward, metrics = await self._ask_interaction(
            self.interaction.generate_response,
            trajectory.request_id,
            copy.deepcopy(trajectory.messages),  # an Interaction may modify them
            **self.interaction_kwargs,
        )
        trajectory.record("interaction", self.interaction.name, reward, metrics)
        if done:  # the policy reads no more
            return None
        at_user_limit = 0 < self.args.max_user_turns <= self.interaction_turns
        if at_user_limit or self._at_assistant_limit(trajectory):
            trajectory.stop_reason = "max_turns"
            return None
        self.interaction_turns += 1
        return self.reply(trajectory, [{"role": "user", "content": clean(text)}])

    def reply(self, trajectory, messages, images=()):
        """Appends what tools or the user said. Returns the next state: `generating`, or None if
        the messages and an answer to them do not fit."""
        fits = self.append(trajectory, messages, self.schemas, self.stops, images)
        return self.generating if fits else None

    async def close(self, trajectory):
        """Releases the tools and the interaction. Errors are counted, and not raised."""
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
    SUMMARISE is appended to it, unless only one turn is left. The policy answers with a summary,
    which needs room in the window. A new sequence then begins with the opening messages, the
    summary and CONTINUE. All sequences share the rollout's reward, so a summary is rewarded for
    what follows it.

        processing_tools or interacting -> compacting -> generating ..."""

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
            n_tokens += len(self.tokenizer.encode(str(message["content"])))
        is_last_turn = self._at_assistant_limit(trajectory, more=1)
        if is_last_turn or n_tokens < (self.args.compact_at or 0.75 * self.window):
            return super().reply(trajectory, messages, images)
        *others, last = messages
        # Not a message of its own: some templates refuse two of a user in a row.
        content = join_contents([last["content"], self.SUMMARISE], "\n\n")
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

PRINTED = set()  # the tools whose first exception was printed in this process


def print_first_exception(tool: str, error: BaseException, task):
    """Prints the first exception of each tool in this process, with its line in the task file."""
    if tool not in PRINTED:
        PRINTED.add(tool)
        where = last_line(error, getattr(task, "__file__", ""))
        print(f"\nfirst exception of tool {tool!r}{where}: {reason(error)}", file=sys.stderr)


class Tool:
    """A tool with state or resources, which a subclass keeps by request_id for each rollout.

    A rollout that calls the tool runs `create` once before the first `execute`, `calc_reward` once
    at its end, and then `release`, even after a failure. Subclasses must override `execute`, and
    set `name` and `schema` (the JSON schema of an OpenAI function)."""

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
    """A Python function as a tool. Raises BadInput if it can't be one (see `Signature`)."""

    def __init__(self, function: Callable):
        self.function = function
        self.signature = Signature(function)
        self.name = self.signature.name
        self.schema = self.signature.schema

    async def execute(self, request_id: str, arguments: dict, /, **execute_kwargs):
        """Calls the function. execute_kwargs win over the model's arguments.

        A tuple that is not (response, reward, metrics) is returned as a list."""
        values = self.signature.arguments(arguments, execute_kwargs)
        result = await call(self.function, **values)
        if isinstance(result, tuple):
            is_triple = len(result) == 3 and isinstance(result[2], dict | None)
            return result if is_triple else list(result)
        return result


_function_tool = functools.cache(FunctionTool)


def as_tool(tool: Tool | Callable) -> Tool:
    """Returns a Tool unchanged, and a function as a Tool (cached). Raises BadInput otherwise."""
    if isinstance(tool, Tool):
        return tool
    if not inspect.isroutine(tool):
        raise BadInput(f"TOOLS holds {tool!r}, which is neither a Tool instance nor a function")
    return _function_tool(tool)


def row_kwargs(row: dict, name: str) -> dict:
    """Returns a row's tools_kwargs or interaction_kwargs, from a column or, as verl, extra_info."""
    extra_info = row.get("extra_info") or {}
    return row.get(name) or extra_info.get(name) or {}


def task_tools(task, tools_kwargs: dict | None = None) -> dict[str, Tool]:
    """Returns the task's tools by name: those that are keys of tools_kwargs, or all if it is empty.

    Raises BadInput for what can't be a tool, two tools of the same name, and an unknown key."""
    tools = {}
    for tool in map(as_tool, getattr(task, "TOOLS", None) or ()):
        need(tool.name not in tools, f"two of the task's TOOLS have the same name, {tool.name!r}")
        tools[tool.name] = tool
    if not tools_kwargs:
        return tools
    unknown = sorted(tools_kwargs.keys() - tools)
    need(not unknown, f"tools_kwargs names {unknown}, but the task's TOOLS are {sorted(tools)}")
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
    """Returns the task's interaction named kwargs["name"] or, without a name, its only one.

    None if it has none, or several and kwargs are empty. Raises BadInput for an unknown name, and
    for kwargs without a name if there are several."""
    interactions = {each.name: each for each in getattr(task, "INTERACTIONS", None) or ()}
    name = kwargs.get("name")
    if name is None and len(interactions) < 2:
        return next(iter(interactions.values()), None)
    need(
        not kwargs or name in interactions,
        f"interaction_kwargs names {name!r}, but needs a 'name' of the task's "
        f"INTERACTIONS: {sorted(interactions)}")
    return interactions.get(name)
