"""A run's folder: whose it is, and what a kill, a full disk or other flags do to it."""

import contextlib
import dataclasses
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from conftest import REPO, TINY, lines, metrics_of, run, started, wait_for
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from agent_loop import BadInput
from data import load_task
from flatrl import checkpoints, models, processes
from flatrl.contents import contents_of
from flatrl.log import Log, SilentLog
from rollout import BadReward, NothingLeft
from train import Args


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


def test_a_living_run_keeps_its_folder_and_a_killed_one_leaves_it(cache, tmp_path):
    """Also if its path is relative, and a task changes the directory."""
    out = tmp_path / "run"
    blocks = tmp_path / "blocks"
    task = tmp_path / "wanders.py"
    task.write_text(f"""
import os, sys
sys.path.insert(0, {str(REPO / "tests")!r})
from tiny_task import *
import tiny_task
def reward(output, row):
    os.chdir("/")
    return tiny_task.reward(output, row)
""")
    flags = [*TINY, "--task", task, "--output_dir", os.path.relpath(out, REPO),
             "--eval_every", "0", "--num_steps", "4"]  # fmt: skip
    blocked = {"TINY_TASK_BLOCKS": blocks, "TINY_TASK_BLOCKS_FROM": 3}
    with started(*flags, cache=cache, **blocked) as process:
        wait_for(blocks.exists)
        before = names(out), names(out / "checkpoints")
        printed = run(*flags, "--resume", cache=cache, code=2)
        assert f"train.py: error: another run is writing to {out}: " in printed
        assert (names(out), names(out / "checkpoints")) == before and process.poll() is None
        process.kill()
        process.wait()
    printed = run(*flags, "--resume", cache=cache)
    assert "resuming after step 2" in printed
    assert [row["step"] for row in metrics_of(out)] == [0, 1, 2, 3, 4]
    assert names(out / "checkpoints") == ["step_000002", "step_000004"]
    task.write_text(task.read_text() + "    return 1.0\n")
    printed = run(*flags, "--resume", cache=cache, code=2)
    assert "--resume: the run had other flags or contents: the task file, or a module" in printed


@pytest.mark.parametrize("files, holds", [
    (["thesis.tex"], "thesis.tex"),
    (["checkpoints", "final"], "checkpoints"),
    (["args.json", "metrics.jsonl", "rollouts", ".lock", "notes.jsonl"], None),
    (["args.json", ".lock"], None),  # a start that failed
    ([".lock"], None),
])  # fmt: skip
def test_only_a_run_is_moved_aside(files, holds, tmp_path, process_group, capsys):
    folder = tmp_path / "x"
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    args = Args(output_dir=str(folder))
    if holds:
        with pytest.raises(BadInput, match=f"{folder} holds {holds}, but no run"):
            processes.on_main(checkpoints.claim_folder, args)
        assert names(folder) == sorted(files)
        return
    processes.on_main(checkpoints.claim_folder, args)
    assert checkpoints.prepare_folder(args) == (None, {})
    is_moved = "metrics.jsonl" in files
    assert names(folder) == ([".lock"] if is_moved else sorted(files))
    assert (tmp_path / "x.1").exists() == is_moved
    if is_moved:
        assert names(tmp_path / "x.1") == sorted(files)
        assert f"moved to {tmp_path / 'x.1'}" in capsys.readouterr().out


def make_run(folder: Path, **flags):
    """The parts of a train.Run that are saved: a linear layer after an optimiser step."""
    args = Args(output_dir=str(folder), **flags)
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr or 0.1)
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    learner = types.SimpleNamespace(net=net, optimizer=optimizer)
    said = []
    return types.SimpleNamespace(
        args=args, folder=folder, learners={"policy": learner}, pool=None, done=0, saved=0,
        log=types.SimpleNamespace(said=said, say=said.append, close=lambda: None),
        kl=types.SimpleNamespace(coef=0.5), history=[], estimator_state={1: 2.5})  # fmt: skip


