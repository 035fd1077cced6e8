"""Control groups of one sandbox: which files limit, kill and count, on cgroup v1 + hybrid, on v2, or nowhere.

The supervisor (PID 1) stands outside the limited groups: it must survive the OOM killer and always be able to fork.
A `Driver` is found once per host and only knows paths, so a fake tree tests it; `Groups` are one sandbox's directories.
v2 with controllers was not run (the development host is hybrid): its paths follow the kernel's cgroup-v2.rst.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rsi.sandbox import Limits, SandboxError

ROOT = "/sys/fs/cgroup"
CONTROLLERS = ("memory", "pids", "cpu")
MAX_LEFT = 32
"""Processes that a command may leave behind; more is a fork bomb that would leave later commands no pid."""


@dataclass(frozen=True)
class Layout:
    """The files of one sandbox's groups; all paths absolute."""

    directories: tuple[str, ...] = ()
    """To make, parents first."""
    values: tuple[tuple[str, str], ...] = ()
    """(file, value) to write."""
    optional: tuple[tuple[str, str], ...] = ()
    """The same, where a kernel may lack the file or the parent be stricter."""
    supervisor: tuple[str, ...] = ()
    """Groups that OUTER and PID 1 join."""
    jobs: tuple[str, ...] = ()
    """Limited groups that every command joins."""
    commands: str = ""
    """Where each command gets a group of its own, for `cgroup.kill`; empty: nowhere."""
    top: str = ""
    """The group that holds all of the sandbox and can be killed and frozen; empty: none."""
    oom_file: str = ""
    cpu_file: str = ""


@dataclass(frozen=True)
class Driver:
    """How this host limits. parents: controller -> directory below which sandboxes' groups are made."""

    kind: Literal["v1", "v2", "none"]
    parents: Mapping[str, str] = field(default_factory=dict)
    why_missing: Mapping[str, str] = field(default_factory=dict)
    """controller -> what stood in the way, and the mend."""

    def layout(self, name: str, limits: Limits, shm_bytes: int) -> Layout:
        # tmpfs pages are charged to the group of the writer and outlive it: a full disk must not look like an OOM.
        memory = str((limits.memory_mb + limits.disk_mb << 20) + shm_bytes)
        match self.kind:
            case "v1":
                return self._layout_v1(name, limits, memory)
            case "v2":
                return self._layout_v2(name, limits, memory)
            case "none":
                return Layout()

    def _layout_v1(self, name: str, limits: Limits, memory: str) -> Layout:
        tops = {controller: f"{parent}/{name}" for controller, parent in self.parents.items()}
        unified = tops.pop("unified", "")
        jobs = {controller: f"{tops[controller]}/jobs" for controller in ("memory", "pids") if controller in tops}
        directories = [*tops.values(), *jobs.values()]
        values, optional = [], []
        if "memory" in jobs:
            values.append((f"{jobs['memory']}/memory.limit_in_bytes", memory))
            optional.append((f"{jobs['memory']}/memory.memsw.limit_in_bytes", memory))
        if "pids" in jobs:
            values.append((f"{jobs['pids']}/pids.max", str(limits.pids)))
        cpu_file = f"{tops['cpu']}/cpu.cfs_quota_us" if "cpu" in tops else ""
        if cpu_file:
            optional.append((cpu_file, str(int(limits.cpus * 100_000))))
        supervisor = list(tops.values())
        if unified:
            directories += [unified, f"{unified}/init"]
            supervisor.append(f"{unified}/init")
        return Layout(
            directories=tuple(directories),
            values=tuple(values),
            optional=tuple(optional),
            supervisor=tuple(supervisor),
            jobs=tuple(jobs.values()),
            commands=unified,
            top=unified,
            oom_file=f"{jobs['memory']}/memory.oom_control" if "memory" in jobs else "",
            cpu_file=cpu_file,
        )

    def _layout_v2(self, name: str, limits: Limits, memory: str) -> Layout:
        top = f"{self.parents['unified']}/{name}"
        jobs = f"{top}/jobs"
        have = [controller for controller in CONTROLLERS if controller in self.parents]
        values = [(f"{top}/cgroup.subtree_control", " ".join(f"+{controller}" for controller in have))] if have else []
        optional = []
        if "memory" in have:
            values.append((f"{jobs}/memory.max", memory))
            optional += [(f"{jobs}/memory.swap.max", "0")]
        if "pids" in have:
            values.append((f"{jobs}/pids.max", str(limits.pids)))
        if "cpu" in have:
            optional.append((f"{jobs}/cpu.max", f"{int(limits.cpus * 100_000)} 100000"))
        return Layout(
            directories=(top, f"{top}/init", jobs),
            values=tuple(values),
            optional=tuple(optional),
            supervisor=(f"{top}/init",),
            commands=jobs,
            top=top,
            oom_file=f"{jobs}/memory.events" if "memory" in have else "",
            cpu_file=f"{jobs}/cpu.max" if "cpu" in have else "",
        )


