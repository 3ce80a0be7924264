"""Whole runs with real vLLM, one rank and two: numbers that repeat, kills that lose nothing, input that is wrong."""

import asyncio
import dataclasses
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from conftest import (
    HANGS,
    KEPT,
    REPLAY,
    REPO,
    TINY,
    generate,
    lines,
    metrics_of,
    run,
    started,
    two_ranks,
    wait_for,
)
from gradient_worker import gradients
from transformers import AutoModelForCausalLM

import agent_loop
import data
import train
from agent_loop import AgentLoopOutput, BadInput
from train import Args, check_args, parse_args

LOGGED = """reward/mean actor/pg_loss actor/clipfrac actor/ppo_kl actor/entropy actor/kl actor/grad_norm critic/vf_loss
    critic/explained_var prompt_length/mean response_length/mean response_length/clipped_ratio num_turns/mean
    timing/rollout_s timing/train_s timing/sync_s timing/generate_s_min timing/generate_s_mean timing/generate_s_max
    timing/tool_s_min timing/tool_s_mean timing/tool_s_max throughput/tokens_per_s"""


# ---------------------------------------------------------------- whole runs


@pytest.mark.parametrize("by, more, env", [
    ("accelerate", ["--prompts_per_mini_batch", "2", "--kl_coef", "0.01", "--critic_warmup", "1"], {}),
    # one update a rollout; ranks differ in micro-batches: fillers; what the checkpoint keeps beside the models; as on
    # GPUs: a model stored in bfloat16, computed in it, and sharded
    ("torchrun", ["--tokens_per_micro_batch", "64", "--kl_coef", "0.05", "--kl_in", "reward", "--kl_kind", "k1",
                  "--kl_target", "0.001", "--kl_horizon", "100", "--max_gen_batches", "3", "--overlong_buffer", "0.5",
                  "--dtype", "bfloat16", "--shard", "--lr", "3e-4", "--critic_lr", "1e-3", "--model"],
     {"TINY_TASK_REWARD": "any"}),
])  # fmt: skip
def test_deterministic_run_killed_and_resumed_gives_the_same_numbers(by, more, env, cache, tmp_path, tiny_model):
    """accelerate launches one whole run, the zygote the others: also, that those are no different."""
    flags = [*TINY, "--deterministic", "--algo", "ppo", "--lr_schedule", "linear",
             "--warmup_steps", "2", "--gradient_checkpointing", *more]  # fmt: skip
    bounds = 1e-3, 1e-5  # how far the logprobs of engine and trainer are apart, at most and in the mean
    if "--model" in more:
        bounds = 0.2, 0.03
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
        model.save_pretrained(shutil.copytree(tiny_model, tmp_path / "model"))
        flags.append(tmp_path / "model")
    forked = {"accelerate": started, "torchrun": two_ranks}[by]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    printed = run(*flags, "--output_dir", whole, by=by.replace("torchrun", "ranks"), cache=cache, **env)
    blocks = {"TINY_TASK_BLOCKS": tmp_path / "blocks", "TINY_TASK_BLOCKS_FROM": 3}
    moving = [*flags, "--offload", "all"]  # where Adam's states, critic and reference are changes nothing
    with forked(*moving, "--output_dir", killed, cache=cache, **env, **blocks) as processes:
        wait_for(lambda: lines(killed / "metrics.jsonl") == 4)  # steps 0 to 3: one behind the checkpoint of step 2
        for process in processes if by == "torchrun" else [processes]:
            process.kill()
            process.wait()
    assert [p.name for p in (killed / "checkpoints").glob("step*")] == ["step_000002"]
    assert metrics_of(killed) == metrics_of(whole)[:4]  # the same command twice, to the last digit
    ranks = {"accelerate": "fork", "torchrun": "ranks"}[by]
    again = run(*flags, "--output_dir", killed, "--resume", by=ranks, cache=cache, **env)
    assert "resuming after step 2" in again
    assert metrics_of(killed) == metrics_of(whole)
    assert [row["step"] for row in metrics_of(whole)] == [0, 1, 2, 3, 4, 5, 6]

    # the same run, looked at as a user would
    rows = metrics_of(whole, timings=True)
    assert "eval/reward" in rows[0] and "rollout/logp_diff_max" not in rows[0]
    assert [i for i, row in enumerate(rows) if "eval/reward" in row] == [0, 3, 6]
    warming = "--critic_warmup" in more
    assert ("actor/pg_loss" in rows[1]) is not warming
    for row in rows[1 + warming :]:
        for name in LOGGED.split():
            assert math.isfinite(row[name]), name
        assert row["rollout/logp_diff_max"] < bounds[0] and row["rollout/logp_diff_mean"] < bounds[1]
        assert row["rollout/trajectories"] == 16 + 4 * row["rollout/filtered_groups"] and row["num_turns/mean"] == 4
        assert row["timing/generate_s_max"] > 0
    if env:
        assert sum(row["rollout/filtered_groups"] for row in rows[1:]) > 0
        coefs = [row["actor/kl_coef"] for row in rows[1:]]
        assert coefs[0] == 0.05 and len(set(coefs)) > 3
        for row, after in zip(rows[1:], coefs[1:]):  # 16 rollouts a step, --kl_horizon 100
            change = min(max(row["actor/kl"] / 0.001 - 1, -0.2), 0.2) * 16 / 100
            assert after == pytest.approx(row["actor/kl_coef"] * (1 + change))
        assert json.loads((whole / "checkpoints/step_000006/step.json").read_text())["next_prompt"] > 24
        assert any(abs(row["reward/shaped_mean"] - row["reward/mean"]) > 0.01 for row in rows[1:])
    lrs = [0, 1.5e-4, 3e-4, 2.25e-4, 1.5e-4, 0.75e-4]
    if warming:  # the policy's schedule waits too, and has a step less
        lrs = [0, 0, 1.5e-4, 3e-4, 2e-4, 1e-4]
    assert [row["actor/lr"] for row in rows[1:]] == pytest.approx(lrs)
    steps = [row["actor/adam_steps"] for row in rows[1:]]
    assert steps == ([0, 2, 4, 6, 8, 10] if warming else [1, 2, 3, 4, 5, 6])
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == [
        "step_000004",
        "step_000006",
    ]  # keep_checkpoints 2
    rollouts = [json.loads(line) for line in (whole / "rollouts/step_000005.jsonl").open()]
    prompts = sorted({r["extra"]["prompt"] for r in rollouts})  # positions in the shuffle: those of the step
    assert prompts == list(range(prompts[0], prompts[-1] + 1)) and (prompts[0] == 16) is not bool(env)
    assert [(r["extra"]["prompt"], r["extra"]["sample"]) for r in rollouts] == [
        (i, j) for i in prompts for j in range(4)
    ]
    assert len({r["extra"]["prompt"] for r in rollouts if "filtered" not in r["extra"]}) == 4
    for r in rollouts:
        assert set(r["response_versions"]) == {-1, 4} and r["reward"] == r["total_reward"]
    about = json.loads((whole / "args.json").read_text())
    assert about["args"]["algo"] == "ppo" and len(about["git"].split("-")[0]) == 40
    assert "logp_diff" in printed and "What is" in printed and "   6/6" in printed


