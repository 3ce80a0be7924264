"""MCP servers as tools, over stdio or streamable HTTP, by version 2 of the `mcp` package.

    accelerate launch train.py --task examples/mcp_tools.py

The package comes with vLLM. How much do some goods cost with their delivery? Only the shop's server
(`data/mcp_server.py`) knows. In a task of your own:

    from examples.mcp_tools import mcp_tools

    TOOLS = mcp_tools(command=["npx", "some-mcp-server"], env={"API_KEY": ...})
    TOOLS += mcp_tools(url="https://.../mcp", headers={"Authorization": "Bearer ..."})

A server has one session on each rank, which serves all trajectories. If it ends, all later calls
are errors that the model reads. A server with state must tell trajectories apart by an argument,
which a row gives as `tools_kwargs` {tool: {"execute_kwargs": {argument: value}}}."""

import asyncio
import concurrent.futures
import itertools
import random
import sys
import threading
from pathlib import Path

import httpx2  # mcp's own HTTP client
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from agent_loop import BadInput, Tool
from examples.calculator import build_model, reward  # noqa: F401  (train.py calls them)
from examples.data.mcp_server import DELIVERY, PRICES


def mcp_tools(command=None, url=None, env=None, headers=None, seconds: float = 30) -> list[Tool]:
    """Connects to an MCP server, for as long as this process lives; returns its tools.

    command: a program to run, which inherits PATH, HOME and little else, and gets the variables
    env. Or url: a running server, with headers for every request. Raises BadInput if it has not
    listed its tools within these seconds."""
    tools = concurrent.futures.Future()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def hold_session():
        """Opens the session and keeps it open: anyio wants both done by one task."""
        if url:
            http = httpx2.AsyncClient(headers=headers, timeout=None)
            server = streamable_http_client(url, http_client=http)
        else:
            server = StdioServerParameters(command=command[0], args=command[1:], env=env)
        try:
            async with Client(server) as client:
                page = await client.list_tools()
                found = page.tools
                while page.next_cursor:
                    page = await client.list_tools(cursor=page.next_cursor)
                    found += page.tools
                tools.set_result([McpTool(client, loop, tool) for tool in found])
                await asyncio.Event().wait()
        except Exception as error:
            if not tools.done():
                tools.set_exception(error)

    asyncio.run_coroutine_threadsafe(hold_session(), loop)
    try:
        return tools.result(seconds)
    except Exception as error:
        raise BadInput(f"no MCP server answers at {url or command}: {error!r}") from error


class McpTool(Tool):
    """One tool of an MCP server; a row's execute_kwargs are arguments beyond the model's choice."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop, tool):
        self.client = client
        self.loop = loop
        self.name = tool.name
        function = {"name": tool.name, "description": tool.description or ""}
        function["parameters"] = tool.input_schema
        self.schema = {"type": "function", "function": function}

    async def execute(self, request_id: str, arguments: dict, **execute_kwargs) -> str:
        """Returns the tool's text. Raises RuntimeError with the text of a failure, or MCPError."""
        # The client's own call_tool sends a call again that its server has refused.
        calling = self.client.session.call_tool(self.name, arguments | execute_kwargs)
        result = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(calling, self.loop))
        text = "\n".join(getattr(block, "text", f"[{block.type}]") for block in result.content)
        if result.is_error:
            raise RuntimeError(text or f"{self.name} failed without a message")
        return text


SYSTEM_PROMPT = "Look prices up with the tools. End with <answer>N</answer>."
SERVER = Path(__file__).with_name("data") / "mcp_server.py"
TOOLS = mcp_tools(command=[sys.executable, str(SERVER)])


def load(split: str) -> list[dict]:
    """Returns the rows of a split, always the same: 50 orders for "val", 400 for "train"."""
    orders = list(itertools.product(range(1, 10), PRICES, DELIVERY))
    random.Random(0).shuffle(orders)
    rows = []
    for count, item, town in {"train": orders[50:], "val": orders[:50]}[split]:
        question = f"What do {count} x {item} cost, delivered to {town}?"
        price = str(count * PRICES[item] + DELIVERY[town])
        prompt = [{"role": "user", "content": question}]
        rows.append({"prompt": prompt, "reward_model": {"ground_truth": price}})
    return rows
