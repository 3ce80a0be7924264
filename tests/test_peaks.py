"""Shares of a GPU's peaks: what counts as work, and what is read."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from flatrl import peaks
from train import Args

SMALL = dict(
    hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=4, vocab_size=32)  # fmt: skip
# q, k, v, o, and the MLP of Qwen2: two layers, without biases and norms
LAYERS = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16)
VECTORS = 2 * (8 + 2 * 4 + 2 * 8) + 8


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_counts_and_a_lookup_does_not(tied):
    model = Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=tied))
    assert peaks.count_parameters(model) == (LAYERS + VECTORS + 32 * 8,) * 2


def test_a_token_uses_some_of_the_experts():
    experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=4)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **experts))
    total, used = peaks.count_parameters(model)
    assert total - used == 2 * 6 * (3 * 8 * 4)  # in each of two layers six of eight are idle


def shares(monkeypatch, metrics: dict, card="NVIDIA H200", **flags) -> dict:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: card)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(peaks, "count_parameters", lambda model: (4e9, 1e9))
    args = Args(**{"dtype": "bfloat16"} | flags)
    return peaks.shares_of_peaks(metrics, SimpleNamespace(), args)


def test_shares_of_two_h200(monkeypatch):
    metrics = {"batch/unique_tokens": 1e5, "timing/policy_s": 2.0, "timing/engine_step_s": 0.01}
    found = shares(monkeypatch, metrics)
    assert found["throughput/mfu"] == pytest.approx(6 * 1e9 * 1e5 / 2 / 989e12 / 2)
    assert found["throughput/mbu"] == pytest.approx(2 * 4e9 / 4.8e12 / 0.01)
    assert shares(monkeypatch, metrics, tp=2)["throughput/mbu"] == found["throughput/mbu"] / 2
    lora = shares(monkeypatch, metrics, lora_rank=8)
    assert lora["throughput/mfu"] == pytest.approx(found["throughput/mfu"] * 4 / 6)
    # Two epochs of two mini-batches, after one pass over all to score them.
    scored = metrics | {"timing/logprobs_old_s": 1.0}
    several = shares(monkeypatch, scored, epochs=2, prompts_per_mini_batch=16)
    n_flops = (4 * 6 + 2 * 2) * 1e9 * 1e5
    assert several["throughput/mfu"] == pytest.approx(n_flops / 3 / 989e12 / 2)


def test_no_share_is_guessed(monkeypatch):
    metrics = {"batch/unique_tokens": 1e5, "timing/policy_s": 2.0, "timing/engine_step_s": 0.01}
    assert shares(monkeypatch, metrics, card="NVIDIA H200 MIG 1g.18gb") == {}
    assert shares(monkeypatch, metrics, dtype="float32") == {}
    fp8 = shares(monkeypatch, metrics, engine_args='{"quantization": "fp8"}')
    assert fp8.keys() == {"throughput/mfu"}
    assert shares(monkeypatch, {"batch/unique_tokens": 1e5}) == {}  # only the critic learns
