"""Long rollouts: scores by the engine, turns that are cut, the last answer, compaction."""

import asyncio
import itertools

import pytest
import torch
from conftest import generate
from test_agent_loop import Script
from test_rollout import PROMPTS, TwoTurns, hf_logprobs, hf_model, make_rows, play, wake

from agent_loop import AgentLoopBase, LoopArgs, register

close = torch.testing.assert_close
real_play = play  # a fixture: rolls rows out on a real engine

# ---------------------------------------------------------------- scores


def test_scores_are_the_trainers_logprobs_under_the_weights_of_now(engine, background, tiny_model):
    async def score(texts):
        calls = [engine.score(request_id="r", prompt_ids=ids) for ids in texts]
        return await asyncio.gather(*calls)

    longest = [*itertools.islice(itertools.cycle(PROMPTS[-1]), 127)]  # window - 1
    texts = [*PROMPTS, longest, longest, PROMPTS[0][:2]]
    for version, scale in enumerate([1.0, 1.5]):
        model = hf_model(tiny_model, scale)
        wake(engine, model, version)
        generate(engine, background, [longest], temperature=0.5, max_tokens=1)  # fills the cache
        future = background.submit(score(texts))
        future.add_done_callback(lambda _: engine.poke())
        before = dict(engine.statistics)
        while not future.done():
            engine.step()
        assert engine.statistics["tokens"] == before["tokens"]
        engine.sleep()
        for ids, scores in zip(texts, future.result(), strict=True):
            close(torch.tensor(scores), hf_logprobs(model, ids[:1], ids[1:]), atol=1e-4, rtol=0)


@register("test_scores")
class Scores(TwoTurns):
    """Scores each of its turns."""

    async def assistant_turn(self, trajectory, sampling_params):
        start = len(trajectory.engine_ids)
        await super().assistant_turn(trajectory, sampling_params)
        scores = await self.score(trajectory.engine_ids, start)
        trajectory.extra["scores"] = trajectory.extra.get("scores", []) + scores


def test_a_rollout_that_scores_its_turns_samples_the_same_ones(real_play, engine):
    engine.args.deterministic = True
    kinds = ["x", "slow", "x"]
    plain, scored = (
        real_play(lambda *_: 1.0, make_rows(*kinds, agent=name), group_size=2).outputs
        for name in ("test_two_turns", "test_scores")
    )
    assert [o.response_ids for o in scored] == [o.response_ids for o in plain]
    for output in scored:
        logprobs = itertools.compress(output.response_logprobs, output.response_mask)
        close(torch.tensor(output.extra["scores"]), torch.tensor([*logprobs]), atol=1e-4, rtol=0)


def test_a_demonstration_is_scored_by_the_engine(real_play, tiny_model):
    @register("test_scores_one")
    class One(AgentLoopBase):
        async def run(self, sampling_params, **row):
            trajectory = self.start(row)
            await self.assistant_turn(trajectory, sampling_params)
            start = len(trajectory.prompt_ids)
            trajectory.extra["scores"] = await self.score(trajectory.engine_ids, start)
            return trajectory.output()

    (row,) = make_rows("x", agent="test_scores_one")
    row["demonstration"] = [{"role": "assistant", "content": "46"}]
    (output,) = real_play(lambda *_: 1.0, [row]).outputs
    expected = hf_logprobs(hf_model(tiny_model), output.prompt_ids, output.response_ids)
    close(torch.tensor(output.extra["scores"]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("start, error", [
    (0, "from 1 to 2"), (3, "from 1 to 2"), (1, "engine Script has no method `score`"),
])  # fmt: skip
def test_what_can_not_be_scored(tokenizer, start, error):
    args = LoopArgs(max_response_tokens=10)
    loop = AgentLoopBase(Script(tokenizer, ()), tokenizer, None, None, args)
    with pytest.raises((ValueError, TypeError), match=error):
        asyncio.run(loop.score([5, 6], start))
