"""Any textarena game for one player by its name: the game's own words, rules and score.

This is an adapter: it shows how such a game is connected. It was not shown to learn.

    pip install textarena
    accelerate launch train.py --task examples/textarena_task.py --max_response_tokens 256
    TEXTARENA=FrozenLake-v0 accelerate launch train.py --task examples/textarena_task.py \\
        --max_assistant_turns 20 --max_response_tokens 4096 --model Qwen/Qwen2.5-0.5B-Instruct
    python -m examples.textarena_task                                       # lists the games

TEXTARENA is the game's id. Games for several players are refused; some games, like Wordle,
download word lists. Each trajectory has a game of its own, reset to its row's seed. The game's
rules open the conversation, and what it says later follows turn by turn (it is the "-raw" variant,
which says nothing twice). The reward comes at the end, from the game: mostly 0 to 1; for
GuessTheNumber it is how near the last guess was. After two invalid moves in a row a game is over.
The built-in model, for GuessTheNumber, is warmed up on blind guesses. (The file is not called
textarena.py, because `import textarena` would find it instead of the package.)"""

import os
import random
from pathlib import Path

from agent_loop import BadInput
from examples.environments import EnvInteraction, episodes, play
from examples.tiny_models import build_warm_model

try:
    import textarena
    from textarena.envs.registration import ENV_REGISTRY
except ImportError:
    raise BadInput("examples/textarena_task.py needs: pip install textarena") from None

NAME = os.environ.get("TEXTARENA", "GuessTheNumber-v0")
PLAYER = 0


class TextArena:
    """A game as `EnvInteraction` wants it. Raises BadInput if there is no such game."""

    def __init__(self):
        if f"{NAME}-raw" not in ENV_REGISTRY:
            raise BadInput(f"TEXTARENA={NAME}: there is no such game; python -m examples.textarena_task lists them")
        self.env = textarena.make(f"{NAME}-raw")

    def reset(self, seed: int) -> str:
        """Starts a game; returns its rules. Raises BadInput if it is for several players."""
        state = random.getstate()  # textarena seeds the generator that everybody shares
        try:
            self.env.reset(num_players=1, seed=seed)
        except AssertionError as error:  # how textarena refuses a number of players
            raise BadInput(f"TEXTARENA={NAME} is no game for one player: {error}") from None
        finally:
            random.setstate(state)
        return self.new_messages()

    def step(self, text: str) -> tuple[str, float, bool, dict]:
        """Takes the player's words; returns (observation, reward, done, info)."""
        done, _ = self.env.step(text)
        if not done:
            return self.new_messages(), 0.0, False, {"steps": 1}
        rewards, infos = self.env.close()
        invalid = int(infos[PLAYER]["invalid_move"])
        return "", float(rewards[PLAYER]), True, {"steps": 1, "invalid": invalid}

    def new_messages(self) -> str:
        """Returns what the game has said since the last call, without the player's own words."""
        _, messages = self.env.get_observation()
        players = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(text.strip() for _, text, kind in messages if kind != players)


INTERACTIONS = [EnvInteraction("textarena", TextArena)]


def load(split: str) -> list[dict]:
    """Returns the rows of a split: 64 games for "val", 1,000 others for "train"."""
    TextArena().reset(0)  # a wrong name is refused before anything is loaded
    return episodes("textarena", split)


def reward(output, row: dict) -> float:
    """Returns 0.0: the game has paid for its last turn already.

    A game that a limit cut off has earned nothing."""
    return 0.0


def demonstration(seed: int) -> list[dict]:
    """Returns the chat of a game of blind guesses."""

    def guess() -> str:
        return f"[{random.randint(1, 20)}]"

    return play(TextArena(), None, seed, guess, turns=4)


def build_model(path: str | Path) -> None:
    """Writes the default model to the folder `path`."""
    seeds = random.sample(range(2000, 10**6), 40 * 16)
    build_warm_model(path, [demonstration(seed) for seed in seeds])


if "TEXTARENA" in os.environ:
    # train.py builds it once for all runs, and it is for GuessTheNumber: give --model.
    del build_model

if __name__ == "__main__":
    print(*sorted(name.removesuffix("-raw") for name in ENV_REGISTRY if name.endswith("-raw")), sep="\n")
