"""The flags of train.py: presets, all flags with their help texts, and the rules among them."""

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch

import losses
from agent_loop import LoopArgs, agent_loop_class
from flatrl.bad_input import need, refusing
from flatrl.devices import device_defaults
from flatrl.flags import check_value, flag, parse_flags
from flatrl.log import steps_to_replay
from flatrl.vllm_engine import FIXED_ARGUMENTS, check_arguments

# The flags that --algo sets. A preset changes those of "grpo"; the user's own flags win.
PRESETS: dict[str, dict] = {
    "grpo": dict(
        adv_estimator="grpo", whiten_advantages=False, gamma=1.0, turn_discount=1.0,
        policy_loss="ppo", clip_low=0.2, clip_high=0.2, loss_agg="token-mean",
        kl_coef=0.0, kl_in="loss", kl_kind="k3", reward_coef=1.0, hints=False,
        overlong_buffer=0.0, max_gen_batches=1),
    "ppo": dict(adv_estimator="gae", whiten_advantages=True),
    "dapo": dict(clip_high=0.28, overlong_buffer=0.2, max_gen_batches=10),
    "drgrpo": dict(adv_estimator="drgrpo", loss_agg="seq-mean-token-sum-norm"),
    "rloo": dict(adv_estimator="rloo", policy_loss="reinforce", loss_agg="seq-mean-token-sum"),
    "reinforce_pp": dict(
        adv_estimator="reinforce_pp", whiten_advantages=True,
        kl_coef=0.001, kl_in="reward", kl_kind="k1"),
    "reinforce_pp_baseline": dict(
        adv_estimator="drgrpo", whiten_advantages=True, kl_coef=0.001, kl_kind="k2"),
    "remax": dict(adv_estimator="remax", policy_loss="reinforce", loss_agg="seq-mean-token-sum"),
    "opo": dict(adv_estimator="opo", policy_loss="reinforce", loss_agg="seq-mean-token-sum"),
    "gspo": dict(
        policy_loss="gspo", clip_low=3e-4, clip_high=4e-4, loss_agg="seq-mean-token-mean"),
    "gmpo": dict(policy_loss="gmpo", clip_low=0.4, clip_high=0.4, loss_agg="seq-mean-token-mean"),
    "cispo": dict(policy_loss="cispo", clip_low=1.0, clip_high=0.28),
    "sapo": dict(policy_loss="sapo", clip_low=1.05, clip_high=1.0, loss_agg="seq-mean-token-mean"),
    "gigpo": dict(adv_estimator="gigpo", turn_discount=0.95),
    # On-policy distillation; opsd is self-distillation.
    "opd": dict(
        adv_estimator="reinforce_pp", gamma=0.0, reward_coef=0.0,
        kl_coef=1.0, kl_in="reward", kl_kind="k1"),
    "sft": dict(adv_estimator="reinforce_pp"),
}
PRESETS["opsd"] = PRESETS["opd"] | {"hints": True}

# Registered so far; a task file may register its own.
OUR_ESTIMATORS = [*losses.ESTIMATORS]
OUR_OBJECTIVES = [*losses.OBJECTIVES]

# What other libraries call a flag, for a hint.
OTHER_NAMES = {
    "learning_rate": "lr",
    "batch_size": "prompts_per_step",
    "num_generations": "group_size",
    "max_steps": "num_steps",
    "model_name_or_path": "model",
    "beta": "kl_coef",
    "wandb_project": "project",
    "report_to": "tracker",
}
# The settings of LoopArgs that have a flag of their own. --agent_args sets the others.
LOOP_FLAGS = [
    "agent", "max_response_tokens", "max_model_len", "max_assistant_turns",
    "chat_template_args", "tool_parser"]
LOOP_SETTINGS = [entry.name for entry in fields(LoopArgs) if entry.name not in LOOP_FLAGS]


def preset(help: str, choices=(), **bounds):
    """Returns the field of a flag whose default comes from PRESETS[--algo]."""
    return flag(None, f"[preset] {help}", choices, **bounds)


