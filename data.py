"""Rows -> prompts; outputs -> batches -> packed micro-batches.

    rows        load_task, load_rows and filter_overlong give the rows, each with a prompt.
                prompt_order shuffles them.
    batches     Batch holds a step's outputs, their tensors (right-padded) and their units, always
                aligned. place_rewards puts rewards on tokens.
    packing     micro_batches_of_this_rank and pack_rows prepare the network's inputs: rows end to
                end without padding, and each shared prefix only once. flatrl/attention.py
                implements the attention.

The words output, unit, group and turn, and the letters of shapes, are those of losses.py. Two
more letters: L tokens in the longest sequence, and P tokens that go through the network.

Every rank holds the batch of the whole step (token ids and images are small), so advantages and
mini-batches are computed globally. Then each rank works on its own rows."""

import functools
import hashlib
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Annotated

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import losses
from agent_loop import (
    agent_loop_class,
    chat_template,
    outcome,
    render,
    row_kwargs,
    shorten,
    task_interaction,
    with_template_variables,
)
from flatrl.attention import packed_attention, register_packed_attention  # noqa: F401 (re-exported)
from flatrl.bad_input import need, refusing
from flatrl.devices import to_device
from flatrl.hints import told_outputs, told_prompt
from flatrl.launch import Bar
from flatrl.metrics import grouped, parts_of_units
from flatrl.processes import on_main
from flatrl.routes import decode_routes
from flatrl.rows import as_text, check_demonstration, check_row, check_tokenizer, tool_schemas
from flatrl.tables import Rows, prompt_order, read_files, rows_of  # noqa: F401 (re-exported)
from flatrl.units import Outputs, last_outputs, unit_of
from flatrl.vision import expand, load_images, prefix_ids_of
from losses import BT, NS, B, N, Turns

BL = Annotated[Tensor, "B L"]  # outputs x tokens of prompt and response, right-padded

# ---------------------------------------------------------------- rows


def load_task(path: str, needs: Sequence[str] = ("load", "reward")) -> ModuleType:
    """Imports a task file and returns the module. It may import modules from its own folder.

    needs: names of functions that it must define; group_reward may stand for reward. Raises
    BadInput if it can't be imported, or does not define them."""
    file = Path(path)
    need(file.is_file() and file.suffix == ".py", f"--task {path}: no such Python file")
    name = f"task_{file.stem}"
    spec = spec_from_file_location(name, file)
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up by name
    folder = str(file.resolve().parent)
    if folder not in sys.path:  # as in `python my_project/task.py`, after train.py's folder
        sys.path.insert(1, folder)
    with refusing(f"--task {path} does not import", module.__file__):
        spec.loader.exec_module(module)
    for name in needs:
        if name == "reward" and hasattr(module, "group_reward"):
            name = "group_reward"
        need(
            callable(getattr(module, name, None)),
            f"--task {path} has no function {name}: a task file defines reward(output, row) or "
            "group_reward(outputs, rows), load(split) unless --train_files and --val_files give "
            "the rows, and build_model(path) unless --model gives the model",
        )
    return module


def load_rows(
    task: ModuleType,
    split: str,
    files: list[str] | None = None,
    prompt_key: str = "prompt",
    image_key: str = "images",
) -> Sequence[dict]:
    """Returns the rows of a split ("train" or "val"), checked and normalised to verl's columns.

    files: read instead of calling the task's `load`. Their rows stay on disk, and each is checked
    when it is accessed.
    prompt_key: the column with the prompt: a chat, or a text, which becomes a user message. The
        task's SYSTEM_PROMPT is inserted if there is no system message.
    image_key: the column with the prompt's images, which becomes `images`. The prompt needs a
        placeholder for each: a part {"type": "image"} of a message's content, or "<image>" in
        its text.

    Raises BadInput if there are no training rows, or if a row is not as said here."""
    source = ", ".join(files) if files else f"load({split!r})"
    with refusing(f"{source} does not give a list of rows", getattr(task, "__file__", "")):
        if files:
            rows = read_files(files)
        else:
            rows = task.load(split)
            if getattr(rows, "features", None):  # a datasets.Dataset
                rows = rows_of(rows)
            rows = list(rows)
    need(len(rows) or split == "val", f"{source} has no rows")
    system_prompt = getattr(task, "SYSTEM_PROMPT", None)

    def checked(number: int) -> dict:
        name = f"row {number} of {source}"
        row = check_row(rows[number], prompt_key, number, name, image_key)
        prompt = row["prompt"]
        if system_prompt and (not prompt or prompt[0]["role"] != "system"):
            prompt.insert(0, {"role": "system", "content": system_prompt})
        return row

    if files:
        return Rows(checked, range(len(rows)))
    return [checked(number) for number in range(len(rows))]


def demonstrated(rows: Sequence[dict], only: bool) -> Sequence[dict]:
    """Returns all rows, or only those with a demonstration. Raises BadInput if none has one."""
    numbers = [number for number, row in enumerate(rows) if row.get("demonstration")]
    need(numbers, "--algo sft, --imitation_steps: no training row has a 'demonstration'")
    return Rows(rows.__getitem__, numbers) if only else rows


