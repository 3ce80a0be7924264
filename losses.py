"""Advantages, objectives, estimators and token log-probabilities: pure functions of tensors.

    advantages = grpo_advantages(rewards, groups)[:, None].expand_as(mask)  # the line to change
    loss, stats = policy_loss("ppo", logprobs, logprobs_old, advantages, mask, clip_high=0.28)
    aggregate(loss, mask, "token-mean", n_tokens=tokens_in_the_global_batch).backward()

Words used throughout:
    (B, T), (N,)    trajectories x response tokens, right-padded; trajectories, one number each
    mask            (B, T), bool or 0/1: 1 = sampled by the policy; 0 = tool, user, template, pad.
                    What stands there, NaN included, changes no value and no gradient; results are 0
                    there. Inputs are cleaned by `where` BEFORE any arithmetic: 0 * NaN is NaN.
    logprobs, _old  of the policy in training, and before this update, both by the trainer
    _rollout, _ref  of the engine that sampled (the behaviour policy), and of the frozen reference
    stats           detached (B, T) tensors; the caller reduces them as losses, over global counts
Everything keeps its input's dtype (float64 stays float64). A batch without any mask-1 token gives
0, not NaN; an unknown kind or mode raises ValueError."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, no_grad
from torch.autograd.function import once_differentiable

POLICY_LOSSES = ("ppo", "gspo", "gmpo", "cispo", "sapo", "reinforce")
ROLLOUT_CORRECTIONS = ("none", "tis", "icepop", "seq_tis", "seq_mask", "geo_tis", "geo_mask",
                       "veto")
KL_ESTIMATES = ("k1", "abs", "k2", "k3", "k1+", "k3+")
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
                "seq-mean-token-sum-norm")

LossAndStats = tuple[Tensor, dict[str, Tensor]]


def _masked(mask, *tensors):
    """The mask as bool, and the tensors, 0 where it is 0."""
    mask = mask.bool()
    return mask, *(torch.where(mask, x, 0) for x in tensors)


def _result(mask, x, **stats):
    """x and its stats, 0 where the mask is 0; the stats detached, in the dtype of x."""
    clean = lambda y: torch.where(mask, y, 0)
    return clean(x), {name: clean(y.detach().to(x.dtype)) for name, y in stats.items()}


def _check(name, value, choices):
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}: choose from {', '.join(choices)}")


# ---- Advantages: constants of the update, so nothing here builds a graph -------------------------


@no_grad
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float,
        turn_discount: float = 1.0) -> tuple[Tensor, Tensor]:
    """Generalised advantages, all (B, T) -> advantages, returns (arXiv 1506.02438, eq. 16).

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1},   returns = A + V

    t+1 is the next mask-1 token: V and A are carried over tool and user tokens unchanged, so those
    are invisible. After the last mask-1 token both are 0. At a turn's last token (turns are runs of
    mask-1 tokens) gamma is times turn_discount: with gamma 1, rewards are discounted by turns."""
    mask, rewards, values = _masked(mask, rewards, values)
    advantages = torch.zeros_like(rewards + values)
    gammas = torch.full_like(advantages, gamma * turn_discount)
    gammas = gammas.masked_fill(mask.roll(-1, 1), gamma)  # the last column's counts for nothing
    next_value = next_advantage = advantages.new_zeros(len(mask))  # (B,)
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gammas[:, t] * next_value - values[:, t]
        next_advantage = torch.where(mask[:, t], delta + gammas[:, t] * lam * next_advantage,
                                     next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage
    advantages = torch.where(mask, advantages, 0)
    return advantages, advantages + values


@no_grad
def reinforce_pp_advantages(rewards: Tensor, mask: Tensor, gamma: float,
                            turn_discount: float = 1.0) -> Tensor:
    """REINFORCE++: every token's discounted return, (B, T) -> (B, T) (arXiv 2501.03262).

        A_t = r_t + gamma A_{t+1}    over mask-1 tokens and with turn_discount as in `gae`

    The paper then whitens A over the global batch (`whiten`). Its -baseline form first subtracts
    the group's mean from the rewards (`grpo_advantages(..., normalize_std=False)`)."""
    rewards = _floating(rewards)
    values = torch.zeros_like(rewards)  # so A is the return
    return gae(rewards, values, mask, gamma, 1.0, turn_discount)[0]


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over mask-1 tokens, (B, T) -> (B, T); var unbiased;
    shift_mean=False keeps the mean where it was. x should be the WHOLE batch, of all ranks."""
    centered, mean, squares, n = _moments(x, mask)
    white = centered * (squares / (n - 1).clamp(min=1) + 1e-8).rsqrt()
    return torch.where(mask.bool(), white if shift_mean else white + mean, 0).to(x.dtype)


def _moments(x, mask):
    """Of x (..., B, T) over mask-1 tokens, in float64: x minus its mean, the mean, the squares' sum
    around it, and the number of tokens. A second pass, because E[x^2] - mean^2 cancels."""
    mask, x = _masked(mask, x.double())
    n = mask.sum()
    mean = x.sum((-2, -1)) / n.clamp(min=1)
    centered = torch.where(mask, x - mean[..., None, None], 0)
    return centered, mean, centered.square().sum((-2, -1)), n


def _floating(x):
    return x.to(torch.result_type(x, 1.0))  # whole numbers: the default dtype


def _group_sum(x, groups):
    """The total of each member's group, (N,) -> (N,); labels are any integers in any order."""
    labels, index = torch.unique(groups, return_inverse=True)
    return x.new_zeros(len(labels)).index_add_(0, index, x)[index]


