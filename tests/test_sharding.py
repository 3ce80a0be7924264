"""FSDP2 and the weight sync: sharded training is the same, and the engine has its weights."""

import shutil
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from conftest import REPO, TINY, metrics_of, run
from fixed_batch import check_gradients, gradients
from sharding_worker import CASES
from test_rollout import hf_model
from test_train import safetensors

import train
from agent_loop import BadInput
from flatrl import devices, models
from train import Args


def on_two_ranks(what: str, out: Path, cache: Path, *models: str) -> dict:
    run(what, out, *models, script="tests/sharding_worker.py", by="ranks", cache=cache)
    return torch.load(out, weights_only=False)


def test_gradient_does_not_depend_on_micro_batches_ranks_or_sharding(
    tiny_model, untied_model, cache, tmp_path, process_group
):
    found = on_two_ranks("gradients", tmp_path / "out", cache, tiny_model, untied_model)
    assert len(found) == len(CASES) + 1
    for (model, name), two in found.items():
        tokens, loss_agg, flags = CASES[name]
        flags = flags | {"shard": False}
        whole, parts = (
            gradients(Accelerator(cpu=True), model, n, loss_agg, **flags) for n in (4096, tokens)
        )
        for result in (two, parts):
            check_gradients(result["gradients"], whole["gradients"], 1e-5)
            assert result["metrics"] == pytest.approx(whole["metrics"], rel=1e-4, abs=1e-7)
    clipped = found[tiny_model, "clipped"]
    assert clipped["metrics"]["actor/grad_norm"] > 1
    norms = torch.stack([gradient.norm() for gradient in clipped["gradients"].values()])
    assert norms.norm() == pytest.approx(0.5, rel=1e-4)


def test_sharded_gradient_while_accelerate_is_in_fsdp_mode(
    tiny_model, process_group, monkeypatch, tmp_path
):
    """On GPUs it is, by configs/eight_gpus_fsdp2.yaml; on a CPU it never is by itself."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plain = gradients(Accelerator(cpu=True), tiny_model, 130, "token-mean")
    accelerator = Accelerator(cpu=True)
    shared = accelerator.state._shared_state
    monkeypatch.setitem(shared, "distributed_type", DistributedType.FSDP)
    monkeypatch.setitem(shared, "fsdp_plugin", FullyShardedDataParallelPlugin(fsdp_version=2))
    assert accelerator.is_fsdp2
    sharded = gradients(accelerator, tiny_model, 130, "token-mean", shard=True)
    check_gradients(sharded["gradients"], plain["gradients"], 1e-5)
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.load_state(str(tmp_path / "state"))


def test_a_plain_run_resumes_a_sharded_one(cache, tmp_path):
    """From two ranks to one. The other way: see test_lora.py."""
    flags = [
        *[*TINY, "--deterministic", "--algo", "ppo", "--kl_coef", "0.01", "--num_steps", "2"],
        *["--tokens_per_micro_batch", "64", "--save_every", "1", "--output_dir"],
    ]
    sharded, plain = tmp_path / "sharded", tmp_path / "plain"
    # What accelerate launch sets by the config.
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    run(*flags, sharded, by="ranks", cache=cache, **fsdp)
    shutil.copytree(sharded, plain)
    for later in ("checkpoints/step_000002", "final"):
        shutil.rmtree(plain / later)
    assert "resuming after step 1" in run(*flags, plain, "--resume", cache=cache)

    rows = metrics_of(sharded)
    assert rows[2]["actor/kl"] > 0 and rows[2]["critic/grad_norm"] > 0
    for row, expected in zip(metrics_of(plain), rows, strict=True):
        for name, value in expected.items():
            if isinstance(value, int | float):
                assert row[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    weights = safetensors(sharded / "final")
    for name, tensor in safetensors(plain / "final").items():
        torch.testing.assert_close(tensor, weights[name], atol=5e-5, rtol=0)


def test_sync_from_a_sharded_policy(tiny_model, untied_model, cache, tmp_path):
    found = on_two_ranks("sync", tmp_path / "out", cache, tiny_model, untied_model)
    assert len(found) == 3
    for (model, dtype), result in found.items():
        names = {name for name, _ in hf_model(model).named_parameters()}
        assert result["wrong"] == [] and result["names"] == names
        assert result["dtypes"] == {getattr(torch, dtype)}
        # The policy's own parameters stay sharded.
        assert result["most"] == result["left"] == result["left after scoring"] == 0


def test_followers_hear_of_calls_that_are_refused_or_given_up(tiny_model, cache, tmp_path):
    """For what a tensor-parallel engine samples, see test_tp.py."""
    found = on_two_ranks("tp", tmp_path / "out", cache, tiny_model)
    assert "ValueError" in found["refused"] and found["unfinished"] == [False, False]


def test_a_tensor_that_a_sync_leaves_out_is_named(engine, tiny_model, monkeypatch):
    """One that is wrong is seen in the logprobs: see test_agreement.py."""
    policy = types.SimpleNamespace(model=hf_model(tiny_model, 1.5), engine_dtype=torch.float32)
    weights = dict(models.checkpoint_weights(policy.model, policy.engine_dtype))
    left_out = "model.layers.1.self_attn.k_proj.bias"
    weights.pop(left_out)
    monkeypatch.setattr(models, "checkpoint_weights", lambda *_: weights.items())
    with pytest.raises(RuntimeError, match=f"got no tensor: .*{left_out}"):
        train.sync(engine, policy, 1)


def test_the_config_for_eight_gpus_shards(monkeypatch):
    """By the environment of a process that accelerate launch starts by it."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    command = ["--config_file", str(REPO / "configs/eight_gpus_fsdp2.yaml"), "train.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(command))
    assert arguments.num_processes == 8 and not devices.sharding(Args())
    for name, value in prepare_multi_gpu_env(arguments).items():
        if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP")):
            monkeypatch.setenv(name, value)
    assert devices.sharding(Args()) is True and devices.sharding(Args(shard="hybrid")) == "hybrid"
    # A setting of accelerate's that is not implemented is refused.
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    with pytest.raises(BadInput, match="fsdp_offload_params true: must be"):
        devices.sharding(Args())


@pytest.mark.parametrize("variables, said", [
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, "accelerate's config asks for DeepSpeed, which is not"),
    ({"ACCELERATE_USE_MEGATRON_LM": "1"}, "asks for Megatron-LM, which is not implemented"),
    ({"ACCELERATE_USE_CPU": "maybe"}, "accelerate's config: invalid truth value maybe"),
    ({"WORLD_SIZE": "4"}, "WORLD_SIZE is 4, and RANK, MASTER_ADDR, MASTER_PORT is not set"),
    ({"WORLD_SIZE": "2", "RANK": "a", "MASTER_ADDR": "b", "MASTER_PORT": "1"},
     "process a can't join the group of 2: invalid literal for int"),
], ids=str)  # fmt: skip
def test_a_start_that_fails_is_one_line(variables, said, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):  # a test before may have set them
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=said) as error:
        devices.start_processes(Args())
    assert "\n" not in str(error.value)
