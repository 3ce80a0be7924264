"""What the log says of a step's outputs, and of an evaluation's."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import fmean
from typing import Any

import numpy as np
from torch import Tensor

import losses
from agent_loop import AgentLoopOutput, numbers

Outputs = list[AgentLoopOutput]
MAX_LOGGED_UNITS = 8  # names of units, such as the sides of a game, whose rewards are logged


def grouped(keys: Iterable, values: Iterable) -> dict[Any, list]:
    """Returns the values of each key, in their order; keys and values are as many."""
    values_of_key = defaultdict(list)
    for key, value in zip(keys, values, strict=True):
        values_of_key[key].append(value)
    return values_of_key


def describe(outputs: Outputs, units) -> dict[str, float]:
    """Returns statistics of outputs, by the names that they have in the log.

    units: data.by_unit of them.
    Rewards are those of units; those of a named unit are reward/NAME. A reward dict's further
    keys come as reward_part/*, numbers in AgentLoopOutput.metrics as rollout/* (means, 0 where
    one has none), seconds as timing/*. rollout/segments: outputs of a rollout."""
    n = len(outputs)
    n_rollouts = len({(output.extra["prompt"], output.extra["sample"]) for output in outputs})
    rewards = units.rewards.tolist()
    response_lengths = [len(output.response_ids) for output in outputs]
    num_turns = [output.num_turns for output in outputs]
    stop_reasons = [output.stop_reason for output in outputs]
    result = {
        "reward/mean": fmean(rewards),
        "reward/std": np.std(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "prompt_length/mean": fmean([len(output.prompt_ids) for output in outputs]),
        "response_length/mean": fmean(response_lengths),
        "response_length/max": max(response_lengths),
        "response_length/clipped_ratio": stop_reasons.count("length") / n,
        "num_turns/mean": fmean(num_turns),
        "num_turns/max": max(num_turns),
        "rollout/trajectories": n_rollouts,
        "rollout/segments": n / n_rollouts}
    rewards_of_name = grouped(units.names, rewards)
    rewards_of_name.pop("", None)
    if len(rewards_of_name) <= MAX_LOGGED_UNITS:
        result |= {f"reward/{name}": fmean(values) for name, values in rewards_of_name.items()}
    seconds = defaultdict(list)  # of each output, by kind
    sums = Counter(f"stop_reason/{reason}" for reason in stop_reasons)
    reward_parts = defaultdict(list)
    for output in outputs:
        metrics = numbers(output.metrics)
        for name in ("generate_s", "tool_s"):
            seconds[name].append(metrics.pop(name, 0.0))
        sums.update({f"rollout/{name}": value for name, value in metrics.items()})
        if isinstance(output.reward, dict):
            for name, value in numbers(output.reward).items():
                reward_parts[name].append(value)
    reward_parts.pop("score", None)
    for name, values in seconds.items():
        result |= {f"timing/{name}_min": min(values), f"timing/{name}_mean": fmean(values),
                   f"timing/{name}_max": max(values)}
    result = {name: total / n for name, total in sorted(sums.items())} | result
    for name, values in sorted(reward_parts.items()):
        result[f"reward_part/{name}"] = fmean(values)
    return {name: float(value) for name, value in result.items()}


def describe_eval(outputs: Outputs, units, rows: list[dict]) -> dict[str, float]:
    """Returns the metrics of an evaluation: eval/reward, response_length, num_turns and these.

    units: data.by_unit of the outputs. Their prompts are numbers of rows.

    eval/pass@j is given for every j up to the most units n of a group: the chance that one of
    j passes, 1 - C(n - c, j) / C(n, j) where c of n did (arXiv 2107.03374, eq. 1); the mean
    over the groups with n >= j. A group is what is compared: the rollouts of a row, if nothing
    else is said. To pass is an outcome of at least 1. eval/reward_stderr: the standard error
    of the mean over rows, because rollouts of one row are not independent. With several
    data_source: eval/<data_source>/reward; with named units: eval/<unit>/reward."""
    rewards = units.rewards.tolist()
    prompts = units.prompts.tolist()
    rewards_of_row = grouped(prompts, rewards)
    rewards_of_source = grouped([rows[prompt].get("data_source") for prompt in prompts], rewards)
    passes_of_group = grouped(units.groups.tolist(), (units.outcomes >= 1).tolist())
    statistics = describe(outputs, units)
    result = {f"eval/{name}": statistics[f"{name}/mean"]
              for name in ("reward", "response_length", "num_turns")}
    for name in set(units.names):
        if f"reward/{name}" in statistics:
            result[f"eval/{name}/reward"] = statistics[f"reward/{name}"]
    if len(rewards_of_source) > 1:
        for source, rewards in rewards_of_source.items():
            result[f"eval/{source}/reward"] = fmean(rewards)
    n_rows = len(rewards_of_row)
    row_means = [fmean(rewards) for rewards in rewards_of_row.values()]
    result["eval/reward_stderr"] = float(np.std(row_means, ddof=min(1, n_rows - 1))) / n_rows**0.5
    for j in range(1, max(map(len, passes_of_group.values())) + 1):
        chances = [1 - math.comb(passes.count(False), j) / math.comb(len(passes), j)
                   for passes in passes_of_group.values() if len(passes) >= j]
        result[f"eval/pass@{j}"] = fmean(chances)
    return result


def mean(x: Tensor) -> float:
    """Returns the mean, computed in float64; 0 of nothing."""
    return x.double().mean().item() if len(x) else 0.0


def tokens_to_compare(batch: dict, version: int) -> tuple[Tensor, Tensor]:
    """Returns two (B, T): how far the trainer's and the engine's logprobs are apart, and whether
    the weights of this version sampled the token. Only there must they be equal."""
    difference = (batch["logprobs_old"] - batch["logprobs_rollout"]).abs()
    return difference, batch["response_mask"].bool() & (batch["versions"] == version)


def batch_metrics(batch, version: int, args) -> dict[str, float]:
    """Returns metrics of a trained batch: agreement, staleness, rollout correction.

    version: of the weights at the start of the rollout."""
    mask = batch["response_mask"].bool()
    difference, is_comparable = tokens_to_compare(batch, version)
    difference = difference[is_comparable]
    metrics = {
        "rollout/logp_diff_mean": mean(difference),
        "rollout/logp_diff_max": difference.max().item() if len(difference) else 0.0,
    }
    if args.max_staleness:
        versions = batch["versions"][mask.any(-1)]
        # The oldest token of each row that has sampled ones. Other tokens have version -1.
        oldest = versions.masked_fill(versions < 0, version).amin(-1)
        age = version - oldest
        metrics["rollout/staleness_mean"] = mean(age)
        metrics["rollout/staleness_max"] = max(age.tolist(), default=0)
    if args.rollout_correction != "none":
        kind, low, high = args.correction
        _, stats = losses.rollout_correction(
            kind, batch["logprobs_old"], batch["logprobs_rollout"], mask, low, high)
        means = {name: mean(x[mask]) for name, x in stats.items()}
        weight = means.pop("rollout_weight")
        square = means.pop("rollout_weight_sq")
        metrics |= {name.replace("_", "/", 1): x for name, x in means.items()}
        metrics["rollout/ratio_max"] = stats["rollout_ratio"].max().item()
        metrics["rollout/effective_sample_size"] = weight**2 / square if square else 0.0
    return metrics


def disagreement(tokenizer, batch, version: int, difference: float, bound: float) -> str:
    """Describes a difference between the logprobs of engine and trainer that exceeds its bound,
    with the token about which they differ most."""
    differences, is_comparable = tokens_to_compare(batch, version)
    largest = differences.where(is_comparable, -1).argmax().item()
    row, position = divmod(largest, differences.shape[1])
    output = batch.outputs[row]
    text = tokenizer.decode(output.response_ids[position])
    return (
        f"engine and trainer disagree: their logprobs of step {version + 1} differ by "
        f"{difference:.2g} in the mean, more than {bound:g}; most at "
        f"prompt {output.extra['prompt']}, sample {output.extra['sample']}, "
        f"segment {output.extra['segment']}, position {position} of the response, {text!r}: "
        f"{batch['logprobs_rollout'][row, position]:.3g} in the engine, "
        f"{batch['logprobs_old'][row, position]:.3g} in the trainer. Likely causes: a weight that "
        "went to the wrong place, a part of this model that vLLM and the trainer compute "
        "differently, or settings of the engine that the trainer does not know (--engine_args, "
        "--sampling_args, an agent loop's own)")
