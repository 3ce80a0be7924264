"""The messages of a run to its user, in addition to the table of metrics.

At the start: the plan. During the run: warnings, a trajectory now and then, the report and
Weights & Biases. At the end: the rewards, and commands to continue."""

import math
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from agent_loop import AgentLoopOutput, row_kwargs, total_reward
from flatrl.files import logged
from flatrl.report import LiveReport
from flatrl.rows import unseen
from flatrl.trackers import Tracker
from flatrl.watch import Watch

SHOW_EVERY = 20  # steps between the trajectories that are printed
HIGH_LR = 2e-5  # for LARGE networks, in reinforcement learning and fine-tuning
LARGE = 300e6  # parameters; tiny models take higher rates
LIMITS = "--max_response_tokens, --max_assistant_turns"
MAX_ROWS_ON_DISK = 1000  # of a split that are looked at


class Notices:
    """The notices of one run.

    log: the run's flatrl.log.Log; about: the contents of args.json; rows: the metrics of the
    earlier steps, if the run is resumed."""

    def __init__(self, log, about: dict, rows: list[dict]):
        args = log.args
        self.log = log
        self.watch = Watch(args, rows)
        self.report = LiveReport(
            log.folder, log.tokenizer, log.warn_once, args.dump_rollouts
        )
        self.tracker = None
        if args.wandb_project:
            self.tracker = Tracker(args.wandb_project, args.output_dir, about)
        self.is_learning = True  # whether the last step taught something
        self.lowest = math.inf  # the rewards of the steps so far
        self.highest = -math.inf

    def start(self, rows: dict, rows_read: dict, network, device):
        """Prints the plan of the run, and warns of what is likely a mistake in rows and flags.

        That is: columns with images that are not read, a high learning rate, and training rows
        among the validation rows.

        rows: by split, "train" and "val"; rows_read: the same with overlong ones; network: the
        policy; device: where it will be."""
        log = self.log
        log.say(banner(log.args, rows, rows_read, network, device, log.steps_done))
        names = sorted(set().union(*map(unseen, first(rows["train"]))))
        if names:
            log.warn_once(
                f"the policy does not see what the training rows hold as {', '.join(names)}: "
                "--image_key names the column with images; there is no video and no audio"
            )
        rate = high_rate(log.args, network.model.num_parameters())
        if rate:
            log.warn_once(rate)
        first_rows = without_images(first(rows["val"]))
        questions = set(map(question, without_images(first(rows["train"]))))
        n_common = sum(question(row) in questions for row in first_rows)
        if n_common:
            log.warn_once(
                f"{n_common} of {len(first_rows)} validation rows have the prompt of a training "
                "row: eval/reward is too good"
            )

    def step(self, metrics: dict, rollouts=None, batch: dict | None = None):
        """Reports a step.

        rollouts: what was sampled, if anything was; batch: that of the step's update. If
        several steps in a row taught nothing, the first one is reported."""
        step = metrics["step"]
        log = self.log
        for line in missing(metrics):
            log.say(f"warning: {line}")
        trained = rollouts.trained if batch else []
        self.report.step(step, trained, batch)
        if self.tracker:
            self.tracker.step(metrics, rollouts.outputs if rollouts else [], log.tokenizer)
        if not batch:
            return
        was_learning = self.is_learning
        advantages = batch["advantages"][batch["response_mask"].bool()]
        distils = "actor/kl" in metrics and not log.args.reward_coef  # perhaps by the loss alone
        imitates = "actor/imitation_loss" in metrics
        self.is_learning = distils or imitates or advantages.any()
        rewards = set(map(total_reward, rollouts.sampled))
        if was_learning and not self.is_learning:
            is_solved = rewards == {self.highest} and self.lowest < self.highest
            if is_solved:
                why = f"all rewards are {self.highest:g}, the highest"
                log.say(f"step {step} taught nothing: {why}")
            else:
                why = why_nothing(rollouts.sampled)
                log.say(f"warning: step {step} taught nothing: {why}")
        self.lowest = min({self.lowest, *rewards})
        self.highest = max({self.highest, *rewards})
        for warning in self.watch.step(metrics, trained, batch):
            log.warn_once(warning)
        if step % SHOW_EVERY == 1:
            text = whole_text(rollouts.outputs[0], log.tokenizer)
            kind = "demonstration" if "demonstration" in rollouts.outputs[0].extra else "trajectory"
            log.say(f"the first {kind} of step {step}:\n{text}")

    def close(self):
        self.report.close()
        if self.tracker:
            self.tracker.close()


# ---------------------------------------------------------------- the start


