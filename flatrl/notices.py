"""What a run tells its user beside the table of metrics.

At the start it says what is about to be trained; meanwhile there are warnings, a trajectory
now and then, the report and a tracker; at the end, the rewards and what to do next."""

import contextlib
import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from agent_loop import AgentLoopOutput, row_kwargs, total_reward
from flatrl.files import logged
from flatrl.report import LiveReport
from flatrl.trackers import Tracker
from flatrl.watch import Watch

MAX_ROWS = 10_000  # rows of a split that are looked at for warnings, if they are in memory
MAX_ROWS_ON_DISK = 1000  # each of them is read, and maybe filtered, as it is looked at
LIMITS = {
    "length": "hit the length limit (--max_response_tokens)",
    "max_turns": "hit a limit of turns (--max_assistant_turns)",
    "timeout": "ran out of time"}


class Notices:
    """The notices of one run. log: the run's flatrl.log.Log; about: what args.json holds; rows:
    the metrics of the steps before, if the run is resumed."""

    def __init__(self, log, about: dict, rows: list[dict]):
        args = log.args
        self.watch = Watch(args, rows)
        self.log = log
        self.report = LiveReport(log.folder, log.tokenizer, log.warn_once)
        self.tracker = None
        if args.wandb_project:
            self.tracker = Tracker(args.wandb_project, args.output_dir, about)
        self.is_learning = True  # whether the last step taught something

    def start(self, rows: dict, rows_read: dict, network, device):
        """Says what is about to be trained, and warns of what makes that pointless.

        rows: those of "train" and of "val"; rows_read: the same before overlong ones were
        dropped; network: the policy; device: on which it is going to be."""
        args = self.log.args
        self.log.say(banner(args, rows, rows_read, network, device, self.log.steps_done))
        if (args.dtype == "bfloat16" and device.type == "cpu"
                and not torch.cpu._is_avx512_bf16_supported()):
            self.log.warn_once("this processor has no instructions for bfloat16: a step may take "
                               "several times as long as in float32, the default here")
        with contextlib.suppress(Exception):  # rows hold what they like
            for warning in row_warnings(rows["train"], rows["val"]):
                self.log.warn_once(warning)

    def step(self, metrics: dict, phase=None, batch: dict | None = None):
        """Reports a step. phase: what was sampled, or None; batch: that of the step's update.

        Of steps in a row that taught nothing, it speaks of the first."""
        step = metrics["step"]
        self.report.step(step, phase.trained if batch else [], batch)
        if self.tracker:
            outputs = phase.outputs if phase else []
            self.tracker.step(metrics, outputs, self.log.tokenizer)
        if not batch:
            return
        was_learning = self.is_learning
        advantages = batch["advantages"][batch["response_mask"].bool()]
        self.is_learning = "actor/imitation_loss" in metrics or advantages.any()
        if was_learning and not self.is_learning:
            self.log.say(f"warning: step {step} taught nothing: {why_nothing(phase.sampled)}")
        for warning in self.watch.step(metrics, phase.trained, batch):
            self.log.warn_once(warning)
        every = self.log.args.show_every
        if every and (step - 1) % every == 0:
            text = whole_text(phase.outputs[0], self.log.tokenizer)
            self.log.say(f"the first trajectory of step {step}:\n{text}")

    def close(self):
        self.report.close()
        if self.tracker:
            self.tracker.close()


# ---------------------------------------------------------------- the start


def banner(args, rows: dict, rows_read: dict, network, device, steps_done: int) -> str:
    """Returns the lines that say what is about to be trained. See `Notices.start`."""
    train, val = rows["train"], rows["val"]
    lines = [
        f"{args.task}: "
        f"{len(train)} training rows ({dropped(train, len(rows_read['train']))}), "
        f"{len(val)} validation rows ({dropped(val, len(rows_read['val']))})"]
    millions = network.model.num_parameters() / 1e6
    model = f"{args.model}: {millions:.2f}M parameters, {args.dtype}, "
    model += f"{dist.get_world_size()} x {device.type}"
    if not network.packed:
        model += "; its layers take no packed sequences: each is computed alone, right-padded"
    lines.append(model)
    if not args.num_steps:
        lines.append(
            f"evaluation: {args.eval_samples} trajectories a validation row, at temperature "
            f"{args.eval_temperature:g}; writing {args.output_dir}")
        return "\n".join(lines)

    n = args.prompts_per_step
    step = f"{n} prompts x {args.group_size} = {n * args.group_size} trajectories a step, "
    if args.algo == "sft":
        step = f"{n} demonstrations a step, "
    if args.rollout_only:
        step += "and no update"
    else:
        usual = type(args)().preset_values()
        flags = [f"{name} {getattr(args, name)}" for name in usual
                 if getattr(args, name) != usual[name]]
        but = f", but {', '.join(flags)}" if flags else ""
        lines.append(f"{args.algo}: the default flags (docs/algorithms.md){but}")
        step += f"{args.updates_per_rollout} update(s) each"
        if args.updates_per_rollout == 1:
            step += " (so the ratio is 1, and clips have no effect)"
        step += f", lr {args.lr:g}"
    resuming = f"resuming after step {steps_done} of " if steps_done else ""
    lines.append(f"{step}; {resuming}{args.num_steps} steps; writing {args.output_dir}")
    return "\n".join(lines)


