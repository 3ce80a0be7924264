"""The colocated engine, and the pool of trajectories that it serves.

Two threads. The MAIN thread owns the device: it calls `Engine.step` during a rollout and
trains in between. One BACKGROUND thread runs one event loop for the whole run: agent loops,
tools, rewards. `Engine.generate` is awaited on the background loop; it posts a request that
the main thread picks up at its next step, and resumes when the tokens are there. Outside a
rollout requests simply wait.

The engine is a state machine, so that nothing can be generated from stale weights:

    asleep --wake_weights--> weights --load_weights--> synced
    synced --wake_kv--> awake --sleep--> asleep

A `Pool` starts groups of trajectories and hands out batches of those that are done. With
--max_staleness a rollout ends while agent loops are still under way: they wait in
`generate` over the update, their tools go on, and what vLLM was sampling for them goes on
under the new weights (`sleep(keep=True)`). Without it nothing is left under way: the same
pool at staleness 0.

With --tp n, n ranks in a row share one engine: the first of them, the leader, runs the
agent loops, and the others follow its steps."""

import asyncio
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import pickle
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

import data
from agent_loop import (
    RESPONSE_LISTS, AgentLoopOutput, BadInput, Demonstration, TokenOutput, agent_loop_class,
    call, finite, in_time, numbers, total_reward,
)
from flatrl.bad_input import (
    check_ids, check_numbers, check_output, need, refusing, traceback_from)
from flatrl.hints import tell
from flatrl.metrics import describe
from flatrl.processes import PATIENCE, Stopped, all_gather, gather_unless_stopped, memory
from flatrl.rows import copy_containers
from flatrl.terminal import Bar, shown
from flatrl.vision import check_images
from flatrl.vllm_engine import (
    load_into, never_sample, prepare_vllm, sampling_params, vllm_arguments)

KV_FULL = 0.9  # share of the KV cache in use from which on no new trajectory starts
GRADED = ("reward", "turn_rewards", "metrics")  # of an output, for a reward function to write


