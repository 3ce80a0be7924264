"""Environments with `reset` and `step` as an agent's simulated user: see examples/game.py."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from agent_loop import Interaction, in_thread, numbers


class IllegalAction(ValueError):
    """An environment's `step` raises it, and has then changed nothing; the model reads it."""


class EnvInteraction(Interaction):
    """Makes an environment the user: its observations are what the user says.

    An environment is any object with

        reset(seed) -> observation
        step(action) -> (observation, reward, done, info)      may raise IllegalAction
        close()                                                optional

    where observation and action are texts. Numbers in info are summed and logged as
    rollout/interaction/*. A gymnasium environment needs a wrapper that joins terminated and
    truncated.

    Each trajectory has an environment of its own: `make(**kwargs)`, with what the row's
    interaction_kwargs hold beside name and seed. It is reset to that seed, and the first
    observation opens the conversation: the rows' prompts are empty. `slow` runs reset, step
    and close in a thread, where they delay no other trajectory. `illegal_reward` is the
    reward of a turn whose action was illegal."""

    def __init__(
        self, name: str, make: Callable[..., Any], slow: bool = False, illegal_reward: float = -0.1
    ):
        self.name = name
        self.make = make
        self.slow = slow
        self.illegal_reward = illegal_reward
        self.envs: dict[str, Any] = {}  # request_id -> the trajectory's environment

    async def start(self, request_id: str, *, seed: int, **kwargs) -> str:
        """Makes and resets the trajectory's environment; returns the first observation."""
        self.envs[request_id] = self.make(**kwargs)
        return await self._call(self.envs[request_id].reset, seed)

    async def generate_response(self, request_id: str, messages: list[dict], **kwargs) -> tuple:
        """Takes the last message as action; returns (done, observation, reward, metrics)."""
        action = messages[-1]["content"] or ""
        try:
            result = await self._call(self.envs[request_id].step, action)
        except IllegalAction as error:
            # The game goes on; --max_assistant_turns bounds how often.
            return False, f"Illegal: {error}", self.illegal_reward, {"illegal": 1}
        observation, reward, done, info = result
        return done, observation, reward, numbers(info)

    async def finalize(self, request_id: str):
        """Closes the trajectory's environment, if `make` has not failed."""
        env = self.envs.pop(request_id, None)
        if hasattr(env, "close"):
            await self._call(env.close)

    async def _call(self, method, *args):
        if self.slow:
            return await in_thread(method, *args)
        return method(*args)


def episodes(name: str, split: str, n_val: int = 64, n_train: int = 1000) -> list[dict]:
    """Returns a split's rows for the `EnvInteraction` of this name, one for each seed.

    "val" has n_val seeds, "train" n_train others."""
    seeds = {"train": range(n_val, n_val + n_train), "val": range(n_val)}
    rows = []
    for seed in seeds[split]:
        kwargs = {"name": name, "seed": seed}
        rows.append({"prompt": [], "extra_info": {"index": seed, "interaction_kwargs": kwargs}})
    return rows


def play(
    env, system_prompt: str | None, seed: int, act: Callable[[], str], turns: int
) -> list[dict]:
    """Plays an episode of at most so many turns, in which the assistant says what `act`
    returns.

    Returns its chat, which begins with the system prompt and the first observation."""
    chat = [
        {"role": "system", "content": system_prompt},
        {"role": "user", "content": env.reset(seed)},
    ]
    for _ in range(turns):
        action = act()
        chat.append({"role": "assistant", "content": action})
        done = False
        try:
            observation, _, done, _ = env.step(action)
        except IllegalAction as error:
            observation = f"Illegal: {error}"
        if done:
            break
        chat.append({"role": "user", "content": observation})
    return chat


def said(chat: list[dict]) -> list[str]:
    """Returns what the assistant says in a chat: a row's demonstration."""
    return [message["content"] for message in chat if message["role"] == "assistant"]


def how_far(cells: int, direction: str, opposite: str) -> str:
    """Returns where something is, such as "2 east", or "1 west" for -1 cell."""
    return f"{abs(cells)} {direction if cells >= 0 else opposite}"


def demonstrated(
    rows: list[dict], make: Callable[[], Any], act: Callable[[Any], str], turns: int
) -> list[dict]:
    """Returns the rows, each with a demonstration: an episode of at most so many turns, in
    which the assistant says what `act(environment)` returns."""
    played = []
    for row in rows:
        env = make()
        chat = play(env, None, row["extra_info"]["index"], functools.partial(act, env), turns)
        played.append(row | {"demonstration": said(chat)})
    return played


def seen_before_turns(output) -> list[str]:
    """Returns what the assistant had read last before each of its turns: the states for gigpo."""
    pairs = itertools.pairwise(output.messages)
    return [before["content"] for before, message in pairs if message["role"] == "assistant"]


def texts(parts: Sequence[str], values: Sequence[Sequence[str]]) -> list[str]:
    """Returns every text that the parts can be: parts[i] with each of values[i]."""
    return [part.format(value) for part, of_part in zip(parts, values) for value in of_part]
