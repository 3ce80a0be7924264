"""Rows with a `demonstration`: how they are read, played by their loop, and learned; runs."""

import asyncio
import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    OUR_ESTIMATORS,
    REPLAY,
    REPO,
    TINY,
    batch_with_rewards,
    metrics_of,
    rollouts_of,
    rows_of,
    run,
)
from test_agent_loop import (
    ANSWER,
    CALCULATOR,
    END,
    PROMPT,
    SUM,
    called,
    encode,
    tool_turn,
    with_template,
)
from test_algos import output
from test_templates import CHAT, PROMPTS
from torch.testing import assert_close as close

import data
import train
from agent_loop import BadInput, agent_loop_class
from examples import calculator, rollouts_to_rows
from flatrl.files import to_json_lines
from flatrl.metrics import batch_metrics
from rollout import Demonstration, Pool, Rollouts
from train import Args

CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": called(("calculator", {"expression": "1+1"})),
}


# ---------------------------------------------------------------- rows


def loaded(**columns) -> dict:
    rows = [{"prompt": "hi"} | columns]
    return data.load_rows(SimpleNamespace(load=lambda split: rows), "train")[0]


def test_turns_are_texts_or_messages():
    yes = {"role": "assistant", "content": "yes"}
    assert "demonstration" not in loaded() and loaded(demonstration=None)["demonstration"] is None
    assert not loaded(demonstration="")["demonstration"]
    for turns in ("yes", ["yes"], [yes]):
        assert loaded(demonstration=turns)["demonstration"] == [yes]
    assert loaded(demonstration=[CALL, "yes"])["demonstration"] == [CALL, yes]


# ---------------------------------------------------------------- how a loop plays them


def play(tokenizer, turns, task=CALCULATOR, row=None, **flags):
    """The output of the row's own loop, and the turns that are left."""
    args = Args(**{"max_response_tokens": 1000} | flags)
    row = {"prompt": PROMPT} | (row or {})
    turns = loaded(demonstration=turns)["demonstration"]
    loop = agent_loop_class(row, task, args)(None, tokenizer, None, task, args)
    loop.engine = Demonstration(turns, loop, {tokenizer.eos_token_id})
    row |= {"step": 0, "index": 0, "rollout_n": 0, "validate": False}
    return asyncio.run(loop.run({}, **row)), turns


@pytest.mark.parametrize("first", [SUM, CALL], ids=["text", "message"])
def test_tools_run_and_masks_are_exact(tokenizer, first):
    output, left = play(tokenizer, [first, ANSWER])
    ids, mask = [], []
    for part, bit in ((SUM + END, 1), (tool_turn("2"), 0), (ANSWER + END, 1)):
        ids += encode(tokenizer, part)
        mask += [bit] * len(encode(tokenizer, part))
    assert output.response_ids == ids and output.response_mask == mask and left == []
    assert set(output.response_logprobs) == {0.0} and set(output.response_versions) == {-1}
    tool = {"role": "tool", "name": "calculator", "content": "2", "tool_call_id": "000001000"}
    answer = {"role": "assistant", "content": ANSWER}
    assert output.messages == [*PROMPT, CALL, tool, answer]
    assert (output.stop_reason, output.num_turns) == ("stop", 4)


def test_calls_have_the_ids_of_their_results(tokenizer):
    """Mistral's template writes both."""
    said = f"({SUM!r} + m.tool_calls[0].id if m.tool_calls else (m.tool_call_id or '') + m.content)"
    other = with_template(tokenizer, CHAT.replace("SAID", said) + PROMPTS)
    by_user = CALL | {"tool_calls": [CALL["tool_calls"][0] | {"id": "call_1"}]}
    output, _ = play(other, [by_user, by_user, ANSWER])
    text = other.decode(output.response_ids)
    assert text.count("000001000") == text.count("000002000") == 2


