"""losses.py against numbers that are computed in another way: by hand, or token by token.

All is in float64 unless the dtype is the subject."""

import math
from functools import partial
from statistics import fmean

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import losses

OBJECTIVES = ("ppo", "gspo", "gmpo", "cispo", "sapo", "reinforce")
NAN = math.nan
INF = math.inf
close = torch.testing.assert_close


def t(*rows, dtype=torch.float64):
    """A vector, or with several rows a matrix."""
    return torch.tensor(rows if len(rows) > 1 else rows[0], dtype=dtype)


def make(seed=0, B=5, T=7, dtype=torch.float64):
    """Random columns of a batch whose mask has holes. The last row has no token."""
    generator = torch.Generator().manual_seed(seed)
    names = ["logprobs_old", "logprobs", "logprobs_rollout", "logprobs_ref"]
    names += ["advantages", "rewards", "values", "values_old", "returns"]
    draws = torch.randn(len(names), B, T, generator=generator, dtype=torch.float64)
    x = dict(zip(names, draws.to(dtype)))
    old = x["logprobs_old"] = -x["logprobs_old"].abs() - 0.1
    x["logprobs"] = old + 0.4 * x["logprobs"]
    x["logprobs_rollout"] = old + 0.3 * x["logprobs_rollout"]
    x["mask"] = torch.rand(B, T, generator=generator) < 0.6
    x["mask"][0, 0] = True
    x["mask"][-1] = False
    return x


def grad_of(output, *inputs):
    """The gradients of a weighted sum. The weights differ, so that no place stands for another."""
    weights = torch.linspace(0.5, 2, output.numel(), dtype=output.dtype)
    total = (output * weights.view_as(output)).sum()
    return torch.autograd.grad(total, inputs, retain_graph=True)


@pytest.mark.parametrize("gamma, lam, turn_discount", [(1, 1, 1), (1, 0, 0.5), (0.9, 0.8, 0.7)])
def test_gae_over_the_tokens_of_the_policy(gamma, lam, turn_discount):
    x = make(1)
    x["values"].requires_grad_()
    got = losses.gae(x["rewards"], x["values"], x["mask"], gamma, lam, turn_discount)
    want = torch.zeros(5, 7, dtype=torch.float64)
    for b, on in enumerate(x["mask"]):
        places = on.nonzero().flatten().tolist()
        advantage = value = 0
        for t in reversed(places):
            discount = gamma if t + 1 in places else gamma * turn_discount
            delta = x["rewards"][b, t] + discount * value - x["values"][b, t].item()
            advantage = delta + discount * lam * advantage
            value = x["values"][b, t].item()
            want[b, t] = advantage
    close(got[0], want)
    close(got[1], torch.where(x["mask"], want + x["values"].detach(), 0))
    assert not got[0].requires_grad


def test_whiten():
    """With a shift, too, in test_algos.py. Rounding in float32 must not become a signal."""
    x = t([1, 2, 3, 6])
    std = x.std()
    close(losses.whiten(x, torch.ones(4), shift_mean=False), (x - 3) / std + 3)
    assert losses.whiten(torch.full((4, 8), 0.1), torch.ones(4, 8)).abs().max() < 1e-6


def test_group_advantages_by_hand():
    # One group of 1, 0, 0, 0 with a std of sqrt((9 + 3) / 16 / 3) = 1/2; one of 4, 2; one alone.
    groups = torch.tensor([7, -2, 7, 7, -2, 7, 5])
    rewards = torch.tensor([1, 4, 0, 0, 2, 0, 3])
    lengths = torch.tensor([2, 1, 1, 1, 3, 4, 0])
    mean = t([0.75, 1, -0.25, -0.25, -1, -0.25, 0])
    std = t([0.5, math.sqrt(2), 0.5, 0.5, math.sqrt(2), 0.5, 1])
    functions = {
        losses.grpo_advantages: mean / (std + 1e-6),
        partial(losses.grpo_advantages, normalize_std=False): mean,
        losses.rloo_advantages: mean * t([4, 6, 4, 4, 6, 4, 1]) / 3,
        partial(losses.opo_advantages, lengths=lengths): mean + t([0, 0.5, 0, 0, 0.5, 0, 0]),
    }
    equal = torch.tensor([0.1, 0.9, 0.1, 0.1, 0.9 + 6e-8, 0.1, 0.1])  # in each group, on paper
    for function, want in functions.items():
        close(function(rewards.double(), groups), want)
        close(function(rewards, groups), want.float())  # whole numbers give fractions
        assert not function(equal, groups).any()


