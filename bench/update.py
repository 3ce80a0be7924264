"""How long do scoring and an update take, without sharing, and in a bare loop?

    python bench/update.py --rounds 3           # on a GPU: as in bench/gpu.sh

    flatrl      train.score_tokens; train.optimise: one optimiser step, GRPO, no KL
    unshared    the same, with every trajectory as a sequence of its own
    bare        transformers' forward (sdpa) on whole rows, log-softmax, backward, AdamW

All sides get the same --rows random trajectories, give the same logprobs, and take turns. The table
has the seconds of scoring and of an update, and their ratio to flatrl's.
"""

import statistics
import tempfile

import common
import torch
from transformers import AutoModelForCausalLM

import data
import train
from agent_loop import TokenOutput

LR = 0.0  # the same work, and all sides keep the same weights
COLUMNS = ["response_mask", "unit_tokens", "advantages", "logprobs_rollout"]
# Prompts, and the tokens of each prompt and response. With 32 prompts for 32 rows none is shared.
CASES = [(4, 24, 64), (4, 24, 256), (4, 256, 64), (4, 256, 256), (4, 1024, 64), (32, 24, 64)]


def share_nothing(batch: dict, rows: list[int], is_packed: bool = True) -> data.MicroBatch:
    """Takes the place of data.in_prefix_order."""
    lengths = batch["lengths"][rows].tolist()
    return data.MicroBatch(list(rows), lengths, [0] * len(rows))


def make_batch(n_rows: int, n_prompts: int, P: int, R: int) -> dict:
    """Returns random rows, each a unit, and advantages: prompts of P tokens, responses of R."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 250, (n_prompts, P), generator=generator)
    prompts = prompts.repeat_interleave(n_rows // n_prompts, 0)
    answers = torch.randint(3, 250, (n_rows, R), generator=generator)
    outputs = []
    for prompt, answer in zip(prompts.tolist(), answers.tolist()):
        out = TokenOutput(answer, [0.0] * R, [0] * R, "length", prompt)
        outputs.append(common.as_output(prompt, out))
    batch = data.collate(outputs)
    advantages = torch.randn(n_rows, 1, generator=generator).repeat(1, R)
    return batch | {"unit_tokens": batch["response_mask"].sum(-1), "advantages": advantages}


class Flatrl:
    """flatrl's own scoring and update. in_prefix_order: finds what rows share."""

    def __init__(self, args: train.Args, accelerator, in_prefix_order):
        self.args = args
        self.in_prefix_order = in_prefix_order
        self.learner = train.Learner(train.Policy(args), LR, 1, args, accelerator)

    def score(self, batch: dict) -> torch.Tensor:
        data.in_prefix_order = self.in_prefix_order
        return train.score_tokens(self.learner.net, batch, self.args)["logprobs"]

    def update(self, batch: dict) -> None:
        data.in_prefix_order = self.in_prefix_order
        step = (train.policy_objective, batch, COLUMNS, range(len(batch["lengths"])))
        train.optimise(self.learner, *step)


class Bare:
    """A bare loop of transformers' forward and backward pass, on whole rows."""

    def __init__(self, args: train.Args):
        self.n_tokens = args.tokens_per_micro_batch
        self.model = AutoModelForCausalLM.from_pretrained(args.model).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LR, weight_decay=0.0)

    def logprobs(self, batch: dict):
        """Yields rows of the batch, and the logprobs of their responses, (rows, T)."""
        ids = batch["input_ids"]
        T = batch["response_mask"].shape[1]
        for rows in torch.arange(len(ids)).split(self.n_tokens // ids.shape[1]):
            output = self.model(ids[rows], use_cache=False, logits_to_keep=T + 1)
            logprobs = output.logits[:, :-1].log_softmax(-1)
            yield rows, logprobs.gather(-1, ids[rows, -T:, None])[..., 0]

    @torch.no_grad()
    def score(self, batch: dict) -> torch.Tensor:
        return torch.cat([logprobs for _, logprobs in self.logprobs(batch)])

    def update(self, batch: dict) -> None:
        """Makes one optimiser step on the mean of -advantage * logprob over all tokens."""
        for rows, logprobs in self.logprobs(batch):
            loss = -(logprobs * batch["advantages"][rows]).sum()
            (loss / batch["response_mask"].sum()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(sides: dict, batch: dict, rounds: int) -> list[dict]:
    """Compares the sides' logprobs and times the sides by turns; prints and returns their rows."""
    ours = sides["flatrl"].score(batch)
    for side in sides.values():
        torch.testing.assert_close(side.score(batch), ours, rtol=0, atol=1e-3)
        side.update(batch)  # a warm-up
    times = {(name, work): [] for name in sides for work in ("score", "update")}
    for _ in range(rounds):
        for (name, work), seconds in times.items():
            seconds.append(common.seconds(getattr(sides[name], work), batch))
    rows = []
    for name in sides:
        row = {"side": name}
        line = f"  {name:9}"
        for work in ("score", "update"):
            ratios = [x / ours for x, ours in zip(times[name, work], times["flatrl", work])]
            row[f"{work}_s"] = statistics.median(times[name, work])
            row[f"{work}_ratio"] = statistics.median(ratios)
            line += f" {work} {row[f'{work}_s']:.3f} s, {row[f'{work}_ratio']:.2f}  "
        print(line.rstrip(), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Builds the sides, and measures them in each case."""
    parser = common.make_parser(__doc__, rounds=5, rows=32)
    parser.add_argument("--model", help="default: a random model of 2.6M parameters")
    parser.add_argument("--case", type=int, nargs=3, help="prompts, and tokens of each and answer")
    parser.add_argument("--only", choices=["flatrl"], help="without the other sides")
    parser.add_argument("--compile", action="store_true", help="as train.py's; not of `bare`")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        args = train.Args(model=options.model or common.random_model(folder, **common.LARGER))
        args.compile = options.compile
        accelerator = common.start(args)
        sides = {"flatrl": Flatrl(args, accelerator, data.in_prefix_order)}
        if not options.only:
            sides["unshared"] = Flatrl(args, accelerator, share_nothing)
            sides["bare"] = Bare(args)
        for n_prompts, P, R in [options.case] if options.case else CASES:
            print(f"{n_prompts} prompts of {P}, responses of {R} tokens", flush=True)
            case = {"prompts": n_prompts, "prompt_tokens": P, "response_tokens": R}
            batch = make_batch(options.rows, n_prompts, P, R)
            rows += [case | row for row in measure(sides, batch, options.rounds)]
    common.write_rows(options.out, rows)


if __name__ == "__main__":
    main()
