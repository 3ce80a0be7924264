"""Checks the shapes that functions promise in their annotations.

A letter of `Annotated[Tensor, "B T"]` must be the same size in all arguments and results of one
call; `*S` stands for any number of dimensions. `checked(module)` returns the module's functions,
wrapped so that a call raises AssertionError if a tensor has another shape."""

import functools
import inspect
from types import FunctionType, UnionType
from typing import Annotated, Union, get_args, get_origin, get_type_hints

from torch import Tensor


def bind(hint, value, sizes: dict) -> None:
    """Compares a value with its annotation, and notes the sizes of letters that are new."""
    kind = get_origin(hint)
    if kind in (Union, UnionType):
        for option in get_args(hint):
            if (get_origin(option) is Annotated) == isinstance(value, Tensor):
                bind(option, value, sizes)
    elif kind is Annotated:
        letters = hint.__metadata__[0]
        shape = [value.shape] if letters.startswith("*") else value.shape
        names = letters.split()
        assert len(shape) == len(names), f"{tuple(shape)} is not of the form ({letters})"
        for name, size in zip(names, shape):
            known = sizes.setdefault(name, size)
            assert known == size, f"{name} is {known} and {size} in one call"
    elif kind is tuple and isinstance(value, tuple):
        for part_hint, part in zip(get_args(hint), value, strict=True):
            bind(part_hint, part, sizes)
    elif kind is dict:
        for part in value.values():
            bind(get_args(hint)[1], part, sizes)


def check(function):
    """Returns a function that checks the shapes of each call."""
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function)

    @functools.wraps(function)
    def checked_function(*args, **kwargs):
        sizes = {}
        for name, value in parameters.bind(*args, **kwargs).arguments.items():
            if name in hints and value is not None:
                bind(hints[name], value, sizes)
        result = function(*args, **kwargs)
        bind(hints["return"], result, sizes)
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
