"""The base file system of sandboxes, built once from the host that runs us: no network, no registry, a few seconds.

Debian and Ubuntu: the files of an installed package closure as dpkg lists them; elsewhere: named commands and the
libraries that ldd finds. Over it a copy of the running Python with pytest, for verifiers run it and agents expect it.
Traps answered here: alternatives (`awk`) are links that no package lists; files in /etc come as the host edited them,
so only harmless ones are taken and passwd, shadow, hosts are written fresh; paths differ on merged-usr hosts. A base is
owned by the ids that its sandboxes see: shifted for root (no idmapped mounts: overlays take those only from kernel 5.19
on), the user himself otherwise (a base of another owner gives EOVERFLOW on mkdir).
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator

from rsi.sandbox import SandboxError, keys, zygote

RECIPE = "2"
"""Change it when what is built changes: it is part of the cache key."""

PACKAGES = (
    "base-files base-passwd bash bc bsdextrautils bsdutils bzip2 coreutils dash debianutils diffutils file findutils "
    "gawk grep gzip hostname jq less libc-bin login mawk mount ncurses-base ncurses-bin passwd patch perl-base procps "
    "sed tar time tree unzip util-linux xxd xz-utils zip"
).split()
LONE_COMMANDS = ("git",)
"""Taken without their package, if the host has them: git's own would bring 90 MB of perl and TLS for its remote ends,
while the one binary (4 MB) does all that can be done without a network."""
REQUIRED_COMMANDS = "awk bash cat cp diff find grep gzip head ls mkdir mv rm sed sh sort tar tr wc xargs".split()
OTHER_COMMANDS = (
    "base64 basename bc bunzip2 bzip2 chgrp chmod chown cksum cmp column comm csplit cut date dd df dirname du echo "
    "egrep env expand expr factor false fgrep file flock fmt fold gawk getent getopt gunzip hexdump hostname id "
    "install join jq kill less ln logname md5sum mkfifo mktemp mount nice nl nohup nproc numfmt od paste patch perl "
    "pgrep pkill printenv printf ps pwd readlink realpath rev seq setsid sha1sum sha256sum sha512sum shred shuf sleep "
    "split stat stdbuf sum sync tac tail tee test time timeout top touch tree true truncate tsort tty umount uname "
    "unexpand uniq unlink unxz unzip users watch which who whoami xxd xz yes zcat zip"
).split()
PYTEST = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli")
"""pytest and what it imports, as far as the running environment has them."""
NOT_IN_STDLIB = {
    "test",
    "tests",
    "idlelib",
    "turtledemo",
    "site-packages",
    "dist-packages",
    "ensurepip",
    "lib2to3",
    "tkinter",
}

MERGED = re.compile(r"^/(bin|sbin|lib|lib32|lib64|libx32)(?=/)")
SKIPPED = re.compile(
    r"^/usr/share/(man|doc|locale|info|lintian|bug|bash-completion)/."
    r"|^/(boot|dev|proc|sys|run|root|tmp|home|mnt|opt|srv)(/|$)"
    r"|^/var/(tmp|cache|log)(/|$)|^/(bin|sbin|lib|lib32|lib64|libx32)?$|^/\.$"
)
# Of /etc nothing else comes along: a host's bash.bashrc or environment may hold its proxies and keys.
HARMLESS_ETC = re.compile(
    r"^/etc($|/(alternatives|terminfo|pam\.d|security)(/|$)|/(debian_version|issue|login\.defs|magic|os-release)$)"
)
PASSWD = "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"


def prepare_base(rootfs: str, cache: str, privileged: bool, key_name: str = "sandbox.rootfs") -> str:
    """The directory that sandboxes get as their lowest layer; built or imported on first use. Blocking, seconds.

    rootfs: an unpacked file system of the user's, else "" for one of the host's. cache: a directory of this user.
    key_name: of the config, for errors.
    """
    owner = zygote.UID_BASE if privileged else os.geteuid()
    if not rootfs:
        key = keys.digest(RECIPE, str(owner), *_inputs())[:24]
        return _cached(f"{cache}/bases/host-{key}", owner, build_base)
    source = os.path.realpath(rootfs)
    if not os.path.isdir(f"{source}/usr") or not os.path.exists(f"{source}/etc"):
        raise SandboxError(f"{key_name}={rootfs!r} holds no file system (usr, etc); unpack one there or leave it empty")
    status = os.stat(source)
    if status.st_uid == owner:
        return source
    key = keys.digest(source, str(owner), str(status.st_ino), str(status.st_mtime_ns))[:24]
    return _cached(f"{cache}/bases/import-{key}", owner, lambda target: _import(source, target))


def _inputs() -> Iterator[str]:
    """All that a host-built base depends on."""
    if shutil.which("dpkg-query"):
        yield _output("dpkg-query", "-W", "-f=${binary:Package} ${Version} ${db:Status-Abbrev}\n")
    yield sys.version
    yield _interpreter()
    for name, path in _pytest_sources():
        yield f"{name} {path} {os.stat(path).st_mtime_ns}"


def _cached(target: str, owner: int, build: Callable[[str], None]) -> str:
    """Build into a partial directory and rename: a kill leaves no half base. One builder at a time, others wait."""
    if os.path.isdir(target):
        return target
    folder = os.path.dirname(target)
    try:
        os.makedirs(folder, exist_ok=True)
        with open(f"{folder}/lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.isdir(target):
                _build_and_rename(target, owner, build)
    except OSError as error:
        raise SandboxError(
            f"cannot build the base of sandboxes at {error.filename or target}: {error.strerror}; "
            "free some space, move sandbox.cache_dir, or give an unpacked file system as sandbox.rootfs"
        ) from error
    return target


def _build_and_rename(target: str, owner: int, build: Callable[[str], None]) -> None:
    partial = f"{target}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        os.mkdir(partial, 0o755)
        build(partial)
        if owner != os.geteuid():
            _shift_owners(partial)
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _import(source: str, target: str) -> None:
    if subprocess.run(["cp", "-a", "--reflink=auto", f"{source}/.", target], check=False).returncode:
        # A plain user cannot keep owners and may not read everything; what he can read is his base.
        subprocess.run(["cp", "-r", "--preserve=mode,links,timestamps", f"{source}/.", target], check=False)


def _shift_owners(root: str) -> None:
    for directory, names, files in os.walk(root):
        for path in (directory, *(f"{directory}/{name}" for name in (*names, *files))):
            status = os.lstat(path)
            if status.st_uid < zygote.UID_BASE:
                uid, gid = status.st_uid % zygote.NUM_UIDS, status.st_gid % zygote.NUM_UIDS
                os.lchown(path, zygote.UID_BASE + uid, zygote.UID_BASE + gid)
                if status.st_mode & 0o7000 and not stat.S_ISLNK(status.st_mode):
                    os.chmod(path, stat.S_IMODE(status.st_mode))  # chown drops setuid, setgid


def build_base(root: str) -> None:
    """Fill an empty directory with a file system made of this host's own files."""
    _skeleton(root)
    if shutil.which("dpkg-query"):
        _copy_packages(root)
        _copy_lone_commands(root)
    else:
        _copy_commands(root)
    _write_etc(root)
    _copy_python(root)
    if not os.path.lexists(f"{root}/bin/bash"):
        raise SandboxError("the host has no bash to build a base from; give an unpacked file system as sandbox.rootfs")


