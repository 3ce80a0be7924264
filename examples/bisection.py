"""It discovers bisection: what no imitation of its teacher knows, the reward teaches.

    torchrun --nproc_per_node 2 train.py --task examples/bisection.py --agent guess --lr 1e-3 \\
        --adv_estimator by_state --whiten_advantages --entropy_coef 0.03 --num_steps 100 \\
        --prompts_per_step 4 --group_size 64 --prompts_per_mini_batch 1

    user       0 to 31          a number from 0 to 31, in five guesses
    assistant  20
    user       0 to 19          what is left
    assistant  9

A game earns 1 if it finds the number. The built-in model has seen a teacher who guesses at random
among what is left, and wins 0.533 of the games. Whoever halves what is left wins 31 of 32. Nobody
ever shows that to the model. An evaluation plays each number once, at temperature 0. The run warns
that its rows are also training rows: there are only 32 games.

`by_state` is an advantage estimator of this file. The value of a state is the share of games won
from it, and a guess is as good as what it adds to the value. Two games are in the same state if as
many numbers and guesses are left. For this, the games of a group have different numbers.

The figures are in docs/credit.md#in-training. `python results/bisection_curve.py RUN PICTURE` draws
where a run guesses within what is left."""

import random

import torch

from agent_loop import AgentLoopBase, register
from examples.tiny_models import build_warm_model
from losses import estimator, group_sum, turn_starts

SIZE = 32
TURNS = 5
GAMES = 600 * 32  # of the teacher


class Game:
    """A number to guess. It counts the guesses, and knows what they have left."""

    def __init__(self, number: int):
        self.number = number
        self.low = 0
        self.high = SIZE - 1
        self.n_guesses = 0
        self.found = False

    def told(self) -> list[dict]:
        """Returns the message that tells the player what is left."""
        return [{"role": "user", "content": f"{self.low} to {self.high}"}]

    def over(self) -> bool:
        """Returns True if the number is found, or no guess is left."""
        return self.found or self.n_guesses == TURNS

    def guess(self, text: str | None) -> None:
        """Takes a guess. One that is not among what is left tells nothing, and counts."""
        self.n_guesses += 1
        self.found = text == str(self.number)
        if text in map(str, range(self.low, self.number)):
            self.low = int(text) + 1
        if text in map(str, range(self.number + 1, self.high + 1)):
            self.high = int(text) - 1


def load(split: str) -> list[dict]:
    """Returns a game for each number; for "train" many times, because a step takes several."""
    numbers = list(range(SIZE)) * {"train": SIZE, "val": 1}[split]
    return [{"prompt": Game(0).told(), "extra_info": {"number": number}} for number in numbers]


def reward(output, row: dict):
    """Is not called: the agent loop sets each reward."""


@register("guess")
class Guess(AgentLoopBase):
    """A game. The rollouts of a group have different numbers."""

    async def run(self, sampling_params, **row):
        """Returns the game's output, with the state of each turn for by_state."""
        game = Game((row["extra_info"]["number"] + row["rollout_n"]) % SIZE)
        stops = self.stop_token_ids(sampling_params)
        trajectory = self.start(row)
        states = []
        while True:
            states.append(f"{game.high - game.low + 1} left, guess {game.n_guesses + 1}")
            game.guess(await self.assistant_turn(trajectory, sampling_params))
            if game.over() or not self.append(trajectory, game.told(), None, stops):
                break
        output = trajectory.output()
        output.reward = float(game.found)
        output.metrics["states"] = states
        return output


@estimator("by_state")
def by_state(token_rewards, mask, states):
    """Returns V(next state) - V(state) for the tokens of each guess, (N, S).

    V is the share of the group's games won, among those that came to the state."""
    starts = turn_starts(mask)  # (N, S)
    game = starts.nonzero()[:, 0]  # (turns,)
    won = token_rewards.sum(1)[game]
    values = group_sum(won, states) / group_sum(torch.ones_like(won), states)
    is_last = torch.cat([game[1:] != game[:-1], torch.tensor([True])])
    advantages = torch.where(is_last, won, values.roll(-1)) - values
    turn = starts.flatten().cumsum(0).view_as(mask) - 1  # of each token; -1 before the first
    return mask * advantages[turn]


def teach(game: Game) -> list[dict]:
    """Returns the chat of a game. The teacher guesses at random among what is left."""
    chat = []
    while not game.over():
        guess = str(random.randint(game.low, game.high))
        chat += [*game.told(), {"role": "assistant", "content": guess}]
        game.guess(guess)
    return chat


def teachers_chat() -> list[dict]:
    """Returns a game of the teacher.

    Nine of ten begin with less than 0 to 31, because few games get to the last numbers."""
    game = Game(random.randrange(SIZE))
    if random.random() < 0.9:
        game.low, game.high = sorted(random.choices(range(SIZE), k=2))
        game.number = random.randint(game.low, game.high)
    return teach(game)


def build_model(path: str) -> None:
    """Writes the default model to the folder `path`: train.py calls it without a --model."""
    chats = [teachers_chat() for _ in range(GAMES)]
    build_warm_model(path, chats, batch_size=32, pieces=[" to ", *map(str, range(SIZE))])
