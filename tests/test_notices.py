"""flatrl/notices.py, flatrl/terminal.py and flatrl/trackers.py: what a run tells its user beside its table."""

import contextlib
import copy
import fcntl
import io
import json
import os
import re
import struct
import sys
import termios
import warnings
from types import SimpleNamespace

import pytest
import torch
from conftest import wait_for
from test_data import make_output

from agent_loop import BadInput
from examples import tiny_models
from flatrl import notices, tables, terminal
from flatrl.rows import check_tokenizer
from train import Args

BANNER = notices.banner
PROMPT = [{"role": "user", "content": "hello"}]


@pytest.fixture
def log(tmp_path):
    """What Notices uses of Log."""
    log = SimpleNamespace(args=Args(output_dir=str(tmp_path)), folder=tmp_path, said=[], tokenizer=None, steps_done=0)
    log.say = log.warn_once = log.said.append
    return log


class NoReport:
    """In place of flatrl.report.LiveReport."""

    def __init__(self, folder, tokenizer, warn):
        pass

    def step(self, step, outputs, batch):
        pass

    def close(self):
        pass


def sampled(n: int, **attributes) -> list:
    return [make_output([1], [1, 1], extra={"prompt": i, "sample": 0, "segment": 0}, **attributes) for i in range(n)]


# ---------------------------------------------------------------- the start


@pytest.fixture(autouse=True)
def no_banner(monkeypatch):
    monkeypatch.setattr(notices, "banner", lambda *_: "the banner")


def warnings_of(log, train, val) -> list[str]:
    rows = {"train": train, "val": val}
    notices.Notices(log, {}, []).start(rows, rows, None, None, "")
    banner, *warnings = log.said
    assert banner == "the banner"
    log.said.clear()
    return warnings


def test_a_template_that_ignores_tools_is_told_of(tokenizer):
    from examples import calculator

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_tokenizer(tokenizer, tokenizer, {"prompt": PROMPT}, calculator)
        letters = SimpleNamespace(decode=lambda ids: "x", chat_template="x", apply_chat_template=lambda *_, **__: "x")
        check_tokenizer(letters, letters, {"prompt": []}, SimpleNamespace())  # it may know no hello
    tokenizer = copy.copy(tokenizer)  # what is known of its template is kept by tokenizer
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for prompt in (PROMPT, []):  # without one an Interaction speaks first
        with pytest.warns(UserWarning, match="chat template ignores tools"):
            check_tokenizer(tokenizer, tokenizer, {"prompt": prompt}, calculator)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_tokenizer(tokenizer, tokenizer, {"prompt": PROMPT}, SimpleNamespace())


@pytest.mark.parametrize(("dtype", "device", "is_supported", "n"), [
    ("bfloat16", "cpu", False, 1), ("bfloat16", "cpu", True, 0), ("float32", "cpu", False, 0),
    ("bfloat16", "cuda", False, 0)])  # fmt: skip
def test_a_processor_without_bfloat16_is_told_of(log, monkeypatch, dtype, device, is_supported, n):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: is_supported)
    log.args.dtype = dtype
    rows = {"train": [], "val": []}
    notices.Notices(log, {}, []).start(rows, rows, None, torch.device(device), "")
    said = "this processor has no instructions for bfloat16: a step may take several times as long as in float32, "
    assert log.said[1:] == [said + "the default here"] * n


def test_questions_of_training_among_the_validation_rows_are_counted(log):
    train = [{"prompt": [{"role": "user", "content": f"{i}"}], "index": i} for i in range(5)]
    val = [row | {"index": 100} for row in train[:3]] + [{"prompt": PROMPT}]
    # Games of other seeds, with the same words, and other images are not the same.
    seeds = [{"prompt": PROMPT, "extra_info": {"interaction_kwargs": {"seed": seed}}} for seed in range(4)]
    image = {"prompt": PROMPT, "images": ["a.png"]}
    (said,) = warnings_of(log, [*train, *seeds[:2], image], [*val, *seeds[2:], image])
    assert said.startswith("3 of 7 validation rows have the prompt of a training row")


