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
LOW, HIGH, CAP = 0.1, 0.15, 1.5  # --clip_low, --clip_high, --clip_c
close = torch.testing.assert_close
generator = torch.Generator().manual_seed(0)


def draw(*shape) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def test_dppo_tv():
    """The second, fourth and last token have moved too far in the direction of the advantage."""
    mu = torch.tensor([[0.5, 0.5, 0.5, 0.5, 0.5, 0.2, 0.5, NAN]])
    pi = torch.tensor([[0.55, 0.9, 0.3, 0.3, 0.48, 0.7, 0.2, NAN]])
    advantages = torch.tensor([[1.0, 1, 1, -1, -1, -1, -1, NAN]])
    logprobs = pi.log().requires_grad_()
    mask = torch.arange(8)[None] < 7
    arguments = (logprobs, 0 * mu, advantages, mask, LOW, HIGH, CAP)
    loss, stats = losses.policy_loss("dppo_tv", *arguments, logprobs_rollout=mu.log())
    slopes = torch.tensor([[-1.1, 0, -0.6, 0, 0.96, CAP, 0, 0]])
    close(torch.autograd.grad(loss.sum(), logprobs)[0], slopes)
    close(loss[:, :7], (slopes * logprobs)[:, :7])
    close(stats["clipfrac"][:, :7], torch.tensor([[0.0, 1, 0, 1, 0, 0, 1]]))


def test_opsm():
    """An output with A < 0 teaches nothing where its mean KL exceeds the limit, here 0.6."""
    logprobs = torch.tensor([[-1.0, -2.0, NAN]]).repeat(3, 1).requires_grad_()
    kl = torch.tensor([[0.9, 0.3, 9.0], [0.6, 0.3, 9.0], [0.9, 0.3, 9.0]])
    advantages = torch.tensor([[-1.0], [-1.0], [1.0]]).expand(3, 3)
    mask = torch.arange(3).expand(3, 3) < 2
    arguments = (logprobs, logprobs.detach() - 0.1, advantages, mask, LOW, HIGH, CAP)
    loss, _ = losses.policy_loss("opsm", *arguments, logprobs_rollout=logprobs.detach() + kl)
    plain, _ = losses.policy_loss("ppo", *arguments)
    expected = plain * torch.tensor([[0.0], [1.0], [1.0]])
    close(loss, expected)
    close(*(torch.autograd.grad(x.sum(), logprobs)[0] for x in (loss, expected)))


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
    close(methods.gdpo(parts, groups), expected.float(), atol=1e-6, rtol=0)


def test_a_moving_baseline_per_role():
    state = {}
    rewards = torch.tensor([1.0, 0.0, 0.5, 1.0, 9.0])
    mask = torch.tensor([[1], [1], [1], [1], [0]])  # the last is a demonstration
    advantages = methods.rae(rewards, ["first", "second", "first", "second", "first"], mask, state)
    close(advantages, torch.tensor([0.95, 0.0, 0.4275, 0.95, 0.0]))
    assert state == pytest.approx({"first": 0.0725, "second": 0.05})


def test_a_guess_is_as_good_as_what_it_adds_to_the_value():
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [0, 1, 1, 0, 1, 1], [0, 1, 0, 1, 1, 1]])
    rewards = torch.zeros(3, 6)
    rewards[0, 5] = 1.0
    states = torch.tensor([0, 1, 0, 2, 0, 1])  # won from: 0 one in three, 1 one in two, 2 none
    up, down, won, lost = 1 / 2 - 1 / 3, -1 / 3, 1 / 2, -1 / 2
    expected = [
        [0, up, up, 0, won, won],
        [0, down, down, 0, 0, 0],
        [0, up, 0, lost, lost, lost],
    ]
    close(methods.by_state(rewards, mask, states), torch.tensor(expected))


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
    args = Args(adv_estimator="gdpo")
    batch, _ = batch_with_rewards(outputs, args)
    advantages = train.estimate_advantages(batch, train.Rollouts(outputs=outputs), args)[:, 0]
    assert advantages.tolist() == pytest.approx([1.1546, -0.5773, -0.5773], abs=1e-3)
