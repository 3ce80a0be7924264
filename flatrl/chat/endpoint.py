"""Trains agents written for OpenAI's or Anthropic's client: an endpoint whose model is the policy.

Subclass `EndpointLoop` in a task file, decorate it with @register, and hand the two strings that it
gets to any framework:

    from flatrl.chat.endpoint import EndpointLoop

    @register("my_agent")
    class MyAgent(EndpointLoop):
        async def agent(self, base_url, api_key, row):
            client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
            ...             # calls the model, its own tools, other agents
            return None     # or the reward; without one the task's `reward` is asked

Every rollout has its own base_url and its own key; Anthropic's client takes the same two strings.
The requests, chat completions, Responses or Messages, are recorded as exact tokens (see
flatrl.chat.client.ChatClient, which also works in process, without HTTP). openai_api.py and
anthropic_api.py list what a request may hold. The agent, or whoever else knows the reward, may also
post it before the agent returns:

    POST {base_url}/reward   {"reward": 1.0}

Commands that the policy runs can post one, too, if they read the key. If the policy has a shell,
return the reward from `agent`: that one counts.

The server binds to 127.0.0.1 at a free port, and answers only requests with the rollout's key. See
examples/langgraph_math.py."""

import asyncio
import functools
import hmac
import importlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator

from jinja2 import TemplateError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agent_loop import call, checked_number, in_thread
from flatrl.chat import anthropic_api, openai_api
from flatrl.chat.client import ChatAgentLoop, ChatClient, OutOfBudget

# What a malformed request raises, here or in a template.
BAD_REQUEST = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
    TemplateError,
)

MAX_BODY = 4 << 20  # bytes of a request: while one is read, all rollouts wait
MAX_BODY_WITH_IMAGES = 32 << 20


def _bypass_proxies() -> None:
    """Keeps the calls to loopback, and their keys, away from HTTP proxies."""
    names = ("no_proxy", "NO_PROXY")
    hosts = ",".join(os.environ.get(name, "") for name in names).split(",")
    hosts = dict.fromkeys([*filter(None, hosts), "127.0.0.1"])  # each once
    if "*" not in hosts:
        for name in names:
            os.environ[name] = ",".join(hosts)


class ChatEndpoint:
    """The run's server, on the event loop of the agent loops; the first rollout starts it."""

    def __init__(self):
        self.clients: dict[str, tuple[ChatClient, str]] = {}  # a rollout's name -> client, key
        self.url: str | None = None
        self.started: asyncio.Future | None = None
        openai = openai_api.error
        anthropic = anthropic_api.error
        paths = {
            "chat/completions": (self.chat, openai),
            "responses": (self.respond, openai),
            "messages": (self.message, anthropic),
            "messages/count_tokens": (self.count_tokens, anthropic),
            "reward": (self.take_reward, openai),
        }
        routes = []
        for path, answer in paths.items():
            handler = functools.partial(self.reply, *answer)
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
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(
            self.app, log_level="error", lifespan="off", backlog=4096, timeout_keep_alive=60
        )
        self.server = uvicorn.Server(config)
        self.serving = asyncio.ensure_future(self.server.serve(sockets=[listening]))
        while not self.server.started:
            if self.serving.done():
                problem = self.serving.exception()
                raise RuntimeError("the chat endpoint did not start") from problem
            await asyncio.sleep(0.01)

    def client_of(self, request: Request) -> ChatClient | None:
        """Returns the client of the request's rollout, or None without that rollout's key."""
        client, key = self.clients.get(request.path_params["name"], (None, ""))
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        for sent in (bearer, request.headers.get("x-api-key", "")):  # OpenAI's way, Anthropic's
            if client and hmac.compare_digest(sent.encode(), key.encode()):
                return client
        return None

    async def chat(self, client: ChatClient, body: dict) -> Response:
        """Answers a request for a chat completion."""
        stream = body.pop("stream", False)
        options = body.get("stream_options") or {}
        completion = await client.create(**openai_api.arguments(body))
        if not stream:
            return JSONResponse(completion.model_dump())
        chunks = openai_api.chunks(completion, bool(options.get("include_usage")))
        return _streamed(chunks, named=False)

    async def respond(self, client: ChatClient, body: dict) -> Response:
        """Answers a request of the Responses API."""
        stream = body.pop("stream", False)
        completion = await client.create(**openai_api.arguments(openai_api.chat_of(body)))
        response = openai_api.response_of(completion)
        if not stream:
            return JSONResponse(response)
        return _streamed(openai_api.events(response), named=True)

    async def message(self, client: ChatClient, body: dict) -> Response:
        """Answers a request of the Messages API without `thread`; a stream replays the reply."""
        if body.get("thread"):  # the client then sends the whole conversation each time
            code = "thread_unsupported_request"
            return JSONResponse(anthropic_api.error(400, "not supported: thread", code), 400)
        stream = body.pop("stream", False)
        completion = await client.create(**openai_api.arguments(anthropic_api.chat_of(body)))
        message = anthropic_api.message_of(completion)
        if not stream:
            return JSONResponse(message)
        return _streamed(anthropic_api.events(message), named=True)

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
            problem = form(401, "unknown rollout or wrong key", "invalid_api_key")
            return JSONResponse(problem, 401)
        try:
            body = await _body(request, client.loop.processor is not None)
            if body is None:
                problem = form(413, "the request is too large", "request_too_large")
                return JSONResponse(problem, 413)
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
            problem = form(400, str(error), "context_length_exceeded")
        except BAD_REQUEST as error:
            problem = form(400, f"{type(error).__name__}: {error}", "invalid_request")
        return JSONResponse(problem, 400)


ENDPOINT = ChatEndpoint()


async def _body(request, has_images):
    """Returns the body of a request, or None if it is too large.

    It is read to its end in any case: a client that still sends sees no answer."""
    limit = MAX_BODY_WITH_IMAGES if has_images else MAX_BODY
    body = bytearray()
    async for chunk in request.stream():
        if len(body) <= limit:
            body += chunk
    return body if len(body) <= limit else None


def _streamed(events: Iterator[dict], named: bool) -> Response:
    """Returns events as a stream of server-sent ones. named: each with the name of its type."""
    return StreamingResponse(openai_api.server_sent(events, named), media_type="text/event-stream")


class EndpointLoop(ChatAgentLoop):
    """The base class of agents that speak HTTP: a subclass writes `agent`.

    `agent` is an async function, or a plain one, which then runs in a thread."""

    async def agent(self, base_url: str, api_key: str, row: dict) -> float | None:
        raise TypeError(f"{type(self).__name__} has no agent method")

    async def chat(self, client: ChatClient, **row) -> float | None:
        name, base_url, api_key = await ENDPOINT.add(client)
        try:
            return await call(self.agent, base_url, api_key, row)
        finally:
            del ENDPOINT.clients[name]
