"""Whole runs with vLLM, on one rank and two: numbers repeat, kills lose nothing; bad input."""

import json
import math
import pickle
import shutil
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from conftest import REPLAY, REPO, TINY, lines, metrics_of, output_of, rollouts_of, run
from fixed_batch import check_gradients, gradients
from safetensors.torch import load_file
from test_rollout import hf_logprobs
from transformers import AutoModelForCausalLM

import data
import losses
import train
from agent_loop import BadInput
from flatrl.metrics import batch_metrics
from train import Args, check_args, check_registered, parse_args

PPO = [
    *[*REPLAY, "--algo", "ppo", "--num_steps", "3", "--eval_every", "2"],
    *["--lr_schedule", "linear", "--warmup_steps", "2"],
]


def check_log(folder: Path, largest_difference: float, first_update: int = 1) -> list[dict]:
    """Checks a run of PPO as its user would look at it; returns its metrics."""
    rows = metrics_of(folder, timings=True)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert ["eval/reward" in row for row in rows] == [True, False, True, True]
    for row in rows[first_update:]:
        assert all(math.isfinite(x) for x in row.values() if isinstance(x, float))
        assert {"actor/pg_loss", "actor/kl", "critic/vf_loss", "critic/explained_var"} < set(row)
        assert row["rollout/logp_diff_max"] < largest_difference
        n_filtered = row["rollout/filtered_groups"]
        assert row["rollout/trajectories"] == 16 + 4 * n_filtered and row["num_turns/mean"] == 4
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert checkpoints == ["step_000002", "step_000003"]
    assert rows[1]["timing/sync_s"] == 0 < rows[2]["timing/sync_s"]  # an evaluation was before it

    rollouts = rollouts_of(folder, 3)
    members = [(r["extra"]["prompt"], r["extra"]["sample"]) for r in rollouts]
    first, last = members[0][0], members[-1][0]
    assert rows[3]["rollout/epoch"] == (last + 1) / 24
    assert members == [(i, j) for i in range(first, last + 1) for j in range(4)]
    for r in rollouts:
        assert set(r["response_versions"]) == {-1, 2} and r["reward"] == r["total_reward"]
    return rows


def test_a_run_and_its_replay_without_an_engine(train_here, tiny_model, tmp_path):
    out, again = tmp_path / "run", tmp_path / "again"
    flags = [*PPO, "--prompts_per_mini_batch", "2", "--kl_coef", "0.01", "--critic_warmup", "1"]
    flags += ["--lr", "3e-4", "--gradient_checkpointing", "--output_dir"]
    printed = train_here(*TINY, *flags, out)
    rows = check_log(out, 1e-3, first_update=2)
    assert "rollout/logp_diff_max" not in rows[0] and "actor/pg_loss" not in rows[1]
    # The policy's schedule waits for the critic, too, and has a step less.
    assert [row["actor/lr"] for row in rows[1:]] == pytest.approx([1.5e-4, 1.5e-4, 3e-4])
    assert [row["actor/adam_steps"] for row in rows[1:]] == [0, 2, 4]
    assert "   3/3" in printed and "warning:" not in printed  # a sound run
    assert (out / "report.html").is_file()
    about = json.loads((out / "args.json").read_text())
    assert (about["args"]["algo"], about["args"]["max_model_len"]) == ("ppo", 64)

    # A vLLM that can't be imported: it is not needed.
    (tmp_path / "vllm.py").write_text("raise RuntimeError('vLLM was imported')")
    model = ["--model", tiny_model]
    replayed = run(*flags, again, *model, "--replay", out, PYTHONPATH=tmp_path)
    assert "; evaluate: accelerate launch " in printed and "evaluate:" not in replayed
    for row, repeated in zip(metrics_of(out)[1:], metrics_of(again), strict=True):
        same = {name: x for name, x in row.items() if not name.startswith("eval/")}
        assert {name: repeated[name] for name in same} == same
    weights, others = (load_file(of / "final/model.safetensors") for of in (out, again))
    assert all(torch.equal(weights[name], others[name]) for name in weights)


SAMPLED = """
import json, random
from examples.methods import muon as optimizer
from losses import estimator, gae
from tiny_task import *

def sampler(history):
    return random.Random(json.dumps(history)).randrange(24)

@estimator("growing")
def growing(token_rewards, values, mask, state):
    state["steps"] = state.get("steps", 0) + 1
    advantages, returns = gae(token_rewards, values, mask, 1.0, 1.0)
    return advantages * state["steps"], returns
"""


