"""The real engine (vLLM's CPU build): states, weight sync, seeds; and one rollout phase with everything that fails."""

import asyncio
import contextlib
import dataclasses
import math
import random
import threading
import types

import pytest
import torch
from conftest import HANGS, KEPT, for_ever, generate, make_run, time_passes, too_late, wait_for
from transformers import AutoModelForCausalLM

import data
from agent_loop import AgentLoopBase, register
from flatrl.log import Log
from flatrl.metrics import describe
from flatrl.processes import Background, Stopped
from flatrl.vllm_engine import vllm_arguments
from rollout import Engine, Pool, grade, rollout, score, seed_of, training_pool


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
def hf_logprobs(model, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


PROMPTS = [[random.Random(i).randrange(3, 250) for _ in range(5 + 3 * i)] for i in range(6)]


# ---------------------------------------------------------------- states


def test_states_out_of_order_raise(engine, tiny_model):
    model = hf_model(tiny_model)
    weights = list(model.named_parameters())
    for call in (engine.wake_kv, engine.sleep, engine.step, lambda: engine.load_weights(weights, 1)):
        with pytest.raises(RuntimeError, match="asleep"):
            call()
    engine.wake_weights()
    for call in (engine.wake_weights, engine.wake_kv, engine.sleep, engine.step):
        with pytest.raises(RuntimeError, match="'weights'"):
            call()
    engine.load_weights(((n, p.detach()) for n, p in weights), 7)
    assert (engine.state, engine.version) == ("synced", 7)
    for call in (engine.wake_weights, engine.sleep, engine.step):
        with pytest.raises(RuntimeError, match="synced"):
            call()
    engine.wake_kv()
    assert engine.state == "awake"
    engine.sleep()
    assert engine.state == "asleep"


def test_incomplete_sync_names_the_parameter_and_leaves_the_engine_unusable(engine, tiny_model):
    weights = [(n, p.detach()) for n, p in hf_model(tiny_model).named_parameters() if "layers.1.mlp.down_proj" not in n]
    engine.wake_weights()
    with pytest.raises(RuntimeError, match=r"layers\.1\.mlp\.down_proj\.weight"):
        engine.load_weights(weights, 1)
    with pytest.raises(RuntimeError):
        engine.wake_kv()


def test_sleep_refuses_while_a_request_is_unfinished(engine, background, tiny_model):
    wake(engine, hf_model(tiny_model), 0)
    future = background.submit(
        engine.generate(request_id="a", prompt_ids=PROMPTS[0], sampling_params={"max_tokens": 40, "ignore_eos": True})
    )
    while not engine.running:
        engine.step()
    with pytest.raises(RuntimeError, match="unfinished"):
        engine.sleep()
    while not future.done():
        engine.step()
    assert len(future.result().token_ids) == 40


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_trainers_after_every_sync(engine, background, tiny_model, temperature):
    for version, scale in enumerate([1.0, 1.5, 0.6, 2.0]):
        model = hf_model(tiny_model, scale)
        wake(engine, model, version)
        outs = generate(engine, background, PROMPTS, temperature=temperature, max_tokens=20)
        engine.sleep()
        for prompt, out in zip(PROMPTS, outs, strict=True):
            assert out.prompt_ids == prompt
            assert out.versions == [version] * len(out.token_ids)
            expected = hf_logprobs(model, prompt, out.token_ids, temperature)
            torch.testing.assert_close(torch.tensor(out.logprobs), expected, atol=1e-4, rtol=0)


def test_untied_embeddings_sync_too(untied_model, args, background, process_group):
    other = dataclasses.replace(args, model=untied_model)
    engine = Engine(untied_model, other, torch.device("cpu"))
    KEPT.append(engine)  # collecting a vLLM engine would take down the process group of the other one
    for version, scale in enumerate([1.0, 1.7]):
        model = hf_model(untied_model, scale)
        wake(engine, model, version)
        (out,) = generate(engine, background, [PROMPTS[3]], temperature=1.0, max_tokens=20)
        engine.sleep()
        expected = hf_logprobs(model, PROMPTS[3], out.token_ids)
        torch.testing.assert_close(torch.tensor(out.logprobs), expected, atol=1e-4, rtol=0)


# ---------------------------------------------------------------- generate


def test_seed_is_a_function_of_run_seed_trajectory_and_turn(engine, background, tiny_model):
    wake(engine, hf_model(tiny_model), 0)
    same = [PROMPTS[0]] * 3
    first = [o.token_ids for o in generate(engine, background, same, temperature=1.0, max_tokens=12)]
    assert first[0] != first[1] != first[2]  # another trajectory, another seed
    second = [o.token_ids for o in generate(engine, background, same, temperature=1.0, max_tokens=12)]
    assert first[0] != second[0]  # another turn, another seed
    engine.sleep()  # a new phase counts turns from 0
    wake(engine, hf_model(tiny_model), 1)
    alone = generate(engine, background, same[:1], temperature=1.0, max_tokens=12)
    assert alone[0].token_ids == first[0]  # whatever else is in the batch
    assert seed_of(0, "a", 1) == seed_of(0, "a", 1) != seed_of(1, "a", 1)
    assert 0 <= seed_of("x") < 2**63


def test_stop_reasons_and_stop_tokens(engine, background, tiny_model, tokenizer):
    model = hf_model(tiny_model)
    wake(engine, model, 0)
    (out,) = generate(engine, background, [PROMPTS[1]], temperature=0.0, max_tokens=5, ignore_eos=True)
    assert (out.stop_reason, len(out.token_ids)) == ("length", 5)
    stop = out.token_ids[2]
    n = out.token_ids.index(stop) + 1
    (cut,) = generate(engine, background, [PROMPTS[1]], temperature=0.0, max_tokens=5, stop_token_ids=[stop])
    assert (cut.stop_reason, cut.token_ids) == ("stop", out.token_ids[:n])  # the stop token is included
    assert len(cut.logprobs) == n


def test_a_bad_request_fails_alone(engine, background, tiny_model):
    wake(engine, hf_model(tiny_model), 0)
    too_long = list(range(3, 3 + 200))
    good, bad = generate(engine, background, [PROMPTS[0], too_long], temperature=1.0, max_tokens=4)
    assert len(good.token_ids) == 4
    assert isinstance(bad, ValueError) and "128" in str(bad)
    (unknown,) = generate(engine, background, [PROMPTS[0]], no_such_parameter=1)
    assert isinstance(unknown, ValueError) and "no_such_parameter" in str(unknown)
    assert not engine.pending and not engine.running


def test_system_exit_in_a_task_does_not_end_the_event_loop():
    background = Background()

    async def leaves():
        raise SystemExit(3)

    async def spawns():
        task = asyncio.create_task(leaves())
        await asyncio.wait([task])
        return repr(task.exception())

    assert background.submit(spawns()).result(timeout=HANGS) == "SystemExit(3)"
    assert background.submit(asyncio.sleep(0, "alive")).result(timeout=HANGS) == "alive"
    background.close()


def test_cancelled_request_leaves_the_engine(engine, background, tiny_model):
    wake(engine, hf_model(tiny_model), 0)
    future = background.submit(
        engine.generate(request_id="a", prompt_ids=PROMPTS[0], sampling_params={"max_tokens": 60, "ignore_eos": True})
    )
    while not engine.running:
        engine.step()
    future.cancel()
    while engine.running:
        engine.step(timeout=0.01)
    assert not engine.pending and not engine.core.has_unfinished_requests()
    engine.sleep()


# ---------------------------------------------------------------- one phase


@register("test_two_turns")
class TwoTurns(AgentLoopBase):
    """Samples two turns of at most six tokens each, with three given tokens between them."""

    async def run(self, sampling_params, **row):
        if row["extra"] == "raise":
            raise KeyError("the agent loop broke")
        if row["extra"] == "skip":
            return []
        trajectory = self.start(row)
        await self.assistant_turn(trajectory, {**sampling_params, "max_tokens": 6})
        if row["extra"] == "slow":
            await asyncio.sleep(random.random() * 0.05)
        trajectory.add_given([5, 6, 7])
        await self.assistant_turn(trajectory, {**sampling_params, "max_tokens": 6})
        trajectory.stop_reason = "stop"
        if row["extra"] == "list":
            first = self.start(row)
            first.add_given([5])
            return [first.output(), trajectory.output()]
        return trajectory.output()


def run_with(engine, background, tokenizer, args, reward) -> types.SimpleNamespace:
    return make_run(engine, background, types.SimpleNamespace(reward=reward), tokenizer, args)


def make_rows(*kinds: str) -> list[dict]:
    prompt = [{"role": "user", "content": "What is 12+34?"}]
    return [
        {"prompt": prompt, "agent_name": "test_two_turns", "extra": kind, "index": i} for i, kind in enumerate(kinds)
    ]


def test_phase_keeps_order_drops_failures_and_counts_them(engine, background, tokenizer, args, tiny_model, capfd):
    def reward(output, row):
        assert output.text and output.messages[-1]["role"] == "assistant"  # filled in before any reward is called
        if row["extra"] == "no reward" and output.extra["sample"] == 1:
            raise ZeroDivisionError("the grader broke")
        if row["extra"] == "nan":
            return float("nan")
        return {"score": 0.5, "digits": 2} if row["extra"] == "dict" else 1

    wake(engine, hf_model(tiny_model), 3)
    rows = make_rows("slow", "raise", "no reward", "skip", "list", "nan", "dict", "slow")
    args = dataclasses.replace(args, task=__file__)
    phase = rollout(run_with(engine, background, tokenizer, args, reward), rows, 3, 2, {"temperature": 1.0})
    engine.sleep()
    got = [(o.extra["prompt"], o.extra["sample"], o.extra["segment"]) for o in phase.outputs]
    assert got == [(0, 0, 0), (0, 1, 0), (2, 0, 0), (4, 0, 0), (4, 0, 1), (4, 1, 0), (4, 1, 1),
                   (6, 0, 0), (6, 1, 0), (7, 0, 0), (7, 1, 0)]  # fmt: skip
    assert +phase.counts == {"failed_agent_loop": 2, "skipped": 2, "failed_reward": 3}
    assert [(e["prompt"], e["sample"]) for e in phase.errors] == [(1, 0), (1, 1), (2, 1), (5, 0), (5, 1)]
    assert "ZeroDivisionError: the grader broke" in phase.errors[2]["error"]
    assert "must be a finite number" in phase.errors[3]["error"]
    # A traceback begins in the task's file; without a line of it, at the start.
    places = [error["error"].splitlines()[1] for error in (phase.errors[2], phase.errors[3])]
    assert places[0].startswith(f'  File "{__file__}", line ') and places[0].endswith(", in reward")
    assert places[1].endswith(", in _grade")
    shown = capfd.readouterr().err
    assert shown.count("KeyError: 'the agent loop broke'") == 1  # the first of a kind is shown, all are kept
    assert [o.reward for o in phase.outputs][-4:] == [{"score": 0.5, "digits": 2}] * 2 + [1.0, 1.0]
    assert phase.outputs[3].reward == phase.outputs[4].reward == 1.0  # segments share the rollout's reward
    for o in phase.outputs:
        if o.extra["prompt"] in (0, 7):
            first = o.response_mask.index(0)
            assert o.response_mask[first : first + 3] == [0, 0, 0] and o.response_ids[first : first + 3] == [5, 6, 7]
            assert o.response_versions == [3 if m else -1 for m in o.response_mask]
    assert phase.statistics["tokens"] > sum(sum(o.response_mask) for o in phase.outputs)  # of the dropped ones too


def test_slow_graders_run_on_after_the_phase_and_are_awaited(engine, background, tokenizer, args, tiny_model):
    release, started, ended = asyncio.Event(), [], 0

    async def reward(output, row):
        nonlocal ended
        started.append(row["index"])
        if row["index"] == 1:
            raise RuntimeError("no")
        if row["index"] == 2:
            while ended < 4:
                await asyncio.sleep(0)
            await too_late()
        await release.wait()
        ended += 1
        return {"score": row["index"] + output.extra["sample"] / 4}

    wake(engine, hf_model(tiny_model), 0)
    limits = dataclasses.replace(args, reward_timeout=HANGS)
    run = run_with(engine, background, tokenizer, limits, reward)
    pool = Pool(run, "train", make_rows(*["x"] * 4).__getitem__, 4, 2, {"temperature": 1.0}, 0)
    phase = pool.rollout(0)
    engine.sleep()  # nothing to wait for: the trajectories are done
    assert len(phase.outputs) == 8 and all(output.reward is None for output in phase.outputs)
    run.stop.ask = lambda: background.loop.call_soon_threadsafe(release.set) is None  # asked while it waits: no
    grade(run, phase)
    assert sorted(started) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [(o.extra["prompt"], o.reward["score"]) for o in phase.outputs] == [(0, 0), (0, 0.25), (3, 3), (3, 3.25)]
    assert +phase.counts == {"failed_reward": 4} and [e["prompt"] for e in phase.errors] == [1, 1, 2, 2]
    assert "TimeoutError" in phase.errors[2]["error"]
    grade(run, phase)  # nothing is left to wait for
    assert len(phase.outputs) == 4
    pool.end()


@register("test_by_row")
class ByRow(TwoTurns):
    """What row["extra"] says: an agent that hangs in generate, returns nonsense as reward, or spoils its row."""

    async def run(self, sampling_params, **row):
        what, row["extra"] = row["extra"], "x"
        if what == "late":
            async with asyncio.timeout(HANGS) as LATE[self.engine.name]:
                await self.engine.generate(request_id="", prompt_ids=[5], sampling_params={"max_tokens": 1})
        row["prompt"].append({"role": "assistant", "content": "mine"})
        output = await super().run(sampling_params, **row)
        output.reward = {"nonsense": "It is 42.", "no score": {"acc": 1}, "own": 0.5}.get(what)
        output.extra = SHARED
        return output


SHARED: dict = {}
LATE: dict[str, asyncio.Timeout] = {}  # trajectories that call the engine under a deadline, and that


@pytest.fixture
def late_in_the_model_step(engine, background, monkeypatch):
    """Deadlines pass while the engine is in the model step that would have brought the tokens."""
    LATE.clear()
    passed, step = [], engine.core.step

    async def pass_those(names: list[str]) -> None:
        for name in names:
            LATE[name].reschedule(0)
        while not all(request.future.cancelled() for request in engine.running.values() if request.trajectory in names):
            await asyncio.sleep(0)

    def step_and_pass():
        names = [name for name in LATE if name in {request.trajectory for request in engine.running.values()}]
        outputs = step()
        background.submit(pass_those(names)).result(timeout=HANGS)
        passed.extend(names)
        return outputs

    monkeypatch.setattr(engine.core, "step", step_and_pass)
    yield
    assert passed and set(passed) == set(LATE)


BUSY: set[str] = set()  # what is at work or done in the next test
OVER = threading.Event()


async def stubborn(what: str) -> None:
    """Hangs when all three are there, and never lets itself be cancelled."""
    BUSY.add(what)
    while BUSY != {"x", "agent", "reward"}:
        await asyncio.sleep(0)
    while not OVER.is_set():
        time_passes(10 * HANGS)
        with contextlib.suppress(asyncio.CancelledError):
            await for_ever()


@register("test_stubborn")
class Stubborn(TwoTurns):
    async def run(self, sampling_params, **row):
        if row["extra"] == "agent":
            await stubborn("agent")
        return await super().run(sampling_params, **row)


def test_agents_and_rewards_that_are_not_to_be_cancelled_are_left_behind(
    engine, background, tokenizer, args, tiny_model
):
    async def reward(output, row):
        if row["extra"] == "reward":
            await stubborn("reward")
        BUSY.add("x")
        return 1.0

    limits = dataclasses.replace(args, reward_timeout=HANGS, trajectory_timeout=HANGS)
    run = run_with(engine, background, tokenizer, limits, reward)
    rows = [row | {"agent_name": "test_stubborn"} for row in make_rows("x", "agent", "reward")]
    wake(engine, hf_model(tiny_model), 0)
    phase = rollout(run, rows, 0, 1, {"temperature": 1.0})
    engine.sleep()
    OVER.set()
    assert [(o.extra["prompt"], o.reward) for o in phase.outputs] == [(0, 1.0)]
    assert +phase.counts == {"failed_agent_loop": 1, "failed_reward": 1}
    assert "train-00000000-000001-0000 took longer than" in phase.errors[0]["error"]
    assert "the reward of prompt 2 took longer than 300 seconds" in phase.errors[1]["error"]


@pytest.mark.usefixtures("late_in_the_model_step")
def test_what_an_agent_leaves_behind_is_its_own(engine, background, tokenizer, args, tiny_model):
    """A timeout in the last model step, a reward that is none, a changed row, one dict for all: each costs itself."""

    def reward(output, row):
        assert len(row["prompt"]) == 1
        output.turn_rewards.append((0, 0.25))
        output.metrics["graded"] = 1
        return 1.0

    wake(engine, hf_model(tiny_model), 0)
    rows = [row | {"agent_name": "test_by_row"} for row in make_rows("x", "nonsense", "no score", "own", "late")]
    run = run_with(engine, background, tokenizer, args, reward)
    phase = rollout(run, rows, 0, 2, {"temperature": 1.0})
    engine.sleep()  # the call that timed out is no longer in the engine
    assert [(o.extra["prompt"], o.extra["sample"]) for o in phase.outputs] == [(0, 0), (0, 1), (3, 0), (3, 1)]
    assert +phase.counts == {"failed_reward": 4, "failed_agent_loop": 2} and SHARED == {}
    assert [o.reward for o in phase.outputs] == [1.0, 1.0, 0.5, 0.5]
    assert [o.turn_rewards for o in phase.outputs] == [[(0, 0.25)], [(0, 0.25)], [], []]
    assert [o.metrics.get("graded") for o in phase.outputs] == [1, 1, None, None]
    assert len({len(o.prompt_ids) for o in phase.outputs}) == 1 and all(len(row["prompt"]) == 1 for row in rows)


@pytest.mark.usefixtures("late_in_the_model_step")
def test_a_call_that_times_out_in_the_last_model_step_leaves_the_engine(
    engine, background, tokenizer, args, tiny_model
):
    run = run_with(engine, background, tokenizer, args, lambda output, row: 0.0)
    rows = [row | {"agent_name": "test_by_row"} for row in make_rows("late", "x")]
    for step in range(5):
        wake(engine, hf_model(tiny_model), step)
        phase = rollout(run, rows, step, 1, {})
        assert +phase.counts == {"failed_agent_loop": 1} and len(phase.outputs) == 1
        engine.sleep()


def test_no_reward_at_all_ends_the_run_with_the_reason(engine, background, tokenizer, args, tiny_model, monkeypatch):
    pools = []
    monkeypatch.setattr("rollout.Pool", lambda *given: pools.append(Pool(*given)) or pools[-1])
    wake(engine, hf_model(tiny_model), 0)
    run = run_with(engine, background, tokenizer, args, lambda output, row: 1 / 0)
    with pytest.raises(RuntimeError, match="no trajectory has a reward.*ZeroDivisionError"):
        rollout(run, make_rows("x"), 0, 2, {"temperature": 1.0})
    pools[0].end()  # a run ends with its process here; this one goes on


@register("test_hands_on_its_engine")
class HandsOnItsEngine(TwoTurns):
    async def run(self, sampling_params, **row):
        output = await super().run(sampling_params, **row)
        SHARED[row["index"]] = self.engine
        return output


def test_a_reward_that_asks_the_engine_is_told_where_to_judge(engine, background, tokenizer, args, tiny_model):
    async def reward(output, row):
        if row["index"] == 0:
            await SHARED.pop(0).generate(request_id="judge", prompt_ids=[5], sampling_params={})
        return 1.0

    wake(engine, hf_model(tiny_model), 0)
    rows = [row | {"agent_name": "test_hands_on_its_engine"} for row in make_rows("x", "x")]
    phase = rollout(run_with(engine, background, tokenizer, args, reward), rows, 0, 1, {"temperature": 1.0})
    engine.sleep()
    SHARED.clear()
    assert +phase.counts == {"failed_reward": 1} and len(phase.outputs) == 1
    last_line = phase.errors[0]["error"].splitlines()[-1]
    assert last_line == ("RuntimeError: the rollout is over, and a reward has no engine: let the agent loop judge, "
                         "while it is awake")  # fmt: skip


def test_a_run_that_is_to_stop_does_not_wait_for_graders(engine, background, tokenizer, args, tiny_model, capfd):
    cancelled = []

    async def reward(output, row):
        try:
            await for_ever()
        except asyncio.CancelledError:
            cancelled.append(row["index"])
            raise

    wake(engine, hf_model(tiny_model), 0)
    run = run_with(engine, background, tokenizer, args, reward)
    pool = Pool(run, "train", make_rows("x").__getitem__, 1, 2, {"temperature": 1.0}, 0)
    phase = pool.rollout(0)
    run.stopped = True
    with pytest.raises(Stopped):
        grade(run, phase)
    assert pool.first_prompt(0) == 0 and pool.first_prompt(1) == 1  # a resumed run takes the prompt again
    pool.end()  # as train.py does when it is stopped
    wait_for(lambda: len(cancelled) == 2)
    assert cancelled == [0, 0] and "failed_reward" not in capfd.readouterr().err


def test_deterministic_phase_repeats_to_the_last_bit(engine, background, tokenizer, args, tiny_model):
    engine.args.deterministic = True
    seen = []
    for _ in range(2):
        wake(engine, hf_model(tiny_model), 0)
        run = run_with(engine, background, tokenizer, args, lambda output, row: 0.0)
        phase = rollout(run, make_rows(*["slow"] * 6), 5, 3, {"temperature": 1.0})
        engine.sleep()
        seen.append([(o.response_ids, o.response_logprobs) for o in phase.outputs])
    assert len(seen[0]) == 18
    assert seen[0] == seen[1]


def test_sampling_depends_on_seed_step_prompt_sample_only(engine, background, tokenizer, args, tiny_model):
    def tokens(rows, step):
        wake(engine, hf_model(tiny_model), 0)
        run = run_with(engine, background, tokenizer, args, lambda output, row: 0.0)
        phase = rollout(run, rows, step, 2, {"temperature": 1.0})
        engine.sleep()
        return {(o.extra["prompt"], o.extra["sample"]): o.response_ids for o in phase.outputs}

    all_rows, one_row = tokens(make_rows("slow", "slow"), 1), tokens(make_rows("slow"), 1)
    assert one_row[0, 0] == all_rows[0, 0] and one_row[0, 1] == all_rows[0, 1]
    assert all_rows[0, 0] != all_rows[0, 1] and all_rows[0, 0] != all_rows[1, 0]
    assert tokens(make_rows("slow"), 2)[0, 0] != one_row[0, 0]


def test_a_greedy_baseline_is_one_more_member_of_each_group(engine, background, tokenizer, args, tiny_model):
    """ReMax: sampled greedily in the same rollout, marked, and in no statistics."""
    args = dataclasses.replace(args, algo="remax", adv_estimator="remax", prompts_per_step=2, group_size=3, num_steps=3)
    run = run_with(engine, background, tokenizer, args, lambda output, row: row["index"])
    run.rows = {"train": make_rows("x", "x", "x", "x")}
    run.pool, seen = training_pool(run, 0), []
    for step in range(2):
        wake(engine, hf_model(tiny_model), step)
        phase = run.pool.rollout(step)
        engine.sleep()
        grade(run, phase)
        prompts = [2 * step, 2 * step + 1]
        assert [(o.extra["prompt"], o.extra["sample"]) for o in phase.greedy] == [(i, 3) for i in prompts]
        assert [(o.extra["prompt"], o.extra["sample"]) for o in phase.trained] == [
            (i, j) for i in prompts for j in range(3)
        ]
        assert phase.trained == phase.sampled and len(phase.outputs) == 8
        assert phase.greedy[0].response_ids == phase.greedy[1].response_ids  # equal prompts: no seed takes part
        assert phase.greedy[0].response_ids != phase.trained[0].response_ids
        order = data.prompt_order(4, 2 * step, 2, args.seed)
        assert [o.reward for o in phase.greedy] == order == [o.extra["index"] for o in phase.greedy]
        assert phase.metrics(engine)["rollout/trajectories"] == 6
        seen.append(phase.greedy[0].response_ids)
    assert seen[0] == seen[1]
    run.pool.end()


def test_padded_vocabulary_is_masked_in_the_engine_as_in_the_trainer(tmp_path, args, background, process_group):
    """Head rows beyond the tokenizer's ids, as in Qwen's padded vocabularies (vllm#13175), made tempting."""
    from examples.tiny_models import init_model
    from losses import token_logprobs

    torch.manual_seed(0)
    model, tokenizer = init_model(tmp_path, tie_word_embeddings=False)
    real = len(tokenizer)
    model.resize_token_embeddings(real + 24)
    with torch.no_grad():
        model.lm_head.weight[real:] = 5 * model.lm_head.weight[:24]
    model.save_pretrained(tmp_path)
    other = dataclasses.replace(args, model=str(tmp_path))
    engine = Engine(str(tmp_path), other, torch.device("cpu"), vocab_size=real)
    KEPT.append(engine)
    model = hf_model(str(tmp_path))
    wake(engine, model, 0)
    outs = generate(engine, background, PROMPTS, temperature=1.0, max_tokens=30)
    engine.sleep()
    for prompt, out in zip(PROMPTS, outs, strict=True):
        assert max(out.token_ids) < real
        with torch.no_grad():
            hidden = model.model(torch.tensor([prompt + out.token_ids])).last_hidden_state[0, len(prompt) - 1 : -1]
        targets = torch.tensor(out.token_ids)
        masked = token_logprobs(hidden, model.lm_head.weight, targets, vocab_size=real)
        torch.testing.assert_close(torch.tensor(out.logprobs), masked, atol=1e-4, rtol=0)
        assert (token_logprobs(hidden, model.lm_head.weight, targets) < masked - 0.01).any()  # it makes a difference


def test_score_takes_numbers_and_dicts_and_refuses_the_rest():
    from agent_loop import AgentLoopOutput

    def out(**kwargs):
        return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], response_logprobs=[0.0],
                               response_versions=[0], **kwargs)  # fmt: skip

    async def slow(output, row):
        await asyncio.sleep(0)
        return torch.tensor(0.25)

    def run(reward, *outputs, metric="outcome"):
        asyncio.run(score(types.SimpleNamespace(reward=reward), list(outputs), {}, metric))
        return [o.reward for o in outputs]

    assert run(lambda o, r: True, out()) == [1.0]
    assert run(slow, out(), out()) == [0.25, 0.25]
    assert run(lambda o, r: 1 / 0, out(reward=0.5)) == [0.5]  # the loop's own reward replaces the task's
    assert run(lambda o, r: {"score": 2, "x": 1}, out()) == [{"score": 2.0, "x": 1}]
    assert run(lambda o, r: {"score": 2, "acc": True}, out(), metric="acc") == [{"score": 2.0, "acc": 1.0}]
    for bad, said in (
        ({"score": 1}, "not a dict"),
        ({"score": 1, "acc": math.nan}, "finite number"),
        (1.0, "not a dict"),
    ):
        with pytest.raises(ValueError, match=f"--filter_metric acc.*{said}"):
            run(lambda o, r, bad=bad: bad, out(), metric="acc")
    for bad in (None, "1.0 points", {"x": 1}, float("inf"), [1]):
        with pytest.raises(ValueError, match="finite number"):
            run(lambda o, r, bad=bad: bad, out())


