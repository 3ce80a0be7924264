"""data.Log: the files of a run, the table on the terminal, and what a resumed run keeps of them."""

import inspect
import io
import itertools
import json
import statistics
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

import data
from agent_loop import AgentLoopOutput
from flatrl import checkpoints, notices
from flatrl.log import Log, SilentLog
from flatrl.metrics import describe_eval


@dataclass
class Args:
    output_dir: str
    num_steps: int = 30
    wandb_project: str | None = None
    tracker: str = "wandb"
    lr: float = 0.5


TOKENIZER = SimpleNamespace(decode=lambda ids: "<|im_start|>" + "<|image_pad|>" * 3 + f" {ids} é")


@pytest.fixture
def args(tmp_path):
    return Args(str(tmp_path / "run"))


def read(file) -> list[dict]:
    return [json.loads(line) for line in file.open()]


def an_output(**changes) -> AgentLoopOutput:
    response = dict(response_ids=[7, 8], response_mask=[1, 0], response_logprobs=[-0.5, 0.0], response_versions=[4, -1])
    return AgentLoopOutput(prompt_ids=[1, 2], **response, **changes)


def test_args_versions_and_the_commit_are_kept(args, tmp_path):
    Log(args, None, 0)
    about = json.loads((tmp_path / "run" / "args.json").read_text())
    assert list(about) == ["args", "git", "versions", "command"]
    expected = {"output_dir": str(tmp_path / "run"), "num_steps": 30, "wandb_project": None, "tracker": "wandb",
                "lr": 0.5}  # fmt: skip
    assert about["args"] == expected and about["command"] == sys.argv
    assert {"torch", "transformers", "numpy"} <= set(about["versions"])
    assert list(about["versions"])[:2] == ["torch", "transformers"]
    assert (tmp_path / "run" / "rollouts").is_dir() and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_table_goes_on_if_a_tool_leaves_another_stdout(args, capsys, monkeypatch):
    """As contextlib.redirect_stdout does in two threads at a time."""
    log = Log(args, None, 0)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    log.say("a line")
    assert sys.stdout.getvalue() == ""
    monkeypatch.undo()
    assert capsys.readouterr().out == "a line\n"


def test_a_step_is_a_json_object_and_a_line_of_the_table(args, tmp_path, capsys):
    log = Log(args, None, 0)
    first = {"step": 0, "eval/reward": 0.25}
    second = {"step": 1, "reward/mean": 0.5, "throughput/tokens_per_s": 1234567.8, "rollout/logp_diff_max": 1.5e-6}
    log.metrics(first)
    log.metrics(second)
    assert read(tmp_path / "run" / "metrics.jsonl") == [first, second]
    titles, *lines = capsys.readouterr().out.splitlines()
    assert titles == (
        "     step  reward    eval  length  turns  entropy  clipfrac    grad  logp_diff  tokens/s  rollout_s  train_s"
    )
    empty = {name: " " * len(name) for name in titles.split()}  # a blank for every number that is not there
    empty |= {"eval": " " * 6, "grad": " " * 6}
    at_0 = empty | {"step": "   0/30  ", "eval": " 0.250"}
    at_1 = empty | {"step": "   1/30  ", "reward": " 0.500", "logp_diff": "  1.5e-06", "tokens/s": "1,234,568"}
    assert lines == ["  ".join(cells.values()) for cells in (at_0, at_1)]


def test_the_titles_come_again_every_20_lines(args, capsys):
    log = Log(args, None, 0)
    for step in range(41):
        log.metrics({"step": step})
    lines = capsys.readouterr().out.splitlines()
    assert [i for i, line in enumerate(lines) if line.startswith("     step")] == [0, 21, 42]


def test_a_resumed_run_goes_on_where_its_checkpoint_stood(args, tmp_path):
    log = Log(args, None, 0)
    rows = [{"step": step, "eval/reward": step / 8} if step % 2 == 0 else {"step": step} for step in range(6)]
    for row in rows:
        log.metrics(row)
    file = tmp_path / "run" / "metrics.jsonl"
    with file.open("a") as f:
        f.write('{"step": 1, "rewa')  # cut off by the kill
    log = Log(args, None, 3)
    assert read(file) == rows[:4]
    log.metrics({"step": 4})
    assert [row["step"] for row in read(file)] == [0, 1, 2, 3, 4]


def test_rollouts_are_a_line_each(args, tmp_path):
    log = Log(args, None, 0)
    extra = {"prompt": 5, "sample": 1, "segment": 0}
    outputs = [
        an_output(reward={"score": 1.0}, turn_rewards=[(0, 0.25)], text="é", extra=extra | {"index": "row-9"}),
        an_output(images=["pixels", "pixels"], metrics={"tool_calls": 2}),
    ]
    errors = [{"kind": "failed_reward", "prompt": 6}]
    log.rollouts("step_000004", outputs, errors)
    lines = (tmp_path / "run" / "rollouts" / "step_000004.jsonl").read_text().splitlines()
    assert lines[0] == (
        '{"index": "row-9", "total_reward": 1.25, "reward": {"score": 1.0}, "turn_rewards": [[0, 0.25]], "messages": []'
        ', "text": "é", "num_turns": 0, "stop_reason": "stop", "metrics": {}, "images": 0, "extra": {"prompt": 5, '
        '"sample": 1, "segment": 0, "index": "row-9"}, "unit": "", "group": "", "prompt_ids":[1,2],"response_ids":[7,8]'
        ',"response_mask":[1,0],"response_logprobs":[-0.5,0.0],"response_versions":[4,-1]}'
    )
    second = json.loads(lines[1])
    assert second["images"] == 2 and second["index"] is None
    assert json.loads(lines[2]) == errors[0] and len(lines) == 3
    assert outputs[0].extra["index"] == "row-9"  # the log changes nothing


