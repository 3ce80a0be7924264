"""The errors of `python -m flatrl.compare`: A against A, and against a B that learns faster.

    python bench/compare.py
    python bench/compare.py --comparisons 100 --pairs 20

A run takes a tenth of a second: a table of logits learns nim against random moves, with
flatrl's GRPO. Like a run of train.py, it counts with the mean of its evaluations. With equal
seeds, A against A would be equal to the last digit, so B gets seeds of its own. Then B gets a
larger learning rate, with seeds of its own and with A's.
"""

from functools import cache
from statistics import fmean, median, stdev

import common
import torch
from torch import Tensor

from flatrl.compare import compare
from losses import aggregate, grpo_advantages, policy_loss

STICKS = 12  # at most; who takes the last one wins
TURNS = 6  # of the policy, at most
PROMPTS, GROUP = 8, 8
STEPS, EVAL_EVERY = 12, 4
HELD_OUT = 256  # games of an evaluation
LR = 0.1
OTHER_SEEDS = 1_000_000  # added to B's, so that its runs are independent of A's


def play(table: Tensor, sticks: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Plays a game from each number of sticks, (N,). table: (STICKS + 1, 3) logits of moves.

    Returns the sticks before each move of the policy, its moves minus one, the mask, (N, T) each,
    and the rewards, (N,)."""
    turns = []
    rewards = torch.zeros(len(sticks))
    chances = table.detach().softmax(-1)
    for _ in range(TURNS):
        moves = torch.multinomial(chances[sticks], 1, generator=generator)[:, 0]
        turns.append((sticks, moves, sticks > 0))
        left = (sticks - moves - 1).clamp(min=0)
        rewards += (sticks > 0) & (left == 0)
        answers = torch.randint(1, 4, left.shape, generator=generator)
        sticks = (left - answers).clamp(min=0)
    return *(torch.stack(column, 1) for column in zip(*turns)), rewards


@cache  # the rows share A's runs
def train(lr: float, seed: int) -> float:
    """Returns the mean held-out reward over the evaluations of a run."""
    generator = torch.Generator().manual_seed(seed)
    table = (0.3 * torch.randn(STICKS + 1, 3, generator=generator)).requires_grad_()
    optimizer = torch.optim.Adam([table], lr)
    groups = torch.arange(PROMPTS).repeat_interleave(GROUP)
    held_out = torch.arange(HELD_OUT) % STICKS + 1
    evaluations = []
    for step in range(1, STEPS + 1):
        prompts = torch.randint(1, STICKS + 1, (PROMPTS,), generator=generator)
        states, moves, mask, rewards = play(table, prompts[groups], generator)
        advantages = grpo_advantages(rewards, groups)[:, None].expand(mask.shape)
        logprobs = table.log_softmax(-1)[states, moves]
        loss, _ = policy_loss("ppo", logprobs, logprobs.detach(), advantages, mask)
        optimizer.zero_grad()
        aggregate(loss, mask).backward()
        optimizer.step()
        if step % EVAL_EVERY == 0:
            *_, rewards = play(table, held_out, torch.Generator().manual_seed(0))
            evaluations.append(rewards.mean().item())
    return fmean(evaluations)


def measure(factor: float, shift: int, comparisons: int, pairs: int) -> dict:
    """Returns how some comparisons of at most so many pairs ended.

    factor: B's learning rate by A's. shift: added to B's seeds."""

    def run(name: str, seed: int) -> float:
        if name == "A":
            return train(LR, seed)
        return train(LR * factor, seed + shift)

    done = [list(compare(run, range(i * pairs, (i + 1) * pairs))) for i in range(comparisons)]
    differences = [pair.b - pair.a for each in done for pair in each]
    decided = [each[-1] for each in done if each[-1].decided]
    return {
        "factor": factor,
        "equal_seeds": not shift,
        "comparisons": comparisons,
        "limit": pairs,
        "a_better": sum(pair.high < 0 for pair in decided),
        "b_better": sum(pair.low > 0 for pair in decided),
        "median_pairs": median(pair.pairs for pair in decided) if decided else None,
        "mean": fmean(differences),
        "sd": stdev(differences),
    }


def main() -> None:
    args = common.make_parser(__doc__, comparisons=100, pairs=10).parse_args()
    torch.set_num_threads(1)
    rows = []
    for shift, factors in (OTHER_SEEDS, (1, 1.1, 1.25, 1.5, 2)), (0, (1.05, 1.1, 1.25)):
        for factor in factors:
            rows.append(measure(factor, shift, args.comparisons, args.pairs))
            print(rows[-1], flush=True)
    common.write_rows(args.out, rows)


if __name__ == "__main__":
    main()
