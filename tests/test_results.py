"""results/: every figure of the README and the docs has a file that says how to repeat it, as the page shows it."""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO
from test_docs import COMMAND, anchors, outside_and_inside_code

sys.path.append(str(REPO / "bench"))
import check

# Figures of pages that are no measurements of ours, by what they are. All others are in a file of results/.
NOT_MEASURED = {
    "README.md": {"versions of Python": "3.11 3.12"},
    "docs/agents.md": {"a version of Linux": "5.12"},
    "docs/algorithms.md": {"constants of ours and of others": "1e-4 1e-6 3.0", "the reward to reach": "0.9"},
    "docs/credit.md": {
        "rewards to reach": "0.6 0.9 0.95 0.99", "flags and rewards of a task": "0.8 0.718",
        "rollouts of so many steps": "1,024 1,536 2,048 5,120 6,144",
    },
    "docs/data.md": {
        "numbers of rows": "1,000 10,000 10,001 100,000 1,000,000", "the reward to reach": "0.95",
        "trajectories of 100 steps": "1,600",
    },
    "docs/log.md": {
        "what is usual, and what is too much": "1e-6 1e-4 1e-3 2e-2 0.1", "messages": "0.000 83%",
        "limits and defaults": "30 seconds 3e-4",
    },
    "docs/lora.md": {"a flag": "3e-3"},
    "docs/models.md": {"limits": "1e-05 1e-3", "a learning rate": "4e-6", "versions of torch": "2.11 2.13 2.14"},
    "docs/recipes.md": {
        "a standard error, of 128 answers": "0.04",
        "flags, limits and sizes of data": "0.7 2e-5 1.7e-5 6e-6 0.15 0.95 1,024 12,288",
        "of docs/real/*.jsonl, by the test below": "11.3 10.3 17.7 11.7 10.8 16.7 11.9 18.9 0.64 0.68",
        "published by others, for one GPU": "0.26 0.8 0.81 1.5 60%",
        "published by others": "0.336 0.403 0.421 0.57 0.778 0.784 0.796 0.843 0.884 35 min 40.0 7,473",
    },
    "docs/report.md": {"limits": "2% 1,000 500,000"},
    "docs/scaling.md": {
        "defaults": "1,024 15 minutes 16,384", "held by a test": "1e-4 10%",
    },
    "docs/speed.md": {
        "flags and sizes": "0.1 1,024 2,048 4,096 8,192 16,384", "a version of TRL": "1.16",
        "of a formula": "0.76 0.30 0.28 0.18",
    },
    "docs/tests.md": {"held by a test": "1e-6"},
    "docs/tiny_models.md": {"a limit": "1,024"},
    "docs/units.md": {
        "the reward to reach": "0.5", "ratios and differences in the table": "0.49 0.71 0.55 0.01 0.06",
    },
    "docs/two_hops.md": {
        "a version of TRL": "1.16", "people": "1,128", "a standard error, of 128 answers": "0.02 0.03",
    },
    "docs/walk.md": {
        "follow from others, in tests/test_docs.py": "0.65 0.75 0.4629 -0.540 1.620", "rewards": "0.0 1.0",
        "flags and limits": "3e-4 1e-3 0.1",
    },
    "docs/zoo.md": {"messages of bench/zoo.py": "0.41 0.5 1.0 -0.09 -1.00"},
}
FILES = sorted((REPO / "results").glob("*.json"))
RESULTS = {file.stem: json.loads(file.read_text()) for file in FILES}
PAGES = ["README.md", *(f"docs/{file.name}" for file in sorted((REPO / "docs").glob("*.md")))]
# A time (2 min 50 s, 2.6 s), 3,385, 0.598, 2.1e-06, 1e-4, 10%; not 0.5B, 1,299k, 0.25.1
FIGURE = re.compile(
    r"(?<![\w.,-])(-?\d+(?:\.\d+)?%|\d+ min \d+ s\b|\d+(?:\.\d+)? (?:s|min|minutes|seconds)\b|\d{1,3}(?:,\d{3})+"
    r"|-?\d+\.\d+(?:e-?\d+)?|-?\d+e-\d+)(?!\w|\.\d)"
)


