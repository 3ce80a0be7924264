"""Reads rows from jsonl, csv, parquet and datasets; large tables stay on disk."""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatrl.bad_input import need, refusing

# More rows than these stay on disk.
MAX_ROWS_IN_MEMORY = 10_000
# For more rows only a sample is checked before the run, and each row when it is drawn.
MAX_ROWS_CHECKED_AT_START = 100_000


@dataclass
class Rows(Sequence):
    """Some rows of a table. Each is computed by get(number) on every access.

    numbers: the rows' numbers in the table. overlong: the share of prompts that are too long,
    if it was estimated from a sample; get then returns the next row that fits instead."""

    get: Callable[[int], dict]
    numbers: Sequence[int]
    overlong: float = 0.0

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        return self.get(int(self.numbers[i]))


def read_files(files: list[str]) -> Sequence[dict]:
    """Returns the rows of some files, one file after the other, as a list.

    Files are jsonl, json (one list), csv (all values are text), parquet, folders from
    `save_to_disk`, and data sets on the Hugging Face hub. If one of the latter three is the
    only file and has more than MAX_ROWS_IN_MEMORY rows, it is returned as a datasets.Dataset.
    Raises BadInput if a file, or the datasets package, is missing or can't be read."""
    rows = []
    for name in files:
        file = Path(name)
        need(
            file.exists() or ":" in name.strip(":"),
            f"{name}: no such file (a data set of the hub is NAME:SPLIT or NAME:CONFIG:SPLIT)",
        )
        with refusing(f"{name} can't be read as .parquet, .jsonl, .csv or a folder of datasets"):
            if file.suffix == ".csv":
                rows += csv.DictReader(file.open(encoding="utf-8-sig", newline=""), strict=True)
            elif file.suffix in (".jsonl", ".json"):
                rows += _read_json(file)
            else:
                # With arrow, images stay the bytes of their files until they are used.
                table = _data_set(file, name).with_format("arrow")
                if len(files) == 1 and len(table) > MAX_ROWS_IN_MEMORY:
                    return table
                rows += table[:].to_pylist()
    return rows


def _read_json(file):
    """Returns the rows of a file: one JSON list, or a JSON value on each line."""
    text = file.read_text("utf-8-sig").strip()
    if text.startswith("["):
        return json.loads(text)
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            with refusing(f"{file}, line {number}, is no row"):
                rows.append(json.loads(line))
    return rows


def _data_set(file, name):
    """Returns the datasets.Dataset of a parquet file, a folder, or a name on the hub."""
    with refusing(f"{name}: pip install datasets"):
        import datasets
    if file.is_file():
        return datasets.Dataset.from_parquet(name)
    if not file.exists():
        hub, *config, split = name.split(":")
        return datasets.load_dataset(hub, *config, split=split)
    table = datasets.load_from_disk(name)
    need(not isinstance(table, dict), f"{name} has splits: give {name}/ and one of {[*table]}")
    return table
