"""flatrl/notices.py, terminal.py and trackers.py: what a run tells its user besides its table."""

import copy
import io
import json
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from test_data import make_output

from agent_loop import BadInput
from flatrl import notices, tables, terminal
from flatrl.rows import check_tokenizer
from train import Args

PROMPT = [{"role": "user", "content": "hello"}]
NETWORK = SimpleNamespace(model=SimpleNamespace(num_parameters=lambda: 9900), packed=True)


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


# ---------------------------------------------------------------- the start


def started(log, train: list, val: list, n_read: int = 0) -> list[str]:
    """What is said at the start; n_read: the training rows before long ones were dropped."""
    rows = {"train": train, "val": val}
    read = {"train": range(n_read or len(train)), "val": val}
    notices_of(log).start(rows, read, NETWORK, torch.device("meta"))
    return log.said


GRPO = """grpo: the default flags (docs/algorithms.md)
32 prompts x 8 = 256 trajectories a step, 1 update(s) each (so the ratio is 1, and clips have no \
effect), lr 0.5; 40 steps; writing there"""
CHANGED = """grpo: the default flags (docs/algorithms.md), but clip_low 0.1
32 prompts x 8 = 256 trajectories a step, 2 update(s) each, lr 0.5; 40 steps; writing there"""
SFT = "32 demonstrations a step, 1 update(s) each"
ROLLOUTS = "32 prompts x 8 = 256 trajectories a step, and no update; 40 steps; writing there"
EVALUATION = "evaluation: 4 trajectories a validation row, at temperature 1; writing there"


@pytest.mark.parametrize("flags, told", [
    ({}, GRPO),
    ({"clip_low": 0.1, "epochs": 2}, CHANGED),
    ({"algo": "sft"}, SFT),
    ({"rollout_only": True}, ROLLOUTS),
    ({"num_steps": 0, "eval_samples": 4}, EVALUATION),
])  # fmt: skip
def test_the_first_lines_tell_what_is_about_to_happen(log, flags, told):
    log.args = Args(model="m", task="t.py", output_dir="there", lr=0.5, dtype="float32", **flags)
    rows = [{"prompt": f"{i}"} for i in range(3)]
    [said] = started(log, rows[:2], rows[2:], n_read=3)
    first = "t.py: 2 training rows (1 overlong ones dropped), "
    first += "1 validation rows (0 overlong ones dropped)\n"
    assert said.startswith(first + "m: 0.01M parameters, float32, 1 x meta\n") and told in said


def test_questions_of_training_among_the_validation_rows_are_counted(log, monkeypatch):
    monkeypatch.setattr(notices, "MAX_ROWS_ON_DISK", 3)
    train = [{"prompt": [{"role": "user", "content": f"{i}"}], "index": i} for i in range(5)]
    val = [row | {"index": 100} for row in train[:3]] + [{"prompt": PROMPT}]
    # Games with other seeds and the same words are not the same, nor need images be.
    for seed, split in enumerate([train, val]):
        kwargs = {"interaction_kwargs": {"seed": seed}}
        split.append({"prompt": PROMPT, "extra_info": kwargs})
        split.append({"prompt": PROMPT, "images": ["a.png"]})
    problem = "validation rows have the prompt of a training row: eval/reward is too good"
    assert started(log, train, val)[1:] == [f"3 of 5 {problem}"]
    log.said.clear()
    many = [{"prompt": f"{i}"} for i in range(50)]
    on_disk = tables.Rows(many.__getitem__, range(50))  # only the first three are read
    assert started(log, on_disk, many[2:4])[1:] == [f"1 of 2 {problem}"]


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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_tokenizer(tokenizer, tokenizer, {"prompt": PROMPT}, SimpleNamespace())


# ---------------------------------------------------------------- a step that teaches nothing


def test_why_a_step_taught_nothing():
    outputs = sampled(4, reward=0.0, metrics={"tool_calls": 0}, stop_reason="length")
    outputs[0].metrics = {"tool_calls": 2}
    outputs[1].stop_reason = "stop"
    beginning = "1 of 4 called a tool, 75% were cut off by a limit (--max_response_tokens, "
    assert notices.why_nothing(outputs).startswith(beginning)
    assert ", all rewards are 0 (" in notices.why_nothing(outputs)
    different = sampled(1, reward=0.0) + sampled(1, reward=1.0)
    assert notices.why_nothing(different).startswith("all groups have equal rewards (")