def figures_of(lines: list[str]) -> set[str]:
    return {match[1] for line in lines for match in FIGURE.finditer(line)}


def printed_by_the_readmes_run() -> set[str]:
    """The figures of what the README's code blocks show of a run's output."""
    _, code = outside_and_inside_code(REPO / "README.md")
    fenced = "".join(re.findall(r"```python.*?```", (REPO / "README.md").read_text(), re.DOTALL))
    return figures_of([line for line in code if not COMMAND.match(line) and line not in fenced])


def address(heading: str) -> str:
    """GitHub's name of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def figures_by_section(page: str) -> dict[str, set[str]]:
    """The figures of a page's text by the address of their section, as docs/lora.md#adapters-lora. Links, comments and
    what stands in backticks (flags with their values) are left out."""
    found = {}
    section = page
    text = "\n".join(outside_and_inside_code(REPO / page)[0])
    left_out = r"<!--.*?-->|`[^`\n]+(?:\n[^`\n]+)?`|\[[^\]]*\]\([^)]*\)"
    bare = re.sub(left_out, lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    for line, rest in zip(text.splitlines(), bare.splitlines()):
        if heading := re.match(r"#+ (.*)", line):
            section = f"{page}#{address(heading[1])}"
        found[section] = found.get(section, set()) | figures_of([rest])
    return found


def test_figures_are_found_and_settings_are_not(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\nIt rose to 0.59, by 12%, in 2 min 5 s; -0.25 nats, 1.5e-7 and 3,385 tokens.\n\n"
        "    python train.py    # 0.7\n\n## B: more\n| 0.61 (0.6 - 0.62) | 34 s |\n"
        "`--lr 0.1`, `0.2\n0.3`, [0.4](x) vLLM 0.25.1, 0.5B, 0-5 s <!-- 0.8\n0.9 -->\n### C\n| 1,024 | 1e-4 |\n"
    )  # fmt: skip
    assert figures_by_section(str(page)) == {
        f"{page}#a-page": {"0.59", "12%", "2 min 5 s", "-0.25", "1.5e-7", "3,385"},
        f"{page}#b-more": {"0.61", "0.6", "0.62", "34 s"}, f"{page}#c": {"1,024", "1e-4"},
    }  # fmt: skip


def value(shown: str) -> float:
    """What a figure is worth; times in seconds."""
    if match := re.fullmatch(r"(?:(\d+) min)? ?(?:([\d.]+) s)?", shown):
        return 60 * int(match[1] or 0) + float(match[2] or 0)
    return float(shown.replace(",", "").removesuffix("%"))


def known_figures(section: str) -> set[str]:
    """What the results of a section, or of its whole page, show."""
    places = (section, section.partition("#")[0])
    return {number["shown"] for result in RESULTS.values() if result["page"] in places for number in result["numbers"]}


def test_a_figure_of_the_readme_can_be_repeated():
    found = printed_by_the_readmes_run()
    assert {"0.438", "2,284", "130 s"} <= found
    missing = found - known_figures("README.md")
    assert not missing, f"put these into a file of results/ (bench/check.py says how): {sorted(missing)}"


@pytest.mark.parametrize("page", PAGES)
def test_a_figure_of_a_page_can_be_repeated_or_is_no_measurement(page):
    """Figures are compared section by section: that a number is known elsewhere does not help."""
    others = figures_of(list(NOT_MEASURED.get(page, {}).values()))
    found = figures_by_section(page)
    gone = others - set().union(*found.values())
    assert not gone, f"these are no longer on {page}: {sorted(gone)}"
    missing = {section: sorted(figures - known_figures(section) - others) for section, figures in found.items()
               if figures - known_figures(section) - others}  # fmt: skip
    assert not missing, f"put these into a file of results/ (bench/check.py says how): {missing}"


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_says_how_it_was_measured_and_stands_on_its_page(name):
    result = RESULTS[name]
    keys = {"page", "command", "measured_by", "commit", "machine", "versions", "seeds", "numbers"}
    assert set(result) == keys | ({"why"} if result["command"] is None else set())
    assert re.fullmatch(r"[0-9a-f]{7,40}", result["commit"]) and result["machine"] and result["numbers"]
    assert {"torch", "transformers"} <= set(result["versions"]) and isinstance(result["seeds"], list)
    file, _, section = result["page"].partition("#")
    page = (REPO / file).read_text()
    if section:
        assert section in anchors(REPO / file)
        page = re.split(r"^#+ ", page, flags=re.MULTILINE)[heading_numbers(file)[section]]
    for number in result["numbers"]:
        assert set(number) == {"shown", "from", "least", "most"} and bool(number["from"]) == bool(result["command"])
        assert re.search(rf"(?<![\d.]){re.escape(number['shown'])}(?![\d.]*\d)", page), f"{name}: {number['shown']}"
        assert number["least"] <= value(number["shown"]) <= number["most"], number
        re.compile(number["from"])


def heading_numbers(page: str) -> dict[str, int]:
    """The number of each heading of a page, from 1, by its address."""
    titles = re.findall(r"^#+ (.*)", (REPO / page).read_text(), re.MULTILINE)
    return {address(title): i for i, title in enumerate(titles, 1)}


def test_what_cannot_be_repeated_is_listed():
    listed = re.findall(r"^- `(\w+)`", (REPO / "results/README.md").read_text(), re.MULTILINE)
    assert {name for name, result in RESULTS.items() if result["command"] is None} == set(listed)


def test_a_real_models_figures_are_those_of_its_files():
    """docs/recipes.md: CPU seconds of a step (median, least, most of 20), the last ten sampled rewards."""
    page = (REPO / "docs/recipes.md").read_text()
    for seed in range(3):
        lines = (REPO / f"docs/real/flatrl_{seed}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        steps = [after["cpu"] - before["cpu"] for before, after in zip(rows, rows[1:21])]
        [row] = re.findall(rf"^\| flatrl, seed {seed} \|.*\| ([\d.]+) \(([\d.]+) - ([\d.]+)\) \|", page, re.MULTILINE)
        expected = [statistics.median(steps), min(steps), max(steps)]
        assert [float(figure) for figure in row] == pytest.approx(expected, abs=0.06)
        if seed < 2:
            assert f"{statistics.fmean(row['reward'] for row in rows[-10:]):.2f}" in page


def test_a_command_of_a_result_is_one_that_is_repeated(tmp_path):
    """Each of its scripts is there, or on the page, and it writes nowhere but into the repetition's folder."""
    for name, result in RESULTS.items():
        for part in (result["command"] or "python train.py").split(" && "):
            if part == "source install.sh":
                continue
            launcher, words = check.launcher_and_words(part)
            assert launcher in check.LAUNCHERS and (REPO / words[0]).is_file(), name
            for flag, word in zip(words, words[1:]):
                if flag in ("--out", "--output_dir", "--folder"):
                    assert check.in_folder(word, result["page"], tmp_path).startswith(str(tmp_path)), name