def find_driver(enabled: bool = True, root: str = ROOT, own: Mapping[str, str] | None = None) -> Driver:
    """The driver for this host.

    root: where cgroups are mounted; own: controller -> our group ("" is v2's), read from /proc if None.
    """
    missing = "no usable cgroups"
    if not enabled:
        missing = "sandbox.cgroups is False; set it to True"
    elif os.path.exists(f"{root}/cgroup.controllers"):
        return _find_v2(root, own if own is not None else _own_groups())
    elif parents := _writable_v1(root, own if own is not None else _own_groups()):
        absent = [controller for controller in CONTROLLERS if controller not in parents]
        return Driver("v1", parents, {name: f"{root}/{name} is not writable; run as root" for name in absent})
    elif os.geteuid() != 0:
        missing = "a plain user has no cgroup here; start under `systemd-run --user --scope -p Delegate=yes` or as root"
    else:
        missing = f"nothing below {root} is writable; mount cgroups there, in a container writable"
    return Driver("none", {}, dict.fromkeys(CONTROLLERS, missing))


def _own_groups() -> dict[str, str]:
    with open("/proc/self/cgroup") as file:
        rows = [line.rstrip("\n").split(":", 2) for line in file]
    return {controller: path for _, controllers, path in rows for controller in controllers.split(",")}


def _writable_v1(root: str, own: Mapping[str, str]) -> dict[str, str]:
    """controller -> our own group of it, or the top where that is not visible from here."""
    parents = {}
    for controller in ("memory", "pids", "cpu", "unified"):
        path = own.get("" if controller == "unified" else controller, "").rstrip("/")
        mounts = (f"{root}/{controller}", f"{root}/cpu,cpuacct") if controller == "cpu" else (f"{root}/{controller}",)
        for candidate in (mounted + tail for mounted in mounts for tail in dict.fromkeys((path, ""))):
            # The controller's own files must be there: an unmounted directory would take mkdir and limit nothing.
            if os.path.exists(f"{candidate}/cgroup.procs") and _can_make_groups(candidate):
                parents[controller] = candidate
                break
    return parents


def _can_make_groups(directory: str) -> bool:
    trial = f"{directory}/sbx-trial-{os.getpid()}"
    try:
        os.mkdir(trial)
        os.rmdir(trial)
    except OSError:
        return False
    return True


def _find_v2(root: str, own: Mapping[str, str]) -> Driver:
    """v2: below the true root as root of the machine, else below our own (delegated) group."""
    is_machine_root = not os.path.exists(f"{root}/cgroup.type") and os.access(root, os.W_OK)
    parent = root if is_machine_root else root + own.get("", "/").rstrip("/")
    if not _can_make_groups(parent):
        missing = f"{parent} is not ours; start under `systemd-run --user --scope -p Delegate=yes` or as root"
        return Driver("none", {}, dict.fromkeys(CONTROLLERS, missing))
    offered = read_text(f"{parent}/cgroup.controllers").split()
    wanted = [controller for controller in CONTROLLERS if controller in offered]
    absent = [controller for controller in CONTROLLERS if controller not in offered]
    why = {name: f"{parent} offers no {name} controller; delegate it" for name in absent}
    for controller in list(wanted):
        try:
            _enable(parent, controller)
        except OSError as error:
            wanted.remove(controller)
            why[controller] = f"{parent}/cgroup.subtree_control refuses +{controller} ({error.strerror}); delegate it"
    return Driver("v2", {"unified": parent} | {controller: parent for controller in wanted}, why)


def _enable(parent: str, controller: str) -> None:
    """A group that holds processes may not hand out controllers: those in it move to a leaf first."""
    if controller in read_text(f"{parent}/cgroup.subtree_control").split():
        return
    try:
        _write(f"{parent}/cgroup.subtree_control", f"+{controller}")
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        leaf = f"{parent}/rsi-host"
        os.makedirs(leaf, exist_ok=True)
        for pid in read_text(f"{parent}/cgroup.procs").split():
            _write(f"{leaf}/cgroup.procs", pid)
        _write(f"{parent}/cgroup.subtree_control", f"+{controller}")