WATCHED = f"""
import dataclasses, json, sys
sys.path.insert(0, {str(REPO / "tests")!r})
from tiny_task import *
from flatrl.log import Log

close = Log.close

def compare(log):
    at_the_end = json.loads(json.dumps(dataclasses.asdict(log.args)))
    about = json.loads((log.folder / "args.json").read_text())
    print("the flags at the end are those of the start:", at_the_end == about["args"])
    close(log)

Log.close = compare
"""


def test_args_are_final_after_setup(cache, tmp_path):
    """args.json is written during setup, after the last flag was completed."""
    (tmp_path / "watched.py").write_text(WATCHED)
    flags = [*TINY, "--task", tmp_path / "watched.py", "--num_steps", "1", "--algo", "ppo", "--eval_every", "1"]
    printed = run(*flags, "--output_dir", tmp_path / "run", cache=cache)
    assert "the flags at the end are those of the start: True" in printed
    about = json.loads((tmp_path / "run/args.json").read_text())["args"]
    assert about["task"] == str(tmp_path / "watched.py") and about["model"].startswith("/")
    assert (about["dtype"], about["max_model_len"], about["lr"]) == ("float32", 64, 3e-4)


def test_a_model_is_evaluated_and_teaches_another(cache, tmp_path):
    """--eval_samples, the best checkpoint, --num_steps 0 --model, and --ref_model, whose KL is computed here again."""
    import transformers

    teacher, judged = tmp_path / "teacher", tmp_path / "judged"
    printed = run(*TINY, "--num_steps", "3", "--eval_every", "1", "--save_every", "1", "--keep_checkpoints", "1",
                  "--lr", "0.01", "--eval_samples", "3", "--output_dir", teacher, cache=cache)  # fmt: skip
    rows = metrics_of(teacher)
    evals = {row["step"]: row["eval/reward"] for row in rows if row["step"]}
    best = max(reversed(evals), key=evals.get)
    assert sorted(p.name for p in (teacher / "checkpoints").iterdir()) == sorted({f"step_00000{best}", "step_000003"})
    assert f"the best saved checkpoint is {teacher}/checkpoints/step_00000{best}" in printed
    assert {f"eval/pass@{j}" for j in (1, 2, 3)} < set(rows[0]) and rows[0]["eval/reward_stderr"] > 0
    assert len((teacher / "rollouts/eval_000000.jsonl").read_text().splitlines()) == 3 * 8

    final = teacher / "final"
    printed = run(*TINY, "--num_steps", "0", "--model", final, "--output_dir", judged, cache=cache)
    refused = run(*TINY, "--num_steps", "0", "--model", final, "--output_dir", teacher, code=2, cache=cache)
    assert "is in --output_dir, which would be moved aside: give this run another one" in refused and final.is_dir()
    (row,) = metrics_of(judged)
    assert row["step"] == 0 and f"eval reward {row['eval/reward']:.3f}" in printed
    assert not (judged / "final").exists() and not (judged / "checkpoints").exists()

    # The student's rollouts are those of the teacher's first steps: no engine.
    learns = [*REPLAY, "--replay", teacher, "--algo", "opd", "--num_steps", "2", "--output_dir", tmp_path / "student"]
    run(*learns, "--ref_model", final, cache=cache)
    model = transformers.AutoModelForCausalLM.from_pretrained(final)
    kl, shaped = [], []
    for line in (teacher / "rollouts/step_000001.jsonl").open():
        r = json.loads(line)
        ids = torch.tensor(r["prompt_ids"] + r["response_ids"])
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].detach()
        sampled = torch.tensor(r["response_mask"]).bool()
        d = (torch.tensor(r["response_logprobs"]) - logprobs[len(r["prompt_ids"]) - 1 :])[sampled]
        kl.append(d.mean().item())
        shaped.append(-d.sum().item())
    first = metrics_of(tmp_path / "student")[0]
    assert abs(first["actor/kl"]) > 1e-3 and first["actor/grad_norm"] > 0
    assert first["actor/kl"] == pytest.approx(sum(kl) / len(kl), abs=1e-4)
    assert first["reward/shaped_mean"] == pytest.approx(sum(shaped) / len(shaped), abs=1e-3)

    other = tmp_path / "other"
    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(other)
    model.config.vocab_size = len(tokenizer)
    model.config.save_pretrained(other)
    assert "has another tokenizer than --model" in run(*learns, "--ref_model", other, code=2, cache=cache)


