"""How a run ends: its exit code, an error on the main rank, and ranks that differ."""

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import HANGS, KEPT, REPO, TINY, NeverAsked

import train
from flatrl import processes, shared_state
from flatrl.bad_input import BadInput, BadReward
from flatrl.rows import hash_of_rows
from flatrl.user_code import in_thread, in_time

# Each case is a process that is forked from this one.
CASES = """
import asyncio, contextlib, json, multiprocessing, os, signal, sys, time
sys.path.insert(0, os.getcwd())
import torch
import torch.distributed as dist
from flatrl import processes, user_code
from flatrl.bad_input import BadInput, BadReward

def raises(error):
    raise error

async def leaves_behind():
    multiprocessing.Process(target=time.sleep, args=[1000]).start()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(user_code.in_thread(time.sleep, 1000), 0.1)

def signalled():
    store = dist.HashStore()
    other, this = processes.Stop(store), processes.Stop(store)
    assert not other.requested
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert this.requested and other.requested and not this.is_out_of_time
    first = this.signals[0]
    this.signals.append(first + 3)
    assert this.is_out_of_time and not other.is_out_of_time
    this.signals = [first - 14]
    assert not this.is_out_of_time
    this.signals = [first - 15]
    assert this.is_out_of_time
    raise processes.Stopped

cases = {
    "end": lambda: asyncio.run(leaves_behind()),
    "signalled": signalled,
    "input": lambda: raises(BadInput("no")),
    "error": lambda: 1 / 0,
    "exit": lambda: sys.exit(0),
    "_exit": lambda: os._exit(0),
    "memory": lambda: raises(torch.OutOfMemoryError("CUDA out of memory")),
}
codes = {}
for name, case in cases.items():
    if os.fork() == 0:
        processes.run_as_script(lambda args: case(), lambda: "args")
    codes[name] = os.waitstatus_to_exitcode(os.wait()[1])
print(json.dumps(codes))
"""


def test_exit_codes():
    """Only a run that came to its end returns 0. It ends, whatever threads are left."""
    command = [sys.executable, "-c", CASES]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=HANGS)
    codes = {"end": 0, "signalled": 130, "input": 2, "error": 1, "exit": 1, "_exit": 1, "memory": 2}
    assert json.loads(done.stdout) == codes, done.stderr
    assert "train.py: error: no\n" in done.stderr
    assert done.stderr.count("error: rank 0 is out of GPU memory: lower") == 1
    assert done.stderr.count("stopping: the run saves") == 1
    assert done.stderr.count("Traceback") == 3