def test_a_sharded_run_in_bfloat16_resumes_to_the_last_digit(tmp_path, tiny_model):
    """As on GPUs, with a sampler, which chooses replacements, too, and an estimator's state; with
    two optimisers, of which one is not Adam."""
    (tmp_path / "sampled.py").write_text(SAMPLED)
    flags = [
        *[*TINY, *PPO, "--deterministic", "--task", tmp_path / "sampled.py"],
        *["--model", tiny_model, "--dtype", "bfloat16", "--shard"],
        *["--lr", "3e-4", "--critic_lr", "1e-3", "--tokens_per_micro_batch", "128"],
        *["--kl_coef", "0.05", "--kl_in", "reward", "--kl_kind", "k1", "--kl_target", "0.001"],
        *["--max_gen_batches", "3", "--overlong_buffer", "0.5"],
        *["--adv_estimator", "growing", "--whiten_advantages", "false"],
    ]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    ranks = {"by": "torchrun", "TINY_TASK_REWARD": "any", "PYTHONPATH": REPO / "tests"}
    run(*flags, "--output_dir", whole, **ranks)

    # As if it had been killed at the end of the third step.
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints/step_000003")
    shutil.rmtree(resumed / "final")
    # Where Adam's states, critic and reference are changes nothing.
    again = [*flags, "--offload", "all", "--output_dir", resumed, "--resume"]
    assert "resuming after step 2" in run(*again, **ranks)
    assert metrics_of(resumed) == metrics_of(whole)

    rows = check_log(whole, 0.2)[1:]
    assert all(row["rollout/logp_diff_mean"] < 0.03 for row in rows)
    assert [row["actor/lr"] for row in rows] == pytest.approx([1.5e-4, 3e-4, 3e-4])
    assert [row["actor/adam_steps"] for row in rows] == [1, 2, 3]
    assert any(abs(row["reward/shaped_mean"] - row["reward/mean"]) > 0.01 for row in rows)
    assert sum(row["rollout/filtered_groups"] for row in rows) > 0
    path = Path("checkpoints/step_000003")
    for folder in (whole, resumed):
        assert pickle.loads((folder / path / "estimator.pkl").read_bytes()) == {"steps": 3}
    state, other = (
        json.loads((folder / path / "step.json").read_text()) for folder in (whole, resumed)
    )
    assert state == other and state["next_prompt"] > 12
    for rollout in rollouts_of(whole, 3):
        row, _, *rewards = state["history"][rollout["extra"]["prompt"]]
        assert row == rollout["index"] and rollout["total_reward"] in rewards

    assert rows[0]["actor/kl_coef"] == 0.05
    for row, after in zip(rows, rows[1:]):  # 16 rollouts a step, over a horizon of 10,000
        change = min(max(row["actor/kl"] / 0.001 - 1, -0.2), 0.2) * 16 / 10_000
        expected = row["actor/kl_coef"] * (1 + change)
        assert after["actor/kl_coef"] == pytest.approx(expected, rel=1e-9)


def test_rollout_only_writes_what_replay_trains_on(train_here, tmp_path):
    """With ReMax, whose baselines must be there, and of which a rollout alone can learn."""
    rolled, out = tmp_path / "rolled", tmp_path / "trained"
    flags = ["--algo", "remax", "--group_size", "1", "--temperature", "0.7"]
    flags += ["--num_steps", "2", "--output_dir"]
    train_here(*TINY, *flags, rolled, "--rollout_only")
    rows = metrics_of(rolled)
    assert [row["step"] for row in rows] == [1, 2] and "actor/loss" not in rows[0]
    assert not (rolled / "checkpoints").exists() and not (rolled / "final").exists()
    first, second = ({r["index"] for r in rollouts_of(rolled, step)} for step in (1, 2))
    assert len(first) == len(second) == 4 and not first & second  # fresh prompts at each step

    replay = [*REPLAY, "--replay", rolled, *flags]
    more = ["--rollout_correction", "seq_mask", "--entropy_coef", "0.01", "--num_steps", "7"]
    train_here(*replay, out, *more)
    trained = metrics_of(out)
    assert [row["reward/mean"] for row in trained] == [row["reward/mean"] for row in rows]
    row = trained[0]
    rollouts = rollouts_of(rolled, 1)
    greedy = [r["total_reward"] for r in rollouts if "greedy" in r["extra"]]
    assert row["reward/greedy"] == pytest.approx(sum(greedy) / 4) and len(rollouts) == 8
    assert row["rollout/trajectories"] == row["rollout/singleton_groups"] == 4
    assert row["rollout/missing_baselines"] == row["rollout/dropped"] == 0
    # Engine and trainer agree: every token counts the same.
    assert row["rollout/logp_diff_max"] < 1e-4 and row["actor/grad_norm"] > 0
    assert row["rollout/ratio"] == pytest.approx(1, abs=1e-3) and row["actor/ratio"] == 1.0
    assert row["rollout/effective_sample_size"] == pytest.approx(1, abs=1e-4)


