"""data.py: task files and rows, batches by hand, packing as a partition, packed attention against
transformers' own eager attention of one sequence at a time."""

import copy
import itertools
import json
import os
import textwrap
from collections import Counter, defaultdict
from types import SimpleNamespace

import datasets
import pytest
import torch
from conftest import output_of, rewards_of_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import data
from agent_loop import AgentLoopOutput, BadInput, Interaction, as_tool, total_reward
from examples import calculator
from flatrl import notices, tables
from flatrl.rows import copy_containers
from train import Args

close = torch.testing.assert_close
HELLO = [{"role": "user", "content": "hello"}]
BRIEF = {"role": "system", "content": "Be brief."}
NUMBERS = itertools.count(1000)  # for the prompts, where a test gives none


def make_output(prompt: list[int], mask: list[int], **more) -> AgentLoopOutput:
    """An output with this mask, whose response token k is 100 + k, with the logprob -k/8 - 1
    and the version k."""
    n = len(mask)
    lists = {
        "response_logprobs": [(-k / 8 - 1) * mask[k] for k in range(n)],
        "response_versions": [k if mask[k] else -1 for k in range(n)],
        "extra": {"prompt": next(NUMBERS), "sample": 0, "segment": 0},
    }
    return output_of(mask, prompt, [100 + k for k in range(n)], **lists | more)


