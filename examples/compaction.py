r"""Compaction: a log of 512 tokens is read through a window of 64, by notes that the policy writes.

    accelerate launch train.py --task examples/compaction.py --agent compaction \
        --max_prompt_tokens 52 --max_response_tokens 12 --prompts_per_step 8
    ... --agent compaction_masked           # the same, but the notes are not trained

The log is a series of readings, a letter and a digit each. At its end the last reading of a, b, c
or d is asked for. When the window is full, the policy writes notes, and a new sequence begins with
them:

    user       k3x9a5q1g7c2...     as much of the log as fits the window
    assistant  a5c2                the notes: mask 1
    user       a5c2z8b3h4...       the notes, now given (mask 0), and more of the log
    assistant  a5b3c2
    user       a5b3c2m1...?b       the end of the log, and the question
    assistant  b3

The sequences are outputs of one unit, the rollout, and share the reward of the last: a note gets
credit for an answer that came much later. The built-in model mostly notes a and b, seldom c and d.

This loop is written for its log. A task with tools or a simulated user can name `--agent
compacting`, which asks for a summary when the context is long (docs/agents.md).

64 and 512 stand for a window of 1k and a history of 8k, which would take a CPU hours. The window is
--max_prompt_tokens plus --max_response_tokens, which bounds the notes."""

import random
from collections.abc import Iterator
from pathlib import Path

from agent_loop import AgentLoopBase, register
from examples.tiny_models import build_warm_model

ASKED = "abcd"
NOISE = "efghijklmnopqrstuvwxyz"
NOTED = {"a": 0.9, "b": 0.9, "c": 0.25, "d": 0.25}  # how often the teacher notes a new reading


def make_row(generator: random.Random) -> dict:
    """Returns a log of 256 readings as a row; each letter of ASKED is read twice."""
    letters = [generator.choice(NOISE) for _ in range(256)]
    for place, letter in zip(generator.sample(range(256), 2 * len(ASKED)), ASKED * 2):
        letters[place] = letter
    log = "".join(letter + generator.choice("0123456789") for letter in letters)
    asked = generator.choice(ASKED)
    return {
        "prompt": [{"role": "user", "content": log[:40]}],
        "reward_model": {"ground_truth": asked + last_reading(log, asked)},
        "extra_info": {"rest": f"{log[40:]}?{asked}"},
    }


def last_reading(log: str, letter: str) -> str:
    """Returns the digit behind the last place of a letter, or "" if it has none."""
    return log.rpartition(letter)[2][:1] if letter in log else ""


def load(split: str) -> list[dict]:
    """Returns 128 logs for "val", 2,048 others for "train", the same on every call."""
    seed, n = {"train": (0, 2048), "val": (1, 128)}[split]
    generator = random.Random(seed)
    return [make_row(generator) for _ in range(n)]


def reward(output, row: dict) -> float:
    """Returns 1.0 if the answer is right, else 0.0."""
    return float(output.messages[-1]["content"] == row["reward_model"]["ground_truth"])


@register("compaction")
class Compaction(AgentLoopBase):
    """Reads the log window by window; returns an output for each."""

    async def run(self, sampling_params, **row):
        log = row["prompt"][-1]["content"] + row["extra_info"]["rest"]
        outputs = []
        notes = ""
        while log:
            # A token has at least one character. Readings, of two, are not split.
            room = self.window - self.args.max_response_tokens - len(self.begin(notes).prompt_ids)
            room = max(2, room // 2 * 2)
            trajectory = self.begin(notes + log[:room])
            await self.assistant_turn(trajectory, sampling_params)
            outputs.append(trajectory.output())
            notes = trajectory.messages[-1]["content"]
            log = log[room:]
        return outputs

    def begin(self, text: str):
        """Returns a trajectory that begins with a user's text, in which nothing is trusted."""
        return self.start({"prompt": [{"role": "user", "content": text}]}, trusted=())


@register("compaction_masked")
class CompactionMasked(Compaction):
    """The same, but only the last sequence, with the answer, is trained."""

    async def run(self, sampling_params, **row):
        return (await super().run(sampling_params, **row))[-1:]


def demonstrate(row: dict) -> Iterator[list[str]]:
    """Yields [the user's text, the teacher's reply]: notes, and now and then an answer."""
    log = row["prompt"][0]["content"] + row["extra_info"]["rest"][:-2]
    notes = dict.fromkeys(ASKED, "")
    while log:
        part = log[: random.randrange(24, 42, 2)]
        log = log[len(part) :]
        text = "".join(notes.values()) + part
        asked = random.choice(ASKED)
        if asked in text and random.random() < 0.5:
            yield [f"{text}?{asked}", asked + last_reading(text, asked)]
        for name in ASKED:
            if name in part and random.random() < NOTED[name]:
                notes[name] = name + last_reading(part, name)
        yield [text, "".join(notes.values())]


def build_model(path: str | Path) -> None:
    """Writes the default model to the folder `path`: train.py calls it without a --model."""
    pairs = [pair for _ in range(900) for pair in demonstrate(make_row(random))]
    random.shuffle(pairs)
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
        for text, reply in pairs
    ]
    build_warm_model(path, chats, batch_size=32)
