"""When the engine is awake: weights are synced once, and it sleeps after whatever fails."""

import json
import types

import pytest
from conftest import SMALL_CACHE, TINY, make_run, metrics_of, run
from test_rollout import hf_model, make_rows

import train
from agent_loop import AgentLoopBase, register
from flatrl.processes import Stopped


@pytest.mark.parametrize("more, synced", [
    (["--save_every", "0"], []),
    (["--save_every", "1", "--offload", "all"], [1]),  # it sleeps meanwhile
    (
        ["--eval_every", "0", "--save_every", "0", "--max_staleness", "1"]
        + ["--engine_args", json.dumps({"enable_sleep_mode": False} | json.loads(SMALL_CACHE))],
        [1],
    ),
], ids=["plain", "saving", "stale, loaded"])  # fmt: skip
def test_a_rollout_after_an_evaluation_needs_no_sync(more, synced, cache, tmp_path):
    flags = [*TINY, "--eval_every", "1", "--num_steps", "2", "--lr", "1e-3", *more]
    run(*flags, "--output_dir", tmp_path / "run", cache=cache)
    rows = metrics_of(tmp_path / "run", timings=True)[1:]
    # Sampled by the weights that are trained.
    assert all(row["rollout/logp_diff_max"] < 1e-4 for row in rows)
    versions = [version for version, row in enumerate(rows) if row["timing/sync_s"] > 0]
    assert versions == synced


@pytest.fixture
def one(engine, background, tokenizer, args, tiny_model):
    """What train.evaluate needs of a run: one that has finished three steps."""
    task = types.SimpleNamespace(reward=lambda output, row: 1.0)
    one = make_run(engine, background, task, tokenizer, args)
    net = types.SimpleNamespace(model=hf_model(tiny_model), engine_dtype="as it is")
    one.done = 3
    one.policy = types.SimpleNamespace(net=net)
    one.pool = types.SimpleNamespace(finish_running=lambda: None)
    one.accelerator = types.SimpleNamespace(device="cpu")
    one.log = types.SimpleNamespace(rollouts=lambda *_: None)
    one.rows = {"val": make_rows("x", "x")}
    one.learners = {}
    return one


@register("test_endless")
class Endless(AgentLoopBase):
    async def run(self, sampling_params, **row):
        sampling_params |= {"max_tokens": 60, "ignore_eos": True}
        while True:
            await self.engine.generate(
                request_id="", prompt_ids=[5], sampling_params=sampling_params
            )


@pytest.mark.parametrize("agent, error", [("test_endless", Stopped), (None, RuntimeError)])
def test_after_a_stop_or_error_in_an_evaluation_the_engine_sleeps(one, agent, error, monkeypatch):
    moves = []
    monkeypatch.setattr(train, "offload", lambda run, device: moves.append(device))
    one.rows = {"val": make_rows("x", agent=agent) if agent else make_rows("raise")}
    one.stop.ask = lambda: agent is not None
    with pytest.raises(error):
        train.evaluate(one)
    assert one.engine.state == "asleep" and moves == ["cpu", one.accelerator.device]
    assert not one.engine.requests
    one.engine.abort_all()
    assert not one.engine.core.has_unfinished_requests()
