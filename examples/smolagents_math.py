"""smolagents' ToolCallingAgent and CodeAgent on arithmetic, trained unchanged over HTTP.

    pip install smolagents
    accelerate launch train.py --task examples/smolagents_math.py --agent smol_tools   # or smol_code

Both agents tell the model about earlier steps in words of their own, so every step is a token
sequence of its own (rollout/segments). They get short prompts, for the built-in model, which knows
smolagents' words and guesses at times; without `prompt_templates` they have smolagents' own, which
are 3,400 tokens for that model. The reward looks at what the agent returns. CodeAgent runs the model's code in this
process, by smolagents' interpreter: for a model that you don't trust see its executors."""

import itertools
import random
import re
from pathlib import Path

from openai import DefaultHttpxClient

from agent_loop import BadInput, register
from examples.calculator import calculator, load
from flatrl.chat.endpoint import EndpointLoop
from examples.tiny_models import build_warm_model

try:
    from smolagents import EMPTY_PROMPT_TEMPLATES, CodeAgent, OpenAIModel, ToolCallingAgent, tool
except ImportError:
    raise BadInput("examples/smolagents_math.py needs: pip install smolagents") from None

PROMPTS = {"smol_tools": "Use the calculator.", "smol_code": "Use the calculator in code."}
AGENTS = {"smol_tools": ToolCallingAgent, "smol_code": CodeAgent}
TOOL = tool(calculator)
CLIENT = {"max_retries": 0, "http_client": DefaultHttpxClient()}  # all trajectories share it


class SmolAgent(EndpointLoop):
    """One run of the agent, which is no coroutine and so runs in a thread."""

    def agent(self, base_url: str, api_key: str, row: dict) -> float:
        model = OpenAIModel("policy", api_base=base_url, api_key=api_key, client_kwargs=CLIENT)
        templates = EMPTY_PROMPT_TEMPLATES | {"system_prompt": PROMPTS[self.name]}
        agent = AGENTS[self.name]([TOOL], model, prompt_templates=templates, max_steps=3, verbosity_level=-1)
        answer = agent.run(row["prompt"][-1]["content"])
        return float(str(answer).strip() == row["reward_model"]["ground_truth"])


for name in AGENTS:
    register(name)(type(name, (SmolAgent,), {"name": name}))


def reward(output, row: dict) -> float:
    """Returns 0.0, for an agent that ran out of tokens or turns: it has returned nothing."""
    return 0.0


# ---------------------------------------------------------------------------------------------------------------------
# The built-in model.

# How smolagents tells the model about an earlier call.
CALL = "\nCalling tools:\n[{{'id': '000001000', 'type': 'function', 'function': {}}}]"
TURN = "<|im_end|>\n<|im_start|>"


def demonstrations(row: dict) -> list[list[dict]]:
    """Returns a chat for every step of both agents, which, one time in two, guess."""
    question = row["prompt"][0]["content"]
    truth = row["reward_model"]["ground_truth"]
    expression = question.removeprefix("What is ").removesuffix("?")
    if random.random() < 0.5:
        guess = re.match("[0-9]+", expression).group()
        return [tools_chat(question, "final_answer", answer=guess), code_chat(question, guess)]
    call = {"name": "calculator", "arguments": {"expression": expression}}
    after_call = f"{question}{TURN}assistant\n{CALL.format(call)}{TURN}user\nObservation:\n{truth}"
    return [
        tools_chat(question, "calculator", expression=expression),
        tools_chat(after_call, "final_answer", answer=truth),
        code_chat(question, f'calculator("{expression}")'),
    ]


def tools_chat(task: str, name: str, **arguments) -> list[dict]:
    """Returns a step of ToolCallingAgent: it calls a tool. The template shows the tools' names."""
    call = {"function": {"name": name, "arguments": arguments}}
    return [
        {"role": "system", "content": PROMPTS["smol_tools"] + "\nTools: calculator, final_answer"},
        {"role": "user", "content": f"New task:\n{task}"},
        {"role": "assistant", "tool_calls": [call]},
    ]


def code_chat(task: str, expression: str) -> list[dict]:
    """Returns a step of CodeAgent: its code returns the value of an expression."""
    return [
        {"role": "system", "content": PROMPTS["smol_code"]},
        {"role": "user", "content": f"New task:\n{task}"},
        {"role": "assistant", "content": f"<code>\nfinal_answer({expression})\n</code>"},
    ]


def build_model(path: str | Path) -> None:
    """Writes a model that has learned from demonstrations to the folder `path`."""
    chats = []
    rows = load("train")
    for _ in range(64):
        block = list(itertools.chain.from_iterable(map(demonstrations, random.choices(rows, k=64))))
        # Chats of similar lengths stand side by side, which takes less padding.
        chats += sorted(block, key=lambda chat: len(str(chat)))
    build_warm_model(path, chats, batch_size=32)
