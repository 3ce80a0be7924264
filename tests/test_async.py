"""Asynchronous rollout (--max_staleness): calls suspended over updates, versions, staleness.

Gates decide what an agent loop does when: never time."""

import asyncio
import dataclasses
import json
import random
import signal
from types import SimpleNamespace

import pytest
import torch
from conftest import HANGS, TINY, lines, metrics_of, output_of, rollouts_of, started, wait_for
from conftest import make_run as stage
from test_rollout import PROMPTS, hf_logprobs, hf_model, wake

import data
import train
from agent_loop import AgentLoopBase, register
from flatrl.metrics import Clock
from rollout import Rollouts, rollout, training_pool, wait_for_rewards


@pytest.fixture(scope="module")
def models(tiny_model) -> list:
    """The weights of versions 0, 1, ..., which a token's logprob tells apart."""
    return [hf_model(tiny_model, 1 + version / 2) for version in range(6)]


def check_versions(models: list, output) -> None:
    """A sampled token's logprob is that of the weights its version names, and of no others."""
    logprobs = torch.tensor(output.response_logprobs)
    versions = torch.tensor(output.response_versions)
    assert (versions >= 0).tolist() == [m == 1 for m in output.response_mask]
    for version, model in enumerate(models):
        expected = hf_logprobs(model, output.prompt_ids, output.response_ids)
        is_its = versions == version
        is_others = (versions >= 0) & ~is_its
        torch.testing.assert_close(logprobs[is_its], expected[is_its], atol=1e-4, rtol=0)
        if is_others.any():
            assert (logprobs - expected)[is_others].abs().max() > 0.01


def test_a_call_suspended_over_two_updates_has_tokens_of_three_versions(
    engine, background, models
):
    def ask(name: str, prompt: list[int], n: int):
        """Calls `generate` for n tokens, and waits until the call is in the inbox."""
        sampling = {"temperature": 1.0, "max_tokens": n, "ignore_eos": True, "stop_token_ids": []}
        call = engine.generate(request_id=name, prompt_ids=prompt, sampling_params=sampling)
        future = background.submit(call)
        wait_for(lambda: any(request.rollout_name == name for request in engine.inbox))
        return future

    calls = {"long": ask("long", PROMPTS[3], 30), "short": ask("short", PROMPTS[1], 5)}
    for version, n_steps in enumerate((7, 9)):
        wake(engine, models[version], version)
        for _ in range(n_steps):
            engine.step()  # a token for each request
        if version == 0:
            assert calls["short"].result(timeout=HANGS).versions == [0] * 5
        engine.sleep(keep=True)
        if version == 0:
            calls["late"] = ask("late", PROMPTS[5], 12)
    wake(engine, models[2], 2)
    while engine.pending:
        engine.step()

    assert calls["long"].result(timeout=HANGS).versions == [0] * 7 + [1] * 9 + [2] * 14
    assert calls["late"].result(timeout=HANGS).versions == [1] * 9 + [2] * 3
    for call in calls.values():
        out = call.result()
        lists = {"response_logprobs": out.logprobs, "response_versions": out.versions}
        mask = [1] * len(out.token_ids)
        check_versions(models[:3], output_of(mask, out.prompt_ids, out.token_ids, **lists))
    engine.sleep()  # raises if anything is left
    assert not engine.core.has_unfinished_requests()


def task_of(**attributes) -> SimpleNamespace:
    """gates: {prompt: whether its trajectories may begin their second turn}."""
    own = {"gates": {}, "created": [], "released": [], "reward": lambda output, row: row["index"]}
    return SimpleNamespace(**own | attributes)