def _skeleton(root: str) -> None:
    for name in (
        "usr",
        "usr/bin",
        "usr/sbin",
        "usr/lib",
        "usr/local",
        "usr/local/bin",
        "usr/local/lib",
        "etc",
        "var",
        "var/lib",
    ):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.islink(f"/{name}"):
            os.symlink(f"usr/{name}", f"{root}/{name}")
            os.makedirs(f"{root}/usr/{name}", exist_ok=True)
        elif os.path.isdir(f"/{name}"):
            os.makedirs(f"{root}/{name}", exist_ok=True)
    for name in ("proc", "sys", "dev", "run", "home", "mnt", "opt", "srv", "app", "logs"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    for name, mode in (("tmp", 0o1777), ("var/tmp", 0o1777), ("root", 0o700)):
        os.makedirs(f"{root}/{name}", exist_ok=True)
        os.chmod(f"{root}/{name}", mode)


def _write_etc(root: str) -> None:
    master = "/usr/share/base-passwd/"
    passwd = _text(master + "passwd.master") or PASSWD
    passwd = passwd.replace("root:*:", "root:x:", 1)
    texts = {
        "passwd": passwd,
        "group": _text(master + "group.master") or "root:x:0:\nnogroup:x:65534:\n",
        "shadow": "".join(f"{line.split(':')[0]}:*:19000:0:99999:7:::\n" for line in passwd.splitlines()),
        "gshadow": "",
        "hosts": "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 sandbox\n",
        "hostname": "sandbox\n",
        "resolv.conf": "",
        "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n",
        "shells": "/bin/sh\n/bin/bash\n",
    }
    for name, text in texts.items():
        path = f"{root}/etc/{name}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with open(path, "w") as file:
            file.write(text)
        os.chmod(path, 0o640 if "shadow" in name else 0o644)


# ---- from packages


def _copy_packages(root: str) -> None:
    fields = ("Package", "binary:Package", "db:Status-Abbrev", "Pre-Depends", "Depends", "Provides")
    table = _output("dpkg-query", "-W", "-f=" + r"\t".join(f"${{{name}}}" for name in fields) + r"\n")
    packages = closure(PACKAGES, table)
    listed = _output("dpkg-query", "-L", *packages).splitlines()
    files = {
        MERGED.sub(r"/usr/\1", line) if os.path.islink("/bin") else line for line in listed if line.startswith("/")
    }
    files |= set(_alternatives(files))
    for path in sorted(files):
        if SKIPPED.match(path) or not os.path.lexists(path):
            continue
        if path.startswith("/etc") and not HARMLESS_ETC.match(path):
            continue
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode) or mode & stat.S_IROTH:
            _copy(path, root + path)


