"""data.py: task files and rows, batches by hand, packing as a partition of rows that share."""

import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from conftest import batch_with_rewards, output_of
from fixed_batch import batch_of as forest_of
from hypothesis import given
from hypothesis import strategies as st

import data
from agent_loop import as_tool, total_reward
from examples import calculator
from flatrl import tables
from train import Args

close = torch.testing.assert_close
HELLO = [{"role": "user", "content": "hello"}]
BRIEF = {"role": "system", "content": "Be brief."}


def rows_of(rows, **task) -> list[dict]:
    return data.load_rows(SimpleNamespace(load=lambda split: rows, **task), "train")


CHAT = [BRIEF, *HELLO]
BARE = {"name": "add", "arguments": '{"a": 1}'}
CALLING = {"role": "assistant", "content": ""}
CALL = {"function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize("column, given, read", [
    ("prompt", json.dumps(CHAT), CHAT),
    ("prompt", json.dumps(json.dumps([{"name": "x"} | HELLO[0]])), [{"name": "x"} | HELLO[0]]),
    ("prompt", list(map(json.dumps, CHAT)), CHAT),
    ("prompt", '[{"a": 1}]: what is it?', [{"role": "user", "content": '[{"a": 1}]: what is it?'}]),
    ("demonstration", json.dumps([CALLING | {"content": "Hi.", "reasoning": "Hm"}]),
     [CALLING | {"content": "Hi.", "reasoning_content": "Hm"}]),
    ("prompt", [CALLING | {"tool_calls": [BARE]}], [CALLING | {"tool_calls": [CALL]}]),
    ("tools_kwargs", '{"add": {}, "mul": null}', {"add": {}}),
    ("extra_info", '{"interaction_kwargs": "{}"}', {"interaction_kwargs": {}}),
])  # fmt: skip
def test_columns_may_be_json_texts(column, given, read):
    (row,) = rows_of([{"prompt": "hello", column: given}])
    assert row[column] == read


def test_nulls_are_arguments_but_not_where_arrow_puts_them(tmp_path):
    arguments = [{"a": 1, "b": None}, {"c": 2}]
    rows = []
    for each in arguments:
        call = {"function": {"name": "f", "arguments": each}}
        rows.append({"prompt": "hello", "demonstration": [CALLING | {"tool_calls": [call]}]})
    table = datasets.Dataset.from_list(rows)
    lines, parquet = str(tmp_path / "a.jsonl"), str(tmp_path / "b.parquet")
    Path(lines).write_text("\n".join(map(json.dumps, rows)))
    table.to_parquet(parquet)
    files = [data.load_rows(SimpleNamespace(), "train", [name]) for name in (lines, parquet)]
    found = []
    for read in (rows_of(rows), rows_of(table), *files):
        calls = [row["demonstration"][0]["tool_calls"][0] for row in read]
        found.append([call["function"]["arguments"] for call in calls])
    assert found == [arguments, [{"a": 1}, {"c": 2}]] * 2


def test_rows_are_numbered_and_get_the_system_prompt():
    own = [{"role": "system", "content": "Be long."}, *HELLO]
    source = [
        {"prompt": HELLO, "index": 7, "extra_info": {"index": 8}},
        {"prompt": own, "extra_info": {"index": 42, "tools_kwargs": {"add": None}}},
        {"prompt": "hello", "index": None, "extra_info": {"index": None}},
    ]
    rows = rows_of(source, SYSTEM_PROMPT="Be brief.")
    assert [row["index"] for row in rows] == [7, 42, 2]
    assert [row["prompt"] for row in rows] == [CHAT, own, CHAT]


