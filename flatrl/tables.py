"""Files of rows: jsonl, csv, parquet, datasets; in memory, or on disk where there are many."""

import csv
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatrl.bad_input import need, refusing

# More rows than these stay on disk.
MAX_ROWS_IN_MEMORY = 10_000
# Of more rows than these several processes find the overlong ones: 8,192 chats take one 2 s.
MAX_ROWS_MEASURED_HERE = 1000
# Of more rows than these only some are looked at before the run, and each when it is drawn.
MAX_ROWS_CHECKED_AT_START = 100_000


@dataclass
class Rows(Sequence):
    """Some rows of a table, each made anew by get(number) whenever it is asked for.

    numbers: which rows of the table these are. overlong: the share of prompts that are too
    long, if that is known of a sample only; in place of such a row, get returns the next one
    that fits."""

    get: Callable[[int], dict]
    numbers: Sequence[int]
    overlong: float = 0.0

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        return self.get(int(self.numbers[i]))


def read_files(files: list[str]) -> Sequence[dict]:
    """Returns the rows of some files, one file after the other, as a list.

    Files are jsonl, json (one list), csv (all values are text), parquet, folders of
    `save_to_disk`, and data sets of the Hugging Face hub. One of the latter three, alone and
    of more than MAX_ROWS_IN_MEMORY rows, is not read, but returned as a datasets.Dataset.
    Raises BadInput where a file, or the datasets package, is missing, or can't be read."""
    rows = []
    for name in files:
        file = Path(name)
        need(file.exists() or ":" in name.strip(":"),
             f"{name}: no such file (a data set of the hub is NAME:SPLIT or NAME:CONFIG:SPLIT)")
        with refusing(
                f"{name} can't be read as .parquet, .jsonl, .csv or a folder of datasets"):
            if file.suffix == ".csv":
                rows += csv.DictReader(file.open(encoding="utf-8-sig", newline=""), strict=True)
            elif file.suffix in (".jsonl", ".json"):
                rows += _read_json(file)
            else:
                # In arrow images stay the bytes of the file, decoded where they are used.
                table = _data_set(name).with_format("arrow")
                if files == [name] and len(table) > MAX_ROWS_IN_MEMORY:
                    return table
                rows += table[:].to_pylist()
    return rows


def _read_json(file):
    """Returns what a file has: one list of JSON, or JSON values, one a line."""
    text = file.read_text("utf-8-sig").strip()
    if text.startswith("["):
        return json.loads(text)
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            with refusing(f"{file}, line {number}, is no row"):
                rows.append(json.loads(line))
    return rows


def _data_set(name):
    """Returns the datasets.Dataset of a parquet file, a folder of it, or of the hub."""
    with refusing(f"{name}: pip install datasets"):
        import datasets
    if not os.path.exists(name):
        hub, *config, split = name.split(":")
        return datasets.load_dataset(hub, *config, split=split)
    if os.path.isfile(name):
        return datasets.Dataset.from_parquet(name)
    table = datasets.load_from_disk(name)
    need(not isinstance(table, dict), f"{name} has splits: give {name}/ and one of {[*table]}")
    return table
