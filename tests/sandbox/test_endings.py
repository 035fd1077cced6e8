"""Deaths: of a sandbox, of the launcher, of the host process; nothing runs on and nothing lies around."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rsi.sandbox import Image, ImageSpec, SandboxConfig, SandboxError, rootfs
from rsi.sandbox.host import fault, start_time, userns_mend
from rsi.sandbox.namespace import NamespaceBackend

# A host process that makes two sandboxes with a daemon each, says so, and waits to be killed.
HOST = """
import asyncio, sys
from rsi.sandbox import ImageSpec, SandboxConfig
from rsi.sandbox.namespace import NamespaceBackend
async def main():
    backend = NamespaceBackend(SandboxConfig(cache_dir=sys.argv[1]))
    image = await backend.build(ImageSpec())
    for _ in range(2):
        await (await backend.create(image)).exec(f"setsid -f sleep {sys.argv[2]}")
    print(backend.name, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def running(seconds: str) -> int:
    """How many processes of this machine are `sleep <seconds>`."""
    found = 0
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            try:
                with open(f"/proc/{pid}/cmdline") as file:
                    found += file.read() == f"sleep\0{seconds}\0"
            except OSError:
                continue
    return found


def groups_named(name: str) -> list[str]:
    return [folder for folder, _, _ in os.walk("/sys/fs/cgroup") if f"/{name}" in folder]


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"never came true: {what}")


async def test_close_leaves_no_process_group_or_directory(cache: str, has_cgroups: bool) -> None:
    backend = NamespaceBackend(SandboxConfig(cache_dir=cache))
    sandbox = await backend.create(await backend.build(ImageSpec()))
    await sandbox.exec("setsid -f sleep 77001")
    await sandbox.snapshot()
    assert running("77001") == 1 and bool(groups_named(sandbox.name)) == has_cgroups
    await backend.close()
    assert running("77001") == 0 and groups_named(backend.name) == []
    top = os.path.join(tempfile.gettempdir(), f"rsi-sandboxes-{os.geteuid()}")
    assert backend.name not in os.listdir(top)
    assert not os.path.exists(f"{backend.cache}/snapshots/{backend.name}")
    with pytest.raises(SandboxError, match="closed"):
        await backend.create(Image("x", ()))


async def test_a_host_killed_by_sigkill_leaves_nothing_that_the_next_does_not_sweep(cache: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    host = subprocess.Popen([sys.executable, "-c", HOST, cache, "77002"], stdout=subprocess.PIPE, env=environment)
    assert host.stdout
    try:
        name = (await asyncio.to_thread(host.stdout.readline)).decode().strip()
        assert running("77002") == 2
    finally:
        host.kill()
        host.wait()
        host.stdout.close()
    await until(lambda: running("77002") == 0, "the daemons died with their host")
    top = os.path.join(tempfile.gettempdir(), f"rsi-sandboxes-{os.geteuid()}")
    assert name in os.listdir(top)
    for _ in range(50):  # a group is busy until its last task is reaped; every start sweeps
        backend = NamespaceBackend(SandboxConfig(cache_dir=cache))
        await backend.build(ImageSpec())
        await backend.close()
        if not groups_named(name):
            break
    assert groups_named(name) == [] and name not in os.listdir(top)


async def test_a_dead_launcher_is_a_fault_and_the_next_create_starts_another(cache: str) -> None:
    backend = NamespaceBackend(SandboxConfig(cache_dir=cache))
    image = await backend.build(ImageSpec())
    sandbox = await backend.create(image)
    task = asyncio.ensure_future(sandbox.exec("sleep 77003"))
    await until(lambda: running("77003") == 1, "the command runs")
    assert backend.launcher_pid
    os.kill(backend.launcher_pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="dead"):
        await task
    await until(lambda: running("77003") == 0, "it died with the launcher")
    await sandbox.close()
    sandbox = await backend.create(image)
    assert (await sandbox.exec("echo again")).stdout == b"again\n"
    await backend.close()


async def test_a_sandbox_killed_from_outside_raises(backend: NamespaceBackend, image: Image) -> None:
    sandbox = await backend.create(image)
    os.kill(sandbox.outer_pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="dead"):
        await sandbox.exec("sleep 5")
    await sandbox.close()


def test_a_live_host_is_not_swept(backend: NamespaceBackend, image: Image) -> None:
    assert f"-{start_time(os.getpid())}-" in backend.name
    top = os.path.join(tempfile.gettempdir(), f"rsi-sandboxes-{os.geteuid()}")
    with open(f"{top}/{backend.name}/traces.json") as file:
        assert json.load(file)["groups"] == sorted(set(backend.driver.parents.values()))


def test_no_user_namespaces_names_the_setting_and_its_value() -> None:
    settings = {
        "kernel.unprivileged_userns_clone": "0\n",
        "user.max_user_namespaces": "0\n",
        "kernel.apparmor_restrict_unprivileged_userns": "1\n",
    }
    assert userns_mend(settings) == (
        "as root run: sysctl -w kernel.unprivileged_userns_clone=1; sysctl -w user.max_user_namespaces=15000; "
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    )
    assert "seccomp" in userns_mend({"user.max_user_namespaces": "96000"})


def test_a_kernel_without_user_namespaces_says_so(tmp_path: Path) -> None:
    """Real: inside a user namespace of its own the limit can be set to 0 without touching the host's."""
    for name in ("usr", "etc"):
        (tmp_path / "rootfs" / name).mkdir(parents=True)
    code = (
        "import asyncio, sys\n"
        "from rsi.sandbox import Image, SandboxConfig\n"
        "from rsi.sandbox.namespace import NamespaceBackend\n"
        "config = SandboxConfig(cache_dir=sys.argv[1] + '/cache', rootfs=sys.argv[1] + '/rootfs')\n"
        "async def main(): await NamespaceBackend(config).create(Image('x', ()))\n"
        "asyncio.run(main())"
    )
    inner = 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$0" -c "$1" "$2"'
    command = ["unshare", "--user", "--map-root-user", "bash", "-c", inner, sys.executable, code, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "SandboxDied" in result.stderr
    assert "sysctl -w user.max_user_namespaces=15000" in result.stderr


def test_a_full_disk_of_ours_names_the_path() -> None:
    error = fault(OSError(errno.ENOSPC, "No space left on device"), "/var/cache/rsi/layers/x")
    assert (
        str(error)
        == "/var/cache/rsi/layers/x: No space left on device; free some space or move sandbox.cache_dir or TMPDIR"
    )


def test_a_rootfs_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="holds no file system"):
        rootfs.prepare_base(str(tmp_path), f"{tmp_path}/cache", False)
