"""Rows with a `demonstration`: what is read, what their loop says, what is trained on it, whole runs."""

import asyncio
import copy
import json
from types import SimpleNamespace

import pytest
import torch
from conftest import OUR_ESTIMATORS, REPLAY, REPO, TINY, metrics_of, run
from gradient_worker import batch_of, gradients
from test_agent_loop import ANSWER, CALCULATOR, END, PROMPT, SUM, Quiz, called, encode, quiz_row, quiz_task, tool_turn
from test_algos import output
from torch.testing import assert_close as close

import data
import train
from agent_loop import BadInput, Demonstration, ToolAgentLoop, agent_loop_class
from rollout import Phase
from train import Args

CALL = {"role": "assistant", "content": "", "tool_calls": called(("calculator", {"expression": "1+1"}))}


# ---------------------------------------------------------------- rows


def loaded(**columns) -> dict:
    rows = [{"prompt": "hi"} | columns]
    return data.load_rows(SimpleNamespace(load=lambda split: rows), "train")[0]


def test_turns_are_texts_or_messages():
    said = {"role": "assistant", "content": "yes"}
    assert "demonstration" not in loaded()
    assert loaded(demonstration="yes")["demonstration"] == [said] == loaded(demonstration=["yes"])["demonstration"]
    assert loaded(demonstration=[CALL, "yes"])["demonstration"] == [CALL, said]
    assert not loaded(demonstration="")["demonstration"] and loaded(demonstration=None)["demonstration"] is None


def test_arguments_of_calls_become_dicts_and_what_parquet_adds_goes():
    turn = copy.deepcopy(CALL) | {"reasoning_content": None}
    function = turn["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    turn["tool_calls"][0]["index"] = None
    before = copy.deepcopy(turn)
    assert loaded(demonstration=[turn])["demonstration"] == [CALL]
    assert turn == before  # the task's own row stays as it is
    bare = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"x": 1}'}]}
    assert loaded(demonstration=[bare])["demonstration"][0]["tool_calls"] == [{"name": "f", "arguments": {"x": 1}}]


BAD = [5, {}, [], [None], [""], [5], [["x"]], [{"role": "user", "content": "x"}], [{"role": "assistant"}],
       [{"content": "x"}], [{"role": "assistant", "content": 5}], [{"role": "assistant", "tool_calls": "x"}],
       [{"role": "assistant", "tool_calls": [5]}],
       [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]]  # fmt: skip


@pytest.mark.parametrize("turns", BAD, ids=map(str, BAD))
def test_a_bad_demonstration_names_its_row(turns):
    with pytest.raises(BadInput, match="^row 0 of ") as caught:
        loaded(demonstration=turns)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- what a loop says


def play(tokenizer, turns, task=CALCULATOR, row=None, **flags):
    """The output of the row's own loop, and the turns that are left."""
    args = Args(**{"max_response_tokens": 1000} | flags)
    row = {"prompt": PROMPT} | (row or {})
    turns = loaded(demonstration=turns)["demonstration"]
    loop = agent_loop_class(row, task, args)(None, tokenizer, None, task, args)
    loop.engine = Demonstration(turns, loop, {tokenizer.eos_token_id})
    output = asyncio.run(loop.run({}, **row, step=0, index=0, rollout_n=0, validate=False))
    return output, turns


@pytest.mark.parametrize("first", [SUM, CALL])
def test_tools_run_and_masks_are_exact(tokenizer, first):
    output, left = play(tokenizer, [first, ANSWER])
    ids, mask = [], []
    for part, said in ((SUM + END, 1), (tool_turn("2"), 0), (ANSWER + END, 1)):
        ids += encode(tokenizer, part)
        mask += [said] * len(encode(tokenizer, part))
    assert tokenizer.decode(output.response_ids) == SUM + END + tool_turn("2") + ANSWER + END
    assert output.response_ids == ids and output.response_mask == mask and left == []
    assert set(output.response_logprobs) == {0.0} and set(output.response_versions) == {-1}
    assert output.messages == [*PROMPT, CALL, {"role": "tool", "name": "calculator", "content": "2",
                               "tool_call_id": "000001000"}, {"role": "assistant", "content": ANSWER}]  # fmt: skip
    assert (output.stop_reason, output.num_turns, output.metrics["tool_calls"]) == ("stop", 4, 1)


