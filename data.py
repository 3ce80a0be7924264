"""Rows -> prompts; outputs -> batches -> packed micro-batches.

    rows        load_rows gives the rows, each with a prompt, and prompt_order shuffles them.
    batches     Batch holds a step's outputs, their right-padded tensors and their units, aligned.
    credit      EndToEnd lays the tokens of each unit end to end. place_rewards puts rewards on
                them, and estimator_inputs gives an estimator what it asks for.
    packing     micro_batches_of_this_rank and pack_rows prepare the network's inputs: rows end to
                end without padding, and each shared prefix only once, for flatrl/attention.py.

The words output, unit, group and turn, and the letters of shapes, are those of losses.py. Two
more letters: L tokens in the longest sequence, and P tokens that go through the network.

Every rank holds the batch of the whole step (token ids and images are small), so advantages and
mini-batches are computed globally. Then each rank works on its own rows."""

import bisect
import functools
import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
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
from agent_loop import AgentLoopOutput, agent_loop_class, outcome, row_kwargs, task_interaction
from flatrl.attention import packed_attention, register_packed_attention  # noqa: F401 (re-exported)
from flatrl.bad_input import need, refusing
from flatrl.chat_template import chat_template, render, with_template_variables
from flatrl.devices import to_device
from flatrl.hints import told_outputs, told_prompt
from flatrl.launch import Bar
from flatrl.metrics import grouped, parts_of_units
from flatrl.processes import on_main
from flatrl.routes import decode_routes, pack_routes
from flatrl.rows import as_text, check_row, check_tokenizer, tool_schemas
from flatrl.tables import Rows, prompt_order, read_files, rows_of  # noqa: F401 (re-exported)
from flatrl.tools import shorten
from flatrl.units import Outputs, last_outputs, unit_of
from flatrl.vision import expand, load_images, prefix_ids_of
from losses import BT, NS, B, N, Turns

BL = Annotated[Tensor, "B L"]  # outputs x tokens of prompt and response, right-padded

# ---------------------------------------------------------------- rows


