"""FSDP2's communication between two ranks on one GPU: python -m pytest tests/gpu -s

One rank communicates nothing, and NCCL refuses two on a card. So gloo carries what FSDP2 sends."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

import data
import train
from flatrl import devices


class Gather(DefaultAllGather):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        parts = output_tensor.cpu()
        dist.all_gather_into_tensor(parts, input_tensor.cpu(), group=group)
        output_tensor.copy_(parts)


class Scatter(DefaultReduceScatter):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        total = input_tensor.cpu()
        dist.all_reduce(total, group=group)
        output_tensor.copy_(total.chunk(group.size())[group.rank()] / group.size())


def compare(rank: int, model: str, device: str, store: str):
    """Rank 0 has 64 tokens, rank 1 has 128: the gradient is the mean of both."""
    os.environ["LOCAL_RANK"] = "0"  # both are on the first GPU
    torch.ones(1, device=device)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    data.register_packed_attention()
    args = train.Args(model=model, dtype="bfloat16", shard=True)
    plain = train.Policy(args).to(device, torch.bfloat16)
    for n in (64, 128):
        devices._pass(SimpleNamespace(net=plain, wrapped=plain), n)
    net = devices.shard(train.Policy(args), args, torch.device(device))
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(Gather())
            module.set_custom_reduce_scatter(Scatter())
    devices._pass(SimpleNamespace(net=net, wrapped=net), 64 * (rank + 1))
    for (name, p), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        expected = other.grad.float().chunk(2)[rank] / 2
        difference = (p.grad.to_local() - expected).norm()
        assert 0 < expected.norm() and difference < 0.05 * expected.norm(), name
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_ranks_have_the_mean_gradient(tiny_model, tmp_path):
    arguments = tiny_model, "cuda", str(tmp_path / "store")
    torch.multiprocessing.spawn(compare, arguments, nprocs=2)
