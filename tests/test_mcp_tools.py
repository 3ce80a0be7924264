"""examples/mcp_tools.py with real servers, over stdio and over HTTP on the loopback."""

import asyncio
import inspect
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import wait
from pathlib import Path

import psutil
import pytest
from conftest import HANGS, free_port, wait_for
from test_agent_loop import Script, call, loop_of, said_by

from agent_loop import BadInput
from examples import mcp_tools
from examples.mcp_tools import McpServer, McpTool

mcp_tools.CONNECT_SECONDS = HANGS


def print_tasks(loop=None) -> None:
    """Prints where each task of an event loop waits."""
    for task in asyncio.all_tasks(loop):
        print(task, file=sys.stderr)
        awaited = task.get_coro()
        while frame := getattr(awaited, "cr_frame", None):
            print(f"  {frame.f_code.co_filename}, line {frame.f_lineno}", file=sys.stderr)
            awaited = awaited.cr_await


SERVER = f'''
import asyncio, os, signal, sys
from pathlib import Path
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.types import TextContent

{inspect.getsource(print_tasks)}
signal.signal(signal.SIGUSR1, lambda *_: print_tasks())
server = MCPServer("test", log_level="CRITICAL")

@server.tool()
async def add(a: int, b: int = 0, held: str = "") -> int:
    """Adds two numbers."""
    if held:  # a folder: leaves a file there, and waits for one that is called "open"
        Path(held, str(a)).touch()
        while not Path(held, "open").exists():
            await asyncio.sleep(0.01)
    return a + b

@server.tool()
def pid() -> int:
    return os.getpid()

@server.tool()
def header(context: Context) -> str:
    return context.headers.get("x-key", "none")

@server.tool(structured_output=False)
def mixed() -> list:
    return [TextContent(text="one"), Image(data=b"123", format="png")]

@server.tool()
def env(name: str) -> str:
    return os.environ.get(name, "unset")

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
'''


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return str(path)


@pytest.fixture(scope="module")
def run(background):
    """Runs a coroutine to its end on the run's background loop. A hang shows where."""

    def run(coroutine):
        future = background.submit(coroutine)
        if not wait([future], HANGS).done:
            print_tasks(background.loop)
            for process in psutil.Process().children():
                if "server.py" in " ".join(process.cmdline()):
                    process.send_signal(signal.SIGUSR1)
            time.sleep(1)  # they print
            future.cancel()
        return future.result()

    return run


def end_session(server: McpServer, run) -> None:
    async def end():
        server.session.over.set()
        await server.session.task

    run(end())


def tools_of(run, **server):
    """Yields a server's tools by name, and ends the session with it."""
    tools = {tool.name: tool for tool in mcp_tools.mcp_tools(**server)}
    yield tools
    end_session(tools["pid"].server, run)


@pytest.fixture(scope="module")
def stdio(program, run):
    yield from tools_of(run, command=[sys.executable, program], env={"MARK": "seen"})


class HttpServer:
    """The server as a process that listens on a port of the loopback."""

    def __init__(self, program: str):
        self.port = free_port()
        self.command = [sys.executable, program, str(self.port)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command)
        wait_for(self.listens)

    def listens(self) -> bool:
        assert self.process.poll() is None, "the server ended"
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def http_server(program):
    server = HttpServer(program)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def http(http_server, run):
    url = f"http://127.0.0.1:{http_server.port}/mcp"
    yield from tools_of(run, url=url, headers={"x-key": "open sesame"})


@pytest.fixture(params=["stdio", "http"])
def tools(request) -> dict[str, McpTool]:
    return request.getfixturevalue(request.param)


def test_schemas_calls_and_contents(tools, run):
    assert list(tools) == ["add", "pid", "header", "mixed", "env"]
    function = tools["add"].schema["function"]
    assert (function["name"], function["description"]) == ("add", "Adds two numbers.")
    assert function["parameters"]["required"] == ["a"]
    assert function["parameters"]["properties"]["a"]["type"] == "integer"
    assert run(tools["add"].execute("r", {"a": 2, "b": 3})) == "5"
    assert run(tools["add"].execute("r", {"a": 2, "b": 3}, b=40)) == "42"  # of the row's kwargs
    assert run(tools["mixed"].execute("r", {})) == "one\n[image]"