def test_a_model_is_evaluated_and_teaches_another(train_here, tmp_path):
    teacher, judged, student = (tmp_path / name for name in ("teacher", "judged", "student"))
    flags = ["--num_steps", "2", "--eval_every", "1", "--save_every", "9", "--lr", "0.01"]
    flags += ["--keep_checkpoints", "1", "--eval_samples", "3", "--output_dir", teacher]
    printed = train_here(*TINY, *flags)
    rows = metrics_of(teacher)
    evals = {row["step"]: row["eval/reward"] for row in rows if row["step"]}
    best = max(evals, key=evals.get)
    saved = {path.name for path in (teacher / "checkpoints").iterdir()}
    assert saved == {f"step_00000{best}", "step_000002"}
    assert f"the best saved checkpoint is {teacher}/checkpoints/step_00000{best}" in printed
    assert {f"eval/pass@{j}" for j in (1, 2, 3)} < set(rows[0])
    assert lines(teacher / "rollouts/eval_000000.jsonl") == 3 * 8

    final = teacher / "final"
    card = (final / "README.md").read_text()
    assert f"- evaluation: {rows[-1]['eval/reward']:.3f} at step 2" in card
    assert "trained on tiny_task" in card and "2 steps of `--algo grpo`" in card
    modes = {path.stat().st_mode for path in (*final.iterdir(), teacher / "metrics.jsonl")}
    assert len(modes) == 1  # the umask's
    judge = [*TINY, "--num_steps", "0", "--model", final, "--output_dir"]
    printed = train_here(*judge, judged)
    (row,) = metrics_of(judged)
    assert row["step"] == 0 and f"evaluation {row['eval/reward']:.3f}" in printed
    assert not (judged / "final").exists() and not (judged / "checkpoints").exists()
    with pytest.raises(BadInput, match="holds a run: continue it with --resume"):
        train_here(*judge, teacher)

    # The student learns from the teacher's first rollouts. Its KL is computed here again.
    learn = [*REPLAY, "--replay", teacher, "--algo", "opd", "--num_steps", "1"]
    learn += ["--output_dir"]
    train_here(*learn, student, "--ref_model", final)
    model, info = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    means, sums = [], []
    for r in rollouts_of(teacher, 1):
        sampled = torch.tensor(r["response_mask"]).bool()
        logprobs = hf_logprobs(model, r["prompt_ids"], r["response_ids"])
        kl = (torch.tensor(r["response_logprobs"]) - logprobs)[sampled]
        means.append(kl.mean().item())
        sums.append(-kl.sum().item())
    (row,) = metrics_of(student)
    assert abs(row["actor/kl"]) > 1e-3 and row["actor/grad_norm"] > 0
    assert row["actor/kl"] == pytest.approx(sum(means) / len(means), abs=1e-4)
    assert row["reward/shaped_mean"] == pytest.approx(sum(sums) / len(sums), abs=1e-3)


def test_truncated_trajectories_are_masked_out_of_the_loss(train_here, tmp_path, monkeypatch):
    """A budget of 4 tokens truncates nearly everything: an empty batch is no crash.

    Neither is a grader that fails."""
    monkeypatch.setenv("TINY_TASK_REWARD", "raise")
    flags = ["--agent", "single_turn", "--max_response_tokens", "4", "--mask_truncated"]
    flags += ["--num_steps", "3", "--eval_every", "-1", "--output_dir", tmp_path / "run"]
    printed = train_here(*TINY, *flags)
    assert "RuntimeError: the grader broke" in printed
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3] and "eval/reward" not in rows[2]
    assert sum(row["rollout/failed_reward"] for row in rows) > 0
    for row in rows:
        assert row["rollout/failed_reward"] + row["rollout/trajectories"] == 16
        assert row["stop_reason/length"] > 0.5
        assert (row["actor/grad_norm"] == 0) == (row["stop_reason/length"] == 1)


