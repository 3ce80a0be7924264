"""Tiny models for examples, tests and new tasks: made in seconds, and taught by demonstrations.

    build_from_demonstrations(path, task, rows)     from rows as --algo sft takes them
    build_warm_model(path, chats)                   from whole chats
    init_model(path)                                a random model

A task's build_model calls one of them: see docs/tutorial.md#a-model-for-a-new-task. All random
numbers come from the global generators, which train.py has seeded. train.py caches the models; an
edit of this file, or of the task's, builds them anew."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import get_json_schema

from agent_loop import AgentLoopOutput, LoopArgs, agent_loop_class, task_tools
from data import load_rows
from flatrl.bad_input import need, refusing
from flatrl.launch import Bar
from rollout import DemonstrationEngine

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Each fixed string of examples/calculator.py is one token. None spans the end of a message, so
# appended messages leave the tokens before them unchanged.
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


def fit(model, loss_of: Callable[[int], Tensor], n_batches: int):
    """Trains the model on loss_of(i), a scalar, for each i below n_batches, and shows progress.

    The learning rate rises for 20 batches; in the second half it falls to 0."""

    def factor(step: int) -> float:
        return min((step + 1) / 20, 1, 2 - 2 * step / n_batches)

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    started = time.monotonic()
    model.train()
    with Bar(None, "building the model", total=n_batches, unit="batch") as bar:
        for i in range(n_batches):
            loss_of(i).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            bar.update()
    model.eval()
    print(f"building the model: done in {time.monotonic() - started:.0f} s", flush=True)


def imitate(model, input_ids: Tensor, lengths: Tensor, mask: Tensor, batch_size: int):
    """Trains the model on the tokens of input_ids (N, T) whose mask (N, T) is 1.

    A row's tokens after its length (N,) are padding. Each row is seen once, in order; an incomplete
    last batch is left out."""
    labels = input_ids.masked_fill(mask == 0, -100)

    def loss_of(i: int) -> Tensor:
        rows = slice(i * batch_size, (i + 1) * batch_size)
        longest = int(lengths[rows].max())
        inputs = input_ids[rows, :longest]
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state  # (B, T, H)
        targets = labels[rows, 1:longest]  # (B, T - 1)
        # Logits are computed only where they count.
        counts = targets != -100
        logits = model.lm_head(hidden[:, :-1][counts])
        return F.cross_entropy(logits, targets[counts])

    fit(model, loss_of, max(1, len(input_ids) // batch_size))


def build_warm_model(
    path: str | Path,
    chats: list[list[dict]],
    tools: Sequence = (),
    batch_size: int = 32,
    pieces: Sequence[str] = (),
):
    """Writes a model that has learned the assistant's tokens in the chats to the folder `path`.

    Each chat is seen once, in order. tools: the functions that an agent loop will show in its
    prompts. pieces: texts that become one token each."""
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
    model.save_pretrained(path)


def build_from_demonstrations(
    path: str | Path,
    task,
    rows: list[dict],
    pieces: Sequence[str] = (),
    batch_size: int = 32,
):
    """Writes a model that has learned the rows' demonstrations to the folder `path`.

    task: the task's module, sys.modules[__name__] in its own file. rows: as --algo sft takes them.
    Each is played once, in order, by its own agent loop, so the model sees exactly the tokens of a
    run. pieces: texts that become one token each; the task's system prompt and the beginnings of
    its tools' calls always do. Raises BadInput for a row that can't be played."""
    system = getattr(task, "SYSTEM_PROMPT", None)
    rows = load_rows(SimpleNamespace(load=lambda split: rows, SYSTEM_PROMPT=system), "train")
    model, tokenizer = init_model(path, pieces=[*common_pieces(task), *pieces])
    sequences = []
    for row in rows:
        sequences += asyncio.run(play(row, task, tokenizer))
    lengths = torch.tensor([len(ids) for ids, _ in sequences])
    columns = []
    for column in zip(*sequences):
        columns.append(pad_sequence([*map(torch.tensor, column)], batch_first=True))
    ids, mask = columns
    imitate(model, ids, lengths, mask, batch_size)
    model.save_pretrained(path)


def common_pieces(task) -> list[str]:
    """Returns frequent texts of a task: its system prompt and how each tool's call begins."""
    system = getattr(task, "SYSTEM_PROMPT", None)
    pieces = [system] if system else []
    for name, tool in task_tools(task).items():
        pieces.append(name)
        parameters = tool.schema["function"].get("parameters", {})
        for argument in list(parameters.get("properties", ()))[:1]:
            pieces.append(f'<tool_call>\n{{"name": "{name}", "arguments": {{"{argument}": "')
    return pieces


async def play(row: dict, task, tokenizer) -> list[tuple]:
    """Plays a row's demonstration in its loop; returns (token ids, mask) of each output.

    Raises BadInput if the loop makes no output, or does not use the whole demonstration."""
    window = tokenizer.model_max_length
    args = LoopArgs(max_response_tokens=window, max_model_len=window, max_assistant_turns=0)
    turns = list(row.get("demonstration") or ())
    loop = agent_loop_class(row, task, args)(None, tokenizer, None, task, args)
    loop.engine = DemonstrationEngine(turns, loop, {tokenizer.eos_token_id})
    with refusing(f"the demonstration of row {row['index']} can't be played"):
        outputs = await loop.run({}, **row, step=0, rollout_n=0, validate=False)
    outputs = [outputs] if isinstance(outputs, AgentLoopOutput) else list(outputs)
    fits = not any(output.truncated for output in outputs)
    need(fits, f"row {row['index']}: this model's window, {window} tokens, ends its demonstration")
    is_played = not turns and any(1 in output.response_mask for output in outputs)
    need(is_played, f"row {row['index']}: its agent loop does not play all of a demonstration")
    sequences = []
    for output in outputs:
        mask = [0] * len(output.prompt_ids) + output.response_mask
        sequences.append((output.prompt_ids + output.response_ids, mask))
    return sequences
