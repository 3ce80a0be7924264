"""Advantages, objectives, estimators and token log-probabilities: pure functions of tensors.

    advantages = grpo_advantages(rewards, groups)[:, None].expand_as(mask)  # change this line
    loss, stats = policy_loss("ppo", logprobs, logprobs_old, advantages, mask, clip_high=0.28)
    aggregate(loss, mask, "token-mean", n_tokens=tokens_in_the_global_batch).backward()

Words used throughout:
    (B, T)             outputs x response tokens, right-padded. A row is one token sequence.
    (N,)               units, one number for each. A unit is what shares one reward: by default
                       a rollout, whatever the number of its outputs.
    mask               (B, T), bool or 0/1. 1 = sampled by the policy; 0 = tool, user, template
                       or padding. A value at mask 0, even NaN, changes no result and no
                       gradient, and results are 0 there. So inputs are cleaned by `where`
                       BEFORE any arithmetic: 0 * NaN is NaN.
    logprobs           of the policy that is trained, computed by the trainer.
    logprobs_old       of the policy before this update, computed by the trainer.
    logprobs_rollout   of the engine that sampled the tokens (the behaviour policy).
    logprobs_ref       of the frozen reference model.
    stats              detached (B, T) tensors. The caller reduces them as it reduces the loss:
                       over global counts.

Everything keeps its input's dtype (float64 stays float64). A batch without any mask-1 token
gives 0, not NaN. An unknown kind or mode raises ValueError."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature

import torch
from torch import Tensor, no_grad
from torch.autograd.function import once_differentiable

# Kind -> usual bounds, low and high.
ROLLOUT_CORRECTIONS = {"none": (0.0, 1.0), "tis": (0.0, 2.0), "icepop": (0.5, 5.0),
                       "seq_tis": (0.0, 2.0), "seq_mask": (0.0, 3.0), "geo_tis": (0.0, 2.0),
                       "geo_mask": (0.999, 1.002), "veto": (1e-4, 1e4)}
KL_ESTIMATES = ("k1", "abs", "k2", "k3", "k1+", "k3+")
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
                "seq-mean-token-sum-norm")

BT = Tensor
N = Tensor
LossAndStats = tuple[Tensor, dict[str, Tensor]]


def _masked(mask, *tensors):
    """Returns the mask as bool, and then each tensor with 0 where the mask is 0."""
    mask = mask.bool()
    return mask, *(torch.where(mask, tensor, 0) for tensor in tensors)


def _loss_and_stats(mask, loss, **stats):
    """Returns a per-token loss and a dict of its stats, with 0 where the mask is 0.

    The stats are detached and get the loss's dtype."""
    loss = torch.where(mask, loss, 0)
    for name, stat in stats.items():
        stats[name] = torch.where(mask, stat.detach().to(loss.dtype), 0)
    return loss, stats