def test_the_commits_are_of_this_history():
    if subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=REPO, capture_output=True, text=True
                      ).stdout.strip() != "false":  # fmt: skip
        pytest.skip("a shallow clone, or none")
    for name, result in RESULTS.items():
        known = subprocess.run(["git", "cat-file", "-e", f"{result['commit']}^{{commit}}"], cwd=REPO)
        assert known.returncode == 0, f"{name}: {result['commit']}"


ROWS = [{"step": 0, "eval/reward": 0.5}, {"step": 1, "reward/mean": 0.25, "loss/a": 3.0}, {"step": 2, "loss/a": 2.0}]


@pytest.fixture
def runs(tmp_path) -> Path:
    """A folder with the runs a/grpo-0, of the ROWS, and b/grpo-0, which has nothing but a loss of 9."""
    for name, rows in (("a/grpo-0", ROWS), ("b/grpo-0", [{"step": 0, "loss/a": 9.0}])):
        (tmp_path / name / "rollouts").mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in (1, 2):
        lines = [{"mask": [1, 0, 1], "metrics": {"calls": step}}, {"mask": [1], "metrics": {}}, {"kind": "failed"}]
        file = tmp_path / "a/grpo-0/rollouts" / f"step_{step:06d}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.mark.parametrize("source, expected", [
    ("a/grpo-0: eval/reward@0", 0.5), ("a/grpo-0: max loss/a", 3.0), ("b/grpo-0: loss/a@0", 9.0), ("seconds", 7.5),
    (r"best (\S+) at", 1234.5), ("a/grpo-0: sum mask until reward/mean >= 0.2", 3),
    ("a/grpo-0: count mask until loss/a >= 1", 4),
    ("a/grpo-0: sum metrics.calls until reward/mean >= 0.25", 1),
    (r'a/grpo-0: rollouts/step_000002.jsonl "calls": (\d)', 2)])  # fmt: skip
