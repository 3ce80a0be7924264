"""vLLM's peculiarities: its arguments and their checks, patches, and loading weights."""

import contextlib
import functools
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from flatrl.bad_input import check_ids, need, refusing
from flatrl.terminal import shown

# What the flags that are JSON objects may not hold. Of vllm.LLM's arguments those that
# colocation depends on, that go round the vocabulary's limit, or that are lost at sleep level 2
# (draft models, thinking budgets); of a chat template's variables those that are arguments of
# apply_chat_template; of sampling parameters those that are a flag, or an agent loop's.
FIXED_ARGUMENTS = {
    "engine_args": """distributed_executor_backend logprobs_mode enable_sleep_mode
        pipeline_parallel_size data_parallel_size limit_mm_per_prompt
        enable_batch_sharded_sampling speculative_config spec_method spec_model spec_tokens
        reasoning_config reasoning_parser tokenizer tensor_parallel_size""",
    "chat_template_args": """conversation messages tools add_generation_prompt tokenize
        continue_final_message padding truncation max_length return_tensors return_dict
        return_assistant_tokens_mask tokenizer_kwargs""",
    "sampling_args": "temperature seed structured_outputs",
    "eval_sampling_args": "seed structured_outputs"}
# Sampling parameters that the engine sets itself.
FIXED_SAMPLING = {
    "n", "logprobs", "prompt_logprobs", "flat_logprobs", "detokenize", "output_kind"}
# Sampling parameters that leave the distribution of a token as it is.
NEUTRAL_SAMPLING = set("""temperature stop stop_token_ids max_tokens ignore_eos
    include_stop_str_in_output""".split())

# ---------------------------------------------------------------- what the user may set


def check_arguments(name: str, arguments: dict, our_flags: Sequence[str]):
    """Checks the JSON object of one of the flags that FIXED_ARGUMENTS names.

    Raises BadInput on an argument that can't be set there, on one of --engine_args that is a
    flag here (for others see `check_model`), and on a sampling parameter that vLLM does not
    know. Warns of one that changes the distribution in training, because the trainer computes
    log softmax(logits / temperature)."""
    fixed = sorted(arguments.keys() & FIXED_ARGUMENTS[name].split())
    need(not fixed, f"--{name}: {', '.join(fixed)} can't be set here: it is a flag, an agent "
         "loop's, or flatrl's own")
    if name == "engine_args":
        for key in arguments:
            need(key not in our_flags, f"--engine_args: {key} is --{key}")
        need(isinstance(arguments.get("hf_overrides", {}), dict),
             "--engine_args: hf_overrides must be an object")
    if "sampling" in name and arguments:  # this imports vLLM: seconds
        with refusing(f"--{name}"):
            sampling_params(arguments)
    others = sorted(arguments.keys() - NEUTRAL_SAMPLING)
    if name == "sampling_args" and others:
        warnings.warn(
            f"--sampling_args {', '.join(others)}: the engine samples from another distribution "
            "than the one whose logprobs the trainer computes; see rollout/logp_diff_mean, and "
            "consider --rollout_correction", stacklevel=2)


def sampling_params(parameters: dict, vocab_size: float = math.inf):
    """Returns vLLM's SamplingParams of a request with these parameters, as the engine needs
    them.

    Raises ValueError, TypeError or what vLLM has for it, if one is unknown, is not the
    user's to set, is of a wrong type or out of its range, or has token ids from vocab_size
    on. In vLLM's own step such a request would end the run."""
    import msgspec
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    parameters = {"max_tokens": 1 << 30} | parameters  # vLLM's default are 16
    checked = msgspec.convert(parameters, SamplingParams)  # types, also in lists; ranges
    unknown = parameters.keys() - {*checked.__struct_fields__}
    if unknown:  # msgspec left it out
        raise ValueError(f"vLLM has no sampling parameter {', '.join(sorted(unknown))}")
    fixed = FIXED_SAMPLING & parameters.keys()
    if fixed:
        raise ValueError(f"{', '.join(sorted(fixed))} can't be set here")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        check_ids(list(getattr(checked, name) or ()), vocab_size, name)
    if checked.allowed_token_ids == []:
        raise ValueError("allowed_token_ids is empty: nothing can be sampled")
    need(abs(checked.seed or 0) < 2**63, f"seed {checked.seed} has more than 64 bits")
    checked.logprobs = 0  # of the sampled token only
    checked.flat_logprobs = True
    checked.detokenize = bool(checked.stop)
    checked.output_kind = RequestOutputKind.FINAL_ONLY
    return checked


# ---------------------------------------------------------------- before an engine is built


