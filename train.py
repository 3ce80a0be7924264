"""flatrl: multi-turn reinforcement learning for language models.

`main` is the whole algorithm. What it calls follows in the order of a step, then the networks.
losses.py explains the letters of shapes, such as (B, T), and `data.pack_rows` R and P.

    accelerate launch train.py                               # the built-in task, minutes on CPU
    accelerate launch train.py --model Qwen/Qwen2.5-0.5B-Instruct --task my_task.py

One process per GPU holds a vLLM engine and the policy. It alternates between rollout and update."""

from flatrl.launch import Bar, prepare_process, quiet_libraries

if __name__ == "__main__":
    prepare_process()  # sets OMP_NUM_THREADS, which torch reads when it is imported

import contextlib
import functools
import importlib.util
import math
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn

import data
import losses
from agent_loop import BadInput, default_agent
from flatrl import checkpoints, layers, models
from flatrl.args import (  # noqa: F401  (some are re-exported)
    PRESETS, Args, check_args, check_registered, complete_flags, parse_args)
from flatrl.attention import register_packed_attention
from flatrl.bad_input import RunFailed, need, refusing
from flatrl.devices import fit_micro_batch, offload, start_processes, wrap
from flatrl.log import Listener, Log, SilentLog, read_rollouts, replay_file
from flatrl.metrics import Clock, batch_metrics, describe_eval, disagreement, mean, means
from flatrl.peaks import shares_of_peaks
from flatrl.processes import (
    Background, Stop, Stopped, all_gather, all_sum, check_ranks_agree, gather_unless_stopped,
    on_main, run_as_script)
from flatrl.routes import Routers
from flatrl.rows import hash_of_rows
from flatrl.vision import Vision
from flatrl.vllm_engine import NEUTRAL_SAMPLING, check_model
from losses import BT, LossAndStats, N
from rollout import Engine, Pool, Rollouts, rollout, training_pool, wait_for_rewards

VALUE_CLIP = 0.5  # clip of the critic's value loss (PPO)
# What listens to a run: modules of flatrl/ and their classes. A release may leave any of them out.
LISTENERS = {"watch": "Watch", "report": "Report", "notices": "Notices"}


def main(args: Args):
    """Trains: each step of the run, from rollout to log.

    Ends early after Ctrl-C or SIGTERM, or if a step fails on all ranks."""
    run = setup(args)  # checks all input; a Run holds engine, networks, pool and log
    log = run.log
    problem = None
    try:
        if run.done == 0 and run.rows["val"]:  # before the first step
            log.metrics({"step": 0} | evaluate(run))

        for step in Bar(range(run.done, args.num_steps), "steps"):
            gather_unless_stopped(None, run.stop.requested)
            run.clock = Clock()

            # ---- 1. rollout: the engine takes the weights, and agent loops fill the batch
            rollouts = collect_rollouts(run, step)
            run.clock.begin_training()

            # ---- 2. score the sampled tokens while the last rewards are computed
            batch = data.make_batch(rollouts.trained, run.processor)  # neither greedy nor filtered
            score_batch(run, batch, step)  # logprobs_old, logprobs_ref and values, if needed
            batch, metrics = add_rewards(run, rollouts, batch)  # drops rows without a reward
            metrics["step"] = step + 1
            name = f"step_{step + 1:06d}"  # of the file of rollouts
            if args.rollout_only:
                log.rollouts(name, rollouts.outputs, rollouts.errors)
                run.end_step()
                log.metrics(metrics | shares_of_peaks(metrics, run.policy.net.model, args))
                continue

            # ---- 3. rewards -> advantages, (B, T): change these lines for a method of your own
            metrics |= set_token_rewards(run, batch, step)  # batch.token_rewards: (N, S)
            state = run.estimator_state
            batch["advantages"] = estimate_advantages(batch, rollouts, args, state, step)
            log.rollouts(name, rollouts.outputs, rollouts.errors, batch)
            run.clock.lap("advantages")
            if args.mask_truncated:
                batch.mask_truncated()

            # ---- 4. update: epochs x mini-batches x packed micro-batches
            metrics |= update(run, batch, step)
            metrics |= batch_metrics(batch, step, args)
            check_agreement(run, batch, step, metrics["rollout/logp_diff_mean"])
            run.end_step()

            # ---- 5. log, evaluate, save
            metrics |= run.clock.read()
            metrics |= shares_of_peaks(metrics, run.policy.net.model, args)
            eval_is_due = args.eval_every > 0 and run.done % args.eval_every == 0
            try:
                if eval_is_due or run.done == args.num_steps:
                    metrics |= evaluate(run)
            finally:  # even if a stop interrupts the evaluation
                log.metrics(metrics, rollouts, batch)
            if args.save_every and (run.done % args.save_every == 0 or run.has_new_best):
                put_to_sleep(run)
                checkpoints.save_checkpoint(run)
            del rollouts, batch  # free this step's images before the next step loads its own
    except (Stopped, RunFailed) as error:  # on all ranks
        problem = error
    finally:
        log.wait()  # a step that failed leaves its rollouts, too
    finish(run, problem)


# ---------------------------------------------------------------- 1. rollout
# The engine stays awake from an evaluation to the next rollout, which has the same weights.
# Code that needs the device for anything else calls `put_to_sleep` first.


def collect_rollouts(run: "Run", step: int) -> Rollouts:
    """Returns the rollouts of a step: sampled, replayed (--replay) or all demonstrated."""
    args = run.args
    if args.replay:
        rollouts = Rollouts(*read_rollouts(replay_file(args, step), run.policy.net.vocab_size))
        if "baselines" in args.estimator_takes and step == 0 and not rollouts.greedy:
            raise BadInput(f"--replay {args.replay}: there are no greedy baselines")
        return rollouts
    awake_if_needed = awake(run) if run.pool.needs_engine else contextlib.nullcontext(0.0)
    with awake_if_needed as sync_s:
        rollouts = run.pool.rollout(step)
    put_to_sleep(run)
    rollouts.sync_s = sync_s
    return rollouts


