"""Fixtures: a tiny random model (built once), and one real vLLM engine for the whole session."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: runs with several ranks share the cores with this process

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

REPO = Path(__file__).parent.parent
# A short run of the task for the tests.
TINY = ["--task", "tests/tiny_task.py", "--agent", "two_turns", "--num_steps", "6", "--prompts_per_step", "4",
        "--group_size", "4", "--max_prompt_tokens", "32", "--max_response_tokens", "32",
        "--tokens_per_micro_batch", "256",
        "--eval_every", "3", "--save_every", "2"]  # fmt: skip
sys.path.insert(0, str(REPO / "examples"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """A random Qwen2 with the calculator's tokenizer, tied embeddings."""
    return make_model(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("models") / "untied", tied=False)


def make_model(path: Path, tied: bool) -> str:
    import calculator

    torch.manual_seed(0)
    calculator.init_model(str(path), tie_word_embeddings=tied)
    return str(path)


@pytest.fixture(scope="session")
def process_group():
    """A group of one; never destroyed: vLLM's shutdown takes it down."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture(scope="session")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="session")
def args(tiny_model):
    from train import Args

    return Args(model=tiny_model, dtype="float32", max_prompt_tokens=64, max_response_tokens=64, max_model_len=128)


@pytest.fixture(scope="session")
def session_engine(args, tokenizer, process_group):
    from rollout import Engine

    return Engine(args.model, args, torch.device("cpu"), [tokenizer.eos_token_id])


@pytest.fixture
def engine(session_engine):
    """The session's engine, asleep at the start and at the end of each test."""
    assert session_engine.state == "asleep"
    yield session_engine
    if session_engine.state == "awake":
        session_engine.drain()
        session_engine.sleep()
    session_engine.state = "asleep"
    session_engine.args.deterministic = False


@pytest.fixture(scope="session")
def background():
    from rollout import Background

    return Background()


def make_run(engine, background, task, tokenizer, args, processor=None, store=None) -> types.SimpleNamespace:
    """What rollout.py needs of train.Run; `run.stopped` tells it to stop."""
    run = types.SimpleNamespace(engine=engine, background=background, task=task, tokenizer=tokenizer, args=args,
                                processor=processor, store=store or dist.HashStore(), stopped=False)  # fmt: skip
    run.stop = types.SimpleNamespace(requested=lambda: run.stopped)
    return run


def generate(engine, background, prompts: list[list[int]], **sampling) -> list:
    """Token outputs of concurrent generate calls, the main thread stepping as in a rollout phase."""

    async def everything():
        calls = [
            engine.generate(request_id=f"r{i}", prompt_ids=prompt, sampling_params=dict(sampling))
            for i, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    future = background.submit(everything())
    future.add_done_callback(lambda _: engine.poke())
    while not future.done():
        engine.step()
    return future.result()


# ---------------------------------------------------------------- whole runs, in processes of their own


def clean_env() -> dict[str, str]:
    """This process's environment without what its own engine needed."""
    own = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return {k: v for k, v in os.environ.items() if k not in own} | {"OMP_NUM_THREADS": "1"}


def torchrun(ranks: int) -> list[str]:
    """Arguments for python, on a port that is free."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(port)]


@contextlib.contextmanager
def started(*flags: str, by: str = "python", cache: Path, **env: str):
    """A training process in a session of its own; whatever is left of it is killed at the end."""
    launchers = {"python": [], "accelerate": ["-m", "accelerate.commands.launch"], "torchrun": torchrun(2)}
    env = clean_env() | {"XDG_CACHE_HOME": str(cache)} | env
    process = subprocess.Popen([sys.executable, *launchers[by], "train.py", *map(str, flags)], cwd=REPO, env=env,
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def run(*flags: str, by: str = "python", cache: Path, code: int = 0, **env: str) -> str:
    with started(*flags, by=by, cache=cache, **env) as process:
        output, _ = process.communicate(timeout=400)
    assert process.returncode == code, output
    return output


def metrics_of(folder: Path, timings: bool = False) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if timings or not k.startswith(("timing/", "throughput/", "memory/"))}
        for row in rows
    ]


def wait_for(condition, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")
