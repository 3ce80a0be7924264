"""Compares engine and trainer for tiny models of many architectures: docs/models.md's table.

    python bench/models.py                         # all, some minutes each on a CPU with an empty vLLM cache
    python bench/models.py qwen3 qwen3_moe         # some
    python bench/models.py --reference eager       # transformers' own eager forward instead of flatrl's Policy

Compared are the logprobs of sampled tokens. Each model has hidden size 128, 4 layers, the
calculator task's tokenizer, and weights large enough for logits that spread; each is built in
a process of its own. Three times the policy's weights are changed at random and synced into
the engine, the engine samples, and the trainer scores the sampled tokens. The table has a row
for each architecture: whether engine and trainer agree, or why it does not run, and the
largest mean and maximum of |engine - trainer| of the three times.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import common

WINDOW = dict(sliding_window=16)
TIED = dict(tie_word_embeddings=True)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
LAYERS = ["sliding_attention", "full_attention"] * 2
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32)
NO_KV = dict(num_key_value_heads=4)  # vLLM reads it also where a configuration has no such entry
# name -> (configuration class of transformers, what differs from COMMON)
ARCHITECTURES = {
    "qwen2": ("Qwen2Config", {}),
    "qwen2 (tied)": ("Qwen2Config", TIED),
    "qwen3": ("Qwen3Config", {}),
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", dict(sliding_window=None)),
    "mistral (window)": ("MistralConfig", WINDOW),
    "ministral": ("MinistralConfig", WINDOW | dict(layer_types=LAYERS)),
    "ministral3": ("Ministral3Config", {}),
    "smollm3": ("SmolLM3Config", dict(no_rope_layers=[1, 1, 1, 0])),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", WINDOW | dict(layer_types=LAYERS)),
    "phi3": ("Phi3Config", {}),
    "gemma2": ("Gemma2Config", WINDOW | TIED | dict(query_pre_attn_scalar=32, layer_types=LAYERS)),
    "gemma3": ("Gemma3TextConfig", WINDOW | TIED | dict(query_pre_attn_scalar=32, layer_types=LAYERS)),
    "gemma4": ("Gemma4TextConfig", WINDOW | TIED | dict(layer_types=LAYERS, hidden_size_per_layer_input=0,
                                                 global_head_dim=32, num_kv_shared_layers=0)),
    "granite": ("GraniteConfig", dict(logits_scaling=1.0, attention_multiplier=0.2)),
    "granite (logits_scaling)": ("GraniteConfig", dict(logits_scaling=4.0, attention_multiplier=0.2)),
    "glm4": ("Glm4Config", {}),
    "cohere2": ("Cohere2Config", WINDOW | TIED | dict(layer_types=LAYERS)),
    "exaone4": ("Exaone4Config", WINDOW | dict(layer_types=LAYERS, sliding_window_pattern=2)),
    "ernie4_5": ("Ernie4_5Config", {}),
    "seed_oss": ("SeedOssConfig", {}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {}),
    "apertus": ("ApertusConfig", {}),
    "arcee": ("ArceeConfig", {}),
    "gpt2": ("GPT2Config", dict(n_embd=128, n_layer=4, n_head=4, n_positions=1024, **TIED)),
    "gpt_neox": ("GPTNeoXConfig", NO_KV),
    "stablelm": ("StableLmConfig", {}),
    "nemotron": ("NemotronConfig", {}),
    "nanochat": ("NanoChatConfig", {}),
    "qwen2_moe": ("Qwen2MoeConfig", MOE | dict(shared_expert_intermediate_size=64)),
    "qwen3_moe": ("Qwen3MoeConfig", MOE),
    "mixtral": ("MixtralConfig", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "olmoe": ("OlmoeConfig", dict(num_experts=4, num_experts_per_tok=2, intermediate_size=64)),
    "gpt_oss": ("GptOssConfig", WINDOW | dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=64,
                                              layer_types=LAYERS)),
    "deepseek_v3": ("DeepseekV3Config", dict(
        topk_method="noaux_tc",
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=64, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64,
        v_head_dim=32, head_dim=64, num_key_value_heads=4)),
    "qwen3_5": ("Qwen3_5TextConfig", dict(
        layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=32, linear_value_head_dim=32)),
    "qwen3_next": ("Qwen3NextConfig", MOE | dict(
        layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=32, linear_value_head_dim=32, shared_expert_intermediate_size=64)),
    "falcon_h1": ("FalconH1Config", dict(mamba_d_ssm=128, mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16,
                                         mamba_chunk_size=16)),
    "granitemoehybrid": ("GraniteMoeHybridConfig", dict(
        layer_types=["mamba", "attention"] * 2, mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16, num_local_experts=4,
        num_experts_per_tok=2, shared_intermediate_size=64, position_embedding_type="rope", mamba_chunk_size=16)),
    "lfm2": ("Lfm2Config", dict(layer_types=["conv", "full_attention"] * 2, conv_dim=128,
                                block_auto_adjust_ff_dim=False)),
    "mamba2": ("Mamba2Config", dict(num_heads=8, head_dim=32, state_size=16, n_groups=1, chunk_size=16)),
    "nemotron_h": ("NemotronHConfig", dict(hybrid_override_pattern="M*-M", mamba_num_heads=8, mamba_head_dim=32,
                                           ssm_state_size=16, n_groups=1, chunk_size=16)),
}  # fmt: skip
COMMON = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=4, max_position_embeddings=1024, initializer_range=0.1,
    tie_word_embeddings=False, bos_token_id=None, **HEADS,
)  # fmt: skip
STEPS = 3  # how often engine and trainer are compared
PROMPTS = 12  # each time
RESPONSE = 32  # tokens


def build(name: str, folder: Path) -> None:
    """Writes the tokenizer and a random model of the architecture to a folder."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(common.random_model(folder))
    kind, more = ARCHITECTURES[name]
    ids = dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    config = getattr(transformers, kind)(**(COMMON | ids | more))
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config = transformers.GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    change(model, 0)
    model.save_pretrained(folder)