@dataclass
class Args(LoopArgs):
    """All flags. Each field is a flag, but for the LOOP_SETTINGS inherited from LoopArgs."""

    task: str = flag(
        "examples/calculator.py", "Python file with load(split) and reward(output, row)",
        group="task and model")
    model: str | None = flag(
        None, "name at the hub, or folder; default: the model that the task's build_model makes")
    train_files: list[str] | None = flag(
        None, "parquet, jsonl or csv files, or NAME:SPLIT of the hub, in place of load('train')")
    val_files: list[str] | None = flag(None, "the same in place of load('val')")
    prompt_key: str = flag("prompt", "the rows' column that holds a chat or a question")
    image_key: str = flag("images", "the rows' column that holds the prompt's image or images")
    replay: str | None = flag(
        None, "output_dir of another run: train on its rollouts, without an engine")
    rollout_only: bool = flag(False, "write rollouts of the model as it is, without training")
    output_dir: str | None = flag(None, "default: runs/<name of the task file>")
    seed: int = flag(0, "all randomness comes from the seed and the step")
    dtype: str = flag(
        "auto", "of the engine and of matrix products; auto is bfloat16 on CUDA, else float32",
        ("auto", "float32", "bfloat16"))
    router_replay: bool = flag(
        False, "mixtures of experts: the trainer takes the experts that the engine chose (R3)")
    allow_mismatch: bool = flag(
        False, "train although engine and trainer disagree about the sampled tokens' logprobs")
    trust_remote_code: bool = flag(False, "run Python code that comes with the model")

    algo: str = flag(
        "grpo", "preset for the flags marked [preset]", tuple(PRESETS), group="algorithm")
    num_steps: int = flag(40, "training steps; each samples a batch and learns from it")
    prompts_per_step: int = flag(32, "prompts in a batch, over all ranks", low=1)
    group_size: int = flag(8, "rollouts per prompt", low=1)
    prompts_per_mini_batch: int | None = flag(
        None, "prompts per optimiser step; default: all of them, which is on-policy", low=1)
    epochs: int = flag(1, "passes over each batch", low=1)

    adv_estimator: str = preset("advantage estimator", OUR_ESTIMATORS, group="advantages")
    whiten_advantages: bool = preset("scale to mean 0 and variance 1 over the batch's tokens")
    gamma: float = preset("discount per token", high=1)
    turn_discount: float = preset("discount per turn, on top of gamma", high=1)
    lam: float = flag(1.0, "lambda of gae", high=1)

    policy_loss: str = preset("policy-gradient objective", OUR_OBJECTIVES, group="objective")
    clip_low: float = preset(
        "lower clip of the ratio: 1 - clip_low; gmpo: of its logarithm; sapo: the temperature "
        "where A <= 0")
    clip_high: float = preset(
        "upper clip of the ratio: 1 + clip_high; gmpo: of its logarithm; sapo: the temperature "
        "where A > 0")
    clip_c: float | None = flag(
        None, "dual clip: the largest ratio where A < 0; 0: off; default: 0, with "
        "--rollout_correction bypass: 3")
    loss_agg: str = preset("how per-token losses become one number", losses.AGGREGATIONS)
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    mask_truncated: bool = flag(False, "no loss on rollouts that a length or turn limit cut off")
    imitation_steps: int | None = flag(
        None, "first steps, in which rows' demonstrations are played; default: all steps")
    rollout_correction: str | None = flag(
        None, "importance weights from the engine's logprobs to the trainer's: KIND, KIND:HIGH or "
        f"KIND:LOW:HIGH with bounds of the ratio ({' | '.join(losses.ROLLOUT_CORRECTIONS)}); "
        "default: none, with --max_staleness bypass for one update of ppo, else icepop:0:5")

    kl_coef: float = preset("weight of the KL to the reference; 0: off", group="reward and KL")
    ref_model: str | None = flag(
        None, "the reference or teacher, of the same tokenizer; default: the starting model")
    hints: bool = preset("the reference is shown a row's `hint`, and is the policy itself")
    ref_update: float | None = flag(
        None, "share by which the reference moves to the policy after each step; 1: it is the "
        "policy; default: 0, with --hints 1", high=1)
    reward_coef: float = preset("factor of the task's reward, turn rewards included")
    kl_in: str = preset(
        "the KL is a term of the objective, or part of each token's reward", ("loss", "reward"))
    kl_kind: str = preset(
        "estimate of the KL; topK, as in top16: the forward KL on the reference's K likeliest ids",
        [*losses.KL_ESTIMATES, "topK"])
    kl_target: float = flag(
        0.0, "adapt kl_coef to hold this KL per token (0.1 is usual); 0: off")
    overlong_buffer: float = preset(
        "last share of max_response_tokens, over which the reward falls by up to 1; 0: off", high=1)
    max_gen_batches: int = preset(
        "dynamic sampling: groups with equal outcomes are replaced by fresh prompts, until this "
        "many times prompts_per_step are drawn; 1: off", low=1, high=100)

    critic_warmup: int = flag(0, "first steps, in which only the critic learns", group="critic")
    critic_lr: float | None = flag(None, "default: 1e-5, for a task's own tiny model 1e-3")

    lr: float | None = flag(
        None, "AdamW; default: 1e-6, for a task's own tiny model 3e-4; ten times that for LoRA",
        group="optimiser and memory")
    lr_schedule: str = flag(
        "constant", "constant, or a decay from lr to 0 at num_steps",
        ("constant", "linear", "cosine"))
    warmup_steps: int = flag(0, "steps of linear warm-up")
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm", low=1e-8)
    lora_rank: int = flag(0, "train LoRA adapters of this rank; 0: all weights")
    lora_args: str = flag(
        "{}", 'more arguments of peft.LoraConfig, as JSON: {"lora_alpha": 16}')
    tokens_per_micro_batch: int | None = flag(
        None, "tokens in one pass of a rank, at least the longest rollout; default: on CUDA what "
        "fits, else 16384", low=1)
    gradient_checkpointing: bool | None = flag(
        None, "recompute activations: a third slower, much less memory; default: on CUDA where "
        "passes would be too small without, else off")
    compile: bool = flag(
        False, "torch.compile for the decoder layers of all networks; has not run on a GPU")
    shard: Literal[False, True, "hybrid"] = flag(
        False, "FSDP2: cut parameters, gradients and optimiser states over all ranks; hybrid: "
        "over those of a host; always on in bfloat16 on CUDA")
    offload: str = flag(
        "none", "to host memory while the engine is awake: the optimisers' states; all: critic "
        "and reference, too", ("none", "optimizer", "all"))

    temperature: float = flag(
        1.0, "of sampling in training; the trainer's logprobs use it, too", low=0.01,
        group="sampling")
    max_prompt_tokens: int = flag(512, "longer prompts are dropped and counted", low=1)
    sampling_args: str = flag(
        "{}", 'more sampling parameters of vLLM, as JSON: {"stop": ["</answer>"]}')

    max_staleness: int = flag(
        0, "sampling ends when a batch is full, and other rollouts continue after the update, at "
        "most this many versions behind", group="asynchronous rollout")
    oversample: float = flag(
        1.0, "prompts under way, as a multiple of prompts_per_step, with --max_staleness", low=1)

    tp: int = flag(
        1, "consecutive ranks that share one engine (tensor parallelism)", low=1, group="engine")
    gpu_memory_utilization: float = flag(
        0.5, "the engine's share of the GPU while it is awake", high=1)
    engine_args: str = flag("{}", 'more arguments of vllm.LLM, as JSON: {"max_num_seqs": 512}')
    deterministic: bool = flag(False, "the same numbers in every run on a CPU; slower with tools")

    eval_every: int = flag(
        10, "steps between evaluations; 0: only before training and after; -1: none, and "
        "validation rows are not loaded", low=-1, group="evaluation, checkpoints, log")
    eval_samples: int = flag(
        1, "rollouts of a validation row: eval/pass@1 to pass@N", low=1)
    eval_sampling_args: str = flag(
        "{}", "like --sampling_args, in evaluation; the temperature is 0 (greedy) by default, "
        "and --temperature with several --eval_samples")
    save_every: int = flag(20, "steps between checkpoints, and one after each best "
        "evaluation; 0: only at the end")
    dump_rollouts: float = flag(
        1.0, "share of the prompts whose rollouts are written, whole groups", high=1)
    keep_checkpoints: int = flag(2, "older ones are deleted", low=1)
    resume: Literal[False, True, "changed"] = flag(
        False, "continue from the latest checkpoint in output_dir, if there is one; changed: "
        "although the training rows differ from those of the run")
    tracker: str | None = flag(
        None, "log to this tracker, too (WANDB_MODE=offline needs no account)",
        ("wandb", "trackio", "tensorboard"))
    project: str = flag("flatrl", "the run's project at wandb or trackio")

    agent_args: str = flag(
        "{}", f"more settings of agent loops, as JSON: {', '.join(LOOP_SETTINGS)}",
        group="agent loops")

    def __post_init__(self):
        # In this order: each default depends on the flags above it.
        self.fill(self.preset_values())
        self.fill({"ref_update": float(self.hints)})
        self.fill({"rollout_correction": self.usual_correction})
        self.fill({"clip_c": self.usual_clip_c})
        for name, value in _json_object("agent_args", self.agent_args).items():
            need(name in LOOP_SETTINGS,
                 f"--agent_args: {name} is not one of {', '.join(LOOP_SETTINGS)}")
            kind = type(getattr(LoopArgs, name))
            need(isinstance(value, (int, float) if kind is float else kind),
                 f"--agent_args: {name} must be a {kind.__name__}, got {value!r}")
            setattr(self, name, value)

    def fill(self, values: dict):
        """Sets the flags that are still None to these values."""
        for name, value in values.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def preset_values(self) -> dict:
        """Returns the flags that --algo sets. Another --policy_loss brings its own clip bounds."""
        base = PRESETS["grpo"]
        values = base | PRESETS.get(self.algo, {})
        if self.policy_loss not in (None, values["policy_loss"]):
            # gspo, gmpo, cispo and sapo name an algo and its loss.
            other = base | PRESETS.get(self.policy_loss, {})
            values["clip_low"] = other["clip_low"]
            values["clip_high"] = other["clip_high"]
        return values

    def sampling(self, validate: bool = False) -> dict:
        """Returns vLLM's sampling parameters; max_tokens is left to the agent loops."""
        is_greedy = validate and self.eval_samples == 1
        given = json.loads(self.eval_sampling_args if validate else self.sampling_args)
        parameters = {"temperature": 0.0 if is_greedy else self.temperature} | given
        if isinstance(parameters.get("stop"), str):
            parameters["stop"] = [parameters["stop"]]  # agent loops may count on a list
        return parameters

    @property
    def correction(self) -> tuple[str, float, float]:
        """Kind, low and high of --rollout_correction: KIND, KIND:HIGH or KIND:LOW:HIGH.

        Raises ValueError for a bound that is not a number, or that the kind does not have."""
        kind, *bounds = self.rollout_correction.split(":")
        low, high = losses.ROLLOUT_CORRECTIONS.get(kind, (0.0, 1.0))
        if self.max_staleness:
            low = 0.0  # with staleness a small ratio is no reason to drop a token
        n_allowed = {"none": 0, "bypass": 0, "tis": 1, "seq_tis": 1, "geo_tis": 1}
        if len(bounds) > n_allowed.get(kind, 2):  # the other kinds take LOW:HIGH
            raise ValueError(f"{self.rollout_correction}: {kind} has no such bounds")
        if bounds:
            *given, high = map(float, bounds)  # given: LOW, or nothing
            low = given[0] if given else low
        return kind, low, high

    @property
    def usual_correction(self) -> str:
        """The default of --rollout_correction: a trust region for stale batches."""
        if not self.max_staleness:
            return "none"
        # With a single update the ratio to logprobs_old is 1, which ppo can't clip.
        if self.policy_loss == "ppo" and self.updates_per_step == 1:
            return "bypass"
        return "icepop:0:5"

    @property
    def usual_clip_c(self) -> float:
        """The default of --clip_c: with bypass the ratio can be in the hundreds at a rare token."""
        return 3.0 if self.rollout_correction.startswith("bypass") else 0.0

    @property
    def window(self) -> int:
        """The most tokens of a rollout, its prompt included."""
        return self.max_model_len or self.max_prompt_tokens + self.max_response_tokens

    @property
    def estimator_takes(self) -> list[str]:
        """The inputs of the function behind --adv_estimator; see losses.estimator."""
        return losses.ESTIMATORS[self.adv_estimator].takes

    @property
    def objective_takes(self) -> list[str]:
        """The inputs of the function behind --policy_loss; see losses.objective."""
        return losses.OBJECTIVES[self.policy_loss].takes

    @property
    def evaluates(self) -> bool:
        """True if validation rows are loaded and evaluated, unless the task has none."""
        return self.eval_every >= 0 and not self.rollout_only and not self.replay

    @property
    def kl_top(self) -> int:
        """K of --kl_kind topK; 0 for the other kinds, which need the sampled token alone."""
        kind, number = self.kl_kind[:3], self.kl_kind[3:]
        return int(number) if kind == "top" and number.isdecimal() else 0

    @property
    def has_reference(self) -> bool:
        """True if a reference scores the sampled tokens."""
        return bool(self.kl_coef or self.ref_model or self.hints)

    @property
    def moves_reference(self) -> bool:
        """True if the reference is a moving average of the policy, with weights of its own."""
        return self.has_reference and 0 < self.ref_update < 1

    @property
    def updates_per_epoch(self) -> int:
        """The number of mini-batches of a step: each is an update in every epoch."""
        return self.prompts_per_step // (self.prompts_per_mini_batch or self.prompts_per_step or 1)

    @property
    def updates_per_step(self) -> int:
        """The number of optimiser steps that learn from the rollouts of a step."""
        return self.epochs * self.updates_per_epoch


