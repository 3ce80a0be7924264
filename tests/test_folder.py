"""A run's folder: whose it is, what a kill, a full disk or other flags do to it, and models that can't be meant."""

import contextlib
import dataclasses
import io
import json
import os
import pickle
import resource
import shutil
import signal
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from conftest import HANGS, REPO, TINY, lines, metrics_of, run, started, two_ranks, wait_for
from torch.distributed.checkpoint import FileSystemReader

import train
from agent_loop import BadInput
from flatrl import checkpoints, processes
from flatrl.log import Log
from train import Args

sys.path.append(str(REPO / "bench"))

from kills import differences, kill_loop


@contextlib.contextmanager
def full_disk(n_bytes: int = 100):
    """No file may grow beyond n_bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---------------------------------------------------------------- whose it is


def test_a_living_run_keeps_its_folder_and_a_killed_one_leaves_it(cache, tmp_path):
    """With a task that changes the directory, a process that outlives the run, and a relative output_dir."""
    out, blocks = tmp_path / "run", tmp_path / "blocks"
    task = tmp_path / "wild.py"
    task.write_text(f"""
import os, sys, time
sys.path.insert(0, {str(REPO / "tests")!r})
from tiny_task import *
import tiny_task
def reward(output, row):
    os.chdir("/")
    return tiny_task.reward(output, row)
if os.environ.get("TINY_TASK_BLOCKS") and os.fork() == 0:
    with open({str(tmp_path / "child")!r}, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(3600)
""")
    flags = [*TINY, "--task", task, "--output_dir", os.path.relpath(out, REPO), "--eval_every", "0", "--num_steps", "4"]
    blocked = {"TINY_TASK_BLOCKS": blocks, "TINY_TASK_BLOCKS_FROM": 3}
    with started(*flags, cache=cache, **blocked) as process:
        wait_for(blocks.exists)
        before = names(out), names(out / "checkpoints")
        for more in ([], ["--resume"]):
            printed = run(*flags, *more, cache=cache, code=2)
            assert printed.splitlines()[1:] == [
                f"train.py: error: another run is writing to {out}: choose another --output_dir, or wait for its end"
            ]
        assert (names(out), names(out / "checkpoints")) == before and process.poll() is None
        process.kill()
        process.wait()
        os.kill(int((tmp_path / "child").read_text()), 0)  # still there
        printed = run(*flags, "--resume", cache=cache)
    assert "resuming after step 2" in printed and [row["step"] for row in metrics_of(out)] == [0, 1, 2, 3, 4]
    assert {"args.json", "checkpoints", "final", "metrics.jsonl", "rollouts"} <= set(names(out))
    assert names(out / "checkpoints") == ["step_000002", "step_000004"] and names(tmp_path).count("run") == 1


@pytest.mark.parametrize("files, holds", [
    (["thesis.tex"], "thesis.tex"),
    (["args.json", "metrics.jsonl", "thesis.tex"], "thesis.tex"),
    (["checkpoints", "final"], "no args.json"),
    (["args.json", "metrics.jsonl", "rollouts", "checkpoints", ".lock", "wandb", "notes.jsonl"], None),
    ([".lock"], None),
    ([], None),
])  # fmt: skip
def test_only_a_runs_own_folder_is_moved_aside(files, holds, tmp_path, process_group, capsys):
    folder = tmp_path / "x"
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    args = Args(output_dir=str(folder))
    if holds:
        with pytest.raises(BadInput, match=f"is no run's own, to be moved aside: it holds {holds}$"):
            processes.on_main(checkpoints.claim_folder, args)
        assert names(folder) == sorted(files)
        return
    processes.on_main(checkpoints.claim_folder, args)
    assert checkpoints.prepare_folder(args) == (None, {})
    assert names(folder) == [".lock"]
    assert names(tmp_path) == (["x", "x.1"] if len(files) > 1 else ["x"])
    if len(files) > 1:
        assert names(tmp_path / "x.1") == sorted(files) and f"moved to {tmp_path / 'x.1'}" in capsys.readouterr().out


def test_a_refused_run_leaves_nothing_behind(cache, tmp_path):
    """It is refused when its folder is locked already, for the task's rows would not do."""
    (tmp_path / "empty").mkdir()
    flags = [*TINY, "--max_prompt_tokens", "1"]
    for name in "new", "empty":
        said = run(*flags, "--output_dir", tmp_path / name, cache=cache, code=2)
        assert "train.py: error: " in said
    assert names(tmp_path) == ["empty"]  # it was there before


def test_a_place_that_can_not_be_written_is_one_line(tmp_path, process_group):
    (tmp_path / "file").touch()
    for place in ("/proc/x", str(tmp_path / "file"), str(tmp_path / "file" / "x")):
        with pytest.raises(BadInput) as error:
            processes.on_main(checkpoints.claim_folder, Args(output_dir=place))
        assert place in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------- kills, broken checkpoints, a full disk


def test_kills_in_saves_change_nothing(cache, tmp_path):
    """bench/kills.py, which does more of them, also of a single rank."""
    flags = [*TINY, "--deterministic", "--num_steps", "4", "--eval_every", "0", "--save_every", "1",
             "--keep_checkpoints", "1", "--shard", "--tp", "2"]  # fmt: skip
    run(*flags, "--output_dir", tmp_path / "whole", cache=cache, by="ranks")

    def start(*arguments) -> list[int]:
        n, victim, *resume = arguments
        more = ["die", str(n), str(victim), *flags, "--output_dir", tmp_path / "killed", *resume]
        with two_ranks(*more, script="bench/kills.py", cache=cache) as processes:
            return [process.wait(HANGS) for process in processes]

    assert kill_loop(start, tmp_path / "killed", 1, ranks=2) == 1
    assert differences(tmp_path / "whole", tmp_path / "killed") == []
    assert names(tmp_path / "killed/checkpoints") == ["step_000004"]


class Recorder:
    """A log of what is said."""

    def __init__(self):
        self.said = []

    def say(self, text: str) -> None:
        self.said.append(text)


def make_run(folder: Path, **flags):
    """What the saving functions need of a train.Run: one linear layer that has made an optimiser step."""
    args = Args(output_dir=str(folder), **flags)
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr or 0.1, weight_decay=args.weight_decay)
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    learner = types.SimpleNamespace(net=net, optimizer=optimizer)
    return types.SimpleNamespace(args=args, folder=folder, learners={"policy": learner}, pool=None, log=Recorder(),
                                 kl=types.SimpleNamespace(coef=0.5), history=[], done=0, saved=0)  # fmt: skip


