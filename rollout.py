"""The colocated engine, and the pool of rollouts that it serves.

The MAIN thread owns the device: it calls `Engine.step` during a rollout and trains in between. One
BACKGROUND thread runs one event loop for the whole run, with all agent loops, tools and rewards.
An agent loop awaits `Engine.generate`, which posts a request. The main thread picks it up at its
next step. Outside a rollout phase, requests wait.

The engine is a state machine, so that nothing can be generated from stale weights:

    asleep --wake_weights--> weights --load_weights--> synced
    synced --wake_kv--> awake --sleep--> asleep

A `Pool` starts groups of rollouts and hands out batches of those that are done. In this file a
group is all rollouts of a prompt. (Which units are compared is another matter: `output.group`.)
With --max_staleness other agent loops are still running then. They wait in `generate` during the
update, while their tools keep running, and vLLM finishes their tokens with the new weights
(`sleep(keep=True)`). A synchronous run is one with staleness 0."""

import asyncio
import copy
import functools
import gc
import itertools
import json
import math
import pickle
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import set_seed

import data
from agent_loop import AgentLoopBase, AgentLoopOutput, TokenOutput, agent_loop_class, visible_text
from flatrl import vllm_engine
from flatrl.bad_input import (
    BadInput,
    BadReward,
    NothingLeft,
    RunFailed,
    check_ids,
    need,
    refusing,
)
from flatrl.compact import compact
from flatrl.hints import tell
from flatrl.launch import Bar
from flatrl.metrics import describe, grouped
from flatrl.processes import (
    PATIENCE,
    Background,
    Stop,
    Stopped,
    all_gather,
    gather_unless_stopped,
    memory,
)
from flatrl.rows import copy_row
from flatrl.shared_state import check_refused
from flatrl.units import last_outputs, rollout_of, unit_of
from flatrl.user_code import call, checked_number, in_time
from flatrl.vision import check_images, expand, merge_images

MAX_CONCURRENT = 1024  # rollouts that run on one rank; many of them wait for tools
REWARD_TIMEOUT = 300.0  # seconds for a call of the task's reward or sampler


# ---------------------------------------------------------------- the engine


@dataclass(eq=False)
class _Request:
    """One call of `Engine.generate`."""

    call_id: str  # unique among running ones: vLLM's request id
    rollout_name: str  # of the rollout that calls
    prompt_ids: list[int]
    params: dict  # vLLM's sampling parameters
    images: list | None
    future: asyncio.Future | None  # gets the result; None on the followers of a --tp team
    versions: list[int] = field(default_factory=list)  # of each token sampled so far

    @property
    def is_given_up(self) -> bool:
        """True if nobody awaits the result any more."""
        return self.future is not None and self.future.cancelled()


