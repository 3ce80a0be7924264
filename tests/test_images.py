"""Images, from rows and tools to the gradient: a tiny Qwen2.5-VL, real vLLM, real processor."""

import asyncio
import base64
import io
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vision_task
from conftest import KEPT, SMALL_CACHE, metrics_of, output_of, rollouts_of, stepped
from PIL import Image
from test_agent_loop import Script, encode
from transformers import AutoConfig, AutoModelForImageTextToText
from vision_task import Looker, picture

import data
import train
from agent_loop import AgentLoopOutput, BadInput, SingleTurnLoop, expand, load_image
from examples.vision import init_vision_model
from flatrl import models
from flatrl.chat.client import ChatAgentLoop
from flatrl.vision import Vision
from rollout import Engine

CPU = torch.device("cpu")
PLACE = "<|image_pad|>"
SEEN = f"<|vision_start|>{PLACE}<|vision_end|>"


def load_processor(args: train.Args):
    return models.load_processor(args, AutoConfig.from_pretrained(args.model))


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    """The placeholder's logit is huge, and so are those of ids beyond the tokenizer's, as Qwen has
    them (vllm#13175): a side that left them in would sample them, or be off by nats."""
    path = tmp_path_factory.mktemp("models") / "vision"
    torch.manual_seed(0)
    model = init_vision_model(path)
    n_tokens = model.config.text_config.vocab_size
    model.resize_token_embeddings(n_tokens + 24)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[n_tokens:] = head[model.config.image_token_id] = 20 * head[65]
    model.save_pretrained(path)
    lengths = dict(max_prompt_tokens=128, max_response_tokens=128, max_model_len=256)
    return train.Args(
        model=str(path), dtype="float32", max_images=4, engine_args=SMALL_CACHE, **lengths
    )


@pytest.fixture(scope="module")
def processor(args):
    data.register_packed_attention()
    return load_processor(args)


def make_policy(args, processor) -> train.Policy:
    return train.Policy(args, len(processor.tokenizer), Vision(processor))


def user(content) -> list[dict]:
    return [{"role": "user", "content": content}]


def rows_of(args, processor, task=vision_task) -> list[dict]:
    rows = data.load_rows(task, "train")
    return data.filter_overlong(rows, processor.tokenizer, task, args, processor)


def make_engine(args, processor) -> Engine:
    tokenizer = processor.tokenizer
    stops = [tokenizer.eos_token_id]
    KEPT.append(Engine(args.model, args, CPU, stops, len(tokenizer), processor.image_token_id))
    return KEPT[-1]


@pytest.fixture(scope="module")
def vision_engine(args, processor, process_group) -> Engine:
    return make_engine(args, processor)


def pack(batch: dict, rows) -> tuple[dict, list[int]]:
    micro = data.in_prefix_order(batch, rows)
    return data.pack_rows(batch, micro, CPU), micro.rows


def differences(policy, outputs: list) -> torch.Tensor:
    """|engine - trainer| of every sampled token, all outputs in one packed forward pass."""
    batch = data.collate(outputs, policy.vision.image_token_id)
    logprobs = torch.zeros_like(batch["logprobs_rollout"])
    packed, rows = pack(batch, range(len(outputs)))
    with torch.no_grad():
        logprobs[rows] = policy(packed)["logprobs"]
    return (logprobs - batch["logprobs_rollout"]).abs()[batch["response_mask"].bool()]


