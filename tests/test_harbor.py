"""examples/harbor.py: a task in Harbor's format, with a folder in place of its container."""

import asyncio
import shutil

import pytest
from conftest import HANGS, REPO, time_passes
from test_agent_loop import call
from test_example_outputs import play

import data
from agent_loop import BadInput, total_reward

CONFIG = """
version = "1.0"
[verifier]
env = {WANTED = "${HARBOR_WANTED}"}
[environment]
cpus = 2
memory_mb = 512
allow_internet = false
"""
TEST = '#!/bin/sh\n[ "$(cat /app/said)" = "$WANTED" ] && echo 1 > /logs/verifier/reward.txt'
PARTS = """#!/bin/sh
echo 0 > /logs/verifier/reward.txt
echo '{"reward": 0.5, "speed": 2}' > /logs/verifier/reward.json"""


def write_task(folder, config=CONFIG, test=TEST):
    for name in ("environment", "tests"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "task.toml").write_text(config)
    (folder / "instruction.md").write_text("Write hello to /app/said.")
    (folder / "tests/test.sh").write_text(test)


@pytest.fixture
def harbor(tmp_path, monkeypatch):
    """The task file, whose docker is a stub: /app, /tests and /logs are in a folder."""
    write_task(tmp_path / "tasks/hello")
    monkeypatch.setenv("HARBOR_TASKS", str(tmp_path / "tasks"))
    monkeypatch.setenv("HARBOR_WANTED", "hello")
    task = data.load_task(str(REPO / "examples/harbor.py"))
    root = tmp_path / "root"
    task.asked = []

    def inside(text: str) -> str:
        for name in ("app", "tests", "logs"):
            text = text.replace(f"/{name}", f"{root}/{name}")
        return text

    async def docker(verb, *words, seconds=60.0):
        task.asked.append([verb, *words])
        if verb == "build":
            time_passes(2 * HANGS)  # which does not count
        elif verb == "run":
            assert task.CONTAINERS is None or task.CONTAINERS.locked()
            (root / "app").mkdir(parents=True)
        elif verb == "cp":
            source = words[0].removesuffix("/.")
            shutil.copytree(source, root / "tests", dirs_exist_ok=True)
            test = root / "tests/test.sh"
            test.write_text(inside(test.read_text()))
        elif verb == "rm":
            shutil.rmtree(root)
        elif verb == "exec":
            flags = [word.removeprefix("--env=") for word in words if word.startswith("--env=")]
            words = words[len(flags) + 1 :]  # without the container's name
            process = await asyncio.create_subprocess_exec(
                "env", *flags, *map(inside, words), stdout=-1, stderr=-2
            )
            printed, _ = await process.communicate()
            return process.returncode, printed.decode()
        return 0, ""

    task.real_docker = task.docker
    task.docker = docker
    task.CONTAINERS = asyncio.Semaphore(1)
    return task


@pytest.mark.parametrize("test, rewards", [
    (TEST, {"reward": 1.0}),
    (PARTS, {"reward": 0.5, "speed": 2}),
])  # fmt: skip
def test_a_rollout_in_a_container(harbor, tmp_path, tokenizer, test, rewards):
    write_task(tmp_path / "tasks/hello", test=test)
    (row,) = data.load_rows(harbor, "train")
    # What a policy could leave behind to be paid for does not count.
    cheat = "mkdir -p /logs/verifier; echo 9 > /logs/verifier/reward.json; cat /app/said; false"
    lines = [call("bash", command="echo hello > /app/said"), call("bash", command=cheat), "Done."]
    (output,) = play(harbor, tokenizer, row, *lines, max_response_tokens=2000)
    answers = [message["content"] for message in output.messages if message["role"] == "tool"]
    assert answers == ["(nothing printed)", "hello\n\n(exit code 1)"]
    assert output.extra["rewards"] == rewards and total_reward(output) == rewards["reward"]

    build, start, *_, stop = harbor.asked
    assert build[0] == "build" and build[-1] == str(tmp_path / "tasks/hello/environment")
    name = start[start.index("--name") + 1]
    flags = ["--network=none", "--cpus=2", "--memory=512m", build[2], "sh"]
    assert [word for word in start if word in flags] == flags
    assert stop == ["rm", "--force", name]


def test_dockers_output_is_cut_and_its_time_is_limited(harbor, tmp_path, monkeypatch):
    program = tmp_path / "docker"
    program.write_text('#!/bin/sh\nexec "$@"')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(harbor, "OUTPUT_BYTES", 5)
    printed = asyncio.run(harbor.real_docker("sh", "-c", "echo a long line; exit 3"))
    assert printed == (3, "a lon")
    with pytest.raises(TimeoutError):
        asyncio.run(harbor.real_docker("sleep", "600", seconds=0.1))


def test_without_a_reward_the_rollout_fails_and_the_container_goes(harbor, tokenizer):
    (row,) = data.load_rows(harbor, "train")
    lines = [call("bash", command="echo bye > /app/said"), "Done."]
    harbor.CONTAINERS = None  # with --deterministic nothing is waited for
    with pytest.raises(FileNotFoundError, match="neither reward.json nor reward.txt"):
        play(harbor, tokenizer, row, *lines, deterministic=True)
    assert harbor.asked[-1][0] == "rm"


@pytest.mark.parametrize("config, said", [
    ("[environment]\nnetwork_mode = 'allowlist'", "network_mode=allowlist"),
    ("[[steps]]\nname = 'one'", "steps"),
    ("[verifier.env]\nKEY = '${HARBOR_MISSING}'", "no variable 'HARBOR_MISSING'"),
])  # fmt: skip
def test_what_is_not_supported_is_refused_before_the_run(harbor, tmp_path, config, said):
    write_task(tmp_path / "tasks/other", config=config)
    with pytest.raises(BadInput, match=said):
        harbor.load("train")


def test_every_eighth_task_is_held_out(harbor, tmp_path):
    for i in range(8):
        write_task(tmp_path / f"tasks/more/{i}")
    rows = [row["extra_info"]["folder"] for row in data.load_rows(harbor, "val")]
    assert [folder.split("/")[-1] for folder in rows] == ["hello", "7"]
    assert len(data.load_rows(harbor, "train")) == 7