def parse_args(argv: list[str] | None = None) -> Args:
    """Returns the Args of a command line. Raises BadInput for a flag unknown or mistyped."""
    defaults = {name: f"--algo's; grpo: {value}" for name, value in PRESETS["grpo"].items()}
    return parse_flags(
        Args, argv, LOOP_SETTINGS, defaults, OTHER_NAMES,
        usage="accelerate launch train.py [--FLAG VALUE ...]",
        description="Trains a language model by RL on the multi-turn task of a Python file.")


def _json_object(name: str, text: str) -> dict:
    """Returns the object that a flag holds as JSON. Raises BadInput if it holds anything else."""
    with refusing(f"--{name} is not JSON"):
        value = json.loads(text)
    need(isinstance(value, dict), f"--{name} must be a JSON object")
    return value


# ------------------------------------------------------------ rules, before anything costly


def check_args(args: Args):
    """Raises BadInput where a flag has no valid value, or where flags contradict each other."""
    for entry in fields(args):
        name = entry.name
        shown = f"agent_args: {name}" if name in LOOP_SETTINGS else name
        check_value(shown, getattr(args, name), **entry.metadata["rules"])
    for name in FIXED_ARGUMENTS:  # the flags that hold a JSON object
        check_arguments(name, _json_object(name, getattr(args, name)), vars(args))

    prompts = args.prompts_per_step
    mini_batch = args.prompts_per_mini_batch or prompts
    need(prompts % mini_batch == 0,
         f"--prompts_per_step must be a multiple of --prompts_per_mini_batch {mini_batch}")
    need(args.clip_c == 0 or args.clip_c > 1, f"--clip_c {args.clip_c} must be 0 or exceed 1")
    need(args.kl_kind in losses.KL_ESTIMATES or args.kl_top > 0,
         f"--kl_kind {args.kl_kind}: choose from {', '.join(losses.KL_ESTIMATES)}, top1, top2, ...")
    need(not args.kl_top or args.kl_in == "loss",
         f"--kl_kind {args.kl_kind} is a loss, no reward of the sampled token: give --kl_in loss")
    need(not args.kl_coef or args.kl_in == "reward" or args.kl_kind != "k1",
         "--kl_kind k1 teaches nothing as a loss: give --kl_in reward, or another --kl_kind")
    need(not args.ref_update or not args.ref_model,
         "--ref_update above 0 is for the starting model, not for a --ref_model")
    need(args.ref_update in (0, 1) or not args.lora_rank,
         f"--ref_update {args.ref_update} with --lora_rank: must be 0 or 1")
    need(args.reward_coef > 0 or args.hints or args.ref_model,
         "--reward_coef 0 (--algo opd) learns from the KL to a teacher: give its --ref_model")
    need(not args.compile or not args.router_replay,
         "--compile with --router_replay: not implemented")
    need(args.eval_samples == 1 or args.sampling(validate=True)["temperature"] != 0,
         f"--eval_samples {args.eval_samples} would be equal at temperature 0")
    need(args.window > args.max_prompt_tokens,
         f"--max_model_len {args.max_model_len} must exceed --max_prompt_tokens")
    # Forks and chat agents may fill the window.
    need((args.tokens_per_micro_batch or args.window) >= args.window,
         f"--tokens_per_micro_batch must be at least the longest rollout: {args.window} tokens")

    with refusing("--rollout_correction"):  # a trial on one token
        kind, low, high = args.correction
        losses.rollout_correction(kind, *torch.zeros(3, 1, 1), low, high)
    need(args.policy_loss == "ppo" or kind != "bypass",
         f"--rollout_correction bypass is for --policy_loss ppo, not {args.policy_loss}")
    check_effects(args)


