"""The tiny task with an estimator and an objective of its own, as a task file registers them."""

import torch

from losses import estimator, gae, objective
from tests.tiny_task import build_model, load, reward  # noqa: F401


@estimator("everything")
def everything(
    parts,
    entropy,
    logprobs_old,
    logprobs_rollout,
    logprobs_ref,
    versions,
    state,
    mask,
    token_rewards,
    values,
    args,
):
    """Checks its inputs in a real run, in which the reference is the first policy."""
    is_token = mask.bool()
    step = state["steps"] = state.get("steps", 0) + 1
    for each in (entropy, logprobs_old, logprobs_rollout, logprobs_ref):
        assert each.shape == mask.shape and not each[~is_token].any()
    torch.testing.assert_close(logprobs_old, logprobs_rollout, atol=1e-3, rtol=0)
    assert torch.equal(logprobs_old, logprobs_ref) == (step == 1)
    assert (entropy[is_token] > 0).all()
    assert (versions[is_token] == step - 1).all()
    assert parts == {}  # the tiny task's reward is a number
    return gae(token_rewards, values, mask, args.gamma, args.lam)


@objective("everything")
def all_columns(logprobs, logprobs_rollout, logprobs_ref, versions, entropy):
    """Its stats show its inputs."""
    distance = logprobs - logprobs_ref
    mismatch = logprobs - logprobs_rollout
    stats = {"distance": distance.abs(), "mismatch": mismatch.abs(), "version": versions.float()}
    return -logprobs, stats | {"surprise": entropy}