def seed_of(*parts) -> int:
    """Returns a sampling seed in [0, 2^63) that depends on the parts alone.

    Parts are anything with a repr, for example (--seed, name of the trajectory, turn)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


# ---------------------------------------------------------------- the engine


@dataclass(eq=False)
class _Request:
    """One call of `Engine.generate`."""

    call_id: str  # unique in the run: vLLM's request id
    trajectory: str  # the name of the trajectory that calls
    turn: int  # how many calls of this trajectory came before
    prompt_ids: list[int]
    params: dict  # vLLM's sampling parameters
    images: list | None
    future: asyncio.Future | None  # gets the result; None on the followers of a --tp team
    versions: list[int] = field(default_factory=list)  # of the tokens that are counted so far

    @property
    def is_given_up(self) -> bool:
        """True if nobody awaits the result any more."""
        return self.future is not None and self.future.cancelled()


class Engine:
    """vLLM in this process. The main thread calls `step`; the background thread awaits
    `generate`.

    state: "asleep" | "weights" | "synced" | "awake"; calls out of order raise RuntimeError.
    version: that of the weights loaded last, -1 before the first sync. Token ids from
    vocab_size on (a padded vocabulary's) are never sampled, nor is image_token_id, the
    placeholder of a model that sees images (None for a text model): no image would belong to
    it.

    With --tp every rank has an Engine. `generate` and `step` are called on the leader; the
    other ranks of the team call `follow` meanwhile."""

    @shown("starting the engine")
    def __init__(self, model: str, args, device: torch.device,
                 stop_token_ids: Iterable[int] = (), vocab_size: int | None = None,
                 image_token_id: int | None = None):
        prepare_vllm(device, args.tp)
        from vllm import LLM

        self.args = args
        self.stop_token_ids = sorted(set(stop_token_ids))
        try:
            self.llm = LLM(**vllm_arguments(model, args, device, image_token_id is not None))
        except ValueError as error:  # such as a block_size that the device does not take
            raise BadInput(f"--engine_args {args.engine_args}: vLLM's engine does not start: "
                           f"{error}") from error
        self.core = self.llm.llm_engine
        self.vocab_size = vocab_size or self.core.model_config.get_vocab_size()
        if device.type == "cpu" and args.tp > 1:
            # The shared memory of a team is deleted now that every rank has mapped it: it
            # is gone when the last rank is gone, however that one ends.
            dist.barrier()
            for file in Path("/dev/shm").glob(f"*{os.environ['VLLM_DIST_IDENT']}-*cpushm*"):
                file.unlink(missing_ok=True)
        # Malformed tool calls are counted, not logged. An engine sets up logging anew.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        never = [slice(self.vocab_size, None)]
        if image_token_id is not None:
            never.append(image_token_id)
        self.llm.apply_model(lambda model: never_sample(model, never))
        self.version = -1
        self.leader = dist.get_rank() % args.tp == 0  # the first of args.tp consecutive ranks
        self.team = None  # the process group of the ranks that share this engine
        if args.tp > 1:
            self.team, _ = dist.new_subgroups(args.tp, timeout=PATIENCE, backend="gloo")

        # Both threads use these three, under the lock.
        self.lock = threading.Condition()
        self.inbox = []  # requests that have just come
        self.live = {}  # trajectory whose agent loop runs -> its tokens in the KV cache
        self.poked = False  # whether a waiting `step` is to return
        # Of the background thread; `sleep` empties it when no trajectory is under way.
        self.turns = Counter()  # trajectory -> calls so far
        # Only the main thread uses these.
        self.waiting = []  # requests that wait for room in the KV cache
        self.running = {}  # call_id -> request that vLLM has
        self.statistics = Counter()  # sums since the engine was built: see Phase
        self.memory = {}  # state -> `memory()` at the last transition to it
        self.state = "awake"
        self.sleep()

    # -- states

    def _require(self, state):
        """Raises RuntimeError unless the engine is in this state."""
        if self.state != state:
            raise RuntimeError(f"the engine is {self.state!r}, this call needs {state!r}")

    def _become(self, state):
        """Sets the state, and notes the memory that is in use now for the step's metrics."""
        self.state = state
        self.memory[state] = memory()

    def wake_weights(self):
        """Maps the weights' memory. What the weights hold is undefined until `load_weights`.

        Raises BadInput, on all ranks, if the trainer leaves the engine too little of a GPU."""
        self._require("asleep")
        self.memory["before_wake"] = memory()
        if torch.cuda.is_available():
            from vllm.device_allocator.cumem import CuMemAllocator

            free = min(all_gather(torch.cuda.mem_get_info()[0]))
            needed = CuMemAllocator.get_instance().get_current_usage()
            need(needed <= free,
                 f"the engine takes {needed / 1e9:.1f} GB of a GPU, the trainer leaves "
                 f"{free / 1e9:.1f}: lower --gpu_memory_utilization, or give --offload all")
        self.core.wake_up(tags=["weights"])
        self._become("weights")

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int):
        """Copies every parameter from (name in a checkpoint, tensor) pairs, a tied one
        once. Takes one pair at a time. The tensors of a layer are kept until the layer is
        whole; then vLLM makes again what it makes of its weights (other layouts, fp8).
        Raises RuntimeError with the name of a parameter that failed, came twice or did not
        arrive; the engine then stays unusable."""
        from vllm.config import set_current_vllm_config

        self._require("weights")
        config = self.core.vllm_config
        with set_current_vllm_config(config):
            self.llm.apply_model(
                lambda model: load_into(model, named_tensors, config.model_config))
        if not self.forget_prompts():  # a request holds blocks: its keys would be stale
            raise RuntimeError(
                "the engine's prefix cache could not be reset after the weight sync")
        self.version = version
        self._become("synced")

    def forget_prompts(self) -> bool:
        """Empties the caches of prompts and of images; returns False if a request uses the
        cache of prompts."""
        self.core.reset_encoder_cache()
        return self.core.reset_prefix_cache()

    def wake_kv(self):
        """Maps the KV cache; the engine can generate from here on."""
        self._require("synced")
        self.core.wake_up(tags=["kv_cache"])
        self.poked = False  # by the end of an earlier rollout
        self._become("awake")

    def sleep(self, level: int | None = None, keep: bool = False):
        """Frees the memory of the KV cache and of the weights.

        level: 1 copies the weights to the host, 2 drops them; the default. keep:
        unfinished requests stay, and go on after the next wake under the weights of then;
        without `keep` an unfinished request raises RuntimeError. On a CPU no memory is
        freed, but the transitions and the resets of caches are the same."""
        self._require("awake")
        with self.lock:
            if self.requests and not keep:
                raise RuntimeError(
                    f"{len(self.requests)} requests are unfinished: end the rollout first")
            self.live = dict.fromkeys(self.live, 0)
        self.memory["before_sleep"] = memory()
        if keep:
            self.mark_versions()
        else:
            self.turns.clear()
        self.core.sleep(level or 2, mode="keep" if keep else "abort")
        self._become("asleep")

    def mark_versions(self):
        """Notes for each unfinished request which of its tokens the present weights sampled.

        It is called before the weights change."""
        for state in self.core.output_processor.request_states.values():
            request = self.running.get(state.external_req_id)
            if request:
                self._count(request, state.detokenizer.num_output_tokens())

    def _count(self, request, n_tokens):
        """Counts the tokens that a request has sampled since it was counted last, and notes
        the present version for them. n_tokens: all its sampled tokens so far."""
        n_new = n_tokens - len(request.versions)
        request.versions += [self.version] * n_new
        self.statistics["tokens"] += n_new

    def close(self):
        """Ends vLLM, and with it the process group of this process. A run does it last."""
        self.core.engine_core.shutdown()

    # -- background thread

    async def generate(self, *, request_id: str, prompt_ids: list[int], sampling_params: dict,
                       image_data: list | None = None) -> TokenOutput:
        """Samples the tokens that follow a prompt; waits while the engine sleeps or trains.

        request_id names the trajectory. The sampling seed is a function of --seed, this name
        and the number of the call. sampling_params are vLLM's, as a dict. image_data: PIL
        images, each with one placeholder in prompt_ids. Raises ValueError for what are no
        token ids, and if vLLM refuses the request (a prompt longer than the window, a bad
        sampling parameter)."""
        prompt_ids = list(prompt_ids)
        check_ids(prompt_ids, self.vocab_size, "prompt_ids")
        turn = self.turns[request_id]
        self.turns[request_id] += 1
        # Agent loops give a smaller max_tokens. Without any, vLLM would stop after 16 tokens.
        room = self.args.window - len(prompt_ids)
        params = {
            "seed": seed_of(self.args.seed, request_id, turn),
            "stop_token_ids": self.stop_token_ids,
            "max_tokens": max(1, min(self.args.max_response_tokens, room))} | sampling_params
        if "min_tokens" in params:  # of --sampling_args: a late turn may have less room
            params["min_tokens"] = min(params["min_tokens"], params["max_tokens"])
        future = asyncio.get_running_loop().create_future()
        request = _Request(f"{request_id}#{turn}", request_id, turn, prompt_ids,
                           params, image_data, future)
        with self.lock:
            self.inbox.append(request)
            self.lock.notify()
        result = await request.future
        if isinstance(result, Exception):
            raise result
        return result

    def enter(self, trajectory: str):
        """Notes that a trajectory starts. With --deterministic the engine then waits until
        it asks for tokens."""
        with self.lock:
            self.live[trajectory] = 0

    def leave(self, trajectory: str):
        """Notes that a trajectory has come to its end."""
        with self.lock:
            self.live.pop(trajectory, None)
            self.turns.pop(trajectory, None)
            self.lock.notify()

    def poke(self):
        """Makes a waiting `step` return: something has changed that its caller looks at."""
        with self.lock:
            self.poked = True
            self.lock.notify()

    # -- main thread

    @property
    def requests(self) -> list[_Request]:
        """All unfinished requests that somebody awaits."""
        requests = (*self.inbox, *self.waiting, *self.running.values())
        return [request for request in requests if not request.is_given_up]

    @property
    def pending(self) -> set[str]:
        """The names of the trajectories that wait for tokens."""
        return {request.trajectory for request in self.requests}

    def _has_work(self):
        """Returns whether a model step can start now."""
        if self.args.deterministic and not self.live.keys() <= self.pending:
            # A trajectory is still at work: what it asks next has to be in this very step,
            # so that steps do not depend on timing.
            return False
        return bool(self.inbox or self.waiting or self.running)

    def step(self, timeout: float = 0.2):
        """Takes in new requests, runs one model step, and hands out the results of finished
        requests. Waits up to `timeout` seconds for work."""
        self._require("awake")
        started = time.perf_counter()
        with self.lock:
            self.lock.wait_for(lambda: self.poked or self._has_work(), timeout)
            has_work = self._has_work() and not self.poked
            self.poked = False
            if has_work:
                arrived = self.inbox
                self.inbox = []
                if self.args.deterministic:
                    arrived.sort(key=lambda request: (request.trajectory, request.turn))
                self.waiting += arrived
        self.statistics["idle_s"] += time.perf_counter() - started
        self._advance(self._take_fitting() if has_work else (), step=has_work)

    def _take_fitting(self) -> list[_Request]:
        """Takes the requests out of the queue that start now; first come, first served.

        Later turns of trajectories under way start at once. New trajectories start while
        the KV cache has room, so that what is cached for a trajectory is not thrown out
        while its tools run."""
        waiting = [request for request in self.waiting if not request.is_given_up]
        self.waiting = []
        fitting = []
        if not waiting:
            return fitting
        cache = self.core.vllm_config.cache_config
        scheduler = self.core.engine_core.engine_core.scheduler
        # Tokens that fit into the KV cache. A tenth stays free, because requests still grow.
        free_share = KV_FULL - scheduler.kv_cache_manager.usage
        room = free_share * cache.num_gpu_blocks * cache.block_size
        # Requests that an update has suspended come back first.
        room -= sum(request.num_tokens for request in scheduler.waiting)
        # The cached tokens of trajectories whose tools run are to stay.
        asking = {request.trajectory for request in (*waiting, *self.running.values())}
        with self.lock:
            room -= sum(n for name, n in self.live.items() if name not in asking)
        later_turns_first = sorted(waiting, key=lambda request: request.turn == 0)
        for request in later_turns_first:
            room -= len(request.prompt_ids)
            is_first = not fitting and not self.running  # something has to run in any case
            if request.turn > 0 or room > 0 or is_first:
                fitting.append(request)
            else:
                self.waiting.append(request)
        return fitting

    def _advance(self, added=(), step=False, aborted=None):
        """Does on all ranks of a team, in lock step: aborts, additions, one model step.

        added: requests that start. step: whether a model step follows, if there is anything
        to compute. aborted: the call_ids to abort; default: those of calls that were given
        up. The futures of requests that ended get their results. Does nothing if there is
        nothing to do."""
        if aborted is None:
            aborted = [name for name, request in self.running.items() if request.is_given_up]
        step = step and bool(added or self.running)
        if not (aborted or added or step):
            return
        if self.team:
            copies = [replace(request, future=None) for request in added]
            self._broadcast((aborted, copies, step))
        results = self._run(aborted, added, step)

        def hand_out():  # on the background thread
            for request, result in results:
                if not request.future.done():
                    request.future.set_result(result)

        if results:  # the background thread is woken once a step, not once a request
            results[0][0].future.get_loop().call_soon_threadsafe(hand_out)

    def _broadcast(self, command=None):
        """Returns on all ranks of the team what its leader passes."""
        commands = [command]
        dist.broadcast_object_list(commands, group=self.team, group_src=0)
        return commands[0]

    def follow(self):
        """Does what the leader of the team does, until the leader calls `dismiss`."""
        while True:
            command = self._broadcast()
            if command is None:
                return
            self._run(*command)

    def dismiss(self):
        """Ends a rollout phase: aborts calls given up; followers return from `follow`."""
        self._advance()
        if self.team:
            self._broadcast()

    def _run(self, aborted, added, step):
        """Aborts, adds and steps, as `_advance` says.

        Returns (request, result) for each request that came to its end; the result is a
        TokenOutput, or a ValueError if vLLM refused the request."""
        self.core.abort_request(aborted)
        for call_id in aborted:
            del self.running[call_id]
        results = []
        for request in added:
            try:
                self._admit(request)
            except Exception as error:  # vLLM's have no common base; the other requests go on
                results.append((request, ValueError(str(error))))
        if step and self.running:
            for output in self.core.step():
                if output.finished:
                    request = self.running.pop(output.request_id)
                    results.append((request, self._result(request, output)))
        return results

    def _admit(self, request):
        """Hands a request to vLLM."""
        params = sampling_params(request.params, self.vocab_size)
        prompt = {"prompt_token_ids": request.prompt_ids}
        if request.images:
            prompt["multi_modal_data"] = {"image": request.images}
        self.core.add_request(request.call_id, prompt, params)
        self.running[request.call_id] = request

    def _result(self, request, output) -> TokenOutput:
        """Returns what a finished request sampled; counts its tokens."""
        completion = output.outputs[0]
        token_ids = list(completion.token_ids)
        prompt_ids = list(output.prompt_token_ids)
        n_cached = output.num_cached_tokens or 0
        self._count(request, len(token_ids))
        self.statistics += Counter(prompt_tokens=len(prompt_ids), cached_tokens=n_cached)
        with self.lock:
            if request.trajectory in self.live:
                self.live[request.trajectory] += len(prompt_ids) - n_cached + len(token_ids)
        reason = completion.finish_reason
        if reason not in ("stop", "length"):
            reason = "abort"
        return TokenOutput(
            token_ids, [*completion.logprobs.logprobs], request.versions, reason, prompt_ids)

    def drain(self):
        """Forgets every request, at the end of a pool, when no other pool is at work. The agent
        loops that wait for one are cancelled by the pool: twice would end their tidying up."""
        with self.lock:
            for queue in (self.inbox, self.waiting, self.live):
                queue.clear()
        self._advance(aborted=list(self.running))


