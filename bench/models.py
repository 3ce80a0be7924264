"""For which architectures do the engine and the trainer agree? (docs/models.md's table)

    python bench/models.py                         # all; minutes each with an empty vLLM cache
    python bench/models.py qwen3 qwen3_moe         # some

Each model is tiny and random. Three times the weights are changed and synced, the engine samples,
and the trainer scores the sampled tokens. The table has the largest mean and the largest single
difference of their logprobs in nats, or the reason why a model does not run.
"""

import json
import multiprocessing
import os
import random
import tempfile
from concurrent.futures import ProcessPoolExecutor

os.environ.setdefault("OMP_NUM_THREADS", "1")

import common

STEPS = 3  # how often engine and trainer are compared
PROMPTS = 12  # each time
RESPONSE = 32  # tokens
BOUND = 1e-5  # of the mean difference, in nats
BOUND_IN_BFLOAT16 = 0.05  # a dense model ("qwen3 (bfloat16)") has 0.025
COMMON = dict(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=1024,
    initializer_range=0.1,
    tie_word_embeddings=False,
    bos_token_id=None,
)
WINDOW = dict(sliding_window=16)
LAYERS = WINDOW | dict(layer_types=["sliding_attention", "full_attention"] * 2)
TIED = dict(tie_word_embeddings=True)
FEW_EXPERTS = dict(num_experts=4, num_experts_per_tok=2)
LOCAL_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
MOE = FEW_EXPERTS | dict(moe_intermediate_size=64)
EVERY = MOE | dict(num_experts_per_tok=4)  # no route can flip
SHARED = dict(shared_expert_intermediate_size=64)
LINEAR = dict(
    layer_types=["linear_attention", "full_attention"] * 2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
)
# vLLM's CPU build has gated delta nets in bfloat16 only.
HALF = dict(dtype="bfloat16")
VISION = dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=128)
MAMBA = dict(mamba_d_head=32, mamba_d_state=16, mamba_chunk_size=16)
LATENT = dict(
    topk_method="noaux_tc",  # this and the next are in real files
    scoring_func="sigmoid",
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=64,
    kv_lora_rank=512,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=32,
    head_dim=64,
    num_key_value_heads=4,
)


def like(kind: str, *parts: dict, **entries) -> tuple[str, dict]:
    """Returns transformers' configuration class, and the entries that differ from COMMON."""
    for part in parts:
        entries = part | entries
    return kind, entries


ARCHITECTURES = {
    "qwen2": like("Qwen2Config"),
    "qwen2 (tied)": like("Qwen2Config", TIED),
    "qwen3": like("Qwen3Config"),
    "llama": like("LlamaConfig"),
    "mistral": like("MistralConfig", sliding_window=None),
    "mistral (window)": like("MistralConfig", WINDOW),
    "ministral": like("MinistralConfig", LAYERS),
    "ministral3": like("Ministral3Config"),
    "smollm3": like("SmolLM3Config", no_rope_layers=[1, 1, 1, 0]),
    "olmo2": like("Olmo2Config"),
    "olmo3": like("Olmo3Config", LAYERS),
    "phi3": like("Phi3Config"),
    "gemma2": like("Gemma2Config", LAYERS, TIED, query_pre_attn_scalar=32),
    "gemma3": like("Gemma3TextConfig", LAYERS, TIED, query_pre_attn_scalar=32),
    "gemma4": like(
        "Gemma4TextConfig",
        LAYERS,
        TIED,
        hidden_size_per_layer_input=0,
        global_head_dim=32,
        num_kv_shared_layers=0,
    ),
    "granite": like("GraniteConfig", logits_scaling=1.0, attention_multiplier=0.2),
    "granite (logits_scaling)": like("GraniteConfig", logits_scaling=4.0, attention_multiplier=0.2),
    "glm4": like("Glm4Config"),
    "cohere2": like("Cohere2Config", LAYERS, TIED),
    "exaone4": like("Exaone4Config", LAYERS, sliding_window_pattern=2),
    "ernie4_5": like("Ernie4_5Config"),
    "seed_oss": like("SeedOssConfig"),
    "hunyuan_v1_dense": like("HunYuanDenseV1Config"),
    "apertus": like("ApertusConfig"),
    "arcee": like("ArceeConfig"),
    "gpt2": like("GPT2Config", TIED, n_embd=128, n_layer=4, n_head=4, n_positions=1024),
    "gpt_neox": like("GPTNeoXConfig", num_key_value_heads=4),  # vLLM reads the entry all the same
    "stablelm": like("StableLmConfig"),
    "nemotron": like("NemotronConfig"),
    "nanochat": like("NanoChatConfig"),
    "qwen2_moe": like("Qwen2MoeConfig", MOE, SHARED),
    "qwen3_moe": like("Qwen3MoeConfig", MOE),
    "mixtral": like("MixtralConfig", LOCAL_EXPERTS, sliding_window=None),
    "olmoe": like("OlmoeConfig", FEW_EXPERTS, intermediate_size=64),
    "gpt_oss": like("GptOssConfig", LAYERS, LOCAL_EXPERTS, intermediate_size=64),
    "gpt_oss (tied)": like("GptOssConfig", LAYERS, LOCAL_EXPERTS, TIED, intermediate_size=64),
    "glm4_moe (tied)": like(
        "Glm4MoeConfig",
        MOE,
        TIED,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        use_qk_norm=True,
    ),
    "deepseek_v3": like("DeepseekV3Config", LATENT),
    "qwen3 (bfloat16)": like("Qwen3Config", HALF),
    "qwen3_moe (bfloat16)": like("Qwen3MoeConfig", HALF, MOE),
    "qwen3_5": like("Qwen3_5TextConfig", HALF, LINEAR),
    "qwen3_5 (with vision)": like("Qwen3_5Config", HALF, text_config=LINEAR, vision_config=VISION),
    "qwen3_5_moe": like("Qwen3_5MoeTextConfig", HALF, MOE, SHARED, LINEAR),
    "qwen3_5_moe (all experts)": like("Qwen3_5MoeTextConfig", HALF, EVERY, SHARED, LINEAR),
    "qwen3_next": like("Qwen3NextConfig", HALF, MOE, SHARED, LINEAR),
    "falcon_h1": like("FalconH1Config", MAMBA, mamba_d_ssm=128, mamba_n_heads=4),
    "granitemoehybrid": like(
        "GraniteMoeHybridConfig",
        MAMBA,
        LOCAL_EXPERTS,
        layer_types=["mamba", "attention"] * 2,
        mamba_n_heads=8,
        shared_intermediate_size=64,
        position_embedding_type="rope",
    ),
    "lfm2": like(
        "Lfm2Config",
        TIED,  # as vLLM's always is
        layer_types=["conv", "full_attention"] * 2,
        conv_dim=128,
        block_dim=128,  # in real checkpoints' files; transformers has no such entry
        block_auto_adjust_ff_dim=False,
    ),
    "mamba2": like(
        "Mamba2Config", num_heads=8, head_dim=32, state_size=16, n_groups=1, chunk_size=16
    ),
    "nemotron_h": like(
        "NemotronHConfig",
        hybrid_override_pattern="M*-M",
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=1,
        chunk_size=16,
    ),
}


