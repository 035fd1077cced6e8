#!/usr/bin/env bash
# Lint, types and tests, as CI runs them. Arguments go to pytest: scripts/test.sh tests/test_pool.py -k lineage
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/check.sh
exec .venv/bin/python -m pytest "$@"
