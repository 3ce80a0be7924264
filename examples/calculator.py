r"""The default task: two-digit arithmetic with a calculator, and a tiny model to learn it on any machine.

    accelerate launch train.py                                    # this file is the default --task and builds the model
    accelerate launch train.py --model Qwen/Qwen2.5-0.5B-Instruct # same task, your model

A question is `What is 37*48?`. The policy may call `calculator` and must end with `<answer>1776</answer>`:

    system     Use the calculator. End with <answer>N</answer>.
    user       What is 37*48?
    assistant  <tool_call>\n{"name": "calculator", "arguments": {"expression": "37*48"}}\n</tool_call>
    tool       1776
    assistant  <answer>1776</answer>

A task file is a plain module with `load` and `reward`. The rest is optional: `TOOLS`, `SYSTEM_PROMPT` and
`build_model`, which train.py calls (and caches) when no --model is given. The built model has learned the tool but
not to rely on it: seeds 0-2 answer 0.58-0.60 of the held-out questions when taken greedily, and sampling calls the tool
in 4 trajectories of 10, of which 0.98 end in the right answer; a guess never does. The rest is for RL to find. Building
takes 27 s on two threads, 43 s on one. A trajectory has 21 prompt tokens, and 25 more with a call, 5 with a guess.
"""

import ast
import operator
import random
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import get_json_schema

# ---------------------------------------------------------------------------------------------------------------------
# Rows: what to ask. Train and val are cut from one fixed shuffle of all questions, so they never share one.


SYSTEM_PROMPT = "Use the calculator. End with <answer>N</answer>."  # train.py puts it before every prompt