def save(run, *steps: int) -> None:
    for run.done in steps:
        assert checkpoints.save_checkpoint(run)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(folder: Path) -> None:
    """Changes one bit of a weight."""
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[content.index(make_run(folder).learners["policy"].net.weight.detach().numpy().tobytes())] ^= 1
    file.write_bytes(content)


class Makes:
    """When it is unpickled, a folder is made."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (f"{self.folder}/made",)


def hide_code(folder: Path) -> None:
    """Puts it where the optimiser's learning rate was."""
    torch.save(Makes(folder), folder / "code")
    metadata = FileSystemReader(folder).read_metadata()
    (key,) = [key for key in metadata.storage_data if key.fqn == "policy_optimizer.param_groups.0.lr"]
    stored = {"relative_path": "code", "offset": 0, "length": (folder / "code").stat().st_size}
    metadata.storage_data[key] = dataclasses.replace(metadata.storage_data[key], **stored)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_checkpoint_may_hold_tensors_of_every_type():
    """A model's buffers are not all float32, as those that count steps."""
    types_of_tensors = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32,
                        torch.int16, torch.int8, torch.uint8, torch.bool]  # fmt: skip
    for dtype in types_of_tensors:
        assert checkpoints._Unpickler(io.BytesIO(pickle.dumps(dtype))).load() is dtype


