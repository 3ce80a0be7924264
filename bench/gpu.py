"""Measures what only a GPU can show, on any host with one, in one table that is printed last.

    python bench/gpu.py                                  # (GPU) everything: 0.5B, 1.5B and 7B shapes of Qwen2.5
    python bench/gpu.py --only sync update --sizes 0.5B  # (GPU) some of it
    python bench/gpu.py --device cpu --tiny              # the same code on a CPU, two tiny shapes: no figure to report

Models are random and built here from configurations (bench/plan.py's shapes), with logits of
standard deviation 3, as trained ones have; nothing comes from a hub. Each section of each size
runs in a process of its own, so that one that fails, or dies of a CUDA error, leaves a line
with its reason and the others go on. The exit code is 1 if one failed.

    sleep      both levels, Adam's states present: memory freed, of what the engine holds;
               after --cycles, what is lost
    sync       a weight sync (wake, load, wake) against a plain copy of the same tensors
    agree      |logprob of the engine - of the trainer| of sampled tokens
    suspended  requests that go on over a sync, at both levels: tokens of each version, and
               their logprobs
    kernels    packed attention (a forest, windows) and token_logprobs, forward and backward,
               against float64
    rollout    tokens/s of engine.generate against plain LLM.generate, the same vLLM, CUDA
               graphs on both sides
    update     tokens/s and MFU of train.optimise, a bare loop (bench/update.py), peak memory
               against bench/plan.py's; 7B with 8 of its 28 layers, which is what one GPU holds
               with gradients and Adam's states
    trl        whole steps against TRL 1.16 with its vLLM colocated (bench/trl.py; pip install
               trl==1.16.0 datasets)
    run        train.py, two steps with PPO and --offload all, and its exit
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import common
import plan
import torch
from transformers import AutoModelForCausalLM

import data
import losses
import train
from flatrl import devices
from flatrl.processes import Background
from rollout import Engine

GIB = 1 << 30
PEAK = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
}  # bfloat16, dense, a second
SMALL_CACHE = '{"kv_cache_memory_bytes": 33554432}'  # of --engine_args, with --tiny
plan.SHAPES |= {
    "7B-8layers": (3584, 18944, 8, 28, 4, 152064, False),
    "tiny": (128, 256, 2, 4, 2, 320, True),
    "tiny-untied": (128, 256, 2, 4, 2, 320, False),
}
Row = tuple[str, str]  # what was measured, and the figure


def build(size: str, folder: Path, device: str) -> str:
    """Writes a model of that shape with random weights, and the calculator's tokenizer;
    returns its folder."""
    path = folder / size
    if not (path / "config.json").exists():
        config = plan.load_config(size)
        common.random_model(path)  # for the tokenizer
        config.update({"max_position_embeddings": 8192, "eos_token_id": 1})
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        torch.nn.init.constant_(
            model.model.norm.weight, 3 / config.initializer_range / config.hidden_size**0.5
        )
        model.save_pretrained(path)
    return str(path)


def start(options: argparse.Namespace, size: str, **flags):
    """Returns train.py's flags for that model, with these ones among them, and the
    accelerator."""
    values = dict(
        model=build(size, options.folder, options.device),
        output_dir=str(options.folder / "out"),
        lr=1e-6,
        gpu_memory_utilization=0.4,
        max_prompt_tokens=512,
        max_response_tokens=128,
        max_model_len=1024,
    )
    if options.tiny:
        values["engine_args"] = SMALL_CACHE
    args = train.Args(**(values | flags))
    accelerator, _ = devices.start_processes(args)
    train.complete_flags(args, accelerator.device.type == "cuda")
    data.register_packed_attention()
    return args, accelerator


def start_with_engine(options: argparse.Namespace, size: str):
    """Returns the flags, the accelerator, an engine of that model, and the event loop that its
    requests run on."""
    args, accelerator = start(options, size)
    return args, accelerator, Engine(args.model, args, accelerator.device), Background()


def frozen_policy(args: train.Args, accelerator) -> train.Net:
    return train.wrap(train.Policy(args), args, accelerator, frozen=True)


def finish_work() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work) -> float:
    """Returns how long a function takes, with the work that it leaves to the GPU."""
    finish_work()
    started = time.perf_counter()
    work()
    finish_work()
    return time.perf_counter() - started


def free_memory() -> float:
    """Returns the GiB of the GPU that nobody holds, 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] / GIB if torch.cuda.is_available() else 0.0


