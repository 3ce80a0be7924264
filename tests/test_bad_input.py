"""Bad flags, rows and task files: one line each, never a traceback.

In process, without an engine."""

import dataclasses
from types import SimpleNamespace

import pytest

import data
from agent_loop import BadInput
from train import Args, check_args, parse_args

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


BAD = {"name": "f", "arguments": "{"}
NO_PROMPT = "'prompt' must be a text or a list of chat messages"
ROWS = [
    ([], "load('train') has no rows"),
    ([{"prompt": CHAT}, {"x": "hello"}], "row 1 of load('train') has no column 'prompt'"),
    ([{"prompt": 5}], f"row 0 of load('train'): {NO_PROMPT}, got 5"),
    ([{"prompt": [{"content": "hello"}]}], NO_PROMPT),
    ({"prompt": CHAT}, ""),
    ([{"prompt": [{"role": "user"}]}], ""),
    ([{"prompt": [{"role": "user", "content": [{"type": "video"}]}]}], ""),
    ([{"prompt": [{"role": "assistant", "tool_calls": "x"}]}], ""),
    ([{"prompt": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": []}]}]}], ""),
    ([{"prompt": CHAT, "extra_info": "x"}], "extra_info"),
    ([{"prompt": CHAT, "tools_kwargs": {"nobody": {}}}], "nobody"),
    ([{"prompt": CHAT, "agent_name": "nobody"}], "nobody"),
    ([{"prompt": CHAT, "interaction_kwargs": {"name": "nobody"}}], "nobody"),
    ([{"prompt": CHAT, "sampling_params": 1}], "sampling_params"),
    ([{"prompt": CHAT, "demonstration": 5}], "row 0 of"),
    ([{"prompt": CHAT, "demonstration": []}], "row 0 of"),
    ([{"prompt": CHAT, "demonstration": [""]}], "row 0 of"),
    ([{"prompt": CHAT, "demonstration": CHAT}], "row 0 of"),
    ([{"prompt": CHAT, "demonstration": [{"role": "assistant", "tool_calls": [BAD]}]}], "row 0 of"),
]


@pytest.mark.parametrize("rows, said", ROWS, ids=str)
def test_rows(rows, said, tokenizer):
    from examples import calculator

    def load():
        loaded = data.load_rows(SimpleNamespace(load=lambda split: rows), "train")
        data.filter_overlong(loaded, tokenizer, calculator, Args(max_prompt_tokens=1000))

    refused(load, naming=said)


LOAD = f"def load(split): return [{{'prompt': {CHAT}}}]\n"
REWARD = "def reward(output, row): return 0\n"
TASK = LOAD + REWARD
TASKS = [
    (None, "no such Python file"),
    ("def (", "task.py does not import, line 1: SyntaxError"),
    (TASK + "import no_such_module\n", "task.py does not import, line 3: ModuleNotFoundError"),
    (REWARD, "task.py has no function load"),
    (TASK + "def load(split): return 5", "load"),
    (TASK + "def load(split): raise KeyError('a')", "load"),
]


@pytest.mark.parametrize("text, said", TASKS)
def test_task_files(text, said, tmp_path):
    path = tmp_path / "task.py"
    if text is not None:
        path.write_text(text)
    refused(lambda: data.load_rows(data.load_task(str(path)), "train"), naming=said)
