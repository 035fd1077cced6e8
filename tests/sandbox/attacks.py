"""The attacks of test_attacks.py, as records: what is tried, and which layers stop it.

A script prints BREACH where it got what it wanted and HELD where it was refused; one that prints neither did not run
(its tool is missing), which counts as a failure of the test and never as a defence. `layers` are the defences that stop
it, each of them alone: with all of them off the attack must succeed, with any one left on it must not.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from rsi.sandbox import Limits, Sandbox, zygote
from rsi.sandbox.namespace import NamespaceSandbox

BASH = """\
need() { command -v "$1" >/dev/null || { echo "MISSING $1"; exit 99; }; }
try() { need "$1"; if "$@" >/dev/null 2>&1; then echo BREACH; else echo HELD; fi; }
verdict() { if [ "$1" = 0 ]; then echo BREACH; else echo HELD; fi; }
"""
PYTHON = """\
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def syscall(*arguments):  # the result, or minus the error
    result = libc.syscall(*(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments))
    return -ctypes.get_errno() if result < 0 else result
def verdict(breached):
    print("BREACH" if breached else "HELD")
"""


@dataclass(frozen=True)
class Site:
    """What of the host an attack looks for; all of it is really there."""

    directory: str
    """Writable by everyone, with a file `secret` that everyone may read."""
    port: int
    """Of a server on the host's loopback."""
    abstract: str
    """Name of a listening abstract socket, without its NUL."""
    shm_key: int
    """Of a System V shared memory segment, mode 0666."""
    marker: str
    """Argument of a `sleep` that runs on the host."""
    secret: str
    """Value of a variable in the trainer's environment."""

    @property
    def env(self) -> dict[str, str]:
        """What the script knows; the secret it does not."""
        return {
            "HOST_DIR": self.directory,
            "PORT": str(self.port),
            "ABSTRACT": self.abstract,
            "SHM_KEY": str(self.shm_key),
            "MARKER": self.marker,
        }


@dataclass(frozen=True)
class Attack:
    name: str
    layers: tuple[str, ...]
    """Names of zygote.weakened, or the one limit that stops it."""
    bash: str = ""
    python: str = ""
    then: str = ""
    """A command of bash that is judged in place of the script."""
    judge: Callable[[Sandbox, Site], Awaitable[bool]] | None = None
    """Whether it succeeded, as the host sees it, after the script."""
    limits: Limits = field(default_factory=Limits)
    lifted: Limits | None = None
    """limits without the one in `layers`."""
    timeout_s: float = 20.0
    only_namespace: str = ""
    """Why it says nothing about other backends."""
    needs_ids: bool = False
    """It wants a second user inside, which a plain user's sandbox has not."""
    off_needs_root: bool = False
    """Of a plain user's sandbox the kernel refuses it whatever we do."""

    @property
    def command(self) -> str | list[str]:
        return ["python3", "-c", PYTHON + self.python] if self.python else BASH + self.bash


SMALL = Limits(memory_mb=64, disk_mb=4, inodes=400, pids=64)
ROOT_ONLY_FILES = "/proc/sys/kernel/core_pattern /proc/sys/vm/overcommit_memory"
DENIED = sorted(set(zygote.DENY.values()))
# Calls whose first check is not one of privilege, so that with null arguments they tell whether the filter was there.
TELLING = [zygote.DENY[name] for name in ("keyctl", "io_uring_enter", "process_vm_writev", "kcmp", "set_mempolicy")]


# ---- what the host looks at


async def wrote_on_the_host(sandbox: Sandbox, site: Site) -> bool:
    await sandbox.put("/app/out", {"planted": b"x"})
    path = f"{site.directory}/planted"
    if os.path.exists(path):
        os.unlink(path)
        return True
    return False


async def put_wrote_through(sandbox: Sandbox, site: Site) -> bool:
    await sandbox.put("/app", {"in": b"from the host"})
    return (await sandbox.exec(["cat", "/srv/victim"])).stdout != b"kept\n"


async def get_followed(sandbox: Sandbox, site: Site) -> bool:
    return any(entry.content for entry in (await sandbox.get("/app")).values())


