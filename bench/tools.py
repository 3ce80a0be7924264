"""How much faster is a rollout that does not wait in lock step, when tools are slow?

    pip install trl==1.16.0 datasets
    python bench/tools.py                                       # 64 trajectories at once
    python bench/tools.py --trajectories 512 --slots 64         # in waves of 64
    python bench/tools.py --no_trl

A tool call takes 0.1 s to --slowest seconds. All sides run in one process and take turns after a
warm-up; the ratios are taken round by round.

1.  Lock step: every trajectory has 4 turns of --tokens tokens and 3 calls. In lock step all
    trajectories generate, wait for the last one, call their tools, wait for the last one, and
    so on; beyond --slots they work in waves. Waiting alone, as if generating took no time,
    bounds the ratio.
2.  TRL: the built-in task, with about 0.45 calls a trajectory. Timed are rollout() and
    GRPOTrainer._generate, whose tools run one after the other in TRL 1.16. Its answers are
    sampled: tokens and calls have the same distribution on both sides, but are not the same.

Both are also measured without latency, to show what the waiting costs.
"""

import argparse
import asyncio
import functools
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
from examples import calculator as example
from examples.tiny_models import CHAT_TEMPLATE
from flatrl.models import task_model

TURNS = 4  # of the assistant, with a call after each but the last
FASTEST = 0.1  # seconds of a call
MAX_RESPONSE = 128  # tokens of a trajectory of the built-in task, on both sides


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


class FourTurns:
    """Rollouts of TURNS turns, each with its own latencies, in lock step or not."""

    def __init__(self, play, rows: list[dict], options: argparse.Namespace):
        self.play = play
        self.rows = rows
        self.options = options

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
        task = SimpleNamespace(
            TOOLS=[wait],
            reward=no_reward,
            latencies=latencies,
            barrier=no_barrier,
        )
        sampling = {
            "temperature": 1.0,
            "max_tokens": self.options.tokens,
            "ignore_eos": True,
            "stop_token_ids": [],
        }
        group_size = self.options.group_size
        wave = self.options.slots // group_size if lock_step else len(self.rows)
        n_sampled = 0
        started = time.perf_counter()
        for i in range(0, len(self.rows), wave):
            rows = self.rows[i : i + wave]
            if lock_step:
                task.barrier = asyncio.Barrier(len(rows) * group_size).wait
            done = self.play(task, "fixed_turns", rows, sampling)
            n_sampled += done.statistics["tokens"]
        seconds = time.perf_counter() - started
        assert n_sampled == self.options.trajectories * TURNS * self.options.tokens
        return seconds


class BuiltInTask:
    """The built-in task with a slow calculator, in flatrl and in TRL."""

    def __init__(self, play, rows: list[dict], options: argparse.Namespace, model: str):
        self.play = play
        self.rows = rows
        self.group_size = options.group_size
        self.latency = None  # () -> seconds of the next call
        self.n_calls = 0

        @functools.wraps(example.calculator)
        async def calculator(expression: str) -> str:
            self.n_calls += 1
            await asyncio.sleep(self.latency())
            return example.calculator(expression)

        self.tool = calculator
        self.trainer = self.make_trainer(model, options)

    def make_trainer(self, model: str, options: argparse.Namespace):
        """Returns TRL's GRPOTrainer of the same model, prompts, lengths and tool."""
        from trl.chat_template_utils import qwen3_template

        tokenizer = AutoTokenizer.from_pretrained(model)
        if tokenizer.chat_template == CHAT_TEMPLATE.strip():
            tokenizer.response_template = qwen3_template  # our calls are written like Qwen3's
        trainer = common.trl_trainer(
            model,
            tempfile.mkdtemp(),
            [{"prompt": row["prompt"]} for row in self.rows],
            lambda completions, **columns: [0.0] * len(completions),
            tokenizer=tokenizer,
            tools=[self.tool],
            max_completion_length=MAX_RESPONSE,
            temperature=1.0,
            per_device_train_batch_size=options.trajectories,
            num_generations=options.group_size,
        )
        trainer.model.train()
        return trainer

    def set_latency(self, seed: int, slowest: float) -> None:
        """Draws the seconds of the next calls."""
        generator = random.Random(seed)
        self.latency = lambda: generator.uniform(FASTEST, slowest) if slowest else 0.0

    def flatrl(self) -> float:
        """Returns the seconds of a rollout."""
        task = SimpleNamespace(TOOLS=[self.tool], reward=example.reward)
        sampling = {"temperature": 1.0, "max_tokens": MAX_RESPONSE}
        started = time.perf_counter()
        self.play(task, "tool_agent", self.rows, sampling)
        return time.perf_counter() - started

    def trl(self) -> float:
        """Returns the seconds of the trainer's _generate."""
        seconds = 0.0

        def timed(prompts):
            nonlocal seconds
            started = time.perf_counter()
            result = type(self.trainer)._generate(self.trainer, prompts)
            seconds += time.perf_counter() - started
            return result

        self.trainer._generate = timed
        prompts = []
        for row in self.rows:
            prompts += [{"prompt": row["prompt"]}] * self.group_size
        self.trainer._generate_and_score_completions(prompts)
        return seconds


