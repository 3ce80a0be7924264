"""Several ranks: sharded training is the same, the engine has its weights, checkpoints fit."""

import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from conftest import REPO, clean_env, free_port
from fixed_batch import check_gradients, gradients
from sharding_worker import CASES, flags_of, run_of, state_of
from test_rollout import hf_model

import train
from flatrl import checkpoints, devices, models
from train import Args


def on_ranks(parts: str, folder: Path, *models: str, hosts: int = 1) -> dict:
    """What tests/sharding_worker.py finds on two ranks of each host."""
    processes = []
    port = free_port()
    for host in range(hosts):
        launcher = ["--nproc_per_node", 2, "--nnodes", hosts, "--node_rank", host]
        launcher += ["--master_addr", "127.0.0.1", "--master_port", port]
        command = ["-m", "torch.distributed.run", *launcher, "tests/sharding_worker.py"]
        command = [sys.executable, *command, parts, folder, *models]
        processes.append(subprocess.Popen(list(map(str, command)), cwd=REPO, env=clean_env()))
    assert [process.wait() for process in processes] == [0] * hosts
    return torch.load(folder / "found", weights_only=False)


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
def found(plain, tiny_model, untied_model) -> dict:
    parts = "gradients,checkpoints,stop,sync"
    return on_ranks(parts, plain["folder"], tiny_model, untied_model)


def check_case(name: str, found: dict, model: str):
    """Compares gradients and metrics on several ranks with those of one, in one pass and many."""
    tokens, loss_agg, flags = CASES[name]
    flags = flags | {"shard": False}
    whole, parts = (
        gradients(Accelerator(cpu=True), model, n, loss_agg, **flags) for n in (4096, tokens)
    )
    for result in (found, parts):
        check_gradients(result["gradients"], whole["gradients"], 1e-5)
        assert result["metrics"] == pytest.approx(whole["metrics"], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("name", [name for name in CASES if name != "hybrid"])
def test_gradient_does_not_depend_on_micro_batches_ranks_or_sharding(name, found, tiny_model):
    check_case(name, found["gradients"][name], tiny_model)
    if name == "clipped":
        clipped = found["gradients"][name]
        assert clipped["metrics"]["actor/grad_norm"] > 1
        norms = torch.stack([gradient.norm() for gradient in clipped["gradients"].values()])
        assert norms.norm() == pytest.approx(0.5, rel=1e-4)


def test_hybrid_on_two_hosts_has_the_gradient_of_one_process(
    tiny_model, untied_model, process_group, tmp_path
):
    found = on_ranks("gradients", tmp_path, tiny_model, untied_model, hosts=2)
    check_case("hybrid", found["gradients"]["hybrid"], tiny_model)


@pytest.mark.parametrize("rank", [0, 4])
def test_checkpoints_fit_whatever_the_sharding(rank, found, plain):
    """... from one rank to two, and from two to one; of all weights, and of adapters."""
    run = plain[rank]
    before = state_of(run)
    saved, loaded = found["checkpoints"][rank]
    assert loaded.keys() == before.keys() and len(before) > 20
    for name, tensor in before.items():
        assert torch.equal(loaded[name], tensor), name
    sharded = plain["folder"] / f"sharded_{rank}/checkpoints/step_000001"
    checkpoints.load_checkpoint(run, sharded)
    moved = 0
    for name, tensor in state_of(run).items():
        assert torch.equal(saved[name], tensor), name
        moved += not torch.equal(before[name], tensor)
    assert moved > len(before) / 3  # all but adapters of the first step, whose gradient is 0


@pytest.mark.parametrize("rank", [0, 4])
def test_the_trained_policy_is_written_in_several_files(rank, found, plain):
    """By two ranks, which have loaded the weights of the plain run."""
    final = plain["folder"] / f"sharded_{rank}/final"
    written = hf_model(final).state_dict()
    assert len([*final.glob("model-*.safetensors")]) > 3
    for name, tensor in plain[rank].weights.items():
        assert torch.equal(written[name], tensor), name
    assert (final / "adapter/adapter_model.safetensors").exists() == bool(rank)


def test_an_update_is_dropped_on_all_ranks_if_one_has_no_time(found):
    """The second signal was to rank 1 alone, the weights and Adam's averages are those before."""
    stop = found["stop"]
    assert stop["stopped"] and stop["passes"] == 1
    for name, tensor in stop["before"].items():
        assert torch.equal(stop["saved"][name], tensor), name


def test_sync_from_a_sharded_policy(found, tiny_model, untied_model):
    dtypes = {tiny_model: torch.float32, untied_model: torch.bfloat16}
    assert found["sync"].keys() == dtypes.keys()
    for model, result in found["sync"].items():
        names = {name for name, _ in hf_model(model).named_parameters()}
        assert result["wrong"] == [] and result["names"] == names
        assert result["dtypes"] == {dtypes[model]}


def test_a_tensor_that_a_sync_leaves_out_is_named(engine, tiny_model, monkeypatch):
    """One that is wrong is seen in the logprobs: see test_train.py."""
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
