"""What a run writes about itself: metrics.jsonl, rollouts/*.jsonl, args.json, and the table on
the terminal. Only the main rank writes."""

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

from tqdm import tqdm

from agent_loop import RESPONSE_LISTS, AgentLoopOutput, numeric_entries, total_reward
from flatrl import notices
from flatrl.bad_input import need, refusing
from flatrl.files import is_dumped, read_json_lines, to_json_lines, write_whole
from flatrl.models import versions

GIT = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]


def or_warn(*errors: type[Exception]) -> Callable:
    """Returns a decorator for functions that write, so that a full disk does not end a run.

    The decorated function returns True if it succeeded. If one of `errors` is raised, it logs a
    warning and returns False. Its first argument is a Log, or has the attribute `log`."""

    def decorate(write):
        @functools.wraps(write)
        def attempt(self, *args):
            try:
                write(self, *args)
                return True
            except errors as error:
                log = getattr(self, "log", self)
                reason = str(error).strip().split("\n")[-1]
                log.say(f"warning: {write.__name__}: {type(error).__name__}: {reason}")
                return False

        return attempt

    return decorate


class Log:
    """The files and the table of a run. It owns the notices (report, W&B, warnings)."""

    # title (at least as wide as a number), metric and format
    COLUMNS = [
        ("reward", "reward/mean", ".3f"),
        ("  eval", "eval/reward", ".3f"),
        ("length", "response_length/mean", ".1f"),
        ("turns", "num_turns/mean", ".2f"),
        ("entropy", "actor/entropy", ".3f"),
        ("clipfrac", "actor/clipfrac", ".4f"),
        ("  grad", "actor/grad_norm", ".3f"),
        ("logp_diff", "rollout/logp_diff_max", ".1e"),
        ("tokens/s", "throughput/tokens_per_s", ",.0f"),
        ("rollout_s", "timing/rollout_s", ".2f"),
        ("train_s", "timing/train_s", ".2f"),
    ]

    def __init__(self, args, tokenizer, steps_done: int, training_rows: str = ""):
        """steps_done: those of the checkpoint with --resume. Lines of later steps are removed,
        because these steps are run again. training_rows: as from `rows.hash_of_rows`."""
        self.args = args
        self.tokenizer = tokenizer
        self.steps_done = steps_done
        self.folder = Path(args.output_dir)
        self.n_lines = 0  # of the table
        self.warned = set()  # texts of warnings
        self.terminal = sys.stdout  # a tool's redirect_stdout may leave another in its place
        self.unwritten = b""  # of metrics.jsonl, because the disk was full
        self.about = {
            "args": asdict(args),
            "training_rows": training_rows,
            "git": git_hash(),
            "versions": versions(),
            "command": sys.argv,
            "processes": int(os.environ.get("WORLD_SIZE", 1)),
        }
        if not args.resume:  # otherwise `checkpoints.resume` does: until then the start may fail
            self.write_about()  # first, because it marks the folder as a run's own
        (self.folder / "rollouts").mkdir(exist_ok=True)
        file = self.folder / "metrics.jsonl"
        rows = []
        for row in read_json_lines(file):
            if isinstance(row.get("step"), int) and row["step"] <= steps_done:
                rows.append(row)
        if rows:
            write_whole(file, to_json_lines(rows))
        self.notices = notices.Notices(self, self.about, rows)

    def write_about(self):
        """Writes args.json: flags, a hash of the training rows, versions, commit, command."""
        write_whole(self.folder / "args.json", f"{json.dumps(self.about, indent=2)}\n")

    @or_warn(Exception)
    def metrics(self, metrics: dict, *learned):
        """Writes a step's metrics: one JSON object in metrics.jsonl, one line of the table.

        learned: the step's rollouts and batch, if it trained. The report keeps their
        advantages and the trainer's logprobs."""
        self.unwritten += to_json_lines([metrics]).encode(errors="backslashreplace")
        self._say_table_line(metrics)
        # Without a buffer a kill loses nothing. On a full disk a part may be written: the rest
        # follows with the next step.
        with (self.folder / "metrics.jsonl").open("ab", buffering=0) as file:
            n_written = file.write(self.unwritten)
            self.unwritten = self.unwritten[n_written:]
        self.notices.step(metrics, *learned)

    def _say_table_line(self, metrics):
        """Prints a step's line of the table, and the titles above every 20th."""
        values = numeric_entries(metrics)
        titles = "     step"
        line = f"{metrics['step']:>4}/{self.args.num_steps:<4}"
        for title, name, form in self.COLUMNS:
            cell = format(values[name], form) if name in values else ""
            titles += f"  {title}"
            line += f"  {cell:>{len(title)}}"
        if self.n_lines % 20 == 0:
            self.say(titles)
        self.n_lines += 1
        self.say(line)

    @or_warn(Exception)
    def rollouts(self, name: str, outputs: list[AgentLoopOutput], errors: list[dict]):
        """Writes rollouts/<name>.jsonl: a line for each failure, and for each output of the groups
        that --dump_rollouts keeps. An error of any kind is only a warning (`or_warn`).

        Of images only the number is written. Without any line there is no file."""
        lines = []
        for output in outputs:
            if not is_dumped(output.extra["prompt"], self.args.dump_rollouts):
                continue
            line = {"index": output.extra.get("index"), "total_reward": total_reward(output)}
            line |= vars(output) | {"images": len(output.images)}
            for key in ("prompt_ids", *RESPONSE_LISTS):  # thousands of numbers: they come last
                line[key] = [*line.pop(key)]
            lines.append(line)
        lines += errors
        if lines:
            write_whole(self.folder / "rollouts" / f"{name}.jsonl", to_json_lines(lines))

    def say(self, text: str, file=None):
        """Prints a text on the terminal, above the progress bars."""
        with contextlib.suppress(OSError):  # the terminal may be gone
            tqdm.write(text, file=file or self.terminal)

    def warn_once(self, text: str):
        """Prints a warning unless the same text was printed before."""
        if text not in self.warned:
            self.warned.add(text)
            self.say(f"warning: {text}", sys.stderr)

    @or_warn(Exception)
    def close(self):
        self.notices.close()


