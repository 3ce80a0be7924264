"""The colocated engine, and one rollout phase over many trajectories.

Two threads. The MAIN thread owns the device: it calls `Engine.step` in a rollout phase and trains in between. One
BACKGROUND thread runs one event loop for the whole run: agent loops, tools, rewards. `Engine.generate` is awaited on
the background loop; it posts a request that the main thread picks up at its next step, and resumes when the tokens are
there. Outside a rollout phase requests simply wait.

The engine is a state machine, so that nothing can be generated from stale weights:

    asleep --wake_weights--> weights --load_weights(version)--> synced --wake_kv--> awake --sleep--> asleep
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from agent_loop import AgentLoopOutput, TokenOutput, agent_loop_class, call, finite, reraise_cancellation
from data import total_reward, without_torchvision


def seed_of(*parts) -> int:
    """A sampling seed in [0, 2^63) that depends on the parts alone, e.g. (seed, "step-prompt-sample", turn)."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


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
            max_num_batched_tokens=max(8192, args.max_model_len),
            enable_chunked_prefill=False,  # vLLM's CPU build crashes on request seeds with chunked prefill
        )
    return arguments | json.loads(args.engine_args or "{}")


class Engine:
    """vLLM in this process, driven by `step` from the main thread and awaited through `generate` from the background.

    state: "asleep" | "weights" | "synced" | "awake"; version: of the weights loaded last, -1 before the first sync.
    Calls out of order raise RuntimeError. Token ids from vocab_size on (a padded vocabulary's) are never sampled, nor
    is image_token_id, the placeholder of a model that sees images (None: a text model): no image would belong to it.
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
        vision = image_token_id is not None
        if vision:
            without_torchvision()
        self.args, self.stop_token_ids = args, sorted(set(stop_token_ids))
        self.llm = LLM(**vllm_arguments(model, args, device, vision))
        # A malformed tool call is daily business and counted; its parsers need not log a traceback for each. Set here
        # because building an engine sets up vLLM's logging anew.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        self.core = self.llm.llm_engine
        if vocab_size or vision:
            self.llm.apply_model(lambda model: _limit_vocabulary(model, vocab_size, image_token_id))
        self.version = -1
        self.lock = threading.Condition()  # guards the five below, which both threads touch
        self.inbox: list[_Request] = []
        self.cancelled: list[_Request] = []
        self.pending: Counter[str] = Counter()  # trajectory -> its calls that wait for tokens
        self.live: set[str] = set()  # trajectories whose agent loop runs (--deterministic waits for them)
        self.poked = False
        self.turns: Counter[str] = Counter()  # trajectory -> calls so far in this phase; background thread only
        self.running: dict[str, _Request] = {}  # in vLLM; main thread only
        self.tokens = 0  # sampled since the engine was built
        self.state = "awake"
        self.sleep()

    # -- states

    def _require(self, state: str) -> None:
        if self.state != state:
            raise RuntimeError(f"the engine is {self.state!r}, this call needs {state!r}: see the order in rollout.py")

    def wake_weights(self) -> None:
        """Maps the weights' memory again; what they hold is undefined until `load_weights`."""
        self._require("asleep")
        self.core.wake_up(tags=["weights"])
        self.state = "weights"

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copies every parameter from (Hugging Face name, tensor) pairs; a tied weight comes once.

        Raises RuntimeError naming the parameters that did not arrive; the engine then stays unusable.
        """
        self._require("weights")
        (missing,) = self.llm.apply_model(lambda model: _load(model, named_tensors))
        if missing:
            raise RuntimeError(
                f"weight sync incomplete, these parameters of the engine got no tensor: {sorted(missing)}"
            )
        if not self.core.reset_prefix_cache():  # False while a request holds blocks: stale keys would be reused
            raise RuntimeError("the engine's prefix cache could not be reset after the weight sync")
        self.core.reset_encoder_cache()  # what the old weights made of images
        self.state, self.version = "synced", version

    def wake_kv(self) -> None:
        """Maps the KV cache; the engine can generate from here on."""
        self._require("synced")
        self.core.wake_up(tags=["kv_cache"])
        self.state = "awake"

    def sleep(self, level: int | None = None) -> None:
        """Frees the KV cache, and the weights' memory (level 1 keeps a copy in host memory, level 2 drops them).

        On CPU nothing is freed, but the transitions and the cache resets are the same.
        """
        self._require("awake")
        with self.lock:
            if self.pending:
                raise RuntimeError(f"{sum(self.pending.values())} requests are unfinished: end the rollout phase first")
        self.core.sleep(level=level or self.args.sleep_level, mode="abort")
        self.turns.clear()
        self.state = "asleep"

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
        return bool(self.inbox or self.running)

    def step(self, timeout: float = 0.2) -> None:
        """Takes in new requests, runs one model step, hands out finished ones. Waits up to `timeout` s for work."""
        self._require("awake")
        with self.lock:
            ready = self.lock.wait_for(self._ready, timeout)
            waiting = 0
            while not self.running and len(self.inbox) > waiting:  # idle so far: a whole wave is on its way, and a
                waiting = len(self.inbox)  # start with its first few requests would cost model steps
                self.lock.wait(0.002)
            poked, self.poked = self.poked, False
            cancelled, self.cancelled = self.cancelled, []
            arrived: list[_Request] = []
            if ready and not poked:
                arrived, self.inbox = self.inbox, []
        self._drop(cancelled, arrived)
        if poked or not ready:
            return
        results: list[tuple[_Request, TokenOutput | Exception]] = []
        if self.args.deterministic:
            arrived.sort(key=lambda request: (request.request_id, request.turn))
        for request in arrived:
            try:
                self._admit(request)
            except Exception as error:  # vLLM refuses this request (its exceptions have no common base); others go on
                results.append((request, ValueError(str(error))))
        for output in self.core.step() if self.core.has_unfinished_requests() else ():
            if output.finished:
                request = self.running.pop(output.request_id)
                results.append((request, self._result(output)))
        self._deliver(results)

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

    def _result(self, output) -> TokenOutput:
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        self.tokens += len(ids)
        return TokenOutput(
            token_ids=ids,
            logprobs=list(completion.logprobs.logprobs),
            versions=[self.version] * len(ids),  # weights can't change under a live request: see `sleep`
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

    def _drop(self, cancelled: list[_Request], arrived: list[_Request]) -> None:
        for request in cancelled:
            if request in arrived:
                arrived.remove(request)
            elif self.running.pop(request.id, None):
                self.core.abort_request([request.id])
            else:
                with self.lock:
                    if request not in self.inbox:
                        continue  # finished in the step in which it was cancelled
                    self.inbox.remove(request)
            with self.lock:
                self._settle(request)

    def drain(self) -> None:
        """Gives up every request, for the end of an interrupted phase."""
        with self.lock:
            requests, self.inbox, self.cancelled = self.inbox, [], []
            requests += self.running.values()
            self.pending.clear()
            self.live.clear()
        self.core.abort_request(list(self.running))
        self.running.clear()
        for request in requests:
            request.loop.call_soon_threadsafe(request.future.cancel)


def _load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    loaded = model.load_weights(named_tensors)
    return {name for name, _ in model.named_parameters()} - set(loaded)


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

    def __init__(self, engine: Engine, name: str):
        self.engine, self.name, self.generate_s = engine, name, 0.0

    async def generate(self, *, request_id, prompt_ids, sampling_params, image_data=None) -> TokenOutput:
        started = time.perf_counter()
        try:
            return await self.engine.generate(
                request_id=self.name, prompt_ids=prompt_ids, sampling_params=sampling_params, image_data=image_data
            )
        finally:
            self.generate_s += time.perf_counter() - started


@dataclass
class Phase:
    """What a rollout phase brought, over all ranks; `add` joins two.

    outputs in (prompt, sample, segment) order; output.extra says which ("prompt", "sample", "segment").
    counts: "failed_agent_loop", "failed_reward", "skipped"; errors: one dict for each failure, with its traceback.
    """

    outputs: list[AgentLoopOutput] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    errors: list[dict] = field(default_factory=list)
    tokens: int = 0  # sampled
    seconds: float = 0.0
    interrupted: bool = False
    grading: list["Grading"] = field(default_factory=list)  # rewards still being computed: see `grade`

    def add(self, other: "Phase") -> None:
        self.outputs += other.outputs
        self.counts += other.counts
        self.errors += other.errors
        self.tokens += other.tokens
        self.seconds += other.seconds
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

    kind: "train" | "eval" | "greedy" (ReMax's baselines); with step it makes the trajectories' names, and so their
    seeds. first: number of the first row among the step's prompts, when a step has several rollouts of a kind.

    Every rank passes the same rows and gets the same result: whole groups in (prompt, sample) order. A trajectory
    whose agent loop or reward raises is left out and counted; so is a row whose loop returns [].
    wait=False: returns when the trajectories are done, while slow graders may still run; `grade` waits for them.
    Raises RuntimeError if nothing is left of a step's first rollout.
    """
    engine, args = place.engine, place.args
    rank, world = dist.get_rank(), dist.get_world_size()
    mine, name, numbers = Phase(), f"{kind}-{step:08d}", range(first, first + len(rows))
    grading = Grading()
    started, tokens_before = time.perf_counter(), engine.tokens
    total = len(rows) * group_size

    if args.deterministic:  # which rank runs a prompt must not depend on timing
        draws = iter(i for i in numbers if i % world == rank)
        slots = total
    else:  # work is shared: who has room takes the next prompt
        end = first + len(rows)
        draws = iter(lambda: min(first + place.store.add(f"{name}-{first}/next", 1) - 1, end), end)
        # No more than an equal share in flight, or the first rank to start would take everything.
        slots = max(group_size, min(args.max_concurrent, -(-len(rows) // world) * group_size))

    async def one(i: int, j: int, room: asyncio.Semaphore) -> None:
        trajectory = f"{name}-{i:06d}-{j:04d}"
        row = _own(rows[i - first])  # what an agent does to its messages is not for the others
        try:
            session = Session(engine, trajectory)
            try:
                loop = agent_loop_class(row, place.task, args)(
                    session, place.tokenizer, place.processor, place.task, args
                )
                sampling = {"stop_token_ids": engine.stop_token_ids, **sampling_params}
                # The built-in loops mind --trajectory_timeout, and keep what they have; this is for those that don't.
                patience = args.trajectory_timeout and args.trajectory_timeout + 4 * args.tool_timeout
                more = {"step": step, "rollout_n": j, "validate": kind == "eval"}
                async with asyncio.timeout(patience or None):
                    outputs = await loop.run(sampling, **{**row, **more})
            finally:
                engine.leave(trajectory)
                room.release()
            outputs = [outputs] if isinstance(outputs, AgentLoopOutput) else list(outputs)
            if not outputs:
                mine.counts["skipped"] += 1
                return
            for k, output in enumerate(outputs):
                if not isinstance(output, AgentLoopOutput):
                    raise TypeError(
                        f"{type(loop).__name__}.run returned a {type(output).__name__}, not an AgentLoopOutput"
                    )
                output.extra = {**output.extra, "prompt": i, "sample": j, "segment": k}
                output.text = output.text or place.tokenizer.decode(output.response_ids, skip_special_tokens=True)
                said = {"role": "assistant", "content": output.text}
                output.messages = output.messages or [*row["prompt"], said]
            outputs[-1].metrics["generate_s"] = session.generate_s
        except BaseException as error:
            reraise_cancellation(error)
            fail("failed_agent_loop", i, j)
            return
        # Beside the other trajectories, on copies: what a reward function writes comes back with the reward (`grade`).
        copies = [_copy(output) for output in outputs]
        for output in outputs:
            output.reward = None  # until it is known to be one
        mine.outputs += outputs
        grading.tasks[i, j] = asyncio.create_task(graded(copies, _own(rows[i - first]), i, j))
        place.store.add(f"{name}-{first}/done", 1)

    async def graded(outputs: list[AgentLoopOutput], row: dict, i: int, j: int) -> list | dict:
        try:
            async with asyncio.timeout(args.reward_timeout or None):
                await score(place.task, outputs, row, args.filter_metric)
            return [{field: getattr(output, field) for field in GRADED} for output in outputs]
        except BaseException as error:
            reraise_cancellation(error)
            return failure("failed_reward", i, j)

    def fail(kind: str, i: int, j: int) -> None:
        mine.counts[kind] += 1
        mine.errors.append(failure(kind, i, j))

    def failure(kind: str, i: int, j: int) -> dict:
        if kind not in printed:  # the first of its kind is shown, all are counted and written with the rollouts
            printed.add(kind)
            print(f"\n{kind} in step {step}, prompt {i}, sample {j}:\n{traceback.format_exc()}", file=sys.stderr)
        return {"prompt": i, "sample": j, "kind": kind, "error": traceback.format_exc()}

    printed: set[str] = set()

    ended = threading.Event()  # a cancelled future is done at once, its coroutines only when their tools are released

    async def phase() -> None:
        try:
            await trajectories()
        finally:
            ended.set()

    async def trajectories() -> None:
        room = asyncio.Semaphore(slots)
        await room.acquire()
        async with asyncio.TaskGroup() as tasks:
            for i in draws:
                for j in range(group_size):
                    if j > 0:
                        await room.acquire()
                    engine.enter(f"{name}-{i:06d}-{j:04d}")
                    tasks.create_task(one(i, j, room))
                await room.acquire()  # draw the next prompt only when there is room for it

    future = place.background.submit(phase())
    future.add_done_callback(lambda _: engine.poke())
    interrupted = False
    with _progress(rank, total, f"{kind} {step}") as bar:
        shown = started
        while not future.done():
            engine.step()
            if time.perf_counter() - shown > 0.5:
                shown = time.perf_counter()
                bar.n = place.store.add(f"{name}-{first}/done", 0)
                rewards = [total_reward(o) for o in mine.outputs if o.reward is not None]
                rate = (engine.tokens - tokens_before) * world / (shown - started)
                bar.set_postfix_str(f"{rate:,.0f} tokens/s, reward {sum(rewards) / max(1, len(rewards)):.3f}")
                if place.should_stop():
                    interrupted = True
                    future.cancel()
                    break
    engine.drain()  # nothing, or calls that were cancelled while the last model step ran
    if interrupted:
        ended.wait(timeout=10)
        cancel(place, grading)
    else:
        future.result()  # a failure of the phase itself ends the run
    mine.tokens = engine.tokens - tokens_before
    # A straggler may still write to `mine`, which must not change while it is sent: an interrupted phase sends nothing.
    every = _gather(Phase(interrupted=True) if interrupted else mine, started)
    every.grading = [grading]
    must_bring = kind != "greedy" and first == 0
    if wait and not every.interrupted:
        grade(place, every, must_bring)
        every.seconds = time.perf_counter() - started
    if must_bring and not every.interrupted and not any(1 in o.response_mask for o in every.outputs):
        raise RuntimeError(f"{name} brought nothing to learn from ({dict(every.counts)}); {_first_error(every)}")
    return every


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
        parts: list = [None] * dist.get_world_size()
        dist.all_gather_object(parts, future.result() if done else None)
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


def _own(x):
    """Dicts and lists copied all the way down, the rest (images, arrays) shared: a fraction of deepcopy's time."""
    if isinstance(x, dict):
        return {key: _own(value) for key, value in x.items()}
    return [_own(value) for value in x] if isinstance(x, list) else x


def _copy(output: AgentLoopOutput) -> AgentLoopOutput:
    own = {"turn_rewards": list(output.turn_rewards), "metrics": dict(output.metrics), "extra": dict(output.extra)}
    return dataclasses.replace(output, **own)


def cancel(place: Workplace, grading: Grading) -> None:
    place.background.loop.call_soon_threadsafe(lambda: [task.cancel() for task in grading.tasks.values()])


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


def _gather(mine: Phase, started: float) -> Phase:
    """Every rank's trajectories to every rank, in (prompt, sample, segment) order."""
    parts: list[Phase] = [mine] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    every = Phase(seconds=time.perf_counter() - started)
    for part in parts:
        every.add(part)
    every.outputs.sort(key=lambda o: (o.extra["prompt"], o.extra["sample"], o.extra["segment"]))
    every.errors.sort(key=lambda e: (e["prompt"], e["sample"]))
    return every


def _progress(rank: int, total: int, title: str):
    from tqdm import tqdm

    # disable=None: no bar where the output is a file
    return tqdm(total=total, desc=title, unit="traj", leave=False, disable=None if rank == 0 else True)
