"""A run's folder: its lock, its checkpoints, resuming, and the trained policy.

Plain and sharded networks have one checkpoint format, torch.distributed.checkpoint's: a run
resumes on any number of ranks, with or without --shard. All randomness and every learning rate
are functions of --seed and the step, so no state of a generator or schedule is saved."""

import contextlib
import fcntl
import itertools
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from flatrl.bad_input import BadInput, BadReward, NothingLeft, need, pickled_state, refusing
from flatrl.contents import MODEL, ROWS, VAL_ROWS
from flatrl.files import logged
from flatrl.log import or_warn
from flatrl.models import whole, whole_weights
from flatrl.processes import all_gather, on_main
from flatrl.terminal import shown

# Flags that may differ with --resume: they concern evaluation, log, memory and speed, and don't
# make it another run.
FLAGS_FREE_TO_CHANGE_ON_RESUME = {
    "output_dir",
    "val_files",
    "trust_remote_code",
    "dump_rollouts",
    "tokens_per_micro_batch",
    "gradient_checkpointing",
    "shard",
    "offload",
    "oversample",
    "tp",
    "gpu_memory_utilization",
    "engine_args",
    "deterministic",
    "eval_every",
    "eval_samples",
    "eval_sampling_args",
    "save_every",
    "stop_at_reward",
    "keep_checkpoints",
    "resume",
    "wandb_project",
}

STATE_FILE = "estimator.pkl"  # in a checkpoint: the estimator's state, if it has any

# ---------------------------------------------------------------- the folder


def claim_for_all_hosts(args):
    """Locks --output_dir for this run, and makes the folder on every host.

    Raises BadInput on all ranks as `claim_folder` does, or if the hosts lack the common folder
    that --shard needs."""
    on_main(claim_folder, args)
    os.makedirs(args.output_dir, exist_ok=True)  # NFS then shows the lock in it
    folder_is_shared = os.path.exists(f"{args.output_dir}/.lock")
    need(
        all(all_gather(folder_is_shared or args.shard is not True)),
        "--shard needs one --output_dir that all hosts see, because each writes a part of a "
        "checkpoint; --shard hybrid does not",
    )


def claim_folder(args):
    """Locks --output_dir for this process, before anything costly starts.

    Raises BadInput if another run is writing there, if the folder has files but
    no run, or if --resume finds no checkpoint; OSError if the folder can't be written."""
    folder = Path(args.output_dir)
    if args.resume:
        need(
            checkpoints(folder),
            f"--resume: no checkpoint in {folder}; start without --resume, or give the "
            "run's --output_dir",
        )
    elif folder.is_dir():
        names = {*os.listdir(folder)} - {".lock"}
        need(
            not names or "args.json" in names,
            f"--output_dir {folder} holds {min(names, default='')}, but no run: it has no "
            "args.json, and is not moved aside",
        )
    _lock(folder)


