"""How much faster is a rollout that does not wait in lock step, when tools are slow?

    python bench/tools.py                                       # 64 trajectories at once
    python bench/tools.py --trajectories 512 --slots 64         # in waves of 64

Every trajectory has 4 turns of --tokens tokens and 3 calls, which take 0.1 s to --slowest seconds.
In lock step all trajectories generate, wait for the last one, call their tools, wait for the last
one, and so on; beyond --slots they work in waves. Both sides run in one process and take turns
after a warm-up; the ratios are taken round by round. They are also measured without latency, to
show what the waiting costs. Waiting alone, as if generating took no time, bounds the ratio.
"""

import argparse
import asyncio
import heapq
import itertools
import json
import random
import tempfile
import time
from types import SimpleNamespace

import common
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rollout
import train
from agent_loop import ToolAgentLoop, register
from examples import calculator

TURNS = 4  # of the assistant, with a call after each but the last
FASTEST = 0.1  # seconds of a call


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "done"


async def no_reward(output, row: dict) -> float:
    return 0.0


async def no_barrier() -> None:
    """Takes the place of the barrier where trajectories do not wait for each other."""


@register("fixed_turns")
class FixedTurns(ToolAgentLoop):
    """TURNS turns, a call of `wait` after each but the last, between two barriers."""

    async def run(self, sampling_params, **row):
        self.latencies = self.task.latencies[row["extra_info"]["index"], row["rollout_n"]]
        return await super().run(sampling_params, **row)

    async def assistant_turn(self, trajectory, sampling_params):
        await super().assistant_turn(trajectory, sampling_params)
        trajectory.stop_reason = "stop"  # the turn is as long as it should be
        return ""

    def parse(self, trajectory, text):
        turn = trajectory.assistant_turns - 1
        if turn >= TURNS - 1:
            return []
        arguments = {"seconds": self.latencies[turn]}
        return [{"name": "wait", "arguments": arguments, "error": None}]

    async def processing_tools(self, trajectory):
        await self.task.barrier()
        state = await super().processing_tools(trajectory)
        await self.task.barrier()
        return state


def bound(latencies: dict, slots: int) -> float:
    """Returns the seconds of waiting in lock step over those without it."""
    each = list(latencies.values())
    lock_step = 0.0
    for i in range(0, len(each), slots):
        wave = each[i : i + slots]
        lock_step += sum(max(turn) for turn in zip(*wave, strict=True))
    free_at = [0.0] * slots
    for waits in each:  # the next trajectory takes the first slot that is free
        heapq.heapreplace(free_at, free_at[0] + sum(waits))
    return lock_step / max(free_at)


# ---------------------------------------------------------------- the sides


class Sides:
    """Rollouts of TURNS turns, each with its own latencies, in lock step or not."""

    def __init__(self, engine: rollout.Engine, options: argparse.Namespace):
        self.options = options
        self.rows = calculator.load("train")[: options.trajectories // options.group_size]
        tokenizer = AutoTokenizer.from_pretrained(engine.args.model)
        self.task = SimpleNamespace(TOOLS=[wait], reward=no_reward)
        self.run = common.surroundings(engine, self.task, tokenizer, engine.args)
        self.steps = itertools.count()

    def draw(self, seed: int, slowest: float) -> dict:
        """Returns the latencies of each trajectory; 0.0 without a slowest one."""
        generator = random.Random(seed)

        def latency() -> float:
            return generator.uniform(FASTEST, slowest) if slowest else 0.0

        return {
            (row["extra_info"]["index"], i): [latency() for _ in range(TURNS - 1)]
            for row in self.rows
            for i in range(self.options.group_size)
        }

    def seconds(self, latencies: dict, lock_step: bool = False) -> float:
        """Returns the time of all trajectories."""
        sampling = {"temperature": 1.0, "max_tokens": self.options.tokens, "ignore_eos": True}
        group_size = self.options.group_size
        wave = self.options.slots // group_size if lock_step else len(self.rows)
        self.task.latencies = latencies
        self.task.barrier = no_barrier
        n_sampled = 0
        started = time.perf_counter()
        for i in range(0, len(self.rows), wave):
            rows = self.rows[i : i + wave]
            if lock_step:
                self.task.barrier = asyncio.Barrier(len(rows) * group_size).wait
            done = rollout.rollout(self.run, rows, next(self.steps), group_size, sampling)
            n_sampled += done.statistics["tokens"]
        seconds = time.perf_counter() - started
        assert n_sampled == self.options.trajectories * TURNS * self.options.tokens, done.errors
        return seconds


# ---------------------------------------------------------------- measuring


def parse_options() -> argparse.Namespace:
    numbers = dict(trajectories=64, group_size=8, slots=0, tokens=16, rounds=3)
    parser = common.make_parser(__doc__, **numbers)
    parser.add_argument("--model", help="default: a random model")
    parser.add_argument("--slowest", type=float, default=1.0, help="seconds of a call, at most")
    parser.add_argument("--engine_args", default="{}", help="as in train.py")
    options = parser.parse_args()
    options.slots = options.slots or options.trajectories
    if options.trajectories % options.group_size or options.slots % options.group_size:
        parser.error("--trajectories and --slots must be multiples of --group_size")
    return options


def start_engine(model_folder: str, options: argparse.Namespace) -> rollout.Engine:
    """Returns an awake engine with as many slots as the options want."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args = train.Args(
        model=model_folder,
        agent="fixed_turns",
        dtype="bfloat16" if device.type == "cuda" else "float32",
        engine_args=json.dumps({"max_num_seqs": options.slots} | json.loads(options.engine_args)),
    )
    of_tools = (TURNS - 1) * 64
    args.max_response_tokens = TURNS * options.tokens + of_tools
    args.max_model_len = args.max_prompt_tokens + args.max_response_tokens
    rollout.MAX_CONCURRENT = options.slots
    common.start_alone()
    engine = rollout.Engine(model_folder, args, device)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    train.sync(engine, SimpleNamespace(model=model, dtype=model.dtype), 0)
    return engine


def main() -> None:
    """Runs both sides by turns and prints the table."""
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        engine = start_engine(options.model or common.random_model(folder), options)
        sides = Sides(engine, options)
    ratios = {"no latency": [], "slow tool": []}
    bounds = []
    for i in range(options.rounds + 1):
        for speed, slowest in ("no latency", 0.0), ("slow tool", options.slowest):
            latencies = sides.draw(i, slowest)
            ours = sides.seconds(latencies)
            theirs = sides.seconds(latencies, lock_step=True)
            if i:  # after the warm-up
                ratios[speed].append(theirs / ours)
            print(f"round {i}, {speed}: {ours:.2f} s, in lock step {theirs:.2f} s", flush=True)
        bounds.append(bound(latencies, options.slots))

    print(f"\n{options.trajectories} trajectories, {options.slots} at once")
    table = []
    for speed, values in ratios.items():
        name = f"4 turns, {speed}: lock step"
        print(f"{name:32} flatrl is faster by {common.spread(values)}")
        table.append({"side": name, "ratio": common.of_rounds(values)})
    limits = common.of_rounds(bounds[1:])
    print(f"waiting alone, lock step against flatrl: {limits[0]:.2f}")
    common.write_rows(options.out, [*table, {"side": "waiting alone", "ratio": limits}])


if __name__ == "__main__":
    main()
