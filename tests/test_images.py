"""Images, from rows and tools to the gradient: a tiny random Qwen2.5-VL, real vLLM, real processor."""

import asyncio
import base64
import io
import json
import shutil
import types
from dataclasses import dataclass, field, replace

import pytest
import torch
import vision_task
from conftest import KEPT, SMALL_CACHE, make_run, run
from PIL import Image
from transformers import AutoConfig
from vision_task import Looker, picture

import agent_loop
import data
import train
from agent_loop import (
    BadInput,
    SingleTurnLoop,
    TokenOutput,
    Tool,
    ToolAgentLoop,
    ToolResponse,
    expand,
    load_image,
    render,
)
from examples.chat_client import ChatAgentLoop
from examples.vision import TEMPLATE
from flatrl import models
from flatrl.vision import Vision, check_images
from rollout import rollout

PLACE, START, STOP = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
SEEN = START + PLACE + STOP


def load_processor(args: train.Args):
    return models.load_processor(args, AutoConfig.from_pretrained(args.model))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("models") / "vision"
    torch.manual_seed(0)
    vision_task.build_model(path)
    return str(path)


@pytest.fixture(scope="module")
def args(model):
    return train.Args(
        model=model, dtype="float32", max_prompt_tokens=128, max_response_tokens=128, max_model_len=256, max_images=4,
        engine_args=SMALL_CACHE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def processor(args):
    return load_processor(args)


@pytest.fixture(scope="module")
def vision(processor):
    data.register_packed_attention()
    return Vision(processor)


@pytest.fixture(scope="module")
def engine(args, processor, process_group):
    from rollout import Engine

    tokenizer = processor.tokenizer
    engine = Engine(
        args.model, args, torch.device("cpu"), [tokenizer.eos_token_id], len(tokenizer), processor.image_token_id
    )
    KEPT.append(engine)
    return engine


@pytest.fixture(scope="module")
def policy(args, vision, processor):
    return train.Policy(args, len(processor.tokenizer), vision)


def ids_of(processor, text: str) -> list[int]:
    return processor.tokenizer(text, add_special_tokens=False)["input_ids"]


def rows_of(args, processor, split: str = "train") -> list[dict]:
    return data.filter_overlong(data.load_rows(vision_task, split), processor.tokenizer, vision_task, args, processor)


def play_all(engine, background, args, processor, rows: list[dict], cls=Looker, task=vision_task) -> list:
    """The outputs of one trajectory a row, the main thread stepping as in a rollout phase."""

    async def everything():
        loops = [
            cls(engine, processor.tokenizer, processor, task, args).run({"temperature": 1.0}, **row) for row in rows
        ]
        return await asyncio.gather(*loops)

    future = background.submit(everything())
    future.add_done_callback(lambda _: engine.poke())
    while not future.done():
        engine.step()
    return future.result()


# ---------------------------------------------------------------- engine against trainer


def differences(policy, outputs: list, args) -> torch.Tensor:
    """|engine - trainer| of every sampled token, all outputs in one packed forward pass."""
    batch = data.collate(outputs)
    logprobs = torch.zeros_like(batch["logprobs_rollout"])
    micro = data.in_prefix_order(batch, range(len(outputs)))
    with torch.no_grad():
        logprobs[micro.rows], _ = policy(data.pack_rows(batch, micro, torch.device("cpu")))
    return (logprobs - batch["logprobs_rollout"]).abs()[batch["response_mask"].bool()]


def test_two_turns_with_images_of_prompts_and_tools_agree_with_the_engine(engine, background, args, processor, policy):
    rows = rows_of(args, processor)[:9]
    assert {len(row["images"]) for row in rows} == {0, 1, 2}
    assert len({image.size for row in rows for image in row["images"]}) >= 4
    train.sync(engine, policy, 0)
    outputs = play_all(engine, background, args, processor, rows)
    engine.sleep()
    for row, output in zip(rows, outputs, strict=True):
        looked = row["index"] % 3 == 1
        assert [image.size for image in output.images[: len(row["images"])]] == [image.size for image in row["images"]]
        assert len(output.images) == len(row["images"]) + looked
        places = [i for i in output.prompt_ids + output.response_ids if i == processor.image_token_id]
        tokens = [image.width * image.height // 28**2 for image in output.images]
        assert len(places) == sum(tokens)
        assert all(m == 0 for i, m in zip(output.response_ids, output.response_mask) if i == processor.image_token_id)
        assert sum(output.response_mask) > 1 and output.num_turns == 4
        content = output.messages[-2]["content"]
        assert content == ([{"type": "text", "text": "seen"}, {"type": "image"}] if looked else "nothing to see")
    found = differences(policy, outputs, args)
    assert len(found) > 60 and found.max() < 1e-4
    # Another order of the rows, and each on its own: pixels follow their tokens.
    assert differences(policy, outputs[::-1], args).max() < 1e-4
    assert max(differences(policy, [output], args).max() for output in outputs) < 1e-4
    # The images count: with another one in its place the trainer disagrees.
    seeing = next(output for output in outputs if output.images)
    other = agent_loop.AgentLoopOutput(**vars(seeing) | {"images": [picture(99, *i.size) for i in seeing.images]})
    assert differences(policy, [other], args).max() > 1e-3


def test_after_an_update_the_engine_sees_with_the_new_tower(engine, background, args, processor, vision):
    """The tower alone changes: an engine that kept what the old one made of an image would be far off."""
    policy = train.Policy(args, len(processor.tokenizer), vision)
    rows = rows_of(args, processor)[1:2]
    train.sync(engine, policy, 0)
    before = play_all(engine, background, args, processor, rows)
    with torch.no_grad():
        for parameter in policy.model.base_model.visual.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    assert differences(policy, before, args).max() > 1e-2
    engine.state = "asleep"  # as if it were: vLLM's own sleep would empty its caches, and the sync has to do it alone
    train.sync(engine, policy, 1)
    after = play_all(engine, background, args, processor, rows)
    engine.sleep()
    assert differences(policy, after, args).max() < 1e-4
    assert {v for v in after[0].response_versions if v >= 0} == {1}


def test_a_grader_may_draw_on_its_images(engine, background, args, processor, policy):
    """On the output's and the row's: those of the trainer and of the next rollout stay as they are."""

    def reward(output, row):
        for image in (*output.images, *row["images"]):
            image.paste((0, 0, 0), (0, 0, *image.size))
        return 1.0

    rows = [row | {"agent_name": "looker"} for row in rows_of(args, processor)[1:2]]
    before = [image.tobytes() for image in rows[0]["images"]]
    train.sync(engine, policy, 0)
    task = types.SimpleNamespace(reward=reward, TOOLS=vision_task.TOOLS)
    run = make_run(engine, background, task, processor.tokenizer, args, processor)
    phase = rollout(run, rows, 0, 2, {"temperature": 1.0})
    engine.sleep()
    assert [output.reward for output in phase.outputs] == [1.0] * 2 and any(before[0])
    for output in phase.outputs:
        assert [image.tobytes() for image in output.images[:1]] == before
        assert len(output.images) == 2 and any(output.images[1].tobytes())
    assert [image.tobytes() for image in rows[0]["images"]] == before


def test_a_turn_on_an_image_lives_through_an_update(engine, background, args, processor, policy, vision):
    """Suspended, its image is encoded anew by the next weights: each token is that of its version."""
    policies = [policy, train.Policy(args, len(processor.tokenizer), vision)]
    with torch.no_grad():
        for i, parameter in enumerate(policies[1].model.parameters()):
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
    image, request = picture(3, 56, 84), ids_of(processor, f"{SEEN} what?")
    sampling = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True, "stop_token_ids": []}
    train.sync(engine, policies[0], 0)
    future = background.submit(
        engine.generate(request_id="seen", prompt_ids=request, sampling_params=sampling, image_data=[image])
    )
    while not engine.running:
        engine.step()
    for _ in range(4):
        engine.step()
    engine.sleep(keep=True)
    train.sync(engine, policies[1], 1)
    while not future.done():
        engine.step()
    engine.sleep()
    out = future.result()
    n = out.versions.count(0)
    assert out.versions == [0] * n + [1] * (12 - n) and 3 <= n <= 6 and out.prompt_ids.count(request[0]) >= 1
    output = agent_loop.AgentLoopOutput(
        prompt_ids=out.prompt_ids, response_ids=out.token_ids, response_mask=[1] * 12, response_logprobs=out.logprobs,
        response_versions=out.versions, images=[image], reward=0.0,
    )  # fmt: skip
    both = [differences(policy, [output], args) for policy in policies]
    assert both[0][:n].max() < 1e-4 and both[1][n:].max() < 1e-4
    assert both[1][:n].max() > 1e-2 and both[0][n:].max() > 1e-2  # the versions differ


def test_the_placeholder_is_never_sampled_and_both_sides_know(engine, background, args, processor, vision):
    """Its logit is made huge, of either sign: a side that left it in would sample it, or be off by nats."""
    policy = train.Policy(args, len(processor.tokenizer), vision)
    with torch.no_grad():
        head = policy.model.get_output_embeddings().weight
        head[processor.image_token_id] = 20 * head[65]
    train.sync(engine, policy, 0)
    outputs = play_all(engine, background, args, processor, rows_of(args, processor)[:6])
    engine.sleep()
    for output in outputs:
        sampled = [i for i, m in zip(output.response_ids, output.response_mask) if m]
        assert processor.image_token_id not in sampled
    assert differences(policy, outputs, args).max() < 1e-4


def like_qwen2_vl(text: dict, tokens: dict):
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = dict(depth=2, embed_dim=32, hidden_size=64, num_heads=2, mlp_ratio=2, initializer_range=0.1)
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **tokens))


