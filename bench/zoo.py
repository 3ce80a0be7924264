"""Which line of a run's output names a fault that spoils the training?

    python bench/zoo.py          # all faults
    python bench/zoo.py --only "a mask shifted by one"

A fault replaces one function of flatrl from outside, or is a flag, or a bad part of a task. Each
run has three steps (one with a resume has four), and the line must come within them. This file
is the task of the runs too: the calculator's, with agent loops and rewards that the environment
variable ZOO_TASK spoils.
"""

import argparse
import contextlib
import itertools
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import common  # noqa: F401
import models
from common import REPO

from agent_loop import AgentLoopBase, BadInput, SingleTurnLoop, register
from examples import calculator
from examples.calculator import SYSTEM_PROMPT, TOOLS, build_model  # noqa: F401

# ---------------------------------------------------------------- the task, and its bad parts

ZOO_TASK = os.environ.get("ZOO_TASK", "")


def load(split: str) -> list[dict]:
    """Returns the calculator's questions: with ZOO_TASK=leak those of training for both splits,
    with few eight long ones, which return in every step, with photo rows with an image that no
    column for images holds."""
    rows = calculator.load("train" if ZOO_TASK == "leak" else split)[:64]
    if ZOO_TASK == "few":
        rows = rows[:8]
        for row in rows:
            row["prompt"][0]["content"] *= 8
    if ZOO_TASK == "photo":
        for row in rows:
            row["photo"] = {"bytes": b"a picture", "path": None}
    return rows


def reward(output, row: dict) -> float:
    """Returns the calculator's reward, or what ZOO_TASK spoils it to."""
    if ZOO_TASK == "constant":
        return 0.5
    if ZOO_TASK == "nan":
        return float("nan")
    if ZOO_TASK == "none":
        return calculator.reward(output, row) or None
    if ZOO_TASK == "alarm":
        with contextlib.suppress(ValueError):  # what graders do: they take it for a wrong answer
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.alarm(5)
        return 0.0
    if ZOO_TASK == "length":
        return float(output.truncated)
    return calculator.reward(output, row)


@register("two_outputs")
class TwoOutputs(AgentLoopBase):
    """Two answers as the outputs of a rollout. With ZOO_TASK=sides their rewards are 1 and -1,
    as in a game whose sides were not named as units."""

    async def run(self, sampling_params, **row):
        first = await SingleTurnLoop.run(self, sampling_params, **row)
        second = await SingleTurnLoop.run(self, sampling_params, **row)
        if ZOO_TASK == "sides":
            first.reward = 1.0
            second.reward = -1.0
        return [first, second]


# ---------------------------------------------------------------- the faults


@dataclass
class Fault:
    """A fault, and the text that names it in the output.

    place, body: the function or property `place` returns `body`, an expression of `old` (the
    function as it was), `a` and `k` (its arguments), `call` (how often it was called, from 1) and
    `seen` (a dict that stays). flags: of train.py. task: the value of ZOO_TASK. resumed: the fault
    is in a run that continues from a sound run's checkpoint. model: one of bench/models.py's."""

    named: str
    place: str = ""
    body: str = ""
    flags: str = ""
    task: str = ""
    resumed: bool = False
    model: str = ""


DISAGREE = "engine and trainer disagree"
WEIGHTS = "flatrl.models.checkpoint_weights"
STALE = "seen.setdefault(0, [(n, t.clone()) for n, t in old(*a)])"
STALE_PART = "((n, seen.setdefault(n, t.clone()) if {} in n else t) for n, t in old(*a))"
LEFT_OUT = "((n, t) for n, t in old(*a) if {} not in n)"
OUTPUT = "agent_loop.Trajectory.output"
SAMPLED = "agent_loop.Trajectory.add_sampled"
CREDIT = "train.estimate_advantages"
POOL = "train.training_pool"
# The rewards of the random model of experts are all 0: the entropy is what it trains on.
EXPERTS = {"flags": "--lr 0.01 --entropy_coef 0.1 --max_response_tokens 16", "model": "qwen3_moe"}
IMAGES = (
    "--task tests/vision_task.py --agent looker --group_size 2 "
    "--max_prompt_tokens 96 --max_response_tokens 64"
)