class SilentLog:
    """The log of all ranks but the main one: the same methods, none of which does anything."""

    def __getattr__(self, name):
        return lambda *args: None


def git_hash() -> str:
    """Returns the commit of this checkout, followed by "-dirty" if files were changed.

    It is empty outside a checkout, and without git."""
    folder = Path(__file__).parent
    with contextlib.suppress(OSError):
        return subprocess.run(GIT, cwd=folder, capture_output=True, text=True).stdout.strip()
    return ""


def replay_file(args, step: int) -> Path:
    """Returns the file with a step's rollouts in the run to replay.

    That of step 0 is step_000001.jsonl, because the log counts finished steps."""
    return Path(args.replay, "rollouts", f"step_{step + 1:06d}.jsonl")


def steps_to_replay(args) -> int:
    """Returns for how many steps --replay has files, at most --num_steps.

    Raises BadInput if there are none."""
    n_steps = 0
    while n_steps < args.num_steps and replay_file(args, n_steps).is_file():
        n_steps += 1
    need(
        n_steps > 0,
        f"--replay: no {replay_file(args, 0)} (with --dump_rollouts a step may have none)",
    )
    return n_steps


def read_rollouts(file: Path, vocab_size: int) -> tuple[list[AgentLoopOutput], list[dict]]:
    """Returns the outputs and errors that Log.rollouts wrote, for --replay.

    Raises BadInput if a line is damaged, lacks its reward, or has images or tokens from
    vocab_size on."""
    outputs = []
    errors = []
    names = {field.name for field in fields(AgentLoopOutput)}
    for number, text in enumerate(file.read_bytes().splitlines(), 1):
        with refusing(f"{file}, line {number}, is not a trajectory that can be replayed"):
            line = json.loads(text)
            if line.get("images"):
                raise ValueError("it has images, whose pixels are not in the file")
            if "kind" in line:
                errors.append(line)
                continue
            output = AgentLoopOutput(**{name: line[name] for name in names & line.keys()})
            if output.reward is None or not {"prompt", "sample", "segment"} <= set(output.extra):
                raise ValueError("it lacks its reward or its number")
            if max(output.prompt_ids + output.response_ids) >= vocab_size:
                raise ValueError("its tokens are another model's")
            output.extra.pop("told_prompt_ids", None)  # hints are not replayed
            outputs.append(output)
    need(
        any("filtered" not in output.extra for output in outputs),
        f"--replay: {file} has no trajectory to learn from",
    )
    return outputs, errors