def test_rows_from_files_are_those_of_a_list(tmp_path):
    """One file after the other; parquet gives every row the tools' keys of all."""
    tools = [{"tools_kwargs": {f"tool {i}": {"create_kwargs": {"x": i}}}} for i in range(2)]
    source = [{"prompt": HELLO, "extra_info": {"index": 10 + i} | tools[i]} for i in range(2)]
    mixed = [{"prompt": "why?", "truth": 7}, {"prompt": "how?", "truth": ["a", None]}]
    names = [str(tmp_path / name) for name in ("a.parquet", "b.jsonl")]
    datasets.Dataset.from_list(source).to_parquet(names[0])
    Path(names[1]).write_text("\n".join(map(json.dumps, mixed)))
    rows = data.load_rows(SimpleNamespace(SYSTEM_PROMPT="Be brief."), "train", names)
    expected = rows_of([*source, *mixed], SYSTEM_PROMPT="Be brief.")
    for row, wanted in zip(rows, expected, strict=True):
        assert {key: value for key, value in row.items() if value is not None} == wanted


def test_a_name_of_the_hub(monkeypatch):
    asked = []
    table = datasets.Dataset.from_list([{"prompt": "hi"}])
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *name, split: asked.append((*name, split)) or table
    )
    assert list(tables.read_files(["openai/gsm8k:main:test[:9]"])) == [{"prompt": "hi"}]
    assert asked == [("openai/gsm8k", "main", "test[:9]")]


def test_a_prompt_with_its_tools_is_dropped_or_cut_if_it_is_overlong(tokenizer):
    task = SimpleNamespace(TOOLS=[calculator.calculator])
    how = {"tools": [as_tool(calculator.calculator).schema], "add_generation_prompt": True}
    limit = len(tokenizer.apply_chat_template(CHAT, **how, return_dict=False))
    rows = [{"prompt": [BRIEF, {"role": "user", "content": "hello!"}]}, {"prompt": CHAT}]
    of_file = tables.Rows(rows.__getitem__, range(2))
    kept = data.filter_overlong(of_file, tokenizer, task, Args(max_prompt_tokens=limit))
    assert list(kept) == rows[1:]

    rows = [{"prompt": [BRIEF, {"role": "user", "content": "abcdefghijklmnopqrstuvwxyz"}]}]
    args = Args(max_prompt_tokens=limit, prompt_truncate_side="middle")
    [row] = data.filter_overlong(rows, tokenizer, task, args)
    assert row["prompt"] == [BRIEF, {"role": "user", "content": "a...z"}]  # as long as "hello"


@given(n=st.integers(1, 30), seed=st.integers(0, 99), start=st.integers(0, 60))
def test_epochs_are_permutations_and_the_position_alone_decides(n, seed, start):
    order = data.prompt_order(n, 0, 3 * n, seed)
    for epoch in range(3):
        assert sorted(order[epoch * n : (epoch + 1) * n]) == list(range(n))
    assert data.prompt_order(n, start, 5, seed) == data.prompt_order(n, 0, start + 5, seed)[start:]


def test_collate_by_hand():
    lists = {"response_logprobs": [-1.0, -2.5, 0.0, -3.0], "response_versions": [0, 1, -1, 3]}
    outputs = [
        output_of([1, 1, 0, 1], [1, 2, 3], [100, 101, 102, 103], **lists),
        output_of([1], [4], [100], stop_reason="length"),
        output_of([], [5]),
    ]
    batch = data.collate(outputs)
    expected = {
        "input_ids": [[1, 2, 3, 100, 101, 102, 103], [4, 100, *[0] * 5], [5, *[0] * 6]],
        "lengths": [7, 2, 1],
        "prompt_lengths": [3, 1, 1],
        "response_lengths": [4, 1, 0],
        "response_mask": [[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.0] * 4],
        "logprobs_rollout": [[-1.0, -2.5, 0.0, -3.0], [-1.0, 0.0, 0.0, 0.0], [0.0] * 4],
        "versions": [[0, 1, -1, 3], [0, -1, -1, -1], [-1] * 4],
        "truncated": [False, True, False],
    }
    assert set(batch) == set(expected)
    for name, values in expected.items():
        close(batch[name], torch.tensor(values), rtol=0, atol=0)