def sync(engine: Engine, policy: "Policy", version: int) -> float:
    """Wakes a sleeping engine and loads the policy's weights. Returns the seconds that it took."""
    started = time.perf_counter()
    torch.cuda.empty_cache()  # the engine needs the memory that the update left in torch's cache
    engine.wake_weights()
    engine.load_weights(models.checkpoint_weights(policy.model, policy.engine_dtype), version)
    engine.wake_kv()  # vLLM waits for the device here, and empties torch's cache
    return time.perf_counter() - started


@contextlib.contextmanager
def awake(run: "Run") -> Iterator[float]:
    """Wakes the engine for the block, with the current weights, and KEEPS it awake afterwards.

    Only `put_to_sleep` or an error in the block puts it to sleep. What --offload names is in host
    memory meanwhile. Yields the seconds of the sync."""
    seconds = 0.0
    if run.engine.state == "awake" and run.engine.version == run.done:
        run.engine.forget_prompts()  # so an evaluation before a rollout changes none of its numbers
    else:
        offload(run, "cpu")
        seconds = sync(run.engine, run.policy.net, version=run.done)
    try:
        yield seconds
    except BaseException:
        put_to_sleep(run, keep=True)
        raise


def put_to_sleep(run: "Run", keep: bool = False):
    """Frees the device: the engine sleeps, if there is one, and what --offload moved comes back.

    keep: unfinished requests stay, as always with --max_staleness; else they are errors."""
    if run.engine and run.engine.state == "awake":
        run.engine.sleep(keep=keep or run.args.max_staleness > 0)
        offload(run, run.accelerator.device)


# ---------------------------------------------------------------- 2. scores and rewards


def score_batch(run: "Run", batch: data.Batch, step: int):
    """Sets scores of the sampled tokens in the batch, as needed.

    They are logprobs_old, logprobs_ref, values and entropy, (B, T) each. With --kl_kind topK also
    ref_top_ids, the K that the reference finds likeliest, and ref_top_logprobs, (B, T, K)."""
    args = run.args
    run.clock.lap("batch")  # the time to make the batch
    if args.rollout_only:  # nothing is trained
        return
    has_several_updates = args.updates_per_step > 1
    only_critic_learns = step < args.critic_warmup  # so no update computes these logprobs
    kl_is_in_reward = args.kl_coef and args.kl_in == "reward"
    asked = {"logprobs_old", "entropy"} & {*args.estimator_takes}
    if has_several_updates or only_critic_learns or kl_is_in_reward or asked:
        scores = score_tokens(run.policy.net, batch, args, entropy="entropy" in asked)
        batch["logprobs_old"] = scores.pop("logprobs")
        batch.update(scores)
        run.clock.lap("logprobs_old")
    if run.reference:
        seen = batch.get("hinted", batch)  # the same responses, after prompts with hints
        scores = score_tokens(run.reference, seen, args, args.kl_top)
        batch["logprobs_ref"] = scores["logprobs"]
        if args.kl_top:
            batch["ref_top_ids"] = scores["top_ids"]
            batch["ref_top_logprobs"] = scores["top_logprobs"]
        run.clock.lap("logprobs_ref")
    if run.critic:
        batch.update(score_tokens(run.critic.net, batch, args))
        run.clock.lap("values")


@torch.no_grad()
def score_tokens(
    net: "Net", batch: dict, args: Args, top_k: int = 0, entropy: bool = False
) -> dict[str, BT]:
    """Returns scores of all sampled tokens by name, as `Net.forward` does for a micro-batch.

    Each rank scores a share, and gets all. top_k: see `data.pack_rows`. entropy: also that one."""
    mask = batch["response_mask"]
    micro_batches = data.micro_batches_of_this_rank(
        batch, range(len(mask)), args.tokens_per_micro_batch, net.is_packed
    )
    # Scores stay on the device until all are computed, because reading them would wait for it.
    scores = defaultdict(list)  # by name, of each micro-batch
    for micro in Bar(micro_batches, "scoring"):
        for name, values in net(net.pack(batch, micro, top_k)).items():
            if entropy or name != "entropy":
                scores[name].append(values)
    # Rows of other ranks are 0, so the sum over ranks has the scores of all.
    return {
        name: all_sum(scatter_to_rows(mask.shape, micro_batches, values))
        for name, values in scores.items()
    }


def scatter_to_rows(shape: tuple, micro_batches: list[data.MicroBatch], scores: list) -> BT:
    """Returns the scores of micro-batches as one tensor, (B, T) or (B, T, K), 0 in other rows."""
    first = scores[0]  # every rank has a micro-batch, perhaps a filler
    result = torch.zeros(*shape, *first.shape[2:], dtype=first.dtype)
    for micro, values in zip(micro_batches, scores):
        if not micro.is_filler:  # a filler only gives ranks equal numbers of micro-batches
            result[micro.rows] = values.cpu()
    return result


def add_rewards(
    run: "Run", rollouts: Rollouts, batch: data.Batch
) -> tuple[data.Batch, dict[str, float]]:
    """Waits for the rewards. Returns the batch without outputs whose reward failed, and metrics."""
    if run.engine:  # a replayed rollout has its rewards
        wait_for_rewards(rollouts, run.background, run.stop)
    if run.history:  # the task has a `sampler`, which reads these rewards
        units = data.by_unit(rollouts.sampled)
        for prompt, reward in zip(units.prompts.tolist(), units.task_rewards.tolist()):
            run.history[prompt].append(reward)
    metrics = rollouts.metrics(run.engine)
    n_prompts = metrics["rollout/last_prompt"] + 1
    metrics["rollout/epoch"] = n_prompts / len(run.rows["train"])
    run.clock.lap("grading")
    graded = [row for row, output in enumerate(batch.outputs) if output.reward is not None]
    return batch.select(graded), metrics


