"""bench/plan.py against train.Policy itself, run on tensors without storage (FakeTensorMode) in the shapes of Qwen2.5.

Two layers are run, and what the second adds stands for the others, which are the same. What is CUDA's own is run as
there: varlen_attn, which keeps q, k, v, its output and logsumexp (a CPU's attention would go segment by segment), and
products of half precision with a float32 result. The policy's parameters are bfloat16: the tensors that FSDP2's
layers compute with; what it gathers and has not reduced yet is the plan's own, not checked.
"""

import inspect
import json
import sys
import weakref

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from conftest import REPO
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AttentionInterface, AutoConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

import data
import losses
import train
from flatrl import memory

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


def measured(config, args, monkeypatch, score) -> dict[str, float]:
    """Bytes beside parameters and gradients: at most in an update, at most in scoring."""

    def load(auto_class, args, *_, dtype, **more):
        model = getattr(transformers, auto_class).from_config(
            config, dtype=torch.bfloat16, attn_implementation="packed")
        return model, {"missing_keys": [], "mismatched_keys": []}

    monkeypatch.setattr(train, "from_pretrained", load)
    monkeypatch.setattr(train, "need", lambda ok, message: None)  # no values: nothing to check
    monkeypatch.setattr(train, "choose_attention", lambda net, _: setattr(net, "packed", True))
    monkeypatch.setattr(losses, "_matmul", AS_ON_CUDA["_matmul"])
    monkeypatch.setitem(AttentionInterface._global_mapping, "packed", AS_ON_CUDA["packed_attention"])
    n_layers, config.num_hidden_layers = config.num_hidden_layers, 2
    config.layer_types = config.layer_types[:2]
    packed = micro_batch(args)
    with FakeTensorMode() as fake:
        net = train.Policy(args)
        packed = tree_map_only(torch.Tensor, fake.from_tensor, packed)
        for p in net.parameters():
            p.grad = torch.empty_like(p)
        given = [*net.parameters(), *net.buffers(), *(p.grad for p in net.parameters())]
        given += [x for x in tree_leaves(packed) if isinstance(x, torch.Tensor)]
        with Live(given) as live:
            if score:
                with torch.no_grad():
                    net(packed)
            scored, live.peak, kept = live.peak, live.now, []
            for layer in net.model.model.layers:
                layer.register_forward_hook(lambda *_: kept.append(live.now))
            logprobs, _ = net(packed)
            logprobs.sum().backward()
    more = (n_layers - 2) * (kept[1] - kept[0])
    return {"update": live.peak + more, "score": scored, "parameters": sum(p.numel() for p in net.parameters())}


@pytest.mark.parametrize("flags", [[], ["--gradient_checkpointing"]], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("size", plan.SHAPES)
def test_activations(size, flags, monkeypatch):
    flags = [*flags, "--tokens_per_micro_batch", str(10 * (512 + 8 * 128))]  # ten groups, none cut
    args, config = train.parse_args(flags), plan.load_config(size)
    args.dtype, args.shard = "bfloat16", True
    planned = {"update": plan.network(config, args).update}
    found = measured(config, args, monkeypatch, score=size == "14B")
    small = plan.network(config, args)  # of two layers, as measured
    assert small.parameters == found["parameters"]
    if size == "14B":
        planned["score"] = plan.forward(config, args, small)
    for name, n in planned.items():
        print(f"{name}: {n / GIB:.2f} GiB planned, {found[name] / GIB:.2f} measured")
        assert 0.9 < n / found[name] < 1.1, name


def test_the_plan_is_the_notes_figures_and_says_what_makes_it_fit():
    """Parameters and Adam of 1.5B: 12 bytes each, of 8 GPUs; what makes 7B and 32B fit."""
    n, read = 1543714304, lambda flags: plan.read_arguments(f"--gpu_memory 80 {flags}".split())
    made = plan.make_plan(*read("--model Qwen2.5-1.5B --gpus 8"))
    assert sum(made.phases["asleep"].values()) / GIB == pytest.approx(3 + 12 * n / 8 / GIB) and not made.lacks
    slow = read("--model Qwen/Qwen2.5-7B-Instruct --gpus 8 --gradient_checkpointing false")
    assert set(plan.make_plan(*slow).lacks) == {"update"}
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
    ("--model 7B --dtype float32", "float32 is not planned"), ("--model 7B --adv_estimator mine", "is a task file's"),
])  # fmt: skip
def test_bad_input(flags, message):
    with pytest.raises(train.BadInput, match=message):
        plan.say(*plan.read_arguments(flags.split()))


# ---------------------------------------------------------------- what a run on GPUs chooses by it