def closure(wanted: Iterable[str], table: str) -> list[str]:
    """The installed ones of `wanted` and all that they depend on, as dpkg names them (with architecture).

    table: rows of package, its full name, status, Pre-Depends, Depends, Provides, tab-separated.
    """
    full: dict[str, str] = {}
    needs: dict[str, list[list[str]]] = {}
    providers: dict[str, str] = {}
    for row in table.splitlines():
        name, binary, status, pre_depends, depends, provides = row.split("\t")
        if not status.startswith("ii") or name in full:
            continue
        full[name] = binary
        needs[name] = [_names(group, "|") for group in (pre_depends + "," + depends).split(",") if group.strip()]
        providers |= dict.fromkeys(_names(provides, ","), name)
    pending, found = [name for name in wanted if name in full], set()
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        for group in needs[name]:
            pending += [real for each in group if (real := each if each in full else providers.get(each))][:1]
    return sorted(full[name] for name in found)


def _names(text: str, separator: str) -> list[str]:
    """`a (>= 1) | b:any` -> [a, b]."""
    return [each.split("(")[0].split(":")[0].strip() for each in text.split(separator) if each.strip()]


def _alternatives(files: set[str]) -> Iterator[str]:
    for folder in ("/usr/bin", "/usr/sbin"):
        for entry in os.scandir(folder):
            target = os.readlink(entry.path) if entry.is_symlink() else ""
            if target.startswith("/etc/alternatives/") and os.path.realpath(entry.path) in files:
                yield from (entry.path, target)


# ---- from commands


def _copy_commands(root: str) -> None:
    missing = [name for name in REQUIRED_COMMANDS if not shutil.which(name)]
    if missing or not shutil.which("ldd"):
        raise SandboxError(
            f"this host has neither dpkg-query nor all of {' '.join([*missing, 'ldd'])}; "
            "give an unpacked file system as sandbox.rootfs (for example of `docker export`)"
        )
    binaries = []
    for name in (*REQUIRED_COMMANDS, *OTHER_COMMANDS, *LONE_COMMANDS):
        path = shutil.which(name)
        while path and not os.path.lexists(root + path):
            _copy_with_parents(path, root)
            if not os.path.islink(path):
                binaries.append(path)
                break
            path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
    for library in _libraries(binaries):
        _copy_library(library, root)


def _copy_lone_commands(root: str) -> None:
    found = [path for name in LONE_COMMANDS if (path := shutil.which(name)) and not os.path.islink(path)]
    for path in found:
        _copy_with_parents(path, root)
    for library in _libraries(found):
        _copy_library(library, root)
    if found:
        os.makedirs(f"{root}/usr/share/git-core/templates", exist_ok=True)  # git init complains without it


def _copy_with_parents(path: str, root: str) -> None:
    os.makedirs(os.path.dirname(root + path), exist_ok=True)
    _copy(path, root + path)


# ---- Python


def _interpreter() -> str:
    return os.path.realpath(sys._base_executable)  # pyright: ignore[reportAttributeAccessIssue]


def _pytest_sources() -> list[tuple[str, str]]:
    """(name, path) of pytest and what it needs, as far as this environment has them."""
    found = []
    for name in PYTEST:
        spec = importlib.util.find_spec(name)
        if spec and spec.origin:
            is_package = spec.submodule_search_locations is not None
            found.append((name, os.path.dirname(spec.origin) if is_package else spec.origin))
    return found