def test_remax_and_rollout_correction(cache, tmp_path):
    flags = ["--algo", "remax", "--rollout_correction", "seq_mask", "--entropy_coef", "0.01", "--group_size", "1"]
    more = ["--num_steps", "2", "--eval_every", "0", "--output_dir", tmp_path / "run"]
    printed = run(*TINY, *flags, *more, cache=cache)
    rows = metrics_of(tmp_path / "run")[1:]
    for step, row in enumerate(rows, 1):
        lines = (tmp_path / f"run/rollouts/step_00000{step}.jsonl").read_text().splitlines()
        greedy = [r for r in map(json.loads, lines) if r["extra"].get("greedy")]
        assert len(lines) == 8 and len(greedy) == 4 and row["rollout/missing_baselines"] == 0
        assert row["reward/greedy"] == pytest.approx(sum(r["total_reward"] for r in greedy) / 4)
        assert row["rollout/trajectories"] == 4 and row["rollout/singleton_groups"] == 4
        # engine and trainer agree: sequence ratios of about 1, nothing dropped, every token counts the same
        assert row["rollout/ratio"] == pytest.approx(1, abs=1e-3) and row["rollout/ratio_max"] < 1.01
        assert row["rollout/dropped"] == 0 and row["rollout/effective_sample_size"] == pytest.approx(1, abs=1e-4)
        assert row["actor/ratio"] == 1.0 and row["actor/grad_norm"] > 0
        # what the update knew of these trajectories, for the report
        learned = [json.loads(line) for line in (tmp_path / f"run/learned/step_00000{step}.jsonl").open()]
        rewards = {(r["extra"]["prompt"], r["extra"]["sample"]): r["total_reward"] for r in map(json.loads, lines)}
        assert [(line["prompt"], line["sample"]) for line in learned] == sorted(key for key in rewards if key[1] == 0)
        for line in learned:
            prompt = line["prompt"]
            assert line["advantage"] == pytest.approx(rewards[prompt, 0] - rewards[prompt, 1]) and line["trained"]
        largest = max(abs(x) for line in learned for x in line["logp_diff"])
        assert largest == pytest.approx(row["rollout/logp_diff_max"], rel=0.06)
    assert "warning: report.html" not in printed and (tmp_path / "run/report.html").is_file()


def test_a_whole_rollout_is_masked_where_its_last_output_was_cut_off():
    """As in main: the history was rewritten once, and the second sequence ran into the limit."""
    from test_algos import output

    outputs = [
        output(0, 0, "11", 0.0),
        output(0, 0, "11", 0.0, segment=1, stop_reason="length"),
        output(0, 1, "1", 1.0),
    ]
    batch = data.collate(outputs) | {"units": data.by_unit(outputs)}
    train.mask_truncated(batch)
    assert batch["response_mask"].tolist() == [[0, 0], [0, 0], [1, 0]]


