"""Bad flags, rows and task files: one line each, never a traceback.

In process, without an engine."""

import dataclasses
from types import SimpleNamespace

import pytest

import data
from agent_loop import BadInput
from train import Args, check_args, check_registered, parse_args

CHAT = [{"role": "user", "content": "hi"}]


def refused(function, *args, naming: str = "") -> None:
    with pytest.raises(BadInput) as caught:
        function(*args)
    text = str(caught.value)
    assert text.strip() and "\n" not in text and naming in text


def fields(kind: str) -> list[str]:
    return [field.name for field in dataclasses.fields(Args) if kind in str(field.type)]


FLAGS = [
    *[(name, value) for name in fields("float") for value in ("nan", "x")],
    *[(name, "-1") for name in fields("float") if name != "stop_at_reward"],
    *[(name, value) for name in fields("int") for value in ("-2", "1.5")],
    *[(name, "maybe") for name in fields("bool")],
    ("shard", "half"),
    ("task", ""),
    ("model", ""),
    ("rollout_correction", "x"),
    ("sampling_args", '{"temperature": 1}'),
    ("chat_template_args", '{"tools": false}'),
]


@pytest.mark.parametrize("name, value", FLAGS)
def test_flags(name, value):
    refused(lambda: check_args(parse_args([f"--{name}", value])), naming=f"--{name}")


@pytest.mark.parametrize("kind, said", [
    ("x", "--kl_kind x: choose from k1, abs, k2"),
    ("top0", "or topK with a number, as in top16"),
    ("top4", "--kl_kind top4 is a loss, no reward of the sampled token: give --kl_in loss"),
])  # fmt: skip
def test_kinds_of_kl(kind, said):
    teacher = {"algo": "opd", "ref_model": "x", "kl_kind": kind}
    refused(check_args, Args(**teacher), naming=said)
    check_args(Args(**teacher | {"kl_in": "loss", "kl_kind": "top4"}))


def test_an_agent_that_is_unknown_though_rows_name_their_own():
    refused(check_registered, Args(agent="nobody"), naming="no agent loop 'nobody': choose from ")


ROWS = [
    {"prompt": CHAT},
    [{"prompt": [{"role": "user"}]}],
    [{"prompt": [{"role": "user", "content": [{"type": "video"}]}]}],
    [{"prompt": [{"role": "assistant", "tool_calls": "x"}]}],
    [{"prompt": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": []}]}]}],
    [{"prompt": CHAT, "extra_info": "x"}],
    [{"prompt": CHAT, "tools_kwargs": {"nobody": {}}}],
    [{"prompt": CHAT, "agent_name": "nobody"}],
    [{"prompt": CHAT, "interaction_kwargs": {"name": "nobody"}}],
    [{"prompt": CHAT, "sampling_params": 1}],
]


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_rows(rows, tokenizer):
    from examples import calculator

    def load():
        loaded = data.load_rows(SimpleNamespace(load=lambda split: rows), "train")
        data.filter_overlong(loaded, tokenizer, calculator, Args(max_prompt_tokens=1000))

    refused(load)


TASK = f"def load(split): return [{{'prompt': {CHAT}}}]\ndef reward(output, row): return 0\n"
TOOL = "from agent_loop import *\nclass T(Tool):\n  name, schema = 'x', {}\n"
TASKS = [
    "def (",
    TASK + "TOOLS = 5",
    TASK + TOOL + "TOOLS = [T]",
    TASK + "def bare(x): return x\nTOOLS = [bare]",
    TASK + "def load(split): return 5",
    TASK + "def load(split): raise KeyError('a')",
]


@pytest.mark.parametrize("text", TASKS)
def test_task_files(text, tmp_path):
    (tmp_path / "task.py").write_text(text)
    refused(lambda: data.load_rows(data.load_task(str(tmp_path / "task.py")), "train"))
