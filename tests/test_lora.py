"""LoRA: only adapters learn, engine and final/ get the merged weights, the reference is the model without them."""

import json
import shutil
import sys

import pytest
import torch
from accelerate import Accelerator
from conftest import TINY, metrics_of, run
from gradient_worker import batch_of
from test_rollout import hf_model

import data
import train
from agent_loop import BadInput
from train import Args

LAYERS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()


def args_of(model: str, **more) -> Args:
    data.register_packed_attention()
    return Args(model=model, dtype="float32", lr=1e-3, **{"lora_rank": 4} | more)


def trained(policy: train.Policy) -> train.Policy:
    """With adapters that do something."""
    for i, (name, p) in enumerate(policy.named_parameters()):
        if ".lora_" in name:
            generator = torch.Generator().manual_seed(i)
            p.data = torch.randn(p.shape, generator=generator) / p.shape[1] ** 0.5
    return policy


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lora_args", ["{}", '{"target_modules": ["q_proj", "down_proj"], "lora_alpha": 3}'])
def test_merged_weights_are_what_the_adapted_policy_computes(tied, lora_args, tiny_model, untied_model, process_group):
    model = tiny_model if tied else untied_model
    args = args_of(model, lora_args=lora_args, gradient_checkpointing=True)
    policy, base = trained(train.Policy(args)), dict(hf_model(model).named_parameters())
    given = {"target_modules": LAYERS, "lora_alpha": 32} | json.loads(lora_args)
    held = {name: p.clone() for name, p in policy.named_parameters()}
    weights = dict(train.named_weights(policy))
    assert weights.keys() == base.keys()
    merged = 0
    for name, x in weights.items():
        expected, path = base[name], f"model.{name.removesuffix('.weight')}"
        if name.split(".")[-2] in given["target_modules"] and name.endswith("weight"):
            A, B = (held[f"{path}.lora_{part}.default.weight"] for part in "AB")
            expected, merged = expected + given["lora_alpha"] / 4 * B @ A, merged + 1
            assert torch.equal(held[f"{path}.base_layer.weight"], base[name])
        torch.testing.assert_close(x, expected.detach(), atol=1e-5, rtol=0)
    assert merged == 3 * len(given["target_modules"])
    assert all(torch.equal(p, held[name]) for name, p in policy.named_parameters())  # nothing was merged in place

    plain, batch = train.Policy(args_of(model, lora_rank=0)), batch_of(19)  # a forest: with shared prefixes
    start = train.score_tokens(plain, batch, args)
    plain.model.load_state_dict(weights, strict=False)
    found = train.score_tokens(policy, batch, args)
    torch.testing.assert_close(found, train.score_tokens(plain, batch, args), atol=5e-4, rtol=0)
    assert (found - start).abs().max() > 0.1

    # The reference is the same network: no second copy, and nothing is left switched off.
    _, _, reference = train.build_networks(args_of(model, kl_coef=0.1), Accelerator(cpu=True), policy)
    assert torch.equal(train.score_tokens(reference, batch, args), start)
    assert torch.equal(train.score_tokens(policy, batch, args), found)


def test_gradients_and_optimiser_states_are_the_adapters_alone(tiny_model, process_group):
    sizes = {}
    for rank in (0, 4, 8):
        args = args_of(tiny_model, lora_rank=rank)
        learner = train.Learner(train.Policy(args), 1e-3, 1, args, Accelerator(cpu=True))
        before = {name: p.detach().clone() for name, p in learner.net.named_parameters()}
        batch = batch_of(19)
        packed = learner.net.pack(batch, data.in_prefix_order(batch, range(19)))
        learner.wrapped(packed)[0].sum().backward()
        bytes_of = lambda tensors: sum(x.nbytes for x in tensors if x is not None)
        gradients = bytes_of(p.grad for p in learner.net.parameters())
        learner.optimizer.step()
        states = bytes_of(x for state in learner.optimizer.state.values() for x in state.values() if x.ndim)
        sizes[rank] = gradients, states
        moved = {name for name, p in learner.net.named_parameters() if not torch.equal(p, before[name])}
        assert moved and (not rank or all(".lora_B." in name for name in moved))  # of A the first gradient is 0
    linear = [(128, 128), (128, 64), (128, 64), (128, 128), (128, 256), (128, 256), (256, 128)]
    n = 3 * sum(inside + outside for inside, outside in linear)
    assert sizes[4] == (4 * n * 4, 4 * n * 8) and sizes[8] == (8 * n * 4, 8 * n * 8)
    whole = sum(p.numel() for p in hf_model(tiny_model).parameters())
    assert sizes[0] == (whole * 4, whole * 8) and sizes[8][0] < sizes[0][0] / 4