# ---------------------------------------------------------------- one rollout


@dataclass(eq=False)
class Session:
    """Serves one trajectory as its engine: an agent loop gets it in place of the Engine.

    Calls go out under the trajectory's name, whatever id the agent loop made up (verl's
    loops draw a random uuid): so sampling seeds depend on (seed, step, prompt, sample,
    turn) alone. stop_token_ids are those of --sampling_args. They end a turn, but no agent
    loop sees them: they are no end-of-turn tokens of the template."""

    engine: Engine
    name: str
    stop_token_ids: Sequence[int] = ()
    generate_s: float = 0.0  # seconds spent in calls
    callers: set = field(default_factory=set)  # the tasks that await one now

    async def generate(self, *, request_id: str, sampling_params: dict, **call) -> TokenOutput:
        """Samples one turn, as Engine.generate does. Raises RuntimeError once the agent loop is
        over: a reward would wait for an engine that sleeps."""
        if self.engine is None:
            raise RuntimeError("the rollout is over, and a reward has no engine: let the agent "
                               "loop judge, while it is awake")
        started = time.perf_counter()
        if self.stop_token_ids:
            stops = [*sampling_params.get("stop_token_ids", ()), *self.stop_token_ids]
            sampling_params = {**sampling_params, "stop_token_ids": stops}
        caller = asyncio.current_task()
        self.callers.add(caller)
        try:
            return await self.engine.generate(
                request_id=self.name, sampling_params=sampling_params, **call)
        finally:
            self.callers.discard(caller)
            self.generate_s += time.perf_counter() - started

    def close(self):
        """Gives up the calls that a finished agent loop left behind in tasks of its own."""
        self.engine = None  # a call that comes later fails
        for caller in self.callers:
            caller.cancel()


