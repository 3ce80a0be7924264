"""flatrl/notices.py and trackers.py: what a run tells its user besides its table."""

import copy
import json
import sys
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import run
from test_data import make_output

from agent_loop import BadInput
from flatrl import notices, tables, trackers
from flatrl.rows import check_tokenizer
from train import Args

PROMPT = [{"role": "user", "content": "hello"}]
NETWORK = SimpleNamespace(model=SimpleNamespace(num_parameters=lambda: 9900), is_packed=True)


@pytest.fixture
def log(tmp_path, process_group):
    """What Notices uses of Log; its report and its warnings about steps are off."""
    args = Args(model="m", task="t.py", output_dir="there", lr=0.5, dtype="float32")
    log = SimpleNamespace(args=args, folder=tmp_path, said=[], tokenizer=None, steps_done=0)
    log.say = log.warn_once = log.said.append
    return log


def notices_of(log, about=()) -> notices.Notices:
    found = notices.Notices(log, dict(about), [])
    found.report = SimpleNamespace(step=lambda *_: None, close=lambda: None)
    found.watch = SimpleNamespace(step=lambda *_: ["something else"])
    return found


def sampled(n: int, **attributes) -> list:
    outputs = []
    for i in range(n):
        extra = {"prompt": i, "sample": 0, "segment": 0}
        outputs.append(make_output([1], [1, 1], extra=extra, **attributes))
    return outputs


def row_of(text: str, **columns) -> dict:
    return {"prompt": [{"role": "user", "content": text}], **columns}


def started(log, train: list, val: list, n_read: int = 0) -> list[str]:
    """What is said at the start; n_read: the training rows before long ones were dropped."""
    rows = {"train": train, "val": val}
    read = {"train": range(n_read or len(train)), "val": val}
    notices_of(log).start(rows, read, NETWORK, torch.device("meta"))
    return log.said


@pytest.mark.parametrize("flags, told", [
    ({"clip_low": 0.1, "epochs": 2}, "32 prompts x 8 = 256 trajectories a step, 2 update(s) each"),
    ({"algo": "sft"}, "32 demonstrations a step, 1 update(s) each"),
    ({"num_steps": 0, "eval_samples": 4}, "evaluation: 4 trajectories a validation row"),
])  # fmt: skip
def test_the_first_lines_tell_what_is_about_to_happen(log, flags, told):
    log.args = Args(model="m", task="t.py", output_dir="there", lr=0.5, **flags)
    rows = [row_of(f"{i}") for i in range(3)]
    [said] = started(log, rows[:2], rows[2:], n_read=3)
    assert "2 training rows (1 overlong ones dropped)" in said and told in said
    assert ("but clip_low 0.1" in said) == ("clip_low" in flags)
    assert "no validation rows, so no evaluation" in started(log, rows, [])[-1]


def test_questions_of_training_among_the_validation_rows_are_counted(log, monkeypatch):
    monkeypatch.setattr(notices, "MAX_ROWS_ON_DISK", 3)
    train = [row_of(f"{i}", index=i) for i in range(5)]
    val = [row | {"index": 100} for row in train[:3]] + [{"prompt": PROMPT}]
    # Games with other seeds and the same words are not the same, nor need images be.
    for seed, split in enumerate([train, val]):
        kwargs = {"interaction_kwargs": {"seed": seed}}
        split.append({"prompt": PROMPT, "extra_info": kwargs})
        split.append({"prompt": PROMPT, "images": ["a.png"]})
    problem = "validation rows have the prompt of a training row: eval/reward is too good"
    assert started(log, train, val)[1:] == [f"3 of 5 {problem}"]
    log.said.clear()
    many = {i: row_of(f"{i}") for i in range(50) if i != 1}  # row 1 is malformed
    on_disk = tables.Rows(many.__getitem__, range(50))  # only the first three are read
    assert started(log, on_disk, [many[2], many[3]])[1:] == [f"1 of 2 {problem}"]


@pytest.mark.parametrize("flags, n_parameters, is_high", [
    ({"lr": 3e-4}, 5e8, True),
    ({"lr": 2e-5}, 5e8, False),
    ({"lr": 3e-4}, 135e6, False),
    ({"lr": 1e-4, "lora_rank": 8}, 5e8, False),
    ({"lr": 3e-4, "num_steps": 0}, 5e8, False),
])  # fmt: skip
def test_a_high_learning_rate_for_a_large_model(flags, n_parameters, is_high):
    said = notices.high_rate(Args(**flags), n_parameters)
    assert said.startswith("--lr 0.0003 is high for 500M parameters") == is_high == bool(said)