class Engine:
    """vLLM in this process. The main thread calls `step`, the background thread awaits `generate`.

    state: "asleep" | "weights" | "synced" | "awake"; calls out of order raise RuntimeError.
    version: that of the weights loaded last, -1 before the first sync. Token ids from vocab_size
    on and image_token_id (None for a text model) are never sampled.

    With --tp n, n consecutive ranks are a team: `generate` and `step` are called on the first of
    them, the leader, and the others call `follow` meanwhile."""

    def __init__(
        self,
        model: str,
        args,
        device: torch.device,
        stop_token_ids: Iterable[int] = (),
        vocab_size: int | None = None,
        image_token_id: int | None = None,
    ):
        vllm_engine.prepare_vllm(device, args.tp)
        from vllm import LLM

        gc.freeze()  # the modules: vLLM looks for garbage seven times as it starts and ends
        self.args = args
        self.stop_token_ids = sorted(set(stop_token_ids))
        # It may fail, for example, for an unsupported block_size or too little memory.
        with refusing(f"--engine_args {args.engine_args}: vLLM's engine does not start"):
            has_images = image_token_id is not None
            self.llm = LLM(**vllm_engine.vllm_arguments(model, args, device, has_images))
        self.core = self.llm.llm_engine
        if json.loads(args.engine_args).get("enable_sleep_mode") is False:
            vllm_engine.keep_loaded(self.core)
        if device.type == "cpu" and args.tp > 1:
            vllm_engine.unlink_shared_memory()
        self.vocab_size = vocab_size or self.core.model_config.get_vocab_size()
        never = [slice(self.vocab_size, None)]
        if image_token_id is not None:
            never.append(image_token_id)
        self.llm.apply_model(lambda model: vllm_engine.never_sample(model, never))
        vllm_engine.skip_middle_tokens(self.core.output_processor)
        self.version = -1
        self.leader = dist.get_rank() % args.tp == 0  # the first of args.tp consecutive ranks
        self.team = None  # the process group of the ranks that share this engine
        if args.tp > 1:
            self.team, _ = dist.new_subgroups(args.tp, timeout=PATIENCE, backend="gloo")

        # Both threads use these, and hold `changed` meanwhile.
        self.changed = threading.Condition()
        self.inbox = []  # requests that vLLM does not have yet
        self.active = set()  # names of rollouts that run: --deterministic waits for them
        self.was_poked = False  # since the last `step`
        # Only the background thread uses this, except that `sleep` clears it.
        self.calls = Counter()  # of `generate`, by rollout name
        # Only the main thread uses these.
        self.running = {}  # call_id -> request that vLLM has
        self.statistics = Counter()  # sums, see Rollouts; a pool's own while it uses the engine
        self.state = "awake"
        self.sleep()  # frees the memory until the first sync

    # -- states

    def _require(self, state):
        if self.state != state:
            raise RuntimeError(f"the engine is {self.state!r}, this call needs {state!r}")

    def wake_weights(self):
        """Maps the weights' memory. Raises BadInput if a GPU has too little for the engine."""
        self._require("asleep")
        if torch.cuda.is_available():
            from vllm.device_allocator.cumem import CuMemAllocator

            free = min(all_gather(torch.cuda.mem_get_info()[0]))
            needed = CuMemAllocator.get_instance().get_current_usage()
            need(
                needed <= free,
                f"the engine takes {needed / 1e9:.1f} GB of a GPU, the trainer leaves "
                f"{free / 1e9:.1f}: lower --gpu_memory_utilization, or give --offload all",
            )
        self.core.wake_up(tags=["weights"])
        self.state = "weights"

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int):
        """Copies all parameters into the engine.

        named_tensors: (name in a checkpoint, tensor) pairs, each taken when the one before is
        done. A tied head may come under both names. Raises RuntimeError with the name of a
        parameter that failed or did not arrive. The engine is unusable after that."""
        from vllm.config import set_current_vllm_config

        self._require("weights")
        config = self.core.vllm_config
        with set_current_vllm_config(config):
            self.llm.apply_model(
                lambda model: vllm_engine.load_into(model, named_tensors, config.model_config)
            )
        self.version = version
        self.state = "synced"

    def forget_prompts(self):
        """Empties the caches of prompts and of images, as sleep does. No request may be running."""
        self.core.reset_encoder_cache()
        self.core.reset_prefix_cache()

    def wake_kv(self):
        """Maps the KV cache; the engine can generate from here on."""
        self._require("synced")
        self.core.wake_up(tags=["kv_cache"])
        self.state = "awake"

    def sleep(self, level: int = 2, keep: bool = False):
        """Frees the memory of the KV cache and of the weights, and empties the prefix cache.

        level: 1 copies the weights to the host, 2 drops them: the next sync brings new ones.
        keep: unfinished requests stay, and continue under the weights of the next wake. Without
        `keep` they raise RuntimeError. On a CPU, and with enable_sleep_mode false in
        --engine_args, no memory is freed; all else is the same."""
        self._require("awake")
        with self.changed:
            n = len(self.pending)
        if n and not keep:
            raise RuntimeError(f"{n} rollouts are unfinished: end them first")
        if keep:
            self.mark_versions()
        else:  # no rollout is running
            self.calls.clear()
        self.core.sleep(level, "keep" if keep else "abort")
        self.state = "asleep"

    def mark_versions(self):
        """Records which weights sampled the tokens of unfinished requests, and counts these."""
        for state in self.core.output_processor.request_states.values():
            request = self.running.get(state.external_req_id)
            if request:
                self._stamp(request, state.detokenizer.num_output_tokens())

    def _stamp(self, request, n_tokens):
        """Records the version of the newest of a request's n_tokens tokens, and counts them."""
        n_new = n_tokens - len(request.versions)
        request.versions += [self.version] * n_new
        self.statistics["tokens"] += n_new

    def close(self):
        """Shuts down vLLM, which also destroys torch's process group. A run does it last."""
        if torch.cuda.is_available() and self.state == "asleep":
            # vLLM would print an error for each part of its memory that sleep has unmapped.
            torch.cuda.empty_cache()
            self.core.wake_up()
        self.core.engine_core.shutdown()

    # -- background thread

    async def generate(
        self,
        *,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict,
        image_data: list | None = None,
    ) -> TokenOutput:
        """Samples the tokens that follow a prompt; waits while the engine sleeps or trains.

        request_id names the rollout. The sampling seed is a function of --seed, this name
        and the number of the call. sampling_params are vLLM's. image_data: PIL images, each with
        one placeholder in prompt_ids. Raises ValueError for prompt_ids that are invalid or
        longer than the window, and for bad sampling parameters."""
        prompt_ids = list(prompt_ids)
        check_ids(prompt_ids, self.vocab_size)
        turn = self.calls[request_id]
        self.calls[request_id] += 1
        # Agent loops give a smaller max_tokens. Without any, vLLM would stop after 16 tokens.
        room = self.args.window - len(prompt_ids)  # finite, unlike AgentLoopBase.window
        params = {
            "seed": data.stable_hash(self.args.seed, request_id, turn),
            "stop_token_ids": self.stop_token_ids,
            "max_tokens": max(1, min(self.args.max_response_tokens, room)),
        } | sampling_params
        if "min_tokens" in params:  # of --sampling_args: a late turn may have fewer tokens left
            params["min_tokens"] = min(params["min_tokens"], params["max_tokens"])
        future = asyncio.get_running_loop().create_future()
        call_id = f"{request_id}#{turn}"
        request = _Request(call_id, request_id, prompt_ids, params, image_data, future)
        with self.changed:
            self.inbox.append(request)
            self.changed.notify()
        result = await future
        if isinstance(result, Exception):
            raise result
        return result

    def enter(self, rollout_name: str):
        """Records that a rollout starts: with --deterministic, model steps wait for its call."""
        with self.changed:
            self.active.add(rollout_name)

    def leave(self, rollout_name: str):
        """Records that a rollout has ended."""
        with self.changed:
            self.active.discard(rollout_name)
            self.changed.notify()
        self.calls.pop(rollout_name, None)

    def poke(self):
        """Makes a waiting `step` return, so that its caller checks again for ended groups."""
        with self.changed:
            self.was_poked = True
            self.changed.notify()

    # -- main thread

    @property
    def pending(self) -> set[str]:
        """The names of the rollouts that wait for tokens. Hold `changed` when you call it."""
        requests = (*self.inbox, *self.running.values())
        return {request.rollout_name for request in requests if not request.is_given_up}

    def _has_work(self):
        """Returns whether a model step can start now."""
        # Which requests share a step must not depend on timing: wait for the running loops.
        must_wait = self.args.deterministic and not self.active <= self.pending
        return bool(self.inbox or self.running) and not must_wait

    def step(self, timeout: float = 0.2):
        """Takes in new requests, for which it waits up to `timeout` seconds; runs a model step.
        Neither after `poke`, nor (if --deterministic) before all running loops wait."""
        self._require("awake")
        started = time.perf_counter()
        added = []
        with self.changed:
            self.changed.wait_for(lambda: self.was_poked or self._has_work(), timeout)
            has_work = self._has_work() and not self.was_poked
            self.was_poked = False
            if has_work:
                added = self.inbox
                self.inbox = []
        self.statistics["idle_s"] += time.perf_counter() - started
        # Not in the order of arrival, which depends on timing.
        added.sort(key=lambda request: request.call_id)
        self._advance(added, runs_model=has_work)

    def _advance(self, added: Sequence[_Request] = (), runs_model=False, aborts_all=False):
        """Makes all ranks of the team abort and start requests, and run a model step."""
        added = [request for request in added if not request.is_given_up]
        aborted = [
            call_id
            for call_id, request in self.running.items()
            if aborts_all or request.is_given_up
        ]
        if aborted or runs_model:
            if self.team:
                copies = [replace(request, future=None) for request in added]
                self._broadcast((aborted, copies, runs_model))
            self._carry_out(aborted, added, runs_model)

    def _broadcast(self, command=None):
        """Returns the arguments of `_carry_out`, or None, that the leader passes to its team."""
        box = [command]
        dist.broadcast_object_list(box, group=self.team, group_src=0)
        return box[0]

    def follow(self):
        """Does what the leader does, until the leader calls `end_phase`."""
        while command := self._broadcast():
            self._carry_out(*command)

    def end_phase(self):
        """Ends a rollout phase: aborts the calls that were given up, and releases followers."""
        self._advance()
        if self.team and self.leader:
            self._broadcast(None)

    def _carry_out(self, aborted: list[str], added: list[_Request], runs_model: bool):
        """Aborts and adds requests, runs a model step, and hands out the results."""
        self.core.abort_request(aborted)
        for call_id in aborted:
            del self.running[call_id]

        results = []
        for request in added:
            prompt = {"prompt_token_ids": request.prompt_ids}
            if request.images:
                prompt["multi_modal_data"] = {"image": request.images}
            try:
                params = vllm_engine.sampling_params(request.params)
                self.core.add_request(request.call_id, prompt, params)
                self.running[request.call_id] = request
            except Exception as error:  # of any type; only this request fails
                results.append((request, ValueError(str(error))))

        if runs_model and self.running:
            self.statistics["steps"] += 1
            for output in self.core.step():
                if output.finished:
                    request = self.running.pop(output.request_id)
                    results.append((request, self._result(request, output)))

        def hand_out():  # on the background thread, once for the whole step
            for request, result in results:
                if not request.future.done():
                    request.future.set_result(result)

        if results and self.leader:  # on followers `future` is None
            loop = results[0][0].future.get_loop()
            loop.call_soon_threadsafe(hand_out)

    def _result(self, request, output) -> TokenOutput:
        """Returns what a finished request sampled, and counts its tokens."""
        completion = output.outputs[0]
        token_ids = list(completion.token_ids)
        prompt_ids = list(output.prompt_token_ids)
        self._stamp(request, len(token_ids))
        self.statistics["prompt_tokens"] += len(prompt_ids)
        self.statistics["cached_tokens"] += output.num_cached_tokens or 0
        reason = completion.finish_reason
        if reason not in ("stop", "length"):
            reason = "abort"
        logprobs = [*completion.logprobs.logprobs]
        routes = getattr(completion, "routed_experts", None)  # with --router_replay
        return TokenOutput(token_ids, logprobs, request.versions, reason, prompt_ids, routes)

    def abort_all(self):
        """Drops all requests. `Pool.end` has cancelled their rollouts, which may be cleaning up."""
        with self.changed:
            self.inbox.clear()
            self.active.clear()
        self._advance(aborts_all=True)


