"""flatrl: multi-turn reinforcement learning of language models. `main`, at this file's end,
is the whole algorithm: begin to read there.

    accelerate launch train.py                               # the built-in task, minutes on CPU
    accelerate launch train.py --algo dapo --clip_high 0.3   # a preset; its flags stay yours
    accelerate launch train.py --model Qwen/Qwen2.5-0.5B-Instruct --task my_task.py
    torchrun --nproc_per_node 2 train.py                      # two ranks on a CPU

One process per GPU holds a vLLM engine and the policy, and switches between rollout and
update. This file has the flags, the networks, one optimiser step and evaluation."""

import os

if __name__ == "__main__":  # before torch, which takes seconds
    if os.environ.get("RANK", "0") == "0":
        print("flatrl: loading torch, transformers and vLLM", flush=True)
    import gc
    gc.set_threshold(50_000)  # looking for garbage takes a tenth of the imports' time
    # Ranks that share cores with busy-waiting threads crawl. On a GPU vLLM sets it.
    if not os.path.exists("/dev/nvidiactl"):
        _cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores)))
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import contextlib
import json
import math
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Literal

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

import data
import losses
from agent_loop import BadInput, agent_loop_class, tool_parser, total_reward
from flatrl import notices
from flatrl.bad_input import need, refusing
from flatrl.checkpoints import (
    best_checkpoint, check_changes, claim_for_all_hosts, load_checkpoint, prepare_folder,
    save_checkpoint, save_policy)
from flatrl.devices import device_defaults, move, shard, start_processes
from flatrl.files import absolute
from flatrl.flags import (
    DISCOUNT, POSITIVE, SHARE, Range, check_each_flag, check_value, flag, parse_flags)
from flatrl.hints import require_hints, seen_by
from flatrl.layers import (
    PROBE, add_adapters, choose_attention, prepare_layers, try_device, without_adapters)
from flatrl.log import Log, SilentLog, read_rollouts, replay_file, steps_to_replay
from flatrl.memory import fill_by_plan
from flatrl.metrics import describe_eval, mean, tokens_to_compare, worst_token
from flatrl.models import (
    check_teacher, checkpoint_weights, from_pretrained, load_tokenizer, stop_token_ids,
    task_model, vocab_size, whole)
from flatrl.processes import (
    Background, Stop, Stopped, all_sum, gather_unless_stopped, on_main, run_as_script)
from flatrl.terminal import Bar, quiet_libraries, shown
from flatrl.vision import Vision
from flatrl.vllm_engine import FIXED_ARGUMENTS, NEUTRAL_SAMPLING, check_arguments, check_model
from rollout import Engine, Phase, Pool, grade, rollout, seed_of, training_pool

# The flags that --algo sets: the first row's, changed by its own row. The user's flags win.
PRESETS: dict[str, dict] = {
    "grpo": dict(adv_estimator="grpo", whiten_advantages=False, policy_loss="ppo",
                 clip_low=0.2, clip_high=0.2, loss_agg="token-mean", kl_coef=0.0,
                 kl_in="loss", kl_kind="k3", overlong_buffer=0.0, max_gen_batches=1,
                 gamma=1.0, turn_discount=1.0, reward_coef=1.0, hints=False),
    "ppo": dict(adv_estimator="gae", whiten_advantages=True),
    "dapo": dict(clip_high=0.28, overlong_buffer=0.2, max_gen_batches=10),
    "drgrpo": dict(adv_estimator="drgrpo", loss_agg="seq-mean-token-sum-norm"),
    "rloo": dict(adv_estimator="rloo", policy_loss="reinforce", loss_agg="seq-mean-token-sum"),
    "reinforce_pp": dict(adv_estimator="reinforce_pp", whiten_advantages=True,
                         kl_coef=0.001, kl_in="reward", kl_kind="k1"),
    "reinforce_pp_baseline": dict(adv_estimator="drgrpo", whiten_advantages=True,
                                  kl_coef=0.001, kl_kind="k2"),
    "remax": dict(adv_estimator="remax", policy_loss="reinforce", loss_agg="seq-mean-token-sum"),
    "opo": dict(adv_estimator="opo", policy_loss="reinforce", loss_agg="seq-mean-token-sum"),
    "gspo": dict(policy_loss="gspo", clip_low=3e-4, clip_high=4e-4, loss_agg="seq-mean-token-mean"),
    "gmpo": dict(policy_loss="gmpo", clip_low=0.4, clip_high=0.4, loss_agg="seq-mean-token-mean"),
    "cispo": dict(policy_loss="cispo", clip_low=1.0, clip_high=0.28),
    "sapo": dict(policy_loss="sapo", clip_low=1.05, clip_high=1.0, loss_agg="seq-mean-token-mean"),
    "gigpo": dict(adv_estimator="gigpo", turn_discount=0.95),
    "opd": dict(adv_estimator="reinforce_pp", gamma=0.0, reward_coef=0.0, kl_coef=1.0,
                kl_in="reward", kl_kind="k1"),
    "sft": dict(adv_estimator="reinforce_pp"),
}
PRESETS["opsd"] = PRESETS["opd"] | {"hints": True}

# ---------------------------------------------------------------- flags, with their rules


def preset(help: str, allowed=(), only: str = ""):
    """A flag whose default comes from PRESETS[--algo]."""
    return flag(None, f"[preset] {help}", allowed, only)


