"""--tp: runs whose ranks share an engine. See test_sharding.py, too."""

import pytest
from conftest import TINY, metrics_of, rollouts_of, run


def test_a_run_on_a_team_gives_the_numbers_of_a_run_alone(cache, tmp_path):
    team, alone = tmp_path / "team", tmp_path / "alone"
    flags = [*TINY, "--num_steps", "1", "--algo", "ppo", "--output_dir"]
    run(*flags, team, "--tp", "2", "--shard", by="ranks", cache=cache)
    run(*flags, alone, cache=cache)
    names = ["eval/reward", "reward/mean", "response_length/mean", "actor/grad_norm"]
    rows, others = metrics_of(team), metrics_of(alone)
    assert rows[0]["eval/reward"] == pytest.approx(others[0]["eval/reward"], rel=1e-3)
    assert rows[1]["rollout/logp_diff_max"] < 1e-4
    for name in [*names, "critic/vf_loss"]:
        assert rows[1][name] == pytest.approx(others[1][name], rel=1e-3), name


def test_an_asynchronous_run_on_a_team(cache, tmp_path):
    out = tmp_path / "run"
    flags = ["--tp", "2", "--max_staleness", "1", "--oversample", "1.5", "--eval_every", "3"]
    flags += ["--num_steps", "9", "--stop_at_reward", "0", "--output_dir", out]
    printed = run(*TINY, *flags, by="ranks", cache=cache)
    assert f"the trained policy is in {out}/final" in printed  # complete after step 3
    rows = metrics_of(out, timings=True)[1:]
    trained = 0
    for step, row in enumerate(rows, 1):  # one engine, however many ranks share it
        assert row["rollout/staleness_max"] <= 1 and row["rollout/trajectories"] == 16
        assert len(row["timing/idle_s"]) == 1 and 0 <= row["throughput/idle_share"] <= 1
        trained += sum(sum(rollout["response_mask"]) for rollout in rollouts_of(out, step))
    # What was sampled is trained on, or was under way at the end: two batches at most.
    sampled = sum(row["throughput/tokens_per_s"] * row["timing/rollout_s"] for row in rows)
    assert len(rows) == 3 and trained <= round(sampled) <= trained + 2 * 4 * 4 * 16