def test_gigpo_compares_the_turns_that_met_one_state():
    rewards = t([0, 0, 1, 2], [0, 9, 0, 4], [3, 0, 0, 0], [5, 0, 0, 0])
    mask = t([1, 0, 1, 1], [1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0])
    states = torch.tensor([7, 5, 7, 5, 7])
    # Returns of the turns, discounted by half: 1.5, 3; 2, 4; 3.
    a, b, c = losses.grpo_advantages(t([1.5, 2, 3]), torch.zeros(3))
    d, e = losses.grpo_advantages(t([3.0, 4]), torch.zeros(2))
    want = t([a, 0, d, d], [b, 0, 0, e], [c, c, 0, 0], [0, 0, 0, 0])
    close(losses.gigpo_advantages(rewards, mask, states, 0.5), want)


def formula(kind, new, old, advantages, low, high, clip_c):
    """The losses of a row's mask-1 tokens, (n,), as the papers write them."""
    ratio = (new - old).exp()
    of_row = ratio.prod() ** (1 / len(ratio))
    if kind == "reinforce":
        return -advantages * new
    if kind == "gmpo":
        logs = ratio.log()
        logs = torch.where(advantages < 0, logs.clamp(min=-low), logs.clamp(max=high))
        return -(advantages.mean() * logs.mean().exp()).expand_as(new)
    if kind == "sapo":  # eq. 5 and 6, with the sigmoid written as tanh
        tau = torch.where(advantages > 0, high, low)
        gate = (1 + (tau * (ratio - 1) / 2).tanh()) / 2
        return -4 / tau * gate * advantages
    if kind == "gspo":
        ratio = of_row.detach() * new.exp() / new.exp().detach()
    bounded = ratio.clamp(1 - low, 1 + high)
    if kind == "cispo":
        return -bounded.detach() * advantages * new
    loss = -torch.minimum(advantages * ratio, advantages * bounded)
    if clip_c is None:
        return loss
    return loss.where(advantages > 0, torch.minimum(loss, -advantages * clip_c))


@pytest.mark.parametrize("clips", [(0.2, 0.2, None), (0.1, 0.35, None), (0.1, 0.35, 1.3)])
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_policy_loss_and_its_gradient(kind, clips):
    x = make(2)
    mask = x["mask"]
    inputs = [x[name] for name in POLICY.split()]
    want = torch.zeros_like(inputs[0])
    for column in inputs:
        column.requires_grad_()
    for b, on in enumerate(mask[:-1]):
        want[b, on] = formula(kind, *[column[b][on] for column in inputs], *clips)
    loss, stats = losses.policy_loss(kind, *inputs, mask, *clips)
    close(loss, want)
    close(grad_of(loss, inputs[0]), grad_of(want, inputs[0]))
    # The others are constants, even if the caller forgot to detach them.
    assert torch.autograd.grad(loss.sum(), inputs[1:], allow_unused=True) == (None, None)
    assert not any(stat.requires_grad for stat in stats.values())


@pytest.mark.parametrize("kind, clipfrac, log_ratio_of_row", [
    # On the pessimistic side, such as a small ratio with A > 0, ppo and gmpo have no bound.
    ("ppo", [1, 0, 0, 0], None),
    ("gspo", [1, 1, 0, 1], (1 - 1 + 1.5 + 0.1) / 4),
    ("gmpo", [1, 0, 0, 0], (0.4 - 1 + 1.5 + 0.1) / 4),
    ("cispo", [1, 1, 1, 0], None),
    ("sapo", [0, 0, 0, 0], None),
])  # fmt: skip
def test_stats_of_policy_loss(kind, clipfrac, log_ratio_of_row):
    log_ratio = t([[1, -1, 1.5, 0.1]])
    zeros = torch.zeros_like(log_ratio)
    advantages = t([[1.0, 1, -1, 1]])
    _, stats = losses.policy_loss(kind, log_ratio, zeros, advantages, zeros + 1, 0.4, 0.4, 3.0)
    close(stats["clipfrac"], t([clipfrac]))
    close(stats["clipfrac_lower"], t([[0, 0, int(kind == "ppo"), 0]]))
    close(stats["ppo_kl"], -log_ratio)
    of_tokens = log_ratio if log_ratio_of_row is None else zeros + log_ratio_of_row
    close(stats["ratio"], of_tokens.exp())


