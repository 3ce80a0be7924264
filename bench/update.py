"""How long do scoring and an update take, without sharing, and in a bare loop?

    python bench/update.py [--prompt_tokens 24 256 1024] [--response_tokens 64 256]
    python bench/update.py --distinct           # no prompt is shared
    python bench/update.py --micro_batch 2048   # tokens in a forward and backward pass
    python bench/update.py --against            # flatrl alone: three models take much memory

    flatrl      train.score_tokens; train.optimise: one optimiser step, GRPO, no KL
    unshared    the same, with every trajectory as a sequence of its own
    bare        transformers' forward (sdpa) on right-padded rows, log-softmax, backward, AdamW

All sides get the same random trajectories and take turns in one process; all must give the same
logprobs first. Responses have equal lengths, so that no row has padding to lose time on. The
table has the seconds of scoring and of an update, how many times flatrl's they are, the tokens
that pass the network, and the memory: on CUDA the peak of an update, on a CPU the most that its
forward passes keep for their backward passes.
"""

import argparse
import os
import tempfile
from collections import Counter
from functools import partial

import common
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import data
import train
from agent_loop import AgentLoopOutput
from flatrl import devices

LR = 0.0  # the same work, and all sides keep the same weights


def trajectories(options: argparse.Namespace, vocab_size: int, P: int, R: int) -> dict:
    """Returns a batch of random tokens and advantages: prompts of P tokens, responses of R."""
    generator = torch.Generator().manual_seed(0)

    def random_ids(n: int) -> list[int]:
        return torch.randint(3, vocab_size, (n,), generator=generator).tolist()

    outputs = []
    for _ in range(options.prompts):
        shared = random_ids(P)
        for _ in range(options.group_size):
            output = AgentLoopOutput(
                prompt_ids=random_ids(P) if options.distinct else shared,
                response_ids=random_ids(R),
                response_mask=[1] * R,
                response_logprobs=[0.0] * R,
                response_versions=[0] * R,
                reward=0.0,
            )
            outputs.append(output)
    batch = data.collate(outputs)
    batch["unit_tokens"] = batch["response_mask"].sum(-1)  # every row is a unit
    advantages = torch.randn(len(outputs), generator=generator)
    batch["advantages"] = advantages[:, None].expand(-1, R).clone()
    return batch


# ---------------------------------------------------------------- the sides


class Flatrl:
    """flatrl's own scoring and update."""

    in_prefix_order = staticmethod(data.in_prefix_order)  # finds what rows share

    def __init__(self, options: argparse.Namespace, args: train.Args, accelerator):
        self.args = args
        self.accelerator = accelerator
        self.learner = train.Learner(train.Policy(args), LR, 1, args, accelerator)
        self.model = self.learner.net

    def sizes(self, batch: dict) -> list[int]:
        """Returns the tokens of each micro-batch that pass the network."""
        data.in_prefix_order = self.in_prefix_order
        rows = range(len(batch["lengths"]))
        most = self.args.tokens_per_micro_batch
        micros = data.micro_batches_of_this_rank(batch, rows, most)
        packed = [self.model.pack(batch, micro)["inputs"] for micro in micros]
        return [inputs["input_ids"].numel() for inputs in packed]

    def score(self, batch: dict) -> torch.Tensor:
        data.in_prefix_order = self.in_prefix_order
        return train.score_tokens(self.model, batch, self.args)["logprobs"]

    def update(self, batch: dict) -> None:
        data.in_prefix_order = self.in_prefix_order
        rows = range(len(batch["lengths"]))
        names = ["response_mask", "unit_tokens", "advantages", "logprobs_rollout"]
        train.optimise(
            self.learner,
            train.policy_objective,
            batch,
            names,
            rows,
            self.args,
            self.accelerator,
        )


class Unshared(Flatrl):
    """The same, with every trajectory as a sequence of its own."""

    @staticmethod
    def in_prefix_order(batch, rows):
        """Takes the place of data.in_prefix_order: no row shares anything."""
        return data.MicroBatch(list(rows), batch["lengths"][rows].tolist(), [0] * len(rows))


