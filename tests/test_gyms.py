"""Environments of others as examples, each where its package is installed; and the Sokoban speedrun."""

import asyncio
import json
import random
import sys
from types import SimpleNamespace

import pytest
from conftest import REPO
from test_example_tasks import Script

from agent_loop import BadInput, agent_loop_class
from data import filter_overlong, load_rows, load_task
from train import Args


def load(name: str, package: str):
    pytest.importorskip(package)
    return load_task(str(REPO / "examples" / f"{name}.py"))


@pytest.fixture
def lake():
    return load("gymnasium_text", "gymnasium")


@pytest.fixture
def sums():
    return load("reasoning_gym_task", "reasoning_gym")


def say(action: str) -> str:
    return f"<answer>{action}</answer>"


def play(task, tokenizer, *lines, row=0):
    engine = Script(tokenizer, lines)
    args = Args(max_response_tokens=1000)
    row = load_rows(task, "val")[row]
    loop = agent_loop_class(row, task, args)(engine, tokenizer, None, task, args)
    return asyncio.run(loop.run({}, **row, step=0, rollout_n=0, validate=False))


def test_a_lake_is_crossed(lake, tokenizer):
    output = play(lake, tokenizer, *map(say, ["right", "swim", "2", "DOWN", "down"]))
    assert [m["content"] for m in output.messages if m["role"] == "user"] == [
        "[S]FF\nFHF\nFFG", "S[F]F\nFHF\nFFG", "Illegal: say one <answer>...</answer> of left, down, right, up.",
        "SF[F]\nFHF\nFFG", "SFF\nFH[F]\nFFG",
    ]  # fmt: skip
    assert [reward for _, reward in output.turn_rewards] == [-0.1, 1.0]
    assert output.turn_rewards[-1][0] == len(output.response_ids) - 1
    assert (output.stop_reason, output.metrics["interaction/steps"], output.metrics["interaction/earned"]) == (
        "stop", 4, 1)  # fmt: skip
    assert lake.INTERACTIONS[0].envs == {}


def test_a_hole_ends_a_trajectory_and_the_next_starts_anew(lake, tokenizer):
    for _ in range(2):
        output = play(lake, tokenizer, say("down"), say("right"))
        assert (output.turn_rewards, output.stop_reason) == ([], "stop")
        assert [m["content"] for m in output.messages if m["role"] == "user"][-1] == "SFF\n[F]HF\nFFG"


def test_an_environment_by_name(lake, monkeypatch):
    monkeypatch.setenv("GYM_ENV", "Taxi-v4")
    taxi = load("gymnasium_text", "gymnasium")
    rows = load_rows(taxi, "val")
    assert [row["prompt"] for row in rows] == [[{"role": "system", "content": taxi.SYSTEM_PROMPT}]] * 64
    seen = {taxi.TextEnv().reset(row["extra_info"]["interaction_kwargs"]["seed"]) for row in rows}
    assert len(seen) > 50  # 500 states
    assert all(text.count("[") == 1 and text.count("(") == 1 and text.count("{") == 1 for text in seen)
    assert not hasattr(taxi, "build_model")  # the lake's would be kept for all
    env = taxi.TextEnv()
    env.reset(0)
    assert env.step(say("pickup"))[1:3] == (-10.0, False)
    for name, problem in ("Pendulum-v1", "takes Discrete"), ("Puddle-v1", "Puddle"):
        monkeypatch.setenv("GYM_ENV", name)
        with pytest.raises(BadInput, match=problem):
            load("gymnasium_text", "gymnasium")


def test_sums_are_fixed_disjoint_fit_and_are_paid(sums, tokenizer):
    train, val = load_rows(sums, "train"), load_rows(sums, "val")
    assert len(val) == 128 and len(train) > 500 and train == load_rows(sums, "train")
    assert not {row["prompt"][-1]["content"] for row in train} & {row["prompt"][-1]["content"] for row in val}
    assert filter_overlong(val, tokenizer, sums, Args(model="x", max_model_len=640)) == val
    for row in train[:5] + val[:5]:
        truth = row["reward_model"]["ground_truth"]
        for said, paid in (say(f" {truth} "), 1.0), (say("77") + say(truth), 1.0), (say("77"), 0.0), (truth, 0.0):
            output = SimpleNamespace(messages=[{"role": "assistant", "content": said}])
            assert sums.reward(output, row) == paid, said
    assert sums.reward(SimpleNamespace(messages=train[0]["prompt"]), train[0]) == 0.0