GEO = 2 ** (1 / 3)


@pytest.mark.parametrize("kind, weights, clipped", [
    ("none", [1, 1, 1], [0, 0, 0]),
    ("tis", [0.5, 1, 1.5], [0, 0, 1]),
    ("icepop", [0, 1, 0], [0, 0, 0]),
    ("seq_tis", [1.5, 1.5, 1.5], [1, 1, 1]),
    ("seq_mask", [0, 0, 0], [0, 0, 0]),
    ("geo_tis", [GEO, GEO, GEO], [0, 0, 0]),
    ("geo_mask", [GEO, GEO, GEO], [0, 0, 0]),
    ("veto", [0, 0, 0], [0, 0, 0]),
])  # fmt: skip
def test_rollout_correction(kind, weights, clipped):
    """A row with the ratios 0.5, 1 and 4, whose product is 2, and a token of a tool."""
    ratios = t([[0.5, 9.0, 1.0, 4.0]])
    old, rollout = ratios.log() - 1, torch.full_like(ratios, -1.0)
    mask = t([[1, 0, 1, 1]])
    on = mask.bool()
    got, stats = losses.rollout_correction(kind, old, rollout, mask, 0.6, 1.5)
    close(got[on], t(weights).double())
    close(stats["rollout_clipped"][on], t(clipped).double())
    close(stats["rollout_dropped"], (mask * (got == 0)).double())
    close(stats["rollout_kl"], -(ratios.log() * mask))
    of_row = {"seq": 2.0, "geo": GEO}.get(kind[:3])
    close(stats["rollout_ratio"], (ratios if of_row is None else of_row) * mask)


def test_value_loss():
    # V_old = 0 and clip 0.5, so V = 1 becomes 0.5. R = 2: 2.25 > 1, the bound is active.
    # R = 0: 1 > 0.25, it is not. V = -1 becomes -0.5.
    values = t([[1.0, 1.0, 0.25, -1.0]]).requires_grad_()
    returns = t([[2.0, 0, 1, -2]])
    ones = torch.ones_like(returns)
    loss, stats = losses.value_loss(values, 0 * ones, returns, ones, 0.5)
    close(loss, t([[1.125, 0.5, 0.28125, 1.125]]))
    close(torch.autograd.grad(loss.sum(), values)[0], t([[0.0, 1.0, -0.75, 0.0]]))
    close(stats["value_clipfrac"], t([[1.0, 0, 0, 1]]))
    close(stats["value_error"], t([[1.0, 1, 0.75, 1]]))


def test_kl_estimates():
    d = t([0.5, -0.5, 0.0, -100.0, 100.0]).requires_grad_()
    k3 = [math.exp(-v) - 1 + v for v in (0.5, -0.5, 0)]
    values = {"k1": d, "abs": d.abs(), "k2": d**2 / 2, "k3": t([*k3, 10, 10])}
    values |= {"k1+": values["k1"], "k3+": values["k3"]}
    slopes = {"k1": torch.ones(5), "abs": d.sign(), "k2": d, "k1+": d, "k3+": d}
    slopes["k3"] = torch.cat([1 - (-d[:3]).exp(), torch.zeros(2)])
    for kind in losses.KL_ESTIMATES:
        got = losses.kl_estimate(d, torch.zeros(5), kind)
        close(got, values[kind], msg=kind)
        (slope,) = torch.autograd.grad(got.sum(), d)
        close(slope, slopes[kind].double(), msg=kind)
        assert losses.kl_estimate(t([NAN]), t([0.0]), kind).isnan().all()  # it must be noticed


