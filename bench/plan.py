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

Behind it stand the host's memory, the KV cache in tokens, the fastest flags that fit, and
whether it fits; if not, which flags would make it fit. With --flags only the fastest flags are
printed, for a command line (exit code 1 if nothing fits); --gpu_memory is then that of the GPU
that is there:

    python train.py --model FOLDER $(python bench/plan.py --flags --model FOLDER)

Flags at their defaults are what they are on CUDA: gradient checkpointing, and bfloat16 by
FSDP2 on any number of GPUs. Micro-batches are full: groups of prompts at --max_prompt_tokens
and responses at --max_response_tokens, the prompt of a group once. The tokens that go through
the network, the sampled ones and the attended keys follow from these. Activations are what the
network keeps for its backward pass and the largest temporary beside it; tests/test_plan.py
compares them with train.Policy itself. Attention is CUDA's varlen_attn in bfloat16, which
keeps q, k, v, output and logsumexp; a CPU's goes sequence by sequence and keeps its outputs
twice. Logits are token_logprobs' three blocks of at most 1,024 columns, never (T, V). CONTEXT,
ENGINE_ROOM and PROCESS are assumed, not derived. --engine_args is not followed. Models must be
built like Qwen2, Qwen3, Llama or Mistral.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import common  # noqa: F401
import torch
from transformers import AutoConfig

import train
from agent_loop import BadInput
from flatrl import devices
from flatrl.bad_input import need

GIB = 1 << 30
CONTEXT = 3 * GIB  # of a GPU: CUDA's and NCCL's contexts, captured graphs, fragmentation
ENGINE_ROOM = 2 * GIB  # of the engine's share: activations of its largest batch, graphs
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
PLANNED_TYPES = ("qwen2", "qwen3", "llama", "mistral")


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
         f"--model {model}: a {config.model_type} is not planned, {', '.join(PLANNED_TYPES)} are")  # fmt: skip
    return config


