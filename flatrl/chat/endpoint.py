"""Trains agents written for OpenAI's or Anthropic's client: an endpoint whose model is the policy.

Subclass `EndpointLoop` in a task file, decorate it with @register, and hand the two strings that
its `agent` gets to any framework: see docs/agents.md and examples/langgraph_math.py.

Every rollout has its own base_url and key, which Anthropic's client takes as well. Its requests
(chat completions, Responses or Messages) are recorded as exact tokens. openai_api.py and
anthropic_api.py list what they may hold. The agent, or whoever reads the key, may also post its
reward before it returns; one that `agent` returns counts more:

    POST {base_url}/reward   {"reward": 1.0}"""

import asyncio
import functools
import hmac
import importlib
import operator
import os
import secrets
from collections.abc import Callable

from aiohttp import web
from jinja2 import TemplateError

from agent_loop import call, checked_number, in_thread
from flatrl.chat import anthropic_api, openai_api
from flatrl.chat.client import ChatAgentLoop, ChatClient, OutOfBudget

# What a malformed request raises, here or in a template.
BAD_REQUEST = (ValueError, TypeError, LookupError, AttributeError, RecursionError, TemplateError)

# An API's path: chat_of(request), reply_of(completion), and events(reply, request), its stream.
APIS = {
    "chat/completions": (dict, operator.methodcaller("model_dump"), openai_api.chunks),
    "responses": (openai_api.chat_of, openai_api.response_of, openai_api.events),
    "messages": (anthropic_api.chat_of, anthropic_api.message_of, anthropic_api.events),
}

MAX_BODY = 4 << 20  # bytes of a request: while one is read, all rollouts wait
MAX_BODY_WITH_IMAGES = 32 << 20

# Keeps calls to loopback, and their keys, away from HTTP proxies: clients read this at the start.
_hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
if _hosts != "*":
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{_hosts},127.0.0.1"


class ChatEndpoint:
    """The run's server on 127.0.0.1, in the agents' event loop; the first rollout starts it."""

    def __init__(self):
        self.clients: dict[str, tuple[ChatClient, str]] = {}  # a rollout's name -> client, key
        self.url: str | None = None
        self.started: asyncio.Future | None = None

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
        """Starts the server."""
        # This import takes seconds, in which the event loop must go on.
        await in_thread(importlib.import_module, "vllm.entrypoints.openai.responses.utils")

        app = web.Application()
        paths = {path: functools.partial(self.ask, *api) for path, api in APIS.items()}
        paths |= {"messages/count_tokens": self.count_tokens, "reward": self.take_reward}
        for path, make in paths.items():
            form = anthropic_api.error if path.startswith("messages") else openai_api.error
            handler = functools.partial(self.reply, make, form)
            # Anthropic's client adds v1 to its base_url, OpenAI's does not.
            app.router.add_post("/{name}{v1:(/v1)+}/" + path, handler)

        # A client that leaves cancels its handler, because nobody reads the reply.
        self.runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0, backlog=4096).start()
        ((_, port),) = self.runner.addresses
        self.url = f"http://127.0.0.1:{port}"

    async def ask(self, chat_of, reply_of, events, client: ChatClient, body: dict) -> web.Response:
        """Answers a request for a reply; a stream replays it. The functions: see APIS."""
        stream = body.pop("stream", False)
        reply = reply_of(await client.create(**chat_of(body)))
        if not stream:
            return web.json_response(reply)
        sent = openai_api.server_sent(events(reply, body))
        return web.Response(text="".join(sent), content_type="text/event-stream")

    async def count_tokens(self, client: ChatClient, body: dict) -> web.Response:
        """Counts the tokens of a Messages request."""
        chat = anthropic_api.chat_of(body)
        n_tokens = client.count_tokens(chat["messages"], chat["tools"])
        return web.json_response({"input_tokens": n_tokens})

    async def take_reward(self, client: ChatClient, body: dict) -> web.Response:
        """Keeps the rollout's reward."""
        if client.over:  # the agent's own counts
            raise ValueError("the agent has ended")
        client.reward = checked_number(body["reward"], "a reward")
        return web.json_response({})

    async def reply(self, make: Callable, form: Callable, request: web.Request) -> web.Response:
        """Returns what `make(client, body)` does, or its error, by `form` in the API's words."""
        client, key = self.clients.get(request.match_info["name"], (None, ""))
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        sent = bearer, request.headers.get("x-api-key", "")  # OpenAI's way, Anthropic's
        sent = [each.encode(errors="surrogateescape") for each in sent]
        is_right = any(hmac.compare_digest(each, key.encode()) for each in sent)
        if client is None or not is_right:
            problem = form("unknown rollout or wrong key", "invalid_api_key")
            return web.json_response(problem, status=401)
        limit = MAX_BODY_WITH_IMAGES if client.loop.processor else MAX_BODY
        try:
            body = await request.clone(client_max_size=limit).json()
            return await make(client, body)
        except OutOfBudget as error:
            problem = form(str(error), "context_length_exceeded")
        except BAD_REQUEST as error:
            problem = form(f"{type(error).__name__}: {error}", "invalid_request")
        return web.json_response(problem, status=400)


ENDPOINT = ChatEndpoint()


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
