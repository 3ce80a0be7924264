"""Rows -> prompts; outputs -> batches -> packed micro-batches.

    rows        load_task, load_rows, filter_overlong: the prompts; prompt_order: their order
    batches     Batch: a step's outputs, their tensors (right-padded, as people read them) and
                their units, always aligned; place_rewards puts rewards on tokens
    packing     micro_batches_of_this_rank and pack_rows: the network gets no padding, and a
                prefix that rows share only once; flatrl/attention.py has its attention

Every rank holds the batch of the whole step (token ids and images are small), so advantages and
mini-batches are computed globally. Then each rank works on its own rows."""

import functools
import inspect
import itertools
import math
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map, tree_map_only

import losses
from agent_loop import (
    AgentLoopOutput,
    agent_loop_class,
    expand,
    open_image,
    outcome,
    render,
    row_kwargs,
    task_interaction,
    task_tools,
    with_template_variables,
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

# Types of the names that a task file may define. None is always fine.
TASK_TYPES = {
    "SYSTEM_PROMPT": str,
    "TOOLS": list | tuple,
    "INTERACTIONS": list | tuple,
    "sampler": Callable,
}
TASK_ARGUMENTS = {
    "load": 1,
    "reward": 2,
    "build_model": 1,
}  # how many each function takes


def load_task(path: str, needs: Sequence[str] = ("load", "reward")) -> ModuleType:
    """Imports a task file.

    Raises BadInput if the file is missing or does not import, or if one of the functions that
    it `needs` is missing or takes another number of arguments."""
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
    with refusing(
        f"--task {path}: TOOLS or INTERACTIONS holds something else (a function needs "
        "type hints and a Google-style docstring)"
    ):
        task_tools(module)
        task_interaction(module, {})
    for name in needs:
        function = getattr(module, name, None)
        need(
            callable(function),
            f"--task {path} has no function {name}: a task file defines load(split), "
            "reward(output, row) and, unless --model gives the model, build_model(path)",
        )
        n_arguments = TASK_ARGUMENTS[name]
        with refusing(f"--task {path}: {name} must take {n_arguments} argument(s)"):
            inspect.signature(function).bind(*range(n_arguments))
    return module


def load_rows(
    task: ModuleType,
    split: str,
    files: list[str] | None = None,
    prompt_key: str = "prompt",
) -> Sequence[dict]:
    """Returns the rows of a split ("train" or "val"), checked, with verl's columns.

    files: read these in place of the task's `load`. Rows that `read_files` leaves on disk come
    as Rows, and are checked when they are asked for. All others come as a list.
    prompt_key: the column with the prompt, a chat or a text, which becomes a user's message.

    The task's SYSTEM_PROMPT is put before every prompt without a system message. Where a row
    has a column `images`, its prompt has a placeholder for each: a part {"type": "image"} of a
    message's content, or "<image>" in its text. Raises BadInput if there are no rows, or if a
    row's prompt is neither a chat nor a text, or doesn't match its images."""
    source = ", ".join(files) if files else f"load({split!r})"
    with refusing(f"{source} does not give a list of rows"):
        rows = read_files(files) if files else list(task.load(split))
    need(rows, f"{source} has no rows")
    on_disk = not isinstance(rows, list)
    system_prompt = getattr(task, "SYSTEM_PROMPT", None)

    def checked(number: int) -> dict:
        """Returns the row of this number, with the system prompt before its prompt."""
        row = rows[number]
        if on_disk:
            (row,) = row.to_pylist()
        row = check_row(row, prompt_key, number, f"row {number} of {source}")
        prompt = row["prompt"]
        if system_prompt and (not prompt or prompt[0]["role"] != "system"):
            prompt.insert(0, {"role": "system", "content": system_prompt})
        return row

    if on_disk:
        return Rows(checked, range(len(rows)))
    return [checked(number) for number in range(len(rows))]


def demonstrated(rows: Sequence[dict], alone: bool) -> Sequence[dict]:
    """Returns the rows, or with `alone` only those that have a demonstration.

    Raises BadInput if no row has one."""
    numbers = [number for number, row in enumerate(rows) if row.get("demonstration")]
    need(
        numbers, "--algo sft, --imitation_steps: no training row has a 'demonstration'"
    )
    return Rows(rows.__getitem__, numbers) if alone else rows


def filter_overlong(
    rows: Sequence[dict], tokenizer, task, args, processor=None
) -> Sequence[dict]:
    """Returns the rows whose rendered prompts have at most args.max_prompt_tokens tokens.

    It also checks the rows (`_prompt_length`) and the tokenizer (`check_tokenizer`). The main
    rank does this for all ranks. Of more than MAX_ROWS_CHECKED_AT_START rows it looks only at
    the first thousand that will be drawn; the returned Rows then replace an overlong row by the
    next one that fits. Raises BadInput if no row is left."""
    templates = with_template_variables(tokenizer, args.chat_template_args)
    limit = args.max_prompt_tokens
    n_rows = len(rows)
    is_sample = n_rows > tables.MAX_ROWS_CHECKED_AT_START
    numbers = range(n_rows)
    if is_sample:
        numbers = prompt_order(n_rows, 0, 1000, args.seed)

    def length(number: int) -> int:
        return _prompt_length(
            rows[number], f"row {number}", templates, task, args, processor
        )

    def measure() -> np.ndarray:
        return np.array([length(number) for number in Bar(numbers, "prompts")])

    lengths = on_main(measure)  # (rows looked at,)
    on_main(check_tokenizer, tokenizer, templates, rows[numbers[0]], task)
    too_long = lengths > limit
    need(
        not too_long.all(),
        f"no prompt left: all {len(lengths)} are longer than --max_prompt_tokens {limit}; "
        f"raise it (the longest has {max(lengths)} tokens)",
    )

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


def _prompt_length(
    row: dict,
    name: str,
    templates,
    task,
    args,
    processor,
) -> int:
    """Returns the number of tokens of a row's rendered prompt, with its images and its hint.

    Raises BadInput, in which `name` is the row's name, if its agent loop, a tool or its
    interaction is unknown, or if its images can't be read, are more than args.max_images, or
    meet a text model (no processor)."""
    images = row.get("images") or []
    need(
        len(images) <= args.max_images,
        f"{name}: {len(images)} images are more than max_images {args.max_images}, which "
        "--agent_args can raise",
    )
    with refusing(name):
        agent_loop_class(row, task, args)
        interaction = task_interaction(task, row_kwargs(row, "interaction_kwargs"))
        need(
            row["prompt"] or interaction,
            f"{name}: its prompt is empty, and no Interaction speaks first",
        )
        prompt = told_prompt(row, args.hints)
        ids = render(templates, prompt, tool_schemas(row, task))
        opened = [open_image(image) for image in images]
        return len(expand(ids, opened, processor))


def prompt_order(
    n_rows: int,
    start: int,
    count: int,
    seed: int,
) -> list[int]:
    """Returns the row numbers at positions start .. start + count - 1 of an endless shuffle.

    Every epoch of n_rows positions is a new permutation. It depends on the seed and the
    position alone, so a resumed run needs no sampler state."""
    numbers = []
    for position in range(start, start + count):
        epoch, place = divmod(position, n_rows)
        numbers.append(int(_permutation(n_rows, epoch, seed)[place]))
    return numbers


# Cached, because one position is asked for at a time, and a million rows take 30 ms.
@functools.lru_cache(maxsize=4)
def _permutation(n_rows: int, epoch: int, seed: int) -> np.ndarray:
    """Returns the numbers of all rows, in an epoch's random order."""
    return np.random.default_rng((seed, epoch)).permutation(n_rows)


# ---------------------------------------------------------------- batches


@dataclass
class Units:
    """The N units of a batch. The outputs of a unit share one reward and together weigh one.

    A unit consists of a rollout's outputs with the same `unit`: see AgentLoopOutput."""

    outcomes: Tensor  # (N,) the terminal reward, that of the unit's last output
    turn_rewards: Tensor  # (N,) the sum of the turn rewards of all its outputs
    groups: Tensor  # (N,) a label; units with the same one are compared with each other
    prompts: Tensor  # (N,) the number of the unit's prompt
    response_lengths: Tensor  # (N,) response tokens of all its outputs, also of tools
    names: list[str]  # N names, as the agent loop calls the units
    index: Tensor  # (B,) the unit of each output

    @property
    def rewards(self) -> Tensor:
        """The total rewards, (N,), as the task gave them."""
        return self.outcomes + self.turn_rewards


def unit_of(output: AgentLoopOutput) -> tuple:
    """Returns the key that outputs of one unit share: prompt, sample and the unit's name."""
    return output.extra["prompt"], output.extra["sample"], output.unit


def _group_label(output):
    """Returns the label of an output's group, an integer. By default it is the prompt's number:
    then all rollouts of a prompt are compared."""
    name = output.group or output.unit
    prompt = output.extra["prompt"]
    return hash((prompt, name)) if name else prompt


def last_outputs(outputs: Outputs) -> Outputs:
    """Returns the last output of each unit, in the order of the units' first outputs."""
    last = {}
    for output in outputs:
        last[unit_of(output)] = output
    return list(last.values())


def by_unit(outputs: Outputs) -> Units:
    """Returns the Units of some outputs.

    The outputs must be sorted by extra["prompt"], ["sample"] and ["segment"]. A reward that is
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
        # Not in torch's default type, which user code may have changed.
        outcomes=torch.tensor(
            [outcome(output) for output in last], dtype=torch.float32
        ),
        turn_rewards=torch.tensor(turn_rewards, dtype=torch.float32),
        groups=torch.tensor([_group_label(output) for output in last]),
        prompts=torch.tensor([output.extra["prompt"] for output in last]),
        response_lengths=torch.tensor(response_lengths),
        names=[output.unit for output in last],
        index=torch.tensor(index),
    )


def groups_with_signal(units: Units, values: Tensor) -> set[int]:
    """Returns the groups in which a value, (N,), differs between units: there is something to
    learn."""
    values_of_group = defaultdict(set)
    for group, value in zip(units.groups.tolist(), values.tolist()):
        values_of_group[group].add(value)
    return {group for group, values in values_of_group.items() if len(values) > 1}


def collate(outputs: Outputs, image_token_id: int = -1) -> dict:
    """Returns one or more outputs as a dict of right-padded tensors.

    For B outputs, T tokens of the longest response, L tokens of the longest sequence (prompt
    and response):
        input_ids          (B, L) the sequences, padded with 0
        lengths            (B,) their tokens; likewise prompt_lengths and response_lengths
        response_mask      (B, T) float, 1 where the policy sampled the token
        imitation_mask     (B, T) float, 1 in a demonstration; only if there are any
        logprobs_rollout   (B, T) float32, the engine's, 0 where nothing was sampled
        versions           (B, T) long, of the weights that sampled the token, else -1
        truncated          (B,) bool, True if a length or turn limit cut the output off
    If there are images:
        images             B lists of PIL images, in which equal images are one object; the only
                           entry that is no tensor
        prefix_ids         (B, L) input_ids in which placeholders (image_token_id) tell images
                           apart: see `same_images`. Without an image_token_id a row with images
                           shares no prefix
    If an output has extra["told_prompt_ids"] (--hints):
        told               a dict like this one, for the same outputs with these prompts"""

    def padded(rows, dtype=np.int64, padding=0):
        rows = [
            torch.from_numpy(np.fromiter(row, dtype)) for row in rows
        ]  # fast for lists
        return pad_sequence(rows, batch_first=True, padding_value=padding)

    mask = padded([output.response_mask for output in outputs], np.float32)
    versions = padded([output.response_versions for output in outputs], padding=-1)
    imitation_mask = mask.masked_fill(versions >= 0, 0)
    prompt_lengths = torch.tensor([len(output.prompt_ids) for output in outputs])
    response_lengths = torch.tensor([len(output.response_ids) for output in outputs])
    tensors = {
        "input_ids": padded(
            [output.prompt_ids + output.response_ids for output in outputs]
        ),
        "lengths": prompt_lengths + response_lengths,
        "prompt_lengths": prompt_lengths,
        "response_lengths": response_lengths,
        "response_mask": mask - imitation_mask,
        "logprobs_rollout": padded(
            [output.response_logprobs for output in outputs], np.float32
        ),
        "versions": versions,
        "truncated": torch.tensor([output.truncated for output in outputs]),
    }
    if imitation_mask.any():
        tensors["imitation_mask"] = imitation_mask
    images = [output.images for output in outputs]
    if any(images):
        tensors |= same_images(tensors["input_ids"], images, image_token_id)
    told = told_outputs(outputs)
    if told:
        tensors["told"] = collate(told, image_token_id)
    return tensors


class Batch(dict):
    """The outputs of a step, their tensors and their units, which always belong together.

    As a dict it holds the tensors by name: those of `collate`, and those that the step adds,
    such as batch["advantages"]. Row b of each (B, ...) tensor belongs to outputs[b].

    outputs: B of them. units: their N units (`by_unit`).
    rewards: (N, S) the shaped rewards where they fall, which train.set_rewards sets."""

    rewards: Tensor

    def __init__(self, outputs: Outputs, tensors: dict):
        super().__init__(tensors)
        self.outputs = outputs
        self.units = by_unit(outputs)

    @functools.cached_property
    def layout(self) -> "EndToEnd":
        """The tokens of each unit laid end to end, by the response_mask of when it is first used."""
        return EndToEnd(self)

    def select(self, rows: list[int]) -> "Batch":
        """Returns the batch of these rows alone, with the rewards that the outputs have now."""
        return Batch([self.outputs[row] for row in rows], select(self, rows))

    @property
    def unit_rewards(self) -> Tensor:
        """The shaped reward of each unit, (N,)."""
        return self.rewards.double().sum(1).float()

    @property
    def n_sampled_units(self) -> int:
        """The number of units that are no demonstrations."""
        last = last_outputs(self.outputs)
        return sum("demonstration" not in output.extra for output in last)

    @property
    def unit_tokens(self) -> Tensor:
        """The number of mask-1 tokens of each row's unit, (B,)."""
        return losses.group_sum(self["response_mask"].sum(-1), self.units.index)


def make_batch(outputs: Outputs, processor=None) -> Batch:
    """Returns outputs as a Batch; their rewards may still be missing.

    processor: that of a model with vision."""
    image_token_id = getattr(processor, "image_token_id", -1)
    return Batch(outputs, collate(outputs, image_token_id))


def select(tensors: dict, rows: list[int]) -> dict:
    """Returns the tensors of these rows, trimmed to the longest sequence and response."""
    lengths = tensors["lengths"][rows].tolist()
    response_lengths = tensors["response_lengths"][rows].tolist()
    longest_sequence = max(lengths, default=0)
    longest_response = max(response_lengths, default=0)
    selected = {}
    for name, column in tensors.items():
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


class EndToEnd:
    """Lays the sampled tokens of each unit end to end, so that estimators see one sequence.

    (B, T) outputs x tokens  ->  (N, S) units x places.

    An empty place stands before every turn, so a run of places that are taken is a turn. An
    output whose prompt is the whole sequence of the unit's output before it continues the turn
    that was cut there.

    mask: (N, S) 1 where a place is taken by a sampled token."""

    def __init__(self, batch: Batch):
        self.sampled = batch["response_mask"].bool()  # (B, T)
        self.n_units = len(batch.units.outcomes)
        unit = batch.units.index[:, None].expand_as(self.sampled)
        column = self._columns(batch)
        # The unit and the place of the n sampled tokens, in the batch's order: (n,) each.
        self.places = unit[self.sampled], column[self.sampled]
        self.mask = self.lay(torch.ones_like(batch["response_mask"]))

    def _columns(self, batch):
        """Returns the place of each token in its unit, (B, T); only sampled tokens have one."""
        steps = self.sampled.long() + losses.turn_starts(self.sampled)
        columns = steps.cumsum(1) - 1  # (B, T), counted from the output's first place
        widths = steps.sum(1).tolist()
        first_columns = []
        ends = [0] * self.n_units
        cut_turns = {}  # unit -> its last output's sequence, if that ends in a sampled token
        for row, unit in enumerate(batch.units.index.tolist()):
            sequence = batch["input_ids"][row, : batch["lengths"][row]]
            prompt = sequence[: batch["prompt_lengths"][row]]
            sampled = self.sampled[row, : batch["response_lengths"][row]]

            cut_turn = cut_turns.pop(unit, None)
            continues = cut_turn is not None and torch.equal(prompt, cut_turn)
            if continues and sampled[:1].any():
                ends[unit] -= 1  # no empty place in the middle of a turn
            first_columns.append(ends[unit])
            ends[unit] += widths[row]
            if sampled[-1:].any():
                cut_turns[unit] = sequence
        return columns + torch.tensor(first_columns)[:, None]

    def lay(self, x: Tensor) -> Tensor:
        """Brings values of tokens (B, T) to their places (N, S); 0 where no token is."""
        return self.scatter(x[self.sampled])

    def scatter(self, values: Tensor) -> Tensor:
        """Brings the values of the n sampled tokens, (n,), to their places (N, S)."""
        _, column = self.places
        width = 1
        if len(column):
            width = column.max().item() + 1
        zeros = values.new_zeros(self.n_units, width)
        return zeros.index_put(self.places, values)

    def back(self, x: Tensor) -> Tensor:
        """Brings values of places (N, S) back to their tokens (B, T); 0 where nothing was
        sampled."""
        zeros = torch.zeros(self.sampled.shape, dtype=torch.float32)
        return zeros.masked_scatter(self.sampled, x[self.places].type_as(zeros))


def place_rewards(batch: Batch, outcomes: Tensor) -> Tensor:
    """Returns the rewards where they fall, (N, S): each row adds up to its unit's whole reward.

    outcomes (N,): the terminal rewards. Each falls on the last sampled token of its unit, and a
    turn reward on the token that it names, or else on the last sampled one before it, or else on
    the first of its output. Without a sampled token it falls on place 0 of the unit, which is
    always empty: an estimator that gives credit to tokens does not see it, the unit's sum has it.
    """
    layout = batch.layout
    rewards = torch.zeros_like(layout.mask)
    n_places = rewards.shape[1]

    # Turn rewards: (number of them,) each.
    row = []
    index = []
    value = []
    for number, output in enumerate(batch.outputs):
        for place, reward in output.turn_rewards:
            row.append(number)
            index.append(place)
            value.append(reward)
    if row:
        n_sampled = layout.sampled.cumsum(1, dtype=torch.int32)  # (B, T)
        n_before = n_sampled[row, index]
        n_of_row = n_sampled[:, -1]  # (B,)
        first_of_row = n_of_row.cumsum(0) - n_of_row  # (B,) counted over the batch
        token = first_of_row[row] + (n_before - 1).clamp(min=0)
        # One entry more, for the rows without a sampled token at the batch's end.
        columns = torch.cat([layout.places[1], torch.zeros(1, dtype=torch.long)])
        column = columns[token].where(n_of_row[row] > 0, 0)
        place = batch.units.index[row] * n_places + column
        rewards.view(-1).index_add_(0, place, torch.tensor(value, dtype=rewards.dtype))

    last_place = (layout.mask * torch.arange(n_places)).argmax(
        1
    )  # (N,), 0 without any token
    rewards[torch.arange(len(outcomes)), last_place] += outcomes
    return rewards


def turn_states(outputs: Outputs, turns: list[int]) -> Tensor:
    """Returns an integer for every sampled turn, unit by unit, (sum of turns,).

    turns: the number of turns of each unit. Two integers are equal where turns of one group met
    the same state. The states are the outputs' metrics["states"], one for each turn, compared by
    value; a task's reward function may set them. By default a turn's state is its index in its
    unit. Raises ValueError if there are more or fewer states than turns."""
    given = defaultdict(list)
    for output in outputs:
        given[unit_of(output)] += output.metrics.get("states", [])
    labels = []
    for output, n_turns in zip(last_outputs(outputs), turns, strict=True):
        if not n_turns:  # a demonstration
            continue
        states = given[unit_of(output)] or list(range(n_turns))
        states = tree_map(_array_value, states)
        if len(states) != n_turns:
            raise ValueError(
                f"metrics['states'] has {len(states)} states for {n_turns} turns"
            )
        group = _group_label(output)
        labels += [hash((group, repr(state))) for state in states]
    return torch.tensor(labels, dtype=torch.long)


def turns_of_units(batch: Batch) -> list[int]:
    """Returns the number of sampled turns of each unit."""
    return losses.turn_starts(batch.layout.mask).sum(1).tolist()


def _array_value(leaf):
    """Returns shape and bytes of an array or image: its repr may leave out most of it."""
    if isinstance(leaf, Tensor) or hasattr(leaf, "__array_interface__"):
        array = np.asarray(leaf)
        return array.shape, array.tobytes()
    return leaf


def total_rewards(outputs: Outputs) -> list[tuple[int, float]]:
    """Returns the prompt and the total reward of each unit, as the task gave it."""
    totals = []
    turn_rewards = defaultdict(float)
    for output in outputs:
        turn_rewards[unit_of(output)] += sum(reward for _, reward in output.turn_rewards)
    for output in last_outputs(outputs):
        reward = outcome(output) + turn_rewards[unit_of(output)]
        totals.append((output.extra["prompt"], reward))
    return totals


def count_globally(
    batch: dict,
    rows: list[int],
    with_imitation: bool,
) -> dict[str, float]:
    """Returns the counts of a mini-batch over all ranks: tokens, units, imitated tokens.

    The batch has unit_tokens (B,): the mask-1 tokens of each row's unit."""
    mask = batch["response_mask"][rows]
    n_imitated = 0
    if with_imitation:
        n_imitated = batch["imitation_mask"][rows].sum().item()
    return {
        "tokens": mask.sum().item(),
        "units": losses.count_sequences(mask, batch["unit_tokens"][rows]).item(),
        "imitated": n_imitated,
    }


# ---------------------------------------------------------------- packing
# No forward pass has padding, and no token goes through the network twice: a prefix that rows
# have in common is computed once. MicroBatch describes that. Then come the choice of rows for
# each micro-batch (micro_batches_of_this_rank) and the inputs of the network (pack_rows).


@dataclass
class MicroBatch:
    """Rows of a batch that go through the network together, in prefix order.

    In prefix order, rows with a common prefix are neighbours: the members of a group begin with
    their prompt, the forks of a rollout with its history. Each row then adds only the tokens
    that it does not share with the row before it:

        row   its tokens        length   shared   it adds
        5     the cat sat       3        0        the cat sat
        2     the cat ran off   4        2        ran off
        7     a dog             2        0        a dog

    rows: their numbers in the batch. lengths, shared: the table's columns.
    is_filler: True if it only makes up the number, because every rank needs as many
    micro-batches as the others. Its scores are dropped and its loss is multiplied by 0."""

    rows: list[int]
    lengths: list[int]
    shared: list[int]
    is_filler: bool = False

    def select(self, positions: list[int], is_filler: bool = False) -> "MicroBatch":
        """Returns a micro-batch of the rows at some positions of this one.

        Two rows share the minimum of what neighbours share on the way from one to the other."""
        positions = sorted(positions)
        shared = [0]
        for before, position in itertools.pairwise(positions):
            shared.append(min(self.shared[before + 1 : position + 1]))
        return MicroBatch(
            [self.rows[position] for position in positions],
            [self.lengths[position] for position in positions],
            shared,
            is_filler,
        )


def in_prefix_order(batch: dict, rows: Sequence[int]) -> MicroBatch:
    """Returns some rows of a batch in prefix order, as a single micro-batch."""
    ids = batch.get("prefix_ids", batch["input_ids"])[rows]  # (R, L)
    lengths = batch["lengths"][rows]  # (R,)
    tokens = ids.int().numpy()

    def as_bytes(
        i: int,
    ) -> bytes:  # any order of token ids will do, and bytes compare fast
        return tokens[i, : lengths[i]].tobytes()

    order = sorted(range(len(rows)), key=as_bytes)
    rows = [rows[i] for i in order]
    ids = ids[order]
    lengths = lengths[order]

    # Two rows share the tokens that are equal from the start to the end of the shorter one.
    ends = torch.minimum(lengths[1:], lengths[:-1])
    is_inside = torch.arange(ids.shape[1]) < ends[:, None]
    is_equal = (ids[1:] == ids[:-1]) & is_inside  # (R - 1, L)
    shared = is_equal.cumprod(1, dtype=torch.int32).sum(1)
    return MicroBatch(rows, lengths.tolist(), [0, *shared.tolist()])


def balance(lengths: list[int], n: int) -> list[list[int]]:
    """Deals the indices of some lengths to n shares of about equal total length.

    The longest comes first (the first of equal ones), each to the lightest share so far. With
    fewer indices than n some shares stay empty."""
    shares = [[] for _ in range(n)]
    totals = [0] * n
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    for i in longest_first:
        lightest = totals.index(min(totals))
        shares[lightest].append(i)
        totals[lightest] += lengths[i]
    return [sorted(share) for share in shares]


# A micro-batch in the making: the tokens that go through the network, and the positions of its
# rows in prefix order.
Filled = tuple[int, list[int]]


def _cut_into_runs(whole: MicroBatch, max_tokens: int) -> list[Filled]:
    """Cuts rows in prefix order into runs of neighbours that share prefixes.

    A token that is shared within a run counts once. A run has at most max_tokens tokens, or is a
    single row. A longer one is cut in its second half, where least is shared, so that no tiny
    run is left."""
    runs = []
    start = 0
    while start < len(whole.rows):
        sizes = [
            whole.lengths[start]
        ]  # tokens of the first row, of the first two rows, ...
        end = start + 1
        while end < len(whole.rows) and whole.shared[end] and sizes[-1] <= max_tokens:
            sizes.append(sizes[-1] + whole.lengths[end] - whole.shared[end])
            end += 1
        if sizes[-1] > max_tokens and len(sizes) > 1:
            middle = (start + end - 1) // 2
            end = min(range(end - 1, middle, -1), key=whole.shared.__getitem__)
        n_tokens = sizes[end - start - 1]
        runs.append((n_tokens, list(range(start, end))))
        start = end
    return runs


def _fill_packed(whole: MicroBatch, max_tokens: int) -> list[Filled]:
    """Puts rows, run by run, into micro-batches of at most max_tokens tokens.

    The longest run comes first, and each goes to the first micro-batch with room.
    max_tokens is at least the longest row."""
    runs = sorted(
        _cut_into_runs(whole, max_tokens), key=lambda run: run[0], reverse=True
    )
    positions = [[] for _ in runs]  # of each micro-batch; the last ones stay empty
    room = np.full(len(runs), max_tokens)
    for tokens, run in runs:
        first = np.argmax(room >= tokens)
        room[first] -= tokens
        positions[first] += run
    return [
        (max_tokens - left, filled) for left, filled in zip(room, positions) if filled
    ]


def _fill_padded(whole: MicroBatch, max_tokens: int) -> list[Filled]:
    """Puts rows into micro-batches of at most max_tokens tokens, each padded to its longest row.

    Rows of similar length come together. max_tokens is at least the longest row."""
    order = sorted(range(len(whole.rows)), key=whole.lengths.__getitem__, reverse=True)
    micros = []
    while order:
        longest = whole.lengths[order[0]]
        n_rows = max_tokens // longest
        taken = order[:n_rows]
        order = order[n_rows:]
        micros.append((len(taken) * longest, taken))
    return micros


def micro_batches_of_this_rank(
    batch: dict,
    rows: Sequence[int],
    max_tokens: int,
    packed: bool = True,
) -> list[MicroBatch]:
    """Cuts rows of the global batch into micro-batches, and returns those of this rank.

    A micro-batch has at most max_tokens tokens that go through the network (but at least one
    row): a prefix that its rows share counts once, or, not `packed`, padding counts, too. There
    are as few micro-batches as that allows, about equal in size, dealt evenly to the ranks. All
    ranks get the same number, because DDP counts backward passes: a rank with fewer gets
    fillers."""
    n_ranks = dist.get_world_size()
    whole = in_prefix_order(batch, rows)
    longest = max(whole.lengths)
    max_tokens = max(max_tokens, longest)
    fill = functools.partial(_fill_packed, whole)
    if not packed:
        whole.shared = [0] * len(whole.shared)
        fill = functools.partial(_fill_padded, whole)

    # Every rank computes as many as max_tokens makes necessary. The smallest budget that needs
    # no more fills them about equally.
    n_necessary = len(fill(max_tokens))
    at_most = math.ceil(n_necessary / n_ranks) * n_ranks

    def is_enough(budget: int) -> bool:
        return len(fill(budget)) <= at_most

    budget = bisect_left(range(max_tokens), True, longest, key=is_enough)
    micros = fill(budget)
    dealt = balance([tokens for tokens, _ in micros], n_ranks)
    mine = [whole.select(micros[k][1]) for k in dealt[dist.get_rank()]]
    n_fillers = max(map(len, dealt)) - len(mine)
    shortest = int(np.argmin(whole.lengths))
    return mine + [whole.select([shortest], is_filler=True)] * n_fillers


def pack(input_ids, lengths, starts=None) -> tuple[Tensor, Tensor, Tensor, int]:
    """Joins R sequences end to end, without padding.

    input_ids: (R, L) right-padded, or a list of R sequences. lengths (R,): where each ends.
    starts: R numbers of tokens to leave out at the start of each. S is the sum of lengths less
    starts. Returns input_ids and position_ids (1, S), which count from 0 (or its start) in each
    sequence; cu_seqlens (R + 1,) int32, where the packed sequences begin and end; max_seqlen,
    the largest of lengths."""
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
    """Packs the tokens that each row of a micro-batch adds.

    ids (R, L): the rows' token ids. Returns a model's inputs, see `pack_rows`, and the place of
    each row's tokens among the packed ones, (R, L):

        row   its tokens        it adds         places of its tokens
        5     the cat sat       the cat sat     0 1 2
        2     the cat ran off   ran off         0 1 3 4
        7     a dog             a dog           5 6"""
    flat, position_ids, cu_seqlens, max_seqlen = pack(ids, micro.lengths, micro.shared)
    inputs = {
        "input_ids": flat,
        "position_ids": position_ids,
        "max_seqlen": max_seqlen,
        # `unique` leaves out a row that adds nothing because it equals another.
        "cu_seqlens": cu_seqlens.unique(),
    }

    added = torch.arange(flat.shape[1]).split(cu_seqlens.diff().tolist())
    places = []
    row_places = torch.arange(0)  # (length of the row,)
    for shared, new in zip(micro.shared, added):
        row_places = torch.cat([row_places[:shared], new])
        places.append(row_places)

    if any(micro.shared):
        # The tokens that a row adds attend to keys and values of all its tokens.
        attended = [row_places for row_places, new in zip(places, added) if len(new)]
        key_index, _, inputs["cu_seqlens_k"], _ = pack(
            attended, list(map(len, attended))
        )
        inputs["key_index"] = key_index[0]
    return inputs, pad_sequence(places, batch_first=True)


ID_LIMIT = 2**32  # all token ids and places are less


def pack_rows(
    batch: dict,
    micro: MicroBatch,
    device,
    packed: bool = True,
) -> dict:
    """Prepares the forward pass of a micro-batch, and maps sampled tokens to predictions.

    R rows have n sampled tokens, and S tokens go through the network: packed, a prefix that a
    row shares with the row before it counts once. A token's place is its position among these
    S, see the example of `_pack_forest`. Returns a dict:
        inputs    of the model. Packed: input_ids, position_ids (1, S), cu_seqlens and max_seqlen
                  as `pack` returns them, of the tokens that each row adds. If anything is shared,
                  also key_index (K,), the places of all tokens of each row, one row after the
                  other, and cu_seqlens_k, where these rows begin and end.
                  Not packed: input_ids (R, L), right-padded; a causal model needs no mask
        source    (M,) the places (not packed: counted row by row) of the tokens whose hidden
                  states predict sampled ones
        targets   (M,) the ids of the predicted tokens. No (source, target) comes twice: rows that
                  agree up to and including a sampled token share its prediction
        pair      (n,) the (source, target) of each sampled token
        at        its row in the micro-batch and its column: two of (n,)
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
    pairs = places[row, index - 1] * ID_LIMIT + ids[row, index]  # (n,)
    pairs, pair = pairs.unique(return_inverse=True)  # (M,), (n,)

    images = []
    if "images" in batch and any(batch["images"][row] for row in micro.rows):
        for i, number in enumerate(micro.rows):
            sequence = ids[i, : micro.lengths[i]]
            images.append((sequence, batch["images"][number], micro.shared[i]))
    result = {
        "inputs": inputs,
        "source": pairs // ID_LIMIT,
        "targets": pairs % ID_LIMIT,
        "pair": pair,
        "at": (row, column),
        "shape": mask.shape,
        "images": images,
    }
    return to_device(result, device)


def to_device(tensors, device):
    """Returns a tree of tensors, such as a dict, on the device.

    To a GPU they go through pinned memory, so the next micro-batch is packed while the GPU
    computes."""

    def copied(tensor):
        if "cuda" in str(device):
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return tree_map_only(Tensor, copied, tensors)
