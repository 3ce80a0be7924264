"""A task's sampler: what it is told, which rows are drawn. See test_train.py for a whole run."""

import json
import random

import pytest
from conftest import REPO
from test_async import Task, make_run, models  # noqa: F401  (fixtures)

import data
import train
from flatrl.metrics import Clock


@pytest.fixture
def sampled(make_run):  # noqa: F811
    """Makes a run on 7 rows, whose task has a sampler."""

    def make(sampler, **flags):
        task = Task()
        task.sampler = sampler
        run = make_run(task, **flags)
        run.run.history = []
        run.run.rows = {"train": [None] * 7}
        run.run.clock = Clock()
        run.run.done = 0
        return run

    return make


@pytest.mark.parametrize("staleness", [0, 1])
def test_rows_are_the_samplers_and_rewards_reach_it(sampled, staleness):
    told = []

    def choose(history) -> int:
        return random.Random(json.dumps(history)).randrange(7)

    def sampler(history):
        told.append(json.loads(json.dumps(history)))
        row = choose(history)
        history.clear()  # it is a copy
        return row

    run = sampled(sampler, max_staleness=staleness)
    rows = []
    for step in range(4):
        rollouts = run.step(step)
        places = [output.extra for output in rollouts.outputs]
        rows += [(extra["prompt"], extra["index"]) for extra in places if extra["sample"] == 0]
        train.add_rewards(run.run, rollouts, data.make_batch(rollouts.trained))
        run.run.done += 1
    history = run.run.history
    # One call for each prompt, in order, with all before it. The entry begins with its answer.
    assert [len(before) for before in told] == list(range(len(history)))
    assert [entry[0] for entry in history] == [choose(before) for before in told]
    assert sorted(rows) == [(prompt, history[prompt][0]) for prompt in range(8)]
    # The rewards of both members (their row's number) came by the next choice.
    ahead = 2 * staleness  # prompts a step, drawn so many steps before they are needed
    assert [rewards for _, _, *rewards in history[:8]] == [[row, row] for row, *_ in history[:8]]
    assert len(history) == 8 + ahead and told[2 + ahead][:2] == history[:2]


def test_the_curriculum_prefers_groups_that_disagree_and_comes_back_to_the_others():
    task = data.load_task(str(REPO / "examples/curriculum.py"))
    history = []
    for step in range(180):
        start = len(history)
        for _ in range(8):
            history.append([task.sampler(history), step])
        chosen = [entry[0] for entry in history[start:]]
        assert len(set(chosen)) == 8  # none while it is under way
        for entry in history[start:]:
            entry += [0.0, 0.0] if entry[0] % 16 else [0.0, 1.0]
    assert len({row for row, *_ in history}) == 512  # each is tried
    late = [row % 16 == 0 for row, *_ in history[-200:]]
    assert 0.8 < sum(late) / 200 < 1
