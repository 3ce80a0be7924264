"""What user code returns, checked where it comes in: a bad one costs its trajectory, by name, and the run goes on."""

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

NAN, N_IDS = math.nan, 270  # ids of the tiny model's tokenizer


# What is done to a good output of six tokens, and what is said of it.
SPOILT = {
    "beyond": (lambda o: o.response_ids.__setitem__(0, 10**6), "response_ids has 1000000: must be int in [0, "),
    "negative": (lambda o: o.prompt_ids.__setitem__(0, -1), "prompt_ids has -1: must be int in [0, "),
    "texts": (lambda o: o.response_ids.__setitem__(0, "5"), "response_ids has '5': must be int"),
    "bools": (lambda o: o.response_ids.__setitem__(0, True), "response_ids has True: must be int"),
    "floats": (lambda o: o.response_ids.__setitem__(0, 5.0), "response_ids has 5.0: must be int"),
    "no list": (lambda o: setattr(o, "response_ids", torch.tensor(o.response_ids)), "response_ids must be a list"),
    "mask": (lambda o: o.response_mask.__setitem__(0, 0.5), "response_mask has 0.5: must be bool or int in [0, 1]"),
    "no logprob": (lambda o: o.response_logprobs.__setitem__(0, None), "response_logprobs has None"),
    "nan": (lambda o: o.response_logprobs.__setitem__(-1, NAN), "response_logprobs has nan: must be float or int"),
    "probability": (lambda o: o.response_logprobs.__setitem__(0, 0.5), "response_logprobs has 0.5"),
    "no version": (lambda o: o.response_versions.__setitem__(0, None), "response_versions has None"),
    "versions left out": (lambda o: setattr(o, "response_versions", [-1] * len(o.response_ids)),
                          "response_versions, where the mask is 1, has -1: must be int in [3, 3]"),
    "an old version": (lambda o: o.response_versions.__setitem__(0, 0), "the mask is 1, has 0: must be int in [3, 3]"),
    "future": (lambda o: o.response_versions.__setitem__(0, 4), "response_versions has 4: must be int in [-1, 3]"),
    "lengths": (lambda o: o.response_ids.append(5), "the response lists of an output must have one length"),
    "window": (lambda o: o.prompt_ids.extend([5] * 500), "more than the window's 128"),
    "metrics": (lambda o: setattr(o, "metrics", None), "'metrics' must be a dict, got None"),
    "turns": (lambda o: setattr(o, "num_turns", "x"), "num_turns has 'x': must be int in [0, "),
    "text": (lambda o: setattr(o, "text", 5), "'text' must be a str|None, got 5"),
    "marks": (lambda o: o.extra.update(filtered=True), "for something else: unit or extra {'filtered'}"),
    "a demonstration": (lambda o: o.extra.update(demonstration=True), "unit or extra {'demonstration'}"),
    "a hint": (lambda o: o.extra.update(told_prompt_ids="x"), "unit or extra {'told_prompt_ids'}"),
    "a unit's name": (lambda o: setattr(o, "unit", "mean"), "unit or extra {'mean'}"),
    "lock": (lambda o: o.extra.update(lock=threading.Lock()), "cannot pickle '_thread.lock' object"),
    "image": (lambda o: o.images.append(Image.new("RGB", (8, 8))), "there are images, and this model reads text only"),
    "twice": (lambda o: [o, o], "returned one output twice"),
    "a trajectory": (lambda o: Trajectory([], [1], [1], []), "Spoilt.run returned <class 'agent_loop.Trajectory'>, "),
    "no output in a list": (lambda o: (o, None), "Spoilt.run returned <class 'NoneType'>, no AgentLoopOutput"),
    "the text of one": (lambda o: "hello", "Spoilt.run returned <class 'str'>, no AgentLoopOutput"),
    "endless turns": (lambda o: setattr(o, "num_turns", 10**400), "num_turns has 1000000"),
    "less than no turns": (lambda o: setattr(o, "num_turns", -1), "num_turns has -1: must be int in [0, 2.14748e+09]"),
}  # fmt: skip
BAD_REWARDS = {"a text": "'0.5'", "bytes": "b'1'", "no number": "nan", "none": "None", "a list": "[1]"}


@register("test_spoilt")
class Spoilt(AgentLoopBase):
    async def run(self, sampling_params, **row):
        trajectory = self.start(row)
        await self.assistant_turn(trajectory, {**sampling_params, "max_tokens": 6})
        output = trajectory.output()
        spoil, _ = SPOILT.get(str(row["extra"]), (lambda output: None, ""))
        return spoil(output) or output


def phase_of(engine, background, tokenizer, args, tiny_model, kinds, reward, **flags):
    rows = [row | {"agent_name": "test_spoilt"} for row in make_rows(*kinds)]
    wake(engine, hf_model(tiny_model), 3)
    task = SimpleNamespace(reward=reward)
    run = make_run(engine, background, task, tokenizer, train.replace(args, **flags))
    phase = rollout(run, rows, 3, 1, {"temperature": 1.0})
    engine.sleep()
    return phase


