"""Which functions can be tools, what they are called with, and what the model reads of them."""

import asyncio
from types import SimpleNamespace

import pytest
from test_agent_loop import call, play, said_by, task_of

import agent_loop
from agent_loop import BadInput, as_tool
from flatrl.tools import RefusedCallError

assert play  # a fixture

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

    @documented
    def show(x):
        return answer(x)

    show.__annotations__ = {"x": hint}
    return show


def read(function, **arguments) -> str:
    """Returns what the model reads if it calls the function. Raises what the call raises."""
    task = SimpleNamespace(TOOLS=[function])
    loop = agent_loop.ToolAgentLoop(None, None, None, task, agent_loop.LoopArgs())
    loop.tools = agent_loop.task_tools(task)
    (name,) = loop.tools
    tool_call = {"name": name, "arguments": arguments, "error": None}
    return asyncio.run(loop.call_tool(SimpleNamespace(request_id="r"), tool_call)).text


@documented
def pair(x: str, y: int = 2) -> str:
    return f"{x}{y}"


def test_a_function_that_is_a_tool():
    tool = as_tool(pair)
    assert tool.name == tool.schema["function"]["name"] == "pair"
    parameters = tool.schema["function"]["parameters"]
    assert parameters["properties"]["x"] == {"type": "string", "description": "A thing."}
    assert parameters["required"] == ["x"]
    assert read(pair, x="a") == "a2"


@documented
def untyped(x): ...


@pytest.mark.parametrize("function", [untyped, taking(int | list[int])])
def test_functions_that_can_not_be_tools(function):
    with pytest.raises(BadInput, match=f"^the function '{function.__name__}' can't be a tool: "):
        as_tool(function)


def test_what_a_row_gives_a_function(play):
    """The row's arguments reach the function as they are, in place of the model's."""
    row = {"extra_info": {"tools_kwargs": {"pair": {"execute_kwargs": {"y": 40}}}}}
    output, _ = play(call("pair", x="a", y=1), "ok", task=task_of(pair), row=row)
    assert said_by(output, "tool") == ["a40"]


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize("hint, value, got", [
    (float, 3, 3.0),
    (int, "3", 3),  # some formats of calls know only texts
    (str, 3, "3"),
    (bool, "true", True),
    (dict[str, list[int]], '{"a": ["1"]}', {"a": [1]}),
    (list[str] | None, "null", None),
])  # fmt: skip
def test_arguments_become_what_the_hint_names(hint, value, got):
    assert read(taking(hint), x=value) == repr(got)


def test_a_wrong_argument():
    with pytest.raises(RefusedCallError, match="^show: x.1: Input should be a valid integer"):
        read(taking(list[int]), x=[1, "a"])


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("result, text", [
    ("it's", "it's"),
    (None, ""),
    (({"a": None, "b": "é"}, 0.5, None), '{"a": null, "b": "é"}'),  # with a reward
])  # fmt: skip
def test_what_the_model_reads(result, text):
    assert read(taking(str, lambda _: result), x="") == text