@pytest.mark.parametrize("counts", [{}, {"n_tokens": 100, "n_seqs": t(9), "max_len": 64}])
@pytest.mark.parametrize("mode", losses.AGGREGATIONS)
def test_aggregate(mode, counts):
    x = make(8)
    values, mask = x["values"], x["mask"]
    rows = [row[on].tolist() for row, on in zip(values, mask) if on.any()]
    total = sum(map(sum, rows))
    n_seqs = counts.get("n_seqs", len(rows))
    want = {
        "token-mean": total / counts.get("n_tokens", mask.sum()),
        "token-sum": total,
        "seq-mean-token-sum": total / n_seqs,
        "seq-mean-token-mean": sum(map(fmean, rows)) / n_seqs,
        "seq-mean-token-sum-norm": total / (n_seqs * counts.get("max_len", 7)),
    }
    assert losses.aggregate(values, mask, mode, **counts).item() == pytest.approx(float(want[mode]))


def one_state(mask):
    return torch.zeros(int(losses.turn_starts(mask).sum()))


POLICY = "logprobs logprobs_old advantages"
ROLLOUT = "logprobs_old logprobs_rollout"
# Name -> its inputs (a gradient is that of the first), and how it is called
EVERY = {
    "gae": ("rewards values", lambda mask, *x: losses.gae(*x, mask, 0.9, 0.8)),
    "gigpo": ("rewards", lambda mask, x: losses.gigpo_advantages(x, mask, one_state(mask), 0.9)),
    "whiten": ("values", lambda mask, x: losses.whiten(x, mask)),
    "explained": ("values returns", lambda mask, *x: losses.explained_variance(*x, mask)),
    "value": ("values values_old returns", lambda mask, *x: losses.value_loss(*x, mask, 0.3)),
}
for kind in OBJECTIVES:
    policy = partial(losses.policy_loss, kind)
    EVERY[kind] = POLICY, lambda mask, *x, f=policy: f(*x, mask, 0.1, 0.2, 2.0)
for kind in losses.ROLLOUT_CORRECTIONS:
    correction = partial(losses.rollout_correction, kind)
    EVERY[kind] = ROLLOUT, lambda mask, *x, f=correction: f(*x, mask, 0.7, 1.4)
for kind in losses.KL_ESTIMATES:  # with aggregate, whose mask it is
    kl = partial(losses.kl_estimate, kind=kind)
    EVERY[kind] = "logprobs logprobs_ref", lambda mask, *x, f=kl: losses.aggregate(f(*x), mask)
for kind in losses.AGGREGATIONS:
    EVERY[kind] = "values", lambda mask, x, mode=kind: losses.aggregate(x, mask, mode)


def evaluate(name, x):
    """All results, stats included, and the gradient if there is one."""
    inputs, function = EVERY[name]
    args = [x[each].detach().clone() for each in inputs.split()]
    args[0].requires_grad_()
    flat, _ = tree_flatten(function(x["mask"], *args))
    if flat[0].requires_grad:
        flat += grad_of(flat[0], args[0])
    return [value.detach() for value in flat]


@pytest.mark.parametrize("name", EVERY)
def test_garbage_at_mask_0_changes_nothing_and_dtypes_are_kept(name):
    x = make(0)
    want = evaluate(name, x)
    assert all(value.isfinite().all() for value in want)
    assert any((value != 0).any() for value in want)
    for value in want:
        assert value.dim() == 0 or (value[~x["mask"]] == 0).all()
    # In all inputs, and in one at a time: NaN - NaN is not the only way to become NaN.
    inputs = EVERY[name][0].split()
    for spoilt in (inputs, *([each] for each in inputs)):
        for garbage in (NAN, INF, -INF, 1e30):
            dirty = {each: x[each].masked_fill(~x["mask"], garbage) for each in spoilt}
            close(evaluate(name, x | dirty), want, rtol=0, atol=0)
    empty = dict.fromkeys(x, torch.full((5, 7), NAN)) | {"mask": torch.zeros(5, 7)}
    assert all((value == 0).all() for value in evaluate(name, empty))
    single = evaluate(name, make(0, dtype=torch.float32))
    assert {value.dtype for value in single} == {torch.float32}


def head(T=9, H=5, V=23, dtype=torch.float64):
    """Hidden states, weights and targets."""
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(T + V, H, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(V, (T,), generator=generator)
    return *[operand.clone().requires_grad_() for operand in both.split([T, V])], targets


def plain_logprobs(hidden, weight, targets, temperature=1.0, softcap=None):
    """Logprobs, of one or more targets for each token, and entropies, from the whole logits."""
    logits = hidden @ weight.T
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits / temperature, -1)
    entropy = -(logp.exp() * logp).sum(-1)
    several = targets if targets.dim() == 2 else targets[:, None]
    return logp.gather(-1, several).view_as(targets), entropy


