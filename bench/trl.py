"""Compares the seconds of a GRPO step in flatrl and in TRL's GRPOTrainer, at the same work.

    pip install trl==1.16.0 datasets
    python bench/trl.py [--model FOLDER] [--prompts 16] [--group_size 8] [--tokens 64] [--rounds 5]
    python bench/trl.py --trl generate vllm     # beside TRL with vLLM in its process, too
    python bench/trl.py --trl                   # flatrl alone; TRL need not be installed
    python bench/trl.py --prompt_tokens 300     # a system prompt and tool schemas before every question

Both train the same model on the same prompts, with equal lengths, updates, precision and
threads. Whole steps of a single turn are timed: flatrl is `train.main` with this file as its
--task, TRL is `GRPOTrainer.train`, which generates with transformers' `generate` or (--trl
vllm) with vLLM in its own process. Each side runs in a process of its own, made once, and they
take turns, A B A B: a side makes one step, then it waits until the others have made theirs. A
step is timed from outside, from the word to go until its end, so that nothing of it is missed;
each side says itself what it was spent on. Every response has --tokens tokens (flatrl and
vLLM: ignore_eos; transformers: min_new_tokens). There is one update a step, no KL, no
evaluation, and no checkpoint; flatrl writes its metrics and rollouts as always, TRL logs
nothing. On a CPU all is float32. With --free, responses end where the model ends them: both
sides sample from the same distribution of lengths. The table has the medians of a step's
parts, and how many times faster flatrl is.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from bisect import bisect

import common
from transformers import AutoTokenizer
from transformers.utils import get_json_schema

from agent_loop import render
from examples import calculator

# ---------------------------------------------------------------- what both train on; for flatrl this is a task file


def load(split: str) -> list[dict]:
    """Returns the calculator's questions, with a system prompt before them if there is one."""
    n_prompts = int(os.environ["BENCH_PROMPTS"])
    system = os.environ["BENCH_SYSTEM"]
    rows = calculator.load(split)[: n_prompts if split == "train" else 1]
    if system:
        for row in rows:
            row["prompt"].insert(0, {"role": "system", "content": system})
    return rows


