"""Between losses.py and the optimiser: presets, shaped rewards, estimators, objectives; those of a
task file too."""

import math

import pytest
import torch
from conftest import batch_with_rewards, output_of

import data
import losses
import train
from agent_loop import BadInput
from rollout import Rollouts
from train import Args, parse_args

close = torch.testing.assert_close


def output(prompt: int, sample: int, mask: str, reward, segment: int = 0, **more):
    """A trajectory with this mask, e.g. "1101"."""
    extra = {"prompt": prompt, "sample": sample, "segment": segment}
    return output_of([int(bit) for bit in mask], reward=reward, extra=extra, **more)


def test_a_flag_of_the_user_wins_over_the_preset_even_with_grpos_value():
    args = parse_args(["--algo", "dapo", "--clip_high", "0.2"])
    assert (args.clip_low, args.clip_high, args.overlong_buffer) == (0.2, 0.2, 0.2)
    # An objective brings the clip bounds of its own preset.
    mixed = Args(algo="rloo", policy_loss="cispo")
    assert (mixed.clip_low, mixed.clip_high) == (1.0, 0.28)
    assert mixed.loss_agg == "seq-mean-token-sum"


# Prompt 0: two rollouts, the second one of two outputs; prompt 4: two rollouts.
OUTPUTS = [
    output(0, 0, "11011", 1.0, turn_rewards=[(1, 0.5)]),
    output(0, 1, "11", -3.0, segment=0),
    output(0, 1, "111", -3.0, segment=1, turn_rewards=[(2, 0.25)]),
    output(4, 0, "1", {"score": 2.0, "acc": 1}),
    output(4, 1, "0111111100", 0.0, stop_reason="length"),
]
REWARDS = torch.tensor([1.5, -2.75, 2.0, 0.0])
MASK = data.collate(OUTPUTS)["response_mask"]


def test_long_responses_cost_rewards_and_token_rewards_alike():
    """The last 40% of 10 tokens, from 6 on, cost up to 1: only one output has so many."""
    batch, metrics = batch_with_rewards(OUTPUTS, Args(max_response_tokens=10, overlong_buffer=0.4))
    close(batch.shaped_rewards, REWARDS - torch.tensor([0, 0, 0, 1.0]))
    expected = torch.zeros(5, 10)
    expected[0, 1], expected[0, 4] = 0.5, 1.0
    expected[2, 2] = -3.0 + 0.25  # a unit's terminal reward stands at the end of its last output
    expected[3, 0], expected[4, 7] = 2.0, -1.0  # on the last sampled token
    close(batch.layout.to_outputs(batch.token_rewards), expected)
    assert metrics == {"reward/shaped_mean": pytest.approx(-0.0625)}


def test_kl_in_the_reward_by_hand():
    old, ref = (torch.where(MASK.bool(), x, math.nan) for x in (-1.0, -1.5))
    tensors = dict(logprobs_old=old, logprobs_ref=ref)
    flags = dict(kl_coef=0.1, kl_kind="k1")
    batch, metrics = batch_with_rewards(OUTPUTS, Args(kl_in="reward", **flags), **tensors)
    close(batch.shaped_rewards, REWARDS - 0.05 * torch.tensor([4, 5, 1, 7]))
    plain = batch.layout.to_outputs(batch_with_rewards(OUTPUTS, Args())[0].token_rewards)
    plain[1, 1] = 0  # the unit does not end there
    close(batch.layout.to_outputs(batch.token_rewards), plain - 0.05 * MASK)
    assert metrics["actor/kl"] == pytest.approx(0.5) and metrics["actor/kl_coef"] == 0.1


def estimated(greedy=(), tensors=None, **flags) -> tuple[torch.Tensor, dict]:
    """The advantages (B, T), and the batch, with these tensors."""
    args = Args(**flags)
    tensors = {"values": torch.zeros_like(MASK)} | (tensors or {})
    batch, _ = batch_with_rewards(OUTPUTS, args, **tensors)
    for baseline in greedy:
        baseline.extra["greedy"] = True
    rollouts = Rollouts(outputs=[*OUTPUTS, *greedy])
    return train.estimate_advantages(batch, rollouts, args, {}, step=3), batch


def test_results_of_an_estimator_are_checked(registries):
    """A number for each of the 5 outputs would be read for other units. Where nothing was sampled,
    garbage does no harm."""
    losses.estimator("mine")(lambda mask: mask.masked_fill(mask == 0, math.inf))
    close(estimated(adv_estimator="mine")[0], MASK)
    for function in lambda: torch.zeros(5), lambda rewards: rewards.where(rewards > 0, math.nan):
        losses.estimator("mine")(function)
        with pytest.raises(BadInput, match="--adv_estimator mine gives advantages of torch.Size"):
            estimated(adv_estimator="mine")


