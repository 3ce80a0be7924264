"""examples/gsm8k.py, gsm8k_user.py and environments.py: rewards, and rollouts of scripted turns."""

import threading
from decimal import Decimal
from types import SimpleNamespace

import pytest
from conftest import HANGS, REPO
from test_agent_loop import said_by
from test_example_outputs import play as play_all

from data import filter_overlong, load_rows, load_task
from examples import environments
from train import Args

gsm8k = load_task(str(REPO / "examples/gsm8k.py"))
gsm8k_user = load_task(str(REPO / "examples/gsm8k_user.py"))


@pytest.fixture(scope="module")
def play(tokenizer):
    """play(task, row, line, ...) -> the graded output."""

    def play(task, row, *lines):
        limits = dict(max_response_tokens=1000, tool_timeout=4 * HANGS)
        (output,) = play_all(task, tokenizer, row, *lines, **limits)
        return output

    return play


def rewards_of_turns(output) -> list[float]:
    """The reward of each assistant turn, which is on the turn's last token; 0.0 for none."""
    mask = output.response_mask
    ends = [i for i, m in enumerate(mask) if m and (i + 1 == len(mask) or not mask[i + 1])]
    given = dict(output.turn_rewards)
    assert len(given) == len(output.turn_rewards) and set(given) <= set(ends)
    return [given.get(end, 0.0) for end in ends]


# ---------------------------------------------------------------- GSM8K


@pytest.mark.parametrize("task", [gsm8k, gsm8k_user])
def test_rows_are_disjoint_and_fit_the_tiny_model(task, tokenizer):
    train, val = load_rows(task, "train"), load_rows(task, "val")
    assert train[0]["prompt"][0] == {"role": "system", "content": task.SYSTEM_PROMPT}
    for rows in (train, val):
        args = Args(model="x", max_model_len=640)
        assert filter_overlong(rows, tokenizer, task, args) == rows
    assert len({row["extra_info"]["question"] for row in train + val}) == 24


@pytest.mark.parametrize("text, number", [
    ("so\n####  72 apples, not 80\n", "72"),
    ("#### $1,234.50", "1234.50"),
    ("#### -$5", "-5"),
    ("#### <answer>72</answer>", "72"),  # verl's interaction prompts say "#### <answer>"
    ("#### 70\nNo, wait.\n#### 72", "72"),
    ("The answer is 72.", None),
    ("<answer>72", None),  # cut off
])  # fmt: skip
def test_find_answer(text, number):
    assert gsm8k.find_answer(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize("said, truth, score, form", [
    ("#### 1000.00", "1,000", 1.0, 1.0),
    ("#### 72\n#### 71", "72", 0.0, 1.0),
    (None, "72", 0.0, 0.0),
])  # fmt: skip
def test_the_reward_of_gsm8k(said, truth, score, form):
    row = {"reward_model": {"ground_truth": truth}}
    output = SimpleNamespace(messages=[{"role": "assistant", "content": said}])
    assert gsm8k.reward(output, row) == {"score": score, "format": form}
    output.messages.append({"role": "user", "content": said})  # not the assistant's
    assert gsm8k.reward(output, row) == {"score": 0.0, "format": 0.0}


def test_verls_parquet_files(play, tmp_path):
    """As verl's gsm8k_multiturn_w_interaction.py writes them."""
    datasets = pytest.importorskip("datasets")
    truth = "-1000"
    asked = "What is 1-1001? Let's think step by step and output the final answer after `####`."
    system = {"role": "system", "content": "You are a math expert."}
    kwargs = {"name": "gsm8k", "query": asked, "ground_truth": truth}
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [system, {"role": "user", "content": asked}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": 0, "interaction_kwargs": kwargs},
    }
    file = str(tmp_path / "train.parquet")
    datasets.Dataset.from_list([row]).to_parquet(file)
    (row,) = load_rows(gsm8k_user, "train", [file])
    assert row["prompt"][0] == system  # the row's own stays
    output = play(gsm8k_user, row, "#### 1000", "#### -1000")
    assert rewards_of_turns(output) == [0.0, 1 / 2]


# ---------------------------------------------------------------- GSM8K with a user

WRONG = "That is wrong. Try again."
NO_ANSWER = 'I see no answer. End with "#### N".'


@pytest.fixture
def user():
    (user,) = gsm8k_user.INTERACTIONS
    yield user
    assert user.tries == {}


@pytest.mark.parametrize("lines, replies, rewards, right", [
    (["#### 63"], [], [1.0], 1.0),
    (["hm", "#### 62", "#### 63"], [NO_ANSWER, WRONG], [0.0, 0.0, 1 / 3], 1.0),
    (["#### 60", "#### 61", "#### 62"], [WRONG, WRONG], [0.0, 0.0, 0.0], 0.0),
])  # fmt: skip
def test_the_user_answers_and_pays_by_turn(play, user, lines, replies, rewards, right):
    output = play(gsm8k_user, load_rows(gsm8k_user, "train")[0], *lines)  # 63
    assert said_by(output, "user")[1:] == replies
    assert rewards_of_turns(output) == pytest.approx(rewards)
    assert output.reward == {"score": 0.0, "right": right}
    assert output.stop_reason == "stop"  # three wrong answers are an end, not a cut
    assert output.metrics["interaction/gsm8k/tries"] == len(lines)


# ---------------------------------------------------------------- environments.py


class Room:
    """An environment whose steps are functions, and which writes down what happens."""

    def __init__(self, log: list, *steps):
        self.log = log
        self.steps = list(steps)

    def reset(self, seed):
        self.log.append(("reset", seed))
        return "start"

    def step(self, action):
        in_main = threading.current_thread() is threading.main_thread()
        self.log.append(("step", action, in_main))
        return self.steps.pop(0)()

    def close(self):
        self.log.append("close")


def refuse():
    raise environments.IllegalAction("no.")


@pytest.mark.parametrize("slow", [False, True])
def test_an_environments_life(play, slow):
    log = []
    steps = [
        lambda: ("more", 0.25, False, {"steps": 1, "note": "no number"}),
        refuse,
        lambda: ("bye", 1, True, {"steps": 1}),
    ]
    room = environments.EnvInteraction("room", lambda **kwargs: Room(log, *steps), slow=slow)
    row = {"prompt": [], "extra_info": {"interaction_kwargs": {"name": "room", "seed": 3}}}
    task = SimpleNamespace(INTERACTIONS=[room], reward=lambda output, row: 0.0)
    output = play(task, row, " a ", "b", "c")
    assert room.envs == {}
    taken = [("step", action, not slow) for action in (" a ", "b", "c")]
    assert log == [("reset", 3), *taken, "close"]
    assert rewards_of_turns(output) == [0.25, -0.1, 1.0]
    seen = ["start", "more", "Illegal: no."]
    assert said_by(output, "user") == environments.seen_before_turns(output) == seen
    assert output.metrics["interaction/room/steps"] == 2
    assert output.metrics["interaction/room/illegal"] == 1