def test_env_and_headers_reach_the_server(stdio, http, run):
    assert run(stdio["env"].execute("r", {"name": "MARK"})) == "seen"
    assert run(http["header"].execute("r", {})) == "open sesame"


async def under_way(folder: Path, *tasks: asyncio.Task) -> None:
    """Until these calls of add are held there."""
    while len(list(folder.iterdir())) < len(tasks):
        for task in tasks:
            if task.done():
                raise RuntimeError(f"it is not held: {await task}")
        await asyncio.sleep(0.01)


def test_a_call_cancelled_by_its_deadline_leaves_the_session_usable(tools, run, tmp_path):
    async def calls():
        before = await tools["pid"].execute("r", {})
        slow = asyncio.create_task(tools["add"].execute("a", {"a": 1, "held": str(tmp_path)}))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as deadline:
                held = {"a": 10, "held": str(tmp_path)}
                call = asyncio.ensure_future(tools["add"].execute("b", held))
                await under_way(tmp_path, slow, call)
                deadline.reschedule(0)  # which has passed
                await call
        assert not slow.done()
        (tmp_path / "open").touch()
        assert await slow == "1"
        assert await tools["pid"].execute("r", {}) == before

    run(calls())


def test_a_killed_server_is_started_again_and_none_is_left_behind(program):
    server = McpServer([sys.executable, program])
    tool = McpTool(server, "pid", "", {})

    async def calls():
        first = await tool.execute("r", {})
        os.kill(int(first), signal.SIGKILL)
        pids = await asyncio.gather(*(tool.execute("r", {}) for _ in range(20)))
        assert first not in pids and len(set(pids)) == 1
        return int(first), int(pids[0])

    # This event loop ends, and the session with it.
    for pid in asyncio.run(asyncio.wait_for(calls(), HANGS)):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert server.session.task.done() and not server.session.usable()


def test_an_http_server_that_goes_and_comes_back(http_server, http, run, tmp_path):
    async def calls():
        assert await http["pid"].execute("r", {}) == str(http_server.process.pid)
        call = asyncio.create_task(http["add"].execute("r", {"a": 1, "held": str(tmp_path)}))
        await under_way(tmp_path, call)
        http_server.kill()
        with pytest.raises(ConnectionError, match="no connection to http://127.0.0.1.*failed"):
            await call
        http_server.start()
        assert await http["pid"].execute("r", {}) == str(http_server.process.pid)

    run(calls())


def test_a_server_that_can_not_be_reached_is_named_at_import():
    with pytest.raises(BadInput, match="the MCP server /no-such-program can't be reached: "):
        mcp_tools.mcp_tools(command=["/no-such-program"])


def test_the_agent_loop_calls_the_bundled_server(tokenizer, run):
    """With parallel calls, one of them wrong."""
    questions = {row["prompt"][0]["content"]: row for row in mcp_tools.load("train")}
    row = questions["What do 3 x lamp cost, delivered to Brindo?"]
    lines = [
        call("price", item="lump"),
        call("price", item="lamp") + "\n" + call("delivery", town="Brindo"),
        "<answer>109</answer>",
    ]
    loop = loop_of(Script(tokenizer, lines), mcp_tools, row, max_response_tokens=2000)
    out = run(loop)
    said = said_by(out, "tool")
    assert said[0].startswith("Error: ") and "no item 'lump'; there are: lamp, kettle," in said[0]
    assert said[1:] == ["34", "7"]
    assert (out.metrics["tool_calls"], out.metrics["tool_errors"]) == (3, 1)
    assert mcp_tools.reward(out, row) == 1.0
    end_session(mcp_tools.TOOLS[0].server, run)
