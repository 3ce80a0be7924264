"""Run by test_tp.py: leaders sample for fixed prompts; rank 0 writes the results.

torchrun --nproc_per_node 2 tests/engine_worker.py MODEL TP OUT"""

import asyncio
import os
import random
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import torch
import torch.distributed as dist
from conftest import SMALL_CACHE
from transformers import AutoModelForCausalLM

from flatrl.processes import Background
from rollout import Engine
from train import Args

PROMPTS = [[random.Random(i).randrange(3, 250) for _ in range(5 + 3 * i)] for i in range(6)]


def main(model: str, tp: int, out: str) -> None:
    alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group("gloo", **alone)
    args = Args(
        model=model,
        dtype="float32",
        tp=tp,
        max_model_len=128,
        max_response_tokens=64,
        engine_args=SMALL_CACHE,
    )
    engine, background = Engine(model, args, torch.device("cpu")), Background()
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sampling = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}

    async def calls(version: int) -> list:
        """One prompt is refused, one call is given up half-way, the others have two turns."""

        async def ask(i: int, prompt: list[int]):
            return await engine.generate(
                request_id=f"{version}-{i}", prompt_ids=prompt, sampling_params=sampling
            )

        async def one(i: int, prompt: list[int]):
            first = await ask(i, prompt)
            return first, await ask(i, prompt + first.token_ids + [7, 8])

        lost = asyncio.create_task(one(98, [5] * 10))
        prompts = [*PROMPTS, [3] * 200]
        tasks = [asyncio.create_task(one(i, prompt)) for i, prompt in enumerate(prompts)]
        await asyncio.wait(tasks[:1])
        lost.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = []
    for version in range(2):
        with torch.no_grad():
            for i, parameter in enumerate(weights.parameters()):
                generator = torch.Generator().manual_seed(i + version)
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        engine.wake_weights()
        engine.load_weights(((name, p.detach()) for name, p in weights.named_parameters()), version)
        engine.wake_kv()
        if engine.leader:
            future = background.submit(calls(version))
            future.add_done_callback(lambda _: engine.poke())
            while not future.done():
                engine.step()
            engine.drain()
            engine.dismiss()
            for result in future.result():
                is_error = isinstance(result, Exception)
                results.append(repr(result) if is_error else [vars(turn) for turn in result])
        else:
            engine.follow()
            assert engine.statistics["tokens"] > 0  # it sampled as well
        assert not engine.core.has_unfinished_requests() and not engine.running
        engine.sleep()
    if dist.get_rank() == 0:
        torch.save(results, out)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
