"""Bad flags, rows, task files, data files and model folders: one line each, never a traceback.

In process, without an engine."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import data
from agent_loop import BadInput
from flatrl import models
from flatrl.rows import check_row
from train import Args, check_args, check_registered, parse_args

H = [{"role": "user", "content": "hi"}]


def refused(function, *args, said: str = "") -> None:
    with pytest.raises(BadInput) as caught:
        function(*args)
    text = str(caught.value)
    assert text.strip() and "\n" not in text and said in text


def fields(kind: str) -> list[str]:
    return [field.name for field in dataclasses.fields(Args) if kind in str(field.type)]


FLAGS = [
    *[(name, value) for name in fields("float") for value in ("inf", "nan", "-1", "x")],
    *[(name, value) for name in fields("int") for value in ("-1", "1.5", "9" * 20)],
    *[(name, "maybe") for name in fields("bool")],
    *[(name, "") for name in ("task", "model", "replay", "output_dir", "agent", "tool_parser")],
    ("temperature", "1e-9"),
    *[("engine_args", x) for x in ("null", "[" * 5000, '{"tp": 1}', '{"hf_overrides": null}')],
    *[("rollout_correction", x) for x in ("x", "tis,x", "tis,tis", "none,tis")],
    *[("sampling_args", f'{{"stop": {x}}}') for x in ("5", '{"a": 1}', '[""]', "[5]")],
    *[("sampling_args", f'{{"top_p": {x}}}') for x in ("5", "NaN")],
    *[("sampling_args", f'{{"max_tokens": {x}}}') for x in ("0", "1.5", '"5"', "Infinity")],
    *[("sampling_args", f'{{"stop_token_ids": {x}}}') for x in ('"x"', "[1.5]")],
    *[("sampling_args", x) for x in ("5", '"x"', '{"temperature": 1}', '{"top_k": 1e30}')],
    ("sampling_args", '{"structured_outputs": {"choice": ["a"]}}'),
    ("sampling_args", '{"allowed_token_ids": []}'),
    ("chat_template_args", '{"tokenize": false}'),
    ("chat_template_args", '{"tools": false}'),
]


@pytest.mark.parametrize("name, value", FLAGS, ids=[f"{x}={y[:20]}" for x, y in FLAGS])
def test_flags(name, value):
    refused(lambda: check_args(parse_args([f"--{name}", value])), said=f"--{name}")


def message(**changes) -> list[dict]:
    return [{"prompt": [{"role": "user", "content": "hi"} | changes]}]


def row(**columns) -> list[dict]:
    return [{"prompt": H} | columns]


ROWS = [
    *[5, None, "abc", {"prompt": H}, [None], [5], [H]],
    *[row(prompt=prompt) for prompt in ("", None, [H], b"hi", [{"role": "user"}])],
    *[message(content=x) for x in (5, None, {"a": 1}, ["x"], [{"type": "video"}], "\ud83d")],
    *[message(role=role) for role in (None, 5)],
    *[message(role="assistant", tool_calls=calls) for calls in ("x", [5])],
    *[row(extra_info=x) for x in ("x", [1], 5, {"tools_kwargs": "x"})],
    *[row(tools_kwargs=x) for x in ("x", ["x"], {"calculator": "x"}, {"nobody": {}})],
    row(tools_kwargs={"calculator": {"create_kwargs": "x"}}),
    *[row(interaction_kwargs=x) for x in ("x", {"name": 5}, {"name": [5]})],
    *[row(agent_name=x) for x in (5, ["x"], "nobody")],
    *[row(images=x) for x in ("x", [5], {})],
    *[row(**{name: 1}) for name in ("sampling_params", "self", "step", "rollout_n", "validate")],
]


@pytest.mark.parametrize("rows", ROWS, ids=[f"{i}-{str(x)[-60:]!a}" for i, x in enumerate(ROWS)])
def test_rows(rows, tokenizer):
    from examples import calculator

    def load():
        loaded = data.load_rows(SimpleNamespace(load=lambda split: rows), "train")
        data.filter_overlong(loaded, tokenizer, calculator, Args(max_prompt_tokens=1000))

    refused(load)


def test_a_checked_row_is_a_copy():
    kwargs = {"calculator": {"create_kwargs": {"x": None}}}
    chat = [{"role": "user", "content": "hi", "tool_calls": None}]
    given = {"prompt": chat, "extra_info": {"tools_kwargs": kwargs, "y": None}}
    before = copy.deepcopy(given)
    checked = check_row(given, "prompt", 0, "row 0")
    assert given == before
    kept = {"tools_kwargs": {"calculator": {"create_kwargs": {}}}, "y": None}
    assert checked == {"prompt": H, "extra_info": kept, "index": 0}


def test_a_row_is_named_with_its_number_and_file(tmp_path):
    lines = [json.dumps(rows[0]) for rows in (row(), message(content=5))]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    said = f"row 1 of {tmp_path}/a.jsonl: 'prompt' must be a text or a list of chat messages"
    refused(data.load_rows, SimpleNamespace(), "train", [str(tmp_path / "a.jsonl")], said=said)


def test_an_agent_that_is_unknown_though_rows_name_their_own():
    refused(check_registered, Args(agent="nobody"), said="no agent loop 'nobody': choose from ")


TASK = f"def load(split): return [{{'prompt': {H}}}]\ndef reward(output, row): return 0\n"
TOOL = TASK + "from agent_loop import *\nclass T(Tool):\n  name, schema = 'x', {}\n"
OWN = TASK + "from agent_loop import register\n@register('x')\n"
TASKS = [
    *["", "def (", "\0", "1 / 0", "# coding: nothing\n", "import nothing_of_that_name"],
    *["import sys; sys.exit(3)", "import sys; sys.exit()", "def f(): f()\nf()"],
    *["raise BaseException('x')", "raise ValueError('a\\nb')", "raise ValueError"],
    *["load = 5\nreward = 5", "def load(split): pass"],
    *[TASK + f"SYSTEM_PROMPT = {x}" for x in ("5", "['x']")],
    *[TOOL + f"TOOLS = {x}" for x in ("5", "'abc'", "[5]", "[T]", "load", "[Tool()]", "T()")],
    *[TOOL + f"TOOLS = {x}" for x in ("[len]", "[lambda x: x]", "[T(), T()]")],
    *[TOOL + f"T.{x}\nTOOLS = [T()]" for x in ("name = 5", "schema = 'x'", "schema = None")],
    *[TOOL + f"INTERACTIONS = {x}" for x in ("5", "[5]", "[Interaction]", "Interaction()")],
    *[TASK + f"def load(split): {x}" for x in ("return 5", "return None", "return []")],
    *[TASK + f"def load(split): {x}" for x in ("raise KeyError('a')", "yield 1 / 0")],
    *[TASK + "def load(): return []", TASK + "def reward(output): return 0"],
    *[TASK + "sampler = 5", TASK + "def bare(x): return x\nTOOLS = [bare]"],
    *[OWN + "class X: pass", OWN + "def x(): pass"],
]


@pytest.mark.parametrize("text", TASKS, ids=[f"{i}-{x[-40:]!a}" for i, x in enumerate(TASKS)])
def test_task_files(text, tmp_path):
    (tmp_path / "task.py").write_text(text)
    refused(lambda: data.load_rows(data.load_task(str(tmp_path / "task.py")), "train"))


FILES = [
    *[("a.jsonl", x) for x in (b"", b"\n\n", b"null\n", b"5\n", b"[]\n[]\n", b"{", b"\0" * 10)],
    *[("a.jsonl", x) for x in (b'{"prompt": "\xe9"}\n', b"[" * 100_000, b'{"prompt": NaN}')],
    *[("a.jsonl", x) for x in (b'{"a": 1}{"a": 2}', b'{"a": 1}\n{"a": "x"}')],
    *[("a.parquet", x) for x in (b"", b"PAR1xxxxPAR1", b"hello", None)],
]


@pytest.mark.parametrize("name, content", FILES)
def test_files(name, content, tmp_path):
    file = tmp_path / name
    file.mkdir() if content is None else file.write_bytes(content)
    refused(data.load_rows, SimpleNamespace(), "train", [str(file)], said=name)


@pytest.mark.parametrize("name", [":::", "a:", ":a", "nowhere.jsonl"])
def test_files_that_are_not_there(name):
    said = f"{name}: no such file (a data set of the hub is"
    refused(data.load_rows, SimpleNamespace(), "train", [name], said=said)


TOKENS = ['"x"', "[1.5]", "-1", "99999999", "{}"]
TEMPLATES = ["{{ 1/0 }}", "{% if %}", "{{ raise_exception('no') }}", "{{ messages[5].content }}"]
PARTS = [
    *[("config.json", x) for x in ("", "{", "null", "[]", "5", "{}", None)],
    *[("tokenizer.json", x) for x in ("", "{", "null", "[]", "{}", None)],
    *[("generation_config.json", x) for x in ("", "{", "null", "[]", "5")],
    *[("generation_config.json", f'{{"eos_token_id": {x}}}') for x in TOKENS],
    *[("chat_template.jinja", x) for x in ("", *TEMPLATES)],
]


@pytest.mark.parametrize("name, content", PARTS)
def test_model_folders(name, content, tiny_model, tmp_path):
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)

    def load():
        args = Args(model=str(folder))
        _, tokenizer = models.load_tokenizer(args)
        models.stop_token_ids(args, tokenizer)
        rows = [{"prompt": H, "index": 0}]
        data.filter_overlong(rows, tokenizer, SimpleNamespace(), args)

    refused(load)
