"""What does flatrl do on a GPU? Measures what a CPU cannot show, in one table.

    python bench/gpu.py                                  # (GPU) 0.5B, 1.5B and 7B of Qwen2.5
    python bench/gpu.py --only sync agree --sizes 0.5B   # (GPU) some of it
    python bench/gpu.py --device cpu                     # the code alone: the figures mean nothing

Models are random, with logits as spread as trained ones. Each size has a process of its own. One
that fails leaves a line with its reason, and the others continue. The exit code is 1 if one failed.

    agree      how far the engine's logprobs are from the trainer's, also over a sync in mid-answer
    sync       a weight sync, and a plain copy of the same tensors
    sleep      memory freed, of what the engine holds; memory lost after --cycles

Run bench/rollout.py, update.py and trl.py on the GPU as well: they measure what they find.
tests/gpu compares attention and logprobs with float64.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import common
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import data
import train
from examples.tiny_models import make_tokenizer
from flatrl import devices, models
from flatrl.processes import Background
from rollout import Engine

GIB = 1 << 30
SMALL_CACHE = '{"kv_cache_memory_bytes": 33554432}'  # --engine_args on a CPU
FORCED = {"temperature": 1.0, "ignore_eos": True, "stop_token_ids": []}


def shape(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **more) -> dict:
    """Returns the entries of a Qwen2 configuration."""
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    } | more


SHAPES = {  # those of Qwen2.5, and a tiny one
    "0.5B": shape(896, 4864, 24, 14, 2, vocab_size=151936, tie_word_embeddings=True),
    "1.5B": shape(1536, 8960, 28, 12, 2, vocab_size=151936, tie_word_embeddings=True),
    "7B": shape(3584, 18944, 28, 28, 4, vocab_size=152064),
    "tiny": shape(128, 256, 2, 4, 2, vocab_size=320, tie_word_embeddings=True),
}
Row = tuple[str, ...]  # what was measured, and the figure; with the section's name before them


def build(size: str, folder: Path, device: str) -> str:
    """Writes a random model of that shape with the calculator's tokenizer; returns its folder."""
    path = folder / size
    if (path / "config.json").exists():
        return str(path)
    make_tokenizer().save_pretrained(path)
    config = Qwen2Config(**SHAPES[size], max_position_embeddings=8192, eos_token_id=1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    scale = 3 / config.initializer_range / config.hidden_size**0.5
    torch.nn.init.constant_(model.model.norm.weight, scale)
    model.save_pretrained(path)
    return str(path)


class Sides:
    """An engine and a trainer of the same model in this process."""

    def __init__(self, options: argparse.Namespace, size: str):
        self.args = train.Args(
            model=build(size, options.folder, options.device),
            output_dir=str(options.folder / "out"),
            gpu_memory_utilization=0.4,
            max_prompt_tokens=512,
            max_response_tokens=128,
            max_model_len=1024,
            engine_args=SMALL_CACHE if options.device == "cpu" else "{}",
        )
        self.accelerator, _ = devices.start_processes(self.args)
        train.complete_flags(self.args, self.accelerator.device.type == "cuda")
        data.register_packed_attention()
        self.engine = Engine(self.args.model, self.args, self.accelerator.device)
        self.background = Background()
        policy = train.Policy(self.args)
        self.net = train.wrap(policy, self.args, self.accelerator, frozen=True)

    def generate(self, prompts: list, n: int) -> list:
        return common.generate(self.engine, self.background, prompts, max_tokens=n, **FORCED)

    def difference(self, prompts: list, answers: list) -> str:
        """Returns how far the engine's logprobs are from the trainer's, as text."""
        batch = data.collate(common.as_outputs(prompts, answers))
        logprobs = train.score_tokens(self.net, batch, self.args)["logprobs"]
        distance = (logprobs - batch["logprobs_rollout"]).abs()
        distance = distance[batch["response_mask"].bool()]
        n = len(distance)
        return f"mean {distance.mean():.1e}, max {distance.max():.1e} over {n} tokens"


def some_prompts(n: int, length: int) -> list[list[int]]:
    return [[(7 * i + 3 * j) % 250 + 10 for j in range(length)] for i in range(n)]


# ---------------------------------------------------------------- sections: each yields rows


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


def sync(sides: Sides, options: argparse.Namespace) -> Iterator[Row]:
    """Times weight syncs, and copies of the same tensors."""

    def load(version: int) -> float:
        sides.engine.wake_weights()
        weights = models.checkpoint_weights(sides.net.model, sides.net.engine_dtype)
        taken = common.seconds(lambda: sides.engine.load_weights(weights, version))
        sides.engine.wake_kv()
        sides.engine.sleep()
        return taken

    gigabytes, copied = plain_copy(sides)
    loaded = statistics.median(load(version) for version in range(5))
    figures = f"{gigabytes:.2f} GB in {loaded:.3f} s, {loaded / copied:.1f} times a plain copy"
    yield "weights that arrive", figures


def plain_copy(sides: Sides) -> tuple[float, float]:
    """Returns the size of the engine's weights in GB, and the seconds of copying the trainer's."""
    sources = [local(parameter.detach()) for parameter in sides.net.parameters()]
    dtype = getattr(torch, sides.args.dtype)
    targets = [torch.empty_like(source, dtype=dtype) for source in sources]

    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    gigabytes = sum(target.nbytes for target in targets) / 1e9
    return gigabytes, statistics.median(common.seconds(copy) for _ in range(5))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this process's part of a sharded tensor, which is all of it here, uncopied."""
    return getattr(tensor, "to_local", lambda: tensor)()


def agree(sides: Sides, options: argparse.Namespace) -> Iterator[Row]:
    """Compares logprobs, also those of an answer that continues over a weight sync."""
    train.sync(sides.engine, sides.net, 0)
    prompts = some_prompts(16, 64)
    answers = sides.generate(prompts, 64)
    sides.engine.sleep()
    yield f"logprobs, {sides.args.dtype}", sides.difference(prompts, answers)

    sampling = FORCED | {"max_tokens": 40}
    call = sides.engine.generate(request_id="s", prompt_ids=prompts[0], sampling_params=sampling)
    train.sync(sides.engine, sides.net, 1)
    future = sides.background.submit(call)
    for _ in range(16):
        sides.engine.step()
    sides.engine.sleep(keep=True)
    train.sync(sides.engine, sides.net, 2)
    while not future.done():
        sides.engine.step()
    sides.engine.sleep()
    answer = future.result()
    n = answer.versions.count(1)
    assert answer.versions == [1] * n + [2] * (40 - n) and 0 < n < 40, answer.versions
    yield f"logprobs: {n} tokens, a sync, {40 - n}", sides.difference(prompts[:1], [answer])


SECTIONS = {section.__name__: section for section in (agree, sync, sleep)}


# ---------------------------------------------------------------- one process a size


def run_sections(options: argparse.Namespace) -> None:
    """Runs the sections in this process, and writes each row as soon as it is there."""
    sides = Sides(options, options.sizes[0])
    with (options.folder / "rows.jsonl").open("a") as file:
        for name in options.only:
            for row in SECTIONS[name](sides, options):
                print(json.dumps([name, *row]), file=file, flush=True)


def measure(options: argparse.Namespace, size: str) -> list[Row]:
    """Runs the sections in a process of their own; returns the rows, at last why it failed."""
    command = [sys.executable, __file__, "--in_process", "--sizes", size, "--only", *options.only]
    command += ["--folder", str(options.folder), "--device", options.device]
    command += ["--cycles", str(options.cycles)]
    env = common.environment_of_no_rank()
    if options.device == "cpu":
        env["ACCELERATE_USE_CPU"] = "true"
    rows_file = options.folder / "rows.jsonl"
    rows_file.write_text("")
    log = options.folder / f"{size}.log"
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=file, env=env).returncode
    rows = [tuple(json.loads(line)) for line in rows_file.read_text().splitlines()]
    if code:
        printed = log.read_text(errors="replace").strip().splitlines() or [""]
        reason = next((line for line in reversed(printed) if "Error" in line), printed[-1])
        rows.append(("FAILED", f"exit code {code}", reason[:160]))
    return rows


