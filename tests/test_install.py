"""install.sh with a pip that only writes down its calls."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import REPO

TORCH = re.search("torch==.*", (REPO / "requirements-cpu.txt").read_text())[0]
INDEX = "https://download.pytorch.org/whl/cpu"

# The environment's python, whose pip fails where a call contains $FAIL.
PYTHON = f"""#!/bin/sh
[ "$1 $2" = "-m pip" ] || exec "{sys.executable}" "$@"
shift 2
echo "$*" >>"$CALLS"
case "$*" in
    *" -r "*)
        echo "Collecting six"
        echo "WARNING: Location is ignored"
        echo "   ━━━━ 6.1/6.1 MB 48.4 MB/s"
        echo "[notice] a new release"
        /bin/sleep "${{SLOW:-0}}" ;;
esac
case "$*" in
    *"${{FAIL:-nothing fails}}"*) echo "WARNING: tried"; echo "ERROR: No $*"; exit 1 ;;
esac
"""
# The machine's python3, which makes an environment with the python above.
PYTHON3 = f"""#!/bin/sh
[ "$1 $2 $3" = "-m venv --clear" ] || exec "{sys.executable}" "$@"
"{sys.executable}" -m venv --without-pip --clear "$4" && rm "$4/bin/python" || exit 1
cp "$(dirname "$0")/env-python" "$4/bin/python"
"""
CPU = [
    f"install --no-compile --no-deps {TORCH}",
    "uninstall -y vllm",
    "install --no-compile -r requirements-cpu.txt",
    "uninstall -y torchvision torchaudio torchcodec",
]
PHASES = [
    f"install.sh: installing {TORCH}",
    "install.sh: installing vLLM and the rest: requirements-cpu.txt",
    "install.sh: compiling",
]
CPU_TEST = [call.replace("-cpu.txt", "-cpu.txt -r requirements-test.txt") for call in CPU]


class Machine:
    """A clone (its path has a space), a PATH with our programs first, no active environment."""

    def __init__(self, tmp):
        self.clone = tmp / "a clone"
        self.venv = self.clone / ".venv"
        self.calls_file = tmp / "calls"
        self.clone.mkdir()
        for file in (REPO / "install.sh", *REPO.glob("requirements*.txt")):
            shutil.copy(file, self.clone)
        self.bin = tmp / "bin"
        programs = {"env-python": PYTHON, "python3": PYTHON3, "nvidia-smi": "#!/bin/sh\nexit 9\n"}
        programs["sleep"] = "#!/bin/sh\nexec /bin/sleep 0.1\n"
        for name, text in programs.items():
            self.program(self.bin / name, text)
        self.env = {"PATH": f"{self.bin}:{os.environ['PATH']}", "CALLS": str(self.calls_file)}

    def program(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(self, command, shell="bash --norc -c", **env):
        """Runs a command in the clone's parent: exit code, lines of stdout, stderr."""
        env = self.env | env
        command = [*shell.split(), command]
        done = subprocess.run(
            command, cwd=self.clone.parent, env=env, text=True, capture_output=True
        )
        return done.returncode, done.stdout.splitlines(), done.stderr

    def calls(self):
        """The calls of pip since the last look."""
        text = self.calls_file.read_text() if self.calls_file.exists() else ""
        self.calls_file.write_text("")
        for noise in (" --no-input --disable-pip-version-check", f"{self.clone}/"):
            text = text.replace(noise, "")
        return [line for line in text.splitlines() if line != "--version"]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


SOURCE = "source 'a clone/install.sh'"