@register("test_gated")
class Gated(AgentLoopBase):
    """Two turns of six tokens, with three given ones between."""

    async def run(self, sampling_params, **row):
        task = self.task
        engine, name = self.engine.engine, self.engine.name
        is_open = task.gates.get(int(name.split("-")[2]))
        task.created.append(name)
        try:
            trajectory = self.start(row)
            sampling_params |= {"ignore_eos": True, "stop_token_ids": [], "max_tokens": 6}
            await self.assistant_turn(trajectory, sampling_params)
            if is_open:
                engine.leave(name)  # the engine, --deterministic here, does not wait
                while not is_open():
                    await asyncio.sleep(0.01)
                engine.enter(name)
            trajectory.add_given([5, 6, 7])
            await self.assistant_turn(trajectory, sampling_params)
            trajectory.stop_reason = "stop"
            return trajectory.output()
        finally:
            await asyncio.sleep(0)  # to release a tool takes a while
            task.released.append(name)


class Run:
    """A pool with its engine and agent loops. The engine waits for all that are not at a gate:
    no step is left to chance."""

    def __init__(self, models, run):
        self.run = run
        self.task = run.task
        self.models = models
        self.engine = run.engine
        self.engine.args.deterministic = True
        prompt = [{"role": "user", "content": "What is 12+34?"}]
        run.rows = {"train": [{"prompt": prompt, "index": i} for i in range(7)]}
        self.pool = run.pool = training_pool(run, 0)

    def step(self, version: int) -> Rollouts:
        """Does what train.py does in a step, as far as rollout goes."""
        wake(self.engine, self.models[version], version)
        rollouts = self.pool.rollout(version)
        self.engine.sleep(keep=True)
        wait_for_rewards(rollouts, self.run.background, self.run.stop)
        return rollouts

    def started(self) -> set[int]:
        """The prompts whose agent loops have begun."""
        names = [name.split("-") for name in self.task.created]
        return {int(number) for kind, _, number, _ in names if kind == "train"}

    def nothing_is_left(self) -> None:
        engine = self.engine
        assert not (engine.pending or engine.active or engine.calls)
        assert not engine.core.has_unfinished_requests()
        assert sorted(self.task.created) == sorted(self.task.released)


@pytest.fixture
def make_run(engine, background, tokenizer, args, models):
    """Makes Runs, and gives up at the end what they have under way."""
    runs = []

    def make(task, max_staleness=1, **flags) -> Run:
        flags = {
            "agent": "test_gated",
            "num_steps": 20,
            "prompts_per_step": 2,
            "group_size": 2,
            "max_staleness": max_staleness,
            "oversample": 1.0 + max_staleness,
        } | flags
        run = stage(engine, background, task, tokenizer, dataclasses.replace(args, **flags))
        runs.append(Run(models, run))
        return runs[-1]

    yield make
    for each in runs:
        each.pool.end()


def prompts(rollouts: Rollouts) -> list[int]:
    """The prompts to learn from, after checking that each group is whole."""
    keys = [(o.extra["prompt"], o.extra["sample"]) for o in rollouts.trained]
    numbers = sorted({number for number, _ in keys})
    assert keys == [(number, sample) for number in numbers for sample in range(2)]
    return numbers


def versions(rollouts: Rollouts) -> list[tuple[int, int]]:
    """For each output, the versions of its two turns."""
    found = [output.response_versions for output in rollouts.outputs]
    for of in found:
        assert of == [of[0]] * 6 + [-1] * 3 + [of[-1]] * 6
    return [(of[0], of[-1]) for of in found]


def test_a_batch_is_the_next_prompts_while_those_of_the_next_are_under_way(make_run, models):
    task = task_of()
    run = make_run(task)
    # Capacity is (1 + 1) * 2: prompts 0 to 3. 0 is waited for, although 1 and 2 are done.
    task.gates[0] = lambda: run.pool.store.add("ended", 0) == 2
    task.gates[3] = lambda: run.engine.version == 1
    first = run.step(0)
    assert prompts(first) == [0, 1] and run.started() == {0, 1, 2, 3}
    one, other = data.prompt_order(7, 0, 2, run.run.args.seed)
    assert [o.reward for o in first.outputs] == [one, one, other, other]

    second = run.step(1)
    assert prompts(second) == [2, 3]
    assert versions(second) == [(0, 0), (0, 0), (0, 1), (0, 1)]
    assert run.pool.next_prompt(2) == 4 and run.pool.next_prompt(1) == 2
    for rollouts in (first, second):
        assert not +rollouts.lost
        for output in rollouts.outputs:
            check_versions(models, output)