def banner(args, rows: dict, rows_read: dict, network, device, steps_done: int) -> str:
    """Returns the lines with the plan of the run. See `Notices.start`."""
    counts = []
    for split, name in ("train", "training"), ("val", "validation"):
        remark = f"{len(rows_read[split]) - len(rows[split])} overlong ones dropped"
        counts.append(f"{len(rows[split])} {name} rows ({remark})")
    if not rows["val"]:
        counts[1] = "no validation rows, so no evaluation"
    millions = network.model.num_parameters() / 1e6
    devices = f"{dist.get_world_size()} x {device.type}"
    if device.type == "cpu":
        devices += f" with {torch.get_num_threads()} thread(s)"
    model = f"{args.model}: {millions:.2f}M parameters, {args.dtype}, {devices}"
    if not network.is_packed:
        model += "; its layers take no packed sequences: each is computed alone, right-padded"
    lines = [f"{args.task}: {', '.join(counts)}", model]
    if args.num_steps:
        if not args.rollout_only:
            lines.append(preset_line(args))
            if args.algo != "sft" and any(row.get("demonstration") for row in first(rows["train"])):
                lines.append(imitation_line(args))
        resuming = f"resuming after step {steps_done} of " if steps_done else ""
        plan = f"{step_line(args)}; {resuming}{args.num_steps} steps"
    else:
        temperature = args.sampling(True)["temperature"]
        plan = (
            f"evaluation: {args.eval_samples} trajectories a validation row, at temperature "
            f"{temperature:g}"
        )
    lines.append(f"{plan}; writing {args.output_dir}")
    return "\n".join(lines)


def high_rate(args, n_parameters: int) -> str:
    """Returns a warning if --lr is high for a network of this size, else ""."""
    limit = HIGH_LR * (10 if args.lora_rank else 1)
    if n_parameters < LARGE or args.lr <= limit or args.rollout_only or not args.num_steps:
        return ""
    return (
        f"--lr {args.lr:g} is high for {n_parameters / 1e6:.0f}M parameters: most runs of such "
        "models use 1e-6 to 1e-5, with LoRA ten times that"
    )


def step_line(args) -> str:
    """Describes how much a step samples, and how it learns from that."""
    n = args.prompts_per_step
    step = f"{n} prompts x {args.group_size} = {n * args.group_size} trajectories a step"
    if args.algo == "sft":
        step = f"{n} demonstrations a step"
    if args.rollout_only:
        return f"{step}, and no update"
    updates = f"{args.updates_per_step} update(s) each"
    if args.correction[0] == "bypass":
        updates += " (clips bound the ratio to the engine's policy)"
    elif args.updates_per_step == 1:
        updates += " (so the ratio is 1, and clips have no effect)"
    return f"{step}, {updates}, lr {args.lr:g}"


def imitation_line(args) -> str:
    """Says which steps imitate demonstrations."""
    n = args.imitation_steps
    if n == 0:
        return "demonstrations are not imitated (--imitation_steps 0)"
    steps = "all steps" if n is None else f"the first {n} step(s)"
    hint = "; --imitation_steps N: only the first N do" if n is None else ""
    return f"{steps} imitate the demonstrations of the rows that have one, unsampled{hint}"


def preset_line(args) -> str:
    """Returns the line with the preset, and all [preset] flags whose values differ from GRPO's."""
    usual = type(args)().preset_values()
    values = {name: getattr(args, name) for name in usual}
    changed = [f"{name} {value}" for name, value in values.items() if value != usual[name]]
    but = f", but {', '.join(changed)}" if changed else ""
    return f"{args.algo}: the default flags (docs/algorithms.md){but}"


def first(rows: Sequence[dict]) -> list[dict]:
    """Returns a split, or the first rows of a table on disk, without those that can't be read."""
    if isinstance(rows, list):
        return rows
    found = []
    for number in range(min(len(rows), MAX_ROWS_ON_DISK)):  # each is read when it is looked at
        with suppress(Exception):  # a malformed one becomes a failed rollout when it is drawn
            found.append(rows[number])
    return found


def without_images(rows: list[dict]) -> list[dict]:
    """Returns the rows that have no images."""
    return [row for row in rows if not row.get("images")]


def question(row: dict) -> str:
    """Returns a text that is equal for rows with the same prompt, tools and simulated user."""
    kwargs = [row_kwargs(row, name) for name in ("tools_kwargs", "interaction_kwargs")]
    return repr([row["prompt"], kwargs])


# ---------------------------------------------------------------- steps


def whole_text(output: AgentLoopOutput, tokenizer) -> str:
    """Returns an output as text, special tokens included, and how it ended."""
    text = tokenizer.decode(output.prompt_ids + output.response_ids)
    text = re.sub(r"(<\|image_pad\|>)+", "[tokens of an image]", text)
    line = "-" * 40
    end = f"reward {total_reward(output):g}, {output.stop_reason}"
    return f"{line}{line}\n{text}\n{line} {end} {line}"


