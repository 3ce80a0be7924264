"""The machinery of flags: a dataclass whose fields carry their help text and their rules.

This module knows no flag by name: the dataclass and its flags' defaults are arguments."""

import argparse
import difflib
import re
import sys
from collections import namedtuple
from dataclasses import field, fields
from types import UnionType
from typing import Literal, get_args, get_origin

from agent_loop import BadInput
from flatrl.bad_input import need

# What a number must be: the words of an error, and a function that says if a number is so.
Range = namedtuple("Range", "words holds")
POSITIVE = Range("be greater than 0", lambda x: x > 0)
NOT_NEGATIVE = Range("not be negative", lambda x: x >= 0)  # the rule of numbers without a rule
SHARE = Range("be in (0, 1]", lambda x: 0 < x <= 1)
DISCOUNT = Range("be in [0, 1]", lambda x: 0 <= x <= 1)

UNSET_VALUES = "0 0.0 none None False".split()


def flag(default, help: str, allowed=(), only: str = "", **more):
    """Returns the dataclass field of a flag.

    allowed: a Range, or a tuple of choices; () allows every value, and numbers from 0 on. A
    list has choices to which a task file may add: it restricts nothing before that is loaded.
    only: the setting of another flag without which this one has no effect, or several with
    spaces between (`check_only_rule`).
    more: for argparse's add_argument."""
    if allowed and not isinstance(allowed, Range):
        help += f" ({' | '.join(map(str, allowed))})"
    return field(default=default, metadata={"help": help, "allowed": allowed, "only": only} | more)


def parse_flags(cls, argv: list[str] | None, description: str, shown_defaults: dict[str, str]):
    """Returns an instance of the dataclass `cls` with the values that a command line gives.

    argv: the words of the command line; None: this process's. shown_defaults: what --help
    shows as the default of flags whose real default depends on another flag.
    The instance's attribute `given` has the names of the flags on the command line.
    Raises BadInput on a flag that is unknown, abbreviated or mistyped."""

    class Parser(argparse.ArgumentParser):
        """argparse's, with our errors."""

        def error(self, message):
            """Raises BadInput; argparse would print all flags, and hide the mistake."""
            raise BadInput(re.sub(r"^argument (--\w+)\S*:", r"\1:", message))

    # Not transformers' HfArgumentParser: its import would take a third of the time to --help.
    parser = Parser(allow_abbrev=False, description=description,
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for entry in fields(cls):
        settings = _settings(entry)
        if entry.name in shown_defaults:
            # argparse adds "(default: None)" unless the text has %(default), of which .0
            # prints no character.
            settings["help"] += f" (default: {shown_defaults[entry.name]})%(default).0s"
        names = dict.fromkeys([f"--{entry.name}", f"--{entry.name.replace('_', '-')}"])
        parser.add_argument(*names, **settings)
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        names = [f"--{entry.name}" for entry in fields(cls)]
        similar = difflib.get_close_matches(unknown[0].split("=")[0], names)
        hint = f": did you mean {similar[0]}?" if similar else "; see --help"
        raise BadInput(f"unknown flag {unknown[0]}{hint}")
    args = cls(**vars(values))
    words = sys.argv if argv is None else argv
    args.given = {word.split("=")[0][2:].replace("-", "_") for word in words if word[:2] == "--"}
    return args


def _settings(entry) -> dict:
    """Returns what argparse's add_argument takes for the field of a flag.

    Its type may be bool, where `--flag` alone means True, Literal, list[X], X or X | None."""
    kind = entry.type
    if isinstance(kind, UnionType):
        kind = get_args(kind)[0]
    settings = {"default": entry.default, "type": kind}
    if kind is bool:
        settings |= {"type": _as_bool, "nargs": "?", "const": True}
    elif get_origin(kind) is list:
        settings |= {"type": get_args(kind)[0], "nargs": "+"}
    elif get_origin(kind) is Literal:
        by_word = {str(choice): choice for choice in get_args(kind)}
        settings |= {"type": lambda word: by_word.get(word, word), "choices": get_args(kind)}
    ours = ("allowed", "only")  # rules that argparse does not know
    return settings | {name: x for name, x in entry.metadata.items() if name not in ours}


def _as_bool(word):
    """Returns the bool that a word means. Raises ArgumentTypeError if it means none."""
    for value, words in (True, "yes true t y 1"), (False, "no false f n 0"):
        if word.lower() in words.split():
            return value
    raise argparse.ArgumentTypeError(f"true or false expected, got {word!r}")


def check_each_flag(args, defaults: dict):
    """Raises BadInput where a flag's value breaks the flag's own rules, `allowed` and `only`.

    args: an instance of a dataclass of flags. defaults: the value that a flag has if the
    user does not set it, where this is not the field's default."""
    for entry in fields(args):
        name = entry.name
        value = getattr(args, name)
        check_value(name, value, entry.metadata["allowed"])
        # A flag that is set and has no effect is a mistake, which only results would show.
        if value != defaults.get(name, entry.default):
            for rule in entry.metadata["only"].split():
                holds, wording = check_only_rule(rule, args)
                need(holds, f"--{name} has an effect only {wording}")


def check_value(name: str, value, allowed):
    """Raises BadInput unless `allowed`, a Range or a tuple of choices, allows the value, or
    each of a list."""
    if isinstance(value, (list, tuple)):
        for entry in value:
            check_value(name, entry, allowed)
    if allowed and not isinstance(allowed, (Range, list)):
        need(value in allowed, f"--{name} {value}: choose from {', '.join(map(str, allowed))}")
    elif isinstance(value, (int, float)):
        words, holds = allowed or NOT_NEGATIVE
        need(holds(value), f"--{name} {value} must {words}")
        need(value < 2**31, f"--{name} {value} must be less than 2^31")
    need(value != "", f"--{name} is empty: leave it out, or give it a value")


def check_only_rule(rule: str, args) -> tuple[bool, str]:
    """Evaluates a flag's `only` rule: "tp", "!replay", "policy_loss=ppo|gspo", "loss!=x".

    Returns whether the rule holds, and its wording for an error: "with a --tp", "without
    --replay", "with --policy_loss ppo or gspo", "with a --loss other than x"."""
    negation, name, comparison, wanted = re.fullmatch(r"(!?)(\w+)(!?=|)(.*)", rule).groups()
    value = str(getattr(args, name))
    if comparison == "=":
        # The value may be a list of several: --rollout_correction tis,geo_mask.
        holds = re.search(rf"\b({wanted})\b", value) is not None
        choices = args.__dataclass_fields__[name].metadata["allowed"]
        if isinstance(choices, list) and value not in choices:
            holds = True  # nobody knows what a task's own choice takes into account
        return holds, f"with --{name} {wanted.replace('|', ' or ')}"
    if comparison == "!=":
        return value != wanted, f"with a --{name} other than {wanted}"
    is_set = value not in UNSET_VALUES
    if negation:
        return not is_set, f"without --{name}"
    other = " other than 0" if value.startswith("0") else ""
    return is_set, f"with a --{name}{other}"
