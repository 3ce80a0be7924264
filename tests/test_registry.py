"""Estimators and objectives that a task file registers: inputs, results, and a run with them."""

import math
import re

import pytest
import torch
from conftest import REPO, TINY, metrics_of, run
from test_algos import MASK, estimated, output

from agent_loop import BadInput
from losses import estimator, objective, policy_loss
from train import Args, check_args, check_registered

NAN = math.nan
close = torch.testing.assert_close
pytestmark = pytest.mark.usefixtures("registries")


def test_an_estimator_gets_what_its_parameters_name():
    got = {}

    @estimator("spy")
    def spy(rewards, groups, lengths, mask, token_rewards, baselines, states, args, more=7):
        got.update(locals())
        return rewards

    greedy = output(4, 0, "1", 9.0)
    advantages, _ = estimated([greedy], adv_estimator="spy", turn_discount=0.5)
    rewards = torch.tensor([1.5, -2.75, 2.0, 0.0])  # of the units, turn rewards included
    close(advantages[:, 1], torch.tensor([1.5, -2.75, -2.75, 0.0, 0.0]))  # one output lacks it
    close(got["rewards"], rewards)
    close(got["token_rewards"].sum(1), rewards)
    close(got["baselines"], torch.tensor([NAN, NAN, 9, 9]), equal_nan=True)
    assert got["groups"].tolist() == [0, 0, 4, 4]
    assert got["lengths"].tolist() == got["mask"].sum(1).tolist() == [4, 5, 1, 7]
    assert len(got["states"]) == 6  # 2, 2, 1 and 1 turns
    assert got["args"].turn_discount == 0.5 and got["more"] == 7

    @estimator("parts and columns")
    def parts_and_columns(rewards, mask, parts, logprobs_old, logprobs_rollout):
        got.update(locals())
        return rewards

    old = torch.where(MASK.bool(), 2.0, NAN)
    estimated(adv_estimator="parts and columns", logprobs_old=old)
    assert list(got["parts"]) == ["acc"]  # without the score, which is the outcome
    close(got["parts"]["acc"], torch.tensor([NAN, NAN, 1, NAN]), equal_nan=True)
    close(got["logprobs_rollout"], -got["mask"])
    close(got["logprobs_old"], 2 * got["mask"])


@pytest.mark.parametrize("register", [estimator, objective])
def test_a_parameter_that_nothing_fills_is_refused(register):
    with pytest.raises(ValueError, match="unknown input, 'reward': choose from .*mask"):
        register("mine")(lambda reward: reward)
    register("mine")(lambda mask, reward=1.0: mask)  # it has a default


def test_names_are_checked_once_the_task_is_loaded():
    args = Args(adv_estimator="mine", policy_loss="own", group_size=1, gamma=0.25)
    check_args(args)  # before that, "mine" may use any flag
    with pytest.raises(BadInput, match="--adv_estimator mine: choose from gae, reinforce_pp"):
        check_registered(args)
    estimator("mine")(lambda rewards: rewards)
    with pytest.raises(BadInput, match="--policy_loss own: choose from ppo, gspo, gmpo, cispo"):
        check_registered(args)
    objective("own")(lambda ratio: ratio)
    check_registered(args)  # it compares nothing: a group of one is fine
    estimator("mine")(lambda rewards, groups: rewards)
    with pytest.raises(BadInput, match="--adv_estimator mine compares the rollouts"):
        check_registered(args)


@pytest.mark.parametrize("register", [estimator, objective])
def test_a_reference_is_asked_for_and_given_or_neither(register):
    args = Args(ref_model="x")
    check_args(args)
    with pytest.raises(BadInput, match="--ref_model has an effect only with a --kl_coef, or"):
        check_registered(args)
    register({estimator: "grpo", objective: "ppo"}[register])(lambda logprobs_ref: logprobs_ref)
    check_registered(args)
    check_registered(Args(kl_coef=0.1))
    said = "--adv_estimator grpo or --policy_loss ppo asks for logprobs_ref, and there is no refer"
    with pytest.raises(BadInput, match=said):
        check_registered(Args())