@pytest.mark.parametrize("mask, turn_rewards, reward, expected", [
    ([1, 1, 0], [], 2.0, [0, 2, 0]),  # the terminal reward: on the last sampled token
    ([1, 1, 0, 0, 1], [(1, 0.5)], 2.0, [0, 0.5, 0, 0, 2]),
    ([1, 1, 0, 0, 1], [(3, 0.5)], 2.0, [0, 0.5, 0, 0, 2]),  # back to the last sampled token
    ([1, 1], [(1, 0.5)], {"score": 1.0, "other": 7.0}, [0, 1.5]),
    ([0, 1], [(0, 0.5)], 1.0, [0, 1.5]),  # nothing was sampled before it: the first token
    ([0, 0], [(1, 0.5)], 1.0, [0, 0]),
])  # fmt: skip
def test_where_rewards_fall(mask, turn_rewards, reward, expected):
    output = output_of(mask, turn_rewards=turn_rewards, reward=reward)
    batch, _ = batch_with_rewards([output], Args())
    assert batch.layout.to_outputs(batch.token_rewards).tolist() == [expected]
    terminal = reward["score"] if isinstance(reward, dict) else reward or 0.0
    total = terminal + sum(r for _, r in turn_rewards)
    assert data.by_unit([output]).task_rewards.tolist() == [total] == [total_reward(output)]


def batch_of(prompts: list[list[int]], responses: list[list[int]]) -> dict:
    """A batch of such sequences, in which every response token is sampled."""
    pairs = zip(prompts, responses, strict=True)
    return data.collate([output_of([1] * len(ids), prompt, ids) for prompt, ids in pairs])


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
    packed = data.pack_rows(batch, micro, "cpu")
    pairs = [*zip(packed["source"].tolist(), packed["targets"].tolist(), strict=True)]
    assert len(pairs) == len(set(pairs))  # each prediction is computed once
    return packed["inputs"]["input_ids"].numel()


@pytest.mark.parametrize("lengths, budget, is_packed, expected", [
    ([6, 4, 5, 3, 1], 10, True, [[0, 1], [2, 3, 4]]),
    ([5, 8, 6, 4, 9], 10, True, [[0, 3], [1], [2], [4]]),
    # Padding counts where rows are not packed.
    ([5, 4, 3, 2, 1], 10, False, [[0, 1], [2, 3, 4]]),  # 5 + 5; 3 + 3 + 3
    ([5, 4, 3, 2, 1], 9, False, [[0], [1, 2], [3, 4]]),  # 5; 4 + 4; 2 + 2
])  # fmt: skip
def test_micro_batches_by_hand(lengths, budget, is_packed, expected):
    """Packed rows share nothing here; the others share their prompts."""
    prompts = [[row + 1 if is_packed else 1] for row in range(len(lengths))]
    batch = batch_of(prompts, [[7] * (length - 1) for length in lengths])
    (micros,) = shares_of(batch, 1, budget, is_packed=is_packed)
    assert sorted(sorted(micro.rows) for micro in micros) == expected
    sizes = [unique_tokens(batch, micro) for micro in micros] if is_packed else []
    assert sizes == sorted(sizes, reverse=True)


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
    (share,) = shares_of(batch, 1, 37)  # a group in two parts has its prompt twice
    assert sum(unique_tokens(batch, micro) for micro in share) <= 6 * (2 * 18 + 20)


@given(st.integers(1, 19), st.integers(0, 40), st.integers(1, 3))
def test_shares_are_a_partition_within_the_budget(n_rows, extra, n):
    """What the network makes of shared prefixes is tested in test_attention.py."""
    batch = forest_of(n_rows)
    budget = max(batch["lengths"].tolist()) + extra
    shares = shares_of(batch, n, budget)
    assert len({len(share) for share in shares}) == 1
    real = [micro for share in shares for micro in share if not micro.is_filler]
    rows = sorted(row for micro in real for row in micro.rows)
    assert rows == list(range(len(batch["lengths"])))
    for micro in real:
        assert unique_tokens(batch, micro) <= budget
        assert micro == data.in_prefix_order(batch, micro.rows)


def test_prefixes_end_where_a_sequence_does_not_where_the_padding_begins():
    batch = batch_of([[5, 6], [5, 6]], [[0], [0, 0, 7]])  # 0 pads rows, and is a token as well
    assert data.in_prefix_order(batch, [1, 0]) == data.MicroBatch([0, 1], [3, 5], [0, 3])