def some_prompts(n: int, length: int) -> list[list[int]]:
    return [[(7 * i + 3 * j) % 250 + 10 for j in range(length)] for i in range(n)]


def difference(
    net: train.Net, prompts: list[list[int]], answers: list, args: train.Args
) -> str:
    """Says how far the engine's logprobs are from the trainer's. Raises AssertionError if they
    are far."""
    batch = data.collate(common.as_outputs(prompts, answers))
    logprobs = train.score_tokens(net, batch, args)
    distance = (logprobs - batch["logprobs_rollout"]).abs()[batch["response_mask"].bool()]
    assert distance.mean() < 0.1, f"engine and trainer disagree: {distance.mean():.3f}"
    return f"mean {distance.mean():.1e}, max {distance.max():.1e} over {len(distance)} tokens"


FORCED = {
    "temperature": 1.0,
    "ignore_eos": True,
    "stop_token_ids": [],
}  # responses have their full length


# ---------------------------------------------------------------- sections: each yields rows


def sleep(options: argparse.Namespace, size: str) -> Iterator[Row]:
    """Puts the engine to sleep and wakes it --cycles times at each level, beside a trainer
    with Adam's states."""
    args, accelerator, engine, background = start_with_engine(options, size)
    learner = train.Learner(train.Policy(args), 1e-6, 1, args, accelerator)
    prompts = some_prompts(4, 40)
    train.sync(engine, learner.net, 0)
    answers = common.generate(engine, background, prompts, max_tokens=8, **FORCED)
    engine.sleep()
    batch = data.collate(common.as_outputs(prompts, answers))
    batch["advantages"] = torch.ones_like(batch["response_mask"])
    batch["unit_tokens"] = batch["response_mask"].sum(-1)  # every row is a unit
    train.optimise(learner, train.policy_objective, batch, range(4), args, accelerator)
    assert learner.optimizer.state
    engine_holds = 0.0
    if accelerator.device.type == "cuda":
        from vllm.device_allocator.cumem import CuMemAllocator

        engine_holds = CuMemAllocator.get_instance().get_current_usage() / GIB
    for level in (1, 2):
        free_asleep = []  # GiB, of each cycle
        freed = []
        wakes = []  # seconds
        sleeps = []
        for cycle in range(options.cycles):
            wakes.append(
                seconds(lambda version=cycle + 1: train.sync(engine, learner.net, version))
            )
            common.generate(engine, background, prompts[:1], max_tokens=2, **FORCED)
            torch.cuda.empty_cache()
            free_awake = free_memory()
            sleeps.append(seconds(lambda level=level: engine.sleep(level=level)))
            free_asleep.append(free_memory())
            freed.append(free_asleep[-1] - free_awake)
        if engine_holds:
            assert min(freed) > 0.95 * engine_holds, (
                f"freed {min(freed):.2f} of {engine_holds:.2f} GiB"
            )
            settled = free_asleep[min(20, options.cycles // 2)]
            assert settled - free_asleep[-1] < 0.1, "memory is lost over the cycles"
        early = options.cycles // 10
        lost = free_asleep[early] - free_asleep[-1]
        figures = (
            f"freed {min(freed):.2f} of {engine_holds:.2f} GiB, {lost:.3f} lost since cycle {early}; "
            f"wake {statistics.fmean(wakes):.2f} s, sleep {statistics.fmean(sleeps):.2f} s"
        )
        yield f"level {level}, {options.cycles} cycles", figures
    engine.close()


def sync(options: argparse.Namespace, size: str) -> Iterator[Row]:
    """Times a weight sync, and a copy of the same tensors."""
    args, accelerator = start(options, size)
    engine = Engine(args.model, args, accelerator.device)
    net = train.Policy(args)
    if args.shard:
        net = devices.shard(net, args, accelerator.device)
    dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    targets = [
        torch.empty_like(train.whole(parameter.detach()), dtype=dtype)
        for parameter in net.parameters()
    ]
    n_bytes = sum(target.nbytes for target in targets)

    def copy():
        for target, parameter in zip(targets, net.parameters(), strict=True):
            target.copy_(train.whole(parameter.detach()))

    copying = statistics.median(seconds(copy) for _ in range(5))
    targets.clear()
    torch.cuda.empty_cache()
    timings = []  # of each sync: seconds of loading, of waking
    for version in range(5):
        wake_weights = seconds(engine.wake_weights)
        load = seconds(
            lambda version=version: engine.load_weights(train.named_weights(net), version)
        )
        timings.append((load, wake_weights + seconds(engine.wake_kv)))
        engine.sleep()
    load, wake = sorted(timings)[2]
    gigabytes = n_bytes / 1e9
    yield (
        "weights that arrive",
        f"{gigabytes:.2f} GB in {load:.3f} s, {gigabytes / load:.1f} GB/s; wake {wake:.3f} s",
    )
    ratio = load / copying
    yield (
        "a plain copy of them",
        f"{copying:.3f} s, {gigabytes / copying:.1f} GB/s; a sync takes {ratio:.1f}x",
    )
    engine.close()


def agree(options: argparse.Namespace, size: str) -> Iterator[Row]:
    """Compares the engine's logprobs of sampled tokens with the trainer's."""
    args, accelerator, engine, background = start_with_engine(options, size)
    net = frozen_policy(args, accelerator)
    prompts = some_prompts(16, 64)
    train.sync(engine, net, 0)
    answers = common.generate(engine, background, prompts, max_tokens=128, **FORCED)
    engine.sleep()
    yield f"|engine - trainer|, {args.dtype}", difference(net, prompts, answers, args)
    engine.close()


def suspended(options: argparse.Namespace, size: str) -> Iterator[Row]:
    """Lets a request go on over a weight sync, and compares the logprobs of all its tokens
    with the trainer's."""
    args, accelerator, engine, background = start_with_engine(options, size)
    net = frozen_policy(args, accelerator)
    prompt = some_prompts(1, 50)[0]
    for level in (1, 2):
        call = engine.generate(
            request_id=f"s{level}",
            prompt_ids=prompt,
            sampling_params=FORCED | {"max_tokens": 40},
        )
        train.sync(engine, net, 0)
        future = background.submit(call)
        for _ in range(16):
            engine.step()
        engine.sleep(level=level, keep=True)
        train.sync(engine, net, 1)
        while not future.done():
            engine.step()
        engine.sleep()
        answer = future.result()
        n = answer.versions.count(0)
        assert answer.versions == [0] * n + [1] * (40 - n) and 0 < n < 40, answer.versions
        yield (
            f"level {level}: {n} tokens, then {40 - n}",
            difference(net, [prompt], [answer], args),
        )
    engine.close()


def attention(q, k, v, inputs: dict, window: int | None) -> torch.Tensor:
    """Returns what data.packed_attention computes, segment by segment and by the definition:
    (1, S, H, D)."""
    edges = inputs["cu_seqlens"]
    key_edges = inputs.get("cu_seqlens_k", edges)
    index = inputs.get("key_index", torch.arange(q.shape[2], device=q.device))
    queries_of_key = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(queries_of_key, 1) for x in (k, v))
    segments = []
    for a, b, c, d in zip(edges, edges[1:], key_edges, key_edges[1:]):
        keys = index[c:d]
        n, m = b - a, d - c  # queries are the last n of m keys
        positions = torch.arange(m, device=q.device)
        distance = (positions[m - n :, None] - positions).double()
        hidden = (distance < 0) | (distance >= (window or m))
        scores = q[:, :, a:b] @ k[:, :, keys].transpose(2, 3) * q.shape[-1] ** -0.5
        segments.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, :, keys])
    return torch.cat(segments, 2).transpose(1, 2)


