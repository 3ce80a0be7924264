"""The default task: rows, tool, reward, tokenizer and template. Nothing here warms a model up."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer, set_seed
from transformers.utils import get_json_schema

from examples.tiny_models import PIECES, init_model

PATH = Path(__file__).parents[1] / "examples" / "calculator.py"
spec = importlib.util.spec_from_file_location("calculator_task", PATH)
task = importlib.util.module_from_spec(spec)
spec.loader.exec_module(task)

SCHEMAS = [get_json_schema(tool) for tool in task.TOOLS]
USER = {"role": "user", "content": "What is 37*48?"}
RAW_CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37*48"}}\n</tool_call>'
FUNCTION = {"name": "calculator", "arguments": {"expression": "37*48"}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": FUNCTION}],
}
RESULT = {"role": "tool", "content": "1776"}
ANSWER = {"role": "assistant", "content": "<answer>1776</answer>"}
FIRST_VAL = ["What is 15+35?", "What is 30+42?", "What is 87*98?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    set_seed(0)
    init_model(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(
        folder
    )  # as train.py and vLLM load it, not the object that was saved


# ---- rows


def test_rows_are_fixed_and_disjoint():
    train, val = task.load("train"), task.load("val")
    assert (len(train), len(val)) == (8192, 512)
    assert train == task.load("train") and val == task.load("val")
    questions = [row["prompt"][0]["content"] for row in train + val]
    assert len(set(questions)) == len(questions)
    # The held-out set must be the same in every run and on every machine.
    assert [row["prompt"][0]["content"] for row in val[:3]] == FIRST_VAL
    assert [row["extra_info"]["index"] for row in val] == list(range(512))
    with pytest.raises(KeyError):
        task.load("test")


# ---- tool


@pytest.mark.parametrize("expression, value", [
    ("37*48", "1776"),
    (" 12 - 85 ", "-73"),
    ("-(2+3)*4", "-20"),
    ("7//2", "3"),
    ("2**10", "1024"),
    ("2**-1", "0.5"),
    ("1/4", "0.25"),
    ("1." + "0" * 90 + "**2", "1"),  # long but harmless
])  # fmt: skip
def test_calculator_values(expression, value):
    assert task.calculator(expression) == value


@pytest.mark.parametrize("expression, message", [
    ("", "only numbers"),
    ("37*", "not an arithmetic expression"),
    ("07*8", "not an arithmetic expression"),
    ("(" * 49 + "1", "not an arithmetic expression"),
    ("__import__('os')", "only numbers"),
    ("\u0663*2", "only numbers"),
    ("1/0", "division by zero"),
    ("(-8)**0.5", "not a real number"),
    ("1+" * 60 + "1", "longer than"),
    ("9**99999999", "too large|larger than"),  # 40 million digits, never computed
    ("(10**49)**200", "large"),
    ("9.9**200**2", "large"),
])  # fmt: skip
def test_calculator_errors_are_readable(expression, message):
    with pytest.raises(ValueError, match=message):
        task.calculator(expression)


# ---- reward


@pytest.mark.parametrize("content, score", [
    ("<answer>1776</answer>", 1.0),
    ("so <answer> 1776\n</answer>.", 1.0),
    ("<answer>1777</answer>", 0.0),
    ("1776", 0.0),
    (None, 0.0),
    ("<answer>1776.0</answer>", 0.0),
    ("<answer>1_776</answer>", 0.0),
    ("<answer>" + "9" * 5000 + "</answer>", 0.0),
    ("<answer>1</answer><answer>1776</answer>", 0.0),  # a list of guesses must not pay
    ("<answer>1<answer>1776</answer>", 0.0),
])  # fmt: skip
def test_reward(content, score):
    row = {"prompt": [USER], "reward_model": {"ground_truth": "1776"}}
    output = SimpleNamespace(
        messages=[USER, {"role": "assistant", "content": content}], text=content or ""
    )
    assert task.reward(output, row) == score
    output.messages.append({"role": "tool", "content": content})
    assert task.reward(output, row) == 0.0  # of the last message, which is the assistant's


# ---- tokenizer and template


def test_tokenizer_round_trips(tokenizer):
    texts = [RAW_CALL, " around  \n\n", "Grüße, 日本 🎉", "".join(map(chr, range(256)))]
    for text in texts + PIECES:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    for piece in PIECES:  # each is one token
        assert len(tokenizer.encode(f"7{piece}7", add_special_tokens=False)) == 3
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"


def render(tokenizer, messages, **kwargs):
    return tokenizer.apply_chat_template(messages, tokenize=False, **({"tools": SCHEMAS} | kwargs))


def test_template_text(tokenizer):
    result = "\n<tool_response>\n1776\n</tool_response>"
    start = "<|im_start|>system\nTools: calculator<|im_end|>\n"
    start += "<|im_start|>user\nWhat is 37*48?<|im_end|>\n<|im_start|>assistant\n"
    start += f"{RAW_CALL}<|im_end|>\n<|im_start|>user"
    end = "<|im_end|>\n<|im_start|>assistant\n"
    one = render(tokenizer, [USER, CALL, RESULT], add_generation_prompt=True)
    assert one == start + result + end
    # Results of parallel calls share one user turn, as in Qwen2.5's template.
    two = render(tokenizer, [USER, CALL, RESULT, RESULT], add_generation_prompt=True)
    assert two == start + result * 2 + end
    system = {"role": "system", "content": "Be brief."}
    told = "<|im_start|>system\nBe brief."
    assert render(tokenizer, [system, USER]).startswith(f"{told}\nTools: calculator<|im_end|>\n")
    assert render(tokenizer, [system, USER], tools=None).startswith(f"{told}<|im_end|>\n")


def test_template_is_append_only(tokenizer):
    chat = [USER, CALL, RESULT, ANSWER, USER, CALL, RESULT, ANSWER]
    whole = render(tokenizer, chat)
    ids = tokenizer.encode(whole, add_special_tokens=False)
    for n in range(1, len(chat)):
        is_next = chat[n]["role"] == "assistant"
        prompt = render(tokenizer, chat[:n], add_generation_prompt=is_next)
        assert whole.startswith(prompt)
        head = tokenizer.encode(prompt, add_special_tokens=False)
        assert head + tokenizer.encode(whole[len(prompt) :], add_special_tokens=False) == ids
