"""A tree: each rollout branches after its first tool call, and its branches are compared.

    accelerate launch train.py --task examples/tree.py --agent tree

    What is 37+48? - calculator("37+48") = 85 -+- <answer>85</answer>       1
                                               +- <answer>37</answer>       0
                                               +- <answer>37</answer>       0
                                               +- <answer>85</answer>       1
      trunk: 0.5, the mean of its leaves         leaves: each its own reward

The first turn is the unit "trunk", compared with the first turns of the prompt's other rollouts.
Each leaf is a unit, whose `group` contains the rollout's number: it is compared only with its
siblings, which continue the very same tokens. An evaluation has no branches. docs/units.md#a-tree
has the comparison."""

import asyncio
import copy
import random
from pathlib import Path
from statistics import fmean

from agent_loop import ToolAgentLoop, function_call, register
from examples.calculator import SYSTEM_PROMPT, TOOLS, calculator, expression_of, load, reward
from examples.tiny_models import build_warm_model

BRANCHES = 4  # leaves of a tree


@register("tree")
class Tree(ToolAgentLoop):
    """The tool agent; its training rollouts branch after their first tool call."""

    async def run(self, sampling_params, **row):
        """Returns the trunk and its leaves: AgentLoopOutputs."""
        self.row = row
        self.leaves = []
        outputs = await super().run(sampling_params, **row)
        if row["validate"]:
            return outputs
        # A template that rewrites the history makes several outputs of one trunk.
        trunks = outputs if isinstance(outputs, list) else [outputs]
        for trunk in trunks:
            trunk.unit = "trunk"  # a rollout without a tool call, too: it has a reward as it is
        leaves = [leaf.output() for leaf in self.leaves]
        for leaf in leaves:
            leaf.reward = reward(leaf, row)
        if leaves:
            trunks[-1].reward = fmean(leaf.reward for leaf in leaves)
        return [*trunks, *leaves]

    async def processing_tools(self, trajectory):
        """Calls the tools; after the first call the next state is `branching`."""
        state = await super().processing_tools(trajectory)
        if state is None or self.leaves or self.row["validate"]:
            return state
        return self.branching

    async def branching(self, trunk):
        """Ends the trunk, and lets its branches continue from there, in parallel."""
        self.leaves = [self.branch(trunk, number) for number in range(BRANCHES)]
        await asyncio.gather(*map(self.grow, self.leaves))

    def branch(self, trunk, number: int):
        """Returns a trajectory whose prompt is the whole conversation so far."""
        leaf = copy.deepcopy(trunk)
        leaf.begin(trunk.prompt_ids + trunk.response_ids, trunk.engine_ids)
        leaf.metrics = {}  # those so far are the trunk's
        leaf.unit = f"leaf {number}"
        leaf.group = f"{self.row['rollout_n']}/turn 1"
        return leaf

    async def grow(self, leaf):
        """Goes from state to state, as any rollout does, to the end of a branch."""
        state = self.generating
        while state:
            state = await state(leaf)


def demonstration(row: dict) -> list[dict]:
    """Returns a conversation of a poor teacher, who answers with the question's first number.

    He calls the tool in a third of the conversations, and uses the result in half of these."""
    expression = expression_of(row)
    chat = [{"role": "system", "content": SYSTEM_PROMPT}, *row["prompt"]]
    answer = expression[:2]
    if random.random() < 0.35:
        calls = [function_call("", "calculator", {"expression": expression})]
        chat.append({"role": "assistant", "content": "", "tool_calls": calls})
        chat.append({"role": "tool", "content": calculator(expression)})
        if random.random() < 0.5:
            answer = calculator(expression)
    return [*chat, {"role": "assistant", "content": f"<answer>{answer}</answer>"}]


def build_model(path: str | Path) -> None:
    """Writes the default model to the folder `path`: train.py calls it without a --model."""
    chats = [demonstration(row) for row in random.choices(load("train"), k=600 * 32)]
    build_warm_model(path, chats, TOOLS)
