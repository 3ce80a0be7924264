"""Plants faults that have spoilt somebody's training in small real runs, and says which line of
the output names them.

    python bench/zoo.py [--only "reward NaN" "mask shifted"]
    python bench/zoo.py --clean            # no fault: ten examples, and the warnings of each (there should be none)
    python bench/zoo.py --list

A fault is at most three lines of Python that change flatrl from outside, or flags, or a bad
part of a task; docs/zoo.md has the table. Each run has three steps (one with a resume has four).
The line has to come within three steps after the fault began. This file is the task of the runs
too: the calculator's, with agent loops and rewards that the environment variable ZOO_TASK picks.
"""

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import common  # noqa: F401
import models
from common import REPO

from agent_loop import AgentLoopBase, SingleTurnLoop, register
from examples import calculator
from examples.calculator import SYSTEM_PROMPT, TOOLS, build_model  # noqa: F401

# ---------------------------------------------------------------- the task, and its bad parts

ZOO_TASK = os.environ.get("ZOO_TASK", "")
KEPT = {}  # with ZOO_TASK=last, the reward that everybody gets


def load(split: str) -> list[dict]:
    """Returns the calculator's questions; with ZOO_TASK=leak those of training in both splits, with
    few eight long ones, which come again in every step."""
    rows = calculator.load("train" if ZOO_TASK == "leak" else split)[:64]
    if ZOO_TASK == "few":
        rows = rows[:8]
        for row in rows:
            row["prompt"][0]["content"] *= 8
    return rows


def reward(output, row: dict) -> float:
    """Returns the calculator's reward, or what ZOO_TASK spoils it to."""
    if ZOO_TASK == "constant":
        return 0.5
    if ZOO_TASK == "nan":
        return float("nan")
    if ZOO_TASK == "last":
        return KEPT.setdefault("reward", calculator.reward(output, row))
    if ZOO_TASK == "length":
        return float(output.truncated)
    right = calculator.reward(output, row)
    if ZOO_TASK == "shaped":
        return right - 0.001 * random.random()
    return right


@register("two_outputs")
class TwoOutputs(AgentLoopBase):
    """Two answers as the outputs of one rollout. The first one's own reward is 1, the second's
    -1, as in a game whose sides were not named as units."""

    async def run(self, sampling_params, **row):
        first = await SingleTurnLoop.run(self, sampling_params, **row)
        second = await SingleTurnLoop.run(self, sampling_params, **row)
        if ZOO_TASK == "sides":
            first.reward = 1.0
            second.reward = -1.0
        return [first, second]


# ---------------------------------------------------------------- the faults

DISAGREE = "engine and trainer disagree"
# What several of the faults below begin with.
SENT = "sent = train.named_weights"
ONCE = f"{SENT}; first = []"
EXPERTS = "--lr 0.01 --entropy_coef 0.1 --max_response_tokens 16"  # the random model's rewards are all 0
IMAGES = "--task tests/vision_task.py --agent looker --max_prompt_tokens 96 --max_response_tokens 64 --group_size 2"


@dataclass
class Fault:
    """A fault: what is planted, and the text that names it in the output.

    code: lines that run before train.main, with the modules of flatrl at hand; flags: of
    train.py; task: the value of ZOO_TASK; resumed: a run without the fault comes first, and the
    fault is in the one that goes on from its checkpoint; model: a random one of bench/models.py's
    in place of the calculator's."""

    named: str
    code: str = ""
    flags: str = ""
    task: str = ""
    resumed: bool = False
    model: str = ""


