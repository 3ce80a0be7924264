"""What only a GPU can show; skipped without CUDA. One command: python -m pytest tests/gpu -s

Memory freed by sleep and given back by wake, 200 times, with Adam's states beside it; exact weights after either level;
requests that live on over a sync, with images too; engine against trainer in bfloat16 at logits as wide as a trained
model's; packed attention (a forest, windows) and token_logprobs against float64; --offload; an update's peak memory
against the plan; the sync of a sharded policy; whole runs: asynchronous, resumed, with images, by accelerate's FSDP2
config on as many GPUs as there are, each to a clean exit. Models are random, in the shape of Qwen2.5-0.5B. Measured
sections are those of bench/gpu.py. Nobody has run these yet.
"""

import argparse
import copy
import dataclasses
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


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_memory_and_every_wake_has_the_new_weights(cuda_engine, background, model_path, level):
    from conftest import generate

    import train

    prompts = [[(7 * i + j) % 900 + 10 for j in range(40)] for i in range(8)]
    for cycle in range(3):
        policy = policy_of(model_path, 0.02 * (cycle + 1))
        asleep = torch.cuda.mem_get_info()[0]
        train.sync(cuda_engine, policy, cycle)
        awake = torch.cuda.mem_get_info()[0]
        outs = generate(cuda_engine, background, prompts, temperature=1.0, max_tokens=64)
        cuda_engine.sleep(level=level)
        freed = torch.cuda.mem_get_info()[0] - awake
        print(
            f"level {level}: {asleep / GIB:.2f} GiB free asleep, {awake / GIB:.2f} awake; sleep freed {freed / GIB:.2f}"
        )
        assert freed > 0.95 * engines_bytes() > 0.2 * torch.cuda.mem_get_info()[1]
        difference = torch.cat([
            (torch.tensor(o.logprobs) - trainer_logprobs(policy.model, p, o.token_ids)).abs()
            for p, o in zip(prompts, outs, strict=True)
        ])  # fmt: skip
        print(
            f"level {level}, cycle {cycle}: |engine - trainer| mean {difference.mean():.4f}, max {difference.max():.4f}"
        )
        assert difference.mean() < 0.1


@pytest.mark.parametrize("level", [1, 2])
def test_two_hundred_cycles_beside_adams_states(cuda_engine, background, model_path, level):
    from conftest import generate

    import train

    learner, *_ = learner_of(model_path)
    states = states_of(learner)
    assert sum(x.nbytes for x in states) > 8 * 490_000_000 and all(x.is_cuda for x in states)
    asleep = []
    for cycle in range(200):
        train.sync(cuda_engine, learner.net, cycle)
        generate(cuda_engine, background, [[5, 6, 7]], max_tokens=2)
        torch.cuda.empty_cache()
        awake = torch.cuda.mem_get_info()[0]
        cuda_engine.sleep(level=level)
        assert torch.cuda.mem_get_info()[0] - awake > 0.95 * engines_bytes()
        asleep.append(cuda_engine.memory["asleep"])
    for where in ("host", "device"):
        growth = asleep[-1][where] - asleep[20][where]
        print(f"level {level}: {where} memory {asleep[-1][where]:.3f} GB after 200, {growth:+.3f} since the 20th")
        assert growth < 0.1


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


@pytest.mark.parametrize("level", [1, 2])
def test_a_suspended_request_goes_on_under_the_next_weights(cuda_engine, background, model_path, level):
    import train

    policies = [policy_of(model_path, 0.02 * version) for version in range(2)]
    prompt = list(range(10, 60))
    sampling = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True, "stop_token_ids": []}
    train.sync(cuda_engine, policies[0], 0)
    future = background.submit(
        cuda_engine.generate(request_id="suspended", prompt_ids=prompt, sampling_params=sampling)
    )
    for _ in range(16):
        cuda_engine.step()
    cuda_engine.sleep(level=level, keep=True)
    train.sync(cuda_engine, policies[1], 1)
    while not future.done():
        cuda_engine.step()
    out = future.result()
    cuda_engine.sleep()
    n = out.versions.count(0)
    assert out.versions == [0] * n + [1] * (40 - n) and 0 < n < 40
    for version, part in ((0, slice(0, n)), (1, slice(n, 40))):
        expected = trainer_logprobs(policies[version].model, prompt, out.token_ids)[part]
        difference = (torch.tensor(out.logprobs)[part] - expected).abs().mean()
        print(f"level {level}: {len(expected)} tokens of version {version}, mean |engine - trainer| {difference:.4f}")
        assert difference < 0.1


