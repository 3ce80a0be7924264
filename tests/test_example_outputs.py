"""examples/tree.py, nim.py ...: units and states.

Each is played by a scripted engine."""

import asyncio
import random

import pytest
import torch
from conftest import REPO
from test_agent_loop import END, Script

import data
from agent_loop import agent_loop_class
from rollout import set_rewards
from train import Args

NAMES = ("tree", "nim", "bisection", "maze")
tree, nim, bisection, maze = (
    data.load_task(str(REPO / "examples" / f"{name}.py")) for name in NAMES
)


def play(
    task, tokenizer, row: dict, *lines, sample: int = 0, validate: bool = False, **args
) -> list:
    """The graded outputs of one rollout by the task's own loop, marked as a pool marks them."""
    args = Args(**{"max_response_tokens": 200} | args)
    engine = Script(tokenizer, lines)
    loop = agent_loop_class(row, task, args)(engine, tokenizer, None, task, args)
    outputs = asyncio.run(loop.run({}, **row, step=0, rollout_n=sample, validate=validate))
    assert len(engine.prompts) == len(lines)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    for segment, output in enumerate(outputs):
        output.extra |= {"prompt": 0, "sample": sample, "segment": segment}
    asyncio.run(set_rewards(task, outputs, row))
    return outputs


def users(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


# ---------------------------------------------------------------- tree.py

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37+48"}}\n</tool_call>'
RIGHT, WRONG = "<answer>85</answer>", "<answer>37</answer>"
QUESTION = {
    "prompt": users("What is 37+48?"),
    "agent_name": "tree",
    "reward_model": {"ground_truth": "85"},
}


def test_branches_after_the_first_call(tokenizer):
    said = [RIGHT, WRONG, WRONG, WRONG]
    trunk, *leaves = play(tree, tokenizer, QUESTION, CALL, *said, sample=3)
    assert (trunk.unit, trunk.group, trunk.reward) == ("trunk", "", 0.25)
    assert trunk.messages[-1]["content"] == "85"
    prefix = trunk.prompt_ids + trunk.response_ids
    for i, (leaf, text) in enumerate(zip(leaves, said, strict=True)):
        assert (leaf.unit, leaf.group, leaf.reward) == (f"leaf {i}", "3/turn 1", float(i == 0))
        assert leaf.prompt_ids == prefix  # whole, and the leaf's own tokens alone are trained in it
        assert tokenizer.decode(leaf.response_ids) == text + END and set(leaf.response_mask) == {1}
        assert "tool_calls" not in leaf.metrics
    assert trunk.metrics["tool_calls"] == 1


def test_an_evaluation_has_no_branches(tokenizer):
    (output,) = play(tree, tokenizer, QUESTION, CALL, RIGHT, validate=True)
    assert (output.unit, output.group, output.reward, len(output.messages)) == ("", "", 1.0, 4)


# ---------------------------------------------------------------- nim.py


def nim_row(sticks: int) -> dict:
    return {
        "prompt": nim.shown(sticks),
        "agent_name": "self_play",
        "extra_info": {"sticks": sticks, "game": 0},
    }


@pytest.mark.parametrize("sticks, moves, validate, rewards", [
    (5, "122", False, [("first", 1.0), ("second", 0.0), ("first", 1.0)]),
    (4, "24", False, [("first", 1.0), ("second", 0.0)]),  # a move that is not allowed loses
    (7, "32", True, [("first", 1.0), ("first", 1.0)]),  # against the perfect player
])  # fmt: skip
def test_a_game(tokenizer, sticks, moves, validate, rewards):
    outputs = play(nim, tokenizer, nim_row(sticks), *moves, validate=validate)
    assert [(output.unit, output.reward) for output in outputs] == rewards
    said = [tokenizer.decode(output.response_ids) for output in outputs]
    assert said == [move + END for move in moves]


def test_the_perfect_player_loses_only_where_nobody_can_win():
    generator = random.Random(0)
    won = [False]  # whether the side to move wins, by trying everything
    for sticks in range(1, 22):
        won.append(not all(won[sticks - int(move)] for move in nim.allowed(sticks)))
        move = nim.perfect_move(sticks, generator)
        assert move in nim.allowed(sticks) and won[sticks] == (not won[sticks - int(move)])
    assert all(won[row["extra_info"]["sticks"]] for row in nim.load("val"))


# ---------------------------------------------------------------- bisection.py


@pytest.mark.parametrize("sample, guesses, left, won", [
    (0, ["15", "23", "19", "21", "20"], [32, 16, 7, 3, 1], 1.0),
    (1, ["15", "23", "19", "20", "22"], [32, 16, 7, 3, 2], 0.0),  # of number 21
    (0, ["x", "15", "3", "20"], [32, 32, 16, 16], 1.0),  # what is not left tells nothing
])  # fmt: skip
def test_guesses_narrow_what_is_left(tokenizer, sample, guesses, left, won):
    row = bisection.load("val")[20] | {"agent_name": "guess"}
    [output] = play(bisection, tokenizer, row, *guesses, sample=sample)
    assert output.reward == won
    states = [f"{n} left, guess {turn}" for turn, n in enumerate(left, 1)]
    assert output.metrics["states"] == states
    assert len(output.messages) == 2 * len(guesses)  # nothing is said after the last one


def test_a_guess_is_as_good_as_what_it_adds_to_the_value():
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [0, 1, 1, 0, 1, 1], [0, 1, 0, 1, 1, 1]])
    rewards = torch.zeros(3, 6)
    rewards[0, 5] = 1.0
    states = torch.tensor([0, 1, 0, 2, 0, 1])  # won from: 0 one in three, 1 one in two, 2 none
    up, down, won, lost = 1 / 2 - 1 / 3, -1 / 3, 1 / 2, -1 / 2
    expected = [
        [0, up, up, 0, won, won],
        [0, down, down, 0, 0, 0],
        [0, up, 0, lost, lost, lost],
    ]
    advantages = bisection.by_state(rewards, mask, states)
    torch.testing.assert_close(advantages, torch.tensor(expected))