def test_rows_that_lack_what_their_tools_need_are_counted(log, tokenizer):
    rows = [{"prompt": PROMPT, "extra_info": {"need_tools_kwargs": True} | more} for more in
            ({}, {"tools_kwargs": {}}, {"tools_kwargs": {"calculator": {"create_kwargs": {"x": 1}}}})]  # fmt: skip
    (said,) = warnings_of(log, train=rows, val=[])
    assert said.startswith("2 rows say need_tools_kwargs")


def test_of_many_rows_the_first_are_looked_at(log, monkeypatch):
    monkeypatch.setattr(notices, "MAX_ROWS", 30)
    monkeypatch.setattr(notices, "MAX_ROWS_ON_DISK", 3)
    rows = [{"prompt": PROMPT}] * 50
    for train, n in (rows, "30"), (tables.Rows(rows.__getitem__, range(50)), "3"):  # rows on disk are read anew
        (said,) = warnings_of(log, train, rows[:2])
        assert said == (
            "2 of 2 validation rows have the prompt of a training row: eval/reward is too good"
            f" (of the first {n} training rows and 2 others)")  # fmt: skip


# ---------------------------------------------------------------- a step that teaches nothing


def test_why_a_step_taught_nothing():
    outputs = sampled(4, reward=0.0, metrics={"tool_calls": 0}, stop_reason="length")
    outputs[0].metrics, outputs[1].stop_reason = {"tool_calls": 2}, "stop"
    why = notices.why_nothing(outputs)
    assert why.startswith("1 of 4 called a tool, 75% hit the length limit (--max_response_tokens), all rewards are 0 (")
    assert notices.why_nothing(sampled(2, reward={"score": 1.0})).startswith("all rewards are 1 (")
    different = [*sampled(1, reward=0.0), *sampled(1, reward=1.0, stop_reason="max_turns")]
    assert notices.why_nothing(different).startswith(
        "50% hit a limit of turns (--max_assistant_turns), all groups have equal rewards (")  # fmt: skip


def test_a_step_that_teaches_nothing_is_told_of_until_one_does(log, monkeypatch):
    monkeypatch.setattr(notices, "LiveReport", NoReport)
    monkeypatch.setattr(notices, "whole_text", lambda output, tokenizer: f"it is {output}")
    run_notices = notices.Notices(log, {}, [])
    run_notices.watch = SimpleNamespace(step=lambda *_: ["something else"])
    phase = SimpleNamespace(sampled=sampled(2, reward=0.0), outputs=["the first"], trained=[])
    log.args.show_every = 6
    for step, advantage in enumerate((0, 0, 1, 0, 0, 0, 0, 0), 1):
        mask = torch.tensor([[1.0, 0.0]])  # what stands behind the mask teaches nothing
        batch = {"advantages": torch.tensor([[advantage, 5.0]]), "response_mask": mask}
        run_notices.step({"step": step}, phase, batch)
    run_notices.step({"step": 9})  # an evaluation alone
    said = [text.split(":")[0] for text in log.said if text != "something else"]
    assert said == ["warning", "the first trajectory of step 1", "warning", "the first trajectory of step 7"]
    warnings = [text.split(":")[1] for text in log.said if text.startswith("warning")]
    assert warnings == [" step 1 taught nothing", " step 4 taught nothing"]
    assert log.said.count("something else") == 8


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({}, "grpo: the default flags (docs/algorithms.md)\n* prompts x 8 = 256 trajectories a step, 1 update(s) each "
         "(so the ratio is 1, and clips have no effect), lr 0.5; 40 steps; writing there"),
        ({"algo": "dapo", "clip_low": 0.1, "max_gen_batches": 1},
         "dapo: the default flags (docs/algorithms.md), but clip_low 0.1, clip_high 0.28, "
         "overlong_buffer 0.2\n* there"),
        ({"algo": "dapo", "clip_high": 0.2, "overlong_buffer": 0.0, "max_gen_batches": 1},
         "dapo: the default flags (docs/algorithms.md)\n* there"),
        ({"epochs": 2}, "256 trajectories a step, 2 update(s) each, lr 0.5; 40 steps; writing there"),
        ({"rollout_only": True}, "32 prompts x 8 = 256 trajectories a step, and no update; 40 steps; writing there"),
        ({"num_steps": 0, "eval_samples": 4},
         "evaluation: 4 trajectories a validation row, at temperature 1; writing there"),
    ],
)  # fmt: skip
def test_the_first_lines_say_what_is_about_to_happen(flags, told, process_group):
    args = Args(model="m", task="t.py", output_dir="there", lr=0.5, dtype="float32", **flags)
    model = SimpleNamespace(num_parameters=lambda: 9900, device=torch.device("cpu"))
    net = SimpleNamespace(model=model, packed=True)
    rows = {"train": [1, 2], "val": [1]}
    read = {"train": [1, 2, 3], "val": [1]}
    first, second, planned, *rest = BANNER(args, rows, read, net, torch.device("meta"), 0, "\nplanned").splitlines()
    assert first == "t.py: 2 training rows (1 overlong ones dropped), 1 validation rows (0 overlong ones dropped)"
    assert (second, planned) == ("m: 0.01M parameters, float32, 1 x meta", "planned")
    start, _, end = told.rpartition("* ")
    assert "\n".join(rest).startswith(start) and rest[-1].endswith(end)
    assert len(rest) == (1 if flags.get("rollout_only") or "num_steps" in flags else 2)


