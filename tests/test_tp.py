"""--tp: ranks that share an engine give the tokens and logprobs of one rank alone; a whole training run on them."""

import json
from pathlib import Path

import pytest
import torch
from conftest import TINY, metrics_of, run
from engine_worker import PROMPTS


def outputs(model: str, tp: int, out, cache) -> list:
    run(model, tp, out, script="tests/engine_worker.py", by="ranks" if tp == 2 else "fork", cache=cache)
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize("model", ["tiny_model", "untied_model"])
def test_two_ranks_sample_what_one_does(model, request, cache, tmp_path):
    path = request.getfixturevalue(model)
    alone, team = (outputs(path, tp, tmp_path / f"{tp}.pt", cache) for tp in (1, 2))
    assert len(alone) == len(team) == 2 * (len(PROMPTS) + 1)  # for each of two versions of the weights
    refused = [result for result in alone if isinstance(result, str)]
    assert len(refused) == 2 and all("ValueError" in text for text in refused)
    seen = set()
    for one, two in zip(alone, team, strict=True):
        if isinstance(one, str):
            assert isinstance(two, str) and "ValueError" in two
            continue
        for a, b in zip(one, two, strict=True):  # the two turns
            assert a["token_ids"] == b["token_ids"] and len(a["token_ids"]) == 20
            assert a["versions"] == b["versions"] and a["prompt_ids"] == b["prompt_ids"]
            torch.testing.assert_close(torch.tensor(a["logprobs"]), torch.tensor(b["logprobs"]), atol=1e-4, rtol=0)
            seen.add((a["versions"][0], tuple(a["token_ids"])))
    assert len(seen) == 2 * 2 * len(PROMPTS)  # all different: nothing here holds by degeneration


def test_a_run_on_a_team_gives_the_numbers_of_a_run_alone(cache, tmp_path):
    flags = [*TINY, "--num_steps", "2", "--algo", "ppo"]
    printed = run(*flags, "--tp", "2", "--output_dir", tmp_path / "team", by="ranks", cache=cache)
    assert "eval reward" in printed
    run(*flags, "--output_dir", tmp_path / "alone", cache=cache)
    for team, alone in zip(metrics_of(tmp_path / "team"), metrics_of(tmp_path / "alone"), strict=True):
        names = ["eval/reward"] if alone["step"] in (0, 2) else []
        if alone["step"] > 0:
            names += ["reward/mean", "response_length/mean", "actor/grad_norm", "critic/vf_loss"]
            assert team["rollout/logp_diff_max"] < 1e-4
        for name in names:
            assert team[name] == pytest.approx(alone[name], rel=1e-3), (name, alone["step"])


def test_an_asynchronous_run_on_a_team(cache, tmp_path):
    flags = ["--tp", "2", "--max_staleness", "1", "--oversample", "1.5", "--eval_every", "2"]
    run(*TINY, *flags, "--num_steps", "4", "--output_dir", tmp_path / "run", by="ranks", cache=cache)
    rows = metrics_of(tmp_path / "run", timings=True)[1:]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:  # one engine, however many ranks share it
        assert row["rollout/staleness_max"] <= 1 and row["rollout/trajectories"] == 16
        assert len(row["timing/idle_s"]) == 1 and 0 <= row["throughput/idle_share"] <= 1
    # What was sampled is what was trained on, and what was under way when the run ended: two batches at most.
    sampled = sum(row["throughput/tokens_per_s"] * row["timing/rollout_s"] for row in rows)
    trained = sum(o["response_mask"].count(1) for o in outputs_of(tmp_path / "run"))
    assert trained <= round(sampled) <= trained + 2 * 4 * 4 * 16


def outputs_of(folder: Path) -> list[dict]:
    return [json.loads(line) for f in (folder / "rollouts").glob("step_*") for line in f.open()]


def test_tp_must_divide_the_ranks(cache, tmp_path):
    printed = run(*TINY, "--tp", "2", "--output_dir", tmp_path / "x", cache=cache, code=2)
    assert "--tp 2 must divide the number of processes, 1" in printed
