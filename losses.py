"""Advantage estimators, losses and token log-probabilities: pure functions of tensors.

    advantages = grpo_advantages(rewards, groups)  # or rloo_advantages, or your own
    advantages = advantages[:, None].expand_as(mask)
    loss, stats = policy_loss("ppo", logprobs, logprobs_old, advantages, mask, clip_high=0.28)
    aggregate(loss, mask, "token-mean", n_tokens=tokens_in_the_global_batch).backward()

Four words have a fixed meaning:
    output             one token sequence, a row of (B, T); a rollout has one or more of them
    unit               the outputs of a rollout that share one reward; by default all of them
    group              the units that are compared; by default all those of one prompt
    turn               here only one of the assistant: a run of mask-1 tokens

Arguments that most functions take:
    mask               (B, T), bool or 0/1. 1 marks a token that the policy sampled, 0 one of a
                       tool, a user, the template or padding. Inputs at mask 0, even NaN, change
                       no result and no gradient. Results are 0 there.
    logprobs           of the policy in training, computed by the trainer
    logprobs_old       of the policy before the step's first update, computed by the trainer
    logprobs_rollout   of the policy that sampled the tokens, reported by the engine
    logprobs_ref       of the reference model

`stats` are detached (B, T) tensors for the log. The caller averages each over the mask-1 tokens
of the whole mini-batch, from all ranks. Results keep the dtype of their input. A batch in which
every mask is 0 gives 0, not NaN. An unknown kind or mode raises ValueError."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from typing import Annotated

import torch
from torch import Tensor, no_grad
from torch.autograd.function import once_differentiable

# Shapes, as annotations for readers. Within one call, a letter is always the same size.
N = Annotated[Tensor, "N"]  # units
NS = Annotated[Tensor, "N S"]  # units x tokens of all their outputs, laid end to end
Turns = Annotated[Tensor, "turns"]  # the sampled turns of all units
B = Annotated[Tensor, "B"]  # outputs
BT = Annotated[Tensor, "B T"]  # outputs x response tokens, right-padded
Tokens = BT | NS
LossAndStats = tuple[BT, dict[str, BT]]

KL_ESTIMATES = ("k1", "abs", "k2", "k3", "k1+", "k3+")
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def _masked(mask, *tensors):
    """Returns the mask as bool, then each tensor with 0 at mask 0, where it may be NaN."""
    mask = mask.bool()
    return mask, *(torch.where(mask, tensor, 0) for tensor in tensors)


def _zero_where_masked(mask, loss, stats):
    """Returns a per-token loss and its stats, detached and in its dtype, with 0 at mask 0."""
    clean = {name: torch.where(mask, x.detach().to(loss.dtype), 0) for name, x in stats.items()}
    return torch.where(mask, loss, 0), clean


def _row_mean(values, mask):
    """Averages values, 0 at mask 0, over the mask-1 tokens of each row: (B, T) -> (B, 1)."""
    return values.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def _ratio(log_ratio):
    """Returns exp(log_ratio), with log_ratio clamped to +-20 so that exp can't overflow."""
    return log_ratio.clamp(-20, 20).exp()


def _as_float(values):
    """Converts integers to floats."""
    return values.to(torch.result_type(values, 1.0))


def group_sum(values: N, groups: N) -> N:
    """Returns, for each value, the sum of the values in its group. groups: integers as labels."""
    labels, index = torch.unique(groups, return_inverse=True)
    return values.new_zeros(len(labels)).index_add_(0, index, values)[index]


def _center(rewards, groups):
    """Returns each reward minus its group's mean, and the group's size: (N,) each, in float64."""
    rewards = rewards.double()
    size = group_sum(torch.ones_like(rewards), groups)
    mean = group_sum(rewards, groups) / size
    centered = rewards - mean
    # Divided by a standard deviation as small, a rounding error would look like a signal.
    is_rounding = centered.abs() <= 1e-6 * mean.abs()
    return torch.where(is_rounding, 0, centered), size


def turn_starts(mask: Tokens) -> Tokens:
    """Returns a bool mask of the first token of each turn."""
    mask = mask.bool()
    return mask & ~torch.nn.functional.pad(mask, (1, -1))  # the mask, shifted right by one


def turn_ends(mask: Tokens) -> Tokens:
    """Returns a bool mask of the last token of each turn."""
    mask = mask.bool()
    return mask & ~torch.nn.functional.pad(mask, (-1, 1))  # the mask, shifted left by one


def _check_choice(name, value, choices):
    """Raises ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}: choose from {', '.join(choices)}")


# ---- Estimators and objectives by name; a task file may add its own ------------------------

ESTIMATORS = {}  # --adv_estimator -> function
OBJECTIVES = {}  # --policy_loss -> function

# The parameters that these functions may have: see `estimator` and `objective`.
_ESTIMATOR_INPUTS = """
    rewards outcomes groups prompts names lengths truncated baselines mask token_rewards values
    states parts outputs entropy logprobs_old logprobs_rollout logprobs_ref versions state step
    num_steps args