# ---------------------------------------------------------------- the end


def test_the_summary_says_how_it_went_and_what_to_do_with_it(tmp_path):
    folder, args = tmp_path / "run", Args(output_dir=str(tmp_path / "run"), num_steps=4)
    (folder / "checkpoints/step_000002").mkdir(parents=True)
    rows = [{"step": 0, "eval/reward": 0.25}, {"step": 1, "reward/mean": 0.5},
            {"step": 2, "reward/mean": 0.75, "eval/reward": 1.0}]  # fmt: skip
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    again = "the same command, with"
    rewards = "reward 0.500 -> 0.750, best 0.750 at step 2\neval reward 0.250 -> 1.000, best 1.000 at step 2\n"
    report = f"report: {folder}/report.html"
    assert notices.summary(args, 2) == f"{rewards}{report}\ngo on: {again} --resume"
    (folder / "final").mkdir()
    evaluate = f"evaluate: {again} --num_steps 0 --model {folder}/final --output_dir {folder}-eval"
    evaluate += f"\ntalk to it: python examples/chat.py {folder}/final --task examples/calculator.py"
    assert notices.summary(args, 4) == f"{rewards}{report}\n{evaluate}\nmore steps: {again} --resume --num_steps 8"
    args.lr_schedule = "linear"  # its end was the schedule's
    assert notices.summary(args, 4) == f"{rewards}{report}\n{evaluate}"
    file.write_text(json.dumps(rows[0]))
    (folder / "final").rmdir()
    (folder / "checkpoints/step_000002").rmdir()
    assert notices.summary(args, 0) == f"eval reward 0.250\n{report}"


