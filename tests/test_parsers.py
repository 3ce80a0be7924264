"""Whatever a model writes, in whatever tool-call format, no exception leaves the parsers."""

import copy
import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from agent_loop import BadInput, as_tool, parse_tool_calls, split_reasoning, tool_parser
from examples import calculator

# The formats' tokens, which hypothesis puts together rightly and wrongly.
TOKENS = """
    <tool_call> </tool_call> [TOOL_CALLS] [ARGS] [CALL_ID] <|python_tag|> <think> </think>
    <|tool_call_start|> <|tool_call_end|> <tool_calls> </tool_calls> <tool_sep>
    <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜>
    <｜tool▁sep｜> <|tool▁calls▁begin|> <function_calls> </function_calls>
    <arg_key> </arg_key> <arg_value> </arg_value> <|action_start|><|plugin|> <|action_end|>
    <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|>
    <|tool_call_argument_begin|>""".split()
WORDS = r"""
    {"name":"calculator","arguments":{"expression":"1+1"}} {"name":"calculator","parameters":{}}
    <tool_call>{"name":"calculator","arguments":{"expression":"\ud83d"}}</tool_call> {"name":3}
    [calculator(expression='1+1')] calculator expression 1+1 <function=calculator> </function>
    <parameter=expression> </parameter> functions.calculator:0 ```json ``` function
    <invoke name="calculator"> </invoke> { } [ ] ( ) , : " ' \ null 1e999 NaN é€😀""".split()
PIECES = [*TOKENS, *WORDS, "\n", " ", "\ud7ff", "\x00", "9" * 5000, "[" * 500]
SCHEMAS = [as_tool(calculator.calculator).schema]


@pytest.fixture(scope="module")
def wide(tokenizer):
    """A tokenizer with the tokens that most formats look up."""
    other = copy.deepcopy(tokenizer)
    other.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOKENS])
    return other


@pytest.fixture(scope="module")
def parsers(wide) -> list[str]:
    from vllm.tool_parsers import ToolParserManager

    fit = []
    for name in sorted(ToolParserManager.list_registered()):
        try:
            tool_parser(name, wide)
            fit.append(name)
        except BadInput:  # one line before the run starts
            pass
    return fit


def test_most_of_vllms_parsers_can_be_used(wide, parsers):
    assert len(parsers) >= 40
    with pytest.raises(BadInput, match="--tool_parser openai does not parse plain text"):
        tool_parser("openai", wide)
    with pytest.raises(BadInput, match="herms.*hermes"):
        tool_parser("herms", wide)


@pytest.mark.parametrize("name, before, after", [
    ("llama3_json", '<|python_tag|>{"name": "calculator", "parameters": {"expression": "', '"}}'),
    ("pythonic", "[calculator(expression='", "')]"),
    ("qwen3_coder", "<tool_call>\n<function=calculator>\n<parameter=expression>\n",
     "\n</parameter>\n</function>\n</tool_call>"),
    ("glm45", "<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>",
     "</arg_value>\n</tool_call>"),
])  # fmt: skip
def test_formats(wide, name, before, after):
    _, calls = parse_tool_calls(f"{before}1+1{after}", name, wide, SCHEMAS)
    assert calls == [{"name": "calculator", "arguments": {"expression": "1+1"}, "error": None}]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join), data=st.data())
def test_no_parser_lets_an_exception_out(wide, parsers, text, data):
    name = data.draw(st.sampled_from(parsers))
    content, calls = parse_tool_calls(text, name, wide, SCHEMAS)
    assert isinstance(content, str)
    for call in calls:
        assert isinstance(call["name"], str) and isinstance(call["arguments"], dict)
        json.dumps(call["arguments"], allow_nan=False)  # an endpoint's answer takes no NaN
        assert call["error"] is None or isinstance(call["error"], str)


def test_a_malformed_call_is_not_logged(wide, caplog):
    """vLLM would log a traceback for each."""
    logger = logging.getLogger("vllm.tool_parsers")
    logger.addHandler(caplog.handler)
    _, (call,) = parse_tool_calls('<tool_call>{"name": }</tool_call>', "hermes", wide, SCHEMAS)
    logger.removeHandler(caplog.handler)
    assert call["error"] and not caplog.records


def test_a_newline_before_the_tag_is_no_reasoning():  # GLM writes it
    split = split_reasoning("\n<think>why</think>so", "<think>", "</think>", False)
    assert split == ("why", "so")
