"""What a run tells besides the table: its plan, its end, failures, and steps without effect."""

import shlex
import sys

import torch.distributed as dist

from agent_loop import AgentLoopOutput, total_reward
from flatrl.files import logged
from flatrl.log import Listener

NO_GRADIENT = "its gradient is 0: clip or --rollout_correction left no token, or there was no hint"


class Notices(Listener):
    """The messages of one run."""

    is_learning = True  # whether the last step taught something; the first is expected to

    def start(self, rows, rows_read, policy, device, task):
        """Prints the rows, the model and the plan."""
        args = self.log.args
        counts = []
        for split, name in ("train", "training"), ("val", "validation"):
            n_dropped = len(rows_read[split]) - len(rows[split])
            remark = f" ({n_dropped} overlong ones dropped)" if n_dropped else ""
            counts.append(f"{len(rows[split])} {name} rows{remark}")

        size = f"{policy.model.num_parameters() / 1e6:.2f}M parameters"
        if args.lora_rank:
            n_trained = policy.model.num_parameters(only_trainable=True)
            size += f", {n_trained / 1e6:.2f}M of them trained"
        devices = f"{dist.get_world_size()} x {device.type}"
        packing = "" if policy.is_packed else ", right-padded: its layers take no packed sequences"
        self.log.say(f"{args.task}: {', '.join(counts)}")
        self.log.say(f"{args.model}: {size}, {args.dtype}, {devices}{packing}")
        lr = "the task's optimizer" if hasattr(task, "optimizer") else f"lr {args.lr:g}"
        self.log.say(f"{plan(args, self.log.steps_done, lr)}; writing {args.output_dir}")

    def metrics(self, row, rollouts=None, batch=None):
        """Reports failures, and the first of several steps that taught nothing."""
        self.warn_of_failures(row)
        if not batch:
            return
        was_learning = self.is_learning
        advantages = batch["advantages"][batch["response_mask"].bool()]
        distils = "actor/kl" in row and not self.log.args.reward_coef  # perhaps by the loss alone
        has_signal = distils or "actor/imitation_loss" in row or advantages.any()
        has_gradient = row.get("actor/grad_norm", 1) > 0  # missing while only the critic learns
        self.is_learning = has_signal and has_gradient
        if was_learning and not self.is_learning:
            why = NO_GRADIENT if has_signal else why_nothing(rollouts.sampled)
            self.log.warn(f"step {row['step']} taught nothing: {why}")

    def warn_of_failures(self, row):
        """Warns of the rollouts that no mean of a step counts, and of those of its evaluation."""
        n_failed = row.get("rollout/failed_agent_loop", 0) + row.get("rollout/failed_reward", 0)
        n_counted = row.get("rollout/trajectories", 0) + row.get("rollout/demonstrations", 0)
        of_eval = row.get("eval/failed", 0), row.get("eval/trajectories", 0)
        places = {"step": (n_failed, n_counted), "the evaluation at step": of_eval}
        for place, (n, n_others) in places.items():
            if n:
                failed = f"{n} of {n + n_others:.0f} rollouts of {place} {row['step']} failed"
                self.log.warn(f"{failed}: its means leave them out")

    def close(self):
        """Prints how the rewards changed, and how to go on."""
        folder = self.log.folder
        names = {"reward": "reward/mean", "evaluation": "eval/reward"}
        curves = {title: logged(folder, name) for title, name in names.items()}
        changes = [f"{title} {change(values)}" for title, values in curves.items() if values]
        ways = []
        if (folder / "report.html").is_file():
            ways.append(f"report: {folder / 'report.html'}")
        if (folder / "final").is_dir():
            # Of a flag that is given twice, the last one holds. A --replay can't evaluate.
            evaluation = ["--num_steps", "0", "--eval_every", "0", "--model", f"{folder / 'final'}"]
            command = [*sys.argv, *evaluation, "--output_dir", f"{folder}-eval"]
            if not self.log.args.replay:
                ways.append(f"evaluate: accelerate launch {shlex.join(command)}")
        elif any(folder.glob("checkpoints/step_*")):
            ways.append("continue: the same command with --resume")
        for line in filter(None, ("; ".join(changes), "; ".join(ways))):
            self.log.say(line)


def plan(args, steps_done: int, lr: str) -> str:
    """Describes what a run samples, and how it learns from that."""
    if not args.num_steps:
        temperature = args.sampling(True)["temperature"]
        n = args.eval_samples
        return f"evaluation: {n} rollouts a validation row, at temperature {temperature:g}"

    n = args.prompts_per_step
    sampled = f"{n} prompts x {args.group_size} = {n * args.group_size} rollouts by {args.agent}"
    if args.algo == "sft":
        sampled = f"{n} demonstrations"
    last = args.num_steps
    steps = f"steps {steps_done + 1} to {last}" if steps_done else f"{last} steps"
    update = "no update" if args.rollout_only else f"{args.updates_per_step} update(s), {lr}"
    method = args.algo
    for name in ("adv_estimator", "policy_loss"):
        if getattr(args, name) != args.preset_values()[name]:
            method += f" with {getattr(args, name)}"
    return f"{method}: {steps} of {sampled}, {update}"


def why_nothing(outputs: list[AgentLoopOutput]) -> str:
    """Returns what the outputs of a step that taught nothing have in common."""
    n = len(outputs)
    reasons = []
    calls = [output.metrics["tool_calls"] for output in outputs if "tool_calls" in output.metrics]
    if calls:
        reasons.append(f"{sum(map(bool, calls))} of {n} called a tool")
    n_cut_off = sum(output.truncated for output in outputs)
    if n_cut_off:
        limits = "--max_response_tokens, --max_assistant_turns"
        reasons.append(f"{n_cut_off / n:.0%} were cut off by a limit ({limits})")
    rewards = [f"{total_reward(output):g}" for output in outputs]
    is_same = len(set(rewards)) == 1
    reasons.append(f"all rewards are {rewards[0]}" if is_same else "all groups have equal rewards")
    return f"{', '.join(reasons)} (docs/running.md#when-something-is-off)"


def change(values: dict[int, float]) -> str:
    """Returns a metric's first, last and best value. values: by step."""
    first = values[min(values)]
    if len(values) == 1:
        return f"{first:.3f}"
    best = max(values, key=values.get)
    return f"{first:.3f} -> {values[max(values)]:.3f}, best {values[best]:.3f} at step {best}"