""".split()
_OBJECTIVE_INPUTS = """
    logprobs logprobs_old ratio entropy advantages batch_stats mask demonstrated logprobs_rollout
    logprobs_ref versions clip_low clip_high clip_c state step num_steps args
""".split()


def estimator(name: str) -> Callable:
    """Registers a function that computes advantages, for `--adv_estimator name`.

    Name the inputs you want as parameters. They describe a whole batch of N units, those of
    demonstrations included, whose mask is 0 everywhere:
        rewards, outcomes    (N,) sums of token_rewards; terminal rewards as the task gave them
        groups, prompts      (N,) labels of units to compare; numbers of the prompts
        names, outputs       the units' names; the AgentLoopOutputs, those of unit 0 first
        lengths, truncated   (N,) mask-1 tokens; True if a limit cut the unit's last output off
        baselines            (N,) reward of a greedy rollout of the prompt; NaN where that failed
        parts                {name: (N,)} the numbers in the task's reward dicts, or NaN
        states               (turns,) see `gigpo_advantages`
        mask                 (N, S) of the unit's outputs, laid end to end. A column with mask 0
                             precedes each turn: 0 1 1 0 1 is two turns (data.EndToEnd).
        token_rewards        (N, S) shaped and turn rewards times --reward_coef, minus KL if --kl_in
                             is reward. The terminal one is at the last mask-1 token or in column 0.
        values               (N, S) of a critic, which is trained if you ask for them
        entropy, logprobs_old, logprobs_rollout, logprobs_ref, versions
                             (N, S) as in `objective`; the first two cost a pass of the policy
        state                a dict that keeps what you put in it, also in checkpoints
        step, num_steps, args   the step's number, from 0; the flag; all flags
    Return advantages, (N, S), or (N,) if all tokens of a unit have the same. With `values`,
    return a tuple: advantages and returns, both (N, S). A dict at the end of a tuple has
    `batch_stats` for the objective: {name: (N, S), (N,) or a number}. Parameters with a default
    are not filled. Any other name raises ValueError."""
    return partial(_register, ESTIMATORS, _ESTIMATOR_INPUTS, name)


def objective(name: str) -> Callable:
    """Registers a function that computes a policy loss, for `--policy_loss name`.

    It sees one MICRO-BATCH: leave a sum or a quantile to an estimator, which returns them as
    `batch_stats`. Name the inputs you want as parameters, as in `estimator`. Tensors are (B, T),
    and 0 where the mask is 0; ratio is 1 there. Only logprobs, ratio and entropy have a gradient:
        logprobs, logprobs_old, logprobs_rollout, logprobs_ref, mask   see above. logprobs_ref
                              needs --ref_model, --kl_coef or --hints.
        ratio                 exp(logprobs - logprobs_old)
        entropy, advantages, versions   versions: of the weights that sampled the token
        demonstrated          True at the assistant's tokens of demonstrations, where the mask is 0.
                              If you ask for it, inputs are given and your loss counts there, too;
                              else it is -logprobs there.
        batch_stats, state    the estimator's: {name: (B, T)}, and its dict, read-only
        clip_low, clip_high, clip_c   the flags; clip_c is None if it is off
        step, num_steps, args   as in `estimator`
    Return the loss per token, (B, T), to be minimised, or a tuple: that loss and a dict of
    stats, (B, T) each. --rollout_correction, --entropy_coef and --kl_coef apply to the result."""
    return partial(_register, OBJECTIVES, _OBJECTIVE_INPUTS, name)


def _register(registry, inputs, name, function):
    """Adds a function to a registry. Its function.takes names the parameters without a default."""
    parameters = signature(function).parameters.values()
    function.takes = [x.name for x in parameters if x.default is x.empty]
    for parameter in function.takes:
        _check_choice(f"input of {name!r}", parameter, inputs)
    registry[name] = function
    return function


# ---- Advantages: computed without gradient; a group of one, or of equal rewards, gets 0 -----


@no_grad
def gae(
    rewards: Tokens,
    values: Tokens,
    mask: Tokens,
    gamma: float,
    lam: float,
    turn_discount: float = 1.0,
) -> tuple[Tokens, Tokens]:
    """Returns GAE advantages and value targets (the returns), in the shape of the rewards.

        delta_t  = r_t + gamma V_{t+1} - V_t
        A_t      = delta_t + gamma lam A_{t+1}
        target_t = A_t + V_t

    See arXiv 1506.02438, eq. 16. Here t+1 is the next mask-1 token. After the last one, V and A
    are 0. At the last token of a turn, gamma is multiplied by turn_discount."""
    mask, rewards, values = _masked(mask, rewards, values)
    advantages = torch.zeros_like(rewards + values)  # the dtype of both

    gammas = torch.full_like(advantages, gamma)
    gammas.masked_fill_(turn_ends(mask), gamma * turn_discount)

    next_value = advantages.new_zeros(len(mask))
    next_advantage = advantages.new_zeros(len(mask))
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gammas[:, t] * next_value - values[:, t]
        advantage = delta + gammas[:, t] * lam * next_advantage
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage

    advantages = torch.where(mask, advantages, 0)
    return advantages, advantages + values


@estimator("gae")
def _gae(token_rewards, values, mask, args):
    return gae(token_rewards, values, mask, args.gamma, args.lam, args.turn_discount)


@no_grad
def reinforce_pp_advantages(
    rewards: Tokens, mask: Tokens, gamma: float, turn_discount: float = 1.0
) -> Tokens:
    """Computes the advantages of REINFORCE++ (arXiv 2501.03262): discounted returns.

        A_t = r_t + gamma A_{t+1}    over mask-1 tokens, with turn_discount as in `gae`

    The paper then whitens A over the global batch (`whiten`). REINFORCE++-baseline takes rewards
    minus their group's mean: `grpo_advantages(..., normalize_std=False)`."""
    # With V = 0 and lam = 1, GAE is the discounted return.
    no_values = _as_float(torch.zeros_like(rewards))
    advantages, _ = gae(rewards, no_values, mask, gamma, 1.0, turn_discount)
    return advantages