def main() -> None:
    """Measures each size, and prints the table."""
    parser = common.make_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", nargs="+", default=[])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--cycles", type=int, default=200, help="of sleep and wake")
    parser.add_argument("--folder", type=Path, help="for models and logs, which stay there")
    parser.add_argument("--in_process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = ["tiny"] if options.device == "cpu" else ["0.5B", "1.5B", "7B"]
    options.sizes = options.sizes or sizes
    if options.in_process:
        return run_sections(options)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench/gpu.py: error: no CUDA device; try --device cpu")
    table = []
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = (options.folder or Path(temporary)).resolve()
        options.folder.mkdir(parents=True, exist_ok=True)
        for size in options.sizes:
            print(f"{size} ...", file=sys.stderr, flush=True)
            table += [(size, *row) for row in measure(options, size)]
    is_cuda = options.device == "cuda"
    print(torch.cuda.get_device_name() if is_cuda else "a CPU: the figures mean nothing")
    columns = ("shape", "section", "what", "measured")
    common.write_rows(options.out, [dict(zip(columns, row)) for row in table])
    print(f"\n| {' | '.join(columns)} |\n| --- | --- | --- | --- |")
    for row in table:
        print(f"| {' | '.join(row)} |")
    sys.exit(any("FAILED" in row for row in table))


if __name__ == "__main__":
    main()
