"""A run's folder: its lock, its checkpoints, resuming, and the trained policy.

Plain and sharded networks have one checkpoint format, torch.distributed.checkpoint's: a run
resumes on any number of ranks, with or without --shard. All randomness and every learning rate
are functions of --seed and the step, so no state of a generator or schedule is saved."""

import fcntl
import json
import os
import pickle
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from flatrl.bad_input import BadInput, need, refusing
from flatrl.files import logged
from flatrl.models import whole, whole_weights
from flatrl.processes import on_main

STATE_FILE = "estimator.pkl"  # in a checkpoint: the estimator's state
FILE_BYTES = 5 << 30  # of a file of weights in final/

# ---------------------------------------------------------------- the folder


def claim_folder(args) -> bool | str:
    """Locks --output_dir for the life of this process. Returns whether, or how, to resume a run.

    That is --resume, but False without a checkpoint: a requeued job may always pass it. Raises
    BadInput if another run is writing there, or if it holds a run and --resume is not given."""
    folder = Path(args.output_dir)
    is_used = any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints", "final"))
    need(
        args.resume or not is_used,
        f"{folder} holds a run: continue it with --resume, or give another --output_dir",
    )
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)  # never closed: that would unlock
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a child does not inherit this lock
    except BlockingIOError:
        raise BadInput(f"another run is writing to {folder}: give another --output_dir") from None
    if args.resume and not checkpoints(folder):
        print(f"--resume: {folder} has no checkpoint: the run starts at step 0", flush=True)
        return False
    return args.resume


def read_checkpoint(args, rows_hash: str) -> tuple[Path | None, dict]:
    """Returns the latest checkpoint and its step.json; None and {} without --resume.

    The dict also has the estimator's state as "estimator", and as "changed" the flags that differ
    from those in args.json, which it prints. Raises BadInput for rows of another hash, unless
    --resume is "changed" and no sampler's history is about them."""
    if not args.resume:
        return None, {}
    checkpoint = checkpoints(Path(args.output_dir))[-1]
    state = json.loads((checkpoint / "step.json").read_text())
    state["estimator"] = pickle.loads((checkpoint / STATE_FILE).read_bytes())
    state["changed"] = []
    about = json.loads(Path(args.output_dir, "args.json").read_text())
    for name, before in about["args"].items():
        now = json.loads(json.dumps(getattr(args, name, before)))  # as written: a tuple is a list
        if now != before and name != "resume":
            state["changed"].append(name)
            print(f"--resume: --{name} was {before} so far, and is {now} from now on", flush=True)
    if rows_hash != about["training_rows"]:
        need(
            args.resume == "changed" and not state["history"],
            "--resume: the training rows differ: give --resume changed, if there is no `sampler`",
        )
    return checkpoint, state


# ---------------------------------------------------------------- checkpoints


def training_state(run) -> dict:
    """Returns the state dicts of networks that learn or move (--ref_update), and of optimisers.

    An optimiser without a step (--critic_warmup) has no state, and is left out."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    state = {}
    for name, learner in run.learners.items():
        state[name] = {path: p for path, p in learner.net.named_parameters() if p.requires_grad}
        if learner.n_updates:
            state[f"{name}_optimizer"] = get_optimizer_state_dict(learner.net, learner.optimizers)
    if run.args.moves_reference:
        state["reference"] = dict(run.reference.named_parameters())
    return state


def save_checkpoint(run):
    """Saves the training state after run.done steps, unless it is saved already.

    A kill never leaves half a checkpoint: a new one gets its name last, and an old one is
    renamed before it is deleted. Raises BadInput on all ranks, for example on a full disk."""
    from torch.distributed.checkpoint import CheckpointException, save

    if run.saved == run.done:
        return
    folder = run.folder / "checkpoints"
    temporary = folder / f".step_{run.done:06d}"
    try:
        save(training_state(run), checkpoint_id=temporary)
        on_main(_complete, run, temporary)
    except CheckpointException as error:  # on all ranks, too
        raise BadInput(str(error)) from None
    finally:  # removes what has no name, also what a killed run was saving
        for path in folder.glob(".step_*"):
            shutil.rmtree(path, ignore_errors=True)
    run.saved = run.done


def _complete(run, temporary):
    """Writes everything but the tensors, names the checkpoint, and gives up the oldest."""
    next_prompt = run.pool.next_prompt(run.done) if run.pool else 0
    # A step that failed after its rollout is taken again: its prompts get their rewards then.
    without_rewards = [[row, step] for row, step, *rewards in run.history[next_prompt:]]
    about = {
        "step": run.done,
        "kl_coef": run.kept["kl_coef"],
        "updates": {name: learner.n_updates for name, learner in run.learners.items()},
        "history": run.history[:next_prompt] + without_rewards,
        "next_prompt": next_prompt,
    }
    (temporary / "step.json").write_text(json.dumps(about))
    (temporary / STATE_FILE).write_bytes(run.kept["estimator"])
    temporary.rename(temporary.with_name(temporary.name.removeprefix(".")))
    old = checkpoints(run.folder)[: -run.args.keep_checkpoints]
    for path in {*old} - {best_checkpoint(run)}:
        path.rename(path.with_name(f".{path.name}"))


def checkpoints(folder: Path) -> list[Path]:
    """Returns a run's checkpoints, oldest first."""
    return sorted(folder.glob("checkpoints/step_*"))


