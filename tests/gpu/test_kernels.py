"""Packed attention and token_logprobs against float64: on a GPU in bfloat16, on a CPU in small."""

from types import SimpleNamespace

import pytest
import torch
from gradient_worker import batch_of

import data
import losses

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
MOST = 0.05 if HAS_GPU else 1e-5  # error of a result, and relative error of its gradients


def operands(*shapes, std: float = 1.0) -> tuple[list, list]:
    """Random tensors of these shapes, and the same in float64."""
    generator = torch.Generator().manual_seed(0)
    tensors = [std * torch.randn(shape, generator=generator) for shape in shapes]
    given = [x.to(DEVICE, DTYPE).requires_grad_() for x in tensors]
    return given, [x.detach().double().requires_grad_() for x in given]


def check(result: torch.Tensor, expected: torch.Tensor, given: list, exact: list) -> None:
    """Compares a result and its gradients with those in float64."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(expected.shape, generator=generator).to(DEVICE)
    (result.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    assert (result.double() - expected).abs().max() < MOST
    for x, y in zip(given, exact, strict=True):
        assert (x.grad.double() - y.grad).norm() < MOST * y.grad.norm()


def attention(q, k, v, inputs: dict, window: int | None) -> torch.Tensor:
    """Returns what data.packed_attention computes, by the definition: (1, S, H, D)."""
    edges = inputs["cu_seqlens"]
    key_edges = inputs["cu_seqlens_k"]
    queries_of_key = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(queries_of_key, 1) for x in (k, v))
    segments = []
    for a, b, c, d in zip(edges, edges[1:], key_edges, key_edges[1:]):
        keys = inputs["key_index"][c:d]
        n, m = b - a, d - c  # queries are the last n of m keys
        positions = torch.arange(m, device=q.device)
        distance = positions[m - n :, None] - positions
        hidden = (distance < 0) | (distance >= (window or m))
        scores = q[:, :, a:b] @ k[:, :, keys].transpose(2, 3) * q.shape[-1] ** -0.5
        segments.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, :, keys])
    return torch.cat(segments, 2).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 16])
def test_packed_attention_over_a_forest(window):
    batch = batch_of(19)
    inputs = data.pack_rows(batch, data.in_prefix_order(batch, range(19)), DEVICE)["inputs"]
    n = inputs["input_ids"].shape[1]
    names = ("cu_seqlens", "max_seqlen", "cu_seqlens_k", "key_index")
    packed = {name: inputs[name] for name in names}
    given, exact = operands(*((1, heads, n, 64) for heads in (14, 2, 2)))
    module = SimpleNamespace(is_causal=True)
    result, _ = data.packed_attention(module, *given, None, sliding_window=window, **packed)
    check(result, attention(*exact, inputs, window), given, exact)


def test_token_logprobs():
    T, H, V = (4096, 1536, 151936) if HAS_GPU else (64, 32, 1000)
    given, exact = operands((T, H), (V, H), std=3**0.5 / H**0.25)  # logits of std 3
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(V, (T,), generator=generator).to(DEVICE)
    logits = exact[0] @ exact[1].T
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    check(losses.token_logprobs(*given, targets), expected, given, exact)
