"""Runs a module's `main(rank, *arguments)` in gloo processes started by torchrun, one thread each.

Each test module that needs ranks has its own small driver; `drive` gives back what rank 0 wrote as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def torchrun(world: int, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, str(script), *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )


def drive(world: int, script: Path, out: Path, *arguments: str) -> Any:
    """`script out arguments...` under torchrun; what it wrote to `out` as JSON."""
    done = torchrun(world, script, str(out), *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())
