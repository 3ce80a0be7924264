"""What a run's main rank writes: metrics.jsonl, rollouts/*.jsonl, args.json, and the table."""

import contextlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path

from tqdm import tqdm

from agent_loop import RESPONSE_LISTS, AgentLoopOutput, numeric_entries, total_reward
from flatrl.bad_input import check_ids, need, reason, refusing
from flatrl.files import read_json_lines, to_json_lines, write_whole
from flatrl.models import versions
from flatrl.peaks import peaks
from flatrl.user_code import checked_number

GIT = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]


class Listener:
    """Follows a run. train.LISTENERS names the subclasses. Of an error here the run's log warns."""

    def __init__(self, log: "Log"):
        self.log = log

    def start(self, rows: dict, rows_read: dict, policy, device, task):
        """Called before the engine starts. rows_read: by split as rows, but with overlong ones."""

    def metrics(self, row: dict, rollouts=None, batch=None):
        """Called after each step, and after the evaluation before the first.

        row: the step's metrics. rollouts, batch: those of a step that trained."""

    def close(self):
        """Called at the end of the run."""


class Log:
    """The files and the table of a run. It tells its `listeners` of each event."""

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
        ("  mfu", "throughput/mfu", ".1%"),
        ("  mbu", "throughput/mbu", ".1%"),
    ]

    def __init__(self, args, tokenizer, steps_done: int, rows_hash: str = ""):
        """With --resume drops lines after steps_done; else all. rows_hash: `rows.hash_of_rows`."""
        self.args = args
        self.tokenizer = tokenizer
        self.steps_done = steps_done
        self.folder = Path(args.output_dir)
        self.n_lines = 0  # of the table
        self.columns = self.COLUMNS if peaks() else self.COLUMNS[:-2]  # else without shares
        self.writer = ThreadPoolExecutor(1)
        self.writing: list[Future] = []  # its files: the rollouts of a step, and an evaluation's
        self.listeners: list[Listener] = []
        self.about = {
            "args": asdict(args),
            "training_rows": rows_hash,
            "git": git_hash(),
            "versions": versions(),
            "command": sys.argv,
            "processes": int(os.environ.get("WORLD_SIZE", 1)),
        }
        file = self.folder / "metrics.jsonl"
        if args.resume:  # a failed start leaves the old args.json: see `checkpoints.resume`
            rows = [row for row in read_json_lines(file) if row["step"] <= steps_done]
            write_whole(file, to_json_lines(rows))
        else:
            file.unlink(missing_ok=True)  # of a run that was killed before its first checkpoint
            self.write_about()

    def write_about(self):
        """Writes args.json: flags, a hash of the training rows, versions, commit, command."""
        write_whole(self.folder / "args.json", f"{json.dumps(self.about, indent=2)}\n")

    def metrics(self, row: dict, rollouts=None, batch=None):
        """Writes a step's metrics, after its rollouts: to metrics.jsonl, and into the table."""
        row = row | {"timing/log_s": self.wait()}
        with (self.folder / "metrics.jsonl").open("ab") as file:
            file.write(to_json_lines([row]).encode(errors="backslashreplace"))
        self._say_table_line(row)
        self.notify("metrics", row, rollouts, batch)

    def _say_table_line(self, row):
        """Prints a step's line of the table, and the titles above every 20th."""
        values = numeric_entries(row)
        titles = "     step"
        line = f"{row['step']:>4}/{self.args.num_steps:<4}"
        for title, name, form in self.columns:
            cell = format(values[name], form) if name in values else ""
            titles += f"  {title}"
            line += f"  {cell:>{len(title)}}"
        if self.n_lines % 20 == 0:
            self.say(titles)
        self.n_lines += 1
        self.say(line)

    def rollouts(self, name: str, outputs: list[AgentLoopOutput], errors: list[dict], batch=None):
        """Starts to write rollouts/<name>.jsonl, on a thread that works beside the update.

        It has a line for each failure, and each output of the groups that --dump_rollouts keeps,
        with the number of its images. batch: that of the step, for the outputs' advantages."""
        advantages = {}  # by id: an output has no key of its own
        if batch:
            advantages = dict(zip(map(id, batch.outputs), batch["advantages"].tolist()))
        job = self.writer.submit(self._write_rollouts, name, outputs, errors, advantages)
        self.writing.append(job)

    def wait(self) -> float:
        """Waits for the rollouts' files. Returns the seconds of writing, or raises its error."""
        jobs, self.writing = self.writing, []
        return sum(job.result() for job in jobs)

    def _write_rollouts(self, name, outputs, errors, advantages) -> float:
        started = time.perf_counter()
        share = self.args.dump_rollouts
        lines = []
        for output in outputs:
            # Of the first n prompts int(share * n) are written: this one, if it makes one more.
            prompt = output.extra["prompt"]
            if int(share * prompt) == int(share * (prompt + 1)):
                continue
            line = {"index": output.extra.get("index"), "total_reward": total_reward(output)}
            line |= vars(output) | {"images": len(output.images)}
            line["advantages"] = _of_sampled(output, advantages.get(id(output)))
            for key in ("prompt_ids", *RESPONSE_LISTS):  # thousands of numbers: they come last
                line[key] = [*line.pop(key)]
            lines.append(line)
        lines += errors
        if lines:
            write_whole(self.folder / "rollouts" / f"{name}.jsonl", to_json_lines(lines))
        return time.perf_counter() - started

    def say(self, text: str):
        """Prints a text on the terminal, above the progress bars."""
        with contextlib.suppress(OSError):  # the terminal may be gone
            tqdm.write(text)

    def warn(self, text: str):
        self.say(f"warning: {text}")

    def notify(self, event: str, *what):
        """Calls a method of all listeners: "start", "metrics" or "close"."""
        for listener in self.listeners:
            try:
                getattr(listener, event)(*what)
            except Exception as error:
                self.warn(f"{type(listener).__name__}: {reason(error)}")


