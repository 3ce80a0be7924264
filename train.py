"""flatrl: multi-turn reinforcement learning of language models.

`main` is the whole algorithm. The functions that it calls follow in the order of a step, then
the networks, then the start and the end of a run.

    accelerate launch train.py                               # the built-in task, minutes on CPU
    accelerate launch train.py --algo dapo --clip_high 0.3   # a preset; your flags override it
    accelerate launch train.py --model Qwen/Qwen2.5-0.5B-Instruct --task my_task.py
    torchrun --nproc_per_node 2 train.py                     # two ranks on a CPU

One process per GPU holds a vLLM engine and the policy, and alternates rollout and update."""

from flatrl.launch import prepare_process

if __name__ == "__main__":
    prepare_process()  # before torch is imported, which takes seconds

import contextlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from types import ModuleType

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

import data
import losses
from agent_loop import BadInput, tool_parser, total_reward
from flatrl import checkpoints, layers, models, notices
from flatrl.args import (  # noqa: F401
    PRESETS, Args, check_args, check_registered, complete_flags, parse_args)
from flatrl.bad_input import need
from flatrl.devices import check_memory, fit_micro_batch, offload, shard, start_processes
from flatrl.hints import require_hints, seen_by
from flatrl.log import Log, SilentLog, read_rollouts, replay_file
from flatrl.metrics import batch_metrics, describe_eval, disagreement, mean
from flatrl.processes import (
    Background, Stop, Stopped, all_sum, gather_unless_stopped, on_main, run_as_script)
from flatrl.terminal import Bar, quiet_libraries, shown
from flatrl.vision import Vision
from flatrl.vllm_engine import NEUTRAL_SAMPLING, check_model
from rollout import Engine, Pool, Rollouts, rollout, seed_of, training_pool, wait_for_rewards


def main(args: Args):
    """Trains: each step of the run, from rollout to log. Ends early if it is told to stop."""
    run = setup(args)  # checks all input first; engine, networks, pool and log hang from it
    log = run.log
    with contextlib.suppress(Stopped):  # raised on all ranks together
        if run.done == 0 and run.engine and not args.rollout_only:
            log.metrics({"step": 0} | evaluate(run))

        for step in Bar(range(run.done, args.num_steps), "steps"):
            gather_unless_stopped(None, run.stop.requested)
            started = time.perf_counter()

            # ---- 1. rollout: the engine takes the weights, and agent loops fill the batch
            rollouts = collect_rollouts(run, step)
            rollout_ended = time.perf_counter()

            # ---- 2. score the sampled tokens while the last graders work, then get the rewards
            batch = data.make_batch(rollouts.trained, run.processor)
            score_batch(run, batch, step)  # logprobs_old, logprobs_ref, values: if they are used
            metrics = {"step": step + 1}
            batch = add_rewards(run, rollouts, batch, metrics)
            if run.engine:
                log.rollouts(f"step_{step + 1:06d}", rollouts.outputs, rollouts.errors)
            if args.rollout_only:
                run.done = step + 1
                log.metrics(metrics)
                continue

            # ---- 3. rewards -> advantages: the lines to change
            metrics |= set_token_rewards(run, batch, step)
            batch["advantages"] = estimate_advantages(batch, rollouts, args)  # (B, T)
            if args.mask_truncated:
                mask_truncated(batch)

            # ---- 4. update: epochs x mini-batches x packed micro-batches, over global counts
            metrics |= update(run, batch, step)
            metrics |= rollouts.group_metrics() | batch_metrics(batch, step, args)
            check_agreement(run, batch, step, metrics["rollout/logp_diff_mean"])
            run.done = step + 1

            # ---- 5. log, evaluate, save
            metrics["timing/train_s"] = time.perf_counter() - rollout_ended
            metrics["timing/step_s"] = time.perf_counter() - started
            eval_is_due = args.eval_every and run.done % args.eval_every == 0
            save_is_due = args.save_every and run.done % args.save_every == 0
            try:
                if eval_is_due or run.done == args.num_steps:
                    metrics |= evaluate(run)
            finally:  # also if the evaluation is told to stop
                log.metrics(metrics, rollouts, batch)
            if save_is_due:
                put_to_sleep(run)
                checkpoints.save_checkpoint(run)
            del rollouts, batch  # free the images of a step before those of the next one come
    finish(run)


# ---------------------------------------------------------------- 1. rollout
# The engine stays awake from an evaluation to the next rollout, which has the same weights.
# Whoever needs the device for anything else calls `put_to_sleep` first.


def collect_rollouts(run: "Run", step: int) -> Rollouts:
    """Returns the rollouts of a step: sampled by the present weights, or replayed (--replay).

    If the step only plays demonstrations, the engine stays asleep."""
    args = run.args
    if args.replay:
        file = replay_file(args, step)
        rollouts = Rollouts(*read_rollouts(file, run.policy.net.vocab_size))
        if "baselines" in args.estimator_takes and step == 0 and not rollouts.greedy:
            raise BadInput(f"--replay {args.replay}: there are no greedy baselines")
        return rollouts
    if not run.pool.needs_engine:
        put_to_sleep(run)
        return run.pool.rollout(step)
    with awake(run) as sync_s:
        rollouts = run.pool.rollout(step)
    rollouts.sync_s = sync_s
    return rollouts


