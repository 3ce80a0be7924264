"""Asynchronous rollout (--max_staleness): requests suspended over updates, groups that live on, versions, staleness.

What an agent loop does when is decided by gates that the test opens, never by time.
"""

import asyncio
import collections
import contextlib
import dataclasses
import json
import random
import shutil
import signal
import types
from collections.abc import Callable

import pytest
import torch
from conftest import HANGS, SMALL_CACHE, lines, metrics_of, run, two_ranks, wait_for
from conftest import make_run as stage
from test_rollout import PROMPTS, hf_logprobs, hf_model, wake

import data
import rollout as rollout_file
import train
from agent_loop import AgentLoopBase, AgentLoopOutput, BadInput, register
from flatrl import processes
from flatrl.processes import Stopped
from rollout import Phase, Session, grade, rollout, training_pool
from train import Args, check_args


@pytest.fixture(scope="module")
def models(tiny_model) -> list:
    """The weights of versions 0, 1, ...: far enough apart that a token's logprob tells them from each other."""
    return [hf_model(tiny_model, 1 + version / 2) for version in range(6)]


def check_versions(models: list, output) -> None:
    """Every sampled token's logprob is that of the weights its version names, and of no others."""
    ids, mask = output.response_ids, output.response_mask
    logprobs, versions = torch.tensor(output.response_logprobs), torch.tensor(output.response_versions)
    assert [v >= 0 for v in output.response_versions] == [m == 1 for m in mask]
    for version, model in enumerate(models):
        expected = hf_logprobs(model, output.prompt_ids, ids)
        of_it, of_others = versions == version, (versions >= 0) & (versions != version)
        torch.testing.assert_close(logprobs[of_it], expected[of_it], atol=1e-4, rtol=0)
        assert not of_others.any() or (logprobs - expected)[of_others].abs().max() > 0.01


# ---------------------------------------------------------------- the engine


def test_a_call_suspended_over_two_updates_has_tokens_of_three_versions(engine, background, models):
    def ask(name: str, prompt: list[int], n: int):
        sampling = {"temperature": 1.0, "max_tokens": n, "ignore_eos": True, "stop_token_ids": []}
        return background.submit(engine.generate(request_id=name, prompt_ids=prompt, sampling_params=sampling))

    calls = {"long": ask("long", PROMPTS[3], 30), "short": ask("short", PROMPTS[1], 5)}
    wait_for(lambda: len(engine.inbox) == 2)
    for version, n_steps in enumerate((7, 9)):
        wake(engine, models[version], version)
        for _ in range(n_steps):
            engine.step()  # a token of each request
        if version == 0:
            assert calls["short"].result(timeout=HANGS).versions == [0] * 5
            with pytest.raises(RuntimeError, match="unfinished"):
                engine.sleep()
        engine.sleep(keep=True)
        if version == 0:
            calls["late"] = ask("late", PROMPTS[5], 12)
            wait_for(lambda: engine.inbox)
            with pytest.raises(RuntimeError, match="asleep"):
                engine.step()
    wake(engine, models[2], 2)
    while engine.pending:
        engine.step()
    assert calls["long"].result(timeout=HANGS).versions == [0] * 7 + [1] * 9 + [2] * 14
    assert calls["late"].result(timeout=HANGS).versions == [1] * 9 + [2] * 3
    for call in calls.values():
        out = call.result()
        given = types.SimpleNamespace(
            prompt_ids=out.prompt_ids, response_ids=out.token_ids, response_mask=[1] * len(out.token_ids),
            response_logprobs=out.logprobs, response_versions=out.versions,
        )  # fmt: skip
        check_versions(models[:3], given)
    engine.sleep()  # nothing is left
    assert not (engine.running or engine.waiting or engine.inbox or engine.core.has_unfinished_requests())


def test_a_session_counts_the_seconds_of_its_calls(monkeypatch):
    clock = iter([10.0, 12.5, 20.0, 21.0])
    monkeypatch.setattr(rollout_file, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))

    async def sampled(request_id: str, sampling_params: dict) -> str:
        return request_id

    async def twice() -> list[str]:
        return [await session.generate(request_id="its own", sampling_params={}) for _ in range(2)]

    session = Session(types.SimpleNamespace(generate=sampled), "a")
    assert asyncio.run(twice()) == ["a", "a"] and session.generate_s == 2.5 + 1.0


def test_calls_made_at_once_have_versions_of_their_own(engine, background, models):
    session = Session(engine, "a")

    def ask(n: int):
        sampling = {"max_tokens": n, "ignore_eos": True, "stop_token_ids": []}
        return background.submit(session.generate(request_id="", prompt_ids=PROMPTS[0], sampling_params=sampling))

    calls = []
    for version in (0, 1, 2):
        calls.append(ask(40 if version == 0 else 4))
        wait_for(lambda: engine.inbox)
        wake(engine, models[version], version)
        for _ in range(2):
            engine.step()
        engine.sleep(keep=True)
    assert calls[1].result(timeout=HANGS).versions == [1, 1, 2, 2]
    wake(engine, models[3], 3)
    while engine.pending:
        engine.step()
    assert calls[0].result(timeout=HANGS).versions == [0, 0, 1, 1, 2, 2] + [3] * 34
    engine.sleep()


