"""examples/sokoban.py: what can be pushed, its levels and their solver, rollouts, and the built-in model's games."""


import pytest
from conftest import REPO
from test_maze import given_to_the_kit, read_demonstrations
from test_tree import play

from data import load_rows, load_task

sokoban = load_task(str(REPO / "examples" / "sokoban.py"))
WALLS = frozenset(sokoban.BORDER | {(1, 2)})


@pytest.fixture(scope="module")
def built():
    return given_to_the_kit(sokoban)


@pytest.mark.parametrize("player, box, move, after", [
    ((2, 2), (3, 3), "l", ((2, 1), (3, 3))),  # walks
    ((2, 2), (3, 3), "u", ((2, 2), (3, 3))),  # against a wall inside
    ((4, 1), (3, 3), "d", ((4, 1), (3, 3))),  # against the border
    ((3, 2), (3, 3), "r", ((3, 3), (3, 4))),  # pushes
    ((3, 3), (3, 4), "r", ((3, 3), (3, 4))),  # against the border
    ((3, 2), (2, 2), "u", ((3, 2), (2, 2))),  # against the wall inside
    ((3, 2), (3, 3), "l", ((3, 1), (3, 3))),  # does not pull
])  # fmt: skip
def test_moves(player, box, move, after):
    assert sokoban.after(WALLS, player, box, move) == after


def test_the_solver_finds_the_shortest_solution():
    walls = frozenset(sokoban.BORDER)
    assert sokoban.solve(walls, (3, 1), (4, 3), (4, 4), 8) == "drr"
    assert sokoban.solve(walls, (3, 1), (4, 3), (4, 4), 2) is None
    assert sokoban.solve(walls, (3, 1), (4, 4), (4, 3), 20) is None  # in the corner
    assert sokoban.solve(walls, (3, 1), (4, 4), (4, 4), 0) == ""
    assert sokoban.solve(walls, (2, 4), (2, 3), (2, 4), 12) == "ulldr"  # round the box, and one push


def test_levels_are_different_and_of_the_said_length():
    levels = sokoban.levels()
    assert len(set(levels)) == len(levels) == 2256
    lengths = [len(sokoban.solve(*level, 12)) for level in levels[:300]]
    assert min(lengths) == 3 and max(lengths) == 6
    seeds = {split: [row["extra_info"]["interaction_kwargs"]["seed"] for row in sokoban.load(split)]
             for split in ("val", "train")}  # fmt: skip
    assert seeds == {"val": list(range(256)), "train": list(range(256, 2256))}


# + @ . . . +    the first level's third and fourth row
# + . . $ * +
def test_a_level_is_solved(tokenizer):
    (output,) = play(sokoban, tokenizer, load_rows(sokoban, "val")[0], "d", "x", "r", "r", max_response_tokens=2000)
    assert [message["content"] for message in output.messages if message["role"] == "user"] == [
        "walls l\nbox 1 down 2 right\nwalls of box d\ngoal 0 down 1 right of box",
        "walls d l\nbox 0 down 2 right\nwalls of box d\ngoal 0 down 1 right of box",
        "Illegal: say u, d, l or r.",
        "walls d\nbox 0 down 1 right\nwalls of box d\ngoal 0 down 1 right of box",
    ]
    assert [reward for _, reward in output.turn_rewards] == pytest.approx([-0.1, 1.0])
    assert (output.reward, output.stop_reason, output.metrics["interaction/solved"]) == (0.0, "stop", 1)


def test_a_game_has_ten_moves():
    env = sokoban.Sokoban()
    env.reset(0)
    ends = [env.step("l") for _ in range(10)]
    assert [(reward, done) for _, reward, done, _ in ends] == [(0.0, False)] * 9 + [(0.0, True)]


def test_the_built_in_model_has_seen_poor_games_of_training_levels(built):
    """A third of the moves are the solver's, half of the others the first that no wall stops."""
    games = [(row["extra_info"]["index"], row["demonstration"]) for row in built["rows"]]
    assert {seed for seed, _ in games} <= set(range(256, 2256))
    good = first = n = 0
    for seed, moves in games[:300]:
        env = sokoban.Sokoban()
        env.reset(seed)
        for move in moves:
            free = [way for way in sokoban.MOVES if sokoban.beside(env.player, way) not in env.walls]
            best = sokoban.solve(env.walls, env.player, env.box, env.goal, 10)
            if best and best[0] != free[0] and len(free) == 3:
                good, first, n = good + (move == best[0]), first + (move == free[0]), n + 1
            assert best is None or move in free
            _, _, done, _ = env.step(move)
        assert done
    assert n > 300 and 0.38 < good / n < 0.5 and 0.38 < first / n < 0.5  # 4/9 each


def test_an_observation_is_six_tokens_of_the_built_in_model(built):
    assert len(list(read_demonstrations(sokoban, sokoban.Sokoban(), built, 6))) == 50
