"""The device of each process: its start, what it can do, sharding, memory."""

import datetime
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from torch import nn
from torch.utils._pytree import tree_map, tree_map_only

from flatrl.bad_input import need, refusing
from flatrl.layers import recompute_activations
from flatrl.processes import PATIENCE, all_gather, ranks_of_host

# Options of accelerate's FSDP config that are implemented with one value only.
FSDP_OPTIONS = {
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}
# What accelerate's config can ask for that is not implemented.
NOT_IMPLEMENTED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
# Tokens of a micro-batch. A GPU waits for Python in smaller ones. That costs more than recomputing
# activations, which is tried first.
ENOUGH_TOKENS = 16384
# How long a process waits at the start for the launcher's other processes.
MEETING_PATIENCE = datetime.timedelta(minutes=10)
# How long a rank waits for the others to try a micro-batch.
TRIAL_PATIENCE = datetime.timedelta(minutes=5)


def sharding(args) -> bool | str:
    """Returns the value of --shard; True also if accelerate's config asks for FSDP.

    Raises BadInput if that config has options that are not implemented here."""
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return args.shard
    for name, allowed in FSDP_OPTIONS.items():
        value = os.environ.get(name, allowed).lower()
        need(value == allowed, f"accelerate's config has {name.lower()} {value}: must be {allowed}")
    return args.shard or True


def device_defaults(args, cuda: bool) -> dict:
    """Returns {flag: value} for the flags left to the device.

    On CUDA, FSDP2 does the mixed precision, even on one rank, because autocast would keep
    activations in float32, unlike vLLM.
    Raises BadInput if the device can't do what args ask for."""
    problem = (
        "there is no GPU that it can use: update the driver to 580 or later (nvidia-smi), or "
        "without a GPU source install.sh"
    )
    if torch.cuda.is_available():
        problem = "accelerate was told to use the CPU: leave out --cpu, or use_cpu in its config"
    need(cuda or not torch.version.cuda, f"torch is CUDA's build, and {problem}")
    need(
        not (cuda and args.deterministic),
        "--deterministic: on CUDA attention's gradients vary",
    )
    dtype = args.dtype
    if dtype == "auto":
        dtype = "bfloat16" if cuda else "float32"
    return {"dtype": dtype, "shard": sharding(args) or (cuda and dtype == "bfloat16")}


def shard(net: nn.Module, args, device: torch.device) -> nn.Module:
    """Shards a network in place by FSDP2, over all ranks or over those of each host (hybrid).

    Each decoder layer is a unit, whole only while it computes. The root has the rest:
    embeddings, last norm and head, which `forward` uses directly. Parameters and the sums of
    gradients are float32; for bfloat16, parameters are cast before they are gathered. Raises
    BadInput if the model names no layers."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    names = {name for x in net.modules() for name in getattr(x, "_no_split_modules", None) or ()}
    layers = [module for module in net.modules() if type(module).__name__ in names]
    need(
        layers,
        f"--shard: the code of --model {args.model} doesn't name its layers in "
        "_no_split_modules; --dtype float32 needs none",
    )
    shape = {"shard": dist.get_world_size()}
    if args.shard == "hybrid":
        n_hosts = dist.get_world_size() // ranks_of_host()
        shape = {"replicate": n_hosts, "shard": ranks_of_host()}
    mesh = dist.init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    precision = MixedPrecisionPolicy(getattr(torch, args.dtype, None), torch.float32)
    for module in (*layers, net):  # the root, too, is resharded: nothing may stay whole
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=precision)
    return net


def wrap(net: nn.Module, args, accelerator, frozen: bool = False) -> nn.Module:
    """Returns a network on the device: sharded, or wrapped by accelerate (DDP)."""
    if args.shard:
        return shard(net, args, accelerator.device)
    return accelerator.prepare_model(net, evaluation_mode=frozen)


def to_device(tensors, device: torch.device | str):
    """Returns nested dicts and lists with all their tensors on the device.

    To a GPU they are copied through pinned memory, without waiting: the CPU packs the next
    micro-batch while the GPU computes."""

    def copied(tensor):
        if "cuda" in str(device):
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return tree_map_only(torch.Tensor, copied, tensors)


def offload(run, device: torch.device | str):
    """Moves to a device what --offload names. The policy's weights never move.

    These are the optimisers' states; with "all", also critic and reference. On the host they are
    in pinned memory if there is CUDA."""
    args = run.args

    def moved(tensor):
        pinned = device == "cpu" and torch.cuda.is_available()
        return torch.empty_like(tensor, device=device, pin_memory=pinned).copy_(tensor)

    if args.offload != "none":
        for learner in run.learners.values():
            learner.optimizer.state = tree_map(moved, learner.optimizer.state)
    networks = []
    if args.offload == "all":
        if run.critic:
            networks.append(run.critic.net)
        # With --hints the reference is the policy, with LoRA a function of it.
        if isinstance(run.reference, nn.Module) and not args.hints:
            networks.append(run.reference)
    for network in networks:
        network._apply(moved)  # as nn.Module.to does; this rank's part of a sharded network


# ---------------------------------------------------------------- memory


def fit_micro_batch(learners: dict, args, device: torch.device, say: Callable[[str], None]):
    """Tries the largest micro-batch on the GPU, and makes it fit.

    --tokens_per_micro_batch is halved until it fits. Before it would be less than ENOUGH_TOKENS,
    --gradient_checkpointing is tried, unless that is given. learners: the train.Learners by name.
    Each computes its network forward and backward once, on all ranks together. No number of the run
    depends on the result, because losses are divided by global counts. Nothing is tried on a CPU.
    Raises BadInput if a single trajectory of the longest length does not fit."""
    if device.type != "cuda" or args.rollout_only or not args.num_steps:
        return
    group = dist.new_group(backend="gloo", timeout=TRIAL_PATIENCE)
    for name in learners:
        while not all(all_gather(_fits(name, learners, args), group)):
            _take_less(name, learners, args, say)
    torch.cuda.empty_cache()


def _take_less(name, learners, args, say):
    """Changes the flags so that a micro-batch takes less memory. Raises BadInput if it can't."""
    tokens = args.tokens_per_micro_batch
    halve_first = tokens // 2 >= max(args.window, ENOUGH_TOKENS)
    models = [learner.net.model for learner in learners.values()]
    can_recompute = all(model.supports_gradient_checkpointing for model in models)
    if args.gradient_checkpointing is None and can_recompute and not halve_first:
        for model in models:
            recompute_activations(model)
        args.gradient_checkpointing = True
        change = "--gradient_checkpointing"
    else:
        need(
            tokens > args.window,
            f"the {name} has too little GPU memory to learn from one trajectory of "
            f"{args.window} tokens: lower --max_response_tokens, or give "
            "--gradient_checkpointing, --lora_rank or more GPUs",
        )
        args.tokens_per_micro_batch = max(args.window, tokens // 2)
        change = f"--tokens_per_micro_batch {args.tokens_per_micro_batch}"
    say(f"a micro-batch of {tokens} tokens takes more than the GPU's memory: {change}")


def _fits(name, learners, args) -> bool:
    """Returns whether a learner computes a full micro-batch without running out of memory.

    Gradients and Adam's states take their room meanwhile, as later in the run."""
    net = learners[name].net
    n_rows, rest = divmod(args.tokens_per_micro_batch, args.window)
    lengths = [args.window] * n_rows
    if net.is_packed and rest > 1:
        lengths.append(rest)
    columns = torch.arange(args.window).expand(len(lengths), -1)
    batch = {
        "input_ids": columns % 10,
        "prompt_lengths": torch.ones(len(lengths), dtype=torch.long),
        "response_mask": (columns[:, 1:] < torch.tensor(lengths)[:, None]).float(),
    }
    rows = list(range(len(lengths)))
    micro = SimpleNamespace(rows=rows, lengths=lengths, shared=[0] * len(lengths))
    states = []
    try:
        for learner in learners.values():
            if not learner.optimizer.state:  # before the first step
                trained = [p for p in learner.net.parameters() if p.requires_grad]
                states += [torch.zeros_like(p) for p in 2 * trained]
        for p in net.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p)
        scores = net(net.pack(batch, micro))
        sum(x.sum() for x in scores.values()).backward()
        return True
    except torch.OutOfMemoryError:
        if args.shard:
            net.reset_iter_state()
        return False
    finally:
        net.zero_grad(set_to_none=True)


