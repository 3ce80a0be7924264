"""Between losses.py and the optimiser: presets, reward shaping, estimators, dynamic sampling, objectives."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
import torch
from conftest import OUR_ESTIMATORS, OUR_OBJECTIVES, OUR_PRESETS, rewards_of_tokens
from gradient_worker import gradients

import data
import losses
import train
from agent_loop import AgentLoopOutput, BadInput
from rollout import Phase
from train import PRESETS, Args, check_args, check_registered, parse_args

close = torch.testing.assert_close


def output(prompt: int, sample: int, mask: str, reward, segment: int = 0, **more) -> AgentLoopOutput:
    """A trajectory with this mask, e.g. "1101"."""
    bits = [int(bit) for bit in mask]
    extra = {"prompt": prompt, "sample": sample, "segment": segment}
    return AgentLoopOutput(prompt_ids=[1, 2], response_ids=[3] * len(bits), response_mask=bits, reward=reward,
                           response_logprobs=[-1.0 * m for m in bits], response_versions=[m - 1 for m in bits],
                           extra=extra, **more)  # fmt: skip


# ---------------------------------------------------------------- presets


def test_presets_are_flags_and_pass_the_checks():
    names = {field.name for field in dataclasses.fields(Args)}
    for algo in OUR_PRESETS:
        values = PRESETS[algo]
        assert set(values) <= set(PRESETS["grpo"]) <= names
        args = Args(algo=algo, ref_model="teacher" if algo == "opd" else None)
        check_args(args)
        check_registered(args)
        for name, default in PRESETS["grpo"].items():
            assert getattr(args, name) == values.get(name, default), (algo, name)
    assert {PRESETS[algo].get("adv_estimator", "grpo") for algo in OUR_PRESETS} == set(OUR_ESTIMATORS)
    assert {PRESETS[algo].get("policy_loss", "ppo") for algo in OUR_PRESETS} == set(OUR_OBJECTIVES)
    assert set(OUR_ESTIMATORS) <= set(losses.ESTIMATORS) and set(OUR_OBJECTIVES) <= set(losses.OBJECTIVES)


def test_a_flag_of_the_user_wins_over_the_preset_even_with_grpos_value():
    args = parse_args(["--algo", "dapo", "--clip_high", "0.2", "--max_gen_batches", "3"])
    assert (args.clip_low, args.clip_high, args.max_gen_batches, args.overlong_buffer) == (0.2, 0.2, 3, 0.2)
    args = parse_args(["--algo", "ppo", "--whiten_advantages", "false"])
    assert args.adv_estimator == "gae" and args.whiten_advantages is False
    mixed = Args(algo="rloo", policy_loss="cispo")
    assert (mixed.clip_low, mixed.clip_high, mixed.loss_agg) == (1.0, 0.28, "seq-mean-token-sum")
    assert Args(algo="gspo", policy_loss="ppo").clip_high == 0.2
    assert Args(policy_loss="gspo", clip_high=0.1).clip_low == 3e-4
    check_args(mixed)
    assert Args(algo="gspo", clip_low=0.1).clip_low == 0.1 and Args(algo="gspo").clip_high == 4e-4


def test_correction_bounds_follow_the_kind():
    args = Args(rollout_correction="icepop")
    assert (args.correction_low, args.correction_high) == (0.5, 5.0)
    decoupled = Args(rollout_correction="icepop", correction_low=0.0)
    assert (decoupled.correction_low, decoupled.correction_high) == (0.0, 5.0)
    assert Args(rollout_correction="tis").correction_high == 2.0
    for flags, low, high in (
        ([], (0.0, 0.999), (2.0, 1.002)),
        (["--correction_high", "3", "1.1"], (0.0, 0.999), [3.0, 1.1]),
        (["--max_staleness", "1"], 0.0, (2.0, 1.002)),
    ):
        args = parse_args(["--rollout_correction", "tis,geo_mask", *flags])
        check_args(args)
        assert (args.correction_low, args.correction_high) == (low, high)


def test_several_samples_are_evaluated_at_the_temperature_of_training():
    assert Args().eval_temperature == 0.0
    assert Args(eval_samples=4, temperature=0.7).eval_temperature == 0.7
    assert Args(eval_samples=4, eval_temperature=0.3).eval_temperature == 0.3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"algo": "rloo", "group_size": 1}, "--adv_estimator rloo compares the trajectories of a prompt"),
        ({"algo": "ppo", "group_size": 1, "max_gen_batches": 2}, "--max_gen_batches above 1"),
        ({"gamma": 0.9}, "--gamma has an effect only with --adv_estimator gae or reinforce_pp"),
        ({"algo": "reinforce_pp", "lam": 0.9}, "--lam has an effect only with --adv_estimator gae"),
        ({"algo": "ppo", "critic_warmup": 40}, "--critic_warmup leaves no step"),
        ({"kl_in": "reward"}, "--kl_in has an effect only with a --kl_coef"),
        ({"correction_high": 3.0}, "--correction_high has an effect only with a --rollout_correction"),
        ({"rollout_correction": "tis", "correction_low": 0.9}, "--correction_low has an effect only with"),
        ({"kl_horizon": 5}, "--kl_horizon has an effect only with a --kl_target"),
        ({"algo": "reinforce_pp", "kl_target": 0.1, "kl_horizon": 255}, "--kl_horizon 255 counts trajectories"),
        ({"value_clip": 0.2}, "--value_clip has an effect only with --adv_estimator gae"),
        ({"algo": "rloo", "clip_high": 0.5}, "--clip_high has an effect only with a --policy_loss other than"),
        ({"critic_warmup": 3}, "--critic_warmup has an effect only with --adv_estimator gae"),
        ({"algo": "cispo", "clip_c": 3.0}, "--clip_c has an effect only with --policy_loss ppo or gspo"),
        ({"clip_c": 0.5}, "--clip_c 0.5 must be 0, or exceed 1"),
        ({"kl_coef": 0.1, "kl_target": 0.1}, "--kl_target has an effect only with --kl_in reward"),
        ({"filter_metric": "acc"}, "--filter_metric has an effect only with a --max_gen_batches other than 1"),
        ({"overlong_buffer": 32.0}, "--overlong_buffer 32.0 must be in [0, 1]"),
        ({"rollout_correction": "icepop", "correction_low": 6.0}, "bound 6.0 of icepop exceeds the upper one, 5.0"),
        ({"rollout_correction": "clip"}, "unknown rollout correction 'clip': choose from none, tis"),
        ({"rollout_correction": "tis,clip"}, "unknown rollout correction 'clip': choose from none, tis"),
        ({"rollout_correction": "tis,veto", "correction_low": [0.1]}, "--rollout_correction, --correction_low"),
        ({"rollout_correction": "tis,seq_tis", "correction_low": 0.1}, "--correction_low has an effect only with"),
        ({"algo": "opd"}, "--reward_coef 0 (--algo opd) learns from the KL to a teacher"),
        ({"ref_model": "x"}, "--ref_model has an effect only with a --kl_coef"),
        ({"reward_coef": 0.5}, "--reward_coef has an effect only with --kl_in reward"),
        ({"turn_discount": 0.5}, "--turn_discount has an effect only with --adv_estimator gae or"),
        ({"algo": "gigpo", "group_size": 1}, "--adv_estimator gigpo compares the trajectories of a prompt"),
        ({"algo": "sapo", "clip_low": 0.0}, "--policy_loss sapo: its temperatures"),
        ({"eval_samples": 2, "eval_temperature": 0.0}, "--eval_samples has an effect only with a --eval_temperature"),
        ({"policy_loss": "trpo"}, "--policy_loss trpo: choose from ppo"),
        ({"adv_estimator": "td"}, "--adv_estimator td: choose from gae, reinforce_pp, grpo"),
        ({"kl_in": "prompt"}, "--kl_in prompt: choose from loss, reward"),
        ({"max_gen_batches": 0}, "--max_gen_batches 0 must be greater than 0"),
    ],
)
def test_flags_without_effect_or_sense_are_refused(flags, message):
    with pytest.raises(BadInput) as error:
        check_args(Args(**flags))
        check_registered(Args(**flags))
    assert message in str(error.value)


# ---------------------------------------------------------------- rewards

#   prompt 0: rollout 0 (one trajectory, a turn reward), rollout 1 (two trajectories); prompt 4: rollouts 2, 3
OUTPUTS = [
    output(0, 0, "11011", 1.0, turn_rewards=[(1, 0.5)]),
    output(0, 1, "11", -3.0, segment=0),
    output(0, 1, "111", -3.0, segment=1, turn_rewards=[(2, 0.25)]),
    output(4, 0, "1", {"score": 2.0, "acc": 1}),
    output(4, 1, "0111111100", 0.0, stop_reason="length"),
]


def prepared(args: Args, kl_coef: float = 0.0, **tensors):
    batch = data.collate(OUTPUTS) | tensors | {"units": data.by_unit(OUTPUTS)}
    metrics = train.shape_rewards(batch, OUTPUTS, kl_coef, args)
    return batch, batch["units"], metrics


def test_rewards_of_rollouts():
    rollouts = data.by_unit(OUTPUTS)
    assert rollouts.outcomes.tolist() == [1.0, -3.0, 2.0, 0.0]
    assert rollouts.rewards.tolist() == [1.5, -2.75, 2.0, 0.0]
    assert rollouts.groups.tolist() == [0, 0, 4, 4] and rollouts.index.tolist() == [0, 1, 1, 2, 3]
    assert rollouts.prompts.tolist() == [0, 0, 4, 4] and rollouts.lengths.tolist() == [5, 5, 1, 10]


def test_shaping_moves_rewards_and_token_rewards_alike():
    # clip to 1.5; the last 40% of 10 tokens, from 6 on, cost up to 1: only the trajectory of 10 tokens, all of it
    args = Args(max_response_tokens=10, overlong_buffer=0.4, reward_clip=1.5)
    batch, rollouts, metrics = prepared(args)
    assert rollouts.rewards.tolist() == [1.5, -1.25, 1.5, -1.0]
    expected = torch.zeros(5, 10)
    expected[0, 1], expected[0, 4] = 0.5, 1.0
    expected[2, 2] = -1.5 + 0.25  # the unit's terminal reward stands once, at the end of its last output
    expected[3, 0], expected[4, 7] = 1.5, -1.0  # on the last sampled token
    close(batch["token_rewards"], expected)
    assert metrics == {"reward/shaped_mean": pytest.approx(0.1875)}
    close(train.shaped_rewards(data.by_unit([output(0, 0, "1" * 7, 0.5)]), args)[0], torch.tensor([0.25]))


def test_units_with_rewards_of_their_own_are_clipped_each():
    outputs = [output(0, 0, "11", 0.3, unit="x"), output(0, 0, "11", 10.0, segment=1, unit="o")]
    batch = data.collate(outputs) | {"units": data.by_unit(outputs)}
    train.shape_rewards(batch, outputs, 0.0, Args(reward_clip=1.0))
    close(batch["units"].rewards, torch.tensor([0.3, 1.0]))
    close(batch["token_rewards"], torch.tensor([[0, 0.3], [0, 1.0]]))


def test_kl_in_the_reward_by_hand():
    old = torch.where(data.collate(OUTPUTS)["response_mask"].bool(), -1.0, math.nan)
    ref = torch.where(data.collate(OUTPUTS)["response_mask"].bool(), -1.5, math.nan)
    args = Args(kl_coef=0.1, kl_in="reward", kl_kind="k1")
    batch, rollouts, metrics = prepared(args, 0.1, logprobs_old=old, logprobs_ref=ref)  # k1: 0.5 a sampled token
    close(rollouts.rewards, torch.tensor([1.5 - 4 * 0.05, -2.75 - 5 * 0.05, 2.0 - 0.05, 0.0 - 7 * 0.05]))
    plain = rewards_of_tokens(OUTPUTS)
    plain[1, 1] = 0  # the unit goes on
    close(batch["token_rewards"], plain - 0.05 * data.collate(OUTPUTS)["response_mask"])
    assert metrics["actor/kl"] == pytest.approx(0.5) and metrics["actor/kl_coef"] == 0.1
    _, _, metrics = prepared(dataclasses.replace(args, kl_in="loss"), 0.1, logprobs_old=old, logprobs_ref=ref)
    assert "actor/kl" not in metrics


def test_the_reward_of_distillation_is_the_kl_to_the_teacher_token_by_token():
    mask = data.collate(OUTPUTS)["response_mask"]
    old, ref = -mask, -mask * torch.linspace(0.5, 3, mask.shape[1])
    advantages, batch = estimated(algo="opd", ref_model="x", logprobs_old=old, logprobs_ref=ref)
    close(advantages, (ref - old) * mask)
    sums = torch.zeros(4).index_add(0, torch.tensor(ROLLOUT_OF), ((ref - old) * mask).sum(-1))
    close(batch["units"].rewards, sums)
    # beside the task's reward: its sum over a rollout, compared in groups
    mixed = Args(algo="opd", ref_model="x", reward_coef=0.5, kl_coef=0.1, adv_estimator="drgrpo")
    batch, rollouts, _ = prepared(mixed, 0.1, logprobs_old=old, logprobs_ref=ref)
    close(rollouts.rewards, 0.5 * torch.tensor([1.5, -2.75, 2.0, 0.0]) + 0.1 * sums)


# ---------------------------------------------------------------- estimators

MASK = data.collate(OUTPUTS)["response_mask"]
ROLLOUT_OF = [0, 1, 1, 2, 3]


def estimated(greedy=(), values=None, logprobs_old=None, logprobs_ref=None, **flags) -> tuple[torch.Tensor, dict]:
    args = Args(**flags)
    values = torch.zeros_like(MASK) if values is None else values
    tensors = {"values": values, "logprobs_old": logprobs_old, "logprobs_ref": logprobs_ref}
    batch, _, _ = prepared(args, args.kl_coef, **tensors)
    for baseline in greedy:
        baseline.extra["greedy"] = True
    return train.estimate_advantages(batch, Phase(outputs=[*OUTPUTS, *greedy]), args), batch


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # group 0: 1.5, -2.75, mean -0.625, std 3.0052; group 4: 2, 0, mean 1, std 1.4142
        ("grpo", [2.125 / (3.005204 + 1e-6), -2.125 / (3.005204 + 1e-6), 0.707106, -0.707106]),
        ("drgrpo", [2.125, -2.125, 1.0, -1.0]),
        ("rloo", [4.25, -4.25, 2.0, -2.0]),
        # lengths count sampled tokens, over both trajectories of rollout 1: 4, 5 and 1, 7
        ("opo", [1.5 - (4 * 1.5 - 5 * 2.75) / 9, -2.75 - (4 * 1.5 - 5 * 2.75) / 9, 2 - 2 / 8, -2 / 8]),
    ],
)
def test_group_estimators_give_a_rollout_one_advantage(estimator, expected):
    advantages, _ = estimated(adv_estimator=estimator)
    assert advantages.shape == MASK.shape
    for row, n in enumerate(ROLLOUT_OF):
        close(advantages[row], expected[n] * MASK[row], atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(5,), (3,), (4, 10), (5, 1), ()])
def test_advantages_of_another_shape_are_refused(shape, registries):
    """4 units, of 5 outputs: a number for each of the latter would be read for other units.

    End to end, with an empty column before each turn, the longest unit has 7 places."""
    losses.estimator("mine")(lambda: torch.zeros(shape))
    with pytest.raises(ValueError) as error:
        estimated(adv_estimator="mine")
    said = str(error.value)
    assert f"mine gives advantages of the shape {shape}: must be finite, and one for each unit, (N,) = (4,)" in said
    assert said.endswith("for each token, (N, S) = (4, 8)")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_advantages_that_are_not_finite_are_refused_where_they_count(bad, registries):
    losses.estimator("mine")(lambda rewards: rewards.where(rewards > 0, bad))
    with pytest.raises(ValueError, match=r"mine gives advantages of the shape \(4, 8\): must be finite"):
        estimated(adv_estimator="mine")
    losses.estimator("mine")(lambda mask: mask.masked_fill(mask == 0, bad))  # at mask 0 nothing counts
    close(estimated(adv_estimator="mine")[0], MASK)


def test_remax_subtracts_the_greedy_reward_shaped_alike_and_a_missing_one_teaches_nothing():
    greedy = [output(0, 0, "1", 9.0, turn_rewards=[(0, 0.25)])]  # prompt 4's failed
    advantages, _ = estimated(greedy, adv_estimator="remax", reward_clip=2.0)
    assert advantages[:, 0].tolist() == [1.5 - 2.25, -1.75 - 2.25, -1.75 - 2.25, 0.0, 0.0]
    mixed = dict(kl_coef=0.1, kl_in="reward", reward_coef=0.5, logprobs_old=-MASK, logprobs_ref=-MASK)
    half, _ = estimated(greedy, adv_estimator="remax", reward_clip=2.0, **mixed)
    close(half, advantages / 2)


def test_token_estimators_use_turn_rewards_where_they_fall():
    advantages, _ = estimated(adv_estimator="reinforce_pp", gamma=0.5)
    close(advantages[0], torch.tensor([0.125 + 0.5 * 0.5, 0.25 + 0.5, 0, 0.5, 1, 0, 0, 0, 0, 0]))
    values = torch.full_like(MASK, 0.5)
    advantages, batch = estimated(adv_estimator="gae", values=values, gamma=1.0, lam=0.0)
    close(advantages[0], torch.tensor([0, 0.5, 0, 0, 0.5, 0, 0, 0, 0, 0]))  # r_t + V' - V; V' = 0 at the end
    close(batch["returns"][0], torch.tensor([0.5, 1.0, 0, 0.5, 1.0, 0, 0, 0, 0, 0]))
    for estimator in ("reinforce_pp", "gae"):  # by turns; without a critic's values both are the return
        advantages, _ = estimated(adv_estimator=estimator, turn_discount=0.5)
        close(advantages[0], torch.tensor([1.0, 1, 0, 1, 1, 0, 0, 0, 0, 0]))


def alike(states: torch.Tensor) -> list[int]:
    """For each state, where it was first met."""
    return [states.tolist().index(x) for x in states.tolist()]


def test_a_turns_state_is_what_the_reward_function_said_or_its_index():
    outputs = [output(0, 0, "1100101", 0.0), output(0, 1, "0101", 0.0), output(0, 1, "000", 0.0, segment=1),
               output(3, 0, "11", 0.0)]  # fmt: skip
    turns = [3, 2, 1]
    assert alike(data.turn_states(outputs, turns)) == [0, 1, 2, 0, 1, 5]
    outputs[0].metrics["states"], outputs[1].metrics["states"] = ["a", "b", "a"], [["b", 1], "a"]
    assert alike(data.turn_states(outputs, turns)) == [0, 1, 0, 3, 0, 5]
    outputs[3].metrics["states"] = ["a", "b"]
    with pytest.raises(ValueError, match=r"metrics\['states'\] has 2 states for 1 turns"):
        data.turn_states(outputs, turns)


def test_the_states_of_a_unit_go_over_its_outputs():
    outputs = [output(0, 0, "1", 0.0), output(0, 0, "101", 0.0, segment=1), output(0, 1, "1", 0.0),
               output(0, 1, "1", 0.0, segment=1, unit="other")]  # fmt: skip
    assert alike(data.turn_states(outputs, [3, 1, 1])) == [0, 1, 2, 0, 4]  # another unit, another group
    outputs[0].metrics["states"], outputs[1].metrics["states"] = ["a"], ["b", "a"]
    outputs[2].metrics["states"], outputs[3].metrics["states"] = ["b"], ["a"]
    assert alike(data.turn_states(outputs, [3, 1, 1])) == [0, 1, 0, 1, 4]


def test_states_are_compared_by_value():
    """A repr leaves out most of a large array."""
    one, other = np.zeros(5000), np.zeros(5000)
    other[2500] = 1
    assert repr(one) == repr(other)
    outputs = [output(0, sample, "1", 0.0) for sample in range(5)]
    states = [one, {"map": torch.tensor(other)}, one.copy(), {"map": other}, {"map": one}]
    for each, state in zip(outputs, states):
        each.metrics["states"] = [state]
    assert alike(data.turn_states(outputs, [1] * 5)) == [0, 1, 0, 1, 4]
    image = PIL.Image.new("RGB", (40, 40))
    outputs[0].metrics["states"], outputs[1].metrics["states"] = [image], [image.copy()]
    image.putpixel((3, 3), (1, 0, 0))
    assert alike(data.turn_states(outputs, [1] * 5))[:2] == [0, 1]


def test_gigpo_adds_what_a_turn_did_in_its_state_to_what_the_unit_did():
    """Rewards of turns in prompt 0: 0.5 then 1; 0 then, in the second output, -2.75. Of prompt 4: 2; 0."""
    advantages, _ = estimated(adv_estimator="gigpo", turn_discount=0.5)
    whole, _ = estimated(adv_estimator="grpo")
    pair = 0.7071068  # of two different ones, whatever they are: returns 1 and -1.375, then 1 and -2.75
    steps = torch.tensor([pair, -pair, -pair, pair, -pair])[:, None] * MASK
    close(advantages, whole + steps, atol=1e-5, rtol=0)


def test_whitening_is_over_the_tokens_of_the_batch():
    advantages, _ = estimated(adv_estimator="drgrpo", whiten_advantages=True)  # REINFORCE++-baseline
    tokens = advantages[MASK.bool()].double()
    assert abs(tokens.mean()) < 1e-6 and abs(tokens.std() - 1) < 1e-5
    assert (advantages[~MASK.bool()] == 0).all()
    raw = torch.tensor([2.125] * 4 + [-2.125] * 5 + [1.0] + [-1.0] * 7, dtype=torch.float64)
    close(tokens, (raw - raw.mean()) / raw.std(), atol=1e-6, rtol=1e-5)


# ---------------------------------------------------------------- dynamic sampling: see also test_async.py


def test_filter_metric():
    def signal(metric, *outputs):
        return data.groups_with_signal(list(outputs), metric)

    # equal outcomes, shaped by a turn reward; equal scores, other accuracy
    turns = [output(0, 0, "11", 1.0), output(0, 1, "11", 1.0, turn_rewards=[(0, 0.1)])]
    assert signal("outcome", *turns) == set() and signal("total", *turns) == {0}
    parts = [output(2, 0, "1", {"score": 1.0, "acc": 0}), output(2, 1, "1", {"score": 1.0, "acc": 1})]
    assert signal("outcome", *parts) == set() and signal("acc", *parts) == {2}
    segments = [output(3, 0, "1", {"score": 1.0, "acc": 5}), output(3, 0, "1", {"score": 1.0, "acc": 1}, segment=1)]
    assert signal("acc", *segments, output(3, 1, "1", {"score": 1.0, "acc": 1})) == set()  # the last one's counts


def test_scores_follow_the_trajectories_whose_reward_came(monkeypatch):
    outputs = [output(0, 0, "1", None), output(0, 1, "11111", None), output(1, 0, "11", None)]
    phase = Phase(outputs=list(outputs))

    def grade(run, phase):  # the long one's reward failed
        outputs[0].reward, outputs[2].reward, phase.outputs = 1.0, 2.0, [outputs[0], outputs[2]]

    monkeypatch.setattr(train, "grade", grade)
    batch = data.collate(phase.trained) | {"values": torch.arange(15.0).view(3, 5)}
    batch = train.grade_batch(SimpleNamespace(engine=True, history=[]), phase, batch)
    assert batch["response_mask"].tolist() == [[1, 0], [1, 1]]
    assert batch["values"].tolist() == [[0, 1], [10, 11]] and batch["units"].rewards.tolist() == [1.0, 2.0]
    train.shape_rewards(batch, phase.trained, 0.0, Args())
    assert batch["token_rewards"].tolist() == [[1, 0], [0, 2]] and batch["units"].rewards.tolist() == [1.0, 2.0]


# ---------------------------------------------------------------- objectives


def test_on_policy_the_ratio_is_exactly_one_and_all_objectives_have_one_gradient(
    tiny_model, process_group, monkeypatch
):
    """One update per rollout, float32, through the real model, packing and micro-batches."""
    from accelerate import Accelerator

    ratios = []
    policy_loss = losses.policy_loss

    def spy(kind, logprobs, old, advantages, mask, *clips, **more):
        loss, stats = policy_loss(kind, logprobs, old, advantages, mask, *clips, **more)
        ratios.append(stats["ratio"][mask.bool()])
        return loss, stats

    monkeypatch.setattr(losses, "policy_loss", spy)
    results = {}
    for kind in ("reinforce", "ppo", "gspo", "cispo"):
        flags = {"policy_loss": kind, "on_policy": True, "kl_coef": 0.0}
        results[kind] = gradients(Accelerator(cpu=True), tiny_model, 200, "token-mean", **flags)
        metrics = results[kind]["metrics"]
        assert metrics["clipfrac"] == metrics["ppo_kl"] == 0.0
    assert len(ratios) > 8 and all((ratio == 1).all() for ratio in ratios)
    for name, gradient in results["reinforce"]["gradients"].items():
        for kind in ("ppo", "gspo", "cispo"):
            error = (results[kind]["gradients"][name] - gradient).norm() / gradient.norm()
            assert error < 1e-6, (kind, name, error)


def test_objective_is_policy_loss_times_correction_minus_entropy_plus_kl():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 0], [1, 1, 1, 1]], dtype=torch.float64)
    batch = {name: -2 + 0.4 * draw(3, 4) for name in ("logprobs_old", "logprobs_ref", "logprobs_rollout")}
    batch["advantages"] = draw(3, 4)
    rows = [2, 0]
    logprobs = (-2 + 0.4 * draw(2, 4)).requires_grad_()
    entropy = draw(2, 4).abs().requires_grad_()
    args = Args(rollout_correction="icepop", correction_low=0.8, correction_high=1.3, entropy_coef=0.03, clip_high=0.1,
                kl_coef=0.2, kl_kind="k2")  # fmt: skip
    part = {name: x[rows] for name, x in batch.items()} | {"response_mask": mask[rows]}
    loss, stats = train.policy_objective((logprobs, entropy), part, args)
    expected = 0.0
    for b, row in enumerate(rows):
        for t in range(4):
            if not mask[row, t]:
                continue
            old, ref, behaviour, A = (batch[name][row, t] for name in
                                      ("logprobs_old", "logprobs_ref", "logprobs_rollout", "advantages"))  # fmt: skip
            weight = math.exp(old - behaviour)
            weight = weight if 0.8 <= weight <= 1.3 else 0.0
            ratio = (logprobs[b, t] - old).exp()
            pg = -torch.minimum(A * ratio, A * ratio.clamp(0.8, 1.1)) * weight
            expected = expected + pg - 0.03 * entropy[b, t] + 0.2 * 0.5 * (logprobs[b, t] - ref) ** 2
    total = losses.aggregate(loss, mask[rows], "token-sum")
    close(total, expected)
    for leaf in (logprobs, entropy):
        close(
            torch.autograd.grad(total, leaf, retain_graph=True)[0],
            torch.autograd.grad(expected, leaf, retain_graph=True)[0],
        )
    assert not any(stat.requires_grad for stat in stats.values())


def test_the_value_of_kl_in_the_reward_is_not_a_loss_too():
    batch = {name: torch.full((1, 2), -1.0) for name in ("logprobs_old", "logprobs_ref", "logprobs_rollout")}
    batch |= {"advantages": torch.ones(1, 2), "response_mask": torch.ones(1, 2)}
    logprobs = torch.full((1, 2), -0.5, requires_grad=True)
    for kl_in, has in (("reward", False), ("loss", True)):
        _, stats = train.policy_objective((logprobs, torch.zeros(1, 2)), batch, Args(kl_coef=0.5, kl_in=kl_in))
        assert ("kl" in stats) is has


def test_a_value_is_the_heads_weights_and_bias():
    critic = SimpleNamespace(head=torch.nn.Linear(2, 1))
    with torch.no_grad():
        critic.head.weight.copy_(torch.tensor([[2.0, -1.0]]))
        critic.head.bias.fill_(0.5)
    (values,) = train.Critic.scores_from_hidden(critic, torch.tensor([[1, 3], [4, 0]], dtype=torch.bfloat16), None)
    assert values.tolist() == [-0.5, 8.5] and values.dtype == torch.float32