@estimator("reinforce_pp")
def _reinforce_pp(token_rewards, mask, args):
    return reinforce_pp_advantages(token_rewards, mask, args.gamma, args.turn_discount)


def whiten(x: Tokens, mask: Tokens, shift_mean: bool = True) -> Tokens:
    """Shifts and scales x to mean 0 and variance 1 over the mask-1 tokens.

        (x - mean) / sqrt(var + 1e-8)    var is unbiased

    Pass the WHOLE batch, from all ranks. With shift_mean=False the mean stays as it is."""
    mask, values = _masked(mask, x.double())
    tokens = values[mask]
    mean = tokens.mean()
    variance = tokens.var(correction=min(1, len(tokens) - 1))
    white = (values - mean) * (variance + 1e-8).rsqrt()
    if not shift_mean:
        white = white + mean
    return torch.where(mask, white, 0).to(_as_float(x).dtype)


@estimator("grpo")
@no_grad
def grpo_advantages(rewards: N, groups: N, normalize_std: bool = True, eps: float = 1e-6) -> N:
    """Computes the advantages of GRPO (arXiv 2402.03300).

        A_i = (r_i - mean_G) / (std_G + eps)    std is unbiased

    With normalize_std=False it is Dr. GRPO (arXiv 2503.20783), which does not divide."""
    centered, size = _center(rewards, groups)
    if normalize_std:
        squares = group_sum(centered.square(), groups)
        std = (squares / (size - 1).clamp(min=1)).sqrt()
        # Where std is 0 we divide by 1: 0 stays 0, even with eps = 0.
        centered /= torch.where(std > 0, std + eps, 1)
    return centered.type_as(_as_float(rewards))


estimator("drgrpo")(partial(grpo_advantages, normalize_std=False))


@no_grad
def gigpo_advantages(rewards: NS, mask: NS, states: Turns, turn_discount: float) -> NS:
    """Computes the turn advantages of GiGPO (arXiv 2505.10978, eq. 7).

        R_k = sum_{j >= k} turn_discount^(j - k) r_j
        A   = `grpo_advantages` of R among the turns that met the same state

    r_j is the reward of turn j of a unit. All tokens of a turn get its A, or 0 if no other turn met
    its state. The paper adds the units' own advantages to the result.
    states: an integer for each turn, those of unit 0 first; one for each state and group."""
    mask = mask.bool()
    starts = turn_starts(mask)  # (N, S)
    # Within a turn nothing is discounted, so the return at its first token is R_k.
    returns = reinforce_pp_advantages(rewards, mask, 1.0, turn_discount)[starts]  # (turns,)
    advantages = grpo_advantages(returns, states)

    # Counting the starts among the sampled tokens gives the turn of each.
    turn = starts[mask].cumsum(0) - 1
    return advantages.new_zeros(mask.shape).masked_scatter(mask, advantages[turn])


@estimator("gigpo")
def _gigpo(rewards, groups, token_rewards, mask, states, args):
    turn_advantages = gigpo_advantages(token_rewards, mask, states, args.turn_discount)
    unit_advantages = grpo_advantages(rewards, groups)
    return turn_advantages + unit_advantages[:, None]


@estimator("rloo")
@no_grad
def rloo_advantages(rewards: N, groups: N) -> N:
    """Computes leave-one-out advantages for REINFORCE (arXiv 2402.14740).

        A_i = r_i - mean of the OTHERS in G = (r_i - mean_G) n / (n - 1)"""
    centered, size = _center(rewards, groups)
    return (centered * size / (size - 1).clamp(min=1)).type_as(_as_float(rewards))


@estimator("opo")
@no_grad
def opo_advantages(rewards: N, groups: N, lengths: N) -> N:
    """Computes the advantages of OPO (arXiv 2505.23585).

        A_i = r_i - sum_G(len r) / sum_G(len)

    lengths: mask-1 tokens of each unit. These weights give the baseline with least variance."""
    centered, _ = _center(rewards, groups)  # first, so that equal rewards give no rounding error
    lengths = lengths.double()
    weighted = group_sum(lengths * centered, groups)
    baseline = weighted / group_sum(lengths, groups).clamp(min=1)
    return (centered - baseline).type_as(_as_float(rewards))


