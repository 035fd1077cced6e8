"""What every backend withstands, and that each defence is what stops its attack.

Attacks are records in attacks.py. Each is tried against every backend, where it must not succeed; against the namespace
backend with all its layers off, where it must; and, where several layers stop it, with each of them alone.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

from rsi.sandbox import ENFORCEABLE, Backend, Image, Limits, Sandbox, SandboxError, zygote
from rsi.sandbox.namespace import NamespaceBackend, NamespaceSandbox

from .attacks import ATTACKS, BASH, Attack, Site
from .conftest import SECRET

pytestmark = pytest.mark.attack
LAYERS = [(attack, layer) for attack in ATTACKS if len(attack.layers) > 1 for layer in attack.layers]


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    libc = ctypes.CDLL(None)
    key, abstract, marker = os.getpid(), f"rsi-test-{os.getpid()}", f"77{os.getpid()}"
    with (
        tempfile.TemporaryDirectory(prefix="rsi-attack-") as directory,
        socket.create_server(("127.0.0.1", 0), backlog=1024) as server,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        os.chmod(directory, 0o777)
        with open(f"{directory}/secret", "w") as file:
            file.write("secret")
        listener.bind("\0" + abstract)
        listener.listen(1024)
        segment = libc.shmget(key, 4096, 0o1666)
        assert segment >= 0
        sleeper = subprocess.Popen(["sleep", marker])
        yield Site(directory, server.getsockname()[1], abstract, key, marker, SECRET)
        sleeper.kill()
        sleeper.wait()
        libc.shmctl(segment, 0, None)  # IPC_RMID


@pytest.fixture(scope="session")
def weak(runner: asyncio.Runner, backend: NamespaceBackend) -> Iterator[dict[bool, NamespaceBackend]]:
    """Two backends to weaken; the second one's launcher has the trainer's environment."""
    opened = {
        False: NamespaceBackend(backend.config),
        True: NamespaceBackend(backend.config, weaken=frozenset({"environment"})),
    }
    for each in opened.values():
        runner.run(each.probe())  # before anything is off that it would find missing
    yield opened
    for each in opened.values():
        each.weaken = frozenset()
        runner.run(each.close())


def weaken(weak: dict[bool, NamespaceBackend], attack: Attack, kept: str = "") -> NamespaceBackend:
    """A backend without the attack's layers, but for one."""
    off = frozenset(attack.layers) - {kept}
    chosen = weak["environment" in off]
    chosen.weaken = off
    return chosen


async def succeeds(backend: Backend, image: Image, attack: Attack, site: Site, limits: Limits) -> bool:
    """Whether the attack got what it wanted. A sandbox that it killed is a success."""
    sandbox = await backend.create(image, limits)
    try:
        return await succeeds_in(sandbox, attack, site)
    finally:
        await sandbox.close()


async def succeeds_in(sandbox: Sandbox, attack: Attack, site: Site) -> bool:
    try:
        seen = await sandbox.exec(attack.command, timeout_s=attack.timeout_s, env=site.env)
        if attack.then:
            seen = await sandbox.exec(BASH + attack.then, env=site.env)
    except SandboxError:
        return True
    if attack.judge:
        assert seen.stdout == b"ran\n", f"it did not run: {seen}"
        return await attack.judge(sandbox, site)
    words = {b"BREACH", b"HELD"} & set(seen.stdout.split())
    assert words, f"it did not run: {seen}"
    return b"BREACH" in words


async def skip_what_is_not_enforced(backend: Backend, attack: Attack) -> None:
    found = await backend.probe()
    for layer in attack.layers:
        if layer in found.missing:
            pytest.skip(f"{layer} is not enforced here, and probe says so: {found.missing[layer]}")
        assert layer in found.enforced or layer not in ENFORCEABLE


