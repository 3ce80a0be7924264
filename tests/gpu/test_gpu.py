"""Tests that need a GPU: python -m pytest tests/gpu -s

They cover --offload and whole runs. bench/gpu.py measures memory that sleep frees, weight syncs,
and engine against trainer in bfloat16."""

import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import REPO, metrics_of, run
from fixed_batch import batch_of

import data
import train
from flatrl import devices

sys.path.append(str(REPO / "bench"))
import gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(1200),
]

COLUMNS = ["response_mask", "unit_tokens", "advantages", "logprobs_rollout", "logprobs_ref"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    """Random weights with Qwen2.5-0.5B's shape, and the calculator's tokenizer."""
    path = tmp_path_factory.mktemp("qwen")
    gpu.build("0.5B", path)
    return str(path)


def test_offload_frees_the_gpu(model_path):
    """Of Adam's two states, and of the reference, which is in bfloat16."""
    args = train.Args(
        model=model_path, max_prompt_tokens=512, max_response_tokens=512, offload="all",
        kl_coef=0.1, tokens_per_micro_batch=16384,
    )  # fmt: skip
    accelerator, _ = devices.start_processes(args)
    train.complete_flags(args, cuda=True)
    data.register_packed_attention()
    policy = train.Policy(args)
    reference = train.build_reference(args, policy)
    policy, _, reference = train.build_networks(args, accelerator, policy, reference, None)
    batch = batch_of(8)
    for name in ("advantages", "logprobs_ref"):
        batch[name] = torch.ones_like(batch["response_mask"])

    def update():
        train.optimise(policy, train.policy_objective, batch, COLUMNS, range(8))

    update()  # Adam has states then
    run = types.SimpleNamespace(
        args=args, learners={"policy": policy}, critic=None, reference=reference
    )
    allocated = torch.cuda.memory_allocated()
    devices.offload(run, "cpu")
    freed = allocated - torch.cuda.memory_allocated()
    n = sum(p.numel() for p in policy.net.parameters())
    assert freed > (8 + 2) * 0.99 * n
    devices.offload(run, accelerator.device)
    assert torch.cuda.memory_allocated() > allocated * 0.99
    update()


# ---------------------------------------------------------------- processes of their own


def trained(folder: Path, *flags: str, task: str = "examples/calculator.py") -> list[dict]:
    """The metrics of a run of train.py."""
    flags = ["--task", task, "--gpu_memory_utilization", "0.2", *flags]
    printed = run(*flags, "--output_dir", folder)
    for word in ("CUDA error", "CUDA Error", "Traceback", "terminate called"):
        assert word not in printed, printed
    return metrics_of(folder)


def test_an_asynchronous_run_ends_cleanly_and_resumes(tmp_path):
    flags = [
        *["--max_staleness", "2", "--oversample", "1.5", "--save_every", "1"],
        *["--eval_every", "2", "--prompts_per_step", "8", "--offload", "optimizer"],
        *["--algo", "ppo", "--kl_coef", "0.01"],
    ]
    rows = trained(tmp_path / "run", *flags, "--num_steps", "3")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert any(row["rollout/staleness_mean"] > 0 for row in rows[1:])
    again = trained(tmp_path / "run", *flags, "--num_steps", "5", "--resume")
    assert again[:4] == rows and [row["step"] for row in again] == [0, 1, 2, 3, 4, 5]
    for row in again[1:]:
        assert row["rollout/logp_diff_mean"] < 0.05 and row["actor/grad_norm"] > 0


def test_images_and_requests_that_are_kept_over_a_sync(tmp_path):
    flags = ["--agent", "looker", "--num_steps", "4", "--prompts_per_step", "4"]
    flags += ["--group_size", "2", "--max_prompt_tokens", "96", "--max_response_tokens", "64"]
    flags += ["--eval_every", "0", "--max_staleness", "1", "--oversample", "2"]
    for row in trained(tmp_path / "run", *flags, task="tests/vision_task.py")[1:]:
        assert row["rollout/logp_diff_mean"] < 0.05 and row["rollout/failed_agent_loop"] == 0
