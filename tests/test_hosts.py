"""Several hosts: process groups on loopback, whose environment is set as launchers set it.

A host without a shared disk is a working directory of its own, in which --output_dir run is."""

import os
import signal
from pathlib import Path

import pytest
import torch
from conftest import REPLAY, REPO, TINY, grouped, lines, metrics_of, run, run_all, wait_for
from test_train import safetensors

import train
from agent_loop import BadInput
from flatrl import devices
from train import Args

TASK = ["--task", REPO / "tests/tiny_task.py"]
FLAGS = [*TINY, *TASK, "--deterministic", "--num_steps", "2", "--save_every", "1", "--output_dir"]


@pytest.fixture
def disks(tmp_path) -> list[Path]:
    return [tmp_path / "a", tmp_path / "b"]


@pytest.fixture(scope="session")
def one_host(cache, tmp_path_factory) -> Path:
    """The run of one host with two ranks."""
    folder = tmp_path_factory.mktemp("one") / "run"
    run(*FLAGS, folder, by="ranks", cache=cache)
    return folder


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def assert_same(folder: Path, other: Path) -> None:
    assert [row["step"] for row in metrics_of(folder)] == [0, 1, 2]
    assert metrics_of(folder) == metrics_of(other)
    one = safetensors(folder / "final")
    two = safetensors(other / "final")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_two_hosts_without_a_shared_disk_give_the_numbers_of_one(one_host, cache, tmp_path, disks):
    first, second = run_all(*FLAGS, "run", by="ranks", hosts=disks, cache=cache)
    assert_same(tmp_path / "a/run", one_host)
    written = "checkpoints/step_000002/__0_0.distcp"  # by host 0, all of it
    size = (tmp_path / "a/run" / written).stat().st_size
    assert size == (one_host / written).stat().st_size
    assert files(tmp_path / "b/run") == []
    assert "2 x cpu" in first and not second.strip()


def test_a_killed_host_ends_the_other_and_both_resume(one_host, cache, tmp_path):
    out = tmp_path / "run"
    blocks = tmp_path / "blocks"
    alike = {"hosts": [tmp_path, tmp_path]}
    # A loop that hangs keeps both in their rollout.
    blocked = {"TINY_TASK_BLOCKS": blocks, "TINY_TASK_BLOCKS_FROM": 1}
    with grouped(*FLAGS, out, **alike, cache=cache, **blocked) as (first, second):
        wait_for(blocks.exists)
        os.killpg(second.pid, signal.SIGKILL)
        output = first.wait()
    assert first.returncode == 1 and lines(out / "metrics.jsonl") == 2
    assert "another rank is gone, rank 0 ends: " in output.splitlines()[-1]
    first, _ = run_all(*FLAGS, out, "--resume", by="ranks", **alike, cache=cache)
    assert "resuming after step 1" in first
    assert_same(out, one_host)


def test_hybrid_shards_in_a_host_and_needs_no_shared_disk(one_host, cache, tmp_path, disks):
    flags = [*REPLAY, *TASK, "--replay", one_host, "--algo", "ppo", "--num_steps", "2",
             "--save_every", "2", "--tokens_per_micro_batch", "64", "--output_dir"]  # fmt: skip
    run(*flags, tmp_path / "alone", cache=cache)
    run_all(*flags, "run", "--shard", "hybrid", by="ranks", hosts=disks, of_each=2, cache=cache)
    expected = metrics_of(tmp_path / "alone")
    for row, other in zip(metrics_of(tmp_path / "a/run"), expected, strict=True):
        for name in ("actor/loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm"):
            assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
    checkpoint = tmp_path / "a/run/checkpoints/step_000002"
    parts = [name for name in files(checkpoint) if (checkpoint / name).stat().st_size]
    # Both ranks of the first host have written.
    assert parts == [".metadata", "__0_0.distcp", "__1_0.distcp", "step.json"]
    assert files(tmp_path / "b/run") == []
    two = safetensors(tmp_path / "alone/final")
    for name, tensor in safetensors(tmp_path / "a/run/final").items():
        torch.testing.assert_close(tensor, two[name], atol=5e-5, rtol=0)


def test_sharding_over_hosts_without_a_shared_disk_is_refused(one_host, cache, disks):
    flags = [*REPLAY, *TASK, "--replay", one_host, "--output_dir", "run", "--shard"]
    for output in run_all(*flags, by="ranks", hosts=disks, cache=cache, code=2):
        last = output.splitlines()[-1]
        assert last.startswith("train.py: error: --shard needs one --output_dir that all hosts see")


def test_a_team_stays_within_its_host(process_group, monkeypatch):
    monkeypatch.setattr(train.dist, "get_world_size", lambda: 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(BadInput, match="--tp 2 must divide the number of processes, 3, of a host"):
        devices.start_processes(Args(tp=2))
