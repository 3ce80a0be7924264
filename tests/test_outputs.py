"""What user code returns is checked where it comes in: a bad one costs its rollout, by name."""

import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import generate, make_run
from PIL import Image
from test_rollout import PROMPTS, hf_model, make_rows, wake

import data
import train
from agent_loop import AgentLoopBase, AgentLoopOutput, BadInput, Trajectory, register
from flatrl.metrics import describe
from flatrl.rows import check_row
from rollout import rollout, training_pool

NAN = math.nan


def at(name, index, value):
    return lambda output: getattr(output, name).__setitem__(index, value)


def to(name, value):
    return lambda output: setattr(output, name, value)


def extra(**more):
    return lambda output: output.extra.update(more)


# What is done to a good output of six tokens, and what is said about it.
SPOILT = {
    "beyond": (at("response_ids", 0, 10**6), "response_ids has 1000000: must be int in [0, "),
    "negative": (at("prompt_ids", 0, -1), "prompt_ids has -1: must be int in [0, "),
    "bools": (at("response_ids", 0, True), "response_ids has True: must be int"),
    "floats": (at("response_ids", 0, 5.0), "response_ids has 5.0: must be int"),
    "a tensor": (to("response_ids", torch.ones(6)), "response_ids must be a list"),
    "mask": (at("response_mask", 0, 0.5), "response_mask has 0.5: must be bool or int in [0, 1]"),
    "no logprob": (at("response_logprobs", 0, None), "response_logprobs has None"),
    "nan": (at("response_logprobs", -1, NAN), "response_logprobs has nan: must be float or int"),
    "probability": (at("response_logprobs", 0, 0.5), "response_logprobs has 0.5"),
    "no version": (at("response_versions", 0, None), "response_versions has None"),
    "an old one": (at("response_versions", 0, 0), "the mask is 1, has 0: must be int in [3, 3]"),
    "a future one": (at("response_versions", 0, 4), "has 4: must be int in [-1, 3]"),
    "lengths": (lambda o: o.response_ids.append(5), "the response lists of an output must have"),
    "window": (lambda o: o.prompt_ids.extend([5] * 500), "more than the window's 128"),
    "metrics": (to("metrics", None), "'metrics' must be a dict, got None"),
    "turns": (to("num_turns", 10**400), "num_turns has 1000000"),
    "no turns": (to("num_turns", -1), "num_turns has -1: must be int in [0, 2.14748e+09]"),
    "text": (to("text", 5), "'text' must be a str|None, got 5"),
    "marks": (extra(filtered=True), "for something else: unit or extra {'filtered'}"),
    "a demonstration": (extra(demonstration=True), "unit or extra {'demonstration'}"),
    "a hint": (extra(told_prompt_ids="x"), "unit or extra {'told_prompt_ids'}"),
    "a unit's name": (to("unit", "mean"), "unit or extra {'mean'}"),
    "lock": (extra(lock=threading.Lock()), "cannot pickle '_thread.lock' object"),
    "image": (
        to("images", [Image.new("RGB", (8, 8))]),
        "there are images, and this model reads text only"),
    "twice": (lambda o: [o, o], "returned one output twice"),
    "a trajectory": (
        lambda o: Trajectory([], [1], [1], []),
        "Spoilt.run returned <class 'agent_loop.Trajectory'>, "),
    "none in a list": (
        lambda o: (o, None),
        "Spoilt.run returned <class 'NoneType'>, no AgentLoopOutput"),
}
REWARDS = {
    "a text": "0.5",
    "no number": NAN,
    "none": None,
    "a list": [1],
    "good": True,
    "numpy": {"score": np.float32(0.5), "x": np.float32(0.25)},
    "its nan": {"score": 1, "x": np.float32(NAN)},
    "a lock": {"score": 1, "lock": threading.Lock()},
}


@register("test_spoilt")
class Spoilt(AgentLoopBase):
    async def run(self, sampling_params, **row):
        trajectory = self.start(row)
        await self.assistant_turn(trajectory, {**sampling_params, "max_tokens": 6})
        output = trajectory.output()
        spoil, _ = SPOILT.get(str(row["extra"]), (lambda output: None, ""))
        return spoil(output) or output


