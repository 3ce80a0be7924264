"""Forward and backward pass of several architectures, on a forest of shared prefixes.

They are compared with transformers' own eager attention, a row at a time."""

import pytest
import torch
from fixed_batch import batch_of
from transformers import AutoConfig, AutoModelForCausalLM

import data
import train

SIZES = dict(vocab_size=250, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
SIZES |= dict(max_position_embeddings=128, initializer_range=0.3)
SIZES |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=1)
WINDOW = dict(sliding_window=7, layer_types=["sliding_attention", "full_attention"])
CAPS = dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
PACKED = {
    "qwen2": {},
    "mistral": dict(sliding_window=7),
    "gemma2": WINDOW | CAPS | dict(query_pre_attn_scalar=5),
    "gemma3_text": WINDOW | dict(query_pre_attn_scalar=5),
    "gpt_oss": WINDOW | dict(num_local_experts=4, num_experts_per_tok=2),
    "olmo3": WINDOW,
    "cohere2": WINDOW | dict(logit_scale=0.25),
    "granite": dict(logits_scaling=4.0, attention_multiplier=0.3),
    "mixtral": dict(num_local_experts=4, router_jitter_noise=0.5, attention_dropout=0.5),
    "smollm3": dict(no_rope_layers=[1, 0], tie_word_embeddings=False),
}
PADDED = {  # computed row by row
    "stablelm": dict(hidden_dropout=0.5, attention_dropout=0.5),
    "nemotron": {},
    "lfm2": dict(layer_types=["conv", "full_attention"], conv_L_cache=3, block_multiple_of=8),
    "mamba2": dict(state_size=8, num_heads=8, expand=2, n_groups=1, head_dim=8, chunk_size=16),
}


@pytest.fixture(scope="module")
def batch() -> dict:
    torch.manual_seed(0)
    batch = batch_of(14)
    batch["weights"] = torch.randn(batch["response_mask"].shape) * batch["response_mask"]
    return batch


def saved(path, model_type: str, **changes):
    """A model of that architecture with random weights, eager attention, saved at the path."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(model_type, **SIZES | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    for name, parameter in model.named_parameters():
        # Norms are ones, biases and sinks zeros.
        if "norm" in name or "bias" in name or "sinks" in name:
            parameter.data += 0.2 * torch.randn(parameter.shape)
    model.save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    )


def expected(model, batch: dict, temperature: float) -> torch.Tensor:
    """(B, T) logprobs by the model's own forward, a row at a time."""
    found = torch.zeros_like(batch["response_mask"])
    for i, ids in enumerate(batch["input_ids"]):
        n = batch["lengths"][i]
        start = batch["prompt_lengths"][i]
        ids = ids[None, :n]
        logits = model(input_ids=ids, use_cache=False).logits[0] / temperature
        logprobs = logits[start - 1 : -1].log_softmax(-1)
        found[i, : n - start] = logprobs.gather(1, ids[0, start:, None])[:, 0]
    return found * batch["response_mask"]


@pytest.mark.parametrize("model_type", [*PACKED, *PADDED])
def test_logprobs_and_gradients_are_those_of_eager_attention(
    model_type, batch, tmp_path, process_group
):
    reference = saved(tmp_path, model_type, **(PACKED | PADDED)[model_type])
    args = train.Args(model=str(tmp_path), temperature=0.9)
    args.gradient_checkpointing = model_type in ("mixtral", "stablelm")
    policy = train.Policy(args)
    passes = []  # of a part of the first layer
    part = [*policy.model.base_model.layers[0].children()][0]
    part.register_forward_hook(lambda *_: passes.append(1))
    dropouts = [getattr(x.config, "attention_dropout", None) for x in (policy.model, reference)]
    assert dropouts[0] == dropouts[1]  # it is not trained with, and stays in the saved config
    if model_type == "cohere2":  # transformers' masks show one token less than it was trained with
        reference.config.sliding_window += 1
    assert policy.is_packed == (model_type in PACKED)
    logprobs = expected(reference, batch, args.temperature)
    assert logprobs[batch["response_mask"].bool()].std() > 0.1  # there is something to compare
    rows = range(len(logprobs))
    micros = data.micro_batches_of_this_rank(batch, rows, 120, policy.is_packed)
    assert len(micros) > 1
    n_tokens = 0
    for micro in micros:
        packed = policy.pack(batch, micro)
        n_tokens += packed["inputs"]["input_ids"].numel()
        found = policy(packed)["logprobs"]
        torch.testing.assert_close(found, logprobs[micro.rows], rtol=1e-5, atol=2e-5)
        (found * batch["weights"][micro.rows]).sum().backward()
    assert policy.is_packed == (n_tokens < batch["lengths"].sum())
    assert len(passes) == len(micros) * (2 if args.gradient_checkpointing else 1)
    (logprobs * batch["weights"]).sum().backward()
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert len(gradients) > 8
    whole = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for name, parameter in policy.model.named_parameters():
        if name in gradients:  # routers' biases have none, for one
            difference = (parameter.grad - gradients[name]).norm()
            assert difference <= 2e-5 * gradients[name].norm() + 1e-6 * whole, name
