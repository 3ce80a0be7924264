"""Run by test_sharding.py on several ranks: what needs them; rank 0 writes what it found.

torchrun --nproc_per_node 2 tests/sharding_worker.py PART,PART... FOLDER TIED UNTIED"""

import os
import signal
import sys
import types
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from conftest import SMALL_CACHE
from fixed_batch import batch_of, gradients, whole
from transformers import AutoTokenizer

import data
import rollout
import train
from flatrl import checkpoints, devices, processes, vllm_engine
from flatrl.log import SilentLog

COLUMNS = ["response_mask", "unit_tokens", "advantages", "logprobs_rollout"]
# Tokens in a micro-batch, of which some ranks need fillers; how losses are aggregated; flags.
CASES = {
    "ppo": (60, "token-mean", {}),
    "gmpo": (60, "seq-mean-token-mean", {"policy_loss": "gmpo", "demonstrated": range(0, 19, 5)}),
    "top4": (60, "token-sum", {"kl_kind": "top4"}),
    "sharded": (60, "token-mean", {"shard": True}),
    "clipped": (130, "token-mean", {"shard": True, "max_grad_norm": 0.5}),
    "checkpointing": (60, "token-mean", {"shard": True, "gradient_checkpointing": True}),
    "hybrid": (60, "token-mean", {"shard": "hybrid"}),
}


def flags_of(model: str, **more) -> train.Args:
    sizes = dict(max_prompt_tokens=64, max_response_tokens=64, max_model_len=128)
    flags = dict(dtype="float32", shard=True, tokens_per_micro_batch=128, engine_args=SMALL_CACHE)
    return train.Args(model=model, lr=0.1, **sizes | flags | more)


def find_gradients(accelerator, folder: Path, tied: str, untied: str) -> dict:
    """Of all cases; over four ranks, which are on two hosts, of the hybrid one."""
    found = {}
    for name, (tokens, loss_agg, flags) in CASES.items():
        if (name == "hybrid") == (dist.get_world_size() == 4):
            found[name] = gradients(accelerator, tied, tokens, loss_agg, **flags)
    return found


def find_sync(accelerator, folder: Path, tied: str, untied: str) -> dict:
    """What a sync does to engine and policy; is the engine then exactly the policy?"""
    found = {}
    for model, dtype in ((tied, "float32"), (untied, "bfloat16")):
        args = flags_of(model, dtype=dtype)
        engine = rollout.Engine(model, args, accelerator.device)
        KEPT.append(engine)
        policy = devices.shard(moved(train.Policy(args)), args, accelerator.device)
        train.sync(engine, policy, 1)
        (parts,) = engine.llm.apply_model(vllm_engine.fused_parts)
        held = {name: x for inside in parts.values() for name, x in inside.items()}
        wrong = []
        for name, p in policy.model.named_parameters():
            mine = whole(p.detach()).to(held[name].dtype)
            if not torch.equal(held[name][: len(mine)], mine):  # the engine pads the vocabulary
                wrong.append(name)
        engine.sleep()
        dtypes = {x.dtype for x in held.values()}
        found[model] = {"wrong": wrong, "names": set(held), "dtypes": dtypes}
    return found


def moved(policy: train.Policy) -> train.Policy:
    """Moves a policy away from the file's weights, by the same on every rank."""
    with torch.no_grad():
        for i, parameter in enumerate(policy.parameters()):
            generator = torch.Generator().manual_seed(i)
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return policy


def run_of(accelerator, folder: Path, args: train.Args, n: int):
    """The parts of a train.Run that are saved, after an optimiser step on n trajectories."""
    data.register_packed_attention()
    learner = train.Learner(train.Policy(args), 0.1, 1, args, accelerator)
    batch = batch_of(n)
    batch["advantages"] = torch.ones_like(batch["response_mask"])
    train.optimise(learner, train.policy_objective, batch, COLUMNS, range(n), args, accelerator)
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


def find_checkpoints(accelerator, folder: Path, tied: str, untied: str) -> dict:
    """States of a sharded policy: saved here, and loaded from the plain one of the test. The
    policy is then in `final`, in files of about 100 kB."""
    checkpoints.FILE_BYTES = 100_000
    found = {}
    for rank in (0, 4):
        args = flags_of(tied, lora_rank=rank)
        run = run_of(accelerator, folder / f"sharded_{rank}", args, 8)
        checkpoints.save_checkpoint(run)
        saved = state_of(run)
        plain = folder / f"plain_{rank}/checkpoints/step_000001"
        checkpoints.load_checkpoint(run, plain)
        found[rank] = saved, state_of(run)
        checkpoints.save_policy(run, run.folder / "final")
    return found


def find_stop(accelerator, folder: Path, tied: str, untied: str) -> dict:
    """An update that rank 1 has no time for, in its second of several passes."""
    run = run_of(accelerator, folder / "stopped", flags_of(tied, tokens_per_micro_batch=60), 8)
    stop = processes.Stop(accelerator.store)
    passes = []

    def before_pass():
        processes.gather_unless_stopped(None, stop.is_out_of_time)
        passes.append(1)
        if dist.get_rank() == 1:
            signal.raise_signal(signal.SIGTERM)
            processes.UPDATE_S = 0

    learner, batch = run.policy, batch_of(19)
    batch["advantages"] = torch.ones_like(batch["response_mask"])
    before = state_of(run)
    stopped = False
    try:
        train.optimise(
            learner, train.policy_objective, batch, COLUMNS, range(19), run.args, accelerator,
            before_pass=before_pass,
        )  # fmt: skip
    except processes.Stopped:
        stopped = True
    checkpoints.save_checkpoint(run)
    checkpoints.load_checkpoint(run, folder / "stopped/checkpoints/step_000001")
    return {"stopped": stopped, "passes": len(passes), "before": before, "saved": state_of(run)}


PARTS = {
    "gradients": find_gradients,
    "checkpoints": find_checkpoints,
    "stop": find_stop,
    "sync": find_sync,
}
KEPT: list[rollout.Engine] = []  # to collect an engine would destroy the process group

if __name__ == "__main__":
    names, folder, *models = sys.argv[1:]
    accelerator, accelerator.store = devices.start_processes(train.Args())
    data.register_packed_attention()
    results = {name: PARTS[name](accelerator, Path(folder), *models) for name in names.split(",")}
    if dist.get_rank() == 0:
        torch.save(results, f"{folder}/found")
    dist.barrier()
    for engine in KEPT[:1]:  # destroys the process group, and with it the others
        engine.close()
