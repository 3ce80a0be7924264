"""MCP servers as tools, over stdio or streamable HTTP, by version 2 of the `mcp` package.

    accelerate launch train.py --task examples/mcp_tools.py                        # the tiny model
    accelerate launch train.py --task examples/mcp_tools.py --max_response_tokens 512 \\
        --model Qwen/Qwen2.5-0.5B-Instruct

    python examples/data/mcp_server.py 8000 &                                      # over HTTP
    MCP_URL=http://127.0.0.1:8000/mcp accelerate launch train.py --task examples/mcp_tools.py

The package comes with vLLM. The task: how much do some goods cost with their delivery? Only the
shop's server (`data/mcp_server.py`) knows the prices. In a task of your own:

    from examples.mcp_tools import mcp_tools

    TOOLS = mcp_tools(command=["npx", "some-mcp-server"], env={"API_KEY": ...})
    TOOLS += mcp_tools(url="https://.../mcp", headers={"Authorization": "Bearer ..."})

The tools are listed once, at import, in a session that is closed again. The first call opens the
session that serves all trajectories: one for each server and rank. A server with state must
therefore tell trajectories apart by an argument, which a row gives as `tools_kwargs` {tool:
{"execute_kwargs": {argument: value}}}."""

import asyncio
import itertools
import json
import os
import random
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from agent_loop import BadInput, Tool
from examples.calculator import build_model, reward  # noqa: F401  (train.py calls them)

try:
    import httpx2  # mcp's own HTTP client
    from mcp import Client, MCPError, StdioServerParameters
    from mcp.client.streamable_http import streamable_http_client
    from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST, CallToolResult

    from examples.data.mcp_server import DELIVERY, PRICES
except ImportError:
    raise BadInput("examples/mcp_tools.py needs: pip install 'mcp>=2,<3'") from None

CONNECT_SECONDS = 30


class McpServer:
    """An MCP server: how to reach it, and the session that all calls share."""

    def __init__(
        self,
        command: list[str] | None = None,
        url: str | None = None,
        env: dict | None = None,
        headers: dict | None = None,
    ):
        self.name = url or " ".join(command)
        self.url = url
        self.headers = headers
        self.program = None
        if command:
            self.program = StdioServerParameters(command=command[0], args=command[1:], env=env)
        self.session: Session | None = None

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Client]:
        """Starts the program, or connects to the URL; yields a client with a new session."""
        async with AsyncExitStack() as stack:
            server = self.program
            if self.url:
                timeout = httpx2.Timeout(CONNECT_SECONDS, read=None)
                http = httpx2.AsyncClient(headers=self.headers, timeout=timeout)
                http = await stack.enter_async_context(http)
                server = streamable_http_client(self.url, http_client=http)
            yield await stack.enter_async_context(Client(server))

    async def list_tools(self) -> list[Tool]:
        async with asyncio.timeout(CONNECT_SECONDS), self.connect() as client:
            page = await client.list_tools()
            tools = list(page.tools)
            while page.next_cursor:
                page = await client.list_tools(cursor=page.next_cursor)
                tools += page.tools
        return [McpTool(self, tool.name, tool.description, tool.input_schema) for tool in tools]

    async def call(self, name: str, arguments: dict) -> CallToolResult:
        """Calls a tool. If the server is gone, connects anew and sends the call again, once.

        Raises RuntimeError or ConnectionError with a message for the model."""
        for _ in range(2):
            if self.session is None or not self.session.usable():
                self.session = Session(self)
            session = self.session
            # A deadline cancels this wait, but not the connecting.
            client = await asyncio.shield(session.client)
            try:
                return await client.call_tool(name, arguments)
            except MCPError as error:
                # An HTTP server that was restarted does not know the session. Servers differ in
                # how they report it.
                codes = (CONNECTION_CLOSED, INVALID_REQUEST)
                if error.code not in codes and "session" not in error.message.lower():
                    raise RuntimeError(error.message) from error
                session.over.set()
        raise ConnectionError(f"the MCP server ended twice during this call of {name}")


