"""examples/gsm8k.py, gsm8k_user.py, sokoban_speedrun.py and environments.py: rewards by value, and whole trajectories
against a scripted engine."""

import asyncio
import json
import re
import threading
import time
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import HANGS, for_ever, rewards_of_tokens

from agent_loop import BadInput, TokenOutput, ToolAgentLoop, agent_loop_class
from data import filter_overlong, load_rows, load_task
from examples import calculator, environments
from rollout import score
from train import Args

EXAMPLES = Path(__file__).parents[1] / "examples"
gsm8k, gsm8k_user, sokoban = (
    load_task(str(EXAMPLES / f"{name}.py")) for name in ("gsm8k", "gsm8k_user", "sokoban_speedrun")
)

END = "<|im_end|>"


@dataclass
class Script:
    """An engine that says its lines; an exception is raised, a pair is (text without end of turn, stop reason).

    `hold`, if set, is awaited before every line: a way to keep one trajectory waiting while another goes on.
    """

    tokenizer: object
    lines: tuple
    hold: object = None
    calls: int = 0
    request_ids: set[str] = field(default_factory=set)

    async def generate(self, *, request_id, prompt_ids, sampling_params, image_data=None) -> TokenOutput:
        assert self.calls < len(self.lines), "the loop asked for more turns than the script has"
        line = self.lines[self.calls]
        self.calls += 1
        self.request_ids.add(request_id)
        await (self.hold() if self.hold else asyncio.sleep(0))
        if isinstance(line, Exception):
            raise line
        text, reason = (line + END, "stop") if isinstance(line, str) else line
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return TokenOutput(ids, [-0.5] * len(ids), [0] * len(ids), reason, list(prompt_ids))


@pytest.fixture(scope="module")
def prepare(tokenizer):
    """prepare(task, row, lines, hold=, **args) -> (a coroutine that plays and scores the trajectory, its engine)."""

    def prepare(task, row, lines, hold=None, **args):
        args = Args(**{"max_response_tokens": 1000, "tool_timeout": 4 * HANGS} | args)
        engine = Script(tokenizer, tuple(lines), hold)
        cls = agent_loop_class(row, task, args)
        assert cls is ToolAgentLoop

        async def run():
            loop = cls(engine, tokenizer, None, task, args)
            output = await loop.run({}, **row, step=0, rollout_n=0, validate=False)
            await score(task, [output], row)
            return output

        return run(), engine

    return prepare


@pytest.fixture(scope="module")
def play(prepare):
    def play(task, row, *lines, **how):
        return asyncio.run(prepare(task, row, lines, **how)[0])

    return play


def rewards_of_turns(output) -> list[float]:
    """The reward of each assistant turn, 0.0 where it has none; fails if one is anywhere but on a turn's last token."""
    mask = output.response_mask
    ends = [i for i, m in enumerate(mask) if m and (i + 1 == len(mask) or not mask[i + 1])]
    given = dict(output.turn_rewards)
    assert len(given) == len(output.turn_rewards) and set(given) <= set(ends)
    batch = rewards_of_tokens([output])[0].tolist()  # where the trainer puts them; the task's own comes on top
    terminal = output.reward["score"] if isinstance(output.reward, dict) else output.reward
    for i, reward in enumerate(batch):
        assert reward == pytest.approx(given.get(i, 0.0) + (terminal if i == ends[-1] else 0.0))
    return [given.get(end, 0.0) for end in ends]


def users_words(output) -> list[str]:
    return [message["content"] for message in output.messages if message["role"] == "user"]


# ---------------------------------------------------------------------------------------------------------------------
# GSM8K


