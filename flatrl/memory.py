"""What a run holds in a GPU's memory, phase by phase, and the fastest flags with which it fits.

`fill_by_plan` chooses flags on CUDA by this arithmetic, and bench/plan.py, which says what the
phases are and what is assumed, prints it. Models are built like Qwen2, in bfloat16, and sharded
by FSDP2, as they are on CUDA."""

import math
from collections import namedtuple
from dataclasses import replace

import torch

from flatrl.models import load_config
from flatrl.processes import all_gather, ranks_of_host

PLANNED_TYPES = {"qwen2", "qwen3", "llama", "mistral"}
GIB = 1 << 30
CONTEXT = 3 * GIB  # of a GPU: CUDA's and NCCL's contexts, captured graphs, fragmentation
ENGINE_ROOM = 2 * GIB  # of the engine's share: activations of its largest batch, graphs

# (--gradient_checkpointing, --tokens_per_micro_batch), the fastest first: recomputing costs a
# third of an update, a smaller micro-batch next to nothing down to 8,192 tokens (docs/speed.md),
# and below that the prompts of groups that no longer fit into one.
PASSES = [(False, 16384), (False, 8192), (True, 16384), (True, 8192), (True, 4096), (True, 2048)]
MOST_SEQUENCES = 1024  # vLLM's own --max_num_seqs on GPUs of 70 GiB and more

