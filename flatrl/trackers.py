"""Logs a run to Weights & Biases. Another tracker is another Listener, named in train.LISTENERS."""

from agent_loop import AgentLoopOutput, numeric_entries, total_reward
from flatrl.bad_input import refusing
from flatrl.log import Listener, Log

MAX_ROWS = 64  # outputs of a step in its table
FAILED = "--wandb_project: Weights & Biases can't be used (WANDB_MODE=offline needs no account)"


class Tracker(Listener):
    """With --wandb_project, logs metrics, and a table of each step's first outputs.

    Raises BadInput if wandb is not installed, or can't log in or start a run."""

    def __init__(self, log: Log):
        super().__init__(log)
        self.run = None
        project = log.args.wandb_project
        if not project:
            return
        with refusing("--wandb_project needs: pip install wandb"):
            import wandb
        with refusing(FAILED):
            wandb.login(verify=True)  # asks on a terminal, and does nothing if W&B is offline
            self.run = wandb.init(project=project, dir=log.args.output_dir, config=log.about)
        self.table = wandb.Table

    def metrics(self, row, rollouts=None, batch=None):
        if not self.run:
            return
        logged = numeric_entries(row)
        del logged["step"]
        outputs = rollouts.outputs[:MAX_ROWS] if rollouts else []
        rows = [_row(output, self.log.tokenizer) for output in outputs]
        if rows:
            cells = [[*row.values()] for row in rows]
            logged["rollouts"] = self.table(columns=[*rows[0]], data=cells)
        self.run.log(logged, step=row["step"])

    def close(self):
        """Sends what is left, and ends the run at Weights & Biases."""
        if self.run:
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