FAULTS = {
    # -- the weights of the engine
    "weights never sent again": Fault(DISAGREE, WEIGHTS, STALE),
    "keys of old weights in the cache": Fault(
        DISAGREE,
        "vllm.v1.core.block_pool.BlockPool.reset_prefix_cache",
        "True",
        '--engine_args {"block_size":32} --entropy_coef 0.1',
        "few",
    ),
    "a LoRA sync that samples the base": Fault(DISAGREE, WEIGHTS, STALE, "--lora_rank 4 --lr 0.1"),
    "a layer not sent": Fault("layers.1", WEIGHTS, LEFT_OUT.format("'.layers.1.'")),
    "a layer sent with its old weights": Fault(
        DISAGREE, WEIGHTS, STALE_PART.format("'.layers.1.'")
    ),
    "a tied head not sent again": Fault(DISAGREE, WEIGHTS, STALE_PART.format("'embed'")),
    "an engine that drifts from step 3 on": Fault(
        f"{DISAGREE}: their logprobs of step 3",
        WEIGHTS,
        "((n, t * (1 + 0.1 * (call > 2))) for n, t in old(*a))",
    ),
    "an expert not sent": Fault(
        "layers.1.mlp.experts", WEIGHTS, LEFT_OUT.format("'.layers.1.mlp.experts.2.'"), **EXPERTS
    ),
    "an expert sent with its old weights": Fault(
        DISAGREE, WEIGHTS, STALE_PART.format("'.experts.2.'"), **EXPERTS
    ),
    # -- images
    "images that the engine does not get": Fault(
        "tokens of the images",
        "rollout.Engine.generate",
        "old(*a, **k | {'image_data': None})",
        IMAGES,
    ),
    "images that the trainer does not get": Fault(
        DISAGREE, "data.collate", "{n: x for n, x in old(*a).items() if n != 'images'}", IMAGES
    ),
    "images that a loop leaves out": Fault(
        "the ids have", OUTPUT, "replace(old(*a), images=[])", IMAGES
    ),
    # -- what is scored
    "temperature in the engine alone": Fault(
        DISAGREE,
        "train.Policy.__init__",
        "old(a[0], replace(a[1], temperature=1.0), *a[2:])",
        "--temperature 0.5",
    ),
    "top-p samples scored as full ones": Fault(DISAGREE, flags='--sampling_args {"top_p":0.7}'),
    "a mask shifted by one": Fault(
        "response_mask is wrong",
        "data.collate",
        "old(*a) | {'response_mask': old(*a)['response_mask'].roll(1, 1)}",
    ),
    "turns tokenised again": Fault(
        DISAGREE, SAMPLED, "old(a[0], replace(a[1], token_ids=repeat_first(a[1].token_ids)), **k)"
    ),
    "a stop token that is not trained": Fault(
        "response_mask is wrong", SAMPLED, "(old(*a, **k), a[0].response_mask.__setitem__(-1, 0))"
    ),
    "a loop that leaves out the versions": Fault(
        "where the mask is 1, has -1",
        OUTPUT,
        "replace(old(*a), response_versions=[-1] * len(a[0].response_ids))",
    ),
    "two BOS tokens": Fault(
        "does not give a prompt back",
        "agent_loop.ChatTemplate.render",
        "[1] + old(*a, **k)",
    ),
    # -- credit
    "advantages of another row": Fault("do not follow the rewards", CREDIT, "old(*a).roll(1, 0)"),
    "advantages of the wrong sign": Fault("do not follow the rewards", CREDIT, "-old(*a)"),
    "both sides of a game as one unit": Fault(
        "name a `unit` for each", flags="--agent two_outputs", task="sides"
    ),
    "a rollout weighed by its outputs": Fault(
        "weighs more than one",
        "data.Batch.count_unit_tokens",
        "a[0]['response_mask'].sum(-1)",
        "--agent two_outputs --algo gspo",
    ),
    # -- rewards
    "a reward that is constant": Fault("taught nothing", task="constant"),
    "a reward that is NaN": Fault("must be a finite number", task="nan"),
    "a reward of None for wrong answers": Fault("reward returned None", task="none"),
    "a grader with signal.alarm": Fault("the reward calls signal.signal in", task="alarm"),
    "truncated answers rewarded": Fault(
        "best-paid answers were cut off", flags="--max_response_tokens 12", task="length"
    ),
    "aborted answers trained": Fault(
        "the engine aborted answers",
        SAMPLED,
        "(setattr(a[1], 'stop_reason', 'abort'), old(*a, **k))",
    ),
    # -- tools
    "tool calls that are never parsed": Fault(
        "look like tool calls", flags="--tool_parser pythonic"
    ),
    "a tool that always raises": Fault(
        "and the model read the error", "agent_loop.FunctionTool.execute", "1 / 0"
    ),
    "tool calls that die out": Fault(
        "tool_calls has fallen",
        "agent_loop.ToolAgentLoop.parse",
        "old(*a) if a[0].engine.engine.version < 1 else []",
    ),
    # -- rows
    "images in a column of another name": Fault("does not see what the training", task="photo"),
    "an evaluation on training rows": Fault("prompt of a training row", task="leak"),
    "other rows at a resume": Fault(
        "had other flags or contents: the training rows", task="few", resumed=True
    ),
    "prompts lost at a resume": Fault(
        "trained twice, or lost", POOL, "old(a[0], a[1], a[2] + 8)", resumed=True
    ),
    # -- the optimiser
    "an optimiser whose states are lost at a resume": Fault(
        "Adam's states are lost",
        "flatrl.checkpoints.load_checkpoint",
        "(old(*a), a[0].policy.optimizer.state.clear())",
        resumed=True,
    ),
    "a learning rate of 0 after a resume": Fault(
        "the learning rate is 0", "train.Learner.set_lr", "0.0", resumed=True
    ),
    "an update that blows up": Fault(
        "the gradient norm is", "train.policy_objective", "[(x := old(*a))[0] * float('inf'), x[1]]"
    ),
}