async def was_not_throttled(sandbox: Sandbox, site: Site) -> bool:
    assert isinstance(sandbox, NamespaceSandbox)
    with open(os.path.dirname(sandbox._groups.layout.cpu_file) + "/cpu.stat") as file:
        return "nr_throttled 0\n" in file.read()


# ---- processes

COUNT = "set -- /proc/[0-9]*; [ $# -gt 40 ]; verdict $?"  # no fork: there may be no pid left

PROCESSES = [
    Attack(
        "a fork bomb runs on after its timeout",
        ("tree", "left"),
        bash=":(){ :|:& };:; while :; do :; done",
        then=COUNT,
        limits=SMALL,
        timeout_s=1.0,
        only_namespace="without its group a timeout kills everything there",
    ),
    Attack(
        "a fork bomb whose shell ends in time leaves no pid to the next command",
        ("left",),
        bash="for i in {1..50}; do setsid -f sleep 1000; done",
        then=COUNT,
        limits=replace(SMALL, pids=80),
    ),
    Attack(
        "a daemon outlives the timeout of its command: setsid, double fork, TERM ignored",
        ("tree",),
        bash="setsid -f sleep 1001; (setsid sh -c \"trap '' TERM HUP; sleep 1002; sleep 1003\" &); sleep 1004",
        then="need pgrep; pgrep -f 'sleep 100[1-3]'; verdict $?",
        timeout_s=1.0,
    ),
    Attack(
        "more processes than granted",
        ("pids",),
        python="""
pids = []
try:
    for _ in range(150):
        pid = os.fork()
        if not pid:
            libc.pause()
        pids.append(pid)
except OSError:
    pass
verdict(len(pids) == 150)
for pid in pids:
    os.kill(pid, 9)
""",
        limits=SMALL,
        lifted=replace(SMALL, pids=200, memory_mb=512),
    ),
    Attack("kill the supervisor", ("pidns",), bash="kill -9 $PPID; kill -TERM $PPID; sleep 0.1", then="echo HELD"),
    Attack(
        "see a process of the host",
        ("pidns",),
        bash='grep -lzx "$MARKER" /proc/[0-9]*/cmdline; verdict $?',
    ),
    Attack(
        "trace PID 1",
        ("dumpable",),
        python="verdict(libc.ptrace(0x4206, 1, 0, 0) == 0)  # PTRACE_SEIZE",
        only_namespace="PID 1 of a container is a shell that sleeps",
    ),
    Attack(
        "read the memory of PID 1",
        ("dumpable",),
        bash="cat /proc/1/maps 2>/dev/null | grep -q .; verdict $?",
        only_namespace="PID 1 of a container is a shell that sleeps",
    ),
    Attack(
        "read the trainer's keys from the environment of PID 1 or its own",
        ("environment", "dumpable"),
        bash="(env; cat /proc/1/environ /proc/self/environ) 2>/dev/null | tr '\\0' '\\n' | grep -q ^RSI_TEST_API_KEY=; "
        "verdict $?",
    ),
    Attack(
        "forge a reply on the supervisor's socket",
        ("descriptors",),
        python="""
import socket, stat
verdict(any(stat.S_ISSOCK(os.stat(fd).st_mode) for fd in map(int, os.listdir("/proc/self/fd")[:-1]) if fd > 2))
""",
    ),
    Attack(
        "raise the core limit and have the host's core_pattern helper started",
        ("core",),
        bash="ulimit -Hc 2>/dev/null | grep -q unlimited; verdict $?",
        only_namespace="a container's core limit is its daemon's",
    ),
]

# ---- space, memory, CPU