@pytest.mark.parametrize("row, named", [
    (row_of([{"type": "image"}], images=["a.png"], image=b"x"), None),
    (row_of("hi", video=None), None),
    (row_of("hi", image=b"x", videos=["a.mp4"]), "image, videos"),
])  # fmt: skip
def test_images_and_videos_that_the_policy_does_not_see_are_named(log, row, named):
    said = f"the policy does not see what the training rows hold as {named}: --image_key names"
    assert [text[: len(said)] for text in started(log, [row], [])[1:]] == [said] * bool(named)


def test_a_template_that_ignores_tools_is_told_of(tokenizer):
    from examples import calculator

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_tokenizer(tokenizer, tokenizer, {"prompt": PROMPT}, calculator)
    tokenizer = copy.copy(tokenizer)  # templates are cached by tokenizer
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for prompt in (PROMPT, []):  # without one an Interaction speaks first
        with pytest.warns(UserWarning, match="chat template ignores tools"):
            check_tokenizer(tokenizer, tokenizer, {"prompt": prompt}, calculator)


def test_a_step_that_teaches_nothing_is_told_of_until_one_does(log, monkeypatch):
    monkeypatch.setattr(notices, "SHOW_EVERY", 6)
    found = notices_of(log)
    outputs = sampled(2, reward=0.0, metrics={"tool_calls": 0}, stop_reason="length")
    first = outputs[0]
    monkeypatch.setattr(notices, "whole_text", lambda output, _: f"it is {output is first}")
    rollouts = SimpleNamespace(sampled=outputs, outputs=outputs, trained=[])
    mask = torch.tensor([[1.0, 0.0]])  # the token behind the mask teaches nothing
    for step, advantage in enumerate((0, 0, 1, 0, 0, 0, 0, 0), 1):
        advantages = torch.tensor([[advantage, 5.0]])
        batch = {"advantages": advantages, "response_mask": mask}
        if step == 7:
            first.extra["demonstration"] = True
        found.step({"step": step}, rollouts, batch)
    found.step({"step": 9})  # an evaluation alone
    assert log.said.count("something else") == 8
    said = [text for text in log.said if text != "something else"]
    beginnings = [
        "warning: step 1 taught nothing: 0 of 2 called a tool, 100% were cut off by a limit",
        "the first trajectory of step 1:\nit is True",
        "warning: step 4 taught nothing: ",
        "the first demonstration of step 7:\nit is True",
    ]
    assert len(said) == 4 and all(map(str.startswith, said, beginnings))
    assert ", all rewards are 0 (" in said[0]


def test_a_step_in_which_all_is_right_is_no_warning(log):
    found = notices_of(log)
    mask = torch.ones(1, 2)
    for step, (rewards, advantage) in enumerate([((0, 1), 1), ((1, 1), 0), ((1, 1), 0)], 2):
        outputs = [sampled(1, reward=float(reward))[0] for reward in rewards]
        rollouts = SimpleNamespace(sampled=outputs, outputs=[], trained=[])
        batch = {"advantages": advantage * mask, "response_mask": mask}
        found.step({"step": step}, rollouts, batch)
    said = [text for text in log.said if "taught nothing" in text]
    assert said == ["step 3 taught nothing: all rewards are 1, the highest"]


@pytest.mark.parametrize("reward_coef, n_warnings", [(0.0, 0), (1.0, 1)])
def test_distillation_by_the_loss_teaches_without_advantages(reward_coef, n_warnings, log):
    log.args.reward_coef = reward_coef
    batch = {"advantages": torch.zeros(1, 2), "response_mask": torch.ones(1, 2)}
    rollouts = SimpleNamespace(sampled=sampled(2, reward=0.0), outputs=[], trained=[])
    notices_of(log).step({"step": 2, "actor/kl": 0.5}, rollouts, batch)
    assert sum("taught nothing" in text for text in log.said) == n_warnings
    notices_of(log).step({"step": 2, "actor/imitation_loss": 0.5}, rollouts, batch)
    assert sum("taught nothing" in text for text in log.said) == n_warnings