def spoil(output, how: str):
    """What a reward function may get wrong, or do to what it is given."""
    match how:
        case "metrics None":
            output.metrics = None
        case "metric's name":
            output.metrics[5] = 1.0
        case "metric inf":
            output.metrics["x"] = math.inf
        case "metric huge":
            output.metrics["x"] = 10**400
        case "index":
            output.turn_rewards.append((1.5, 1.0))
        case "outside":
            output.turn_rewards.append((10**6, 1.0))
        case "turn_rewards None":
            output.turn_rewards = None
        case "turn reward":
            output.turn_rewards.append((0, 1e39))
        case "reward":
            return 1e39
        case "parts":
            return {"score": 1, 5: 2}
        case "part's name":
            return {"score": 1, "parts": {(1, 2): 3}}
        case "part nan":
            return {"score": 1, "part": math.nan}
        case "extra":
            output.extra["x"] = {(1, 2): 3}
    return 1.0


SPOILT = ["metrics None", "metric's name", "metric inf", "metric huge", "index", "outside", "turn_rewards None",
          "turn reward", "reward", "parts", "part's name", "part nan", "extra"]  # fmt: skip


def test_a_malformed_result_of_a_grader_costs_its_trajectory(engine, background, tokenizer, args, tiny_model, tmp_path):
    def reward(output, row):
        return spoil(output, SPOILT[row["index"]] if row["index"] < len(SPOILT) else "")

    rows = make_rows(*["x"] * (len(SPOILT) + 1))
    wake(engine, hf_model(tiny_model), 3)
    phase = rollout(run_with(engine, background, tokenizer, args, reward), rows, 0, 1, {"temperature": 1.0})
    engine.sleep()
    assert [output.extra["index"] for output in phase.outputs] == [len(SPOILT)]
    assert [(error["kind"], error["prompt"]) for error in phase.errors] == [
        ("failed_reward", i) for i in range(len(SPOILT))
    ]
    log = Log(dataclasses.replace(args, output_dir=str(tmp_path)), tokenizer, 0)
    log.rollouts("step", phase.outputs, phase.errors)
    log.metrics({"step": 1} | describe(phase.outputs, data.by_unit(phase.outputs)))