def filter_overlong(rows: Sequence[dict], tokenizer, task, args, processor=None) -> Sequence[dict]:
    """Checks rows and tokenizer, and returns the rows whose prompts are not too long.

    The limit is args.max_prompt_tokens tokens of the rendered prompt. With prompt_truncate_side, a
    key of --agent_args, longer prompts are shortened in place first. The main rank does it for all.

    Raises BadInput if no prompt is short enough, or if a check fails."""
    if not rows:
        return rows
    chat_tokenizer = with_template_variables(tokenizer, args.chat_template_args)
    limit = args.max_prompt_tokens

    def length_of(row: dict) -> int:
        return _checked_length(row, chat_tokenizer, task, args, processor)

    side = args.prompt_truncate_side
    if side != "none":
        given = rows

        def shortened(number: int) -> dict:
            return _shorten_prompt(given[number], limit, length_of, chat_tokenizer, side)

        rows = Rows(shortened, range(len(given)))

    def check_all() -> np.ndarray:
        lengths = [length_of(row) for row in Bar(rows, "prompts")]
        check_tokenizer(tokenizer, chat_tokenizer, rows[0], task, args)
        # An evaluation, which sets --imitation_steps 0, plays none.
        if args.num_steps and args.imitation_steps != 0:
            check_demonstration(rows, chat_tokenizer, args)
        return np.array(lengths)

    lengths = on_main(check_all)
    fitting = np.flatnonzero(lengths <= limit)
    need(
        len(fitting),
        f"no prompt left: all {len(lengths)} are longer than --max_prompt_tokens {limit}; "
        f"raise it (the longest has {max(lengths)} tokens)",
    )
    if isinstance(rows, list):
        return [rows[number] for number in fitting]
    return Rows(rows.__getitem__, fitting)


def _shorten_prompt(row: dict, limit: int, length_of: Callable, tokenizer, side: str) -> dict:
    """Shortens texts of a prompt in place, the longest first, until it has `limit` tokens."""

    def n_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    texts = []  # (a message or a part of one, the key of its text)
    for message in row["prompt"]:
        content = message.get("content")
        if isinstance(content, str):
            texts.append((message, "content"))
        else:
            texts += [(part, "text") for part in content or () if "text" in part]

    texts.sort(key=lambda text: len(text[0][text[1]]), reverse=True)
    for holder, key in texts:
        excess = length_of(row) - limit
        n_kept = n_tokens(holder[key]) - excess - n_tokens("...")
        if excess > 0 and n_kept > 0:
            holder[key] = shorten(holder[key], n_kept, side, tokenizer)
    return row


# Columns of other data sets that no agent loop of agent_loop.py reads, and what is read instead.
UNREAD = {"tools": "the task's TOOLS", "chat_template_kwargs": "--chat_template_args"}


def _checked_length(row: dict, chat_tokenizer, task, args, processor) -> int:
    """Returns the tokens of a row's prompt, with images and hint. Raises BadInput for a bad row."""
    name = f"row {row.get('index')}"
    images = row.get("images") or []
    need(
        len(images) <= args.max_images,
        f"{name}: {len(images)} images are more than max_images {args.max_images}, which "
        "--agent_args can raise",
    )
    with refusing(name):
        loop = agent_loop_class(row, task, args)
        if loop.__module__ == "agent_loop":
            for column, instead in UNREAD.items():
                need(not row.get(column), f"{name}: {column!r} is not read, but {instead}")
        interaction = task_interaction(task, row_kwargs(row, "interaction_kwargs"))
        need(
            row["prompt"] or interaction,
            f"{name}: its prompt is empty, and no Interaction speaks first",
        )
        prompt = told_prompt(row) if args.hints else row["prompt"]
        schemas = tool_schemas(row, task)
        chat_template(chat_tokenizer).check_prompt(prompt, schemas)
        ids = render(chat_tokenizer, prompt, schemas)
        return len(expand(ids, load_images(images), processor))


# ---------------------------------------------------------------- batches


@dataclass
class Units:
    """The N units of a batch: outputs of a rollout with the same `unit`, which share one reward."""

    outcomes: N  # terminal reward: that of the unit's last output
    turn_rewards: N  # sum of the turn rewards of all its outputs
    groups: N  # integer labels: units with the same one are compared with each other
    prompts: N  # the prompt's number
    response_lengths: N  # response tokens of all its outputs, including tool tokens
    names: list[str]  # N names, as the agent loop calls the units
    unit_of_row: B  # the number of each output's unit

    @property
    def task_rewards(self) -> N:
        """The total rewards as the task gave them, before `train.shape_rewards`."""
        return self.outcomes + self.turn_rewards


