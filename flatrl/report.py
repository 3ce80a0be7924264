"""<output_dir>/report.html: a run on one page, kept up to date while it trains.

    python -m flatrl.report runs/calculator   # writes runs/calculator/report.html again
    python -m flatrl.report runs/a runs/b     # two runs on one page: ./report.html

The page holds every number of metrics.jsonl, and a sample of the trajectories in
rollouts/*.jsonl. These files are written before the update. `keep_learned` writes what the
update knew about each trajectory (advantages, the trainer's logprobs) after it, into
learned/step_*.jsonl.

page.html is the page. Its data is one JSON element, and its script turns them into text
nodes, never into HTML. The page needs no server and loads nothing. This module needs nothing
but Python; with the transformers package, tokens are shown as text."""

import argparse
import contextlib
import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from agent_loop import numeric_entries
from flatrl.files import is_dumped, read_json_lines, to_json_lines, write_whole
from flatrl.report_trajectories import TRAJECTORIES, draw, single

PAGE = Path(__file__).with_name("page.html")
SHARE = 0.02  # of the run's time that may go into writing the page


def read_about(folder: Path) -> dict:
    """Returns args.json: flags, git hash, versions, command."""
    return json.loads((folder / "args.json").read_text(encoding="utf-8"))


def load_tokenizer(folder: Path):
    """Returns the tokenizer in final/, else that of the model in args.json, else None.

    It reads only files on this machine and never runs a model's own code: the folder may be a
    stranger's."""
    for source in folder / "final", read_about(folder)["args"]["model"]:
        with contextlib.suppress(Exception):  # no such folder, damaged files, no transformers
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(
                source, local_files_only=True, trust_remote_code=False
            )
    return None


def read_run(folder: Path, tokenizer, max_trajectories: int = TRAJECTORIES) -> dict:
    """Returns a run's data for the page. tokenizer: None shows tokens as numbers."""
    rows = [numeric_entries(row) for row in read_json_lines(folder / "metrics.jsonl")]
    names = sorted(set().union(*rows))
    trajectories, total = draw(folder, tokenizer, max_trajectories)
    notes = []
    if not total:
        notes.append(
            "No trajectories: this run wrote no rollouts (--replay reads those of another run)."
        )
    elif len(trajectories) < total:
        notes.append(
            f"{len(trajectories):,} of {total:,} trajectories are on this page: whole groups, "
            "drawn at random from every step and evaluation. All are in rollouts/."
        )
    special = []  # texts of special tokens
    if tokenizer:
        tokens = tokenizer.added_tokens_decoder.values()
        special = [token.content for token in tokens if token.special]
    else:
        notes.append(
            "Tokens are shown as numbers: neither final/ nor the model of args.json has a "
            "tokenizer here, or the transformers package is not installed here."
        )
    return {
        "name": folder.resolve().name,
        "about": read_about(folder),
        "notes": notes,
        "columns": {name: [row.get(name) for row in rows] for name in names},
        "special": special,
        "trajectories": trajectories,
        "total": total,
    }


# ---------------------------------------------------------------- writing


def to_page_json(value) -> str:
    """Returns JSON that is safe within a page: ASCII, without "<".

    JSON knows no NaN and no infinities: they become the strings "nan", "inf" and "-inf"."""
    known = json.loads(json.dumps(value), parse_constant=lambda constant: str(float(constant)))
    return json.dumps(known, separators=(",", ":")).replace("<", "\\u003c")


def write(runs: list[dict], file: Path):
    """Writes the page of runs that `read_run` has read.

    A browser runs only the script with the page's nonce, so none from a run's texts."""
    page = PAGE.read_text(encoding="utf-8").replace("__NONCE__", secrets.token_hex(16))
    head, tail = page.split("__DATA__")
    data = to_page_json({"written": round(time.time()), "runs": runs})
    write_whole(file, head + data + tail)


class LiveReport:
    """The report of a run that trains.

    No method raises: a report that can't be written is a warning."""

    def __init__(self, folder: Path, tokenizer, warn: Callable[[str], None], share: float = 1.0):
        self.folder = folder
        self.share = share  # --dump_rollouts
        self.tokenizer = tokenizer
        self.warn = warn
        self.next_write = 0.0  # on time.monotonic's clock

    def step(self, step: int = 0, outputs: list = (), batch: dict | None = None):
        """Writes the page, but not so often that it takes more than SHARE of the run's time.

        outputs, batch: those of the step's update, if there was one."""
        try:
            if batch:
                file = self.folder / "learned" / f"step_{step:06d}.jsonl"
                keep_learned(file, outputs, batch, self.share)
            started = time.monotonic()
            if started >= self.next_write:
                write([read_run(self.folder, self.tokenizer)], self.folder / "report.html")
                ended = time.monotonic()
                self.next_write = ended + (ended - started) / SHARE
        except Exception as error:
            self.warn(f"report.html can't be written: {type(error).__name__}: {error}")

    def close(self):
        """Writes the page at the end of the run."""
        self.next_write = 0.0
        self.step()


def keep_learned(file: Path, outputs: list, batch: dict, share: float = 1.0):
    """Writes learned/step_*.jsonl: what an update knew about each sampled output.

    outputs: those of the batch's rows. share: --dump_rollouts. A line of the file holds:

        prompt, sample, segment   as in rollouts/*.jsonl
        advantage    of each sampled token, or one number where all are equal
        logp_diff    of each sampled token, the trainer's logprob minus the engine's, two digits
        trained      false for what --mask_truncated left out of the loss: its logp_diff is
                     empty, because the update has no logprobs for it"""
    lines = []
    differences = batch["logprobs_old"] - batch["logprobs_rollout"]  # (B, T)
    is_trained = batch["response_mask"].any(-1).tolist()  # (B,)
    columns = zip(outputs, batch["advantages"], differences, is_trained, strict=True)
    for output, advantages, difference, trained in columns:
        if "demonstration" in output.extra or not is_dumped(output.extra["prompt"], share):
            continue
        sampled = [i for i, is_sampled in enumerate(output.response_mask) if is_sampled]
        line = {key: output.extra[key] for key in ("prompt", "sample", "segment")}
        line["trained"] = trained or not sampled  # nothing to leave out in a constrained reply
        line["advantage"] = single(advantages[sampled].tolist() or [0.0])
        line["logp_diff"] = []
        if trained:
            line["logp_diff"] = [float(f"{x:.1e}") for x in difference[sampled].tolist()]
        lines.append(line)
    write_whole(file, to_json_lines(lines))


def main(arguments: list[str] | None = None):
    """The command: see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="the --output_dir of a run"
    )
    parser.add_argument(
        "--trajectories", type=int, default=TRAJECTORIES, help="on the page (%(default)s)"
    )
    args = parser.parse_args(arguments)
    folders = args.runs
    runs = []
    for folder in folders:
        if not (folder / "args.json").is_file():
            parser.error(f"{folder} has no args.json: is it a run's --output_dir?")
        max_trajectories = max(1, args.trajectories // len(folders))
        runs.append(read_run(folder, load_tokenizer(folder), max_trajectories))
    page = Path("report.html")
    if len(folders) == 1:
        page = folders[0] / page
    write(runs, page)
    print(page)


if __name__ == "__main__":
    main()
