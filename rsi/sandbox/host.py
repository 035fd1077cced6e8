"""The machine under the `namespace` backend: what we may do, the launcher's process, what dead hosts left behind."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from rsi.sandbox import SandboxConfig, SandboxError, cgroups, zygote

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb"}
"""Of every command, before the image's own."""
MAX_ARGUMENT = 100 << 10
"""The kernel takes 128 KiB in one argument; a longer `bash -c` goes as a file."""
SEND_S = 5.0


def explain(error: str, code: object) -> str:
    """What kept a sandbox from being built, and the mend."""
    if "unshare user" in error or "uid_map" in error or "setgroups" in error:
        return f"no user namespace ({error}); {userns_mend()}"
    if code == 28:
        return f"{error}: the image's files do not fit; raise disk_mb or inodes of its limits"
    return error


def userns_mend(read: Mapping[str, str] | None = None) -> str:
    """Which kernel setting forbids user namespaces here and the value to set; `read` stands for /proc/sys."""
    settings = {
        "kernel.unprivileged_userns_clone": ("0", "1"),
        "user.max_user_namespaces": ("0", "15000"),
        "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    }
    paths = {name: "/proc/sys/" + name.replace(".", "/") for name in settings}
    found = read if read is not None else {name: cgroups.read_text(path) for name, path in paths.items()}
    wrong = [f"{name}={good}" for name, (bad, good) in settings.items() if found.get(name, "").strip() == bad]
    if wrong:
        return "as root run: " + "; ".join(f"sysctl -w {setting}" for setting in wrong)
    named = ", ".join(f"{name}={good}" for name, (_, good) in settings.items())
    return f"the kernel or the container around us forbids it; check {named}, and seccomp of an outer container"


def fault(error: OSError, path: str) -> SandboxError:
    """An OSError of ours as a fault that names the path."""
    mend = "; free some space or move sandbox.cache_dir or TMPDIR" if error.errno in (28, 122) else ""
    return SandboxError(f"{error.filename or path}: {error.strerror or error}{mend}")


def cache_dir(config: SandboxConfig) -> str:
    return config.cache_dir or os.environ.get("RSI_CACHE") or os.path.expanduser("~/.cache/rsi")


def is_privileged() -> bool:
    """Root with the ids and capabilities for shifted user namespaces; root in a bare container is a plain user."""
    if os.geteuid() != 0:
        return False
    rows = [[int(field) for field in line.split()] for line in cgroups.read_text("/proc/self/uid_map").splitlines()]
    first, last = zygote.UID_BASE, zygote.UID_BASE + zygote.NUM_UIDS - 1
    mapped = any(start <= first and last < start + size for start, _, size in rows)
    effective = int(cgroups.read_text("/proc/self/status").split("CapEff:")[1].split()[0], 16)
    needed = (0, 1, 6, 7, 21)  # CHOWN DAC_OVERRIDE SETGID SETUID SYS_ADMIN
    return mapped and all(effective >> capability & 1 for capability in needed)


def start_time(pid: int) -> str:
    """Ticks from boot to the start of a process, so that a reused pid is not taken for it; "" if there is none."""
    text = cgroups.read_text(f"/proc/{pid}/stat")
    return text.rpartition(")")[2].split()[19] if text else ""


def runs_dir() -> str:
    """Where the run directories of this user's hosts lie."""
    return os.path.join(tempfile.gettempdir(), f"rsi-sandboxes-{os.geteuid()}")


def sweep(top: str) -> list[str]:
    """Remove what hosts that were killed left: groups, run directories, snapshots (their processes died with them).

    Returns the names of those hosts; one whose groups are still busy is left to the next sweep.
    """
    swept = []
    for name in os.listdir(top):
        kind, _, rest = name.partition("-")
        pid, _, rest = rest.partition("-")
        started, _, _ = rest.partition("-")
        if kind != "sbx" or not pid.isdigit() or start_time(int(pid)) == started:
            continue
        try:
            traces = json.loads(cgroups.read_text(f"{top}/{name}/traces.json") or "{}")
        except ValueError:
            traces = {}
        if not cgroups.sweep(traces.get("groups", []), f"{name}-"):
            continue  # still dying: the directory stays, and the next start finds it
        if snapshots := traces.get("snapshots"):
            remove_tree(snapshots)
        shutil.rmtree(f"{top}/{name}", ignore_errors=True)
        swept.append(name)
    return swept


def remove_tree(path: str) -> None:
    """Best effort. `rm`, for rmtree recurses and an agent's nesting may be deep; chmod, for a plain user is no root."""
    if not os.path.lexists(path):
        return
    if subprocess.run(["rm", "-rf", "--", path], stderr=subprocess.DEVNULL, check=False).returncode:
        subprocess.run(["chmod", "-R", "u+rwX", "--", path], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["rm", "-rf", "--", path], stderr=subprocess.DEVNULL, check=False)


def start_launcher(run_dir: str, with_environment: bool = False) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The zygote on the base interpreter (a virtual environment's own start-up files are nothing for it).

    with_environment: it inherits ours; for the attack suite, which looks for what must not be there.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # A module system's interpreter may need its library path; commands inside get neither.
    env = {"PATH": PATH} | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    env |= os.environ if with_environment else {}
    python = sys._base_executable  # pyright: ignore[reportAttributeAccessIssue]
    with theirs, open(f"{run_dir}/launcher.log", "wb") as log:
        try:
            process = subprocess.Popen(
                [python, "-I", "-S", zygote.__file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(
                f"the sandbox launcher cannot run {python}: {error.strerror}; may we read it?"
            ) from error
    ours.settimeout(SEND_S)  # sends only, and it reads at once
    return process, ours