@estimator("remax")
@no_grad
def remax_advantages(rewards: N, baselines: N) -> N:
    """Computes the advantages of ReMax (arXiv 2310.10505).

        A_i = r_i - b_i    b_i is the reward of a greedy rollout of the same prompt

    Where b_i is NaN, because that rollout failed, A_i is 0."""
    return torch.where(baselines.isnan(), 0, _as_float(rewards) - baselines)


@no_grad
def overlong_penalty(lengths: N, max_len: int, buffer: int) -> N:
    """Returns DAPO's soft penalty for overlong responses, in [-1, 0].

        0                                   up to max_len - buffer tokens
        (max_len - buffer - len) / buffer   in between
        -1                                  from max_len tokens on

    See arXiv 2503.14476, eq. 13. 0 < buffer <= max_len."""
    return ((max_len - buffer - lengths) / buffer).clamp(-1, 0)


# ---- Objectives: per-token losses, to be summed by `aggregate` -----------------------------
# In formulas r is the ratio, A the advantage, sg a stop-gradient, |y| a row's mask-1 tokens.


def policy_loss(
    kind: str,
    logprobs: BT,
    logprobs_old: BT,
    advantages: BT,
    mask: BT,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = None,
    demonstrated: BT | None = None,
    **more,
) -> LossAndStats:
    """Computes the policy-gradient loss of each token, to be minimised, and stats.

    kind: a name in OBJECTIVES: one of those below, or of your own `objective`.
    clip_low, clip_high: bounds of the ratio; gmpo: of its logarithm; sapo: temperatures.
    demonstrated: the tokens of demonstrations, at mask 0. Their loss is -logprobs, unless the
        objective asks for `demonstrated`.
    more: further inputs, for an objective that asks for them.

    With logprobs_old = logprobs.detach() the ratio is exactly 1, and the gradient is that of
    REINFORCE. gspo and gmpo take the ratio of a row, so each output of a unit has its own. To match
    the papers, aggregate gspo, gmpo and sapo by "seq-mean-token-mean".

    stats:
        ratio            per token; with gspo and gmpo that of the row
        ppo_kl           -log ratio: the k1 estimate of KL(old, new)
        clipfrac         1 where a bound is active: the gradient is 0 (cispo: reduced)
        clipfrac_lower   1 where the bound clip_c is active
    and those of your own objective.

    Raises ValueError if the loss of your own objective is not (B, T)."""
    _check_choice("policy loss", kind, OBJECTIVES)
    function = OBJECTIVES[kind]
    mask = mask.bool()
    demonstrated = torch.zeros_like(mask) if demonstrated is None else demonstrated.bool()
    counted = mask  # the tokens whose loss the objective computes
    if "demonstrated" in function.takes:
        counted = mask | demonstrated

    inputs = {
        "logprobs": logprobs,
        "logprobs_old": logprobs_old.detach(),
        "advantages": advantages.detach(),
        **more,
    }
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            inputs[name] = torch.where(counted, value, 0)
    log_ratio = inputs["logprobs"] - inputs["logprobs_old"]
    inputs |= {
        "ratio": _ratio(log_ratio),
        "mask": mask,
        "demonstrated": demonstrated,
        "clip_low": clip_low,
        "clip_high": clip_high,
        "clip_c": clip_c,
    }
    loss = function(**{name: inputs[name] for name in function.takes})
    stats = {"ratio": inputs["ratio"], "ppo_kl": -log_ratio}
    for name in ("clipfrac", "clipfrac_lower"):  # unless the objective has such stats
        stats[name] = torch.zeros_like(mask)
    if isinstance(loss, tuple):
        loss, own_stats = loss
        stats |= own_stats
    if loss.shape != mask.shape:
        raise ValueError(f"the loss of {kind!r} is {tuple(loss.shape)}, not {tuple(mask.shape)}")
    loss, stats = _zero_where_masked(counted, loss, stats)
    return torch.where(demonstrated & ~counted, -logprobs, loss), stats


@objective("ppo")
def _ppo(ratio, advantages, clip_low, clip_high, clip_c):
    """Proximal policy optimisation (arXiv 1707.06347, eq. 7).

        max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))

    Where A < 0, the loss is at most -A clip_c (dual clip, arXiv 1912.09729, eq. 5)."""
    unbounded = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(unbounded, bounded)
    stats = {"clipfrac": bounded > unbounded}
    if clip_c is not None:
        upper = -advantages * clip_c
        at_upper = (advantages < 0) & (loss > upper)
        loss = torch.where(at_upper, upper, loss)
        stats["clipfrac_lower"] = at_upper
    return loss, stats


@objective("gspo")
def _gspo(logprobs, logprobs_old, advantages, mask, clip_low, clip_high, clip_c):
    """Group sequence policy optimisation, in its token form (arXiv 2507.18071).

        ppo with r = sg[s] pi / sg[pi], s = (product of the row's ratios)^(1 / |y|)

    All tokens of a row have the ratio s, but each has a gradient through its own logprob."""
    detached = logprobs.detach()
    log_s = _row_mean(detached - logprobs_old, mask)  # (B, 1)
    log_ratio = log_s + (logprobs - detached)
    ratio = log_ratio.clamp(max=10).exp()  # clamped as in verl, so that exp can't overflow
    loss, stats = _ppo(ratio, advantages, clip_low, clip_high, clip_c)
    return loss, stats | {"ratio": ratio}


