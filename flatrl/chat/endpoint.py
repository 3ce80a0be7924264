"""Trains agents written for OpenAI's or Anthropic's client: an endpoint whose model is the policy.

Subclass `EndpointLoop` in a task file, decorate it with @register, and hand the two strings that it
gets to any framework:

    from flatrl.chat.endpoint import EndpointLoop

    CLIENT = openai.AsyncOpenAI(api_key="none", max_retries=0)  # one: a new one takes 80 ms

    @register("my_agent")
    class MyAgent(EndpointLoop):
        async def agent(self, base_url, api_key, row):
            client = CLIENT.with_options(base_url=base_url, api_key=api_key)
            ...             # calls the model, its own tools, other agents
            return None     # or the reward; without one the task's `reward` is asked

Every rollout has its own base_url and key, which Anthropic's client takes as well. Its requests
(chat completions, Responses or Messages) are recorded as exact tokens. openai_api.py and
anthropic_api.py list what they may hold. The agent, or whoever reads the key, may also post its
reward before it returns; one that `agent` returns counts more:

    POST {base_url}/reward   {"reward": 1.0}

The server binds to 127.0.0.1 at a free port. See examples/langgraph_math.py."""

import asyncio
import functools
import hmac
import importlib
import json
import operator
import os
import secrets
from collections.abc import Callable

from jinja2 import TemplateError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agent_loop import call, checked_number, in_thread
from flatrl.chat import anthropic_api, openai_api
from flatrl.chat.client import ChatAgentLoop, ChatClient, OutOfBudget

# What a malformed request raises, here or in a template.
BAD_REQUEST = (ValueError, TypeError, LookupError, AttributeError, RecursionError, TemplateError)

# An API's path: its request as a chat request; a completion as its reply; that reply as a stream.
APIS = {
    "chat/completions": (dict, operator.methodcaller("model_dump"), openai_api.chunks),
    "responses": (openai_api.chat_of, openai_api.response_of, openai_api.events),
    "messages": (anthropic_api.chat_of, anthropic_api.message_of, anthropic_api.events),
}

MAX_BODY = 4 << 20  # bytes of a request: while one is read, all rollouts wait
MAX_BODY_WITH_IMAGES = 32 << 20


def _bypass_proxies() -> None:
    """Keeps the calls to loopback, and their keys, away from HTTP proxies."""
    hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if hosts != "*":
        for name in ("no_proxy", "NO_PROXY"):
            os.environ[name] = f"{hosts},127.0.0.1"


_bypass_proxies()  # now as well, because task files make clients when they are imported


class ChatEndpoint:
    """The run's server, on the event loop of the agent loops; the first rollout starts it."""

    def __init__(self):
        self.clients: dict[str, tuple[ChatClient, str]] = {}  # a rollout's name -> client, key
        self.url: str | None = None
        self.started: asyncio.Future | None = None
        paths = {path: functools.partial(self.ask, *api) for path, api in APIS.items()}
        paths |= {"messages/count_tokens": self.count_tokens, "reward": self.take_reward}
        routes = []
        for path, make in paths.items():
            form = anthropic_api.error if path.startswith("messages") else openai_api.error
            handler = functools.partial(self.reply, make, form)
            # Anthropic's client adds v1 to its base_url, OpenAI's does not.
            for place in ("/{name}/v1", "/{name}/v1/v1"):
                routes.append(Route(f"{place}/{path}", handler, methods=["POST"]))
        self.app = Starlette(routes=routes)

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

        _bypass_proxies()
        # This import takes seconds, in which the event loop must go on.
        await in_thread(importlib.import_module, "vllm.entrypoints.openai.responses.utils")
        quiet = {"log_config": None, "log_level": "error"}  # its own needs an open stdout
        config = uvicorn.Config(
            self.app, port=0, lifespan="off", backlog=4096, timeout_keep_alive=60, **quiet
        )
        self.server = uvicorn.Server(config)
        self.serving = asyncio.ensure_future(self.server.serve())
        while not self.server.started:
            if self.serving.done():
                raise RuntimeError("the chat endpoint did not start") from self.serving.exception()
            await asyncio.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def client_of(self, request: Request) -> ChatClient | None:
        """Returns the client of the request's rollout, or None without that rollout's key."""
        client, key = self.clients.get(request.path_params["name"], (None, ""))
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        for sent in (bearer, request.headers.get("x-api-key", "")):  # OpenAI's way, Anthropic's
            if client and hmac.compare_digest(sent.encode(), key.encode()):
                return client
        return None

    async def ask(self, chat_of, reply_of, events, client: ChatClient, body: dict) -> Response:
        """Answers a request for a reply; a stream replays it. The functions: see APIS."""
        stream = body.pop("stream", False)
        completion = await client.create(**openai_api.arguments(chat_of(body)))
        reply = reply_of(completion)
        if not stream:
            return JSONResponse(reply)
        sent = openai_api.server_sent(events(reply, body))
        return StreamingResponse(sent, media_type="text/event-stream")

    async def count_tokens(self, client: ChatClient, body: dict) -> Response:
        """Counts the tokens of a Messages request."""
        chat = anthropic_api.chat_of(body)
        n_tokens = client.count_tokens(chat["messages"], chat["tools"])
        return JSONResponse({"input_tokens": n_tokens})

    async def take_reward(self, client: ChatClient, body: dict) -> Response:
        """Keeps the rollout's reward."""
        if client.over:  # the agent's own counts
            raise ValueError("the agent has ended")
        client.reward = checked_number(body["reward"], "a reward")
        return JSONResponse({})

    async def reply(self, make: Callable, form: Callable, request: Request) -> Response:
        """Returns the response that `await make(client, body)` returns, or its error.

        form: puts an error into the words of the API."""
        client = self.client_of(request)
        if client is None:
            return JSONResponse(form("unknown rollout or wrong key", "invalid_api_key"), 401)
        try:
            body = await _body(request)
            if len(body) > (MAX_BODY_WITH_IMAGES if client.loop.processor else MAX_BODY):
                return JSONResponse(form("the request is too large", "request_too_large"), 413)
            work = asyncio.ensure_future(make(client, json.loads(body)))
            left = asyncio.ensure_future(request.receive())  # until the client has left
            left.add_done_callback(lambda _: work.cancel())  # nobody reads the reply
            try:
                return await work
            finally:
                left.cancel()
        except (asyncio.CancelledError, ClientDisconnect):
            return Response(status_code=499)
        except OutOfBudget as error:
            return JSONResponse(form(str(error), "context_length_exceeded"), 400)
        except BAD_REQUEST as error:
            problem = form(f"{type(error).__name__}: {error}", "invalid_request")
            return JSONResponse(problem, 400)


ENDPOINT = ChatEndpoint()


async def _body(request):
    """Reads a request to its end: a client that still sends sees no answer. Keeps enough of it."""
    body = bytearray()
    async for chunk in request.stream():
        if len(body) <= MAX_BODY_WITH_IMAGES:
            body += chunk
    return body


class EndpointLoop(ChatAgentLoop):
    """The base class of agents that speak HTTP: a subclass writes `agent`, async or plain."""

    async def agent(self, base_url: str, api_key: str, row: dict) -> float | None:
        raise TypeError(f"{type(self).__name__} has no agent method")

    async def chat(self, client: ChatClient, **row) -> float | None:
        name, base_url, api_key = await ENDPOINT.add(client)
        try:
            return await call(self.agent, base_url, api_key, row)
        finally:
            del ENDPOINT.clients[name]
