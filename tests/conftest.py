"""Fixtures: a tiny random model, one vLLM engine for the whole session, and whole runs.

Nothing here imports torch until a test needs it: pytest-xdist's own process imports this, too."""

import os

# examples/sandbox.py works without bubblewrap, too; its own tests isolate where they can.
os.environ["SANDBOX_UNISOLATED"] = "1"
# Before torch: runs with several ranks share the cores with this process.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import psutil
import pytest

REPO = Path(__file__).parent.parent
HANGS = 300  # seconds after which something hangs: many times what a slow machine needs

# For --engine_args: to write to the whole default cache of 1 GB takes long.
SMALL_CACHE = json.dumps({"kv_cache_memory_bytes": 1 << 25})

# A short run of the task for the tests, without an engine (--replay) and with one.
REPLAY = [
    *["--task", "tests/tiny_task.py", "--agent", "two_turns"],
    *["--num_steps", "6", "--prompts_per_step", "4", "--group_size", "4"],
    *["--max_prompt_tokens", "32", "--max_response_tokens", "32"],
    *["--tokens_per_micro_batch", "256", "--eval_every", "3", "--save_every", "2"],
]
TINY = [*REPLAY, "--engine_args", SMALL_CACHE]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """A random Qwen2 with the calculator's tokenizer, tied embeddings."""
    import torch

    from examples.tiny_models import init_model

    path = str(tmp_path_factory.mktemp("models") / "tied")
    torch.manual_seed(0)
    init_model(path)
    return path


@pytest.fixture(scope="session")
def process_group():
    """A group of one; never destroyed: vLLM's shutdown takes it down. Packed attention is known."""
    import torch
    import torch.distributed as dist

    from flatrl.attention import register_packed_attention

    register_packed_attention()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture(scope="session")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="session")
def args(tiny_model):
    return args_of(tiny_model)


def args_of(model: str):
    from train import Args

    return Args(
        model=model,
        dtype="float32",
        max_prompt_tokens=64,
        max_response_tokens=64,
        max_model_len=128,
        tokens_per_micro_batch=16384,
        engine_args=SMALL_CACHE,
    )


# Runs, and engines other than the session's: to collect one would destroy the process group.
KEPT: list = []


@pytest.fixture(scope="session")
def session_engine(tiny_model, tokenizer, process_group):
    import torch

    from rollout import Engine

    args = args_of(tiny_model)  # not what a module calls args
    return Engine(tiny_model, args, torch.device("cpu"), [tokenizer.eos_token_id])


@pytest.fixture
def engine(session_engine):
    """The session's engine, asleep at the start and at the end of each test."""
    assert session_engine.state == "asleep"
    session_engine.was_poked = False  # by what ended last
    yield session_engine
    if session_engine.state == "awake":
        session_engine.abort_all()
        session_engine.sleep()
    session_engine.state = "asleep"
    session_engine.args.deterministic = False


@pytest.fixture
def registries(monkeypatch):
    """Removes the estimators and objectives that a test registers."""
    import losses

    for name in ("ESTIMATORS", "OBJECTIVES"):
        monkeypatch.setattr(losses, name, dict(getattr(losses, name)))


@pytest.fixture(scope="session")
def background():
    from flatrl.processes import Background

    return Background()


class NeverAsked:
    """A run's Stop."""

    requested = is_out_of_time = False


def make_run(engine, background, task, tokenizer, args):
    """Returns the part of train.Run that rollout.py needs."""
    import torch.distributed as dist

    return types.SimpleNamespace(
        engine=engine,
        background=background,
        task=task,
        tokenizer=tokenizer,
        args=args,
        processor=None,
        store=dist.HashStore(),
        stop=NeverAsked(),
    )


def output_of(mask: list[int], prompt=(1, 2), ids=None, version=0, logprob=-1.0, **more):
    """Returns an AgentLoopOutput with this mask, by default the only one of its rollout."""
    from agent_loop import AgentLoopOutput

    return AgentLoopOutput(
        prompt_ids=list(prompt),
        response_ids=list(ids or [3] * len(mask)),
        response_mask=mask,
        **{
            "response_logprobs": [logprob * bit for bit in mask],
            "response_versions": [version if bit else -1 for bit in mask],
            "extra": {"prompt": 0, "sample": 0, "segment": 0},
        }
        | more,
    )


def batch_with_rewards(outputs: list, args, **tensors):
    """Returns a batch with these tensors and its shaped rewards, and the metrics of those."""
    import data
    import train

    batch = data.make_batch(outputs)
    batch.update(tensors)
    kl = types.SimpleNamespace(coef=args.kl_coef)
    return batch, train.set_token_rewards(types.SimpleNamespace(args=args, kl=kl), batch, 0)


