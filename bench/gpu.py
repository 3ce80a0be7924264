"""What does flatrl do on a GPU? Measures what a CPU cannot show, in one table.

    python bench/gpu.py --size 7B                    # (GPU) a shape of Qwen2.5: 0.5B, 1.5B, 7B
    python bench/gpu.py --only sync agree            # (GPU) some of it
    python bench/gpu.py --only --model shapes/0.5B   # nothing: it writes the model
    python bench/gpu.py --size tiny --cycles 2       # on a CPU, to try the code

The model is random, with logits as spread as trained ones. bench/gpu.sh runs this and more.

    agree      how far the engine's logprobs are from the trainer's
    sync       a weight sync, and a plain copy of the same tensors
    sleep      memory freed, of what the engine holds; memory lost after --cycles

bench/rollout.py and trl.py measure a GPU, too. tests/gpu compares attention and logprobs with
float64.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import common
import torch
from fits import SHAPES
from transformers import AutoModelForCausalLM, Qwen2Config

import train
from examples.tiny_models import make_tokenizer
from flatrl import models
from flatrl.processes import Background

GIB = 1 << 30
FORCED = {"temperature": 1.0, "ignore_eos": True, "stop_token_ids": []}
Row = tuple[str, str]  # what was measured, and the figure


def build(size: str, folder: str | Path) -> None:
    """Writes a random model of that shape with the calculator's tokenizer."""
    make_tokenizer().save_pretrained(folder)
    config = Qwen2Config(
        **SHAPES[size]._asdict(),
        max_position_embeddings=8192,
        eos_token_id=1,
    )
    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        dtype = torch.bfloat16 if cuda else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    scale = 3 / config.initializer_range / config.hidden_size**0.5
    torch.nn.init.constant_(model.model.norm.weight, scale)
    model.save_pretrained(folder)


class Sides:
    """An engine and a trainer of the same model in this process."""

    def __init__(self, model: str, output_dir: str):
        small_cache = '{"kv_cache_memory_bytes": 33554432}'
        self.args = train.Args(
            model=model,
            output_dir=output_dir,
            gpu_memory_utilization=0.4,
            max_prompt_tokens=512,
            max_response_tokens=128,
            max_model_len=1024,
            engine_args="{}" if torch.cuda.is_available() else small_cache,
        )
        self.engine, self.net = common.engine_and_policy(self.args)
        self.background = Background()

    def generate(self, prompts: list, n: int) -> list:
        return common.generate(self.engine, self.background, prompts, max_tokens=n, **FORCED)

    def difference(self, outputs: list) -> str:
        """Returns how far the engine's logprobs are from the trainer's, as text."""
        x = common.distances(self.net, outputs, self.args)
        return f"mean {x.mean():.1e}, max {x.max():.1e} over {len(x)} tokens"


def some_prompts(n: int, length: int) -> list[list[int]]:
    return [[(7 * i + 3 * j) % 250 + 10 for j in range(length)] for i in range(n)]


# ---------------------------------------------------------------- sections: each yields rows


def agree(sides: Sides, options: argparse.Namespace) -> Iterator[Row]:
    """Compares logprobs."""
    train.sync(sides.engine, sides.net, 0)
    prompts = some_prompts(16, 64)
    outputs = sides.generate(prompts, 64)
    sides.engine.sleep()
    yield f"logprobs, {sides.args.dtype}", sides.difference(outputs)


def sync(sides: Sides, options: argparse.Namespace) -> Iterator[Row]:
    """Times weight syncs, and copies of the same tensors."""
    sources = [parameter.detach() for parameter in sides.net.parameters()]
    sources = [getattr(source, "to_local", lambda x=source: x)() for source in sources]
    dtype = getattr(torch, sides.args.dtype)
    targets = [torch.empty_like(source, dtype=dtype) for source in sources]

    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def load(version: int) -> float:
        sides.engine.wake_weights()
        weights = models.checkpoint_weights(sides.net.model, sides.net.engine_dtype)
        taken = common.seconds(sides.engine.load_weights, weights, version)
        sides.engine.wake_kv()
        sides.engine.sleep()
        return taken

    copied = statistics.median(common.seconds(copy) for _ in range(5))
    loaded = statistics.median(load(version) for version in range(5))
    gigabytes = sum(target.nbytes for target in targets) / 1e9
    figures = f"{gigabytes:.2f} GB in {loaded:.3f} s, {loaded / copied:.1f} times a plain copy"
    yield "weights that arrive", figures


def sleep(sides: Sides, options: argparse.Namespace) -> Iterator[Row]:
    """Wakes the engine and puts it to sleep --cycles times."""
    free_asleep = []  # GiB, of each cycle
    freed = []
    for cycle in range(options.cycles):
        train.sync(sides.engine, sides.net, cycle)
        sides.generate(some_prompts(1, 40), 2)
        before = free_memory()
        sides.engine.sleep()
        free_asleep.append(free_memory())
        freed.append(free_asleep[-1] - before)
    early = options.cycles // 10
    lost = free_asleep[early] - free_asleep[-1]
    assert lost < 0.1, f"{lost:.2f} GiB are lost over the cycles"
    figures = f"{min(freed):.2f} GiB freed, {lost:.3f} lost since cycle {early}"
    yield f"{options.cycles} cycles", figures


def free_memory() -> float:
    """Returns the free GiB of the GPU, 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / GIB


SECTIONS = {section.__name__: section for section in (agree, sync, sleep)}


def main() -> None:
    """Measures the sections, and prints each row as soon as it is there."""
    parser = common.make_parser(__doc__, cycles=200)
    parser.add_argument("--size", choices=SHAPES, default="0.5B")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--model", help="a folder that keeps the model, for other benches")
    options = parser.parse_args()
    columns = ("shape", "section", "what", "measured")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(options.model or folder)
        if not (model / "config.json").exists():
            build(options.size, model)
        if not options.only:
            return
        sides = Sides(str(model), f"{folder}/out")
        print(f"| {' | '.join(columns)} |\n| --- | --- | --- | --- |")
        for name in options.only:
            for measured in SECTIONS[name](sides, options):
                row = (options.size, name, *measured)
                print(f"| {' | '.join(row)} |", flush=True)
                rows.append(dict(zip(columns, row)))
    common.write_rows(options.out, rows)


if __name__ == "__main__":
    main()
