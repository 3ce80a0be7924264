"""examples/nim.py against a script, through the estimators, and on the real engine."""

import dataclasses
import random

import pytest
from conftest import REPO, make_run
from test_examples import Recorder
from test_rollout import hf_model, wake
from test_tree import play

import data
from losses import grpo_advantages
from rollout import rollout
from train import Args

nim = data.load_task(str(REPO / "examples" / "nim.py"))


def row(sticks: int, game: int = 0) -> dict:
    return {"prompt": nim.shown(sticks), "agent_name": "self_play", "extra_info": {"sticks": sticks, "game": game}}


class Anything:
    """Holds every move."""

    def __contains__(self, move):
        return True


def rewards_of(outputs) -> list[tuple[str, float]]:
    return [(output.unit, output.reward) for output in outputs]


def test_rows_are_fixed_and_fit(tokenizer):
    for split, n in (("train", 21), ("val", 20)):
        rows = data.load_rows(nim, split)
        assert len(rows) == n and rows == data.load_rows(nim, split)
        assert data.filter_overlong(rows, tokenizer, nim, Args(model="x", max_response_tokens=4)) == rows
    assert all(row["extra_info"]["sticks"] % 4 and row["extra_info"]["sticks"] > 4 for row in nim.load("val"))


def test_both_sides_are_units_and_the_last_stick_wins(tokenizer):
    outputs = play(nim, tokenizer, row(5), "1", "2", "2")
    assert rewards_of(outputs) == [("first", 1.0), ("second", 0.0), ("first", 1.0)]
    assert [output.messages[0]["content"] for output in outputs] == ["e", "d", "b"]
    assert [tokenizer.decode(output.response_ids) for output in outputs] == [f"{n}<|im_end|>" for n in (1, 2, 2)]
    assert rewards_of(play(nim, tokenizer, row(5), "3", "2")) == [("first", 0.0), ("second", 1.0)]


@pytest.mark.parametrize("move", ["4", "0", "", "3", "1 or 2"])
def test_a_move_that_is_not_allowed_loses(tokenizer, move):
    assert rewards_of(play(nim, tokenizer, row(4), "2", move)) == [("first", 1.0), ("second", 0.0)]


def test_each_side_is_compared_with_its_own_kind(tokenizer):
    """Three games from one number, of which the first side wins two."""
    games = [("1", "1", "3"), ("1", "3", "1"), ("3", "2")]
    outputs = [output for i, moves in enumerate(games) for output in play(nim, tokenizer, row(5), *moves, sample=i)]
    units = data.by_unit(outputs)
    assert units.names == ["first", "second"] * 3 and units.rewards.tolist() == [1, 0, 1, 0, 0, 1]
    advantages = grpo_advantages(units.rewards, units.groups, normalize_std=False).tolist()
    assert advantages == pytest.approx([1 / 3, -1 / 3, 1 / 3, -1 / 3, -2 / 3, 2 / 3])


def test_the_perfect_player_loses_only_where_nobody_can_win():
    generator = random.Random(0)
    won = [False]  # whether the side to move wins, by trying everything
    for sticks in range(1, 22):
        won.append(not all(won[sticks - int(move)] for move in nim.allowed(sticks)))
        move = nim.perfect_move(sticks, generator)
        assert move in nim.allowed(sticks) and won[sticks] == (not won[sticks - int(move)])
    assert all(won[row["extra_info"]["sticks"]] for row in nim.load("val"))


def test_an_evaluation_is_against_the_perfect_player(tokenizer):
    outputs = play(nim, tokenizer, row(7), "3", "2", validate=True)  # from 4, two sticks are taken
    assert [o.messages[0]["content"] for o in outputs] == ["g", "b"] and rewards_of(outputs) == [("first", 1.0)] * 2
    assert rewards_of(play(nim, tokenizer, row(6), "1", "2", validate=True)) == [("first", 0.0)] * 2


def test_on_the_real_engine(engine, background, tokenizer, tiny_model, args, monkeypatch):
    """Any words of a random model take one stick: from three, the first side moves twice and wins."""
    monkeypatch.setattr(nim, "allowed", lambda sticks: Anything())
    monkeypatch.setattr(nim, "int", lambda move: 1, raising=False)
    wake(engine, hf_model(tiny_model), 0)
    recorder = Recorder(engine)
    run = make_run(recorder, background, nim, tokenizer, dataclasses.replace(args, agent="self_play"))
    phase = rollout(run, [row(3)], 0, 2, {"temperature": 1.0})
    engine.sleep()
    assert not phase.counts, phase.errors[0]["error"]
    assert rewards_of(phase.outputs) == [("first", 1.0), ("second", 0.0), ("first", 1.0)] * 2
    said = [(prompt, out.token_ids, out.logprobs) for calls in recorder.calls.values() for prompt, out in calls]
    assert said == [(o.prompt_ids, o.response_ids, o.response_logprobs) for o in phase.outputs]
    assert len({tuple(o.response_ids) for o in phase.outputs}) == 6


def test_the_poor_teacher():
    random.seed(0)
    moves = {sticks: [nim.demonstration(sticks)[-1]["content"] for _ in range(2000)] for sticks in (2, 7, 8)}
    assert set(moves[2]) == {"1", "2"} and set(moves[7]) == set(moves[8]) == {"1", "2", "3"}
    assert 0.35 < moves[7].count("3") / 2000 < 0.49 and moves[7].count("1") > moves[7].count("3")