@pytest.mark.parametrize("spoil, why", [
    (lambda folder: cut(folder / "__0_0.distcp"), "__0_0.distcp is cut off"),
    (flip, "__0_0.distcp is cut off, was changed, or would run code: a checksum is wrong"),
    (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Makes(folder))), "would call posix.mkdir"),
    (hide_code, "code is cut off, was changed, or would run code: _pickle.UnpicklingError: Weights only load failed"),
    (lambda folder: (folder / "__0_0.distcp").unlink(), "FileNotFoundError"),
    (lambda folder: cut(folder / ".metadata"), "Error"),
    (lambda folder: (folder / ".metadata").unlink(), "FileNotFoundError"),
    (lambda folder: (folder / "step.json").write_text(""), "JSONDecodeError"),
    (lambda folder: (folder / "step.json").write_text("null"), "TypeError"),
    (lambda folder: (folder / "step.json").unlink(), "FileNotFoundError"),
    (lambda folder: (folder / "step.json").write_text("{}"), "KeyError"),
    (lambda folder: (folder / "step.json").write_text("[]"), "KeyError"),
    (lambda folder: (folder / "step.json").write_text('{"step": 4}'), "its step.json is not its own"),
    (lambda folder: (folder / "step.json").write_text(
        '{"step": 3, "history": [], "parts": [], "next_prompt": 0}'), "not its own"),
    (lambda folder: (folder / "step.json").write_text('{"step": 4, "history": [], "parts": []}'), "not its own"),
])  # fmt: skip
def test_resume_goes_on_from_the_last_checkpoint_that_is_whole(spoil, why, tmp_path, process_group, capsys):
    run = make_run(tmp_path, resume=True)
    save(run, 2, 4)
    newest = tmp_path / "checkpoints" / "step_000004"
    spoil(newest)
    found, state = checkpoints.prepare_folder(run.args)
    assert not (newest / "made").exists() and not Path(f"{newest}.1", "made").exists()
    parts = ["policy", "policy_optimizer"]
    assert found.name == "step_000002"
    assert state == {"step": 2, "kl_coef": 0.5, "parts": parts, "history": [], "next_prompt": 0}
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{newest} is broken: ") and why in line and line.endswith(f"moved to {newest}.1")
    # What was moved aside stops no later save, nor does it count as one of those to keep.
    run = make_run(tmp_path, keep_checkpoints=1)
    save(run, 4)
    assert names(tmp_path / "checkpoints") == ["step_000004", "step_000004.1"]
    (tmp_path / "checkpoints/step_000004/step.json").unlink()
    with pytest.raises(BadInput, match="--resume: no checkpoint in .* is whole"):
        checkpoints.prepare_folder(dataclasses.replace(run.args, resume=True))


