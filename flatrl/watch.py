"""Warnings of what has spoilt somebody's training: one line each, once, with what to look at.

bench/zoo.py plants these faults, and others that end a run, and docs/zoo.md says which line
names which of them."""

from collections.abc import Iterator
from statistics import median

import torch

import losses
from agent_loop import total_reward

FEW_STEPS = 5  # before a rise is judged
# What stands in a tool call, in one of the formats of vLLM's parsers.
CALL_MARKS = ("<tool_call", "[TOOL_CALLS]", "<function", "<|python_tag|>", '"arguments"')


class Watch:
    """Looks at each step of a run, beside the steps before it.

    rows: the metrics of the run's earlier steps, if it is resumed."""

    def __init__(self, args, rows: list[dict]):
        self.args = args
        self.rows = [row for row in rows if "rollout/last_prompt" in row]
        self.named = set()  # the problems that were named

    def step(self, metrics: dict, outputs: list, batch: dict) -> Iterator[str]:
        """Yields a line for each new problem of a step: of its metrics, or of the outputs that it
        trained and their batch."""
        found = dict([*self.in_numbers(metrics), *self.in_batch(outputs, batch)])
        self.rows.append(metrics)
        for name, problem in found.items():
            if name not in self.named:
                yield f"step {metrics['step']}: {problem} (docs/zoo.md, {name})"
        self.named |= found.keys()

    def in_numbers(self, metrics: dict) -> Iterator[tuple[str, str]]:
        """Yields (name, problem) of metrics that don't go on as those of the steps before."""
        args = self.args
        rows = self.rows
        for name, least in (("rollout/tool_calls", 0), ("num_turns/mean", 2)):
            # A single answer makes 2 turns; what falls is what comes beside it.
            best = max([row.get(name, least) for row in rows], default=least)
            now = metrics.get(name, least)
            if best - least > max(0.1, 10 * (now - least)):
                yield name, (f"{name} has fallen to {now:.2g}, from {best:.2g}: does the reward "
                               "pay for answers without tools and turns?")
        if metrics.get("stop_reason/abort"):
            yield "abort", "the engine aborted answers, and they are trained"
        may_replace = False
        if may_replace and not metrics["rollout/filtered_groups"]:
            yield "filter", ("--filter_metric total: turn rewards nearly always differ, so dynamic "
                             "sampling replaces no group")
        if not rows or "actor/entropy" not in metrics:  # else only the critic learns
            return
        last = rows[-1]
        first_prompt = metrics["rollout/first_prompt"]
        expected = last["rollout/last_prompt"] + 1
        may_skip = args.max_gen_batches > 1 or metrics["rollout/skipped"]
        if first_prompt < expected or first_prompt > expected and not may_skip:
            yield "prompts", (f"the rollouts begin at prompt {first_prompt}, not {expected}: "
                              "prompts are trained twice, or lost")
        name = "rollout/logp_diff_mean"
        first = [row[name] for row in rows if row[name]][:1]  # it is 0 if nothing is sampled
        if first and metrics[name] > 10 * max(first[0], 1e-6) and not args.replay:
            yield "drift", (f"{name}, between engine and trainer, has grown tenfold since the "
                            f"first step, from {first[0]:.1e}")
        if metrics["actor/entropy"] < 3e-4:
            yield "entropy", ("the entropy is nearly 0: every rollout of a prompt will be the "
                              "same; look at --lr, --clip_high and --entropy_coef")
        norms = [row["actor/grad_norm"] for row in rows if "actor/grad_norm" in row]
        norm = metrics["actor/grad_norm"]
        if len(norms) >= FEW_STEPS and norm > max(10 * median(norms), args.max_grad_norm):
            yield "gradient", (f"the gradient norm is {norm:.2g}, more than ten times its median: "
                               "look at this step's rollouts and largest advantages")
        warmup = args.critic_warmup + args.warmup_steps
        if metrics["actor/lr"] == 0 and metrics["step"] > warmup + 1:
            yield "lr", "the learning rate is 0: nothing is learnt"
        if metrics["actor/adam_steps"] <= last.get("actor/adam_steps", 0):
            yield "optimiser", "Adam's states are lost: it starts anew, with large steps"

    def in_batch(self, outputs: list, batch: dict) -> Iterator[tuple[str, str]]:
        """Yields (name, problem) of outputs, their advantages and their weights."""
        best = max(map(total_reward, outputs))
        cut_off = [output.truncated for output in outputs if total_reward(output) == best]
        if best > 0 and sum(cut_off) > len(cut_off) / 2:
            yield "truncated", (f"{sum(cut_off)} of the {len(cut_off)} best-paid answers were cut "
                                "off by a limit: see --mask_truncated and --overlong_buffer")
        unparsed = [output for output in outputs if output.metrics.get("tool_calls") == 0
                    and any(mark in output.text for mark in CALL_MARKS)]
        if len(unparsed) > len(outputs) / 2:
            yield "parser", (f"{len(unparsed)} answers look like tool calls, and none was parsed "
                             f"in them: is --tool_parser {self.args.tool_parser} the model's?")
        mask = batch["response_mask"]
        is_sampled = batch["versions"] >= 0  # (B, T)
        n_wrong = (is_sampled != mask.bool()).sum().item()
        if n_wrong and not self.args.mask_truncated:
            yield "mask", (f"response_mask is wrong at {n_wrong} tokens: sampled ones are not "
                           "trained, or others are")
        units = batch.units
        tokens = torch.zeros_like(units.outcomes).index_add(0, units.index, mask.sum(-1))  # (N,)
        if (tokens > 0).sum() != losses.count_sequences(mask, batch["unit_tokens"]).round():
            yield "weight", "a rollout of several outputs weighs more than one of a single output"
        if "groups" in self.args.estimator_takes:  # it compares the units of a group
            sums = (batch["advantages"] * mask).sum(-1)  # (B,)
            means = torch.zeros_like(tokens).index_add(0, units.index, sums) / tokens.clamp(min=1)
            expected = losses.grpo_advantages(batch.unit_rewards, units.groups)[tokens > 0]
            found = losses.grpo_advantages(means, units.groups)[tokens > 0]
            agreement = (expected * found).sum() / expected.square().sum()
            if agreement < 0.5:  # NaN, of groups alike, is not
                yield "advantages", (f"advantages do not follow the rewards: within groups their "
                                     f"correlation is {agreement:.2f}, not 1")