def test_truncated_trajectories_are_masked_out_of_the_loss(cache, tmp_path):
    """A budget of 4 tokens truncates nearly everything: what is left is counted, and an empty batch is no crash."""
    run(*TINY, "--agent", "single_turn", "--max_response_tokens", "4", "--mask_truncated", "--num_steps", "3",
        "--eval_every", "0", "--output_dir", tmp_path / "run", cache=cache)  # fmt: skip
    for row in metrics_of(tmp_path / "run")[1:]:
        assert row["stop_reason/length"] > 0.5
        assert math.isfinite(row["actor/grad_norm"])
        assert (row["actor/grad_norm"] == 0) == (row["stop_reason/length"] == 1), row


def test_final_policy_loads_in_transformers_and_vllm(cache, tmp_path, engine, background, args):
    """... and a grader that fails costs its trajectories, not the run."""
    out = tmp_path / "run"
    printed = run(
        *TINY, "--num_steps", "2", "--eval_every", "0", "--output_dir", out, cache=cache, TINY_TASK_REWARD="raise"
    )
    rows = metrics_of(out)
    assert sum(row.get("rollout/failed_reward", 0) for row in rows) > 0
    assert all(row["rollout/failed_reward"] + row["rollout/trajectories"] == 16 for row in rows[1:])
    assert "RuntimeError: the grader broke" in printed
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(out / "final", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert not any(Path(out / "final" / "config.json").read_text().count(word) for word in ("packed",))
    ids = AutoTokenizer.from_pretrained(out / "final")("What is 1+2?")["input_ids"]
    from rollout import Engine

    loaded = Engine(str(out / "final"), args, torch.device("cpu"))
    KEPT.append(loaded)
    loaded.core.wake_up()  # as loaded from the folder, without a sync
    loaded.state = "awake"
    (sampled,) = generate(loaded, background, [ids], temperature=1.0, max_tokens=10)
    with torch.no_grad():
        logits = model(torch.tensor([ids + sampled.token_ids])).logits[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(sampled.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(sampled.logprobs), expected, atol=1e-4, rtol=0)
    # started again into the same folder, nothing is overwritten
    run(*TINY, "--num_steps", "1", "--eval_every", "0", "--output_dir", out, cache=cache)
    assert len(metrics_of(tmp_path / "run.1")) == 3 and len(metrics_of(out)) == 2


def children(pid: int) -> list[int]:
    out = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(p) for p in out] + [c for p in out for c in children(int(p))]


def test_first_interrupt_ends_all_ranks_with_the_last_step_saved(cache, tmp_path):
    out = tmp_path / "run"
    flags = [*TINY, "--num_steps", "1000", "--save_every", "0", "--eval_every", "0", "--output_dir", out]
    flags += ["--algo", "ppo", "--offload", "all"]  # what is saved is with the host where a rollout is interrupted
    with started(*flags, by="torchrun", cache=cache) as process:
        wait_for(lambda: lines(out / "metrics.jsonl") >= 3)
        family = children(process.pid)
        assert len(family) >= 2
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=HANGS)
    assert "stopping" in output
    done = metrics_of(out)[-1]["step"]
    assert [p.name for p in (out / "checkpoints").glob("step*")] == [f"step_{done:06d}"]
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))


def test_second_interrupt_ends_at_once(cache, tmp_path):
    out = tmp_path / "run"
    flags = [*TINY, "--num_steps", "1000", "--save_every", "0", "--output_dir", out]
    blocked = tmp_path / "blocked"
    with started(*flags, cache=cache, TINY_TASK_BLOCKS=blocked) as process:  # an agent loop that blocks the event loop
        wait_for(blocked.exists)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: "stopping" in process.printed())
        assert process.poll() is None
        # One that comes within a second of the first is taken for the launcher's, of the same Ctrl-C.
        wait_for(lambda: process.send_signal(signal.SIGINT) or process.poll() is not None)
        assert process.returncode == -signal.SIGKILL


def test_interrupt_under_accelerate_launch_saves_although_the_launcher_leaves(cache, tmp_path):
    out = tmp_path / "run"
    flags = [*TINY, "--num_steps", "1000", "--save_every", "0", "--eval_every", "0", "--output_dir", out]
    with started(*flags, by="forked accelerate", cache=cache) as process:
        wait_for(lambda: lines(out / "metrics.jsonl") >= 3)
        family = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does: to the launcher and to the training process
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))
    done = metrics_of(out)[-1]["step"]
    assert [p.name for p in (out / "checkpoints").glob("step*")] == [f"step_{done:06d}"]


def test_the_death_of_a_rank_ends_the_others_by_name(cache, tmp_path):
    """Started by hand, so that no launcher could do it."""
    blocks = tmp_path / "blocks"  # a loop that hangs: both ranks are in their rollout
    flags = [*TINY, "--output_dir", tmp_path / "run"]
    with two_ranks(*flags, cache=cache, TINY_TASK_BLOCKS=blocks) as (first, second):
        wait_for(blocks.exists)
        second.kill()
        output, _ = first.communicate(timeout=HANGS)
        assert first.returncode == 1
        assert f"rank 1 (process {second.pid}) is gone" in output