@pytest.mark.parametrize("task", [gsm8k, gsm8k_user])
def test_rows_are_fixed_disjoint_and_fit_the_tiny_model(task, tokenizer):
    train, val = load_rows(task, "train"), load_rows(task, "val")
    assert train == load_rows(task, "train")
    assert train[0]["prompt"][0] == {"role": "system", "content": task.SYSTEM_PROMPT}
    for rows in (train, val):
        assert filter_overlong(rows, tokenizer, task, Args(model="x", max_model_len=640)) == rows
    assert len({row["extra_info"]["question"] for row in train + val}) == len(train) + len(val) == 24


def test_the_bundled_problems_are_right():
    problems = [json.loads(line) for line in gsm8k.DATA.read_text().splitlines()]
    for problem in problems:
        steps = re.findall(r"<<(.+?)=(-?[0-9.]+)>>", problem["answer"])
        assert steps
        for expression, value in steps:  # GSM8K's own notation of what a calculator says
            assert Decimal(calculator.calculator(expression)) == Decimal(value), problem
        assert gsm8k.find_answer(problem["answer"]) == Decimal(steps[-1][1])
    truths = [row["reward_model"]["ground_truth"] for row in gsm8k.load("train") + gsm8k.load("val")]
    assert truths == [str(gsm8k.find_answer(problem["answer"])) for problem in problems]


@pytest.mark.parametrize("text, number", [
    ("#### 72", "72"),
    ("so\n####  72 apples, not 80\n", "72"),
    ("#### 72.", "72"),
    ("#### 1,234,567", "1234567"),
    ("#### $1,234.50", "1234.50"),
    ("#### -5", "-5"),
    ("#### -$5", "-5"),
    ("#### $-5", "-5"),
    ("#### +5", "5"),
    ("#### .5", "0.5"),
    ("#### 5,", "5"),
    ("<answer> $1,072 in all </answer>", "1072"),
    ("#### <answer>72</answer>", "72"),  # verl's interaction prompts say "#### <answer>"
    ("#### 70\nNo, wait.\n#### 72", "72"),
    ("<answer>70</answer> #### 72", "72"),
    ("#### 72 <answer>70</answer>", "70"),
    ("#### 72\n####", "72"),
    ("The answer is 72.", None),
    ("####", None),
    ("#### --5", None),
    ("#### -$-5", None),
    ("### 72", None),
    ("<answer>72", None),  # cut off
    ("<answer>it is 72</answer>", None),
    ("#### ٣", None),  # digits of another script
])  # fmt: skip
def test_find_answer(text, number):
    assert gsm8k.find_answer(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    "text", ["<answer>" + "1" * 200_000, "<answer>" + "1," * 100_000 + "<", "#### " * 40_000 + "-"]
)
def test_runaway_text_takes_no_time(text):
    started = time.thread_time()
    assert gsm8k.find_answer(text) is None
    assert time.thread_time() - started < 60  # of this thread's CPU; it takes milliseconds, quadratic would be minutes


@pytest.mark.parametrize("said, truth, score, form", [
    ("#### 72.00", "72", 1.0, 1.0),
    ("#### 1000", "1,000", 1.0, 1.0),
    ("#### 72", 72, 1.0, 1.0),
    ("#### -72", "72", 0.0, 1.0),
    ("#### 71\n#### 72", "72", 1.0, 1.0),
    ("#### 72\n#### 71", "72", 0.0, 1.0),
    ("72", "72", 0.0, 0.0),
    (None, "72", 0.0, 0.0),
])  # fmt: skip
def test_the_reward_of_gsm8k(said, truth, score, form):
    row = {"reward_model": {"ground_truth": truth}}
    output = SimpleNamespace(messages=[{"role": "assistant", "content": said}])
    assert gsm8k.reward(output, row) == {"score": score, "format": form}


def test_only_the_assistants_last_message_is_graded():
    row = {"reward_model": {"ground_truth": "72"}}
    right, wrong = ({"role": "assistant", "content": f"#### {n}"} for n in (72, 71))
    for messages in ([], [{"role": "tool", "content": "#### 72"}], [right, {"role": "user", "content": "#### 72"}]):
        assert gsm8k.reward(SimpleNamespace(messages=messages), row) == {"score": 0.0, "format": 0.0}
    assert gsm8k.reward(SimpleNamespace(messages=[right, wrong]), row)["score"] == 0.0


