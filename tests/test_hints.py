"""A row's hint: the policy as its own teacher, by the template of the rollout."""

from types import SimpleNamespace

import conftest
import pytest
import torch
from test_agent_loop import user
from test_rollout import hf_logprobs, hf_model

import data
import losses
import train
from agent_loop import AgentLoopOutput, render
from examples import calculator
from flatrl.hints import tell
from flatrl.metrics import Clock
from rollout import Rollouts
from train import Args

SYSTEM = {"role": "system", "content": "Add."}
ROW = {"prompt": [SYSTEM, user("1+1?")], "hint": "It is 2.", "validate": False}
TOLD = [SYSTEM, user("1+1?\n\nIt is 2.")]


def output_of(prompt_ids: list[int], **names) -> AgentLoopOutput:
    extra = {"prompt": 0, "sample": 0, "segment": 0, **names}
    return conftest.output_of([1, 1], prompt_ids, [7, 8], extra=extra)


@pytest.mark.parametrize("has_tools", [False, True])
def test_an_output_is_told_by_the_template_and_tools_of_its_rollout(has_tools, tokenizer):
    loop = SimpleNamespace(tokenizer=tokenizer, processor=None, task=calculator)
    schemas = data.tool_schemas(ROW, loop.task) if has_tools else None
    output = output_of([*render(tokenizer, ROW["prompt"], schemas), 5, 6])
    tell(output, ROW, loop)  # what follows the row's prompt stays behind the hint
    assert output.extra["told_prompt_ids"] == [*render(tokenizer, TOLD, schemas), 5, 6]
    for row in (ROW | {"hint": None}, ROW | {"validate": True}):
        output = output_of(output.prompt_ids)
        tell(output, row, loop)
        assert "told_prompt_ids" not in output.extra


def test_advantages_are_what_the_hint_makes_likelier(tiny_model, process_group):
    """log pi(token | told) - log pi(token), by the policy itself; 0 where nothing was told."""
    data.register_packed_attention()
    args = Args(model=tiny_model, algo="opsd", tokens_per_micro_batch=100)
    net = train.Policy(args)
    outputs = []
    for prompt, told in enumerate(([1, 2, 3, 9], None, [1, 2, 4])):
        outputs.append(output_of([1, 2], prompt=prompt))
        if told:
            outputs[-1].extra["told_prompt_ids"] = told
    batch = data.make_batch(outputs)
    assert data.select_rows(batch, [1, 2])["hinted"]["lengths"].tolist() == [4, 5]
    assert "hinted" not in data.collate([outputs[1]])
    run = SimpleNamespace(args=args, policy=SimpleNamespace(net=net), reference=net, critic=None)
    run.clock, run.kl = Clock(), losses.AdaptiveKL(args.kl_coef)
    train.score_batch(run, batch, 0)
    train.set_token_rewards(run, batch, 0)
    advantages = train.estimate_advantages(batch, Rollouts(outputs=outputs), args)
    model = hf_model(tiny_model)
    plain = hf_logprobs(model, [1, 2], [7, 8])
    for output, advantage in zip(outputs, advantages):
        told = output.extra.get("told_prompt_ids", [1, 2])
        hinted = hf_logprobs(model, told, [7, 8])
        torch.testing.assert_close(advantage, hinted - plain, atol=2e-5, rtol=0)
        assert (told == [1, 2]) == bool(advantage.abs().max() < 1e-4)
