"""vLLM's peculiarities: its arguments and their checks, patches, and loading weights."""

import functools
import importlib.util
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import torch
import torch.distributed as dist

from flatrl.bad_input import need, refusing, text_of
from flatrl.models import HEAD

# Keys that flags with a JSON object may not have. Sleep, for example, would lose a draft model.
FIXED_ARGUMENTS = {
    "engine_args": [
        "distributed_executor_backend",
        "logprobs_mode",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "speculative_config",
    ],
    # The engine gets W + s B A. Dropout is off: the trained policy must be the one that sampled.
    "lora_args": ["r", "lora_dropout", "use_dora", "bias", "modules_to_save", "init_lora_weights"],
    "chat_template_args": ["tools", "tokenize", "add_generation_prompt"],
    "sampling_args": ["temperature", "seed", "n", "stop_token_ids", "structured_outputs"],
    "eval_sampling_args": ["seed", "n", "stop_token_ids", "structured_outputs"],
}
# Sampling parameters that leave the distribution of a token as it is.
NEUTRAL_SAMPLING = {"temperature", "stop", "max_tokens", "ignore_eos", "include_stop_str_in_output"}
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # With --tp: faster sums over GPUs that flatrl has not been measured with.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    # vLLM's external launcher wants ranks also for a single process.
    "RANK": "0",
    "LOCAL_RANK": "0",
}

# ---------------------------------------------------------------- what the user may set


def check_arguments(name: str, arguments: dict, our_flags: Collection[str]):
    """Raises BadInput if the flag `name`, a JSON object, has a key that can't be set there.

    our_flags: refused in --engine_args. Warns of --sampling_args that change the distribution."""
    fixed = set(FIXED_ARGUMENTS.get(name, ()))
    if name == "engine_args":
        fixed.update(our_flags)
    taken = ", ".join(fixed & arguments.keys())
    need(not taken, f"--{name}: {taken} can't be set here: it is a flag, an agent loop's, or ours")
    others = sorted(arguments.keys() - NEUTRAL_SAMPLING)
    if name == "sampling_args" and others:
        warnings.warn(
            f"--sampling_args {', '.join(others)}: the engine samples from another distribution "
            "than the trainer's; see rollout/logp_diff_mean, and consider --rollout_correction",
            stacklevel=2,
        )


def sampling_params(parameters: dict):
    """Returns vLLM's SamplingParams. Raises an error of any kind for a name or value it refuses."""
    import msgspec
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    checked = msgspec.convert(parameters, SamplingParams)  # types, also in lists; ranges
    unknown = parameters.keys() - {*checked.__struct_fields__}
    if unknown:  # msgspec ignores them
        raise ValueError(f"vLLM has no sampling parameter {', '.join(sorted(unknown))}")
    checked.logprobs = 0  # of the sampled token only
    checked.flat_logprobs = True
    checked.detokenize = bool(checked.stop)
    checked.output_kind = RequestOutputKind.FINAL_ONLY
    return checked


# ---------------------------------------------------------------- before an engine is built


def vllm_arguments(model: str, args, device: torch.device, vision: bool = False) -> dict:
    """Returns the arguments of vllm.LLM for colocation and exact logprobs, with --engine_args."""
    engine_args = json.loads(args.engine_args)
    max_num_seqs = engine_args.get("max_num_seqs", 256)
    arguments = dict(
        model=model,
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code,
        seed=args.seed,
        max_model_len=args.max_model_len,
        max_num_seqs=max_num_seqs,
        # On the process group that accelerate made.
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=args.tp,
        # Logprobs of softmax(logits / temperature), as the trainer computes them (trl#4159).
        logprobs_mode="processed_logprobs",
        runner="generate",
        generation_config="vllm",  # no sampling defaults from the model's folder
        prefix_caching_hash_algo="xxhash",  # of all blocks of a prompt, at each turn
        use_tqdm_on_load=False,
        language_model_only=not vision,
        enable_return_routed_experts=args.router_replay,
    )
    if vision:
        arguments["limit_mm_per_prompt"] = {"image": args.max_images, "video": 0}
    if device.type == "cuda":
        arguments["enable_sleep_mode"] = True
        arguments["gpu_memory_utilization"] = args.gpu_memory_utilization
        # It keeps buffers of CUDA graphs in memory that sleep frees.
        arguments["disable_custom_all_reduce"] = True
        if max_num_seqs > 512:  # vLLM's limit: larger batches would decode without CUDA graphs
            arguments["max_cudagraph_capture_size"] = max_num_seqs
    else:
        arguments |= dict(
            enforce_eager=True,  # compiling takes longer than a small run
            block_size=32,
            kv_cache_memory_bytes=1 << 30,
            # The longest prompt must fit beside a full batch that decodes.
            max_num_batched_tokens=max(8192, args.max_model_len + max_num_seqs),
            enable_chunked_prefill=False,  # with request seeds vLLM's CPU build crashes on it
        )
    # The trainer's logits are float32; a bfloat16 head would round the engine's.
    arguments["hf_overrides"] = {"head_dtype": "float32"} | engine_args.pop("hf_overrides", {})
    return arguments | engine_args


