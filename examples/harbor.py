r"""Harbor tasks: an instruction, a container to work in, and a test that writes the reward.

    export HARBOR_TASKS=path/to/tasks      # holds folders of tasks; every eighth is held out
    accelerate launch train.py --task examples/harbor.py --model Qwen/Qwen2.5-0.5B-Instruct \
        --max_prompt_tokens 2048 --max_response_tokens 8192 --max_assistant_turns 0 \
        --agent_args '{"tool_timeout": 120}'

    task.toml        the image, its resources, limits of time
    instruction.md   the prompt
    environment/     a Dockerfile, unless task.toml names an image
    tests/test.sh    writes /logs/verifier/reward.json or reward.txt

The format is https://www.harborframework.com/docs/tasks. Each rollout has a container of its own,
in which the policy runs commands by the tool `bash`. Then tests/ is copied to /tests, and test.sh
runs. A rollout without a reward file is dropped, and counted as failed_agent_loop.

A task that needs more than this, such as steps, several containers or MCP servers, is refused. The
agent's timeout_sec is not used, because a rollout also waits while the policy trains.
trajectory_timeout of --agent_args begins when the container runs, and does not limit the tests. A
rank has at most 16 containers, but with --deterministic one for each of its rollouts. docker has to
be on the PATH; its containers were simulated in our tests, so try a small task first."""

import asyncio
import contextlib
import hashlib
import json
import os
import tomllib
import uuid
from pathlib import Path
from string import Template

from agent_loop import DEADLINE, BadInput, Tool, ToolAgentLoop, register
from examples.calculator import build_model  # noqa: F401  (train.py calls it without a --model)

TASKS = Path(os.environ.get("HARBOR_TASKS", ""))
if "HARBOR_TASKS" not in os.environ:
    raise BadInput("set HARBOR_TASKS to a folder that holds Harbor tasks")

CONTAINERS = asyncio.Semaphore(16)  # of this rank at one time
OUTPUT_BYTES = 100_000  # kept of what a command prints; a tool's answer is shorter still
SYSTEM_PROMPT = (
    "Do the task in a Linux container, by the tool bash. When it is done, answer without a call."
)
UNSUPPORTED = """
    steps environment.gpus environment.tpu environment.mcp_servers environment.skills_dir
    environment.healthcheck agent.user agent.network_mode verifier.user verifier.network_mode
    verifier.environment verifier.collect verifier.environment_mode=separate
    environment.os=windows environment.network_mode=allowlist"""


def read_config(folder: Path) -> dict:
    """Returns a task's task.toml; environment and verifier have docker's `flags` for their env.

    Raises BadInput for what this adapter does not support."""
    config = tomllib.loads((folder / "task.toml").read_text())
    for entry in UNSUPPORTED.split():
        name, _, only = entry.partition("=")
        value = config
        for key in name.split("."):
            value = value.get(key) or {}
        if value == only or (value and not only):
            raise BadInput(f"{folder}/task.toml: {entry} is not supported")
    for file in ("environment/docker-compose.yaml", "trajectory.json"):
        if (folder / file).exists():
            raise BadInput(f"{folder}: {file} is not supported")
    for section in ("environment", "verifier"):
        settings = config.setdefault(section, {})
        try:
            env = {
                name: Template(value).substitute(os.environ)
                for name, value in settings.get("env", {}).items()
            }
        except (KeyError, ValueError) as error:
            raise BadInput(f"{folder}/task.toml: {section}.env: no variable {error}") from None
        settings["flags"] = [f"--env={name}={value}" for name, value in env.items()]
    return config


def load(split: str) -> list[dict]:
    """Returns a row for each task: every eighth for "val", the others for "train"."""
    folders = sorted(file.parent.resolve() for file in TASKS.rglob("task.toml"))
    if not folders:
        raise BadInput(f"HARBOR_TASKS: no task.toml below {TASKS}")
    rows = []
    for folder in folders:
        read_config(folder)
        prompt = [{"role": "user", "content": (folder / "instruction.md").read_text()}]
        row = {"prompt": prompt, "agent_name": "harbor", "extra_info": {"folder": str(folder)}}
        rows.append(row)
    if split == "val":
        return rows[::8]
    return [row for i, row in enumerate(rows) if i % 8] or rows


