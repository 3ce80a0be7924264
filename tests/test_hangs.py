"""User code that blocks the event loop or the interpreter, or does not let itself be cancelled: it costs itself."""

import asyncio
import contextlib
import faulthandler
import os
import signal
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from conftest import HANGS, REPO, for_ever, started, time_passes, too_late, wait_for
from test_agent_loop import END, PROMPT, Script, call

from agent_loop import DEADLINE, CallTimeoutError, agent_loop_class, as_tool, in_time, tool_parser
from data import load_task
from flatrl.processes import Background
from train import Args


@pytest.fixture
def background():
    background = Background()
    yield background
    background.close()


class Later:
    """time.monotonic, which a test may put forward."""

    def __init__(self, monkeypatch):
        self.ahead, self.real = 0.0, time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: self.real() + self.ahead)


def test_a_tool_that_blocks_is_named_and_costs_the_others_nothing(background, tokenizer, monkeypatch, capfd):
    """One of sixty blocks for a thousand seconds, the others' tools are under a deadline of thirty."""
    tool_parser("hermes", tokenizer)  # its first use imports for seconds
    later, over, waiting, shown = Later(monkeypatch), asyncio.Event(), 0, ""

    async def blocks() -> str:
        """Wait without await."""
        nonlocal shown
        while waiting < 59:
            await asyncio.sleep(0)
        ticked = background.ticked  # on a busy machine the others' start may have blocked for longer, and been named
        while background.ticked == ticked:
            await asyncio.sleep(0.01)
        later.ahead += 2  # it is named within two seconds
        deadline = later.real() + HANGS
        while "name='blocks'" not in shown:
            assert later.real() < deadline
            time.sleep(0.01)
            shown += capfd.readouterr().err
        later.ahead += 1000
        over.set()
        return "blocked"

    async def waits() -> str:
        """Wait for the other."""
        nonlocal waiting
        waiting += 1
        await over.wait()
        await asyncio.sleep(0.5)  # in which the loop finds out what time it is
        return "waited"

    args = Args(max_response_tokens=1000, tool_timeout=30.0, trajectory_timeout=30.0)
    task = SimpleNamespace(TOOLS=[blocks, waits])

    async def plays(name):
        row = {"prompt": PROMPT}
        loop = agent_loop_class(row, task, args)(Script(tokenizer, (call(name), "bye")), tokenizer, None, task, args)
        return await loop.run({}, **row, step=0, index=0, rollout_n=0, validate=False)

    async def all_of_them():
        return await asyncio.gather(plays("blocks"), *(plays("waits") for _ in range(59)))

    outputs = background.submit(all_of_them()).result(timeout=HANGS)
    assert [output.messages[-2]["content"] for output in outputs] == ["blocked"] + ["waited"] * 59
    assert not any(output.metrics.get("tool_timeouts") for output in outputs)
    assert {output.stop_reason for output in outputs} == {"stop"}
    shown += capfd.readouterr().err
    assert len([line for line in shown.splitlines() if "name='blocks'" in line and "blocks all others" in line]) == 1
    assert f'{__file__}", line' in shown and "in blocks\n    time.sleep(0.01)" in shown  # the stack, and its last line


def test_all_stacks_are_printed_only_where_no_python_runs(monkeypatch):
    """faulthandler's thread walks the stacks of running threads: that crashes a process in which they come and go."""
    put_off, cancelled, over, others = [], [], threading.Event(), threading.enumerate()

    def note(what, file=None):
        if threading.current_thread() not in others:  # those of earlier tests
            put_off.append(what)

    monkeypatch.setattr(faulthandler, "dump_traceback_later", note)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: cancelled.append(len(put_off)))
    background = Background()
    background.loop.call_soon_threadsafe(over.wait, HANGS)  # the loop stands still, in no task
    n = len(put_off)
    wait_for(lambda: len(put_off) > n + 3)
    assert set(put_off) == {1.8}
    assert cancelled == []
    background.close()  # a process may end before the watching thread gets another turn
    over.set()
    (n,) = cancelled
    assert len(put_off) <= n + 1  # it was in the middle of a turn, at most


def test_a_deadline_passes_when_the_loop_lives(background):
    """The other way round: time that is not lost to a block counts, to a tenth of a second."""

    async def hangs():
        started = time.monotonic()
        with pytest.raises(CallTimeoutError, match="^it took longer than 0.5 seconds$"):
            await in_time("it", 0.5, asyncio.get_running_loop().create_future())
        return time.monotonic() - started

    assert background.submit(hangs()).result(timeout=HANGS) >= 0.4


