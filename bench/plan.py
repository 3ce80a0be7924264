"""Plans what a run of train.py will hold in memory, phase by phase, before there is a GPU.

    python bench/plan.py --model Qwen2.5-7B --gpus 8 --gpu_memory 80 [any flag of train.py]

The plan is computed from the model's configuration. --model is a folder with a config.json, or
a built-in shape: Qwen2.5-0.5B, -1.5B, -3B, -7B, -14B, -32B, Qwen3-4B. The table has GiB (2^30
bytes) everywhere; an "80 GB" card has 79.6. It has a column for each phase; `total` is the
most that a GPU holds in it:

    awake     rollout: what the trainer keeps and --offload leaves, and the engine's share:
              weights, KV cache, its room
    asleep    nothing runs: what the trainer keeps (parameters, optimiser, reference, critic),
              CUDA's context
    score     a forward pass without gradients
    sync      the engine's weights come in, its KV cache is not there yet
    update    the backward pass of a second micro-batch, when all gradients are there; with
              --adv_estimator gae of the critic, too, one after the other
    step      the optimiser's: activations are gone, and AdamW, fused, takes nothing more

Behind it stand the host's memory, the KV cache in tokens, the fastest flags that leave 5% of a
GPU free, because nobody has measured the plan on one, and whether it fits; if not, which flags
would make it fit. With --flags only the fastest flags are printed (exit code 1 if nothing fits):
those that a run on such GPUs chooses by itself, by the same arithmetic, flatrl/memory.py.

Flags at their defaults are here what they are on CUDA where nothing can be chosen: gradient
checkpointing, and bfloat16 by FSDP2 on any number of GPUs; float32 is not planned. Micro-batches
are full: groups of prompts at --max_prompt_tokens and responses at --max_response_tokens, the
prompt of a group once. The tokens that go through the network, the sampled ones and the attended
keys follow from these. Activations are what the network keeps for its backward pass and the
largest temporary beside it; tests/test_plan.py compares them with train.Policy itself. Attention
is CUDA's varlen_attn in bfloat16, which keeps q, k, v, output and logsumexp. Logits are
token_logprobs' three blocks of at most 1,024 columns, never (T, V). CONTEXT, ENGINE_ROOM and
PROCESS are assumed, not derived. --engine_args is not followed. Models must be built like Qwen2,
Qwen3, Llama or Mistral.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import common  # noqa: F401
import torch
from flatrl.memory import GIB, PLANNED_TYPES, Net, fastest, network, plan_phases
from transformers import AutoConfig

import losses
import train
from agent_loop import BadInput
from flatrl import devices
from flatrl.bad_input import need

PROCESS = 5 * GIB  # of host memory: libraries, vLLM, a step's trajectories
SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, 151936, True),
}


def load_config(model: str):
    """Returns the text configuration of a built-in shape or of a folder. Raises BadInput on
    what is neither."""
    name = model.split("/")[-1].removeprefix("Qwen2.5-").removesuffix("-2507").removesuffix("-Instruct")
    if name in SHAPES and not Path(model).is_dir():
        keys = """hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size
            tie_word_embeddings""".split()
        kind = {"head_dim": 128, "model_type": "qwen3"} if name.startswith("Qwen3") else {"model_type": "qwen2"}
        return AutoConfig.for_model(**kind, **dict(zip(keys, SHAPES[name])))
    need(Path(model, "config.json").is_file(), f"--model {model}: give a folder with a config.json, or one of "
         f"Qwen2.5-{', -'.join(SHAPES).replace('-Qwen', 'Qwen')}")  # fmt: skip
    config = AutoConfig.from_pretrained(model).get_text_config()
    need(config.model_type in PLANNED_TYPES,
         f"--model {model}: a {config.model_type} is not planned, {', '.join(sorted(PLANNED_TYPES))} are")  # fmt: skip
    return config


def configs_of(args: train.Args) -> list:
    """Returns the text configurations of the policy and of the reference."""
    return [load_config(args.model), load_config(args.ref_model or args.model)]


def forward(config, args: train.Args, net: Net) -> float:
    """Returns the most bytes of a forward pass without gradients, in a layer's MLP or at the
    head."""
    T, h = args.tokens_per_micro_batch, config.hidden_size
    mlp = (4 * 2 * h + 3 * 2 * config.intermediate_size) * T  # embeddings, input, residual, norm; three of MLP
    head = 2 * 2 * h * T + 2 * h * net.sampled + net.logits
    return max(mlp, head)


@dataclasses.dataclass
class Plan:
    phases: dict[str, dict[str, float]]  # of a GPU: bytes of each thing in each phase
    host: dict[str, float]  # of all ranks
    kv_tokens: float  # in one engine's KV cache
    lacks: dict[str, float]  # bytes too few, where there are


def make_plan(args: train.Args, gpus: int, memory: float) -> Plan:
    """Returns the plan of a run on so many GPUs with `memory` bytes each.

    flatrl.memory plans the phases that decide if it fits: the others take less, but for the score of a
    reference much larger than the policy, and a sync where the KV cache holds next to nothing."""
    configs = configs_of(args)
    config, reference_config = configs
    policy = network(config, args)
    scoring = [(config, policy)]
    if "values" in args.estimator_takes:
        scoring.append((config, network(config, args, critic=True)))
    if args.kl_coef > 0 and not args.hints:  # with these the policy is its own
        scoring.append((reference_config, network(reference_config, args)))
    planned, _ = found = plan_phases(args, configs, gpus, memory)
    stays, update = planned["asleep"], planned.get("update")
    awake = planned.setdefault("awake", stays)
    if update:
        activations = max(forward(config, args, net) - net.logits for config, net in scoring)
        scores = {"gathered": update["gathered"], "activations": activations, "logits": policy.logits}
        planned |= {"score": stays | scores, "step": stays | {"gradients": update["gradients"]}}
    if not args.replay:
        # A parameter is gathered, in pieces and then whole, and vLLM keeps a copy until that is in place.
        arriving = max(config.vocab_size, config.intermediate_size) * config.hidden_size * (6 if gpus > 1 else 2)
        things = {name: n for name, n in awake.items() if name in stays or name == "engine weights"}
        planned["sync"] = things | {"a parameter on its way": arriving}
    phases = {name: planned[name] for name in "awake asleep score sync update step".split() if name in planned}

    # The model is bfloat16 in its files, whose pages all ranks read; the first rank tries it in float32.
    host = {"start": gpus * PROCESS + 6 * policy.parameters, "asleep": gpus * PROCESS}
    if args.sleep_level == 1 and not args.replay:
        host["asleep"] += gpus * awake["engine weights"]
    if args.offload != "none" and not args.replay:  # pinned
        host["awake"] = gpus * (PROCESS + sum(n for name, n in stays.items() if name not in awake))

    lacks = {name: sum(things.values()) - memory for name, things in phases.items()}
    if not args.replay:
        lacks["KV cache"] = found[1]["KV cache"]
    kv_tokens = awake.get("KV cache", 0) / policy.kv_token
    return Plan(phases, host, kv_tokens, {name: n for name, n in lacks.items() if n > 0})


def smaller_plans(args: train.Args, gpus: int) -> Iterator[dict]:
    """Yields changes of one flag each that may make a run fit, the cheapest first."""
    heads = load_config(args.model).num_attention_heads
    tokens = args.tokens_per_micro_batch // 2
    share = args.gpu_memory_utilization - 0.05
    tp = 2 * args.tp
    if not args.gradient_checkpointing:
        yield {"gradient_checkpointing": True}
    if args.offload != "all":
        yield {"offload": "all" if args.offload == "optimizer" else "optimizer"}
    if tokens >= max(1024, args.window):
        yield {"tokens_per_micro_batch": tokens}
    if share > 0.05:
        yield {"gpu_memory_utilization": round(share, 2)}
    if share < 0.8:  # the KV cache may lack what the trainer does not
        yield {"gpu_memory_utilization": round(share + 0.1, 2)}
    if gpus % tp == 0 and heads % tp == 0:
        yield {"tp": tp}


def cure(args: train.Args, gpus: int, memory: float) -> tuple[dict, bool]:
    """Returns flags that make a run fit, none of them needless, or come as near as any; and
    whether it fits."""

    def lack(changes: dict) -> float:
        return sum(make_plan(dataclasses.replace(args, **changes), gpus, memory).lacks.values())

    changes = {}
    while lack(changes):
        candidates = [changes | step for step in smaller_plans(dataclasses.replace(args, **changes), gpus)]
        better = [candidate for candidate in candidates if lack(candidate) < lack(changes)]
        if not better:
            return changes, False
        changes = better[0]
    for name in list(changes):
        without = {key: value for key, value in changes.items() if key != name}
        if not lack(without):
            changes = without
    return changes, True


def as_flags(changes: dict) -> str:
    """Returns flags as a command line has them."""
    return " ".join(f"--{name} {str(value).lower()}" for name, value in changes.items())


def table_row(name: str, cells) -> str:
    return f"{name:26}" + "".join(f"{cell:>8}" for cell in cells)


def fastest_flags(args: train.Args, gpus: int, memory: float) -> dict | None:
    """Returns what a run on such GPUs chooses: `flatrl.memory.fastest`."""
    return fastest(args, args.given, configs_of(args), gpus, memory)


def say(args: train.Args, gpus: int, memory: float) -> str:
    """Returns the plan of a run as text: the table, the host's memory, the KV cache, and
    whether it fits."""
    plan = make_plan(args, gpus, memory)
    policy = network(load_config(args.model), args)
    lines = [f"{args.model}: {policy.parameters / 1e9:.2f} B parameters, {args.dtype}, {gpus} GPUs of {memory / GIB:g} "
             "GiB; GiB of each, planned, not measured"]  # fmt: skip
    lines.append(table_row("", plan.phases))
    things = {}  # that any phase holds, in order
    for phase in plan.phases.values():
        things |= {thing: n for thing, n in phase.items() if n}
    for thing in things:
        cells = [phase.get(thing, 0) / GIB for phase in plan.phases.values()]
        lines.append(table_row(thing, [f"{n:.1f}" if n else "" for n in cells]))
    lines.append(table_row("total", [f"{sum(phase.values()) / GIB:.1f}" for phase in plan.phases.values()]))
    host = ", ".join(f"{n / GIB:.0f} {when}" for when, n in plan.host.items())
    lines.append(f"host memory of all ranks: {host}; micro-batch: {args.tokens_per_micro_batch:,} tokens")
    if not args.replay:
        longest = args.max_prompt_tokens + args.max_response_tokens
        of_trajectory = args.max_response_tokens + args.max_prompt_tokens / args.group_size
        kv_tokens = max(0, plan.kv_tokens)
        lines.append(f"an engine's KV cache: {kv_tokens:,.0f} tokens, {kv_tokens / of_trajectory:,.0f} trajectories of "
                     f"{longest:,} tokens whose groups share their prompts")  # fmt: skip
    if not plan.lacks:
        found = fastest_flags(args, gpus, memory)
        flags = "none" if found is None else as_flags(found)
        lines.append(f"the fastest flags that leave 5% of a GPU free: {flags}")
        return "\n".join([*lines, "it fits"])
    lines.append("does not fit: " + ", ".join(f"{name} lacks {n / GIB:.1f}" for name, n in plan.lacks.items()))
    changes, fits = cure(args, gpus, memory)
    flags = " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in changes.items())
    lines.append(f"{'it fits with' if fits else 'no flags make it fit: more GPUs do; the nearest:'} {flags}")
    return "\n".join(lines)


def read_arguments(argv: list[str]) -> tuple[train.Args, int, float]:
    """Returns train.py's flags, the number of GPUs and the bytes of each, from a command line.
    Raises BadInput."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False, add_help=not argv)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--gpu_memory", type=float, help="GiB; default: those of the GPU that is there, or 80")
    parser.add_argument("--flags", action="store_true")
    options, train_flags = parser.parse_known_args(argv)
    args = train.parse_args(train_flags)
    train.check_args(args)
    need(args.model, "give --model: a folder, or one of the built-in shapes")
    need(not args.lora_rank, "--lora_rank is not planned, only full fine-tuning is")
    memory = options.gpu_memory
    if memory is None:
        memory = torch.cuda.mem_get_info()[1] / GIB if torch.cuda.is_available() else 80
    need(options.gpus > 0 and memory > 0, "--gpus and --gpu_memory must be greater than 0")
    need(options.gpus % args.tp == 0, f"--tp {args.tp} must divide --gpus {options.gpus}")
    vars(args).update(devices.device_defaults(args, cuda=True))
    args.fill({"gradient_checkpointing": True})
    need(args.dtype == "bfloat16", "--dtype float32 is not planned, only bfloat16 is, the default on CUDA")
    need(args.adv_estimator in losses.ESTIMATORS, f"--adv_estimator {args.adv_estimator} is a task file's: give one "
         "of losses.py, gae if it has a critic")  # fmt: skip
    if json.loads(args.engine_args):
        print("--engine_args is not followed: what it changes in the engine is not in the plan", file=sys.stderr)
    return args, options.gpus, memory * GIB


def main(argv: list[str]) -> int:
    """Prints the plan, or with --flags only the fastest flags; returns the exit code."""
    plan = read_arguments(argv)
    if "--flags" not in argv:
        print(say(*plan))
        return 0
    found = fastest_flags(*plan)
    need(found is not None, "nothing fits with 5% to spare: see the plan without --flags")
    print(as_flags(found))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BadInput as error:
        sys.exit(f"bench/plan.py: error: {error}")
