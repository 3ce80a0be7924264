"""How long does a GRPO step take in flatrl, and the same work in TRL's GRPOTrainer?

    pip install trl==1.16.0 datasets
    python bench/trl.py --trl generate vllm     # TRL with vLLM in its process, too
    python bench/trl.py --prompt_tokens 300     # so many of tool schemas before every question
    python bench/trl.py --trl                   # flatrl alone; TRL need not be installed
    python bench/trl.py --model FOLDER --prompts 24 --tokens 512 --rounds 4 --turns 2 --trl vllm \
        --batch 16 32 48 --no_correction --bf16                      # (GPU) TRL as its users set it

Both train the same model on the same prompts, with the same lengths, updates and threads, each in a
process of its own. They take turns, step by step; on a GPU one side ends before the next begins,
--turns times. A step has one update, no KL, no evaluation and no checkpoint. docs/scaling.md says
where the work differs.
"""

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import statistics
import tempfile
import time

import common
from transformers import AutoTokenizer
from transformers.utils import get_json_schema

from examples import calculator

ENDLESS = 10**6  # steps: the parent ends the processes

# ---------------------------------------------------------------- the task of both


def load(split: str) -> list[dict]:
    """Returns the calculator's questions, behind a system prompt if there is one."""
    n_prompts = int(os.environ.get("BENCH_PROMPTS", 8192))
    system = os.environ.get("BENCH_SYSTEM", "")
    rows = calculator.load(split)[: n_prompts if split == "train" else 1]
    if system:
        for row in rows:
            row["prompt"].insert(0, {"role": "system", "content": system})
    return rows