def vllm_arguments(model: str, args, device: torch.device, vision: bool = False) -> dict:
    """Returns the arguments of vllm.LLM: what colocation and exact logprobs need,
    overridden by --engine_args."""
    arguments = dict(
        model=model, dtype=args.dtype,
        trust_remote_code=args.trust_remote_code, seed=args.seed,
        max_model_len=args.max_model_len, max_num_seqs=256,
        # Each rank's own process has an engine, on the process group that accelerate made.
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=args.tp,
        # Logprobs of softmax(logits / temperature), as the trainer computes them (trl#4159).
        logprobs_mode="processed_logprobs",
        runner="generate",
        generation_config="vllm",  # no sampling defaults from the model's folder
        disable_log_stats=True, use_tqdm_on_load=False)
    if vision:
        arguments["limit_mm_per_prompt"] = {"image": args.max_images, "video": 0}
    if device.type == "cuda":
        arguments |= dict(enable_sleep_mode=True,
                          gpu_memory_utilization=args.gpu_memory_utilization)
    else:
        arguments |= dict(
            enforce_eager=True,  # compiling takes longer than a small run
            block_size=32, kv_cache_memory_bytes=1 << 30,
            # A prompt is computed in one step: the longest must fit beside a full batch that
            # decodes.
            max_num_batched_tokens=max(8192, args.max_model_len + 256),
            enable_chunked_prefill=False)  # with request seeds vLLM's CPU build crashes on it
    engine_args = json.loads(args.engine_args or "{}")
    # The trainer's logits are float32; a bfloat16 head would round the engine's.
    arguments["hf_overrides"] = {"head_dtype": "float32"} | engine_args.pop("hf_overrides", {})
    return arguments | engine_args


@shown("asking vLLM about the model")
def check_model(args, device: torch.device, vocab_size: int):
    """Raises BadInput if vLLM can't generate text with args.model, --engine_args and the
    sampling parameters. Loads no weights. With --replay there is nothing to check."""
    if args.replay:
        return
    prepare_vllm(device, args.tp)
    from vllm import EngineArgs

    arguments = vllm_arguments(args.model, args, device)
    arguments.pop("compilation_config", None)  # vllm.LLM takes more forms of it
    with refusing(f"--model {args.model}, --engine_args {args.engine_args}: vLLM can't generate "
                  f"text with them, in a window of {args.max_model_len} tokens"):
        EngineArgs(**arguments).create_engine_config()
    for validate, kind in enumerate(("", "eval_")):
        with refusing(f"--{kind}sampling_args"):
            # Agent loops ask for so many tokens at most.
            limit = {"max_tokens": args.max_response_tokens}
            sampling_params(limit | args.sampling(validate), vocab_size)


def prepare_vllm(device, tp):
    """Sets the environment and makes the patches that vLLM needs before an engine is built."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in process: we step it ourselves
    # vLLM's external launcher wants ranks and an address also where there is one process.
    for setting in """VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 RANK=0 LOCAL_RANK=0
            WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500""".split():
        os.environ.setdefault(*setting.split("="))
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    from vllm.model_executor.models.transformers.base import Base

    # Of models that it has no code for, vLLM would decorate the class, to compile them: it is
    # the class of the trainer's model, too. They run as they are.
    Base._decorate_cls_for_torch_compile = lambda self, **settings: None
    if device.type != "cpu":
        return
    _patch_cpu_build()
    if tp > 1:
        from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

        # vLLM names a team's shared memory after its init method, which is "env://" for all
        # jobs of a machine. Nothing ever connects to the address given here: the process
        # group exists.
        address = [f"tcp://flatrl:{os.urandom(16).hex()}"]
        dist.broadcast_object_list(address)

        def distributed_args(self):
            return address[0], int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])

        ExecutorWithExternalLauncher._distributed_args = distributed_args


@functools.cache  # once a process: a second patch would wrap the first
def _patch_cpu_build():
    """Patches what vLLM's CPU build does in another way than colocation needs."""
    import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as moe
    import vllm.model_executor.models.config as models
    import vllm.v1.sample.sampler as sampler
    from vllm.model_executor.layers import activation, utils

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

    # XIELU is to compute in the model's dtype, not always in bfloat16.
    activation.XIELU.__init__ = functools.partialmethod(activation.XIELU.__init__, dtype=None)

    # Experts are repacked, too, but only at the first load: each load is made the first.
    setup_kernel = moe.UnquantizedFusedMoEMethod._setup_kernel

    def setup_kernel_anew(self, **weights):
        self.moe_kernel = None
        setup_kernel(self, **weights)

    moe.UnquantizedFusedMoEMethod._setup_kernel = setup_kernel_anew

    # This function gives the ranks of sampled tokens, which nobody reads. To compile it
    # takes 4 seconds in every process.
    count = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = getattr(count, "_torchdynamo_orig_callable", count)