def change(model, step: int) -> None:
    """Moves every parameter (and buffer of a checkpoint) by a fifth of its own size, the
    norms' and biases' too."""
    import torch

    generator = torch.Generator().manual_seed(step)
    seen = set()
    with torch.no_grad():
        for x in model.state_dict(keep_vars=True).values():
            if x.is_floating_point() and id(x) not in seen:
                seen.add(id(x))
                size = x.std().item() if x.numel() > 1 else 0.0
                x.add_(torch.randn(x.shape, generator=generator) * max(size, 0.05) * 0.2)


def sample(engine, background, step: int) -> list:
    """Returns trajectories of one turn, with prompts of several lengths."""
    import random

    generator = random.Random(step)
    prompts = []
    for i in range(PROMPTS):
        prompts.append([generator.randrange(3, 250) for _ in range(5 + 4 * i)])
    answers = common.generate(engine, background, prompts, temperature=1.0, max_tokens=RESPONSE, ignore_eos=True)
    return common.as_outputs(prompts, answers)


def eager_scores(model, outputs: list, vocab_size: int) -> list:
    """Returns the logprobs of the sampled tokens by transformers alone, one trajectory at a
    time."""
    import torch

    scores = []
    for output in outputs:
        token_ids = torch.tensor([output.prompt_ids + output.response_ids])
        with torch.no_grad():
            logits = model(token_ids, use_cache=False).logits
        of_response = logits[0, len(output.prompt_ids) - 1 : -1, :vocab_size].float()
        sampled = torch.tensor(output.response_ids)[:, None]
        scores.append(of_response.log_softmax(-1).gather(1, sampled)[:, 0])
    return scores


def policy_scores(policy, outputs: list, args) -> list:
    """Returns the same by flatrl's own trainer."""
    import data
    import train

    batch = data.collate(outputs)
    mask = batch["response_mask"].bool()
    return [row[sampled] for row, sampled in zip(train.score_tokens(policy, batch, args), mask, strict=True)]


def load_trainer(args, vocab_size: int, options):
    """Returns what trains: flatrl's Policy, or with --reference eager transformers' model."""
    import torch
    from transformers import AutoModelForCausalLM

    import data
    import train

    if options.reference == "eager":
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager")
        return SimpleNamespace(model=model.eval(), dtype=model.dtype)
    data.register_packed_attention()
    return train.Policy(args, vocab_size)


