"""examples/compaction.py: a rollout of several outputs, which share a reward."""

import asyncio
from pathlib import Path

import pytest
from test_example_tasks import Script

from agent_loop import AGENT_LOOPS
from data import filter_overlong, load_rows, load_task
from rollout import score
from train import Args

EXAMPLES = Path(__file__).parents[1] / "examples"
compaction = load_task(str(EXAMPLES / "compaction.py"))
WINDOW = {"max_prompt_tokens": 52, "max_response_tokens": 12, "max_model_len": 64}


@pytest.fixture(scope="module")
def play(tokenizer):
    """play(task, agent, row, lines) -> the outputs of a rollout by a scripted engine, graded."""

    def play(task, agent, row, *lines, validate=False):
        engine = Script(tokenizer, lines)
        loop = AGENT_LOOPS[agent](engine, tokenizer, None, task, Args(**WINDOW))
        outputs = asyncio.run(loop.run({}, **row, step=0, rollout_n=0, validate=validate))
        outputs = outputs if isinstance(outputs, list) else [outputs]
        asyncio.run(score(task, outputs, row))
        assert engine.calls == len(lines)
        return outputs

    return play


def asked(output, tokenizer) -> str:
    """What the user says in an output's prompt, which is nothing but that."""
    start, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    text = tokenizer.decode(output.prompt_ids)
    assert text.startswith(start) and text.endswith(end) and text.count("<|im_end|>") == 1
    assert output.prompt_ids.count(tokenizer.eos_token_id) == 1
    return text.removeprefix(start).removesuffix(end)


def test_rows_are_fixed_and_disjoint_and_fit(tokenizer):
    task = compaction
    train, val = load_rows(task, "train"), load_rows(task, "val")
    assert train == load_rows(task, "train")
    for rows in (train, val):
        assert filter_overlong(rows, tokenizer, task, Args(model="x", **WINDOW)) == rows
    asked = {str(row["prompt"]) for row in train}
    assert not any(str(row["prompt"]) in asked for row in val)
    with pytest.raises(KeyError):
        task.load("test")


# ---------------------------------------------------------------------------------------------------------------------
# Compaction


def log_row(log: str, letter: str) -> dict:
    return {"prompt": [{"role": "user", "content": log[:10]}], "extra_info": {"rest": f"{log[10:]}?{letter}"},
            "reward_model": {"ground_truth": letter + compaction.last_reading(log, letter)}}  # fmt: skip


def test_the_truth_is_the_last_reading():
    assert compaction.last_reading("a3b5a7c1", "a") == "7"
    assert compaction.last_reading("a3b5a7c1", "d") == ""
    for row in load_rows(compaction, "val"):
        log = row["prompt"][0]["content"] + row["extra_info"]["rest"]
        *readings, (mark, letter) = [log[i : i + 2] for i in range(0, 514, 2)]
        assert mark == "?" and all(sum(reading[0] == name for reading in readings) == 2 for name in "abcd")
        assert row["reward_model"]["ground_truth"] == [reading for reading in readings if reading[0] == letter][-1]


@pytest.mark.parametrize("answer, reward", [("a1", 1.0), ("a9", 0.0), ("", 0.0)])
def test_a_log_is_read_window_by_window_and_its_notes_go_on(play, tokenizer, answer, reward):
    log = "a1" + "x0" * 80 + "b2"
    outputs = play(compaction, "compaction", log_row(log, "a"), "a1", "a1", "", answer)
    texts = [asked(output, tokenizer) for output in outputs]
    notes = ["", "a1", "a1", ""]
    parts = [text.removeprefix(note) for text, note in zip(texts, notes)]
    assert all(text.startswith(note) for text, note in zip(texts, notes))
    assert "".join(parts) == log + "?a" and parts[-1].endswith("b2?a")
    assert all(len(part) % 2 == 0 for part in parts)
    lengths = [len(output.prompt_ids) for output in outputs]
    assert all(51 <= length <= 52 for length in lengths[:-1]) and lengths[-1] <= 52  # an odd place is left free
    assert [set(output.response_mask) for output in outputs] == [{1}] * 4
    assert [output.reward for output in outputs] == [reward] * 4
    assert {output.unit for output in outputs} == {""}
    (masked,) = play(compaction, "compaction_masked", log_row(log, "a"), "a1", "a1", "", answer)
    assert (masked.prompt_ids, masked.response_ids) == (outputs[-1].prompt_ids, outputs[-1].response_ids)
    assert masked.reward == reward


def test_notes_control_nothing_and_may_be_cut_off(play, tokenizer):
    row = log_row("x0" * 30, "a")
    first, second = play(compaction, "compaction", row, ("<|im_end|>", "length"), "a1")
    assert asked(second, tokenizer).endswith("x0?a") and first.stop_reason == "length"
    spelled = "<|\ufdd0im_end|>"  # letter by letter: decoding drops the special token itself
    first, second = play(compaction, "compaction", row, spelled, "a1")
    assert second.prompt_ids.count(tokenizer.eos_token_id) == 1


