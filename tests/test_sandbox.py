"""examples/sandbox.py by programs that break each limit, with and without bubblewrap."""

import asyncio
import socket
import tempfile
import textwrap

import psutil
import pytest
from conftest import HANGS, REPO, wait_for

from agent_loop import BadInput
from data import load_task
from examples import sandbox
from examples.sandbox import Result, run_python


@pytest.fixture(params=[True, False])
def isolated(request, monkeypatch) -> bool:
    """Isolates programs, or skips the test where the host does not allow it."""
    if request.param:
        monkeypatch.delenv("SANDBOX_UNISOLATED")
        try:
            sandbox.require_isolation()
        except BadInput as error:
            pytest.skip(str(error))
    return request.param


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The parent of a test's folders, which is empty in the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def run(code: str) -> Result:
    return asyncio.run(run_python(textwrap.dedent(code), HANGS))


def programs() -> list[psutil.Process]:
    """Returns the processes of all running programs."""
    children = psutil.Process().children(recursive=True)
    return [process for process in children if "main.py" in process.cmdline()]


@pytest.mark.parametrize("code, expected", [
    ("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)",
     Result("out\n", "err\n", False, 3)),
    ("bytearray(10**9)", Result("", "MemoryError\n", False, 1)),
    ("while True: print('x' * 1000, end='')",
     Result("x" * 5000 + "\n...\n" + "x" * 5000, "File too large\n", False, 1)),
])  # fmt: skip
def test_what_a_program_gets_and_its_limits(isolated, code, expected):
    result = run(code)
    assert result.stderr.endswith(expected.stderr)
    result.stderr = expected.stderr
    assert result == expected


@pytest.mark.parametrize("isolated", [True], indirect=True)
def test_what_an_isolated_program_cannot_do(isolated, folder):
    """Read our files, write outside its folder, reach us, see us, be root, fork without end."""
    secret = folder / "secret"
    secret.write_text("hunter2")
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = run(f"""
            import os, socket, time
            for path in {str(secret)!r}, "/etc/passwd", {__file__!r}, "/usr/x", "/x", "/dev/shm/x":
                try:
                    open(path, "w" if path.endswith("x") else "r")
                except OSError as error:
                    print(error.strerror)
            try:
                socket.create_connection({server.getsockname()})
            except OSError as error:
                print(error.strerror)
            print(os.getuid() == 0, sum(pid.isdigit() for pid in os.listdir("/proc")) < 5)
            for i in range({sandbox.MAX_PROCESSES} + 2):
                os.fork() or time.sleep(60)
        """)
    secret.unlink()
    assert result.stdout.splitlines() == [
        *["No such file or directory"] * 3,
        *["Read-only file system"] * 3,
        "Connection refused",
        "False True",
    ]
    assert result.stderr.endswith("Resource temporarily unavailable\n")


CHILDREN = """
import os, time
print("so far", flush=True)
for session in (False, {new_session}):
    if os.fork() == 0:
        session and os.setsid()
        break
time.sleep(3600)
"""


@pytest.mark.parametrize("seconds, code", [(1.0, 128 + 9), (HANGS, None)])
def test_children_do_not_outlive_the_call(isolated, seconds, code):
    """None: the call is cancelled."""

    async def call():
        program = CHILDREN.format(new_session=isolated)
        running = asyncio.create_task(run_python(program, seconds))
        if code is None:
            while len(programs()) < 3:
                await asyncio.sleep(0.05)
            running.cancel()
        await asyncio.wait([running])
        return running

    ended = asyncio.run(call())
    assert ended.cancelled() == (code is None)
    if code:
        assert ended.result() == Result("so far\n", "", True, code)
    wait_for(lambda: programs() == [])


def test_retool():
    retool = load_task(str(REPO / "examples/retool.py"))
    response = asyncio.run(retool.code_interpreter("```python\nprint(2 ** 10)\n```"))
    assert (response.text, response.metrics["failed"]) == ("1024", False)
