"""Bad flags, rows and task files: one line each, never a traceback.

In process, without an engine."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import data
import train
from flatrl.bad_input import BadInput
from train import Args, check_args, parse_args

CHAT = [{"role": "user", "content": "hi"}]


def refused(function, naming: str = "") -> None:
    with pytest.raises(BadInput) as caught:
        function()
    text = str(caught.value)
    assert text.strip() and "\n" not in text and naming in text


FLAGS = [
    ("lr", "nan"),
    ("group_size", "0"),
    ("rollout_correction", "x"),
    ("agent_args", '{"max_images": 0}'),
    ("sampling_args", '{"temperature": 1}'),
]


@pytest.mark.parametrize("name, value", FLAGS)
def test_flags(name, value):
    refused(lambda: check_args(parse_args([f"--{name}", value])), naming=f"--{name}")


@pytest.mark.parametrize("word, meant", [
    ("--learning_rate", "lr"),
    ("--num_step=3", "num_steps"),
    ("--something-else", "help"),
])  # fmt: skip
def test_an_unknown_flag_gets_a_hint(word, meant):
    refused(lambda: parse_args([word]), naming=f"did you mean --{meant}?")


BAD = {"name": "f", "arguments": "{"}
ROWS = [
    ([], "load('train') has no rows"),
    ([{"prompt": CHAT}, {"x": "hello"}], "row 1 of load('train') has no column 'prompt'"),
    ([{"prompt": [{"content": "hello"}]}], "'prompt' must be a text or a list of chat messages"),
    ([{"prompt": "[{'role': 'user', 'content': 'hi'}]"}], "begins like chat messages, but is not"),
    ([{"prompt": CHAT, "extra_info": "x"}], "extra_info"),
    ([{"prompt": CHAT, "tools_kwargs": {"nobody": {}}}], "nobody"),
    ([{"prompt": CHAT, "tools_kwargs": {"calculator": "x"}}], "tools_kwargs: 'calculator' must be"),
    ([{"prompt": CHAT, "tools": [{}]}], "'tools' is not read"),
    ([{"prompt": CHAT, "chat_template_kwargs": {"x": 1}}], "--chat_template_args"),
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
TASKS = [
    (None, "no such Python file"),
    ("def (", "task.py does not import: SyntaxError"),
    ("\nimport helper_with_open_bracket", "was never closed (helper_with_open_bracket.py, line 1)"),
    ("import helper_without_x", "does not import, line 3 of helper_without_x.py: NameError"),
    (LOAD + REWARD + "import no_such_module\n", "does not import, line 3: ModuleNotFoundError"),
    (REWARD, "task.py has no function load"),
    (REWARD + "def load(split): raise KeyError('a')", "list of rows, line 2: KeyError: 'a'"),
]


@pytest.mark.parametrize("text, said", TASKS)
def test_task_files(text, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("helper_with_open_bracket.py").write_text("(")
    Path("helper_without_x.py").write_text("\n\nx\n")
    if text is not None:
        Path("task.py").write_text(text)
    refused(lambda: data.load_rows(data.load_task("task.py"), "train"), naming=said)


@pytest.mark.parametrize("files, is_enough", [
    ({"train_files": ["rows.jsonl"], "val_files": ["rows.jsonl"]}, True),
    ({"train_files": ["rows.jsonl"], "eval_every": -1}, True),
    ({"train_files": ["rows.jsonl"]}, False),
])  # fmt: skip
def test_files_replace_load(files, is_enough, process_group, tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(REWARD)
    Path("rows.jsonl").write_text('{"prompt": "hi"}')
    started = SimpleNamespace(device=SimpleNamespace(type="cpu")), None
    monkeypatch.setattr(train, "start_processes", lambda args: started)
    args = Args(task="task.py", model=tiny_model, **files)
    if not is_enough:
        refused(lambda: train.check_input(args), naming="no function load")
        return
    *_, rows = train.check_input(args)
    assert rows["train"][0]["prompt"] == CHAT
    assert len(rows["val"]) == len(files.get("val_files", ()))