# A network's numbers of parameters: all, those of a decoder layer, those outside the layers. How
# many tokens of a full micro-batch were sampled. And bytes: the most that such a micro-batch takes
# in an update, what of it are logits, and a token's in the KV cache.
Net = namedtuple("Net", "parameters layer root sampled update logits kv_token")


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
    sampled = T * responses / (args.max_prompt_tokens + responses)  # their logprobs are computed
    keys = sampled + args.group_size * (T - sampled)  # that attention gathers

    # A norm keeps its input in float32, its result, and what its readers get of it.
    of_layer = T * (16 * h + 8 * f + 4 * q + 4 * heads) + 4 * k * keys
    if has_qk_norms:
        of_layer += 6 * T * (q + k)
    last = 8 * h * T + 2 * h * sampled  # what the last norm and the head keep
    head = 2 * embedding  # its gradient
    logits = 12 * sampled * min(1024, max(config.vocab_size // 64, 256))  # three float32 blocks
    if critic:
        head = 0
        logits = 0
    # An update takes most at the head, or in a layer's MLP, when head and norm are done.
    in_layer = T * (2 * h + 4 * f) - last
    if is_tied:
        in_layer += head  # its gradient waits for the embedding's
    kept = of_layer
    if args.gradient_checkpointing:
        in_layer += of_layer  # computed again
        kept = 2 * h * T
    update = n_layers * kept + last + max(logits + 8 * h * sampled + head, in_layer)
    kv_token = 4 * n_layers * k / min(args.tp, config.num_key_value_heads)
    return Net(n_layers * layer + root, layer, root, sampled, update, logits,
               kv_token)


def plan_phases(args, configs: tuple, gpus: int, memory: float) -> tuple[dict, dict]:
    """Plans a run on so many GPUs with `memory` bytes each, in the phases that decide if it fits.

    configs: the text configurations of the policy and of the reference. Returns {phase: {thing:
    its bytes on a GPU}} and {phase: bytes too few, negative where it fits}; "KV cache", for the
    longest trajectory, is among the latter."""
    policy, reference = (network(config, args) for config in configs)
    learning = [policy]
    references = []
    if "values" in args.estimator_takes:
        learning.append(network(configs[0], args, critic=True))
    if args.kl_coef and not args.hints:  # with these it is the policy itself
        references.append(reference)
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
        "context (assumed)": CONTEXT}
    phases = {"asleep": asleep}
    lacks = {}
    if learning:
        most = max(learning, key=lambda net: 4 * share(net) + net.update)
        # FSDP2: the root and two layers are whole, a layer's gradients in float32 till summed.
        phases["update"] = asleep | {
            "gradients": 4 * share(most),
            "gathered": 2 * (policy.root + 2 * policy.layer),
            "activations": max(most.update + 6 * most.layer, 6 * most.root) - most.logits,
            "logits": most.logits}
    if not args.replay:
        offloaded = {"none": "", "optimizer": "optimiser", "all": "optimiser critic reference"}
        awake = {name: n for name, n in asleep.items() if name not in offloaded[args.offload]}
        weights = 2 * policy.parameters / args.tp
        room = ENGINE_ROOM + 12 * args.max_num_seqs * configs[0].vocab_size
        kv_cache = args.gpu_memory_utilization * memory - weights - room
        phases["awake"] = awake | {"engine weights": weights, "engine's room (assumed)": room,
                                   "KV cache": max(0, kv_cache)}
        lacks["KV cache"] = args.window * policy.kv_token - kv_cache
    return phases, lacks | {name: sum(phase.values()) - memory for name, phase in phases.items()}


def fastest(args, given: set[str], configs: tuple, gpus: int, memory: float) -> dict | None:
    """Returns the values of --gradient_checkpointing, --tokens_per_micro_batch and
    --max_num_seqs with which a run is fastest and leaves 5% of a GPU free, because nobody has
    measured the plan on one; None if none do.

    given: names of flags that the user has set, which stay; the rest: see `plan_phases`."""
    trajectories = args.prompts_per_step * args.group_size * args.oversample * args.tp / gpus
    most = min(MOST_SEQUENCES, args.max_concurrent * args.tp, math.ceil(trajectories))
    more = {}
    if most > args.max_num_seqs:
        more = {"max_num_seqs": most}
    for recomputes, tokens in PASSES:
        for sequences in (more, {}):
            changes = dict(gradient_checkpointing=recomputes, tokens_per_micro_batch=tokens)
            changes = {name: value for name, value in (changes | sequences).items()
                       if name not in given}
            changed = replace(args, **changes)
            _, lacks = plan_phases(changed, configs, gpus, 0.95 * memory)
            if changed.tokens_per_micro_batch >= args.window and max(lacks.values()) <= 0:
                return changes
    return None


def fill_by_plan(args, device: torch.device) -> str:
    """Sets flags that the command line leaves open to the fastest values that fit the GPU.
    Returns a line that says so, to be added to others, or "".

    On a CPU, and of Args made in code, nothing changes. The whole memory of a GPU counts, not
    what is free now, so that --resume chooses again what the run began with."""
    given = getattr(args, "given", None)
    if given is None or device.type != "cuda":
        return ""
    from transformers import AutoModel

    configs = [load_config(replace(args, model=model)).get_text_config()
               for model in (args.model, args.ref_model or args.model)]
    model_class = AutoModel._model_mapping.get(type(configs[0]), None)
    can_recompute = getattr(model_class, "supports_gradient_checkpointing", True)
    if not can_recompute and "gradient_checkpointing" not in given:
        args.gradient_checkpointing = False
        return f"\n{model_class.__name__} can't recompute: --gradient_checkpointing false"
    types = {config.model_type for config in configs}
    if types - PLANNED_TYPES or args.lora_rank or args.dtype == "float32":
        return ""
    memory = min(all_gather(torch.cuda.mem_get_info()[1]))
    gpus = ranks_of_host() if args.shard == "hybrid" else torch.distributed.get_world_size()
    chosen = fastest(args, given, configs, gpus, memory)
    if chosen is None:
        return f"\nno flags fit GPUs of {memory / GIB:.1f} GiB, it is planned: see bench/plan.py"
    vars(args).update(chosen)
    flags = " ".join(f"--{name} {value}" for name, value in chosen.items())
    return f"\nplanned for {memory / GIB:.1f} GiB: {flags.lower()}"
