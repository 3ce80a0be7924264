"""Imports of the main files run one way, so that each can be read, and used, by itself."""

import ast

import pytest
from conftest import REPO

# Which of our main files each of them may import.
ARROWS = {
    "losses": set(),
    "agent_loop": set(),
    "data": {"losses", "agent_loop"},
    "rollout": {"losses", "agent_loop", "data"},
}


@pytest.mark.parametrize("name", ARROWS)
def test_imports_run_one_way(name):
    found = set()
    for node in ast.walk(ast.parse((REPO / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    assert found & {*ARROWS, "train"} <= ARROWS[name]