def test_new_trajectories_leave_room_for_the_suspended(engine, background, models, monkeypatch):
    """Their cache was dropped with the old weights: right after the update it looks empty."""

    def ask(name: str, prompt: list[int]):
        sampling = {"max_tokens": 12, "ignore_eos": True, "stop_token_ids": []}
        return background.submit(engine.generate(request_id=name, prompt_ids=prompt, sampling_params=sampling))

    suspended = ask("suspended", PROMPTS[5])
    wait_for(lambda: engine.inbox)
    wake(engine, models[0], 0)
    for _ in range(5):
        engine.step()
    engine.sleep(keep=True)
    new = ask("new", PROMPTS[4])
    wait_for(lambda: engine.inbox)
    wake(engine, models[1], 1)
    cache, usable = engine.core.vllm_config.cache_config, rollout_file.KV_FULL
    both = len(PROMPTS[5]) + 5 + len(PROMPTS[4])
    monkeypatch.setattr(rollout_file, "KV_FULL", (both - 1) / (cache.num_gpu_blocks * cache.block_size))
    engine.step()
    assert list(engine.running) == ["suspended#0"] and [request.call_id for request in engine.waiting] == ["new#0"]
    monkeypatch.setattr(rollout_file, "KV_FULL", usable)
    while engine.pending:
        engine.step()
    assert suspended.result(timeout=HANGS).versions == [0] * 5 + [1] * 7
    assert new.result(timeout=HANGS).versions == [1] * 12
    engine.sleep()


def test_a_suspended_call_that_is_given_up_leaves_the_engine(engine, background, models):
    call = background.submit(
        engine.generate(request_id="a", prompt_ids=PROMPTS[0], sampling_params={"max_tokens": 60, "ignore_eos": True})
    )
    wake(engine, models[0], 0)
    while not engine.running:
        engine.step()
    engine.sleep(keep=True)
    call.cancel()  # its tool, say, was running beside it and the trajectory's time is over
    wait_for(engine.running["a#0"].future.cancelled)
    wake(engine, models[1], 1)
    engine.step()
    assert not (engine.running or engine.pending or engine.core.has_unfinished_requests())
    engine.sleep()


# ---------------------------------------------------------------- groups that live on

START, MIDDLE, END = "start", "middle", "end"  # before the first turn, between the two (a slow tool), after the second


class Task:
    """Gates that hold the trajectories of a group, and a book of what became of them. outcome(prompt, sample): reward,
    or None for one that fails; the row's index without it."""

    def __init__(self, *held: tuple[int, str], long=(), fails=(), skips=(), no_reward=(), outcome=None):
        self.gates: dict[tuple[int, str], asyncio.Event] = {}
        self.long, self.fails, self.skips, self.no_reward, self.outcome = long, fails, skips, no_reward, outcome
        self.at: collections.Counter = collections.Counter()  # trajectories that wait at each gate
        self.created: list[str] = []
        self.released: list[str] = []
        self.hold(*held)

    def hold(self, *gates: tuple[int, str]) -> None:
        self.gates |= {gate: asyncio.Event() for gate in gates}

    async def reward(self, output, row) -> float:
        reward = float(row["index"])
        if self.outcome:
            reward = self.outcome(output.extra["prompt"], output.extra["sample"])
        if output.extra["prompt"] in self.no_reward or reward is None:
            raise RuntimeError("no reward")
        return reward


@register("test_gated")
class Gated(AgentLoopBase):
    """Two turns of six tokens, or a first one of 30, three given tokens between them."""

    async def run(self, sampling_params, **row):
        task, name = self.task, self.engine.name
        number = int(name.split("-")[2])
        task.created.append(name)
        try:
            await self.through(number, START)
            if number in task.fails:
                raise KeyError("the agent loop broke")
            if number in task.skips:
                return []
            trajectory = self.start(row)
            sampling_params |= {
                "ignore_eos": True,
                "stop_token_ids": [],
                "max_tokens": 30 if number in task.long else 6,
            }
            await self.assistant_turn(trajectory, sampling_params)
            await self.through(number, MIDDLE)
            trajectory.add_given([5, 6, 7])
            await self.assistant_turn(trajectory, sampling_params | {"max_tokens": 6})
            await self.through(number, END)
            trajectory.stop_reason = "stop"
            trajectory.extra["mine"] = name
            return trajectory.output()
        finally:
            await asyncio.sleep(0)  # releasing a tool takes a while
            task.released.append(name)

    async def through(self, number: int, where: str) -> None:
        task, engine, name = self.task, self.engine.engine, self.engine.name
        if gate := task.gates.get((number, where)):
            engine.leave(name)  # the engine, which is --deterministic here, does not wait for it
            task.at[number, where] += 1
            try:
                await gate.wait()
            finally:
                task.at[number, where] -= 1
            engine.enter(name)


@register("test_hurried")
class Hurried(Gated):
    """Instead of gates: tools that take as long as they like."""

    async def through(self, number: int, where: str) -> None:
        await asyncio.sleep(random.random() / 20)


