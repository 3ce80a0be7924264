"""flatrl/report.py: the page holds the run, and its texts stay texts."""

import json
import re
from pathlib import Path

import torch
from test_algos import output

import data
from flatrl import report
from flatrl.log import Log
from flatrl.report import token_texts
from train import Args

HOSTILE = "</script><script>alert()</script><!-- &lt;\u2028 é <|im_end|> __DATA__"


def run_of(folder: Path, tokenizer=None) -> dict:
    """Writes a run's page. Returns its data as a browser finds it: up to the first </script>."""
    page = folder / "report.html"
    report.write_page([report.read_run(folder, tokenizer)], page)
    element = '<script type="application/json" id="data">(.*?)</script'
    (run,) = json.loads(re.search(element, page.read_text(), re.DOTALL)[1])
    return run


def test_the_page_has_the_numbers_of_metrics_jsonl_and_hostile_text_stays_text(tmp_path):
    about = {"command": [], "git": "", "versions": {}, "args": {"task": HOSTILE}}
    (tmp_path / "args.json").write_text(json.dumps(about))
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "eval/reward": 0.5}\n'
        '{"step": 1, "reward/mean": 0.25, "timing/idle_s": [1.0]}\n'
        '{"step": 2, "reward/mean": NaN, "eval/reward": 1}\n'
    )
    run = run_of(tmp_path)
    assert run["columns"] == {
        "step": [0, 1, 2],
        "eval/reward": [0.5, None, 1],
        "reward/mean": [None, 0.25, None],
        "timing/idle_s": [None, None, None],
    }
    assert run["flags"]["--task"] == HOSTILE

    page = (tmp_path / "report.html").read_text()
    template = report.PAGE.read_text()
    for mark in ("<script", "</script", "<!--"):  # the page's own and no other
        assert page.lower().count(mark) == template.lower().count(mark)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", template)


def test_a_trajectory_has_its_tokens_with_their_advantages(tmp_path, tokenizer):
    ids = tokenizer.encode(f"aé{tokenizer.eos_token}ab", add_special_tokens=False)
    reward = {"score": 1.0, "form": 0.5}
    how = dict(ids=ids, logprob=-0.5)
    outputs = [
        output(4, 0, "110001", reward, turn_rewards=[(1, 0.25)], **how),
        output(4, 1, "110001", 0.0, stop_reason="length", **how),
        output(4, 2, "110001", 0.0, **how),
    ]
    outputs[2].extra["greedy"] = True
    batch = data.make_batch(outputs[:2])
    batch["advantages"] = torch.tensor([[0.5, 1.5, 9.0, 9.0, 9.0, -2.0], [0.125] * 6])
    error = {"prompt": 4, "sample": 3, "kind": "failed_reward", "error": "oh"}
    log = Log(Args(output_dir=str(tmp_path)), None, 0)
    log.rollouts("step_000002", outputs, [error], batch)
    log.wait()
    whole, alike, greedy = run_of(tmp_path, tokenizer)["trajectories"]
    assert whole == {
        "kind": "step", "step": 2, "prompt": 4, "sample": 0, "segment": 0, "unit": "", "marks": [],
        "text": "".join(token_texts(tokenizer, [1, 2])), "n_prompt": 2, "stop": "stop", "turns": 0,
        "reward": 1.25, "parts": reward, "turn_rewards": [[1, 0.25]],
        "tokens": ["a", "", "é", tokenizer.eos_token, "a", "b"], "mask": [1, 1, 0, 0, 0, 1],
        "logprobs": [-0.5, -0.5, 0.0, 0.0, 0.0, -0.5], "advantages": [0.5, 1.5, -2.0],
    }  # fmt: skip
    assert (alike["advantages"], alike["stop"], alike["marks"]) == (0.125, "length", [])
    assert (greedy["advantages"], greedy["marks"]) == (None, ["greedy"])