def best_checkpoint(run) -> Path | None:
    """Returns the checkpoint with the highest eval/reward, else the latest one, else None."""
    saved = {int(path.name.removeprefix("step_")): path for path in checkpoints(run.folder)}
    evaluated = [step for step in saved if step in run.evals]
    step = max(evaluated, key=run.evals.get, default=max(saved, default=None))
    return saved.get(step)


def resume(run, checkpoint: Path, state: dict):
    """Continues a run from what `read_checkpoint` returns. Raises BadInput if it does not load."""
    run.done = state["step"]
    run.saved = run.done
    if getattr(run.task, "sampler", None):  # its history
        run.history = state["history"]
    run.estimator_state = state["estimator"]
    if run.args.kl_target and "kl_coef" not in state["changed"]:
        run.kl.coef = state["kl_coef"]
    for name, learner in run.learners.items():
        learner.n_updates = state["updates"].get(name, 0)
    load_checkpoint(run, checkpoint)
    run.log.say(f"resuming after step {run.done}")
    run.log.write_about()
    run.evals = on_main(logged, run.folder, "eval/reward")


def load_checkpoint(run, folder: Path):
    """Loads networks and, after n_updates, optimisers in place. Raises BadInput if one fails."""
    from torch.distributed.checkpoint import CheckpointException, load, state_dict

    state = training_state(run)
    try:
        load(state, checkpoint_id=folder)
    except CheckpointException as error:
        reason = str(error).strip().splitlines()[-1]
        raise BadInput(
            f"--resume: {folder} does not load: {reason}; move it elsewhere to use the one before"
        ) from None
    for name, learner in run.learners.items():
        if learner.n_updates:
            settings = [{**group} for group in learner.groups]  # by the present flags
            state_dict.set_optimizer_state_dict(
                learner.net, learner.optimizers, state[f"{name}_optimizer"]
            )
            for group, own in zip(learner.groups, settings, strict=True):
                group |= own


# ---------------------------------------------------------------- the trained policy


def save_policy(run, folder: Path):
    """Writes the policy in Hugging Face format, with its tokenizer or processor.

    With --lora_rank the adapter is merged into the weights, and is also in the folder `adapter`
    in peft's format. All ranks call this. The main rank holds the weights of one file at a time."""
    model = run.policy.net.model
    dtype = run.policy.net.engine_dtype
    generation = model.generation_config
    # transformers loads some that it refuses to save: a temperature without do_sample.
    model.generation_config = type(generation)()
    temporary = folder.with_name(f".{folder.name}")
    on_main(shutil.rmtree, temporary, True)  # of a killed run
    buffers = dict(model.named_buffers())  # these keep their own dtype
    weights = {}
    n_bytes = 0
    for name, tensor in whole_weights(model, dtype):
        if n_bytes > FILE_BYTES:
            on_main(_write_weights, temporary, model, weights)
            weights.clear()
            n_bytes = 0
        n_bytes += tensor.numel() * dtype.itemsize
        if dist.get_rank() == 0:
            weights[name] = tensor.cpu() if name in buffers else tensor.to("cpu", dtype)
    on_main(_write_weights, temporary, model, weights)
    adapter = {
        f"base_model.model.{name.replace('.default', '')}": whole(parameter.detach())
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }
    tokenizer = run.processor or run.tokenizer
    on_main(_write_policy, folder, model, dtype, generation, tokenizer, adapter, model_card(run))


def model_card(run) -> str:
    """Returns the README.md of a trained policy: its base, task, command and last rewards."""
    args = run.args
    base = "" if os.path.isdir(args.model) else f"base_model: {args.model}\n"  # a name on the hub
    card = f"""---
{base}library_name: transformers
---
# {Path(args.model).name}, trained on {Path(args.task).stem}

{run.done} steps of `--algo {args.algo}` by flatrl:

    {shlex.join(sys.argv)}

Mean rewards:

"""
    for title, name in ("training", "reward/mean"), ("evaluation", "eval/reward"):
        for step, value in [*logged(run.folder, name).items()][-1:]:
            card += f"- {title}: {value:.3f} at step {step}\n"
    return card


def _write_weights(folder, model, weights):
    """Writes the next file of a model's weights, and its configuration."""
    with refusing("the policy or its configuration can't be saved"):
        model.save_pretrained(folder, state_dict=weights)
        number = len([*folder.glob("*.safetensors")])
        (folder / "model.safetensors").rename(folder / f"model-{number:05}.safetensors")


def _write_policy(folder, model, dtype, generation, tokenizer, adapter, card):
    """Completes a folder of weights: its index, adapter (if any), tokenizer, card and name."""
    temporary = folder.with_name(f".{folder.name}")
    files = sorted(temporary.glob("model-*.safetensors"))
    if len(files) == 1:
        files[0].rename(temporary / "model.safetensors")
    else:
        file_of = {name: path.name for path in files for name in safe_open(path, "pt").keys()}
        index = {"metadata": {}, "weight_map": file_of}
        (temporary / "model.safetensors.index.json").write_text(json.dumps(index))
    with refusing("the policy's adapter, configuration or tokenizer can't be saved"):
        model.config.dtype = dtype  # not the network's
        model.config.save_pretrained(temporary)
        generation.to_json_file(temporary / "generation_config.json")
        if adapter:
            config = replace(model.peft_config["default"], inference_mode=True)
            config.save_pretrained(temporary / "adapter")
            save_file(adapter, temporary / "adapter" / "adapter_model.safetensors")
        tokenizer.save_pretrained(temporary)
        readme = temporary / "README.md"
        readme.write_text(card)
        for path in temporary.rglob("*.safetensors"):  # which only their owner may read
            path.chmod(readme.stat().st_mode)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