# ---------------------------------------------------------------- weights into the engine


def load_into(model, named_tensors, config):
    """Copies (name in a checkpoint, tensor) pairs into vLLM's model, by its layerwise reload.

    Raises RuntimeError naming the tensor that vLLM refused, that came twice or is too
    large, or the parameters of the engine that got no tensor."""
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    names = dict(model.named_parameters())
    # While it reloads, a tied head is a parameter of its own: it gets no tensor.
    layerwise.initialize_layerwise_reload(model)
    fused = {name: parts for name, parts in fused_parts(model).items() if name in names}
    arrivals = _Arrivals(fused)
    with contextlib.ExitStack() as stack:
        stack.callback(layerwise.finalize_layerwise_reload, model, config)
        for name in fused:
            parameter = model.get_parameter(name)
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            stack.callback(setattr, parameter, "weight_loader", loader)
            parameter.weight_loader = arrivals.watched(name, loader)
        try:
            model.load_weights(arrivals.one_by_one(named_tensors))
        except Exception as error:  # vLLM's own are bare assertions, among others
            # vLLM forgets the layers of which a part came: they can't be finalized.
            for module in model.modules():
                layerwise.get_layerwise_info(module).load_numel = 0
            problem = str(error) or repr(error)
            raise RuntimeError(
                f"weight sync failed at {arrivals.current}: {problem}") from error
    for pair in arrivals.not_loaded.items():
        arrivals.n_elements.update(model.load_weights([pair]))
    missing = arrivals.missing()
    if missing:
        raise RuntimeError("weight sync incomplete, these parameters of the engine got no "
                           f"tensor: {missing}")


class _Arrivals:
    """The tensors of one sync, and which of the engine's parameters they arrive at.

    fused: `fused_parts` of the engine's model."""

    def __init__(self, fused):
        self.fused = fused
        self.current = "the first parameter"  # the name of the tensor that vLLM has now
        self.shapes = {}  # of the tensors that came, by name
        # Those that no parameter's loader took, by name: vLLM copied them without a loader, and
        # its reload has lost them.
        self.not_loaded = {}
        self.n_elements = Counter()  # that arrived, by parameter or part of a fused one

    def one_by_one(self, named_tensors):
        """Yields the same pairs. Raises RuntimeError where a name comes twice."""
        for name, tensor in named_tensors:
            self.current = name
            if name in self.shapes:
                raise RuntimeError("it came twice")
            self.shapes[name] = tensor.shape
            self.not_loaded[name] = tensor
            yield name, tensor

    def watched(self, parameter, loader):
        """Returns the parameter's loader, which now counts what it loads, and raises
        RuntimeError for a tensor too large: vLLM would take its first rows."""
        from vllm.distributed import get_tp_group

        parts = self.fused[parameter]

        @functools.wraps(loader)
        def load(*args, **kwargs):
            """Loads the present tensor, or a part of it, and counts its elements."""
            # A tensor of k_proj.bias is for that part of the parameter qkv_proj.bias.
            ending = "." + ".".join(self.current.split(".")[-2:])
            part = next((name for name in parts if name.endswith(ending)), parameter)
            shape = self.shapes[self.current]
            room = parts.get(part)
            if room is not None and shape.numel() > room.numel() * get_tp_group().world_size:
                raise RuntimeError(
                    f"its shape is {tuple(shape)}, the engine's {tuple(room.shape)}")
            self.n_elements[part] += shape.numel()
            self.not_loaded.pop(self.current, None)
            return loader(*args, **kwargs)

        return load

    def missing(self):
        """Returns the names of parameters, or parts of fused ones, that got no tensor; of
        experts, which share a parameter, also those that got too few."""
        names = []
        for parameter, parts in self.fused.items():
            for part, tensor in parts.items():
                n_needed = tensor.numel() if ".experts." in parameter else 1
                if max(self.n_elements[part], self.n_elements[parameter]) < n_needed:
                    names.append(part)
        return sorted(names)


def fused_parts(model):
    """Returns {parameter of the engine: {name of a part before fusing: its rows here}}.

    A qkv_proj consists of q_proj, k_proj and v_proj; most parameters consist of themselves."""
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


def never_sample(model, never):
    """Gives these ids no probability (vllm#13175).

    never: ids, or slices of ids. The logits themselves are changed, so that what samples
    from them and what reports logprobs agree."""
    compute_logits = model.compute_logits

    def limited(*args, **kwargs):
        logits = compute_logits(*args, **kwargs)
        if logits is not None:  # a rank that does not sample has none
            for ids in never:
                logits[..., ids] = float("-inf")
        return logits

    model.compute_logits = limited
