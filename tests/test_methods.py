"""examples/methods.py beside its peers, written anew from their sources, one token at a time."""

import math

import pytest
import torch
from conftest import batch_with_rewards, output_of

import losses
import train
from agent_loop import AgentLoopOutput
from examples import methods
from train import Args

NAN = math.nan
close = torch.testing.assert_close
generator = torch.Generator().manual_seed(0)


def draw(*shape) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


LOW, HIGH, CAP = 0.1, 0.15, 1.5  # --clip_low, --clip_high, --clip_c


# ---------------------------------------------------------------- objectives, by token


def dppo(logprob, pi, mu, advantage, inside_above, inside_below):
    """verl's compute_policy_loss_dppo_*: a detached, truncated ratio, and a mask by sign."""
    is_valid = inside_above if advantage > 0 else inside_below
    return -advantage * min(pi / mu, CAP) * logprob * is_valid


def verl_dppo_tv(logprob, mu, advantage):
    pi = logprob.exp().item()
    return dppo(logprob, pi, mu, advantage, pi - mu <= HIGH, pi - mu >= -LOW)


def verl_dppo_kl(logprob, mu, advantage):
    pi = logprob.exp().item()
    kl = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu + 1e-8) / (1 - pi + 1e-8))
    return dppo(
        logprob, pi, mu, advantage, kl <= HIGH or pi <= mu, kl <= LOW or pi >= mu
    )  # fmt: skip


def verl_bypass_ppo(logprob, mu, advantage):
    """verl's compute_policy_loss_vanilla, where old_log_prob is the rollout's."""
    ratio = logprob.exp() / mu
    loss = max(-advantage * ratio, -advantage * ratio.clamp(1 - LOW, 1 + HIGH))
    return min(loss, -advantage * torch.tensor(CAP)) if advantage < 0 else loss


def inputs():
    """Returns logprobs with gradient, logprobs_rollout, advantages and a mask with gaps."""
    mask = draw(40, 9) < 0.8
    rollout = (0.05 + 0.9 * draw(40, 9)).log()
    logprobs = (rollout + 1.5 * (draw(40, 9) - 0.5)).clamp(max=-0.01)
    advantages = draw(40, 9) - 0.5
    columns = [x.where(mask, NAN) for x in (logprobs, rollout, advantages)]
    return columns[0].requires_grad_(), columns[1], columns[2], mask


@pytest.mark.parametrize("kind, peer", [
    ("dppo_tv", verl_dppo_tv),
    ("dppo_kl", verl_dppo_kl),
    ("ppo_rollout", verl_bypass_ppo),
])  # fmt: skip
def test_objectives_by_token(kind, peer):
    logprobs, rollout, advantages, mask = inputs()
    old = torch.zeros_like(rollout)  # not used
    loss, stats = losses.policy_loss(
        kind, logprobs, old, advantages, mask, LOW, HIGH, CAP, logprobs_rollout=rollout
    )
    expected = torch.zeros_like(loss)
    for b, t in mask.nonzero().tolist():
        mu = rollout[b, t].exp().item()
        expected[b, t] = peer(logprobs[b, t], mu, advantages[b, t].item())
    close(loss, expected, atol=1e-6, rtol=0)
    gradients = [torch.autograd.grad(x.sum(), logprobs)[0] for x in (loss, expected)]
    close(*gradients, atol=1e-6, rtol=0)
    assert 0.05 < stats["clipfrac"][mask].mean() < 0.95
    close(stats["ratio"][mask], (logprobs - rollout).exp()[mask])


def test_opsm():
    """TRL's get_off_policy_mask: keep an output if A >= 0 or its KL is small."""
    logprobs, rollout, advantages, mask = inputs()
    advantages = advantages.nan_to_num()[:, :1].expand(mask.shape)
    shift = 2 * draw(40, 1) - 1
    rollout = rollout + shift
    old = logprobs.detach() + 0.3
    arguments = (logprobs, old, advantages, mask, LOW, HIGH, CAP)
    loss, stats = losses.policy_loss("opsm", *arguments, logprobs_rollout=rollout)
    kept = torch.ones_like(mask)
    for b in range(len(mask)):
        kl = [(rollout[b, t] - logprobs[b, t]).item() for t in range(9) if mask[b, t]]
        kept[b] = advantages[b, 0] >= 0 or sum(kl) / len(kl) <= methods.OPSM_LIMIT
    plain, _ = losses.policy_loss("ppo", *arguments)
    close(loss, plain * kept, atol=1e-6, rtol=0)
    gradients = [torch.autograd.grad(x.sum(), logprobs)[0] for x in (loss, plain * kept)]
    close(*gradients, atol=1e-6, rtol=0)
    assert torch.equal(stats["opsm_dropped"].bool(), ~kept & mask)
    assert 2 < (~kept[:, 0]).sum() < 20


