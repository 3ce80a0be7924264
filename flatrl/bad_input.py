"""Checks of the user's input, with one line that tells what to change."""

import contextlib
import inspect
import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_loop import AgentLoopOutput

OURS = {"agent_loop", "data", "flatrl", "losses", "rollout", "train"}  # modules
INSTALLED = {"site-packages", "dist-packages"}  # folders
# Types of the fields that an agent loop sets, apart from token ids and numbers.
OUTPUT_TYPES = {
    "messages": list | None,
    "text": str | None,
    "metrics": dict,
    "turn_rewards": list | tuple,
    "images": list | tuple,
    "extra": dict,
}
# flatrl uses these keys of an output's `extra`, and these names in the log: reward/mean, ...
TAKEN_KEYS = {"filtered", "greedy", "demonstration"}
TAKEN_UNITS = {"mean", "std", "min", "max", "greedy"}


class BadInput(ValueError):
    """An error in the user's flags, task file, rows or model. train.py prints only its message."""


class NothingLeft(BadInput, RuntimeError):
    """All rollouts of a step or evaluation have failed, usually by an error in the user's code."""


class BadReward(BadInput):
    """The task's reward returned what is no reward. A mean without that rollout would be wrong."""


def need(ok, message: str):
    """Raises BadInput with the message unless `ok`."""
    if not ok:
        raise BadInput(message)


def flag_of(args) -> str:
    """Returns the flag that gives args.model, and its value: --model, or --ref_model in the args of
    a reference, whose model is args.ref_model."""
    name = "--ref_model" if args.model == args.ref_model else "--model"
    return f"{name} {args.model}"


@contextlib.contextmanager
def refusing(problem: str, file: str = "") -> Iterator[None]:
    """Turns every exception in its block, even SystemExit, into BadInput with one line.

    The line has the problem, the error and, if it happened in `file`, the line number there.
    BadInput and KeyboardInterrupt stay as they are."""
    try:
        yield
    except (BadInput, KeyboardInterrupt):
        raise
    except BaseException as error:
        places = list(traceback.extract_tb(error.__traceback__))
        if isinstance(error, SyntaxError):  # its line was not run, so it has no frame
            places.append(error)
        lines = [place.lineno for place in places if place.filename == file]
        if lines:
            problem += f", line {lines[-1]}"
        raise BadInput(f"{problem}: {reason(error).removeprefix('ValueError: ')}") from error


def reason(error: BaseException) -> str:
    """Returns an exception's type and message in one line; of BadInput the message alone."""
    if isinstance(error, BadInput):
        return " ".join(str(error).split())
    return " ".join(traceback.format_exception_only(error)[-1].split())[:400]


def is_installed(file: str | Path) -> bool:
    """Returns whether a file is part of Python or of an installed package."""
    path = Path(file)
    return path.is_relative_to(Path(os.__file__).parent) or bool(INSTALLED & {*path.parts})


def place_of(function: Callable) -> str:
    """Returns the file and line at which a function begins, or its name if it has no code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code else repr(function)


def describe_error(error: BaseException, function: Callable | None = None) -> str:
    """Returns an exception as a line with file, line and error, then the user's frames.

    The line is the user's innermost one. If the exception was not raised in the user's code, it is
    that of `function`, the user's that is to blame; without one it is ours."""
    places = [*traceback.walk_tb(error.__traceback__)]
    while isinstance(error, BaseExceptionGroup):  # of an asyncio.TaskGroup
        error = error.exceptions[0]
        places += traceback.walk_tb(error.__traceback__)
    frames = []
    of_user = []
    for frame, line in places:
        file = frame.f_code.co_filename
        if not is_installed(file) and not file.startswith("<"):  # "<string>" is that of eval
            frames.append((frame, line))
            if frame.f_globals.get("__name__", "").partition(".")[0] not in OURS:
                of_user.append((frame, line))
    frame, line = (of_user or frames)[-1]
    place = f"{frame.f_code.co_filename}, line {line}"
    if function and not of_user:
        place = place_of(function)
    head = f"{place}: {reason(error)}\n"
    return "".join([head, *traceback.StackSummary.extract(of_user).format()])


