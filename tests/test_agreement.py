"""Engine and trainer disagree, planted on purpose: the run stops, or warns and continues."""

import json
import re
import types

import pytest
import torch
from conftest import REPO, TINY, metrics_of, run

import train
from agent_loop import BadInput
from flatrl.vllm_engine import vllm_arguments
from train import Args

# What load_weights gets: two layers swapped, or from version 2 on all weights scaled.
PLANTED = f"""
import os, sys
sys.path.insert(0, {str(REPO / "tests")!r})
from tiny_task import *
import rollout

load_weights = rollout.Engine.load_weights
other = {{"0": "1", "1": "0"}}

def planted(name, x, version):
    if os.environ["PLANTED"] == "drift":
        return name, x * 1.1 if version >= 2 else x
    parts = name.split(".")
    return ".".join(other.get(part, part) for part in parts), x

rollout.Engine.load_weights = lambda self, tensors, version: load_weights(
    self, (planted(*pair, version) for pair in tensors), version)
"""
ERROR = "train.py: error: engine and trainer disagree: their logprobs of step {} differ by "


@pytest.fixture
def flags(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    return [*TINY, "--task", tmp_path / "planted.py", "--eval_every", "0", "--lr", "1e-3",
            "--save_every", "1", "--output_dir", tmp_path / "run"]  # fmt: skip


def steps(folder) -> list[int]:
    return [row["step"] for row in metrics_of(folder)]


def test_swapped_layers_stop_the_run_on_all_ranks_in_the_first_step(flags, cache, tmp_path):
    printed = run(*flags, by="ranks", code=2, cache=cache, PLANTED="swap")
    (line,) = [line for line in printed.splitlines() if "error" in line]
    assert line.startswith(ERROR.format(1)) and "more than 0.001" in line
    assert "Traceback" not in printed and "is gone" not in printed
    assert steps(tmp_path / "run") == [0]
    assert (tmp_path / "run/rollouts/step_000001.jsonl").exists()  # to look at
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_run_that_drifts_later_is_stopped_at_that_step_with_the_token(flags, cache, tmp_path):
    """Its first two steps agree; nothing of the third is saved."""
    printed = run(*flags, code=2, cache=cache, PLANTED="drift")
    (line,) = [line for line in printed.splitlines() if "error" in line]
    assert line.startswith(ERROR.format(3))
    assert line.endswith("--allow_mismatch trains all the same")
    assert steps(tmp_path / "run") == [0, 1, 2]
    saved = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    assert saved == {"step_000001", "step_000002"}
    pattern = (r"most at prompt (\d+), sample (\d+), segment 0, position (\d+) of the response, "
               r"(['\"].+['\"]): (\S+) in the engine, (\S+) in the trainer")  # fmt: skip
    found = re.search(pattern, line)
    prompt, sample, position = map(int, found.group(1, 2, 3))
    rollouts = map(json.loads, (tmp_path / "run/rollouts/step_000003.jsonl").open())
    (output,) = (o for o in rollouts
                 if (o["extra"]["prompt"], o["extra"]["sample"]) == (prompt, sample))  # fmt: skip
    assert output["response_versions"][position] == 2
    engine, trainer = map(float, found.group(5, 6))
    assert output["response_logprobs"][position] == pytest.approx(engine, rel=0.01)
    assert abs(engine - trainer) > 1e-3


def test_allow_mismatch_warns_once(flags, cache, tmp_path):
    flags += ["--allow_mismatch", "--num_steps", "5"]
    printed = run(*flags, cache=cache, PLANTED="drift")
    (line,) = [line for line in printed.splitlines() if "disagree" in line]
    assert line.startswith("warning: engine and trainer disagree: their logprobs of step 3 differ")
    differences = [row["rollout/logp_diff_mean"] for row in metrics_of(tmp_path / "run")[1:]]
    assert [x > 1e-3 for x in differences] == [False, False, True, True, True]


@pytest.mark.parametrize(("found", "flags", "ends"), [
    (9e-4, {}, "silent"),
    (1.1e-3, {}, "stops"),
    (float("nan"), {}, "stops"),
    (0.09, {"dtype": "bfloat16"}, "silent"),
    (0.11, {"dtype": "bfloat16"}, "stops"),
    (0.09, {"engine_args": '{"quantization": "fp8"}'}, "silent"),
    (0.11, {"sampling_args": '{"top_p": 0.9}'}, "warns"),  # another distribution, as was asked for
    (0.11, {"sampling_args": '{"stop": "."}'}, "stops"),
])  # fmt: skip
def test_the_bounds(found, flags, ends, monkeypatch):
    closed = []
    warned = []
    monkeypatch.setattr(train, "close", closed.append)
    monkeypatch.setattr(train, "disagreement", lambda *_: "they disagree")
    log = types.SimpleNamespace(warn_once=warned.append)
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


def test_the_engines_head_is_in_float32(flags, cache, tmp_path):
    """In bfloat16, with tied embeddings, in a real engine."""
    args = Args(model="x", max_model_len=8, engine_args='{"hf_overrides": {"rope_theta": 1.0}}')
    arguments = vllm_arguments("x", args, torch.device("cpu"))
    assert arguments["hf_overrides"] == {"head_dtype": "float32", "rope_theta": 1.0}
    (tmp_path / "planted.py").write_text(PLANTED + """
rollout.Engine.load_weights = load_weights
rollout.never_sample = lambda model, never: print("its head:", model.logits_processor.head_dtype)
""")
    printed = run(*flags, "--dtype", "bfloat16", "--num_steps", "1", cache=cache)
    assert "its head: torch.float32" in printed and "disagree" not in printed
    assert 0 < metrics_of(tmp_path / "run")[1]["rollout/logp_diff_mean"] < 0.1


@pytest.mark.parametrize("given, expected", [
    ({}, (256, 8192)), ({"max_num_seqs": 9000}, (9000, 9008)),
])  # fmt: skip
def test_as_many_sequences_as_the_engine_decodes_fit_into_a_batch(given, expected):
    args = Args(model="x", max_model_len=8, engine_args=json.dumps(given))
    arguments = vllm_arguments("x", args, torch.device("cpu"))
    assert (arguments["max_num_seqs"], arguments["max_num_batched_tokens"]) == expected
