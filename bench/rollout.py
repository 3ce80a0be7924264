"""How much does a rollout cost beyond plain `LLM.generate`?

    python bench/rollout.py --rounds 9                  # one turn
    python bench/rollout.py --turns 4 --spread tail     # most turns are short, a few are long
    python bench/rollout.py --turns 160 --prompts 2 --tokens 16 --rounds 3  # long trajectories
    python bench/rollout.py --turns 160 --prompts 2 --tokens 16 --rounds 3 --sliding_window 128

Both sides have the same engine, prompts and lengths. They take turns in one process after a
warm-up, and the table has the median of the rounds' ratios. A rollout also renders templates,
runs a coroutine for each trajectory, decodes, and asks for rewards. With --turns a simulated
user, who takes no time, answers between the turns; `generate` is then called once a turn with
all prompts, and waits for the longest answer. A rollout waits for none. --spread tail draws the
lengths of turns from an exponential distribution with the mean --tokens, up to eight times it.

A turn's seconds are also printed with prefill apart: a step of the engine that computes prompts
then counts as one that only decodes. --sliding_window: attention of the random model sees only
that many tokens, so that its cost does not grow with the trajectory. --cpu_seconds counts those
of this process, for a machine that does other work, too. Give OMP_NUM_THREADS=1 with it, because
idle threads spin.
"""

import argparse
import itertools
import random
import tempfile
import time
from statistics import fmean
from types import SimpleNamespace

import common
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from agent_loop import Interaction, ToolAgentLoop, chat_template, register, render
from examples import calculator
from rollout import Engine, rollout

ANSWER = "Go on."  # the simulated user's
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
        length = {"max_tokens": next(self.lengths)}
        await super().assistant_turn(trajectory, sampling_params | length)
        trajectory.stop_reason = "stop"
        return ""


def shortest_and_longest(options: argparse.Namespace) -> tuple[int, int]:
    """Returns the least and the most tokens of a turn."""
    n = options.tokens
    if options.spread == "tail":
        return 1, 8 * n
    return n, n


def lengths_of_turns(rows: list[dict], options: argparse.Namespace) -> dict:
    """Returns {(index of a row, number in its group): the tokens of each turn}."""
    least, most = shortest_and_longest(options)
    drawn = random.Random(0)

    def length() -> int:  # without --spread, least and most are equal
        return min(most, max(least, round(drawn.expovariate(1 / options.tokens))))

    return {
        (row["extra_info"]["index"], sample): [length() for _ in range(options.turns)]
        for row in rows
        for sample in range(options.group_size)
    }


# ---------------------------------------------------------------- rollouts


class Steps:
    """The seconds of an engine's steps: those that compute prompts, and those that only decode."""

    def __init__(self, core, clock):
        self.clock = clock
        self.prefill = []
        self.decode = []
        self.has_prompts = False  # whether the next step computes any
        self.core_step = core.step
        self.core_add_request = core.add_request
        core.step = self.step
        core.add_request = self.add_request

    def add_request(self, *args, **named):
        self.has_prompts = True
        return self.core_add_request(*args, **named)

    def step(self):
        started = self.clock()
        outputs = self.core_step()
        kind = self.prefill if self.has_prompts else self.decode
        kind.append(self.clock() - started)
        self.has_prompts = False
        return outputs

    def take_prefill(self) -> float:
        """Returns how much longer the steps with prompts took than others; forgets all steps."""
        usual = fmean(self.decode or [0.0])
        seconds = sum(self.prefill) - len(self.prefill) * usual
        self.prefill.clear()
        self.decode.clear()
        return seconds


class Rollouts:
    """Both sides of the comparison: each method returns tokens per second."""

    def __init__(self, engine: Engine, options: argparse.Namespace):
        self.engine = engine
        self.clock = time.process_time if options.cpu_seconds else time.perf_counter
        self.engine_steps = Steps(engine.core, self.clock)
        self.options = options
        self.rows = calculator.load("train")
        self.lengths = lengths_of_turns(self.rows, options)
        self.tokenizer = AutoTokenizer.from_pretrained(engine.args.model)
        task = SimpleNamespace(
            reward=calculator.reward,
            INTERACTIONS=[User()],
            lengths=self.lengths,
        )
        self.run = common.surroundings(engine, task, self.tokenizer, engine.args)
        self.idle = 0.0  # the share of the last rollout
        self.steps = itertools.count()

    def lengths_of(self, n: int) -> list[list[int]]:
        """Returns the lengths of the turns of each trajectory of the first n rows."""
        return [
            self.lengths[row["extra_info"]["index"], sample]
            for row in self.rows[:n]
            for sample in range(self.options.group_size)
        ]

    def rollout(self, n: int) -> float:
        """Samples trajectories for the first n rows."""
        self.engine.core.reset_prefix_cache()
        rows = self.rows[:n]
        sampling = FORCED | {"max_tokens": self.options.tokens}
        started = self.clock()
        done = rollout(self.run, rows, next(self.steps), self.options.group_size, sampling)
        seconds = self.clock() - started
        n_tokens = done.statistics["tokens"]
        assert n_tokens == sum(map(sum, self.lengths_of(n))) and not done.errors, done.errors
        self.idle = done.metrics(self.engine)["throughput/idle_share"]
        return n_tokens / seconds

    def user_turn(self) -> list[int]:
        """Returns the tokens of the user's answer."""
        messages = [*self.rows[0]["prompt"], {"role": "assistant", "content": ""}]
        answer = [{"role": "user", "content": ANSWER}]
        return chat_template(self.tokenizer).suffix(messages, answer, stop=None)

    def generate(self, n: int) -> float:
        """Calls LLM.generate once a turn, with the prompts of the first n rows."""
        from vllm import SamplingParams

        self.engine.core.reset_prefix_cache()
        prompts = []
        for row in self.rows[:n]:
            prompts += [render(self.tokenizer, row["prompt"])] * self.options.group_size
        suffix = self.user_turn()
        seeds = itertools.count(next(self.steps) * self.options.turns * len(prompts))
        turns = [
            [
                SamplingParams(
                    **FORCED,
                    max_tokens=length,
                    seed=next(seeds),
                    logprobs=0,
                    detokenize=False,
                )
                for length in turn
            ]
            for turn in zip(*self.lengths_of(n), strict=True)
        ]
        n_tokens = 0
        started = self.clock()
        for parameters in turns:
            requests = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = self.engine.llm.generate(requests, parameters, use_tqdm=False)
            sampled = [list(output.outputs[0].token_ids) for output in outputs]
            n_tokens += sum(map(len, sampled))
            prompts = [a + b + suffix for a, b in zip(prompts, sampled, strict=True)]
        return n_tokens / (self.clock() - started)


