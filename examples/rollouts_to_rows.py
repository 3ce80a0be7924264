"""Expert iteration: turns the good rollouts of a run into rows with demonstrations.

    accelerate launch train.py --lr 0 --output_dir runs/samples       # or any other run
    python examples/rollouts_to_rows.py runs/samples runs/rows.jsonl
    accelerate launch train.py --algo sft --train_files runs/rows.jsonl --output_dir runs/expert

For another round, give --model runs/expert/final to the first command. This is also known as
rejection sampling, or STaR (https://arxiv.org/abs/2203.14465).

A row of the file is a row of the run's task, with a column `demonstration`: the texts of the turns
that the policy sampled. By default each row has its first rollout with a reward of at least 1. A
rollout is left out if a turn was cut off, if it has several outputs, or if it lacks a message of
the prompt that its row has now: the task or its files may have changed, or prompts were cut."""

import argparse
import collections
import itertools
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import data
import train
from agent_loop import BadInput
from flatrl import models
from flatrl.files import read_json_lines, write_whole


def rollouts_of(run: Path) -> list[list[dict]]:
    """Returns the training rollouts that the policy sampled: the lines of their outputs."""
    rollouts = collections.defaultdict(list)
    for file in sorted(run.glob("rollouts/step_*.jsonl")):
        for line in read_json_lines(file):
            extra = line.get("extra", {})  # the line of a failed rollout has none
            if "sample" in extra and not {"greedy", "demonstration"} & extra.keys():
                rollouts[extra["prompt"], extra["sample"]].append(line)
    return list(rollouts.values())


def turns_of(line: dict, tokenizer, stops: set[int]) -> list[str]:
    """Returns the texts of an output's sampled turns; [] if one was cut off or is empty."""
    turns = []
    tokens = zip(line["response_ids"], line["response_mask"])
    for is_sampled, run in itertools.groupby(tokens, key=lambda token: token[1]):
        if is_sampled:
            *ids, last = [id for id, _ in run]
            if last not in stops or not ids:
                return []
            turns.append(tokenizer.decode(ids))
    return turns


def demonstrations(run: Path, min_reward: float, per_row: int) -> list[dict]:
    """Returns the run's training rows with a demonstration, up to per_row for each row.

    Raises BadInput if rows share an `index`, because rollouts name their row by it."""
    args = train.Args(**json.loads((run / "args.json").read_text())["args"])
    task = data.load_task(args.task)
    rows = data.load_rows(task, "train", args.train_files, args.prompt_key, args.image_key)
    by_index = {row["index"]: row for row in rows}
    if len(by_index) < len(rows):
        raise BadInput("several rows have the same index in extra_info")
    tokenizer, _ = models.load_tokenizer(args)
    stops = set(models.stop_token_ids(args, tokenizer))

    chosen = collections.defaultdict(list)
    n_strange = 0
    for line, *others in rollouts_of(run):
        turns = turns_of(line, tokenizer, stops)
        if line["total_reward"] < min_reward or not turns or others:
            continue
        row = by_index.get(line["index"])
        if not row or not all(message in line["messages"] for message in row["prompt"]):
            n_strange += 1
            continue
        known = chosen[line["index"]]
        if turns not in known and len(known) < per_row:
            known.append(turns)
    if n_strange:
        print(f"left out: {n_strange} good rollouts that lack the prompt of their row")
    return [
        by_index[index] | {"demonstration": turns}
        for index, known in chosen.items()
        for turns in known
    ]


def main(words: list[str]) -> None:
    """Writes the rows, and says how many there are. Raises BadInput if there are none."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="the --output_dir of a run")
    parser.add_argument("rows", type=Path, help="the file to write, .jsonl")
    parser.add_argument("--min_reward", type=float, default=1.0, help="of a good rollout")
    parser.add_argument("--per_row", type=int, default=1, help="at most so many different ones")
    args = parser.parse_args(words)
    rows = demonstrations(args.run, args.min_reward, args.per_row)
    if not rows:
        raise BadInput(f"{args.run}: no rollout with a reward of at least {args.min_reward}")
    try:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    except TypeError as error:  # an image, for example
        raise BadInput(f"a row can't be written as JSON: {error}") from None
    write_whole(args.rows, *(f"{line}\n" for line in lines))
    prompts = len({row["index"] for row in rows})
    print(f"{args.rows}: {len(rows)} demonstrations for {prompts} prompts")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BadInput as error:
        sys.exit(f"rollouts_to_rows.py: {error}")