def test_all_ranks_name_the_one_that_is_out_of_memory(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    texts = []
    lost = RuntimeError("Connection closed by peer")
    for rank, error in enumerate([lost, torch.OutOfMemoryError("CUDA out of memory"), lost]):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises((RuntimeError, BadInput)) as raised, processes.oom_for_all():
            raise error
        texts.append(str(raised.value))
    assert texts[0] == str(lost) and texts[1] == texts[2]
    assert texts[1].startswith("rank 1 is out of GPU memory: lower --tokens_per_micro_batch")
    assert "OutOfMemoryError: CUDA out of memory" in texts[1]


def test_an_error_of_the_main_rank_is_bad_input_on_all(process_group, monkeypatch):
    def fails():
        raise OSError(28, "No space left")

    sent = []
    monkeypatch.setattr(dist, "broadcast_object_list", lambda answer: sent.append(answer[0]))
    with pytest.raises(BadInput):
        processes.on_main(fails)
    assert sent == ["[Errno 28] No space left"]


def test_ranks_with_other_flags_or_rows_are_refused(monkeypatch):
    def told(lr, texts):
        rows = [{"prompt": text} for text in texts]
        return {"--seed": 0, "--lr": lr, "train rows": hash_of_rows(rows, seed=0)}

    ranks = [told(0.2, "abc")] * 2
    monkeypatch.setattr(processes, "all_gather", lambda values: [*ranks, values])
    processes.check_ranks_agree(told(0.2, "abc"))
    with pytest.raises(BadInput, match="ranks differ in --lr, train rows:"):
        processes.check_ranks_agree(told(0.1, "acb"))


def test_a_stop_drops_an_update_only_before_its_first_optimiser_step(
    train_here, tmp_path, monkeypatch
):
    """Each step has two. Time is over in the second one of the second step."""
    begun = []  # the weights before each
    optimise = train.optimise

    def noted(learner, *args):
        begun.append([p.clone() for p in learner.net.parameters()])
        return optimise(learner, *args)

    monkeypatch.setattr(train, "optimise", noted)
    monkeypatch.setattr(NeverAsked, "is_out_of_time", property(lambda self: len(begun) >= 4))
    with pytest.raises(processes.Stopped):
        train_here(*TINY, "--epochs", "2", "--save_every", "0", "--output_dir", tmp_path / "run")
    [saved] = (tmp_path / "run/checkpoints").glob("*/step.json")
    about = json.loads(saved.read_text())
    assert (about["step"], about["updates"], len(begun)) == (2, {"policy": 4}, 5)
    assert all(map(torch.equal, KEPT[-1].policy.net.parameters(), begun[-1]))


# ---------------------------------------------------------------- what user code can't do to a run


def in_threads(function, *arguments) -> list:
    """What the function returns, or raises, in a thread for each argument."""

    async def together():
        calls = [in_thread(function, each) for each in arguments]
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(together())


WORKERS = ThreadPoolExecutor(1)


@contextlib.contextmanager
def assigned(stream):
    before, sys.stdout = sys.stdout, stream
    yield
    sys.stdout = before


@pytest.mark.parametrize("replace", [
    contextlib.redirect_stdout,
    assigned,
    lambda stream: mock.patch("sys.stdout", stream),
], ids=["redirect", "assignment", "mock.patch"])  # fmt: skip
def test_what_code_prints_and_reads_is_its_own(replace):
    here = threading.Barrier(2)

    def says(word):
        with contextlib.redirect_stdout(io.StringIO()) as around:
            with replace(io.StringIO()):
                said = sys.stdout
                print(word)
                here.wait(HANGS)
                child = threading.Thread(target=print, args=["child of", word])
                child.start()
                child.join()
                WORKERS.submit(print, "worker for", word).result()
                here.wait(HANGS)
            print("after", word)
        with mock.patch("sys.stdin", io.StringIO(f"{word}\n{word}")):
            here.wait(HANGS)
            read = input() + sys.stdin.read()
        return said.getvalue(), around.getvalue(), read

    before = sys.stdout
    both = [f"{word}\nchild of {word}\nworker for {word}\n" for word in "ab"]
    assert in_threads(says, "a", "b") == [*zip(both, ["after a\n", "after b\n"], ["aa", "bb"])]
    assert sys.stdout is before


def test_a_thread_has_no_say_in_how_others_tokenise(tokenizer):
    def lengths(limit):
        said = [tokenizer("1+1=2 " * 9, truncation=limit < 99, max_length=limit) for _ in range(99)]
        return {len(each["input_ids"]) for each in said}

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert in_threads(lengths, 5, 99, 5, 99) == [{5}, {54}, {5}, {54}]
    finally:
        sys.setswitchinterval(interval)


def test_what_is_the_whole_processs_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_state, "REFUSED", set())
    [error] = in_threads(os.chdir, tmp_path)
    assert "os.chdir in a thread: use absolute paths" in str(error)
    with pytest.raises(BadReward, match="a reward or a tool uses os.chdir"):
        shared_state.check_refused()
    [error] = in_threads(os._exit, 0)
    assert "would end the run" in str(error)


def test_code_that_cancels_itself_ends_alone():
    async def cancels():
        asyncio.current_task().cancel()
        return 1

    async def run():
        with pytest.raises(RuntimeError, match="CancelledError"):
            await in_time("it", HANGS, cancels())
        await asyncio.sleep(0)  # where a cancellation that is still to come would strike

    asyncio.run(run())
