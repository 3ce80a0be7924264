"""Outputs of a rollout, or of a unit, which share a reward, as a player's do (docs/units.md)."""

from agent_loop import AgentLoopOutput

Outputs = list[AgentLoopOutput]


def rollout_of(output: AgentLoopOutput) -> tuple:
    """Returns the key that outputs of one rollout share: prompt and sample."""
    return output.extra["prompt"], output.extra["sample"]


def unit_of(output: AgentLoopOutput) -> tuple:
    """Returns the key that outputs of one unit share: prompt, sample and the unit's name."""
    return *rollout_of(output), output.unit


def last_outputs(outputs: Outputs) -> Outputs:
    """Returns the last output of each unit, in the order of the units' first outputs."""
    return list({unit_of(output): output for output in outputs}.values())