class Session:
    """An open session, held by one task of its own from beginning to end.

    anyio wants a session entered and left in one task. The tasks that make calls can't be that one:
    their deadlines cancel them, and they end before the session does."""

    def __init__(self, server: McpServer):
        self.over = asyncio.Event()
        self.client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self.hold(server))

    def usable(self) -> bool:
        """Returns whether the session is open, or about to be."""
        return not (self.over.is_set() or self.task.done())

    async def hold(self, server: McpServer) -> None:
        """Opens the session, and closes it when `over` is set or the connection is lost."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS) as limit, server.connect() as client:
                limit.reschedule(None)
                self.client.set_result(client)
                await self.over.wait()
        except Exception as error:
            # A later error reaches the pending calls by itself.
            if not self.client.done():
                problem = f"no connection to {server.name}: {reason(error)}"
                self.client.set_exception(ConnectionError(problem))
        finally:
            self.client.cancel()  # if it has no result: the event loop ends


class McpTool(Tool):
    """One tool of an MCP server; a row's execute_kwargs are arguments beyond the model's choice."""

    def __init__(self, server: McpServer, name: str, description: str | None, parameters: dict):
        function = {"name": name, "description": description or "", "parameters": parameters}
        self.server = server
        self.name = name
        self.schema = {"type": "function", "function": function}

    async def execute(self, request_id: str, arguments: dict, **execute_kwargs) -> str:
        """Returns the tool's text. Raises RuntimeError with the text of a failure."""
        result = await self.server.call(self.name, arguments | execute_kwargs)
        text = "\n".join(map(as_text, result.content))
        if result.is_error:
            raise RuntimeError(text or f"{self.name} failed without a message")
        if not result.content and result.structured_content is not None:
            return json.dumps(result.structured_content)
        return text


def as_text(content) -> str:
    """Returns the text of a content block, or the name of its kind if it has none."""
    inner = getattr(content, "resource", content)  # of an embedded resource
    text = getattr(inner, "text", None)
    return text if isinstance(text, str) else f"[{content.type}]"


def reason(error: BaseException) -> str:
    """Returns the message of the first error in anyio's nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def mcp_tools(**server) -> list[Tool]:
    """Returns the tools of an MCP server: command=, a program to run, or url=, a running server.

    env: variables for the command, which inherits PATH, HOME and little else. headers: for
    every HTTP request. Raises BadInput if the server can't be reached."""
    server = McpServer(**server)
    try:
        # In a thread with an event loop of its own, as one may be running here.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(server.list_tools())).result()
    except Exception as error:
        raise BadInput(f"the MCP server {server.name} can't be reached: {reason(error)}") from error


# ------------------------------------------------------------------------------ the task

SYSTEM_PROMPT = "Look prices up with the tools. End with <answer>N</answer>."
SERVER = [sys.executable, str(Path(__file__).parent / "data" / "mcp_server.py")]
if "MCP_URL" in os.environ:
    TOOLS = mcp_tools(url=os.environ["MCP_URL"])
else:
    TOOLS = mcp_tools(command=SERVER)


def load(split: str) -> list[dict]:
    """Returns the rows of a split, always the same: 50 orders for "val", 400 for "train"."""
    orders = list(itertools.product(range(1, 10), PRICES, DELIVERY))
    random.Random(0).shuffle(orders)
    rows = []
    for i, (count, item, town) in enumerate({"train": orders[50:], "val": orders[:50]}[split]):
        question = f"What do {count} x {item} cost, delivered to {town}?"
        row = {
            "prompt": [{"role": "user", "content": question}],
            "data_source": "mcp_shop",
            "reward_model": {"ground_truth": str(count * PRICES[item] + DELIVERY[town])},
            "extra_info": {"index": i},
        }
        rows.append(row)
    return rows
