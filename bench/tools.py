"""Compares rollouts with slow tools: flatrl's, turns in lock step, and TRL's GRPOTrainer.

    pip install trl==1.16.0 datasets
    python bench/tools.py [--trajectories 64] [--slots 64] [--rounds 3] [--no_serial] [--no_trl]

All sides run in one process and take turns (A B A B ...), after a warm-up without latency;
ratios are taken round by round. A tool call takes 0.1 s to --slowest (1 s) seconds, drawn
uniformly, seeded by the round. There are two comparisons. Both time whole rollouts, and
nothing else of a training step:

1.  Lock step. Every trajectory has 4 assistant turns of --tokens tokens and 3 calls, whatever
    the model says. Engine, agent loop, lengths and latencies are the same on both sides, but
    in lock step all trajectories generate, wait for the last one, call their tools, wait for
    the last one, and so on. Where fewer than all trajectories run at once (--slots), lock step
    works in waves of that size. A framework that starts all of them, however many the engine
    holds, is better compared without --slots. `one call at a time` is lock step whose tools
    run one trajectory after another, as TRL 1.16 runs them.
    Waiting alone, as if generating
    took no time, bounds the ratio. With 64 slots it is the sum of three longest latencies of
    64 over the longest of 64 sums of three. With many trajectories a slot it is the longest
    latency over the mean one, at most 1.0 / 0.55 = 1.8. It is printed as `bound`; generating
    while others wait can add to it.
2.  TRL. The built-in task as its model plays it, with about 0.45 calls a trajectory. The
    answers are sampled: the tokens and calls of both sides have the same distribution but are
    not the same. Timed are rollout(), with rewards, and GRPOTrainer._generate (transformers'
    generate, and the tool loop), without rewards.

Both comparisons are also made without latency, once a round, to show what the waiting costs.
"""

import argparse
import asyncio
import contextlib
import functools
import heapq
import itertools
import random
import statistics
import tempfile
import time
from types import SimpleNamespace

import common
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from agent_loop import ToolAgentLoop, register
from examples import calculator as example
from examples.tiny_models import CHAT_TEMPLATE
from flatrl.models import task_model
from rollout import Engine, rollout

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


@register("fixed_turns")
class FixedTurns(ToolAgentLoop):
    """TURNS assistant turns, a call of `wait` after each but the last; task.together() is
    where lock step waits."""

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
        return [{"name": "wait", "arguments": {"seconds": self.latencies[turn]}, "error": None}]

    async def processing_tools(self, trajectory):
        await self.task.together()
        state = await super().processing_tools(trajectory)
        await self.task.together()
        return state

    async def call_tool(self, trajectory, call):
        async with self.task.turnstile:
            return await super().call_tool(trajectory, call)


async def nobody() -> None:
    """Is `task.together` without lock step: there is nobody to wait for."""


def bound(latencies: dict, slots: int) -> float:
    """Returns the seconds of waiting in lock step over those without it, as if generating took
    no time."""
    each = list(latencies.values())
    lock_step = 0.0
    for i in range(0, len(each), slots):
        lock_step += sum(max(turn) for turn in zip(*each[i : i + slots], strict=True))
    free_at = [0.0] * slots
    for waits in each:  # the next trajectory takes the first slot that is free
        heapq.heapreplace(free_at, free_at[0] + sum(waits))
    return lock_step / max(free_at)


# ---------------------------------------------------------------- 1: four turns


class FourTurns:
    """Runs trajectories of TURNS turns, each after its own latencies, in lock step or not."""

    def __init__(self, play, rows: list[dict], options: argparse.Namespace):
        self.play, self.rows, self.options = play, rows, options

    def draw(self, seed: int, slowest: float) -> dict:
        """Returns the latencies of each trajectory, named by (row, number in its group); 0.0
        without a slowest one."""
        generator = random.Random(seed)
        latencies = {}
        for row in self.rows:
            for i in range(self.options.group_size):
                waits = [
                    generator.uniform(FASTEST, slowest) if slowest else 0.0
                    for _ in range(TURNS - 1)
                ]
                latencies[row["extra_info"]["index"], i] = waits
        return latencies

    def seconds(
        self, latencies: dict, lock_step: bool = False, one_at_a_time: bool = False
    ) -> float:
        """Returns how long all trajectories take; in lock step as many at a time as there are
        slots."""
        group_size, n_tokens = self.options.group_size, self.options.tokens
        task = SimpleNamespace(
            TOOLS=[wait], reward=no_reward, latencies=latencies, together=nobody
        )
        task.turnstile = asyncio.Lock() if one_at_a_time else contextlib.nullcontext()
        sampling = {
            "temperature": 1.0,
            "max_tokens": n_tokens,
            "ignore_eos": True,
            "stop_token_ids": [],
        }
        wave = self.options.slots // group_size if lock_step else len(self.rows)
        n_sampled = 0
        started = time.perf_counter()
        for i in range(0, len(self.rows), wave):
            rows = self.rows[i : i + wave]
            if lock_step:
                task.together = asyncio.Barrier(len(rows) * group_size).wait
            n_sampled += self.play(task, "fixed_turns", rows, sampling).statistics["tokens"]
        seconds = time.perf_counter() - started
        assert n_sampled == self.options.trajectories * TURNS * n_tokens
        return seconds


