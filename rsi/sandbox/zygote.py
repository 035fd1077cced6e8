"""The launcher of the `namespace` backend: one zygote per host process, and in each sandbox its PID 1.

A stand-alone script (standard library and ctypes, nothing of ours), started as `python3 -I -S zygote.py FD` with an
almost empty environment: a fork of the trainer would carry its keys and its gigabytes into every sandbox. FD is a
SOCK_SEQPACKET socket; a message is one JSON object, and descriptors ride along. Per sandbox the zygote forks OUTER,
which builds mounts and namespaces and forks PID 1, which serves commands. Nothing may be imported after `pivot_root`:
the files found then belong to the agent. Run on x86_64; the aarch64 numbers come from asm-generic/unistd.h, unrun.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import encodings.ascii  # noqa: F401  (see above: all codecs that may be asked for are loaded here)
import encodings.latin_1  # noqa: F401
import encodings.utf_8  # noqa: F401
import errno
import fcntl
import gc
import json
import os
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

UID_BASE, NUM_UIDS = 1_000_000, 65_536
"""Root's sandboxes map ids 0..65535 to these; nothing inside is ever host uid 0."""
INLINE_BYTES = 48 << 10
"""A longer message goes as a memfd: one SEQPACKET send ends at about 208 kB and a cut one is bad JSON."""
SHM_BYTES = 16 << 20

MACHINE = os.uname().machine
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER = 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000
NEWPID, NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME = 1, 4, 15
PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 22, 24, 38
MNT_DETACH = 2

PIVOT_ROOT, CAPSET, AUDIT_ARCH, CLONE, IOCTL = {
    "x86_64": (155, 126, 0xC000003E, 56, 16),
    "aarch64": (41, 91, 0xC00000B7, 220, 29),
}.get(MACHINE, (0, 0, 0, 0, 0))
CLONE3, TIOCSTI = 435, 0x5412

# System calls that a terminal task never needs and kernel exploits love.
# fmt: off
DENY = {
    "x86_64": {
        "mount": 165, "umount2": 166, "pivot_root": 155, "setns": 308, "unshare": 272, "keyctl": 250, "add_key": 248,
        "request_key": 249, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "kexec_load": 246,
        "kexec_file_load": 320, "open_by_handle_at": 304, "name_to_handle_at": 303, "init_module": 175, "finit_module":
        313, "delete_module": 176, "reboot": 169, "swapon": 167, "swapoff": 168, "iopl": 172, "ioperm": 173, "acct":
        163, "settimeofday": 164, "clock_settime": 227, "quotactl": 179, "lookup_dcookie": 212, "syslog": 103,
        "vmsplice": 278, "move_pages": 279, "mbind": 237, "set_mempolicy": 238, "migrate_pages": 256, "nfsservctl": 180,
        "process_vm_writev": 311, "kcmp": 312, "uselib": 134, "ustat": 136, "sysfs": 139, "_sysctl": 156,
        "fanotify_init": 300,
    },
    "aarch64": {
        "mount": 40, "umount2": 39, "pivot_root": 41, "setns": 268, "unshare": 97, "keyctl": 219, "add_key": 217,
        "request_key": 218, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "kexec_load": 104,
        "kexec_file_load": 294, "open_by_handle_at": 265, "name_to_handle_at": 264, "init_module": 105, "finit_module":
        273, "delete_module": 106, "reboot": 142, "swapon": 224, "swapoff": 225, "acct": 89, "settimeofday": 170,
        "clock_settime": 112, "quotactl": 60, "lookup_dcookie": 18, "syslog": 116, "vmsplice": 75, "move_pages": 239,
        "mbind": 235, "set_mempolicy": 237, "migrate_pages": 238, "nfsservctl": 42, "process_vm_writev": 271, "kcmp":
        272, "fanotify_init": 262,
    },
}.get(MACHINE, {}) | {
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr":
    442, "quotactl_fd": 443, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "pidfd_getfd": 438,
}
# fmt: on

# CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP NET_BIND_SERVICE SYS_CHROOT: enough for apt, useradd, su.
KEPT_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 18)

Message = dict[str, Any]

weakened: set[str] = set()
"""Defences that are switched off in this sandbox, by name. Only the attack suite does that, to see each attack succeed
without its defence; the host's config has no key for it."""