def measure(engine: Engine, policy, options: argparse.Namespace) -> dict:
    """Compares rollouts with LLM.generate."""
    train.sync(engine, policy, 0)
    sides = Rollouts(engine, options)
    n = options.prompts
    least, most = shortest_and_longest(options)
    millions = policy.model.num_parameters() / 1e6
    sizes = f"{n} prompts x {options.group_size}, {options.turns} turns of {least} to {most} tokens"
    print(f"{sizes}, {millions:.2f}M parameters, {policy.model.device.type}")
    tokens_per_turn = sum(map(sum, sides.lengths_of(n))) / options.turns
    seconds = []  # of a turn: a rollout's
    apart = []  # the same with prefill apart: a rollout's, that of LLM.generate
    ratios = []
    shares = []
    for i in range(options.rounds + 1):
        ours = sides.rollout(n)
        idle = sides.idle
        prefill = sides.engine_steps.take_prefill() / options.turns
        theirs = sides.generate(n)
        prefill_alone = sides.engine_steps.take_prefill() / options.turns
        if i:  # after the warm-up
            seconds.append(tokens_per_turn / ours)
            apart.append((seconds[-1] - prefill, tokens_per_turn / theirs - prefill_alone))
            ratios.append(ours / theirs)
            shares.append(idle)
        speeds = f"rollout {ours:9,.0f} tokens/s   LLM.generate {theirs:9,.0f}"
        print(f"round {i}  {speeds}   ratio {ours / theirs:.3f}", flush=True)
    idle = common.of_rounds(shares)[0]
    turn_s = common.of_rounds(seconds)
    apart_s, alone_s = (common.of_rounds(side) for side in zip(*apart))
    print(f"ratio {common.spread(ratios)}, {turn_s[0]:.4f} s a turn")
    print(f"prefill apart: {apart_s[0]:.4f} s a turn, of LLM.generate {alone_s[0]:.4f}")
    print(f"the engine is idle for {idle:.1%} of a rollout")
    return {
        "turns": options.turns,
        "ratio": common.of_rounds(ratios),
        "turn_s": turn_s,
        "apart_s": apart_s,
        "generate_apart_s": alone_s,
        "idle": idle,
    }


# ---------------------------------------------------------------- main


def parse_options() -> argparse.Namespace:
    numbers = dict(turns=1, prompts=16, group_size=8, tokens=64, rounds=5)
    parser = common.make_parser(__doc__, **numbers)
    parser.add_argument("--model", help="default: a random model")
    parser.add_argument("--spread", choices=["tail"], help="lengths of turns differ")
    parser.add_argument("--sliding_window", type=int, help="attention of the random model")
    parser.add_argument("--cpu_seconds", action="store_true", help="not those of the clock")
    parser.add_argument("--engine_args", default="{}", help="as in train.py")
    return parser.parse_args()


def main() -> None:
    """Builds a model if none is given, and an engine; measures."""
    options = parse_options()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        config = {"max_position_embeddings": 1 << 15}
        if options.sliding_window:  # in all layers
            config |= {"use_sliding_window": True, "max_window_layers": 0}
            config["sliding_window"] = options.sliding_window
        model_folder = options.model or common.random_model(folder, **config)
        args = train.Args(
            model=model_folder,
            dtype="bfloat16" if device.type == "cuda" else "float32",
            agent="fixed_turns",
            max_assistant_turns=options.turns,
            engine_args=options.engine_args,
        )
        _, longest = shortest_and_longest(options)
        of_users = (options.turns - 1) * 64
        args.max_response_tokens = options.turns * longest + of_users
        args.max_model_len = args.max_prompt_tokens + args.max_response_tokens
        common.start_alone()
        engine = Engine(model_folder, args, device)
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        policy = SimpleNamespace(model=model.to(device), engine_dtype=model.dtype)
        common.write_rows(options.out, [measure(engine, policy, options)])


if __name__ == "__main__":
    main()
