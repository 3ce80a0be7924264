"""Every bench in its smallest form: it ends with code 0 and prints its table. What fits a GPU."""

import re
import runpy
import shlex
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from conftest import KEPT, REPO, SMALL_CACHE, run
from fixed_batch import batch_of

import data
import train

sys.path.append(str(REPO / "bench"))
import common
import fits
import gpu
import update

SHORT = "--prompts 2 --group_size 2 --rounds 1 --tokens 4"
# The command of a bench, and a line of its table, in which # stands for a finite number.
HERE = {
    "gpu.py --size tiny --cycles 2":
        r"agree \| logprobs, float32 \| mean #, max # (?s:.*) \| sleep \| 2 cycles \| # GiB freed",
    f"rollout.py {SHORT} --turns 2 --spread tail":
        r"^ratio # \(# - #\), the engine is idle for #% of a rollout",
    "update.py --rounds 1 --case 4 24 64":
        "^ +bare +score # s, # +update # s, #$",
}  # fmt: skip
APART = {  # experts need vLLM's first engine in a process, the sides of trl.py processes
    "models.py qwen3_moe":
        r"\| qwen3_moe \| agrees \| # \| # \|",
    f"trl.py {SHORT} --warm_up 1 --prompt_tokens 60 --trl --engine_args '{SMALL_CACHE}'":
        "^flatrl +# +# +# +# +#",
}  # fmt: skip


def assert_printed(pattern: str, printed: str):
    expression = pattern.replace("#", r"-?[\d.,]+(?:e[+-]?\d+)?")
    assert re.search(expression, printed, re.MULTILINE), printed


@pytest.mark.parametrize("command, pattern", HERE.items())
def test_bench(command, pattern, process_group, monkeypatch, capsys):
    """In this process, whose engines are kept. To import vLLM takes longer than a bench."""
    make = common.engine_and_policy

    def make_and_keep(args):
        KEPT.append(make(args))
        return KEPT[-1]

    monkeypatch.setattr(common, "engine_and_policy", make_and_keep)
    monkeypatch.setattr(data, "in_prefix_order", data.in_prefix_order)  # update.py changes it
    monkeypatch.setattr(sys, "argv", command.split())
    runpy.run_path(str(REPO / "bench" / sys.argv[0]), run_name="__main__")
    assert_printed(pattern, capsys.readouterr().out)


@pytest.mark.parametrize("command, pattern", APART.items())
def test_bench_in_a_process(command, pattern):
    script, *flags = shlex.split(command)
    assert_printed(pattern, run(*flags, script=f"bench/{script}", ACCELERATE_USE_CPU="true"))


def test_a_part_that_fails_is_a_row(tmp_path):
    command = [REPO / "bench/gpu.sh", "tiny", tmp_path, "host", "replay_8192"]
    done = subprocess.run(command, capture_output=True, text=True)  # there is no run to replay
    assert re.search(r"^\| host \| 0 \| \d+ \| .*best of", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^\| replay_8192 \| 1 \|", done.stdout, re.MULTILINE), done.stdout
    assert "--replay" in (tmp_path / "replay_8192.log").read_text()


def learner_of(folder, **flags) -> train.Learner:
    """The policy of a run with bench/gpu.py's tiny model, sharded, on a CPU."""
    gpu.build("tiny", folder)
    args = train.Args(model=str(folder), dtype="bfloat16", shard=True, **flags)
    train.complete_flags(args, cuda=False)
    return train.Learner(train.Policy(args), 1e-3, 1, args, Accelerator(cpu=True))


def size(tensors) -> int:
    return sum(tensor.to_local().nbytes for tensor in tensors)


@pytest.mark.parametrize("rank", [0, 4])
def test_what_fits_is_counted_as_a_run_has_it(rank, tmp_path, process_group):
    learner = learner_of(tmp_path, lora_rank=rank)
    net = learner.net
    (optimizer,) = learner.optimizers
    batch = batch_of(6)
    packed = net.pack(batch, data.in_prefix_order(batch, range(6)))
    learner.wrapped(packed)["logprobs"].sum().backward()
    optimizer.step()
    states = optimizer.state.values()
    found = {
        "weights": size(net.parameters()),
        "gradients": size(p.grad for p in net.parameters() if p.grad is not None),
        "adam": size(state[name] for state in states for name in ("exp_avg", "exp_avg_sq")),
    }
    assert found == fits.states(fits.SHAPES["tiny"], rank=rank)
    n_parameters = sum(p.numel() for p in net.parameters())
    assert n_parameters == fits.SHAPES["tiny"].parameters + fits.SHAPES["tiny"].adapters(rank)


def test_activations_are_those_that_a_forward_pass_keeps(tmp_path, process_group):
    learner = learner_of(tmp_path)

    def kept(n_rows: int) -> int:
        """Returns the bytes that a pass over so many rows of 64 tokens keeps, with its weights."""
        storages = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage  # alive: no other gets its address
            return tensor

        batch = update.make_batch(n_rows, n_rows, 32, 32)
        packed = learner.net.pack(batch, update.share_nothing(batch, [*range(n_rows)]))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            scores = learner.wrapped(packed)
        total = sum(storage.nbytes() for storage in storages.values())
        scores["logprobs"].sum().backward()
        return total

    expected = fits.activations(fits.SHAPES["tiny"], 4 * 64)
    # More: the last norm, and attention's output, which is copied on a CPU.
    assert expected < kept(8) - kept(4) < 1.25 * expected
