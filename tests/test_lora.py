"""LoRA: only adapters learn, the engine and final/ get merged weights, the reference has none."""

from dataclasses import replace

import pytest
import torch
from conftest import TINY, metrics_of
from fixed_batch import batch_of
from test_rollout import hf_model
from test_routes import build  # noqa: F401  (a fixture)

import data
import train
from agent_loop import BadInput
from flatrl import models
from train import Args

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def args_of(model: str, **more) -> Args:
    data.register_packed_attention()
    flags = {"lora_rank": 4, "tokens_per_micro_batch": 1000}
    return Args(model=model, dtype="float32", lr=1e-3, **flags | more)


def is_adapted(name: str) -> bool:
    return name.split(".")[-2] in LAYERS and name.endswith("weight")


def trained(policy: train.Policy) -> train.Policy:
    """With adapters that change something."""
    for i, (name, p) in enumerate(policy.named_parameters()):
        if ".lora_" in name:
            generator = torch.Generator().manual_seed(i)
            p.data = torch.randn(p.shape, generator=generator) / p.shape[1] ** 0.5
    return policy


@pytest.mark.parametrize("tied", [True, False])
def test_merged_weights_are_those_of_the_adapted_policy(
    tied, tiny_model, untied_model, process_group
):
    model = tiny_model if tied else untied_model
    args = args_of(model, gradient_checkpointing=True)
    policy = trained(train.Policy(args))
    base = dict(hf_model(model).named_parameters())
    held = {name: p.clone() for name, p in policy.named_parameters()}
    weights = dict(models.checkpoint_weights(policy.model, policy.engine_dtype))
    if tied:  # some of vLLM's classes have a head of their own
        assert weights.pop("lm_head.weight") is weights["model.embed_tokens.weight"]
    assert weights.keys() == base.keys()
    for name, x in weights.items():
        expected = base[name]
        if is_adapted(name):
            path = f"model.{name.removesuffix('.weight')}"
            A, B = (held[f"{path}.lora_{part}.default.weight"] for part in "AB")
            expected = expected + 32 / 4 * B @ A
        torch.testing.assert_close(x, expected.detach(), atol=1e-5, rtol=0)

    # Nothing was merged in place.
    assert all(torch.equal(p, held[name]) for name, p in policy.named_parameters())

    plain = train.Policy(args_of(model, lora_rank=0))
    batch = batch_of(19)  # a forest: with shared prefixes

    def scores_of(net):
        return train.score_tokens(net, batch, args)["logprobs"]

    start = scores_of(plain)
    plain.model.load_state_dict(weights, strict=False)
    found = scores_of(policy)
    torch.testing.assert_close(found, scores_of(plain), atol=5e-4, rtol=0)
    assert (found - start).abs().max() > 0.1

    # The reference is the same network: no second copy, and nothing is left switched off.
    reference = train.build_reference(args_of(model, kl_coef=0.1), policy)
    assert torch.equal(scores_of(reference), start)
    assert torch.equal(scores_of(policy), found)


def test_a_run_syncs_and_saves_merged_weights_and_its_adapter(train_here, tiny_model, tmp_path):
    """For resuming, see test_sharding.py."""
    from peft import AutoPeftModelForCausalLM

    flags = ["--lora_rank", "4", "--kl_coef", "0.01", "--num_steps", "2", "--lr", "0.01"]
    flags += ["--lora_args", '{"lora_alpha": 16, "target_modules": ["q_proj", "up_proj"]}']
    train_here(*TINY, *flags, "--output_dir", tmp_path)
    rows = metrics_of(tmp_path)
    assert all(row["rollout/logp_diff_max"] < 1e-4 for row in rows[1:])
    assert rows[1]["actor/kl"] < 1e-9 and rows[2]["actor/kl"] > 1e-4

    base = dict(hf_model(tiny_model).named_parameters())
    final = dict(hf_model(tmp_path / "final").named_parameters())
    adapted = AutoPeftModelForCausalLM.from_pretrained(
        tmp_path / "final/adapter", dtype=torch.float32
    )
    config = adapted.peft_config["default"]
    assert config.lora_alpha == 16 and config.task_type == "CAUSAL_LM"
    for name, x in adapted.merge_and_unload().named_parameters():
        torch.testing.assert_close(final[name], x, atol=1e-6, rtol=0)
        is_target = name.endswith(("q_proj.weight", "up_proj.weight"))
        assert torch.equal(final[name], base[name]) != is_target, name


def test_experts_train_and_the_engine_gets_them(build, process_group):  # noqa: F811
    """peft wraps the tensors of all experts."""
    args = args_of(build("Qwen3Moe"))
    policy = trained(train.Policy(args))
    plain = train.Policy(args_of(args.model, lora_rank=0))
    base = dict(models.checkpoint_weights(plain.model, torch.float32))
    weights = dict(models.checkpoint_weights(policy.model, torch.float32))
    assert weights.keys() == base.keys()
    for name, x in weights.items():
        is_adapted = name.endswith("_proj.weight") or name.endswith("mlp.gate.weight")
        assert torch.equal(x, base[name]) != is_adapted, name

    batch = batch_of(19)
    found = train.score_tokens(policy, batch, args)["logprobs"]
    merged = dict(models.whole_weights(policy.model, torch.float32))
    plain.model.load_state_dict(merged, strict=False)
    expected = train.score_tokens(plain, batch, args)["logprobs"]
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=0)

    with pytest.raises(BadInput, match="the head gets no adapter"):
        train.Policy(replace(args, lora_args='{"target_modules": ["lm_head"]}'))
