"""Models that can't be trained here, or that vLLM would refuse after its start."""

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
