"""How long do scoring and an update take, without sharing, and in a bare loop?

    python bench/update.py [--prompt_tokens 24 256 1024] [--response_tokens 64 256]
    python bench/update.py --distinct           # no prompt is shared
    python bench/update.py --micro_batch 2048   # tokens in a forward and backward pass
    python bench/update.py --against            # flatrl alone: three models take much memory

    flatrl      train.score_tokens; train.optimise: one optimiser step, GRPO, no KL
    unshared    the same, with every trajectory as a sequence of its own
    bare        transformers' forward (sdpa) on whole rows, log-softmax, backward, AdamW

All sides get the same random trajectories, of equal lengths, and take turns in one process. First,
all must give the same logprobs. The table has the seconds of scoring and of an update, and how many
times flatrl's they are.
"""

import argparse
import tempfile
from functools import partial

import common
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import data
import train
from agent_loop import TokenOutput
from flatrl import devices

LR = 0.0  # the same work, and all sides keep the same weights
IN_PREFIX_ORDER = data.in_prefix_order  # finds what rows share


def unshared(batch: dict, rows: list[int]) -> data.MicroBatch:
    """Takes the place of data.in_prefix_order: no row shares anything."""
    return data.MicroBatch(list(rows), batch["lengths"][rows].tolist(), [0] * len(rows))


def trajectories(options: argparse.Namespace, vocab_size: int, P: int, R: int) -> dict:
    """Returns a batch of random tokens and advantages: prompts of P tokens, responses of R."""
    generator = torch.Generator().manual_seed(0)

    def random_ids(n: int) -> list[int]:
        return torch.randint(3, vocab_size, (n,), generator=generator).tolist()

    outputs = []
    for _ in range(options.prompts):
        shared = random_ids(P)
        for _ in range(options.group_size):
            prompt = random_ids(P) if options.distinct else shared
            answer = TokenOutput(random_ids(R), [0.0] * R, [0] * R, "length", prompt)
            outputs.append(common.as_output(prompt, answer))
    batch = data.collate(outputs)
    batch["unit_tokens"] = batch["response_mask"].sum(-1)  # every row is a unit
    advantages = torch.randn(len(outputs), generator=generator)
    batch["advantages"] = advantages[:, None].expand(-1, R).clone()
    return batch


class Flatrl:
    """flatrl's own scoring and update. in_prefix_order: finds what rows share, or is `unshared`."""

    def __init__(self, args: train.Args, accelerator, in_prefix_order=IN_PREFIX_ORDER):
        self.args = args
        self.accelerator = accelerator
        self.in_prefix_order = in_prefix_order
        self.learner = train.Learner(train.Policy(args), LR, 1, args, accelerator)

    def score(self, batch: dict) -> torch.Tensor:
        data.in_prefix_order = self.in_prefix_order
        return train.score_tokens(self.learner.net, batch, self.args)["logprobs"]

    def update(self, batch: dict) -> None:
        data.in_prefix_order = self.in_prefix_order
        train.optimise(
            self.learner,
            train.policy_objective,
            batch,
            ["response_mask", "unit_tokens", "advantages", "logprobs_rollout"],
            range(len(batch["lengths"])),
            self.args,
            self.accelerator,
        )