# ---------------------------------------------------------------- rollouts without training, training without rollouts


def test_replay_repeats_a_run_without_an_engine_to_the_last_digit(cache, tmp_path):
    flags = ["--num_steps", "3", "--algo", "ppo", "--kl_coef", "0.01", "--prompts_per_mini_batch", "2"]
    run(*TINY, *flags, "--output_dir", tmp_path / "first", cache=cache)
    second_run = tmp_path / "second \u2713"  # no letter of the terminal's
    # A module that can't be imported: nothing of vLLM is needed.
    (tmp_path / "vllm.py").write_text("raise RuntimeError('vLLM was imported')")
    flags = [*REPLAY, *flags]
    printed = run(*flags, "--output_dir", second_run, "--replay", tmp_path / "first", by="python", cache=cache,
                  PYTHONPATH=str(tmp_path), PYTHONIOENCODING="latin-1")  # fmt: skip
    assert f"the trained policy is in {tmp_path}/second \\u2713/final" in printed
    first, second = metrics_of(tmp_path / "first")[1:], metrics_of(second_run)
    assert len(first) == len(second) == 3
    for a, b in zip(first, second, strict=True):
        same = {name: x for name, x in a.items() if not name.startswith(("eval/", "memory/"))}
        assert {name: b[name] for name in same} == same
    assert not list((second_run / "rollouts").iterdir())
    one, two = (safetensors(folder / "final") for folder in (tmp_path / "first", second_run))
    assert all(torch.equal(one[name], two[name]) for name in one)
    printed = run(*flags, "--output_dir", tmp_path / "third", "--replay", tmp_path / "nothing", cache=cache, code=2)
    assert "rollouts/step_000001.jsonl" in printed


