"""Compares the seconds of scoring and of an update with three other implementations.

    python bench/update.py [--prompt_tokens 24 256 1024] [--response_tokens 64 256] [--rounds 5] [--model FOLDER]
    python bench/update.py --distinct           # every trajectory has a prompt of its own: there is nothing to share
    python bench/update.py --micro_batch 2048   # tokens in one forward and backward pass, of every side
    pip install trl==1.16.0 datasets            # for --sides TRL

    flatrl      train.score_tokens; train.optimise: one optimiser step, GRPO, on-policy, no KL
    unshared    the same with every trajectory as a sequence of its own
    bare        the transformers model's own forward (sdpa) on right-padded rows, the head on
                the responses alone, log-softmax, backward, AdamW: no reinforcement learning,
                no entropies, no metrics
    TRL         GRPOTrainer's own training_step on prepared inputs, clipping and optimiser
                step; its own logprobs

All sides get the same trajectories, groups that share their prompts, and take turns in one
process (A B A B ...). Token ids are random; there are --prompts x --group_size trajectories,
and responses have equal lengths, so that rows have no padding to lose time on. Before anything
is timed, all sides must give the same logprobs. For every length of prompts and of responses
there is a row for each side: the seconds of scoring and of an update, how many times flatrl's
they are (taken round by round, then the median), the tokens that go through the network, and
the memory. Memory on CUDA is the peak of what an update allocates; on a CPU it is the peak of
what its forward passes keep for their backward passes, without the weights.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import Counter

import common
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import data
import train
from agent_loop import AgentLoopOutput
from flatrl import devices

LR = 0.0  # the same work, and all sides keep the same weights


def trajectories(
    options: argparse.Namespace, vocab_size: int, prompt_tokens: int, response_tokens: int
) -> dict:
    """Returns a batch of random token ids with random advantages, in which the members of a
    group share a prompt."""
    generator = torch.Generator().manual_seed(0)
    n = response_tokens

    def random_ids(n: int) -> list[int]:
        return torch.randint(3, vocab_size, (n,), generator=generator).tolist()

    outputs = []
    for _ in range(options.prompts):
        shared_prompt = random_ids(prompt_tokens)
        for _ in range(options.group_size):
            prompt = random_ids(prompt_tokens) if options.distinct else shared_prompt
            output = AgentLoopOutput(
                prompt_ids=prompt,
                response_ids=random_ids(n),
                response_mask=[1] * n,
                response_logprobs=[0.0] * n,
                response_versions=[0] * n,
                reward=0.0,
            )
            outputs.append(output)
    batch = data.collate(outputs)
    batch["unit_tokens"] = batch["response_mask"].sum(-1)  # every row is a unit
    batch["advantages"] = (
        torch.randn(len(outputs), generator=generator)[:, None].expand(-1, n).clone()
    )
    return batch


# ---------------------------------------------------------------- the sides: score(batch) -> (B, T), update(batch)


class Flatrl:
    """flatrl's own scoring and update."""

    in_prefix_order = staticmethod(
        data.in_prefix_order
    )  # finds what the rows of a micro-batch share

    def __init__(self, options: argparse.Namespace, args: train.Args, accelerator):
        self.args, self.accelerator = args, accelerator
        self.learner = train.Learner(train.Policy(args), LR, 1, args, accelerator)
        self.model = self.learner.net

    def sizes(self, batch: dict) -> list[int]:
        """Returns the tokens of each micro-batch that go through the network."""
        data.in_prefix_order = self.in_prefix_order
        rows = range(len(batch["lengths"]))
        micros = data.micro_batches_of_this_rank(batch, rows, self.args.tokens_per_micro_batch)
        return [
            self.model.pack(batch, micro)["inputs"]["input_ids"].numel() for micro in micros
        ]

    def score(self, batch: dict) -> torch.Tensor:
        data.in_prefix_order = self.in_prefix_order
        return train.score_tokens(self.model, batch, self.args)

    def update(self, batch: dict):
        data.in_prefix_order = self.in_prefix_order
        rows = range(len(batch["lengths"]))
        train.optimise(
            self.learner, train.policy_objective, batch, rows, self.args, self.accelerator
        )


class Unshared(Flatrl):
    """The same with every trajectory as a sequence of its own."""

    @staticmethod
    def in_prefix_order(batch, rows):
        """Says, in the place of data.in_prefix_order, that no row shares anything with another
        one."""
        return data.MicroBatch(list(rows), batch["lengths"][rows].tolist(), [0] * len(rows))


