"""A subprocess for model-written Python, with limits; examples/retool.py makes a tool of it.

    result = await run_python("print(2 ** 10)")     # Result(stdout="1024\\n", stderr="", ...)

    event loop -- supervisor -- init -- the program, and its children

The supervisor (sandbox_supervisor.py) is a small Python process that sets everything up. It kills
every process of the run when the program ends, takes too much memory, or the supervisor's stdin
closes (deadline, cancellation, death of this process).

Isolation needs root or user namespaces, and Linux 5.12. An isolated program sees only Python and
the system's libraries, read-only, and a folder of its own, in memory, which disappears with it. It
has no network, sees no other processes and, if we are root, runs under a user id of its own. Where
the host does not allow this, `run_python` raises NotIsolated, unless the environment has
SANDBOX_UNISOLATED=1. Then the program may read, write and signal anything that its user can (if no
other user can read Python, as root), may use the network, and leaves the files that it writes
outside its folder. An ordinary user's trainer then at least hides its memory and environment, and a
filter of system calls forbids tracing other processes.

Memory is limited twice: the address space of each process, and the real memory of all of them
together, which is checked ten times a second. Each socket counts there with its whole buffer, if
the program has a network namespace of its own. Memory outside of processes (memfd, System V) is
forbidden, that of the folder is bounded. Only sockets of the families unix, inet and inet6 are
allowed; others, such as the one that talks to the hypervisor, are refused. The kernel is shared, so
put hostile code into a VM. Linux only."""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import json
import math
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from agent_loop import DEADLINE

GRACE = 5.0  # seconds for the supervisor to kill and tidy up
# Programs at a time. With more, they would miss their deadlines by waiting for each other.
SLOTS = asyncio.Semaphore(4 * (os.cpu_count() or 1))
SUPERVISOR = Path(__file__).with_name("sandbox_supervisor.py").read_text(encoding="utf-8")
PR_SET_DUMPABLE = 4


@dataclass
class Result:
    """How a program ended, and whether it was isolated.

    The supervisor reports the fields that have a default. The defaults stand if it was itself
    killed: the program then ended by SIGKILL, and isolation is not claimed."""

    stdout: str  # with /sandbox for the folder; the middle is cut out above max_output bytes
    stderr: str  # the same
    timed_out: bool
    returncode: int = -signal.SIGKILL  # -N: ended by signal N
    isolated: bool = False


class NotIsolated(OSError):
    """The host does not allow isolation, and running without it was not requested."""


