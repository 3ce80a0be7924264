"""Several hosts: launcher groups with a rank or two each, on loopback; by hand, as a launcher sets their environment.

A host without a disk in common with the others is a working directory of its own: --output_dir run is in it.
"""

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch
from conftest import HANGS, REPLAY, REPO, TINY, free_port, lines, metrics_of, run, started, wait_for
from test_train import safetensors

import train
from agent_loop import BadInput
from flatrl import checkpoints, devices
from train import Args

TASK = ["--task", REPO / "tests/tiny_task.py"]
FLAGS = [*TINY, *TASK, "--deterministic", "--num_steps", "2", "--save_every", "1", "--output_dir"]


@contextlib.contextmanager
def two_hosts(*flags, disks: list[Path], ranks: int = 1, **more):
    """All processes of two hosts with so many ranks each."""
    group = {"WORLD_SIZE": 2 * ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": free_port()}  # fmt: skip
    with contextlib.ExitStack() as stack:
        processes = []
        for i in range(2 * ranks):
            disk = disks[i // ranks % len(disks)]
            disk.mkdir(exist_ok=True)
            own = {"RANK": i, "LOCAL_RANK": i % ranks, "TESTS_START_IN": disk}
            processes.append(stack.enter_context(started(*flags, **more, **group, **own)))
        yield processes


def run_hosts(*flags, code: int = 0, **more) -> list[str]:
    """What each process printed."""
    with two_hosts(*flags, **more) as processes:
        outputs = [process.communicate(timeout=HANGS)[0] for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), "\n".join(outputs)
    return outputs


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
    one, two = safetensors(folder / "final"), safetensors(other / "final")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_two_hosts_without_a_disk_in_common_give_the_numbers_of_one(one_host, cache, tmp_path):
    disks = [tmp_path / "a", tmp_path / "b"]
    first, second = run_hosts(*FLAGS, "run", disks=disks, cache=cache)
    assert_same(tmp_path / "a/run", one_host)
    written = "checkpoints/step_000002/__0_0.distcp"  # by host 0, all of it
    assert (tmp_path / "a/run" / written).stat().st_size == (one_host / written).stat().st_size
    assert files(tmp_path / "b/run") == [] and not list((tmp_path / "b/run").rglob(".step*"))
    assert "2 x cpu" in first and not second.strip()


def test_a_killed_host_ends_the_other_by_name_and_both_resume(one_host, cache, tmp_path):
    out, blocks = tmp_path / "run", tmp_path / "blocks"
    blocked = {"TINY_TASK_BLOCKS": blocks, "TINY_TASK_BLOCKS_FROM": 1}  # a loop that hangs: both are in their rollout
    with two_hosts(*FLAGS, out, disks=[tmp_path], cache=cache, **blocked) as (first, second):
        wait_for(blocks.exists)
        os.killpg(second.pid, signal.SIGKILL)
        output, _ = first.communicate(timeout=HANGS)
    assert first.returncode == 1 and lines(out / "metrics.jsonl") == 2
    last = output.splitlines()[-1]
    assert last.startswith(os.uname().nodename) and f": rank 1 (process {second.pid}) is gone" in last
    first, _ = run_hosts(*FLAGS, out, "--resume", disks=[tmp_path], cache=cache)
    assert "resuming after step 1" in first
    assert_same(out, one_host)


def test_hybrid_shards_in_a_host_and_needs_no_disk_in_common(one_host, cache, tmp_path):
    flags = [*REPLAY, *TASK, "--replay", one_host, "--algo", "ppo", "--num_steps", "2", "--save_every", "2",
             "--tokens_per_micro_batch", "64", "--output_dir"]  # fmt: skip
    run(*flags, tmp_path / "alone", cache=cache)
    run_hosts(*flags, "run", "--shard", "hybrid", disks=[tmp_path / "a", tmp_path / "b"], ranks=2, cache=cache)
    found, expected = metrics_of(tmp_path / "a/run"), metrics_of(tmp_path / "alone")
    for name in ("actor/loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm"):
        for row, other in zip(found, expected, strict=True):
            assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
    checkpoint = tmp_path / "a/run/checkpoints/step_000002"
    parts = [name for name in files(checkpoint) if (checkpoint / name).stat().st_size]
    assert parts == [".metadata", "__0_0.distcp", "__1_0.distcp", "step.json"]  # of both ranks of the first host
    assert files(tmp_path / "b/run") == []
    # what host 0 wrote is all: one rank alone goes on from it
    more = [*flags, tmp_path / "a/run", "--resume", "--resume_with_changes", "--num_steps", "2"]
    printed = run(*more, cache=cache)
    assert "resuming after step 2" in printed
    one, two = safetensors(tmp_path / "a/run/final"), safetensors(tmp_path / "alone/final")
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], atol=5e-5, rtol=0)


def test_sharding_over_hosts_without_a_disk_in_common_is_refused(one_host, cache, tmp_path):
    disks = [tmp_path / "a", tmp_path / "b"]
    flags = [*REPLAY, *TASK, "--replay", one_host, "--output_dir", "run", "--shard"]
    for output in run_hosts(*flags, disks=disks, cache=cache, code=2):
        assert output.splitlines()[-1].startswith("train.py: error: hosts need the same flags; with --shard, but not ")


def test_a_host_that_lacks_the_task_says_so_and_the_other_ends(cache, tmp_path):
    disks = [tmp_path / "a", tmp_path / "b"]
    disks[0].mkdir()
    rows = [{"prompt": [{"role": "user", "content": "1+1"}]}]
    (disks[0] / "mine.py").write_text(f"def load(split): return {rows}\ndef reward(output, row): return 0.0")
    with two_hosts("--task", "mine.py", "--model", "mine", disks=disks, cache=cache) as (first, second):
        first.wait(HANGS), second.wait(HANGS)
    assert second.returncode == 2 and "train.py: error: --task" in second.printed() and "mine.py" in second.printed()
    assert first.returncode != 0 and "train.py: error" not in first.printed()


def test_hosts_with_other_flags_are_refused(process_group, tmp_path, monkeypatch):
    gathered = checkpoints.all_gather
    monkeypatch.setattr(
        checkpoints, "all_gather", lambda x: [x, (["--lr", "1"], True)] if isinstance(x, tuple) else gathered(x)
    )
    with pytest.raises(BadInput, match="hosts need the same flags"):
        train.setup(Args(task="tests/tiny_task.py", output_dir=str(tmp_path / "run")))


def test_a_team_stays_within_its_host(process_group, monkeypatch):
    monkeypatch.setattr(train.dist, "get_world_size", lambda: 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(BadInput, match="--tp 2 must divide the number of processes, 3, of a host"):
        devices.start_processes(Args(tp=2))


@pytest.mark.parametrize("said, meant", [
    ([], False), (["--shard"], True), (["--shard", "--seed", "1"], True), (["--shard", "True"], True),
    (["--shard", "False"], False), (["--shard", "hybrid"], "hybrid"),
])  # fmt: skip
def test_how_sharding_is_spelled(said, meant, monkeypatch):
    args = train.parse_args(said)
    train.check_args(args)
    assert args.shard is meant or args.shard == meant == "hybrid"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert devices.sharding(args) == (meant or True)


def test_another_spelling_is_refused():
    with pytest.raises(BadInput, match="--shard: invalid choice: 'hybird'"):
        train.parse_args(["--shard", "hybird"])