def test_what_a_grader_does_to_an_output_changes_no_training_data(engine, background, tokenizer, args, tiny_model):
    seen = []

    def reward(output, row):
        for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "response_versions"):
            seen.append((name, [*getattr(output, name)]))
            getattr(output, name).clear()
        output.messages[0]["content"] = "changed"
        output.extra.clear()
        output.text = output.stop_reason = "error"
        output.response_ids.append(1)
        row["prompt"].clear()
        output.metrics["mine"] = 2
        output.turn_rewards.append((0, 0.5))
        return 1.0

    wake(engine, hf_model(tiny_model), 3)
    run = run_with(engine, background, tokenizer, args, reward)
    (output,) = rollout(run, make_rows("x"), 0, 1, {"temperature": 1.0}).outputs
    engine.sleep()
    assert seen == [(name, getattr(output, name)) for name, _ in seen]
    assert output.messages[0]["content"] == "What is 12+34?" and output.extra["index"] == 0
    assert output.text and output.stop_reason == "stop" != output.text
    assert (output.reward, output.turn_rewards, output.metrics["mine"]) == (1.0, [(0, 0.5)], 2)


# ---------------------------------------------------------------- memory, room, stop tokens


def test_two_hundred_cycles_leave_host_memory_where_it_was(engine, background, tiny_model):
    model, host = hf_model(tiny_model), []
    for version in range(200):
        wake(engine, model, version)
        outs = generate(engine, background, PROMPTS[:2], temperature=1.0, max_tokens=2)
        assert outs[0].versions[0] == version
        engine.sleep()
        host.append(engine.memory["asleep"]["host"])
    assert set(engine.memory) == {"before_wake", "weights", "synced", "awake", "before_sleep", "asleep"}
    n_bytes = sum(p.numel() * 4 for p in model.parameters())
    assert host[-1] - host[20] < 10e-3, "GB"  # 180 copies of the weights would be 20 times as much
    assert 180 * n_bytes > 20 * 10e6