@dataclass
class Phase:
    """Holds what a rollout brought, from all ranks.

    outputs are in (prompt, sample, segment) order. Each output.extra has these three
    numbers and its row's "index"; "filtered" marks a group that dynamic sampling skipped,
    "greedy" a baseline of ReMax, "demonstration" what a row had its loop say. errors has a
    dict for each trajectory that failed, with its traceback. statistics are sums over the
    engines: "tokens" sampled, "prompt_tokens" of all calls, "cached_tokens" among those."""

    outputs: list[AgentLoopOutput] = field(default_factory=list)
    errors: list[dict] = field(default_factory=list)
    skipped: int = 0  # trajectories whose agent loop returned []
    statistics: Counter = field(default_factory=Counter)
    idle_s: list[float] = field(default_factory=list)  # of each engine: seconds without work
    seconds: float = 0.0
    sync_s: float = 0.0
    graders: dict = field(default_factory=dict)  # (prompt, sample) -> this rank's running task

    @property
    def sampled(self) -> list[AgentLoopOutput]:
        """Returns the outputs that the policy sampled: no greedy baselines, no demonstrations."""
        return self._without("greedy", "demonstration")

    @property
    def trained(self) -> list[AgentLoopOutput]:
        """Returns the outputs to learn from, demonstrations too."""
        return self._without("greedy", "filtered")

    @property
    def compared(self) -> list[AgentLoopOutput]:
        """Returns the outputs to learn from by their rewards."""
        return self._without("greedy", "filtered", "demonstration")

    def _without(self, *marks):
        """Returns the outputs that have none of these marks in `extra`."""
        return [output for output in self.outputs if output.extra.keys().isdisjoint(marks)]

    @property
    def greedy(self) -> list[AgentLoopOutput]:
        """Returns ReMax's baselines."""
        return [output for output in self.outputs if "greedy" in output.extra]

    def sort(self):
        """Puts outputs and errors into the order of prompts, samples and segments."""
        self.outputs.sort(key=lambda output: (*_key(output), output.extra["segment"]))
        self.errors.sort(key=lambda error: (error["prompt"], error["sample"]))

    @property
    def counts(self) -> Counter:
        """Returns how many trajectories were lost as "failed_agent_loop", "failed_reward" and
        "skipped"."""
        return Counter(error["kind"] for error in self.errors) + Counter(skipped=self.skipped)

    def require(self, condition, problem: str):
        """Raises RuntimeError with what was lost, and why, unless the condition holds."""
        if not condition:
            first = self.errors[0]["error"] if self.errors else "no loop sampled a token"
            raise RuntimeError(f"{problem}: {dict(self.counts)}; the first error: "
                               f"{first.strip().splitlines()[-1]}")

    def metrics(self, engine: Engine | None) -> dict:
        """Returns metrics of trajectories, failures and, without --replay, the engine."""
        metrics = {}
        if self.sampled:
            metrics = describe(self.sampled, data.by_unit(self.sampled))
        demonstrations = [output for output in self.outputs if "demonstration" in output.extra]
        if demonstrations:
            metrics["rollout/demonstrations"] = len(demonstrations)
            metrics["reward/demonstrations"] = fmean(map(total_reward, demonstrations))
        for kind in ("failed_agent_loop", "failed_reward", "skipped"):
            metrics[f"rollout/{kind}"] = self.counts[kind]
        prompts = [output.extra["prompt"] for output in self.outputs]
        prompts += [error["prompt"] for error in self.errors]
        metrics |= {"rollout/first_prompt": min(prompts), "rollout/last_prompt": max(prompts)}
        if engine is None:
            return metrics
        total = self.statistics
        metrics |= {
            "timing/sync_s": self.sync_s,
            "timing/rollout_s": self.seconds,
            "timing/idle_s": self.idle_s,
            "throughput/tokens_per_s": total["tokens"] / self.seconds,
            "throughput/idle_share": fmean(self.idle_s) / self.seconds,
            "throughput/prefix_cache_hit_rate":
                total["cached_tokens"] / max(1, total["prompt_tokens"])}
        for state, figures in engine.memory.items():
            metrics |= {f"memory/{state}_{where}_gb": gb for where, gb in figures.items()}
        return metrics


