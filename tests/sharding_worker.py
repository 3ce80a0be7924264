"""Run by test_sharding.py on two ranks: what needs them; rank 0 writes what it found.

torchrun --nproc_per_node 2 tests/sharding_worker.py gradients | sync | tp OUT MODEL..."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from conftest import SMALL_CACHE, generate
from fixed_batch import batch_of, gradients, whole
from torch.distributed.tensor import DTensor

import data
import rollout
import train
from flatrl import devices, processes, vllm_engine
from flatrl.models import checkpoint_weights

# Tokens in a micro-batch, of which some ranks need fillers; how losses are aggregated; flags.
CASES = {
    "ppo": (60, "token-mean", {}),
    "gspo": (130, "seq-mean-token-mean", {"policy_loss": "gspo"}),
    "gmpo": (
        60, "seq-mean-token-sum-norm", {"policy_loss": "gmpo", "demonstrated": range(0, 19, 5)}
    ),
    "top4": (60, "token-sum", {"kl_kind": "top4"}),
    "sharded": (60, "token-mean", {"shard": True}),
    "clipped": (130, "token-mean", {"shard": True, "max_grad_norm": 0.5}),
    "checkpointing": (60, "token-mean", {"shard": True, "gradient_checkpointing": True}),
}


def compare_gradients(accelerator, tied: str, untied: str) -> dict:
    found = {}
    for model, names in ((tied, CASES), (untied, ["sharded"])):
        for name in names:
            tokens, loss_agg, flags = CASES[name]
            found[model, name] = gradients(accelerator, model, tokens, loss_agg, **flags)
    return found


def policy_of(args: train.Args, device: torch.device) -> train.Policy:
    """A policy away from the file's weights, the same on every rank; sharded if args say so."""
    policy = train.Policy(args)
    with torch.no_grad():
        for i, parameter in enumerate(policy.parameters()):
            generator = torch.Generator().manual_seed(i)
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return devices.shard(policy, args, device) if args.shard else policy


def n_whole(policy: train.Policy) -> int:
    """Elements of the parameters that are not sharded at this moment."""
    return sum(p.numel() for p in policy.parameters() if not isinstance(p, DTensor))


def sync_and_look(engine: rollout.Engine, policy: train.Policy) -> dict:
    """What a sync does to engine and policy; is the engine then exactly the policy?"""
    weights = checkpoint_weights(policy.model, policy.engine_dtype)
    most = max(n_whole(policy) for _ in weights)
    train.sync(engine, policy, 1)
    (parts,) = engine.llm.apply_model(vllm_engine.fused_parts)
    held = {name: x for inside in parts.values() for name, x in inside.items()}
    wrong = []
    for name, p in policy.model.named_parameters():
        mine = whole(p.detach()).to(held[name].dtype)
        if not torch.equal(held[name][: len(mine)], mine):  # the engine pads the vocabulary
            wrong.append(name)
    return {
        "wrong": wrong,
        "names": set(held),
        "most": most,
        "left": n_whole(policy),
        "dtypes": {x.dtype for x in held.values()},
    }


def flags_of(model: str, **more) -> train.Args:
    return train.Args(
        model=model,
        max_prompt_tokens=64,
        max_response_tokens=64,
        max_model_len=128,
        tokens_per_micro_batch=128,
        shard=True,
        engine_args=SMALL_CACHE,
        **more,
    )


def compare_sync(accelerator, *models: str) -> dict:
    found = {}
    for model, dtype in [*((model, "float32") for model in models), (models[0], "bfloat16")]:
        args = flags_of(model, dtype=dtype)
        engine = rollout.Engine(model, args, accelerator.device)
        KEPT.append(engine)
        policy = policy_of(args, accelerator.device)
        found[model, dtype] = sync_and_look(engine, policy)
        engine.sleep()
        train.score_tokens(policy, batch_of(6), args)
        found[model, dtype]["left after scoring"] = n_whole(policy)
    return found


def compare_tp(accelerator, model: str) -> dict:
    """An engine over both ranks: a call of it is given up half-way, and one refused."""
    args = flags_of(model, dtype="float32", tp=2)
    engine, background = rollout.Engine(model, args, accelerator.device), processes.Background()
    KEPT.append(engine)
    found = {}
    train.sync(engine, policy_of(args, accelerator.device), 1)
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


KEPT: list[rollout.Engine] = []  # to collect an engine would destroy the process group

if __name__ == "__main__":
    what, out, *models = sys.argv[1:]
    accelerator, _ = devices.start_processes(train.Args())
    data.register_packed_attention()
    compare = {"gradients": compare_gradients, "sync": compare_sync, "tp": compare_tp}[what]
    results = compare(accelerator, *models)
    if dist.get_rank() == 0:
        torch.save(results, out)
    dist.barrier()
    for engine in KEPT[:1]:  # destroys the process group, and with it the others
        engine.close()
