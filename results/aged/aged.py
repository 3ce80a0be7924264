"""Trains on samples of the weights of a few steps ago, in every step: what holds then?

    python results/record.py aged/maze_1e-3_4_bypass_0 -- env EXAMPLE=maze AGE=4 \
        python train.py --task results/aged/aged.py --lr 1e-3 --rollout_correction bypass \
        --allow_mismatch --num_steps 24 --prompts_per_step 16 --max_assistant_turns 10 \
        --max_response_tokens 192 --seed 0

This is the worst case of --max_staleness 4: all tokens have the largest age. The file is the task
of the run, one of examples/, and gives the engine old weights under a new number. flatrl takes that
for a synchronous run whose engine and trainer disagree, so --allow_mismatch is necessary."""

import importlib
import os
from collections import deque

from rollout import Engine

example = importlib.import_module(f"examples.{os.environ['EXAMPLE']}")
globals().update((name, value) for name, value in vars(example).items() if name[0] != "_")

kept = deque(maxlen=1 + int(os.environ["AGE"]))  # weights, oldest first
load_weights = Engine.load_weights


def load_aged(engine, named_tensors, version):
    kept.append([(name, tensor.clone()) for name, tensor in named_tensors])
    load_weights(engine, kept[0], version)


Engine.load_weights = load_aged