# What the ranks' store says of a prompt's group: a number that nobody has set is 0 there.
RUNNING, DONE, ALIKE = range(3)


@dataclass(kw_only=True, eq=False)
class Group(Phase):
    """Holds what the trajectories of one prompt brought, on the rank that runs them."""

    unfinished: int  # trajectories not yet at their end


@dataclass(eq=False)
class Pool:
    """Runs groups of trajectories on the background loop, and hands them out batch by batch.

    Prompts have numbers and are trained in their order: a batch is the next `batch` of
    them, and a slow prompt is waited for. So that engine and tools have work meanwhile, a
    rollout may start prompts of the next `staleness` batches too (AReaL's capacity, arXiv
    2505.24298, sec. 5). Those wait in `generate` while the policy trains, and go on under
    the next weights. With batches of two and staleness 1:

        step                     0      1      2      3
        its rollout may start    0-3    4-5    6-7    8-9
        it trains on             0-1    2-3    4-5    6-7

    A prompt starts at most `staleness` steps before the one that trains on it, so no token is
    older. A run is resumed from one number, that of the next prompt.

    Dynamic sampling skips a group whose members score alike, and one more prompt may start.
    A step skips at most `replacements` groups; then groups alike fill the batch.

    Ranks draw the next number from a shared counter when they have room for a trajectory; with
    --deterministic a prompt's rank is its number modulo the number of engines."""

    run: Any  # train.Run: engine, background, task, tokenizer, processor, args, store, stop
    kind: str  # "train" | "eval"; with step, prompt and sample the name of a trajectory
    row_of: Callable[[int], dict]  # a prompt's number -> its row
    batch: int
    group_size: int
    sampling: dict
    step: int
    _: KW_ONLY
    end_step: float = math.inf  # the last rollout is that of the step before
    staleness: int = 0
    replacements: int = 0  # most groups that a rollout may skip (see `_alike`)
    greedy: bool = False  # each group has a baseline, its last member
    first: int = 0  # number of the first prompt of the next batch

    def __post_init__(self):
        self.store = dist.PrefixStore(f"{self.kind}-{self.step:08d}", self.run.store)
        self.members = self.group_size
        if self.greedy:
            self.members += 1
        self.n_engines = dist.get_world_size() // self.run.args.tp
        self.step_first = self.first  # number of the first prompt of this step's batch
        self.limit = self.first  # prompts with smaller numbers may start
        self.limit_changed = asyncio.Event()
        self.numbers = self._numbers(self.first)
        self.room = asyncio.Semaphore(self._slots())  # for trajectories
        self.groups = {}  # prompt -> Group, of this rank
        self.n_alike = 0  # groups alike, over all ranks, in the batches handed out so far
        self.printed = set()  # kinds of failures
        # Of this rank, for the next phase.
        self.seconds = 0.0
        self.statistics = Counter()
        self.ended = threading.Event()  # a cancelled future is done before its coroutines are
        self.future = self.run.background.submit(self._work())

    def _slots(self):
        """Returns how many trajectories may be under way on this rank: its share of those
        of all ranks, or the first rank would take all."""
        args = self.run.args
        if args.deterministic:
            return sys.maxsize
        oversample = args.oversample if self.staleness else 1
        groups = math.ceil(self.batch * oversample / self.n_engines)
        return max(self.members, min(args.max_concurrent, groups * self.members))

    def demonstration(self, prompt: int) -> Sequence[dict]:
        """Returns the turns that a prompt's loop gets instead of sampled ones; () without any."""
        n_steps = self.run.args.imitation_steps
        if self.kind == "train" and (n_steps is None or prompt < n_steps * self.batch):
            with suppress(BadInput):  # a bad row of a large table fails in its rollout
                return self.row_of(prompt).get("demonstration") or ()
        return ()

    @property
    def needs_engine(self) -> bool:
        """True if a prompt of the next batch is to be sampled."""
        prompts = range(self.first, self.first + self.batch)
        return any(not self.demonstration(prompt) for prompt in prompts)

    # -- background thread

    def _numbers(self, first):
        """Yields the numbers of this rank's prompts; all ranks together get first, first+1,
        ..."""
        args = self.run.args
        if args.deterministic:  # which rank runs a prompt must not depend on timing
            for prompt in itertools.count(first):
                if prompt % self.n_engines == dist.get_rank() // args.tp:
                    yield prompt
        while True:  # work is shared: the rank that has room takes the next prompt
            yield first + self.store.add("next", 1) - 1

    async def _work(self):
        """Starts trajectories as room and limit allow; ends when it is cancelled."""
        try:
            async with asyncio.TaskGroup() as self.tasks:
                while self.run.engine.leader:
                    await self.room.acquire()  # before a number is drawn: others may have room
                    prompt = next(self.numbers)
                    while prompt >= self.limit:
                        await self.limit_changed.wait()
                        self.limit_changed.clear()
                    turns = self.demonstration(prompt)
                    members = 1 if turns else self.members
                    group = Group(unfinished=members)
                    self.groups[prompt] = group
                    group_name = f"{self.kind}-{self.step:08d}-{prompt:06d}"
                    for sample in range(members):
                        if sample > 0:
                            await self.room.acquire()
                        name = f"{group_name}-{sample:04d}"
                        self.run.engine.enter(name)
                        self.tasks.create_task(
                            self._trajectory(group, turns, name, prompt, sample))
        finally:
            self.ended.set()

    async def _trajectory(self, group, turns, name, prompt, sample):
        """Runs one trajectory to its end, and ends its group if it is the last of it.

        turns: see `demonstration`. name: that of the trajectory, unique in the run. Its
        outputs, or its error, are then in the group, and its grader is started. Raises only
        if the pool is ended meanwhile."""
        try:
            outputs = await self._outputs(list(turns), name, prompt, sample)
            if outputs:
                copies = [replace(_copy(output), images=deepcopy(output.images))
                          for output in outputs]
                grader = self._grade(prompt, sample, copies)
                group.graders[prompt, sample] = self.tasks.create_task(grader)
                group.outputs += outputs
                for output in outputs:
                    output.reward = None  # until the grader has checked it
            else:
                group.skipped += 1
        except BaseException:  # CancelledError too, if an agent's own scope cancelled the task
            if self.future.cancelled():
                raise
            group.errors.append(self._failure("failed_agent_loop", prompt, sample))
        finally:
            self.run.engine.leave(name)
            self.room.release()
        group.unfinished -= 1
        if not group.unfinished:
            state = DONE
            if not turns and await self._alike(group):
                state = ALIKE
                self.store.add("alike", 1)
            # "ended" is counted last: a rank that sees it grow finds the rest in the store.
            self.store.add(str(prompt), state)
            self.store.add("ended", 1)
            self.run.engine.poke()

    async def _outputs(self, turns, name, prompt, sample):
        """Runs the agent loop of one trajectory, and completes its outputs."""
        run = self.run
        args = run.args
        row = copy_containers(self.row_of(prompt))
        session = Session(run.engine, name, self.sampling.get("stop_token_ids", ()))
        loop_class = agent_loop_class(row, run.task, args)
        loop = loop_class(session, run.tokenizer, run.processor, run.task, args)
        sampling = {**self.sampling, "stop_token_ids": run.engine.stop_token_ids}
        sampling = copy_containers(sampling)  # a loop may add a stop to its own
        if sampling.get("ignore_eos"):
            sampling["stop_token_ids"] = []
        marks = {"index": row.get("index"), "prompt": prompt, "sample": sample}
        oldest_version = run.engine.version
        if turns:
            oldest_version = -1
            session.engine = Demonstration(turns, loop, set(run.engine.stop_token_ids))
            marks["demonstration"] = True
        if sample == self.group_size:
            sampling["temperature"] = 0.0
            marks["greedy"] = True
        row |= {"step": self.step, "rollout_n": sample, "validate": self.kind == "eval"}
        # The built-in loops mind --trajectory_timeout and keep what they have. Others are
        # cut off some tool calls later.
        patience = args.trajectory_timeout
        if patience:
            patience += 4 * args.tool_timeout
        try:
            outputs = await in_time(name, patience, loop.run(sampling, **row))
        finally:
            session.close()
        if turns:
            raise ValueError(f"the agent loop ended with {len(turns)} turns left to demonstrate")
        outputs = [*outputs] if isinstance(outputs, list | tuple) else [outputs]
        if len(set(map(id, outputs))) < len(outputs):
            raise ValueError(f"{loop_class.__name__}.run returned one output twice")
        for segment, output in enumerate(outputs):
            if not isinstance(output, AgentLoopOutput):
                raise TypeError(
                    f"{loop_class.__name__}.run returned {type(output)}, no AgentLoopOutput")
            check_output(output, run.engine.vocab_size, oldest_version, run.engine.version,
                         args.window)
            check_images(output, run.processor)
            output = _copy(output)  # the loop may keep, and change, its own
            outputs[segment] = output
            output.extra = {**output.extra, **marks, "segment": segment}
            if args.hints:
                tell(output, row, loop)
            if not output.text:
                output.text = run.tokenizer.decode(
                    output.response_ids, skip_special_tokens=True)
            if not output.messages:
                output.messages = [
                    *row["prompt"], {"role": "assistant", "content": output.text}]
        if outputs:
            outputs[-1].metrics["generate_s"] = session.generate_s
        return outputs

    async def _grade(self, prompt, sample, outputs):
        """Returns the fields of GRADED that grading wrote to each output of a rollout, or the
        failure, a dict, if it raised."""
        args = self.run.args
        row = copy_containers(self.row_of(prompt))
        if "images" in row:  # a grader may draw on them
            row["images"] = deepcopy(row["images"])
        try:
            scoring = score(self.run.task, outputs, row, args.filter_metric)
            await in_time(f"the reward of prompt {prompt}", args.reward_timeout, scoring)
            # It raises where states and turns differ in number.
            if "states" in args.estimator_takes:
                data.turn_states(outputs, data.turns_of_units(data.collate(outputs), outputs))
            graded = [{name: getattr(output, name) for name in GRADED} for output in outputs]
            pickle.dumps(graded)  # as for other ranks
            return graded
        except BaseException:
            if self.future.cancelled():
                raise
            return self._failure("failed_reward", prompt, sample)

    async def _alike(self, group):
        """Returns whether --filter_metric says the same of all members. Then there is nothing
        to learn from the group: dynamic sampling (DAPO, arXiv 2503.14476, sec. 3.2)."""
        if not self.replacements:
            return False
        graded = Phase(_with_rewards(group.outputs, await _results(group.graders)))
        return not data.groups_with_signal(graded.sampled, self.run.args.filter_metric)

    def _failure(self, kind, prompt, sample):
        """Returns the present exception as an entry of Phase.errors; prints the first
        of a kind."""
        error = traceback_from(self.run.args.task)
        if kind not in self.printed:
            self.printed.add(kind)
            print(f"\n{kind} in step {self.step}, prompt {prompt}, sample {sample}:\n{error}",
                  file=sys.stderr)
        return {"prompt": prompt, "sample": sample, "kind": kind, "error": error}

    # -- main thread

    def rollout(self, step: int) -> Phase:
        """Returns the whole groups of the next batch, and those skipped, alike on every rank.

        The engine must be awake if it `needs_engine`. Rewards may still be on their way: see
        `grade`. Raises Stopped if the run is to stop, and RuntimeError if the batch has no
        sampled token."""
        self.step = step
        self.step_first = self.first
        n_batches = min(1 + self.staleness, self.end_step - step)
        capacity = self.first + n_batches * self.batch
        if self.kind == "train" and getattr(self.run.task, "sampler", None):
            # It chooses all rows here: by now it has seen the same on every rank.
            self.row_of(capacity + self.replacements - 1)
        self._set_limit(capacity)
        states = []  # of the groups first, first + 1, ..., up to one that has not ended
        stopped = self._run_until(lambda: self._is_full(states, capacity),
                                  f"{self.kind} {step}", self.batch)
        # The followers of a --tp team have none.
        states = gather_unless_stopped(states, stopped)[0]
        alike = [prompt for prompt, state in enumerate(states, self.first) if state == ALIKE]
        self.n_alike += len(alike)
        self.first += len(states)
        return self._gather(range(self.step_first, self.first), alike[: self.replacements])

    def _is_full(self, states, capacity):
        """Returns whether the next groups, in the order of their prompts, make a batch.

        states: DONE or ALIKE (all members have the same --filter_metric) for each group
        that has ended, in that order; those that have ended since the last call are
        appended. Of ALIKE groups up to `replacements` don't count, and so many prompts more
        than `capacity` may start."""
        while len(states) - min(states.count(ALIKE), self.replacements) < self.batch:
            prompt = self.first + len(states)
            state = self.store.add(str(prompt), 0)
            if state == RUNNING:
                # With --deterministic the time at which a group starts must not depend on
                # others' speed: replacements start together, once all groups have ended on
                # all ranks.
                all_have_ended = prompt == self.limit
                if self.replacements and (all_have_ended or not self.run.args.deterministic):
                    n_alike = self.store.add("alike", 0) - self.n_alike
                    self._set_limit(capacity + min(n_alike, self.replacements))
                return False
            states.append(state)
        return True

    def _gather(self, prompts, skipped):
        """Returns what the groups of these prompts brought, from all ranks to all ranks."""
        phase = Phase(seconds=self.seconds)
        groups = []
        for prompt in prompts:
            group = self.groups.pop(prompt, None)
            if group:  # this rank ran it
                phase.graders |= group.graders
                group.graders = {}  # tasks can't be sent
                groups.append(group)
                self.store.delete_key(str(prompt))  # all ranks have read it
        for brought, statistics, leads in all_gather(
                (groups, self.statistics, self.run.engine.leader)):
            for group in brought:
                phase.outputs += group.outputs
                phase.errors += group.errors
                phase.skipped += group.skipped
            if leads:  # the engine of a --tp team counts once
                phase.idle_s.append(statistics.pop("idle_s", 0.0))
                phase.statistics += statistics
        self.seconds = 0.0
        self.statistics = Counter()
        phase.sort()
        for output in phase.outputs:
            if output.extra["prompt"] in skipped:
                output.extra["filtered"] = True
        phase.require(any(1 in output.response_mask for output in phase.trained),
                      f"{self.kind} {self.step} brought nothing to learn from")
        return phase

    def next_prompt(self, steps_done: int) -> int:
        """Returns the number of the next prompt for a run that is resumed after so many
        steps. A step that was interrupted after its rollout takes its batch again."""
        return self.first if steps_done > self.step else self.step_first

    def _run_until(self, over, title, total):
        """Steps the engine until over(), which is asked when groups have ended. A follower of
        a --tp team does what its leader does, until that one is done.

        Returns whether the run was told to stop meanwhile. Raises what ended the pool."""
        engine = self.run.engine
        statistics_before = Counter(engine.statistics)
        started = time.perf_counter()
        n_before = self.store.add("ended", 0)
        n_ended = None
        stopped = False
        try:
            if not engine.leader:
                engine.follow()
            with Bar(None, title, total=total, unit="prompt") as bar:
                while engine.leader and not stopped:
                    n_seen = n_ended
                    # Mostly the one question to the store between two steps of the engine.
                    n_ended = self.store.add("ended", 0)
                    if n_ended != n_seen and over():
                        break
                    if self.future.done():
                        self.future.result()
                    if engine.state == "awake":
                        engine.step(0.02)  # not longer: other ranks may end the rollout
                    else:
                        time.sleep(0.01)
                    bar.update(n_ended - n_before - bar.n)
                    stopped = self.run.stop.requested
            return stopped
        finally:
            if engine.leader:
                engine.dismiss()
            engine.mark_versions()
            self.seconds += time.perf_counter() - started
            self.statistics += engine.statistics - statistics_before

    def settle(self):
        """Lets what is under way come to its end, for an evaluation, and starts nothing new
        until the next `rollout`. Raises Stopped."""
        self._set_limit(0)
        groups = list(self.groups.values())
        stopped = self._run_until(lambda: not any(group.unfinished for group in groups),
                                  "before the evaluation", len(groups))
        gather_unless_stopped(None, stopped)

    def _set_limit(self, limit):
        """Lets prompts below the limit start. From its return on, no other prompt starts."""
        async def change():
            self.limit = limit
            self.limit_changed.set()

        if limit != self.limit:
            self.run.background.submit(change()).result()

    def end(self):
        """Gives up what is under way, on all ranks: agent loops are cancelled and release
        their tools, graders are cancelled. Nothing happens the second time."""
        engine = self.run.engine
        if not engine.leader:
            engine.follow()
            return
        self.future.cancel()
        engine.drain()
        self.ended.wait(timeout=10)
        engine.dismiss()