async def docker(*words: str, seconds: float = 60.0) -> tuple[int, str]:
    """Runs docker. Returns its exit code, and what it printed. Raises TimeoutError."""
    process = await asyncio.create_subprocess_exec(
        "docker",
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while chunk := await process.stdout.read(2**16):
                printed += chunk[: OUTPUT_BYTES - len(printed)]
            code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return code, printed.decode(errors="replace")


class Container:
    """The container of one rollout of the task in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = read_config(folder)
        self.name = f"flatrl-{uuid.uuid4().hex}"

    async def docker(self, *words, **how):
        """Runs docker. Raises RuntimeError if that fails."""
        code, printed = await docker(*words, **how)
        if code:
            raise RuntimeError(f"docker {words[0]}: {printed.strip()[-1000:]}")

    async def start(self):
        """Builds the image unless it is there, and starts the container."""
        settings = self.config["environment"]
        image = settings.get("docker_image")
        if not image:
            image = "flatrl-" + hashlib.sha256(str(self.folder).encode()).hexdigest()[:16]
            context = str(self.folder / "environment")
            seconds = settings.get("build_timeout_sec", 600.0)
            await self.docker("build", "--tag", image, context, seconds=seconds)
        flags = [*settings["flags"]]
        if settings.get("network_mode") == "no-network" or settings.get("allow_internet") is False:
            flags.append("--network=none")
        if settings.get("cpus"):
            flags.append(f"--cpus={settings['cpus']}")
        if settings.get("memory_mb"):
            flags.append(f"--memory={settings['memory_mb']}m")
        if settings.get("workdir"):
            flags.append(f"--workdir={settings['workdir']}")
        start = ["run", "--detach", "--init", "--name", self.name, *flags, image]
        await self.docker(*start, "sh", "-c", "sleep infinity", seconds=600.0)

    async def run(self, command: str, seconds: float, flags=()) -> tuple[int, str]:
        """Runs a shell command in the container; it is killed after `seconds`."""
        words = ["timeout", "-k", "5", f"{seconds:g}", "sh", "-c", command]
        return await docker("exec", *flags, self.name, *words, seconds=seconds + 10)

    async def verify(self) -> dict[str, float]:
        """Runs the task's tests. Returns the rewards that they wrote, by name."""
        settings = self.config["verifier"]
        seconds = settings.get("timeout_sec", 600.0)
        # The agent may have written a reward of its own.
        await self.run("rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier", 60)
        await self.docker("cp", f"{self.folder}/tests/.", f"{self.name}:/tests")
        log = "/logs/verifier/test-stdout.txt"
        test = f"chmod +x /tests/test.sh && /tests/test.sh > {log} 2>&1"
        await self.run(test, seconds, settings["flags"])
        command = "cd /logs/verifier && (cat reward.json 2> /dev/null || cat reward.txt)"
        code, text = await self.run(command, 60)
        if code:
            raise FileNotFoundError("tests/test.sh wrote neither reward.json nor reward.txt")
        rewards = json.loads(text)
        return rewards if isinstance(rewards, dict) else {"reward": rewards}

    async def stop(self):
        """Removes the container, if there is one."""
        await docker("rm", "--force", self.name)


class Bash(Tool):
    """Runs commands in the rollout's container."""

    name = "bash"
    schema = {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a shell command in the container.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }

    async def execute(self, request_id, arguments, container: Container, seconds: float) -> str:
        """Returns what the command prints, and its exit code if that is not 0."""
        code, printed = await container.run(arguments["command"], seconds)
        if code:
            printed += f"\n(exit code {code})"
        return printed.strip() or "(nothing printed)"


TOOLS = [Bash()]


@register("harbor")
class HarborLoop(ToolAgentLoop):
    """A tool_agent with a container, in which the task's tests run at the end."""

    async def run(self, sampling_params, **row):
        """Returns the tool_agent's outputs; `extra` of the last holds the rewards."""
        if deadline := DEADLINE.get(None):  # a queue, a build and tests do not count
            deadline.reschedule(None)
        container = Container(Path(row["extra_info"]["folder"]))
        kwargs = {"container": container, "seconds": self.args.tool_timeout}
        row["tools_kwargs"] = {"bash": {"execute_kwargs": kwargs}}
        # With --deterministic the engine waits for all rollouts, so none can wait for another.
        async with contextlib.nullcontext() if self.args.deterministic else CONTAINERS:
            try:
                await container.start()
                outputs = await super().run(sampling_params, **row)
                last = outputs[-1] if isinstance(outputs, list) else outputs
                last.extra["rewards"] = await container.verify()
            finally:
                await container.stop()
        return outputs


def reward(output, row: dict) -> dict:
    """Returns the rewards of the task's tests, with "reward", or the only one, as the score."""
    rewards = output.extra["rewards"]
    if "reward" not in rewards and len(rewards) > 1:
        raise ValueError(f"none of the rewards is named 'reward': {sorted(rewards)}")
    score = rewards["reward"] if "reward" in rewards else [*rewards.values()][0]
    return rewards | {"score": score}
