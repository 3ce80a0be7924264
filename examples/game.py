"""A game of several turns, each with a reward: an environment is the simulated user.

It learns slowly: in 40 steps the sampled reward goes from 0.0 to 0.19 at best, where a player who
bisects earns 0.718 (docs/credit.md).

    accelerate launch train.py --task examples/game.py --max_response_tokens 256     # tiny model
    accelerate launch train.py --task examples/game.py --max_response_tokens 512 \\
        --model Qwen/Qwen2.5-0.5B-Instruct

    user       Find my number from 10 to 99.
    assistant  <answer>50</answer>
    user       Higher: 51-99.                    turn reward 0.085: the interval shrank, and
                                                 a turn has its price
    assistant  <answer>20</answer>
    user       Illegal: 20 is not in 51-99.      turn reward -0.1

The tiny model has learned the form of an answer, and guesses blindly: half of its guesses are
anything from 10 to 99, legal or not. It has to learn to heed the interval, and to bisect it. A
game has up to eight turns, good and bad ones, so it matters which of them is praised
(docs/credit.md has the comparison). Nothing has to be downloaded. --train_files and --val_files
may hold games of your own: an empty prompt (or a system message) and
extra_info.interaction_kwargs {"name", "seed", and arguments of NumberHunt, like "low" and "high"}.

All reward is per turn, so the task's own `reward` is 0: it would be added to what the turns
have earned. `--algo ppo` and `reinforce_pp` credit a turn's reward where it falls, the group
estimators (grpo, rloo, ...) sum a trajectory's, and `gigpo` compares turns that met the same
interval. The "outcome" of --filter_metric is the task's own reward: for dynamic sampling give
`--filter_metric total`."""

import math
import random
import re
from pathlib import Path

from examples.environments import EnvInteraction, IllegalAction, episodes, play, seen_before_turns
from examples.tiny_models import build_warm_model

SYSTEM_PROMPT = "Guess with <answer>N</answer>."


class NumberHunt:
    """Find a number; a wrong guess is answered with the interval that is left.

    A guess earns the logarithm of the factor by which it shrinks the interval, as a share of the
    whole logarithm, less the price of a turn. Whatever the guesses are, these shares sum to 1: a
    game that is won earns 1 - PRICE * turns."""

    PRICE = 0.05

    def __init__(self, low: int = 10, high: int = 99, turns: int = 7):
        self.low = low
        self.high = high
        self.turns_left = turns
        self.first_size = high - low + 1

    def reset(self, seed: int) -> str:
        """Chooses the number; returns the first message."""
        self.secret = random.Random(seed).randint(self.low, self.high)
        return f"Find my number from {self.low} to {self.high}."

    def step(self, action: str) -> tuple[str, float, bool, dict]:
        """Takes a guess; returns (observation, reward, done, info). Raises IllegalAction."""
        guesses = re.findall(r"<answer>\s*(-?[0-9]{1,9})\s*</answer>", action)
        if len(guesses) != 1:  # a list of guesses is no guess
            raise IllegalAction("say one <answer>N</answer>.")
        guess = int(guesses[0])
        old_size = self.high - self.low + 1
        if not self.low <= guess <= self.high:
            raise IllegalAction(f"{guess} is not in {self.low}-{self.high}.")
        self.turns_left -= 1
        won = guess == self.secret
        if won:
            self.low = guess
            self.high = guess
            observation = "Found!"
        elif guess < self.secret:
            self.low = guess + 1
            observation = f"Higher: {self.low}-{self.high}."
        else:
            self.high = guess - 1
            observation = f"Lower: {self.low}-{self.high}."
        new_size = self.high - self.low + 1
        earned = math.log(old_size / new_size) / math.log(self.first_size) - self.PRICE
        done = won or self.turns_left == 0
        return observation, earned, done, {"won": int(won), "guesses": 1}


INTERACTIONS = [EnvInteraction("number_hunt", NumberHunt)]


def load(split: str) -> list[dict]:
    """Returns the rows of a split: 64 games for "val", 1,000 others for "train"."""
    return episodes("number_hunt", split)


def reward(output, row: dict) -> float:
    """Returns 0.0: the environment has paid for every turn already.

    For gigpo it notes the state of each turn, which is what the user said before it."""
    output.metrics["states"] = seen_before_turns(output)
    return 0.0


def demonstration(seed: int, turns: int = 8) -> list[dict]:
    """Returns a game of a beginner, half of whose guesses are in the interval, the others anywhere."""
    env = NumberHunt()

    def guess() -> str:
        low, high = (env.low, env.high) if random.random() < 0.5 else (10, 99)
        return f"<answer>{random.randint(low, high)}</answer>"

    return play(env, SYSTEM_PROMPT, seed, guess, turns)


def build_model(path: str | Path) -> None:
    """Writes the default model to the folder `path`: train.py calls it when there is no --model."""
    seeds = random.sample(range(64, 10**6), 400 * 16)  # not those of "val"
    build_warm_model(path, [demonstration(seed) for seed in seeds])
