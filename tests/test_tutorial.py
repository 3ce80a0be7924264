"""docs/tutorial.md: its task file and its commands, with fewer rows and steps."""

import json
import re
import shlex
import shutil

from conftest import REPO, SMALL_CACHE, metrics_of, run

from examples import calculator
from flatrl import report

PAGE = (REPO / "docs/tutorial.md").read_text()
TEXT = re.sub(r" *\\\n\s*", " ", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))
COMMANDS = re.findall(r"^    (.*)$", TEXT, re.MULTILINE)
TASK, TOOL, ESTIMATOR = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FEWER = ["--num_steps", "1", "--prompts_per_step", "2", "--group_size", "2", "--save_every", "0",
         "--engine_args", SMALL_CACHE]  # fmt: skip
# What a release needs, and the examples that the default task and the tutorial's import.
RELEASED = ("train.py", "rollout.py", "agent_loop.py", "data.py", "losses.py", "flatrl",
            "examples/calculator.py", "examples/environments.py",
            "examples/tiny_models.py")  # fmt: skip


def test_every_command_of_the_tutorial_runs(tmp_path, cache, tiny_model, monkeypatch):
    """In a folder that has nothing but a release, and no git.

    The packages are there already, and the default task's model is the suite's."""
    (tmp_path / "examples").mkdir()
    for name in RELEASED:
        copy = shutil.copytree if (REPO / name).is_dir() else shutil.copy
        copy(REPO / name, tmp_path / name)
    few = TASK.replace("3200", "64").replace(
        'episodes("lift", split)', 'episodes("lift", split)[:4]'
    )
    assert few.count("64") == 1 and few.count("[:4]") == 1
    (tmp_path / "lift.py").write_text(few)
    (tmp_path / "above_median.py").write_text(ESTIMATOR)
    (tmp_path / "orders.py").write_text(
        TOOL.replace("9600", "64").replace("1000", "8").replace("100", "4")
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, calculator.load("val")[:2])))
    default = ["--model", tiny_model, "--train_files", rows, "--val_files", rows]
    default += ["--max_response_tokens", "8"]
    monkeypatch.chdir(tmp_path)
    printed = []
    for command in COMMANDS:
        words = shlex.split(command)
        if words[0] == "source":
            assert command == "source install.sh"
        elif words[:3] == ["accelerate", "launch", "train.py"]:
            more = FEWER if "--task" in words else FEWER + default
            here = dict(script=str(tmp_path / "train.py"), TESTS_START_IN=tmp_path)
            printed.append(run(*words[3:], *more, cache=cache, **here))
        else:
            assert words[:3] == ["python", "-m", "flatrl.report"], command
            report.main(words[3:])
    # The estimator's file shares the model of lift.py.
    assert ["\nbuilding the model: done in " in output for output in printed] == [0, 1, 1, 0]
    args = json.loads((tmp_path / "runs/above_median/args.json").read_text())["args"]
    assert args["adv_estimator"] == "above_median"
    for name in ("calculator", "lift", "above_median"):
        first, last = metrics_of(tmp_path / "runs" / name)
        assert (first["step"], last["step"]) == (0, 1) and last["rollout/trajectories"] == 4
    assert last["num_turns/mean"] > 2  # the environment spoke
    _, demonstrated = metrics_of(tmp_path / "runs/orders")
    assert demonstrated["reward/demonstrations"] == 1  # the tool answered
    assert (tmp_path / "report.html").stat().st_size > 50_000
