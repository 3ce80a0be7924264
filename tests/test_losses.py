"""losses.py against numbers computed some other way: by hand, by plain Python loops, by finite differences, by autograd
through log_softmax. All in float64 unless the dtype is the subject."""

import itertools
import math
import statistics
import sys

import pytest
import torch
from conftest import OUR_OBJECTIVES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import losses
from losses import (
    AdaptiveKL,
    aggregate,
    explained_variance,
    gae,
    gigpo_advantages,
    grpo_advantages,
    kl_estimate,
    opo_advantages,
    overlong_penalty,
    policy_loss,
    reinforce_pp_advantages,
    remax_advantages,
    rloo_advantages,
    rollout_correction,
    token_logprobs,
    value_loss,
    whiten,
)

# As in conftest.py, fixed: a fork may add to those of losses.py.
ROLLOUT_CORRECTIONS = ("none", "tis", "icepop", "seq_tis", "seq_mask", "geo_tis", "geo_mask", "veto")
KL_ESTIMATES = ("k1", "abs", "k2", "k3", "k1+", "k3+")
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
GARBAGE = [float("nan"), float("inf"), -float("inf"), 1e30]
few = settings(max_examples=40, deadline=None, derandomize=True)
close = torch.testing.assert_close


def t(*rows, dtype=torch.float64):
    return torch.tensor(rows if len(rows) > 1 else rows[0], dtype=dtype)