def test_an_empty_phase_leaves_no_file_and_failures_alone_do(args, tmp_path):
    log = Log(args, None, 0)
    log.rollouts("greedy_000001", [], [])
    log.rollouts("step_000001", [], [{"kind": "failed_agent_loop"}])
    assert [file.name for file in (tmp_path / "run" / "rollouts").iterdir()] == ["step_000001.jsonl"]


def test_what_is_said_and_warned_about(args, capsys):
    log = Log(args, None, 0)
    log.say(notices.whole_text(an_output(reward=0.5, stop_reason="length"), TOKENIZER))
    log.say("hello")
    for text in ("odd", "odd", "even"):
        log.warn_once(text)
    log.close()
    out, err = capsys.readouterr()
    shown = "<|im_start|>[3 tokens of an image] [1, 2, 7, 8] é"
    assert out == f"{'-' * 80}\n{shown}\n{'-' * 40} reward 0.5, length {'-' * 40}\nhello\n"
    assert err == "warning: odd\nwarning: even\n"


def test_other_ranks_are_silent(args, tmp_path, capsys):
    log = SilentLog()
    log.metrics({"step": 1, "eval/reward": 1.0})
    log.rollouts("step_000001", [an_output()], [])
    log.say("hello")
    log.warn_once("odd")
    log.close()
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr() == ("", "")
    public = {name for name, _ in inspect.getmembers(Log, inspect.isfunction) if not name.startswith("_")}
    assert all(getattr(log, name)(1, 2) is None for name in public)


def test_wandb_gets_the_numbers(args, monkeypatch):
    logged, ends = [], []
    run = SimpleNamespace(log=lambda numbers, step: logged.append((numbers, step)), finish=lambda: ends.append(1))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda project, dir, config: run))
    args.wandb_project = "p"
    log = Log(args, None, 0)
    log.metrics({"step": 2, "reward/mean": 0.5, "timing/idle_s": [0.5]})
    log.close()
    assert logged == [({"reward/mean": 0.5}, 2)] and ends == [1]


def evaluated(*scores: list) -> list[AgentLoopOutput]:
    """Outputs of prompts 0, 1, ...: one rollout a score."""
    return [
        AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], response_logprobs=[-1.0], reward=score,
                        response_versions=[0], extra={"prompt": prompt, "sample": sample, "segment": 0})
        for prompt, group in enumerate(scores) for sample, score in enumerate(group)
    ]  # fmt: skip


def evaluation(outputs: list[AgentLoopOutput], rows: list[dict]) -> dict[str, float]:
    return describe_eval(outputs, data.by_unit(outputs), rows)


def test_an_evaluation_of_several_samples_a_row():
    """pass@j against all subsets of j rollouts; a row that lost a rollout counts as far as it goes."""
    scores = [[1.0, 0.5, 0.0, 2.0], [0.0] * 4, [{"score": 1.0}, 0.0, 0.99], [1.0] * 4]
    rows = [{"data_source": name} for name in ("gsm8k", "math", "gsm8k", "math")]
    got = evaluation(evaluated(*scores), rows)
    passed = [[1, 0, 0, 1], [0] * 4, [1, 0, 0], [1] * 4]
    for j in range(1, 5):
        chances = [statistics.fmean(map(any, itertools.combinations(row, j))) for row in passed if len(row) >= j]
        assert got[f"eval/pass@{j}"] == pytest.approx(statistics.fmean(chances), abs=1e-12)
    assert "eval/pass@5" not in got
    assert got["eval/reward"] == pytest.approx((3.5 + 0 + 1.99 + 4) / 15)
    assert got["eval/gsm8k/reward"] == pytest.approx((3.5 + 1.99) / 7) and got["eval/math/reward"] == 0.5
    rows_mean = [3.5 / 4, 0, 1.99 / 3, 1]
    assert got["eval/reward_stderr"] == pytest.approx(statistics.stdev(rows_mean) / 2)
    assert got["eval/response_length"] == 1

    one = evaluation(evaluated([0.25]), [{}])
    assert one["eval/pass@1"] == one["eval/reward_stderr"] == 0 and one["eval/reward"] == 0.25
    assert not [name for name in one if name.count("/") > 1]


def test_the_best_checkpoint_is_that_of_the_highest_evaluation_and_the_latest_of_equals(tmp_path):
    rewards = {1: 0.0, 2: 0.75, 3: None, 4: 0.75, 5: -0.25}
    rows = [{"step": step} | ({} if x is None else {"eval/reward": x}) for step, x in rewards.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, best in ((3, 3), (1, 1), (5, 1), (2, 2), (4, 4)):
        folder = tmp_path / f"checkpoints/step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "step.json").write_text("{}")
        assert checkpoints.best_checkpoint(tmp_path).name == f"step_{best:06d}"