def load_task(path: str, needs: Sequence[str] = ("load", "reward")) -> ModuleType:
    """Imports a task file and returns the module. It may import modules from its own folder.

    needs: functions that it must define; group_reward may stand for reward. Raises BadInput."""
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
            f"--task {path} has no function {name}: it needs reward or group_reward, load unless "
            "--train_files and --val_files are given, and build_model unless --model is",
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
        placeholder for each: a part {"type": "image"} of a message, or "<image>" in its text.

    Raises BadInput if there are no training rows, or if a row is not as said here."""
    source = ", ".join(files) if files else f"load({split!r})"
    with refusing(f"{source} does not give a list of rows", getattr(task, "__file__", "")):
        if files:
            rows = read_files(files)
        else:
            rows = task.load(split)
            is_dataset = getattr(rows, "features", None)
            rows = list(rows_of(rows) if is_dataset else rows)
    need(len(rows) or split == "val", f"{source} has no rows")
    system_prompt = getattr(task, "SYSTEM_PROMPT", None)

    def checked(number: int) -> dict:
        name = f"row {number} of {source}"
        row = check_row(rows[number], prompt_key, number, name, image_key)
        prompt = row["prompt"]
        if system_prompt and (not prompt or prompt[0]["role"] != "system"):
            prompt.insert(0, {"role": "system", "content": system_prompt})
        return row

    numbers = range(len(rows))
    return Rows(checked, numbers) if files else [*map(checked, numbers)]


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
    context = chat_tokenizer, task, args, processor
    if args.prompt_truncate_side != "none":
        given = rows
        rows = Rows(lambda number: _shorten_prompt(given[number], *context), range(len(given)))

    def check_all() -> np.ndarray:
        lengths = [_checked_length(row, *context) for row in Bar(rows, "prompts")]
        check_tokenizer(tokenizer, chat_tokenizer, rows[0], task, args)
        return np.array(lengths)

    lengths = on_main(check_all)
    limit = args.max_prompt_tokens
    fitting = np.flatnonzero(lengths <= limit)
    problem = f"all exceed --max_prompt_tokens {limit}: the longest has {max(lengths)} tokens"
    need(len(fitting), problem)
    if isinstance(rows, list):
        return [rows[number] for number in fitting]
    return Rows(rows.__getitem__, fitting)


def _shorten_prompt(row: dict, tokenizer, task, args, processor) -> dict:
    """Shortens texts of a prompt in place, the longest first, to args.max_prompt_tokens tokens."""

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
        excess = _checked_length(row, tokenizer, task, args, processor) - args.max_prompt_tokens
        n_kept = n_tokens(holder[key]) - excess - n_tokens("...")
        if excess > 0 and n_kept > 0:
            holder[key] = shorten(holder[key], n_kept, args.prompt_truncate_side, tokenizer)
    return row


# Columns of other data sets that no agent loop of agent_loop.py reads, and what is read instead.
UNREAD = {"tools": "the task's TOOLS", "chat_template_kwargs": "--chat_template_args"}


def _checked_length(row: dict, chat_tokenizer, task, args, processor) -> int:
    """Returns the tokens of a row's prompt, with images and hint. Raises BadInput for a bad row."""
    name = f"row {row.get('index')}"
    images = row.get("images") or []
    need(len(images) <= args.max_images, f"{name}: more images than max_images (--agent_args)")
    with refusing(name):
        loop = agent_loop_class(row, task, args)
        if loop.__module__ == "agent_loop":
            for column, instead in UNREAD.items():
                need(not row.get(column), f"{name}: {column!r} is not read, but {instead}")
        interaction = task_interaction(task, row_kwargs(row, "interaction_kwargs"))
        need(row["prompt"] or interaction, f"{name}: its prompt is empty, without an Interaction")
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
    text = repr(parts).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def by_unit(outputs: Outputs) -> Units:
    """Returns the Units of some outputs, in the order of their first outputs.

    The outputs must be sorted (`Rollouts.sort`). A reward that is still missing counts as 0."""
    last = last_outputs(outputs)
    numbers = {unit_of(output): number for number, output in enumerate(last)}
    index = [numbers[unit_of(output)] for output in outputs]
    response_lengths = [0] * len(last)
    turn_rewards = [0.0] * len(last)
    for unit, output in zip(index, outputs):
        response_lengths[unit] += len(output.response_ids)
        turn_rewards[unit] += sum(reward for _, reward in output.turn_rewards)
    prompts = [output.extra["prompt"] for output in last]
    groups = []
    for prompt, output in zip(prompts, last):
        name = output.group or output.unit
        groups.append(stable_hash(prompt, name) if name else prompt)
    return Units(
        # An explicit dtype, because user code may have changed torch's default.
        outcomes=torch.tensor([outcome(output) for output in last], dtype=torch.float32),
        turn_rewards=torch.tensor(turn_rewards, dtype=torch.float32),
        groups=torch.tensor(groups),
        prompts=torch.tensor(prompts),
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
        tensors = [torch.from_numpy(np.array(row, dtype)) for row in rows]
        return pad_sequence(tensors, batch_first=True, padding_value=padding)

    def column(name: str) -> list:
        return [getattr(output, name) for output in outputs]

    prompts = column("prompt_ids")
    responses = column("response_ids")
    mask = padded(column("response_mask"), np.float32)
    versions = padded(column("response_versions"), padding=-1)
    # Demonstrated tokens have mask 1, but version -1, because no weights sampled them.
    is_imitated = mask.bool() & (versions < 0)
    prompt_lengths = torch.tensor([*map(len, prompts)])
    response_lengths = torch.tensor([*map(len, responses)])
    tensors = {
        "input_ids": padded(map(np.append, prompts, responses)),
        "lengths": prompt_lengths + response_lengths,
        "prompt_lengths": prompt_lengths,
        "response_lengths": response_lengths,
        "response_mask": mask.masked_fill_(is_imitated, 0),
        "logprobs_rollout": padded(column("response_logprobs"), np.float32),
        "versions": versions,
        "truncated": torch.tensor(column("truncated")),
    }
    if is_imitated.any():
        tensors["imitation_mask"] = is_imitated.float()
    images = column("images")
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
    batch["advantages"]. Row b of each belongs to outputs[b]. units: the outputs' (`by_unit`)."""

    token_rewards: NS  # the shaped rewards at their tokens, set by train.set_token_rewards

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
        n_tokens = self["response_mask"].sum(-1)  # (B,)
        return losses.group_sum(n_tokens, self.units.unit_of_row)


def make_batch(outputs: Outputs, processor=None) -> Batch:
    """Returns outputs as a Batch. Rewards may be missing. processor: None for a text model."""
    image_token_id = getattr(processor, "image_token_id", -1)
    return Batch(outputs, collate(outputs, image_token_id))


def select_rows(tensors: dict, rows: list[int]) -> dict:
    """Returns these rows of all tensors (`collate`). They keep their padding."""
    selected = {}
    for name, column in tensors.items():
        if isinstance(column, dict):
            selected[name] = select_rows(column, rows)
        elif isinstance(column, list):
            selected[name] = [column[row] for row in rows]
        else:
            selected[name] = column[rows]
    return selected


class EndToEnd:
    """Lays the sampled tokens of each unit end to end, so that estimators see one sequence.

    A sampled token (b, t) of the batch gets a place (n, s): n is its unit, and s counts from 0
    within the unit. One empty place precedes each turn, so that turns stay separate runs of 1s. In
    this example, unit 0 has two outputs, the first with two turns:

        output   unit   response_mask   places        unit   mask
        0        0      1 1 0 0 1       1 2 . . 4     0      0 1 1 0 1 0 1 1
        1        0      1 1             6 7           1      0 1 1 0 0 0 0 0
        2        1      0 1 1           . 1 2

    If output 1 continued output 0 in the middle of a turn, its places would be 5 6.

    mask: (N, S) 1 at the places of tokens, 0 at empty ones. This is the estimators' mask.
    last_places: (N,) of each unit's last token; 0 in a unit without any."""

    def __init__(self, batch: Batch):
        self.sampled = batch["response_mask"].bool()
        # The places a token takes, for a turn's first one 2. Above: 2 1 0 0 2, 2 1, 0 2 1.
        widths = self.sampled.int() + losses.turn_starts(self.sampled)  # (B, T)
        taken = [0] * len(batch.units.names)  # the places of each unit so far
        offsets = []  # the place at which each output begins; above: 0 5 0
        previous = {}  # unit -> its previous output
        for row, unit in enumerate(batch.units.unit_of_row.tolist()):
            output = batch.outputs[row]
            if unit in previous and _continues_turn(previous[unit], output):
                widths[row, 0] = self.sampled[row, 0]
            previous[unit] = output
            offsets.append(taken[unit])
            taken[unit] += widths[row].sum().item()
        self.shape = len(taken), max([1, *taken])
        self.last_places = torch.tensor(taken).sub(1).clamp(min=0)

        # The place of each token; if it was not sampled, that of the last sampled one before it.
        offsets = torch.tensor(offsets)[:, None]  # (B, 1)
        self.place_of_token = offsets + widths.cumsum(1) - 1  # (B, T)
        # Unit and place of the n sampled tokens, (n,) each.
        row, _ = self.sampled.nonzero(as_tuple=True)
        self.index = batch.units.unit_of_row[row], self.place_of_token[self.sampled]
        self.mask = self.to_units(torch.ones_like(batch["response_mask"]))

    def to_units(self, x: BT) -> NS:
        """Moves values of tokens to their places. Empty places get 0."""
        return x.new_zeros(self.shape).index_put(self.index, x[self.sampled])

    def to_outputs(self, x: NS) -> BT:
        """Moves values of places back to their tokens. Tokens without a place get 0."""
        zeros = torch.zeros(self.sampled.shape, dtype=torch.float32)
        return zeros.masked_scatter(self.sampled, x[self.index].type_as(zeros))


def _continues_turn(before: AgentLoopOutput, output: AgentLoopOutput) -> bool:
    """Returns whether an output goes on exactly where the one before it was cut, in a turn."""
    both_sampled = before.response_mask[-1:] == output.response_mask[:1] == [1]
    return both_sampled and output.prompt_ids == before.prompt_ids + before.response_ids


def place_rewards(batch: Batch, terminal: N) -> NS:
    """Returns rewards at the places of `EndToEnd`. Row n sums to all the rewards of unit n.

    terminal: the terminal rewards. Each goes to the last sampled token of its unit. The reward of a
    turn at token t goes to the last sampled token up to t or, without one, to the output's first.
    Without any sampled token (in the unit or, for a turn reward, in its output), a reward goes to
    place 0 of the unit, which is empty: no token gets credit, but the unit's sum counts it."""
    layout = batch.layout
    rewards = torch.zeros_like(layout.mask)
    units = batch.units.unit_of_row
    for row, output in enumerate(batch.outputs):
        sampled = layout.sampled[row].nonzero().flatten()
        for token, reward in output.turn_rewards:
            place = 0
            if len(sampled):
                place = layout.place_of_token[row, max(token, sampled[0])]
            rewards[units[row], place] += reward
    rewards[torch.arange(len(terminal)), layout.last_places] += terminal
    return rewards


def turn_states(batch: Batch) -> Turns:
    """Returns an integer for each sampled turn of all units, unit by unit.

    Equal integers mean the same state in the same group. States are the items of
    metrics["states"], which a task's reward function may set, compared by value; by default the
    turn's index in its unit. Raises ValueError unless there is one for each turn."""
    units = batch.units
    given = [[] for _ in units.names]
    for unit, output in zip(units.unit_of_row.tolist(), batch.outputs):
        given[unit] += output.metrics.get("states", [])
    groups = units.groups.tolist()
    n_turns = losses.turn_starts(batch.layout.mask).sum(1).tolist()
    labels = []
    for group, states, n in zip(groups, given, n_turns):
        if n == 0:  # in a demonstration, for example
            continue
        states = states or range(n)
        if len(states) != n:
            raise ValueError(f"metrics['states'] has {len(states)} states for {n} turns")
        labels += [stable_hash(group, as_text(state)) for state in states]
    return torch.tensor(labels, dtype=torch.long)


def estimator_inputs(batch: Batch, takes: Sequence[str]) -> dict:
    """Returns the inputs of an estimator that follow from the batch. takes: those it asks for."""
    units = batch.units
    layout = batch.layout
    last = last_outputs(batch.outputs)
    inputs = {
        "rewards": batch.shaped_rewards,
        "outcomes": units.outcomes,
        "groups": units.groups,
        "prompts": units.prompts,
        "names": units.names,
        "lengths": layout.mask.sum(1),  # sampled tokens of each unit; batch["lengths"] has all
        "truncated": torch.tensor([output.truncated for output in last]),
        "mask": layout.mask,
        "token_rewards": batch.token_rewards,
    }
    for name in takes:
        if name not in inputs and name in batch:  # such as values or entropy
            inputs[name] = layout.to_units(batch[name])
    if "states" in takes:
        inputs["states"] = turn_states(batch)
    if "parts" in takes:
        parts = parts_of_units(batch.outputs)
        inputs["parts"] = {}
        for name in sorted(set().union(*parts)):
            numbers = [part.get(name, math.nan) for part in parts]
            inputs["parts"][name] = torch.tensor(numbers, dtype=torch.float32)
    if "outputs" in takes:
        order = units.unit_of_row.argsort(stable=True)
        inputs["outputs"] = [batch.outputs[row] for row in order]
    return inputs


def expanded_to_tokens(numbers, mask: NS, name: str) -> NS:
    """Returns an estimator's result as (N, S): it may give one number for each unit, (N,).

    name: for the message. Raises BadInput for another shape, or if a token's is not finite."""
    given = getattr(numbers, "shape", type(numbers))
    if isinstance(numbers, Tensor) and given == mask.shape[:1]:
        numbers = numbers[:, None].expand_as(mask)
    is_right = isinstance(numbers, Tensor) and numbers.shape == mask.shape
    need(
        is_right and numbers[mask.bool()].isfinite().all(),
        f"{name} of {given}: it must be a finite tensor with one number for each unit, "
        f"(N,) = {tuple(mask.shape[:1])}, or for each token, (N, S) = {tuple(mask.shape)}",
    )
    return numbers


def mini_batches(prompts: B, n: int, seeds: Sequence[int]) -> Iterator[list[int]]:
    """Yields the rows of each optimiser step: in every epoch, n nearly equal shares of the prompts.

    prompts: the prompt of each row. All rows of a prompt stay together: a unit's rows must be in
    one mini-batch, and a shared prefix is then computed once. seeds: of each epoch's shuffle."""
    present = prompts.unique()
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(present), generator=generator)
        for part in present[order].tensor_split(n):
            rows = torch.isin(prompts, part).nonzero().flatten()
            if len(rows):
                yield rows.tolist()


