"""A pretended GPU: torch's device "cuda" in host memory, for a build of torch without CUDA.

`install` gives this process one. Every operation runs on the CPU, at once. Operands on two devices
are refused, as by a GPU, and `waits` has what the host would wait for the GPU for."""

import contextlib
import functools
import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import torch

REPO = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
GIB = 1 << 30
# Operations whose result, or its shape, the host must read from the GPU.
READS = {
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount"),
    *("unique_dim", "unique_consecutive", "_unique2", "repeat_interleave"),
}
TAKES_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_"}

waits = set()  # (function of ours, what it waits for)


def note(what: str):
    """Notes a wait of the innermost function of ours."""
    frame = sys._getframe(1)
    while frame:
        file = Path(frame.f_code.co_filename)
        if file.parent in (REPO, REPO / "flatrl"):
            break
        frame = frame.f_back
    waits.add((frame.f_code.co_qualname if frame else "the backward pass", what))


# ---------------------------------------------------------------- operations


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CPU's tensor of the same memory."""
    if tensor.device.type == "cpu":
        return tensor
    if tensor.numel() == 0:  # an operation may resize it
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return torch.ops.pretended.to_host(tensor)


def each_tensor(function, value):
    """Returns a value, or a list or tuple of values, with a function applied to the tensors."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(each_tensor(function, x) for x in value)
    return CPU if isinstance(value, torch.device) else value


def compute(op, *args, **kwargs):
    """Runs any operation on the CPU, on the same memory."""
    given = []
    twins = {}  # id of a CPU's tensor -> it, and the GPU's of the same memory

    def host(tensor):
        given.append(tensor)
        twin = to_host(tensor)
        twins[id(twin)] = twin, tensor
        return twin

    def gpu(tensor):
        _, same = twins.get(id(tensor), (None, None))
        if same is None:
            return torch.ops.pretended.to_gpu(tensor)
        if same.is_cuda and same.shape != tensor.shape:  # out=
            torch.ops.pretended.become(same, torch.ops.pretended.to_gpu(tensor))
        return same

    args = each_tensor(host, args)
    kwargs = {name: each_tensor(host, value) for name, value in kwargs.items()}
    look_for_waits(op, given)
    return each_tensor(gpu, op(*args, **kwargs))


def look_for_waits(op, tensors: list[torch.Tensor]):
    """Notes what an operation waits for. Raises RuntimeError if its operands are on two devices."""
    name = op._schema.name.split("::")[1]
    on_host = [x for x in tensors if not x.is_cuda and x.ndim]
    if name in TAKES_INDICES:
        if any(x.dtype == torch.bool for x in tensors[1:]):
            note("a mask as an index")
        if on_host and tensors[0].is_cuda:
            note("indices on the host")
            return
    if name in READS:
        note(name)
    if on_host and any(x.is_cuda for x in tensors):
        raise RuntimeError(f"{op}: operands are on two devices")


def copy_(target, source, non_blocking=False):
    to_gpu, to_cpu = target.is_cuda, source.is_cuda
    if to_cpu and not to_gpu and not (non_blocking and target.is_pinned()):
        note("a copy to the host")
    if to_gpu and not to_cpu:
        if not source.is_pinned():
            note("a copy of pageable memory")
        elif not non_blocking:
            note("a blocking copy to the GPU")
    to_host(target).copy_(to_host(source))
    return target


def _local_scalar_dense(tensor):
    note("item")
    return to_host(tensor).item()


def resize_storage(storage: torch.UntypedStorage, n: int):
    """UntypedStorage.resize_, which torch has in no build without CUDA."""
    if storage.device.type == "cpu":
        return RESIZE(storage, n)
    torch.ops.pretended.resize_storage(storage, n)
    return storage


def mm(a, b, out_dtype):
    return a.to(out_dtype) @ b.to(out_dtype)


KERNELS = {
    "copy_": copy_,
    "_local_scalar_dense": _local_scalar_dense,
    "mm.dtype": mm,
}
# Operations of several kernels of their own for CUDA: they, too, are the CPU's.
WHOLE = {
    "aten": ["convolution", "convolution_backward"],
    "c10d": ["allreduce_", "allgather_", "_allgather_base_", "_reduce_scatter_base_",
             "reduce_scatter_", "broadcast_", "barrier"],
}  # fmt: skip


def varlen_attn(q, k, v, cu_q, cu_k, *_, scale, window_size, enable_gqa) -> torch.Tensor:
    """torch's varlen_attn by its definition, in float64: (S, H, D)."""
    # torch chooses the causal kernel for exactly (-1, 0), a tuple.
    assert enable_gqa and type(window_size) is tuple
    parts = []
    n_groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(n_groups, 1, output_size=q.shape[1]) for x in (k, v))
    bounds = [itertools.pairwise(to_host(x).tolist()) for x in (cu_q, cu_k)]
    for (a, b), (c, d) in zip(*bounds):
        positions = torch.arange(d - c, device=q.device)
        age = positions[d - c - (b - a) :, None] - positions
        hidden = age < 0
        if window_size[0] >= 0:
            hidden = hidden | (age > window_size[0])
        scores = torch.einsum("qhd,khd->hqk", q[a:b].double(), k[c:d]) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v[c:d]))
    return torch.cat(parts).to(q.dtype)


