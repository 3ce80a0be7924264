"""Trains on samples of the weights of a few steps ago, in every step: what holds then?

    python results/record.py aged/maze_1e-3_4_bypass_0 -- python results/aged/aged.py \
        --example maze --age 4 --lr 1e-3 --rollout_correction bypass --seed 0

This is the worst case of --max_staleness 4: all tokens have the largest age. The file is also the
task of the run, one of examples/. Imported, it gives the engine old weights under a new number.
flatrl takes that for a synchronous run whose engine and trainer disagree, so --allow_mismatch is
necessary. A run is recorded as one line, with a list for each metric."""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path

FLAGS = "--rollout_correction bypass --allow_mismatch --eval_every 0 --save_every 0"
FLAGS_OF = {
    "calculator": "--num_steps 60",
    "maze": "--num_steps 24 --prompts_per_step 16 --max_assistant_turns 10 "
    "--max_response_tokens 192",
}
KEPT = ("reward/mean", "rollout/kl", "rollout/ratio_max", "actor/grad_norm")


def main():
    parser = argparse.ArgumentParser(description="Further flags are those of train.py.")
    parser.add_argument("--example", choices=FLAGS_OF, default="calculator")
    parser.add_argument("--age", default="4")
    parser.add_argument("--out", type=Path, required=True)
    args, flags = parser.parse_known_args()
    flags = FLAGS.split() + FLAGS_OF[args.example].split() + flags
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", "--task", __file__, *flags, "--output_dir", folder]
        environment = os.environ | {"EXAMPLE": args.example, "AGE": args.age}
        subprocess.run(command, env=environment, check=True)
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "actor/grad_norm" in row]
    line = {name: [float(f"{step[name]:.4g}") for step in steps] for name in KEPT}
    args.out.write_text(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
else:
    from rollout import Engine

    example = importlib.import_module(f"examples.{os.environ['EXAMPLE']}")
    globals().update((name, value) for name, value in vars(example).items() if name[0] != "_")

    kept = deque(maxlen=1 + int(os.environ["AGE"]))  # weights, oldest first
    load_weights = Engine.load_weights

    def load_aged(engine, named_tensors, version):
        kept.append([(name, tensor.clone()) for name, tensor in named_tensors])
        load_weights(engine, kept[0], version)

    Engine.load_weights = load_aged