# ---------------------------------------------------------------- 3. rewards -> advantages


def shape_rewards(units: data.Units, args: Args) -> N:
    """Returns the shaped terminal reward of each unit, (N,); by default a unit is a rollout.

    Change the shape here. Callers add turn rewards, and multiply the sum by --reward_coef."""
    rewards = units.outcomes
    if args.overlong_buffer:
        limit = args.max_response_tokens
        buffer = max(1, round(args.overlong_buffer * limit))
        rewards = rewards + losses.overlong_penalty(units.response_lengths, limit, buffer)
    return rewards


def set_token_rewards(run: "Run", batch: data.Batch, step: int) -> dict[str, float]:
    """Sets batch.token_rewards, (N, S): the shaped rewards at their tokens, times --reward_coef.

    With --kl_in reward, each token's KL is subtracted. With --kl_target as well, the mean KL over
    units adapts its coefficient, from step --critic_warmup on. Returns metrics."""
    args = run.args
    metrics = {}
    has_tokens = batch.layout.mask.any(1)  # (N,), False for demonstrations
    shaped = shape_rewards(batch.units, args)
    batch.token_rewards = args.reward_coef * data.place_rewards(batch, shaped)
    if args.kl_coef and args.kl_in == "reward":
        logprobs = batch["logprobs_old"], batch["logprobs_ref"]
        kl = losses.kl_estimate(*logprobs, args.kl_kind)  # (B, T)
        batch.token_rewards -= run.kl.coef * batch.layout.to_units(kl)  # (N, S)
        mask = batch["response_mask"]
        unit_tokens = batch.count_unit_tokens()
        mean_kl = losses.aggregate(kl, mask, "seq-mean-token-mean", unit_tokens=unit_tokens)
        metrics["actor/kl"] = mean_kl.item()
        metrics["actor/kl_coef"] = run.kl.coef
        if args.kl_target and step >= args.critic_warmup:
            run.kl.update(mean_kl.item(), has_tokens.sum().item())
    metrics["reward/shaped_mean"] = mean(batch.shaped_rewards[has_tokens])
    return metrics


def greedy_baselines(rollouts: Rollouts, units: data.Units, args: Args) -> N:
    """Returns the mean shaped reward, without KL, of the greedy units in each unit's group."""
    greedy = data.by_unit(rollouts.greedy)
    rewards = args.reward_coef * (greedy.turn_rewards + shape_rewards(greedy, args))
    baselines = [rewards[greedy.groups == group].mean() for group in units.groups]  # NaN: none
    return torch.stack(baselines)


def estimate_advantages(
    batch: data.Batch,
    rollouts: Rollouts,
    args: Args,
    state: dict | None = None,
    step: int = 0,
) -> BT:
    """Returns the advantages by --adv_estimator, (B, T), whitened with --whiten_advantages.

    The estimator (`losses.estimator`) sees each unit as one sequence (data.EndToEnd). If it takes
    values, batch["returns"] is set, too, and batch["batch_stats/NAME"], (B, T), from a dict that it
    returns. Raises BadInput for wrong results."""
    estimate = losses.ESTIMATORS[args.adv_estimator]
    layout = batch.layout
    mask = layout.mask
    inputs = data.estimator_inputs(batch, estimate.takes)
    inputs |= {"args": args, "state": state, "step": step, "num_steps": args.num_steps}
    if "baselines" in estimate.takes:
        inputs["baselines"] = greedy_baselines(rollouts, batch.units, args)
    set_seed(data.stable_hash(args.seed, step) % 2**32)  # all ranks draw the same numbers
    results = estimate(**{name: inputs[name] for name in estimate.takes})
    flag = f"--adv_estimator {args.adv_estimator}"
    results = [*results] if isinstance(results, tuple | list) else [results]
    batch_stats = results.pop() if results and isinstance(results[-1], dict) else {}
    has_stats = batch_stats or "batch_stats" not in args.objective_takes
    need(has_stats, f"--policy_loss {args.policy_loss} asks for batch_stats: {flag} gives none")
    names = ["advantages", "returns"] if "values" in inputs else ["advantages"]
    need(len(results) == len(names), f"{flag} must return {' and '.join(names)}")
    columns = dict(zip(names, results))
    for name, column in batch_stats.items():
        column = torch.as_tensor(column)
        columns[f"batch_stats/{name}"] = column if column.ndim else column.expand_as(mask)
    for name, column in columns.items():
        columns[name] = data.expanded_to_tokens(column, mask, f"{flag} gives {name}")

    advantages = columns.pop("advantages")
    batch.update({name: layout.to_outputs(column) for name, column in columns.items()})
    if args.whiten_advantages:
        advantages = losses.whiten(advantages, mask)
    return layout.to_outputs(advantages)


# ---------------------------------------------------------------- 4. update


