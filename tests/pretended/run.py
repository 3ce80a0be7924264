"""Runs train.main on the pretended GPU, with an engine that makes tokens up: run.py FLAGS.

Then, with PRETEND["resume"], once more with those flags. PRETEND["faults"] are by step: see
FAULTS. What the steps waited for, and where everything was, is written to PRETEND["report"]."""

import json
import math
import os
import random
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pretend
import vllm.model_executor.models.transformers.base  # noqa: F401  (before there is a GPU)

PRETEND = json.loads(os.environ["PRETEND"])
pretend.install(Path(PRETEND["library"]))
sys.path.insert(0, str(pretend.REPO))

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

import data
import rollout
import train
from agent_loop import expand
from flatrl import checkpoints, devices

N_IDS = 200  # the engine samples these ids, all alike


class LLM:
    """In place of vllm.LLM."""

    def __init__(self, **_):
        self.requests = []
        core = self.llm_engine = MagicMock()
        core.vllm_config.cache_config = SimpleNamespace(num_gpu_blocks=100, block_size=32)
        core.engine_core.engine_core.request_block_hasher = None
        core.engine_core.engine_core.scheduler.waiting = []
        core.engine_core.engine_core.scheduler.kv_cache_manager.usage = 0
        core.output_processor.request_states = {}
        core.add_request = lambda *request: self.requests.append(request)
        core.step = self.step

    def apply_model(self, function): ...

    def step(self) -> list:
        look("rollout")
        done = [self.answer(*request) for request in self.requests]
        self.requests = []
        return done

    def answer(self, call_id, prompt, params):
        images = prompt.get("multi_modal_data", {}).get("image", [])
        ids = random.Random(params.seed).choices(range(N_IDS), k=params.max_tokens)
        logprobs = SimpleNamespace(logprobs=[-math.log(N_IDS)] * len(ids))
        return SimpleNamespace(
            finished=True,
            request_id=call_id,
            outputs=[SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason="length")],
            prompt_token_ids=expand(prompt["prompt_token_ids"], images, RUNS[-1].processor),
            num_cached_tokens=0,
        )


def load_weights(engine, named_tensors, version: int):
    """In place of rollout.Engine's: looks at the tensors that vLLM would copy."""
    for _, tensor in named_tensors:
        SEEN["places"]["sync"]["weights"].add(f"{where(tensor)} {tensor.dtype}")
    engine.version = version
    engine._become("synced")


# ---------------------------------------------------------------- what is seen

RUNS = []
REPORT = {}  # "start", "clean" for steps, or the name of a fault -> what was seen


def begin(name: str):
    """Makes what is seen from now on REPORT[name]."""
    global SEEN
    empty = {"places": defaultdict(lambda: defaultdict(set)), "waits": set()}
    SEEN = REPORT.setdefault(name, empty)
    pretend.waits = SEEN["waits"]


def where(tensor: torch.Tensor) -> str:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return "pinned" if tensor.is_pinned() else tensor.device.type


def look(phase: str):
    """Notes where all tensors of the run are."""
    run = RUNS[-1]
    parts = {f"{name} states": [*x.optimizer.state.values()] for name, x in run.learners.items()}
    nets = {name: x.net for name, x in run.learners.items()} | {"reference": run.reference}
    for name, net in nets.items():
        if isinstance(net, torch.nn.Module):
            parts[name] = [*net.parameters(), *net.buffers()]
    for name, tensors in parts.items():
        SEEN["places"][phase][name] |= {where(x) for x in tree_leaves(tensors)}


def watched(function, phase: str):
    """Returns the function, which now looks at the run before and after a call."""

    def watching(*args):
        look(phase)
        result = function(*args)
        look(phase)
        return result

    return watching


def setup(args):
    begin("start")
    RUNS.append(SETUP(args))
    look("start")
    return RUNS[-1]


# ---------------------------------------------------------------- faults, each for one step


def item(function=train.policy_objective):
    """A number is read in the objective."""

    def reading(scores, columns, args):
        scores["logprobs"].sum().item()
        return function(scores, columns, args)

    return patch.object(train, "policy_objective", reading)


def pageable():
    """Batches are not pinned."""

    def to_device(tensors, device):
        return tree_map_only(torch.Tensor, lambda x: x.to(device, non_blocking=True), tensors)

    return patch.object(data, "to_device", to_device)


def forgotten(function=train.offload):
    """The reference stays on the host after the rollout."""

    def offload(run, device):
        if device != "cpu":
            run = replace(run, reference=None)
        function(run, device)

    return patch.object(train, "offload", offload)


def on_host(function=train.policy_objective):
    """A tensor on the host meets those on the GPU. This ends the run."""

    def mixing(scores, columns, args):
        columns["advantages"] = columns["advantages"].cpu()
        return function(scores, columns, args)

    return patch.object(train, "policy_objective", mixing)


FAULTS = {x.__name__: x for x in (item, pageable, forgotten, on_host)}
PATCHES = []


def collect_rollouts(run, step):
    """Begins a step: plants its fault, and removes that of the step before."""
    while PATCHES:
        PATCHES.pop().stop()
    name = PRETEND.get("faults", {}).get(str(step))
    if name:
        PATCHES.append(FAULTS[name]())
        PATCHES[0].start()
    begin(name or "clean")
    return COLLECT(run, step)


# ---------------------------------------------------------------- the run

SETUP, COLLECT, JOIN = train.setup, train.collect_rollouts, devices.join_group
SAVE, UPDATE = checkpoints.save_checkpoint, train.update
with (
    patch("vllm.LLM", LLM),
    patch("vllm.device_allocator.cumem.CuMemAllocator.get_instance") as memory,
    patch.object(rollout.Engine, "load_weights", load_weights),
    patch.object(devices, "join_group", lambda name: JOIN(name.replace("nccl", "gloo"))),
    patch.object(train, "check_model", lambda args, device: None),
    patch.object(train, "setup", setup),
    patch.object(train, "collect_rollouts", collect_rollouts),
    patch.object(train, "update", watched(UPDATE, "update")),
    patch.object(checkpoints, "save_checkpoint", watched(SAVE, "checkpoint")),
):
    memory().get_current_usage.return_value = 0
    try:
        train.main(train.parse_args(sys.argv[1:]))
        if "resume" in PRETEND:
            for name in RUNS[-1].task.__imported__:
                sys.modules.pop(name)
            train.main(train.parse_args([*sys.argv[1:], "--resume", *PRETEND["resume"]]))
    except RuntimeError as error:
        if "on_host" not in REPORT:
            raise
        REPORT["on_host"]["error"] = str(error)
rank = torch.distributed.get_rank()
Path(f"{PRETEND['report']}.{rank}").write_text(json.dumps(REPORT, default=sorted))