def system_prompt(model: str, n_tokens: int) -> str:
    """Returns as many instructions and tool schemas as make the first prompt n_tokens long; ""
    for 0."""
    if not n_tokens:
        return ""
    tokenizer = AutoTokenizer.from_pretrained(model)
    question = calculator.load("train")[0]["prompt"]
    text = f"You are an assistant with tools. {json.dumps(get_json_schema(calculator.calculator))} "
    token_ids = tokenizer.encode(text * (1 + n_tokens // 50), add_special_tokens=False)

    def prompt_length(n: int) -> int:
        system = {"role": "system", "content": tokenizer.decode(token_ids[:n])}
        return len(render(tokenizer, [system, *question]))

    longest = bisect(range(n_tokens), n_tokens, key=prompt_length) - 1
    return tokenizer.decode(token_ids[:longest])


def score(text: str) -> float:
    """Returns a reward that differs in nearly all responses, so that every group has something
    to learn from."""
    return len(set(text)) / max(1, len(text))


def reward(output, row: dict) -> float:
    return score(output.text)


def trl_rewards(completions, **columns) -> list[float]:
    return [score(completion[0]["content"]) for completion in completions]


# ---------------------------------------------------------------- the sides, each in a process of its own


def end_step(pipe, parts: dict[str, float]) -> None:
    """Tells the parent that a step is over and what it was spent on, and waits for the word to
    make the next."""
    pipe.send(parts)
    pipe.recv()


def flatrl(pipe, options: argparse.Namespace, folder: str) -> None:
    """Trains with train.main, step by step as the parent says."""
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
        end_step(pipe, {name: metrics.get(metric, 0.0) for name, metric in names.items()})

    Log.metrics = write_and_wait  # the last that main calls in a step
    args = train.Args(
        task=__file__,
        model=options.model,
        output_dir=f"{folder}/flatrl",
        num_steps=10**6,
        eval_every=0,
        save_every=0,
        show_every=0,
        prompts_per_step=options.prompts,
        group_size=options.group_size,
        lr=options.lr,
        max_response_tokens=options.tokens,
        sampling_args="{}" if options.free else '{"ignore_eos": true}',
        max_model_len=512 + options.tokens,
        tokens_per_micro_batch=options.micro_batch,
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


def trl_generate(pipe, options: argparse.Namespace, folder: str, vllm: bool = False) -> None:
    """Trains with GRPOTrainer.train, step by step as the parent says."""
    import torch
    from transformers import TrainerCallback

    if vllm and not torch.cuda.is_available():
        common.make_trl_vllm_updatable()
    forced_length = {"ignore_eos": True} if vllm else {"min_new_tokens": options.tokens}
    spent: dict[str, float] = {}

    class Turns(TrainerCallback):
        """Waits for the word before each step, and tells what a step was spent on after it."""

        def on_train_begin(self, *state, **more):
            end_step(pipe, {})

        def on_step_end(self, *state, **more):
            sync = spent.get("sync_weights", 0.0)
            parts = {
                "sync": sync,
                "generate": spent["_generate"] - sync,
                "update": spent["training_step"] - spent["_prepare_inputs"],
                "length": trainer._metrics["train"]["completions/mean_length"][-1],
            }
            end_step(pipe, parts)
            spent.clear()

    trainer = common.trl_trainer(
        options.model,
        f"{folder}/trl",
        [{"prompt": row["prompt"]} for row in load("train")],
        trl_rewards,
        callbacks=[Turns()],
        per_device_train_batch_size=options.prompts * options.group_size,
        num_generations=options.group_size,
        max_completion_length=options.tokens,
        generation_kwargs={} if options.free else forced_length,
        temperature=1.0,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        max_steps=10**6,
        use_vllm=vllm,
        vllm_max_model_length=options.tokens + 512,
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


SIDES = {"flatrl": flatrl, "TRL, generate": trl_generate, "TRL, vllm": trl_vllm}


# ---------------------------------------------------------------- measuring


def measure(
    sides: list[str], options: argparse.Namespace, folder: str
) -> dict[str, list[dict]]:
    """Starts a process for each side and lets them make their steps by turns; returns the
    seconds of each step's parts, without those of the warm-up."""
    context = multiprocessing.get_context("spawn")
    table: dict[str, list[dict]] = {name: [] for name in sides}
    pipes = {}
    processes = []
    try:
        for name in sides:  # one after the other: no side may be at work while another is timed
            pipes[name], their_end = context.Pipe()
            process = context.Process(
                target=SIDES[name], args=(their_end, options, folder), daemon=True
            )
            processes.append(process)
            process.start()
            their_end.close()
            pipes[name].recv()
        for i in range(options.warm_up + options.rounds):
            for name in sides:
                started = time.perf_counter()
                pipes[name].send(None)
                parts = pipes[name].recv()
                seconds = time.perf_counter() - started
                rest = seconds - sum(
                    parts.get(part, 0.0) for part in ("sync", "generate", "update")
                )
                table[name].append({"step": seconds, **parts, "rest": rest})
            title = f"round {i - options.warm_up + 1}" if i >= options.warm_up else "warm-up"
            seconds = ", ".join(
                f"{name} {steps[-1]['step']:.2f} s" for name, steps in table.items()
            )
            print(f"{title}: {seconds}", flush=True)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return {name: steps[options.warm_up :] for name, steps in table.items()}


def print_table(table: dict[str, list[dict]], options: argparse.Namespace) -> None:
    """Prints the median of each part of each side's steps, and the ratios to flatrl's steps,
    taken round by round."""
    columns = ("length", "step", "sync", "generate", "update", "rest")
    at_most = " at most" if options.free else ""
    print(
        f"\n{options.prompts} prompts x {options.group_size}, {options.tokens} tokens{at_most}, prompts of "
        f"{options.prompt_tokens or 'their own'} tokens, {os.environ['OMP_NUM_THREADS']} threads; medians of "
        f"{options.rounds} rounds, seconds"
    )
    print(
        f"{'':16}"
        + "".join(f"{name:>10}" for name in columns)
        + "   flatrl is faster by (min - max)"
    )
    for name, steps in table.items():
        medians = [
            statistics.median(step.get(column, 0.0) for step in steps) for column in columns
        ]
        ratios = [
            step["step"] / ours["step"]
            for step, ours in zip(steps, table["flatrl"], strict=True)
        ]
        ratio = "" if name == "flatrl" else common.spread(ratios)
        print(f"{name:16}" + "".join(f"{median:10.3f}" for median in medians) + f"   {ratio}")


def main() -> None:
    """Builds the model if none is given, measures the sides, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", help="default: a random model of 2.6M parameters and 275 tokens"
    )
    for name, default in (
        ("prompts", 16),
        ("group_size", 8),
        ("tokens", 64),
        ("rounds", 5),
        ("warm_up", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--prompt_tokens",
        type=int,
        default=0,
        help="0: the question alone, 13 with the default model",
    )
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument(
        "--trl",
        nargs="*",
        choices=("generate", "vllm"),
        default=["generate"],
        help="TRL's sides",
    )
    parser.add_argument(
        "--free",
        action="store_true",
        help="responses end by themselves, --tokens is only the limit",
    )
    parser.add_argument(
        "--micro_batch", type=int, default=16384, help="flatrl's tokens_per_micro_batch"
    )
    parser.add_argument(
        "--engine_args", default="{}", help="of flatrl's engine, as in train.py"
    )
    options = parser.parse_args()
    if options.trl and common.missing_for_trl():
        parser.error(common.missing_for_trl())
    sides = ["flatrl", *(f"TRL, {name}" for name in options.trl)]
    with tempfile.TemporaryDirectory() as folder:
        options.model = options.model or common.random_model(f"{folder}/model", **common.LARGER)
        os.environ["BENCH_PROMPTS"] = str(options.prompts)
        os.environ["BENCH_SYSTEM"] = system_prompt(options.model, options.prompt_tokens)
        print_table(measure(sides, options, folder), options)


if __name__ == "__main__":
    main()