def test_sharded_policy_syncs_with_one_parameter_whole(cuda_engine, model_path):
    import data
    import train

    data.register_packed_attention()
    args = cuda_engine.args = dataclasses.replace(cuda_engine.args, shard=True)
    policy = devices.shard(train.Policy(args), args, torch.device("cuda"))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.03)
    largest = max(4 * p.numel() for p in policy.parameters())  # bytes, in float32
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    names = [name for name, _ in train.named_weights(policy)]
    extra = torch.cuda.max_memory_allocated() - before
    print(f"largest parameter {largest / GIB:.2f} GiB, the sync's extra memory {extra / GIB:.2f} GiB")
    assert len(names) == len(list(policy.model.named_parameters()))
    assert extra < 3 * largest  # what is sent, what is received, and a little
    train.sync(cuda_engine, policy, 0)
    cuda_engine.sleep()
    assert torch.cuda.memory_allocated() - before < largest


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


@pytest.mark.parametrize("level", ["1", "2"])
def test_images_and_requests_that_are_kept_over_a_sync(tmp_path, level):
    rows = trained(
        tmp_path / "run", "--agent", "looker", "--num_steps", "4", "--prompts_per_step", "4", "--group_size", "2",
        "--max_prompt_tokens", "96", "--max_response_tokens", "64", "--eval_every", "0", "--max_staleness", "1",
        "--oversample", "2", "--sleep_level", level, "--gpu_memory_utilization", "0.2",
        task="tests/vision_task.py",
    )  # fmt: skip
    for row in rows[1:]:
        assert row["rollout/logp_diff_mean"] < 0.05 and row["rollout/failed_agent_loop"] == 0


@pytest.mark.parametrize("recompute", ["true", "false"])
def test_a_run_with_checkpointing_and_without(tmp_path, recompute):
    """The plan chooses none for a tiny model; here it is the user's."""
    rows = trained(tmp_path / "run", "--gradient_checkpointing", recompute, "--num_steps", "2", "--prompts_per_step",
                   "4", "--gpu_memory_utilization", "0.2", "--eval_every", "0")  # fmt: skip
    assert all(row["rollout/logp_diff_mean"] < 0.05 and row["actor/grad_norm"] > 0 for row in rows[1:])


# ---------------------------------------------------------------- sections of bench/gpu.py, which assert what they can


@pytest.mark.parametrize("section", ["kernels", "agree", "suspended", "sync", "update"])
def test_section_of_the_bench(section, tmp_path):
    """In a process of its own. update: the peak at micro-batches of 16,384 tokens is the plan's to 10%."""
    import gpu

    options = argparse.Namespace(folder=tmp_path, device="cuda", tiny=False, cycles=5, timeout=900)
    rows = dict(gpu.measure(options, section, "0.5B"))
    print(rows)
    assert rows and "FAILED" not in rows
    if section == "update":
        assert 0.9 < float(rows["peak memory"].split()[-1]) < 1.1


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


@pytest.mark.parametrize("head_dim", [64, 12, 264])
def test_attention_that_this_gpu_lacks_is_refused_before_the_engine_starts(tmp_path, process_group, head_dim):
    """Flash attention's own word: head sizes up to 256, multiples of 8."""
    import contextlib

    from test_attention import saved

    import data
    import train
    from agent_loop import BadInput
    from flatrl import layers

    data.register_packed_attention()
    saved(tmp_path, "qwen2", head_dim=head_dim)
    args = train.Args(model=str(tmp_path), dtype="bfloat16", shard=True)
    refused = contextlib.nullcontext()
    if head_dim != 64:
        refused = pytest.raises(BadInput, match="its attention can't be trained in bfloat16 on cuda")
    with refused:
        layers.try_device(train.Policy(args), args, torch.device("cuda"))


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
