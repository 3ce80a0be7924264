"""What a run tells its user beside its table: warnings at the start, why a step taught nothing, the report, a tracker,
what to do at the end. `data.Log` has a `Watch`; the five files run without it."""

import contextlib
import json
import shlex
import sys
from collections import Counter
from pathlib import Path

from agent_loop import render_text, row_kwargs, task_tools, templated
from report import report
from report.trackers import Tracker, total_reward

LIMITS = {"length": "hit the length limit", "max_turns": "hit a limit of turns", "timeout": "ran out of time"}


class Watch:
    def __init__(self, log, about: dict):
        self.log, self.learning = log, True
        self.tracker = Tracker(log.args, about) if log.args.wandb_project else None

    def start(self, run) -> None:
        """Warns of what makes training or evaluation pointless, before the first step. run: train.Run."""
        for check in ignored_tools, common_prompts:
            with contextlib.suppress(Exception):  # templates raise what they like; rows hold what they like
                if warning := check(run):
                    self.log.warn_once(warning)

    def step(self, metrics: dict, phase=None, batch: dict | None = None) -> None:
        """What data.Log.metrics knows. A step that teaches nothing is told of, but not again before one that does."""
        if batch:
            learning = bool(batch["advantages"][batch["response_mask"].bool()].any())
            if self.learning and not learning:
                self.log.say(f"warning: step {metrics['step']} taught nothing: {why_nothing(phase.sampled)}")
            self.learning = learning
        report.step(self.log, metrics, phase, batch)
        if self.tracker:
            self.tracker.step(metrics, self.log.tokenizer, phase)

    def close(self) -> None:
        report.close(self.log)
        if self.tracker:
            self.tracker.close()


def ignored_tools(run) -> str | None:
    """A warning if the chat template shows the model none of the first row's tools."""
    row = run.rows["train"][0]
    schemas = [tool.schema for tool in task_tools(run.task, row_kwargs(row, "tools_kwargs")).values()]
    tokenizer = templated(run.tokenizer, run.args.chat_template_args)
    chat = row["prompt"] or [{"role": "user", "content": "hello"}]
    texts = {render_text(tokenizer, chat, tools, True) for tools in (schemas, None)}
    if schemas and len(texts) == 1:
        return ("the model's chat template ignores tools: the policy does not see that it has any. Take another model "
                "or template, or describe them in the prompt")  # fmt: skip


def common_prompts(run) -> str | None:
    """A warning of validation rows that ask what a training row asks. Rows with images are not compared."""

    def asked(row):
        kwargs = [row_kwargs(row, f"{name}_kwargs") for name in ("tools", "interaction")]
        return json.dumps([row["prompt"], kwargs], default=str, sort_keys=True)

    rows = run.rows
    train = {asked(row) for row in rows["train"] if not row.get("images")}
    n = sum(asked(row) in train for row in rows["val"] if not row.get("images"))
    if n:
        return f"{n} of {len(rows['val'])} validation rows have the prompt of a training row: eval/reward is too good"


def why_nothing(outputs) -> str:
    """What a step's trajectories have in common."""
    n, ends = len(outputs), Counter(output.stop_reason for output in outputs)
    said = [f"{ends[reason] / n:.0%} {words}" for reason, words in LIMITS.items() if ends[reason]]
    calls = [output.metrics["tool_calls"] for output in outputs if "tool_calls" in output.metrics]
    if calls:
        said.insert(0, f"{sum(map(bool, calls))} of {n} called a tool")
    rewards = {*map(total_reward, outputs)}
    alike = f"all rewards are {min(rewards):g}" if len(rewards) == 1 else "all groups have equal rewards"
    return ", ".join([*said, alike]) + " (docs/log.md, When something is off)"


def summary(args, done: int) -> str:
    """A run's rewards, and how to open its report, evaluate its policy and go on, where each can be done.

    args: train.Args; done: steps of the run."""
    folder, found = Path(args.output_dir), {}
    rows = list(report.json_lines(folder / "metrics.jsonl"))
    for title, name in ("reward", "reward/mean"), ("eval reward", "eval/reward"):
        rewards = [(row[name], row["step"]) for row in rows if name in row]
        if rewards:
            best, step = max(rewards, key=lambda pair: pair[0])
            found[title] = f"{rewards[0][0]:.3f}"
            if len(rewards) > 1:
                found[title] += f" -> {rewards[-1][0]:.3f}, best {best:.3f} at step {step}"
    found["report:"] = str(folder / "report.html")
    if args.replay is None and (folder / "final").is_dir():
        found["evaluate:"] = command(num_steps=0, model=folder / "final", output_dir=f"{folder}-eval")
    if any(folder.glob("checkpoints/step_*")):
        if done < args.num_steps:
            found["go on:"] = command() + " --resume"
        elif args.lr_schedule == "constant":
            found["train on:"] = command(num_steps=2 * args.num_steps) + " --resume"
    return "\n".join(f"{name} {text}" for name, text in found.items())


def command(**flags) -> str:
    """This process's command line with other values of some flags, without --resume."""
    words, left_out = ["accelerate", "launch"], False
    for word in sys.argv:
        if word.startswith("--"):
            left_out = word.partition("=")[0][2:] in {*flags, "resume", "resume_with_changes"}
        if not left_out:
            words.append(word)
    return shlex.join(words + [str(x) for name, value in flags.items() for x in (f"--{name}", value)])
