"""docs/tutorial.md: its task files train in a folder that has nothing but a paper's release."""

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
FEWER = ["--num_steps", "1", "--prompts_per_step", "2", "--group_size", "2", "--save_every", "0",
         "--engine_args", SMALL_CACHE]  # fmt: skip
# What a release needs, and the examples that the two tasks import.
RELEASED = ("train.py", "rollout.py", "agent_loop.py", "data.py", "losses.py",
            "examples/environments.py", "examples/tiny_models.py")  # fmt: skip
# What a release may leave out of flatrl/.
LEFT_OUT = ("report.py", "page.html", "notices.py", "watch.py", "trackers.py", "chat")


def test_the_tasks_of_the_tutorial_train(tmp_path, monkeypatch):
    """With fewer rows and steps, and no git."""
    (tmp_path / "examples").mkdir()
    for name in RELEASED:
        shutil.copy(REPO / name, tmp_path / name)
    without = shutil.ignore_patterns("__pycache__", *LEFT_OUT)
    shutil.copytree(REPO / "flatrl", tmp_path / "flatrl", ignore=without)
    lift = LIFT.replace("3200", "64").replace('("lift", split)', '("lift", split)[:4]')
    (tmp_path / "lift.py").write_text(lift)
    orders = ORDERS.replace("9600", "64").replace("1000", "8").replace("100", "4")
    (tmp_path / "orders.py").write_text(orders)
    monkeypatch.chdir(tmp_path)
    for task in ("lift", "orders"):
        [command] = [each for each in COMMANDS if f"--task {task}.py" in each]
        printed = run(*shlex.split(command)[1:], *FEWER, cwd=tmp_path, XDG_CACHE_HOME=tmp_path)
        assert "\nbuilding the model: done in " in printed
        first, last = metrics_of(tmp_path / "runs" / task)
        assert (first["step"], last["step"]) == (0, 1) and last["actor/grad_norm"] > 0
        assert (tmp_path / "runs" / task / "final/model.safetensors").is_file()
        if task == "lift":
            assert last["num_turns/mean"] > 2  # the environment spoke
        else:
            assert last["reward/demonstrations"] == 1  # the tool answered
    report.main(["runs/lift", "runs/orders"])
    assert (tmp_path / "report.html").stat().st_size > 50_000


def test_the_estimator_of_the_tutorial(registries):
    exec(MEDIAN.replace("from lift import *", ""), {})
    rewards = torch.tensor([0.0, 0.5, 1.0, 3.0])
    estimate = losses.ESTIMATORS["above_median"]
    assert estimate(rewards, torch.tensor([0, 0, 0, 1])).tolist() == [0, 0, 0.5, 0]
