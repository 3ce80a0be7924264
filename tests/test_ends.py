"""How a run ends: its exit code, its background loop, and an error on the main rank."""

import asyncio
import json
import sys

import pytest
import torch.distributed as dist
from conftest import HANGS, run

from agent_loop import BadInput
from flatrl import processes

# Each case is a process forked from one that has imported everything.
CASES = """
import concurrent.futures, json, multiprocessing, os, signal, sys, threading, time
sys.path.insert(0, os.getcwd())
import torch
import torch.distributed as dist
from agent_loop import BadInput
from flatrl import processes

processes.LEFT_BEHIND_S = 1
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as prepare_process leaves it

def raises(error):
    raise error

def pool():
    concurrent.futures.ThreadPoolExecutor().submit(time.sleep, 1000)

def waits(ready):
    ready.set()
    time.sleep(1000)

def grader():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stop = processes.Stop()
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    process = fork.Process(target=waits, args=[ready])
    process.start()
    ready.wait()
    process.terminate()
    process.join()
    assert process.exitcode == -signal.SIGTERM and not stop.requested

cases = {
    "grader": grader,
    "end": lambda: 5,
    "pool": pool,
    "thread": lambda: threading.Thread(target=time.sleep, args=[1000]).start(),
    "stopped": lambda: raises(processes.Stopped()),
    "Ctrl-C": lambda: signal.raise_signal(signal.SIGINT),
    "input": lambda: raises(BadInput("no")),
    "launched": lambda: (os.environ.update(TORCHELASTIC_RUN_ID="x"), raises(BadInput("yes"))),
    "error": lambda: (pool(), 1 / 0),
    "memory": lambda: raises(torch.OutOfMemoryError("CUDA out of memory")),
}
codes = {}
for name, case in cases.items():
    if os.fork() == 0:
        processes.run_as_script(lambda args: case(), lambda: "args")
        os._exit(99)
    codes[name] = os.waitstatus_to_exitcode(os.wait()[1])
print(json.dumps(codes))
"""


def test_exit_codes(cache, tmp_path):
    """Only a run that came to its end returns 0. It ends, whatever threads are left.

    A process that a grader forked ends by its parent's SIGTERM."""
    script = tmp_path / "cases.py"
    script.write_text(CASES)
    printed = run(script=str(script), cache=cache)
    codes = json.loads(printed.splitlines()[-1])
    ended = {"grader": 0, "end": 0, "pool": 0, "thread": 0}
    failed = {"stopped": 130, "Ctrl-C": 130, "input": 2, "launched": 2, "error": 1, "memory": 1}
    assert codes == ended | failed, printed
    assert printed.count("out of GPU memory (see") == printed.count("Error: CUDA out of") == 1
    assert "train.py: error: no" in printed
    assert "train.py: error: yes\n(a traceback of the launcher may follow" in printed
    assert printed.count("of the launcher") == 1
    # Of Ctrl-C before the run began; a run says itself where it stopped.
    assert printed.count("train.py: stopped") == 1


def test_sys_exit_in_a_task_does_not_end_the_loop():
    background = processes.Background()
    background.loop.call_soon_threadsafe(sys.exit)
    assert background.submit(asyncio.sleep(0, "alive")).result(timeout=HANGS) == "alive"
    background.close()


@pytest.mark.parametrize("error, message", [
    (OSError(28, "No space left"), "[Errno 28] No space left"),
    (BadInput("--lr is odd"), "--lr is odd"),
    (TimeoutError(), "TimeoutError()"),
])  # fmt: skip
def test_an_error_of_the_main_rank_is_bad_input_on_all(error, message, process_group, monkeypatch):
    def fails():
        raise error

    with pytest.raises(BadInput) as caught:
        processes.on_main(fails)
    assert str(caught.value) == message
    # Another rank calls nothing, and gets what the main rank sends.
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(
        dist, "broadcast_object_list", lambda answer: answer.__setitem__(0, message))
    with pytest.raises(BadInput) as caught:
        processes.on_main(fails)
    assert str(caught.value) == message
