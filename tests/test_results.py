"""results/: commands are recorded, and tables and pictures of the pages made from records."""

import json
import sys

from conftest import REPO

sys.path.append(str(REPO / "results"))
import pages
import record

# In place of train.py, or of a bench.
COMMAND = """
import json, pathlib, sys
rows = [{"step": 0, "eval/reward": 0.5}]
rows.append({"step": 1, "reward/mean": 0.123456, "timing/rollout_s": 1.0, "eval/reward": 0.75})
file = pathlib.Path(sys.argv[-1])
if sys.argv[-2] == "--output_dir":
    file.mkdir()
    file = file / "metrics.jsonl"
file.write_text("\\n".join(map(json.dumps, rows)))
"""


def test_commands_are_recorded_and_read_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "bench.py"):
        (tmp_path / name).write_text(COMMAND)
    command = [sys.executable, "train.py", "--seed", "3"]
    figure = tmp_path / "small"
    record.main("small/seed_3", command, tmp_path)
    known = record.read_records(figure)["seed_3"]
    record.write_records(figure, {"seed_3": known | {"label": "seed 3", "seconds": 99}})
    record.main("small/seed_3", command, tmp_path)  # replaces all but the label
    record.main("small/bench", [sys.executable, "bench.py"], tmp_path)

    metrics, *bench = record.read_lines(figure / "metrics.jsonl")
    rewards = {"0": 0.5, "1": 0.75}
    timing = {"timing/rollout_s": [1.0]}
    assert metrics == {"run": "seed_3", "eval/reward": rewards, "reward/mean": [0.1235]} | timing
    assert [len(bench), bench[1]["reward/mean"]] == [2, 0.123456]
    shared = json.loads((figure / "record.json").read_text())["all runs"]
    assert {"commit", "date", "machine"} <= {*shared}
    assert record.read_records(figure)["seed_3"]["command"].endswith("train.py --seed 3")

    assert 0 <= record.read_records(figure)["seed_3"]["seconds"] < 99
    record.write_lines(figure / "metrics.jsonl", [metrics])
    monkeypatch.setitem(pages.STEPS, "small", (1, 2))
    row = pages.table("small", tmp_path).splitlines()[-1]
    assert row.startswith("| seed 3 | 0.750 |  | ")


def test_the_tables_of_the_pages_are_those_of_the_records(tmp_path):
    assert pages.write_tables(pages.PAGES, only_check=True) == 0
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: quick_start -->\nold\n<!-- end -->\nafter\n")
    assert pages.write_tables([page], only_check=True) == 1
    assert pages.write_tables([page]) == 0
    assert "\n| seed 1 | 0.596 | 0.998 | 0.996 | 0.998 | 239 |\n" in page.read_text()
    assert page.read_text().endswith("<!-- end -->\nafter\n")


def test_guesses_are_placed_in_what_is_left(tmp_path):
    texts = ["0 to 31", "16", "0 to 15", "9", "9 to 15", "12"]
    rollout = {"messages": [{"content": text} for text in [*texts, "0 to 30", "40"]]}
    file = tmp_path / "step_000001.jsonl"
    file.write_text(json.dumps(rollout) + "\n")
    assert pages.places(file) == [16 / 31, 9 / 15]