# ---------------------------------------------------------------- task files


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

        def load(split): return [split]
        def reward(output, row): return Thing().x
    """)
    task = data.load_task(path)
    assert task.load("val") == ["val"] and task.reward(None, None) == 1
    with pytest.raises(BadInput, match="has no function build_model"):
        data.load_task(path, ("load", "reward", "build_model"))


REWARD = "def reward(output, row): return 0\n"
LOAD = "def load(split): return []\n"


@pytest.mark.parametrize("text, said", [
    (REWARD, r"my_task\.py has no function load"),
    (LOAD, r"my_task\.py has no function reward"),
    (LOAD + "reward = 1\n", r"my_task\.py has no function reward"),
    (LOAD + "def reward(output): return 0\n", r"reward must take 2 argument"),
    (LOAD + REWARD + "import no_such_module\n", "does not import, line 3: ModuleNotFoundError"),
    ("def load(:\n", "does not import, line 1: SyntaxError"),
    ("\n1 / 0\n", "does not import, line 2: ZeroDivisionError"),
])  # fmt: skip
def test_a_task_file_that_does_not_work(tmp_path, text, said):
    path = write_task(tmp_path, text)
    with pytest.raises(BadInput, match=said) as error:
        data.load_task(path)
    assert path in str(error.value) and "\n" not in str(error.value)


def test_a_task_file_that_is_none(tmp_path):
    (tmp_path / "task.txt").write_text(LOAD + REWARD)
    for name, said in (("nowhere.py", "no such"), (".", "no such"), ("task.txt", "not a Python")):
        with pytest.raises(BadInput, match=f"{name}: {said} file"):
            data.load_task(f"{tmp_path}/{name}")


# ---------------------------------------------------------------- rows


def rows_of(rows, files=None, key="prompt", **task) -> list[dict]:
    task = SimpleNamespace(load=lambda split: rows, **task)
    return data.load_rows(task, "train", files, key)


def test_rows_are_numbered_and_get_the_system_prompt():
    task = SimpleNamespace(load=lambda split: [{"prompt": HELLO, "split": split}])
    assert data.load_rows(task, "val") == [{"index": 0, "prompt": HELLO, "split": "val"}]

    own = [{"role": "system", "content": "Be long."}, *HELLO]
    filled = [{"role": "user", "content": "hello", "tool_calls": None}]  # as parquet does
    source = [
        {"prompt": HELLO, "index": 7},
        {"prompt": own, "extra_info": {"index": 42}},
        {"prompt": filled, "extra_info": None},
        {"prompt": "hello"},
    ]
    before = copy.deepcopy(source)
    rows = rows_of(source, SYSTEM_PROMPT="Be brief.")
    assert [row["index"] for row in rows] == [7, 42, 2, 3]
    brief = [BRIEF, *HELLO]
    assert [row["prompt"] for row in rows] == [brief, own, brief, brief]
    assert source == before  # the task's rows stay as they are


def test_any_column_may_be_the_prompt():
    source = [{"prompt": HELLO, "question": "why?", "messages": HELLO * 3, "answer": 4}]
    why = [{"role": "user", "content": "why?"}]
    for key, prompt in (("question", why), ("messages", HELLO * 3)):
        assert rows_of(source, key=key) == [{"index": 0, **source[0], "prompt": prompt}]
    said = r"row 0 .* no column 'x'; give --prompt_key one of \['answer', 'messages', 'prompt'"
    with pytest.raises(BadInput, match=said):
        rows_of(source, key="x")


NO_PROMPT = "'prompt' must be a text or a list of chat messages"


@pytest.mark.parametrize("rows, said", [
    ([], r"load\('train'\) has no rows"),
    ([{"prompt": HELLO}, {"x": "hello"}], r"row 1 of load\('train'\) has no column 'prompt'"),
    ([{"prompt": 5}], rf"row 0 of load\('train'\): {NO_PROMPT}, got 5"),
    ([{"prompt": ["hello"]}], NO_PROMPT),
    ([{"prompt": [{"content": "hello"}]}], NO_PROMPT),
    ([{"prompt": {"role": "user", "content": "hello"}}], NO_PROMPT),
    (["hello"], "row 0"),
])  # fmt: skip
def test_rows_that_are_none(rows, said):
    with pytest.raises(BadInput, match=said) as error:
        rows_of(rows)
    assert "\n" not in str(error.value)


def test_a_prompt_may_be_empty_where_an_interaction_speaks_first(tokenizer):
    host = SimpleNamespace(INTERACTIONS=[Interaction()])
    rows = rows_of([{"prompt": []}], INTERACTIONS=host.INTERACTIONS, SYSTEM_PROMPT="Be brief.")
    assert rows[0]["prompt"] == [BRIEF]
    rows = [{"prompt": [], "index": 0}]
    assert data.filter_overlong(rows, tokenizer, host, Args()) == rows
    with pytest.raises(BadInput, match="row 0: its prompt is empty, and no Interaction speaks"):
        data.filter_overlong(rows, tokenizer, SimpleNamespace(), Args())


def test_a_copy_has_its_own_containers():
    tree = {"chat": [{"x": (1, [2])}], "counts": Counter(a=1), "lists": defaultdict(list)}
    copied = copy_containers(tree)
    assert copied == tree
    assert [type(value) for value in copied.values()] == [list, Counter, defaultdict]
    copied["chat"][0]["x"][1].append(3)
    copied["counts"]["a"] += 1
    copied["lists"]["y"].append(4)
    assert tree == {"chat": [{"x": (1, [2])}], "counts": {"a": 1}, "lists": {}}


# ---------------------------------------------------------------- files

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"question {i}"}],
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        # Parquet gives every row all tools' keys.
        "extra_info": {
            "index": 10 + i,
            "tools_kwargs": {f"tool {i}": {"create_kwargs": {"x": str(i)}}},
        },
    }
    for i in range(3)
]


def test_parquet_and_jsonl_round_trip(tmp_path):
    parquet, jsonl = str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")
    datasets.Dataset.from_list(ROWS[:2]).to_parquet(parquet)
    (tmp_path / "b.jsonl").write_text(json.dumps(ROWS[2]) + "\n")
    rows = rows_of(None, [parquet, jsonl])  # in the order given
    assert rows == [{"index": 10 + i, **row} for i, row in enumerate(ROWS)]
    rows = rows_of(None, [jsonl], SYSTEM_PROMPT="Be brief.")
    assert rows[0]["prompt"] == [BRIEF, *ROWS[2]["prompt"]]


def test_jsonl_is_json_line_by_line_with_the_types_it_has(tmp_path):
    rows = [{"truth": truth} for truth in (1, "x", {"a": [None]}, "\u2028")]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    contents = {"a.jsonl": text + "\n\n", "b.json": json.dumps(rows), "c.jsonl": "\ufeff" + text}
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert tables.read_files([str(tmp_path / name)]) == rows
    (tmp_path / "a.jsonl").write_text(text + "\n{")
    with pytest.raises(BadInput, match=r"a\.jsonl, line 5, is no row: json.decoder.JSONDecode"):
        tables.read_files([str(tmp_path / "a.jsonl")])


def test_csv_is_text(tmp_path):
    file = tmp_path / "a.csv"
    text = '\ufeffquestion,answer\r\n"What is ""1,\n2""?",007\r\né,\r\n'
    file.write_text(text, newline="", encoding="utf-8")
    first, second = tables.read_files([str(file)])
    assert first == {"question": 'What is "1,\n2"?', "answer": "007"}
    assert second == {"question": "é", "answer": ""}
    file.write_text("question\nhello,5\n")
    with pytest.raises(BadInput, match=r"row 0 of .*a\.csv: a column's name is a str"):
        rows_of(None, [str(file)], "question")


def test_a_folder_of_datasets_and_a_name_of_the_hub(tmp_path, monkeypatch):
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=table, test=table).save_to_disk(tmp_path / "two")
    rows = tables.read_files([f"{tmp_path}/one"])
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in ROWS]
    assert tables.read_files([f"{tmp_path}/one", f"{tmp_path}/two/test"]) == rows * 2
    said = r"two has splits: give .*two/ and one of \['train', 'test'\]"
    with pytest.raises(BadInput, match=said):
        tables.read_files([f"{tmp_path}/two"])

    asked = []

    def load_dataset(*name, split):
        asked.append((*name, split))
        return table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert tables.read_files(["openai/gsm8k:main:train", "me/mine:test"]) == rows * 2
    assert asked == [("openai/gsm8k", "main", "train"), ("me/mine", "test")]
    with pytest.raises(BadInput, match=r"me/mine: no such file .*NAME:SPLIT or NAME:CONFIG:SP"):
        tables.read_files(["me/mine"])
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(BadInput, match="pip install datasets"):
        tables.read_files([str(tmp_path)])


@pytest.mark.parametrize("name, content, said", [
    ("nowhere.parquet", None, "nowhere.parquet: no such file"),
    ("rows.txt", "hello", r"rows.txt can't be read as \.parquet, \.jsonl, \.csv or a folder"),
    ("cut.jsonl", '{"prompt": [\n', "cut.jsonl"),
    ("cut.csv", 'question\n"hello\n', r"cut\.csv can't be read as .*: _csv.Error: unexpected"),
    ("cut.parquet", "PAR1", "cut.parquet"),
    ("empty.jsonl", "", "empty.jsonl"),
    ("other.jsonl", '{"question": "?"}\n', r"row 0 of .*other\.jsonl has no column 'prompt'"),
])  # fmt: skip
def test_files_that_are_none(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(BadInput, match=said):
        rows_of(None, [str(tmp_path / name)])


# ---------------------------------------------------------------- overlong prompts


def letters(n: int) -> dict:
    return {"prompt": [{"role": "user", "content": "x" * n}]}


def rendered(tokenizer, prompt, tools=None) -> int:
    ids = tokenizer.apply_chat_template(
        prompt, tools=tools, add_generation_prompt=True, return_dict=False
    )
    return len(ids)


def test_overlong_prompts_are_filtered_in_order(tokenizer):
    task = SimpleNamespace()
    rows = [letters(n) for n in (5, 40, 10, 11, 1)]
    limit = rendered(tokenizer, rows[2]["prompt"])  # with template and generation prompt
    kept = data.filter_overlong(rows, tokenizer, task, Args(max_prompt_tokens=limit))
    assert kept == [rows[0], rows[2], rows[4]]
    longest = rendered(tokenizer, rows[1]["prompt"])
    said = rf"all 5 are longer than --max_prompt_tokens 4.*longest has {longest} tokens"
    with pytest.raises(BadInput, match=said):
        data.filter_overlong(rows, tokenizer, task, Args(max_prompt_tokens=4))


def test_the_tools_of_a_row_count_into_its_prompt(tokenizer):
    task = SimpleNamespace(TOOLS=[calculator.calculator])
    rows = [letters(3)]
    schema = as_tool(calculator.calculator).schema
    limit = rendered(tokenizer, rows[0]["prompt"], [schema])
    assert rendered(tokenizer, rows[0]["prompt"]) < limit
    assert data.filter_overlong(rows, tokenizer, task, Args(max_prompt_tokens=limit)) == rows
    with pytest.raises(BadInput, match="no prompt left"):
        data.filter_overlong(rows, tokenizer, task, Args(max_prompt_tokens=limit - 1))


@pytest.mark.parametrize("row, said", [
    ({"agent_name": "swarm"}, "no agent loop 'swarm'"),
    ({"extra_info": {"tools_kwargs": {"abacus": {}}}}, r"tools_kwargs names \['abacus'\]"),
    ({"extra_info": {"interaction_kwargs": {"name": "chess"}}}, "kwargs names 'chess'"),
])  # fmt: skip
def test_names_that_a_row_gets_wrong_are_found_before_the_run(tokenizer, row, said):
    rows = [letters(1), letters(1) | row]
    with pytest.raises(BadInput, match=said):
        data.filter_overlong(rows, tokenizer, SimpleNamespace(), Args())


# ---------------------------------------------------------------- tables that stay on disk


@pytest.fixture
def big_table(tmp_path, monkeypatch):
    """Writes a table of 250 rows, every third of them long. More than 200 stay on disk."""
    monkeypatch.setattr(tables, "MAX_ROWS_IN_MEMORY", 200)

    def write(**more) -> list[str]:
        rows = []
        for i in range(250):
            text = f"{i}" * (1 if i % 3 else 41)
            row = {name: value if i == 230 else None for name, value in more.items()}
            rows.append({"prompt": [{"role": "user", "content": text}], **row})
        file = str(tmp_path / f"{len(more)}.parquet")
        datasets.Dataset.from_list(rows).to_parquet(file)
        return [file]

    return write


def test_a_big_table_stays_on_disk_and_gives_what_a_list_gives(
    big_table, tokenizer, monkeypatch, process_group
):
    file = big_table()
    task = SimpleNamespace(SYSTEM_PROMPT="Be brief.")
    args = Args(max_prompt_tokens=rendered(tokenizer, [BRIEF, *HELLO]))
    rows = data.load_rows(task, "train", file)
    kept = data.filter_overlong(rows, tokenizer, task, args)
    assert not isinstance(rows, list) and not isinstance(kept, list) and len(rows) == 250
    assert [row["index"] for row in kept] == [i for i in range(250) if i % 3]
    assert kept[-1]["prompt"] == [BRIEF, {"role": "user", "content": "248"}]
    assert type(kept[7]["index"]) is int and kept[7]["index"] == 11
    assert kept[7] == kept[7] is not kept[7]  # made whenever it is asked for

    monkeypatch.setattr(tables, "MAX_ROWS_IN_MEMORY", 1000)
    in_memory = data.load_rows(task, "train", file)
    assert isinstance(in_memory, list) and in_memory == list(rows)
    assert data.filter_overlong(in_memory, tokenizer, task, args) == list(kept)

    # Rows of a huge table are looked at when they are drawn: instead of a long one, the next.
    monkeypatch.setattr(tables, "MAX_ROWS_CHECKED_AT_START", 200)
    huge = data.filter_overlong(in_memory, tokenizer, task, args)
    assert [huge[i]["index"] for i in (0, 1, 2, 3, -1)] == [1, 1, 2, 4, 1]
    order = data.prompt_order(250, 0, 1000, args.seed)
    share = sum(i % 3 == 0 for i in order) / 1000
    assert len(huge) == 250 and huge.overlong == pytest.approx(share)
    assert notices.dropped(huge, 250).startswith(f"about {share:.1%} overlong: another one")
    assert notices.dropped([1, 2], 5) == "3 overlong ones dropped"


def test_a_wrong_row_of_a_big_table_is_one_line(big_table, tokenizer, process_group):
    rows = rows_of(None, big_table(agent_name="swarm"))
    with pytest.raises(BadInput, match=r"^no agent loop 'swarm': .*task$"):
        data.filter_overlong(rows, tokenizer, SimpleNamespace(), Args())
    rows = rows_of(None, big_table(agent_name="single_turn", data_source="x"), "question")
    with pytest.raises(BadInput, match=r"^row 0 of .*2\.parquet has no column 'question'; give"):
        data.filter_overlong(rows, tokenizer, SimpleNamespace(), Args())


# ---------------------------------------------------------------- the order of prompts


@given(n=st.integers(1, 30), seed=st.integers(0, 99), start=st.integers(0, 60))
def test_epochs_are_permutations_and_the_position_alone_decides(n, seed, start):
    order = data.prompt_order(n, 0, 3 * n, seed)
    for epoch in range(3):
        assert sorted(order[epoch * n : (epoch + 1) * n]) == list(range(n))
    some = data.prompt_order(n, start, 5, seed)
    assert some == data.prompt_order(n, 0, start + 5, seed)[start:]
    assert all(type(i) is int for i in some)


def test_epochs_and_seeds_differ():
    orders = [data.prompt_order(100, 100 * i, 100, seed) for i in (0, 1) for seed in (0, 1)]
    assert len({tuple(order) for order in [*orders, range(100)]}) == 5


# ---------------------------------------------------------------- batches


def test_collate_by_hand():
    outputs = [
        make_output([1, 2, 3], [1, 1, 0, 1]),
        make_output([4], [1], stop_reason="length"),
        make_output([5], []),
    ]
    batch = data.collate(outputs)
    expected = {
        "input_ids": [[1, 2, 3, 100, 101, 102, 103], [4, 100, *[0] * 5], [5, *[0] * 6]],
        "lengths": [7, 2, 1],
        "prompt_lengths": [3, 1, 1],
        "response_lengths": [4, 1, 0],
        "response_mask": [[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.0] * 4],
        "logprobs_rollout": [[-1.0, -1.125, 0.0, -1.375], [-1.0, 0.0, 0.0, 0.0], [0.0] * 4],
        "versions": [[0, 1, -1, 3], [0, -1, -1, -1], [-1] * 4],
        "truncated": [False, True, False],
    }
    assert set(batch) == set(expected)
    for name, values in expected.items():
        close(batch[name], torch.tensor(values), rtol=0, atol=0)
    assert data.collate(outputs[2:])["response_mask"].shape == (1, 0)
    assert data.select_rows(batch, [])["versions"].shape == (0, 0)


@pytest.mark.parametrize("mask, turn_rewards, reward, expected", [
    ([1, 1, 1], [], 2.0, [0, 0, 2]),
    ([1, 1, 0], [], 2.0, [0, 2, 0]),  # the terminal reward: on the last sampled token
    ([1, 1, 0, 0, 1], [(1, 0.5)], 2.0, [0, 0.5, 0, 0, 2]),
    ([1, 1, 0, 0, 1], [(3, 0.5)], 2.0, [0, 0.5, 0, 0, 2]),  # back to the last sampled token
    ([1, 1, 0, 0, 1], [(2, 0.5), (1, 0.25)], 2.0, [0, 0.75, 0, 0, 2]),  # they add up
    ([1, 1], [(1, 0.5)], None, [0, 0.5]),
    ([1, 1], [(1, 0.5)], {"score": 1.0, "other": 7.0}, [0, 1.5]),
    ([0, 1], [(0, 0.5)], 1.0, [0, 1.5]),  # nothing was sampled before it: the first token
    ([0, 0], [(1, 0.5)], 1.0, [0, 0]),
])  # fmt: skip
def test_where_rewards_fall(mask, turn_rewards, reward, expected):
    output = make_output([1], mask, turn_rewards=turn_rewards, reward=reward)
    assert rewards_of_tokens([output]).tolist() == [expected]
    terminal = reward["score"] if isinstance(reward, dict) else reward or 0.0
    total = terminal + sum(r for _, r in turn_rewards)
    assert data.by_unit([output]).rewards.tolist() == [total] == [total_reward(output)]


def segment(prompt: int, sample: int, segment: int, **attributes) -> AgentLoopOutput:
    extra = {"prompt": prompt, "sample": sample, "segment": segment}
    return make_output([1], [1, 1], extra=extra, **attributes)


def test_rewards_count_a_rollout_once():
    outputs = [
        segment(0, 0, 0, reward=1.0),
        segment(0, 1, 0, reward=4.0, turn_rewards=[(0, 0.5)]),  # three segments of one rollout
        segment(0, 1, 1, reward=4.0, turn_rewards=[(0, 0.25)]),
        segment(0, 1, 2, reward=4.0),
        segment(7, 0, 0, reward={"score": 2.0, "x": 9.0}),
        segment(7, 1, 0, reward=None, turn_rewards=[(1, -1.0)]),
    ]
    units = data.by_unit(outputs)
    assert units.rewards.tolist() == [1.0, 4.75, 2.0, -1.0]
    assert units.outcomes.tolist() == [1.0, 4.0, 2.0, 0.0]
    assert units.groups.tolist() == [0, 0, 7, 7]
    assert units.index.tolist() == [0, 1, 1, 1, 2, 3]


def test_rewards_are_float32_whatever_torchs_default_is():
    """A tool in this process may have set another: float16 would round 2049 to 2048."""
    outputs = [segment(0, 0, 0, reward=2049.0, turn_rewards=[(0, 4097.0)])]
    torch.set_default_dtype(torch.float16)
    try:
        units = data.by_unit(outputs)
        rewards = rewards_of_tokens(outputs)
    finally:
        torch.set_default_dtype(torch.float32)
    assert units.rewards.tolist() == [6146] and rewards.tolist() == [[4097, 2049]]
    assert units.rewards.dtype == rewards.dtype == torch.float32


def assert_same(batch, expected):
    assert set(batch) == set(expected)
    for name, column in expected.items():
        if isinstance(column, list):
            assert batch[name] == column
        else:
            close(batch[name], column, rtol=0, atol=0)


masks = st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=5)


@given(masks, st.randoms(use_true_random=False))
def test_select_is_collate_of_some_outputs(masks, random):
    outputs = [make_output([b + 1] * random.randint(1, 5), mask) for b, mask in enumerate(masks)]
    rows = random.sample(range(len(masks)), random.randint(1, len(masks)))
    batch = data.collate(outputs) | {"name": torch.arange(len(masks)), "rows": [*range(len(masks))]}
    selected = data.select_rows(batch, rows)
    assert selected.pop("name").tolist() == selected.pop("rows") == rows
    assert_same(selected, data.collate([outputs[row] for row in rows]))


# ---------------------------------------------------------------- shares and micro-batches


def test_balance_by_hand():
    assert data.balance([7, 1, 6, 2, 4], 2) == [[0, 1, 3], [2, 4]]
    assert data.balance([3, 3, 3], 1) == [[0, 1, 2]]
    assert data.balance([5], 3) == [[0], [], []]
    assert data.balance([], 2) == [[], []]


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 8))
def test_balance_is_a_partition_of_even_weight(lengths, n):
    shares = data.balance(lengths, n)
    assert len(shares) == n and all(share == sorted(share) for share in shares)
    assert sorted(sum(shares, [])) == list(range(len(lengths)))
    totals = [sum(lengths[i] for i in share) for share in shares]
    assert max(totals) - min(totals) <= max(lengths, default=0)


def batch_of(prompts: list[list[int]], responses: list[list[int]]) -> dict:
    """A batch of such sequences, in which every response token is sampled."""
    outputs = []
    for prompt, response in zip(prompts, responses, strict=True):
        output = make_output(prompt, [1] * len(response))
        output.response_ids = list(response)
        outputs.append(output)
    return data.collate(outputs)


def shares_of(batch: dict, n_ranks: int, budget: int, **how) -> list[list[data.MicroBatch]]:
    """The micro-batches of each rank."""
    shares = []
    rows = range(len(batch["lengths"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.dist, "get_world_size", lambda: n_ranks)
        for rank in range(n_ranks):
            patch.setattr(data.dist, "get_rank", lambda rank=rank: rank)
            shares.append(data.micro_batches_of_this_rank(batch, rows, budget, **how))
    return shares


def unique_tokens(batch: dict, micro: data.MicroBatch) -> int:
    return data.pack_rows(batch, micro, "cpu")["inputs"]["input_ids"].numel()


@pytest.mark.parametrize("lengths, budget, packed, expected", [
    ([6, 4, 5, 3, 1], 10, True, [[0, 1], [2, 3, 4]]),
    ([10, 10], 10, True, [[0], [1]]),
    ([1, 2], 3, True, [[0, 1]]),
    # Padding counts where rows are not packed.
    ([5, 4, 3, 2, 1], 10, False, [[0, 1], [2, 3, 4]]),  # 5 + 5; 3 + 3 + 3
    ([5, 4, 3, 2, 1], 9, False, [[0], [1, 2], [3, 4]]),  # 5; 4 + 4; 2 + 2
    ([1, 4, 1], 12, False, [[0, 1, 2]]),
])  # fmt: skip
def test_micro_batches_by_hand(lengths, budget, packed, expected):
    """Packed rows share nothing here; the others share their prompts."""
    prompts = [[row + 1 if packed else 1] for row in range(len(lengths))]
    batch = batch_of(prompts, [[7] * (length - 1) for length in lengths])
    (micros,) = shares_of(batch, 1, budget, packed=packed)
    assert sorted(sorted(micro.rows) for micro in micros) == expected


def test_groups_stay_together_and_are_cut_where_little_is_shared():
    system = list(range(1, 9))
    prompts = [system + [30 + g] * 10 for g in range(6) for _ in range(4)]
    # A group: 10 + 4 x 5 tokens after the 8.
    batch = batch_of(prompts, [[10 + i % 4] * 5 for i in range(24)])
    for n, budget, n_micros in [(1, 68, 3), (1, 67, 6), (3, 1000, 1), (2, 100, 1), (6, 38, 1)]:
        for share in shares_of(batch, n, budget):
            assert [micro.is_filler for micro in share] == [False] * n_micros
            sizes = {unique_tokens(batch, micro) for micro in share}
            assert sizes == {8 + 180 // (n * n_micros)}  # whole groups
    (share,) = shares_of(batch, 1, 37)
    sizes = [unique_tokens(batch, micro) for micro in share]
    # A group in two parts has its prompt twice.
    assert max(sizes) <= 37 and sum(sizes) <= 6 * (2 * 18 + 20)


@st.composite
def forests(draw) -> dict:
    """Groups, forks, equal sequences, beginnings: prompts made of earlier sequences."""
    ids = st.lists(st.integers(1, 39), min_size=1, max_size=7)
    prompts, responses = [], []
    for _ in range(draw(st.integers(1, 7))):
        prompt, response = draw(ids), draw(ids)
        if prompts and draw(st.booleans()):
            i = draw(st.integers(0, len(prompts) - 1))
            whole = prompts[i] + responses[i]
            part = whole[: draw(st.integers(1, len(whole)))]
            prompt = draw(st.sampled_from([prompts[i], whole, part]))
            response = draw(st.sampled_from([response, responses[i], responses[i][:1]]))
        prompts.append(prompt)
        responses.append(response)
    return batch_of(prompts, responses)


@given(forests(), st.integers(0, 40), st.integers(1, 3))
def test_shares_are_a_partition_within_the_budget(batch, extra, n):
    budget = max(batch["lengths"].tolist()) + extra
    shares = shares_of(batch, n, budget)
    assert len({len(share) for share in shares}) == 1
    real = [micro for share in shares for micro in share if not micro.is_filler]
    rows = sorted(row for micro in real for row in micro.rows)
    assert rows == list(range(len(batch["lengths"])))
    assert all(unique_tokens(batch, micro) <= budget for micro in real)


@given(forests(), st.randoms(use_true_random=False))
def test_a_part_of_a_micro_batch_shares_what_its_rows_alone_share(batch, random):
    n = len(batch["lengths"])
    positions = random.sample(range(n), random.randint(1, n))
    part = data.in_prefix_order(batch, range(n)).select(positions)
    assert part == data.in_prefix_order(batch, part.rows) and len(part.rows) == len(positions)
    ids = [batch["input_ids"][row, : batch["lengths"][row]].tolist() for row in part.rows]
    assert part.lengths == [len(row) for row in ids]
    for k in range(1, len(ids)):
        assert part.shared[k] == len(os.path.commonprefix([ids[k - 1], ids[k]]))


def test_prefixes_end_where_a_sequence_does_not_where_the_padding_begins():
    batch = batch_of([[5, 6], [5, 6]], [[0], [0, 0, 7]])  # 0 pads rows, and is a token as well
    assert data.in_prefix_order(batch, [1, 0]) == data.MicroBatch([0, 1], [3, 5], [0, 3])


# ---------------------------------------------------------------- packing


def test_pack_by_hand():
    padded = torch.tensor([[5, 6, 7, 0], [8, 0, 0, 0], [1, 2, 3, 4]])
    for ids in (padded, [[5, 6, 7], [8], [1, 2, 3, 4]]):
        input_ids, position_ids, cu_seqlens, max_seqlen = data.pack(ids, [3, 1, 4])
        assert input_ids.tolist() == [[5, 6, 7, 8, 1, 2, 3, 4]]
        assert position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
        assert cu_seqlens.tolist() == [0, 3, 4, 8] and cu_seqlens.dtype == torch.int32
        assert max_seqlen == 4 and isinstance(max_seqlen, int)


# ---------------------------------------------------------------- packed attention

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
MODELS = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=12, tie_word_embeddings=False)),
    "no gqa": (Qwen2ForCausalLM, Qwen2Config(**SIZES | {"num_key_value_heads": 4})),
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    data.register_packed_attention()


def model_with(name: str, attention: str):
    """The same weights for each attention."""
    model_class, config = MODELS[name]
    torch.manual_seed(0)
    # A config of its own: it holds the implementation.
    return model_class._from_config(copy.deepcopy(config), attn_implementation=attention)


@pytest.mark.parametrize("name", MODELS)
def test_packed_attention_is_eager_attention_of_each_sequence(name):
    packed, eager = model_with(name, "packed"), model_with(name, "eager")
    lengths = [5, 1, 9, 2]
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 40, (n,), generator=generator) for n in lengths]
    names = ("input_ids", "position_ids", "cu_seqlens", "max_seqlen")
    inputs = dict(zip(names, data.pack(rows, lengths)))
    logits = packed(**inputs, use_cache=False).logits[0]  # (S, V)
    alone = [eager(input_ids=row[None], use_cache=False).logits[0] for row in rows]
    expected = torch.cat(alone)
    assert expected.std() > 0.1  # there is something to compare
    close(logits, expected, rtol=1e-5, atol=1e-5)

    weights = torch.randn(logits.shape, generator=generator)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    for found, wanted in zip(packed.parameters(), eager.parameters(), strict=True):
        assert (found.grad - wanted.grad).norm() <= 1e-5 * wanted.grad.norm()


def scores_and_gradients(model, batch: dict, micros: list) -> tuple[torch.Tensor, list]:
    """Logprobs (B, T), and the parameters' gradients of their weighted sum."""
    model.zero_grad()
    scores = torch.zeros_like(batch["response_mask"])
    weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(2))
    for micro in micros:
        packed = data.pack_rows(batch, micro, "cpu")
        pairs = [*zip(packed["source"].tolist(), packed["targets"].tolist(), strict=True)]
        assert len(pairs) == len(set(pairs))  # each is computed once
        logits = model(**packed["inputs"], use_cache=False).logits[0, packed["source"]]
        logprobs = logits.log_softmax(-1).gather(1, packed["targets"][:, None])
        logprobs = logprobs[packed["pair"], 0]
        found = logprobs.new_zeros(packed["shape"]).index_put(packed["at"], logprobs)
        (found * weights[micro.rows]).sum().backward()
        scores[micro.rows] = found.detach()
    return scores, [parameter.grad.clone() for parameter in model.parameters()]


