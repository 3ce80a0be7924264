"""A run's folder: whose it is, its checkpoints, and what --resume compares.

A run that is killed and resumed to the last digit is in test_train.py."""

import pickle
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from agent_loop import BadInput
from data import load_task
from flatrl import checkpoints, models
from flatrl.log import Log, SilentLog
from flatrl.rows import hash_of_rows
from train import Args, Learner

LOCKS = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_living_run_keeps_its_folder_and_a_killed_one_leaves_it(tmp_path):
    args = Args(output_dir=str(tmp_path))
    command = [sys.executable, "-c", LOCKS, tmp_path / ".lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(BadInput, match="another run is writing to"):
            checkpoints.claim_folder(args)
        process.kill()
    (tmp_path / "args.json").touch()
    assert checkpoints.claim_folder(args) is False  # a start that failed


def test_a_run_is_never_written_over_and_a_requeued_job_may_pass_resume(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    args = Args(output_dir=str(tmp_path))
    with pytest.raises(BadInput, match="continue it with --resume, or give another"):
        checkpoints.claim_folder(args)
    args.resume = True
    assert checkpoints.claim_folder(args) is False  # killed before its first checkpoint
    (tmp_path / "checkpoints/step_000002").mkdir(parents=True)
    assert checkpoints.claim_folder(args) is True


class Part(types.SimpleNamespace):
    groups = Learner.groups


def make_run(folder: Path, **flags):
    """The parts of a train.Run that are saved."""
    args = Args(output_dir=str(folder), **flags)
    net = torch.nn.Linear(3, 3)
    matrix = torch.optim.Muon([net.weight], lr=args.lr or 0.1)
    bias = torch.optim.AdamW([net.bias], lr=0.5)
    learner = Part(net=net, optimizers=[matrix, bias], n_updates=1)
    return Part(
        args=args, folder=folder, learners={"policy": learner}, done=0, saved=0, evals={},
        pool=Part(next_prompt=lambda done: 1), log=SilentLog(),
        history=[[7, 0, 1.0], [5, 0, 0.5]], task=Part(sampler=min),
        kept={"kl_coef": 0.5, "estimator": pickle.dumps({})})  # fmt: skip


def save(run, step: int):
    run.done = step
    checkpoints.save_checkpoint(run)


def test_a_resumed_run_learns_at_the_changed_rate(tmp_path, process_group):
    """... and the rewards of a step that failed: its prompt 1 is taken again."""
    saved = make_run(tmp_path, lr=0.1)
    Log(saved.args, None, 0)
    save(saved, 3)
    run = make_run(tmp_path, lr=0.3, resume=True)
    checkpoints.resume(run, *checkpoints.read_checkpoint(run.args, ""))
    assert (run.done, run.saved) == (3, 3)
    assert run.history == [[7, 0, 1.0], [5, 0]]
    assert [group["lr"] for group in run.learners["policy"].groups] == [0.3, 0.5]


def test_resume_prints_other_flags_and_refuses_other_rows(tmp_path, process_group, capsys):
    run = make_run(tmp_path)
    Log(run.args, None, 0, "rows a")
    run.history = []
    save(run, 1)
    flags = {"output_dir": str(tmp_path)}
    assert checkpoints.read_checkpoint(Args(**flags, seed=1), "rows b") == (None, {})
    _, state = checkpoints.read_checkpoint(Args(**flags, resume=True, seed=1, lr=0.1), "rows a")
    assert state["changed"] == ["seed", "lr"]
    assert "--lr was None so far, and is 0.1 from now on\n" in capsys.readouterr().out
    with pytest.raises(BadInput):
        checkpoints.read_checkpoint(Args(**flags, resume=True), "rows b")
    accepted = Args(**flags, resume="changed")
    assert checkpoints.read_checkpoint(accepted, "rows b")[1]["changed"] == []
    run.history = [[7, 0]]
    save(run, 2)
    with pytest.raises(BadInput):  # a sampler's history is about the other rows
        checkpoints.read_checkpoint(accepted, "rows b")


@pytest.mark.parametrize("edit, is_same", [
    (lambda rows: rows[0].update(words={"c", "b", "a"}), True),
    (lambda rows: rows[0].update(numbers=torch.tensor([1.0, 3.0])), False),
    (lambda rows: rows[1]["images"][0].putpixel((1, 1), 9), False),
    (lambda rows: rows.reverse(), False),
])  # fmt: skip
def test_rows_have_one_hash(edit, is_same):
    """Without addresses, which the bytes of an array of objects are."""

    def make_rows():
        choices = np.array([f"choice {i}" for i in range(3)], dtype=object)
        first = {"words": {"a", "b", "c"}, "choices": choices, "numbers": torch.tensor([1.0, 2.0])}
        first["random"] = np.random.default_rng(0)
        return [first, {"answer": 3, "images": [Image.new("L", (3, 3))]}]

    edited = make_rows()
    edit(edited)
    assert (hash_of_rows(edited, 0) == hash_of_rows(make_rows(), 0)) == is_same


def test_a_resumed_run_keeps_the_model_that_was_built_for_it(tmp_path, monkeypatch):
    """... though its task was edited, for which another is built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = "def build_model(path):\n    open(f'{path}/built', 'w')\n"
    (tmp_path / "task.py").write_text(code)
    task = load_task(str(tmp_path / "task.py"), ("build_model",))
    args = Args(task="task.py", output_dir=str(tmp_path / "run"))

    def build(edit: str) -> Path:
        (tmp_path / "task.py").write_text(code + edit)
        return Path(models.task_model(task, args))

    one = build("")
    assert (one / "built").is_file() and build("") == one
    two = build("# edited")
    assert {*(tmp_path / "flatrl").iterdir()} == {one, two}
    args.model = str(two)
    Log(args, None, 0)
    args.resume = True
    assert build("") == two


def test_a_model_without_all_its_weights_is_refused(tiny_model, tmp_path):
    """transformers would draw them at random."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_model, tmp_path / "spoilt")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match="missing_keys ..model.layers.0.mlp.up_proj.weight"):
        models.load_for_training("AutoModelForCausalLM", Args(model=str(folder)), "eager")
