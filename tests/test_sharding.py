"""FSDP2 and the weight sync: sharded on two ranks is the same training, and the engine holds exactly the policy."""

import itertools
import shutil
import types
from pathlib import Path

import pytest
import torch
from conftest import REPO, TINY, generate, metrics_of, run
from gradient_worker import gradients, whole
from sharding_worker import CASES, error_of, spoilt
from test_rollout import PROMPTS, hf_logprobs, hf_model
from torch.distributed.tensor import DTensor

import data
import train
from agent_loop import BadInput
from flatrl import devices
from train import Args


def two_ranks(what: str, out: Path, cache: Path, *models: str) -> dict:
    run(what, out, *models, script="tests/sharding_worker.py", by="ranks", cache=cache)
    return torch.load(out, weights_only=False)


# ---------------------------------------------------------------- the same training


def test_sharded_gradient_is_the_whole_ones(tiny_model, untied_model, cache, tmp_path, process_group):
    from accelerate import Accelerator

    found = two_ranks("gradients", tmp_path / "out", cache, tiny_model, untied_model)
    for model in (tiny_model, untied_model):
        for name, (_, more) in CASES.items():
            one = gradients(Accelerator(cpu=True), model, 4096, "token-mean", **more)  # one rank, one micro-batch
            assert sum(g.abs().sum() for g in one["gradients"].values()) > 0
            for shard in (False, True):
                two = found[model, shard, name]
                assert two["gradients"].keys() == one["gradients"].keys()
                for parameter, gradient in one["gradients"].items():
                    error = (two["gradients"][parameter] - gradient).norm() / gradient.norm()
                    assert error < 1e-5, (model, shard, name, parameter, error)
                assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-4, abs=1e-7)
    assert one["metrics"]["grad_norm"] > 1  # so that 0.5 clips
    clipped = torch.cat([g.flatten() for g in found[tiny_model, True, "clipped"]["gradients"].values()])
    assert clipped.norm() == pytest.approx(0.5, rel=1e-4)
    # computed in bfloat16, summed and kept in float32
    exact, rounded = (
        torch.cat([g.flatten() for g in found[dtype]["gradients"].values()]) for dtype in ("float32", "bfloat16")
    )
    assert rounded.dtype == torch.float32 and 1e-3 < (rounded - exact).norm() / exact.norm() < 0.05


