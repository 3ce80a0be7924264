"""examples/subagents.py against a script, and on the real engine."""


import pytest
from conftest import REPO
from test_tree import CALL, play

import data
from losses import grpo_advantages
from train import Args

subagents = data.load_task(str(REPO / "examples" / "subagents.py"))
ROW = {
    "prompt": [{"role": "system", "content": subagents.SYSTEM_PROMPT},
               {"role": "user", "content": "What is 37+48 and 20-7?"}],
    "agent_name": "subagents", "reward_model": {"ground_truth": "<answer>85 13</answer>"},
}  # fmt: skip
FIRST, SECOND, RIGHT = (f"<answer>{text}</answer>" for text in ("85", "13", "85 13"))


def test_rows_fit_and_are_disjoint(tokenizer):
    train, val = data.load_rows(subagents, "train"), data.load_rows(subagents, "val")
    assert (len(train), len(val)) == (4096, 256) and train == data.load_rows(subagents, "train")
    assert data.filter_overlong(val, tokenizer, subagents, Args(model="x")) == val
    questions = {row["prompt"][-1]["content"] for row in train}
    assert not any(row["prompt"][-1]["content"] in questions for row in val)


def test_sub_agents_have_prompts_of_their_own(tokenizer):
    *subs, main = play(subagents, tokenizer, ROW, "37+48 20-7", CALL, SECOND, FIRST, RIGHT)
    assert [(sub.unit, sub.reward) for sub in subs] == [("sub 37+48", 1.0), ("sub 20-7", 1.0)]
    assert (main.unit, main.reward) == ("main", 1.0) and not any(output.group for output in (*subs, main))
    for sub, question in zip(subs, ("37+48", "20-7")):
        prompt = tokenizer.decode(sub.prompt_ids)
        assert f"user\nWhat is {question}?<|im_end|>" in prompt and "\nTools: calculator<" in prompt
    assert "Tools" not in tokenizer.decode(main.prompt_ids)
    assert [message["content"] for message in main.messages[2:]] == ["37+48 20-7", "85 13", RIGHT]
    sampled = [token for token, mask in zip(main.response_ids, main.response_mask) if mask]
    assert tokenizer.decode(sampled) == f"37+48 20-7<|im_end|>{RIGHT}<|im_end|>"


def test_those_who_were_asked_the_same_are_compared(tokenizer):
    """Three rollouts: one is right, one has a wrong sub-agent, one asks nobody."""
    outputs = play(subagents, tokenizer, ROW, "37+48 20-7", FIRST, SECOND, RIGHT)
    lines = ["20-7 37+48", SECOND, "<answer>37</answer>", "<answer>13 37</answer>"]
    outputs += play(subagents, tokenizer, ROW, *lines, sample=1)
    outputs += play(subagents, tokenizer, ROW, "<answer>37 20</answer>", sample=2)
    units = data.by_unit(outputs)
    found = {}
    advantages = grpo_advantages(units.rewards, units.groups, normalize_std=False).tolist()
    for output, group, advantage in zip(outputs, units.groups.tolist(), advantages):
        found.setdefault((group, output.unit), []).append(round(advantage, 3))
    assert sorted((name, sorted(values)) for (_, name), values in found.items()) == [
        ("main", [-0.333, -0.333, 0.667]), ("sub 20-7", [-0.5, 0.5]), ("sub 37+48", [-0.5, 0.5])]  # fmt: skip


def test_an_evaluation_has_the_main_agent_alone(tokenizer):
    lines = ["37+48 20-7", FIRST, SECOND, "<answer>85 14</answer>"]
    (main,) = play(subagents, tokenizer, ROW, *lines, validate=True)
    assert (main.unit, main.reward, len(main.messages)) == ("main", 0.0, 5)


@pytest.mark.parametrize("said", ["<|im_end|>", "What is it?", f"{RIGHT} 1+2", ("37+48", "length")])
def test_what_asks_nothing_ends_the_rollout(tokenizer, said):
    (main,) = play(subagents, tokenizer, ROW, said)
    assert main.reward == 0.0 and len(main.messages) == 3


def test_an_answer_that_is_none_is_passed_on_as_such(tokenizer):
    outputs = play(subagents, tokenizer, ROW, "37+48", "I don't know.", RIGHT)
    assert outputs[-1].messages[3]["content"] == "?" and [output.reward for output in outputs] == [1.0, 1.0]


