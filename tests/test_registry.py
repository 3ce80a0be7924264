"""Estimators and objectives that a task file registers: inputs, results, and a run with them."""

import math
import re

import pytest
import torch
from conftest import OUR_ESTIMATORS, REPLAY, REPO, TINY, metrics_of, run
from test_algos import MASK, OUTPUTS, estimated, output

import data
import losses
from agent_loop import BadInput
from losses import estimator, objective, policy_loss
from train import Args, check_args, check_registered

close = torch.testing.assert_close
pytestmark = pytest.mark.usefixtures("registries")


# ---- Estimators -------------------------------------------------------------------------------


def test_an_estimator_gets_what_its_parameters_name():
    got = {}

    @estimator("spy")
    def spy(rewards, groups, lengths, mask, token_rewards, baselines, states, args, more=7):
        got.update(locals())
        return rewards

    greedy = [output(4, 0, "1", 9.0)]
    advantages, _ = estimated(greedy, adv_estimator="spy", turn_discount=0.5)
    units = data.by_unit(OUTPUTS)
    close(advantages, units.rewards[units.index][:, None] * MASK)
    lists = {
        "rewards": [1.5, -2.75, 2.0, 0.0],
        "groups": [0, 0, 4, 4],
        "lengths": [4, 5, 1, 7],
    }
    for name, values in lists.items():
        assert got[name].tolist() == values
    close(got["baselines"], torch.tensor([math.nan, math.nan, 9, 9]), equal_nan=True)
    close(got["mask"].sum(1), torch.tensor([4.0, 5, 1, 7]))
    close(got["token_rewards"].sum(1), units.rewards)
    assert len(got["states"]) == 6  # 2, 2, 1 and 1 turns
    assert got["args"].turn_discount == 0.5
    assert got["more"] == 7


@pytest.mark.parametrize("name", OUR_ESTIMATORS)
def test_ours_say_what_they_take(name):
    takes = losses.ESTIMATORS[name].takes
    assert ("groups" in takes) is (name in ("grpo", "drgrpo", "rloo", "opo", "gigpo"))
    assert ("values" in takes) is (name == "gae")
    assert ("baselines" in takes) is (name == "remax")


@pytest.mark.parametrize(
    ("register", "first"),
    [(estimator, "rewards, outcomes, groups"), (objective, "logprobs, logprobs_old")],
)
def test_a_parameter_that_nothing_fills_is_refused(register, first):
    with pytest.raises(ValueError, match=f"unknown input, 'reward': choose from {first}"):
        register("mine")(lambda reward: reward)
    register("mine")(lambda mask, reward=1.0: mask)  # it has a default


# ---- Flags ------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["gamma", "turn_discount", "lam", "critic_lr"])
def test_a_tasks_own_estimator_may_use_the_flags_of_ours(flag):
    args = Args(adv_estimator="mine", **{flag: 0.25})
    check_args(args)  # the task is not loaded yet
    with pytest.raises(BadInput, match="--adv_estimator mine: choose from gae, reinforce_pp"):
        check_registered(args)
    estimator("mine")(lambda rewards: rewards)
    check_args(args)
    check_registered(args)
    with pytest.raises(BadInput, match=f"--{flag} has an effect only with --adv_estimator gae"):
        check_args(Args(**{flag: 0.25}))


def test_names_are_checked_once_the_task_is_loaded():
    args = Args(adv_estimator="mine", policy_loss="own", group_size=1, clip_c=3.0)
    assert args.clip_low == 0.2
    check_args(args)
    estimator("mine")(lambda rewards: rewards)
    with pytest.raises(BadInput, match="--policy_loss own: choose from ppo, gspo, gmpo, cispo"):
        check_registered(args)
    objective("own")(lambda ratio: ratio)
    check_registered(args)  # it compares nothing: a group of one is fine
    estimator("mine")(lambda rewards, groups: rewards)
    with pytest.raises(BadInput, match="--adv_estimator mine compares the trajectories"):
        check_registered(args)


# ---- Objectives -------------------------------------------------------------------------------


def test_an_objective_by_hand():
    """Its inputs are clean, and what it makes of mask 0 does not count."""
    entropies = []

    @objective("mine")
    def mine(ratio, entropy, advantages, mask, clip_high, clip_c, args):
        entropies.append(entropy.tolist())
        stats = {"bounds": torch.full_like(ratio, clip_high * clip_c), "clipfrac": ratio > 1}
        return -advantages * ratio**2 - args * entropy + torch.where(mask, 0, math.nan), stats

    nan = math.nan
    columns = [[-1, nan, -2], [-2, nan, -2], [3, nan, -1], [1, 0, 1], [0.5, nan, 1]]
    inputs = [torch.tensor([column]).double() for column in columns]
    logprobs, old, advantages, mask, entropy = inputs
    logprobs.requires_grad_()
    entropy.requires_grad_()
    bounds = 0.2, 0.5, 3.0
    loss, stats = policy_loss("mine", logprobs, old, advantages, mask, *bounds, entropy, 0.1)
    assert entropies == [[[0.5, 0, 1]]]
    close(loss, torch.tensor([[-3 * math.e**2 - 0.05, 0, 1 - 0.1]]).double())
    grads = torch.autograd.grad(loss.sum(), [logprobs, entropy])
    close(grads[0], torch.tensor([[-6 * math.e**2, 0, 2]]).double())
    close(grads[1], torch.tensor([[-0.1, 0, -0.1]]).double())
    assert [*stats] == ["ratio", "ppo_kl", "clipfrac", "clipfrac_lower", "bounds"]
    close(stats["bounds"], 1.5 * mask)
    close(stats["clipfrac"], torch.tensor([[1, 0, 0]]).double())
    assert not any(stat.requires_grad for stat in stats.values())


