"""Methods as functions of a task file, most of them of recent papers: to use and to copy.

    accelerate launch train.py --task examples/methods.py --adv_estimator gdpo
    accelerate launch train.py --task examples/methods.py --policy_loss dppo_tv --clip_low 0.15 \
        --clip_high 0.15
    accelerate launch train.py --task examples/methods.py --policy_loss dppo_kl --clip_low 0.05 \
        --clip_high 0.05 --max_staleness 2 --rollout_correction none

The task is the calculator's, with a reward of two parts. Two letters in the formulas:

    mu   the policy that sampled the token: logprobs_rollout, from the engine
    pi   the policy in training

`dppo_tv`, `dppo_kl` and `ppo_rollout` measure the ratio from mu. It then already contains what
--rollout_correction would multiply by: with --max_staleness, pass `--rollout_correction none`.

The optimal token baseline (arXiv 2602.07078) is missing. It needs, at each position, the sum of the
squared probabilities of all tokens, which `losses.token_logprobs` does not return."""

import torch
from torch import no_grad

from examples import calculator
from examples.calculator import SYSTEM_PROMPT, TOOLS, build_model, load  # noqa: F401
from losses import (
    OBJECTIVES,
    estimator,
    group_sum,
    grpo_advantages,
    objective,
    turn_starts,
)

M2_LIMIT = 0.04  # m2po: the largest mean square of log(pi / mu)
OPSM_LIMIT = 0.5  # opsm: the largest mean of log(mu / pi) over an output
DECAY = 0.95  # rae: the weight of the old baseline

ppo = OBJECTIVES["ppo"]


def reward(output, row: dict) -> dict[str, float]:
    """Returns 1 for the right answer, and 1 for a call of the calculator as another part.

    The score is that of the answer alone. `gdpo` learns from both parts."""
    correct = calculator.reward(output, row)
    called = any(message.get("tool_calls") for message in output.messages)
    return {"score": correct, "correct": correct, "called": float(called)}


# --------------------------------------------------------------------------------------------------
# Objectives: tensors are (b, T), and 0 where the mask is 0


def weighted_reinforce(logprobs, logprobs_rollout, advantages, dropped, clip_c):
    """Returns -sg[min(pi / mu, clip_c)] A log pi, 0 where `dropped`, and stats.

    sg is a stop-gradient. Without --clip_c the bound is 20, as in verl."""
    ratio = (logprobs.detach() - logprobs_rollout).clamp(-20, 20).exp()
    loss = -ratio.clamp(max=clip_c or 20) * advantages * logprobs
    return loss.masked_fill(dropped, 0), {"ratio": ratio, "clipfrac": dropped}


@objective("dppo_tv")
def dppo_tv(logprobs, logprobs_rollout, advantages, clip_low, clip_high, clip_c):
    """DPPO with the binary total variation (arXiv 2602.04879; verl's dppo_tv).

    REINFORCE with the weight pi / mu, which drops a token if the probability of the sampled token
    has already moved too far in the direction of its advantage:

        A > 0 and pi - mu > clip_high,  or  A <= 0 and pi - mu < -clip_low

    A rare token may thus gain a large ratio, and a frequent one may not lose much. verl sets both
    bounds to 0.15."""
    moved = logprobs.exp() - logprobs_rollout.exp()
    dropped = torch.where(advantages > 0, moved > clip_high, moved < -clip_low)
    return weighted_reinforce(logprobs, logprobs_rollout, advantages, dropped, clip_c)


@objective("dppo_kl")
def dppo_kl(logprobs, logprobs_rollout, advantages, clip_low, clip_high, clip_c):
    """DPPO with the binary KL divergence (arXiv 2602.04879; verl's dppo_kl).

    As `dppo_tv`, but the distance is the KL of two outcomes, the sampled token or any other:

        mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))

    It must not exceed clip_high where A > 0 and pi > mu, and clip_low where A <= 0 and pi < mu.
    verl sets both bounds to 0.05."""
    pi = logprobs.exp()
    mu = logprobs_rollout.exp()
    others = (1 - mu) * ((1 - mu + 1e-8) / (1 - pi + 1e-8)).log()
    kl = mu * (logprobs_rollout - logprobs) + others
    too_high = (kl > clip_high) & (pi > mu)
    too_low = (kl > clip_low) & (pi < mu)
    dropped = torch.where(advantages > 0, too_high, too_low)
    return weighted_reinforce(logprobs, logprobs_rollout, advantages, dropped, clip_c)