def stepped(engine, background, *coroutines) -> list:
    """Steps the engine until all coroutines end on the background loop. Returns their results, or
    what they raise."""

    async def everything():
        return await asyncio.gather(*coroutines, return_exceptions=True)

    future = background.submit(everything())
    future.add_done_callback(lambda _: engine.poke())
    while not future.done():
        engine.step()
    return future.result()


def generate(engine, background, prompts: list[list[int]], **sampling) -> list:
    """Returns the results of concurrent `generate` calls, or what they raise."""
    calls = [
        engine.generate(request_id=f"r{i}", prompt_ids=prompt, sampling_params=dict(sampling))
        for i, prompt in enumerate(prompts)
    ]
    return stepped(engine, background, *calls)


# ---------------------------------------------------------------- whole runs


@pytest.fixture
def train_here(engine, tiny_model, monkeypatch, capsys):
    """Trains in this process, with the session's engine. Returns a function of flags.

    by: another engine, or None for one of the model that the task builds. The function returns
    what the run has printed, and raises BadInput as train.main does."""
    import train
    from rollout import Engine

    setup = train.setup

    def setup_and_keep(args):
        KEPT.append(setup(args))  # otherwise its tasks would complain about their end
        return KEPT[-1]

    monkeypatch.chdir(REPO)
    monkeypatch.setattr(train, "setup", setup_and_keep)
    monkeypatch.setattr(train, "Stop", lambda store: NeverAsked())  # handles no signals

    def train_with(*flags, by=engine) -> str:
        def engine_of(model, args, *more):
            used = by or Engine(model, args, *more)
            KEPT.append(used)
            monkeypatch.setattr(used, "args", args)
            monkeypatch.setattr(used, "close", lambda: None)
            return used

        monkeypatch.setattr(train, "Engine", engine_of)
        model = ["--model", tiny_model] if by else []
        capsys.readouterr()
        train.main(train.parse_args([*model, *map(str, flags)]))
        return "".join(capsys.readouterr())

    return train_with


# Variables of this process: those that its own engine needed, and one by which a run would compile
# our modules again.
OWN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONDONTWRITEBYTECODE"}
LAUNCHERS = {
    "python": [],
    "accelerate": ["-m", "accelerate.commands.launch"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
}


@contextlib.contextmanager
def started(*flags, by: str = "python", script: str = "train.py", cwd: Path = REPO, **env):
    """Starts a training process, which is killed at the end with all that it has started."""
    inherited = {name: value for name, value in os.environ.items() if name not in OWN}
    env = inherited | {name: str(value) for name, value in env.items()}
    command = list(map(str, [sys.executable, *LAUNCHERS[by], script, *flags]))
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=cwd, env=env, **output)
    try:
        yield process
    finally:
        if process.poll() is None:
            for each in (*psutil.Process(process.pid).children(recursive=True), process):
                each.kill()
            process.wait()


def run(*flags, code: int = 0, **more) -> str:
    """Returns the output of a training process, after checking its exit code."""
    with started(*flags, **more) as process:
        printed, _ = process.communicate(timeout=HANGS)
    assert process.returncode == code, printed
    return printed


def rows_of(file: Path) -> list[dict]:
    """Returns the objects of a JSON-lines file."""
    with file.open(encoding="utf-8") as lines_of_file:
        return [json.loads(line) for line in lines_of_file]


def rollouts_of(folder: Path, step: int) -> list[dict]:
    """Returns the rollouts that a run logged in a step."""
    return rows_of(folder / f"rollouts/step_{step:06d}.jsonl")


def metrics_of(folder: Path, timings: bool = False) -> list[dict]:
    """Returns the rows of metrics.jsonl, by default only what repeats to the last digit."""
    rows = rows_of(folder / "metrics.jsonl")
    if timings:
        return rows
    measured = ("timing/", "throughput/", "memory/")
    return [
        {name: value for name, value in row.items() if not name.startswith(measured)}
        for row in rows
    ]


def free_port() -> int:
    """Below the ports that Linux gives to connections: one of those could take it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for(condition) -> None:
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.02)


async def too_late(*_, **__) -> None:
    """Hangs until its deadline, at most HANGS seconds, which passes at once, on any machine."""
    loop = asyncio.get_running_loop()
    clock = loop.time  # that of processes.Background stands still while the loop is blocked
    loop.time = lambda: clock() + HANGS
    await loop.create_future()
