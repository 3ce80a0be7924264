"""data.py: rows and their errors, batches by hand, packing as a partition, packed attention against one sequence at a
time through transformers' own eager attention."""

import copy
import gc
import itertools
import json
import os
import signal
import textwrap
from collections import Counter, defaultdict
from types import SimpleNamespace

import datasets
import pytest
import torch
from conftest import rewards_of_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import data
from agent_loop import AgentLoopOutput, BadInput, Interaction, as_tool, total_reward
from examples import calculator
from flatrl import notices, tables
from flatrl.metrics import describe
from flatrl.rows import copy_containers
from train import Args, greedy_baselines

few = settings(max_examples=60, deadline=None, derandomize=True)
close = torch.testing.assert_close
HELLO = [{"role": "user", "content": "hello"}]


NUMBERS = itertools.count(1000)  # of the prompts, where a test names none


def make_output(prompt: list[int], mask: list[int], **attributes) -> AgentLoopOutput:
    """A trajectory with this mask; response token k is 100 + k, sampled with logprob -k/8 - 1 by version k."""
    n = range(len(mask))
    attributes.setdefault("extra", {"prompt": next(NUMBERS), "sample": 0, "segment": 0})
    return AgentLoopOutput(
        prompt_ids=prompt,
        response_ids=[100 + k for k in n],
        response_mask=mask,
        response_logprobs=[-k / 8 - 1 if mask[k] else 0.0 for k in n],
        response_versions=[k if mask[k] else -1 for k in n],
        **attributes,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Task files


def write_task(folder, text: str) -> str:
    path = folder / "my_task.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_load_task(tmp_path):
    path = write_task(tmp_path, """
        from dataclasses import dataclass

        @dataclass
        class Thing:  # dataclasses look their module up by name
            x: "int" = 1

        def load(split): return [{"prompt": [{"role": "user", "content": split}]}]
        def reward(output, row): return Thing().x
    """)  # fmt: skip
    task = data.load_task(path)
    assert task.load("val")[0]["prompt"][0]["content"] == "val"
    assert task.reward(None, None) == 1


REWARD = "def reward(output, row): return 0\n"
LOAD = "def load(split): return []\n"


@pytest.mark.parametrize("text, said", [
    (REWARD, r"my_task\.py has no function load"),
    (LOAD, r"my_task\.py has no function reward"),
    (LOAD + "reward = 1\n", r"my_task\.py has no function reward"),
    (LOAD + REWARD + "import no_such_module\n", "does not import, line \\d+: ModuleNotFoundError.*no_such_module"),
    ("def load(:\n", "does not import, line 1: SyntaxError"),
    ("\n1 / 0\n", "does not import, line 2: ZeroDivisionError"),
])  # fmt: skip
def test_a_task_file_that_does_not_work(tmp_path, text, said):
    path = write_task(tmp_path, text)
    with pytest.raises(BadInput, match=said) as caught:
        data.load_task(path)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_task_file_that_is_none(tmp_path):
    with pytest.raises(BadInput, match="nowhere.py: no such file"):
        data.load_task(str(tmp_path / "nowhere.py"))
    with pytest.raises(BadInput, match="no such file"):
        data.load_task(str(tmp_path))
    (tmp_path / "task.txt").write_text(LOAD + REWARD)
    with pytest.raises(BadInput, match=r"task.txt: not a Python file"):
        data.load_task(str(tmp_path / "task.txt"))


def test_what_a_task_needs_can_be_more(tmp_path):
    path = write_task(tmp_path, LOAD + REWARD)
    with pytest.raises(BadInput, match="has no function build_model"):
        data.load_task(path, ("load", "reward", "build_model"))


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def rows_of(rows, split="train", **task) -> list[dict]:
    return data.load_rows(SimpleNamespace(load=lambda split: rows, **task), split)


def test_load_rows_asks_for_the_split_and_numbers_the_rows():
    task = SimpleNamespace(load=lambda split: [{"prompt": HELLO, "split": split}, {"prompt": HELLO, "index": 7}])
    assert data.load_rows(task, "val") == [
        {"index": 0, "prompt": HELLO, "split": "val"}, {"index": 7, "prompt": HELLO}
    ]  # fmt: skip
    rows = rows_of([{"prompt": HELLO, "extra_info": {"index": 42}}, {"prompt": HELLO, "extra_info": None}])
    assert [row["index"] for row in rows] == [42, 1]


def test_load_rows_takes_a_dataset():
    rows = rows_of(datasets.Dataset.from_list([{"prompt": HELLO, "data_source": "d"}]))
    assert rows == [{"index": 0, "prompt": HELLO, "data_source": "d"}]


def test_system_prompt_goes_before_prompts_without_one():
    own = [{"role": "system", "content": "Be long."}, *HELLO]
    source = [{"prompt": HELLO}, {"prompt": own}]
    rows = rows_of(source, SYSTEM_PROMPT="Be brief.")
    assert rows[0]["prompt"] == [{"role": "system", "content": "Be brief."}, *HELLO]
    assert rows[1]["prompt"] == own
    assert source == [{"prompt": HELLO}, {"prompt": own}] and len(HELLO) == 1  # the task's rows are as they were


def test_what_parquet_fills_into_messages_is_taken_out():
    message = {"role": "user", "content": "hello", "tool_calls": None}
    assert rows_of([{"prompt": [message]}])[0]["prompt"] == HELLO


@pytest.mark.parametrize("rows, said", [
    ([], r"load\('train'\) has no rows"),
    ([{"prompt": HELLO}, {"question": "hello"}],
     r"row 1 of load\('train'\) has no column 'prompt'; give --prompt_key one of \['question'\]"),
    ([{"prompt": 5}], r"row 0 of load\('train'\): 'prompt' must be a text or a list of chat messages, got 5"),
    ([{"prompt": ["hello"]}], "'prompt' must be a text or a list of chat messages"),
    ([{"prompt": [{"content": "hello"}]}], "'prompt' must be a text or a list of chat messages"),
    ([{"prompt": {"role": "user", "content": "hello"}}], "'prompt' must be a text or a list of chat messages"),
    pytest.param(["hello"], "row 0"),
])  # fmt: skip
def test_rows_that_are_none(rows, said):
    with pytest.raises(BadInput, match=said) as caught:
        rows_of(rows)
    assert "\n" not in str(caught.value)


def test_a_prompt_may_be_empty_where_an_interaction_speaks_first(tokenizer):
    host = SimpleNamespace(INTERACTIONS=[Interaction()], load=lambda split: [{"prompt": []}], SYSTEM_PROMPT="Be brief.")
    system = [{"role": "system", "content": "Be brief."}]
    assert data.load_rows(host, "train")[0]["prompt"] == system
    host.SYSTEM_PROMPT = None
    rows = data.load_rows(host, "train")
    assert rows == [{"prompt": [], "index": 0}]
    assert data.filter_overlong(rows, tokenizer, host, Args()) == rows
    with pytest.raises(BadInput, match="row 0: its prompt is empty, and no Interaction speaks first"):
        data.filter_overlong(rows, tokenizer, SimpleNamespace(), Args())


def test_a_text_is_a_users_message_and_any_column_the_prompt():
    source = [{"prompt": "hello"}, {"prompt": HELLO, "question": "why?", "messages": HELLO * 3, "answer": 4}]
    rows = data.load_rows(SimpleNamespace(load=lambda split: source, SYSTEM_PROMPT="Be brief."), "train")
    system = {"role": "system", "content": "Be brief."}
    assert [row["prompt"] for row in rows] == [[system, *HELLO]] * 2
    for key, prompt in ("question", [{"role": "user", "content": "why?"}]), ("messages", HELLO * 3):
        (row,) = data.load_rows(SimpleNamespace(load=lambda split: source[1:]), "train", None, key)
        assert row == {"index": 0, **source[1], "prompt": prompt}
    with pytest.raises(BadInput, match=r"row 0 .* no column 'question'; give --prompt_key one of \['prompt'\]"):
        data.load_rows(SimpleNamespace(load=lambda split: source), "train", None, "question")
    with pytest.raises(BadInput, match="'answer' must be a text or a list of chat messages, got 4"):
        data.load_rows(SimpleNamespace(load=lambda split: source[1:]), "train", None, "answer")


ROWS = [
    {
        "prompt": [{"role": "user", "content": f"question {i}"}],
        "data_source": "made up",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"index": 10 + i, "tools_kwargs": {"calculator": {"create_kwargs": {"truth": str(i)}}}},
    }
    for i in range(3)
]


