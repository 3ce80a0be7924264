"""Search as a tool: the BM25 index, the chained questions, the reward, and what may be missing."""

import asyncio
import json
import re
from types import SimpleNamespace

import pytest

pytest.importorskip("rank_bm25")
from test_agent_loop import Script

from agent_loop import ToolAgentLoop
from examples import search as task
from train import Args

FACTS = [row["fact"] for row in task.read_corpus(task.BUNDLED) if "fact" in row]


def best(query: str) -> str:
    return task.search(query).splitlines()[0]


@pytest.mark.parametrize("query, fact", [
    ("Where was Ossa Trin born?", "Ossa Trin was born in Brindo."),
    ("the Ombry flows into which sea", "The river Ombry flows into the Pale Sea."),
])  # fmt: skip
def test_the_fact_that_matches_best_comes_first(query, fact):
    assert best(query) == fact


def test_every_hop_can_be_found():
    """The bundled facts are enough to walk a question's chain, and BM25 finds each."""
    words = {
        "founder": "founder of",
        "author": "author of",
        "birthplace": "born",
        "river": "town river",
        "sea": "sea",
    }
    for subject, relation, thing in FACTS:
        assert re.search(rf"\b{re.escape(thing)}\b", task.search(f"{words[relation]} {subject}")), (
            subject,
            relation,
        )


def test_the_rows():
    train, val = task.load("train"), task.load("val")
    questions = [row["prompt"][0]["content"] for row in train + val]
    assert len(val) == 12 and len(set(questions)) == len(train) + len(val)
    assert train == task.load("train")
    answers = {
        row["prompt"][0]["content"]: row["reward_model"]["ground_truth"]["target"]
        for row in train + val
    }
    assert answers["In which town was the founder of Velm Foundry born?"] == ["Brindo"]
    assert answers["In which town was the founder of Velm Foundry born?"] == ["Brindo"]
    assert answers["Into which sea does the river of the birthplace of Anka Moss flow?"] == [
        "Hollow Sea"
    ]
    for question, (answer,) in answers.items():
        assert answer not in question


def output(*contents: str, role: str = "assistant"):
    return SimpleNamespace(messages=[{"role": role, "content": content} for content in contents])


@pytest.mark.parametrize("said, value", [
    ("<answer>Pale Sea</answer>", 1.0),
    ("It is <answer> the pale sea.\n</answer>", 1.0),
    ("<answer>Pale Sea, surely</answer>", 0.0),
    ("<answer>Hollow Sea</answer>", 0.0),
    ("<answer></answer>", 0.0),
    ("Pale Sea", 0.0),
    ("<answer>Hollow Sea</answer> or <answer>Pale Sea</answer>", 0.0),
])  # fmt: skip
def test_the_reward_is_exact_match(said, value):
    row = {"reward_model": {"ground_truth": {"target": ["Pale Sea"]}}}
    assert task.reward(output("<answer>x</answer>", said), row) == value


def tool_call(query: str) -> str:
    body = json.dumps({"name": "search", "arguments": {"query": query}})
    return f"<tool_call>\n{body}\n</tool_call>"


def test_the_agent_loop_walks_two_hops(tokenizer):
    lines = [
        tool_call("founder of Velm Foundry"),
        tool_call("Ossa Trin born"),
        "<answer>Brindo</answer>",
    ]
    row = next(
        row
        for row in task.load("train")
        if "founder of Velm Foundry born" in row["prompt"][0]["content"]
    )
    args = Args(max_response_tokens=2000, max_model_len=4000)
    loop = ToolAgentLoop(Script(tokenizer, lines), tokenizer, None, task, args)
    out = asyncio.run(loop.run({}, **row))
    said = [message["content"] for message in out.messages if message["role"] == "tool"]
    assert [text.splitlines()[0] for text in said] == [
        "Velm Foundry was founded by Ossa Trin.",
        "Ossa Trin was born in Brindo.",
    ]
    assert task.reward(out, row) == 1.0