class Net:
    """A network's numbers of parameters, and the bytes of its passes under train.py's flags.

    h is the hidden size, f the MLP's, q and k the widths of all queries and of all keys; T the
    tokens of a micro-batch that go through the network, `sampled` those of them whose logprobs
    are computed, `keys` the attended ones."""

    def __init__(self, config, args: train.Args, critic: bool = False):
        self.args, self.critic = args, critic
        self.layers = config.num_hidden_layers
        self.h = config.hidden_size
        self.f = config.intermediate_size
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        head_size = getattr(config, "head_dim", None) or self.h // self.heads
        self.q = self.heads * head_size
        self.k = self.kv_heads * head_size
        self.vocab = config.vocab_size
        self.tied = config.tie_word_embeddings or critic

        # Parameters: of a layer's matrices, of a layer, of the embedding, of everything outside the layers.
        self.matrices = 2 * self.h * (self.q + self.k) + 3 * self.h * self.f
        self.qk_norm = config.model_type == "qwen3"
        self.layer = self.matrices + 2 * self.h
        if config.model_type == "qwen2" or getattr(config, "attention_bias", False):
            self.layer += self.q + 2 * self.k
        if self.qk_norm:
            self.layer += 2 * head_size
        self.embedding = self.vocab * self.h
        self.root = self.embedding + self.h
        if not self.tied:
            self.root += self.embedding
        self.parameters = self.layers * self.layer + self.root

        # Bytes of an element: b of matrix products, `wide` of the residual stream, which autocast keeps in float32.
        self.b = 4 if args.dtype == "float32" else 2
        self.autocast = self.b == 2 and not args.shard
        self.wide = 4 if self.autocast else self.b
        P, R, n = args.max_prompt_tokens, args.max_response_tokens, args.group_size
        self.T = args.tokens_per_micro_batch
        self.sampled = self.T * n * R / (P + n * R)
        self.keys = self.T * n * (P + R) / (P + n * R)

    def casts(self, layers: int = 1) -> float:
        """Returns the bytes of the weights of some layers that autocast has cast to bfloat16."""
        return 2 * layers * self.matrices if self.autocast else 0

    def layer_keeps(self) -> float:
        """Returns the bytes that the forward pass of a decoder layer keeps for its backward
        pass."""
        norms = 0
        for readers in (3, 2):  # q, k, v; gate, up
            # Of a norm: its input in float32, its result, and what its readers get if that is not the same tensor.
            norms += (4 + self.wide) * self.h
            norms += readers * self.b * self.h if self.autocast else self.wide * self.h
        if self.qk_norm:
            norms += (4 + self.b) * (self.q + self.k)
        attention = (2 * self.b * self.q + 4 * self.heads) * self.T + 2 * self.b * self.k * self.keys
        return (norms + 4 * self.b * self.f) * self.T + attention + self.casts()

    def logits(self) -> float:
        """Returns the bytes of three float32 blocks of columns of the logits."""
        if self.critic:
            return 0
        columns = min(1024, max(self.vocab // 64, 256))
        return 3 * 4 * self.sampled * columns

    def last(self) -> float:
        """Returns the bytes that the last norm and the head keep."""
        return (4 + 2 * self.wide) * self.h * self.T + self.b * self.h * self.sampled

    def kept(self) -> float:
        """Returns the bytes that the whole forward pass keeps for the backward pass."""
        layer = self.wide * self.h * self.T if self.args.gradient_checkpointing else self.layer_keeps()
        return self.layers * layer + self.last()

    def activations(self) -> float:
        """Returns the most bytes of activations in an update, without logits.

        Beside what is kept these are either the gradients of the head's input and weight; or,
        when head and last norm are done, a layer that is computed again and the gradients in
        its MLP; or autocast's casts."""
        head = 0 if self.critic else self.wide * self.embedding
        at_head = self.logits() + 8 * self.h * self.sampled + head
        in_layer = (self.wide * self.h + 2 * self.b * self.f) * self.T - self.last()
        if self.tied:  # the head's gradient waits for the embedding's
            in_layer += head
        casts = 0
        if self.args.gradient_checkpointing:
            in_layer += self.layer_keeps()
            casts = self.casts(self.layers)  # until the forward pass ends
        return self.kept() + max(at_head, in_layer, casts) - self.logits()

    def forward(self) -> float:
        """Returns the most bytes of a forward pass without gradients, in a layer's MLP or at
        the head."""
        mlp = (4 * self.wide * self.h + 3 * self.b * self.f) * self.T  # embeddings, input, residual, norm; three of MLP
        head = 2 * self.wide * self.h * self.T + 2 * self.h * self.sampled + self.logits()
        return self.casts(self.layers) + max(mlp, head)


@dataclasses.dataclass
class Plan:
    phases: dict[str, dict[str, float]]  # of a GPU: bytes of each thing in each phase
    host: dict[str, float]  # of all ranks
    kv_tokens: float  # in one engine's KV cache
    lacks: dict[str, float]  # bytes too few, where there are


def make_plan(args: train.Args, gpus: int, memory: float) -> Plan:
    """Returns the plan of a run on so many GPUs with `memory` bytes each."""
    config = load_config(args.model)
    policy = Net(config, args)
    critics = [Net(config, args, critic=True)] if args.adv_estimator == "gae" else []
    references = []
    if args.kl_coef > 0 and not args.hints:  # with these the policy is its own
        references = [Net(load_config(args.ref_model or args.model), args)]
    learning = [] if args.rollout_only else [policy, *critics]
    ranks = gpus if args.shard else 1

    def parameters(nets: list[Net]) -> float:
        """Returns how many parameters of some networks a GPU holds."""
        return sum(net.parameters for net in nets) / ranks

    stays = {
        "parameters": 4 * parameters([policy]),
        "optimiser": 8 * parameters(learning),
        "critic": 4 * parameters(learning[1:]),
        "reference": 0 if args.rollout_only else policy.b * parameters(references),
        "DDP's buckets": 4 * parameters(learning) if gpus > 1 and not args.shard else 0,
        "context (assumed)": CONTEXT,
    }
    engine = {
        "engine weights": policy.b * policy.parameters / args.tp,
        "engine's room (assumed)": ENGINE_ROOM + 12 * args.max_num_seqs * policy.vocab,
    }
    kv_cache = args.gpu_memory_utilization * memory - sum(engine.values())
    if args.replay:
        engine = {}
        kv_cache = 0
    offloaded = {"none": [], "optimizer": ["optimiser"], "all": ["optimiser", "critic", "reference"]}[args.offload]
    stays_awake = {name: n for name, n in stays.items() if name not in offloaded}
    phases = {"awake": stays_awake | engine | {"KV cache": max(0, kv_cache)}, "asleep": stays}

    # FSDP2: the root and two layers are whole, and a layer's gradients in float32 until they are summed.
    gathered = {"gathered": policy.b * (policy.root + 2 * policy.layer) if args.shard else 0}
    if not args.rollout_only or args.replay:
        forward = max(net.forward() - net.logits() for net in [policy, *critics, *references])
        phases["score"] = stays | gathered | {"activations": forward, "logits": policy.logits()}
    if not args.replay:
        # A parameter on its way: gathered in float32, and vLLM's copy until it is in place.
        largest = max(policy.embedding, policy.h * policy.f)
        arriving = (4 + policy.b if ranks > 1 else policy.b) * largest
        phases["sync"] = stays_awake | {"engine weights": engine["engine weights"], "a parameter on its way": arriving}
    if learning:
        most = max(learning, key=lambda net: 4 * net.parameters / ranks + net.activations() + net.logits())
        gradients = {"gradients": 4 * parameters([most])}
        reducing = policy.b + 4 if args.shard else 0
        passing = max(most.activations() + most.logits() + reducing * most.layer, reducing * most.root)
        activations = {"activations": passing - most.logits(), "logits": most.logits()}
        phases["update"] = stays | gradients | gathered | activations
        phases["step"] = stays | gradients

    others = max((net.parameters for net in [*critics, *references]), default=0)
    whole = gpus * 4 * (policy.parameters + others)
    if args.shard:  # bfloat16 in the files, whose pages all ranks read; the first tries it in float32
        whole = 6 * policy.parameters
    host = {"start": gpus * PROCESS + whole, "asleep": gpus * PROCESS}
    if args.sleep_level == 1 and not args.replay:
        host["asleep"] += gpus * engine["engine weights"]
    if offloaded and not args.replay:  # pinned
        host["awake"] = gpus * (PROCESS + sum(stays[name] for name in offloaded))

    lacks = {name: sum(things.values()) - memory for name, things in phases.items()}
    kv_token = 2 * policy.layers * policy.k * policy.b / min(args.tp, policy.kv_heads)  # bytes on an engine's GPU
    if not args.replay:
        window = args.max_model_len or args.max_prompt_tokens + args.max_response_tokens
        lacks["KV cache"] = window * kv_token - kv_cache
    return Plan(phases, host, kv_cache / kv_token, {name: n for name, n in lacks.items() if n > 0})


def smaller_plans(args: train.Args, gpus: int) -> Iterator[dict]:
    """Yields changes of one flag each that may make a run fit, the cheapest first."""
    heads = load_config(args.model).num_attention_heads
    window = args.max_model_len or args.max_prompt_tokens + args.max_response_tokens
    tokens = args.tokens_per_micro_batch // 2
    share = args.gpu_memory_utilization - 0.05
    tp = 2 * args.tp
    if not args.gradient_checkpointing:
        yield {"gradient_checkpointing": True}
    if gpus > 1 and not args.shard:
        yield {"shard": True}
    if args.offload != "all":
        yield {"offload": "all" if args.offload == "optimizer" else "optimizer"}
    if tokens >= max(1024, window):
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


# The fastest first: recomputing costs a third of an update, a smaller micro-batch next to nothing down to 8,192 tokens
# (docs/speed.md), and below that the prompts of groups that no longer fit into one.
PASSES = [(False, 16384), (False, 8192), (True, 16384), (True, 8192), (True, 4096), (True, 2048)]
MOST_SEQUENCES = 1024  # vLLM's own --max_num_seqs on GPUs of 70 GiB and more


def fastest(args: train.Args, gpus: int, memory: float, given: set[str]) -> dict | None:
    """Returns the values of --gradient_checkpointing, --tokens_per_micro_batch and
    --max_num_seqs with which a run is fastest and fits; None if nothing fits.

    given: names of flags that the user has set, which stay."""

    def fits(changes: dict) -> bool:
        return not make_plan(dataclasses.replace(args, **changes), gpus, memory).lacks

    def rest(changes: dict) -> dict:
        return {name: value for name, value in changes.items() if name not in given}

    passes = [rest({"gradient_checkpointing": recomputes, "tokens_per_micro_batch": tokens})
              for recomputes, tokens in PASSES if tokens >= args.window]  # fmt: skip
    chosen = next(filter(fits, passes), None)
    if chosen is None:
        return None
    engines = gpus // args.tp
    trajectories = math.ceil(args.prompts_per_step * args.group_size * args.oversample / engines)
    more = rest({"max_num_seqs": min(MOST_SEQUENCES, args.max_concurrent * args.tp, trajectories)})
    if more.get("max_num_seqs", 0) > args.max_num_seqs and fits(chosen | more):
        chosen |= more
    return chosen


def as_flags(changes: dict) -> str:
    """Returns flags as a command line has them."""
    return " ".join(f"--{name} {str(value).lower()}" for name, value in changes.items())


def table_row(name: str, cells) -> str:
    return f"{name:26}" + "".join(f"{cell:>8}" for cell in cells)


def say(args: train.Args, gpus: int, memory: float, given: set[str] = frozenset()) -> str:
    """Returns the plan of a run as text: the table, the host's memory, the KV cache, and
    whether it fits. given: as of `fastest`."""
    plan = make_plan(args, gpus, memory)
    policy = Net(load_config(args.model), args)
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
        lines.append(f"the fastest flags that fit: {as_flags(fastest(args, gpus, memory, given) or {})}")
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
    if json.loads(args.engine_args):
        print("--engine_args is not followed: what it changes in the engine is not in the plan", file=sys.stderr)
    return args, options.gpus, memory * GIB


def main(argv: list[str]) -> int:
    """Prints the plan, or with --flags only the fastest flags; returns the exit code."""
    plan = read_arguments(argv)
    given = {word[2:].split("=")[0] for word in argv if word.startswith("--")}
    if "--flags" not in argv:
        print(say(*plan, given))
        return 0
    found = fastest(*plan, given)
    need(found is not None, "nothing fits: see the plan without --flags")
    print(as_flags(found))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BadInput as error:
        sys.exit(f"bench/plan.py: error: {error}")
