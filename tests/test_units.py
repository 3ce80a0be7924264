"""A unit, what shares one reward, weighs one: however many outputs it is cut into, and whoever it is compared with."""

import asyncio
import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch
from conftest import OUR_PRESETS
from torch.testing import assert_close as close

import data
import losses
import train
from agent_loop import AgentLoopOutput
from flatrl.metrics import MAX_LOGGED_UNITS, describe, describe_eval
from rollout import Phase, score
from train import Args

MASKS = ["1110011", "1111", "11010111011", "1", "0111", "110111100111", "1111111111", "101"]


def whole(seed: int) -> list[AgentLoopOutput]:
    """Rollouts of two prompts, each one output, with random rewards, turn rewards and logprobs."""
    rng = random.Random(seed)
    outputs = []
    for number, text in enumerate(rng.sample(MASKS, len(MASKS))):
        mask = [int(x) for x in text]
        sampled = [i for i, x in enumerate(mask) if x]
        outputs.append(AgentLoopOutput(
            prompt_ids=[rng.randrange(5, 99) for _ in range(3)],
            response_ids=[rng.randrange(5, 99) for _ in mask], response_mask=mask,
            response_logprobs=[-rng.random() * x for x in mask], response_versions=[x - 1 for x in mask],
            reward=rng.choice([0.0, 1.0, 0.5]), turn_rewards=[(rng.choice(sampled), rng.random())],
            extra={"prompt": number // 4, "sample": number % 4, "segment": 0}))  # fmt: skip
    return outputs


def test_scatter_by_hand():
    """As wide as the last place needs, and a column wide where nothing was sampled."""
    places = torch.tensor([1, 0, 1]), torch.tensor([2, 0, 1])
    assert data.scatter(torch.tensor([5.0, 6.0, 7.0]), places, 2).tolist() == [[6, 0, 0], [0, 7, 5]]
    nothing = torch.zeros(0)
    assert data.scatter(nothing, (nothing.long(), nothing.long()), 2).tolist() == [[0], [0]]


def cut(output: AgentLoopOutput, k: int, rng: random.Random) -> list[AgentLoopOutput]:
    """The same tokens as up to k outputs: the prompt of each is all that stood before it."""
    n = len(output.response_ids)
    places = [0, *sorted(rng.sample(range(1, n), min(k, n) - 1)), n]
    ids = output.prompt_ids + output.response_ids
    pieces = []
    for segment, (start, end) in enumerate(zip(places, places[1:])):
        pieces.append(AgentLoopOutput(
            prompt_ids=ids[: len(output.prompt_ids) + start], reward=output.reward,
            **{name: getattr(output, name)[start:end] for name in
               ("response_ids", "response_mask", "response_logprobs", "response_versions")},
            turn_rewards=[(i - start, r) for i, r in output.turn_rewards if start <= i < end],
            extra={**output.extra, "segment": segment}))  # fmt: skip
    return pieces


def sampled_column(outputs: list[AgentLoopOutput], column: list[float]) -> torch.Tensor:
    """Numbers of the sampled tokens, in order, as (B, T)."""
    mask = data.collate(outputs)["response_mask"].bool()
    return torch.zeros(mask.shape).masked_scatter(mask, torch.tensor(column))


def gradient(outputs: list[AgentLoopOutput], columns: dict[str, list[float]], args: Args) -> torch.Tensor:
    """The gradient of the loss by the sampled tokens' logprobs, in their order, as train.py computes it."""
    batch = data.collate(outputs) | {"units": data.by_unit(outputs)}
    for name, column in columns.items():
        batch[name] = sampled_column(outputs, column)
    train.shape_rewards(batch, outputs, args.kl_coef, args)
    greedy = [dataclasses.replace(output, extra={**output.extra, "greedy": True}) for output in whole(9)]
    phase = Phase(outputs=[*outputs, *greedy])
    batch["advantages"] = train.estimate_advantages(batch, phase, args)
    unit_tokens = data.unit_tokens(batch["response_mask"], batch["units"].index)
    logprobs = batch["logprobs"].double().requires_grad_()
    loss, _ = train.policy_objective([logprobs, torch.zeros_like(logprobs)], batch, args)
    losses.aggregate(loss, batch["response_mask"], args.loss_agg, max_len=args.max_response_tokens,
                     unit_tokens=unit_tokens).backward()  # fmt: skip
    return logprobs.grad[batch["response_mask"].bool()]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("algo", OUR_PRESETS)
def test_a_rollout_cut_into_outputs_has_the_gradient_of_the_uncut_one(algo, seed):
    """gspo and gmpo: on policy. Beside it their ratio is that of an output, as their docstring says."""
    rng = random.Random(seed)
    outputs = whole(seed)
    n = sum(sum(output.response_mask) for output in outputs)
    columns = {name: [-rng.random() for _ in range(n)]
               for name in ("logprobs", "logprobs_old", "logprobs_ref", "values")}  # fmt: skip
    if algo in ("gspo", "gmpo"):
        columns["logprobs_old"] = columns["logprobs"]
    args = Args(algo=algo, ref_model="x", max_response_tokens=14, overlong_buffer=0.5, turn_discount=0.9)
    if args.adv_estimator in ("gae", "reinforce_pp") and algo != "opd":
        args.gamma, args.lam = 0.97, 0.9
    expected = gradient(outputs, columns, args)
    assert expected.abs().sum() > 0
    for k in range(1, 9):
        pieces = [piece for output in outputs for piece in cut(output, rng.randint(1, k), rng)]
        close(gradient(pieces, columns, args), expected, atol=1e-6, rtol=1e-6)


def played(prompt: int, sample: int, segment: int, reward=None, unit: str = "", group: str = "", n: int = 2, **more):
    """An output of n sampled tokens."""
    return AgentLoopOutput(
        prompt_ids=[1, prompt + 1], response_ids=[5] * n, response_mask=[1] * n, response_logprobs=[-1.0] * n,
        response_versions=[0] * n, reward=reward, unit=unit, group=group,
        extra={"prompt": prompt, "sample": sample, "segment": segment}, **more)  # fmt: skip


def advantages_of(outputs: list[AgentLoopOutput], **flags) -> list[float]:
    """Each output's advantage."""
    args = Args(**flags)
    batch = data.collate(outputs) | {"units": data.by_unit(outputs)}
    batch["values"] = torch.zeros_like(batch["response_mask"])
    train.shape_rewards(batch, outputs, 0.0, args)
    return train.estimate_advantages(batch, Phase(outputs=outputs), args)[:, 0].tolist()


# Two games of one prompt, whose moves alternate: x wins the first, o the second.
GAMES = [played(0, sample, segment, reward, unit) for sample, x, o in ((0, 1.0, -1.0), (1, -1.0, 1.0))
         for segment, (reward, unit) in enumerate([(None, "x"), (None, "o"), (x, "x"), (o, "o")])]  # fmt: skip


@pytest.mark.parametrize(("estimator", "expected"), [
    ("grpo", 2**-0.5), ("drgrpo", 1.0), ("rloo", 2.0), ("opo", 1.0), ("gigpo", 2 * 2**-0.5), ("reinforce_pp", 1.0),
    ("gae", 1.0),
])  # fmt: skip
def test_both_sides_of_a_game_get_their_own_sign(estimator, expected):
    advantages = advantages_of(GAMES, adv_estimator=estimator, gamma=1.0, lam=1.0, turn_discount=1.0)
    close(torch.tensor(advantages), expected * torch.tensor([1.0, -1, 1, -1, -1, 1, -1, 1]), atol=1e-5, rtol=0)


def test_units_of_games():
    units = data.by_unit(GAMES)
    assert units.rewards.tolist() == [1, -1, -1, 1] and units.index.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert units.groups[0] == units.groups[2] != units.groups[1] == units.groups[3]
    assert units.prompts.tolist() == [0] * 4 and units.lengths.tolist() == [4] * 4
    assert data.groups_with_signal(GAMES, "outcome") == set(units.groups.tolist())
    assert data.groups_with_signal(GAMES[:4], "total") == set()
    described = describe(GAMES, data.by_unit(GAMES))
    assert described["rollout/trajectories"] == 2 and described["rollout/segments"] == 4
    assert described["reward/mean"] == 0 and described["reward/x"] == 0 and described["reward/max"] == 1


def test_siblings_of_a_tree_are_compared_with_each_other_alone():
    """Two rollouts of one prompt: a trunk, whose reward is its leaves' mean, and two leaves."""
    outputs = []
    for sample, leaves in enumerate([(1.0, 0.0), (1.0, 1.0)]):
        outputs += [played(0, sample, n, reward, f"leaf {n}", f"{sample}/leaves") for n, reward in enumerate(leaves)]
        outputs.append(played(0, sample, 2, sum(leaves) / 2, "trunk"))
    assert advantages_of(outputs, adv_estimator="drgrpo") == [0.5, -0.5, -0.25, 0, 0, 0.25]
    metrics = describe_eval(outputs, data.by_unit(outputs), [{}])
    assert metrics["eval/reward"] == pytest.approx((1 + 0.5 + 2 + 1) / 6)
    assert metrics["eval/trunk/reward"] == 0.75
    assert metrics["eval/pass@1"] == pytest.approx((0.5 + 1 + 0.5) / 3)  # of the trunks one passes
    assert metrics["eval/pass@2"] == 1


def test_many_names_of_units_are_no_metrics():
    outputs = [played(0, 0, n, 1.0, f"node {n}") for n in range(MAX_LOGGED_UNITS + 1)]
    assert not [name for name in describe(outputs, data.by_unit(outputs)) if "node" in name]
    assert describe(outputs[1:], data.by_unit(outputs[1:]))["reward/node 3"] == 1


def graded(outputs, **task):
    row = {"answer": 3}
    asyncio.run(score(SimpleNamespace(**task), outputs, row))
    return [output.reward for output in outputs]


def test_the_tasks_reward_is_asked_once_for_each_unit_without_one():
    asked = []

    def reward(output, row):
        asked.append(output.extra["segment"])
        return len(asked) + row["answer"]

    outputs = [played(0, 0, 0, unit="a"), played(0, 0, 1, 0.5, unit="b"), played(0, 0, 2, unit="a"), played(0, 0, 3)]
    assert graded(outputs, reward=reward) == [4, 0.5, 4, 5] and asked == [2, 3]


def test_a_reward_that_would_be_ignored_is_refused():
    with pytest.raises(ValueError, match="output 0 of a rollout has the reward 0.5, but its unit '' gets that of its"):
        graded([played(0, 0, 0, 0.5), played(0, 0, 1, 1.0)])
    with pytest.raises(ValueError, match="output 1 of a rollout has the reward 0.5, but its unit 'a'"):
        graded([played(0, 0, 0, 1.0), played(0, 0, 1, 0.5, "a"), played(0, 0, 2, None, "a")], reward=lambda *_: 0.5)
    assert graded([played(0, 0, 0, 0.5), played(0, 0, 1, 0.5)]) == [0.5, 0.5]  # said twice
    with pytest.raises(ValueError, match="the outputs of unit 'a' are in the groups '' and 'b': a unit has one"):
        graded([played(0, 0, 0, 1.0, "a"), played(0, 0, 1, 1.0, "a", "b")])


@pytest.mark.parametrize("bad", [{"unit": 3}, {"group": None}, {"unit": ("x",)}])
def test_names_are_texts(bad):
    with pytest.raises(ValueError, match="must be texts"):
        played(0, 0, 0, **bad)


def test_mini_batches_are_of_whole_prompts():
    prompts = torch.tensor([3, 3, 5, 5, 5, 8, 9, 9])
    args = Args(prompts_per_step=4, prompts_per_mini_batch=2, epochs=2)
    cuts = list(train.mini_batches(prompts, 7, args))
    assert len(cuts) == 4 and cuts == list(train.mini_batches(prompts, 7, args))
    for first, second in (cuts[:2], cuts[2:]):
        assert sorted(first + second) == list(range(8)) and first == sorted(first)
        assert len(prompts[first].unique()) == 2 and not set(prompts[first].tolist()) & set(prompts[second].tolist())
    orders = {str(cut) for step in range(20) for cut in train.mini_batches(prompts, step, args)}
    assert len(orders) == 6  # all pairs of four prompts
    assert [len(rows) for rows in train.mini_batches(prompts[:2], 0, args)] == [2, 2]  # one prompt is left


@pytest.mark.parametrize("mode", losses.AGGREGATIONS)
def test_aggregate_by_units_by_hand(mode):
    x = torch.tensor([[1.0, 2, 9], [3, 9, 9], [4, 5, 6]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    unit_tokens = torch.tensor([3, 3, 3])  # rows 0 and 1 are a unit of three tokens
    expected = {
        "token-mean": 21 / 6, "token-sum": 21.0, "seq-mean-token-sum": 21 / 2,
        "seq-mean-token-mean": (6 / 3 + 15 / 3) / 2, "seq-mean-token-sum-norm": 21 / (2 * 10),
    }[mode]  # fmt: skip
    total = losses.aggregate(x, mask, mode, max_len=10, unit_tokens=unit_tokens)
    assert total.dtype == torch.float64 and total.item() == pytest.approx(expected, abs=1e-12)
    parts = [losses.aggregate(x[rows], mask[rows], mode, 6, 2, 10, unit_tokens[rows]) for rows in ([0], [1, 2])]
    assert sum(parts).item() == pytest.approx(expected, abs=1e-12)
    half = losses.aggregate(x.float(), mask, mode, max_len=10, unit_tokens=unit_tokens)
    assert half.dtype == torch.float32 and half.item() == pytest.approx(expected, rel=1e-6)