def test_a_bad_output_costs_its_trajectory(engine, background, tokenizer, args, tiny_model):
    kinds = ["good", *SPOILT, "good"]
    phase = phase_of(engine, background, tokenizer, args, tiny_model, kinds, lambda output, row: 1.0)
    assert [output.extra["index"] for output in phase.outputs] == [0, len(kinds) - 1]
    assert +phase.counts == {"failed_agent_loop": len(SPOILT)}
    errors = {kinds[error["prompt"]]: error["error"] for error in phase.errors}
    for kind, (_, said) in SPOILT.items():
        assert said in errors[kind].splitlines()[-1], kind
    # What is left makes a batch.
    assert data.collate(phase.trained)["versions"].max() == 3
    assert describe(phase.outputs, data.by_unit(phase.outputs))["rollout/trajectories"] == 2


def test_a_bad_reward_costs_its_trajectory(engine, background, tokenizer, args, tiny_model):
    values = {"a text": "0.5", "bytes": b"1", "no number": NAN, "none": None, "a list": [1], "good": True,
              "numpy": {"score": np.float32(0.5), "x": np.float32(0.25)}, "its nan": {"score": 1, "x": np.float32(NAN)},
              "a lock": {"score": 1, "lock": threading.Lock()}}  # fmt: skip
    kinds = [*values]
    phase = phase_of(
        engine, background, tokenizer, args, tiny_model, kinds, lambda output, row: values[row["extra"]])
    assert [(kinds[o.extra["prompt"]], o.reward) for o in phase.outputs] == [
        ("good", 1.0), ("numpy", {"score": 0.5, "x": 0.25})]  # fmt: skip
    assert describe(phase.outputs, data.by_unit(phase.outputs))["reward_part/x"] == 0.25
    errors = {kinds[error["prompt"]]: error["error"].splitlines()[-1] for error in phase.errors}
    assert errors.pop("a lock") == "TypeError: cannot pickle '_thread.lock' object"
    assert errors.pop("its nan") == "ValueError: x must be a finite number, got np.float32(nan)"
    assert errors == {kind: f"ValueError: a reward must be a finite number, got {said}"
                      for kind, said in BAD_REWARDS.items()}  # fmt: skip


def test_what_a_loop_changes_is_its_own(engine, background, tokenizer, args, tiny_model):
    """Sampling parameters and flags."""
    seen = []

    @register("test_changes")
    class Changes(Spoilt):
        async def run(self, sampling_params, **row):
            seen.append((list(sampling_params["stop_token_ids"]), list(sampling_params["stop"]), self.args.max_images))
            sampling_params["stop_token_ids"].append(5)
            sampling_params["stop"].append("x")
            self.args.max_images = 99
            return await super().run(sampling_params, **row)

    wake(engine, hf_model(tiny_model), 0)
    stops = [*engine.stop_token_ids]
    run = make_run(engine, background, SimpleNamespace(reward=lambda output, row: 1.0), tokenizer, args)
    rows = [row | {"agent_name": "test_changes"} for row in make_rows("good", "good")]
    phase = rollout(run, rows, 0, 2, {"temperature": 1.0, "stop": ["zz"]})
    engine.sleep()
    assert seen == [(stops, ["zz"], 8)] * 4 and engine.stop_token_ids == stops and args.max_images == 8
    assert [output.reward for output in phase.outputs] == [1.0] * 4


def test_a_units_metrics_change_no_number_of_the_log():
    outputs = [AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], response_logprobs=[-1.0],
                               response_versions=[0], reward=1.0, metrics={"trajectories": 7, "tool_calls": 2},
                               extra={"prompt": 0, "sample": sample, "segment": 0}) for sample in range(2)]  # fmt: skip
    described = describe(outputs, data.by_unit(outputs))
    assert (described["rollout/trajectories"], described["rollout/tool_calls"]) == (2, 2)


def test_an_output_is_a_copy_of_the_loops_own(engine, background, tokenizer, args, tiny_model):
    """A loop that returns one object in every trajectory, and changes it later, changes nothing."""
    kept = []

    @register("test_keeps")
    class Keeps(Spoilt):
        async def run(self, sampling_params, **row):
            output = await super().run(sampling_params, **row)
            kept.append(output)
            return kept[0]

    def reward(output, row):
        kept[0].response_ids.clear()
        return 1.0

    wake(engine, hf_model(tiny_model), 0)
    run = make_run(engine, background, SimpleNamespace(reward=reward), tokenizer, args)
    rows = [row | {"agent_name": "test_keeps"} for row in make_rows("good")]
    phase = rollout(run, rows, 0, 3, {"temperature": 1.0})
    engine.sleep()
    assert [output.extra["sample"] for output in phase.outputs] == [0, 1, 2][: len(phase.outputs)]
    assert phase.outputs and all(len(o.response_ids) == len(o.response_mask) > 0 for o in phase.outputs)
    assert "sample" not in kept[0].extra


