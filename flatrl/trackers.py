"""Logs a run to Weights & Biases."""

from agent_loop import AgentLoopOutput, numeric_entries, total_reward
from flatrl.bad_input import refusing

MAX_ROWS = 64  # outputs of a step in its table
COLUMNS = ["prompt", "sample", "index", "reward", "turns", "stop_reason", "trajectory"]


class Tracker:
    """A run at Weights & Biases: its metrics, and a table of each step's first outputs.

    about: the contents of args.json. Raises BadInput if wandb is not installed."""

    def __init__(self, project: str, folder: str, about: dict):
        with refusing("--wandb_project needs: pip install wandb"):
            import wandb
        self.wandb = wandb
        self.run = wandb.init(project=project, dir=folder, config=about)

    def step(self, metrics: dict, outputs: list[AgentLoopOutput], tokenizer):
        """Logs a step's metrics and, if there are any, its trajectories."""
        logged = numeric_entries(metrics)
        del logged["step"]
        if outputs:
            rows = [_row(output, tokenizer) for output in outputs[:MAX_ROWS]]
            logged["rollouts"] = self.wandb.Table(columns=COLUMNS, data=rows)
        self.run.log(logged, step=metrics["step"])

    def close(self):
        """Sends what is left, and ends the run at Weights & Biases."""
        self.run.finish()


def _row(output, tokenizer):
    return [
        output.extra["prompt"],
        output.extra["sample"],
        str(output.extra.get("index")),
        total_reward(output),
        output.num_turns,
        output.stop_reason,
        tokenizer.decode(output.prompt_ids + output.response_ids),
    ]
