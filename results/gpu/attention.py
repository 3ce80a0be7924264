"""How long does a start try the attention of a large model on the host, by its threads?

    python results/record.py gpu/attention -- python results/gpu/attention.py

A 7B or 32B model does not fit a small machine. So shapes of Qwen2.5 with few layers are timed; the
rest is linear in the layers."""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.append("bench")
import common  # noqa: F401, I001  (first: it sets the path)
import gpu
import torch
from transformers import AutoModelForCausalLM

import data
import train
from flatrl import devices, layers

SHAPES = {  # hidden, MLP, heads, heads of keys; layers to time, layers of the model
    "7B": ((3584, 18944, 28, 4), (1, 3), 28),
    "32B": ((5120, 27648, 40, 8), (1, 2), 64),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    choose = layers.choose_attention
    seconds = []

    def timed(*args):
        started = time.perf_counter()
        result = choose(*args)
        seconds.append(time.perf_counter() - started)
        return result

    layers.choose_attention = timed
    devices.start_processes(train.Args(model="none"))
    data.register_packed_attention()
    rows = []
    for name, ((hidden, mlp, heads, kv_heads), timed_layers, n_layers) in SHAPES.items():
        for n in timed_layers:
            gpu.SHAPES[name] = gpu.shape(hidden, mlp, n, heads, kv_heads, vocab_size=152064)
            with tempfile.TemporaryDirectory() as folder:
                path = gpu.build(name, Path(folder), "cpu")
                model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
                model.save_pretrained(path)  # as models of that size are stored
                del model
                for threads in (1, 2, 1, 2):  # the first two are a warm-up
                    torch.set_num_threads(threads)
                    train.Policy(train.Args(model=path, dtype="bfloat16", shard=True))
            row = {"shape": name, "layers": n, "of": n_layers}
            rows.append(row | {"one_thread_s": seconds[-2], "two_threads_s": seconds[-1]})
            print(rows[-1], flush=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
