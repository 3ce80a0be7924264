r"""ReTool (https://arxiv.org/abs/2504.11536): math questions, and Python to work them out.

On the built-in tiny model, with questions made here (it runs, but that model has only learned to
call a calculator):

    accelerate launch train.py --task examples/retool.py

On the paper's kind of data, DAPO-Math-17k (its columns prompt, which asks for a last line
"Answer: N", and reward_model.ground_truth are read). The published file repeats each question
about a hundred times: drop the duplicates first.

    accelerate launch train.py --task examples/retool.py --model Qwen/Qwen2.5-0.5B-Instruct \
        --train_files dapo-math-17k.parquet --val_files aime-2024.parquet \
        --max_prompt_tokens 1024 --max_response_tokens 4096 --max_tool_response_tokens 512

`code_interpreter` runs each program in a process of its own (examples/sandbox.py says what it
may do), so nothing is remembered from one call to the next. In the log, `tool/failed` counts
programs that ended in an error, `tool/timeouts` those that passed SECONDS, `tool/networked`
those that ran where the host does not allow to take the network away."""

import random
import re
from math import comb, gcd

from agent_loop import BadInput, ToolResponse
from examples.calculator import build_model  # noqa: F401  (train.py calls it when there is no --model)
from examples.sandbox import NotIsolated, require_isolation, run_python

SYSTEM_PROMPT = (
    "Solve the problem. You may run Python and print results. End with <answer>N</answer>."
)
SECONDS = 5.0
MEMORY_MB = 1024  # room for numpy and sympy
ERROR_LINES = 4  # of a traceback: the place, and what happened


async def code_interpreter(code: str) -> ToolResponse:
    """Run a Python program and return what it prints.

    Args:
        code: The whole program; nothing is kept from earlier ones. Print what you want to see.
    """
    # Models like to write code in a Markdown block.
    code = re.sub(r"\A\s*```(?:python|py)?[ \t]*\n|\n?```\s*\Z", "", code)
    result = await run_python(code, timeout=SECONDS, memory_mb=MEMORY_MB)
    text = result.stdout.rstrip()
    if result.timed_out:
        text += f"\nError: the program took longer than {SECONDS:g} seconds"
    elif result.returncode:
        lines = result.stderr.strip().splitlines()[-ERROR_LINES:]
        text += "\n" + "\n".join(
            lines or [f"Error: the program ended with code {result.returncode}"]
        )
    failed = bool(result.returncode) and not result.timed_out
    counts = {"failed": failed, "timeouts": result.timed_out, "networked": not result.no_network}
    return ToolResponse(text=text.strip() or "(nothing printed)", metrics=counts)


TOOLS = [code_interpreter]

try:
    require_isolation()
except NotIsolated as error:
    raise BadInput(f"retool.py: {error}") from None


def load(split: str) -> list[dict]:
    """Returns rows with verl's columns: 400 questions that take some counting, 80 of them "val"."""
    generator = random.Random(0)
    questions = {}  # question -> answer: none comes twice
    while len(questions) < 400:
        a = generator.randint(2, 30)
        b = generator.randint(31, 400)
        c = generator.randint(7, 97)
        text, answer = generator.choice(
            [
                (f"What is the remainder of {a}^{b} divided by {c}?", pow(a, b, c)),
                (f"What is the sum of the digits of {a}^{c}?", sum(map(int, str(a**c)))),
                (
                    f"How many primes are there from {b} to {b + c}?",
                    sum(map(is_prime, range(b, b + c + 1))),
                ),
                (
                    f"How many of the numbers 1, 2, ..., {b} have no factor in common with {c}?",
                    sum(gcd(n, c) == 1 for n in range(1, b + 1)),
                ),
                (
                    f"Of {a + 5} people, how many committees of {a // 3 + 2} can be formed?",
                    comb(a + 5, a // 3 + 2),
                ),
            ]
        )
        questions[text] = answer
    rows = list(questions.items())
    return [
        {
            "prompt": [{"role": "user", "content": text}],
            "data_source": "retool_sample",
            "reward_model": {"style": "rule", "ground_truth": str(answer)},
            "extra_info": {"split": split, "index": i},
        }
        for i, (text, answer) in enumerate({"train": rows[:-80], "val": rows[-80:]}[split])
    ]


def is_prime(n: int) -> bool:
    """Returns whether n is a prime number."""
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def find_answer(text: str) -> str | None:
    """Returns the one <answer>...</answer>, else the one line "Answer: ...", else None.

    DAPO's prompts ask for the line. Of several answers none counts: a list of guesses must not
    pay."""
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if not answers:
        answers = re.findall(r"^Answer:(.*)$", text, re.MULTILINE)
    return normalize(answers[0]) if len(answers) == 1 else None


def normalize(answer: str) -> str:
    """Removes what may be written around a number: " $\\boxed{1,234}$ " becomes "1234"."""
    answer = re.sub(r"[\s$]|\\[()]|(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", answer)
    return re.sub(r"\A\\boxed\{(.*)\}\Z", r"\1", answer.rstrip("."))


def reward(output, row: dict) -> float:
    """Returns 1.0 if the last message is the assistant's and has the right answer, else 0.0.

    Calling the tool pays nothing."""
    last = output.messages[-1] if output.messages else {}
    answer = find_answer(last.get("content") or "") if last.get("role") == "assistant" else None
    return float(bool(answer) and answer == normalize(str(row["reward_model"]["ground_truth"])))
