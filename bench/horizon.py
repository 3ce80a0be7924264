"""How does the cost of a turn grow with the length of the trajectory?

    python bench/horizon.py
    python bench/horizon.py --part turns --template qwen3 a_chat_template.jinja

turns: CPU milliseconds of single turns in a scripted trajectory, without a model. `append` renders
    and tokenises the messages between two turns. TRL (tool turns only, if it is installed) and
    verl (rewritten here) render a dummy chat for that.
engine: milliseconds per turn on the real engine, with a tiny model and a simulated user who answers
    immediately: elapsed time, and CPU time of the model's forward passes, of the rest of the
    engine's thread, and of the agent loops' thread. Prefill and attention, which must grow with
    the context, are in the forward passes.
memory: the outputs of a step, one with --long tokens and 255 with 2,048: the lists that a rank
    receives, and the tensors, which are padded to the longest output.
"""

import argparse
import asyncio
import itertools
import pickle
import random
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import common
import torch
from transformers import AutoModelForCausalLM

import data
import train
from agent_loop import Interaction, LoopArgs, TokenOutput, ToolAgentLoop, register
from examples import calculator
from examples.tiny_models import make_tokenizer
from rollout import Engine, rollout

sys.path.append(str(common.REPO / "tests"))
from chat_templates import FAMILIES, stop_ids, tokenizer_for

SHOWN = (1, 2, 10, 50, 100, 200)
NEAR = 5  # turns, whose median makes a number steadier
CALL = '<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{}+7"}}}}\n</tool_call>'
SAID = {
    "tool": CALL,
    "reasoning": "<think>\nThe sum of the others is known.\n</think>\n\n" + CALL,
    "user": "The sum of the others is known, so I would add {} next, and then look again.",
}
ROW = calculator.load("train")[0]


class User(Interaction):
    """A simulated user, who always answers."""

    async def generate_response(self, request_id, messages, **kwargs):
        return False, f"No, there are {len(messages)} messages. Try again!", None, {}


@cache
def chat_tokenizer(template: str) -> tuple:
    """Returns (tokenizer, stop token). template: a family, or a file that uses Qwen3's tokens."""
    name = template if template in FAMILIES else "qwen3"
    tokenizer = tokenizer_for(name, make_tokenizer())
    if template not in FAMILIES:
        tokenizer.chat_template = Path(template).read_text()
    tokenizer.model_max_length = 1 << 30
    return tokenizer, stop_ids(name, tokenizer)[0]


def print_row(label: str, numbers, note: str = "", **more) -> dict:
    """Prints a line of a table, and returns it for --out."""
    print(f"{label:28}" + "".join(f"{number:10.4g}" for number in numbers) + note, flush=True)
    return {"label": label, "numbers": [round(number, 3) for number in numbers]} | more


def short(template: str) -> str:
    return Path(template).name.removesuffix(".jinja")


# ---------------------------------------------------------------- turns


class Script:
    """An engine that answers immediately, always with the same text except for a number."""

    def __init__(self, tokenizer, said: str, stop: int):
        self.turns = ([*tokenizer.encode(said.format(n)), stop] for n in itertools.count())

    async def generate(self, *, prompt_ids, **ignored) -> TokenOutput:
        ids = next(self.turns)
        return TokenOutput(ids, [-1.0] * len(ids), [0] * len(ids), "stop", prompt_ids)


def cpu_seconds(function, *args) -> float:
    started = time.thread_time()
    function(*args)
    return time.thread_time() - started


def play(template: str, kind: str, turns: int) -> tuple[dict, int]:
    """Plays a trajectory; returns {way: CPU seconds of each turn} and its number of outputs."""
    tokenizer, stop = chat_tokenizer(template)
    ways = {"append": [], "verl": []}
    suffixes = {"verl": verl_suffix(tokenizer)}
    if kind != "user" and not common.missing_for_trl():
        ways["TRL"] = []
        suffixes["TRL"] = trl_suffix(tokenizer)

    class Timed(ToolAgentLoop):
        def append(self, trajectory, messages, *others):
            for way, suffix_of in suffixes.items():
                if suffix_of:
                    ways[way].append(cpu_seconds(suffix_of, messages))
            started = time.thread_time()
            fits = super().append(trajectory, messages, *others)
            ways["append"].append(time.thread_time() - started)
            return fits

    answers = {"INTERACTIONS": [User()]} if kind == "user" else {"TOOLS": [calculator.calculator]}
    args = LoopArgs(max_response_tokens=1 << 40, max_assistant_turns=turns + 1)
    engine = Script(tokenizer, SAID[kind], stop)
    loop = Timed(engine, tokenizer, None, SimpleNamespace(**answers), args)
    outputs = asyncio.run(loop.run({"stop_token_ids": [stop]}, **ROW))
    assert len(ways["append"]) == turns
    return ways, len(outputs) if isinstance(outputs, list) else 1


