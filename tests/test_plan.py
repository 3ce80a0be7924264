"""bench/plan.py against train.Policy itself, run on tensors without storage (FakeTensorMode) in the shapes of Qwen2.5.

Two layers are run, and what the second adds stands for the others, which are the same. What is CUDA's own is run as
there: varlen_attn, which keeps q, k, v, its output and logsumexp (a CPU's attention would go segment by segment), and
products of half precision with a float32 result. --shard is a policy of bfloat16 parameters: the tensors that FSDP2's
layers compute with; what it gathers and has not reduced yet is the plan's own, not checked.
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
from transformers import AttentionInterface

import data
import losses
import train

sys.path.append(str(REPO / "bench"))
import plan

GIB = 1 << 30
AS_ON_CUDA = {}  # the two functions that branch on the device, with that of CUDA taken
for function, branch, taken in ((data.packed_attention, "query.is_cuda and is_bfloat16", "is_bfloat16"),
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
    return data.pack_rows(batch, data.in_prefix_order(batch, range(rows)), "cpu")


def measured(config, args, monkeypatch, score, backward) -> dict[str, float]:
    """Bytes beside parameters and gradients: kept by a forward pass, at most in an update, at most in scoring."""

    def load(auto_class, args, *_, dtype, **more):
        dtype = torch.bfloat16 if args.shard else dtype
        model = auto_class.from_config(config, dtype=dtype, attn_implementation="packed")
        return model, {"missing_keys": [], "mismatched_keys": []}

    monkeypatch.setattr(train, "from_pretrained", load)
    monkeypatch.setattr(train, "need", lambda ok, message: None)  # no values: nothing to check
    monkeypatch.setattr(train, "choose_attention", lambda net, _: setattr(net, "packed", True))
    monkeypatch.setattr(losses, "_matmul", AS_ON_CUDA["_matmul"])
    monkeypatch.setitem(AttentionInterface._global_mapping, "packed", AS_ON_CUDA["packed_attention"])
    n_layers, config.num_hidden_layers = config.num_hidden_layers, 2
    config.layer_types = config.layer_types[:2]
    packed = micro_batch(args)
    autocast = lambda: torch.autocast("cpu", torch.bfloat16, enabled=not args.shard)
    with FakeTensorMode() as fake:
        net = train.Policy(args)
        packed = tree_map_only(torch.Tensor, fake.from_tensor, packed)
        for p in net.parameters():
            p.grad = torch.empty_like(p)
        given = [*net.parameters(), *net.buffers(), *(p.grad for p in net.parameters())]
        given += [x for x in tree_leaves(packed) if isinstance(x, torch.Tensor)]
        with Live(given) as live:
            if score:
                with autocast(), torch.no_grad():
                    net(packed)
            scored, live.peak, after = live.peak, live.now, []

            def note(*_):  # what is kept, without the weights that autocast has cast and may give up
                torch.clear_autocast_cache()
                after.append(live.now)

            for layer in net.model.model.layers:
                layer.register_forward_hook(note)
            with autocast():
                logprobs, _ = net(packed)
            kept = live.now
            if backward:
                logprobs.sum().backward()
    more = (n_layers - 2) * (after[1] - after[0])
    found = {"kept": kept + more, "update": live.peak + more, "score": scored}
    return found | {"parameters": sum(p.numel() for p in net.parameters())}


@pytest.mark.parametrize("flags", [[], ["--shard", "--gradient_checkpointing"]], ids=["plain", "shard, checkpointing"])
@pytest.mark.parametrize("size", plan.SHAPES)
def test_activations(size, flags, monkeypatch):
    flags = [*flags, "--tokens_per_micro_batch", str(10 * (512 + 8 * 128))]  # ten groups, none cut
    args, config = train.parse_args(flags), plan.load_config(size)
    args.dtype = "bfloat16"
    net, backward = plan.Net(config, args), args.shard or size == "7B"  # elsewhere the forward pass is the most by far
    planned = {"kept": net.kept()} | ({"update": net.activations() + net.logits()} if backward else {})
    found = measured(config, args, monkeypatch, score=size == "14B", backward=backward)
    small = plan.Net(config, args)  # of two layers, as measured
    assert small.parameters == found["parameters"]
    if size == "14B":
        planned["score"] = small.forward()
    for name, n in planned.items():
        print(f"{name}: {n / GIB:.2f} GiB planned, {found[name] / GIB:.2f} measured")
        assert 0.9 < n / found[name] < 1.1, name


def test_the_plan_is_the_notes_figures_and_says_what_makes_it_fit():
    """Parameters, Adam and DDP's buckets of 1.5B: 16 bytes each, sharded 12 / 8; what makes 7B and 32B fit."""
    n, read = 1543714304, lambda flags: plan.read_arguments(f"--gpu_memory 80 {flags}".split())
    made = plan.make_plan(*read("--model Qwen2.5-1.5B --gpus 8 --dtype float32 --gradient_checkpointing false"))
    assert sum(made.phases["asleep"].values()) / GIB == pytest.approx(3 + 16 * n / GIB)
    assert set(made.lacks) == {"update"}
    made = plan.make_plan(*read("--model Qwen2.5-1.5B --gpus 8"))
    assert sum(made.phases["asleep"].values()) / GIB == pytest.approx(3 + 12 * n / 8 / GIB) and not made.lacks
    slow = read("--model Qwen/Qwen2.5-7B-Instruct --gpus 8 --gradient_checkpointing false")
    assert plan.cure(*slow) == ({"gradient_checkpointing": True}, True)
    assert plan.say(*slow).endswith("it fits with --gradient_checkpointing")
    assert plan.say(*read("--model 7B --gpus 8")).endswith("it fits")
    assert set(plan.make_plan(*read("--model 32B --gpus 8")).lacks) == {"awake", "sync", "update", "KV cache"}
    fits = "--offload optimizer --tokens_per_micro_batch 8192 --tp 2"
    assert plan.say(*read("--model 32B --gpus 8")).endswith(f"it fits with {fits}")
    assert plan.say(*read(f"--model 32B --gpus 8 {fits}")).endswith("it fits")


