from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from rsi.sandbox import Image, ImageSpec, SandboxConfig, SandboxError, rootfs
from rsi.sandbox.namespace import NamespaceBackend, NamespaceSandbox

TABLE = (
    "bash\tbash\tii \tlibc6 (>= 2.36), libtinfo6\tbase-files (>= 2.1) | other-files\t\n"
    "base-files\tbase-files\tii \tawk\t\tbase\n"
    "mawk\tmawk\tii \tlibc6\t\tawk\n"
    "libc6\tlibc6:amd64\tii \t\tlibgcc-s1:any\t\n"
    "libtinfo6\tlibtinfo6:amd64\tii \t\t\t\n"
    "gone\tgone\trc \t\t\t\n"
    "vim\tvim\tii \tlibc6\t\t\n"
)


def test_closure_follows_alternatives_and_provides_and_skips_what_is_not_installed() -> None:
    assert rootfs.closure(["bash", "gone", "never"], TABLE) == [
        "base-files",
        "bash",
        "libc6:amd64",
        "libtinfo6:amd64",
        "mawk",
    ]


async def test_passwd_hosts_and_etc_are_fresh(box: NamespaceSandbox) -> None:
    result = await box.exec(
        "getent passwd root; getent hosts localhost | wc -l; cat /etc/hostname /etc/resolv.conf; ls /etc"
    )
    lines = result.stdout.decode().splitlines()
    assert lines[:3] == ["root:x:0:0:root:/root:/bin/bash", "1", "sandbox"]
    assert not {"bash.bashrc", "environment", "machine-id", "ssh", "ssl"} & set(lines)


async def test_everything_belongs_to_root_inside(box: NamespaceSandbox) -> None:
    owned_by_none = await box.exec("find / -xdev \\( -uid 65534 -o -gid 65534 \\) ! -path /proc | head -3")
    assert owned_by_none.stdout == b""


async def test_a_base_from_commands_and_ldd_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without dpkg: found by hiding it from the search path."""
    real = shutil.which
    monkeypatch.setattr(rootfs.shutil, "which", lambda name: None if name == "dpkg-query" else real(name))
    backend = NamespaceBackend(SandboxConfig(cache_dir=str(tmp_path)))
    sandbox = await backend.create(await backend.build(ImageSpec()))
    result = await sandbox.exec(
        "echo b a | tr ' ' '\\n' | sort | sed s/a/A/ | awk '{print NR $1}'; python3 -c 'print(1)'"
    )
    await backend.close()
    assert result.stdout == b"1A\n2b\n1\n"


async def test_a_host_without_the_commands_asks_for_a_rootfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rootfs.shutil, "which", lambda name: None)
    with pytest.raises(SandboxError, match=r"awk.*sandbox\.rootfs"):
        rootfs.prepare_base("", str(tmp_path), False)
    assert not any(name.startswith("host-") for name in os.listdir(tmp_path / "bases"))


async def test_a_given_rootfs_is_used(backend: NamespaceBackend, image: Image, tmp_path: Path) -> None:
    given = tmp_path / "rootfs"
    most = shutil.ignore_patterns("local", "share", "file", "perl*", "python*")  # enough for bash and coreutils
    await asyncio.to_thread(shutil.copytree, backend.base, given, symlinks=True, ignore=most)
    (given / "etc" / "marker").write_text("given\n")
    other = NamespaceBackend(SandboxConfig(cache_dir=str(tmp_path / "cache"), rootfs=str(given)))
    sandbox = await other.create(await other.build(ImageSpec()))
    result = await sandbox.exec("cat /etc/marker; stat -c %u /etc/marker; touch /etc/new && echo writable")
    await other.close()
    assert result.stdout == b"given\n0\nwritable\n"
    assert not (given / "etc" / "new").exists()