def _lock(folder):
    """Locks a folder for the life of this process (lockf: a child does not inherit the lock)."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)  # never closed: that would unlock
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput(
            f"another run is writing to {folder}: choose another --output_dir, or wait for its end"
        ) from None


def prepare_folder(args) -> tuple[Path | None, dict]:
    """Makes the run's folder ready, and finds the checkpoint to resume from.

    With --resume, returns the latest whole checkpoint and what `_read_whole` returns of it;
    broken checkpoints are moved aside. Otherwise an earlier run in the folder is moved aside,
    unless it failed before it had logged anything, and (None, {}) is returned."""
    folder = Path(args.output_dir)
    if not args.resume:
        files = {path.name for path in folder.rglob("*") if path.is_file()}
        if files - {".lock", "args.json"}:
            moved = _move_aside(folder)
            print(f"{folder} held an earlier run: moved to {moved}", flush=True)
            _lock(folder)  # the old lock moved with the folder, and is held as well
        return None, {}
    for path in reversed(checkpoints(folder)):
        try:
            return path, _read_whole(path)
        except Exception as error:  # json and pickle raise many kinds
            moved = _move_aside(path)
            problem = f"{type(error).__name__}: {error}"
            print(f"{path} is broken: {problem}; moved to {moved}", flush=True)
    raise BadInput(f"--resume: no checkpoint in {folder} is whole; start without --resume")


def _read_whole(checkpoint):
    """Returns a checkpoint's step.json and, as "estimator", the state of the estimator.

    Raises unless the checkpoint is whole: if one of its files is missing or cut off."""
    from torch.distributed.checkpoint import FileSystemReader

    state = json.loads((checkpoint / "step.json").read_text())
    need({"step", "history", "parts", "next_prompt"} <= {*state}, "its step.json lacks keys")
    for stored in FileSystemReader(checkpoint).read_metadata().storage_data.values():
        file = checkpoint / stored.relative_path
        need(file.stat().st_size >= stored.offset + stored.length, f"{file.name} is cut off")
    state["estimator"] = {}
    if (checkpoint / STATE_FILE).exists():
        state["estimator"] = pickle.loads((checkpoint / STATE_FILE).read_bytes())
    return state


def _move_aside(folder):
    """Renames a folder to the first free of folder.1, folder.2, ...; returns the new path."""
    for i in itertools.count(1):
        path = folder.with_name(f"{folder.name}.{i}")
        if not path.exists():
            return folder.rename(path)


def check_changes(args, contents: dict[str, str], own_model: bool) -> dict[str, str]:
    """Compares flags and contents with those of the run to resume: {name: "before -> now"}.

    contents: as from `contents_of`. Not compared are FLAGS_FREE_TO_CHANGE_ON_RESUME, num_steps at
    a constant rate and, if the task builds the model itself (own_model), the folder in which it
    was built and, where they no longer matter, the starting weights. Other validation rows are only
    reported. Raises BadInput if anything else differs, unless --resume is "changed". Returns {}
    without --resume."""
    if not args.resume:
        return {}
    about = json.loads(Path(args.output_dir, "args.json").read_text())
    before = about["args"]
    free = {*FLAGS_FREE_TO_CHANGE_ON_RESUME}
    if args.lr_schedule == "constant":
        free.add("num_steps")
    if own_model and Path(before["model"]).parent == Path(args.model).parent:
        free.add("model")
        # The model was built by another version of the task's build_model. Other starting weights
        # are replaced by the checkpoint's, but not beneath adapters, and not in a reference.
        if not args.lora_rank and (args.ref_model or args.hints or not args.has_reference):
            free.add(MODEL)
    changed = {}
    for name, value in before.items():
        now = getattr(args, name, value)  # an older version's flag may be gone
        now = json.loads(json.dumps(now))  # as it was written: a tuple is a list
        if name not in free and now != value:
            changed[name] = f"--{name} {value} -> {now}"
    for name, value in about.get("contents", {}).items():  # an older version wrote none
        now = contents.get(name, value)
        if now != value and name == VAL_ROWS:
            print(f"--resume: {name} have changed: eval/reward is another one", flush=True)
        elif now != value and name not in free:
            changed[name] = f"{name} ({value} -> {now})"
    need(
        not changed or args.resume == "changed",
        f"--resume: the run had other flags or contents: {', '.join(changed.values())}; give "
        "--resume changed to resume with these",
    )
    return changed


def check_checkpoint(state: dict, args, task, changed: dict):
    """Raises BadInput if a checkpoint lacks a network, or has other adapters, than the run needs,
    or if its history of the task's sampler can't be continued.

    state: as from `prepare_folder`, {} without --resume. changed: as from `check_changes`."""
    need(
        not args.has_critic or "critic" in state.get("parts", ["critic"]),
        f"--resume changed: --adv_estimator {args.adv_estimator} needs a critic, and the "
        "checkpoint has none: keep the run's own --algo and --adv_estimator, or start another run",
    )
    need(
        "lora_rank" not in changed,
        "--resume changed: --lora_rank can't change, because a checkpoint has the adapters of one "
        "rank, or all weights: start another run",
    )
    history = state.get("history", [])
    sampler = getattr(task, "sampler", None)
    # Without a history, no prompt may have been drawn: the sampler would miss it.
    fits = not (sampler and state.get("next_prompt"))
    if history:
        fits = sampler and ROWS not in changed
    need(
        fits,
        "--resume changed: the history of the task's `sampler` is about other rows, or the task "
        "has one now and had none, or the other way round: start another run",
    )


# ---------------------------------------------------------------- checkpoints


def training_state(run, saved: Sequence[str] = ()) -> dict:
    """Returns the state dicts of the networks that learn, and of their optimisers.

    An optimiser without a step (--critic_warmup) has no state. It is left out, unless its name is
    in `saved`: the parts of a checkpoint that is about to be loaded."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    state = {}
    for name, learner in run.learners.items():
        state[name] = {path: p for path, p in learner.net.named_parameters() if p.requires_grad}
        if learner.optimizer.state or f"{name}_optimizer" in saved:
            state[f"{name}_optimizer"] = get_optimizer_state_dict(learner.net, learner.optimizer)
    return state


