"""examples/maze.py: its walls and rewards, the states that gigpo compares, and the walks of the built-in model."""

import asyncio
import itertools
import random
from operator import itemgetter
from types import SimpleNamespace

import pytest
import torch
from conftest import REPO, rewards_of_tokens
from test_tree import play

import data
from examples import tiny_models
from losses import gigpo_advantages

maze = data.load_task(str(REPO / "examples" / "maze.py"))
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


def walk(tokenizer, *steps: str, sample: int = 0):
    """The graded rollout of a walk in maze 4."""
    row = {"prompt": [], "extra_info": {"interaction_kwargs": {"name": "maze", "seed": 4}}}
    (output,) = play(maze, tokenizer, row, *steps, sample=sample, max_response_tokens=2000, max_assistant_turns=10)
    return output


def given_to_the_kit(task) -> dict:
    """What a task's build_model gives to build_from_demonstrations."""
    given = {}
    random.seed(0)
    with pytest.MonkeyPatch.context() as patch:
        keep = lambda path, task, rows, **more: given.update(more, rows=rows)
        patch.setattr(task, "build_from_demonstrations", keep)
        task.build_model("a folder")
    return given


@pytest.fixture(scope="module")
def built():
    return given_to_the_kit(maze)


def test_a_walk_to_the_goal(tokenizer):
    output = walk(tokenizer, *"nwnneen")
    assert [m["content"] for m in output.messages if m["role"] == "user"] == output.metrics["states"] == SEEN
    assert [reward for _, reward in output.turn_rewards] == [1.0] and output.reward == 0.0
    assert (output.stop_reason, output.metrics["interaction/found"]) == ("stop", 1)


def test_walls_words_that_are_no_step_and_the_end(tokenizer):
    output = walk(tokenizer, "w", "north", *"ssssssss")
    refused = "Illegal: say n, e, s or w."
    assert output.metrics["states"] == [SEEN[0], SEEN[0], refused, *[SEEN[0]] * 7]
    assert [reward for _, reward in output.turn_rewards] == [pytest.approx(-0.1)]
    env = maze.Maze()
    env.reset(4)
    assert [env.step("s")[1:3] for _ in range(10)] == [(0.0, False)] * 9 + [(0.0, True)]


def test_every_goal_can_be_reached_and_the_mazes_differ():
    kept = {}
    for split, n in (("val", 256), ("train", 1000)):
        rows = maze.load(split)
        kept[split] = set()
        for row in rows:
            env = maze.Maze()
            env.reset(row["extra_info"]["interaction_kwargs"]["seed"])
            kept[split].add((frozenset(env.free), env.goal))
            assert 4 <= env.distances[env.place] <= 7
            if split == "val":  # downhill to the goal
                while env.place != env.goal:
                    ways = {env.distances[maze.after(env.place, way)]: way for way in env.open_ways()}
                    assert min(ways) == env.distances[env.place] - 1
                    env.step(ways[min(ways)])
        assert len(rows) == n == len(kept[split])
    assert not kept["val"] & kept["train"]


def test_a_step_back_is_blamed_in_a_rollout_that_is_praised(tokenizer):
    """It met the second place twice, and went back the first time: gigpo compares the two steps."""
    found, lost = walk(tokenizer, *"nsnwnneen"), walk(tokenizer, *"s" * 10, sample=1)
    batch = data.collate([found, lost])
    states = data.turn_states([found, lost], [9, 10])
    assert states[1] == states[3] and states[0] == states[2] == states[9] == states[-1]
    advantages = gigpo_advantages(rewards_of_tokens([found, lost]), batch["response_mask"], states, 0.9)
    starts = [i for i, (before, mask) in enumerate(itertools.pairwise([0, *found.response_mask])) if mask > before]
    of_turns = advantages[0, torch.tensor(starts)].tolist()
    assert of_turns[1] == pytest.approx(-(2**-0.5), abs=1e-4) and of_turns[3] == pytest.approx(2**-0.5, abs=1e-4)
    assert of_turns[2] > of_turns[0] > 0 > advantages[1, 0] and of_turns[4:] == [0] * 5  # nobody else was there


def read_demonstrations(task, env, built, n_tokens: int):
    """Checks that the built-in model's tokenizer has n_tokens for an observation, and that its demonstrations say
    their actions and nothing else. Yields (actions, all token ids) of each."""
    tokenizer = tiny_models.make_tokenizer([task.SYSTEM_PROMPT, *built["pieces"]])
    source = SimpleNamespace(load=lambda split: built["rows"][:50], SYSTEM_PROMPT=task.SYSTEM_PROMPT)
    for seed, row in enumerate(data.load_rows(source, "train")):
        actions = list(map(itemgetter("content"), row["demonstration"]))
        seen = env.reset(seed)
        assert len(tokenizer(seen)["input_ids"]) == n_tokens, seen
        ((ids, mask),) = asyncio.run(tiny_models.play(row, task, tokenizer))
        said = tokenizer.decode([token for token, sampled in zip(ids, mask) if sampled])
        assert said == "".join(f"{action}<|im_end|>" for action in actions)
        yield actions, ids


def test_an_observation_is_three_tokens_of_the_built_in_model(built):
    for steps, ids in read_demonstrations(maze, maze.Maze(), built, 3):
        assert len(ids) == 4 + 12 * len(steps)