def test_a_task_makes_its_optimisers(tiny_model, process_group):
    """Their groups keep their own rates, in proportion to the schedule."""
    made = lambda model, args: [
        torch.optim.SGD([{"params": model.lm_head.parameters(), "lr": 1.0}], lr=args.lr),
        torch.optim.SGD(model.model.layers.parameters(), lr=args.lr, weight_decay=0.1),
    ]
    args = Args(model=tiny_model, lr=0.5, warmup_steps=4)
    task = types.SimpleNamespace(optimizer=made)
    learner = train.Learner(train.Policy(args), 9.0, 8, args, Accelerator(cpu=True), task=task)
    assert learner.set_lr(1) == 0.5 and learner.optimizers[1].param_groups[0]["lr"] == 0.25
    assert learner.set_lr(4) == 1.0 and learner.optimizers[1].param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("kl_kind", ["k3", "top4"])
def test_gradients_agree_with_autograd_through_a_padded_model(kl_kind, tiny_model, process_group):
    """Packed attention, chunked logprobs and global counts against the plain computation: a
    mean over the sampled tokens, and one over those of demonstrations."""
    flags = {"demonstrated": range(0, 19, 3), "kl_kind": kl_kind}
    flags |= {"rollout_correction": "tis", "entropy_coef": 0.03, "clip_high": 0.1}
    result = gradients(Accelerator(cpu=True), tiny_model, 200, "token-mean", **flags)
    batch = result["batch"]
    mask = batch["response_mask"]
    ids = batch["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model, dtype=torch.float32, attn_implementation="eager"
    )
    attention_mask = torch.arange(ids.shape[1]) < batch["lengths"][:, None]
    of_all = model(ids, attention_mask=attention_mask).logits.log_softmax(-1)
    at = batch["prompt_lengths"][:, None] + torch.arange(mask.shape[1])
    at = at.clamp(max=ids.shape[1] - 1)  # beyond a row's end: masked
    of_all = of_all[torch.arange(19)[:, None], at - 1]  # (B, T, V)
    logprobs = of_all.gather(2, ids.gather(1, at)[..., None])[..., 0]

    ratio = (logprobs - batch["logprobs_old"]).exp()
    advantages = batch["advantages"]
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.1))
    weights = (batch["logprobs_old"] - batch["logprobs_rollout"]).exp().clamp(max=2)
    entropy = -(of_all.exp() * of_all).sum(-1)
    kl = losses.kl_estimate(logprobs, batch["logprobs_ref"], "k3")
    if kl_kind == "top4":
        top = of_all.gather(2, batch["ref_top_ids"])
        kl = losses.top_kl(top, batch["ref_top_logprobs"])
        likeliest = of_all.topk(4).indices
        assert (likeliest == batch["ref_top_ids"])[mask.bool()].all()
    loss = loss * weights - 0.03 * entropy + 0.1 * kl
    imitated = batch["imitation_mask"]
    imitation_loss = -(logprobs * imitated).sum() / imitated.sum()
    total = (loss * mask).sum() / mask.sum() + imitation_loss
    total.backward()
    metrics = result["metrics"]
    assert metrics["actor/loss"] == pytest.approx(total.item(), rel=1e-4)
    assert metrics["actor/imitation_loss"] == pytest.approx(imitation_loss.item(), rel=1e-4)
    expected = {f"model.{name}": p.grad for name, p in model.named_parameters()}
    check_gradients(result["gradients"], expected, 1e-4)


@pytest.mark.parametrize("difference, flags, ends", [
    (0.9e-3, {}, "goes on"),
    (1.1e-3, {}, "stops"),
    (float("nan"), {}, "stops"),
    (0.09, {"dtype": "bfloat16"}, "goes on"),
    (0.11, {"dtype": "bfloat16"}, "stops"),
    (1.0, {"allow_mismatch": True}, "warns"),
    (0.11, {"sampling_args": '{"top_p": 0.9}'}, "warns"),  # another distribution, as was asked for
])  # fmt: skip
def test_engine_and_trainer_agree_or_the_run_stops(difference, flags, ends, tokenizer, monkeypatch):
    """... and names the token. One was sampled by older weights, which may differ, one was not."""
    args = Args(**{"dtype": "float32", "max_staleness": 2} | flags)
    output = output_of([1, 0, 1, 1], ids=[5, 8, 6, 7])
    output.response_versions = [5, -1, 7, 7]
    batch = data.make_batch([output])
    batch["logprobs_old"] = batch["logprobs_rollout"] + torch.tensor([9, 9, 0, 2 * difference])
    metrics = batch_metrics(batch, 7, args)
    assert metrics["rollout/staleness_mean"] == metrics["rollout/staleness_max"] == 2
    found = metrics["rollout/logp_diff_mean"]
    assert found == pytest.approx(difference, rel=1e-3, nan_ok=True)
    closed, warned = [], []
    monkeypatch.setattr(train, "close", closed.append)
    log = types.SimpleNamespace(warn=warned.append)
    run = types.SimpleNamespace(
        args=args, log=log, engine=object(), tokenizer=tokenizer, mismatch_is_known=False
    )
    if ends == "stops":
        said = f"prompt 0, sample 0, position 3 of the response, '{tokenizer.decode(7)}'"
        with pytest.raises(BadInput, match=said):
            train.check_agreement(run, batch, 7, found)
        assert closed == [run]
        return
    for _ in range(2):
        train.check_agreement(run, batch, 7, found)
    assert not closed and len(warned) == (ends == "warns")


