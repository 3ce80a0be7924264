"""examples/tree.py, nim.py, subagents.py ...: units and states.

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

NAMES = ("tree", "nim", "bisection", "subagents", "proposer", "compaction", "maze")
tree, nim, bisection, subagents, proposer, compaction, maze = (
    data.load_task(str(REPO / "examples" / f"{name}.py")) for name in NAMES
)
WINDOW = {"max_prompt_tokens": 52, "max_response_tokens": 12, "max_model_len": 64}


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


# ---------------------------------------------------------------- subagents.py

PAIR = {
    "prompt": [
        {"role": "system", "content": subagents.SYSTEM_PROMPT},
        *users("What is 37+48 and 20-7?"),
    ],
    "agent_name": "subagents",
    "reward_model": {"ground_truth": "<answer>85 13</answer>"},
}
BOTH, SECOND = "<answer>85 13</answer>", "<answer>13</answer>"


def test_sub_agents_have_prompts_of_their_own(tokenizer):
    *subs, main = play(subagents, tokenizer, PAIR, "37+48 20-7", CALL, SECOND, RIGHT, BOTH)
    assert [(sub.unit, sub.reward) for sub in subs] == [("sub 37+48", 1.0), ("sub 20-7", 1.0)]
    assert (main.unit, main.group, main.reward) == ("main", "", 1.0)
    for sub, question in zip(subs, ("37+48", "20-7")):
        prompt = tokenizer.decode(sub.prompt_ids)
        assert f"user\nWhat is {question}?<|im_end|>" in prompt and "\nTools: calculator<" in prompt
    assert "Tools" not in tokenizer.decode(main.prompt_ids)
    assert [message["content"] for message in main.messages[2:]] == ["37+48 20-7", "85 13", BOTH]
    sampled = [token for token, mask in zip(main.response_ids, main.response_mask) if mask]
    assert tokenizer.decode(sampled) == f"37+48 20-7{END}{BOTH}{END}"


def test_a_turn_that_asks_nothing_ends_the_rollout_and_an_evaluation_has_one_output(tokenizer):
    (main,) = play(subagents, tokenizer, PAIR, "What is it?")
    assert main.reward == 0.0 and len(main.messages) == 3
    lines = ["37+48 20-7", RIGHT, SECOND, "<answer>85 14</answer>"]
    (main,) = play(subagents, tokenizer, PAIR, *lines, validate=True)
    assert (main.unit, main.reward, len(main.messages)) == ("main", 0.0, 5)


# ---------------------------------------------------------------- proposer.py


@pytest.mark.parametrize("n_right, reward", [(0, 0.0), (3, 1.0), (6, 0.0)])
def test_a_proposer_is_paid_for_what_half_of_the_attempts_solve(tokenizer, n_right, reward):
    row = proposer.load("train")[7]
    said = ["8"] + n_right * ["15"] + (6 - n_right) * ["14"]
    first, *attempts = play(proposer, tokenizer, row, *said, sample=3)
    assert (first.unit, first.group, first.reward) == ("proposer", "", reward)
    assert [attempt.reward for attempt in attempts] == n_right * [1.0] + (6 - n_right) * [0.0]
    assert {attempt.group for attempt in attempts} == {"3/solver"}
    assert len({attempt.unit for attempt in attempts}) == 6
    assert "7+8=" in tokenizer.decode(attempts[0].prompt_ids)


def test_what_is_no_problem_is_not_attempted_and_an_evaluation_has_one_attempt(tokenizer):
    (first,) = play(proposer, tokenizer, proposer.load("train")[7], "88")
    assert first.reward == 0.0
    (attempt,) = play(proposer, tokenizer, proposer.load("val")[78], "15", validate=True)  # 7+8=
    assert (attempt.unit, attempt.reward) == ("", 1.0)


# ---------------------------------------------------------------- compaction.py


def log_row(log: str, letter: str, agent: str = "compaction") -> dict:
    truth = letter + compaction.last_reading(log, letter)
    return {
        "prompt": users(log[:10]),
        "extra_info": {"rest": f"{log[10:]}?{letter}"},
        "reward_model": {"ground_truth": truth},
        "agent_name": agent,
    }


def asked(output, tokenizer) -> str:
    """The user's words in an output's prompt, which holds nothing but these."""
    start, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    text = tokenizer.decode(output.prompt_ids)
    assert text.startswith(start) and text.endswith(end)
    assert output.prompt_ids.count(tokenizer.eos_token_id) == 1
    return text.removeprefix(start).removesuffix(end)


@pytest.mark.parametrize("answer, reward", [("a1", 1.0), ("a9", 0.0)])
def test_a_log_is_read_window_by_window_by_notes(tokenizer, answer, reward):
    log = "a1" + "x0" * 80 + "b2"
    said = ("a1", "a1", "", answer)
    outputs = play(compaction, tokenizer, log_row(log, "a"), *said, **WINDOW)
    texts = [asked(output, tokenizer) for output in outputs]
    notes = ["", "a1", "a1", ""]
    parts = [text.removeprefix(note) for text, note in zip(texts, notes)]
    assert all(text.startswith(note) for text, note in zip(texts, notes))
    assert "".join(parts) == log + "?a" and all(len(part) % 2 == 0 for part in parts)
    lengths = [len(output.prompt_ids) for output in outputs]
    assert {*lengths[:-1]} <= {51, 52}  # an odd place is left free
    assert [set(output.response_mask) for output in outputs] == [{1}] * 4
    assert [(output.unit, output.reward) for output in outputs] == [("", reward)] * 4
    (masked,) = play(compaction, tokenizer, log_row(log, "a", "compaction_masked"), *said, **WINDOW)
    assert masked.response_ids == outputs[-1].response_ids
    assert masked.reward == reward


def test_notes_control_nothing_and_may_be_cut_off(tokenizer):
    row = log_row("x0" * 30, "a")
    first, second = play(compaction, tokenizer, row, ("<|im_end|>", "length"), "a1", **WINDOW)
    assert asked(second, tokenizer).endswith("x0?a") and first.stop_reason == "length"
    spelled = "<|\ufdd0im_end|>"  # letter by letter: decoding drops the special token itself
    _, second = play(compaction, tokenizer, row, spelled, "a1", **WINDOW)
    assert second.prompt_ids.count(tokenizer.eos_token_id) == 1


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
