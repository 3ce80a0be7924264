"""How close does each estimator of advantages come to the true advantage of each turn?

    python bench/credit.py                                               # docs/credit.md
    python bench/credit.py --task my_task.py --estimators grpo median    # with one of your own

In two games the true advantages under a given policy are known by enumeration. That policy plays
rollouts, and train.estimate_advantages gets them as it does in training. No model is needed.
"""

import itertools
import math
import random
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace

import common
import torch

import data
import train
from agent_loop import AgentLoopOutput
from examples import bisection, nim
from losses import group_sum
from rollout import Rollouts

# ---------------------------------------------------------------- games and their values


class Bisection:
    """The example's teacher. A state is (low, high, guesses made). The number is hidden.

    As in the example, a group plays each number once."""

    def start(self, row: int, n: int) -> tuple[int, tuple]:
        """Returns the number and the state of rollout n of a prompt."""
        return (row + n) % bisection.SIZE, (0, bisection.SIZE - 1, 0)

    def label(self, state: tuple) -> tuple:
        """Returns the state as gigpo and by_state see it: how much is left, and which guess."""
        low, high, n_guesses = state
        return high - low, n_guesses

    def policy(self, state: tuple) -> dict[int, float]:
        low, high, _ = state
        return dict.fromkeys(range(low, high + 1), 1 / (high + 1 - low))

    def outcomes(self, state: tuple, guess: int, number: int | None) -> Iterator[tuple]:
        """Yields (probability, next state or None, reward): for the number, or for all left."""
        low, high, _ = state
        numbers = range(low, high + 1) if number is None else [number]
        for each in numbers:
            game = bisection.Game(each)
            game.low, game.high, game.n_guesses = state
            game.guess(str(guess))
            after = None if game.over() else (game.low, game.high, game.n_guesses)
            yield 1 / len(numbers), after, float(game.found)


class Nim:
    """Random moves against the perfect player. A state is (sticks,). Nothing is hidden."""

    def start(self, row: int, n: int) -> tuple[int, tuple]:
        winnable = [sticks for sticks in range(5, 21) if sticks % 4]
        return 0, (winnable[row % len(winnable)],)

    def label(self, state: tuple) -> tuple:
        return state

    def policy(self, state: tuple) -> dict[int, float]:
        moves = [*map(int, nim.allowed(*state))]
        return dict.fromkeys(moves, 1 / len(moves))

    def outcomes(self, state: tuple, move: int, _) -> list[tuple]:
        left = state[0] - move
        if not left:
            return [(1.0, None, 1.0)]
        answers = [left % 4]
        if left % 4 == 0:  # whatever the player answers
            answers = [int(n) for n in nim.allowed(left)]
        outcomes = []
        for n in answers:
            after = (left - n,) if left > n else None
            outcomes.append((1 / len(answers), after, 0.0))
        return outcomes


GAMES = {"bisection": Bisection(), "nim": Nim()}


@cache
def value(game, state: tuple | None, hidden: int | None = None) -> float:
    """Returns V, the expected reward from a state on, also for one who knows what is hidden."""
    if state is None:
        return 0.0
    chances = game.policy(state)
    return sum(chance * action_value(game, state, a, hidden) for a, chance in chances.items())


@cache
def action_value(game, state: tuple, action: int, hidden: int | None = None) -> float:
    """Returns Q, the expected reward if this action is taken first."""
    expected = 0.0
    for chance, after, reward in game.outcomes(state, action, hidden):
        expected += chance * (reward + value(game, after, hidden))
    return expected


# ---------------------------------------------------------------- rollouts


def play(game, hidden: int, state: tuple | None) -> tuple[list[tuple], float]:
    """Returns the (state, action) of each turn of a game, and its reward."""
    turns = []
    while state is not None:
        chances = game.policy(state)
        [action] = random.choices([*chances], [*chances.values()])
        turns.append((state, action))
        outcomes = [*game.outcomes(state, action, hidden)]
        [(_, state, reward)] = random.choices(outcomes, [chance for chance, *_ in outcomes])
    return turns, reward


def sample(game, n_prompts: int, group_size: int) -> data.Batch:
    """Returns groups of games, in which a turn is a token of the game and one of the policy."""
    outputs = []
    for row, n in itertools.product(range(n_prompts), range(group_size)):
        hidden, state = game.start(row, n)
        turns, reward = play(game, hidden, state)
        mask = [0, 1] * len(turns)
        output = AgentLoopOutput(
            prompt_ids=[hidden],
            response_ids=[0] * len(mask),
            response_mask=mask,
            response_logprobs=[0.0] * len(mask),
            response_versions=[each - 1 for each in mask],
            reward=reward,
            metrics={"states": [game.label(state) for state, _ in turns]},
            extra={"prompt": row, "sample": n, "segment": 0, "turns": turns},
        )
        outputs.append(output)
    return data.make_batch(outputs)


# ---------------------------------------------------------------- estimators

ERROR = 0.1  # of the values of a critic that is off: its standard deviation
N_PLAYED = 8  # games that are played on from a state

error = cache(lambda game, state: random.gauss(0, ERROR))


def critic_value(critic: str, game, state: tuple, hidden: int) -> float:
    """Returns a critic's value of a state. "played on": the wins of copies of the game."""
    if critic == "played on":
        chance = value(game, state, hidden)
        return sum(random.random() < chance for _ in range(N_PLAYED)) / N_PLAYED
    return value(game, state) + (critic == "critic off") * error(game, state)


