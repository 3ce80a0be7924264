"""flatrl/notices.py, watch.py, trackers.py: what a run tells its user besides its table."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate import PartialState
from test_algos import output

from flatrl.notices import Notices
from flatrl.trackers import Tracker
from flatrl.watch import Watch
from train import Args


@pytest.fixture
def log(tmp_path, process_group):
    """What a listener uses of a Log."""
    PartialState(cpu=True)
    log = SimpleNamespace(args=Args(), folder=tmp_path, said=[], steps_done=0, about={})
    log.tokenizer = SimpleNamespace(decode=str)
    log.say = log.said.append
    log.warn = lambda text: log.say(f"warning: {text}")
    return log


def sampled(n: int, reward=None, **more) -> list:
    return [output(prompt, 0, "11", reward, ids=[7, 8], **more) for prompt in range(n)]


def test_a_step_that_teaches_nothing_is_told_of_until_one_does(log):
    notices = Notices(log)
    outputs = sampled(2, reward=0.0, metrics={"tool_calls": 0}, stop_reason="length")
    rollouts = SimpleNamespace(sampled=outputs)
    mask = torch.tensor([[1.0, 0.0]])  # the token behind the mask teaches nothing
    for step, advantage in enumerate((0, 0, 1, 0), 1):
        batch = {"advantages": torch.tensor([[advantage, 5.0]]), "response_mask": mask}
        notices.metrics({"step": step}, rollouts, batch)
    notices.metrics({"step": 5})  # an evaluation alone
    first, second = log.said
    assert "step 1 taught nothing: 0 of 2 called a tool, 100% were cut off" in first
    assert "step 4 taught nothing" in second


def test_wandb_gets_numbers_and_a_table(log, monkeypatch):
    package = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", package)
    log.args.tracker = "wandb"
    tracker = Tracker(log)
    metrics = {"step": 1, "reward/mean": 0.5, "timing/idle_s": [1.0]}
    tracker.metrics(metrics, SimpleNamespace(outputs=sampled(3)))
    tracker.close()
    logged = [call.args[0] for call in package.init.return_value.log.call_args_list]
    assert logged == [{"reward/mean": 0.5}, {"rollouts": package.Table.return_value}]
    assert package.init.return_value.log.call_args.kwargs == {"step": 1}
    package.init.return_value.finish.assert_called_once()


def outputs_of(n_cut_off: int = 0, text: str = "", **metrics) -> list:
    """Returns two outputs with reward 0 and four with reward 1, of which some were cut off."""
    outputs = sampled(6, text=text, metrics=metrics)
    for i, each in enumerate(outputs):
        each.reward = float(i < 4)
        each.stop_reason = "length" if i < n_cut_off else "stop"
    return outputs


CALL = "<tool_call>..."
RAISED = {"tool_calls/ask": 2, "tool_exceptions/ask": 1}


@pytest.mark.parametrize("rows, outputs, warning", [
    ([{}], outputs_of(), ""),
    ([{}, {"actor/entropy": 2e-4}, {"actor/entropy": 1e-4}], outputs_of(),
     "step 2: the entropy is nearly 0"),
    ([{"rollout/kl": kl} for kl in (0.2, 0.1, 0.2, 0.11, 0.3, 0.4)], outputs_of(),
     "step 5: rollout/kl is 0.3 a token, and has been above 0.1 for 3 steps"),
    ([{}, {}], outputs_of(n_cut_off=3),
     "step 1: 3 of the 4 best-paid answers were cut off by a limit"),
    ([{}, {}], outputs_of(text=CALL, tool_calls=0),
     "step 1: 6 answers look like tool calls, and none was parsed in them"),
    ([{}, {}], outputs_of(**RAISED), "step 1: the tool 'ask' raised in 6 of its 12 calls"),
])  # fmt: skip
def test_a_fault_is_named_in_the_first_step_that_has_it(rows, outputs, warning, log):
    log.warn = log.say
    watch = Watch(log)
    for step, row in enumerate(rows, 1):
        row = {"step": step, "actor/entropy": 0.5} | row
        watch.metrics(row, SimpleNamespace(trained=outputs), {"some": "batch"})
    watch.metrics({"step": 0, "actor/entropy": 0.0})  # an evaluation alone
    assert len(log.said) == bool(warning)
    assert "".join(log.said).startswith(warning)
    both = RAISED | {"tool_calls/seek": 2, "tool_exceptions/seek": 2}
    watch.metrics({"step": 7}, SimpleNamespace(trained=outputs_of(**both)), {"some": "batch"})
    assert "the tool 'seek' raised in 12 of its 12 calls" in log.said[-1]
