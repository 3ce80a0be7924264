"""Files that survive a kill: written whole or not at all; JSON lines that may be cut off."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path


def write_whole(file: Path, text: str):
    """Writes a file, and makes its folder. Readers never see half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    temporary.replace(file)


def to_json_lines(rows: Iterable[dict]) -> str:
    """Returns a text with a line of JSON for each row. Unknown objects become strings."""
    return "".join(f"{json.dumps(row, default=str, ensure_ascii=False)}\n" for row in rows)


def read_json_lines(file: Path) -> Iterator[dict]:
    """Yields the JSON of a file's lines, if there is one. Lines that were cut off are skipped."""
    if not file.exists():
        return
    with file.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def logged(folder: Path, name: str) -> dict[int, float]:
    """Returns {step: value} of a metric, from the metrics.jsonl of a run."""
    rows = read_json_lines(folder / "metrics.jsonl")
    return {row.get("step"): row[name] for row in rows if name in row}