def _row_mean(values, mask):
    """Averages values, 0 at mask 0, over each row's mask-1 tokens: (B, T) -> (B, 1)."""
    return values.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def _check_choice(name, value, choices):
    """Raises ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}: choose from {', '.join(choices)}")


# ---- Estimators and objectives by name; a task file may add its own ------------------------

ESTIMATORS = {}  # name -> function, by --adv_estimator
# The same by --policy_loss; None: in `policy_loss` itself.
OBJECTIVES = dict.fromkeys(("ppo", "gspo", "gmpo", "cispo", "sapo", "reinforce"))


def estimator(name: str) -> Callable:
    """Function decorator: `--adv_estimator name` then computes advantages by this function.

    Its parameters name what it gets of a whole batch of N units:
        rewards        (N,) shaped; turn rewards and, by --kl_in reward, the KL are in it
        outcomes       (N,) the terminal rewards as the task gave them
        groups         (N,) labels: units of one label are compared. --group_size is then > 1
        prompts        (N,) the numbers of the prompts; names: N strings, as loops name units
        lengths        (N,) mask-1 tokens of the unit, over all its outputs
        baselines      (N,) reward of the group's greedy rollout, which is then sampled beside
                       the others; NaN where it failed
        mask           (N, S) of the unit's outputs, laid end to end, with a column of mask 0
                       before each turn
        token_rewards  (N, S) the rewards where they fall, the terminal one on the last mask-1
                       token; 0 elsewhere
        values         (N, S) of a critic, which is then trained
        states         (turns,) as in `gigpo_advantages`
        args           all flags
    It returns advantages: (N,), for all tokens of a unit, or (N, S). With `values` it returns
    a tuple of advantages and returns, both (N, S).

    A parameter that has a default keeps it. Raises ValueError for any other parameter."""
    return partial(_register, ESTIMATORS, "rewards outcomes groups prompts names "
                   "lengths baselines mask token_rewards values states args", name)


def objective(name: str) -> Callable:
    """Function decorator: `--policy_loss name` then computes the loss by this function.

    Its parameters name what it gets of b rows, (b, T) each and clean (see `mask` above):
        logprobs, ratio, entropy      with gradient; ratio is exp(logprobs - logprobs_old)
        logprobs_old, advantages      constants
        mask                          bool
        args                          all flags, among them clip_low, clip_high, clip_c
    It returns the loss per token, (b, T), to be minimised, or a tuple of it and a dict of
    stats, (b, T) each. --rollout_correction, --entropy_coef and --kl_coef go around it.

    A parameter that has a default keeps it. Raises ValueError for any other parameter."""
    return partial(_register, OBJECTIVES,
                   "logprobs logprobs_old ratio entropy advantages mask args", name)


def _register(registry, inputs, name, function):
    """Puts a function into a registry; its `takes` are the names of the inputs it takes."""
    parameters = signature(function).parameters.values()
    function.takes = [x.name for x in parameters if x.default is x.empty]
    for each in function.takes:
        _check_choice(f"input of {name!r},", each, inputs.split())
    registry[name] = function
    return function


# ---- Advantages: constants of the update, so nothing here builds a graph -------------------


@no_grad
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float,
        turn_discount: float = 1.0) -> tuple[Tensor, Tensor]:
    """Computes generalised advantages and returns, all (B, T) (arXiv 1506.02438, eq. 16).

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lam A_{t+1}
        returns = A + V

    Here t+1 is the next mask-1 token. V and A are carried over tool and user tokens
    unchanged, so those tokens are invisible. After the last mask-1 token both are 0. A turn
    is a run of mask-1 tokens; at its last token gamma is multiplied by turn_discount. With
    gamma 1, rewards are therefore discounted by turns."""
    mask, rewards, values = _masked(mask, rewards, values)
    advantages = torch.zeros_like(rewards + values)

    # A token ends its turn where the next one has mask 0. `roll` gives the last column the
    # mask of the first; that is harmless, because the value and advantage after the last
    # column are 0.
    gammas = torch.full_like(advantages, gamma * turn_discount)
    gammas.masked_fill_(mask.roll(-1, 1), gamma)

    next_value = advantages.new_zeros(len(mask))  # (B,)
    next_advantage = next_value
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gammas[:, t] * next_value - values[:, t]
        next_advantage = torch.where(mask[:, t], delta + gammas[:, t] * lam * next_advantage,
                                     next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage
    advantages = torch.where(mask, advantages, 0)
    return advantages, advantages + values


@estimator("gae")
def _gae(token_rewards, values, mask, args):
    return gae(token_rewards, values, mask, args.gamma, args.lam, args.turn_discount)


@no_grad
def reinforce_pp_advantages(rewards: Tensor, mask: Tensor, gamma: float,
                            turn_discount: float = 1.0) -> Tensor:
    """Computes REINFORCE++'s advantages, (B, T) -> (B, T) (arXiv 2501.03262).

        A_t = r_t + gamma A_{t+1}    over mask-1 tokens, with turn_discount as in `gae`

    They are discounted returns. The paper then whitens A over the global batch (`whiten`). Its
    -baseline form first subtracts the group's mean from the rewards, as does
    `grpo_advantages(..., normalize_std=False)`."""
    # With values of 0 and lam = 1, the advantage is the return.
    no_values = _floating(torch.zeros_like(rewards))
    return gae(rewards, no_values, mask, gamma, 1.0, turn_discount)[0]


@estimator("reinforce_pp")
def _reinforce_pp(token_rewards, mask, args):
    return reinforce_pp_advantages(token_rewards, mask, args.gamma, args.turn_discount)


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Returns (x - mean) / sqrt(var + 1e-8), (B, T) -> (B, T); var is the unbiased variance.

    Mean and variance are those of the mask-1 tokens. x should be the WHOLE batch, of all
    ranks. shift_mean=False adds the mean again: only the variance changes."""
    centered, mean, squares, n_tokens = _moments(x, mask)
    white = centered * (squares / (n_tokens - 1).clamp(min=1) + 1e-8).rsqrt()
    if not shift_mean:
        white = white + mean
    return torch.where(mask.bool(), white, 0).to(x.dtype)


def _moments(values, mask):
    """Computes moments of values (B, T) over mask-1 tokens, in float64.

    Returns the values minus their mean (B, T), the mean, the sum of squares around the mean,
    and the number of tokens. The squares need a second pass over the values, because E[x^2] -
    mean^2 cancels."""
    mask, values = _masked(mask, values.double())
    n_tokens = mask.sum()
    mean = values.sum() / n_tokens.clamp(min=1)
    centered = torch.where(mask, values - mean, 0)
    return centered, mean, centered.square().sum(), n_tokens