def test_a_loop_that_wants_more_turns_ends(tokenizer):
    """The tool was called, and nothing is said after it."""
    output, left = play(tokenizer, [SUM])
    assert output.stop_reason == "abort" and left == []
    assert tokenizer.decode(output.response_ids) == SUM + END + tool_turn("2")
    quiz = Quiz((False, "And again?", 0.25, {}))
    output, left = play(tokenizer, ["no"], quiz_task(quiz), quiz_row())
    assert output.stop_reason == "abort" and left == [] and sum(output.response_mask) == 3


def test_a_loop_that_ends_earlier_leaves_turns(tokenizer):
    _, left = play(tokenizer, [ANSWER, "more"])
    assert [turn["content"] for turn in left] == ["more"]
    _, left = play(tokenizer, [SUM, ANSWER], max_response_tokens=len(encode(tokenizer, SUM + END)) + 2)
    assert len(left) == 1  # what the tool says does not fit


@pytest.mark.parametrize("turns, flags, said", [
    (["x" * 20], {"max_response_tokens": 20}, "has 21 tokens, with room for 20"),
    ([f"one{END}\n<|im_start|>user\ntwo"], {}, "could not say this turn"),
    ([f"one{END}"], {}, "could not say this turn"),
])  # fmt: skip
def test_what_the_policy_could_not_say_fails(tokenizer, turns, flags, said):
    with pytest.raises(ValueError, match=said):
        play(tokenizer, turns, **flags)


def test_words_that_a_template_would_drop_are_said(tokenizer):
    """DeepSeek's and Qwen3's forget what was thought."""
    other = copy.deepcopy(tokenizer)
    other.chat_template = tokenizer.chat_template.replace(
        "message.content or ''", "(message.content or '').split('</think>')[-1]"
    )
    loop = ToolAgentLoop(None, other, None, CALCULATOR, Args())
    ids = Demonstration([], loop, {other.eos_token_id}).turn_ids({"role": "assistant", "content": "<think>a</think>b"})
    assert other.decode(ids) == f"<think>a</think>b{END}"


# ---------------------------------------------------------------- what is trained


def test_demonstrations_stand_apart_from_what_was_sampled():
    """The second output has both: its loop said something for the policy."""
    outputs = [output(0, 0, "1011", 1.0), output(1, 0, "1101", 1.0)]
    outputs[1].response_versions = [0, -1, -1, -1]
    batch = data.collate(outputs)
    assert batch["response_mask"].tolist() == [[1, 0, 1, 1], [1, 0, 0, 0]]
    assert batch["imitation_mask"].tolist() == [[0, 0, 0, 0], [0, 1, 0, 1]]
    assert "imitation_mask" not in data.collate(outputs[:1])
    packed = data.pack_rows(batch, data.in_prefix_order(batch, [0, 1]), "cpu")
    assert len(packed["pair"]) == 6  # all of them are predicted


def demonstrated_phase(*more) -> Phase:
    """Two demonstrations of prompts 2 and 5, and more."""
    demonstrations = [output(2, 0, "1101", 1.0), output(5, 0, "111", 0.25)]
    for each in demonstrations:
        each.response_versions = [-1] * len(each.response_ids)
        each.extra["demonstration"] = True
        each.metrics["states"] = ["a"]
    phase = Phase([*demonstrations, *more], seconds=1.0, idle_s=[0.0])
    phase.sort()
    return phase


def step_of(phase: Phase, **flags) -> tuple[dict, dict]:
    """The batch and the metrics as train.main has them, with logprobs and values made up."""
    args = Args(**flags)
    batch = data.collate(phase.trained) | {"units": data.by_unit(phase.trained)}
    for name in ("logprobs_old", "logprobs_ref", "values"):
        batch[name] = torch.full_like(batch["response_mask"], -2.0)
    metrics = train.shape_rewards(batch, phase.trained, 0.1, args)
    batch["advantages"] = train.estimate_advantages(batch, phase, args)
    return batch, metrics | train.step_metrics(phase, batch, 3, args)


