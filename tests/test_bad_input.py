"""Bad flags, rows, task files and models: one line each, never a traceback.

In process, without an engine."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import SMALL_CACHE

import data
import train
from examples import calculator
from flatrl import models
from flatrl.bad_input import BadInput
from flatrl.vllm_engine import check_model
from train import Args, check_args, parse_args

CHAT = [{"role": "user", "content": "hi"}]


def refused(function, naming: str) -> None:
    with pytest.raises(BadInput) as caught:
        function()
    text = str(caught.value)
    assert "\n" not in text and naming in text


@pytest.mark.parametrize("flag, said", [
    ("--lr=nan", "--lr"),
    ("--rollout_correction=x", "--rollout_correction"),
    ('--agent_args={"max_images": 0}', "--agent_args"),
    ("--num_step=3", "did you mean --num_steps?"),
])  # fmt: skip
def test_flags(flag, said):
    refused(lambda: check_args(parse_args([flag])), naming=said)


BAD = {"name": "f", "arguments": "{"}
ROWS = [
    ([], "load('train') has no rows"),
    ([{"prompt": CHAT}, {"x": "hello"}], "row 1 of load('train') has no column 'prompt'"),
    ([{"prompt": "[{'role': 'user', 'content': 'hi'}]"}], "looks like chat messages, but is not"),
    ([{"prompt": '{"messages": [{"role": "user"}]}'}], "must be a text or a list of chat messages"),
    ([{"prompt": CHAT, "tools_kwargs": {"nobody": {}}}], "nobody"),
    ([{"prompt": CHAT, "tools": [{}]}], "'tools' is not read"),
    ([{"prompt": CHAT, "demonstration": CHAT}], "row 0 of"),
    ([{"prompt": CHAT, "demonstration": [{"role": "assistant", "tool_calls": [BAD]}]}], "row 0 of"),
]


@pytest.mark.parametrize("rows, said", ROWS, ids=str)
def test_rows(rows, said, tokenizer):
    def load():
        loaded = data.load_rows(SimpleNamespace(load=lambda split: rows), "train")
        data.filter_overlong(loaded, tokenizer, calculator, Args(max_prompt_tokens=1000))

    refused(load, naming=said)


REWARD = "def reward(output, row): return 0\n"
TASKS = [
    (None, "no such Python file"),
    ("def (", "task.py does not import: SyntaxError"),
    (REWARD, "task.py has no function load"),
    (REWARD + "def load(split): raise KeyError('a')", "list of rows, line 2: KeyError: 'a'"),
]


@pytest.mark.parametrize("text, said", TASKS)
def test_task_files(text, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("task.py").write_text(text)
    refused(lambda: data.load_rows(data.load_task("task.py"), "train"), naming=said)


def test_files_replace_load(process_group, tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(REWARD)
    Path("rows.jsonl").write_text('{"prompt": "hi"}')
    started = SimpleNamespace(device=SimpleNamespace(type="cpu")), None
    monkeypatch.setattr(train, "start_processes", lambda args: started)

    def rows(**more):
        args = Args(task="task.py", model=tiny_model, train_files=["rows.jsonl"], **more)
        return train.check_input(args)[-1]

    refused(rows, naming="no function load")
    assert rows(eval_every=-1)["train"][0]["prompt"] == CHAT
    assert len(rows(val_files=["rows.jsonl"])["val"]) == 1


GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
CPU = torch.device("cpu")


@pytest.mark.parametrize("check, model_type, architecture, more, said", [
    (models.load_tokenizer, "qwen3", "Qwen3ForCausalLM", GPTQ, "is quantised: only unquantised"),
    (train.Policy, "vit", "ViTForImageClassification", {}, "can't be loaded for training"),
    (lambda args: check_model(args, CPU), "codegen", "CodeGenForCausalLM", {}, "not supported"),
])  # fmt: skip
def test_models(check, model_type, architecture, more, said, tmp_path, tokenizer, process_group):
    tokenizer.save_pretrained(tmp_path)
    sizes = dict(vocab_size=272, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.AutoConfig.for_model(model_type, **sizes, **more)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    args = Args(model=str(tmp_path), dtype="float32", max_model_len=128, engine_args=SMALL_CACHE)
    refused(lambda: check(args), naming=said)
