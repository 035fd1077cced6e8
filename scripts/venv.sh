#!/usr/bin/env bash
# Makes .venv beside setup.py and installs the pinned CPU packages and rsi itself; does nothing where that is done.
#   scripts/venv.sh [dev]      dev adds ruff, pyright and triton
# PYTHON             interpreter to use (default: the first of python3, python3.12, python3.11 that is 3.11 or 3.12)
# TORCH_CPU_INDEX    an index that has CPU wheels of torch, handed to pip as an extra index
# TORCH_CPU_WHEELS   a folder (or page) that has them, handed to pip as find-links
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '%s\n' "$*" >&2; }

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.11; do
        # Run it: a version manager leaves names on PATH that only print an error.
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
        if [ -n "${PYTHON:-}" ]; then break; fi
    done
    say "rsi needs Python 3.11 or 3.12 and found neither${PYTHON:+ in PYTHON=$PYTHON}."
    say "Install one (Debian 12: apt install python3.11 python3-venv; Ubuntu 22.04: apt install python3.11 python3.11-venv;"
    say "Ubuntu 24.04: apt install python3.12 python3.12-venv), or set PYTHON to its path."
    return 1
}

make_venv() {
    local python
    python=$(find_python)
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        say "$("$python" --version) cannot make virtual environments: apt install python3-venv (or python3.X-venv of its version)."
        return 1
    fi
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
}

torch_source=()
if [ -n "${TORCH_CPU_INDEX:-}" ]; then torch_source+=(--extra-index-url "$TORCH_CPU_INDEX"); fi
if [ -n "${TORCH_CPU_WHEELS:-}" ]; then torch_source+=(--find-links "$TORCH_CPU_WHEELS"); fi

pip_install() { .venv/bin/python -m pip --disable-pip-version-check install -q "$@"; }
digest() { cat "$@" | sha256sum | cut -d ' ' -f 1; }
fresh() { [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }

# The folder is part of the stamp because an editable install and the scripts in .venv/bin hold absolute paths.
folder=$(pwd -P)
cpu_digest=$(digest scripts/locks/cpu.txt setup.py - <<<"$folder")
dev_digest=$(digest scripts/locks/dev.txt - <<<"$cpu_digest")

if ! fresh .venv/.folder "$folder" || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    make_venv
    printf '%s\n' "$folder" >.venv/.folder
fi
if ! fresh .venv/.cpu "$cpu_digest"; then
    rm -f .venv/.cpu .venv/.dev
    say "installing the pinned packages (about a minute and 1.5 GB)"
    pip_install ${torch_source[@]+"${torch_source[@]}"} -r scripts/locks/cpu.txt
    pip_install --no-deps --no-build-isolation --use-pep517 --editable .
    if ! .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
        say "note: pip took the CUDA build of torch. It runs on a CPU too, but is 3 GB larger than it need be. For the CPU wheel"
        say "remove .venv, set TORCH_CPU_INDEX (an index that has it) or TORCH_CPU_WHEELS (a folder), and run this again."
    fi
    printf '%s\n' "$cpu_digest" >.venv/.cpu
fi
if [ "${1:-}" = dev ] && ! fresh .venv/.dev "$dev_digest"; then
    say "installing ruff, pyright and triton (700 MB)"
    pip_install -r scripts/locks/dev.txt
    printf '%s\n' "$dev_digest" >.venv/.dev
fi
