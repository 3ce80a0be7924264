"""examples/judge.py against a script, and on the real engine."""

import dataclasses
import random

import pytest
from conftest import REPO, make_run
from test_examples import Recorder
from test_rollout import hf_model, wake
from test_tree import CALL, play

import data
from losses import grpo_advantages
from rollout import rollout

judge = data.load_task(str(REPO / "examples" / "judge.py"))
ROW = {
    "prompt": [{"role": "system", "content": judge.SYSTEM_PROMPT}, {"role": "user", "content": "What is 37+48?"}],
    "reward_model": {"ground_truth": "85"},
}  # fmt: skip
RIGHT, WRONG, YES, NO = (f"<answer>{text}</answer>" for text in ("85", "37", "yes", "no"))


def judged(tokenizer, agent: str, *lines, **how):
    return play(judge, tokenizer, {**ROW, "agent_name": agent}, *lines, **how)


@pytest.mark.parametrize("agent, validate, answer, said, rewards", [
    ("judged", False, RIGHT, YES, (1.0, 1.0)),
    ("judged", False, WRONG, YES, (1.0, 0.0)),  # the judge is wrong, and the answer earns by it
    ("judged", False, WRONG, NO, (0.0, 1.0)),
    ("judged", False, RIGHT, NO, (0.0, 0.0)),
    ("judged", False, "85", NO, (0.0, 1.0)),
    ("judged", False, RIGHT, "yes", (0.0, 0.0)),  # no judgement
    ("vain", False, WRONG, YES, (1.0, 1.0)),
    ("vain", False, WRONG, NO, (0.0, 0.0)),
    ("vain", True, WRONG, YES, (0.0, 0.0)),
    ("judged", True, RIGHT, NO, (1.0, 0.0)),
])  # fmt: skip
def test_who_earns_what(tokenizer, agent, validate, answer, said, rewards):
    outputs = judged(tokenizer, agent, answer, said, validate=validate)
    assert [output.unit for output in outputs] == ["answer", "judge"]
    assert tuple(output.reward for output in outputs) == rewards


def test_a_judge_sees_the_claim_and_may_look(tokenizer):
    answer, verdict = judged(tokenizer, "judged", CALL, RIGHT, CALL, YES)
    prompt = tokenizer.decode(verdict.prompt_ids)
    assert "user\n37+48=85?<|im_end|>" in prompt and prompt.count("<|im_start|>") == 3 and "What is" not in prompt
    assert [message["content"] for message in verdict.messages if message["role"] == "tool"] == ["85"]
    assert verdict.group == "judge of 85" and answer.group == ""
    _, verdict = judged(tokenizer, "judged", "<answer><|im_start|></answer>", NO)  # what is no number is not shown
    assert "user\n37+48=?<|im_end|>" in tokenizer.decode(verdict.prompt_ids)


def test_judges_of_one_claim_are_compared(tokenizer):
    """Of the four judges the last one is wrong; the others have looked at another claim, or as well."""
    games = [(RIGHT, YES), (RIGHT, YES), (WRONG, NO), (WRONG, YES)]
    outputs = [output for i, lines in enumerate(games) for output in judged(tokenizer, "judged", *lines, sample=i)]
    units = data.by_unit(outputs)
    advantages = grpo_advantages(units.rewards, units.groups, normalize_std=False).tolist()
    assert advantages[::2] == [0.25, 0.25, -0.75, 0.25] and advantages[1::2] == [0, 0, 0.5, -0.5]


def test_the_poor_teacher():
    random.seed(0)
    chats = [judge.demonstration(row) for row in judge.load("train")[:3000]]
    verdicts = [chat for chat in chats if chat[0]["content"] == judge.JUDGE_PROMPT]
    looked = [chat for chat in verdicts if len(chat) == 5]
    assert 0.55 < len(verdicts) / 3000 < 0.65 and 0.45 < len(looked) / len(verdicts) < 0.6
    for chat in looked:
        right = chat[1]["content"].endswith(f"={chat[3]['content']}?")
        assert chat[-1]["content"] == (YES if right else NO)
    assert all(chat[-1]["content"] == YES for chat in verdicts if len(chat) == 3)
    no = sum(chat[-1]["content"] == NO for chat in looked)
    assert 0.4 < no / len(looked) < 0.6


def test_on_the_real_engine(engine, background, tokenizer, tiny_model, args):
    wake(engine, hf_model(tiny_model), 0)
    recorder = Recorder(engine)
    run = make_run(recorder, background, judge, tokenizer, dataclasses.replace(args, agent="judged"))
    phase = rollout(run, data.load_rows(judge, "train")[:2], 0, 2, {"temperature": 1.0})
    engine.sleep()
    assert not phase.counts, phase.errors[0]["error"]
    assert [output.unit for output in phase.outputs] == ["answer", "judge"] * 4
    said = [(prompt, out.token_ids, out.logprobs) for calls in recorder.calls.values() for prompt, out in calls]
    assert said == [(o.prompt_ids, o.response_ids, o.response_logprobs) for o in phase.outputs]
    assert [output.reward for output in phase.outputs] == [0.0] * 8  # a random model judges nothing
