"""flatrl/compare.py: pairs of runs, here of a script that writes metrics.jsonl."""

import shutil
import sys

import pytest

from agent_loop import BadInput
from flatrl import compare

# A run has two evaluations after step 0. Of their mean, --gain adds a little less to each seed.
RUN = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--output_dir", type=pathlib.Path)
parser.add_argument("--gain", type=float, default=0)
args = parser.parse_args()
with open("started", "a") as file:
    file.write(f"{args.output_dir.name} ")
if args.seed == 2 and pathlib.Path("broken").exists():
    sys.exit("no such task")
args.output_dir.mkdir(exist_ok=True)
values = [0.3, 0.5, 0.7 + args.gain * (2 - args.seed / 10)]
rows = [{"step": 4 * i, "eval/reward": value} for i, value in enumerate(values)]
(args.output_dir / "metrics.jsonl").write_text("\\n".join(map(json.dumps, rows)))
"""


@pytest.fixture
def start(tmp_path, monkeypatch, capsys):
    """start(*flags): compares RUN with and without a gain; returns what is printed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.py").write_text(RUN)
    command = f"{sys.executable} run.py"

    def main(*flags):
        compare.main([command, f"{command} --gain 0.12", "--output_dir", "out", *flags])
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if " runs; its output is in " not in line]

    return main


def test_a_failed_run_ends_the_comparison_and_a_restart_continues(start, tmp_path):
    (tmp_path / "broken").touch()
    with pytest.raises(SystemExit, match=r"no such task\nrun A_2 failed with exit code 1"):
        start()
    (tmp_path / "broken").unlink()
    *pairs, sentence = start()
    kept = f"A_0 is kept as it is; to run it again, remove {tmp_path}/out/A_0.done"
    assert pairs[2] == kept
    assert pairs[1].startswith("seed 1: A 0.6, B 0.714; so far B is better by 0.12 (-inf")
    assert sentence == "B is better by 0.11 (0.083 to 0.14) after 4 pairs"
    assert start("--smaller")[-1] == "A is better by 0.11 (0.083 to 0.14) after 4 pairs"
    assert (tmp_path / "started").read_text() == "A_0 B_0 B_1 A_1 A_2 A_2 B_2 B_3 A_3 "
    assert len((tmp_path / "out/pairs.jsonl").read_text().splitlines()) == 4
    shutil.rmtree(tmp_path / "out/B_3")
    assert start("--last", "1")[2].startswith("seed 0: A 0.7, B 0.94; so far B is better by 0.24 ")
    assert (tmp_path / "started").read_text().endswith("A_3 B_3 ")
    with pytest.raises(SystemExit, match="A_0/metrics.jsonl has no eval/pass@1 after step 0"):
        start("--metric", "eval/pass@1")
    assert start("--first_seed", "9", "--pairs", "1")[-1].startswith("no verdict: 1 pair")
    assert start("--pairs", "3")[-1].startswith("no verdict: 3 pair(s) are too few for the test")
    with pytest.raises(SystemExit, match="2"):
        start("--pairs", "0")
    with pytest.raises(SystemExit, match="2"):
        start("--error", "1.5")


def test_a_metric_that_is_not_finite_ends_the_comparison(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "x": NaN}\n{"step": 2, "x": 0.5}\n')
    with pytest.raises(BadInput, match="metrics.jsonl: x is nan"):
        compare.number_of(tmp_path, "x", None)
    assert compare.number_of(tmp_path, "x", 1) == 0.5
