"""The state of the process, which user code in threads must not share: its streams and others.

Importing this module replaces functions of Python. In other threads than the main one and in
coroutines, where tools and rewards run,
- code that replaces sys.stdin, stdout or stderr, as contextlib.redirect_stdout does, replaces it
  for itself and the threads that work for it;
- alarms and os.chdir are refused. math_verify and others limit their time by SIGALRM. In a thread
  that is an error, which they take for a wrong answer, and then every reward is 0.

os._exit is an error in other threads, and in all of a run, whose exit code is not the user's."""

import asyncio
import contextvars
import functools
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

from flatrl.bad_input import BadReward

REMEDIES = {
    "signal.alarm": "turn that time limit off (math_verify: parsing_timeout=None and "
    "timeout_seconds=None), or grade in a process of its own",
    "os.chdir": "use absolute paths, or cwd= of subprocess.run",
}
REFUSED = set()  # the keys of REMEDIES that were refused in this process
SIGNAL = signal.signal
CHDIR = os.chdir
EXIT = os._exit
START = threading.Thread.start
SUBMIT = ThreadPoolExecutor.submit
RUNS = set()  # this process, once train.py runs in it


def in_main_thread() -> bool:
    """Returns whether the main thread calls this."""
    return threading.current_thread() is threading.main_thread()


def in_rollout() -> bool:
    """Returns whether a thread or a coroutine calls this, as those of a rollout are."""
    return not in_main_thread() or asyncio._get_running_loop() is not None


# ---------------------------------------------------------------- what is refused


def check_refused():
    """Raises BadReward if something was refused, because graders may hide the error."""
    for name in REFUSED:
        raise BadReward(f"a reward or a tool uses {name} outside the main thread: {REMEDIES[name]}")


def _signal(number, handler):
    """Replaces signal.signal: notes that another thread wants an alarm, which is an error there."""
    if number == signal.SIGALRM and not in_main_thread():
        REFUSED.add("signal.alarm")
    return SIGNAL(number, handler)


def _chdir(path):
    """Replaces os.chdir: refused in a rollout, because it would move all threads."""
    if in_rollout():
        REFUSED.add("os.chdir")
        raise RuntimeError(f"os.chdir in a thread: {REMEDIES['os.chdir']}")
    CHDIR(path)


def _exit(status):
    """Replaces os._exit. Processes that user code has forked, even in a thread, may end by it."""
    if os.getpid() in RUNS or not in_main_thread():
        raise RuntimeError(f"os._exit({status}) would end the run")
    EXIT(status)


# ---------------------------------------------------------------- what each has for itself


class _Stream:
    """sys.stdin, stdout or stderr, as a property of `sys`.

    print() and input() read the module's dict instead, so that holds this object as well."""

    def __init__(self, name):
        self.of_process = getattr(sys, name)
        self.own = contextvars.ContextVar(name)

    def __get__(self, module, kind=None):
        return self.own.get(self.of_process)

    def __set__(self, module, stream):
        if in_rollout():
            self.own.set(stream)
        else:
            self.of_process = stream

    def __getattr__(self, name):
        return getattr(self.__get__(sys), name)


STREAMS = {name: _Stream(name) for name in ("stdin", "stdout", "stderr")}


class _Sys(ModuleType):
    """The class of `sys`. Python makes all new modules by type(sys), and gets ordinary ones."""

    stdin, stdout, stderr = STREAMS.values()

    def __new__(cls, *args):
        return ModuleType(*args)

    @property
    def __dict__(self):
        """A copy with real streams: mock.patch sets again what it finds here."""
        return super().__dict__ | {name: getattr(self, name) for name in STREAMS}


def _start(thread):
    """Replaces Thread.start: a thread of user code inherits its context, and so its streams."""
    if not in_main_thread():
        thread.run = functools.partial(contextvars.copy_context().run, thread.run)
    START(thread)


def _submit(pool, function, /, *args, **kwargs):
    """Replaces ThreadPoolExecutor.submit: one thread works for many, each in its own context."""
    return SUBMIT(pool, contextvars.copy_context().run, function, *args, **kwargs)


@functools.cache
def lock_tokenizers():
    """Lets one thread encode at a time: a fast tokenizer's truncation and padding are state."""
    from transformers import PreTrainedTokenizerFast  # --help need not wait for it

    encode = PreTrainedTokenizerFast._encode_plus

    @functools.wraps(encode)
    def encode_alone(*args, **kwargs):
        with ENCODING:
            return encode(*args, **kwargs)

    PreTrainedTokenizerFast._encode_plus = encode_alone


ENCODING = threading.RLock()
signal.signal = _signal
os.chdir = _chdir
os._exit = _exit
threading.Thread.start = _start
ThreadPoolExecutor.submit = _submit
vars(sys).update(STREAMS)
sys.__class__ = _Sys
