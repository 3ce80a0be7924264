"""Sokoban in a room of 6 x 6 cells, move by move: push the box on the goal, never into a corner.

It learns slowly: in 30 steps the greedy reward goes from 0.000 to 0.285 - 0.332 (docs/credit.md).

    accelerate launch train.py --task examples/sokoban.py --algo gigpo --lr 1e-3 --num_steps 30 \\
        --eval_every 5 --max_assistant_turns 10 --max_response_tokens 192

    user       walls l                           + + + + + +
               box 1 down 2 right                + . . . . +
               walls of box d                    + . . . . +
               goal 0 down 1 right of box        + @ . . . +      @ the player, $ the box,
    assistant  d                                 + . . $ * +      * the goal
    user       ...                               + + + + + +

A rollout earns 1 if the box is on the goal after ten moves or fewer. A level has one box, up to two
walls inside, and a solution of three to six moves. Levels of the evaluation are not those of
training. The built-in model has seen a poor player, a third of whose moves are a solver's."""

import functools
import itertools
import random
import sys
from pathlib import Path

from examples import environments
from examples.environments import EnvInteraction, IllegalAction, how_far
from examples.tiny_models import build_from_demonstrations

SYSTEM_PROMPT = "Push the box on the goal: u, d, l or r."
MOVES = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1)}
INSIDE = list(itertools.product(range(1, 5), repeat=2))  # (row, column) of the cells inside
BORDER = set(itertools.product(range(6), repeat=2)) - set(INSIDE)
# The parts of an observation; each is one token of the built-in model.
SEEN = ("walls {}", "\nbox {}", " {}", "\nwalls of box {}", "\ngoal {}", " {} of box")
LONGEST = 6  # the most moves of a shortest solution
TURNS = 10
N_VAL, N_TRAIN = 256, 2000


def beside(place: tuple, move: str) -> tuple:
    """Returns the next place in the direction of a move."""
    return place[0] + MOVES[move][0], place[1] + MOVES[move][1]


def after(walls: frozenset, player: tuple, box: tuple, move: str) -> tuple:
    """Returns where player and box are after a move; one that is not possible changes nothing."""
    place = beside(player, move)
    pushed = beside(box, move) if place == box else box
    return (player, box) if place in walls or pushed in walls else (place, pushed)


def solve(walls: frozenset, player: tuple, box: tuple, goal: tuple, most: int) -> str | None:
    """Returns the first of the shortest solutions of at most so many moves, None if there is none."""
    states = {(player, box): ""}
    queue = list(states.items())
    for state, moves in queue:  # the list grows meanwhile
        if state[1] == goal:
            return moves
        for move in MOVES:
            new = after(walls, *state, move)
            if new not in states and len(moves) < most:
                states[new] = moves + move
                queue.append((new, moves + move))
    return None


@functools.cache
def levels() -> list[tuple]:
    """Returns all levels, (walls, player, box, goal), each once: always the same."""
    generator = random.Random(0)
    found = {}
    while len(found) < N_VAL + N_TRAIN:
        player, box, goal, *inner = generator.sample(INSIDE, 3 + generator.randrange(3))
        level = (frozenset(BORDER.union(inner)), player, box, goal)
        if len(solve(*level, most=LONGEST) or "") >= 3:
            found[level] = None
    return list(found)


def walls_beside(place: tuple, walls: frozenset) -> str:
    """Returns the directions in which there are walls beside a place."""
    return " ".join(move for move in MOVES if beside(place, move) in walls) or "none"


def way(start: tuple, end: tuple) -> tuple[str, str]:
    """Returns how far `end` is down and right of `start`."""
    return how_far(end[0] - start[0], "down", "up"), how_far(end[1] - start[1], "right", "left")


class Sokoban:
    """A level that is played."""

    def reset(self, seed: int) -> str:
        """Takes the level of this number; returns what is seen at the start."""
        self.walls, self.player, self.box, self.goal = levels()[seed]
        self.turns_left = TURNS
        return self.seen()

    def seen(self) -> str:
        """Returns the walls beside player and box, and where the box and the goal are."""
        values = [walls_beside(self.player, self.walls), *way(self.player, self.box),
                  walls_beside(self.box, self.walls), *way(self.box, self.goal)]  # fmt: skip
        return "".join(map(str.format, SEEN, values))

    def step(self, action: str) -> tuple[str, float, bool, dict]:
        """Makes a move; returns (observation, reward, done, info). Raises IllegalAction for other words."""
        if action not in MOVES:
            raise IllegalAction("say u, d, l or r.")
        self.turns_left -= 1
        self.player, self.box = after(self.walls, self.player, self.box, action)
        solved = self.box == self.goal
        return self.seen(), float(solved), solved or not self.turns_left, {"solved": int(solved)}


INTERACTIONS = [EnvInteraction("sokoban", Sokoban)]


def load(split: str) -> list[dict]:
    """Returns a row for each level: N_VAL for "val", N_TRAIN others for "train"."""
    return environments.episodes("sokoban", split, N_VAL, N_TRAIN)


def reward(output, row: dict) -> float:
    """Returns 0.0: the environment has paid. Notes the state of each turn, what was seen before it."""
    output.metrics["states"] = environments.seen_before_turns(output)
    return 0.0


def poor_move(level: Sokoban) -> str:
    """Returns a move of a poor player: a third are the solver's, half of the others are the
    first of u, d, l and r that no wall stops."""
    if random.random() < 1 / 3:
        solution = solve(level.walls, level.player, level.box, level.goal, most=TURNS)
        if solution:
            return solution[0]
    free = [move for move in MOVES if beside(level.player, move) not in level.walls]
    return random.choice([free[0], random.choice(free)])


def build_model(path: str | Path) -> None:
    """Writes the default model to the folder `path`: train.py calls it when there is no --model."""
    rows = random.choices(load("train"), k=2400)
    rows = environments.demonstrated(rows, Sokoban, poor_move, TURNS)
    some_walls = [" ".join(moves) or "none" for n in range(5) for moves in itertools.combinations(MOVES, n)]
    down, right = zip(*(way((0, 0), (n, n)) for n in range(-3, 4)))
    pieces = environments.texts(SEEN, [some_walls, down, right, some_walls, down, right])
    build_from_demonstrations(path, sys.modules[__name__], rows, pieces=pieces, batch_size=16)