def stable_hash(*parts) -> int:
    """Returns an integer in [0, 2^63) that depends on the reprs of the parts alone.

    All ranks and a resumed run get the same one, unlike Python's `hash`, which is salted."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _group_label(output):
    """Returns the integer label of an output's group, by default that of all its prompt's."""
    name = output.group or output.unit
    prompt = output.extra["prompt"]
    return stable_hash(prompt, name) if name else prompt


def by_unit(outputs: Outputs) -> Units:
    """Returns the Units of some outputs, in the order of their first outputs.

    The outputs must be sorted by prompt, sample and segment (`Rollouts.sort`). A reward that is
    still missing counts as 0."""
    last = last_outputs(outputs)
    numbers = {unit_of(output): number for number, output in enumerate(last)}
    index = [numbers[unit_of(output)] for output in outputs]
    response_lengths = [0] * len(last)
    turn_rewards = [0.0] * len(last)
    for unit, output in zip(index, outputs):
        response_lengths[unit] += len(output.response_ids)
        turn_rewards[unit] += sum(reward for _, reward in output.turn_rewards)
    return Units(
        # An explicit dtype, because user code may have changed torch's default.
        outcomes=torch.tensor([outcome(output) for output in last], dtype=torch.float32),
        turn_rewards=torch.tensor(turn_rewards, dtype=torch.float32),
        groups=torch.tensor([_group_label(output) for output in last]),
        prompts=torch.tensor([output.extra["prompt"] for output in last]),
        response_lengths=torch.tensor(response_lengths),
        names=[output.unit for output in last],
        unit_of_row=torch.tensor(index),
    )


def groups_with_signal(units: Units, values: N) -> set[int]:
    """Returns the labels of groups whose units differ in their values: a learning signal."""
    values_of_group = grouped(units.groups.tolist(), values.tolist())
    return {group for group, of_group in values_of_group.items() if len(set(of_group)) > 1}


def collate(outputs: Outputs, image_token_id: int = -1) -> dict:
    """Returns one or more outputs as a dict of right-padded tensors.

    For B outputs, with T tokens in the longest response and L tokens in the longest sequence
    (prompt and response):
        input_ids          (B, L) the sequences, padded with 0
        lengths            (B,) tokens of each sequence
        prompt_lengths     (B,) tokens of its prompt
        response_lengths   (B,) tokens of its response
        response_mask      (B, T) float, 1 where the policy sampled the token
        imitation_mask     (B, T) float, 1 at the assistant's tokens of a demonstration; only if
                           there are any
        logprobs_rollout   (B, T) float32, from the engine; 0 where nothing was sampled
        versions           (B, T) long, of the weights that sampled the token, else -1
        truncated          (B,) bool, True if a length or turn limit cut the output off
    If there are images:
        images             B lists of PIL images
        prefix_ids         (B, L) input_ids in which different images have different placeholders
                           (`prefix_ids_of`), so that equal prefixes have equal images
    If an output has extra["routes"] (--router_replay):
        routes             B tensors of small integers, (tokens, layers, k) each, or None
    If an output has extra["told_prompt_ids"] (--hints):
        hinted             a dict like this one, for the same outputs with these prompts"""

    def padded(rows, dtype=np.int64, padding=0):
        # np.array is faster than torch.tensor for long lists.
        rows = [torch.from_numpy(np.array(row, dtype)) for row in rows]
        return pad_sequence(rows, batch_first=True, padding_value=padding)

    mask = padded([output.response_mask for output in outputs], np.float32)
    versions = padded([output.response_versions for output in outputs], padding=-1)
    # Demonstrated tokens have mask 1, but version -1, because no weights sampled them.
    is_imitated = mask.bool() & (versions < 0)
    prompt_lengths = torch.tensor([len(output.prompt_ids) for output in outputs])
    response_lengths = torch.tensor([len(output.response_ids) for output in outputs])
    tensors = {
        "input_ids": padded(
            [np.concatenate([output.prompt_ids, output.response_ids]) for output in outputs]
        ),
        "lengths": prompt_lengths + response_lengths,
        "prompt_lengths": prompt_lengths,
        "response_lengths": response_lengths,
        "response_mask": mask.masked_fill_(is_imitated, 0),
        "logprobs_rollout": padded([output.response_logprobs for output in outputs], np.float32),
        "versions": versions,
        "truncated": torch.tensor([output.truncated for output in outputs]),
    }
    if is_imitated.any():
        tensors["imitation_mask"] = is_imitated.float()
    images = [output.images for output in outputs]
    if any(images):
        tensors["images"] = images
        tensors["prefix_ids"] = prefix_ids_of(tensors["input_ids"], images, image_token_id)
    hinted = told_outputs(outputs)
    if hinted:
        tensors["hinted"] = collate(hinted, image_token_id)
    found = [decode_routes(output.extra) for output in outputs]
    if any(of_output is not None for of_output in found):
        tensors["routes"] = found
    return tensors


class Batch(dict):
    """The outputs of a step, their tensors and their units, always aligned.

    Its keys are tensors of the outputs: those of `collate`, and those that the step adds, such as
    batch["advantages"]. Row b of each belongs to outputs[b]. Its attributes are everything else:
        outputs   the B outputs
        units     their N units, see `by_unit`
        layout    the tokens of each unit as one sequence, see `EndToEnd`
        token_rewards
                  (N, S) the shaped rewards at their tokens, set by train.set_token_rewards"""

    token_rewards: NS

    def __init__(self, outputs: Outputs, tensors: dict):
        super().__init__(tensors)
        self.outputs = outputs
        self.units = by_unit(outputs)

    @functools.cached_property
    def layout(self) -> "EndToEnd":
        """The tokens of each unit laid end to end. Later changes of the mask do not affect it."""
        return EndToEnd(self)

    def select(self, rows: list[int]) -> "Batch":
        """Returns the batch of these rows alone. Its units take the rewards that have arrived."""
        outputs = [self.outputs[row] for row in rows]
        return Batch(outputs, select_rows(self, rows))

    @property
    def shaped_rewards(self) -> N:
        """The sum of each unit's token_rewards, in float64: in float32 equal sums may differ."""
        return self.token_rewards.double().sum(1).float()

    def mask_truncated(self):
        """Excludes units with a truncated output from the loss and its counts."""
        index = self.units.unit_of_row  # (B,)
        is_truncated = torch.isin(index, index[self["truncated"]])
        self["response_mask"][is_truncated] = 0

    def count_unit_tokens(self) -> B:
        """Returns the number of mask-1 tokens in the whole unit of each row."""
        return losses.group_sum(self["response_mask"].sum(-1), self.units.unit_of_row)


