"""Which functions can be tools, what they are called with, and what the model reads of them."""

import asyncio
import dataclasses
import datetime
import enum
import functools
import json
from types import SimpleNamespace
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import BaseModel
from test_agent_loop import call, play, said_by, task_of
from transformers.utils import get_json_schema

import agent_loop
from agent_loop import BadInput, ToolResponse, as_tool
from examples import calculator, retool

assert play  # a fixture


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int


class Query(BaseModel):
    text: str


class Row(TypedDict):
    x: int


DOC = """Do it.

    Args:
        x: A thing.
        y: Another.
    """


def documented(function):
    function.__doc__ = DOC
    return function


def taking(hint, answer=repr):
    """Returns a function with an argument x of this type, which returns answer(x)."""

    def show(x):
        return answer(x)

    show.__annotations__ = {"x": hint}
    return documented(show)


def read(function, **arguments) -> str:
    """Returns what the model reads if it calls the function. Raises what the call raises."""
    task = SimpleNamespace(TOOLS=[function])
    loop = agent_loop.ToolAgentLoop(None, None, None, task, agent_loop.LoopArgs())
    loop.tools = agent_loop.task_tools(task)
    (name,) = loop.tools
    tool_call = {"name": name, "arguments": arguments, "error": None}
    return asyncio.run(loop.call_tool(SimpleNamespace(request_id="r"), tool_call)).text


# ---------------------------------------------------------------- functions


@documented
def pair(x: str, y: int = 2) -> str:
    return f"{x}{y}"


@documented
async def waits(x: str) -> str:
    return x


class Box:
    @documented
    def method(self, x: str):
        return x


@dataclasses.dataclass
class Shout:
    times: int = 2  # a dataclass has no hash

    @documented
    async def __call__(self, x: str):
        return x * self.times


def any_names(x: str, request_id: str) -> str:
    return x + request_id


any_names.__doc__ = DOC.replace("y:", "request_id:")


@pytest.mark.parametrize("name, function, names, arguments, said", [
    ("method", Box().method, ["x"], {"x": "a"}, "a"),
    ("Shout", Shout(), ["x"], {"x": "a"}, "aa"),
    ("pair", functools.lru_cache(pair), ["x", "y"], {"x": "a"}, "a2"),
    ("waits", waits, ["x"], {"x": "a"}, "a"),
    ("any_names", any_names, ["x", "request_id"], {"x": "a", "request_id": "b"}, "ab"),
    ("pair", functools.partial(pair, "b"), ["y"], {"y": 3}, "b3"),
    ("pair", functools.partial(pair, y=3), ["x"], {"x": "a"}, "a3"),
])  # fmt: skip
def test_callables_that_work(name, function, names, arguments, said):
    tool = as_tool(function)
    assert tool.name == tool.schema["function"]["name"] == name
    assert [*tool.schema["function"]["parameters"]["properties"]] == names
    assert as_tool(function) is tool
    assert read(function, **arguments) == said


@documented
def variadic(*x: str): ...


@documented
def positional(x: str, /): ...


@documented
def untyped(x): ...


def numpy_doc(x: str):
    """Do it.

    Parameters
    ----------
    x : str
        A thing.
    """


@documented
def yields(x: str):
    yield x


@functools.wraps(pair)
def takes_more(database, **kwargs): ...