def safetensors(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_rollout_only_writes_what_replay_trains_on(cache, tmp_path):
    printed = run(*TINY, "--num_steps", "2", "--output_dir", tmp_path / "rolled", "--rollout_only", cache=cache)
    assert "2 steps of rollouts are in" in printed
    rolled = metrics_of(tmp_path / "rolled")
    first, second = (rows_of(tmp_path / "rolled", step) for step in (1, 2))
    assert len(first) == len(second) == 4 and not first & second  # fresh prompts at each step
    assert [row["step"] for row in rolled] == [1, 2] and "actor/loss" not in rolled[0]
    written = [".lock", "args.json", "metrics.jsonl", "report.html", "rollouts"]
    assert sorted(p.name for p in (tmp_path / "rolled").iterdir()) == written
    run(*REPLAY, "--output_dir", tmp_path / "trained", "--num_steps", "7", "--replay", tmp_path / "rolled", cache=cache)
    trained = metrics_of(tmp_path / "trained")
    assert [row["reward/mean"] for row in trained] == [row["reward/mean"] for row in rolled]
    assert trained[0]["rollout/logp_diff_max"] < 1e-4 and trained[0]["actor/grad_norm"] > 0


def rows_of(folder: Path, step: int) -> set[int]:
    lines = (folder / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return {json.loads(line)["index"] for line in lines}


def test_remax_replays_with_its_baselines_or_not_at_all(cache, tmp_path):
    flags = ["--num_steps", "1", "--algo", "remax", "--output_dir"]
    run(*TINY, *flags, tmp_path / "rolled", "--rollout_only", cache=cache)
    run(*REPLAY, *flags, tmp_path / "trained", "--replay", tmp_path / "rolled", cache=cache)
    (row,) = metrics_of(tmp_path / "trained")
    assert row["actor/grad_norm"] > 0 and row["rollout/missing_baselines"] == 0
    file = tmp_path / "rolled/rollouts/step_000001.jsonl"
    kept = [line for line in file.read_text().splitlines(True) if "greedy" not in json.loads(line)["extra"]]
    file.write_text("".join(kept))
    printed = run(*REPLAY, *flags, tmp_path / "x", "--replay", tmp_path / "rolled", cache=cache, code=2)
    assert "there are no greedy baselines" in printed


@pytest.mark.parametrize("flags, message", [
    ({"engine_args": '{"tensor_parallel_size": 2}'}, "tensor_parallel_size can't be set here: it is a flag"),
    ({"engine_args": '{"logprobs_mode": "raw_logprobs"}'}, "logprobs_mode can't be set here"),
    ({"engine_args": '{"enable_batch_sharded_sampling": true}'}, "enable_batch_sharded_sampling can't be set"),
    ({"engine_args": '{"speculative_config": {"model": "x"}}'}, "speculative_config can't be set here"),
    ({"engine_args": '{"spec_model": "x"}'}, "spec_model can't be set here"),
    ({"engine_args": '{"reasoning_config": {}}'}, "reasoning_config can't be set here"),
    ({"engine_args": '{"reasoning_parser": "qwen3"}'}, "reasoning_parser can't be set here"),
    ({"replay": "x", "rollout_only": True}, "--rollout_only has an effect only without --replay"),
    ({"rollout_only": True, "max_staleness": 1}, "--max_staleness has an effect only without --rollout_only"),
])  # fmt: skip
def test_flags_of_an_engine_are_checked(flags, message):
    with pytest.raises(BadInput, match=message):
        check_args(Args(**flags))
    check_args(Args(engine_args='{"enforce_eager": true, "block_size": 64}'))


def test_a_damaged_rollout_file_is_named(tmp_path):
    file = tmp_path / "step_000001.jsonl"
    good = vars(AgentLoopOutput(
        prompt_ids=[1], response_ids=[2], response_mask=[1], response_logprobs=[-1.0], response_versions=[0],
        reward=1.0, text="two\u2028lines", extra={"prompt": 0, "sample": 0, "segment": 0},
    ))  # fmt: skip
    file.write_text(json.dumps(good, ensure_ascii=False) + "\n", encoding="utf-8")
    (output,), errors = train.read_rollouts(file, 3)
    assert output.text == "two\u2028lines" and output.response_ids == [2]
    bad = ["5", "[1]", "{", '{"prompt_ids": [1], "response_ids": [2]}', json.dumps(good | {"reward": None}),
           json.dumps(good | {"extra": {}}), json.dumps(good | {"images": 1})]  # fmt: skip
    for line in bad:
        file.write_text(json.dumps(good) + "\n" + line + "\n")
        with pytest.raises(BadInput, match=r"step_000001.jsonl, line 2, is no trajectory to replay"):
            train.read_rollouts(file, 3)
    with pytest.raises(BadInput, match="its tokens are another model's"):
        file.write_text(json.dumps(good) + "\n")
        train.read_rollouts(file, 2)
    file.write_bytes(b"\xff\xfe\n")
    with pytest.raises(BadInput, match="no trajectory to replay"):
        train.read_rollouts(file, 3)


@pytest.mark.parametrize("flag, value, message", [
    ("sampling_args", '{"temperature": 0.5}', "temperature can't be set here"),
    ("sampling_args", '{"n": 2, "logprobs": 1}', "logprobs, n can't be set here"),
    ("sampling_args", '{"top_kk": 2}', "top_kk"),
    ("eval_sampling_args", '{"top_p": 7}', "top_p"),
    ("eval_sampling_args", "[1]", "--eval_sampling_args must be a JSON object"),
    ("sampling_args", "{", "--sampling_args is not JSON"),
])  # fmt: skip
def test_sampling_parameters_are_checked_before_anything_starts(flag, value, message):
    with pytest.raises(BadInput, match=message):
        check_args(Args(**{flag: value}))


def test_sampling_parameters_that_the_trainer_does_not_know_are_warned_of():
    with pytest.warns(UserWarning, match="min_p, top_k: the engine samples from another distribution"):
        check_args(Args(sampling_args='{"top_k": 20, "min_p": 0.1, "stop": ["</answer>"]}'))
    with warnings.catch_warnings(action="error"):
        check_args(Args(sampling_args='{"stop": ["</answer>"]}', eval_sampling_args='{"top_k": 20}'))
    for stop in ('["x"]', '"x"'):  # agents see a list
        sampling = Args(sampling_args=f'{{"stop": {stop}}}', temperature=0.5).sampling()
        assert sampling == {"temperature": 0.5, "stop": ["x"]}


def test_stop_strings_end_turns_in_a_run(cache, tmp_path, tokenizer):
    flags = [*TINY, "--num_steps", "1", "--save_every", "0", "--output_dir", tmp_path / "run"]
    run(*flags, "--sampling_args", json.dumps({"stop": list("0123456789")}), cache=cache)
    (file,) = (tmp_path / "run" / "rollouts").glob("step_*")
    turns = []
    for o in map(json.loads, file.open()):
        tokens = zip(o["response_mask"], o["response_ids"], strict=True)
        for sampled, turn in itertools.groupby(tokens, lambda token: token[0]):
            turns += [[tokenizer.decode([token]) for _, token in turn]] if sampled else []
    assert len(turns) == 32  # two a trajectory
    digit = [[any(c.isdigit() for c in text) for text in turn] for turn in turns]
    assert any(turn[-1] for turn in digit) and not any(any(turn[:-1]) for turn in digit)  # a digit ends its turn


# ---------------------------------------------------------------- gradients


def test_gradient_does_not_depend_on_micro_batches_or_ranks(tiny_model, cache, tmp_path):
    results = {}
    for ranks, by in ((1, "fork"), (2, "ranks")):
        run(tiny_model, tmp_path / "out", script="tests/gradient_worker.py", by=by, cache=cache)
        results |= {(ranks, *case): result for case, result in torch.load(tmp_path / "out").items()}
    assert len(results) == 18
    for (ranks, tokens, *kind), other in results.items():
        whole = results[1, 4096, *kind]
        assert sum(g.abs().sum() for g in whole["gradients"].values()) > 0
        for name, gradient in whole["gradients"].items():
            error = (other["gradients"][name] - gradient).norm() / gradient.norm()
            assert error < 1e-5, (ranks, tokens, kind, name, error)
        assert other["metrics"] == pytest.approx(whole["metrics"], rel=1e-4, abs=1e-7)


def test_gradient_checkpointing_recomputes_and_changes_nothing(tiny_model, process_group, monkeypatch):
    from accelerate import Accelerator
    from transformers import GradientCheckpointingLayer

    calls = []
    original = GradientCheckpointingLayer.__call__

    def spy(self, *args, **kwargs):
        if torch.is_grad_enabled():  # not where a network is tried
            calls.append(self.gradient_checkpointing and self.training)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(GradientCheckpointingLayer, "__call__", spy)
    plain = gradients(Accelerator(cpu=True), tiny_model, 200, "token-mean")
    assert calls and not any(calls)
    calls.clear()
    saved = gradients(Accelerator(cpu=True), tiny_model, 200, "token-mean", gradient_checkpointing=True)
    assert calls and all(calls)
    for name, gradient in plain["gradients"].items():
        assert (saved["gradients"][name] - gradient).norm() / gradient.norm() < 1e-5, name


def test_gradients_agree_with_autograd_through_a_padded_model(tiny_model, process_group):
    """Packed attention, chunked logprobs and global counts against the plain computation."""
    from gradient_worker import batch_of
    from transformers import AutoModelForCausalLM

    import losses

    batch = batch_of(19)
    from accelerate import Accelerator

    result = gradients(Accelerator(cpu=True), tiny_model, 200, "token-mean")
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(batch["response_mask"].shape, generator=generator)
    logprobs_ref = -5 + torch.randn(batch["response_mask"].shape, generator=generator)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    attention_mask = torch.arange(batch["input_ids"].shape[1]) < batch["lengths"][:, None]
    logprobs = model(batch["input_ids"], attention_mask=attention_mask).logits.log_softmax(-1)
    at = batch["prompt_lengths"][:, None] + torch.arange(batch["response_mask"].shape[1])
    at = at.clamp(max=batch["input_ids"].shape[1] - 1)  # beyond a row's end: masked
    targets = batch["input_ids"].gather(1, at)
    logprobs = logprobs.gather(1, (at - 1)[..., None].expand(-1, -1, logprobs.shape[-1])).gather(2, targets[..., None])[
        ..., 0
    ]
    mask = batch["response_mask"]
    ratio = (logprobs - result["old"]).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    loss = loss + 0.1 * losses.kl_estimate(logprobs, logprobs_ref, "k3")
    ((loss * mask).sum() / mask.sum()).backward()
    for name, parameter in model.named_parameters():
        gradient = result["gradients"][f"model.{name}"]
        assert (gradient - parameter.grad).norm() / parameter.grad.norm() < 1e-4, name


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_stesp", "3"], "unknown flag --num_stesp: did you mean --num_steps?"),
        (["--num_st", "3"], "unknown flag --num_st: did you mean --num_steps?"),
        (["--num_steps", "many"], "--num_steps: invalid int value: 'many'"),
        (["extra"], "unknown flag extra"),
        (["--lr"], "--lr: expected one argument"),
        (["--resume", "maybe"], "--resume: true or false expected, got 'maybe'"),
        (["--shard", "half"], "--shard: invalid choice: 'half' (choose from False, True, 'hybrid')"),
    ],
)
def test_flags_that_do_not_parse(flags, message):
    with pytest.raises(BadInput) as error:
        parse_args(flags)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts_per_mini_batch": 5}, "--prompts_per_step 32 must be a multiple of --prompts_per_mini_batch 5"),
        ({"algo": "gpro"}, "--algo gpro: choose from grpo, ppo"),
        (
            {"tokens_per_micro_batch": 100},
            "--tokens_per_micro_batch 100 is less than the longest trajectory: 640 tokens",
        ),
        ({"temperature": 0.0}, "--temperature 0.0 must be greater than 0"),
        ({"num_steps": -1}, "--num_steps -1 must not be negative"),
        ({"max_model_len": 512}, "--max_model_len 512 leaves no room"),
        ({"engine_args": "{block_size: 16}"}, "--engine_args is not JSON"),
        ({"engine_args": "[1]"}, "--engine_args must be a JSON object"),
        ({"sleep_level": 3}, "--sleep_level 3: choose from 1, 2"),
    ],
)
def test_flags_that_contradict_each_other(change, message):
    with pytest.raises(BadInput) as error:
        check_args(dataclasses.replace(Args(), **change))
    assert message in str(error.value)