def test_defaults_pass_the_checks_and_flags_parse():
    for algo in train.PRESETS:
        args = Args(algo=algo, ref_model="x" if algo == "opd" else None)
        check_args(args)
        check_registered(args)
    check_args(Args(algo="opd", ref_model="x", kl_in="loss", kl_kind="top4"))
    files = parse_args(["--train_files", "a.parquet", "b.jsonl", "--seed", "3"])
    assert (files.train_files, files.seed) == (["a.parquet", "b.jsonl"], 3)
    forms = {"--shard": True, "--shard hybrid": "hybrid", "--shard False": False, "": False}
    for words, meant in forms.items():
        assert parse_args([*words.split(), "--seed", "1"]).shard == meant
    assert Args(epochs=3, prompts_per_mini_batch=8).updates_per_step == 12
    assert Args(rollout_correction="icepop:0.3:8").correction == ("icepop", 0.3, 8.0)


@pytest.mark.parametrize("flags, said", [
    (dict(prompts_per_mini_batch=5), "must be a multiple of --prompts_per_mini_batch 5"),
    (dict(algo="rloo", group_size=1), "--adv_estimator rloo compares the"),
    (dict(algo="ppo", adv_estimator="grpo"), "would train no critic"),
    (dict(algo="opd"), "--reward_coef 0 (--algo opd) learns from the KL to a teacher"),
    (dict(kl_coef=0.1, kl_kind="k1"), "--kl_kind k1 teaches nothing as a loss"),
    (dict(kl_coef=0.1, kl_kind="16"), "--kl_kind 16: choose from k1, "),
    (dict(engine_args='{"tensor_parallel_size": 2}'), "can't be set here: it is a flag"),
    (dict(compile=True, router_replay=True), "--compile with --router_replay: not implemented"),
])  # fmt: skip
def test_flags_without_effect_or_sense_are_refused(flags, said):
    with pytest.raises(BadInput) as error:
        check_args(Args(**flags))
        check_registered(Args(**flags))
    assert said in str(error.value)


def test_sampling_parameters():
    said = "min_p, top_k: the engine samples from another distribution"
    with pytest.warns(UserWarning, match=said):
        check_args(Args(sampling_args='{"top_k": 20, "min_p": 0.1, "stop": ["</answer>"]}'))
    stop = '{"stop": "x"}'
    args = Args(sampling_args=stop, eval_sampling_args='{"top_k": 20}', temperature=0.5)
    with warnings.catch_warnings(action="error"):
        check_args(args)
    assert args.sampling() == {"temperature": 0.5, "stop": ["x"]}  # agents see a list
    # Evaluation is greedy, unless it takes several samples.
    assert args.sampling(validate=True) == {"temperature": 0.0, "top_k": 20}
    assert Args(temperature=0.7, eval_samples=4).sampling(validate=True)["temperature"] == 0.7


def test_a_damaged_rollout_file_is_named(tmp_path):
    file = tmp_path / "step_000001.jsonl"
    good = vars(output_of([1], reward=1.0, text="two\u2028lines"))
    file.write_text(json.dumps(good, ensure_ascii=False), encoding="utf-8")
    (read,), _ = train.read_rollouts(file, 4)
    assert read.text == "two\u2028lines" and read.response_ids == [3]
    with pytest.raises(BadInput):  # another model's
        train.read_rollouts(file, 3)
    file.write_text(json.dumps(good | {"reward": None}))
    with pytest.raises(BadInput, match="000001.jsonl, line 1, is not .*it lacks its reward"):
        train.read_rollouts(file, 4)


def test_help_and_a_wrong_flag_do_not_wait_for_slow_imports():
    slow = ("vllm", "torch._dynamo", "torch.distributed.tensor", "transformers")
    code = f"import sys, train; train.parse_args([]); print({{*{slow}}} & sys.modules.keys())"
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=REPO, text=True)
    assert printed == "set()\n"
