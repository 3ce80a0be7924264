"""results/: every figure of the README has a file that says how to repeat it, and stands there as the page shows it."""

import json
import re
import subprocess
import sys

import pytest
from conftest import REPO
from test_docs import COMMAND, outside_and_inside_code

sys.path.append(str(REPO / "bench"))
import check

FILES = sorted((REPO / "results").glob("*.json"))
RESULTS = {file.stem: json.loads(file.read_text()) for file in FILES}
# 0.598, 2.1e-06, 3,385, and a time: 2 min 50 s
FIGURE = re.compile(
    r"(?<![\w.,-])(\d+ min \d+ s|\d+ (?:s|min|minutes|seconds)\b|\d{1,3}(?:,\d{3})+|\d+\.\d+(?:e-?\d+)?)(?![\w.]\d)"
)
NOT_MEASURED = {"3.11", "3.12"}  # versions of Python


def figures(page: str) -> set[str]:
    """The figures of a page: of its text, and of what its code blocks show of a run's output."""
    text, code = outside_and_inside_code(REPO / page)
    fenced = "".join(re.findall(r"```python.*?```", (REPO / page).read_text(), re.DOTALL))
    printed = [line for line in code if not COMMAND.match(line) and line not in fenced]
    prose = [re.sub(r"`[^`]*`", "", line) for line in text]
    return {match[1] for line in prose + printed for match in FIGURE.finditer(line)} - NOT_MEASURED


def value(shown: str) -> float:
    """What a figure is worth; times in seconds."""
    if match := re.fullmatch(r"(?:(\d+) min)? ?(?:(\d+) s)?", shown):
        return 60 * int(match[1] or 0) + int(match[2] or 0)
    return float(shown.replace(",", "").removesuffix("%"))


def test_a_figure_of_the_readme_can_be_repeated():
    known = {number["shown"] for result in RESULTS.values() for number in result["numbers"]
             if result["page"] == "README.md"}  # fmt: skip
    found = figures("README.md")
    assert {"0.598", "2 min 50 s", "3,385", "3.0e-5", "130 s"} <= found
    assert found <= known, f"put these into a file of results/ (bench/check.py says how): {sorted(found - known)}"


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_says_how_it_was_measured_and_stands_on_its_page(name):
    result = RESULTS[name]
    assert set(result) == {"page", "command", "measured_by", "commit", "machine", "versions", "seeds", "numbers"}
    assert re.fullmatch(r"[0-9a-f]{7,40}", result["commit"]) and result["machine"] and result["numbers"]
    assert {"torch", "transformers"} <= set(result["versions"]) and isinstance(result["seeds"], list)
    page = (REPO / result["page"]).read_text()
    for number in result["numbers"]:
        assert set(number) == {"shown", "from", "least", "most"}
        assert re.search(rf"(?<![\d.]){re.escape(number['shown'])}(?![\d.]*\d)", page), f"{name}: {number['shown']}"
        assert number["least"] <= value(number["shown"]) <= number["most"], number
        re.compile(number["from"])


def test_the_commits_are_of_this_history():
    if subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=REPO, capture_output=True, text=True
                      ).stdout.strip() != "false":  # fmt: skip
        pytest.skip("a shallow clone, or none")
    for name, result in RESULTS.items():
        known = subprocess.run(["git", "cat-file", "-e", f"{result['commit']}^{{commit}}"], cwd=REPO)
        assert known.returncode == 0, f"{name}: {result['commit']}"


ROWS = [{"step": 0, "eval/reward": 0.5}, {"step": 1, "reward/mean": 0.25, "loss/a": 3.0}, {"step": 2, "loss/a": 2.0}]


@pytest.mark.parametrize("source, expected", [
    ("eval/reward@0", 0.5), ("max loss/a", 3.0), ("seconds", 7.5), (r"best (\S+) at", 1234.5)])  # fmt: skip
def test_a_repetitions_number_is_found(source, expected):
    assert check.found(source, "best 1,234.5 at step", ROWS, 7.5) == expected


@pytest.mark.parametrize("source", ["eval/reward@1", "no/metric@1", "worst (.*)"])
def test_a_repetition_without_the_number_ends(source):
    with pytest.raises(SystemExit, match=f"has no {re.escape(source)}"):
        check.found(source, "best 1 at", ROWS, 7.5)


def test_it_says_what_holds_and_what_does_not(tmp_path, monkeypatch, capsys):
    numbers = [{"shown": "0.5", "from": "eval/reward@0", "least": 0.4, "most": 0.6},
               {"shown": "2", "from": "max loss/a", "least": 1, "most": 2.5}]  # fmt: skip
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"page": "README.md", "command": "python train.py", "numbers": numbers}))
    monkeypatch.setattr(check, "repeat", lambda command: ("", ROWS, 1.0))
    assert not check.check(str(file))
    assert re.findall("(holds|FAILS)  ", capsys.readouterr().out) == ["holds", "FAILS"]
    monkeypatch.setattr(sys, "argv", ["check.py", str(file)])
    with pytest.raises(SystemExit) as ended:
        check.main()
    assert ended.value.code == 1


@pytest.mark.parametrize("command", ["source install.sh", "rm -r x.py", "torchrun --nproc_per_node 2 train.py"])
def test_other_commands_are_not_run(command):
    with pytest.raises(SystemExit, match="is not repeated"):
        check.repeat(command)
