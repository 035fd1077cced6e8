#!/usr/bin/env bash
# Makes .venv-harbor beside setup.py: Harbor itself with its 120 packages, and rsi without torch. Does nothing where that
# is done. For the `harbor` sandbox backend, for `harbor run --env rsi.sandbox.harbor:NamespaceEnvironment`, and for the
# tests that hold our files against Harbor's own readers.
# PYTHON312   a Python 3.12 (default: the first of python3.12, python3 and pyenv's that is one)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '%s\n' "$*" >&2; }

find_python() {
    local candidate
    for candidate in ${PYTHON312:+"$PYTHON312"} python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12; do
        # Run it: a version manager leaves names on PATH that only print an error.
        if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
        if [ -n "${PYTHON312:-}" ]; then break; fi
    done
    say "Harbor needs Python 3.12 with venv, and none was found${PYTHON312:+ at PYTHON312=$PYTHON312}."
    say "Install one (Ubuntu 24.04: apt install python3.12 python3.12-venv; elsewhere: pyenv install 3.12, or uv python"
    say "install 3.12), or set PYTHON312 to its path."
    return 1
}

folder=$(pwd -P)
stamp=$(cat scripts/locks/harbor.txt setup.py - <<<"$folder" | sha256sum | cut -d ' ' -f 1)
if [ "$(cat .venv-harbor/.stamp 2>/dev/null)" = "$stamp" ] && .venv-harbor/bin/python -c '' 2>/dev/null; then exit; fi

python=$(find_python)
say "making .venv-harbor with $("$python" --version) (a minute or two and 500 MB)"
"$python" -m venv --clear .venv-harbor
pip_install() { .venv-harbor/bin/python -m pip --disable-pip-version-check install -q "$@"; }
pip_install -r scripts/locks/harbor.txt
pip_install --no-deps --no-build-isolation --use-pep517 --editable .
printf '%s\n' "$stamp" >.venv-harbor/.stamp
