"""examples/mcp_tools.py with real servers, over stdio and over HTTP on the loopback."""

import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest
from conftest import HANGS, free_port, wait_for
from mcp import MCPError
from test_agent_loop import Script, call, loop_of, said_by

from agent_loop import BadInput
from examples import mcp_tools

SERVER = """
import asyncio, os, sys
from mcp import MCPError
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.inbound import HEADER_MISMATCH

server = MCPServer("test", log_level="CRITICAL")
calls = []

@server.tool()
async def add(a: int, b: int = 0, hang: bool = False) -> int:
    "Adds two numbers."
    calls.append(a)
    if hang:
        await asyncio.sleep(3600)
    return a + b

@server.tool()
def count_and_pid() -> str:
    return f"{len(calls)} {os.getpid()}"

@server.tool()
def done_and_refused() -> None:
    calls.append(0)
    raise MCPError(HEADER_MISMATCH, "list the tools again")

@server.tool()
def env_or_header(context: Context) -> str:
    return os.environ.get("MARK") or context.headers["x-key"]

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
"""


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def by_name(*command, **how) -> dict[str, mcp_tools.McpTool]:
    return {tool.name: tool for tool in mcp_tools.mcp_tools(*command, seconds=HANGS, **how)}


@pytest.fixture(params=["stdio", "http"])
def tools(request, tmp_path) -> dict[str, mcp_tools.McpTool]:
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    command = [sys.executable, str(program)]
    if request.param == "stdio":
        yield by_name(command, env={"MARK": "seen"})
        return
    port = free_port()
    with subprocess.Popen([*command, str(port)]) as process:
        wait_for(lambda: listens(port))
        yield by_name(url=f"http://127.0.0.1:{port}/mcp", headers={"x-key": "seen"})
        process.kill()


def test_calls_and_what_becomes_of_a_session(tools, background):
    """A call past its deadline leaves the session usable; a server that ends stays away.

    No call is sent twice."""
    assert list(tools) == ["add", "count_and_pid", "done_and_refused", "env_or_header"]
    function = tools["add"].schema["function"]
    assert function["parameters"]["properties"]["a"]["type"] == "integer"

    async def calls():
        assert await tools["add"].execute("r", {"a": 2, "b": 3}, b=40) == "42"  # the row's kwargs
        assert await tools["env_or_header"].execute("r", {}) == "seen"
        with pytest.raises(MCPError, match="list the tools again"):
            await tools["done_and_refused"].execute("r", {})
        assert (await tools["count_and_pid"].execute("r", {})).startswith("2 ")
        hanging = asyncio.create_task(tools["add"].execute("r", {"a": 1, "hang": True}))
        while not (told := await tools["count_and_pid"].execute("r", {})).startswith("3 "):
            await asyncio.sleep(0.01)
        hanging.cancel()
        await asyncio.wait([hanging])
        assert hanging.cancelled()
        assert await tools["count_and_pid"].execute("r", {}) == told
        os.kill(int(told.split()[1]), signal.SIGKILL)
        with pytest.raises(MCPError):
            await tools["add"].execute("r", {"a": 1})

    background.submit(calls()).result(HANGS)


def test_a_server_that_does_not_answer_is_named_at_import():
    with pytest.raises(BadInput, match="no MCP server answers at .*no-such-program"):
        mcp_tools.mcp_tools(command=["/no-such-program"])


def test_the_agent_loop_calls_the_bundled_server(tokenizer, background):
    questions = {row["prompt"][0]["content"]: row for row in mcp_tools.load("train")}
    row = questions["What do 3 x lamp cost, delivered to Brindo?"]
    calls = [
        call("price", item="lump"),
        call("price", item="lamp"),
        call("delivery", town="Brindo"),
    ]
    engine = Script(tokenizer, ["\n".join(calls), "<answer>109</answer>"])
    out = background.submit(loop_of(engine, mcp_tools, row, max_response_tokens=2000)).result(HANGS)
    wrong, *said = said_by(out, "tool")
    assert wrong.startswith("Error: ") and said == ["34", "7"]
    assert (out.metrics["tool_calls"], out.metrics["tool_errors"]) == (3, 1)
    assert mcp_tools.reward(out, row) == 1.0
