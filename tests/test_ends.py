"""A run that did not reach its end never returns 0, and one that did ends, whatever user code has left behind."""

import asyncio
import json
import subprocess
import sys
import time

import pytest
from conftest import HANGS, REPO, TINY, clean_env, metrics_of, run

from agent_loop import CallTimeoutError, in_time
from flatrl.processes import Background

# Each case in a process of its own, forked from one that has imported everything.
CASES = """
import concurrent.futures, ctypes, json, os, sys, threading, time
import asyncio
from agent_loop import BadInput, call, in_time
from flatrl import bad_input, processes

processes.LEFT_BEHIND_S = 1

def forked_child():
    if os.fork() == 0:
        os._exit(0)  # its own end, not the run's
    assert os.wait()[1] == 0

def raises(error):
    raise error

def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()

def pool():
    concurrent.futures.ThreadPoolExecutor().submit(time.sleep, 1000)

def closed():
    sys.stdout.close()
    sys.stderr.close()
    os.close(1)
    os.close(2)
    print("still here")

def in_a_tool(tool):
    pid = os.getpid()
    background = processes.Background()
    assert background.submit(in_time("tool", 30, call(tool))).result(timeout=30) == pid == os.getpid()
    return background

def forks():
    os.fork()
    return os.getpid()

async def async_forks():
    os.fork()
    await asyncio.sleep(0.01)
    return os.getpid()

def sampler_forks():
    with bad_input.refusing("the sampler failed"):
        os.fork()
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 1

def forks_in_a_tool(tool):
    in_a_tool(tool)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 1

cases = {
    "end": lambda: 5, "child": forked_child, "pool": pool, "closed": closed,
    "forks": lambda: forks_in_a_tool(forks), "async forks": lambda: forks_in_a_tool(async_forks),
    "sampler forks": sampler_forks,
    "thread": lambda: threading.Thread(target=time.sleep, args=[1000]).start(),
    "_exit(0)": lambda: os._exit(0), "_exit(7)": lambda: os._exit(7), "exit()": sys.exit,
    "exit(0)": lambda: sys.exit(0),
    "exit(3)": lambda: sys.exit(3), "in a thread": lambda: in_a_thread(lambda: os._exit(0)),
    "stopped": lambda: raises(processes.Stopped()), "Ctrl-C": lambda: raises(KeyboardInterrupt()),
    "input": lambda: raises(BadInput("no")),
    "error": lambda: (pool(), 1 / 0)}
codes = {}
for name, case in cases.items():
    if os.fork() == 0:
        processes.run_as_script(lambda args: case(), lambda: None)
        os._exit(99)
    codes[name] = os.waitstatus_to_exitcode(os.wait()[1])
if os.fork() == 0:
    processes.run_as_script(lambda args: 1 / 0, sys.exit)
    os._exit(99)
codes["--help"] = os.waitstatus_to_exitcode(os.wait()[1])
os.write(1, json.dumps(codes).encode())
"""


def test_exit_codes():
    done = subprocess.run([sys.executable, "-c", CASES], cwd=REPO, env=clean_env(), capture_output=True, text=True,
                          timeout=HANGS)  # fmt: skip
    assert json.loads(done.stdout.replace("still here", "").strip()) == {
        "end": 0, "child": 0, "pool": 0, "closed": 0, "forks": 0, "async forks": 0, "sampler forks": 0,
        "thread": 0, "--help": 0, "_exit(0)": 1, "_exit(7)": 7,
        "exit()": 1, "exit(0)": 1, "exit(3)": 1, "in a thread": 1, "stopped": 130, "Ctrl-C": 130,
        "input": 2, "error": 1,
    }, done.stderr  # fmt: skip
    assert done.stdout.startswith("still here")
    assert done.stderr.count("os._exit(0) ends the run before its end: it returns 1") == 2
    assert "RuntimeError: sys.exit(0) in the middle of the run" in done.stderr
    assert "train.py: error: no" in done.stderr
    assert done.stderr.count("train.py: stopped") == 1  # of Ctrl-C alone: a run says itself where it stopped
    assert done.stderr.count("tool has forked this process: its copy ends") == 1


TASK = f"""
import os, sys
sys.path.insert(0, {str(REPO / "tests")!r})
from tiny_task import *

@register("leaves")
class Leaves(TwoTurns):
    async def run(self, sampling_params, **row):
        if row["step"] == 1:
            os._exit(0)
        return await super().run(sampling_params, **row)
"""


def test_a_tool_that_ends_its_process_ends_no_run_with_0(cache, tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    flags = [*TINY, "--num_steps", "2", "--eval_every", "0", "--save_every", "0", "--output_dir", tmp_path / "out"]
    printed = run(*flags, "--task", tmp_path / "task.py", "--agent", "leaves", cache=cache, code=1)
    assert "os._exit(0) ends the run before its end" in printed and "in run\n    os._exit(0)" in printed
    assert [row["step"] for row in metrics_of(tmp_path / "out")] == [0, 1]


def test_a_block_lets_no_deadline_of_a_second_pass():
    """Others' time stands still while one blocks the loop, three times for longer than the deadline."""
    background = Background()

    async def blocks():
        for _ in range(3):
            await asyncio.sleep(0.01)
            time.sleep(1.5)
        return "blocked"

    async def both():
        waits = in_time("waits", 1.0, asyncio.sleep(0.1, "waited"))
        return await asyncio.gather(waits, in_time("blocks", 1.0, blocks()), return_exceptions=True)

    assert background.submit(both()).result(timeout=HANGS) == ["waited", "blocked"]

    async def hangs():
        started_at = time.monotonic()
        with pytest.raises(CallTimeoutError):
            await in_time("it", 0.5, asyncio.sleep(1000))
        return time.monotonic() - started_at

    assert background.submit(hangs()).result(timeout=HANGS) >= 0.4
    background.close()


def test_a_loop_that_dies_ends_the_run():
    script = """
import os, threading, time
from flatrl.processes import Background
background = Background()
def breaks():
    raise MemoryError("no room")
background.loop.time = breaks
time.sleep(1000)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPO, env=clean_env(), capture_output=True, text=True,
                          timeout=HANGS)  # fmt: skip
    assert done.returncode == 1 and "MemoryError: no room" in done.stderr