def test_a_step_that_teaches_nothing_is_told_of_until_one_does(log, monkeypatch):
    monkeypatch.setattr(notices, "SHOW_EVERY", 6)
    monkeypatch.setattr(notices, "whole_text", lambda output, tokenizer: f"it is {output}")
    found = notices_of(log)
    outputs = sampled(2, reward=0.0)
    rollouts = SimpleNamespace(sampled=outputs, outputs=["the first"], trained=[])
    mask = torch.tensor([[1.0, 0.0]])  # the token behind the mask teaches nothing
    for step, advantage in enumerate((0, 0, 1, 0, 0, 0, 0, 0), 1):
        advantages = torch.tensor([[advantage, 5.0]])
        batch = {"advantages": advantages, "response_mask": mask}
        found.step({"step": step}, rollouts, batch)
    found.step({"step": 9})  # an evaluation alone
    assert log.said.count("something else") == 8
    said = [text for text in log.said if text != "something else"]
    beginnings = [
        "warning: step 1 taught nothing: all rewards are 0",
        "the first trajectory of step 1:\nit is the first",
        "warning: step 4 taught nothing: ",
        "the first trajectory of step 7:",
    ]
    assert len(said) == 4 and all(map(str.startswith, said, beginnings))


# ---------------------------------------------------------------- the end


def test_the_summary_tells_how_it_went_and_what_to_do_next(tmp_path):
    folder = tmp_path / "run"
    args = Args(output_dir=str(folder), num_steps=4)
    saved = folder / "checkpoints/step_000002"
    saved.mkdir(parents=True)
    rows = [
        {"step": 0, "eval/reward": 0.25},
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "reward/mean": 0.75, "eval/reward": 1.0},
        {"step": 3, "reward/mean": 0.625, "eval/reward": 1.0},
    ]
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    again = "the same command, with"
    first = [
        "reward 0.500 -> 0.625, best 0.750 at step 2",
        "eval reward 0.250 -> 1.000, best 1.000 at step 2",
        f"report: {folder}/report.html",
    ]
    assert notices.summary(args, 2).split("\n") == [*first, f"continue: {again} --resume"]
    final = folder / "final"
    final.mkdir()
    first += [
        f"evaluate: {again} --num_steps 0 --model {final} --output_dir {folder}-eval",
        f"talk to it: python examples/chat.py {final} --task examples/calculator.py",
    ]
    more = f"more steps: {again} --resume --num_steps 8"
    assert notices.summary(args, 4).split("\n") == [*first, more]
    args.lr_schedule = "linear"  # its end was the schedule's
    assert notices.summary(args, 4).split("\n") == first
    file.write_text(json.dumps(rows[0]))
    final.rmdir()
    saved.rmdir()
    assert notices.summary(args, 0) == f"eval reward 0.250\n{first[2]}"


# ---------------------------------------------------------------- bars


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_bars_are_on_terminals_of_the_main_rank_alone(monkeypatch):
    def drawn(screen, rank="0"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(sys, "stderr", screen)
        assert list(terminal.Bar([1, 2], "update")) == [1, 2]
        with terminal.shown("starting the engine"):
            pass
        return screen.getvalue()

    text = drawn(Screen())
    assert "update:   0%" in text and "starting the engine" in text
    assert text.split("\r")[-2].strip() == ""  # gone at the end
    assert drawn(io.StringIO()) == drawn(Screen(), rank="1") == ""


# ---------------------------------------------------------------- Weights & Biases


class Wandb:
    """The package, as far as it is used; it is its own run."""

    def __init__(self):
        self.logged = []

    def init(self, **settings):
        self.settings = settings
        return self

    def Table(self, columns, data):
        return [dict(zip(columns, row, strict=True)) for row in data]

    def log(self, numbers, step):
        self.logged.append((numbers, step))

    def finish(self):
        self.logged.append("finished")


def test_wandb_gets_numbers_and_a_table_of_trajectories(log, monkeypatch):
    package = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", package)
    log.args.wandb_project = "p"
    log.tokenizer = SimpleNamespace(decode=str)
    found = notices_of(log, {"args": 1})
    outputs = sampled(70, reward={"score": 0.5}, turn_rewards=[(0, 0.25)], num_turns=2)
    found.step({"step": 0, "eval/reward": 0.5})
    metrics = {"step": 1, "reward/mean": 0.5, "timing/idle_s": [1.0]}
    found.step(metrics, SimpleNamespace(outputs=outputs))
    found.close()
    assert package.settings == {"project": "p", "config": {"args": 1}, "dir": "there"}
    evaluation, (logged, step), end = package.logged
    table = logged.pop("rollouts")
    assert evaluation == ({"eval/reward": 0.5}, 0) and end == "finished"
    assert (logged, step) == ({"reward/mean": 0.5}, 1)
    assert len(table) == 64
    assert table[3] == {
        "prompt": 3,
        "sample": 0,
        "index": "None",
        "reward": 0.75,
        "turns": 2,
        "stop_reason": "stop",
        "trajectory": "[1, 100, 101]",
    }


def test_wandb_that_is_not_installed(log, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    log.args.wandb_project = "p"
    with pytest.raises(BadInput, match="pip install wandb"):
        notices_of(log)
