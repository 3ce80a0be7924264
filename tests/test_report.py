"""flatrl/report.py: the page's data is the run's, a run's text stays text, and a report that fails ends no run."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import REPO
from test_log import Args, an_output, read

import data
from agent_loop import AgentLoopOutput
from flatrl import report
from flatrl.log import Log
from flatrl.report_trajectories import Texts

HOSTILE = (
    "</script><script>document.title='pwned'</script><!--<img src=x onerror=\"document.title='pwned'\">"
    "&lt;\u2028 é <|im_end|> __DATA__ __SCRIPT__"
)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    return tmp_path / "run"


def embedded(page: Path) -> dict:
    """The page's data, as a browser finds it: up to the first </script>."""
    element = re.search('<script type="application/json" id="data">(.*?)</script', page.read_text(), re.DOTALL)
    return json.loads(element[1])


def page_of(*runs: report.Run, file: Path) -> list[dict]:
    for run in runs:
        run.refresh()
    report.write(list(runs), file)
    return embedded(file)["runs"]


def trajectory(prompt=0, sample=0, index=None, ids=(5, 6, 7, 8), mask=(1, 0, 1, 1), **changes) -> AgentLoopOutput:
    extra = {"index": prompt if index is None else index, "prompt": prompt, "sample": sample, "segment": 0}
    logprobs, versions = [-0.5 * m for m in mask], [3 if m else -1 for m in mask]
    response = {"response_ids": list(ids), "response_mask": list(mask)}
    response |= {"response_logprobs": logprobs, "response_versions": versions}
    return AgentLoopOutput(prompt_ids=[1, 2], extra=extra, **response, **{"reward": 1.0} | changes)


def write_rollouts(folder: Path, name: str, outputs: list, errors=()):
    log = SimpleNamespace(folder=folder)
    Log.rollouts(log, name, outputs, list(errors))


def learned(outputs: list, advantages: list[float], difference: float, mask=None) -> dict:
    """The batch of a step after its update."""
    batch = data.collate(outputs)
    batch["advantages"] = torch.tensor(advantages)[:, None].expand_as(batch["response_mask"])
    batch["logprobs_old"] = batch["logprobs_rollout"] + difference
    if mask is not None:
        batch["response_mask"] *= torch.tensor(mask)[:, None]
    return batch


# ------------------------------------------------------------- metrics


def test_the_page_has_the_numbers_of_metrics_jsonl(folder):
    rows = [
        {"step": 0, "eval/reward": 0.1 + 0.2},
        {"step": 1, "reward/mean": 1 / 3, "actor/lr": 3e-300, "timing/idle_s": [1.0]},
        {"step": 2, "reward/mean": float("nan"), "actor/lr": -math.inf, "eval/reward": 1},
    ]
    half = '{"step": 3, "reward/me'  # being written
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + half)
    (folder / "args.json").write_text(json.dumps({"args": {"lr": 0.5}, "git": "abc"}))
    [run] = page_of(report.Run(folder), file=folder / "report.html")
    assert run["columns"] == {
        "step": [0, 1, 2],
        "eval/reward": [0.1 + 0.2, None, 1],
        "reward/mean": [None, 1 / 3, "nan"],
        "actor/lr": [None, 3e-300, "-inf"],
    }
    assert run["about"] == {"args": {"lr": 0.5}, "git": "abc"} and run["trajectories"] == [] and run["total"] == 0
    assert run["notes"] == ["No trajectories: this run wrote no rollouts (--replay reads those of another run)."]


# ------------------------------------------------------------- trajectories


