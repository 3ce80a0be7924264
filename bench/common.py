"""What the benches share: paths, a tiny model, an engine with a policy, tables.

A bench imports this module before flatrl's own. That puts the repository first on the path and this
folder last: `import rollout` finds flatrl's, and `import trl` the package. PyTorch uses all cores.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

BENCH = Path(__file__).resolve().parent
REPO = BENCH.parent

others = [folder for folder in sys.path if Path(folder or ".").resolve() not in (BENCH, REPO)]
sys.path[:] = [str(REPO), *others, str(BENCH)]
n_cores = len(os.sched_getaffinity(0))
os.environ.setdefault("OMP_NUM_THREADS", str(n_cores))  # before torch is imported
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# A model of 2.6M parameters: its arithmetic takes most of a step's time.
LARGER = {
    "hidden_size": 256,
    "intermediate_size": 576,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
}

# ---------------------------------------------------------------- flags, tables and seconds


def make_parser(docstring: str, **numbers: int) -> argparse.ArgumentParser:
    """Returns a parser with --out and with a flag for each number, by its default."""
    parser = argparse.ArgumentParser(description=docstring.split("\n")[0])
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, help="a file for the rows, as JSON lines")
    return parser


def write_rows(out: Path | None, rows: list[dict]) -> None:
    """Writes rows as JSON lines for results/record.py; nothing without a file."""
    if out:
        out.write_text("".join(json.dumps(row) + "\n" for row in rows))


def of_rounds(values: Sequence[float]) -> list[float]:
    """Returns the median of the rounds, the least and the largest value."""
    return [statistics.median(values), min(values), max(values)]


def spread(values: Sequence[float]) -> str:
    """Returns the same as text: "1.02 (0.99 - 1.05)"."""
    middle, least, most = of_rounds(values)
    return f"{middle:.2f} ({least:.2f} - {most:.2f})"


def seconds(work, *args) -> float:
    """Returns how long a function takes, with the work that it leaves to the GPU."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    started = time.perf_counter()
    work(*args)
    wait()
    return time.perf_counter() - started


# ---------------------------------------------------------------- a model and an engine


def random_model(folder: str | Path, **config) -> str:
    """Writes a random Qwen2 of the built-in task's size, with its tokenizer; returns its folder."""
    import torch

    from examples.tiny_models import init_model

    torch.manual_seed(0)
    init_model(folder, **config)
    return str(folder)


def start(args):
    """Completes the flags; returns the accelerator of the only rank."""
    import data
    import train
    from flatrl import devices

    accelerator, _ = devices.start_processes(args)
    train.complete_flags(args, accelerator.device.type == "cuda")
    args.fill({"tokens_per_micro_batch": 16384})
    data.register_packed_attention()
    return accelerator


def engine_and_policy(args) -> tuple:
    """Completes the flags; returns (engine, policy) of args.model."""
    import train
    from flatrl import devices, models
    from rollout import Engine

    accelerator = start(args)
    models.load_tokenizer(args)  # refuses what can't be trained
    engine = Engine(args.model, args, accelerator.device)
    policy = train.Policy(args)
    return engine, devices.wrap(policy, args, accelerator, frozen=True)


def generate(engine, background, prompts: list[list[int]], **sampling) -> list:
    """Samples an answer to each prompt, all at the same time; returns AgentLoopOutputs."""

    async def answer(i, prompt):
        request = dict(request_id=f"r{i}", prompt_ids=prompt, sampling_params=sampling)
        return as_output(prompt, await engine.generate(**request))

    async def answer_all():
        return await asyncio.gather(*(answer(i, prompt) for i, prompt in enumerate(prompts)))

    future = background.submit(answer_all())
    future.add_done_callback(lambda _: engine.poke())
    while not future.done():
        engine.step()
    return future.result()


def distances(net, outputs: list, args):
    """Returns how far engine and trainer differ in the logprob of each sampled token, (tokens,)."""
    import data
    import train

    batch = data.collate(outputs)
    logprobs = train.score_tokens(net, batch, args)["logprobs"]
    difference = (logprobs - batch["logprobs_rollout"]).abs()
    return difference[batch["response_mask"].bool()]


def as_output(prompt: list[int], answer):
    """Returns a trajectory of one turn, with a reward of 0."""
    from agent_loop import AgentLoopOutput

    return AgentLoopOutput(
        prompt_ids=prompt,
        response_ids=answer.token_ids,
        response_mask=[1] * len(answer.token_ids),
        response_logprobs=answer.logprobs,
        response_versions=answer.versions,
        reward=0.0,
    )