# ---------------------------------------------------------------- 2: the built-in task, beside TRL


class BuiltInTask:
    """Plays the built-in task with a slow calculator, in flatrl and in TRL, and counts the
    calls."""

    def __init__(
        self, play, rows: list[dict], options: argparse.Namespace, model: str, cuda: bool
    ):
        self.play, self.rows, self.options = play, rows, options
        self.n_calls = 0
        self.latency = None  # () -> seconds of the next call

        @functools.wraps(example.calculator)
        async def calculator(expression: str) -> str:
            self.n_calls += 1
            await asyncio.sleep(self.latency())
            return example.calculator(expression)

        self.tool = calculator
        self.trainer = self.make_trainer(model, cuda)
        self.calls: dict[str, list[float]] = {
            "flatrl": [],
            "TRL": [],
        }  # calls a trajectory, of each round

    def make_trainer(self, model: str, cuda: bool):
        """Returns TRL's GRPOTrainer of the same model, prompts, lengths and tool."""
        from trl.chat_template_utils import qwen3_template

        tokenizer = AutoTokenizer.from_pretrained(model)
        if tokenizer.chat_template == CHAT_TEMPLATE.strip():
            # TRL knows how to parse the calls of hub models' templates; ours writes them as Qwen3's does.
            tokenizer.response_template = qwen3_template
        trainer = common.trl_trainer(
            model,
            tempfile.mkdtemp(),
            [{"prompt": row["prompt"]} for row in self.rows],
            lambda completions, **columns: [0.0] * len(completions),
            tokenizer=tokenizer,
            tools=[self.tool],
            dtype=torch.bfloat16 if cuda else torch.float32,
            max_completion_length=MAX_RESPONSE,
            temperature=1.0,
            per_device_train_batch_size=self.options.trajectories,
            num_generations=self.options.group_size,
        )
        trainer.model.train()
        return trainer

    def flatrl(self) -> float:
        """Returns the seconds of a rollout."""
        task = SimpleNamespace(TOOLS=[self.tool], reward=example.reward)
        started = time.perf_counter()
        self.play(
            task, "tool_agent", self.rows, {"temperature": 1.0, "max_tokens": MAX_RESPONSE}
        )
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
            prompts += [{"prompt": row["prompt"]}] * self.options.group_size
        self.trainer._generate_and_score_completions(prompts)
        return seconds

    def seconds(self, side: str, seed: int, slowest: float) -> float:
        """Returns the seconds of one side, "flatrl" or "TRL", whose calls take up to `slowest`
        seconds."""
        generator = random.Random(seed)
        self.n_calls = 0
        self.latency = lambda: generator.uniform(FASTEST, slowest) if slowest else 0.0
        seconds = self.flatrl() if side == "flatrl" else self.trl()
        self.calls[side].append(self.n_calls / self.options.trajectories)
        return seconds


# ---------------------------------------------------------------- measuring


def one_round(
    i: int, four_turns: FourTurns, built_in: BuiltInTask | None, slowest: float, serial: bool
) -> dict:
    """Runs every side once, with tools that take up to `slowest` seconds (0: none); returns
    name -> (seconds, those of flatrl)."""
    speed = "slow tool" if slowest else "no latency"
    latencies = four_turns.draw(i, slowest)
    ours = four_turns.seconds(latencies)
    seconds = {f"4 turns, {speed}: flatrl": (ours, ours)}
    seconds[f"4 turns, {speed}: lock step"] = (
        four_turns.seconds(latencies, lock_step=True),
        ours,
    )
    if serial:
        one_at_a_time = four_turns.seconds(latencies, lock_step=True, one_at_a_time=True)
        seconds[f"4 turns, {speed}: lock step, one call at a time"] = one_at_a_time, ours
    if built_in:
        ours = built_in.seconds("flatrl", i, slowest)
        seconds[f"built-in task, {speed}: flatrl"] = ours, ours
        seconds[f"built-in task, {speed}: TRL"] = built_in.seconds("TRL", i, slowest), ours
    return seconds


