"""Every shipped configuration compiles for sm_90 without a spill, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN_S = 1800


def run(repo: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """As a process of its own: the interpreter is on in this one, and a compiler fault may abort."""
    command = [sys.executable, str(repo / "scripts" / "kernels_aot.py"), "--json", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, env=os.environ | env)


@pytest.fixture(scope="module")
def report(repo: Path) -> dict[str, Any]:
    done = run(repo)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_all_shipped_configurations_compile_and_none_spills(report: dict[str, Any]):
    assert report["aot_configs"] == len(report["configs"]) >= 50
    assert report["aot_spills"] == 0 and report["faults"] == {}
    assert all(0 < usage["registers"] < 255 and usage["stack"] == 0 for usage in report["configs"])


def test_every_triton_kernel_is_among_them(report: dict[str, Any], repo: Path):
    """A kernel that no case compiles would ship unchecked: kernels are counted in the source."""
    from rsi_kernels import aot

    compiled = {case.kernel.__name__ for case in aot.shipped()}
    written = {
        line.split("(")[0].removeprefix("def ")
        for module in aot.MODULES
        for line in (repo / "kernels" / f"{module}.py").read_text().splitlines()
        if line.startswith("def ") and line.split("(")[0].endswith("_kernel")
    }
    assert compiled == written
    assert {f"{m}.py" for m in aot.MODULES} == {path.name for path in (repo / "kernels").glob("*_triton.py")}


def test_row_kernels_read_whole_vectors(report: dict[str, Any]):
    rows = [usage for usage in report["configs"] if usage["name"].startswith(("loss", "statistics", "dlogits"))]
    assert len(rows) == 18 and all(usage["vector_loads"] for usage in rows)


def test_a_kernel_that_spills_fails_the_run(tmp_path: Path):
    """16 rows of 1,024 numbers held at once by one warp: 512 registers a thread, of which 255 exist."""
    source = """
import os
os.environ.pop("TRITON_INTERPRET", None)
import triton
import triton.language as tl
from rsi_kernels.aot import Case, compile_case

@triton.jit
def sorting_kernel(X, Y):
    o = tl.arange(0, 16)[:, None] * 1024 + tl.arange(0, 1024)[None, :]
    x = tl.load(X + o)
    tl.store(Y + o, x / tl.sum(x, 1)[:, None])

usage = compile_case(Case("hog", sorting_kernel, {"X": "*fp32", "Y": "*fp32"}, {}, ("X", "Y"), {"num_warps": 1}))
print(usage.spills, usage.stack, *usage.faults)
"""
    script = tmp_path / "hog.py"
    script.write_text(source)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=RUN_S)
    spills, stack, *faults = done.stdout.split()
    assert int(spills) > 0 and int(stack) > 0 and faults == ["spills"], done.stderr