@pytest.mark.parametrize("lora_args, said", [
    ('{"target_modules": ["lm_head", "q_proj"]}', "--lora_args: embeddings and output head can't be targets"),
    ('{"target_modules": ["embed_tokens"]}', "--lora_args: embeddings and output head can't be targets"),
    ('{"target_modules": ["nothing"]}', "--lora_args: .*nothing.* not found"),
    ('{"use_dora": true}', "--lora_args takes target_modules and a positive lora_alpha only"),
    ('{"lora_alpha": 0}', "--lora_args takes target_modules and a positive lora_alpha only"),
    ('{"lora_alpha": "x"}', "lora_alpha|not supported"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Model")
def test_what_cant_be_adapted_is_refused(lora_args, said, tiny_model, process_group):
    with pytest.raises(BadInput, match=said):
        train.Policy(args_of(tiny_model, lora_args=lora_args))


def test_flags_of_lora(monkeypatch, tiny_model, process_group):
    for flags, said in ((dict(lora_rank=0, lora_args='{"lora_alpha": 1}'), "only with a --lora_rank"),
                        (dict(lora_args="[1]"), "--lora_args must be a JSON object"),
                        (dict(lora_args="16"), "--lora_args must be a JSON object")):  # fmt: skip
        with pytest.raises(BadInput, match=said):
            train.check_args(args_of(tiny_model, **flags))
    train.check_args(args_of(tiny_model, lora_args='{"lora_alpha": 1}'))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(BadInput, match="needs peft: pip install peft.*peft"):
        train.Policy(args_of(tiny_model))


def test_a_run_saves_and_resumes_its_adapter(cache, tmp_path, tiny_model):
    """The engine's weights are the merged ones after every update; resumed whole, and sharded over two ranks."""
    from peft import PeftModel
    from safetensors.torch import load_file
    from torch.distributed.checkpoint import FileSystemReader

    flags = [*TINY, "--deterministic", "--lora_rank", "4", "--kl_coef", "0.01", "--num_steps", "2",
             "--model", tiny_model, "--lr", "0.01", "--save_every", "1", "--keep_checkpoints", "5"]  # fmt: skip
    first, again = tmp_path / "first", tmp_path / "again"
    run(*flags, "--output_dir", first, cache=cache)
    rows = metrics_of(first)
    assert all(row["rollout/logp_diff_max"] < 1e-4 for row in rows[1:])
    assert rows[1]["actor/kl"] < 1e-9 and rows[2]["actor/kl"] > 1e-4  # to the model that it started from
    saved = FileSystemReader(first / "checkpoints/step_000002").read_metadata().state_dict_metadata
    weights = {name for name in saved if name.startswith("policy.")}
    assert len(weights) == 3 * len(LAYERS) * 2 and all(".lora_" in name for name in weights)

    final = load_file(first / "final/model.safetensors")
    adapted = PeftModel.from_pretrained(hf_model(tiny_model), first / "final/adapter").merge_and_unload()
    base = dict(hf_model(tiny_model).named_parameters())
    assert final.keys() == base.keys()
    for name, x in adapted.named_parameters():
        torch.testing.assert_close(final[name], x.detach(), atol=1e-6, rtol=0)
        linear = name.split(".")[-2] in LAYERS and name.endswith("weight")
        assert torch.equal(final[name], base[name]) != linear, name

    for by, more in (("fork", []), ("ranks", ["--shard"])):
        shutil.copytree(first, again)
        for later in ("checkpoints/step_000002", "final"):
            shutil.rmtree(again / later)
        assert "resuming after step 1" in run(*flags, *more, "--resume", "--output_dir", again, by=by, cache=cache)
        found, other = metrics_of(again), load_file(again / "final/model.safetensors")
        for name in ("reward/mean", "actor/loss", "actor/grad_norm", "actor/kl", "eval/reward"):
            close = pytest.approx(rows[2][name], rel=1e-3, abs=1e-5)
            assert found[2][name] == (rows[2][name] if by == "fork" else close)
        for name, x in final.items():
            torch.testing.assert_close(other[name], x, atol=0 if by == "fork" else 5e-5, rtol=0)
        shutil.rmtree(again)