FAULTS = {
    # -- the weights of the engine
    "weights never sent again": Fault(DISAGREE, f"""{ONCE}
train.named_weights = lambda policy: first or first.extend((n, t.clone()) for n, t in sent(policy)) or first"""),
    "keys of old weights in the cache": Fault(DISAGREE, """import vllm.v1.core.block_pool as pool
pool.BlockPool.reset_prefix_cache = lambda blocks: True""",
        "--engine_args {\"block_size\":32} --entropy_coef 0.1", "few"),
    "a LoRA sync that samples the base": Fault(DISAGREE, f"""{ONCE}
train.named_weights = lambda policy: first or first.extend((n, t.clone()) for n, t in sent(policy)) or first""",
        "--lora_rank 4 --lr 0.1"),
    "a layer not sent": Fault("layers.1", f"""{SENT}
train.named_weights = lambda policy: ((n, t) for n, t in sent(policy) if ".layers.1." not in n)"""),
    "a layer sent with its old weights": Fault(DISAGREE, f"""{SENT}; first = {{}}
train.named_weights = lambda policy: (
    (n, first.setdefault(n, t.clone()) if ".layers.1." in n else t) for n, t in sent(policy))"""),
    "a tied head not sent again": Fault(DISAGREE, f"""{SENT}; first = {{}}
train.named_weights = lambda policy: (
    (n, first.setdefault(n, t.clone()) if "embed" in n else t) for n, t in sent(policy))"""),
    "an engine that drifts from step 3 on": Fault(
        f"{DISAGREE}: their logprobs of step 3", f"""{SENT}; n = []
train.named_weights = lambda policy: n.append(1) or (
    (name, t * (1 + 0.1 * (len(n) > 2))) for name, t in sent(policy))"""),
    "an expert not sent": Fault("layers.1.mlp.experts", f"""{SENT}
train.named_weights = lambda policy: ((n, t) for n, t in sent(policy) if ".layers.1.mlp.experts.2." not in n)""",
        EXPERTS, model="qwen3_moe"),
    "an expert sent with its old weights": Fault(DISAGREE, f"""{SENT}; first = {{}}
train.named_weights = lambda policy: (
    (n, first.setdefault(n, t.clone()) if ".experts.2." in n else t) for n, t in sent(policy))""",
        EXPERTS, model="qwen3_moe"),
    # -- images
    "images that the engine does not get": Fault("disagree about the tokens of the images", """import rollout
generate = rollout.Engine.generate
rollout.Engine.generate = lambda self, **call: generate(self, **call | {"image_data": None})""", IMAGES),
    "images that the trainer does not get": Fault(DISAGREE, """collate = data.collate
data.collate = lambda *a: {name: x for name, x in collate(*a).items() if name != "images"}""", IMAGES),
    "images that a loop leaves out": Fault("the ids have", """output = agent_loop.Trajectory.output
agent_loop.Trajectory.output = lambda self: dataclasses.replace(output(self), images=[])""", IMAGES),
    # -- what is scored
    "temperature in the engine alone": Fault(DISAGREE, """init = train.Policy.__init__
train.Policy.__init__ = lambda self, args, *more: init(
    self, dataclasses.replace(args, temperature=1.0), *more)""",
        "--temperature 0.5"),
    "top-p samples scored as full ones": Fault(DISAGREE, flags="--sampling_args {\"top_p\":0.7}"),
    "a mask shifted by one": Fault("response_mask is wrong", """collate = data.collate
data.collate = lambda *a: (b := collate(*a)) | {"response_mask": b["response_mask"].roll(1, 1)}"""),
    "turns tokenised again": Fault(DISAGREE, """add = agent_loop.Trajectory.add_sampled
agent_loop.Trajectory.add_sampled = lambda self, out, **more: add(self, dataclasses.replace(
    out, token_ids=out.token_ids[:1] + [out.token_ids[0]] + out.token_ids[2:]), **more)"""),
    "a stop token that is not trained": Fault("response_mask is wrong", """add = agent_loop.Trajectory.add_sampled
agent_loop.Trajectory.add_sampled = lambda self, out, **more: (
    add(self, out, **more), self.response_mask.__setitem__(-1, 0))"""),
    "a loop that leaves out the versions": Fault("where the mask is 1, has -1", """output = agent_loop.Trajectory.output
agent_loop.Trajectory.output = lambda self: dataclasses.replace(
    output(self), response_versions=[-1] * len(self.response_ids))"""),
    "two BOS tokens": Fault("does not give a prompt back", """tokenise = agent_loop._tokenise_prompt
agent_loop._tokenise_prompt = lambda tokenizer, text: [1] + tokenise(tokenizer, text)"""),
    # -- credit
    "advantages of another row": Fault("do not follow the rewards", """estimate = train.estimate_advantages
train.estimate_advantages = lambda *a: estimate(*a).roll(1, 0)"""),
    "advantages of the wrong sign": Fault("do not follow the rewards", """estimate = train.estimate_advantages
train.estimate_advantages = lambda *a: -estimate(*a)"""),
    "both sides of a game as one unit": Fault(
        "name a `unit` for each", flags="--agent two_outputs", task="sides"),
    "a rollout weighed by its outputs": Fault(
        "weighs more than one of a single output", "data.unit_tokens = lambda mask, index: mask.sum(-1)",
        "--agent two_outputs --algo gspo"),
    "dynamic sampling on a shaped reward": Fault(
        "turn rewards nearly always differ", flags="--algo dapo --filter_metric total",
        task="shaped"),
    # -- rewards
    "a reward that is constant": Fault("taught nothing", task="constant"),
    "a reward that is NaN": Fault("must be a finite number", task="nan"),
    "the reward of one rollout for all": Fault("taught nothing", task="last"),
    "truncated answers rewarded": Fault(
        "best-paid answers were cut off", flags="--max_response_tokens 12", task="length"),
    "aborted answers trained": Fault("the engine aborted answers", """add = agent_loop.Trajectory.add_sampled
agent_loop.Trajectory.add_sampled = lambda self, out, **more: (
    setattr(out, "stop_reason", "abort"), add(self, out, **more))"""),
    # -- tools
    "tool calls that are never parsed": Fault("look like tool calls", flags="--tool_parser pythonic"),
    "tool calls that die out": Fault("rollout/tool_calls has fallen", """parse = agent_loop.ToolAgentLoop.parse
agent_loop.ToolAgentLoop.parse = lambda self, *a: parse(self, *a) if self.engine.engine.version < 1 else []"""),
    # -- rows
    "an evaluation on training rows": Fault("have the prompt of a training row", task="leak"),
    "prompts lost at a resume": Fault("are trained twice, or lost", """pool = train.training_pool
train.training_pool = lambda run, step, first: pool(run, step, first + 8)""", resumed=True),
    "prompts trained twice at a resume": Fault("are trained twice, or lost", """pool = train.training_pool
train.training_pool = lambda run, step, first: pool(run, step, first - 8)""", resumed=True),
    # -- the optimiser
    "an optimiser whose states are lost at a resume": Fault("Adam's states are lost", """load = train.load_checkpoint
train.load_checkpoint = lambda run, *a: (load(run, *a), run.policy.optimizer.state.clear())""", resumed=True),
    "a learning rate of 0 after a resume": Fault(
        "the learning rate is 0", "train.Learner.set_lr = lambda learner, step: 0.0", resumed=True),
    "bfloat16 weights that swallow updates": Fault(
        "bfloat16", "train.Policy.float = lambda policy: policy.to(torch.bfloat16)"),
    "an update that blows up": Fault("the gradient norm is", """objective = train.policy_objective
train.policy_objective = lambda *a: [(x := objective(*a))[0] * float("inf"), x[1]]"""),
}  # fmt: skip


