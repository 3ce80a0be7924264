"""Bad input: flags, rows, task files, data files, model folders. Each is one line that says what to change, never a
traceback, and nothing nonsensical is taken. In process, without an engine."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import data
from agent_loop import BadInput
from flatrl import models
from train import Args, check_args, check_registered, parse_args

H = [{"role": "user", "content": "hi"}]


def refused(function, *args, said: str = "") -> None:
    with pytest.raises(BadInput) as caught:
        function(*args)
    text = str(caught.value)
    assert text.strip() and "\n" not in text and said in text


def kinds(*types: str) -> list[str]:
    return [e.name for e in dataclasses.fields(Args) if any(kind in str(e.type) for kind in types)]


FLAGS = [(name, value) for name in kinds("float") for value in ("inf", "nan", "-1", "1e400", "x")]
FLAGS += [(name, value) for name in kinds("int") for value in ("-1", "1.5", "nan", "99999999999999999999")]
FLAGS += [(name, "maybe") for name in kinds("bool")]
FLAGS += [(name, "") for name in ("task", "model", "replay", "output_dir", "agent", "tool_parser", "wandb_project")]
FLAGS += [("temperature", "1e-9"), ("engine_args", "null"), ("engine_args", "[" * 5000), ("engine_args", '{"tp": 1}')]
FLAGS += [("engine_args", '{"hf_overrides": null}'), ("rollout_correction", "tis,x")]
FLAGS += [("sampling_args", json.dumps(x)) for x in (
    {"stop": 5}, {"stop": {"a": 1}}, {"stop": [""]}, {"stop": [5]}, {"top_p": 5}, {"top_p": float("nan")},
    {"max_tokens": 0}, {"max_tokens": 1.5}, {"max_tokens": "5"}, {"max_tokens": float("inf")}, {"top_k": 1e30},
    {"stop_token_ids": "x"}, {"stop_token_ids": [1.5]}, {"temperature": 1}, 5, "x",
    {"structured_outputs": {"choice": ["a"]}})]  # fmt: skip
FLAGS += [("sampling_args", '{"allowed_token_ids": []}'), ("think_tags", "<a> <a>")]
FLAGS += [("chat_template_args", json.dumps({x: False})) for x in ("tokenize", "add_generation_prompt", "tools")]
FLAGS += [("rollout_correction", x) for x in ("tis,tis", "none,tis", "tis,none", "x")]


@pytest.mark.parametrize("name, value", FLAGS, ids=[f"{name}={value[:20]}" for name, value in FLAGS])
def test_flags(name, value):
    refused(lambda: check_args(parse_args([f"--{name}", value])), said=f"--{name}")


@pytest.mark.parametrize("bound", ["nan", "inf", "-1"])
def test_each_of_a_list(bound):
    flags = ["--rollout_correction", "tis,geo_mask", "--correction_high", "2", bound]
    refused(lambda: check_args(parse_args(flags)), said=f"--correction_high {float(bound)} must")


def message(**changes) -> list[dict]:
    return [{"prompt": [{"role": "user", "content": "hi"} | changes]}]


def row(**columns) -> list[dict]:
    return [{"prompt": H} | columns]


ROWS = [row(prompt=""),
        5, None, "abc", {"prompt": H}, [None], [5], [H], row(prompt=None), row(prompt=[H]), row(prompt=b"hi"),
        message(content=5), message(content=None), message(content=b"x"), message(content={"a": 1}),
        message(content=["x"]), message(content=[{"type": "video"}]), message(content="\ud83d"),
        message(role=None), message(role=5), message(role=""), message(name=5), message(tool_call_id=5),
        message(tool_calls="x"), message(role="assistant", tool_calls=[5]), [{"prompt": [{"role": "user"}]}],
        row(extra_info="x"), row(extra_info=[1]), row(extra_info=5), row(tools_kwargs="x"), row(tools_kwargs=["x"]),
        row(tools_kwargs={"calculator": "x"}), row(tools_kwargs={"calculator": {"create_kwargs": "x"}}),
        row(tools_kwargs={"nobody": {}}), row(extra_info={"tools_kwargs": "x"}), row(interaction_kwargs="x"),
        row(interaction_kwargs={"name": 5}), row(interaction_kwargs={"name": [5]}), row(agent_name=5),
        row(agent_name=["x"]), row(agent_name="nobody"), [{"prompt": H, 5: 1}], [{"prompt": H, None: 1}],
        row(images="x"), row(images=[5]), row(images={}), row(index=[1]), row(extra_info={"index": {"a": 1}}),
        row(sampling_params=1), row(self=1), row(step=1), row(rollout_n=1), row(validate=1)]  # fmt: skip


@pytest.mark.parametrize("rows", ROWS, ids=[f"{i}-{str(rows)[-60:]!a}" for i, rows in enumerate(ROWS)])
def test_rows(rows, tokenizer):
    from examples import calculator

    def load():
        loaded = data.load_rows(SimpleNamespace(load=lambda split: rows), "train")
        data.filter_overlong(loaded, tokenizer, calculator, Args(max_prompt_tokens=1000))

    refused(load)


@pytest.mark.parametrize("name", [":::", "a:", ":a", "nowhere.jsonl"])
def test_files_that_are_not_there(name):
    refused(data.load_rows, SimpleNamespace(), "train", [name], said=f"{name}: no such file (a data set of the hub is")


def test_an_agent_that_is_unknown_though_rows_name_their_own():
    refused(check_registered, Args(agent="nobody"), said="no agent loop 'nobody': choose from ")


def test_a_row_is_named_with_its_number_and_file(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(row()[0]) + "\n" + json.dumps(message(content=5)[0]))
    refused(data.load_rows, SimpleNamespace(), "train", [str(tmp_path / "a.jsonl")],
            said=f"row 1 of {tmp_path}/a.jsonl, a message: 'content' must be a str|list|tuple, got 5")  # fmt: skip


TASK = "def load(split): return [{'prompt': [{'role': 'user', 'content': 'hi'}]}]\ndef reward(output, row): return 0\n"
TOOL = "from agent_loop import Tool, Interaction\nclass T(Tool):\n  name, schema = 'x', {}\n"
TASKS = ["", "def (", "\0", "import sys; sys.exit(3)", "import sys; sys.exit()", "raise BaseException('x')",
         "raise GeneratorExit", "def f(): f()\nf()", "load = 5\nreward = 5", "def load(split): pass", "1 / 0",
         "class E(Exception):\n  def __str__(self): raise RuntimeError\nraise E", "raise ValueError('a\\nb')",
         "raise ValueError", "import nothing_of_that_name", "# coding: nothing\n"]  # fmt: skip
TASKS += [TASK + f"SYSTEM_PROMPT = {x}" for x in ("5", "['x']", "b'x'", "True", "{'a': 1}")]
TASKS += [TASK + TOOL + f"TOOLS = {x}" for x in (
    "5", "'abc'", "{'a': 1}", "[5]", "[T]", "load", "[Tool()]", "[len]", "[lambda x: x]", "[T(), T()]", "T()")]
TASKS += [TASK + TOOL + f"T.{x}\nTOOLS = [T()]" for x in ("name = 5", "name = None", "schema = 'x'", "schema = None")]
TASKS += [TASK + TOOL + f"INTERACTIONS = {x}" for x in (
    "5", "[5]", "'abc'", "{'x': 5}", "[Interaction]", "Interaction()", "{'x': Interaction}", "T()")]
TASKS += [TASK + f"def load(split): {x}" for x in (
    "import sys; sys.exit(3)", "raise KeyError('a')", "return 5", "return None", "return []", "yield 1 / 0")]
TASKS += [TASK + "def load(): return []", TASK + "class load: pass"]
TASKS += [TASK + x for x in ("def reward(): return 0", "def reward(output): return 0", "class reward: pass",
                             "sampler = 5", "sampler = 'x'", "def bare(x): return x\nTOOLS = [bare]")]  # fmt: skip
TASKS += [TASK + "from agent_loop import register\n@register('x')\n" + x for x in ("class X: pass", "def x(): pass")]


@pytest.mark.parametrize("text", TASKS, ids=[f"{i}-{text[-40:]!a}" for i, text in enumerate(TASKS)])
def test_task_files(text, tmp_path):
    (tmp_path / "task.py").write_text(text)
    refused(lambda: data.load_rows(data.load_task(str(tmp_path / "task.py")), "train"))


FILES = {"null": "null\n", "nulls": "null\nnull\n", "int": "5\n", "str": '"x"\n', "lists": "[]\n[]\n", "cut": "{",
         "empty": "", "blank": "\n\n", "latin": b'{"prompt": "\xe9"}\n', "nul": "\0" * 10, "deep": "[" * 100_000,
         "objects": '{"a":' * 100_000, "nan": '{"prompt": NaN}', "two": '{"a": 1}{"a": 2}',
         "digits": '{"a": ' + "9" * 5000 + "}", "mixed": '{"a": 1}\n{"a": "x"}'}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_jsonl(name, tmp_path):
    content = FILES[name]
    (tmp_path / "a.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(data.load_rows, SimpleNamespace(), "train", [str(tmp_path / "a.jsonl")], said="a.jsonl")


@pytest.mark.parametrize("content", [b"", b"PAR1xxxxPAR1", b"hello", None])
def test_parquet(content, tmp_path):
    file = tmp_path / "a.parquet"
    file.mkdir() if content is None else file.write_bytes(content)
    refused(data.load_rows, SimpleNamespace(), "train", [str(file)], said="a.parquet")


PARTS = [("config.json", x) for x in ("", "{", "null", "[]", "5", '"x"', "{}", None)]
PARTS += [("tokenizer.json", x) for x in ("", "{", "null", "[]", "5", "{}", None)]
PARTS += [("generation_config.json", x) for x in (
    "", "{", "null", "[]", "5", '{"eos_token_id": "x"}', '{"eos_token_id": [1.5]}', '{"eos_token_id": -1}',
    '{"eos_token_id": 99999999}', '{"eos_token_id": {}}')]
PARTS += [("chat_template.jinja", x) for x in (
    "hello", "{{ 1/0 }}", "{% if %}", "{{ raise_exception('no') }}", "{{ messages[5].content }}", "{{ a.b.c }}", "")]


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
        data.filter_overlong([{"prompt": H, "index": 0}], tokenizer, SimpleNamespace(), args)

    refused(load)


def test_there_are_enough():
    assert len(FLAGS) + len(ROWS) + len(TASKS) + len(FILES) + len(PARTS) > 300