def test_a_template_that_does_not_write_the_calls_is_refused_at_the_start(tokenizer):
    other = with_template(tokenizer, CHAT.replace("SAID", "m.content") + PROMPTS)
    rows = [loaded(index=4), loaded(index=5, demonstration=["I calculate.", CALL])]
    with pytest.raises(BadInput, match="^row 5: the chat template does not write .*calculator"):
        data.filter_overlong(rows, other, CALCULATOR, Args(max_prompt_tokens=1000))
    for unused in dict(imitation_steps=0), dict(num_steps=0):
        args = Args(max_prompt_tokens=1000, **unused)
        assert data.filter_overlong(rows, other, CALCULATOR, args) == rows


def test_good_rollouts_become_rows_that_play_them(tokenizer, tiny_model, tmp_path, capsys):
    """examples/rollouts_to_rows.py: the tokens of a rollout are those of its demonstration."""
    (tmp_path / "rollouts").mkdir()
    args = Args(model=tiny_model, task=str(REPO / "examples/calculator.py"))
    (tmp_path / "args.json").write_text(json.dumps({"args": dataclasses.asdict(args)}))
    row = data.load_rows(calculator, "train")[3]

    def line(prompt, sample, reward, *turns, **extra) -> dict:
        output, _ = play(tokenizer, list(turns), row=row)
        where = {"prompt": prompt, "sample": sample} | extra
        return vars(output) | {"index": 3, "total_reward": reward, "extra": where}

    good = line(0, 0, 1.0, SUM, ANSWER)
    cut = line(0, 1, 1.0, "cut")
    cut["response_ids"][-1:] = cut["response_mask"][-1:] = []
    lines = [
        cut,
        line(2, 0, 1.0, "of another row") | {"index": 4},
        line(2, 1, 1.0, "of no row") | {"index": 10**6},
        line(0, 2, 0.5, "bad"),
        line(0, 3, 1.0, "greedy", greedy=True),
        line(0, 4, 1.0, "shown", demonstration=True),
        line(1, 0, 1.0, "of several"),
        line(1, 0, 1.0, "outputs"),
        {"prompt": 1, "sample": 1, "error": "it failed"},
        good,
        good | {"extra": {"prompt": 7, "sample": 0}},
    ]
    (tmp_path / "rollouts/step_000001.jsonl").write_text(to_json_lines(lines))
    rollouts_to_rows.main([str(tmp_path), str(tmp_path / "rows.jsonl"), "--per_row", "3"])
    assert capsys.readouterr().out.startswith("left out: 2 good rollouts that lack the prompt")
    (written,) = data.load_rows(SimpleNamespace(), "train", [str(tmp_path / "rows.jsonl")])
    assert [turn["content"] for turn in written["demonstration"]] == [SUM, ANSWER]
    assert written["prompt"] == row["prompt"]
    assert written["reward_model"] == row["reward_model"]
    again, left = play(tokenizer, written["demonstration"], row=row)
    assert (again.response_ids, left) == (good["response_ids"], [])
    with pytest.raises(BadInput, match="no rollout with a reward of at least 2.0"):
        rollouts_to_rows.main([str(tmp_path), str(tmp_path / "x"), "--min_reward", "2"])


def test_a_loop_that_wants_more_turns_ends_and_one_that_ends_leaves_turns(tokenizer):
    output, left = play(tokenizer, [SUM])
    assert output.stop_reason == "abort" and left == []
    assert tokenizer.decode(output.response_ids) == SUM + END + tool_turn("2")
    _, left = play(tokenizer, [ANSWER, "more"])
    assert [turn["content"] for turn in left] == ["more"]


@pytest.mark.parametrize("turns, flags, said", [
    (["x" * 20], {"max_response_tokens": 20}, "has 21 tokens, with room for 20"),
    ([f"one{END}\n<|im_start|>user\ntwo"], {}, "could not say this turn"),
])  # fmt: skip
def test_what_the_policy_could_not_sample_fails(tokenizer, turns, flags, said):
    with pytest.raises(ValueError, match=said):
        play(tokenizer, turns, **flags)