# ---------------------------------------------------------------- the device


class Stream:
    """The only stream, and an event of it: nothing is ever unfinished."""

    device_type = 1

    def __init__(self, *_, **__): ...

    def record(self, *_):
        return self

    wait_stream = wait_event = wait = record_event = record

    def query(self):
        return True

    def synchronize(self):
        note("synchronize")


LIBRARIES = []
RESIZE = torch.UntypedStorage.resize_


def build(folder: Path) -> Path:
    """Compiles gpu.cpp, unless a library of the same source is in the folder."""
    source = Path(__file__).with_name("gpu.cpp")
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()
    library = folder / f"{key[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        package = Path(torch.__file__).parent
        part = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-w", "-shared", "-fPIC", f"-I{package}/include", source]
        command += [f"-L{package}/lib", "-lc10", "-ltorch_cpu", "-o", part]
        subprocess.run(command, check=True)
        part.rename(library)
    return library


def install(library: Path):
    """Gives this process the device cuda:0, for good."""
    torch.ops.load_library(library)
    torch.ops.pretended.start()
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(compute, "CUDA")
    LIBRARIES.append(fallback)
    for namespace, names in WHOLE.items():
        kernels = torch.library.Library(namespace, "IMPL")
        for name in names:
            op = getattr(getattr(torch.ops, namespace), name).default
            kernels.impl(name, functools.partial(compute, op), "CUDA", allow_override=True)
        LIBRARIES.append(kernels)
    kernels = torch.library.Library("aten", "IMPL")
    for name, kernel in KERNELS.items():
        kernels.impl(name, kernel, "CUDA")
    LIBRARIES.append(kernels)

    from torch.nn.attention import varlen

    varlen.varlen_attn = varlen_attn
    nothing = lambda *_, **__: None
    usual = dict(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        is_initialized=lambda: True,
        is_bf16_supported=lambda: True,
        get_device_capability=lambda *_: (9, 0),
        mem_get_info=lambda *_: (60 * GIB, 80 * GIB),
        current_stream=lambda *_: Stream(),
        stream=lambda _: contextlib.nullcontext(),
        device=lambda _: contextlib.nullcontext(),
        synchronize=lambda *_: note("synchronize"),
        Stream=Stream,
        Event=Stream,
    )
    for name in ("_lazy_init", "set_device", "empty_cache", "manual_seed_all", "manual_seed"):
        usual[name] = nothing
    for name, function in usual.items():
        setattr(torch.cuda, name, function)
    torch.compile = lambda function, **_: function  # its kernels need a real GPU
    torch.UntypedStorage.resize_ = resize_storage
    torch.Tensor.pin_memory = torch._C.TensorBase.pin_memory  # vLLM's build for CPUs takes it away
