"""Tests that run in .venv-harbor, where Harbor is: in one subprocess, with a verdict for each of them.

Harbor takes seconds to import and needs Python 3.12, so it has no place in the process of the other tests. A file in
there is an ordinary one, `test_*` functions and all, whose name does not begin with test_.
"""

from __future__ import annotations

import ast
import os
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sandbox.require import HARBOR_PYTHON, require

REPO = Path(__file__).resolve().parent.parent
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "0", "PYTHONWARNINGS": "ignore"}
"""Harbor and its litellm would ask the network on every start."""


@dataclass(frozen=True)
class Case:
    """One test of the other side, with its parameters. outcome: passed, skipped, failed or error; said: why."""

    name: str
    outcome: str
    said: str


def names_in(path: Path) -> list[str]:
    """The names of a file's tests, read without running it."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, functions)]
    return [name for name in names if name.startswith("test_")]


def run_there(
    paths: Sequence[Path], report: Path, arguments: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> list[Case]:
    """Run the tests of some files in .venv-harbor; report: where pytest writes its XML. Without that environment it
    skips, or fails where RSI_REQUIRE names harbor."""
    require("harbor")
    command = [str(HARBOR_PYTHON), "-m", "pytest", "-p", "no:cacheprovider", "-q", f"--junitxml={report}", *arguments]
    done = subprocess.run(
        [*command, *map(str, paths)],
        cwd=REPO,
        env={**os.environ, **QUIET, **(env or {})},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    if not report.exists():
        pytest.fail(f"pytest in .venv-harbor ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return [_case(element) for element in ElementTree.parse(report).iter("testcase")]


def _case(element: ElementTree.Element) -> Case:
    for outcome in ("failure", "error", "skipped"):
        found = element.find(outcome)
        if found is not None:
            return Case(element.get("name", ""), outcome, f"{found.get('message', '')}\n{found.text or ''}")
    return Case(element.get("name", ""), "passed", "")


def check(cases: Sequence[Case], name: str) -> None:
    """Every case of one test passed, and there is one; what was skipped there is skipped here."""
    mine = [case for case in cases if case.name.partition("[")[0] == name]
    assert mine, f"{name} was not run in .venv-harbor"
    for case in mine:
        assert case.outcome in ("passed", "skipped"), f"{case.name}: {case.outcome}\n{case.said}"
    if all(case.outcome == "skipped" for case in mine):
        pytest.skip(mine[0].said)