@objective("gmpo")
def _gmpo(logprobs, logprobs_old, advantages, mask, clip_low, clip_high):
    """Geometric-mean policy optimisation (arXiv 2507.20673). Its bounds are in LOG space.

        -mean(A) (product of the row's r')^(1 / |y|)    at every token of the row
        log r' = min(log r, clip_high) if A >= 0, else max(log r, -clip_low)

    In the paper, all tokens of a row have the same A."""
    log_ratio = (logprobs - logprobs_old).clamp(-20, 20)  # as in `_ratio`
    upper = log_ratio.clamp(max=clip_high)
    lower = log_ratio.clamp(min=-clip_low)
    bounded = torch.where(advantages >= 0, upper, lower)
    ratio = _row_mean(bounded, mask).exp()  # (B, 1)
    loss = -_row_mean(advantages, mask) * ratio
    return loss.expand_as(mask), {"ratio": ratio, "clipfrac": bounded != log_ratio}


@objective("cispo")
def _cispo(logprobs, ratio, advantages, clip_low, clip_high):
    """Clipped importance sampling (arXiv 2506.13585).

        -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi

    clip_high 0.28 means a cap of 1.28, as in verl and slime."""
    weight = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    loss = -weight * advantages * logprobs
    return loss, {"clipfrac": weight != ratio}


@objective("sapo")
def _sapo(ratio, advantages, clip_low, clip_high):
    """Soft adaptive policy optimisation (arXiv 2511.20347).

        -A sigmoid(tau (r - 1)) 4 / tau

    tau is clip_high (paper: 1.0) if A > 0, else clip_low (paper: 1.05): no bounds."""
    tau = torch.full_like(ratio, clip_low)
    tau.masked_fill_(advantages > 0, clip_high)
    return -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau


@objective("reinforce")
def _reinforce(logprobs, advantages):
    """-A log pi (Williams 1992). logprobs_old is used for the stats only."""
    return -advantages * logprobs


# ---- Importance weights: from the engine's policy to the trainer's -------------------------

# Kind -> default (low, high). The first two have no bounds.
ROLLOUT_CORRECTIONS = {
    "none": (0.0, 1.0),
    "bypass": (0.0, 1.0),
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "seq_tis": (0.0, 2.0),
    "seq_mask": (0.0, 3.0),
    "geo_tis": (0.0, 2.0),
    "geo_mask": (0.999, 1.002),
    "veto": (1e-4, 1e4),
}


@no_grad
def rollout_correction(
    kind: str, logprobs_old: BT, logprobs_rollout: BT, mask: BT, low: float, high: float
) -> LossAndStats:
    """Computes importance weights from the engine's policy to the trainer's, and stats.

    rho is exp(logprobs_old - logprobs_rollout) of a token, for seq_* the product over the row's
    mask-1 tokens, for geo_* their geometric mean:
        none                    1
        bypass                  1, because the objective takes logprobs_rollout as logprobs_old
        tis, seq_tis, geo_tis   min(rho, high)                     truncated, arXiv 1802.01561
        icepop                  rho inside [low, high], 0 outside  arXiv 2510.18855 (0.5 and 5)
        seq_mask, geo_mask      the same, with the row's rho
        veto                    1, but 0 in rows where any token's rho is outside

    Tokens with weight 0 still count in the denominators of `aggregate`. Decoupled PPO (arXiv
    2505.24298) is policy_loss times icepop weights with low 0.

    stats:
        rollout_kl          -log rho of the token: the k1 estimate of KL(rollout, old)
        rollout_ratio       rho
        rollout_clipped     1 where rho was cut to high
        rollout_dropped     1 where the weight was set to 0
        rollout_weight      the weight

    Raises ValueError unless low <= high."""
    _check_choice("rollout correction", kind, ROLLOUT_CORRECTIONS)
    if not low <= high:
        raise ValueError(f"the lower bound {low} of {kind} must not exceed the upper one, {high}")
    mask, logprobs_old, logprobs_rollout = _masked(mask, logprobs_old, logprobs_rollout)
    difference = logprobs_old - logprobs_rollout
    log_ratio = difference
    if kind.startswith("seq"):
        log_ratio = difference.sum(-1, keepdim=True)
    elif kind.startswith("geo"):
        log_ratio = _row_mean(difference, mask)
    ratio = _ratio(log_ratio)  # (B, T), or (B, 1) of rows
    is_outside = mask & ((ratio < low) | (ratio > high))
    weights = torch.ones_like(ratio)
    if kind.endswith("tis"):
        weights = ratio.clamp(max=high)
    elif kind == "veto":
        weights = weights.masked_fill(is_outside.any(-1, keepdim=True), 0)
    elif kind not in ("none", "bypass"):  # icepop, seq_mask, geo_mask
        weights = torch.where(is_outside, 0, ratio)
    stats = {
        "rollout_kl": -difference,
        "rollout_ratio": ratio,
        "rollout_clipped": (ratio > high) & kind.endswith("tis"),
        "rollout_dropped": weights == 0,
        "rollout_weight": weights,
    }
    return _zero_where_masked(mask, weights, stats)


