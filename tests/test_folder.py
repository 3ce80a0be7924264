"""A run's folder: whose it is, its checkpoints, and what --resume compares.

A run that is killed and resumed to the last digit is in test_train.py."""

import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_loop import BadInput
from data import load_task
from flatrl import checkpoints, models
from flatrl.log import Log, SilentLog
from flatrl.rows import hash_of_rows
from train import Args

LOCKS = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(100)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_living_run_keeps_its_folder_and_a_killed_one_leaves_it(tmp_path):
    args = Args(output_dir=str(tmp_path))
    command = [sys.executable, "-c", LOCKS, tmp_path / ".lock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(BadInput, match="another run is writing to"):
            checkpoints.claim_folder(args)
        process.kill()
    checkpoints.claim_folder(args)


@pytest.mark.parametrize("files, resume, refused", [
    ([], False, None),
    (["args.json", ".lock", "notes.txt"], False, None),  # a start that failed
    (["args.json", "metrics.jsonl"], False, "holds a run: continue it with --resume, or give"),
    (["final"], False, "holds a run"),
    (["metrics.jsonl"], True, "no checkpoint"),
    (["metrics.jsonl", "checkpoints/step_000002"], True, None),
])  # fmt: skip
def test_a_run_is_never_written_over(files, resume, refused, tmp_path):
    folder = tmp_path / "x"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    args = Args(output_dir=str(folder), resume=resume)
    if not refused:
        checkpoints.claim_folder(args)
        return
    with pytest.raises(BadInput, match=refused):
        checkpoints.claim_folder(args)


def make_run(folder: Path, **flags):
    """The parts of a train.Run that are saved: a linear layer after an optimiser step."""
    args = Args(output_dir=str(folder), **flags)
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr or 0.1)
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    learner = types.SimpleNamespace(net=net, optimizer=optimizer)
    return types.SimpleNamespace(
        args=args, folder=folder, learners={"policy": learner}, pool=None, done=0, saved=0,
        log=SilentLog(), kl=types.SimpleNamespace(coef=0.5), history=[[7, 0, 1.0]],
        task=types.SimpleNamespace(sampler=min), estimator_state={1: 2.5})  # fmt: skip


def save(run, *steps: int):
    for run.done in steps:
        checkpoints.save_checkpoint(run)


def test_the_latest_checkpoints_and_the_best_are_kept_and_half_ones_removed(
    tmp_path, process_group
):
    run = make_run(tmp_path, keep_checkpoints=1)
    save(run, 1, 2)
    folder = tmp_path / "checkpoints"
    assert names(folder) == ["step_000002"]
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "eval/reward": 0.5}\n')
    (folder / ".step_000003").mkdir()  # a kill has left it
    assert checkpoints.checkpoints(tmp_path) == [folder / "step_000002"]
    save(run, 4, 5)
    assert names(folder) == ["step_000002", "step_000005"]


def test_a_checkpoint_brings_all_back_but_the_changed_rate(tmp_path, process_group):
    saved = make_run(tmp_path, lr=0.1, kl_target=0.1)
    save(saved, 3)
    run = make_run(tmp_path, lr=0.3, kl_target=0.1, resume=True)
    run.history, run.estimator_state, run.kl.coef = [], {}, 0.1
    learner, before = run.learners["policy"], saved.learners["policy"]
    with torch.no_grad():
        learner.net.weight.zero_()
        learner.optimizer.state[learner.net.weight]["exp_avg"].zero_()
    found, state = checkpoints.read_checkpoint(run.args)
    assert found == tmp_path / "checkpoints/step_000003"
    checkpoints.resume(run, found, state, ["lr"])
    assert (run.done, run.saved, run.kl.coef) == (3, 3, 0.5)
    assert run.history == [[7, 0, 1.0]] and run.estimator_state == {1: 2.5}
    assert learner.optimizer.param_groups[0]["lr"] == 0.3
    assert torch.equal(learner.net.weight, before.net.weight)
    averages = [x.optimizer.state[x.net.weight]["exp_avg"] for x in (before, learner)]
    assert torch.equal(*averages)
    run.kl.coef = 0.1
    checkpoints.resume(run, found, state, ["kl_coef"])  # another one was given
    assert run.kl.coef == 0.1


