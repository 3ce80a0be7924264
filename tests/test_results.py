"""results/: runs are recorded, and the tables and pictures of the pages are made from records."""

import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from conftest import REPO

from agent_loop import BadInput

sys.path += [str(REPO / "results"), str(REPO / "speedrun")]
import pictures
import record
import tables
from pictures import FOUND, GUESSED, LEFT
from verify import verify

LINES = [
    {"run": "seed_0", "eval/reward": {"0": 0.5, "2": 0.9}, "reward/mean": [9.0, 9.0] + [0.5] * 10},
    {"run": "seed_1", "eval/reward": {"0": 0.25}, "reward/mean": {"1": 0.5, "9": 0.75}},
]
RECORDS = {"seed_0": {"seconds": 125}, "seed_1": {"label": "1", "figures": {"loss": 4.0}}}
PAGE = "before\n<!-- results: mine -->\nold\n<!-- end -->\nafter\n"
TABLE = """| seed | before | after | rewards | loss | time |
| --- | --- | --- | --- | --- | --- |
| seed_0 | 0.500 | 0.900 | 0.5, 0.5 |  | 2 min 5 s |
| 1 | 0.250 |  | 0.625, 0.75 | 4.0 | 0 min 0 s |
"""


def test_pages_are_rewritten_between_the_markers(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    record.write_records(folder, RECORDS)

    def mine():
        yield "seed", "before", "after", "rewards", "loss", "time"
        for run in tables.runs("mine", tmp_path).values():
            rewards = f"{run.last_rewards()}, {run.typical('reward/mean')}"
            loss = str(run.figures.get("loss", ""))
            yield run.label, *run.at("eval/reward", 0, 2), rewards, loss, run.duration()

    monkeypatch.setattr(tables, "TABLES", {"mine": mine})
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert tables.main([page], only_check=True) == 1
    assert page.read_text() == PAGE
    assert "page.md" in capsys.readouterr().out
    assert tables.main([page]) == 0
    assert page.read_text() == PAGE.replace("old\n", TABLE)
    assert tables.main([page], only_check=True) == 0


@pytest.mark.parametrize("name", tables.TABLES)
def test_a_table_has_as_many_cells_as_its_header(name):
    header, *rows = tables.TABLES[name]()
    assert rows
    assert all(len(row) == len(header) for row in rows)


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


def test_runs_are_recorded(tmp_path, monkeypatch):
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
    run, *bench = record.read_lines(figure / "metrics.jsonl")
    rewards = {"0": 0.5, "1": 0.75}
    timing = {"timing/rollout_s": [1.0]}
    assert run == {"run": "seed_3", "eval/reward": rewards, "reward/mean": [0.1235]} | timing
    assert [len(bench), bench[1]["reward/mean"]] == [2, 0.123456]
    shared = json.loads((figure / "record.json").read_text())["all runs"]
    assert {"commit", "date", "machine"} <= {*shared}
    entry = record.read_records(figure)["seed_3"]
    assert entry["machine"] == known["machine"] and 0 <= entry["seconds"] < 99
    assert entry["label"] == "seed 3" and entry["command"].endswith("train.py --seed 3")


def test_what_the_pictures_show_is_read_from_records_and_rollouts(tmp_path):
    # In turn 5 of bisection, all guesses are equally good.
    assert list(pictures.correlations("bisection", "grpo")) == [1, 2, 3, 4]
    assert pictures.correlations("nim", "grpo")[5] == 0.5791

    said = {
        "eval_000000": (["0 to 31", "31", "0 to 30", "40"], 0.0),
        "eval_000010": (["0 to 31", "16", "0 to 15", "7"], 1.0),
    }
    (tmp_path / "rollouts").mkdir()
    for name, (texts, reward) in said.items():
        rollout = {"messages": [{"content": text} for text in texts], "total_reward": reward}
        (tmp_path / "rollouts" / f"{name}.jsonl").write_text(json.dumps(rollout) + "\n")
    before, after = pictures.games(tmp_path)
    assert pictures.turns(before) == [(0, 31, 31)]  # 40 was not among what was left
    assert pictures.turns(after) == [(0, 31, 16), (0, 15, 7)]
    file = tmp_path / "rollouts/eval_000010.jsonl"
    assert pictures.places(file) == [16 / 31, 7 / 15]

    pictures.game(tmp_path / "game.svg", tmp_path)
    drawn = ElementTree.parse(tmp_path / "game.svg").getroot()
    frames = [each for each in drawn if each.get("visibility")]
    bars = [[(bar.get("x"), bar.get("fill")) for bar in frame if bar.get("x")] for frame in frames]
    assert [bar[:2] for bar in bars] == [
        [("10", LEFT), ("630", GUESSED)],
        [("10", LEFT), ("330", GUESSED)],
        [("10", LEFT), ("150", FOUND)],
    ]
    shown = [frame[0].get("values") for frame in frames]
    assert shown == ["visible;visible;visible", "visible;hidden;hidden", "hidden;visible;visible"]


def test_a_record_of_the_speedrun_is_verified(tmp_path, capsys):
    file = tmp_path / "mine.json"
    script = tmp_path / "run.py"
    file.write_text(json.dumps({"command": f"{sys.executable} {script}"}))
    script.write_text(COMMAND)
    assert verify(file)[1] == "seed 1 ends with 0.750, below 0.9"
    assert "runs" not in json.loads(file.read_text())

    script.write_text(COMMAND.replace("0.75", "0.91"))
    assert verify(file) == verify(file) == []
    runs = json.loads(file.read_text())["runs"]
    assert runs["1"]["evaluations"] == {"0": 0.5, "1": 0.91}

    script.write_text("raise SystemExit(3)")
    with pytest.raises(BadInput, match="seed 0: the command ended with exit code 3"):
        verify(file)
    script.write_text(COMMAND.replace("0.75", "0.89"))
    problems = [line for seed in (0, 1) for line in (
        f"seed {seed} ends with 0.890, below 0.9",
        f"seed {seed}: other digits than in mine.json",
    )]  # fmt: skip
    assert sorted(verify(file)) == sorted(problems)

    elsewhere = json.loads(file.read_text()) | {"machine": "64 cores"}
    file.write_text(json.dumps(elsewhere))
    assert verify(file) == [line for line in problems if "below" in line]
    assert "mine.json is from 64 cores, not " in capsys.readouterr().out