# Examples in which nothing is wrong: no line may say that something is.
CLEAN = """--task examples/calculator.py
--task examples/calculator.py --algo ppo
--task examples/calculator.py --max_staleness 2 --oversample 1.5
--task examples/curriculum.py
--task examples/hints.py --algo opsd
--task examples/tree.py --agent tree
--task examples/subagents.py --agent subagents
--task examples/compaction.py --agent compaction --max_prompt_tokens 52 --max_response_tokens 12
--task examples/sokoban.py
--task examples/nim.py --agent self_play --max_response_tokens 4 --lr 1e-3""".splitlines()


def clean(flags: list[str]) -> int:
    """Runs six steps of each of CLEAN, and prints the warnings of each; returns how many there are."""
    n_warnings = 0
    print("| run of six steps | warnings |\n| --- | --- |")
    for command in CLEAN:
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, "train.py", *command.split(), "--num_steps", "6", "--prompts_per_step", "16",
                     "--eval_every", "3", "--show_every", "0", "--output_dir", f"{folder}/run", *flags]  # fmt: skip
            done = subprocess.run(words, cwd=REPO, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        lines = [line for line in done.stdout.splitlines() if re.search("warning|Error|error:", line, re.IGNORECASE)]
        n_warnings += len(lines) + bool(done.returncode)
        print(f"| `{command}` | {len(lines) or 'none'}, exit code {done.returncode} |", *lines, sep="\n", flush=True)
    return n_warnings


# ---------------------------------------------------------------- planting


def plant(name: str, flags: list[str]) -> None:
    """Plants a fault in this process, and runs train.py's main."""
    import dataclasses

    import torch

    import agent_loop
    import data
    import losses
    import rollout
    import train
    from flatrl import checkpoints

    modules = dict(agent_loop=agent_loop, data=data, losses=losses, rollout=rollout, train=train,
                   checkpoints=checkpoints, dataclasses=dataclasses, torch=torch)  # fmt: skip
    exec(FAULTS[name].code if name else "", modules)
    try:
        train.main(train.parse_args(flags))
    except agent_loop.BadInput as error:
        sys.exit(f"train.py: error: {error}")


def run(name: str, steps: int, folder: Path, task: str = "", flags: tuple = ()) -> str:
    """Returns what a run with a planted fault ("": none) prints."""
    command = [sys.executable, __file__, "--plant", name, "--", "--task", __file__, "--num_steps", str(steps),
               "--output_dir", str(folder), "--lr", "0.003", "--prompts_per_step", "8", "--group_size", "4",
               "--eval_every", "0", "--show_every", "0", "--save_every", "2", *flags]  # fmt: skip
    done = subprocess.run(command, cwd=REPO, env={**os.environ, "ZOO_TASK": task}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    return done.stdout


def named(fault: Fault, output: str) -> str | None:
    """Returns the line of the output that names the fault; None if there is none."""
    lines = [line.strip() for line in output.splitlines() if fault.named in line]
    return lines[0] if lines else None


def step_of(line: str, output: str) -> str:
    """Returns the step at which a line was printed: by its own words, or by the table above it."""
    own = re.search(r"\bstep (\d+)", line)
    if own:
        return own[1]
    finished = re.findall(r"^ +(\d+)/\d+ ", output[: output.index(line)], re.MULTILINE)
    return str(int(finished[-1]) + 1) if finished else "start"


def main() -> None:
    own, flags = common.split_flags(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(FAULTS), help="names of faults")
    parser.add_argument("--clean", action="store_true", help="run examples without a fault, and count warnings")
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    parser.add_argument("--plant", help="a fault to plant in this process, a run of train.py; flags after --")
    options = parser.parse_args(own)
    if options.plant is not None:
        plant(options.plant, flags)
        return
    if options.clean:
        sys.exit(clean(flags) > 0)
    if options.list:
        print("\n".join(FAULTS))
        return
    unnamed = []
    print("| fault | named at step | by the line |\n| --- | --- | --- |")
    for name in options.only:
        fault = FAULTS[name]
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent, "run")
            more = (*fault.flags.split(), *flags)
            if fault.model:
                models.build(fault.model, Path(parent, "model"))
                more = (*more, "--model", f"{parent}/model")
            steps = 3
            if fault.resumed:
                run("", 2, folder, flags=tuple(flags))
                more = (*more, "--resume")
                steps = 4
            output = run(name, steps, folder, fault.task, more)
        line = named(fault, output)
        if line is None:
            unnamed.append(name)
            print(f"| {name} | NOT NAMED | |\n{output[-3000:]}", flush=True)
        else:
            text = line.replace(parent, "").removeprefix("warning: ")
            print(f"| {name} | {step_of(line, output)} | {text[:160]} |", flush=True)
    print(f"{len(options.only) - len(unnamed)} of {len(options.only)} named")
    sys.exit(bool(unnamed))


if __name__ == "__main__":
    main()
