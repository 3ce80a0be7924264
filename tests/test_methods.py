"""examples/methods.py: by hand, or beside its peers, written anew from their sources."""

import math

import pytest
import torch
from conftest import batch_with_rewards, output_of

import losses
import train
from examples import methods
from train import Args

NAN = math.nan
close = torch.testing.assert_close
generator = torch.Generator().manual_seed(0)


def draw(*shape) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


LOW, HIGH, CAP = 0.1, 0.15, 1.5  # --clip_low, --clip_high, --clip_c


# ---------------------------------------------------------------- objectives


@pytest.mark.parametrize("kind, slopes, clipped", [
    ("dppo_tv", [-1.1, 0, -0.6, 0, 0.96, CAP, 0], [0, 1, 0, 1, 0, 0, 1]),
    ("dppo_kl", [-1.1, 0, -0.6, 0.6, 0.96, CAP, 0], [0, 1, 0, 0, 0, 0, 1]),
    ("ppo_rollout", [-1.1, 0, -0.6, 0, 0.96, 0, 0], [0, 1, 0, 1, 0, 0, 1]),
])  # fmt: skip
def test_objectives_by_hand(kind, slopes, clipped):
    """The 4th of the tokens has moved by 0.2, or a KL of 0.087, the last by 0.3 and 0.22."""
    mu = torch.tensor([[0.5, 0.5, 0.5, 0.5, 0.5, 0.2, 0.5, NAN]])
    pi = torch.tensor([[0.55, 0.9, 0.3, 0.3, 0.48, 0.7, 0.2, NAN]])
    advantages = torch.tensor([[1.0, 1, 1, -1, -1, -1, -1, NAN]])
    logprobs = pi.log().requires_grad_()
    mask = torch.arange(8)[None] < 7
    arguments = (logprobs, 0 * mu, advantages, mask, LOW, HIGH, CAP)
    loss, stats = losses.policy_loss(kind, *arguments, logprobs_rollout=mu.log())
    slopes = torch.tensor([[*slopes, 0]])
    close(torch.autograd.grad(loss.sum(), logprobs)[0], slopes)
    expected = torch.tensor([[-1.1, -1 - HIGH, -0.6, 1 - LOW, 0.96, CAP, 1 - LOW]])
    if kind != "ppo_rollout":
        expected = slopes[:, :7] * logprobs[:, :7]
    close(loss[:, :7], expected)
    close(stats["clipfrac"][:, :7], torch.tensor([clipped]).float())
    close(stats["ratio"][:, :7], (pi / mu)[:, :7])


def test_opsm():
    """An output with A < 0 teaches nothing where its mean KL exceeds the limit, here 0.6."""
    logprobs = torch.tensor([[-1.0, -2.0, NAN]]).repeat(3, 1).requires_grad_()
    kl = torch.tensor([[0.9, 0.3, 9.0], [0.6, 0.3, 9.0], [0.9, 0.3, 9.0]])
    advantages = torch.tensor([[-1.0], [-1.0], [1.0]]).expand(3, 3)
    mask = torch.arange(3).expand(3, 3) < 2
    arguments = (logprobs, logprobs.detach() - 0.1, advantages, mask, LOW, HIGH, CAP)
    loss, stats = losses.policy_loss("opsm", *arguments, logprobs_rollout=logprobs.detach() + kl)
    plain, _ = losses.policy_loss("ppo", *arguments)
    kept = torch.tensor([[0.0], [1.0], [1.0]])
    close(loss, plain * kept)
    gradients = [torch.autograd.grad(x.sum(), logprobs)[0] for x in (loss, plain * kept)]
    close(*gradients)
    close(stats["opsm_dropped"], (1 - kept) * mask)


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
        output = output_of([1, 1], extra=extra, messages=chat)
        output.reward = methods.reward(output, row)
        outputs.append(output)
    assert outputs[1].reward == {"score": 1.0, "correct": 1.0, "called": 0.0}
    args = Args(adv_estimator="gdpo")
    batch, _ = batch_with_rewards(outputs, args)
    advantages = train.estimate_advantages(batch, train.Rollouts(outputs=outputs), args)[:, 0]
    assert advantages.tolist() == pytest.approx([1.1546, -0.5773, -0.5773], abs=1e-3)
