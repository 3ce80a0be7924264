"""Files that survive a kill: written whole or not at all; JSON lines that may be cut off."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path


def absolute(path: str) -> str:
    """Returns the real path of what exists, as a tool may change the directory; anything
    else may be a hub's name, and stays as it is."""
    return os.path.realpath(path) if os.path.exists(path) else path


def write_whole(file: Path, *texts: str):
    """Writes a file of these texts so that nobody ever sees half of it; makes its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}")
    with temporary.open("w", encoding="utf-8", errors="backslashreplace") as stream:
        stream.writelines(texts)
    temporary.replace(file)


def to_json_lines(rows: Iterable[dict]) -> str:
    """Returns a text, one line of JSON for each row; what JSON does not know becomes a str."""
    return "".join(json.dumps(row, default=str, ensure_ascii=False) + "\n" for row in rows)


def read_json_lines(file: Path) -> Iterator[dict]:
    """Yields the JSON objects of a file, one a line.

    The file may be missing, may be written to right now, or may have been cut off by a
    kill: lines that are no JSON object are left out."""
    with contextlib.suppress(FileNotFoundError), file.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row


def logged(folder: Path, name: str) -> dict[int, float]:
    """Returns a metric of a run's metrics.jsonl, {step: value}, of the steps that have it."""
    rows = read_json_lines(folder / "metrics.jsonl")
    return {row.get("step"): row[name] for row in rows if name in row}
