"""How near a run comes to what its GPUs can do at most."""

import torch
import torch.distributed as dist
from torch import nn

# By torch's name of a GPU: dense bfloat16 FLOP/s, and bytes/s of its memory (NVIDIA's data sheets).
PEAKS = {
    "NVIDIA A100-PCIE-40GB": (312e12, 1.555e12),
    "NVIDIA A100-SXM4-40GB": (312e12, 1.555e12),
    "NVIDIA A100 80GB PCIe": (312e12, 1.935e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 2.039e12),
    "NVIDIA H100 PCIe": (756e12, 2.0e12),
    "NVIDIA H100 NVL": (835e12, 3.9e12),
    "NVIDIA H100 80GB HBM3": (989e12, 3.35e12),
    "NVIDIA H200": (989e12, 4.8e12),
    "NVIDIA B200": (2250e12, 8.0e12),
    "NVIDIA L40S": (362e12, 0.864e12),
    "NVIDIA GeForce RTX 4090": (165e12, 1.008e12),
}


def peaks() -> tuple[float, float] | None:
    """Returns the FLOP/s and bytes/s of this rank's GPU; None without one, or if it is unknown."""
    return PEAKS.get(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def count_parameters(model: nn.Module) -> tuple[float, float]:
    """Returns how many parameters a model's matrices have, and how many of these a token uses.

    An embedding that isn't the head's is only looked up, and a token uses num_experts_per_tok of
    the experts, whose matrices transformers stacks. A vision tower counts for each token."""
    n_chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    lookup = model.get_input_embeddings().weight
    if lookup is model.get_output_embeddings().weight:
        lookup = None
    total = used = 0.0
    for p in model.parameters():
        if p is not lookup:
            is_stack = n_chosen and p.ndim == 3
            total += p.numel()
            used += p.numel() * n_chosen / len(p) if is_stack else p.numel()
    return total, used


def update_flops(args) -> int:
    """Returns the FLOPs of an update, per token and parameter: 2 forward, and 4 or 2 backward."""
    return 4 if args.lora_rank else 6  # with LoRA the weights have no gradients


def shares_of_peaks(metrics: dict, model: nn.Module, args) -> dict[str, float]:
    """Returns what a step's metrics are of the GPUs' peaks; {} without these or in float32.

        throughput/mfu   FLOPs of the policy's scoring (2 for each parameter and token) and updates
                         (`update_flops`), without attention and recomputation, and as if the head
                         saw every token
        throughput/mbu   bytes of all the engine's weights, which a model step reads once; of few
                         tokens it reads only some experts of a mixture"""
    peak = peaks()
    if peak is None or args.dtype != "bfloat16":
        return {}
    flops, bandwidth = peak
    total, used = count_parameters(model)
    shares = {}
    n_tokens = metrics.get("batch/unique_tokens", 0)  # of an update, on all ranks
    n_flops = seconds = 0.0
    for part, per_token, n_passes in (
        ("policy", update_flops(args), args.updates_per_step),
        ("logprobs_old", 2, args.updates_per_epoch),
    ):
        if f"timing/{part}_s" in metrics:
            n_flops += per_token * used * n_tokens * n_passes
            seconds += metrics[f"timing/{part}_s"]
    if seconds:
        shares["throughput/mfu"] = n_flops / seconds / flops / dist.get_world_size()
    if "timing/engine_step_s" in metrics and '"quantization"' not in args.engine_args:
        n_bytes = 2 * total / args.tp
        shares["throughput/mbu"] = n_bytes / bandwidth / metrics["timing/engine_step_s"]
    return shares