def make_batch(outputs: Outputs, processor=None) -> Batch:
    """Returns outputs as a Batch. Rewards may be missing. processor: None for a text model."""
    image_token_id = getattr(processor, "image_token_id", -1)
    return Batch(outputs, collate(outputs, image_token_id))


def select_rows(tensors: dict, rows: Sequence[int]) -> dict:
    """Returns these rows of all tensors (`collate`), without columns that are only padding."""
    longest_sequence = max(tensors["lengths"][rows].tolist(), default=0)
    longest_response = max(tensors["response_lengths"][rows].tolist(), default=0)
    selected = {}
    for name, column in tensors.items():
        if isinstance(column, dict):
            selected[name] = select_rows(column, rows)
        elif isinstance(column, list):
            selected[name] = [column[row] for row in rows]
        elif column.ndim == 1:
            selected[name] = column[rows]
        else:
            is_sequence = name in ("input_ids", "prefix_ids")
            width = longest_sequence if is_sequence else longest_response
            selected[name] = column[rows, :width]
    return selected


class EndToEnd:
    """Lays the sampled tokens of each unit end to end, so that estimators see one sequence.

    A token (b, t) of the batch gets a place (n, s): n is its unit, and s counts from 0 within
    the unit. In this example, unit 0 has two outputs, the first with two turns:

        output   unit   response_mask   places of the sampled tokens
        0        0      1 1 0 0 1       1 2 . . 4
        1        0      1 1             6 7
        2        1      0 1 1           . 1 2

        unit   mask
        0      0 1 1 0 1 0 1 1
        1      0 1 1 0 0 0 0 0

    One empty place precedes each turn, so that turns stay separate runs of 1s. If output 1 went on
    in the middle of output 0's last turn, none would precede it, and its places would be 5 6.

    mask: (N, S) 1 at the places of tokens, 0 at empty ones. This is the estimators' mask.
    sampled: (B, T) True where a token was sampled, and so has a place.
    nearest_place: (B, T) the place s of the token or, if it was not sampled, of the last sampled
        token before it, else of the output's first one; 0 in an output without any."""

    def __init__(self, batch: Batch):
        self.n_units = len(batch.units.outcomes)
        self.sampled = batch["response_mask"].bool()
        # A sampled token takes one place, the first one of a turn also the empty place before it.
        # In the example above: 2 1 0 0 2, 2 1, and 0 2 1.
        widths = self.sampled.int() + losses.turn_starts(self.sampled)  # (B, T)
        starts = self._starts(batch, widths.sum(1).tolist())  # (B, 1)
        # Tokens that were not sampled have width 0, so they get the place of the last sampled one
        # before them or, by the clamp, of the output's first. Above: 1 2 2 2 4, 6 7, and 1 1 2.
        nearest = widths.cumsum(1, dtype=torch.int32) + (starts - 1)
        nearest.clamp_(min=starts + 1)
        self.nearest_place = nearest.where(self.sampled.any(1, keepdim=True), 0)

        units = batch.units.unit_of_row[:, None].expand_as(self.sampled)
        # Unit and place of the n sampled tokens, in the batch's order: (n,) each.
        self.places = units[self.sampled], self.nearest_place[self.sampled].long()
        self.mask = self.to_units(torch.ones_like(batch["response_mask"]))

    def _starts(self, batch: Batch, widths: list[int]) -> Tensor:
        """Returns the place at which each output begins in its unit, (B, 1).

        widths: the number of places of each output. Above: 5 3 3, so that it begins at 0 5 0."""
        starts = []
        ends = [0] * self.n_units
        previous = {}  # unit -> its previous output
        units = batch.units.unit_of_row.tolist()
        for unit, output, width in zip(units, batch.outputs, widths):
            start = ends[unit]
            before = previous.get(unit)
            # Whether it goes on exactly where the one before was cut, in a turn.
            if before and before.response_mask[-1:] == output.response_mask[:1] == [1]:
                if output.prompt_ids == before.prompt_ids + before.response_ids:
                    start -= 1  # its empty place is that of the last token before
            starts.append(start)
            ends[unit] = start + width
            previous[unit] = output
        return torch.tensor(starts, dtype=torch.int32)[:, None]

    def to_units(self, x: BT) -> NS:
        """Moves values of tokens to their places. Empty places get 0."""
        _, place = self.places
        width = 1
        if len(place):
            width = place.max().item() + 1
        zeros = x.new_zeros(self.n_units, width)
        return zeros.index_put(self.places, x[self.sampled])

    def to_outputs(self, x: NS) -> BT:
        """Moves values of places back to their tokens. Tokens without a place get 0."""
        zeros = torch.zeros(self.sampled.shape, dtype=torch.float32)
        return zeros.masked_scatter(self.sampled, x[self.places].type_as(zeros))


