"""README.md and docs/: their commands parse, the files, flags, links and metrics they name exist. Trains nothing."""

import ast
import dataclasses
import importlib
import math
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from conftest import OUR_PRESETS, REPO

import losses
import train

sys.path.append(str(REPO / "bench"))
import plan

PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md")), REPO / "examples" / "README.md",
         REPO / "results" / "README.md"]  # fmt: skip
COMMAND = re.compile(r"^\s*((?:[A-Z_]+=\S+ )*(?:python|accelerate|torchrun|source|bash) .*)$")
LAUNCHERS = {"--help", "--dist"}  # flags of accelerate, torchrun, pytest and argparse
LAUNCHERS |= {"--config_file", "--multi_gpu", "--num_machines", "--num_processes", "--machine_rank"}
LAUNCHERS |= {"--main_process_ip", "--main_process_port"}
LAUNCHERS |= {"--nproc_per_node", "--nnodes", "--node_rank", "--master_addr", "--master_port"}


def outside_and_inside_code(page: Path) -> tuple[list[str], list[str]]:
    """The lines of a page that are text, and those of fenced or indented blocks, backslashes at their ends joined."""
    text, code, fenced = [], [], False
    for line in re.sub(r" *\\\n\s*", " ", page.read_text()).splitlines():
        if line.startswith("```"):
            fenced = not fenced
        else:
            (code if fenced or line.startswith("    ") else text).append(line)
    return text, code


def commands() -> list:
    found = []
    for page in PAGES:
        for line in outside_and_inside_code(page)[1]:
            if match := COMMAND.match(line):
                said, _, comment = match[1].partition("#")
                for part in said.split("&&"):
                    found.append(pytest.param(part.strip(), comment, id=f"{page.name}: {part.strip()}"))
    return found


def script_and_flags(command: str) -> tuple[str, list[str], list[str]]:
    """The file a command runs, or "pytest"; the words before it; the words behind it."""
    words = shlex.split(command)
    if words[:3] == ["python", "-m", "pytest"]:
        return "pytest", words[:3], words[3:]
    if words[:2] == ["python", "-m"]:  # a module of flatrl
        return words[2].replace(".", "/") + ".py", words[:2], words[3:]
    at = next(i for i, word in enumerate(words) if word.endswith((".py", ".sh")))
    return words[at], words[:at], words[at + 1 :]


def check_train(flags: list[str]) -> None:
    args = train.parse_args([flag for flag in flags if flag != "--help"])
    train.check_args(args)
    if "/" in args.task:  # else a placeholder: my_task.py
        assert (REPO / args.task).is_file(), args.task


def knows(script: Path, flag: str) -> bool:
    """Whether a script's code (not its docstring, which may promise anything) has the flag, or its name, as a string:
    some flags are made in a loop over names."""
    strings = {node.value for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.Constant)}
    flag = flag.split("=")[0]
    return bool(strings & {flag, flag.removeprefix("--")})


def test_there_are_commands_of_all_kinds():
    scripts = {script_and_flags(command.values[0])[0] for command in commands()}
    assert len(commands()) > 40 and {"train.py", "install.sh", "pytest"} <= scripts
    benches = {f"bench/{file.name}" for file in (REPO / "bench").glob("*.py")} - {"bench/common.py"}
    assert benches <= scripts  # each has its command


@pytest.mark.parametrize(("command", "comment"), commands())
def test_command(command, comment):
    script, before, after = script_and_flags(command)
    for flag, value in zip(before, before[1:]):
        if flag == "--config_file":
            assert (REPO / value).is_file(), value
    if script == "train.py":
        check_train(after)
    elif script == "pytest":
        assert all((REPO / word).exists() for word in after if "/" in word)
    elif script == "install.sh":
        assert after in ([], ["test"])
    else:
        assert (REPO / script).is_file()
        own, trains = after, []
        if "--" in after:
            own, trains = after[: after.index("--")], after[after.index("--") + 1 :]
        for flag in own:
            passed_on = script == "bench/plan.py" and flag[2:] in vars(train.Args())
            assert not flag.startswith("--") or passed_on or knows(REPO / script, flag), f"{script} has no {flag}"
        algos = [word for word in own if word in train.PRESETS] if script == "bench/algos.py" else []
        for algo in algos or ["grpo"]:  # bench/algos.py --only
            teacher = ["--ref_model", "there"] * (algo == "opd")
            check_train(["--algo", algo, *teacher, *trains] if algos else trains)
    needs_gpu = re.search(r"configs/|tests/gpu|--model \w+/", command)
    assert bool(needs_gpu) <= ("(GPU)" in comment), f"mark it: {command}    # (GPU)"


def test_the_readme_is_short_and_narrow():
    for page in PAGES:
        longest = 200 if page.name == "README.md" else 190
        assert len(page.read_text().splitlines()) <= longest, page.name
        for line in outside_and_inside_code(page)[0]:
            assert len(line) <= 100 or line.startswith("|"), f"{page.name}: {line}"


