"""How much memory will a run of train.py hold on GPUs that are not there yet?

    python bench/plan.py --model Qwen2.5-7B --gpus 8 --gpu_memory 80 [any flag of train.py]

--model is a folder with a config.json or a built-in shape: Qwen2.5-0.5B, -1.5B, -3B, -7B, -14B,
-32B, Qwen3-4B. The table has GiB (2^30 bytes) on each GPU, with a column for each phase:

    awake     rollout: what the trainer keeps, and the engine's weights and KV cache
    asleep    nothing runs: parameters, optimiser, reference, critic, CUDA's context
    score     a forward pass without gradients
    sync      the engine's weights come in, its KV cache is not there yet
    update    the backward pass of a micro-batch when all gradients are there
    step      the optimiser's: activations are gone

The plan is arithmetic on the model's configuration, and has not been compared with a GPU.
Models are built like Qwen2, Qwen3, Llama or Mistral, in bfloat16, and sharded by FSDP2.
Micro-batches are full: groups at the limits of prompt and response, each prompt once. CONTEXT,
ENGINE_ROOM and PROCESS are assumed. --engine_args and LoRA are not planned.
"""

import argparse
import dataclasses
import sys
from collections import namedtuple
from pathlib import Path

import common  # noqa: F401
import torch
from transformers import AutoConfig

import losses
import train
from agent_loop import BadInput
from flatrl import devices
from flatrl.bad_input import need

GIB = 1 << 30
CONTEXT = 3 * GIB  # of a GPU: contexts of CUDA and NCCL, captured graphs, fragmentation
ENGINE_ROOM = 2 * GIB  # of the engine's share: activations of its largest batch, graphs
PROCESS = 5 * GIB  # of host memory: libraries, vLLM, a step's trajectories
SEQUENCES = 256  # that the engine decodes at once
PLANNED_TYPES = {"qwen2", "qwen3", "llama", "mistral"}
PHASES = ("awake", "asleep", "score", "sync", "update", "step")
SHAPE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, 151936, True),
}


def load_config(model: str):
    """Returns the text configuration of a built-in shape or of a folder. Raises BadInput."""
    name = model.split("/")[-1].removeprefix("Qwen2.5-")
    name = name.removesuffix("-2507").removesuffix("-Instruct")
    if name in SHAPES and not Path(model).is_dir():
        kind = {"model_type": "qwen2"}
        if name.startswith("Qwen3"):
            kind = {"model_type": "qwen3", "head_dim": 128}
        return AutoConfig.for_model(
            **kind, **dict(zip(SHAPE_KEYS, SHAPES[name], strict=True))
        )
    shapes = ", ".join(SHAPES)
    is_folder = Path(model, "config.json").is_file()
    need(
        is_folder, f"--model {model}: give a folder with a config.json, or one of {shapes}"
    )
    config = AutoConfig.from_pretrained(model).get_text_config()
    is_planned = config.model_type in PLANNED_TYPES
    need(is_planned, f"--model {model}: a {config.model_type} is not planned")
    return config


# ---------------------------------------------------------------- a network

# Numbers of parameters: all, those of a decoder layer, those outside the layers. The sampled
# tokens of a full micro-batch. And bytes: the most that an update of such a micro-batch takes,
# the part of it that is logits, the most of a forward pass without gradients, a token's share
# of the KV cache.
Net = namedtuple("Net", "parameters layer root sampled update logits forward kv_token")


