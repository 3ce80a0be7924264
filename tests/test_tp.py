"""--tp: ranks that share an engine give the tokens and logprobs of one rank alone; a whole training run on them."""

import subprocess
import sys

import pytest
import torch
from conftest import REPO, TINY, clean_env, metrics_of, run, torchrun
from engine_worker import PROMPTS


def outputs(model: str, tp: int, out) -> list:
    command = [sys.executable, *torchrun(tp), "tests/engine_worker.py", model, str(tp), str(out)]
    done = subprocess.run(command, cwd=REPO, env=clean_env(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize("model", ["tiny_model", "untied_model"])
def test_two_ranks_sample_what_one_does(model, request, tmp_path):
    path = request.getfixturevalue(model)
    alone, team = (outputs(path, tp, tmp_path / f"{tp}.pt") for tp in (1, 2))
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
    flags = [*TINY, "--num_steps", "2", "--check_sync", "--algo", "ppo"]
    printed = run(*flags, "--tp", "2", "--output_dir", tmp_path / "team", by="torchrun", cache=cache)
    assert "eval reward" in printed
    run(*flags, "--output_dir", tmp_path / "alone", cache=cache)
    for team, alone in zip(metrics_of(tmp_path / "team"), metrics_of(tmp_path / "alone"), strict=True):
        for name in ("reward/mean", "response_length/mean", "actor/grad_norm", "critic/vf_loss", "eval/reward"):
            if name in alone:
                assert team[name] == pytest.approx(alone[name], rel=1e-3), (name, alone["step"])
        assert team.get("rollout/logp_diff_max", 0) < 1e-4


def test_tp_must_divide_the_ranks(cache, tmp_path):
    printed = run(*TINY, "--tp", "2", "--output_dir", tmp_path / "x", cache=cache, code=2)
    assert "--tp 2 must divide the number of processes, 1" in printed