@pytest.mark.parametrize("shape", [(), (3,), (1, 3), (2, 1), (3, 2)])
def test_a_loss_of_another_shape_is_refused(shape):
    objective("mine")(lambda: torch.zeros(shape))
    with pytest.raises(ValueError) as error:
        policy_loss("mine", *torch.zeros(4, 2, 3))
    want = f"'mine' gives a loss of the shape {shape}: must be one for each token, (B, T) = (2, 3)"
    assert want in str(error.value)


def test_the_example_of_the_docs():
    page = (REPO / "docs/algorithms.md").read_text()
    (code,) = re.findall(r"```python\n(from losses import estimator.*?)```", page, re.DOTALL)
    exec(code, {})
    advantages, _ = estimated(adv_estimator="median")
    first = advantages[[0, 1, 2, 3, 4], [0, 0, 0, 0, 1]]
    assert first.tolist() == [2.125, -2.125, -2.125, 1.0, -1.0]
    ratio = torch.tensor([[1.5, 1.5, 0.5]])
    ones = torch.ones_like(ratio)
    columns = ratio.log(), 0 * ones, torch.tensor([[1.0, -1, 1]]), ones
    args = Args(clip_high=0.25)
    loss, stats = policy_loss("upper", *columns, clip_high=0.25, entropy=ones, args=args)
    close(loss, torch.tensor([[-0.625, 0.625, -0.25]]))
    assert stats["clipfrac"].tolist() == [[1, 1, 0]]


# ---- Runs -------------------------------------------------------------------------------------

TASK = ["--task", "tests/registry_task.py", "--num_steps", "2", "--save_every", "0"]


def test_a_task_file_trains_by_its_own_estimator_and_objective(cache, tmp_path):
    folder = tmp_path / "quarter"
    own = ["--adv_estimator", "quarter", "--policy_loss", "mine", "--clip_high", "0.3"]
    run(*TINY, *TASK, *own, "--output_dir", folder, cache=cache)
    steps = [row for row in metrics_of(folder) if "actor/loss" in row]
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["actor/advantage"] == pytest.approx(0.25)
        assert metrics["actor/pg_loss"] == pytest.approx(-0.25)  # the ratio is 1
        assert metrics["actor/surprise"] == pytest.approx(metrics["actor/entropy"])
        assert (metrics["actor/moved"], metrics["actor/here"]) == (0, 1)
        assert metrics["actor/grad_norm"] > 0
        assert "critic/vf_loss" not in metrics

    # The same rollouts with a critic, by an estimator that takes its values.
    own = ["--adv_estimator", "half_gae", "--gamma", "0.9", "--critic_lr", "1e-3"]
    flags = [*REPLAY, *TASK, "--replay", folder, "--output_dir", tmp_path / "critic"]
    run(*flags, *own, cache=cache)
    for metrics in metrics_of(tmp_path / "critic"):
        assert metrics["critic/vf_loss"] > 0
        assert metrics["actor/loss"] != 0


def test_an_unknown_name_is_refused_before_anything_is_made(cache, tmp_path):
    flags = [*REPLAY, *TASK, "--adv_estimator", "mean", "--output_dir", tmp_path / "run"]
    last = run(*flags, cache=cache, code=2).splitlines()[-1]
    assert last.startswith("train.py: error: --adv_estimator mean: choose from gae, reinforce_pp")
    assert "quarter, half_gae, or your own, by @estimator in the task file" in last
    assert not (tmp_path / "run").exists()


def test_our_tests_hold_in_a_fork_that_adds_to_the_registries(cache):
    """tests/fork.py adds one of each kind. Tests that go through our registries don't mind."""
    chosen = "flags_without_effect or unknown_names or say_what_they_take or dtypes or policy_loss"
    files = [f"tests/test_{name}.py" for name in ("algos", "losses", "docs", "registry")]
    command = ["-q", "-p", "fork", "-p", "no:cacheprovider", "-k", chosen, *files]
    printed = run(*command, script="tests/run_pytest.py", cache=cache)
    assert int(printed.split(" passed")[0].split()[-1]) > 50, printed[-2000:]
