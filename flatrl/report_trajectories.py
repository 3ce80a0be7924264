"""Draws the trajectories that a report shows from a run's rollouts/*.jsonl, and reads them.

Whole groups are drawn by a hash of their row's index, and about as many from every step and
every evaluation. So the same questions are shown of each evaluation and of each run. What the
update knew of a trajectory (advantages, the trainer's logprobs) comes from learned/*.jsonl."""

import functools
import hashlib
import itertools
import json
import math
import os
from pathlib import Path

from agent_loop import numbers
from flatrl.files import read_json_lines

TRAJECTORIES = 1000  # on a page, of all its runs
TOKENS = 500_000  # of these trajectories, prompts included: 20 bytes each
# A longer run of one context token (as a rule an image's) is written once, with its number.
MAX_REPEATS = 16
# If so many tokens make no whole character yet, it is a broken one, and is shown as that.
MAX_CHARACTER_TOKENS = 7


def single(values: list):
    """Returns one number where all are the same, else the list."""
    return values[0] if len(set(values)) == 1 else values


# ---------------------------------------------------------------- text


class Texts:
    """Turns token ids into the text that each of them adds.

    Where only several tokens together make a character, the last of them has it. Without a
    tokenizer, a token's text is its number: ⟨7⟩."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.special = set()
        if tokenizer:
            self.special = {
                token_id for token_id, token in tokenizer.added_tokens_decoder.items()
                if token.special
            }
            self.first = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._added_by = functools.cache(self._added_by)

    def _added_by(self, *ids: int) -> str:
        """Returns the text that consecutive tokens add, behind another token.

        Some tokenizers drop the space before the first token of all. So another token comes
        before these, and its text is taken away again."""
        if not self.tokenizer:
            return f"⟨{ids[0]}⟩"
        decode = functools.partial(
            self.tokenizer.decode, clean_up_tokenization_spaces=False)
        return decode([*self.first, *ids])[len(decode(self.first)) :]

    def of(self, ids: list[int]) -> list[str]:
        """Returns one text for each id."""
        texts = []
        waiting = []  # ids whose character is not whole yet
        for position, token_id in enumerate(ids, 1):
            waiting.append(token_id)
            text = self._added_by(*waiting)
            is_last = position == len(ids) or len(waiting) == MAX_CHARACTER_TOKENS
            if "\ufffd" in text and not is_last:
                text = ""
            else:
                waiting = []
            texts.append(text)
        return texts

    def of_context(self, ids: list[int]) -> list[str]:
        """Returns the text of tokens that nobody sampled, special tokens apart.

        Ordinary text stands at 0, 2, 4, ..., special tokens at 1, 3, ...: ["", "<|im_start|>",
        "user", ...]. A long run of one token is written once, with its number."""
        texts = []
        for is_special, group in itertools.groupby(ids, self.special.__contains__):
            if is_special and not texts:
                texts.append("")
            text = ""
            for piece, repeats in itertools.groupby(self.of(list(group))):
                n = len(list(repeats))
                text += f"{piece} × {n} " if piece and n > MAX_REPEATS else piece * n
            texts.append(text)
        return texts or [""]


def read_turns(messages: list[dict], n_turns: int, is_last_sampled: bool) -> list[tuple]:
    """Returns (speakers, calls) of the prompt and then of each of the policy's turns: those of
    n_turns that were sampled to be trained, and the last one, if that was not.

    speakers: who spoke after the turn, as in ["tool calculator", "user"]; calls: the tool
    calls that the turn made, as [name, arguments] each."""
    turns = [([], []) for _ in range(n_turns + 1)]
    for message in messages:
        if not isinstance(message, dict):  # an agent loop may leave anything there
            message = {"role": f"{message!r:.80}"}
        role = message.get("role")
        if role == "assistant":
            turns.append(([], []))
            for call in message.get("tool_calls") or []:
                function = call.get("function", call)
                arguments = function.get("arguments")
                if not isinstance(arguments, str):
                    arguments = json.dumps(arguments, ensure_ascii=False)
                turns[-1][1].append([function.get("name"), arguments])
        else:
            turns[-1][0].append(f"{role} {message.get('name') or ''}".strip())
    if not (turns[-1][0] or is_last_sampled):  # the response ends with a turn of mask 0
        n_turns += 1
    # The prompt may hold examples of an assistant: the policy's own turns are the last ones.
    return turns[-n_turns - 1 :]


# ---------------------------------------------------------------- drawing groups


def hash_of(name) -> str:
    """Returns random letters, which are the same for this name in every run."""
    return hashlib.sha256(repr(name).encode()).hexdigest()


def value_of(line: dict, key: str):
    """Returns what a line of rollouts/*.jsonl has under a key, else what its `extra` has."""
    return line.get(key, line.get("extra", {}).get(key))


def n_tokens(line: dict) -> int:
    """Returns the number of tokens in a line of rollouts/*.jsonl; a failure has none."""
    return len(line.get("prompt_ids", ())) + len(line.get("response_ids", ()))


@functools.cache
def draw_groups(file: Path, changed_ns: int) -> list[list[tuple[int, int]]]:
    """Returns the lines of a file of rollouts by group, in random order, as (length, offset).

    The same questions come first in every file that has them. A file may be large: it is read
    once for each time at which it was changed."""
    groups = {}  # number of a prompt -> its lines
    indices = {}  # number of a prompt -> its row's index
    offset = 0
    for text in file.open("rb"):
        line = json.loads(text)
        prompt = value_of(line, "prompt")
        index = value_of(line, "index")
        if index is not None:  # a failure has none, nor have all rows
            indices[prompt] = index
        groups.setdefault(prompt, []).append((len(text), offset))
        offset += len(text)
    order = sorted(groups, key=lambda prompt: hash_of(indices.get(prompt, f"prompt {prompt}")))
    return [groups[prompt] for prompt in order]


class Selection:
    """The trajectories of a run that a page shows: `draw` reads them anew."""

    def __init__(
        self, folder: Path, tokenizer=None, trajectories: int = TRAJECTORIES, tokens: int = TOKENS):
        self.folder = folder
        self.texts = Texts(tokenizer)
        self.max_tokens = tokens
        self.least_size = tokens // trajectories  # so much of a page each trajectory takes

    def draw(self):
        """Draws from the files as they are now.

        Each file, the newest first, gets an equal share of the room that those before it have
        left. It has at least one group, as long as there is room for a whole one."""
        self.trajectories = []
        self.total = 0  # trajectories in the files
        self.prompts = {}  # the text of a prompt -> its number on the page
        self.pieces = {}  # (text, is special) of sampled tokens -> number on the page
        files = {}  # by (step, kind)
        for file in (self.folder / "rollouts").glob("*_[0-9]*.jsonl"):
            kind, _, step = file.stem.partition("_")
            files[int(step), kind] = file
        order = sorted(files, key=lambda name: (name != max(files), hash_of(name)))
        room = self.max_tokens
        for n_before, name in enumerate(order):
            groups = draw_groups(files[name], files[name].stat().st_mtime_ns)
            self.total += sum(map(len, groups))
            limit = room if self.trajectories else math.inf  # of the file's first group
            drawn = []
            used = 0
            with files[name].open("rb") as file:
                for places in groups:
                    group = [json.loads(os.pread(file.fileno(), *place)) for place in places]
                    size = max(sum(map(n_tokens, group)), self.least_size * len(group))
                    if used + size > limit:
                        break
                    drawn += group
                    used += size
                    limit = room / (len(order) - n_before)
            room -= used
            learned = self._learned(files[name]) if drawn else {}
            self.trajectories += [self._trajectory(name, line, learned) for line in drawn]
        self.trajectories.sort(key=lambda trajectory: (trajectory["step"], trajectory["kind"]))

    def _learned(self, file) -> dict:
        """Returns the lines of learned/*.jsonl by (prompt, sample, segment).

        None of an earlier try at this step: that file is older than the rollouts."""
        learned = self.folder / "learned" / file.name
        if not learned.is_file() or learned.stat().st_mtime_ns < file.stat().st_mtime_ns:
            return {}
        return {(line["prompt"], line["sample"], line["segment"]): line
                for line in read_json_lines(learned)}

    # ------------------------------------------------------------ trajectories

    def _trajectory(self, name, line, learned) -> dict:
        """Returns what the page shows of a line of the file of this name."""
        names = {key: value_of(line, key) for key in ("prompt", "sample", "segment")}
        update = learned.get(tuple(names.values()), {})
        step, kind = name
        trajectory = names | {"step": step, "kind": kind, "index": value_of(line, "index")}
        if "kind" in line:  # a failure
            return trajectory | {
                "text": self._prompt([]), "stop": line["kind"],
                "error": str(line.get("error"))[-4000:]}
        reward = line["reward"]
        trajectory |= {
            key: value_of(line, key)
            for key in ("unit", "group", "unread", "turn_rewards", "images")}
        return trajectory | {
            "text": self._prompt(line["prompt_ids"]),
            "reward": line["total_reward"],
            "parts": reward if isinstance(reward, dict) else {},
            "stop": line["stop_reason"],
            "turns": line["num_turns"],
            "metrics": numbers(line["metrics"]),
            "prompt_length": len(line["prompt_ids"]),
            "length": len(line["response_ids"]),
            # Long ones (texts, ids of tokens) would make a page of gigabytes.
            "extra": {
                key: value for key, value in line["extra"].items() if len(str(value)) < 1000
            },
            "trained": update.get("trained"),
            "blocks": self._blocks(line, update),
        }

    def _prompt(self, ids) -> int:
        """Returns the number of a prompt's text on the page, where equal ones are there once."""
        return self.prompts.setdefault(tuple(self.texts.of_context(ids)), len(self.prompts))

    def _blocks(self, line, update) -> list[dict]:
        """Cuts a response into the policy's turns and what stands between them.

        update: the trajectory's line of learned/*.jsonl, or {}."""
        runs = [(is_sampled, len(list(run)))
                for is_sampled, run in itertools.groupby(line["response_mask"])]
        n_sampled_runs = sum(is_sampled for is_sampled, _ in runs)
        turns = read_turns(line["messages"], n_sampled_runs, bool(runs) and runs[-1][0])
        blocks = []
        turn = 0
        n_sampled = 0  # tokens so far
        end = 0
        for is_sampled, n in runs:
            start = end
            end += n
            ids = line["response_ids"][start:end]
            if not is_sampled:
                blocks.append({"at": start, "role": ", ".join(turns[turn][0]),
                               "text": self.texts.of_context(ids)})
                continue
            turn += 1
            texts = zip(self.texts.of(ids), map(self.texts.special.__contains__, ids))
            logprobs = line["response_logprobs"][start:end]
            block = {
                "at": start, "role": "assistant", "calls": turns[turn][1],
                "tokens": [self.pieces.setdefault(piece, len(self.pieces)) for piece in texts],
                "logprobs": [round(logprob, 3) or 0 for logprob in logprobs],
                "versions": single(line["response_versions"][start:end])}
            if update.get("trained"):
                sampled = slice(n_sampled, n_sampled + n)
                advantages = update["advantage"]
                if isinstance(advantages, list):
                    advantages = advantages[sampled]
                block |= {"difference": update["logp_diff"][sampled], "advantages": advantages}
            n_sampled += n
            blocks.append(block)
        return blocks