def check_registered(args: Args):
    """Checks --agent, --adv_estimator, --policy_loss and their needs, once the task is loaded."""
    agent_loop_class({}, None, args)  # raises BadInput for an unknown --agent
    check_value("adv_estimator", args.adv_estimator,  # the last "choice" is a hint
                (*losses.ESTIMATORS, "or your own, by @estimator in the task file"))
    check_value("policy_loss", args.policy_loss,
                (*losses.OBJECTIVES, "or your own, by @objective in the task file"))
    need(args.group_size > 1 or "groups" not in args.estimator_takes,
         f"--adv_estimator {args.adv_estimator} compares the rollouts of a prompt: "
         "--group_size must be at least 2")
    need(args.algo != "ppo" or "values" in args.estimator_takes,
         f"--algo ppo with --adv_estimator {args.adv_estimator} would train no critic")
    need(not args.critic_warmup or "values" in args.estimator_takes,
         f"--critic_warmup has no effect with --adv_estimator {args.adv_estimator}")
    asks = "logprobs_ref" in [*args.estimator_takes, *args.objective_takes]
    need(args.has_reference or not asks,
         "the estimator or objective asks for logprobs_ref: give --ref_model, --hints or --kl_coef")
    need(args.kl_coef or asks or not (args.ref_model or args.hints),
         "--ref_model and --hints need a --kl_coef, or an estimator or objective of logprobs_ref")