SPACE = [
    Attack(
        "fill the disk",
        ("disk",),
        bash="head -c 16M /dev/zero 2>&1 >/srv/big; [ $(stat -c %s /srv/big) = 16777216 ]; verdict $?",
        limits=SMALL,
        lifted=replace(SMALL, disk_mb=64),
    ),
    Attack(
        "reserve the disk with fallocate",
        ("disk",),
        bash="try fallocate -l 32M /srv/big",
        limits=SMALL,
        lifted=replace(SMALL, disk_mb=64),
    ),
    Attack(
        "use up the inodes",
        ("inodes",),
        bash="mkdir /srv/i; for ((i = 0; i < 600; i++)); do : >/srv/i/$i || break; done 2>/dev/null; "
        "[ $i = 600 ]; verdict $?",
        limits=SMALL,
        lifted=replace(SMALL, inodes=4000),
    ),
    Attack(
        "fill /dev/shm",
        ("shm",),
        bash="head -c 100M /dev/zero >/dev/shm/big 2>/dev/null; verdict $?; rm /dev/shm/big",
    ),
    Attack(
        "take more memory than granted",
        ("memory",),
        python="""
if not os.fork():
    taken = bytearray(300 << 20)
    os._exit(0)
verdict(os.wait()[1] == 0)
""",
        limits=SMALL,
        lifted=replace(SMALL, memory_mb=900),
    ),
    Attack(
        "take more memory than granted with many processes",
        ("memory",),
        bash="for i in {1..8}; do head -c 40M /dev/zero | tail -c 40M >/dev/null & jobs[i]=$!; done; "
        'for job in ${jobs[@]}; do wait $job || failed=1; done; [ -z "$failed" ]; verdict $?',
        limits=SMALL,
        lifted=replace(SMALL, memory_mb=900),
    ),
    Attack(
        "take more CPU than granted",
        ("cpu",),
        bash="timeout 2 sh -c 'while :; do :; done'; echo ran",
        judge=was_not_throttled,
        limits=Limits(cpus=0.02),
        lifted=Limits(cpus=8),
        only_namespace="the host reads the counter of the group",
    ),
]

# ---- the host's network, memory, files

HOST = [
    Attack("reach a server of the host", ("netns",), bash="(exec 3<>/dev/tcp/127.0.0.1/$PORT) 2>/dev/null; verdict $?"),
    Attack(
        "reach an abstract socket of the host",
        ("netns",),
        python="""
import socket
try:
    socket.socket(socket.AF_UNIX).connect("\\0" + os.environ["ABSTRACT"])
    verdict(True)
except ConnectionRefusedError:
    verdict(False)
""",
    ),
    Attack(
        "attach shared memory of the host",
        ("ipcns",),
        python="verdict(libc.shmget(int(os.environ['SHM_KEY']), 0, 0) >= 0)",
    ),
    Attack(
        "read a file of the host",
        ("old root",),
        bash="cat {,/.old,/proc/1/root}$HOST_DIR/secret 2>/dev/null | grep -q secret; verdict $?",
    ),
    Attack(
        "have `put` write on the host through a linked directory",
        ("old root",),
        bash="[ -d /.old ] && root=/.old; ln -s $root$HOST_DIR /app/out; mkdir -p $HOST_DIR 2>/dev/null; echo ran",
        judge=wrote_on_the_host,
    ),
    Attack(
        "have `put` write through a symbolic link",
        ("replace",),
        bash="echo kept >/srv/victim; ln -s /srv/victim /app/in; echo ran",
        judge=put_wrote_through,
    ),
    Attack(
        "have `put` write through a hard link",
        ("replace",),
        bash="echo kept >/srv/victim; ln /srv/victim /app/in; echo ran",
        judge=put_wrote_through,
    ),
    Attack(
        "have `get` follow links to what is not below it",
        ("links",),
        bash="ln -s /etc/shadow a; ln -s ../../../../../../etc/shadow b; mkdir d; ln -s /etc/passwd d/e; echo ran",
        judge=get_followed,
    ),
    Attack(
        "read the machine's /sys",
        ("sys",),
        bash="[ -e /sys/kernel/mm ]; verdict $?",
        only_namespace="a container has a read-only /sys",
    ),
    Attack(
        "write a kernel setting through /sys",
        ("sys", "userns"),
        bash="file=$(ls /sys/kernel/{rcu_normal,mm/ksm/run} 2>/dev/null | head -1); value=0; "
        '[ -n "$file" ] && value=$(<$file); (echo $value >${file:-/sys/none/none}) 2>/dev/null; verdict $?',
        off_needs_root=True,
    ),
]

# ---- privileges