@pytest.mark.parametrize("shell, options", [("bash --norc -c", "set +o"), ("zsh -fc", "setopt")])
def test_sourced_it_makes_fills_and_activates_an_environment(machine, shell, options):
    """... and changes nothing else in the shell; a second time it does nothing."""
    if not shutil.which(shell.split()[0]):
        pytest.skip("no such shell")
    command = f"""before=$({options}); set -u; {SOURCE} test; echo "$? $VIRTUAL_ENV"; set +u
        [ "$before" = "$({options})" ] && echo same options
        typeset -f | grep -c flatrl"""
    _, printed, errors = machine.run(command, shell)
    assert errors == "" and printed[-3:] == [f"0 {machine.venv}", "same options", "0"]
    assert machine.calls() == CPU_TEST

    for again in (f"{SOURCE} test", SOURCE, "bash 'a clone/install.sh'"):
        assert machine.run(again, shell)[0] == 0 and machine.calls() == []
    with (machine.clone / "requirements-cpu.txt").open("a") as file:
        file.write("six\n")
    _, printed, _ = machine.run("bash 'a clone/install.sh'")
    assert printed[-1] == f"install.sh: now: source {machine.venv}/bin/activate"
    assert machine.calls() == CPU


@pytest.mark.parametrize("driver, said", [
    ("580.65", ""),
    ("570.86", "the NVIDIA driver is 570.86, CUDA 13 needs 580 or later: update it"),
])  # fmt: skip
def test_a_host_with_a_gpu_is_checked_first(machine, tmp_path, driver, said):
    gpu = f"#!/bin/sh\n[ $1 = -L ] && echo 'GPU 0: NVIDIA H200' || echo {driver}\n"
    machine.program(machine.bin / "nvidia-smi", gpu)
    machine.program(machine.bin / "gcc", "#!/bin/sh\n")
    (tmp_path / "Python.h").touch()
    asked = f'case "$2" in *sysconfig*) echo "{tmp_path}"; exit 0 ;; esac\n'
    machine.program(machine.bin / "env-python", PYTHON.replace("[ ", asked + "[ ", 1))
    code, _, errors = machine.run("bash 'a clone/install.sh'")
    assert code == bool(said) and said in errors
    calls = [call for call in machine.calls() if call.startswith("install")]
    assert calls == ([] if said else ["install --no-compile -r requirements.txt"])


def test_torch_comes_from_the_cpu_index_where_pip_has_none(machine):
    """... and a slow pip is quoted meanwhile, under the name of the phase."""
    code, printed, errors = machine.run(SOURCE, FAIL=f"--no-deps {TORCH}", SLOW="0.5")
    assert code == 0 and errors == ""
    assert any(re.fullmatch("install.sh: [01] s: Collecting six", line) for line in printed)
    assert not any(re.search("WARNING|━|notice", line) for line in printed)
    assert [line for line in printed if line in PHASES] == PHASES
    index = f"install --no-compile --no-deps --index-url {INDEX} --retries 1 --timeout 30 {TORCH}"
    assert machine.calls() == [CPU[0], index, *CPU[1:]]


def test_a_failure_is_one_line_and_the_next_try_completes_it(machine):
    command = f"set -e; {SOURCE} && echo fine || echo status $?; echo ${{VIRTUAL_ENV-none}}"
    _, printed, errors = machine.run(command, FAIL=CPU[2].split()[-1])
    assert printed[-2:] == ["status 1", "none"]  # the shell lives on
    (line,) = errors.splitlines()
    assert line.startswith("install.sh: pip failed: ERROR: No ")
    machine.calls()
    assert machine.run(command)[1][-2:] == ["fine", str(machine.venv)]
    assert machine.calls() == CPU


@pytest.mark.parametrize("active", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_the_active_environment_is_used(machine, tmp_path, active):
    machine.program(tmp_path / "mine/bin/python", PYTHON)
    env = {active: str(tmp_path / "mine")}
    assert machine.run(SOURCE, CONDA_DEFAULT_ENV="mine", **env)[0] == 0
    assert machine.calls() == CPU and not machine.venv.exists()


def test_a_python_that_is_too_new_is_named(machine):
    old = '#!/bin/sh\n[ "$1" = -V ] && echo Python 3.13.0 && exit 0\nexit 1\n'
    for name in ("python3", "python3.12", "python3.11", "python"):
        machine.program(machine.bin / name, old)
    said = "install.sh: needs Python 3.11 or 3.12; python3 is Python 3.13.0\n"
    assert machine.run(SOURCE)[2] == said
