"""A subprocess with limits for model-written Python; examples/retool.py makes a tool of it.

    result = await run_python("print(2 ** 10)")     # Result(stdout="1024\\n", stderr="", ...)

Programs run inside bubblewrap (Linux only). They see Python and the system's libraries, read-only,
and a folder in memory that disappears with them. They have no network and see no other processes;
their children end with the call. A trainer that runs as root gives each another user id.

SANDBOX_UNISOLATED=1 in the environment runs programs without bubblewrap. They may then do whatever
your user can, and leave processes behind by starting a session.

What isolation does not stop: the kernel is shared, and no system calls are filtered. Memory is
limited for each process, not for all of them together. Run hostile code in a VM."""

import asyncio
import contextlib
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from agent_loop import DEADLINE, BadInput

# Programs at a time. With more, they would miss their deadlines by waiting for each other.
SLOTS = asyncio.Semaphore(4 * (os.cpu_count() or 1))
MAX_OUTPUT = 10_000  # bytes kept of stdout, and of stderr
MAX_PROCESSES = 32  # of a program, threads too; without isolation those of the user count
FILE_MB = 16  # for the largest file; an isolated program's folder holds four times as much
HOME = "/sandbox"  # that folder
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    # Each thread takes 30 MB of addresses, and its own arena 64 MB.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}


@dataclass
class Result:
    """How a program ended. Long outputs lack their middle."""

    stdout: str
    stderr: str
    timed_out: bool
    returncode: int  # 128 + N if signal N ended it


def bubblewrap(program: str) -> list[str]:
    """Returns the beginning of the command that runs a program, the file main.py, isolated."""
    command = ["bwrap", "--die-with-parent", "--proc", "/proc", "--dev", "/dev"]
    for folder in ("/tmp", HOME):  # first, because Python may be in a folder of /tmp
        command += ["--perms", "0777", "--size", str(4 * FILE_MB << 20), "--tmpfs", folder]
    for path in (*SYSTEM, sys.prefix, sys.base_prefix):
        for parent in reversed(Path(path).parents[:-1]):
            command += ["--dir", str(parent)]  # bubblewrap alone would close them to other users
        command += ["--ro-bind-try", path, path]
    command += ["--ro-bind", program, f"{HOME}/main.py"]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", HOME]
    if os.geteuid() != 0:
        return [*command, "--unshare-all"]
    # The kernel counts processes by user, and does not limit root's.
    user = str(random.SystemRandom().randrange(1 << 30, 1 << 31))
    command += [f"--unshare-{namespace}" for namespace in ("ipc", "pid", "net", "uts")]
    command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [*command, "setpriv", "--reuid", user, "--regid", user, "--clear-groups"]


def is_isolated() -> bool:
    return os.environ.get("SANDBOX_UNISOLATED") != "1"


def require_isolation():
    """Raises BadInput if programs should be isolated and can't be. Task files call it on import."""
    problem = None
    if is_isolated() and not shutil.which("bwrap"):
        problem = "bubblewrap is missing (apt-get install bubblewrap)"
    elif is_isolated():
        trial = [*bubblewrap(os.devnull), "true"]
        problem = subprocess.run(trial, capture_output=True, text=True).stderr.strip()
    if problem:
        advice = "SANDBOX_UNISOLATED=1 in the environment runs them with your user's rights"
        raise BadInput(f"programs can't be isolated: {problem}; {advice}")


@contextlib.asynccontextmanager
async def slot():
    """Waits for one of the SLOTS and holds it. A tool's deadline is paused while it waits."""
    loop = asyncio.get_running_loop()
    deadline = DEADLINE.get(None)
    seconds_left = None
    if deadline and deadline.when():
        seconds_left = deadline.when() - loop.time()
        deadline.reschedule(None)
    async with SLOTS:
        if seconds_left is not None:
            deadline.reschedule(loop.time() + seconds_left)
        yield


async def run_python(code: str, timeout: float = 5.0, memory_mb: int = 256) -> Result:
    """Runs a Python program in a fresh folder that is its home; returns how it ended.

    It has no stdin and nothing of our environment. After `timeout` seconds, its start included, it
    is killed. memory_mb limits the addresses of each process, and stdout and stderr are files, with
    at most FILE_MB. Raises OSError if no process can be started."""
    limits = [f"--as={memory_mb << 20}", f"--cpu={math.ceil(timeout)}"]
    limits += [f"--nproc={MAX_PROCESSES}", f"--fsize={FILE_MB << 20}"]
    command = ["prlimit", *limits, sys.executable, "-I", "main.py"]
    async with slot():
        with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder:
            program = Path(folder, "main.py")
            program.write_text(code, encoding="utf-8")
            program.chmod(0o644)
            if is_isolated():
                return await _run([*bubblewrap(str(program)), *command], folder, HOME, timeout)
            command = ["setpriv", "--pdeathsig", "KILL", *command]
            return await _run(command, folder, folder, timeout)


async def _run(command: list[str], folder: str, home: str, timeout: float) -> Result:
    """Runs a command until it ends or its time is over, and kills its process group."""
    environment = ENVIRONMENT | {"HOME": home, "TMPDIR": home}
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        files = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
        process = await asyncio.create_subprocess_exec(
            *command, **files, cwd=folder, env=environment, start_new_session=True)
        timed_out = False
        try:
            async with asyncio.timeout(timeout):
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:  # even if we are cancelled
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = await process.wait()
        # The folder's name is random, and must not change a trajectory.
        texts = [_text(file).replace(folder, HOME) for file in (stdout, stderr)]
    return Result(*texts, timed_out, code if code >= 0 else 128 - code)


def _text(file) -> str:
    """Returns the text of an open file, without its middle if it is longer than MAX_OUTPUT."""
    file.seek(0)
    text = file.read()  # at most FILE_MB
    if len(text) > MAX_OUTPUT:
        half = MAX_OUTPUT // 2
        text = text[:half] + b"\n...\n" + text[-half:]
    return text.decode("utf-8", "replace")