class Bare:
    """A bare loop of transformers' forward and backward pass, on right-padded rows."""

    def __init__(self, options: argparse.Namespace, args: train.Args, accelerator):
        self.tokens = options.micro_batch
        self.accelerator = accelerator
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        self.model = model.to(accelerator.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LR, weight_decay=0.0)

    def sizes(self, batch: dict) -> list[int]:
        """Returns the tokens of each micro-batch, padding included."""
        return [micro["input_ids"].numel() for micro in self.micro_batches(batch)]

    def micro_batches(self, batch: dict) -> list[dict]:
        """Cuts a batch into as few equal parts as the budget of tokens allows."""
        B, L = batch["input_ids"].shape
        T = batch["response_mask"].shape[1]
        names = ("input_ids", "lengths", "response_mask", "advantages")
        columns = {name: batch[name] for name in names}
        columns["response_ids"] = batch["input_ids"][:, L - T :]
        n = -(-B // max(1, self.tokens // L))
        device = self.accelerator.device
        return [
            {name: column[rows].to(device) for name, column in columns.items()}
            for rows in torch.arange(B).tensor_split(n)
        ]

    def logprobs(self, micro: dict) -> torch.Tensor:
        """Returns the logprobs of the responses' tokens, (rows, T)."""
        lengths = micro["lengths"]
        positions = torch.arange(micro["input_ids"].shape[1], device=lengths.device)
        with self.accelerator.autocast():
            logits = self.model(
                input_ids=micro["input_ids"],
                attention_mask=(positions < lengths[:, None]).long(),
                use_cache=False,
                logits_to_keep=micro["response_ids"].shape[1] + 1,
            ).logits[:, :-1]
        chosen = micro["response_ids"][..., None]
        return logits.float().log_softmax(-1).gather(-1, chosen)[..., 0]

    @torch.no_grad()
    def score(self, batch: dict) -> torch.Tensor:
        parts = [self.logprobs(micro) for micro in self.micro_batches(batch)]
        return torch.cat(parts).float().cpu()

    def update(self, batch: dict) -> None:
        """Makes one optimiser step on the mean of -advantage * logprob over all tokens."""
        n_tokens = batch["response_mask"].sum().item()
        for micro in self.micro_batches(batch):
            weighted = self.logprobs(micro) * micro["advantages"] * micro["response_mask"]
            (-weighted.sum() / n_tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


SIDES = {"flatrl": Flatrl, "unshared": Unshared, "bare": Bare}

# ---------------------------------------------------------------- measuring


class SavedMemory:
    """Counts the bytes that forward passes keep for their backward passes, each storage once;
    `peak` is the most."""

    def __init__(self, weights):
        self.weights = {parameter.untyped_storage().data_ptr() for parameter in weights}
        self.n_users = Counter()  # kept tensors of each storage
        self.bytes = 0
        self.peak = 0

    def keep(self, tensor):
        return KeptTensor(self, tensor)

    def change(self, storage, n: int) -> None:
        """Notes that a storage has one kept tensor more (n = 1) or fewer (n = -1)."""
        address = storage.data_ptr()
        before = self.n_users[address]
        self.n_users[address] += n
        if address in self.weights or (before > 0) == (before + n > 0):
            return
        self.bytes += n * storage.nbytes()
        self.peak = max(self.peak, self.bytes)


class KeptTensor:
    """A tensor that autograd keeps: it counts until it is collected."""

    def __init__(self, memory: SavedMemory, tensor):
        self.memory = memory
        self.tensor = tensor
        self.storage = tensor.untyped_storage()
        memory.change(self.storage, 1)

    def __del__(self):
        self.memory.change(self.storage, -1)


def peak_memory(side, batch: dict) -> float:
    """Returns the MB of an update, at its peak."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        side.update(batch)
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    memory = SavedMemory(side.model.parameters())
    with torch.autograd.graph.saved_tensors_hooks(memory.keep, lambda kept: kept.tensor):
        side.update(batch)
    return memory.peak / 1e6


def measure(sides: dict, batch: dict, rounds: int) -> list[dict]:
    """Compares the sides' logprobs, times the sides by turns, prints and returns their rows."""
    scores = {name: side.score(batch) for name, side in sides.items()}  # also a warm-up
    for name, score in scores.items():
        largest = (score - scores["flatrl"]).abs().max().item()
        tolerance = 1e-3
        if torch.cuda.is_available():  # where bare rounds logits to bfloat16
            tolerance = 0.5 if name == "bare" else 0.1
        assert largest < tolerance, f"{name}'s logprobs are {largest} off"
    memory = {name: peak_memory(side, batch) for name, side in sides.items()}
    timings = [
        {
            (name, work): common.seconds(partial(getattr(side, work), batch))
            for name, side in sides.items()
            for work in ("score", "update")
        }
        for _ in range(rounds)
    ]
    rows = []
    for name, side in sides.items():
        sizes = side.sizes(batch)
        row = {"side": name, "tokens": sum(sizes), "passes": len(sizes), "mb": memory[name]}
        text = f"  {name:9}"
        for work in ("score", "update"):
            ratios = [timing[name, work] / timing["flatrl", work] for timing in timings]
            row[f"{work}_s"] = common.of_rounds([timing[name, work] for timing in timings])[0]
            row[f"{work}_ratio"] = common.of_rounds(ratios)[0]
            text += f" {row[f'{work}_s']:9.3f} s {common.spread(ratios):>20}"
        print(f"{text} {sum(sizes):7,} tokens in {len(sizes)} passes, {memory[name]:,.0f} MB")
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
    with tempfile.TemporaryDirectory() as options.folder:
        if not options.model:
            larger = common.LARGER | {"max_position_embeddings": 4096}
            options.model = common.random_model(f"{options.folder}/model", **larger)
        args = train.Args(model=options.model, tokens_per_micro_batch=options.micro_batch)
        accelerator, _ = devices.start_processes(args)
        train.complete_flags(args, accelerator.device.type == "cuda")
        data.register_packed_attention()
        sides = {
            name: SIDES[name](options, args, accelerator) for name in ("flatrl", *options.against)
        }
        vocab_size = AutoConfig.from_pretrained(options.model).get_text_config().vocab_size
        threads = os.environ["OMP_NUM_THREADS"]
        print(f"{options.prompts} x {options.group_size}, {accelerator.device}, {threads} threads")
        rows = []
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