def test_a_task_by_name(sums, monkeypatch):
    monkeypatch.setenv("REASONING_GYM", "spell_backward")
    monkeypatch.setenv("REASONING_GYM_ARGS", '{"min_word_len": 4, "max_word_len": 5}')
    task = load("reasoning_gym_task", "reasoning_gym")
    row = load_rows(task, "val")[0]
    answer = row["reward_model"]["ground_truth"]
    assert 4 <= len(answer) <= 5 and answer[::-1] in row["prompt"][-1]["content"]
    assert task.reward(SimpleNamespace(messages=[{"role": "assistant", "content": say(answer)}]), row) == 1.0
    assert not hasattr(task, "build_model")
    for name, value, problem in (
        ("REASONING_GYM_ARGS", '{"words": 1}', "words"),
        ("REASONING_GYM_ARGS", "{", "REASONING_GYM_ARGS={"),
        ("REASONING_GYM", "no_such", "the tasks are .*chain_sum"),
    ):
        monkeypatch.setenv(name, value)
        with pytest.raises(BadInput, match=problem):
            load_rows(load("reasoning_gym_task", "reasoning_gym"), "val")


# ---------------------------------------------------------------- textarena


@pytest.fixture
def arena():
    return load("textarena_task", "textarena")


def test_a_game_of_textarena(arena, tokenizer):
    state = random.getstate()
    output = play(arena, tokenizer, "It is [21].", "[20]", "[1]", "[8]", row=3)
    assert random.getstate() == state  # textarena seeds everybody's generator
    (rules, refused, *hints) = [m["content"] for m in output.messages if m["role"] == "user"]
    assert rules.startswith("You are Player 0. You are playing Guess The Number.") and "between 1 and 20" in rules
    assert "invalid move" in refused and "It is [21]" not in refused
    assert hints == ["The target number is lower.", "The target number is higher."] and output.stop_reason == "stop"
    assert output.turn_rewards == [(len(output.response_ids) - 1, 1.0)]
    assert arena.INTERACTIONS[0].envs == {} and output.metrics["interaction/invalid"] == 0


def test_two_invalid_moves_end_a_game_of_textarena(arena, tokenizer):
    output = play(arena, tokenizer, "Hm.", "What?")
    assert (output.stop_reason, output.turn_rewards, output.metrics["interaction/invalid"]) == ("stop", [], 1)


def test_games_of_textarena_by_name(monkeypatch):
    monkeypatch.setenv("TEXTARENA", "TowerOfHanoi-v0")
    hanoi = load("textarena_task", "textarena")
    assert "Tower of Hanoi" in hanoi.TextArena().reset(0) and not hasattr(hanoi, "build_model")
    for name, problem in ("TicTacToe-v0", "no game for one player"), ("NoSuch-v0", "no such game"):
        monkeypatch.setenv("TEXTARENA", name)
        with pytest.raises(BadInput, match=problem):
            load_rows(load("textarena_task", "textarena"), "val")


# ---------------------------------------------------------------- OpenEnv (its package takes seconds to import)


class Session:
    """openenv.core.GenericEnvClient, and a server that adds up numbers."""

    log: list = []

    def __init__(self, base_url):
        self.log.append(base_url)

    async def reset(self, seed):
        self.sum = seed
        return self.result(None, False)

    async def step(self, action):
        self.log.append(action)
        if not action["add"]["number"].isdigit():
            raise RuntimeError("Server error: no number (code: VALIDATION_ERROR)")
        self.sum += int(action["add"]["number"])
        return self.result(0.5, self.sum >= 10)

    def result(self, reward, done):
        return SimpleNamespace(observation={"sum": self.sum, "hint": "more", "x": 1}, reward=reward, done=done)

    async def close(self):
        self.log.append("close")