class Bare:
    """A bare loop of transformers' own forward and backward, on right-padded rows."""

    def __init__(self, options: argparse.Namespace, args: train.Args, accelerator):
        self.tokens, self.accelerator = options.micro_batch, accelerator
        model = AutoModelForCausalLM.from_pretrained(
            options.model, attn_implementation="sdpa", dtype=torch.float32
        )
        self.model = model.to(accelerator.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LR, weight_decay=0.0)

    def sizes(self, batch: dict) -> list[int]:
        """Returns the tokens of each micro-batch, padding included."""
        return [micro["input_ids"].numel() for micro in self.micro_batches(batch)]

    def micro_batches(self, batch: dict) -> list[dict]:
        """Cuts a batch into as few parts of equal size as the budget of tokens allows."""
        B, L = batch["input_ids"].shape
        T = batch["response_mask"].shape[1]  # of every response: no row has padding
        columns = {
            key: batch[key] for key in ("input_ids", "lengths", "response_mask", "advantages")
        }
        columns["response_ids"] = batch["input_ids"][:, L - T :]
        n = -(-B // max(1, self.tokens // L))
        micros = []
        for rows in torch.arange(B).tensor_split(n):
            micros.append(
                {
                    key: column[rows].to(self.accelerator.device)
                    for key, column in columns.items()
                }
            )
        return micros

    def logprobs(self, micro: dict) -> torch.Tensor:
        """Returns the logprobs of the responses' tokens, (rows, T)."""
        positions = torch.arange(micro["input_ids"].shape[1], device=micro["lengths"].device)
        attention_mask = (positions < micro["lengths"][:, None]).long()
        with self.accelerator.autocast():
            n_logits = micro["response_ids"].shape[1] + 1
            logits = self.model(
                input_ids=micro["input_ids"],
                attention_mask=attention_mask,
                use_cache=False,
                logits_to_keep=n_logits,
            ).logits[:, :-1]
        return (
            logits.float().log_softmax(-1).gather(-1, micro["response_ids"][..., None])[..., 0]
        )

    @torch.no_grad()
    def score(self, batch: dict) -> torch.Tensor:
        return torch.cat(
            [self.logprobs(micro).float().cpu() for micro in self.micro_batches(batch)]
        )

    def update(self, batch: dict):
        """Makes one optimiser step: the advantage-weighted mean of -logprob over all tokens."""
        n_tokens = batch["response_mask"].sum().item()
        for micro in self.micro_batches(batch):
            weighted = self.logprobs(micro) * micro["advantages"] * micro["response_mask"]
            (-weighted.sum() / n_tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Trl(Bare):
    """TRL's own training step on the same padded rows."""

    def __init__(self, options: argparse.Namespace, args: train.Args, accelerator):
        self.tokens, self.accelerator = options.micro_batch, accelerator
        self.trainer = common.trl_trainer(
            options.model,
            f"{options.folder}/trl",
            [{"prompt": "?"}],
            lambda completions, **columns: [],
            per_device_train_batch_size=options.group_size,
            num_generations=options.group_size,
            max_steps=10**6,
            learning_rate=LR,
            temperature=1.0,
        )
        self.trainer._prepare_inputs = lambda inputs: (
            inputs
        )  # what it would generate and score here is given
        self.trainer.create_optimizer()
        self.model = self.trainer.model.train()

    def logprobs(self, micro: dict) -> torch.Tensor:
        token_ids = micro["input_ids"]
        T = micro["response_ids"].shape[1]
        attention_mask = torch.ones_like(token_ids)
        return self.trainer._get_per_token_logps_and_entropies(
            self.model, token_ids, attention_mask, T
        )[0]

    def update(self, batch: dict):
        """Makes one optimiser step out of the trainer's own parts."""
        trainer = self.trainer
        micros = self.micro_batches(batch)
        trainer.current_gradient_accumulation_steps = len(micros)
        trainer.args.steps_per_generation = len(micros)
        for micro in micros:
            prompts = micro["input_ids"][:, : -micro["response_ids"].shape[1]]
            inputs = {
                "prompt_ids": prompts,
                "prompt_mask": torch.ones_like(prompts),
                "completion_ids": micro["response_ids"],
                "completion_mask": micro["response_mask"].long(),
                "advantages": micro["advantages"][:, 0],
                "num_items_in_batch": batch["response_mask"].sum(),
            }
            trainer.training_step(self.model, inputs, None)
        trainer.accelerator.clip_grad_norm_(self.model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        self.model.zero_grad()


SIDES = {"flatrl": Flatrl, "unshared": Unshared, "bare": Bare, "TRL": Trl}

# ---------------------------------------------------------------- measuring


class SavedMemory:
    """Counts the bytes that forward passes keep for their backward passes, each storage once;
    `peak` is the most."""

    def __init__(self, weights):
        self.weights = {
            parameter.untyped_storage().data_ptr() for parameter in weights
        }  # these do not count
        self.n_users = Counter()  # kept tensors of each storage
        self.bytes = 0
        self.peak = 0

    def keep(self, tensor):
        return KeptTensor(self, tensor)

    def change(self, storage, n: int) -> None:
        """Notes that a storage has n kept tensors more (1) or fewer (-1)."""
        address = storage.data_ptr()
        before = self.n_users[address]
        self.n_users[address] += n
        if address in self.weights or (before > 0) == (before + n > 0):
            return
        self.bytes += n * storage.nbytes()
        self.peak = max(self.peak, self.bytes)


class KeptTensor:
    """A tensor that autograd keeps: it counts from its making until nobody has it any more."""

    def __init__(self, memory: SavedMemory, tensor):
        self.memory, self.tensor, self.storage = memory, tensor, tensor.untyped_storage()
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


def seconds_of(function, batch: dict) -> float:
    started = time.perf_counter()
    function(batch)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(sides: dict, batch: dict, rounds: int):
    """Compares the sides' logprobs of a batch, times them by turns, and prints a row for each."""
    scores = {name: side.score(batch) for name, side in sides.items()}  # also a warm-up
    for name, score in scores.items():
        largest = (score - scores["flatrl"]).abs().max().item()
        assert largest < (0.1 if torch.cuda.is_available() else 1e-3), (
            f"{name}'s logprobs are {largest} off"
        )
    memory = {name: peak_memory(side, batch) for name, side in sides.items()}  # also a warm-up
    timings = []  # of each round, for each side: its seconds of "score" and of "update"
    for _ in range(rounds):
        timing = {}
        for name, side in sides.items():
            timing[name] = {
                "score": seconds_of(side.score, batch),
                "update": seconds_of(side.update, batch),
            }
        timings.append(timing)
    for name, side in sides.items():
        cells = []
        for work in ("score", "update"):
            ratios = [timing[name][work] / timing["flatrl"][work] for timing in timings]
            cells.append(
                f"{statistics.median(timing[name][work] for timing in timings):9.3f} s"
            )
            cells.append(f"{common.spread(ratios):>20}")
        sizes = side.sizes(batch)
        cells.append(
            f"{sum(sizes):7,} tokens in {len(sizes)} passes, {memory[name]:6,.0f} MB for {max(sizes):6,}"
        )
        print(f"  {name:9}", *cells, flush=True)


def main():
    """Builds the sides, and measures them for every length of prompts and responses."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", help="default: a random model of 4 layers and a width of 256"
    )
    for name, default in (
        ("prompts", 4),
        ("group_size", 8),
        ("rounds", 5),
        ("micro_batch", 16384),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--prompt_tokens", type=int, nargs="+", default=[24, 256, 1024])
    parser.add_argument("--response_tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument(
        "--distinct", action="store_true", help="every trajectory has a prompt of its own"
    )
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=list(SIDES), help="beside flatrl"
    )
    options = parser.parse_args()
    if "TRL" in options.sides and common.missing_for_trl():
        parser.error(f"{common.missing_for_trl()}, or leave TRL out with --sides unshared bare")
    with tempfile.TemporaryDirectory() as options.folder:
        if not options.model:
            larger = common.LARGER | {"max_position_embeddings": 4096}
            options.model = common.random_model(f"{options.folder}/model", **larger)
        args = train.Args(model=options.model, tokens_per_micro_batch=options.micro_batch)
        accelerator, _ = devices.start_processes(args)
        train.complete_flags(args, accelerator.device.type == "cuda")
        data.register_packed_attention()
        names = dict.fromkeys(["flatrl", *options.sides])  # each once
        sides = {name: SIDES[name](options, args, accelerator) for name in names}
        parameters = sum(parameter.numel() for parameter in sides["flatrl"].model.parameters())
        distinct = ", distinct prompts" if options.distinct else ""
        print(
            f"{options.prompts} x {options.group_size}{distinct}, micro-batches of {options.micro_batch} tokens, "
            f"{parameters / 1e6:.1f}M parameters, {accelerator.device.type}, {os.environ['OMP_NUM_THREADS']} "
            "threads; seconds, and how many times flatrl's (min - max)"
        )
        vocab_size = AutoConfig.from_pretrained(options.model).get_text_config().vocab_size
        for prompt_tokens in options.prompt_tokens:
            for response_tokens in options.response_tokens:
                print(f"prompts of {prompt_tokens}, responses of {response_tokens} tokens")
                args.max_response_tokens = response_tokens
                batch = trajectories(options, vocab_size, prompt_tokens, response_tokens)
                measure(sides, batch, options.rounds)


if __name__ == "__main__":
    main()