def rollout(run, rows: list[dict], step: int, group_size: int, sampling: dict,
            kind: str = "train") -> Phase:
    """Runs group_size trajectories of each row in a pool of its own; returns what they
    brought.

    All ranks pass the same rows and get the same result. The engine must be awake, and no
    other pool at work. A trajectory whose agent loop or reward raises is left out and
    counted; so is one whose loop returns []. Raises Stopped, and RuntimeError if nothing
    was sampled or nothing has a reward."""
    pool = Pool(run, kind, rows.__getitem__, len(rows), group_size, sampling, step)
    try:
        phase = pool.rollout(step)
        started = time.perf_counter()
        grade(run, phase)
        phase.seconds += time.perf_counter() - started
    except Stopped:
        # Only Stopped is raised on all ranks. After an error of one, the others are elsewhere.
        pool.end()
        raise
    pool.end()
    return phase


def training_pool(run, step: int, first: int = 0) -> Pool:
    """Returns the pool of a run that goes on after `step` steps with the prompt `first`.

    A prompt's number is its position in the endless shuffle of data.prompt_order. If the task
    has a `sampler`, it is the position in run.history, whose rows the sampler chooses."""
    args = run.args
    rows = run.rows["train"]
    sampler = getattr(run.task, "sampler", None)

    @functools.lru_cache(maxsize=256)  # a row of a large table is read and rendered anew
    def row_of(prompt):
        """Returns the row of a prompt, which the sampler chooses if there is one."""
        if sampler is None:
            return rows[data.prompt_order(len(rows), prompt, 1, args.seed)[0]]
        # On the main thread: the other one asks for prompts below the limit, and has them.
        while len(run.history) <= prompt:
            with refusing("the task's sampler failed", getattr(run.task, "__file__", "")):
                row = sampler([[*entry] for entry in run.history])
                check_numbers([row], {int}, 0, len(rows) - 1, "what it returned")
            run.history.append([row, run.done])
        return rows[run.history[prompt][0]]

    batch = args.prompts_per_step
    return Pool(run, "train", row_of, batch, args.group_size, args.sampling(), step,
                end_step=args.num_steps, staleness=args.max_staleness,
                replacements=(args.max_gen_batches - 1) * batch, first=first,
                greedy="baselines" in args.estimator_takes)