KERNEL = [
    Attack("mount a file system", ("seccomp", "capabilities"), bash="try mount -t tmpfs x /mnt"),
    Attack(
        "make /proc/sys writable",
        ("seccomp", "capabilities"),
        bash="try mount -o remount,rw,bind /proc/sys",
        only_namespace="nobody may mount in a container, which is the attack before",
    ),
    Attack("take away what masks /proc", ("seccomp", "capabilities"), bash="try umount /proc/sys"),
    Attack("make a mount namespace", ("seccomp", "capabilities"), bash="try unshare -m true"),
    Attack("make a network namespace", ("seccomp", "capabilities"), bash="try unshare -n true"),
    Attack("enter a namespace", ("seccomp", "capabilities"), bash="try nsenter --mount=/proc/self/ns/mnt true"),
    Attack("nest a user namespace", ("seccomp",), bash="try unshare -U true"),
    Attack(
        "nest a user namespace by clone",
        ("seccomp",),
        python=f"""
pid = syscall({zygote.CLONE}, 0x10000000 | 17, 0, 0, 0, 0)
if pid == 0:
    os._exit(0)
verdict(pid > 0)
""",
    ),
    Attack(
        "nest a user namespace by clone3, whose flags a filter cannot read",
        ("seccomp",),
        python=f"""
import struct
pid = syscall({zygote.CLONE3}, struct.pack("8Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0), 64)
if pid == 0:
    os._exit(0)
verdict(pid > 0)
""",
    ),
    Attack("change the host name", ("capabilities",), bash="need hostname; try hostname evil"),
    Attack("make a device", ("capabilities", "userns"), bash="try mknod /tmp/disk b 254 0", off_needs_root=True),
    Attack(
        "write the kernel settings of the host",
        ("read-only proc", "userns"),
        # What was there is written back: with its defences off this one is the machine's own.
        bash=f'for f in {ROOT_ONLY_FILES}; do value=$(<$f); (echo "$value" >$f) 2>/dev/null && found=0; done; '
        "verdict ${found-1}",
        off_needs_root=True,
    ),
    Attack(
        "read kernel memory and keys through /proc",
        ("masked proc",),
        bash="for f in kcore keys timer_list kmsg; do f=/proc/$f; [ -e $f ] && [ $(stat -c %t:%T $f) != 1:3 ] "
        "&& [ -n \"$(ls -ld $f | grep -v ' 0 .*tmpfs')\" ] && found=0; done; verdict ${found-1}",
        only_namespace="which of them is masked in a container is its runtime's list",
    ),
    Attack(
        "call what only kernel exploits call",
        ("seccomp",),
        python=f"verdict(any(syscall(number, 0, 0, 0, 0, 0, 0) != -errno.EPERM for number in {TELLING}))",
    ),
    Attack(
        "set up io_uring",
        ("seccomp",),
        python="""
parameters = ctypes.create_string_buffer(256)
verdict(syscall(425, 1, parameters) >= 0)
""",
    ),
    Attack(
        "put a key into the kernel's keyring",
        ("seccomp",),
        python=f"""
verdict(syscall({zygote.DENY["add_key"]}, b"user", b"rsi", b"x", 1, -3) >= 0)
""",
    ),
    Attack("get a userfaultfd", ("seccomp",), python=f"verdict(syscall({zygote.DENY['userfaultfd']}, 1) >= 0)"),
    Attack(
        "reach the clock",
        ("seccomp",),
        # No time has two billion nanoseconds: the kernel says so before it looks at privileges, so no clock is set.
        python=f"""
import struct
verdict(syscall({zygote.DENY["clock_settime"]}, 0, struct.pack("qq", 1, 2_000_000_000)) == -errno.EINVAL)
""",
    ),
    Attack(
        "type into the terminal of whoever reads it",
        ("seccomp",),
        python="""
import fcntl, pty
pid, fd = pty.fork()  # elsewhere than on one's own controlling terminal the kernel refuses anyway
if not pid:
    try:
        fcntl.ioctl(0, 0x5412, b"x")
        os._exit(0)
    except OSError:
        os._exit(1)
verdict(os.waitpid(pid, 0)[1] == 0)
""",
    ),
    Attack(
        "become root by a setuid file",
        ("no_new_privs",),
        bash="need setpriv; cp /bin/bash /srv/sb; chmod 4755 /srv/sb; "
        "[ \"$(setpriv --reuid 1000 --clear-groups /srv/sb -p -c 'id -u')\" = 0 ]; verdict $?",
        needs_ids=True,
    ),
]

ATTACKS = [*PROCESSES, *SPACE, *HOST, *KERNEL]
