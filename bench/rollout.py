"""Tokens per second of a rollout phase against plain `LLM.generate`: same engine, prompts, seeds and forced lengths.

    python bench/rollout.py [--model FOLDER] [--prompts 32] [--group_size 8] [--tokens 64] [--rounds 5]

A B A B ... in one process, after one warm-up of each; the ratio is taken pair by pair, its median is the figure. The
phase does more than `generate`: templates, one coroutine a trajectory, decoding, rewards, gathering over ranks.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
import types
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
REPO = Path(__file__).parent.parent
sys.path[:0] = [str(REPO), str(REPO / "examples")]

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from agent_loop import render
from rollout import Background, Engine, Workplace, rollout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="default: a random model of the built-in task's size")
    for name, default in (("prompts", 32), ("group_size", 8), ("tokens", 64), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()

    import calculator

    if not options.model:
        options.model = tempfile.mkdtemp()
        torch.manual_seed(0)
        calculator.init_model(options.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args = train.Args(
        model=options.model, dtype="bfloat16" if device.type == "cuda" else "float32", agent="single_turn"
    )
    args.max_response_tokens, args.max_model_len = options.tokens, args.max_prompt_tokens + options.tokens
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    engine = Engine(options.model, args, device)
    policy = types.SimpleNamespace(model=AutoModelForCausalLM.from_pretrained(options.model))
    task = types.SimpleNamespace(reward=calculator.reward)
    rows = calculator.load("train")[: options.prompts]
    place = Workplace(engine, Background(), task, tokenizer, None, args, dist.HashStore())
    sampling = {"temperature": 1.0, "max_tokens": options.tokens, "ignore_eos": True}

    def phase(step: int) -> float:
        started = time.perf_counter()
        result = rollout(place, rows, step, options.group_size, sampling)
        assert result.tokens == options.prompts * options.group_size * options.tokens
        return result.tokens / (time.perf_counter() - started)

    from vllm import SamplingParams

    def plain(step: int) -> float:
        prompts = [{"prompt_token_ids": render(tokenizer, row["prompt"])} for row in rows]
        prompts = [prompt for prompt in prompts for _ in range(options.group_size)]
        parameters = [SamplingParams(**sampling, seed=i, logprobs=0, detokenize=False) for i in range(len(prompts))]
        started = time.perf_counter()
        outputs = engine.llm.generate(prompts, parameters, use_tqdm=False)
        return sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - started)

    train.sync(engine, policy, 0)
    print(f"{options.prompts} prompts x {options.group_size}, {options.tokens} tokens each, {device.type}")
    ratios = []
    for i in range(options.rounds + 1):
        a, b = phase(i), plain(i)
        print(
            f"{'warm-up' if i == 0 else f'round {i}':8} rollout {a:9,.0f} tokens/s   "
            f"LLM.generate {b:9,.0f}   ratio {a / b:.3f}"
        )
        ratios += [a / b] if i else []
    print(f"median ratio {statistics.median(ratios):.3f} (min {min(ratios):.3f}, max {max(ratios):.3f})")


if __name__ == "__main__":
    main()