def test_a_demonstration_in_two_outputs_is_one():
    outputs = [output(0, 0, "11", 1.0, segment=n) for n in (0, 1)]
    outputs[0].turn_rewards = [(0, 1.0)]
    for each in outputs:
        each.extra["demonstration"] = True
    metrics = Rollouts(outputs=outputs).metrics(None)
    assert metrics["rollout/demonstrations"] == 1 and metrics["reward/demonstrations"] == 2.0


def rollouts_with(*sampled, demonstrated: bool) -> Rollouts:
    """The rollouts with these outputs and, if demonstrated, of two demonstrations."""
    outputs = list(sampled)
    if demonstrated:
        outputs += [output(2, 0, "1101", 1.0), output(5, 0, "111", 0.25)]
        for each in outputs[len(sampled) :]:
            each.response_versions = [-1] * len(each.response_ids)
            each.extra["demonstration"] = True
            each.metrics["states"] = ["a"]
    rollouts = Rollouts(outputs, seconds=1.0, idle_s=[0.0])
    rollouts.sort()
    return rollouts


def step_of(rollouts: Rollouts, **flags) -> tuple[dict, dict]:
    """The batch and the metrics as train.main has them, with logprobs and values made up."""
    args = Args(**flags)
    made_up = torch.full_like(data.collate(rollouts.trained)["response_mask"], -2.0)
    names = ("logprobs_old", "logprobs_ref", "values")
    batch, metrics = batch_with_rewards(rollouts.trained, args, **dict.fromkeys(names, made_up))
    batch["advantages"] = train.estimate_advantages(batch, rollouts, args)
    return batch, metrics | rollouts.group_metrics() | batch_metrics(batch, 3, args)


@pytest.mark.parametrize("estimator", OUR_ESTIMATORS)
@pytest.mark.parametrize("flags", [
    {"whiten_advantages": True, "kl_coef": 0.1, "kl_in": "reward", "kl_kind": "k1"},
    {"max_staleness": 2, "rollout_correction": "tis"},
], ids=["kl", "stale"])  # fmt: skip
def test_advantages_and_metrics_do_not_see_demonstrations(estimator, flags):
    flags = {"adv_estimator": estimator} | flags
    outputs = [output(0, 0, "111", 1.0), output(0, 1, "1011", 0.0), output(4, 0, "11", 1.0)]
    for each, version in zip(outputs, (3, 2, 1)):
        each.response_versions = [version if mask else -1 for mask in each.response_mask]
    if estimator == "remax":
        outputs.append(output(0, 2, "1", 0.5))
        outputs[-1].extra["greedy"] = True
    plain, expected = step_of(rollouts_with(*outputs, demonstrated=False), **flags)
    mixed, metrics = step_of(rollouts_with(*outputs, demonstrated=True), **flags)
    assert metrics == expected
    close(mixed["advantages"][[0, 1, 3]], plain["advantages"])  # prompts 0, 0, 2, 4, 5
    assert not mixed["advantages"][[2, 4]].any()

    alone, metrics = step_of(rollouts_with(demonstrated=True), **flags)
    assert not alone["advantages"].any() and all(x == x for x in metrics.values())
    assert metrics["rollout/singleton_groups"] == metrics["rollout/logp_diff_max"] == 0


# ---------------------------------------------------------------- whole runs

# tiny_task, in which every second row has a demonstration; a broken one has a turn too many.
SHOWN = f"""
import sys
sys.path.insert(0, {str(REPO / "tests")!r})
from tiny_task import *
from tiny_task import load as without

def load(split):
    rows = without(split)
    for row in rows[::2]:
        row["demonstration"] = ["12", "<answer>3</answer>"]
    return rows
"""
BROKEN = """
with_turns = load

def load(split):
    rows = with_turns(split)
    rows[0]["demonstration"] = ["1", "2", "3"]
    return rows
"""