def check_model(args, device: torch.device):
    """Raises BadInput if vLLM can't generate text with model, engine and sampling arguments."""
    if args.replay:  # without an engine
        return
    has_routes = device.type == "cuda" or not args.router_replay
    need(has_routes, "--router_replay: vLLM returns routes on CUDA alone; a --replay may have them")
    prepare_vllm(device, args.tp)
    from vllm import EngineArgs

    with refusing(f"--model {args.model}, --engine_args {args.engine_args}: vLLM refuses them"):
        arguments = vllm_arguments(args.model, args, device)
        arguments.pop("compilation_config", None)  # vllm.LLM takes more forms of it
        EngineArgs(**arguments).create_engine_config()
    for kind, validate in ("", False), ("eval_", True):
        with refusing(f"--{kind}sampling_args"):
            # Agent loops ask for no more tokens.
            limit = {"max_tokens": args.max_response_tokens}
            sampling_params(limit | args.sampling(validate))


def prepare_vllm(device, tp):
    """Sets the environment, and patches vLLM, before an engine is built."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    from vllm.model_executor.models.transformers.base import Base

    # vLLM would compile a class of transformers that it uses, and the trainer uses it, too.
    Base._decorate_cls_for_torch_compile = lambda self, **settings: None
    if device.type != "cpu":
        return
    _patch_cpu_build()
    if tp > 1:
        from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

        # vLLM names a team's shared memory after its init method, "env://" for all of a machine.
        address = [f"tcp://flatrl:{os.urandom(16).hex()}"]
        dist.broadcast_object_list(address)

        def distributed_args(self):
            return address[0], int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])

        ExecutorWithExternalLauncher._distributed_args = distributed_args


@functools.cache  # once a process: a second patch would wrap the first
def _patch_cpu_build():
    """Patches what colocation needs to be different in vLLM's CPU build."""
    import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as moe
    import vllm.model_executor.layers.rotary_embedding.base as rotary
    import vllm.model_executor.models.config as models
    import vllm.model_executor.models.registry as registry
    import vllm.v1.sample.sampler as sampler
    from vllm.model_executor.layers import activation, utils

    # Qwen3.5's module imports torchvision, which install.sh leaves out, by a module whose twin does
    # without. vLLM would import the model in a process of its own, because of CUDA.
    if not importlib.util.find_spec("torchvision"):
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as twin

        sys.modules["transformers.models.qwen2_vl.image_processing_qwen2_vl"] = twin
        registry._run_in_subprocess = lambda inspect: inspect()

    # At load the CPU build repacks linear layers and empties `weight`: no sync reaches them.
    def use_plain_linear(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = use_plain_linear

    # With a prefix cache, hybrid models would need chunked prefill, which is off.
    verify = models.MambaModelConfig.verify_and_update_config

    def verify_without_prefix_cache(config):
        config.cache_config.enable_prefix_caching = False
        verify(config)

    models.MambaModelConfig.verify_and_update_config = verify_without_prefix_cache

    # Of (tokens, heads, D) tensors, as LFM2 and latent attention have, it rotates one head only.
    rotate = rotary.RotaryEmbedding.forward_cpu

    def rotate_all_heads(self, positions, query, key=None):
        if query.ndim == 3:
            return self.forward_native(positions, query, key)
        return rotate(self, positions, query, key)

    rotary.RotaryEmbedding.forward_cpu = rotate_all_heads

    # XIELU must compute in the model's dtype, not always in bfloat16.
    activation.XIELU.__init__ = functools.partialmethod(activation.XIELU.__init__, dtype=None)

    # Experts are repacked at the first load only: each load becomes the first.
    setup_kernel = moe.UnquantizedFusedMoEMethod._setup_kernel

    def setup_kernel_anew(self, **weights):
        self.moe_kernel = None
        setup_kernel(self, **weights)

    moe.UnquantizedFusedMoEMethod._setup_kernel = setup_kernel_anew

    # Compiling this function, whose result is not used here, takes 4 seconds in every process.
    count = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = getattr(count, "_torchdynamo_orig_callable", count)


# ---------------------------------------------------------------- weights into the engine


def load_into(model, named_tensors, config):
    """Copies (name in a checkpoint, tensor) pairs into vLLM's model, by its layerwise reload.

    Raises RuntimeError with the name of a refused tensor, or of parameters that got no tensor."""
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    # Before the reload: during it, a tied head is a parameter of its own, which gets no tensor.
    names = dict(model.named_parameters())
    if not any(name.endswith(HEAD) for name in names):  # vLLM's head is tied
        named_tensors = (pair for pair in named_tensors if pair[0] != HEAD)
    layerwise.initialize_layerwise_reload(model)
    fused = {name: parts for name, parts in fused_parts(model).items() if name in names}
    arrivals = _Arrivals(fused)
    for name in fused:  # vLLM replaces these parameters, loaders included, when a layer is complete
        parameter = model.get_parameter(name)
        loader = getattr(parameter, "weight_loader", default_weight_loader)
        parameter.weight_loader = arrivals.watched(name, loader)
    try:
        model.load_weights(arrivals.one_by_one(named_tensors))
    except Exception as error:  # vLLM's are bare assertions, among others
        raise RuntimeError(f"weight sync failed at {arrivals.current}: {text_of(error)}") from error
    layerwise.finalize_layerwise_reload(model, config)
    # The model copied these without a parameter's loader, and the reload has lost them.
    for pair in arrivals.not_loaded.items():
        for parameter in model.load_weights([pair]):
            arrivals.n_elements[parameter] += 1
    missing = arrivals.missing()
    if missing:
        raise RuntimeError(f"weight sync incomplete: these parameters got no tensor: {missing}")


class _Arrivals:
    """The tensors of one sync, and the engine's parameters at which they arrive."""

    def __init__(self, fused):
        self.fused = fused  # see `fused_parts`
        self.current = "the first parameter"  # the name of the tensor that vLLM has now
        self.size = 0  # its number of elements
        self.not_loaded = {}  # tensors that no parameter's loader took, by name
        self.n_elements = Counter()  # arrived, by parameter or part of a fused one

    def one_by_one(self, named_tensors):
        """Yields the same pairs. Keeps name and size, and the tensor until a loader takes it."""
        for name, tensor in named_tensors:
            self.current = name
            self.size = tensor.numel()
            self.not_loaded[name] = tensor
            yield name, tensor

    def watched(self, parameter, loader):
        """Returns the parameter's loader, which now counts what it loads."""

        @functools.wraps(loader)
        def load(*args, **kwargs):
            # "qkv_proj.weight" is fused from the parts "q_proj.weight", "k_proj.weight", ...
            ending = "." + ".".join(self.current.split(".")[-2:])
            parts = [name for name in self.fused[parameter] if name.endswith(ending)]
            self.n_elements[parts[0] if parts else parameter] += self.size
            self.not_loaded.pop(self.current, None)
            return loader(*args, **kwargs)

        return load

    def missing(self):
        """Returns the names of parameters, or parts of fused ones, that got no tensor."""
        names = []
        for parameter, parts in self.fused.items():
            for part, tensor in parts.items():
                # Experts share a parameter, which may get some of them.
                n_needed = tensor.numel() if ".experts." in parameter else 1
                if max(self.n_elements[part], self.n_elements[parameter]) < n_needed:
                    names.append(part)
        return sorted(names)


def fused_parts(model):
    """Returns {parameter of the engine: {name of a part, such as q_proj of qkv_proj: its rows}}."""
    fused = {}
    for name, parameter in model.named_parameters():
        path, _, kind = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        names = getattr(model, "packed_modules_mapping", {}).get(module, ())
        rows = getattr(model.get_submodule(path), "output_partition_sizes", ())
        fused[name] = {name: parameter}
        if len(names) == len(rows) > 1 and sum(rows) == len(parameter):
            parts = zip(names, parameter.split(rows))
            fused[name] = {f"{parent}.{part}.{kind}": tensor for part, tensor in parts}
    return fused


def keep_loaded(llm_engine):
    """Makes the engine keep its memory when it sleeps, where vLLM would raise an error."""
    executor = llm_engine.engine_core.engine_core.model_executor
    executor.sleep = lambda level: None
    executor.wake_up = lambda tags: None


def skip_middle_tokens(processor):
    """Spares vLLM's OutputProcessor the tokens of a request between its first and its last.

    It would make entries for their ranks and texts. Requests with a stop string take its way."""
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    process = processor.process_outputs

    def process_outputs(outputs, **context):
        others = []
        for output in outputs:
            state = processor.request_states.get(output.request_id)
            if (
                state is None  # aborted
                or state.is_prefilling
                or output.finished
                or output.routed_experts is not None
                or type(state.detokenizer) is not IncrementalDetokenizer  # with stop strings
                or type(state.logprobs_processor.logprobs) is not FlatLogprobs  # not by `generate`
            ):
                others.append(output)
                continue
            state.detokenizer.token_ids.extend(output.new_token_ids)
            logprobs = state.logprobs_processor.logprobs.logprobs
            logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())
        return process(others, **context)

    processor.process_outputs = process_outputs


def unlink_shared_memory():
    """Lets the kernel free a --tp team's memory on CPUs with the last rank, however that ends."""
    dist.barrier()
    for file in Path("/dev/shm").glob(f"*{os.environ['VLLM_DIST_IDENT']}-*cpushm*"):
        file.unlink(missing_ok=True)


def never_sample(model, never):
    """Gives these ids, or slices of ids, no probability, in sampling and logprobs (vllm#13175)."""
    compute_logits = model.compute_logits

    def limited(*args, **kwargs):
        logits = compute_logits(*args, **kwargs)
        if logits is not None:  # only ranks that sample have logits
            for ids in never:
                logits[..., ids] = float("-inf")
        return logits

    model.compute_logits = limited