def build(name: str, folder: str) -> None:
    """Writes the tokenizer and a random model of the architecture to a folder."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(common.random_model(folder))
    kind, entries = ARCHITECTURES[name]
    eos = tokenizer.eos_token_id
    ids = dict(vocab_size=len(tokenizer), eos_token_id=eos, pad_token_id=tokenizer.pad_token_id)
    entries = COMMON | ids | entries
    auto_class = transformers.AutoModelForCausalLM
    if "vision_config" in entries:
        entries["text_config"] = COMMON | ids | entries["text_config"]
        auto_class = transformers.AutoModelForImageTextToText
    entries.pop("dtype", None)  # written in float32
    model = auto_class.from_config(getattr(transformers, kind)(**entries))
    model.generation_config = transformers.GenerationConfig(eos_token_id=eos)
    change(model, 0)
    model.save_pretrained(folder)


def change(model, step: int) -> None:
    """Moves every parameter and saved buffer by a fifth of its own size, norms and biases too."""
    import torch

    generator = torch.Generator().manual_seed(step)
    seen = set()
    with torch.no_grad():
        for x in model.state_dict(keep_vars=True).values():
            if not x.is_floating_point() or id(x) in seen:
                continue
            seen.add(id(x))
            size = x.std().item() if x.numel() > 1 else 0.0
            noise = torch.randn(x.shape, generator=generator)
            x.add_(noise * max(size, 0.05) * 0.2)


def differences(name: str) -> dict:
    """Builds one architecture; returns the largest differences of engine and trainer."""
    import train
    from flatrl.processes import Background

    sampling = dict(temperature=1.0, max_tokens=RESPONSE, ignore_eos=True)
    means = []
    maxima = []
    with tempfile.TemporaryDirectory() as folder:
        build(name, folder)
        args = train.Args(
            model=folder,
            dtype=ARCHITECTURES[name][1].get("dtype", "float32"),
            max_prompt_tokens=64,
            max_response_tokens=64,
            engine_args=json.dumps({"kv_cache_memory_bytes": 1 << 27}),
            tokens_per_micro_batch=2048,
        )
        engine, policy = common.engine_and_policy(args)
        background = Background()
        for step in range(STEPS):
            change(policy.model, step + 1)
            train.sync(engine, policy, step)
            draw = random.Random(step)
            prompts = [[draw.randrange(3, 250) for _ in range(5 + 4 * i)] for i in range(PROMPTS)]
            outputs = common.generate(engine, background, prompts, **sampling)
            engine.sleep()
            distances = common.distances(policy, outputs, args)
            means.append(distances.mean().item())
            maxima.append(distances.max().item())
    return {"mean": max(means), "max": max(maxima)}


def compare(name: str) -> dict:
    """Returns the row of an architecture."""
    from flatrl.bad_input import reason

    row = {"name": name}
    try:
        row |= differences(name)
        is_half = ARCHITECTURES[name][1].get("dtype") == "bfloat16"
        bound = BOUND_IN_BFLOAT16 if is_half else BOUND
        agrees = row["mean"] < bound and row["max"] < 100 * bound
        verdict = "agrees" if agrees else "**disagrees**"
    except Exception as error:
        verdict = f"fails: {reason(error)}"
    return row | {"verdict": verdict.replace("|", "/")}


def main() -> None:
    """Compares the architectures, each in a process of its own, and prints the table."""
    parser = common.make_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="ARCHITECTURE", help=", ".join(ARCHITECTURES))
    options = parser.parse_args()
    print("| architecture | engine and trainer | mean | max |\n| --- | --- | --- | --- |")
    rows = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for row in pool.map(compare, options.names or ARCHITECTURES):
            numbers = [f"{row[key]:.1e}" if key in row else "" for key in ("mean", "max")]
            print(f"| {row['name']} | {row['verdict']} | {' | '.join(numbers)} |", flush=True)
            rows.append(row)
    common.write_rows(options.out, rows)


if __name__ == "__main__":
    main()