def _floating(values):
    """Converts integers to torch's default dtype; floating-point values stay as they are."""
    return values.to(torch.result_type(values, 1.0))


def group_sum(values: Tensor, groups: Tensor) -> Tensor:
    """Returns for each value the sum over its group, (N,) -> (N,).

    groups: labels, any integers in any order."""
    labels, index = torch.unique(groups, return_inverse=True)
    return values.new_zeros(len(labels)).index_add_(0, index, values)[index]


def _center(rewards, groups):
    """Returns rewards minus their group's mean (N,), and the size of each one's group (N,).

    Both are float64. The float32 mean of eight times 0.1 is not quite 0.1, and that error,
    divided by a std of 0 + eps, would look like a signal."""
    rewards = rewards.double()
    size = group_sum(torch.ones_like(rewards), groups)
    return rewards - group_sum(rewards, groups) / size, size


@estimator("grpo")
@no_grad
def grpo_advantages(rewards: Tensor, groups: Tensor, normalize_std: bool = True,
                    eps: float = 1e-6) -> Tensor:
    """Computes GRPO's advantages, (N,) -> (N,) (arXiv 2402.03300).

        A_i = (r_i - mean_G) / (std_G + eps)    std is unbiased

    A group of one and a group of equal rewards get 0. With normalize_std=False nothing is
    divided: Dr. GRPO (arXiv 2503.20783)."""
    centered, size = _center(rewards, groups)
    if normalize_std:
        std = (group_sum(centered.square(), groups) / (size - 1).clamp(min=1)).sqrt()
        # Where std is 0 we divide by 1, so that 0 stays 0 with eps = 0 as well.
        centered /= torch.where(std > 0, std + eps, 1)
    return centered.type_as(_floating(rewards))


estimator("drgrpo")(partial(grpo_advantages, normalize_std=False))


def turn_starts(mask: Tensor) -> Tensor:
    """Returns whether a turn, a run of mask-1 tokens, starts at each token: bool, as mask."""
    mask = mask.bool()
    return mask & ~torch.nn.functional.pad(mask, (1, -1))


@no_grad
def gigpo_advantages(rewards: Tensor, mask: Tensor, states: Tensor,
                     turn_discount: float) -> Tensor:
    """Computes GiGPO's step advantages, (N, S) -> (N, S) (arXiv 2505.10978, eq. 7).

        R_k = sum_{j >= k} turn_discount^(j - k) r_j
        A   = `grpo_advantages` of R among the turns that met the same state

    A row of the matrices is a unit, its outputs laid end to end. r_j is the reward of turn
    j. A turn is a run of mask-1 tokens, which all get its A. states (turns,) has one
    integer for each turn, row by row, equal where turns of one group met the same state. A
    turn that is alone in its state gets 0.

    The caller adds the result to the units' own advantages (in the paper, with weight 1)."""
    starts = turn_starts(mask)  # (N, S)
    returns = reinforce_pp_advantages(rewards, mask, 1.0, turn_discount)[starts]  # (turns,)
    advantages = grpo_advantages(returns, states)

    # Counting the starts numbers a token's turn from 1. Number 0 (mask-0 tokens before the
    # first turn of the batch) needs an entry too.
    turn = starts.flatten().cumsum(0).view_as(mask)  # (N, S)
    advantages = torch.cat([returns.new_zeros(1), advantages])
    return torch.where(mask.bool(), advantages[turn], 0)


@estimator("gigpo")
def _gigpo(rewards, groups, token_rewards, mask, states, args):
    of_turns = gigpo_advantages(token_rewards, mask, states, args.turn_discount)
    return of_turns + grpo_advantages(rewards, groups)[:, None]