def test_a_repetitions_number_is_found(source, expected, runs):
    assert check.found(source, "best 1,234.5 at step", runs, 7.5) == expected


@pytest.mark.parametrize("source", [
    "a/grpo-0: eval/reward@1", "a/grpo-0: no/metric@1", "worst (.*)", "max loss/a", "grpo-0: max loss/a",
    "a/grpo-0: sum mask until eval/reward >= 0.6", "c: max loss/a", "a/grpo-0: rollouts/none.jsonl (.)"])  # fmt: skip
def test_a_repetition_without_the_number_ends(source, runs):
    """Nor is one taken of two runs of a name."""
    with pytest.raises(SystemExit, match=f"has no {re.escape(source)}"):
        check.found(source, "best 1 at", runs, 7.5)


def test_it_says_what_holds_and_what_does_not(tmp_path, monkeypatch, capsys):
    numbers = [{"shown": "0.5", "from": "a (.*)", "least": 0.4, "most": 0.6},
               {"shown": "2", "from": "b (.*)", "least": 1, "most": 2.5}]  # fmt: skip
    file = tmp_path / "mine.json"
    result = {"page": "README.md", "command": "python train.py", "numbers": numbers}
    file.write_text(json.dumps(result))
    monkeypatch.setattr(check, "repeat", lambda command, page, folder: ("a 0.5\nb 3", 1.0))
    assert not check.check(str(file))
    assert re.findall("(holds|FAILS)  ", capsys.readouterr().out) == ["holds", "FAILS"]
    monkeypatch.setattr(sys, "argv", ["check.py", str(file)])
    with pytest.raises(SystemExit) as ended:
        check.main()
    assert ended.value.code == 1
    file.write_text(json.dumps(result | {"command": None, "why": "a version that is gone"}))
    capsys.readouterr()
    assert check.check(str(file)) and "it can't be repeated: a version that is gone" in capsys.readouterr().out


def test_parts_of_a_command_share_a_folder_and_a_page_lends_its_task(tmp_path, monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command[1:])
        return subprocess.CompletedProcess(command, 0, stdout=f"part {len(commands)}\n")

    monkeypatch.setattr(check.subprocess, "run", run)
    command = ("python bench/algos.py --out runs/a && accelerate launch train.py --model ./runs/a/grpo-0/final "
               "--task lift.py && python train.py --output_dir runs/b")  # fmt: skip
    printed, seconds = check.repeat(command, "docs/tutorial.md#4-a-figure-ten-minutes", tmp_path)
    assert printed == "part 1\npart 2\npart 3\n" and seconds >= 0
    assert commands == [
        ["bench/algos.py", "--out", f"{tmp_path}/runs/a"],
        ["train.py", "--model", f"{tmp_path}/runs/a/grpo-0/final", "--task", f"{tmp_path}/lift.py",
         "--output_dir", f"{tmp_path}/runs/run"],
        ["train.py", "--output_dir", f"{tmp_path}/runs/b"],
    ]  # fmt: skip
    assert "class Lift:" in (tmp_path / "lift.py").read_text() and "above_median" in (tmp_path / "lift.py").read_text()


@pytest.mark.parametrize("command", ["source install.sh", "rm -r x.py", "torchrun --nproc_per_node 2 train.py"])
def test_other_commands_are_not_run(command, tmp_path):
    with pytest.raises(SystemExit, match="is not repeated"):
        check.repeat(command, "README.md", tmp_path)
