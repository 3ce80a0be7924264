"""Checks of what the user gives, and the one line that says what to change."""

import contextlib
import os
import pickle
import sys
import traceback
from itertools import compress

from agent_loop import AgentLoopOutput, BadInput

# Types of what an agent loop returns, beside token ids and the like.
OUTPUT_TYPES = {
    "messages": list | None, "text": str | None, "metrics": dict,
    "turn_rewards": list | tuple, "images": list | tuple, "extra": dict}
# Keys of an output's `extra`, and names of units, that flatrl itself uses (reward/mean is the
# mean over all units).
TAKEN_KEYS = ["filtered", "greedy", "demonstration", "told_prompt_ids"]
TAKEN_UNITS = ["mean", "std", "min", "max", "greedy"]


def need(ok, message: str):
    """Raises BadInput with the message unless `ok`."""
    if not ok:
        raise BadInput(message)


@contextlib.contextmanager
def refusing(problem: str, file: str = ""):
    """Turns whatever is raised within, SystemExit too, into BadInput, a line of three things.

    These are the problem, the line of the file where it happened, if it is one of this file,
    and the error (a ValueError, which is about the input, without its class)."""
    process = os.getpid()
    try:
        yield
    except (BadInput, KeyboardInterrupt):  # a task's own BadInput says what it needs
        raise
    except BaseException as error:
        reason = " ".join(traceback.format_exception_only(error)[-1].split())[:400]
        places = list(traceback.extract_tb(error.__traceback__))
        if isinstance(error, SyntaxError):  # it has a file and a line, where nothing was run
            places.append(error)
        lines = [place.lineno for place in places if place.filename == file]
        if lines:
            problem += f", line {lines[-1]}"
        raise BadInput(f"{problem}: {reason.removeprefix('ValueError: ')}") from error
    finally:
        if os.getpid() != process:  # user code has forked: its copy is no second run
            os._exit(1)


def traceback_from(file: str) -> str:
    """Returns the traceback of the present exception from its first line in this file on; the
    whole one if it has none. What called the user's function is rarely the cause."""
    error = sys.exception()
    place = error.__traceback__
    while place and place.tb_frame.f_code.co_filename != file:
        place = place.tb_next
    return "".join(traceback.format_exception(type(error), error, place or error.__traceback__))


def check_types(values: dict, types: dict, name: str, none_is_fine: bool = True):
    """Raises BadInput, which calls `values` by `name`, if one of them has not the type in
    `types`.

    types: key -> a type, or several: str | list. A missing value is None."""
    for key, wanted in types.items():
        value = values.get(key)
        kind = getattr(wanted, "__name__", None) or str(wanted).replace(" ", "")
        need(isinstance(value, wanted) or none_is_fine and value is None,
             f"{name}: {key!r} must be a {kind}, got {value!r:.80}")


def check_numbers(values, types: set[type], low: float, high: float, name: str):
    """Raises ValueError, which calls it `name`, unless `values` is a list of numbers in
    [low, high] that have exactly these types: a bool is no int, and NaN is in no range."""
    if not isinstance(values, list):
        raise ValueError(f"{name} must be a list, got {values!r:.80}")
    for value in values:
        if type(value) not in types or not low <= value <= high:
            kinds = " or ".join(sorted(kind.__name__ for kind in types))
            raise ValueError(f"{name} has {value!r:.80}: must be {kinds} in [{low:g}, {high:g}]")


def check_ids(ids: list[int], vocab_size: int, name: str):
    """Raises ValueError, which calls them `name`, unless they are a list of token ids."""
    check_numbers(ids, {int}, 0, vocab_size - 1, name)


def check_output(output: AgentLoopOutput, vocab_size: int, oldest: int, version: int,
                 window: float):
    """Raises ValueError if training or the log would fail by what an agent loop returned.

    vocab_size: token ids are less. oldest, version: of the weights when the loop started, and
    of the present ones; sampled tokens are of these, or of others between. window: the most
    tokens of an output. Placeholders of images: see `check_images`."""
    check_ids(output.prompt_ids, vocab_size, "prompt_ids")
    check_ids(output.response_ids, vocab_size, "response_ids")
    check_numbers(output.response_mask, {int, bool}, 0, 1, "response_mask")
    # A logarithm of a softmax may be rounded to a little more than 0.
    check_numbers(output.response_logprobs, {int, float}, -1e38, 0.01, "response_logprobs")
    check_numbers(output.response_versions, {int}, -1, version, "response_versions")
    sampled = compress(output.response_versions, output.response_mask)
    check_numbers([*sampled], {int}, oldest, version, "response_versions, where the mask is 1,")
    check_numbers([output.num_turns], {int}, 0, 2**31, "num_turns")
    check_types(vars(output), OUTPUT_TYPES, "an output", none_is_fine=False)
    if len(output.prompt_ids + output.response_ids) > window:
        raise ValueError(f"prompt and response have {len(output.prompt_ids)} and "
                         f"{len(output.response_ids)} tokens, more than the window's {window}")
    taken = {output.unit}.intersection(TAKEN_UNITS) or output.extra.keys() & TAKEN_KEYS
    if taken:
        raise ValueError(f"flatrl has these names for something else: unit or extra {taken}")
    # Ranks send it to each other.
    pickle.dumps([output.messages, output.metrics, output.extra, output.turn_rewards])
