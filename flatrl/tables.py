"""Reads rows from jsonl, csv, parquet and datasets; large tables stay on disk. Shuffles rows."""

import csv
import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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


def prompt_order(
    n_rows: int,
    start: int,
    count: int,
    seed: int,
) -> list[int]:
    """Returns the row numbers at positions start .. start + count - 1 of an endless shuffle.

    Every epoch of n_rows positions is a new permutation. With 3 rows, for example, the endless
    shuffle may begin 2 0 1, 1 0 2, and positions 2 .. 4 then have the rows 1 1 0. It depends on
    seed and position alone, so a resumed run needs no sampler state."""
    return [
        int(_permutation(n_rows, position // n_rows, seed)[position % n_rows])
        for position in range(start, start + count)
    ]


# Cached, because prompts are drawn one by one, and permuting a million rows takes 30 ms.
@functools.lru_cache(maxsize=4)
def _permutation(n_rows: int, epoch: int, seed: int) -> np.ndarray:
    """Returns the numbers of all rows, in an epoch's random order."""
    return np.random.default_rng((seed, epoch)).permutation(n_rows)


def read_files(files: list[str]) -> Sequence[dict]:
    """Returns the rows of some files, one file after the other.

    Files are jsonl, json (one list), csv (all values are text), parquet, folders from
    `save_to_disk`, and data sets on the Hugging Face hub. Returns a list or, if one of the latter
    three is the only file and has more than MAX_ROWS_IN_MEMORY rows, a datasets.Dataset.
    Raises BadInput if a file, or the datasets package, is missing or can't be read."""
    rows = []
    for name in files:
        file = Path(name)
        hub, *parts = re.split(r":(?![^\[]*\])", name)  # not at the colon of a slice
        need(
            file.exists() or (hub and parts and "://" not in name),
            f"{name}: no such file. A dataset of the hub is NAME:SPLIT or NAME:CONFIG:SPLIT, and "
            "its split may be a slice: NAME:train[:100]. Download anything else first",
        )
        with refusing(f"{name} can't be read as .parquet, .jsonl, .csv or a folder of datasets"):
            if file.suffix == ".csv":
                rows += csv.DictReader(file.open(encoding="utf-8-sig", newline=""), strict=True)
            elif file.suffix in (".jsonl", ".json"):
                rows += _read_json(file)
            else:
                # With arrow, images stay the bytes of their files until they are used.
                table = _data_set(file, hub, parts).with_format("arrow")
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


def _data_set(file, hub, parts):
    """Returns the datasets.Dataset of a parquet file, a folder, or a name on the hub.

    parts: the dataset's configuration, if there is one, and its split."""
    with refusing(f"{file}: pip install datasets"):
        import datasets
    if file.is_file():
        return datasets.Dataset.from_parquet(str(file))
    if not file.exists():
        *config, split = parts
        return datasets.load_dataset(hub, *config, split=split)
    table = datasets.load_from_disk(str(file))
    need(not isinstance(table, dict), f"{file} has splits: give {file}/ and one of {[*table]}")
    return table
