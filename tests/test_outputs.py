"""What user code returns is checked where it comes in: a bad output costs its rollout, by name."""

import asyncio
from types import SimpleNamespace

import pytest
from conftest import make_run, output_of
from PIL import Image

from agent_loop import AgentLoopBase, register
from flatrl.rows import copy_row
from flatrl.vision import load_images, merge_images
from rollout import Member, grade_rollout, run_agent_loop
from train import Args


@register("test_spoilt")
class Spoilt(AgentLoopBase):
    """Returns the row's `result`."""

    async def run(self, sampling_params, result, **row):
        return result


@pytest.mark.parametrize("result, error, said", [
    (output_of([1], ids=[10**6]), ValueError, r"the token id 1000000 is not in \[0, "),
    ("2", TypeError, "Spoilt.run returned '2', not an AgentLoopOutput"),
])  # fmt: skip
def test_a_bad_output_is_refused(result, error, said, tokenizer):
    engine = SimpleNamespace(stop_token_ids=[], vocab_size=len(tokenizer))
    run = make_run(engine, None, None, tokenizer, Args())
    member = Member("train/0/0/0", prompt=0, sample=0, step=0, validate=False)
    row = {"prompt": [], "agent_name": "test_spoilt", "result": result}
    with pytest.raises(error, match=said):
        asyncio.run(run_agent_loop(run, member, row, {}))


def test_states_are_one_for_each_turn():
    def grade(*states):
        output = output_of([1], metrics={"states": [*states]})
        task = SimpleNamespace(reward=lambda output, row: 1.0)
        run = make_run(None, None, task, None, Args(algo="gigpo"))
        asyncio.run(grade_rollout(run, [output], {}))
        return output.reward

    assert grade(1) == grade(None) == 1.0
    with pytest.raises(ValueError, match="has 2 states for 1 turns"):
        grade(1, 2)


def test_a_rollout_plays_on_rows_and_images_of_its_own():
    image = Image.new("L", (2, 1))
    row = {"board": [[0, 0]], "images": [image]}
    mine = copy_row(row)
    mine["board"][0][1] = 1
    mine["images"][0].putpixel((0, 0), 255)
    assert (row["board"], image.getpixel((0, 0))) == ([[0, 0]], 0)

    outputs = [SimpleNamespace(images=load_images([image])) for _ in range(3)]
    outputs[2].images[0].putpixel((0, 0), (255, 0, 0))
    assert image.getpixel((0, 0)) == 0
    assert outputs[0].images[0] is not outputs[1].images[0]
    merge_images(outputs)
    assert outputs[0].images[0] is outputs[1].images[0]
    assert outputs[2].images[0].getpixel((0, 0)) == (255, 0, 0)
