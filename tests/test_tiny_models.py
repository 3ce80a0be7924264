"""examples/tiny_models.py: models that are built from demonstrations."""

import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from agent_loop import BadInput
from examples.tiny_models import build_from_demonstrations


@pytest.mark.parametrize("demonstration", [["8", "9"], "8<|im_end|>9", None, "8" * 2000])
def test_what_can_not_be_played_names_its_row(demonstration, tmp_path):
    row = {"prompt": "7", "demonstration": demonstration}
    with pytest.raises(BadInput, match="row 0"):
        build_from_demonstrations(tmp_path, SimpleNamespace(), [row])


def test_a_model_learns_its_demonstrations(tmp_path):
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