# Names, each with flags of train.py, and the critic of --algo ppo.
ESTIMATORS = {name: ({"algo": name}, "") for name in "grpo drgrpo rloo opo gigpo".split()}
ESTIMATORS["reinforce_pp"] = ({"algo": "reinforce_pp", "kl_coef": 0.0}, "")
ESTIMATORS["by_state"] = ({"adv_estimator": "by_state"}, "")  # of examples/methods.py
CRITICS = {"critic off": (1.0, 0.5, 0.0), "exact critic": (1.0, 0.0), "played on": (0.0,)}
for critic, lams in CRITICS.items():
    for lam in lams:
        ESTIMATORS[f"ppo, {critic}, lam {lam:g}"] = ({"algo": "ppo", "lam": lam}, critic)


def estimate(game, batch: data.Batch, flags: dict, critic: str) -> torch.Tensor:
    """Returns what train.py estimates as the advantages of all turns, (turns,)."""
    args = train.Args(**flags)
    mask = batch["response_mask"].bool()
    if "values" in args.estimator_takes:
        values = [
            critic_value(critic, game, state, *output.prompt_ids)
            for output in batch.outputs
            for state, _ in output.extra["turns"]
        ]
        batch["values"] = torch.zeros(mask.shape).masked_scatter(mask, torch.tensor(values))
    train.set_token_rewards(SimpleNamespace(args=args), batch, step=0)
    advantages = train.estimate_advantages(batch, Rollouts(batch.outputs), args, {})
    return advantages[mask].double()


# ---------------------------------------------------------------- against the truth


def squared_means(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns E[x | label]^2 for each x, NaN where a label occurs once.

    Without bias: it is the mean product of two different samples with this label."""
    n = group_sum(torch.ones_like(x), labels)
    products = group_sum(x, labels).square() - group_sum(x.square(), labels)
    return products / (n * (n - 1))


def compare(columns: torch.Tensor) -> dict[str, float]:
    """Returns how the estimates of some turns differ from the truth: see docs/credit.md."""
    estimate, truth, luck, _, state, pair = columns
    error = estimate - truth
    # E[luck | pair] is 0. Without its part of the error, the means are more exact.
    steady = error - luck * (luck * error).sum() / luck.square().sum().clamp(min=1e-9)
    squares = squared_means(steady, pair) - squared_means(steady, state)
    bias = squares.nanmean().nan_to_num().clamp(min=0)
    by_chance = 2 * steady.var() * math.sqrt(2 * len(pair.unique())) / len(pair)
    numbers = {
        "truth": truth.square().mean().sqrt(),
        "correlation": torch.corrcoef(columns[:2])[0, 1].nan_to_num(),  # 0 if all truths are 0
        "bias": bias.sqrt(),
        "bias_limit": by_chance.sqrt(),  # two standard errors, if there is no bias
        "noise": (error.square().mean() - bias).sqrt(),
    }
    return {name: round(number.item(), 4) for name, number in numbers.items()}


def measure(game, chosen: dict, options) -> Iterator[dict]:
    """Yields a row for each estimator, with numbers for all turns together, then for each."""
    facts = []  # of each turn of all rounds
    estimates: dict = {name: [] for name in chosen}
    ids: dict = {}  # of states and of pairs
    for _ in range(options.rounds):
        batch = sample(game, options.prompts, options.group_size)
        for output in batch.outputs:
            for number, pair in enumerate(output.extra["turns"], 1):
                q = action_value(game, *pair)
                labels = [ids.setdefault(key, len(ids)) for key in (pair[0], pair)]
                truth = round(q - value(game, pair[0]), 9)
                facts.append((truth, output.reward - q, number, *labels))
        for name, how in chosen.items():
            estimates[name].append(estimate(game, batch, *how))
    known = torch.tensor(facts, dtype=torch.float64).T
    truth, _, number, *_ = known
    for name in chosen:
        found = torch.cat(estimates[name])
        found *= truth.square().sum() / (found * truth).sum()  # now its slope on the truth is 1
        columns = torch.cat([found[None], known])
        turns = [columns[:, number == turn] for turn in range(1, int(number.max()) + 1)]
        compared = [compare(some) for some in (columns, *turns)]
        yield {"estimator": name} | {key: [each[key] for each in compared] for key in compared[0]}


def main() -> None:
    parser = common.make_parser(__doc__, prompts=64, group_size=32, rounds=10)
    parser.add_argument("--task", help="a file with estimators of your own")
    parser.add_argument("--estimators", nargs="+", default=ESTIMATORS, metavar="NAME")
    options = parser.parse_args()
    if options.task:
        data.load_task(options.task, [])
    chosen = {name: ({"adv_estimator": name}, "exact critic") for name in options.estimators}
    chosen |= {name: ESTIMATORS[name] for name in {*chosen} & {*ESTIMATORS}}
    random.seed(0)
    rows = []
    for title, game in GAMES.items():
        for row in measure(game, chosen, options):
            rows.append({"game": title} | row)
            print(*(f"{name} {value}" for name, value in rows[-1].items()), sep="\n  ")
    common.write_rows(options.out, rows)


if __name__ == "__main__":
    main()