def like_qwen3_vl(text: dict, tokens: dict):
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = dict(depth=3, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=14, out_hidden_size=64,
                  deepstack_visual_indexes=[0, 1], num_position_embeddings=64, initializer_range=0.1)  # fmt: skip
    text |= {"head_dim": 32, "rope_parameters": text["rope_parameters"] | {"mrope_interleaved": True}}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **tokens))


@pytest.mark.parametrize("build", [like_qwen2_vl, like_qwen3_vl])
def test_its_relatives_agree_with_the_engine_too(build, model, args, background, process_group, vision, tmp_path):

    from transformers import AutoConfig

    from rollout import Engine

    config = AutoConfig.from_pretrained(model)
    names = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
        max_position_embeddings initializer_range eos_token_id pad_token_id rope_parameters"""
    text = {name: getattr(config.text_config, name) for name in names.split()} | {"bos_token_id": None}
    tokens = {f"{name}_token_id": getattr(config, f"{name}_token_id") for name in ("image", "video", "vision_start")}
    torch.manual_seed(0)
    tokens |= {"vision_end_token_id": config.vision_end_token_id, "tie_word_embeddings": True}
    build(text, tokens).save_pretrained(tmp_path)
    for name in ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(f"{model}/{name}", tmp_path)
    args = replace(args, model=str(tmp_path))
    processor = load_processor(args)
    assert type(processor).__name__.lower().startswith(build.__name__.removeprefix("like_").replace("_", ""))
    stops, vocab = [processor.tokenizer.eos_token_id], len(processor.tokenizer)
    engine = Engine(args.model, args, torch.device("cpu"), stops, vocab, processor.image_token_id)
    KEPT.append(engine)
    policy = train.Policy(args, vocab, Vision(processor))
    train.sync(engine, policy, 0)
    outputs = play_all(engine, background, args, processor, rows_of(args, processor)[:6])
    engine.sleep()
    assert sum(len(output.images) for output in outputs) > 6
    assert differences(policy, outputs, args).max() < 1e-4


# ---------------------------------------------------------------- the packed forward pass


def output_of(processor, text: str, images: list, response: str = "abcdef") -> agent_loop.AgentLoopOutput:
    response = ids_of(processor, response)
    n = len(response)
    prompt = expand(ids_of(processor, text), images, processor)
    return agent_loop.AgentLoopOutput(
        prompt_ids=prompt, response_ids=response, response_mask=[1] * n, response_logprobs=[0.0] * n,
        response_versions=[0] * n, images=images,
    )  # fmt: skip


def gradients(model, batch: dict, parts: list[list[int]]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for rows in parts:
        micro = data.in_prefix_order(batch, rows)
        model(data.pack_rows(batch, micro, torch.device("cpu")))[0].sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_transformers_whatever_the_micro_batches(args, processor, vision, checkpointing):

    policy = train.Policy(replace(args, gradient_checkpointing=checkpointing), len(processor.tokenizer), vision)
    outputs = [
        output_of(processor, f"a{SEEN}b", [picture(1, 56, 84)]),
        output_of(processor, "no image", []),
        output_of(processor, f"{SEEN}{SEEN}", [picture(2, 112, 56), picture(3, 56, 56)]),
        output_of(processor, f"{SEEN}again", [picture(4, 84, 84)]),
    ]
    batch = data.collate(outputs)
    whole = gradients(policy, batch, [[0, 1, 2, 3]])
    for parts in ([[0], [1], [2], [3]], [[3, 1], [0, 2]]):
        for name, gradient in gradients(policy, batch, parts).items():
            assert torch.allclose(gradient, whole[name], atol=1e-4, rtol=1e-3), name
    assert all(gradient.abs().max() > 0 for name, gradient in whole.items() if "visual" in name)

    from transformers import AutoModelForImageTextToText

    plain = AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.float32)
    for output in outputs:  # unpadded, unpacked, transformers' own positions and attention
        ids = torch.tensor([output.prompt_ids + output.response_ids])
        images = processor.image_processor(output.images, return_tensors="pt") if output.images else {}
        kinds = {"mm_token_type_ids": (ids == processor.image_token_id).int()} if output.images else {}
        logits = plain(input_ids=ids, **images, **kinds).logits[0, len(output.prompt_ids) - 1 : -1]
        logits[:, processor.image_token_id] = float("-inf")
        logits.log_softmax(-1).gather(1, torch.tensor(output.response_ids)[:, None]).sum().backward()
    for name, p in plain.named_parameters():
        assert torch.allclose(p.grad, whole[f"model.{name}"], atol=1e-4, rtol=1e-3), name


def test_a_shared_prefix_with_images_is_computed_once(args, processor, vision, monkeypatch):
    policy = train.Policy(args, len(processor.tokenizer), vision)
    image = lambda: picture(1, 56, 84)  # equal pixels, an object each
    again = output_of(processor, f"a{SEEN}b{SEEN}", [image(), picture(2, 56, 56)])
    outputs = [
        output_of(processor, f"a{SEEN}b", [image()], "abc"),
        output_of(processor, f"a{SEEN}b", [image()], "abd"),
        output_of(processor, f"a{SEEN}b", [picture(3, 56, 84)]),  # the same tokens, another image
        again,
        output_of(processor, f"a{SEEN}b{SEEN}c", [image(), picture(2, 56, 56)]),
        again,
        output_of(processor, "a", []),
    ]
    batch, alone = data.collate(outputs, processor.image_token_id), data.collate(outputs)
    assert batch["images"][0][0] is batch["images"][1][0] is batch["images"][3][0]
    assert batch["images"][0][0] is not batch["images"][2][0]
    encoded, encode = [], vision._encode

    def counted(model, images, device):
        encoded.append(images)
        return encode(model, images, device)

    monkeypatch.setattr(vision, "_encode", counted)
    rows = list(range(len(outputs)))
    whole = gradients(policy, batch, [rows])
    first, second, other = batch["images"][0][0], batch["images"][3][1], batch["images"][2][0]
    (images,) = encoded
    assert sorted(map(id, images)) == sorted(map(id, [first, second, other]))
    packed = [policy.pack(x, data.in_prefix_order(x, rows)) for x in (batch, alone)]
    n_tokens = [x["inputs"]["input_ids"].numel() for x in packed]
    assert n_tokens[0] < 0.6 * n_tokens[1]
    single = gradients(policy, alone, [[row] for row in rows])
    norm = torch.stack([gradient.norm() for gradient in single.values()]).norm()
    for name, gradient in single.items():
        assert (whole[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6 * norm, name
    with torch.no_grad():
        micro = data.in_prefix_order(batch, rows)
        assert len(micro.rows) == len(rows)
        ones = [policy.pack(alone, data.in_prefix_order(alone, [row])) for row in micro.rows]
        one = torch.cat([policy(x)[0][:, :3] for x in ones])
        assert torch.allclose(policy(policy.pack(batch, micro))[0][:, :3], one, atol=1e-5)


def test_a_micro_batch_without_images_still_has_a_gradient_for_every_parameter(args, processor, policy):
    batch = data.collate([output_of(processor, "no image", [])])
    found = gradients(policy, batch, [[0]])
    assert all(not gradient.any() for name, gradient in found.items() if "visual" in name)
    critic = train.Critic(args, policy.vision)
    (values,) = critic(data.pack_rows(batch, data.in_prefix_order(batch, [0]), torch.device("cpu")))
    values.sum().backward()
    assert all(p.grad is not None for p in critic.parameters())


def test_pixels_are_computed_once_and_forgotten_with_their_image(args, processor, vision):
    calls = []

    def image_processor(images, **how):
        calls.append(images)
        return processor.image_processor(images=images, **how)

    counting = types.SimpleNamespace(image_token_id=processor.image_token_id, image_processor=image_processor)
    counted = Vision(counting)
    policy = train.Policy(args, len(processor.tokenizer), counted)
    shared = picture(1, 56, 56)
    outputs = [output_of(processor, f"{SEEN}{i}", [shared]) for i in "ab"]
    outputs.append(output_of(processor, SEEN, [picture(2, 56, 84)]))
    for rows in ([0, 1, 2], [2, 0]):
        batch = data.collate(outputs)
        policy(data.pack_rows(batch, data.in_prefix_order(batch, rows), torch.device("cpu")))
    assert len(calls) == 2 and len(counted.pixels) == 2
    calls.clear()
    del outputs, shared, batch
    assert counted.pixels == {}


# ---------------------------------------------------------------- agent loops, against a scripted engine


@dataclass
class Script:
    """Says its lines, and expands placeholders as the engine does."""

    processor: object
    lines: list
    prompts: list = field(default_factory=list)
    images: list = field(default_factory=list)
    off: int = 0  # tokens too many in what it says it saw

    async def generate(self, *, request_id, prompt_ids, sampling_params, image_data=None) -> TokenOutput:
        self.prompts.append(prompt_ids)
        self.images.append(image_data or [])
        ids = ids_of(self.processor, self.lines[len(self.prompts) - 1] + "<|im_end|>")
        seen = expand(prompt_ids, image_data or [], self.processor) + [0] * self.off
        limit = sampling_params["max_tokens"]
        reason, ids = "stop" if len(ids) <= limit else "length", ids[:limit]
        return TokenOutput(ids, [-1.0] * len(ids), [0] * len(ids), reason, seen)


CALL = '<tool_call>\n{"name": "show", "arguments": {}}\n</tool_call>'


class Show(Tool):
    """Answers each call with the next response."""

    name = "show"
    schema = {"type": "function", "function": {"name": "show", "description": "Show.", "parameters": {}}}

    def __init__(self, *responses):
        self.responses = list(responses)

    async def execute(self, request_id, arguments):
        return self.responses.pop(0)


@pytest.fixture
def play(processor):
    def play(row: dict, *lines: str, tool=None, seeing=True, off=0, **more):
        task = types.SimpleNamespace(TOOLS=[tool] if tool else [], reward=lambda output, row: 0.0)
        how = dict(max_prompt_tokens=400, max_response_tokens=400, max_model_len=800, max_images=4) | more
        engine = Script(processor, list(lines), off=off)
        cls = ToolAgentLoop if tool else SingleTurnLoop
        loop = cls(engine, processor.tokenizer, processor if seeing else None, task, train.Args(**how))
        return asyncio.run(loop.run({}, **row)), engine

    return play


def row_with(*images, text="Look.") -> dict:
    content = [{"type": "image"} for _ in images] + [{"type": "text", "text": text}]
    return {"prompt": [{"role": "user", "content": content}], "images": list(images)}


def tool_turn(content: str) -> str:
    response = f"\n<tool_response>\n{content}\n</tool_response>"
    return f"\n<|im_start|>user{response}<|im_end|>\n<|im_start|>assistant\n"


def test_the_engine_gets_one_placeholder_an_image_and_the_trainer_all_of_them(play, processor):
    first, second = picture(1, 84, 56), picture(2, 56, 56)
    tool = Show(ToolResponse("here", images=[second], reward=0.5))
    output, engine = play(row_with(first), CALL, "red", tool=tool)
    text = (
        f"<|im_start|>system\nTools: show<|im_end|>\n<|im_start|>user\n{SEEN}Look.<|im_end|>\n<|im_start|>assistant\n"
    )
    parts = [CALL + "<|im_end|>", tool_turn(f"here{SEEN}"), "red<|im_end|>"]
    assert processor.tokenizer.decode(engine.prompts[0]) == text
    assert processor.tokenizer.decode(engine.prompts[1]) == text + parts[0] + parts[1]
    assert [[i.tobytes() for i in images] for images in engine.images] == [
        [first.tobytes()], [first.tobytes(), second.tobytes()]
    ]  # fmt: skip
    assert processor.tokenizer.decode(output.prompt_ids) == text.replace(PLACE, PLACE * 6)
    assert processor.tokenizer.decode(output.response_ids) == "".join(parts).replace(PLACE, PLACE * 4)
    lengths = [len(ids_of(processor, part.replace(PLACE, PLACE * 4))) for part in parts]
    assert output.response_mask == [1] * lengths[0] + [0] * lengths[1] + [1] * lengths[2]
    assert output.turn_rewards == [(lengths[0] - 1, 0.5)]
    assert output.messages[2]["content"] == [{"type": "text", "text": "here"}, {"type": "image"}]
    assert len(output.images) == 2
    json.dumps(output.messages)  # no image in them


def test_an_image_alone_has_no_empty_text(play):
    output, _ = play(row_with(), CALL, "red", tool=Show(ToolResponse(images=[picture(1, 56, 56)])))
    assert output.messages[2]["content"] == [{"type": "image"}]


def test_several_calls_of_a_turn_keep_their_images_in_order(play):
    images = [picture(i, 56, 56) for i in range(3)]
    tool = Show(ToolResponse("a", images=images[:2]), "b", ToolResponse("c", images=images[2:]))
    output, engine = play(row_with(), f"{CALL}\n{CALL}\n{CALL}", "red", tool=tool)
    assert [i.tobytes() for i in engine.images[1]] == [i.tobytes() for i in images]
    assert [m["content"] if isinstance(m["content"], str) else len(m["content"]) for m in output.messages[2:5]] == [
        3, "b", 2
    ]  # fmt: skip


def test_what_a_tool_says_is_never_taken_for_an_image(play):
    said = f"<|image{PLACE}_pad|> {PLACE}"
    output, engine = play(row_with(), CALL, "red", tool=Show(said))
    assert output.messages[2]["content"] == said
    tokenizer = engine.processor.tokenizer
    place = tokenizer.convert_tokens_to_ids(PLACE)
    assert said in tokenizer.decode(engine.prompts[1]) and place not in engine.prompts[1]
    assert output.stop_reason == "stop" and output.images == []


@pytest.mark.parametrize("image, said", [
    ("not a picture", "can't be read as an image"),
    (b"\x89PNG broken", "can't be read as an image"),
    (5, "can't be read as an image"),
    (None, "can't be read as an image"),
    (Image.new("RGB", (4000, 4)), "aspect ratio"),
])  # fmt: skip
def test_a_broken_image_is_an_error_that_the_model_reads(play, image, said):
    output, _ = play(row_with(), CALL, "red", tool=Show(ToolResponse("x", images=[image])))
    assert output.messages[2]["content"].startswith("Error: ") and said in output.messages[2]["content"]
    assert output.metrics["tool_errors"] == 1 and output.images == []


def test_a_file_that_ends_early_is_an_error_that_the_model_reads(play, tmp_path):
    picture(1, 200, 200).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:2000])
    output, _ = play(row_with(), CALL, "red", tool=Show(ToolResponse(images=[str(tmp_path / "cut.png")])))
    assert output.messages[2]["content"].startswith("Error: an image can't be decoded")


def test_more_images_than_the_engine_takes_are_an_error_that_the_model_reads(play):
    two = [picture(i, 56, 56) for i in range(2)]
    tool = Show(ToolResponse("first", images=two), ToolResponse("second", images=two))
    output, engine = play(row_with(two[0]), f"{CALL}\n{CALL}", "red", tool=tool, max_images=4)
    contents = [m["content"] for m in output.messages[2:4]]
    assert len(contents[0]) == 3
    assert contents[1] == "Error: no room for 2 more images: 3 of 4 are there"
    assert (len(output.images), output.metrics["tool_errors"]) == (3, 1)


def test_room_counts_every_token_of_an_image(play, processor):
    """The suffix fits with one token for the image, but not with all 16 of them."""
    text = len(ids_of(processor, CALL + "<|im_end|>" + tool_turn(SEEN)))
    tool = Show(ToolResponse(images=[picture(1, 112, 112)]))
    output, engine = play(row_with(), CALL, "red", tool=tool, max_response_tokens=text + 15)
    assert (output.stop_reason, output.images, len(engine.prompts)) == ("length", [], 1)
    tool = Show(ToolResponse(images=[picture(1, 112, 112)]))
    output, _ = play(row_with(), CALL, "red", tool=tool, max_response_tokens=text + 16)
    assert (output.stop_reason, len(output.images)) == ("length", 1)  # room for a single token
    assert output.response_mask[-2:] == [0, 1]


def test_an_engine_that_counts_an_images_tokens_otherwise_is_found(play):
    with pytest.raises(ValueError, match="disagree about the tokens of the images"):
        play(row_with(picture(1, 56, 56)), "red", off=1)


def test_an_agent_that_reads_text_only_says_so(play):
    tool = Show(ToolResponse("look", images=[picture(1, 56, 56)]))
    output, _ = play({"prompt": [{"role": "user", "content": "Look."}]}, CALL, "red", tool=tool, seeing=False)
    assert output.messages[2]["content"] == "Error: the tool returned an image, and this agent reads text only"


def test_a_rewritten_history_starts_again_with_all_its_images(play, processor, monkeypatch):
    """A template that drops what the assistant said before the last question: the third turn is another sequence."""
    forgetful = TEMPLATE.replace(
        "{{- message.content or '' }}", "{{- message.content if loop.last else '' }}"
    )
    monkeypatch.setattr(processor.tokenizer, "chat_template", forgetful)
    first, second = picture(1, 84, 56), picture(2, 56, 56)
    tool = Show(ToolResponse("here", images=[second]))
    outputs, engine = play(row_with(first), "thinking " + CALL, "red", tool=tool)
    before, after = outputs
    assert (len(before.images), len(after.images)) == (1, 2)
    assert before.prompt_ids.count(processor.image_token_id) == 6
    assert after.prompt_ids.count(processor.image_token_id) == 10
    assert processor.tokenizer.decode(after.response_ids) == "red<|im_end|>"
    assert engine.prompts[1].count(processor.image_token_id) == 2 and len(engine.images[1]) == 2


# ---------------------------------------------------------------- the chat client


def data_url(image: Image.Image) -> dict:
    file = io.BytesIO()
    image.save(file, "png")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def test_a_chat_agent_sends_images_as_data_urls(processor):
    first, second = picture(1, 84, 56), picture(2, 56, 56)

    class Agent(ChatAgentLoop):
        async def chat(self, client, **row):
            messages = [{"role": "user", "content": [data_url(first), {"type": "text", "text": "What?"}]}]
            reply = await client.chat.completions.create(messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": [data_url(second)]}]
            await client.chat.completions.create(messages=messages)
            await client.chat.completions.create(messages=[{"role": "user", "content": [data_url(second)]}])
            with pytest.raises(ValueError, match="only data:image"):
                url = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}
                await client.chat.completions.create(messages=[{"role": "user", "content": [url]}])
            with pytest.raises(ValueError, match="supported are 4"):
                await client.chat.completions.create(messages=[{"role": "user", "content": [data_url(first)] * 5}])
            return 1.0

    engine = Script(processor, ["red", "blue", "green"])
    how = train.Args(max_response_tokens=400, max_model_len=800, max_images=4)
    outputs = asyncio.run(Agent(engine, processor.tokenizer, processor, None, how).run({}))
    assert [[i.tobytes() for i in o.images] for o in outputs] == [
        [first.tobytes(), second.tobytes()],
        [second.tobytes()],
    ]
    assert engine.prompts[1][: len(engine.prompts[0])] == engine.prompts[0]  # the second call went on from the first
    sampled = [[i for i, m in zip(o.response_ids, o.response_mask) if m] for o in outputs]
    assert [processor.tokenizer.decode(s) for s in sampled] == ["red<|im_end|>blue<|im_end|>", "green<|im_end|>"]


def test_a_chat_agent_sends_the_rows_images_as_they_are(processor):
    images = [picture(i, 84, 56) for i in range(2)]

    class Agent(ChatAgentLoop):
        async def chat(self, client, prompt, **row):
            reply = await client.chat.completions.create(messages=json.loads(json.dumps(prompt)))
            more = [reply.choices[0].message, {"role": "user", "content": "Sure?"}]
            await client.chat.completions.create(messages=[*prompt, *more])
            with pytest.raises(ValueError, match="as the row's prompt has it"):
                await client.chat.completions.create(messages=user([{"type": "image"}]))
            return 1.0

    engine = Script(processor, ["red", "blue"])
    how = train.Args(max_response_tokens=400, max_model_len=800, max_images=4)
    (output,) = asyncio.run(Agent(engine, processor.tokenizer, processor, None, how).run({}, **row_with(*images)))
    assert [i.tobytes() for i in output.images] == [i.tobytes() for i in images]
    assert [len(i) for i in engine.images] == [2, 2] and output.prompt_ids.count(processor.image_token_id) == 12


# ---------------------------------------------------------------- rows


def load_one(row: dict) -> dict:
    return data.load_rows(types.SimpleNamespace(load=lambda split: [{"prompt": [], **row}]), "train")[0]


def check_one(row: dict, args, processor, **more):

    task = types.SimpleNamespace()
    tokenizer = more.pop("tokenizer", None) or processor.tokenizer
    return data.filter_overlong([load_one(row)], tokenizer, task, replace(args, **more), processor)


def user(content) -> list[dict]:
    return [{"role": "user", "content": content}]


def test_both_forms_of_a_placeholder():
    image = picture(1, 56, 56)
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert load_one({"prompt": user("a<image><image>b"), "images": [image] * 2})["prompt"] == user(parts)
    with_none = [{**part, "extra": None} for part in parts]  # as parquet fills them in
    assert load_one({"prompt": user(with_none), "images": [image] * 2})["prompt"] == user(parts)
    assert load_one({"prompt": user("what is <image>?")})["prompt"] == user("what is <image>?")
    assert load_one({"prompt": user("no image"), "images": None})["prompt"] == user("no image")


@pytest.mark.parametrize("prompt, images, message", [
    (user("<image>"), ["1", "2"], "row 0 of .* has 1 placeholders .* 'images' 2"),
    (user("none"), ["1"], "row 0 of .* has 0 placeholders"),
    (user("<image>"), [5], "row 0 of .* 5 can't be read as an image"),
    (user([{"type": "image"}]), [], "row 0 of .* has 1 placeholders .* 'images' 0"),
    (user("<image>"), "path.png", "row 0 of .* must be a list of images, got a str"),
    (user([{"type": "video"}]), [], "row 0 of .* or .* not {'type': 'video'}"),
    (user(["<image>"]), ["1"], "row 0 of .* or .* not '<image>'"),
])  # fmt: skip
def test_rows_whose_placeholders_do_not_fit_their_images(prompt, images, message):
    with pytest.raises(BadInput, match=message):
        load_one({"prompt": prompt, "images": images})


def test_images_as_datasets_give_them(args, processor, tmp_path):
    image = picture(1, 84, 56)
    image.save(tmp_path / "a.png")
    raw = (tmp_path / "a.png").read_bytes()
    for form in (image, str(tmp_path / "a.png"), tmp_path / "a.png", raw, {"bytes": raw, "path": None},
                 {"bytes": None, "path": str(tmp_path / "a.png")}):  # fmt: skip
        assert len(check_one({"prompt": user("<image>"), "images": [form]}, args, processor)) == 1
        assert load_image(form).tobytes() == image.tobytes()
    clear = Image.new("RGBA", (56, 56), (255, 0, 0, 0))
    assert load_image(clear).mode == "RGB"


def test_the_members_of_a_group_share_the_rows_images(args, processor, tmp_path):
    """One object: it crosses to the other ranks once, and its pixels are computed once."""
    picture(1, 84, 56).save(tmp_path / "a.png")
    raw = (tmp_path / "a.png").read_bytes()
    for form in (picture(1, 84, 56).convert("RGBA"), str(tmp_path / "a.png"), raw, {"bytes": raw, "path": None}):
        row = load_one({"prompt": user("<image>"), "images": [form]})
        loop = SingleTurnLoop(None, processor.tokenizer, processor, None, args)
        first, second = (loop.start(row).images[0] for _ in range(2))
        assert first is second and first.tobytes() == picture(1, 84, 56).tobytes()
    canvas = picture(1, 56, 56)
    assert load_image(canvas) is not canvas


def test_rows_from_parquet(args, processor, tmp_path):
    datasets = pytest.importorskip("datasets")
    images = [picture(i, 84, 56) for i in range(2)]
    rows = [{"prompt": user("<image>?"), "images": [image]} for image in images]
    features = {"prompt": [{"role": datasets.Value("string"), "content": datasets.Value("string")}]}
    features["images"] = datasets.List(datasets.Image())
    file = str(tmp_path / "rows.parquet")
    datasets.Dataset.from_list(rows, features=datasets.Features(features)).to_parquet(file)
    loaded = data.load_rows(types.SimpleNamespace(), "train", [file])
    kept = data.filter_overlong(loaded, processor.tokenizer, types.SimpleNamespace(), args, processor)
    assert [load_image(row["images"][0]).tobytes() for row in kept] == [image.tobytes() for image in images]


def test_bad_images_are_found_before_anything_expensive(args, processor, tokenizer, tmp_path):
    image, row = picture(1, 56, 56), {"prompt": user("<image>")}
    (tmp_path / "bad.png").write_bytes(b"no image")
    for bad, message in ((str(tmp_path / "none.png"), "row 0: .*No such file"), (b"abc", "row 0: .*can't be read"),
                         (str(tmp_path / "bad.png"), "row 0: .*can't be read"), ({}, "row 0: .*can't be read"),
                         (Image.new("RGB", (4000, 4)), "row 0: .*aspect ratio")):  # fmt: skip
        with pytest.raises(BadInput, match=message):
            check_one(row | {"images": [bad]}, args, processor)
    with pytest.raises(BadInput, match="row 0: 2 images are more than --max_images 1"):
        check_one({"prompt": user("<image><image>"), "images": [image] * 2}, args, processor, max_images=1)
    with pytest.raises(BadInput, match="row 0: there are 1 images, but 2 placeholders"):
        check_one({"prompt": user(f"<image>{PLACE}"), "images": [image]}, args, processor)
    task = types.SimpleNamespace(load=lambda split: [{"prompt": user("look"), "images": []}, {"prompt": user("hi")}])
    assert len(data.filter_overlong(data.load_rows(task, "train"), tokenizer, task, args)) == 2  # text is text
    text_model = [{"prompt": user("hi"), "images": [image]}]
    with pytest.raises(BadInput, match="row 0: .*there are images, and this model reads text only"):
        data.filter_overlong(text_model, tokenizer, task, args)


def test_max_prompt_tokens_counts_every_token_of_an_image(args, processor):
    image = picture(1, 112, 112)  # 16 tokens
    row = {"prompt": user("<image>"), "images": [image]}
    length = len(render(processor.tokenizer, user([{"type": "image"}]))) + 15
    assert len(check_one(row, args, processor, max_prompt_tokens=length)) == 1
    with pytest.raises(BadInput, match=f"the longest has {length} tokens"):
        check_one(row, args, processor, max_prompt_tokens=length - 1)


def test_files_that_are_too_large_or_run_a_program_are_refused(monkeypatch):
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EOF\n"
    with pytest.raises(ValueError, match="can't be read as an image"):
        load_image(eps)
    file = io.BytesIO()
    picture(1, 30, 20).save(file, "PNG")
    assert load_image(file.getvalue()).size == (30, 20)
    monkeypatch.setattr(agent_loop, "MAX_PIXELS", 599)
    with pytest.raises(ValueError, match="30 x 20 pixels: more than 599"):
        load_image(file.getvalue())


def test_an_output_without_its_images_is_a_failure(processor):
    image = picture(1, 56, 56)
    placeholders = [processor.image_token_id] * 4
    fields = dict(response_ids=[5], response_mask=[1], response_logprobs=[0.0], response_versions=[0])
    check_images(
        agent_loop.AgentLoopOutput(prompt_ids=[3, *placeholders], images=[image], **fields), processor
    )
    for ids, images in (([3, *placeholders], []), ([3, placeholders[0]], [image]), ([3], [image])):
        with pytest.raises(ValueError, match=f"the ids have {len(ids) - 1} placeholders, but the {len(images)} images"):
            check_images(agent_loop.AgentLoopOutput(prompt_ids=ids, images=images, **fields), processor)


def test_unknown_processor_settings_are_refused(args):
    for settings in ({"images_kwargs": {"do_normalize": False}}, {"maxpixels": 3136}):
        with pytest.raises(BadInput, match="no setting of the image processor"):
            load_processor(replace(args, engine_args=json.dumps({"mm_processor_kwargs": settings})))


def test_models_that_see_otherwise_are_refused(tmp_path):
    from transformers import LlavaConfig

    LlavaConfig().save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="like Qwen2.5-VL"):
        load_processor(train.Args(model=str(tmp_path)))


# ---------------------------------------------------------------- examples/vision.py


def test_the_examples_rows_and_rewards(play, args, processor):
    from examples import vision

    train_rows, val = (data.load_rows(vision, split) for split in ("train", "val"))
    assert (len(train_rows), len(val)) == (960, 64) and train_rows == data.load_rows(vision, "train")
    asked = [(row["images"][0].tobytes(), row["extra_info"]["cell"]) for row in train_rows + val]
    assert len(set(asked)) == 1024
    for rows in (train_rows, val):
        assert data.filter_overlong(rows, processor.tokenizer, vision, args, processor) == rows
    row = train_rows[0]
    cell, truth = row["extra_info"]["cell"], row["reward_model"]["ground_truth"]
    wrong = next(colour for colour in vision.COLOURS if colour != truth)
    call = '<tool_call>\n{"name": "zoom", "arguments": {"cell": %s}}\n</tool_call>'
    lines = [call % cell, call % 5, call % '"1"', f"<answer>{truth}</answer>"]
    output, _ = play(row, *lines, tool=vision.TOOLS[0])
    assert [m["content"] for m in output.messages if m["role"] == "tool"] == [
        [{"type": "image"}], *["Error: cell must be 1, 2, 3 or 4"] * 2
    ]  # fmt: skip
    assert output.images[1].getpixel((0, 0)) == vision.COLOURS[truth] and len(output.images) == 2
    assert vision.reward(output, row) == 1.0
    for answer in (f"<answer>{wrong}</answer>", f"<answer>{wrong}</answer><answer>{truth}</answer>", truth):
        assert vision.reward(play(row, answer, tool=vision.TOOLS[0])[0], row) == 0.0


def test_the_examples_warm_up(engine, background, args, processor, policy, tmp_path):
    """Ten batches of the warm-up: they bring the loss down, and write what the engine's loader takes."""
    from examples import vision

    torch.manual_seed(0)
    vision.random.seed(0)
    vision.build_model(tmp_path, num_batches=10)
    own = load_processor(train.Args(model=str(tmp_path)))
    warm = train.Policy(train.Args(model=str(tmp_path)), len(own.tokenizer), Vision(own))
    train.sync(engine, warm, 0)
    rows = data.filter_overlong(data.load_rows(vision, "val"), own.tokenizer, vision, args, own)[:8]
    outputs = play_all(engine, background, args, own, rows, ToolAgentLoop, vision)
    engine.sleep()
    assert differences(warm, outputs, args).max() < 1e-4
    shown = []
    for row in rows:
        messages, images = vision.demonstration(row)
        text = own.apply_chat_template(messages, tools=[vision.TOOLS[0].schema], tokenize=False)
        said = text.split("assistant\n", 1)[1]
        shown.append(output_of(own, text.removesuffix(said), row["images"], said.replace(SEEN, "")))
    batch = data.collate(shown)
    packed = data.pack_rows(batch, data.in_prefix_order(batch, range(8)), torch.device("cpu"))
    with torch.no_grad():
        before, after = (model(packed)[0].mean() for model in (policy, warm))
    assert after > before + 0.5