@settings(max_examples=12)
@given(forests(), st.integers(0, 40), st.sampled_from(["qwen2", "qwen3"]))
def test_a_forest_scores_and_learns_as_its_rows_do_alone(batch, extra, name):
    model = model_with(name, "packed")
    rows = range(len(batch["lengths"]))
    alone = [data.in_prefix_order(batch, [row]) for row in rows]
    scores, gradients = scores_and_gradients(model, batch, alone)
    (micros,) = shares_of(batch, 1, max(batch["lengths"].tolist()) + extra)
    shared, gradients_shared = scores_and_gradients(model, batch, micros)
    close(shared, scores, rtol=1e-5, atol=1e-5)
    whole = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for found, gradient in zip(gradients_shared, gradients, strict=True):
        # Some are 0: those of queries and keys where there is one key.
        assert (found - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6 * whole


def heads(n_heads: int) -> torch.Tensor:
    return torch.randn(1, n_heads, 6, 8, generator=torch.Generator().manual_seed(n_heads))


def attend(module=None, **changes):
    """Packed attention of 6 tokens in two segments: the first of 2, the other of 4."""
    cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32)
    arguments = dict(cu_seqlens=cu_seqlens, max_seqlen=4, scaling=0.5) | changes
    module = module or SimpleNamespace()
    return data.packed_attention(module, heads(4), heads(2), heads(2), None, **arguments)


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.mark.parametrize("window, softcap, sinks", [
    (None, None, None),
    (4, None, None),  # hides nothing
    (2, None, None),
    (None, 0.7, None),
    (None, None, SINKS),
    (3, 0.7, SINKS),
])  # fmt: skip
def test_packed_attention_by_hand(window, softcap, sinks):
    out, weights = attend(sliding_window=window, softcap=softcap, s_aux=sinks)
    assert weights is None and out.shape == (1, 6, 4, 8)
    query, key, value = heads(4), heads(2), heads(2)
    for head in range(4):
        for i in range(6):
            start = max(0 if i < 2 else 2, i + 1 - (window or 6))
            seen = slice(start, i + 1)
            scores = 0.5 * key[0, head // 2, seen] @ query[0, head, i]
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head, None]])
            shares = scores.softmax(0)[: i + 1 - start]
            expected = shares @ value[0, head // 2, seen]
            close(out[0, i, head], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes, said", [
    (dict(cu_seqlens=None), "needs cu_seqlens and max_seqlen"),
    (dict(max_seqlen=None), "call the model on what data.pack returns"),
    (dict(module=SimpleNamespace(is_causal=False)), "causal"),
    (dict(is_causal=False), "causal"),
])  # fmt: skip
def test_packed_attention_refuses_what_it_does_not_implement(changes, said):
    with pytest.raises(ValueError, match=said):
        attend(**changes)
