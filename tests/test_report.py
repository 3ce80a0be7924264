"""flatrl/report.py: the page shows the run, and its texts stay texts."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import REPO, output_of, rows_of

import data
from agent_loop import AgentLoopOutput
from flatrl import report
from flatrl.log import Log
from flatrl.report_trajectories import token_texts
from train import Args

HOSTILE = (
    "</script><script>document.title='pwned'</script>"
    "<!--<img src=x onerror=\"document.title='pwned'\">"
    "&lt;\u2028 é <|im_end|> __DATA__ __NONCE__"
)


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_folder(tmp_path / "run")


def make_folder(folder: Path, command=(), **flags) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    args = {"model": None} | flags
    about = {"args": args, "command": command, "git": "abc", "versions": {"torch": "2"}}
    (folder / "args.json").write_text(json.dumps(about))
    return folder


def write_json_lines(file: Path, rows: list[dict]):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def embedded(page: Path) -> list[dict]:
    """The runs of a page, as a browser finds them: up to the first </script>."""
    element = '<script type="application/json" id="data">(.*?)</script'
    return json.loads(re.search(element, page.read_text(), re.DOTALL)[1])["runs"]


def run_of(folder: Path, tokenizer=None, **limits) -> dict:
    """Writes the page of a run, and returns its data."""
    report.write([report.read_run(folder, tokenizer, **limits)], folder / "report.html")
    return embedded(folder / "report.html")[0]


def trajectory(prompt=0, sample=0, ids=(5, 6, 7, 8), mask=None, **changes) -> AgentLoopOutput:
    extra = {"index": prompt, "prompt": prompt, "sample": sample, "segment": 0}
    extra |= changes.pop("extra", {})
    fields = {"version": 3, "logprob": -0.5, "reward": 1.0, "extra": extra} | changes
    return output_of(mask or [1] * len(ids), ids=ids, **fields)


def write_rollouts(folder: Path, name: str, outputs: list, errors=()):
    log = SimpleNamespace(folder=folder, args=Args())
    Log.rollouts(log, name, outputs, list(errors))


def learned(outputs: list, advantages: list[float], difference: float) -> dict:
    """The batch of a step after its update."""
    batch = data.collate(outputs)
    batch["advantages"] = torch.tensor(advantages)[:, None].expand_as(batch["response_mask"])
    batch["logprobs_old"] = batch["logprobs_rollout"] + difference
    return batch


# ------------------------------------------------------------- the page's data


def test_the_page_has_the_numbers_of_metrics_jsonl(folder):
    rows = [
        {"step": 0, "eval/reward": 0.1 + 0.2},
        {"step": 1, "reward/mean": 1 / 3, "timing/idle_s": [1.0]},
        {"step": 2, "reward/mean": float("nan"), "eval/reward": 1},
    ]
    write_json_lines(folder / "metrics.jsonl", rows)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/me')  # being written
    run = run_of(folder)
    assert run["columns"] == {
        "step": [0, 1, 2],
        "eval/reward": [0.1 + 0.2, None, 1],
        "reward/mean": [None, 1 / 3, "nan"],
    }
    assert run["about"]["git"] == "abc" and run["trajectories"] == []
    assert run["notes"][0].startswith("No trajectories: this run wrote no rollouts (--replay")


def test_a_trajectory_is_its_turns_with_what_the_update_knew(folder, tokenizer):
    ids = tokenizer.encode(f"abc{tokenizer.eos_token}ab", add_special_tokens=False)
    call = {"function": {"name": "calculator", "arguments": {"expression": "1+1"}}}
    messages = [
        {"role": "assistant", "content": "the prompt's own example"},
        "an object of another package, which the log made a text",
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculator", "content": "c"},
        {"role": "assistant", "content": "b"},
    ]
    whole = trajectory(
        prompt=4,
        ids=ids,
        mask=[1, 1, 0, 0, 0, 1],
        messages=messages,
        turn_rewards=[(1, 0.25)],
        reward={"score": 1.0, "form": 0.5},
    )
    cut_off = trajectory(prompt=4, sample=1, stop_reason="length")
    error = {"prompt": 4, "sample": 2, "kind": "failed_reward", "error": "oh"}
    constrained = trajectory(prompt=4, sample=3, mask=[0] * 4)
    outputs = [whole, cut_off, constrained]
    write_rollouts(folder, "step_000002", outputs, [error])
    batch = learned(outputs, [1.5, -0.5, 0.5], 0.25)
    batch["response_mask"][1] = 0  # --mask_truncated
    report.keep_learned(folder / "learned" / "step_000002.jsonl", outputs, batch)
    run = run_of(folder, tokenizer)
    whole, cut_off, constrained, failed = run["trajectories"]
    policy = {"role": "assistant", "advantages": 1.5}
    two, one = (
        {"logprobs": [-0.5] * n, "versions": [3] * n, "difference": [0.25] * n} for n in (2, 1)
    )
    calls = [["calculator", '{"expression": "1+1"}']]
    assert whole["blocks"] == [
        {"at": 0, "tokens": ["a", "b"], "calls": calls} | two | policy,
        {"at": 2, "role": "tool calculator", "text": ["c", tokenizer.eos_token, "a"]},
        {"at": 5, "tokens": ["b"], "calls": []} | one | policy,
    ]
    assert whole["text"] == token_texts(tokenizer, [1, 2])
    assert (whole["reward"], whole["turn_rewards"]) == (1.25, [[1, 0.25]])
    assert whole["parts"] == {"score": 1.0, "form": 0.5}
    assert (whole["kind"], whole["step"], whole["prompt"]) == ("step", 2, 4)
    assert whole["trained"] is constrained["trained"] is True and cut_off["trained"] is False
    assert cut_off["stop"] == "length" and "difference" not in cut_off["blocks"][0]
    assert (failed["stop"], failed["error"], failed["sample"]) == ("failed_reward", "oh", 2)
    assert run["total"] == 4 and run["notes"] == []
    assert tokenizer.eos_token in run["special"]


def test_tokens_that_are_parts_of_a_character_are_joined(tokenizer):
    text = "a é漢 b" + tokenizer.eos_token
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = token_texts(tokenizer, ids)
    assert "".join(texts) == text and len(texts) == len(ids)
    assert "" in texts and "\ufffd" not in "".join(texts)
    broken = token_texts(tokenizer, [ids[2]] * 15)  # the first byte of é
    assert [i for i, text in enumerate(broken) if text] == [6, 13, 14]
    assert token_texts(None, [7, 8]) == ["⟨7⟩", "⟨8⟩"]


def test_hostile_text_stays_text(tmp_path):
    folder = make_folder(tmp_path / "run", [HOSTILE], task=HOSTILE)
    tokenizer = mock.Mock(added_tokens_decoder={}, encode=lambda *_, **__: [0])
    tokenizer.decode = lambda ids, **_: "".join("a" if i < 3 else HOSTILE[i - 3] for i in ids)
    call = {"function": {"name": HOSTILE, "arguments": HOSTILE}}
    output = trajectory(
        ids=range(3, 3 + len(HOSTILE)),
        messages=[{"role": "assistant", "tool_calls": [call]}, {"role": HOSTILE}],
        reward={"score": 1.0, HOSTILE: 0.5},
        metrics={HOSTILE: 1},
    )
    error = {"kind": HOSTILE, "prompt": 0, "sample": 2, "error": HOSTILE}
    write_rollouts(folder, "step_000001", [output], [error])
    write_json_lines(folder / "metrics.jsonl", [{"step": 1, HOSTILE: 2.0}])
    run = run_of(folder, tokenizer)
    shown, failed = run["trajectories"]
    [block] = shown["blocks"]
    assert "".join(block["tokens"]) == HOSTILE and block["calls"] == [[HOSTILE, HOSTILE]]
    assert shown["parts"][HOSTILE] == 0.5 and failed["error"] == failed["stop"] == HOSTILE
    assert run["columns"][HOSTILE] == [2.0]
    page = (folder / "report.html").read_text()
    template = report.PAGE.read_text()
    for mark in ("<script", "</script", "<!--", "<img"):  # the page's own and no other
        assert page.lower().count(mark) == template.lower().count(mark)
    makes_html = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\("
    assert not re.search(makes_html, template)


# ------------------------------------------------------------- which trajectories


def test_whole_groups_of_every_step_and_the_same_questions_of_every_evaluation(folder):
    for step in range(1, 6):
        outputs = [trajectory(10 * step + i // 4, i % 4) for i in range(40)]
        write_rollouts(folder, f"step_{step:06d}", outputs)
    for step in (0, 5):
        write_rollouts(folder, f"eval_{step:06d}", [trajectory(i) for i in range(100)])
    (folder / "rollouts/.step_000006.jsonl").write_text('{"prompt_ids": [1, ')  # being written
    run = run_of(folder, max_trajectories=70)
    shown = run["trajectories"]
    assert run["total"] == 400 and 60 <= len(shown) <= 70
    assert run["notes"][0].startswith(f"{len(shown)} of 400 trajectories are on this page")
    for step in range(1, 6):
        samples = [t["sample"] for t in shown if (t["kind"], t["step"]) == ("step", step)]
        assert len(samples) >= 8 and samples == [0, 1, 2, 3] * (len(samples) // 4)
    before, after = (
        [t["index"] for t in shown if t["kind"] == "eval" and t["step"] == step] for step in (0, 5)
    )
    n = min(len(before), len(after))
    assert n >= 8 and before[:n] == after[:n] and before != sorted(before)


# ------------------------------------------------------------- while it trains


def test_a_run_writes_its_page_and_it_takes_a_small_share_of_the_time(tmp_path, monkeypatch):
    clock = iter([0, 1, 50.9, 51, 52, 53, 54])  # it takes 1 s: not again within 50 s
    now = SimpleNamespace(monotonic=lambda: next(clock), time=lambda: 0.0)
    monkeypatch.setattr(report, "time", now)
    log = Log(Args(output_dir=str(tmp_path / "run")), None, 0)
    page = tmp_path / "run" / "report.html"

    def steps() -> list[int]:
        return embedded(page)[0]["columns"]["step"]

    log.metrics({"step": 0})
    assert steps() == [0]
    outputs = [trajectory()]
    log.rollouts("step_000001", outputs, [])
    log.metrics({"step": 1}, SimpleNamespace(trained=outputs), learned(outputs, [0.75], 0.0))
    assert steps() == [0]
    log.metrics({"step": 2})
    assert steps() == [0, 1, 2]
    assert embedded(page)[0]["trajectories"][0]["blocks"][0]["advantages"] == 0.75
    log.close()
    assert list(page.parent.glob(".*")) == []


def test_a_report_that_fails_is_a_warning(tmp_path, capsys):
    log = Log(Args(output_dir=str(tmp_path / "run")), None, 0)
    (tmp_path / "run" / "report.html").mkdir()
    log.metrics({"step": 0})
    log.close()
    warning = "warning: report.html can't be written: IsADirectoryError"
    assert capsys.readouterr().err.count(warning) == 1
    assert rows_of(tmp_path / "run" / "metrics.jsonl") == [{"step": 0}]


# ------------------------------------------------------------- the command


def test_the_command_puts_runs_on_one_page(tmp_path, tiny_model, monkeypatch, capsys):
    for name, model in ("a", tiny_model), ("b", "/none"):
        folder = make_folder(tmp_path / name, model=model)
        write_rollouts(folder, "eval_000000", [trajectory(ids=[1])])
    monkeypatch.chdir(tmp_path)
    report.main(["a", "b"])
    assert capsys.readouterr().out == "report.html\n"
    a, b = embedded(tmp_path / "report.html")
    assert (a["name"], b["name"]) == ("a", "b")
    assert a["trajectories"][0]["blocks"][0]["tokens"] == ["<|im_start|>"] and a["notes"] == []
    assert b["trajectories"][0]["blocks"][0]["tokens"] == ["⟨1⟩"]
    assert b["notes"][0].startswith("Tokens are shown as numbers")
    report.main(["a", "--trajectories", "1"])
    assert len(embedded(tmp_path / "a" / "report.html")) == 1
    with pytest.raises(SystemExit):
        report.main([str(tmp_path)])
    assert "has no args.json: is it a run's --output_dir?" in capsys.readouterr().err


def test_a_strangers_tokenizer_runs_no_code(folder, tiny_model, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    shutil.copytree(tiny_model, folder / "final")
    file = folder / "final" / "tokenizer_config.json"
    mine = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | mine))
    (folder / "final" / "mine.py").write_text("raise SystemExit('a stranger was here')")
    report.load_tokenizer(folder)  # nobody is asked, and nothing of it runs


def test_a_file_that_a_resumed_run_writes_anew_is_read_anew(folder, tokenizer):
    for ids in ([5, 6], [5, 6, 7, 8, 9]):
        write_rollouts(folder, "step_000001", [trajectory(sample=i, ids=ids) for i in range(2)])
        run = run_of(folder, tokenizer)
        assert (run["total"], len(run["trajectories"]), run["notes"]) == (2, 2, [])


def test_the_command_needs_nothing_but_python(folder):
    """It runs without torch and transformers."""
    write_rollouts(folder, "step_000001", [trajectory()])
    command = [sys.executable, "-S", "-E", "-m", "flatrl.report", folder]
    subprocess.run(command, check=True, timeout=300, cwd=REPO)
    [run] = embedded(folder / "report.html")
    assert run["total"] == 1 and "package is not installed here" in run["notes"][0]


# ------------------------------------------------------------- in node


WITHOUT_NODE = pytest.mark.skipif(not shutil.which("node"), reason="no node")


def drawn(page: Path, address: str, *filters: str) -> list[str]:
    """A page's elements as markup: at first, and with each of these filters."""
    command = ["node", REPO / "tests" / "dom.js", page, f"#{address}", json.dumps(filters)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\f")


def two_trees() -> list[AgentLoopOutput]:
    """Two rollouts: a trunk, two leaves that continue it, and a unit with two prompts."""
    segments = [
        ([1, 2], 5, {"unit": "trunk", "reward": 0.5}),
        ([1, 2, 5, 9], 7, {"unit": "leaf 0", "reward": 1.0}),
        ([1, 2, 5, 9], 8, {"unit": "leaf 1", "reward": 0.0}),
        ([3, 4], 5, {"unit": "aside", "reward": 0.25, "turn_rewards": [(0, 0.125)]}),
        ([4, 4], 6, {"unit": "aside", "reward": 0.25}),
    ]
    outputs = []
    for sample in range(2):
        for number, (prompt, token, more) in enumerate(segments):
            extra = {"segment": number, "unread": "<b>You win</b>"}
            group = f"{sample}/after turn 1" if "leaf" in more["unit"] else ""
            output = trajectory(0, sample, [token], group=group, extra=extra, **more)
            output.prompt_ids = prompt
            outputs.append(output)
    return outputs


@WITHOUT_NODE
def test_a_rollout_is_a_tree_and_units_are_beside_those_they_are_compared_with(folder):
    write_rollouts(folder, "step_000001", two_trees())
    run_of(folder)
    leaf = "tab=trajectories&t=0.6"  # the first leaf of the second rollout
    # A tree: the leaves hang below the trunk, with the tokens that their prompts add.
    [tree] = drawn(folder / "report.html", f"{leaf}&mode=tree")
    node, branches = '<div class="node">', '<div class="branches">'
    nodes = re.findall(f"{node}|{branches}|" r"segment \d · [a-z]+ ?\d?(?=</button>)", tree)
    assert nodes == [
        *[node, "segment 0 · trunk", branches],
        *[node, "segment 1 · leaf 0", node, "segment 2 · leaf 1"],
        *[node, "segment 3 · aside", node, "segment 4 · aside"],
    ]
    texts = re.sub(r"(<[^>]*>)+", "|", tree)
    assert texts.count("|⟨9⟩|") == 2 and "⟨5⟩⟨9⟩" not in texts
    assert "&lt;b&gt;You win&lt;/b&gt;" in tree and "<b>You win" not in tree

    # A group: the chosen leaf's siblings first, then the others, unit by unit.
    [group] = drawn(folder / "report.html", f"{leaf}&mode=group")
    heads = re.findall(r"<h2>group ([^<]*)<", group)
    assert heads == ["1/after turn 1", "trunk", "0/after turn 1", "aside"]


@WITHOUT_NODE
def test_seeds_become_a_mean_and_a_band(tmp_path):
    """Two of three runs differ in the seed alone, and in the folder of their models."""
    runs = []
    for name, seed, lr, rewards in [
        ("a", 0, 1.0, (0.0, 0.25)),
        ("b", 1, 1.0, (0.5, 0.75)),
        ("c", 0, 2.0, (0.125, 0.5)),
    ]:
        flags = {"seed": seed, "lr": lr, "output_dir": name}
        folder = make_folder(tmp_path / name, **flags, model=f"/cache/task-{seed:016x}")
        rows = [{"step": i, "reward/mean": reward} for i, reward in enumerate(rewards, 1)]
        write_json_lines(folder / "metrics.jsonl", rows)
        runs.append(report.read_run(folder, None))
    page = tmp_path / "report.html"
    report.write(runs, page)

    def heights(address: str) -> tuple[str, list]:
        """The chart's label, and the heights of the points of each of its lines and bands."""
        [markup] = drawn(page, f"tab=curves&{address}")
        chart = markup.split('data-metric="reward/mean"')[1].split('class="card"')[0]
        [label] = re.findall(r'role="img" aria-label="([^"]*)"', chart)
        shapes = re.findall(r'<poly\w+ points="([^"]*)"', chart)
        points = [shape.split() for shape in shapes]
        return label, [[float(point.split(",")[1]) for point in shape] for shape in points]

    label, (a, b, c) = heights("")
    assert label == "a, b, c"
    label, (band, mean, alone) = heights("seeds=mean")
    assert label == "a, 2 seeds, c"
    assert alone == pytest.approx(c, abs=0.11)
    assert mean == pytest.approx([(x + y) / 2 for x, y in zip(a, b)], abs=0.11)
    assert band == pytest.approx([*b, *a[::-1]], abs=0.11)


@WITHOUT_NODE
def test_trajectories_are_filtered_by_metrics_and_extra(folder):
    outputs = []
    for i in range(4):
        extra = {"level": i + 1, "topic": f"Red Fox {i}", "hard": i == 3}
        outputs.append(trajectory(sample=i, reward=i / 2, metrics={"found": i % 2}, extra=extra))
    write_rollouts(folder, "step_000001", outputs)
    run_of(folder)
    counts = {
        "reward > 0.5": 2,
        "extra.level < 2": 1,
        "metrics.found = 1 and extra.level > 2": 1,
        "extra.hard = true": 1,
        'extra.topic = "red fox 2"': 1,
        "extra.topic ~ FOX": 4,
        "length = 4 and calls = 0 and stop = stop": 4,
        "extra.level > hard": 4,  # an error, which filters nothing
    }
    _, *pages = drawn(folder / "report.html", "tab=trajectories", *counts)
    for (where, count), markup in zip(counts.items(), pages, strict=True):
        [n] = re.findall(r"(\d+) of 4 on this page", markup)
        [error] = re.findall('<span class="wrong" role="status">([^<]*)', markup)
        assert int(n) == count, where
        expected = "&gt; needs a number, not “hard”" if where == "extra.level > hard" else ""
        assert error.startswith(expected) and bool(error) == bool(expected), where
