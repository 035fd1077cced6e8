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

import pytest

from rsi.sandbox import Image
from rsi.sandbox.namespace import NamespaceBackend

HERE = Path(__file__).resolve().parent


@pytest.fixture
def home() -> Iterator[Path]:
    """Not pytest's tmp_path: its parents are root's alone."""
    path = Path(tempfile.mkdtemp(prefix="rsi-plain-"))
    yield path
    subprocess.run(["rm", "-rf", path], check=True)


def test_a_plain_user_gets_the_same_promises(backend: NamespaceBackend, image: Image, home: Path) -> None:
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root can become another user, with setpriv")
    base = home / "base"
    subprocess.run(["cp", "-a", backend.base, base], check=True)
    repo = home / "repo"
    shutil.copytree(HERE.parent.parent / "rsi" / "sandbox", repo / "rsi" / "sandbox")
    shutil.copytree(HERE, repo / "tests" / "sandbox")
    (repo / "rsi" / "__init__.py").write_text("")
    subprocess.run(["chown", "-hR", "1000:1000", home], check=True)
    names = ("test_namespace.py", "test_isolation.py", "test_shell.py")
    command = ["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups", f"{base}/usr/local/bin/python3", "-B"]
    result = subprocess.run(
        [*command, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/sandbox/{name}" for name in names)],
        cwd=repo,
        env={
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(home),
            "TMPDIR": str(home),
            "PYTHONPATH": str(repo),
            "LD_LIBRARY_PATH": f"{base}/usr/local/lib",
            "RSI_TEST_ROOTFS": str(base),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
