"""Fixtures: a tiny random model (built once), and one real vLLM engine for the whole session."""

import os

# Where the host forbids examples/sandbox.py to isolate programs, they run unisolated here.
os.environ["SANDBOX_UNISOLATED"] = "1"
# Before torch: runs with several ranks share the cores with this process.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import asyncio
import contextlib
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck

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

# Our tests are parametrised over these, not over the registries, to which a fork may add.
OUR_PRESETS = (
    *("grpo", "ppo", "dapo", "drgrpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"),
    *("remax", "opo", "gspo", "gmpo", "cispo", "sapo", "gigpo", "opd", "opsd", "sft"),
)
OUR_ESTIMATORS = ("grpo", "drgrpo", "rloo", "opo", "gigpo", "remax", "reinforce_pp", "gae")
OUR_OBJECTIVES = ("ppo", "gspo", "gmpo", "cispo", "sapo", "reinforce")

hypothesis.settings.register_profile(
    "any machine",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
hypothesis.settings.load_profile("any machine")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """A random Qwen2 with the calculator's tokenizer, tied embeddings."""
    return make_model(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("models") / "untied", tied=False)


def make_model(path: Path, tied: bool) -> str:
    from examples.tiny_models import init_model

    torch.manual_seed(0)
    init_model(str(path), tie_word_embeddings=tied)
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

    return Args(
        model=tiny_model,
        dtype="float32",
        max_prompt_tokens=64,
        max_response_tokens=64,
        max_model_len=128,
        engine_args=SMALL_CACHE,
    )


# Engines other than the session's. Collecting one would destroy the process group of all.
KEPT: list = []


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


class Asked:
    """A run's Stop, whose `requested` calls a function."""

    def __init__(self, ask):
        self.ask = ask

    @property
    def requested(self) -> bool:
        return self.ask()


def make_run(engine, background, task, tokenizer, args, processor=None, store=None):
    """Returns the part of train.Run that rollout.py needs; `run.stopped` tells it to stop."""
    run = types.SimpleNamespace(
        engine=engine,
        background=background,
        task=task,
        tokenizer=tokenizer,
        args=args,
        processor=processor,
        store=store or dist.HashStore(),
        stopped=False,
    )
    run.stop = Asked(lambda: run.stopped)
    return run


def output_of(mask: list[int], prompt=(1, 2), ids=None, version=0, logprob=-1.0, **more):
    """Returns an AgentLoopOutput with this mask, by default the only one of its rollout."""
    from agent_loop import AgentLoopOutput

    extra = {"prompt": 0, "sample": 0, "segment": 0}
    return AgentLoopOutput(
        prompt_ids=list(prompt),
        response_ids=list(ids or [3] * len(mask)),
        response_mask=mask,
        **{
            "response_logprobs": [logprob * bit for bit in mask],
            "response_versions": [version if bit else -1 for bit in mask],
            "extra": extra,
        }
        | more,
    )


def rewards_of_tokens(outputs: list) -> torch.Tensor:
    """Returns the outputs' own rewards where they fall, (B, T)."""
    import data

    batch = data.make_batch(outputs)
    return batch.layout.to_outputs(data.place_rewards(batch, batch.units.outcomes))


def batch_with_rewards(outputs: list, args, **tensors):
    """Returns a batch with these tensors and its shaped rewards, and the metrics of those."""
    import data
    import train

    batch = data.make_batch(outputs)
    batch.update(tensors)
    kl = types.SimpleNamespace(coef=args.kl_coef)
    return batch, train.set_token_rewards(types.SimpleNamespace(args=args, kl=kl), batch, 0)


def stepped(engine, background, *coroutines, return_exceptions: bool = False) -> list:
    """Steps the engine until all coroutines end on the background loop. Returns their results."""

    async def everything():
        return await asyncio.gather(*coroutines, return_exceptions=return_exceptions)

    future = background.submit(everything())
    future.add_done_callback(lambda _: engine.poke())
    while not future.done():
        engine.step()
    return future.result()


def generate(engine, background, prompts: list[list[int]], **sampling) -> list:
    """Returns the results of concurrent `generate` calls, or what they raise."""
    calls = []
    for i, prompt in enumerate(prompts):
        request = dict(request_id=f"r{i}", prompt_ids=prompt, sampling_params=dict(sampling))
        calls.append(engine.generate(**request))
    return stepped(engine, background, *calls, return_exceptions=True)


class Picture:
    """Stands in for a figure and its axes; savefig writes the points of every curve as JSON."""

    def __init__(self):
        self.curves = []

    def __getattr__(self, name):
        return lambda *args, **options: None

    def plot(self, xs, ys, **style) -> None:
        self.curves.append(list(zip(xs, ys, strict=True)))

    def savefig(self, target, dpi) -> None:
        Path(target).write_text(json.dumps(self.curves))


@pytest.fixture
def pictures(monkeypatch):
    """A matplotlib of Pictures, because the real one need not be installed."""

    def subplots(*shape, figsize) -> tuple:
        picture = Picture()
        return picture, [picture, picture] if shape else picture

    pyplot = types.SimpleNamespace(subplots=subplots)
    monkeypatch.setitem(sys.modules, "matplotlib", types.SimpleNamespace(pyplot=pyplot))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)


