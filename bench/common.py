"""What the benches share: paths, a tiny model and an engine, tables.

A bench imports this module before flatrl's own. That puts the repository first on the path and
this folder last: `import rollout` finds flatrl's rollout.py, and `import trl` the package, not
the benches of these names. PyTorch uses all cores unless OMP_NUM_THREADS is set.
"""

import argparse
import asyncio
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

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


def seconds(work) -> float:
    """Returns how long a function takes, with the work that it leaves to the GPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


# ---------------------------------------------------------------- a model and an engine


def environment_of_no_rank() -> dict[str, str]:
    """Returns this process's environment without the variables of a launcher's rank: an engine
    that was built here has set them, and a new process would take the same port."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in ranks}


def random_model(folder: str | Path, **config) -> str:
    """Writes a random Qwen2 of the built-in task's size, with its tokenizer; returns its folder.

    config: entries of the model's configuration, such as LARGER."""
    import torch

    from examples.tiny_models import init_model

    torch.manual_seed(0)
    init_model(folder, **config)
    return str(folder)


def start_alone() -> None:
    """Makes this process the only rank of a process group, which the engine needs."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def surroundings(engine, task, tokenizer, args) -> SimpleNamespace:
    """Returns what rollout.rollout reads of a train.Run."""
    import torch.distributed as dist

    from flatrl.processes import Background

    return SimpleNamespace(
        engine=engine,
        task=task,
        tokenizer=tokenizer,
        args=args,
        processor=None,
        stop=SimpleNamespace(requested=False),
        background=Background(),
        store=dist.HashStore(),
    )


def generate(engine, background, prompts: list[list[int]], **sampling) -> list:
    """Samples an answer to each prompt, all at the same time; returns agent_loop.TokenOutputs.

    This thread steps the engine, as in a rollout. sampling: vLLM's sampling parameters."""

    async def answer_all():
        calls = [
            engine.generate(request_id=f"r{i}", prompt_ids=prompt, sampling_params=sampling)
            for i, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*calls)

    future = background.submit(answer_all())
    future.add_done_callback(lambda _: engine.poke())
    while not future.done():
        engine.step()
    return future.result()


def as_outputs(prompts: list[list[int]], answers: list) -> list:
    """Returns AgentLoopOutputs of one turn, with a reward of 0."""
    from agent_loop import AgentLoopOutput

    return [
        AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=answer.token_ids,
            response_mask=[1] * len(answer.token_ids),
            response_logprobs=answer.logprobs,
            response_versions=answer.versions,
            reward=0.0,
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def missing_for_trl() -> str:
    """Returns what to install for a comparison with TRL, "" if all is there."""
    names = ("trl", "datasets")
    missing = [name for name in names if not any(importlib.metadata.distributions(name=name))]
    if not missing:
        return ""
    return f"{' and '.join(missing)} missing: pip install trl==1.16.0 datasets"
