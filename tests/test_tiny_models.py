"""examples/tiny_models.py: models that are built from demonstrations."""

import asyncio
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from agent_loop import BadInput
from data import load_rows
from examples import calculator, warm_start
from examples.environments import EnvInteraction
from examples.tiny_models import (
    build_from_demonstrations,
    common_pieces,
    make_tokenizer,
    play,
)


class Count:
    """Says numbers; is over after `turns` answers."""

    def __init__(self, turns: int):
        self.turns = turns

    def reset(self, seed: int) -> str:
        return str(seed)

    def step(self, action: str) -> tuple:
        self.turns -= 1
        return f"{action}?", 0.0, self.turns == 0, {}


COUNT = SimpleNamespace(SYSTEM_PROMPT="Count.", INTERACTIONS=[EnvInteraction("count", Count)])


def count_row(*turns: str, length: int = 2) -> dict:
    kwargs = {"name": "count", "seed": 7, "turns": length}
    return {"prompt": [], "interaction_kwargs": kwargs, "demonstration": list(turns)}


def checked(task, row: dict) -> dict:
    source = SimpleNamespace(load=lambda split: [row], SYSTEM_PROMPT=task.SYSTEM_PROMPT)
    return load_rows(source, "train")[0]


def test_the_rows_loop_plays_a_demonstration():
    tokenizer = make_tokenizer(common_pieces(calculator))
    row = calculator.load("train")[0]
    row["demonstration"] = warm_start.demonstration(row)
    ((ids, mask),) = asyncio.run(play(checked(calculator, row), calculator, tokenizer))
    said = [token for token, mine in zip(ids, mask, strict=True) if mine]
    expression, answer = calculator.expression_of(row), row["reward_model"]["ground_truth"]
    said = tokenizer.decode(said)
    assert said.startswith("<tool_call>") and f'"{expression}"' in said
    assert said.endswith(f"</tool_call><|im_end|><answer>{answer}</answer><|im_end|>")
    assert f"<tool_response>\n{answer}\n</tool_response>" in tokenizer.decode(
        ids
    )  # the tool was run
    ((ids, mask),) = asyncio.run(play(checked(COUNT, count_row("8", "9")), COUNT, tokenizer))
    assert (
        tokenizer.decode([token for token, mine in zip(ids, mask) if mine])
        == "8<|im_end|>9<|im_end|>"
    )
    assert "7<|im_end|>" in tokenizer.decode(ids) and "8?<|im_end|>" in tokenizer.decode(ids)


@pytest.mark.parametrize("row, said", [
    (count_row("8", "9", "10"), "row 0: its agent loop ends with 1 turns"),
    (count_row("8<|im_end|>9"), "demonstration of row 0 can't be played: the policy could not say"),
    (count_row("8") | {"demonstration": None}, "row 0: .* with 0 turns .* or it has none"),
    (count_row("8" * 2000), "demonstration of row 0 can't be played: .* with room for"),
])  # fmt: skip
def test_what_can_not_be_played_names_its_row(row, said, tmp_path):
    with pytest.raises(BadInput, match=said):
        build_from_demonstrations(tmp_path, COUNT, [row])


def test_a_model_learns_its_demonstrations(tmp_path, capsys):
    random.seed(0)
    set_seed(0)
    rows = [
        {"prompt": str(n % 10), "demonstration": "odd" if n % 2 else "even"} for n in range(640)
    ]
    random.shuffle(rows)
    build_from_demonstrations(
        tmp_path, SimpleNamespace(), rows, pieces=["odd", "even"], batch_size=16
    )
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    chats = [[{"role": "user", "content": str(n)}] for n in range(10)]
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        best = model(**batch).logits[:, -1].argmax(-1)
    assert tokenizer.batch_decode(best[:, None]) == ["even", "odd"] * 5
