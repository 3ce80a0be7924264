"""Short texts that identify what a run learns from, for --resume: names may stay, and contents
change."""

import ast
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from flatrl.bad_input import OURS, is_installed, refusing
from flatrl.tables import prompt_order

ROWS = "the training rows"
VAL_ROWS = "the validation rows"
MODEL = "the files of --model"
BLOCK = 1 << 16  # bytes; of a file with more than BLOCKS of them, so many are read
BLOCKS = 1024


def contents_of(args, task: ModuleType, rows: dict) -> dict[str, str]:
    """Returns {name of an input: a text that identifies its contents}.

    rows: by split, without overlong ones."""
    engine_args = json.loads(args.engine_args)  # may change, except for what the model sees
    contents = {
        "the task file, or a module of yours that it imports": _digest(_code(task)),
        ROWS: _of_rows(rows["train"], args.seed),
        VAL_ROWS: _of_rows(rows["val"], args.seed),
        MODEL: _of_model(args.model),
        "mm_processor_kwargs of --engine_args": as_text(engine_args.get("mm_processor_kwargs")),
    }
    if args.ref_model:
        contents["the files of --ref_model"] = _of_model(args.ref_model)
    return contents


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for part in parts:
        digest.update(hashlib.blake2b(part).digest())
    return digest.hexdigest()


def _code(task: ModuleType) -> list[bytes]:
    """Returns the sources, sorted, of the task and of the user's own modules that it imports.

    Of modules in the task's folder, imports within functions count, which have not run yet."""
    folder = Path(task.__file__).resolve().parent
    names = [name for name in task.__imported__ if name.partition(".")[0] not in OURS]
    files = [Path(getattr(sys.modules.get(name), "__file__", None) or "") for name in names]
    sources = {}
    while files:
        file = files.pop()
        if file in sources or is_installed(file) or not file.is_file():
            continue
        sources[file] = file.read_bytes()
        if file.suffix == ".py" and file.resolve().is_relative_to(folder):
            files += _imports(file, folder)
    return sorted(sources.values())


def _imports(file: Path, folder: Path) -> Iterator[Path]:
    """Yields the paths in the folder at which the modules that a file imports may be."""
    with refusing(f"{file} can't be parsed", str(file)):
        tree = ast.parse(file.read_bytes(), str(file))
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        package = getattr(node, "module", None)  # `from package import name`
        level = getattr(node, "level", 0)  # the dots before it
        for alias in node.names:
            name = f"{package}.{alias.name}" if package else alias.name
            if not level and name.partition(".")[0] in OURS:
                continue
            path = file.parents[level - 1] if level else folder
            for part in name.split("."):
                path /= part
                yield path.with_suffix(".py")
                yield path / "__init__.py"


def _of_rows(rows: Sequence[dict], seed: int) -> str:
    """Identifies rows by their number and contents; those on disk by the first thousand drawn."""
    numbers = range(len(rows))
    if not isinstance(rows, list):
        numbers = prompt_order(len(rows), 0, min(len(rows), 1000), seed)
    texts = (re.sub(" at 0x[0-9a-f]+", "", as_text(rows[number])) for number in numbers)
    return f"{len(rows)} rows, {_digest(text.encode() for text in texts)}"


def as_text(value) -> str:
    """Returns a text that depends on type and value alone; objects need a repr of their own.

    The order of a dict or a set does not count. Of arrays and images, shape and bytes count,
    because the repr of large ones is abbreviated."""
    match value:
        case str():
            return repr(value)
        case dict():
            items = [f"{as_text(key)}: {as_text(part)}" for key, part in value.items()]
            return f"dict({', '.join(sorted(items))})"
        case set() | frozenset():
            return f"set({', '.join(sorted(map(as_text, value)))})"
        case list() | tuple():
            return f"[{', '.join(map(as_text, value))}]"
        case bytes():
            return hashlib.blake2b(value).hexdigest()
        case torch.Tensor():
            of_numpy = (torch.float64, torch.float32, torch.float16)
            if value.is_floating_point() and value.dtype not in of_numpy:
                value = value.float()
            value = value.numpy(force=True)
    if getattr(getattr(value, "dtype", None), "hasobject", False):  # its bytes are addresses
        return as_text(value.tolist())
    if hasattr(value, "tobytes"):
        return f"{np.shape(value)} {as_text(value.tobytes())}"
    return repr(value)


def _of_model(model: str) -> str:
    """Identifies a model of the hub by its commit, and a folder by its files."""
    from transformers.utils import cached_file

    if not os.path.isdir(model):
        return Path(cached_file(model, "config.json")).parent.name
    return _digest(part for file in sorted(Path(model).iterdir()) for part in _sample(file))


def _sample(file: Path):
    """Yields a file's name, its size, and blocks spread over it: all of it if it is small."""
    if file.name.startswith(".") or not file.is_file():
        return
    size = file.stat().st_size
    yield f"{file.name} {size}".encode()
    with file.open("rb") as stream:
        for start in range(0, size, max(BLOCK, size // BLOCKS)):
            stream.seek(start)
            yield stream.read(BLOCK)
