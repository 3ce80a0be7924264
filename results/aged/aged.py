"""A task of examples/ whose engine samples from the weights of AGE steps ago, in every step.

    TASK=maze AGE=4 python results/record.py aged/NAME -- python train.py \
        --task results/aged/aged.py --rollout_correction bypass --allow_mismatch

This is the worst case of an asynchronous run with --max_staleness AGE: all tokens have the
largest age. The engine gets old weights under a new number, so flatrl takes the run for a
synchronous one whose engine and trainer disagree, and --allow_mismatch is necessary.
"""

import importlib
import os
from collections import deque

from rollout import Engine

example = importlib.import_module(f"examples.{os.environ.get('TASK', 'calculator')}")
globals().update((name, value) for name, value in vars(example).items() if name[0] != "_")

kept = deque(maxlen=1 + int(os.environ.get("AGE", 4)))  # weights, oldest first
load_weights = Engine.load_weights


def load_aged(engine, named_tensors, version):
    kept.append([(name, tensor.clone()) for name, tensor in named_tensors])
    load_weights(engine, kept[0], version)


Engine.load_weights = load_aged
