"""Rows -> prompts; trajectories -> batches -> packed micro-batches.

    rows        load_task, load_rows, filter_overlong: what is asked; prompt_order: when
    batches     collate makes the outputs of a step one batch: padded (B, T) tensors, the form
                that people read. by_unit and token_rewards give their rewards, once they
                have some
    packing     micro_batches_of_this_rank and pack_rows: what goes through the network has no
                padding, and a prefix that rows share only once; packed_attention, of
                flatrl/attention.py, is the attention of what is packed

A batch holds every trajectory of a step on every rank (token ids and images: little), so that
advantages and mini-batches are cut globally, and each rank then works on its own rows."""

import functools
import inspect
import itertools
import math
import os
import signal
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.data import DataLoader

import losses
from agent_loop import (
    AgentLoopOutput, agent_loop_class, expand, open_image, outcome, render, row_kwargs,
    task_interaction, task_tools, templated,
)
from flatrl import tables
from flatrl.attention import packed_attention, register_packed_attention  # noqa: F401
from flatrl.bad_input import check_types, need, refusing
from flatrl.hints import told_outputs, told_prompt
from flatrl.processes import on_main
from flatrl.rows import check_row, check_tokenizer, tool_schemas
from flatrl.tables import Rows, read_files
from flatrl.terminal import Bar
from flatrl.vision import same_images

Outputs = list[AgentLoopOutput]

# ---------------------------------------------------------------- rows

# Types of what a task file may define, by name; None always.
TASK_TYPES = {"SYSTEM_PROMPT": str, "TOOLS": list | tuple, "sampler": Callable,
              "INTERACTIONS": list | tuple}


def load_task(path: str, needs=("load", "reward")) -> ModuleType:
    """Imports a task file. Raises BadInput if it is missing, fails or lacks one of `needs`,
    or if that takes other arguments."""
    file = Path(path)
    need(file.is_file(), f"--task {path}: no such file")
    name = f"task_{file.stem}"
    spec = spec_from_file_location(name, file)
    need(spec, f"--task {path}: not a Python file (its name must end in .py)")
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up by name
    with refusing(f"--task {path} does not import", str(file)):
        spec.loader.exec_module(module)
    check_types(vars(module), TASK_TYPES, f"--task {path}")
    with refusing(f"--task {path} has something in TOOLS or INTERACTIONS that is none (a "
                  "function needs type hints and a Google-style docstring)"):
        task_tools(module)
        task_interaction(module, {})
    for name, n_arguments in zip(needs, (1, 2, 1)):
        function = getattr(module, name, None)
        need(callable(function),
             f"--task {path} has no function {name}: a task file defines load(split), "
             "reward(output, row) and, unless --model gives the model, build_model(path)")
        with refusing(f"--task {path}: {name} must take {n_arguments} argument(s)"):
            inspect.signature(function).bind(*range(n_arguments))
    return module


def load_rows(task: ModuleType, split: str, files: list[str] | None = None,
              prompt_key: str = "prompt") -> Sequence[dict]:
    """Returns the rows of a split ("train" | "val"), checked, with verl's columns.

    `files` replace the task's `load`. The result is a list; where `read_files` leaves the rows
    on disk, it is Rows, which are checked when they are asked for.

    The column prompt_key has chats, or texts, each a user's message. A task's SYSTEM_PROMPT is
    put before every prompt that has no system message. The prompt of a row with a column
    `images` has a placeholder for each: a part {"type": "image"} of a message's content, or
    "<image>" in its text. Raises BadInput if there are no rows, or a row's prompt is neither,
    or has more or fewer placeholders than images."""
    source = ", ".join(files) if files else f"load({split!r})"
    with refusing(f"{source} does not give a list of rows"):
        rows = read_files(files) if files else list(task.load(split))
    need(rows, f"{source} has no rows")
    on_disk = not isinstance(rows, list)
    system_prompt = getattr(task, "SYSTEM_PROMPT", None)

    def checked(number: int) -> dict:
        """Returns a row of this number, with the system prompt before its prompt."""
        row = rows[number].to_pylist()[0] if on_disk else rows[number]
        row = check_row(row, prompt_key, number, f"row {number} of {source}")
        prompt = row["prompt"]
        if system_prompt and (not prompt or prompt[0]["role"] != "system"):
            prompt.insert(0, {"role": "system", "content": system_prompt})
        return row

    if on_disk:
        return Rows(checked, range(len(rows)))
    return [checked(number) for number in range(len(rows))]