def chosen(folder, config, monkeypatch, flags="", gpus=1, memories=(80,), device="cuda") -> tuple[str, train.Args]:
    """What fill_by_plan says, and the flags as it leaves them, on so many GPUs of the least of so many GiB."""
    config.save_pretrained(folder)
    args = train.parse_args(["--model", str(folder), *flags.split()])
    train.complete_flags(args, cuda=device == "cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 80 * GIB))
    monkeypatch.setattr(memory, "all_gather", lambda mine: [mine * n // 80 for n in memories])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: gpus)
    return memory.fill_by_plan(args, torch.device(device)), args


def of(args) -> tuple:
    return args.gradient_checkpointing, args.tokens_per_micro_batch, args.max_num_seqs


@pytest.mark.parametrize(("size", "flags", "gpus", "expected"), [
    ("0.5B", "", 1, (False, 16384, 256)),
    ("0.5B", "--prompts_per_step 100", 1, (False, 16384, 800)),
    ("7B", "", 8, (False, 8192, 256)),
    ("7B", "--kl_coef 0.1 --algo ppo --max_response_tokens 8000", 8, (True, 16384, 256)),
    ("14B", "--prompts_per_step 1000", 8, (True, 16384, 1000)),
    # What the user gives stays, also in the words of the default.
    ("0.5B", "--gradient_checkpointing", 1, (True, 16384, 256)),
    ("0.5B", "--tokens-per-micro-batch=4096 --max-num-seqs 256 --prompts_per_step 100", 1, (False, 4096, 256)),
    ("7B", "--tokens_per_micro_batch 16384", 8, (True, 16384, 256)),
    ("7B", "--gradient_checkpointing false --max_response_tokens 20000 --tokens_per_micro_batch 20992", 8, None),
    ("7B", "--max_response_tokens 20000 --tokens_per_micro_batch 20992", 8, (True, 20992, 256)),
    ("7B", "", 1, None),
    ("7B", "--num_steps 0 --prompts_per_step 100", 1, (False, 16384, 800)),
])  # fmt: skip
def test_a_run_chooses_what_bench_plan_prints(size, flags, gpus, expected, tmp_path, monkeypatch, capsys):
    said, args = chosen(tmp_path, plan.load_config(size), monkeypatch, flags, gpus, [90, 80])
    machine = ["--gpus", str(gpus), "--gpu_memory", "80"]
    command = ["--flags", "--model", str(tmp_path), *machine, *flags.split()]
    if expected is None:  # all stays as it was
        assert said == "\nno flags fit GPUs of 80.0 GiB, it is planned: see bench/plan.py"
        assert of(args) == of(chosen(tmp_path, plan.load_config(size), monkeypatch, flags + " --dtype float32")[1])
        with pytest.raises(train.BadInput, match="nothing fits"):
            plan.main(command)
        return
    assert of(args) == expected
    assert plan.main(command) == 0
    assert said == f"\nplanned for 80.0 GiB: {capsys.readouterr().out.strip()}"


def test_with_shard_hybrid_the_ranks_of_a_host_share_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    config = plan.load_config("14B")
    fits = [chosen(tmp_path, config, monkeypatch, f"--shard {kind}", 16)[0] for kind in ("", "hybrid")]
    assert fits[0].startswith("\nplanned for 80.0 GiB: --gradient_checkpointing true")
    assert fits[1].startswith("\nno flags fit")


def test_where_nothing_is_planned_flags_keep_their_defaults(tmp_path, monkeypatch):
    """A model of another type, as policy or as teacher; LoRA; float32; a CPU; Args made in code."""
    small, other = plan.load_config("0.5B"), AutoConfig.for_model("gemma2")
    other.save_pretrained(tmp_path / "other")
    planned = ("--lora_rank 4", "--dtype float32", f"--kl_coef 1 --ref_model {tmp_path / 'other'}")
    for config, flags in ((other, ""), *((small, flags) for flags in planned)):
        said, args = chosen(tmp_path, config, monkeypatch, flags)
        assert (said, of(args)) == ("", (True, 16384, 256)), flags
    said, args = chosen(tmp_path, small, monkeypatch, device="cpu")
    assert (said, of(args)) == ("", (False, 16384, 256))
    args = train.Args(model=str(tmp_path))
    train.complete_flags(args, cuda=True)
    assert memory.fill_by_plan(args, torch.device("cuda")) == "" and of(args) == (True, 16384, 256)


def test_a_model_that_cannot_recompute_trains_without_unless_the_user_asks_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(Gemma2PreTrainedModel, "supports_gradient_checkpointing", False)
    said, args = chosen(tmp_path, AutoConfig.for_model("gemma2"), monkeypatch)
    assert of(args) == (False, 16384, 256)
    assert said == "\nGemma2Model can't recompute: --gradient_checkpointing false"
    said, args = chosen(tmp_path, AutoConfig.for_model("gemma2"), monkeypatch, "--gradient_checkpointing")
    assert (said, of(args)) == ("", (True, 16384, 256))


def test_a_run_says_first_what_was_chosen_and_starts_its_engine_with_it(
    tiny_model, tmp_path, process_group, monkeypatch, capsys
):
    """A CPU that is taken for a GPU while the flags are chosen."""

    def engine(model, args, *_):
        raise train.BadInput(f"the engine is built: {of(args)}")

    monkeypatch.setattr(AcceleratorState, "_shared_state", {})  # other tests compute in float32
    monkeypatch.setattr(train, "fill_by_plan", lambda args, _: memory.fill_by_plan(args, torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 80 * GIB))
    monkeypatch.setattr(train, "Engine", engine)
    monkeypatch.setattr(train, "Stop", lambda: None)
    flags = ["--dtype", "bfloat16", "--prompts_per_step", "40", "--output_dir", str(tmp_path / "run")]
    args = train.parse_args(["--task", str(REPO / "tests/tiny_task.py"), "--model", tiny_model, *flags])
    with pytest.raises(train.BadInput, match=r"the engine is built: \(False, 16384, 320\)"):
        train.setup(args)
    line = "planned for 80.0 GiB: --gradient_checkpointing false --tokens_per_micro_batch 16384 --max_num_seqs 320"
    assert line in capsys.readouterr().out.splitlines()
    written = json.loads((tmp_path / "run/args.json").read_text())["args"]
    assert written["max_num_seqs"] == 320 and "given" not in written
