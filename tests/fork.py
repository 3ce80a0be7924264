"""A pytest plugin, `-p fork`: adds to our registries what a fork of this repository may add."""

import losses
import train


@losses.estimator("forked")
def forked(rewards):
    return rewards


@losses.objective("forked")
def forked_objective(ratio, advantages):
    return -ratio * advantages


train.PRESETS["forked"] = dict(adv_estimator="forked", policy_loss="forked")
losses.ROLLOUT_CORRECTIONS |= {"forked": (0.0, 1.0)}
losses.KL_ESTIMATES += ("forked",)
losses.AGGREGATIONS += ("forked",)
