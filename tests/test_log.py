"""The log: the files of a run, its table, and how a resumed run starts."""

import itertools
import json
import statistics
import sys

import pytest
from conftest import output_of, rows_of

import data
from agent_loop import AgentLoopOutput
from flatrl.log import Log
from flatrl.metrics import describe_eval
from train import Args


@pytest.fixture
def args(tmp_path):
    return Args(output_dir=str(tmp_path / "run"), num_steps=30)


def an_output(**changes) -> AgentLoopOutput:
    return output_of([1, 0], ids=[7, 8], version=4, logprob=-0.5, **changes)


def test_args_versions_and_the_commit_are_kept(args, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    Log(args, None, 0, "a hash")
    about = json.loads((tmp_path / "run/args.json").read_text())
    assert {"torch", "transformers", "numpy"} <= set(about.pop("versions"))
    about.pop("git")  # "" where there is none
    launched = {"command": sys.argv, "processes": 2}
    assert about == {"args": vars(args), "training_rows": "a hash"} | launched


def test_a_step_is_a_json_object_and_a_line_of_the_table(args, tmp_path, capsys):
    log = Log(args, None, 0)
    first = {"step": 0, "eval/reward": 0.25}
    second = {"step": 1, "reward/mean": 0.5, "rollout/logp_diff_max": 1.5e-6}
    log.metrics(first)
    log.metrics(second)
    assert rows_of(tmp_path / "run/metrics.jsonl") == [first, second]
    titles, at_0, at_1 = map(str.split, capsys.readouterr().out.splitlines())
    assert titles[:3] == ["step", "reward", "eval"]
    assert at_0 == ["0/30", "0.250"]
    assert at_1 == ["1/30", "0.500", "1.5e-06"]


def test_a_resumed_run_keeps_the_lines_up_to_its_checkpoint(args, tmp_path):
    log = Log(args, None, 0)
    rows = [{"step": step} for step in range(6)]
    for row in rows:
        log.metrics(row)
    file = tmp_path / "run/metrics.jsonl"
    args.resume = True
    Log(args, None, 3).metrics(rows[4])
    assert rows_of(file) == rows[:5]


def test_rollouts_are_a_line_each(args, tmp_path):
    log = Log(args, None, 0)
    place = {"prompt": 5, "sample": 1, "segment": 0, "index": "row-9"}
    outputs = [
        an_output(reward={"score": 1.0}, turn_rewards=[(0, 0.25)], text="é", extra=place),
        an_output(images=["pixels", "pixels"], metrics={"tools": {1}}, extra={"prompt": 6}),
    ]
    errors = [{"kind": "failed_reward", "prompt": 6}]
    log.rollouts("step_000004", outputs, errors)
    first, second, third = rows_of(tmp_path / "run/rollouts/step_000004.jsonl")
    expected = vars(outputs[0]) | {"index": "row-9", "total_reward": 1.25, "images": 0}
    assert first == expected | {"turn_rewards": [[0, 0.25]], "advantages": None}
    assert second["images"] == 2 and second["index"] is None
    assert second["metrics"] == {"tools": "{1}"}
    assert third == errors[0]
    assert outputs[1].images == ["pixels", "pixels"]

    args.dump_rollouts = 0.25  # whole groups
    places = [{"prompt": prompt, "sample": sample} for prompt in range(9) for sample in (0, 1)]
    log.rollouts("step_000005", [an_output(extra=place) for place in places], errors)
    *kept, third = rows_of(tmp_path / "run/rollouts/step_000005.jsonl")
    assert [line["extra"] for line in kept] == [x for x in places if x["prompt"] in (3, 7)]
    assert third == errors[0]


def evaluation(scores: list[list], rows: list[dict]) -> dict[str, float]:
    """The metrics of outputs of prompts 0, 1, ...: one rollout a score."""
    outputs = []
    for prompt, group in enumerate(scores):
        for sample, score in enumerate(group):
            extra = {"prompt": prompt, "sample": sample, "segment": 0}
            outputs.append(an_output(reward=score, extra=extra))
    return describe_eval(outputs, data.by_unit(outputs), rows)


def test_an_evaluation_of_several_samples_a_row():
    """pass@j against all subsets of j rollouts; a row that lost a rollout counts below that j."""
    scores = [[1.0, 0.5, 0.0, 2.0], [0.0] * 4, [{"score": 1.0, "form": 0.5}, 0.0, 0.99], [1.0] * 4]
    rows = [{"data_source": name} for name in ("gsm8k", "math", "gsm8k", "math")]
    got = evaluation(scores, rows)
    passed = [[1, 0, 0, 1], [0] * 4, [1, 0, 0], [1] * 4]
    for j in range(1, 5):
        chances = []
        for row in passed:
            if len(row) >= j:
                chances.append(statistics.fmean(map(any, itertools.combinations(row, j))))
        assert got[f"eval/pass@{j}"] == pytest.approx(statistics.fmean(chances), abs=1e-12)
    assert "eval/pass@5" not in got
    assert got["eval/reward"] == pytest.approx((3.5 + 0 + 1.99 + 4) / 15)
    assert got["eval/trajectories"] == 15
    assert got["eval/gsm8k/reward"] == pytest.approx((3.5 + 1.99) / 7)
    assert got["eval/math/reward"] == got["eval/reward_part/form"] == 0.5
    of_rows = [3.5 / 4, 0, 1.99 / 3, 1]
    assert got["eval/reward_stderr"] == pytest.approx(statistics.stdev(of_rows) / 2)
    assert got["eval/response_length"] == 2
