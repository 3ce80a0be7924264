"""tests/tiny_task.py with an estimator and an objective of its own, as a task file registers them."""

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
def mine(logprobs, logprobs_old, ratio, entropy, advantages, mask, clip_high):
    """Clips the ratio from above only. Its stats show its inputs."""
    loss = -ratio.clamp(max=1 + clip_high) * advantages
    stats = {"advantage": advantages, "moved": logprobs - logprobs_old}
    return loss, stats | {"surprise": entropy, "here": mask}
