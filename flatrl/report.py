"""<output_dir>/report.html: a run on one page, kept fresh while it trains.

    python -m flatrl.report runs/calculator   # writes runs/calculator/report.html anew
    python -m flatrl.report runs/a runs/b     # two runs on one page: ./report.html

The page holds every number of metrics.jsonl, and a sample of the trajectories in
rollouts/*.jsonl. These are written before the update. What the update knew of a
trajectory (advantages, the trainer's logprobs) is written after it, by
`keep_learned`, into learned/step_*.jsonl.

page.html is the page. Data goes into one JSON element, and its script makes text nodes of
it, never HTML. The page needs no server and no outside script. This module needs nothing
but Python; with the transformers package, tokens are shown as text."""

import argparse
import base64
import contextlib
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from agent_loop import numbers
from flatrl.files import read_json_lines, to_json_lines, write_whole
from flatrl.report_trajectories import TOKENS, TRAJECTORIES, Selection, single

PAGE = Path(__file__).with_name("page.html")
SHARE = 0.02  # of the run's time that goes into writing the page
NO_TOKENIZER = (
    "Tokens are shown as numbers: neither final/ nor the model of args.json has a tokenizer "
    "here, or the transformers package is not installed here.")


def read_about(folder: Path) -> dict:
    """Returns args.json: flags, git hash, versions, command; {} without it."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        about = json.loads((folder / "args.json").read_text(encoding="utf-8"))
        if isinstance(about, dict):
            return about
    return {}


def load_tokenizer(folder: Path):
    """Returns the tokenizer in final/, else that of the model in args.json, else None.

    It reads only files of this machine, and never runs a model's own code: a report may be
    made of a stranger's folder."""
    for source in (folder / "final", read_about(folder).get("args", {}).get("model")):
        # The first reads tokenizer.json; the second, for those without one, imports torch.
        for kind in "PreTrainedTokenizerFast", "AutoTokenizer":
            with contextlib.suppress(Exception):  # each kind of damage has its own
                import transformers

                return getattr(transformers, kind).from_pretrained(
                    source, local_files_only=True, trust_remote_code=False)
    return None


class Run(Selection):
    """A run's folder as the page shows it: `refresh` reads it, `json` is the data."""

    notes = ()  # what is to be said of it on the page

    def refresh(self):
        """Reads the folder: flags, metrics, and as many trajectories as are shown."""
        self.about = read_about(self.folder)
        self.rows = [numbers(row) for row in read_json_lines(self.folder / "metrics.jsonl")]
        self.draw()

    def json(self) -> str:
        """Returns the page's data of this run. Equal prompts and equal tokens are there once.

        Where not all trajectories are there, a note says so."""
        notes = [*self.notes]
        n_shown = len(self.trajectories)
        if not self.total:
            notes.append(
                "No trajectories: this run wrote no rollouts "
                "(--replay reads those of another run)."
            )
        elif n_shown < self.total:
            notes.append(
                f"{n_shown:,} of {self.total:,} trajectories are on this page: whole "
                "groups, drawn at random from every step and evaluation. All are in rollouts/."
            )
        names = sorted(set().union(*self.rows))
        return dump({
            "name": self.folder.resolve().name, "about": self.about, "notes": notes,
            "columns": {name: [row.get(name) for row in self.rows] for name in names},
            "pieces": [text for text, _ in self.pieces],
            "special": [i for i, (_, is_special) in enumerate(self.pieces) if is_special],
            "prompts": [*self.prompts], "trajectories": self.trajectories, "total": self.total,
            "remarks": [*read_json_lines(self.folder / "notes.jsonl")]})


def dump(value) -> str:
    """Returns JSON that may stand in a page: ASCII, without "<".

    JSON knows no NaN and no infinities: they become the strings "nan", "inf" and "-inf"."""
    known = json.loads(json.dumps(value), parse_constant=lambda constant: str(float(constant)))
    return json.dumps(known, separators=(",", ":")).replace("<", "\\u003c")


# ---------------------------------------------------------------- writing


