"""Run by test_sharding.py on two ranks: what needs them; rank 0 writes what it found.

torchrun --nproc_per_node 2 tests/sharding_worker.py gradients | tp OUT MODEL..."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from conftest import SMALL_CACHE, generate
from fixed_batch import gradients

import data
import rollout
import train
from flatrl import devices, processes

# Tokens in a micro-batch, of which some ranks need fillers; how losses are aggregated; flags.
CASES = {
    "ppo": (60, "token-mean", {}),
    "gspo": (130, "seq-mean-token-mean", {"policy_loss": "gspo", "observation_coef": 0.3}),
    "gmpo": (
        60, "seq-mean-token-sum-norm", {"policy_loss": "gmpo", "demonstrated": range(0, 19, 5)}
    ),
    "top4": (60, "token-sum", {"kl_kind": "top4"}),
    "sharded": (60, "token-mean", {"shard": True}),
    "observed": (130, "token-mean", {"shard": True, "observation_coef": 0.3}),
    "clipped": (130, "token-mean", {"shard": True, "max_grad_norm": 0.5}),
    "checkpointing": (60, "token-mean", {"shard": True, "gradient_checkpointing": True}),
}


def compare_gradients(accelerator, tied: str, untied: str) -> dict:
    found = {}
    for model, names in ((tied, CASES), (untied, ["observed"])):
        for name in names:
            tokens, loss_agg, flags = CASES[name]
            found[model, name] = gradients(accelerator, model, tokens, loss_agg, **flags)
    return found


def compare_tp(accelerator, model: str) -> dict:
    """An engine over both ranks: a call of it is given up half-way, and one refused."""
    args = train.Args(
        model=model,
        dtype="float32",
        max_model_len=128,
        max_prompt_tokens=64,
        max_response_tokens=64,
        tokens_per_micro_batch=128,
        tp=2,
        engine_args=SMALL_CACHE,
    )
    engine, background = rollout.Engine(model, args, accelerator.device), processes.Background()
    KEPT.append(engine)
    found = {}
    train.sync(engine, train.Policy(args), 1)
    if engine.leader:
        call = engine.generate(request_id="lost", prompt_ids=[5], sampling_params={})
        lost = background.submit(call)
        while not engine.running:
            engine.step()
        lost.cancel()
        (refused,) = generate(engine, background, [[3] * 200])
        found["refused"] = repr(refused)
        engine.end_phase()
    else:
        engine.follow()
    found["unfinished"] = processes.all_gather(engine.core.has_unfinished_requests())
    return found


KEPT: list[rollout.Engine] = []  # to collect an engine destroys the process group

if __name__ == "__main__":
    what, out, *models = sys.argv[1:]
    accelerator, _ = devices.start_processes(train.Args())
    data.register_packed_attention()
    compare = {"gradients": compare_gradients, "tp": compare_tp}[what]
    results = compare(accelerator, *models)
    if dist.get_rank() == 0:
        torch.save(results, out)
    dist.barrier()
    for engine in KEPT:
        engine.close()