def update(run: "Run", batch: data.Batch, step: int) -> dict[str, float]:
    """Trains policy and critic: epochs x mini-batches x packed micro-batches.

    Sets batch["unit_tokens"]. Returns mean metrics. With several updates, `score_batch` has set
    batch["logprobs_old"]. A single update takes its own logprobs as old, and may set them there."""
    args = run.args
    batch["unit_tokens"] = batch.count_unit_tokens()  # (B,), after mask_truncated
    # The columns that the objectives read. The critic does not learn from demonstrations.
    of_critic = ["response_mask", "unit_tokens", "values", "returns"]
    of_policy = ["response_mask", "unit_tokens", "advantages", "versions", "logprobs_rollout"]
    optional = {"logprobs_ref", "ref_top_logprobs", "imitation_mask"}
    optional |= {name for name in batch if name.startswith("batch_stats/")}
    of_policy += sorted(optional & batch.keys())
    if args.updates_per_step > 1:
        of_policy.append("logprobs_old")
    objective = functools.partial(policy_objective, step=step, state=run.estimator_state)

    prompts = batch.units.prompts[batch.units.unit_of_row]  # (B,)
    lr = run.policy.set_lr(max(0, step - args.critic_warmup))
    if run.critic:
        run.critic.set_lr(step)

    updates = []  # the metrics of each, by a network

    def before_pass():
        if not updates:  # no network has learnt from this step, so a stop may drop it
            gather_unless_stopped(None, run.stop.is_out_of_time)

    seeds = [data.stable_hash(args.seed, step, epoch) for epoch in range(args.epochs)]
    for rows in data.mini_batches(prompts, args.updates_per_epoch, seeds):
        if step >= args.critic_warmup:
            metrics, logprobs = optimise(
                run.policy, objective, batch, of_policy, rows, before_pass, args.loss_agg
            )
            if "logprobs_old" not in batch:  # this is the only update of the step, of all rows
                batch["logprobs_old"] = all_sum(logprobs)  # to be compared with the engine's
            updates.append(metrics)
            run.clock.lap("policy")
        if run.critic:
            metrics, _ = optimise(run.critic, value_objective, batch, of_critic, rows, before_pass)
            metrics["critic/vf_loss"] = metrics.pop("critic/loss")
            updates.append(metrics)
            run.clock.lap("critic")
    move_reference(run)
    return means(updates) | {"actor/lr": lr, "actor/adam_steps": run.policy.n_updates}


@torch.no_grad()
def move_reference(run: "Run"):
    """Moves the reference's weights by the share --ref_update to the policy's."""
    if run.args.moves_reference:
        for old, new in zip(run.reference.parameters(), run.policy.net.parameters(), strict=True):
            old.add_(new - old, alpha=run.args.ref_update)


def policy_objective(
    scores: dict[str, BT], columns: dict, args: Args, step: int = 0, state: dict | None = None
) -> LossAndStats:
    """Returns the policy's loss per token, (b, T), and its stats.

    The loss is --policy_loss times the weights of --rollout_correction, minus the entropy bonus,
    plus the KL to the reference; at demonstrated tokens it is --policy_loss alone. step, state:
    for an objective that asks for them. The ratio is that of this forward pass to
        the engine's logprobs                with --rollout_correction bypass
        logprobs_old                         if that is among the columns (several updates)
        this forward pass itself, detached   otherwise: it is 1"""
    logprobs = scores["logprobs"]  # (b, T)
    entropy = scores["entropy"]  # (b, T)
    mask = columns["response_mask"]
    old = columns.get("logprobs_old", logprobs.detach())
    logprobs_rollout = columns["logprobs_rollout"]
    kind, low, high = args.correction
    ratio_to = logprobs_rollout if kind == "bypass" else old
    optional = {"logprobs_rollout", "logprobs_ref", "versions"} & columns.keys()
    prefix = "batch_stats/"
    batch_stats = {x.removeprefix(prefix): columns[x] for x in columns if x.startswith(prefix)}
    loss, stats = losses.policy_loss(
        args.policy_loss,
        logprobs,
        ratio_to,
        columns["advantages"],
        mask,
        clip_low=args.clip_low,
        clip_high=args.clip_high,
        clip_c=args.clip_c or None,
        demonstrated=columns.get("imitation_mask"),
        entropy=entropy,
        batch_stats=batch_stats,
        state=state,
        step=step,
        num_steps=args.num_steps,
        args=args,
        **{name: columns[name] for name in optional},
    )
    uncorrected = loss
    # All 1 with none and bypass. metrics.batch_metrics computes the stats, of the whole batch.
    weights, _ = losses.rollout_correction(kind, old, logprobs_rollout, mask, low, high)
    loss = loss * weights
    stats = {"pg_loss": loss.detach(), "entropy": entropy.detach(), **stats}

    if args.entropy_coef:
        loss = loss - args.entropy_coef * entropy
    if args.kl_coef and args.kl_in == "loss":
        if "top_logprobs" in scores:  # (b, T, K)
            kl = losses.top_kl(scores["top_logprobs"], columns["ref_top_logprobs"])
        else:
            kl = losses.kl_estimate(logprobs, columns["logprobs_ref"], args.kl_kind)
        loss = loss + args.kl_coef * kl
        stats["kl"] = kl.detach()
    if "imitation_mask" in columns:
        loss = torch.where(columns["imitation_mask"].bool(), uncorrected, loss)
    return loss, stats


def value_objective(scores: dict[str, BT], columns: dict, args: Args) -> LossAndStats:
    """Returns the critic's loss per token, (b, T), and its stats: `losses.value_loss`, clipped."""
    old = columns["values"]
    mask = columns["response_mask"]
    return losses.value_loss(scores["values"], old, columns["returns"], mask, VALUE_CLIP)


