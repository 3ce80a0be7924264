"""How does the cost of a turn's tokens grow with the length of the trajectory?

    python bench/horizon.py
    python bench/horizon.py --template qwen3 --rounds 1

CPU milliseconds of single turns in a scripted trajectory, without a model. `append` renders and
tokenises the messages between two turns. TRL (tool turns only, if it is installed) and verl
(rewritten here) render a dummy chat for that.

Before that, the memory of a step in which one trajectory is much longer than the others.
"""

import argparse
import asyncio
import itertools
import resource
import sys
import time
from collections.abc import Iterator
from functools import cache, partial
from statistics import median
from types import SimpleNamespace

import common
import psutil

from agent_loop import Interaction, LoopArgs, TokenOutput, ToolAgentLoop
from data import make_batch
from examples import calculator
from examples.tiny_models import make_tokenizer

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
    """Returns (tokenizer, stop token) of a family of tests/chat_templates.py."""
    tokenizer = tokenizer_for(template, make_tokenizer())
    tokenizer.model_max_length = 1 << 30
    return tokenizer, stop_ids(template, tokenizer)[0]


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


def memory() -> dict:
    """Returns the MB of a step's tensors: one trajectory of 32k tokens among 255 of 2k."""
    prompt = [1] * 200
    outputs = []
    for n in [32_000 - len(prompt)] + [2_000 - len(prompt)] * 255:
        answer = TokenOutput([1] * n, [-1.0] * n, [0] * n, "stop", prompt)
        outputs += common.as_outputs([prompt], [answer])
        outputs[-1].extra = {"prompt": 0, "sample": len(outputs)}
    before = psutil.Process().memory_info().rss
    batch = make_batch(outputs)
    layout = batch.layout
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    of_layout = (layout.sampled, layout.nearest_place, layout.mask, *layout.places)
    sizes = [sum(x.nbytes for x in tensors) for tensors in (batch.values(), of_layout)]
    batch_mb, layout_mb, peak_mb = (round(size / 1e6) for size in (*sizes, peak))
    print(f"MB of a step: batch {batch_mb}, layout {layout_mb}, peak {peak_mb}")
    return {"label": "memory", "batch_mb": batch_mb, "layout_mb": layout_mb, "peak_mb": peak_mb}


def measure(options: argparse.Namespace) -> Iterator[dict]:
    """Yields medians of the rounds and of NEAR turns. growth: of the last one from turn 2 on."""
    turns = [turn for turn in SHOWN if turn <= options.turns]
    print(f"{'CPU ms of turn':28}" + "".join(f"{turn:10}" for turn in turns) + "    growth")
    for template, kind in itertools.product(options.template, SAID):
        play(template, kind, 2)  # warm-up
        n = options.turns + NEAR - 1
        rounds, outputs = zip(*(play(template, kind, n) for _ in range(options.rounds)))
        for way in rounds[0]:
            costs = [median(seconds) for seconds in zip(*(ways[way] for ways in rounds))]
            near = [costs[turn - 1 : turn - 1 + NEAR] for turn in turns if costs]
            ms = [round(1e3 * median(seconds), 3) for seconds in near]
            label = f"{template} {kind}: {way}"
            growth = f"{ms[-1] / ms[1]:10.2f}" if ms else "   refuses the template"
            print(f"{label:28}" + "".join(f"{each:10.3f}" for each in ms) + growth, flush=True)
            yield {"label": label, "numbers": ms, "turns": turns, "outputs": outputs[0]}


def main() -> None:
    parser = common.make_parser(__doc__, turns=200, rounds=3)
    templates = ["qwen2.5", "qwen3", "llama3.1"]
    parser.add_argument("--template", nargs="+", choices=FAMILIES, default=templates)
    options = parser.parse_args()
    common.write_rows(options.out, [memory(), *measure(options)])


if __name__ == "__main__":
    main()
