"""Models and flags that can't be trained here: one line before an engine starts."""

import pytest
import torch
import transformers
from conftest import SMALL_CACHE

import train
from flatrl import models
from flatrl.bad_input import BadInput
from flatrl.vllm_engine import check_model
from train import Args

CPU = torch.device("cpu")
GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4}}


def save_config(folder, model_type: str, architecture: str, **more):
    sizes = dict(vocab_size=272, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.AutoConfig.for_model(model_type, **sizes, **more)
    config.architectures = [architecture]
    config.save_pretrained(folder)


def args_of(model, **flags) -> Args:
    return Args(model=str(model), dtype="float32", max_model_len=128, **flags)


def refusal(function, *arguments) -> str:
    with pytest.raises(BadInput) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("load, names, more, said", [
    (models.load_tokenizer, ("qwen3", "Qwen3ForCausalLM"), GPTQ, "is quantised: only unquantised"),
    (train.Policy, ("vit", "ViTForImageClassification"), {}, "can't be loaded for training"),
])  # fmt: skip
def test_a_model_that_can_not_be_trained(load, names, more, said, tmp_path):
    save_config(tmp_path, *names, **more)
    assert f"{tmp_path} {said}" in refusal(load, args_of(tmp_path))


def test_a_model_that_vllm_does_not_serve(tmp_path, tiny_model, process_group):
    transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    save_config(tmp_path, "codegen", "CodeGenForCausalLM")
    line = refusal(check_model, args_of(tmp_path, engine_args=SMALL_CACHE), CPU)
    assert "['CodeGenForCausalLM'] are not supported" in line
    check_model(args_of(tiny_model, engine_args=SMALL_CACHE), CPU)  # as for one that it serves


@pytest.mark.parametrize("flag, value, said", [
    ("engine_args", '{"block_size": "abc"}', "block_size Input should be a valid integer"),
    ("sampling_args", '{"a": 1}', "--sampling_args: vLLM has no sampling parameter a"),
    ("sampling_args", '{"min_tokens": 129}', "must be less than or equal to max_tokens=128"),
])  # fmt: skip
def test_flags_that_the_engine_would_refuse_later(flag, value, said, tiny_model, process_group):
    assert said in refusal(check_model, args_of(tiny_model, **{flag: value}), CPU)
