#!/usr/bin/env bash
# From a clean clone to a running loop: makes .venv, installs the pinned CPU packages, runs the tiny self-play recipe.
#   scripts/quickstart.sh                        the whole run (at most 15 minutes on 2 cores)
#   scripts/quickstart.sh --steps 4              a two-minute taste
#   scripts/quickstart.sh solve.envs_per_step=4  any key of recipes/tiny_cpu.yaml; --help lists them
# Killed or stopped, the same command goes on from the last step.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/venv.sh
# A mistake is told here in one line; torchrun would wrap it in a page.
.venv/bin/rsi config recipes/tiny_cpu.yaml "$@" >/dev/null
exec .venv/bin/torchrun --standalone --nproc-per-node=1 recipes/self_play.py recipes/tiny_cpu.yaml "$@"
