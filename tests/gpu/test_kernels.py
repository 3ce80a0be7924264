"""Packed attention and token_logprobs against float64: on a GPU in bfloat16, on a CPU in small."""

import pytest
import torch
from fixed_batch import batch_of

import data
import losses

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32


def operands(*shapes, std: float = 1.0) -> tuple[list, list]:
    """Random tensors of these shapes, and the same in float64."""
    generator = torch.Generator().manual_seed(0)
    tensors = [std * torch.randn(shape, generator=generator) for shape in shapes]
    given = [x.to(DEVICE, DTYPE).requires_grad_() for x in tensors]
    return given, [x.detach().double().requires_grad_() for x in given]


def check(result: torch.Tensor, expected: torch.Tensor, given: list, exact: list) -> None:
    """Compares a result and its gradients with those in float64."""
    most = 0.05 if given[0].dtype == torch.bfloat16 else 1e-5  # of gradients, relative
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(expected.shape, generator=generator).to(DEVICE)
    (result.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    assert (result.double() - expected).abs().max() < most
    for x, y in zip(given, exact, strict=True):
        assert (x.grad.double() - y.grad).norm() < most * y.grad.norm()


@pytest.mark.parametrize("window", [1000, 16])
def test_packed_attention_over_a_forest(window):
    """The kernel for bfloat16 against the loop for other dtypes, which is that of a CPU."""
    batch = batch_of(19)
    inputs = data.pack_rows(batch, data.in_prefix_order(batch, range(19)), DEVICE)["inputs"]
    n = inputs.pop("input_ids").shape[1]
    # Fewer heads of keys than of queries.
    given, exact = operands(*((1, heads, n, 64) for heads in (14, 2, 2)))
    settings = dict(attention_mask=None, scaling=0.3, sliding_window=window) | inputs
    result, expected = (
        data.packed_attention(None, *tensors, **settings)[0] for tensors in (given, exact)
    )
    check(result, expected, given, exact)


def test_token_logprobs():
    T, H, V = (4096, 1536, 151936) if HAS_GPU else (64, 32, 1000)
    given, exact = operands((T, H), (V, H), std=3**0.5 / H**0.25)  # logits of std 3
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(V, (T,), generator=generator).to(DEVICE)
    logits = exact[0] @ exact[1].T
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    check(losses.token_logprobs(*given, targets), expected, given, exact)