def test_an_estimator_gets_what_its_parameters_name(registries):
    got = {}

    @losses.estimator("spy")
    def spy(
        rewards, groups, lengths, mask, token_rewards, baselines, states, parts, outputs, step,
        num_steps, logprobs_old, logprobs_rollout, args, more=7,
    ):  # fmt: skip
        got.update(locals())
        return rewards

    old = {"logprobs_old": torch.where(MASK.bool(), 2.0, math.nan)}
    greedy = [output(4, sample, "1", reward) for sample, reward in enumerate([9.0, 5.0])]
    estimated(greedy, old, adv_estimator="spy", turn_discount=0.5)
    close(got["rewards"], REWARDS)
    close(got["token_rewards"].sum(1), REWARDS)
    close(got["baselines"], torch.tensor([math.nan, math.nan, 7, 7]), equal_nan=True)
    assert got["groups"].tolist() == [0, 0, 4, 4]
    assert got["lengths"].tolist() == got["mask"].sum(1).tolist() == [4, 5, 1, 7]
    assert len(got["states"]) == 6 and got["outputs"] == OUTPUTS  # 2, 2, 1 and 1 turns
    (acc,) = got["parts"].values()  # without the score, which is the outcome
    close(acc, torch.tensor([math.nan, math.nan, 1, math.nan]), equal_nan=True)
    close(got["logprobs_rollout"], -got["mask"])
    close(got["logprobs_old"], 2 * got["mask"])
    assert (got["step"], got["num_steps"]) == (3, 40)
    assert (got["args"].turn_discount, got["more"]) == (0.5, 7)


def test_an_estimator_draws_the_same_numbers_on_every_rank(registries):
    losses.estimator("random")(lambda mask: mask * torch.rand(()))
    first, _ = estimated(adv_estimator="random")
    torch.rand(3)  # as a reward of one rank may
    again, _ = estimated(adv_estimator="random")
    assert first.equal(again) and first.any()


def test_batch_stats_reach_the_objective_as_columns(registries):
    stats = {"tokens": data.make_batch(OUTPUTS).layout.mask > 0, "units": REWARDS, "batch": 0.5}
    losses.estimator("found")(lambda rewards, mask: (rewards, stats))
    losses.objective("seen")(lambda logprobs, batch_stats: batch_stats["units"] + logprobs)
    _, batch = estimated(adv_estimator="found", policy_loss="seen")
    assert batch["batch_stats/tokens"].equal(MASK)
    close(batch["batch_stats/units"], MASK * REWARDS[[0, 1, 1, 2, 3], None])
    close(batch["batch_stats/batch"], MASK / 2)


def test_an_objective_gets_clean_inputs_and_may_weigh_imitation(registries):
    """Two tokens are sampled, the one between them is garbage, and the last is demonstrated."""
    got = {}

    @losses.objective("mine")
    def mine(
        logprobs, ratio, entropy, advantages, mask, demonstrated, clip_high, clip_c, batch_stats,
        step, num_steps, state, args,
    ):  # fmt: skip
        got.update(locals())
        loss = -advantages * ratio**2 - args.lam * entropy
        loss = torch.where(demonstrated, -step / num_steps * logprobs, state["factor"] * loss)
        stats = {"bound": batch_stats["x"] * clip_high * clip_c, "clipfrac": ratio > 1}
        return loss + torch.where(mask | demonstrated, 0, math.nan), stats

    logprobs = torch.tensor([[-1, math.nan, -2, -3]]).requires_grad_()
    columns = {
        "logprobs_old": torch.tensor([[-2, math.nan, -2, -3]]),
        "logprobs_rollout": torch.tensor([[-1, math.nan, -2, 0]]),
        "advantages": torch.tensor([[3, math.nan, -1, 0]]),
        "response_mask": torch.tensor([[1, 0, 1, 0]]),
        "imitation_mask": torch.tensor([[0, 0, 0, 1]]),
        "batch_stats/x": torch.tensor([[1, 0, 2, 0.0]]),
    }
    scores = {"logprobs": logprobs, "entropy": torch.tensor([[0.5, math.nan, 1, 2]])}
    # The weights of the correction, 1 / e and 1, and the entropy bonus are not for imitation.
    flags = {"rollout_correction": "tis", "entropy_coef": 0.25, "clip_high": 0.5, "clip_c": 3.0}
    args = Args(policy_loss="mine", num_steps=10, lam=0.1, **flags)
    loss, stats = train.policy_objective(scores, columns, args, 4, {"factor": 2.0})
    assert got["entropy"].tolist() == [[0.5, 0, 1, 2]]
    assert stats["bound"].tolist() == [[1.5, 0, 3, 0]]
    assert stats["clipfrac"].tolist() == [[1, 0, 0, 0]]
    weights = torch.tensor([[1 / math.e, 0, 1, 0]])
    plain = 2 * torch.tensor([[-3 * math.e**2 - 0.05, 0, 1 - 0.1, 0]])
    slopes = 2 * torch.tensor([[-6 * math.e**2, 0, 2, 0]])
    imitation = torch.tensor([[0, 0, 0, 0.4]])
    on = [0, 2, 3]
    bonus = 0.25 * torch.tensor([[0.5, 0, 1, 0]])
    close(loss[:, on], (plain * weights - bonus + 3 * imitation)[:, on])
    (gradient,) = torch.autograd.grad(loss[:, on].sum(), logprobs)
    close(gradient[:, on], (slopes * weights - imitation)[:, on])