# ---------------------------------------------------------------- whole runs

FLAGS = ["--task", "tests/vision_task.py", "--agent", "looker", "--num_steps", "2", "--prompts_per_step", "4",
         "--group_size", "2", "--max_prompt_tokens", "96", "--max_response_tokens", "64", "--lr", "1e-2",
         "--eval_every", "0", "--show_every", "1", "--engine_args", SMALL_CACHE]  # fmt: skip


@pytest.mark.parametrize("by, more, env", [
    # one micro-batch; every model that scores; several updates on what the first has cached; the processor's settings
    # are the engine's
    ("fork", ["--algo", "ppo", "--kl_coef", "0.01", "--prompts_per_mini_batch", "2", "--epochs", "2", "--engine_args",
                json.dumps(json.loads(SMALL_CACHE) | {"mm_processor_kwargs": {"max_pixels": 3136}})],
     {"VISION_TASK_IMAGES": "all"}),
    # micro-batches of one or two trajectories on two ranks, some without any image; fillers
    ("ranks", ["--tokens_per_micro_batch", "160", "--gradient_checkpointing"], {}),
    # the same, sharded: ranks without an image gather the tower's layers as well
    ("ranks", ["--tokens_per_micro_batch", "160", "--shard"], {}),
])  # fmt: skip
def test_train_with_images(by, more, env, cache, tmp_path):
    said = run(*FLAGS, *more, "--output_dir", tmp_path / "run", by=by, cache=cache, **env)
    assert "tokens of an image]" in said and PLACE not in said
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    steps = [row for row in metrics if row["step"] > 0]
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["rollout/logp_diff_max"] < 1e-3 and row["actor/grad_norm"] > 0
        assert row["rollout/failed_agent_loop"] == 0 and row["rollout/trajectories"] == 8
    lines = [json.loads(x) for x in (tmp_path / "run" / "rollouts" / "step_000002.jsonl").open()]
    assert any(line.get("images", 0) > 0 for line in lines)

    # What was trained is what the next run starts from: processor, tower and all.
    policy = train.Args(model=str(tmp_path / "run" / "final"))
    processor = load_processor(policy)
    assert processor.chat_template == load_processor(policy).tokenizer.chat_template
    out = processor(text=[SEEN], images=[picture(1, 56, 56)])
    assert out["input_ids"][0].count(processor.image_token_id) == 4


def test_images_for_a_text_model_end_with_one_line(tiny_model, cache, tmp_path):
    said = run(
        "--task", "tests/vision_task.py", "--model", tiny_model, "--output_dir", tmp_path / "x", cache=cache, code=2
    )
    last = said.strip().splitlines()[-1]
    assert last.startswith("train.py: error: row 1: ") and last.endswith("this model reads text only"), said
