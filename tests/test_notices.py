"""flatrl/notices.py and trackers.py: what a run tells its user besides its table."""

import copy
import json
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from test_data import make_output

from flatrl.notices import Notices
from flatrl.rows import check_tokenizer
from flatrl.trackers import Tracker
from train import Args

NETWORK = SimpleNamespace(model=SimpleNamespace(num_parameters=lambda: 9900), is_packed=True)


@pytest.fixture
def log(tmp_path, process_group):
    """What a listener uses of a Log."""
    args = Args(model="m", task="t.py", output_dir="there", lr=0.5, dtype="float32")
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


@pytest.mark.parametrize("flags, done, plan", [
    ({"epochs": 2}, 0, "grpo: 9 steps of 32 prompts x 8 = 256 trajectories, 2 update(s), lr 0.5"),
    ({"algo": "sft"}, 4, "sft: steps 5 to 9 of 32 demonstrations, 1 update(s), lr 0.5"),
    ({"num_steps": 0, "eval_samples": 4, "temperature": 0.5}, 0,
     "evaluation: 4 trajectories a validation row, at temperature 0.5"),
])  # fmt: skip
def test_three_lines_at_the_start(log, flags, done, plan):
    flags = {"num_steps": 9, "lr": 0.5, "output_dir": "there", "dtype": "float32"} | flags
    log.args = Args(model="m", task="t.py", **flags)
    log.steps_done = done
    rows = {"train": [{}] * 2, "val": [{}]}
    Notices(log).start(rows, {"train": [{}] * 3, "val": [{}]}, NETWORK, torch.device("meta"))
    assert log.said == [
        "t.py: 2 training rows (1 overlong ones dropped), 1 validation rows",
        "m: 0.01M parameters, float32, 1 x meta",
        f"{plan}; writing there",
    ]


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
    assert first.startswith(
        "warning: step 1 taught nothing: 0 of 2 called a tool, 100% were cut off by a limit"
    )
    assert ", all rewards are 0 (" in first
    assert second.startswith("warning: step 4 taught nothing: ")

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


def test_two_lines_at_the_end(log):
    rows = [
        {"step": 0, "eval/reward": 0.25},
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "reward/mean": 0.75},
        {"step": 3, "reward/mean": 0.625},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (log.folder / "metrics.jsonl").write_text(text)
    (log.folder / "checkpoints/step_000002").mkdir(parents=True)
    Notices(log).close()
    change = "reward 0.500 -> 0.625, best 0.750 at step 2; evaluation 0.250"
    assert log.said == [change, "continue: the same command with --resume"]
    (log.folder / "final").mkdir()
    (log.folder / "report.html").touch()
    Notices(log).close()
    final = f"evaluate: the same command with --num_steps 0 --model {log.folder}/final"
    assert log.said[2:] == [change, f"report: {log.folder}/report.html; {final}"]


def test_wandb_gets_numbers_and_a_table_of_trajectories(log, monkeypatch):
    package = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", package)
    Tracker(log).metrics({"step": 0})  # without --wandb_project
    assert not package.mock_calls
    log.args.wandb_project = "p"
    tracker = Tracker(log)
    outputs = sampled(70, reward={"score": 0.5}, turn_rewards=[(0, 0.25)], num_turns=2)
    metrics = {"step": 1, "reward/mean": 0.5, "timing/idle_s": [1.0]}
    tracker.metrics(metrics, SimpleNamespace(outputs=outputs))
    tracker.close()
    package.init.assert_called_once_with(project="p", config={"args": 1}, dir="there")
    logged = {"reward/mean": 0.5, "rollouts": package.Table.return_value}
    package.init.return_value.log.assert_called_once_with(logged, step=1)
    package.init.return_value.finish.assert_called_once()
    table = package.Table.call_args.kwargs
    fourth = dict(zip(table["columns"], table["data"][3], strict=True))
    assert len(table["data"]) == 64 and fourth["prompt"] == 3
    assert fourth["reward"] == 0.75 and fourth["trajectory"] == "[1, 100, 101]"


def test_a_template_that_ignores_tools_is_told_of(tokenizer):
    from examples import calculator

    prompt = [{"role": "user", "content": "hello"}]
    tokenizer = copy.copy(tokenizer)  # templates are cached by tokenizer
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.warns(UserWarning, match="chat template ignores tools"):
        check_tokenizer(tokenizer, tokenizer, {"prompt": prompt}, calculator)
