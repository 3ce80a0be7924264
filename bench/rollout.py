"""Compares a rollout phase with plain `LLM.generate` or with a larger one, or a weight sync with a plain copy.

    python bench/rollout.py [--turns 1] [--model FOLDER] [--prompts 32] [--group_size 8] [--tokens 64] [--rounds 5]
    python bench/rollout.py --turns 4 --spread even     # turns of --tokens / 2 to --tokens * 3 / 2 tokens
    python bench/rollout.py --turns 4 --spread tail     # most turns are short, a few are long
    python bench/rollout.py --turns 4 --width 512       # of a larger random model
    python bench/rollout.py --prompts 16 --many 1024    # a trajectory's seconds among 8,192 against those among 128
    python bench/rollout.py --sync_mb 500       # a weight sync against copying the same tensors once

Both sides have the same engine, prompts and lengths, and take turns in one process (A B A B
...), after one warm-up of each. The ratio is taken in each round; its median is the figure. A
phase does more than `generate`: templates, one coroutine a trajectory, decoding, rewards,
gathering over ranks. With --turns n a simulated user, who takes no time, answers n - 1 times,
and --tokens is the length of each turn. `generate` is then called once a turn with all
prompts, each with what was sampled and the same user turn behind it: all trajectories go on
together, and the engine is never idle. With --spread turns differ in length, on both sides
alike: `generate` then waits for the longest of a turn, and a rollout for no one. `even` draws
all lengths from --tokens / 2 to --tokens * 3 / 2 with the same probability. `tail` draws them
from the exponential distribution whose mean is --tokens, up to eight times that.
"""

import argparse
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace

import common
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from agent_loop import Interaction, ToolAgentLoop, register, render, turn_suffix
from examples import calculator
from rollout import Engine, rollout

ANSWER = "Go on."  # what the simulated user says


class User(Interaction):
    """A simulated user, who answers until the assistant has had its turns."""

    def __init__(self, turns: int):
        self.turns = turns

    async def generate_response(self, request_id, messages, **kwargs):
        assistant_turns = sum(message["role"] == "assistant" for message in messages)
        return assistant_turns >= self.turns, ANSWER, None, {}


@register("fixed_turns")
class FixedTurns(ToolAgentLoop):
    """An agent loop whose assistant turns are over when they reach their forced length, and
    not cut off."""

    async def run(self, sampling_params, **row):
        self.lengths = iter(self.task.lengths[row["extra_info"]["index"], row["rollout_n"]])
        return await super().run(sampling_params, **row)

    async def assistant_turn(self, trajectory, sampling_params):
        await super().assistant_turn(trajectory, sampling_params | {"max_tokens": next(self.lengths)})
        trajectory.stop_reason = "stop"
        return ""


def lengths_of_turns(rows: list[dict], options: argparse.Namespace) -> dict[tuple[int, int], list[int]]:
    """Returns {(index of a row, number in its group): the tokens of each turn}."""
    least, most = shortest_and_longest(options)
    drawn = random.Random(0)

    def length() -> int:
        if options.spread == "tail":
            return min(most, max(least, round(drawn.expovariate(1 / options.tokens))))
        return drawn.randint(least, most)

    return {(row["extra_info"]["index"], sample): [length() for _ in range(options.turns)]
            for row in rows for sample in range(options.group_size)}  # fmt: skip


def shortest_and_longest(options: argparse.Namespace) -> tuple[int, int]:
    """Returns the least and the most tokens of a turn."""
    if options.spread == "even":
        return options.tokens // 2, options.tokens + options.tokens // 2
    if options.spread == "tail":
        return 1, 8 * options.tokens
    return options.tokens, options.tokens