class Output(asyncio.SubprocessProtocol):
    """Keeps the first and the last max_output / 2 bytes of stdout and of stderr.

    `ended` is set when the supervisor has ended and no process holds its stdout and stderr."""

    def __init__(self, max_output: int):
        self.half = max(1, max_output // 2)
        self.kept = {1: bytearray(), 2: bytearray()}
        self.cut = set()
        self.ended = asyncio.Event()

    def connection_made(self, transport):
        self.transport = transport

    def pipe_data_received(self, fd, data):
        """Adds data from stdout (fd 1) or stderr (fd 2), and cuts out the middle."""
        output = self.kept[fd]
        output += data
        if len(output) > 2 * self.half:
            self.cut.add(fd)
            del output[self.half : -self.half]
            # A flood is slowed down: it must cost neither memory nor our time.
            pipe = self.transport.get_pipe_transport(fd)
            pipe.pause_reading()
            asyncio.get_running_loop().call_later(0.01, pipe.resume_reading)

    def connection_lost(self, exc):
        self.ended.set()

    def text(self, fd: int, folder: str) -> str:
        """Returns the kept bytes as text, with /sandbox for the folder's name.

        That name is random, and must not change a trajectory."""
        output = self.kept[fd]
        if fd in self.cut:
            output = output[: self.half] + b"\n...\n" + output[self.half :]
        return output.decode("utf-8", "replace").replace(folder, "/sandbox")


@contextlib.asynccontextmanager
async def slot_of(slots: asyncio.Semaphore):
    """Waits for a slot, and holds it; a tool's or reward's deadline does not run while it waits."""
    loop = asyncio.get_running_loop()
    deadline = DEADLINE.get(None)
    seconds_left = None
    if deadline and deadline.when():
        seconds_left = deadline.when() - loop.time()
        deadline.reschedule(None)
    async with slots:
        if seconds_left is not None:
            deadline.reschedule(loop.time() + seconds_left)
        yield


async def run_python(
    code: str,
    timeout: float = 5.0,
    memory_mb: int = 256,
    max_output: int = 10_000,
    file_mb: int = 16,
    max_processes: int = 32,
    cpu_s: int | None = None,
) -> Result:
    """Runs a Python program in a fresh folder that is its home; returns how it ended.

    It has no stdin, nothing of our environment and, if it is isolated, no network. Programs first
    wait for one of the SLOTS; a tool's deadline is paused meanwhile.

        timeout         wall-clock seconds from the start, including Python's own 0.1 s; then, or
                        when the program ends, all its processes are killed
        memory_mb       for each process's addresses, and for the real memory of all of them
        max_output      bytes kept of stdout, and of stderr
        file_mb         for the largest file; the folder holds four times as much
        max_processes   counts threads too
        cpu_s           CPU seconds of a process; default: timeout, rounded up

    Raises NotIsolated (see the top of this file), and OSError if no process can be started."""
    insist = not os.environ.get("SANDBOX_UNISOLATED")
    python = {*map(os.path.abspath, (sys.prefix, sys.base_prefix, sys.exec_prefix))}
    job = {
        "code": code,
        "memory_mb": memory_mb,
        "file_mb": file_mb,
        "insist": insist,
        "cpu_s": cpu_s or math.ceil(timeout),
        "max_processes": max_processes,
        "python": sorted(python),
    }
    if os.geteuid() != 0 and not insist:
        # Our files in /proc then belong to root, and no process may trace us.
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    async with slot_of(SLOTS):
        # The supervisor deletes the folder too, in case this process has died.
        with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder:
            return await _run(job, os.path.realpath(folder), timeout, max_output)


async def _run(job: dict, folder: str, timeout: float, max_output: int) -> Result:
    """Starts the supervisor of a job in a folder, waits for its end, and returns the result."""
    env = {
        "HOME": folder,
        "TMPDIR": folder,
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "CUDA_VISIBLE_DEVICES": "",
        # Each thread takes 30 MB of addresses, and its own arena 64 MB.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
    }
    command = [sys.executable, "-I", "-S", "-c", SUPERVISOR]
    report_end, supervisors_end = os.pipe()
    with open(report_end, "rb", buffering=0) as report_file:
        try:
            transport, output = await asyncio.get_running_loop().subprocess_exec(
                lambda: Output(max_output),
                *command,
                env=env,
                cwd=folder,
                pass_fds=[supervisors_end],
                start_new_session=True,
            )
        finally:
            os.close(supervisors_end)
        stdin = transport.get_pipe_transport(0)
        job = job | {"folder": folder, "report": supervisors_end}
        stdin.write(json.dumps(job).encode() + b"\n")  # now it starts
        late = False
        try:
            async with asyncio.timeout(timeout):
                await output.ended.wait()
        except TimeoutError:
            late = True
        finally:  # even if we are cancelled
            if not stdin.is_closing():
                stdin.abort()  # tells the supervisor to end
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(output.ended.wait(), GRACE)
            finally:
                # Kills the supervisor, if it still runs, and with it init and the program.
                transport.close()
        report = _read_report(report_file)
    late = late and "returncode" not in report
    return Result(output.text(1, folder), output.text(2, folder), late, **report)


def _read_report(file) -> dict:
    """Returns the supervisor's report, which is empty if it was itself killed.

    Raises NotIsolated if it has refused to run the program."""
    os.set_blocking(file.fileno(), False)  # the other end may still be open
    report = {}
    for line in (file.read(1000) or b"").splitlines():
        report |= json.loads(line)
    if "refused" in report:
        raise NotIsolated(
            f"this host does not let programs be isolated ({report['refused']}): they could read, "
            "write and signal anything that your user can. SANDBOX_UNISOLATED=1 in the environment "
            "runs them all the same"
        )
    return report


def require_isolation():
    """Raises NotIsolated if this host does not isolate programs.

    A task file calls it on import, so that a run ends before it begins."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # an event loop may be running here
        pool.submit(asyncio.run, run_python("", timeout=60)).result()