# ---------------------------------------------------------------- the rollouts of a step


def _without(*marks: str) -> property:
    """Returns a property of Rollouts: the outputs that have none of these marks in `extra`."""

    def outputs(rollouts) -> list[AgentLoopOutput]:
        return [output for output in rollouts.outputs if output.extra.keys().isdisjoint(marks)]

    return property(outputs)


@dataclass
class Rollouts:
    """The rollouts of one step, from all ranks; or those of one prompt's group.

    outputs: in the order of (prompt, sample, segment). Each output.extra has these three numbers,
    and its row's "index". It may have marks: "filtered" if dynamic sampling replaced its group,
    "greedy" if it is a baseline of ReMax, "demonstration" if its turns were given.
        sampled    without greedy, demonstration     what the policy did
        trained    without greedy, filtered          what the update learns from
        compared   without all three                 those whose rewards give advantages
    errors: a dict for each rollout that failed, with its traceback.
    statistics: sums over the engines: "steps" of the model, "tokens" sampled, "prompt_tokens" of
    all calls, and "cached_tokens" among those."""

    outputs: list[AgentLoopOutput] = field(default_factory=list)
    errors: list[dict] = field(default_factory=list)
    skipped: int = 0  # rollouts whose agent loop returned []
    statistics: Counter = field(default_factory=Counter)
    idle_s: list[float] = field(default_factory=list)  # of each engine: seconds without work
    seconds: float = 0.0
    sync_s: float = 0.0  # of the weight sync before
    graders: dict = field(default_factory=dict)  # (prompt, sample) -> this rank's asyncio task

    sampled = _without("greedy", "demonstration")
    trained = _without("greedy", "filtered")
    compared = _without("greedy", "filtered", "demonstration")

    @property
    def greedy(self) -> list[AgentLoopOutput]:
        """ReMax's baselines."""
        return [output for output in self.outputs if "greedy" in output.extra]

    @property
    def lost(self) -> Counter:
        """The number of rollouts lost, by kind."""
        return Counter(error["kind"] for error in self.errors) + Counter(skipped=self.skipped)

    def sort(self):
        """Puts outputs and errors into the order of prompts, samples and segments."""
        self.outputs.sort(key=lambda output: (*rollout_of(output), output.extra["segment"]))
        self.errors.sort(key=lambda error: (error["prompt"], error["sample"]))

    def require(self, condition, problem: str):
        """Raises NothingLeft, with the rollouts that were lost, unless the condition holds."""
        if not condition:
            first = self.errors[0]["error"] if self.errors else "none was raised"
            raise NothingLeft(f"{problem}: {dict(self.lost)}; an error: {first.splitlines()[-1]}")

    def metrics(self, engine: Engine | None) -> dict:
        """Returns metrics of outputs with rewards, groups, failures and, if given, the engine."""
        metrics = self.group_metrics()
        if self.sampled:
            metrics |= describe(self.sampled, data.by_unit(self.sampled))
        demonstrations = [output for output in self.outputs if "demonstration" in output.extra]
        if demonstrations:
            metrics["rollout/demonstrations"] = len({*map(rollout_of, demonstrations)})
            rewards = data.by_unit(demonstrations).task_rewards
            metrics["reward/demonstrations"] = rewards.mean().item()
        for kind in ("failed_agent_loop", "failed_reward", "skipped"):
            metrics[f"rollout/{kind}"] = self.lost[kind]
        prompts = [output.extra["prompt"] for output in self.outputs]
        prompts += [error["prompt"] for error in self.errors]
        metrics["rollout/first_prompt"] = min(prompts)
        metrics["rollout/last_prompt"] = max(prompts)
        if engine is None:
            return metrics

        total = self.statistics
        metrics |= {
            "timing/sync_s": self.sync_s,
            "timing/rollout_s": self.seconds,
            "timing/idle_s": self.idle_s,  # one number for each engine
            "throughput/tokens_per_s": total["tokens"] / self.seconds,
            "throughput/idle_share": fmean(self.idle_s) / self.seconds,
            "throughput/prefix_cache_hit_rate": total["cached_tokens"]
            / max(1, total["prompt_tokens"]),
        }
        if total["steps"]:
            busy = len(self.idle_s) * self.seconds - sum(self.idle_s)
            metrics["timing/engine_step_s"] = busy / total["steps"]
        for where, gb in memory().items():
            metrics[f"memory/{where}_gb"] = gb
        return metrics

    def group_metrics(self) -> dict:
        """Returns metrics of compared groups (or prompts: filtered_groups, missing_baselines)."""
        units = data.by_unit(self.compared)
        group_sizes = units.groups.unique(return_counts=True)[1]
        signal = data.groups_with_signal(units, units.task_rewards)
        filtered = {output.extra["prompt"] for output in self.sampled if "filtered" in output.extra}
        metrics = {
            "rollout/filtered_groups": len(filtered),
            "rollout/singleton_groups": (group_sizes == 1).sum().item(),
            "rollout/zero_std_groups": len(group_sizes) - len(signal),
        }
        if self.greedy:
            baselines = {output.extra["prompt"] for output in self.greedy}
            prompts = set(units.prompts.tolist())
            metrics["rollout/missing_baselines"] = len(prompts - baselines)
            rewards = data.by_unit(self.greedy).task_rewards
            metrics["reward/greedy"] = rewards.mean().item()
        return metrics