def qwen3_vl(args, folder) -> train.Args:
    """Another model in the folder, whose tower adds features to later layers, and whose positions
    are interleaved."""
    shutil.copytree(args.model, folder, dirs_exist_ok=True)
    ours = AutoConfig.from_pretrained(args.model).to_dict()
    text = ours["text_config"] | {"bos_token_id": None, "head_dim": 32}
    text["rope_parameters"] |= {"mrope_interleaved": True}
    seeing = ours["vision_config"] | {"deepstack_visual_indexes": [0, 1]}
    seeing["num_position_embeddings"] = 64
    for part in (ours, text, seeing):
        for name in ("model_type", "layer_types", "sliding_window", "max_window_layers"):
            part.pop(name, None)
    ours |= {"text_config": text, "vision_config": seeing}
    config = AutoConfig.for_model("qwen3_vl", **ours)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return replace(args, model=str(folder))


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL"])
def test_turns_with_images_agree_with_the_engine(
    kind, vision_engine, background, args, processor, tmp_path
):
    engine = vision_engine
    if kind == "Qwen3VL":
        args = qwen3_vl(args, tmp_path)
        processor = load_processor(args)
        engine = make_engine(args, processor)
    assert type(processor).__name__ == f"{kind}Processor"
    policy = make_policy(args, processor)
    rows = rows_of(args, processor)[:9]
    train.sync(engine, policy, 0)
    loops = [Looker(engine, processor.tokenizer, processor, vision_task, args) for _ in rows]
    runs = [loop.run({"temperature": 1.0}, **row) for loop, row in zip(loops, rows)]
    outputs = stepped(engine, background, *runs)
    engine.sleep()
    place = processor.image_token_id
    for row, output in zip(rows, outputs, strict=True):
        looked = row["index"] % 3 == 1
        assert len(output.images) == len(row["images"]) + looked
        n_places = (output.prompt_ids + output.response_ids).count(place)
        assert n_places == sum(image.width * image.height // 28**2 for image in output.images)
        sampled_ids = [i for i, m in zip(output.response_ids, output.response_mask) if m]
        assert place not in sampled_ids and max(sampled_ids) < len(processor.tokenizer)
        assert sum(output.response_mask) > 1 and output.num_turns == 4
    found = differences(policy, outputs)
    assert len(found) > 60 and found.max() < 1e-4
    # The images count: with other ones the trainer disagrees.
    seeing = next(output for output in outputs if output.images)
    others = [picture(99, *image.size) for image in seeing.images]
    assert differences(policy, [replace(seeing, images=others)]).max() > 1e-3


def shown(processor, text: str, images: list, response="abcdef") -> AgentLoopOutput:
    """An output with these images in its prompt."""
    ids = encode(processor.tokenizer, response)
    prompt = expand(encode(processor.tokenizer, text), images, processor)
    return output_of([1] * len(ids), prompt, ids, images=images)


def test_gradients_are_those_of_transformers_and_shared_prefixes_are_computed_once(args, processor):
    args = replace(args, gradient_checkpointing=True)
    policy = make_policy(args, processor)
    image = picture(1, 56, 84)
    outputs = [
        shown(processor, f"a{SEEN}b", [image], "abc"),
        shown(processor, f"a{SEEN}b", [image], "abd"),
        shown(processor, f"a{SEEN}b", [picture(3, 56, 84)]),  # the same tokens, another image
        shown(processor, f"a{SEEN}b{SEEN}", [image, picture(2, 112, 56)]),
        shown(processor, "no image", []),
    ]
    batch = data.collate(outputs, processor.image_token_id)
    packed, _ = pack(batch, range(5))
    assert packed["inputs"]["input_ids"].numel() < 0.75 * batch["lengths"].sum()
    policy(packed)["logprobs"].sum().backward()
    whole = {name: p.grad for name, p in policy.named_parameters()}
    visual = [gradient for name, gradient in whole.items() if "visual" in name]
    assert visual and all(gradient.any() for gradient in visual)

    # Unpadded, unpacked, with transformers' own positions and attention.
    plain = AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.float32)
    for output in outputs:
        ids = torch.tensor([output.prompt_ids + output.response_ids])
        more = {}
        if output.images:
            more = processor.image_processor(output.images, return_tensors="pt")
            more["mm_token_type_ids"] = (ids == processor.image_token_id).int()
        logits = plain(input_ids=ids, **more).logits[0, len(output.prompt_ids) - 1 : -1]
        logits[:, processor.image_token_id] = float("-inf")
        logits[:, len(processor.tokenizer) :] = float("-inf")
        response = torch.tensor(output.response_ids)[:, None]
        logits.log_softmax(-1).gather(1, response).sum().backward()
    for name, p in plain.named_parameters():
        assert torch.allclose(p.grad, whole[f"model.{name}"], atol=1e-4, rtol=1e-3), name