def optimise(
    learner: "Learner",
    objective: Callable,
    batch: dict,
    names: list[str],
    rows: list[int],
    before_pass: Callable = lambda: None,
    loss_agg: str = "token-mean",
) -> tuple[dict, BT]:
    """Takes one optimiser step on some rows. All ranks pass the same rows; each computes its share.

    objective(scores, columns, args) -> loss per token (b, T), stats {name: (b, T)}. scores: what
    the network returns for b rows. columns: the batch's tensors of these `names`, for these rows.
    before_pass: called before each micro-batch, on all ranks; it may raise Stopped.
    loss_agg: a mode of losses.aggregate; demonstrated tokens add their mean.

    Returns metrics (most names begin with the learner's), and the logprobs or values of this
    rank's rows, (B, T), 0 in the rows of others."""
    args = learner.args
    accelerator = learner.accelerator
    mask = batch["response_mask"][rows]  # of the whole mini-batch, which every rank holds
    counts = {
        "tokens": mask.sum().item(),
        "units": losses.count_sequences(mask, batch["unit_tokens"][rows]).item(),
        "imitation_tokens": 0,
    }
    if "imitation_mask" in names:
        counts["imitation_tokens"] = batch["imitation_mask"][rows].sum().item()
    micro_batches = data.micro_batches_of_this_rank(
        batch, rows, args.tokens_per_micro_batch, learner.net.is_packed
    )
    # Sums and scores stay on the device: reading a number there would wait for the whole pass.
    sums = defaultdict(float)  # name of a metric -> its sum over micro-batches
    own_scores = []  # of each micro-batch
    for i, micro in enumerate(Bar(micro_batches, "update")):
        before_pass()
        packed = learner.net.pack(batch, micro)
        of_rows = data.columns_of(batch, micro, names, accelerator.device)
        # Ranks average gradients in the last pass alone; FSDP, whose are sharded, in every one.
        is_delayed = i < len(micro_batches) - 1 and not args.shard
        with accelerator.no_sync(learner.wrapped) if is_delayed else contextlib.nullcontext():
            scores = learner.wrapped(packed)
            loss, shares = micro_batch_loss(objective, scores, of_rows, counts, args, loss_agg)
            (loss * dist.get_world_size()).backward()  # DDP and FSDP average over ranks
        own_scores.append(scores[learner.net.trained_score].detach())
        for name, share in shares.items():
            sums[f"{learner.name}/{name}"] += share
        n_unique = 0 if micro.is_filler else packed["inputs"]["input_ids"].numel()
        sums["batch/unique_tokens"] += n_unique  # the same for policy and critic

    grad_norm = learner.step(has_tokens=any(counts.values()))
    # All ranks have the same metrics in the same order: each has a micro-batch, perhaps a filler.
    totals = all_sum(torch.tensor(list(sums.values()), dtype=torch.float64))
    metrics = dict(zip(sums, totals.tolist()))
    metrics["batch/tokens"] = batch["lengths"][rows].sum().item()  # prompts included
    metrics[f"{learner.name}/grad_norm"] = grad_norm
    return metrics, scatter_to_rows(batch["response_mask"].shape, micro_batches, own_scores)