# ---------------------------------------------------------------- one rollout: loop, then reward


@dataclass(eq=False)
class Member:
    """One rollout of a prompt's group: its identity and its options."""

    name: str  # unique among running rollouts; sampling seeds depend on it
    prompt: int
    sample: int  # its number in the group
    step: int
    validate: bool  # True in an evaluation
    is_greedy: bool = False  # a baseline of ReMax
    demonstration: Sequence[dict] = ()  # turns that are played instead of sampled


@dataclass
class DemonstrationEngine:
    """An engine that replays a demonstration: each call returns its next turn.

    No policy sampled these tokens, so their logprob is 0.0 and their version -1. If no turn
    is left, the result is empty, and its stop reason "abort" ends the rollout."""

    turns: list[dict]  # the assistant's messages that are still to come
    loop: AgentLoopBase  # which calls the engine
    stops: set[int]  # the ids that may end a turn
    n_played: int = 0  # turns

    async def generate(self, *, prompt_ids, sampling_params, image_data=None, **ignored):
        """Returns the next turn as a TokenOutput. Raises ValueError if it is too long."""
        ids = []
        if self.turns:
            self.n_played += 1
            template = self.loop.chat_template(self.stops)
            ids = template.turn_ids(self.turns.pop(0), prompt_ids, self.n_played)
        n = len(ids)
        room = sampling_params.get("max_tokens", n)
        if n > room:
            raise ValueError(f"a turn of the demonstration has {n} tokens, with room for {room}")
        prompt_ids = expand(prompt_ids, image_data or (), self.loop.processor)
        return TokenOutput(ids, [0.0] * n, [-1] * n, "stop" if ids else "abort", prompt_ids)


@dataclass(eq=False)
class RolloutEngine:
    """The engine of one rollout: an agent loop gets it in place of the Engine.

    Calls go out under the rollout's name: seeds depend on (seed, step, prompt, sample, turn)."""

    engine: Engine | DemonstrationEngine | None  # None once the loop is over
    name: str
    generate_s: float = 0.0  # seconds spent in calls
    callers: set = field(default_factory=set)  # the tasks that await a call now

    async def generate(self, *, request_id: str, **call) -> TokenOutput:
        """Samples one turn. Raises RuntimeError after the loop, as the engine may sleep then."""
        if self.engine is None:
            raise RuntimeError("the rollout is over: call the engine inside the agent loop's run")
        started = time.perf_counter()
        caller = asyncio.current_task()
        self.callers.add(caller)
        try:
            return await self.engine.generate(request_id=self.name, **call)
        finally:
            self.callers.discard(caller)
            self.generate_s += time.perf_counter() - started

    def close(self):
        """Ends the rollout: cancels calls that the loop left behind in tasks of its own."""
        self.engine = None
        for caller in self.callers:
            caller.cancel()


async def run_agent_loop(run, member: Member, row: dict, sampling: dict) -> list[AgentLoopOutput]:
    """Runs the agent loop of a row. Returns its outputs, completed by `complete_output`.

    run: train.Run. row: a copy, which the loop may change. sampling: vLLM's parameters. Raises what
    the loop raises, TypeError for a wrong result, and ValueError for unknown ids or images."""
    args = run.args
    engine = run.engine
    row |= {"step": member.step, "rollout_n": member.sample, "validate": member.validate}
    rollout_engine = RolloutEngine(engine, member.name)
    loop_class = agent_loop_class(row, run.task, args)
    loop = loop_class(rollout_engine, run.tokenizer, run.processor, run.task, args)

    # A copy, because the loop may change its parameters: add a stop, for example.
    sampling_params = copy.deepcopy({**sampling, "stop_token_ids": engine.stop_token_ids})
    if sampling_params.get("ignore_eos"):
        sampling_params["stop_token_ids"] = []  # vLLM would still end there
    if member.is_greedy:
        sampling_params["temperature"] = 0.0

    turns = list(member.demonstration)  # the DemonstrationEngine takes out those that it plays
    if turns:
        # Only now, because it needs the loop, which was built with its engine.
        rollout_engine.engine = DemonstrationEngine(turns, loop, set(engine.stop_token_ids))

    # Tool and chat agents end at trajectory_timeout by themselves, and keep their tokens. A call
    # under way, calc_reward, release and finalize may then take a tool timeout each.
    patience = args.trajectory_timeout
    if patience:
        patience += 4 * args.tool_timeout
    try:
        returned = await in_time(member.name, patience, loop.run(sampling_params, **row))
    finally:
        rollout_engine.close()
    outputs = list(returned) if isinstance(returned, list | tuple) else [returned]
    for segment, output in enumerate(outputs):
        if not isinstance(output, AgentLoopOutput):
            name = type(loop).__name__
            raise TypeError(f"{name}.run returned {output!r:.80}, not an AgentLoopOutput")
        check_ids(output.prompt_ids + output.response_ids, engine.vocab_size)
        check_images(output, run.processor)
        complete_output(output, segment, run.tokenizer, member, row)
        if args.hints:
            tell(output, row, loop)
        else:  # what a loop has set is not used
            output.extra.pop("told_prompt_ids", None)
    if turns:  # not all were played
        why = outputs[-1].stop_reason if outputs else "none"
        raise ValueError(f"{len(turns)} turns of the demonstration are left; stop reason: {why}")
    if outputs:
        outputs[-1].metrics["generate_s"] = rollout_engine.generate_s
    return outputs


