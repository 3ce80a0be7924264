"""Any program in any language as the agent: a command that asks the policy over HTTP.

    accelerate launch train.py --task examples/program.py --agent program
    PROGRAM="node agent.mjs" accelerate launch train.py --task examples/program.py --agent program

The first command runs programs/calculator.sh, an agent made of curl and jq, the second an agent of
yours.

PROGRAM is run once for each trajectory. It is split into words as in a shell, but no shell runs it.
It finds OPENAI_BASE_URL and OPENAI_API_KEY for its trajectory in its environment, as OpenAI's
clients expect. Its standard input is the row as JSON: the columns, with "prompt", and "step",
"index", "rollout_n" and "validate". The last line that it prints is the answer, in
output.extra["answer"]. To train your own program on your own rows, a task file needs

    from examples.program import *              # registers the agent, reads PROGRAM
    def load(split): ...
    def reward(output, row): return float(output.extra.get("answer") == row["extra_info"]["truth"])

or the program posts its reward itself, see flatrl/chat/endpoint.py. An exit code other than 0 drops
the trajectory: it is counted in rollout/failed, and the end of its stderr is logged. If tokens or
turns ran out, which the program sees as status 400, the trajectory is kept. The same holds for the
time limit, trajectory_timeout, here 600 seconds by default.

A program has a process group of its own, which is killed when the program has ended, is late or the
run stops. If the run itself is killed, the programs get no more replies. They have our environment
and files, because they are yours: run a model's code in examples/sandbox.py."""

import asyncio
import contextlib
import copy
import json
import os
import shlex
import shutil
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

from agent_loop import AgentLoopOutput, BadInput, register
from examples import calculator
from examples.calculator import SYSTEM_PROMPT, build_model, load  # noqa: F401
from flatrl.chat.endpoint import EndpointLoop

SECONDS = 600.0  # for a program, unless trajectory_timeout is set

AGENTS = Path(__file__).parent / "programs"
COMMAND = shlex.split(os.environ.get("PROGRAM", "")) or ["sh", str(AGENTS / "calculator.sh")]
if not shutil.which(COMMAND[0]):
    raise BadInput(f"PROGRAM starts with {COMMAND[0]!r}, which is no program that can be run")


async def run_program(command: list[str], text: str, variables: dict[str, str]) -> str:
    """Runs a command with `text` on its stdin; returns the last line that it printed, or "".

    variables are added to its environment. Its process group is killed at the end, also if this is
    cancelled. Raises RuntimeError if its exit code is not 0."""
    # Files instead of pipes: a command then ends even if it never reads its input, or if a child
    # keeps its output open.
    with contextlib.ExitStack() as stack:
        stdin, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        stdin.write(text.encode())
        stdin.seek(0)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=stdin,
            stdout=out,
            stderr=err,
            env=os.environ | variables,
            start_new_session=True,
        )
        try:
            await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            problem = f"{shlex.join(command)} ended with code {process.returncode}"
            raise RuntimeError(f"{problem}: {_end(err)[-2000:].strip()}")
        lines = _end(out).strip().splitlines()
        return lines[-1].strip() if lines else ""


def _end(file) -> str:
    """Returns the last 64 KB of a file as text."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
    return file.read().decode(errors="replace")


@register("program")
class ProgramLoop(EndpointLoop):
    """One run of the command; the task's reward finds the answer in output.extra."""

    async def run(self, sampling_params: dict, **row) -> list[AgentLoopOutput]:
        """Runs one trajectory; its last output, which is rewarded, has extra["answer"]."""
        self.answer = None
        self.args = copy.copy(self.args)
        self.args.trajectory_timeout = self.args.trajectory_timeout or SECONDS
        outputs = await super().run(sampling_params, **row)
        for output in outputs[-1:]:
            output.extra["answer"] = self.answer
        return outputs

    async def agent(self, base_url: str, api_key: str, row: dict) -> None:
        variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        self.answer = await run_program(COMMAND, json.dumps(row, default=str), variables)


def reward(output: AgentLoopOutput, row: dict) -> float:
    """Returns the calculator's reward for the program's answer."""
    messages = [{"role": "assistant", "content": output.extra.get("answer")}]
    return calculator.reward(replace(output, messages=messages), row)
