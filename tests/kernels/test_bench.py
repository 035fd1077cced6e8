"""The benchmark runs, checks that its sides agree, and names what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="takes minutes of a GPU; run it by hand")
def test_the_benchmark_measures_both_sides_on_a_cpu(repo: Path):
    command = [sys.executable, str(repo / "scripts" / "bench_kernels.py"), "--json", "--rounds", "1", "--no-aot"]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([*command, "--head", "256", "32", "8192"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    ratios = ("logprob_memory_ratio", "grpo_time_ratio", "logprob_time_ratio", "experts_fwd_ratio", "experts_bwd_ratio")
    assert all(result[name] > 0 for name in ratios)
    # 8 MiB of logits: the naive side holds them at least twice, a chunk is all of them here
    assert result["head_peak_extra_mib"]["naive"] > 16
    assert result["device"] and result["versions"]["torch"] == torch.__version__
