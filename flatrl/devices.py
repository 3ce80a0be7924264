"""The device of each process: its start, what it can do, sharding, what is moved off it."""

import contextlib
import datetime
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from torch import nn
from torch.utils._pytree import tree_map, tree_map_only

from flatrl.bad_input import need, refusing
from flatrl.processes import PATIENCE, ranks_of_host, use_gpu_of_rank

# What accelerate's config sets in the environment, and the only value that is implemented.
IMPLEMENTED = {
    "ACCELERATE_USE_DEEPSPEED": "false",
    "ACCELERATE_USE_MEGATRON_LM": "false",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "false",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}
# How long a process waits at the start for the launcher's other processes.
MEETING_PATIENCE = datetime.timedelta(minutes=10)
# How long a GPU waits in an update for the other ranks' GPUs.
GPU_PATIENCE = datetime.timedelta(minutes=30)


def sharding(args) -> bool | str:
    """Returns the value of --shard; True also if accelerate's config asks for FSDP.

    Raises BadInput if that config asks for what is not implemented here."""
    for name, allowed in IMPLEMENTED.items():
        value = os.environ.get(name, allowed).lower()
        need(
            value == allowed,
            f"accelerate's config has {name.lower()} {value}: must be {allowed}; run `accelerate "
            "config` again, and choose FSDP or none (docs/scaling.md)",
        )
    return args.shard or parse_flag_from_env("ACCELERATE_USE_FSDP")


def device_defaults(args, cuda: bool) -> dict:
    """Returns {flag: value} for the flags left to the device.

    On CUDA, FSDP2 does the mixed precision, even on one rank, because autocast would keep
    activations in float32, unlike vLLM. Raises BadInput if the device can't do what args ask for.
    """
    need(
        cuda or not torch.version.cuda,
        "torch is CUDA's build, and there is no GPU that it can use: update the driver to 580 or "
        "later (nvidia-smi), or leave out accelerate's --cpu; without a GPU source install.sh",
    )
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

    Each decoder layer is a unit, whole only while it computes; the root has the rest. Parameters
    and the sums of gradients are float32; for bfloat16, parameters are cast before they are
    gathered. Raises BadInput if the model names no layers."""
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
    """Returns nested dicts and lists with all their tensors on the device."""

    def copied(tensor):
        if "cuda" in str(device):  # the CPU packs the next micro-batch meanwhile
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return tree_map_only(torch.Tensor, copied, tensors)


def offload(run, device: torch.device | str):
    """Moves to a device what --offload names. The policy's weights never move.

    These are the optimisers' states; with "all", also critic and reference."""
    args = run.args

    def moved(tensor):
        pinned = device == "cpu" and torch.cuda.is_available()
        return torch.empty_like(tensor, device=device, pin_memory=pinned).copy_(tensor)

    if args.offload != "none":
        for learner in run.learners.values():
            for optimizer in learner.optimizers:
                optimizer.state = tree_map(moved, optimizer.state)
    networks = []
    if args.offload == "all":
        if run.critic:
            networks.append(run.critic.net)
        # The reference may be the policy (--ref_update 1) or, with LoRA, a function of it.
        if isinstance(run.reference, nn.Module) and run.reference is not run.policy.net:
            networks.append(run.reference)
    for network in networks:
        network._apply(moved)  # as nn.Module.to does; this rank's part of a sharded network


# ---------------------------------------------------------------- the start


def start_processes(args):
    """Starts this process as a rank of the launcher, or alone.

    Returns its accelerator, and a store that all ranks share. Raises BadInput if the device
    can't do what args ask for, or if the ranks don't find each other."""
    cpu_only = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    if not dist.is_initialized():
        if not cpu_only:
            n_gpus = torch.cuda.device_count()
            need(
                int(os.environ.get("LOCAL_RANK", 0)) < n_gpus,
                f"there are more processes than GPUs: give --num_processes {n_gpus}",
            )
            use_gpu_of_rank()
        join_group("gloo" if cpu_only else "cpu:gloo,cuda:nccl")
        if not cpu_only:
            # The launcher sets one thread. Loading a large model needs more.
            torch.set_num_threads(max(1, n_cores() // ranks_of_host()))
            # The thread that starts the GPU's operations must not wait 5 ms for each tool.
            sys.setswitchinterval(2e-4)
    dtype = device_defaults(args, not cpu_only)["dtype"]
    precision = "bf16" if dtype == "bfloat16" else "no"
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
    store, rank, n_ranks = dist.HashStore(), 0, 1
    with refusing(f"process {os.environ.get('RANK', 0)} can't join the group of {size}"):
        if size != "1":
            store, rank, n_ranks = next(dist.rendezvous("env://", timeout=MEETING_PATIENCE))
            store.set_timeout(PATIENCE)
        dist.init_process_group(
            backend, timeout=PATIENCE, store=store, rank=rank, world_size=n_ranks
        )
    device = torch.device("cuda" if "nccl" in backend else "cpu")
    with refusing(
        "the ranks can't exchange a number: in a container give --ipc=host, or a larger "
        "--shm-size; NCCL_DEBUG=INFO tells more"
    ):
        if device.type == "cuda":
            dist.group.WORLD._get_backend(device)._set_default_timeout(GPU_PATIENCE)
        dist.all_reduce(torch.ones(1, device=device))
        if device.type == "cuda":
            torch.cuda.synchronize()


def n_cores() -> int:
    """Returns how many cores this process may use, by its affinity and its container's quota."""
    n_allowed = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # without cgroups of version 2, or a quota
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        return max(1, min(n_allowed, quota // period))
    return n_allowed
