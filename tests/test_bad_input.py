"""Bad flags, rows and task files: one line each, never a traceback.

In process, without an engine."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import data
import train
from examples import calculator
from flatrl.bad_input import BadInput
from train import Args, check_args, parse_args

CHAT = [{"role": "user", "content": "hi"}]


def refused(function, naming: str) -> None:
    with pytest.raises(BadInput) as caught:
        function()
    text = str(caught.value)
    assert "\n" not in text and naming in text


@pytest.mark.parametrize("flag, said", [
    ("--lr=nan", "--lr"),
    ('--agent_args={"max_images": 0}', "--agent_args"),
    ("--num_step=3", "did you mean --num_steps?"),
])  # fmt: skip
def test_flags(flag, said):
    refused(lambda: check_args(parse_args([flag])), naming=said)


ROWS = [
    ([{"prompt": CHAT}, {"x": "hello"}], "row 1 of load('train') has no column 'prompt'"),
    ([{"prompt": "[{'role': 'user', 'content': 'hi'}]"}], "looks like chat messages, but is not"),
    ([{"prompt": CHAT, "tools_kwargs": {"nobody": {}}}], "nobody"),
    ([{"prompt": CHAT, "tools": [{}]}], "'tools' is not read"),
    ([{"prompt": CHAT, "demonstration": CHAT}], "row 0 of"),
]


@pytest.mark.parametrize("rows, said", ROWS, ids=str)
def test_rows(rows, said, tokenizer):
    def load():
        loaded = data.load_rows(SimpleNamespace(load=lambda split: rows), "train")
        data.filter_overlong(loaded, tokenizer, calculator, Args(max_prompt_tokens=1000))

    refused(load, naming=said)


REWARD = "def reward(output, row): return 0\n"


def test_a_task_that_raises_is_refused_with_its_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(REWARD + "def load(split): raise KeyError('a')")
    said = "list of rows, line 2: KeyError: 'a'"
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
