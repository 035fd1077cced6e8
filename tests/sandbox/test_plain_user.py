"""The same promises for a user without privileges, tried by root as uid 1000 in a process of its own.

The running interpreter may lie where that user cannot read, so it runs the copy in the base, which it owns.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pathspec
import pytest
import tomli_w

from rsi.sandbox import Image
from rsi.sandbox.namespace import NamespaceBackend


@pytest.fixture
def home() -> Iterator[Path]:
    """Not pytest's tmp_path: its parents are root's alone."""
    path = Path(tempfile.mkdtemp(prefix="rsi-plain-"))
    yield path
    subprocess.run(["rm", "-rf", path], check=True)


SUITES = [
    pytest.param(("test_namespace.py", "test_shell.py"), id="namespace"),
    pytest.param(("test_conformance.py",), id="conformance", marks=pytest.mark.conformance),
    pytest.param(("test_attacks.py", "test_grading_attacks.py"), id="attacks", marks=pytest.mark.attack),
]


@pytest.mark.parametrize("names", SUITES)
def test_a_plain_user_gets_the_same(
    backend: NamespaceBackend, image: Image, home: Path, repo: Path, names: tuple[str, ...]
) -> None:
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root can become another user, with setpriv")
    base = home / "base"
    subprocess.run(["cp", "-a", backend.base, base], check=True)
    copy = home / "repo"
    for folder in ("rsi/sandbox", "rsi/harbor", "tests/sandbox"):
        shutil.copytree(repo / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("rsi/types.py", ".pytest.ini"):
        shutil.copy(repo / file, copy / file)
    (copy / "rsi" / "__init__.py").write_text("")
    for package in (tomli_w, pathspec):  # the base has pytest and nothing else of ours
        shutil.copytree(package.__path__[0], copy / package.__name__)
    subprocess.run(["chown", "-hR", "1000:1000", home], check=True)
    command = ["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups", f"{base}/usr/local/bin/python3", "-B"]
    result = subprocess.run(
        [*command, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/sandbox/{name}" for name in names)],
        cwd=copy,
        env={
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(home),
            "TMPDIR": str(home),
            "PYTHONPATH": str(copy),
            "LD_LIBRARY_PATH": f"{base}/usr/local/lib",
            "RSI_TEST_ROOTFS": str(base),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
