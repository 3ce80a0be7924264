"""Several ranks: sharded or compiled training is the same, the engine has its weights, checkpoints
fit."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from conftest import KEPT, REPO, run
from fixed_batch import check_gradients, gradients
from sharding_worker import CASES, flags_of, moved, run_of, state_of
from test_rollout import hf_model

import train
from examples.tiny_models import init_model
from examples.vision import init_vision_model
from flatrl import checkpoints, devices, models
from flatrl.vllm_engine import fused_parts
from rollout import Engine
from train import Args

equal = partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("models") / "vision"
    torch.manual_seed(0)
    init_vision_model(path)
    return str(path)


@pytest.fixture(scope="module")
def untied_model(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("models") / "untied")
    init_model(path, tie_word_embeddings=False)
    return path


@pytest.fixture(scope="module")
def plain(tiny_model, tmp_path_factory, process_group) -> dict:
    """The plain counterparts of the worker's sharded runs, of another batch, saved."""
    folder = tmp_path_factory.mktemp("sharding")
    runs = {"folder": folder}
    for rank in (0, 4):
        args = flags_of(tiny_model, shard=False, lora_rank=rank)
        runs[rank] = run_of(Accelerator(cpu=True), folder / f"plain_{rank}", args, 6)
        checkpoints.save_checkpoint(runs[rank])
        weights = models.whole_weights(runs[rank].policy.net.model, torch.float32)
        runs[rank].weights = {name: tensor.clone() for name, tensor in weights}
    return runs


@pytest.fixture(scope="module")
def found(plain, tiny_model, untied_model, vision_model) -> dict:
    """What tests/sharding_worker.py finds on four ranks."""
    paths = tiny_model, untied_model, vision_model
    run(plain["folder"], *paths, script="tests/sharding_worker.py")
    return torch.load(plain["folder"] / "found", weights_only=False)


@pytest.mark.parametrize("name", CASES)
def test_gradient_does_not_depend_on_micro_batches_ranks_or_sharding(
    name, found, tiny_model, vision_model
):
    """Several ranks compute that of one, in one pass and many. --max_grad_norm clips it."""
    tokens, loss_agg, flags = CASES[name]
    model = vision_model if name == "images" else tiny_model
    flags = flags | {"shard": False, "dtype": "float32"}
    whole, parts = (
        gradients(Accelerator(cpu=True), model, n, loss_agg, **flags) for n in (4096, tokens)
    )
    tolerances = {"bfloat16": (0.1, 0.05)}.get(name, (1e-5, 1e-4))
    for result, (of_gradients, rel) in ((found[name], tolerances), (parts, (1e-5, 1e-4))):
        check_gradients(result["gradients"], whole["gradients"], of_gradients)
        assert result["metrics"] == pytest.approx(whole["metrics"], rel=rel, abs=1e-7)
    if name == "clipped":
        assert found[name]["metrics"]["actor/grad_norm"] > 1
        norms = torch.stack([gradient.norm() for gradient in found[name]["gradients"].values()])
        assert norms.norm() == pytest.approx(0.5, rel=1e-4)


def test_compiled_layers_have_the_same_gradients(tiny_model, process_group, monkeypatch):
    """--compile, by a backend that only traces: inductor takes minutes."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    step = partial(gradients, Accelerator(cpu=True), tiny_model, 128, "token-mean")
    flags = {"shard": True, "gradient_checkpointing": True}
    plain = step(**flags)
    torch._dynamo.reset()
    counters.clear()
    compiled = step(**flags, compile=True)
    assert counters["stats"]["unique_graphs"] > 0
    check_gradients(compiled["gradients"], plain["gradients"], 1e-5)
    assert compiled["metrics"] == pytest.approx(plain["metrics"], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("rank", [0, 4])
def test_checkpoints_and_the_policy_are_the_same_whatever_the_sharding(rank, found, plain):
    """... from one rank to four, and from four to one; of all weights, and of adapters."""
    run = plain[rank]
    before = state_of(run)
    saved, loaded = found[rank]
    assert len(before) > 20
    equal(loaded, before)
    sharded = plain["folder"] / f"sharded_{rank}/checkpoints/step_000001"
    checkpoints.load_checkpoint(run, sharded)
    equal(saved, state_of(run))
    moved = sum(not torch.equal(before[name], tensor) for name, tensor in saved.items())
    assert moved > len(before) / 3  # all but adapters of the first step, whose gradient is 0

    # Four ranks, which had loaded the plain run's weights, have written them, in several files.
    final = plain["folder"] / f"sharded_{rank}/final"
    written = hf_model(final).state_dict()
    assert len([*final.glob("model-*.safetensors")]) > 3
    for name, tensor in run.weights.items():
        assert torch.equal(written[name], tensor), name
    assert (final / "adapter/adapter_model.safetensors").exists() == bool(rank)


def test_an_update_is_dropped_on_all_ranks_if_one_has_no_time(found):
    """What is left of such a run: see test_ends.py."""
    assert found["stopped"] == [True] * 4


def test_the_engine_is_exactly_the_sharded_policy(found, args, untied_model, process_group):
    """In bfloat16. Here the head has weights of its own: the other tests' models are tied. A
    tensor that a sync leaves out is named."""
    engine = Engine(untied_model, replace(args, dtype="bfloat16"), torch.device("cpu"))
    KEPT.append(engine)
    engine.wake_weights()
    left_out = "model.layers.1.self_attn.k_proj.bias"
    too_few = {name: tensor for name, tensor in found["synced"].items() if name != left_out}
    with pytest.raises(RuntimeError, match=f"got no tensor: .*{left_out}"):
        engine.load_weights(too_few.items(), 1)
    engine.load_weights(found["synced"].items(), 1)
    engine.wake_kv()
    (fused,) = engine.llm.apply_model(fused_parts)
    held = {name: tensor for parts in fused.values() for name, tensor in parts.items()}
    engine.sleep()
    expected = dict(moved(train.Policy(flags_of(untied_model))).model.named_parameters())
    assert held.keys() == expected.keys()
    for name, tensor in expected.items():
        # The engine pads the vocabulary.
        assert torch.equal(held[name][: len(tensor)], tensor.bfloat16()), name


def test_the_config_for_eight_gpus_shards(process_group, monkeypatch):
    """By the environment of a process that accelerate launch starts by it."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env
    from transformers.distributed.fsdp import is_fsdp_enabled

    command = ["--config_file", str(REPO / "configs/eight_gpus_fsdp2.yaml"), "train.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(command))
    shard = lambda **flags: devices.device_defaults(Args(**flags), cuda=False)["shard"]
    assert arguments.num_processes == 8 and shard() is False
    for name, value in prepare_multi_gpu_env(arguments).items():
        if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP")):
            monkeypatch.setenv(name, value)
    assert shard() is True and shard(shard="hybrid") == "hybrid"

    # By another config transformers would load zeros on some ranks.
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    assert is_fsdp_enabled()
    monkeypatch.setattr(devices, "Accelerator", lambda **_: None)  # there is one already
    devices.start_processes(Args())
    assert not is_fsdp_enabled()
