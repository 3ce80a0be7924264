"""Engine and trainer agree for an MoE model, and for one of vLLM's Transformers backend.

bench/models.py does the same for dozens of architectures, each in a process of its own."""

import dataclasses
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import KEPT, REPO
from transformers import AutoModelForCausalLM
from transformers.models.olmo2.modeling_olmo2 import Olmo2Model

import train
from flatrl.models import checkpoint_weights
from rollout import Engine

sys.path.append(str(REPO / "bench"))
import models


def build(name: str, folder: Path, args) -> tuple:
    """Arguments for the architecture's random model, and what loads it as the trainer's."""
    models.build(name, folder)
    args = dataclasses.replace(args, model=str(folder))
    args.engine_args = json.dumps({"kv_cache_memory_bytes": 1 << 25})

    def policy():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        return types.SimpleNamespace(model=model.eval(), dtype=torch.float32)

    return args, policy


def engine_of(args, tokenizer) -> Engine:
    KEPT.append(Engine(args.model, args, torch.device("cpu"), [tokenizer.eos_token_id]))
    return KEPT[-1]


def agree(engine: Engine, background, policy, step: int) -> None:
    """Syncs changed weights, and compares logprobs of what the engine then samples."""
    models.change(policy.model, step + 1)
    train.sync(engine, policy, step)
    outputs = models.sample(engine, background, step)
    scores = torch.cat(models.eager_scores(policy.model, outputs, None))
    sampled = torch.tensor([x for output in outputs for x in output.response_logprobs])
    assert (scores - sampled).abs().mean() < 1e-5
    engine.sleep()


@pytest.fixture(scope="module")
def moe(args, tokenizer, process_group, tmp_path_factory):
    """(engine, policy) of a Qwen3-MoE whose experts are square: a transposed one would fit."""
    square = models.MOE | dict(moe_intermediate_size=128)
    models.ARCHITECTURES["square"] = ("Qwen3MoeConfig", square)
    args, policy = build("square", tmp_path_factory.mktemp("moe"), args)
    engine = engine_of(args, tokenizer)
    return engine, policy()


def test_experts_arrive_at_every_sync(moe, background):
    engine, policy = moe
    names = [name for name, _ in train.named_weights(policy)]
    assert "model.layers.3.mlp.experts.2.down_proj.weight" in names
    assert len(set(names)) == len(names)
    for step in range(3):
        agree(engine, background, policy, step)


def test_a_missing_expert_is_named(moe, monkeypatch):
    engine, policy = moe
    missing = "model.layers.1.mlp.experts.2.gate_proj.weight"

    def sent(policy):
        weights = checkpoint_weights(policy.model, torch.float32)
        return ((name, x) for name, x in weights if name != missing)

    monkeypatch.setattr(train, "named_weights", sent)
    said = r"got no tensor: \['model.layers.1.mlp.experts.routed_experts.w13_weight'\]"
    with pytest.raises(RuntimeError, match=said):
        train.sync(engine, policy, 4)
    engine.state = "asleep"


def test_the_engine_leaves_the_class_of_the_trainers_model_alone(
    args, tokenizer, process_group, background, tmp_path
):
    """Whether it is built before the trainer's model or after it."""
    bases = Olmo2Model.__bases__
    attributes = dict(vars(Olmo2Model))
    args, policy = build("olmo2", tmp_path, args)
    policies = [policy()]
    engine = engine_of(args, tokenizer)
    policies.append(policy())
    assert Olmo2Model.__bases__ == bases
    assert all(vars(Olmo2Model)[name] is x for name, x in attributes.items())
    for step, policy in enumerate(policies):
        assert type(policy.model.model) is Olmo2Model
        agree(engine, background, policy, step)