def dropped(rows, n_read: int) -> str:
    """Says how many of n_read rows were dropped; of a table on disk, how many of a sample."""
    share = getattr(rows, "overlong", 0)
    if share:
        return f"about {share:.1%} overlong: another one instead, when they are drawn"
    return f"{n_read - len(rows)} overlong ones dropped"


def row_warnings(train, val) -> Iterator[str]:
    """Yields warnings of the first rows of both splits.

    They count the rows that say need_tools_kwargs (verl's key in extra_info) and have no
    tools_kwargs, and the validation rows that ask what a training row asks."""
    first_train, first_val = first_rows(train), first_rows(val)
    sample = ""
    n_train, n_val = len(first_train), len(first_val)
    if n_train + n_val < len(train) + len(val):
        sample = f" (of the first {n_train:,} training rows and {n_val:,} others)"
    n_lacking = 0
    for row in first_train + first_val:
        if row_kwargs(row, "need_tools_kwargs") and not row_kwargs(row, "tools_kwargs"):
            n_lacking += 1
    if n_lacking:
        yield (f"{n_lacking} rows say need_tools_kwargs, but their tools_kwargs are empty: "
               f"they get all tools{sample}")
    questions = set(map(question, first_train)) - {None}
    n_common = sum(question(row) in questions for row in first_val)
    if n_common:
        yield (f"{n_common} of {n_val} validation rows have the prompt of a training row: "
               f"eval/reward is too good{sample}")


def first_rows(rows) -> list[dict]:
    """Returns the first rows of a split; fewer of a table on disk, which is slow to read."""
    return list(itertools.islice(rows, MAX_ROWS if isinstance(rows, list) else MAX_ROWS_ON_DISK))


def question(row: dict) -> str | None:
    """Returns what a row asks; None of a row with images, which are not compared."""
    if row.get("images"):
        return None
    kwargs = [row_kwargs(row, name) for name in ("tools_kwargs", "interaction_kwargs")]
    return json.dumps([row["prompt"], kwargs], default=str, sort_keys=True)


# ---------------------------------------------------------------- steps


def whole_text(output: AgentLoopOutput, tokenizer) -> str:
    """Returns an output as text, special tokens included, and how it ended."""
    text = tokenizer.decode(output.prompt_ids + output.response_ids)
    text = re.sub(
        r"(<\|image_pad\|>)+",
        lambda match: f"[{len(match[0]) // len(match[1])} tokens of an image]", text)
    line = "-" * 40
    end = f"reward {total_reward(output):g}, {output.stop_reason}"
    return f"{line}{line}\n{text}\n{line} {end} {line}"


def why_nothing(outputs: list[AgentLoopOutput]) -> str:
    """Returns what the outputs of a step have in common that taught nothing."""
    n = len(outputs)
    reasons = []
    n_calls = [output.metrics.get("tool_calls") for output in outputs]
    if set(n_calls) != {None}:
        reasons.append(f"{sum(map(bool, n_calls))} of {n} called a tool")
    ends = Counter(output.stop_reason for output in outputs)
    reasons += [f"{ends[end] / n:.0%} {text}" for end, text in LIMITS.items() if ends[end]]
    rewards = set(map(total_reward, outputs))
    if len(rewards) == 1:
        reasons.append(f"all rewards are {min(rewards):g}")
    else:
        reasons.append("all groups have equal rewards")
    return ", ".join(reasons) + " (docs/log.md, When something is off)"


# ---------------------------------------------------------------- the end


def summary(args, steps_done: int) -> str:
    """Returns lines: a run's rewards, and how to evaluate its policy, talk to it, go on.

    There is a line only for what can be done. Of a flag that is given twice the last one counts.
    steps_done: the steps of this run so far."""
    folder = Path(args.output_dir)
    lines = []
    saved = {path.name for path in folder.glob("checkpoints/step_*")}
    for title, name in ("reward", "reward/mean"), ("eval reward", "eval/reward"):
        rewards = logged(folder, name)
        if not rewards:
            continue
        # The first of equal ones, or the first that was saved: a reader may go back to it.
        best = max(rewards, key=lambda step: (rewards[step], f"step_{step:06d}" in saved))
        lines.append(f"{title} {rewards[min(rewards)]:.3f}")
        if len(rewards) > 1:
            lines[-1] += (f" -> {rewards[max(rewards)]:.3f}, "
                          f"best {rewards[best]:.3f} at step {best}")
            if title != "reward" and f"step_{best:06d}" not in saved:
                lines[-1] += " (not saved)"
    lines.append(f"report: {folder / 'report.html'}")
    final = folder / "final"
    again = "the same command, with"
    if args.replay is None and final.is_dir():
        chat = shlex.join(["python", "examples/chat.py", str(final), "--task", args.task])
        lines += [
            f"evaluate: {again} --num_steps 0 --model {final} --output_dir {folder}-eval",
            f"talk to it: {chat}"]
    if saved:
        if steps_done < args.num_steps:
            lines.append(f"go on: {again} --resume")
        elif args.lr_schedule == "constant":
            lines.append(f"more steps: {again} --resume --num_steps {2 * args.num_steps}")
    return "\n".join(lines)