class Groups:
    """The directories of one sandbox."""

    def __init__(self, layout: Layout) -> None:
        """Makes the groups and sets the limits; raises SandboxError, with nothing left behind."""
        self.layout = layout
        self.starting: set[str] = set()
        """Groups of commands that have not ended; perhaps empty, for their command may not have joined yet."""
        self.ended: set[str] = set()
        self.joined: list[int] = []
        try:
            for directory in layout.directories:
                os.mkdir(directory)
            for path, value in layout.values:
                _write(path, value)
            for path, value in layout.optional:
                try:
                    _write(path, value)
                except OSError:
                    continue
            self.joined = [os.open(f"{group}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for group in layout.jobs]
        except OSError as error:
            self._remove_once()
            raise SandboxError(f"cannot limit the sandbox: {error}; set sandbox.cgroups=False to go without") from error
        self.oom_kills = self._count_oom_kills()

    def open_command(self, number: int) -> tuple[str, list[int], list[int]]:
        """(the command's own group or "", descriptors for it to join, which of them the caller closes)."""
        if not self.layout.commands:
            return "", list(self.joined), []
        group = f"{self.layout.commands}/c{number}"
        os.mkdir(group)
        self.starting.add(group)
        fd = os.open(f"{group}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        return group, [fd, *self.joined], [fd]

    def end_command(self, group: str) -> None:
        """After the command's own process ended: a bomb that it left behind is killed, empty groups go."""
        if not group:
            return
        if len(read_text(f"{group}/cgroup.procs").split()) > MAX_LEFT:
            _write(f"{group}/cgroup.kill", "1")
        self.starting.discard(group)
        self.ended.add(group)
        for other in list(self.ended):
            try:
                os.rmdir(other)
                self.ended.discard(other)
            except OSError:
                continue  # a background job lives in it

    def kill_command(self, group: str) -> bool:
        """True if it could be done here; it is atomic, so setsid and double forks do not escape."""
        if not group:
            return False
        _write(f"{group}/cgroup.kill", "1")
        return True

    def kill(self) -> bool:
        """Everything, PID 1 included; True if it could be done here."""
        if not self.layout.top:
            return False
        try:
            _write(f"{self.layout.top}/cgroup.kill", "1")
        except OSError:
            return False
        return True

    def freeze(self, frozen: bool) -> bool:
        if not self.layout.top:
            return False
        _write(f"{self.layout.top}/cgroup.freeze", str(int(frozen)))
        return True

    def saw_oom(self) -> bool:
        """Whether the kernel killed for memory since the last call."""
        before, self.oom_kills = self.oom_kills, self._count_oom_kills()
        return self.oom_kills > before

    def _count_oom_kills(self) -> int:
        if not self.layout.oom_file:
            return 0
        found = re.search(r"^oom_kill (\d+)$", read_text(self.layout.oom_file), re.MULTILINE)
        return int(found[1]) if found else 0

    async def remove(self, patience_s: float = 2.0) -> bool:
        """Remove the directories once the kernel lets go of them (EBUSY until the last task is reaped)."""
        loop = asyncio.get_running_loop()
        end = loop.time() + patience_s
        while not self._remove_once():
            if loop.time() > end:
                return False
            await asyncio.sleep(0.002)
        return True

    def _remove_once(self) -> bool:
        while self.joined:
            os.close(self.joined.pop())
        done = True
        for directory in (*self.starting, *self.ended, *reversed(self.layout.directories)):
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                continue
            except OSError:
                done = False
        return done


def sweep(parents: list[str], prefix: str, patience_s: float = 0.5) -> bool:
    """Kill and remove the groups that a dead host left below `parents`, named `prefix`...; True when none is left."""
    end = time.monotonic() + patience_s
    while True:
        left = [f"{parent}/{name}" for parent in parents for name in _listed(parent) if name.startswith(prefix)]
        if not left or time.monotonic() > end:
            return not left
        for top in left:
            try:
                _write(f"{top}/cgroup.kill", "1")
            except OSError:
                pass  # v1 controllers have none; their processes died with the host's launcher
            for directory, _, _ in os.walk(top, topdown=False):
                try:
                    os.rmdir(directory)
                except OSError:
                    continue  # busy until its last task is reaped
        time.sleep(0.01)


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def read_text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _write(path: str, value: str) -> None:
    with open(path, "w") as file:
        file.write(value)