def test_what_a_killed_deletion_leaves_is_cleaned(tmp_path, process_group, monkeypatch):
    run = make_run(tmp_path, keep_checkpoints=1)
    save(run, 2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # killed while the older one is deleted

        def killed(path, **_):
            (path / "step.json").unlink()
            raise KeyboardInterrupt

        patch.setattr(shutil, "rmtree", killed)
        save(run, 4)
    assert names(tmp_path / "checkpoints") == [".step_000002", "step_000004"]
    again = make_run(tmp_path, keep_checkpoints=1)
    save(again, 2)  # e.g. resumed by another command: the folder in the way is gone
    assert "step_000002" in names(tmp_path / "checkpoints") or names(tmp_path / "checkpoints") == ["step_000004"]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_a_full_disk_costs_a_checkpoint_and_says_so(tmp_path, process_group):
    run = make_run(tmp_path)
    save(run, 2)
    before = (tmp_path / "checkpoints/step_000002/__0_0.distcp").read_bytes()
    run.done = 4
    with full_disk():
        assert checkpoints.save_checkpoint(run) is False
    (line,) = run.log.said
    assert line.startswith("warning: save_checkpoint: ") and "\n" not in line and "File too large" in line
    assert names(tmp_path / "checkpoints") == ["step_000002"] and run.saved == 2
    assert (tmp_path / "checkpoints/step_000002/__0_0.distcp").read_bytes() == before
    save(run, 6)
    assert names(tmp_path / "checkpoints") == ["step_000002", "step_000006"]


@pytest.mark.parametrize("checkpoint, final, ends", [(True, False, True), (False, True, True), (False, False, False)])
def test_only_a_run_that_saved_nothing_ends_with_an_error(
    checkpoint, final, ends, tmp_path, process_group, monkeypatch
):
    run = make_run(tmp_path)
    run.done, run.engine, run.log.close = run.args.num_steps, None, lambda: None
    run.background = types.SimpleNamespace(close=lambda: None)
    finished = threading.Event()
    thread = threading.Thread(target=finished.wait)
    run.stop = types.SimpleNamespace(finished=finished, thread=thread, requested=False)
    run.stop.thread.start()
    monkeypatch.setattr(train, "save_checkpoint", lambda run: checkpoint)
    monkeypatch.setattr(train, "save_policy", lambda run, folder: final)
    with contextlib.nullcontext() if ends else pytest.raises(BadInput, match="could be saved"):
        train.finish(run)
    assert finished.is_set() and ("the trained policy is in" in run.log.said[0]) is final


# ---------------------------------------------------------------- --resume with other flags


def test_flags_that_would_make_another_run_are_shown_and_refused(tmp_path):
    base = dict(output_dir=str(tmp_path), model="/models/a", lr=1e-6)
    Log(Args(**base), None, 0)
    free = dict(num_steps=99, eval_every=3, save_every=7, show_every=0, tp=2, tokens_per_micro_batch=999, resume=True)
    assert checkpoints.check_changes(Args(**base | free), own_model=False) == {}
    other = dict(lr=3e-6, seed=1, group_size=4, algo="dapo", task="/x.py", model="/models/b", weight_decay=0.1)
    text = ("--task examples/calculator.py -> /x.py, --model /models/a -> /models/b, --seed 0 -> 1, "
            "--algo grpo -> dapo, --group_size 8 -> 4, --clip_high 0.2 -> 0.28, --overlong_buffer 0.0 -> 0.2, "
            "--max_gen_batches 1 -> 10, --lr 1e-06 -> 3e-06, --weight_decay 0.0 -> 0.1")  # fmt: skip
    # the parts in the order of the flags
    with pytest.raises(BadInput) as error:
        checkpoints.check_changes(Args(**base | free | other), own_model=False)
    assert text.split(", ") == str(error.value).split("flags: ")[1].split(";")[0].split(", ")
    changed = checkpoints.check_changes(Args(**base | free | other, resume_with_changes=True), own_model=False)
    assert list(changed.values()) == text.split(", ")
    several = dict(base, rollout_correction="tis,geo_mask")  # a bound for each: a tuple, and a list in the file
    Log(Args(**several), None, 0)
    assert checkpoints.check_changes(Args(**several), own_model=False) == {}
    linear = dict(base, lr_schedule="linear")
    Log(Args(**linear), None, 0)
    with pytest.raises(BadInput, match="--num_steps 40 -> 41"):  # another rate at every step
        checkpoints.check_changes(Args(**linear, num_steps=41), own_model=False)
    assert checkpoints.check_changes(Args(**linear | {"model": "/models/b"}), own_model=True) == {}
    (tmp_path / "args.json").write_text("{}")
    with pytest.raises(BadInput, match=r"args.json is damaged"):
        checkpoints.check_changes(Args(**linear), own_model=False)


def test_what_changes_takes_effect_under_a_saved_optimiser(tmp_path, process_group):
    run = make_run(tmp_path, lr=0.1, weight_decay=0.1)
    save(run, 1)
    other = make_run(tmp_path, lr=0.3, weight_decay=0.5)
    with torch.no_grad():
        other.learners["policy"].net.weight.zero_()
    checkpoints.load_checkpoint(other, tmp_path / "checkpoints/step_000001", ["policy", "policy_optimizer"])
    (group,) = other.learners["policy"].optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.3, 0.5)
    for part in (lambda run: run.net.weight, lambda run: run.optimizer.state[run.net.weight]["exp_avg"]):
        assert torch.equal(*(part(x.learners["policy"]) for x in (run, other)))


# ---------------------------------------------------------------- models that can't be what was meant


def lose_a_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def spoil_a_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][1, 2] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def lose_the_digits(folder: Path) -> None:
    file = folder / "tokenizer.json"
    about = json.loads(file.read_text())
    vocab = about["model"]["vocab"]
    for digit in "0123456789":
        vocab[f"{digit}\u2603"] = vocab.pop(digit)
    file.write_text(json.dumps(about))


def change_a_size(folder: Path, name: str, add: int) -> None:
    file = folder / "config.json"
    about = json.loads(file.read_text())
    about[name] += add
    file.write_text(json.dumps(about))


