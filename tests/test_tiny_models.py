"""examples/tiny_models.py: models that are built from demonstrations."""

import asyncio
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from agent_loop import BadInput, Tool, function_call
from data import load_rows
from examples import calculator, tiny_models
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
    whole = tokenizer.decode(ids)
    said = tokenizer.decode([token for token, mine in zip(ids, mask, strict=True) if mine])
    assert said.startswith("<tool_call>") and f'"{expression}"' in said
    assert said.endswith(f"</tool_call><|im_end|><answer>{answer}</answer><|im_end|>")
    assert f"<tool_response>\n{answer}\n</tool_response>" in whole  # the tool was run


@pytest.mark.parametrize("demonstration, said", [
    (["8", "9"], "row 0: its agent loop ends with 1 turns"),
    ("8<|im_end|>9", "demonstration of row 0 can't be played: the policy could not say"),
    (None, "row 0: .* with 0 turns .* or it has none"),
    ("8" * 2000, "demonstration of row 0 can't be played: .* with room for"),
])  # fmt: skip
def test_what_can_not_be_played_names_its_row(demonstration, said, tmp_path):
    row = {"prompt": "7", "demonstration": demonstration}
    with pytest.raises(BadInput, match=said):
        build_from_demonstrations(tmp_path, SimpleNamespace(), [row])


def test_a_single_demonstration_of_a_task_whose_tool_has_no_arguments(tmp_path):
    class Look(Tool):
        name = "look"
        schema = {"type": "function", "function": {"name": name, "description": "Looks."}}

    task = SimpleNamespace(TOOLS=[Look()])
    build_from_demonstrations(tmp_path, task, [{"prompt": "1", "demonstration": "2"}])
    assert (tmp_path / "config.json").is_file() and common_pieces(task) == ["look"]


def test_the_time_that_is_left_does_not_count_a_slow_first_item(monkeypatch, capsys):
    clock = iter([0, 50, 60, 70, 70])  # the start, after each item, and the end
    monkeypatch.setattr(tiny_models, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert list(tiny_models.told([1, 2, 3], "play")) == [1, 2, 3]
    left = ["play: 2 of 3, about 10 s left", "play: 3 of 3, about 0 s left"]
    assert capsys.readouterr().out.splitlines() == [*left, "play: done in 70 s"]


def test_a_model_learns_its_demonstrations(tmp_path, capsys):
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
