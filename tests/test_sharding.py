"""FSDP2 and the weight sync: sharded training is the same, and the engine has its weights.

As a script it is a rank of on_two_ranks: test_sharding.py gradients | tp OUT MODEL..."""

import dataclasses
import shutil
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from conftest import KEPT, REPO, SMALL_CACHE, TINY, generate, metrics_of, run
from fixed_batch import batch_of, check_gradients, gradients
from test_rollout import hf_model
from test_train import safetensors
from torch.distributed.tensor import DTensor

import data
import rollout
import train
from agent_loop import BadInput
from flatrl import devices, processes, vllm_engine
from train import Args


def on_two_ranks(what: str, out: Path, cache: Path, *models: str) -> dict:
    run(what, out, *models, script="tests/test_sharding.py", by="ranks", cache=cache)
    return torch.load(out, weights_only=False)


# Tokens in a micro-batch, of which some ranks need fillers; how losses are aggregated; flags.
CASES = {
    "ppo": (60, "token-mean", {}),
    "gspo": (130, "seq-mean-token-mean", {"policy_loss": "gspo", "observation_coef": 0.3}),
    "gmpo": (
        60, "seq-mean-token-sum-norm", {"policy_loss": "gmpo", "demonstrated": range(0, 19, 5)}
    ),
    "top4": (60, "token-sum", {"kl_kind": "top4"}),
    "sharded": (60, "token-mean", {"shard": True}),
    "observed": (130, "token-mean", {"shard": True, "observation_coef": 0.3}),
    "clipped": (130, "token-mean", {"shard": True, "max_grad_norm": 0.5}),
    "checkpointing": (60, "token-mean", {"shard": True, "gradient_checkpointing": True}),
}


def compare_gradients(accelerator, tied: str, untied: str) -> dict:
    found = {}
    for model, names in ((tied, CASES), (untied, ["observed"])):
        for name in names:
            tokens, loss_agg, flags = CASES[name]
            found[model, name] = gradients(accelerator, model, tokens, loss_agg, **flags)
    return found


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


def n_whole(policy: train.Policy) -> int:
    """Elements of the parameters that are not sharded at this moment."""
    return sum(p.numel() for p in policy.parameters() if not isinstance(p, DTensor))


def test_a_sharded_policy_stays_sharded_while_the_engine_gets_its_weights(
    engine, args, tiny_model, process_group
):
    data.register_packed_attention()
    args = dataclasses.replace(args, shard=True)
    policy = train.Policy(args)
    model = hf_model(tiny_model, 1.5)
    policy.model.load_state_dict(model.state_dict())
    devices.shard(policy, args, torch.device("cpu"))
    assert max(n_whole(policy) for _ in train.named_weights(policy)) == 0
    train.sync(engine, policy, 1)
    assert n_whole(policy) == 0
    (parts,) = engine.llm.apply_model(vllm_engine.fused_parts)
    held = {name: x for inside in parts.values() for name, x in inside.items()}
    for name, weight in model.named_parameters():
        assert torch.equal(held.pop(name)[: len(weight)], weight)  # it pads the vocabulary
    assert not held
    train.score_tokens(policy, batch_of(6), args)
    assert n_whole(policy) == 0


def compare_tp(accelerator, model: str) -> dict:
    """An engine over both ranks: a call of it is given up half-way, and one refused."""
    args = Args(
        model=model,
        dtype="float32",
        max_model_len=128,
        max_prompt_tokens=64,
        tp=2,
        engine_args=SMALL_CACHE,
    )
    engine, background = rollout.Engine(model, args, accelerator.device), processes.Background()
    KEPT.append(engine)
    found = {}
    train.sync(engine, train.Policy(args), 1)
    if engine.leader:
        call = engine.generate(request_id="lost", prompt_ids=[5], sampling_params={})
        lost = background.submit(call)
        while not engine.running:
            engine.step()
        lost.cancel()
        (refused,) = generate(engine, background, [[3] * 200])
        found["refused"] = repr(refused)
        engine.end_phase()
    else:
        engine.follow()
    found["unfinished"] = processes.all_gather(engine.core.has_unfinished_requests())
    return found


def test_followers_hear_of_calls_that_are_refused_or_given_up(tiny_model, cache, tmp_path):
    """For what a tensor-parallel engine samples, see test_tp.py."""
    found = on_two_ranks("tp", tmp_path / "out", cache, tiny_model)
    assert "ValueError" in found["refused"] and found["unfinished"] == [False, False]


def test_a_tensor_that_a_sync_leaves_out_is_named(engine, tiny_model, monkeypatch):
    """One that is wrong is seen in the logprobs: see test_agreement.py."""
    policy = types.SimpleNamespace(model=hf_model(tiny_model, 1.5), engine_dtype=torch.float32)
    weights = dict(train.named_weights(policy))
    left_out = "model.layers.1.self_attn.k_proj.bias"
    weights.pop(left_out)
    monkeypatch.setattr(train, "named_weights", lambda policy: weights.items())
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


if __name__ == "__main__":
    what, out, *models = sys.argv[1:]
    accelerator, _ = devices.start_processes(Args())
    data.register_packed_attention()
    results = {"gradients": compare_gradients, "tp": compare_tp}[what](accelerator, *models)
    if dist.get_rank() == 0:
        torch.save(results, out)
    dist.barrier()
    for engine in KEPT:
        engine.close()