def value_loss(
    values: BT, values_old: BT, returns: BT, mask: BT, clip: float | None
) -> LossAndStats:
    """Computes the clipped value loss of PPO for each token, and stats.

        1/2 max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2)
        1/2 (V - R)^2    with clip=None

    See arXiv 2005.12729, sec. 3.

    stats:
        value_clipfrac   1 where the bound is active: the gradient is 0
        value_error      |V - R|"""
    old, returns = values_old.detach(), returns.detach()
    mask, values, old, returns = _masked(mask, values, old, returns)
    error = values - returns
    unbounded = error.square()
    bounded = unbounded
    if clip is not None:
        clipped = old + (values - old).clamp(-clip, clip)
        bounded = (clipped - returns).square()
    loss = 0.5 * torch.maximum(unbounded, bounded)
    stats = {"value_clipfrac": bounded > unbounded, "value_error": error.abs()}
    return _zero_where_masked(mask, loss, stats)


@no_grad
def explained_variance(values: BT, returns: BT, mask: BT) -> Tensor:
    """Returns 1 - var(R - V) / var(R) over the mask-1 tokens; 0 if the returns do not vary."""

    def squares(x):
        x = x[mask.bool()].double()
        return (x - x.mean()).square().sum()

    explained = 1 - squares(returns - values) / squares(returns)
    return torch.where(squares(returns) > 0, explained, 0).to(returns.dtype)


# ---- KL to the reference -------------------------------------------------------------------


def kl_estimate(logprobs: Tensor, logprobs_ref: Tensor, kind: str) -> Tensor:
    """Estimates KL(pi, pi_ref) at each token that pi sampled.

    With d = logprobs - logprobs_ref (joschu.net/blog/kl-approx.html):
        k1         d                   unbiased; its mean gradient is 0, so use it in rewards only
        abs        |d|
        k2         d^2 / 2             biased value, right gradient (arXiv 2510.01555)
        k3         exp(-d) - 1 + d     unbiased, >= 0, low variance (arXiv 2402.03300, eq. 4)
        k1+, k3+                       the value of k1 or k3 with the gradient of k2
    k3 is at most 10; beyond that its gradient is 0. Where d is infinite or NaN, the value is d, and
    the gradient 0, because no later mask could remove it."""
    _check_choice("KL estimate", kind, KL_ESTIMATES)
    difference = logprobs - logprobs_ref.detach()
    finite = difference.isfinite()
    k1 = torch.where(finite, difference, 0)
    k2 = 0.5 * k1.square()
    clamped = (-k1).clamp(-20, 20)  # so that exp can't overflow
    k3 = (clamped.exp() - 1 - clamped).clamp(max=10)
    estimates = {"k1": k1, "abs": k1.abs(), "k2": k2, "k3": k3}
    value = estimates[kind.rstrip("+")]
    if kind.endswith("+"):
        value = value.detach() + (k2 - k2.detach())
    return torch.where(finite, value, difference.detach())


def top_kl(logprobs: Tensor, logprobs_ref: Tensor) -> BT:
    """Returns KL(pi_ref, pi) at each token, of K ids and of all other ids together.

    Both are (B, T, K), at the ids that pi_ref finds likeliest. With p of pi_ref and q of pi:

        sum_k p_k log(p_k / q_k) + p_rest log(p_rest / q_rest)    p_rest = 1 - sum_k p_k

    Without the rest (verl's forward_kl_topk) it can be negative. p_rest, q_rest >= 1e-6, the
    exactness of a float32 sum."""
    p = logprobs_ref.detach().exp()
    p_rest = (1 - p.sum(-1)).clamp(min=1e-6)
    q_rest = (1 - logprobs.exp().sum(-1)).clamp(min=1e-6)
    kl = (p * (logprobs_ref.detach() - logprobs)).sum(-1)
    return kl + p_rest * (p_rest.log() - q_rest.log())


@dataclass
class AdaptiveKL:
    """A coefficient that steers the KL to `target` (arXiv 1909.08593)."""

    coef: float = 0.001
    target: float = 0.1
    horizon: float = 10_000

    def update(self, kl: float, n: int) -> float:
        """Updates the coefficient after n units with a mean KL of `kl`, and returns it.

        coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon)"""
        error = kl / self.target - 1
        self.coef *= 1 + min(max(error, -0.2), 0.2) * n / self.horizon
        return self.coef


# ---- From per-token losses to one number ---------------------------------------------------