def check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def mount(source: str, target: str, kind: str | None, flags: int = 0, options: str = "") -> None:
    result = libc.mount(
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        options.encode() or None,
    )
    check(result, f"mount {kind or 'bind'} at {target}")


def unshare(flags: int, what: str) -> None:
    check(libc.unshare(flags), f"unshare {what}")


def die_with_parent() -> None:
    """Every change of credentials clears this, so it is called again after each."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


# ---- messages


def encode(message: Message, fds: list[int]) -> tuple[bytes, list[int], int | None]:
    """(bytes to send, descriptors to send, memfd to close after sending or None)."""
    raw = json.dumps(message).encode()
    if len(raw) <= INLINE_BYTES:
        return raw, fds, None
    memfd = os.memfd_create("message", os.MFD_CLOEXEC)
    with os.fdopen(memfd, "wb", closefd=False) as file:
        file.write(raw)
    return b'{"op": "memfd"}', [*fds, memfd], memfd


def decode(sock: socket.socket) -> tuple[Message | None, list[int]]:
    """One message and its descriptors; None at end of stream."""
    raw, ancillary, flags, _ = sock.recvmsg(64 << 10, socket.CMSG_SPACE(16 * 4))
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % 4])
    assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC), "message or descriptors longer than the buffer"
    if not raw:
        return None, list(fds)
    message = json.loads(raw)
    if message["op"] == "memfd":
        memfd = fds.pop()
        raw = os.pread(memfd, os.fstat(memfd).st_size, 0)
        os.close(memfd)
        message = json.loads(raw)
    return message, list(fds)


def send_fds(sock: socket.socket, raw: bytes, fds: list[int]) -> None:
    sock.sendmsg([raw], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])


# ---- privileges


def seccomp_program() -> tuple[bytes, int]:
    """(classic BPF code, number of instructions): the deny list, foreign ABIs, namespace flags of clone, TIOCSTI."""
    load, jump_eq, jump_set, jump_ge, ret = 0x20, 0x15, 0x45, 0x35, 0x06
    kill, allow, eperm, enosys = 0x80000000, 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    number, arch, arg0, arg1 = 0, 4, 16, 24
    namespaces = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
    code = [(load, 0, 0, arch), (jump_eq, 1, 0, AUDIT_ARCH), (ret, 0, 0, kill), (load, 0, 0, number)]
    if MACHINE == "x86_64":  # the x32 ABI
        code += [(jump_ge, 0, 1, 0x40000000), (ret, 0, 0, enosys)]
    for denied in sorted(DENY.values()):
        code += [(jump_eq, 0, 1, denied), (ret, 0, 0, eperm)]
    # clone3's flags lie behind a pointer that a filter cannot follow; at ENOSYS glibc falls back to clone.
    code += [(jump_eq, 0, 1, CLONE3), (ret, 0, 0, enosys)]
    code += [(jump_eq, 0, 3, CLONE), (load, 0, 0, arg0), (jump_set, 0, 1, namespaces), (ret, 0, 0, eperm)]
    code += [(load, 0, 0, number), (jump_eq, 0, 3, IOCTL), (load, 0, 0, arg1), (jump_eq, 0, 1, TIOCSTI)]
    code += [(ret, 0, 0, eperm), (ret, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code), len(code)


class SockFprog(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def install_seccomp() -> None:
    code, length = seccomp_program()
    buffer = ctypes.create_string_buffer(code, len(code))
    program = SockFprog(length, ctypes.cast(buffer, ctypes.c_void_p))
    check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp filter (CONFIG_SECCOMP_FILTER)")


def forbid_new_privileges() -> None:
    """A setuid file gives nothing from here on; the kernel takes no filter from us without it."""
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def drop_capabilities() -> None:
    for capability in range(64):
        if capability not in KEPT_CAPABILITIES and libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # past the kernel's last one
    mask = sum(1 << capability for capability in KEPT_CAPABILITIES)
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    sets = ctypes.create_string_buffer(struct.pack("6I", mask, mask, 0, 0, 0, 0))
    check(libc.syscall(ctypes.c_long(CAPSET), header, sets), "capset")


def shifted_user_namespace() -> int:
    """A descriptor of a user namespace that maps 0..65535 to UID_BASE; a short-lived child makes it."""
    ready_r, ready_w = os.pipe()
    mapped_r, mapped_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent()
            result = libc.unshare(NEWUSER)
            os.write(ready_w, bytes([0 if result == 0 else ctypes.get_errno()]))
            os.read(mapped_r, 1)
        finally:
            os._exit(0)
    try:
        if code := os.read(ready_r, 1)[0]:
            raise OSError(code, f"unshare user: {os.strerror(code)}")
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(f"0 {UID_BASE} {NUM_UIDS}")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.write(mapped_w, b"x")
        os.waitpid(pid, 0)
        for fd in (ready_r, ready_w, mapped_r, mapped_w):
            os.close(fd)


def own_user_namespace() -> None:
    """A plain user's namespace: root inside is the user outside, and there is no second id."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(NEWUSER | NEWNS, "user")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


