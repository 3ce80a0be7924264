"""Environments with `reset` and `step` as an agent's simulated user: see examples/maze.py."""

import itertools
from collections.abc import Callable
from typing import Any

from agent_loop import Interaction, numeric_entries


class IllegalAction(ValueError):
    """An environment's `step` raises it without changing anything; the model reads its text."""


class EnvInteraction(Interaction):
    """Makes an environment the user: its observations are what the user says.

    An environment is any object with these methods, where observation and action are texts:

        reset(seed) -> observation
        step(action) -> (observation, reward, done, info)      may raise IllegalAction
        close()                                                optional

    Each reward belongs to its turn. Numbers in info are summed and logged as
    rollout/interaction/NAME/*. Methods run on the event loop, so they must be fast.

    Each trajectory gets an environment of its own from `make(**kwargs)`, whose arguments are the
    row's interaction_kwargs except name and seed. It is reset to that seed. The first observation
    opens the conversation, so the rows' prompts are empty. `illegal_reward` is the reward of a turn
    with an illegal action."""

    def __init__(self, name: str, make: Callable[..., Any], illegal_reward: float = -0.1):
        self.name = name
        self.make = make
        self.illegal_reward = illegal_reward
        self.envs: dict[str, Any] = {}  # request_id -> the trajectory's environment

    async def start(self, request_id: str, *, seed: int, **kwargs) -> str:
        """Makes and resets the trajectory's environment; returns the first observation."""
        self.envs[request_id] = self.make(**kwargs)
        return self.envs[request_id].reset(seed)

    async def generate_response(self, request_id: str, messages: list[dict], **kwargs) -> tuple:
        """Takes the last message as the action; returns (done, observation, reward, metrics)."""
        action = messages[-1]["content"] or ""
        try:
            observation, reward, done, info = self.envs[request_id].step(action)
        except IllegalAction as error:
            # The game continues; --max_assistant_turns bounds how often this may happen.
            return False, f"Illegal: {error}", self.illegal_reward, {"illegal": 1}
        return done, observation, reward, numeric_entries(info)

    async def finalize(self, request_id: str):
        """Closes the trajectory's environment, if it has one to close."""
        env = self.envs.pop(request_id, None)
        if hasattr(env, "close"):
            env.close()


def episodes(name: str, split: str, n_val: int = 64, n_train: int = 1000) -> list[dict]:
    """Returns a split's rows for the `EnvInteraction` of this name, one per seed.

    "val" has n_val seeds, "train" n_train others."""
    seeds = {
        "train": range(n_val, n_val + n_train),
        "val": range(n_val),
    }
    rows = []
    for seed in seeds[split]:
        kwargs = {"name": name, "seed": seed}
        rows.append({"prompt": [], "extra_info": {"index": seed, "interaction_kwargs": kwargs}})
    return rows


def seen_before_turns(output) -> list[str]:
    """Returns the message that precedes each of the assistant's turns: the states for gigpo."""
    pairs = itertools.pairwise(output.messages)
    return [before["content"] for before, message in pairs if message["role"] == "assistant"]
