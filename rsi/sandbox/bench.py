"""`rsi sandbox bench`: how fast and how heavy sandboxes are here, every backend in one run, for the ratios.

A cycle is create, exec of `true`, close. An episode is create, five commands, the tests put, run and the reward read,
close. Memory is what a live idle sandbox has for itself (private pages of its supervisor), without what all share.
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from rsi.sandbox import (
    ENFORCEABLE,
    Backend,
    Image,
    ImageSpec,
    Sandbox,
    SandboxConfig,
    SandboxError,
    build_backend,
    cgroups,
)
from rsi.sandbox.namespace import NamespaceSandbox

BACKENDS = ("namespace", "docker")
COMMANDS = (
    "printf 'a,b\\n1,2\\n3,4\\n' >data.csv",
    "ls -la",
    "wc -l <data.csv",
    "awk -F, 'NR>1{s+=$2} END{print s}' data.csv >out.txt",
    "cat out.txt",
)
TEST_SH = (
    b'#!/bin/bash\nmkdir -p /logs\n[ "$(cat /app/out.txt)" = 6 ] && reward=1 || reward=0\necho $reward >/logs/reward\n'
)


@dataclass(frozen=True)
class BenchSizes:
    cycles: int = 60
    """One after the other, for the median; and as many again, `at_once`, for the rate."""
    episodes: int = 96
    at_once: int = 16
    alive: int = 50
    """Idle sandboxes, for the memory of one."""


@dataclass(frozen=True)
class Measured:
    """Of one backend."""

    cycle_ms_median: float
    cycles_per_s: float
    episodes_per_s: float
    cpu_s_per_episode: float
    mb_per_sandbox: float | None


async def bench(config: SandboxConfig, sizes: BenchSizes) -> dict[str, Any]:
    """The figures by backend, in the shape that `rsi sandbox bench --json` prints; null for a backend that is not
    there. Raises SandboxError where the namespace backend is not."""
    found: dict[str, Measured | None] = {}
    for name in BACKENDS:
        try:
            found[name] = await _measure(_config_of(config, name, sizes), sizes)
        except (SandboxError, ImportError):
            if name == "namespace":
                raise
            found[name] = None  # no engine, or no SDK
    fields = ("cycle_ms_median", "cycles_per_s", "episodes_per_s", "cpu_s_per_episode")
    figures: dict[str, Any] = {
        field: {name: getattr(measured, field) if measured else None for name, measured in found.items()}
        for field in fields
    }
    namespace = found["namespace"]
    return figures | {"mb_per_sandbox": namespace.mb_per_sandbox if namespace else None}


def _config_of(config: SandboxConfig, name: str, sizes: BenchSizes) -> SandboxConfig:
    """Limits that a backend does not enforce do not keep it from being measured."""
    changed = {"backend": name, "accept_missing": ENFORCEABLE, "max_alive": sizes.alive + sizes.at_once}
    return replace(config, **changed)  # pyright: ignore[reportArgumentType]


async def _measure(config: SandboxConfig, sizes: BenchSizes) -> Measured:
    backend = build_backend(config)
    try:
        image = await backend.build(ImageSpec())
        await run_cycle(backend, image)  # the probe and the first of everything are not counted
        times = [await _timed(lambda: run_cycle(backend, image)) for _ in range(sizes.cycles)]
        cycles_s = await _timed(lambda: run_many(lambda: run_cycle(backend, image), sizes.cycles, sizes.at_once))
        cpu = _Cpu()
        used: list[float | None] = []

        async def episode() -> None:
            used.append(await run_episode(backend, image))

        episodes_s = await _timed(lambda: run_many(episode, sizes.episodes, sizes.at_once))
        counted = [cpu_s for cpu_s in used if cpu_s is not None]
        cpu_s = cpu.since_start(sum(counted), exact=len(counted) == sizes.episodes)
        return Measured(
            cycle_ms_median=round(statistics.median(times) * 1e3, 2),
            cycles_per_s=round(sizes.cycles / cycles_s, 2),
            episodes_per_s=round(sizes.episodes / episodes_s, 2),
            cpu_s_per_episode=round(cpu_s / sizes.episodes, 4),
            mb_per_sandbox=await sandbox_mb(backend, image, sizes.alive) if config.backend == "namespace" else None,
        )
    finally:
        await backend.close()


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


async def run_many(work: Callable[[], Awaitable[None]], count: int, at_once: int) -> None:
    slots = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with slots:
            await work()

    await asyncio.gather(*(one() for _ in range(count)))


async def run_cycle(backend: Backend, image: Image) -> None:
    sandbox = await backend.create(image)
    try:
        done = await sandbox.exec(["true"], timeout_s=120)
        assert done.exit_code == 0, done
    finally:
        await sandbox.close()


async def run_episode(backend: Backend, image: Image) -> float | None:
    """One episode; the CPU seconds of its sandbox, or None where they cannot be read."""
    sandbox = await backend.create(image)
    try:
        for command in COMMANDS:
            await sandbox.exec(command, timeout_s=120)
        await sandbox.put("/tests", {"test.sh": TEST_SH})
        await sandbox.exec(["/tests/test.sh"], timeout_s=120)
        reward = (await sandbox.get("/logs"))["reward"].content
        assert reward == b"1\n", reward
        return _sandbox_cpu_s(sandbox)
    finally:
        await sandbox.close()


# ---- CPU and memory


def _sandbox_cpu_s(sandbox: Sandbox) -> float | None:
    """Of all processes of a namespace sandbox so far, from its cgroup; None where it has none."""
    if not isinstance(sandbox, NamespaceSandbox):
        return None
    words = sandbox.read_cpu_stat().split()
    return int(words[words.index("usage_usec") + 1]) / 1e6 if "usage_usec" in words else None


class _Cpu:
    """CPU seconds of work that runs in several processes.

    Exact: this process plus what the sandboxes' groups counted. Else (a daemon and its containers, a host without
    cgroups): what the whole machine was busy with, an upper bound that means something on an otherwise idle one.
    """

    def __init__(self) -> None:
        self.own, self.machine = _own_cpu_s(), _machine_cpu_s()

    def since_start(self, sandboxes_s: float, exact: bool) -> float:
        return _own_cpu_s() - self.own + sandboxes_s if exact else _machine_cpu_s() - self.machine


def _own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _machine_cpu_s() -> float:
    """user, nice, system, irq, softirq, steal of all cores since boot; proc(5)."""
    user, nice, system, _, _, irq, softirq, steal = (int(word) for word in cgroups.read_text("/proc/stat").split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


async def sandbox_mb(backend: Backend, image: Image, alive: int) -> float | None:
    """MB of private memory of one idle sandbox (OUTER and PID 1), the mean over `alive` of them; None if unreadable."""
    sandboxes = [await backend.create(image) for _ in range(alive)]
    try:
        kilobytes = [_private_kb(each.outer_pid) for each in sandboxes if isinstance(each, NamespaceSandbox)]
    finally:
        for sandbox in sandboxes:
            await sandbox.close()
    readable = [kb for kb in kilobytes if kb is not None]
    return round(statistics.mean(readable) / 1e3, 2) if readable else None


def _private_kb(outer: int) -> float | None:
    total = 0
    for pid in (outer, *map(int, cgroups.read_text(f"/proc/{outer}/task/{outer}/children").split())):
        try:
            rows = cgroups.read_text(f"/proc/{pid}/smaps_rollup").splitlines()
        except OSError:
            return None  # a plain user may not look at his own sandbox's PID 1
        total += sum(int(row.split()[1]) for row in rows if row.startswith("Private_"))
    return total * 1.024
