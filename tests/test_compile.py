"""--compile: compiled decoder layers have the numbers of plain ones."""

from functools import partial

import pytest
import torch
from accelerate import Accelerator
from fixed_batch import check_gradients, gradients


def test_compiled_layers_have_the_same_gradients(tiny_model, process_group, monkeypatch):
    """By a backend that only traces: inductor takes minutes."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    step = partial(gradients, Accelerator(cpu=True), tiny_model, 128, "token-mean")
    flags = {"shard": True, "gradient_checkpointing": True}
    plain = step(**flags)
    torch._dynamo.reset()
    counters.clear()
    compiled = step(**flags, compile=True)
    assert counters["stats"]["unique_graphs"] > 0
    check_gradients(compiled["gradients"], plain["gradients"], 1e-5)
    assert compiled["metrics"] == pytest.approx(plain["metrics"], rel=1e-5, abs=1e-7)