class Run:
    """A pool with its engine and agent loops. The engine waits for all that are not at a gate: no step is left to
    chance."""

    def __init__(self, engine, background, tokenizer, args, models, task: Task, start=0, resume=0, n_rows=7,
                 **flags):  # fmt: skip
        flags = {"agent": "test_gated", "num_steps": 20, "prompts_per_step": 2, "group_size": 2, "max_staleness": 1,
                 "oversample": 2.0} | flags  # fmt: skip
        self.args = dataclasses.replace(args, **flags)
        self.task, self.models, self.engine, self.background = task, models, engine, background
        engine.args.deterministic = True
        self.run = stage(engine, background, task, tokenizer, self.args)
        prompt = [{"role": "user", "content": "What is 12+34?"}]
        self.run.rows = {"train": [{"prompt": prompt, "index": i} for i in range(n_rows)]}
        self.pool = self.run.pool = training_pool(self.run, start, resume)

    def step(self, version: int) -> Phase:
        """What train.py does in a step, as far as rollout goes."""
        wake(self.engine, self.models[version % len(self.models)], version)
        phase = self.pool.rollout(version)
        self.engine.sleep(keep=True)
        grade(self.run, phase)
        return phase

    def later(self, *gates: tuple[int, str], after: Callable[[], bool]) -> None:
        """Opens gates once both trajectories wait there and `after` is so, while the main thread is in a rollout."""

        async def opens():
            while not (after() and all(self.task.at[gate] == 2 for gate in gates)):
                await asyncio.sleep(0.01)
            for gate in gates:
                self.task.gates[gate].set()

        self.background.submit(opens())

    def open(self, *gates: tuple[int, str]) -> None:
        for gate in gates:
            wait_for(lambda gate=gate: self.task.at[gate] == 2)
            self.background.loop.call_soon_threadsafe(self.task.gates[gate].set)
        wait_for(lambda: not any(self.task.at[gate] for gate in gates))

    def held(self, *gates: tuple[int, str]) -> None:
        """Waits until both trajectories of these groups, and no others, are at these gates."""
        with contextlib.suppress(AssertionError):
            wait_for(lambda: +self.task.at == dict.fromkeys(gates, 2))
        assert +self.task.at == dict.fromkeys(gates, 2)

    def done(self, n: int) -> None:
        """Waits until the agent loops have brought so many groups to their end."""
        wait_for(lambda: self.ended() == n)

    def ended(self) -> int:
        return self.pool.store.add("ended", 0)

    def started(self) -> set[int]:
        """The prompts whose agent loops have begun."""
        return {int(name.split("-")[2]) for name in self.task.created if name.startswith("train")}

    def nothing_is_left(self) -> None:
        engine = self.engine
        assert not (engine.running or engine.waiting or engine.inbox or engine.pending or engine.live)
        assert not engine.core.has_unfinished_requests()
        assert sorted(self.task.created) == sorted(self.task.released)


@pytest.fixture
def make_run(engine, background, tokenizer, args, models):
    """Makes Runs, and gives up at the end what they have under way."""
    runs = []

    def make(task: Task, **flags) -> Run:
        runs.append(Run(engine, background, tokenizer, args, models, task, **flags))
        return runs[-1]

    yield make
    for each in runs:
        each.pool.end()


def prompts(phase: Phase) -> list[int]:
    """The groups to learn from in a phase, after checking that each is whole and in order."""
    keys = [(o.extra["prompt"], o.extra["sample"], o.extra["segment"]) for o in phase.trained]
    assert keys == [(n, j, 0) for n in sorted({n for n, _, _ in keys}) for j in range(2)]
    return [n for n, j, _ in keys if j == 0]


def test_a_batch_is_the_next_prompts_and_those_of_the_next_batch_are_under_way(make_run, models):
    task = Task((0, MIDDLE), (3, END), (5, START), (6, MIDDLE))
    run = make_run(task)
    # Capacity (1 + 1) * 2: prompts 0 to 3. 0 is waited for, though 1 and 2 would make a batch.
    run.later((0, MIDDLE), after=lambda: run.ended() == 2 and task.at[3, END] == 2)
    first = run.step(0)
    assert prompts(first) == [0, 1] and sorted(run.pool.groups) == [2, 3] and run.started() == set(range(4))
    run.held((3, END))
    assert not run.engine.running
    assert [o.extra["mine"] for o in first.outputs] == [
        f"train-00000000-00000{n}-000{j}" for n in (0, 1) for j in (0, 1)
    ]
    order = data.prompt_order(7, 0, 4, run.args.seed)
    assert [o.reward for o in first.outputs] == [order[0], order[0], order[1], order[1]]
    # While the policy trains, 3 comes to its end: the next batch is there when its rollout begins.
    run.open((3, END))
    run.done(4)
    assert run.engine.state == "asleep"
    second = run.step(1)
    assert prompts(second) == [2, 3] and run.pool.first == 4
    assert [o.response_versions for o in second.outputs] == [[0] * 6 + [-1] * 3 + [0] * 6] * 4
    # 4 and 5 have started too. 5 is waited for, whatever else is done; 6 and 7 start meanwhile.
    run.later((5, START), after=lambda: run.ended() == 6 and task.at[6, MIDDLE] == 2)  # 0 to 4 are done, and 7
    third = run.step(2)
    assert prompts(third) == [4, 5] and sorted(run.pool.groups) == [6, 7] and run.pool.first_prompt(3) == 6
    assert [o.response_versions for o in third.outputs] == [[2] * 6 + [-1] * 3 + [2] * 6] * 4
    run.open((6, MIDDLE))
    fourth = run.step(3)
    assert prompts(fourth) == [6, 7]
    assert [o.response_versions for o in fourth.outputs] == [[2] * 6 + [-1] * 3 + [v] * 6 for v in (3, 3, 2, 2)]
    for phase in (first, second, third, fourth):
        assert not +phase.counts
        for output in phase.outputs:
            check_versions(models, output)
    wake(run.engine, models[4], 4)
    run.pool.settle()
    assert not [group for group in run.pool.groups.values() if group.unfinished]
    run.nothing_is_left()