def named_weights(policy: "Policy") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields whole tensors for the engine, one at a time, with their names in a checkpoint."""
    return models.checkpoint_weights(policy.model, policy.dtype)


@shown("weights to the engine")
def sync(engine: Engine, policy: "Policy", version: int) -> float:
    """Wakes a sleeping engine and loads the policy's weights as `version`. Returns seconds."""
    started = time.perf_counter()
    torch.cuda.empty_cache()  # the engine needs the memory that the update left in torch's cache
    engine.wake_weights()
    engine.load_weights(named_weights(policy), version)
    engine.wake_kv()  # vLLM waits for the device here, and empties torch's cache
    return time.perf_counter() - started


@contextlib.contextmanager
def awake(run: "Run", stays: bool = False) -> Iterator[float]:
    """Keeps the engine awake in its block, with the present weights.

    Meanwhile the states and networks of --offload are on the host. Yields the seconds of the
    weight sync, 0 if the engine had these weights already. After the block the engine sleeps,
    unless it `stays` awake. After Stopped or an error it sleeps in any case, so that a
    checkpoint can be saved."""
    seconds = 0.0
    if run.engine.state == "awake" and run.engine.version == run.done:
        run.engine.forget_prompts()  # an evaluation must not change a digit of the next rollout
    else:
        offload(run, "cpu")
        seconds = sync(run.engine, run.policy.net, version=run.done)
    try:
        yield seconds
    except BaseException:
        put_to_sleep(run, keep=True)
        raise
    if not stays:
        put_to_sleep(run)


def put_to_sleep(run: "Run", keep: bool = False):
    """Frees the device: the engine sleeps, and everything that --offload moved comes back.

    keep: unfinished requests stay, as they always do with --max_staleness. Otherwise they raise
    RuntimeError (Engine.sleep). Does nothing if the engine sleeps already, or with --replay."""
    if run.engine and run.engine.state == "awake":
        run.engine.sleep(keep=keep or run.args.max_staleness > 0)
        offload(run, run.accelerator.device)


# ---------------------------------------------------------------- 2. scores and rewards


def score_batch(run: "Run", batch: data.Batch, step: int):
    """Scores the sampled tokens by every network that the step needs.

    Sets batch["logprobs_old"], batch["logprobs_ref"] and batch["values"], (B, T) each. If the
    step has a single update, that update's own forward pass gives the old logprobs."""
    args = run.args
    if args.rollout_only:
        return
    has_several_updates = args.updates_per_rollout > 1
    only_critic_learns = step < args.critic_warmup
    kl_is_in_reward = args.kl_coef and args.kl_in == "reward"
    networks = {}
    if has_several_updates or only_critic_learns or kl_is_in_reward:
        networks["logprobs_old"] = run.policy.net
    if run.reference:
        networks["logprobs_ref"] = run.reference
    if run.critic:
        networks["values"] = run.critic.net
    for name, network in networks.items():
        batch[name] = score_tokens(network, seen_by(name, batch), args)


@torch.no_grad()
def score_tokens(net: "Net", batch: dict, args: Args) -> losses.BT:
    """Returns a Policy's logprobs or a Critic's values of all sampled tokens, on every rank.

    (B, T), 0 elsewhere."""
    result = torch.zeros_like(batch["response_mask"])
    micro_batches = data.micro_batches_of_this_rank(
        batch, range(len(result)), args.tokens_per_micro_batch, net.packed
    )
    # Scores stay on the device until all are computed, because reading them would wait for it.
    scores = [net(net.pack(batch, micro))[0] for micro in Bar(micro_batches, "scoring")]
    for micro, computed in zip(micro_batches, scores):
        if not micro.is_filler:
            result[micro.rows] = computed.cpu()
    return all_sum(result)


def add_rewards(run: "Run", rollouts: Rollouts, batch: data.Batch, metrics: dict) -> data.Batch:
    """Waits for the rewards. Returns the batch of the outputs that got one.

    Adds the rollouts' metrics, which include their rewards."""
    started = time.perf_counter()
    if run.engine:  # a replayed rollout has its rewards
        wait_for_rewards(rollouts, run.background, run.stop)
    if run.history:
        for output in rollouts.sampled:
            run.history[output.extra["prompt"]].append(total_reward(output))
    metrics |= rollouts.metrics(run.engine)
    metrics["timing/grading_s"] = time.perf_counter() - started
    graded = [row for row, output in enumerate(batch.outputs) if output.reward is not None]
    return batch.select(graded)


# ---------------------------------------------------------------- 3. rewards -> advantages


