"""Checks the shapes that functions promise in their annotations.

A letter of `Annotated[Tensor, "B T"]` must be the same size in all arguments and results of one
call; `*S` stands for any number of dimensions. `checked(module)` returns the module's functions,
wrapped so that a call raises AssertionError if a tensor has another shape."""

import functools
import inspect
from collections.abc import Iterator
from types import FunctionType, UnionType
from typing import Annotated, Union, get_args, get_origin, get_type_hints

from torch import Tensor


def annotated(hint, value) -> Iterator[tuple[str, Tensor]]:
    """Yields the letters and the tensor of each annotated tensor in a value."""
    kind = get_origin(hint)
    if kind is Annotated and isinstance(value, Tensor):
        yield hint.__metadata__[0], value
    elif kind in (Union, UnionType):
        for option in get_args(hint):
            yield from annotated(option, value)
    elif kind is tuple and isinstance(value, tuple):
        for part_hint, part in zip(get_args(hint), value, strict=True):
            yield from annotated(part_hint, part)
    elif kind is dict:
        for part in value.values():
            yield from annotated(get_args(hint)[1], part)


def check(function):
    """Returns a function that checks the shapes of each call."""
    hints = get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked_function(*args, **kwargs):
        result = function(*args, **kwargs)
        values = signature.bind(*args, **kwargs).arguments | {"return": result}
        sizes = {}
        for name, hint in hints.items():
            for letters, tensor in annotated(hint, values.get(name)):
                shape = [tensor.shape] if letters.startswith("*") else tensor.shape
                names = letters.split()
                assert len(names) == len(shape), f"{name}: {tuple(shape)} is not ({letters})"
                for letter, size in zip(names, shape):
                    known = sizes.setdefault(letter, size)
                    assert known == size, f"{name}: {letter} is {known} and {size} in one call"
        return result

    return checked_function


def checked(module) -> dict:
    """Returns {name: the wrapped function} for the annotated functions of a module."""
    functions = {}
    for name, value in vars(module).items():
        is_own = isinstance(value, FunctionType) and value.__module__ == module.__name__
        if is_own and "return" in value.__annotations__:
            functions[name] = check(value)
    return functions
