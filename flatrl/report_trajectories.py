"""Draws the trajectories that a report shows from a run's rollouts/*.jsonl.

Whole groups are drawn, about as many from every step and every evaluation. Their order is a
hash of their rows' indices, so each evaluation and each run shows the same questions. What the
update knew about a trajectory (advantages, the trainer's logprobs) comes from learned/*.jsonl."""

import functools
import hashlib
import itertools
import json
from pathlib import Path

from agent_loop import numeric_entries
from flatrl.files import read_json_lines

TRAJECTORIES = 1000  # on a page, from all its runs
TOKENS = 500  # a page's budget for each, prompt included; a shorter one counts as this many
MAX_CHARACTER_TOKENS = 7  # after this many tokens without a whole character, show it as broken
MAX_EXTRA = 1000  # characters of a value in `extra`; longer ones would make a page of gigabytes
# What the page shows of a line, or of its `extra`, as it is; None if it has none.
SHOWN = [
    "prompt",
    "sample",
    "segment",
    "index",
    "unit",
    "group",
    "unread",
    "turn_rewards",
    "images",
]


def single(values: list):
    """Returns one number if all values are equal, else the list."""
    return values[0] if len(set(values)) == 1 else values


# ---------------------------------------------------------------- text


@functools.cache
def added_text(tokenizer, *ids: int) -> str:
    """Returns the text that consecutive tokens add after another token.

    Some tokenizers drop the space before the very first token. So these tokens are decoded
    behind another one, whose text is then cut off. Without a tokenizer, the text of token 7
    is ⟨7⟩."""
    if not tokenizer:
        return f"⟨{ids[0]}⟩"
    first = tokenizer.encode("a", add_special_tokens=False)[-1:]
    decode = functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    return decode([*first, *ids])[len(decode(first)) :]


def token_texts(tokenizer, ids: list[int]) -> list[str]:
    """Returns the text that each token adds. The last token of a character gets all of it."""
    texts = []
    pending = []  # ids whose character is not complete yet
    for position, token_id in enumerate(ids, 1):
        pending.append(token_id)
        text = added_text(tokenizer, *pending)
        is_last = position == len(ids) or len(pending) == MAX_CHARACTER_TOKENS
        if "\ufffd" in text and not is_last:
            text = ""
        else:
            pending = []
        texts.append(text)
    return texts


def read_turns(messages: list, n_turns: int) -> list[tuple]:
    """Returns (speakers, calls) for the prompt and for each turn of the policy.

    speakers: who spoke after the turn, such as ["tool calculator", "user"]; calls: [name,
    arguments] of each tool call that the turn made. n_turns: the turns that were sampled."""
    turns = [([], []) for _ in range(n_turns + 1)]
    for message in messages:
        if not isinstance(message, dict):  # such as an OpenAI object, which the log made a text
            continue
        if message.get("role") != "assistant":
            speaker = f"{message.get('role')} {message.get('name') or ''}"
            turns[-1][0].append(speaker.strip())
            continue
        calls = []
        for call in message.get("tool_calls") or []:
            function = call.get("function", call)
            arguments = function.get("arguments")
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            calls.append([function.get("name"), arguments])
        turns.append(([], calls))
    # The prompt may hold examples of an assistant: the policy's own turns are the last ones.
    return turns[-n_turns - 1 :]


# ---------------------------------------------------------------- drawing groups


def hash_of(name) -> str:
    """Returns a random text that is the same for this name in every run."""
    return hashlib.sha256(repr(name).encode()).hexdigest()


def read_line(text: bytes) -> dict:
    """Returns a line of rollouts/*.jsonl, together with the SHOWN entries of its `extra`."""
    line = json.loads(text)
    extra = line.get("extra", {})  # a failure has none
    return {name: extra.get(name) for name in SHOWN} | line


@functools.cache
def read_groups(file: Path, changed: int) -> list[list[tuple]]:
    """Returns the groups of a file of rollouts, as (tokens, offset) of each line.

    changed: the time of its last change, because a resumed run writes files anew.
    tokens: at least TOKENS. The order is mixed, but fixed: the same questions come first in every
    file that has them. A large file is read only once, and later only the lines that are shown."""
    groups = {}  # prompt -> its lines
    names = {}  # prompt -> its row's index
    offset = 0
    for text in file.open("rb"):
        line = read_line(text)
        prompt = line["prompt"]
        n_tokens = len(line.get("prompt_ids", [])) + len(line.get("response_ids", []))
        groups.setdefault(prompt, []).append((max(n_tokens, TOKENS), offset))
        names.setdefault(prompt, f"prompt {prompt}")
        if line["index"] is not None:
            names[prompt] = line["index"]
        offset += len(text)
    return [groups[prompt] for prompt in sorted(groups, key=lambda prompt: hash_of(names[prompt]))]