def shape_rewards(units: data.Units, args: Args) -> losses.N:
    """Returns the terminal rewards of units as they are learned from, (N,).

    Change the shape of the reward here: every estimator, and ReMax's greedy baseline, gets it."""
    rewards = units.outcomes
    if args.overlong_buffer:
        limit = args.max_response_tokens
        buffer = max(1, round(args.overlong_buffer * limit))
        rewards = rewards + losses.overlong_penalty(units.response_lengths, limit, buffer)
    return rewards


def set_token_rewards(run: "Run", batch: data.Batch, step: int) -> dict[str, float]:
    """Sets batch.rewards, (N, S): the shaped rewards where they fall, with --kl_in reward minus
    the KL of each token.

    Returns metrics. actor/kl, a mean over units' means, steers the KL's coefficient."""
    args = run.args
    metrics = {}
    rewards = data.place_rewards(batch, shape_rewards(batch.units, args))
    batch.rewards = args.reward_coef * rewards
    mask = batch["response_mask"]
    if args.kl_coef and args.kl_in == "reward":
        kl = losses.kl_estimate(batch["logprobs_old"], batch["logprobs_ref"], args.kl_kind)
        kl = torch.where(mask.bool(), kl, 0)  # (B, T)
        batch.rewards = batch.rewards - run.kl.coef * batch.layout.to_units(kl)
        mean_kl = losses.aggregate(kl, mask, "seq-mean-token-mean", unit_tokens=batch.unit_tokens)
        metrics["actor/kl"] = mean_kl.item()
        metrics["actor/kl_coef"] = run.kl.coef
        if args.kl_target and step >= args.critic_warmup:
            run.kl.update(mean_kl.item(), batch.n_sampled_units)
    has_tokens = batch.layout.mask.any(1)  # (N,)
    metrics["reward/shaped_mean"] = mean(batch.unit_rewards[has_tokens])
    return metrics


def greedy_baselines(rollouts: Rollouts, units: data.Units, args: Args) -> losses.N:
    """Returns, for each unit, the shaped reward of its group's greedy rollout, (N,).

    NaN where there is none."""
    greedy = data.by_unit(rollouts.greedy)
    rewards = args.reward_coef * (greedy.turn_rewards + shape_rewards(greedy, args))
    baseline_of = dict(zip(greedy.groups.tolist(), rewards.tolist()))
    return rewards.new_tensor([baseline_of.get(group, math.nan) for group in units.groups.tolist()])


def estimate_advantages(batch: data.Batch, rollouts: Rollouts, args: Args) -> losses.BT:
    """Returns the advantages by --adv_estimator, (B, T).

    The estimator is one of losses.py or of the task file (`losses.estimator`). It sees a unit as
    one sequence, its outputs laid end to end (data.EndToEnd), and gives one number for all
    tokens of a unit, (N,), or one for each token, (N, S). With a critic, this also sets
    batch["returns"]. Raises ValueError for advantages of another shape, NaN or infinity."""
    estimate = losses.ESTIMATORS[args.adv_estimator]
    units = batch.units
    layout = batch.layout
    mask = layout.mask
    given = {
        "rewards": batch.unit_rewards,
        "outcomes": units.outcomes,
        "groups": units.groups,
        "prompts": units.prompts,
        "names": units.names,
        "lengths": mask.sum(1),
        "mask": mask,
        "token_rewards": batch.rewards,
        "args": args,
    }
    if "baselines" in estimate.takes:
        given["baselines"] = greedy_baselines(rollouts, units, args)
    if "values" in estimate.takes:
        given["values"] = layout.to_units(batch["values"])
    if "states" in estimate.takes:
        given["states"] = data.turn_states(batch.outputs, data.turns_of_units(batch))
    advantages = estimate(**{name: given[name] for name in estimate.takes})

    if "values" in given:
        advantages, returns = advantages
        batch["returns"] = layout.to_outputs(returns)
    if advantages.shape == units.outcomes.shape:
        advantages = advantages[:, None].expand_as(mask)
    if advantages.shape != mask.shape or not advantages[mask.bool()].isfinite().all():
        raise ValueError(
            f"--adv_estimator {args.adv_estimator} gives advantages of the shape "
            f"{tuple(advantages.shape)}: must be finite, and one for each unit, "
            f"(N,) = {tuple(units.outcomes.shape)}, or for each token, "
            f"(N, S) = {tuple(mask.shape)}"
        )
    if args.whiten_advantages:
        advantages = losses.whiten(advantages, mask)
    return layout.to_outputs(advantages)


def mask_truncated(batch: data.Batch):
    """Excludes units with a truncated output from the loss and its normaliser: their
    response_mask becomes 0."""
    index = batch.units.index
    batch["response_mask"][torch.isin(index, index[batch["truncated"]])] = 0


# ---------------------------------------------------------------- 4. update