def place_rewards(batch: Batch, terminal: N) -> NS:
    """Returns the reward at each place of `EndToEnd`. A row adds up to its unit's whole reward.

    terminal: the terminal rewards. Each goes to the last sampled token of its unit. A turn reward
    goes to the `nearest_place` of its token. Without any sampled token (in the unit or, for a turn
    reward, in its output), a reward goes to place 0 of the unit. That place is empty, so no token
    gets credit, but the unit's sum counts it."""
    layout = batch.layout
    rewards = torch.zeros_like(layout.mask)
    units = batch.units.unit_of_row.tolist()
    for unit, output, nearest_place in zip(units, batch.outputs, layout.nearest_place):
        for token, reward in output.turn_rewards:
            place = nearest_place[token]
            rewards[unit, place] += reward

    places = torch.arange(layout.mask.shape[1])
    last_places = (layout.mask * places).long().amax(1)  # (N,), 0 without sampled tokens
    rewards[torch.arange(len(terminal)), last_places] += terminal
    return rewards


def turn_states(outputs: Outputs, turns: list[int]) -> Turns:
    """Returns an integer for each sampled turn of all units, unit by unit.

    Equal integers mean the same state in the same group. turns: the number of turns of each unit.
    States are the items of metrics["states"], which a task's reward function may set, compared by
    value; by default the turn's index in its unit. Raises ValueError if they are not one a turn."""
    given = defaultdict(list)
    for output in outputs:
        given[unit_of(output)] += output.metrics.get("states", [])
    labels = []
    for output, n_turns in zip(last_outputs(outputs), turns, strict=True):
        if not n_turns:  # in a demonstration, for example
            continue
        states = given[unit_of(output)] or list(range(n_turns))
        if len(states) != n_turns:
            raise ValueError(f"metrics['states'] has {len(states)} states for {n_turns} turns")
        group = _group_label(output)
        labels += [stable_hash(group, as_text(state)) for state in states]
    return torch.tensor(labels, dtype=torch.long)


def estimator_inputs(batch: Batch, takes: Sequence[str]) -> dict:
    """Returns the inputs of an estimator that follow from the batch. takes: those it asks for."""
    units = batch.units
    layout = batch.layout
    inputs = {
        "rewards": batch.shaped_rewards,
        "outcomes": units.outcomes,
        "groups": units.groups,
        "prompts": units.prompts,
        "names": units.names,
        "lengths": layout.mask.sum(1),  # sampled tokens of each unit; batch["lengths"] has all
        "truncated": torch.tensor([output.truncated for output in last_outputs(batch.outputs)]),
        "mask": layout.mask,
        "token_rewards": batch.token_rewards,
    }
    for name in takes:
        if name not in inputs and name in batch:  # such as values or entropy
            inputs[name] = layout.to_units(batch[name])
    if "states" in takes:
        inputs["states"] = turn_states(batch.outputs, turns_of_units(batch))
    if "parts" in takes:
        parts = parts_of_units(batch.outputs)
        inputs["parts"] = {
            name: torch.tensor([part.get(name, math.nan) for part in parts], dtype=torch.float32)
            for name in sorted(set().union(*parts))
        }
    if "outputs" in takes:
        order = units.unit_of_row.argsort(stable=True)
        inputs["outputs"] = [batch.outputs[row] for row in order]
    return inputs


def expanded_to_tokens(numbers, mask: NS, name: str) -> NS:
    """Returns an estimator's result as (N, S): it may give one number for each unit, (N,).

    name: what the message calls the numbers. Raises BadInput if they have another shape, or are
    not finite at a token."""
    given = f"type {type(numbers).__name__}"
    is_right = False
    if isinstance(numbers, Tensor):
        given = f"shape {tuple(numbers.shape)}"
        if numbers.shape == mask.shape[:1]:
            numbers = numbers[:, None].expand_as(mask)
        if numbers.shape == mask.shape:
            is_right = numbers[mask.bool()].isfinite().all()
    need(
        is_right,
        f"{name} of the {given}: it must be a finite tensor with one number for each unit, "
        f"(N,) = {tuple(mask.shape[:1])}, or for each token, (N, S) = {tuple(mask.shape)}",
    )
    return numbers


def turns_of_units(batch: Batch) -> list[int]:
    """Returns the number of sampled turns of each unit."""
    return losses.turn_starts(batch.layout.mask).sum(1).tolist()


def mini_batches(prompts: B, n: int, seeds: Sequence[int]) -> Iterator[list[int]]:
    """Yields the rows of each optimiser step: in every epoch, n nearly equal shares of the prompts.

    prompts: the prompt of each row. All rows of a prompt stay together, because a unit's rows must
    be in one mini-batch, and a prefix that rows share is then computed once. seeds: one for each
    epoch's shuffle."""
    present = prompts.unique()
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(present), generator=generator)
        for part in present[order].tensor_split(n):
            if len(part):
                yield torch.isin(prompts, part).nonzero().flatten().tolist()


