"""When the engine is awake: weights are synced once, and it sleeps after whatever fails."""

import types

import pytest
from conftest import TINY, make_run, metrics_of
from test_rollout import hf_model, make_rows

import train
from flatrl.processes import Stopped


def test_a_rollout_after_an_evaluation_needs_no_sync(train_here, tmp_path):
    flags = [*TINY, "--eval_every", "2", "--num_steps", "3", "--lr", "1e-3", "--save_every", "0"]
    train_here(*flags, "--offload", "all", "--output_dir", tmp_path / "run")
    rows = metrics_of(tmp_path / "run", timings=True)[1:]
    # Sampled by the weights that are trained.
    assert all(row["rollout/logp_diff_max"] < 1e-4 for row in rows)
    assert [row["timing/sync_s"] > 0 for row in rows] == [False, True, False]


@pytest.mark.parametrize("kind, error", [("x", Stopped), ("raise", RuntimeError)])
def test_after_a_stop_or_error_in_an_evaluation_the_engine_sleeps(
    kind, error, engine, background, tokenizer, args, tiny_model, monkeypatch
):
    moves = []
    monkeypatch.setattr(train, "offload", lambda run, device: moves.append(device))
    task = types.SimpleNamespace(reward=lambda output, row: 1.0)
    run = make_run(engine, background, task, tokenizer, args)
    run.done = 3
    net = types.SimpleNamespace(model=hf_model(tiny_model), engine_dtype="as it is")
    run.policy = types.SimpleNamespace(net=net)
    run.pool = types.SimpleNamespace(finish_running=lambda: None)
    run.accelerator = types.SimpleNamespace(device="cpu")
    run.rows = {"val": make_rows(kind)}
    run.stop.ask = lambda: kind == "x"
    with pytest.raises(error):
        train.evaluate(run)
    assert engine.state == "asleep" and moves == ["cpu", "cpu"]
    assert not engine.requests and not engine.core.has_unfinished_requests()
