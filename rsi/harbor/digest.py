"""Which files are a task, and their digest: what Harbor's packager does (harbor.md section 8), without it.

Two files steer the choice. The root's `.gitignore` replaces the default ignores; a `.harborignore` counts below
`tests/` and `solution/`, of the task or of a step, for what lies beside it. A file's mode bits are not covered.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pathspec

from rsi.harbor.records import FormatError

COVERED_FILES = ("task.toml", "instruction.md", "README.md", "trajectory.json")
COVERED_FOLDERS = ("environment", "tests", "solution", "steps")
"""What the digest covers; other files of the directory are not part of a task."""
GITIGNORE = ".gitignore"
HARBORIGNORE = ".harborignore"


def digest(files: Mapping[str, bytes]) -> str:
    """`sha256:<64 hex>`: SHA-256 over path + NUL + sha256hex + LF, in order of path, of the covered files."""
    return digest_of_hashes({path: hashlib.sha256(content).hexdigest() for path, content in covered(files).items()})


def digest_of_hashes(hashes: Mapping[str, str]) -> str:
    """The digest, where each file's own sha256 is known."""
    total = hashlib.sha256()
    for path in sorted(hashes):
        total.update(f"{path}\0{hashes[path]}\n".encode(errors="surrogatepass"))
    return f"sha256:{total.hexdigest()}"


def covered(files: Mapping[str, bytes], targets: Mapping[str, str] | None = None) -> dict[str, bytes]:
    """Those of a task directory's files that are the task. Raises FormatError for ignore rules that cannot be read.

    files: by POSIX path. targets: where a path leads through links, relative to the task, for those that are links.
    """
    rules = {path: files[path] for path in files if posixpath.basename(path) in (GITIGNORE, HARBORIGNORE)}
    return {path: files[path] for path in covered_paths(list(files), rules, targets or {})}


def covered_paths(paths: list[str], rules: Mapping[str, bytes], targets: Mapping[str, str]) -> list[str]:
    """`covered` by names alone; rules: the content of the .gitignore and every .harborignore."""
    inside = [path for path in paths if path in COVERED_FILES or path.split("/")[0] in COVERED_FOLDERS and "/" in path]
    ignore = _HarborIgnore(rules)
    inside = [
        path
        for path in inside
        if path in COVERED_FILES
        or not ignore.matches(path)
        and (targets.get(path, path) == path or not ignore.matches(targets[path]))
    ]
    if GITIGNORE not in rules:
        return [path for path in inside if not _ignored_by_default(path)]
    spec = pathspec.PathSpec.from_lines("gitignore", _lines(rules, GITIGNORE))
    return [path for path in inside if not spec.match_file(path)]


def _ignored_by_default(path: str) -> bool:
    """`__pycache__/ *.pyc .DS_Store *.swp *.swo *~` as a .gitignore: on any component of a path."""
    parts = path.split("/")
    named = any(part == ".DS_Store" or part.endswith((".pyc", ".swp", ".swo", "~")) for part in parts)
    return named or "__pycache__" in parts[:-1]


def _lines(rules: Mapping[str, bytes], path: str) -> list[str]:
    try:
        return rules[path].decode().splitlines()
    except UnicodeDecodeError:
        raise FormatError(f"{path} is not utf-8; write it as plain text") from None


class _HarborIgnore:
    """The .harborignore files of a task: rules of a directory for what lies below it, the nearest one last."""

    def __init__(self, rules: Mapping[str, bytes]):
        self._specs = {
            posixpath.dirname(path): pathspec.GitIgnoreSpec.from_lines(_lines(rules, path))
            for path in rules
            if posixpath.basename(path) == HARBORIGNORE and _in_scope(posixpath.dirname(path))
        }

    def matches(self, path: str) -> bool:
        """Whether a file, or a directory above it, is ignored."""
        if posixpath.basename(path) == HARBORIGNORE:
            return True
        parts = path.split("/")
        return bool(self._specs) and any(
            self._ignores("/".join(parts[:i]), is_folder=i < len(parts)) for i in range(1, len(parts) + 1)
        )

    def _ignores(self, path: str, is_folder: bool) -> bool:
        ignored = False
        parts = path.split("/")
        for i in range(1, len(parts)):
            spec = self._specs.get("/".join(parts[:i]))
            if spec is not None:
                include = spec.check_file("/".join(parts[i:]) + ("/" if is_folder else "")).include
                ignored = ignored if include is None else include
        return ignored


def _in_scope(folder: str) -> bool:
    parts = folder.split("/")
    roots = ("tests", "solution")
    return parts[0] in roots or parts[0] == "steps" and len(parts) > 2 and parts[2] in roots


# ---- directories -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree:
    """What of a task directory may be the task. paths: regular files, links to them included, by POSIX path."""

    paths: tuple[str, ...]
    targets: Mapping[str, str]
    """link -> the path inside the task that it leads to."""
    folder_links: tuple[str, ...]
    """Links to directories: a digest does not descend into them."""


def list_tree(root: Path, max_files: int) -> Tree:
    """The files of a task directory. `root` is resolved. Raises FormatError for links that lead out or in circles."""
    paths: list[str] = []
    links: list[str] = []
    targets: dict[str, str] = {}
    for name in (*COVERED_FILES, GITIGNORE):
        if os.path.lexists(root / name):
            _add(root, name, paths, targets)
    for top in COVERED_FOLDERS:
        if os.path.islink(root / top):
            _inside(root, top)
        for folder, folders, names in os.walk(root / top, followlinks=False):
            here = posixpath.join(top, Path(folder).relative_to(root / top).as_posix())
            here = posixpath.normpath(here)
            for name in folders:
                if os.path.islink(os.path.join(folder, name)):
                    target = _inside(root, f"{here}/{name}")
                    if target == "." or f"{here}/".startswith(f"{target}/"):
                        raise FormatError(f"{ascii(f'{here}/{name}')} is a link to a directory above it; remove it")
                    links.append(f"{here}/{name}")
            for name in names:
                _add(root, f"{here}/{name}", paths, targets)
            if len(paths) > max_files:
                raise FormatError(f"{root} has more than {max_files} files")
    return Tree(tuple(paths), targets, tuple(links))


def _add(root: Path, path: str, paths: list[str], targets: dict[str, str]) -> None:
    target = _inside(root, path)
    if not stat.S_ISREG(os.stat(root / target).st_mode):
        raise FormatError(f"{ascii(path)} is not a regular file; remove it")
    paths.append(path)
    if target != path:
        targets[path] = target


def _inside(root: Path, path: str) -> str:
    """Where a path leads, relative to the root."""
    try:
        real = (root / path).resolve(strict=True)
    except (OSError, RuntimeError):
        raise FormatError(f"{ascii(path)} is a link to nothing; remove it") from None
    if not real.is_relative_to(root):
        raise FormatError(f"{ascii(path)} leads out of the task directory; copy the file in")
    return real.relative_to(root).as_posix()


def directory_digest(path: Path, max_files: int = 1_000_000) -> str:
    """The digest of a task directory, of any size; files are read in pieces. Raises FormatError."""
    root = path.resolve()
    tree = list_tree(root, max_files)
    names = (GITIGNORE, HARBORIGNORE)
    rules = {path: (root / path).read_bytes() for path in tree.paths if posixpath.basename(path) in names}
    hashes = {}
    for name in covered_paths(list(tree.paths), rules, tree.targets):
        with open(root / name, "rb") as file:
            hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digest_of_hashes(hashes)