# ---------------------------------------------------------------- estimators


def test_gdpo():
    """TRL's multi_objective_aggregation="normalize_then_sum"."""
    table = draw(6, 4, 3).round(decimals=1)  # groups, samples, parts
    table[2, :, 1] = 0.5  # equal: that part says nothing
    table[4, 1, 2] = NAN
    total = torch.zeros(6, 4, dtype=torch.float64)
    for group in range(6):
        for part in range(3):
            values = table[group, :, part]
            known = values[~values.isnan()]
            total[group] += ((values - known.mean()) / (known.std() + 1e-4)).nan_to_num()
    expected = ((total - total.mean()) / (total.std() + 1e-4)).flatten()

    parts = {str(part): table[:, :, part].flatten() for part in range(3)}
    groups = torch.arange(6).repeat_interleave(4)
    order = torch.randperm(24, generator=generator)
    parts = {name: part[order] for name, part in parts.items()}
    close(methods.gdpo(parts, groups[order]), expected[order].float(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("noise", [0.2, 1.0, 4.0])
def test_m2po(noise):
    """AReaL's _get_m2po_loss_mask: drop the largest squares until the mean of the rest is small."""
    mask = (draw(8, 12) < 0.7).float()
    old = -draw(8, 12)
    rollout = old + noise * (draw(8, 12) - 0.5)
    squares = {tuple(at): (old - rollout)[tuple(at)].item() ** 2 for at in mask.nonzero().tolist()}
    left = sorted(squares, key=squares.get)
    while len(left) > 1 and sum(squares[at] for at in left) / len(left) >= methods.M2_LIMIT:
        left.pop()
    rewards, groups = draw(8), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    expected = torch.zeros_like(old)
    for at in left:
        expected[at] = losses.grpo_advantages(rewards, groups)[at[0]]
    close(methods.m2po(rewards, groups, mask, old, rollout), expected, atol=1e-6, rtol=0)
    n_dropped = len(squares) - len(left)
    assert {0.2: n_dropped == 0, 1.0: 0 < n_dropped < 40, 4.0: n_dropped > 40}[noise]


def test_a_moving_baseline_per_role():
    """SPIRAL's: the baseline moves first, and the advantage is what is left."""
    state = {}
    baselines = {"first": 0.0, "second": 0.0}
    names = ["first", "second", "first", "second", "second"]
    for _ in range(3):  # steps
        rewards = draw(5)
        advantages = methods.rae(rewards, names, state)
        for i, name in enumerate(names):
            baselines[name] = 0.95 * baselines[name] + 0.05 * rewards[i].item()
            close(advantages[i].item(), rewards[i].item() - baselines[name], atol=1e-6, rtol=0)
    assert state == pytest.approx(baselines) and min(state.values()) > 0


# ---------------------------------------------------------------- the task


def test_the_task_gives_gdpo_its_parts():
    row = {"reward_model": {"ground_truth": "4"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{}]}
    outputs = []
    for sample, called, answer in ((0, True, 4), (1, False, 4), (2, True, 5)):
        chat = [call] * called + [{"role": "assistant", "content": f"<answer>{answer}</answer>"}]
        extra = {"prompt": 0, "sample": sample, "segment": 0}
        output: AgentLoopOutput = output_of([1, 1], extra=extra, messages=chat)
        output.reward = methods.reward(output, row)
        outputs.append(output)
    assert outputs[1].reward == {"score": 1.0, "correct": 1.0, "called": 0.0}
    args = Args(adv_estimator="gdpo")
    batch, _ = batch_with_rewards(outputs, args)
    advantages = train.estimate_advantages(batch, train.Rollouts(outputs=outputs), args)[:, 0]
    assert advantages.tolist() == pytest.approx([1.1546, -0.5773, -0.5773], abs=1e-3)