@objective("ppo_rollout")
def ppo_rollout(logprobs, logprobs_rollout, advantages, clip_low, clip_high, clip_c):
    """PPO (arXiv 1707.06347) whose ratio is pi / mu: `--rollout_correction bypass` as an objective.

        max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)),  r = pi / mu

    A single update per rollout then has a trust region, too: r differs from 1 with
    --max_staleness, and where engine and trainer disagree."""
    ratio = (logprobs - logprobs_rollout).clamp(-20, 20).exp()
    loss, stats = ppo(ratio, advantages, clip_low, clip_high, clip_c)
    return loss, stats | {"ratio": ratio}


@objective("opsm")
def opsm(logprobs, logprobs_rollout, ratio, advantages, mask, clip_low, clip_high, clip_c):
    """PPO with off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, eq. 9).

    The loss of a token is 0 if both are true:

        A < 0  and  mean over the output's tokens of log(mu / pi) > OPSM_LIMIT

    The policy learns from its own mistakes, not from those of a policy that it has left behind.
    slime and TRL have it as --use-opsm and off_policy_mask_threshold."""
    loss, stats = ppo(ratio, advantages, clip_low, clip_high, clip_c)
    distances = (logprobs_rollout - logprobs).sum(1, keepdim=True)
    distance = distances / mask.sum(1, keepdim=True).clamp(min=1)  # (b, 1)
    dropped = (advantages < 0) & (distance > OPSM_LIMIT)
    return loss.masked_fill(dropped, 0), stats | {"opsm_dropped": dropped}


# --------------------------------------------------------------------------------------------------
# Estimators: N units, by default rollouts, with S tokens


@estimator("gdpo")
@no_grad
def gdpo(parts, groups):
    """GDPO (arXiv 2601.05242; TRL's normalize_then_sum): each part of the reward counts alike.

        B = sum over parts k of (r_k - mean_G(r_k)) / (std_G(r_k) + 1e-4)
        A = (B - mean(B)) / (std(B) + 1e-4)    over the whole batch

    GRPO normalises the sum of the parts, in which a part of small variance is lost. Where a reward
    lacks a part, that part adds nothing. The parts are all numbers of the reward's dict but the
    score: choose some by name, if others are only logged."""
    total = torch.zeros(len(groups))
    for part in parts.values():
        known = ~part.isnan()
        total[known] += grpo_advantages(part[known], groups[known], eps=1e-4)
    return (total - total.mean()) / (total.std() + 1e-4)


@estimator("m2po")
@no_grad
def m2po(rewards, groups, mask, logprobs_old, logprobs_rollout):
    """GRPO without the most off-policy tokens: M2PO (arXiv 2510.01161; AReaL's m2_threshold).

    With d = log(pi / mu) of each token before the update, the tokens with the largest d^2 get
    A = 0, as many as necessary for

        mean of d^2 over the tokens that are left < M2_LIMIT

    They still count in the mean of the loss, as in the paper's."""
    advantages = grpo_advantages(rewards, groups)[:, None] * mask
    is_token = mask.bool()
    squares = (logprobs_old - logprobs_rollout)[is_token].double().square()
    ordered, order = squares.sort()
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)
    n_kept = max(1, (means < M2_LIMIT).sum())  # means never fall
    kept = torch.zeros_like(squares)
    kept[order[:n_kept]] = 1
    advantages[is_token] *= kept.float()
    return advantages


@estimator("rae")
@no_grad
def rae(rewards, names, state):
    """Role-conditioned advantages (SPIRAL, arXiv 2506.24119): a moving baseline per role.

        b <- DECAY b + (1 - DECAY) r,  then  A = r - b    for one unit after the other

    A role is a unit's name: see examples/nim.py, where each side of a game is one. By default all
    units are of one role. No groups are compared, so --group_size may be 1."""
    advantages = torch.zeros_like(rewards)
    for i, (name, reward) in enumerate(zip(names, rewards.tolist())):
        state[name] = DECAY * state.get(name, 0.0) + (1 - DECAY) * reward
        advantages[i] = reward - state[name]
    return advantages


@estimator("by_state")
def by_state(token_rewards, mask, states):
    """A critic without a network: A = V(next state) - V(state), for the tokens of each turn.

    V is the mean reward of the group's units that came to the state; after the last turn it is the
    unit's own reward. Loops name the state of each turn in metrics["states"], as
    examples/bisection.py does."""
    starts = turn_starts(mask)  # (N, S)
    unit = starts.nonzero()[:, 0]  # (turns,)
    rewards = token_rewards.sum(1)[unit]
    values = group_sum(rewards, states) / group_sum(torch.ones_like(rewards), states)
    is_last = torch.cat([unit[1:] != unit[:-1], torch.tensor([True])])
    advantages = torch.where(is_last, rewards, values.roll(-1)) - values
    turn = starts.flatten().cumsum(0).view_as(mask) - 1  # of each token; -1 before the first
    return mask * advantages[turn]