@shown("waiting for rewards")
def grade(run, phase: Phase):
    """Waits for the rewards of a phase, and writes them to its outputs.

    A rollout whose reward failed is left out and counted. Raises Stopped, and RuntimeError if
    nothing is left."""
    future = run.background.submit(_results(phase.graders))
    while not future.done() and not run.stop.requested:
        wait([future], timeout=0.2)
    stopped = not future.done()
    mine = None if stopped else future.result()
    results = {}
    for results_of_rank in gather_unless_stopped(mine, stopped):
        results |= results_of_rank
    phase.outputs = _with_rewards(phase.outputs, results)
    phase.errors += [result for result in results.values() if isinstance(result, dict)]
    phase.sort()
    phase.require(phase.trained, "no trajectory has a reward")


async def _results(graders):
    """Awaits graders, a dict (prompt, sample) -> task; returns their results by the same keys.

    A failed reward is a dict with its error there; nothing is raised."""
    return dict(zip(graders, await asyncio.gather(*graders.values())))


def _with_rewards(outputs, results):
    """Writes graders' results to the outputs; returns those whose grader did not fail.

    results: (prompt, sample) -> a dict of the fields GRADED for each segment, or that of an
    error."""
    graded = []
    for output in outputs:
        result = results[_key(output)]
        if isinstance(result, list):
            vars(output).update(result[output.extra["segment"]])
            graded.append(output)
    return graded