def _center(rewards, groups):
    """Rewards minus their group's mean, and the group's size. In float64: the float32 mean of eight
    times 0.1 is not quite 0.1, an error that over a std of 0 + eps would be a signal."""
    rewards = rewards.double()
    size = _group_sum(torch.ones_like(rewards), groups)
    return rewards - _group_sum(rewards, groups) / size, size


@no_grad
def grpo_advantages(rewards: Tensor, groups: Tensor, normalize_std: bool = True,
                    eps: float = 1e-6) -> Tensor:
    """GRPO, (N,) -> (N,) (arXiv 2402.03300); with normalize_std=False Dr. GRPO (arXiv 2503.20783).

        A_i = (r_i - mean_G) / (std_G + eps)    std unbiased; one alone, or equal rewards, get 0"""
    centered, size = _center(rewards, groups)
    if normalize_std:
        std = (_group_sum(centered.square(), groups) / (size - 1).clamp(min=1)).sqrt()
        centered /= torch.where(std > 0, std + eps, 1)  # so that 0 stays 0 with eps = 0 as well
    return centered.type_as(_floating(rewards))


@no_grad
def gigpo_advantages(rewards: Tensor, mask: Tensor, states: Tensor,
                     turn_discount: float) -> Tensor:
    """GiGPO's step advantages, (B, T) -> (B, T), to be added to the rollouts' own (arXiv
    2505.10978, eq. 7; there with the weight 1).

        R_k = sum_{j >= k} turn_discount^(j - k) r_j,    A = `grpo_advantages` of R over a state

    r_j: the reward of turn j, a run of mask-1 tokens, all of which get its A. states (turns,): in
    batch order, equal integers where turns of one group met the same state; one alone gets 0."""
    mask = mask.bool()
    starts = mask & ~torch.nn.functional.pad(mask, (1, -1))  # (B, T)
    returns = reinforce_pp_advantages(rewards, mask, 1.0, turn_discount)[starts]  # (turns,)
    advantages = torch.cat([returns.new_zeros(1), grpo_advantages(returns, states)])
    return torch.where(mask, advantages[starts.flatten().cumsum(0).view_as(mask)], 0)


@no_grad
def rloo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """REINFORCE leave-one-out, (N,) -> (N,) (arXiv 2402.14740).

        A_i = r_i - mean of the OTHERS in G = (r_i - mean_G) n / (n - 1)    a group of one gets 0"""
    centered, size = _center(rewards, groups)
    return (centered * size / (size - 1).clamp(min=1)).type_as(_floating(rewards))


