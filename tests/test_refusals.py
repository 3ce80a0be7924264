"""Models and flags that can't be trained here: one line before an engine starts."""


import pytest
import torch
import transformers
import vllm
from conftest import SMALL_CACHE

import train
from agent_loop import BadInput
from flatrl import models
from flatrl.vllm_engine import check_model
from rollout import Engine
from train import Args

CPU = torch.device("cpu")


def config_of(model_type: str, architecture: str, **more):
    sizes = dict(vocab_size=272, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.AutoConfig.for_model(model_type, **sizes, **more)
    config.architectures = [architecture]
    return config


def args_of(model, **flags) -> Args:
    return Args(model=str(model), dtype="float32", max_model_len=128, **flags)


def refusal(function, *arguments) -> str:
    with pytest.raises(BadInput) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


GPTQ = {"quant_method": "gptq", "bits": 4}


@pytest.mark.parametrize("load, names, more, said", [
    (models.load_tokenizer, ("qwen3", "Qwen3ForCausalLM"), {"quantization_config": GPTQ},
     "is quantised: only unquantised weights can be"),
    (train.Policy, ("vit", "ViTForImageClassification"), {},
     "can't be loaded for training: Unrecognized config"),
])  # fmt: skip
def test_a_model_that_can_not_be_trained(load, names, more, said, tmp_path):
    config_of(*names, **more).save_pretrained(tmp_path)
    assert f"{tmp_path} {said}" in refusal(load, args_of(tmp_path))


def test_a_model_that_vllm_does_not_serve(tmp_path, tiny_model, process_group):
    transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    config_of("codegen", "CodeGenForCausalLM").save_pretrained(tmp_path)
    line = refusal(check_model, args_of(tmp_path, engine_args=SMALL_CACHE), CPU)
    assert line.startswith(f"--model {tmp_path}, --engine_args ")
    assert "Model architectures ['CodeGenForCausalLM'] are not supported for now" in line
    check_model(args_of(tiny_model, engine_args=SMALL_CACHE), CPU)  # as for one that it serves


def test_an_engine_that_does_not_start_is_one_line(tiny_model, process_group, monkeypatch):
    def fails(**_):
        raise AssertionError("no room\nfor it")

    monkeypatch.setattr(vllm, "LLM", fails)
    line = refusal(Engine, tiny_model, args_of(tiny_model), CPU)
    assert line.endswith("vLLM's engine does not start: AssertionError: no room for it")


@pytest.mark.parametrize("flag, value, said", [
    ("engine_args", '{"block_size": "abc"}', "block_size Input should be a valid integer"),
    ("sampling_args", '{"a": 1}', "--sampling_args: vLLM has no sampling parameter a"),
    ("sampling_args", '{"min_tokens": 129}',
     "min_tokens must be less than or equal to max_tokens=128, got 129"),
])  # fmt: skip
def test_flags_that_the_engine_would_refuse_later(flag, value, said, tiny_model, process_group):
    assert said in refusal(check_model, args_of(tiny_model, **{flag: value}), CPU)
