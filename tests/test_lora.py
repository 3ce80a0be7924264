"""LoRA: only adapters learn, the engine and final/ get merged weights, the reference has none."""

from dataclasses import replace

import pytest
import torch
from conftest import TINY, metrics_of
from fixed_batch import batch_of
from test_rollout import hf_model
from test_routes import args_of as with_experts

import train
from agent_loop import BadInput
from flatrl import models


def trained(policy: train.Policy) -> train.Policy:
    """With adapters that change something."""
    for i, (name, p) in enumerate(policy.named_parameters()):
        if ".lora_" in name:
            generator = torch.Generator().manual_seed(i)
            p.data = torch.randn(p.shape, generator=generator) / p.shape[1] ** 0.5
    return policy


def test_a_run_syncs_and_saves_merged_weights_and_its_adapter(train_here, tiny_model, tmp_path):
    """The engine agrees with the adapted policy. For resuming, see test_sharding.py."""
    from peft import AutoPeftModelForCausalLM

    flags = ["--lora_rank", "4", "--kl_coef", "0.01", "--num_steps", "2", "--lr", "0.01"]
    flags += ["--lora_args", '{"lora_alpha": 16, "target_modules": ["q_proj", "up_proj"]}']
    flags += ["--gradient_checkpointing"]
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


def test_experts_train_and_the_engine_gets_them(process_group, tmp_path):
    """peft wraps the tensors of all experts."""
    args = replace(with_experts(tmp_path), router_replay=False, lora_rank=4)
    policy = trained(train.Policy(args))
    plain = train.Policy(replace(args, lora_rank=0))
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
