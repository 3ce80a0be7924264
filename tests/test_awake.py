"""When the engine is awake: no weight sync between an evaluation and the next rollout, asleep after whatever fails."""

import types

import pytest
from conftest import REPO, TINY, make_run, metrics_of, run
from test_rollout import hf_model, make_rows

import train
from agent_loop import AgentLoopBase, register
from flatrl.processes import Stopped

COUNTED = f"""
import os, sys
sys.path.insert(0, {str(REPO / "tests")!r})
from tiny_task import *
import rollout

load_weights = rollout.Engine.load_weights

def counted(self, tensors, version):
    load_weights(self, tensors, version)
    with open(os.environ["COUNTED"], "a") as file:
        print(version, file=file)

rollout.Engine.load_weights = counted
"""


@pytest.mark.parametrize("more, versions, rollouts", [
    (["--save_every", "0"], [0, 1, 2, 3], []),
    (["--save_every", "2", "--offload", "all"], [0, 1, 2, 2, 3], [2]),  # the engine sleeps while a checkpoint is saved
    (["--eval_every", "0", "--save_every", "0", "--max_staleness", "1"], [0, 1, 2, 3], [1, 2]),
])  # fmt: skip
def test_each_version_of_the_weights_is_synced_once(more, versions, rollouts, cache, tmp_path):
    task = tmp_path / "counted.py"
    task.write_text(COUNTED)
    run(*TINY, "--task", task, "--eval_every", "1", "--num_steps", "3", "--lr", "1e-3", *more,
        "--output_dir", tmp_path / "run", cache=cache, COUNTED=str(tmp_path / "versions"))  # fmt: skip
    assert [int(line) for line in (tmp_path / "versions").read_text().split()] == versions
    rows = metrics_of(tmp_path / "run", timings=True)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["rollout/logp_diff_max"] < 1e-4 for row in rows[1:])  # sampled by the weights that are trained
    synced_for_rollouts = [version for row, version in zip(rows[1:], range(3)) if row["timing/sync_s"] > 0]
    assert synced_for_rollouts == rollouts


@pytest.fixture
def one(engine, background, tokenizer, args, tiny_model):
    """What train.evaluate needs of a run: one that has finished three steps."""
    task = types.SimpleNamespace(reward=lambda output, row: 1.0)
    one = make_run(engine, background, task, tokenizer, args)
    one.done = 3
    one.policy = types.SimpleNamespace(net=types.SimpleNamespace(model=hf_model(tiny_model), dtype="as it is"))
    one.pool = types.SimpleNamespace(settle=lambda: None)
    one.accelerator = types.SimpleNamespace(device="cpu")
    one.log = types.SimpleNamespace(rollouts=lambda *_: None)
    one.rows = {"val": make_rows("x", "x")}
    one.learners = {}
    return one


def test_an_evaluation_leaves_the_engine_awake_for_the_rollout_of_the_same_weights(one, monkeypatch):
    synced = []
    load_weights = one.engine.load_weights
    monkeypatch.setattr(one.engine, "load_weights", lambda *call: synced.append(call[-1]) or load_weights(*call))
    assert train.evaluate(one)["eval/reward"] == 1.0
    assert (one.engine.state, one.engine.version) == ("awake", 3)
    with train.awake(one) as seconds:
        assert seconds == 0 and one.engine.state == "awake"
    assert one.engine.state == "asleep"
    train.put_to_sleep(one)  # nothing happens the second time
    with train.awake(one, stays=True) as seconds:
        assert seconds > 0
    one.done = 4
    with pytest.raises(RuntimeError, match="'awake', this call needs 'asleep'"), train.awake(one):
        pass  # an update, and nobody put the engine to sleep before it
    assert synced == [3, 3]


def test_a_synchronous_phase_that_leaves_a_request_is_an_error(one, background):
    with pytest.raises(RuntimeError, match="1 requests are unfinished: end the rollout first"), train.awake(one):
        background.submit(one.engine.generate(request_id="a", prompt_ids=[5], sampling_params={"max_tokens": 60}))
        while not one.engine.running:
            one.engine.step()


@register("test_endless")
class Endless(AgentLoopBase):
    async def run(self, sampling_params, **row):
        while True:
            await self.engine.generate(
                request_id="", prompt_ids=[5], sampling_params={"max_tokens": 60, "ignore_eos": True}
            )


@pytest.mark.parametrize("where", ["settle", "rollout", "error"])
def test_after_a_stop_in_an_evaluation_the_engine_sleeps(one, where, background, monkeypatch):
    calls, moves = [], []
    monkeypatch.setattr(train, "offload", lambda run, device: moves.append(device))

    def stopped():  # while a call of training is under way
        call = one.engine.generate(request_id="a", prompt_ids=[5], sampling_params={"max_tokens": 60})
        calls.append(background.submit(call))
        while not one.engine.running:
            one.engine.step()
        raise Stopped

    if where == "settle":
        one.pool.settle = stopped
    elif where == "rollout":
        one.stop.ask = lambda: True
        one.rows = {"val": [row | {"agent_name": "test_endless"} for row in make_rows("x")]}
    else:
        one.rows = {"val": make_rows("raise")}
    with pytest.raises(RuntimeError if where == "error" else Stopped):
        train.evaluate(one)
    assert one.engine.state == "asleep" and moves == ["cpu", one.accelerator.device]
    assert len(one.engine.requests) == len(calls)
    one.engine.drain()
    assert not one.engine.core.has_unfinished_requests()
