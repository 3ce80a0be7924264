"""Measures the host memory of loading a policy on several ranks, up to its float32 shards.

    python bench/load.py                             # 302M parameters in bfloat16, 2 and 4 ranks
    python bench/load.py --ranks 2 --layers 2        # a smaller one

A random model is written in bfloat16. On so many CPU ranks, each of them then becomes a
train.Policy that is sharded and made float32, as train.py does it: once loaded as train.py
loads it, and once in float32, as it was done before. Of each rank the table has the most that
it held (VmHWM: pages of the model's files count in every rank that reads them), and its share
of what it holds before it is sharded (Pss: of a page that n ranks share, each has a part). At
the end the whole weights are compared by a hash: the same, to the last digit.

On a CPU the shards are host memory, too; on a GPU they are not.
"""

import argparse
import ctypes
import hashlib
import multiprocessing
import os
import re
import socket
import tempfile
from pathlib import Path

import common  # noqa: F401
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import data
import train
from flatrl import devices, models
from flatrl.terminal import quiet_libraries

GIB = 1 << 30


def build(folder: Path, layers: int) -> None:
    """Writes a model of Qwen2's shape with random weights in bfloat16."""
    config = AutoConfig.for_model(
        "qwen2", hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, vocab_size=32000, tie_word_embeddings=False)  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def gib(file: str, name: str) -> float:
    """Returns a figure of one of the kernel's files about this process, in GiB."""
    (kilobytes,) = re.findall(rf"^{name}:\s+(\d+) kB", Path(f"/proc/self/{file}").read_text(), re.MULTILINE)
    return int(kilobytes) * 1024 / GIB


def measure(folder: str, dtype: str, rank: int, ranks: int, port: int) -> None:
    """Loads and shards the model, as one of the ranks; the first prints a line for each."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                   "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    if dtype == "in float32":
        load = train.from_pretrained
        train.from_pretrained = lambda *given, **settings: load(*given, **settings | {"dtype": torch.float32})
    quiet_libraries()
    args = train.Args(model=folder, dtype="bfloat16", shard=True)
    accelerator, _ = devices.start_processes(args)
    data.register_packed_attention()
    before = gib("smaps_rollup", "Pss")
    policy = train.Policy(args)
    ctypes.CDLL(None).malloc_trim(0)  # what the C library keeps for later
    dist.barrier()
    loaded = gib("smaps_rollup", "Pss") - before
    dist.barrier()
    learner = train.Learner(policy, 0.0, 1, args, accelerator)
    most = gib("status", "VmHWM")
    digest = hashlib.sha256()
    for name, weight in models.whole_weights(learner.net.model, torch.float32):
        assert weight.dtype == torch.float32, name
        digest.update(weight.numpy().tobytes())
    lines = [None] * dist.get_world_size()
    dist.all_gather_object(lines, f"{most:.2f} GiB at most, {loaded:.2f} its share when loaded")
    if dist.get_rank() == 0:
        for rank, line in enumerate(lines):
            print(f"    rank {rank}: {line}", flush=True)
        with Path(folder, "digests").open("a") as file:
            print(digest.hexdigest(), file=file)


def run_each(function, *arguments: tuple) -> None:
    """Calls a function with each of these arguments, in processes of their own, all at once."""
    # Forked: they need not import anything again. This process must not have computed anything.
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=function, args=given) for given in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert all(process.exitcode == 0 for process in processes), "a rank failed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_each(build, (Path(folder), options.layers))
        for ranks in options.ranks:
            for dtype in ("in float32", "as it is stored"):
                print(f"{ranks} ranks, loaded {dtype}", flush=True)
                with socket.create_server(("127.0.0.1", 0)) as server:
                    port = server.getsockname()[1]
                run_each(measure, *((folder, dtype, rank, ranks, port) for rank in range(ranks)))
        digests = Path(folder, "digests").read_text().split()
        assert len(set(digests)) == 1 and len(digests) == 2 * len(options.ranks), digests
        print("the weights are the same each time, bit by bit")


if __name__ == "__main__":
    main()
