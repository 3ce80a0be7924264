"""What models write as tool calls and as reasoning, and what is read of it."""

import copy
import logging

import pytest
from tokenizers import AddedToken

from agent_loop import BadInput, as_tool, parse_tool_calls, split_reasoning
from examples import calculator
from flatrl.tools import tool_parser

SCHEMAS = [as_tool(calculator.calculator).schema]
TOKENS = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
TOKENS += ["[TOOL_CALLS]", "<|python_tag|>"]


@pytest.fixture(scope="module")
def wide(tokenizer):
    """A tokenizer with the tokens that these formats look up."""
    other = copy.deepcopy(tokenizer)
    other.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOKENS])
    return other


@pytest.mark.parametrize("name, before, after", [
    ("hermes", '<tool_call>\n{"name": "calculator", "arguments": {"expression": "',
     '"}}\n</tool_call>'),
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
    assert parse_tool_calls("1+1", name, wide, SCHEMAS) == ("1+1", [])


def test_parsers_that_can_not_be_used(wide):
    for name in ("openai", "herms"):
        with pytest.raises(BadInput, match=f"--tool_parser {name} .*hermes"):
            tool_parser(name, wide)


@pytest.mark.parametrize("arguments", ["", ', "arguments": null', ', "arguments": ""'])
def test_a_call_without_arguments(tokenizer, arguments):
    text = f'Now. <tool_call>{{"name": "calculator"{arguments}}}</tool_call>'
    content, calls = parse_tool_calls(text, "hermes", tokenizer, SCHEMAS)
    assert content.strip() == "Now."
    assert calls == [{"name": "calculator", "arguments": {}, "error": None}]


@pytest.mark.parametrize("body, name", [
    ('{"name": }', ""), ("", ""), ("[" * 5000, ""), ('{"name": "a", "arguments": [1]}', "a"),
    ('{"name": "a", "arguments": "' + "[" * 5000 + '"}', "a"),
])  # fmt: skip
def test_a_malformed_call_is_an_error_for_the_model_and_not_logged(wide, caplog, body, name):
    logger = logging.getLogger("vllm.tool_parsers")
    logger.addHandler(caplog.handler)
    _, calls = parse_tool_calls(f"<tool_call>{body}</tool_call>", "hermes", wide, SCHEMAS)
    logger.removeHandler(caplog.handler)
    assert [(call["name"], call["arguments"]) for call in calls] == [(name, {})]
    assert calls[0]["error"] and not caplog.records


@pytest.mark.parametrize("text, opened, split", [
    ("<think>why</think>so", False, ("why", "so")),
    ("why</think>so", False, ("why", "so")),
    ("\n<think>why</think>so", False, ("why", "so")),  # GLM writes the newline
    ("why</think>so<think>or", False, ("whyor", "so")),
    ("why", True, ("why", "")),
    ("so", False, (None, "so")),
])  # fmt: skip
def test_reasoning(text, opened, split):
    assert split_reasoning(text, "<think>", "</think>", opened) == split
