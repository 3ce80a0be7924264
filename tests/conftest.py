"""Fixtures: a tiny random model (built once), and one real vLLM engine for the whole session."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: runs with several ranks share the cores with this process

import asyncio
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

REPO = Path(__file__).parent.parent
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