def columns_of(batch: dict, micro: "MicroBatch", names: Sequence[str], device) -> dict:
    """Returns the named tensors of a micro-batch's rows, (b, T), on a device; 0 for a filler."""
    columns = to_device({name: batch[name][micro.rows] for name in names}, device)
    if micro.is_filler:
        columns = {name: torch.zeros_like(column) for name, column in columns.items()}
    return columns


def count_globally(batch: dict, rows: list[int], names: Sequence[str]) -> dict[str, float]:
    """Returns the counts of a mini-batch over all ranks: tokens, units and imitation_tokens.

    The last is 0 unless "imitation_mask" is among the names. rows: those of the whole mini-batch,
    which every rank holds. batch["unit_tokens"], (B,): see `Batch.count_unit_tokens`."""
    mask = batch["response_mask"][rows]
    n_imitated = 0
    if "imitation_mask" in names:
        n_imitated = batch["imitation_mask"][rows].sum().item()
    return {
        "tokens": mask.sum().item(),
        "units": losses.count_sequences(mask, batch["unit_tokens"][rows]).item(),
        "imitation_tokens": n_imitated,
    }


# ---------------------------------------------------------------- packing
# Models that can't take packed rows get right-padded ones, which share nothing.


@dataclass
class MicroBatch:
    """Rows of a batch in prefix order: those that go through the network together.

    Rows with a common prefix are neighbours: the members of a group begin with their prompt, the
    forks of a rollout with its history. Each row then adds only the tokens that it does not share
    with the row before it:

        row   its tokens        length   shared   it adds
        5     the cat sat       3        0        the cat sat
        2     the cat ran off   4        2        ran off
        7     a dog             2        0        a dog

    is_filler: True if it was added so that all ranks have equally many micro-batches. Its scores
        are dropped, and its masks are set to 0."""

    rows: list[int]  # their numbers in the batch
    lengths: list[int]
    shared: list[int]
    is_filler: bool = False

    def select(self, positions: list[int], is_filler: bool = False) -> "MicroBatch":
        """Returns a micro-batch of the rows at some positions of this one.

        Rows i < j have min(shared[i + 1], ..., shared[j]) tokens in common."""
        positions = sorted(positions)
        shared = [0]
        for before, position in itertools.pairwise(positions):
            between = self.shared[before + 1 : position + 1]
            shared.append(min(between))
        return MicroBatch(
            [self.rows[position] for position in positions],
            [self.lengths[position] for position in positions],
            shared,
            is_filler,
        )


def in_prefix_order(batch: dict, rows: Sequence[int]) -> MicroBatch:
    """Returns some rows of a batch as one MicroBatch."""
    ids = batch.get("prefix_ids", batch["input_ids"])  # (B, L)
    tokens_of = {}  # row -> its tokens, without padding: other rows may be many times as long
    for row in rows:
        tokens = ids[row, : batch["lengths"][row]]
        tokens_of[row] = tokens.int().numpy()

    # Any order that keeps equal prefixes together will do, and bytes compare fast.
    rows = sorted(rows, key=lambda row: tokens_of[row].tobytes())
    sequences = [tokens_of[row] for row in rows]
    shared = [0]
    for before, after in itertools.pairwise(sequences):
        # Neighbours share the tokens before the first difference or the end of the shorter one.
        n = min(len(before), len(after))
        differs = before[:n] != after[:n]
        shared.append(int(differs.argmax()) if differs.any() else n)
    lengths = [len(tokens) for tokens in sequences]
    return MicroBatch(rows, lengths, shared)


def balance(lengths: list[int], n: int) -> list[list[int]]:
    """Deals the indices of some lengths to n shares of about equal total length.

    The longest is dealt first (ties: lower index), each to the lightest share so far. With fewer
    indices than n, some shares stay empty."""
    shares = [[] for _ in range(n)]
    totals = [0] * n
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    for i in longest_first:
        lightest = totals.index(min(totals))
        shares[lightest].append(i)
        totals[lightest] += lengths[i]
    return [sorted(share) for share in shares]


@dataclass
class Part:
    """Some rows of `whole`, a MicroBatch of all rows that are to be divided."""

    positions: list[int]  # in `whole`
    n_tokens: int  # at most so many go through the network for them


def _cut_into_runs(whole: MicroBatch, max_tokens: int) -> list[Part]:
    """Cuts rows in prefix order into runs of neighbours that share prefixes, none too long."""
    runs = []
    n_rows = len(whole.rows)
    start = 0
    while start < n_rows:
        # The tokens of the run if it ends after its first row, its second row, ...
        sizes = [whole.lengths[start]]
        end = start + 1
        while end < n_rows and whole.shared[end] > 0 and sizes[-1] <= max_tokens:
            n_added = whole.lengths[end] - whole.shared[end]
            sizes.append(sizes[-1] + n_added)
            end += 1
        if sizes[-1] > max_tokens and len(sizes) > 1:
            # Cut before the row that shares least with the row before it, in the second half, so
            # that no tiny run is left. Backwards, so that `min` takes the last of equals.
            middle = (start + end - 1) // 2  # of rows 0 to 5 it is 2: cut before 3, 4 or 5
            second_half = range(end - 1, middle, -1)
            end = min(second_half, key=whole.shared.__getitem__)
        positions = list(range(start, end))
        n_tokens = sizes[len(positions) - 1]
        runs.append(Part(positions, n_tokens))
        start = end
    return runs


