"""The device of each process: its start, what it can do, sharding, what is moved off it."""

import datetime
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from torch import nn
from torch.utils._pytree import tree_map_only

from flatrl.attention import packed_attention
from flatrl.bad_input import need, refusing
from flatrl.launch import n_cores
from flatrl.layers import recomputable_layers, recompute_activations
from flatrl.peaks import count_parameters, update_flops
from flatrl.processes import PATIENCE, all_gather, ranks_of_host, use_gpu_of_rank

# In smaller passes a GPU waits for Python: launching one takes about 0.3 s, in which an H100 that
# reaches a third of its peak computes this many FLOPs.
FLOPS_OF_A_PASS = 1e14
# How much of the free memory a micro-batch may take: blocks of other sizes leave holes in it.
SHARE_OF_FREE = 0.85
# How long a process waits at the start for the launcher's other processes.
MEETING_PATIENCE = datetime.timedelta(minutes=10)
# How long a GPU waits in an update for the other ranks' GPUs.
GPU_PATIENCE = datetime.timedelta(minutes=30)


def device_defaults(args, cuda: bool) -> dict:
    """Returns {flag: value} for the flags left to the device and to accelerate's config.

    On CUDA, FSDP2 does the mixed precision, even on one rank, because autocast would keep
    activations in float32, unlike vLLM. Raises BadInput for what can't be done."""
    for kind in ("DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        is_asked = parse_flag_from_env(f"ACCELERATE_USE_{kind}")
        need(not is_asked, f"accelerate's config asks for {kind.lower()}: choose FSDP or none")
    need(
        cuda or not torch.version.cuda,
        "torch, of CUDA's build, finds no GPU: update the driver to 580 or later, or leave out "
        "accelerate's --cpu; without a GPU source install.sh",
    )
    need(not (cuda and args.deterministic), "--deterministic: not on CUDA, whose gradients vary")
    dtype = args.dtype
    if dtype == "auto":
        dtype = "bfloat16" if cuda else "float32"
    is_sharded = parse_flag_from_env("ACCELERATE_USE_FSDP") or (cuda and dtype == "bfloat16")
    return {"dtype": dtype, "shard": args.shard or is_sharded}


def decoder_layers(net: nn.Module, args) -> list[nn.Module]:
    """Returns the layers of a transformers model. Raises BadInput if its code names none."""
    names = {name for x in net.modules() for name in getattr(x, "_no_split_modules", None) or ()}
    layers = [module for module in net.modules() if type(module).__name__ in names]
    need(layers, f"{args.model} has no _no_split_modules: give float32 and no --shard, --compile")
    return layers


def shard(net: nn.Module, args, device: torch.device) -> nn.Module:
    """Shards a network in place by FSDP2, over all ranks or over those of each host (hybrid).

    Each decoder layer is a unit, whole only while it computes; the root has the rest. Parameters
    and sums of gradients are float32; parameters are cast to bfloat16 before they are gathered."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shape = {"shard": dist.get_world_size()}
    if args.shard == "hybrid":
        n_hosts = dist.get_world_size() // ranks_of_host()
        shape = {"replicate": n_hosts, "shard": ranks_of_host()}
    mesh = dist.init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    precision = MixedPrecisionPolicy(getattr(torch, args.dtype, None), torch.float32)
    layers = decoder_layers(net, args)
    for module in (*layers, net):  # the root, too, is resharded: nothing may stay whole
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=precision)
    return net


def compile_layers(net: nn.Module, args, device: torch.device):
    """Makes the first call of each decoder layer compile its forward pass, for any lengths.

    Hooks stay outside, FSDP's among them, and so does the recomputation of activations."""
    from transformers import AttentionInterface

    if device.type == "cpu":  # its loop over sequences would be compiled for each number of them
        AttentionInterface.register("packed", torch.compiler.disable(packed_attention))
    for layer in decoder_layers(net, args):
        if isinstance(layer.forward, partial):  # checkpoint(forward): recompute_activations
            recomputed = layer.forward
            forward = torch.compile(*recomputed.args, dynamic=True)
            layer.forward = partial(recomputed.func, forward, **recomputed.keywords)
        else:
            layer.forward = torch.compile(layer.forward, dynamic=True)


def wrap(net: nn.Module, args, accelerator, frozen: bool = False) -> nn.Module:
    """Returns a network on the device: sharded, or wrapped by accelerate (DDP).

    With --compile, its decoder layers are compiled before, each by itself."""
    if args.compile:
        compile_layers(net, args, accelerator.device)
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
    """Moves what --offload names to or from the host's memory. The policy's weights never move.

    These are the optimisers' states; with "all", also critic and reference."""
    args = run.args

    def moved(tensor):
        if not tensor.ndim:  # Adam's number of steps, which torch may keep on the CPU
            return tensor
        pinned = device == "cpu" and torch.cuda.is_available()
        return torch.empty_like(tensor, device=device, pin_memory=pinned).copy_(tensor)

    if args.offload != "none":
        for learner in run.learners.values():
            for optimizer in learner.optimizers:
                optimizer.state = tree_map_only(torch.Tensor, moved, optimizer.state)
    if args.offload == "all":
        for network in (run.critic and run.critic.net, run.reference):
            # The reference may be the policy (--ref_update 1) or, with LoRA, a function of it.
            if isinstance(network, nn.Module) and network is not run.policy.net:
                network._apply(moved)  # as nn.Module.to does; this rank's part of a sharded one


# ---------------------------------------------------------------- the micro-batch


def fit_micro_batch(learners: dict, args, device: torch.device, say: Callable[[str], None]):
    """Sets --tokens_per_micro_batch and --gradient_checkpointing by the GPUs' memory, if not given.

    The rank with the least memory decides. Activations are recomputed where micro-batches would
    otherwise be too small to keep a GPU busy, or smaller than what is given. learners: by name."""
    given = args.tokens_per_micro_batch
    if device.type != "cuda" or (given and args.gradient_checkpointing is not None):
        return
    models = [learner.net.model for learner in learners.values()]
    n_rows = args.prompts_per_step // args.updates_per_epoch * args.group_size
    share = math.ceil(n_rows / dist.get_world_size()) * args.window  # a rank's tokens of an update
    _, n_used = count_parameters(models[0])  # the policy's
    flops_of_token = update_flops(args) * n_used
    # Passes of so many tokens keep a GPU busy.
    enough = given or max(args.window, min(share, int(FLOPS_OF_A_PASS / flops_of_token)))
    tokens = _tokens_that_fit(learners, args)
    can_recompute = all(map(recomputable_layers, models))
    if tokens < enough and args.gradient_checkpointing is None and can_recompute:
        args.gradient_checkpointing = True
        for model in models:
            recompute_activations(model)
        tokens = _tokens_that_fit(learners, args)
    args.fill({"gradient_checkpointing": False})
    most = enough if args.gradient_checkpointing else share  # more would gain nothing
    # The longest rollout must be tried, whatever is predicted.
    args.tokens_per_micro_batch = given or max(args.window, min(tokens, most))
    flags = ("tokens_per_micro_batch", "gradient_checkpointing")
    say("by memory: " + " ".join(f"--{name} {getattr(args, name)}" for name in flags))


def _tokens_that_fit(learners, args) -> int:
    """Returns how many tokens fit on all ranks, by the line through the memory of two passes."""
    # With recomputation, the head's gradient is the peak of a small pass, and hides the layers'.
    n = min(args.window, 8192 if args.gradient_checkpointing else 512)
    trained = [p for x in learners.values() if not x.n_updates for p in x.net.parameters()]
    adam = sum(2 * getattr(p, "_local_tensor", p).nbytes for p in trained if p.requires_grad)
    fits = []
    for learner in learners.values():
        _pass(learner, n)  # makes the gradients, which stay meanwhile
        small, _ = read_memory(_pass, learner, n // 2)
        large, free = read_memory(_pass, learner, n)
        of_token = (large - small) / (n - n // 2)
        fits.append(n + int((SHARE_OF_FREE * (free - adam) - large) / of_token))
        learner.net.zero_grad(set_to_none=True)
    return min(map(min, all_gather(fits)))


def _pass(learner, n: int):
    """Computes a row of n tokens forward and backward, as an update does."""
    batch = {
        "input_ids": torch.arange(n)[None] % 10,
        "prompt_lengths": torch.ones(1, dtype=torch.long),
        "response_mask": torch.ones(1, n - 1),
        "routes": [torch.full((n, 1, 1), -1)],  # routers choose for themselves
    }
    micro = SimpleNamespace(rows=[0], lengths=[n], shared=[0])
    scores = learner.wrapped(learner.net.pack(batch, micro))
    sum(x.sum() for x in scores.values()).backward()


def read_memory(function: Callable, *args) -> tuple[int, int]:
    """Returns the most bytes of the GPU that a call takes for a while, and those free after it."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function(*args)
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return peak, free


# ---------------------------------------------------------------- the start


def start_processes(args):
    """Starts this process as a rank of the launcher, or alone.

    Returns its accelerator, and a store that all ranks share. Raises BadInput if the device
    can't do what args ask for, or if the ranks don't find each other."""
    cpu_only = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    if not dist.is_initialized():
        if not cpu_only:
            n_gpus = torch.cuda.device_count()
            has_gpu = int(os.environ.get("LOCAL_RANK", 0)) < n_gpus
            need(has_gpu, f"there are more processes than GPUs: give --num_processes {n_gpus}")
            use_gpu_of_rank()
        join_group("gloo" if cpu_only else "cpu:gloo,cuda:nccl")
        if not cpu_only:
            # The launcher sets one thread. Loading a large model needs more.
            torch.set_num_threads(max(1, n_cores() // ranks_of_host()))
            # The thread that starts the GPU's operations must not wait 5 ms for each tool.
            sys.setswitchinterval(2e-4)
    # With accelerate's usual "true", transformers loads zeros on all ranks but the first.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    dtype = device_defaults(args, not cpu_only)["dtype"]
    precision = "bf16" if dtype == "bfloat16" else "no"
    accelerator = Accelerator(cpu=cpu_only, mixed_precision=precision)
    n_ranks = ranks_of_host()
    need(n_ranks % args.tp == 0, f"--tp {args.tp} must divide the {n_ranks} processes of a host")
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
    with refusing("ranks can't talk: in a container give --ipc=host; NCCL_DEBUG=INFO tells more"):
        if device.type == "cuda":
            dist.group.WORLD._get_backend(device)._set_default_timeout(GPU_PATIENCE)
        dist.all_reduce(torch.ones(1, device=device))
        if device.type == "cuda":
            torch.cuda.synchronize()
