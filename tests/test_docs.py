"""README.md and docs/: their commands parse, their links lead to files, their tables are true."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import REPO

import data
import train

sys.path.append(str(REPO / "results"))
import pages

FOLDERS = [REPO, REPO / "docs", REPO / "examples", REPO / "results"]
PAGES = sorted(page for folder in FOLDERS for page in folder.glob("*.md"))
COMMAND = re.compile(r"^\s*((?:[A-Z_]+=\S+ )*(?:python|accelerate|torchrun|source|bash) .*)$")


def outside_and_inside_code(page: Path) -> tuple[list[str], list[str]]:
    """The lines of a page that are text, and those of its code, continued lines joined."""
    text, code = [], []
    fenced = False
    for line in re.sub(r" *\\\n\s*", " ", page.read_text()).splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            code.append(line)
        else:
            text.append(line)
    return text, code


def commands() -> list[str]:
    found = []
    for page in PAGES:
        for line in outside_and_inside_code(page)[1]:
            if match := COMMAND.match(line):
                command = match[1].partition("#")[0]
                found += [part.strip() for part in command.split("&&")]
    for plan in ("30", "trl", "tiny"):
        script = ["bash", REPO / "bench/gpu.sh", plan, "gpu_runs"]
        printed = subprocess.check_output(script, env=os.environ | {"DRY": "1"}, text=True)
        found += [line.split(" ", 2)[2] for line in printed.splitlines()]
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_command(command):
    words = [word for word in shlex.split(command) if word != "--help"]
    for word in words:
        if word.endswith((".py", ".sh", ".yaml")) and "/" in word:
            assert (REPO / word).is_file(), word
    if "train.py" in words:
        train.check_args(train.parse_args(words[words.index("train.py") + 1 :]))


def anchors(page: Path) -> set[str]:
    """GitHub's names of a page's headings."""
    text = outside_and_inside_code(page)[0]
    titles = [line.lstrip("# ").lower() for line in text if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    text = "\n".join(outside_and_inside_code(page)[0])
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        linked = page.parent / file if file else page
        if not target.startswith("http"):
            assert linked.is_file(), target
            assert not anchor or anchor in anchors(linked), target


def test_the_readmes_task_loads_with_the_loops_of_the_docs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", SimpleNamespace())  # not installed
    text = (REPO / "docs/agents.md").read_text() + (REPO / "README.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    file = tmp_path / "my_task.py"
    file.write_text("".join(blocks))
    task = data.load_task(str(file))
    assert data.load_rows(task, "train") and data.load_rows(task, "val")


def test_the_tables_of_the_pages_are_those_of_the_records(tmp_path):
    assert pages.write_tables(pages.PAGES, only_check=True) == 0
    page = tmp_path / "page.md"
    page.write_text("<!-- results: quick_start -->\nold\n<!-- end -->\n")
    assert pages.write_tables([page], only_check=True) == 1