def anchors(page: Path) -> set[str]:
    """GitHub's names of a page's headings."""
    titles = [line.lstrip("# ") for line in outside_and_inside_code(page)[0] if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_files_and_flags(page):
    text, code = outside_and_inside_code(page)
    for target in re.findall(r"\]\(([^)\s]+)\)", "\n".join(text)):
        if not target.startswith("http"):
            file, _, anchor = target.partition("#")
            linked = page.parent / file if file else page
            assert linked.is_file(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}"
    everything = "\n".join(text + code)
    for name in re.findall(r"(?<![\w/])((?:bench|configs|docs|examples|tests)/\w[\w./*-]*)", everything):
        assert list(REPO.glob(name.rstrip("."))), f"{page.name} names {name}"
    known = {f"--{field.name}" for field in dataclasses.fields(train.Args)} | LAUNCHERS
    benches = list((REPO / "bench").glob("*.py"))
    for flag in set(re.findall(r"(?<![\w-])--\w+", everything)) - known:
        assert any(knows(bench, flag) for bench in benches), f"{page.name} names {flag}"


def test_recipes_are_as_planned():
    """docs/recipes.md: what is planned has the recipe's own flags, fits, and is what the table says."""
    recipes = [command.values[0] for command in commands() if command.id.startswith("recipes.md")]
    trained = [shlex.split(command) for command in recipes if "--config_file" in command]
    planned = [shlex.split(command)[2:] for command in recipes if "bench/plan.py" in command]
    page = (REPO / "docs/recipes.md").read_text()
    table = re.findall(r"^\| [\w-]+ \|" + r" (\d+) \|" * 4 + r" ([\d,]+)k tokens", page, re.MULTILINE)
    assert len(trained) == len(planned) == len(table) == 4
    for flags, own, row in zip(planned, trained, table):
        args, gpus, memory = plan.read_arguments(flags)
        recipe = train.parse_args(own[own.index("train.py") + 1 :])
        for field in dataclasses.fields(train.Args):
            value = getattr(args, field.name)
            if field.name not in ("model", "dtype") and value != getattr(train.Args(), field.name):
                assert value == (field.name == "shard" or getattr(recipe, field.name)), field.name
        assert (args.shard, gpus) == (True, 8)  # bfloat16 on CUDA is
        made = plan.make_plan(args, gpus, memory)
        totals = [sum(made.phases[phase].values()) / 2**30 for phase in ("awake", "sync", "update", "step")]
        assert not made.lacks and row == (*(f"{n:.0f}" for n in totals), f"{made.kv_tokens / 1000:,.0f}")


def test_every_example_is_listed_once_by_what_one_wants_to_do():
    page = (REPO / "examples/README.md").read_text()
    rows = [line.split(" | ")[:2] for line in page.splitlines() if line.startswith("|")]
    listed = re.findall(r"`(\w+\.py)`", str(rows))
    files = {file.name for file in (REPO / "examples").glob("*.py")} - {"__init__.py", "chat.py", "smollm2.py"}
    assert sorted(listed) == sorted(files), set(listed) ^ files
    assert len(page.splitlines()) <= 60


def test_every_metric_is_documented():
    found = set()
    for file in ("train.py", "flatrl/metrics.py"):
        source = (REPO / file).read_text()
        found |= set(re.findall(r'"([a-z_]+/[a-z_]+)"', source))
    assert "reward/mean" in found and "rollout/logp_diff_max" in found
    documented = set(re.findall(r"`([a-z_]+/\w+)`", (REPO / "docs/log.md").read_text()))
    assert found <= documented, sorted(found - documented)


def test_presets_are_as_documented():
    page = (REPO / "docs/algorithms.md").read_text()
    rows = {row[0]: row[1] for row in re.findall(r"^\| `(\w+)` \| (.*) \| \[\d+\.\d+\]", page, re.MULTILINE)}
    assert set(rows) >= set(OUR_PRESETS)
    for name, sets in rows.items():
        flags = " ".join(re.findall(r"`(--[^`]*)`", sets.partition("The paper's own")[0]))
        assert flags, name
        said, preset = train.parse_args(flags.split()), train.Args(algo=name)
        for field in train.PRESETS["grpo"]:
            assert getattr(said, field) == getattr(preset, field), (name, field)
    assert all(f"`{name}`" in (REPO / "README.md").read_text() for name in OUR_PRESETS)


WALK = (REPO / "docs/walk.md").read_text()


def test_the_walk_names_functions_that_there_are():
    modules = [importlib.import_module(name) for name in ("agent_loop", "data", "losses", "rollout", "train")]
    modules += [importlib.import_module(f"flatrl.{name}") for name in ("log", "checkpoints")]
    found = 0
    for name in re.findall(r"`([A-Za-z_]+(?:\.[A-Za-z_]+)?)(?:\([^`]*\))?`", WALK):
        head, _, tail = name.partition(".")
        owners = [module for module in modules if module.__name__ == head]
        owners = owners or [getattr(module, head) for module in modules if tail and hasattr(module, head)]
        if owners:
            assert any(hasattr(owner, tail) for owner in owners), name
            found += 1
        elif "_" in name and name not in ("response_ids", "response_versions", "zero_std_groups"):
            assert any(hasattr(module, name) for module in modules), name
            found += 1
    assert found > 25


def test_the_walks_numbers_follow_from_one_another():
    rewards = torch.tensor([1.0, 0, 1, 1, 0, 1, 1, 1])
    assert "1, 0, 1, 1, 0, 1, 1, 1" in " ".join(WALK.split())
    advantages = losses.grpo_advantages(rewards, torch.zeros(8, dtype=torch.long)).tolist()
    assert f"=  {advantages[0]:.3f}" in WALK and f"= {advantages[1]:.3f}" in WALK
    assert f"exp(-0.434) = {math.exp(-0.434):.2f}" in WALK
