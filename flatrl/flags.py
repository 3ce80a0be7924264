"""Turns a dataclass into command-line flags. This module knows no flag by name."""

import argparse
import difflib
import math
from dataclasses import Field, field, fields
from types import UnionType
from typing import Literal, get_args, get_origin

from flatrl.bad_input import BadInput, need


def flag(default, help: str, choices=(), low: float = 0, high: float = math.inf, group: str = ""):
    """Returns the dataclass field of a flag.

    choices: the allowed values; () allows any, and so does a list, to which a task file may add.
    low, high: the bounds of a number. group: in --help the heading from this flag on."""
    if choices:
        help += f" ({' | '.join(choices)})"
    rules = {"choices": choices, "low": low, "high": high}
    return field(default=default, metadata={"help": help, "group": group, "rules": rules})


def parse_flags(
    cls: type, argv: list[str] | None, hidden: list[str], defaults: dict, other_names: dict, **texts
):
    """Returns an instance of the dataclass `cls`, filled from a command line.

    hidden: fields without a flag. defaults: those to show in --help where they depend on another
    flag. other_names: {name of a flag elsewhere: its name here}, for a hint. texts: for argparse's
    parser. Raises BadInput for a flag that is unknown, abbreviated or mistyped."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, **texts)
    group = parser
    names = []
    # The class's own fields come first, then those that it inherits.
    for entry in sorted(fields(cls), key=lambda entry: entry.name not in cls.__annotations__):
        if entry.name in hidden:
            continue
        if entry.metadata["group"]:
            group = parser.add_argument_group(entry.metadata["group"])
        help = entry.metadata["help"]
        shown = defaults.get(entry.name, entry.default)
        if shown is not None and shown is not False and shown != "{}":
            help += f" (default: {shown})"
        kind = _type_of(entry)
        group.add_argument(f"--{entry.name}", default=entry.default, help=help, **kind)
        names.append(entry.name)

    try:
        values, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:  # argparse itself would print all flags
        raise BadInput(str(error).removeprefix("argument ")) from None
    if unknown:
        name, _, _ = unknown[0].strip("-").partition("=")
        similar = difflib.get_close_matches(name, names, n=1)
        meant = other_names.get(name) or (similar or ["help"])[0]
        raise BadInput(f"unknown flag {unknown[0]}: did you mean --{meant}?")
    return cls(**vars(values))


def _type_of(entry: Field) -> dict:
    """Returns what argparse's add_argument is told of a field's type."""
    kind = get_args(entry.type)[0] if isinstance(entry.type, UnionType) else entry.type
    if kind is bool:
        kind = Literal[True, False]
    if get_origin(kind) is Literal:
        by_word = {str(choice).lower(): choice for choice in get_args(kind)}
        return {
            "type": lambda word: by_word.get(word.lower(), word),
            "choices": get_args(kind),
            "metavar": "|".join(by_word),
            "nargs": "?",
            "const": True,  # `--flag` alone
        }
    if get_origin(kind) is list:
        return {"type": get_args(kind)[0], "metavar": "TEXT", "nargs": "+"}
    return {"type": kind, "metavar": "TEXT" if kind is str else "NUMBER"}


def check_value(name: str, value, choices=(), low: float = 0, high: float = math.inf):
    """Raises BadInput unless a flag's value is allowed: see `flag`."""
    if isinstance(choices, tuple) and choices:
        is_one = value is None or value in choices
        need(is_one, f"--{name} {value}: choose from {', '.join(choices)}")
    elif isinstance(value, (int, float)):
        is_inside = low <= value <= high and value < math.inf
        bounds = f"from {low} to {high}" if high < math.inf else f"of at least {low}"
        need(is_inside, f"--{name} {value} must be a number {bounds}")
    need(value != "", f"--{name} is empty: leave it out, or give it a value")