def test_a_trajectory_is_its_turns_with_what_the_update_knew(folder, tokenizer):
    ids = tokenizer.encode(f"abc{tokenizer.eos_token}ab", add_special_tokens=False)
    call = {"function": {"name": "calculator", "arguments": {"expression": "1+1"}}}
    messages = [
        *({"role": "user", "content": "q"}, {"role": "assistant", "content": "the prompt's own example"}),
        *({"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}),
        *({"role": "tool", "name": "calculator", "content": "c"}, {"role": "assistant", "content": "b"}),
    ]
    more = {"messages": messages, "turn_rewards": [(1, 0.25)], "reward": {"score": 1.0, "form": 0.5}}
    outputs = [trajectory(prompt=4, sample=1, ids=ids, mask=[1, 1, 0, 0, 0, 1], **more)]
    outputs.append(trajectory(prompt=4, sample=0, stop_reason="length"))
    write_rollouts(folder, "step_000002", outputs, [{"prompt": 4, "sample": 2, "kind": "failed_reward", "error": "oh"}])
    batch = learned(outputs, [1.5, -0.5], 0.25, mask=[1, 0])
    report.keep_learned(folder / "learned" / "step_000002.jsonl", outputs, batch)
    [run] = page_of(report.Run(folder, tokenizer), file=folder / "report.html")
    told, cut, failed = run["trajectories"]
    blocks = told["blocks"]
    for block in blocks:
        if "tokens" in block:
            block["tokens"] = [run["pieces"][i] for i in block["tokens"]]
    same = {"role": "assistant", "versions": 3, "advantages": 1.5}
    two, one = ({"logprobs": [-0.5] * n, "difference": [0.25] * n} for n in (2, 1))
    assert blocks == [
        {"at": 0, "tokens": ["a", "b"], "calls": [["calculator", '{"expression": "1+1"}']]} | two | same,
        {"at": 2, "role": "tool calculator", "text": ["c", tokenizer.eos_token, "a"]},
        {"at": 5, "tokens": ["b"], "calls": []} | one | same,
    ]
    assert run["prompts"][told["text"]] == Texts(tokenizer).of_context([1, 2])
    assert (told["reward"], told["parts"], told["turn_rewards"]) == (1.25, {"score": 1.0, "form": 0.5}, [[1, 0.25]])
    assert (told["kind"], told["step"], told["prompt"], told["sample"], told["stop"]) == ("step", 2, 4, 1, "stop")
    assert told["trained"] is True and cut["trained"] is False and cut["stop"] == "length"
    assert all("difference" not in block for block in cut["blocks"])
    assert (failed["stop"], failed["error"], failed["sample"]) == ("failed_reward", "oh", 2)
    assert run["total"] == 3 and run["notes"] == []


def test_a_message_that_is_no_dict_is_shown_as_it_is(folder):
    said = {"role": "assistant", "content": "a"}
    outputs = [trajectory(messages=["what?", said, ["tool", 5], None, said])]
    write_rollouts(folder, "step_000002", outputs)
    [run] = page_of(report.Run(folder), file=folder / "report.html")
    roles = [block["role"] for block in run["trajectories"][0]["blocks"]]
    assert roles == ["assistant", "['tool', 5], None", "assistant"]


def test_a_last_turn_of_mask_0_is_no_turn_of_those_before(folder):
    call = {"function": {"name": "look", "arguments": {}}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "look", "content": "t"}, {"role": "assistant", "content": "a"}]  # fmt: skip
    write_rollouts(folder, "step_000002", [trajectory(messages=messages, mask=(1, 0, 0, 0))])
    [run] = page_of(report.Run(folder), file=folder / "report.html")
    sampled, after = run["trajectories"][0]["blocks"]
    assert sampled["calls"] == [["look", "{}"]] and after["role"] == "tool look"


def test_what_an_earlier_try_at_a_step_knew_is_not_shown(folder):
    outputs = [trajectory()]
    report.keep_learned(folder / "learned" / "step_000001.jsonl", outputs, learned(outputs, [1.0], 0.5))
    write_rollouts(folder, "step_000001", outputs)
    file = folder / "learned" / "step_000001.jsonl"
    for age, known in ((10, False), (0, True)):
        then = (folder / "rollouts" / "step_000001.jsonl").stat().st_mtime_ns - age * 10**9
        os.utime(file, ns=(then, then))
        [run] = page_of(report.Run(folder), file=folder / "report.html")
        assert ("advantages" in run["trajectories"][0]["blocks"][0]) is known


def test_learned_holds_a_number_for_equal_advantages_and_a_list_for_others(tmp_path):
    outputs = [trajectory(sample=0), trajectory(sample=2)]
    batch = learned(outputs, [1.0, 2.0], 1.23456e-6)
    batch["advantages"] = torch.tensor([[1.0, 9.0, 1.0, 1.0], [0.5, 9.0, 0.25, 0.125]])  # 9: not sampled
    report.keep_learned(tmp_path / "learned" / "step_000001.jsonl", outputs, batch)
    name = {"prompt": 0, "segment": 0, "trained": True, "logp_diff": [1.2e-06] * 3}
    assert read(tmp_path / "learned" / "step_000001.jsonl") == [
        name | {"sample": 0, "advantage": 1.0},
        name | {"sample": 2, "advantage": [0.5, 0.25, 0.125]},
    ]


def test_tokens_that_are_parts_of_a_character_are_joined(tokenizer):
    text = "a é漢 b" + tokenizer.eos_token
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = Texts(tokenizer)
    pieces = texts.of(ids)
    assert "".join(pieces) == text and len(pieces) == len(ids) and "" in pieces and "\ufffd" not in "".join(pieces)
    assert texts.of_context(ids) == ["a é漢 b", tokenizer.eos_token]
    assert texts.of_context([*ids[:1] * 30, *ids[:1]]) == ["a × 31 "]  # an image's, as a rule
    assert Texts(None).of([7, 8]) == ["⟨7⟩", "⟨8⟩"]


def test_hostile_text_stays_text(folder):
    hostile = HOSTILE + "\ud800"  # Chromium shows that too, but its --dump-dom dies of it
    ids = range(3, 3 + len(hostile))
    decode = lambda ids, **_: "".join("a" if i < 3 else hostile[i - 3] for i in ids)
    tokenizer = SimpleNamespace(added_tokens_decoder={}, encode=lambda *_, **__: [0], decode=decode)
    tool = {"role": hostile, "name": hostile, "content": ""}
    call = {"function": {"name": hostile, "arguments": hostile}}
    messages = [{"role": "assistant", "tool_calls": [call]}, tool]
    more = {"messages": messages, "reward": {"score": 1.0, hostile: 0.5}, "metrics": {hostile: 1}}
    evil = trajectory(ids=ids, mask=[1] * len(ids), **more)
    write_rollouts(folder, "step_000001", [evil], [{"kind": hostile, "prompt": 0, "sample": 1, "error": hostile}])
    (folder / "args.json").write_text(json.dumps({"args": {"task": hostile}, "command": [hostile]}))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, hostile: 2.0}) + "\n")
    page = folder / "report.html"
    [run] = page_of(report.Run(folder, tokenizer), file=page)
    told, failed = run["trajectories"]
    [block] = told["blocks"]
    assert "".join(run["pieces"][i] for i in block["tokens"]) == hostile
    assert told["parts"][hostile] == 0.5 and failed["error"] == failed["stop"] == hostile
    assert block["calls"] == [[hostile, hostile]] and run["columns"][hostile] == [2.0]
    text, template = page.read_text(), report.PAGE.read_text()
    for mark in ("<script", "</script", "<!--", "<img"):  # the page's own and no other
        assert text.lower().count(mark) == template.lower().count(mark)
    assert text.isascii() == template.isascii()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", template)


