r"""A warm start: demonstrations first, then reinforcement learning, in one command.

    accelerate launch train.py --task examples/warm_start.py --imitation_steps 200 \
        --num_steps 240 --lr 1e-3

The questions, the tool and the reward are those of examples/calculator.py, but this model has never
seen a tool call. It is a parrot: it repeats the last thing that it was told. Every reward is 0, so
reinforcement learning alone finds nothing to prefer:

    user       What is 37*48?
    assistant  <answer>37*48</answer>

The training rows have a column `demonstration`, the turns of an assistant who calls the tool. In
the first steps the agent loop takes these turns in place of sampled ones and runs the tool on them,
and the policy learns to say them. After that it samples, and learns from the reward."""

import random
from pathlib import Path

from agent_loop import function_call
from examples import calculator
from examples.calculator import SYSTEM_PROMPT, TOOLS, expression_of, reward  # noqa: F401
from examples.tiny_models import build_warm_model


def load(split: str) -> list[dict]:
    """Returns the calculator's rows; those of "train" have a demonstration each."""
    rows = calculator.load(split)
    if split == "train":
        for row in rows:
            row["demonstration"] = demonstration(row)
    return rows


def demonstration(row: dict) -> list:
    """Returns the assistant's turns: a call of the tool, as a message, and the answer, as a text.

    The tool's result in between is left out: the agent loop runs the tool."""
    call = function_call("", "calculator", {"expression": expression_of(row)})
    answer = row["reward_model"]["ground_truth"]
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        f"<answer>{answer}</answer>",
    ]


def build_model(path: str | Path) -> None:
    """Writes a model that can repeat a question or a number, and has never called a tool."""
    chats = []
    for row in random.choices(load("train"), k=400 * 32):
        number = str(random.randint(-99, 99**2))
        chat = [{"role": "system", "content": SYSTEM_PROMPT}, *row["prompt"]]
        for words in (expression_of(row), number):
            chat.append({"role": "assistant", "content": f"<answer>{words}</answer>"})
            chat.append({"role": "user", "content": number})
        chats.append(chat[:-1])
    build_warm_model(path, chats, TOOLS, batch_size=32)