def update(run: "Run", batch: data.Batch, step: int) -> dict[str, float]:
    """Trains policy and critic: epochs x mini-batches x packed micro-batches.

    Sets batch["logprobs_old"], from the update's own forward pass, if the policy has not scored
    the rollout before. Returns metrics, means over the optimiser steps."""
    args = run.args
    batch["unit_tokens"] = batch.unit_tokens
    prompts = batch.units.prompts[batch.units.index]  # (B,)
    lr = run.policy.set_lr(max(0, step - args.critic_warmup))
    if run.critic:
        run.critic.set_lr(step)

    all_metrics = defaultdict(list)  # name -> its values in the optimiser steps that have it
    for rows in mini_batches(prompts, step, args):
        metrics = {"actor/lr": lr, "batch/tokens": batch["lengths"][rows].sum().item()}
        if step >= args.critic_warmup:
            metrics |= update_policy(run, batch, rows)
        if run.critic:
            metrics |= update_critic(run, batch, rows)
        for name, value in metrics.items():
            all_metrics[name].append(value)

    metrics = {name: fmean(values) for name, values in all_metrics.items()}
    # Adam counts the same steps for every parameter. Before the first step it has no state.
    state = next(iter(run.policy.optimizer.state.values()), {"step": 0})
    metrics["actor/adam_steps"] = float(state["step"])
    if run.critic:
        metrics["critic/explained_var"] = losses.explained_variance(
            batch["values"], batch["returns"], batch["response_mask"]
        ).item()
    return metrics


def mini_batches(prompts: torch.Tensor, step: int, args: Args) -> Iterator[list[int]]:
    """Yields the rows of each optimiser step.

    In every epoch the prompts are shuffled and dealt to as many equal parts as
    --prompts_per_mini_batch fits into a step.

    prompts (B,): the prompt of each row. All rows of a prompt stay together, because units are
    compared and weighed whole, and a prefix that rows share is then computed once."""
    n_parts = args.updates_per_rollout // args.epochs
    present = prompts.unique()
    for epoch in range(args.epochs):
        generator = torch.Generator().manual_seed(seed_of(args.seed, step, epoch))
        order = torch.randperm(len(present), generator=generator)
        for part in present[order].tensor_split(n_parts):
            if len(part):
                yield torch.isin(prompts, part).nonzero().flatten().tolist()


def update_policy(run: "Run", batch: data.Batch, rows: list[int]) -> dict[str, float]:
    """Makes one optimiser step of the policy on these rows. Returns metrics."""
    args = run.args
    columns = ["response_mask", "unit_tokens", "advantages", "logprobs_rollout"]
    if args.kl_coef:
        columns.append("logprobs_ref")
    if "imitation_mask" in batch:
        columns.append("imitation_mask")
    if args.updates_per_rollout > 1:
        columns.append("logprobs_old")
    # With a single update its own forward pass gives the old logprobs: the ratio is exactly 1.
    metrics, logprobs = optimise(
        run.policy, policy_objective, batch, columns, rows, args, run.accelerator, args.loss_agg
    )
    if "logprobs_old" not in batch:
        batch["logprobs_old"] = all_sum(logprobs)
    unique_tokens = metrics.pop("unique_tokens")
    metrics = {f"actor/{name}": x for name, x in metrics.items()}
    return metrics | {"batch/unique_tokens": unique_tokens}


def update_critic(run: "Run", batch: data.Batch, rows: list[int]) -> dict[str, float]:
    """Makes one optimiser step of the critic on these rows. Returns metrics.

    Demonstrations teach it nothing."""
    columns = ["response_mask", "unit_tokens", "values", "returns"]
    metrics, _ = optimise(
        run.critic, value_objective, batch, columns, rows, run.args, run.accelerator
    )
    unique_tokens = metrics.pop("unique_tokens")
    metrics["vf_loss"] = metrics.pop("loss")
    metrics = {f"critic/{name}": x for name, x in metrics.items()}
    return metrics | {"batch/unique_tokens": unique_tokens}


def policy_objective(scores: list[losses.BT], columns: dict, args: Args) -> losses.LossAndStats:
    """Returns the policy's loss per token, (b, T), and its stats.

    That is --policy_loss, weighed by --rollout_correction, minus the entropy bonus, plus the KL
    to the reference. Without logprobs_old the old logprobs are those of this forward pass."""
    logprobs, entropy = scores  # (b, T)
    mask = columns["response_mask"]
    old = columns.get("logprobs_old", logprobs.detach())
    loss, stats = losses.policy_loss(
        args.policy_loss,
        logprobs,
        old,
        columns["advantages"],
        mask,
        args.clip_low,
        args.clip_high,
        args.clip_c or None,
        entropy,
        args,
    )
    kind, low, high = args.correction
    weights, _ = losses.rollout_correction(kind, old, columns["logprobs_rollout"], mask, low, high)
    loss = loss * weights
    stats = {"pg_loss": loss.detach(), "entropy": entropy.detach(), **stats}

    if args.entropy_coef:
        loss = loss - args.entropy_coef * entropy
    if args.kl_coef and args.kl_in == "loss":
        kl = losses.kl_estimate(logprobs, columns["logprobs_ref"], args.kl_kind)
        loss = loss + args.kl_coef * kl
        stats["kl"] = kl.detach()
    return loss, stats


