"""The default task: rows, tool, reward, tokenizer and template. Nothing here warms a model up."""

import importlib.util
import json
import random
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.utils import get_json_schema

from examples.tiny_models import PIECES, init_model, warm_up

PATH = Path(__file__).parents[1] / "examples" / "calculator.py"
spec = importlib.util.spec_from_file_location("calculator_task", PATH)
task = importlib.util.module_from_spec(spec)
spec.loader.exec_module(task)

SCHEMAS = [get_json_schema(tool) for tool in task.TOOLS]
USER = {"role": "user", "content": "What is 37*48?"}
RAW_CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37*48"}}\n</tool_call>'
FUNCTION = {"name": "calculator", "arguments": {"expression": "37*48"}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": FUNCTION}]}
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
    return AutoTokenizer.from_pretrained(folder)  # as train.py and vLLM load it, not the object that was saved


# ---- rows


def test_rows_are_fixed_and_disjoint():
    train, val = task.load("train"), task.load("val")
    assert (len(train), len(val)) == (8192, 512)
    assert train == task.load("train") and val == task.load("val")
    questions = [row["prompt"][0]["content"] for row in train + val]
    assert len(set(questions)) == len(questions)
    # The held-out set must be the same in every run and on every machine, so its start is written down here.
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
])  # fmt: skip
def test_calculator_errors_are_readable(expression, message):
    with pytest.raises(ValueError, match=message):
        task.calculator(expression)


@pytest.mark.parametrize("expression", ["9**9**9", "9**99999999", "(10**49)**200", "9.9**200**2", "9**199", "1" * 60])
def test_calculator_rejects_huge_numbers_without_computing_them(expression):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="large"):
            task.calculator(expression)
        assert tracemalloc.get_traced_memory()[1] < 1e6  # bytes at the peak; 9**99999999 has 40 million
    finally:
        tracemalloc.stop()


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
    output = SimpleNamespace(messages=[USER, {"role": "assistant", "content": content}], text=content or "")
    assert task.reward(output, row) == score


def test_reward_reads_the_final_assistant_message_only():
    row = {"prompt": [USER], "reward_model": {"ground_truth": "1776"}}
    tool = {"role": "tool", "content": "<answer>1776</answer>"}
    assert task.reward(SimpleNamespace(messages=[USER, CALL, tool], text=""), row) == 0.0
    wrong = {"role": "assistant", "content": "<answer>1</answer>"}
    assert task.reward(SimpleNamespace(messages=[USER, ANSWER, USER, wrong], text=ANSWER["content"]), row) == 0.0
    assert task.reward(SimpleNamespace(messages=[], text=""), row) == 0.0


# ---- tokenizer and template


def test_tokenizer_round_trips(tokenizer):
    texts = [
        "What is 37*48?",
        RAW_CALL,
        " leading and trailing  \n\n",
        "user\n</tool_response>\n",
        "Grüße, 日本 🎉 \x00\t<|im",
        "<answer>-12</answer>",
        "".join(map(chr, range(256))),
    ]
    for text in texts + PIECES:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    for piece in PIECES:  # each piece is one token, on its own and inside text
        ids = tokenizer.encode(f"7{piece}7", add_special_tokens=False)
        assert len(ids) == 3 and tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids
    assert len(tokenizer.encode("0123456789", add_special_tokens=False)) == 10
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"


def render(tokenizer, messages, **kwargs):
    return tokenizer.apply_chat_template(messages, tokenize=False, **({"tools": SCHEMAS} | kwargs))


def test_template_text(tokenizer):
    assert render(tokenizer, [USER, CALL, RESULT], add_generation_prompt=True) == (
        "<|im_start|>system\nTools: calculator<|im_end|>\n<|im_start|>user\nWhat is 37*48?<|im_end|>\n"
        f"<|im_start|>assistant\n{RAW_CALL}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n1776\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    system = {"role": "system", "content": "Be brief."}
    assert render(tokenizer, [system, USER]).startswith("<|im_start|>system\nBe brief.\nTools: calculator<|im_end|>\n")
    assert render(tokenizer, [system, USER], tools=None).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert render(tokenizer, [USER], tools=None) == "<|im_start|>user\nWhat is 37*48?<|im_end|>\n"
    # Results of parallel calls share one user turn, as in Qwen2.5's template.
    two = render(tokenizer, [USER, CALL, RESULT, RESULT])
    assert two.count("<|im_start|>user") == 2 and two.count("<tool_response>\n1776\n</tool_response>") == 2


def test_template_is_append_only(tokenizer):
    system = {"role": "system", "content": "Be brief."}
    chat = [system, USER, CALL, RESULT, ANSWER, USER, CALL, RESULT, ANSWER]
    whole = render(tokenizer, chat)
    ids = tokenizer.encode(whole, add_special_tokens=False)
    for n in range(2, len(chat)):
        generation = chat[n]["role"] == "assistant"  # the cuts of the agent loop: before and after what is sampled
        for prompt in {render(tokenizer, chat[:n]), render(tokenizer, chat[:n], add_generation_prompt=generation)}:
            assert whole.startswith(prompt)
            head = tokenizer.encode(prompt, add_special_tokens=False)
            assert ids[: len(head)] == head
            assert head + tokenizer.encode(whole[len(prompt) :], add_special_tokens=False) == ids


def test_hermes_parser_reads_the_rendered_call(tokenizer):
    parsers = pytest.importorskip("vllm.tool_parsers.hermes_tool_parser")
    start, end = render(tokenizer, [USER], add_generation_prompt=True), "<|im_end|>\n"
    raw = render(tokenizer, [USER, CALL]).removeprefix(start).removesuffix(end)
    assert raw == RAW_CALL  # what is rendered is what the model samples
    parsed = parsers.Hermes2ProToolParser(tokenizer).extract_tool_calls(raw, request=None)
    assert parsed.tools_called and parsed.content is None
    [call] = parsed.tool_calls
    assert call.function.name == "calculator"
    assert json.loads(call.function.arguments) == FUNCTION["arguments"]
    # And back: what the parser returns renders to the text it read.
    again = {"role": "assistant", "content": parsed.content or "", "tool_calls": [call.model_dump()]}
    assert render(tokenizer, [USER, again]) == start + raw + end


# ---- model


def test_model_loads_with_and_without_tied_embeddings(folder, tmp_path, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32 and model.model.layers[0].self_attn.head_dim == 32
    assert model.config.vocab_size == len(tokenizer) and model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert 0.4e6 < sum(p.numel() for p in model.parameters()) < 0.55e6
    init_model(tmp_path, tie_word_embeddings=False, num_hidden_layers=1)
    untied = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert untied.lm_head.weight.data_ptr() != untied.model.embed_tokens.weight.data_ptr()
    assert untied.config.num_hidden_layers == 1


def test_build_is_reproducible(tmp_path):
    def build(path):
        set_seed(3)
        model, tokenizer = init_model(path, num_hidden_layers=1)
        chats = [task.demonstration(row) for row in random.choices(task.load("train"), k=12)]
        warm_up(model, tokenizer, chats, task.TOOLS, batch_size=4)
        return model.state_dict()

    first, second = build(tmp_path / "a"), build(tmp_path / "b")
    assert all(torch.equal(first[name], second[name]) for name in first)
