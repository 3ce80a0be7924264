"""Turns a dataclass into command-line flags: each field carries its help text and its rules.

This module knows no flag by name."""

import argparse
import difflib
import math
import re
import sys
from collections import namedtuple
from dataclasses import Field, field, fields
from types import UnionType
from typing import Literal, get_args, get_origin

from agent_loop import BadInput
from flatrl.bad_input import need

# What a number must be: the words of an error message, and the test itself.
Range = namedtuple("Range", "words holds")

POSITIVE = Range("be greater than 0", lambda x: x > 0)
ANY = Range("be a number", math.isfinite)
NOT_NEGATIVE = Range("not be negative", lambda x: x >= 0)  # for numbers without a rule
SHARE = Range("be in (0, 1]", lambda x: 0 < x <= 1)
DISCOUNT = Range("be in [0, 1]", lambda x: 0 <= x <= 1)


def flag(default, help: str, allowed=(), only: str = "", **more) -> Field:
    """Returns the dataclass field of a flag.

    allowed: a Range or a tuple of choices. () allows every value, and every number from 0. A
    list holds choices to which a task file may add, so it restricts nothing at this point.
    only: the setting of another flag without which this one has no effect, or several settings
    separated by spaces (see `check_only_rule`).
    more: further arguments of argparse's add_argument."""
    if allowed and not isinstance(allowed, Range):
        help += f" ({' | '.join(map(str, allowed))})"
    metadata = {"help": help, "allowed": allowed, "only": only, **more}
    return field(default=default, metadata=metadata)


class Parser(argparse.ArgumentParser):
    """argparse's parser, which reports a mistake as BadInput instead of printing all flags."""

    def error(self, message: str):
        raise BadInput(message.removeprefix("argument "))


def parse_flags(
    cls: type,
    argv: list[str] | None,
    headings: dict[str, str],
    hidden: list[str],
    shown_defaults: dict[str, str],
    **texts,
):
    """Returns an instance of the dataclass `cls`, filled from a command line.

    argv: the words of the command line. None takes this process's.
    headings: {first flag of a group: the group's heading in --help}.
    hidden: fields that have no flag of their own.
    shown_defaults: the default to show in --help where it depends on another flag.
    texts: usage, description and epilog for argparse, which prints their lines as they are.
    Raises BadInput for a flag that is unknown, abbreviated or mistyped."""
    # Not transformers' HfArgumentParser: importing it takes a third of the time to --help.
    as_is = argparse.RawDescriptionHelpFormatter
    parser = Parser(allow_abbrev=False, formatter_class=as_is, **texts)
    names = []
    group = parser
    # The class's own fields come first, then those that it inherits.
    for entry in sorted(fields(cls), key=lambda entry: entry.name not in cls.__annotations__):
        name = entry.name
        if name in hidden:
            continue
        names.append(f"--{name}")
        if name in headings:
            group = parser.add_argument_group(headings[name])
        settings = _settings(entry)
        default = shown_defaults.get(name, entry.default)
        if default not in (None, "{}") and default is not False:
            settings["help"] += f" (default: {default})"
        group.add_argument(f"--{name}", **settings)

    words = sys.argv[1:] if argv is None else argv
    values, unknown = parser.parse_known_args([_with_underscores(word) for word in words])
    if unknown:
        name = unknown[0].split("=")[0]
        similar = difflib.get_close_matches(name, names)
        hint = f": did you mean {similar[0]}?" if similar else "; see --help"
        if name[2:] in hidden:
            hint = ": it is a key of --agent_args"
        raise BadInput(f"unknown flag {unknown[0]}{hint}")
    return cls(**vars(values))


def _settings(entry: Field) -> dict:
    """Returns the arguments of argparse's add_argument for the field of a flag.

    Its type may be bool, where `--flag` alone means True, Literal, list[X], X or X | None."""
    kind = entry.type
    if isinstance(kind, UnionType):
        kind = get_args(kind)[0]
    settings = {"default": entry.default, "type": kind, "metavar": "TEXT"}
    if kind in (int, float):
        settings["metavar"] = "NUMBER"
    if kind is bool:
        settings |= {"type": _as_bool, "nargs": "?", "const": True, "metavar": "BOOL"}
    elif get_origin(kind) is list:
        settings |= {"type": get_args(kind)[0], "nargs": "+"}
    elif get_origin(kind) is Literal:
        by_word = {str(choice).lower(): choice for choice in get_args(kind)}
        settings |= {
            "type": lambda word: by_word.get(word.lower(), word),
            "choices": get_args(kind),
        }
        settings["metavar"] = "|".join(by_word)
    rules = ("allowed", "only")  # argparse does not know them
    return settings | {name: x for name, x in entry.metadata.items() if name not in rules}


def _with_underscores(word: str) -> str:
    """Returns a flag in the form --num_steps where it is written --num-steps."""
    name, equals, value = word.partition("=")
    if name.startswith("--"):
        name = "--" + name[2:].replace("-", "_")
    return name + equals + value


def _as_bool(word: str) -> bool:
    """Returns the bool that a word means. Raises ArgumentTypeError if it means none."""
    if word.lower() in ("true", "yes", "1"):
        return True
    if word.lower() in ("false", "no", "0"):
        return False
    raise argparse.ArgumentTypeError(f"true or false expected, got {word!r}")


def check_each_flag(args, defaults: dict):
    """Raises BadInput where a flag breaks one of its own rules, `allowed` and `only`.

    args: an instance of a dataclass of flags. defaults: {name: the value of a flag that the
    user left out}, where this is not the field's default."""
    for entry in fields(args):
        name = entry.name
        value = getattr(args, name)
        check_value(name, value, entry.metadata.get("allowed", ()))
        # A flag that is set without effect is a mistake that only the results would show.
        if value != defaults.get(name, entry.default):
            for rule in entry.metadata.get("only", "").split():
                check_only_rule(name, rule, args)


def check_value(name: str, value, allowed):
    """Raises BadInput unless a flag's value is allowed. allowed: see `flag`."""
    is_choice = isinstance(allowed, tuple) and not isinstance(allowed, Range)  # a Range is a tuple
    if is_choice and allowed:
        need(value in allowed, f"--{name} {value}: choose from {', '.join(map(str, allowed))}")
    elif isinstance(value, (int, float)):
        rule = allowed if isinstance(allowed, Range) else NOT_NEGATIVE
        need(rule.holds(value), f"--{name} {value} must {rule.words}")
        need(value < 2**31, f"--{name} {value} must be less than 2^31")
    need(value != "", f"--{name} is empty: leave it out, or give it a value")


def check_only_rule(name: str, rule: str, args):
    """Raises BadInput if a flag has no effect, because its `only` rule does not hold.

    rule: "tp" or "!replay", which other flag must be set or unset; "policy_loss=ppo|gspo" or
    "loss!=x", the values that it must have or must not have."""
    negation, other, comparison, wanted = re.fullmatch(r"(!?)(\w+)(!?=|)(.*)", rule).groups()
    value = getattr(args, other)
    if comparison == "=":
        choices = args.__dataclass_fields__[other].metadata["allowed"]
        wording = f"with --{other} {wanted.replace('|', ' or ')}"
        # A task's own choice may take anything into account.
        is_own = isinstance(choices, list) and value not in choices
        holds = is_own or value in wanted.split("|")
    elif comparison == "!=":
        wording = f"with a --{other} other than {wanted}"
        holds = value != wanted
    else:
        is_set = value not in (None, "none", False, 0)
        wording = f"without --{other}" if negation else f"with a --{other}"
        holds = is_set != bool(negation)
    need(holds, f"--{name} has an effect only {wording}")