def aggregate(
    x: BT,
    mask: BT,
    mode: str = "token-mean",
    n_tokens: float | Tensor | None = None,
    n_seqs: float | Tensor | None = None,
    max_len: int | None = None,
    unit_tokens: B | None = None,
) -> Tensor:
    """Sums x over the mask-1 tokens, and divides by GLOBAL counts.

        token-mean                sum / n_tokens               DAPO, arXiv 2503.14476
        token-sum                 sum
        seq-mean-token-sum        sum / n_seqs
        seq-mean-token-mean       sum of row means / n_seqs    GRPO, arXiv 2402.03300
        seq-mean-token-sum-norm   sum / (n_seqs max_len)       Dr. GRPO, arXiv 2503.20783

    A sequence is a row or, with unit_tokens, a unit, whose rows together weigh as much as one.

    n_tokens: mask-1 tokens in the whole mini-batch, on all ranks. n_seqs: sequences there that have
    any. With these counts, the results for the micro-batches ADD UP to that for the mini-batch. By
    default they are those of this mask, and max_len is its width.
    unit_tokens: the number of mask-1 tokens in the whole unit of each row."""
    _check_choice("aggregation", mode, AGGREGATIONS)
    # A mask of 0 gives 0 with a graph: under DDP, a rank without work runs its backward pass, too.
    mask, values = _masked(mask, x)
    if mode == "seq-mean-token-mean":
        lengths = mask.sum(-1) if unit_tokens is None else unit_tokens  # (B,)
        values = values / lengths.clamp(min=1)[:, None]

    denominator = 1
    if mode == "token-mean":
        denominator = mask.sum() if n_tokens is None else n_tokens
    elif mode.startswith("seq-mean"):
        denominator = count_sequences(mask, unit_tokens) if n_seqs is None else n_seqs
    if mode == "seq-mean-token-sum-norm":
        denominator = denominator * (max_len or mask.shape[1])
    denominator = torch.as_tensor(denominator)  # a number stays on the CPU, without a copy
    return (values.sum() / denominator.clamp(min=1)).to(values.dtype)


def count_sequences(mask: BT, unit_tokens: B | None = None) -> Tensor:
    """Counts the rows with mask-1 tokens or, with unit_tokens (see `aggregate`), the units.

    Each row counts as its share of its unit's tokens, so the rows of a unit add up to 1."""
    lengths = mask.bool().sum(-1)  # (B,)
    whole = lengths if unit_tokens is None else unit_tokens
    return (lengths.double() / whole.clamp(min=1)).sum()


