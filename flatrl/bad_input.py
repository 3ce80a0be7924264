"""Checks of the user's input, with one line that tells what to change."""

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path


class BadInput(ValueError):
    """An error in the user's flags, task file, rows or model. train.py prints only its message."""


class RunFailed(BadInput):
    """Training can't go on. All ranks raise it together, so that train.finish can save first."""


class NothingLeft(RunFailed, RuntimeError):
    """All rollouts of a step or evaluation have failed, usually by an error in the user's code."""


class BadReward(RunFailed):
    """The task returned an invalid reward. A mean without that rollout would be wrong."""


def need(ok, message: str):
    """Raises BadInput with the message unless `ok`."""
    if not ok:
        raise BadInput(message)


@contextlib.contextmanager
def refusing(problem: str, file: str = "") -> Iterator[None]:
    """Turns every exception in its block, even SystemExit, into BadInput with one line.

    The line has the problem, the error and, if it happened in `file` or in a module beside it, the
    line number there. file: an absolute path. BadInput and KeyboardInterrupt stay as they are."""
    try:
        yield
    except (BadInput, KeyboardInterrupt):
        raise
    except BaseException as error:
        if file and not isinstance(error, SyntaxError):  # whose text says where
            problem += last_line(error, file)
        raise BadInput(f"{problem}: {reason(error).removeprefix('ValueError: ')}") from error


def last_line(error: BaseException, file: str) -> str:
    """Returns ", line N", the last of an error's traceback in a file or in one beside it, or ""."""
    file = Path(file)
    for place in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(place.filename)
        if path.parent == file.parent:
            return f", line {place.lineno}" + (f" of {path.name}" if path != file else "")
    return ""


def reason(error: BaseException) -> str:
    """Returns an exception's type and message in one line; of BadInput the message alone."""
    kind = "" if isinstance(error, BadInput) else f"{type(error).__name__}: "
    return kind + " ".join(text_of(error).split())[:400]


def text_of(error: BaseException) -> str:
    """Returns what an exception says; its repr or its type if it says nothing, or can't."""
    with contextlib.suppress(Exception):
        return str(error) or repr(error)
    return type(error).__name__


def check_ids(ids: list[int], vocab_size: int):
    """Raises ValueError unless all token ids are in the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(id for id in ids if not 0 <= id < vocab_size)
        raise ValueError(f"the token id {wrong} is not in [0, {vocab_size - 1}]")