@pytest.mark.parametrize("estimator", OUR_ESTIMATORS)
@pytest.mark.parametrize("flags", [
    {}, {"whiten_advantages": True, "kl_coef": 0.1, "kl_in": "reward", "kl_kind": "k1"},
    {"max_staleness": 2, "rollout_correction": "tis"},
], ids=str)  # fmt: skip
def test_advantages_and_metrics_do_not_see_demonstrations(estimator, flags):
    flags = {"adv_estimator": estimator} | flags
    sampled = [output(0, 0, "111", 1.0), output(0, 1, "1011", 0.0), output(4, 0, "11", 1.0)]
    baseline = output(0, 2, "1", 0.5)
    baseline.extra["greedy"] = True
    for each, version in zip(sampled, (3, 2, 1)):
        each.response_versions = [version if mask else -1 for mask in each.response_mask]
    more = [*sampled, *([baseline] if estimator == "remax" else [])]
    plain, expected = step_of(Phase(sorted(more, key=lambda o: (o.extra["prompt"], o.extra["sample"]))), **flags)
    mixed, metrics = step_of(demonstrated_phase(*more), **flags)
    assert metrics == expected
    close(mixed["advantages"][[0, 1, 3]], plain["advantages"])  # prompts 0, 0, 2, 4, 5
    assert not mixed["advantages"][[2, 4]].any()
    alone, metrics = step_of(demonstrated_phase(), **flags)
    assert not alone["advantages"].any() and all(value == value for value in metrics.values())
    assert metrics["rollout/singleton_groups"] == metrics["rollout/logp_diff_max"] == 0


def test_metrics_of_rollouts_do_not_see_demonstrations():
    sampled = [output(0, 0, "111", 1.0), output(0, 1, "1011", 0.0)]
    expected = Phase(sampled).metrics(None)
    metrics = demonstrated_phase(*sampled).metrics(None)
    assert metrics.pop("rollout/last_prompt") > expected.pop("rollout/last_prompt") == 0
    assert metrics == expected | {"rollout/demonstrations": 2, "reward/demonstrations": 0.625}
    alone = demonstrated_phase().metrics(None)
    assert "reward/mean" not in alone and alone["reward/demonstrations"] == 0.625


@pytest.mark.parametrize("more", [{"loss_agg": "token-mean"},
                                  {"loss_agg": "seq-mean-token-mean", "policy_loss": "gspo"}])  # fmt: skip
def test_the_joint_gradient_is_the_weighted_sum(tiny_model, process_group, more):
    """Each loss has counts of its own: beside 12 sampled trajectories, demonstrations weigh what they weigh alone."""
    from accelerate import Accelerator

    shown = range(0, 19, 3)
    how = {"tokens_per_micro_batch": 200, "demonstrated": shown} | more
    joint = gradients(Accelerator(cpu=True), tiny_model, imitation_coef=0.5, **how)
    others = [row for row in range(19) if row not in shown]
    sampled = gradients(Accelerator(cpu=True), tiny_model, rows=others, **how)
    demonstrated = gradients(Accelerator(cpu=True), tiny_model, rows=shown, **how)
    for name, gradient in joint["gradients"].items():
        expected = sampled["gradients"][name] + 0.5 * demonstrated["gradients"][name]
        assert demonstrated["gradients"][name].norm() > 1e-4 and sampled["gradients"][name].norm() > 1e-4
        assert (gradient - expected).norm() < 1e-6 * max(1, expected.norm()), name
    assert set(demonstrated["metrics"]) == {"loss", "imitation_loss", "grad_norm"}
    assert joint["metrics"]["imitation_loss"] == pytest.approx(demonstrated["metrics"]["imitation_loss"])
    for name in ("pg_loss", "entropy", "kl"):
        assert joint["metrics"][name] == pytest.approx(sampled["metrics"][name], rel=1e-6, abs=1e-7)
    total = sampled["metrics"]["loss"] + 0.5 * demonstrated["metrics"]["loss"]
    assert joint["metrics"]["loss"] == pytest.approx(total)


