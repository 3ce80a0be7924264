"""Models that can't be trained here: one line before an engine starts, which names the feature and what would work."""

import pytest
import torch
import transformers
from accelerate import Accelerator
from conftest import SMALL_CACHE

import train
from agent_loop import BadInput
from flatrl import models
from flatrl.vllm_engine import check_model
from rollout import Engine
from train import Args

TINY = dict(vocab_size=272, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=256)


def config_of(model_type: str, architecture: str, **more):
    config = transformers.AutoConfig.for_model(model_type, **{**TINY, **more})
    config.architectures = [architecture]
    return config


@pytest.mark.parametrize(("config", "said"), [
    (config_of("t5", "T5ForConditionalGeneration"), "is an encoder-decoder model: choose one that is a decoder alone"),
    (config_of("bart", "BartForCausalLM"), "is an encoder-decoder model: choose one that is a decoder alone"),
    (config_of("deepseek_v3", "DeepseekV3ForCausalLM", kv_lora_rank=16),
     "seen to disagree: choose another, or --allow_mismatch"),
    (config_of("qwen3", "Qwen3ForCausalLM", quantization_config={"quant_method": "gptq", "bits": 4}),
     "is quantised: only unquantised weights can be trained, choose a version that has them"),
])  # fmt: skip
def test_what_the_trainer_cannot_train(config, said, tmp_path):
    """The configuration is all there is: no weights, no tokenizer."""
    config.save_pretrained(tmp_path)
    with pytest.raises(BadInput) as caught:
        models.load_tokenizer(Args(model=str(tmp_path), max_model_len=128))
    assert str(caught.value).startswith(f"--model {tmp_path}") and str(caught.value).endswith(said)


def test_a_model_that_generates_no_text(tmp_path):
    config_of("vit", "ViTForImageClassification").save_pretrained(tmp_path)
    with pytest.raises(BadInput, match=f"--model {tmp_path} can't be loaded for training: Unrecognized configuration"):
        train.Policy(Args(model=str(tmp_path)))


def test_weights_that_stay_in_less_than_float32_are_refused():
    class Kept(torch.nn.Linear):
        def float(self):
            return self

    net = Kept(2, 2, dtype=torch.bfloat16)
    with pytest.raises(BadInput, match="weight is torch.bfloat16: updates would be lost in it"):
        train.Learner(net, 1e-3, 1, Args(), Accelerator(cpu=True))


@pytest.mark.parametrize(("config", "said"), [
    (config_of("codegen", "CodeGenForCausalLM"),
     "Model architectures ['CodeGenForCausalLM'] are not supported for now"),
    (config_of("qwen2", "Qwen2ForNothing"),
     "Model architectures ['Qwen2ForNothing'] are not supported for now"),
    (None, ""),
])  # fmt: skip
def test_what_vllm_does_not_serve(config, said, tmp_path, tiny_model, process_group):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.save_pretrained(tmp_path)
    (config or transformers.AutoConfig.from_pretrained(tiny_model)).save_pretrained(tmp_path)
    args = Args(model=str(tmp_path), dtype="float32", max_model_len=128, engine_args=SMALL_CACHE)
    if config is None:
        return check_model(args, torch.device("cpu"), 272)
    with pytest.raises(BadInput) as caught:
        check_model(args, torch.device("cpu"), 272)
    assert str(caught.value).startswith(f"--model {tmp_path}, --engine_args ")
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("flags", "said"), [
    ({"engine_args": '{"block_size": "abc"}'}, "block_size Input should be a valid integer"),
    ({"engine_args": '{"a": 1}'}, "unexpected keyword argument 'a'"),
    ({"engine_args": '{"enforce_eager": 5}'}, "enforce_eager Input should be a valid boolean"),
    ({"engine_args": '{"hf_overrides": {"num_hidden_layers": 5}}'},
     "--engine_args: hf_overrides has num_hidden_layers 5, but the trainer's model has 3"),
    ({"sampling_args": '{"allowed_token_ids": [272]}'},
     "--sampling_args: allowed_token_ids has 272: must be int in [0, 271]"),
    ({"eval_sampling_args": '{"stop_token_ids": [272]}'}, "--eval_sampling_args: stop_token_ids has 272"),
    ({"sampling_args": '{"min_tokens": 129}'}, "min_tokens must be less than or equal to max_tokens=128, got 129"),
])  # fmt: skip
def test_what_the_engine_would_refuse_later(flags, said, tiny_model, process_group):
    with pytest.raises(BadInput) as caught:
        args = Args(model=tiny_model, dtype="float32", max_model_len=128, **flags)
        _, tokenizer = models.load_tokenizer(args)
        check_model(args, torch.device("cpu"), models.vocab_size(tokenizer))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_what_the_engine_refuses_at_its_start(tiny_model, process_group, monkeypatch):
    """vLLM's own words, when it meets a block_size that the device's attention does not take."""
    def starts(**arguments):
        raise ValueError(f"No common block size for {arguments['block_size']} (CPU_ATTN: [MultipleOf(32)]).")

    monkeypatch.setattr("vllm.LLM", starts)
    args = Args(model=tiny_model, dtype="float32", max_model_len=128, engine_args='{"block_size": 7}')
    said = "--engine_args {\"block_size\": 7}: vLLM's engine does not start: No common block size for 7 (CPU_ATTN: "
    with pytest.raises(BadInput) as caught:
        Engine(tiny_model, args, torch.device("cpu"))
    assert str(caught.value).startswith(said)


def test_what_is_trained_is_float32():
    """A step of 1e-6 is lost in bfloat16: nothing would be learnt, in silence."""
    net = torch.nn.Linear(2, 2).to(torch.bfloat16)
    learner = train.Learner(net, 1e-6, 1, Args(), Accelerator(cpu=True))
    assert {p.dtype for group in learner.optimizer.param_groups for p in group["params"]} == {torch.float32}
