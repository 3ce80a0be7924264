"""examples/nim.py against a script, through the estimators, and on the real engine."""


import pytest
from conftest import REPO
from test_tree import play

import data
from losses import grpo_advantages
from train import Args

nim = data.load_task(str(REPO / "examples" / "nim.py"))


def row(sticks: int, game: int = 0) -> dict:
    return {"prompt": nim.shown(sticks), "agent_name": "self_play", "extra_info": {"sticks": sticks, "game": game}}


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


def test_an_evaluation_is_against_the_perfect_player(tokenizer):
    outputs = play(nim, tokenizer, row(7), "3", "2", validate=True)  # from 4, two sticks are taken
    assert [o.messages[0]["content"] for o in outputs] == ["g", "b"] and rewards_of(outputs) == [("first", 1.0)] * 2
    assert rewards_of(play(nim, tokenizer, row(6), "1", "2", validate=True)) == [("first", 0.0)] * 2