@or_warn(BadInput)  # it is raised on all ranks
@shown("saving a checkpoint")
def save_checkpoint(run):
    """Saves the training state after run.done steps, unless it is saved already.

    The decorator returns True if it is saved, and False after a warning.

    A kill never leaves half a checkpoint: a new one gets its name last, and an old one is
    renamed before it is deleted."""
    from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, save

    if run.saved == run.done:
        return
    folder = run.folder / "checkpoints"
    temporary = folder / f".step_{run.done:06d}"
    state = training_state(run)

    def remove_incomplete():  # also those of a run that was killed
        for path in folder.glob(".step_*"):
            shutil.rmtree(path, ignore_errors=True)

    def complete():
        """Writes what is no tensor, and gives the checkpoint its name.

        Then renames those beyond --keep_checkpoints, but not the best."""
        about = {
            "step": run.done,
            "kl_coef": run.kl.coef,
            "parts": list(state),
            "history": run.history,
            "next_prompt": run.pool.next_prompt(run.done) if run.pool else 0,
        }
        (temporary / "step.json").write_text(json.dumps(about))
        if run.estimator_state:
            flag = f"--adv_estimator {run.args.adv_estimator}"
            (temporary / STATE_FILE).write_bytes(pickled_state(run.estimator_state, flag))
        temporary.rename(folder / f"step_{run.done:06d}")
        old = checkpoints(run.folder)[: -run.args.keep_checkpoints]
        for path in {*old} - {best_checkpoint(run.folder)}:
            path.rename(folder / f".{path.name}")

    on_main(remove_incomplete)
    try:
        # The first rank writes what several ranks have: another host's disk may not be shared.
        save(
            state,
            checkpoint_id=temporary,
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
        )
        on_main(complete)
    except CheckpointException as error:  # on all ranks, too
        raise BadInput(str(error)) from None
    finally:
        remove_incomplete()
    run.saved = run.done


def checkpoints(folder: Path) -> list[Path]:
    """Returns a run's checkpoints, oldest first, without those that were moved aside."""
    return sorted(path for path in folder.glob("checkpoints/step_*") if not path.suffix)


def best_checkpoint(folder: Path) -> Path | None:
    """Returns the checkpoint with the highest eval/reward, the first of equals.

    Without an evaluation it is the latest one, without a checkpoint None."""
    rewards = logged(folder, "eval/reward")
    saved = {int(path.name.removeprefix("step_")): path for path in checkpoints(folder)}
    evaluated = [step for step in saved if step in rewards]
    step = max(evaluated, key=rewards.get, default=max(saved, default=None))
    return saved.get(step)