def test_a_chat_agent_sends_images_as_data_urls_and_the_rows_as_they_are(args, processor):
    first = picture(1, 84, 56)
    second = picture(2, 56, 56)
    file = io.BytesIO()
    second.save(file, "png")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

    class Seeing(Script):
        async def generate(self, **request):
            out = await super().generate(**request)
            out.prompt_ids = expand(out.prompt_ids, request["image_data"], processor)
            return out

    class Agent(ChatAgentLoop):
        async def chat(self, client, prompt, **row):
            part = {"type": "image_url", "image_url": {"url": url}}
            await client.chat.completions.create(messages=[*prompt, *user([part])])

    engine = Seeing(processor.tokenizer, ["red"])
    agent = Agent(engine, processor.tokenizer, processor, None, args)
    content = [{"type": "image"}, {"type": "text", "text": "Look."}]
    (output,) = asyncio.run(agent.run({}, prompt=user(content), images=[first]))
    assert output.images == engine.images[0] == [first, second]


def check_one(row: dict, args, processor, **more) -> list[dict]:
    return rows_of(replace(args, **more), processor, SimpleNamespace(load=lambda split: [row]))


def test_images_in_each_form_that_data_sets_have(args, processor, tmp_path):
    """And placeholders in both. --max_prompt_tokens counts the six tokens of the image."""
    image = picture(1, 84, 56)
    path = tmp_path / "a.png"
    image.save(path)
    raw = path.read_bytes()
    in_file = {"bytes": None, "path": str(path)}
    for form in (image.convert("RGBA"), raw, {"bytes": raw, "path": None}, in_file):
        content = "<image>a" if form is raw else [{"type": "image"}, {"type": "text", "text": "a"}]
        [row] = check_one({"prompt": user(content), "images": [form]}, args, processor)
        assert row["prompt"] == user([{"type": "image"}, {"type": "text", "text": "a"}])
        started = SingleTurnLoop(None, processor.tokenizer, processor, None, args).start(row)
        assert started.images == [image]
    length = len(started.prompt_ids)
    row = {"prompt": user("<image>a"), "images": [image]}
    assert len(check_one(row, args, processor, max_prompt_tokens=length)) == 1
    with pytest.raises(BadInput, match=f"the longest has {length} tokens"):
        check_one(row, args, processor, max_prompt_tokens=length - 1)


@pytest.mark.parametrize("image, seen", [
    (Image.new("LA", (1, 1), (0, 128)), (127, 127, 127)),
    (Image.fromarray(np.array([[0x40FF]], np.uint16)), (64, 64, 64)),
])  # fmt: skip
def test_pixels_that_are_not_rgb(image, seen):
    """Transparent ones show white, as in vLLM; of 16 bits the upper eight stay."""
    assert load_image(image).getpixel((0, 0)) == seen


def test_a_run_with_images(train_here, vision_engine, args, tmp_path):
    """With a critic and a KL. Ranks without an image are in test_sharding.py."""
    flags = [
        *["--task", "tests/vision_task.py", "--agent", "looker", "--num_steps", "2"],
        *["--model", args.model, "--prompts_per_step", "4", "--group_size", "2"],
        *["--max_prompt_tokens", "96", "--max_response_tokens", "64", "--lr", "1e-2"],
        *["--algo", "ppo", "--kl_coef", "0.01", "--prompts_per_mini_batch", "2"],
        *["--tokens_per_micro_batch", "160", "--gradient_checkpointing", "--eval_every", "0"],
    ]
    train_here(*flags, "--output_dir", tmp_path, by=vision_engine)
    for row in metrics_of(tmp_path)[1:]:
        assert row["rollout/logp_diff_max"] < 1e-3 and row["actor/grad_norm"] > 0
        assert row["rollout/failed_agent_loop"] == 0 and row["rollout/trajectories"] == 8
    assert any(rollout["images"] for rollout in rollouts_of(tmp_path, 2))
    load_processor(replace(args, model=str(tmp_path / "final")))
