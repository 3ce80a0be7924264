"""Estimators and objectives that a task file registers: what they get, what they may give, and a run with them."""

import inspect
import json
import math
import re
import statistics
from collections import defaultdict
from types import SimpleNamespace

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


# ---------------------------------------------------------------- estimators


def test_an_estimator_gets_what_its_parameters_name():
    got = {}

    @estimator("spy")
    def spy(rewards, groups, lengths, mask, token_rewards, baselines, states, args, more=7):
        got.update(locals())
        return rewards

    greedy = [output(4, 0, "1", 9.0)]
    advantages, _ = estimated(greedy, adv_estimator="spy", turn_discount=0.5)
    units = data.by_unit(OUTPUTS)
    assert got["rewards"].tolist() == [1.5, -2.75, 2.0, 0.0] and got["groups"].tolist() == [0, 0, 4, 4]
    assert got["lengths"].tolist() == [4, 5, 1, 7] and got["more"] == 7
    assert got["baselines"].isnan().tolist() == [True, True, False, False] and got["baselines"][2] == 9
    close(got["mask"].sum(1), torch.tensor([4.0, 5, 1, 7]))
    close(got["token_rewards"].sum(1), units.rewards)
    assert len(got["states"]) == 6 and got["args"].turn_discount == 0.5  # of 2, 2, 1 and 1 turns
    close(advantages, units.rewards[units.index][:, None] * MASK)


def test_an_estimator_with_values_gives_returns_too():
    values = torch.full_like(MASK, 0.5)
    with_critic, batch = estimated(adv_estimator="gae", values=values, gamma=0.9, lam=0.8)

    @estimator("mine")
    def mine(token_rewards, values, mask):
        advantages, returns = losses.gae(token_rewards, values, mask, 0.9, 0.8)
        return 2 * advantages, returns

    advantages, mine_batch = estimated(adv_estimator="mine", values=values)
    close(advantages, 2 * with_critic)
    close(mine_batch["returns"], batch["returns"])


def test_one_number_for_each_token_stays_at_its_token():
    @estimator("mine")
    def mine(mask):
        return mask.cumsum(1) * mask

    advantages, _ = estimated(adv_estimator="mine")
    assert advantages[0, :5].tolist() == [1, 2, 0, 3, 4]
    assert advantages[1, :2].tolist() == [1, 2] and advantages[2, :3].tolist() == [3, 4, 5]  # one unit


@pytest.mark.parametrize("name", OUR_ESTIMATORS)
def test_ours_say_what_they_take(name):
    takes = set(losses.ESTIMATORS[name].takes)
    assert ("groups" in takes) is (name in ("grpo", "drgrpo", "rloo", "opo", "gigpo"))
    assert ("values" in takes) is (name == "gae") and ("baselines" in takes) is (name == "remax")


OURS = [(estimator, "rewards, outcomes, groups"), (objective, "logprobs, logprobs_old")]


@pytest.mark.parametrize(("register", "first"), OURS)
def test_a_parameter_that_nothing_fills_is_refused_where_it_is_defined(register, first):
    with pytest.raises(ValueError, match=f"unknown input of 'mine', 'reward': choose from {first}"):

        @register("mine")
        def mine(reward):
            return reward

    register("mine")(lambda mask, reward=1.0: mask)  # it has a default
    assert inspect.signature(estimator).parameters.keys() == {"name"}


# ---------------------------------------------------------------- flags


@pytest.mark.parametrize("flag", ["gamma", "turn_discount", "lam", "value_clip", "critic_lr"])
def test_a_tasks_own_estimator_may_use_the_flags_of_ours(flag):
    args = Args(adv_estimator="mine", **{flag: 0.25})
    check_args(args)  # the task is not loaded yet
    with pytest.raises(BadInput, match="--adv_estimator mine: choose from gae, reinforce_pp, grpo"):
        check_registered(args)
    estimator("mine")(lambda rewards: rewards)
    check_args(args)
    check_registered(args)
    with pytest.raises(BadInput, match=f"--{flag} has an effect only with --adv_estimator gae"):
        check_args(Args(**{flag: 0.25}))


def test_names_are_checked_once_the_task_is_loaded():
    args = Args(adv_estimator="mine", policy_loss="own", group_size=1, clip_high=0.3, clip_c=3.0)
    assert args.clip_low == 0.2
    check_args(args)
    estimator("mine")(lambda rewards: rewards)
    with pytest.raises(BadInput, match="--policy_loss own: choose from ppo, gspo, gmpo, cispo, sapo, reinforce, "
                                       "or your own, by @objective in the task file$"):
        check_registered(args)
    objective("own")(lambda ratio: ratio)
    check_registered(args)  # it compares nothing: a group of one is fine
    estimator("mine")(lambda rewards, groups: rewards)
    with pytest.raises(BadInput, match="--adv_estimator mine compares the trajectories of a prompt"):
        check_registered(args)


# ---------------------------------------------------------------- objectives