def test_new_trajectories_wait_for_room_in_the_cache_and_turns_go_first(engine, background, tiny_model, monkeypatch):
    engine.args.deterministic = True  # it waits for the second turns, however long they take to come
    wake(engine, hf_model(tiny_model), 0)
    cache = engine.core.vllm_config.cache_config
    room = 8 * cache.block_size  # tokens: as if the cache had 8 blocks
    blocks = cache.num_gpu_blocks
    manager = engine.core.engine_core.engine_core.scheduler.kv_cache_manager
    seen = []

    def usage(self):
        return self.block_pool.get_usage() * blocks / 8

    monkeypatch.setattr(type(manager), "usage", property(usage))
    monkeypatch.setattr(cache, "num_gpu_blocks", 8)
    admit = engine._admit

    def recorded(request):
        seen.append((request.trajectory, request.turn, len(engine.running)))
        admit(request)

    monkeypatch.setattr(engine, "_admit", recorded)

    async def trajectory(i: int) -> list:
        engine.enter(f"r{i}")
        prompt, outs = [3 + i] * 60, []
        for _ in range(2):
            outs.append(await engine.generate(
                request_id=f"r{i}", prompt_ids=prompt, sampling_params={"max_tokens": 20, "ignore_eos": True}
            ))  # fmt: skip
            prompt = prompt + outs[-1].token_ids
        engine.leave(f"r{i}")
        return outs

    async def everything():
        return await asyncio.gather(*map(trajectory, range(6)))

    future = background.submit(everything())
    future.add_done_callback(lambda _: engine.poke())
    while not future.done():
        engine.step()
    assert [len(out.token_ids) for outs in future.result() for out in outs] == [20] * 12
    assert room / 60 < 5  # of six prompts no more fit beside each other, with room to grow three
    assert max(running for _, _, running in seen) <= 3, seen  # one more where the engine would stand idle
    first_turns = [name for name, turn, _ in seen if turn == 0]
    assert first_turns == sorted(first_turns)  # first come, first served
    order = [(name, turn) for name, turn, _ in seen]
    assert order.index(("r0", 1)) < order.index(("r5", 0))  # what is under way goes on before something new starts
    assert not engine.waiting and not engine.running


