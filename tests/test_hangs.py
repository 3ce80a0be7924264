"""User code that blocks the event loop, or does not let itself be cancelled."""

import asyncio
import contextlib
import time
from types import SimpleNamespace

import pytest
from conftest import HANGS, for_ever, time_passes, too_late
from test_agent_loop import END, PROMPT, Script
from test_agent_loop import call as call_of

from agent_loop import CallTimeoutError, agent_loop_class, call, in_time
from flatrl import processes
from train import Args


@pytest.fixture
def background():
    background = processes.Background()
    yield background
    background.close()


def on_a_loop(background, coroutine):
    return background.submit(coroutine).result(timeout=HANGS)


def test_a_task_that_blocks_the_loop_is_named_once_with_its_stack(background, monkeypatch, capfd):
    monkeypatch.setattr(processes, "BLOCKED_S", 0.1)
    shown = ""

    async def blocks():
        nonlocal shown
        deadline = time.monotonic() + HANGS
        while "in blocks" not in shown and time.monotonic() < deadline:
            time.sleep(0.01)
            shown += capfd.readouterr().err
        time.sleep(0.3)  # it is not named again

    on_a_loop(background, in_time("the tool", HANGS, blocks()))
    shown += capfd.readouterr().err
    (line,) = [line for line in shown.splitlines() if "blocks all others" in line]
    assert "name='the tool'" in line
    assert f'"{__file__}", line' in shown and "in blocks" in shown


@pytest.mark.parametrize("where", ["thread", "loop"])
def test_a_tool_that_holds_the_interpreter_is_named_once(background, monkeypatch, capfd, where):
    monkeypatch.setattr(processes, "BLOCKED_S", 0.05)
    monkeypatch.setattr(processes.Background, "has_named_holder", False)

    def holds():
        sum(range(10**7))  # one call, in C
        time.sleep(0.3)  # the watching thread looks

    async def holds_on_the_loop():
        return holds()

    def shown() -> str:
        function = holds if where == "thread" else holds_on_the_loop
        on_a_loop(background, in_time("the tool", HANGS, call(function)))
        time.sleep(0.3)  # it sleeps again
        return capfd.readouterr().err

    deadline = time.monotonic() + HANGS
    while "held Python's interpreter" not in (first := shown()) and time.monotonic() < deadline:
        pass  # another process had the core
    assert "in holds" in first
    assert "held" not in shown()


def test_without_a_thread_of_user_code_none_held_the_interpreter(monkeypatch):
    """At the end of a run there may be none. The watching thread must not raise then."""
    monkeypatch.setattr(processes, "cpu_of_user_threads", dict)
    assert not processes.name_holder({}, 2.0)


@pytest.fixture
def stubborn():
    """A coroutine function that never lets itself be cancelled, except at the test's end."""
    over = False

    async def stubborn() -> str:
        """Hang."""
        seconds = HANGS
        while not over:
            time_passes(seconds)  # the deadline, then the time to tidy up
            seconds = 4 * HANGS
            with contextlib.suppress(asyncio.CancelledError):
                await for_ever()
        return "over"

    yield stubborn
    over = True


@pytest.mark.parametrize("limit", ["tool_timeout", "trajectory_timeout"])
def test_a_tool_that_can_not_be_cancelled_is_left_behind(background, tokenizer, stubborn, limit):
    flags = {"max_response_tokens": 1000, "tool_timeout": 3 * HANGS, limit: HANGS}
    args = Args(**flags)
    task = SimpleNamespace(TOOLS=[stubborn])
    engine = Script(tokenizer, (call_of("stubborn"), "bye"))
    row = {"prompt": PROMPT}

    async def plays():
        loop = agent_loop_class(row, task, args)(engine, tokenizer, None, task, args)
        return await loop.run({}, **row, step=0, index=0, rollout_n=0, validate=False)

    output = on_a_loop(background, plays())
    if limit == "tool_timeout":
        answer, last = (message["content"] for message in output.messages[-2:])
        assert answer == f"Error: stubborn took longer than {HANGS} seconds" and last == "bye"
        assert output.metrics["tool_timeouts"] == 1
    else:
        assert output.stop_reason == "timeout" and output.text == ""
        assert tokenizer.decode(output.response_ids) == call_of("stubborn") + END


def test_a_cancelled_task_gets_time_to_tidy_up(background):
    done = []

    async def tidies():
        try:
            await too_late()
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            done.append("tidied")

    async def waits():
        with pytest.raises(CallTimeoutError, match=f"^it took longer than {HANGS} seconds$"):
            await in_time("it", HANGS, tidies())
        assert done == ["tidied"]

    on_a_loop(background, waits())