def test_an_asynchronous_run_trains_exactly_the_prompts_of_the_synchronous_one(make_run):
    """Step by step, however long tools take: nothing is selected by how fast it was."""
    trained, ages = {}, {}
    for staleness in (0, 2):
        run = make_run(Task(), agent="test_hurried", num_steps=10, max_staleness=staleness, group_size=2)
        run.engine.args.deterministic = False
        phases = [run.step(step) for step in range(10)]
        trained[staleness] = [[(o.extra["prompt"], o.extra["sample"], o.extra["index"]) for o in phase.trained]
                              for phase in phases]  # fmt: skip
        oldest = [min(v for o in phase.trained for v in o.response_versions if v >= 0) for phase in phases]
        ages[staleness] = [step - version for step, version in enumerate(oldest)]
    assert trained[2] == trained[0] and [len(step) for step in trained[0]] == [4] * 10
    assert [n for step in trained[0] for n, j, _ in step if j == 0] == list(range(20))
    assert set(ages[0]) == {0} and 1 <= max(ages[2]) <= 2


def test_every_prompt_is_trained_on_once_and_none_is_drawn_for_nothing(make_run):
    run, trained = make_run(Task(), num_steps=5, oversample=10), []
    for step in range(5):
        phase = run.step(step)
        assert not +phase.counts and len(prompts(phase)) == 2
        trained += prompts(phase)
        wait_for(lambda step=step: run.started() == set(range(2 * min(step + 2, 5))))
    assert trained == list(range(10))
    wake(run.engine, run.models[5], 5)
    run.pool.end()
    assert not run.pool.groups and not run.engine.turns
    assert run.run.store.num_keys() == 2  # numbers drawn, groups ended: of what was taken out nothing stays
    run.nothing_is_left()
    assert len(run.task.created) == 20


@pytest.mark.parametrize("staleness", [1, 2])
def test_slow_prompts_are_trained_on_as_often_as_the_others_and_never_too_old(make_run, staleness):
    """One row in ten takes four times as long."""
    order = data.prompt_order(10, 0, 40, 0)
    slow = {position for position, row in enumerate(order) if row == 3}
    run = make_run(Task(long=slow), n_rows=10, num_steps=20, max_staleness=staleness, oversample=3.0)
    rows, ages = collections.Counter(), []
    for step in range(20):
        phase = run.step(step)
        rows.update(output.extra["index"] for output in phase.outputs)
        versions = [v for output in phase.outputs for v in output.response_versions if v >= 0]
        ages.append(step - min(versions))
    assert rows == dict.fromkeys(range(10), 8)  # four epochs, groups of two
    assert max(ages) == staleness


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_call_lives_through_updates_until_it_must_be_done(make_run, models, staleness):
    between = [(number, START) for number in range(1, staleness)]
    task = Task(*between, long=[staleness])
    run = make_run(task, prompts_per_step=1, max_staleness=staleness, oversample=4.0)
    assert prompts(run.step(0)) == [0]
    for step, gate in enumerate(between, 1):
        run.open(gate)
        assert prompts(run.step(step)) == [step]
    phase = run.step(staleness)
    assert prompts(phase) == [staleness] and not +phase.counts
    for output in phase.outputs:
        first = output.response_versions[:30]
        assert first == sorted(first) and {*first} == set(range(staleness + 1))
        assert output.response_versions[30:] == [-1] * 3 + [staleness] * 6
        check_versions(models, output)
    batch = data.collate(phase.outputs)
    assert batch["versions"].tolist() == [output.response_versions for output in phase.outputs]
    assert batch["logprobs_rollout"][0].tolist() == pytest.approx(phase.outputs[0].response_logprobs)
    run.pool.end()
    run.nothing_is_left()


def test_at_staleness_zero_every_batch_is_whole_on_policy_and_leaves_nothing(make_run):
    run = make_run(Task(), max_staleness=0, oversample=1.0, num_steps=4)
    for step in range(4):
        phase = run.step(step)
        assert prompts(phase) == [2 * step, 2 * step + 1] and not +phase.counts
        assert {v for o in phase.outputs for v in o.response_versions} == {-1, step}
        assert not run.pool.groups
        run.nothing_is_left()
        assert run.pool.first_prompt(step + 1) == 2 * step + 2
        assert run.pool.first_prompt(step) == 2 * step  # stopped before the update