def test_sharded_gradient_while_accelerate_is_in_fsdp_mode(tiny_model, process_group, monkeypatch, tmp_path):
    """On GPUs accelerate is in that mode, by configs/eight_gpus_fsdp2.yaml; on a CPU it never is by itself."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plain = gradients(Accelerator(cpu=True), tiny_model, 130, "token-mean")
    accelerator = Accelerator(cpu=True)
    shared = accelerator.state._shared_state
    monkeypatch.setitem(shared, "distributed_type", DistributedType.FSDP)
    monkeypatch.setitem(shared, "fsdp_plugin", FullyShardedDataParallelPlugin(fsdp_version=2))
    assert accelerator.is_fsdp2
    sharded = gradients(accelerator, tiny_model, 130, "token-mean", shard=True)
    for name, gradient in plain["gradients"].items():
        assert (sharded["gradients"][name] - gradient).norm() / gradient.norm() < 1e-5, name
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.load_state(str(tmp_path / "state"))


def test_sharded_run_is_the_unsharded_one_and_resumes_to_the_last_digit(cache, tmp_path):  # noqa: F811
    flags = [*TINY, "--deterministic", "--algo", "ppo", "--kl_coef", "0.01", "--critic_warmup", "1", "--num_steps", "3",
             "--tokens_per_micro_batch", "64", "--save_every", "1",
             "--keep_checkpoints", "5", "--gradient_checkpointing"]  # fmt: skip
    plain, sharded, resumed = tmp_path / "plain", tmp_path / "sharded", tmp_path / "resumed"
    run(*flags, "--output_dir", plain, by="ranks", cache=cache)
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}  # what accelerate launch sets by the config
    run(*flags, "--output_dir", sharded, by="ranks", cache=cache, **fsdp)
    rows, expected = metrics_of(sharded), metrics_of(plain)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            if isinstance(value, (int, float)):
                assert value == pytest.approx(other[name], rel=1e-4, abs=1e-4), (row["step"], name)
    assert rows[3]["actor/kl"] > 0 and rows[3]["critic/grad_norm"] > 0 and rows[3]["actor/grad_norm"] > 0
    assert "actor/grad_norm" not in rows[1]  # so the first checkpoint has no state of the policy's optimiser

    from safetensors.torch import load_file

    weights, others = (load_file(folder / "final/model.safetensors") for folder in (sharded, plain))
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], atol=5e-5, rtol=0)

    def resume_after(step: int, folder: Path, *more: str, by: str):
        """The third step's metrics and the weights of a run that goes on from another's checkpoint."""
        shutil.copytree(folder, resumed)
        for later in range(step + 1, 4):
            shutil.rmtree(resumed / f"checkpoints/step_00000{later}")
        shutil.rmtree(resumed / "final")
        output = run(*flags, *more, "--resume", "--output_dir", resumed, by=by, cache=cache)
        assert f"resuming after step {step}" in output
        found = metrics_of(resumed), load_file(resumed / "final/model.safetensors")
        shutil.rmtree(resumed)
        return found

    found, final = resume_after(1, sharded, "--shard", "--offload", "all", by="ranks")
    assert found == rows
    for name, tensor in final.items():
        assert torch.equal(tensor, weights[name]), name
    # One format: from two sharded ranks to one plain, and from two plain ranks to two sharded.
    for folder, more, by in ((sharded, [], "fork"), (plain, ["--shard"], "ranks")):
        found, final = resume_after(2, folder, *more, by=by)
        for name in ("reward/mean", "actor/loss", "actor/grad_norm", "actor/kl", "critic/vf_loss", "critic/grad_norm"):
            assert found[3][name] == pytest.approx(rows[3][name], rel=1e-3, abs=1e-5), name
        for name, tensor in weights.items():
            torch.testing.assert_close(final[name], tensor, atol=5e-5, rtol=0)


# ---------------------------------------------------------------- the weight sync


def test_sync_from_a_sharded_policy(tiny_model, untied_model, cache, tmp_path):
    found = two_ranks("sync", tmp_path / "out", cache, tiny_model, untied_model)
    assert len(found) == 3
    for (model, dtype), result in found.items():
        names = [name for name, _ in hf_model(model).named_parameters()]
        for policy in (result, result["unsharded"]):
            assert policy["wrong"] == [] and set(policy["names"]) == set(names)
            assert policy["dtypes"] == {getattr(torch, dtype)}
        # one parameter at a time is whole, and the policy's own stay sharded
        assert result["most"] == 0
        assert result["left"] == result["left after scoring"] == 0
        difference = torch.tensor(result["difference"])
        assert len(difference) > 50
        if dtype == "float32":
            assert difference.max() < 1e-4
        else:
            assert difference.mean() < 0.05
        expect_noticed(result["noticed"], FAR if dtype == "float32" else 0)


def test_sync_into_a_tensor_parallel_engine(tiny_model, cache, tmp_path):
    found = two_ranks("tp", tmp_path / "out", cache, tiny_model)
    assert set(found) == {True, False}
    for difference, noticed in found.values():
        assert len(difference) > 25 and max(difference) < 1e-4
        expect_noticed(noticed, FAR)


FAR = 1e-3  # nats, mean in float32: where a run is stopped


def expect_noticed(noticed: dict[tuple[str, str], str | float], far: float) -> None:
    """What did not arrive is named; what arrived wrong is seen where every step compares engine and trainer."""
    assert len(noticed) == 6
    names = {name for _, name in noticed}
    for (how, name), found in noticed.items():
        if how == "corrupt":
            assert found > far, (name, found)
            continue
        assert f"model.{name}" in found and "got no tensor" in found, (name, found)
        assert not any(other in found for other in names - {name})


@pytest.mark.parametrize("how", ["corrupt", "nan", "missing"])
@pytest.mark.parametrize(
    "part", ["layers.1.self_attn.k_proj.bias", "layers.2.mlp.gate_proj.weight", "norm.weight", "embed_tokens.weight"]
)
def test_a_wrong_sync_is_named_or_seen_in_the_logprobs(engine, background, tiny_model, monkeypatch, how, part):
    """A tensor that is missing, one of another order, one that is not finite."""
    policy = types.SimpleNamespace(model=hf_model(tiny_model, 1.5), dtype=torch.float32)
    monkeypatch.setattr(train, "named_weights", lambda policy: spoilt(policy, f"model.{part}", how))
    error = error_of(lambda: train.sync(engine, policy, 1))
    if how == "missing":
        assert f"model.{part}" in error and "got no tensor" in error
        return
    assert error == ""
    outputs = generate(engine, background, PROMPTS, temperature=1.0, max_tokens=20)
    expected = [hf_logprobs(policy.model, prompt, out.token_ids) for prompt, out in zip(PROMPTS, outputs, strict=True)]
    difference = (torch.tensor([x for out in outputs for x in out.logprobs]) - torch.cat(expected)).abs()
    assert not difference.mean() <= FAR  # also if it is NaN
    if how == "nan":  # vLLM multiplies a block's free places by 0: a NaN left there would spoil later tests
        for layer in engine.core.vllm_config.compilation_config.static_forward_context.values():
            layer.kv_cache.zero_()


def test_what_is_wrong_with_a_tensor_is_said_with_its_name(engine, tiny_model):
    weights = {n: p.detach() for n, p in hf_model(tiny_model).named_parameters()}
    name = "model.layers.0.self_attn.v_proj.weight"
    twice = [*weights.items(), (name, weights[name])]
    for sent, message in (
        (weights | {name: weights[name].repeat(2, 1)}, "its shape is (128, 128), the engine's (64, 128)"),
        (weights | {name: weights[name][:7]}, ""),
        ({"model.layers.0.nothing.weight": weights[name]} | weights, "nothing"),
        (twice, "it came twice"),
    ):
        engine.wake_weights()
        pairs = sent.items() if isinstance(sent, dict) else sent
        error = error_of(lambda pairs=pairs: engine.load_weights(pairs, 1))
        where = "model.layers.0.nothing.weight" if message == "nothing" else name
        assert error.startswith(f"weight sync failed at {where}: ") and message in error and not error.endswith(": ")
        with pytest.raises(RuntimeError):
            engine.wake_kv()
        engine.state = "asleep"


def test_a_sync_given_up_half_way_leaves_the_policy_sharded(args, process_group):
    data.register_packed_attention()
    sharded = devices.shard(train.Policy(args), args, torch.device("cpu"))
    weights = train.named_weights(sharded)
    first = list(itertools.islice(weights, 3))
    assert [name for name, _ in first] == [
        "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias"
    ]  # fmt: skip
    weights.close()
    expected = train.Policy(args).model.state_dict()
    for name, p in sharded.model.named_parameters():
        assert isinstance(p, DTensor)
        assert torch.equal(whole(p.detach()), expected[name])


# ---------------------------------------------------------------- how it is asked for


def launched(monkeypatch, **changed: str) -> None:
    """The environment of a process that accelerate launch starts by our config."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    command = ["--config_file", str(REPO / "configs/eight_gpus_fsdp2.yaml"), "train.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(command))
    assert arguments.num_processes == 8
    for name, value in (prepare_multi_gpu_env(arguments) | changed).items():
        if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP")):
            monkeypatch.setenv(name, value)


def test_the_config_for_eight_gpus_shards(monkeypatch):
    args = Args()
    assert not devices.sharding(args)
    launched(monkeypatch)
    assert devices.sharding(args) is True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FSDP_VERSION", "1"),
        ("FSDP_RESHARD_AFTER_FORWARD", "false"),
        ("FSDP_OFFLOAD_PARAMS", "true"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true"),
    ],
)
def test_what_of_accelerates_config_is_not_implemented_is_refused(monkeypatch, name, value):
    launched(monkeypatch, **{name: value})
    with pytest.raises(BadInput, match=f"{name.lower()} {value}: must be"):
        devices.sharding(Args())


def test_a_model_that_does_not_name_its_layers_is_refused(args, process_group):
    data.register_packed_attention()
    policy = train.Policy(args)
    for module in policy.modules():
        if hasattr(module, "_no_split_modules"):
            module._no_split_modules = None
    with pytest.raises(BadInput, match="--shard: .*_no_split_modules"):
        devices.shard(policy, args, torch.device("cpu"))
