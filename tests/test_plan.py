"""bench/plan.py against train.Policy itself, run on tensors without storage (FakeTensorMode) in the shapes of Qwen2.5.

Three layers are run, and the growth from the second to the third stands for the others, which are the same. What is
CUDA's own is run as there: varlen_attn, which keeps q, k, v, its output and logsumexp (a CPU's attention would go
segment by segment), and products of half precision with a float32 result. --shard is a policy of bfloat16 parameters:
the tensors that FSDP2's layers compute with; what it gathers and has not reduced yet is the plan's own, not checked.
"""

import inspect
import sys
import weakref

import pytest
import torch
from conftest import REPO
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AttentionInterface, AutoConfig

import data
import losses
import train

sys.path.append(str(REPO / "bench"))
import plan

GIB = 1 << 30
SIZES = ["0.5B", "1.5B", "7B", "14B", "32B"]
AS_ON_CUDA = {}  # the two functions that branch on the device, with that of CUDA taken
for function, branch, taken in ((data.packed_attention, "query.is_cuda and half", "half"),
                                (losses._matmul, "if a.is_cuda", "if True")):  # fmt: skip
    source = inspect.getsource(function)
    assert source.count(branch) == 1
    AS_ON_CUDA[function.__name__] = scope = dict(vars(inspect.getmodule(function)))
    exec(source.replace(branch, taken), scope)
    AS_ON_CUDA[function.__name__] = scope[function.__name__]


class Live(TorchDispatchMode):
    """Bytes of the tensors alive that were made under it, now and at their most."""

    def __init__(self, given):
        super().__init__()
        self.known, self.now, self.peak = {self.key(x) for x in given}, 0, 0

    def key(self, x):
        return x.untyped_storage()._cdata

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and (at := self.key(x)) not in self.known:
                storage = x.untyped_storage()
                self.known.add(at)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.gone, at, storage.nbytes())
        return made

    def gone(self, at, n):
        self.known.discard(at)
        self.now -= n


def micro_batch(args) -> dict:
    """Groups at the limits of prompt and response, as many as fill it."""
    P, R, n = args.max_prompt_tokens, args.max_response_tokens, args.group_size
    groups = args.tokens_per_micro_batch // (P + n * R)
    prompts = torch.arange(groups)[:, None].repeat_interleave(n, 0).expand(-1, P) + 1
    rows = groups * n
    ids = torch.cat([prompts, torch.arange(rows * R).view(rows, R) + 1000], 1)
    lengths = torch.full((rows,), P + R), torch.full((rows,), P)
    batch = dict(zip(("lengths", "prompt_lengths"), lengths)) | {"input_ids": ids, "response_mask": torch.ones(rows, R)}
    return data.pack_rows(batch, list(range(rows)), "cpu")


def measured(config, args, monkeypatch) -> dict[str, float]:
    """Bytes beside parameters and gradients: kept by a forward pass, at most in an update, at most in scoring."""
    def load(auto_class, args, *_, dtype, **more):
        dtype = torch.bfloat16 if args.shard else dtype
        model = auto_class.from_config(config, dtype=dtype, attn_implementation="packed")
        return model, {"missing_keys": []}

    monkeypatch.setattr(data, "from_pretrained", load)
    monkeypatch.setattr(train, "need", lambda ok, message: None)  # no values: nothing to check
    monkeypatch.setattr(train.Net, "_takes_packed_rows", lambda net: True)
    monkeypatch.setattr(train.Policy, "_is_whole", lambda *_: True)
    monkeypatch.setattr(losses, "_matmul", AS_ON_CUDA["_matmul"])
    monkeypatch.setitem(AttentionInterface._global_mapping, "packed", AS_ON_CUDA["packed_attention"])
    n_layers, config.num_hidden_layers = config.num_hidden_layers, 3
    config.layer_types = config.layer_types[:3]
    packed = micro_batch(args)
    autocast = lambda: torch.autocast("cpu", torch.bfloat16, enabled=not args.shard)
    with FakeTensorMode() as fake:
        net = train.Policy(args)
        packed = tree_map_only(torch.Tensor, fake.from_tensor, packed)
        for p in net.parameters():
            p.grad = torch.empty_like(p)
        given = [*net.parameters(), *net.buffers(), *(p.grad for p in net.parameters())]
        tensors = [x for x in tree_leaves(packed) if isinstance(x, torch.Tensor)]
        with Live(given + tensors) as live:
            with autocast(), torch.no_grad():
                net(packed)
            scored, live.peak, after = live.peak, live.now, []
            for layer in net.model.model.layers:
                layer.register_forward_hook(lambda *_: after.append(live.now))
            with autocast():
                logprobs, _ = net(packed)
            kept = live.now
            logprobs.sum().backward()
    more = (n_layers - 3) * (after[2] - after[1])
    return {"kept": kept + more, "update": live.peak + more, "score": scored}


def test_raw(monkeypatch):
    from transformers import Qwen2Config
    import time
    for L,h,f,H,K,tie in ((24,896,4864,14,2,True),(28,3584,18944,28,4,False)):
        for sharded in ([], ["--shard"]):
            for flags in ([], ["--gradient_checkpointing","true"]):
                config = Qwen2Config(vocab_size=151936 if tie else 152064, hidden_size=h, intermediate_size=f, num_hidden_layers=L, num_attention_heads=H, num_key_value_heads=K, tie_word_embeddings=tie)
                t=time.process_time()
                m=measured(config, train.parse_args(flags+sharded), monkeypatch)
                print(h, sharded, flags, {k: round(v/2**30,3) for k,v in m.items()}, time.process_time()-t, flush=True)