def task_file(tmp_path, text: str) -> list[str]:
    file = tmp_path / "shown.py"
    file.write_text(text)
    return ["--task", file, "--save_every", "2", "--eval_every", "2", "--deterministic"]


def test_supervised_training_alone(cache, tmp_path):
    """Rows without a demonstration are left out; the engine wakes for evaluations only."""
    out = tmp_path / "run"
    flags = [*TINY, *task_file(tmp_path, SHOWN + BROKEN), "--algo", "sft", "--lr", "0.003"]
    printed = run(*flags, "--num_steps", "4", "--output_dir", out, cache=cache)
    assert "12 training rows (0 overlong ones dropped)" in printed
    assert "failed_agent_loop in step" in printed
    rows = metrics_of(out, timings=True)
    assert ["eval/reward" in row for row in rows] == [True, False, True, False, True]
    for row in rows[1:]:
        assert row["rollout/demonstrations"] + row["rollout/failed_agent_loop"] == 4
        assert row["timing/sync_s"] == 0 and row["throughput/tokens_per_s"] == 0
        assert not {"reward/mean", "actor/entropy", "rollout/trajectories"} & set(row)
        assert row["actor/loss"] == row["actor/imitation_loss"] and row["actor/grad_norm"] > 0
    assert rows[4]["actor/imitation_loss"] < 0.7 * rows[1]["actor/imitation_loss"]

    lines = [line for step in range(1, 5) for line in rollouts_of(out, step)]
    errors = str([line.pop("error") for line in lines if "error" in line])
    assert "ended with 1 turns left to demonstrate" in errors
    for line in (line for line in lines if "response_ids" in line):
        assert line["extra"]["demonstration"] is True and line["index"] % 2 == 0
        assert set(line["response_versions"]) == {-1} and sum(line["response_mask"]) == 7
    evaluated = rows_of(out / "rollouts/eval_000004.jsonl")
    assert not any("demonstration" in line["extra"] for line in evaluated)


def test_first_demonstrated_then_sampled_and_replayed(cache, tmp_path):
    """The first two steps play what rows have, among sampled rows."""
    whole, replayed = tmp_path / "whole", tmp_path / "replayed"
    flags = [*TINY, *task_file(tmp_path, SHOWN), "--imitation_steps", "2", "--num_steps", "3"]
    printed = run(*flags, "--output_dir", whole, cache=cache)
    assert "the first 2 step(s) imitate the demonstrations of the rows that have one" in printed
    rows = metrics_of(whole)
    n_shown = 0
    for step, row in enumerate(rows[1:], 1):
        lines = rollouts_of(whole, step)
        sampled = [line for line in lines if "demonstration" not in line["extra"]]
        n = len(lines) - len(sampled)
        n_shown += n
        assert row.get("rollout/demonstrations", 0) == n and len(sampled) == 4 * (4 - n)
        assert step <= 2 or n == 0
        if n and sampled:
            total = row["actor/pg_loss"] + row["actor/imitation_loss"]
            assert row["actor/loss"] == pytest.approx(total, abs=1e-6)
            assert row["rollout/logp_diff_max"] < 1e-3 and row["actor/entropy"] > 1
            assert row["rollout/trajectories"] == len(sampled)
    assert n_shown > 0

    replay = [*REPLAY, "--task", tmp_path / "shown.py", "--replay", whole, "--num_steps", "2"]
    run(*replay, "--output_dir", replayed, cache=cache)
    for row, again in zip(rows[1:], metrics_of(replayed)):
        for name in ("actor/loss", "actor/imitation_loss"):
            assert again.get(name) == pytest.approx(row.get(name), rel=1e-4, abs=1e-6), name


def test_a_pool_with_staleness_never_waits_without_an_engine():
    """A rollout of a later batch may ask for tokens."""
    pool = SimpleNamespace(first=0, batch=2, demonstration=lambda prompt: ["shown"])
    for pool.staleness in (0, 1):
        assert Pool.needs_engine.fget(pool) == bool(pool.staleness)