def network(config, args, critic: bool = False) -> Net:
    """Returns the numbers of a policy, or of a critic, by its text configuration."""
    n_layers = config.num_hidden_layers
    h = config.hidden_size
    f = config.intermediate_size
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or h // heads
    q = heads * head_size  # the width of all queries
    k = config.num_key_value_heads * head_size
    has_qk_norms = config.model_type == "qwen3"

    layer = h * (2 * q + 2 * k + 3 * f + 2)
    if has_qk_norms:
        layer += 2 * head_size
    if config.model_type == "qwen2" or getattr(config, "attention_bias", False):
        layer += q + 2 * k
    embedding = config.vocab_size * h
    is_tied = config.tie_word_embeddings or critic
    root = h + embedding
    if not is_tied:
        root += embedding

    # A full micro-batch has groups at the limits of prompt and response, each prompt once.
    responses = args.group_size * args.max_response_tokens
    T = args.tokens_per_micro_batch  # that go through the network
    sampled = T * responses / (args.max_prompt_tokens + responses)
    keys = sampled + args.group_size * (T - sampled)  # that attention gathers

    # A norm keeps its input in float32, its result, and what its readers get of it.
    of_layer = T * (16 * h + 8 * f + 4 * q + 4 * heads) + 4 * k * keys
    if has_qk_norms:
        of_layer += 6 * T * (q + k)
    last = 8 * h * T + 2 * h * sampled  # what the last norm and the head keep
    head = 2 * embedding  # its gradient
    logits = 12 * sampled * min(1024, max(config.vocab_size // 64, 256))
    if critic:
        head = 0
        logits = 0

    # An update takes most at the head, or in a layer's MLP when head and norm are done.
    in_layer = T * (2 * h + 4 * f) - last
    if is_tied:
        in_layer += head  # its gradient waits for the embedding's
    kept = of_layer
    if args.gradient_checkpointing:
        in_layer += of_layer  # computed again
        kept = 2 * h * T
    at_head = logits + 8 * h * sampled + head
    update = n_layers * kept + last + max(at_head, in_layer)

    in_mlp = T * (8 * h + 6 * f)
    forward = max(in_mlp, 4 * h * T + 2 * h * sampled + logits)
    kv_token = 4 * n_layers * k / min(args.tp, config.num_key_value_heads)
    parameters = n_layers * layer + root
    return Net(parameters, layer, root, sampled, update, logits, forward, kv_token)


# ---------------------------------------------------------------- a run


@dataclasses.dataclass
class Plan:
    phases: dict[str, dict[str, float]]  # of a GPU: bytes of each thing in each phase
    host: dict[str, float]  # bytes of all ranks
    kv_tokens: float  # in the KV cache of an engine
    lacks: dict[str, float]  # the phases that do not fit: bytes too few


def make_plan(args: train.Args, gpus: int, memory: float) -> Plan:
    """Returns the plan of a run on so many GPUs with `memory` bytes each."""
    config = load_config(args.model)
    policy = network(config, args)
    learning = [policy]
    references = []
    if "values" in args.estimator_takes:
        learning.append(network(config, args, critic=True))
    if args.has_reference and not args.hints:  # with hints it is the policy itself
        reference = load_config(args.ref_model or args.model)
        references.append(network(reference, args))
    if args.rollout_only or not args.num_steps:
        learning = []
        references = []

    def share(*nets: Net) -> float:
        """Returns how many of the networks' parameters a GPU holds."""
        return sum(net.parameters for net in nets) / gpus

    asleep = {
        "parameters": 4 * share(policy),
        "optimiser": 8 * share(*learning),
        "critic": 4 * share(*learning[1:]),
        "reference": 2 * share(*references),
        "context (assumed)": CONTEXT,
    }
    phases = {"asleep": asleep}
    if learning:
        phases |= plan_update(policy, learning, references, asleep, gpus)
    if not args.replay:
        phases |= plan_engine(args, config, policy, asleep, gpus, memory)

    host = {"start": gpus * PROCESS + 6 * policy.parameters, "asleep": gpus * PROCESS}
    awake = phases.get("awake", asleep)
    offloaded = sum(n for name, n in asleep.items() if name not in awake)
    if offloaded:
        host["awake"] = gpus * (PROCESS + offloaded)

    phases = {name: phases[name] for name in PHASES if name in phases}
    lacks = {name: sum(things.values()) - memory for name, things in phases.items()}
    cache = awake.get("KV cache", 0)
    if not args.replay:
        lacks["KV cache"] = args.window * policy.kv_token - cache
    lacks = {name: n for name, n in lacks.items() if n > 0}
    return Plan(phases, host, cache / policy.kv_token, lacks)


def plan_update(policy, learning, references, asleep: dict, gpus: int) -> dict:
    """Returns the phases score, update and step: bytes of each thing."""
    most = max(learning, key=lambda net: 4 * net.parameters / gpus + net.update)
    gradients = {"gradients": 4 * most.parameters / gpus}
    # FSDP2: the root and two layers are whole, a layer's gradients in float32 until summed.
    gathered = {"gathered": 2 * (policy.root + 2 * policy.layer)}
    backward = max(most.update + 6 * most.layer, 6 * most.root) - most.logits
    update = {"activations": backward, "logits": most.logits}
    forward = max(net.forward - net.logits for net in [*learning, *references])
    score = {"activations": forward, "logits": policy.logits}
    return {
        "score": asleep | gathered | score,
        "update": asleep | gradients | gathered | update,
        "step": asleep | gradients,
    }


def plan_engine(args, config, policy: Net, asleep: dict, gpus: int, memory: float) -> dict:
    """Returns the phases awake and sync: bytes of each thing."""
    offloaded = {"none": "", "optimizer": "optimiser", "all": "optimiser critic reference"}
    gone = offloaded[args.offload].split()
    stays = {name: n for name, n in asleep.items() if name not in gone}
    weights = {"engine weights": 2 * policy.parameters / args.tp}
    room = ENGINE_ROOM + 12 * SEQUENCES * config.vocab_size
    cache = args.gpu_memory_utilization * memory - weights["engine weights"] - room
    of_engine = {"engine's room (assumed)": room, "KV cache": max(0, cache)}
    # A parameter is gathered, in pieces and then whole; vLLM keeps a copy until it is in place.
    largest = max(config.vocab_size, config.intermediate_size) * config.hidden_size
    arriving = {"a parameter on its way": largest * (6 if gpus > 1 else 2)}
    return {"awake": stays | weights | of_engine, "sync": stays | weights | arriving}


# ---------------------------------------------------------------- the table


def table_row(name: str, cells) -> str:
    return f"{name:26}" + "".join(f"{cell:>8}" for cell in cells)


def say(args: train.Args, gpus: int, memory: float) -> str:
    """Returns the plan as text: the table, the host's memory, the KV cache, if it fits."""
    plan = make_plan(args, gpus, memory)
    billions = network(load_config(args.model), args).parameters / 1e9
    lines = [
        f"{args.model}: {billions:.2f} B parameters, {gpus} GPUs of {memory / GIB:g} GiB; "
        "GiB of each, planned, not measured",
        table_row("", plan.phases),
    ]
    things = {thing: n for phase in plan.phases.values() for thing, n in phase.items() if n}
    for thing in things:
        sizes = [phase.get(thing, 0) / GIB for phase in plan.phases.values()]
        lines.append(table_row(thing, [f"{n:.1f}" if n else "" for n in sizes]))
    totals = [sum(phase.values()) / GIB for phase in plan.phases.values()]
    lines.append(table_row("total", [f"{n:.1f}" for n in totals]))
    host = ", ".join(f"{n / GIB:.0f} {when}" for when, n in plan.host.items())
    lines.append(f"host memory of all ranks: {host}")
    if not args.replay:
        lines.append(f"KV cache of an engine: {plan.kv_tokens:,.0f} tokens")
    lacks = ", ".join(f"{name} lacks {n / GIB:.1f}" for name, n in plan.lacks.items())
    lines.append(f"does not fit: {lacks}" if lacks else "it fits")
    return "\n".join(lines)


def read_arguments(argv: list[str]) -> tuple[train.Args, int, float]:
    """Returns train.py's flags, the number of GPUs and the bytes of each. Raises BadInput."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--gpu_memory", type=float, help="GiB; default: this GPU's, or 80")
    options, train_flags = parser.parse_known_args(argv)
    args = train.parse_args(train_flags)
    train.check_args(args)
    need(args.model, "give --model: a folder, or one of the built-in shapes")
    need(not args.lora_rank, "--lora_rank is not planned, only full fine-tuning is")
    memory = options.gpu_memory
    if memory is None:
        memory = torch.cuda.mem_get_info()[1] / GIB if torch.cuda.is_available() else 80
    are_positive = options.gpus > 0 and memory > 0
    need(are_positive, "--gpus and --gpu_memory must be greater than 0")
    need(options.gpus % args.tp == 0, f"--tp {args.tp} must divide --gpus {options.gpus}")
    vars(args).update(devices.device_defaults(args, cuda=True))
    args.fill({"gradient_checkpointing": True})
    need(args.dtype == "bfloat16", "--dtype float32 is not planned, only bfloat16 is")
    is_ours = args.adv_estimator in losses.ESTIMATORS
    need(is_ours, f"--adv_estimator {args.adv_estimator}: give one of losses.py")
    return args, options.gpus, memory * GIB


if __name__ == "__main__":
    try:
        print(say(*read_arguments(sys.argv[1:])))
    except BadInput as error:
        sys.exit(f"bench/plan.py: error: {error}")