def complete_output(output: AgentLoopOutput, segment: int, tokenizer, member: Member, row: dict):
    """Fills in what an agent loop need not: numbers and marks (see Rollouts), text, messages."""
    numbers = {"prompt": member.prompt, "sample": member.sample, "segment": segment}
    output.extra = {**output.extra, "index": row.get("index"), **numbers}
    if member.demonstration:
        output.extra["demonstration"] = True
    if member.is_greedy:
        output.extra["greedy"] = True
    if not output.text:
        output.text = visible_text(tokenizer, output.response_ids, output.response_mask)
    if not output.messages:
        output.messages = [*row["prompt"], {"role": "assistant", "content": output.text}]


async def grade_rollout(run, outputs: list[AgentLoopOutput], row: dict, reward=None):
    """Sets the rewards of a rollout's outputs (`set_rewards`), in REWARD_TIMEOUT seconds."""
    await in_time("the reward", REWARD_TIMEOUT, set_rewards(run.task, outputs, row, reward))
    if "states" in run.args.estimator_takes:
        # Raises if states and turns differ in number: now, so that it costs this rollout alone.
        data.turn_states(data.make_batch(outputs))


async def set_rewards(task: ModuleType, outputs: list[AgentLoopOutput], row: dict, reward=None):
    """Sets the terminal reward of each unit of a rollout, the same for all its outputs.

    It is the reward of the unit's last output, if the loop set one, else what the task's reward
    function, or `reward`, returns for that output and a copy of the row. Raises ValueError if a
    reward is not finite, if a turn's reward is at no token, or if a unit has two rewards or groups,
    and BadReward if one is not a number, or if user code used an alarm or os.chdir."""
    units = grouped([output.unit for output in outputs], outputs)
    for unit, outputs_of_unit in units.items():
        last = outputs_of_unit[-1]
        for output in outputs_of_unit:
            if output.reward not in (None, last.reward) or output.group != last.group:
                raise ValueError(
                    f"output {outputs.index(output)} of a rollout has another reward or group than "
                    f"the last of its unit {unit!r}: name a `unit` for each, or use turn_rewards"
                )
        value = last.reward
        if value is None:
            value = await call(reward or task.reward, last, copy_row(row))
            check_refused()
        value = _checked_reward(value, row, getattr(task, "__file__", "the task"))
        for output in outputs_of_unit:
            output.reward = value

    for output in outputs:
        # Indexing a range allows -1 for the last token, and raises if the index is too large.
        positions = range(max(1, len(output.response_ids)))
        output.turn_rewards = [
            (positions[index], checked_number(value, "a turn's reward"))
            for index, value in output.turn_rewards
        ]


async def group_rewards(task: ModuleType, outputs: list[AgentLoopOutput], row: dict) -> dict:
    """Returns what the task's `group_reward` gives the units of a prompt, by `unit_of`.

    It gets the last output of each unit that the loop gave no reward, and a copy of the row for
    each. Raises ValueError if it returns more or fewer rewards."""
    judged = [output for output in last_outputs(outputs) if output.reward is None]
    if not judged:
        return {}
    rows = [copy_row(row) for _ in judged]
    rewards = list(await call(task.group_reward, list(judged), rows))
    if len(rewards) != len(judged):
        raise ValueError(f"group_reward returned {len(rewards)} rewards for {len(judged)} outputs")
    return dict(zip(map(unit_of, judged), rewards))


def _checked_reward(reward, row, file):
    """Returns a reward as a float, or a dict with a float as "score". Raises as `set_rewards`."""
    score = reward.get("score") if isinstance(reward, dict) else reward
    try:
        float(score)
    except Exception as error:  # of any type, from an array or a class of the user
        raise BadReward(
            f"{file}: its reward is {' '.join(repr(reward).split()):.80} for the row with index "
            f"{row.get('index')}: return a number, or a dict with one under 'score'; an error "
            "leaves the rollout out"
        ) from error
    score = checked_number(score, "a reward")
    return {**reward, "score": score} if isinstance(reward, dict) else score


# ---------------------------------------------------------------- many rollouts: the pool

# The state of a prompt's group in the ranks' store, where a key that was never set is 0.
RUNNING, DONE, NO_SIGNAL = range(3)
POOL_NUMBERS = itertools.count()  # of the pools of this process: all ranks make the same ones