def resume(run, checkpoint: Path, state: dict, changed: dict):
    """Continues a run from a checkpoint: its steps, history, KL coefficient and networks.

    state: what `prepare_folder` returned; changed: what `check_changes` did. Raises BadInput if
    the checkpoint does not load."""
    run.done = state["step"]
    run.saved = run.done
    run.history = state["history"]
    run.estimator_state = state["estimator"]
    if run.args.kl_target and "kl_coef" not in changed:
        run.kl.coef = state["kl_coef"]
    load_checkpoint(run, checkpoint, state["parts"])
    run.log.write_about()
    rewards = on_main(logged, run.folder, "eval/reward")
    if run.done in rewards and run.args.is_reached_by({"eval/reward": rewards[run.done]}):
        run.args.num_steps = run.done  # --stop_at_reward has stopped it here


@contextlib.contextmanager
def save_if_rewards_fail(run, put_to_sleep: Callable):
    """If NothingLeft or BadReward ends the run, saves a checkpoint first. All ranks raise it."""
    try:
        yield
    except (NothingLeft, BadReward):
        if not run.args.rollout_only:
            put_to_sleep(run, keep=True)
            save_checkpoint(run)
        raise


def load_checkpoint(run, folder: Path, parts: Sequence[str]):
    """Loads a checkpoint in place. parts: those named in its step.json.

    Raises BadInput if it does not load."""
    from torch.distributed.checkpoint import CheckpointException, load, state_dict

    state = training_state(run, parts)
    try:
        load(state, checkpoint_id=folder)
    except CheckpointException as error:
        reason = str(error).strip().splitlines()[-1]
        raise BadInput(
            f"--resume: {folder} does not load ({reason}): it is damaged, has other networks, or "
            "is not on every host. Move it away to resume from the one before"
        ) from None
    for name, learner in run.learners.items():
        if f"{name}_optimizer" in parts:
            state_dict.set_optimizer_state_dict(
                learner.net, learner.optimizer, state[f"{name}_optimizer"]
            )
            for group in learner.optimizer.param_groups:
                group |= learner.optimizer.defaults  # by the present flags


# ---------------------------------------------------------------- the trained policy


@or_warn(BadInput)
@shown("saving the policy")
def save_policy(run, folder: Path):
    """Writes the policy in Hugging Face format, with its tokenizer or processor.

    With --lora_rank the adapter is merged into the weights, and is also in the folder `adapter`
    in peft's format. All ranks call this, because a sharded policy is gathered, in float32, into
    host memory. The main rank writes."""
    model = run.policy.net.model
    weights = {}
    for name, tensor in whole_weights(model, torch.float32):  # all ranks take part in the gathering
        if dist.get_rank() == 0:
            weights[name] = tensor.cpu()
    adapter = {
        f"base_model.model.{name.replace('.default', '')}": whole(parameter.detach())
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }
    temporary = folder.with_name(f".{folder.name}")

    def write():
        """Writes to a temporary folder, which then takes the place of an earlier policy."""
        shutil.rmtree(temporary, ignore_errors=True)
        _write_policy(temporary, model, run.processor or run.tokenizer, weights, adapter)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)

    on_main(write)


def try_to_save(args, policy, tokenizer):
    """Writes a policy's files without its weights, and removes them.

    tokenizer: or the processor. Raises BadInput for what `save_policy` would refuse after the
    training."""
    if args.num_steps and not args.rollout_only:
        with tempfile.TemporaryDirectory() as folder:
            _write_policy(Path(folder), policy.model, tokenizer, {}, {})


def _write_policy(folder, model, tokenizer, weights, adapter):
    """Writes a model with these weights, its adapter if it has one, and its tokenizer.

    Raises BadInput with what the libraries raise."""
    dtype = model.config.dtype
    generation = model.generation_config
    with refusing("the policy, its configuration or its tokenizer can't be saved"):
        # transformers loads some that it refuses to save: a temperature without do_sample.
        model.generation_config = type(generation)()
        try:
            model.save_pretrained(folder, state_dict=weights)
        finally:
            model.generation_config = generation
            model.config.dtype = dtype  # transformers has made it a text
        generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
        if hasattr(model, "peft_config"):
            model.peft_config["default"].save_pretrained(folder / "adapter")
            save_file(adapter, folder / "adapter" / "adapter_model.safetensors")
        tokenizer.save_pretrained(folder)