def test_rollouts_that_failed_are_counted_below_the_table_and_at_the_end(log):
    failed = {"rollout/failed_agent_loop": 2, "rollout/failed_reward": 3, "eval/failed": 73}
    found = notices_of(log)
    found.step({"step": 3, "eval/trajectories": 100} | dict.fromkeys(failed, 0))
    assert log.said == []
    found.step({"step": 2, "eval/trajectories": 27, "rollout/trajectories": 11.0} | failed)
    assert log.said[0].startswith("warning: 5 of 16 rollouts of step 2 failed")
    said = "73 of 100 rollouts of the evaluation at step {} failed or were skipped"
    assert log.said[1].startswith(f"warning: {said.format(2)}") and len(log.said) == 2

    rows = []
    for step, (reward, n) in enumerate([(0.5, 73), (1.0, 73), (0.7, 73), (0.9, 0), (0.8, 73)]):
        counts = {"eval/failed": n, "eval/trajectories": 100 - n}
        rows.append({"step": step, "eval/reward": reward} | counts)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (log.folder / "metrics.jsonl").write_text(text)
    summary = notices.summary(Args(output_dir=str(log.folder)), 4)
    named = [step for step in range(5) if said.format(step) in summary]
    assert named == [1, 4]  # the best and the last


def test_the_summary_tells_how_it_went_and_what_to_do_next(tmp_path):
    args = Args(output_dir=str(tmp_path), num_steps=4)
    rows = [
        {"step": 0, "eval/reward": 0.25},
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "reward/mean": 0.75, "eval/reward": 1.0},
        {"step": 3, "reward/mean": 0.625, "eval/reward": 1.0},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    saved = tmp_path / "checkpoints/step_000002"
    saved.mkdir(parents=True)
    said = notices.summary(args, 2, saved)
    assert "\nreward 0.500 -> 0.625, best 0.750 at step 2\n" in f"\n{said}"
    assert "\neval reward 0.250 -> 1.000, best 1.000 at step 2\n" in said
    assert said.endswith(" --resume --num_steps 2") and "--model" not in said
    assert "not saved" not in notices.summary(args, 2, saved.with_name("step_000003"))
    for step, remark in (0, "; the best saved checkpoint is step_000000, 0.250"), (1, ""):
        said = notices.summary(args, 2, saved.with_name(f"step_00000{step}"))
        assert f", best 1.000 at step 2 (not saved{remark})\n" in said
    (tmp_path / "final").mkdir()
    said = notices.summary(args, 4)
    assert f"--num_steps 0 --model {tmp_path}/final --output_dir {tmp_path}-eval\n" in said
    assert said.endswith(" --resume --num_steps 8")
    args.stop_at_reward = 0.5
    assert "\ncontinue: the same command, with --resume\n" in notices.summary(args, 3)
    args.num_steps = 3  # it has stopped there
    assert notices.summary(args, 3).endswith(" --num_steps 6 and without --stop_at_reward")
    args.lr_schedule = "linear"  # its end was the schedule's
    assert "--resume" not in notices.summary(args, 3)


def test_wandb_gets_numbers_and_a_table_of_trajectories(log, monkeypatch):
    package = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", package)
    log.args.wandb_project = "p"
    log.tokenizer = SimpleNamespace(decode=str)
    found = notices_of(log, {"args": 1})
    outputs = sampled(70, reward={"score": 0.5}, turn_rewards=[(0, 0.25)], num_turns=2)
    metrics = {"step": 1, "reward/mean": 0.5, "timing/idle_s": [1.0]}
    found.step(metrics, SimpleNamespace(outputs=outputs))
    found.close()
    package.init.assert_called_once_with(project="p", config={"args": 1}, dir="there")
    logged = {"reward/mean": 0.5, "rollouts": package.Table.return_value}
    package.init.return_value.log.assert_called_once_with(logged, step=1)
    package.init.return_value.finish.assert_called_once()
    table = package.Table.call_args.kwargs
    fourth = dict(zip(table["columns"], table["data"][3], strict=True))
    assert len(table["data"]) == 64 and fourth["prompt"] == 3
    assert fourth["reward"] == 0.75 and fourth["trajectory"] == "[1, 100, 101]"


def test_wandb_without_a_network_is_refused_first(cache, tmp_path):
    account = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    account |= {"WANDB_HTTP_TIMEOUT": "1", "HOME": tmp_path}
    flags = ["--task", "tests/tiny_task.py", "--wandb_project", "p", "--output_dir", tmp_path / "o"]
    printed = run(*flags, code=2, cache=cache, **account)
    line = printed.splitlines()[-1]
    assert line.startswith(f"train.py: error: {trackers.FAILED}") and "127.0.0.1:9" in line
    assert not (tmp_path / "o").exists() and "training rows" not in printed


def test_wandb_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(BadInput, match="pip install wandb"):
        trackers.check_account()
