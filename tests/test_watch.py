"""What flatrl.watch says of a step's numbers, and of what it trained."""

import dataclasses

import pytest
import torch
from test_algos import output

import data
import train
from flatrl.watch import Watch
from rollout import Phase
from train import Args

FINE = {
    "reward/mean": 0.5, "rollout/tool_calls": 1.5, "num_turns/mean": 4.0, "rollout/singleton_groups": 0,
    "rollout/skipped": 0, "rollout/filtered_groups": 0, "rollout/logp_diff_mean": 1e-7, "actor/entropy": 0.5,
    "actor/grad_norm": 0.4, "actor/lr": 1e-3,
}  # fmt: skip
OUTPUTS = [output(0, 0, "1101", 1.0), output(0, 1, "11", 0.0), output(0, 1, "1", 0.0, segment=1),
           output(1, 0, "1", 0.0), output(1, 1, "111", 1.0), output(1, 2, "1", 1.0)]  # fmt: skip


def batch_of(outputs=OUTPUTS) -> dict:
    batch = data.collate(outputs) | {"units": data.by_unit(outputs)}
    batch["unit_tokens"] = data.unit_tokens(batch["response_mask"], batch["units"].index)
    train.shape_rewards(batch, outputs, 0.0, Args())
    batch["advantages"] = train.estimate_advantages(batch, Phase(outputs=outputs), Args())
    return batch


def step_of(n: int, **changed) -> dict:
    """The metrics of step n, two prompts a step; keywords change them (tool_calls is rollout/tool_calls)."""
    metrics = FINE | {"step": n, "rollout/first_prompt": 2 * n - 2, "rollout/last_prompt": 2 * n - 1}
    metrics["actor/adam_steps"] = float(n)
    for name, value in changed.items():
        (key,) = [key for key in metrics if key == name or key.endswith(f"/{name}")]
        metrics[key] = value
    return metrics


def warnings_of(*steps: dict, batch=None, outputs=OUTPUTS, rows=(), **flags) -> list[str]:
    watch = Watch(Args(**flags), list(rows))
    return [line for metrics in steps for line in watch.step(metrics, outputs, batch or batch_of(outputs))]


def test_a_run_that_is_well_is_not_warned_of():
    assert warnings_of(*(step_of(n, entropy=0.5 / n, grad_norm=0.9**n) for n in range(1, 30))) == []
    sleepy = [step_of(1, adam_steps=0.0, lr=0.0), step_of(2, adam_steps=1.0)]  # a warm-up begins at 0
    assert warnings_of(*sleepy, warmup_steps=3) == []
    late = [step_of(1, lr=1e-3), step_of(2), step_of(3, lr=0.0), step_of(4)]  # the policy's first step is the third
    assert warnings_of(*late, warmup_steps=1, critic_warmup=2) == []
    assert "the learning rate is 0" in warnings_of(*late, warmup_steps=1)[0]
    assert warnings_of(step_of(3), rows=[{"step": 0, "eval/reward": 0.5}, step_of(1), step_of(2)]) == []


@pytest.mark.parametrize(("changed", "named"), [
    ({"tool_calls": 0.1}, "rollout/tool_calls has fallen to 0.1, from 1.5: does the reward pay for answers without "
     "tools and turns? (docs/zoo.md, rollout/tool_calls)"),
    ({"num_turns/mean": 2.1}, "num_turns/mean has fallen to 2.1, from 4"),
    ({"num_turns/mean": 2.3}, None),
    ({"entropy": 2e-4}, "the entropy is nearly 0"),
    ({"grad_norm": 4.1}, "the gradient norm is 4.1, more than ten times its median"),
    ({"grad_norm": 3.9}, None),
    ({"lr": 0.0}, "the learning rate is 0: nothing is learnt"),
    ({"adam_steps": 6.0}, "Adam's states are lost: it starts anew"),
    ({"first_prompt": 11}, "the rollouts begin at prompt 11, not 12: prompts are trained twice, or lost"),
    ({"first_prompt": 13}, "the rollouts begin at prompt 13, not 12: prompts are trained twice, or lost"),
    ({"singleton_groups": 1}, None),  # a sub-agent that one rollout alone has asked; a failure is printed where it is
    ({"logp_diff_mean": 2e-5}, "rollout/logp_diff_mean, between engine and trainer, has grown tenfold since the first "
     "step, from 1.0e-07"),
    ({"logp_diff_mean": 9e-6}, None),
])  # fmt: skip
def test_numbers_that_do_not_go_on_as_before(changed, named):
    metrics = step_of(7, **changed)
    before = [step_of(n) for n in range(1, 7)]
    lines = warnings_of(*before, metrics, step_of(8, **changed))
    assert len(lines) == (named is not None)  # once
    if named:
        assert lines[0].startswith("step 7: ") and named in lines[0]
    assert warnings_of(metrics, rows=before) == lines  # the same in a run that was resumed


