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


def run(code: str, **limits) -> Result:
    return asyncio.run(run_python(textwrap.dedent(code), **{"timeout": HANGS} | limits))


def both(code: str, **limits) -> list[Result]:
    """The same program twice: with what the host allows of namespaces and users, and without."""
    return asyncio.run(both_of(code, **limits))


async def both_of(code: str, **limits) -> list[Result]:
    code = textwrap.dedent(code)
    runs = (run_python(code, HANGS, isolate=isolate, **limits) for isolate in (True, False))
    return await asyncio.gather(*runs)


def both_late(code: str, **limits) -> list[Result]:
    """`both` for endless programs: their time is up when they have made a file called "there"."""

    async def runs():
        results = asyncio.create_task(both_of(code, **limits))
        await there(2)
        time_passes()
        return await results

    return asyncio.run(runs())


async def there(n: int) -> None:
    """Waits until so many programs have made that file."""
    while len(set(map(made, processes_in())) - {None}) < n:
        await asyncio.sleep(0.02)


def made(pid: int) -> tuple | None:
    """The file called "there" in a process's folder, if there is one."""
    with contextlib.suppress(OSError):
        stat = os.stat(f"/proc/{pid}/cwd/there")
        return stat.st_dev, stat.st_ino


@pytest.fixture(scope="module")
def host() -> Result:
    """What this host allows, as the sandbox itself reports it."""
    return run("")


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
    return sorted(pid for pid in SEEN if alive(pid) and of_a_sandbox(pid))


def of_a_sandbox(pid: int) -> bool:
    """Whether the command line is that of a supervisor, an init or a program."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"supervise()" in command or command.endswith(b"\0main.py\0")
    return False


def alive(pid: int) -> bool:
    """Whether a process exists, and is no zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


# ---------------------------------------------------------------- what a program gets, and limits