def clean_env() -> dict[str, str]:
    """Returns this process's environment without the variables that its own engine needed.

    vLLM's cache is shared, because inspecting a model class takes 12 s."""
    own = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    caches = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    env = {"VLLM_CACHE_ROOT": f"{caches}/vllm"}
    env |= {name: value for name, value in os.environ.items() if name not in own}
    return env | {"OMP_NUM_THREADS": "1"}


def free_port() -> int:
    """Returns a port that is free."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Forked:
    """A process that the zygote forked, with the methods of subprocess.Popen that tests use."""

    def __init__(self, *argv, cache: Path, env: dict[str, str]):
        self.returncode = None
        self.folder = Path(tempfile.mkdtemp(dir=cache.parent, prefix="process"))
        request = {"argv": list(map(str, argv)), "env": env, "folder": str(self.folder)}
        print(json.dumps(request), file=zygote(cache).stdin, flush=True)
        wait_for((self.folder / "pid").exists)
        self.pid = int((self.folder / "pid").read_text())

    def poll(self) -> int | None:
        status = self.folder / "status"
        if status.exists():
            self.returncode = os.waitstatus_to_exitcode(int(status.read_text()))
        return self.returncode

    def wait(self, timeout: float = HANGS) -> int:
        wait_for(lambda: self.poll() is not None, timeout)
        return self.returncode

    def communicate(self, timeout: float = HANGS) -> tuple[str, None]:
        self.wait(timeout)
        return self.printed(), None

    def printed(self) -> str:
        """Returns what it has printed so far."""
        return (self.folder / "output").read_text(errors="replace")

    def send_signal(self, which: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, which)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


ZYGOTE: list[subprocess.Popen] = []


def zygote(cache: Path) -> subprocess.Popen:
    """Returns the process of tests/zygote.py, which the first call starts.

    cache: Hugging Face reads its place at import."""
    if not ZYGOTE:
        process = subprocess.Popen(
            [sys.executable, "tests/zygote.py"],
            cwd=REPO,
            env=clean_env() | {"XDG_CACHE_HOME": str(cache)},
            start_new_session=True,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        ZYGOTE.append(process)
    return ZYGOTE[0]


def pytest_sessionfinish():
    for process in ZYGOTE:
        process.communicate()
    ZYGOTE.clear()


def file_of(module: str) -> str:
    return importlib.util.find_spec(module).origin


@contextlib.contextmanager
def started(*flags: str, by: str = "fork", cache: Path, script: str = "train.py", **env: str):
    """Starts a training process in a session of its own, which is killed at the end.

    by: "fork" forks it from tests/zygote.py. "torchrun" and "forked accelerate" fork a launcher,
    whose ranks are forks, too. "python" and "accelerate" start a new Python."""
    env = {name: str(value) for name, value in env.items()}
    env = clean_env() | {"XDG_CACHE_HOME": str(cache)} | env
    forked = {
        "fork": [],
        "forked accelerate": ["tests/forking.py", file_of("accelerate.commands.launch")],
        "torchrun": [
            *["tests/forking.py", file_of("torch.distributed.run")],
            *["--nproc_per_node", "2", "--master_port", free_port()],
        ],
    }
    if by in forked:
        process = Forked(*forked[by], script, *flags, cache=cache, env=env)
    else:
        launcher = {"python": [], "accelerate": ["-m", "accelerate.commands.launch"]}[by]
        process = subprocess.Popen(
            [sys.executable, *launcher, script, *map(str, flags)],
            cwd=REPO,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def two_ranks(*flags: str, **more: str):
    """Starts two processes as a launcher does: ranks 0 and 1 of one group."""
    group = {
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(2):
            process = started(*flags, **more, **group, RANK=rank, LOCAL_RANK=rank)
            processes.append(stack.enter_context(process))
        yield processes


def run(*flags: str, by: str = "fork", code: int = 0, **more: str) -> str:
    """Returns the output of a training process, after checking its exit code.

    by: as for `started`, or "ranks": two of them."""
    with contextlib.ExitStack() as stack:
        if by == "ranks":
            processes = stack.enter_context(two_ranks(*flags, **more))
        else:
            processes = [stack.enter_context(started(*flags, by=by, **more))]
        outputs = [process.communicate(timeout=HANGS)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == [code] * len(processes), "\n".join(outputs)
    return outputs[0]


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


def wait_for(condition, seconds: float = HANGS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.02)


def time_passes(seconds: float = HANGS) -> None:
    """Moves the clock of the running event loop forward, so that deadlines expire.

    A deadline of HANGS seconds then passes where a test wants it to, on any machine."""
    loop = asyncio.get_running_loop()
    clock = loop.time  # that of processes.Background stands still while the loop is blocked
    loop.time = lambda: clock() + seconds


async def too_late(*_, **__) -> None:
    """Hangs until its deadline, at most HANGS seconds, which passes at once."""
    time_passes()
    await for_ever()


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


def lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session", autouse=True)
def imports_beside_the_first_tests(request):
    """Starts the zygote's imports on another core, if one of the chosen tests needs it."""
    if any("cache" in item.fixturenames for item in request.session.items):
        zygote(request.getfixturevalue("cache"))
