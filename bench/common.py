"""What benches share: paths, whole runs of train.py, tiny models and engines, TRL, a ratio.

A bench imports this module before flatrl's own. That puts the repository first on the path and
this folder last: so `import rollout` finds flatrl's rollout.py and `import trl` finds the
package, not the benches with these names. PyTorch uses all cores unless OMP_NUM_THREADS says
otherwise.
"""

import functools
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

BENCH = Path(__file__).resolve().parent
REPO = BENCH.parent
THREADS_ASKED_FOR = os.environ.get("OMP_NUM_THREADS")  # None: the user did not say

other_folders = [folder for folder in sys.path if Path(folder or ".").resolve() not in (BENCH, REPO)]
sys.path[:] = [str(REPO), *other_folders, str(BENCH)]
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))  # before torch is imported
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# A model of 2.6M parameters: large enough for its arithmetic to take most of a step's time.
LARGER = {"hidden_size": 256, "intermediate_size": 576, "num_hidden_layers": 4, "initializer_range": 0.02}


# ---------------------------------------------------------------- whole runs of train.py


def environment_of_no_rank() -> dict[str, str]:
    """Returns this process's environment without what makes it a rank of a launcher: an engine
    that was built here has set these, and a process that is started would take the same port."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in ranks}


def split_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line at `--` into the bench's own words and the flags that it passes on
    to train.py."""
    words = list(words)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def metrics_of(folder: Path) -> list[dict]:
    """Returns the lines of a run's metrics.jsonl, one a step; none where there is no such
    file."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.open()]


def first_step(rows: list[dict], name: str, least: float) -> int | None:
    """Returns the first step whose metric `name` is at least `least`, None where there is
    none."""
    for row in rows:
        if row.get(name, 0) >= least:
            return row["step"]
    return None


def train_once(folder: Path, steps: int, flags: list[str], threads: str | None = None) -> list[dict]:
    """Runs train.py for so many steps into a folder, and returns its metrics. A run that is
    complete is not repeated.

    Raises RuntimeError if the run fails, with the end of what it printed, or if the folder's
    run had other flags."""
    command = [sys.executable, "train.py", "--num_steps", str(steps), "--save_every", "0", "--show_every", "0",
               "--output_dir", str(folder.resolve()), *flags]  # fmt: skip
    rows = metrics_of(folder)
    if rows and rows[-1]["step"] == steps:
        if json.loads((folder / "args.json").read_text())["command"] != command[1:]:
            raise RuntimeError(f"{folder} was run with other flags: give another --out")
        return rows
    env = dict(os.environ, OMP_NUM_THREADS=threads or os.environ["OMP_NUM_THREADS"])
    done = subprocess.run(command, cwd=REPO, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")
    return metrics_of(folder)


# ---------------------------------------------------------------- a model and an engine in this process


def random_model(folder: str | Path, **config) -> str:
    """Writes a random Qwen2 of the built-in task's size, with its tokenizer, to a folder;
    returns the folder.

    config: entries of the model's configuration that are to differ, such as LARGER."""
    import torch

    from examples.tiny_models import init_model

    torch.manual_seed(0)
    init_model(folder, **config)
    return str(folder)


def start_alone() -> None:
    """Makes this process the only rank of a process group, which the engine and a rollout ask
    for."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def surroundings(engine, task, tokenizer, args) -> SimpleNamespace:
    """Returns what rollout.rollout takes as its run: an engine, a task, and what else of
    train.Run it reads."""
    import torch.distributed as dist

    from flatrl.processes import Background

    never = SimpleNamespace(requested=False)
    return SimpleNamespace(engine=engine, task=task, tokenizer=tokenizer, args=args, processor=None, stop=never,
                           background=Background(), store=dist.HashStore())  # fmt: skip


def generate(engine, background, prompts: list[list[int]], **sampling) -> list:
    """Samples an answer to each prompt, all at the same time; returns agent_loop.TokenOutputs.

    This thread steps the engine, as in a rollout. sampling: vLLM's sampling parameters."""
    import asyncio

    async def answer_all():
        calls = [engine.generate(request_id=f"r{i}", prompt_ids=prompt, sampling_params=sampling)
                 for i, prompt in enumerate(prompts)]  # fmt: skip
        return await asyncio.gather(*calls)

    future = background.submit(answer_all())
    future.add_done_callback(lambda _: engine.poke())
    while not future.done():
        engine.step()
    return future.result()


def as_outputs(prompts: list[list[int]], answers: list) -> list:
    """Returns AgentLoopOutputs of one turn, with a reward of 0, for prompts and the
    TokenOutputs that answer them."""
    from agent_loop import AgentLoopOutput

    outputs = []
    for prompt, answer in zip(prompts, answers, strict=True):
        mask = [1] * len(answer.token_ids)
        output = AgentLoopOutput(prompt_ids=prompt, response_ids=answer.token_ids, response_mask=mask, reward=0.0,
                                 response_logprobs=answer.logprobs, response_versions=answer.versions)  # fmt: skip
        outputs.append(output)
    return outputs


# ---------------------------------------------------------------- TRL


def missing_for_trl() -> str:
    """Returns what to install for a comparison with TRL, "" where it is there. An import could
    find bench/trl.py."""
    missing = [name for name in ("trl", "datasets") if not any(importlib.metadata.distributions(name=name))]
    if not missing:
        return ""
    return f"{' and '.join(missing)} missing: pip install trl==1.16.0 datasets"


def trl_trainer(model: str, output_dir: str, prompts: list, rewards, tokenizer=None, dtype=None, **flags):
    """Returns TRL's GRPOTrainer of a model folder, without KL, evaluation, checkpoints, log
    and progress bar.

    prompts: the training rows, dicts with a "prompt". rewards: TRL's reward function.
    tokenizer: default: the model's. dtype: of the weights, default: float32. flags: more of
    GRPOConfig's, and the trainer's `tools`, `callbacks` and `rollout_func`."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    cuda = torch.cuda.is_available()
    of_trainer = {name: flags.pop(name) for name in ("tools", "callbacks", "rollout_func") if name in flags}
    defaults = dict(beta=0.0, bf16=cuda, use_cpu=not cuda, gradient_checkpointing=False, save_strategy="no",
                    logging_strategy="no", report_to=[], disable_tqdm=True)  # fmt: skip
    config = GRPOConfig(output_dir=output_dir, **(defaults | flags))
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=dtype or torch.float32), args=config,
        processing_class=tokenizer or AutoTokenizer.from_pretrained(model), reward_funcs=rewards,
        train_dataset=Dataset.from_list(prompts), **of_trainer,
    )  # fmt: skip


def make_trl_vllm_updatable(dtype: str = "float32") -> None:
    """Lets TRL's vLLM run in this precision on a CPU and take new weights, as rollout.Engine does."""
    import torch
    import trl.generation.vllm_generation as generation
    import vllm.model_executor.layers.utils as layers

    def plain_linear(layer, remove_weight) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    generation.LLM = functools.partial(generation.LLM, dtype=dtype)  # its "auto" makes float32 models bfloat16
    layers.dispatch_cpu_unquantized_gemm = plain_linear


# ---------------------------------------------------------------- tables


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Returns the median of some values with the least and the largest: "1.02 (0.99 - 1.05)"."""
    figures = [f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))]
    return "{} ({} - {})".format(*figures)