def save(run, *steps: int) -> None:
    for run.done in steps:
        assert checkpoints.save_checkpoint(run)


@contextlib.contextmanager
def before_each_operation(call):
    """Calls a function before each operation on a file."""
    is_on = True

    def hook(event: str, arguments: tuple) -> None:
        nonlocal is_on
        if is_on and event.startswith(("open", "os.", "shutil.")):
            is_on = False  # the call's own operations do not count
            call()
            is_on = True

    sys.addaudithook(hook)  # it stays
    yield
    is_on = False


def test_a_kill_at_any_moment_of_a_save_leaves_whole_checkpoints(tmp_path, process_group):
    """What a kill would leave is copied before each operation."""
    out = tmp_path / "run"
    run = make_run(out, keep_checkpoints=1)
    save(run, 1)
    left = []

    def copy():
        left.append(tmp_path / f"left_{len(left)}")
        shutil.copytree(out, left[-1])

    with before_each_operation(copy):
        save(run, 2)
    steps = []
    for folder in left:
        killed = make_run(folder, resume=True, keep_checkpoints=1)
        latest, state = checkpoints.prepare_folder(killed.args)
        for checkpoint in checkpoints.checkpoints(folder):
            checkpoints.load_checkpoint(killed, checkpoint, state["parts"])
        assert not list(folder.glob("checkpoints/*.1"))  # none was broken
        steps.append(state["step"])
        save(killed, 3)
        assert names(folder / "checkpoints") == ["step_000003"]
    assert steps == sorted(steps) and {*steps} == {1, 2} and len(steps) > 20


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("spoil", [
    lambda folder: (folder / "step.json").write_text(""),
    lambda folder: cut(folder / "__0_0.distcp"),
    lambda folder: cut(folder / "estimator.pkl"),
])  # fmt: skip
def test_a_checkpoint_that_is_not_whole_is_moved_aside(spoil, tmp_path, process_group, capsys):
    run = make_run(tmp_path, resume=True)
    save(run, 2, 4)
    newest = tmp_path / "checkpoints/step_000004"
    spoil(newest)
    found, state = checkpoints.prepare_folder(run.args)
    assert found == tmp_path / "checkpoints/step_000002" and state["step"] == 2
    assert state["estimator"] == {1: 2.5}
    assert f"{newest} is broken: " in capsys.readouterr().out and not newest.exists()
    checkpoints.load_checkpoint(run, found, state["parts"])


def test_a_checkpoint_that_does_not_load_is_named(tmp_path, process_group):
    run = make_run(tmp_path, resume=True)
    save(run, 2, 4)
    newest = tmp_path / "checkpoints/step_000004"
    file = newest / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    found, state = checkpoints.prepare_folder(run.args)
    with pytest.raises(BadInput, match=f"--resume: {newest} .*ove it away to resume") as error:
        checkpoints.load_checkpoint(run, found, state["parts"])
    assert "\n" not in str(error.value)


def test_a_full_disk_costs_a_checkpoint_and_says_so(tmp_path, process_group):
    run = make_run(tmp_path)
    save(run, 2)
    run.done = 4
    with full_disk():
        assert checkpoints.save_checkpoint(run) is False
    (line,) = run.log.said
    assert line.startswith("warning: save_checkpoint: ") and "\n" not in line
    assert "File too large" in line
    assert names(tmp_path / "checkpoints") == ["step_000002"] and run.saved == 2
    save(run, 6)
    assert names(tmp_path / "checkpoints") == ["step_000002", "step_000006"]


def test_only_a_run_that_saved_nothing_ends_with_an_error(tmp_path, process_group, monkeypatch):
    run = make_run(tmp_path)
    run.done = run.args.num_steps
    run.engine = None
    run.rows = {"val": []}
    run.background = types.SimpleNamespace(close=lambda: None)
    finished = threading.Event()
    run.stop = types.SimpleNamespace(wait_for_other_ranks=finished.set, requested=False)
    monkeypatch.setattr(checkpoints, "save_checkpoint", lambda run: False)
    saves = [True, False]
    monkeypatch.setattr(checkpoints, "save_policy", lambda run, folder: saves.pop(0))
    train.finish(run)
    assert finished.is_set() and "the trained policy is in" in run.log.said[0]
    with pytest.raises(BadInput, match="could be saved"):
        train.finish(run)


