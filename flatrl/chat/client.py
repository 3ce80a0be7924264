"""Agents written for the OpenAI client, in process; flatrl/chat/endpoint.py is for HTTP."""

import asyncio
import base64
import copy
import hashlib
import json
import re
import time
from contextlib import suppress

from agent_loop import AgentLoopBase
from flatrl.chat.openai_api import read_request
from flatrl.chat_template import function_call, with_template_variables
from flatrl.tools import parse_tool_calls, set_tool_calls

TEXT_PARTS = ("text", "input_text", "output_text")  # those of chat completions and Responses


class OutOfBudget(RuntimeError):
    """No tokens ("length") or no turns ("max_turns") are left for another reply."""


class ChatClient:
    """Stands in for `AsyncOpenAI`: agents call client.chat.completions.create(messages=...).

    A call whose messages extend those of an earlier call, including its reply, continues that
    token sequence. Any other call starts a sequence of its own, so rewritten histories and
    sub-agents become several outputs. Without tokens or turns left, calls raise OutOfBudget."""

    def __init__(self, loop, sampling_params, row_images=()):
        self.loop = loop
        self.sampling_params = sampling_params
        self.row_images = row_images
        self.trusted = []  # the row's messages: see agent_loop.render
        self.trajectories = []  # one per token sequence; each ends with a reply
        self.tasks = []  # one per call: those still running at the end are cancelled
        self.turns = 0  # calls so far
        self.over = False  # whether the agent is done
        self.reward = None  # the agent's own; if it stays None, the task's reward is asked
        self.refused = None  # "length" or "max_turns" if the last call got no reply
        self.chat = self.completions = self  # for client.chat.completions.create

    async def create(self, *, extra_body=None, timeout=None, extra_headers=None, **request):
        """Returns an openai ChatCompletion, with vLLM's prompt_token_ids and token_ids.

        flatrl/chat/openai_api.py lists what a request may hold. Its `chat_template_kwargs` override
        --chat_template_args. timeout and extra_headers, options of OpenAI's client, have no effect.
        Raises ValueError for what is refused there, a stream, and an image that is no data: URL."""
        asked = read_request(request | (extra_body or {}))
        sampling = dict(self.sampling_params)
        max_tokens = asked["max_completion_tokens"] or asked["max_tokens"]
        if max_tokens:
            sampling["max_tokens"] = min(max_tokens, sampling.get("max_tokens") or max_tokens)
        if asked["stop"]:
            stop = asked["stop"]
            sampling["stop"] = [stop] if isinstance(stop, str) else stop
        tools = [] if asked["tool_choice"] == "none" else list(asked["tools"] or [])
        variables = json.dumps(asked["chat_template_kwargs"] or {}, sort_keys=True)

        self.refused = None
        messages, images = self._plain_chat(request["messages"])
        identities = [_identity(message) for message in messages]
        earlier = self._earlier(identities, tools, variables)
        trajectory = self._extended(earlier, messages, images, tools, variables)
        self.turns += 1
        trajectory.turn = self.turns
        n_tokens_before = len(trajectory.response_ids)
        text = await self._sample(trajectory, earlier, sampling)

        only_one = asked["parallel_tool_calls"] is False
        stop_string = self._read(trajectory, text, sampling.get("stop") or (), tools, only_one)
        trajectory.identities = [*identities, _identity(trajectory.messages[-1])]
        trajectory.asked_with = tools, variables
        self.trajectories.append(trajectory)
        return self._completion(trajectory, n_tokens_before, stop_string)

    def _read(self, trajectory, text, stops, tools, only_one):
        """Reads a reply's tool calls. Returns the stop string that it cuts off, or None."""
        trajectory.count("turns")
        reply = trajectory.messages[-1]
        text = text or ""
        found = [string for string in stops if string in text]
        stop_string = min(found, key=text.index, default=None)
        if stop_string:  # sampled, but not part of the reply
            text = text.split(stop_string)[0]
            reply["content"] = reply["content"].split(stop_string)[0]
        if text and tools:
            args = self.loop.args
            content, calls = parse_tool_calls(text, args.tool_parser, self.loop.tokenizer, tools)
            if any(call["error"] for call in calls):
                calls = []  # malformed ones stay text, as in vLLM
            if only_one:
                calls = calls[:1]
            if calls:
                set_tool_calls(reply, content, calls, trajectory.turn)
            trajectory.count("tool_calls", len(calls))
            offered = [tool.get("function", {}).get("name") for tool in tools]
            for name in [made["name"] for made in calls if made["name"] in offered]:
                trajectory.count(f"tool_calls/{name}")
        return stop_string

    async def _sample(self, trajectory, earlier, sampling):
        """Returns the text of a turn. If sampling fails, the earlier trajectory is put back."""
        if earlier:
            self.trajectories.remove(earlier)  # parallel calls never share a trajectory
        task = asyncio.ensure_future(self.loop.assistant_turn(trajectory, sampling))
        self.tasks.append(task)
        try:
            return await task
        except BaseException:
            if earlier:
                self.trajectories.append(earlier)
            raise

    def _earlier(self, identities, tools, variables):
        """Returns the longest trajectory that messages with these identities extend, or None."""

        def is_extended(trajectory):
            history = trajectory.identities
            is_prefix = len(history) < len(identities) and history == identities[: len(history)]
            return is_prefix and trajectory.asked_with == (tools, variables)

        extended = filter(is_extended, self.trajectories)
        return max(extended, key=lambda each: len(each.messages), default=None)

    def _extended(self, earlier, messages, images, tools, variables):
        """Returns a copy of the earlier trajectory with the new messages, or else a new one."""
        if self.over or 0 < self.loop.args.max_assistant_turns <= self.turns:
            self._give_up("max_turns")
        loop = copy.copy(self.loop)
        loop.tokenizer = with_template_variables(loop.tokenizer, variables)
        if earlier:
            trajectory = earlier.copy()
            new_messages = messages[len(trajectory.messages) :]
            new_images = images[len(trajectory.images) :]
            stops = loop.stop_token_ids(self.sampling_params)
            fits = loop.append(trajectory, new_messages, tools, stops, new_images)
        else:
            trajectory = loop.start({"prompt": messages, "images": images}, tools, self.trusted)
            fits = loop.room(trajectory) > 0
        if not fits:
            self._give_up("length")
        return trajectory

    def count_tokens(self, messages: list[dict], tools: list[dict]) -> int:
        """Returns how many tokens these messages have as a prompt."""
        prompt, images = copy.copy(self)._plain_chat(messages)  # on a copy: this refuses no reply
        row = {"prompt": prompt, "images": images}
        return len(self.loop.start(row, tools, self.trusted).prompt_ids)

    def _give_up(self, reason):
        """Raises OutOfBudget, and remembers the reason."""
        self.refused = reason
        raise OutOfBudget(f"the trajectory has no room for another reply: {reason}")

    async def close(self):
        """Cancels the calls that outlive the agent (in threads, over HTTP), and refuses more."""
        self.over = True
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _plain_chat(self, messages):
        """Returns a call's messages as templates expect them, and their images in order."""
        if len(messages) > self.loop.window:  # each has a token: rendering them would take long
            self._give_up("length")
        images = []
        row_images = iter(self.row_images)
        messages = [self._plain(message, images, row_images) for message in messages]
        n_left = len([*row_images])
        if 0 < n_left < len(self.row_images):
            raise ValueError("send all images of the row's prompt, or none, or some as image_url")
        if len(str(messages)) > 64 * self.loop.window:  # tokenising them would take long
            self._give_up("length")
        return messages, images

    def _plain(self, message, images, row_images):
        """Returns any client's chat message as templates expect it. Its images go to `images`."""
        if not isinstance(message, dict):
            message = message.model_dump(exclude_none=True)
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = [self._part(part, images, row_images) for part in content]
            if all(part["type"] == "text" for part in content):
                content = "".join(part["text"] for part in content)

        keys = ("role", "name", "tool_call_id", "reasoning_content")
        plain = {key: message[key] for key in keys if message.get(key)}
        if message.get("reasoning"):  # vLLM's new name, and OpenRouter's
            plain.setdefault("reasoning_content", message["reasoning"])
        for key in plain.keys() & {"role", "tool_call_id"}:
            plain[key] = _word(plain[key])
        if plain["role"] == "developer":  # OpenAI's new name for system, unknown to templates
            plain["role"] = "system"
        plain["content"] = content

        for number, call in enumerate(message.get("tool_calls") or ()):
            arguments = call["function"]["arguments"]
            with suppress(ValueError, TypeError):  # no JSON, or a dict already: kept as it is
                arguments = json.loads(arguments)
            # A row's call may have none. Mistral's template wants nine characters.
            call_id = _word(call.get("id") or f"{number:09d}")
            made = function_call(call_id, call["function"]["name"], arguments)
            plain.setdefault("tool_calls", []).append(made)
        return plain

    def _part(self, part, images, row_images):
        """Returns a part of a content. Its image goes to `images`; a hash stays for `_identity`."""
        kind = part.get("type")
        if kind in TEXT_PARTS:
            return {"type": "text", "text": part["text"]}
        if self.loop.processor is None:
            raise ValueError("only text content is supported in chat messages")
        limit = self.loop.args.max_images
        if len(images) == limit:
            raise ValueError(f"supported are {limit} images, see max_images of --agent_args")
        if kind == "image":
            image = next(row_images, None)
            if image is None:
                raise ValueError("supported are the images of the row's prompt, and image_url")
            images.append(image)
            return part
        url = part.get("image_url")
        url = url["url"] if isinstance(url, dict) else url
        head, _, data = str(url).partition(";base64,")
        if not head.startswith("data:image/"):
            raise ValueError(f"supported are text and images as data: URLs, not {kind!r:.80}")
        images.append(base64.b64decode(data))
        return {"type": "image", "image": hashlib.sha256(data.encode()).hexdigest()}

    def _completion(self, trajectory, n_tokens_before, stop_string):
        """Returns the last turn, which follows n_tokens_before tokens, as a ChatCompletion."""
        from openai.types.chat import ChatCompletion

        ids = trajectory.response_ids[n_tokens_before:]
        prompt = trajectory.prompt_ids + trajectory.response_ids[:n_tokens_before]
        message = copy.deepcopy(trajectory.messages[-1])
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        reason = "length" if trajectory.stop_reason == "length" else "stop"
        if "tool_calls" in message:
            reason = "tool_calls"
        choice = {"index": 0, "message": message, "finish_reason": reason, "token_ids": ids}
        choice["stop_reason"] = stop_string  # as in vLLM
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        usage["total_tokens"] = sum(usage.values())
        return ChatCompletion(
            id=f"chatcmpl-{trajectory.request_id}-{self.turns}",
            object="chat.completion",
            model="policy",
            created=int(time.time()),
            choices=[choice],
            usage=usage,
            prompt_token_ids=prompt,
        )


