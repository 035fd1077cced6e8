#!/usr/bin/env bash
# Lint and types, without the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/venv.sh dev
.venv/bin/ruff check .
.venv/bin/pyright --project .pyrightconfig.json