def test_defaults_pass_the_checks_and_flags_parse():
    check_args(Args())
    args = parse_args(["--deterministic", "--train_files", "a.parquet", "b.jsonl", "--lr", "1e-5", "--save-every", "3"])
    assert (args.deterministic, args.train_files, args.lr, args.resume) == (True, ["a.parquet", "b.jsonl"], 1e-5, False)
    assert args.save_every == 3 and args.given == {"deterministic", "train_files", "lr", "save_every"}
    for words, value in (["--shard"], True), (["--shard", "hybrid"], "hybrid"), (["--shard", "False"], False):
        assert parse_args(words).shard == value
    assert parse_args(["--resume", "No"]).resume is False and parse_args(["--resume", "1"]).resume is True
    assert dataclasses.replace(Args(), epochs=3, prompts_per_mini_batch=8).updates_per_rollout == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "no/such.py"}, "--task no/such.py: no such file"),
        ({"model": "{tmp}"}, "neither a model folder nor a model that can be loaded"),
        ({"model": "no_such_org/no_such_model"}, "neither a model folder nor a model that can be loaded"),
        ({"max_response_tokens": 4000}, "is greater than the derived max_model_len (max_position_embeddings=1024"),
        ({"max_prompt_tokens": 3}, "no prompt left: all 24 are longer than --max_prompt_tokens 3"),
        ({"agent": "nobody"}, "no agent loop 'nobody'"),
        ({"resume": True}, "no checkpoint in"),
        ({"val_files": ["nothing.jsonl"]}, "nothing.jsonl: no such file"),
    ],
)
def test_input_that_is_wrong_ends_before_the_engine_starts(
    change, message, tiny_model, tmp_path, monkeypatch, process_group
):
    monkeypatch.setattr(train, "Engine", lambda *a: pytest.fail("the engine was built"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it tries for half a minute
    monkeypatch.chdir(REPO)
    change = {k: v.format(tmp=tmp_path) if isinstance(v, str) else v for k, v in change.items()}
    base = {"task": "tests/tiny_task.py", "model": tiny_model, "output_dir": str(tmp_path / "out")}
    with pytest.raises(BadInput) as error:
        train.setup(Args(**{**base, **change}))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_command_line_shows_one_line_and_exits_with_2(cache):
    for by, flags, message in (
        ("python", ["--lrr", "1"], "train.py: error: unknown flag --lrr: did you mean --lr?"),
        ("fork", ["--task", "nothing.py"], "train.py: error: --task nothing.py: no such file"),
    ):
        assert run(*flags, by=by, cache=cache, code=2).splitlines()[1:] == [message]  # behind what is loaded


def test_help_and_a_wrong_flag_wait_for_nothing_that_they_do_not_need():
    slow = "vllm", "torch._dynamo", "torch.distributed.tensor", "transformers"
    code = f"import sys, train; train.parse_args([]); print([name for name in {slow} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=REPO, text=True) == "[]\n"


def test_the_task_and_the_agent_loops_of_the_docs_work(tmp_path, tokenizer, args):
    pages = "".join((REPO / page).read_text() for page in ("README.md", "docs/agents.md"))
    task_file, loop, chat = (block.split("```")[0] for block in pages.split("```python\n")[1:])
    (tmp_path / "guess.py").write_text(task_file + loop + chat)
    task = data.load_task(str(tmp_path / "guess.py"))
    rows = data.filter_overlong(
        data.load_rows(task, "val"), tokenizer, task, dataclasses.replace(args, max_prompt_tokens=256)
    )
    assert len(rows) == 100 and rows[0]["prompt"][0]["role"] == "system"
    secret = random.Random(1000).randint(1, 100)
    assert task.compare(secret, 1000) == "equal" and task.compare(0, 1000) == "too low"
    says = types.SimpleNamespace(messages=[{"content": f"<answer>{secret}</answer>"}])
    assert task.reward(says, rows[0]) == 1.0 and task.reward(says, rows[1]) in (0.0, 1.0)
    from test_agent_loop import Script

    engine = Script(tokenizer, ("12", "still 12"))
    twice = agent_loop.AGENT_LOOPS["ask_twice"](
        engine, tokenizer, None, task, dataclasses.replace(args, max_model_len=512)
    )
    output = asyncio.run(twice.run({}, **rows[0]))
    assert [m["content"] for m in output.messages[-3:]] == ["12", "Are you sure?", "still 12"]

    engine = Script(tokenizer, ("12", "still 12"))
    critic = agent_loop.AGENT_LOOPS["critic"](
        engine, tokenizer, None, task, dataclasses.replace(args, max_model_len=512)
    )
    (output,) = asyncio.run(critic.run({}, **rows[0]))
    assert [m["content"] for m in output.messages[-3:]] == ["12", "Check your answer, then repeat it.", "still 12"]
    assert engine.prompts[1][: len(engine.prompts[0]) + 3] == engine.prompts[0] + output.response_ids[:3]