def test_an_objective_by_hand():
    @objective("mine")
    def mine(ratio, entropy, advantages, mask, args):
        return -advantages * ratio**2 - args.weight * entropy, {"advantage": advantages, "clipfrac": ratio > 1}

    nan = math.nan
    logprobs = torch.tensor([[-1.0, nan, -2.0]], dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor([[0.5, nan, 1.0]], dtype=torch.float64, requires_grad=True)
    old, advantages, mask = torch.tensor([[-2.0, nan, -2.0], [3.0, nan, -1.0], [1, 0, 1]], dtype=torch.float64)[:, None]
    args = SimpleNamespace(weight=0.1)
    loss, stats = policy_loss("mine", logprobs, old, advantages, mask, entropy=entropy, args=args)
    close(loss, torch.tensor([[-3 * math.e**2 - 0.05, 0, 1 - 0.1]], dtype=torch.float64))
    close(torch.autograd.grad(loss.sum(), logprobs)[0][0, ::2], torch.tensor([-6 * math.e**2, 2.0]).double())
    assert stats.keys() == {"ratio", "ppo_kl", "clipfrac", "clipfrac_lower", "advantage"}
    close(stats["advantage"], torch.tensor([[3.0, 0, -1]]).double())
    close(stats["clipfrac"], torch.tensor([[1.0, 0, 0]]).double())
    assert not any(stat.requires_grad for stat in stats.values())


@pytest.mark.parametrize("shape", [(), (3,), (1, 3), (2, 1), (3, 2)])
def test_a_loss_of_another_shape_is_refused(shape):
    objective("mine")(lambda: torch.zeros(shape))
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError) as error:
        policy_loss("mine", x, x, x, x)
    assert str(error.value) == (f"the objective 'mine' gives a loss of the shape {shape}: must be one for each token, "
                                "(B, T) = (2, 3)")  # fmt: skip


def test_the_example_of_the_docs():
    page = (REPO / "docs/algorithms.md").read_text()
    (code,) = re.findall(r"```python\n(from losses import estimator.*?)```", page, re.DOTALL)
    exec(code, {})
    advantages, _ = estimated(adv_estimator="median")
    assert advantages[[0, 1, 2, 3, 4], [0, 0, 0, 0, 1]].tolist() == [2.125, -2.125, -2.125, 1.0, -1.0]
    ratio = torch.tensor([[1.5, 1.5, 0.5]])
    ones = torch.ones_like(ratio)
    loss, stats = policy_loss("upper", ratio.log(), 0 * ones, torch.tensor([[1.0, -1, 1]]), ones, entropy=ones,
                              args=Args(clip_high=0.25))  # fmt: skip
    close(loss, torch.tensor([[-0.625, 0.625, -0.25]]))
    assert stats["clipfrac"].tolist() == [[1, 1, 0]]


# ---------------------------------------------------------------- runs

TASK = ["--task", "tests/registry_task.py", "--save_every", "0"]


def test_a_task_file_trains_by_its_own_estimator_and_objective(cache, tmp_path):
    flags = [*TINY, *TASK, "--num_steps", "2", "--policy_loss", "mine", "--clip_high", "0.3"]
    run(*flags, "--adv_estimator", "median", "--output_dir", tmp_path / "median", cache=cache)
    steps = [row for row in metrics_of(tmp_path / "median") if "actor/loss" in row]
    assert len(steps) == 2
    for step, metrics in enumerate(steps, 1):
        of_group = defaultdict(list)
        for line in (tmp_path / "median" / "rollouts" / f"step_{step:06d}.jsonl").open():
            o = json.loads(line)
            of_group[o["extra"]["prompt"]].append((o["reward"], sum(o["response_mask"])))
        total = tokens = 0
        for group in of_group.values():
            median = statistics.median(reward for reward, _ in group)
            total += sum((reward - median) * n for reward, n in group)
            tokens += sum(n for _, n in group)
        assert metrics["actor/advantage"] == pytest.approx(total / tokens, abs=1e-6) and metrics["actor/here"] == 1
        assert metrics["actor/pg_loss"] == pytest.approx(-total / tokens, abs=1e-6)  # one update: the ratio is 1
        assert metrics["actor/surprise"] == pytest.approx(metrics["actor/entropy"]) and metrics["actor/moved"] == 0
        assert metrics["actor/grad_norm"] > 0 and "critic/vf_loss" not in metrics

    # The same rollouts with a critic, by an estimator that takes its values.
    flags = [*REPLAY, *TASK, "--num_steps", "2", "--replay", tmp_path / "median", "--output_dir", tmp_path / "critic"]
    run(*flags, "--adv_estimator", "half_gae", "--gamma", "0.9", "--critic_lr", "1e-3", cache=cache)
    for metrics in metrics_of(tmp_path / "critic"):
        assert metrics["critic/vf_loss"] > 0 and metrics["actor/loss"] != 0


def test_an_unknown_name_is_refused_in_one_line_before_anything_is_made(cache, tmp_path):
    said = run(*REPLAY, *TASK, "--adv_estimator", "mean", "--output_dir", tmp_path / "run", cache=cache, code=2)
    assert said.splitlines()[-1] == ("train.py: error: --adv_estimator mean: choose from gae, reinforce_pp, grpo, "
                                     "drgrpo, gigpo, rloo, opo, remax, median, half_gae, or your own, by "
                                     "@estimator in the task file")  # fmt: skip
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- a fork's own


def test_our_tests_hold_in_a_fork_that_adds_to_the_registries(cache):
    """tests/fork.py adds one of each kind; the tests that go through a registry of ours don't mind."""
    chosen = "preset or flags_without_effect or unknown_names or say_what_they_take or dtypes or policy_loss or walk"
    files = [f"tests/test_{name}.py" for name in ("algos", "losses", "docs", "registry")]
    command = ["-q", "-p", "fork", "-p", "no:cacheprovider", "-k", chosen, *files]
    printed = run(*command, script="tests/run_pytest.py", cache=cache)
    assert int(printed.split(" passed")[0].split()[-1]) > 100, printed[-2000:]