def verl_suffix(tokenizer):
    """Returns verl's function from messages to tokens, rewritten: a dummy chat is cut off."""
    write = partial(tokenizer.apply_chat_template, return_dict=False)
    base = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    n = len(write(base))
    return lambda messages: write([*base, *messages], add_generation_prompt=True)[n:]


def trl_suffix(tokenizer):
    """Returns TRL's function from messages to tokens, None if it refuses the template."""
    from trl import GRPOTrainer, chat_template_utils

    trainer = SimpleNamespace(processing_class=tokenizer, _tokenizer=tokenizer, _is_vlm=False)
    trainer.chat_template = None
    trainer.chat_template_kwargs = {}
    try:
        if not chat_template_utils.is_chat_template_prefix_preserving(tokenizer):
            trainer.chat_template = chat_template_utils.get_training_chat_template(tokenizer)
    except ValueError:
        return None
    return partial(GRPOTrainer._get_tool_suffix_ids, trainer)


def measure_turns(options: argparse.Namespace) -> Iterator[dict]:
    """Yields medians of the rounds and of NEAR turns. growth: of the last one from turn 2 on."""
    turns = [turn for turn in SHOWN if turn <= options.turns]
    print_row("CPU ms of turn", turns, "    growth")
    for template, kind in itertools.product(options.template, SAID):
        play(template, kind, 2)  # warm-up
        n = options.turns + NEAR - 1
        rounds, outputs = zip(*(play(template, kind, n) for _ in range(options.rounds)))
        for way in rounds[0]:
            costs = [median(seconds) for seconds in zip(*(ways[way] for ways in rounds))]
            near = [costs[turn - 1 : turn - 1 + NEAR] for turn in turns if costs]
            ms = [1e3 * median(seconds) for seconds in near]
            note = f"{ms[-1] / ms[1]:10.2f}" if ms else "   refuses the template"
            if way == "append" and outputs[0] > 1:
                note += f", {outputs[0]} outputs"
            label = f"{short(template)} {kind}: {way}"
            yield print_row(label, ms, note, turns=turns, outputs=outputs[0])


# ---------------------------------------------------------------- engine


@register("fixed_turns")
class FixedTurns(ToolAgentLoop):
    """Turns of a fixed length that do not count as cut off."""

    async def assistant_turn(self, trajectory, sampling_params):
        await super().assistant_turn(trajectory, sampling_params)
        trajectory.stop_reason = "stop"
        return ""


