"""A run's processes: its ranks, signals, and the background thread with its event loop."""

import asyncio
import atexit
import contextlib
import datetime
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future

import psutil
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from flatrl.bad_input import BadInput, need
from flatrl.user_code import USER_CODE

# How long a rank may wait for another one's rollouts.
PATIENCE = datetime.timedelta(hours=4)
# At the end of a run, threads and processes of user code may take this many seconds to end.
LEFT_BEHIND_S = 30
# A stop by the user, by a terminal that closes, or by a scheduler: SLURM, Kubernetes and PBS send
# SIGTERM, LSF SIGINT and SIGTERM, at a limit SIGUSR2, Grid Engine SIGUSR1, SIGUSR2 and SIGXCPU.
# Users of SLURM ask for SIGUSR1 (--signal).
SIGNALS = [
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
]
# A task that blocks the event loop for longer is named.
BLOCKED_S = 1.5


class Stopped(Exception):
    """The run was told to stop. All ranks raise it together; train.main saves, then re-raises."""


# ---------------------------------------------------------------- what ranks tell each other


def all_gather(x, group: dist.ProcessGroup | None = None) -> list:
    """Returns every rank's x (anything that pickles), in the order of ranks."""
    parts = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, x, group=group)
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
    problem = None
    value = None
    if dist.get_rank() == 0:
        try:
            value = function(*args)
        except (BadInput, OSError, SafetensorError) as error:
            problem = str(error) or repr(error)
    answer = [problem, value]
    dist.broadcast_object_list(answer)
    problem, value = answer
    need(problem is None, problem)
    return value


def ranks_of_host() -> int:
    """Returns the number of ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def is_first_on_host(text: str) -> bool:
    """Returns whether no other rank on this host has asked about the same text."""
    if not dist.is_initialized():
        return os.environ.get("LOCAL_RANK", "0") == "0"
    with contextlib.suppress(RuntimeError):  # the rank that has the store is gone
        store = dist.distributed_c10d._get_default_store()
        host = dist.get_rank() // ranks_of_host()
        return store.add(f"host {host}: {text}", 1) == 1
    return False


# ---------------------------------------------------------------- the end of a run


def launcher() -> str:
    """Returns what started this process: "torchrun" (also for several processes of accelerate),
    "accelerate", which leaves at Ctrl-C and prints a traceback, or ""."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    return "accelerate" if "ACCELERATE_MIXED_PRECISION" in os.environ else ""


class Stop:
    """Watches for Ctrl-C, the signals of schedulers, and the launcher's death on every rank.

    After the first signal all ranks finish an update that has begun, or drop a rollout that is
    under way. Then they save and end. A second Ctrl-C ends a process at once. Schedulers send
    several signals on their own, and SIGKILL last."""

    def __init__(self):
        self.requested = False  # on any rank
        self.is_told = False  # the user knows that the run will stop
        self.finished = threading.Event()  # this rank's run is over
        self.is_leaving = False  # this process ends, whatever the other ranks do
        for number in SIGNALS:
            ignored = signal.getsignal(number) == signal.SIG_IGN
            if number != signal.SIGHUP or not ignored:  # nohup has it ignored
                signal.signal(number, self._signalled)
        # User code can end a process that it has forked by any of them.
        os.register_at_fork(after_in_child=self._leave_signals)
        group = dist.new_group(backend="gloo", timeout=PATIENCE / 8)
        self.thread = threading.Thread(target=self._watch, args=[group], daemon=True)
        self.thread.start()
        atexit.register(self._leave)

    def wait_for_other_ranks(self):
        """Reports that this rank's run is over, and returns when all ranks have reported."""
        self.finished.set()
        self.thread.join()

    def _leave(self):
        """Ends the thread of a run that failed. Python would abort if it were in torch's code."""
        self.is_leaving = True
        self.finished.set()
        self.thread.join(timeout=10)

    def _signalled(self, number, _):
        self.requested = True  # perhaps it was, by another rank: so `is_told` is of its own
        if not self.is_told and dist.get_rank() == 0:
            self.is_told = True
            with contextlib.suppress(OSError):  # after SIGHUP there is no terminal
                how = "a second Ctrl-C: at once"
                started_by = launcher() if number == signal.SIGINT else ""
                if started_by == "accelerate":
                    how = 'wait for "stopped": the launcher leaves before, with a traceback'
                elif started_by:
                    how += "; the launcher ends with a traceback"
                print(f"\nstopping; whole steps are kept ({how})", file=sys.stderr)
        if number == signal.SIGINT:
            # Launchers pass on the Ctrl-C that the terminal has sent to this process, too.
            signal.signal(number, lambda *_: None)
            time.sleep(1)
            signal.signal(number, signal.SIG_DFL)

    def _leave_signals(self):
        """Gives the signals back their usual effect, in a process that user code has forked."""
        for number in SIGNALS:
            if signal.getsignal(number) == self._signalled:
                signal.signal(number, signal.SIG_DFL)

    def _watch(self, group):
        """Once a second, tells all ranks whether this one was asked to stop and whether it has
        finished, until all have finished.

        Ends this process if another rank is gone, because it would wait for that rank in vain.
        Stops the run if the launcher is gone: accelerate's leaves its processes behind. group: of
        these threads alone."""
        parent = os.getppid()
        is_running = True  # on any rank
        while is_running and not self.is_leaving:
            if launcher() and os.getppid() != parent:
                self.requested = True
            state = torch.tensor([self.requested, not self.finished.is_set()], dtype=torch.int)
            try:
                dist.all_reduce(state, dist.ReduceOp.MAX, group)
            except RuntimeError as error:
                if not threading.main_thread().is_alive():
                    return  # this process ends anyway
                message = f"another rank is gone, rank {dist.get_rank()} ends: {error}"
                print(message.splitlines()[0], file=sys.stderr)
                os._exit(1)
            is_requested, is_running = state.tolist()
            if is_requested:  # not an assignment, because a signal may have come meanwhile
                self.requested = True
            self.finished.wait(1)


