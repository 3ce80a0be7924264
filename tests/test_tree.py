"""examples/tree.py against a script, and on the real engine."""

import asyncio

import pytest
from conftest import REPO
from test_example_tasks import END, Script

import data
from agent_loop import agent_loop_class
from losses import grpo_advantages
from rollout import score
from train import Args

tree = data.load_task(str(REPO / "examples" / "tree.py"))


def play(task, tokenizer, row: dict, *lines, sample: int = 0, validate: bool = False, **args) -> list:
    """The graded outputs of one rollout by the task's own loop, marked as a pool marks them."""
    args = Args(**{"max_response_tokens": 200} | args)
    engine = Script(tokenizer, lines)
    loop = agent_loop_class(row, task, args)(engine, tokenizer, None, task, args)
    outputs = asyncio.run(loop.run({}, **row, step=0, rollout_n=sample, validate=validate))
    assert engine.calls == len(lines)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    for segment, output in enumerate(outputs):
        output.extra |= {"prompt": 0, "sample": sample, "segment": segment}
    asyncio.run(score(task, outputs, row))
    return outputs


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37+48"}}\n</tool_call>'
QUESTION = {
    "prompt": [{"role": "user", "content": "What is 37+48?"}], "agent_name": "tree",
    "reward_model": {"ground_truth": "85"},
}  # fmt: skip


def test_branches_after_the_first_call(tokenizer):
    said = ["<answer>85</answer>", "<answer>37</answer>", "<answer>37</answer>", "<answer>37</answer>"]
    trunk, *leaves = play(tree, tokenizer, QUESTION, CALL, *said, sample=3)
    assert [(leaf.unit, leaf.group, leaf.reward) for leaf in leaves] == [
        (f"leaf {i}", "3/turn 1", float(i == 0)) for i in range(4)]  # fmt: skip
    assert (trunk.unit, trunk.group, trunk.reward) == ("trunk", "", 0.25)
    assert trunk.text.count("calculator") == 0 and trunk.messages[-1]["content"] == "85"
    prefix = trunk.prompt_ids + trunk.response_ids
    for leaf, text in zip(leaves, said):
        assert leaf.prompt_ids == prefix  # whole, and the leaf's own tokens alone are trained in it
        assert tokenizer.decode(leaf.response_ids) == text + END and set(leaf.response_mask) == {1}
        assert [message["role"] for message in leaf.messages] == ["user", "assistant", "tool", "assistant"]
        assert leaf.messages[-1]["content"] == text
    assert trunk.metrics["tool_calls"] == 1 and not any("tool_calls" in leaf.metrics for leaf in leaves)


def test_siblings_are_compared_and_trunks(tokenizer):
    """Three rollouts of a prompt: of the first half the leaves are right, of the second all, the third has none."""
    right, wrong = "<answer>85</answer>", "<answer>37</answer>"
    outputs = play(tree, tokenizer, QUESTION, CALL, right, right, wrong, wrong)
    outputs += play(tree, tokenizer, QUESTION, CALL, right, right, right, right, sample=1)
    outputs += play(tree, tokenizer, QUESTION, wrong, sample=2)
    units = data.by_unit(outputs)
    groups = [[o.unit for o, g in zip(outputs, units.groups) if g == group] for group in units.groups.unique()]
    leaves = [f"leaf {i}" for i in range(4)]
    assert sorted(groups) == [leaves, leaves, ["trunk"] * 3]
    advantages = grpo_advantages(units.rewards, units.groups, normalize_std=False).tolist()
    assert advantages[1:5] == [0.5, 0.5, -0.5, -0.5] and advantages[6:10] == [0] * 4
    assert [advantages[i] for i in (0, 5, 10)] == pytest.approx([0, 0.5, -0.5])


def test_an_evaluation_has_no_branches(tokenizer):
    (output,) = play(tree, tokenizer, QUESTION, CALL, "<answer>85</answer>", validate=True)
    assert (output.unit, output.group, output.reward) == ("", "", 1.0)
    assert len(output.messages) == 4