@pytest.fixture
def phase_of(engine, background, tokenizer, args, tiny_model):
    """phase_of(kinds, reward) -> the rollouts of a step with one row of each kind."""

    def phase_of(kinds, reward, group=1, agent="test_spoilt", **flags):
        rows = [row | {"agent_name": agent} for row in make_rows(*kinds)]
        wake(engine, hf_model(tiny_model), 3)
        task = SimpleNamespace(reward=reward)
        run = make_run(engine, background, task, tokenizer, train.replace(args, **flags))
        phase = rollout(run, rows, 3, group, {"temperature": 1.0, "stop": ["zz"]})
        engine.sleep()
        return phase

    return phase_of


def last_lines(phase, kinds) -> dict:
    return {kinds[error["prompt"]]: error["error"].splitlines()[-1] for error in phase.errors}


def test_a_bad_output_costs_its_rollout(phase_of):
    kinds = ["good", *SPOILT, "good"]
    phase = phase_of(kinds, lambda output, row: 1.0)
    assert [output.extra["index"] for output in phase.outputs] == [0, len(kinds) - 1]
    assert +phase.counts == {"failed_agent_loop": len(SPOILT)}
    errors = last_lines(phase, kinds)
    for kind, (_, said) in SPOILT.items():
        assert said in errors[kind], kind
    assert data.collate(phase.trained)["versions"].max() == 3  # the rest makes a batch


def test_a_bad_reward_costs_its_rollout(phase_of):
    kinds = [*REWARDS]
    phase = phase_of(kinds, lambda output, row: REWARDS[row["extra"]])
    rewards = {kinds[output.extra["prompt"]]: output.reward for output in phase.outputs}
    assert rewards == {"good": 1.0, "numpy": {"score": 0.5, "x": 0.25}}
    assert describe(phase.outputs, data.by_unit(phase.outputs))["reward_part/x"] == 0.25
    said = "ValueError: a reward must be a finite number, got"
    assert last_lines(phase, kinds) == {
        "a text": f"{said} '0.5'",
        "no number": f"{said} nan",
        "none": f"{said} None",
        "a list": f"{said} [1]",
        "its nan": "ValueError: x must be a finite number, got np.float32(nan)",
        "a lock": "TypeError: cannot pickle '_thread.lock' object",
    }


def test_loops_share_nothing_that_they_may_change(phase_of, engine, args):
    """Sampling parameters and flags are a loop's own, and outputs are copied."""
    seen, kept = [], []

    @register("test_changes")
    class Changes(Spoilt):
        async def run(self, sampling_params, **row):
            stops = sampling_params["stop_token_ids"], sampling_params["stop"]
            seen.append((*map(list, stops), self.args.max_images))
            for stop in stops:
                stop.append(5)
            self.args.max_images = 99
            kept.append(await super().run({**sampling_params, "stop": []}, **row))
            return kept[0]

    def reward(output, row):
        kept[0].response_ids.clear()
        return 1.0

    before = [*engine.stop_token_ids]
    phase = phase_of(["good"], reward, 3, "test_changes")
    assert seen == [(before, ["zz"], 8)] * 3
    assert engine.stop_token_ids == before and args.max_images == 8
    samples = [output.extra["sample"] for output in phase.outputs]
    assert samples and samples == [0, 1, 2][: len(samples)]
    assert all(len(o.response_ids) == len(o.response_mask) > 0 for o in phase.outputs)
    assert "sample" not in kept[0].extra


def test_a_units_metrics_change_no_number_of_the_log():
    output = AgentLoopOutput(
        prompt_ids=[1],
        response_ids=[2],
        response_mask=[1],
        response_logprobs=[-1.0],
        response_versions=[0],
        reward=1.0,
        metrics={"trajectories": 7, "tool_calls": 2},
        extra={"prompt": 0, "sample": 0, "segment": 0},
    )
    described = describe([output], data.by_unit([output]))
    assert (described["rollout/trajectories"], described["rollout/tool_calls"]) == (1, 2)


