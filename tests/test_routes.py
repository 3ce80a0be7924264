"""Routing replay: the trainer takes the experts that the engine chose, and no others."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fixed_batch import batch_of, check_gradients
from test_attention import expected, saved
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

import data
import train
from agent_loop import AgentLoopOutput, BadInput, TokenOutput, Trajectory
from flatrl import devices
from flatrl.routes import decode_routes, encode_routes

EXPERTS = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2)
EXPERTS |= dict(moe_intermediate_size=48, norm_topk_prob=True, num_hidden_layers=4)
# One for each way to choose: softmax, sigmoid with groups, before the softmax, and right-padded
# rows.
MODELS = {
    "qwen3_moe": {},
    "glm4_moe": dict(n_group=2, topk_group=1, first_k_dense_replace=1),
    "gpt_oss": {},
    "granitemoehybrid": dict(
        layer_types=["mamba", "attention"] * 2, mamba_n_heads=8, mamba_d_head=8
    ),
}


def args_of(folder, model_type: str = "qwen3_moe") -> train.Args:
    """Flags for a tiny random model of an architecture, which it saves in the folder."""
    saved(folder, model_type, **EXPERTS | MODELS[model_type])
    flags = {"router_replay": True, "tokens_per_micro_batch": 100, "dtype": "float32"}
    return train.Args(model=str(folder), **flags)


def own_choice(policy: train.Policy, batch: dict) -> list[torch.Tensor]:
    """Returns the routes that the policy's routers choose by themselves, row by row."""
    chosen = {}  # number of a layer -> its experts; a layer without experts has none
    hooks = []
    for number, router in policy.routers.of_layer:

        def keep(module, inputs, outputs, number=number):
            chosen[number] = next(x for x in outputs if x.dtype == torch.long)

        hooks.append(router.register_forward_hook(keep))
    free = [torch.full((length, 4, 2), -1) for length in batch["lengths"]]
    routes = []
    for row in range(len(free)):
        micro = data.in_prefix_order(batch, [row], policy.is_packed)
        with torch.no_grad():
            policy(policy.pack(batch | {"routes": free}, micro))
        unread = torch.zeros_like(chosen[3])
        choice = [chosen.get(number, unread) for number in range(4)]
        routes.append(torch.stack(choice, 1).to(torch.int8))
    for hook in hooks:
        hook.remove()
    return routes


def scores_of(policy, batch, args):
    return train.score_tokens(policy, batch, args)["logprobs"]


@pytest.mark.parametrize("name", MODELS)
def test_the_routers_own_choice_changes_no_digit(name, tmp_path, process_group):
    """On shared prefixes, forks and padded rows; also the gradients, with recomputed layers."""
    args = args_of(tmp_path, name)
    policy = train.Policy(args)
    assert policy.is_packed != (name == "granitemoehybrid")
    plain = train.Policy(replace(args, router_replay=False))
    batch = batch_of(19)
    own = scores_of(plain, batch, args)
    batch["routes"] = own_choice(policy, batch)
    assert torch.equal(scores_of(policy, batch, args), own)

    if name == "qwen3_moe":
        sharded = devices.shard(train.Policy(args), replace(args, shard=True), torch.device("cpu"))
        assert torch.equal(scores_of(sharded, batch, args), own)

    recomputing = train.Policy(replace(args, gradient_checkpointing=True))
    gradients = []
    for net in (plain, policy, recomputing):
        micro = data.in_prefix_order(batch, [1, 2, 3, 4], net.is_packed)
        net(net.pack(batch, micro))["logprobs"].sum().backward()
        named = net.named_parameters()
        gradients.append({name: p.grad for name, p in named if p.grad is not None})
    assert all(torch.equal(gradients[1][name], x) for name, x in gradients[0].items())
    check_gradients(gradients[2], gradients[0], 1e-5)


def test_other_routes_are_those_of_a_model_that_is_forced_to_them(
    tmp_path, process_group, monkeypatch
):
    """Against transformers' model in float64, whose routers weigh given experts, row by row."""
    args = args_of(tmp_path)
    policy = train.Policy(args)
    batch = batch_of(8)
    with pytest.raises(BadInput, match="sampled tokens without routes"):
        scores_of(policy, batch, args)
    unsampled = torch.zeros_like(batch["response_mask"])  # as of demonstrations
    assert not scores_of(policy, batch | {"response_mask": unsampled}, args).any()
    generator = torch.Generator().manual_seed(0)
    shared = torch.rand(100, 4, 4, generator=generator).argsort(-1)[..., :2].to(torch.int8)
    # Rows with a common prefix have the same routes there. The last token has none.
    batch["routes"] = [shared[: length - 1] for length in batch["lengths"].tolist()]
    found = scores_of(policy, batch, args)

    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float64, experts_implementation="eager"
    )
    routers = [x for x in model.modules() if isinstance(x, Qwen3MoeTopKRouter)]
    for number, router in enumerate(routers):
        router.experts = shared[:, number].long()

    def forced(self, hidden_states):
        experts = self.experts[: len(hidden_states)]
        logits = F.linear(hidden_states, self.weight)
        weights = logits.softmax(-1).gather(1, experts)
        return logits, weights / weights.sum(-1, keepdim=True), experts

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", forced)
    with torch.no_grad():
        forced_scores = expected(model, batch, temperature=1.0)
    assert len(routers) == 4
    torch.testing.assert_close(found, forced_scores, atol=1e-5, rtol=0)


def test_a_trajectory_keeps_each_tokens_first_routes():
    """Over turns, a fork and JSON. A token without routes leaves the choice to the router."""

    def routes_of(n: int, value: int) -> np.ndarray:
        return np.full((n, 2, 1), value, np.uint8)

    trajectory = Trajectory([], [5, 6], [5, 6], [])
    for turn, n_seen in enumerate((4, 8)):  # all but the last token of each turn
        out = TokenOutput([7, 8, 9], [0.0] * 3, [0] * 3, "stop", [5, 6], routes_of(n_seen, turn))
        trajectory.add_sampled(out)
        trajectory.add_given([3])
    trajectory.fork([5, 6, 1], [5, 6, 1])
    trajectory.messages = [{"role": "user", "content": ""}]
    (output,) = trajectory.outputs()  # nothing was said after the fork
    line = json.loads(json.dumps(vars(output), default=list))
    again = AgentLoopOutput(**line)
    assert decode_routes(again.extra).tolist() == [[[0]] * 2] * 4 + [[[1]] * 2] * 4

    batch = data.collate([again])
    micro = data.in_prefix_order(batch, [0])
    for is_packed in (True, False):
        packed = data.pack_rows(batch, micro, "cpu", is_packed, has_routers=True)
        assert packed["routes"][:, 0, 0].tolist() == [0] * 4 + [1] * 4 + [-1] * 2
    assert decode_routes(encode_routes(routes_of(3, 200))).unique().tolist() == [200]
