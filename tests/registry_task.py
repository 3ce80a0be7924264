"""tests/tiny_task.py with estimators and an objective of its own, as a user's task file registers them."""

from losses import estimator, gae, objective
from tests.tiny_task import build_model, load, reward  # noqa: F401


@estimator("median")
def median(rewards, groups):
    """Rewards minus their group's median."""
    medians = [rewards[groups == group].quantile(0.5) for group in groups]
    return rewards - rewards.new_tensor(medians)


@estimator("half_gae")
def half_gae(token_rewards, values, mask, args):
    """One that has a critic."""
    advantages, returns = gae(token_rewards, values, mask, args.gamma, args.lam)
    return advantages / 2, returns


@objective("mine")
def mine(logprobs, logprobs_old, ratio, entropy, advantages, mask, args):
    """Clips the ratio above alone; its stats show what it got."""
    loss = -ratio.clamp(max=1 + args.clip_high) * advantages
    return loss, {"advantage": advantages, "surprise": entropy, "moved": logprobs - logprobs_old, "here": mask}
