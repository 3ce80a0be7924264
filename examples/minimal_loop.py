"""The algorithm in 160 lines: multi-turn GRPO in one process, with the parts of train.py.

    python examples/minimal_loop.py              # less than a minute on two CPU cores

It trains the calculator task (examples/calculator.py), whose tiny model the first start builds in
about a minute. In 20 steps the reward rises from 0.52 to 0.99. The loss of a policy gradient does
not measure progress.

Left out, and where to find it:
    several ranks, sharding, offloading       train.main, flatrl/devices.py
    rollouts that outlive a step              rollout.Pool (--max_staleness)
    failures of tools, loops and rewards      rollout.py; here an exception ends the run
    several updates per rollout               train.update
    engine and trainer that disagree          losses.rollout_correction
    critic, reference model, reward shaping   train.py
    evaluation, checkpoints, resuming, log    train.py, flatrl/checkpoints.py, flatrl/log.py"""

import argparse
import asyncio
import itertools
import os
import sys
import time
from pathlib import Path

# Python looks for modules in the folder of this file, but ours are in its parent.
sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from flatrl.launch import prepare_process, quiet_libraries

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # enough for a tiny model
    prepare_process()  # sets what torch reads when it is imported; Ctrl-C prints no traceback

import torch

import data
import losses
from agent_loop import AgentLoopOutput, ToolAgentLoop
from examples import calculator
from flatrl import devices, models
from rollout import Engine, RolloutEngine
from train import Args, Policy, sync

GROUP_SIZE = 8  # rollouts of one prompt, which are compared with each other
LEARNING_RATE = 3e-4
SETTINGS = {
    "max_model_len": 128,  # tokens of prompt and response together
    "max_response_tokens": 64,
    "tokens_per_micro_batch": 16384,
    "engine_args": '{"kv_cache_memory_bytes": 100000000}',  # the default is 1 GB
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="hub name or folder; default: the task's own tiny model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts_per_step", type=int, default=32)
    options = parser.parse_args()
    args, device, tokenizer, policy, engine = load(options.model)
    optimizer = torch.optim.AdamW(policy.parameters(), LEARNING_RATE, weight_decay=0.0)
    rows = itertools.cycle(calculator.load("train"))

    for step in range(options.steps):
        started = time.perf_counter()
        prompts = list(itertools.islice(rows, options.prompts_per_step))

        # 1. Rollout: the engine gets the present weights, and samples groups of rollouts.
        sync(engine, policy, version=step)
        rollouts = asyncio.run(sample(engine, tokenizer, args, prompts, step))
        engine.sleep()

        # 2. Score: a reward for each rollout.
        rows_of_rollouts = [row for row in prompts for _ in range(GROUP_SIZE)]
        rewards = torch.tensor(list(map(calculator.reward, rollouts, rows_of_rollouts)))

        # 3. Advantages: change this line to change the algorithm.
        groups = torch.arange(len(prompts)).repeat_interleave(GROUP_SIZE)
        advantages = losses.grpo_advantages(rewards, groups)

        # 4. Update: one step of the optimiser.
        loss = update(policy, optimizer, rollouts, advantages, args, device)
        seconds = time.perf_counter() - started
        results = f"reward {rewards.mean():.3f}   loss {loss:7.4f}   {seconds:.1f} s"
        print(f"step {step + 1:3d}   {results}")

    print("\nA rollout of the last step:")
    for message in rollouts[0].messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        print(f"    {message['role']:9s}", message["content"], *calls)


def load(model: str | None) -> tuple:
    """Returns settings, device, tokenizer, policy and engine. The engine sleeps."""
    quiet_libraries()
    args = Args(model=model, **SETTINGS)
    accelerator, _ = devices.start_processes(args)  # sets up torch.distributed, for one process
    device = accelerator.device
    args.dtype = "bfloat16" if device.type == "cuda" else "float32"  # as start_processes chose
    if not args.model:
        args.model = models.task_model(calculator, args)  # builds it, or finds it in the cache
    tokenizer, _ = models.load_tokenizer(args)
    vocab_size = models.vocab_size(tokenizer)
    data.register_packed_attention()
    policy = accelerator.prepare_model(Policy(args, vocab_size))  # one process: not wrapped
    stops = models.stop_token_ids(args, tokenizer)
    engine = Engine(args.model, args, device, stops, vocab_size)
    return args, device, tokenizer, policy, engine


async def sample(engine, tokenizer, args, prompts, step) -> list[AgentLoopOutput]:
    """Returns GROUP_SIZE rollouts of each prompt, group by group.

    While an agent loop waits for its tool, the engine decodes for the others. (In train.py the
    loops have a thread of their own, and so continue during a model step, too.)"""
    system = {"role": "system", "content": calculator.SYSTEM_PROMPT}
    agents = []
    for index, row in enumerate(prompts):
        for number in range(GROUP_SIZE):
            # The seed of each turn follows from this name, so runs can be repeated.
            wrapped = RolloutEngine(engine, f"step {step}, prompt {index}, sample {number}")
            loop = ToolAgentLoop(wrapped, tokenizer, processor=None, task=calculator, args=args)
            agents.append(loop.run({"temperature": 1.0}, prompt=[system, *row["prompt"]]))
    pending = asyncio.gather(*agents)
    while not pending.done():
        engine.step(timeout=0)
        await asyncio.sleep(0)  # the loops take their tokens, and ask for more
    outputs = await pending
    if any(isinstance(output, list) for output in outputs):
        sys.exit("this template rewrites the history at a tool's answer: use train.py")
    return outputs


def update(policy, optimizer, rollouts, advantages, args, device) -> float:
    """Makes one optimiser step; returns the loss.

    Each micro-batch is divided by the counts of the WHOLE batch, so its gradients add up to
    those of the batch, however it is cut."""
    batch = data.collate(rollouts)
    n_tokens = batch["response_mask"].sum().item()
    total = 0.0
    # Rows are packed without padding, and a prompt that they share is computed once.
    for micro in data.micro_batches_of_this_rank(
        batch, range(len(rollouts)), args.tokens_per_micro_batch, policy.is_packed
    ):
        logprobs = policy(policy.pack(batch, micro))["logprobs"]  # (b, T)
        mask = batch["response_mask"][micro.rows].to(device)  # (b, T)
        advantage = advantages[micro.rows].to(device)[:, None].expand_as(mask)  # (b, T)
        # With a single update per rollout these logprobs are the old ones, too.
        loss, _ = losses.policy_loss("ppo", logprobs, logprobs.detach(), advantage, mask)
        loss = losses.aggregate(loss, mask, "token-mean", n_tokens)
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


if __name__ == "__main__":
    main()
