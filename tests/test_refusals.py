"""Models that can't be trained here, and flags that vLLM would refuse after its start."""

import pytest
import torch
import transformers
from conftest import SMALL_CACHE

import train
from flatrl import models
from flatrl.bad_input import BadInput
from flatrl.vllm_engine import check_model
from train import Args

GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4}}


def check_engine(args: Args):
    check_model(args, torch.device("cpu"))


@pytest.mark.parametrize("check, model_type, architecture, more, said", [
    (models.load_tokenizer, "qwen3", "Qwen3ForCausalLM", GPTQ, "is quantised: only unquantised"),
    (train.Policy, "vit", "ViTForImageClassification", {}, "can't be loaded for training"),
    (check_engine, "codegen", "CodeGenForCausalLM", {}, "['CodeGenForCausalLM'] are not supported"),
])  # fmt: skip
def test_models(check, model_type, architecture, more, said, tmp_path, tiny_model, process_group):
    transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    sizes = dict(vocab_size=272, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.AutoConfig.for_model(model_type, **sizes, **more)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    args = Args(model=str(tmp_path), dtype="float32", max_model_len=128, engine_args=SMALL_CACHE)
    with pytest.raises(BadInput) as caught:
        check(args)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("flags, said", [
    ({"engine_args": '{"block_size": "abc"}'}, "block_size Input should be a valid integer"),
    ({"sampling_args": '{"a": 1}'}, "--sampling_args: vLLM has no sampling parameter a"),
    ({"sampling_args": '{"min_tokens": 129}'}, "must be less than or equal to max_tokens=128"),
])  # fmt: skip
def test_flags(flags, said, tiny_model, process_group):
    with pytest.raises(BadInput, match=said):
        check_engine(Args(model=tiny_model, dtype="float32", max_model_len=128, **flags))