def _fill_packed(whole: MicroBatch, max_tokens: int) -> list[Part]:
    """Divides rows into parts, run by run: the longest first, each to the first with room."""
    runs = _cut_into_runs(whole, max_tokens)
    runs.sort(key=lambda run: run.n_tokens, reverse=True)
    positions = [[] for _ in runs]  # one list for each part; the last ones stay empty
    room = np.full(len(runs), max_tokens)
    for run in runs:
        first = np.argmax(room >= run.n_tokens)  # the first part with room
        room[first] -= run.n_tokens
        positions[first] += run.positions
    sizes = (max_tokens - room).tolist()
    return [Part(taken, size) for taken, size in zip(positions, sizes) if taken]


def _fill_padded(whole: MicroBatch, max_tokens: int) -> list[Part]:
    """Divides rows into parts of similar lengths, each padded to its longest row."""
    order = sorted(range(len(whole.rows)), key=whole.lengths.__getitem__, reverse=True)
    parts = []
    while order:
        longest = whole.lengths[order[0]]
        n_rows = max_tokens // longest
        taken = order[:n_rows]
        order = order[n_rows:]
        parts.append(Part(taken, len(taken) * longest))
    return parts


def micro_batches_of_this_rank(
    batch: dict,
    rows: Sequence[int],
    max_tokens: int,
    is_packed: bool = True,
) -> list[MicroBatch]:
    """Divides rows of the global batch into micro-batches, and returns those of this rank.

    At most max_tokens tokens of a micro-batch, or the longest row, go through the network. If
    packed, a prefix that rows share counts once; otherwise padding counts, too. There are as few
    micro-batches as that allows, and about equal in size. All ranks get the same number, because
    DDP counts backward passes: a rank with fewer gets fillers."""
    n_ranks = dist.get_world_size()
    whole = in_prefix_order(batch, rows)
    fill = _fill_packed if is_packed else _fill_padded
    if not is_packed:
        whole.shared = [0] * len(whole.rows)
    parts = _equal_parts(whole, max_tokens, n_ranks, fill)
    shares = balance([part.n_tokens for part in parts], n_ranks)
    # The largest first: the smaller ones fit into the memory that it leaves.
    share = shares[dist.get_rank()]
    share.sort(key=lambda k: -parts[k].n_tokens)
    micros = [whole.select(parts[k].positions) for k in share]
    n_missing = max(map(len, shares)) - len(micros)
    # A filler has the shortest row, because its results are not used.
    shortest = whole.lengths.index(min(whole.lengths))
    filler = whole.select([shortest], is_filler=True)
    return micros + [filler] * n_missing


def _equal_parts(whole: MicroBatch, max_tokens: int, n_ranks: int, fill: Callable) -> list[Part]:
    """Divides rows into the micro-batches of all ranks.

    fill(whole, budget) divides them into parts of at most `budget` tokens. Bisects for a small
    budget that needs no more of them: they are then of about equal size."""
    longest = max(whole.lengths)
    max_tokens = max(max_tokens, longest)
    n_needed = len(fill(whole, max_tokens))
    at_most = math.ceil(n_needed / n_ranks) * n_ranks  # the same number for each rank
    low = longest
    high = max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(fill(whole, middle)) <= at_most:
            high = middle
        else:
            low = middle + 1
    return fill(whole, low)