def test_flags_that_would_make_another_run_are_shown_and_refused(tmp_path):
    """num_steps may change at a constant rate, and the folder of the task's own model may."""
    base = dict(output_dir=str(tmp_path), model="/models/a", lr_schedule="linear")
    Log(Args(**base), None, 0)

    def changes(own_model=False, **flags) -> list[str]:
        args = Args(**base | dict(resume=True) | flags)
        return list(checkpoints.check_changes(args, {}, own_model).values())

    assert changes(eval_every=3, tp=2, tokens_per_micro_batch=999) == []
    assert changes(own_model=True, model="/models/b") == []
    assert changes(resume=False, seed=1) == []
    other = dict(model="/models/b", seed=1, num_steps=99, algo="dapo", max_gen_batches=1)
    expected = [
        "--model /models/a -> /models/b",
        "--num_steps 40 -> 99",
        "--seed 0 -> 1",
        "--algo grpo -> dapo",
        "--clip_high 0.2 -> 0.28",
        "--overlong_buffer 0.0 -> 0.2",
    ]
    with pytest.raises(BadInput) as error:
        changes(**other)
    for change in expected:
        assert change in str(error.value)
    assert sorted(changes(**other, resume="changed")) == sorted(expected)


@pytest.mark.parametrize("fault", [NothingLeft, BadReward])
def test_a_run_that_its_task_ends_is_saved_first(fault, monkeypatch):
    done = []
    monkeypatch.setattr(checkpoints, "save_checkpoint", lambda run: done.append("saved"))
    for rollout_only in (True, False):
        run = SimpleNamespace(args=Args(rollout_only=rollout_only))
        saving = checkpoints.save_if_rewards_fail(run, lambda run, keep: done.append("asleep"))
        with pytest.raises(fault), saving:
            raise fault("no rollout has a reward")
    assert done == ["asleep", "saved"]