def main() -> None:
    """Builds the model if none is given, and measures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="default: a random model of the built-in task's size, or of --sync_mb")
    for name, default in (("turns", 1), ("prompts", 32), ("group_size", 8), ("tokens", 64), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--width", type=int, help="hidden size of the random model, which then has 6 layers")
    parser.add_argument("--spread", choices=("even", "tail"), help="turns of different lengths")
    parser.add_argument("--many", type=int, help="prompts of a second rollout, which takes generate's place")
    parser.add_argument("--sync_mb", type=int, help="MB of float32 weights; times nothing but the sync")
    parser.add_argument("--engine_args", default="{}", help="of the engine, as in train.py")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        if not options.model:
            config = {"max_position_embeddings": 4096}
            if options.sync_mb:
                config |= wide(options.sync_mb)
            elif options.width:
                width = options.width
                config |= {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 6}
            options.model = common.random_model(folder, **config)
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Builds an engine and a policy of the model, and measures a rollout or a sync."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args = train.Args(model=options.model, dtype="bfloat16" if device.type == "cuda" else "float32",
                      agent="fixed_turns", engine_args=options.engine_args)  # fmt: skip
    _, longest = shortest_and_longest(options)
    args.max_response_tokens = options.turns * longest + (options.turns - 1) * 64  # room for the user turns
    args.max_model_len = args.max_prompt_tokens + args.max_response_tokens
    common.start_alone()
    engine = Engine(options.model, args, device)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device)
    policy = SimpleNamespace(model=model, dtype=model.dtype)
    if options.sync_mb:
        measure_sync(engine, policy, options.rounds)
    else:
        measure_rollout(engine, policy, options, device)


def print_ratios(rounds: int, compare: Callable[[int], tuple[float, str]]) -> None:
    """Calls compare(round) -> (ratio, a line about it), prints the lines and the median ratio;
    round 0 is a warm-up."""
    ratios = []
    for i in range(rounds + 1):
        ratio, line = compare(i)
        title = f"round {i}" if i else "warm-up"
        print(f"{title:8} {line}   ratio {ratio:.3f}", flush=True)
        if i:
            ratios.append(ratio)
    print(f"median ratio {statistics.median(ratios):.3f} (min {min(ratios):.3f}, max {max(ratios):.3f})")


# ---------------------------------------------------------------- rollout


def measure_rollout(engine: Engine, policy, options: argparse.Namespace, device: torch.device) -> None:
    """Prints tokens a second of rollout.rollout and of LLM.generate (--many: of a rollout of so many prompts), round by
    round, and the engine's idle share."""
    from vllm import SamplingParams

    turns = options.turns
    tokenizer = AutoTokenizer.from_pretrained(engine.args.model)
    all_rows = calculator.load("train")
    rows = all_rows[: options.prompts]
    lengths = lengths_of_turns(all_rows[: options.many or options.prompts], options)
    task = SimpleNamespace(reward=calculator.reward, INTERACTIONS=[User(turns)], lengths=lengths)
    run = common.surroundings(engine, task, tokenizer, engine.args)
    sampling = {"temperature": 1.0, "max_tokens": options.tokens, "ignore_eos": True}
    before_user = [*rows[0]["prompt"], {"role": "assistant", "content": ""}]
    user_turn = [{"role": "user", "content": ANSWER}]
    suffix = turn_suffix(tokenizer, before_user, user_turn, {tokenizer.eos_token_id}, ended=False)
    idle_shares: list[float] = []

    def lengths_of(rows: list[dict]) -> list[list[int]]:
        """Returns the lengths of each trajectory's turns."""
        return [lengths[row["extra_info"]["index"], sample] for row in rows for sample in range(options.group_size)]

    def rollout_phase(step: int, rows: list[dict]) -> float:
        """Returns the tokens a second of a rollout."""
        engine.core.reset_prefix_cache()
        started = time.perf_counter()
        phase = rollout(run, rows, step, options.group_size, sampling)
        seconds = time.perf_counter() - started
        n_tokens = phase.statistics["tokens"]
        assert n_tokens == sum(map(sum, lengths_of(rows))) and not phase.errors, phase.counts
        idle_shares.append(phase.metrics(engine)["throughput/idle_share"])
        return n_tokens / seconds

    def plain_generate(step: int) -> float:
        """Returns the tokens a second of one LLM.generate a turn, all prompts together."""
        engine.core.reset_prefix_cache()
        prompts = []
        for row in rows:
            prompts += [render(tokenizer, row["prompt"])] * options.group_size
        seeds = itertools.count(step * turns * len(prompts))
        parameters = []
        for of_turn in zip(*lengths_of(rows), strict=True):
            parameters.append([SamplingParams(**sampling | {"max_tokens": length}, seed=next(seeds), logprobs=0,
                                              detokenize=False) for length in of_turn])  # fmt: skip
        n_tokens = 0
        started = time.perf_counter()
        for of_turn in parameters:
            requests = [{"prompt_token_ids": token_ids} for token_ids in prompts]
            outputs = engine.llm.generate(requests, of_turn, use_tqdm=False)
            sampled = [list(output.outputs[0].token_ids) for output in outputs]
            prompts = [prompt + tokens + suffix for prompt, tokens in zip(prompts, sampled, strict=True)]
            n_tokens += sum(map(len, sampled))
        seconds = time.perf_counter() - started
        assert n_tokens == sum(map(sum, lengths_of(rows)))
        return n_tokens / seconds

    def compare(i: int) -> tuple[float, str]:
        ours = rollout_phase(2 * i, rows)
        line = f"rollout {ours:9,.0f} tokens/s, idle {idle_shares[-1]:.3f}"
        if options.many:
            other = rollout_phase(2 * i + 1, all_rows[: options.many])  # a step has one rollout
            return ours / other, f"{line}   of {options.many} prompts {other:9,.0f}"
        other = plain_generate(i)
        return ours / other, f"{line}   LLM.generate {other:9,.0f}"

    train.sync(engine, policy, 0)
    least, most = shortest_and_longest(options)
    of_turn = f"{least} to {most}" if options.spread else options.tokens
    parameters = policy.model.num_parameters() / 1e6
    print(f"{options.prompts} prompts x {options.group_size}, {turns} turns of {of_turn} tokens, {parameters:.2f}M "
          f"parameters, {device.type}")  # fmt: skip
    print_ratios(options.rounds, compare)
    print(f"idle share of the engine in a rollout: median {statistics.median(idle_shares[1:]):.3f}")


# ---------------------------------------------------------------- weight sync


def wide(mb: int) -> dict:
    """Returns the configuration of a model of at least so many MB in float32 and few tensors:
    layers of 46M weights."""
    layers = -(-mb * 10**6 // (4 * 46_399_488))
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    return {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": layers, **heads}


def measure_sync(engine: Engine, policy, rounds: int) -> None:
    """Prints the seconds of train.sync, and of a copy of the same tensors, round by round."""
    sources = [parameter.detach() for parameter in policy.model.parameters()]
    dtype = getattr(torch, engine.args.dtype)  # what the engine holds
    targets = [source.to(dtype, copy=True) for source in sources]
    n_bytes = sum(target.nbytes for target in targets)

    def wait_for_device() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def compare(i: int) -> tuple[float, str]:
        """Returns the seconds of a sync over those of a copy, and both as text."""
        wait_for_device()
        synced = train.sync(engine, policy, i)  # seconds; wakes the engine, loads, waits for it
        engine.sleep()
        wait_for_device()
        started = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        wait_for_device()
        copied = time.perf_counter() - started
        return synced / copied, f"sync {synced * 1e3:7.1f} ms   plain copy {copied * 1e3:7.1f} ms"

    print(f"{n_bytes / 1e6:.0f} MB of weights in {len(sources)} tensors")
    print_ratios(rounds, compare)


if __name__ == "__main__":
    main()
