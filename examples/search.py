r"""Retrieval as a tool, over several hops, as in Search-R1 (https://arxiv.org/abs/2503.09516).

    pip install rank_bm25
    accelerate launch train.py --task examples/search.py       # the tiny model shows that it runs

The bundled facts are about an invented world, so no model knows them. A question takes two or three
of them:

    user       In which town was the founder of Velm Foundry born?
    assistant  search("founder of Velm Foundry")
    tool       Velm Foundry was founded by Ossa Trin. ...
    assistant  search("Ossa Trin born")
    tool       Ossa Trin was born in Brindo. ...
    assistant  <answer>Brindo</answer>

Search-R1's own files (--train_files, --val_files) have the columns `prompt` and `reward_model`
{"ground_truth": {"target": [answers]}}. Their prompts ask for <search> tags, so replace them by
the column `question`. SEARCH_CORPUS names a jsonl file with a column `contents`. rank_bm25 scores
the whole corpus for each query: for all of Wikipedia, let `search` ask a search server."""

import json
import os
import random
import re
import string
from pathlib import Path

from agent_loop import BadInput
from examples.calculator import build_model  # noqa: F401  (train.py calls it without a --model)

try:
    from rank_bm25 import BM25Okapi
except ImportError:
    raise BadInput("examples/search.py needs: pip install rank_bm25") from None

SYSTEM_PROMPT = "Search for facts, one hop at a time. End with <answer>NAME</answer>."
TOP_K = 3
STOP_WORDS = {"a", "an", "at", "by", "did", "in", "into", "is", "of", "on", "the", "to", "was"}
STOP_WORDS |= {"does", "that", "what", "where", "which", "who", "and", "or"}
BUNDLED = Path(__file__).parent / "data" / "search_corpus.jsonl"


def words_of(text: str) -> list[str]:
    """Returns the words of a text, in lower case, without STOP_WORDS."""
    return [word for word in re.findall(r"\w+", text.lower()) if word not in STOP_WORDS]


def read_corpus(path: str | Path) -> list[dict]:
    """Returns the rows of a jsonl corpus; each has a column `contents`."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


# Read at import: a missing file then stops the run at once, and not every trajectory.
TEXTS = [row["contents"] for row in read_corpus(os.environ.get("SEARCH_CORPUS", BUNDLED))]
WORDS = [words_of(text) for text in TEXTS]
INDEX = BM25Okapi(WORDS)


def search(query: str) -> str:
    """Search the library and read the facts that match best.

    Args:
        query: a few key words, for example "founder of Velm Foundry".
    """
    words = words_of(query)
    scores = INDEX.get_scores(words)
    ranking = sorted(range(len(TEXTS)), key=lambda i: -scores[i])
    found = [TEXTS[i] for i in ranking[:TOP_K] if set(words) & set(WORDS[i])]
    return "\n".join(found) or "Nothing found. Try other words."


TOOLS = [search]

# The facts to chain, from the subject in braces to the answer.
QUESTIONS = {
    ("founder", "birthplace"): "In which town was the founder of {} born?",
    ("author", "birthplace"): "In which town was the author of {} born?",
    ("birthplace", "river"): "Which river runs through the town where {} was born?",
    ("river", "sea"): "Into which sea does the river that runs through {} flow?",
    ("birthplace", "river", "sea"): "Into which sea does the river of the birthplace of {} flow?",
}


def load(split: str) -> list[dict]:
    """Returns questions chained from the bundled facts: 12 for "val", the others for "train"."""
    facts = [row["fact"] for row in read_corpus(BUNDLED) if "fact" in row]
    objects = {(subject, relation): thing for subject, relation, thing in facts}
    pairs = []
    for relations, text in QUESTIONS.items():
        for subject, first_relation in objects:
            if first_relation != relations[0]:
                continue
            answer = subject
            for relation in relations:
                answer = objects[answer, relation]
            pairs.append((text.format(subject), answer))
    random.Random(0).shuffle(pairs)
    return [
        {
            "prompt": [{"role": "user", "content": question}],
            "data_source": "search",
            "reward_model": {"ground_truth": {"target": [answer]}},
            "extra_info": {"index": i},
        }
        for i, (question, answer) in enumerate({"train": pairs[12:], "val": pairs[:12]}[split])
    ]


def normal(text: str) -> str:
    """Returns SQuAD's normal form: lower case, no punctuation, no articles, single spaces."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def reward(output, row: dict) -> float:
    """Returns 1.0 if the last message is the assistant's, with one <answer>, an accepted one.

    It is compared by `normal`. Otherwise returns 0.0."""
    last = output.messages[-1] if output.messages else {}
    answers = re.findall(r"<answer>(.*?)</answer>", last.get("content") or "", re.DOTALL)
    # There must be exactly one: a list of guesses must not pay.
    if last.get("role") != "assistant" or len(answers) != 1:
        return 0.0
    accepted = row["reward_model"]["ground_truth"]["target"]
    right = normal(answers[0]) in [normal(answer) for answer in accepted]
    return float(right and answers[0].strip() != "")
