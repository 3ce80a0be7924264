"""Tiny models for examples, tests and new tasks: made in seconds, and taught by demonstrations.

    build_from_demonstrations(path, task, rows)     from rows as --algo sft takes them
    build_warm_model(path, chats)                   from whole chats
    init_model(path)                                a random model

A task's build_model calls one of them: see docs/tutorial.md#a-model-for-a-new-task. All random
numbers come from the global generators, which train.py has seeded. train.py caches the models; an
edit of this file, or of the task's, builds them anew."""

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import get_json_schema

from agent_loop import (
    AgentLoopOutput,
    BadInput,
    LoopArgs,
    agent_loop_class,
    task_tools,
)
from data import load_rows
from rollout import Demonstration

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Each fixed string of examples/calculator.py is one token, so that a trajectory has 30-60. None
# spans the end of a message, so appended messages leave the tokens before them unchanged.
PIECES = [
    "Use the calculator. End with <answer>N</answer>.",
    "system\n",
    "user\n",
    "assistant\n",
    "Tools: ",
    "calculator",
    "What is ",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "',
    '"}}\n</tool_call>',
    "<tool_response>\n",
    "\n</tool_response>",
    "<answer>",
    "</answer>",
]

# Qwen2.5's template, but tools are only named: after a preamble of 200 tokens, copying is not
# learned in seconds. {% generation %} encloses the assistant's own tokens, which alone the warm-up
# trains on.
CHAT_TEMPLATE = """
{%- set system = messages and messages[0].role == 'system' %}
{%- if system or tools %}
    {{- '<|im_start|>system\n' }}
    {%- if system %}{{- messages[0].content }}{%- endif %}
    {%- if system and tools %}{{- '\n' }}{%- endif %}
    {%- if tools %}
        {{- 'Tools: ' }}
        {%- for tool in tools %}
            {{- tool.function.name ~ (', ' if not loop.last else '') }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
            {{- message.content or '' }}
            {%- for call in message.tool_calls or [] %}
                {%- set call = call.function or call %}
                {%- set arguments = call.arguments %}
                {%- set arguments = arguments if arguments is string else arguments | tojson %}
                {{- '\n' if message.content or not loop.first }}
                {{- '<tool_call>\n{"name": "' ~ call.name }}
                {{- '", "arguments": ' ~ arguments ~ '}\n</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


def make_tokenizer(pieces: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a token for every byte, and one for each of PIECES and `pieces`.

    Encoding and decoding restores any text."""
    tokens = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    backend.add_special_tokens(special)
    # Pieces are not special, so that decoding keeps them for the tool parser and the reward.
    pieces = dict.fromkeys([*PIECES, *pieces])
    backend.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in pieces])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE.strip(),
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def init_model(
    path: str | Path,
    tie_word_embeddings: bool = True,
    pieces: Sequence[str] = (),
    **config_overrides,
) -> tuple:
    """Writes a random Qwen2 (0.48M parameters) and its tokenizer to the folder `path`.

    Returns (model, tokenizer). pieces: more texts that become one token each. config_overrides:
    fields of Qwen2Config."""
    tokenizer = make_tokenizer(pieces)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        # Copying is attention to an exact place. It is learned several times faster with weights
        # larger than the usual 0.02, and with positions that rotate faster than a long-context
        # model's.
        "initializer_range": 0.1,
        "rope_theta": 100.0,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": None,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**(config | ends | config_overrides)))
    model.generation_config = GenerationConfig(**ends)
    tokenizer.save_pretrained(path)
    model.save_pretrained(path)
    return model, tokenizer


