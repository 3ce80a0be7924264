"""Trains agents written for the OpenAI client unchanged: a chat endpoint on loopback whose
model is the policy.

Subclass `EndpointLoop` in a task file, decorate it with @register, and hand the two strings
that it gets to any framework:

    from flatrl.chat.endpoint import EndpointLoop

    @register("my_agent")
    class MyAgent(EndpointLoop):
        async def agent(self, base_url, api_key, row):
            client = self.openai(base_url, api_key)
            ...             # calls the model, its own tools, other agents
            return None     # or the reward; without one the task's `reward` is asked

Every rollout has its own base_url and its own key. What the agent asks there, by chat
completions or Responses, is recorded as exact tokens (see flatrl.chat.client.ChatClient, which
also works in process, without HTTP). The table in flatrl/chat/openai_api.py says what a request
may hold. Whoever computes the reward may also post it:

    POST {base_url}/reward   {"reward": 1.0}       # before the agent returns

The server binds to 127.0.0.1 at a free port, and answers nobody without the rollout's key. See
examples/langgraph_math.py."""

import asyncio
import hmac
import importlib
import json
import os
import secrets
import socket

from jinja2 import TemplateError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from agent_loop import call, finite, in_thread
from flatrl.chat import openai_api
from flatrl.chat.client import ChatAgentLoop, ChatClient, OutOfBudget

MAX_BODY = 32 << 20  # bytes of a request
MAX_SECONDS = 60.0  # for sending a request


class BadBody(ValueError):
    """The body of a request can't be read: status, message and code."""


async def _json_of(request: Request) -> dict:
    """Reads the body of a request. Raises BadBody, and what json.loads raises: RecursionError
    where it is nested deeply."""
    body = bytearray()
    size = 0
    try:
        async with asyncio.timeout(MAX_SECONDS):
            # Read to its end even if it is too long: who still sends does not see an answer.
            async for chunk in request.stream():
                size += len(chunk)
                if size <= MAX_BODY:
                    body += chunk
    except ClientDisconnect:
        raise BadBody(499, "the client has gone", "client_closed_request") from None
    except TimeoutError:
        raise BadBody(408, f"the request took more than {MAX_SECONDS:g} seconds",
                      "request_timeout") from None
    if size > MAX_BODY:
        raise BadBody(413, f"the request has more than {MAX_BODY} bytes", "request_too_large")
    return json.loads(body)


def _error(status: int, message: str, code: str) -> JSONResponse:
    """Returns an error in OpenAI's form."""
    error = {"message": message, "type": "invalid_request_error", "code": code}
    headers = {"connection": "close"} if status == 408 else {}
    return JSONResponse({"error": error}, status, headers)


class Connection(AutoHTTPProtocol):
    """A connection that is closed when no request has begun for MAX_SECONDS.

    A head that comes letter by letter is none."""

    def connection_made(self, transport):
        super().connection_made(transport)
        self.check(None)

    def check(self, before):
        """Closes the connection if it waits in the same place as MAX_SECONDS ago."""
        waits = self.cycle is None or self.cycle.response_complete
        state = waits, self.cycle
        if waits and state == before:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(MAX_SECONDS, self.check, state)


