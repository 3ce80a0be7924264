"""Reads rows from files and from the Hugging Face hub, and shuffles them."""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch.utils.data import ConcatDataset

from flatrl.bad_input import refusing

ARGUMENTS = {"arguments", "tools_kwargs", "interaction_kwargs"}  # see `rows_of`
BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}


@dataclass
class Rows(Sequence):
    """Some rows, by their numbers, of a table on disk. get(number) computes one at every access."""

    get: Callable[[int], dict]
    numbers: Sequence[int]

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        return self.get(int(self.numbers[i]))


def prompt_order(n_rows: int, start: int, count: int, seed: int) -> list[int]:
    """Returns the row numbers at positions start .. start + count - 1 of an endless shuffle.

    Every epoch of n_rows positions is a new permutation, by the seed alone."""
    places = (divmod(position, n_rows) for position in range(start, start + count))
    return [int(_permutation(n_rows, epoch, seed)[place]) for epoch, place in places]


# Cached, because prompts are drawn one by one, and permuting a million rows takes 30 ms.
@functools.lru_cache(maxsize=4)
def _permutation(n_rows: int, epoch: int, seed: int) -> np.ndarray:
    """Returns the numbers of all rows, in an epoch's random order."""
    return np.random.default_rng((seed, epoch)).permutation(n_rows)


def read_files(names: list[str]) -> Sequence[dict]:
    """Returns the rows of some files, one file after the other. They stay on disk.

    Names are parquet, json, jsonl and csv files, and datasets on the Hugging Face hub:
    NAME:SPLIT or NAME:CONFIG:SPLIT. Raises BadInput if one can't be read."""
    return ConcatDataset([rows_of(_table(name)) for name in names])


def rows_of(table) -> Rows:
    """Returns the rows of a datasets.Dataset.

    Arrow gives all structs of a column the same keys, with None where one has no such key. This
    None is dropped inside ARGUMENTS, where a tool would get it, and stays elsewhere."""
    features = table.features
    return Rows(lambda number: _unpadded(table[number], features, False), range(len(table)))


def _unpadded(value, feature, is_argument):
    """Returns a value of a table, see `rows_of`. is_argument: whether it is below ARGUMENTS."""
    if isinstance(value, list):
        kind = getattr(feature, "feature", None)
        return [_unpadded(entry, kind, is_argument) for entry in value]
    if not (isinstance(value, dict) and isinstance(feature, dict)):
        return value  # in a Json column, whose None is a null
    entries = {}
    for key, entry in value.items():
        if entry is not None or not is_argument:
            entries[key] = _unpadded(entry, feature.get(key), is_argument or key in ARGUMENTS)
    return entries


def _table(name):
    """Returns the datasets.Dataset of a file, or of a name on the hub."""
    from datasets import load_dataset

    file = Path(name)
    if file.is_file():
        with refusing(f"{name} can't be read as {', '.join(BUILDERS)}"):
            table = load_dataset(BUILDERS[file.suffix], data_files=name, split="train")
    else:
        with refusing(f"{name}: no such file, nor NAME:SPLIT or NAME:CONFIG:SPLIT of the hub"):
            hub, *config, split = re.split(r":(?![^\[]*\])", name)  # not at the colon of a slice
            table = load_dataset(hub, *config, split=split)
    for column, feature in table.features.items():
        if feature != _raw(feature):
            table = table.cast_column(column, _raw(feature))
    return table


def _raw(feature):
    """Returns a feature whose images stay the bytes of their files until they are used."""
    from datasets import Image, List

    if isinstance(feature, Image):
        return Image(decode=False)
    if isinstance(feature, List):
        return List(_raw(feature.feature))
    return feature
