"""Environments with `reset` and `step` as an agent's simulated user: see examples/maze.py."""

from collections.abc import Callable

from agent_loop import Interaction, numeric_entries


class IllegalAction(ValueError):
    """`read` or an environment's `step` raises it, changing nothing; the model reads its text."""


class EnvInteraction(Interaction):
    """Makes an environment the user: its observations are what the user says.

    An environment has the methods of one of these, and optionally `close`:

        yours      reset(seed) -> observation; step(action) -> (observation, reward, done, info)
        gymnasium  reset(seed) -> (observation, info), and step returns terminated, truncated
        textarena  a game of one player, with a name that ends in -raw

    Rewards belong to their turns. Numbers in info are summed and logged as
    rollout/interaction/NAME/*. Methods run on the event loop, so they must be fast.

    Each trajectory gets its own environment, `make(**kwargs)`, reset to a seed; both come from the
    row's interaction_kwargs. The first observation opens the conversation, so prompts are empty.
    `read` makes an action of the model's text. An illegal action costs `illegal_reward`."""

    def __init__(self, name: str, make: Callable, read: Callable = str, illegal_reward=-0.1):
        self.name = name
        self.make = make
        self.read = read
        self.illegal_reward = illegal_reward
        self.envs = {}  # request_id -> the trajectory's environment

    async def start(self, request_id: str, *, seed: int, **kwargs) -> str:
        """Makes and resets the trajectory's environment; returns the first observation."""
        env = self.envs[request_id] = self.make(**kwargs)
        if hasattr(env, "get_observation"):
            env.reset(num_players=1, seed=seed)
            return new_messages(env)
        observation = env.reset(seed=seed)
        return str(observation[0] if isinstance(observation, tuple) else observation)

    async def generate_response(self, request_id: str, messages: list[dict], **kwargs) -> tuple:
        """Takes the last message as the action; returns (done, observation, reward, metrics)."""
        env = self.envs[request_id]
        try:
            *result, info = env.step(self.read(messages[-1]["content"] or ""))
        except IllegalAction as error:
            # The game continues; --max_assistant_turns bounds how often this may happen.
            return False, f"Illegal: {error}", self.illegal_reward, {"illegal": 1}
        if hasattr(env, "get_observation"):
            (done,) = result
            observation = new_messages(env)
            reward = env.close()[0][0] if done else 0.0  # player 0's
        else:
            observation, reward, *ends = result
            done = any(ends)
        return done, str(observation), reward, numeric_entries(info)

    async def finalize(self, request_id: str):
        """Closes the trajectory's environment, if it has one to close."""
        env = self.envs.pop(request_id, None)
        if hasattr(env, "close"):
            env.close()


def new_messages(env) -> str:
    """Returns what a game of textarena told its player since the last call."""
    player, messages = env.get_observation()
    return "\n".join(text for sender, text, _ in messages if sender != player)


def episodes(name: str, split: str, n_val: int = 64, n_train: int = 1000) -> list[dict]:
    """Returns a split's rows for the `EnvInteraction` of this name: one for each seed."""
    rows = []
    for seed in range(n_val) if split == "val" else range(n_val, n_val + n_train):
        kwargs = {"name": name, "seed": seed}
        rows.append({"prompt": [], "extra_info": {"index": seed, "interaction_kwargs": kwargs}})
    return rows
