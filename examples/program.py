"""Any program in any language as the agent: a command that asks the policy over HTTP.

    accelerate launch train.py --task examples/program.py --agent program
    cd examples/programs && npm install openai@6 && cd -
    PROGRAM="node examples/programs/calculator.mjs" \\
        accelerate launch train.py --task examples/program.py --agent program

The first command runs programs/calculator.sh, an agent of curl and jq; the others run the same
agent in JavaScript.

PROGRAM is run once for each trajectory. It has words as in a shell, but no shell runs it. In its
environment are OPENAI_BASE_URL and OPENAI_API_KEY of its trajectory, where OpenAI's clients look
for them. On its standard input is the row as JSON: its columns, with "prompt", and "step",
"index", "rollout_n" and "validate". The last line that it prints is the answer, in
output.extra["answer"]. To train a program of your own on rows of your own, a task file needs

    from examples.program import *              # registers the agent, reads PROGRAM
    def load(split): ...
    def reward(output, row): return float(output.extra.get("answer") == row["extra_info"]["truth"])

or the program posts its reward itself, see flatrl/chat/endpoint.py. With an exit code other than 0 the
trajectory is lost: it is counted in rollout/failed, and the log has the end of its stderr. Not so
if tokens or turns had run out, which the program meets as status 400: that is an end like any
other. So is the time limit, --trajectory_timeout, here 600 seconds if it is not given.

A program has a process group of its own, which is killed when the program has ended, is late or
the run stops: its children die with it. If the run itself is killed, the programs get no reply any
more. They have our environment and files, because they are yours: what a model wrote belongs into
examples/sandbox.py. As many run at once as there are trajectories: see --max_concurrent."""

import asyncio
import contextlib
import copy
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from agent_loop import AgentLoopOutput, BadInput, in_thread, register
from examples import calculator
from examples.calculator import SYSTEM_PROMPT, build_model, load  # noqa: F401
from flatrl.chat.endpoint import EndpointLoop

SECONDS = 600.0  # for a program, if there is no --trajectory_timeout
MAX_OUTPUT = 64 << 20  # bytes of stdout or stderr: one that prints more is ended
MAX_READ = 1 << 16  # bytes of these that are read, at the end

AGENTS = Path(__file__).parent / "programs"
COMMAND = shlex.split(os.environ.get("PROGRAM", "")) or ["sh", str(AGENTS / "calculator.sh")]
if not shutil.which(COMMAND[0]):
    raise BadInput(f"PROGRAM starts with {COMMAND[0]!r}, which is no program that can be run")


async def run_program(command: list[str], text: str, variables: dict[str, str]) -> str:
    """Runs a command with `text` on its stdin; returns the last line that it printed, or "".

    variables are added to its environment. Whatever is in its process group is killed at the end,
    also if this is cancelled. Raises OSError if it can't be started, RuntimeError if its exit code
    is not 0 or it printed more than MAX_OUTPUT."""
    # These are files and no pipes, so that a command ends even if it never reads its input, or if
    # a child of it keeps the output open.
    with (
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        stdin.write(text.encode())
        stdin.seek(0)
        env = os.environ | variables
        files = {"stdin": stdin, "stdout": out, "stderr": err}
        # In threads: on a busy machine a fork takes so long that it would hold up all other
        # trajectories.
        starting = asyncio.ensure_future(
            in_thread(subprocess.Popen, command, **files, env=env, start_new_session=True)
        )
        try:
            process = await asyncio.shield(starting)
            ending = asyncio.ensure_future(in_thread(process.wait))
            while not ending.done():
                await asyncio.wait({ending}, timeout=1.0)
                if any(os.fstat(file.fileno()).st_size > MAX_OUTPUT for file in (out, err)):
                    raise RuntimeError(
                        f"{shlex.join(command)} printed more than {MAX_OUTPUT} bytes"
                    )
        finally:
            process = await starting  # also if we were cancelled meanwhile
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await in_thread(process.wait)
        if process.returncode:
            problem = f"{shlex.join(command)} ended with code {process.returncode}"
            raise RuntimeError(f"{problem}: {_end(err)[-2000:].strip()}")
        lines = _end(out).strip().splitlines()
        return lines[-1].strip() if lines else ""


def _end(file) -> str:
    """Returns the end of a file as text."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_READ))
    return file.read().decode(errors="replace")


@register("program")
class ProgramLoop(EndpointLoop):
    """One run of the command; the reward is the task's, which finds the answer in output.extra."""

    async def run(self, sampling_params: dict, **row) -> list[AgentLoopOutput]:
        """Runs one trajectory; the program's answer is in extra["answer"] of its last output."""
        self.answer = None
        self.args = copy.copy(self.args)
        self.args.trajectory_timeout = self.args.trajectory_timeout or SECONDS
        outputs = await super().run(sampling_params, **row)
        for output in outputs[-1:]:  # the output that the reward belongs to
            output.extra["answer"] = self.answer
        return outputs

    async def agent(self, base_url: str, api_key: str, row: dict) -> None:
        variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        self.answer = await run_program(COMMAND, json.dumps(row, default=str), variables)


def reward(output: AgentLoopOutput, row: dict) -> float:
    """Returns the calculator's reward for the program's answer: 1.0 for the right <answer>N</answer>."""
    messages = [{"role": "assistant", "content": output.extra.get("answer")}]
    return calculator.reward(replace(output, messages=messages), row)
