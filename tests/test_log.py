"""The log: the rollouts that it writes, and the metrics of an evaluation."""

import itertools
import statistics

import pytest
from conftest import output_of, rows_of

import data
from agent_loop import AgentLoopOutput
from flatrl.log import Log
from flatrl.metrics import describe_eval
from train import Args


def an_output(**changes) -> AgentLoopOutput:
    return output_of([1, 0], ids=[7, 8], version=4, logprob=-0.5, **changes)


def test_rollouts_are_a_line_each(tmp_path):
    args = Args(output_dir=str(tmp_path / "run"))
    log = Log(args, None, 0)
    place = {"prompt": 5, "sample": 1, "segment": 0, "index": "row-9"}
    outputs = [
        an_output(reward={"score": 1.0}, turn_rewards=[(0, 0.25)], text="é", extra=place),
        an_output(images=["pixels", "pixels"], metrics={"tools": {1}}, extra={"prompt": 6}),
    ]
    errors = [{"kind": "failed_reward", "prompt": 6}]
    log.rollouts("step_000004", outputs, errors)
    log.wait()
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
    log.wait()
    *kept, third = rows_of(tmp_path / "run/rollouts/step_000005.jsonl")
    assert [line["extra"] for line in kept] == [x for x in places if x["prompt"] in (3, 7)]
    assert third == errors[0]


def test_rollouts_that_cannot_be_written_end_the_run(tmp_path):
    log = Log(Args(output_dir=str(tmp_path)), None, 0)
    (tmp_path / "rollouts").touch()
    log.rollouts("step_000001", [an_output()], [])
    with pytest.raises(FileExistsError):
        log.metrics({"step": 1})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_an_evaluation_of_several_samples_a_row():
    """pass@j against all subsets of j rollouts; a row that lost a rollout counts below that j."""
    scores = [[1.0, 0.5, 0.0, 2.0], [0.0] * 4, [{"score": 1.0, "form": 0.5}, 0.0, 0.99], [1.0] * 4]
    rows = [{"data_source": name} for name in ("gsm8k", "math", "gsm8k", "math")]
    outputs = []
    for prompt, group in enumerate(scores):
        for sample, score in enumerate(group):
            extra = {"prompt": prompt, "sample": sample, "segment": 0}
            outputs.append(an_output(reward=score, extra=extra))
    got = describe_eval(outputs, data.by_unit(outputs), rows)
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