# ---------------------------------------------------------------- the start


def start_processes(args):
    """Starts this process as a rank of the launcher, or alone.

    Returns its accelerator, and a store that all ranks share. Raises BadInput if the device
    can't do what args ask for, if accelerate's config asks for more than FSDP, or if the ranks
    don't find each other."""
    with refusing("accelerate's config"):
        cpu_only = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
        asked = [part for name, part in NOT_IMPLEMENTED.items() if parse_flag_from_env(name)]
    need(
        not asked,
        f"accelerate's config asks for {', '.join(asked)}, which is not implemented: run "
        "`accelerate config` again, and choose FSDP or none (docs/scaling.md)",
    )
    if not dist.is_initialized():
        if not cpu_only:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        join_group("gloo" if cpu_only else "cpu:gloo,cuda:nccl")
        if not cpu_only:
            # The launcher sets one thread. Loading and trying a large model needs more.
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_of_host()))
            # The thread that starts the GPU's operations must not wait 5 ms for each tool.
            sys.setswitchinterval(2e-4)
    dtype = device_defaults(args, not cpu_only)["dtype"]
    precision = "bf16" if dtype == "bfloat16" else "no"
    with refusing("accelerate's config"):
        accelerator = Accelerator(cpu=cpu_only, mixed_precision=precision)
    need(
        ranks_of_host() % args.tp == 0,
        f"--tp {args.tp} must divide the number of processes, {ranks_of_host()}, of a host",
    )
    if dist.get_world_size() == 1:
        return accelerator, dist.HashStore()
    return accelerator, dist.distributed_c10d._get_default_store()


def join_group(backend: str):
    """Joins the group of the launcher's processes, or makes a group of this process alone."""
    size = os.environ.get("WORLD_SIZE", "1")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    need(
        size == "1" or not missing,
        f"WORLD_SIZE is {size}, and {', '.join(missing)} is not set: start all processes with "
        "`accelerate launch`, or unset WORLD_SIZE",
    )
    with refusing(f"process {os.environ.get('RANK', 0)} can't join the group of {size}"):
        store, rank, n_ranks = dist.HashStore(), 0, 1
        if size != "1":
            store, rank, n_ranks = next(dist.rendezvous("env://", timeout=MEETING_PATIENCE))
            store.set_timeout(PATIENCE)
        dist.init_process_group(
            backend, timeout=PATIENCE, store=store, rank=rank, world_size=n_ranks
        )