def test_states_that_are_not_one_for_each_turn_cost_the_rollout(phase_of):
    def reward(output, row):
        output.metrics["states"] = row["extra"]
        return 1.0

    kinds = [[1], [1, 2], [], "ab", 5, [None]]
    phase = phase_of(kinds, reward, algo="gigpo", adv_estimator="gigpo")
    assert [kinds[output.extra["prompt"]] for output in phase.outputs] == [[1], [], [None]]
    assert "metrics['states'] has 2 states for 1 turns" in phase.errors[0]["error"]
    assert +phase.counts == {"failed_reward": 3}


BAD_REQUESTS = [
    ({"stop": [["a"]]}, "Expected `str`, got `array` - at `$.stop[0]`"),
    ({"max_tokens": 1.5}, "got `float` - at `$.max_tokens`"),
    ({"max_tokens": True}, "got `bool`"),
    ({"temperature": NAN}, "temperature must be a finite number"),
    ({"n": 2}, "n can't be set here"),
    ({"prompt_logprobs": 1}, "prompt_logprobs can't be set here"),
    ({"seed": 1 << 64}, "more than 64 bits"),
    ({"stop_token_ids": [10**6], "min_tokens": 2}, "stop_token_ids has 1000000: must be int"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids has -1"),
    ({"logit_bias": {10**6: 1.0}}, "logit_bias has 1000000"),
    ({"structured_outputs": {"regx": "a"}}, "must use one kind of structured outputs"),
]


def test_a_bad_request_fails_alone(engine, background, tiny_model):
    wake(engine, hf_model(tiny_model), 0)
    bad_prompts = [([x], {}, f"prompt_ids has {x!r}") for x in (10**6, -1, "5")]
    bad_params = [(PROMPTS[0], params, said) for params, said in BAD_REQUESTS]
    for prompt, params, said in bad_prompts + bad_params:
        (error,) = generate(engine, background, [prompt], **params)
        assert isinstance(error, ValueError) and said in str(error), (params, error)
    assert not engine.pending and not engine.core.has_unfinished_requests()
    (good,) = generate(engine, background, PROMPTS[:1], max_tokens=3, stop=["a", "b"])
    assert 0 < len(good.token_ids) <= 3
    # A turn with little room left may be shorter than min_tokens.
    (late,) = generate(engine, background, PROMPTS[:1], max_tokens=3, min_tokens=20)
    assert len(late.token_ids) == 3


def raises(error):
    raise error


@pytest.mark.parametrize("answer, said", [
    (lambda: -1, "what it returned has -1: must be int in [0, 3]"),
    (lambda: 4, "has 4"),
    (lambda: 1.5, "has 1.5"),
    (lambda: True, "has True"),
    (lambda: None, "has None"),
    (lambda: raises(ZeroDivisionError("mine")), "ZeroDivisionError: mine"),
    (lambda: raises(SystemExit(0)), "SystemExit: 0"),
])  # fmt: skip
def test_a_sampler_is_named_and_gets_a_copy(answer, said, monkeypatch):
    def sampler(history):
        if len(history) == 2:
            return answer()
        for entry in history:
            entry.clear()
        history.clear()
        return 3

    pools = []
    monkeypatch.setattr("rollout.Pool", lambda run, kind, row_of, *_, **__: pools.append(row_of))
    run = SimpleNamespace(
        args=train.Args(),
        rows={"train": [{"n": i} for i in range(4)]},
        history=[],
        done=0,
        task=SimpleNamespace(sampler=sampler),
    )
    training_pool(run, 0)
    (row_of,) = pools
    assert [row_of(0), row_of(1)] == [{"n": 3}] * 2 and run.history == [[3, 0], [3, 0]]
    with pytest.raises(BadInput, match="^the task's sampler failed") as error:
        row_of(2)
    assert said in str(error.value) and len(run.history) == 2


def test_a_row_is_checked_without_being_written_out():
    """The repr of a row with a large image takes long."""

    class Large:
        def __repr__(self):
            raise MemoryError

    assert check_row({"prompt": "hi", "x": Large()}, "prompt", 3, "row 3")["index"] == 3
    with pytest.raises(BadInput, match="^row 3 is no dict with a column 'prompt', but a Large$"):
        check_row(Large(), "prompt", 3, "row 3")
    with pytest.raises(BadInput, match="row 3: 'data_source' must be a str, got {'a': 1}"):
        check_row({"prompt": "hi", "data_source": {"a": 1}}, "prompt", 3, "row 3")
