"""examples/tiny_models.py: models that are built from demonstrations."""

import asyncio
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from agent_loop import BadInput, function_call
from data import load_rows
from examples import calculator
from examples.tiny_models import build_from_demonstrations, common_pieces, make_tokenizer, play


def test_the_rows_loop_plays_a_demonstration():
    tokenizer = make_tokenizer(common_pieces(calculator))
    row = calculator.load("train")[0]
    expression, answer = calculator.expression_of(row), row["reward_model"]["ground_truth"]
    call = function_call("", "calculator", {"expression": expression})
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    row["demonstration"] = [calling, f"<answer>{answer}</answer>"]
    source = SimpleNamespace(load=lambda split: [row], SYSTEM_PROMPT=calculator.SYSTEM_PROMPT)
    (checked,) = load_rows(source, "train")
    ((ids, mask),) = asyncio.run(play(checked, calculator, tokenizer))
    said = tokenizer.decode([token for token, mine in zip(ids, mask, strict=True) if mine])
    assert said.startswith("<tool_call>") and f'"{expression}"' in said
    assert said.endswith(f"</tool_call><|im_end|><answer>{answer}</answer><|im_end|>")
    response = f"<tool_response>\n{answer}\n</tool_response>"
    assert response in tokenizer.decode(ids)  # the tool was run


@pytest.mark.parametrize("demonstration", [["8", "9"], "8<|im_end|>9", None, "8" * 2000])
def test_what_can_not_be_played_names_its_row(demonstration, tmp_path):
    row = {"prompt": "7", "demonstration": demonstration}
    with pytest.raises(BadInput, match="row 0"):
        build_from_demonstrations(tmp_path, SimpleNamespace(), [row])


def test_a_model_learns_its_demonstrations(tmp_path):
    random.seed(0)
    set_seed(0)
    words = ["even", "odd"]
    rows = [{"prompt": str(n % 10), "demonstration": words[n % 2]} for n in range(640)]
    random.shuffle(rows)
    build_from_demonstrations(tmp_path, SimpleNamespace(), rows, pieces=words, batch_size=16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    chats = [[{"role": "user", "content": str(n)}] for n in range(10)]
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        best = model(**batch).logits[:, -1].argmax(-1)
    assert tokenizer.batch_decode(best[:, None]) == words * 5
