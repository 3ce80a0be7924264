"""Any environment behind an OpenEnv server as the user; every trajectory has its own session.

This is an adapter: it shows how such a server is connected. It was not shown to learn.

    pip install openenv-core
    export OPENENV=http://localhost:8000 OPENENV_ACTION='{"message": "TEXT"}' OPENENV_SEEN=messages
    accelerate launch train.py --task examples/openenv_task.py --max_response_tokens 2048 \\
        --model Qwen/Qwen2.5-0.5B-Instruct

    OPENENV           the server's address
    OPENENV_ACTION    what is sent each turn: a JSON object in which "TEXT" stands for what the
                      policy said
    OPENENV_SEEN      the fields of an observation that the policy sees (default: all, as JSON)
    OPENENV_SYSTEM    the system prompt, if there is to be one: it should say how to act

The server's rewards are those of the turns. The policy reads why the server refused an action. A
row is a seed for the server's `reset`. A server takes one session at a time, unless its
environment says SUPPORTS_CONCURRENT_SESSIONS: start it with as many sessions as there are
trajectories in a step. (The file is not called openenv.py, because `import openenv` would find it
instead of the package.)"""

import json
import os

from agent_loop import BadInput, Interaction, finite
from examples.environments import episodes

try:
    from openenv.core import GenericEnvClient
except ImportError:
    raise BadInput("examples/openenv_task.py needs: pip install openenv-core") from None

try:
    URL = os.environ["OPENENV"]
    ACTION = json.loads(os.environ.get("OPENENV_ACTION", '{"message": "TEXT"}'))
except (KeyError, ValueError) as error:
    raise BadInput(f"OPENENV is a server's address, OPENENV_ACTION a JSON object: {error!r}") from None
SEEN = os.environ.get("OPENENV_SEEN", "").split()
if "OPENENV_SYSTEM" in os.environ:
    SYSTEM_PROMPT = os.environ["OPENENV_SYSTEM"]


class OpenEnv(Interaction):
    """The server as the user; it has a session for each trajectory, kept under its request_id."""

    name = "openenv"

    def __init__(self):
        self.sessions = {}

    async def start(self, request_id: str, *, seed: int, **kwargs) -> str:
        """Opens a session and resets it to the seed; returns the first observation."""
        self.sessions[request_id] = GenericEnvClient(base_url=URL)
        result = await self.sessions[request_id].reset(seed=seed, **kwargs)
        return describe(result.observation)

    async def generate_response(self, request_id: str, messages: list[dict], **kwargs) -> tuple:
        """Sends the last message as an action; returns (done, observation, reward, metrics)."""
        action = fill(ACTION, messages[-1]["content"] or "")
        try:
            result = await self.sessions[request_id].step(action)
        except RuntimeError as error:  # the server's words; a connection that is gone raises others
            return False, f"Refused: {error}", 0.0, {"refused": 1}
        reward = finite(result.reward or 0, "its reward")
        return bool(result.done), describe(result.observation), reward, {"steps": 1}

    async def finalize(self, request_id: str) -> None:
        session = self.sessions.pop(request_id, None)
        if session:
            await session.close()


def fill(action, text: str):
    """Returns the action with the text in place of "TEXT"."""
    if isinstance(action, dict):
        return {name: fill(value, text) for name, value in action.items()}
    return text if action == "TEXT" else action


def describe(observation: dict) -> str:
    """Returns what the policy reads of an observation: the fields SEEN, or all."""
    fields = [observation.get(name) for name in SEEN] if SEEN else [observation]
    lines = [field if isinstance(field, str) else json.dumps(field, default=str) for field in fields]
    return "\n".join(lines)


INTERACTIONS = [OpenEnv()]


def load(split: str) -> list[dict]:
    """Returns the rows of a split: 64 sessions for "val", 1,000 others for "train"."""
    return episodes("openenv", split)


def reward(output, row: dict) -> float:
    """Returns 0.0: the server has paid for every turn already."""
    return 0.0
