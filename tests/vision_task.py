"""A task for the tests: a random Qwen2.5-VL, images in prompts, and a tool that returns one more.

A random model writes no tool call, so the agent makes one after its first turn. Any five tokens
are a turn."""

import random

from PIL import Image

from agent_loop import Tool, ToolAgentLoop, ToolResponse, register
from examples.vision import init_vision_model


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Noise in colour, another for each seed."""
    data = random.Random(seed).randbytes(3 * width * height)
    return Image.frombytes("RGB", (width, height), data)


def load(split: str) -> list[dict]:
    """Rows with no image, one and two, by index modulo 3."""
    rows = []
    for i in range(12 if split == "train" else 3):
        n = i % 3
        rows.append({
            "prompt": [{"role": "user", "content": "<image>" * n + f"What is {i}?"}],
            "images": [picture(10 * i + k, 56 + 28 * k, 56 + 28 * (i % 4)) for k in range(n)],
            "extra_info": {"index": i, "tools_kwargs": {"look": {"execute_kwargs": {"index": i}}}},
        })  # fmt: skip
    return rows


def reward(output, row) -> float:
    """Something that differs within a group."""
    return sum(output.response_ids) % 7 / 7


class Look(Tool):
    name = "look"
    schema = {"type": "function", "function": {"name": name, "description": "Look."}}

    async def execute(self, request_id: str, arguments: dict, index: int) -> ToolResponse | str:
        if index % 3 != 1:
            return "nothing to see"
        return ToolResponse("seen", images=[picture(1000 + index, 56, 56 + 28 * (index % 3))])


TOOLS = [Look()]


@register("looker")
class Looker(ToolAgentLoop):
    async def assistant_turn(self, trajectory, sampling_params):
        text = await super().assistant_turn(trajectory, {**sampling_params, "max_tokens": 5})
        if trajectory.stop_reason == "length" and self.room(trajectory) > 0:
            trajectory.stop_reason = "stop"
            text = ""
        return text

    def parse(self, trajectory, text):
        call = {"name": "look", "arguments": {}, "error": None}
        return [call] if trajectory.assistant_turns == 1 else []


def build_model(path: str) -> None:
    init_vision_model(path)
