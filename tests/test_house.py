"""Imports of our own modules run one way, so that each file can be read, and used, by itself."""

import ast
import gc
from pathlib import Path

import pytest
from conftest import REPO

# What each of the five files may import; new modules of flatrl/ may import FLATRL.
FLATRL = {"agent_loop", "losses", "flatrl"}
DATA = FLATRL
ARROWS = {
    "losses": set(),
    "agent_loop": set(),
    "data": DATA,
    "rollout": {*DATA, "data"},
    "train": {*DATA, "data", "rollout"},
}
FILES = [*(REPO / f"{name}.py" for name in ARROWS), *sorted((REPO / "flatrl").rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """The dotted names of all modules that a file imports, also within functions."""
    names = set()
    gc.disable()  # a finaliser that runs meanwhile makes the parser of Python 3.11 fail
    tree = ast.parse(path.read_text())
    gc.enable()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPO)))
def test_imports_run_one_way(path):
    ours = {*ARROWS, "flatrl", "examples", "tests", "bench"}
    found = {name.split(".")[0] for name in imported(path)} & ours
    assert found <= ARROWS.get(path.stem, FLATRL)


def test_modules_of_flatrl_do_not_import_each_other_in_a_circle():
    imports = {}
    for path in FILES[len(ARROWS) :]:
        parts = path.relative_to(REPO).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        imports[name] = imported(path) - {name}
    while imports:
        ground = {name for name, others in imports.items() if not others & imports.keys()}
        assert ground, f"these modules import each other in a circle: {sorted(imports)}"
        for name in ground:
            del imports[name]