def test_remax_subtracts_the_greedy_reward_and_a_missing_one_teaches_nothing():
    greedy = [output(0, 0, "1", 2.0, turn_rewards=[(0, 0.25)])]  # prompt 4's failed
    advantages, _ = estimated(greedy, adv_estimator="remax")
    assert advantages[:, 0].tolist() == [1.5 - 2.25, -2.75 - 2.25, -2.75 - 2.25, 0.0, 0.0]
    half, _ = estimated(greedy, adv_estimator="remax", reward_coef=0.5)
    close(half, advantages / 2)


def test_token_estimators_use_turn_rewards_where_they_fall():
    advantages, _ = estimated(adv_estimator="reinforce_pp", gamma=0.5)
    expected = torch.tensor([0.125 + 0.5 * 0.5, 0.25 + 0.5, 0, 0.5, 1])
    close(advantages[0, :5], expected)
    half = {"values": torch.full_like(MASK, 0.5)}
    advantages, batch = estimated(tensors=half, adv_estimator="gae", gamma=1.0, lam=0.0)
    # r_t + V' - V; V' = 0 at the end.
    close(advantages[0, :5], torch.tensor([0, 0.5, 0, 0, 0.5]))
    close(batch["returns"][0, :5], torch.tensor([0.5, 1.0, 0, 0.5, 1.0]))
    for estimator in ("reinforce_pp", "gae"):  # by turns; without values both are the return
        advantages, _ = estimated(adv_estimator=estimator, turn_discount=0.5)
        close(advantages[0], MASK[0])


def test_a_turns_state_is_what_the_reward_function_gave_or_its_index():
    outputs = [
        output(0, 0, "11001", 0.0),
        output(0, 0, "1", 0.0, segment=1),  # the states of a unit go over its outputs
        output(0, 1, "0101", 0.0),
        output(0, 1, "1", 0.0, segment=1, unit="other"),  # and of another group
        output(3, 0, "1", 0.0),
    ]
    given = ["a", "b"], ["a"], [["b", 1], "a"], ["a"], ["a"]
    for metrics, expected in ([[]] * 5, [0, 1, 2, 0, 1, 5, 6]), (given, [0, 1, 0, 3, 0, 5, 6]):
        for each, states in zip(outputs, metrics):
            each.metrics["states"] = states
        states = data.turn_states(data.make_batch(outputs)).tolist()
        assert [states.index(state) for state in states] == expected  # where each was first met
    # A salted hash would give other labels on other ranks, and after a resume.
    assert data.by_unit(outputs).groups.tolist() == [0, 0, 2504016390986559382, 3]
    assert states[0] == 2261447073808772132


def test_whitening_is_over_the_tokens_of_the_batch():
    advantages, _ = estimated(adv_estimator="drgrpo", whiten_advantages=True)
    raw = torch.tensor([2.125] * 4 + [-2.125] * 5 + [1.0] + [-1.0] * 7)
    close(advantages[MASK.bool()], (raw - raw.mean()) / raw.std(), atol=1e-6, rtol=1e-5)
    assert (advantages[~MASK.bool()] == 0).all()


def test_scores_follow_the_outputs_whose_reward_came():
    outputs = [output(0, 0, "1", None), output(0, 1, "11111", None), output(1, 0, "11", None)]
    batch = data.make_batch(outputs)
    batch["values"] = torch.arange(15.0).view(3, 5)
    outputs[0].reward, outputs[2].reward = 1.0, 2.0
    batch = batch.select([0, 2])
    assert batch["response_mask"].tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert batch["values"].tolist() == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]]
    assert batch.units.task_rewards.tolist() == [1.0, 2.0]


def test_a_single_asynchronous_update_clips_the_ratio_to_the_engine():
    ratios = torch.tensor([[1.1, 1.3, 0.7, 1.3, 1280.0]])  # the engine's probabilities are 0.0005
    logprobs = (ratios * 0.0005).log().requires_grad_()
    columns = {
        "logprobs_rollout": torch.full_like(ratios, 0.0005).log(),
        "advantages": torch.tensor([[1.0, 1, -1, -1, -1]]),
        "response_mask": torch.ones_like(ratios),
    }
    args = Args(max_staleness=2, kl_coef=0.1, kl_in="reward")  # clips at 0.2 and, for A < 0, at 3
    scores = {"logprobs": logprobs, "entropy": 0 * logprobs}
    loss, stats = train.policy_objective(scores, columns, args)
    close(loss, torch.tensor([[-1.1, -1.2, 0.8, 1.3, 3.0]]))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    close(gradient, torch.tensor([[-1.1, 0, 0, 1.3, 0]]))
    close(stats["ratio"], ratios)
    assert stats["clipfrac"].tolist() == [[0, 1, 1, 0, 0]]