REFUSED = {
    "variadic": (variadic, r"`\*x: str` is variadic positional.* a list"),
    "positional": (positional, "`x: str` is positional-only.* make it an ordinary one"),
    "untyped": (untyped, "Argument x is missing a type hint"),
    "numpy_doc": (numpy_doc, "no description for the argument 'x'.*Google-style"),
    "yields": (yields, "generator, so return a list"),
    "pair": (takes_more, "missing a required argument: 'database'"),
    "method": (Box.method, "missing a required argument: 'self'"),
    "show": (functools.cache(taking(list[int])), "hashable 'x'"),
    "waits": (functools.cache(waits), "coroutine"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_no_call_could_reach(name):
    function, said = REFUSED[name]
    with pytest.raises(BadInput, match=f"^the function '{name}' can't be a tool: .*{said}"):
        as_tool(function)


def test_what_a_row_gives_a_function(play):
    """The row's arguments reach the function as they are, in place of the model's."""
    row = {"extra_info": {"tools_kwargs": {"pair": {"execute_kwargs": {"y": 40}}}}}
    output, _ = play(call("pair", x="a", y=1), "ok", task=task_of(pair), row=row)
    assert said_by(output, "tool") == ["a40"]


# ---------------------------------------------------------------- type hints


@pytest.mark.parametrize("function", [
    calculator.calculator, retool.code_interpreter, pair, Box().method,
    *map(taking, [
        float, str | None, int | list[int], Literal["a", 1], dict[str, list[int]], list, Any,
        tuple[int, str], dict[int, str], Annotated[int, "n"], list[dict[str, bool | None]],
    ]),
])  # fmt: skip
def test_schemas_are_those_of_transformers(function):
    assert json.dumps(as_tool(function).schema) == json.dumps(get_json_schema(function))


COLOURS = {"type": "string", "enum": ["red", "blue"]}


@pytest.mark.parametrize("hint, schema, value, got", [
    (float, {"type": "number"}, 3, 3),  # JSON's own values are not touched
    (Colour, COLOURS, "red", Colour.RED),
    ("Colour", COLOURS, "red", Colour.RED),
    (Colour | None, {**COLOURS, "nullable": True}, None, None),
    (list[Colour], {"type": "array", "items": COLOURS}, ["red"], [Colour.RED]),
    (dict[str, Colour], {"type": "object", "additionalProperties": COLOURS}, {"a": "red"},
     {"a": Colour.RED}),
    (dict[int, bool], {"type": "object", "additionalProperties": {"type": "boolean"}},
     {"1": True}, {1: True}),
    (tuple[int, Colour], {"type": "array", "prefixItems": [{"type": "integer"}, COLOURS]},
     [1, "red"], (1, Colour.RED)),
])  # fmt: skip
def test_arguments_become_what_the_hint_names(hint, schema, value, got):
    function = taking(hint)
    properties = as_tool(function).schema["function"]["parameters"]["properties"]
    assert properties == {"x": {**schema, "description": "A thing."}}
    assert read(function, x=value) == repr(got)


@pytest.mark.parametrize("hint", [
    Point, Query | None, dict[str, Row], datetime.date, set[int], torch.Tensor, object,
    Literal[Colour.RED], tuple[int, ...],
])  # fmt: skip
def test_hints_without_a_schema(hint):
    said = "^the function 'show' can't be a tool: .*([Uu]se .*list|Literal)"
    with pytest.raises(BadInput, match=said):
        as_tool(taking(hint))


@pytest.mark.parametrize("function, arguments, said", [
    (pair, {}, r"^pair: missing a required argument: 'x' \(its arguments: x, y\)$"),
    (pair, {"x": "a", "z": 1}, r"^pair: got an unexpected keyword argument 'z' \(its"),
    (functools.partial(pair, y=3), {"x": "a", "y": 1}, "^pair: got an unexpected.*'y'"),
    (taking(list[Colour]), {"x": ["red", 1]}, "^show: x.1: Input should be 'red' or 'blue'$"),
    (taking(tuple[int, int]), {"x": ["a"]}, "^show: x.0: .*integer.*; x.1: Field required$"),
])  # fmt: skip
def test_wrong_arguments(function, arguments, said):
    with pytest.raises(ValueError, match=said):
        read(function, **arguments)


@pytest.mark.parametrize("arguments", ["", ', "arguments": null', ', "arguments": ""'])
def test_a_call_without_arguments(tokenizer, arguments):
    text = f'Now. <tool_call>{{"name": "pair"{arguments}}}</tool_call>'
    _, calls = agent_loop.parse_tool_calls(text, "hermes", tokenizer, [as_tool(pair).schema])
    assert calls == [{"name": "pair", "arguments": {}, "error": None}]


@pytest.mark.parametrize("result, text", [
    ("it's", "it's"),
    (None, ""),
    ({"ok": True, "wind": None, "say": ["it's", "é"]},
     '{"ok": true, "wind": null, "say": ["it\'s", "é"]}'),
    ([Point(np.int64(1)), Query(text="a")], '[{"x": 1}, {"text": "a"}]'),
    ((1, 2, 3), "[1, 2, 3]"),
    (({"a": 1}, 0.5, None), '{"a": 1}'),
    (True, "true"),
    (torch.tensor(0.5), "0.5"),
    (Colour.RED, '"red"'),
    ({"days": {datetime.date(2020, 1, 1)}, 1: None}, '{"days": ["2020-01-01"], "1": null}'),
    (ToolResponse(None), ""),
])  # fmt: skip
def test_what_the_model_reads(result, text):
    assert read(taking(str, lambda _: result), x="") == text


NO_TEXT = "^the tool returned a {}: return text, JSON, or a ToolResponse with images$"


@pytest.mark.parametrize("result, said", [
    ({"a": [torch.zeros(2)]}, NO_TEXT.format("torch.Tensor")),
    ([Image.new("RGB", (2, 2))], NO_TEXT.format("PIL.Image.Image")),
    (Point(map(str, "ab")), NO_TEXT.format("builtins.map")),
    (ToolResponse(b"text"), NO_TEXT.format("builtins.bytes")),
    ((ToolResponse("text"), 0.5), "expected 3, got 2"),  # a reward is not read as JSON
])  # fmt: skip
def test_a_result_that_is_neither_text_nor_json(result, said):
    with pytest.raises((TypeError, ValueError), match=said):
        read(taking(str, lambda _: result), x="")
