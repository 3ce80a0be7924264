"""Hundreds of trajectories on the real engine, with tools that do everything wrong at random (bench/stress.py)."""

import asyncio
import collections
import contextlib
import dataclasses
import selectors
import sys

from conftest import KEPT, REPO

import agent_loop
from flatrl import processes

sys.path.append(str(REPO / "bench"))

from stress import TURNS, Engine, blocks, stress

DEADLINE = 0.5  # longer than `create` and `execute` may sleep together


class Patient(selectors.DefaultSelector):
    """For an event loop whose clock goes from one timer to the next, and only while nothing but timers is waited for:
    a deadline passes because of what the tools do, never because of how long the engine or a thread takes."""

    now, busy = 0.0, 0

    @contextlib.contextmanager
    def work(self):
        """Whatever else is waited for."""
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1

    def select(self, timeout=None):
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if self.busy:  # its end is an event
            return super().select()
        events = super().select(0)
        self.now += 0 if events else timeout
        return events


def test_no_trajectory_is_lost_or_hangs_and_every_create_is_released(
    process_group, tokenizer, args, tiny_model, monkeypatch
):
    clock = Patient()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now
    generate, in_thread = Engine.generate, agent_loop.in_thread

    async def generate_meanwhile(*args, **request):
        with clock.work():
            return await generate(*args, **request)

    async def in_thread_meanwhile(function, *args, **kwargs):
        with clock.work() if function is not blocks else contextlib.nullcontext():
            return await in_thread(function, *args, **kwargs)

    monkeypatch.setattr(asyncio, "new_event_loop", lambda: loop)
    class Background(processes.Background):
        """This run's alone: those of other tests in this process go on."""

        def loop_time(self):
            return clock.now

        def tick(self):
            pass

        def watch(self):
            pass

    monkeypatch.setattr(processes, "Background", Background)
    monkeypatch.setattr(Engine, "generate", generate_meanwhile)
    monkeypatch.setattr(agent_loop, "in_thread", in_thread_meanwhile)
    limits = dataclasses.replace(args, tool_timeout=DEADLINE, max_tool_response_tokens=8, max_model_len=512,
                                 max_response_tokens=448)  # fmt: skip
    phase, chaos, engine, _ = stress(tiny_model, limits, tokenizer, 50, 6)
    KEPT.append(engine)

    # A calc_reward of a tool that could not be created isn't asked for; nothing else may end a trajectory early.
    assert len(phase.outputs) + sum(phase.counts.values()) == 300
    assert phase.counts == {}, phase.errors[:1]
    per_trajectory = collections.Counter()
    for events in chaos.events.values():
        assert events.count("create") == 1 == events.count("release")
        assert events[0] == "create" and events[-1] == "release"
        per_trajectory[events.count("execute")] += 1
    assert len(chaos.events) == 300
    assert set(per_trajectory) == {0, 2 * TURNS} and min(per_trajectory.values()) > 50  # 0: `create` failed
    for output in phase.outputs:
        assert output.metrics["tool_calls"] >= 2 * TURNS or output.stop_reason == "length"
    total = collections.Counter()
    for output in phase.outputs:
        total.update({k: v for k, v in output.metrics.items() if isinstance(v, (int, float))})
    assert total["tool_timeouts"] > 50 and total["tool_errors"] > 50 and total["release_errors"] > 20
    # Deadlines bound the time: create and execute share one a turn, release has its own.
    waves = 2  # 300 trajectories, of which --max_concurrent are under way at a time
    assert args.max_concurrent >= 300 / waves
    assert DEADLINE <= clock.now <= waves * (TURNS + 1) * DEADLINE + 1e-6
