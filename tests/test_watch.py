"""flatrl/watch.py: its five warnings, each printed once."""

from types import SimpleNamespace

import pytest
from test_algos import output

from flatrl.watch import Watch
from train import Args


def outputs_of(n_cut_off: int = 0, text: str = "", **metrics) -> list:
    """Returns two outputs with reward 0 and four with reward 1, of which some were cut off."""
    outputs = []
    for i in range(6):
        one = output(0, i, "11", float(i < 4))
        one.stop_reason = "length" if i < n_cut_off else "stop"
        one.text = text
        one.metrics = metrics
        outputs.append(one)
    return outputs


def warnings_of(*rows: dict, outputs: list) -> list[str]:
    log = SimpleNamespace(args=Args(tool_parser="hermes"), said=[])
    log.warn = log.said.append
    watch = Watch(log)
    for step, row in enumerate(rows, 1):
        row = {"step": step, "actor/entropy": 0.5} | row
        watch.metrics(row, SimpleNamespace(trained=outputs), {"some": "batch"})
    watch.metrics({"step": 0, "actor/entropy": 0.0})  # an evaluation alone
    return log.said


CALL = "<tool_call>..."
RAISED = {"tool_calls/ask": 2, "tool_exceptions/ask": 1}


@pytest.mark.parametrize("rows, outputs, warning", [
    ([{}], outputs_of(), None),
    ([{}, {"actor/entropy": 2e-4}, {"actor/entropy": 1e-4}], outputs_of(),
     "step 2: the entropy is nearly 0"),
    ([{"rollout/kl": kl} for kl in (0.2, 0.1, 0.2, 0.11, 0.3, 0.4)], outputs_of(),
     "step 5: rollout/kl is 0.3 a token, and has been above 0.1 for 3 steps"),
    ([{}, {}], outputs_of(n_cut_off=3),
     "step 1: 3 of the 4 best-paid answers were cut off by a limit"),
    ([{}, {}], outputs_of(text=CALL, tool_calls=0),
     "step 1: 6 answers look like tool calls, and none was parsed in them"),
    ([{}, {}], outputs_of(**RAISED), "step 1: the tool 'ask' raised at 6 of its 12 calls"),
])  # fmt: skip
def test_a_fault_is_named_in_the_first_step_that_has_it(rows, outputs, warning):
    said = warnings_of(*rows, outputs=outputs)
    assert len(said) == (warning is not None)
    if warning:
        assert said[0].startswith(warning)
        assert said[0].endswith(": docs/running.md#warnings)")
