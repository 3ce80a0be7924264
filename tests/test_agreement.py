"""Engine and trainer disagree: the run stops and names the token, or warns and continues."""

from types import SimpleNamespace

import pytest
import torch
from conftest import output_of

import data
import train
from agent_loop import BadInput
from flatrl.metrics import batch_metrics
from train import Args


@pytest.mark.parametrize("difference, flags, ends", [
    (0.9e-3, {}, "goes on"),
    (1.1e-3, {}, "stops"),
    (float("nan"), {}, "stops"),
    (0.09, {"dtype": "bfloat16"}, "goes on"),
    (0.11, {"dtype": "bfloat16"}, "stops"),
    (1.0, {"allow_mismatch": True}, "warns"),
    (0.11, {"sampling_args": '{"top_p": 0.9}'}, "warns"),  # another distribution, as was asked for
])  # fmt: skip
def test_the_bounds(difference, flags, ends, tokenizer, monkeypatch):
    """Of three tokens one was sampled by older weights, which may differ."""
    args = Args(**{"dtype": "float32"} | flags)
    output = output_of([1, 1, 1], ids=[5, 6, 7])
    output.response_versions = [6, 7, 7]
    batch = data.make_batch([output])
    batch["logprobs_old"] = batch["logprobs_rollout"] + torch.tensor([9, 0, 2 * difference])
    found = batch_metrics(batch, 7, args)["rollout/logp_diff_mean"]
    assert found == pytest.approx(difference, rel=1e-3, nan_ok=True)

    closed, warned = [], []
    monkeypatch.setattr(train, "close", closed.append)
    log = SimpleNamespace(warn=warned.append)
    run = SimpleNamespace(
        args=args, log=log, engine=object(), tokenizer=tokenizer, mismatch_is_known=False
    )
    if ends == "stops":
        said = f"prompt 0, sample 0, segment 0, position 2 of the response, '{tokenizer.decode(7)}'"
        with pytest.raises(BadInput, match=said):
            train.check_agreement(run, batch, 7, found)
        assert closed == [run] and not warned
        return
    for _ in range(2):
        train.check_agreement(run, batch, 7, found)
    assert not closed and len(warned) == (ends == "warns")
