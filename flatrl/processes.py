"""A run's processes: its ranks, its end, and the background thread with its event loop."""

import asyncio
import atexit
import contextlib
import datetime
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future

import psutil
import torch
import torch.distributed as dist

from flatrl.bad_input import BadInput, need
from flatrl.shared_state import EXIT, RUNS

# How long a rank may wait for another one's rollouts.
PATIENCE = datetime.timedelta(hours=4)
STOPPING = (
    b"\nstopping: the run saves, then ends. A launcher kills it after "
    b"TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds, by default 30\n"
)
STOP = "stop"  # the key under which the ranks' store counts those that were asked to stop
OUT_OF_MEMORY = (
    "train.py: out of GPU memory: lower --tokens_per_micro_batch or --gpu_memory_utilization, or "
    "give --gradient_checkpointing (docs/scaling.md#memory)"
)


class Stopped(Exception):
    """The run was asked to stop. All ranks raise it together, and train.finish saves first."""


# ---------------------------------------------------------------- what ranks tell each other


def all_gather(x) -> list:
    """Returns every rank's x (anything that pickles), in the order of ranks."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x)
    return parts


def gather_unless_stopped(x, stopped: bool) -> list:
    """Returns what `all_gather` does. Raises Stopped on all ranks if one is `stopped`."""
    parts = all_gather(None if stopped else (x,))
    if None in parts:
        raise Stopped
    return [part for (part,) in parts]


def raise_if_stopped(stop: "Stop"):
    """Raises Stopped on all ranks if one of them is to stop."""
    gather_unless_stopped(None, stop.requested)


def all_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums a CPU tensor over ranks, in place, and returns it."""
    dist.all_reduce(x)
    return x


def on_main(function: Callable, *args):
    """Calls a function on the main rank, and returns its result on all ranks.

    If it raises BadInput, or can't read or write a file, all ranks raise BadInput."""
    if not dist.is_initialized():
        return function(*args)
    answer = [None, None]  # a problem, or what the function returns
    if dist.get_rank() == 0:
        try:
            answer[1] = function(*args)
        except (BadInput, OSError) as error:
            answer[0] = str(error) or repr(error)
    dist.broadcast_object_list(answer)
    problem, value = answer
    need(problem is None, problem)
    return value


def check_ranks_agree(values: dict):
    """Raises BadInput, on all ranks, if the values, by name, are not the same on all."""
    ranks = all_gather(values)
    different = [name for name in values if any(each[name] != values[name] for each in ranks)]
    need(
        not different,
        f"ranks differ in {', '.join(different)}: all need the same flags, and the same rows in "
        "the same order, so load() may not depend on a set's order, or on a shuffle without a seed",
    )


def ranks_of_host() -> int:
    """Returns the number of ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


# ---------------------------------------------------------------- the end of a run


class Stop:
    """Whether Ctrl-C or SIGTERM has asked the run, on any rank, to stop.

    All ranks then finish an update that has begun, or drop a rollout that is under way. They
    save, and end. store: shared by the ranks."""

    def __init__(self, store: dist.Store):
        self.store = store
        self.asked_here = False  # by a signal to this rank
        self._listen(self._on_signal)
        # User code must be able to end a process that it has forked.
        os.register_at_fork(after_in_child=lambda: self._listen(signal.SIG_DFL))

    def _listen(self, handler):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, handler)

    def _on_signal(self, *_):
        if not self.asked_here:
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, STOPPING)
        self.asked_here = True

    @property
    def requested(self) -> bool:
        """Whether a rank was asked to stop, or has failed."""
        return self.store.add(STOP, int(self.asked_here)) > 0


def run_as_script(main: Callable, parse: Callable):
    """Calls main(parse()), then ends this process with an exit code.

    0: main came to its end; 2: BadInput; 130: Stopped; 1: any other error. It does not wait for
    threads and processes that user code has left behind, as Python would."""
    RUNS.add(os.getpid())
    status = 1
    args = None
    try:
        args = parse()
        main(args)
        status = 0
    except Stopped:
        status = 130
    except BadInput as error:
        status = 2
        if count(str(error)) == 1:  # all ranks usually have the same error
            print(f"train.py: error: {error}", file=sys.stderr)
    except (Exception, SystemExit) as error:  # user code may call sys.exit(0)
        if args is None:  # --help
            raise
        traceback.print_exc()
        if isinstance(error, torch.OutOfMemoryError):
            print(OUT_OF_MEMORY, file=sys.stderr)
    finally:
        if status:
            count(STOP)  # ends a rollout of ranks that wait for this one
    for process in multiprocessing.active_children():
        process.terminate()
    atexit._run_exitfuncs()  # of libraries
    sys.stdout.flush()
    sys.stderr.flush()
    EXIT(status)


def count(key: str) -> int:
    """Returns how many ranks have called this with the key, this one included.

    Before the ranks share a store, or when it is gone, rank 0 counts as the first."""
    with contextlib.suppress(ValueError, RuntimeError):
        return dist.distributed_c10d._get_default_store().add(key, 1)
    return 1 + int(os.environ.get("RANK", 0))


# ---------------------------------------------------------------- the background thread


class Background:
    """A daemon thread that runs one event loop from the start of the run to its end."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.closed = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def submit(self, coroutine: Coroutine) -> Future:
        """Starts a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self):
        """Ends the thread. Tasks on the loop are left as they are."""
        self.closed = True
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _run(self):
        use_gpu_of_rank()
        while not self.closed:  # sys.exit in a task ends run_forever
            with contextlib.suppress(SystemExit):
                self.loop.run_forever()


def use_gpu_of_rank():
    """Makes the rank's GPU the current one of this thread, where `.to("cuda")` puts a tensor."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))


def memory() -> dict[str, float]:
    """Returns GB in use: "host" by this process; on CUDA "device" by all who use the GPU."""
    figures = {"host": psutil.Process().memory_info().rss / 1e9}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        figures["device"] = (total - free) / 1e9
    return figures
