"""examples/gymnasium_text.py and reasoning_gym_task.py, where their packages are: `pip install gymnasium`."""

import asyncio
from types import SimpleNamespace

import pytest
from conftest import REPO
from test_example_tasks import Script

from agent_loop import BadInput, ToolAgentLoop
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


def play(task, tokenizer, *lines):
    engine = Script(tokenizer, lines)
    loop = ToolAgentLoop(engine, tokenizer, None, task, Args(max_response_tokens=1000))
    row = load_rows(task, "val")[0]
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
    seen = {row["prompt"][-1]["content"] for row in load_rows(taxi, "val")}
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