def make(seed=0, B=5, T=7, dtype=torch.float64):
    """Random inputs of a batch: holes in the mask, garbage where it is 0, one row without any token."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(B, T, generator=g) < 0.6
    mask[0, 0], mask[B - 1] = True, False
    draw = lambda scale=1.0: (torch.randn(B, T, generator=g, dtype=torch.float64) * scale).to(dtype)
    old = -draw().abs() - 0.1
    x = {"mask": mask, "logprobs": old + draw(0.4), "logprobs_old": old, "logprobs_rollout": old + draw(0.3)}
    x |= {"logprobs_ref": old + draw(0.5), "advantages": draw(), "rewards": draw(), "values": draw()}
    return x | {"values_old": draw(), "returns": draw()}


def grad_of(f, x):
    """The gradient at x of sum(w f(x)); the weights w are uneven, so that no position can stand in for another."""
    x = x.detach().clone().requires_grad_()
    y = f(x)
    (grad,) = torch.autograd.grad((y * torch.linspace(0.5, 2, y.numel(), dtype=y.dtype).view_as(y)).sum(), x)
    return grad


def finite_difference(f, x, step=1e-6):
    """The same by central differences of f, which maps nested lists of floats to nested lists."""
    x = x.tolist()
    flat = lambda y: [v for row in y for v in row] if y and isinstance(y[0], list) else y
    weights = lambda n: torch.linspace(0.5, 2, n, dtype=torch.float64).tolist()
    total = lambda y: sum(a * b for a, b in zip(weights(len(flat(y))), flat(y)))
    grad = [[0.0] * len(row) for row in x]
    for i, row in enumerate(x):
        for j, v in enumerate(row):
            row[j] = v + step
            up = total(f(x))
            row[j] = v - step
            grad[i][j] = (up - total(f(x))) / (2 * step)
            row[j] = v
    return t(grad)


# ---- Advantages ------------------------------------------------------------------------------------------------------


def test_gae_by_hand():
    # gamma = 0.5, lam = 0.5. Token 1 is a tool's, so token 2 follows token 0.
    # t=3: delta = 1 - 2 = -1             A = -1
    # t=2: delta = 0 + 0.5 * 2 - 1 = 0    A = 0 + 0.25 * -1 = -0.25
    # t=0: delta = 4 + 0.5 * 1 - 3 = 1.5  A = 1.5 + 0.25 * -0.25 = 1.4375
    nan = math.nan
    advantages, returns = gae(t([[4, nan, 0, 1, nan]]), t([[3, nan, 1, 2, nan]]), t([[1, 0, 1, 1, 0]]), 0.5, 0.5)
    close(advantages, t([[1.4375, 0, -0.25, -1, 0]]))
    close(returns, t([[4.4375, 0, 0.75, 1, 0]]))


@pytest.mark.parametrize("gamma,lam", [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_is_plain_gae_on_the_policys_tokens(gamma, lam):
    x = make(1)
    advantages, returns = gae(x["rewards"], x["values"], x["mask"], gamma, lam)
    for b, m in enumerate(x["mask"]):
        r, v = x["rewards"][b][m].tolist(), x["values"][b][m].tolist()  # drop the masked tokens, take the sum
        deltas = [r[i] + gamma * (v[i + 1] if i + 1 < len(v) else 0) - v[i] for i in range(len(v))]
        want = [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[i:])) for i in range(len(v))]
        close(advantages[b][m], t(want))
        close(returns[b][m], t([a + c for a, c in zip(want, v)]))
        assert (advantages[b][~m] == 0).all() and (returns[b][~m] == 0).all()


def test_gae_builds_no_graph():
    x = make(1)
    assert not gae(x["rewards"], x["values"].requires_grad_(), x["mask"], 1.0, 1.0)[0].requires_grad


def test_reinforce_pp_is_the_discounted_return():
    rewards, mask = t([[1, math.nan, 2, 4], [8, 8, 8, 8]]), t([[1, 0, 1, 1], [0, 0, 1, 0]])
    close(reinforce_pp_advantages(rewards, mask, 0.5), t([[1 + 0.5 * (2 + 0.5 * 4), 0, 4, 4], [0, 0, 8, 0]]))
    got = reinforce_pp_advantages(torch.tensor([[0, 0, 1]]), torch.ones(1, 3), 0.9)  # whole-number rewards
    close(got, t([[0.81, 0.9, 1]], dtype=torch.float32))


def test_whiten():
    x, mask = t([[1, 2, math.nan], [3, math.inf, 6]]), t([[1, 1, 0], [1, 0, 1]])
    values = [1, 2, 3, 6]
    mean, std = statistics.mean(values), math.sqrt(statistics.variance(values) + 1e-8)
    want = t([[(1 - mean) / std, (2 - mean) / std, 0], [(3 - mean) / std, 0, (6 - mean) / std]])
    close(whiten(x, mask), want)
    close(whiten(x, mask, shift_mean=False), torch.where(mask.bool(), want + mean, 0))
    assert whiten(x.float(), mask).dtype == torch.float32
    constant = whiten(torch.full((4, 8), 0.1), torch.ones(4, 8))  # float32 rounding must not be blown up to a signal
    assert constant.abs().max() < 1e-6


REWARDS, GROUPS, LENGTHS = t([1.0, 4, 0, 7, 0, 2, 3]), torch.tensor([9, -2, 9, 5, 9, -2, 9]), t([1.0, 2, 3, 4, 0, 6, 7])


def by_group(f):
    """f(reward, own index within the group, rewards of the group, lengths of the group) for every member, in order."""
    out = []
    for i, g in enumerate(GROUPS.tolist()):
        members = [j for j, h in enumerate(GROUPS.tolist()) if h == g]
        out.append(f(members.index(i), [REWARDS[j].item() for j in members], [LENGTHS[j].item() for j in members]))
    return t(out)


def test_group_advantages_by_loops():
    def grpo(k, r, _, std=True):
        spread = statistics.stdev(r) if std and len(r) > 1 else 1 - 1e-6
        return (r[k] - statistics.mean(r)) / (spread + 1e-6)

    close(grpo_advantages(REWARDS, GROUPS), by_group(grpo))
    close(grpo_advantages(REWARDS, GROUPS, normalize_std=False), by_group(lambda *a: grpo(*a, std=False)))
    others = lambda k, r: [v for j, v in enumerate(r) if j != k]
    close(
        rloo_advantages(REWARDS, GROUPS),
        by_group(lambda k, r, _: r[k] - statistics.mean(others(k, r)) if len(r) > 1 else 0.0),
    )
    weighted = lambda k, r, n: r[k] - sum(a * b for a, b in zip(r, n)) / sum(n) if len(r) > 1 else 0.0
    close(opo_advantages(REWARDS, GROUPS, LENGTHS), by_group(weighted))
    close(opo_advantages(REWARDS, GROUPS, LENGTHS.long()), by_group(weighted))
    close(remax_advantages(REWARDS, LENGTHS), t([0.0, 2, -3, 3, 0, -4, -4]))


def test_a_turn_discount_counts_turns_and_not_tokens():
    rewards, mask = t([[0.0, 1, 8, 2, 0, 4]]), t([[1, 1, 0, 1, 1, 1]])  # turns of 2 and of 3 tokens
    last = 2 + 4
    close(reinforce_pp_advantages(rewards, mask, 1.0, 0.5), t([[1 + last / 2, 1 + last / 2, 0, last, 4, 4]]))
    # a per-token discount beside it: between the turns both
    close(reinforce_pp_advantages(rewards, mask, 0.5, 0.1), t([[0.5 * 1.15, 1.15, 0, 2 + 1, 2, 4]]))
    # a critic: delta of the first turn's last token has turn_discount V of the next turn
    values = t([[0.0, 0, 9, 10, 10, 10]])
    advantages, returns = gae(rewards, values, mask, 1.0, 0.0, 0.5)
    close(advantages, t([[0.0, 1 + 5, 0, 2, 0, 4 - 10]]))
    close(returns, t([[0.0, 6, 0, 12, 10, 4]]))


def test_gigpo_compares_the_turns_that_met_one_state():
    rewards = t([[0.0, 0, 1, 2], [0, 9, 0, 4], [3, 0, 0, 0], [5, 0, 0, 0]])
    mask = t([[1, 0, 1, 1], [1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    # returns of turns, discounted by half: 1.5, 3; 2, 4; 3
    states = torch.tensor([7, 5, 7, 5, 7])
    first, second = statistics.stdev([1.5, 2, 3]), statistics.stdev([3, 4])
    mean = (1.5 + 2 + 3) / 3
    want = t([[(1.5 - mean) / first, 0, -0.5 / second, -0.5 / second], [(2 - mean) / first, 0, 0, 0.5 / second],
              [(3 - mean) / first] * 2 + [0, 0], [0, 0, 0, 0]])  # fmt: skip
    close(gigpo_advantages(rewards, mask, states, 0.5), want, rtol=1e-5, atol=1e-5)
    assert (gigpo_advantages(rewards, mask, torch.arange(5), 0.5) == 0).all()  # each alone
    assert gigpo_advantages(rewards, 0 * mask, states[:0], 0.5).tolist() == (0 * rewards).tolist()


def test_group_advantages_by_hand():
    rewards, groups = t([1.0, 0, 0, 0]), torch.zeros(4, dtype=torch.long)
    close(grpo_advantages(rewards, groups, eps=0), t([1.5, -0.5, -0.5, -0.5]))  # std = sqrt((9 + 3) / 16 / 3) = 1/2
    close(grpo_advantages(rewards, groups, eps=0.5), t([0.75, -0.25, -0.25, -0.25]))
    close(rloo_advantages(rewards, groups), t([1.0, -1 / 3, -1 / 3, -1 / 3]))
    close(opo_advantages(rewards, groups, t([2.0, 1, 1, 4])), t([0.75, -0.25, -0.25, -0.25]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_without_signal_get_zero(dtype):
    rewards, groups = torch.full((9,), 0.1, dtype=dtype), torch.tensor([0] * 8 + [1])
    lengths = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 0])
    for got in (
        grpo_advantages(rewards, groups),
        grpo_advantages(rewards, groups, normalize_std=False),
        rloo_advantages(rewards, groups),
        opo_advantages(rewards, groups, lengths),
    ):
        assert got.dtype == dtype and got.abs().max() < 1e-8 and got[8] == 0
    assert grpo_advantages(t([2.0, 2, 2]), torch.zeros(3), eps=0).tolist() == [0, 0, 0]


def test_whole_number_rewards_give_fractions():
    rewards, groups = torch.tensor([1, 0, 0, 0]), torch.zeros(4)
    close(grpo_advantages(rewards, groups, normalize_std=False), t([0.75, -0.25, -0.25, -0.25], dtype=torch.float32))
    close(remax_advantages(rewards, torch.tensor([0, 1, 0, 0])), t([1.0, -1, 0, 0], dtype=torch.float32))


GROUP_ESTIMATORS = {
    "grpo": lambda r, g, n: grpo_advantages(r, g),
    "drgrpo": lambda r, g, n: grpo_advantages(r, g, normalize_std=False),
    "rloo": lambda r, g, n: rloo_advantages(r, g),
    "opo": lambda r, g, n: opo_advantages(r, g, n),
}


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@few
@given(data=st.data())
def test_group_estimators_ignore_a_shift_the_order_and_other_groups(name, data):
    estimate = GROUP_ESTIMATORS[name]
    n = data.draw(st.integers(1, 12))
    rewards = t(data.draw(st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 3.0]), min_size=n, max_size=n)))
    groups = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, 9), min_size=n, max_size=n)))
    want = estimate(rewards, groups, lengths)
    shift = t(data.draw(st.lists(st.sampled_from([-2.0, 0.0, 0.5, 8.0]), min_size=4, max_size=4)))
    close(estimate(rewards + shift[groups], groups, lengths), want)
    order = torch.tensor(data.draw(st.permutations(range(n))))
    close(estimate(rewards[order], groups[order], lengths[order]), want[order])
    close(estimate(rewards, 100 - 7 * groups, lengths), want)
    one = groups == groups[0]
    close(estimate(rewards[one], groups[one], lengths[one]), want[one])
    weights = lengths.double() if name == "opo" else torch.ones(n, dtype=torch.float64)
    if (groups == groups[0]).sum() > 1:
        assert abs((weights * want)[one].sum()) < 1e-9  # a baseline: the group's advantages balance


def test_overlong_penalty():
    lengths = torch.tensor([0, 12, 13, 14, 16, 40])
    close(overlong_penalty(lengths, 16, 4), t([0, 0, -0.25, -0.5, -1, -1], dtype=torch.float32))
    close(overlong_penalty(lengths.double(), 16, 16), t([0, -0.75, -13 / 16, -0.875, -1, -1]))
    for buffer in (0, 17):
        with pytest.raises(ValueError, match="buffer"):
            overlong_penalty(lengths, 16, buffer)


# ---- Policy loss -----------------------------------------------------------------------------------------------------


def naive_policy_loss(kind, logprobs, frozen, old, advantages, mask, low, high, clip_c):
    """One number after another. `frozen` is a second copy of logprobs that stands wherever the paper has a
    stop-gradient, so that finite differences in `logprobs` see just what should carry gradient."""
    out = []
    for lp, fz, lo, adv, m in zip(logprobs, frozen, old, advantages, mask):
        tokens = [i for i, on in enumerate(m) if on]
        n = max(len(tokens), 1)
        row = [0.0] * len(m)
        for i in tokens:
            a = adv[i]
            clip = lambda r: min(max(r, 1 - low), 1 + high)
            if kind in ("ppo", "gspo"):
                r = math.exp(lp[i] - lo[i])
                if kind == "gspo":
                    r = math.prod(math.exp(fz[j] - lo[j]) for j in tokens) ** (1 / n)
                    r = r * math.exp(lp[i]) / math.exp(fz[i])
                row[i] = max(-a * r, -a * clip(r))
                if clip_c is not None and a < 0:
                    row[i] = min(row[i], -a * clip_c)
            elif kind == "gmpo":
                logs = [lp[j] - lo[j] for j in tokens]
                logs = [min(v, high) if adv[j] >= 0 else max(v, -low) for v, j in zip(logs, tokens)]
                row[i] = -sum(adv[j] for j in tokens) / n * math.exp(sum(logs) / n)
            elif kind == "cispo":
                row[i] = -clip(math.exp(fz[i] - lo[i])) * a * lp[i]
            elif kind == "sapo":  # eq. 5 and 6, their sigmoid by tanh
                tau = high if a > 0 else low
                gate = (1 + math.tanh(tau * (math.exp(lp[i] - lo[i]) - 1) / 2)) / 2
                row[i] = -4 / tau * gate * a
            else:
                row[i] = -a * lp[i]
        out.append(row)
    return out


@pytest.mark.parametrize("low,high,clip_c", [(0.2, 0.2, None), (0.1, 0.35, None), (0.1, 0.35, 1.3)])
@pytest.mark.parametrize("kind", OUR_OBJECTIVES)
def test_policy_loss_values_and_gradients(kind, low, high, clip_c):
    for seed in range(3):
        x = make(seed)
        fixed = [x[k].tolist() for k in ("logprobs", "logprobs_old", "advantages", "mask")]
        naive = lambda lp: naive_policy_loss(kind, lp, *fixed, low, high, clip_c)  # noqa: B023
        ours = lambda lp: policy_loss(kind, lp, x["logprobs_old"], x["advantages"], x["mask"], low, high, clip_c)[0]  # noqa: B023
        close(ours(x["logprobs"]), t(naive(fixed[0])))
        close(grad_of(ours, x["logprobs"]), finite_difference(naive, x["logprobs"]), rtol=1e-6, atol=1e-8)


def test_ppo_by_hand():
    # Ratios 1.5 and 0.5 beyond the bounds on either side, 5 far above; clip 0.2 / 0.28, dual clip 3.
    ratio = t([[1.5, 1.5, 0.5, 0.5, 5.0, 1.1]])
    advantages = t([[2.0, -2, 2, -2, -1, 3]])
    old = torch.full_like(ratio, -3.0)
    logprobs = (ratio.log() + old).requires_grad_()
    loss, stats = policy_loss("ppo", logprobs, old, advantages, torch.ones_like(ratio), 0.2, 0.28, 3.0)
    close(loss, t([[-2 * 1.28, 3.0, -1.0, 2 * 0.8, 3.0, -3.3]]))
    loss.sum().backward()
    close(logprobs.grad, t([[0, 3.0, -1.0, 0, 0, -3.3]]))  # -A r where no bound holds
    close(stats["clipfrac"], t([[1.0, 0, 0, 1, 0, 0]]))
    close(stats["clipfrac_lower"], t([[0.0, 0, 0, 0, 1, 0]]))
    close(stats["ratio"], ratio)
    close(stats["ppo_kl"], -ratio.log())


def test_cispo_and_gmpo_stats_by_hand():
    log_ratio, ones = t([[1.0, -1.0, 0.1]]), t([[1.0, 1, 1]])
    cispo = policy_loss("cispo", log_ratio, 0 * ones, t([[1.0, -1, 1]]), ones)[1]
    close(cispo["clipfrac"], t([[1.0, 1, 0]]))  # clamped on both sides whatever the sign of A
    gmpo = policy_loss("gmpo", log_ratio, 0 * ones, t([[1.0, 1, -1]]), ones, 0.4, 0.4)[1]
    close(gmpo["clipfrac"], t([[1.0, 0, 0]]))  # -1 with A > 0 is the pessimistic side: not bounded
    close(gmpo["ratio"], torch.full_like(ones, math.exp((0.4 - 1 + 0.1) / 3)))


def test_policy_loss_takes_old_and_advantages_as_constants():
    x = make(3)
    logprobs = x["logprobs"].requires_grad_()
    loss, stats = policy_loss("ppo", logprobs, logprobs, logprobs * 2, x["mask"])  # the caller forgot to detach
    (grad,) = torch.autograd.grad(loss.sum(), logprobs)
    close(grad, torch.where(x["mask"], -2 * x["logprobs"].detach(), 0))
    assert not any(v.requires_grad for v in stats.values())


def test_policy_loss_survives_huge_ratios():
    big = t([[2000.0, -2000.0]])  # exp overflows float64 as well
    for kind in OUR_OBJECTIVES:
        for sign in (1, -1):
            f = lambda lp: policy_loss(kind, lp, 0 * big, sign * torch.ones_like(big), torch.ones(1, 2))[0]  # noqa: B023
            assert f(big).isfinite().all() and grad_of(f, big).isfinite().all()
    f = lambda lp: policy_loss("gspo", lp, 0 * lp, -torch.ones(1, 1), torch.ones(1, 1))[0]
    close(f(t([[50.0]])), t([[math.exp(10)]]))


def test_on_policy_every_objective_has_reinforces_gradient():
    torch.manual_seed(0)
    B, T, V = 4, 6, 11
    logits = torch.randn(B, T, V, requires_grad=True)  # float32, as in training
    actions, mask = torch.randint(V, (B, T, 1)), torch.rand(B, T) < 0.7
    advantages = torch.randn(B, 1).expand(B, T)
    grads = {}
    for kind in OUR_OBJECTIVES:
        logprobs = torch.log_softmax(logits, -1).gather(-1, actions).squeeze(-1)
        loss, stats = policy_loss(kind, logprobs, logprobs.detach(), advantages, mask, clip_c=3.0)
        assert (stats["ratio"][mask] == 1).all() and (stats["ppo_kl"] == 0).all()
        assert (stats["clipfrac"] == 0).all() and (stats["clipfrac_lower"] == 0).all()
        (grads[kind],) = torch.autograd.grad(aggregate(loss, mask, "seq-mean-token-mean"), logits)
    want = torch.zeros(B, T, V)  # -A (onehot - p) / |y| / B
    for b, i in mask.nonzero().tolist():
        p = torch.softmax(logits[b, i].detach(), -1)
        want[b, i] = -advantages[b, i] * (torch.eye(V)[actions[b, i, 0]] - p) / mask[b].sum() / mask.any(1).sum()
    assert want.abs().max() > 1e-2
    for kind, grad in grads.items():
        close(grad, want, rtol=0, atol=1e-6, msg=kind)


# ---- Rollout correction ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low,high", [(0.8, 1.25), (0.0, 2.0)])
@pytest.mark.parametrize("kind", [kind for kind in ROLLOUT_CORRECTIONS if kind != "veto"])
def test_rollout_correction_by_loops(kind, low, high):
    x = make(4)
    if kind.startswith("geo") and low:  # a mean varies less
        low, high = 0.95, 1.05
    weights, stats = rollout_correction(kind, x["logprobs_old"], x["logprobs_rollout"], x["mask"], low, high)
    seen = set()
    for b, i in torch.cartesian_prod(torch.arange(5), torch.arange(7)).tolist():
        if not x["mask"][b, i]:
            assert weights[b, i] == 0 and all(v[b, i] == 0 for v in stats.values())
            continue
        d = (x["logprobs_old"] - x["logprobs_rollout"])[b]
        row = [math.exp(v) for v in d[x["mask"][b]].tolist()]
        rho = {"seq": math.prod(row), "geo": math.prod(row) ** (1 / len(row))}.get(kind[:3], math.exp(d[i].item()))
        want, clipped, dropped = rho, 0, 0
        if kind == "none":
            want = 1.0
        elif kind.endswith("tis"):
            want, clipped = min(rho, high), rho > high
        elif not low <= rho <= high:
            want, dropped = 0.0, 1
        assert weights[b, i].item() == pytest.approx(want)
        assert stats["rollout_ratio"][b, i].item() == pytest.approx(rho)
        assert stats["rollout_kl"][b, i].item() == pytest.approx(-d[i].item())
        assert (stats["rollout_clipped"][b, i], stats["rollout_dropped"][b, i]) == (clipped, dropped)
        seen.add((bool(clipped), bool(dropped)))
    assert kind == "none" or high == 2.0 or len(seen) == 2  # the tight bounds do both: keep and cut


def test_a_veto_takes_a_row_out_by_one_token_and_lets_the_others_be():
    old = t([[0.9, 1.1, 1.0], [0.9, 0.4, 1.0], [0.4, 1.0, 2.5], [1.0, 1.0, 1.0]]).log()
    mask = t([[1.0, 1, 1], [1, 1, 1], [0, 1, 1], [0, 0, 0]])
    weights, stats = rollout_correction("veto", old, 0 * old, mask, 0.5, 2.5)
    close(weights, t([[1.0, 1, 1], [0, 0, 0], [0, 1, 1], [0, 0, 0]]))  # what the mask hides vetoes nothing
    close(stats["rollout_dropped"], t([[0.0, 0, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0]]))
    close(stats["rollout_ratio"], old.exp() * mask)
    assert rollout_correction("veto", old, 0 * old, mask, 0.5, 2.4)[0].sum() == 3


def test_a_weight_and_a_mask_at_once():
    """The weight its value, the masks 0 or 1; bounds for all, or one each."""
    x = make(4)
    args = x["logprobs_old"], x["logprobs_rollout"], x["mask"]
    alone = lambda kind, low, high: rollout_correction(kind, *args, low, high)[0]
    kept = lambda kind, low, high: (alone(kind, low, high) > 0).double()
    both, stats = rollout_correction("tis,geo_mask", *args, 0.9, 1.05)
    assert 0 < kept("geo_mask", 0.9, 1.05).sum() < x["mask"].sum()
    close(both, alone("tis", 0, 1.05) * kept("geo_mask", 0.9, 1.05))
    close(stats["rollout_clipped"], (alone("none", 0, 1) * (args[0] - args[1] > math.log(1.05))).double())
    three, stats = rollout_correction("geo_mask,seq_tis,veto", *args, [0.8, 0, 0.6], [1.5, 2, 1.7])
    want = alone("seq_tis", 0, 2) * kept("geo_mask", 0.8, 1.5) * alone("veto", 0.6, 1.7)
    assert 0 < (want > 0).sum() < (alone("geo_mask", 0.8, 1.5) > 0).sum()
    close(three, want)
    close(stats["rollout_dropped"], x["mask"].double() - (want > 0).double())
    close(alone("icepop,veto", [0.8, 0.6], [1.2, 1.7]), kept("icepop", 0.8, 1.2) * alone("veto", 0.6, 1.7))
    for wrong in (("tis,clip", 0.0, 1.0), ("tis,veto", [0.0], 1.0), ("icepop", 2.0, 1.0)):
        with pytest.raises(ValueError):
            rollout_correction(wrong[0], *args, *wrong[1:])


def test_a_token_without_a_ratio():
    """Both logprobs -inf, as the docstring says."""
    old = t([[-math.inf, 0.0], [0.0, 0.0]])
    nan = lambda kind: rollout_correction(kind, old, old, torch.ones(2, 2), 0.5, 2.0)[0].isnan().tolist()
    for kind in ("tis", "icepop", "tis,veto"):
        assert nan(kind) == [[True, False], [False, False]]
    for kind in ("seq_tis", "seq_mask", "geo_tis", "geo_mask"):
        assert nan(kind) == [[True, True], [False, False]]
    for kind in ("none", "veto", "geo_mask,veto"):
        assert nan(kind) == [[False, False], [False, False]]


def test_gmpo_with_weights_per_token_weighs_the_row_by_their_mean():
    x = make(6)
    weights = rollout_correction("tis", x["logprobs_old"], x["logprobs_rollout"], x["mask"], 0, 1.1)[0]
    loss = policy_loss("gmpo", x["logprobs"], x["logprobs_old"], x["advantages"], x["mask"])[0]
    n = x["mask"].sum(-1).clamp(min=1)
    want = (loss.sum(-1) / n * weights.sum(-1) / n).sum() / (x["mask"].sum(-1) > 0).sum()
    close(aggregate(loss * weights, x["mask"], "seq-mean-token-mean"), want)


def test_rollout_bounds_are_inclusive_and_the_effective_sample_size_is_one_for_equal_weights():
    rollout = torch.zeros(1, 4, dtype=torch.float64)
    old = t([[0.5, 1.0, 2.0, 2.1]]).log()
    weights, stats = rollout_correction("icepop", old, rollout, torch.ones(1, 4), 0.5, 2.0)
    close(weights, t([[0.5, 1, 2, 0]]))
    ess = stats["rollout_weight"].mean() ** 2 / stats["rollout_weight_sq"].mean()
    assert ess.item() == pytest.approx(3.5**2 / (4 * (0.25 + 1 + 4)))
    stats = rollout_correction("none", old, rollout, torch.ones(1, 4), 0.5, 2.0)[1]
    assert stats["rollout_weight"].mean() ** 2 / stats["rollout_weight_sq"].mean() == 1


def test_decoupled_ppo():
    # AReaL's objective: (pi_prox / pi_behav) min(r A, clip(r) A), r = pi / pi_prox, the first factor dropped above its
    # cap, and the mean over all tokens, dropped ones included.
    x, cap = make(5), 1.2
    mask = x["mask"]
    loss, _ = policy_loss("ppo", x["logprobs"], x["logprobs_old"], x["advantages"], mask)
    weights, stats = rollout_correction("icepop", x["logprobs_old"], x["logprobs_rollout"], mask, 0, cap)
    want, n = 0.0, 0
    names = ("logprobs", "logprobs_old", "logprobs_rollout", "advantages")
    for lp, lo, lr, a in zip(*[x[k][mask].tolist() for k in names]):
        r, w = math.exp(lp - lo), math.exp(lo - lr)
        want -= (w if w <= cap else 0) * min(r * a, min(max(r, 0.8), 1.2) * a)
        n += 1
    assert 0 < stats["rollout_dropped"].sum() < n
    assert aggregate(loss * weights, mask).item() == pytest.approx(want / n)


# ---- Value loss, explained variance, KL ------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.2, 0.5, None])
def test_value_loss_values_and_gradients(clip):
    x = make(6)

    def naive(values):
        out = []
        for rows in zip(values, x["values_old"].tolist(), x["returns"].tolist(), x["mask"].tolist()):
            out.append([])
            for v, old, r, m in zip(*rows):
                near = v if clip is None else min(max(v, old - clip), old + clip)
                out[-1].append(max((v - r) ** 2, (near - r) ** 2) / 2 if m else 0.0)
        return out

    ours = lambda v: value_loss(v, x["values_old"], x["returns"], x["mask"], clip)[0]
    close(ours(x["values"]), t(naive(x["values"].tolist())))
    close(grad_of(ours, x["values"]), finite_difference(naive, x["values"]), rtol=1e-6, atol=1e-8)


def test_value_loss_by_hand():
    # V_old = 0, clip 0.5, V = 1: clipped to 0.5. R = 2: 2.25 > 1, bound active. R = 0: 1 > 0.25, it is not.
    values = t([[1.0, 1.0, 0.25]]).requires_grad_()
    loss, stats = value_loss(values, t([[0.0, 0, 0]]), t([[2.0, 0, 1]]), torch.ones(1, 3), 0.5)
    close(loss, t([[1.125, 0.5, 0.28125]]))
    loss.sum().backward()
    close(values.grad, t([[0.0, 1.0, -0.75]]))
    close(stats["value_clipfrac"], t([[1.0, 0, 0]]))
    close(stats["value_error"], t([[1.0, 1, 0.75]]))


def test_explained_variance():
    x = make(7)
    r, v = x["returns"][x["mask"]].tolist(), x["values"][x["mask"]].tolist()
    want = 1 - statistics.pvariance([a - b for a, b in zip(r, v)]) / statistics.pvariance(r)
    close(explained_variance(x["values"], x["returns"], x["mask"]), t(want))
    assert explained_variance(x["returns"] + 3, x["returns"], x["mask"]) == pytest.approx(1)
    assert explained_variance(0 * x["returns"], x["returns"], x["mask"]) == pytest.approx(0)
    assert explained_variance(x["values"], torch.ones_like(x["returns"]), x["mask"]) == 0


def test_kl_estimates_by_hand():
    d, zero = t([[0.5, -0.5, 0.0]]), t([[0.0, 0, 0]])
    k3 = [math.exp(-v) - 1 + v for v in (0.5, -0.5, 0.0)]
    values = {"k1": [0.5, -0.5, 0], "abs": [0.5, 0.5, 0], "k2": [0.125, 0.125, 0], "k3": k3}
    values |= {"k1+": values["k1"], "k3+": values["k3"]}
    slopes = {"k1": [1, 1, 1], "abs": [1, -1, 0], "k2": [0.5, -0.5, 0]}
    slopes |= {"k3": [1 - math.exp(-v) for v in (0.5, -0.5, 0)], "k1+": slopes["k2"], "k3+": slopes["k2"]}
    weights = t([[0.5, 1.25, 2.0]])
    for kind in KL_ESTIMATES:
        close(kl_estimate(d, zero, kind), t([values[kind]]), msg=kind)
        close(grad_of(lambda x: kl_estimate(x, zero, kind), d), weights * t([slopes[kind]]), msg=kind)  # noqa: B023


def test_kl_expectations_over_a_categorical():
    # By enumeration: E_pi[k1] = E_pi[k3] = KL, and the expected gradient of k2 (so of k1+, k3+) is that of KL itself.
    torch.manual_seed(0)
    logits, ref = torch.randn(6, dtype=torch.float64, requires_grad=True), torch.randn(6, dtype=torch.float64)
    logp, logq = torch.log_softmax(logits, -1), torch.log_softmax(ref, -1)
    p = logp.exp().detach()
    kl = (logp.exp() * (logp - logq)).sum()
    (want,) = torch.autograd.grad(kl, logits, retain_graph=True)
    for kind in ("k1", "k3", "k1+", "k3+"):
        close((p * kl_estimate(logp, logq, kind)).sum(), kl, msg=kind)
    for kind in ("k2", "k1+", "k3+"):
        (got,) = torch.autograd.grad((p * kl_estimate(logp, logq, kind)).sum(), logits, retain_graph=True)
        close(got, want, msg=kind)
    (zero,) = torch.autograd.grad((p * kl_estimate(logp, logq, "k1")).sum(), logits, retain_graph=True)
    assert zero.abs().max() < 1e-12 < want.abs().max()


def test_k3_is_capped_and_a_nan_at_a_token_that_counts_stays_loud():
    far = t([[-100.0, 100.0]])
    close(kl_estimate(far, 0 * far, "k3"), t([[10.0, 10.0]]))
    assert grad_of(lambda x: kl_estimate(x, 0 * far, "k3"), far).tolist() == [[0, 0]]
    for kind in KL_ESTIMATES:
        assert kl_estimate(t([[math.nan]]), t([[0.0]]), kind).isnan().all()


def test_adaptive_kl():
    coef = AdaptiveKL(0.1, target=0.2, horizon=1000)
    assert coef.update(1.0, 100) == pytest.approx(0.1 * (1 + 0.2 * 0.1))  # clipped above
    assert coef.update(torch.tensor(0.0), 100) == pytest.approx(0.102 * (1 - 0.2 * 0.1))  # and below
    assert coef.update(0.22, 500) == pytest.approx(0.102 * 0.98 * (1 + 0.1 * 0.5))
    assert coef.update(0.2, 500) == coef.coef == pytest.approx(0.102 * 0.98 * 1.05)


# ---- Aggregation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregate_by_loops(mode):
    x = make(8)
    rows = [[v for v, m in zip(*pair) if m] for pair in zip(x["values"].tolist(), x["mask"].tolist())]
    rows = [row for row in rows if row]
    total = sum(map(sum, rows))
    for n_tokens, n_seqs, max_len in [(None, None, None), (100, 9, 64), (torch.tensor(100.0), torch.tensor(9), 64)]:
        tokens, seqs = n_tokens or sum(map(len, rows)), n_seqs or len(rows)
        want = {
            "token-mean": total / tokens,
            "token-sum": total,
            "seq-mean-token-sum": total / seqs,
            "seq-mean-token-mean": sum(statistics.mean(row) for row in rows) / seqs,
            "seq-mean-token-sum-norm": total / (seqs * (max_len or 7)),
        }[mode]
        got = aggregate(x["values"], x["mask"], mode, n_tokens, n_seqs, max_len)
        assert got.dtype == torch.float64 and got.item() == pytest.approx(float(want))


def test_aggregate_gradient_by_hand():
    mask = t([[1.0, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]])
    slopes = {"token-mean": (1 / 4, 1 / 4), "token-sum": (1, 1), "seq-mean-token-sum": (1 / 2, 1 / 2)}
    slopes |= {"seq-mean-token-mean": (1 / 6, 1 / 2), "seq-mean-token-sum-norm": (1 / 20, 1 / 20)}
    for mode, (first, second) in slopes.items():
        x = torch.randn(3, 4, dtype=torch.float64).masked_fill(mask == 0, math.nan).requires_grad_()
        (grad,) = torch.autograd.grad(aggregate(x, mask, mode, max_len=10), x)
        close(grad, mask * t([[float(first)], [float(second)], [0.0]]), msg=mode)


def step(x, kind, mode, counts):
    """A whole training objective, as train.py writes it: value and gradient in logprobs."""
    logprobs = x["logprobs"].clone().requires_grad_()
    loss, _ = policy_loss(kind, logprobs, x["logprobs_old"], x["advantages"], x["mask"], 0.1, 0.15, 3.0)
    loss = loss * rollout_correction("tis", x["logprobs_old"], x["logprobs_rollout"], x["mask"], 0.0, 1.2)[0]
    loss = loss + 0.3 * kl_estimate(logprobs, x["logprobs_ref"], "k3+")
    total = aggregate(loss, x["mask"], mode, **counts)
    return total.detach(), torch.autograd.grad(total, logprobs)[0]


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("kind", OUR_OBJECTIVES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_splitting_permuting_and_padding_change_nothing(kind, mode, seed, data):
    x = make(seed, B=6, T=5)
    counts = {"n_tokens": x["mask"].sum().item(), "n_seqs": x["mask"].any(1).sum().item(), "max_len": 5}
    value, grad = step(x, kind, mode, counts)

    order = torch.tensor(data.draw(st.permutations(range(6))))
    moved_value, moved_grad = step({k: v[order] for k, v in x.items()}, kind, mode, counts)
    close(moved_value, value)
    close(moved_grad, grad[order])

    cut = data.draw(st.integers(0, 6))  # with 0 and 6 one part is empty, and the last row is a filler by itself
    parts = [step({k: v[s] for k, v in x.items()}, kind, mode, counts) for s in (slice(0, cut), slice(cut, 6))]
    close(parts[0][0] + parts[1][0], value)
    close(torch.cat([parts[0][1], parts[1][1]]), grad)

    pad = data.draw(st.integers(1, 4))
    wide = {k: torch.nn.functional.pad(v, (0, pad), value=math.nan) for k, v in x.items() if k != "mask"}
    wide_value, wide_grad = step(wide | {"mask": torch.nn.functional.pad(x["mask"], (0, pad))}, kind, mode, counts)
    close(wide_value, value)
    close(wide_grad[:, :5], grad)
    assert (wide_grad[:, 5:] == 0).all()


# ---- All of them: garbage, empty batches, dtypes, names --------------------------------------------------------------


def one_state(mask: torch.Tensor) -> torch.Tensor:
    """That of every turn."""
    return torch.zeros(sum(sum(on for on, _ in itertools.groupby(row)) for row in mask.bool().tolist()))


# name -> (the inputs it takes, the one it differentiates or None, the function)
EVERY = {
    "gae": (("rewards", "values"), None, lambda m, r, v: gae(r, v, m, 0.9, 0.8)),
    "reinforce_pp": (("rewards",), None, lambda m, r: (reinforce_pp_advantages(r, m, 0.9, 0.8),)),
    "gigpo": (("rewards",), None, lambda m, r: (gigpo_advantages(r, m, one_state(m), 0.9),)),
    "whiten": (("values",), "values", lambda m, v: (whiten(v, m),)),
    "whiten in place": (("values",), "values", lambda m, v: (whiten(v, m, shift_mean=False),)),
    "explained_variance": (("values", "returns"), None, lambda m, v, r: (explained_variance(v, r, m),)),
    "value_loss": (("values", "values_old", "returns"), "values", lambda m, *a: value_loss(*a, m, 0.3)),
}
for _kind in OUR_OBJECTIVES:
    EVERY[f"policy_loss {_kind}"] = (
        ("logprobs", "logprobs_old", "advantages"),
        "logprobs",
        lambda m, *a, kind=_kind: policy_loss(kind, *a, m, 0.1, 0.2, 2.0),
    )
for _kind in ROLLOUT_CORRECTIONS:
    EVERY[f"rollout_correction {_kind}"] = (
        ("logprobs_old", "logprobs_rollout"),
        None,
        lambda m, *a, kind=_kind: rollout_correction(kind, *a, m, 0.7, 1.4),
    )
for _kind in KL_ESTIMATES:  # with aggregate, whose mask it is
    EVERY[f"kl_estimate {_kind}"] = (
        ("logprobs", "logprobs_ref"),
        "logprobs",
        lambda m, *a, kind=_kind: (aggregate(kl_estimate(*a, kind), m),),
    )
for _mode in AGGREGATIONS:
    EVERY[f"aggregate {_mode}"] = (("values",), "values", lambda m, v, mode=_mode: (aggregate(v, m, mode),))


def evaluate(name, x):
    """Every output, stats included, and the gradient of a weighted sum of the first."""
    inputs, wrt, f = EVERY[name]
    args = [x[k].detach().clone().requires_grad_(k == wrt) for k in inputs]
    out = f(x["mask"], *args)
    flat = [v for o in out for v in (o.values() if isinstance(o, dict) else [o])]
    if wrt:
        weights = torch.linspace(0.5, 2, flat[0].numel(), dtype=flat[0].dtype).view_as(flat[0])
        flat.append(torch.autograd.grad((flat[0] * weights).sum(), args[inputs.index(wrt)])[0])
    return [v.detach() for v in flat]


@pytest.mark.parametrize("name", EVERY)
def test_garbage_at_mask_0_changes_nothing(name):
    for seed in range(2):
        x = make(seed)
        want = evaluate(name, x)
        assert all(v.isfinite().all() for v in want) and any((v != 0).any() for v in want)
        for garbage in GARBAGE:
            dirty = {k: v if k == "mask" else v.masked_fill(~x["mask"], garbage) for k, v in x.items()}
            close(evaluate(name, dirty), want, rtol=0, atol=0)
        for i, garbage in enumerate(GARBAGE):  # and in one input at a time: NaN - NaN is not the only way to be NaN
            dirty = dict(x)
            key = EVERY[name][0][i % len(EVERY[name][0])]
            dirty[key] = x[key].masked_fill(~x["mask"], garbage)
            close(evaluate(name, dirty), want, rtol=0, atol=0)
        for v in want:
            assert v.dim() == 0 or (v[~x["mask"]] == 0).all()


@pytest.mark.parametrize("name", EVERY)
def test_a_batch_without_tokens_gives_zeros(name):
    x = make(0)
    x = {k: torch.full_like(v, math.nan) if k != "mask" else torch.zeros_like(v) for k, v in x.items()}
    for v in evaluate(name, x):
        assert (v == 0).all()


@pytest.mark.parametrize("name", EVERY)
def test_dtypes_are_kept_and_masks_of_any_type_mean_the_same(name):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert {v.dtype for v in evaluate(name, make(0, dtype=dtype))} == {dtype}
    x = make(0)
    for dtype in (torch.float32, torch.long):
        close(evaluate(name, x | {"mask": x["mask"].to(dtype)}), evaluate(name, x), rtol=0, atol=0)


def test_unknown_names_raise_and_name_the_choices():
    x = torch.zeros(1, 1)
    for call, choices in [
        (lambda: policy_loss("PPO", x, x, x, x), OUR_OBJECTIVES),
        (lambda: rollout_correction("is", x, x, x, 0, 1), ROLLOUT_CORRECTIONS),
        (lambda: kl_estimate(x, x, "k4"), KL_ESTIMATES),
        (lambda: aggregate(x, x, "mean"), AGGREGATIONS),
    ]:
        with pytest.raises(ValueError) as error:
            call()
        assert all(choice in str(error.value) for choice in choices)
    with pytest.raises(ValueError, match="clip_c"):
        policy_loss("ppo", x, x, x, x, clip_c=1.0)
    for bad in ({"temperature": 0.0}, {"chunk": 0}):
        with pytest.raises(ValueError, match="positive"):
            token_logprobs(x, x, torch.zeros(1, dtype=torch.long), **bad)


# ---- token_logprobs --------------------------------------------------------------------------------------------------


def plain_logprobs(hidden, weight, targets, temperature=1.0, vocab_size=None, softcap=None):
    logits = hidden @ weight.T
    logits = (softcap * torch.tanh(logits / softcap) if softcap else logits) / temperature
    if vocab_size is not None:
        logits[:, vocab_size:] = -math.inf
    logp = torch.log_softmax(logits, -1)
    entropy = -torch.where(logp.isfinite(), logp.exp() * logp, 0).sum(-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), entropy


def head(T=9, H=5, V=23, seed=0, dtype=torch.float64, top=None):
    g = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for n in (T, V))
    return hidden, weight, torch.randint(top or V, (T,), generator=g)


def both_grads(outputs, inputs, upto=2):
    weights = [torch.linspace(-1, 2, o.numel(), dtype=o.dtype) * (i + 1) for i, o in enumerate(outputs)]
    return torch.autograd.grad(sum((o * w).sum() for o, w in list(zip(outputs, weights))[:upto]), inputs)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 4, 23, 1024])  # 4 does not divide V = 23, 1024 exceeds it
def test_token_logprobs_against_log_softmax(chunk, temperature):
    hidden, weight, targets = head()
    want, want_entropy = plain_logprobs(hidden, weight, targets, temperature)
    got = token_logprobs(hidden, weight, targets, temperature, chunk)
    close(got, want)
    close(both_grads([got], (hidden, weight)), both_grads([want], (hidden, weight)))
    outputs = token_logprobs(hidden, weight, targets, temperature, chunk, entropy=True)
    close(outputs, (want, want_entropy))
    plain = plain_logprobs(hidden, weight, targets, temperature)
    close(both_grads(outputs, (hidden, weight)), both_grads(plain, (hidden, weight)))
    outputs = token_logprobs(hidden, weight, targets, temperature, chunk, entropy=True)  # the entropy's gradient alone
    plain = plain_logprobs(hidden, weight, targets, temperature)
    close(both_grads(outputs[1:], (hidden, weight)), both_grads(plain[1:], (hidden, weight)))


@pytest.mark.parametrize("chunk", [4, 1024])
def test_token_logprobs_of_capped_logits(chunk):
    hidden, weight, targets = head()
    want = plain_logprobs(hidden, weight, targets, 0.7, softcap=1.5)
    got = token_logprobs(hidden, weight, targets, 0.7, chunk, entropy=True, softcap=1.5)
    assert (want[0] - plain_logprobs(hidden, weight, targets, 0.7)[0]).abs().max() > 0.1  # it makes a difference
    close(got, want)
    close(both_grads(got, (hidden, weight)), both_grads(want, (hidden, weight)))


def test_token_logprobs_gradcheck():
    hidden, weight, targets = head(T=4, V=7, top=6)
    f = lambda h, w: token_logprobs(h, w, targets, 1.3, chunk=3, entropy=True, vocab_size=6)
    assert torch.autograd.gradcheck(f, (hidden, weight))


@few
@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 50), st.booleans(), st.integers(0, 1000))
def test_token_logprobs_for_any_shape(T, V, chunk, with_entropy, seed):
    hidden, weight, targets = head(T, 3, V, seed)
    want, want_entropy = plain_logprobs(hidden, weight, targets, 0.9)
    got = token_logprobs(hidden, weight, targets, 0.9, chunk, with_entropy)
    got, want = (got, (want, want_entropy)) if with_entropy else ((got,), (want,))
    close(got, want)
    close(both_grads(got, (hidden, weight)), both_grads(want, (hidden, weight)))


def test_token_logprobs_tied_weight():
    _, embedding, targets = head(V=12)
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5])
    model = lambda f: f(torch.tanh(embedding[ids]), embedding, targets)
    targets = targets % 12
    want = torch.autograd.grad(model(lambda *a: plain_logprobs(*a)[0]).sum(), embedding)
    close(torch.autograd.grad(model(lambda *a: token_logprobs(*a, chunk=5)).sum(), embedding), want)


def test_token_logprobs_frozen_parts_get_no_gradient_and_cost_none():
    hidden, weight, targets = head()
    want = both_grads([plain_logprobs(hidden, weight, targets)[0]], (hidden, weight))
    close(both_grads([token_logprobs(hidden, weight.detach(), targets)], (hidden,)), want[:1])
    close(both_grads([token_logprobs(hidden.detach(), weight, targets)], (weight,)), want[1:])
    counts = {}
    cases = {"both": (hidden, weight), "hidden": (hidden, weight.detach()), "weight": (hidden.detach(), weight)}
    for name, args in cases.items():
        out = token_logprobs(*args, targets)
        with Shapes() as shapes:
            out.sum().backward()
        counts[name] = shapes.matmuls
    assert counts == {"both": 3, "hidden": 2, "weight": 2}  # one block: the logits again, and a product per gradient
    assert not token_logprobs(hidden.detach(), weight.detach(), targets).requires_grad


def test_token_logprobs_entropy_that_is_only_logged_changes_no_gradient():
    hidden, weight, targets = head()
    plain = both_grads([token_logprobs(hidden, weight, targets)], (hidden, weight))
    logprobs, _ = token_logprobs(hidden, weight, targets, entropy=True)
    close(both_grads([logprobs], (hidden, weight)), plain, rtol=0, atol=0)


def test_token_logprobs_padded_vocabulary():
    hidden, weight, targets = head(V=23, top=20)
    with torch.no_grad():
        weight[20:] = 50.0  # what the padding holds must not matter
    want = plain_logprobs(hidden, weight, targets, vocab_size=20)
    got = token_logprobs(hidden, weight, targets, chunk=6, entropy=True, vocab_size=20)
    close(got, want)
    grads = both_grads(got, (hidden, weight))
    plain = plain_logprobs(hidden, weight[:20], targets)
    close(grads, both_grads(plain, (hidden, weight)))
    assert (grads[1][20:] == 0).all()
    outside = token_logprobs(hidden, weight, torch.full_like(targets, 21), vocab_size=20)
    assert (outside == -math.inf).all()
    with torch.no_grad():
        weight[20:] = math.nan
    close(token_logprobs(hidden, weight, targets, chunk=6, vocab_size=20), want[0])


@pytest.mark.parametrize("banned", [[0], [5], [22], [6, 5, 20]])  # first, last, neighbours
def test_token_logprobs_banned_ids(banned):
    hidden, weight, targets = head(V=23)
    targets = torch.where(torch.isin(targets, torch.tensor(banned)), 7, targets)
    with torch.no_grad():
        weight[banned] = 50.0  # what is banned must not matter
    left = [i for i in range(23) if i not in banned]
    places = torch.tensor([left.index(i) for i in targets.tolist()])
    want = plain_logprobs(hidden, weight[left], places)
    got = token_logprobs(hidden, weight, targets, chunk=6, entropy=True, banned=banned)
    close(got, want)
    grads = both_grads(got, (hidden, weight))
    close(grads, both_grads(plain_logprobs(hidden, weight[left], places), (hidden, weight)))
    assert (grads[1][banned] == 0).all()
    assert (token_logprobs(hidden, weight, torch.full_like(targets, banned[0]), banned=banned) == -math.inf).all()


def test_a_banned_id_beyond_the_vocabulary_opens_nothing():
    hidden, weight, targets = head(V=23)
    want = token_logprobs(hidden, weight, targets, vocab_size=10)
    close(token_logprobs(hidden, weight, targets, vocab_size=10, banned=[15]), want)


def test_token_logprobs_extreme_logits():
    hidden, weight = t([[1.0], [1.0]]), t([[1e4], [-1e4], [0.0]])
    got, entropy = token_logprobs(hidden, weight, torch.tensor([0, 1]), chunk=1, entropy=True)
    close(got, t([0.0, -2e4]))
    close(entropy, t([0.0, 0.0]))


@pytest.mark.parametrize("dtypes", [("bfloat16",) * 2, ("float32", "bfloat16"), ("float16",) * 2, ("float32",) * 2])
def test_token_logprobs_has_float32_logits_whatever_the_weights(dtypes):
    # Logits of +-50, where a distribution may have an entropy of 1e-5: lse - sum p z would lose all its digits.
    hidden, weight, targets = head(T=16, H=64, V=300)
    hidden, weight = (x.detach().to(getattr(torch, d)).requires_grad_() for x, d in zip((hidden, weight), dtypes))
    got = token_logprobs(hidden, weight, targets, 0.8, 128, entropy=True)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]  # the same numbers, without any rounding
    want = plain_logprobs(*exact, targets, 0.8)
    assert all(o.dtype == torch.float32 for o in got)
    close(got, want, rtol=1e-5, atol=1e-5, check_dtype=False)  # bfloat16 logits would be off by 1e-2
    grads = both_grads(got, (hidden, weight))
    assert [g.dtype for g in grads] == [hidden.dtype, weight.dtype]
    for g, w in zip(grads, both_grads(want, exact)):  # of a gradient, rounding to the operands' own dtype is lost
        assert (g.double() - w).norm() / w.norm() < (1e-5 if dtypes == ("float32",) * 2 else 6e-3)


def test_token_logprobs_under_autocast():
    hidden, weight, targets = head(T=8, H=16, V=40, dtype=torch.float32)
    half = hidden.detach().bfloat16(), weight.detach().bfloat16()
    want = token_logprobs(*half, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = token_logprobs(hidden, weight, targets)
    close(got, want, rtol=0, atol=0)
    grads = torch.autograd.grad(got.sum(), (hidden, weight))
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)


class Shapes(TorchDispatchMode):
    """Records the largest tensor that any operation makes, and counts the matrix products."""

    largest = matmuls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.matmuls += "mm" in func.__name__
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return out


@pytest.mark.parametrize("entropy", [False, True])
def test_token_logprobs_never_holds_the_logits(entropy):
    hidden, weight, targets = head(T=300, H=2, V=20_000, dtype=torch.float32)
    with Shapes() as shapes:
        out = token_logprobs(hidden, weight, targets, 0.9, entropy=entropy)
        (sum(o.sum() for o in out) if entropy else out.sum()).backward()
    assert shapes.largest <= 300 * 20_000 // 64  # no tensor anywhere beyond T x (V / 64), against T x V


def test_losses_needs_nothing_but_torch():
    source = open(losses.__file__).read()
    imports = {line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import ", "from "))}
    assert imports - sys.stdlib_module_names == {"torch"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_token_logprobs_in_bfloat16_on_a_gpu():
    hidden, weight, targets = head(T=64, H=128, V=3000)
    hidden, weight = (x.detach().mul(0.3).bfloat16().cuda().requires_grad_() for x in (hidden, weight))
    got = token_logprobs(hidden, weight, targets.cuda(), 0.8, entropy=True)
    exact = [x.detach().double().cpu().requires_grad_() for x in (hidden, weight)]
    want = plain_logprobs(*exact, targets, 0.8)
    close([o.cpu() for o in got], list(want), rtol=1e-4, atol=1e-4, check_dtype=False)
    weights = torch.linspace(-1, 2, 64)
    grads = torch.autograd.grad((got[0] * weights.cuda()).sum() + got[1].sum(), (hidden, weight))
    for g, w in zip(grads, torch.autograd.grad((want[0] * weights).sum() + want[1].sum(), exact)):
        assert (g.cpu().double() - w).norm() / w.norm() < 1e-2
