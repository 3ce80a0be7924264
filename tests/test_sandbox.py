"""examples/sandbox.py, by programs that break each limit, with and without namespaces.

An isolated program's files and PIDs are its own: tests look at it through the /proc of the host.
"""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import HANGS, REPO, time_passes, wait_for

from agent_loop import BadInput, in_time
from data import load_task
from examples import sandbox
from examples.sandbox import NotIsolated, Result, run_python

WITHOUT_NAMESPACES = sandbox.SUPERVISOR.replace("LIBC.unshare(", "(lambda _: -1)(")


def run(code: str, **limits) -> Result:
    return asyncio.run(run_python(textwrap.dedent(code), HANGS, **limits))


def run_late(code: str, **limits) -> Result:
    """Runs an endless program, whose time is up when it has made a file called "there"."""

    async def late():
        result = asyncio.create_task(run_python(textwrap.dedent(code), HANGS, **limits))
        await there()
        time_passes()
        return await result

    return asyncio.run(late())


async def there() -> None:
    """Waits until a program has made that file."""
    while not any(os.path.exists(f"/proc/{pid}/cwd/there") for pid in processes_in()):
        await asyncio.sleep(0.02)


@pytest.fixture(params=["namespaces", "no namespaces"])
def host(request, monkeypatch):
    """What this host allows, and a host that allows no namespaces."""
    if request.param == "no namespaces":
        monkeypatch.setattr(sandbox, "SUPERVISOR", WITHOUT_NAMESPACES)


@pytest.fixture(autouse=True)
def folders(monkeypatch):
    """The parent of a test's sandboxes, which is empty in the end.

    It is not in tmp_path, which other users can't enter."""
    monkeypatch.setattr(sandbox, "GRACE", HANGS)
    folder = Path(tempfile.mkdtemp(prefix="test-sandbox-"))
    folder.chmod(0o1777)  # as /tmp is
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    SEEN.clear()
    yield folder
    left = list(folder.iterdir())
    shutil.rmtree(folder)
    assert left == []


SEEN: set[int] = set()


def processes_in() -> list[int]:
    """Living processes of sandboxes: descendants of this process, now or at an earlier look."""
    SEEN.update(process.pid for process in psutil.Process().children(recursive=True))
    return list(filter(alive, SEEN))