# ---------------------------------------------------------------- maze.py

# # # G # #    maze 4, whose shortest way is "nwnneen"
# . . . . #
# . # # # #
# . . . . #
# # A . . .
SEEN = [
    "open n e\ngoal 1 east 4 north",
    "open e s w\ngoal 1 east 3 north",
    "open n e\ngoal 2 east 3 north",
    "open n s\ngoal 2 east 2 north",
    "open e s\ngoal 2 east 1 north",
    "open e w\ngoal 1 east 1 north",
    "open n e w\ngoal 0 east 1 north",
]


def walk(tokenizer, steps):
    """The graded rollout of a walk in maze 4."""
    row = {"prompt": [], "extra_info": {"interaction_kwargs": {"name": "maze", "seed": 4}}}
    limits = dict(max_response_tokens=2000, max_assistant_turns=10)
    (output,) = play(maze, tokenizer, row, *steps, **limits)
    return output


def test_a_walk_to_the_goal(tokenizer):
    output = walk(tokenizer, "nwnneen")
    assert output.metrics["states"] == SEEN
    assert [reward for _, reward in output.turn_rewards] == [1.0] and output.reward == 0.0
    assert (output.stop_reason, output.metrics["interaction/maze/found"]) == ("stop", 1)


def test_walls_words_that_are_no_step_and_the_end(tokenizer):
    output = walk(tokenizer, ["w", "north", *"ssssssss"])
    refused = "Illegal: say n, e, s or w."
    assert output.metrics["states"] == [SEEN[0], SEEN[0], refused, *[SEEN[0]] * 7]
    assert [reward for _, reward in output.turn_rewards] == [pytest.approx(-0.1)]