def test_an_objective_gets_clean_inputs_and_its_garbage_at_mask_0_does_not_count():
    got = {}

    @objective("mine")
    def mine(ratio, entropy, advantages, mask, clip_high, clip_c, args):
        got.update(locals())
        loss = -advantages * ratio**2 - args * entropy
        stats = {"bound": torch.full_like(ratio, clip_high * clip_c), "clipfrac": ratio > 1}
        return loss + torch.where(mask, 0, NAN), stats

    logprobs = torch.tensor([[-1, NAN, -2]]).requires_grad_()
    logprobs_old = torch.tensor([[-2, NAN, -2]])
    advantages = torch.tensor([[3, NAN, -1]])
    mask = torch.tensor([[1, 0, 1]])
    entropy = torch.tensor([[0.5, NAN, 1]]).requires_grad_()
    loss, stats = policy_loss(
        "mine", logprobs, logprobs_old, advantages, mask,
        clip_low=0.2, clip_high=0.5, clip_c=3.0, entropy=entropy, args=0.1,
    )  # fmt: skip
    assert got["entropy"].tolist() == [[0.5, 0, 1]]
    close(loss, torch.tensor([[-3 * math.e**2 - 0.05, 0, 1 - 0.1]]))
    grads = torch.autograd.grad(loss.sum(), [logprobs, entropy])
    close(grads[0], torch.tensor([[-6 * math.e**2, 0, 2]]))
    close(grads[1], torch.tensor([[-0.1, 0, -0.1]]))
    assert list(stats) == ["ratio", "ppo_kl", "clipfrac", "clipfrac_lower", "bound"]
    assert stats["bound"].tolist() == [[1.5, 0, 1.5]]
    assert stats["clipfrac"].tolist() == [[1, 0, 0]]
    assert not any(stat.requires_grad for stat in stats.values())


def test_a_loss_of_another_shape_is_refused():
    shape = (3, 2)
    objective("mine")(lambda: torch.zeros(shape))
    said = f"of the shape {shape}: must be one for each token, (B, T) = (2, 3)"
    with pytest.raises(ValueError, match=re.escape(said)):
        policy_loss("mine", *torch.zeros(4, 2, 3))


def test_the_example_of_the_docs():
    page = (REPO / "docs/algorithms.md").read_text()
    (code,) = re.findall(r"```python\n(from losses import estimator.*?)```", page, re.DOTALL)
    exec(code, {})
    advantages, _ = estimated(adv_estimator="median")
    assert advantages[:, 1].tolist() == [2.125, -2.125, -2.125, 0, -1.0]
    ratio = torch.tensor([[1.5, 1.5, 0.5]])
    ones = torch.ones_like(ratio)
    columns = ratio.log(), 0 * ones, torch.tensor([[1.0, -1, 1]]), ones
    args = Args(clip_high=0.25)
    loss, stats = policy_loss("upper", *columns, clip_high=0.25, entropy=ones, args=args)
    close(loss, torch.tensor([[-0.625, 0.625, -0.25]]))
    assert stats["clipfrac"].tolist() == [[1, 1, 0]]


def test_a_task_file_trains_by_its_own_estimator_and_objective(cache, tmp_path, tiny_model):
    """With all that has to be computed or loaded for them, a critic too."""
    folder = tmp_path / "run"
    flags = [*TINY, "--task", "tests/registry_task.py", "--num_steps", "2", "--save_every", "0"]
    flags += ["--model", tiny_model, "--ref_model", tiny_model, "--output_dir", folder]
    own = ["--adv_estimator", "everything", "--policy_loss", "everything"]
    own += ["--gamma", "0.9", "--critic_lr", "1e-3"]
    run(*flags, *own, cache=cache)
    _, first, second = metrics_of(folder)
    assert (first["actor/version"], second["actor/version"]) == (0, 1)
    assert first["actor/distance"] == 0 < second["actor/distance"]
    assert 0 < first["actor/mismatch"] < 1e-3
    assert first["actor/surprise"] == pytest.approx(first["actor/entropy"])
    assert first["actor/grad_norm"] > 0
    assert "actor/kl" not in first and first["critic/vf_loss"] > 0