@dataclass
class Args:
    """All flags: a field is a flag, with its help text and the rules of its values."""
    # what is trained
    task: str = flag(
        "examples/calculator.py", "Python file with load(split), reward(output, row)")
    model: str | None = flag(
        None, "hub name or folder; default: what the task's build_model makes")
    train_files: list[str] | None = flag(
        None, "parquet, jsonl or csv files, folders of datasets, "
        "hub names NAME:SPLIT: instead of load('train')")
    val_files: list[str] | None = flag(None, "the same instead of load('val')")
    prompt_key: str = flag("prompt", "the rows' column with chats or texts to answer")
    replay: str | None = flag(
        None, "output_dir of another run: train on its rollouts, no engine",
        only="!hints")
    rollout_only: bool = flag(False, "write rollouts of the model as it is, and don't train",
                              only="!replay")
    output_dir: str | None = flag(None, "default: runs/<name of the task file>")
    seed: int = flag(0, "all randomness comes from it and the step")
    dtype: str = flag("auto", "of the engine and of matrix products; auto: bfloat16 on CUDA",
                      ("auto", "float32", "bfloat16"))
    allow_mismatch: bool = flag(
        False, "train even if engine and trainer disagree about the logprobs of the sampled tokens",
        only="!replay")
    trust_remote_code: bool = flag(False, "run Python code that comes with the model")
    # algorithm
    algo: str = flag("grpo", "a preset for the flags marked [preset]", tuple(PRESETS))
    num_steps: int = flag(40, "training steps: rollout + update")
    prompts_per_step: int = flag(32, "prompts in a rollout, over all ranks", POSITIVE)
    group_size: int = flag(8, "trajectories per prompt", POSITIVE)
    prompts_per_mini_batch: int | None = flag(
        None, "an optimiser step learns from all trajectories of so many prompts, drawn at "
        "random; default: all prompts (on-policy)", POSITIVE)
    epochs: int = flag(1, "passes over each rollout", POSITIVE)
    # advantages
    adv_estimator: str = preset("advantage estimator", [*losses.ESTIMATORS])
    whiten_advantages: bool = preset("to mean 0 and variance 1 over the batch's tokens")
    gamma: float = preset("discount per token", DISCOUNT, "adv_estimator=gae|reinforce_pp")
    turn_discount: float = preset("discount per turn, beside gamma", DISCOUNT,
                                  "adv_estimator=gae|reinforce_pp|gigpo")
    lam: float = flag(1.0, "gae: its lambda", DISCOUNT, "adv_estimator=gae")
    # objective
    policy_loss: str = preset("policy-gradient objective", [*losses.OBJECTIVES])
    clip_low: float = preset(
        "lower clip of the ratio, 1 - clip_low; gmpo: of its logarithm; sapo: "
        "temperature where A <= 0", only="policy_loss!=reinforce")
    clip_high: float = preset(
        "upper clip of the ratio, 1 + clip_high; gmpo: of its logarithm; "
        "sapo: temperature where A > 0", only="policy_loss!=reinforce")
    clip_c: float = flag(0.0, "dual clip, the largest ratio where A < 0 (3 is usual); 0: off",
                         Range("be 0, or exceed 1", lambda x: x == 0 or x > 1),
                         "policy_loss=ppo|gspo")
    loss_agg: str = preset("how per-token losses become one number", losses.AGGREGATIONS)
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    mask_truncated: bool = flag(
        False, "no loss on trajectories cut off by a length or turn limit")
    imitation_coef: float = flag(
        1.0, "weight of -log pi of demonstrations, beside what is sampled", POSITIVE)
    imitation_steps: int | None = flag(
        None, "first steps, in which rows' demonstrations are played; default: all")
    rollout_correction: str = flag(
        None, "importance weights from the engine's logprobs to the trainer's; default: none, "
        "with --max_staleness icepop from 0 (decoupled PPO) "
        f"({' | '.join(losses.ROLLOUT_CORRECTIONS)}, or several: tis,geo_mask)")
    correction_low: list[float] = flag(
        None,
        f"least ratio kept; of several kinds, one each; low, high: {losses.ROLLOUT_CORRECTIONS}",
        only="rollout_correction=icepop|seq_mask|geo_mask|veto")
    correction_high: list[float] = flag(
        None, "largest importance ratio: clamped (*tis) or dropped (the others)",
        only="rollout_correction")
    # reward
    kl_coef: float = preset("weight of the KL to the reference; 0: none is loaded")
    ref_model: str | None = flag(
        None, "the reference, a teacher of the same tokenizer; default: the starting model",
        only="kl_coef !hints")
    hints: bool = preset("the reference is the policy itself, told a row's `hint`", only="kl_coef")
    reward_coef: float = preset("weight of the task's reward, beside the KL in it",
                                only="kl_in=reward")
    kl_in: str = preset("a term of the objective, or token by token of the reward",
                        ("loss", "reward"), "kl_coef")
    kl_kind: str = preset("k1 is for the reward: a loss of no gradient", losses.KL_ESTIMATES,
                          "kl_coef")
    kl_target: float = flag(
        0.0, "adapt kl_coef to hold this KL per token (0.1 is usual); 0: off",
        only="kl_in=reward kl_coef")
    kl_horizon: int = flag(
        10_000, "trajectories over which kl_coef adapts", POSITIVE, "kl_target")
    reward_clip: float = flag(
        0.0, "clip the task's reward to [-c, c]; turn rewards stay; 0: off")
    overlong_buffer: float = preset("last share of max_response_tokens, over which the reward "
                                    "falls linearly by up to 1 (DAPO: 0.2); 0: off", DISCOUNT)
    max_gen_batches: int = preset(
        "dynamic sampling: groups without signal are replaced by fresh prompts, until so many "
        "times prompts_per_step are drawn; 1: off", POSITIVE)
    filter_metric: str = flag(
        "outcome", "what must differ in a group: outcome | total (with turn "
        "rewards) | a key of the reward", only="max_gen_batches!=1")
    # critic (gae)
    value_clip: float = flag(0.5, "clip of the value update", POSITIVE, "adv_estimator=gae")
    critic_warmup: int = flag(0, "first steps, in which only the critic learns",
                              only="adv_estimator=gae")
    critic_lr: float | None = flag(None, "default: 1e-5, for the task's own tiny model 1e-3",
                                   only="adv_estimator=gae")
    # optimiser
    lr: float | None = flag(None, "AdamW; default: 1e-6, a task's own model 3e-4; LoRA: x 10")
    lora_rank: int = flag(0, "LoRA by peft: train adapters of this rank alone; 0: all weights")
    lora_args: str = flag(
        "{}", '{"target_modules":"all-linear", "lora_alpha":32}', (), "lora_rank")
    lr_schedule: str = flag(
        "constant", "down to 0 at num_steps", ("constant", "linear", "cosine"))
    warmup_steps: int = flag(0, "steps of linear warm-up")
    weight_decay: float = flag(0.0, "AdamW")
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm", POSITIVE)
    tokens_per_micro_batch: int = flag(
        16384, "tokens in one pass of a rank; on CUDA by the plan, docs/scaling.md", POSITIVE)
    gradient_checkpointing: bool = flag(
        None, "recompute activations; a third slower; on CUDA by the plan")
    shard: Literal[False, True, "hybrid"] = flag(
        False, "FSDP2: cut parameters, gradients and optimiser states over all ranks; hybrid: "
        "over those of a host; so it is in bfloat16 on CUDA, and by accelerate's FSDP config",
        nargs="?", const=True)
    offload: str = flag(
        "none", "to host memory while the engine is awake: Adam's states; all: "
        "critic and reference, too", ("none", "optimizer", "all"))
    # trajectories
    agent: str | None = flag(
        None, "agent loop; default: tool_agent with TOOLS or INTERACTIONS, else single_turn")
    temperature: float = flag(
        1.0, "of sampling in training; the trainer's logprobs use it too",
        Range("be greater than 0, vLLM's least is 0.01", lambda x: x >= 0.01))
    max_prompt_tokens: int = flag(512, "longer prompts are filtered out and counted", POSITIVE)
    max_response_tokens: int = flag(
        128, "budget of a trajectory: sampled, tool and user tokens together", POSITIVE)
    max_model_len: int | None = flag(
        None, "the engine's window; default: max_prompt_tokens + max_response_tokens", POSITIVE)
    max_assistant_turns: int = flag(8, "then it ends with stop reason max_turns; 0: no limit")
    max_user_turns: int = flag(0, "answers of a simulated user; 0: no limit")
    tool_parser: str = flag("hermes", "tool-call format: any of vLLM's parsers")
    chat_template_args: str = flag(
        "{}", 'variables of the template: {"enable_thinking": false}')
    think_tags: str = flag("<think> </think>", "around reasoning, in which no tool is called")
    tool_timeout: float = flag(30.0, "seconds for one tool call", POSITIVE)
    reward_timeout: float = flag(300.0, "seconds, else the trajectory is dropped; 0: no limit")
    trajectory_timeout: float = flag(
        0.0, "seconds for a whole trajectory, which ends as it is "
        "then; with --max_staleness updates count; 0: no limit")
    max_parallel_calls: int = flag(
        8, "tool calls of one turn that are executed; the model is told about the others", POSITIVE)
    max_tool_response_tokens: int = flag(256, "longer tool responses are cut", POSITIVE)
    tool_response_truncate_side: str = flag(
        "middle", "what a cut response keeps; middle: both ends", ("left", "middle", "right"))
    sampling_args: str = flag("{}", 'more for vLLM: {"stop": ["</answer>"]}', only="!replay")
    # asynchronous rollout (AReaL)
    max_staleness: int = flag(
        0, "a rollout ends when its batch is full, the rest goes on after "
        "the update, so many versions behind at most",
        only="!rollout_only")
    oversample: float = flag(1.0, "prompts under way, a multiple of prompts_per_step; without "
                             "staleness it would favour short answers",
                             Range("be at least 1", lambda x: x >= 1), "max_staleness")
    # engine
    max_images: int = flag(
        8, "images in one trajectory: the prompt's and those of tools", POSITIVE)
    tp: int = flag(1, "ranks in a row that share one engine (tensor parallelism)", POSITIVE,
                   "!replay")
    max_num_seqs: int = flag(
        256, "trajectories that one engine decodes at once; on CUDA by the plan", POSITIVE)
    max_concurrent: int = flag(
        1024, "trajectories under way on one rank; one that waits for a tool decodes nothing",
        POSITIVE)
    gpu_memory_utilization: float = flag(
        0.5, "the engine's share of the GPU while awake", SHARE)
    sleep_level: int = flag(
        2, "while training: 1 keeps the engine's weights in host memory, 2 drops them", (1, 2))
    engine_args: str = flag(
        "{}", "more arguments of vllm.LLM, as a JSON object", only="!replay")
    deterministic: bool = flag(False, "same digits in every run on a CPU; slower with tools",
                               only="!max_staleness")
    # evaluation, checkpoints, log
    eval_every: int = flag(10, "steps between evaluations; 0: only before training and after")
    eval_samples: int = flag(
        1, "trajectories of a validation row: eval/pass@1 to pass@N", POSITIVE,
        "eval_temperature")
    eval_temperature: float = flag(
        None, "default: 0, greedy; several --eval_samples: training's")
    eval_top_p: float = flag(1.0, "nucleus sampling in evaluation", SHARE)
    eval_sampling_args: str = flag("{}", "like --sampling_args, in evaluation")
    save_every: int = flag(20, "steps between checkpoints; 0: none but at the end")
    keep_checkpoints: int = flag(2, "older ones are deleted", POSITIVE)
    resume: bool = flag(False, "go on from the latest whole checkpoint in output_dir")
    resume_with_changes: bool = flag(
        False, "... although flags differ from those of the run: they take effect from here on",
        only="resume")
    show_every: int = flag(20, "print one whole trajectory every so many steps; 0: never")
    wandb_project: str | None = flag(
        None, "log to Weights & Biases (WANDB_MODE=offline works)")
    tracker: str = flag(
        "wandb", "or trackio, where wandb_project goes then", ("wandb", "trackio"),
        "wandb_project")

    def __post_init__(self):
        self.fill(self.preset_values())
        self.fill({"rollout_correction": "icepop" if self.max_staleness else "none",
                   "eval_temperature": self.temperature if self.eval_samples > 1 else 0.0})
        self.fill(self.correction_bounds())

    def fill(self, values: dict):
        """Sets the flags that are still None to these values."""
        for name, value in values.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def preset_values(self) -> dict:
        """Returns the flags that --algo sets. A --policy_loss other than the preset's brings
        the clip bounds of the preset of its name."""
        base = PRESETS["grpo"]
        values = base | PRESETS.get(self.algo, {})
        if self.policy_loss not in (None, values["policy_loss"]):
            other = base | PRESETS.get(self.policy_loss, {})
            values |= {name: other[name] for name in ("clip_low", "clip_high")}
        return values

    def correction_bounds(self) -> dict:
        """Returns the default bounds: {"correction_low": ..., "correction_high": ...}.

        Each is a number, or a tuple of one for each kind of --rollout_correction. With
        --max_staleness the lower bound is 0: a small ratio is no reason to drop a token."""
        kinds = self.rollout_correction.split(",")
        bounds = [losses.ROLLOUT_CORRECTIONS.get(kind, (0.0, 1.0)) for kind in kinds]
        if len(bounds) == 1:
            low, high = bounds[0]
        else:
            low, high = zip(*bounds)
        if self.max_staleness:
            low = 0.0
        return {"correction_low": low, "correction_high": high}

    def sampling(self, validate: bool = False) -> dict:
        """Returns vLLM's sampling parameters: the temperature (in an evaluation top_p,
        too), and those of --sampling_args or --eval_sampling_args.

        A `stop` is always a list; max_tokens is left to the agent loops."""
        if validate:
            parameters = {"temperature": self.eval_temperature, "top_p": self.eval_top_p}
            parameters |= json.loads(self.eval_sampling_args)
        else:
            parameters = {"temperature": self.temperature} | json.loads(self.sampling_args)
        # vLLM takes a text or a list; agent loops may count on a list.
        if isinstance(parameters.get("stop"), str):
            parameters["stop"] = [parameters["stop"]]
        return parameters

    @property
    def quantized(self) -> bool:
        """True if --engine_args asks vLLM to quantise the engine's weights."""
        return '"quantization"' in self.engine_args

    @property
    def window(self) -> int:
        """The most tokens of a trajectory, its prompt included."""
        return self.max_model_len or self.max_prompt_tokens + self.max_response_tokens

    @property
    def estimator_takes(self) -> list[str]:
        """What the function of --adv_estimator takes, see losses.estimator."""
        return losses.ESTIMATORS[self.adv_estimator].takes

    @property
    def updates_per_rollout(self) -> int:
        """How many optimiser steps learn from a rollout."""
        mini_batch = self.prompts_per_mini_batch or self.prompts_per_step
        return self.epochs * (self.prompts_per_step // mini_batch)


# ---------------------------------------------------------- bad input, before anything costly


def parse_args(argv: list[str] | None = None) -> Args:
    """Returns the Args of a command line. Raises BadInput if a flag is unknown or mistyped."""
    defaults = {name: f"--algo's; grpo: {value}" for name, value in PRESETS["grpo"].items()}
    return parse_flags(Args, argv, __doc__.split("\n")[0], defaults)


def check_args(args: Args):
    """Raises BadInput where a flag breaks its rules, or flags contradict each other."""
    check_each_flag(args, args.preset_values() | args.correction_bounds())
    check_flags_together(args)
    with refusing("--rollout_correction, --correction_low and _high"):
        losses.rollout_correction(args.rollout_correction, *torch.zeros(3, 1, 1),
                                  args.correction_low, args.correction_high)
    for name in FIXED_ARGUMENTS:
        with refusing(f"--{name} is not JSON"):
            parameters = json.loads(getattr(args, name))
        need(isinstance(parameters, dict), f"--{name} must be a JSON object")
        check_arguments(name, parameters, vars(args))
    if args.quantized and args.rollout_correction == "none":
        warnings.warn("--engine_args quantization: what samples is not quite what is trained; "
                      "give --rollout_correction tis", stacklevel=2)


def check_flags_together(args: Args):
    """Raises BadInput where flags contradict each other, or break a rule too long for Args."""
    prompts = args.prompts_per_step
    mini_batch = args.prompts_per_mini_batch or prompts
    need(prompts % mini_batch == 0, f"--prompts_per_step {prompts} must be a multiple of "
         f"--prompts_per_mini_batch {mini_batch}")
    need(args.group_size > 1 or args.max_gen_batches == 1, "--max_gen_batches above 1 "
         "replaces groups whose members score alike: --group_size must be at least 2")
    need(args.policy_loss != "sapo" or min(args.clip_low, args.clip_high) > 0, "--policy_loss "
         "sapo: its temperatures --clip_low and --clip_high must be greater than 0")
    need(args.reward_coef > 0 or args.hints or args.ref_model,
         "--reward_coef 0 (--algo opd) learns from the KL to a teacher: give its --ref_model")
    need(args.critic_warmup < max(1, args.num_steps),
         "--critic_warmup leaves no step that trains the policy")
    need(not args.kl_target or args.kl_horizon >= prompts * args.group_size,
         f"--kl_horizon {args.kl_horizon} counts trajectories: it must be at least a step's "
         f"{prompts * args.group_size}")
    need(args.window > args.max_prompt_tokens, f"--max_model_len {args.max_model_len} "
         "leaves no room for a response to --max_prompt_tokens")
    # Forks and chat agents may fill the window.
    need(args.tokens_per_micro_batch >= args.window,
         f"--tokens_per_micro_batch {args.tokens_per_micro_batch} is less than the longest "
         f"trajectory: {args.window} tokens")
    tags = args.think_tags.split()
    need(len(set(tags)) == len(tags) == 2,
         f"--think_tags {args.think_tags} must be two different tags with a space between")


def check_registered(args: Args):
    """Raises BadInput where a flag names no estimator, objective or agent loop, which a task
    file may have registered, or where its estimator has no units to compare."""
    agent_loop_class({}, None, args)
    check_value("adv_estimator", args.adv_estimator,
                (*losses.ESTIMATORS, "or your own, by @estimator in the task file"))
    check_value("policy_loss", args.policy_loss,
                (*losses.OBJECTIVES, "or your own, by @objective in the task file"))
    need(args.group_size > 1 or "groups" not in args.estimator_takes,
         f"--adv_estimator {args.adv_estimator} compares the trajectories of a prompt: "
         "--group_size must be at least 2")


# ---------------------------------------------------------------- networks, sharded or whole

class Net(nn.Module):
    """A transformers model that gives scores to sampled tokens; a subclass says which.

    Its scores_from_hidden(hidden (M, H), targets (M,)) returns tensors (M,): what it computes
    for M sampled tokens from their ids and from the hidden states that predict them.

    Packed attention, float32 parameters, no dropout: the network that is differentiated has
    to be the one that sampled. A vision tower keeps its own attention, which is not causal."""

    @shown("loading the model")
    def __init__(self, auto_class: str, args: Args, vision, packed: bool):
        super().__init__()
        self.vision = vision
        self.packed = packed  # without padding; otherwise rows are right-padded
        attention = None  # the model's own
        if packed and vision:
            attention = {"text_config": "packed", "vision_config": "sdpa"}
        elif packed:
            attention = "packed"
        # "auto" is as it is stored: no weight is copied, ranks of a host read the same pages of
        # its files, and the shards become float32.
        self.model, info = from_pretrained(
            auto_class, args, "can't be loaded for training",
            dtype="auto" if args.shard else torch.float32,
            attn_implementation=attention, output_loading_info=True,
            ignore_mismatched_sizes=True)
        for key in ("missing_keys", "mismatched_keys"):  # transformers draws these at random
            need(not info[key], f"--model {args.model} is not what its config.json says: "
                 f"{key.replace('_', ' ')} {sorted(info[key])[:3]}")
        for name, p in self.model.named_parameters():
            need(p.isfinite().all(), f"--model {args.model}: {name} has NaN or infinite elements")
        prepare_layers(self.model, args.gradient_checkpointing)

    def pack(self, batch: dict, micro: data.MicroBatch) -> dict:
        """`data.pack_rows` for this network."""
        return data.pack_rows(batch, micro, next(self.parameters()).device, self.packed)

    def forward(self, packed: dict) -> list[torch.Tensor]:
        """Returns what the network says of each sampled token of R rows: a list of (R, T), 0
        elsewhere. A Policy gives logprobs and entropies, a Critic values.

        packed: what `data.pack_rows` made of these rows.
        Everything happens in here: going round DDP's wrapper would skip gradient averaging."""
        backbone = self.model.base_model
        inputs = packed["inputs"]
        zero = 0
        if self.vision and packed["images"]:
            inputs = inputs | self.vision.inputs(backbone, packed)
        elif self.vision:
            # The tower runs before the text, as with images: FSDP's ranks gather layers in one
            # order.
            zero = self.vision.zero(backbone, packed["targets"].device)
        hidden = backbone(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)  # (S, H)
        predicting = hidden[packed["source"]] + zero  # (M, H)
        results = []
        for scores in self.scores_from_hidden(predicting, packed["targets"]):  # (M,) each
            zeros = scores.new_zeros(packed["shape"])
            results.append(zeros.index_put(packed["at"], scores[packed["pair"]]))
        return results


class Policy(Net):
    """Log-probabilities and entropies of the sampled tokens.

    Token ids from vocab_size on are those of a padded vocabulary: they have no probability."""

    def __init__(self, args: Args, vocab_size: int | None = None, vision=None):
        auto_class = "AutoModelForCausalLM"
        if vision:
            auto_class = "AutoModelForImageTextToText"
        super().__init__(auto_class, args, vision, packed=bool(vision))
        self.head = [self.model.get_output_embeddings()]  # in a list: not registered twice
        need(self.head[0].bias is None, f"--model {args.model} has a bias in its output head, "
             "which token_logprobs doesn't implement")
        text = self.model.config.get_text_config()
        scale = getattr(text, "logit_scale", None) or 1 / getattr(text, "logits_scaling", 1)
        self.temperature = args.temperature / scale
        self.dtype = getattr(torch, args.dtype, torch.float32)  # of the engine
        self.vocab_size = vocab_size
        self.softcap = getattr(text, "final_logit_softcapping", None)
        self.banned = [vision.image_token_id] if vision else []  # the engine never samples it
        if not vision:
            choose_attention(self, args)
        if args.lora_rank:
            add_adapters(self.model, args)

    def pack_probe(self) -> dict:
        """Packs a few rows to try the network on."""
        return self.pack(PROBE, data.in_prefix_order(PROBE, [0, 1, 2]))

    def scores_from_hidden(self, hidden, targets):
        """Returns log-probabilities and entropies, (M,) each."""
        return losses.token_logprobs(
            hidden, self.head[0].weight, targets, self.temperature, entropy=True,
            vocab_size=self.vocab_size, banned=self.banned, softcap=self.softcap)


class Critic(Net):
    """V(state before each sampled token): a backbone of its own, a linear head, 0 at first."""

    def __init__(self, args: Args, vision=None, packed: bool = True):
        super().__init__("AutoModel", args, vision, packed)
        self.head = nn.Linear(self.model.config.get_text_config().hidden_size, 1)
        for p in self.head.parameters():
            nn.init.zeros_(p)

    def scores_from_hidden(self, hidden, targets):
        """Returns the values, (M,), computed in float32."""
        return ((hidden.float() * self.head.weight).sum(-1) + self.head.bias,)


# ---------------------------------------------------------- forward and backward over a batch


def wrap(net: Net, args: Args, accelerator, frozen: bool = False) -> nn.Module:
    """Returns the network on the device: sharded, or wrapped by accelerate."""
    if args.shard:
        return shard(net, args, accelerator.device)
    return accelerator.prepare_model(net, evaluation_mode=frozen)


class Learner:
    """A network and its optimiser.

    net: the network; wrapped: the same, wrapped for the ranks, to be called with gradients.
    num_steps: in which it learns. Its rate is a function of the step, with no state to save."""

    def __init__(self, net: Net, lr: float, num_steps: int, args: Args, accelerator):
        from transformers import get_scheduler

        self.net = net
        self.lr = lr
        self.wrapped = wrap(net, args, accelerator)
        net.float()  # this rank's part
        for name, p in net.named_parameters():
            need(p.dtype == torch.float32, f"{name} is {p.dtype}: updates would be lost in it")
        self.optimizer = torch.optim.AdamW(net.parameters(), lr, weight_decay=args.weight_decay,
                                           fused=accelerator.device.type == "cuda")
        schedule = args.lr_schedule
        if schedule == "constant":
            schedule = "constant_with_warmup"
        scheduler = get_scheduler(
            schedule, self.optimizer, args.warmup_steps, num_steps)
        (self.lr_factor,) = scheduler.lr_lambdas

    def set_lr(self, step: int) -> float:
        """Sets and returns the learning rate of a step, counted from 0."""
        lr = self.lr * self.lr_factor(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def step(self, accelerator, max_norm: float, has_tokens: bool) -> float:
        """Makes one step of the optimiser by the present gradients, clipped to max_norm, and
        drops them. Returns their norm; raises RuntimeError if that is not finite.

        Without any tokens the weights stay: momentum and weight decay would move them."""
        norm = whole(accelerator.clip_grad_norm_(self.wrapped.parameters(), max_norm)).item()
        if not math.isfinite(norm):
            raise RuntimeError(
                f"the gradient norm is {norm}: training stops here, before the weights are spoilt")
        if not self.optimizer.state:
            # Adam makes its states now: in blocks of cached activations they would stay.
            torch.cuda.empty_cache()
        if has_tokens:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm


@torch.no_grad()
def score_tokens(net: Net, batch: dict, args: Args) -> torch.Tensor:
    """Returns a Policy's logprobs or a Critic's values of all sampled tokens, on every rank:
    (B, T), 0 elsewhere."""
    result = torch.zeros_like(batch["response_mask"])
    micro_batches = data.micro_batches_of_this_rank(
        batch, range(len(result)), args.tokens_per_micro_batch, net.packed)
    # Scores stay on the device until all are computed: to read them would wait for it.
    scores = [net(net.pack(batch, micro))[0] for micro in Bar(micro_batches, "scoring")]
    for micro, computed in zip(micro_batches, scores):
        if not micro.is_filler:
            result[micro.rows] = computed.cpu()
    return all_sum(result)


# Of the batch, what an objective gets.
COLUMNS = """response_mask imitation_mask unit_tokens advantages logprobs_rollout logprobs_old
    logprobs_ref values returns""".split()


def optimise(learner: Learner, objective: Callable, batch: dict, rows: list[int], args: Args,
             accelerator, loss_agg: str = "token-mean") -> tuple[dict[str, float], torch.Tensor]:
    """Makes one optimiser step on some rows, the same on all ranks, which share out the work.

    objective(scores, columns, args) -> per-token loss (b, T), stats {name: (b, T)}; scores:
    the network's, of b rows; columns: the batch's COLUMNS of these rows. Losses are summed
    over micro-batches and ranks and divided by global counts: no way to cut the batch
    changes the gradient. loss_agg: a mode of losses.aggregate. With an imitation_mask, the
    loss has one more term: --imitation_coef times the mean of -score there.

    Returns metrics (loss, grad_norm, unique_tokens, the stats' means over tokens), and the
    first scores of this rank's tokens, (B, T)."""
    model = learner.wrapped
    mask_of_all = batch["response_mask"][rows]  # for counts over all ranks and micro-batches
    n_tokens = mask_of_all.sum().item()
    n_units = losses.count_sequences(mask_of_all, batch["unit_tokens"][rows]).item()
    n_imitated = batch["imitation_mask"][rows].sum().item() if "imitation_mask" in batch else 0
    micro_batches = data.micro_batches_of_this_rank(
        batch, rows, args.tokens_per_micro_batch, learner.net.packed)
    # Both stay on the device: to read a number there would wait for the whole pass.
    sums = Counter(loss=0, unique_tokens=0)
    computed = []  # (rows, scores)
    for i, micro in enumerate(Bar(micro_batches, "update")):
        columns = data.to_device({name: batch[name][micro.rows] for name in COLUMNS
                                  if name in batch}, accelerator.device)
        mask = columns["response_mask"]  # (b, T)
        if micro.is_filler:
            for column in columns.values():
                column.zero_()
        packed = learner.net.pack(batch, micro)
        # Ranks average their gradients once, after the last micro-batch. FSDP does it every
        # time: gradients kept back would be whole everywhere.
        averaging = contextlib.nullcontext()
        if i < len(micro_batches) - 1 and not args.shard:
            averaging = accelerator.no_sync(model)
        with averaging:
            scores = model(packed)
            losses_of_tokens, stats = objective(scores, columns, args)
            loss = losses.aggregate(losses_of_tokens, mask, loss_agg, n_tokens, n_units,
                                    args.max_response_tokens, columns["unit_tokens"])
            if n_imitated:
                nll = losses.aggregate(-scores[0], columns["imitation_mask"], n_tokens=n_imitated)
                loss = loss + args.imitation_coef * nll
                sums["imitation_loss"] += nll.detach()
            (loss * dist.get_world_size()).backward()  # DDP and FSDP average over ranks
        sums["loss"] += loss.detach()
        for name, values in stats.items():
            if n_tokens:
                sums[name] += torch.where(mask.bool(), values, 0).sum() / n_tokens
        if not micro.is_filler:
            sums["unique_tokens"] += packed["inputs"]["input_ids"].numel()
            computed.append((micro.rows, scores[0].detach()))

    grad_norm = learner.step(accelerator, args.max_grad_norm, n_tokens + n_imitated > 0)
    first_scores = torch.zeros_like(batch["response_mask"])
    for micro_rows, scores in computed:
        first_scores[micro_rows] = scores.cpu()
    totals = all_sum(torch.tensor(list(sums.values()), dtype=torch.float64)).tolist()
    return dict(zip(sums, totals)) | {"grad_norm": grad_norm}, first_scores


def policy_objective(scores: list[torch.Tensor], columns: dict, args: Args):
    """Returns the policy's loss per token (b, T), and stats: --policy_loss, weighed by
    --rollout_correction, minus the entropy bonus, plus the KL to the reference.

    Without logprobs_old those of this forward pass are the old ones: there is nothing to
    recompute, and the ratio is exactly 1."""
    logprobs, entropy = scores  # (b, T)
    mask = columns["response_mask"]
    old = columns.get("logprobs_old", logprobs.detach())
    loss, stats = losses.policy_loss(
        args.policy_loss, logprobs, old, columns["advantages"], mask, args.clip_low,
        args.clip_high, args.clip_c or None, entropy, args)
    weights, _ = losses.rollout_correction(
        args.rollout_correction, old, columns["logprobs_rollout"], mask, args.correction_low,
        args.correction_high)
    loss = loss * weights
    stats = {"pg_loss": loss.detach(), "entropy": entropy.detach(), **stats}
    if args.entropy_coef:
        loss = loss - args.entropy_coef * entropy
    if args.kl_coef and args.kl_in == "loss":
        kl = losses.kl_estimate(logprobs, columns["logprobs_ref"], args.kl_kind)
        loss = loss + args.kl_coef * kl
        stats["kl"] = kl.detach()
    return loss, stats


def value_objective(scores: list[torch.Tensor], columns: dict, args: Args):
    """Returns losses.value_loss per token (b, T), and stats."""
    return losses.value_loss(scores[0], columns["values"], columns["returns"],
                             columns["response_mask"], args.value_clip)


def mini_batches(prompts: torch.Tensor, step: int, args: Args) -> Iterator[list[int]]:
    """Yields the rows of each optimiser step: in every epoch the prompts are shuffled and
    dealt to as many equal parts as --prompts_per_mini_batch goes into a step.

    prompts (B,): each row's. All rows of a prompt stay together, because units are compared
    and weighed whole, and a prefix that rows share is then computed once."""
    n_parts = args.updates_per_rollout // args.epochs
    present = prompts.unique()
    for epoch in range(args.epochs):
        generator = torch.Generator().manual_seed(seed_of(args.seed, step, epoch))
        order = torch.randperm(len(present), generator=generator)
        for part in present[order].tensor_split(n_parts):
            if len(part):
                yield torch.isin(prompts, part).nonzero().flatten().tolist()


# ---------------------------------------------------------------- the engine's part of a step
# The engine stays awake from an evaluation to the next rollout, which has the same weights.
# Whoever needs the device for anything else calls `put_to_sleep` first.


def named_weights(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields, for the engine, whole tensors by their names in a checkpoint, one at a time."""
    return checkpoint_weights(policy.model, policy.dtype)


@shown("weights to the engine")
def sync(engine: Engine, policy: Policy, version: int) -> float:
    """Wakes a sleeping engine and loads the policy's weights as `version`; returns seconds."""
    started = time.perf_counter()
    torch.cuda.empty_cache()  # what the update left in torch's cache, the engine needs
    engine.wake_weights()
    engine.load_weights(named_weights(policy), version)
    engine.wake_kv()  # vLLM waits for the device here, and empties torch's cache
    return time.perf_counter() - started


@contextlib.contextmanager
def awake(run: "Run", stays: bool = False) -> Iterator[float]:
    """In its block the engine is awake with the present weights, and what --offload names is
    on the host. Yields the seconds of the weight sync, 0 if it was awake with these weights.

    After the block the engine sleeps, unless it `stays` awake. After Stopped or an error it
    sleeps in any case, so that a checkpoint can be saved."""
    seconds = 0.0
    if run.engine.state == "awake" and run.engine.version == run.done:
        run.engine.forget_prompts()  # no digit of a rollout depends on an evaluation before it
    else:
        offload(run, "cpu")
        seconds = sync(run.engine, run.policy.net, version=run.done)
    try:
        yield seconds
    except BaseException:
        put_to_sleep(run, keep=True)
        raise
    if not stays:
        put_to_sleep(run)


def put_to_sleep(run: "Run", keep: bool = False):
    """Frees the device: the engine sleeps, and what --offload moved comes back.

    keep: the engine may have unfinished requests, which stay; with --max_staleness it always
    may. Otherwise they raise RuntimeError, as Engine.sleep says. Does nothing if the engine
    sleeps already, or with --replay."""
    if run.engine and run.engine.state == "awake":
        run.engine.sleep(keep=keep or run.args.max_staleness > 0)
        offload(run, run.accelerator.device)


def offload(run: "Run", device: torch.device | str):
    """Moves to a device what --offload names: the optimisers' states; with "all" the critic
    and the reference, too. The policy's weights never move."""
    optimizers = []
    networks = []
    if run.args.offload != "none":
        optimizers = [learner.optimizer for learner in run.learners.values()]
    if run.args.offload == "all" and run.critic:
        networks.append(run.critic.net)
    # With --hints the reference is the policy; with LoRA it is a function of it.
    if run.args.offload == "all" and not run.args.hints:
        if isinstance(run.reference, nn.Module):
            networks.append(run.reference)
    move(optimizers, networks, device)


def evaluate(run: "Run") -> dict:
    """Returns metrics.describe_eval of validation rollouts, with --eval_sampling_args.

    The engine is still awake then: the next rollout has the same weights."""
    args = run.args
    with awake(run, stays=True):
        if run.done == args.num_steps:
            run.pool.end()
        else:
            run.pool.settle()
        phase = rollout(run, run.rows["val"], run.done, args.eval_samples, args.sampling(True),
                        "eval")
    run.log.rollouts(f"eval_{run.done:06d}", phase.outputs, phase.errors)
    return describe_eval(phase.outputs, data.by_unit(phase.outputs), run.rows["val"]) | {
        "eval/failed": sum(phase.counts.values()), "timing/eval_s": phase.seconds}


# ---------------------------------------------------------------- start and end of a process


@dataclass
class Run:
    """Everything that lives from the start of the run to its end."""

    args: Args
    accelerator: Accelerator
    store: dist.Store  # shared by the ranks: prompt counters
    stop: Stop
    log: Log
    task: ModuleType
    tokenizer: object
    processor: object  # None of a text model
    rows: dict[str, list[dict]]  # "train", "val"
    engine: Engine | None  # None with --replay
    policy: Learner
    critic: Learner | None
    reference: Callable | None  # see build_reference
    kl: losses.AdaptiveKL  # its coefficient is constant without --kl_target
    # For a task's sampler, by prompt: [row, step, reward, reward, ...].
    history: list[list] = field(default_factory=list)
    done: int = 0  # finished steps
    saved: int = 0  # finished steps at the last checkpoint
    mismatch_is_known: bool = False  # engine and trainer disagree, and the user was warned
    pool: Pool | None = None  # None with --replay
    background: Background = field(default_factory=Background)

    @property
    def folder(self) -> Path:
        """--output_dir."""
        return Path(self.args.output_dir)

    @property
    def learners(self) -> dict[str, Learner]:
        """The networks that learn, by their names in a checkpoint."""
        learners = {"policy": self.policy}
        if self.critic:
            learners["critic"] = self.critic
        return learners


def complete_flags(args: Args, cuda: bool):
    """Gives each flag that the user left open its value, which depends on the device, on
    files and on other flags; makes paths absolute. args.task and args.model are left to
    `check_input`."""
    vars(args).update(device_defaults(args, cuda))
    lr = 1e-6
    critic_lr = 1e-5
    if not args.model:  # the task's own, a tiny one
        lr = 3e-4
        critic_lr = 1e-3
    if args.lora_rank:
        lr *= 10
    folder = f"runs/{Path(args.task).stem}"
    if not args.num_steps:
        folder += "-eval"
    args.fill({"lr": lr, "critic_lr": critic_lr, "output_dir": folder,
               "max_model_len": args.window, "gradient_checkpointing": cuda})
    args.output_dir = os.path.realpath(os.path.expanduser(args.output_dir))
    for name in ("model", "ref_model", "replay"):
        path = getattr(args, name)
        if path:
            path = absolute(path)
            setattr(args, name, path)
            need(not Path(path).is_relative_to(args.output_dir), f"--{name} {path} is in "
                 "--output_dir, which would be moved aside: give this run another one")
    for name in ("train_files", "val_files"):
        files = getattr(args, name)
        if files:
            setattr(args, name, list(map(absolute, files)))
    if args.replay:
        args.num_steps = steps_to_replay(args)


def check_input(args: Args) -> tuple:
    """Checks flags, task and rows, and raises BadInput; completes args, but for `fill_by_plan`.
    Returns the accelerator, the ranks' store, the task and its rows by split."""
    check_args(args)
    accelerator, store = start_processes(args)  # first: a host that fails later is heard of
    complete_flags(args, accelerator.device.type == "cuda")
    functions = ["load", "reward"]
    if not args.model:
        functions.append("build_model")
    task = data.load_task(args.task, functions)
    check_registered(args)
    args.task = task.__file__
    rows = {"train": data.load_rows(task, "train", args.train_files, args.prompt_key),
            "val": data.load_rows(task, "val", args.val_files, args.prompt_key)}
    if args.hints:
        require_hints(rows["train"])
    if args.algo == "sft" or args.imitation_steps:
        rows["train"] = data.demonstrated(rows["train"], alone=args.algo == "sft")
    claim_for_all_hosts(args)
    if not args.model:
        args.model = on_main(task_model, task, args)  # minutes, if it was not built before
    return accelerator, store, task, rows


def load_files(args: Args, task: ModuleType, rows: dict) -> tuple:
    """Loads the model's tokenizer, or its processor (None of a text model), and leaves out
    rows whose prompt is too long; rows: all, by split. Returns tokenizer, processor, rows by
    split.

    Raises BadInput if the model, the teacher and the rows don't go together."""
    processor, tokenizer = load_tokenizer(args)
    check_teacher(args, tokenizer)
    rows = {split: data.filter_overlong(rows[split], tokenizer, task, args, processor)
            for split in rows}
    if getattr(task, "TOOLS", None):
        tool_parser(args.tool_parser, tokenizer)  # raises for an unknown --tool_parser
    return tokenizer, processor, rows


def setup(args: Args) -> Run:
    """Checks all input, and raises BadInput; then loads engine and networks, which is slow.

    Completes args: after it nothing assigns to them."""
    quiet_libraries()
    task_builds_model = not args.model
    accelerator, store, task, all_rows = check_input(args)
    device = accelerator.device
    tokenizer, processor, rows = load_files(args, task, all_rows)
    fill_by_plan(args, device)

    # What the engine can't run, what can't be trained and what can't be resumed is refused.
    n_ids = vocab_size(tokenizer)
    check_model(args, device, n_ids)
    data.register_packed_attention()
    vision = Vision(processor) if processor else None
    policy = Policy(args, n_ids, vision)
    try_device(policy, args, device)
    changed = {}
    if args.resume:
        changed = on_main(check_changes, args, task_builds_model)
    checkpoint, state = on_main(prepare_folder, args)  # without --resume (None, {})

    stop = Stop()
    log = SilentLog()
    if accelerator.is_main_process:
        log = Log(args, tokenizer, state.get("step", 0))
        # It comes now, because an engine starts for seconds or minutes.
        log.notices.start(rows, all_rows, policy, device)
    engine = None
    if not args.replay:
        engine = Engine(args.model, args, device, stop_token_ids(args, tokenizer), n_ids,
                        getattr(processor, "image_token_id", None))
    learner, critic, reference = build_networks(args, accelerator, policy)
    run = Run(
        args=args, accelerator=accelerator, store=store, stop=stop, log=log, task=task,
        tokenizer=tokenizer, processor=processor, rows=rows, engine=engine, policy=learner,
        critic=critic, reference=reference,
        kl=losses.AdaptiveKL(args.kl_coef, args.kl_target, args.kl_horizon))
    if checkpoint:
        run.done = state["step"]
        run.saved = run.done
        run.history = state["history"]
        if args.kl_target and "kl_coef" not in changed:
            run.kl.coef = state["kl_coef"]
        load_checkpoint(run, checkpoint, state["parts"])
    if engine:
        run.pool = training_pool(run, run.done, state.get("next_prompt", 0))
    return run


def build_networks(args: Args, accelerator, policy: Policy) -> tuple:
    """Returns the policy's Learner; the critic's, or None; the reference network, or None.

    Seeds the random generators anew."""
    set_seed(args.seed)  # an engine's start drew random numbers, a task may draw some
    critic = None
    if "values" in args.estimator_takes and not args.rollout_only:
        net = Critic(args, policy.vision, policy.packed)
        critic = Learner(net, args.critic_lr, args.num_steps, args, accelerator)
    reference = None
    if args.kl_coef and not args.rollout_only:
        reference = build_reference(args, accelerator, policy)
    n_steps = args.num_steps - args.critic_warmup
    return Learner(policy, args.lr, n_steps, args, accelerator), critic, reference


def build_reference(args: Args, accelerator, policy: Policy) -> Callable:
    """Returns the frozen network to which the KL is computed: --ref_model, or the first model;
    with --hints the policy itself. With --hints or LoRA it is a function of the policy."""
    if args.hints:
        return policy
    if args.lora_rank and not args.ref_model:
        return without_adapters(policy)
    reference = Policy(
        replace(args, model=args.ref_model or args.model, lora_rank=0), policy.vocab_size,
        policy.vision).requires_grad_(False)
    return wrap(reference, args, accelerator, frozen=True)


def finish(run: Run):
    """Saves the last checkpoint and, if training came to its end, the policy in Hugging Face
    format; ends what the run holds."""
    args = run.args
    say = run.log.say
    put_to_sleep(run)
    saved = args.rollout_only or save_checkpoint(run)
    if args.rollout_only:
        say(f"{run.done} steps of rollouts are in {run.folder / 'rollouts'}")
    elif run.done < args.num_steps:
        say(f"stopped after step {run.done}")
    elif run.done and save_policy(run, run.folder / "final"):  # without steps: an evaluation
        say(f"the trained policy is in {run.folder / 'final'}, the best saved checkpoint is "
            f"{best_checkpoint(run.folder)}")
        saved = True
    say(notices.summary(args, run.done))
    close(run)
    need(saved, "nothing of the last steps could be saved")
    if run.stop.requested:  # all is saved, but a run that was stopped must not return 0
        raise Stopped


def close(run: Run):
    """Ends what a run holds, on all ranks together: the process may end then."""
    if run.pool:
        run.pool.end()
    run.log.close()
    run.background.close()
    run.stop.finished.set()
    run.stop.thread.join()  # all ranks' together
    if run.engine:
        run.engine.close()


# ---------------------------------------------------------------- the algorithm


def generate(run: Run, step: int) -> Phase:
    """Returns one step's rollout by the present weights, or what --replay has of it.

    The engine sleeps on if demonstrations are all there is to play."""
    args = run.args
    if args.replay:
        phase = Phase(*read_rollouts(replay_file(args, step), run.policy.net.vocab_size))
        if "baselines" in args.estimator_takes and step == 0 and not phase.greedy:
            raise BadInput(f"--replay {args.replay}: there are no greedy baselines")
        return phase
    if not run.pool.needs_engine:
        put_to_sleep(run)
        return run.pool.rollout(step)
    with awake(run) as sync_s:
        phase = run.pool.rollout(step)
    phase.sync_s = sync_s
    return phase


def networks_to_score(run: Run, step: int) -> dict[str, Callable]:
    """Returns {column of the batch: the network whose scores of sampled tokens fill it}.

    If a step has a single update, that update's own forward pass gives the old logprobs."""
    args = run.args
    networks = {}
    if args.rollout_only:
        return networks
    has_several_updates = args.updates_per_rollout > 1
    only_critic_learns = step < args.critic_warmup
    kl_is_in_reward = args.kl_coef and args.kl_in == "reward"
    if has_several_updates or only_critic_learns or kl_is_in_reward:
        networks["logprobs_old"] = run.policy.net
    if run.reference:
        networks["logprobs_ref"] = run.reference
    if run.critic:
        networks["values"] = run.critic.net
    return networks


def grade_batch(run: Run, phase: Phase, batch: dict) -> dict:
    """Waits for the rewards. Returns the batch, narrowed to the outputs that got one.

    Sets batch["units"], with their rewards, not yet shaped."""
    outputs = phase.trained
    if run.engine:
        grade(run, phase)
    if run.history:
        for output in phase.sampled:
            run.history[output.extra["prompt"]].append(total_reward(output))
    graded_rows = [row for row, output in enumerate(outputs) if output.reward is not None]
    batch = data.select(batch, graded_rows)
    batch["units"] = data.by_unit(phase.trained)
    return batch


def shaped_rewards(units: data.Units, args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rewards of units, (N,), as the flags shape them, but for the KL; and the
    terminal ones among them, (N,), without --reward_coef.

    Terminal rewards are clipped by --reward_clip, and get the penalty of --overlong_buffer."""
    outcomes = units.outcomes
    if args.reward_clip:
        outcomes = outcomes.clamp(-args.reward_clip, args.reward_clip)
    if args.overlong_buffer:
        limit = args.max_response_tokens
        buffer = max(1, round(args.overlong_buffer * limit))
        outcomes = outcomes + losses.overlong_penalty(units.lengths, limit, buffer)
    turn_rewards = units.rewards - units.outcomes
    return args.reward_coef * (turn_rewards + outcomes), outcomes


def shape_rewards(batch: dict, outputs: data.Outputs, kl_coef: float,
                  args: Args) -> dict[str, float]:
    """Applies --reward_clip, --overlong_buffer, --reward_coef and, by --kl_in reward, the KL.

    Replaces the (N,) rewards of batch["units"], for estimators that compare units, and sets
    batch["token_rewards"] (B, T), for the others; outputs: those of the batch, graded.
    Returns metrics; actor/kl, for AdaptiveKL, is a mean over units' means."""
    mask = batch["response_mask"]
    units = batch["units"]
    rewards, outcomes = shaped_rewards(units, args)
    terminal_rewards = data.at_unit_ends(outcomes, outputs, units)  # (B,)
    token_rewards = args.reward_coef * data.token_rewards(outputs, terminal_rewards)
    metrics = {}
    if args.kl_coef and args.kl_in == "reward":
        kl = losses.kl_estimate(batch["logprobs_old"], batch["logprobs_ref"], args.kl_kind)
        kl = torch.where(mask.bool(), kl, 0)  # (B, T)
        token_rewards = token_rewards - kl_coef * kl
        rewards = rewards.index_add(0, units.index, -kl_coef * kl.sum(-1))
        mean_kl = losses.aggregate(
            kl, mask, "seq-mean-token-mean", unit_tokens=data.unit_tokens(mask, units.index))
        metrics["actor/kl"] = mean_kl.item()
        metrics["actor/kl_coef"] = kl_coef
    batch["token_rewards"] = token_rewards
    batch["units"] = replace(units, rewards=rewards)
    metrics["reward/shaped_mean"] = mean(rewards[units.index[mask.any(-1)].unique()])
    return metrics


def greedy_baselines(phase: Phase, units: data.Units, args: Args) -> torch.Tensor:
    """Returns, for each unit, the shaped reward of its group's greedy rollout, (N,); NaN where
    there is none."""
    greedy = data.by_unit(phase.greedy)
    rewards, _ = shaped_rewards(greedy, args)
    baseline_of = dict(zip(greedy.groups.tolist(), rewards.tolist()))
    return rewards.new_tensor(
        [baseline_of.get(group, math.nan) for group in units.groups.tolist()])


def estimate_advantages(batch: dict, phase: Phase, args: Args) -> torch.Tensor:
    """Returns the advantages by --adv_estimator, (B, T).

    The estimator, of losses.py or the task file (see `losses.estimator`), gives one number for
    all tokens of a unit, (N,), or one for each, (N, S): it sees a unit as one sequence, its
    outputs laid end to end. With a critic, sets batch["returns"], too. Raises ValueError where
    the estimator gives another shape, NaN or infinity."""
    units = batch["units"]
    sampled = batch["response_mask"].bool()  # (B, T)
    places = data.places_in_units(batch)

    def end_to_end(x):  # (B, T) -> (N, S)
        return data.scatter(x[sampled], places, len(units.rewards))

    def back(x):  # (N, S) -> (B, T)
        zeros = torch.zeros_like(batch["response_mask"])
        return zeros.masked_scatter(sampled, x[places].type_as(zeros))

    mask = end_to_end(batch["response_mask"])
    token_rewards = end_to_end(batch["token_rewards"])
    given = vars(units) | dict(
        lengths=mask.sum(-1), mask=mask, token_rewards=token_rewards, args=args)
    estimate = losses.ESTIMATORS[args.adv_estimator]
    if "baselines" in estimate.takes:
        given["baselines"] = greedy_baselines(phase, units, args)
    if "values" in estimate.takes:
        given["values"] = end_to_end(batch["values"])
    if "states" in estimate.takes:
        turns = losses.turn_starts(mask).sum(1).tolist()
        given["states"] = data.turn_states(phase.trained, turns)
    advantages = estimate(**{name: given[name] for name in estimate.takes})
    if "values" in given:
        advantages, returns = advantages
        batch["returns"] = back(returns)
    if advantages.shape == units.rewards.shape:
        advantages = advantages[:, None].expand_as(mask)
    if advantages.shape != mask.shape or not advantages[mask.bool()].isfinite().all():
        raise ValueError(f"--adv_estimator {args.adv_estimator} gives advantages of the shape "
                         f"{tuple(advantages.shape)}: must be finite, and one for each unit, "
                         f"(N,) = {tuple(units.rewards.shape)}, or for each token, (N, S) = "
                         f"{tuple(mask.shape)}")
    if args.whiten_advantages:
        advantages = losses.whiten(advantages, mask)
    return back(advantages)


def mask_truncated(batch: dict):
    """Takes units of which any output was cut off out of the losses and their counts: their
    response_mask becomes 0."""
    index = batch["units"].index
    batch["response_mask"][torch.isin(index, index[batch["truncated"]])] = 0


def update(run: Run, batch: dict, step: int) -> dict[str, float]:
    """Trains policy and critic: epochs x mini-batches x packed micro-batches, global counts.

    Sets batch["logprobs_old"] if the policy has not scored the rollout before: those of the
    update's own forward pass. Returns metrics, means over the optimiser steps."""
    args = run.args
    lr = run.policy.set_lr(max(0, step - args.critic_warmup))
    if run.critic:
        run.critic.set_lr(step)
    units = batch["units"]
    batch["unit_tokens"] = data.unit_tokens(batch["response_mask"], units.index)
    policy_batch = dict(batch)
    critic_batch = dict(batch)
    critic_batch.pop("imitation_mask", None)  # demonstrations teach the critic nothing
    if args.updates_per_rollout == 1:
        # The forward pass has the old logprobs to the last digit: the ratio is exactly 1.
        policy_batch.pop("logprobs_old", None)
    values = defaultdict(list)  # name -> its values in the optimiser steps that have it
    for rows in mini_batches(units.prompts[units.index], step, args):
        stats = {"actor/lr": lr, "batch/tokens": batch["lengths"][rows].sum().item()}
        if step >= args.critic_warmup:
            actor, logprobs = optimise(run.policy, policy_objective, policy_batch, rows, args,
                                       run.accelerator, args.loss_agg)
            stats["batch/unique_tokens"] = actor.pop("unique_tokens")
            stats |= {f"actor/{name}": x for name, x in actor.items()}
            if "logprobs_old" not in batch:
                batch["logprobs_old"] = all_sum(logprobs)
        if run.critic:
            critic, _ = optimise(run.critic, value_objective, critic_batch, rows, args,
                                 run.accelerator)
            stats["batch/unique_tokens"] = critic.pop("unique_tokens")
            stats["critic/vf_loss"] = critic.pop("loss")
            stats |= {f"critic/{name}": x for name, x in critic.items()}
        for name, value in stats.items():
            values[name].append(value)
    metrics = {name: fmean(of_name) for name, of_name in values.items()}
    # Adam counts the same steps for every parameter; before the first it has no state.
    state = next(iter(run.policy.optimizer.state.values()), {"step": 0})
    metrics["actor/adam_steps"] = float(state["step"])
    if run.critic:
        metrics["critic/explained_var"] = losses.explained_variance(
            batch["values"], batch["returns"], batch["response_mask"]).item()
    return metrics


def step_metrics(phase: Phase, batch: dict, version: int, args: Args) -> dict:
    """Returns metrics of what was trained: agreement of engine and trainer, groups,
    staleness, rollout correction, greedy baselines. version: of the weights that the rollout
    started with."""
    mask = batch["response_mask"].bool()
    difference, is_comparable = tokens_to_compare(batch, version)
    difference = difference[is_comparable]
    units = data.by_unit(phase.compared)
    group_sizes = units.groups.unique(return_counts=True)[1]
    signal = data.groups_with_signal(phase.compared, "total")
    filtered = {output.extra["prompt"] for output in phase.sampled if "filtered" in output.extra}
    metrics = {
        "rollout/logp_diff_mean": mean(difference),
        "rollout/logp_diff_max": difference.max().item() if len(difference) else 0.0,
        "rollout/filtered_groups": len(filtered),
        "rollout/singleton_groups": (group_sizes == 1).sum().item(),
        "rollout/zero_std_groups": len(group_sizes) - len(signal),
    }
    if args.max_staleness:
        versions = batch["versions"][mask.any(-1)]
        # The oldest token of each row that has sampled ones: the others' version is -1.
        oldest = versions.masked_fill(versions < 0, version).amin(-1)
        age = version - oldest
        metrics["rollout/staleness_mean"] = mean(age)
        metrics["rollout/staleness_max"] = max(age.tolist(), default=0)
    if args.rollout_correction != "none":
        _, stats = losses.rollout_correction(
            args.rollout_correction, batch["logprobs_old"], batch["logprobs_rollout"], mask,
            args.correction_low, args.correction_high)
        means = {name: mean(x[mask]) for name, x in stats.items()}
        weight = means.pop("rollout_weight")
        square = means.pop("rollout_weight_sq")
        metrics |= {name.replace("_", "/", 1): x for name, x in means.items()}
        metrics["rollout/ratio_max"] = stats["rollout_ratio"].max().item()
        metrics["rollout/effective_sample_size"] = weight**2 / square if square else 0.0
    if "baselines" in args.estimator_takes:
        baselines = {output.extra["prompt"] for output in phase.greedy}
        metrics["rollout/missing_baselines"] = len(set(units.prompts.tolist()) - baselines)
        if baselines:
            metrics["reward/greedy"] = data.by_unit(phase.greedy).rewards.mean().item()
    return metrics


def check_agreement(run: Run, phase: Phase, batch: dict, version: int, difference: float):
    """Ends the run, by BadInput on all ranks, if a rollout was not sampled from the trainer's
    policy: if their logprobs differ by more than 1e-3 in the mean (`difference`, that of
    `step_metrics`), or 0.1 where one of them computes in less than float32.

    Only warns, once, with --allow_mismatch, and with --sampling_args that change the engine's
    distribution: they make a difference."""
    args = run.args
    bound = 0.1 if args.quantized or args.dtype == "bfloat16" else 1e-3
    if not run.engine or run.mismatch_is_known or difference <= bound:
        return
    problem = (
        f"engine and trainer disagree: their logprobs of step {version + 1} differ by "
        f"{difference:.2g} in the mean, more than {bound:g} ({args.dtype}); most at "
        f"{worst_token(phase.trained, batch, version, run.tokenizer)}. Likely causes: a weight "
        "that went to another place, a part of this model that vLLM and the trainer compute "
        "differently, or settings of the engine that the trainer does not know (--engine_args, "
        "--sampling_args, an agent loop's own)")
    if args.allow_mismatch or args.sampling().keys() - NEUTRAL_SAMPLING:
        run.log.warn_once(problem)
        run.mismatch_is_known = True
        return
    close(run)
    raise BadInput(f"{problem}; --allow_mismatch goes on")


def main(args: Args):
    """Trains: all steps of a run, each from rollout to log. Ends early if told to stop."""
    run = setup(args)  # all input is checked here; engine, networks, pool and log hang from it
    log = run.log
    with contextlib.suppress(Stopped):  # raised on all ranks together
        if run.done == 0 and run.engine and not args.rollout_only:
            log.metrics({"step": 0} | evaluate(run))
        # step: how many steps are finished before it
        for step in Bar(range(run.done, args.num_steps), "steps"):
            gather_unless_stopped(None, run.stop.requested)
            # ---- 1. rollout: the engine takes the weights; agent loops fill the batch
            started = time.perf_counter()
            phase = generate(run, step)

            # ---- 2. score the sampled tokens, while the last graders work; then their rewards
            rollout_ended = time.perf_counter()
            batch = data.collate(phase.trained, getattr(run.processor, "image_token_id", -1))
            for name, network in networks_to_score(run, step).items():
                batch[name] = score_tokens(network, seen_by(name, batch), args)
            grading_started = time.perf_counter()
            batch = grade_batch(run, phase, batch)
            grading_s = time.perf_counter() - grading_started
            metrics = {"step": step + 1} | phase.metrics(run.engine)
            if run.engine:
                log.rollouts(f"step_{step + 1:06d}", phase.outputs, phase.errors)
            if args.rollout_only:
                run.done = step + 1
                log.metrics(metrics)
                continue

            # ---- 3. rewards -> advantages: the lines to change
            metrics |= shape_rewards(batch, phase.trained, run.kl.coef, args)
            batch["advantages"] = estimate_advantages(batch, phase, args)  # (B, T)
            if args.mask_truncated:
                mask_truncated(batch)

            # ---- 4. update: epochs x mini-batches x packed micro-batches; global counts
            metrics |= update(run, batch, step)
            if args.kl_target and step >= args.critic_warmup:
                run.kl.update(metrics["actor/kl"], len(data.last_outputs(phase.compared)))
            metrics |= step_metrics(phase, batch, step, args)
            check_agreement(run, phase, batch, step, metrics["rollout/logp_diff_mean"])
            run.done = step + 1

            # ---- 5. log, evaluate, save
            metrics["timing/grading_s"] = grading_s
            metrics["timing/train_s"] = time.perf_counter() - rollout_ended
            metrics["timing/step_s"] = time.perf_counter() - started
            is_last = run.done == args.num_steps
            is_eval_step = args.eval_every and run.done % args.eval_every == 0
            try:
                if run.engine and (is_last or is_eval_step):
                    metrics |= evaluate(run)
            finally:  # also if the evaluation is stopped
                log.metrics(metrics, phase, batch)
            if args.save_every and run.done % args.save_every == 0:
                put_to_sleep(run)
                save_checkpoint(run)
            del phase, batch  # a step's images go before the next step's come
    finish(run)


if __name__ == "__main__":
    run_as_script(main, parse_args)
