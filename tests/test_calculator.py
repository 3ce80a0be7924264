"""The default task: rows, tool, reward and tokenizer. Nothing here warms a model up."""

from types import SimpleNamespace

import pytest

from examples import calculator as task
from examples.tiny_models import PIECES

USER = {"role": "user", "content": "What is 37*48?"}
RAW_CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37*48"}}\n</tool_call>'
def test_rows_are_fixed_and_disjoint():
    train, val = task.load("train"), task.load("val")
    assert (len(train), len(val)) == (8192, 512)
    assert train == task.load("train") and val == task.load("val")
    questions = [row["prompt"][0]["content"] for row in val + train]
    assert len(set(questions)) == len(questions)
    # The held-out set must be the same in every run and on every machine.
    assert questions[:3] == ["What is 15+35?", "What is 30+42?", "What is 87*98?"]
    assert [row["extra_info"]["index"] for row in val] == list(range(512))
    with pytest.raises(KeyError):
        task.load("test")


@pytest.mark.parametrize("expression, value", [
    ("37*48", "1776"),
    (" 12 - 85 ", "-73"),
    ("-(2+3)*4", "-20"),
    ("2**10", "1024"),
    ("2**-1", "0.5"),
    ("1." + "0" * 90 + "**2", "1"),  # long but harmless
])  # fmt: skip
def test_calculator_values(expression, value):
    assert task.calculator(expression) == value


@pytest.mark.parametrize("expression, message", [
    ("", "only numbers"),
    ("07*8", "not an arithmetic expression"),
    ("__import__('os')", "only numbers"),
    ("\u0663*2", "only numbers"),
    ("1/0", "division by zero"),
    ("(-8)**0.5", "not a real number"),
    ("1+" * 60 + "1", "longer than"),
    ("9**99999999", "too large|larger than"),  # 40 million digits, never computed
    ("(10**49)**200", "large"),
])  # fmt: skip
def test_calculator_errors_are_readable(expression, message):
    with pytest.raises(ValueError, match=message):
        task.calculator(expression)


@pytest.mark.parametrize("content, score", [
    ("<answer>1776</answer>", 1.0),
    ("so <answer> 1776\n</answer>.", 1.0),
    ("1776", 0.0),
    (None, 0.0),
    ("<answer>1_776</answer>", 0.0),
    ("<answer>" + "9" * 5000 + "</answer>", 0.0),
    ("<answer>1</answer><answer>1776</answer>", 0.0),  # a list of guesses must not pay
])  # fmt: skip
def test_reward(content, score):
    row = {"prompt": [USER], "reward_model": {"ground_truth": "1776"}}
    output = SimpleNamespace(
        messages=[USER, {"role": "assistant", "content": content}], text=content or ""
    )
    assert task.reward(output, row) == score
    output.messages.append({"role": "tool", "content": content})
    assert task.reward(output, row) == 0.0  # of the last message, which is the assistant's


def test_tokenizer_round_trips(tokenizer):
    texts = [RAW_CALL, " around  \n\n", "Grüße, 日本 🎉", "".join(map(chr, range(256)))]
    for text in texts + PIECES:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    for piece in PIECES:  # each is one token
        assert len(tokenizer.encode(f"7{piece}7", add_special_tokens=False)) == 3
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"