def alive(pid: int) -> bool:
    """Whether this is a supervisor, an init or a program, and no zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        command = psutil.Process(pid).cmdline()
        return "main.py" in command or "supervise()" in " ".join(command)
    return False


# ---------------------------------------------------------------- what a program gets, and limits

NOTHING_OF_OURS = """'' /sandbox /sandbox ['main.py']
['0', '1', '2', '3']
CUDA_VISIBLE_DEVICES HOME LANG MALLOC_ARENA_MAX OMP_NUM_THREADS OPENBLAS_NUM_THREADS \
PATH PYTHONHASHSEED TMPDIR
"""
# A program, its limits, and the fields of its result. stderr: its end.
PROGRAMS = {
    "output": (
        "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)",
        {},
        dict(stdout="out\n", stderr="err\n", returncode=3, timed_out=False),
    ),
    "stdin, environment and descriptors": (
        """
        import os, sys
        print(repr(sys.stdin.read()), os.environ["HOME"], os.getcwd(), os.listdir())
        print(sorted(os.listdir("/proc/self/fd")))  # the fourth is the one that lists
        print(*sorted(os.environ))
        """,
        {},
        dict(stdout=NOTHING_OF_OURS),
    ),
    "a signal": ("import os; os.abort()", {}, dict(returncode=-signal.SIGABRT)),
    "a long output": (
        "print('first', 'x' * 1_000_000, 'last')",
        dict(max_output=20),
        dict(stdout="first xxxx\n...\nxxxx last\n", returncode=0),
    ),
    "CPU time": ("while True: pass", dict(cpu_s=1), dict(returncode=-signal.SIGXCPU)),
    "memory": (
        "x = bytearray(10**8); print(len(x)); x = bytearray(10**9)",
        {},
        dict(returncode=1, stdout="100000000\n", stderr="MemoryError\n"),
    ),
    "the memory of all processes": (
        """
        import os, time
        for i in range(8):  # each far below the limit
            if os.fork() == 0:
                more = bytearray(os.urandom(1 << 20)) * 60
                time.sleep(3600)
        time.sleep(3600)
        """,
        {},
        dict(returncode=-signal.SIGKILL, timed_out=False, stderr="more than 256 MB\n"),
    ),
    "memory outside of processes": (
        """
        import ctypes, os, socket
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.memfd_create(b"x", 0), ctypes.get_errno())
        print(libc.shmget(0, 1 << 20, 0o1600), ctypes.get_errno())
        print(libc.unshare(0x10000000), ctypes.get_errno())  # where it could mount more
        end, other = socket.socketpair()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        """,
        {},
        dict(stdout=3 * "-1 1\n", stderr="[Errno 1] Operation not permitted\n"),
    ),
    "a way to the hypervisor": (
        "import socket; socket.socket(socket.AF_VSOCK)",
        {},
        dict(stderr="[Errno 1] Operation not permitted\n"),
    ),
    "file size": (
        """
        with open("big", "wb", buffering=0) as file:
            for _ in range(9):
                print(file.write(bytes(1 << 20)))
        """,
        dict(file_mb=3),
        dict(stdout=3 * "1048576\n", stderr="[Errno 27] File too large\n"),
    ),
    "a process that keeps forking": (
        """
        import os, time
        if os.fork() == 0:
            os.setsid()
            while True:
                if os.fork():
                    os._exit(0)
        time.sleep(0.1)
        """,
        {},
        dict(returncode=0, timed_out=False),
    ),
    "a folder that resists": (
        "import os; os.makedirs('locked/inside'); os.chmod('locked', 0)",
        {},
        dict(returncode=0),
    ),
}


@pytest.mark.parametrize("code, limits, expected", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program(host, code, limits, expected):
    result = run(code, **limits)
    for name, value in expected.items():
        found = getattr(result, name)
        assert found == value or name == "stderr" and found.endswith(value), (name, result)
    wait_for(lambda: processes_in() == [])


def test_it_sees_no_files_but_pythons_and_its_own_and_is_not_root(folders):
    """Nor does it leave any in a folder that others share."""
    secret = folders / "secret"
    secret.write_text("hunter2")
    secret.chmod(0o644)
    result = run(f"""
        import os
        for path in {str(secret)!r}, "/etc/passwd", {__file__!r}, "/proc/1/environ":
            try:
                print(open(path).read())
            except OSError as error:
                print(type(error).__name__)
        for folder in "/tmp", "/dev/shm", os.getcwd():
            open(f"{{folder}}/flatrl-left-behind", "w").write("x")
        print(0 in (os.getuid(), os.geteuid(), os.getgid(), *os.getgroups()))
        open("/usr/flatrl-left-behind", "w")
    """)
    secret.unlink()
    if not result.isolated:
        pytest.skip("this host does not let programs be isolated")
    *seen, environ, is_root = result.stdout.splitlines()
    assert seen == ["FileNotFoundError"] * 3
    assert environ in ("PermissionError", "FileNotFoundError")
    assert is_root == "False"
    assert "Read-only file system: '/usr/flatrl-left-behind'" in result.stderr
    for folder in "/tmp", "/dev/shm":
        assert not Path(folder, "flatrl-left-behind").exists()


def test_a_host_that_cannot_isolate_is_refused_unless_told_to_go_on(monkeypatch):
    monkeypatch.setattr(sandbox, "SUPERVISOR", WITHOUT_NAMESPACES)
    result = run("print(1)")  # conftest.py has set the variable
    assert (result.stdout, result.isolated) == ("1\n", False)
    monkeypatch.delenv("SANDBOX_UNISOLATED")
    with pytest.raises(NotIsolated, match="namespaces are not allowed.*SANDBOX_UNISOLATED=1"):
        run("open('/dev/shm/flatrl-ran', 'w')")
    assert not Path("/dev/shm/flatrl-ran").exists()
    with pytest.raises(BadInput, match="retool.py: this host does not let programs be isolated"):
        load_task(str(REPO / "examples/retool.py"))


def test_no_network(host):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = ("127.0.0.1", server.getsockname()[1])
        result = run(f"import socket; socket.create_connection({address}); print('in')")
    if result.isolated:
        assert "OSError: [Errno 101] Network is unreachable" in result.stderr
    else:
        assert result.stdout == "in\n"  # so isolation was not claimed


def test_the_buffers_of_sockets_count_as_memory():
    result = run("""
        import os, socket, time
        for _ in range(3):
            os.fork()
        kept = [socket.socketpair() for _ in range(120)]
        time.sleep(10)
    """)
    assert result.stderr.endswith("more than 256 MB\n") == result.isolated


def test_number_of_processes(host):
    code = """
        import os, time
        for i in range(200):
            print(i, os.getuid(), flush=True)
            if os.fork() == 0:
                time.sleep(3600)
    """
    result = run(code, max_processes=10)
    n, user = map(int, result.stdout.split("\n")[-2].split())
    if user == 0:
        pytest.skip("nobody else can read Python, and the kernel does not limit root's processes")
    assert result.stderr.endswith("BlockingIOError: [Errno 11] Resource temporarily unavailable\n")
    if os.geteuid() == 0:  # else our user's other processes may count too
        assert n == 9  # the tenth is the program itself


def test_printing_for_ever_costs_no_memory_and_ends_at_the_deadline(host):
    code = """
        for n in range(10**9):
            print("spam" * 1000)
            if n == 100:  # more than fits into a pipe
                open("there", "x")
    """
    result = run_late(code, max_output=1000)
    assert result.timed_out and result.returncode == -signal.SIGKILL
    assert len(result.stdout) == 1000 + len("\n...\n")
    assert result.stdout.startswith("spamspam")  # what it had printed is not lost


# ---------------------------------------------------------------- nothing is left

CHILDREN = """
import os, signal, time