def compare(name: str, options) -> dict:
    """Builds one architecture in this process, compares its engine and trainer, and returns
    the figures."""
    import torch

    import train
    from flatrl import devices, models
    from flatrl.processes import Background
    from rollout import Engine

    eager = options.reference == "eager"
    with tempfile.TemporaryDirectory() as folder:
        build(name, Path(folder))
        args = train.Args(
            model=folder, dtype=options.dtype, max_prompt_tokens=64, max_response_tokens=64,
            engine_args=json.dumps({"kv_cache_memory_bytes": 1 << 27} | json.loads(options.engine_args)),
            tokens_per_micro_batch=2048,
        )  # fmt: skip
        accelerator, _ = devices.start_processes(args)
        train.complete_flags(args, accelerator.device.type == "cuda")
        if eager:
            tokenizer = models.from_pretrained("AutoTokenizer", args, "has no tokenizer")
        else:
            _, tokenizer = models.load_tokenizer(args)
        vocab_size = max(tokenizer.get_vocab().values()) + 1
        policy = load_trainer(args, vocab_size, options) if options.trainer_first else None
        engine = Engine(folder, args, accelerator.device, [tokenizer.eos_token_id], vocab_size)
        policy = policy or load_trainer(args, vocab_size, options)
        background = Background()
        means = []
        maxima = []
        for step in range(STEPS):
            change(policy.model, step + 1)
            train.sync(engine, policy, step)
            outputs = sample(engine, background, step)
            engine.sleep()
            if eager:
                scores = eager_scores(policy.model, outputs, vocab_size)
            else:
                scores = policy_scores(policy, outputs, args)
            sampled = torch.cat([torch.tensor(output.response_logprobs) for output in outputs])
            difference = (torch.cat(scores) - sampled).abs()
            means.append(difference.mean().item())
            maxima.append(difference.max().item())
    surprise = -torch.cat(scores).mean().item()
    return {"mean": max(means), "max": max(maxima), "means": means, "surprise": surprise}


def compare_and_exit(name: str, options) -> None:
    """Compares one architecture, prints a JSON line for the parent, and ends this process at
    once: one that built an engine has nothing left to tidy up."""
    from agent_loop import BadInput

    try:
        result = compare(name, options)
    except BadInput as error:
        result = {"refused": str(error)}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
        traceback.print_exc()
    print("RESULT " + json.dumps(result), flush=True)
    sys.stderr.flush()
    os._exit(0)


def table_row(name: str, result: dict) -> str:
    """Returns an architecture's row of the table."""
    if "mean" in result:
        agrees = result["max"] < 1e-3 and result["mean"] < 1e-5
        verdict = "agrees" if agrees else "**disagrees**"
        return f"| {name} | {verdict} | {result['mean']:.1e} | {result['max']:.1e} |"
    kind = "refused" if "refused" in result else "fails"
    reason = result.get("refused", result.get("error", ""))
    reason = " ".join(reason.split()).replace("|", "/").split(" [type=")[0]
    return f"| {name} | {kind}: {reason[:160]} | | |"


def in_own_process(name: str, options) -> dict:
    """Runs `compare_and_exit` in a process of its own; returns its result."""
    words = [word for word in sys.argv[1:] if word not in options.names]
    command = [sys.executable, __file__, *words, "--one", name]
    result = {"error": "no answer"}
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout)
        for line in done.stdout.splitlines():
            if line.startswith("RESULT "):
                result = json.loads(line.removeprefix("RESULT "))
        if options.verbose:
            print(done.stdout, done.stderr, file=sys.stderr)
    return result


def main() -> None:
    """Compares the architectures, each in a process of its own, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ARCHITECTURE", help=", ".join(ARCHITECTURES))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--reference", default="policy", choices=["policy", "eager"])
    parser.add_argument("--trainer_first", action="store_true", help="build the trainer's model before the engine")
    parser.add_argument("--engine_args", default="{}", help="more arguments of vllm.LLM, as a JSON object")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for an architecture")
    parser.add_argument("--verbose", action="store_true", help="show what the processes print")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return compare_and_exit(options.names[0], options)
    print("| architecture | engine and trainer | mean | max |\n| --- | --- | --- | --- |", flush=True)
    for name in options.names or ARCHITECTURES:
        print(table_row(name, in_own_process(name, options)), flush=True)


if __name__ == "__main__":
    main()