@estimator("rloo")
@no_grad
def rloo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Computes REINFORCE leave-one-out advantages, (N,) -> (N,) (arXiv 2402.14740).

        A_i = r_i - mean of the OTHERS in G = (r_i - mean_G) n / (n - 1)

    A group of one gets 0."""
    centered, size = _center(rewards, groups)
    return (centered * size / (size - 1).clamp(min=1)).type_as(_floating(rewards))


@estimator("opo")
@no_grad
def opo_advantages(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """Computes OPO's advantages, (N,) -> (N,) (arXiv 2505.23585).

        A_i = r_i - sum_G(len r) / sum_G(len)

    The baseline of least variance weighs a rollout by its length, its number of mask-1 tokens.
    A group of one gets 0."""
    # Centered first, so that equal rewards give 0 and not a rounding error.
    centered, _ = _center(rewards, groups)
    lengths = lengths.double()
    baseline = group_sum(lengths * centered, groups) / group_sum(lengths, groups).clamp(min=1)
    return (centered - baseline).type_as(_floating(rewards))


@estimator("remax")
@no_grad
def remax_advantages(rewards: Tensor, baselines: Tensor) -> Tensor:
    """Computes ReMax's advantages, (N,) -> (N,) (arXiv 2310.10505).

        A_i = r_i - b_i    b_i is the reward of a greedy rollout of the same prompt

    Where there is none, and b_i is NaN, A_i is 0."""
    return torch.where(baselines.isnan(), 0, _floating(rewards) - baselines)


@no_grad
def overlong_penalty(lengths: Tensor, max_len: int, buffer: int) -> Tensor:
    """Returns DAPO's soft punishment of overlong rollouts, (N,) -> (N,) in [-1, 0].

        0                                   up to max_len - buffer tokens
        (max_len - buffer - len) / buffer   between
        -1                                  from max_len tokens on

    See arXiv 2503.14476, eq. 13. Raises ValueError unless 0 < buffer <= max_len."""
    if not 0 < buffer <= max_len:
        raise ValueError(
            f"the overlong buffer {buffer} must lie between 1 and max_len {max_len}")
    return ((max_len - buffer - lengths) / buffer).clamp(-1, 0)


# ---- Objectives: per-token losses, to be summed by `aggregate` -----------------------------


def policy_loss(
        kind: str, logprobs: Tensor, logprobs_old: Tensor, advantages: Tensor, mask: Tensor,
        clip_low: float = 0.2, clip_high: float = 0.2,
        clip_c: float | None = None, entropy: Tensor | None = None, args=None) -> LossAndStats:
    """Computes the policy-gradient loss, to be minimised; all (B, T) -> loss (B, T), stats.

    With r = exp(logprobs - logprobs_old), A = advantages, sg = stop-gradient and |y| = the
    row's number of mask-1 tokens:
      ppo        max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))     arXiv 1707.06347, eq. 7
                 with clip_c, at most -A clip_c where A < 0             arXiv 1912.09729, eq. 5
      gspo       ppo with r = sg[s] pi / sg[pi], s = (prod r)^(1/|y|)   arXiv 2507.18071, token
      gmpo       -mean(A) (prod r')^(1/|y|) at every token of the row   arXiv 2507.20673
                 where log r' is min(log r, clip_high) if A >= 0,
                 else max(log r, -clip_low): bounds in LOG space
      cispo      -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi     arXiv 2506.13585
                 bounds around 1, as in verl and slime (TRL's is an absolute cap)
      sapo       -A sigmoid(tau (r - 1)) 4 / tau                        arXiv 2511.20347
                 tau, no bound but a temperature, is clip_high if A > 0, else clip_low
                 (1 and 1.05 in the paper)
      reinforce  -A log pi; logprobs_old is used for the stats only     Williams 1992
    gspo (there with 3e-4, 4e-4), gmpo and sapo are as in their papers under aggregate's
    "seq-mean-token-mean". With logprobs_old = logprobs.detach(), r is exactly 1 and all six
    have REINFORCE's gradient (gmpo if A is constant along a row). Weights per token weigh a
    row of gmpo by their arithmetic mean. The ratios of gspo and gmpo are those of a row: where
    a unit has several outputs, each has its own.

    Any other kind is the name of an `objective`, which may take `entropy` (B, T) and `args`, too.

    stats: ratio (r; for gspo and gmpo the row's), ppo_kl (-log r: k1 of KL(old, new)),
    clipfrac (1 where the bound is active: no gradient there, with cispo a reduced one),
    clipfrac_lower (1 where the bound of clip_c is active), and those of an `objective`.

    Raises ValueError for an unknown kind, for clip_c <= 1, and if an `objective` gives another
    shape."""
    _check_choice("policy loss", kind, OBJECTIVES)
    if clip_c is not None and clip_c <= 1:
        raise ValueError(
            f"clip_c {clip_c} bounds the ratio from above: it must be greater than 1")
    inputs = _masked(mask, logprobs, logprobs_old.detach(), advantages.detach())
    return _policy_loss(kind, *inputs, clip_low, clip_high, clip_c, entropy, args)


def _policy_loss(
        kind, mask, logprobs, logprobs_old, advantages, clip_low, clip_high, clip_c, entropy,
        args):
    """Computes `policy_loss` from checked inputs, which are 0 where the mask is 0."""
    difference = logprobs - logprobs_old
    log_ratio = difference.clamp(-20, 20)  # far beyond any clip; exp can't overflow
    ratio = log_ratio.exp()
    clipped = torch.zeros_like(mask)
    clipped_lower = clipped
    own_stats = {}

    own = OBJECTIVES[kind]
    if own:
        given = dict(logprobs=logprobs, logprobs_old=logprobs_old, ratio=ratio,
                     advantages=advantages, mask=mask, entropy=entropy, args=args)
        loss = own(**{name: given[name] for name in own.takes})
        if isinstance(loss, tuple):
            loss, own_stats = loss
        if loss.shape != mask.shape:
            raise ValueError(f"the objective {kind!r} gives a loss of the shape "
                             f"{tuple(loss.shape)}: must be one for each token, (B, T) = "
                             f"{tuple(mask.shape)}")
    elif kind in ("ppo", "gspo"):
        if kind == "gspo":
            # A token's ratio has its row's value, and a gradient through its own logprob.
            log_row = _row_mean(difference.detach(), mask)
            ratio = (log_row + (logprobs - logprobs.detach())).clamp(max=10).exp()
        unbounded = -advantages * ratio
        bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
        loss = torch.maximum(unbounded, bounded)
        clipped = bounded > unbounded
        if clip_c is not None:
            upper = -advantages * clip_c
            clipped_lower = (advantages < 0) & (loss > upper)
            loss = torch.where(clipped_lower, upper, loss)
    elif kind == "gmpo":
        bounded = torch.where(advantages >= 0, log_ratio.clamp(max=clip_high),
                              log_ratio.clamp(min=-clip_low))
        clipped = bounded != log_ratio
        ratio = _row_mean(bounded, mask).exp()
        loss = -_row_mean(advantages, mask) * ratio
    elif kind == "cispo":
        weight = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
        clipped = weight != ratio
        loss = -weight * advantages * logprobs  # a token beyond the bounds keeps its gradient
    elif kind == "sapo":
        tau = torch.full_like(ratio, clip_low).masked_fill(advantages > 0, clip_high)
        loss = -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    else:
        loss = -advantages * logprobs
    stats = dict(ratio=ratio, ppo_kl=-difference, clipfrac=clipped,
                 clipfrac_lower=clipped_lower)
    return _loss_and_stats(mask, loss, **stats | own_stats)


@no_grad
def rollout_correction(
        kind: str, logprobs_old: Tensor, logprobs_rollout: Tensor, mask: Tensor,
        low: float | Sequence[float], high: float | Sequence[float]) -> LossAndStats:
    """Computes importance weights from the engine's policy to the trainer's; all (B, T).

    rho is exp(logprobs_old - logprobs_rollout) of a token. For seq_* it is the product of
    these over the row's mask-1 tokens, for geo_* their geometric mean.
        none                    1
        tis, seq_tis, geo_tis   min(rho, high)                     truncated, arXiv 1802.01561
        icepop                  rho inside [low, high], 0 outside  arXiv 2510.18855 (0.5 and 5)
        seq_mask, geo_mask      the same with the row's rho
        veto                    1, and 0 for a row with any token's rho outside [low, high]
    Several kinds, as in "tis,geo_mask", are multiplied, and a mask then counts as 0 or 1.
    low and high are one number for all of them, or a sequence with one for each.
    A token with weight 0 counts in `aggregate`'s denominators: dropping one must not make the
    others heavier. Decoupled PPO (arXiv 2505.24298) is policy_loss times "icepop" with low 0.
    A token with two logprobs of -inf has no rho: its weight (seq_*, geo_*: its row's) is NaN; a
    veto, or a mask beside another kind, lets it pass.

    stats: rollout_kl (-log rho per token: k1 of KL(rollout, old)), rollout_ratio (rho; of several
    kinds the last one's), rollout_clipped (1 where cut to high), rollout_dropped (1 where set to
    0), rollout_weight and rollout_weight_sq: mean(weight)^2 / mean(weight_sq) of the global means
    is the effective sample size, in [0, 1].

    Raises ValueError for an unknown kind, low > high, and too few or too many bounds."""
    mask, logprobs_old, logprobs_rollout = _masked(mask, logprobs_old, logprobs_rollout)
    difference = logprobs_old - logprobs_rollout
    clipped = torch.zeros_like(mask)
    dropped = clipped
    weights = torch.ones_like(difference)
    kinds = kind.split(",")
    n = len(kinds)
    lows, highs = (b if isinstance(b, Sequence) else [b] * n for b in (low, high))
    if n > 1 and ("none" in kinds or len(set(kinds)) < n) or not len(lows) == len(highs) == n:
        raise ValueError(f"{kind}: several kinds must differ, none of them be 'none', and each "
                         f"has one bound in {lows} and {highs}")
    for kind, low, high in zip(kinds, lows, highs):
        _check_choice("rollout correction", kind, ROLLOUT_CORRECTIONS)
        if low > high:
            raise ValueError(f"the lower bound {low} of {kind} exceeds the upper one, {high}")
        log_ratio = difference
        if kind.startswith("seq_"):
            log_ratio = difference.sum(-1, keepdim=True)  # (B, 1)
        elif kind.startswith("geo_"):
            log_ratio = _row_mean(difference, mask)  # (B, 1)
        ratio = log_ratio.clamp(-20, 20).exp()
        outside = mask & ((ratio < low) | (ratio > high))  # (B, T)
        if kind.endswith("tis"):
            clipped = clipped | (ratio > high)
            weights = weights * ratio.clamp(max=high)
        elif kind != "none":
            if kind == "veto":
                outside = outside.any(-1, keepdim=True)  # (B, 1)
            elif n == 1:
                weights = ratio
            dropped = dropped | outside
            weights = torch.where(outside, 0, weights)
    return _loss_and_stats(
        mask, weights, rollout_kl=-difference, rollout_ratio=ratio, rollout_clipped=clipped,
        rollout_dropped=dropped, rollout_weight=weights, rollout_weight_sq=weights.square())


def value_loss(values: Tensor, values_old: Tensor, returns: Tensor, mask: Tensor,
               clip: float | None) -> LossAndStats:
    """Computes PPO's clipped value loss; all (B, T) -> loss (B, T), stats.

        1/2 max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2)
        1/2 (V - R)^2    with clip=None

    See arXiv 2005.12729, sec. 3.

    stats: value_clipfrac (1 where the bound is active: no gradient there) and value_error
    (|V - R|)."""
    mask, values, values_old, returns = _masked(
        mask, values, values_old.detach(), returns.detach())
    error = values - returns
    unbounded = error.square()
    bounded = unbounded
    if clip is not None:
        bounded = (values_old + (values - values_old).clamp(-clip, clip) - returns).square()
    loss = 0.5 * torch.maximum(unbounded, bounded)
    return _loss_and_stats(
        mask, loss, value_clipfrac=bounded > unbounded, value_error=error.abs())


@no_grad
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Returns 1 - var(R - V) / var(R) over mask-1 tokens, (B, T) -> scalar.

    1 means a perfect critic; 0, one no better than a constant, or returns that do not vary."""
    # Sums of squares in place of variances: both would be divided by the same count.
    _, _, error, _ = _moments(returns - values, mask)
    _, _, total, _ = _moments(returns, mask)
    return torch.where(total > 0, 1 - error / total, 0).to(returns.dtype)


# ---- KL to the reference -------------------------------------------------------------------


def kl_estimate(logprobs: Tensor, logprobs_ref: Tensor, kind: str) -> Tensor:
    """Estimates KL(pi, pi_ref) at each token that pi sampled; any shape, also the result's.

    With d = logprobs - logprobs_ref (joschu.net/blog/kl-approx.html):
        k1         d                   unbiased; its mean gradient is 0, so for rewards only
        abs        |d|
        k2         d^2 / 2             biased value, right gradient (arXiv 2510.01555)
        k3         exp(-d) - 1 + d     unbiased, >= 0, low variance (arXiv 2402.03300, eq. 4);
                                       d is clamped to +-20 and the result to 10, with
                                       gradient 0 beyond
        k1+, k3+                       the value of k1 or k3, with the gradient of k2 (straight
                                       through)
    Raises ValueError for an unknown kind."""
    _check_choice("KL estimate", kind, KL_ESTIMATES)
    difference = logprobs - logprobs_ref.detach()
    # There is no mask here. A later one (in `aggregate`) stops values, but not the 0 * NaN in
    # our backward pass. So a difference that is not finite gets no gradient. It keeps its
    # value, because a NaN must be noticed.
    finite = difference.isfinite()
    k1 = torch.where(finite, difference, 0)
    k2 = 0.5 * k1.square()
    clamped = (-k1).clamp(-20, 20)
    k3 = (clamped.exp() - 1 - clamped).clamp(max=10)
    value = {"k1": k1, "abs": k1.abs(), "k2": k2, "k3": k3}[kind.rstrip("+")]
    if kind.endswith("+"):
        value = value.detach() + (k2 - k2.detach())
    return torch.where(finite, value, difference.detach())


@dataclass
class AdaptiveKL:
    """A coefficient that steers the KL to `target` (arXiv 1909.08593).

        coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon)

    is its update after n rollouts with a mean KL of `kl`."""

    coef: float = 0.001
    target: float = 0.1
    horizon: float = 10_000

    def update(self, kl: float, n: int) -> float:
        """Updates and returns the coefficient after n rollouts with a mean KL of `kl`."""
        self.coef *= 1 + min(max(float(kl) / self.target - 1, -0.2), 0.2) * n / self.horizon
        return self.coef


# ---- From per-token losses to one number ---------------------------------------------------


def aggregate(x: Tensor, mask: Tensor, mode: str = "token-mean",
              n_tokens: float | Tensor | None = None, n_seqs: float | Tensor | None = None,
              max_len: int | None = None, unit_tokens: Tensor | None = None) -> Tensor:
    """Sums x (B, T) over mask-1 tokens and divides by GLOBAL counts -> scalar.

        token-mean                sum / n_tokens               DAPO, arXiv 2503.14476
        token-sum                 sum
        seq-mean-token-sum        sum / n_seqs
        seq-mean-token-mean       sum of row means / n_seqs    GRPO, arXiv 2402.03300
        seq-mean-token-sum-norm   sum / (n_seqs max_len)       Dr. GRPO, arXiv 2503.20783

    A sequence is a row, or with unit_tokens a unit of several rows. unit_tokens (B,) has the
    mask-1 tokens of each row's whole unit: the mean over them is a unit's "row mean", and its
    rows together weigh as much as one row would.

    n_tokens and n_seqs count the mask-1 tokens, and the sequences with any of them, in the
    whole mini-batch: all its micro-batches on all ranks. The results for the micro-batches
    then ADD UP to that of the mini-batch, and no way to cut it (between rows) changes the
    gradient. By default they are the counts in this mask (see `count_sequences`), and
    max_len is its width.

    Raises ValueError for an unknown mode."""
    _check_choice("aggregation", mode, AGGREGATIONS)
    # With a mask of zeros the result is 0, but it still has a graph: under DDP a rank without
    # work has to run its backward pass too.
    mask, values = _masked(mask, x)
    count = 1
    if mode == "token-mean":
        count = mask.sum() if n_tokens is None else n_tokens
    elif mode.startswith("seq-mean"):
        count = count_sequences(mask, unit_tokens) if n_seqs is None else n_seqs
    if mode == "seq-mean-token-mean":
        lengths = mask.sum(-1) if unit_tokens is None else unit_tokens  # (B,)
        values = values / lengths.clamp(min=1)[:, None]
    if mode == "seq-mean-token-sum-norm":
        width = max_len or mask.shape[1]
        count = count * width
    count = torch.as_tensor(count, device=x.device)
    return (values.sum() / count.clamp(min=1)).to(values.dtype)


def count_sequences(mask: Tensor, unit_tokens: Tensor | None = None) -> Tensor:
    """Counts rows, or with unit_tokens (B,) units, that have mask-1 tokens -> scalar.

    A row is the share of its unit's tokens that it has, so that a unit counts 1."""
    lengths = mask.bool().sum(-1)  # (B,)
    if unit_tokens is None:
        unit_tokens = lengths
    return (lengths.double() / unit_tokens.clamp(min=1)).sum()


# ---- Token log-probabilities without the logits --------------------------------------------


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0,
                   chunk: int = 1024, entropy: bool = False, vocab_size: int | None = None,
                   banned: Sequence[int] = (),
                   softcap: float | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Computes log softmax(hidden @ weight.T / temperature) at targets, in little memory.

    hidden (T, H), weight (V, H), targets (T,) -> logprobs (T,), or with entropy=True a pair
    (logprobs, entropy), both (T,) and differentiable. With z = the logits over the
    temperature and y = the target:

        lse = log sum exp z,   log p = z - lse,   logprob = log p_y,   entropy = -sum p log p

    Logits exist for `chunk` VOCABULARY columns at a time, (T, chunk), in forward and again in
    backward. With blocks of columns, a block's rows of weight's gradient are complete after
    one product; blocks of tokens would need a float32 (V, H) to add them up. A block is also
    the same fraction of the logits, chunk / V, for any T. `chunk` is an upper bound: a block
    has at most V / 64 columns (or 256), so that three float32 blocks, the most alive at a
    time, are under 5% of the logits (for V > 16k).

    Half-precision operands give float32 logits and results; float64 stays float64. As in a
    linear layer, hidden follows autocast; weight is cast to hidden's dtype. Either may be
    frozen, and weight may be a tied embedding.

    Ids >= vocab_size (a padded vocabulary) and those in `banned` (the placeholder of images)
    get no probability, as in the engine; a target among them has logprob -inf. With softcap,
    logits before the temperature are softcap * tanh(logits / softcap), as in Gemma 2.

    Raises ValueError unless temperature and chunk are positive."""
    if temperature <= 0 or chunk <= 0:
        raise ValueError(f"temperature ({temperature}) and chunk ({chunk}) must be positive")
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    vocab = min(vocab_size or len(weight), len(weight))
    columns = min(chunk, max(vocab // 64, 256))
    # Each block of columns as (start, stop), in ranges between the ids that are left out.
    blocks = []
    first = 0
    for end in sorted({*banned, vocab}):
        if end > vocab:
            break
        for start in range(first, end, columns):
            blocks.append((start, min(start + columns, end)))
        first = end + 1
    both = _TokenLogprobs.apply(hidden, weight, targets, temperature, softcap, blocks, entropy)
    return both if entropy else both[0]


def _matmul(a, b):
    """Returns a @ b, in float32 for half-precision operands: tensor cores add in it anyway."""
    with torch.autocast(a.device.type, enabled=False):
        if a.dtype not in (torch.bfloat16, torch.float16):
            return a @ b
        return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _block(hidden, weight, targets, temperature, softcap, start, stop):
    """Computes the logits of n = stop - start vocabulary columns.

    Returns a tuple:
        logits (T, n)         softcapped, and divided by the temperature
        block_weight (n, H)   the block's rows of weight, in hidden's dtype
        inside (T,)           whether the token's target is one of these columns
        column (T, 1)         which of them it is; where it is not inside, any valid one"""
    block_weight = weight[start:stop].to(hidden.dtype)
    logits = _matmul(hidden, block_weight.T)
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1:
        logits /= temperature
    inside = (targets >= start) & (targets < stop)
    column = (targets - start).clamp(0, stop - start - 1)[:, None]
    return logits, block_weight, inside, column


class _TokenLogprobs(torch.autograd.Function):
    """`token_logprobs` with its own backward pass.

    blocks: the (start, stop) of each block of vocabulary columns."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, softcap, blocks, with_entropy):
        """Returns logprobs (T,) and entropy (T,), which is None unless with_entropy."""
        lses = []  # for each block, log sum exp z: (T,)
        entropies = []  # for each block, the entropy of its own softmax: (T,)
        target_logits = float("-inf")
        ctx.scale = temperature, softcap
        ctx.blocks = blocks
        for block in blocks:
            logits, _, inside, column = _block(hidden, weight, targets, *ctx.scale, *block)
            target_logits = torch.where(inside, logits.gather(1, column).squeeze(1), target_logits)
            lses.append(logits.logsumexp(-1))
            if with_entropy:
                logp = logits.sub_(lses[-1][:, None])
                entropies.append(-logp.exp().mul_(logp).sum(-1))
                del logp
            # Here and below: a name that stays bound keeps this block alive beside the next.
            del logits
        lses = torch.stack(lses)  # (blocks, T)
        lse = lses.logsumexp(0)  # (T,), over all columns
        entropy = None
        if with_entropy:
            # The entropy of choosing a block, plus that of choosing a column in it. Both terms
            # have one sign, so that nothing cancels.
            log_share = lses - lse  # (blocks, T), log of each block's probability
            entropy = (log_share.exp() * (torch.stack(entropies) - log_share)).sum(0)
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.set_materialize_grads(False)  # an entropy that is only logged costs no gradient
        return target_logits - lse, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        """Computes the gradients of hidden and weight from dz, that of z:

            dz = g (onehot(y) - p) - g' p (log p + entropy)

        with g = grad_logprobs and g' = grad_entropy. Autograd casts them to the inputs'
        dtypes."""
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        grad_hidden = torch.zeros_like(hidden, dtype=lse.dtype) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        g = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs
        temperature, softcap = ctx.scale
        for start, stop in ctx.blocks:
            dz, block_weight, inside, column = _block(
                hidden, weight, targets, *ctx.scale, start, stop)
            tanh = dz * (temperature / softcap) if softcap else None
            # From here on in place, to save memory: dz holds z, then log p, and at last dz.
            dz -= lse[:, None]
            if grad_entropy is None:
                dz.exp_().mul_(-g[:, None])
            else:
                p = dz.exp()
                dz.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(g[:, None])
                dz.mul_(p).neg_()
                del p
            dz.scatter_add_(1, column, torch.where(inside, g, 0)[:, None])
            if temperature != 1:
                dz /= temperature
            if softcap:
                dz *= 1 - tanh.square_()
            dz = dz.to(hidden.dtype)
            if needs_hidden:
                grad_hidden += _matmul(dz, block_weight)
            if needs_weight:
                grad_weight[start:stop] = _matmul(dz.T, hidden)
            del dz, tanh
        return grad_hidden, grad_weight, None, None, None, None, None
