"""A transformers model's layers, made ready for training: no dropout, attention, LoRA."""

import json
import math
from functools import partial

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from flatrl.bad_input import BadInput, need, reason, refusing
from flatrl.processes import on_main

LORA_ALPHA = 32  # adapters are scaled by this over their rank

# A batch to try a network on. Two sequences have a common prefix.
PROBE = {
    "input_ids": torch.tensor(
        [
            [1, 2, 3, 4, 5, 6],
            [1, 2, 3, 7, 8, 9],
            [9, 8, 7, 6, 5, 4],
        ]
    ),
    "lengths": torch.full((3,), 6),
    "prompt_lengths": torch.full((3,), 1),
    "response_mask": torch.ones(3, 5),
}


def prepare_layers(model: nn.Module, gradient_checkpointing: bool):
    """Makes a network compute what vLLM's does: never in training mode, Cohere2's own windows.

    gradient_checkpointing: by `recompute_activations`; transformers' own needs training mode."""
    model.eval()
    for module in model.modules():
        if type(module).__name__ == "Cohere2Attention" and module.sliding_window:
            module.sliding_window += 1  # as in its training and in vLLM: [i - window, i]
        if hasattr(module, "time_step_limit"):  # of Mamba-2's layers: vLLM has no limits
            module.time_step_limit = (0.0, math.inf)
    if gradient_checkpointing:
        recompute_activations(model)


def recomputable_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the layers whose activations can be computed again in the backward pass."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]


def recompute_activations(model: nn.Module):
    """Makes each layer recompute its activations in the backward pass.

    Raises BadInput if the model's code has no layers of transformers' kind for it."""
    layers = recomputable_layers(model)
    need(layers, f"--gradient_checkpointing: {type(model).__name__} names no layers for it")
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def choose_attention(policy, probe, args):
    """Sets the attention of a train.Policy, and whether its rows are packed.

    Packed sequences are tried first, then right-padded rows with the model's own attention, as
    recurrent and convolutional layers need them. The first that gives the logprobs of the model's
    own logits is chosen. Raises BadInput if neither does. probe: the data.MicroBatch of PROBE."""
    attention, policy.is_packed = on_main(_find_attention, policy, probe, args)
    policy.model.set_attn_implementation(attention)


@torch.no_grad()
def _find_attention(policy, probe, args) -> tuple[str, bool]:
    """Returns what `choose_attention` sets. The policy is left as it was tried last."""
    model = policy.model
    own_attention = model.config._attn_implementation
    policy.is_packed = False
    model.set_attn_implementation("eager")
    packed = policy.pack(PROBE, probe)
    with _Float32():
        logits = model(**packed["inputs"], use_cache=False).logits.flatten(0, 1)
    logits = logits[packed["source"], : policy.vocab_size] / args.temperature
    logprobs = logits.log_softmax(-1).gather(1, packed["targets"][:, None])
    expected = logprobs[packed["prediction"], 0]
    failure = ""
    for attention, is_packed in (("packed", True), (own_attention, False)):
        model.set_attn_implementation(attention)
        policy.is_packed = is_packed
        try:
            with _Float32():
                found = policy(policy.pack(PROBE, probe))["logprobs"].flatten()
        except Exception as error:  # a model may raise what it likes
            failure = f" ({reason(error)})"
            continue
        if torch.allclose(found, expected, rtol=1e-3, atol=1e-3 / args.temperature):
            return attention, is_packed
    raise BadInput(f"{args.model}: its logits are more than hidden @ head, scale and cap{failure}")


class _Float32(TorchFunctionMode):
    """In it, functions get float32 copies of parameters, one at a time: bfloat16 hides errors."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__ and isinstance(args[0], nn.Parameter):
            return function(*args).float()  # token_logprobs slices the head by blocks
        args, kwargs = tree_map_only(nn.Parameter, torch.Tensor.float, (args, kwargs or {}))
        return function(*args, **kwargs)


def set_master_dtype(net: nn.Module, args):
    """Makes what is trained float32, in place. Of a sharded network, this rank's shard."""
    frozen = torch.float32
    if args.shard:  # FSDP2 would cast frozen weights beside LoRA adapters anyway
        frozen = getattr(torch, args.dtype, torch.float32)

    def cast(tensor):
        if not tensor.is_floating_point():
            return tensor
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        return tensor.to(frozen if is_frozen else torch.float32)

    net._apply(cast)  # as nn.Module.float does


def add_adapters(model: nn.Module, args):
    """Adds LoRA adapters of --lora_rank to all linear layers but the head (arXiv 2106.09685).

    W becomes W + s B A, with B = 0 at first. Only A and B are trained. Raises BadInput if the head
    gets an adapter, or if experts get none although --lora_args names no targets."""
    torch.manual_seed(args.seed)
    settings = json.loads(args.lora_args)
    with refusing("--lora_rank, --lora_args (which need peft: pip install peft)"):
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(
            r=args.lora_rank,
            base_model_name_or_path=args.model,
            task_type="CAUSAL_LM",
            **{"lora_alpha": LORA_ALPHA, "target_modules": "all-linear"} | settings,
        )
        inject_adapter_in_model(config, model)
    adapted = [name for name, _ in model.named_modules() if name.endswith(".lora_A")]
    has_experts = any(name.endswith(".experts") for name, _ in model.named_modules())
    need(
        not has_experts or "target_modules" in settings or any("experts" in x for x in adapted),
        f"--lora_rank: the experts of {args.model} would get no adapter; say what to train: "
        """--lora_args '{"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}'""",
    )
    head = model.get_output_embeddings().weight
    tied = [name for name, p in model.named_parameters() if p is head]  # the embeddings, perhaps
    need(not any("base_layer" in name for name in tied), "--lora_args: the head gets no adapter")


class WithoutAdapters:
    """A train.Policy without its adapters, as the reference: it takes no memory of its own."""

    def __init__(self, policy):
        self.policy = policy
        self.is_packed = policy.is_packed
        self.pack = policy.pack

    def __call__(self, packed: dict) -> dict:
        from peft.helpers import rescale_adapter_scale

        with rescale_adapter_scale(self.policy, 0):
            return self.policy(packed)
