"""What the namespace backend promises beyond the Protocol: see test_conformance.py for that."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rsi.sandbox import ENFORCEABLE, BuildError, Image, ImageSpec, Limits, SandboxError, Step
from rsi.sandbox.namespace import NamespaceBackend, NamespaceSandbox


async def test_a_cwd_that_is_missing_is_the_root(box: NamespaceSandbox) -> None:
    assert (await box.exec("pwd", cwd="/no/such/place")).stdout == b"/\n"


async def test_timeout_spares_older_jobs_where_cgroups_tell_them_apart(
    box: NamespaceSandbox, has_cgroups: bool
) -> None:
    await box.exec("sleep 301 &")
    assert (await box.exec("sleep 302", timeout_s=0.3)).timed_out
    assert (b"sleep 301" in (await box.exec("ps -eo args")).stdout) == has_cgroups


async def test_memory_that_runs_out_is_told(backend: NamespaceBackend, image: Image, has_cgroups: bool) -> None:
    sandbox = await backend.create(image, Limits(memory_mb=64, disk_mb=8))
    result = await sandbox.exec(["python3", "-c", "a = bytearray(10**9)"])
    assert result.exit_code == 137 and result.oom if has_cgroups else b"MemoryError" in result.stderr
    after = await sandbox.exec("echo ok")
    assert (after.stdout, after.oom) == (b"ok\n", False)
    await sandbox.close()


async def test_probe_tells_what_is_enforced(backend: NamespaceBackend) -> None:
    found = await backend.probe()
    expected = set(ENFORCEABLE) if backend.driver.kind != "none" else {"pids", "disk", "inodes", "network"}
    assert found.enforced == expected and set(found.missing) == set(ENFORCEABLE) - expected


async def test_a_limit_that_does_not_hold_must_be_accepted(backend: NamespaceBackend) -> None:
    strict = NamespaceBackend(replace(backend.config, cgroups=False, accept_missing=("cpu",)))
    with pytest.raises(SandboxError, match="(?s)does not enforce memory: .*accept_missing"):
        await strict.create(await strict.build(ImageSpec()))
    await strict.close()


async def test_run_steps_see_what_came_before_and_are_cached(backend: NamespaceBackend) -> None:
    spec = ImageSpec(
        (
            Step(copy={"/app/n": b"1\n"}),
            Step(run="echo $(($(cat n) + 1)) >n; date +%N >stamp; rm /etc/shells"),
            Step(copy={"/app/late": b"late\n"}),
        )
    )
    stamps = []
    for owner in (backend, other := NamespaceBackend(backend.config)):
        sandbox = await owner.create(await owner.build(spec))
        assert (await sandbox.exec("cat n late; ls /etc/shells")).stdout == b"2\nlate\n"
        stamps.append((await sandbox.exec("cat stamp")).stdout)
        await sandbox.close()
    await other.close()
    assert stamps[0] == stamps[1]


async def test_a_from_is_what_the_config_says(backend: NamespaceBackend, tmp_path: Path) -> None:
    given = tmp_path / "rootfs"
    most = shutil.ignore_patterns("local", "share", "file", "perl*", "python*")  # enough for bash and coreutils
    await asyncio.to_thread(shutil.copytree, backend.base, given, symlinks=True, ignore=most)
    (given / "etc" / "marker").write_text("given\n")
    other = NamespaceBackend(replace(backend.config, bases={"debian:12": str(given), "own:latest": ""}))
    spec = ImageSpec((Step(run="cp /etc/marker /copied"),), base="debian:12")
    sandbox = await other.create(await other.build(spec))
    assert (await sandbox.exec("cat /copied; stat -c %u /etc/marker")).stdout == b"given\n0\n"
    fork = await other.create(await sandbox.snapshot())
    assert (await fork.exec("cat /etc/marker")).stdout == b"given\n"
    own = await other.create(await other.build(ImageSpec(base="own")))
    assert (await own.exec("ls /etc/marker")).exit_code == 2
    with pytest.raises(BuildError, match=r"FROM ubuntu:24.04: no base .* \(debian:12, own:latest, rsi/base\).*bases"):
        await other.build(ImageSpec(base="ubuntu:24.04"))
    await other.close()


async def test_a_base_that_is_no_file_system_names_its_key(backend: NamespaceBackend, tmp_path: Path) -> None:
    other = NamespaceBackend(replace(backend.config, bases={"empty": str(tmp_path)}))
    with pytest.raises(SandboxError, match=r"sandbox\.bases\[empty\]=.* holds no file system"):
        await other.build(ImageSpec(base="empty"))
    await other.close()


async def test_a_user_runs_the_steps_and_commands_that_follow(backend: NamespaceBackend) -> None:
    added = "echo bob:x:1234:1234::/srv/bob:/bin/bash >>/etc/passwd; mkdir /srv/bob"
    added += "; echo 'staff:x:50:bob' >>/etc/group"
    steps = (Step(run=added + "; chown 1234 /srv/bob"), Step(run="id -u >/srv/bob/id; ! touch /root/x", user="bob"))
    if not backend.privileged:
        with pytest.raises(SandboxError, match="USER bob: a plain user's sandbox has one id; run as root"):
            await backend.build(ImageSpec(steps, user="bob"))
        return
    sandbox = await backend.create(await backend.build(ImageSpec(steps, user="bob")))
    seen = await sandbox.exec("cat /srv/bob/id; id -u; id -G; echo $HOME; grep CapEff /proc/self/status")
    assert seen.stdout == b"1234\n1234\n1234 50\n/srv/bob\nCapEff:\t0000000000000000\n"
    await sandbox.put("/root", {"x": b"put and got as root"})
    assert (await sandbox.get("/root/x"))["x"].content == b"put and got as root"
    await sandbox.close()
    for user, complaint in (("eve", "user eve is not in /etc/passwd"), ("bob:eves", "group eves is not in /etc/group")):
        with pytest.raises(BuildError, match=complaint):
            await backend.build(ImageSpec(steps, user=user))


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"limit memory_mb=0 lets nothing run; give more than 0 \(512 is usual\)"):
        Limits(memory_mb=0)
    with pytest.raises(ValueError, match="limit wall_s=-1"):
        Limits(wall_s=-1)


async def test_a_large_copy_becomes_a_layer(backend: NamespaceBackend) -> None:
    image = await backend.build(ImageSpec((Step(copy={"/app/big": b"b" * (2 << 20)}),)))
    assert [os.path.isdir(layer) for layer in image.layers] == [True]
    sandbox = await backend.create(image)
    assert (await sandbox.exec("wc -c <big")).stdout == b"2097152\n"
    await sandbox.close()


async def test_more_sandboxes_than_may_be_alive_wait(backend: NamespaceBackend) -> None:
    backend = NamespaceBackend(replace(backend.config, max_alive=2))
    image = await backend.build(ImageSpec())
    alive = 0
    peak = 0

    async def one() -> None:
        nonlocal alive, peak
        sandbox = await backend.create(image)
        alive += 1
        peak = max(peak, alive)
        await sandbox.exec("sleep 0.05")
        alive -= 1
        await sandbox.close()

    await asyncio.gather(*(one() for _ in range(6)))
    await backend.close()
    assert peak == 2


async def test_descriptors_do_not_leak(backend: NamespaceBackend, image: Image) -> None:
    async def one() -> None:
        sandbox = await backend.create(image)
        await sandbox.exec("sleep 100 & echo x", stdin=b"y")
        await sandbox.put("/app", {"a": b"b"})
        await sandbox.get("/app")
        await sandbox.close()

    await one()
    before = len(os.listdir("/proc/self/fd"))
    await asyncio.gather(*(one() for _ in range(4)))
    assert len(os.listdir("/proc/self/fd")) == before


async def test_the_base_holds_what_tasks_use(box: NamespaceSandbox) -> None:
    tools = "bash awk sed grep find tar gzip diff xargs ps setsid column python3 sort tr"
    missing = await box.exec(f"for t in {tools}; do command -v $t >/dev/null || echo $t; done")
    assert missing.stdout == b""


async def test_python_runs_pytest_inside(box: NamespaceSandbox) -> None:
    await box.put("/tests", {"test_x.py": b"def test_good(): pass\ndef test_bad(): assert 1 == 2\n"})
    result = await box.exec("python3 -B -m pytest -q -p no:cacheprovider /tests/test_x.py", env={"LC_ALL": "C.UTF-8"})
    assert b"1 failed, 1 passed" in result.stdout, result