def test_flags_of_train_count():
    def stays(flags):
        made = plan.make_plan(*plan.read_arguments(["--model", "0.5B", *flags.split()]))
        return made, sum(made.phases["asleep"].values())

    n = 494032768  # parameters of Qwen2.5-0.5B
    plain, bytes_kept = stays("")
    assert stays("--kl_coef 0.1")[1] - bytes_kept == 2 * n  # the reference, in bfloat16
    assert stays("--algo ppo")[1] - bytes_kept == 12 * n  # tied: the critic's backbone is all but as large
    kv, _ = stays("--gpu_memory_utilization 0.6")
    assert kv.phases["awake"]["KV cache"] - plain.phases["awake"]["KV cache"] == pytest.approx(0.1 * 80 * GIB)
    assert stays("--sleep_level 1")[0].host["asleep"] - plain.host["asleep"] == 2 * n
    flags, states = "--algo ppo --kl_coef 0.1", {"none": 0, "optimizer": 16 * n, "all": (16 + 4 + 2) * n}
    awake = {what: stays(f"{flags} --offload {what}")[0] for what in states}
    for what, made in awake.items():
        for phase in ("awake", "sync"):
            left = {name: x for name, x in made.phases[phase].items() if name in made.phases["asleep"]}
            assert sum(made.phases["asleep"].values()) - sum(left.values()) == pytest.approx(states[what], rel=1e-3)
        assert made.host.get("awake", plan.PROCESS) - plan.PROCESS == pytest.approx(states[what], rel=1e-3)
    assert stays("--replay somewhere")[0].phases.keys() == {"asleep", "awake", "score", "update", "step"}


@pytest.mark.parametrize(("flags", "expected"), [
    ("--model 0.5B", "--gradient_checkpointing false --tokens_per_micro_batch 16384"),
    ("--model 0.5B --prompts_per_step 100",
     "--gradient_checkpointing false --tokens_per_micro_batch 16384 --max_num_seqs 800"),
    ("--model 0.5B --prompts_per_step 1000 --gpus 8",
     "--gradient_checkpointing false --tokens_per_micro_batch 16384 --max_num_seqs 1000"),
    ("--model 0.5B --prompts_per_step 1000 --max_num_seqs 64",
     "--gradient_checkpointing false --tokens_per_micro_batch 16384"),
    ("--model 7B --gpus 8", "--gradient_checkpointing false --tokens_per_micro_batch 8192"),
    ("--model 14B --gpus 8", "--gradient_checkpointing true --tokens_per_micro_batch 16384"),
    ("--model 7B --gpus 8 --gpu_memory 140", "--gradient_checkpointing false --tokens_per_micro_batch 16384"),
    ("--model 0.5B --gradient_checkpointing --tokens_per_micro_batch 4096", ""),
    ("--model 7B --gpu_memory 80", None),
])  # fmt: skip
def test_the_fastest_flags_that_fit(flags, expected, capsys):
    """Parameters, gradients and Adam's states of 7B are more than one card has: nothing makes it fit."""
    if expected is None:
        with pytest.raises(train.BadInput, match="nothing fits"):
            plan.main(["--flags", *flags.split()])
        return
    assert plan.main(["--flags", *flags.split()]) == 0
    assert capsys.readouterr().out.strip() == expected
    more = dict(zip(expected.split()[::2], expected.split()[1::2]))
    made = plan.make_plan(*plan.read_arguments([*flags.split(), *(word for pair in more.items() for word in pair)]))
    assert not made.lacks


@pytest.mark.parametrize(("flags", "message"), [
    ("--gpus 8", "give --model"), ("--model no/folder", "a folder with"), ("--model 7B --gpus 3 --tp 2", "must divide"),
    ("--model 7B --shrad", "did you mean --shard"), ("--model 7B --tokens_per_micro_batch 100", "longest"),
])  # fmt: skip
def test_bad_input(flags, message):
    with pytest.raises(train.BadInput, match=message):
        plan.say(*plan.read_arguments(flags.split()))