def check_types(values: dict, types: dict, name: str, none_is_fine: bool = True):
    """Raises BadInput if a value does not have its type in `types`. A missing value is None.

    types: key -> a type, or several: str | list. name: what the message calls `values`."""
    for key, wanted in types.items():
        value = values.get(key)
        kind = str(getattr(wanted, "__name__", wanted)).replace(" ", "")
        is_right = isinstance(value, wanted) or (none_is_fine and value is None)
        need(is_right, f"{name}: {key!r} must be a {kind}, got {value!r:.80}")


def check_numbers(values, types: set[type], low: float, high: float, name: str):
    """Raises ValueError unless `values` is a list of numbers in [low, high] of these types.

    Types are exact: a bool is no int. name: what the message calls `values`."""
    if not isinstance(values, list):
        raise ValueError(f"{name} must be a list, got {values!r:.80}")
    kinds = " or ".join(sorted(kind.__name__ for kind in types))
    for value in values:
        if type(value) not in types or not low <= value <= high:
            raise ValueError(f"{name} has {value!r:.80}: must be {kinds} in [{low:g}, {high:g}]")


def check_ids(ids: list[int], vocab_size: int, name: str):
    """Raises ValueError unless `ids` is a list of token ids. name: what the message calls it."""
    check_numbers(ids, {int}, 0, vocab_size - 1, name)


def check_output(
    output: "AgentLoopOutput",
    vocab_size: int,
    oldest: int,
    version: int,
    window: int,
):
    """Raises ValueError or BadInput if an agent loop's output can't be trained or logged.

    vocab_size: token ids must be below it. oldest, version: versions of the weights when the
    loop started and now; those of sampled tokens must lie between. window: the most tokens of
    an output. flatrl.vision.check_images checks placeholders."""
    check_ids(output.prompt_ids, vocab_size, "prompt_ids")
    check_ids(output.response_ids, vocab_size, "response_ids")
    check_numbers(output.response_mask, {int, bool}, 0, 1, "response_mask")
    # The logarithm of a softmax may be rounded to a little more than 0.
    check_numbers(output.response_logprobs, {int, float}, -1e38, 0.01, "response_logprobs")
    check_numbers(output.response_versions, {int}, -1, version, "response_versions")
    sampled = list(compress(output.response_versions, output.response_mask))
    check_numbers(sampled, {int}, oldest, version, "response_versions, where the mask is 1,")
    check_numbers([output.num_turns], {int}, 0, 2**31, "num_turns")
    check_types(vars(output), OUTPUT_TYPES, "an output", none_is_fine=False)
    told = output.extra.get("told_prompt_ids", output.prompt_ids)
    check_ids(told, vocab_size, "told_prompt_ids")
    n_prompt = max(len(output.prompt_ids), len(told))
    n_response = len(output.response_ids)
    if n_prompt + n_response > window:
        raise ValueError(
            f"prompt and response have {n_prompt} and {n_response} tokens, more than the "
            f"window's {window}"
        )
    taken = TAKEN_UNITS & {output.unit} or TAKEN_KEYS & output.extra.keys()
    if taken:
        raise ValueError(f"flatrl has these names for something else: unit or extra {taken}")
    # Ranks send it to each other.
    pickle.dumps([output.messages, output.metrics, output.extra, output.turn_rewards])


def pickled_state(state: dict | None, flag: str) -> bytes:
    """Returns an estimator's `state` as checkpoints keep it: JSON would make integer keys texts.

    flag: that names the estimator. Raises BadInput if the state can't be pickled."""
    with refusing(
        f"{flag}: checkpoints can't save its `state`; keep numbers, texts and tensors there, and "
        "no functions"
    ):
        return pickle.dumps(state)