# ---- building one sandbox


def start_sandbox(config: Message, sock: socket.socket, payload: int | None, userns: int) -> int:
    """Build a sandbox and fork its PID 1; returns that pid in OUTER and never returns in PID 1.

    config: mount_point (covered in our own mount namespace only), lowers (top first), cgroups (groups to join),
    privileged, disk (bytes), inodes, host_network, workdir, max_pids and max_memory (rlimits, 0 = none), weaken.
    userns: a shifted user namespace to share, -1 to make an own one.
    """
    for group in config["cgroups"]:
        with open(group + "/cgroup.procs", "w") as file:
            file.write("0")
    weakened.update(config["weaken"])
    privileged = config["privileged"]
    if privileged:
        userns = shifted_user_namespace() if userns < 0 else userns
        unshare(NEWNS, "mount")
    else:
        own_user_namespace()
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount_root(config, privileged)
    if privileged and "userns" not in weakened:
        check(libc.setns(userns, NEWUSER), "setns user")
        os.close(userns)
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        die_with_parent()
    flags = {"pidns": NEWPID, "ipcns": NEWIPC, "netns": 0 if config["host_network"] else NEWNET}
    unshare(NEWUTS | NEWCGROUP | sum(flags[name] for name in flags if name not in weakened), "pid,ipc,uts,cgroup,net")
    outer = os.getpid()
    pid = os.fork()
    if pid:
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # a snapshot enters our mount namespace through /proc/<outer>/ns
        return pid
    die_with_parent()
    os.setsid()
    enter_root(config["host_network"])
    if payload is not None:
        unpack(payload, "/")
        os.close(payload)
    os.makedirs(config["workdir"], exist_ok=True)
    Init(sock, config).serve(outer)


