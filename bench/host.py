"""Times what the host does with the trajectories of a step, with random tokens: no engine, no network.

    python bench/host.py [--trajectories 8192] [--tokens 4096] [--group_size 8] [--gpus 8]

The parts are those of a step of train.py, by its own functions, one after the other in one process.
Seconds are the processor's, of one thread, so that other processes do not count:

    send      pickling this rank's share, as a rollout sends it to the other ranks
    receive   unpickling what all other ranks send
    collate   lists -> tensors, of all trajectories, as each rank does
    credit    rewards -> advantages per token
    deal      sharing the rows out over the ranks, and cutting this rank's into micro-batches
    pack      packing this rank's micro-batches, the shared prefixes once
    write     rollouts/*.jsonl, which the main rank alone writes

The last lines compare the sum with the least that rollout and update take of the device: 8
floating-point operations for each parameter and token, 2 to sample it and 6 to train on it, by
--gpus GPUs that reach 400 TFLOP/s each (an H100 in bfloat16 at 40%). A rollout waits for the
memory more than for its operations, and scoring comes on top: the share of a step is smaller.
"""

import argparse
import pickle
import random
import tempfile
import time
from pathlib import Path
from unittest import mock

import common
import plan
import torch
from transformers import AutoModelForCausalLM

import data
import train
from agent_loop import AgentLoopOutput
from flatrl.log import Log

REACHED = 400e12  # floating-point operations a second of a GPU


def rollouts(options: argparse.Namespace) -> list[AgentLoopOutput]:
    """Returns trajectories of four turns with a tool's answer between them, an eighth of it prompt."""
    n_prompt = options.tokens // 8
    n_response = options.tokens - n_prompt
    n_turn = n_response // 4
    mask = ([1] * (n_turn * 3 // 4) + [0] * (n_turn - n_turn * 3 // 4)) * 4
    mask += [1] * (n_response - len(mask))
    outputs = []
    for number in range(options.trajectories):
        prompt, sample = divmod(number, options.group_size)
        draw = random.Random(prompt)
        prompt_ids = [draw.randrange(150_000) for _ in range(n_prompt)]
        draw.seed(-1 - number)
        outputs.append(AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=[draw.randrange(150_000) for _ in mask],
            response_mask=list(mask),
            response_logprobs=[-draw.random() if sampled else 0.0 for sampled in mask],
            response_versions=[0 if sampled else -1 for sampled in mask],
            reward=float(draw.random() < 0.5),
            text="x" * (4 * n_response), num_turns=8,
            extra={"prompt": prompt, "sample": sample, "segment": 0, "index": prompt}))  # fmt: skip
    return outputs


def credit(batch: dict, outputs: list[AgentLoopOutput], args: train.Args) -> torch.Tensor:
    """Returns the advantages (B, T), as a step of train.py computes them."""
    batch["units"] = data.by_unit(outputs)
    train.shape_rewards(batch, outputs, 0.0, args)
    return train.estimate_advantages(batch, None, args)


def deal(batch: dict, ranks: int, max_tokens: int) -> list[data.MicroBatch]:
    """Returns the first rank's micro-batches of a batch that several ranks share."""
    with mock.patch("torch.distributed.get_world_size", return_value=ranks):
        return data.micro_batches_of_this_rank(batch, range(len(batch["lengths"])), max_tokens)


def n_parameters(shape: str) -> int:
    """Returns the number of parameters of a shape that bench/plan.py knows."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plan.load_config(shape))
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """Prints the seconds of each part, and of all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("trajectories", 8192), ("tokens", 4096), ("group_size", 8), ("gpus", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    common.start_alone()
    torch.set_num_threads(1)
    n = options.trajectories
    args = train.Args(prompts_per_step=n // options.group_size, group_size=options.group_size,
                      tokens_per_micro_batch=max(16384, options.tokens))  # fmt: skip
    outputs = rollouts(options)
    seconds = {}

    def timed(part: str, function, *inputs):
        started = time.process_time()
        result = function(*inputs)
        seconds[part] = time.process_time() - started
        print(f"{part:10} {seconds[part]:8.2f} s", flush=True)
        return result

    print(f"{n} trajectories of {options.tokens} tokens, in groups of {options.group_size}; {options.gpus} ranks")
    share = outputs[: max(1, n // options.gpus)]
    sent = timed("send", pickle.dumps, share)
    timed("receive", lambda: [len(pickle.loads(sent)) for _ in range(options.gpus - 1)])
    with tempfile.TemporaryDirectory() as folder:
        log = Log.__new__(Log)  # without a run, whose curves and table it would make
        log.folder = Path(folder)
        (log.folder / "rollouts").mkdir()
        timed("write", log.rollouts, "step_000001", outputs, [])
        size = (log.folder / "rollouts" / "step_000001.jsonl").stat().st_size
    batch = timed("collate", data.collate, outputs)
    batch["advantages"] = timed("credit", credit, batch, outputs, args)
    micro_batches = timed("deal", deal, batch, options.gpus, args.tokens_per_micro_batch)
    timed("pack", lambda: [data.pack_rows(batch, micro, "cpu") for micro in micro_batches])

    total = sum(seconds.values())
    print(f"{'all':10} {total:8.2f} s; rollouts file {size / 1e6:.0f} MB")
    tokens = sum(micro.lengths[i] - micro.shared[i] for micro in micro_batches for i in range(len(micro.rows)))
    for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B"):
        device = 8 * n_parameters(name) * tokens / REACHED  # of this rank's share
        print(f"{name:12} on {options.gpus} GPUs: rollout and update {device:8.2f} s, the host's part is "
              f"{total / device:.1%} of it")  # fmt: skip


if __name__ == "__main__":
    main()