def test_the_second_interrupt_ends_a_run_whose_tool_holds_the_interpreter(cache, tmp_path):
    script = tmp_path / "held.py"
    script.write_text(f"""
import re, signal, subprocess, sys, time
sys.path.insert(0, {str(REPO)!r})
import torch.distributed as dist
import agent_loop, rollout, train
from flatrl import processes
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
processes.Stop()
signal.signal(signal.SIGCHLD, lambda *_: None)  # as a data loader does: no signal to stop
for _ in range(3):
    subprocess.run(["sleep", "0.6"])

async def backtracks():
    time.sleep(1)  # until the loop has ticked
    re.match("(a|a)+$", "a" * 100 + "b")

processes.Background().submit(agent_loop.in_time("backtracks", 30, backtracks()))
while True:
    time.sleep(0.1)
""")
    with started(cache=cache, script=str(script)) as process:
        wait_for(lambda: "in backtracks" in process.printed())  # no Python could print that
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)  # within a second of the first: the launcher's
        time.sleep(0.1)
        assert process.poll() is None
        wait_for(lambda: process.send_signal(signal.SIGINT) or process.poll() is not None)
        assert process.returncode == -signal.SIGKILL
        assert "stopping" not in process.printed()


@pytest.fixture
def stubborn():
    """A coroutine function that never lets itself be cancelled, but in the end."""
    over = False

    async def stubborn() -> str:
        """Hang."""
        seconds = HANGS
        while not over:
            time_passes(seconds)  # the deadline's, then those it gets to tidy up
            seconds = 4 * HANGS
            with contextlib.suppress(asyncio.CancelledError):
                await for_ever()
        return "over"

    yield stubborn
    over = True


def on_a_loop(background, coroutine):
    return background.submit(coroutine).result(timeout=HANGS)


@pytest.mark.parametrize("limit", ["tool_timeout", "trajectory_timeout"])
def test_a_tool_that_is_not_to_be_cancelled_is_left_behind(background, tokenizer, stubborn, limit):
    args = Args(**{"max_response_tokens": 1000, "tool_timeout": 3 * HANGS, limit: HANGS})
    task = SimpleNamespace(TOOLS=[stubborn])
    engine = Script(tokenizer, (call("stubborn"), "bye"))

    async def plays():
        row = {"prompt": PROMPT}
        loop = agent_loop_class(row, task, args)(engine, tokenizer, None, task, args)
        return await loop.run({}, **row, step=0, index=0, rollout_n=0, validate=False)

    output = on_a_loop(background, plays())
    if limit == "tool_timeout":
        assert output.messages[-2]["content"] == f"Error: stubborn took longer than {HANGS} seconds"
        assert output.messages[-1]["content"] == "bye" and output.metrics["tool_timeouts"] == 1
    else:
        assert output.stop_reason == "timeout" and output.text == "" and len(engine.prompts) == 1
        assert tokenizer.decode(output.response_ids) == call("stubborn") + END


def test_what_is_cancelled_gets_time_to_tidy_up(background):
    said = []

    async def tidies():
        try:
            await too_late()
        finally:
            await asyncio.sleep(0)
            said.append("tidied")

    async def waits():
        with pytest.raises(CallTimeoutError, match=f"^it took longer than {HANGS} seconds$"):
            await in_time("it", HANGS, tidies())
        return [*said]

    assert on_a_loop(background, waits()) == ["tidied"]


def test_what_waits_for_its_turn_may_put_off_its_deadline(background):
    async def queues():
        deadline = DEADLINE.get()
        left = deadline.when() - asyncio.get_running_loop().time()
        deadline.reschedule(None)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(HANGS):
                await too_late()
        deadline.reschedule(asyncio.get_running_loop().time() + left)
        return "served"

    assert on_a_loop(background, in_time("it", HANGS / 2, queues())) == "served"


@pytest.fixture
def own(tmp_path):
    """A task file with tools in processes of their own."""
    file = tmp_path / "own_tools.py"
    file.write_text(f"""
import os, re, sys, time
from examples.own_process import in_process

@in_process
def backtracks(text: str) -> str:
    \"\"\"Match.

    Args:
        text: what.
    \"\"\"
    if os.fork() == 0:
        time.sleep(3600)
    open({str(tmp_path / "there")!r}, "w").write(str(os.getpid()))
    return str(re.match("(a|a)+$", text))

@in_process
async def adds(a: int, b: int = 2):
    print("to stderr")
    return a + b

@in_process
def raises():
    raise KeyError("no")

@in_process
def dies():
    os._exit(7)
""")
    return load_task(str(file), [])


def test_a_tool_in_a_process_of_its_own(background, own, tmp_path):
    there = tmp_path / "there"

    async def hangs():
        run = asyncio.create_task(in_time("it", HANGS, as_tool(own.backtracks).execute("", {"text": "a" * 100 + "b"})))
        while not there.exists() or not there.read_text():
            await asyncio.sleep(0.01)
        time_passes()
        with pytest.raises(CallTimeoutError):
            await run
        return int(there.read_text())

    group = on_a_loop(background, hangs())
    wait_for(lambda: not [p for p in psutil.process_iter() if group_of(p.pid) == group and p.status() != "zombie"])
    assert on_a_loop(background, own.adds(40)) == 42
    with pytest.raises(KeyError, match="no"):
        on_a_loop(background, own.raises())
    with pytest.raises(RuntimeError, match="the process of dies ended with code 7"):
        on_a_loop(background, own.dies())


def group_of(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None
