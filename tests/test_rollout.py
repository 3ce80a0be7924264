"""The engine (vLLM's CPU build): states, sync, seeds; one rollout with everything that fails."""

import dataclasses
import math
import operator
import pickle
import random
import string
import types

import numpy as np
import pytest
import torch
from conftest import generate, make_run, output_of
from transformers import AutoModelForCausalLM

from agent_loop import AgentLoopBase, register
from flatrl.bad_input import BadReward, NothingLeft
from flatrl.compact import compact
from rollout import Engine, rollout

PROMPTS = [[random.Random(i).randrange(3, 250) for _ in range(5 + 3 * i)] for i in range(6)]


def hf_model(path: str, scale: float = 1.0):
    """The model in float32, its weights moved away from the file's where scale != 1."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
            parameter.add_(noise, alpha=(scale - 1) * 0.05)
    return model


def wake(engine: Engine, model, version: int) -> None:
    engine.wake_weights()
    engine.load_weights(((n, p.detach()) for n, p in model.named_parameters()), version)
    engine.wake_kv()


@torch.no_grad()
def hf_logprobs(model, prompt: list[int], response: list[int]):
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def test_the_engine_refuses_a_call_out_of_order(engine, tiny_model):
    """Nothing is sampled from stale weights (decision 2)."""
    weights = dict(hf_model(tiny_model).named_parameters())
    steps = {  # each needs the state that the one before it leaves
        "wake_weights": engine.wake_weights,
        "load_weights": lambda: engine.load_weights(weights.items(), 7),
        "wake_kv": engine.wake_kv,
        "sleep": engine.sleep,
    }
    for due, take in steps.items():
        others = [other for name, other in steps.items() if name != due]
        if due != "sleep":
            others.append(engine.step)
        for other in others:
            with pytest.raises(RuntimeError, match="this call needs"):
                other()
        with torch.no_grad():
            take()
    assert engine.state == "asleep" and engine.version == 7


def test_seed_is_a_function_of_run_seed_trajectory_and_turn(engine, background, tiny_model):
    def sample(n: int) -> list[list[int]]:
        outs = generate(engine, background, [PROMPTS[0]] * n, temperature=1.0, max_tokens=12)
        return [out.token_ids for out in outs]

    wake(engine, hf_model(tiny_model), 0)
    first = sample(3)
    assert first[0] != first[1] != first[2]  # each trajectory has a seed of its own
    assert sample(3)[0] != first[0]  # and each turn
    engine.sleep()  # a new rollout counts turns from 0
    wake(engine, hf_model(tiny_model), 1)
    assert sample(1)[0] == first[0]  # whatever else is in the batch


def test_stop_reasons_stop_tokens_and_stop_strings(engine, background, tiny_model, tokenizer):
    wake(engine, hf_model(tiny_model), 0)

    def sample(**sampling):
        sampling = {"temperature": 0.0, "max_tokens": 5} | sampling
        return generate(engine, background, [PROMPTS[1]], **sampling)[0]

    out = sample(ignore_eos=True)
    assert (out.stop_reason, len(out.token_ids)) == ("length", 5)
    stop = out.token_ids[2]
    n = out.token_ids.index(stop) + 1  # the stop token is included
    cut = sample(stop_token_ids=[stop])
    assert (cut.stop_reason, cut.token_ids) == ("stop", out.token_ids[:n])

    letters = sample(temperature=1.0, max_tokens=60, stop=[*string.ascii_letters])
    ends = [tokenizer.decode([token]) in string.ascii_letters for token in letters.token_ids]
    assert letters.stop_reason == "stop" and ends.index(True) == len(ends) - 1


def test_a_bad_request_fails_alone(engine, background, tiny_model):
    wake(engine, hf_model(tiny_model), 0)
    prompts = [PROMPTS[0], list(range(3, 203)), [10**6], [-1, 5]]
    good, *bad = generate(engine, background, prompts, temperature=1.0, max_tokens=4)
    assert len(good.token_ids) == 4
    bad += generate(engine, background, [PROMPTS[0]], no_such_parameter=1)
    for error, said in zip(bad, ("128", "token id 1000000", "token id -1", "no_such_parameter")):
        assert isinstance(error, ValueError) and said in str(error)
    assert not engine.pending and not engine.running


JUDGES: list = []  # engines


@register("test_two_turns")
class TwoTurns(AgentLoopBase):
    """Samples two turns of at most six tokens, with three given tokens between them.

    row["extra"] says what else it does, if it is a list, what each member does."""

    async def run(self, sampling_params, **row):
        extra = row["extra"]
        if isinstance(extra, list):
            extra = extra[row["rollout_n"]]
        if extra == "raise":
            raise KeyError("the agent loop broke")
        if extra == "skip":
            return []
        sampling_params["max_tokens"] = 6
        trajectory = self.start(row)
        await self.assistant_turn(trajectory, sampling_params)
        trajectory.add_given([5, 6, 7])
        await self.assistant_turn(trajectory, sampling_params)
        trajectory.stop_reason = "stop"
        output = trajectory.output()
        if extra == "judge":
            JUDGES.append(self.engine)
        if extra == "own":
            output.reward = 0.5
        if extra == "list":
            first = self.start(row)
            first.add_given([5])
            return [first.output(), output]
        if extra == "sides":
            return [dataclasses.replace(output, unit=unit) for unit in "aba"]
        return output


def make_rows(*kinds) -> list[dict]:
    prompt = [{"role": "user", "content": "What is 12+34?"}]
    return [
        {"prompt": prompt, "agent_name": "test_two_turns", "extra": kind, "index": i}
        for i, kind in enumerate(kinds)
    ]


@pytest.fixture
def play(engine, background, tokenizer, args, tiny_model):
    """Rolls out rows with a reward function, or a task, and the weights of the step."""

    def play(reward, rows, group_size=1, step=0, kind="train"):
        task = types.SimpleNamespace(reward=reward) if callable(reward) else reward
        run = make_run(engine, background, task, tokenizer, args)
        wake(engine, hf_model(tiny_model), step)
        rollouts = rollout(run, rows, step, group_size, {"temperature": 1.0}, kind)
        engine.sleep()
        return rollouts

    return play


def test_a_rollout_keeps_order_drops_failures_and_counts_them(play):
    async def reward(output, row):
        assert output.text and output.messages[-1]["role"] == "assistant"
        kind = row["extra"]
        if kind == "no reward" and output.extra["sample"] == 1:
            raise ZeroDivisionError("the grader broke")
        if kind == "judge":
            await JUDGES[0].generate(request_id="judge", prompt_ids=[5], sampling_params={})
        output.turn_rewards.append((10**6 if kind == "far" else -1, 0.25))
        output.messages[-1]["content"] = "graded"  # in its own copy
        if kind == "nan":
            return {"score": math.nan}
        return {"score": 0.5, "digits": 2} if kind == "dict" else torch.tensor(1.0)

    kinds = ["x", "raise", "no reward", "skip", "list", "dict", "judge", "far", "nan", "own"]
    rows = make_rows(*kinds)
    rollouts = play(reward, rows, group_size=2, step=3)

    names = operator.itemgetter("prompt", "sample", "segment")
    segments = [names(output.extra) for output in rollouts.outputs]
    expected = [(0, 0, 0), (0, 1, 0), (2, 0, 0)]
    expected += [(4, 0, 0), (4, 0, 1), (4, 1, 0), (4, 1, 1), (5, 0, 0), (5, 1, 0)]
    expected += [(9, 0, 0), (9, 1, 0)]
    assert segments == expected
    assert all(output.messages[-1]["content"] != "graded" for output in rollouts.outputs)
    rewards = [output.reward for output in rollouts.outputs]
    assert rewards == [1.0] * 7 + [{"score": 0.5, "digits": 2}] * 2 + [0.5] * 2

    assert +rollouts.lost == {"failed_agent_loop": 2, "skipped": 2, "failed_reward": 7}
    errors = {error["prompt"]: error["error"] for error in rollouts.errors}
    assert errors[2].endswith("ZeroDivisionError: the grader broke\n")
    assert "the rollout is over: call the engine inside the agent loop's run" in errors[6]
    for output in rollouts.outputs[:2]:
        given = output.response_mask.index(0)
        assert output.response_mask[given : given + 3] == [0, 0, 0]
        assert output.response_ids[given : given + 3] == [5, 6, 7]
        assert output.response_versions == [3 if m else -1 for m in output.response_mask]
        assert output.turn_rewards == [(len(output.response_ids) - 1, 0.25)]
    kept = sum(sum(output.response_mask) for output in rollouts.outputs)
    assert rollouts.statistics["tokens"] > kept  # those of dropped trajectories count, too


def test_a_step_may_have_two_rollouts_of_a_kind(engine, background, tokenizer, args, tiny_model):
    task = types.SimpleNamespace(reward=lambda output, row: 1.0)
    run = make_run(engine, background, task, tokenizer, args)
    wake(engine, hf_model(tiny_model), 0)
    found = [rollout(run, make_rows("x"), 0, 1, {"temperature": 1.0}).outputs for _ in range(2)]
    engine.sleep()
    (first,), (second,) = found
    assert first.response_ids == second.response_ids  # pools do not enter the seeds


def test_kept_outputs_are_compact_and_act_like_lists():
    output = output_of([1, 0, 1], ids=[300, 2**17, 7], version=3)
    kept = pickle.loads(pickle.dumps(compact(output)))
    assert vars(kept) == vars(output) and vars(output) == vars(kept)
    assert not kept.response_ids != output.response_ids and kept.response_ids != [7]
    assert output.prompt_ids + kept.response_ids[1:] == [1, 2, 2**17, 7]


def judged_by(judge) -> types.SimpleNamespace:
    return types.SimpleNamespace(group_reward=judge)


@pytest.mark.parametrize("task, error, said", [
    (lambda output, row: None if row["index"] else 1.0, BadReward, "with index 1: return a number"),
    (judged_by(lambda outputs, rows: [{"right": 1}] * 2), BadReward, "0: return a number"),
    (judged_by(lambda outputs, rows: None), NothingLeft, "NoneType"),
])  # fmt: skip
def test_a_reward_that_returns_no_number_ends_the_run(play, task, error, said):
    """Without these rollouts the mean would be that of the right answers alone."""
    with pytest.raises(error, match=said):
        play(task, make_rows("x", "x"), group_size=2)


def test_user_code_draws_numbers_of_its_step_and_rank(play, monkeypatch):
    def drawn(step: int, rank: int = 0) -> tuple:
        monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: rank)
        return play(reward, make_rows("x"), step=step).outputs[0].reward["drawn"]

    def reward(output, row):
        return {"score": 0.0, "drawn": (random.random(), np.random.rand(), torch.rand(()).item())}

    first = drawn(2)
    others = [drawn(3), drawn(2, rank=1)]
    random.seed(9)  # as the start of another process leaves it
    assert drawn(2) == first
    for other in others:
        assert all(a != b for a, b in zip(first, other))


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_a_group_is_judged_once(play, kind):
    calls = []

    def judge(outputs, rows):
        index = rows[0]["index"]
        assert rows == [rows[0]] * len(outputs) and len({*map(id, rows)}) == len(rows)
        calls.append((index, [output.extra["sample"] for output in outputs]))
        outputs[0].metrics["judged"] = 1
        if index == 3:
            raise RuntimeError("the judge broke")
        rewards = [{"score": place, "of": len(outputs)} for place in range(len(outputs))]
        if index == 4:
            rewards[1] = math.nan
        return rewards[: 1 if index == 5 else None]

    async def async_judge(outputs, rows):
        return judge(outputs, rows)

    rows = make_rows(
        ["x", "raise", "list"],
        ["x", "own", "skip"],
        ["sides", "x", "sides"],
        *["x"] * 3,
        ["own", "raise", "own"],
    )
    task = judged_by(judge if kind == "train" else async_judge)
    rollouts = play(task, rows, group_size=3, kind=kind)

    # The last output of each unit. Prompt 6 is not judged: it has rewards of its own.
    everyone = [0, 1, 2]
    assert sorted(calls) == [
        (0, [0, 2]), (1, [0]), (2, [0, 0, 1, 2, 2]), (3, everyone), (4, everyone), (5, everyone),
    ]  # fmt: skip
    rewards = {}
    for output in rollouts.outputs:
        reward = output.reward
        score = reward["score"] if isinstance(reward, dict) else reward
        rewards.setdefault(output.extra["index"], []).append(score)
    assert rewards == {
        0: [0, 1, 1],
        1: [0, 0.5],
        2: [0, 1, 0, 2, 3, 4, 3],
        4: [0, 2],
        6: [0.5, 0.5],
    }
    assert rollouts.outputs[0].reward["of"] == 2
    assert [output.metrics.get("judged") for output in rollouts.outputs[:2]] == [1, None]
    assert +rollouts.lost == {"failed_agent_loop": 2, "skipped": 1, "failed_reward": 7}
    errors = [error["error"].splitlines()[-1] for error in rollouts.errors]
    assert errors.count("ValueError: group_reward returned 1 rewards for 3 outputs") == 3
    assert errors.count("RuntimeError: the judge broke") == 3