def run_as_script(main: Callable, parse: Callable):
    """Calls main(parse()), then ends this process with an exit code.

    0: main came to its end; 2: BadInput; 130: Stopped or Ctrl-C; 1: anything else, also
    sys.exit(0) in user code. Python waits for threads and processes that user code has left
    behind: here for LEFT_BEHIND_S seconds."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # prepare_process took it
        args = parse()  # --help ends here
        try:
            main(args)
        except SystemExit as error:
            raise RuntimeError(f"sys.exit({error.code}) in the middle of the run") from error
        status = 0
    except Stopped:
        status = 130
    except KeyboardInterrupt:  # before a run's Stop is there, which says what was saved
        print("train.py: stopped", file=sys.stderr)
        status = 130
    except BadInput as error:
        if is_first_on_host(str(error)):
            print(f"train.py: error: {error}", file=sys.stderr)
            if launcher():
                hint = "a traceback of the launcher may follow; accelerate launch -q has none"
                print(f"({hint})", file=sys.stderr)
        # Keeps the run's tasks, as for any other error: at their end they would print theirs.
        sys.last_value = error
        status = 2
    except torch.OutOfMemoryError:
        print(
            "train.py: out of GPU memory: lower --tokens_per_micro_batch or "
            "--gpu_memory_utilization, or give --gradient_checkpointing (docs/scaling.md#memory)",
            file=sys.stderr,
        )
        raise
    finally:
        gc.unfreeze()  # vLLM froze it: triton's binding would print what is not freed
        timer = threading.Timer(LEFT_BEHIND_S, os._exit, [status])
        timer.daemon = True
        timer.start()
    sys.exit(status)


# ---------------------------------------------------------------- the background thread


class Background:
    """A daemon thread that runs one event loop from the start of the run to its end.

    A second thread names a task that blocks the loop."""

    has_named_holder = False  # in this process: see `watch`

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.closed = False
        self.thread = threading.Thread(target=self.run, name=USER_CODE, daemon=True)
        self.thread.start()
        threading.Thread(target=self.watch, daemon=True).start()
        atexit.register(self.close)  # a run that failed says nothing more

    def submit(self, coroutine: Coroutine) -> Future:
        """Starts a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self):
        """Ends both threads. Tasks on the loop are left as they are."""
        self.closed = True
        self.loop.call_soon_threadsafe(self.loop.stop)

    def run(self):
        """Runs the loop. sys.exit in a task of user code ends run_forever, but not the loop."""
        while not self.closed:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()

    def watch(self):
        """Prints the stack of a task that blocks the loop, once each time.

        If this thread itself wakes late, some thread has held the interpreter: the first such
        thread of the process is named, too."""
        while not self.closed:
            turn = threading.Event()
            self.loop.call_soon_threadsafe(turn.set)
            if not turn.wait(BLOCKED_S):
                task = asyncio.current_task(self.loop)
                if task and not self.closed:
                    print(
                        f"\n{task} blocks all others: it must await, or be a plain function. "
                        "It is here:",
                        file=sys.stderr,
                    )
                    traceback.print_stack(sys._current_frames()[self.thread.ident])
                turn.wait()
            before = cpu_of_user_threads()
            started = time.monotonic()
            time.sleep(0.2)
            late = time.monotonic() - started - 0.2
            if late > BLOCKED_S and not Background.has_named_holder:
                Background.has_named_holder = name_holder(before, late)


def cpu_of_thread(thread: threading.Thread) -> float:
    """Returns the CPU seconds of a thread that runs. For one that has ended, this may crash."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def cpu_of_user_threads() -> dict[int, float]:
    """Returns the CPU seconds of each thread that runs user code, by its ident."""
    threads = [thread for thread in threading.enumerate() if thread.name == USER_CODE]
    return {thread.ident: cpu_of_thread(thread) for thread in threads if thread.ident}


def name_holder(before: dict[int, float], late: float) -> bool:
    """Prints the stack of the thread that computed while no other ran, and returns whether it did.

    before: what `cpu_of_user_threads` returned `late` seconds ago."""
    used = {ident: now - before.get(ident, 0.0) for ident, now in cpu_of_user_threads().items()}
    ident = max(used, key=used.get, default=None)
    if ident is None or used[ident] < late / 5:  # the trainer held it, or the process was stopped
        return False
    print(
        f"\na tool or a reward held Python's interpreter for {late:.1f} seconds: nothing else ran, "
        "deadlines included. It is now here:",
        file=sys.stderr,
    )
    traceback.print_stack(sys._current_frames()[ident])
    return True


# ---------------------------------------------------------------- memory


def memory() -> dict[str, float]:
    """Returns GB in use: "host" by this process; on CUDA "device" by all who use the GPU."""
    figures = {"host": psutil.Process().memory_info().rss / 1e9}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        figures["device"] = (total - free) / 1e9
    return figures