def test_gsm8k_with_the_calculator(play):
    row = load_rows(gsm8k, "train")[0]  # 6*12-9
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*12-9"}}\n</tool_call>'
    output = play(gsm8k, row, call, "So she has\n#### 63")
    assert [m["content"] for m in output.messages[2:]] == ["", "63", "So she has\n#### 63"]
    assert output.reward == {"score": 1.0, "format": 1.0}
    assert play(gsm8k, row, call, ("", "length")).reward == {"score": 0.0, "format": 0.0}


# ---------------------------------------------------------------------------------------------------------------------
# Files as verl writes them


@pytest.fixture
def parquet(tmp_path):
    """parquet(interaction=) -> rows as verl's gsm8k.py or gsm8k_multiturn_w_interaction.py writes them."""

    def row(question: str, truth: str, index: int, interaction: bool) -> dict:
        asked = question + " Let's think step by step and output the final answer after `####`."
        prompt = [{"role": "user", "content": asked}]
        extra = {"split": "train", "index": index, "answer": f"#### {truth}", "question": question}
        if interaction:
            prompt.insert(0, {"role": "system", "content": "You are a math expert."})
            extra["interaction_kwargs"] = {"name": "gsm8k", "query": asked, "ground_truth": truth}
        return {
            "data_source": "openai/gsm8k",
            "prompt": prompt,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": extra,
        }

    def parquet(interaction: bool) -> list[str]:
        datasets = pytest.importorskip("datasets")
        rows = [row("What is 1+1?", "2", 0, interaction), row("What is 1-1001?", "-1000", 1, interaction)]
        file = str(tmp_path / "train.parquet")
        datasets.Dataset.from_list(rows).to_parquet(file)
        return [file]

    return parquet


def test_verls_gsm8k_parquet(parquet, play, tokenizer):
    rows = load_rows(gsm8k, "train", parquet(interaction=False))
    assert [row["index"] for row in filter_overlong(rows, tokenizer, gsm8k, Args(model="x"))] == [0, 1]
    assert rows[0]["prompt"][0] == {"role": "system", "content": gsm8k.SYSTEM_PROMPT}
    assert play(gsm8k, rows[1], "#### -1,000").reward == {"score": 1.0, "format": 1.0}


def test_verls_interaction_parquet(parquet, play):
    rows = load_rows(gsm8k_user, "train", parquet(interaction=True))
    assert rows[0]["prompt"][0]["content"] == "You are a math expert."  # a row's own system message stays
    output = play(gsm8k_user, rows[1], "#### 1000", "#### -1000")
    assert rewards_of_turns(output) == [0.0, 1 / 2]


# ---------------------------------------------------------------------------------------------------------------------
# GSM8K with a user

WRONG, NO_ANSWER = "That is wrong. Try again.", 'I see no answer. End with "#### N".'


@pytest.fixture
def user():
    (user,) = gsm8k_user.INTERACTIONS
    yield user
    assert user.tries == {}


def problem() -> dict:
    return load_rows(gsm8k_user, "train")[0]  # 63


@pytest.mark.parametrize("lines, replies, rewards, right", [
    (["#### 63"], [], [1.0], 1.0),
    (["hm", "#### 62", "#### 63"], [NO_ANSWER, WRONG], [0.0, 0.0, 1 / 3], 1.0),
    (["#### 60", "#### 61", "#### 62"], [WRONG, WRONG], [0.0, 0.0, 0.0], 0.0),
    (["", "#### 63"], [NO_ANSWER], [0.0, 1 / 2], 1.0),
])  # fmt: skip
def test_the_user_answers_and_pays_by_turn(play, user, lines, replies, rewards, right):
    output = play(gsm8k_user, problem(), *lines)
    assert users_words(output)[1:] == replies
    assert rewards_of_turns(output) == pytest.approx(rewards)
    assert output.reward == {"score": 0.0, "right": right}
    assert output.stop_reason == "stop"  # three wrong answers are an end, not a cut
    assert output.metrics["interaction/tries"] == len(lines)
    assert output.metrics.get("interaction/right", 0) == right


