"""Engine and trainer disagree, planted on purpose: the run stops, or warns and continues."""

import re
import types

import pytest
from conftest import REPO, TINY, metrics_of, rollouts_of, run

import train
from agent_loop import BadInput
from train import Args

# What load_weights gets has two layers swapped.
PLANTED = f"""
import sys
sys.path.insert(0, {str(REPO / "tests")!r})
from tiny_task import *
import rollout

load_weights = rollout.Engine.load_weights
other = {{"0": "1", "1": "0"}}

def swapped(name, x):
    parts = name.split(".")
    return ".".join(other.get(part, part) for part in parts), x

rollout.Engine.load_weights = lambda self, tensors, version: load_weights(
    self, (swapped(*pair) for pair in tensors), version)
"""


def test_swapped_layers_stop_the_run_on_all_ranks_and_name_the_token(cache, tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    out = tmp_path / "run"
    flags = [*TINY, "--task", tmp_path / "planted.py", "--save_every", "1", "--output_dir", out]
    printed = run(*flags, by="ranks", code=2, cache=cache)
    (line,) = [line for line in printed.splitlines() if "error" in line]
    said = "engine and trainer disagree: their logprobs of step 1 differ by "
    assert line.startswith(f"train.py: error: {said}") and "more than 0.001" in line
    assert line.endswith("--allow_mismatch trains all the same")
    assert [row["step"] for row in metrics_of(out)] == [0]
    assert not (out / "checkpoints").exists()

    pattern = (
        r"most at prompt (\d+), sample (\d+), segment 0, position (\d+) of the response, "
        r"(['\"].+['\"]): (\S+) in the engine, (\S+) in the trainer"
    )
    prompt, sample, position, _, engine, trainer = re.search(pattern, line).groups()
    (output,) = [
        o
        for o in rollouts_of(out, 1)  # it is there to look at
        if (o["extra"]["prompt"], o["extra"]["sample"]) == (int(prompt), int(sample))
    ]
    logprob = output["response_logprobs"][int(position)]
    assert logprob == pytest.approx(float(engine), rel=0.01)
    assert abs(logprob - float(trainer)) > 1e-3


@pytest.mark.parametrize(("found", "flags", "ends"), [
    (1.1e-3, {}, "stops"),
    (float("nan"), {}, "stops"),
    (0.11, {"dtype": "bfloat16"}, "stops"),
    (1.0, {"allow_mismatch": True}, "warns"),
    (0.11, {"sampling_args": '{"top_p": 0.9}'}, "warns"),  # another distribution, as was asked for
])  # fmt: skip
def test_the_bounds(found, flags, ends, monkeypatch):
    closed = []
    warned = []
    monkeypatch.setattr(train, "close", closed.append)
    monkeypatch.setattr(train, "disagreement", lambda *_: "they disagree")
    log = types.SimpleNamespace(warn=warned.append)
    args = Args(**{"dtype": "float32"} | flags)
    one = types.SimpleNamespace(
        args=args, log=log, engine=object(), tokenizer=None, mismatch_is_known=False)
    if ends == "stops":
        with pytest.raises(BadInput, match="they disagree; --allow_mismatch trains all the same"):
            train.check_agreement(one, None, 7, found)
        assert closed == [one] and not warned
        return
    for version in range(2):
        train.check_agreement(one, None, version, found)
    assert not closed and len(warned) == (ends == "warns")
