"""Sub-agents: a main agent hands out questions, and other runs of the same policy answer them.

    accelerate launch train.py --task examples/subagents.py --agent subagents --prompts_per_step 8

    main        user       What is 37*48 and 85-21?
                assistant  37*48 85-21                  two questions, and no answer yet
    sub 37*48   user       What is 37*48?               a prompt and a context of its own;
                assistant  calculator("37*48") = 1776   the other sub-agent works in parallel
                assistant  <answer>1776</answer>
    main        user       1776 64                      the sub-agents' answers
                assistant  <answer>1776 64</answer>

Each agent is a unit. All units of a rollout earn whether the last answer is right, because in
general the right answer to a part is unknown. But a sub-agent is compared only with those that were
asked the same in the prompt's other rollouts, and main agents with main agents.

The main agent of the built-in model asks in about half of its rollouts and guesses in the others.
So do sub-agents with the calculator. docs/units.md#sub-agents shows what they learn."""

import asyncio
import itertools
import random
import re
from dataclasses import replace
from pathlib import Path

from agent_loop import AgentLoopBase, ToolAgentLoop, register
from examples import calculator
from examples.calculator import expression_of
from examples.tiny_models import build_warm_model

SYSTEM_PROMPT = "Ask, and end with <answer>N N</answer>."  # the main agent's
TOOLS = calculator.TOOLS  # the sub-agents'
QUESTION = r"[0-9]{1,9}[-+*][0-9]{1,9}"


def load(split: str) -> list[dict]:
    """Returns pairs of the calculator's questions as rows: 256 for "val", 4,096 for "train"."""
    rows = calculator.load(split)
    return list(map(pair, rows[::2], rows[1::2]))


def pair(first: dict, second: dict) -> dict:
    """Returns a row that asks the questions of two of the calculator's rows."""
    question = f"What is {expression_of(first)} and {expression_of(second)}?"
    truth = " ".join(row["reward_model"]["ground_truth"] for row in (first, second))
    return {
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"ground_truth": f"<answer>{truth}</answer>"},
    }


def reward(output, row: dict) -> float:
    """Returns 1.0 if the last message is the two right results, else 0.0."""
    return float(output.messages[-1]["content"] == row["reward_model"]["ground_truth"])


@register("subagents")
class SubAgents(AgentLoopBase):
    """The main agent; sub-agents answer its questions in parallel."""

    async def run(self, sampling_params, **row):
        """Returns the outputs of all agents; in evaluations only those of the main agent."""
        main = self.start(row)
        main.unit = "main"
        outputs = []  # of the sub-agents
        stops = self.stop_token_ids(sampling_params)
        while text := await self.assistant_turn(main, sampling_params):
            questions = re.findall(QUESTION, text)[: self.args.max_parallel_calls]
            if "<answer>" in text or not questions:
                break
            asked = [self.ask(question, sampling_params) for question in questions]
            runs = await asyncio.gather(*asked)
            outputs += itertools.chain(*runs)
            said = " ".join(answer_of(run[-1]) for run in runs)
            if not self.append(main, [{"role": "user", "content": said}], None, stops):
                break
        outputs = main.outputs() if row["validate"] else outputs + main.outputs()
        score = reward(main, row)
        return [replace(output, reward=score) for output in outputs]

    async def ask(self, question: str, sampling_params: dict) -> list:
        """Runs a sub-agent, which is a tool agent; returns its outputs."""
        prompt = [
            {"role": "system", "content": calculator.SYSTEM_PROMPT},
            {"role": "user", "content": f"What is {question}?"},
        ]
        loop = ToolAgentLoop(self.engine, self.tokenizer, self.processor, self.task, self.args)
        outputs = await loop.run(sampling_params, prompt=prompt)
        outputs = outputs if isinstance(outputs, list) else [outputs]
        return [replace(output, unit=f"sub {question}") for output in outputs]


def answer_of(output) -> str:
    """Returns the text between the answer tags of the last message, or "?"."""
    answers = re.findall("<answer>(.*?)</answer>", output.messages[-1]["content"])
    return answers[0] if len(answers) == 1 else "?"


def demonstrations(rows: list[dict]) -> list[list[dict]]:
    """Returns the chats of a poor main agent, who asks or guesses, and of a poor sub-agent.

    The warm-up has no tools: the sub-agent's system message names them, as the template does."""
    row = pair(*rows)
    main = [{"role": "system", "content": SYSTEM_PROMPT}, *row["prompt"]]
    questions = [expression_of(row) for row in rows]
    answer = f"<answer>{' '.join(question[:2] for question in questions)}</answer>"  # a guess
    if random.random() < (0.3 if int(questions[0][:2]) < 50 else 0.7):
        answer = row["reward_model"]["ground_truth"]
        main.append({"role": "assistant", "content": " ".join(questions)})
        main.append({"role": "user", "content": re.sub("</?answer>", "", answer)})
    told = {"role": "system", "content": f"{calculator.SYSTEM_PROMPT}\nTools: calculator"}
    sub = [told, *calculator.demonstration(rows[0])[1:]]
    return [[*main, {"role": "assistant", "content": answer}], sub]


def build_model(path: str | Path) -> None:
    """Writes the default model to the folder `path`: train.py calls it without a --model."""
    rows = calculator.load("train")
    chats = [chat for _ in range(12000) for chat in demonstrations(random.choices(rows, k=2))]
    random.shuffle(chats)
    build_warm_model(path, chats, batch_size=32)
