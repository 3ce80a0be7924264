"""A task's sampler: what it is told, which rows are drawn, on one rank and two, and how a resumed run goes on."""

import json
import random
import shutil

import pytest
from conftest import REPO, TINY, metrics_of, run
from test_async import Task, make_run, models  # noqa: F401  (fixtures)

import data
import rollout
import train
from agent_loop import BadInput


def last_rewards(history: list[list]) -> int:
    """A row by all that was so far: of 7."""
    return random.Random(json.dumps(history)).randrange(7)


def drawn(phase) -> list[tuple[int, int]]:
    return [(o.extra["prompt"], o.extra["index"]) for o in phase.outputs if o.extra["sample"] == 0]


def learned(run, phase) -> None:
    """What train.grade_batch notes of a step."""
    batch = data.collate(phase.trained)
    train.grade_batch(run.run, phase, batch)
    run.run.done += 1


@pytest.mark.parametrize("staleness", [0, 1])
def test_rows_are_the_samplers_and_rewards_reach_it(make_run, staleness):  # noqa: F811
    told = []

    class Curriculum(Task):
        def sampler(self, history):
            told.append(json.loads(json.dumps(history)))
            return last_rewards(history)

    run = make_run(Curriculum(), max_staleness=staleness, n_rows=7)
    run.run.history, run.run.done = [], 0
    rows = []
    for step in range(4):
        phase = run.step(step)
        rows += drawn(phase)
        learned(run, phase)
    history = run.run.history
    # One call for each prompt, in order, with all before it; the entry is its answer.
    assert [len(before) for before in told] == list(range(len(history)))
    assert [entry[0] for entry in history] == [last_rewards(before) for before in told]
    ahead = 2 * staleness  # prompts a step, drawn so many steps before they must be there
    assert [entry[1] for entry in history[: 2 + ahead]] == [0] * (2 + ahead) and len(history) == 8 + ahead
    # Every row that was drawn is the one that was chosen; both members' rewards (its index) came by the next choice.
    assert sorted(rows) == [(prompt, history[prompt][0]) for prompt in range(8)]
    for prompt, (row, _, *rewards) in enumerate(history):
        assert rewards == [row, row] * (prompt < 8)
    assert told[2 + ahead][:2] == history[:2] and told[1 + ahead][0][2:] == []


def test_rows_of_replacements_are_chosen_at_the_start(make_run):  # noqa: F811
    """Later a rank may have seen more rewards than another."""

    class Chosen(Task):
        sampler = staticmethod(lambda history: len(history) % 7)

    run = make_run(Chosen(outcome=lambda n, j: float(j)), max_staleness=0, n_rows=7, max_gen_batches=3)
    run.run.history, run.run.done = [], 0
    assert drawn(run.step(0)) == [(0, 0), (1, 1)]  # none was replaced
    assert run.run.history == [[row, 0] for row in range(2 + 2 * 2)]


def test_a_row_that_can_not_be_read_costs_its_prompt_alone(make_run):  # noqa: F811
    """Of a large table only the first rows are read before the start; a batch's last prompt is no special one."""
    run = make_run(Task(), max_staleness=0, n_rows=7)
    bad = data.prompt_order(7, 1, 1, run.args.seed)[0]
    n_read = []

    class Table(list):
        def __getitem__(self, index):
            n_read.append(index)
            if index == bad:
                raise BadInput("it is no row")
            return super().__getitem__(index)

    run.run.rows["train"] = Table(run.run.rows["train"])
    run.pool.end()
    run.pool = rollout.training_pool(run.run, 1)
    phase = run.step(1)
    assert [(prompt, index) for prompt, index in drawn(phase)] == [(0, data.prompt_order(7, 0, 1, run.args.seed)[0])]
    assert [error["prompt"] for error in phase.errors] == [1, 1] and "it is no row" in phase.errors[0]["error"]
    good = [index for index in n_read if index != bad]
    assert len(good) == len(set(good)) == 1  # read once, for all that asks for it


def test_a_row_that_is_none_ends_the_run(make_run):  # noqa: F811
    class Wild(Task):
        sampler = staticmethod(lambda history: 7)

    run = make_run(Wild(), max_staleness=0, n_rows=7)
    run.run.history, run.run.done = [], 0
    with pytest.raises(BadInput, match=r"the task's sampler failed: what it returned has 7: must be int in \[0, 6\]"):
        run.step(0)


def test_two_ranks_draw_the_same_rows_and_a_resumed_run_goes_on_alike(cache, tmp_path):
    """With dynamic sampling, whose replacements the sampler chooses too."""
    task = tmp_path / "chosen.py"
    task.write_text(f"""
import json, random, sys
sys.path.insert(0, {str(REPO / "tests")!r})
from tiny_task import *

def sampler(history):
    return random.Random(json.dumps(history)).randrange(24)
""")
    flags = [*TINY, "--task", task, "--deterministic", "--num_steps", "3", "--save_every", "1",
             "--keep_checkpoints", "5", "--max_gen_batches", "2", "--eval_every", "0"]  # fmt: skip
    first, again = tmp_path / "first", tmp_path / "again"
    run(*flags, "--output_dir", first, by="ranks", cache=cache, TINY_TASK_REWARD="any")
    shutil.copytree(first, again)
    for later in ("checkpoints/step_000002", "checkpoints/step_000003"):
        shutil.rmtree(again / later)
    run(*flags, "--resume", "--output_dir", again, by="ranks", cache=cache, TINY_TASK_REWARD="any")
    assert metrics_of(again) == metrics_of(first)
    histories = [json.loads((folder / "checkpoints/step_000003/step.json").read_text())["history"]
                 for folder in (first, again)]  # fmt: skip
    assert histories[0] == histories[1]
    found = {}
    for file in first.glob("rollouts/step_*.jsonl"):
        for line in map(json.loads, file.open()):
            entry = found.setdefault(line["extra"]["prompt"], [line["index"], int(file.stem[5:]) - 1])
            entry.append(line["total_reward"])
    assert len(found) > 12 and {i: histories[0][i][2:] for i in found} == {i: x[2:] for i, x in found.items()}
    for prompt, (row, step, *rewards) in found.items():
        assert histories[0][prompt][0] == row and histories[0][prompt][1] <= step and len(rewards) == 4
    untold = [entry[:2] for entry in histories[0][:3]]  # at the start no reward is known
    assert histories[0][3][0] == random.Random(json.dumps(untold)).randrange(24)


def test_the_curriculum_prefers_groups_that_disagree_and_comes_back_to_the_others():
    task, history = data.load_task(str(REPO / "examples/curriculum.py")), []
    for step in range(180):
        start = len(history)
        for _ in range(8):
            history.append([task.sampler(history), step])
        chosen = [entry[0] for entry in history[start:]]
        assert len(set(chosen)) == 8  # none while it is under way
        for entry in history[start:]:
            entry += [0.0, 0.0] if entry[0] % 16 else [0.0, 1.0]
    wrong = [row for row, *_ in history if row % 16]
    assert len({row for row, *_ in history}) == 512  # each is tried
    late = [row % 16 == 0 for row, *_ in history[-200:]]
    assert 0.8 < sum(late) / 200 < 1 and len(wrong) < 720
    assert task.sampler(history) == task.sampler(json.loads(json.dumps(history)))
