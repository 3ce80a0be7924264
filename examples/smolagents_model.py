"""The built-in model of smolagents_math.py: it knows smolagents' words, and guesses at times."""

import itertools
import random
import re
from pathlib import Path

from examples.calculator import load
from examples.tiny_models import build_warm_model

PROMPTS = {"smol_tools": "Use the calculator.", "smol_code": "Use the calculator in code."}
# How smolagents tells the model about an earlier call.
CALL = "\nCalling tools:\n[{{'id': '000001000', 'type': 'function', 'function': {}}}]"
TURN = "<|im_end|>\n<|im_start|>"


def demonstrations(row: dict) -> list[list[dict]]:
    """Returns a chat for every step of both agents, which, one time in two, guess."""
    question = row["prompt"][0]["content"]
    truth = row["reward_model"]["ground_truth"]
    expression = question.removeprefix("What is ").removesuffix("?")
    if random.random() < 0.5:
        guess = re.match("[0-9]+", expression).group()
        return [tools_chat(question, "final_answer", answer=guess), code_chat(question, guess)]
    call = {"name": "calculator", "arguments": {"expression": expression}}
    after_call = f"{question}{TURN}assistant\n{CALL.format(call)}{TURN}user\nObservation:\n{truth}"
    return [
        tools_chat(question, "calculator", expression=expression),
        tools_chat(after_call, "final_answer", answer=truth),
        code_chat(question, f'calculator("{expression}")'),
    ]


def tools_chat(task: str, name: str, **arguments) -> list[dict]:
    """Returns a step of ToolCallingAgent: it calls a tool. The template shows the tools' names."""
    call = {"function": {"name": name, "arguments": arguments}}
    return [
        {"role": "system", "content": PROMPTS["smol_tools"] + "\nTools: calculator, final_answer"},
        {"role": "user", "content": f"New task:\n{task}"},
        {"role": "assistant", "tool_calls": [call]},
    ]


def code_chat(task: str, expression: str) -> list[dict]:
    """Returns a step of CodeAgent: its code returns the value of an expression."""
    return [
        {"role": "system", "content": PROMPTS["smol_code"]},
        {"role": "user", "content": f"New task:\n{task}"},
        {"role": "assistant", "content": f"<code>\nfinal_answer({expression})\n</code>"},
    ]


def build_model(path: str | Path) -> None:
    """Writes a model that has learned from demonstrations to the folder `path`."""
    chats = []
    rows = load("train")
    for _ in range(64):
        block = list(itertools.chain.from_iterable(map(demonstrations, random.choices(rows, k=64))))
        # Chats of similar lengths stand side by side, which takes less padding.
        chats += sorted(block, key=lambda chat: len(str(chat)))
    build_warm_model(path, chats, batch_size=32)