class SilentLog:
    """The log of all ranks but the main one: the same methods, none of which does anything."""

    def __getattr__(self, name):
        return lambda *args: None


def _of_sampled(output: AgentLoopOutput, values: list[float] | None):
    """Returns the values of an output's sampled tokens, one number if all are equal, or None."""
    if values is None:
        return None
    sampled = [round(x, 4) for x, bit in zip(values, output.response_mask) if bit]
    return sampled[0] if len(set(sampled)) == 1 else sampled


def git_hash() -> str:
    """Returns the commit of this checkout, with "-dirty" if files were changed; "" without git."""
    folder = Path(__file__).parent
    with contextlib.suppress(OSError):
        return subprocess.run(GIT, cwd=folder, capture_output=True, text=True).stdout.strip()
    return ""


def replay_file(args, step: int) -> Path:
    """Returns the file with a step's rollouts in the run to replay; the log counts from 1."""
    return Path(args.replay, "rollouts", f"step_{step + 1:06d}.jsonl")


def steps_to_replay(args) -> int:
    """Returns for how many of --num_steps --replay has files. Raises BadInput if there is none."""
    n_steps = 0
    while n_steps < args.num_steps and replay_file(args, n_steps).is_file():
        n_steps += 1
    need(n_steps > 0, f"--replay: there is no {replay_file(args, 0)}")
    return n_steps


def read_rollouts(file: Path, vocab_size: int) -> tuple[list[AgentLoopOutput], list[dict]]:
    """Returns a file's outputs and errors. Raises BadInput if there is nothing to replay in it."""
    outputs = []
    errors = []
    names = {field.name for field in fields(AgentLoopOutput)} - {"images"}  # a number
    for number, text in enumerate(file.read_bytes().splitlines(), 1):
        with refusing(f"{file}, line {number}, is not an output that can be replayed"):
            line = json.loads(text)
            if line.get("images"):
                raise ValueError("it has images, whose pixels are not in the file")
            if "kind" in line:
                errors.append({name: line[name] for name in ("prompt", "sample", "kind", "error")})
                continue
            output = AgentLoopOutput(**{name: line[name] for name in names & line.keys()})
            check_ids(output.prompt_ids + output.response_ids, vocab_size)
            if output.reward is None:
                raise ValueError("it lacks its reward")
            checked_number(total_reward(output), "its reward")
            output.extra.pop("told_prompt_ids", None)  # hints are not replayed
            outputs.append(output)
    has_some = any("filtered" not in output.extra for output in outputs)
    need(has_some, f"--replay: {file} has no output to learn from")
    return outputs, errors
