"""Tests that need a GPU; skipped without CUDA: python -m pytest tests/gpu -s

Memory that sleep frees, exact weights after each wake, engine against trainer in bfloat16,
--offload, the micro-batch that is tried at the start, and whole runs; and the sections of
bench/gpu.py: requests that live over a sync, the sync of a sharded policy, kernels and others. Models
are random, with the shape of Qwen2.5-0.5B. These tests have never been run."""

import argparse
import copy
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import REPO

from flatrl import devices

sys.path.append(str(REPO / "bench"))

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
              pytest.mark.timeout(1200)]  # fmt: skip

GIB = 1 << 30


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, tokenizer) -> str:
    """Random weights, Qwen2.5-0.5B's shape, the calculator's tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path = tmp_path_factory.mktemp("qwen")
    config = Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    torch.nn.init.constant_(model.model.norm.weight, 5.0)  # logits of std 3: at the 0.6 of a random model all is near
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def cuda_engine(model_path, process_group):
    from rollout import Engine
    from train import Args

    args = Args(model=model_path, dtype="bfloat16", max_model_len=1024, max_prompt_tokens=512, max_response_tokens=512)
    args.gpu_memory_utilization = 0.3
    return Engine(model_path, args, torch.device("cuda"), [2])


def policy_of(path: str, shift: float):
    from transformers import AutoModelForCausalLM

    import data

    data.register_packed_attention()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="packed", dtype=torch.float32).cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + shift)
    return types.SimpleNamespace(model=model, dtype=torch.bfloat16)


def engines_bytes() -> int:
    """What a wake maps and a sleep gives back."""
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance().get_current_usage()


def learner_of(path: str, **flags):
    """A learner as train.py makes it on this device, after one step: Adam's states are there; with its update."""
    from gradient_worker import batch_of

    import data
    import train

    args = train.Args(model=path, max_prompt_tokens=512, max_response_tokens=512, **flags)
    accelerator, _ = devices.start_processes(args)
    train.complete_flags(args, cuda=True)
    data.register_packed_attention()
    learner = train.Learner(train.Policy(args), 1e-6, 1, args, accelerator)
    batch = batch_of(8)
    for name in ("advantages", "logprobs_ref"):
        batch[name] = torch.ones_like(batch["response_mask"])
    learner.update = lambda: train.optimise(learner, train.policy_objective, batch, range(8), args, accelerator)
    learner.update()
    return learner, args, accelerator


def states_of(learner) -> list[torch.Tensor]:
    """Adam's, of this rank."""
    states = [x for state in learner.optimizer.state.values() for x in state.values()]
    return [x.to_local() if hasattr(x, "to_local") else x for x in states]


@torch.no_grad()
def trainer_logprobs(model, prompt: list[int], response: list[int]) -> torch.Tensor:
    import data

    ids, positions, cu_seqlens, max_seqlen = data.pack([prompt + response], [len(prompt) + len(response)])
    with torch.autocast("cuda", torch.bfloat16):
        out = model(input_ids=ids.cuda(), position_ids=positions.cuda(), cu_seqlens=cu_seqlens.cuda(),
                    max_seqlen=max_seqlen, use_cache=False)  # fmt: skip
    logprobs = out.logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(response, device="cuda")[:, None])[:, 0].cpu()


def test_sleep_frees_memory_and_every_wake_has_the_new_weights(cuda_engine, background, model_path):
    from conftest import generate

    import train

    prompts = [[(7 * i + j) % 900 + 10 for j in range(40)] for i in range(8)]
    for cycle in range(3):
        policy = policy_of(model_path, 0.02 * (cycle + 1))
        train.sync(cuda_engine, policy, cycle)
        awake = torch.cuda.mem_get_info()[0]
        outs = generate(cuda_engine, background, prompts, temperature=1.0, max_tokens=64)
        cuda_engine.sleep()
        freed = torch.cuda.mem_get_info()[0] - awake
        assert freed > 0.95 * engines_bytes() > 0.2 * torch.cuda.mem_get_info()[1]
        difference = torch.cat([
            (torch.tensor(o.logprobs) - trainer_logprobs(policy.model, p, o.token_ids)).abs()
            for p, o in zip(prompts, outs, strict=True)
        ])  # fmt: skip
        print(f"cycle {cycle}: mean |engine - trainer| {difference.mean():.4f}, "
              f"sleep freed {freed / GIB:.2f} GiB")
        assert difference.mean() < 0.1


@pytest.mark.parametrize("what", ["optimizer", "all"])
def test_offload_frees_the_gpu_into_pinned_memory(model_path, what, monkeypatch):
    import train

    learner, args, accelerator = learner_of(model_path, offload=what, kl_coef=0.1)
    _, _, reference = train.build_networks(args, accelerator, train.Policy(args))
    engine = types.SimpleNamespace(state="asleep", sleep=lambda keep: None)
    run = types.SimpleNamespace(args=args, accelerator=accelerator, learners={"policy": learner}, policy=learner,
                                critic=None, reference=reference, engine=engine, done=0)  # fmt: skip
    before, free = [x.clone().cpu() for x in states_of(learner)], torch.cuda.memory_allocated()
    monkeypatch.setattr(train, "sync", lambda *_, version: setattr(engine, "state", "awake") or 0.0)
    with train.awake(run):
        freed = free - torch.cuda.memory_allocated()
        n = sum(p.numel() for p in learner.net.parameters())
        print(f"--offload {what}: {freed / GIB:.2f} GiB freed of {n / 1e9:.2f} B parameters")
        assert freed > (8 if what == "optimizer" else 10) * 0.99 * n  # Adam's two; the reference in bfloat16
        assert all(x.is_pinned() for x in states_of(learner))
        assert {p.device.type for p in reference.parameters()} == {"cpu" if what == "all" else "cuda"}
    assert all(x.is_cuda and torch.equal(x.cpu(), y) for x, y in zip(states_of(learner), before, strict=True))
    learner.update()