def start_engine(folder: str, vocab_size: int, options: argparse.Namespace) -> Engine:
    """Returns an awake engine with a tiny random model, which records its `model_seconds`."""
    window = options.many * (options.tokens + 128)
    common.random_model(folder, vocab_size=vocab_size, max_position_embeddings=window)
    args = train.Args(
        model=folder,
        dtype="float32",
        agent="fixed_turns",
        max_response_tokens=window,
        max_model_len=window,
        engine_args=options.engine_args,
    )
    common.start_alone()
    engine = Engine(folder, args, torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    train.sync(engine, SimpleNamespace(model=model, dtype=model.dtype), 0)
    engine.model_seconds = 0.0

    def timed(forward, *args, **kwargs):
        started = time.thread_time()
        result = forward(*args, **kwargs)
        engine.model_seconds += time.thread_time() - started
        return result

    engine.llm.apply_model(lambda model: setattr(model, "forward", partial(timed, model.forward)))
    return engine


async def thread_time() -> float:
    return time.thread_time()


def roll_out(run, turns: int, step: int, options: argparse.Namespace) -> list[float]:
    """Returns milliseconds a turn: elapsed, and CPU of model, rest of the engine, loops."""

    def clocks() -> list[float]:
        loops = run.background.submit(thread_time()).result()
        engine = time.thread_time() - run.engine.model_seconds
        return [time.perf_counter(), run.engine.model_seconds, engine, loops]

    run.engine.core.reset_prefix_cache()
    run.args.max_assistant_turns = turns
    letters = run.tokenizer.convert_tokens_to_ids([*"abcdefghij"])
    sampling = {"temperature": 1.0, "ignore_eos": True, "allowed_token_ids": letters}
    sampling["max_tokens"] = options.tokens
    before = clocks()
    done = rollout(run, [ROW], step, options.trajectories, sampling)
    spent = [after - at for at, after in zip(before, clocks())]
    n = options.trajectories * turns
    assert done.statistics["tokens"] == n * options.tokens and not done.errors, done.errors
    return [1e3 * seconds / n for seconds in spent]


def measure_engine(options: argparse.Namespace) -> Iterator[dict]:
    """Yields medians of the rounds. growth: cost with --many turns divided by that with --few.

    It excludes the model: once as elapsed time, which includes waits, once as CPU time."""
    tokenizers = [chat_tokenizer(template)[0] for template in options.template]
    task = SimpleNamespace(INTERACTIONS=[User()], reward=calculator.reward)
    steps = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        engine = start_engine(folder, max(map(len, tokenizers)), options)
        print(f"\n{'ms a turn':28}   elapsed     model    engine     loops   growth: elapsed, CPU")
        for template, tokenizer in zip(options.template, tokenizers):
            run = common.surroundings(engine, task, tokenizer, engine.args)
            roll_out(run, options.few, next(steps), options)  # warm-up
            at_first = None
            for turns in (options.few, options.many):
                rounds = [roll_out(run, turns, next(steps), options) for _ in range(options.rounds)]
                ms = [median(part) for part in zip(*rounds)]
                elapsed, forward, engine_cpu, loops = ms
                host = elapsed - forward, engine_cpu + loops
                at_first = at_first or host
                growth = "".join(f"{late / early:10.2f}" for late, early in zip(host, at_first))
                yield print_row(f"{short(template)}, {turns} turns", ms, growth)


# ---------------------------------------------------------------- memory


def received_outputs(lengths: list[int]) -> list:
    """Returns outputs of these lengths, as they arrive from another rank."""
    answers = []
    for n in lengths:
        ids = [random.randrange(1000, 150000) for _ in range(n - 1)]
        logprobs = [-random.random() for _ in ids]
        answers.append(TokenOutput(ids, logprobs, [0] * len(ids), "stop", []))
    outputs = common.as_outputs([[1]] * len(lengths), answers)
    return pickle.loads(pickle.dumps(outputs))


def measure_memory(options: argparse.Namespace) -> Iterator[dict]:
    """Yields MB and bytes per token of the lists and of the tensors."""
    lengths = [options.long] + 255 * [2048]
    n = sum(lengths)
    tracemalloc.start()
    outputs = received_outputs(lengths)
    lists, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tensors = sum(tensor.nbytes for tensor in data.collate(outputs).values())
    print(f"\n256 outputs of {n:,} tokens, the longest of {options.long:,}")
    for label, size in {"lists": lists, "tensors": tensors}.items():
        yield print_row(label, [size / 1e6, size / n], "   MB, bytes a token")


def main() -> None:
    """Measures the parts one after the other and prints their tables."""
    numbers = dict(turns=200, few=10, many=160, trajectories=16, tokens=8, long=32768, rounds=3)
    parser = common.make_parser(__doc__, **numbers)
    parser.add_argument("--template", nargs="+", default=["qwen2.5", "qwen3", "llama3.1"])
    parser.add_argument("--engine_args", default="{}", help="as in train.py")
    parts = {"turns": measure_turns, "engine": measure_engine, "memory": measure_memory}
    parser.add_argument("--part", nargs="+", choices=parts, default=[*parts])
    options = parser.parse_args()
    rows = [{"part": part} | row for part in options.part for row in parts[part](options)]
    common.write_rows(options.out, rows)


if __name__ == "__main__":
    main()
