#!/usr/bin/env bash
# source install.sh         installs what train.py needs: into the active environment, else into
#                           .venv here, which it makes and activates
# source install.sh test    also installs what the tests need
#
# Where nvidia-smi lists a GPU it installs requirements.txt, elsewhere requirements-cpu.txt.
# Needs Python 3.11 or 3.12. Works in bash and zsh.

if (return 0 2>/dev/null); then  # sourced: a bash of its own does the work
    bash "${BASH_SOURCE[0]:-$0}" "$@" || return
    if [ -z "${VIRTUAL_ENV:-}" ] && [ "${CONDA_DEFAULT_ENV:-base}" = base ]; then
        . "$(dirname "${BASH_SOURCE[0]:-$0}")/.venv/bin/activate"
    fi
    return
fi

set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
say() { echo "install.sh: $*"; }
supported() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in [(3, 11), (3, 12)])' 2>/dev/null
}

env=${VIRTUAL_ENV:-}
if [ -z "$env" ] && [ "${CONDA_DEFAULT_ENV:-base}" != base ]; then env=$CONDA_PREFIX; fi
if [ -z "$env" ]; then
    env=$here/.venv
    for base in python3 python3.12 python3.11; do
        if supported "$base"; then break; fi
    done
    [ -x "$env/bin/python" ] || "$base" -m venv "$env"
fi
supported "$env/bin/python" || { say "$env needs Python 3.11 or 3.12" >&2; exit 1; }

requirements=requirements-cpu.txt
if nvidia-smi -L 2>/dev/null | grep -q "GPU "; then requirements=requirements.txt; fi
files=("$here/$requirements")
if [ "${1:-}" = test ]; then files+=("$here/requirements-test.txt"); fi
stamp=$env/.flatrl-install
wanted=$(cat "${files[@]}" "$0" | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then exit 0; fi

say "installing into $env, which takes minutes"
pip() { "$env/bin/python" -m pip --no-input --disable-pip-version-check "$@"; }
if [ "$requirements" = requirements-cpu.txt ]; then
    torch=$(grep '^torch==' "$here/$requirements")
    pip install --no-compile --no-deps "$torch" ||
        pip install --no-compile --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch"
fi
pip install --no-compile "${files[@]/#/-r}"
if [ "$requirements" = requirements-cpu.txt ]; then  # CUDA builds: see there
    pip uninstall -y torchvision torchaudio torchcodec
fi
packages=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$env/bin/python" -m compileall -q -j 0 -x 'site-packages/.*/models/' \
    "$packages"/{torch,vllm,transformers,sympy} &>/dev/null || true  # with all cores, unlike pip
echo "$wanted" >"$stamp"
say "done in $SECONDS s"