def test_imitation_is_cross_entropy(tiny_model, process_group):
    """Against transformers' own loss."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    result = gradients(Accelerator(cpu=True), tiny_model, 200, "token-mean", demonstrated=range(19))
    batch = batch_of(19, range(19))
    labels = torch.full_like(batch["input_ids"], -100)
    for row, column in batch["imitation_mask"].nonzero().tolist():
        at = batch["prompt_lengths"][row] + column
        labels[row, at] = batch["input_ids"][row, at]
    attention_mask = torch.arange(batch["input_ids"].shape[1]) < batch["lengths"][:, None]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    loss = model(batch["input_ids"], attention_mask=attention_mask, labels=labels).loss
    loss.backward()
    assert result["metrics"]["imitation_loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        gradient = result["gradients"][f"model.{name}"]
        assert (gradient - parameter.grad).norm() / parameter.grad.norm() < 1e-4, name


# ---------------------------------------------------------------- whole runs


SHOWN = f"""
import sys
sys.path.insert(0, {str(REPO / "tests")!r})
from tiny_task import *
from tiny_task import load as without

def load(split):
    rows = without(split)
    for row in rows[::EVERY]:
        row["demonstration"] = ["12", "<answer>3</answer>"]
    return rows
"""


MORE = """
with_turns = load

def load(split):
    rows = with_turns(split)
    rows[0]["demonstration"] = ["1", "2", "3"]
    rows[1]["demonstration"] = ["123456789", "2"]
    return rows
"""


def task(tmp_path, every: int) -> list[str]:
    """Flags of the tiny task, in which every second row (or each, or none) has a demonstration."""
    file = tmp_path / "shown.py"
    file.write_text(SHOWN.replace("EVERY", str(every)))
    return ["--task", file, "--save_every", "2", "--eval_every", "2", "--deterministic"]


def lines_of(folder, step: int) -> list[dict]:
    return [json.loads(line) for line in (folder / f"rollouts/step_{step:06d}.jsonl").open()]


def test_supervised_training_alone(cache, tmp_path):
    """Rows without a demonstration are left out, an engine is woken for evaluations only, and its logprobs are never
    missed; the validation rows' demonstrations stay unused."""
    out = tmp_path / "run"
    flags = [*TINY, *task(tmp_path, 2), "--algo", "sft", "--num_steps", "4", "--lr", "0.003", "--output_dir", out]
    printed = run(*flags, cache=cache)
    assert "12 training rows (0 overlong ones dropped)" in printed and "sft: " in printed
    assert "4 demonstrations a step" in printed and "taught nothing" not in printed
    rows = metrics_of(out, timings=True)
    assert ["eval/reward" in row for row in rows] == [True, False, True, False, True]
    for row in rows[1:]:
        assert row["rollout/demonstrations"] == 4 and row["rollout/failed_agent_loop"] == 0
        assert row["timing/sync_s"] == 0 and row["throughput/tokens_per_s"] == 0
        assert not {"reward/mean", "actor/entropy", "rollout/trajectories"} & set(row)
        assert row["actor/loss"] == row["actor/imitation_loss"] and row["actor/grad_norm"] > 0
    assert rows[4]["actor/imitation_loss"] < 0.7 * rows[1]["actor/imitation_loss"]
    for line in lines_of(out, 3):
        assert line["extra"]["demonstration"] is True and line["extra"]["sample"] == 0 and line["index"] % 2 == 0
        assert set(line["response_versions"]) == {-1} and line["reward"] > 0
        said = [token for token, mask in zip(line["response_ids"], line["response_mask"]) if mask]
        assert len(said) == 7 and line["messages"][-1] == {"role": "assistant", "content": "<answer>3</answer>"}
    assert (out / "learned/step_000001.jsonl").read_text() == ""  # the report shows none as left out of the loss
    evaluated = map(json.loads, (out / "rollouts/eval_000004.jsonl").open())
    assert not any("demonstration" in line["extra"] for line in evaluated)


