"""Whole runs on the pretended GPU: what the host waits for, and where all tensors are."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pretend
import pytest
import torch
from conftest import run

FLAGS = [
    *["--prompts_per_step", "2", "--group_size", "2", "--tokens_per_micro_batch", "128"],
    *["--eval_every", "0", "--allow_mismatch", "--num_steps", "2", "--kl_coef", "0.1"],
    *["--max_prompt_tokens", "32", "--max_response_tokens", "32"],
]
TEXT = ["--task", "tests/tiny_task.py", "--agent", "two_turns", "--offload", "all"]
PPO = ["--algo", "ppo", "--prompts_per_mini_batch", "1", "--max_staleness", "1"]
IMAGES = [
    *["--task", "tests/vision_task.py", "--agent", "looker", "--offload", "optimizer"],
    *["--lora_rank", "4", "--tokens_per_micro_batch", "160"],
    *["--max_prompt_tokens", "96", "--max_response_tokens", "64"],
]
# All that a run waits for, from its first step on: function, reason, number of lines. Scores, the
# sums of the metrics and the norm are read when everything else has been queued.
WAITS = Counter({
    ("scatter_to_rows", "a copy to the host"): 1,
    ("optimise", "item"): 1,
    ("Learner.step", "item"): 1,
    ("adam_steps", "item"): 1,
    ("offload.<locals>.moved", "a copy to the host"): 1,
    ("offload.<locals>.moved", "a blocking copy to the GPU"): 1,
    ("save_checkpoint", "synchronize"): 1,
})  # fmt: skip
AT_THE_END = Counter({("save_policy", "a copy to the host"): 1})
# Those of transformers' models with images.
WAITS_WITH_IMAGES = Counter({
    ("Vision._encode", "a copy of pageable memory"): 1,
    ("Vision._encode", "a copy to the host"): 1,
    ("Vision._encode", "indices on the host"): 1,
    ("Vision._encode", "repeat_interleave"): 1,
    ("Vision._encode", "unique_consecutive"): 1,
    ("Net.forward", "item"): 1,
    ("the backward pass", "indices on the host"): 1,
    ("the backward pass", "masked_select"): 1,
    ("_write_policy", "a copy to the host"): 1,
})  # fmt: skip


@pytest.fixture
def pretended(tmp_path, cache):
    """pretended(flags, by, **settings of run.py) -> what each rank saw."""
    if not shutil.which("g++"):
        pytest.skip("needs a compiler")
    if torch.version.cuda:
        pytest.skip("needs torch's build for CPUs")
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    library = pretend.build(home / "flatrl-tests")

    def pretended(*flags: str, by: str = "fork", **settings) -> list[dict]:
        settings |= {"library": str(library), "report": str(tmp_path / "report")}
        flags = [*FLAGS, *flags, "--output_dir", tmp_path / "run"]
        script = "tests/pretended/run.py"
        run(*flags, by=by, script=script, cache=cache, PRETEND=json.dumps(settings))
        return [json.loads(file.read_text()) for file in sorted(tmp_path.glob("report.*"))]

    return pretended


def waits_of(seen: dict) -> Counter:
    """By function and reason: in how many lines it waits."""
    return Counter((function, reason) for function, _, reason in seen["waits"])


def check(seen: dict, waits: Counter, moved: list[str], dtypes=("bfloat16",)):
    """The host waits only where it must. During a rollout `moved` is in pinned memory.

    dtypes: of the weights that the engine gets."""
    found = waits_of(seen)
    assert found <= waits, (
        f"{found - waits}: here the host waits for the GPU. Copy to it with data.to_device, and "
        "read numbers after the last micro-batch; or add the wait to this file"
    )
    assert waits <= found, f"{waits - found}: no waits any more: remove them from this file"
    on_gpu = dict.fromkeys(["policy", *moved], ["cuda"])
    assert seen["places"] == {
        "sync": {"weights": [f"cuda torch.{dtype}" for dtype in dtypes]},
        "rollout": on_gpu | dict.fromkeys(moved, ["pinned"]),
        "update": on_gpu,
        "checkpoint": on_gpu,
    }


def test_ppo_resumes_and_every_fault_is_seen(pretended):
    """Each fault is there for one step of the second run."""
    faults = {2: "item", 3: "item_in_loop", 4: "pageable", 5: "forgotten", 6: "on_host"}
    (seen,) = pretended(*TEXT, *PPO, resume=["--num_steps", "7"], faults=faults)
    clean = seen["clean"]
    moved = ["policy states", "critic", "critic states", "reference"]
    check(clean, WAITS | AT_THE_END, moved)
    assert seen["start"]["places"]["start"] == dict.fromkeys(["policy", *moved], ["cuda"])

    def more(name: str) -> set:
        return {*(waits_of(seen[name]) - waits_of(clean))}

    assert more("item") == {("micro_batch_loss", "item")}
    assert more("item_in_loop") == {("optimise", "item")}
    pageable = {(name, "a copy of pageable memory") for name in ("columns_of", "pack_rows")}
    assert more("pageable") == pageable
    after_rollout = clean["places"]["update"]
    assert seen["forgotten"]["places"]["update"] == after_rollout | {"reference": ["pinned"]}
    assert "operands are on two devices" in seen["on_host"]["error"]


def test_images_and_lora(pretended):
    """An adapter is added to its weight in float32."""
    (seen,) = pretended(*IMAGES)
    waits = WAITS | AT_THE_END | WAITS_WITH_IMAGES
    check(seen["clean"], waits, ["policy states"], ("bfloat16", "float32"))


def test_two_ranks(pretended):
    """... which recompute their activations."""
    ranks = pretended(*TEXT, "--gradient_checkpointing", by="ranks")
    for seen, waits in zip(ranks, (WAITS | AT_THE_END, WAITS), strict=True):
        check(seen["clean"], waits, ["policy states", "reference"])
