"""Does the namespace backend leave anything behind? Many episodes, then a host that is killed in the middle of more.

    python scripts/soak_sandboxes.py [--episodes 10000] [--killed-in 200] [--cycles 2000] [--alive 200] [--json]

A host runs `episodes` (the benchmark's: create, five commands, tests, reward, close; 16 at once), then keeps
`killed-in` sandboxes busy at once and gets SIGKILL. What is then left is counted before and after
`rsi sandbox sweep`: processes, mounts, cgroups, directories. Beside it: descriptors of a host over `cycles` of create,
exec and close, and the private memory of each of `alive` idle sandboxes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rsi.sandbox import ImageSpec, SandboxConfig
from rsi.sandbox.bench import run_cycle, run_episode, run_many, sandbox_mb
from rsi.sandbox.cgroups import read_text
from rsi.sandbox.host import runs_dir, start_time
from rsi.sandbox.namespace import NamespaceBackend

AT_ONCE = 16
LEFT_S = 10.0
"""Until a killed host's processes have been reaped; the kernel kills them at once."""


async def host(episodes: int, killed_in: int) -> None:
    """Print `episodes DONE` now and then, and `busy` once killed_in sandboxes are; then wait to be killed."""
    backend = NamespaceBackend(SandboxConfig(max_alive=max(AT_ONCE, killed_in)))
    image = await backend.build(ImageSpec())
    done = 0

    async def one() -> None:
        nonlocal done
        await run_episode(backend, image)
        done += 1
        if done % 100 == 0 or done == episodes:
            print("episodes", done, flush=True)

    await run_many(one, episodes, AT_ONCE)
    busy = [await backend.create(image) for _ in range(killed_in)]
    work = [
        box.exec("(sleep 600 &) ; while :; do echo x >f; mkdir -p d; sleep 0.1; done", timeout_s=600) for box in busy
    ]
    running = asyncio.gather(*work)
    await asyncio.sleep(2.0)
    print("busy", len(busy), flush=True)
    await running


def run_and_kill(episodes: int, killed_in: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--host", "--episodes", str(episodes), "--killed-in", str(killed_in)]
    started = time.perf_counter()
    took_s = 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            for line in process.stdout:
                word, number = line.split()
                took_s = took_s if word == "busy" else time.perf_counter() - started
                print(f"\r{word} {number}   ", end="", file=sys.stderr, flush=True)
                if word == "busy":
                    break
            else:
                raise RuntimeError("the host ended before it was to be killed; its error stands above")
            family = descendants(process.pid)
            alive = traces(process.pid, family)
        finally:
            process.send_signal(signal.SIGKILL)
    print("killed", file=sys.stderr)
    deadline = time.monotonic() + LEFT_S
    while traces(process.pid, family)["processes"] and time.monotonic() < deadline:
        time.sleep(0.05)
    killed = traces(process.pid, family)
    subprocess.run([Path(sys.executable).with_name("rsi"), "sandbox", "sweep"], check=True, stdout=subprocess.DEVNULL)
    return {
        "episodes": episodes,
        "episodes_per_s": round(episodes / took_s, 2),
        "while_alive": alive,
        "after_kill": killed,
        "after_sweep": traces(process.pid, family),
    }


Process = tuple[int, str]
"""pid and start time."""


def descendants(host_pid: int) -> set[Process]:
    children: dict[int, list[int]] = {}
    for pid in pids():
        if fields := read_text(f"/proc/{pid}/stat").rpartition(")")[2].split():
            children.setdefault(int(fields[1]), []).append(pid)
    found, todo = set(), [host_pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.add((child, start_time(child)))
            todo.append(child)
    return {(pid, start) for pid, start in found if start}  # one that has ended since it was listed has none


def traces(host_pid: int, family: set[Process]) -> dict[str, int]:
    """What there is of that host's sandboxes: the processes of `family` and all in its groups, mounts on this host's
    tree, groups, directories. Other hosts may be running."""
    mark = f"sbx-{host_pid}-"
    inside = {(pid, start_time(pid)) for pid in pids() if mark in read_text(f"/proc/{pid}/cgroup")}
    alive = {(pid, start) for pid, start in family if start_time(pid) == start}
    mounts = [line.split() for line in read_text("/proc/self/mountinfo").splitlines()]
    groups = {fields[4] for fields in mounts if fields[fields.index("-") + 1].startswith("cgroup")}
    runs = Path(runs_dir())
    return {
        "processes": sum(not is_zombie(pid) for pid, _ in inside | alive),
        "mounts": sum(mark in fields[4] for fields in mounts),
        "cgroups": sum(mark in name for root in groups for _, folders, _ in os.walk(root) for name in folders),
        "directories": sum(path.name.startswith(mark) for path in runs.iterdir()) if runs.is_dir() else 0,
    }


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def is_zombie(pid: int) -> bool:
    return read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] == ["Z"]


async def descriptors(cycles: int) -> dict[str, int]:
    backend = NamespaceBackend(SandboxConfig())
    try:
        image = await backend.build(ImageSpec())
        await run_cycle(backend, image)
        before = len(os.listdir("/proc/self/fd"))
        await run_many(lambda: run_cycle(backend, image), cycles, AT_ONCE)
        return {"cycles": cycles, "grown_by": len(os.listdir("/proc/self/fd")) - before}
    finally:
        await backend.close()


async def memory(alive: int) -> dict[str, Any]:
    backend = NamespaceBackend(SandboxConfig(max_alive=alive))
    try:
        return {"alive": alive, "mb_each": await sandbox_mb(backend, await backend.build(ImageSpec()), alive)}
    finally:
        await backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--killed-in", type=int, default=200, help="sandboxes that are busy when the host is killed")
    parser.add_argument("--cycles", type=int, default=2000)
    parser.add_argument("--alive", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--host", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.host:
        asyncio.run(host(args.episodes, args.killed_in))
        return
    found = run_and_kill(args.episodes, args.killed_in)
    found |= {"descriptors": asyncio.run(descriptors(args.cycles)), "memory": asyncio.run(memory(args.alive))}
    print(json.dumps(found) if args.json else "\n".join(f"{name:14} {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