@pytest.mark.parametrize("done, left", [(3, 0), (2, 6)])
def test_a_run_that_reached_its_reward_is_complete_when_it_is_resumed(
    done, left, tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoints, "load_checkpoint", lambda *args: None)
    rows = [{"step": 2, "eval/reward": 0.4}, {"step": 3, "eval/reward": 0.6}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = Args(num_steps=8, stop_at_reward=0.5)
    run = SimpleNamespace(args=args, folder=tmp_path, log=SilentLog())
    state = {"step": done, "history": {}, "estimator": {}, "parts": ()}
    checkpoints.resume(run, tmp_path, state, {})
    assert args.num_steps - run.done == left


def test_a_resumed_run_keeps_the_model_that_was_built_for_it(tmp_path, monkeypatch):
    """... though its task was edited, for which another is built.

    One thread builds it, so `python` finds the model of `accelerate launch`. A folder that a killed
    build has left is removed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = "import torch\ndef build_model(path):\n    n = torch.get_num_threads()\n"
    code += "    open(f'{path}/{n} threads', 'w')\n"
    (tmp_path / "task.py").write_text(code)
    task = load_task(str(tmp_path / "task.py"), ("build_model",))
    args = Args(task="task.py", output_dir=str(tmp_path / "run"))
    for name in (".building-dead", ".building-now"):
        (tmp_path / "flatrl" / name).mkdir(parents=True)
    os.utime(tmp_path / "flatrl/.building-dead", (0, 0))

    def build(edit: str) -> Path:
        (tmp_path / "task.py").write_text(code + edit)
        return Path(models.task_model(task, args))

    numbers = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    one = build("")
    assert names(one) == ["1 threads"] and numbers == [4, 1, 4]
    numbers.append(3)
    assert build("") == one
    two = build("# edited")
    assert names(tmp_path / "flatrl") == sorted([".building-now", one.name, two.name])
    args.model = str(two)
    Log(args, None, 0)
    args.resume = True
    assert build("") == two
    shutil.rmtree(two)
    assert build("") == one


def overwrite(file: Path, place: int):
    """Changes one byte."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def choices() -> np.ndarray:
    """As pandas gives them. The bytes of such an array are addresses."""
    return np.array([f"choice {i}" for i in range(3)], dtype=object)


TASK, ROWS, VAL_ROWS, MODEL, REF_MODEL, IMAGES = (
    "the task file, or a module of yours that it imports",
    "the training rows",
    "the validation rows",
    "the files of --model",
    "the files of --ref_model",
    "mm_processor_kwargs of --engine_args",
)
SMALLER = '{"mm_processor_kwargs": {"max_pixels": 3136}}'


@pytest.mark.parametrize("edit, changed", [
    (lambda folder, rows: None, []),
    (lambda folder, rows: (folder / "notes").mkdir(), []),
    (lambda folder, rows: rows["train"][0].update(words={"c", "b", "a"}), []),
    (lambda folder, rows: rows["train"][0].update(choices=choices()), []),
    (lambda folder, rows: rows["train"][1]["images"][0].putpixel((1, 1), 9), [ROWS]),
    (lambda folder, rows: rows["train"].reverse(), [ROWS]),
    (lambda folder, rows: rows["val"].pop(), [VAL_ROWS]),
    (lambda folder, rows: overwrite(folder / "task.py", -2), [TASK]),
    (lambda folder, rows: overwrite(folder / "graders_of_this_test.py", -1), [TASK]),
    (lambda folder, rows: overwrite(folder / "parts/rows.py", -1), [TASK]),
    (lambda folder, rows: overwrite(folder / "parts/texts.py", -1), [TASK]),
    (lambda folder, rows: overwrite(folder / "model/model.safetensors", 99_999), [MODEL]),
    (lambda folder, rows: (folder / "model/chat_template.jinja").write_text("{{ 1 }}"), [MODEL]),
    (lambda folder, rows: overwrite(folder / "teacher/tokenizer.json", 9), [REF_MODEL]),
    (lambda folder, rows: (folder / "engine_args").write_text('{"max_num_seqs": 9}'), []),
    (lambda folder, rows: (folder / "engine_args").write_text(SMALLER), [IMAGES]),
])  # fmt: skip
def test_what_changed_under_its_name_is_named(edit, changed, tmp_path, monkeypatch, capsys):
    """... and refused, except for validation rows."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "graders_of_this_test.py").write_text("reward = lambda output, row: 1")
    (tmp_path / "task.py").write_text("""
from graders_of_this_test import reward
def load(split):
    import data
    from parts import rows  # not before it runs
# 1""")
    (tmp_path / "data.py").write_text("not parsed: flatrl's own module has this name")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/rows.py").write_text("def load():\n    from .texts import x  # 1")
    (tmp_path / "parts/texts.py").write_text("x = 1")
    for name in "model", "teacher":
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text('{"a": "b"}')
        (tmp_path / name / "model.safetensors").write_bytes(bytes(100_000))
    image = Image.new("L", (3, 3))
    rows = {"train": [{"words": {"a", "b", "c"}, "grader": len}, {"answer": 3, "images": [image]}]}
    rows["train"][0]["choices"] = choices()
    rows["val"] = [{"at": object()}, {}]
    models = dict(model=str(tmp_path / "model"), ref_model=str(tmp_path / "teacher"))
    args = Args(output_dir=str(tmp_path), resume=True, **models)
    (tmp_path / "engine_args").write_text("{}")

    def contents():
        args.engine_args = (tmp_path / "engine_args").read_text()
        monkeypatch.delitem(sys.modules, "graders_of_this_test", raising=False)
        return contents_of(args, load_task(str(tmp_path / "task.py")), rows)

    log = Log(args, None, 0, contents())
    assert not (tmp_path / "args.json").exists()  # a start with --resume may still fail
    log.write_about()
    edit(tmp_path, rows)
    now = contents()
    if {*changed} <= {VAL_ROWS}:
        assert checkpoints.check_changes(args, now, False) == {}
        assert (capsys.readouterr().out == "") == (not changed)
        return
    before = json.loads((tmp_path / "args.json").read_text())["contents"]
    with pytest.raises(BadInput) as error:
        checkpoints.check_changes(args, now, False)
    (name,) = changed
    change = f"{name} ({before[name]} -> {now[name]})"
    assert f"--resume: the run had other flags or contents: {change}; give" in str(error.value)
    args.resume = "changed"
    assert checkpoints.check_changes(args, now, False) == {name: change}
    of_own_model = {} if name == MODEL else {name: change}
    assert checkpoints.check_changes(args, now, True) == of_own_model
    for flags in dict(lora_rank=2), dict(kl_coef=0.1, ref_model=None):
        other = dataclasses.replace(args, **flags)
        assert name in checkpoints.check_changes(other, now, True)


@pytest.mark.parametrize("history, sampler, next_prompt, changed, fits", [
    ([], None, 8, {}, True),
    ([[3, 0]], min, 8, {}, True),
    ([], min, 0, {}, True),
    ([], min, 8, {}, False),
    ([[3, 0]], None, 8, {}, False),
    ([[3, 0]], min, 8, {ROWS: "other"}, False),
    ([], None, 8, {ROWS: "other"}, True),
])  # fmt: skip
def test_a_history_of_other_rows_is_refused(history, sampler, next_prompt, changed, fits):
    state = {"history": history, "next_prompt": next_prompt}
    expected = contextlib.nullcontext() if fits else pytest.raises(BadInput, match="`sampler`")
    with expected:
        checkpoints.check_checkpoint(state, Args(), types.SimpleNamespace(sampler=sampler), changed)
    checkpoints.check_checkpoint({}, Args(), types.SimpleNamespace(sampler=sampler), {})


def test_a_changed_rate_takes_effect_under_a_saved_optimiser(tmp_path, process_group):
    run = make_run(tmp_path, lr=0.1)
    save(run, 1)
    other = make_run(tmp_path, lr=0.3)
    saved = run.learners["policy"]
    loaded = other.learners["policy"]
    with torch.no_grad():
        loaded.net.weight.zero_()
    parts = ["policy", "policy_optimizer"]
    checkpoints.load_checkpoint(other, tmp_path / "checkpoints/step_000001", parts)
    assert loaded.optimizer.param_groups[0]["lr"] == 0.3
    assert torch.equal(loaded.net.weight, saved.net.weight)
    averages = [x.optimizer.state[x.net.weight]["exp_avg"] for x in (saved, loaded)]
    assert torch.equal(*averages)


def lose_a_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def lose_an_id(folder: Path) -> None:
    file = folder / "config.json"
    about = json.loads(file.read_text())
    about["vocab_size"] -= 1
    file.write_text(json.dumps(about))


@pytest.fixture
def no_engine(process_group, monkeypatch):
    """Engines that can't be built."""

    def engine(*_):
        raise BadInput("the engine is built")

    monkeypatch.setattr(train, "Engine", engine)
    monkeypatch.setattr(train, "Stop", lambda: None)
    monkeypatch.chdir(REPO)


@pytest.mark.parametrize("flag, spoil, message", [
    ("model", lose_an_id, "its tokenizer has more tokens than its config.json has in vocab_size"),
    ("model", lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    ("model", lambda folder: (folder / "chat_template.jinja").write_text("{{ 1/0 }}"),
     "ZeroDivisionError"),
    ("model", lose_a_tensor, "missing keys ['model.layers.0.mlp.up_proj.weight"),
    ("model", lambda folder: cut(folder / "model.safetensors"), "can't be loaded for training"),
    ("model", lambda folder: (folder / "tokenizer.json").unlink(),
     "the tokenizer does not give a prompt back"),
    ("ref_model", lambda folder: (folder / "model.safetensors").unlink(),
     "spoilt can't be loaded for training"),
    ("ref_model", lambda folder: None, "the engine is built"),
])  # fmt: skip
def test_a_damaged_model_is_refused_before_the_engine_starts(
    flag, spoil, message, tiny_model, tmp_path, no_engine
):
    folder = tmp_path / "spoilt"
    shutil.copytree(tiny_model, folder)
    spoil(folder)
    flags = {"model": tiny_model, "kl_coef": 0.1, flag: str(folder)}
    with pytest.raises(BadInput) as error:
        train.setup(Args(task="tests/tiny_task.py", output_dir=str(tmp_path / "out"), **flags))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("flags, message", [
    (dict(seed=1), "the engine is built"),
    (dict(algo="ppo"), "--adv_estimator gae needs a critic, and the checkpoint has none"),
    (dict(lora_rank=2), "--lora_rank can't change"),
])  # fmt: skip
def test_a_resume_that_fails_leaves_the_flags_of_the_run(
    flags, message, tiny_model, tmp_path, no_engine
):
    base = dict(task="tests/tiny_task.py", model=tiny_model, output_dir=str(tmp_path))
    Log(Args(**base), None, 0)
    save(make_run(tmp_path), 2)
    before = (tmp_path / "args.json").read_text()
    with pytest.raises(BadInput, match=message):
        train.setup(Args(**base, resume="changed", **flags))
    assert (tmp_path / "args.json").read_text() == before


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
    assert model.config.dtype == torch.float32


def test_a_tokenizer_that_can_not_be_saved_is_refused_at_the_start(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    policy = types.SimpleNamespace(model=AutoModelForCausalLM.from_pretrained(tiny_model))
    checkpoints.try_to_save(Args(), policy, tokenizer)
    custom = tokenizers.pre_tokenizers.PreTokenizer.custom(object())
    tokenizer.backend_tokenizer.pre_tokenizer = custom
    with pytest.raises(BadInput, match="tokenizer can't be saved: .*Custom PreTokenizer cannot be"):
        checkpoints.try_to_save(Args(), policy, tokenizer)
    checkpoints.try_to_save(Args(num_steps=0), policy, tokenizer)  # nothing will be saved


def test_signals_save_and_end_and_a_deleted_folder_comes_back(cache, tmp_path):
    """Schedulers send several, some of them twice."""
    signals = [*processes.SIGNALS, signal.SIGTERM]
    out = tmp_path / "run"
    flags = [*TINY, "--num_steps", "1000", "--save_every", "0", "--eval_every", "0",
             "--output_dir", out]  # fmt: skip
    with started(*flags, cache=cache) as process:
        wait_for(lambda: lines(out / "metrics.jsonl") >= 3)
        shutil.rmtree(out / "rollouts")
        wait_for(lambda: (out / "rollouts").is_dir() and lines(out / "metrics.jsonl") >= 5)
        for signalled in signals:
            process.send_signal(signalled)
            time.sleep(0.1)
        printed = process.wait()
    done = metrics_of(out)[-1]["step"]
    assert process.returncode == 130 and printed.count("stopping") == 1
    assert names(out / "checkpoints") == [f"step_{done:06d}"]


def test_a_log_that_can_not_be_written_is_a_warning_and_loses_no_metrics(tmp_path, capsys):
    log = Log(Args(output_dir=str(tmp_path / "run")), None, 0)
    rows = [{"step": step, "note": "x" * 40} for step in range(1, 5)]
    log.metrics(rows[0])
    with full_disk(90):  # the first row and a part of the second
        log.metrics(rows[1])
        log.metrics(rows[2])
    log.metrics(rows[3])
    assert metrics_of(tmp_path / "run") == rows
    assert "File too large" in capsys.readouterr().out