def skip_what_cannot_be(attack: Attack, privileged: bool) -> None:
    if attack.needs_ids and not privileged:
        pytest.skip("a plain user's sandbox has one id")


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_it_is_stopped(
    any_backend: Backend, any_image: Image, backend: NamespaceBackend, site: Site, attack: Attack
) -> None:
    if attack.only_namespace and not isinstance(any_backend, NamespaceBackend):
        pytest.skip(attack.only_namespace)
    skip_what_cannot_be(attack, backend.privileged)
    await skip_what_is_not_enforced(any_backend, attack)
    assert not await succeeds(any_backend, any_image, attack, site, attack.limits)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_it_succeeds_without_its_defence(
    weak: dict[bool, NamespaceBackend], image: Image, site: Site, attack: Attack
) -> None:
    weakened = weaken(weak, attack)
    skip_what_cannot_be(attack, weakened.privileged)
    if attack.off_needs_root and not weakened.privileged:
        pytest.skip("the kernel refuses it to a plain user whatever we do")
    await skip_what_is_not_enforced(weakened, attack)
    assert await succeeds(weakened, image, attack, site, attack.lifted or attack.limits)


@pytest.mark.parametrize(("attack", "layer"), LAYERS, ids=lambda value: getattr(value, "name", value))
async def test_each_layer_stops_it_alone(
    weak: dict[bool, NamespaceBackend], image: Image, site: Site, attack: Attack, layer: str
) -> None:
    weakened = weaken(weak, attack, kept=layer)
    if attack.off_needs_root and not weakened.privileged:
        pytest.skip("the kernel refuses it to a plain user whatever we do")
    assert not await succeeds(weakened, image, attack, site, attack.limits)


@pytest.mark.parametrize(
    "attempt",
    [
        "date -s 2020-01-01",
        "dmesg",
        "echo 1 >/proc/sys/vm/drop_caches",
        "echo h >/proc/sysrq-trigger",  # help: another letter might take down a host that let it through
        "echo -500 >/proc/self/oom_score_adj",
    ],
)
async def test_what_nobody_wants_to_see_succeed_is_refused(any_box: Sandbox, attempt: str) -> None:
    """Stopped by layers that the attacks above are seen to need; without them these would change the machine."""
    tool = attempt.split()[0]
    result = await any_box.exec(f"command -v {tool} >/dev/null || exit 99; {attempt}")
    assert result.exit_code not in (0, 99)
    refusals = (b"not permitted", b"ermission denied", b"Read-only", b"sysrq-trigger: No such")
    assert any(words in result.stderr for words in refusals), result.stderr


async def test_every_layer_is_there(box: NamespaceSandbox, backend: NamespaceBackend) -> None:
    """Read directly, for an attack that two layers stop says nothing about one of them."""
    code = (
        "import ctypes; l = ctypes.CDLL(None, use_errno=True)\n"
        "status = dict(line.split(':\\t') for line in open('/proc/self/status').read().splitlines())\n"
        "mounts = {line.split()[1]: line.split()[3].split(',') for line in open('/proc/mounts')}\n"
        "print(status['NoNewPrivs'], status['Seccomp'], int(status['CapBnd'], 16))\n"
        "print(open('/proc/self/uid_map').read().split()[1], 'ro' in mounts['/proc/sys'], 'nodev' in mounts['/'])\n"
        "print(l.ptrace(16, 1, 0, 0), ctypes.get_errno(), l.syscall(435, 0, 0), ctypes.get_errno())"
    )
    seen = await box.exec(["python3", "-c", code])
    capabilities = sum(1 << capability for capability in zygote.KEPT_CAPABILITIES)
    first_id = zygote.UID_BASE if backend.privileged else os.geteuid()
    # ptrace of PID 1: EPERM. clone3: ENOSYS, so that libc falls back to clone.
    expected = f"1 2 {capabilities}\n{first_id} True True\n-1 1 -1 38\n"
    assert seen.stdout.decode() == expected, seen


async def test_pid_1_shows_no_path_of_the_host(box: NamespaceSandbox) -> None:
    seen = await box.exec("tr '\\0' ' ' </proc/1/cmdline; ls -A /tmp /sys /home")
    assert seen.stdout.split() == [b"sandbox", b"/home:", b"/sys:", b"/tmp:"]


async def test_only_its_own_processes_and_descriptors_are_seen(box: NamespaceSandbox) -> None:
    seen = (await box.exec("ps -eo comm --no-headers")).stdout.split()
    assert b"ps" in seen and len(seen) <= 3, "PID 1, bash and ps"
    assert (await box.exec(["ls", "/proc/self/fd"])).stdout.split() == [b"0", b"1", b"2", b"3"]  # 3 is ls reading


def test_there_are_enough_of_them() -> None:
    assert len(ATTACKS) >= 30 and len({attack.name for attack in ATTACKS}) == len(ATTACKS)
