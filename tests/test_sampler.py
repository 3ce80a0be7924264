"""A task's sampler: what it is told, which rows are drawn, how a resumed run goes on."""

import json
import random
import shutil

import pytest
from conftest import REPO, TINY, metrics_of, rollouts_of, run
from test_async import Task, make_run, models  # noqa: F401  (fixtures)

import data
import train
from agent_loop import BadInput


def drawn(rollouts) -> list[tuple[int, int]]:
    """The (prompt, row) of each group."""
    firsts = [output.extra for output in rollouts.outputs if output.extra["sample"] == 0]
    return [(extra["prompt"], extra["index"]) for extra in firsts]


@pytest.fixture
def sampled(make_run):  # noqa: F811
    """Makes a run on 7 rows, whose task has a sampler."""

    def make(sampler, task=None, **flags):
        task = task or Task()
        task.sampler = sampler
        run = make_run(task, **flags)
        run.run.history = []
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
        return choose(history)

    run = sampled(sampler, max_staleness=staleness)
    rows = []
    for step in range(4):
        rollouts = run.step(step)
        rows += drawn(rollouts)
        train.add_rewards(run.run, rollouts, data.make_batch(rollouts.trained), {})
        run.run.done += 1
    history = run.run.history
    # One call for each prompt, in order, with all before it. The entry is its answer.
    assert [len(before) for before in told] == list(range(len(history)))
    assert [entry[0] for entry in history] == [choose(before) for before in told]
    ahead = 2 * staleness  # prompts a step, drawn so many steps before they are needed
    assert len(history) == 8 + ahead
    assert [entry[1] for entry in history[: 2 + ahead]] == [0] * (2 + ahead)
    # Every row that was drawn is the chosen one. The rewards of both members (its index)
    # came by the next choice.
    assert sorted(rows) == [(prompt, history[prompt][0]) for prompt in range(8)]
    for prompt, (row, _, *rewards) in enumerate(history):
        assert rewards == [row, row] * (prompt < 8)
    assert told[2 + ahead][:2] == history[:2] and told[1 + ahead][0][2:] == []


def test_rows_of_replacements_are_chosen_at_the_start(sampled):
    """Later one rank may have seen more rewards than another."""
    task = Task(outcome=lambda n, j: float(j))
    run = sampled(lambda history: len(history) % 7, task, max_staleness=0, max_gen_batches=3)
    assert drawn(run.step(0)) == [(0, 0), (1, 1)]  # none was replaced
    assert run.run.history == [[row, 0] for row in range(2 + 2 * 2)]
    run = sampled(lambda history: 7, max_staleness=0)
    with pytest.raises(BadInput, match=r"the task's sampler failed: its result has 7"):
        run.step(0)


def test_a_row_that_can_not_be_read_costs_its_prompt_alone(make_run):  # noqa: F811
    """Only the first rows of a large table are read before the start."""
    run = make_run(Task(), max_staleness=0)
    good, bad = data.prompt_order(7, 0, 2, run.args.seed)

    class Table(list):
        def __getitem__(self, index):
            if index == bad:
                raise BadInput("it is no row")
            return super().__getitem__(index)

    run.pool.end()
    rows = run.run.rows["train"]
    run = make_run(run.task, max_staleness=0, rows=Table(rows))
    rollouts = run.step(0)
    assert drawn(rollouts) == [(0, good)]
    assert [error["prompt"] for error in rollouts.errors] == [1, 1]
    assert "it is no row" in rollouts.errors[0]["error"]


SAMPLED = f"""
import json, random, sys
sys.path.insert(0, {str(REPO / "tests")!r})
from tiny_task import *

def sampler(history):
    return random.Random(json.dumps(history)).randrange(24)
"""


def test_two_ranks_draw_the_same_rows_and_a_resumed_run_goes_on_alike(cache, tmp_path):
    """With dynamic sampling, for which the sampler chooses replacements, too."""
    (tmp_path / "sampled.py").write_text(SAMPLED)
    flags = [
        *[*TINY, "--task", tmp_path / "sampled.py", "--deterministic", "--num_steps", "3"],
        *["--save_every", "1", "--keep_checkpoints", "5", "--eval_every", "0"],
        *["--max_gen_batches", "2", "--output_dir"],
    ]
    first, again = tmp_path / "first", tmp_path / "again"
    env = {"TINY_TASK_REWARD": "any"}
    run(*flags, first, by="ranks", cache=cache, **env)
    shutil.copytree(first, again)
    for step in (2, 3):
        shutil.rmtree(again / f"checkpoints/step_00000{step}")
    run(*flags, again, "--resume", by="ranks", cache=cache, **env)
    assert metrics_of(again) == metrics_of(first)

    state = "checkpoints/step_000003/step.json"
    history, other = (json.loads((run / state).read_text())["history"] for run in (first, again))
    assert history == other
    found = {}
    for step in range(1, 4):
        for line in rollouts_of(first, step):
            entry = found.setdefault(line["extra"]["prompt"], [line["index"]])
            entry.append(line["total_reward"])
    assert len(found) > 12
    for prompt, (row, *rewards) in found.items():
        assert history[prompt][0] == row and history[prompt][2:] == rewards and len(rewards) == 4
    untold = [entry[:2] for entry in history[:3]]  # at the start no reward is known
    assert history[3][0] == random.Random(json.dumps(untold)).randrange(24)


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
    assert sum(row % 16 > 0 for row, *_ in history) < 720
    late = [row % 16 == 0 for row, *_ in history[-200:]]
    assert 0.8 < sum(late) / 200 < 1