@pytest.mark.parametrize("evals, saved, told", [
    ([0.25, 0.75, 0.5], [2], "eval reward 0.250 -> 0.500, best 0.750 at step 1 (not saved)"),
    ([0.25, 0.5, 0.75], [1, 2], "eval reward 0.250 -> 0.750, best 0.750 at step 2"),
    ([0.25, 0.75, 0.75], [2], "eval reward 0.250 -> 0.750, best 0.750 at step 2"),  # of equal ones, what there is
    ([0.25, 0.75, 0.75], [1, 2], "eval reward 0.250 -> 0.750, best 0.750 at step 1"),
    ([0.75, 0.5, 0.5], [2], "eval reward 0.750 -> 0.500, best 0.750 at step 0 (not saved)"),
])  # fmt: skip
def test_the_best_evaluation_may_be_of_weights_that_were_not_saved(evals, saved, told, tmp_path):
    for step in saved:
        (tmp_path / f"checkpoints/step_{step:06d}").mkdir(parents=True)
    rows = [{"step": step, "eval/reward": evals[step], "reward/mean": 1 - step / 4} for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second, *_ = notices.summary(Args(output_dir=str(tmp_path), num_steps=2), 2).splitlines()
    assert (first, second) == ("reward 1.000 -> 0.500, best 1.000 at step 0", told)


# ---------------------------------------------------------------- bars


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_bars_are_on_terminals_of_the_main_rank_alone(monkeypatch):
    def drawn(screen, rank="0"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(sys, "stderr", screen)
        assert list(terminal.Bar([1, 2], "update")) == [1, 2]
        with terminal.shown("starting the engine"):
            pass
        return screen.getvalue()

    text = drawn(Screen())
    assert "update:   0%" in text and "starting the engine: 00:00" in text
    assert text.split("\r")[-2].strip() == ""  # gone at the end
    assert drawn(io.StringIO()) == drawn(Screen(), rank="1") == ""


def drawn_without_size(monkeypatch, draw) -> list[str]:
    """What draw() shows on a terminal that says it has no rows and no columns, each time anew."""
    reading, writing = os.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))  # rows, columns, and in pixels
    with os.fdopen(writing, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        draw()
    shown = b""
    with contextlib.suppress(OSError):  # its other end is closed
        while part := os.read(reading, 10_000):
            shown += part
    os.close(reading)
    return shown.decode().split("\r")


def test_bars_are_shown_on_a_terminal_that_does_not_know_its_size(monkeypatch):
    """So it is under script, and on some machines of CI."""
    monkeypatch.setenv("RANK", "0")

    def update():
        with terminal.Bar(None, "update", total=2) as bar:
            bar.update()
            bar.refresh()

    _, first, *_, last, _, _ = drawn_without_size(monkeypatch, update)
    assert first.startswith("update:   0%|")
    assert re.fullmatch(r"update:  50%\|█{9,}[▏▎▍▌▋▊▉]? {9,}\| 1/2 \[.*(it/s|s/it)\]", last) and len(last) == 79
    _, first, *_ = drawn_without_size(monkeypatch, lambda: list(tiny_models.told(range(2), "building")))
    assert first.startswith("building:   0%|")


def test_a_bar_is_drawn_anew_while_nothing_counts(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("RANK", "0")
    with terminal.shown("starting the engine"):
        wait_for(lambda: re.search("starting the engine: 00:0[1-9]", screen.getvalue()))  # a busy machine skips some


# ---------------------------------------------------------------- trackers


class Package(SimpleNamespace):
    """wandb or trackio, as far as they are used."""

    def __init__(self, **more):
        self.logged = []
        super().__init__(init=self.init, log=lambda numbers, step: self.logged.append((numbers, step)),
                         finish=lambda: self.logged.append("finished"), **more)  # fmt: skip

    def init(self, **settings):
        self.settings = settings
        return self

    def Table(self, columns, data):
        return {"columns": columns, "data": data}


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_get_numbers_and_a_table_of_trajectories(name, log, monkeypatch):
    monkeypatch.setitem(sys.modules, name, package := Package())
    monkeypatch.setattr(notices, "LiveReport", NoReport)
    log.args.wandb_project, log.args.tracker = "p", name
    log.tokenizer = SimpleNamespace(decode=str)
    run_notices = notices.Notices(log, {"args": 1}, [])
    phase = SimpleNamespace(outputs=sampled(70, reward={"score": 0.5}, turn_rewards=[(0, 0.25)], num_turns=2))
    run_notices.step({"step": 0, "eval/reward": 0.5})
    run_notices.step({"step": 1, "reward/mean": 0.5, "timing/idle_s": [1.0]}, phase)
    run_notices.close()
    where = {"dir": log.args.output_dir} if name == "wandb" else {}
    assert package.settings == {"project": "p", "config": {"args": 1}} | where
    (first, at_0), (second, at_1), end = package.logged
    table = second.pop("rollouts")
    assert (first, at_0, second, at_1, end) == (
        {"eval/reward": 0.5}, 0, {"reward/mean": 0.5}, 1, "finished")  # fmt: skip
    assert len(table["data"]) == 64 and len(table["columns"]) == len(table["data"][0])
    assert table["data"][3] == [3, 0, "None", 0.75, 2, "stop", "[1, 100, 101]"]


def test_a_tracker_that_is_not_installed(log, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    log.args.wandb_project, log.args.tracker = "p", "trackio"
    with pytest.raises(BadInput, match="--tracker trackio needs: pip install trackio"):
        notices.Notices(log, {}, [])