def test_what_other_flags_expect():
    gap = [step_of(1), step_of(2, first_prompt=5)]
    assert len(warnings_of(*gap)) == 1
    assert warnings_of(*gap, max_gen_batches=2) == []  # dynamic sampling replaced prompts
    assert warnings_of(gap[0], gap[1] | {"rollout/skipped": 3}) == []
    assert warnings_of(step_of(1), step_of(2, logp_diff_mean=1.0), replay="x") == []
    (line,) = warnings_of(step_of(1), max_gen_batches=2, filter_metric="total")
    assert "--filter_metric total: turn rewards nearly always differ" in line
    works = step_of(1) | {"rollout/filtered_groups": 1}
    assert warnings_of(works, max_gen_batches=2, filter_metric="total") == []
    aborted = warnings_of(step_of(1) | {"stop_reason/abort": 0.1})
    assert aborted == ["step 1: the engine aborted answers, and they are trained (docs/zoo.md, abort)"]


def test_advantages_that_do_not_follow_the_rewards():
    batch = batch_of()
    assert warnings_of(step_of(1), batch=batch | {"advantages": 3 * batch["advantages"] + 1}) == []
    for wrong, correlation in ((-batch["advantages"], "-1.00"), (0 * batch["advantages"], "0.00")):
        (line,) = warnings_of(step_of(1), batch=batch | {"advantages": wrong})
        assert f"within groups their correlation is {correlation}, not 1" in line
    assert warnings_of(step_of(1), batch=batch | {"advantages": -batch["advantages"]}, adv_estimator="gae") == []
    alike = [dataclasses.replace(each, reward=1.0) for each in OUTPUTS]
    assert warnings_of(step_of(1), outputs=alike) == []


def test_the_weight_of_a_unit():
    batch = batch_of()
    (line,) = warnings_of(step_of(1), batch=batch | {"unit_tokens": batch["response_mask"].sum(-1)})
    assert "a rollout of several outputs weighs more than one of a single output" in line
    masked = batch | {"response_mask": batch["response_mask"] * torch.tensor([1, 0, 0, 1, 1, 1])[:, None]}
    masked["unit_tokens"] = data.unit_tokens(masked["response_mask"], batch["units"].index)
    assert warnings_of(step_of(1), batch=masked, mask_truncated=True) == []
    (line,) = warnings_of(step_of(1), batch=masked)
    assert "response_mask is wrong at 3 tokens: sampled ones are not trained, or others are" in line
    shifted = batch | {"response_mask": batch["response_mask"].roll(1, 1)}
    shifted["unit_tokens"] = data.unit_tokens(shifted["response_mask"], batch["units"].index)
    (line,) = [line for line in warnings_of(step_of(1), batch=shifted) if "response_mask" in line]
    assert "wrong at 12 tokens" in line


def test_what_is_paid_for():
    cut_off = [dataclasses.replace(each, stop_reason="length") if each.reward else each for each in OUTPUTS]
    (line,) = warnings_of(step_of(1), outputs=cut_off)
    assert "3 of the 3 best-paid answers were cut off by a limit" in line
    assert warnings_of(step_of(1), outputs=[*OUTPUTS[:1], *cut_off[1:4], *OUTPUTS[4:]]) == []
    calls = [dataclasses.replace(each, text="<tool_call>...", metrics={"tool_calls": 0}) for each in OUTPUTS]
    (line,) = warnings_of(step_of(1), outputs=calls)
    assert "6 answers look like tool calls, and none was parsed in them: is --tool_parser hermes the model's?" in line
    parsed = [dataclasses.replace(each, metrics={"tool_calls": 1}) for each in calls]
    assert warnings_of(step_of(1), outputs=parsed) == []