def _key(output):
    """Returns (prompt, sample): which rollout an output is of."""
    return output.extra["prompt"], output.extra["sample"]


def _copy(output):
    """Returns a copy for the grader, which may write to it whatever it likes: the main
    thread reads the output itself meanwhile. Images, and the like in `extra`, are shared."""
    token_lists = ("prompt_ids", *RESPONSE_LISTS)  # copied at once, as they are long
    copies = {name: [*value] if name in token_lists else copy_containers(value)
              for name, value in vars(output).items()}
    return replace(output, **copies)


async def score(task, outputs: list[AgentLoopOutput], row: dict, metric: str = "outcome"):
    """Sets the terminal rewards of a rollout's units: each its last output's own, else the
    task's, asked for that output. The unit's earlier outputs share it.

    A reward function may also write to output.turn_rewards and output.metrics. Raises
    ValueError if a reward is not a finite number or a dict with one under "score" (and
    under `metric`, if that is a key: --filter_metric), if an earlier output of a unit has a
    reward that would be ignored, or if a unit is in two groups. Raises, too, for what can't
    be placed or logged."""
    units = defaultdict(list)
    for output in outputs:
        units[output.unit].append(output)
    for unit, outputs_of_unit in units.items():
        last = outputs_of_unit[-1]
        for output in outputs_of_unit:
            if output.reward not in (None, last.reward):
                raise ValueError(
                    f"output {outputs.index(output)} of a rollout has the reward "
                    f"{output.reward}, but its unit {unit!r} gets that of its last output: name "
                    "a `unit` for each output that has a reward of its own, or use turn_rewards")
            if output.group != last.group:
                raise ValueError(f"the outputs of unit {unit!r} are in the groups "
                                 f"{output.group!r} and {last.group!r}: a unit has one")
        reward = last.reward
        if reward is None:
            reward = await call(task.reward, last, row)
        if metric not in ("outcome", "total"):
            if not isinstance(reward, dict) or metric not in reward:
                raise ValueError(f"--filter_metric {metric}: the reward is {reward!r}, "
                                 "not a dict with this key")
            reward = {**reward, metric: finite(reward[metric], f"--filter_metric {metric}")}
        for output in outputs_of_unit:
            output.reward = _checked(reward)
    for output in outputs:
        # A range is indexed as a list: -1 is the last token, and an index too large raises.
        places = range(max(1, len(output.response_ids)))
        output.turn_rewards = [(places[index], finite(value, "a turn's reward"))
                               for index, value in output.turn_rewards]
        output.metrics = _loggable(output.metrics)
        json.dumps([output.messages, output.extra], default=str)  # as the log does


def _checked(reward):
    """Returns a user's reward as a float, or as a copy of the dict with a float under "score".

    Raises ValueError if it, or any number in the dict, is not finite."""
    if isinstance(reward, dict):
        return _loggable(
            {**reward, "score": finite(reward.get("score"), 'the "score" of a reward dict')})
    return finite(reward, "a reward")


def _loggable(values):
    """Returns a copy of metrics. Raises if a name is no string, or a number is infinite."""
    json.dumps(values, default=str, sort_keys=True)
    for name, number in numbers(values).items():
        finite(number, name)
    return {**values}
