"""Logs a run to a tracker, through accelerate. To add your own, name it in train.LISTENERS."""

import importlib
from uuid import uuid4

from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from agent_loop import numeric_entries, total_reward
from flatrl.bad_input import refusing
from flatrl.log import Listener, Log

COLUMNS = ["prompt", "sample", "reward", "turns", "stop_reason", "trajectory"]
MAX_ROWS = 64  # outputs of a step in its table


class Tracker(Listener):
    """Logs metrics, and at W&B also a table of each step's first outputs.

    With --resume the earlier run continues there. Raises BadInput if the tracker can't be used."""

    def __init__(self, log: Log):
        super().__init__(log)
        self.name = log.args.tracker
        with refusing(f"--tracker {self.name} needs: pip install {self.name}"):
            package = importlib.import_module(self.name)
        file = log.folder / "tracker_run"
        if not (log.args.resume and file.is_file()):
            file.write_text(uuid4().hex[:8])
        run = file.read_text()
        how = {"run_name": log.args.project, "name": f"{log.folder.name}-{run}"}
        how |= {"config": log.about, "resume": "allow" if log.args.resume else "never"}
        if self.name == "wandb":
            how |= {"id": run, "dir": log.folder}
        elif self.name == "tensorboard":
            how = {"run_name": "tensorboard", "logging_dir": log.folder}
            how["purge_step"] = log.steps_done + 1
        with refusing(f"--tracker {self.name} can't be used (W&B: try WANDB_MODE=offline)"):
            if self.name == "wandb":
                package.login(verify=True)  # asks on a terminal, and does nothing if offline
            self.tracker = LOGGER_TYPE_TO_CLASS[self.name](**how)
            self.tracker.start()

    def metrics(self, row, rollouts=None, batch=None):
        values = {key: float(x) for key, x in numeric_entries(row).items() if key != "step"}
        self.tracker.log(values, step=row["step"])
        if rollouts and self.name == "wandb":
            rows = []
            for output in rollouts.outputs[:MAX_ROWS]:
                place = [output.extra["prompt"], output.extra["sample"]]
                text = self.log.tokenizer.decode(output.prompt_ids + output.response_ids)
                facts = [total_reward(output), output.num_turns, output.stop_reason]
                rows.append([*place, *facts, text])
            self.tracker.log_table("rollouts", COLUMNS, rows, step=row["step"])

    def close(self):
        """Sends what is left, and ends the run at the tracker."""
        self.tracker.finish()