def test_failures_fill_the_batch_and_are_counted(make_run, capfd):
    later = [(number, START) for number in range(5, 10)]
    run = make_run(Task(*later, fails=[1], skips=[2], no_reward=[4]), prompts_per_step=5, oversample=1.0, num_steps=2)
    phase = run.step(0)
    assert +phase.counts == {"failed_agent_loop": 2, "skipped": 2, "failed_reward": 2}
    assert prompts(phase) == [0, 3]
    assert [(e["prompt"], e["sample"], e["kind"]) for e in phase.errors] == [
        (n, j, kind) for n, kind in ((1, "failed_agent_loop"), (4, "failed_reward")) for j in (0, 1)
    ]
    run.task.fails = range(100)
    run.open(*later)
    assert run.pool.first == 5  # they are not drawn again
    with pytest.raises(
        RuntimeError, match="train 1 brought nothing to learn from: .*KeyError: 'the agent loop broke'"
    ):
        run.step(1)


# ---------------------------------------------------------------- dynamic sampling


@pytest.mark.parametrize("deterministic", [False, True])
def test_groups_without_signal_are_replaced_by_the_next_prompts(make_run, deterministic):
    silent = {1, 2, 4}
    run = make_run(Task(outcome=lambda n, j: float(n not in silent and j)), max_staleness=0, oversample=1.0,
                   prompts_per_step=4, max_gen_batches=10, deterministic=deterministic)  # fmt: skip
    phase = run.step(0)
    assert prompts(phase) == [0, 3, 5, 6]
    assert {o.extra["prompt"] for o in phase.outputs if o.extra.get("filtered")} == silent
    assert len(phase.outputs) == len(phase.sampled) == 14 and not run.pool.groups and run.started() == set(range(7))
    assert [o.extra["index"] for o in phase.outputs[::2]] == data.prompt_order(7, 0, 7, run.args.seed)
    assert run.pool.first_prompt(1) == 7 and run.pool.first_prompt(0) == 0
    assert prompts(run.step(1)) == [7, 8, 9, 10]
    run.nothing_is_left()


@pytest.mark.parametrize("deterministic", [False, True])
def test_replacements_start_at_once_or_with_deterministic_when_all_groups_have_ended(make_run, deterministic):
    task = Task((0, MIDDLE), outcome=lambda n, j: float(n not in {1, 2} and j))
    run = make_run(task, max_staleness=0, oversample=1.0, prompts_per_step=4, max_gen_batches=10,
                   deterministic=deterministic)  # fmt: skip
    n_before = 3 if deterministic else 5
    seen, is_full = [], run.pool._is_full

    def look(*args):
        full = is_full(*args)
        seen.append((run.ended(), run.started()))
        return full

    run.pool._is_full = look
    run.later((0, MIDDLE), after=lambda: seen and seen[-1][0] == n_before and run.ended() == n_before)
    assert prompts(run.step(0)) == [0, 3, 4, 5]
    if deterministic:
        assert {4, 5}.isdisjoint(set().union(*(started for ended, started in seen if ended <= 3)))


def test_a_resumed_step_replaces_the_same_groups(make_run):
    flags = dict(max_staleness=0, oversample=1.0, prompts_per_step=4, max_gen_batches=10, deterministic=True)
    run = make_run(Task(outcome=lambda n, j: float(n not in {1, 2, 4} and j)), **flags)
    first = run.step(0)
    again = make_run(run.task, resume=run.pool.first_prompt(0), **flags)
    second = again.step(0)
    assert [vars(o) | {"metrics": 0} for o in second.outputs] == [vars(o) | {"metrics": 0} for o in first.outputs]
    assert again.pool.first_prompt(1) == 7


@pytest.mark.parametrize("deterministic", [False, True])
def test_after_the_limit_groups_without_signal_fill_the_batch(make_run, deterministic):
    run = make_run(Task(outcome=lambda n, j: float(n in (5, 13) and j)), max_staleness=0, oversample=1.0,
                   prompts_per_step=4, max_gen_batches=3, deterministic=deterministic)  # fmt: skip
    phase = run.step(0)
    assert prompts(phase) == [5, 9, 10, 11]  # eight were skipped
    assert {o.extra["prompt"] for o in phase.outputs} == set(range(12)) == run.started()
    phase = run.step(1)
    assert prompts(phase) == [13, 21, 22, 23] and run.started() == set(range(24))
    assert run.pool.first_prompt(2) == 24


def test_without_dynamic_sampling_every_group_stays(make_run):
    run = make_run(Task(outcome=lambda n, j: 0.0), max_staleness=0, oversample=1.0, prompts_per_step=4)
    phase = run.step(0)
    assert prompts(phase) == [0, 1, 2, 3] and phase.trained == phase.outputs


def test_failed_members_leave_a_group_without_signal(make_run):
    failed = {(0, 1), (2, 0), (2, 1)}
    run = make_run(Task(outcome=lambda n, j: None if (n, j) in failed else float(j)), max_staleness=0, oversample=1.0,
                   prompts_per_step=4, max_gen_batches=10)  # fmt: skip
    phase = run.step(0)
    assert prompts(phase) == [1, 3, 4, 5] and +phase.counts == {"failed_reward": 3}


