"""The calculator task, whose tool takes 0 to 5 seconds: is an asynchronous rollout faster?

The table has trajectories per second of training steps, first to last: filling the pipeline at
the start and emptying it at the end count, starting up does not. SLOWEST_CALL changes the 5.
"""

import asyncio
import functools
import os
import random

from examples import calculator as example
from examples.calculator import SYSTEM_PROMPT, build_model, load, reward  # noqa: F401

seconds = random.Random(0)


@functools.wraps(example.calculator)
async def calculator(expression: str) -> str:
    slowest = float(os.environ.get("SLOWEST_CALL", 5))
    await asyncio.sleep(seconds.uniform(0, slowest))
    return example.calculator(expression)


TOOLS = [calculator]
