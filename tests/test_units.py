"""A unit, which shares one reward, weighs one: however many outputs it is cut into."""

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import batch_with_rewards
from test_algos import output as played
from torch.testing import assert_close as close

import data
import losses
import train
from agent_loop import RESPONSE_LISTS, AgentLoopOutput
from flatrl.metrics import describe, describe_eval
from rollout import Rollouts, set_rewards
from train import PRESETS, Args

MASKS = "1110011 1111 11010111011 1 0111 110111100111 1111111111 101".split()


def whole(seed: int) -> list[AgentLoopOutput]:
    """Rollouts of two prompts, each one output, with random rewards and logprobs."""
    rng = random.Random(seed)
    outputs = []
    for number, text in enumerate(rng.sample(MASKS, len(MASKS))):
        ids = [rng.randrange(5, 99) for _ in text]
        rewards = [(text.index("1"), rng.random())]
        final = rng.choice([0.0, 1.0, 0.5])
        output = played(number // 4, number % 4, text, final, ids=ids, turn_rewards=rewards)
        outputs.append(output)
    return outputs


def cut(output: AgentLoopOutput, k: int, rng: random.Random) -> list[AgentLoopOutput]:
    """The same tokens as up to k outputs: the prompt of each is all that stood before it."""
    n = len(output.response_ids)
    places = [0, *sorted(rng.sample(range(1, n), min(k, n) - 1)), n]
    ids = output.prompt_ids + output.response_ids
    pieces = []
    for segment, (start, end) in enumerate(zip(places, places[1:])):
        lists = {name: getattr(output, name)[start:end] for name in RESPONSE_LISTS}
        ((at, turn_reward),) = output.turn_rewards
        piece = replace(
            output,
            prompt_ids=ids[: len(output.prompt_ids) + start],
            turn_rewards=[(at - start, turn_reward)] if start <= at < end else [],
            extra=output.extra | {"segment": segment},
            **lists,
        )
        pieces.append(piece)
    return pieces


def gradient(outputs: list[AgentLoopOutput], columns: dict, args: Args) -> torch.Tensor:
    """The gradient of the loss by the sampled tokens' logprobs, as train.py computes it.

    columns: numbers of the sampled tokens, in order."""
    mask = data.collate(outputs)["response_mask"]
    for name, column in columns.items():
        column = torch.tensor(column)
        columns = columns | {name: torch.zeros(mask.shape).masked_scatter(mask.bool(), column)}
    batch, _ = batch_with_rewards(outputs, args, **columns)
    greedy = whole(9)
    for output in greedy:
        output.extra["greedy"] = True
    rollouts = Rollouts(outputs=[*outputs, *greedy])
    batch["advantages"] = train.estimate_advantages(batch, rollouts, args)

    logprobs = batch["logprobs"].double().requires_grad_()
    scores = {"logprobs": logprobs, "entropy": torch.zeros_like(logprobs)}
    loss, _ = train.policy_objective(scores, batch, args)
    total = losses.aggregate(
        loss,
        mask,
        args.loss_agg,
        max_len=args.max_response_tokens,
        unit_tokens=batch.count_unit_tokens(),
    )
    total.backward()
    return logprobs.grad[mask.bool()]


@pytest.mark.parametrize("algo", PRESETS)
def test_a_rollout_cut_into_outputs_has_the_gradient_of_the_uncut_one(algo):
    rng = random.Random(0)
    outputs = whole(0)
    n = sum(sum(output.response_mask) for output in outputs)
    columns = {}
    for name in ("logprobs", "logprobs_old", "logprobs_ref", "values"):
        columns[name] = [-rng.random() for _ in range(n)]
    if algo in ("gspo", "gmpo"):  # off policy their ratio is that of an output
        columns["logprobs_old"] = columns["logprobs"]
    args = Args(
        algo=algo, ref_model="x", max_response_tokens=14, overlong_buffer=0.5, turn_discount=0.9
    )
    if args.adv_estimator in ("gae", "reinforce_pp") and algo != "opd":
        args.gamma, args.lam = 0.97, 0.9
    expected = gradient(outputs, columns, args)
    assert expected.abs().sum() > 0
    for k in range(2, 9):
        pieces = [piece for output in outputs for piece in cut(output, rng.randint(1, k), rng)]
        close(gradient(pieces, columns, args), expected, atol=1e-6, rtol=1e-6)


def advantages_of(outputs: list[AgentLoopOutput], **flags) -> list[float]:
    """Each output's advantage."""
    args = Args(**flags)
    values = torch.zeros_like(data.collate(outputs)["response_mask"])
    batch, _ = batch_with_rewards(outputs, args, values=values)
    return train.estimate_advantages(batch, Rollouts(outputs=outputs), args)[:, 0].tolist()


def test_rollouts_count_alike_in_the_log_however_many_outputs_they_have():
    """One rollout of an output with 40 tokens, one of four outputs with 10 each."""
    outputs = []
    for sample, n_outputs in enumerate((1, 4)):
        for segment in range(n_outputs):
            mask = "1" * (40 // n_outputs)
            outputs.append(played(0, sample, mask, None, segment, num_turns=2 + segment))
        last = outputs[-1]
        last.num_turns, last.stop_reason = 9, "length"
        last.metrics = {"tool_calls": 4, "tool_s": 1.5 * sample, "who": "x"}
        style = 3 + 3 * sample
        last.reward = {"score": 1.0 - sample, "style": style, "note": "fine", "ok": np.True_}
        last.turn_rewards = [(0, 0.25)]
    described = describe(outputs, data.by_unit(outputs))
    assert described == {
        **{"reward/mean": 0.75, "reward/std": 0.5, "reward/min": 0.25, "reward/max": 1.25},
        **{"reward_part/style": 4.5, "reward_part/ok": 1},
        **{"rollout/segments": 2.5, "rollout/tool_calls": 4},
        **{"prompt_length/mean": 2, "response_length/mean": 40, "response_length/max": 40},
        **{"response_length/clipped_ratio": 1, "rollout/trajectories": 2},
        **{"stop_reason/length": 1, "num_turns/mean": 9, "num_turns/max": 9},
        **{"timing/tool_s_min": 0, "timing/tool_s_mean": 0.75, "timing/tool_s_max": 1.5},
        **{f"timing/generate_s_{name}": 0 for name in ("min", "mean", "max")},
    }


def test_siblings_of_a_tree_are_compared_with_each_other_alone():
    """Two rollouts of one prompt: a trunk, whose reward is its leaves' mean, and two leaves."""
    outputs = []
    for sample, leaves in enumerate([(1.0, 0.0), (1.0, 1.0)]):
        for n, reward in enumerate(leaves):
            unit = dict(unit=f"leaf {n}", group=f"{sample}/leaves")
            outputs.append(played(0, sample, "11", reward, n, **unit))
        outputs.append(played(0, sample, "11", sum(leaves) / 2, 2, unit="trunk"))
    assert advantages_of(outputs, adv_estimator="drgrpo") == [0.5, -0.5, -0.25, 0, 0, 0.25]
    metrics = describe_eval(outputs, data.by_unit(outputs), [{}])
    assert metrics["eval/reward"] == pytest.approx((1 + 0.5 + 2 + 1) / 6)
    assert metrics["eval/unit_reward/trunk"] == 0.75
    assert metrics["eval/pass@1"] == pytest.approx((0.5 + 1 + 0.5) / 3)
    assert metrics["eval/pass@2"] == 1


def graded(*outputs, **task):
    asyncio.run(set_rewards(SimpleNamespace(**task), list(outputs), {"answer": 3}))
    return [output.reward for output in outputs]


def test_the_tasks_reward_is_asked_once_for_each_unit_without_one():
    asked = []

    def reward(output, row):
        asked.append(output.extra["segment"])
        return len(asked) + row.pop("answer")  # each gets a row of its own

    units = [("a", None), ("b", 0.5), ("a", None), ("", None)]
    outputs = [played(0, 0, "11", reward, n, unit=unit) for n, (unit, reward) in enumerate(units)]
    assert graded(*outputs, reward=reward) == [4, 0.5, 4, 5] and asked == [2, 3]
    with pytest.raises(ValueError, match="output 0 of a rollout has another reward or group"):
        graded(played(0, 0, "11", 0.5), played(0, 0, "11", 1.0, 1))
    assert graded(played(0, 0, "11", 0.5), played(0, 0, "11", 0.5, 1)) == [0.5, 0.5]


def test_a_unit_without_a_sampled_token_counts_in_its_groups_mean():
    """Its reward is on place 0, where no token is: it is compared with, but learns nothing."""
    outputs = [played(0, sample, "11", reward) for sample, reward in enumerate((0.0, 1.0, 5.0))]
    outputs[2].response_mask = [0, 0]  # as if all its words were given
    batch = data.make_batch(outputs)
    rewards = data.place_rewards(batch, batch.units.outcomes)
    assert rewards.tolist() == [[0, 0, 0], [0, 0, 1], [5, 0, 0]]
    assert advantages_of(outputs, adv_estimator="drgrpo") == [0.0 - 2.0, 1.0 - 2.0, 0.0]


def test_mini_batches_are_of_whole_prompts():
    prompts = torch.tensor([3, 3, 5, 5, 5, 8, 9, 9])
    cuts = list(data.mini_batches(prompts, 2, [7, 8]))
    assert len(cuts) == 4 and cuts == list(data.mini_batches(prompts, 2, [7, 8]))
    for first, second in (cuts[:2], cuts[2:]):
        assert sorted(first + second) == list(range(8)) and first == sorted(first)
        assert len(prompts[first].unique()) == len(prompts[second].unique()) == 2
    assert list(data.mini_batches(prompts[:2], 2, [0, 1])) == [[0, 1]] * 2  # one prompt is left
