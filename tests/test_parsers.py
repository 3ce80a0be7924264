"""What models write as tool calls and as reasoning, and what is read of it."""

import copy
import logging
import re

import chat_templates
import pytest
from tokenizers import AddedToken

from agent_loop import BadInput, as_tool, parse_tool_calls, split_reasoning
from examples import calculator
from flatrl.tools import PROBES, CallFormat, set_tool_calls
from flatrl.tools import SCHEMAS as PROBED

SCHEMAS = [as_tool(calculator.calculator).schema]


# What a model of each family writes as two calls, and which parser is found for it.
FOUND = {"qwen3": "hermes", "llama3.1": "llama3_json", "mistral0.3": "mistral",
         "glm4": "glm45", "gpt-oss": "template"}
LOOK = {"type": "function", "function": SCHEMAS[0]["function"] | {"name": "look-up"}}


@pytest.mark.parametrize("name", FOUND)
def test_the_parser_is_found_by_measurement(name, tokenizer):
    """What it reads is what the template writes; a cut or a broken call is told."""
    other = chat_templates.tokenizer_for(name, tokenizer)
    found = CallFormat(other)
    assert found.name == FOUND[name]
    assert [*found.check([LOOK])] == []
    for probe, turn in found.turns.items():
        content, calls = parse_tool_calls(turn, "auto", other, SCHEMAS + PROBED)
        said, made = PROBES[probe]
        assert [(call["name"], call["arguments"]) for call in calls] == made
        assert content.strip() in ("", said)
        broken = turn[: turn.rindex("probe_") + len("probe_look") + 8]
        if probe == "a call":
            content, calls = parse_tool_calls(broken, "auto", other, SCHEMAS + PROBED)
            assert calls[-1]["error"]
    for text in ("2", "I call it a day.", "{1, 2}", "<b>"):
        assert parse_tool_calls(text, "auto", other, SCHEMAS) == (text, [])


def test_a_call_that_was_cut_is_not_completed(tokenizer):
    """vLLM's glm45 reads a call without its end; the first of two calls is kept."""
    other = chat_templates.tokenizer_for("glm4", tokenizer)
    turn = CallFormat(other).turns["two calls in a turn"]
    cut = turn[: turn.rindex("Zq2") + 2]
    _, calls = parse_tool_calls(cut, "auto", other, PROBED)
    assert [call["name"] for call in calls] == ["probe_look", ""]
    assert calls[0]["arguments"] == {"q": "Zq1"} and calls[1]["error"]


KIMI = """
{%- for m in messages %}
    {{- '<|im_' + m.role + '|>' + m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<|tool_calls_section_begin|>' if loop.first }}
        {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
        {{- (call.function.arguments | tojson) + '<|tool_call_end|>' }}
        {{- '<|tool_calls_section_end|>' if loop.last }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{{- '<|im_assistant|>' if add_generation_prompt }}"""


@pytest.mark.parametrize("name, changes, ids", [
    ("mistral0.3", {"00000100": "abcdefgh"}, ["abcdefgh0", "abcdefgh1"]),
    ("kimi", {":0": ":7", ":1": ":8"}, ["functions.probe_look:7", "functions.probe_look:8"]),
])  # fmt: skip
def test_ids_that_the_policy_gave_its_calls_stay(name, changes, ids, tokenizer):
    """Kimi's template writes the id, functions.NAME:NUMBER, and no name."""
    if name == "kimi":
        other = copy.deepcopy(tokenizer)
        tokens = sorted({*re.findall(r"<\|\w+\|>", KIMI)})
        other.add_tokens([AddedToken(each, normalized=False) for each in tokens])
        other.chat_template = KIMI
    else:
        other = chat_templates.tokenizer_for(name, tokenizer)
    turn = CallFormat(other).turns["two calls in a turn"]
    for old, new in changes.items():
        turn = turn.replace(old, new)
    _, calls = parse_tool_calls(turn, "auto", other, PROBED)
    assert [call["id"] for call in calls] == ids
    message = {"role": "assistant"}
    set_tool_calls(message, "", calls, 1)
    assert [call["id"] for call in message["tool_calls"]] == ids


def test_a_tool_whose_name_is_not_read_is_refused(tokenizer):
    """Qwen3's template does not escape a name."""
    found = CallFormat(chat_templates.tokenizer_for("qwen3", tokenizer))
    quoted = {"type": "function", "function": LOOK["function"] | {"name": 'look"up'}}
    with pytest.raises(BadInput, match="does not read a call of the tool 'look\"up', "):
        list(found.check([quoted]))


@pytest.mark.parametrize("arguments", ["", ', "arguments": null', ', "arguments": ""'])
def test_a_call_without_arguments(tokenizer, arguments):
    text = f'Now. <tool_call>{{"name": "calculator"{arguments}}}</tool_call>'
    content, calls = parse_tool_calls(text, "hermes", tokenizer, SCHEMAS)
    assert content.strip() == "Now."
    assert calls == [{"name": "calculator", "arguments": {}, "error": None}]


@pytest.mark.parametrize("body, name", [
    ('{"name": }', ""), ("", ""), ("[" * 5000, ""), ('{"name": "a", "arguments": [1]}', "a"),
    ('{"name": "a", "arguments": []}', "a"), ('{"name": "a", "arguments": 0}', "a"),
    ('{"name": "a", "arguments": "' + "[" * 5000 + '"}', "a"),
])  # fmt: skip
def test_a_malformed_call_is_an_error_for_the_model_and_not_logged(tokenizer, caplog, body, name):
    logger = logging.getLogger("vllm.tool_parsers")
    logger.addHandler(caplog.handler)
    _, calls = parse_tool_calls(f"<tool_call>{body}</tool_call>", "hermes", tokenizer, SCHEMAS)
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