class Bare:
    """A bare loop of transformers' forward and backward pass, on whole rows."""

    def __init__(self, args: train.Args, accelerator):
        self.tokens = args.tokens_per_micro_batch
        self.accelerator = accelerator
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        self.model = model.to(accelerator.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LR, weight_decay=0.0)

    def logprobs(self, batch: dict, rows: torch.Tensor) -> torch.Tensor:
        """Returns the logprobs of the responses' tokens, (rows, T)."""
        device = self.accelerator.device
        T = batch["response_mask"].shape[1]
        ids = batch["input_ids"][rows].to(device)
        with self.accelerator.autocast():
            logits = self.model(ids, use_cache=False, logits_to_keep=T + 1).logits[:, :-1]
        chosen = ids[:, -T:, None]
        return logits.float().log_softmax(-1).gather(-1, chosen)[..., 0]

    def micro_batches(self, batch: dict) -> list[torch.Tensor]:
        """Cuts the rows into as few equal parts as the budget of tokens allows."""
        B, L = batch["input_ids"].shape
        return torch.arange(B).tensor_split(-(-B // max(1, self.tokens // L)))

    @torch.no_grad()
    def score(self, batch: dict) -> torch.Tensor:
        parts = [self.logprobs(batch, rows) for rows in self.micro_batches(batch)]
        return torch.cat(parts).float().cpu()

    def update(self, batch: dict) -> None:
        """Makes one optimiser step on the mean of -advantage * logprob over all tokens."""
        for rows in self.micro_batches(batch):
            logprobs = self.logprobs(batch, rows)
            weighted = logprobs * batch["advantages"][rows].to(logprobs.device)
            (-weighted.sum() / batch["response_mask"].sum()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


SIDES = {
    "flatrl": Flatrl,
    "unshared": partial(Flatrl, in_prefix_order=unshared),
    "bare": Bare,
}


def measure(sides: dict, batch: dict, rounds: int) -> list[dict]:
    """Compares the sides' logprobs, times the sides by turns, prints and returns their rows."""
    ours = sides["flatrl"].score(batch)
    for name, side in sides.items():
        largest = (side.score(batch) - ours).abs().max().item()
        tolerance = 0.5 if torch.cuda.is_available() else 1e-3  # bare rounds logits to bfloat16
        assert largest < tolerance, f"{name}'s logprobs are {largest} off"
        side.update(batch)  # a warm-up
    seconds = {name: {"score": [], "update": []} for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            seconds[name]["score"].append(common.seconds(side.score, batch))
            seconds[name]["update"].append(common.seconds(side.update, batch))
    rows = []
    for name, of_side in seconds.items():
        row = {"side": name}
        text = f"  {name:9}"
        for work, values in of_side.items():
            pairs = zip(values, seconds["flatrl"][work])
            ratios = [theirs / ours for theirs, ours in pairs]
            median = common.of_rounds(values)[0]
            row[f"{work}_s"] = median
            row[f"{work}_ratio"] = common.of_rounds(ratios)[0]
            text += f" {median:9.3f} s {common.spread(ratios):>20}"
        print(text)
        rows.append(row)
    return rows


def main() -> None:
    """Builds the sides, and measures them for every length of prompts and responses."""
    numbers = dict(prompts=4, group_size=8, rounds=5, micro_batch=16384)
    parser = common.make_parser(__doc__, **numbers)
    parser.add_argument("--model", help="default: a random model of 2.6M parameters")
    parser.add_argument("--prompt_tokens", type=int, nargs="+", default=[24, 256, 1024])
    parser.add_argument("--response_tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--distinct", action="store_true", help="no prompt is shared")
    parser.add_argument("--against", nargs="*", default=["unshared", "bare"], help="other sides")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        larger = common.LARGER | {"max_position_embeddings": 4096}
        model = options.model or common.random_model(folder, **larger)
        args = train.Args(model=model, tokens_per_micro_batch=options.micro_batch)
        accelerator, _ = devices.start_processes(args)
        train.complete_flags(args, accelerator.device.type == "cuda")
        data.register_packed_attention()
        sides = {name: SIDES[name](args, accelerator) for name in ("flatrl", *options.against)}
        vocab_size = AutoConfig.from_pretrained(model).get_text_config().vocab_size
        for P in options.prompt_tokens:
            for R in options.response_tokens:
                print(f"prompts of {P}, responses of {R} tokens", flush=True)
                args.max_response_tokens = R
                batch = trajectories(options, vocab_size, P, R)
                case = {"prompt_tokens": P, "response_tokens": R}
                rows += [case | row for row in measure(sides, batch, options.rounds)]
    common.write_rows(options.out, rows)


if __name__ == "__main__":
    main()
