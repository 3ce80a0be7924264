"""Logs a run to Weights & Biases."""

from agent_loop import AgentLoopOutput, numeric_entries, total_reward
from flatrl.bad_input import refusing

MAX_ROWS = 64  # outputs of a step in its table
FAILED = "--wandb_project: Weights & Biases can't be used (WANDB_MODE=offline needs no account)"


def check_account():
    """Raises BadInput, within about 10 seconds, if wandb is not installed or can't log in."""
    with refusing("--wandb_project needs: pip install wandb"):
        import wandb
    with refusing(FAILED):
        wandb.login(verify=True)  # asks on a terminal, and does nothing if W&B is offline


class Tracker:
    """A run at Weights & Biases: its metrics, and a table of each step's first outputs.

    about: the contents of args.json. Raises BadInput if W&B does not start a run."""

    def __init__(self, project: str, folder: str, about: dict):
        import wandb

        self.wandb = wandb
        with refusing(FAILED):
            self.run = wandb.init(project=project, dir=folder, config=about)

    def step(self, metrics: dict, outputs: list[AgentLoopOutput], tokenizer):
        """Logs a step's metrics and, if there are any, its trajectories."""
        logged = numeric_entries(metrics)
        del logged["step"]
        rows = [_row(output, tokenizer) for output in outputs[:MAX_ROWS]]
        if rows:
            table = self.wandb.Table(columns=[*rows[0]], data=[[*row.values()] for row in rows])
            logged["rollouts"] = table
        self.run.log(logged, step=metrics["step"])

    def close(self):
        """Sends what is left, and ends the run at Weights & Biases."""
        self.run.finish()


def _row(output: AgentLoopOutput, tokenizer) -> dict:
    """Returns an output's row of the table."""
    return {
        "prompt": output.extra["prompt"],
        "sample": output.extra["sample"],
        "index": str(output.extra.get("index")),
        "reward": total_reward(output),
        "turns": output.num_turns,
        "stop_reason": output.stop_reason,
        "trajectory": tokenizer.decode(output.prompt_ids + output.response_ids),
    }
