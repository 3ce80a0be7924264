"""The tiny task with estimators and an objective of its own, as a task file registers them."""

import torch

from losses import estimator, gae, objective
from tests.tiny_task import build_model, load, reward  # noqa: F401


@estimator("quarter")
def quarter(rewards, groups):
    """The same for all."""
    return torch.full_like(rewards, 0.25)


@estimator("half_gae")
def half_gae(token_rewards, values, mask, args):
    """One that has a critic."""
    advantages, returns = gae(token_rewards, values, mask, args.gamma, args.lam)
    return advantages / 2, returns


@objective("mine")
def mine(ratio, entropy, advantages, clip_high):
    """Clips the ratio from above only. Its stats show its inputs."""
    loss = -ratio.clamp(max=1 + clip_high) * advantages
    return loss, {"advantage": advantages, "surprise": entropy}
