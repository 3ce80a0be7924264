"""examples/methods.py: each method by hand, and all together in a run that fails and is resumed."""

import json
import math

import pytest
import torch
from conftest import TINY, metrics_of, output_of, rollouts_of
from safetensors.torch import load_file

from agent_loop import BadInput
from examples import methods
from train import Args

close = torch.testing.assert_close

# tiny_task with a method for each door; two of four prompts of a step have a demonstration. The
# second step's loss is once not a number.
EVERY_DOOR = """
import json
import torch
from tiny_task import *
from tiny_task import load as without
import data
from examples import methods
from examples.methods import muon as optimizer, ruler as group_reward
from losses import objective
from pathlib import Path

once = Path(__file__).with_name("once")

async def judge(question):
    answers = question.splitlines()[2:]
    return json.dumps([sum(map(str.isdigit, answer)) / len(answer) for answer in answers])

methods.ask = judge

def load(split):
    rows = without(split)
    for number in data.prompt_order(24, 0, 8, 0)[::2] if split == "train" else ():
        rows[number]["demonstration"] = ["12", "<answer>3</answer>"]
    return rows

@objective("every")
def every(logprobs, logprobs_old, ratio, advantages, batch_stats, step, state):
    state["calls"] = state.get("calls", 0) + 1  # a step that failed must leave none
    loss = methods.kl_cov(logprobs, logprobs_old, ratio, advantages, batch_stats)
    if step == 1 and once.exists():
        once.unlink()
        loss = loss * float("nan")
    calls = torch.full_like(loss, state["calls"])
    return loss, {"chosen": batch_stats["chosen"], "calls": calls}
"""


def test_every_door_in_one_run_that_fails_and_is_resumed(train_here, tmp_path):
    """A gradient that is not finite costs no step, and no digit once the run is resumed."""
    task, failed, out = (tmp_path / name for name in ("doors.py", "failed", "run"))
    task.write_text(EVERY_DOOR)
    (tmp_path / "once").touch()
    flags = [
        *[*TINY, "--task", task, "--adv_estimator", "kl_cov", "--policy_loss", "every"],
        *["--num_steps", "2", "--epochs", "2", "--whiten_advantages", "--save_every", "0"],
        *["--eval_every", "-1", "--kl_coef", "0.1", "--ref_update", "0.5", "--deterministic"],
    ]
    with pytest.raises(BadInput, match="gradient norm is nan"):
        train_here(*flags, "--output_dir", failed)
    assert [row["step"] for row in metrics_of(failed)] == [1]
    train_here(*flags, "--output_dir", failed, "--resume")
    train_here(*flags, "--output_dir", out)
    rows = metrics_of(out)
    assert metrics_of(failed) == rows
    weights, others = (load_file(of / "final/model.safetensors") for of in (out, failed))
    assert all(torch.equal(weights[name], others[name]) for name in weights)

    assert [row["rollout/demonstrations"] for row in rows] == [2, 2]
    assert all(0 < row["actor/chosen"] < 0.1 and row["actor/kl"] > 0 for row in rows[1:])
    for line in rollouts_of(out, 2):  # the judge saw the whole group
        messages = json.dumps(line["messages"])
        assert line["reward"] == pytest.approx(sum(map(str.isdigit, messages)) / len(messages))


def test_m2po_drops_the_largest_that_move_away():
    """They are 0.5, 0.1 and -0.2. The square of 0.5 lifts their mean above the limit of 0.04."""
    distances = torch.tensor([[0.5, 0.1, -9.0, 0.0], [-0.2, 9.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 0]])
    groups = torch.zeros(2)
    rewards = torch.tensor([1.0, 0.0])
    advantages = methods.m2po(rewards, groups, mask, distances, torch.zeros(2, 4))
    a = math.sqrt(0.5)
    close(advantages, torch.tensor([[0, a, a, 0], [-a, -a, 0, 0]]), atol=1e-5, rtol=0)


def test_kl_cov_chooses_over_the_batch_and_holds_there():
    """A and log pi covary most at the second token of the first unit."""
    mask = torch.tensor([[0.0, 1, 1], [0, 1, 1]])
    logprobs = torch.tensor([[9.0, -3, -1], [9, -2, -2]])
    found = methods.find_kl_cov(torch.tensor([1.0, 0]), torch.zeros(2), mask, logprobs)
    chosen = found[1]["chosen"]
    assert chosen.tolist() == [[0, 0, 1], [0, 0, 0]]
    new = (logprobs - 0.5).requires_grad_()
    ratio = (new - logprobs).exp()
    loss = methods.kl_cov(new, logprobs, ratio, mask, {"chosen": chosen})
    close(loss, chosen * 0.5 - mask * math.exp(-0.5))
    (slope,) = torch.autograd.grad(loss.sum(), new)
    close(slope, -chosen - mask * math.exp(-0.5))


def test_chord_moves_from_imitation_to_reward():
    logprobs = torch.tensor([[0.5, 0.25]]).log().requires_grad_()
    demonstrated = torch.tensor([[True, False]])
    ones = torch.ones(1, 2)
    for step, mu in ((0, 0.9), (5, 0.45)):
        loss, _ = methods.chord(logprobs, ones, ones, demonstrated, 0.2, 0.2, None, step, 10)
        close(loss, torch.tensor([[mu * 0.25 * math.log(2), mu - 1]]))
        close(torch.autograd.grad(loss.sum(), logprobs)[0], torch.tensor([[-mu * 0.25, 0]]))


def test_a_process_reward_counts_from_its_turn_on():
    """The prompt has a turn, and a demonstration has none of its own."""
    said = [{"role": "assistant", "content": text} for text in ("<answer>", "hm", "<answer>1")]
    called = said[1] | {"tool_calls": [{}]}
    outputs = [
        output_of([1, 0, 1], messages=[*said]),
        output_of([1, 1], messages=[said[0], called]),
        output_of([1], messages=said[2:], version=-1),
    ]
    mask = torch.tensor([[0.0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
    outcomes = torch.tensor([[0.0, 0, 0, 1], [0, 0, 2, 0], [0, 0, 0, 0]])
    advantages = methods.prm(outputs, outcomes, mask, Args())
    assert advantages.tolist() == [[0, 1.5, 0, 1.5], [0, 2.5, 2.5, 0], [0, 0, 0, 0]]


def test_a_guess_is_as_good_as_what_it_adds_to_the_value():
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [0, 1, 1, 0, 1, 1], [0, 1, 0, 1, 1, 1]])
    rewards = torch.zeros(3, 6)
    rewards[0, 5] = 1.0
    states = torch.tensor([0, 1, 0, 2, 0, 1])  # won from: 0 one in three, 1 one in two, 2 none
    up, down, won, lost = 1 / 2 - 1 / 3, -1 / 3, 1 / 2, -1 / 2
    expected = [
        [0, up, up, 0, won, won],
        [0, down, down, 0, 0, 0],
        [0, up, 0, lost, lost, lost],
    ]
    close(methods.by_state(rewards, mask, states), torch.tensor(expected))
