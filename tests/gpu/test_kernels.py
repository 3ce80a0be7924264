"""Packed attention and token_logprobs against float64: on a GPU in bfloat16, on a CPU in small."""

import argparse
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from conftest import REPO

import data
import losses

sys.path.append(str(REPO / "bench"))
import common


def some_prompts(n: int, length: int) -> list[list[int]]:
    return [[(7 * i + 3 * j) % 250 + 10 for j in range(length)] for i in range(n)]


def attention(q, k, v, inputs: dict, window: int | None) -> torch.Tensor:
    """Returns what data.packed_attention computes, by the definition: (1, S, H, D)."""
    edges = inputs["cu_seqlens"]
    key_edges = inputs.get("cu_seqlens_k", edges)
    index = inputs.get("key_index", torch.arange(q.shape[2], device=q.device))
    queries_of_key = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(queries_of_key, 1) for x in (k, v))
    segments = []
    for a, b, c, d in zip(edges, edges[1:], key_edges, key_edges[1:]):
        keys = index[c:d]
        n, m = b - a, d - c  # queries are the last n of m keys
        positions = torch.arange(m, device=q.device)
        distance = (positions[m - n :, None] - positions).double()
        hidden = (distance < 0) | (distance >= (window or m))
        scores = q[:, :, a:b] @ k[:, :, keys].transpose(2, 3) * q.shape[-1] ** -0.5
        segments.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, :, keys])
    return torch.cat(segments, 2).transpose(1, 2)


def errors(result: torch.Tensor, expected: torch.Tensor, inputs: list, exact: list) -> str:
    """Returns the largest error of a result, and the largest relative one of its gradients.

    exact: the inputs in float64, from which `expected` was computed."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(expected.shape, generator=generator).to(expected.device)
    (result.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    pairs = [(x.grad.double(), y.grad) for x, y in zip(inputs, exact, strict=True)]
    backward = max(((found - right).norm() / right.norm()).item() for found, right in pairs)
    forward = (result.double() - expected).abs().max().item()
    assert forward < 0.05 and backward < 0.05, (forward, backward)
    return f"forward {forward:.1e}, gradients {backward:.1e}"


def kernels(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Compares packed attention over a forest, and token_logprobs, with float64."""
    device = options.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    n = 4 if options.tiny else 32
    history = some_prompts(n, 200)
    prompts = [history[i // 4][: 100 + 20 * (i % 4)] for i in range(n)]  # four share a prefix
    zeros = {"logprobs": [0.0] * 60, "versions": [0] * 60}
    answers = [SimpleNamespace(token_ids=history[-1 - i][:60], **zeros) for i in range(n)]
    batch = data.collate(common.as_outputs(prompts, answers))
    inputs = data.pack_rows(batch, data.in_prefix_order(batch, range(n)), device)["inputs"]
    S = inputs["input_ids"].shape[1]
    generator = torch.Generator().manual_seed(0)
    names = ("cu_seqlens", "max_seqlen", "cu_seqlens_k", "key_index")
    packed = {name: inputs.get(name) for name in names}
    module = SimpleNamespace(is_causal=True)

    def operands(*tensors) -> tuple[list, list]:
        given = [x.to(device, dtype).requires_grad_() for x in tensors]
        return given, [x.detach().double().requires_grad_() for x in given]

    for window in (None, 64):
        shapes = [(1, heads, S, 64) for heads in (14, 2, 2)]  # of queries, keys, values
        qkv, exact = operands(*(torch.randn(shape, generator=generator) for shape in shapes))
        result, _ = data.packed_attention(module, *qkv, None, sliding_window=window, **packed)
        figures = errors(result, attention(*exact, inputs, window), qkv, exact)
        yield f"packed attention, {S} tokens, window {window}", figures
    T, H, V = (64, 32, 1000) if options.tiny else (4096, 1536, 151936)
    hidden = torch.randn(T, H, generator=generator)
    weight = torch.randn(V, H, generator=generator) * 3 / H**0.5
    given, exact = operands(hidden, weight)
    targets = torch.randint(V, (T,), generator=generator).to(device)
    expected = (exact[0] @ exact[1].T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    logprobs = losses.token_logprobs(*given, targets)
    yield f"token_logprobs, {T} x {V}", errors(logprobs, expected, given, exact)


def test_kernels_agree_with_float64():
    """Attention without and with a window, and logprobs; `errors` asserts what bfloat16 allows."""
    cuda = torch.cuda.is_available()
    options = argparse.Namespace(device="cuda" if cuda else "cpu", tiny=not cuda)
    rows = dict(kernels(options))
    assert len(rows) == 3
    for figures in rows.values():
        forward, gradients = (float(part.split()[1]) for part in figures.split(", "))
        most = 0.05 if cuda else 1e-5
        assert 0 < forward < most and 0 < gradients < most