def value_objective(scores: list[losses.BT], columns: dict, args: Args) -> losses.LossAndStats:
    """Returns the critic's loss per token, (b, T), and its stats."""
    return losses.value_loss(
        scores[0], columns["values"], columns["returns"], columns["response_mask"], VALUE_CLIP
    )


VALUE_CLIP = 0.5  # clip of the value update


def optimise(
    learner: "Learner",
    objective: Callable,
    batch: dict,
    columns: list[str],
    rows: list[int],
    args: Args,
    accelerator,
    loss_agg: str = "token-mean",
) -> tuple[dict, losses.BT]:
    """Makes one optimiser step on some rows, the same on all ranks, which share the work.

    objective(scores, columns, args) -> loss per token (b, T), stats {name: (b, T)}. scores are
    the network's for b rows; columns are the named columns of the batch for these rows. Losses
    are summed over micro-batches and ranks and divided by global counts, so no way to cut the
    batch changes the gradient. loss_agg: a mode of losses.aggregate. With an imitation_mask
    among the columns, the mean of -score there is added to the loss.

    Returns metrics (loss, grad_norm, unique_tokens, the stats' means over tokens), and the first
    scores of this rank's tokens, (B, T)."""
    counts = data.count_globally(batch, rows, with_imitation="imitation_mask" in columns)
    micro_batches = data.micro_batches_of_this_rank(
        batch, rows, args.tokens_per_micro_batch, learner.net.packed
    )
    # Both stay on the device, because reading a number there would wait for the whole pass.
    sums = Counter(loss=0, unique_tokens=0)
    computed = []  # (rows, scores)
    for i, micro in enumerate(Bar(micro_batches, "update")):
        packed = learner.net.pack(batch, micro)
        of_rows = {name: batch[name][micro.rows] for name in columns}
        of_rows = data.to_device(of_rows, accelerator.device)
        if micro.is_filler:
            for column in of_rows.values():
                column.zero_()

        # Ranks average their gradients once, after the last micro-batch. FSDP does it every
        # time: gradients kept back would be whole on each rank.
        is_last = i == len(micro_batches) - 1
        averaging = contextlib.nullcontext()
        if not is_last and not args.shard:
            averaging = accelerator.no_sync(learner.wrapped)
        with averaging:
            scores = learner.wrapped(packed)
            loss, stats = total_loss(objective, scores, of_rows, counts, args, loss_agg)
            (loss * dist.get_world_size()).backward()  # DDP and FSDP average over ranks
        for name, value in stats.items():
            sums[name] += value
        if not micro.is_filler:
            sums["unique_tokens"] += packed["inputs"]["input_ids"].numel()
            computed.append((micro.rows, scores[0].detach()))

    has_tokens = counts["tokens"] + counts["imitated"] > 0
    grad_norm = learner.step(accelerator, args.max_grad_norm, has_tokens)
    first_scores = torch.zeros_like(batch["response_mask"])
    for micro_rows, scores in computed:
        first_scores[micro_rows] = scores.cpu()
    totals = all_sum(torch.tensor(list(sums.values()), dtype=torch.float64)).tolist()
    return dict(zip(sums, totals)) | {"grad_norm": grad_norm}, first_scores


