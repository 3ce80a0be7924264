"""Rows with a `demonstration`: how they are read, played by their loop, and learned; a run."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, batch_with_rewards, metrics_of
from test_agent_loop import ANSWER, CALCULATOR, END, ROW, SUM, rollout, tool_turn
from test_algos import output
from torch.testing import assert_close as close

import data
import train
from agent_loop import BadInput, ToolAgentLoop
from flatrl.metrics import batch_metrics
from rollout import DemonstrationEngine, Rollouts
from train import Args


def loaded(**columns) -> dict:
    rows = [{"prompt": "hi"} | columns]
    return data.load_rows(SimpleNamespace(load=lambda split: rows), "train")[0]


def test_rows_without_a_demonstration():
    rows = [loaded(), loaded(demonstration="yes")]
    assert list(data.demonstrated(rows, only=True)) == rows[1:]
    with pytest.raises(BadInput, match="no training row has a 'demonstration'"):
        data.demonstrated(rows[:1], only=False)


def play(tokenizer, turns, **flags):
    """The output of the calculator's loop, and the turns that are left."""
    args = Args(**{"max_response_tokens": 1000} | flags)
    turns = loaded(demonstration=turns)["demonstration"]
    loop = ToolAgentLoop(None, tokenizer, None, CALCULATOR, args)
    loop.engine = DemonstrationEngine(turns, loop, {tokenizer.eos_token_id})
    return asyncio.run(loop.run({}, **ROW)), turns


def test_tools_run_and_masks_are_exact(tokenizer):
    (sampled,), _ = rollout(tokenizer, SUM, ANSWER)
    output, left = play(tokenizer, [sampled.messages[1], ANSWER])
    assert output.response_ids == sampled.response_ids
    assert output.response_mask == sampled.response_mask
    assert left == []
    assert set(output.response_logprobs) == {0.0} and set(output.response_versions) == {-1}
    assert output.messages == sampled.messages


def test_a_loop_that_wants_more_turns_ends_and_one_that_ends_leaves_turns(tokenizer):
    output, left = play(tokenizer, [SUM])
    assert output.stop_reason == "abort" and left == []
    assert tokenizer.decode(output.response_ids) == SUM + END + tool_turn("2")
    _, left = play(tokenizer, [ANSWER, "more"])
    assert [turn["content"] for turn in left] == ["more"]
    with pytest.raises(ValueError, match="has 21 tokens, with room for 20"):
        play(tokenizer, ["x" * 20], max_response_tokens=20)


def step_of(outputs: list, **flags) -> tuple[dict, dict]:
    """The batch and the metrics as train.main has them, with logprobs and values made up."""
    args = Args(**flags)
    rollouts = Rollouts(outputs, seconds=1.0, idle_s=[0.0])
    rollouts.sort()
    made_up = torch.full_like(data.collate(rollouts.trained)["response_mask"], -2.0)
    names = ("logprobs_old", "logprobs_ref", "values")
    batch, metrics = batch_with_rewards(rollouts.trained, args, **dict.fromkeys(names, made_up))
    batch["advantages"] = train.estimate_advantages(batch, rollouts, args)
    return batch, metrics | rollouts.group_metrics() | batch_metrics(batch, 3, args)


@pytest.mark.parametrize("flags", [
    {"adv_estimator": "gae", "whiten_advantages": True, "kl_coef": 0.1, "kl_in": "reward"},
    {"adv_estimator": "gigpo", "max_staleness": 2, "rollout_correction": "tis"},
], ids=lambda flags: flags["adv_estimator"])  # fmt: skip
def test_advantages_and_metrics_do_not_see_demonstrations(flags):
    outputs = [output(0, 0, "111", 1.0, version=3), output(0, 1, "1011", 0.0, version=2)]
    outputs.append(output(4, 0, "11", 1.0, version=1))
    shown = [output(2, 0, "1101", 1.0, version=-1), output(5, 0, "111", 0.25, version=-1)]
    for each in shown:
        each.extra["demonstration"] = True
        each.metrics["states"] = ["a"]
    plain, expected = step_of([*outputs], **flags)
    mixed, metrics = step_of([*outputs, *shown], **flags)
    assert metrics == expected
    close(mixed["advantages"][[0, 1, 3]], plain["advantages"])  # prompts 0, 0, 2, 4, 5
    assert not mixed["advantages"][[2, 4]].any()


def test_first_demonstrated_then_mixed_then_sampled(train_here, tmp_path, monkeypatch):
    """All prompts of the first step have a demonstration, and two of the second step."""
    monkeypatch.setenv("TINY_TASK_SHOWN", "6")
    train_here(*TINY, "--imitation_steps", "2", "--num_steps", "3", "--output_dir", tmp_path)
    _, first, second, third = metrics_of(tmp_path, timings=True)

    assert first["rollout/demonstrations"] == 4
    assert first["timing/sync_s"] == 0  # the engine slept
    assert first["actor/loss"] == first["actor/imitation_loss"] and first["actor/grad_norm"] > 0

    assert (second["rollout/demonstrations"], second["rollout/trajectories"]) == (2, 2 * 4)
    assert second["rollout/logp_diff_max"] < 1e-3 and second["actor/entropy"] > 1
    assert second["actor/imitation_loss"] < first["actor/imitation_loss"]
    assert third["rollout/trajectories"] == 16
