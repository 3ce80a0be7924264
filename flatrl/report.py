"""<output_dir>/report.html: a run on one page, with its curves, rollouts and flags.

    python -m flatrl.report runs/calculator   # writes runs/calculator/report.html again
    python -m flatrl.report runs/a runs/b     # several runs on one page: ./report.html

A run writes it after each evaluation and at its end. The script of page.html turns the data, one
JSON element, into text nodes, never into HTML."""

import argparse
import contextlib
import functools
import itertools
import json
import math
import re
from numbers import Real
from pathlib import Path

from flatrl.args import LOOP_SETTINGS
from flatrl.files import read_json_lines, write_whole
from flatrl.log import Listener

PAGE = Path(__file__).with_name("page.html")
FILES = 8  # of training steps, and of evaluations, whose outputs are shown
TOKENS = 400_000  # of outputs on a page; more if single groups are larger
MAX_CHARACTER_TOKENS = 7  # after this many tokens without a whole character, show it as broken


class Report(Listener):
    """Writes the page of a run."""

    def metrics(self, row, rollouts=None, batch=None):
        if "eval/reward" in row:
            self.close()

    def close(self):
        folder = self.log.folder
        write_page([read_run(folder, self.log.tokenizer)], folder / "report.html")


def write_page(runs: list[dict], file: Path):
    """Writes the page of runs that `read_run` has read."""
    head, tail = PAGE.read_text(encoding="utf-8").split("__DATA__")
    data = json.dumps(runs, separators=(",", ":"))
    write_whole(file, head + data.replace("<", "\\u003c") + tail)  # no text can end the element


def read_run(folder: Path, tokenizer, n_tokens: int = TOKENS) -> dict:
    """Returns a run's data for the page. tokenizer: None shows tokens as numbers."""
    about = json.loads((folder / "args.json").read_text(encoding="utf-8"))
    args = about["args"]
    args["agent_args"] = {name: args.pop(name) for name in LOOP_SETTINGS if name in args}
    flags = {f"--{name}": value for name, value in args.items()}
    made_by = {"command": " ".join(about["command"]), "git": about["git"]} | about["versions"]
    rows = list(read_json_lines(folder / "metrics.jsonl"))
    names = sorted(set().union(*rows))
    return {
        "name": folder.resolve().name,
        "flags": made_by | flags,
        "columns": {name: [number(row.get(name)) for row in rows] for name in names},
        "trajectories": sampled_outputs(folder, tokenizer, n_tokens),
    }


def number(value) -> float | None:
    """Returns a finite number as it is, and anything else as None: JSON knows no NaN."""
    return value if isinstance(value, Real) and math.isfinite(value) else None


# ---------------------------------------------------------------- outputs


def sampled_outputs(folder: Path, tokenizer, n_tokens: int) -> list[dict]:
    """Returns the first groups of evenly spaced steps and evaluations, first and last included."""
    files = []
    for kind in ("eval", "step"):
        found = sorted((folder / "rollouts").glob(f"{kind}_*.jsonl"))
        n = min(len(found), FILES)
        files += [found[(len(found) - 1) * k // max(n - 1, 1)] for k in range(n)]
    drawn = []
    for file in files:
        kind, _, step = file.stem.partition("_")
        for line in first_groups(file, n_tokens // len(files)):
            drawn.append({"kind": kind, "step": int(step)} | page_entry(line, tokenizer))
    return drawn


def first_groups(file: Path, n_tokens: int) -> list[dict]:
    """Returns the outputs of a file's first groups, at least one, up to n_tokens tokens."""
    outputs = (line for line in read_json_lines(file) if "response_ids" in line)
    lines = []
    for _, group in itertools.groupby(outputs, lambda line: line["extra"]["prompt"]):
        group = list(group)
        n_tokens -= sum(len(line["prompt_ids"] + line["response_ids"]) for line in group)
        if lines and n_tokens < 0:
            break
        lines += group
    return lines


def page_entry(line: dict, tokenizer) -> dict:
    """Returns what the page shows of a line of rollouts/*.jsonl."""
    extra = line["extra"]
    parts = line["reward"] if isinstance(line["reward"], dict) else {}
    marks = [name for name in ("greedy", "filtered", "demonstration") if name in extra]
    prompt = "".join(token_texts(tokenizer, line["prompt_ids"]))
    return {
        "prompt": extra["prompt"],
        "sample": extra["sample"],
        "segment": extra["segment"],
        "unit": line["unit"],
        "marks": marks,
        "text": re.sub(r"(<[^<>]+>)\1{7,}", r"\1 ... \1", prompt),  # an image's placeholders
        "n_prompt": len(line["prompt_ids"]),
        "reward": number(line["total_reward"]),
        "parts": {name: value for name, value in parts.items() if number(value) is not None},
        "turn_rewards": line["turn_rewards"],
        "stop": line["stop_reason"],
        "turns": line["num_turns"],
        "tokens": token_texts(tokenizer, line["response_ids"]),
        "mask": line["response_mask"],
        "logprobs": [round(x, 3) for x in line["response_logprobs"]],
        "advantages": line.get("advantages"),
    }


@functools.cache
def added_text(tokenizer, *ids: int) -> str:
    """Returns the text that consecutive tokens add after another token: ⟨7⟩ without a tokenizer."""
    if not tokenizer:
        return f"⟨{ids[0]}⟩"
    # Some tokenizers drop the space before the very first token.
    first = tokenizer.encode("a", add_special_tokens=False)[-1:]
    decode = functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    return decode([*first, *ids])[len(decode(first)) :]


def token_texts(tokenizer, ids: list[int]) -> list[str]:
    """Returns the text that each token adds. The last token of a character gets all of it."""
    texts = []
    pending = []  # ids whose character is not complete yet
    for position, token_id in enumerate(ids, 1):
        pending.append(token_id)
        text = added_text(tokenizer, *pending)
        is_last = position == len(ids) or len(pending) == MAX_CHARACTER_TOKENS
        if "\ufffd" in text and not is_last:
            text = ""
        else:
            pending = []
        texts.append(text)
    return texts


# ---------------------------------------------------------------- the command


def load_tokenizer(folder: Path):
    """Returns the tokenizer of final/, else of the run's model; None if neither is here."""
    from transformers import AutoTokenizer

    model = json.loads((folder / "args.json").read_text(encoding="utf-8"))["args"]["model"]
    for source in (folder / "final", model):
        with contextlib.suppress(OSError, ValueError):
            return AutoTokenizer.from_pretrained(source, local_files_only=True)
    return None


def main(arguments: list[str] | None = None):
    """The command: see the module's docstring."""
    as_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_is)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's --output_dir")
    folders = parser.parse_args(arguments).runs
    for folder in folders:
        if not (folder / "args.json").is_file():
            parser.error(f"{folder} has no args.json: is it a run's --output_dir?")
    n_tokens = TOKENS // len(folders)
    runs = [read_run(folder, load_tokenizer(folder), n_tokens) for folder in folders]
    page = (folders[0] if len(folders) == 1 else Path()) / "report.html"
    write_page(runs, page)
    print(page)


if __name__ == "__main__":
    main()
