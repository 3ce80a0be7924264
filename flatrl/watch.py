"""Warnings about faults that spoil a training: one line each, once, with a cause to look at.

docs/running.md lists them."""

from collections import Counter
from collections.abc import Iterator
from statistics import median

import torch

import losses
from agent_loop import numeric_entries, total_reward

FEW_STEPS = 5  # before a rise of the gradient norm is judged
FEW_CALLS = 5  # of a tool, before its exceptions are judged
MIN_ENTROPY = 3e-4
MAX_ROLLOUT_KL = 0.1  # per token, from the policies that sampled to the one that learns
FAR_STEPS = 3  # with a larger KL, before it is named
# A tool call has one of these, in the formats of vLLM's parsers.
CALL_MARKS = ["<tool_call", "[TOOL_CALLS]", "<function", "<|python_tag|>", '"arguments"']


class Watch:
    """Compares each step of a run with the steps before it.

    rows: the metrics of the earlier steps, if the run is resumed."""

    def __init__(self, args, rows: list[dict]):
        self.args = args
        self.rows = [row for row in rows if "rollout/last_prompt" in row]  # no evaluations
        self.named = set()  # the problems that were named

    def step(self, metrics: dict, outputs: list, batch) -> Iterator[str]:
        """Yields a line for each new problem of a step.

        batch: its data.Batch. outputs: those that the step trained, the rows of the batch."""
        problems = self.check_counts(metrics)
        if self.rows and "actor/entropy" in metrics:  # the policy learned
            problems |= self.check_progress(metrics, self.rows)
        problems |= self.check_distance(metrics)
        problems |= self.check_tools(outputs)
        problems |= self.check_answers(outputs)
        problems |= self.check_batch(batch)
        self.rows.append(metrics)
        for name, problem in problems.items():
            if name not in self.named:
                self.named.add(name)
                yield f"step {metrics['step']}: {problem} ({name}: docs/running.md#warnings)"

    # Each of these returns problems by their names.

    def check_counts(self, metrics: dict) -> dict[str, str]:
        """Names tool calls and turns that have fallen to a tenth of their best, above the least
        possible, and answers that were aborted."""
        problems = {}
        # A single answer makes 2 turns.
        for name, least in ("rollout/tool_calls", 0), ("num_turns/mean", 2):
            best = max([row.get(name, least) for row in self.rows], default=least)
            now = metrics.get(name, least)
            if best - least > max(0.1, 10 * (now - least)):
                problems[name] = (
                    f"{name} has fallen to {now:.2g}, from {best:.2g}: does the reward pay for "
                    "answers without tools and turns?"
                )
        if metrics.get("stop_reason/abort"):
            problems["abort"] = "the engine aborted answers, and they are trained"
        return problems

    def check_progress(self, metrics: dict, rows: list[dict]) -> dict[str, str]:
        """Prompts, policy and optimiser must continue from the steps before, rows."""
        problems = {}
        args = self.args
        last = rows[-1]
        first_prompt = metrics["rollout/first_prompt"]
        expected = last["rollout/last_prompt"] + 1
        # A prompt all of whose rollouts were skipped is neither a first nor a last one.
        n_skipped = metrics["rollout/skipped"] + last["rollout/skipped"]
        may_skip = args.max_gen_batches > 1 or n_skipped or args.replay
        if first_prompt < expected or (first_prompt > expected and not may_skip):
            problems["prompts"] = (
                f"the rollouts begin at prompt {first_prompt}, not {expected}: prompts are "
                "trained twice, or lost"
            )
        if metrics["actor/entropy"] < MIN_ENTROPY:
            problems["entropy"] = (
                "the entropy is nearly 0: every rollout of a prompt will be the same; look at "
                "--lr, --clip_high and --entropy_coef"
            )
        norm = metrics["actor/grad_norm"]
        norms = [row["actor/grad_norm"] for row in rows if "actor/grad_norm" in row]
        if len(norms) >= FEW_STEPS and norm > max(10 * median(norms), args.max_grad_norm):
            problems["gradient"] = (
                f"the gradient norm is {norm:.2g}, more than ten times its median: look at this "
                "step's rollouts and largest advantages"
            )
        warmup = args.critic_warmup + args.warmup_steps
        if metrics["actor/lr"] == 0 and metrics["step"] > warmup + 1:
            problems["lr"] = "the learning rate is 0: nothing is learnt"
        if metrics["actor/adam_steps"] <= last.get("actor/adam_steps", 0):
            problems["optimiser"] = "Adam's states are lost: it starts anew, with large steps"
        return problems

    def check_distance(self, metrics: dict) -> dict[str, str]:
        """The policy must not stay far from those that sampled its batches."""
        name = "rollout/kl"
        last = [row.get(name, 0.0) for row in (*self.rows, metrics)][-FAR_STEPS:]
        if len(last) < FAR_STEPS or min(last) <= MAX_ROLLOUT_KL:
            return {}
        problem = (
            f"{name} is {last[-1]:.2g} a token, and has been above {MAX_ROLLOUT_KL} for "
            f"{FAR_STEPS} steps: the policy learns from samples of a distant one, and may "
            "collapse; lower --lr or --max_staleness"
        )
        return {name: problem}

    def check_tools(self, outputs: list) -> dict[str, str]:
        """A tool must not raise at half of its calls: the policy learns to live without it."""
        totals = Counter()
        for output in outputs:
            totals.update(numeric_entries(output.metrics))
        problems = {}
        for name, n_raised in totals.items():
            kind, _, tool = name.partition("/")
            n_calls = totals[f"tool_calls/{tool}"]
            if kind == "tool_exceptions" and n_calls >= FEW_CALLS and n_raised >= n_calls / 2:
                problems[name] = (
                    f"the tool {tool!r} raised at {n_raised} of its {n_calls} calls, and the model "
                    "read the error: is the tool broken? Its first exception was printed"
                )
        return problems

    def check_answers(self, outputs: list) -> dict[str, str]:
        """The best-paid answers must be whole, and tool calls must be parsed."""
        problems = {}
        best = max(map(total_reward, outputs))
        cut_off = [output.truncated for output in outputs if total_reward(output) == best]
        if best > 0 and sum(cut_off) > len(cut_off) / 2:
            problems["truncated"] = (
                f"{sum(cut_off)} of the {len(cut_off)} best-paid answers were cut off by a "
                "limit: see --mask_truncated and --overlong_buffer"
            )
        has_turn_rewards = any(map(_has_early_reward, outputs))
        if has_turn_rewards and "token_rewards" not in self.args.estimator_takes:
            problems["turn_rewards"] = (
                f"--adv_estimator {self.args.adv_estimator} adds up the rewards of turns: it does "
                "not see which turn earned them, as gae, reinforce_pp and gigpo do"
            )
        n_unparsed = 0
        for output in outputs:
            has_mark = any(mark in output.text for mark in CALL_MARKS)
            n_unparsed += has_mark and output.metrics.get("tool_calls") == 0
        if n_unparsed > len(outputs) / 2:
            problems["parser"] = (
                f"{n_unparsed} answers look like tool calls, and none was parsed in them: is "
                f"--tool_parser {self.args.tool_parser} the model's?"
            )
        return problems

    def check_batch(self, batch) -> dict[str, str]:
        """The mask must be the sampled tokens; a unit weighs 1; advantages follow the rewards."""
        problems = {}
        units = batch.units
        mask = batch["response_mask"]  # (B, T)
        is_sampled = batch["versions"] >= 0  # (B, T)
        n_wrong = (is_sampled != mask.bool()).sum().item()
        if n_wrong and not self.args.mask_truncated:
            problems["mask"] = (
                f"response_mask is wrong at {n_wrong} tokens: sampled ones are not trained, or "
                "others are"
            )
        zeros = torch.zeros_like(units.outcomes)
        tokens = zeros.index_add(0, units.unit_of_row, mask.sum(-1))  # (N,)
        is_trained = tokens > 0
        if is_trained.sum() != losses.count_sequences(mask, batch["unit_tokens"]).round():
            problems["weight"] = (
                "a rollout of several outputs weighs more than one of a single output"
            )
        if "groups" not in self.args.estimator_takes:  # units are not compared
            return problems
        sums = (batch["advantages"] * mask).sum(-1)  # (B,)
        means = zeros.index_add(0, units.unit_of_row, sums) / tokens.clamp(min=1)  # (N,)
        expected = losses.grpo_advantages(batch.shaped_rewards, units.groups)[is_trained]
        found = losses.grpo_advantages(means, units.groups)[is_trained]
        correlation = (expected * found).sum() / expected.square().sum()
        if correlation < 0.5:  # NaN, where all rewards are equal, is not
            problems["advantages"] = (
                "advantages do not follow the rewards: within groups their correlation is "
                f"{correlation:.2f}, not 1"
            )
        return problems


def _has_early_reward(output) -> bool:
    """Returns whether the policy spoke again after a turn that earned a reward."""
    return any(
        reward and 1 in output.response_mask[index + 1 :] for index, reward in output.turn_rewards
    )
