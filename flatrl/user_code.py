"""Runs user code (tools, simulated users, rewards) with deadlines and in threads."""

import asyncio
import contextvars
import inspect
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from flatrl.processes import use_gpu_of_rank
from flatrl.shared_state import lock_tokenizers

# A thread is started only if none is idle. A function that never returns keeps its thread.
THREADS = ThreadPoolExecutor(1024, "user code", use_gpu_of_rank)

# The asyncio.Timeout of the running user code, which may `reschedule` it, to wait for its turn.
DEADLINE = contextvars.ContextVar("DEADLINE")


class CallTimeoutError(TimeoutError):
    """User code took longer than its deadline."""


async def in_time(name: str, seconds: float, coroutine: Awaitable):
    """Awaits user code, and cancels it after `seconds`, with CallTimeoutError; 0: no deadline.

    What would end more than this call (sys.exit, a cancellation of its own) is a RuntimeError."""

    async def run():
        DEADLINE.set(deadline)
        try:
            return await coroutine
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(repr(error)) from error

    try:
        async with asyncio.timeout(seconds or None) as deadline:
            return await asyncio.create_task(run())  # a task of its own, which it may cancel
    except TimeoutError:
        if deadline.expired():
            raise CallTimeoutError(f"{name} took longer than {seconds:g} seconds") from None
        raise
    except asyncio.CancelledError as error:
        if asyncio.current_task().cancelling():
            raise
        raise RuntimeError(repr(error)) from error


async def in_thread(function: Callable, /, *args, **kwargs):
    """Runs a plain function in a thread. What a future can't raise becomes RuntimeError."""
    lock_tokenizers()

    def run():
        try:
            return function(*args, **kwargs)
        except (StopIteration, SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(repr(error)) from error

    return await asyncio.get_running_loop().run_in_executor(THREADS, run)


async def call(function: Callable, /, *args, **kwargs):
    """Awaits an async function, or runs a plain one `in_thread`."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await in_thread(function, *args, **kwargs)
    if inspect.isawaitable(result):  # from a decorated async function
        return await result
    return result


def checked_number(value, name: str) -> float:
    """Returns a finite number from user code as a float. Raises ValueError, with `name`, else."""
    try:
        number = float(value)
    except Exception:  # OverflowError, torch's RuntimeError, ...
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {value!r:.80}")
    return number