def test_groups_without_signal_are_replaced_by_the_next_prompts(make_run):
    silent = {1, 2, 4}

    def reward(output, row):
        prompt, sample = output.extra["prompt"], output.extra["sample"]
        if (prompt, sample) == (7, 1):
            raise RuntimeError("a survivor alone gives no signal")
        return float(prompt not in silent and sample)

    task = task_of(reward=reward)
    run = make_run(task, max_staleness=0, prompts_per_step=4, max_gen_batches=3)
    rollouts = run.step(0)
    assert prompts(rollouts) == [0, 3, 5, 6]
    skipped = {o.extra["prompt"] for o in rollouts.outputs if "filtered" in o.extra}
    assert skipped == silent and len(rollouts.outputs) == len(rollouts.sampled) == 14
    assert run.started() == set(range(7))
    assert run.pool.next_prompt(1) == 7 and run.pool.next_prompt(0) == 0

    rollouts = run.step(1)
    assert prompts(rollouts) == [8, 9, 10, 11] and +rollouts.lost == {"failed_reward": 1}
    run.nothing_is_left()
    assert run.run.store.num_keys() == 3  # of the pool, none of a group


def test_slow_graders_run_on_after_the_rollout_and_are_awaited(make_run, models, background):
    release = asyncio.Event()

    async def reward(output, row):
        if output.extra["prompt"] == 1:
            raise RuntimeError("no")
        await release.wait()
        return {"score": output.extra["prompt"] + output.extra["sample"] / 4}

    run = make_run(task_of(reward=reward), max_staleness=0, prompts_per_step=3)
    wake(run.engine, models[0], 0)
    rollouts = run.pool.rollout(0)
    run.engine.sleep()  # nothing to wait for: the trajectories are done
    assert [output.reward for output in rollouts.outputs] == [None] * 6
    background.loop.call_soon_threadsafe(release.set)
    wait_for_rewards(rollouts, background, run.run.stop)
    assert [output.reward["score"] for output in rollouts.outputs] == [0, 0.25, 2, 2.25]
    assert +rollouts.lost == {"failed_reward": 2}


def test_what_is_under_way_settles_for_an_evaluation(make_run):
    task = task_of()
    run = make_run(task)
    task.gates[2] = task.gates[3] = lambda: run.engine.version == 1
    assert prompts(run.step(0)) == [0, 1]
    wake(run.engine, run.models[1], 1)
    run.pool.finish_running()
    assert run.started() == set(range(4))  # nothing new is started
    run.nothing_is_left()
    rows = run.run.rows["train"][:3]
    evaluation = rollout(run.run, rows, 1, 2, {"temperature": 0.0}, kind="eval")
    assert prompts(evaluation) == [0, 1, 2] and not +evaluation.lost
    run.engine.sleep()

    rollouts = run.step(1)
    assert prompts(rollouts) == [2, 3]
    assert versions(rollouts) == [(0, 1)] * 4


