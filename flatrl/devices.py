"""The device of each process: its start, what it can do, sharding, and host memory."""

import os
import shutil
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from torch import nn
from torch.utils._pytree import tree_map

from flatrl.bad_input import need
from flatrl.processes import PATIENCE, ranks_of_host


def sharding(args) -> bool | str:
    """Returns the value of --shard; it is True also if accelerate's config asks for FSDP.

    Raises BadInput if that config has options that are not implemented here."""
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return args.shard
    for setting in """FSDP_VERSION=2 FSDP_RESHARD_AFTER_FORWARD=true
            FSDP_OFFLOAD_PARAMS=false FSDP_CPU_RAM_EFFICIENT_LOADING=false
            FSDP_ACTIVATION_CHECKPOINTING=false""".split():
        name, allowed = setting.split("=")
        value = os.environ.get(name, allowed).lower()
        need(value == allowed,
             f"accelerate's config has {name.lower()} {value}: must be {allowed}")
    return args.shard or True


def device_defaults(args, cuda: bool) -> dict:
    """Returns {flag: value} of the flags left to the device. BadInput: it can't do that.

    bfloat16 on CUDA is FSDP2's, even on one rank: autocast's float32 residual stream is
    larger and unlike vLLM's."""
    need(cuda or not torch.version.cuda,
         "torch is CUDA's build, and there is no GPU that it can use: update the driver to "
         "580 or later (nvidia-smi), or without a GPU source install.sh")
    header = Path(sysconfig.get_path("include"), "Python.h")
    need(not cuda or header.is_file()
         and any(map(shutil.which, (os.environ.get("CC", "gcc"), "clang"))),  # as Triton looks
         f"vLLM's kernels need a C compiler and {header}: install gcc (or name another compiler "
         "in CC) and Python's headers")
    need(not cuda or not args.deterministic,
         "--deterministic: on CUDA attention's gradients vary")
    dtype = args.dtype
    if dtype == "auto":
        dtype = "bfloat16" if cuda else "float32"
    return {"dtype": dtype, "shard": sharding(args) or (cuda and dtype == "bfloat16")}


def shard(net: nn.Module, args, device: torch.device) -> nn.Module:
    """Shards a network in place, over all ranks or over those of each host (hybrid).

    torch's FSDP2 does it. Each decoder layer is a unit, whole only while it computes. The root
    has the rest: embeddings, last norm and head, which `forward` uses directly.

    Parameters stay float32; for bfloat16 they are cast before they are gathered, and
    gradients are summed in float32 (by accelerate.prepare in bfloat16). BadInput: the model
    names no layers."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    names = {name for x in net.modules() for name in getattr(x, "_no_split_modules", None) or ()}
    layers = [module for module in net.modules() if type(module).__name__ in names]
    need(layers, f"--shard: the code of --model {args.model} doesn't name its layers in "
         "_no_split_modules; --dtype float32 needs none")
    n = dist.get_world_size()
    shape = (n // ranks_of_host(), ranks_of_host()) if args.shard == "hybrid" else (n,)
    mesh = dist.init_device_mesh(device.type, shape,
                                 mesh_dim_names=("replicate", "shard")[-len(shape):])
    precision = MixedPrecisionPolicy(getattr(torch, args.dtype, None), torch.float32)
    for module in (*layers, net):  # reshard: the root too, nothing may stay whole meanwhile
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=precision)
    return net


def move(optimizers: Iterable[torch.optim.Optimizer], networks: Iterable[nn.Module],
         device: torch.device | str):
    """Moves the states of optimisers, and the parameters and buffers of networks, to a device.

    On the host they are in pinned memory where there is CUDA."""
    def moved(tensor):
        pinned = device == "cpu" and torch.cuda.is_available()
        return torch.empty_like(tensor, device=device, pin_memory=pinned).copy_(tensor)

    for optimizer in optimizers:
        optimizer.state = tree_map(moved, optimizer.state)
    for network in networks:
        network._apply(moved)  # as nn.Module.to does: of a sharded one this rank's part


def offload(run, device: torch.device | str):
    """Moves to a device what --offload names: the optimisers' states; with all, also critic and
    reference. The policy's weights never move."""
    args = run.args
    optimizers = []
    networks = []
    if args.offload != "none":
        optimizers = [learner.optimizer for learner in run.learners.values()]
    if args.offload == "all":
        if run.critic:
            networks.append(run.critic.net)
        # With --hints the reference is the policy, with LoRA a function of it.
        if isinstance(run.reference, nn.Module) and not args.hints:
            networks.append(run.reference)
    move(optimizers, networks, device)


def start_processes(args):
    """Starts this process as a rank of the launcher's, or alone. Returns its accelerator, and
    a store that all ranks share. Raises BadInput if the device can't do what args ask for."""
    cpu_only = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    backend = "gloo" if cpu_only else "cpu:gloo,cuda:nccl"
    if not dist.is_initialized():
        if not cpu_only:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
        dist.init_process_group(backend, timeout=PATIENCE, **alone)
    dtype = device_defaults(args, not cpu_only)["dtype"]
    precision = "bf16" if dtype == "bfloat16" else "no"
    accelerator = Accelerator(cpu=cpu_only, mixed_precision=precision)
    need(ranks_of_host() % args.tp == 0,
         f"--tp {args.tp} must divide the number of processes, {ranks_of_host()}, of a host")
    if dist.get_world_size() == 1:
        return accelerator, dist.HashStore()
    return accelerator, dist.distributed_c10d._get_default_store()