def total_loss(
    objective: Callable,
    scores: list[losses.BT],
    columns: dict,
    counts: dict,
    args: Args,
    loss_agg: str,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the loss of a micro-batch, a scalar, and its detached shares of the metrics.

    Both add up over micro-batches and ranks. See `optimise`."""
    mask = columns["response_mask"]  # (b, T)
    loss_of_tokens, stats = objective(scores, columns, args)
    loss = losses.aggregate(
        loss_of_tokens,
        mask,
        loss_agg,
        counts["tokens"],
        counts["units"],
        args.max_response_tokens,
        columns["unit_tokens"],
    )
    shares = {}
    if counts["imitated"]:
        imitation_loss = losses.aggregate(
            -scores[0], columns["imitation_mask"], n_tokens=counts["imitated"]
        )
        loss = loss + imitation_loss
        shares["imitation_loss"] = imitation_loss.detach()
    shares["loss"] = loss.detach()
    if counts["tokens"]:
        for name, values in stats.items():
            shares[name] = torch.where(mask.bool(), values, 0).sum() / counts["tokens"]
    return loss, shares


# ---------------------------------------------------------------- 5. metrics and evaluation


def check_agreement(run: "Run", batch: data.Batch, version: int, difference: float):
    """Ends the run, by BadInput on all ranks, if engine and trainer differ too much.

    difference: the mean of that between their logprobs. It may be 1e-3, or 0.1 where one of them
    computes in less than float32. Only warns, once, with --allow_mismatch, and with
    --sampling_args that change the engine's distribution."""
    args = run.args
    bound = 0.1 if args.quantized or args.dtype == "bfloat16" else 1e-3
    if not run.engine or run.mismatch_is_known or difference <= bound:
        return
    problem = disagreement(run.tokenizer, batch, version, difference, bound)
    if args.allow_mismatch or args.sampling().keys() - NEUTRAL_SAMPLING:
        run.log.warn_once(problem)
        run.mismatch_is_known = True
        return
    close(run)
    raise BadInput(f"{problem}; --allow_mismatch trains all the same")


def evaluate(run: "Run") -> dict:
    """Returns metrics.describe_eval of validation rollouts, with --eval_sampling_args.

    The engine stays awake, because the next rollout has the same weights. With --replay there
    is no engine, and nothing to evaluate."""
    args = run.args
    if not run.engine:
        return {}
    with awake(run, stays=True):
        if run.done == args.num_steps:
            run.pool.end()
        else:
            run.pool.settle()
        sampling = args.sampling(validate=True)
        rollouts = rollout(run, run.rows["val"], run.done, args.eval_samples, sampling, "eval")
    run.log.rollouts(f"eval_{run.done:06d}", rollouts.outputs, rollouts.errors)
    units = data.by_unit(rollouts.outputs)
    return describe_eval(rollouts.outputs, units, run.rows["val"]) | {
        "eval/failed": sum(rollouts.lost.values()),
        "timing/eval_s": rollouts.seconds,
    }


# ---------------------------------------------------------------- networks, sharded or whole


class Net(nn.Module):
    """A transformers model that gives scores to sampled tokens. A subclass says which scores.

    Its scores_from_hidden(hidden (M, H), targets (M,)) returns tensors (M,): the scores of M
    sampled tokens, from their ids and from the hidden states that predict them.

    It has packed attention, float32 parameters and no dropout, because the network that is
    differentiated has to be the one that sampled. A vision tower keeps its own attention, which
    is not causal."""

    @shown("loading the model")
    def __init__(self, auto_class: str, args: Args, vision, packed: bool):
        super().__init__()
        self.vision = vision
        self.packed = packed  # without padding; otherwise rows are right-padded
        attention = "packed" if packed else None  # None: the model's own
        if packed and vision:
            attention = {"text_config": "packed", "vision_config": "sdpa"}
        self.model = models.load_for_training(auto_class, args, attention)
        layers.prepare_layers(self.model, args.gradient_checkpointing)

    def pack(self, batch: dict, micro: data.MicroBatch) -> dict:
        """Returns `data.pack_rows` for this network."""
        device = next(self.parameters()).device
        return data.pack_rows(batch, micro, device, self.packed)

    def forward(self, packed: dict) -> list[torch.Tensor]:
        """Returns the scores of each sampled token of R rows, a list of (R, T), 0 elsewhere.

        A Policy gives logprobs and entropies, a Critic values. packed: `data.pack_rows` of these
        rows. Everything happens in here, because a call that goes round DDP's wrapper would skip
        the averaging of gradients."""
        backbone = self.model.base_model
        inputs = packed["inputs"]
        zero = 0
        if self.vision and packed["images"]:
            inputs = inputs | self.vision.inputs(backbone, packed)
        elif self.vision:
            # The tower runs before the text, as it does with images, because FSDP's ranks
            # gather layers in one order.
            zero = self.vision.zero(backbone, packed["targets"].device)
        hidden = backbone(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)  # (S, H)
        predicting = hidden[packed["source"]] + zero  # (M, H)
        results = []
        for scores in self.scores_from_hidden(predicting, packed["targets"]):  # (M,) each
            zeros = scores.new_zeros(packed["shape"])
            results.append(zeros.index_put(packed["at"], scores[packed["pair"]]))
        return results


class Policy(Net):
    """Gives log-probabilities and entropies of the sampled tokens.

    Token ids from vocab_size on belong to a padded vocabulary and have no probability."""

    def __init__(self, args: Args, vocab_size: int | None = None, vision=None):
        auto_class = "AutoModelForCausalLM"
        if vision:
            auto_class = "AutoModelForImageTextToText"
        super().__init__(auto_class, args, vision, packed=bool(vision))
        self.head = [self.model.get_output_embeddings()]  # in a list: not registered twice
        need(
            self.head[0].bias is None,
            f"--model {args.model} has a bias in its output head, which token_logprobs doesn't "
            "implement",
        )
        text = self.model.config.get_text_config()
        scale = getattr(text, "logit_scale", None) or 1 / getattr(text, "logits_scaling", 1)
        self.temperature = args.temperature / scale
        self.dtype = getattr(torch, args.dtype, torch.float32)  # of the engine
        self.vocab_size = vocab_size
        self.softcap = getattr(text, "final_logit_softcapping", None)
        self.banned = [vision.image_token_id] if vision else []  # the engine never samples it
        if not vision:
            probe = data.in_prefix_order(layers.PROBE, [0, 1, 2])
            attention, self.packed = layers.choose_attention(self, probe, args)
            self.model.set_attn_implementation(attention)
        if args.lora_rank:
            layers.add_adapters(self.model, args)

    def scores_from_hidden(self, hidden, targets):
        """Returns log-probabilities and entropies, (M,) each."""
        return losses.token_logprobs(
            hidden,
            self.head[0].weight,
            targets,
            self.temperature,
            entropy=True,
            vocab_size=self.vocab_size,
            banned=self.banned,
            softcap=self.softcap,
        )


class Critic(Net):
    """Gives the value of the state before each sampled token.

    A backbone of its own and a linear head, which starts at 0."""

    def __init__(self, args: Args, vision=None, packed: bool = True):
        super().__init__("AutoModel", args, vision, packed)
        self.head = nn.Linear(self.model.config.get_text_config().hidden_size, 1)
        for p in self.head.parameters():
            nn.init.zeros_(p)

    def scores_from_hidden(self, hidden, targets):
        """Returns the values, (M,), computed in float32."""
        return ((hidden.float() * self.head.weight).sum(-1) + self.head.bias,)


class Learner:
    """A network with its optimiser.

    net: the network. wrapped: the same, wrapped for the ranks, to be called with gradients.
    num_steps: the steps in which it learns. The learning rate is a function of the step, with no
    state to save."""

    def __init__(self, net: Net, lr: float, num_steps: int, args: Args, accelerator):
        from transformers import get_scheduler

        self.net = net
        self.lr = lr
        self.wrapped = wrap(net, args, accelerator)
        net.float()  # this rank's part
        for name, p in net.named_parameters():
            need(p.dtype == torch.float32, f"{name} is {p.dtype}: updates would be lost in it")
        self.optimizer = torch.optim.AdamW(
            net.parameters(), lr, weight_decay=0.0, fused=accelerator.device.type == "cuda"
        )
        schedule = args.lr_schedule
        if schedule == "constant":
            schedule = "constant_with_warmup"
        scheduler = get_scheduler(schedule, self.optimizer, args.warmup_steps, num_steps)
        (self.lr_factor,) = scheduler.lr_lambdas

    def set_lr(self, step: int) -> float:
        """Sets and returns the learning rate of a step, counted from 0."""
        lr = self.lr * self.lr_factor(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def step(self, accelerator, max_norm: float, has_tokens: bool) -> float:
        """Makes an optimiser step with the present gradients, clipped to max_norm, and drops them.

        Returns their norm. Raises RuntimeError if that is not finite. Without any tokens the
        weights stay, although momentum would move them."""
        norm = accelerator.clip_grad_norm_(self.wrapped.parameters(), max_norm)
        norm = models.whole(norm).item()
        if not math.isfinite(norm):
            raise RuntimeError(
                f"the gradient norm is {norm}: training stops here, before the weights are spoilt"
            )
        if not self.optimizer.state:
            # Adam makes its states now. In blocks of cached activations they would stay.
            torch.cuda.empty_cache()
        if has_tokens:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm


def wrap(net: Net, args: Args, accelerator, frozen: bool = False) -> nn.Module:
    """Returns the network on the device: sharded, or wrapped by accelerate."""
    if args.shard:
        return shard(net, args, accelerator.device)
    return accelerator.prepare_model(net, evaluation_mode=frozen)


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
    reference: Callable | None  # see build_reference
    kl: losses.AdaptiveKL  # its coefficient is constant without --kl_target
    # For a task's sampler, by prompt: [row, step, reward, reward, ...].
    history: list[list] = field(default_factory=list)
    done: int = 0  # finished steps
    saved: int = 0  # finished steps at the last checkpoint
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


def setup(args: Args) -> Run:
    """Checks all input, and raises BadInput. Then loads engine and networks, which is slow.

    Completes args. After that nothing assigns to them."""
    quiet_libraries()
    task_builds_model = not args.model
    accelerator, store, task, all_rows = check_input(args)
    device = accelerator.device
    tokenizer, processor, rows = load_files(args, task, all_rows)

    # Refuse a model that can't be run or trained, and a run that can't be resumed.
    n_ids = models.vocab_size(tokenizer)
    check_model(args, device, n_ids)
    data.register_packed_attention()
    vision = Vision(processor) if processor else None
    policy = Policy(args, n_ids, vision)
    check_memory(policy, args, device)
    changed = {}
    if args.resume:
        changed = on_main(checkpoints.check_changes, args, task_builds_model)
    checkpoint, state = on_main(checkpoints.prepare_folder, args)  # without --resume (None, {})

    stop = Stop()
    log = SilentLog()
    if accelerator.is_main_process:
        log = Log(args, tokenizer, state.get("step", 0))
        # Before the engine starts, which takes seconds or minutes.
        log.notices.start(rows, all_rows, policy, device)
    engine = None
    if not args.replay:
        image_token_id = getattr(processor, "image_token_id", None)
        stops = models.stop_token_ids(args, tokenizer)
        engine = Engine(args.model, args, device, stops, n_ids, image_token_id)
    learner, critic, reference = build_networks(args, accelerator, policy)
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
        run.done = state["step"]
        run.saved = run.done
        run.history = state["history"]
        if args.kl_target and "kl_coef" not in changed:
            run.kl.coef = state["kl_coef"]
        checkpoints.load_checkpoint(run, checkpoint, state["parts"])
    fit_micro_batch(run.learners, args, device, log.say)
    if engine:
        run.pool = training_pool(run, run.done, state.get("next_prompt", 0))
    return run


def check_input(args: Args) -> tuple:
    """Checks flags, task and rows, and completes args. Raises BadInput.

    Returns the accelerator, the ranks' store, the task and its rows by split."""
    check_args(args)
    accelerator, store = start_processes(args)  # first, so that ranks hear of one that fails
    complete_flags(args, accelerator.device.type == "cuda")
    builds_model = [] if args.model else ["build_model"]
    task = data.load_task(args.task, ["load", "reward", *builds_model])
    check_registered(args)
    args.task = task.__file__
    rows = {
        "train": data.load_rows(task, "train", args.train_files, args.prompt_key),
        "val": data.load_rows(task, "val", args.val_files, args.prompt_key),
    }
    if args.hints:
        require_hints(rows["train"])
    if args.algo == "sft" or args.imitation_steps:
        rows["train"] = data.demonstrated(rows["train"], alone=args.algo == "sft")
    checkpoints.claim_for_all_hosts(args)
    if not args.model:
        args.model = on_main(models.task_model, task, args)  # minutes, if it is not built yet
    return accelerator, store, task, rows


def load_files(args: Args, task: ModuleType, rows: dict) -> tuple:
    """Loads the model's tokenizer and processor (None for a text model), and drops overlong rows.

    rows: all rows, by split. Returns tokenizer, processor, rows by split. Raises BadInput if the
    model, the teacher and the rows don't fit together."""
    processor, tokenizer = models.load_tokenizer(args)
    models.check_teacher(args, tokenizer)
    rows = {
        split: data.filter_overlong(rows[split], tokenizer, task, args, processor) for split in rows
    }
    if getattr(task, "TOOLS", None):
        tool_parser(args.tool_parser, tokenizer)  # raises for an unknown --tool_parser
    return tokenizer, processor, rows


def build_networks(args: Args, accelerator, policy: Policy) -> tuple:
    """Returns the policy's Learner, the critic's or None, and the reference network or None.

    Seeds the random generators anew."""
    set_seed(args.seed)  # an engine's start and a task may have drawn random numbers
    critic = None
    if "values" in args.estimator_takes and not args.rollout_only:
        net = Critic(args, policy.vision, policy.packed)
        critic = Learner(net, args.critic_lr, args.num_steps, args, accelerator)
    reference = None
    if args.kl_coef and not args.rollout_only:
        reference = build_reference(args, accelerator, policy)
    n_steps = args.num_steps - args.critic_warmup
    return Learner(policy, args.lr, n_steps, args, accelerator), critic, reference


def build_reference(args: Args, accelerator, policy: Policy) -> Callable:
    """Returns the frozen network of the KL: --ref_model, or the starting model.

    With --hints it is the policy itself, with LoRA the policy without its adapters."""
    if args.hints:
        return policy
    if args.lora_rank and not args.ref_model:
        return layers.without_adapters(policy)

    args = replace(args, model=args.ref_model or args.model, lora_rank=0)
    reference = Policy(args, policy.vocab_size, policy.vision).requires_grad_(False)
    return wrap(reference, args, accelerator, frozen=True)


def finish(run: Run):
    """Saves the last checkpoint and, if training came to its end, the policy in Hugging Face
    format. Ends the run."""
    args = run.args
    say = run.log.say
    put_to_sleep(run)
    saved = args.rollout_only or checkpoints.save_checkpoint(run)
    final = run.folder / "final"
    if args.rollout_only:
        say(f"{run.done} steps of rollouts are in {run.folder / 'rollouts'}")
    elif run.done < args.num_steps:
        say(f"stopped after step {run.done}")
    elif run.done and checkpoints.save_policy(run, final):  # without steps: an evaluation
        best = checkpoints.best_checkpoint(run.folder)
        say(f"the trained policy is in {final}, the best saved checkpoint is {best}")
        saved = True
    say(notices.summary(args, run.done))
    close(run)
    need(saved, "nothing of the last steps could be saved")
    if run.stop.requested:  # all is saved, but a run that was stopped must not return 0
        raise Stopped


def close(run: Run):
    """Ends everything that a run holds, on all ranks together: the process may end then."""
    if run.pool:
        run.pool.end()
    run.log.close()
    run.background.close()
    run.stop.finished.set()
    run.stop.thread.join()  # all ranks' together
    if run.engine:
        run.engine.close()


if __name__ == "__main__":
    run_as_script(main, parse_args)
