"""docs/tutorial.md: its task files train, one in the folder of a paper's release."""

import json
import re
import shlex
import shutil

import torch
from conftest import REPO, SMALL_CACHE, metrics_of, run

import losses
from flatrl import report

PAGE = (REPO / "docs/tutorial.md").read_text()
COMMANDS = re.findall(r"^    accelerate launch (.*)$", PAGE.replace("\\\n", ""), re.MULTILINE)
LIFT, ORDERS, MEDIAN = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ENGINE = {"enable_sleep_mode": False} | json.loads(SMALL_CACHE)  # it keeps its memory
FEWER = ["--num_steps", "1", "--prompts_per_step", "2", "--group_size", "2", "--save_every", "0",
         "--engine_args", json.dumps(ENGINE)]  # fmt: skip
# What a release needs, and the examples that the task imports.
RELEASED = ("train.py", "rollout.py", "agent_loop.py", "data.py", "losses.py",
            "examples/environments.py", "examples/tiny_models.py")  # fmt: skip
# What a release may leave out of flatrl/.
LEFT_OUT = ("report.py", "page.html", "notices.py", "watch.py", "trackers.py", "chat")


def command_of(task: str) -> list[str]:
    """The flags with which the tutorial trains a task, and those of a shorter run."""
    [command] = [each for each in COMMANDS if f"--task {task}.py" in each]
    return [*shlex.split(command)[1:], *FEWER]


def check(folder) -> dict:
    """Checks a run of one step; returns its metrics."""
    first, last = metrics_of(folder)
    assert (first["step"], last["step"]) == (0, 1) and last["actor/grad_norm"] > 0
    assert (folder / "final/model.safetensors").is_file()
    return last


def test_an_environment_trains_in_the_folder_of_a_release(tmp_path, monkeypatch):
    """Without git."""
    (tmp_path / "examples").mkdir()
    for name in RELEASED:
        shutil.copy(REPO / name, tmp_path / name)
    without = shutil.ignore_patterns("__pycache__", *LEFT_OUT)
    shutil.copytree(REPO / "flatrl", tmp_path / "flatrl", ignore=without)
    lift = LIFT.replace("3200", "64").replace('("lift", split)', '("lift", split)[:4]')
    (tmp_path / "lift.py").write_text(lift)
    here = {"cwd": tmp_path, "XDG_CACHE_HOME": tmp_path}
    printed = run(*command_of("lift"), by="accelerate", **here)
    assert "\nbuilding the model: done in " in printed
    assert check(tmp_path / "runs/lift")["num_turns/mean"] > 2  # the environment spoke
    monkeypatch.chdir(tmp_path)
    report.main(["runs/lift", "runs/lift"])
    assert (tmp_path / "report.html").stat().st_size > 50_000


def test_a_tool_trains(train_here, tmp_path, monkeypatch):
    orders = ORDERS.replace("9600", "64").replace("1000", "8").replace("100", "4")
    (tmp_path / "orders.py").write_text(orders)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    train_here(*command_of("orders"), by=None)
    assert check(tmp_path / "runs/orders")["reward/demonstrations"] == 1  # the tool answered


def test_the_estimator_of_the_tutorial(registries):
    exec(MEDIAN.replace("from lift import *", ""), {})
    rewards = torch.tensor([0.0, 0.5, 1.0, 3.0])
    estimate = losses.ESTIMATORS["above_median"]
    assert estimate(rewards, torch.tensor([0, 0, 0, 1])).tolist() == [0, 0, 0.5, 0]