def test_dynamic_sampling_with_staleness(make_run):
    """Every prompt is trained on once, or left out once; none is too old."""
    run = make_run(Task(outcome=lambda n, j: float(n % 3 and j)), num_steps=6, max_gen_batches=10)
    trained, filtered = [], set()
    for step in range(6):
        phase = run.step(step)
        trained += prompts(phase)
        filtered |= {o.extra["prompt"] for o in phase.outputs if "filtered" in o.extra}
        assert step - min(v for o in phase.trained for v in o.response_versions if v >= 0) <= 1
    assert len(trained) == len(set(trained)) == 12 and all(n % 3 for n in trained)
    assert all(n % 3 == 0 for n in filtered) and not filtered & set(trained)
    assert trained == sorted(trained) and set(range(run.pool.first)) == filtered | set(trained)


def test_groups_alike_that_filled_a_batch_are_not_replaced_later(make_run):
    """More prompts would start than the staleness bound allows."""
    task = Task((4, MIDDLE), outcome=lambda n, j: float(n > 3 and j))
    run = make_run(task, num_steps=6, max_gen_batches=2)
    assert prompts(run.step(0)) == [2, 3]  # 0 and 1 were skipped
    assert run.started() <= set(range(6))  # capacity 4, and two replacements
    run.later((4, MIDDLE), after=lambda: run.ended() >= 7)
    assert prompts(run.step(1)) == [4, 5]
    assert run.started() == set(range(8))
    for step in (2, 3, 4, 5):
        phase = run.step(step)
        assert prompts(phase) == [2 * step + 2, 2 * step + 3]
        assert step - min(v for o in phase.trained for v in o.response_versions if v >= 0) <= 1


# ---------------------------------------------------------------- evaluations, stops, resuming


def test_settling_for_an_evaluation(make_run, monkeypatch):
    task = Task((2, MIDDLE), (3, START), (4, START))
    run = make_run(task)
    assert prompts(run.step(0)) == [0, 1]
    run.open((2, MIDDLE), (3, START))
    wake(run.engine, run.models[1], 1)
    run.pool.settle()
    assert run.started() == set(range(4))  # what is under way ends, and nothing is started with
    run.nothing_is_left()
    evaluation = rollout(run.run, run.run.rows["train"][:3], 1, 2, {"temperature": 0.0}, kind="eval")
    assert prompts(evaluation) == [0, 1, 2] and not any(evaluation.counts.values())
    run.engine.sleep()
    phase = run.step(1)
    assert prompts(phase) == [2, 3]
    assert [o.response_versions for o in phase.outputs] == [[v] * 6 + [-1] * 3 + [1] * 6 for v in (0, 0, 1, 1)]
    wait_for(lambda: len(task.created) == 4 * 2 + 6 + 2 * 2)  # 4 and 5 have come
    run.open((4, START))
    wake(run.engine, run.models[2], 2)
    monkeypatch.setattr(processes, "all_gather", lambda x: [x, None])  # another rank was told to stop
    with pytest.raises(Stopped):
        run.pool.settle()
    run.pool.end()
    run.nothing_is_left()


def test_a_run_that_is_to_stop_gives_up_what_is_under_way(make_run):
    task = Task((0, MIDDLE), (1, MIDDLE), (2, START), (3, END))
    run = make_run(task, num_steps=3)
    run.run.stop.ask = lambda: run.task.at.total() == 8
    with pytest.raises(Stopped):
        run.step(0)
    run.pool.end()  # as train.py does whatever came before
    run.nothing_is_left()
    assert len(task.released) == 8 and run.pool.first_prompt(0) == 0


def test_a_run_that_stops_between_two_rollouts_releases_its_tools(make_run):
    task = Task((1, MIDDLE), (2, START), long=[3])
    run = make_run(task, prompts_per_step=1, max_staleness=3, oversample=4.0)
    assert prompts(run.step(0)) == [0] and not task.released[2:]
    run.pool.end()
    run.nothing_is_left()
    assert len(task.released) == 8


def test_a_run_is_resumed_with_the_prompts_that_were_not_trained_on(make_run):
    run = make_run(Task((2, MIDDLE), (3, END)))
    assert prompts(run.step(0)) == [0, 1]
    assert run.pool.first_prompt(1) == 2 and run.pool.first_prompt(0) == 0  # 0: stopped before the update
    run.run.stop.ask = lambda: True
    with pytest.raises(Stopped):
        run.step(1)
    assert run.pool.first_prompt(1) == 2  # stopped in the rollout
    run.pool.end()
    run.engine.sleep(keep=True) if run.engine.state == "awake" else None
    again = make_run(Task((4, START), (5, START)), start=1, resume=2)
    assert again.pool.first_prompt(1) == 2
    phase, order = again.step(1), data.prompt_order(7, 0, 6, run.args.seed)
    assert prompts(phase) == [2, 3] and again.started() == {2, 3, 4, 5}  # AReaL's capacity
    assert [o.reward for o in phase.outputs] == [order[2], order[2], order[3], order[3]]
    assert again.pool.first_prompt(2) == 4
    assert [again.pool.row_of(n)["index"] for n in (4, 5)] == order[4:]