def columns_of(batch: dict, micro: "MicroBatch", names: Sequence[str], device) -> dict:
    """Returns the named tensors of a micro-batch's rows, (b, T), on a device; 0 for a filler."""
    columns = {}
    for name in names:
        column = batch[name][micro.rows]
        columns[name] = torch.zeros_like(column) if micro.is_filler else column
    return to_device(columns, device)


# ---------------------------------------------------------------- packing
# Rows in prefix order are cut into runs that share prefixes. Runs fill chunks, each of which
# becomes a micro-batch, and `balance` deals the chunks to ranks. Models that can't take packed rows
# get right-padded ones, which share nothing: there, a chunk has rows of similar lengths.


@dataclass
class MicroBatch:
    """Rows of a batch in prefix order: those that go through the network together.

    Rows with a common prefix are neighbours: the members of a group begin with their prompt, the
    forks of a rollout with its history. Each row adds what it does not share with the one before:

        row   its tokens        length   shared   it adds
        5     the cat sat       3        0        the cat sat
        2     the cat ran off   4        2        ran off
        7     a dog             2        0        a dog

    is_filler: only gives ranks equal numbers. Its scores are dropped, its masks set to 0."""

    rows: list[int]  # their numbers in the batch
    lengths: list[int]
    shared: list[int]
    is_filler: bool = False