# ---- Token log-probabilities without the logits --------------------------------------------
# Shapes: M tokens to be predicted, hidden size H, vocabulary V, K ids for each token.


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropy: bool = False,
    vocab_size: int | None = None,
    banned: Sequence[int] = (),
    softcap: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes log softmax(hidden @ weight.T / temperature) at targets, without storing logits.

    hidden: (M, H), weight: (V, H), targets: an id for each token, (M,), or several, (M, K).
    Returns logprobs of the targets' shape, or with entropy=True a pair (logprobs, entropy),
    entropy (M,). Both are differentiable. Logits are computed for at most `chunk` VOCABULARY
    columns at a time (`_blocks`), in forward and again in backward.

    Half-precision operands give float32 logits and results. As in a linear layer, hidden follows
    autocast, and weight is cast to hidden's dtype.
    Ids >= vocab_size (a padded vocabulary) and `banned` ids (such as an image's placeholder)
    have probability 0, as in the engine. A target among them has logprob -inf. With softcap,
    logits become softcap * tanh(logits / softcap) before the temperature, as in Gemma 2."""
    hidden = _as_autocast(hidden)
    blocks = _blocks(weight, vocab_size, banned, chunk)
    ids = targets if targets.ndim == 2 else targets[:, None]  # (M, K)
    logprobs, entropies = _TokenLogprobs.apply(hidden, weight, ids, temperature, softcap, blocks)
    logprobs = logprobs.view(targets.shape)
    if entropy:
        return logprobs, entropies
    return logprobs


@no_grad
def top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    temperature: float = 1.0,
    chunk: int = 1024,
    vocab_size: int | None = None,
    banned: Sequence[int] = (),
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns logprobs and ids of each token's k likeliest ids, the likeliest first: (M, k) each.

    The other arguments are those of `token_logprobs`."""
    hidden = _as_autocast(hidden)
    lses = []  # for each block, log sum exp z: (M,)
    tops = []  # and its largest logits and their ids, (M, k) or fewer
    ids = []
    for start, stop in _blocks(weight, vocab_size, banned, chunk):
        logits, _ = _block(hidden, weight, temperature, softcap, start, stop)
        lses.append(logits.logsumexp(-1))
        top, column = logits.topk(min(k, stop - start))
        tops.append(top)
        ids.append(start + column)
        del logits  # or two blocks are alive at once
    top, place = torch.cat(tops, 1).topk(k)
    lse = torch.stack(lses).logsumexp(0)
    return top - lse[:, None], torch.cat(ids, 1).gather(1, place)


def _as_autocast(hidden):
    """Returns hidden in the dtype that autocast gives the operands of a product."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    return hidden


def _blocks(weight, vocab_size, banned, chunk):
    """Cuts the vocabulary's columns, without the banned ones, into blocks: [(start, stop), ...]."""
    # Blocks of tokens would need a float32 (V, H) tensor to sum the gradients of weight. A block of
    # columns owns rows of it, which one product completes. Four float32 blocks are alive at a time.
    vocab = min(vocab_size or len(weight), len(weight))
    columns = min(chunk, max(vocab // 32, 256))
    blocks = []
    first = 0
    for end in sorted({*banned, vocab}):  # a block ends before each banned id, and at the end
        if end > vocab:
            break
        for start in range(first, end, columns):
            blocks.append((start, min(start + columns, end)))
        first = end + 1
    return blocks


def _matmul(a, b):
    """Returns a @ b, in float32 for half-precision operands: tensor cores accumulate in it."""
    with torch.autocast(a.device.type, enabled=False):
        if a.dtype not in (torch.bfloat16, torch.float16):
            return a @ b
        if a.is_cuda:
            return torch.mm(a, b, out_dtype=torch.float32)
        return a.float() @ b.float()


def _block(hidden, weight, temperature, softcap, start, stop):
    """Returns the logits of n vocabulary columns, (M, n), and their rows of weight, (n, H)."""
    block_weight = weight[start:stop].to(hidden.dtype)
    logits = _matmul(hidden, block_weight.T)
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1:
        logits /= temperature
    return logits, block_weight


def _compiled_on_gpu(function):
    """Compiles a function of a block for CUDA, where its steps become one kernel."""
    # At the first call, because torch.compile imports torch._dynamo, which takes seconds.
    compiled = cache(partial(torch.compile, function, dynamic=True))

    def call(block, *more):
        return compiled()(block, *more) if block.is_cuda else function(block, *more)

    return call


@_compiled_on_gpu
def _lse_and_entropy(logits):
    """Returns log sum exp of each row of a block, and the entropy of its softmax: (M,) each."""
    lse = logits.logsumexp(-1)
    logp = logits - lse[:, None]
    return lse, -logp.exp().mul_(logp).sum(-1)


@_compiled_on_gpu
def _grad_of_logits(logits, lse, sum_of_g, entropy, grad_entropy):
    """Returns -sum_y g_y p - g' p (log p + entropy), for `_TokenLogprobs.backward`."""
    logp = logits - lse[:, None]
    p = logp.exp()
    if grad_entropy is None:
        return p.mul_(-sum_of_g)
    grad = logp.add_(entropy[:, None]).mul_(grad_entropy[:, None])
    return grad.add_(sum_of_g).mul_(p).neg_()


def _in_block(targets, start, stop):
    """Returns whether targets, (M, K), are in a block, and their columns there, clamped."""
    inside = (targets >= start) & (targets < stop)
    return inside, (targets - start).clamp(0, stop - start - 1)


class _TokenLogprobs(torch.autograd.Function):
    """`token_logprobs` with its own backward pass, over the blocks of `_blocks`."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, softcap, blocks):
        """Returns logprobs (M, K) of the targets (M, K), and entropy (M,)."""
        lses = []  # for each block, log sum exp z: (M,)
        entropies = []  # for each block, the entropy of its own softmax: (M,)
        target_logits = float("-inf")
        ctx.scale = temperature, softcap
        ctx.blocks = blocks
        for block in blocks:
            logits, _ = _block(hidden, weight, *ctx.scale, *block)
            inside, column = _in_block(targets, *block)
            target_logits = torch.where(inside, logits.gather(1, column), target_logits)
            lse, entropy = _lse_and_entropy(logits)
            lses.append(lse)
            entropies.append(entropy)
            del logits  # or two blocks are alive at once
        lses = torch.stack(lses)  # (blocks, M)
        lse = lses.logsumexp(0)  # (M,), over all columns

        # Choosing a token is choosing a block, then a column in it, and the entropies add up.
        log_share = lses - lse  # (blocks, M), log of each block's probability
        entropy = (log_share.exp() * (torch.stack(entropies) - log_share)).sum(0)
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.set_materialize_grads(False)  # an entropy that is only logged costs no gradient
        return target_logits - lse[:, None], entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        """Computes the gradients of hidden and weight from that of z, the logits of `_block`:

            dz = sum_y g_y (onehot(y) - p) - g' p (log p + entropy)

        over the K targets y of a token, with g = grad_logprobs and g' = grad_entropy."""
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=lse.dtype)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None  # LoRA: None
        g = grad_logprobs  # (M, K)
        if g is None:
            g = torch.zeros_like(targets, dtype=lse.dtype)
        sum_of_g = g.sum(1, keepdim=True)
        temperature, softcap = ctx.scale
        for start, stop in ctx.blocks:
            z, block_weight = _block(hidden, weight, temperature, softcap, start, stop)
            inside, column = _in_block(targets, start, stop)
            # z is softcap tanh(...) / temperature, so this is the tanh again.
            tanh = z * (temperature / softcap) if softcap else None
            dz = _grad_of_logits(z, lse, sum_of_g, entropy, grad_entropy)
            del z
            dz.scatter_add_(1, column, torch.where(inside, g, 0))
            if temperature != 1:
                dz /= temperature
            if softcap:
                dz *= 1 - tanh.square_()
            dz = dz.to(hidden.dtype)
            del tanh  # or more blocks than necessary are alive
            grad_hidden += _matmul(dz, block_weight)
            if grad_weight is not None:
                grad_weight[start:stop] = _matmul(dz.T, hidden)
            del dz
        return grad_hidden, grad_weight, None, None, None, None
