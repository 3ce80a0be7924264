"""results/: the tables of the pages are made from the records of the runs."""

import importlib.util
import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from conftest import REPO

sys.path.append(str(REPO / "results"))
import tables

LINES = [
    {"run": "seed_0", "step": 0, "eval/reward": 0.5},
    {"run": "seed_0", "step": 1, "reward/mean": 0.25, "loss": 3.0},
    {"run": "seed_0", "step": 2, "reward/mean": 0.75, "loss": 2.0, "eval/reward": 0.9},
    {"run": "seed_1", "step": 0, "eval/reward": 0.25},
]
PAGE = "before\n<!-- results: mine -->\nold\n<!-- end -->\nafter\n"
TABLE = "| seed | reward |\n| --- | --- |\n| seed_0 | 0.900 |\n| 1 |  |\n"


@pytest.fixture
def figure(tmp_path, monkeypatch):
    """A table of the name `mine`, with two runs."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    records = {"seed_0": {"seconds": 125}, "seed_1": {"label": "1", "figures": {"max loss": 4.0}}}
    (folder / "record.json").write_text(json.dumps(records))

    def mine():
        yield "seed", "reward"
        for run in tables.runs("mine", tmp_path).values():
            yield run.label, *run.at("eval/reward", 2)

    monkeypatch.setattr(tables, "TABLES", {"mine": mine})
    return tables.runs("mine", tmp_path)


def test_a_run_knows_its_metrics_and_its_figures(figure):
    first, second = figure.values()
    assert first.at("eval/reward", 0, 1, 2) == ["0.500", "", "0.900"]
    assert first.largest("loss") == 3.0
    assert second.largest("loss") == 4.0
    assert first.duration() == "2 min 5 s"


def test_pages_are_rewritten_between_the_markers(figure, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert tables.main(["--check"], [page]) == 1
    assert page.read_text() == PAGE
    assert "page.md" in capsys.readouterr().out
    assert tables.main([], [page]) == 0
    assert page.read_text() == PAGE.replace("old\n", TABLE)
    assert tables.main(["--check"], [page]) == 0
    capsys.readouterr()
    assert tables.main(["mine"], [page]) == 0
    assert capsys.readouterr().out == TABLE + "\n"


@pytest.mark.parametrize("name", tables.TABLES)
def test_a_table_has_as_many_cells_as_its_header(name):
    header, *rows = tables.TABLES[name]()
    assert rows
    assert all(len(row) == len(header) for row in rows)


def load_script(path: str):
    spec = importlib.util.spec_from_file_location("script", REPO / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_game_of_bisection_is_drawn_before_and_after(tmp_path):
    script = load_script("results/bisection.py")
    said = {
        "eval_000000": (["0 to 31", "31", "0 to 30", "40"], 0.0),
        "eval_000010": (["0 to 31", "16", "0 to 15", "7"], 1.0),
    }
    (tmp_path / "rollouts").mkdir()
    for name, (texts, reward) in said.items():
        rollout = {"messages": [{"content": text} for text in texts], "total_reward": reward}
        (tmp_path / "rollouts" / f"{name}.jsonl").write_text(json.dumps(rollout) + "\n")
    before, after = script.games(tmp_path)
    assert script.turns(before) == [(0, 31, 31)]  # 40 was not among what was left
    assert script.turns(after) == [(0, 31, 16), (0, 15, 7)]
    file = tmp_path / "rollouts/eval_000010.jsonl"
    assert script.places(file) == [16 / 31, 7 / 15]
    script.animate(tmp_path, tmp_path / "game.svg")
    drawn = ElementTree.parse(tmp_path / "game.svg").getroot()
    frames = [each.get("values") for each in drawn.iter() if each.get("attributeName") == "fill"]
    assert frames[32 + 7].split(";") == [script.LEFT, script.FOUND, script.FOUND]
    assert frames[32 + 20].split(";") == [script.LEFT, script.GONE, script.GONE]
