"""Run by test_sharding.py on two ranks: what needs them; rank 0 writes what it found.

torchrun --nproc_per_node 2 tests/sharding_worker.py gradients | sync | tp OUT MODEL..."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from conftest import SMALL_CACHE, generate, output_of
from fixed_batch import gradients, whole
from torch.distributed.tensor import DTensor

import data
import rollout
import train
from flatrl import devices, processes, vllm_engine

PROMPTS = [[5 + (7 * i + 3 * j) % 240 for j in range(5 + 6 * i)] for i in range(4)]

# Tokens in a micro-batch, of which some ranks need fillers; how losses are aggregated; flags.
CASES = {
    "ppo": (60, "token-mean", {}),
    "gspo": (130, "seq-mean-token-mean", {"policy_loss": "gspo", "observation_coef": 0.3}),
    "gmpo": (
        60,
        "seq-mean-token-sum-norm",
        {"policy_loss": "gmpo", "demonstrated": range(0, 19, 5)},
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
    most = max(n_whole(policy) for _ in train.named_weights(policy))
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


def logprobs_after_sync(engine, background, policy: train.Policy, args) -> list[float]:
    """|engine - trainer| of what the engines of both ranks sample, by the trainer's scoring."""
    outputs = []
    if engine.leader:
        sampled = generate(engine, background, PROMPTS, temperature=1.0, max_tokens=12)
        engine.dismiss()
        for prompt, out in zip(PROMPTS, sampled, strict=True):
            output = output_of(
                [1] * len(out.token_ids), prompt, out.token_ids, response_logprobs=out.logprobs
            )
            outputs.append(output)
    else:
        engine.follow()
    batch = data.collate(sum(processes.all_gather(outputs), []))
    scores = train.score_tokens(policy, batch, args)
    return (scores - batch["logprobs_rollout"]).abs()[batch["response_mask"].bool()].tolist()


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
    found, background = {}, processes.Background()
    for model, dtype in [*((model, "float32") for model in models), (models[0], "bfloat16")]:
        args = flags_of(model, dtype=dtype)
        engine = rollout.Engine(model, args, accelerator.device)
        KEPT.append(engine)
        policy = policy_of(args, accelerator.device)
        result = sync_and_look(engine, policy)
        result["difference"] = logprobs_after_sync(engine, background, policy, args)
        engine.sleep()
        result["left after scoring"] = n_whole(policy)
        found[model, dtype] = result
    return found


def compare_tp(accelerator, model: str) -> dict:
    """An engine over both ranks, with the weights of a sharded and of a whole policy."""
    args = flags_of(model, dtype="float32", tp=2)
    engine, background = rollout.Engine(model, args, accelerator.device), processes.Background()
    KEPT.append(engine)
    found = {}
    for args.shard in (True, False):
        policy = policy_of(args, accelerator.device)
        train.sync(engine, policy, 1)
        found[args.shard] = logprobs_after_sync(engine, background, policy, args)
        engine.sleep()
    train.sync(engine, policy, 2)
    if engine.leader:
        call = engine.generate(request_id="lost", prompt_ids=[5], sampling_params={})
        lost = background.submit(call)
        while not engine.running:
            engine.step()
        lost.cancel()
        (refused,) = generate(engine, background, [[3] * 200])
        found["refused"] = repr(refused)
        engine.dismiss()
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