def demonstrated(rows: Sequence[dict], alone: bool) -> Sequence[dict]:
    """Returns the rows, or those alone that have a demonstration. Raises BadInput if none has."""
    numbers = [number for number, row in enumerate(rows) if row.get("demonstration")]
    need(numbers, "--algo sft, --imitation_steps: no training row has a 'demonstration'")
    return Rows(rows.__getitem__, numbers) if alone else rows


def filter_overlong(
        rows: Sequence[dict], tokenizer, task, args, processor=None) -> Sequence[dict]:
    """Returns the rows whose prompts have at most args.max_prompt_tokens tokens.

    These are rendered, with all tokens of their images. On the way the rows are checked, see
    `_prompt_length`, and the tokenizer. The main rank does it for all; of more than
    MAX_ROWS_MEASURED_HERE rows by as many processes as it has cores. Of more than
    MAX_ROWS_CHECKED_AT_START rows it looks at the first thousand to be drawn, at others when
    they are asked for: see Rows. Raises BadInput if no row is left."""
    templates = templated(tokenizer, args.chat_template_args)
    limit = args.max_prompt_tokens
    n_rows = len(rows)
    is_sample = n_rows > tables.MAX_ROWS_CHECKED_AT_START
    numbers = prompt_order(n_rows, 0, 1000, args.seed) if is_sample else range(n_rows)

    def length(number: int) -> int:
        return _prompt_length(rows[number], f"row {number}", templates, task, args, processor)

    n_processes = 0
    if n_rows > tables.MAX_ROWS_MEASURED_HERE:
        n_processes = len(os.sched_getaffinity(0))
    lengths = on_main(_measure, length, numbers, n_processes)  # (rows looked at,)
    on_main(check_tokenizer, tokenizer, templates, rows[numbers[0]], task)
    too_long = lengths > limit
    need(not too_long.all(), f"no prompt left: all {len(lengths)} are longer than "
         f"--max_prompt_tokens {limit}; raise it (the longest has {max(lengths)} tokens)")
    if is_sample:
        def next_that_fits(number: int) -> dict:
            while length(number) > limit:
                number = (number + 1) % n_rows
            return rows[number]

        return Rows(next_that_fits, range(n_rows), overlong=too_long.mean())
    fitting = np.flatnonzero(~too_long)
    if isinstance(rows, list):
        return [rows[number] for number in fitting]
    return Rows(rows.__getitem__, fitting)


def _prompt_length(row: dict, name: str, templates, task, args, processor) -> int:
    """Returns the number of tokens of a row's rendered prompt, images and hint included.

    Raises BadInput, which calls the row `name`, if its agent, a tool or its interaction is
    unknown, or if it has images that can't be read, are more than args.max_images or meet a
    text model (no processor)."""
    images = row.get("images") or []
    need(len(images) <= args.max_images,
         f"{name}: {len(images)} images are more than --max_images {args.max_images}")
    with refusing(name):
        agent_loop_class(row, task, args)
        interaction = task_interaction(task, row_kwargs(row, "interaction_kwargs"))
        need(row["prompt"] or interaction,
             f"{name}: its prompt is empty, and no Interaction speaks first")
        ids = render(templates, told_prompt(row, args.hints), tool_schemas(row, task))
        return len(expand(ids, [open_image(image) for image in images], processor))


def _measure(length: Callable[[int], int], numbers: Sequence[int], n_processes: int):
    """Returns an array of length(number) for all numbers, by n_processes (0: by this one)."""
    def lengths(batch):
        return [length(number) for number in batch]

    # The loader's processes are forks of this one: they have rows, tokenizer and task.
    loader = DataLoader(numbers, batch_size=100, collate_fn=lengths, num_workers=n_processes,
                        prefetch_factor=100 if n_processes else None)
    batches = iter(loader)  # the processes start
    if n_processes:
        import_module("vllm.tool_parsers")  # needed later, and takes seconds: they work meanwhile
    result = np.concatenate(list(Bar(batches, "prompts", total=len(loader), unit_scale=100)))
    # The loader's handler of this signal would wake `Stop` at each child's end.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return result


