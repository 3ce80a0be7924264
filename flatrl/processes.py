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
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future

import psutil
import torch
import torch.distributed as dist

from flatrl.bad_input import BadInput, last_line, need, reason
from flatrl.shared_state import EXIT, RUNS

# How long a rank may wait for another one's rollouts.
PATIENCE = datetime.timedelta(hours=4)
STOPPING = (
    b"\nstopping: the run saves, then ends. An update is dropped at the next Ctrl-C, or after half "
    b"of the seconds in which a launcher kills a run (TORCH_ELASTIC_SHUTDOWN_TIMEOUT: 30)\n"
)
STOP = "stop"  # the key under which the ranks' store counts those that were asked to stop
# How many seconds an update has after a signal: half of those that a launcher allows.
UPDATE_S = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30)) / 2


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
        f"ranks differ in {', '.join(different)}: all need the same flags and rows, so load() may "
        "not depend on a set's order, or on a shuffle without a seed",
    )


def ranks_of_host() -> int:
    """Returns the number of ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


# ---------------------------------------------------------------- the end of a run


class Stop:
    """Whether Ctrl-C or SIGTERM has asked the run, on any rank, to stop.

    All ranks then finish an update that has begun, unless it takes too long (`is_out_of_time`), or
    drop a rollout that is under way. They save, and end. store: shared by the ranks."""

    def __init__(self, store: dist.Store):
        self.store = store
        self.signals = []  # when this rank got them
        self._listen(self._on_signal)
        # User code must be able to end a process that it has forked.
        os.register_at_fork(after_in_child=lambda: self._listen(signal.SIG_DFL))

    def _listen(self, handler):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, handler)

    def _on_signal(self, *_):
        if not self.signals:
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, STOPPING)
        self.signals.append(time.monotonic())

    @property
    def requested(self) -> bool:
        """Whether a rank was asked to stop, or has failed."""
        return self.store.add(STOP, int(bool(self.signals))) > 0

    @property
    def is_out_of_time(self) -> bool:
        """Whether this rank got a second signal, or the first one UPDATE_S ago."""
        if not self.signals:
            return False
        first, last = self.signals[0], self.signals[-1]
        # A launcher passes on a Ctrl-C that the terminal has sent to all: that is one signal.
        return last > first + 2 or time.monotonic() > first + UPDATE_S


def run_as_script(main: Callable, parse: Callable):
    """Calls main(parse()), then ends this process with an exit code.

    0: main came to its end; 2: BadInput; 130: Stopped; 1: any other error. It does not wait for
    threads and processes that user code has left behind, as Python would."""
    RUNS.add(os.getpid())
    status = 1
    args = None
    try:
        args = parse()
        with oom_for_all():
            main(args)
        status = 0
    except Stopped:
        status = 130
    except BadInput as error:
        status = 2
        if count(str(error)) == 1:  # all ranks usually have the same error
            print(f"train.py: error: {error}", file=sys.stderr)
    except (Exception, SystemExit):  # user code may call sys.exit(0)
        if args is None:  # --help
            raise
        traceback.print_exc()
    finally:
        if status:
            count(STOP)  # ends a rollout of ranks that wait for this one
    for process in multiprocessing.active_children():
        process.terminate()
    atexit._run_exitfuncs()  # of libraries
    sys.stdout.flush()
    sys.stderr.flush()
    EXIT(status)


@contextlib.contextmanager
def oom_for_all() -> Iterator[None]:
    """Raises BadInput, on all ranks, that names the one whose block ran out of GPU memory."""
    try:
        yield
    except RuntimeError as error:
        text = ""
        if isinstance(error, torch.OutOfMemoryError):
            text = (
                f"rank {os.environ.get('RANK', 0)} is out of GPU memory: lower "
                "--tokens_per_micro_batch or --gpu_memory_utilization, or give "
                "--gradient_checkpointing (docs/scaling.md#memory); "
                # the last line in a module beside flatrl/, such as train.py
                f"{reason(error)}{last_line(error, os.path.dirname(__file__))}"
            )
        with contextlib.suppress(ValueError, RuntimeError):
            store = dist.distributed_c10d._get_default_store()
            # Sets the text, unless a rank has set its own, and returns what is set.
            text = store.compare_set("out of memory", "", text).decode()
        need(not text, text)
        raise


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
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, coroutine: Coroutine) -> Future:
        """Starts a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self):
        """Ends the thread. Tasks on the loop are left as they are."""
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _run(self):
        use_gpu_of_rank()
        while True:
            with contextlib.suppress(SystemExit):  # of a task that calls sys.exit
                return self.loop.run_forever()


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
