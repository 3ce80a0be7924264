"""A fixed batch of unequal trajectories, and an optimiser step on it."""

import random
from types import SimpleNamespace

import torch
import torch.distributed as dist
from conftest import output_of
from PIL import Image
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import data
import train
from flatrl.vision import Vision


def batch_of(n: int, demonstrated=(), processor=None) -> dict:
    """Trajectories of very unequal lengths with tool tokens inside, one without any sampled
    token. Two in three share a prefix: group members, forks, equal ones, beginnings.

    demonstrated: the numbers of those that were not sampled, but demonstrated.
    processor: some prompts have an image of six tokens."""
    rng = random.Random(0)
    outputs = []
    ids = lambda length: [rng.randrange(3, 250) for _ in range(length)]
    for i in range(n):
        length = rng.choice([3, 9, 20, 45])
        prompt, response = ids(rng.randrange(2, 12)), ids(length)
        mask = [1] + [int(rng.random() < 0.7) for _ in range(length - 1)] if i else [0] * length
        images = []
        if processor and i % 2:
            pixels = random.Random(i).randbytes(3 * 56 * 84)
            images = [Image.frombytes("RGB", (56, 84), pixels)]
            prompt += [processor.image_token_id] * 6
        if i % 3:
            other = rng.choice(outputs)
            prompt, images = other.prompt_ids, other.images
            match i % 4:
                case 1:  # a fork: some of the other's response is history
                    prompt = prompt + other.response_ids[: rng.randrange(1, 9)]
                case 2:
                    response, mask = other.response_ids, other.response_mask
                case 3:
                    keep = rng.randrange(1, len(other.response_ids) + 1)
                    response, mask = other.response_ids[:keep], other.response_mask[:keep]
        version = -1 if i in demonstrated else 0
        output = output_of(mask, prompt, response, version, logprob=0.0, reward=rng.random())
        output.images = images
        outputs.append(output)
    batch = data.collate(outputs, getattr(processor, "image_token_id", -1))
    return batch | {"unit_tokens": batch["response_mask"].sum(-1)}  # every row is a unit


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def gradients(
    accelerator, model: str, n_tokens: int, loss_agg: str, demonstrated=(), **flags
) -> dict:
    """One step from the model's weights: the parameters' gradients, and the metrics.

    n_tokens: of a micro-batch; demonstrated: see batch_of."""
    flags = {"kl_coef": 0.1, "max_grad_norm": 1e9, "loss_agg": loss_agg} | flags
    args = train.Args(model=model, tokens_per_micro_batch=n_tokens, **flags)
    config = AutoConfig.from_pretrained(model)
    processor = None
    if "vision_config" in config:  # the whole one needs torchvision, or vLLM patched
        images = Qwen2VLImageProcessorPil.from_pretrained(model)
        processor = SimpleNamespace(image_processor=images, image_token_id=config.image_token_id)
    batch = batch_of(19, demonstrated, processor)
    shape = batch["response_mask"].shape
    generator = torch.Generator().manual_seed(0)
    batch["advantages"] = torch.randn(shape, generator=generator)
    batch["logprobs_ref"] = -5 + torch.randn(shape, generator=generator)
    policy = train.Policy(args, vision=Vision(processor) if processor else None)
    learner = train.Learner(policy, 0.1, 1, args, accelerator)
    policy, optimizer = learner.wrapped, torch.optim.SGD(learner.net.parameters(), lr=0.1)
    learner.optimizers = [optimizer]
    if args.kl_top:  # the teacher is the policy, and less sure
        scores = train.score_tokens(learner.net, batch, args, args.kl_top)
        batch |= {f"ref_{name}": scores[name] for name in ("top_logprobs", "top_ids")}
        batch["ref_top_logprobs"] -= torch.rand(scores["top_ids"].shape, generator=generator)
    batch["logprobs_old"] = train.score_tokens(learner.net, batch, args)["logprobs"]
    batch["logprobs_old"] += 0.3 * torch.randn(shape, generator=generator)  # some are clipped
    batch["logprobs_rollout"] = batch["logprobs_old"] - torch.randn(shape, generator=generator)
    kept = {}

    def keep_gradients(*_):
        for name, p in policy.named_parameters():
            kept[name.removeprefix("module.")] = whole(p.grad).clone()

    optimizer.register_step_post_hook(keep_gradients)
    names = ["response_mask", "unit_tokens", "advantages"]
    names += ["logprobs_old", "logprobs_rollout", "logprobs_ref"]
    names += {"imitation_mask", "ref_top_logprobs"} & batch.keys()
    objective = train.policy_objective
    rows = list(range(19))
    metrics, _ = train.optimise(learner, objective, batch, names, rows, loss_agg=loss_agg)
    metrics.pop("batch/unique_tokens")  # depends on the micro-batches
    after = torch.cat([whole(p.detach()).flatten() for p in policy.parameters()])
    ranks = [torch.empty_like(after) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, after)
    assert all(torch.equal(ranks[0], other) for other in ranks), "the ranks' weights differ"
    return {"gradients": kept, "metrics": metrics, "batch": batch}


def check_gradients(found: dict, expected: dict, tolerance: float) -> None:
    """Compares two dicts of gradients by their norms."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0
        assert (found[name] - gradient).norm() / gradient.norm() < tolerance, name
