"""What keeps the house readable: five files, imports one way, and their sizes."""

import ast
import io
import tokenize

import pytest
from conftest import REPO

ROOMS = ["agent_loop", "data", "losses", "rollout", "train"]
# Each file, and those of ours that it may import.
ARROWS = {
    "losses": set(),
    "agent_loop": set(),
    "data": {"agent_loop"},
    "rollout": {"agent_loop", "data"},
    "train": {"agent_loop", "data", "losses", "rollout"},
}


def source(room: str) -> str:
    return (REPO / f"{room}.py").read_text()


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


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_one_way(room):
    imported = set()
    for node in ast.walk(ast.parse(source(room))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.split(".")[0])
    assert imported & set(ROOMS) <= ARROWS[room]


@pytest.mark.parametrize("room", ROOMS)
def test_a_function_fits_on_a_screen_and_a_file_in_an_hour(room):
    text = source(room)
    lines = text.splitlines()
    assert len(lines) <= 1410
    wide = [i for i, line in enumerate(lines, 1) if len(line) > 100]
    assert not wide, f"{room}.py has lines of more than 100 columns: {wide}"
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions(ast.parse(text))}
    assert {name: n for name, n in long.items() if n > 60} == {}


def test_five_files_are_read_in_an_evening():
    assert sum(code_tokens(source(room)) for room in ROOMS) <= 44_300
    assert sum(len(source(room).splitlines()) for room in ROOMS) <= 5_850
    assert len((REPO / "README.md").read_text().splitlines()) <= 200


def test_tokens_are_counted_the_same_by_every_python():
    assert code_tokens('x = f"{a!r:>{width}} {b + 1}" "c"  # d\n') == 4