def test_a_prompt_larger_than_the_room_is_taken_alone(engine, background, tiny_model, monkeypatch):
    wake(engine, hf_model(tiny_model), 0)
    monkeypatch.setattr(engine.core.vllm_config.cache_config, "num_gpu_blocks", 1)
    outs = generate(engine, background, [[5] * 60, [6] * 60], max_tokens=3, ignore_eos=True)
    assert [len(out.token_ids) for out in outs] == [3, 3]


def test_the_longest_prompt_fits_beside_a_full_batch(args):
    long = dataclasses.replace(args, max_model_len=9000, max_num_seqs=256)
    arguments = vllm_arguments("m", long, torch.device("cpu"))
    assert arguments["max_num_batched_tokens"] >= 9000 + 256


def test_own_stop_tokens_end_a_turn_but_are_not_end_of_turn_tokens(engine, background, tokenizer, args, tiny_model):
    """With a stop token of the run's own the template's end-of-turn token is still to come: it is not sampled."""
    digits = [tokenizer.convert_tokens_to_ids(d) for d in "0123456789"]
    other = next(i for i in range(tokenizer.vocab_size) if i not in {*digits, tokenizer.eos_token_id})
    seen = []

    @register("records_params")
    class Records(AgentLoopBase):
        async def run(self, sampling_params, **row):
            seen.append(sampling_params)
            trajectory = self.start(row)
            await self.assistant_turn(trajectory, sampling_params)
            self.append(trajectory, [{"role": "user", "content": "and?"}], None, self.stop_token_ids(sampling_params))
            sampling_params["stop"].append("END")  # its own: nobody else's turns end there
            return trajectory.output()

    stops = [i for i in range(tokenizer.vocab_size) if i not in (other, tokenizer.eos_token_id)]  # nearly any token
    rows = [{"prompt": [{"role": "user", "content": "1+1"}], "index": 0, "agent_name": "records_params"}]
    task = types.SimpleNamespace(reward=lambda output, row: 1.0)
    run = make_run(engine, background, task, tokenizer, args)
    wake(engine, hf_model(tiny_model), 0)
    phase = rollout(run, rows, 0, 4, {"temperature": 1.0, "stop_token_ids": stops, "stop": []})
    assert all(params["stop"] == ["END"] for params in seen)
    assert all(params["stop_token_ids"] == [tokenizer.eos_token_id] for params in seen) and len(seen) == 4
    stopped = [o for o in phase.outputs if o.response_ids[o.response_mask.index(0) - 1] in stops]
    assert stopped
    for output in stopped:
        given = output.response_mask.index(0)
        assert output.response_ids[given] == tokenizer.eos_token_id  # of the template


def test_an_agent_that_cancels_itself_is_a_failure(engine, background, tokenizer, args, tiny_model):
    @register("cancels_itself")
    class CancelsItself(AgentLoopBase):  # as a stray cancel scope does
        async def run(self, sampling_params, **row):
            if row["rollout_n"] == 1:
                asyncio.current_task().cancel()
            trajectory = self.start(row)
            await self.assistant_turn(trajectory, sampling_params)
            return trajectory.output()

    async def reward(output, row):
        if output.extra["sample"] == 2:
            asyncio.current_task().cancel()
        await asyncio.sleep(0)
        return 1.0

    rows = [{"prompt": [{"role": "user", "content": "1+1"}], "index": 0, "agent_name": "cancels_itself"}]
    run = run_with(engine, background, tokenizer, args, reward)
    wake(engine, hf_model(tiny_model), 0)
    phase = rollout(run, rows, 0, 4, {"temperature": 1.0})
    assert [output.extra["sample"] for output in phase.outputs] == [0, 3]
    assert phase.counts["failed_agent_loop"] == 1 and phase.counts["failed_reward"] == 1