@pytest.mark.parametrize("options", [
    {},
    {"chunk": 4, "temperature": 0.7, "softcap": 1.5},  # 4 does not divide 23
    {"chunk": 6, "vocab_size": 20, "banned": [0, 6, 5, 19]},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("T, n_targets", [(0, 1), (9, 1), (9, 3)])
def test_token_logprobs_against_log_softmax(options, T, n_targets):
    hidden, weight, targets = head(T)
    banned = options.get("banned", [])
    kept = [i for i in range(options.get("vocab_size", 23)) if i not in banned]
    targets = targets % len(kept)
    if n_targets == 3:  # one is given twice
        targets = torch.stack([targets, (targets + 1) % len(kept), targets], 1)
    more = {name: options[name] for name in ("temperature", "softcap") if name in options}
    want = plain_logprobs(hidden, weight[kept], targets, **more)
    others = torch.ones(23, dtype=torch.bool)
    others[kept] = False
    weight.data[others] = NAN  # what has no probability must not matter

    targets = torch.tensor(kept)[targets]
    outputs = losses.token_logprobs(hidden, weight, targets, entropy=True, **options)
    close(outputs, want)

    def grads_of(logprobs, entropy):
        """Of each, and of both."""
        both = torch.cat([logprobs.flatten(), entropy**2])
        return [grad_of(x, hidden, weight) for x in (logprobs, entropy, both)]

    close(grads_of(*outputs), grads_of(*want))
    assert not grads_of(*outputs)[0][1][others].any()
    for i in banned:
        excluded = torch.full((T,), i)
        assert (losses.token_logprobs(hidden, weight, excluded, **options) == -INF).all()

    every = torch.arange(len(kept)).expand(T, -1)
    logprobs, _ = plain_logprobs(hidden, weight[kept], every, **more)
    for k in (5, len(kept)):
        values, ids = losses.top_logprobs(hidden, weight, k, **options)
        top = logprobs.topk(k)
        close(values, top.values.detach())
        assert ids.equal(torch.tensor(kept)[top.indices])


def test_top_kl_is_a_kl_that_grows_with_k():
    logp, logq = torch.randn(2, 3, 4, 50, dtype=torch.float64).log_softmax(-1)
    logq.requires_grad_()
    whole = (logp.exp() * (logp - logq)).sum(-1)
    before = torch.zeros(3, 4)
    for k in (1, 8, 50):
        top, ids = logp.topk(k)
        kl = losses.top_kl(logq.gather(-1, ids), top)
        assert (kl >= before).all()
        before = kl
    close(kl, whole)
    close(grad_of(kl, logq), grad_of(whole, logq))


class Spy(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *made])
        return out


def test_the_logits_are_never_whole():
    hidden, weight, targets = head(T=300, H=2, V=20_000, dtype=torch.float32)
    with Spy() as spy:
        logprobs, entropy = losses.token_logprobs(hidden, weight, targets, 0.9, entropy=True)
        (logprobs.sum() + entropy.sum()).backward()
    assert spy.largest <= 300 * 20_000 // 32


def test_half_precision_gives_float32_logits():
    """bfloat16 logits would be off by 1e-2. Logits of +-50 have entropies of 1e-5."""
    hidden, weight, targets = head(T=16, H=64, V=300)
    operands = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    exact = [operand.detach().double().requires_grad_() for operand in operands]
    outputs = losses.token_logprobs(*operands, targets, 0.8, 128, entropy=True)
    want = plain_logprobs(*exact, targets, 0.8)
    assert all(output.dtype == torch.float32 for output in outputs)
    close(outputs, want, rtol=1e-5, atol=1e-5, check_dtype=False)
    grads = grad_of(sum(outputs), *operands)
    for grad, wanted in zip(grads, grad_of(sum(want), *exact)):
        assert grad.dtype == torch.bfloat16
        assert (grad.double() - wanted).norm() / wanted.norm() < 1e-2

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = losses.token_logprobs(exact[0].float(), exact[1].float(), targets, 0.8)
    close(got, outputs[0], rtol=1e-5, atol=1e-5)
