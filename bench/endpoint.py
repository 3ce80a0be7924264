"""Times agents over the chat endpoint, of frameworks too, against the same agent in process.

    python bench/endpoint.py [--trajectories 128] [--rounds 5] [--agents http langgraph openai_agents pydantic_agent]

All trajectories have the same two assistant turns: a call of the calculator, and the answer. A
real engine samples as many tokens as these turns have, and the tokens are then replaced by the
wanted ones. So all sides have the same texts and lengths, and a real vLLM computes them.

    in process   the agent is a ChatAgentLoop of this file
    http         the agent is the same lines with AsyncOpenAI, over the chat endpoint
    the others   the agents of examples/ with these names

A round runs `in process` and one other agent after it, and does so for every agent. Round 0 is
the warm-up. A rollout of trajectories that all start at once is timed as a whole, with its
rewards. The table has trajectories a second, milliseconds each, the seconds of an agent over
those of `in process` in the same round, and which share of an agent's time goes beyond that of
`http`.
"""

import argparse
import dataclasses
import importlib
import json
import statistics
import tempfile
import time
from types import SimpleNamespace

import common
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from agent_loop import as_tool, register
from examples import calculator
from examples.chat_client import ChatAgentLoop
from examples.endpoint import EndpointLoop
from rollout import Engine, rollout

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "15+35"}}\n</tool_call><|im_end|>'
ANSWER = "<answer>50</answer><|im_end|>"
PROMPT = [{"role": "system", "content": calculator.SYSTEM_PROMPT}, {"role": "user", "content": "What is 15+35?"}]
FRAMEWORKS = {"langgraph": "langgraph_math", "openai_agents": "openai_agents", "pydantic_agent": "pydantic_agent"}


async def solve(client, messages: list) -> None:
    """Asks the policy with an OpenAI client, calls the calculator as it says, and asks again
    until it calls nothing."""
    tools = [as_tool(calculator.calculator).schema]
    while True:
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        message = completion.choices[0].message
        messages = [*messages, message]
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            result = calculator.calculator(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


@register("in process")
class InProcess(ChatAgentLoop):
    async def chat(self, client, **row):
        await solve(client, row["prompt"])


@register("http")
class Http(EndpointLoop):
    async def agent(self, base_url, api_key, row):
        await solve(self.openai(base_url, api_key), row["prompt"])


class ScriptedEngine:
    """The engine, except that the tokens it samples are replaced by CALL, or by ANSWER after a
    tool's response."""

    def __init__(self, engine: Engine, tokenizer):
        self.engine = engine
        self.call = tokenizer(CALL, add_special_tokens=False)["input_ids"]
        self.answer = tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
        self.tool_response = tokenizer("<tool_response>\n", add_special_tokens=False)["input_ids"][0]

    def __getattr__(self, name):
        return getattr(self.engine, name)

    async def generate(self, *, prompt_ids, sampling_params, **call):
        token_ids = self.answer if self.tool_response in prompt_ids else self.call
        sampling = sampling_params | {"max_tokens": len(token_ids), "ignore_eos": True, "stop_token_ids": []}
        output = await self.engine.generate(prompt_ids=prompt_ids, sampling_params=sampling, **call)
        return dataclasses.replace(output, token_ids=list(token_ids), stop_reason="stop")


def print_table(table: dict[str, list[tuple[float, float]]], n: int) -> None:
    """Prints medians. table: for each agent the seconds of `in process` and of the agent, a
    pair a round; n: the trajectories of a rollout."""
    in_process = statistics.median(ours for pairs in table.values() for ours, _ in pairs)
    medians = {name: statistics.median(theirs for _, theirs in pairs) for name, pairs in table.items()}
    print(f"\n{'medians':16} trajectories/s   ms each   seconds of in process's (min - max)   share beyond http")
    print(f"{'in process':16} {n / in_process:14.1f} {1000 * in_process / n:9.2f}")
    for name, pairs in table.items():
        ratio = common.spread([theirs / ours for ours, theirs in pairs])
        share = ""
        if name != "http" and "http" in medians:
            share = f"{1 - medians['http'] / medians[name]:.0%}"
        speed = f"{n / medians[name]:14.1f} {1000 * medians[name] / n:9.2f}"
        print(f"{name:16} {speed} {ratio:>37} {share:>19}")


def main() -> None:
    """Builds the engine, runs the agents by turns, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trajectories", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--agents", nargs="+", choices=["http", *FRAMEWORKS], default=["http", *FRAMEWORKS])
    parser.add_argument("--engine_args", default="{}", help="of the engine, as in train.py")
    options = parser.parse_args()
    for name in options.agents:
        if name in FRAMEWORKS:
            importlib.import_module(f"examples.{FRAMEWORKS[name]}")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = common.random_model(tempfile.mkdtemp())
    args = train.Args(model=folder, dtype="float32", max_model_len=512, max_assistant_turns=8,
                      engine_args=options.engine_args)  # fmt: skip
    common.start_alone()
    engine = Engine(folder, args, device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    task = SimpleNamespace(reward=lambda output, row: 1.0)
    run = common.surroundings(ScriptedEngine(engine, tokenizer), task, tokenizer, args)

    def seconds(agent: str, step: int) -> float:
        """Runs one rollout with this agent; returns its seconds."""
        rows = [{"prompt": PROMPT, "agent_name": agent}] * options.trajectories
        engine.wake_weights()
        engine.load_weights(model.named_parameters(), version=step)
        engine.wake_kv()
        started = time.perf_counter()
        phase = rollout(run, rows, step, 1, {"temperature": 1.0})
        took = time.perf_counter() - started
        engine.sleep()
        assert len(phase.trained) == options.trajectories and not phase.counts, phase.errors
        assert all(output.messages[-1]["content"] == ANSWER.removesuffix("<|im_end|>") for output in phase.trained)
        return took

    step = 0
    table: dict[str, list] = {name: [] for name in options.agents}
    for i in range(options.rounds + 1):
        for name in options.agents:
            step += 2
            ours = seconds("in process", step - 1)
            theirs = seconds(name, step)
            title = f"round {i}" if i else "warm-up"
            print(f"{title}: in process {ours:.2f} s, {name} {theirs:.2f} s", flush=True)
            if i:
                table[name].append((ours, theirs))
    print_table(table, options.trajectories)


if __name__ == "__main__":
    main()