def prompt_order(n_rows: int, start: int, count: int, seed: int) -> list[int]:
    """Returns the row numbers at positions start .. start + count - 1 of an endless shuffle.

    Every epoch of n_rows positions is a new permutation, a function of the seed and the
    position alone: resuming needs no sampler state."""
    return [int(_permutation(n_rows, position // n_rows, seed)[position % n_rows])
            for position in range(start, start + count)]


# Kept, because it is asked for one position at a time, and a million rows take 30 ms.
@functools.lru_cache(maxsize=4)
def _permutation(n_rows: int, epoch: int, seed: int) -> np.ndarray:
    """Returns the numbers of all rows, in an epoch's random order."""
    return np.random.default_rng((seed, epoch)).permutation(n_rows)


# ---------------------------------------------------------------- batches


@dataclass
class Units:
    """The units of a batch, N of them: whatever shares one reward, and weighs one.

    A unit is the outputs of one rollout that have the same `unit`, see AgentLoopOutput."""

    rewards: Tensor  # (N,) its last output's terminal reward, plus the turn rewards of all
    outcomes: Tensor  # (N,) the first of these alone
    groups: Tensor  # (N,) equal for units that are compared with each other
    prompts: Tensor  # (N,) the number of its prompt
    lengths: Tensor  # (N,) response tokens of all its outputs
    names: list[str]  # N of them, by which the agent loop calls the unit
    index: Tensor  # (B,) the unit of each output


def unit_of(output: AgentLoopOutput) -> tuple:
    """Returns what outputs of one unit have in common: prompt, sample and the unit's name."""
    return output.extra["prompt"], output.extra["sample"], output.unit


def _group_number(output):
    """Returns the number of an output's group. That of rollouts is their prompt's."""
    label = output.group or output.unit
    prompt = output.extra["prompt"]
    return hash((prompt, label)) if label else prompt


def last_outputs(outputs: Outputs) -> Outputs:
    """Returns the last output of each unit, in the order of their units' first outputs."""
    return list({unit_of(output): output for output in outputs}.values())


def by_unit(outputs: Outputs) -> Units:
    """Reduces outputs to one entry for each unit: `Units` of tensors.

    The outputs must be sorted by extra["prompt"], ["sample"] and ["segment"]. A reward that is
    still missing counts as 0."""
    last = last_outputs(outputs)
    numbers = {unit_of(output): number for number, output in enumerate(last)}
    lengths = torch.zeros(len(last), dtype=torch.long)
    turn_rewards = [0.0] * len(last)
    index = [numbers[unit_of(output)] for output in outputs]
    for unit, output in zip(index, outputs):
        lengths[unit] += len(output.response_ids)
        turn_rewards[unit] += sum(reward for _, reward in output.turn_rewards)
    # Not in torch's default type, which user code may have changed.
    outcomes = torch.tensor([outcome(output) for output in last], dtype=torch.float32)
    return Units(
        rewards=outcomes + outcomes.new_tensor(turn_rewards), outcomes=outcomes,
        groups=torch.tensor([_group_number(output) for output in last]),
        prompts=torch.tensor([output.extra["prompt"] for output in last]), lengths=lengths,
        names=[output.unit for output in last], index=torch.tensor(index))


def groups_with_signal(outputs: Outputs, metric: str) -> set[int]:
    """Returns the groups whose units differ in a metric: there is something to learn.

    metric: "outcome" (best: a shaped reward nearly always differs, verl-recipe#125), "total"
    (both as in Units), or a reward dict's key, of a unit's last output."""
    units = by_unit(outputs)
    if metric == "outcome":
        values = units.outcomes.tolist()
    elif metric == "total":
        values = units.rewards.tolist()
    else:
        values = [output.reward[metric] for output in last_outputs(outputs)]
    values_of_group = defaultdict(set)
    for group, value in zip(units.groups.tolist(), values):
        values_of_group[group].add(value)
    return {group for group, values in values_of_group.items() if len(values) > 1}


def collate(outputs: Outputs, image_token_id: int = -1) -> dict:
    """Returns one or more outputs as a batch of tensors, right-padded.

    B outputs, T the longest response, L the longest sequence (prompt then response) of all:
        input_ids          (B, L) the sequences, padded with 0
        lengths            (B,) their tokens; prompt_lengths and response_lengths alike
        response_mask      (B, T) float, 1 where a token was sampled
        imitation_mask     (B, T) float, 1 where it is a demonstration's; only if there are any
        logprobs_rollout   (B, T) float32, the engine's, 0 where nothing was sampled
        versions           (B, T) long, of the weights that sampled a token, else -1
        truncated          (B,) bool, cut off by a length or turn limit
    and, if there are images:
        images             B lists of PIL images, equal ones one object; the only entry that is
                           no tensor
        prefix_ids         (B, L) input_ids whose placeholders (image_token_id) say which image
                           it is, see `same_images`; without an image_token_id no row with
                           images shares a prefix
    and, if an output has extra["told_prompt_ids"] (--hints):
        told               a batch of the same rows, in which these are the prompts
    Rewards may come later, and have functions of their own: `by_unit`, `token_rewards`."""
    def padded(rows, dtype=np.int64, padding=0):
        rows = [torch.from_numpy(np.fromiter(row, dtype)) for row in rows]  # fast for lists
        return pad_sequence(rows, batch_first=True, padding_value=padding)

    mask = padded([output.response_mask for output in outputs], np.float32)
    versions = padded([output.response_versions for output in outputs], padding=-1)
    imitation_mask = mask.masked_fill(versions >= 0, 0)
    prompt_lengths = torch.tensor([len(output.prompt_ids) for output in outputs])
    response_lengths = torch.tensor([len(output.response_ids) for output in outputs])
    logprobs = [output.response_logprobs for output in outputs]
    batch = {
        "input_ids": padded([output.prompt_ids + output.response_ids for output in outputs]),
        "lengths": prompt_lengths + response_lengths,
        "prompt_lengths": prompt_lengths,
        "response_lengths": response_lengths,
        "response_mask": mask - imitation_mask,
        "logprobs_rollout": padded(logprobs, np.float32),
        "versions": versions,
        "truncated": torch.tensor([output.truncated for output in outputs])}
    if imitation_mask.any():
        batch["imitation_mask"] = imitation_mask
    images = [output.images for output in outputs]
    if any(images):
        batch |= same_images(batch["input_ids"], images, image_token_id)
    told = told_outputs(outputs)
    if told:
        batch["told"] = collate(told, image_token_id)
    return batch


def at_unit_ends(outcomes: Tensor, outputs: Outputs, units: Units) -> Tensor:
    """Returns the terminal reward of each output, (B,): that of its unit, outcomes (N,),
    for the unit's last output with a sampled token; 0 for the others."""
    ends = {unit: row for row, unit in enumerate(units.index.tolist())
            if 1 in outputs[row].response_mask}
    terminal_rewards = outcomes.new_zeros(len(outputs))
    for unit, row in ends.items():
        terminal_rewards[row] = outcomes[unit]
    return terminal_rewards


def token_rewards(outputs: Outputs, terminal_rewards: Tensor) -> Tensor:
    """Returns the rewards of the response tokens, (B, T), for estimators that need them.

    A turn reward falls on the token it names, or, where that was not sampled, on the last
    sampled one before it, else on the first. The terminal reward, of terminal_rewards (B,), is
    on the last sampled token. An output without any sampled token has zeros."""
    rows = []
    for output, terminal_reward in zip(outputs, terminal_rewards, strict=True):
        mask = output.response_mask
        row = terminal_rewards.new_zeros(len(mask))
        for index, reward in [*output.turn_rewards, (len(mask), terminal_reward)]:
            backwards = mask[: index + 1][::-1]
            if 1 in backwards:
                row[len(backwards) - 1 - backwards.index(1)] += reward
            elif 1 in mask:
                row[mask.index(1)] += reward
        rows.append(row)
    return pad_sequence(rows, batch_first=True)


def places_in_units(batch: dict) -> tuple[Tensor, Tensor]:
    """Lays the sampled tokens of each unit end to end, so that returns go over its outputs.

    Gives n sampled tokens, in the batch's order, their places in a matrix that has a row for
    each of the N units: row and column, (n,) each. An empty column stands before every turn:
    a run of the matrix's places is a turn. An output whose prompt is the whole sequence of
    the output before it goes on with the turn that was cut there."""
    units = batch["units"]
    mask = batch["response_mask"].bool()  # (B, T)
    steps = mask.long() + losses.turn_starts(mask)
    columns = steps.cumsum(1) - 1  # (B, T), counted from the output's first
    widths = steps.sum(1).tolist()
    first_columns = []
    ends = [0] * len(units.rewards)  # by unit
    cut_turns = {}  # unit -> its last output's sequence, if the last token there was sampled
    for row, unit in enumerate(units.index.tolist()):
        sequence = batch["input_ids"][row, : batch["lengths"][row]]
        prompt = sequence[: batch["prompt_lengths"][row]]
        cut_turn = cut_turns.pop(unit, None)
        sampled = mask[row, : batch["response_lengths"][row]]
        if cut_turn is not None and sampled[:1].any() and torch.equal(prompt, cut_turn):
            ends[unit] -= 1
        first_columns.append(ends[unit])
        ends[unit] += widths[row]
        if sampled[-1:].any():
            cut_turns[unit] = sequence
    columns += torch.tensor(first_columns)[:, None]
    return units.index[:, None].expand_as(mask)[mask], columns[mask]


def scatter(values: Tensor, places: tuple[Tensor, Tensor], n_units: int) -> Tensor:
    """Puts the n sampled tokens' values, (n,), into their places: (N, S), 0 elsewhere."""
    width = places[1].max().item() + 1 if len(values) else 1
    return values.new_zeros(n_units, width).index_put(places, values)


def unit_tokens(mask: Tensor, index: Tensor) -> Tensor:
    """Returns how many mask-1 tokens the unit of each row has, (B,).

    mask (B, T); index (B,): the unit of each row."""
    return losses.group_sum(mask.sum(-1), index)


def select(batch: dict, rows: list[int]) -> dict:
    """Returns a batch of these rows alone, trimmed to their longest sequence and response."""
    longest_sequence = max(batch["lengths"][rows].tolist(), default=0)
    longest_response = max(batch["response_lengths"][rows].tolist(), default=0)
    selected = {}
    for name, column in batch.items():
        if isinstance(column, dict):
            selected[name] = select(column, rows)
        elif isinstance(column, list):
            selected[name] = [column[row] for row in rows]
        elif column.ndim == 1:
            selected[name] = column[rows]
        else:
            is_sequence = name in ("input_ids", "prefix_ids")
            width = longest_sequence if is_sequence else longest_response
            selected[name] = column[rows, :width]
    return selected


def turn_states(outputs: Outputs, turns: list[int]) -> Tensor:
    """Returns an integer for every sampled turn, unit by unit, (sum of turns,).

    turns: the number of turns of each unit. The integer is equal where turns of one group
    met the same state. The states are the outputs' metrics["states"], one a turn and
    compared by value, which a task's reward function may set; by default a turn's index in
    its unit. Raises ValueError if they are more or fewer than the turns."""
    given = defaultdict(list)
    for output in outputs:
        given[unit_of(output)] += output.metrics.get("states", [])
    labels = []
    for output, n_turns in zip(last_outputs(outputs), turns, strict=True):
        if not n_turns:  # a demonstration
            continue
        states = tree_map(_array_value, given[unit_of(output)] or list(range(n_turns)))
        if len(states) != n_turns:
            raise ValueError(f"metrics['states'] has {len(states)} states for {n_turns} turns")
        labels += [hash((_group_number(output), repr(state))) for state in states]
    return torch.tensor(labels, dtype=torch.long)


def turns_of_units(batch: dict, outputs: Outputs) -> list[int]:
    """Returns how many turns each unit of a batch has; outputs: those of the batch."""
    units = by_unit(outputs)
    places = places_in_units(batch | {"units": units})
    sampled = scatter(torch.ones(len(places[0])), places, len(units.rewards))  # (N, S)
    return losses.turn_starts(sampled).sum(1).tolist()


def _array_value(leaf):
    """Returns shape and bytes of an array or image: its repr may leave out most of it."""
    if isinstance(leaf, Tensor) or hasattr(leaf, "__array_interface__"):
        array = np.asarray(leaf)
        return array.shape, array.tobytes()
    return leaf


# ---------------------------------------------------------------- packing
# No padding in any forward pass, and no token twice: what rows of a batch have in common at
# their start goes through the network once. MicroBatch says how; then: which rows go together
# (micro_batches_of_this_rank), what the model gets (pack_rows), and its attention.


@dataclass
class MicroBatch:
    """Rows of a batch that go through the network together, in prefix order.

    In prefix order, rows with a common prefix are neighbours: the members of a group begin
    with their prompt, the forks of a trajectory with its history. A row then adds only the
    tokens that it does not share with the row before it:

        row   its tokens        length   shared   it adds
        5     the cat sat       3        0        the cat sat
        2     the cat ran off   4        2        ran off
        7     a dog             2        0        a dog

    rows: their numbers in the batch; lengths, shared: the table's columns; is_filler: every
    rank needs as many micro-batches as the others, and this one only makes up the number: its
    scores are thrown away, and its loss is multiplied by 0."""

    rows: list[int]
    lengths: list[int]
    shared: list[int]
    is_filler: bool = False

    def select(self, positions: list[int], is_filler: bool = False) -> "MicroBatch":
        """Returns a micro-batch of the rows at some positions of this one.

        Two rows share the least of what neighbours share on the way from one to the other."""
        positions = sorted(positions)
        shared = [0]
        for before, position in itertools.pairwise(positions):
            shared.append(min(self.shared[before + 1 : position + 1]))
        return MicroBatch([self.rows[position] for position in positions],
                          [self.lengths[position] for position in positions], shared, is_filler)


def in_prefix_order(batch: dict, rows: Sequence[int]) -> MicroBatch:
    """Returns some rows of a batch in prefix order, as a single micro-batch."""
    ids = batch.get("prefix_ids", batch["input_ids"])[rows]  # (N, L)
    lengths = batch["lengths"][rows]  # (N,)
    tokens = ids.int().numpy()

    def as_bytes(i: int) -> bytes:  # any order of token ids will do; bytes are compared fast
        return tokens[i, : lengths[i]].tobytes()

    order = sorted(range(len(rows)), key=as_bytes)
    ids = ids[order]
    lengths = lengths[order]
    # What is equal from the start, up to the end of the shorter one, is shared.
    ends = torch.minimum(lengths[1:], lengths[:-1])[:, None]
    equal = (ids[1:] == ids[:-1]) & (torch.arange(ids.shape[1]) < ends)  # (N - 1, L)
    shared = equal.cumprod(1, dtype=torch.int32).sum(1)
    return MicroBatch([rows[i] for i in order], lengths.tolist(), [0, *shared.tolist()])


def balance(lengths: list[int], n: int) -> list[list[int]]:
    """Deals the indices of some lengths to n shares of about equal total length.

    Longest first (of equal ones the first), each to the lightest share so far. With fewer
    indices than n some shares stay empty."""
    shares = [[] for _ in range(n)]
    totals = [0] * n
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        lightest = totals.index(min(totals))
        shares[lightest].append(i)
        totals[lightest] += lengths[i]
    return [sorted(share) for share in shares]


def _cut_into_runs(whole: MicroBatch, max_tokens: int) -> list[tuple[int, range]]:
    """Cuts rows into runs of neighbours that share prefixes, and are best packed together.

    whole: all rows, in prefix order. Returns (tokens, positions) of each run; a token that is
    shared within it counts once. A run has at most max_tokens tokens or is a single row. One
    that would have more is cut where least is shared, in its second half, so that no tiny run
    comes of it."""
    runs = []
    start = 0
    while start < len(whole.rows):
        sizes = [whole.lengths[start]]  # tokens of the run's first row, first two rows, ...
        end = start + 1
        while end < len(whole.rows) and whole.shared[end] and sizes[-1] <= max_tokens:
            sizes.append(sizes[-1] + whole.lengths[end] - whole.shared[end])
            end += 1
        if sizes[-1] > max_tokens and len(sizes) > 1:
            middle = (start + end - 1) // 2
            end = min(range(end - 1, middle, -1), key=whole.shared.__getitem__)
        runs.append((sizes[end - start - 1], range(start, end)))
        start = end
    return runs


def _fill_micro_batches(
        whole: MicroBatch, max_tokens: int, packed: bool) -> list[tuple[int, list]]:
    """Puts rows, run by run, into micro-batches of at most max_tokens tokens for the network.

    The longest run comes first, and each goes to the first micro-batch with room. Returns
    (tokens, positions) of each. Not packed, rows share nothing, and are padded to the longest
    of theirs."""
    runs = sorted(_cut_into_runs(whole, max_tokens), key=lambda run: run[0], reverse=True)
    micros = [[] for _ in runs]  # the last ones stay empty
    room = np.full(len(runs), max_tokens)
    padded = np.zeros_like(room)  # not packed: the length of the longest row, the first
    for tokens, run in runs:
        taken = np.maximum(padded, tokens)
        k = np.argmax((room >= taken) | (room == max_tokens))  # an empty one takes any run
        room[k] -= taken[k]
        micros[k] += run
        if not packed:
            padded[k] = taken[k]
    return [(max_tokens - left, rows) for left, rows in zip(room, micros) if rows]


def micro_batches_of_this_rank(batch: dict, rows: Sequence[int], max_tokens: int,
                               packed: bool = True) -> list[MicroBatch]:
    """Cuts rows of the global batch into micro-batches, and returns those of this rank.

    A micro-batch has at most max_tokens tokens that go through the network: packed, where a
    prefix that its rows share counts once, or padded. They are as few as that allows, then
    about equal in size, and dealt evenly to the ranks. All ranks get the same number, because
    DDP counts backward passes: a rank that has fewer gets fillers."""
    n_ranks = dist.get_world_size()
    whole = in_prefix_order(batch, rows)
    if not packed:
        whole.shared = [0] * len(whole.shared)

    fill = functools.partial(_fill_micro_batches, whole, packed=packed)  # by a budget of tokens
    # Every rank computes as many as max_tokens makes necessary. The smallest budget that makes
    # no more necessary fills them about equally.
    at_most = math.ceil(len(fill(max_tokens)) / n_ranks) * n_ranks
    budget = bisect_left(range(max_tokens), True, max(whole.lengths),
                         key=lambda budget: len(fill(budget)) <= at_most)
    micros = fill(budget)
    dealt = balance([tokens for tokens, _ in micros], n_ranks)
    mine = [whole.select(micros[k][1]) for k in dealt[dist.get_rank()]]
    filler = whole.select([np.argmin(whole.lengths)], is_filler=True)  # the shortest row
    return mine + [filler] * (max(map(len, dealt)) - len(mine))


def pack(input_ids, lengths, starts=None) -> tuple[Tensor, Tensor, Tensor, int]:
    """Joins N sequences end to end, without padding.

    input_ids: (N, L) right-padded, or a list of N sequences; lengths: (N,), where each
    ends; starts: a list of N numbers of tokens to leave out at the start of each. S is the
    sum of lengths less starts. Returns input_ids and position_ids (1, S), these from 0 (or
    its start) in each sequence; cu_seqlens (N + 1,) int32, where the packed sequences begin
    and end; max_seqlen, the largest of lengths."""
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


def _pack_forest(ids: Tensor, micro: MicroBatch) -> tuple[dict, Tensor]:
    """Packs what each row of a micro-batch adds.

    ids (R, L): the rows' token ids. Returns a model's inputs, see `pack_rows`, and the places
    (R, L) where tokens are packed:

        row   its tokens        it adds         places of its tokens
        5     the cat sat       the cat sat     0 1 2
        2     the cat ran off   ran off         0 1 3 4
        7     a dog             a dog           5 6"""
    flat, position_ids, cu_seqlens, max_seqlen = pack(ids, micro.lengths, micro.shared)
    # A row that adds nothing, as another is equal, is left out of cu_seqlens by `unique`.
    inputs = {"input_ids": flat, "position_ids": position_ids, "max_seqlen": max_seqlen,
              "cu_seqlens": cu_seqlens.unique()}
    added = torch.arange(flat.shape[1]).split(cu_seqlens.diff().tolist())
    places = []
    row_places = torch.arange(0)  # (length of the row,)
    for shared, new in zip(micro.shared, added):
        row_places = torch.cat([row_places[:shared], new])
        places.append(row_places)
    if any(micro.shared):
        # What a row adds attends to keys and values of all its tokens, from their places.
        attended = [row_places for row_places, new in zip(places, added) if len(new)]
        key_index, _, inputs["cu_seqlens_k"], _ = pack(attended, list(map(len, attended)))
        inputs["key_index"] = key_index[0]
    return inputs, pad_sequence(places, batch_first=True)


ID_LIMIT = 2**32  # all token ids and places are less


def pack_rows(batch: dict, micro: MicroBatch, device, packed: bool = True) -> dict:
    """Prepares a micro-batch's forward pass, and says where each sampled token is predicted.

    The network is not run here. R rows have N sampled tokens; packed, S tokens go through
    the network, because a prefix that a row shares with the row before it stands there once
    (see the example of `_pack_forest`). The place of a token is its position among these S.
    Returns a dict:
        inputs    what the model gets. Packed: input_ids, position_ids (1, S), cu_seqlens and
                  max_seqlen as of `pack`, of what each row adds; if anything is shared, also
                  key_index (K,), the places of all tokens of each row, one row after the
                  other, and cu_seqlens_k, where these rows begin and end.
                  Not packed: input_ids (R, L), right-padded; a causal model needs no mask
        source    (M,) the places (not packed: counted row by row) of the tokens whose hidden
                  states predict sampled ones
        targets   (M,) the ids of these. No (source, target) comes twice: where rows agree up
                  to and including a sampled token, it is predicted once
        pair      (N,) which (source, target) each sampled token is
        at        its row in the micro-batch and its column: two of (N,)
        shape     (R, T), of the matrices that have these rows and columns
        images    for `Vision`: (token ids, PIL images, tokens shared) of each row, or []"""
    ids = batch["input_ids"][micro.rows]
    if packed:
        inputs, places = _pack_forest(ids, micro)
    else:
        ids = ids[:, : max(micro.lengths)]
        inputs = {"input_ids": ids}
        places = torch.arange(ids.numel()).view(ids.shape)
    mask = batch["response_mask"][micro.rows]
    if "imitation_mask" in batch:
        mask = mask + batch["imitation_mask"][micro.rows]
    row, column = mask.nonzero(as_tuple=True)
    index = batch["prompt_lengths"][micro.rows][row] + column  # of the token in its row
    # A pair is made one integer, because unique(dim=1) takes microseconds for each column.
    pairs = places[row, index - 1] * ID_LIMIT + ids[row, index]  # (N,)
    pairs, pair = pairs.unique(return_inverse=True)  # (M,), (N,)
    result = {"inputs": inputs, "source": pairs // ID_LIMIT, "targets": pairs % ID_LIMIT,
              "pair": pair, "at": (row, column), "shape": mask.shape, "images": []}
    images = [batch["images"][i] for i in micro.rows] if "images" in batch else []
    if any(images):
        sequences = [row_ids[:length] for row_ids, length in zip(ids, micro.lengths)]
        result["images"] = list(zip(sequences, images, micro.shared))
    return to_device(result, device)


def to_device(tensors, device):
    """Returns a dict whose tensors are on the device.

    To a GPU they go through pinned memory: nobody waits for the copy, and the next micro-batch
    is packed while the GPU computes."""
    def copied(tensor):
        if "cuda" in str(device):
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return tree_map_only(Tensor, copied, tensors)