def test_an_asynchronous_run_is_resumed_by_a_synchronous_one_too(make_run):
    run = make_run(Task(), start=3, resume=9, max_staleness=0, oversample=1.0)
    assert [prompts(run.step(step)) for step in (3, 4)] == [[9, 10], [11, 12]]


# ---------------------------------------------------------------- what train.py makes of it


def trajectory(prompt: int, sample: int, versions: list[int], logprob: float) -> AgentLoopOutput:
    n = len(versions)
    return AgentLoopOutput(
        prompt_ids=[1], response_ids=[2] * n, response_mask=[int(v >= 0) for v in versions], response_versions=versions,
        response_logprobs=[logprob if v >= 0 else 0.0 for v in versions], reward=1.0,
        extra={"prompt": prompt, "sample": sample, "segment": 0},
    )  # fmt: skip


def test_staleness_is_logged_and_logp_diff_covers_the_current_version_only():
    outputs = [
        trajectory(4, 0, [3, 3, -1, 5], -2.0),
        trajectory(4, 1, [5, 5], -1.0),
        trajectory(7, 0, [4, -1, -1, 4], -1.0),
    ]
    batch = data.collate(outputs) | {"units": data.by_unit(outputs)}
    off = torch.tensor([[0.5, 0.5, 9.0, 0.25], [0.0, 0.125, 9.0, 9.0], [-1.0, 9.0, 9.0, 1.0]])
    batch["logprobs_old"] = batch["logprobs_rollout"] + off  # 9 where nothing was sampled: must count nowhere
    phase = Phase(outputs, seconds=1.0, idle_s=[0.5])
    metrics = train.step_metrics(phase, batch, 5, Args(max_staleness=2))
    assert metrics["rollout/logp_diff_max"] == 0.25 and metrics["rollout/logp_diff_mean"] == pytest.approx(0.375 / 3)
    assert metrics["rollout/staleness_mean"] == pytest.approx((2 + 0 + 1) / 3)
    assert metrics["rollout/staleness_max"] == 2
    ratios = torch.tensor([0.5, 0.5, 0.25, 0.0, 0.125, -1.0, 1.0]).exp()
    assert metrics["rollout/ratio"] == pytest.approx(ratios.mean().item())
    assert metrics["rollout/dropped"] == 0  # down to 0 and up to 5 are kept
    assert metrics["rollout/zero_std_groups"] == 2 and metrics["rollout/singleton_groups"] == 1
    outputs[0].reward = 0.0
    metrics = train.step_metrics(phase, batch, 5, Args())
    assert "rollout/staleness_max" not in metrics and "rollout/ratio" not in metrics
    assert metrics["rollout/zero_std_groups"] == 1


def test_decoupled_loss_is_the_default_under_staleness():
    def correction(**flags):
        args = Args(**flags)
        check_args(args)
        return args.rollout_correction, args.correction_low, args.correction_high

    assert correction() == ("none", 0.0, 1.0)
    assert correction(max_staleness=2, oversample=1.5) == ("icepop", 0.0, 5.0)
    assert correction(max_staleness=1, correction_high=2.0) == ("icepop", 0.0, 2.0)
    assert correction(max_staleness=1, rollout_correction="none") == ("none", 0.0, 1.0)
    assert correction(max_staleness=1, rollout_correction="tis") == ("tis", 0.0, 2.0)
    assert correction(rollout_correction="icepop") == ("icepop", 0.5, 5.0)
    # The loss is the proximal policy's, weighed by pi_proximal / pi_behaviour: 0 where that is above the cap.
    old, behaviour = torch.tensor([[-1.0, -1.0, -1.0, 9.0]]), torch.tensor([[-1.0, -2.0, -3.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    part = {"response_mask": mask, "advantages": mask, "logprobs_old": old, "logprobs_rollout": behaviour}
    loss, _ = train.policy_objective((old, torch.zeros_like(old)), part, Args(max_staleness=1))
    assert loss[0, :3].tolist() == pytest.approx([-1.0, -torch.e, 0.0])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"oversample": 1.5}, "--oversample has an effect only with a --max_staleness"),
        ({"oversample": 0.5, "max_staleness": 1}, "--oversample 0.5 must be at least 1"),
        ({"max_staleness": -1}, "--max_staleness -1 must not be negative"),
        ({"max_staleness": 1, "deterministic": True}, "--deterministic has an effect only without --max_staleness"),
        (
            {"max_staleness": 1, "rollout_correction": "none", "correction_high": 3.0},
            "--correction_high has an effect only with a --rollout_correction",
        ),
    ],
)
def test_flags_that_do_not_go_with_staleness(flags, message):
    with pytest.raises(BadInput) as error:
        check_args(Args(**flags))
    assert message in str(error.value)


# ---------------------------------------------------------------- whole runs

SLOW = ["--task", "tests/tiny_task.py", "--agent", "slow_turns", "--num_steps", "6", "--prompts_per_step", "4",
        "--group_size", "4", "--max_prompt_tokens", "32", "--max_response_tokens", "32", "--tokens_per_micro_batch",
        "256", "--engine_args", SMALL_CACHE, "--eval_every", "0", "--max_staleness", "2",
        "--oversample", "2"]  # fmt: skip