@dataclass(eq=False, kw_only=True)
class Pool:
    """Runs groups of rollouts on the background loop, and hands them out batch by batch.

    Prompts have numbers and are trained in that order: a batch is the next `batch_size` prompts.
    Prompts of the next `staleness` batches may start, too, as in AReaL (arXiv 2505.24298, sec. 5).
    With batches of two and staleness 1:

        step                     0      1      2      3
        its rollout may start    0-3    4-5    6-7    8-9
        it trains on             0-1    2-3    4-5    6-7

    So no token is older than `staleness` steps, and the next prompt's number is enough to resume.

    Dynamic sampling leaves out a group whose members' rewards are equal, and starts one more
    prompt. A step replaces at most `replacements` such groups, and trains on those beyond that."""

    run: Any  # train.Run
    kind: str  # "train" or "eval"; part of the rollouts' names, and so of their seeds
    row_of: Callable[[int], dict]  # a prompt's number -> its row
    batch_size: int
    group_size: int
    sampling: dict
    step: int
    num_steps: float = math.inf  # of the run
    staleness: int = 0
    replacements: int = 0  # the most groups that a step replaces
    greedy: bool = False  # each group has a greedy baseline, its last member
    first_of_next_batch: int = 0  # a prompt

    def __post_init__(self):
        self.args = self.run.args
        self.engine = self.run.engine
        # Shared by the ranks. To add 0 is to read a number, which is 0 if nobody has set it.
        self.store = dist.PrefixStore(f"pool-{next(POOL_NUMBERS)}", self.run.store)
        self.judges_groups = hasattr(self.run.task, "group_reward")
        self.n_members = self.group_size + self.greedy
        self.n_engines = dist.get_world_size() // self.args.tp
        self.first_of_batch = self.first_of_next_batch
        self.prompts = self._prompts(self.first_of_next_batch)  # those that this rank starts
        self.limit = self.first_of_next_batch  # prompts with smaller numbers may start
        self.limit_changed = asyncio.Event()
        # A rank's share of --oversample batches may run at once.
        oversample = self.args.oversample if self.staleness else 1
        n_groups = math.ceil(self.batch_size * oversample / self.n_engines)
        n_slots = max(self.n_members, min(MAX_CONCURRENT, n_groups * self.n_members))
        if self.args.deterministic:
            n_slots = sys.maxsize  # `limit` alone bounds them: timing must not
        self.free_slots = asyncio.Semaphore(n_slots)  # for rollouts
        # The Rollouts of each prompt on this rank. The main thread takes those that have ended.
        self.groups = {}
        self.unfinished = set()  # the prompts with a rollout that has not ended
        self.n_without_signal = 0  # such groups in the batches handed out, over all ranks
        self.printed = set()  # kinds of failures
        # Of this rank, for the next batch.
        self.seconds = 0.0
        self.statistics = Counter()
        self.work_ended = threading.Event()  # set when all coroutines have really ended
        self.future = self.run.background.submit(self._work())

    @property
    def title(self) -> str:
        """The name of the phase: the log counts steps from 1, and step 0 is before the first."""
        if self.kind == "train":
            return f"step {self.step + 1}"
        return f"evaluation at step {self.step}"

    def demonstration(self, prompt: int) -> Sequence[dict]:
        """Returns the turns that are played for a prompt, in the first --imitation_steps."""
        n_steps = self.args.imitation_steps  # None: in all steps
        if self.kind == "train" and (n_steps is None or prompt < n_steps * self.batch_size):
            with suppress(BadInput):  # a bad row of a large table fails in its rollout
                return self.row_of(prompt).get("demonstration") or ()
        return ()

    @property
    def needs_engine(self) -> bool:
        """True if the next batch has a prompt without a demonstration, or others may be running."""
        prompts = range(self.first_of_next_batch, self.first_of_next_batch + self.batch_size)
        return self.staleness > 0 or any(not self.demonstration(prompt) for prompt in prompts)

    # -- background thread

    def _prompts(self, first: int) -> Iterator[int]:
        """Yields this rank's prompts. Together the ranks start every one from `first` on once."""
        if self.args.deterministic:  # timing must not decide: prompt i is that of engine i mod n
            mine = dist.get_rank() // self.args.tp
            n = self.n_engines
            yield from itertools.count(first + (mine - first) % n, n)
        while True:
            yield first + self.store.add("next", 1) - 1

    async def _work(self):
        """Starts rollouts as room and limit allow, on leaders, until it is cancelled."""
        if not self.engine.leader:
            return
        try:
            async with asyncio.TaskGroup() as self.tasks:
                while True:
                    await self.free_slots.acquire()  # first, because a drawn prompt must be started
                    prompt = next(self.prompts)
                    while prompt >= self.limit:
                        await self.limit_changed.wait()
                        self.limit_changed.clear()
                    await self._start_group(prompt)
        finally:
            self.work_ended.set()

    async def _start_group(self, prompt: int):
        """Starts the rollouts of a prompt. The caller has acquired room for the first one."""
        demonstration = self.demonstration(prompt)
        group = Rollouts()
        self.groups[prompt] = group
        self.unfinished.add(prompt)
        running = {}  # member -> the task of its rollout
        for sample in range(1 if demonstration else self.n_members):
            if sample > 0:
                await self.free_slots.acquire()
            member = Member(
                name=f"{self.kind}-{self.step:08d}-{prompt:06d}-{sample:04d}",
                prompt=prompt,
                sample=sample,
                step=self.step,  # in which it starts: with staleness, that depends on timing
                validate=self.kind == "eval",
                is_greedy=sample == self.group_size,
                demonstration=demonstration,
            )
            self.engine.enter(member.name)
            running[member] = self.tasks.create_task(self._run_member(group, member))
        self.tasks.create_task(self._end_group(prompt, group, running))

    async def _run_member(self, group: Rollouts, member: Member) -> list[AgentLoopOutput]:
        """Runs and returns one rollout. Adds copies of its outputs, or its error, to the group."""
        try:
            # The row is read in here, as a bad one of a large table raises.
            row = copy_row(self.row_of(member.prompt))
            outputs = await run_agent_loop(self.run, member, row, self.sampling)
            # A copy, as a reward may change its own. What can't be pickled fails here, and alone.
            kept = pickle.loads(pickle.dumps([*map(compact, outputs)]))
        except BaseException as error:  # a CancelledError, too, that the agent itself caused
            if self.future.cancelled():
                raise
            group.errors.append(self._failure("failed_agent_loop", member, error))
            return []
        finally:
            self.engine.leave(member.name)
            self.free_slots.release()

        for output in kept:
            output.reward = None  # is set later, in `_has_no_signal` or `wait_for_rewards`
        group.outputs += kept
        if not outputs:
            group.skipped += 1
        elif not self.judges_groups:
            self._start_grader(group, member, outputs)
        return outputs

    async def _end_group(self, prompt: int, group: Rollouts, running: dict[Member, asyncio.Task]):
        """Waits for the rollouts of a prompt, and records that the group has ended."""
        outputs_of = await _results_of(running)
        self.unfinished.remove(prompt)
        if self.judges_groups and group.outputs:
            outputs = [output for of_member in outputs_of.values() for output in of_member]
            row = self.row_of(prompt)
            # Not one of self.tasks, which its failure would end. Graders await it, and report that.
            judged = asyncio.create_task(group_rewards(self.run.task, outputs, row))

            async def reward(output, row):
                return (await judged)[unit_of(output)]

            for member, of_member in outputs_of.items():
                if of_member:
                    self._start_grader(group, member, of_member, reward)

        state = DONE
        if not self.demonstration(prompt) and await self._has_no_signal(group):
            state = NO_SIGNAL
            self.store.add("no_signal", 1)
        # "ended" is counted last: a rank that sees it grow finds the rest in the store.
        self.store.add(str(prompt), state)
        self.store.add("ended", 1)
        self.engine.poke()

    def _start_grader(self, group, member, outputs, reward=None):
        """Starts a grader of a rollout's outputs (`set_rewards`)."""
        grader = self.tasks.create_task(self._grade(member, outputs, reward))
        group.graders[member.prompt, member.sample] = grader

    async def _grade(self, member, outputs, reward) -> list[dict] | dict:
        """Returns what a reward may write of each output or, if the reward failed, an error."""
        try:
            await grade_rollout(self.run, outputs, self.row_of(member.prompt), reward)
            names = ("reward", "turn_rewards", "metrics")
            grades = [{name: getattr(output, name) for name in names} for output in outputs]
            pickle.dumps(grades)  # they are sent to the other ranks
        except BaseException as error:
            if self.future.cancelled():
                raise
            kind = "no_reward" if isinstance(error, BadReward) else "failed_reward"
            return self._failure(kind, member, error)
        return grades

    async def _has_no_signal(self, group: Rollouts) -> bool:
        """Returns whether dynamic sampling replaces the group (DAPO, arXiv 2503.14476, 3.2)."""
        if not self.replacements:
            return False
        grades = await _results_of(group.graders)
        graded = Rollouts(_with_rewards(group.outputs, grades))
        units = data.by_unit(graded.sampled)
        # Turn rewards nearly always differ, so they count only if all outcomes are 0.
        values = units.outcomes if units.outcomes.any() else units.task_rewards
        return not data.groups_with_signal(units, values)

    def _failure(self, kind: str, member: Member, error: BaseException) -> dict:
        """Returns an exception as an entry of Rollouts.errors. Prints the first of a kind."""
        error = "".join(traceback.format_exception(error))
        if kind not in self.printed:
            self.printed.add(kind)
            where = f"{self.title}, prompt {member.prompt}, sample {member.sample}"
            print(f"\n{kind} in {where}: {error}", file=sys.stderr)
        return {"prompt": member.prompt, "sample": member.sample, "kind": kind, "error": error}

    # -- main thread

    def rollout(self, step: int) -> Rollouts:
        """Returns the rollouts of the next batch, and of the groups that it replaced.

        The result is the same on all ranks, and its rewards may be on their way:
        `wait_for_rewards`. The engine must be awake if the pool `needs_engine`. Raises Stopped,
        and NothingLeft if the batch has no sampled token."""
        self.step = step
        # What user code draws from the global generators is this engine's and this step's own.
        rank = dist.get_rank() // self.args.tp
        set_seed(data.stable_hash(self.args.seed, self.kind, step, rank) % 2**32)
        self.first_of_batch = self.first_of_next_batch
        n_batches = min(1 + self.staleness, self.num_steps - step)
        capacity = self.first_of_next_batch + n_batches * self.batch_size
        if self.kind == "train" and getattr(self.run.task, "sampler", None):
            # Makes it choose all rows now, while all ranks have the same history.
            self.row_of(capacity + self.replacements - 1)
        self._set_limit(capacity)

        states = []  # of the next groups, up to the first that has not ended

        def batch_is_complete() -> bool:
            """Reads more states. Returns whether they make a batch; else replacements may start."""
            # A batch has batch_size groups, and those that it replaces.
            while len(states) < self.batch_size + min(states.count(NO_SIGNAL), self.replacements):
                state = self.store.add(str(self.first_of_next_batch + len(states)), 0)
                if state == RUNNING:
                    self._start_replacements(len(states), capacity)
                    return False
                states.append(state)
            return True

        self._work_until(batch_is_complete, self.title, self.batch_size)
        # Rank 0's: all leaders have the same, and the followers of a --tp team have none.
        states = gather_unless_stopped(states, self.run.stop.requested)[0]

        numbered = enumerate(states, self.first_of_next_batch)
        without_signal = [prompt for prompt, state in numbered if state == NO_SIGNAL]
        self.n_without_signal += len(without_signal)
        self.first_of_next_batch += len(states)
        replaced = without_signal[: self.replacements]
        return self._gather(range(self.first_of_batch, self.first_of_next_batch), replaced)

    def _start_replacements(self, n_ended: int, capacity: int):
        """Lets one prompt more than `capacity` start for each group without a signal."""
        # With --deterministic they start together, when all groups have ended on all ranks.
        all_have_ended = self.first_of_next_batch + n_ended == self.limit
        if self.replacements and (all_have_ended or not self.args.deterministic):
            n_not_handed_out = self.store.add("no_signal", 0) - self.n_without_signal
            self._set_limit(capacity + min(n_not_handed_out, self.replacements))

    def _work_until(self, is_done: Callable[[], bool], title: str, total: int):
        """Lets the engine generate until is_done(), or until the run is told to stop."""
        engine = self.engine
        engine.statistics = self.statistics
        started = time.perf_counter()
        try:
            if engine.leader:
                with Bar(None, title, total=total, unit="prompt") as bar:
                    self._step_until(is_done, bar)
            else:
                engine.follow()
        finally:
            engine.end_phase()
            engine.mark_versions()  # counts the tokens of unfinished requests, too
            self.seconds += time.perf_counter() - started

    def _step_until(self, is_done: Callable[[], bool], bar: Bar):
        """Does what `_work_until` says; calls is_done() whenever a group has ended on a rank."""
        n_before = self.store.add("ended", 0)
        n_seen = None
        while not self.run.stop.requested:
            # Usually this and the line above alone use the store between two steps of the engine.
            n_ended = self.store.add("ended", 0)
            bar.update(n_ended - n_before - bar.n)
            if n_ended != n_seen:
                n_seen = n_ended
                if is_done():
                    return
            if self.future.done():
                self.future.result()  # raises the error that ended the pool
            if self.engine.state == "awake":
                self.engine.step(0.02)  # not longer: other ranks may end the rollout
            else:  # in a step of demonstrations alone the engine sleeps
                time.sleep(0.01)

    def _gather(self, prompts: range, replaced: list[int]) -> Rollouts:
        """Returns the rollouts of these prompts, from all ranks to all ranks."""
        rollouts = Rollouts(seconds=self.seconds)
        groups = []
        for prompt in prompts:
            group = self.groups.pop(prompt, None)
            if group:  # this rank ran it
                rollouts.graders |= group.graders
                group.graders = {}  # tasks can't be pickled
                merge_images(group.outputs)
                groups.append(group)
                self.store.delete_key(str(prompt))  # all ranks have read it

        mine = groups, self.statistics, self.engine.leader
        for groups_of_rank, statistics, leads in all_gather(mine):
            for group in groups_of_rank:
                rollouts.outputs += group.outputs
                rollouts.errors += group.errors
                rollouts.skipped += group.skipped
            if leads:  # the engine of a --tp team counts once
                rollouts.idle_s.append(statistics.pop("idle_s", 0.0))
                rollouts.statistics += statistics
        self.seconds = 0.0
        self.statistics = Counter()

        rollouts.sort()
        for output in rollouts.outputs:
            if output.extra["prompt"] in replaced:
                output.extra["filtered"] = True
        rollouts.require(
            any(1 in output.response_mask for output in rollouts.trained),
            f"{self.title} produced no sampled tokens",
        )
        return rollouts

    def next_prompt(self, steps_done: int) -> int:
        """Returns the prompt with which a run is resumed after steps_done steps."""
        return self.first_of_next_batch if steps_done > self.step else self.first_of_batch

    def finish_running(self):
        """Waits until all running rollouts have finished. Raises Stopped."""
        self._set_limit(0)
        total = len(self.unfinished)
        self._work_until(lambda: not self.unfinished, "before the evaluation", total)
        gather_unless_stopped(None, self.run.stop.requested)

    def _set_limit(self, limit: int):
        """Lets prompts below the limit start and, once it has returned, no others."""

        async def change():
            self.limit = limit
            self.limit_changed.set()

        if limit != self.limit:
            self.run.background.submit(change()).result()

    def end(self):
        """Cancels the running rollouts, on all ranks together: agent loops release their tools."""
        if not self.engine.leader:
            self.engine.follow()
            return
        self.future.cancel()
        self.engine.abort_all()
        self.work_ended.wait(timeout=10)  # no tool that is hard to release may hold up the end
        self.engine.end_phase()