# ---------------------------------------------------------------- planting


def repeat_first(token_ids: list[int]) -> list[int]:
    """Returns other tokens of the same text's length: the second one is the first again."""
    return token_ids[:1] * 2 + token_ids[2:]


def plant(fault: Fault) -> None:
    """Replaces the function of a fault in this process."""
    import torch

    if not fault.place:  # a flag, or a part of the task
        return
    place, _, name = fault.place.rpartition(".")
    owner = pkgutil.resolve_name(place)
    names = {"replace": replace, "repeat_first": repeat_first, "torch": torch}
    body = eval(f"lambda old, a, k, call, seen: {fault.body}", names)
    found = getattr(owner, name)
    old = found.fget if isinstance(found, property) else found
    calls = itertools.count(1)
    seen: dict = {}

    def changed(*a, **k):
        return body(old, a, k, next(calls), seen)

    setattr(owner, name, property(changed) if isinstance(found, property) else changed)


def run(flags: list[str], task: str = "", fault: str = "none") -> subprocess.CompletedProcess:
    """Runs train.py, with a fault planted if one is named."""
    return subprocess.run(
        [sys.executable, __file__, "--plant", fault, "--", *flags],
        cwd=REPO,
        env={**os.environ, "ZOO_TASK": task},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run_with(name: str, folder: Path, flags: list[str]) -> str:
    """Returns the output of a run with a fault planted."""
    fault = FAULTS[name]
    base = (
        f"--task {__file__} --output_dir {folder}/run --lr 0.003 --prompts_per_step 8 "
        "--group_size 4 --eval_every 0 --save_every 2"
    ).split()
    if fault.model:
        models.build(fault.model, folder / "model")
        base += ["--model", f"{folder}/model"]
    steps = 3
    if fault.resumed:
        run([*base, "--num_steps", "2", *flags])
        base.append("--resume")
        steps = 4
    more = [*fault.flags.split(), *flags]
    return run([*base, "--num_steps", str(steps), *more], fault.task, name).stdout


# ---------------------------------------------------------------- the table


def print_faults(names: list[str], flags: list[str]) -> int:
    """Plants each fault and prints the line that names it; returns how many have none."""
    n_unnamed = 0
    print("| fault | named by the line |\n| --- | --- |")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            output = run_with(name, Path(folder), flags)
        lines = [line.strip() for line in output.splitlines() if FAULTS[name].named in line]
        if not lines:
            n_unnamed += 1
            print(f"| {name} | NOT NAMED |\n{output[-3000:]}", flush=True)
            continue
        text = lines[0].replace(folder, "").removeprefix("warning: ")
        print(f"| {name} | {text[:160]} |", flush=True)
    print(f"{len(names) - n_unnamed} of {len(names)} named")
    return n_unnamed


def main() -> None:
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    flags = words[at + 1 :]  # of train.py
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    only = parser.add_argument("--only", nargs="+", default=[*FAULTS], choices=FAULTS)
    only.metavar = "FAULT"
    only.help = ", ".join(FAULTS)
    parser.add_argument("--plant", help=argparse.SUPPRESS)
    options = parser.parse_args(words[:at])
    if options.plant:
        import train

        if options.plant != "none":
            plant(FAULTS[options.plant])
        try:
            train.main(train.parse_args(flags))
        except BadInput as error:
            sys.exit(f"train.py: error: {error}")
    else:
        sys.exit(print_faults(options.only, flags) > 0)


if __name__ == "__main__":
    main()
