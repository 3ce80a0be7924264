"""The default task: two-digit arithmetic with a calculator, and a tiny model to learn it.

    accelerate launch train.py                      # this file is the default --task
    accelerate launch train.py --model Qwen/Qwen2.5-0.5B-Instruct

The first command builds the tiny model, on any machine; the second trains a model of yours.

A question is `What is 37*48?`. The policy may call `calculator` and must end with
`<answer>1776</answer>`:

    system     Use the calculator. End with <answer>N</answer>.
    user       What is 37*48?
    assistant  <tool_call>
               {"name": "calculator", "arguments": {"expression": "37*48"}}
               </tool_call>
    tool       1776
    assistant  <answer>1776</answer>

`train.py` needs `load` and `reward`. `TOOLS`, `SYSTEM_PROMPT` and `build_model` are optional.

The built model has learned to use the tool, but not to rely on it: it guesses on four of nine
questions when greedy, and on six of ten when it samples. A guess is never right."""

import ast
import itertools
import operator
import random
import re
from pathlib import Path

from examples.tiny_models import build_warm_model

# ---------------------------------------------------------------- rows

# train.py puts it before every prompt.
SYSTEM_PROMPT = "Use the calculator. End with <answer>N</answer>."


def load(split: str) -> list[dict]:
    """Returns rows with verl's columns, the same on every call.

    "val" has 512 held-out questions, "train" 8,192 others."""
    numbers = range(10, 100)
    questions = list(itertools.product(numbers, numbers, OPERATORS))  # 24,300
    # A fixed seed: --seed changes the order of training, never the split.
    random.Random(0).shuffle(questions)
    questions = {"train": questions[512 : 512 + 8192], "val": questions[:512]}[split]
    rows = []
    for i, (a, b, sign) in enumerate(questions):
        row = {
            "prompt": [{"role": "user", "content": f"What is {a}{sign}{b}?"}],
            "data_source": "calculator",
            "reward_model": {"ground_truth": str(OPERATORS[sign](a, b))},
            "extra_info": {"index": i},
        }
        rows.append(row)
    return rows


# ---------------------------------------------------------------- tool
# A typed Python function, whose docstring becomes the schema. The model reads its errors.

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
# Bounds on the work that a sampled expression can cause.
MAX_CHARS = 100
MAX_VALUE = 10**50
MAX_EXPONENT = 200


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers, parentheses and the operators + - * / // % **, for example "37*48".
    """
    expression = expression.strip()
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression is longer than {MAX_CHARS} characters")
    # Without letters nothing but arithmetic can be parsed.
    if not re.fullmatch(r"[0-9 .+\-*/%()]+", expression):
        raise ValueError("the expression may hold only numbers, parentheses and + - * / // % **")
    try:
        value = _evaluate(ast.parse(expression, mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError):  # the last two if nested too deeply
        raise ValueError(f"not an arithmetic expression: {expression}") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the result is too large") from None
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _evaluate(node: ast.expr) -> int | float:
    """Returns the value of a parsed expression.

    Raises SyntaxError if it is no arithmetic, ValueError if a number is too large or not real."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        value = UNARY[type(node.op)](_evaluate(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        left = _evaluate(node.left)
        right = _evaluate(node.right)
        # Checked before the power is computed: 9**9**9 takes minutes.
        if isinstance(node.op, ast.Pow) and abs(right) > MAX_EXPONENT:
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

# ---------------------------------------------------------------- reward


def reward(output, row: dict) -> float:
    """Returns 1.0 if the last message is the assistant's, with one answer, the right integer.

    Otherwise returns 0.0."""
    last = output.messages[-1] if output.messages else {}
    answers = re.findall(r"<answer>(.*?)</answer>", last.get("content") or "", re.DOTALL)
    if last.get("role") != "assistant" or len(answers) != 1:  # a list of guesses must not pay
        return 0.0
    if not re.fullmatch(r"\s*-?[0-9]{1,30}\s*", answers[0]):  # no runaway number
        return 0.0
    return float(int(answers[0]) == int(row["reward_model"]["ground_truth"]))


# ---------------------------------------------------------------- the built-in model
# All random numbers come from the global generators, which train.py has seeded.


def expression_of(row: dict) -> str:
    """Returns the expression in a row's question, such as 37*48."""
    return re.search(r"[0-9]+\D[0-9]+", row["prompt"][0]["content"]).group()


def demonstration(row: dict) -> list[dict]:
    """Returns a conversation of a teacher who guesses on half of the questions, and else calls."""
    expression = expression_of(row)
    answer = row["reward_model"]["ground_truth"]
    prompt = [{"role": "system", "content": SYSTEM_PROMPT}, *row["prompt"]]
    # He mostly guesses if the first number is below 50. So the greedy model guesses on four
    # questions of nine with any seed, while each group of samples tries both.
    if random.random() < (0.7 if int(expression[:2]) < 50 else 0.3):
        # The guess is the first number: wrong, but no noise to learn by heart.
        guess = re.match("[0-9]+", expression).group()
        return prompt + [{"role": "assistant", "content": f"<answer>{guess}</answer>"}]
    function = {"name": "calculator", "arguments": {"expression": expression}}
    call = {"type": "function", "function": function}
    return prompt + [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": calculator(expression)},
        {"role": "assistant", "content": f"<answer>{answer}</answer>"},
    ]


def build_model(path: str | Path) -> None:
    """Writes the default model to the folder `path`, warmed up on training questions."""
    chats = [demonstration(row) for row in random.choices(load("train"), k=600 * 32)]
    build_warm_model(path, chats, TOOLS)
