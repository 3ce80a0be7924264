"""flatrl/watch.py: its warnings about a step's numbers, and about what the step trained."""

import copy
import dataclasses

import pytest
import torch
from conftest import batch_with_rewards
from test_algos import output

import data
import train
from agent_loop import AgentLoopOutput
from flatrl.watch import Watch
from rollout import Rollouts
from train import Args

OUTPUTS = [
    output(0, 0, "1101", 1.0),
    output(0, 1, "11", 0.0),
    output(0, 1, "1", 0.0, segment=1),
    output(1, 0, "1", 0.0),
    output(1, 1, "111", 1.0),
    output(1, 2, "1", 1.0),
]


def batch_of(outputs=OUTPUTS, **tensors) -> data.Batch:
    """A step's batch, in which these tensors then take the place of the right ones."""
    batch, _ = batch_with_rewards(outputs, Args())
    batch["advantages"] = train.estimate_advantages(batch, Rollouts(outputs=outputs), Args())
    batch = copy.copy(batch)
    batch.update(tensors)
    batch["unit_tokens"] = tensors.get("unit_tokens", batch.count_unit_tokens())
    return batch


def step_of(n: int, changes=()) -> dict:
    """The metrics of step n, two prompts a step."""
    return {
        "step": n,
        "rollout/tool_calls": 1.5,
        "num_turns/mean": 4.0,
        "rollout/skipped": 0,
        "rollout/first_prompt": 2 * n - 2,
        "rollout/last_prompt": 2 * n - 1,
        "actor/entropy": 0.5,
        "actor/grad_norm": 0.4,
        "actor/lr": 1e-3,
        "actor/adam_steps": float(n),
    } | dict(changes)


def warnings_of(*steps: dict, batch=None, outputs=OUTPUTS, rows=(), **flags) -> list[str]:
    watch = Watch(Args(**flags), list(rows))
    batch = batch or batch_of(outputs)
    found = []
    for metrics in steps or [step_of(1)]:
        found += watch.step(metrics, outputs, batch)
    return found


def changed(**changes) -> list[AgentLoopOutput]:
    return [dataclasses.replace(each, **changes) for each in OUTPUTS]


def test_a_run_that_is_well_is_not_warned_about():
    steps = [step_of(n, {"actor/grad_norm": 0.9**n}) for n in range(1, 30)]
    assert warnings_of(*steps) == []
    evaluation = {"step": 0, "eval/reward": 0.5}
    assert warnings_of(step_of(3), rows=[evaluation, step_of(1), step_of(2)]) == []
    # A warm-up begins at 0, after that of the critic.
    late = [step_of(1), step_of(2), step_of(3, {"actor/lr": 0.0}), step_of(4)]
    assert warnings_of(*late, warmup_steps=1, critic_warmup=2) == []

    gap = [step_of(1), step_of(2, {"rollout/first_prompt": 5})]
    assert warnings_of(*gap, max_gen_batches=2) == []  # dynamic sampling replaced prompts
    assert warnings_of(gap[0], gap[1] | {"rollout/skipped": 3}) == []
    assert warnings_of(*gap, replay="x") == [] != warnings_of(*gap)  # --dump_rollouts kept these


@pytest.mark.parametrize("name, value, expected", [
    ("rollout/tool_calls", 0.1, "rollout/tool_calls has fallen to 0.1, from 1.5: does the reward "
     "pay for answers without tools and turns? (rollout/tool_calls: docs/running.md#warnings)"),
    ("num_turns/mean", 2.1, "num_turns/mean has fallen to 2.1, from 4"),
    ("num_turns/mean", 2.3, None),
    ("actor/entropy", 2e-4, "the entropy is nearly 0"),
    ("actor/grad_norm", 4.1, "the gradient norm is 4.1, more than ten times its median"),
    ("actor/grad_norm", 3.9, None),
    ("actor/lr", 0.0, "the learning rate is 0: nothing is learnt"),
    ("actor/adam_steps", 6.0, "Adam's states are lost: it starts anew"),
    ("rollout/first_prompt", 11, "the rollouts begin at prompt 11, not 12"),
    ("rollout/first_prompt", 13, "the rollouts begin at prompt 13, not 12"),
    ("stop_reason/abort", 0.1, "the engine aborted answers, and they are trained"),
])  # fmt: skip
def test_numbers_that_do_not_continue_those_before(name, value, expected):
    before = [step_of(n) for n in range(1, 7)]
    metrics = step_of(7, {name: value})
    lines = warnings_of(*before, metrics, step_of(8, {name: value}))
    assert len(lines) == (expected is not None)  # once
    if expected:
        assert lines[0].startswith("step 7: ") and expected in lines[0]
    assert warnings_of(metrics, rows=before) == lines  # the same in a run that was resumed