def test_a_checkpoint_that_does_not_load_is_named(tmp_path, process_group):
    run = make_run(tmp_path, resume=True)
    save(run, 2, 4)
    newest = tmp_path / "checkpoints/step_000004"
    file = newest / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    found, state = checkpoints.read_checkpoint(run.args)
    with pytest.raises(BadInput, match=f"--resume: {newest} .*Move it elsewhere"):
        checkpoints.load_checkpoint(run, found, state["parts"])


@pytest.mark.parametrize("done, left", [(3, 0), (2, 6)])
def test_a_run_that_reached_its_reward_is_complete_when_it_is_resumed(
    done, left, tmp_path, process_group
):
    run = make_run(tmp_path, num_steps=8, stop_at_reward=0.5, resume=True)
    save(run, done)
    rows = [{"step": 2, "eval/reward": 0.4}, {"step": 3, "eval/reward": 0.6}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkpoints.resume(run, *checkpoints.read_checkpoint(run.args), [])
    assert run.args.num_steps - run.done == left


def test_resume_prints_other_flags_and_refuses_other_rows(tmp_path, capsys):
    flags = dict(output_dir=str(tmp_path), model="/models/a")
    Log(Args(**flags), None, 0, "rows a")
    history = {"history": []}
    assert checkpoints.check_changes(Args(**flags, seed=1), "rows b", {}) == []
    changed = Args(**flags, resume=True, seed=1, lr=0.1)
    assert checkpoints.check_changes(changed, "rows a", history) == ["seed", "lr"]
    printed = capsys.readouterr().out
    assert "--seed was 0 so far, and is 1 from now on\n" in printed
    assert "--lr was None so far, and is 0.1 from now on\n" in printed
    with pytest.raises(BadInput, match="the training rows are not those of the run"):
        checkpoints.check_changes(Args(**flags, resume=True), "rows b", history)
    accepted = Args(**flags, resume="changed")
    assert checkpoints.check_changes(accepted, "rows b", history) == []
    with pytest.raises(BadInput, match="`sampler`"):
        checkpoints.check_changes(accepted, "rows b", {"history": [[7, 0]]})


def choices() -> np.ndarray:
    """As pandas gives them. The bytes of such an array are addresses."""
    return np.array([f"choice {i}" for i in range(3)], dtype=object)


@pytest.mark.parametrize("edit, is_same", [
    (lambda rows: None, True),
    (lambda rows: rows[0].update(words={"c", "b", "a"}), True),
    (lambda rows: rows[0].update(choices=choices()), True),
    (lambda rows: rows[0].update(at=object()), True),
    (lambda rows: rows[0].update(numbers=torch.tensor([1.0, 3.0])), False),
    (lambda rows: rows[1]["images"][0].putpixel((1, 1), 9), False),
    (lambda rows: rows.reverse(), False),
    (lambda rows: rows.pop(), False),
])  # fmt: skip
def test_rows_have_one_hash(edit, is_same):
    numbers = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    rows = [
        {"words": {"a", "b", "c"}, "at": object(), "choices": choices(), "numbers": numbers},
        {"answer": 3, "images": [Image.new("L", (3, 3))]},
    ]
    before = hash_of_rows(rows, 0)
    edit(rows)
    assert (hash_of_rows(rows, 0) == before) == is_same


def test_a_resumed_run_keeps_the_model_that_was_built_for_it(tmp_path, monkeypatch):
    """... though its task was edited, for which another is built.

    One thread builds it, so `python` finds the model of `accelerate launch`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = "import torch\ndef build_model(path):\n    n = torch.get_num_threads()\n"
    code += "    open(f'{path}/{n} threads', 'w')\n"
    (tmp_path / "task.py").write_text(code)
    task = load_task(str(tmp_path / "task.py"), ("build_model",))
    args = Args(task="task.py", output_dir=str(tmp_path / "run"))

    def build(edit: str) -> Path:
        (tmp_path / "task.py").write_text(code + edit)
        return Path(models.task_model(task, args))

    numbers = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    one = build("")
    assert names(one) == ["1 threads"] and numbers == [4, 1, 4]
    assert build("") == one
    two = build("# edited")
    assert names(tmp_path / "flatrl") == sorted([one.name, two.name])
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


def test_a_generation_config_that_transformers_refuses_is_saved(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    file = tmp_path / "model/generation_config.json"
    settings = json.loads(file.read_text()) | {"do_sample": False, "temperature": 0.6}
    file.write_text(json.dumps(settings))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        model.generation_config.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    checkpoints._write_policy(tmp_path / "out", model, tokenizer, model.state_dict(), {})
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == settings
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