def test_parquet_and_jsonl_round_trip(tmp_path):
    parquet, jsonl = str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")
    datasets.Dataset.from_list(ROWS[:2]).to_parquet(parquet)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[2:]))
    assert tables.read_files([parquet]) == ROWS[:2]
    assert tables.read_files([jsonl]) == ROWS[2:]
    task = SimpleNamespace(load=lambda split: pytest.fail("the files replace load"), SYSTEM_PROMPT="Be brief.")
    rows = data.load_rows(task, "train", [parquet, jsonl])  # in the order given
    system = {"role": "system", "content": "Be brief."}
    assert rows == [{"index": 10 + i, **row, "prompt": [system, *row["prompt"]]} for i, row in enumerate(ROWS)]


def test_jsonl_is_json_line_by_line_with_the_types_it_has(tmp_path):
    rows = [{"prompt": HELLO, "truth": 1}, {"prompt": HELLO, "truth": "x"}, {"prompt": HELLO, "truth": {"a": [None]}}]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in [*rows, {"prompt": HELLO, "truth": "\u2028"}])
    for name, content in (("a.jsonl", text + "\n\n"), ("b.json", json.dumps(rows)), ("c.jsonl", "\ufeff" + text)):
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert tables.read_files([str(tmp_path / name)])[:3] == rows
    assert tables.read_files([str(tmp_path / "a.jsonl")])[3]["truth"] == "\u2028"
    (tmp_path / "a.jsonl").write_text(text + "\n{")
    with pytest.raises(BadInput, match=r"a\.jsonl, line 5, is no row: json.decoder.JSONDecodeError"):
        tables.read_files([str(tmp_path / "a.jsonl")])


def test_csv_is_text(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text('\ufeffquestion,answer\r\n"What is ""1,\n2""?",007\r\né,\r\n', newline="", encoding="utf-8")
    expected = [{"question": 'What is "1,\n2"?', "answer": "007"}, {"question": "é", "answer": ""}]
    assert tables.read_files([str(file)]) == expected
    (first, _) = data.load_rows(SimpleNamespace(), "train", [str(file)], "question")
    assert first["prompt"] == [{"role": "user", "content": 'What is "1,\n2"?'}] and first["answer"] == "007"
    file.write_text("question\nhello,5\n")
    with pytest.raises(BadInput, match=r"row 0 of .*a\.csv: a column's name is a str"):
        data.load_rows(SimpleNamespace(), "train", [str(file)], "question")
    file.write_text('question\n"hello\n')
    with pytest.raises(BadInput, match=r"a\.csv can't be read as .*: _csv.Error: unexpected end of data"):
        tables.read_files([str(file)])


def test_a_folder_of_datasets_and_a_name_of_the_hub(tmp_path, monkeypatch):
    table, folder = datasets.Dataset.from_list(ROWS), tmp_path / "saved"
    table.save_to_disk(folder / "one")
    datasets.DatasetDict(train=table, test=table).save_to_disk(folder / "two")
    assert tables.read_files([str(folder / "one"), str(folder / "two" / "test")]) == ROWS * 2
    with pytest.raises(BadInput, match=r"two has splits: give .*two/ and one of \['train', 'test'\]"):
        tables.read_files([str(folder / "two")])
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *name, split: asked.append((*name, split)) or table)
    assert tables.read_files(["openai/gsm8k:main:train", "me/mine:test"]) == ROWS * 2
    assert asked == [("openai/gsm8k", "main", "train"), ("me/mine", "test")]
    with pytest.raises(BadInput, match=r"me/mine: no such file .*NAME:SPLIT or NAME:CONFIG:SPLIT"):
        tables.read_files(["me/mine"])


def test_rows_of_a_file_are_named_by_the_file(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"question": "?"}) + "\n")
    with pytest.raises(BadInput, match=r"row 0 of .*c\.jsonl has no column 'prompt'"):
        data.load_rows(SimpleNamespace(), "train", [str(path)])


def test_tools_kwargs_of_parquet_rows_choose_the_tools_they_chose_before(tmp_path):
    def add(a: int) -> int:
        """Add.

        Args:
            a: A number.
        """

    kwargs = [{"calculator": {"create_kwargs": {"x": 1}}}, {"add": {"execute_kwargs": {"y": 1}}}]
    rows = [{"prompt": HELLO, "extra_info": {"tools_kwargs": k}} for k in kwargs]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    loaded = data.load_rows(SimpleNamespace(), "train", [str(tmp_path / "a.parquet")])
    assert [row["extra_info"]["tools_kwargs"] for row in loaded] == kwargs


