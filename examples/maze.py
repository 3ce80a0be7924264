"""An environment of one's own: a maze, a different one for each row, and credit by place.

    accelerate launch train.py --task examples/maze.py --algo gigpo --lr 1e-3 --num_steps 24 \\
        --max_assistant_turns 10 --max_response_tokens 192

    user       open n e                          # # G # #
               goal 1 east 4 north               . . . . #
    assistant  n                                 . # # # #
    user       open e s w                        . . . . #
               goal 1 east 3 north               # A . . .
    assistant  w

A rollout earns 1 if it reaches the goal within ten steps, whichever of them were good. The same
places come back, in a rollout that walks to and fro and in other rollouts of the same maze. `gigpo`
compares the steps that were taken in one place. For that, `reward` notes the state of each turn.
See docs/algorithms.md#a-maze."""

import itertools
import random
import sys

from examples import environments
from examples.tiny_models import build_from_demonstrations

SYSTEM_PROMPT = "Go to the goal: n, e, s or w."
SIZE = 5
WALLS = 0.4  # the share of the cells
NEAREST, FARTHEST = 4, 7  # bounds on the length of the shortest way to the goal
TURNS = 10
EAST, SOUTH = ("east", "west"), ("south", "north")
STEPS = {"n": (-1, 0), "e": (0, 1), "s": (1, 0), "w": (0, -1)}


class Maze:
    """A maze of SIZE x SIZE cells, a start and a goal; places are (row, column)."""

    def reset(self, seed: int) -> str:
        """Makes the maze with this number; returns the first observation."""
        generator = random.Random(seed)
        cells = list(itertools.product(range(SIZE), repeat=2))
        starts = []
        while not starts:
            self.free = {cell for cell in cells if generator.random() > WALLS}
            self.goal = generator.choice(cells)
            self.free.add(self.goal)
            self.distances = self.distances_to_goal()
            starts = [cell for cell in cells if NEAREST <= self.distances.get(cell, 0) <= FARTHEST]
        self.place = generator.choice(starts)
        self.turns_left = TURNS
        return self.seen()

    def distances_to_goal(self) -> dict[tuple, int]:
        """Returns the number of steps to the goal from each place that has a way to it."""
        distances = {self.goal: 0}
        places = [self.goal]
        for place in places:  # the list grows meanwhile
            for step in STEPS:
                neighbour = after(place, step)
                if neighbour in self.free and neighbour not in distances:
                    distances[neighbour] = distances[place] + 1
                    places.append(neighbour)
        return distances

    def open_ways(self) -> list[str]:
        """Returns the steps that no wall stops."""
        return [step for step in STEPS if after(self.place, step) in self.free]

    def seen(self) -> str:
        """Returns the observation: the open ways, and where the goal is."""
        south = how_far(self.goal[0] - self.place[0], *SOUTH)
        east = how_far(self.goal[1] - self.place[1], *EAST)
        ways = " ".join(self.open_ways())
        return f"open {ways}\ngoal {east} {south}"

    def step(self, action: str) -> tuple[str, float, bool, dict]:
        """Takes a step, or stays before a wall; returns (observation, reward, done, info)."""
        if action not in STEPS:
            raise environments.IllegalAction("say n, e, s or w.")
        self.turns_left -= 1
        if action in self.open_ways():
            self.place = after(self.place, action)
        found = self.place == self.goal
        return self.seen(), float(found), found or not self.turns_left, {"found": int(found)}


def after(place: tuple, step: str) -> tuple:
    """Returns the place that a step leads to."""
    return place[0] + STEPS[step][0], place[1] + STEPS[step][1]


def how_far(cells: int, direction: str, opposite: str) -> str:
    """Returns a distance and its direction, such as "2 east", or "1 west" for -1 cell."""
    return f"{abs(cells)} {direction if cells >= 0 else opposite}"


INTERACTIONS = [environments.EnvInteraction("maze", Maze)]


def load(split: str) -> list[dict]:
    """Returns a row for each maze: 256 for "val", 1,000 others for "train"."""
    return environments.episodes("maze", split, n_val=256)


def reward(output, row: dict) -> float:
    """Returns 0.0, because the environment has paid, and notes the state of each turn.

    That is the message before it."""
    pairs = itertools.pairwise(output.messages)
    states = [before["content"] for before, message in pairs if message["role"] == "assistant"]
    output.metrics["states"] = states
    return 0.0


def poor_step(maze: Maze) -> str:
    """Returns a step of a poor walker.

    Three in ten are on a shortest way, half of the others are the first open one."""
    ways = maze.open_ways()
    if random.random() < 0.3:
        return min(ways, key=lambda way: maze.distances[after(maze.place, way)])
    return random.choice([ways[0], random.choice(ways)])


def poor_walk(seed: int) -> list[str]:
    """Returns the steps of the poor walker through the maze with this number."""
    maze = Maze()
    maze.reset(seed)
    steps = []
    done = False
    while not done:
        steps.append(poor_step(maze))
        _, _, done, _ = maze.step(steps[-1])
    return steps


def build_model(path: str) -> None:
    """Writes the default model to the folder `path`: train.py calls it without a --model."""
    rows = []
    for row in random.choices(load("train"), k=1600):
        walk = poor_walk(row["extra_info"]["index"])
        rows.append(row | {"demonstration": walk})
    # Each part of an observation is one token.
    pieces = []
    for n in range(5):
        for steps in itertools.combinations(STEPS, n):
            pieces.append(f"open {' '.join(steps)}")
    cells = range(1 - SIZE, SIZE)
    pieces += [f"\ngoal {how_far(n, *EAST)}" for n in cells]
    pieces += [f" {how_far(n, *SOUTH)}" for n in cells]
    build_from_demonstrations(path, sys.modules[__name__], rows, pieces=pieces)
