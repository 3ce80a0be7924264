"""A transformers model's layers, made ready for training: no dropout, its attention, LoRA."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_map_only

from agent_loop import BadInput
from flatrl.attention import packed_attention, register_packed_attention
from flatrl.bad_input import need, refusing
from flatrl.processes import on_main

# A batch of three sequences, two with a common prefix, to try a network on; all but the first
# tokens are sampled.
PROBE = {
    "input_ids": torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 9], [9, 8, 7, 6, 5, 4]]),
    "lengths": torch.full((3,), 6),
    "prompt_lengths": torch.full((3,), 1),
    "response_mask": torch.ones(3, 5),
}


def prepare_layers(model: nn.Module, gradient_checkpointing: bool):
    """Makes the trained network compute what the engine's does: no dropout, vLLM's windows.

    gradient_checkpointing: activations are computed again in the backward pass."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if type(module).__name__ == "Cohere2Attention" and module.sliding_window:
            module.sliding_window += 1  # as in its training and in vLLM: [i - window, i]
    if gradient_checkpointing:
        with refusing("--gradient_checkpointing"):  # not every model can
            model.gradient_checkpointing_enable()
        model.train()  # only then does transformers; without dropout nothing else changes


def choose_attention(policy, args):
    """Chooses how a train.Policy computes its rows, and sets policy.packed.

    Packed sequences, or else right-padded rows with the model's own attention, which
    recurrent and convolutional layers need: whichever gives the logprobs of the model's own
    logits. The main rank tries it for all. Raises BadInput if neither does."""
    attention, policy.packed = on_main(_try_attentions, policy, args)
    policy.model.set_attn_implementation(attention)


@torch.no_grad()
def _try_attentions(policy, args):
    """Returns the name of the attention that `choose_attention` chooses, and whether it is of
    packed sequences."""
    model = policy.model
    own_attention = model.config._attn_implementation
    model.set_attn_implementation("eager")
    packed = policy.pack_probe()
    # Rounding to bfloat16 would hide a difference.
    weights = {name: p.float() for name, p in policy.named_parameters()}
    with nn.utils.stateless._reparametrize_module(policy, weights, tie_weights=True):
        logits = model(**packed["inputs"], use_cache=False).logits.flatten(0, 1)
        logits = logits[packed["source"], : policy.vocab_size] / args.temperature
        expected = logits.log_softmax(-1).gather(1, packed["targets"][:, None])[packed["pair"], 0]
        for attention, policy.packed in (("packed", True), (own_attention, False)):
            model.set_attn_implementation(attention)
            with contextlib.suppress(Exception):  # a model may raise what it likes
                logprobs = policy(policy.pack_probe())[0].flatten()
                if torch.allclose(logprobs, expected, rtol=0, atol=1e-3 / args.temperature):
                    return attention, policy.packed
    raise BadInput(f"--model {args.model} makes logits in a way that token_logprobs doesn't "
                   "implement: only a product, a scale and a soft cap are")


def try_device(policy, args, device: torch.device):
    """Tries whether the device can train a train.Policy, which is on the host.

    Raises BadInput if parameters, gradients and Adam's states are more than a GPU has, or if
    the attention of the layers fails there for a few tokens, in --dtype, forward and backward:
    a head size that the kernel doesn't know, a kernel that is missing."""
    if device.type == "cuda" and args.num_steps and not args.rollout_only:
        n_ranks = distributed.get_world_size() if args.shard else 1
        needed = 16 * policy.model.num_parameters(only_trainable=True) / n_ranks
        _, total = torch.cuda.mem_get_info()
        need(needed < total, f"--model {args.model}: parameters, gradients and Adam's states take "
             f"{needed / 1e9:.1f} GB of a GPU's {total / 1e9:.1f}: give more GPUs, or --lora_rank")

    def on_device(tensor):
        if not tensor.is_floating_point():
            return tensor.to(device)
        return tensor.detach().to(device, getattr(torch, args.dtype)).requires_grad_()

    def attend(*tensors, **settings):
        """Computes one layer's attention there, and returns it to the host."""
        copies, options = tree_map_only(Tensor, on_device, (tensors, settings))
        attended, _ = packed_attention(*copies, **options)
        attended.sum().backward()
        return attended.detach().to(tensors[1]), None

    register_packed_attention(attend)
    with refusing(f"--model {args.model}: its attention can't be trained in {args.dtype} on "
                  f"{device}; try --dtype float32"):
        policy(policy.pack_probe())
    register_packed_attention()


def add_adapters(model: nn.Module, args):
    """Turns linear layers W into W + s B A (LoRA), B at first 0, by --lora_rank, --lora_args.

    Only A and B learn. Raises BadInput for settings that peft refuses, and where embeddings
    or the output head get an adapter: these are used without it."""
    settings = {"target_modules": "all-linear", "lora_alpha": 32} | {}
    torch.manual_seed(args.seed)
    embeddings = model.get_input_embeddings()
    head = model.get_output_embeddings()
    with refusing("--lora_rank (which needs peft: pip install peft), --lora_args"):
        from peft import LoraConfig, inject_adapter_in_model

        need(len(settings) == 2 and settings["lora_alpha"] > 0,
             "--lora_args takes target_modules and a positive lora_alpha only")
        inject_adapter_in_model(LoraConfig(r=args.lora_rank, **settings), model)
    need(model.get_input_embeddings() is embeddings and model.get_output_embeddings() is head,
         "--lora_args: embeddings and output head can't be targets")


def without_adapters(policy) -> Callable:
    """Returns a train.Policy without its adapters: LoRA's reference, which costs nothing."""
    from peft.helpers import rescale_adapter_scale

    reference = rescale_adapter_scale(policy, 0)(policy)  # in each of its calls
    reference.pack = policy.pack  # attributes are those of what is wrapped, methods are not
    return reference
