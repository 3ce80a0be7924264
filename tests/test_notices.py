"""flatrl/notices.py and trackers.py: what a run tells its user besides its table."""

import json
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate import PartialState
from test_data import make_output

from flatrl.notices import Notices
from flatrl.trackers import Tracker
from train import Args

NETWORK = SimpleNamespace(model=SimpleNamespace(num_parameters=lambda: 9900), is_packed=True)


@pytest.fixture
def log(tmp_path, process_group):
    """What a listener uses of a Log."""
    PartialState(cpu=True)
    args = Args(model="m", task="t.py", lr=0.5, dtype="float32")
    log = SimpleNamespace(args=args, folder=tmp_path, said=[], steps_done=0, about={"args": 1})
    log.tokenizer = SimpleNamespace(decode=str)
    log.say = log.said.append
    log.warn = lambda text: log.say(f"warning: {text}")
    return log


def sampled(n: int, **attributes) -> list:
    return [
        make_output([1], [1, 1], extra={"prompt": i, "sample": 0, "segment": 0}, **attributes)
        for i in range(n)
    ]


def test_three_lines_at_the_start_and_two_at_the_end(log, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--task", "my task.py"])
    flags = dict(model="m", task="t.py", num_steps=9, epochs=2, lr=0.5, dtype="float32")
    log.args = Args(adv_estimator="rloo", **flags)
    log.steps_done = 4
    rows = {"train": [{}] * 2, "val": [{}]}
    notices = Notices(log)
    notices.start(rows, {"train": [{}] * 3, "val": [{}]}, NETWORK, torch.device("meta"))
    dropped, size, plan = log.said
    assert "2 training rows (1 overlong ones dropped), 1 validation rows" in dropped
    assert "0.01M parameters" in size
    sampled = "steps 5 to 9 of 32 prompts x 8 = 256 rollouts, 2 update(s), lr 0.5"
    assert f"grpo with rloo: {sampled}" in plan
    log.said.clear()
    rewards = [0.5, 0.75, 0.625]
    rows = [{"step": step, "reward/mean": x} for step, x in enumerate(rewards, 1)]
    (log.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (log.folder / "final").mkdir()
    notices.close()
    final = "evaluate: accelerate launch train.py --task 'my task.py' --num_steps 0 "
    final += f"--model {log.folder}/final --output_dir {log.folder}-eval"
    assert log.said == ["reward 0.500 -> 0.625, best 0.750 at step 2", final]


def test_a_step_that_teaches_nothing_is_told_of_until_one_does(log):
    notices = Notices(log)
    outputs = sampled(2, reward=0.0, metrics={"tool_calls": 0}, stop_reason="length")
    rollouts = SimpleNamespace(sampled=outputs)
    mask = torch.tensor([[1.0, 0.0]])  # the token behind the mask teaches nothing
    for step, advantage in enumerate((0, 0, 1, 0), 1):
        batch = {"advantages": torch.tensor([[advantage, 5.0]]), "response_mask": mask}
        notices.metrics({"step": step}, rollouts, batch)
    notices.metrics({"step": 5})  # an evaluation alone
    first, second = log.said
    assert "step 1 taught nothing: 0 of 2 called a tool, 100% were cut off" in first
    assert "step 4 taught nothing" in second
    notices.metrics({"step": 6, "actor/grad_norm": 0.0}, rollouts, batch | {"advantages": mask})
    assert len(log.said) == 2  # told of already
    notices.metrics({"step": 7, "actor/grad_norm": 0.1}, rollouts, batch | {"advantages": mask})
    notices.metrics({"step": 8, "actor/grad_norm": 0.0}, rollouts, batch | {"advantages": mask})
    assert "step 8 taught nothing: its gradient is 0. The teacher is" in log.said[2]
    # A loss other than that of the advantages teaches, too.
    batch = {"advantages": 0 * mask, "response_mask": mask}
    log.said.clear()
    Notices(log).metrics({"step": 1, "actor/imitation_loss": 0.5}, rollouts, batch)
    assert log.said == []


def test_rollouts_that_failed_are_counted(log):
    notices = Notices(log)
    failed = {"rollout/failed_agent_loop": 2, "rollout/failed_reward": 3, "eval/failed": 73}
    notices.metrics({"step": 3, "eval/trajectories": 100} | dict.fromkeys(failed, 0))
    assert log.said == []
    notices.metrics({"step": 2, "eval/trajectories": 27, "rollout/trajectories": 11.0} | failed)
    of_step, of_eval = log.said
    assert of_step.startswith("warning: 5 of 16 rollouts of step 2 failed")
    assert of_eval.startswith("warning: 73 of 100 rollouts of the evaluation at step 2 failed")


def test_wandb_gets_numbers_and_a_table_of_trajectories_and_a_resumed_run_goes_on(log, monkeypatch):
    package = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", package)
    Tracker(log).metrics({"step": 0})  # without --tracker
    assert not package.mock_calls
    log.args.tracker = "wandb"
    tracker = Tracker(log)
    outputs = sampled(70, reward={"score": 0.5}, turn_rewards=[(0, 0.25)], num_turns=2)
    metrics = {"step": 1, "reward/mean": 0.5, "timing/idle_s": [1.0]}
    tracker.metrics(metrics, SimpleNamespace(outputs=outputs))
    tracker.close()
    logged = [call.args[0] for call in package.init.return_value.log.call_args_list]
    assert logged == [{"reward/mean": 0.5}, {"rollouts": package.Table.return_value}]
    assert package.init.return_value.log.call_args.kwargs == {"step": 1}
    package.init.return_value.finish.assert_called_once()
    table = package.Table.call_args.kwargs
    fourth = dict(zip(table["columns"], table["data"][3], strict=True))
    assert len(table["data"]) == 64 and fourth["prompt"] == 3
    assert fourth["reward"] == 0.75 and fourth["trajectory"] == "[1, 100, 101]"

    log.args.resume = True
    Tracker(log)
    first, resumed = [call.kwargs for call in package.init.call_args_list]
    assert first["name"] == f"{log.folder.name}-{first['id']}"
    assert (first["resume"], first["config"]) == ("never", {"args": 1})
    assert resumed == first | {"resume": "allow"}