def check_effects(args: Args):
    """Raises BadInput for a flag that was set without effect: nothing else would tell.

    A task's own estimator or objective may use any flag."""
    estimator = args.adv_estimator
    objective = args.policy_loss
    has_critic = estimator not in OUR_ESTIMATORS or "values" in args.estimator_takes
    discounts = has_critic or estimator == "reinforce_pp"
    has_dual_clip = objective in ("ppo", "gspo") or objective not in OUR_OBJECTIVES
    # the flag on which others depend, whether these have an effect, and their names
    rules = [
        ("adv_estimator", has_critic, ["lam", "critic_lr"]),
        ("adv_estimator", discounts, ["gamma"]),
        ("adv_estimator", discounts or estimator == "gigpo", ["turn_discount"]),
        ("policy_loss", objective != "reinforce", ["clip_low", "clip_high"]),
        ("policy_loss", has_dual_clip, ["clip_c"]),
        ("hints", not args.hints, ["ref_model", "replay", "router_replay"]),
        ("kl_coef", args.kl_coef, ["kl_in", "kl_kind"]),
        ("kl_coef", args.has_reference, ["ref_update"]),
        ("kl_in", args.kl_in == "reward", ["kl_target"]),
        ("lora_rank", args.lora_rank, ["lora_args"]),
        ("max_staleness", args.max_staleness, ["oversample"]),
        ("max_staleness", not args.max_staleness, ["deterministic"]),
    ]
    usual = {entry.name: entry.default for entry in fields(args)}
    usual |= args.preset_values() | {"clip_c": args.usual_clip_c, "ref_update": float(args.hints)}
    for other, has_effect, names in rules:
        for name in names:
            need(has_effect or getattr(args, name) == usual[name],
                 f"--{name} has no effect with --{other} {getattr(args, other)}")


def complete_flags(args: Args, cuda: bool):
    """Fills in the flags that the user left open, but for args.model: see train.check_input."""
    vars(args).update(device_defaults(args, cuda))
    is_tiny = not args.model  # the task's own
    args.fill({
        "lr": (3e-4 if is_tiny else 1e-6) * (10 if args.lora_rank else 1),
        "critic_lr": 1e-3 if is_tiny else 1e-5,
        "output_dir": f"runs/{Path(args.task).stem}" + ("" if args.num_steps else "-eval"),
        "max_model_len": args.window,
    })
    if not cuda or args.rollout_only or not args.num_steps:  # else fit_micro_batch gives these
        tokens = max(args.window, 16384)
        args.fill({"tokens_per_micro_batch": tokens, "gradient_checkpointing": False})
    args.output_dir = os.path.realpath(os.path.expanduser(args.output_dir))
    if args.replay:
        args.num_steps = steps_to_replay(args)