# ---------------------------------------------------------------- measuring


def one_round(i: int, four_turns: FourTurns, built_in: BuiltInTask | None, slowest: float) -> dict:
    """Runs every side once; returns {the comparison: (seconds, flatrl's seconds)}."""
    speed = "slow tool" if slowest else "no latency"
    latencies = four_turns.draw(i, slowest)
    ours = four_turns.seconds(latencies)
    theirs = four_turns.seconds(latencies, lock_step=True)
    seconds = {f"4 turns, {speed}: lock step": (theirs, ours)}
    if built_in:
        built_in.set_latency(i, slowest)
        ours = built_in.flatrl()
        built_in.set_latency(i, slowest)
        seconds[f"built-in task, {speed}: TRL"] = (built_in.trl(), ours)
    return seconds


def parse_options() -> argparse.Namespace:
    numbers = dict(trajectories=64, group_size=8, slots=0, tokens=16, rounds=3)
    parser = common.make_parser(__doc__, **numbers)
    parser.add_argument("--model", help="default: the built-in task's")
    parser.add_argument("--slowest", type=float, default=1.0, help="seconds of a call, at most")
    parser.add_argument("--no_trl", action="store_true")
    parser.add_argument("--engine_args", default="{}", help="as in train.py")
    options = parser.parse_args()
    options.slots = options.slots or options.trajectories
    if options.trajectories % options.group_size or options.slots % options.group_size:
        parser.error("--trajectories and --slots must be multiples of --group_size")
    if not options.no_trl and common.missing_for_trl():
        parser.error(f"{common.missing_for_trl()}, or leave TRL out with --no_trl")
    return options


def start_engine(options: argparse.Namespace) -> tuple[rollout.Engine, AutoTokenizer]:
    """Returns an awake engine with as many slots as the options want, and its tokenizer."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args = train.Args(
        task=str(common.REPO / "examples/calculator.py"),
        model=options.model,
        dtype="bfloat16" if device.type == "cuda" else "float32",
        engine_args=json.dumps({"max_num_seqs": options.slots} | json.loads(options.engine_args)),
    )
    rollout.MAX_CONCURRENT = options.slots
    common.start_alone()
    args.model = args.model or task_model(example, args)
    of_tools = (TURNS - 1) * 64
    args.max_response_tokens = max(MAX_RESPONSE, TURNS * options.tokens + of_tools)
    args.max_model_len = args.max_prompt_tokens + args.max_response_tokens
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    engine = rollout.Engine(args.model, args, device, [tokenizer.eos_token_id])
    model = AutoModelForCausalLM.from_pretrained(args.model)
    train.sync(engine, SimpleNamespace(model=model, dtype=model.dtype), 0)
    return engine, tokenizer


def main() -> None:
    """Runs all sides by turns and prints the table."""
    options = parse_options()
    engine, tokenizer = start_engine(options)
    system = {"role": "system", "content": example.SYSTEM_PROMPT}
    rows = example.load("train")[: options.trajectories // options.group_size]
    rows = [{**row, "prompt": [system, *row["prompt"]]} for row in rows]
    run = common.surroundings(engine, None, tokenizer, engine.args)
    steps = itertools.count()

    def play(task, agent: str, rows: list[dict], sampling: dict):
        """Returns what one rollout of these rows brought."""
        run.task = task
        run.args.agent = agent
        done = rollout.rollout(run, rows, next(steps), options.group_size, sampling)
        assert len(done.outputs) == len(rows) * options.group_size and not done.errors
        return done

    four_turns = FourTurns(play, rows, options)
    built_in = None if options.no_trl else BuiltInTask(play, rows, options, engine.args.model)
    rounds: list[dict] = []
    for i in range(options.rounds + 1):
        seconds = one_round(i, four_turns, built_in, 0.0)
        if i:
            seconds |= one_round(i, four_turns, built_in, options.slowest)
            rounds.append(seconds)
        title = f"round {i}" if i else "warm-up"
        sides = ", ".join(f"{name} {theirs:.2f} s" for name, (theirs, _) in seconds.items())
        print(f"{title}: {sides}", flush=True)

    print(f"\n{options.trajectories} trajectories, {options.slots} at once")
    table = []
    for name in rounds[0]:
        ratios = [theirs / ours for theirs, ours in (seconds[name] for seconds in rounds)]
        print(f"{name:40} flatrl is faster by {common.spread(ratios)}")
        table.append({"side": name, "ratio": common.of_rounds(ratios)})
    draws = [four_turns.draw(i + 1, options.slowest) for i in range(options.rounds)]
    bounds = common.of_rounds([bound(latencies, options.slots) for latencies in draws])
    print(f"waiting alone, lock step against flatrl: {bounds[0]:.2f}")
    common.write_rows(options.out, [*table, {"side": "waiting alone", "ratio": bounds}])


if __name__ == "__main__":
    main()