def draw(folder: Path, tokenizer, max_trajectories: int) -> tuple[list, int]:
    """Returns the trajectories that a page shows, and how many there are in the files.

    Each file gets an equal share of the room that is left, and at least one group, as long as there
    is room for it: first the newest, then the others in a mixed, fixed order. The very first group
    is drawn in any case."""
    files = {}
    for file in (folder / "rollouts").glob("[!.]*_[0-9]*.jsonl"):  # no half-written one
        kind, _, step = file.stem.partition("_")
        files[int(step), kind] = file
    order = sorted(files, key=lambda name: (name != max(files), hash_of(name)))
    drawn = []
    total = 0
    room = max_trajectories * TOKENS
    for n_before, (step, kind) in enumerate(order):
        file = files[step, kind]
        groups = read_groups(file, file.stat().st_mtime_ns)
        total += sum(map(len, groups))
        share = room / (len(files) - n_before)
        lines = []
        used = 0
        for group in groups:
            size = sum(size for size, _ in group)
            limit = share if used else room
            if used + size > limit and (drawn or lines):
                break
            used += size
            lines += read_lines(file, group)
        room -= used
        updates = {}
        for line in read_json_lines(folder / "learned" / file.name):
            updates[line["prompt"], line["sample"], line["segment"]] = line
        for line in lines:
            drawn.append(show(line, tokenizer, updates) | {"step": step, "kind": kind})
    drawn.sort(key=lambda trajectory: (trajectory["step"], trajectory["kind"]))
    return drawn, total


def read_lines(file: Path, group: list[tuple]) -> list[dict]:
    """Returns the lines of a group that `read_groups` has found."""
    with file.open("rb") as stream:
        lines = []
        for _, offset in group:
            stream.seek(offset)
            lines.append(read_line(stream.readline()))
        return lines


# ---------------------------------------------------------------- trajectories


def show(line: dict, tokenizer, updates: dict) -> dict:
    """Returns what the page shows of a line that `read_line` has read.

    updates: the lines of learned/*.jsonl by (prompt, sample, segment)."""
    trajectory = {key: line[key] for key in SHOWN}
    if "kind" in line:  # a failure
        error = str(line["error"])[-4000:]
        return trajectory | {"text": [], "stop": line["kind"], "error": error}
    update = updates.get((line["prompt"], line["sample"], line["segment"]), {})
    reward = line["reward"]
    extra = line["extra"]
    return trajectory | {
        "text": token_texts(tokenizer, line["prompt_ids"]),
        "reward": line["total_reward"],
        "parts": reward if isinstance(reward, dict) else {},
        "stop": line["stop_reason"],
        "turns": line["num_turns"],
        "metrics": numeric_entries(line["metrics"]),
        "extra": {key: extra[key] for key in extra if len(str(extra[key])) < MAX_EXTRA},
        "trained": update.get("trained"),
        "blocks": cut_into_blocks(line, tokenizer, update),
    }


def cut_into_blocks(line: dict, tokenizer, update: dict) -> list[dict]:
    """Cuts a response into the policy's turns and the text between them.

    update: the trajectory's line of learned/*.jsonl, or {}."""
    mask = line["response_mask"]
    runs = [(is_sampled, len(list(run))) for is_sampled, run in itertools.groupby(mask)]
    n_turns = sum(is_sampled for is_sampled, _ in runs)
    turns = iter(read_turns(line["messages"], n_turns))
    speakers, _ = next(turns)
    blocks = []
    n_sampled = 0  # tokens so far
    end = 0
    for is_sampled, n in runs:
        here = slice(end, end + n)
        end += n
        ids = line["response_ids"][here]
        block = {"at": here.start}
        blocks.append(block)
        if not is_sampled:
            block |= {"role": ", ".join(speakers), "text": token_texts(tokenizer, ids)}
            continue
        speakers, calls = next(turns)
        block |= {
            "role": "assistant",
            "calls": calls,
            "tokens": token_texts(tokenizer, ids),
            "logprobs": [round(x, 3) for x in line["response_logprobs"][here]],
            "versions": line["response_versions"][here],
        }
        if update.get("trained"):
            sampled = slice(n_sampled, n_sampled + n)
            advantages = update["advantage"]
            if isinstance(advantages, list):
                advantages = advantages[sampled]
            block |= {"difference": update["logp_diff"][sampled], "advantages": advantages}
        n_sampled += n
    return blocks
