"""It discovers bisection: what no imitation of its teacher knows, the reward teaches.

    torchrun --nproc_per_node 2 train.py --task examples/bisection.py --agent guess --lr 1e-3 \\
        --adv_estimator by_state --whiten_advantages --entropy_coef 0.03 --num_steps 100 \\
        --prompts_per_step 4 --group_size 64 --prompts_per_mini_batch 1

    user: 0 to 31   assistant: 20   user: 0 to 19   assistant: 9   ...   (five guesses)

The built-in model has seen a teacher who guesses at random: docs/credit.md#in-training."""

import random
from dataclasses import dataclass

from agent_loop import AgentLoopBase, register
from examples.methods import by_state  # noqa: F401  (an advantage estimator)
from examples.tiny_models import build_warm_model

SIZE = 32
TURNS = 5
GAMES = 600 * 32  # of the teacher


@dataclass
class Game:
    """A number to guess. It counts the guesses, and knows what they have left."""

    number: int
    low: int = 0
    high: int = SIZE - 1
    n_guesses: int = 0
    found: bool = False

    def told(self) -> list[dict]:
        return [{"role": "user", "content": f"{self.low} to {self.high}"}]

    def over(self) -> bool:
        return self.found or self.n_guesses == TURNS

    def guess(self, text: str | None) -> None:
        """Counts a guess. One that is not among what is left tells nothing."""
        self.n_guesses += 1
        self.found = text == str(self.number)
        if text in map(str, range(self.low, self.number)):
            self.low = int(text) + 1
        if text in map(str, range(self.number + 1, self.high + 1)):
            self.high = int(text) - 1


def load(split: str) -> list[dict]:
    """Returns a game for each number; for "train" many times, because a step takes several."""
    times = {"train": SIZE, "val": 1}[split]
    rows = []
    for number in [*range(SIZE)] * times:
        rows.append({"prompt": Game(0).told(), "extra_info": {"number": number}})
    return rows


def reward(output, row: dict):
    """Is not called: the agent loop sets each reward."""


@register("guess")
class Guess(AgentLoopBase):
    """A game. The rollouts of a group have different numbers, so that by_state can compare them."""

    async def run(self, sampling_params, **row):
        game = Game((row["extra_info"]["number"] + row["rollout_n"]) % SIZE)
        stops = self.stop_token_ids(sampling_params)
        trajectory = self.start(row)
        states = trajectory.metrics["states"] = []
        while True:
            states.append(f"{game.high - game.low + 1} left, guess {game.n_guesses + 1}")
            game.guess(await self.assistant_turn(trajectory, sampling_params))
            if game.over() or not self.append(trajectory, game.told(), None, stops):
                trajectory.reward = float(game.found)
                return trajectory.output()


def teach(game: Game) -> list[dict]:
    """Returns the chat of a game. The teacher guesses at random among what is left."""
    chat = []
    while not game.over():
        guess = str(random.randint(game.low, game.high))
        chat += [*game.told(), {"role": "assistant", "content": guess}]
        game.guess(guess)
    return chat


def teachers_chat() -> list[dict]:
    """Returns a game of the teacher; nine of ten begin with less than 0 to 31."""
    game = Game(random.randrange(SIZE))
    if random.random() < 0.9:
        game.low, game.high = sorted(random.choices(range(SIZE), k=2))
        game.number = random.randint(game.low, game.high)
    return teach(game)


def build_model(path: str) -> None:
    """Writes the default model to the folder `path`: train.py calls it without a --model."""
    chats = [teachers_chat() for _ in range(GAMES)]
    build_warm_model(path, chats, pieces=[" to ", *map(str, range(SIZE))])