ready, say = os.pipe()

def outlive(how):
    if os.fork() == 0:
        if how != "child":
            os.setsid()
        if how == "orphan" and os.fork():
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(how, os.readlink("/proc/self"), flush=True)  # its output stays open
        os.write(say, b"1")
        time.sleep(3600)

for how in ("child", "session", "orphan"):
    outlive(how)
    os.read(ready, 1)
"""


@pytest.mark.parametrize("end, run_it, returncode", [
    ("os._exit(7)", run, 7),
    ("open('there', 'x'); time.sleep(3600)", run_late, -signal.SIGKILL),
])  # fmt: skip
def test_children_do_not_outlive_the_program_or_its_deadline(host, end, run_it, returncode):
    result = run_it(CHILDREN + end)
    assert (result.returncode, result.timed_out) == (returncode, run_it is run_late)
    pids = [int(pid) for pid in re.findall(r"\w+ (\d+)", result.stdout)]
    assert len(pids) == 3
    if result.isolated:  # they are numbers of another namespace
        pids = processes_in()
    assert not any(map(alive, pids))


def test_cancellation_kills_and_tidies_up(host):
    async def cancelled():
        running = asyncio.create_task(run_python(CHILDREN + "time.sleep(3600)", HANGS))
        # Supervisor, init, the program and its three children.
        while len(pids := processes_in()) < 6:
            await asyncio.sleep(0.05)
        starting = asyncio.create_task(run_python("while True: pass", HANGS))
        await asyncio.sleep(0.001)
        for task in running, starting:
            task.cancel()
        results = await asyncio.gather(running, starting, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 2
        assert not any(map(alive, pids))

    asyncio.run(asyncio.wait_for(cancelled(), HANGS))
    wait_for(lambda: processes_in() == [])


def test_the_death_of_this_process_ends_the_program(host, folders):
    trainer = f"""
import asyncio, sys, tempfile
sys.path.insert(0, {str(REPO)!r})
from examples import sandbox
sandbox.SUPERVISOR = {sandbox.SUPERVISOR!r}
tempfile.tempdir = {str(folders)!r}
asyncio.run(sandbox.run_python("import time; time.sleep(3600)", 3600))
"""
    with subprocess.Popen(sys.executable, stdin=subprocess.PIPE, text=True) as process:
        try:
            process.stdin.write(trainer)
            process.stdin.close()
            wait_for(lambda: len(processes_in()) == 3)
        finally:
            process.kill()
    wait_for(lambda: processes_in() == [])
    wait_for(lambda: not list(folders.iterdir()))  # the supervisor has deleted the folder


def test_a_tools_deadline_does_not_run_while_it_waits_for_a_slot(monkeypatch):
    monkeypatch.setattr(sandbox, "SLOTS", asyncio.Semaphore(1))

    async def two():
        endless = "open('there', 'x')\nwhile True: pass"
        first = asyncio.create_task(run_python(endless, 4 * HANGS))
        await there()
        waiting = in_time("second", HANGS, run_python("print('second')", HANGS))
        second = asyncio.create_task(waiting)
        await asyncio.sleep(0.1)
        time_passes(2 * HANGS)
        await asyncio.sleep(0.1)
        assert len(processes_in()) == 3 and not second.done()
        first.cancel()
        return await second

    assert asyncio.run(two()).stdout == "second\n"


# ---------------------------------------------------------------- examples/retool.py

retool = load_task(str(REPO / "examples/retool.py"))


def tell(code: str):
    return asyncio.run(retool.code_interpreter(code))


def test_retool_tells_what_a_program_printed_and_how_it_failed(monkeypatch):
    broken = tell("```python\nprint(2 ** 10O)\n```")
    assert broken.text.startswith('File "/sandbox/main.py", line 1\n')
    assert broken.text.endswith("SyntaxError: invalid decimal literal")
    assert broken.metrics["failed"] and not broken.metrics["timeouts"]
    assert tell("import os; os._exit(3)").text == "Error: the program ended with code 3"
    assert tell("x = 1").text == "(nothing printed)"

    async def hangs(*args, **limits):
        return Result("so far\n", "", timed_out=True)

    monkeypatch.setattr(retool, "run_python", hangs)
    late = tell("while True: pass")
    assert late.text == "so far\nError: the program took longer than 5 seconds"
    assert late.metrics == {"failed": False, "timeouts": True, "unisolated": True}


@pytest.mark.parametrize("text, truth, reward", [
    ("so\n<answer> $1,234$ </answer>", "1234", 1.0),
    ("We add.\nAnswer: $\\boxed{34}$.", "34", 1.0),
    ("<answer>34</answer><answer>35</answer>", "34", 0.0),
    ("<answer></answer>", "", 0.0),
    ("34", "34", 0.0),
])  # fmt: skip
def test_retool_reward(text, truth, reward):
    row = {"reward_model": {"ground_truth": truth}}
    for role, paid in (("assistant", reward), ("tool", 0.0)):
        output = SimpleNamespace(messages=[{"role": role, "content": text}])
        assert retool.reward(output, row) == paid