def test_whole_groups_of_every_step_and_the_same_questions_of_every_evaluation(folder):
    for step in range(1, 6):
        write_rollouts(folder, f"step_{step:06d}", [trajectory(10 * step + i // 4, i % 4) for i in range(40)])
    for step in (0, 5):
        write_rollouts(folder, f"eval_{step:06d}", [trajectory(i, index=f"row, {i}") for i in range(100)])
    [run] = page_of(report.Run(folder, trajectories=70), file=folder / "report.html")
    shown = run["trajectories"]
    assert run["total"] == 400 and 60 <= len(shown) <= 70
    drawn = "trajectories are on this page: whole groups, drawn at random from every step and evaluation."
    assert run["notes"] == [f"{len(shown)} of 400 {drawn} All are in rollouts/."]
    of = lambda kind, step: [t for t in shown if (t["kind"], t["step"]) == (kind, step)]
    for step in range(1, 6):
        samples = [t["sample"] for t in of("step", step)]
        assert len(samples) >= 8 and samples == [0, 1, 2, 3] * (len(samples) // 4)
    before, after = ([t["index"] for t in of("eval", step)] for step in (0, 5))
    n = min(len(before), len(after))
    assert n >= 8 and before[:n] == after[:n] and before != sorted(before)
    # One after another, as a run that trains reads them: as many, and the newest step is there.
    live, late = report.Run(folder, trajectories=70), folder / "rollouts" / "step_000006.jsonl"
    live.refresh()
    write_rollouts(folder, late.stem, [trajectory(i // 4, i % 4) for i in range(40)])
    [again] = page_of(live, file=folder / "report.html")
    assert {t["step"] for t in again["trajectories"] if t["kind"] == "step"} == {1, 2, 3, 4, 5, 6}
    assert len(again["trajectories"]) <= 70 and again["total"] == 440


def test_long_trajectories_count_by_their_tokens(folder):
    write_rollouts(folder, "step_000001", [trajectory(i, ids=[5] * 98, mask=[1] * 98) for i in range(20)])
    [run] = page_of(report.Run(folder, tokens=550), file=folder / "report.html")
    assert len(run["trajectories"]) == 5 and run["notes"][0].startswith("5 of 20 trajectories")


def test_of_more_files_than_there_is_room_for_some_have_a_group_and_the_newest_too(folder):
    for step in range(1, 31):
        write_rollouts(folder, f"step_{step:06d}", [trajectory(10 * step + i // 8, i % 8) for i in range(16)])
    [run] = page_of(report.Run(folder, trajectories=70), file=folder / "report.html")
    steps = [t["step"] for t in run["trajectories"]]
    assert len(steps) == 64 and steps == sorted(steps) and {steps.count(step) for step in steps} == {8}
    assert steps[-1] == 30 and steps[0] < 20 and run["total"] == 480


def test_a_file_that_was_written_anew_is_read_anew(folder):
    write_rollouts(folder, "step_000001", [trajectory()])
    run = report.Run(folder)
    samples = lambda: [t["sample"] for t in page_of(run, file=folder / "report.html")[0]["trajectories"]]
    assert samples() == [0]
    write_rollouts(folder, "step_000001", [trajectory(), trajectory(sample=1)])
    os.utime(folder / "rollouts" / "step_000001.jsonl", (1001, 1001))
    assert samples() == [0, 1]


# ------------------------------------------------------------- while it trains


def test_a_run_writes_its_page_and_it_takes_a_small_share_of_the_time(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: clock[0], time=lambda: 0.0))
    write = report.write
    monkeypatch.setattr(report, "write", lambda *args: (write(*args), clock.__setitem__(0, clock[0] + 1.0)))
    log = Log(Args(str(tmp_path / "run")), None, 0)
    page = tmp_path / "run" / "report.html"
    steps = lambda: embedded(page)["runs"][0]["columns"]["step"]
    log.metrics({"step": 0})
    assert steps() == [0]  # at second 1, and it took 1: not again before second 51
    outputs = [trajectory()]
    log.rollouts("step_000001", outputs, [])
    log.metrics({"step": 1}, SimpleNamespace(trained=outputs), learned(outputs, [0.75], 0.0))
    assert steps() == [0] and (tmp_path / "run" / "learned" / "step_000001.jsonl").is_file()
    clock[0] = 51.0
    log.metrics({"step": 2})
    assert steps() == [0, 1, 2] and embedded(page)["runs"][0]["trajectories"][0]["blocks"][0]["advantages"] == 0.75
    log.metrics({"step": 3})
    assert steps() == [0, 1, 2]
    log.close()
    assert steps() == [0, 1, 2, 3] and [file.name for file in page.parent.glob(".*")] == []


def test_a_report_that_fails_is_a_warning_for_each_reason(tmp_path, capsys):
    log = Log(Args(str(tmp_path / "run")), None, 0)
    (tmp_path / "run" / "report.html").mkdir()
    log.metrics({"step": 0})
    assert capsys.readouterr().err.count("warning: report.html can't be written: IsADirectoryError") == 1
    log.notices.report.close()
    assert capsys.readouterr().err == ""  # the same again
    log.metrics({"step": 1}, SimpleNamespace(trained=[an_output(reward=1.0)]), {"nothing": 1})
    log.close()
    assert capsys.readouterr().err == "warning: report.html can't be written: KeyError: 'logprobs_old'\n"
    assert [row["step"] for row in read(tmp_path / "run" / "metrics.jsonl")] == [0, 1]


# ------------------------------------------------------------- the command, and a browser


def test_the_command_puts_runs_on_one_page(tmp_path, tiny_model, monkeypatch, capsys):
    for i, name in enumerate("ab"):
        (tmp_path / name / "rollouts").mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": i}) + "\n")
        about = {"args": {"model": tiny_model if name == "a" else "/none"}}
        (tmp_path / name / "args.json").write_text(json.dumps(about))
        write_rollouts(tmp_path / name, "eval_000000", [trajectory(ids=[1], mask=[1])])
    monkeypatch.chdir(tmp_path)
    report.main(["a", "b"])
    out, err = capsys.readouterr()
    assert out == "report.html\n" and err.startswith("b: Tokens are shown as numbers")
    a, b = embedded(tmp_path / "report.html")["runs"]
    assert (a["name"], b["name"], b["columns"]) == ("a", "b", {"step": [1]})
    assert a["pieces"] == ["<|im_start|>"] and a["special"] == [0] and b["pieces"] == ["⟨1⟩"]
    report.main(["a", "--trajectories", "1"])
    assert len(embedded(tmp_path / "a" / "report.html")["runs"]) == 1
    with pytest.raises(SystemExit):
        report.main([str(tmp_path)])
    assert "has no metrics.jsonl and no rollouts/" in capsys.readouterr().err
    (tmp_path / "a" / "args.json").write_text("[]")
    assert report.read_about(tmp_path / "a") == {}


def test_the_command_imports_torch_only_for_a_tokenizer_without_its_json(tmp_path, tiny_model):
    """Its import takes most of the command's time, during which nothing is seen."""
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "bytes" / "final")
    shutil.copytree(tiny_model, tmp_path / "tiny" / "final")
    code = """
import sys
from pathlib import Path
from flatrl.report import load_tokenizer
for name, token in ("tiny", ord("h") - 30), ("bytes", ord("h") + 3):
    print(load_tokenizer(Path(name)).decode([token]), "torch" in sys.modules)
"""
    command = [sys.executable, "-c", code]
    env = os.environ | {"PYTHONPATH": str(REPO)}
    printed = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    assert printed == "h False\nh True\n"


def test_a_strangers_tokenizer_runs_no_code(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    shutil.copytree(tiny_model, tmp_path / "final")
    config = json.loads((tmp_path / "final" / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    (tmp_path / "final" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "final" / "mine.py").write_text("raise SystemExit('a stranger was here')")
    report.load_tokenizer(tmp_path)  # nobody is asked, and nothing of it runs


@pytest.mark.skipif(not BROWSER, reason="no Chromium")
@pytest.mark.parametrize("tab", ["curves", "time", "trajectories", "notes", "settings"])
def test_a_browser_draws_it_and_runs_nothing_of_a_runs(folder, tokenizer, tab):
    same = {"timing/step_s": 2.0, "timing/train_s": 1.0, HOSTILE: 1.0}
    alike = 1.0, 1.0000000000000002  # all but equal: an axis of their range would have no marks
    rows = [{"step": i, "reward/mean": i / 8, "actor/entropy": alike[i % 2]} | same for i in range(4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "args.json").write_text(json.dumps({"args": {"task": HOSTILE}, "command": [HOSTILE]}))
    call = {"function": {"name": HOSTILE, "arguments": HOSTILE}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": HOSTILE}]
    outputs = [trajectory(sample=i, messages=messages, metrics={HOSTILE: 1}, reward=float(i)) for i in range(2)]
    write_rollouts(folder, "step_000001", outputs)
    report.keep_learned(folder / "learned" / "step_000001.jsonl", outputs, learned(outputs, [1.0, -1.0], 1e-6))
    run = report.Run(folder, tokenizer)
    run.refresh()
    report.write([run, run], folder / "report.html")
    sandbox = ["--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}", "--enable-logging=stderr"]
    address = f"{(folder / 'report.html').as_uri()}#tab={tab}&mode=group&sort=reward"
    command = [BROWSER, "--headless=new", *sandbox, "--virtual-time-budget=500", "--dump-dom", address]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "CONSOLE" not in result.stderr and "<title>run and run (2) – flatrl</title>" in result.stdout
    drawn = result.stdout.split('<script type="application/json"')[0]  # the page's own elements
    assert "<img" not in drawn and drawn.count("<script") == 0
    escaped = "&lt;/script&gt;&lt;script&gt;document.title='pwned'"
    if tab == "curves":
        assert drawn.count("<polyline") == 4 and escaped not in drawn.split("<details")[0] and ">0.375<" in drawn
    elif tab == "time":
        assert drawn.count("<td>4 s</td>") == 4  # of two runs: the update, and what no phase accounts for
    elif tab == "notes":
        assert drawn.count("<textarea") == 2
    elif tab == "settings":
        assert drawn.count(escaped) == 4  # of two runs: the task, the command
    else:
        assert drawn.count('class="card chosen"') == 1 and drawn.count("rgba(31, 95, 168, 0.62)") > 3  # advantage 1
        assert escaped in drawn and 'aria-selected="true"' in drawn


WITHOUT_NODE = pytest.mark.skipif(not shutil.which("node"), reason="no node")


def states(page: Path, address: str, *actions, storage: Path | None = None) -> list[str]:
    """The elements of a page as markup, and its address: at first, and after each [element, event, value]."""
    command = ["node", REPO / "tests" / "dom.js", page, f"#{address}", json.dumps(actions)]
    environment = os.environ | ({"STORAGE": str(storage)} if storage else {})
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\f")


def drawn(*arguments, **storage) -> str:
    """The last of the states."""
    return states(*arguments, **storage)[-1]


def plain(markup: str) -> str:
    return re.sub(r"(<[^>]*>)+", "|", markup)


def segment(sample: int, number: int, prompt: list[int], ids: list[int], **more) -> AgentLoopOutput:
    """An output of a rollout of several, all of whose tokens were sampled."""
    extra = {"index": 0, "prompt": 0, "sample": sample, "segment": number} | more.pop("extra", {})
    lists = {"response_ids": ids, "response_mask": [1] * len(ids)}
    lists |= {"response_logprobs": [-0.5] * len(ids), "response_versions": [0] * len(ids)}
    return AgentLoopOutput(prompt_ids=prompt, extra=extra, **lists, **more)


def two_trees() -> list[AgentLoopOutput]:
    """Two rollouts: a trunk, two leaves that go on from it, a unit of two outputs whose history was rewritten."""
    outputs = []
    for sample in range(2):
        group = f"{sample}/after turn 1"
        outputs += [
            segment(sample, 0, [1, 2], [5, 6], unit="trunk", reward=0.5),
            segment(sample, 1, [1, 2, 5, 6, 9], [7], unit="leaf 0", group=group, reward=1.0),
            segment(sample, 2, [1, 2, 5, 6, 9], [8], unit="leaf 1", group=group, reward=0.0),
            segment(sample, 3, [3, 4], [5], unit="aside", reward=0.25, turn_rewards=[(0, 0.125)]),
            segment(sample, 4, [4, 4], [6], unit="aside", reward=0.25, extra={"unread": "<b>You win</b>"}),
        ]
    return outputs


def test_units_groups_and_last_words_are_on_the_page(folder):
    write_rollouts(folder, "step_000001", [*two_trees(), trajectory(prompt=1)])
    [run] = page_of(report.Run(folder), file=folder / "report.html")
    names, fields = ("prompt", "sample", "segment"), ("unit", "group", "unread")
    labels = {tuple(t[name] for name in names): tuple(t[field] for field in fields) for t in run["trajectories"]}
    assert labels[0, 0, 0] == ("trunk", "", None) and labels[0, 1, 2] == ("leaf 1", "1/after turn 1", None)
    assert labels[0, 0, 4] == ("aside", "", "<b>You win</b>") and labels[1, 0, 0] == ("", "", None)


@WITHOUT_NODE
def test_the_page_draws_a_rollout_as_a_tree_and_units_beside_those_they_are_compared_with(folder):
    write_rollouts(folder, "step_000001", [*two_trees(), trajectory(prompt=1)])
    [run] = page_of(report.Run(folder), file=folder / "report.html")
    at = lambda address: drawn(folder / "report.html", f"tab=trajectories&{address}")
    numbers = run["trajectories"]
    of = {(t["prompt"], t["sample"], t["segment"]): f"t=0.{i}" for i, t in enumerate(numbers)}

    # A tree: the leaves hang below the trunk, with what their prompts have more; the other segments are roots.
    tree = at(f"mode=tree&{of[0, 1, 1]}")
    nodes = re.findall(r'<div class="node">|<div class="branches">|segment \d · [a-z]+ ?\d?(?=</button>)', tree)
    node, branches = '<div class="node">', '<div class="branches">'
    assert nodes == [node, "segment 0 · trunk", branches, node, "segment 1 · leaf 0", node, "segment 2 · leaf 1",
                     node, "segment 3 · aside", node, "segment 4 · aside"]  # fmt: skip
    assert tree.count("prompt, 5 tokens: it goes on from the end of segment 0") == 2
    assert plain(tree).count("|⟨9⟩|") == 2 and "⟨5⟩⟨6⟩⟨9⟩" not in plain(tree)  # each leaf's own part of its prompt
    assert tree.count('<div class="card chosen">') == 1
    assert plain(tree.split('class="detail"')[1]).count("|0.375|") == 2  # the unit's reward, of both its outputs
    assert "&lt;b&gt;You win&lt;/b&gt;" in tree and "<b>You win" not in tree

    # A group: the chosen leaf's siblings first; then the others, unit by unit.
    group = at(f"mode=group&{of[0, 1, 1]}")
    heads = re.findall(r"<h2>(group [^<]*)<span class=\"soft\">([^<]*)", group)
    two = "  2 units, compared with each other"
    names = ("1/after turn 1", "trunk", "0/after turn 1", "aside")
    assert heads == [(f"group {name}", two) for name in names]
    cards = re.findall(r'<div class="card[a-z ]*"><h3><button>([^<]*)</button><span class="last">([^<]*)', group)
    assert cards[:2] == [("#1 leaf 0", "1"), ("#1 leaf 1", "0")] and ("#0 aside", "0.375") in cards and len(cards) == 8
    # the outputs of a unit with their own prompts
    aside = group.split("#0 aside")[1].split("#1 aside")[0]
    assert "segment 3" in aside and "segment 4" in aside and "⟨3⟩⟨4⟩" in plain(aside) and "⟨4⟩⟨4⟩" in plain(aside)

    assert "its unit’s reward |0.375|" in plain(at(f"mode=one&{of[0, 1, 4]}"))
    alone = at(f"mode=tree&{of[1, 0, 0]}")
    assert 'class="node"' not in alone and "Its rollout" not in alone and "its unit’s reward" not in alone


def test_the_writer_needs_nothing_but_python(folder):
    """It runs where no torch and no transformers are."""
    write_rollouts(folder, "step_000001", [trajectory()])
    command = [sys.executable, "-S", "-E", "-m", "flatrl.report", folder]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=REPO)
    assert result.returncode == 0 and "the transformers package is not installed here" in result.stderr
    assert embedded(folder / "report.html")["runs"][0]["total"] == 1


@WITHOUT_NODE
def test_seeds_become_a_mean_and_a_band(tmp_path):
    """Of three runs two differ in the seed alone, and in the folder of the model that it made."""
    runs = []
    settings = (("a", 0, 1.0, (0.0, 0.25)), ("b", 1, 1.0, (0.5, 0.75)), ("c", 0, 2.0, (0.125, 0.5)))
    for name, seed, lr, rewards in settings:
        (tmp_path / name).mkdir()
        flags = {"seed": seed, "lr": lr, "output_dir": name, "model": f"/cache/task-{seed:016x}"}
        (tmp_path / name / "args.json").write_text(json.dumps({"args": flags}))
        rows = [{"step": i, "reward/mean": x, "rollout/trajectories": 8} for i, x in enumerate(rewards, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs.append(report.Run(tmp_path / name))
    page_of(*runs, file=tmp_path / "report.html")

    def reward(address: str) -> tuple:
        """The labels, the mean lines' heights and the bands of the chart of rewards."""
        markup = drawn(tmp_path / "report.html", f"tab=curves&{address}")
        card = markup.split('data-metric="reward/mean"')[1].split('class="card"')[0]
        (labels,) = re.findall(r'role="img" aria-label="([^"]*)"', card)
        points = [re.findall(r"([\d.]+),([\d.]+)", shape) for shape in re.findall(r'<poly\w+ points="([^"]*)"', card)]
        marks = re.findall(r'text-anchor="middle">([^<]*)<', card)
        return labels, points, marks

    labels, points, marks = reward("")
    assert labels == "a, b, c" and len(points) == 3 and marks == ["1", "2"]
    of_a, of_b, of_c = ([float(y) for _, y in line] for line in points)
    labels, (band, mean, alone), _ = reward("seeds=mean")
    assert labels == "a, 2 seeds, c"
    assert [float(y) for _, y in alone] == pytest.approx(of_c, abs=0.11)
    assert [float(y) for _, y in mean] == pytest.approx([(x + y) / 2 for x, y in zip(of_a, of_b)], abs=0.11)
    assert [float(y) for _, y in band] == pytest.approx([*of_b, *of_a[::-1]], abs=0.11)
    assert reward("x=trajectories")[2] == ["10", "15"]  # from 8 to 16
    assert len(reward("x=seconds&scale=log")[1]) == 3


@WITHOUT_NODE
def test_axes_of_ones_own(folder):
    """A metric against a metric, typed ranges: what the chart of rewards draws, and what the address keeps."""
    rows = [{"step": i, "reward/mean": i / 4} for i in range(1, 5)]
    for row, entropy in zip(rows, (2.0, 1.0, None, 0.5)):
        row |= {} if entropy is None else {"actor/entropy": entropy}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page_of(report.Run(folder), file=folder / "report.html")

    def chart(address: str, *actions) -> tuple:
        """The points, the marks of x and of y, or what stands there instead; and the address."""
        markup, _, kept = drawn(folder / "report.html", f"tab=curves&{address}", *actions).rpartition("address #")
        card = markup.split('data-metric="reward/mean"')[1].split('class="card"')[0]
        if "<svg" not in card:
            return re.findall('class="empty">([^<]*)', card)[0], kept.strip()
        [line] = re.findall(r'<polyline points="([^"]*)"', card)
        points = [tuple(float(x) for x in point.split(",")) for point in line.split()]
        return points, *(re.findall(f'text-anchor="{side}">([^<]*)<', card) for side in ("middle", "end")), kept.strip()

    left, right, top, bottom = 46.0, 252.0, 8.0, 150.0
    points, xs, ys, kept = chart("x=actor/entropy")
    assert [x for x, _ in points] == pytest.approx([right, left + (right - left) / 3, left], abs=0.1)  # 2, 1, 0.5
    assert xs == ["1", "2"] and kept == "x=actor/entropy"
    points, xs, ys, kept = chart("", ["from x", "input", "2"], ["to x", "input", "3"])
    assert [x for x, _ in points] == [left, right] and xs == ["2", "3"] and ys == ["0.5", "0.6", "0.7"]
    assert kept == "left=2&right=3"
    typed = ["least reward/mean", "input", "0"], ["largest reward/mean", "input", "0.5"]
    points, _, ys, kept = chart("", *typed)
    height = bottom - top
    assert [y for _, y in points] == pytest.approx([top + height / 2, top, top - height / 2, top - height], abs=0.1)
    assert ys == ["0", "0.2", "0.4"] and kept == 'y={"reward/mean":["0","0.5"]}'
    assert chart("y=" + json.dumps({"reward/mean": ["0", "0.5"]}))[:2] == (points, ["2", "4"])
    assert chart("", ["from x", "input", "9"]) == ("nothing in this range", "left=9")
    assert chart("", *typed, [typed[0][0], "input", ""], [typed[1][0], "input", ""])[3] == ""
    for hostile in ("x=constructor", "y=null", "y={", "y=[7]", 'y={"reward/mean":7}', "left=abc"):
        assert len(chart(hostile)[0]) == 4, hostile


@WITHOUT_NODE
def test_two_trajectories_are_compared_token_by_token(folder):
    """What both say is pale, what one alone says is marked; the tool's words are compared as words."""
    messages = [{"role": "assistant"}, {"role": "tool", "name": "look"}, {"role": "assistant"}]
    ids = [list(range(10, 16)), [10, 11, 20, 12, 13, 15]]
    outputs = [trajectory(sample=i, ids=ids[i], mask=[1, 1, 1, 0, 1, 1], messages=messages) for i in range(2)]
    outputs.append(trajectory(prompt=1, ids=[10, 15], mask=[1, 1]))
    outputs.append(trajectory(prompt=1, sample=1, ids=[10] * 2500 + [7] + [11] * 2500, mask=[1] * 5001))
    outputs.append(trajectory(prompt=1, sample=2, ids=[9] + [10] * 2499 + [8] + [11] * 2500, mask=[1] * 5001))
    write_rollouts(folder, "step_000001", outputs)
    [run] = page_of(report.Run(folder), file=folder / "report.html")
    at = {(t["prompt"], t["sample"]): f"0.{i}" for i, t in enumerate(run["trajectories"])}

    def sides(address: str, *actions) -> tuple:
        """Of each side what it says: [text, whether it alone says so]; and how many tokens are its own."""
        markup = drawn(folder / "report.html", f"tab=trajectories&mode=diff&{address}", *actions)
        own = re.findall(r"([\d,]+) of ([\d,]+) sampled tokens are its own", markup)
        pairs = markup.split('<div class="turn pair">')[3:]
        said = [re.findall(r'<span class="[^"]*(same|only)">([^<]*)', pair) for pair in pairs]
        return own, said

    own, said = sides(f"t={at[0, 0]}")
    assert own == [("2", "5"), ("2", "5")]
    first, tool, last = said
    same = [("same", "⟨10⟩"), ("same", "⟨11⟩")]
    assert first == [*same, ("only", "⟨12⟩"), *same, ("only", "⟨20⟩")]
    open_, close = ("same", "⟨"), ("same", "⟩")
    assert tool == [open_, ("only", "13"), close, open_, ("only", "12"), close]
    assert last == [("only", "⟨14⟩"), ("same", "⟨15⟩"), ("only", "⟨13⟩"), ("same", "⟨15⟩")]
    # One that is kept is compared with the next that is opened, of another group too.
    keep = ["Keep this one to compare", "click"]
    kept = drawn(folder / "report.html", f"tab=trajectories&mode=diff&t={at[0, 0]}", keep)
    assert f"with={at[0, 0]}" in kept.splitlines()[-1] and "Kept: open another" in kept
    own, said = sides(f"t={at[1, 0]}&with={at[0, 0]}")
    assert own == [("1", "2"), ("4", "5")]
    assert said[0] == [("same", "⟨10⟩"), ("only", "⟨15⟩"), ("same", "⟨10⟩"), ("only", "⟨11⟩"), ("only", "⟨12⟩")]
    # Texts whose table would have 25 million cells: their common beginning and end are found, and nothing hangs.
    own, _ = sides(f"t={at[1, 1]}&with={at[1, 2]}")
    assert own == [("2,501", "5,001"), ("2,501", "5,001")]


@WITHOUT_NODE
def test_trajectories_are_filtered_by_metrics_and_extra(folder):
    outputs = [trajectory(sample=i, reward=i / 2, metrics={"found": i % 2}) for i in range(4)]
    for i, output in enumerate(outputs):
        output.extra |= {"level": i + 1, "topic": f"Red Fox {i}"} | ({"hard": True} if i == 3 else {"text": "x" * 5000})
    write_rollouts(folder, "step_000001", outputs)
    [run] = page_of(report.Run(folder), file=folder / "report.html")
    short = {"index", "prompt", "sample", "segment", "level", "topic"}
    assert run["trajectories"][0]["extra"].keys() == short  # and not the text

    right = {
        "reward > 0.5": 2, "reward >= 0.5": 3, "extra.level < 2": 1, "metrics.found = 1": 2, "metrics.found != 1": 2,
        "metrics.found = 1 and extra.level > 2": 1, "metrics.found = 1, reward<=0.5": 1, "extra.hard = true": 1,
        'extra.topic = "red fox 2"': 1, "extra.topic ~ FOX": 4, "length = 4 and calls = 0 and stop = stop": 4,
        "sample <= 1.0": 2, "": 4, "   ": 4,
    }  # fmt: skip
    wrong = {
        "reward >": "“reward &gt;” is not like",
        "reward > 0.5 or reward < 0": "“reward &gt; 0.5 or",
        "extra.level > hard": "&gt; needs a number, not “hard”",
        "extra.nothing = 1": "no trajectory on this page has extra.nothing",
        "constructor = 1": "no trajectory on this page has constructor",
        "metrics.constructor = 1": "no trajectory on this page has metrics.constructor",
    }
    actions = [["filter", "input", where] for where in (*right, *wrong)]
    found = {}
    for (_, _, where), markup in zip(actions, states(folder / "report.html", "tab=trajectories", *actions)[1:]):
        [n] = re.findall(r"(\d+) of 4 on this page", markup)
        [said] = re.findall('<span class="wrong" role="status">([^<]*)', markup)
        found[where] = int(n), said
    assert {where: found[where] for where in right} == {where: (n, "") for where, n in right.items()}
    for where, beginning in wrong.items():
        n, said = found[where]
        assert n == 4 and said.startswith(beginning) and said.endswith("not applied"), (where, said)


@WITHOUT_NODE
def test_notes_stay_in_the_browser_and_go_with_the_run(folder, tmp_path):
    write_rollouts(folder, "step_000001", [trajectory(sample=i) for i in range(2)])
    notes = {"step/1/0/0/0": "<b>odd</b>", "step/9/0/0/0": "not on the page", "run": "a try"}
    lines = [{"about": about, "note": note} for about, note in notes.items()]
    (folder / "notes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "metrics.jsonl").write_text('{"step": 0, "timing/eval_s": 1.5}\n{"step": 1, "timing/step_s": 2.0}\n')
    page, storage = folder / "report.html", tmp_path / "storage.json"
    page_of(report.Run(folder), file=page)
    field = "a note on this trajectory"
    of = lambda markup: re.findall(r"<textarea[^>]*>([^<]*)</textarea>", markup)
    assert of(drawn(page, "tab=trajectories&t=0.0")) == ["&lt;b&gt;odd&lt;/b&gt;"]
    written = drawn(page, "tab=trajectories&t=0.1", [field, "input", "mine"], storage=storage)
    assert json.loads(storage.read_text()) == {"flatrl notes of run 1.5": '[["step/1/0/1/0","mine"]]'}
    assert of(drawn(page, "tab=trajectories&t=0.1", storage=storage)) == ["mine"] and "#1 ✎" in written
    assert of(drawn(page, "tab=trajectories&t=0.1")) == [""]  # another browser
    assert "1 of 2 on this page" in drawn(page, "tab=trajectories", ["filter", "input", "note ~ mine"], storage=storage)
    notes = drawn(page, "tab=notes", ["notes.jsonl", "click"], storage=storage)
    assert of(notes) == ["a try"] and "Until then they are in this browser." in notes
    [saved] = re.findall('download="notes.jsonl" href="data:[^,]*,([^"]*)"|href="data:[^,]*,([^"]*)" download', notes)
    saved = [json.loads(line) for line in urllib.parse.unquote("".join(saved)).splitlines()]
    assert saved == [*lines, {"about": "step/1/0/1/0", "note": "mine"}]
    assert "step/9/0/0/0|not on the page" in plain(notes) and "step 1 · prompt 0 · #1|mine" in plain(notes)
    # Without a place to keep them the page says so, and shows what was written as long as it is open.
    unkept = drawn(page, "tab=notes", ["a note on run", "input", "new"], ["Trajectories", "click"], ["Notes", "click"])
    assert of(unkept) == ["new"] and "This browser keeps no notes of such a page" in unkept
    # Deleted: of what the file has, nothing is saved.
    delete = [field, "input", ""], ["Notes", "click"], ["notes.jsonl", "click"]
    gone = drawn(page, "tab=trajectories&t=0.0", *delete, storage=storage)
    (folder / "metrics.jsonl").write_text('{"step": 0, "timing/eval_s": 1.25}\n{"step": 1}\n')
    (folder / "notes.jsonl").unlink()
    page_of(report.Run(folder), file=tmp_path / "later.html")  # another run in the same folder
    assert of(drawn(tmp_path / "later.html", "tab=trajectories&t=0.1", storage=storage)) == [""]
    assert "odd" not in gone and of(drawn(page, "tab=trajectories&t=0.0", storage=storage)) == [""]
