"""Logs a run at Weights & Biases, or at trackio, which speaks its API."""

import importlib

from agent_loop import AgentLoopOutput, numbers, total_reward
from flatrl.bad_input import refusing

MAX_ROWS = 64  # outputs of a step in its table
COLUMNS = ["prompt", "sample", "index", "reward", "turns", "stop_reason", "trajectory"]


class Tracker:
    """A run at a tracker: its metrics, and of each step a table of the first MAX_ROWS outputs.

    The tracker groups metrics by what stands before the "/" of their names.
    about: what is known of the run, as in args.json. Raises BadInput if the package is not
    installed."""

    def __init__(self, project: str, folder: str, about: dict):
        with refusing("--wandb_project needs: pip install wandb"):
            self.package = importlib.import_module("wandb")
        self.run = self.package.init(project=project, config=about, dir=folder)

    def step(self, metrics: dict, outputs: list[AgentLoopOutput], tokenizer):
        """Logs a step's metrics and, if there are any, its trajectories."""
        logged = numbers(metrics)
        del logged["step"]  # both have a step of their own; trackio keeps the name to itself
        if outputs:
            rows = [
                [output.extra["prompt"], output.extra["sample"], str(output.extra.get("index")),
                 total_reward(output), output.num_turns, output.stop_reason,
                 tokenizer.decode(output.prompt_ids + output.response_ids)]
                for output in outputs[:MAX_ROWS]]
            logged["rollouts"] = self.package.Table(columns=COLUMNS, data=rows)
        self.run.log(logged, step=metrics["step"])

    def close(self):
        self.run.finish()
