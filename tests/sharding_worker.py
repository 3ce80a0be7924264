"""Run by test_sharding.py on several ranks: what needs them; rank 0 writes what it found.

python tests/sharding_worker.py FOLDER TIED UNTIED VISION starts four ranks, as if on two hosts, by
torchrun's own function: they share what is imported here."""

import os
import signal
import sys
import types
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import peft  # noqa: F401
import torch
import torch.distributed as dist
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl  # noqa: F401
from fixed_batch import batch_of, gradients, whole
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import AutoTokenizer

import data
import train
from flatrl import checkpoints, devices, models, processes
from flatrl.log import SilentLog

COLUMNS = ["response_mask", "unit_tokens", "advantages", "logprobs_rollout"]
# Tokens in a micro-batch, of which some ranks need fillers; how losses are aggregated; flags.
CASES = {
    "ppo": (60, "token-mean", {}),
    "gmpo": (60, "seq-mean-token-mean", {"policy_loss": "gmpo", "demonstrated": range(0, 19, 5)}),
    "top4": (60, "token-sum", {"kl_kind": "top4"}),
    "clipped": (130, "token-mean", {"shard": True, "max_grad_norm": 0.5}),
    "checkpointing": (60, "token-mean", {"shard": True, "gradient_checkpointing": True}),
    "hybrid": (60, "token-mean", {"shard": "hybrid"}),
    "bfloat16": (60, "token-mean", {"shard": True, "dtype": "bfloat16"}),
    "images": (60, "token-mean", {"shard": True, "gradient_checkpointing": True}),
}


def flags_of(model: str, **more) -> train.Args:
    sizes = dict(max_prompt_tokens=64, max_response_tokens=64, max_model_len=128)
    flags = dict(dtype="float32", shard=True, tokens_per_micro_batch=128)
    return train.Args(model=model, lr=0.1, **sizes | flags | more)


def find_sync(accelerator, model: str) -> dict:
    """What the engine gets from a sharded policy."""
    args = flags_of(model, dtype="bfloat16")
    policy = devices.shard(moved(train.Policy(args)), args, accelerator.device)
    return dict(models.checkpoint_weights(policy.model, policy.engine_dtype))


def moved(policy: train.Policy) -> train.Policy:
    """Moves a policy away from the file's weights, by the same on every rank."""
    with torch.no_grad():
        for i, parameter in enumerate(policy.parameters()):
            generator = torch.Generator().manual_seed(i)
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return policy


def run_of(accelerator, folder: Path, args: train.Args, n: int):
    """The parts of a train.Run that are saved, after an optimiser step on n trajectories."""
    learner = train.Learner(train.Policy(args), 0.1, 1, args, accelerator)
    batch = batch_of(n)
    batch["advantages"] = torch.ones_like(batch["response_mask"])
    train.optimise(learner, train.policy_objective, batch, COLUMNS, range(n))
    return types.SimpleNamespace(
        args=args, folder=folder, learners={"policy": learner}, pool=None, done=1, saved=0,
        log=SilentLog(), history=[], kept={"kl_coef": 0.0, "estimator": b""}, evals={},
        policy=learner, processor=None, tokenizer=AutoTokenizer.from_pretrained(args.model),
    )  # fmt: skip


def state_of(run) -> dict:
    """The weights that are trained, and Adam's averages, whole."""
    state = checkpoints.training_state(run)
    adam = state["policy_optimizer"]["state"]
    found = {name: whole(p.detach()).clone() for name, p in state["policy"].items()}
    return found | {f"{name} exp_avg": whole(x["exp_avg"]).clone() for name, x in adam.items()}


def find_checkpoints(accelerator, folder: Path, model: str, rank: int) -> tuple[dict, dict]:
    """States of a sharded policy: saved here, and loaded from the plain one of the test. The
    policy is then in `final`, in files of about 100 kB."""
    checkpoints.FILE_BYTES = 100_000
    run = run_of(accelerator, folder / f"sharded_{rank}", flags_of(model, lora_rank=rank), 8)
    checkpoints.save_checkpoint(run)
    saved = state_of(run)
    checkpoints.load_checkpoint(run, folder / f"plain_{rank}/checkpoints/step_000001")
    checkpoints.save_policy(run, run.folder / "final")
    return saved, state_of(run)


def find_stop(store) -> list[bool]:
    """Whether each rank stops if rank 1 alone has no time for an update."""
    stop = processes.Stop(store)
    if dist.get_rank() == 1:
        signal.raise_signal(signal.SIGTERM)
        processes.UPDATE_S = 0
    try:
        processes.gather_unless_stopped(None, stop.is_out_of_time)
    except processes.Stopped:
        return processes.all_gather(True)
    return processes.all_gather(False)


def main(folder: str, tied: str, untied: str, vision: str):
    folder = Path(folder)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    accelerator, accelerator.store = devices.start_processes(train.Args())
    data.register_packed_attention()
    found = {}
    for name, (n_tokens, loss_agg, flags) in CASES.items():
        model = vision if name == "images" else tied
        found[name] = gradients(accelerator, model, n_tokens, loss_agg, **flags)
    for rank in (0, 4):
        found[rank] = find_checkpoints(accelerator, folder, tied, rank)
    found["synced"] = find_sync(accelerator, untied)
    found["stopped"] = find_stop(accelerator.store)
    if dist.get_rank() == 0:
        torch.save(found, folder / "found")
    dist.barrier()


if __name__ == "__main__":
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=4,
        max_restarts=0,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        start_method="fork",
    )
    elastic_launch(settings, main)(*sys.argv[1:])