async def _results_of(tasks: dict) -> dict:
    """Awaits tasks, and returns their results by the same keys."""
    return dict(zip(tasks, await asyncio.gather(*tasks.values())))


def _with_rewards(outputs: list[AgentLoopOutput], grades: dict) -> list[AgentLoopOutput]:
    """Writes the results of `Pool._grade` to the outputs. Returns those that have a reward."""
    graded = []
    for output in outputs:
        grade = grades[rollout_of(output)]
        if isinstance(grade, list):
            vars(output).update(grade[output.extra["segment"]])
            graded.append(output)
    return graded


def wait_for_rewards(rollouts: Rollouts, background: Background, stop: Stop):
    """Waits for the graders of all ranks, and writes the rewards to the outputs.

    A rollout whose reward failed is dropped and counted. Raises Stopped, BadReward if the task's
    reward returned no number, and NothingLeft if nothing is left."""
    future = background.submit(_results_of(rollouts.graders))
    while not future.done() and not stop.requested:
        wait([future], timeout=0.2)
    mine = future.result() if future.done() else {}
    grades = {}
    for grades_of_rank in gather_unless_stopped(mine, stop.requested):
        grades |= grades_of_rank
    rollouts.outputs = _with_rewards(rollouts.outputs, grades)
    rollouts.errors += [grade for grade in grades.values() if isinstance(grade, dict)]
    rollouts.sort()
    for error in rollouts.errors:  # in the same order on all ranks
        if error["kind"] == "no_reward":
            last_line = error["error"].splitlines()[-1]
            raise BadReward(last_line.partition(": ")[2])
    rollouts.require(rollouts.trained, "no rollout has a reward")