def _identity(message):
    """Returns a message without what clients change: ids, names, space around replies."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    content = message["content"]
    if message["role"] == "assistant" and isinstance(content, str):
        content = content.strip()
    return message["role"], content, json.dumps(calls, sort_keys=True)


def _word(text):
    """Returns a role or a call's id, which templates print, without what spells special tokens."""
    return re.sub(r"[^\w-]", "_", text, flags=re.ASCII)


class ChatAgentLoop(AgentLoopBase):
    """The base class of agents written for the OpenAI client: a subclass writes `chat`.

    A rollout that runs out of tokens, turns or time keeps its replies. Any other error drops it."""

    async def chat(self, client: ChatClient, **row) -> float | None:
        """Holds a row's conversation. May return the reward; else the task's function is asked."""
        raise TypeError(f"{type(self).__name__} has no chat method")

    async def run(self, sampling_params, **row):
        """Runs `chat` with a client of its own; returns the client's outputs."""
        client = ChatClient(self, sampling_params, row.get("images") or ())
        client.trusted, _ = client._plain_chat(row.get("prompt", ()))
        try:
            async with asyncio.timeout(self.args.trajectory_timeout or None) as budget:
                reward = await self.chat(client, **row)
                if reward is not None:
                    client.reward = reward
                cut_off = client.refused  # an agent, or a program, may just end after that
        except Exception:  # frameworks wrap OutOfBudget in errors of their own
            is_full = client.trajectories and self.room(client.trajectories[-1]) < 1
            if not (client.refused or is_full or budget.expired()):
                raise
            cut_off = client.refused or ("length" if is_full else "timeout")
        finally:
            await client.close()
        ordered = sorted(client.trajectories, key=lambda each: each.turn)  # the last asked is last
        outputs = [output for each in ordered for output in each.outputs()]
        if outputs:
            outputs[-1].reward = client.reward
            outputs[-1].stop_reason = cut_off or outputs[-1].stop_reason
        return outputs