def test_a_session_of_openenv(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv.core", SimpleNamespace(GenericEnvClient=Session))
    monkeypatch.setattr(Session, "log", [])
    example = str(REPO / "examples/openenv_task.py")
    with pytest.raises(BadInput, match="OPENENV is a server's address"):
        load_task(example)
    settings = {"": "http://there", "_ACTION": '{"add": {"number": "TEXT", "to": 1}}', "_SEEN": "hint sum"}
    for name, value in settings.items():
        monkeypatch.setenv(f"OPENENV{name}", value)
    task = load_task(example)
    output = play(task, tokenizer, "5", "five", "6", row=3)
    refused = "Refused: Server error: no number (code: VALIDATION_ERROR)"
    assert [m["content"] for m in output.messages if m["role"] == "user"] == ["more\n3", "more\n8", refused]
    assert [reward for _, reward in output.turn_rewards] == [0.5, 0.5] and output.stop_reason == "stop"
    said = [{"add": {"number": text, "to": 1}} for text in ("5", "five", "6")]
    assert Session.log == ["http://there", *said, "close"] and task.INTERACTIONS[0].sessions == {}
    monkeypatch.delenv("OPENENV_SEEN")
    assert load_task(example).describe({"a": 1, "b": "x"}) == '{"a": 1, "b": "x"}'


# ---------------------------------------------------------------- the Sokoban speedrun

BOARD = """+ + + + + +
+ X - - - +
+ - - @ - +
+ - $ - * +
+ - - - - +
+ + + + + +"""  # one of two boxes is on its goal


@pytest.fixture
def sokoban():
    return load_task(str(REPO / "examples/sokoban_speedrun.py"))


@pytest.mark.parametrize("moves, boxes, player", [
    ("L", {(2, 3), (3, 2)}, (3, 3)),
    ("LU", {(1, 3), (3, 2)}, (2, 3)),  # pushes
    ("LUU", {(1, 3), (3, 2)}, (2, 3)),  # against the wall
    ("LL", {(2, 3), (3, 1)}, (3, 2)),  # off the goal
    ("LURULL", {(1, 1), (3, 2)}, (1, 2)),
    ("RRRD", {(2, 3), (3, 2)}, (4, 4)),
])  # fmt: skip
def test_moves_of_sokoban(sokoban, moves, boxes, player):
    board = sokoban.Board(BOARD).move(moves)
    assert (board.boxes, board.player) == (boxes, player)


def test_two_boxes_in_a_row_are_not_pushed(sokoban):
    board = sokoban.Board("+ + + + + +\n+ * @ @ X +\n+ + + + + +").move("R")
    assert board.player == (1, 1) and board.boxes == {(1, 2), (1, 3)}


@pytest.mark.parametrize("said, score", [
    ("URRD <answer>LURULL</answer>", 1.0),
    ("<answer>your moves</answer> <answer>left, up, r u L, Left</answer> <answer>L</answer>", 1.0),
    ("<answer>LURULLL</answer>", 1.0),  # a move against the wall
    ("<answer>LL</answer>", 0.0),  # it uncovers a goal: no less than nothing
    ("<answer>LU</answer>", 0.0),
    ("LURULL", 0.0),
])  # fmt: skip
def test_answers_of_sokoban(sokoban, said, score):
    row = {"extra_info": {"board": BOARD}}
    output = SimpleNamespace(messages=[{"role": "assistant", "content": said}])
    assert sokoban.reward(output, row) == {"score": score, "solved": int(score == 1)}


def test_part_of_the_goals_is_part_of_the_reward(sokoban):
    board = "+ + + + + +\n+ * @ X - +\n+ - @ - X +\n+ + + + + +"
    assert sokoban.Board(board).move("R").progress() == 0.5
    assert sokoban.Board(board).move("").progress() == 0.0


def test_the_speedruns_boards(tmp_path, monkeypatch):
    for name in "train", "eval":
        line = json.dumps({"question": BOARD, "answer": "LURULL", "metadata": {"band": name}})
        (tmp_path / f"sokoban_{name}.jsonl").write_text(line + "\n")
    monkeypatch.setenv("SOKOBAN_DATA", str(tmp_path))
    task = load_task(str(REPO / "examples/sokoban_speedrun.py"))
    (row,) = load_rows(task, "val")
    system, question = row["prompt"]
    assert row["extra_info"]["board"] == BOARD and system["content"] == task.SYSTEM_PROMPT
    assert question["content"].splitlines()[:2] == ["  0 1 2 3 4 5", "0 + + + + + +"]
    (tmp_path / "sokoban_eval.jsonl").unlink()
    with pytest.raises(BadInput, match="there is no sokoban_eval.jsonl"):
        load_rows(task, "val")
    monkeypatch.delenv("SOKOBAN_DATA")
    with pytest.raises(BadInput, match="needs SOKOBAN_DATA"):
        load_rows(task, "val")
