"""flatrl/launch.py: what a job or a shell has left behind is put right before torch is imported."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import HANGS, REPO

from flatrl import launch

# Prints the variables that are left, and which file a new one gets.
PROGRAM = """
import json, os, sys
from flatrl.launch import prepare_process
prepare_process()
for stream in (sys.stdout, sys.stderr):
    print("lost", file=stream)
    print("lost", file=stream, flush=True)
left = {name: os.environ[name] for name in sys.argv[1].split(",") if name in os.environ}
with open(os.environ["OUT"], "w") as file:
    json.dump([left, file.fileno() > 2], file)
"""
LAUNCHER = {
    "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
MPI = {"PMI_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "4"}


@pytest.mark.parametrize("given, left", [
    ({"RANK": "3", "LOCAL_RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "x"}, {}),
    (LAUNCHER | {"WORLD_SIZE": "1"}, {}),
    (LAUNCHER | {"WORLD_SIZE": ""}, {}),
    (MPI, {}),
    (LAUNCHER | MPI | {"LOCAL_WORLD_SIZE": ""}, LAUNCHER),
])  # fmt: skip
def test_a_process_alone_forgets_launchers_that_did_not_start_it(given, left, tmp_path):
    assert prepared(given, tmp_path) == [left, True]


def prepared(variables: dict, folder, redirections: str = "", names=(*LAUNCHER, *MPI)) -> list:
    """Runs PROGRAM in a shell; returns what it has written."""
    out = folder / "out.json"
    program = f"{sys.executable} -c '{PROGRAM}' {','.join(names)}"
    command = f"set -o pipefail; (sleep 0.1; {program}) {redirections}"
    env = {"PATH": os.environ["PATH"], "OUT": str(out)} | variables
    subprocess.run(["bash", "-c", command], cwd=REPO, env=env, check=True, timeout=HANGS)
    return json.loads(out.read_text())


@pytest.mark.parametrize("redirections", ["<&- >&- 2>&-", "2>&1 | true"])
def test_standard_streams_that_are_closed_or_not_read(redirections, tmp_path):
    assert prepared({}, tmp_path, redirections) == [{}, True]


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="ranks of CPUs share its cores")
def test_ranks_share_the_cores(tmp_path):
    ranks = {"LOCAL_WORLD_SIZE": str(len(os.sched_getaffinity(0)))}
    found, _ = prepared(LAUNCHER | ranks, tmp_path, names=["OMP_NUM_THREADS"])
    assert found == {"OMP_NUM_THREADS": "1"}


def test_ctrl_c_in_the_imports_prints_no_traceback():
    code = "import signal, flatrl.launch as launch; launch.prepare_process()\n"
    code += "signal.raise_signal(signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT and done.stderr == ""


def test_a_user_without_a_home_to_write_to_gets_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("USER", "nobody")
    made = tmp_path / f"flatrl-{os.getuid()}"
    for home, given in (tmp_path, tmp_path), (tmp_path / "none", made):
        monkeypatch.setenv("HOME", str(home))
        launch.give_home()
        assert Path.home() == given and given.is_dir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write to all
    launch.give_home()
    assert Path.home() == made
    line = f"there is no home folder to write to: HOME is {made}\n"
    assert capsys.readouterr().out == 2 * line
