"""What keeps the house readable: five files and the modules of flatrl/, imports that run one way, and their sizes."""

import ast
import io
import tokenize

import pytest
from conftest import REPO

ROOMS = ["agent_loop", "data", "losses", "rollout", "train"]
MODULES = sorted(path.stem for path in (REPO / "flatrl").glob("*.py") if path.stem != "__init__")
# Each of the five files, and those of ours that it may import.
ARROWS = {
    "losses": set(),
    "agent_loop": set(),
    "data": {"agent_loop", "flatrl", "losses"},
    "rollout": {"agent_loop", "data", "flatrl", "losses"},
    "train": {"agent_loop", "data", "flatrl", "losses", "rollout"},
}
FLATRL_ARROWS = {"agent_loop", "flatrl", "losses"}


def source(name: str) -> str:
    """The text of one of the five files, or of flatrl/NAME."""
    return (REPO / f"{name}.py").read_text()


def code_tokens(text: str) -> int:
    """Names, operators, numbers and strings; an f-string is one, as before Python 3.12."""
    n = depth = 0
    counted = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    start, end = (getattr(tokenize, f"FSTRING_{name}", None) for name in ("START", "END"))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == start:
            n, depth = n + (depth == 0), depth + 1
        elif token.type == end:
            depth -= 1
        else:
            n += depth == 0 and token.type in counted
    return n


def functions(tree: ast.AST):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def test_there_are_five_files():
    assert sorted(path.stem for path in REPO.glob("*.py")) == ROOMS


def imported_modules(tree: ast.AST) -> set[str]:
    """The dotted names of all modules that are imported anywhere in a file, also within functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("name", [*ROOMS, *(f"flatrl/{module}" for module in MODULES)])
def test_imports_run_one_way(name):
    ours = {*ROOMS, "flatrl", "examples", "tests", "bench"}
    imported = {module.split(".")[0] for module in imported_modules(ast.parse(source(name)))}
    assert imported & ours <= ARROWS.get(name, FLATRL_ARROWS)


def test_modules_of_flatrl_import_each_other_in_no_circle():
    imports = {}
    for module in MODULES:
        names = imported_modules(ast.parse(source(f"flatrl/{module}")))
        imports[module] = {other for other in MODULES if f"flatrl.{other}" in names}
    while imports:
        ground = {module for module, others in imports.items() if not others & imports.keys()}
        assert ground, f"these modules import each other in a circle: {sorted(imports)}"
        for module in ground:
            del imports[module]


@pytest.mark.parametrize("name", [*ROOMS, *(f"flatrl/{module}" for module in MODULES)])
def test_a_function_fits_on_a_screen_and_a_file_in_an_hour(name):
    text = source(name)
    lines = text.splitlines()
    assert len(lines) <= (450 if name.startswith("flatrl/") else 1410)
    wide = [i for i, line in enumerate(lines, 1) if len(line) > 100]
    assert not wide, f"{name}.py has lines of more than 100 columns: {wide}"
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions(ast.parse(text))}
    assert {name: n for name, n in long.items() if n > 60} == {}


def test_five_files_are_read_in_an_evening():
    tokens = {room: code_tokens(source(room)) for room in ROOMS}
    assert max(tokens.values()) <= 10_000 and sum(tokens.values()) <= 34_000, tokens
    assert sum(code_tokens(source(f"flatrl/{module}")) for module in MODULES) <= 24_000
    assert len((REPO / "README.md").read_text().splitlines()) <= 200


def test_tokens_are_counted_the_same_by_every_python():
    assert code_tokens('x = f"{a!r:>{width}} {b + 1}" "c"  # d\n') == 4