def load(split: str) -> list[dict]:
    """Rows with verl's columns. "val" is 512 held-out questions, "train" 8,192 others; the same on every call."""
    pairs = [(a, b, op) for a in range(10, 100) for b in range(10, 100) for op in "+-*"]  # 24,300
    random.Random(0).shuffle(pairs)  # an RNG of its own: --seed changes the order of training, never the split
    questions = {"train": pairs[512 : 512 + 8192], "val": pairs[:512]}[split]
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {a}{op}{b}?"}],
            "data_source": "calculator",
            "reward_model": {"ground_truth": str(OPERATORS[op](a, b))},
            "extra_info": {"index": i},
        }
        for i, (a, b, op) in enumerate(questions)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Tool: a typed Python function whose docstring becomes the schema. What it raises, the model reads.

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}
MAX_CHARS, MAX_VALUE, MAX_EXPONENT = 100, 10**50, 200  # bounds on the work that a sampled expression can cause


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers, parentheses and the operators + - * / // % **, for example "37*48".
    """
    expression = expression.strip()
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression is longer than {MAX_CHARS} characters")
    if not re.fullmatch(r"[0-9 .+\-*/%()]+", expression):  # no letters: nothing but arithmetic can be parsed
        raise ValueError("the expression may hold only numbers, parentheses and + - * / // % **")
    try:
        value = _evaluate(ast.parse(expression, mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError):  # the last two: nested deeper than the parser goes
        raise ValueError(f"not an arithmetic expression: {expression}") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the result is too large") from None
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _evaluate(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        value = UNARY[type(node.op)](_evaluate(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > MAX_EXPONENT:  # before computing it: 9**9**9 takes minutes
            raise ValueError(f"the exponent is larger than {MAX_EXPONENT}")
        value = BINARY[type(node.op)](left, right)
    else:
        raise SyntaxError
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if not abs(value) <= MAX_VALUE:
        raise ValueError("the result is too large")
    return value


TOOLS = [calculator]

# ---------------------------------------------------------------------------------------------------------------------
# Reward


def reward(output, row: dict) -> float:
    """1.0 if the last message is the assistant's and holds one answer, the right integer; else 0.0."""
    last = output.messages[-1] if output.messages else {}
    answers = re.findall(r"<answer>(.*?)</answer>", last.get("content") or "", re.DOTALL)
    # Exactly one: a list of guesses must not pay. The length bound keeps int() off a runaway row of digits.
    if last.get("role") != "assistant" or len(answers) != 1 or not re.fullmatch(r"\s*-?[0-9]{1,30}\s*", answers[0]):
        return 0.0
    return float(int(answers[0]) == int(row["reward_model"]["ground_truth"]))


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer: one token per byte, so any text round trips, plus one per fixed string of this task, so a trajectory has
# 30-60 tokens. No token reaches over the end of a message: appended messages leave the tokens before them as they are.

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PIECES = [
    SYSTEM_PROMPT,
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

# Qwen2.5's template, but tools are only named: copying is not learned in seconds behind a preamble of 200 tokens.
# What {% generation %} encloses is the assistant's own: the warm-up trains on that and nothing else.
CHAT_TEMPLATE = """
{%- set system = messages and messages[0].role == 'system' %}
{%- if system or tools %}
    {{- '<|im_start|>system\n' }}
    {%- if system %}{{- messages[0].content }}{%- endif %}
    {%- if system and tools %}{{- '\n' }}{%- endif %}
    {%- if tools %}
        {{- 'Tools: ' }}
        {%- for tool in tools %}{{- tool.function.name ~ (', ' if not loop.last else '') }}{%- endfor %}
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
                {%- set arguments = call.arguments if call.arguments is string else call.arguments | tojson %}
                {{- '\n' if message.content or not loop.first }}
                {{- '<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' ~ arguments ~ '}\n</tool_call>' }}
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

# ---------------------------------------------------------------------------------------------------------------------
# Model: tiny, and warmed up only halfway. train.py has seeded the global RNGs, which everything here draws from.


def init_model(path: str | Path, tie_word_embeddings: bool = True, **config_overrides):
    """Write the tokenizer and a randomly initialised Qwen2 (0.48M parameters) to the folder `path`; return both."""
    vocab = {token: i for i, token in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))  # no merges: a byte is a token, and so is a digit
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    # Not special, so that decoding keeps them: the tool parser and the reward read them in the text.
    backend.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in PIECES])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE.strip(),
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    config = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        # Copying is attention to an exact place. It is learned several times faster from weights larger than the
        # usual 0.02, and with positions that turn faster than a long-context model's.
        "initializer_range": 0.1,
        "rope_theta": 100.0,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**(config | config_overrides)))
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**ids)
    tokenizer.save_pretrained(path)
    model.save_pretrained(path)
    return model, tokenizer


def demonstration(row: dict) -> list[dict]:
    """One conversation by an imperfect teacher: a guess on about half of the questions, the tool on the others."""
    expression = re.search(r"[0-9]+\D[0-9]+", row["prompt"][0]["content"]).group()
    answer = row["reward_model"]["ground_truth"]
    prompt = [{"role": "system", "content": SYSTEM_PROMPT}, *row["prompt"]]
    # The teacher is overconfident: when the first number is below 50 it mostly guesses, else it mostly calls. So the
    # greedy model guesses on four questions of nine whatever the seed, while sampling tries both on every question:
    # there is something to find, and each group of samples can find it.
    if random.random() < (0.7 if int(expression[:2]) < 50 else 0.3):
        guess = re.match("[0-9]+", expression).group()  # the first number: wrong, and no noise to learn by heart
        return prompt + [{"role": "assistant", "content": f"<answer>{guess}</answer>"}]
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
    return prompt + [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": calculator(expression)},
        {"role": "assistant", "content": f"<answer>{answer}</answer>"},
    ]


def warm_up(
    model, tokenizer, num_batches: int = 600, batch_size: int = 32, lr: float = 3e-3, chats=None, tools=TOOLS
) -> None:
    """Supervised learning on `chats`; the loss is on the assistant's tokens only.

    By default they are fresh demonstrations of training questions, `num_batches` of them."""
    chats = chats or [demonstration(row) for row in random.choices(load("train"), k=num_batches * batch_size)]
    num_batches = len(chats) // batch_size
    batch = tokenizer.apply_chat_template(
        chats,
        tools=[get_json_schema(tool) for tool in tools] or None,  # the prompt must be what the agent loop will render
        return_assistant_tokens_mask=True,
        return_dict=True,
        return_tensors="pt",
        padding=True,
        padding_side="right",  # behind the last token, where causal attention needs no mask
    )
    lengths = batch["attention_mask"].sum(1)  # (N,)
    input_ids = batch["input_ids"]  # (N, T)
    labels = input_ids.masked_fill(torch.as_tensor(batch["assistant_masks"]) == 0, -100)

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    # 20 batches up, the second half down to 0.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / 20, 1, 2 - 2 * i / num_batches))
    model.train()
    for i in tqdm(range(0, len(chats), batch_size), "building the model", leave=False, disable=None):
        part, longest = slice(i, i + batch_size), int(lengths[i : i + batch_size].max())
        hidden = model.model(input_ids=input_ids[part, :longest], use_cache=False).last_hidden_state  # (B, T, H)
        targets = labels[part, 1:longest]  # (B, T - 1)
        own = targets != -100
        loss = F.cross_entropy(model.lm_head(hidden[:, :-1][own]), targets[own])  # logits only where they count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def build_model(path: str | Path) -> None:
    """Write the default model to the folder `path`."""
    model, tokenizer = init_model(path)
    warm_up(model, tokenizer)
    model.eval().save_pretrained(path)