def test_the_users_state_is_dropped_when_the_trajectory_fails(play, user):
    with pytest.raises(RuntimeError, match="engine"):
        play(gsm8k_user, problem(), "#### 1", RuntimeError("engine"))


def in_turn(number: int, barrier: asyncio.Barrier):
    """A `hold` that makes trajectories alternate: all reach their next line before any says it."""

    async def hold():
        await barrier.wait()
        for _ in range(10 * number):
            await asyncio.sleep(0)

    return hold


def test_two_trajectories_of_one_user_do_not_share_tries(prepare, user):
    async def scenario():
        barrier = asyncio.Barrier(2)
        first, engine = prepare(gsm8k_user, problem(), ["#### 1", "#### 2", "#### 3"], in_turn(0, barrier))
        second, other = prepare(gsm8k_user, problem(), ["#### 1", "#### 2", "#### 63"], in_turn(1, barrier))
        outputs = await asyncio.gather(first, second)
        assert engine.request_ids.isdisjoint(other.request_ids)
        return outputs

    one, two = asyncio.run(scenario())
    assert (rewards_of_turns(one), rewards_of_turns(two)) == ([0, 0, 0], [0, 0, pytest.approx(1 / 3)])


# ---------------------------------------------------------------------------------------------------------------------
# environments.py, with environments that are slow, broken or hold something


class Room:
    """An environment whose steps are functions, and which writes down what happens."""

    def __init__(self, log: list, *steps):
        self.log, self.steps = log, list(steps)

    def reset(self, seed):
        self.log.append(("reset", seed))
        return "start"

    def step(self, action):
        self.log.append(("step", action, threading.current_thread() is threading.main_thread()))
        return self.steps.pop(0)()

    def close(self):
        self.log.append("close")


@pytest.fixture
def room():
    """room(log, step, ..., slow=) -> (a task, its row); in the end no environment is left."""
    made = []

    def room(log, *steps, slow=False):
        make = lambda **kwargs: Room(log, *steps)
        made.append(environments.EnvInteraction("room", make, slow=slow))
        row = {"prompt": [], "extra_info": {"interaction_kwargs": {"name": "room", "seed": 3}}}
        return SimpleNamespace(INTERACTIONS=[made[-1]], reward=lambda output, row: 0.0), row

    yield room
    assert all(interaction.envs == {} for interaction in made)


def fail(error: BaseException):
    raise error


@pytest.mark.parametrize("slow", [False, True])
def test_an_environments_life(play, room, slow):
    log = []
    steps = [
        lambda: ("go on", 0.25, False, {"steps": 1, "note": "no number"}),
        lambda: fail(environments.IllegalAction("no.")),
        lambda: ("bye", 1, True, {"steps": 1}),
    ]
    task, row = room(log, *steps, slow=slow)
    output = play(task, row, " a ", "b", "c")
    assert log == [("reset", 3), ("step", " a ", not slow), ("step", "b", not slow), ("step", "c", not slow), "close"]
    assert rewards_of_turns(output) == [0.25, -0.1, 1.0]
    assert users_words(output) == environments.seen_before_turns(output) == ["start", "go on", "Illegal: no."]
    found = {name: value for name, value in output.metrics.items() if name.startswith("interaction/")}
    assert found == {"interaction/steps": 2, "interaction/illegal": 1}


@pytest.mark.parametrize("slow", [False, True])
def test_an_environments_own_error_is_no_illegal_action(play, room, slow):
    log = []
    task, row = room(log, lambda: int("x"), slow=slow)
    with pytest.raises(ValueError, match="invalid literal"):
        play(task, row, "a")
    assert log[-1] == "close"