def mount_root(config: Message, privileged: bool) -> None:
    """Overlay the lowers with a sized tmpfs and leave the working directory at its root, the merged tree at `m`.

    Relative paths from here on: after the change of ids a 0700 parent of the mount point is impassable.
    """
    options = f"size={config['disk']},nr_inodes={config['inodes']},mode=755"
    mount("tmpfs", config["mount_point"], "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.chdir(config["mount_point"])
    for directory in ("up", "work", "m"):
        os.mkdir(directory)
    if privileged:
        os.chown("up", UID_BASE, UID_BASE)
    # trusted.* xattrs, where overlayfs keeps what it must remember, are root's; for others it has user.* ones.
    layers = f"lowerdir={':'.join(config['lowers'])},upperdir=up,workdir=work" + ("" if privileged else ",userxattr")
    mount("overlay", "m", "overlay", MS_NODEV, layers)


def enter_root(host_network: bool) -> None:
    """Become PID 1 of `m`: own mounts, no way back, no privileges over the host."""
    unshare(NEWNS, "mount")  # our own: pivot_root moves the root of every member, and OUTER must keep the old view
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("m", "m", None, MS_BIND | MS_REC)  # mounts inherited from another user namespace are locked; this one is ours
    os.chdir("m")
    private_proc("proc")
    private_dev("dev")
    if "sys" in weakened:
        mount("/sys", "sys", None, MS_BIND | MS_REC)
    libc.sethostname(b"sandbox", 7)
    if not host_network and "netns" not in weakened:
        loopback_up()
    leave_old_root()
    os.umask(0o022)
    # 0: no ptrace of PID 1, no /proc/1/{mem,environ,fd,root}
    libc.prctl(PR_SET_DUMPABLE, int("dumpable" in weakened), 0, 0, 0)
    if "capabilities" not in weakened:
        drop_capabilities()
    if "no_new_privs" not in weakened:
        forbid_new_privileges()
        if "seccomp" not in weakened:
            install_seccomp()
    die_with_parent()


def leave_old_root() -> None:
    put_old = b"."
    if "old root" in weakened:
        put_old = b".old"
        os.makedirs(put_old, exist_ok=True)
    check(libc.syscall(ctypes.c_long(PIVOT_ROOT), ctypes.c_char_p(b"."), ctypes.c_char_p(put_old)), "pivot_root")
    if "old root" not in weakened:
        check(libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING


def private_proc(proc: str) -> None:
    os.makedirs(proc, exist_ok=True)
    if "pidns" in weakened:
        mount("/proc", proc, None, MS_BIND | MS_REC)
        return
    mount("proc", proc, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for name in ("sys", "irq", "bus", "fs", "sysrq-trigger"):
        path = f"{proc}/{name}"
        if os.path.exists(path) and "read-only proc" not in weakened:
            mount(path, path, None, MS_BIND | MS_REC)
            mount("none", path, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for name in ("kcore", "keys", "timer_list", "kmsg", "latency_stats", "sched_debug"):
        if os.path.exists(f"{proc}/{name}") and "masked proc" not in weakened:
            mount("/dev/null", f"{proc}/{name}", None, MS_BIND)


def private_dev(dev: str) -> None:
    os.makedirs(dev, exist_ok=True)
    mount("tmpfs", dev, "tmpfs", MS_NOSUID | MS_NOEXEC, "size=64k,nr_inodes=64,mode=755")
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        os.close(os.open(f"{dev}/{name}", os.O_CREAT | os.O_WRONLY))
        mount(f"/dev/{name}", f"{dev}/{name}", None, MS_BIND)
    os.mkdir(f"{dev}/pts")
    mount("devpts", f"{dev}/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    os.symlink("pts/ptmx", f"{dev}/ptmx")
    os.symlink("/proc/self/fd", f"{dev}/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{dev}/{name}")
    os.mkdir(f"{dev}/shm")
    size = 16 * SHM_BYTES if "shm" in weakened else SHM_BYTES
    mount("tmpfs", f"{dev}/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},nr_inodes=1024,mode=1777")


# ---- files, moved by a process inside


def unpack(fd: int, directory: str) -> None:
    """Write the tar in `fd` below `directory`; what stands at a file's path is replaced, never written through.

    A parent may be a symbolic link: it leads somewhere inside, as everything here does. Not `extractall`: it looks up
    owners by name, and libc would load the NSS library that the agent's nsswitch.conf names.
    """
    with os.fdopen(fd, "rb", closefd=False) as file, tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            path = os.path.join(directory, member.name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if member.isdir():
                os.makedirs(path, exist_ok=True)
                os.chmod(path, member.mode)
                continue
            if "replace" not in weakened:
                remove(path)
            if member.issym():
                os.symlink(member.linkname, path)
                continue
            content = archive.extractfile(member)
            assert content is not None, f"{member.name}: only files, directories and links are put"
            careful = 0 if "replace" in weakened else os.O_EXCL | os.O_NOFOLLOW
            target = os.open(path, os.O_CREAT | os.O_WRONLY | careful, 0o600)
            with os.fdopen(target, "wb") as out:
                while block := content.read(1 << 20):
                    out.write(block)
                os.fchmod(out.fileno(), member.mode)


def remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        shutil.rmtree(path)


def walk(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """(path, lstat) of all below a directory, or of what is there if it is something else; no recursion."""
    top = os.lstat(path)
    if not stat.S_ISDIR(top.st_mode):
        yield path, top
        return
    pending = [path]
    while pending:
        directory = pending.pop()
        for name in sorted(os.listdir(directory)):
            child = f"{directory}/{name}"
            try:
                status = os.stat(child) if "links" in weakened else os.lstat(child)
            except FileNotFoundError:
                continue
            yield child, status
            if stat.S_ISDIR(status.st_mode):
                pending.append(child)


def pack(path: str, out: int, max_bytes: int, max_entries: int) -> None:
    """Write a tar of all below `path` to `out`; raises ValueError early where it would be too big."""
    start = len(path.rstrip("/")) + 1
    num_bytes = num_entries = 0
    with os.fdopen(out, "wb") as file:
        for child, status in walk(path):
            relative = child[start:] or os.path.basename(path)
            header = tarfile.TarInfo(relative)
            header.mode = stat.S_IMODE(status.st_mode)
            header.type = tarfile.FIFOTYPE
            content = -1
            if stat.S_ISDIR(status.st_mode):
                header.type = tarfile.DIRTYPE
            elif stat.S_ISLNK(status.st_mode):
                header.type, header.linkname = tarfile.SYMTYPE, os.readlink(child)
            elif stat.S_ISREG(status.st_mode):
                try:
                    no_follow = 0 if "links" in weakened else os.O_NOFOLLOW
                    content = os.open(child, os.O_RDONLY | no_follow | os.O_NONBLOCK)
                except FileNotFoundError:
                    continue
                header.type, header.size = tarfile.REGTYPE, os.fstat(content).st_size
            num_bytes, num_entries = num_bytes + header.size, num_entries + 1
            if num_bytes > max_bytes or num_entries > max_entries:
                raise ValueError(f"more than {max_bytes} bytes or {max_entries} entries")
            file.write(header.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
            if content >= 0:
                copy_exactly(content, file.write, header.size)
                os.close(content)
        file.write(bytes(1024))


def copy_exactly(fd: int, write: Callable[[bytes], object], size: int) -> None:
    """`size` bytes of fd, padded to a tar block; zeros stand for what a concurrent truncate took away."""
    left = size
    while left:
        block = os.read(fd, min(left, 1 << 20)) or bytes(min(left, 1 << 20))
        write(block)
        left -= len(block)
    write(bytes(-size % 512))


# ---- PID 1


class Init:
    """PID 1 of a sandbox: forks commands, reaps everything, reports by command id."""

    def __init__(self, sock: socket.socket, config: Message) -> None:
        self.sock = sock
        self.max_pids, self.max_memory = config["max_pids"], config["max_memory"]
        self.running: dict[int, int] = {}
        """pid -> command id; whatever else is reaped here is an orphan."""

    def say(self, **message: object) -> None:
        self.sock.send(json.dumps(message).encode())

    def serve(self, outer: int) -> NoReturn:
        wake_r, wake_w = os.pipe()
        os.set_blocking(wake_r, False)
        os.set_blocking(wake_w, False)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        poll.register(wake_r, select.POLLIN)
        self.say(ready=outer)
        while True:
            for fd, _ in poll.poll():
                if fd == wake_r:
                    os.read(wake_r, 4096)
                    self.reap()
                    continue
                message, fds = decode(self.sock)
                if message is None:
                    os._exit(0)  # the host is gone; the whole PID namespace goes with us
                self.handle(message, fds)
                for descriptor in fds:
                    os.close(descriptor)

    def handle(self, message: Message, fds: list[int]) -> None:
        number = message["id"]
        match message["op"]:
            case "killall":
                self.kill_all()
                self.say(id=number, rc=0)
            case "killleaders":
                self.kill_leaders()
            case "signal":  # freezes and thaws where there is no cgroup to do it
                assert os.getpid() == 1, "outside a PID namespace of our own, -1 is the whole machine"
                try:
                    os.kill(-1, message["signal"])
                except ProcessLookupError:
                    pass
                self.say(id=number, rc=0)
            case _:
                try:
                    pid = os.fork()
                except OSError as error:
                    self.say(id=number, error=f"fork: {error}")
                    return
                if pid == 0:
                    command_process(message, fds, self.max_pids, self.max_memory)
                self.running[pid] = number

    def reap(self) -> bool:
        """Report every child that has ended; True while others live."""
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            number = self.running.pop(pid, None)
            if number is not None:
                cpu_s = used.ru_utime + used.ru_stime
                self.say(id=number, rc=os.waitstatus_to_exitcode(status), cpu_s=cpu_s, left=self.count_processes())

    def count_processes(self) -> int:
        """Processes that nobody waits for, -1 where a cgroup counts better than we do."""
        if not self.max_pids:
            return -1
        return sum(name.isdigit() for name in os.listdir("/proc")) - 1 - len(self.running)

    def kill_leaders(self) -> None:
        """The commands and nothing that they started: what a timeout must not be content with."""
        for pid in self.running:
            os.kill(pid, signal.SIGKILL)

    def kill_all(self, patience_s: float = 2.0) -> None:
        """Kill all but PID 1 and reap until none is left: a zombie still takes a pid."""
        if os.getpid() != 1:  # outside a PID namespace of our own, -1 is the whole machine
            self.kill_leaders()
            return
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                pass
            if not self.reap():
                return
            time.sleep(0.001)


def command_process(message: Message, fds: list[int], max_pids: int, max_memory: int) -> NoReturn:
    """The child of one command. fds: stdin, stdout, stderr, script or none, then the cgroup.procs files to join."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        num_open = 4 if message.get("script") else 3
        for procs in fds[num_open:]:
            os.write(procs, b"0")
        # 1 is the one value at which the kernel starts no core_pattern helper, which would run on the host.
        if "core" not in weakened:
            resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
        if max_pids:
            resource.setrlimit(resource.RLIMIT_NPROC, (max_pids, max_pids))
        if max_memory:
            resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
        for target in range(num_open):
            # Received descriptors lie above 3 (the socket and the wake-up pipe are older), so none is overwritten.
            os.dup2(fds[target], target)
        if "descriptors" not in weakened:
            os.closerange(num_open, 1 << 16)
        perform(message)
        os._exit(0)
    except BaseException as error:
        try:
            os.write(2, f"sandbox: {error!r}\n".encode())
        except OSError:
            pass
    os._exit(126)


def perform(message: Message) -> None:
    match message["op"]:
        case "exec":
            env = become(message["user"], message["env"]) if message["user"] else message["env"]
            execute(message["argv"], env, message["cwd"])
        case "put":
            os.makedirs(message["directory"], exist_ok=True)
            unpack(0, message["directory"])
        case "get":
            if os.path.lexists(message["path"]):
                pack(message["path"], 1, message["max_bytes"], message["max_entries"])
        case "forks":  # how many children this command may have at once
            os.write(1, str(count_forks(message["wanted"])).encode())


def become(user: str, env: dict[str, str]) -> dict[str, str]:
    """Take the ids of `user` (name or id, perhaps with `:group`); the environment with that user's HOME.

    Read from the files by hand: libc's look-ups load what the agent's nsswitch.conf names.
    """
    name, _, group = user.partition(":")
    rows = [line.split(":") for line in read_lines("/etc/passwd")]
    row = next((row for row in rows if len(row) > 5 and name in (row[0], row[2])), None)
    if row is None and not name.isdigit():
        raise ValueError(f"user {name} is not in /etc/passwd; add it with RUN useradd, or name one that is there")
    uid, gid, home = (int(row[2]), int(row[3]), row[5]) if row else (int(name), 0, "/")
    groups = [line.split(":") for line in read_lines("/etc/group")]
    members = [int(row[2]) for row in groups if len(row) > 3 and name in row[3].split(",")]
    if group:
        numbers = [int(row[2]) for row in groups if len(row) > 2 and group in (row[0], row[2])]
        if not numbers and not group.isdigit():
            raise ValueError(f"group {group} is not in /etc/group; add it with RUN groupadd, or name one that is there")
        gid, members = numbers[0] if numbers else int(group), []
    os.setgroups(members)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    return {**env, "HOME": home} if env.get("HOME") == "/root" else env


def read_lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []


def execute(argv: list[str], env: dict[str, str], cwd: str) -> NoReturn:
    try:
        os.chdir(cwd)
    except OSError:
        os.chdir("/")  # the agent removed it: it must be able to make it again
    directories = env.get("PATH", "/usr/bin:/bin").split(":")
    error: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
    for path in [argv[0]] if "/" in argv[0] else [f"{directory}/{argv[0]}" for directory in directories]:
        try:
            os.execve(path, argv, env)
        except FileNotFoundError:
            continue
        except OSError as found:
            error = found
    os.write(2, f"exec: {argv[0]}: {error.strerror}\n".encode())
    os._exit(127 if error.errno == errno.ENOENT else 126)


def count_forks(wanted: int) -> int:
    children = []
    try:
        for _ in range(wanted):
            pid = os.fork()
            if pid == 0:
                signal.pause()
                os._exit(0)
            children.append(pid)
    except OSError:
        pass
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return len(children)


# ---- the zygote


def copy_upper(message: Message) -> int:
    """Copy a sandbox's upper to the host directory `target` from inside its namespaces; the exit status of cp.

    A plain user owns files of any mode in there and may read them all only within the sandbox's user namespace.
    """
    kinds = (("mnt", NEWNS),) if message["privileged"] else (("user", NEWUSER), ("mnt", NEWNS))
    fds = [(os.open(f"/proc/{message['outer']}/ns/{name}", os.O_RDONLY), flag) for name, flag in kinds]
    for fd, flag in fds:
        check(libc.setns(fd, flag), "setns")
    pid = os.fork()
    if pid == 0:
        try:
            os.execve("/bin/cp", ["cp", "-a", "--reflink=auto", message["mount_point"] + "/up", message["target"]], {})
        finally:
            os._exit(127)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def request_process(message: Message, sock: socket.socket, payload: int | None, userns: int) -> NoReturn:
    """One request in a child of the zygote; whatever goes wrong is reported on the request's own socket."""
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 2)
    os.close(null)
    try:
        match message["op"]:
            case "create":
                pid = start_sandbox(message, sock, payload, userns)
                os.waitpid(pid, 0)  # we hold the socket as well, so its end tells the host that both of us are gone
            case "copy":
                sock.send(json.dumps({"rc": copy_upper(message)}).encode())
        os._exit(0)
    except BaseException as error:
        code = error.errno if isinstance(error, OSError) else None
        try:
            sock.send(json.dumps({"error": f"{type(error).__name__}: {error}", "errno": code}).encode())
        except OSError:
            pass
    os._exit(1)


def hide_arguments() -> None:
    """Overwrite argv: /proc/1/cmdline inside every sandbox would show a path of the host."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, fields 48 and 49 of proc(5)
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, b"sandbox", min(7, end - start - 1))
    libc.prctl(PR_SET_NAME, b"sandbox", 0, 0, 0)


def main() -> None:
    zygote = socket.socket(fileno=int(sys.argv[1]))
    if not PIVOT_ROOT:
        raise SystemExit(f"the namespace sandbox knows x86_64 and aarch64, this is {MACHINE}")
    parent, own_pid = os.getppid(), os.getpid()
    hide_arguments()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    gc.disable()  # no cycles are made; a collection in a fork would copy every page it marks
    gc.freeze()
    poll = select.poll()
    poll.register(zygote, select.POLLIN)
    children: set[int] = set()
    userns = -1
    # Ends on EOF, or when the host is gone and some fork of it still holds the socket. PDEATHSIG would not do: it fires
    # when the *thread* that started us ends.
    while os.getppid() == parent:
        ready = poll.poll(500)
        while children:
            ended = os.waitpid(-1, os.WNOHANG)[0]
            if not ended:
                break
            children.discard(ended)
        if not ready:
            continue
        message, fds = decode(zygote)
        if message is None:
            return
        if message["op"] == "kill":
            if message["pid"] in children:  # ours and not reaped, so the number is still its own
                os.kill(message["pid"], signal.SIGKILL)
            continue
        # One user namespace for all, 2 ms less each, where a cgroup counts their processes: RLIMIT_NPROC counts per
        # namespace. They hold no handle of each other's namespaces, and setns is denied.
        if userns < 0 and message["op"] == "create" and message["privileged"] and not message["max_pids"]:
            with contextlib.suppress(OSError):  # the request's own process tries again and reports it
                userns = shifted_user_namespace()
        pid = os.fork()
        if pid == 0:
            zygote.close()
            die_with_parent()
            if os.getppid() != own_pid:
                os._exit(1)  # the zygote ended before it was watched
            request_process(message, socket.socket(fileno=fds[0]), fds[1] if len(fds) > 1 else None, userns)
        children.add(pid)
        for descriptor in fds:
            os.close(descriptor)


if __name__ == "__main__":
    main()