def test_states_that_are_not_one_for_each_turn_cost_the_trajectory(engine, background, tokenizer, args, tiny_model):
    def reward(output, row):
        output.metrics["states"] = row["extra"]
        return 1.0

    kinds = [[1], [1, 2], [], "ab", 5, [None]]
    phase = phase_of(engine, background, tokenizer, args, tiny_model, kinds, reward,
                     algo="gigpo", adv_estimator="gigpo")  # fmt: skip
    assert [kinds[output.extra["prompt"]] for output in phase.outputs] == [[1], [], [None]]
    assert "metrics['states'] has 2 states for 1 turns" in phase.errors[0]["error"]
    assert +phase.counts == {"failed_reward": 3}


BAD_REQUESTS = [
    ({"stop": [["a"]]}, "Expected `str`, got `array` - at `$.stop[0]`"), ({"stop": {"a": 1}}, "at `$.stop`"),
    ({"max_tokens": 1.5}, "got `float` - at `$.max_tokens`"), ({"max_tokens": True}, "got `bool`"),
    ({"temperature": NAN}, "temperature must be a finite number"), ({"n": 2}, "n can't be set here"),
    ({"prompt_logprobs": 1}, "prompt_logprobs can't be set here"), ({"seed": 1 << 64}, "more than 64 bits"),
    ({"stop_token_ids": [10**6], "min_tokens": 2}, "stop_token_ids has 1000000: must be int in [0, "),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids has -1"), ({"logit_bias": {10**6: 1.0}}, "logit_bias has 1000000"),
    ({"structured_outputs": {"regx": "a"}}, "must use one kind of structured outputs")]  # fmt: skip


def test_a_bad_request_fails_alone(engine, background, tiny_model):
    wake(engine, hf_model(tiny_model), 0)
    for request, said in BAD_REQUESTS:
        (error,) = generate(engine, background, PROMPTS[:1], **request)
        assert isinstance(error, ValueError) and said in str(error), (request, error)
    for ids, said in (([10**6], "prompt_ids has 1000000"), ([-1], "prompt_ids has -1"), (["5"], "prompt_ids has '5'")):
        (error,) = generate(engine, background, [ids])
        assert isinstance(error, ValueError) and said in str(error)
    assert not engine.pending and not engine.core.has_unfinished_requests()
    (good,) = generate(engine, background, PROMPTS[:1], max_tokens=3, stop=["a", "b"])
    assert 0 < len(good.token_ids) <= 3
    (late,) = generate(engine, background, PROMPTS[:1], max_tokens=3, min_tokens=20)  # a turn with little room left
    assert len(late.token_ids) == 3


@pytest.mark.parametrize(("answer", "said"), [
    (-1, "what it returned has -1: must be int in [0, 3]"), (4, "has 4"), (1.5, "has 1.5"), (True, "has True"),
    (None, "has None"), ("x", "has 'x'"), (NAN, "has nan"), ((i for i in range(3)), "has <generator"),
    (ZeroDivisionError("mine"), "ZeroDivisionError: mine"), (SystemExit(0), "SystemExit: 0")])  # fmt: skip
def test_a_sampler_is_named_and_gets_a_copy(answer, said, background, monkeypatch):
    def sampler(history):
        if len(history) == 2:
            if isinstance(answer, BaseException):
                raise answer
            return answer
        for entry in history:
            entry.clear()
        history.clear()
        return 3

    pools = []
    monkeypatch.setattr("rollout.Pool", lambda run, kind, row_of, *args, **more: pools.append(row_of))
    run = SimpleNamespace(args=train.Args(), rows={"train": [{"n": i} for i in range(4)]}, history=[], done=0,
                          task=SimpleNamespace(sampler=sampler))  # fmt: skip
    training_pool(run, 0)
    assert [pools[0](0), pools[0](1)] == [{"n": 3}] * 2 and run.history == [[3, 0], [3, 0]]
    with pytest.raises(BadInput) as error:
        pools[0](2)
    assert str(error.value).startswith("the task's sampler failed") and said in str(error.value)
    assert len(run.history) == 2


def test_a_data_source_is_a_text():
    with pytest.raises(BadInput, match="row 3: 'data_source' must be a str, got {'a': 1}"):
        check_row({"prompt": "hi", "data_source": {"a": 1}}, "prompt", 3, "row 3")


def test_a_good_row_is_not_written_out():
    """For a message that nobody reads: an image of a megabyte took 20 ms a row."""

    class Large:
        def __repr__(self):
            raise MemoryError

    checked = check_row({"prompt": "hi", "x": Large()}, "prompt", 3, "row 3")
    assert checked["index"] == 3 and isinstance(checked["x"], Large)
    with pytest.raises(BadInput, match="^row 3 is no dict with a column 'prompt', but a Large$"):
        check_row(Large(), "prompt", 3, "row 3")