# A program, its limits, and the fields of its result. stderr: its end.
PROGRAMS = {
    "output": (
        "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)",
        {},
        dict(stdout="out\n", stderr="err\n", returncode=3, timed_out=False, truncated=False),
    ),
    "a signal": ("import os; os.abort()", {}, dict(returncode=-signal.SIGABRT)),
    "a long output": (
        "print('first', 'x' * 1_000_000, 'last')",
        dict(max_output=20),
        dict(stdout="first xxxx\n...\nxxxx last\n", truncated=True, returncode=0),
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
        dict(out_of_memory=True, returncode=-signal.SIGKILL, stderr="more than 256 MB\n"),
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
def test_a_program(code, limits, expected):
    for result in both(code, **limits):
        for name, value in expected.items():
            found = getattr(result, name)
            assert found == value or name == "stderr" and found.endswith(value), (name, result)
    wait_for(lambda: processes_in() == [])


def test_stdin_and_environment(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    for result in both("""
        import os, sys
        print(repr(sys.stdin.read()))
        print(sorted(os.environ), os.environ["HOME"], os.getcwd(), os.listdir())
        print(sorted(os.listdir("/proc/self/fd")))  # the fourth is the one that lists
    """):
        read, environment, descriptors = result.stdout.splitlines()
        assert read == "''" and result.returncode == 0
        assert environment.startswith("['CUDA_VISIBLE_DEVICES', 'HOME', 'LANG', ")
        assert environment.endswith("/sandbox /sandbox ['main.py']")
        assert descriptors == "['0', '1', '2', '3']"
        assert "SECRET" not in environment and "hunter2" not in environment


def test_it_does_not_run_as_root(host):
    if not host.own_user:
        pytest.skip("we are not root, or nobody else can read Python")
    result = run("""
        import os
        print(os.getuid() > 60000, os.geteuid() > 60000, os.getgid() > 60000, os.getgroups())
        open("mine", "w").write("x")
        open("/etc/passwd", "a")
    """)
    assert result.stdout == "True True True []\n"
    assert "PermissionError: [Errno 13] Permission denied: '/etc/passwd'" in result.stderr


def test_it_sees_no_files_but_pythons_and_its_own(host, folders):
    """Nor does it leave any in a folder that others share."""
    if not host.own_files:
        pytest.skip("this host does not allow mount namespaces")
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
    """)
    secret.unlink()
    assert result.returncode == 0 and result.own_files, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:3] == ["FileNotFoundError"] * 3
    assert lines[3] in ("PermissionError", "FileNotFoundError") and len(lines) == 4
    for folder in "/tmp", "/dev/shm":
        assert not Path(folder, "flatrl-left-behind").exists()


def test_a_host_that_cannot_isolate_is_refused_unless_told_to_go_on(monkeypatch):
    supervisor = sandbox.SUPERVISOR.replace("LIBC.unshare(", "(lambda _: -1)(")
    monkeypatch.setattr(sandbox, "SUPERVISOR", supervisor)
    result = run("print(1)")  # conftest.py has set the variable
    assert (result.stdout, result.no_network, result.own_files) == ("1\n", False, False)
    monkeypatch.delenv("SANDBOX_UNISOLATED")
    with pytest.raises(NotIsolated, match="namespaces are not allowed.*SANDBOX_UNISOLATED=1"):
        run("open('/dev/shm/flatrl-ran', 'w')")
    assert not Path("/dev/shm/flatrl-ran").exists()
    assert run("print(1)", isolate=False).stdout == "1\n"
    with pytest.raises(BadInput, match="retool.py: this host does not let programs be isolated"):
        load_task(str(REPO / "examples/retool.py"))


def test_no_network(host):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = ("127.0.0.1", server.getsockname()[1])
        code = f"import socket; socket.create_connection({address}); print('in')"
        isolated, plain = both(code)
    assert plain.stdout == "in\n" and plain.no_network is False  # nothing else is claimed
    if not host.no_network:
        pytest.skip("this host does not allow network namespaces")
    assert isolated.no_network is True and isolated.stdout == ""
    assert "OSError: [Errno 101] Network is unreachable" in isolated.stderr


def test_number_of_processes(host):
    if os.geteuid() == 0 and not host.own_user:
        pytest.skip("the kernel does not limit root's processes")
    code = """
        import os, time
        for i in range(200):
            print(i, flush=True)
            if os.fork() == 0:
                time.sleep(3600)
    """
    result = run(code, max_processes=10)
    assert result.stderr.endswith("BlockingIOError: [Errno 11] Resource temporarily unavailable\n")
    if host.own_user:  # else our user's other processes may count too
        assert result.stdout.endswith("\n9\n")  # the tenth is the program itself


def test_printing_for_ever_costs_no_memory_and_ends_at_the_deadline():
    code = """
        for n in range(10**9):
            print("spam" * 1000)
            if n == 100:  # more than fits into a pipe
                open("there", "x")
    """
    for result in both_late(code, max_output=1000):
        assert result.timed_out and result.truncated and result.returncode == -signal.SIGKILL
        assert len(result.stdout) == 1000 + len("\n...\n")
        assert result.stdout.startswith("spamspam")  # what it had printed is not lost


# ---------------------------------------------------------------- nothing is left

CHILDREN = """
    import os, signal, sys, time

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


def children(result: Result) -> list[int]:
    """Their PIDs on the host: without a namespace those that they print."""
    pids = {how: int(pid) for how, pid in re.findall(r"(\w+) (\d+)", result.stdout)}
    assert sorted(pids) == ["child", "orphan", "session"], result
    return processes_in() if result.no_network else list(pids.values())


@pytest.mark.parametrize("end, run_it", [
    ("os._exit(7)", both),
    ("open('there', 'x'); time.sleep(3600)", both_late),
])  # fmt: skip
def test_children_do_not_outlive_the_program_or_its_deadline(end, run_it):
    for result in run_it(textwrap.dedent(CHILDREN) + end):
        assert result.timed_out == (run_it is both_late)
        assert result.returncode == (-signal.SIGKILL if result.timed_out else 7)
        assert not any(map(alive, children(result)))


def test_cancellation_kills_and_tidies_up():
    async def cancelled():
        tasks = []
        for isolate in (True, False):
            code = textwrap.dedent(CHILDREN) + "time.sleep(3600)"
            tasks.append(asyncio.create_task(run_python(code, HANGS, isolate=isolate)))
        # For each: supervisor, init, the program and its three children.
        while len(pids := processes_in()) < 12:
            await asyncio.sleep(0.05)
        tasks.append(asyncio.create_task(run_python("while True: pass", HANGS)))
        await asyncio.sleep(0.001)  # at its start
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 3
        assert not any(map(alive, pids))

    asyncio.run(asyncio.wait_for(cancelled(), HANGS))
    wait_for(lambda: processes_in() == [])


def test_the_death_of_this_process_ends_the_program(folders):
    host = f"""
import asyncio, sys, tempfile
sys.path.insert(0, {str(REPO)!r})
from examples.sandbox import run_python
tempfile.tempdir = {str(folders)!r}
async def main():
    code = "import time; time.sleep(3600)"
    await asyncio.gather(*(run_python(code, 3600, isolate=isolate) for isolate in (0, 1)))
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", host]) as process:
        try:
            wait_for(lambda: len(processes_in()) == 6)
        finally:
            process.kill()
    wait_for(lambda: processes_in() == [])
    wait_for(lambda: not list(folders.iterdir()))  # the supervisor has deleted the folder


def test_a_tools_deadline_does_not_run_while_it_waits_for_a_slot(monkeypatch):
    monkeypatch.setattr(sandbox, "SLOTS_PER_CPU", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)

    async def two():
        endless = "open('there', 'x')\nwhile True: pass"
        first = asyncio.create_task(run_python(endless, 4 * HANGS))
        await there(1)
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
        return Result("so far\n", "", timed_out=True, truncated=False)

    monkeypatch.setattr(retool, "run_python", hangs)
    late = tell("while True: pass")
    assert late.text == "so far\nError: the program took longer than 5 seconds"
    assert late.metrics == {"failed": False, "timeouts": True, "networked": True}


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
