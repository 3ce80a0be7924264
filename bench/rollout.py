"""How much does a rollout cost beyond plain `LLM.generate`?

    python bench/rollout.py --rounds 9                  # one turn
    python bench/rollout.py --turns 4 --spread tail     # most turns are short, a few are long

Both sides have the same engine, prompts and lengths, and take turns in one process after a warm-up.
A rollout also renders templates, runs a coroutine for each trajectory, decodes, and asks for
rewards. With --turns a simulated user, who takes no time, answers between the turns. `generate` is
then called once a turn with all prompts, and waits for the longest answer. --spread tail draws the
lengths of turns from an exponential distribution with the mean --tokens, up to eight times it.
"""

import argparse
import itertools
import tempfile
import time
from types import SimpleNamespace

import common
import numpy as np
import torch.distributed as dist
from transformers import AutoTokenizer

import train
from agent_loop import Interaction, ToolAgentLoop, chat_template, register, render
from examples import calculator
from flatrl.processes import Background
from rollout import rollout

ANSWER = "Go on."  # the simulated user's
LONGEST = 8  # times --tokens
FORCED = {"temperature": 1.0, "ignore_eos": True}


class User(Interaction):
    """A simulated user, who always answers."""

    async def generate_response(self, request_id, messages, **kwargs):
        return False, ANSWER, None, {}


@register("fixed_turns")
class FixedTurns(ToolAgentLoop):
    """An agent loop whose turns end when they reach their length, without being cut off."""

    async def run(self, sampling_params, **row):
        self.lengths = iter(self.task.lengths[row["extra_info"]["index"], row["rollout_n"]])
        return await super().run(sampling_params, **row)

    async def assistant_turn(self, trajectory, sampling_params):
        length = int(next(self.lengths))
        await super().assistant_turn(trajectory, sampling_params | {"max_tokens": length})
        trajectory.stop_reason = "stop"
        return ""


def draw_lengths(options: argparse.Namespace) -> np.ndarray:
    """Returns the tokens of turns, (prompts, group_size, turns)."""
    size = (options.prompts, options.group_size, options.turns)
    if not options.spread:
        return np.full(size, options.tokens)
    drawn = np.random.default_rng(0).exponential(options.tokens, size)
    return drawn.round().astype(int).clip(1, LONGEST * options.tokens)


class Rollouts:
    """Both sides of the comparison: each method returns tokens per second."""

    def __init__(self, engine, args: train.Args, options: argparse.Namespace):
        self.engine = engine
        self.group_size = options.group_size
        self.rows = calculator.load("train")[: options.prompts]
        self.lengths = draw_lengths(options)
        self.n_tokens = self.lengths.sum()
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.steps = itertools.count()
        self.idle = 0.0  # the share of the last rollout
        task = dict(reward=calculator.reward, INTERACTIONS=[User()], lengths=self.lengths)
        self.run = SimpleNamespace(
            engine=engine,
            task=SimpleNamespace(**task),
            tokenizer=self.tokenizer,
            args=args,
            processor=None,
            stop=SimpleNamespace(requested=False),
            background=Background(),
            store=dist.HashStore(),
        )

    def rollout(self) -> float:
        self.engine.core.reset_prefix_cache()
        started = time.perf_counter()
        done = rollout(self.run, self.rows, next(self.steps), self.group_size, dict(FORCED))
        seconds = time.perf_counter() - started
        assert done.statistics["tokens"] == self.n_tokens and not done.errors, done.errors
        self.idle = done.metrics(self.engine)["throughput/idle_share"]
        return self.n_tokens / seconds

    def generate(self) -> float:
        """Calls LLM.generate once a turn, with all prompts."""
        from vllm import SamplingParams

        self.engine.core.reset_prefix_cache()
        chats = [row["prompt"] for row in self.rows for _ in range(self.group_size)]
        prompts = [render(self.tokenizer, chat) for chat in chats]
        said = [*chats[0], {"role": "assistant", "content": ""}]
        answer = [{"role": "user", "content": ANSWER}]
        suffix = chat_template(self.tokenizer).suffix(said, answer, stop=None)
        seeds = itertools.count()
        plain = FORCED | {"logprobs": 0, "detokenize": False}
        turns = [
            [SamplingParams(**plain, max_tokens=int(n), seed=next(seeds)) for n in turn]
            for turn in self.lengths.reshape(len(prompts), -1).T
        ]
        started = time.perf_counter()
        for parameters in turns:
            requests = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = self.engine.llm.generate(requests, parameters, use_tqdm=False)
            sampled = [list(output.outputs[0].token_ids) for output in outputs]
            prompts = [a + b + suffix for a, b in zip(prompts, sampled, strict=True)]
        return self.n_tokens / (time.perf_counter() - started)


def main() -> None:
    """Builds a model if none is given, and an engine; measures."""
    numbers = dict(turns=1, prompts=16, group_size=8, tokens=64, rounds=5)
    parser = common.make_parser(__doc__, **numbers)
    parser.add_argument("--model", help="default: a random model")
    parser.add_argument("--spread", choices=["tail"], help="lengths of turns differ")
    parser.add_argument("--engine_args", default="{}", help="as in train.py")
    options = parser.parse_args()
    longest = options.tokens * (LONGEST if options.spread else 1)
    with tempfile.TemporaryDirectory() as folder:
        args = train.Args(
            model=options.model or common.random_model(folder, max_position_embeddings=1 << 15),
            agent="fixed_turns",
            max_assistant_turns=options.turns,
            max_response_tokens=options.turns * (longest + 64),
            engine_args=options.engine_args,
        )
        engine, policy = common.engine_and_policy(args)
        train.sync(engine, policy, 0)
        sides = Rollouts(engine, args, options)
        ratios = []
        shares = []
        for i in range(options.rounds + 1):
            ours = sides.rollout()
            theirs = sides.generate()
            print(f"round {i}: rollout {ours:,.0f} tokens/s, generate {theirs:,.0f}", flush=True)
            ratios.append(ours / theirs)
            shares.append(sides.idle)
    ratio = common.of_rounds(ratios[1:])  # without the warm-up
    idle = common.of_rounds(shares[1:])[0]
    print(f"ratio {common.spread(ratios[1:])}, the engine is idle for {idle:.1%} of a rollout")
    common.write_rows(options.out, [{"ratio": ratio, "idle": idle}])


if __name__ == "__main__":
    main()