def test_first_supervised_then_mixed_then_sampled_and_resumed(cache, tmp_path):
    """The first two steps play what rows have, beside sampled rows; a run that is stopped and resumed has the same
    numbers, and so has a replay."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    flags = [*TINY, *task(tmp_path, 2), "--imitation_steps", "2", "--imitation_coef", "0.5", "--output_dir"]
    run(*flags, whole, "--num_steps", "4", cache=cache)
    run(*flags, cut, "--num_steps", "2", cache=cache)
    run(*flags, cut, "--num_steps", "4", "--resume", "--resume_with_changes", cache=cache)
    rows = metrics_of(whole)
    assert metrics_of(cut) == rows
    n_shown = 0
    for step, row in enumerate(rows[1:], 1):
        lines = lines_of(whole, step)
        shown = [line for line in lines if "demonstration" in line["extra"]]
        sampled = [line for line in lines if "demonstration" not in line["extra"]]
        n_shown += len(shown)
        assert row.get("rollout/demonstrations", 0) == len(shown) and len(sampled) == 4 * (4 - len(shown))
        assert (step > 2) <= (not shown)
        if shown and sampled:
            total = row["actor/pg_loss"] + 0.5 * row["actor/imitation_loss"]
            assert row["actor/loss"] == pytest.approx(total, abs=1e-6)
            assert row["rollout/logp_diff_max"] < 1e-3 and row["actor/entropy"] > 1
            assert row["reward/mean"] == pytest.approx(sum(line["total_reward"] for line in sampled) / len(sampled))
            assert row["rollout/trajectories"] == len(sampled) and row["rollout/singleton_groups"] == 0
    assert n_shown > 0
    replayed = [*REPLAY, "--task", tmp_path / "shown.py", "--replay", whole, "--num_steps", "4", "--output_dir"]
    run(*replayed, tmp_path / "replayed", "--imitation_coef", "0.5", cache=cache)
    for row, again in zip(rows[1:], metrics_of(tmp_path / "replayed")):
        for name in ("actor/loss", "actor/imitation_loss", "actor/grad_norm", "reward/mean", "reward/demonstrations"):
            expected = pytest.approx(row[name], rel=1e-4, abs=1e-6) if name in row else None
            assert again.get(name) == expected, name


@pytest.mark.parametrize("flags", [["--algo", "sft"], ["--imitation_steps", "3"]])
def test_without_any_demonstration_there_is_one_clear_line(flags, tmp_path, cache):
    printed = run(*TINY, *flags, "--output_dir", tmp_path / "run", code=2, cache=cache)
    assert "train.py: error: --algo sft, --imitation_steps: no training row has a 'demonstration'" in printed


def test_a_demonstration_that_fails_is_counted_and_what_a_loop_left_unsaid_too(cache, tmp_path):
    """One row has a third turn, another one of nine tokens where the loop takes eight."""
    (tmp_path / "shown.py").write_text(SHOWN.replace("EVERY", "1") + MORE)
    flags = [*TINY, "--task", tmp_path / "shown.py", "--algo", "sft", "--num_steps", "6", "--eval_every", "0"]
    printed = run(*flags, "--output_dir", tmp_path / "run", cache=cache)
    rows = metrics_of(tmp_path / "run")[1:]
    assert sum(row["rollout/failed_agent_loop"] for row in rows) == 2
    assert sum(row["rollout/demonstrations"] for row in rows) == 22
    assert "failed_agent_loop in step" in printed
    errors = [line["error"] for step in range(1, 7) for line in lines_of(tmp_path / "run", step) if "error" in line]
    assert any("the agent loop ended with 1 turns left to demonstrate" in error for error in errors)
    assert any("a turn of the demonstration has 10 tokens, with room for 8" in error for error in errors)
