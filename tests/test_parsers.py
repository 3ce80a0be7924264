"""What models write as tool calls and as reasoning, and what is read of it."""

import chat_templates
import pytest

from agent_loop import BadInput, as_tool, parse_tool_calls
from examples import calculator
from flatrl.chat_template import split_reasoning
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


def test_ids_that_the_policy_gave_its_calls_stay(tokenizer):
    other = chat_templates.tokenizer_for("mistral0.3", tokenizer)
    turn = CallFormat(other).turns["two calls in a turn"].replace("00000100", "abcdefgh")
    _, calls = parse_tool_calls(turn, "auto", other, PROBED)
    message = {"role": "assistant"}
    set_tool_calls(message, "", calls, 1)
    assert [call["id"] for call in message["tool_calls"]] == ["abcdefgh0", "abcdefgh1"]


def test_a_tool_whose_name_is_not_read_is_refused(tokenizer):
    """Qwen3's template does not escape a name."""
    found = CallFormat(chat_templates.tokenizer_for("qwen3", tokenizer))
    quoted = {"type": "function", "function": LOOK["function"] | {"name": 'look"up'}}
    with pytest.raises(BadInput, match="does not read a call of the tool 'look\"up', "):
        list(found.check([quoted]))


@pytest.mark.parametrize("arguments", ["", ', "arguments": null'])
def test_a_call_without_arguments(tokenizer, arguments):
    text = f'Now. <tool_call>{{"name": "calculator"{arguments}}}</tool_call>'
    content, calls = parse_tool_calls(text, "hermes", tokenizer, SCHEMAS)
    assert content.strip() == "Now."
    assert calls == [{"name": "calculator", "arguments": {}, "error": None}]


@pytest.mark.parametrize("body, name", [
    ("[" * 5000, ""), ('{"name": "a", "arguments": [1]}', "a"),
    ('{"name": "a", "arguments": "' + "[" * 5000 + '"}', "a"),
])  # fmt: skip
def test_a_malformed_call_is_an_error_for_the_model(tokenizer, body, name):
    _, calls = parse_tool_calls(f"<tool_call>{body}</tool_call>", "hermes", tokenizer, SCHEMAS)
    assert [(call["name"], call["arguments"]) for call in calls] == [(name, {})]
    assert calls[0]["error"]


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