def in_prefix_order(batch: dict, rows: Sequence[int], is_packed: bool = True) -> MicroBatch:
    """Returns some rows of a batch as one MicroBatch. Unless it is packed, they share nothing."""
    ids = batch.get("prefix_ids", batch["input_ids"])  # (B, L)
    lengths = batch["lengths"]
    # Without padding: other rows may be many times as long.
    tokens_of = {row: ids[row, : lengths[row]].int().numpy() for row in rows}

    # Any order that keeps equal prefixes together will do, and bytes compare fast.
    rows = sorted(rows, key=lambda row: tokens_of[row].tobytes())
    sequences = [tokens_of[row] for row in rows]
    shared = [0] * len(rows)
    if is_packed:
        shared[1:] = map(_common_prefix, sequences, sequences[1:])
    return MicroBatch(rows, lengths[rows].tolist(), shared)


def _common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Returns the number of tokens with which both sequences begin."""
    n = min(len(first), len(second))
    differs = np.append(first[:n] != second[:n], True)  # where the shorter one ends, at the latest
    return int(differs.argmax())


def balance(lengths: list[int], n: int) -> list[list[int]]:
    """Deals the indices of some lengths to n shares of about equal total length.

    The longest is dealt first (ties: lower index), each to the lightest share so far."""
    shares = [[] for _ in range(n)]
    totals = [0] * n
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    for i in longest_first:
        lightest = totals.index(min(totals))
        shares[lightest].append(i)
        totals[lightest] += lengths[i]
    return [sorted(share) for share in shares]


@dataclass
class Chunk:
    """Some rows of a batch that are to go through the network together."""

    rows: list[int]  # their numbers in the batch
    n_tokens: int  # at most so many go through the network for them


def _runs(whole: MicroBatch, max_tokens: int) -> list[Chunk]:
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
        rows = whole.rows[start:end]
        runs.append(Chunk(rows, sizes[len(rows) - 1]))
        start = end
    return runs


def _packed_chunks(whole: MicroBatch, max_tokens: int) -> list[Chunk]:
    """Divides rows into chunks, run by run: the longest first, each to the first with room."""
    runs = sorted(_runs(whole, max_tokens), key=lambda run: run.n_tokens, reverse=True)
    rows = [[] for _ in runs]  # of each chunk; the last ones stay empty
    sizes = np.zeros(len(runs), int)
    for run in runs:
        first = np.argmax(sizes + run.n_tokens <= max_tokens)  # the first chunk with room
        sizes[first] += run.n_tokens
        rows[first] += run.rows
    chunks = map(Chunk, rows, sizes.tolist())
    return [chunk for chunk in chunks if chunk.rows]


def _padded_chunks(whole: MicroBatch, max_tokens: int) -> list[Chunk]:
    """Divides rows into chunks of similar lengths, each padded to its longest row."""
    lengths = dict(zip(whole.rows, whole.lengths))
    rows = sorted(whole.rows, key=lengths.get, reverse=True)
    chunks = []
    while rows:
        longest = lengths[rows[0]]
        n = max_tokens // longest
        taken, rows = rows[:n], rows[n:]
        chunks.append(Chunk(taken, len(taken) * longest))
    return chunks


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
    whole = in_prefix_order(batch, rows, is_packed)
    divide = _packed_chunks if is_packed else _padded_chunks
    longest = max(whole.lengths)
    max_tokens = max(max_tokens, longest)
    n_needed = len(divide(whole, max_tokens))
    at_most = math.ceil(n_needed / n_ranks) * n_ranks  # the same number for each rank

    def is_enough(budget: int) -> bool:
        return len(divide(whole, budget)) <= at_most

    # A small budget that needs no more chunks makes them about equal in size.
    budgets = range(longest, max_tokens)
    budget = longest + bisect.bisect_left(budgets, True, key=is_enough)
    chunks = divide(whole, budget)
    # The largest first: the smaller ones fit into the memory that it leaves.
    chunks.sort(key=lambda chunk: chunk.n_tokens, reverse=True)
    shares = balance([chunk.n_tokens for chunk in chunks], n_ranks)
    mine = [chunks[k].rows for k in shares[dist.get_rank()]]
    micros = [in_prefix_order(batch, sorted(rows), is_packed) for rows in mine]
    # A filler has the shortest row, because its results are not used.
    length, row = min(zip(whole.lengths, whole.rows))
    filler = MicroBatch([row], [length], [0], is_filler=True)
    n_missing = max(map(len, shares)) - len(micros)
    return micros + [filler] * n_missing


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
    starts = starts or [0] * len(lengths)
    for row, start, length in zip(input_ids, starts, lengths, strict=True):
        sequences.append(torch.as_tensor(row)[start:length])
        positions.append(torch.arange(start, length))
    ids = torch.cat(sequences)
    positions = torch.cat(positions).to(ids.device)
    bounds = torch.tensor([0, *map(len, sequences)]).cumsum(0)
    return ids[None], positions[None], bounds.int().to(ids.device), int(max(lengths))


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
    has_routers: bool = False,
) -> dict:
    """Returns the network's inputs for R rows, and where to read the predictions.

    A token's slot is its position among the P tokens that go through the network. Returns a dict:
        inputs    of the model, see below
        images    for `Vision`: (token ids, PIL images, tokens shared) of each row, or []
        top_k     how many of the likeliest ids a Policy gives for each token
        routes    for `Routers`, if the network has any
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
        "images": _images_of_rows(batch, micro) if "images" in batch else [],
        "top_k": top_k,
        **_predictions(batch, micro, ids, slots),
    }
    if has_routers:
        result["routes"] = pack_routes(batch, micro, slots)
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
        targets = torch.cat([targets[:, None], top_ids], 1)
        prediction = torch.arange(len(row))
    else:
        # Each pair becomes one integer, because unique(dim=1) takes microseconds per column.
        pairs = sources * ID_LIMIT + targets
        unique_pairs, prediction = pairs.unique(return_inverse=True)  # (M,), (n,)
        sources = unique_pairs // ID_LIMIT
        targets = unique_pairs % ID_LIMIT
    return {
        "source": sources,
        "targets": targets,
        "prediction": prediction,
        "at": (row, column),
        "shape": mask.shape,
    }


def _images_of_rows(batch: dict, micro: MicroBatch) -> list[tuple]:
    """Returns (token ids, PIL images, tokens shared) of each row, or [] without any image."""
    if not any(batch["images"][row] for row in micro.rows):
        return []
    found = []
    for row, length, n_shared in zip(micro.rows, micro.lengths, micro.shared):
        # An array stays on the host, unlike a tensor.
        ids = batch["input_ids"][row, :length].numpy()
        found.append((ids, batch["images"][row], n_shared))
    return found