@no_grad
def opo_advantages(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """OPO's baseline of least variance, weighed by mask-1 tokens, (N,) -> (N,) (arXiv 2505.23585).

        A_i = r_i - sum_G(len r) / sum_G(len)    a group of one gets 0"""
    centered, _ = _center(rewards, groups)  # so that equal rewards give 0, not a rounding error
    lengths = lengths.double()
    baseline = _group_sum(lengths * centered, groups) / _group_sum(lengths, groups).clamp(min=1)
    return (centered - baseline).type_as(_floating(rewards))


@no_grad
def remax_advantages(rewards: Tensor, baselines: Tensor) -> Tensor:
    """ReMax, (N,) -> (N,) (arXiv 2310.10505): A_i = r_i - the reward of a greedy rollout."""
    return _floating(rewards) - baselines


@no_grad
def overlong_penalty(lengths: Tensor, max_len: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment, (N,) -> (N,) in [-1, 0] (arXiv 2503.14476, eq. 13).

        0 up to max_len - buffer tokens, then (max_len - buffer - len) / buffer, -1 from max_len on

    Raises ValueError unless 0 < buffer <= max_len."""
    if not 0 < buffer <= max_len:
        raise ValueError(f"the overlong buffer {buffer} must lie between 1 and max_len {max_len}")
    return ((max_len - buffer - _floating(lengths)) / buffer).clamp(-1, 0)


# ---- Objectives: per-token losses, to be summed by `aggregate` -----------------------------------


def policy_loss(
        kind: str, logprobs: Tensor, logprobs_old: Tensor, advantages: Tensor, mask: Tensor,
        clip_low: float = 0.2, clip_high: float = 0.2, clip_c: float | None = None) -> LossAndStats:
    """The policy-gradient objective, to be minimised; all (B, T) -> per-token loss (B, T), stats.

    With r = exp(logprobs - logprobs_old), A = advantages, sg = stop-gradient, |y| = the row's
    number of mask-1 tokens:
        ppo        max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))     arXiv 1707.06347, eq. 7
                   with clip_c, at most -A clip_c where A < 0             arXiv 1912.09729, eq. 5
        gspo       with r = sg[s] pi / sg[pi], s = (prod r)^(1/|y|)       arXiv 2507.18071, token
        gmpo       -mean(A) (prod r')^(1/|y|) at every token of the row,  arXiv 2507.20673
                   log r' = min(log r, clip_high) if A >= 0 else max(log r, -clip_low): LOG bounds
        cispo      -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi     arXiv 2506.13585
                   (bounds around 1, as in verl and slime; TRL's is an absolute cap)
        sapo       -A sigmoid(tau (r - 1)) 4 / tau, tau = clip_high       arXiv 2511.20347
                   if A > 0, else clip_low (there 1 and 1.05): temperatures, no bounds
        reinforce  -A log pi; logprobs_old enters only the stats          Williams 1992
    gspo (3e-4, 4e-4), gmpo and sapo are their papers' under aggregate's "seq-mean-token-mean". With
    logprobs_old = logprobs.detach(), r is exactly 1 and all six have REINFORCE's gradient (gmpo if
    A is constant along a row). Token weights weigh a row of gmpo by their arithmetic mean.

    stats: ratio (r; gspo, gmpo: the row's), ppo_kl (-log r: k1 of KL(old, new)), clipfrac (the
    bound is active: no gradient, for cispo a reduced one), clipfrac_lower (the dual clip is).
    ValueError: unknown kind, or clip_c <= 1."""
    _check("policy loss", kind, POLICY_LOSSES)
    if clip_c is not None and clip_c <= 1:
        raise ValueError(f"clip_c {clip_c} bounds the ratio from above: it must be greater than 1")
    mask, logprobs, logprobs_old, advantages = _masked(
        mask, logprobs, logprobs_old.detach(), advantages.detach())
    row_mean = lambda x: x.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)  # (B, 1)
    difference = logprobs - logprobs_old
    log_ratio = difference.clamp(-20, 20)  # far beyond any clip; exp can't overflow
    ratio = log_ratio.exp()
    clipped = clipped_lower = torch.zeros_like(mask)
    if kind in ("ppo", "gspo"):
        if kind == "gspo":  # the row's value, with each token's own gradient
            log_row = row_mean(difference.detach())
            ratio = (log_row + (logprobs - logprobs.detach())).clamp(max=10).exp()
        free, bounded = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
        loss, clipped = torch.maximum(free, bounded), bounded > free
        if clip_c is not None:
            clipped_lower = (advantages < 0) & (loss > -advantages * clip_c)
            loss = torch.where(clipped_lower, -advantages * clip_c, loss)
    elif kind == "gmpo":
        bounded = torch.where(advantages >= 0, log_ratio.clamp(max=clip_high),
                              log_ratio.clamp(min=-clip_low))
        clipped = bounded != log_ratio
        ratio = row_mean(bounded).exp()
        loss = -row_mean(advantages) * ratio
    elif kind == "cispo":
        weight = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
        clipped = weight != ratio
        loss = -weight * advantages * logprobs  # a token beyond the bounds keeps its gradient
    elif kind == "sapo":
        tau = torch.full_like(ratio, clip_low).masked_fill(advantages > 0, clip_high)
        loss = -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    else:
        loss = -advantages * logprobs
    return _result(mask, loss, ratio=ratio, ppo_kl=logprobs_old - logprobs, clipfrac=clipped,
                   clipfrac_lower=clipped_lower)


@no_grad
def rollout_correction(
        kind: str, logprobs_old: Tensor, logprobs_rollout: Tensor, mask: Tensor,
        low: float | Sequence[float], high: float | Sequence[float]) -> LossAndStats:
    """Importance weights from the engine's policy to the trainer's, all (B, T) -> (B, T), stats.

    With rho = exp(logprobs_old - logprobs_rollout) per token; over the row's mask-1 tokens, for
    seq_* their product, for geo_* their geometric mean:
        none                       1
        tis, seq_tis, geo_tis      min(rho, high)                     truncated, arXiv 1802.01561
        icepop                     rho inside [low, high], 0 outside  arXiv 2510.18855 (0.5 and 5)
        seq_mask, geo_mask         the same with the row's rho
        veto                       1, and 0 for a row with any token's rho outside [low, high]
    Several, "tis,geo_mask": the product of the weights, to which a mask adds 0 or 1; low and high
    are then one number for all, or one for each. What gets weight 0 still counts in `aggregate`'s
    denominators: dropping a token must not make the others heavier. Decoupled PPO (arXiv
    2505.24298) is policy_loss times "icepop", low = 0.

    A token whose logprobs are both -inf has no rho: its weight is NaN, or its row's, but not that
    of a veto or of a mask beside a weight, which let it pass.

    stats: rollout_kl (-log rho per token: k1 of KL(rollout, old)), rollout_ratio (rho; of several
    kinds the last's), rollout_clipped (cut to high), rollout_dropped (set to 0), rollout_weight
    and rollout_weight_sq, whose global means give the effective sample size, mean(weight)^2 /
    mean(weight_sq), in [0, 1]. ValueError: unknown kind, low > high, bounds not one for each."""
    mask, logprobs_old, logprobs_rollout = _masked(mask, logprobs_old, logprobs_rollout)
    difference = logprobs_old - logprobs_rollout
    clipped = dropped = torch.zeros_like(mask)
    weights = torch.ones_like(difference)
    kinds = kind.split(",")
    bounds = (x if isinstance(x, Sequence) else [x] * len(kinds) for x in (low, high))
    for kind, low, high in zip(kinds, *bounds, strict=True):
        _check("rollout correction", kind, ROLLOUT_CORRECTIONS)
        if low > high:
            raise ValueError(f"the lower bound {low} of {kind} exceeds the upper one, {high}")
        log_ratio = difference
        if "_" in kind:
            log_ratio = difference.sum(-1, keepdim=True)  # (B, 1)
        if kind.startswith("geo"):
            log_ratio = log_ratio / mask.sum(-1, keepdim=True).clamp(min=1)
        ratio = log_ratio.clamp(-20, 20).exp()
        outside = mask & ((ratio < low) | (ratio > high))
        if kind.endswith("tis"):
            clipped, weights = clipped | (ratio > high), weights * ratio.clamp(max=high)
        elif kind != "none":
            if kind == "veto":
                outside = outside.any(-1, keepdim=True)
            elif len(kinds) == 1:
                weights = ratio
            dropped, weights = dropped | outside, torch.where(outside, 0, weights)
    return _result(mask, weights, rollout_kl=-difference, rollout_ratio=ratio,
                   rollout_clipped=clipped, rollout_dropped=dropped, rollout_weight=weights,
                   rollout_weight_sq=weights.square())


def value_loss(values: Tensor, values_old: Tensor, returns: Tensor, mask: Tensor,
               clip: float | None) -> LossAndStats:
    """PPO's clipped value loss; all (B, T) -> loss (B, T), stats (arXiv 2005.12729, sec. 3).

        1/2 max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2)    clip=None: 1/2 (V - R)^2

    stats: value_clipfrac (the bound is active: no gradient), value_error (|V - R|)."""
    mask, values, values_old, returns = _masked(mask, values, values_old.detach(), returns.detach())
    error = values - returns
    free = bounded = error.square()
    if clip is not None:
        bounded = (values_old + (values - values_old).clamp(-clip, clip) - returns).square()
    return _result(mask, 0.5 * torch.maximum(free, bounded), value_clipfrac=bounded > free,
                   value_error=error.abs())


@no_grad
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - var(R - V) / var(R) over mask-1 tokens, (B, T) -> scalar: 1 is a perfect critic, 0 as
    good as a constant, or returns that do not vary."""
    error, total = _moments(torch.stack([returns - values, returns]), mask)[2]
    return torch.where(total > 0, 1 - error / total, 0).to(returns.dtype)


# ---- KL to the reference -------------------------------------------------------------------------


def kl_estimate(logprobs: Tensor, logprobs_ref: Tensor, kind: str) -> Tensor:
    """KL(pi, pi_ref) per token sampled from pi, any shape (joschu.net/blog/kl-approx.html).

    With d = logprobs - logprobs_ref:
        k1         d                   unbiased; its gradient is 0 in the mean: for the reward only
        abs        |d|
        k2         d^2 / 2             biased value, right gradient (arXiv 2510.01555)
        k3         exp(-d) - 1 + d     unbiased, >= 0, low variance (arXiv 2402.03300, eq. 4); d
                                       clamped to +-20, the result to 10, without gradient beyond
        k1+, k3+   the value of k1 or k3 with the gradient of k2 (straight through)"""
    _check("KL estimate", kind, KL_ESTIMATES)
    d = logprobs - logprobs_ref.detach()
    # There is no mask here, and a later one (aggregate) stops values but not the 0 * NaN in our own
    # backward. So what is not finite takes no gradient, yet keeps its value: a NaN must stay loud.
    finite = d.isfinite()
    safe = torch.where(finite, d, 0)
    x = (-safe).clamp(-20, 20)
    k2 = 0.5 * safe.square()
    value = {"k1": safe, "abs": safe.abs(), "k2": k2,
             "k3": (x.exp() - 1 - x).clamp(max=10)}[kind.rstrip("+")]
    if kind.endswith("+"):
        value = value.detach() + (k2 - k2.detach())
    return torch.where(finite, value, d.detach())


@dataclass
class AdaptiveKL:
    """A coefficient that steers the KL to `target` (arXiv 1909.08593); after n trajectories of `kl`

        coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon)

    A constant coefficient is a plain float: `float(coef)` reads either."""

    coef: float = 0.001
    target: float = 0.1
    horizon: float = 10_000

    def update(self, kl: float, n: int) -> float:
        self.coef *= 1 + min(max(float(kl) / self.target - 1, -0.2), 0.2) * n / self.horizon
        return self.coef

    def __float__(self) -> float:
        return float(self.coef)


# ---- From per-token losses to one number ---------------------------------------------------------


def aggregate(x: Tensor, mask: Tensor, mode: str = "token-mean",
              n_tokens: float | Tensor | None = None, n_seqs: float | Tensor | None = None,
              max_len: int | None = None) -> Tensor:
    """The sum of x (B, T) over mask-1 tokens, divided by GLOBAL counts -> scalar.

        token-mean                 sum / n_tokens                      DAPO, arXiv 2503.14476
        token-sum                  sum
        seq-mean-token-sum         sum / n_seqs
        seq-mean-token-mean        sum of row means / n_seqs           GRPO, arXiv 2402.03300
        seq-mean-token-sum-norm    sum / (n_seqs max_len)              Dr. GRPO, arXiv 2503.20783

    n_tokens, n_seqs (rows with any mask-1 token): of the whole mini-batch, over its micro-batches
    and all ranks. Then the parts ADD UP to the whole, and no way to cut it (between rows) changes
    the gradient. By default they are those of this mask, and max_len is its width."""
    _check("aggregation", mode, AGGREGATIONS)
    mask, x = _masked(mask, x)  # even if all 0 still a graph: a filler runs its backward too (DDP)
    lengths = mask.sum(-1)  # (B,)
    count = 1
    if mode == "token-mean":
        count = lengths.sum() if n_tokens is None else n_tokens
    elif mode.startswith("seq-mean"):
        count = (lengths > 0).sum() if n_seqs is None else n_seqs
    if mode == "seq-mean-token-mean":
        x = x / lengths.clamp(min=1)[:, None]
    if mode == "seq-mean-token-sum-norm":
        count = count * (max_len or mask.shape[1])
    return x.sum() / torch.as_tensor(count, device=x.device).clamp(min=1)


# ---- Token log-probabilities without the logits --------------------------------------------------


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0,
                   chunk: int = 1024, entropy: bool = False, vocab_size: int | None = None,
                   banned: Sequence[int] = (),
                   softcap: float | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) at targets, (T, H), (V, H), (T,) -> (T,), or
    with entropy=True both (logprobs, entropy), both differentiable. With z = the logits over the
    temperature and y = the target:

        lse = log sum exp z,   log p = z - lse,   logprob = log p_y,   entropy = -sum p log p

    Logits exist `chunk` VOCABULARY columns at a time, (T, chunk), forward and again in backward: a
    block's rows of weight's gradient are complete after one product (chunks of tokens would need a
    float32 (V, H) to add them up), and for any T a block is the same fraction of the logits,
    chunk / V. `chunk` is an upper bound: no block exceeds V / 64 columns (or 256), so that three
    float32 blocks, the most alive at a time, are under 5% of the logits (V > 16k).

    Half-precision operands give float32 logits and results; float64 stays float64. As in a linear
    layer, hidden follows autocast; weight is cast to hidden's dtype. Either may be frozen; weight
    may be a tied embedding. Ids >= vocab_size and those in `banned` get no probability, as in the
    engine (a padded vocabulary, the placeholder of images); a target among them has logprob -inf.
    softcap: logits, before the temperature, are softcap * tanh(logits / softcap), as in Gemma 2."""
    if temperature <= 0 or chunk <= 0:
        raise ValueError(f"temperature ({temperature}) and chunk ({chunk}) must be positive")
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    vocab = min(vocab_size or len(weight), len(weight))
    columns = min(chunk, max(vocab // 64, 256))
    edges = [-1, *sorted(banned), vocab]  # blocks are cut at the ids that are left out
    blocks = [(start, min(start + columns, stop)) for before, stop in zip(edges, edges[1:])
              for start in range(before + 1, stop, columns)]
    both = _TokenLogprobs.apply(hidden, weight, targets, temperature, softcap, blocks, entropy)
    return both if entropy else both[0]


def _matmul(a, b):
    """a @ b; in float32 for half-precision operands, in which tensor cores accumulate anyway."""
    with torch.autocast(a.device.type, enabled=False):
        if a.dtype not in (torch.bfloat16, torch.float16):
            return a @ b
        return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _block(hidden, weight, targets, temperature, softcap, start, stop):
    """A block's logits (T, n), weights (n, H); is the target inside (T,), which column (T, 1)?"""
    w = weight[start:stop].to(hidden.dtype)
    logits = _matmul(hidden, w.T)
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1:
        logits /= temperature
    inside = (targets >= start) & (targets < stop)
    return logits, w, inside, (targets - start).clamp(0, stop - start - 1)[:, None]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, softcap, blocks, with_entropy):
        lses, entropies = [], []  # per block, (T,): log sum exp z; its softmax's entropy
        target_logits = float("-inf")
        scale = temperature, softcap
        for block in blocks:
            logits, _, inside, column = _block(hidden, weight, targets, *scale, *block)
            target_logits = torch.where(inside, logits.gather(1, column).squeeze(1), target_logits)
            lses.append(logits.logsumexp(-1))
            if with_entropy:
                logp = logits.sub_(lses[-1][:, None])
                entropies.append(-logp.exp().mul_(logp).sum(-1))
                del logp
            del logits  # here and below: a name left bound keeps this block alive beside the next
        lses = torch.stack(lses)  # (blocks, T)
        lse = lses.logsumexp(0)  # of all columns, in one rounding more than one pass would take
        entropy = None
        if with_entropy:  # of a block's choice, then of a column in it: one sign, nothing cancels
            log_share = lses - lse  # of each block in the probability, (blocks, T)
            entropy = (log_share.exp() * (torch.stack(entropies) - log_share)).sum(0)
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.scale, ctx.blocks = scale, blocks
        ctx.set_materialize_grads(False)  # an entropy that is only logged costs no gradient
        return target_logits - lse, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        """dz = g (onehot(y) - p) - g' p (log p + entropy), g = grad_logprobs, g' = grad_entropy."""
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=lse.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        g = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs
        temperature, softcap = ctx.scale
        for start, stop in ctx.blocks:
            dz, w, inside, column = _block(hidden, weight, targets, *ctx.scale, start, stop)
            tanh = dz * (temperature / softcap) if softcap else None
            dz -= lse[:, None]  # log p; in place from here on, memory being the point
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
            if grad_hidden is not None:
                grad_hidden += _matmul(dz, w)
            if grad_weight is not None:
                grad_weight[start:stop] = _matmul(dz.T, hidden)
            del dz, tanh
        return grad_hidden, grad_weight, *[None] * 5  # cast by autograd
