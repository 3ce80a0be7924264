"""Images: in the prompt and from a tool, and a tiny vision-language model that learns to look.

    accelerate launch train.py --task examples/vision.py
    accelerate launch train.py --task examples/vision.py --max_response_tokens 512 \\
        --model Qwen/Qwen2.5-VL-3B-Instruct

The prompt shows a card of four cells that are nearly grey; `zoom` returns one of them in its full
colour. The built-in model zooms on about half of the cards. Qwen2.5-VL's own template does not show
tools: with that model, describe a call in SYSTEM_PROMPT."""

import itertools
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from transformers import (
    AutoProcessor,
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from agent_loop import Tool, ToolResponse
from data import load_rows
from examples.tiny_models import CHAT_TEMPLATE, fit, init_model


def without_torchvision() -> None:
    """Makes transformers and vLLM process images with Pillow where torchvision does not work.

    Only the video part of Qwen's processors needs it. Call this before vLLM imports the model."""
    from transformers.processing_utils import ProcessorMixin
    from transformers.utils import is_torchvision_available

    if is_torchvision_available() or hasattr(ProcessorMixin, "video_processor"):
        return
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pil
    from vllm.model_executor.models import registry

    get_all = ProcessorMixin.get_attributes.__func__

    def get_attributes(cls) -> list[str]:
        return [name for name in get_all(cls) if name != "video_processor"]

    ProcessorMixin.get_attributes = classmethod(get_attributes)
    # vLLM asks the video processor for sizes and arguments, and imports a function from its module.
    ProcessorMixin.video_processor = property(lambda self: self.image_processor)
    sys.modules["transformers.models.qwen2_vl.image_processing_qwen2_vl"] = pil
    # A fresh process would not have these patches.
    registry._run_in_subprocess = lambda function: function()


without_torchvision()

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
SYSTEM_PROMPT = "Name the colour: <answer>red</answer>."


def card(colours: Sequence[str]) -> Image.Image:
    """Returns an image of cells 1 to 4, side by side, with a touch of these colours."""
    image = Image.new("RGB", (112, 56))
    for i, colour in enumerate(colours):
        shade = tuple(120 + value // 32 for value in COLOURS[colour])
        image.paste(shade, (28 * i, 0, 28 * i + 28, 56))
    return image


def load(split: str) -> list[dict]:
    """Returns the rows of a split: of 1,024 cards and cells, 64 are for "val"."""
    cards = list(itertools.product(itertools.product(COLOURS, repeat=4), range(1, 5)))
    random.Random(0).shuffle(cards)
    rows = []
    for colours, cell in {"train": cards[64:], "val": cards[:64]}[split]:
        row = {
            "prompt": f"<image>Cell {cell}?",
            "images": [card(colours)],
            "reward_model": {"ground_truth": colours[cell - 1]},
            "extra_info": {"cell": cell},
            "tools_kwargs": {"zoom": {"execute_kwargs": {"colours": colours}}},
        }
        rows.append(row)
    return rows


class Zoom(Tool):
    """Shows a cell of the row's card in its full colour."""

    name = "zoom"
    cell = {"type": "integer", "minimum": 1, "maximum": 4}
    parameters = {"type": "object", "properties": {"cell": cell}, "required": ["cell"]}
    function = {"name": name, "description": "Show a cell.", "parameters": parameters}
    schema = {"type": "function", "function": function}

    async def execute(self, request_id: str, arguments: dict, colours: Sequence[str]):
        cell = arguments.get("cell")
        if cell not in (1, 2, 3, 4):
            raise ValueError("cell must be 1, 2, 3 or 4")
        colour = COLOURS[colours[cell - 1]]
        return ToolResponse(images=[Image.new("RGB", (56, 56), colour)])


TOOLS = [Zoom()]


def reward(output, row) -> float:
    """Returns 1.0 if the last message has one answer, the right one, else 0.0."""
    last = output.messages[-1]
    if last["role"] != "assistant":  # the rollout ended before the policy answered
        return 0.0
    answers = re.findall("<answer>(.*?)</answer>", last["content"])
    return float(answers == [row["reward_model"]["ground_truth"]])


# ---------------------------------------------------------------- a Qwen2.5-VL of 0.2M parameters

SHOW = """
{%- macro show(content) %}
    {%- for part in ([{'type': 'text', 'text': content}] if content is string else content) %}
        {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
    {%- endfor %}
{%- endmacro %}"""
TEMPLATE = SHOW + CHAT_TEMPLATE.replace("~ message.content ~", "~ show(message.content) ~").rstrip()


def init_vision_model(path: str | Path):
    """Writes a random model, its tokenizer and its image processor to the folder `path`.

    Returns the model."""
    _, tokenizer = init_model(path)
    tokens = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = TEMPLATE
    start, end, image, video = tokenizer.convert_tokens_to_ids(tokens)
    ends = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [4, 6, 6],
            "rope_theta": 100.0,
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=text | ends | {"initializer_range": 0.1},
            vision_config=vision | {"initializer_range": 0.1},
            image_token_id=image,
            video_token_id=video,
            vision_start_token_id=start,
            vision_end_token_id=end,
            tie_word_embeddings=True,
        )
    )
    model.generation_config = GenerationConfig(**ends)
    pixels = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 64 * 28 * 28})
    for part in (model, tokenizer, pixels):
        part.save_pretrained(path)
    return model


def demonstration(row: dict) -> tuple[list[dict], list]:
    """Returns (messages, images) of a teacher who looks at half of the cards, and else guesses."""
    if random.random() < 0.5:
        guess = f"<answer>{random.choice(list(COLOURS))}</answer>"
        return [*row["prompt"], {"role": "assistant", "content": guess}], row["images"]
    truth = row["reward_model"]["ground_truth"]
    arguments = {"cell": row["extra_info"]["cell"]}
    call = {"type": "function", "function": {"name": "zoom", "arguments": arguments}}
    return [
        *row["prompt"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "image"}]},
        {"role": "assistant", "content": f"<answer>{truth}</answer>"},
    ], [*row["images"], Image.new("RGB", (56, 56), COLOURS[truth])]


def build_model(path: str | Path) -> None:
    """Writes the default model to the folder `path`, warmed up on demonstrations."""
    model = init_vision_model(path)
    processor = AutoProcessor.from_pretrained(path)
    assistant = processor.tokenizer.convert_tokens_to_ids("assistant\n")
    rows = load_rows(sys.modules[__name__], "train")

    def loss_of(i: int) -> torch.Tensor:
        """Returns the loss of all that follows the prompts of 16 demonstrations."""
        chats, images = zip(*map(demonstration, random.choices(rows, k=16)))
        texts = processor.apply_chat_template(list(chats), tools=[Zoom.schema], tokenize=False)
        batch = processor(
            text=texts,
            images=list(itertools.chain.from_iterable(images)),
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        ids = batch["input_ids"]
        is_prompt = (ids == assistant).cumsum(1) == 0
        is_padding = batch["attention_mask"] == 0
        labels = ids.masked_fill(is_prompt | is_padding, -100)
        return model(**batch, labels=labels).loss

    fit(model, loss_of, n_batches=300)
    model.save_pretrained(path)