@pytest.mark.parametrize("spoil, message", [
    (lambda folder: change_a_size(folder, "intermediate_size", 64),
     "is not what its config.json says: mismatched keys "),
    (lambda folder: change_a_size(folder, "vocab_size", -1),
     "its tokenizer has more tokens than its config.json has in vocab_size"),
    (lose_a_tensor, "missing keys ['model.layers.0.mlp.up_proj.weight"),
    (spoil_a_tensor, "model.layers.0.mlp.up_proj.weight has NaN or infinite elements"),
    (lambda folder: cut(folder / "model.safetensors"), "can't be loaded for training"),
    (lose_the_digits, "the tokenizer does not give a prompt back"),
    (None, "the engine is built"),
])  # fmt: skip
def test_a_model_that_can_not_be_meant_is_refused_before_the_engine_starts(
    spoil, message, tiny_model, tmp_path, process_group, monkeypatch
):
    def engine(*_):
        raise BadInput("the engine is built")

    monkeypatch.setattr(train, "Engine", engine)
    monkeypatch.setattr(train, "Stop", lambda: None)
    monkeypatch.chdir(REPO)
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    if spoil:
        spoil(model)
    flags = {"task": "tests/tiny_task.py", "model": str(model), "output_dir": str(tmp_path / "out")}
    with pytest.raises(BadInput) as error:
        train.setup(Args(**flags))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_cache_that_can_not_be_written_is_one_line(tmp_path, process_group, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    monkeypatch.chdir(REPO)
    with pytest.raises(BadInput) as error:
        train.setup(Args(task="tests/tiny_task.py", output_dir=str(tmp_path / "out")))
    assert "/proc/nothing" in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------- nothing but the end ends a run without saving


def test_a_hang_up_saves_and_ends_and_a_deleted_folder_comes_back(cache, tmp_path):
    out = tmp_path / "run"
    flags = [*TINY, "--num_steps", "1000", "--save_every", "0", "--eval_every", "0", "--output_dir", out]
    with started(*flags, cache=cache) as process:
        wait_for(lambda: lines(out / "metrics.jsonl") >= 3)
        shutil.rmtree(out / "rollouts")
        wait_for(lambda: (out / "rollouts").is_dir() and lines(out / "metrics.jsonl") >= 5)
        process.send_signal(signal.SIGHUP)
        printed, _ = process.communicate()
    done = metrics_of(out)[-1]["step"]
    assert process.returncode == 130 and "stopping" in printed  # saved is not done
    assert names(out / "checkpoints") == [f"step_{done:06d}"]


def test_a_log_that_can_not_be_written_is_a_warning_and_loses_no_metrics(tmp_path, capsys):
    args = Args(output_dir=str(tmp_path / "run"))
    log = Log(args, None, 0)
    log.metrics({"step": 1, "mine": {1, 2}, "reward/mean": 0.5})
    with full_disk(90):  # the first row and a part of the second
        log.metrics({"step": 2, "note": "x" * 40})
        log.metrics({"step": 3})
        log.rollouts("step_000003", [], [{"kind": "x" * 100}])
    log.metrics({"step": 4, "reward/mean": "no number"})
    log.metrics({"step": 5})
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1, "mine": "{1, 2}", "reward/mean": 0.5}, {"step": 2, "note": "x" * 40}, {"step": 3},
                    {"step": 4, "reward/mean": "no number"}, {"step": 5}]  # fmt: skip
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert [line.split(":")[1:3] for line in warnings] == [
        [" metrics", " OSError"], [" rollouts", " OSError"]]  # fmt: skip
    assert "File too large" in warnings[0]


def test_garbage_in_metrics_is_left_out_on_resume(tmp_path):
    args = Args(output_dir=str(tmp_path))
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n\xff\xfe\nnull\n[]\n{}\n{"step": "x"}\n{"step": 2}\n')
    Log(args, None, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_output_that_can_not_be_written_is_nothing_to_end_for():
    class Gone(io.RawIOBase):
        def writable(self):
            return True

        def write(self, _):
            raise OSError(5, "Input/output error")

    stream = io.TextIOWrapper(io.BufferedWriter(Gone()), write_through=True)
    stream.write, stream.flush = map(processes.never_fails, (stream.write, stream.flush))
    print("hello", file=stream, flush=True)
    print("hello" * 10_000, file=stream, flush=True)
