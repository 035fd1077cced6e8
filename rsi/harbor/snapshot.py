"""Tests written from what the reference solution changed: the workdir before it ran, and after.

One plain function a path, so that the solver's reward counts paths got right. Left out is what another test implies or
what would be free credit: the directories above a tested file, and what lay below a removed directory.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping

from rsi.harbor.task import MAX_FILE_BYTES, TaskError, verifier_files
from rsi.harbor.verify import archive_members, plain_text, sha256
from rsi.sandbox import Entry

MAX_TESTS = 64
MAX_INLINE_BYTES = 4 << 10
"""Longer texts are compared by hash, which keeps the tests readable."""
PLAIN_MODES: Mapping[str, int] = {"file": 0o644, "dir": 0o755}
"""What a new path has under umask 022; another mode was meant, and is tested."""

Call = tuple[str, ...]
"""A check function of verify.py and its arguments after the path, as source."""


def snapshot_tests(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> dict[str, bytes]:
    """The files of tests/ for a reference that turned `before` into `after` (workdirs, by relative path).

    Raises TaskError where nothing changed, or more than MAX_TESTS paths did.
    """
    changes = dict(_changes(before, after))
    if not changes:
        raise TaskError("the solution changes nothing; make solution/solve.sh write, change or remove a file")
    if len(changes) > MAX_TESTS:
        raise TaskError(f"the solution changes {len(changes)} paths; at most {MAX_TESTS} are tested, change fewer")
    names: set[str] = set()
    functions = [_function(_name(path, names), path, calls) for path, calls in changes.items()]
    used = sorted({call[0] for calls in changes.values() for call in calls})
    header = f'"""What the reference solution leaves."""\n\nfrom verify import {", ".join(used)}\n'
    source = "\n\n".join([header, *functions]).encode()
    if len(source) > MAX_FILE_BYTES:
        raise TaskError(f"the tests would have {len(source)} bytes; at most {MAX_FILE_BYTES} are allowed, change less")
    return {**verifier_files(), "test_outputs.py": source}


def num_tests(files: Mapping[str, bytes]) -> int:
    """How many tests `snapshot_tests` wrote."""
    return files["test_outputs.py"].count(b"\ndef test_")


def _changes(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> Iterator[tuple[str, list[Call]]]:
    """(path, its checks) for each path that needs a test, in order of path."""
    checks = {path: _checks(path, before.get(path), entry) for path, entry in after.items()}
    tested = [path for path, calls in checks.items() if calls and after[path].kind != "dir"]
    holders = {parent for path in tested for parent in _above(path)}
    gone = {path for path in before if path not in after}
    for path in sorted({*checks, *gone}):
        if path in gone:
            if not gone.intersection(_above(path)):
                yield path, [("check_gone",)]
        elif calls := [call for call in checks[path] if call != ("check_folder",) or path not in holders]:
            yield path, calls


def _checks(path: str, old: Entry | None, new: Entry) -> list[Call]:
    """The checks that `new` passes; empty where `old` would pass them all."""
    if new.kind == "other":
        raise TaskError(f"the solution leaves {path}, which is no file, directory or link; remove it at the end")
    calls: list[Call] = []
    content = _content_check(path, new)
    if old is None or _content_check(path, old) != content:
        calls.append(content)
    old_mode = old.mode if old is not None and old.kind == new.kind else PLAIN_MODES.get(new.kind, new.mode)
    if new.kind != "link" and new.mode & 0o7777 != old_mode & 0o7777:
        calls.append(("check_mode", f"0o{new.mode & 0o7777:04o}"))
    return calls


def _content_check(path: str, entry: Entry) -> Call:
    if entry.kind == "dir":
        return ("check_folder",)
    if entry.kind == "link":
        return ("check_link", repr(entry.target))
    if entry.kind == "other":
        return ("other",)
    members = archive_members(path, entry.content)
    if members is not None:
        return ("check_archive", repr(members))
    text = _text(entry.content)
    if text is None:
        return ("check_hash", repr(sha256(entry.content)))
    if len(entry.content) > MAX_INLINE_BYTES:
        return ("check_text_hash", repr(sha256(plain_text(entry.content))))
    return ("check_text", repr(text.removesuffix("\n")))


def _text(content: bytes) -> str | None:
    if b"\0" in content:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def _function(name: str, path: str, calls: list[Call]) -> str:
    lines = [f"    {check}({', '.join([repr(path), *arguments])})" for check, *arguments in calls]
    return f"def {name}():\n" + "\n".join(lines) + "\n"


def _name(path: str, taken: set[str]) -> str:
    """A function name for a path, unlike those `taken` so far."""
    stem = "test_" + (re.sub(r"[^a-zA-Z0-9]+", "_", path).strip("_")[:60] or "path")
    name, count = stem, 1
    while name in taken:
        count += 1
        name = f"{stem}_{count}"
    taken.add(name)
    return name


def _above(path: str) -> list[str]:
    """The directories above a path, nearest first."""
    above = []
    while path := posixpath.dirname(path):
        above.append(path)
    return above
