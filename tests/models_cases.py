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

FAR = 1e-3  # nats, mean in float32: where a run is stopped


def build(name: str, folder: Path, args) -> tuple:
    """Arguments for the architecture's random model, and what loads it as the trainer's."""
    models.build(name, folder)
    args = dataclasses.replace(args, model=str(folder))
    args.engine_args = json.dumps({"kv_cache_memory_bytes": 1 << 25})

    def policy():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        return types.SimpleNamespace(model=model.eval(), dtype=torch.float32)

    return args, policy


def engine_of(args, tokenizer) -> Engine:
    KEPT.append(Engine(args.model, args, torch.device("cpu"), [tokenizer.eos_token_id]))
    return KEPT[-1]


def difference(engine: Engine, background, policy, step: int) -> float:
    """Mean |engine - trainer| logprob of what the engine samples."""
    outputs = models.sample(engine, background, step)
    scores = torch.cat(models.eager_scores(policy.model, outputs, None))
    return (scores - torch.tensor([x for o in outputs for x in o.response_logprobs])).abs().mean().item()


@pytest.fixture(scope="module")
def moe(args, tokenizer, process_group, tmp_path_factory):
    """(engine, policy) of a Qwen3-MoE whose experts are square: a transposed one has the right shape."""
    models.ARCHITECTURES["square"] = ("Qwen3MoeConfig", models.MOE | dict(moe_intermediate_size=128))
    args, policy = build("square", tmp_path_factory.mktemp("moe"), args)
    engine = engine_of(args, tokenizer)
    return engine, policy()


@pytest.fixture
def mixed(moe, monkeypatch):
    """sync(change): the next sync, with (name, tensor) pairs changed on their way; then its error, or None."""
    engine, policy = moe

    def sync(change=lambda weights: weights):
        sent = lambda p: change(dict(checkpoint_weights(p.model, torch.float32))).items()
        monkeypatch.setattr(train, "named_weights", sent)
        try:
            train.sync(engine, policy, engine.version + 1)
        except RuntimeError as error:
            engine.state = "asleep"
            return str(error)

    return sync


def test_experts_arrive_at_every_sync(moe, background):
    engine, policy = moe
    names = [name for name, _ in train.named_weights(policy)]
    assert "model.layers.3.mlp.experts.2.down_proj.weight" in names and len(set(names)) == len(names)
    for step in range(3):
        models.change(policy.model, step + 1)
        train.sync(engine, policy, step)
        assert difference(engine, background, policy, step) < 1e-5
        engine.sleep()


def expert(layer: int, i: int, kind: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{i}.{kind}_proj.weight"


def test_a_missing_expert_is_named(mixed):
    error = mixed(lambda weights: {name: x for name, x in weights.items() if name != expert(1, 2, "gate")})
    assert "got no tensor: ['model.layers.1.mlp.experts.routed_experts.w13_weight']" in error


def test_a_wrong_tensor_of_the_right_shape_is_seen_in_the_logprobs(moe, mixed, background):
    """Layers' norms or experts swapped, an expert transposed, a missed update."""
    engine, policy = moe
    norms = [f"model.layers.{i}.input_layernorm.weight" for i in (1, 2)]
    ups = [expert(layer, 0, "up") for layer in (1, 2)]
    gate = expert(1, 2, "gate")
    for change in (
        lambda weights: {norms[0]: weights[norms[1]], norms[1]: weights[norms[0]]},
        lambda weights: {ups[0]: weights[ups[1]], ups[1]: weights[ups[0]]},
        lambda weights: {gate: weights[gate].T.contiguous()},
    ):
        assert mixed(lambda weights, change=change: weights | change(weights)) is None
        assert difference(engine, background, policy, 5) > FAR
        engine.sleep()
    models.change(policy.model, 6)
    engine.wake_weights()
    engine.state = "synced"
    engine.wake_kv()
    assert difference(engine, background, policy, 6) > FAR
    engine.sleep()


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
        models.change(policy.model, step + 1)
        train.sync(engine, policy, step)
        assert difference(engine, background, policy, step) < 1e-5
        engine.sleep()


def test_quantization_is_taken_with_advice():
    quantised = train.Args(engine_args='{"quantization": "fp8"}')
    with pytest.warns(UserWarning, match="--rollout_correction tis"):
        train.check_args(quantised)