def write(runs: list[Run], file: Path):
    """Writes the page of these runs, whole or not at all.

    Its policy lets a browser run the one script that page.html has, and no other."""
    head, tail = PAGE.read_text(encoding="utf-8").split("__DATA__")
    script = re.search("<script>(.*?)</script>", tail, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    head = head.replace("__SCRIPT__", f"sha256-{digest}")
    data = ",".join(run.json() for run in runs)
    write_whole(file, f'{head}{{"written":{time.time():.0f},"runs":[{data}]}}{tail}')


class LiveReport:
    """The report of a run that trains.

    No method raises: a report that fails is a warning, never the end of a run. warn is to say
    each text once."""

    def __init__(self, folder: Path, tokenizer, warn: Callable[[str], None]):
        self.run = Run(folder, tokenizer)
        self.warn = warn
        self.next_write = 0.0  # on time.monotonic's clock

    def step(self, step: int = 0, outputs: list = (), batch: dict | None = None):
        """Writes the page, if it is due; it takes at most SHARE of the run's time.

        outputs and batch are those of the step's update: what it knew of them is kept."""
        try:
            if batch:
                file = self.run.folder / "learned" / f"step_{step:06d}.jsonl"
                keep_learned(file, outputs, batch)
            started = time.monotonic()
            if started >= self.next_write:
                self.run.refresh()
                write([self.run], self.run.folder / "report.html")
                ended = time.monotonic()
                self.next_write = ended + (ended - started) / SHARE
        except Exception as error:
            self.warn(f"report.html can't be written: {type(error).__name__}: {error}")

    def close(self):
        """Writes the page as the run ends."""
        self.next_write = 0.0
        self.step()


def keep_learned(file: Path, outputs: list, batch: dict):
    """Writes learned/step_*.jsonl: what an update knew of outputs that were sampled.

    The batch has a row for each output. A line of the file holds:

        prompt, sample, segment   as in rollouts/*.jsonl
        advantage    of each sampled token, or one number where all are the same
        logp_diff    of each sampled token, the trainer's logprob less the engine's, two digits
        trained      false for what --mask_truncated took out of the losses: its logp_diff is
                     empty, because the update has no logprobs of it"""
    lines = []
    differences = batch["logprobs_old"] - batch["logprobs_rollout"]  # (B, T)
    is_trained = batch["response_mask"].any(-1).tolist()  # (B,)
    columns = zip(outputs, batch["advantages"], differences, is_trained, strict=True)
    for output, advantages, difference, trained in columns:
        if "demonstration" in output.extra:
            continue
        sampled = [i for i, is_sampled in enumerate(output.response_mask) if is_sampled]
        names = {key: output.extra[key] for key in ("prompt", "sample", "segment")}
        lines.append(names | {
            "trained": trained,
            "advantage": single(advantages[sampled].tolist() or [0.0]),
            "logp_diff": [float(f"{number:.1e}") for number in difference[sampled].tolist()]
                         if trained else [],
        })  # fmt: skip
    write_whole(file, to_json_lines(lines))


def main(arguments: list[str] | None = None):
    """The command: see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="the --output_dir of a run")
    parser.add_argument(
        "--output", type=Path,
        help="default: report.html in the run's folder; of several, in this one")
    parser.add_argument(
        "--trajectories", type=int, default=TRAJECTORIES,
        help="on the page, of all runs (%(default)s)")
    args = parser.parse_args(arguments)
    runs = []
    n_runs = len(args.runs)
    for folder in args.runs:
        if not (folder / "metrics.jsonl").is_file() and not (folder / "rollouts").is_dir():
            parser.error(
                f"{folder} has no metrics.jsonl and no rollouts/: is it a run's --output_dir?"
            )
        tokenizer = load_tokenizer(folder)
        run = Run(folder, tokenizer, max(1, args.trajectories // n_runs), TOKENS // n_runs)
        if tokenizer is None:
            run.notes = [NO_TOKENIZER]
            print(f"{folder}: {NO_TOKENIZER}", file=sys.stderr)
        run.refresh()
        runs.append(run)
    output = args.output or (args.runs[0] if n_runs == 1 else Path()) / "report.html"
    write(runs, output)
    print(output)


if __name__ == "__main__":
    main()
