"""Any gymnasium environment with a few actions, as a game of several turns in text.

This is an adapter: it shows how an environment is connected. It was not shown to learn.

    pip install gymnasium
    accelerate launch train.py --task examples/gymnasium_text.py --max_assistant_turns 12
    GYM_ENV=Taxi-v4 GYM_ARGS={} accelerate launch train.py --task examples/gymnasium_text.py \\
        --max_assistant_turns 20 --model Qwen/Qwen2.5-0.5B-Instruct

GYM_ENV is the environment's id (default: a tiny frozen lake). GYM_ARGS, a JSON object, has the
other arguments of `gymnasium.make`. The policy sees the environment as it draws itself, if it has
the render mode "ansi", as FrozenLake, Taxi and CliffWalking have: [X] is where the agent is, in
Taxi (X) the passenger and {X} the goal. Otherwise it sees the observation. It acts by
<answer>NAME</answer>, or by the action's number. The rewards of the steps are those of the turns.
Each trajectory makes an environment of its own (examples.environments.EnvInteraction) and resets it
to the row's seed. The built-in model, for the default lake, is warmed up on random actions: it
knows how to act, not what for."""

import json
import os
import random
import re
from pathlib import Path

from agent_loop import BadInput
from examples.environments import EnvInteraction, IllegalAction, episodes, play
from examples.tiny_models import build_warm_model

try:
    import gymnasium
    from gymnasium.envs.registration import load_env_creator
except ImportError:
    raise BadInput("examples/gymnasium_text.py needs: pip install gymnasium") from None

LAKE = {"desc": ["SFF", "FHF", "FFG"], "is_slippery": False}
GYM_ENV = os.environ.get("GYM_ENV", "FrozenLake-v1")
GYM_ARGS = os.environ.get("GYM_ARGS", json.dumps(LAKE if GYM_ENV == "FrozenLake-v1" else {}))
NAMES = {  # of the actions, from 0 on; other environments' actions are called by their numbers
    "FrozenLake": ["left", "down", "right", "up"],
    "CliffWalking": ["up", "right", "down", "left"],
    "Taxi": ["south", "north", "east", "west", "pickup", "dropoff"],
    "Blackjack": ["stick", "hit"],
    "CartPole": ["left", "right"],
}
# Colours in a drawing become brackets. Taxi's passenger is blue, its goal magenta.
COLOURS = {"4[0-9]": r"[\1]", "34;1": r"(\1)", "35": r"{\1}"}


class TextEnv:
    """A gymnasium environment as `EnvInteraction` wants it.

    actions: name -> the number that gymnasium wants. Raises BadInput if there is no such
    environment, or its actions are not numbered."""

    def __init__(self):
        try:
            spec = gymnasium.spec(GYM_ENV)
            modes = load_env_creator(spec.entry_point).metadata.get("render_modes", ())
            mode = {"render_mode": "ansi"} if "ansi" in modes else {}
            self.env = gymnasium.make(GYM_ENV, **mode, **json.loads(GYM_ARGS))
        except (gymnasium.error.Error, ValueError, TypeError) as error:
            raise BadInput(f"GYM_ENV={GYM_ENV} GYM_ARGS={GYM_ARGS}: {error}") from None
        if not isinstance(self.env.action_space, gymnasium.spaces.Discrete):
            raise BadInput(f"GYM_ENV={GYM_ENV}: its actions are {self.env.action_space}, this example takes Discrete")
        start = int(self.env.action_space.start)
        numbers = range(start, start + int(self.env.action_space.n))
        names = dict(zip(numbers, NAMES.get(spec.name, [])))
        self.actions = {names.get(number, str(number)): number for number in numbers}

    def reset(self, seed: int) -> str:
        observation, _ = self.env.reset(seed=seed)
        return self.describe(observation)

    def step(self, text: str) -> tuple[str, float, bool, dict]:
        """Takes an action; returns (observation, reward, done, info). Raises IllegalAction."""
        answers = re.findall(r"<answer>\s*(\S+?)\s*</answer>", text)
        actions = {str(number): number for number in self.actions.values()} | self.actions
        if len(answers) != 1 or answers[0].lower() not in actions:
            raise IllegalAction(f"say one <answer>...</answer> of {', '.join(self.actions)}.")
        observation, reward, terminated, truncated, _ = self.env.step(actions[answers[0].lower()])
        done = bool(terminated or truncated)
        return self.describe(observation), float(reward), done, {"steps": 1, "earned": int(reward > 0)}

    def describe(self, observation) -> str:
        """Returns the drawing of the environment, without colours; or the observation as text."""
        if self.env.render_mode != "ansi":
            return str(observation)
        drawing = self.env.render()
        for code, brackets in COLOURS.items():
            drawing = re.sub(rf"\x1b\[{code}m([^\x1b]+)\x1b\[0m", brackets, drawing)
        drawing = re.sub(r"\x1b\[[0-9;]*m", "", drawing)
        # A line like "  (Right)" tells the last action.
        lines = [line for line in drawing.splitlines() if line.strip() and not line.startswith("  (")]
        return "\n".join(lines)

    def close(self):
        self.env.close()


SYSTEM_PROMPT = f"Play {GYM_ENV}. Act by <answer>ACTION</answer>, one of: {', '.join(TextEnv().actions)}."
INTERACTIONS = [EnvInteraction("gymnasium", TextEnv)]


def load(split: str) -> list[dict]:
    """Returns the rows of a split: 64 episodes for "val", 1,000 others for "train"."""
    return episodes("gymnasium", split)


def reward(output, row: dict) -> float:
    """Returns 0.0: the environment has paid for every turn already."""
    return 0.0


def demonstration(seed: int, turns: int = 6) -> list[dict]:
    """Returns the chat of an episode of random actions."""
    env = TextEnv()

    def act() -> str:
        return f"<answer>{random.choice(list(env.actions))}</answer>"

    return play(env, SYSTEM_PROMPT, seed, act, turns)


def build_model(path: str | Path) -> None:
    """Writes the default model to the folder `path`."""
    seeds = random.sample(range(2000, 10**6), 100 * 16)
    build_warm_model(path, [demonstration(seed) for seed in seeds])


if os.environ.keys() & {"GYM_ENV", "GYM_ARGS"}:
    del build_model  # train.py builds it once for all runs, and it is for the lake: give --model
