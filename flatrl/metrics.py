"""The metrics of a step's outputs, and of an evaluation's."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import fmean

import numpy as np
from torch import Tensor

import losses
from agent_loop import numeric_entries
from flatrl.units import Outputs, last_outputs, rollout_of

MAX_LOGGED_UNITS = 8  # names of units, such as the sides of a game, whose rewards are logged


class Clock:
    """Measures the parts of a step: `lap(part)` counts the time since the lap before.

    Take a lap only where the host has just read a result: a GPU may be working otherwise."""

    def __init__(self):
        self.seconds = Counter()
        self.started = time.perf_counter()
        self.begin_training()

    def begin_training(self):
        """Begins the parts of train_s."""
        self.rollout_ended = time.perf_counter()
        self.lap_ended = self.rollout_ended

    def lap(self, part: str):
        """Ends a part. Several laps of one name are added up."""
        now = time.perf_counter()
        self.seconds[f"timing/{part}_s"] += now - self.lap_ended
        self.lap_ended = now

    def read(self) -> dict[str, float]:
        """Returns the seconds of each part, of training (since the rollout), and of the step."""
        now = time.perf_counter()
        return {
            **self.seconds,
            "timing/train_s": now - self.rollout_ended,
            "timing/step_s": now - self.started,
        }


def grouped(keys: Iterable, values: Iterable) -> dict:
    """Returns the values of each key, in their order."""
    values_of_key = defaultdict(list)
    for key, value in zip(keys, values, strict=True):
        values_of_key[key].append(value)
    return values_of_key


def describe(outputs: Outputs, units) -> dict[str, float]:
    """Returns statistics of outputs, by their names in the log.

    Rollouts count alike, whatever the number of their outputs: lengths, and the numbers in
    AgentLoopOutput.metrics (rollout/*), are summed over a rollout's outputs; num_turns and the
    stop reason are those of its last one, prompt_length of its first one. units: data.by_unit."""
    rollouts = grouped(map(rollout_of, outputs), outputs).values()
    n = len(rollouts)
    rewards = units.task_rewards.tolist()
    response_lengths = [sum(len(output.response_ids) for output in each) for each in rollouts]
    num_turns = [last.num_turns for *_, last in rollouts]
    stop_reasons = Counter(last.stop_reason for *_, last in rollouts)
    result = {f"stop_reason/{reason}": count / n for reason, count in stop_reasons.items()}

    totals = Counter()
    for output in outputs:
        totals.update(numeric_entries(output.metrics))
    for name in ("generate_s", "tool_s"):
        seconds = [sum(output.metrics.get(name, 0.0) for output in each) for each in rollouts]
        result[f"timing/{name}_min"] = min(seconds)
        result[f"timing/{name}_mean"] = fmean(seconds)
        result[f"timing/{name}_max"] = max(seconds)
        totals.pop(name, None)
    for name, total in sorted(totals.items()):
        result[f"rollout/{name}"] = total / n

    result |= {
        "reward/mean": fmean(rewards),
        "reward/std": np.std(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "prompt_length/mean": fmean(len(first.prompt_ids) for first, *_ in rollouts),
        "response_length/mean": fmean(response_lengths),
        "response_length/max": max(response_lengths),
        "response_length/clipped_ratio": stop_reasons["length"] / n,
        "num_turns/mean": fmean(num_turns),
        "num_turns/max": max(num_turns),
        "rollout/trajectories": n,  # the log's word for rollouts; segments are outputs
        "rollout/segments": len(outputs) / n,
    }
    rewards_of_name = grouped(units.names, rewards)
    rewards_of_name.pop("", None)
    if len(rewards_of_name) <= MAX_LOGGED_UNITS:
        for name, values in rewards_of_name.items():
            result[f"unit_reward/{name}"] = fmean(values)
    for name, value in sorted(means(parts_of_units(outputs)).items()):
        result[f"reward_part/{name}"] = value
    return {name: float(value) for name, value in result.items()}


def parts_of_units(outputs: Outputs) -> list[dict[str, float]]:
    """Returns the numbers in each unit's reward dict, except "score"; {} for other rewards."""
    parts = []
    for output in last_outputs(outputs):  # a unit's outputs share one reward
        reward = output.reward if isinstance(output.reward, dict) else {}
        numbers = numeric_entries(reward)
        numbers.pop("score", None)
        parts.append(numbers)
    return parts


def describe_eval(outputs: Outputs, units, rows: list[dict]) -> dict[str, float]:
    """Returns the metrics of an evaluation. eval/trajectories counts the rollouts with a reward.

    units: data.by_unit of the outputs; rows: the validation rows.
        eval/reward_stderr   the standard error of the mean over rows, each with its rollouts' mean
        eval/pass@j          the mean probability that one of j units of a group has outcome >= 1"""
    statistics = describe(outputs, units)
    result = {"eval/trajectories": int(statistics["rollout/trajectories"])}
    for name in ("reward", "response_length", "num_turns"):
        result[f"eval/{name}"] = statistics[f"{name}/mean"]
    for name, value in statistics.items():
        if name.startswith(("unit_reward/", "reward_part/")):
            result[f"eval/{name}"] = value

    rewards = units.task_rewards.tolist()
    prompts = units.prompts.tolist()  # in an evaluation these are the rows' numbers
    sources = [rows[prompt].get("data_source") for prompt in prompts]
    rewards_of_source = grouped(sources, rewards)
    if len(rewards_of_source) > 1:
        for source, values in rewards_of_source.items():
            result[f"eval/{source}/reward"] = fmean(values)

    row_means = [fmean(values) for values in grouped(prompts, rewards).values()]
    n_rows = len(row_means)
    deviation = np.std(row_means, ddof=min(1, n_rows - 1))
    result["eval/reward_stderr"] = float(deviation) / n_rows**0.5

    passed = (units.outcomes >= 1).tolist()
    passes = grouped(units.groups.tolist(), passed).values()
    for j in range(1, max(map(len, passes)) + 1):
        chances = []
        for of_group in passes:
            if len(of_group) >= j:
                # 1 - C(n - c, j) / C(n, j) with c of n passed: arXiv 2107.03374, eq. 1.
                n_failing = math.comb(of_group.count(False), j)
                chances.append(1 - n_failing / math.comb(len(of_group), j))
        result[f"eval/pass@{j}"] = fmean(chances)
    return result


def mean(x: Tensor) -> float:
    """Returns the mean, computed in float64; 0 if there are no elements."""
    return x.double().mean().item() if len(x) else 0.0


def means(rows: list[dict[str, float]]) -> dict[str, float]:
    """Returns the mean of each metric over the rows that have it."""
    names = [name for row in rows for name in row]
    values = [value for row in rows for value in row.values()]
    return {name: fmean(of_name) for name, of_name in grouped(names, values).items()}


def tokens_to_compare(batch: dict, version: int) -> tuple[Tensor, Tensor]:
    """Returns how far both logprobs differ, (B, T), and where they must agree, (B, T)."""
    difference = (batch["logprobs_old"] - batch["logprobs_rollout"]).abs()
    is_current = batch["versions"] == version
    return difference, batch["response_mask"].bool() & is_current


def batch_metrics(batch, version: int, args) -> dict[str, float]:
    """Returns metrics of a trained batch. version: of the weights at the start of the rollout."""
    mask = batch["response_mask"].bool()
    difference, is_comparable = tokens_to_compare(batch, version)
    difference = difference[is_comparable]
    metrics = {
        "rollout/logp_diff_mean": mean(difference),
        "rollout/logp_diff_max": difference.max().item() if len(difference) else 0.0,
    }
    for name in ("advantages", "returns", "values"):
        if name in batch and mask.any():
            x = batch[name][mask].double()
            metrics |= {
                f"{name}/mean": x.mean().item(),
                f"{name}/std": x.std(correction=0).item(),
                f"{name}/min": x.min().item(),
                f"{name}/max": x.max().item(),
            }
    if "returns" in batch:
        explained = losses.explained_variance(batch["values"], batch["returns"], mask)
        metrics["critic/explained_var"] = explained.item()
    if args.max_staleness:
        versions = batch["versions"][mask.any(-1)]
        # Of the oldest token of each row that has sampled ones. Other tokens have version -1.
        age = version - versions.masked_fill(versions < 0, version).amin(-1)
        metrics["rollout/staleness_mean"] = mean(age)
        metrics["rollout/staleness_max"] = max(age.tolist(), default=0)
    if args.rollout_correction != "none":
        kind, low, high = args.correction
        logprobs = batch["logprobs_old"], batch["logprobs_rollout"]
        _, stats = losses.rollout_correction(kind, *logprobs, mask, low, high)
        averages = {name: mean(x[mask]) for name, x in stats.items()}
        weight = averages.pop("rollout_weight")
        square = mean(stats["rollout_weight"][mask].square())
        for name, value in averages.items():
            metrics[name.replace("_", "/", 1)] = value  # rollout_kl -> rollout/kl
        metrics["rollout/ratio_max"] = stats["rollout_ratio"].max().item()
        metrics["rollout/effective_sample_size"] = weight**2 / square if square else 0.0
    return metrics


def disagreement(tokenizer, batch, version: int, difference: float, bound: float) -> str:
    """Returns an error: where engine and trainer differ most. difference: the mean, above bound."""
    differences, is_comparable = tokens_to_compare(batch, version)
    largest = differences.where(is_comparable, -1).argmax().item()
    row, position = divmod(largest, differences.shape[1])
    output = batch.outputs[row]
    text = tokenizer.decode(output.response_ids[position])
    return (
        f"engine and trainer disagree: their logprobs of step {version + 1} differ by "
        f"{difference:.2g} on average, more than {bound:g}; most, by "
        f"{differences[row, position]:.2g}, at prompt {output.extra['prompt']}, sample "
        f"{output.extra['sample']}, position {position} of the response, {text!r}. See "
        "docs/running.md#engine-and-trainer-disagree"
    )