def test_a_micro_batch_that_does_not_fit_is_halved(model_path):
    """The largest is far too large. What is left trains, and needs no more memory than was tried."""
    learner, args, _ = learner_of(model_path)
    args.tokens_per_micro_batch = 1 << 24
    said = []
    torch.cuda.reset_peak_memory_stats()
    devices.fit_micro_batch({"policy": learner}, args, torch.device("cuda"), said.append)
    print(said[-1])
    assert args.window <= args.tokens_per_micro_batch < 1 << 24
    learner.update()


def launched(*command: str) -> str:
    """What a Python process that ends by itself writes to its stderr. It is no rank, as this one has become."""
    from common import environment_of_no_rank

    done = subprocess.run([sys.executable, *command], cwd=REPO, capture_output=True, text=True, timeout=900,
                          env=environment_of_no_rank())  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def trained(folder: Path, *flags: str, task: str = "examples/calculator.py") -> list[dict]:
    """The metrics of a run of train.py that ends by itself, without a word from CUDA."""
    printed = launched("train.py", "--task", task, "--output_dir", str(folder), *flags)
    for word in ("CUDA error", "Traceback", "terminate called"):
        assert word not in printed, printed[-4000:]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_asynchronous_run_ends_cleanly_and_resumes(tmp_path):
    flags = ["--max_staleness", "2", "--oversample", "1.5", "--save_every", "1", "--eval_every", "2",
             "--gpu_memory_utilization", "0.2", "--prompts_per_step", "8", "--offload", "optimizer"]  # fmt: skip
    rows = trained(tmp_path / "run", *flags, "--num_steps", "3")
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and any(row["rollout/staleness_mean"] > 0 for row in rows[1:])
    again = trained(tmp_path / "run", *flags, "--num_steps", "5", "--resume")
    assert again[:4] == rows and [row["step"] for row in again] == [0, 1, 2, 3, 4, 5]
    assert all(row["rollout/logp_diff_mean"] < 0.05 and row["actor/grad_norm"] > 0 for row in again[1:])


def test_images_and_requests_that_are_kept_over_a_sync(tmp_path):
    rows = trained(
        tmp_path / "run", "--agent", "looker", "--num_steps", "4", "--prompts_per_step", "4", "--group_size", "2",
        "--max_prompt_tokens", "96", "--max_response_tokens", "64", "--eval_every", "0", "--max_staleness", "1",
        "--oversample", "2", "--gpu_memory_utilization", "0.2",
        task="tests/vision_task.py",
    )  # fmt: skip
    for row in rows[1:]:
        assert row["rollout/logp_diff_mean"] < 0.05 and row["rollout/failed_agent_loop"] == 0


# ---------------------------------------------------------------- sections of bench/gpu.py


@pytest.mark.parametrize("section", ["kernels", "sleep", "agree", "suspended", "sync", "update"])
def test_section_of_the_bench(section, tmp_path):
    """Each runs in a process of its own, and asserts what it can."""
    import gpu

    options = argparse.Namespace(folder=tmp_path, device="cuda", tiny=False, cycles=5, timeout=900)
    rows = dict(gpu.measure(options, section, "0.5B"))
    print(rows)
    assert rows and "FAILED" not in rows


def test_training_by_accelerates_fsdp2_config(tmp_path):
    launched(
        "-m", "accelerate.commands.launch", "--config_file", "configs/eight_gpus_fsdp2.yaml",
        "--num_processes", str(torch.cuda.device_count()), "train.py", "--algo", "ppo", "--kl_coef", "0.01",
        "--num_steps", "2", "--gpu_memory_utilization", "0.2", "--output_dir", str(tmp_path / "run"),
    )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["actor/grad_norm"] > 0 and row["rollout/logp_diff_mean"] < 0.05 for row in rows[1:])
    assert (tmp_path / "run/checkpoints/step_000002/.metadata").is_file()


def test_packed_attention_forward_and_backward_against_eager(process_group):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    import data

    data.register_packed_attention()
    config = Qwen2Config(vocab_size=500, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)  # fmt: skip
    torch.manual_seed(0)
    own = copy.deepcopy(config)  # each model keeps its attention in the configuration
    reference = Qwen2ForCausalLM._from_config(own, attn_implementation="eager").cuda()
    packed = Qwen2ForCausalLM._from_config(config, attn_implementation="packed").cuda().bfloat16()
    packed.load_state_dict(reference.state_dict())
    lengths = [3, 60, 17, 129]
    rows = [torch.randint(0, 500, (n,)) for n in lengths]
    ids, positions, cu_seqlens, max_seqlen = data.pack(rows, lengths)
    out = packed(
        input_ids=ids.cuda(), position_ids=positions.cuda(), cu_seqlens=cu_seqlens.cuda(), max_seqlen=max_seqlen
    ).logits[0]
    expected = torch.cat([reference(row[None].cuda()).logits[0] for row in rows])
    assert (out.float() - expected).abs().max() < 0.05
    weights = torch.randn_like(expected)
    (out.float() * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, p), q in zip(packed.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad.float() - q.grad).norm() / q.grad.norm() < 0.05, name