def print_table(table: dict[str, list[tuple[float, float]]], trajectories: int) -> None:
    """Prints medians. table: for each side the pairs (seconds, those of flatrl) of all rounds."""
    print(
        f"\n{'medians':50} {'seconds':>8} {'trajectories/s':>15} {'flatrl is faster by (min - max)':>35}"
    )
    for name, pairs in table.items():
        seconds = statistics.median(theirs for theirs, _ in pairs)
        ratio = (
            ""
            if name.endswith("flatrl")
            else common.spread([theirs / ours for theirs, ours in pairs])
        )
        print(f"{name:50} {seconds:8.2f} {trajectories / seconds:15.1f} {ratio:>35}")


def parse_options() -> argparse.Namespace:
    """Returns the flags; --slots is set. Ends the program with a message on those that do not go together."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model",
        help="default: the built-in task's, which calls its tool in 4 trajectories of 10",
    )
    numbers = (
        ("trajectories", 64),
        ("group_size", 8),
        ("slots", None),
        ("tokens", 16),
        ("rounds", 3),
    )
    for name, default in numbers:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--slowest", type=float, default=1.0, help="seconds that a call takes at most"
    )
    parser.add_argument(
        "--no_serial",
        action="store_true",
        help="leave out lock step with one call at a time (slow)",
    )
    parser.add_argument("--no_trl", action="store_true")
    parser.add_argument(
        "--engine_args", default="{}", help="of flatrl's engine, as in train.py"
    )
    options = parser.parse_args()
    options.slots = options.slots or options.trajectories
    if options.trajectories % options.group_size or options.slots % options.group_size:
        parser.error("--trajectories and --slots must be multiples of --group_size")
    if not options.no_trl and common.missing_for_trl():
        parser.error(f"{common.missing_for_trl()}, or leave TRL out with --no_trl")
    return options


def main() -> None:
    """Builds the engine and TRL's trainer, runs all sides by turns, and prints the table."""
    options = parse_options()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    args = train.Args(
        task=str(common.REPO / "examples/calculator.py"),
        model=options.model,
        max_num_seqs=options.slots,
        max_concurrent=options.slots,
        dtype="bfloat16" if cuda else "float32",
        engine_args=options.engine_args,
    )
    common.start_alone()
    args.model = args.model or task_model(example, args)
    args.max_response_tokens = max(
        MAX_RESPONSE, TURNS * options.tokens + (TURNS - 1) * 64
    )  # room for tool responses
    args.max_model_len = args.max_prompt_tokens + args.max_response_tokens
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    engine = Engine(args.model, args, device, [tokenizer.eos_token_id])
    model = AutoModelForCausalLM.from_pretrained(args.model)
    train.sync(engine, SimpleNamespace(model=model, dtype=model.dtype), 0)
    system = {"role": "system", "content": example.SYSTEM_PROMPT}
    rows = example.load("train")[: options.trajectories // options.group_size]
    rows = [{**row, "prompt": [system, *row["prompt"]]} for row in rows]
    run = common.surroundings(engine, None, tokenizer, args)
    steps = itertools.count()  # every rollout has a number of its own

    def play(task, agent: str, rows: list[dict], sampling: dict):
        """Runs one rollout of these rows; returns its phase."""
        run.task, args.agent = task, agent
        phase = rollout(run, rows, next(steps), options.group_size, sampling)
        assert len(phase.outputs) == len(rows) * options.group_size and not phase.errors, (
            phase.counts
        )
        return phase

    four_turns = FourTurns(play, rows, options)
    built_in = None if options.no_trl else BuiltInTask(play, rows, options, args.model, cuda)
    sizes = f"{options.trajectories} trajectories, {options.slots} at once; {options.tokens} tokens a turn"
    print(f"{sizes}; {device.type}")
    table: dict[str, list[tuple[float, float]]] = {}
    bounds = []
    for i in range(options.rounds + 1):
        seconds = one_round(i, four_turns, built_in, 0.0, serial=False)
        if i:
            seconds |= one_round(
                i, four_turns, built_in, options.slowest, serial=not options.no_serial
            )
            bounds.append(bound(four_turns.draw(i, options.slowest), options.slots))
            for name, pair in seconds.items():
                table.setdefault(name, []).append(pair)
        title = f"round {i}" if i else "warm-up"
        print(
            f"{title}: "
            + ", ".join(f"{name} {theirs:.2f} s" for name, (theirs, _) in seconds.items()),
            flush=True,
        )
    print_table(table, options.trajectories)
    print(f"bound of lock step / flatrl by waiting alone: {statistics.median(bounds):.2f}")
    for side, calls in built_in.calls.items() if built_in else ():
        print(
            f"calls per trajectory of the built-in task, {side}: {statistics.mean(calls[1:]):.2f}"
        )


if __name__ == "__main__":
    main()