@pytest.mark.parametrize("name, content, said", [
    ("nowhere.parquet", None, "nowhere.parquet: no such file"),
    ("rows.txt", "prompt\nhello\n", r"rows.txt can't be read as \.parquet, \.jsonl, \.csv or a folder of datasets"),
    pytest.param("cut.jsonl", '{"prompt": [\n', "cut.jsonl"),
    pytest.param("cut.parquet", "PAR1", "cut.parquet"),
    pytest.param("empty.jsonl", "", "empty.jsonl"),
])  # fmt: skip
def test_files_that_are_none(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(BadInput, match=said):
        data.load_rows(SimpleNamespace(), "train", [str(tmp_path / name)])


def test_files_without_the_datasets_package(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(BadInput, match="pip install datasets"):
        tables.read_files([str(tmp_path)])


# ---------------------------------------------------------------------------------------------------------------------
# Overlong prompts


def letters(n: int) -> dict:
    return {"prompt": [{"role": "user", "content": "x" * n}]}


def rendered(tokenizer, row, tools=None) -> int:
    ids = tokenizer.apply_chat_template(row["prompt"], tools=tools, add_generation_prompt=True, return_dict=False)
    return len(ids)


def test_overlong_prompts_are_filtered_in_order(tokenizer):
    rows = [letters(n) for n in (5, 40, 10, 11, 1)]
    limit = rendered(tokenizer, letters(10))  # of all tokens: template and generation prompt too
    kept = data.filter_overlong(rows, tokenizer, SimpleNamespace(), Args(max_prompt_tokens=limit))
    assert kept == [rows[0], rows[2], rows[4]]


def test_the_tools_of_a_row_count_into_its_prompt(tokenizer):
    task = SimpleNamespace(TOOLS=[calculator.calculator])
    plain, with_tool = rendered(tokenizer, letters(3)), rendered(
        tokenizer, letters(3), [as_tool(calculator.calculator).schema]
    )  # fmt: skip
    assert plain < with_tool
    args = Args(max_prompt_tokens=with_tool - 1)
    assert len(data.filter_overlong([letters(3)], tokenizer, SimpleNamespace(), args)) == 1
    with pytest.raises(BadInput, match="no prompt left"):
        data.filter_overlong([letters(3)], tokenizer, task, args)
    assert len(data.filter_overlong([letters(3)], tokenizer, task, Args(max_prompt_tokens=with_tool))) == 1


def test_no_prompt_left_names_the_flag_and_the_numbers(tokenizer):
    longest = rendered(tokenizer, letters(9))
    with pytest.raises(BadInput, match=rf"all 2 are longer than --max_prompt_tokens 4.*longest has {longest} tokens"):
        data.filter_overlong([letters(5), letters(9)], tokenizer, SimpleNamespace(), Args(max_prompt_tokens=4))


@pytest.mark.parametrize("row, said", [
    ({"agent_name": "swarm"}, "no agent loop 'swarm'"),
    ({"extra_info": {"tools_kwargs": {"abacus": {}}}}, r"tools_kwargs names \['abacus'\]"),
    ({"extra_info": {"interaction_kwargs": {"name": "chess"}}}, "interaction_kwargs names 'chess'"),
])  # fmt: skip
def test_names_that_a_row_gets_wrong_are_found_before_the_run(tokenizer, row, said):
    with pytest.raises(BadInput, match=said):
        data.filter_overlong([letters(1), letters(1) | row], tokenizer, SimpleNamespace(), Args())


def test_a_copy_has_its_own_containers_and_shares_what_is_in_them():
    image = object()
    tree = {"chat": [{"content": ("a", image, [1])}], "counts": Counter(x=2), "lists": defaultdict(list, y=[image])}
    copied = copy_containers(tree)
    assert copied == tree and [type(value) for value in copied.values()] == [list, Counter, defaultdict]
    copied["chat"][0]["content"][2].append(2)
    copied["counts"]["x"] += 1
    copied["lists"]["z"].append(3)
    copied["lists"]["y"].append(4)
    assert tree == {"chat": [{"content": ("a", image, [1])}], "counts": {"x": 2}, "lists": {"y": [image]}}
    assert copied["chat"][0]["content"][1] is copied["lists"]["y"][0] is image


# ---------------------------------------------------------------------------------------------------------------------
# Tables with more rows than memory shall hold


@pytest.fixture
def big_table(tmp_path, monkeypatch):
    """Writes a table of 250 rows, every third of them long; more than 200 stay on disk, and are measured by others."""
    monkeypatch.setattr(tables, "MAX_ROWS_IN_MEMORY", 200)
    monkeypatch.setattr(tables, "MAX_ROWS_MEASURED_HERE", 200)

    def write(**more) -> list[str]:
        file = str(tmp_path / f"{len(more)}.parquet")
        rows = [{"prompt": [{"role": "user", "content": f"{i}" * (1 + 40 * (i % 3 == 0))}]} for i in range(250)]
        for key, value in more.items():
            for i, row in enumerate(rows):
                row[key] = value if i == 230 else None
        datasets.Dataset.from_list(rows).to_parquet(file)
        return [file]

    return write


def test_a_big_table_stays_on_disk_and_gives_what_a_list_gives(big_table, tokenizer, monkeypatch, process_group):
    file, task = big_table(), SimpleNamespace(SYSTEM_PROMPT="Be brief.")
    args = Args(max_prompt_tokens=rendered(tokenizer, {"prompt": [{"role": "system", "content": "Be brief."}, *HELLO]}))
    rows = data.load_rows(task, "train", file)
    kept = data.filter_overlong(rows, tokenizer, task, args)
    assert not isinstance(rows, list) and not isinstance(kept, list) and len(rows) == 250
    assert [row["index"] for row in kept] == [i for i in range(250) if i % 3]
    assert kept[-1]["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "248"}]
    assert type(kept[7]["index"]) is int and kept[7]["index"] == 11  # of the file
    assert kept[7] == kept[7] is not kept[7]  # made whenever it is asked for
    mixed = data.load_rows(task, "train", file * 2)  # several files: a list
    monkeypatch.setattr(tables, "MAX_ROWS_IN_MEMORY", 1000)
    alone = data.load_rows(task, "train", file)
    assert isinstance(alone, list) and alone == list(rows) and [x["prompt"] for x in alone * 2] == [
        x["prompt"] for x in mixed]  # fmt: skip
    assert data.filter_overlong(alone, tokenizer, task, args) == list(kept)


def test_of_a_huge_table_rows_are_looked_at_when_they_are_drawn(tmp_path, tokenizer, monkeypatch, process_group):
    monkeypatch.setattr(tables, "MAX_ROWS_IN_MEMORY", 200)
    monkeypatch.setattr(tables, "MAX_ROWS_CHECKED_AT_START", 1000)
    task, seen = SimpleNamespace(SYSTEM_PROMPT="Be brief."), []
    args = Args(max_prompt_tokens=rendered(tokenizer, {"prompt": [{"role": "system", "content": "Be brief."}, *HELLO]}))
    table = [{"prompt": f"{i}" * (1 + 40 * (i % 3 == 0))} for i in range(2500)]
    datasets.Dataset.from_list(table).to_parquet(str(tmp_path / "rows.parquet"))
    on_disk = data.load_rows(task, "train", [str(tmp_path / "rows.parquet")])
    in_memory = data.load_rows(SimpleNamespace(load=lambda split: table, SYSTEM_PROMPT="Be brief."), "train")
    expand = data.expand
    monkeypatch.setattr(data, "expand", lambda ids, *more: seen.append(1) or expand(ids, *more))
    for rows in (on_disk, in_memory):
        seen.clear()
        kept = data.filter_overlong(rows, tokenizer, task, args)
        assert len(kept) == 2500 and len(seen) <= 1000  # other processes' count there
        seen.clear()
        assert [kept[i]["index"] for i in (0, 1, 2, 3, 2497, -1)] == [1, 1, 2, 4, 2497, 1]  # the next; it goes round
        assert kept[3]["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "4"}]
        assert len(seen) == (2 + 1 + 1 + 2 + 1 + 3) + 2
        share = sum(i % 3 == 0 for i in data.prompt_order(2500, 0, 1000, args.seed)) / 1000  # a table may have periods
        assert kept.overlong == pytest.approx(share) and 0.3 < share < 0.37
        assert notices.dropped(kept, 2500) == f"about {share:.1%} overlong: another one instead, when they are drawn"
    assert notices.dropped([1, 2], 5) == "3 overlong ones dropped"
    with pytest.raises(BadInput, match="no prompt left: all 1000 are longer"):
        data.filter_overlong(on_disk, tokenizer, task, Args(max_prompt_tokens=3))


def test_many_rows_are_measured_in_other_processes(big_table, tokenizer, monkeypatch, process_group):
    # The length of a prompt names the process; it is too long also where process ids are small.
    monkeypatch.setattr(data, "expand", lambda ids, images, processor: range(1000 + os.getpid()))
    for rows in (data.load_rows(SimpleNamespace(), "train", big_table()), [letters(1)] * 201, [letters(1)] * 200):
        with pytest.raises(BadInput, match="no prompt left") as error:
            data.filter_overlong(rows, tokenizer, SimpleNamespace(), Args())
        here = f"longest has {1000 + os.getpid()} tokens" in str(error.value)
        assert here == (len(rows) == 200)
    data.filter_overlong([letters(1)] * 201, tokenizer, SimpleNamespace(), Args(max_prompt_tokens=10**9))
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL  # processes.Stop is told of every signal with a handler


def test_a_wrong_row_of_a_big_table_is_one_line(big_table, tokenizer, process_group, monkeypatch):
    # What pytest.raises keeps alive leaves the loader to the garbage collector, which waits for its processes so long.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    file = big_table(agent_name="swarm")
    with pytest.raises(BadInput, match=r"^no agent loop 'swarm': .*task$"):
        rows = data.load_rows(SimpleNamespace(), "train", file)
        data.filter_overlong(rows, tokenizer, SimpleNamespace(), Args())
    file = big_table(agent_name="single_turn", data_source="x")
    with pytest.raises(BadInput, match=r"^row 0 of .*2\.parquet has no column 'question'; give --prompt_key one of "):
        rows = data.load_rows(SimpleNamespace(), "train", file, "question")
        data.filter_overlong(rows, tokenizer, SimpleNamespace(), Args())
    gc.collect()


# ---------------------------------------------------------------------------------------------------------------------
# The order of prompts


@few
@given(n=st.integers(1, 40), seed=st.integers(0, 10**6), epoch=st.integers(0, 5))
def test_each_epoch_is_a_permutation(n, seed, epoch):
    assert sorted(data.prompt_order(n, epoch * n, n, seed)) == list(range(n))


@few
@given(n=st.integers(1, 20), seed=st.integers(0, 99), start=st.integers(0, 60), count=st.integers(0, 30))
def test_the_position_alone_decides(n, seed, start, count):
    every = data.prompt_order(n, 0, 100, seed)
    assert data.prompt_order(n, start, count, seed) == every[start : start + count]
    assert all(type(i) is int for i in every)


def test_epochs_and_seeds_differ():
    first, second = data.prompt_order(100, 0, 100, 0), data.prompt_order(100, 100, 100, 0)
    assert first != second
    assert first != data.prompt_order(100, 0, 100, 1)
    assert second != data.prompt_order(100, 0, 100, 1)  # epoch 1 of seed 0 is not epoch 0 of seed 1
    assert first != list(range(100))


# ---------------------------------------------------------------------------------------------------------------------
# Batches


def test_collate_by_hand():
    outputs = [
        make_output([1, 2, 3], [1, 1, 0, 1], reward=1.0),
        make_output([4], [1], reward={"score": 0.5, "format": 9.0}, stop_reason="length"),
    ]
    batch = data.collate(outputs)
    expected = {
        "input_ids": [[1, 2, 3, 100, 101, 102, 103], [4, 100, 0, 0, 0, 0, 0]],
        "lengths": [7, 2],
        "prompt_lengths": [3, 1],
        "response_lengths": [4, 1],
        "response_mask": [[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]],
        "logprobs_rollout": [[-1.0, -1.125, 0.0, -1.375], [-1.0, 0.0, 0.0, 0.0]],
        "versions": [[0, 1, -1, 3], [0, -1, -1, -1]],
        "truncated": [False, True],
    }
    assert set(batch) == set(expected)
    for name, values in expected.items():
        close(batch[name], torch.tensor(values), rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
    assert rewards_of_tokens(outputs).tolist() == [[0.0, 0.0, 0.0, 1.0], [0.5, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("mask, turn_rewards, reward, expected", [
    ([1, 1, 1], [], 2.0, [0, 0, 2]),
    ([1, 1, 0], [], 2.0, [0, 2, 0]),  # the terminal reward: on the last sampled token
    ([1, 1, 0, 0, 1], [(1, 0.5)], 2.0, [0, 0.5, 0, 0, 2]),
    ([1, 1, 0, 0, 1], [(3, 0.5)], 2.0, [0, 0.5, 0, 0, 2]),  # a tool's token: back to the last sampled one
    ([1, 1, 0, 0, 1], [(2, 0.5), (1, 0.25)], 2.0, [0, 0.75, 0, 0, 2]),  # they add up
    ([1, 1, 0, 0, 1], [(4, 0.5)], 2.0, [0, 0, 0, 0, 2.5]),
    ([1, 1], [(1, 0.5)], None, [0, 0.5]),  # turn rewards only
    ([1, 1], [(1, 0.5)], {"score": 1.0, "other": 7.0}, [0, 1.5]),
    ([0, 1], [(0, 0.5)], 1.0, [0, 1.5]),  # nothing sampled before it: the first token that is
    ([0, 0], [(1, 0.5)], 1.0, [0, 0]),
])  # fmt: skip
def test_where_rewards_fall(mask, turn_rewards, reward, expected):
    extra = {"prompt": 0, "sample": 0, "segment": 0}
    output = make_output([1], mask, turn_rewards=turn_rewards, reward=reward, extra=extra)
    assert rewards_of_tokens([output]).tolist() == [expected]
    terminal = reward["score"] if isinstance(reward, dict) else reward or 0.0
    total = terminal + sum(r for _, r in turn_rewards)
    assert data.by_unit([output]).rewards.tolist() == [total]
    assert total_reward(output) == total


def test_collate_of_an_empty_response():
    outputs = [make_output([1, 2], [], reward=1.0, stop_reason="length"), make_output([3], [1])]
    batch = data.collate(outputs)
    assert batch["input_ids"].tolist() == [[1, 2], [3, 100]]
    assert batch["lengths"].tolist() == [2, 2]
    assert batch["response_mask"].tolist() == [[0], [1]]
    assert rewards_of_tokens(outputs).tolist() == [[0], [0]]
    assert data.collate([make_output([1, 2], [])])["response_mask"].shape == (1, 0)
    assert rewards_of_tokens([make_output([1, 2], [], reward=1.0)]).shape == (1, 0)


@few
@given(st.lists(st.lists(st.integers(0, 1), max_size=8), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_collate_keeps_everything_and_pads_with_nothing(masks, random):
    outputs = [
        make_output([1] * random.randint(1, 5), mask, reward=random.random(), turn_rewards=[
            (random.randrange(len(mask)), random.random()) for _ in range(random.randint(0, 2)) if mask
        ]) for mask in masks
    ]  # fmt: skip
    batch = data.collate(outputs)
    token_rewards = rewards_of_tokens(outputs)
    assert token_rewards.shape == batch["response_mask"].shape
    for b, o in enumerate(outputs):
        n, p = len(o.response_ids), len(o.prompt_ids)
        assert batch["input_ids"][b, : p + n].tolist() == o.prompt_ids + o.response_ids
        assert not batch["input_ids"][b, p + n :].any()
        assert batch["response_mask"][b].tolist() == o.response_mask + [0] * (batch["response_mask"].shape[1] - n)
        assert not token_rewards[b][batch["response_mask"][b] == 0].any()
        assert not batch["logprobs_rollout"][b][batch["response_mask"][b] == 0].any()
        assert (batch["versions"][b][batch["response_mask"][b] == 0] == -1).all()
        if o.response_mask and o.response_mask[0]:  # a sampled token before every reward: none is lost
            close(token_rewards[b].sum(), torch.tensor(total_reward(o)))


def test_rewards_that_come_late():
    outputs = [segment(0, 0, 0, turn_rewards=[(1, 0.5)]), segment(1, 0, 0, reward=1.0)]
    before = data.collate(outputs)
    rollouts = data.by_unit(outputs)
    assert rollouts.rewards.tolist() == [0.5, 1] and rollouts.outcomes.tolist() == [0, 1]
    assert rewards_of_tokens(outputs).tolist() == [[0, 0.5], [0, 1]]
    outputs[0].reward = {"score": 2.0}
    outputs[1].turn_rewards.append((0, 0.25))
    rollouts = data.by_unit(outputs)
    assert rollouts.rewards.tolist() == [2.5, 1.25] and rollouts.outcomes.tolist() == [2, 1]
    assert rewards_of_tokens(outputs).tolist() == [[0, 2.5], [0.25, 1]]
    assert data.token_rewards(outputs, torch.tensor([-1.0, 0.0])).tolist() == [[0, -0.5], [0.25, 0]]  # shaped ones
    assert_same(data.collate(outputs), before)  # a batch is made before there are rewards, and knows none


def test_rewards_are_float32_whatever_torchs_default_is():
    """A tool in this process may have set another: float16 would round 2049 to 2048."""
    outputs = [segment(0, 0, 0, reward=2049.0), segment(0, 1, 0, reward=0.1, turn_rewards=[(0, 4097.0)])]
    wanted = data.by_unit(outputs)
    torch.set_default_dtype(torch.float16)
    try:
        units = data.by_unit(outputs)
        terminal_rewards = data.at_unit_ends(units.outcomes, outputs, units)
        rewards = data.token_rewards(outputs, terminal_rewards)
        baselines = greedy_baselines(SimpleNamespace(greedy=outputs[:1]), units, Args())
    finally:
        torch.set_default_dtype(torch.float32)
    assert units.rewards.equal(wanted.rewards) and units.outcomes.equal(wanted.outcomes)
    assert rewards.tolist() == [[0, 2049], [4097, pytest.approx(0.1, rel=1e-7)]] and baselines.tolist() == [2049] * 2
    assert {x.dtype for x in (units.rewards, terminal_rewards, rewards, baselines)} == {torch.float32}


def assert_same(batch, expected):
    assert set(batch) == set(expected)
    for name, x in expected.items():
        if isinstance(x, list):
            assert batch[name] == x
        else:
            close(batch[name], x, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@few
@given(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_select_is_collate_of_some_outputs(masks, random):
    outputs = [make_output([b + 1] * random.randint(1, 5), mask, reward=float(b)) for b, mask in enumerate(masks)]
    rows = random.sample(range(len(masks)), random.randint(1, len(masks)))
    assert_same(data.select(data.collate(outputs), rows), data.collate([outputs[row] for row in rows]))


def test_select_trims_whatever_else_is_in_the_batch():
    outputs = [make_output([1], [1, 1]), make_output([2, 2, 2], [1, 0, 1, 1]), make_output([3, 3], [1], images=["i"])]
    batch = data.collate(outputs)
    batch["logprobs_ref"] = torch.arange(12.0).view(3, 4)
    some = data.select(batch, [2, 0])
    assert some["logprobs_ref"].tolist() == [[8, 9], [0, 1]]
    assert some["input_ids"].tolist() == [[3, 3, 100], [1, 100, 101]]
    assert some["response_mask"].tolist() == [[1, 0], [1, 1]]
    assert some["images"] == [["i"], []]
    assert some["logprobs_ref"].is_contiguous() and batch["logprobs_ref"].shape == (3, 4)
    some["logprobs_ref"][0, 0] = -1  # its own storage
    assert batch["logprobs_ref"][2, 0] == 8
    assert_same(data.select(batch, [0, 1, 2]), batch)
    assert data.select(batch, [])["logprobs_ref"].shape == (0, 0)


def segment(prompt: int, sample: int, segment: int, **attributes) -> AgentLoopOutput:
    extra = {"prompt": prompt, "sample": sample, "segment": segment}
    return make_output([1], [1, 1], extra=extra, **attributes)


def test_rewards_count_a_rollout_once():
    outputs = [
        segment(0, 0, 0, reward=1.0),
        segment(0, 1, 0, reward=4.0, turn_rewards=[(0, 0.5)]),  # three segments share their rollout's terminal reward
        segment(0, 1, 1, reward=4.0, turn_rewards=[(0, 0.25)]),
        segment(0, 1, 2, reward=4.0),
        segment(7, 0, 0, reward={"score": 2.0, "x": 9.0}),
        segment(7, 1, 0, reward=None, turn_rewards=[(1, -1.0)]),
    ]
    of = data.by_unit(outputs)
    rewards, groups, rollout_of = of.rewards, of.groups, of.index
    assert rewards.tolist() == [1.0, 4.75, 2.0, -1.0]
    assert groups.tolist() == [0, 0, 7, 7]
    assert rollout_of.tolist() == [0, 1, 1, 1, 2, 3]


def test_the_last_segments_terminal_reward_is_the_rollouts():
    outputs = [segment(0, 0, 0, reward=-3.0), segment(0, 0, 1, reward=2.0)]
    assert data.by_unit(outputs).rewards.tolist() == [2.0]


# ---------------------------------------------------------------------------------------------------------------------
# Balance and micro-batches

lengths_lists = st.lists(st.integers(1, 50), max_size=30)


def test_balance_by_hand():
    assert data.balance([7, 1, 6, 2, 4], 2) == [[0, 1, 3], [2, 4]]  # 7; 6 4; 2 to the 7; 1 to the 9
    assert data.balance([3, 3, 3], 1) == [[0, 1, 2]]
    assert data.balance([5], 3) == [[0], [], []]
    assert data.balance([], 2) == [[], []]
    assert data.balance(torch.tensor([1, 2]), 2) == [[1], [0]]


@few
@given(lengths_lists, st.integers(1, 8))
def test_balance_is_a_partition_of_even_weight(lengths, n):
    shares = data.balance(lengths, n)
    assert len(shares) == n
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    totals = [sum(lengths[i] for i in share) for share in shares]
    assert max(totals) - min(totals) <= max(lengths, default=0)
    assert data.balance(lengths, n) == shares


def micro_batches(lengths: list[int], budget: int, packed: bool = True) -> list[list[int]]:
    """The micro-batches of the only rank, each sorted, of rows of these lengths that share nothing, or, not packed,
    their prompts."""
    firsts = [row + 1 if packed else 1 for row in range(len(lengths))]
    batch = batch_of([[first] for first in firsts], [[7] * (length - 1) for length in lengths])
    rows = range(len(lengths))
    with pytest.MonkeyPatch.context() as patch:
        (micros,) = [data.micro_batches_of_this_rank(batch, rows, budget, packed) for _ in ranks(patch, 1)]
    assert not any(micro.is_filler for micro in micros)
    return sorted(sorted(micro.rows) for micro in micros)


def test_micro_batches_by_hand():
    assert micro_batches([6, 4, 5, 3, 1], 10) == [[0, 1], [2, 3, 4]]
    assert micro_batches([10, 10], 10) == [[0], [1]]
    assert micro_batches([1, 2], 3) == [[0, 1]]
    assert micro_batches([11], 11) == [[0]]


def test_micro_batches_that_are_not_packed_count_their_padding():
    assert micro_batches([5, 4, 3, 2, 1], 10, packed=False) == [[0, 1], [2, 3, 4]]  # 5 + 5; 3 + 3 + 3
    assert micro_batches([5, 4, 3, 2, 1], 9, packed=False) == [[0], [1, 2], [3, 4]]  # 5; 4 + 4; 2 + 2
    assert micro_batches([1, 4, 1], 12, packed=False) == [[0, 1, 2]]


@few
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(50, 120))
def test_micro_batches_are_a_partition_within_the_budget(lengths, budget):
    batches = micro_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    totals = sorted(sum(lengths[i] for i in batch) for batch in batches)
    assert all(0 < total <= budget for total in totals)
    # No two could be one at the whole budget: the least that first-fit owes us.
    assert len(totals) < 2 or sum(totals) > len(totals) * budget / 2


# ---------------------------------------------------------------------------------------------------------------------
# Packing

PADDED = torch.tensor([[5, 6, 7, 0], [8, 0, 0, 0], [1, 2, 3, 4]])


@pytest.mark.parametrize(
    "ids", [PADDED, PADDED.tolist(), [[5, 6, 7], [8], [1, 2, 3, 4]]], ids=["tensor", "padded", "ragged"]
)
def test_pack_by_hand(ids):
    input_ids, position_ids, cu_seqlens, max_seqlen = data.pack(ids, [3, 1, 4])
    assert input_ids.tolist() == [[5, 6, 7, 8, 1, 2, 3, 4]]
    assert position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
    assert cu_seqlens.tolist() == [0, 3, 4, 8]
    assert (cu_seqlens.dtype, input_ids.dtype, position_ids.dtype) == (torch.int32, torch.int64, torch.int64)
    assert max_seqlen == 4 and isinstance(max_seqlen, int)


def test_pack_takes_a_tensor_of_lengths():
    assert data.pack(PADDED, torch.tensor([3, 1, 4]))[2].tolist() == [0, 3, 4, 8]


def test_pack_rows_by_hand():
    batch = data.collate([
        make_output([1, 2, 3], [1, 1, 0, 1]),
        make_output([9, 9], [1]),
        make_output([4], [1, 0]),
    ])  # fmt: skip
    micro = data.in_prefix_order(batch, [2, 0])
    assert micro == data.MicroBatch(rows=[0, 2], lengths=[7, 3], shared=[0, 0])
    packed = data.pack_rows(batch, micro, "cpu")
    assert packed["inputs"]["input_ids"].tolist() == [[1, 2, 3, 100, 101, 102, 103, 4, 100, 101]]
    assert packed["inputs"]["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 0, 1, 2]]
    assert packed["inputs"]["cu_seqlens"].tolist() == [0, 7, 10]
    assert packed["inputs"]["max_seqlen"] == 7 and "key_index" not in packed["inputs"]  # nothing is shared
    # The state that predicts a token is the one before it: the last prompt token for the first of a response.
    assert packed["source"].tolist() == [2, 3, 5, 7]
    assert packed["targets"].tolist() == [100, 101, 103, 100]
    assert packed["pair"].tolist() == [0, 1, 2, 3]
    assert [at.tolist() for at in packed["at"]] == [[0, 0, 0, 1], [0, 1, 3, 0]]  # rows of the micro-batch
    assert packed["shape"] == (2, 4)


def batch_of(prompts: list[list[int]], responses: list[list[int]]) -> dict:
    """A batch of such sequences, in which every response token is sampled."""
    outputs = [make_output(prompt, [1] * len(response)) for prompt, response in zip(prompts, responses, strict=True)]
    for output, response in zip(outputs, responses, strict=True):
        output.response_ids = list(response)
    return data.collate(outputs)


def test_a_shared_prefix_is_packed_once():
    prompt = [1, 2, 3]
    batch = batch_of([prompt, [8], prompt, prompt + [4, 6], prompt], [[4, 5], [9], [7], [4], [4, 5]])
    micro = data.in_prefix_order(batch, range(5))
    assert micro.rows == [0, 4, 3, 2, 1]  # equal ones in their order
    assert (micro.lengths, micro.shared) == ([5, 5, 6, 4, 2], [0, 5, 4, 3, 0])
    packed = data.pack_rows(batch, micro, "cpu")
    assert packed["inputs"]["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 4, 7, 8, 9]]
    assert packed["inputs"]["position_ids"].tolist() == [[0, 1, 2, 3, 4, 4, 5, 3, 0, 1]]
    assert packed["inputs"]["cu_seqlens"].tolist() == [0, 5, 7, 8, 10]  # the copy has no queries of its own
    assert packed["inputs"]["cu_seqlens_k"].tolist() == [0, 5, 11, 15, 17]
    assert packed["inputs"]["key_index"].tolist() == [0, 1, 2, 3, 4] + [0, 1, 2, 3, 5, 6] + [0, 1, 2, 7] + [8, 9]
    # The last prompt token predicts 4, for two rows at once, and 7; its successor 5; 6 predicts 4; 8 predicts 9.
    pairs = list(zip(packed["source"].tolist(), packed["targets"].tolist(), strict=True))
    assert pairs == [(2, 4), (2, 7), (3, 5), (5, 4), (8, 9)]
    at = [
        pairs[k] + (micro.rows[r], c) for k, r, c in zip(packed["pair"].tolist(), *(x.tolist() for x in packed["at"]))
    ]
    assert sorted(at, key=lambda x: x[2:]) == [
        (2, 4, 0, 0), (3, 5, 0, 1), (8, 9, 1, 0), (2, 7, 2, 0), (5, 4, 3, 0), (2, 4, 4, 0), (3, 5, 4, 1)
    ]  # fmt: skip


def test_prefixes_end_where_a_sequence_does_not_where_the_padding_begins():
    batch = batch_of([[5, 6], [5, 6]], [[0], [0, 0, 7]])  # 0 is what rows are padded with, and a token as well
    assert data.in_prefix_order(batch, [1, 0]) == data.MicroBatch([0, 1], [3, 5], [0, 3])


@st.composite
def forests(draw) -> dict:
    """Groups, forks of forks, identical sequences, one the prefix of another: prompts from earlier sequences."""
    ids = st.lists(st.integers(1, 39), min_size=1, max_size=7)
    prompts, responses = [], []
    for _ in range(draw(st.integers(1, 7))):
        prompt, response = draw(ids), draw(ids)
        if prompts and draw(st.booleans()):
            i = draw(st.integers(0, len(prompts) - 1))
            whole = prompts[i] + responses[i]
            prompt = draw(st.sampled_from([prompts[i], whole, whole[: draw(st.integers(1, len(whole)))]]))
            response = draw(st.sampled_from([response, responses[i], responses[i][:1]]))
        prompts.append(prompt)
        responses.append(response)
    return batch_of(prompts, responses)


def ranks(monkeypatch, n: int):
    """Makes data believe that it is rank 0, 1, ... of n, one after the other."""
    monkeypatch.setattr(data.dist, "get_world_size", lambda: n)
    for rank in range(n):
        monkeypatch.setattr(data.dist, "get_rank", lambda rank=rank: rank)
        yield rank


def unique_tokens(batch: dict, micro: data.MicroBatch) -> int:
    return data.pack_rows(batch, micro, "cpu")["inputs"]["input_ids"].numel()


@few
@given(forests(), st.randoms(use_true_random=False))
def test_a_part_of_a_micro_batch_shares_what_its_rows_alone_share(batch, random):
    n = len(batch["lengths"])
    positions = random.sample(range(n), random.randint(1, n))
    part = data.in_prefix_order(batch, range(n)).select(positions)
    alone = data.in_prefix_order(batch, part.rows)
    assert part == alone and len(part.rows) == len(positions)
    ids = [batch["input_ids"][row, :length].tolist() for row, length in zip(part.rows, part.lengths, strict=True)]
    for k in range(1, len(ids)):
        common = os.path.commonprefix([ids[k - 1], ids[k]])
        assert part.shared[k] == len(common)


@few
@given(forests(), st.integers(0, 40), st.integers(1, 3))
def test_shares_are_a_partition_within_the_budget(batch, extra, n):
    budget = max(batch["lengths"].tolist()) + extra
    with pytest.MonkeyPatch.context() as patch:
        rows = range(len(batch["lengths"]))
        dealt = [data.micro_batches_of_this_rank(batch, rows, budget) for _ in ranks(patch, n)]
    assert len({len(share) for share in dealt}) == 1
    real = [micro for share in dealt for micro in share if not micro.is_filler]
    assert sorted(row for micro in real for row in micro.rows) == list(range(len(batch["lengths"])))
    assert all(unique_tokens(batch, micro) <= budget for micro in real)
    assert all(micro == data.in_prefix_order(batch, micro.rows) for micro in real)


def test_groups_stay_together_and_are_cut_where_little_is_shared(monkeypatch):
    system = list(range(1, 9))
    prompts = [system + [30 + g] * 10 for g in range(6) for _ in range(4)]
    batch = batch_of(prompts, [[10 + i % 4] * 5 for i in range(24)])  # a group: 10 + 4 x 5 tokens after the 8
    for n, budget, micros in [(1, 68, 3), (1, 67, 6), (3, 1000, 1), (2, 100, 1), (6, 38, 1)]:
        for _ in ranks(monkeypatch, n):
            share = data.micro_batches_of_this_rank(batch, range(24), budget)
            assert [micro.is_filler for micro in share] == [False] * micros
            sizes = {unique_tokens(batch, micro) for micro in share}
            assert sizes == {8 + 180 // (n * micros)}  # whole groups, and the system prompt once
    (share,) = [data.micro_batches_of_this_rank(batch, range(24), 37) for _ in ranks(monkeypatch, 1)]
    sizes = [unique_tokens(batch, micro) for micro in share]
    assert max(sizes) <= 37 and sum(sizes) <= 6 * (2 * 18 + 20)  # a group in two parts, its prompt twice


@few
@given(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_pack_rows_predicts_every_sampled_token(masks, random):
    outputs = [make_output([7] * random.randint(1, 4), mask) for mask in masks]
    for b, output in enumerate(outputs):
        output.response_ids = [1000 * (b + 1) + k for k in range(len(output.response_ids))]
    batch = data.collate(outputs)
    rows = random.sample(range(len(masks)), random.randint(1, len(masks)))
    micro = data.in_prefix_order(batch, rows)
    assert sorted(micro.rows) == sorted(rows)
    rows = micro.rows
    packed = data.pack_rows(batch, micro, "cpu")
    placed = torch.zeros(packed["shape"], dtype=torch.long)
    placed = placed.index_put(packed["at"], packed["targets"][packed["pair"]])
    for row, values in zip(rows, placed.tolist(), strict=True):
        sampled = zip(outputs[row].response_ids, outputs[row].response_mask, strict=True)
        ids = [token * mask for token, mask in sampled]
        assert values == ids + [0] * (len(values) - len(ids))
    ids, positions = packed["inputs"]["input_ids"][0], packed["inputs"]["position_ids"][0]
    for source, row, column in zip(packed["source"][packed["pair"]], *packed["at"], strict=True):
        b = rows[row]
        before = batch["prompt_lengths"][b] + column - 1
        assert (ids[source], positions[source]) == (batch["input_ids"][b, before], before)


# ---------------------------------------------------------------------------------------------------------------------
# Packed attention

SIZES = dict(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, pad_token_id=0, bos_token_id=None,
    eos_token_id=1,
)  # fmt: skip
MODELS = {
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen2-untied": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "qwen3-tied": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=12, tie_word_embeddings=True)),
    "qwen3-untied": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=12, tie_word_embeddings=False)),
    "qwen2-no-gqa": (Qwen2ForCausalLM, Qwen2Config(**SIZES | {"num_key_value_heads": 4})),
}
LENGTHS = [5, 1, 9, 2]


@pytest.fixture(scope="module", autouse=True)
def registered():
    data.register_packed_attention()


def packed_and_eager(name: str):
    """The same weights twice: with packed and with eager attention."""
    model_class, config = MODELS[name]
    torch.manual_seed(0)
    eager, packed = (  # a config of its own for each: it holds the implementation
        model_class._from_config(copy.deepcopy(config), attn_implementation=kind) for kind in ("eager", "packed")
    )
    packed.load_state_dict(eager.state_dict())
    return packed, eager


def forward(model, rows, lengths) -> torch.Tensor:
    input_ids, position_ids, cu_seqlens, max_seqlen = data.pack(rows, lengths)
    return model(
        input_ids=input_ids, position_ids=position_ids, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, use_cache=False
    ).logits[0]  # (S, V)


def random_rows(lengths: list[int]) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(0, 40, (n,), generator=g) for n in lengths]


@pytest.mark.parametrize("name", MODELS)
def test_packed_attention_is_eager_attention_of_each_sequence(name):
    packed, eager = packed_and_eager(name)
    rows = random_rows(LENGTHS)
    logits = forward(packed, rows, LENGTHS)
    expected = torch.cat([eager(input_ids=row[None], use_cache=False).logits[0] for row in rows])
    assert expected.std() > 0.1  # there is something to compare
    close(logits, expected, rtol=1e-5, atol=1e-5)

    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = dict(eager.named_parameters())
    assert len(gradients) > 10
    for parameter_name, parameter in packed.named_parameters():
        difference = (parameter.grad - gradients[parameter_name].grad).norm()
        assert difference <= 1e-5 * gradients[parameter_name].grad.norm(), parameter_name


def scores_and_gradients(model, batch: dict, micros: list[data.MicroBatch]) -> tuple[torch.Tensor, dict]:
    """Logprobs (B, T) and the parameters' gradients of their weighted sum, micro-batch by micro-batch."""
    model.zero_grad()
    scores = torch.zeros_like(batch["response_mask"])
    weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(2))
    for micro in micros:
        packed = data.pack_rows(batch, micro, "cpu")
        logits = model(**packed["inputs"], use_cache=False).logits[0, packed["source"]].log_softmax(-1)
        logprobs = logits.gather(1, packed["targets"][:, None])[packed["pair"], 0]
        found = logprobs.new_zeros(packed["shape"]).index_put(packed["at"], logprobs)
        (found * weights[micro.rows]).sum().backward()
        scores[micro.rows] = found.detach()
    return scores, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@settings(max_examples=12, deadline=None, derandomize=True)
@given(forests(), st.integers(0, 40), st.sampled_from(["qwen2-tied", "qwen3-untied"]))
def test_a_forest_scores_and_learns_as_its_rows_do_alone(batch, extra, name):
    model, _ = packed_and_eager(name)
    rows, budget = range(len(batch["lengths"])), max(batch["lengths"].tolist()) + extra
    scores, gradients = scores_and_gradients(model, batch, [data.in_prefix_order(batch, [row]) for row in rows])
    with pytest.MonkeyPatch.context() as patch:
        (micros,) = [data.micro_batches_of_this_rank(batch, rows, budget) for _ in ranks(patch, 1)]
    shared, gradients_shared = scores_and_gradients(model, batch, micros)
    close(shared, scores, rtol=1e-5, atol=1e-5)
    whole = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for parameter, gradient in gradients.items():  # some are 0: of queries and keys where there is one key
        difference = (gradients_shared[parameter] - gradient).norm()
        assert difference <= 1e-5 * gradient.norm() + 1e-6 * whole, parameter


def test_a_sequence_does_not_see_its_neighbours():
    packed, _ = packed_and_eager("qwen2-tied")
    rows = random_rows([4, 3, 5])
    with torch.no_grad():
        before = forward(packed, rows, [4, 3, 5])
        rows[1] = (rows[1] + 1) % 40
        after = forward(packed, rows, [4, 3, 5])
    assert torch.equal(before[:4], after[:4]) and torch.equal(before[7:], after[7:])
    assert not torch.allclose(before[4:7], after[4:7])


def heads(n_heads: int, length: int = 6) -> torch.Tensor:
    return torch.randn(1, n_heads, length, 8, generator=torch.Generator().manual_seed(n_heads))


def attend(module=None, **changes):
    arguments = dict(cu_seqlens=torch.tensor([0, 2, 6], dtype=torch.int32), max_seqlen=4, scaling=0.5) | changes
    return data.packed_attention(module or SimpleNamespace(), heads(4), heads(2), heads(2), None, **arguments)


def test_packed_attention_by_hand():
    out, weights = attend()
    assert weights is None and out.shape == (1, 6, 4, 8)
    query, key, value = heads(4), heads(2), heads(2)
    segment_of = [0, 0, 1, 1, 1, 1]
    for head in range(4):
        for i in range(6):
            seen = [j for j in range(i + 1) if segment_of[j] == segment_of[i]]
            scores = torch.stack([0.5 * query[0, head, i] @ key[0, head // 2, j] for j in seen]).softmax(0)
            close(out[0, i, head], scores @ value[0, head // 2, seen], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes, said", [
    (dict(cu_seqlens=None), "needs cu_seqlens and max_seqlen"),
    (dict(module=SimpleNamespace(is_causal=False)), "causal"),
    (dict(is_causal=False), "causal"),
    (dict(max_seqlen=None), "max_seqlen"),
])  # fmt: skip
def test_packed_attention_refuses_what_it_does_not_implement(changes, said):
    with pytest.raises(ValueError, match=said):
        attend(**changes)


def test_windows_soft_caps_and_sinks_by_hand():
    four, query, key, value = torch.tensor([0.5, -1.0, 2.0, 0.0]), heads(4), heads(2), heads(2)
    for window, softcap, sinks in [(2, None, None), (None, 0.7, None), (None, None, four), (3, 0.7, four)]:
        out, _ = attend(sliding_window=window, softcap=softcap, s_aux=sinks)
        for head in range(4):
            for i in range(6):
                seen = [j for j in range(i + 1) if (j < 2) == (i < 2) and i - j < (window or 9)]
                scores = 0.5 * key[0, head // 2, seen] @ query[0, head, i]
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                scores = scores if sinks is None else torch.cat([scores, sinks[head, None]])
                close(out[0, i, head], scores.softmax(0)[: len(seen)] @ value[0, head // 2, seen], rtol=1e-5, atol=1e-6)


def test_a_window_that_hides_nothing_is_fine():
    close(attend(sliding_window=4)[0], attend()[0])
    close(attend(module=SimpleNamespace(is_causal=True, sinks=None))[0], attend()[0])


def test_a_model_called_without_cu_seqlens_raises():
    packed, _ = packed_and_eager("qwen2-tied")
    with pytest.raises(ValueError, match="call the model on what data.pack returns"):
        packed(input_ids=torch.ones(1, 3, dtype=torch.long), use_cache=False)


def test_describe_by_hand():
    def out(prompt, sample, n, reward, **more):
        response = dict(response_ids=[5] * n, response_mask=[1] * n, response_logprobs=[-1.0] * n)
        response["response_versions"] = [0] * n
        extra = {"prompt": prompt, "sample": sample, "segment": 0}
        return AgentLoopOutput(prompt_ids=[1, 2], reward=reward, extra=extra, num_turns=2, **response, **more)

    outputs = [
        out(0, 0, 2, {"score": 1.0, "style": 3, "note": "fine"}, metrics={"tool_calls": 2, "tool_s": 1.5, "who": "x"}),
        out(0, 1, 4, 0.5, stop_reason="length", metrics={"generate_s": 4.0}, turn_rewards=[(0, 0.25)]),
    ]
    got = describe(outputs, data.by_unit(outputs))
    assert got == {
        "reward/mean": 0.875, "reward/std": 0.125, "reward/min": 0.75, "reward/max": 1.0,
        "prompt_length/mean": 2, "response_length/mean": 3, "response_length/max": 4,
        "response_length/clipped_ratio": 0.5, "num_turns/mean": 2, "num_turns/max": 2,
        "stop_reason/length": 0.5, "stop_reason/stop": 0.5, "reward_part/style": 3, "rollout/tool_calls": 1,
        "rollout/segments": 1, "rollout/trajectories": 2,
        "timing/generate_s_min": 0, "timing/generate_s_mean": 2, "timing/generate_s_max": 4,
        "timing/tool_s_min": 0, "timing/tool_s_mean": 0.75, "timing/tool_s_max": 1.5,
    }  # fmt: skip
    both = [out(0, 0, 2, 1.0), *outputs]
    got = describe(both, data.by_unit(both))  # the first rollout is two outputs
    assert (got["rollout/segments"], got["rollout/tool_calls"]) == (1.5, 2 / 3)