def missing(metrics: dict) -> list[str]:
    """Returns a line for the rollouts that no mean of a step counts, and one for its evaluation."""
    step = metrics["step"]
    lines = []
    n = metrics.get("rollout/failed_agent_loop", 0) + metrics.get("rollout/failed_reward", 0)
    if n:
        others = ("rollout/trajectories", "rollout/demonstrations")
        n_all = n + sum(metrics.get(name, 0) for name in others)
        lines.append(
            f"{n} of {n_all:.0f} rollouts of step {step} failed, and its means do not count them"
        )
    if metrics.get("eval/failed"):
        lines.append(missing_of_eval(step, metrics["eval/failed"], metrics["eval/trajectories"]))
    return lines


def missing_of_eval(step: int, n_failed: int, n_counted: int) -> str:
    """Returns a line for the rollouts that the mean of an evaluation does not count."""
    return (
        f"{n_failed} of {n_failed + n_counted} rollouts of the evaluation at step {step} failed or "
        "were skipped, and its mean does not count them"
    )


def why_nothing(outputs: list[AgentLoopOutput]) -> str:
    """Returns what the outputs of a step that taught nothing have in common."""
    n = len(outputs)
    reasons = []
    calls = [output.metrics["tool_calls"] for output in outputs if "tool_calls" in output.metrics]
    if calls:
        reasons.append(f"{sum(map(bool, calls))} of {n} called a tool")
    n_cut_off = sum(output.truncated for output in outputs)
    if n_cut_off:
        reasons.append(f"{n_cut_off / n:.0%} were cut off by a limit ({LIMITS})")
    rewards = set(map(total_reward, outputs))
    if len(rewards) == 1:
        reasons.append(f"all rewards are {min(rewards):g}")
    else:
        reasons.append("all groups have equal rewards")
    return f"{', '.join(reasons)} (docs/running.md#when-something-is-off)"


# ---------------------------------------------------------------- the end


def unless_saved(best: int, rewards: dict[int, float], checkpoint: Path) -> str:
    """Returns a remark if no step with the best evaluation was saved, else "".

    rewards: of all evaluations, by step; checkpoint: the best saved one."""
    step = int(checkpoint.name.removeprefix("step_"))
    if rewards.get(step) == rewards[best]:
        return ""
    if step not in rewards:  # no saved step was evaluated, and this is the latest
        return " (not saved)"
    return f" (not saved; the best saved checkpoint is {checkpoint.name}, {rewards[step]:.3f})"


def summary(args, steps_done: int, checkpoint: Path | None = None) -> str:
    """Returns the lines with a run's rewards, and how to evaluate, use and resume it.

    There is a line only for what can be done. steps_done: the steps of this run so far.
    checkpoint: the best saved one, if there is any."""
    folder = Path(args.output_dir)
    evaluated = logged(folder, "eval/reward")
    lines = []
    for title, rewards in ("reward", logged(folder, "reward/mean")), ("eval reward", evaluated):
        if not rewards:
            continue
        lines.append(f"{title} {rewards[min(rewards)]:.3f}")
        if len(rewards) > 1:
            best = max(rewards, key=rewards.get)
            last = rewards[max(rewards)]
            lines[-1] += f" -> {last:.3f}, best {rewards[best]:.3f} at step {best}"
            if rewards is evaluated and checkpoint:
                lines[-1] += unless_saved(best, rewards, checkpoint)
    if evaluated:
        failed = logged(folder, "eval/failed")
        counted = logged(folder, "eval/trajectories")
        shown = {max(evaluated, key=evaluated.get), max(evaluated)}  # the best and the last
        for step in sorted(shown & counted.keys()):
            if failed[step]:
                lines.append(missing_of_eval(step, failed[step], counted[step]))
    lines.append(f"report: {folder / 'report.html'}")
    final = folder / "final"
    again = "the same command, with"
    if args.replay is None and final.is_dir():
        chat = shlex.join(["python", "examples/chat.py", str(final), "--task", args.task])
        evaluation = f"--num_steps 0 --model {final} --output_dir {folder}-eval"
        if args.resume:
            evaluation += " and without --resume"
        lines += [f"evaluate: {again} {evaluation}", f"talk to it: {chat}"]
    if list(folder.glob("checkpoints/step_*")):
        if steps_done < args.num_steps:
            lines.append(f"continue: {again} --resume")
            if steps_done and args.lr_schedule == "constant":
                lines.append(f"or end it here, with a policy to evaluate: {again} --resume "
                             f"--num_steps {steps_done}")
        elif args.lr_schedule == "constant":
            lines.append(f"more steps: {again} --resume --num_steps {2 * args.num_steps}")
            if args.is_reached_by({"eval/reward": evaluated.get(steps_done, -math.inf)}):
                lines[-1] += " and without --stop_at_reward"
    return "\n".join(lines)