def test_a_policy_that_stays_far_from_those_that_sampled():
    def steps(*kls):
        return [step_of(n, {"rollout/kl": kl}) for n, kl in enumerate(kls, 1)]

    assert warnings_of(*steps(0.2, 0.3, 0.1, 0.2, 0.3)) == []  # never three in a row
    far = steps(0.2, 0.1, 0.2, 0.11, 0.3, 0.4)
    [line] = warnings_of(*far)
    assert line.startswith("step 5: rollout/kl is 0.3 a token, and has been above 0.1 for 3 steps")
    assert "lower --lr or --max_staleness (rollout/kl: docs/running.md#warnings)" in line
    assert warnings_of(*far[4:], rows=far[:4]) == [line]  # the same in a run that was resumed


def test_advantages_that_do_not_follow_the_rewards():
    advantages = batch_of()["advantages"]
    assert warnings_of(batch=batch_of(advantages=3 * advantages + 1)) == []
    for factor, correlation in (-1, "-1.00"), (0, "0.00"):
        wrong = batch_of(advantages=factor * advantages)
        [line] = warnings_of(batch=wrong)
        assert f"within groups their correlation is {correlation}, not 1" in line
        assert warnings_of(batch=wrong, adv_estimator="gae") == []
    assert warnings_of(outputs=changed(reward=1.0)) == []


def test_the_weight_of_a_unit_and_the_mask():
    mask = batch_of()["response_mask"]
    [line] = warnings_of(batch=batch_of(unit_tokens=mask.sum(-1)))
    assert "a rollout of several outputs weighs more than one of a single output" in line
    kept = torch.tensor([1, 0, 0, 1, 1, 1])[:, None]
    masked = batch_of(response_mask=mask * kept)
    assert warnings_of(batch=masked, mask_truncated=True) == []
    [line] = warnings_of(batch=masked)
    assert "response_mask is wrong at 3 tokens" in line
    shifted = batch_of(response_mask=mask.roll(1, 1))
    assert any("wrong at 12 tokens" in line for line in warnings_of(batch=shifted))


def test_rewards_of_turns_that_are_added_up():
    last = len(OUTPUTS[0].response_ids) - 1
    early, late = (changed(turn_rewards=[(index, 0.5)]) for index in (0, last))
    [line] = warnings_of(outputs=early)
    assert "--adv_estimator grpo adds up the rewards of turns" in line
    assert warnings_of(outputs=early, adv_estimator="gae") == warnings_of(outputs=late) == []


def test_answers_that_are_cut_off_or_not_parsed():
    cut_off = changed(stop_reason="length")
    [line] = warnings_of(outputs=cut_off)
    assert "3 of the 3 best-paid answers were cut off by a limit" in line
    assert warnings_of(outputs=[OUTPUTS[0], *cut_off[1:4], *OUTPUTS[4:]]) == []
    raised = {"tool_calls/ask": 2, "tool_exceptions/ask": 1, "tool_errors/ask": 2}
    [line] = warnings_of(outputs=changed(metrics=raised))
    assert "the tool 'ask' raised at 6 of its 12 calls, and the model read the error" in line
    assert warnings_of(outputs=changed(metrics=raised | {"tool_calls/ask": 3})) == []
    assert warnings_of(outputs=[*changed(metrics=raised)[:2], *OUTPUTS[2:]]) == []  # four calls
    [line] = warnings_of(outputs=changed(text="<tool_call>...", metrics={"tool_calls": 0}))
    assert "6 answers look like tool calls, and none was parsed in them: is --tool_parser" in line
    assert warnings_of(outputs=changed(text="<tool_call>...", metrics={"tool_calls": 1})) == []