def pack(
    input_ids: BL | list[Sequence[int]],
    lengths: Sequence[int] | Tensor,
    starts: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Joins R sequences, (R, L) right-padded or a list of them, end to end without padding.

    lengths (R,): where each sequence ends.
    starts: how many tokens to leave out at the start of each sequence; default: none.

    Returns a tuple, with P = sum(lengths - starts):
        input_ids      (1, P)
        position_ids   (1, P) start .. length - 1 for each sequence
        cu_seqlens     (R + 1,) int32, the bounds of the packed sequences: 0, ..., P
        max_seqlen     max(lengths)"""
    sequences = []
    positions = []
    cu_seqlens = [0]
    starts = starts or [0] * len(lengths)
    for row, start, length in zip(input_ids, starts, lengths, strict=True):
        sequences.append(torch.as_tensor(row)[start:length])
        positions.append(torch.arange(start, length))
        cu_seqlens.append(cu_seqlens[-1] + len(sequences[-1]))
    ids = torch.cat(sequences)
    positions = torch.cat(positions).to(ids.device)
    cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32).to(ids.device)
    return ids[None], positions[None], cu_seqlens, int(max(lengths))


def _pack_shared_prefixes(ids: BL, micro: MicroBatch) -> tuple[dict, BL]:
    """Returns a model's packed inputs, and the slots of each row's tokens (`pack_rows`).

    ids: of the rows. In the example of `MicroBatch` the slots are 0 1 2, 0 1 3 4 and 5 6."""
    flat, position_ids, cu_seqlens, max_seqlen = pack(ids, micro.lengths, micro.shared)
    inputs = {
        "input_ids": flat,
        "position_ids": position_ids,
        "max_seqlen": max_seqlen,
        "cu_seqlens": cu_seqlens.unique(),  # drops the empty sequence of a row that adds nothing
    }

    n_added = cu_seqlens.diff().tolist()
    added = torch.arange(flat.shape[1]).split(n_added)
    slots = []  # of the tokens of each row
    row_slots = torch.arange(0)
    for n_shared, new_slots in zip(micro.shared, added):
        row_slots = torch.cat([row_slots[:n_shared], new_slots])
        slots.append(row_slots)

    if any(micro.shared):
        # The tokens that a row adds attend to keys and values of all tokens of the row.
        attended = [row_slots for row_slots, n in zip(slots, n_added) if n]
        n_attended = [0, *map(len, attended)]
        inputs["key_index"] = torch.cat(attended)
        inputs["cu_seqlens_k"] = torch.tensor(n_attended).cumsum(0).int()
    return inputs, pad_sequence(slots, batch_first=True)


def pack_rows(
    batch: dict,
    micro: MicroBatch,
    device,
    is_packed: bool = True,
    top_k: int = 0,
) -> dict:
    """Returns the network's inputs for R rows, and where to read the predictions.

    A token's slot is its position among the P tokens that go through the network. Returns a dict:
        inputs    of the model, see below
        images    for `Vision`: (token ids, PIL images, tokens shared) of each row, or []
        top_k     how many of the likeliest ids a Policy gives for each token
        source, targets, prediction, at, shape
                  which tokens are predicted, and from where: see `_predictions`

    Packed inputs:
        input_ids, position_ids, cu_seqlens, max_seqlen   from `pack`, of the tokens that rows add
    And if anything is shared:
        key_index      (K,) the slots of all tokens of each row, one row after the other
        cu_seqlens_k   where these rows begin and end
    Otherwise the only input is input_ids (R, L), right-padded, and slots are counted row by row
    in it. A causal model needs no attention mask."""
    ids = batch["input_ids"][micro.rows]
    if is_packed:
        inputs, slots = _pack_shared_prefixes(ids, micro)
    else:
        ids = ids[:, : max(micro.lengths)]
        inputs = {"input_ids": ids}
        slots = torch.arange(ids.numel()).view(ids.shape)

    result = {
        "inputs": inputs,
        "images": _images_of_rows(batch, micro),
        "top_k": top_k,
        **_predictions(batch, micro, ids, slots),
    }
    return to_device(result, device)


# Ids are below 2**32, and slots below 2**31, so a pair, slot * ID_LIMIT + id, fits one int64.
ID_LIMIT = 2**32


def _predictions(batch: dict, micro: MicroBatch, ids: BL, slots: BL) -> dict:
    """Returns which tokens of a micro-batch are predicted, and from where.

    ids, slots: of its rows' tokens. n of these were sampled or demonstrated. A prediction is a
    pair: the slot of the token before, and the predicted id. Rows that agree up to and including a
    sampled token share its prediction, so there are M <= n of them.

        source       (M,) slots of the tokens whose hidden states predict
        targets      (M,) ids of the predicted tokens
        prediction   (n,) the index among the M predictions of each of the n tokens
        at           (row, column) of each in the (R, T) matrices, (n,) each
        shape        (R, T)

    With batch["ref_top_ids"], (B, T, K), targets is (n, 1 + K): the token and K other ids. Then
    M = n, because rows that agree may have other ids, from teachers with other hints."""
    mask = batch["response_mask"][micro.rows]
    if "imitation_mask" in batch:
        mask = mask + batch["imitation_mask"][micro.rows]
    row, column = mask.nonzero(as_tuple=True)  # (n,) each
    index = batch["prompt_lengths"][micro.rows][row] + column  # of the token in its sequence
    sources = slots[row, index - 1]  # (n,)
    targets = ids[row, index]  # (n,)
    if "ref_top_ids" in batch:
        top_ids = batch["ref_top_ids"][micro.rows][row, column]  # (n, K)
        unique_sources = sources
        unique_targets = torch.cat([targets[:, None], top_ids], 1)
        prediction = torch.arange(len(row))
    else:
        # Each pair becomes one integer, because unique(dim=1) takes microseconds per column.
        pairs = sources * ID_LIMIT + targets
        unique_pairs, prediction = pairs.unique(return_inverse=True)  # (M,), (n,)
        unique_sources = unique_pairs // ID_LIMIT
        unique_targets = unique_pairs % ID_LIMIT
    return {
        "source": unique_sources,
        "targets": unique_targets,
        "prediction": prediction,
        "at": (row, column),
        "shape": mask.shape,
    }


def _images_of_rows(batch: dict, micro: MicroBatch) -> list[tuple]:
    """Returns (token ids, PIL images, tokens shared) of each row, or [] without any image."""
    images_of_row = batch.get("images")
    if not images_of_row or not any(images_of_row[row] for row in micro.rows):
        return []
    found = []
    for row, length, n_shared in zip(micro.rows, micro.lengths, micro.shared):
        # An array stays on the host, unlike a tensor.
        ids = batch["input_ids"][row, :length].numpy()
        found.append((ids, images_of_row[row], n_shared))
    return found
