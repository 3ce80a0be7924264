"""Methods of recent papers as functions of a task file: to use and to copy.

    accelerate launch train.py --task examples/methods.py --adv_estimator gdpo
    accelerate launch train.py --task examples/methods.py --policy_loss dppo_tv --clip_low 0.15 \
        --clip_high 0.15

The task is the calculator's, with a reward of two parts. Two letters in the formulas:

    mu   the policy that sampled the token: logprobs_rollout, from the engine
    pi   the policy in training"""

import torch
from torch import no_grad

from examples import calculator
from examples.calculator import SYSTEM_PROMPT, TOOLS, build_model, load  # noqa: F401
from losses import OBJECTIVES, estimator, group_sum, grpo_advantages, objective, turn_starts

OPSM_LIMIT = 0.5  # opsm: the largest mean of log(mu / pi) over an output
DECAY = 0.95  # rae: the weight of the old baseline

ppo = OBJECTIVES["ppo"]


def reward(output, row: dict) -> dict[str, float]:
    """Returns 1 for the right answer, and 1 for a call of the calculator as another part.

    The score is that of the answer alone. `gdpo` learns from both parts."""
    correct = calculator.reward(output, row)
    called = any(message.get("tool_calls") for message in output.messages)
    return {"score": correct, "correct": correct, "called": float(called)}


# ---------------------------------------------------------------- an optimiser


def muon(model, args) -> list[torch.optim.Optimizer]:
    """Muon (arXiv 2502.16982) on the layers' matrices, AdamW on everything else.

    To use it, write in the task file: from examples.methods import muon as optimizer"""
    matrices, others = [], []
    for name, p in model.named_parameters():
        is_matrix = ".layers." in name and p.ndim == 2
        (matrices if is_matrix else others).append(p)
    return [
        torch.optim.Muon(matrices, args.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, args.lr, weight_decay=0.0),
    ]


# ---------------------------------------------------------------- objectives: (b, T)


@objective("dppo_tv")
def dppo_tv(logprobs, logprobs_rollout, advantages, clip_low, clip_high, clip_c):
    """DPPO with the binary total variation (arXiv 2602.04879; verl's dppo_tv).

    REINFORCE with the weight min(pi / mu, clip_c), which drops a token if its probability has
    already moved too far in the direction of its advantage:

        A > 0 and pi - mu > clip_high,  or  A <= 0 and pi - mu < -clip_low

    In verl both bounds are 0.15, and clip_c is 20. With --max_staleness, pass
    `--rollout_correction none`: the weight already contains it."""
    moved = logprobs.exp() - logprobs_rollout.exp()
    too_high = moved > clip_high
    too_low = moved < -clip_low
    dropped = torch.where(advantages > 0, too_high, too_low)

    log_ratio = logprobs.detach() - logprobs_rollout
    ratio = log_ratio.clamp(-20, 20).exp()
    weight = ratio.clamp(max=clip_c or 20)
    loss = -weight * advantages * logprobs
    stats = {"ratio": ratio, "clipfrac": dropped}
    return loss.masked_fill(dropped, 0), stats


@objective("opsm")
def opsm(logprobs, logprobs_rollout, ratio, advantages, mask, clip_low, clip_high, clip_c):
    """PPO with off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, eq. 9).

    The loss of a token is 0 if both are true:

        A < 0  and  mean over the output's tokens of log(mu / pi) > OPSM_LIMIT"""
    loss, stats = ppo(ratio, advantages, clip_low, clip_high, clip_c)
    distances = logprobs_rollout - logprobs  # (b, T)
    n_tokens = mask.sum(1).clamp(min=1)
    is_far = distances.sum(1) / n_tokens > OPSM_LIMIT  # (b,)
    dropped = (advantages < 0) & is_far[:, None]
    stats["opsm_dropped"] = dropped
    return loss.masked_fill(dropped, 0), stats


# ---------------------------------------------------------------- estimators: N units, S tokens


@estimator("gdpo")
@no_grad
def gdpo(parts, groups):
    """GDPO (arXiv 2601.05242; TRL's normalize_then_sum): each part of the reward counts alike.

        B = sum over parts k of (r_k - mean_G(r_k)) / (std_G(r_k) + 1e-4)
        A = (B - mean(B)) / (std(B) + 1e-4)    over the whole batch

    Where a reward lacks a part, that part adds nothing. The parts are all numbers of the reward's
    dict but the score."""
    total = torch.zeros(len(groups))
    for part in parts.values():
        known = ~part.isnan()
        total[known] += grpo_advantages(part[known], groups[known], eps=1e-4)
    total -= total.mean()
    return total / (total.std() + 1e-4)


@estimator("rae")
@no_grad
def rae(rewards, names, mask, state):
    """Role-conditioned advantages (SPIRAL, arXiv 2506.24119): a moving baseline per role.

        b <- DECAY b + (1 - DECAY) r,  then  A = r - b    for one unit after the other

    A role is a unit's name: a side of the game in examples/nim.py. --group_size may be 1."""
    advantages = torch.zeros_like(rewards)
    for i, name in enumerate(names):
        if not mask[i].any():
            continue  # a demonstration
        reward = rewards[i].item()
        old = state.get(name, 0.0)
        state[name] = DECAY * old + (1 - DECAY) * reward
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
    counts = group_sum(torch.ones_like(rewards), states)
    values = group_sum(rewards, states) / counts

    is_last = torch.ones_like(unit, dtype=torch.bool)
    is_last[:-1] = unit[1:] != unit[:-1]
    next_values = torch.where(is_last, rewards, values.roll(-1))
    advantages = next_values - values
    turn = starts.flatten().cumsum(0).view_as(mask) - 1  # of each token; -1 before the first
    return mask * advantages[turn]
