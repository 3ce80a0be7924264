"""--tp: a run whose ranks share an engine. See test_sharding.py, too."""

import pytest
from conftest import TINY, metrics_of, run


def test_a_run_on_a_team_gives_the_numbers_of_a_run_alone(
    train_here, tiny_model, tmp_path
):
    team, alone = tmp_path / "team", tmp_path / "alone"
    flags = [*TINY, "--algo", "ppo", "--max_staleness", "1", "--eval_every", "2"]
    flags += ["--model", tiny_model, "--output_dir"]
    run(*flags, team, "--num_steps", "3", "--tp", "2", "--shard", by="torchrun")
    train_here(*flags, alone, "--num_steps", "1")
    rows, others = metrics_of(team, timings=True), metrics_of(alone)
    assert rows[0]["eval/reward"] == pytest.approx(others[0]["eval/reward"], rel=1e-3)
    names = ["reward/mean", "response_length/mean", "actor/grad_norm", "critic/vf_loss"]
    for name in names:
        assert rows[1][name] == pytest.approx(others[1][name], rel=1e-3), name
    for row in rows[1:]:  # one engine, however many ranks share it
        assert row["rollout/staleness_max"] <= 1 and row["rollout/trajectories"] == 16
        assert row["rollout/logp_diff_max"] < 1e-3
        assert len(row["timing/idle_s"]) == 1 and 0 <= row["throughput/idle_share"] <= 1