def rollout(
    run, rows: list[dict], step: int, group_size: int, sampling: dict, kind: str = "train"
) -> Rollouts:
    """Runs group_size rollouts of each row, waits for their rewards, and returns them.

    Evaluations use it, with kind "eval"; with "train", demonstrations of the rows are played. All
    ranks pass the same rows and get the same result. The engine must be awake, and no other pool
    running. Raises as `Pool.rollout` and `wait_for_rewards` do."""
    pool = Pool(
        run=run,
        kind=kind,
        row_of=rows.__getitem__,
        batch_size=len(rows),
        group_size=group_size,
        sampling=sampling,
        step=step,
    )
    try:
        rollouts = pool.rollout(step)
        started = time.perf_counter()
        wait_for_rewards(rollouts, run.background, run.stop)
        rollouts.seconds += time.perf_counter() - started
    except (Stopped, RunFailed):
        # All ranks raise these together. After one rank's own error `end` would wait for others.
        pool.end()
        raise
    pool.end()
    return rollouts


def training_pool(run, step: int, first: int = 0) -> Pool:
    """Returns the pool of a run that has finished `step` steps; `first` is its next prompt.

    A prompt's number is its position in data.prompt_order or, with a `sampler`, in run.history."""
    args = run.args
    rows = run.rows["train"]
    sampler = getattr(run.task, "sampler", None)

    @functools.lru_cache(maxsize=256)  # a row of a large table is read and rendered each time
    def row_of(prompt):
        if sampler is None:
            return rows[data.prompt_order(len(rows), prompt, 1, args.seed)[0]]
        # On the main thread: the background thread asks only for rows that are chosen already.
        while len(run.history) <= prompt:
            with refusing("the task's sampler failed", getattr(run.task, "__file__", "")):
                history = [[*entry] for entry in run.history]
                called = in_time("it", REWARD_TIMEOUT, call(sampler, history))
                row = run.background.submit(called).result()
            is_row = isinstance(row, int) and 0 <= row < len(rows)
            need(is_row, f"the task's sampler returned {row!r:.80}, not an int below {len(rows)}")
            run.history.append([row, run.done])
        return rows[run.history[prompt][0]]

    return Pool(
        run=run,
        kind="train",
        row_of=row_of,
        batch_size=args.prompts_per_step,
        group_size=args.group_size,
        sampling=args.sampling(),
        step=step,
        num_steps=args.num_steps,
        staleness=args.max_staleness,
        replacements=(args.max_gen_batches - 1) * args.prompts_per_step,
        greedy="baselines" in args.estimator_takes,
        first_of_next_batch=first,
    )