@pytest.mark.parametrize("staleness", [0, 1])
def test_rows_are_the_samplers_and_rewards_reach_it(make_run, staleness):
    told = []

    def choose(history) -> int:
        return random.Random(json.dumps(history)).randrange(7)

    def sampler(history):
        told.append(json.loads(json.dumps(history)))
        row = choose(history)
        history.clear()  # it is a copy
        return row

    run = make_run(task_of(sampler=sampler), max_staleness=staleness)
    vars(run.run).update(history=[], clock=Clock(), done=0)
    rows = []
    for step in range(4):
        rollouts = run.step(step)
        places = [output.extra for output in rollouts.outputs]
        rows += [(extra["prompt"], extra["index"]) for extra in places if extra["sample"] == 0]
        train.add_rewards(run.run, rollouts, data.make_batch(rollouts.trained))
        run.run.done += 1
    history = run.run.history
    # One call for each prompt, in order, with all before it. The entry begins with its answer.
    assert [len(before) for before in told] == list(range(len(history)))
    assert [entry[0] for entry in history] == [choose(before) for before in told]
    assert sorted(rows) == [(prompt, history[prompt][0]) for prompt in range(8)]
    # The rewards of both members (their row's number) came by the next choice.
    ahead = 2 * staleness  # prompts a step, drawn so many steps before they are needed
    assert [rewards for _, _, *rewards in history[:8]] == [[row, row] for row, *_ in history[:8]]
    assert len(history) == 8 + ahead and told[2 + ahead][:2] == history[:2]


def test_a_team_is_killed_and_two_engines_resume_until_they_are_interrupted(
    train_here, tiny_model, tmp_path
):
    """Two ranks share an engine (--tp) and learn what one learns alone. Then each has its own.
    By torchrun, whose Ctrl-C ends all ranks, with the last step saved."""
    out, alone, diary = (tmp_path / name for name in ("run", "alone", "diary"))
    flags = [*TINY, "--model", tiny_model, "--algo", "ppo"]
    flags += ["--eval_every", "0", "--max_staleness", "1", "--oversample", "1.5", "--output_dir"]
    train_here(*flags, alone, "--num_steps", "1")
    flags += [out, "--num_steps", "1000", "--agent", "slow_turns", "--offload", "all"]
    pause = {"TINY_TASK_PAUSE": "0.2", "TINY_TASK_DIARY": diary}
    with started(*flags, "--tp", "2", "--shard", by="torchrun", **pause):
        wait_for(lambda: lines(out / "metrics.jsonl") >= 4)

    def newest():
        return max((out / "checkpoints").glob("step_*/step.json"))

    resumed = int(newest().parent.name[5:])
    diary.write_text("")
    with started(*flags, "--resume", by="torchrun", **pause) as launcher:
        wait_for(lambda: int(newest().parent.name[5:]) >= resumed + 2)
        launcher.send_signal(signal.SIGINT)  # groups are always under way
        output, _ = launcher.communicate(timeout=HANGS)
    assert f"resuming after step {resumed}" in output and "stopping" in output
    rows = metrics_of(out, timings=True)
    done = rows[-1]["step"]
    assert [row["step"] for row in rows] == list(range(done + 1))
    came = diary.read_text()
    assert came.count("+") == came.count("-") > 0  # all agent loops have cleaned up

    # Every prompt is trained on once, in its order, whoever ran it, whatever was stopped.
    order = data.prompt_order(24, 0, 4 * done, 0)
    for step in range(1, done + 1):
        rollouts = rollouts_of(out, step)
        trained = sorted({(r["extra"]["prompt"], r["index"]) for r in rollouts})
        assert trained == [(n, order[n]) for n in range(4 * step - 4, 4 * step)]
        assert len(rollouts) == rows[step]["rollout/trajectories"] == 16
        oldest = [min(v for v in r["response_versions"] if v >= 0) for r in rollouts]
        assert rows[step]["rollout/staleness_max"] == step - 1 - min(oldest) <= 1
        assert rows[step]["rollout/logp_diff_max"] < 1e-3
        n_engines = 1 if step <= resumed else 2
        assert len(rows[step]["timing/idle_s"]) == n_engines
        assert 0 <= rows[step]["throughput/idle_share"] <= 1

    first, its_first = metrics_of(alone)
    assert rows[0]["eval/reward"] == pytest.approx(first["eval/reward"], rel=1e-3)
    for name in ("reward/mean", "response_length/mean", "actor/grad_norm", "critic/vf_loss"):
        assert rows[1][name] == pytest.approx(its_first[name], rel=1e-3), name
