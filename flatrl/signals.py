"""Names rewards that use signals, which work in the main thread only.

Graders limit their time with `signal.alarm`. In a thread that raises, and many take the error for a
wrong answer: then every reward is 0. Importing this module replaces three functions of `signal`,
and ThreadPoolExecutor.submit."""

import contextlib
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial, wraps

# The places at which the reward that is being computed has called them.
_CALLS = ContextVar("calls", default=None)


def _watched(function):
    """Returns a function of `signal` that notes where it is called outside the main thread."""

    @wraps(function)
    def watched(*args, **kwargs):
        if threading.current_thread() is threading.main_thread():
            return function(*args, **kwargs)
        name = f"signal.{function.__name__}"
        calls = _CALLS.get()
        if calls is None:  # of a tool, or of a threading.Thread that the user's code started
            warnings.warn(f"{name} fails here, because this is not the main thread", stacklevel=2)
        else:
            caller = sys._getframe(1)
            calls.append(f"{name} in {caller.f_code.co_filename}, line {caller.f_lineno}")
        # Python would let any thread set an alarm, which ends the process.
        raise ValueError("signal only works in main thread of the main interpreter")

    return watched


for _name in ("signal", "alarm", "setitimer"):
    setattr(signal, _name, _watched(getattr(signal, _name)))


_submit = ThreadPoolExecutor.submit


@wraps(_submit)
def _submit_in_context(pool, function, /, *args, **kwargs):
    if _CALLS.get() is not None:  # a reward's own pool: its thread must know the reward
        function = partial(copy_context().run, function)
    return _submit(pool, function, *args, **kwargs)


ThreadPoolExecutor.submit = _submit_in_context


@contextlib.contextmanager
def refusing_signals() -> Iterator[None]:
    """Raises RuntimeError at the end of its block if that used signals outside the main thread.

    A threading.Thread that the block starts is not seen, as a pool's is; there is a warning."""
    calls = []
    token = _CALLS.set(calls)
    error = None
    try:
        yield
    except Exception as raised:
        if not calls:
            raise
        error = raised
    finally:
        _CALLS.reset(token)
    if calls:
        raise RuntimeError(
            f"the reward calls {calls[0]}: signals work in the main thread only, and rewards run "
            "in threads. Turn that time limit off (math_verify: parsing_timeout=None and "
            "timeout_seconds=None), or grade in a process of its own"
        ) from error
