"""The parts of the CUDA path that a CPU can run: defaults and dtypes.

Whole runs are in tests/gpu."""

import dataclasses
import types
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import Accelerator
from fixed_batch import batch_of

import train
from flatrl import devices, layers
from flatrl.bad_input import BadInput
from train import Args

COLUMNS = ["response_mask", "unit_tokens", "advantages", "logprobs_rollout"]


@pytest.mark.parametrize("flags, cuda, expected", [
    ({}, True, {"dtype": "bfloat16", "shard": True}),
    ({"dtype": "float32"}, True, {"dtype": "float32", "shard": False}),
    # A tiny random model needs a large rate, a pretrained one a small one, an adapter more.
    ({}, False, {"lr": 3e-4, "critic_lr": 1e-3}),
    ({"model": "org/model", "lora_rank": 4}, False, {"lr": 1e-5, "critic_lr": 1e-5}),
    ({"lr": 0.5, "lora_rank": 4, "critic_lr": 0.25}, False, {"lr": 0.5, "critic_lr": 0.25}),
    ({"max_model_len": 20000}, False, {"tokens_per_micro_batch": 20000}),
    ({"num_steps": 0}, False, {"output_dir": str(Path.cwd() / "runs/tiny_task-eval")}),
])  # fmt: skip
def test_flags_are_completed(flags, cuda, expected):
    args = Args(task="tests/tiny_task.py", **flags)
    train.complete_flags(args, cuda)
    assert {name: getattr(args, name) for name in expected} == pytest.approx(expected)


ACCELERATOR = types.SimpleNamespace(device=torch.device("cpu"))  # all that sharding uses


def test_a_value_has_the_digits_of_float32(args, process_group):
    critic = train.Critic(args)
    hidden = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(1))
    torch.nn.init.constant_(critic.head.bias, 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        values = critic.scores_from_hidden(hidden, None)["values"]
    expected = hidden.double() @ critic.head.weight[0].double() + 0.5
    torch.testing.assert_close(values.double(), expected, atol=1e-5, rtol=1e-6)
    assert values.dtype == torch.float32


def test_the_reference_keeps_its_stored_dtype_and_the_policy_is_in_float32(
    tiny_model, tmp_path, process_group
):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    flags = dict(dtype="bfloat16", shard=True, tokens_per_micro_batch=1000)
    args = Args(model=str(tmp_path), kl_coef=0.1, lr=1e-3, **flags)
    policy = train.Policy(args)
    reference = train.build_reference(args, policy)
    policy, _, reference = train.build_networks(args, ACCELERATOR, policy, reference, types)
    assert {p.dtype for p in reference.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in policy.net.parameters()} == {torch.float32}
    assert {b.dtype for b in reference.buffers()} == {torch.float32}  # RoPE's
    learning = [{p.requires_grad for p in net.parameters()} for net in (reference, policy.net)]
    assert learning == [{False}, {True}]
    batch = batch_of(4)
    networks = reference, policy.net
    scores = [train.score_tokens(net, batch, args)["logprobs"] for net in networks]
    # FSDP casts before it gathers: the numbers are the same.
    assert torch.equal(*scores) and scores[0].abs().sum() > 1


def test_frozen_weights_in_half_precision_change_no_number(args, process_group, monkeypatch):
    """Which are, and that what learns is in float32, is counted in test_bench.py."""
    args = dataclasses.replace(args, dtype="bfloat16", shard=True, lora_rank=4)
    batch = batch_of(6)
    batch["advantages"] = torch.ones_like(batch["response_mask"])

    def train_one_step() -> dict:
        learner = train.Learner(train.Policy(args), 1e-3, 1, args, Accelerator(cpu=True))
        metrics, _ = train.optimise(learner, train.policy_objective, batch, COLUMNS, range(6))
        return metrics

    found = train_one_step()
    monkeypatch.setattr(layers, "set_master_dtype", lambda net, args: net.float())
    assert found == train_one_step() and found["actor/grad_norm"] > 0


PLENTY = 10**9


@pytest.mark.parametrize("flags, enough, others, expected", [
    # 0.85 of 1.2 MB, but for 5 kB, at 1 kB a token: enough without recomputation.
    ({}, 1000, PLENTY, (1015, False, 3)),
    # Too few tokens: recomputed, at 100 bytes a token, and no more than enough.
    ({}, 1016, PLENTY, (1016, True, 9)),
    # The rank with the least memory decides, down to the longest rollout.
    ({}, 500, 512, (512, False, 3)),
    ({}, 500, 127, (128, True, 9)),
    # All that the rank has for an update are 2 of 4 rows of 128 tokens.
    ({"group_size": 2, "prompts_per_step": 2, "prompts_per_mini_batch": 1}, PLENTY, PLENTY,
     (256, False, 3)),
    ({"gradient_checkpointing": False}, PLENTY, PLENTY, (1015, False, 3)),
    ({"gradient_checkpointing": True}, PLENTY, PLENTY, (10150, True, 6)),
    # Given: recomputed only if it would not fit.
    ({"tokens_per_micro_batch": 1015}, 1, PLENTY, (1015, False, 3)),
    ({"tokens_per_micro_batch": 2000}, 1, PLENTY, (2000, True, 9)),
    ({"tokens_per_micro_batch": 2000, "gradient_checkpointing": False}, 1, PLENTY,
     (2000, False, 0)),
])  # fmt: skip
def test_a_micro_batch_fits_every_gpu(
    args, process_group, monkeypatch, flags, enough, others, expected
):
    """On a made-up card, whose passes really compute. others: the tokens that fit on another.
    expected: the flags, and how often a layer computes in three passes, twice in each if
    activations are recomputed."""
    flags = {"task": "", "shard": True, "tokens_per_micro_batch": None} | flags
    args = dataclasses.replace(args, **flags)
    train.complete_flags(args, cuda=True)
    learner = train.Learner(train.Policy(args), 1e-3, 1, args, ACCELERATOR)
    bytes_of_adam = 2 * sum(p.nbytes for p in learner.net.parameters())
    computed = []
    learner.net.model.base_model.layers[1].self_attn.register_forward_hook(
        lambda *_: computed.append(1)
    )

    def read_memory(function, net, n):
        function(net, n)
        of_token = 100 if args.gradient_checkpointing else 1000
        return 5000 + of_token * n, bytes_of_adam + 1_200_000

    monkeypatch.setattr(devices, "read_memory", read_memory)
    monkeypatch.setattr(devices, "all_gather", lambda fits: [fits, [others]])
    flops = 6 * sum(p.numel() for p in learner.net.parameters())
    monkeypatch.setattr(devices, "FLOPS_OF_A_PASS", enough * flops)
    said = []
    devices.fit_micro_batch({"policy": learner}, args, torch.device("cuda"), said.append)
    found = args.tokens_per_micro_batch, args.gradient_checkpointing, len(computed)
    assert found == expected and len(said) == bool(computed)
    assert all(p.grad is None for p in learner.net.parameters())


def test_a_rank_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(BadInput, match="more processes than GPUs: give --num_processes 4"):
        devices.start_processes(Args())