class ChatEndpoint:
    """One server for a run, on the agent loops' event loop; the first rollout starts it."""

    def __init__(self):
        self.clients: dict[str, tuple[ChatClient, str]] = {}  # a rollout's name -> client, key
        self.url: str | None = None
        self.started: asyncio.Future | None = None
        self.app = Starlette(routes=[
            Route("/{name}/v1/chat/completions", self.completions, methods=["POST"]),
            Route("/{name}/v1/responses", self.responses, methods=["POST"]),
            Route("/{name}/v1/reward", self.reward, methods=["POST"]),
            Route("/{name}/v1/models", self.models),
        ])  # fmt: skip

    async def add(self, client: ChatClient) -> tuple[str, str, str]:
        """Returns the name, base_url and api_key of a new rollout."""
        if self.started is None:
            self.started = asyncio.ensure_future(self.start())
        await asyncio.shield(self.started)
        name = secrets.token_hex(8)
        key = secrets.token_urlsafe(24)
        self.clients[name] = client, key
        return name, f"{self.url}/{name}/v1", key

    async def start(self) -> None:
        """Starts the server, and waits until it answers."""
        import uvicorn
        from openai import AsyncOpenAI

        # A proxy must not get calls to loopback, nor their keys.
        direct = [os.environ[name] for name in ("no_proxy", "NO_PROXY") if os.environ.get(name)]
        if "*" not in direct:
            hosts = ",".join(dict.fromkeys([*direct, "127.0.0.1"]))
            os.environ["no_proxy"] = hosts
            os.environ["NO_PROXY"] = hosts
        # This import takes seconds, in which the event loop must go on.
        await in_thread(importlib.import_module, "vllm.entrypoints.openai.responses.utils")
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.openai = AsyncOpenAI(base_url=self.url, api_key="none", max_retries=0)
        self.server = uvicorn.Server(uvicorn.Config(
            self.app, log_level="error", lifespan="off", http=Connection, backlog=4096,
            timeout_keep_alive=MAX_SECONDS))
        self.serving = asyncio.ensure_future(self.server.serve(sockets=[listening]))
        while not self.server.started:
            if self.serving.done():
                problem = self.serving.exception()
                raise RuntimeError("the chat endpoint did not start") from problem
            await asyncio.sleep(0.01)

    def client_of(self, request: Request) -> ChatClient | None:
        """Returns the client of the rollout that a request names, if it has that one's key."""
        client, key = self.clients.get(request.path_params["name"], (None, ""))
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if client and hmac.compare_digest(sent.encode(), key.encode()):
            return client
        return None

    async def completions(self, request: Request) -> Response:
        return await self.reply(request, self.chat)

    async def responses(self, request: Request) -> Response:
        return await self.reply(request, self.respond)

    async def reward(self, request: Request) -> Response:
        return await self.reply(request, self.take_reward)

    async def models(self, request: Request) -> Response:
        if self.client_of(request) is None:
            return _error(401, "unknown trajectory or wrong key", "invalid_api_key")
        return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def chat(self, client: ChatClient, body: dict) -> Response:
        """Answers a request for a chat completion."""
        stream = body.pop("stream", False)
        options = body.get("stream_options") or {}
        completion = await openai_api.complete(client, body)
        if not stream:
            return JSONResponse(completion.model_dump())
        chunks = openai_api.chunks(completion, bool(options.get("include_usage")))
        events = openai_api.server_sent(chunks, named=False)
        return StreamingResponse(events, media_type="text/event-stream")

    async def respond(self, client: ChatClient, body: dict) -> Response:
        """Answers a request of the Responses API."""
        stream = body.pop("stream", False)
        completion = await openai_api.complete(client, openai_api.chat_of(body))
        response = openai_api.response_of(completion, body)
        if not stream:
            return JSONResponse(response)
        events = openai_api.server_sent(openai_api.events(response), named=True)
        return StreamingResponse(events, media_type="text/event-stream")

    async def take_reward(self, client: ChatClient, body: dict) -> Response:
        """Takes the rollout's reward."""
        client.reward = finite(body["reward"], "a reward")
        return JSONResponse({})

    async def reply(self, request: Request, make) -> Response:
        """Returns what `await make(client, body)` makes of a request, or its error in OpenAI's
        form."""
        client = self.client_of(request)
        if client is None:
            return _error(401, "unknown trajectory or wrong key", "invalid_api_key")
        try:
            task = asyncio.ensure_future(make(client, await _json_of(request)))
            # Nobody waits for the reply of a client that has gone, perhaps to ask again.
            while not task.done():
                await asyncio.wait({task}, timeout=0.5)
                if not task.done() and await request.is_disconnected():
                    task.cancel()
            if task.cancelled():
                return _error(499, "the client has gone", "client_closed_request")
            return task.result()
        except OutOfBudget as error:
            return _error(400, str(error), "context_length_exceeded")
        except BadBody as error:
            return _error(*error.args)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError,
                TemplateError) as error:
            return _error(400, f"{type(error).__name__}: {error}", "invalid_request")


ENDPOINT = ChatEndpoint()


class EndpointLoop(ChatAgentLoop):
    """The base class of agents that speak HTTP: a subclass writes `agent`, as an async
    function or as a plain one, which then runs in a thread.

    constrains: whether replies keep to a response_format, and are not trained then; see the
    table in openai_api.py."""

    constrains = True

    async def agent(self, base_url: str, api_key: str, row: dict) -> float | None:
        raise TypeError(f"{type(self).__name__} has no agent method")

    def openai(self, base_url: str, api_key: str):
        """Returns an AsyncOpenAI client. All clients of a run share one connection pool,
        because making one takes longer than using it."""
        return ENDPOINT.openai.with_options(base_url=base_url, api_key=api_key)

    async def chat(self, client: ChatClient, **row) -> float | None:
        name, base_url, api_key = await ENDPOINT.add(client)
        try:
            return await call(self.agent, base_url, api_key, row)
        finally:
            del ENDPOINT.clients[name]
