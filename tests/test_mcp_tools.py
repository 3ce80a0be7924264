"""examples/mcp_tools.py with a real server, over HTTP on the loopback."""

import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest
from conftest import HANGS, free_port, wait_for
from mcp import MCPError

from examples import mcp_tools

SERVER = """
import asyncio, os, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("test", log_level="CRITICAL")
calls = []

@server.tool()
async def add(a: int, b: int = 0, hang: bool = False) -> int:
    calls.append(a)
    if hang:
        await asyncio.sleep(3600)
    return a + b

@server.tool()
def count_and_pid() -> str:
    return f"{len(calls)} {os.getpid()}"

server.run("streamable-http", port=int(sys.argv[1]))
"""


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_calls_and_what_becomes_of_a_session(tmp_path, background):
    """A call past its deadline leaves the session usable; a server that ends stays away."""
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    port = free_port()
    url = f"http://127.0.0.1:{port}/mcp"

    async def calls(tools):
        assert await tools["add"].execute("r", {"a": 2, "b": 3}, b=40) == "42"  # the row's kwargs
        with pytest.raises(RuntimeError, match="valid integer"):
            await tools["add"].execute("r", {"a": "x"})
        hanging = asyncio.create_task(tools["add"].execute("r", {"a": 1, "hang": True}))
        while not (told := await tools["count_and_pid"].execute("r", {})).startswith("2 "):
            await asyncio.sleep(0.01)
        hanging.cancel()
        await asyncio.wait([hanging])
        assert hanging.cancelled()
        assert await tools["count_and_pid"].execute("r", {}) == told
        os.kill(int(told.split()[1]), signal.SIGKILL)
        with pytest.raises(MCPError):
            await tools["add"].execute("r", {"a": 1})

    with subprocess.Popen([sys.executable, str(program), str(port)]):
        wait_for(lambda: listens(port))
        tools = {tool.name: tool for tool in mcp_tools.mcp_tools(url=url, seconds=HANGS)}
        background.submit(calls(tools)).result(HANGS)