def rollouts_of(folder, step: int) -> list[dict]:
    return [json.loads(line) for line in (folder / f"rollouts/step_{step:06d}.jsonl").open()]


def test_versions_name_the_checkpoints_that_sampled_each_token(cache, tmp_path):
    """And nobody who came in is still there at the end."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from transformers import AutoModelForCausalLM

    out, diary = tmp_path / "run", tmp_path / "diary"
    run(*SLOW, "--save_every", "1", "--keep_checkpoints", "99", "--lr", "0.003", "--output_dir", out, cache=cache,
        TINY_TASK_HELD="4 5 8 9 12 13 16 17", TINY_TASK_DIARY=str(diary))  # fmt: skip
    weights = {0: None}
    for step in range(1, 6):
        dcp_to_torch_save(out / f"checkpoints/step_{step:06d}", tmp_path / "whole.pt")
        saved = torch.load(tmp_path / "whole.pt")["policy"]
        weights[step] = {name.removeprefix("model."): x for name, x in saved.items()}
    source = json.loads((out / "args.json").read_text())["args"]["model"]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    seen, mixed, told_apart = collections.Counter(), 0, 0
    for version in range(6):
        if version:
            missing, unexpected = model.load_state_dict(weights[version], strict=False)
            assert not unexpected and set(missing) <= {"lm_head.weight"}  # tied
        for step in range(1, 7):
            for r in rollouts_of(out, step):
                versions = torch.tensor(r["response_versions"])
                assert (versions < step).all() and versions[versions >= 0].min() >= step - 1 - 2
                expected = hf_logprobs(model, r["prompt_ids"], r["response_ids"])
                difference = (torch.tensor(r["response_logprobs"]) - expected).abs()
                assert not (versions == version).any() or difference[versions == version].max() < 1e-4
                other = (versions >= 0) & (versions != version)
                told_apart += int((difference[other] > 1e-3).sum())
                seen[version] += int((versions == version).sum())
                mixed += version == 0 and len(set(r["response_versions"]) - {-1}) > 1
    assert mixed >= 6 * 4 and told_apart > 1000 and sum(n > 20 for n in seen.values()) >= 3, (mixed, told_apart, seen)
    rows = metrics_of(out)[1:]
    assert max(row["rollout/staleness_max"] for row in rows) in (1, 2)
    for row, step in zip(rows, range(1, 7), strict=True):
        stale = [step - 1 - min(v for v in r["response_versions"] if v >= 0) for r in rollouts_of(out, step)]
        assert row["rollout/staleness_max"] == max(stale) and len(stale) == 16
        assert row["rollout/staleness_mean"] == pytest.approx(sum(stale) / 16)
        assert row["rollout/logp_diff_max"] < 1e-3
    came = diary.read_text()
    assert came.count("+") == came.count("-") >= 6 * 16


def test_two_ranks_killed_resumed_and_interrupted(cache, tmp_path):
    out, diary = tmp_path / "run", tmp_path / "diary"
    env = {"TINY_TASK_PAUSE": "0.3", "TINY_TASK_DIARY": str(diary)}
    flags = [*SLOW, "--num_steps", "1000", "--save_every", "3", "--eval_every", "4", "--keep_checkpoints", "99",
             "--max_staleness", "1", "--oversample", "1.5", "--output_dir", out]  # fmt: skip
    with two_ranks(*flags, cache=cache, **env) as ranks:
        wait_for(lambda: lines(out / "metrics.jsonl") >= 9)
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()
    state = json.loads((out / "checkpoints/step_000006/step.json").read_text())
    assert state["next_prompt"] == 24 and "unfinished" not in state
    for later in (out / "checkpoints").glob("*"):  # as if killed a little earlier
        if later.name != "step_000003" and later.name != "step_000006":
            shutil.rmtree(later)
    diary.write_text("")
    with two_ranks(*flags, "--resume", cache=cache, **env) as ranks:
        wait_for((out / "checkpoints/step_000009/step.json").exists)
        for process in ranks:
            process.send_signal(signal.SIGINT)  # while groups are under way: there always are
        output, _ = (process.communicate(timeout=HANGS)[0] for process in ranks)
        assert [process.returncode for process in ranks] == [130, 130]
    assert "resuming after step 6" in output, output
    assert "stopping" in output
    rows = metrics_of(out)
    done = rows[-1]["step"]
    assert [row["step"] for row in rows] == list(range(done + 1))
    assert (out / f"checkpoints/step_{done:06d}/step.json").exists()
    came = diary.read_text()
    assert came.count("+") == came.count("-") >= 3 * 16  # every agent loop was cancelled and cleaned up after itself
    # Every prompt is trained on once, in its order, whoever ran it, and whenever the run was killed or stopped.
    order = data.prompt_order(24, 0, 4 * done, 0)
    for step in range(1, done + 1):
        trained = sorted({(r["extra"]["prompt"], r["index"]) for r in rollouts_of(out, step)})
        assert trained == [(n, order[n]) for n in range(4 * step - 4, 4 * step)]
    last = json.loads((out / f"checkpoints/step_{done:06d}/step.json").read_text())
    assert last["next_prompt"] == 4 * done
