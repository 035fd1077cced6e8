"""What a sandbox must withstand. Each attack says what it saw, so one whose tool is missing does not pass by that."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace

import pytest

from rsi.sandbox import Entry, Image, ImageSpec, Limits, SandboxError
from rsi.sandbox.namespace import ENFORCEABLE, NamespaceBackend, NamespaceSandbox

from .conftest import SECRET


async def test_files_of_the_host_are_out_of_reach(box: NamespaceSandbox, cache: str) -> None:
    for path in (cache, os.path.dirname(os.path.abspath(__file__)), "/etc/machine-id", "/proc/1/root/etc"):
        listed = await box.exec(["ls", path])
        assert listed.exit_code == 2 and (b"No such file" in listed.stderr or b"denied" in listed.stderr), path
    assert (await box.exec("ls -A /tmp /sys /home")).stdout == b"/home:\n\n/sys:\n\n/tmp:\n"


async def test_the_hosts_environment_and_its_supervisor_are_unreadable(box: NamespaceSandbox) -> None:
    assert os.environ["RSI_TEST_API_KEY"] == SECRET
    result = await box.exec(
        "env; cat /proc/self/environ; for f in environ maps mem; do cat /proc/1/$f; done;"
        "ls /proc/1/fd /proc/1/cwd/ /proc/1/root/; tr '\\0' ' ' </proc/1/cmdline"
    )
    assert SECRET.encode() not in result.stdout + result.stderr
    assert result.stderr.count(b"Permission denied") == 6
    assert result.stdout.strip().endswith(b"sandbox")


async def test_only_its_own_processes_and_descriptors_are_seen(box: NamespaceSandbox) -> None:
    seen = (await box.exec("ps -eo comm --no-headers")).stdout.split()
    assert b"ps" in seen and len(seen) <= 3, "PID 1, bash and ps"
    assert (await box.exec(["ls", "/proc/self/fd"])).stdout.split() == [b"0", b"1", b"2", b"3"]  # 3 is ls reading


async def test_a_server_of_the_host_is_out_of_reach(
    box: NamespaceSandbox, image: Image, backend: NamespaceBackend
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0rsi-test-{os.getpid()}")
        abstract.listen()
        connect = f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]} && echo reached"
        code = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0rsi-test-{os.getpid()}'); print('reached')"
        refused = await box.exec(connect)
        assert b"refused" in refused.stderr and b"reached" not in refused.stdout
        refused = await box.exec(["python3", "-c", code])
        assert b"refused" in refused.stderr and b"reached" not in refused.stdout
        assert (await box.exec("tail -n +3 /proc/net/dev | cut -d: -f1")).stdout.split() == [b"lo"]
        # The same connection is there for those that get the host's network.
        connected = await backend.create(image, network="host")
        assert (await connected.exec(connect)).stdout == b"reached\n"
        await connected.close()


async def test_its_own_loopback_works(box: NamespaceSandbox) -> None:
    code = "import socket as s; a = s.create_server(('127.0.0.1', 0)); s.create_connection(a.getsockname()); print(1)"
    assert (await box.exec(["python3", "-c", code])).stdout == b"1\n"


async def test_a_fork_bomb_leaves_the_next_command_room(box: NamespaceSandbox) -> None:
    for tail in ("while :; do :; done", "exec sleep 0.3"):
        await box.exec(":(){ :|:& };:; " + tail, timeout_s=1.5)
        await asyncio.sleep(0.1)
        count = await box.exec("ls -d /proc/[0-9]* | wc -l", timeout_s=10)
        assert count.exit_code == 0 and int(count.stdout) < 40, tail


async def test_pids_are_limited(backend: NamespaceBackend, image: Image) -> None:
    sandbox = await backend.create(image, Limits(pids=20))
    assert 10 <= await sandbox.count_forks(100) <= 20
    await sandbox.close()


async def test_a_memory_bomb_dies_alone(backend: NamespaceBackend, image: Image, has_cgroups: bool) -> None:
    sandbox = await backend.create(image, Limits(memory_mb=64, disk_mb=8))
    result = await sandbox.exec(["python3", "-c", "a = bytearray(10**9)"])
    assert result.exit_code == 137 and result.oom if has_cgroups else b"MemoryError" in result.stderr
    after = await sandbox.exec("echo ok")
    assert (after.stdout, after.oom) == (b"ok\n", False)
    await sandbox.close()


async def test_a_full_disk_is_enospc_for_the_command(backend: NamespaceBackend, image: Image) -> None:
    sandbox = await backend.create(image, Limits(disk_mb=4, inodes=300))
    for command in ("head -c 10M /dev/zero >/big", "fallocate -l 1G /big", "head -c 100M /dev/zero >/dev/shm/big"):
        assert b"No space left" in (await sandbox.exec(command + "; rm -f /big /dev/shm/big")).stderr, command
    filled = await sandbox.exec("mkdir /i && for ((i = 0; i < 400; i++)); do : >/i/$i || exit; done")
    assert b"No space left" in filled.stderr
    with pytest.raises(SandboxError, match="No space left"):
        await sandbox.put("/more", {"x": b"x"})
    assert (await sandbox.exec("echo ok")).stdout == b"ok\n"
    await sandbox.close()


async def test_cpu_is_throttled_where_cgroups_do_it(backend: NamespaceBackend, image: Image, has_cgroups: bool) -> None:
    sandbox = await backend.create(image, Limits(cpus=0.25))
    assert sandbox.read_cpu_quota().split()[:1] == (["25000"] if has_cgroups else [])
    await sandbox.close()


async def test_killing_pid_1_has_no_effect(box: NamespaceSandbox) -> None:
    assert (await box.exec("kill -9 1; kill -TERM 1; kill -STOP 1; echo lives")).stdout == b"lives\n"
    await box.exec("kill -9 -1")
    assert (await box.exec("echo lives")).stdout == b"lives\n"


@pytest.mark.parametrize(
    "attempt",
    [
        "mount -t tmpfs x /mnt",
        "umount /proc",
        "mount -o remount,rw /proc/sys",
        "unshare -U true",
        "unshare -m true",
        "unshare -n true",
        "nsenter -t 1 -m true",
        "mknod /tmp/b b 254 0",
        "date -s 2020-01-01",
        "hostname evil",
        "dmesg",
        "echo x >/proc/sys/kernel/core_pattern",
        "echo 1 >/proc/sys/vm/drop_caches",
        "echo h >/proc/sysrq-trigger",  # help: another letter might take down a host that let it through
        "echo -500 >/proc/self/oom_score_adj",
    ],
)
async def test_it_is_refused(box: NamespaceSandbox, attempt: str) -> None:
    tool = attempt.split()[0]
    result = await box.exec(f"command -v {tool} >/dev/null || exit 99; {attempt}")
    assert result.exit_code not in (0, 99)
    refusals = (
        b"not permitted",
        b"ermission denied",
        b"Read-only",
        b"must be superuser",
        b"must be root",
        b"sysrq-trigger: No such",
    )
    assert any(words in result.stderr for words in refusals), result.stderr


async def test_core_pattern_of_the_host_is_as_before(box: NamespaceSandbox) -> None:
    with open("/proc/sys/kernel/core_pattern") as file:
        before = file.read()
    await box.exec("echo '|/tmp/evil' >/proc/sys/kernel/core_pattern")
    with open("/proc/sys/kernel/core_pattern") as file:
        assert file.read() == before


async def test_system_calls_that_make_namespaces_are_denied(box: NamespaceSandbox) -> None:
    code = (
        "import ctypes; l = ctypes.CDLL(None, use_errno=True)\n"
        "for call in ((435, 0, 0), (272, 0x10000000), (56, 0x10000011, 0, 0, 0, 0), (425, 1, 0)):\n"
        "    print(l.syscall(*call), ctypes.get_errno())\n"
        "print(l.ptrace(16, 1, 0, 0), ctypes.get_errno())\n"
        "print(open('/proc/self/status').read().split('NoNewPrivs:')[1].split()[0])"
    )
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers are of x86_64")
    # clone3: ENOSYS, so that libc falls back; unshare, clone, io_uring_setup and ptrace of PID 1: EPERM
    assert (await box.exec(["python3", "-c", code])).stdout.split(b"\n")[:-1] == [
        b"-1 38",
        b"-1 1",
        b"-1 1",
        b"-1 1",
        b"-1 1",
        b"1",
    ]


async def test_a_setuid_file_gives_nothing(box: NamespaceSandbox, backend: NamespaceBackend) -> None:
    if not backend.privileged:
        pytest.skip("a plain user's sandbox has one id")
    result = await box.exec(
        "cp /bin/bash /tmp/sb; chmod 4755 /tmp/sb; setpriv --reuid 1000 --clear-groups /tmp/sb -p -c 'id -u'"
    )
    assert result.stdout == b"1000\n"


async def test_root_inside_is_nobody_of_the_host(box: NamespaceSandbox, backend: NamespaceBackend) -> None:
    outside = (await box.exec("cat /proc/self/uid_map")).stdout.split()[1]
    assert outside == (b"1000000" if backend.privileged else b"%d" % os.geteuid())


async def test_get_gives_links_and_never_what_they_lead_to(box: NamespaceSandbox) -> None:
    await box.exec(
        "ln -s /etc/shadow a; ln -s ../../../../../../etc/shadow b; ln -s /etc c; mkdir d; ln -s /etc/passwd d/e"
    )
    got = await box.get("/app")
    assert {path: entry.target for path, entry in got.items() if entry.kind == "link"} == {
        "a": "/etc/shadow",
        "b": "../../../../../../etc/shadow",
        "c": "/etc",
        "d/e": "/etc/passwd",
    }
    assert not any(entry.content for entry in got.values())


async def test_put_through_a_linked_directory_stays_inside(box: NamespaceSandbox) -> None:
    await box.exec("ln -s /etc /tests")
    await box.put(
        "/tests", {"planted-by-put": b"1", "sub": Entry("link", 0o777, target="/etc"), "sub/planted-deeper": b"1"}
    )
    assert not os.path.exists("/etc/planted-by-put") and not os.path.exists("/etc/planted-deeper")
    assert (await box.exec("ls /etc/planted-by-put /etc/planted-deeper")).exit_code == 0


async def test_deep_nesting_ends_a_get_in_an_error_and_not_in_a_hang(box: NamespaceSandbox) -> None:
    await box.exec(["python3", "-c", "import os\nfor i in range(3000): os.mkdir('d'); os.chdir('d')"])
    with pytest.raises(SandboxError, match="too long"):
        await box.get("/app")
    assert (await box.exec("echo ok")).stdout == b"ok\n"


async def test_two_sandboxes_do_not_see_each_other(
    box: NamespaceSandbox, backend: NamespaceBackend, image: Image
) -> None:
    other = await backend.create(image)
    await other.exec("echo x >/app/theirs; echo x >/dev/shm/theirs; sleep 500 &")
    assert (await box.exec("ls /app /dev/shm; ps -eo args | grep '[s]leep 500'")).stdout == b"/app:\n\n/dev/shm:\n"
    await other.close()


async def test_probe_tells_what_is_enforced(backend: NamespaceBackend) -> None:
    found = await backend.probe()
    expected = set(ENFORCEABLE) if backend.driver.kind != "none" else {"pids", "disk", "inodes", "network"}
    assert found.enforced == expected and set(found.missing) == set(ENFORCEABLE) - expected


async def test_a_limit_that_does_not_hold_must_be_accepted(backend: NamespaceBackend) -> None:
    strict = NamespaceBackend(replace(backend.config, cgroups=False, accept_missing=("cpu",)))
    with pytest.raises(SandboxError, match="(?s)does not enforce memory: .*accept_missing"):
        await strict.create(await strict.build(ImageSpec()))
    await strict.close()


async def test_root_without_cgroups_still_bounds_forks_and_times_out(backend: NamespaceBackend) -> None:
    bare = NamespaceBackend(replace(backend.config, cgroups=False))
    sandbox = await bare.create(await bare.build(ImageSpec()), Limits(pids=30))
    assert (await sandbox.exec(":(){ :|:& };:; sleep 60", timeout_s=1.0)).timed_out
    assert (await sandbox.exec("ps -e --no-headers | wc -l", timeout_s=10)).stdout == b"4\n"  # PID 1, bash, ps, wc
    await bare.close()