def _copy_python(root: str) -> None:
    """The running interpreter at /usr/local, precompiled, with pytest in its site-packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    binary = f"{root}/usr/local/bin/{version}"
    shutil.copyfile(_interpreter(), binary)
    os.chmod(binary, 0o755)
    for link in ("python3", "python"):
        os.symlink(version, f"{root}/usr/local/bin/{link}")
    if not os.path.lexists(f"{root}/usr/bin/python3"):
        os.symlink("/usr/local/bin/python3", f"{root}/usr/bin/python3")
    library = ""
    for scheme in ("stdlib", "platstdlib"):
        source = sysconfig.get_path(scheme)
        if source.startswith(sys.prefix + "/") and sys.prefix != sys.base_prefix:
            source = sys.base_prefix + source[len(sys.prefix) :]
        library = f"{root}/usr/local/{os.path.relpath(source, sys.base_prefix)}"
        if os.path.isdir(source):
            shutil.copytree(source, library, ignore=_not_stdlib, dirs_exist_ok=True, ignore_dangling_symlinks=True)
    packages = f"{library}/site-packages"
    os.makedirs(packages, exist_ok=True)
    if not os.path.lexists(f"{library}/dist-packages"):
        os.symlink("site-packages", f"{library}/dist-packages")  # where Debian's own interpreter looks
    for _, source in _pytest_sources():
        target = f"{packages}/{os.path.basename(source)}"
        if os.path.isdir(source):
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    dynload = f"{library}/lib-dynload"
    extensions = [f"{dynload}/{name}" for name in os.listdir(dynload)] if os.path.isdir(dynload) else []
    for path in _libraries([_interpreter(), *extensions]):
        _copy_library(path, root)
    compileall = [_interpreter(), "-I", "-S", "-m", "compileall", "-q", "-s", root, "-p", "/", library]
    subprocess.run(
        compileall, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    )  # slower imports at worst


def _not_stdlib(folder: str, names: list[str]) -> set[str]:
    """What shutil.copytree leaves out: tests, tools with windows, and bytecode of other optimisation levels."""
    tag = sys.implementation.cache_tag
    if os.path.basename(folder) == "__pycache__":
        return {name for name in names if not name.endswith(f".{tag}.pyc")}
    return {name for name in names if name in NOT_IN_STDLIB or name.startswith("config-")}


def _libraries(binaries: list[str]) -> list[str]:
    """Shared libraries and the loader that ldd finds for them; an empty list for static binaries."""
    if not binaries or not shutil.which("ldd"):
        return []
    result = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False)
    return sorted(set(re.findall(r"(?:=>|^)\s+(/\S+) \(0x", result.stdout, re.MULTILINE)))


def _copy_library(path: str, root: str) -> None:
    """Keep a system library at its path; another goes to /usr/local/lib, with a link where the loader always looks."""
    if os.path.lexists(root + path):
        return
    if re.match(r"/(usr/)?lib(32|64|x32)?/", path):
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        shutil.copy2(path, root + path)
        return
    name = os.path.basename(path)
    if not os.path.lexists(f"{root}/usr/local/lib/{name}"):
        shutil.copy2(path, f"{root}/usr/local/lib/{name}")
    # The interpreter's RPATH may be an absolute path of the host, and there is no ld.so.cache.
    for found in _libraries([_interpreter()]):
        link = f"{root}{os.path.dirname(found)}/{name}"
        if os.path.basename(found).startswith("libc.so") and not os.path.lexists(link):
            os.makedirs(os.path.dirname(link), exist_ok=True)
            os.symlink(f"/usr/local/lib/{name}", link)


# ---- small things


def _copy(source: str, target: str) -> None:
    """One link, directory (empty) or regular file, with its mode and times."""
    mode = os.lstat(source).st_mode
    if stat.S_ISDIR(mode):
        os.makedirs(target, exist_ok=True)
        os.chmod(target, stat.S_IMODE(mode))
        return
    if os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISREG(mode):
        shutil.copy2(source, target)


def _output(*argv: str) -> str:
    result = subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"})
    if result.returncode:
        raise SandboxError(f"{argv[0]} failed: {result.stderr.strip()[-300:]}; or give a file system as sandbox.rootfs")
    return result.stdout


def _text(path: str) -> str:
    with contextlib.suppress(OSError), open(path) as file:
        return file.read()
    return ""