def micro_batch_loss(
    objective: Callable,
    scores: dict[str, BT],
    columns: dict,
    counts: dict,
    args: Args,
    loss_agg: str,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns a micro-batch's share of the loss, a scalar, and of each metric, detached.

    The shares add up over micro-batches and ranks. See `optimise`."""
    mask = columns["response_mask"]  # (b, T)
    loss_of_tokens, stats = objective(scores, columns, args)
    loss = losses.aggregate(
        loss_of_tokens,
        mask,
        loss_agg,
        n_tokens=counts["tokens"],
        n_seqs=counts["units"],
        max_len=args.max_response_tokens,
        unit_tokens=columns["unit_tokens"],
    )
    shares = {}
    if counts["imitation_tokens"]:
        imitation_loss = losses.aggregate(
            loss_of_tokens,
            columns["imitation_mask"],
            n_tokens=counts["imitation_tokens"],
        )
        loss = loss + imitation_loss
        shares["imitation_loss"] = imitation_loss.detach()
    shares["loss"] = loss.detach()
    if counts["tokens"]:
        for name, values in stats.items():
            total = torch.where(mask.bool(), values, 0).sum()
            shares[name] = total / counts["tokens"]
    return loss, shares


# ---------------------------------------------------------------- 5. metrics and evaluation


def check_agreement(run: "Run", batch: data.Batch, version: int, difference: float):
    """Ends the run, by BadInput on all ranks, if engine and trainer differ too much.

    version: of the weights before the update. difference: the mean one of logprobs. Only warns,
    once, with --allow_mismatch or --sampling_args that change the engine's distribution."""
    args = run.args
    is_quantized = '"quantization"' in args.engine_args
    bound = 0.1 if is_quantized or args.dtype == "bfloat16" else 1e-3
    if not run.engine or run.mismatch_is_known or difference <= bound:
        return
    problem = disagreement(run.tokenizer, batch, version, difference, bound)
    if args.allow_mismatch or args.sampling().keys() - NEUTRAL_SAMPLING:
        run.log.warn(problem)
        run.mismatch_is_known = True
        return
    close(run)  # on all ranks together; otherwise the others would report a lost rank
    raise BadInput(f"{problem}; --allow_mismatch trains anyway")


def evaluate(run: "Run") -> dict:
    """Evaluates on the validation rows, with --eval_sampling_args. Returns metrics.

    Running training rollouts finish first, or are cancelled after the last step."""
    args = run.args
    rows = run.rows["val"]
    if not rows:  # as with --replay, which has no engine
        return {}
    with awake(run):
        # Rollouts for training must not sample meanwhile.
        if run.done == args.num_steps:
            run.pool.end()
        else:
            run.pool.finish_running()
        sampling = args.sampling(validate=True)
        rollouts = rollout(run, rows, run.done, args.eval_samples, sampling, kind="eval")
    run.log.rollouts(f"eval_{run.done:06d}", rollouts.outputs, rollouts.errors)
    units = data.by_unit(rollouts.outputs)
    metrics = describe_eval(rollouts.outputs, units, rows)
    run.evals[run.done] = metrics["eval/reward"]
    metrics["eval/failed"] = sum(rollouts.lost.values())
    metrics["timing/eval_s"] = rollouts.seconds
    return metrics


# ---------------------------------------------------------------- networks, sharded or whole


class Net(nn.Module):
    """A transformers model that gives scores to sampled tokens. A subclass says which scores.

    It stays in evaluation mode, because the trained network must be the one that sampled. If
    `is_packed`, rows are joined without padding and have packed attention; otherwise they are
    right-padded and have the model's own.

    A subclass's scores_from_hidden(hidden (M, H), packed) returns {name: (M,) or (M, K)} from the
    hidden states that predict M tokens (data.pack_rows); `trained_score` names one of them."""

    trained_score: str

    def __init__(self, auto_class: str, args: Args, vision, is_packed: bool):
        super().__init__()
        self.routers = None  # Routers with --router_replay
        self.vision = vision
        self.is_packed = is_packed
        attention = "packed" if is_packed else None  # None: the model's own
        if is_packed and vision:
            attention = {"text_config": "packed", "vision_config": "sdpa"}
        self.model = models.load_for_training(auto_class, args, attention)
        layers.prepare_layers(self.model, args.gradient_checkpointing)

    def pack(self, batch: dict, micro: data.MicroBatch, top_k: int = 0) -> dict:
        """Packs a micro-batch for this network (`data.pack_rows`)."""
        device = next(self.parameters()).device
        return data.pack_rows(batch, micro, device, self.is_packed, top_k, bool(self.routers))

    def forward(self, packed: dict) -> dict[str, Tensor]:
        """Returns scores of R rows' sampled or demonstrated tokens: {name: (R, T)}, 0 elsewhere.

        packed: `data.pack_rows` of these rows. DDP averages gradients of what happens in here."""
        backbone = self.model.base_model
        inputs = packed["inputs"]
        if self.routers:
            self.routers.choose(packed["routes"])
        zero_of_vision = 0
        if self.vision and packed["images"]:
            inputs = inputs | self.vision.inputs(backbone, packed)
        elif self.vision:
            # Without images the tower adds 0: all ranks must use all parameters. It runs before
            # the text, as it does with images, because FSDP's ranks gather layers in one order.
            zero_of_vision = self.vision.zero(backbone, packed["targets"].device)
        hidden = backbone(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)  # (P, H)
        predicting = hidden[packed["source"]] + zero_of_vision  # (M, H)
        results = {}
        for name, scores in self.scores_from_hidden(predicting, packed).items():
            # Rows that agree up to a token share its prediction: see data._predictions.
            zeros = scores.new_zeros(*packed["shape"], *scores.shape[1:])
            results[name] = zeros.index_put(packed["at"], scores[packed["prediction"]])
        return results


class Policy(Net):
    """Gives log-probabilities and entropies of the sampled tokens.

    Token ids from vocab_size on belong to a padded vocabulary and have no probability."""

    trained_score = "logprobs"

    def __init__(self, args: Args, vocab_size: int | None = None, vision=None):
        auto_class = "AutoModelForImageTextToText" if vision else "AutoModelForCausalLM"
        # A text model is packed only if `choose_attention`, below, finds that it can be.
        super().__init__(auto_class, args, vision, is_packed=bool(vision))
        # In a list, so that nn.Module does not register it a second time.
        self.head = [self.model.get_output_embeddings()]
        self.logit_settings = models.logit_settings(self.model, args) | {
            "vocab_size": vocab_size,
            "banned": [vision.image_token_id] if vision else [],  # the engine never samples it
        }
        self.vocab_size = vocab_size
        self.engine_dtype = getattr(torch, args.dtype, torch.float32)
        if not vision:
            probe = data.in_prefix_order(layers.PROBE, [0, 1, 2])
            layers.choose_attention(self, probe, args)
        if args.router_replay:
            self.routers = Routers(self.model, args.model)
        if args.lora_rank:
            layers.add_adapters(self.model, args)

    def scores_from_hidden(self, hidden, packed):
        """Returns logprobs and entropy of the targets, (M,) each. With top_k, also logprobs and ids
        of the likeliest; with (M, 1 + K) targets, logprobs of the other K ids: (M, K) each."""
        weight = self.head[0].weight
        logprobs, entropy = losses.token_logprobs(
            hidden, weight, packed["targets"], entropy=True, **self.logit_settings
        )
        scores = {"logprobs": logprobs, "entropy": entropy}
        if packed["top_k"]:
            top = losses.top_logprobs(hidden, weight, packed["top_k"], **self.logit_settings)
            scores["top_logprobs"], scores["top_ids"] = top
        elif logprobs.ndim == 2:
            scores["logprobs"] = logprobs[:, 0]
            scores["top_logprobs"] = logprobs[:, 1:]
        return scores


class Critic(Net):
    """Gives the value of the state before each sampled token.

    It has a backbone of its own, and a linear head that starts at 0."""

    trained_score = "values"

    def __init__(self, args: Args, vision=None, is_packed: bool = True):
        super().__init__("AutoModel", args, vision, is_packed)
        config = self.model.config.get_text_config()
        self.head = nn.Linear(config.hidden_size, 1)
        for p in self.head.parameters():
            nn.init.zeros_(p)

    def scores_from_hidden(self, hidden, packed):
        """Returns the values, (M,). Not by self.head(hidden): autocast would give bfloat16."""
        values = (hidden.float() * self.head.weight).sum(-1) + self.head.bias
        return {"values": values}


@dataclass(eq=False)
class Learner:
    """A network with its optimisers. Call `wrapped`, in DDP or FSDP, when you need gradients."""

    net: Net
    lr: float  # of AdamW, before the schedule
    num_steps: int  # in which it learns
    args: Args
    accelerator: Accelerator
    name: str = "actor"  # or "critic": the first part of its metrics' names
    task: ModuleType | None = None  # which may define the optimisers

    def __post_init__(self):
        self.wrapped = wrap(self.net, self.args, self.accelerator)
        layers.set_master_dtype(self.net, self.args)
        self.optimizers = self.make_optimizers()
        self.rates = [group["lr"] for group in self.groups]  # before the schedule
        self.n_updates = 0

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns AdamW, or what the task's optimizer(model, args) returns: one or several.

        model: transformers' part of the net. Raises BadInput if they are no optimisers of torch."""
        if not hasattr(self.task, "optimizer"):
            is_cuda = self.accelerator.device.type == "cuda"
            parameters = self.net.parameters()
            return [torch.optim.AdamW(parameters, self.lr, weight_decay=0.0, fused=is_cuda)]
        name = f"--task {self.args.task}: optimizer"
        with refusing(f"{name} failed", self.args.task):
            made = self.task.optimizer(self.net.model, self.args)
        optimizers = made if isinstance(made, list) else [made]
        for each in optimizers:
            is_one = isinstance(each, torch.optim.Optimizer)
            need(is_one, f"{name} returned {each!r:.80}, no torch optimiser")
        return optimizers

    @property
    def groups(self) -> list[dict]:
        """The optimisers' groups of parameters, with the settings of each."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def set_lr(self, step: int) -> float:
        """Sets each group's learning rate by --lr_schedule, and returns that of the first.

        step: from 0, of those in which it learns."""
        factor = models.lr_factor(self.args, self.num_steps, step)
        for group, rate in zip(self.groups, self.rates, strict=True):
            group["lr"] = rate * factor
        return self.groups[0]["lr"]

    def step(self, has_tokens: bool) -> float:
        """Takes an optimiser step with the current gradients, clipped, and clears them.

        has_tokens: if False, it takes none, because momentum would move the weights. Returns the
        norm of the gradients. Raises RunFailed if that is not finite."""
        parameters = self.wrapped.parameters()
        norm = self.accelerator.clip_grad_norm_(parameters, self.args.max_grad_norm)
        norm = models.whole(norm).item()
        if not math.isfinite(norm):
            raise RunFailed(f"the gradient norm is {norm}: the weights are saved without it")
        if has_tokens:
            if not self.n_updates:
                # The optimisers' states should not occupy blocks that held activations.
                torch.cuda.empty_cache()
            for optimizer in self.optimizers:
                optimizer.step()
            self.n_updates += 1
        self.net.zero_grad(set_to_none=True)
        return norm


# ---------------------------------------------------------------- start and end of a run


@dataclass
class Run:
    """Everything that lives from the start of a run to its end."""

    args: Args
    accelerator: Accelerator
    store: dist.Store  # shared by the ranks
    stop: Stop
    log: Log
    task: ModuleType
    tokenizer: object
    processor: object  # None for a text model
    rows: dict[str, list[dict]]  # "train", "val"
    engine: Engine | None  # None with --replay
    policy: Learner
    critic: Learner | None
    reference: Callable | None  # acts like a Net: see build_reference
    kl: losses.AdaptiveKL  # its coefficient is constant without --kl_target
    # For a task's sampler, an entry for each prompt that it has drawn, in their order:
    # [number of its row, steps done by then, then a reward for each unit, once they are known].
    history: list[list] = field(default_factory=list)
    estimator_state: dict = field(default_factory=dict)  # the same on all ranks
    clock: Clock = field(default_factory=Clock)  # of the parts of this step
    evals: dict[int, float] = field(default_factory=dict)  # eval/reward by steps done
    done: int = 0  # steps
    kept: dict = field(default_factory=dict)  # for a checkpoint: state after the last whole step
    saved: int = 0  # steps done at the last checkpoint
    mismatch_is_known: bool = False  # engine and trainer disagree, and the user was warned
    pool: Pool | None = None  # None with --replay
    background: Background = field(default_factory=Background)

    @property
    def folder(self) -> Path:
        return Path(self.args.output_dir)

    @property
    def learners(self) -> dict[str, Learner]:
        """The networks that learn, by their names in a checkpoint."""
        learners = {"policy": self.policy}
        if self.critic:
            learners["critic"] = self.critic
        return learners

    @property
    def has_new_best(self) -> bool:
        """Whether there is an evaluation after the last step, and it is the best so far."""
        return self.done == max(self.evals, key=self.evals.get, default=None)

    def end_step(self):
        """Counts a step. A checkpoint saved during the next one keeps what is known now.

        Raises BadInput if the estimator's state can't be saved."""
        self.done += 1
        # Not as JSON, which would make integer keys texts.
        with refusing(f"--adv_estimator {self.args.adv_estimator}: pickle can't save its `state`"):
            state = pickle.dumps(self.estimator_state)
        self.kept = {"kl_coef": self.kl.coef, "estimator": state}


def setup(args: Args) -> Run:
    """Checks all input, raising BadInput, and completes args. Then loads engine and networks."""
    quiet_libraries()
    accelerator, store, task, all_rows = check_input(args)
    device = accelerator.device
    tokenizer, processor = models.load_tokenizer(args, task)
    flags = {"train": args, "val": replace(args, hints=False)}  # an evaluation has no hints
    rows = {}
    for split, found in all_rows.items():
        rows[split] = data.filter_overlong(found, tokenizer, task, flags[split], processor)

    # Refuse a model that can't be run or trained, and a run that can't be resumed.
    vocab_size = models.vocab_size(tokenizer)
    check_model(args, device)
    register_packed_attention()
    vision = Vision(processor) if processor else None
    policy = Policy(args, vocab_size, vision)
    reference = build_reference(args, policy)  # may be refused, so it comes before the engine
    rows_hash = on_main(hash_of_rows, rows["train"], args.seed)
    checkpoint, state = on_main(checkpoints.read_checkpoint, args, rows_hash)

    stop = Stop(store)
    log = SilentLog()
    if accelerator.is_main_process:
        log = Log(args, tokenizer, state.get("step", 0), rows_hash)
        log.listeners = listeners(log)
        log.notify("start", rows, all_rows, policy, device, task)  # the engine takes minutes
    engine = None
    if not args.replay:
        image_token_id = getattr(processor, "image_token_id", None)
        stops = models.stop_token_ids(args, tokenizer)
        engine = Engine(args.model, args, device, stops, vocab_size, image_token_id)
    learner, critic, reference = build_networks(args, accelerator, policy, reference, task)
    run = Run(
        args=args,
        accelerator=accelerator,
        store=store,
        stop=stop,
        log=log,
        task=task,
        tokenizer=tokenizer,
        processor=processor,
        rows=rows,
        engine=engine,
        policy=learner,
        critic=critic,
        reference=reference,
        kl=losses.AdaptiveKL(args.kl_coef, args.kl_target),
    )
    if checkpoint:
        checkpoints.resume(run, checkpoint, state)
    fit_micro_batch(run.learners, args, device, log.say)
    if engine:
        run.pool = training_pool(run, run.done, state.get("next_prompt", 0))
    return run


def listeners(log: Log) -> list[Listener]:
    """Returns those of LISTENERS that are in flatrl/, and --tracker's."""
    found = []
    for module, name in LISTENERS.items():
        if importlib.util.find_spec(f"flatrl.{module}"):
            listener = getattr(importlib.import_module(f"flatrl.{module}"), name)
            found.append(listener(log))
    if log.args.tracker:
        from flatrl.trackers import Tracker

        found.append(Tracker(log))
    return found


def check_input(args: Args) -> tuple:
    """Checks flags, task and rows, and completes args. Raises BadInput.

    Returns the accelerator, the ranks' store, the task and its rows by split."""
    check_args(args)
    accelerator, store = start_processes(args)  # first, so that errors below reach all ranks
    complete_flags(args, accelerator.device.type == "cuda")
    needed = ["reward"]
    if not (args.train_files and (args.val_files or not args.evaluates)):
        needed.append("load")
    if not args.model:
        needed.append("build_model")
    task = data.load_task(args.task, needed)
    args.agent = args.agent or default_agent(task)
    check_registered(args)
    args.task = task.__file__
    keys = args.prompt_key, args.image_key
    rows = {"train": data.load_rows(task, "train", args.train_files, *keys), "val": []}
    if args.evaluates:
        rows["val"] = data.load_rows(task, "val", args.val_files, *keys)
    hashes = {f"{split} rows": hash_of_rows(rows[split], args.seed) for split in rows}
    check_ranks_agree({f"--{name}": value for name, value in vars(args).items()} | hashes)
    need(args.num_steps or rows["val"], "--num_steps 0: no validation rows, or --eval_every -1")
    if args.hints:
        has_hint = any(row.get("hint") for row in rows["train"])
        need(has_hint, "--hints (--algo opsd): no training row has a 'hint'")
    if args.algo == "sft" or args.imitation_steps:
        rows["train"] = data.demonstrated(rows["train"], only=args.algo == "sft")
    args.resume = on_main(checkpoints.claim_folder, args)
    if not args.model:
        args.model = on_main(models.task_model, task, args)  # minutes, if it is not built yet
    return accelerator, store, task, rows


def build_reference(args: Args, policy: Policy) -> Callable | None:
    """Returns the network that the KL compares with, frozen unless --ref_update moves it, or None.

    It is --ref_model or the starting model; with LoRA, the policy without its adapters."""
    if not args.has_reference or args.rollout_only:
        return None
    if args.ref_update == 1:
        return policy
    if args.lora_rank and not args.ref_model:
        return layers.WithoutAdapters(policy)

    args = replace(
        args,
        model=args.ref_model or args.model,
        lora_rank=0,
        router_replay=args.router_replay and not args.ref_model,  # a teacher has other experts
    )
    return Policy(args, policy.vocab_size, policy.vision).requires_grad_(False)


def build_networks(args: Args, accelerator, policy: Policy, reference, task: ModuleType) -> tuple:
    """Returns the policy's Learner, the critic's or None, and the reference, on the device.

    reference: as from `build_reference`. Resets the random seeds."""
    set_seed(args.seed)  # an engine's start and a task may have drawn random numbers
    critic = None
    if "values" in args.estimator_takes and not args.rollout_only:
        net = Critic(args, policy.vision, policy.is_packed)
        critic = Learner(net, args.critic_lr, args.num_steps, args, accelerator, "critic")
    if isinstance(reference, Policy) and reference is not policy:  # it has its own weights
        reference = wrap(reference, args, accelerator, frozen=True)
        if args.moves_reference:
            reference.float()  # a shard may be in bfloat16, too coarse for small moves
    n_steps = args.num_steps - args.critic_warmup
    return Learner(policy, args.lr, n_steps, args, accelerator, task=task), critic, reference


def finish(run: Run, problem: Exception | None = None):
    """Saves the last checkpoint and, if training is complete, the policy in Hugging Face format.

    Raises the problem that has ended the training, if any, and BadInput if saving fails."""
    args = run.args
    say = run.log.say
    for learner in run.learners.values():  # an update may have been dropped
        learner.net.zero_grad(set_to_none=True)
    put_to_sleep(run)
    if not args.rollout_only:
        checkpoints.save_checkpoint(run)
    final = run.folder / "final"
    best = checkpoints.best_checkpoint(run)
    if args.rollout_only:
        say(f"{run.done} steps of rollouts are in {run.folder / 'rollouts'}")
    elif run.done < args.num_steps:
        say(f"stopped after step {run.done}")
    elif run.done:  # --num_steps 0 only evaluates
        checkpoints.save_policy(run, final)
        which = "best" if run.rows["val"] else "latest"
        say(f"the trained policy is in {final}, the {which} saved checkpoint is {best}")
    close(run)
    if problem:
        raise problem


def close(run: Run):
    """Ends everything that a run holds, on all ranks together. Then the process can exit."""
    if run.pool:
        run.pool.end()  # the last evaluation may have ended it: then this does nothing
    run.log.wait()
    run.log.notify("close")
    run.background.close()
    all_gather(None)  # waits for the other ranks: closing an engine ends the process group
    if run.engine:
        offload(run, "cpu")  # frees the device: closing maps the engine's memory once more
        run.engine.close()


if __name__ == "__main__":
    run_as_script(main, parse_args)
