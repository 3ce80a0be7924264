r"""Model-written code: math questions, and Python to work them out, as in ReTool.

    accelerate launch train.py --task examples/retool.py        # the tiny model shows that it runs
    accelerate launch train.py --task examples/retool.py --model Qwen/Qwen2.5-0.5B-Instruct \
        --train_files dapo-math-17k.parquet --val_files aime-2024.parquet \
        --max_prompt_tokens 1024 --max_response_tokens 4096

The second command reads the data of the paper (https://arxiv.org/abs/2504.11536). The published
file repeats each question about a hundred times, so drop the duplicates first. Each program runs in
a process of its own (examples/sandbox.py); `tool/failed` and `tool/timeouts` count failures."""

import re

from agent_loop import ToolResponse
from examples.calculator import build_model, load  # noqa: F401  (train.py calls them)
from examples.sandbox import require_isolation, run_python

SYSTEM_PROMPT = (
    "Solve the problem. You may run Python and print results. End with <answer>N</answer>."
)
SECONDS = 5.0
MEMORY_MB = 1024  # room for numpy and sympy
ERROR_LINES = 4  # of a traceback: the place, and the error


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
        lines = lines or [f"Error: the program ended with code {result.returncode}"]
        text += "\n" + "\n".join(lines)
    failed = bool(result.returncode) and not result.timed_out
    counts = {"failed": failed, "timeouts": result.timed_out}
    return ToolResponse(text=text.strip() or "(nothing printed)", metrics=counts)


TOOLS = [code_interpreter]

require_isolation()


def find_answer(text: str) -> str | None:
    """Returns the one <answer>...</answer>, else the one line "Answer: ...", else None.

    DAPO's prompts ask for the line. Of several answers none counts: a list of guesses must not
    pay."""
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if not answers:
        answers = re.findall(r"^Answer:(.*)$", text, re.MULTILINE)
    return normalize(answers[0]) if len(answers) == 1 else None


def normalize(answer: str) -> str:
    """Strips the usual decoration of a number: " $\\boxed{1,234}$ " becomes "1234"."""
    answer = re.sub(r"[\s$]|\\[()]|(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", answer)
    return re.sub(r"\A\\boxed\{(.*)\}\Z", r"\1", answer.rstrip("."))


def reward(output, row: dict) -> float:
    """Returns 1.0 if the last message is the assistant's and has the right answer, else 0.0.

    Calling the tool pays nothing."""
    last = output.messages[-1] if output.messages else {}
    answer = None
    if last.get("role") == "assistant":
        answer = find_answer(last.get("content") or "")
    return float(bool(answer) and answer == normalize(str(row["reward_model"]["ground_truth"])))