def errors(result: torch.Tensor, expected: torch.Tensor, inputs: list, exact: list) -> str:
    """Says the largest error of a result, and the largest relative one of the gradients of its
    inputs.

    exact: the same inputs in float64, of which `expected` was computed. Raises AssertionError
    on 0.05 and more."""
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(
        expected.device
    )
    (result.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    pairs = [(x.grad.double(), y.grad) for x, y in zip(inputs, exact, strict=True)]
    backward = max(
        ((gradient - right).norm() / right.norm()).item() for gradient, right in pairs
    )
    forward = (result.double() - expected).abs().max().item()
    assert forward < 0.05 and backward < 0.05, (forward, backward)
    return f"forward {forward:.1e}, gradients {backward:.1e}"


def kernels(options: argparse.Namespace, size: str) -> Iterator[Row]:
    """Compares packed attention over a forest, without and with a window, and token_logprobs
    with float64."""
    device = options.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    n = 4 if options.tiny else 32
    history = some_prompts(n, 200)
    prompts = [
        history[i // 4][: 100 + 20 * (i % 4)] for i in range(n)
    ]  # four share the first 100 tokens
    answers = []
    for i in range(n):
        answers.append(
            SimpleNamespace(
                token_ids=history[-1 - i][:60], logprobs=[0.0] * 60, versions=[0] * 60
            )
        )
    batch = data.collate(common.as_outputs(prompts, answers))
    inputs = data.pack_rows(batch, data.in_prefix_order(batch, range(n)), device)["inputs"]
    S = inputs["input_ids"].shape[1]
    shapes = [(1, 14, S, 64), (1, 2, S, 64), (1, 2, S, 64)]  # 14 heads, two of keys and values
    generator = torch.Generator().manual_seed(0)
    module = SimpleNamespace(is_causal=True)
    for window in (None, 64):
        qkv = [
            torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
            for shape in shapes
        ]
        exact = [x.detach().double().requires_grad_() for x in qkv]
        packed, _ = data.packed_attention(
            module,
            *qkv,
            None,
            sliding_window=window,
            cu_seqlens=inputs["cu_seqlens"],
            max_seqlen=inputs["max_seqlen"],
            cu_seqlens_k=inputs.get("cu_seqlens_k"),
            key_index=inputs.get("key_index"),
        )
        name = f"packed attention, {S} tokens of a forest"
        if window:
            name += f", window {window}"
        yield name, errors(packed, attention(*exact, inputs, window), qkv, exact)
    T, H, V = (64, 32, 1000) if options.tiny else (4096, 1536, 151936)
    hidden = torch.randn(T, H, generator=generator)
    weight = torch.randn(V, H, generator=generator) * 3 / H**0.5
    operands = [x.to(device, dtype).requires_grad_() for x in (hidden, weight)]
    exact = [x.detach().double().requires_grad_() for x in operands]
    targets = torch.randint(V, (T,), generator=generator).to(device)
    logprobs = losses.token_logprobs(*operands, targets)
    expected = (exact[0] @ exact[1].T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    yield f"token_logprobs, {T} x {V}", errors(logprobs, expected, operands, exact)


def rollout(options: argparse.Namespace, size: str) -> Iterator[Row]:
    """Times concurrent engine.generate calls, and one LLM.generate of the same prompts, by
    turns."""
    from vllm import SamplingParams

    args, accelerator, engine, background = start_with_engine(options, size)
    n, length = (8, 16) if options.tiny else (256, 256)
    prompts = some_prompts(n, 128)
    params = SamplingParams(**FORCED, max_tokens=length, logprobs=0, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    train.sync(engine, frozen_policy(args, accelerator), 0)

    def ours():
        common.generate(engine, background, prompts, max_tokens=length, **FORCED)

    def plain():
        engine.llm.generate(requests, params, use_tqdm=False)

    for side in (ours, plain):  # a warm-up
        side()
    timings = [(seconds(ours), seconds(plain)) for _ in range(3)]
    engine.sleep()
    ours_rate, plain_rate = (
        n * length / statistics.median(column) for column in zip(*timings, strict=True)
    )
    ratio = ours_rate / plain_rate
    yield (
        f"{n} x {length} tokens",
        f"{ours_rate:,.0f} tokens/s, LLM.generate {plain_rate:,.0f}: {ratio:.2f}",
    )
    engine.close()


def update(options: argparse.Namespace, size: str) -> Iterator[Row]:
    """Times train.optimise and a bare loop on the same trajectories, and compares its memory
    with the plan."""
    from update import Bare, trajectories

    if size == "7B":
        size = "7B-8layers"
    P, R, groups, n, micro_batch = (
        (16, 8, 2, 4, 128) if options.tiny else (512, 128, 20, 8, 16384)
    )
    args, accelerator = start(
        options,
        size,
        max_prompt_tokens=P,
        max_response_tokens=R,
        group_size=n,
        tokens_per_micro_batch=micro_batch,
        max_model_len=P + R,
    )
    config = plan.load_config(args.model)
    wanted = argparse.Namespace(
        prompts=groups,
        group_size=n,
        distinct=False,
        model=args.model,
        micro_batch=micro_batch // 4,
    )
    batch = trajectories(wanted, config.vocab_size, P, R)
    learner = train.Learner(train.Policy(args), 0.0, 1, args, accelerator)

    def step():
        return train.optimise(
            learner, train.policy_objective, batch, list(range(groups * n)), args, accelerator
        )

    stats, _ = step()  # a warm-up, which makes Adam's states
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    ours = statistics.median(seconds(step) for _ in range(3))
    tokens = stats["unique_tokens"]
    speed = f"{tokens / ours:,.0f} tokens/s through the network"
    device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    for name, peak in PEAK.items():
        if name in device_name:
            share = update_flops(config, args, tokens, groups) / ours / peak
            speed += f", MFU {share:.0%} (not counting what is recomputed)"
    yield f"update, {args.dtype}", speed
    if torch.cuda.is_available():
        phases = plan.make_plan(args, 1, torch.cuda.mem_get_info()[1]).phases
        planned = sum(
            n_bytes
            for thing, n_bytes in phases["update"].items()
            if thing != "context (assumed)"
        )
        measured = torch.cuda.max_memory_allocated()
        yield (
            "peak memory",
            f"{measured / GIB:.1f} GiB, planned {planned / GIB:.1f}: {measured / planned:.2f}",
        )
    net = weakref.ref(learner.net)
    learner = None  # its memory is for the bare loop
    accelerator.free_memory()
    gc.collect()  # hooks and their module hold each other
    assert net() is None, "the bare loop would run beside the first network's memory"
    torch.cuda.empty_cache()
    bare = Bare(wanted, args, accelerator)
    bare.update(batch)
    theirs = statistics.median(seconds(lambda: bare.update(batch)) for _ in range(3))
    yield (
        "a bare loop, no prefix shared",
        f"{theirs:.3f} s a step, ours {ours:.3f}: {theirs / ours:.2f}x",
    )


def update_flops(config, args: train.Args, tokens: float, groups: int) -> float:
    """Returns the floating-point operations of an update: forward and backward of matrices and
    of attention.

    tokens: those that go through the network, of groups at the limits of prompt and response."""
    P, R, n = args.max_prompt_tokens, args.max_response_tokens, args.group_size
    weights = plan.network(config, args).parameters
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    attended = groups * (P * P / 2 + n * R * (P + R / 2))
    queries = config.num_attention_heads * head_size
    return 6 * weights * tokens + 12 * config.num_hidden_layers * queries * attended


def trl(options: argparse.Namespace, size: str) -> Iterator[Row]:
    """Runs bench/trl.py and passes its last lines on; with --tiny flatrl alone."""
    flags = ["--trl", "vllm"]
    if options.tiny:
        flags = [
            "--trl",
            "--prompts",
            "2",
            "--group_size",
            "2",
            "--tokens",
            "8",
            "--rounds",
            "2",
        ]
    elif common.missing_for_trl():
        yield "whole steps", f"not run: {common.missing_for_trl()}"
        return
    command = [
        str(common.BENCH / "trl.py"),
        "--model",
        build(size, options.folder, options.device),
        *flags,
    ]
    for line in run_script(command).splitlines()[-3:]:
        yield "whole steps (bench/trl.py)", line.strip()


def run(options: argparse.Namespace, size: str) -> Iterator[Row]:
    """Runs train.py for two steps."""
    out = options.folder / "run"
    command = [
        str(common.REPO / "train.py"),
        "--model",
        build(size, options.folder, options.device),
        "--algo",
        "ppo",
        "--kl_coef",
        "0.01",
        "--num_steps",
        "2",
        "--prompts_per_step",
        "4",
        "--group_size",
        "4",
        "--max_prompt_tokens",
        "256",
        "--eval_every",
        "0",
        "--gpu_memory_utilization",
        "0.4",
        "--offload",
        "all",
        "--output_dir",
        str(out),
    ]
    if options.tiny:
        few_rows = str(common.REPO / "tests/tiny_task.py")
        command += [
            "--engine_args",
            SMALL_CACHE,
            "--task",
            few_rows,
            "--max_response_tokens",
            "8",
        ]
    printed = run_script(command)
    assert "CUDA error" not in printed and "Traceback" not in printed, printed[-2000:]
    last = common.metrics_of(out)[-1]
    figures = (
        f"{last['timing/step_s']:.1f} s the second step, of it sync {last['timing/sync_s']:.2f}"
    )
    yield "train.py ends with code 0", figures


def run_script(command: list[str]) -> str:
    """Returns what a script prints. Raises RuntimeError with its last lines if it fails."""
    done = subprocess.run(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(f"code {done.returncode}: {done.stdout.strip()[-500:]}")
    return done.stdout


SECTIONS = {
    section.__name__: section
    for section in (sleep, sync, agree, suspended, kernels, rollout, update, trl, run)
}
ONCE = ("sleep", "suspended", "kernels", "trl", "run")  # with the first size alone


# ---------------------------------------------------------------- one process a section


def measure(options: argparse.Namespace, name: str, size: str) -> list[Row]:
    """Runs a section in a process of its own; returns its rows, and the reason as the last one
    if it fails."""
    command = [
        sys.executable,
        __file__,
        "--section",
        name,
        "--sizes",
        size,
        "--folder",
        str(options.folder),
        "--device",
        options.device,
        "--cycles",
        str(options.cycles),
    ]
    if options.tiny:
        command.append("--tiny")
    env = common.environment_of_no_rank()
    if options.device == "cpu":
        env["ACCELERATE_USE_CPU"] = "true"
    rows_file = options.folder / "rows.jsonl"
    rows_file.write_text("")
    log = options.folder / f"{name}-{size}.log"
    with log.open("w") as file:
        try:
            done = subprocess.run(
                command, stdout=file, stderr=file, env=env, timeout=options.timeout
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = f"none after {options.timeout} s"
    rows = [tuple(json.loads(line)) for line in rows_file.read_text().splitlines()]
    if code:
        printed = [
            line.strip()
            for line in log.read_text(errors="replace").splitlines()
            if line.strip()
        ]
        reasons = [line for line in printed if "Error" in line or "assert" in line.lower()]
        last = (reasons or printed or [""])[-1]
        rows.append(("FAILED", f"exit code {code}: {last[:160]}"))
    return rows


def run_section(options: argparse.Namespace) -> None:
    """Runs a section in this process, and writes each row as soon as it is there."""
    with (options.folder / "rows.jsonl").open("a") as file:
        for row in SECTIONS[options.section](options, options.sizes[0]):
            print(json.dumps(row), file=file, flush=True)


def main():
    """Runs the sections, or in their processes one of them, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="two shapes of a few thousand parameters, short runs",
    )
    parser.add_argument("--sizes", nargs="+", default=[])
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections"
    )
    parser.add_argument(
        "--cycles", type=int, help="of sleep and wake; default: 200, with --tiny 3"
    )
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for a section")
    parser.add_argument(
        "--folder",
        type=Path,
        help="for models and logs, which stay there; default: a temporary one",
    )
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.sizes = options.sizes or (
        ["tiny", "tiny-untied"] if options.tiny else ["0.5B", "1.5B", "7B"]
    )
    options.cycles = options.cycles or (3 if options.tiny else 200)
    if options.section:
        return run_section(options)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "bench/gpu.py: error: no CUDA device; --device cpu --tiny runs the same code on a CPU"
        )
    table = []
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = (options.folder or Path(temporary)).resolve()
        options.folder.mkdir(parents=True, exist_ok=True)
        for name in options.only:
            for size in options.sizes[: 1 if name in ONCE else None]:
                print(f"{name}, {size} ...", file=sys.stderr, flush=True)
                for row in measure(options, name, size):
                    table.append((name, size, *row))
    machine = "a CPU: the code runs, the figures mean nothing"
    if options.device == "cuda":
        machine = torch.cuda.get_device_name()
    print(f"\n{machine}; torch {torch.__version__}\n")
    print("| section | shape | what | measured |\n| --- | --- | --- | --- |")
    for row in table:
        print(f"| {' | '.join(row)} |")
    sys.exit(any(row[2] == "FAILED" for row in table))


if __name__ == "__main__":
    main()
