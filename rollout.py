"""The colocated engine, and one rollout phase over many trajectories.

Two threads. The MAIN thread owns the device: it calls `Engine.step` in a rollout phase and trains in between. One
BACKGROUND thread runs one event loop for the whole run: agent loops, tools, rewards. `Engine.generate` is awaited on
the background loop; it posts a request that the main thread picks up at its next step, and resumes when the tokens are
there. Outside a rollout phase requests simply wait.

The engine is a state machine, so that nothing can be generated from stale weights:

    asleep --wake_weights--> weights --load_weights(version)--> synced --wake_kv--> awake --sleep--> asleep

With --max_staleness a phase ends while agent loops are still under way: they wait in `generate` over the update, their
tools go on, and what vLLM was sampling for them goes on under the new weights (`sleep(keep=True)`). With --tp n, n
ranks in a row share one engine: the first of them, the leader, runs the agent loops, and the others follow its steps.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import datetime
import hashlib
import itertools
import json
import logging
import math
import os
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from agent_loop import AgentLoopOutput, TokenOutput, agent_loop_class, call, check_images, finite
from data import prompt_order, without_torchvision


def seed_of(*parts) -> int:
    """A sampling seed in [0, 2^63) that depends on the parts alone, e.g. (seed, "step-prompt-sample", turn)."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def memory() -> dict[str, float]:
    """GB in use: "host", of this process; on CUDA "device", of the whole GPU, whoever holds it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    figures = {"host": pages * os.sysconf("SC_PAGE_SIZE") / 1e9}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        figures["device"] = (total - free) / 1e9
    return figures


class Background:
    """One daemon thread running one event loop from the start of the run to its end."""

    def __init__(self):
        self.loop, self.closed = asyncio.new_event_loop(), False
        threading.Thread(target=self.run, daemon=True, name="agent loops").start()

    def run(self) -> None:
        while not self.closed:  # a task in which user code raises SystemExit ends run_forever, but not the run
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()

    def submit(self, coroutine: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        self.closed = True
        self.loop.call_soon_threadsafe(self.loop.stop)


# ---------------------------------------------------------------- the engine

PATIENCE = datetime.timedelta(hours=4)  # a rank may wait that long for another's rollouts
KV_FULL = 0.9  # share of the KV cache in use from which on no new trajectory starts: those under way still grow


@dataclass(eq=False)
class _Request:
    id: str  # of this call; unique in the run
    request_id: str  # of the trajectory
    turn: int
    prompt_ids: list[int]
    params: dict
    images: list | None
    future: asyncio.Future
    loop: asyncio.AbstractEventLoop
    spans: list[tuple[int, int]] = field(default_factory=list)  # (tokens so far, version) at each suspension

    @property
    def n_counted(self) -> int:
        """Tokens that the statistics have already."""
        return self.spans[-1][0] if self.spans else 0


def vllm_arguments(model: str, args, device: torch.device, vision: bool = False) -> dict:
    """Arguments of vllm.LLM: what colocation and exact logprobs need, then --engine_args over it."""
    arguments = dict(
        model=model,
        dtype=args.dtype,
        seed=args.seed,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        trust_remote_code=args.trust_remote_code,
        # One engine a rank, in the rank's own process, on the process group that accelerate made.
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=args.tp,
        # Sample from softmax(logits / temperature) and report its logprobs: what the trainer computes (trl#4159).
        logprobs_mode="processed_logprobs",
        generation_config="vllm",  # no sampling defaults from the model's folder
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    if vision:
        arguments["limit_mm_per_prompt"] = {"image": args.max_images, "video": 0}
    if device.type == "cuda":
        arguments |= dict(enable_sleep_mode=True, gpu_memory_utilization=args.gpu_memory_utilization)
    else:
        arguments |= dict(
            enforce_eager=True,  # compiling takes longer than a small run
            block_size=32,
            kv_cache_memory_bytes=1 << 30,
            # A prompt is taken whole: beside a full batch of others that decode, the longest one must still fit.
            max_num_batched_tokens=max(8192, args.max_model_len + args.max_num_seqs),
            enable_chunked_prefill=False,  # vLLM's CPU build crashes on request seeds with chunked prefill
        )
    return arguments | json.loads(args.engine_args or "{}")


class Engine:
    """vLLM in this process, driven by `step` from the main thread and awaited through `generate` from the background.

    state: "asleep" | "weights" | "synced" | "awake"; version: of the weights loaded last, -1 before the first sync.
    Calls out of order raise RuntimeError. Token ids from vocab_size on (a padded vocabulary's) are never sampled, nor
    is image_token_id, the placeholder of a model that sees images (None: a text model): no image would belong to it.
    With --tp, every rank has an Engine; `generate` and `step` are the leader's, the others call `follow` meanwhile.
    """

    def __init__(
        self,
        model: str,
        args,
        device: torch.device,
        stop_token_ids: Iterable[int] = (),
        vocab_size: int | None = None,
        image_token_id: int | None = None,
    ):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in process: we step it ourselves
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        for name, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=29500).items():
            os.environ.setdefault(name, str(value))  # vLLM's external launcher wants them for a single process too
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # its own, not the user's business
        from vllm import LLM

        if device.type == "cpu":
            import vllm.model_executor.layers.utils as layers

            # The CPU build repacks linear layers at load and empties `weight`, so that no later sync could reach them.
            layers.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(
                layer, "cpu_linear", torch.nn.functional.linear
            )
            # Compiled anew in every process (4 s) for the ranks of the sampled tokens, which nobody reads.
            import vllm.v1.sample.sampler as sampler

            count = sampler.batched_count_greater_than
            sampler.batched_count_greater_than = getattr(count, "_torchdynamo_orig_callable", count)
            if args.tp > 1:
                _name_shared_memory()
        vision = image_token_id is not None
        if vision:
            without_torchvision()
        self.args, self.stop_token_ids = args, sorted(set(stop_token_ids))
        self.llm = LLM(**vllm_arguments(model, args, device, vision))
        if device.type == "cpu" and args.tp > 1:
            dist.barrier()
            for file in Path("/dev/shm").glob(f"*{os.environ['VLLM_DIST_IDENT']}-*cpushm*"):
                file.unlink(missing_ok=True)  # every rank has it mapped; so it is gone with them, however they end
        # A malformed tool call is daily business and counted; its parsers need not log a traceback for each. Set here
        # because building an engine sets up vLLM's logging anew.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        self.core = self.llm.llm_engine
        if vocab_size or vision:
            self.llm.apply_model(lambda model: _limit_vocabulary(model, vocab_size, image_token_id))
        self.version = -1
        self.sent: dict[str, str] = {}  # by the last sync: Hugging Face name -> the engine's, before fusing
        self.leader, self.team = _team(args.tp)
        self.told = 0.0  # when the leader last told its followers what to do
        self.lock = threading.Condition()  # guards the six below, which both threads touch
        self.inbox: list[_Request] = []
        self.cancelled: list[_Request] = []
        self.pending: Counter[str] = Counter()  # trajectory -> its calls that wait for tokens
        self.live: set[str] = set()  # trajectories whose agent loop runs (--deterministic waits for them)
        self.cached: Counter[str] = Counter()  # live trajectory -> tokens of its own in the KV cache
        self.poked = False
        self.turns: Counter[str] = Counter()  # trajectory -> calls so far; background thread only, but for `sleep`
        # Main thread only, from here on.
        self.waiting: list[_Request] = []  # for room in the KV cache
        self.running: dict[str, _Request] = {}  # in vLLM
        self.statistics: Counter[str] = Counter()  # since the engine was built: see Phase
        self.digest = hashlib.blake2b()  # of every token sampled, for --check_sync to compare the ranks of a team
        self.memory: dict[str, dict[str, float]] = {}  # at the last transition to each state: see `memory`
        self.state = "awake"
        self.sleep()

    # -- states

    def _require(self, state: str) -> None:
        if self.state != state:
            raise RuntimeError(f"the engine is {self.state!r}, this call needs {state!r}: see the order in rollout.py")

    def _become(self, state: str) -> None:
        self.state = state
        self.memory[state] = memory()

    def wake_weights(self) -> None:
        """Maps the weights' memory again; what they hold is undefined until `load_weights`."""
        self._require("asleep")
        self.memory["before_wake"] = memory()
        self.core.wake_up(tags=["weights"])
        self._become("weights")

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copies every parameter from (Hugging Face name, tensor) pairs; a tied weight comes once.

        Takes one pair at a time and keeps no tensor. Raises RuntimeError naming the parameter that failed, came twice
        or did not arrive; the engine then stays unusable.
        """
        self._require("weights")
        ((self.sent, missing),) = self.llm.apply_model(lambda model: _load(model, named_tensors))
        if missing:
            raise RuntimeError(
                f"weight sync incomplete, these parameters of the engine got no tensor: {sorted(missing)}"
            )
        if not self.core.reset_prefix_cache():  # False while a request holds blocks: stale keys would be reused
            raise RuntimeError("the engine's prefix cache could not be reset after the weight sync")
        self.core.reset_encoder_cache()  # what the old weights made of images
        self.version = version
        self._become("synced")

    def checksums(self) -> dict[str, tuple[torch.dtype, int, int]]:
        """(dtype, `checksum`, number of elements) of each parameter that the last sync sent, by its Hugging Face name,
        summed over the tensor parallel group: a parameter that every rank of it holds counts once a rank."""
        (fused,) = self.llm.apply_model(_fused)
        parts = {name: x for inside in fused.values() for name, x in inside.items()}
        held = {name: parts[part] for name, part in self.sent.items() if part in parts}
        sums = torch.tensor([[int(checksum(x)), x.numel()] for x in held.values()])
        if self.team:
            dist.all_reduce(sums, group=self.team)
        return {name: (x.dtype, *row) for (name, x), row in zip(held.items(), sums.tolist(), strict=True)}

    def wake_kv(self) -> None:
        """Maps the KV cache; the engine can generate from here on."""
        self._require("synced")
        self.core.wake_up(tags=["kv_cache"])
        self.poked = False  # by the end of an earlier phase
        self._become("awake")

    def sleep(self, level: int | None = None, keep: bool = False) -> None:
        """Frees the KV cache, and the weights' memory (level 1 keeps a copy in host memory, level 2 drops them).

        keep: unfinished requests stay and go on after the next wake, under whatever weights there are then; without it
        they raise RuntimeError. On CPU nothing is freed, but the transitions and the cache resets are the same.
        """
        self._require("awake")
        with self.lock:
            if self.pending and not keep:
                raise RuntimeError(f"{sum(self.pending.values())} requests are unfinished: end the rollout phase first")
            self.cached.clear()
        self.memory["before_sleep"] = memory()
        if keep:
            self.mark_versions()
        else:
            self.turns.clear()
        self.core.sleep(level=level or self.args.sleep_level, mode="keep" if keep else "abort")
        self._become("asleep")

    def mark_versions(self) -> None:
        """Notes, and counts, how far each request has come under the weights that are about to go."""
        for state in self.core.output_processor.request_states.values():
            request = self.running.get(state.external_req_id)
            if request and (n := state.detokenizer.num_output_tokens()) > request.n_counted:
                self.statistics["tokens"] += n - request.n_counted
                request.spans.append((n, self.version))

    def suspended(self) -> dict[str, int]:
        """Trajectories for which a suspended request has sampled tokens, and the version of the first of them."""
        first: dict[str, int] = {}
        for request in self.running.values():  # an agent may make several calls at once
            if request.spans:
                version = request.spans[0][1]
                first[request.request_id] = min(version, first.get(request.request_id, version))
        return first

    def close(self) -> None:
        """Ends vLLM, and with it the process group of this process: the last thing a run does."""
        self.core.engine_core.shutdown()

    # -- background thread

    async def generate(
        self, *, request_id: str, prompt_ids: list[int], sampling_params: dict, image_data: list | None = None
    ) -> TokenOutput:
        """Tokens in, tokens out; waits while the engine sleeps or trains.

        `request_id` names the trajectory; the sampling seed is a function of --seed, it and the number of this call.
        sampling_params are vLLM's, as a dict. image_data: PIL images, each with one placeholder in prompt_ids. Raises
        ValueError if vLLM refuses the request (a prompt longer than the window, an unknown sampling parameter).
        """
        loop = asyncio.get_running_loop()
        turn = self.turns[request_id]
        self.turns[request_id] += 1
        # max_tokens: what the loops compute is smaller; without it vLLM would stop after 16 tokens.
        room = min(self.args.max_response_tokens, (self.args.max_model_len or 1 << 30) - len(prompt_ids))
        params = {"seed": seed_of(self.args.seed, request_id, turn), "stop_token_ids": self.stop_token_ids}
        params["max_tokens"] = max(1, room)
        request = _Request(
            f"{request_id}#{turn}", request_id, turn, list(prompt_ids), params | sampling_params, image_data,
            loop.create_future(), loop,
        )  # fmt: skip
        with self.lock:
            self.inbox.append(request)
            self.pending[request_id] += 1
            self.lock.notify()
        try:
            return await request.future
        except asyncio.CancelledError:
            with self.lock:
                self.cancelled.append(request)
                self.lock.notify()
            raise

    def enter(self, request_id: str) -> None:
        """A trajectory starts: with --deterministic the engine waits until it has asked for tokens."""
        with self.lock:
            self.live.add(request_id)

    def leave(self, request_id: str) -> None:
        with self.lock:
            self.live.discard(request_id)
            self.cached.pop(request_id, None)
            self.turns.pop(request_id, None)
            self.lock.notify()

    def poke(self) -> None:
        """Makes a waiting `step` return."""
        with self.lock:
            self.poked = True
            self.lock.notify()

    # -- main thread

    def _ready(self) -> bool:
        if self.poked or self.cancelled:
            return True
        if self.args.deterministic and not all(self.pending[t] for t in self.live):
            return False  # a trajectory is still thinking: what it asks next must join this very step
        return bool(self.inbox or self.waiting or self.running)

    def step(self, timeout: float = 0.2) -> None:
        """Takes in new requests, runs one model step, hands out finished ones. Waits up to `timeout` s for work."""
        self._require("awake")
        started = time.perf_counter()
        with self.lock:
            ready = self.lock.wait_for(self._ready, timeout)
            n = 0
            while not self.running and len(self.inbox) > n:  # idle so far: a whole wave is on its way, and a start
                n = len(self.inbox)  # with its first few requests would cost model steps
                self.lock.wait(0.002)
            poked, self.poked = self.poked, False
            cancelled, self.cancelled = self.cancelled, []
            arrived: list[_Request] = []
            if ready and not poked:
                arrived, self.inbox = self.inbox, []
        self.statistics["idle_s"] += time.perf_counter() - started
        if self.args.deterministic:
            arrived.sort(key=lambda request: (request.request_id, request.turn))
        self.waiting += arrived
        aborted = self._drop(cancelled)
        if poked or not ready:
            self._advance(aborted, [], False)
        else:
            self._advance(aborted, self._fitting(), True)

    def _fitting(self) -> list[_Request]:
        """Takes from the queue what starts now: turns of trajectories under way, then new ones while the KV cache has
        room, so that what is cached for a trajectory is not thrown out while its tools run. First come, first served.
        """
        if not self.waiting:
            return []
        cache = self.core.vllm_config.cache_config
        scheduler = self.core.engine_core.engine_core.scheduler
        room = (KV_FULL - scheduler.kv_cache_manager.usage) * cache.num_gpu_blocks * cache.block_size  # tokens
        room -= sum(request.num_tokens for request in scheduler.waiting)  # suspended ones come back for theirs
        asking = {request.request_id for request in (*self.waiting, *self.running.values())}
        with self.lock:
            room -= sum(n for name, n in self.cached.items() if name not in asking)  # those whose tools run
        fitting = [request for request in self.waiting if request.turn]
        new = [request for request in self.waiting if not request.turn]
        room -= sum(len(request.prompt_ids) for request in fitting)
        while new and (room > len(new[0].prompt_ids) or not (fitting or self.running)):
            room -= len(new[0].prompt_ids)
            fitting.append(new.pop(0))
        self.waiting = new
        return fitting

    def _advance(self, aborted: list[str], added: list[_Request], step: bool) -> None:
        """What all ranks of a team do in lock step: aborts, additions, then one model step if there is work."""
        step, now = step and bool(added or self.running), time.monotonic()
        if not (aborted or added or step) and not (self.team and now - self.told > 0.5):
            return
        if self.team:  # in idle times too, twice a second: a follower that only waits hears no signal
            self.told = now
            requests = [(r.id, r.request_id, r.turn, r.prompt_ids, r.params, r.images) for r in added]
            dist.broadcast_object_list([(aborted, requests, step)], group=self.team, group_src=0)
        self._deliver(self._run(aborted, added, step))

    def follow(self, between: Callable[[], Any] = lambda: None) -> None:
        """Does what the leader of this rank's team does, until it calls `dismiss`; calls `between` before each step."""
        while True:
            command: list = [None]
            dist.broadcast_object_list(command, group=self.team, group_src=0)
            if command[0] is None:
                return
            between()
            aborted, requests, step = command[0]
            self._run(aborted, [_Request(*request, None, None) for request in requests], step)

    def dismiss(self) -> None:
        """The leader's phase is over: its followers return from `follow`."""
        if self.team:
            dist.broadcast_object_list([None], group=self.team, group_src=0)

    def check_team(self) -> None:
        """--check_sync: raises RuntimeError unless all ranks of this --tp team sampled the same tokens so far."""
        if self.team and self.args.check_sync:
            if len(set(all_gather(self.digest.hexdigest(), self.team))) > 1:
                raise RuntimeError(f"the ranks of a --tp team sampled different tokens in version {self.version}")

    def _run(self, aborted: list[str], added: list[_Request], step: bool) -> list[tuple]:
        """Returns (request, TokenOutput or error) pairs of what came to its end."""
        if aborted:
            self.core.abort_request(aborted)
        for id in aborted:
            self.running.pop(id, None)
        results: list[tuple[_Request, TokenOutput | Exception]] = []
        for request in added:
            try:
                self._admit(request)
            except Exception as error:  # vLLM refuses this request (its exceptions have no common base); others go on
                results.append((request, ValueError(str(error))))
        for output in self.core.step() if step and self.running else ():
            if output.finished:
                request = self.running.pop(output.request_id)
                results.append((request, self._result(request, output)))
        return results

    def _admit(self, request: _Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            **request.params,
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            detokenize=bool(request.params.get("stop")),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": request.prompt_ids}
        if request.images:
            prompt["multi_modal_data"] = {"image": request.images}
        self.core.add_request(request.id, prompt, params)
        self.running[request.id] = request

    def _result(self, request: _Request, output) -> TokenOutput:
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        versions: list[int] = []
        for n, version in [*request.spans, (len(ids), self.version)]:  # n tokens were there when `version` went
            versions += [version] * (n - len(versions))
        n_prompt, n_cached = len(output.prompt_token_ids), output.num_cached_tokens or 0
        new = len(ids) - request.n_counted
        self.statistics += Counter(tokens=new, prompt_tokens=n_prompt, cached_tokens=n_cached)
        with self.lock:
            if request.request_id in self.live:
                self.cached[request.request_id] += n_prompt - n_cached + len(ids)
        if self.args.check_sync:
            self.digest.update(repr((request.id, ids)).encode())
        return TokenOutput(
            token_ids=ids,
            logprobs=list(completion.logprobs.logprobs),
            versions=versions,
            stop_reason=completion.finish_reason if completion.finish_reason in ("stop", "length") else "abort",
            prompt_ids=list(output.prompt_token_ids),
        )

    def _deliver(self, results: list[tuple[_Request, TokenOutput | Exception]]) -> None:
        if not results:
            return
        with self.lock:
            for request, _ in results:
                self._settle(request)

        def resume():
            for request, result in results:
                if not request.future.done():
                    if isinstance(result, Exception):
                        request.future.set_exception(result)
                    else:
                        request.future.set_result(result)

        results[0][0].loop.call_soon_threadsafe(resume)  # one wake-up of the other thread a step, not one a request

    def _settle(self, request: _Request) -> None:
        """One call less for its trajectory; the caller holds the lock."""
        self.pending[request.request_id] -= 1
        if self.pending[request.request_id] <= 0:
            del self.pending[request.request_id]

    def _drop(self, cancelled: list[_Request]) -> list[str]:
        """Forgets requests that nobody awaits any more; returns the ids of those that vLLM has to abort."""
        aborted = []
        for request in cancelled:
            if request.id in self.running:
                aborted.append(request.id)
            elif request in self.waiting:
                self.waiting.remove(request)
            else:
                with self.lock:
                    if request not in self.inbox:
                        continue  # finished in the step in which it was cancelled
                    self.inbox.remove(request)
            with self.lock:
                self._settle(request)
        return aborted

    def drain(self) -> None:
        """Gives up every request, for the end of an interrupted phase."""
        with self.lock:
            requests, self.inbox, self.cancelled = self.inbox, [], []
            requests += [*self.waiting, *self.running.values()]
            self.pending.clear()
            self.live.clear()
            self.cached.clear()
        self.waiting.clear()
        self._advance(list(self.running), [], False)
        for request in requests:
            request.loop.call_soon_threadsafe(request.future.cancel)


def _name_shared_memory() -> None:
    """CPU: vLLM names the memory that ranks of a team share after its init method, which for all jobs is "env://"."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    name = [f"tcp://flatrl:{uuid4().hex}"]  # never connected to: the process group exists
    dist.broadcast_object_list(name)
    ExecutorWithExternalLauncher._distributed_args = lambda self: (
        name[0], int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    )  # fmt: skip


def _team(tp: int) -> tuple[bool, dist.ProcessGroup | None]:
    """Whether this rank leads its --tp group of consecutive ranks, and the group (None of one alone)."""
    if tp == 1:
        return True, None
    rank = dist.get_rank()
    for first in range(0, dist.get_world_size(), tp):  # every rank takes part in making every group
        group = dist.new_group(list(range(first, first + tp)), timeout=PATIENCE, backend="gloo")
        if first <= rank < first + tp:
            mine = group
    return rank % tp == 0, mine


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bit patterns, modulo 2^64: the same in whatever pieces they are summed."""
    bits = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.detach().contiguous().view(bits).sum(dtype=torch.int64)


def _load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[dict[str, str], set[str]]:
    """Loads; the engine's name of each tensor sent, and the parameters that got none."""
    from vllm.distributed import get_tp_group

    fused, sent, at = _fused(model), {}, "the first parameter"
    parts = {name: x for inside in fused.values() for name, x in inside.items()}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if hasattr(mapper, "orig_to_new_stacked"):  # would give the fused parameter's name
        mapper = dataclasses.replace(mapper, orig_to_new_stacked={})

    def one_by_one():
        nonlocal at
        for name, tensor in named_tensors:
            at = name
            if name in sent:
                raise RuntimeError("it came twice")
            sent[name] = (mapper and mapper._map_name(name)) or name
            part = parts.get(sent[name])
            # vLLM complains of a tensor that is too small, and takes the first rows of one that is too large.
            if part is not None and tensor.numel() > part.numel() * get_tp_group().world_size:
                raise RuntimeError(f"its shape is {tuple(tensor.shape)}, the engine's {tuple(part.shape)}")
            yield name, tensor

    try:
        loaded = model.load_weights(one_by_one())
    except Exception as error:  # vLLM's own are bare assertions, among others
        raise RuntimeError(f"weight sync failed at {at}: {str(error) or repr(error)}") from error
    missing, arrived = set(), set(sent.values())
    for name, inside in fused.items():
        if name not in loaded:
            missing |= inside.keys()
        elif arrived & inside.keys():  # vLLM calls qkv_proj loaded when q_proj was
            missing |= inside.keys() - arrived
    return sent, missing


def _fused(model: torch.nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Each parameter of the engine: the parameters that it consists of, by their names before fusing (q, k and v of
    qkv), as rows of it, this rank's share; most consist of themselves."""
    fused = {}
    for name, parameter in model.named_parameters():
        path, _, kind = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        names = getattr(model, "packed_modules_mapping", {}).get(module, ())
        rows = getattr(model.get_submodule(path), "output_partition_sizes", ())
        if len(names) == len(rows) > 1 and sum(rows) == len(parameter):
            tensors = parameter.split(rows)
            fused[name] = {f"{parent}.{part}.{kind}": x for part, x in zip(names, tensors, strict=True)}
        else:
            fused[name] = {name: parameter}
    return fused


def _limit_vocabulary(model: torch.nn.Module, vocab_size: int | None, banned: int | None = None) -> None:
    """Gives ids from vocab_size on no probability: the head has rows for them, the tokenizer has no token (vllm#13175).
    Nor has the id `banned` any.

    Here, on the logits themselves, so that whatever samples from them and whatever reports logprobs agree.
    """
    compute_logits = model.compute_logits

    def limited(*args, **kwargs):
        logits = compute_logits(*args, **kwargs)
        if logits is not None:  # ranks that don't sample have none
            if vocab_size is not None:
                logits[..., vocab_size:] = float("-inf")
            if banned is not None:
                logits[..., banned] = float("-inf")
        return logits

    model.compute_logits = limited


# ---------------------------------------------------------------- one phase


class Session:
    """The engine as one trajectory sees it: calls carry the trajectory's own name, whatever id its agent loop made up
    (verl's loops draw a random uuid), so that seeds depend on (seed, step, prompt, sample, turn) alone. Times them too.
    """

    def __init__(self, engine: Engine, name: str, stop_token_ids: Sequence[int] = ()):
        """stop_token_ids end a turn too, but not as the template's end-of-turn tokens do: no agent loop sees them."""
        self.engine, self.name, self.generate_s, self.stop_token_ids = engine, name, 0.0, stop_token_ids
        self.oldest: int | None = None  # least version of a token sampled

    async def generate(self, *, request_id, prompt_ids, sampling_params, image_data=None) -> TokenOutput:
        started = time.perf_counter()
        if self.stop_token_ids:
            stops = [*sampling_params.get("stop_token_ids", ()), *self.stop_token_ids]
            sampling_params = {**sampling_params, "stop_token_ids": stops}
        try:
            out = await self.engine.generate(
                request_id=self.name, prompt_ids=prompt_ids, sampling_params=sampling_params, image_data=image_data
            )
        finally:
            self.generate_s += time.perf_counter() - started
        if out.versions:  # of calls made at once the first to return need not be the oldest
            self.oldest = out.versions[0] if self.oldest is None else min(self.oldest, out.versions[0])
        return out


@dataclass
class Phase:
    """What a rollout phase brought, over all ranks; `add` joins two.

    outputs in (prompt, sample, segment) order; output.extra says which ("prompt", "sample", "segment").
    counts: "failed_agent_loop", "failed_reward", "skipped", "stale_groups"; errors: a dict for each failure, with its
    traceback.
    statistics, sums over the engines: "tokens" sampled, "prompt_tokens" of all calls, "cached_tokens" of those.
    """

    outputs: list[AgentLoopOutput] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    errors: list[dict] = field(default_factory=list)
    statistics: Counter = field(default_factory=Counter)
    idle_s: list[float] = field(default_factory=list)  # of each rank: seconds in which its engine had nothing to do
    seconds: float = 0.0
    sync_s: float = 0.0
    interrupted: bool = False
    grading: list["Grading"] = field(default_factory=list)  # rewards still being computed: see `grade`

    @property
    def tokens(self) -> int:
        return self.statistics["tokens"]

    def add(self, other: "Phase") -> None:
        self.outputs += other.outputs
        self.counts += other.counts
        self.errors += other.errors
        self.statistics += other.statistics
        self.idle_s = [sum(pair) for pair in itertools.zip_longest(self.idle_s, other.idle_s, fillvalue=0.0)]
        self.seconds += other.seconds
        self.sync_s += other.sync_s
        self.interrupted |= other.interrupted
        self.grading += other.grading


@dataclass
class Grading:
    """The rewards of this rank's trajectories, being computed on the background loop."""

    tasks: dict[tuple[int, int], asyncio.Task] = field(default_factory=dict)  # (prompt, sample) -> rewards or error

    async def results(self) -> dict[tuple[int, int], list | dict]:
        return dict(zip(self.tasks, await asyncio.gather(*self.tasks.values()), strict=True))


@dataclass
class Workplace:
    """What every rollout phase of a run shares, made once by train.py."""

    engine: Engine
    background: Background
    task: object
    tokenizer: object
    processor: object
    args: object
    store: dist.Store  # shared by the ranks: the prompt counters
    should_stop: Callable[[], bool] = lambda: False
    pool: "AsyncPool | None" = None  # with --max_staleness


@dataclass(eq=False)
class Group:
    """The trajectories of one prompt, on the rank that drew it. What they bring is in the fields of Phase."""

    number: int
    left: int  # trajectories not yet at their end
    dropped: bool = False
    sessions: list[Session] = field(default_factory=list)
    brought: Phase = field(default_factory=Phase)
    grading: Grading = field(default_factory=Grading)
    tasks: list[asyncio.Task] = field(default_factory=list)


class Pool:
    """The groups that this rank runs, on the background loop; it lives for one phase or, with --max_staleness, for the
    run. Ranks draw numbers from one counter, each when it has room; below `limit` a number is a prompt to start with.

    kind: "train" | "eval" | "greedy" (ReMax's baselines); with step it makes the trajectories' names, and so their
    seeds. row_of(number) -> row.
    """

    def __init__(
        self, place: Workplace, kind: str, group_size: int, sampling: dict, row_of: Callable[[int], dict], slots: int,
        draw: Callable[[], int], step: int = 0, limit: int = 0, endless: bool = False,
    ):  # fmt: skip
        self.place, self.kind, self.group_size, self.sampling, self.row_of = place, kind, group_size, sampling, row_of
        self.slots, self.draw, self.step, self.limit, self.endless = slots, draw, step, limit, endless
        self.next = 0  # the number behind the highest one started with
        self.name = f"{kind}-{step:08d}"
        self.groups: dict[int, Group] = {}
        self.leaving: list[asyncio.Task] = []  # cancelled trajectories of groups that were dropped
        self.raised = asyncio.Event()  # the limit was
        self.printed: set[str] = set()
        self.closing = False
        self.ended = threading.Event()  # a cancelled future is done at once, its coroutines when tools are released
        self.future = place.background.submit(self.work())
        self.future.add_done_callback(lambda _: place.engine.poke())

    async def work(self) -> None:
        try:
            room = asyncio.Semaphore(self.slots)
            async with asyncio.TaskGroup() as tasks:
                while self.place.engine.leader:  # draws the next prompt only when there is room for it
                    await room.acquire()
                    number = self.draw()
                    while number >= self.limit:
                        if not self.endless:
                            return
                        await self.raised.wait()
                        self.raised.clear()
                    group = self.groups[number] = Group(number, self.group_size)
                    self.next = max(self.next, number + 1)
                    for j in range(self.group_size):
                        if j > 0:
                            await room.acquire()
                        if group.dropped:
                            room.release()
                            break
                        name = f"{self.kind}-{self.step:08d}-{number:06d}-{j:04d}"
                        self.place.engine.enter(name)
                        group.sessions.append(Session(self.place.engine, name, self.sampling.get("stop_token_ids", ())))
                        group.tasks.append(tasks.create_task(self.trajectory(group, j)))
                        group.tasks[j].add_done_callback(lambda _, name=name: self.leave(name, room))
        finally:
            self.ended.set()

    def leave(self, name: str, room: asyncio.Semaphore) -> None:
        self.place.engine.leave(name)
        room.release()

    async def trajectory(self, group: Group, j: int) -> None:
        """Runs one to its end; whatever comes of it is in the group."""
        place, args, step, session = self.place, self.place.args, self.step, group.sessions[j]
        row = _own(self.row_of(group.number))  # what an agent does to its messages is not for the others
        try:
            cls = agent_loop_class(row, place.task, args)
            loop = cls(session, place.tokenizer, place.processor, place.task, args)
            stops = [] if self.sampling.get("ignore_eos") else place.engine.stop_token_ids
            sampling = {**self.sampling, "stop_token_ids": stops}
            # The built-in loops mind --trajectory_timeout, and keep what they have; this is for those that don't.
            patience = args.trajectory_timeout and args.trajectory_timeout + 4 * args.tool_timeout
            more = {"step": step, "rollout_n": j, "validate": self.kind == "eval"}
            async with asyncio.timeout(patience or None):
                outputs = await loop.run(sampling, **{**row, **more})
            outputs = [outputs] if isinstance(outputs, AgentLoopOutput) else list(outputs)
            if not outputs:
                group.brought.counts["skipped"] += 1
            for k, output in enumerate(outputs):
                if not isinstance(output, AgentLoopOutput):
                    raise TypeError(f"{cls.__name__}.run returned a {type(output).__name__}, not an AgentLoopOutput")
                if place.processor:
                    check_images(output, place.processor)
                output.extra = {**output.extra, "prompt": group.number, "sample": j, "segment": k}
                output.text = output.text or place.tokenizer.decode(output.response_ids, skip_special_tokens=True)
                said = {"role": "assistant", "content": output.text}
                output.messages = output.messages or [*row["prompt"], said]
            if outputs and not group.dropped:  # an agent may ignore its cancellation
                outputs[-1].metrics["generate_s"] = session.generate_s
                self.begin_grading(group, j, outputs)
        except BaseException:
            if group.dropped or self.closing:
                raise
            group.brought.counts["failed_agent_loop"] += 1  # also where an agent's own scope cancelled its task
            group.brought.errors.append(self.failure("failed_agent_loop", group.number, j))
        group.left -= 1
        if not (group.left or group.dropped):  # a dropped one is gone, and must not count as done as well
            place.store.add(f"{self.name}/done", 1)

    def begin_grading(self, group: Group, j: int, outputs: list[AgentLoopOutput]) -> None:
        # Beside the other trajectories, on copies: what a reward function writes comes back with the reward (`grade`).
        copies = [_copy(output) for output in outputs]
        for output in outputs:
            output.reward = None  # until it is known to be one
        group.brought.outputs += outputs
        group.grading.tasks[group.number, j] = asyncio.create_task(self.graded(group, j, copies))

    async def graded(self, group: Group, j: int, outputs: list[AgentLoopOutput]) -> list | dict:
        args, row = self.place.args, _own(self.row_of(group.number))
        try:
            async with asyncio.timeout(args.reward_timeout or None):
                await score(self.place.task, outputs, row, args.filter_metric)
            return [{field: getattr(output, field) for field in GRADED} for output in outputs]
        except BaseException as error:
            if group.dropped or self.closing or error.args == (GIVEN_UP,):
                raise
            return self.failure("failed_reward", group.number, j)

    def failure(self, kind: str, number: int, j: int) -> dict:
        if kind not in self.printed:  # the first of its kind is shown, all are counted and written with the rollouts
            self.printed.add(kind)
            where = f"step {self.step}, prompt {number}, sample {j}"
            print(f"\n{kind} in {where}:\n{traceback.format_exc()}", file=sys.stderr)
        return {"prompt": number, "sample": j, "kind": kind, "error": traceback.format_exc()}

    # -- main thread

    def n_done(self) -> int:
        """Groups done so far, over all ranks."""
        return self.place.store.add(f"{self.name}/done", 0)

    def run_until(self, over: Callable[[], bool], title: str, total: int, last: bool = True) -> bool:
        """Steps the engine until `over()`; False if the run was told to stop meanwhile, and everything is given up.

        last: nothing is under way any more then. On a rank that doesn't lead its --tp group: follows its leader until
        that one's phase is over. Raises what ended the pool itself.
        """
        engine, before = self.place.engine, self.place.engine.statistics["tokens"]
        if not engine.leader:
            engine.follow(self.place.should_stop)
            return True
        started = shown = time.perf_counter()
        first = self.n_done()
        try:
            with _progress(total, title) as bar:
                while not (over() or self.future.done()):
                    engine.step(0.02 if self.endless else 0.2)  # other ranks may end an endless pool's phase
                    if time.perf_counter() - shown > 0.5:
                        shown = time.perf_counter()
                        bar.n = self.n_done() - first
                        rate = (engine.statistics["tokens"] - before) / (shown - started)
                        bar.set_postfix_str(f"{rate:,.0f} tokens/s in this engine")
                        if self.place.should_stop():
                            self.close()
                            return False
            if self.future.done():
                self.future.result()
            if last:
                engine.drain()  # calls that were cancelled while the last model step ran
            return True
        finally:
            engine.dismiss()

    def under_way(self) -> bool:
        """Whether a trajectory is not at its end, or one that was cancelled still releases its tools."""
        return any(g.left for g in list(self.groups.values())) or not all(task.done() for task in self.leaving)

    def close(self) -> None:
        """Gives up what is under way: agent loops are cancelled and release their tools, graders are cancelled."""
        self.closing = True
        self.future.cancel()
        self.place.engine.drain()
        self.ended.wait(timeout=10)
        for group in list(self.groups.values()):
            cancel(self.place, group.grading)


def rollout(
    place: Workplace,
    rows: list[dict],
    step: int,
    group_size: int,
    sampling_params: dict,
    kind: str = "train",
    first: int = 0,
    wait: bool = True,
) -> Phase:
    """Runs group_size trajectories for each row, on all ranks together; the engine must be awake.

    kind: "train" | "eval" | "greedy". first: number of the first row among the step's prompts, when a step has several
    rollouts of a kind.

    Every rank passes the same rows and gets the same result: whole groups in (prompt, sample) order. A trajectory
    whose agent loop or reward raises is left out and counted; so is a row whose loop returns [].
    wait=False: returns when the trajectories are done, while slow graders may still run; `grade` waits for them.
    Raises RuntimeError if nothing is left of a step's first rollout.
    """
    args, meter, end = place.args, Meter(place.engine), first + len(rows)
    if args.deterministic:  # which rank runs a prompt must not depend on timing
        rank, world = dist.get_rank() // args.tp, dist.get_world_size() // args.tp
        numbers = iter([i for i in range(first, end) if i % world == rank])
    else:  # work is shared: who has room takes the next prompt
        numbers = _ticket_numbers(place.store, f"{kind}-{step:08d}-{first}/next", first)
    slots = len(rows) * group_size if args.deterministic else _slots(args, len(rows), group_size)
    pool = Pool(
        place, kind, group_size, sampling_params, lambda i: rows[i - first], slots, lambda: next(numbers, end), step,
        limit=end,
    )  # fmt: skip
    finished = pool.run_until(lambda: False, f"{kind} {step}", len(rows))
    # A straggler may still write to its group, which must not change while it is sent: an interrupted phase sends none.
    every = _gather(list(pool.groups.values()) if finished else None, meter)
    must_bring = kind != "greedy" and first == 0
    if wait and not every.interrupted:
        grade(place, every, must_bring)
        every.seconds = meter.read()[0]
    if must_bring and not every.interrupted:
        _must_have_tokens(every, kind, step)
    return every


class Meter:
    """Seconds and engine statistics of this rank since it was made, and of what came `earlier`: another's `read`."""

    def __init__(self, engine: Engine, earlier: tuple[float, Counter] = (0.0, Counter())):
        self.engine, self.started, self.before = engine, time.perf_counter() - earlier[0], Counter(engine.statistics)
        self.before.subtract(earlier[1])

    def read(self) -> tuple[float, Counter]:
        return time.perf_counter() - self.started, self.engine.statistics - self.before


def _ticket_numbers(store: dist.Store, key: str, first: int) -> Iterator[int]:
    """first, first + 1, ... each to one rank only."""
    while True:
        yield first + store.add(key, 1) - 1


def _slots(args, n_groups: int, group_size: int) -> int:
    """Trajectories under way on one rank: an equal share, or the first rank to start would take everything."""
    world = dist.get_world_size() // args.tp
    return max(group_size, min(args.max_concurrent, -(-n_groups // world) * group_size))


class AsyncPool(Pool):
    """Groups that live on over updates, at most --max_staleness versions (AReaL, arXiv 2505.24298, sec. 5).

    `rollout` returns when --prompts_per_step groups are done; the others wait in `generate` while the policy trains,
    and go on under the next weights. A group's age is that of its oldest sampled token: too old ones are dropped whole
    and replaced by fresh prompts. Surplus groups carry over to the next phase, the oldest first.
    """

    def __init__(
        self, place: Workplace, rows: list[dict], sampling: dict, step: int, prompts_drawn: int = 0,
        unfinished: Sequence[int] = (),
    ):  # fmt: skip
        """prompts_drawn, unfinished: positions in the endless shuffle of the rows (data.prompt_order): where to go on,
        and those drawn by an earlier run that did not come to be trained on, which are drawn first.
        """
        args = place.args
        self.rows, self.start, self.prompts_drawn, self.unfinished = rows, step, prompts_drawn, list(unfinished)
        # The same on all ranks: done groups that are gone; groups that were too old; numbers not trained on so far.
        self.n_gone, self.n_stale, self.pending = 0, 0, set(range(len(self.unfinished)))
        self.chosen: set[int] = set()  # of them, those of the last rollout
        self.settled = (0.0, Counter())  # seconds and statistics of `settle`, which the next rollout reports
        self.seen = len(self.unfinished)  # numbers below it are known to have been started with, or are unfinished ones
        numbers = _ticket_numbers(place.store, f"train-{step:08d}-async/next", 0)
        n_groups = math.ceil(args.oversample * args.prompts_per_step)
        super().__init__(
            place, "train", args.group_size, sampling, self.row, _slots(args, n_groups, args.group_size),
            lambda: next(numbers), step, endless=True,
        )  # fmt: skip

    def position(self, number: int) -> int:
        n = len(self.unfinished)
        return self.unfinished[number] if number < n else self.prompts_drawn + number - n

    def row(self, number: int) -> dict:
        (i,) = prompt_order(len(self.rows), self.position(number), 1, self.place.args.seed)
        return self.rows[i]

    def to_resume(self, steps_done: int) -> dict:
        """The arguments prompts_drawn and unfinished of a pool that goes on from here; the batch of a step that was
        interrupted after its rollout is drawn again."""
        lost = self.chosen if steps_done <= self.step else set()
        unfinished = sorted(map(self.position, self.pending | lost))
        return {"prompts_drawn": self.position(self.seen), "unfinished": unfinished}

    def rollout(self, step: int) -> Phase:
        """A batch of whole groups in (prompt, sample) order, the same on every rank.

        The engine must be awake; it is left with requests under way: sleep(keep=True). Rewards may still be on their
        way: see `grade`. counts["stale_groups"] were dropped. Raises RuntimeError if the batch has no sampled token.
        """
        args, meter = self.place.args, Meter(self.place.engine, self.settled)
        self.settled = (0.0, Counter())
        self.step, self.chosen, batch = step, set(), args.prompts_per_step
        suspended = self.place.engine.suspended()
        limit = step - args.max_staleness
        stale = [n for n, group in list(self.groups.items()) if self.oldest(group, suspended) < limit]
        gone = [group for part in all_gather(self.submit(self.take(stale, drop=True))) for group in part]
        self.pending -= {number for number, *_ in gone}
        self.n_gone += sum(done for _, done, _ in gone)
        self.n_stale += len(gone)
        # AReaL's capacity: as many batches may have been started by now, besides what was dropped.
        ahead = min(step + 1 + args.max_staleness, args.num_steps) - self.start
        self.submit(self.set_limit(ahead * batch + self.n_stale))
        finished = self.run_until(lambda: self.n_done() - self.n_gone >= batch, f"train {step}", batch, last=False)
        self.place.engine.mark_versions()
        mine = [(self.oldest(group), n) for n, group in list(self.groups.items()) if not group.left]
        done, started = zip(*all_gather((mine if finished else None, self.next)), strict=True)
        if None in done:
            return Phase(interrupted=True)
        self.chosen = chosen = {number for _, number in sorted(itertools.chain(*done))[:batch]}
        self.pending = (self.pending | set(range(self.seen, max(started)))) - chosen
        self.seen = max(self.seen, *started)
        self.n_gone += batch
        every = _gather([self.groups[number] for number in sorted(chosen & set(self.groups))], meter)
        self.submit(self.take(chosen))
        for _, _, failed in gone:
            every.add(failed)
        every.counts["stale_groups"] = len(gone)
        _must_have_tokens(every, self.kind, step)
        return every

    def settle(self, give_up: bool = False) -> bool:
        """For an evaluation: starts nothing new until the next `rollout`, and lets what is under way come to its end
        (give_up: cancels it). False, on every rank, if one of them was told to stop meanwhile.
        """
        meter = Meter(self.place.engine)
        self.submit(self.set_limit(0))
        if give_up:
            self.submit(self.take(list(self.groups), drop=True))
        went_on = self.run_until(lambda: not self.under_way(), "before the evaluation", len(self.groups))
        self.settled = meter.read()
        return all(all_gather(went_on))

    def end(self) -> None:
        """Gives up what is still under way, on all ranks: the end of a run, which must not leave tools unreleased."""
        engine = self.place.engine
        if engine.leader:
            self.close()
            engine.dismiss()
        else:
            engine.follow()

    def oldest(self, group: Group, suspended: dict[str, int] | None = None) -> int:
        """The version that sampled a group's first token; the engine's if there is none yet."""
        versions = [session.oldest for session in group.sessions]
        versions += [(suspended or {}).get(session.name) for session in group.sessions]
        return min((v for v in versions if v is not None), default=self.place.engine.version)

    def submit(self, coroutine: Coroutine):
        """The result of something that must not run beside the pool's own coroutines."""
        return self.place.background.submit(coroutine).result()

    async def set_limit(self, limit: int) -> None:
        self.limit = limit
        self.raised.set()

    async def take(self, numbers: Iterable[int], drop: bool = False) -> list[tuple[int, bool, Phase]]:
        """Takes those groups out of the pool that this rank has; (number, whether it was done, failures) of each."""
        groups = [self.groups.pop(number) for number in numbers if number in self.groups]
        for group in groups:
            group.dropped = drop
            for task in [*group.tasks, *group.grading.tasks.values()] if drop else ():
                task.cancel()
        self.leaving = [task for task in self.leaving if not task.done()]
        self.leaving += [task for group in groups for task in group.tasks if not task.done()]
        failed = [Phase(counts=group.brought.counts, errors=group.brought.errors) for group in groups]
        return [(group.number, not group.left, phase) for group, phase in zip(groups, failed, strict=True)]


def _must_have_tokens(phase: Phase, kind: str, step: int) -> None:
    if not any(1 in o.response_mask for o in phase.outputs):
        counts = dict(phase.counts)
        raise RuntimeError(f"{kind}-{step:08d} brought nothing to learn from: {counts}; {_first_error(phase)}")


def _first_error(phase: Phase) -> str:
    error = phase.errors[0]["error"].strip().splitlines()[-1] if phase.errors else "no loop sampled a token"
    return f"the first error: {error}"


def grade(place: Workplace, phase: Phase, must_bring: bool = False) -> None:
    """Waits until the rewards of a phase are there, on all ranks; a rollout without one is left out and counted.

    Sets phase.interrupted if the run is to stop meanwhile. Raises RuntimeError if must_bring and no reward came.
    """
    gradings, phase.grading = phase.grading, []
    for grading in gradings:
        future = place.background.submit(grading.results())
        while not future.done() and not place.should_stop():
            concurrent.futures.wait([future], timeout=0.2)
        done = future.done()
        if not done:
            cancel(place, grading)
        parts = all_gather(future.result() if done else None)
        if None in parts:
            phase.interrupted = True
            return
        results = {key: result for part in parts for key, result in part.items()}
        failures = [result for _, result in sorted(results.items()) if isinstance(result, dict)]
        failed = {(failure["prompt"], failure["sample"]) for failure in failures}
        phase.errors = sorted(phase.errors + failures, key=lambda e: (e["prompt"], e["sample"]))
        phase.counts.update(failure["kind"] for failure in failures)
        for output in phase.outputs:
            result = results.get((output.extra["prompt"], output.extra["sample"]))
            if isinstance(result, list):
                vars(output).update(result[output.extra["segment"]])
        phase.outputs = [o for o in phase.outputs if (o.extra["prompt"], o.extra["sample"]) not in failed]
    if must_bring and not phase.outputs:
        raise RuntimeError(f"no trajectory has a reward ({dict(phase.counts)}); {_first_error(phase)}")


GRADED = ("reward", "turn_rewards", "metrics")  # of an output, for a reward function to write
GIVEN_UP = "the run stops"  # what a grader's cancellation says


def _own(x):
    """Dicts and lists copied all the way down, the rest (images, arrays) shared: a fraction of deepcopy's time."""
    if isinstance(x, dict):
        return {key: _own(value) for key, value in x.items()}
    return [_own(value) for value in x] if isinstance(x, list) else x


def _copy(output: AgentLoopOutput) -> AgentLoopOutput:
    own = {"turn_rewards": list(output.turn_rewards), "metrics": dict(output.metrics), "extra": dict(output.extra)}
    return dataclasses.replace(output, **own)


def cancel(place: Workplace, grading: Grading) -> None:
    place.background.loop.call_soon_threadsafe(lambda: [task.cancel(GIVEN_UP) for task in grading.tasks.values()])


async def score(task, outputs: list[AgentLoopOutput], row: dict, metric: str = "outcome") -> None:
    """Sets the terminal reward of a rollout: the last output's own, else the task's; earlier segments share it.

    A reward function may also write to output.turn_rewards (process rewards) and output.metrics.
    Raises ValueError if the reward is not a finite number or a dict with one under "score" (and under `metric`, if that
    is a key: --filter_metric).
    """
    reward = outputs[-1].reward
    if reward is None:
        reward = await call(task.reward, outputs[-1], row)
    reward = _checked(reward)
    if metric not in ("outcome", "total"):
        if not isinstance(reward, dict) or metric not in reward:
            raise ValueError(f"--filter_metric {metric}: the reward is {reward!r}, not a dict with this key")
        reward = {**reward, metric: finite(reward[metric], f"--filter_metric {metric}")}
    own = [None if output.reward is None else _checked(output.reward) for output in outputs[:-1]]
    for output, its in zip(outputs, [*own, reward], strict=True):
        output.turn_rewards = [(at, finite(r, "a turn's reward")) for at, r in output.turn_rewards]
        output.reward = reward if its is None else its


def _checked(reward) -> float | dict:
    if isinstance(reward, dict):
        return {**reward, "score": finite(reward.get("score"), 'the "score" of a reward dict')}
    return finite(reward, "a reward")


def all_gather(x, group: dist.ProcessGroup | None = None) -> list:
    """Every rank's x (anything that pickles), in the order of ranks."""
    parts: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, x, group=group)
    return parts


def _gather(groups: list[Group] | None, meter: Meter) -> Phase:
    """Every rank's groups to every rank, in (prompt, sample, segment) order; None: this rank was told to stop."""
    mine = Phase(interrupted=groups is None)
    for group in groups or ():
        mine.add(group.brought)
    meter.engine.check_team()
    parts = all_gather((mine, meter.engine.leader, *meter.read()))
    every = Phase(seconds=meter.read()[0])
    for part, leads, seconds, statistics in parts:
        idle = statistics.pop("idle_s", 0.0) + max(0.0, every.seconds - seconds)  # who is done waits for the others
        every.add(part)
        if leads:  # a team counts once
            every.statistics += statistics
            every.idle_s.append(idle)
    every.outputs.sort(key=lambda o: (o.extra["prompt"], o.extra["sample"], o.extra["segment"]))
    every.errors.sort(key=lambda e: (e["prompt"], e["sample"]))
    own = Grading({key: task for group in groups or () for key, task in group.grading.tasks.items()})
    every.grading = [own]  # one on every rank, for `grade` gathers each
    return every


def _progress(total: int, title: str):
    from tqdm import tqdm

    # disable=None: no bar where the output is a file
    return tqdm(total=total, desc=title, unit="prompt", leave=False, disable=None if dist.get_rank() == 0 else True)