def system_prompt(model: str, n_tokens: int) -> str:
    """Returns instructions and tool schemas of n_tokens tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    schema = json.dumps(get_json_schema(calculator.calculator))
    text = f"You are an assistant with tools. {schema} " * (1 + n_tokens // 50)
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:n_tokens])


def score(text: str) -> float:
    """Returns a reward that differs in nearly all responses: every group has a signal."""
    return len(set(text)) / max(1, len(text))


def reward(output, row: dict) -> float:
    return score(output.text)


# ---------------------------------------------------------------- the sides


def end_step(pipe, parts: dict[str, float]) -> None:
    """Tells the parent the parts of a step, and waits for the word to make the next."""
    pipe.send(parts)
    pipe.recv()


def flatrl(pipe, options: argparse.Namespace, folder: str) -> None:
    """Trains with train.main, step by step."""
    import train
    from flatrl.log import Log

    names = {
        "sync": "timing/sync_s",
        "generate": "timing/rollout_s",
        "update": "timing/train_s",
        "length": "response_length/mean",
    }
    write_metrics = Log.metrics

    def write_and_wait(log, metrics: dict, *learned) -> None:
        write_metrics(log, metrics, *learned)
        end_step(pipe, {part: metrics.get(metric, 0.0) for part, metric in names.items()})

    Log.metrics = write_and_wait  # the last call of a step
    args = train.Args(
        task=__file__,
        model=options.model,
        output_dir=f"{folder}/flatrl",
        num_steps=ENDLESS,
        eval_every=0,
        save_every=0,
        prompts_per_step=options.prompts,
        group_size=options.group_size,
        lr=1e-6,
        max_response_tokens=options.tokens,
        sampling_args="{}" if options.free else '{"ignore_eos": true}',
        max_model_len=512 + options.tokens,
        engine_args=options.engine_args,
    )
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        train.main(args)


def time_calls(of, name: str, spent: dict[str, float]) -> None:
    """Replaces a method of an object by one that adds its seconds to spent[name]."""
    method = getattr(of, name)

    def timed(*args, **kwargs):
        started = time.perf_counter()
        result = method(*args, **kwargs)
        spent[name] = spent.get(name, 0.0) + time.perf_counter() - started
        return result

    setattr(of, name, timed)


def make_trl_vllm_updatable() -> None:
    """Lets TRL's vLLM compute in float32 on a CPU and take new weights, as flatrl's engine."""
    import torch
    import trl.generation.vllm_generation as generation
    import vllm.model_executor.layers.utils as layers

    def plain_linear(layer, remove_weight) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    generation.LLM = functools.partial(generation.LLM, dtype="float32")
    layers.dispatch_cpu_unquantized_gemm = plain_linear


def trl_config(options: argparse.Namespace, folder: str, vllm: bool):
    """Returns a GRPOConfig without KL, evaluations and checkpoints."""
    import torch
    from trl import GRPOConfig

    cuda = torch.cuda.is_available()
    n_responses = options.prompts * options.group_size
    batch = options.batch or n_responses
    forced = {"ignore_eos": True} if vllm else {"min_new_tokens": options.tokens}
    return GRPOConfig(
        output_dir=f"{folder}/trl",
        beta=0.0,
        bf16=cuda,
        use_cpu=not cuda,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=n_responses // batch,
        num_generations=options.group_size,
        max_completion_length=options.tokens,
        generation_kwargs={} if options.free else forced,
        temperature=1.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_steps=ENDLESS,
        use_vllm=vllm,
        vllm_max_model_length=options.tokens + 512,
        vllm_importance_sampling_correction=not options.no_correction,
    )


def trl_generate(pipe, options: argparse.Namespace, folder: str, vllm: bool = False) -> None:
    """Trains with GRPOTrainer.train, step by step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOTrainer

    if vllm and not torch.cuda.is_available():
        make_trl_vllm_updatable()
    spent: dict[str, float] = {}

    class Turns(TrainerCallback):
        def on_train_begin(self, *state, **more):
            end_step(pipe, {})

        def on_step_end(self, *state, **more):
            sync = spent.get("sync_weights", 0.0)
            lengths = trainer._metrics["train"]["completions/mean_length"]
            parts = {
                "sync": sync,
                "generate": spent["_generate"] - sync,
                "update": spent["training_step"] - spent["_prepare_inputs"],
                "length": lengths[-1],
            }
            end_step(pipe, parts)
            spent.clear()

    prompts = [{"prompt": row["prompt"]} for row in load("train")]
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype),
        args=trl_config(options, folder, vllm),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reward_funcs=lambda completions, **columns: [score(x[0]["content"]) for x in completions],
        train_dataset=Dataset.from_list(prompts),
        callbacks=[Turns()],
    )
    for name in ("_generate", "_prepare_inputs", "training_step"):
        time_calls(trainer, name, spent)
    if vllm:
        time_calls(trainer.vllm_generation, "sync_weights", spent)
    trainer.train()


def trl_vllm(pipe, options: argparse.Namespace, folder: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    trl_generate(pipe, options, folder, vllm=True)


TRL = {"generate": trl_generate, "vllm": trl_vllm}


def sides_of(options: argparse.Namespace) -> dict[str, tuple]:
    """Returns each side's function and options, by its name: TRL has one for each --batch."""
    sides = {"flatrl": (flatrl, options)}
    for name in options.trl:
        for batch in options.batch:
            of_side = argparse.Namespace(**vars(options) | {"batch": batch})
            sides[f"TRL, {name}" + (f", {batch}" if batch else "")] = (TRL[name], of_side)
    return sides


# ---------------------------------------------------------------- measuring


def start(side: tuple, folder: str) -> tuple:
    """Starts the process of a side, waits until it is about to make a step; returns (it, pipe)."""
    work, options = side
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, options, folder), daemon=True)
    process.start()
    theirs.close()
    pipe.recv()
    return process, pipe