def imitate(model, input_ids: Tensor, lengths: Tensor, mask: Tensor, batch_size: int):
    """Trains the model on the tokens of input_ids (N, T) whose mask (N, T) is 1.

    A row's tokens after its length (N,) are padding. Each row is seen once, in order."""
    n_batches = max(1, len(input_ids) // batch_size)
    labels = input_ids.masked_fill(mask == 0, -100)

    def learning_rate(step: int) -> float:
        """Returns the factor of lr: it rises for 20 batches; its second half falls to 0."""
        return min((step + 1) / 20, 1, 2 - 2 * step / n_batches)

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    model.train()
    starts = range(0, len(input_ids), batch_size)
    for start in told(starts, "building the model"):
        rows = slice(start, start + batch_size)
        longest = int(lengths[rows].max())
        inputs = input_ids[rows, :longest]
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state  # (B, T, H)
        targets = labels[rows, 1:longest]  # (B, T - 1)
        # Logits are computed only where they count.
        counts = targets != -100
        loss = F.cross_entropy(model.lm_head(hidden[:, :-1][counts]), targets[counts])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def told(items: Sequence, title: str, seconds: float = 10.0) -> Iterator:
    """Yields the items under a progress bar, and prints at the end how long they took.

    Without a terminal, it prints every few seconds how long the others will take. The first item is
    not counted: libraries load what they need, which takes seconds."""
    start = time.monotonic()
    # Some terminals report 0 rows, and tqdm would then draw nothing.
    bar = tqdm(items, title, leave=False, disable=None, nrows=20)
    for n, item in enumerate(bar, 1):
        yield item
        now = time.monotonic()
        if n == 1:
            first = last = now
        elif now - last >= seconds and not sys.stderr.isatty():
            left = (now - first) / (n - 1) * (len(items) - n)
            print(f"{title}: {n} of {len(items)}, about {left:.0f} s left", flush=True)
            last = now
    print(f"{title}: done in {time.monotonic() - start:.0f} s", flush=True)


def build_warm_model(
    path: str | Path,
    chats: list[list[dict]],
    tools: Sequence = (),
    batch_size: int = 32,
    pieces: Sequence[str] = (),
):
    """Writes a model that has learned the assistant's tokens in the chats to the folder `path`.

    Each chat is seen once, in order. tools: the functions that an agent loop will show to the model
    in its prompts. pieces: texts that become one token each."""
    model, tokenizer = init_model(path, pieces=pieces)
    batch = tokenizer.apply_chat_template(
        chats,
        tools=[get_json_schema(tool) for tool in tools] or None,
        return_assistant_tokens_mask=True,
        return_dict=True,
        return_tensors="pt",
        # With padding at the end, causal attention needs no mask.
        padding=True,
        padding_side="right",
    )
    lengths = batch["attention_mask"].sum(1)
    mask = torch.as_tensor(batch["assistant_masks"])
    imitate(model, batch["input_ids"], lengths, mask, batch_size)
    model.eval().save_pretrained(path)


def build_from_demonstrations(
    path: str | Path,
    task,
    rows: list[dict],
    pieces: Sequence[str] = (),
    batch_size: int = 32,
):
    """Writes a model that has learned the rows' demonstrations to the folder `path`.

    task: the task's module, sys.modules[__name__] in its own file. rows: as --algo sft takes them,
    with a column `demonstration`. Each is played once, in order, by its own agent loop, with the
    task's tools and simulated users, so the model sees exactly the tokens of a run. pieces: texts
    that become one token each; the task's system prompt and the beginnings of its tools' calls
    always do.

    Raises BadInput for a row that has no demonstration, or one that can't be played."""
    system = getattr(task, "SYSTEM_PROMPT", None)
    rows = load_rows(SimpleNamespace(load=lambda split: rows, SYSTEM_PROMPT=system), "train")
    model, tokenizer = init_model(path, pieces=[*common_pieces(task), *pieces])
    sequences = asyncio.run(play_all(rows, task, tokenizer))
    lengths = torch.tensor([len(ids) for ids, _ in sequences])
    ids = pad_sequence([torch.tensor(ids) for ids, _ in sequences], batch_first=True)
    mask = pad_sequence([torch.tensor(mask) for _, mask in sequences], batch_first=True)
    imitate(model, ids, lengths, mask, batch_size)
    model.eval().save_pretrained(path)


def common_pieces(task) -> list[str]:
    """Returns frequent texts of a task: its system prompt and how each tool's call begins."""
    pieces = [task.SYSTEM_PROMPT] if getattr(task, "SYSTEM_PROMPT", None) else []
    for name, tool in task_tools(task).items():
        pieces.append(name)
        for argument in tool.schema["function"].get("parameters", {}).get("properties", ()):
            pieces.append(f'<tool_call>\n{{"name": "{name}", "arguments": {{"{argument}": "')
            break
    return pieces


async def play_all(rows: list[dict], task, tokenizer) -> list[tuple]:
    """Returns the sequences that `play` returns, of all rows in order."""
    sequences = []
    for row in told(rows, "playing the demonstrations"):
        sequences += await play(row, task, tokenizer)
    return sequences


async def play(row: dict, task, tokenizer) -> list[tuple]:
    """Plays a row's demonstration in its loop; returns (token ids, mask) of each output.

    Raises BadInput if the loop makes no output, or does not use the whole demonstration."""
    window = tokenizer.model_max_length
    args = LoopArgs(max_response_tokens=window, max_model_len=window, max_assistant_turns=0)
    turns = list(row.get("demonstration") or ())
    loop = agent_loop_class(row, task, args)(None, tokenizer, None, task, args)
    loop.engine = Demonstration(turns, loop, {tokenizer.eos_token_id})
    try:
        outputs = await loop.run({}, **row, step=0, rollout_n=0, validate=False)
    except Exception as error:
        raise BadInput(
            f"the demonstration of row {row['index']} can't be played: {error}"
        ) from error
    outputs = [outputs] if isinstance(outputs, AgentLoopOutput) else list(outputs)
    if turns or not any(1 in output.response_mask for output in outputs):
        raise BadInput(
            f"row {row['index']}: its agent loop ends with {len(turns)} turns of its "
            "demonstration left, or it has none"
        )
    sequences = []
    for output in outputs:
        ids = output.prompt_ids + output.response_ids
        sequences.append((ids, [0] * len(output.prompt_ids) + output.response_mask))
    return sequences