def test_a_cancelled_game_is_closed(prepare, room):
    log = []
    task, row = room(log, lambda: ("go on", 0.0, False, {}))

    async def scenario():
        waiting = asyncio.Event()

        async def hold():
            if len(log) == 2:  # reset and one step: the second turn is never said
                waiting.set()
                await for_ever()

        playing = asyncio.create_task(prepare(task, row, ["a", "b"], hold)[0])
        await waiting.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(scenario())
    assert log[-1] == "close"


# ---------------------------------------------------------------------------------------------------------------------
# The Sokoban speedrun

BOARD = """+ + + + + +
+ X - - - +
+ - - @ - +
+ - $ - * +
+ - - - - +
+ + + + + +"""  # one of two boxes is on its goal
ROW_OF_BOXES = "+ + + + + +\n+ * @ @ X +\n+ + + + + +"
TWO_GOALS = "+ + + + + +\n+ * @ X - +\n+ - @ - X +\n+ + + + + +"


@pytest.mark.parametrize("board, moves, boxes, player, progress", [
    (BOARD, "L", {(2, 3), (3, 2)}, (3, 3), 0.0),
    (BOARD, "LU", {(1, 3), (3, 2)}, (2, 3), 0.0),  # pushes
    (BOARD, "LUU", {(1, 3), (3, 2)}, (2, 3), 0.0),  # against the wall
    (BOARD, "LL", {(2, 3), (3, 1)}, (3, 2), 0.0),  # off the goal: no less than nothing
    (BOARD, "LURULL", {(1, 1), (3, 2)}, (1, 2), 1.0),
    (BOARD, "RRRD", {(2, 3), (3, 2)}, (4, 4), 0.0),
    (ROW_OF_BOXES, "R", {(1, 2), (1, 3)}, (1, 1), 0.0),  # two are not pushed
    (TWO_GOALS, "R", {(1, 3), (2, 2)}, (1, 2), 0.5),
])  # fmt: skip
def test_moves_of_sokoban(board, moves, boxes, player, progress):
    board = sokoban.Board(board).move(moves)
    assert (board.boxes, board.player, board.progress()) == (boxes, player, progress)


@pytest.mark.parametrize("said, score", [
    ("URRD <answer>LURULL</answer>", 1.0),
    ("<answer>your moves</answer> <answer>left, up, r u L, Left</answer> <answer>L</answer>", 1.0),
    ("<answer>LURULLL</answer>", 1.0),  # a move against the wall
    ("<answer>LU</answer>", 0.0),
    ("LURULL", 0.0),
])  # fmt: skip
def test_answers_of_sokoban(said, score):
    row = {"extra_info": {"board": BOARD}}
    output = SimpleNamespace(messages=[{"role": "assistant", "content": said}])
    assert sokoban.reward(output, row) == {"score": score, "solved": int(score == 1)}
    output.messages[0]["role"] = "user"
    assert sokoban.reward(output, row)["score"] == 0.0


def test_the_speedruns_boards(tmp_path, monkeypatch):
    monkeypatch.setenv("SOKOBAN_DATA", str(tmp_path))
    (tmp_path / "sokoban_eval.jsonl").write_text(json.dumps({"question": BOARD, "answer": "LURULL"}) + "\n")
    (row,) = load_rows(sokoban, "val")
    system, question = row["prompt"]
    assert row["extra_info"]["board"] == BOARD and system["content"] == sokoban.SYSTEM_PROMPT
    assert question["content"].splitlines()[:2] == ["  0 1 2 3 4 5", "0 + + + + + +"]
    with pytest.raises(BadInput, match="there is no sokoban_train.jsonl"):
        load_rows(sokoban, "train")
    monkeypatch.delenv("SOKOBAN_DATA")
    with pytest.raises(BadInput, match="needs SOKOBAN_DATA"):
        load_rows(sokoban, "val")