def by_turns(sides: dict, options: argparse.Namespace, folder: str) -> dict[str, list]:
    """Lets the sides make the steps of one of --turns; returns them without the warm-up.

    Raises EOFError if a side's process dies."""
    warm_up = options.warm_up
    n_steps = warm_up + options.rounds // options.turns
    steps: dict[str, list] = {name: [] for name in sides}
    started: dict[str, tuple] = {}
    try:
        for name, side in sides.items():  # one after the other: none works while another is timed
            started[name] = start(side, folder)
        for i in range(n_steps):
            for name, (_, pipe) in started.items():
                began = time.perf_counter()
                pipe.send(None)
                parts = pipe.recv()
                steps[name].append({"step": time.perf_counter() - began, **parts})
            seconds = ", ".join(f"{name} {made[-1]['step']:.2f} s" for name, made in steps.items())
            print(f"{'warm-up' if i < warm_up else 'round'}: {seconds}", flush=True)
    finally:
        for process, _ in started.values():
            process.kill()
            process.join()
    return {name: made[warm_up:] for name, made in steps.items()}


def print_table(steps: dict[str, list]) -> list[dict]:
    """Prints the medians of each side's parts, and the ratios of the rounds; returns the rows."""
    columns = ("length", "step", "sync", "generate", "update")
    print(f"\n{'':20}" + "".join(f"{name:>10}" for name in columns) + "   flatrl is faster by")
    rows = []
    for name, made in steps.items():
        row = {"side": name}
        text = ""
        for column in columns:
            row[column] = statistics.median(step[column] for step in made)
            text += f"{row[column]:10.3f}"
        if name != "flatrl":
            pairs = zip(made, steps["flatrl"], strict=True)
            ratios = [theirs["step"] / ours["step"] for theirs, ours in pairs]
            row["ratio"] = common.of_rounds(ratios)
            text += f"   {common.spread(ratios)}"
        print(f"{name:20}{text}")
        rows.append(row)
    return rows


def main() -> None:
    """Builds the model if none is given, measures the sides, and prints the table."""
    import torch

    numbers = dict(prompts=16, group_size=8, tokens=64, rounds=5, warm_up=2, prompt_tokens=0)
    numbers["turns"] = 1
    parser = common.make_parser(__doc__, **numbers)
    parser.add_argument("--model", help="default: a random model of 2.6M parameters")
    parser.add_argument("--trl", nargs="*", choices=("generate", "vllm"), default=["generate"])
    batches = "responses in one pass of TRL, a side for each number; default: all"
    parser.add_argument("--batch", type=int, nargs="*", default=[None], help=batches)
    parser.add_argument("--no_correction", action="store_true", help="TRL scores nothing before")
    parser.add_argument("--bf16", action="store_true", help="TRL's weights are bfloat16")
    parser.add_argument("--free", action="store_true", help="--tokens is only the limit")
    parser.add_argument("--engine_args", default="{}", help="as in train.py")
    options = parser.parse_args()
    n_responses = options.prompts * options.group_size
    leftover = [n_responses % (batch or 1) for batch in options.batch]
    if any(leftover) or options.rounds % options.turns:
        parser.error("--batch must divide --prompts x --group_size, and --turns --rounds")
    with tempfile.TemporaryDirectory() as folder:
        options.model = options.model or common.random_model(f"{folder}/model", **common.LARGER)
        os.environ["BENCH_PROMPTS"] = str(options.prompts)
        os.environ["BENCH_SYSTEM"] = system_prompt(options.model, options.prompt_tokens)
        sides = sides_of(options)
        alone = torch.cuda.is_available()
        steps = {name: [] for name in sides}
        for together in ([[name] for name in sides] if alone else [[*sides]]) * options.turns:
            try:
                made = by_turns({name: sides[name] for name in together}, options, folder)
            except EOFError:  # perhaps out of memory
                print(f"{' or '.join(together)} has died, and is left out", flush=True)
            else:
                for name in together:
                    steps[name] += made[name]
        whole = {name: made for name, made in steps.items() if len(made) == options.rounds}
        if "flatrl" not in whole:
            raise SystemExit("flatrl has not made its steps")
        common.write_rows(options.out, print_table(whole))


if __name__ == "__main__":
    main()
