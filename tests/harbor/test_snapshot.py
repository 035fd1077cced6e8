import gzip
import io
import tarfile
from pathlib import Path

import pytest

from rsi.harbor.snapshot import MAX_TESTS, num_tests, snapshot_tests
from rsi.harbor.task import TaskError
from rsi.harbor.verify import run_plain
from rsi.sandbox import Entry


def file(content: bytes, mode: int = 0o644) -> Entry:
    return Entry("file", mode, content)


def folder() -> Entry:
    return Entry("dir", 0o755)


def tar(members: dict[str, bytes], compress: bool = False, mtime: int = 0) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), mtime
            archive.addfile(member, io.BytesIO(content))
    return gzip.compress(out.getvalue(), mtime=mtime) if compress else out.getvalue()


def lay(entries: dict[str, Entry], root: Path) -> None:
    root.mkdir(parents=True)
    for path, entry in sorted(entries.items()):
        target = root / path
        if entry.kind == "dir":
            target.mkdir()
        elif entry.kind == "link":
            target.symlink_to(entry.target)
        else:
            target.write_bytes(entry.content)
        if entry.kind != "link":
            target.chmod(entry.mode)


def failures(
    tests: dict[str, bytes], entries: dict[str, Entry], root: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The messages of the tests that fail in a workdir of these entries."""
    lay(entries, root / "app")
    for name, content in tests.items():
        (root / name).write_bytes(content)
    monkeypatch.chdir(root / "app")
    monkeypatch.syspath_prepend(str(root))
    return [str(test["message"]) for test in run_plain(str(root / "test_outputs.py")) if test["status"] != "passed"]


BEFORE = {"kamo.txt": file(b"b\na\n"), "old": folder(), "old/x.txt": file(b"x"), "key.txt": file(b"k")}
AFTER = {
    "kamo.txt": file(b"b\na\n"),
    "rilo.txt": file(b"a\nb\n"),
    "key.txt": file(b"k", 0o600),
    "new": folder(),
    "new/deep.bin": file(b"\0\1"),
    "empty": folder(),
    "long.txt": file(b"line\n" * 2000),
    "up": Entry("link", 0o777, target="kamo.txt"),
    "all.tar.gz": file(tar({"a.txt": b"a", "b.txt": b"b"}, compress=True)),
}


def test_there_is_one_test_for_each_path_that_no_other_test_implies() -> None:
    tests = snapshot_tests(BEFORE, AFTER)
    assert set(tests) == {"test.sh", "verify.py", "test_outputs.py"}
    source = tests["test_outputs.py"].decode()
    functions = [line for line in source.splitlines() if line.startswith("def ")]
    names = ["all_tar_gz", "empty", "key_txt", "long_txt", "new_deep_bin", "old", "rilo_txt", "up"]
    assert functions == [f"def test_{name}():" for name in names]
    assert num_tests(tests) == 8


def test_the_reference_state_passes_and_the_initial_state_fails_every_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = snapshot_tests(BEFORE, AFTER)
    assert failures(tests, AFTER, tmp_path / "after", monkeypatch) == []
    assert failures(tests, BEFORE, tmp_path / "before", monkeypatch) == [
        "all.tar.gz is missing",
        "empty is missing",
        "key.txt has mode 0644, not 0600",
        "long.txt is missing",
        "new/deep.bin is missing",
        "old should be gone",
        "rilo.txt is missing",
        "up is missing",
    ]


def test_other_bytes_of_the_same_meaning_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = {
        **AFTER,
        "rilo.txt": file(b"a\nb"),
        "long.txt": file(b"line\n" * 1999 + b"line"),
        "all.tar.gz": file(tar({"./b.txt": b"b", "./a.txt": b"a"}, compress=True, mtime=9)),
    }
    assert failures(snapshot_tests(BEFORE, AFTER), same, tmp_path / "same", monkeypatch) == []


def test_wrong_contents_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {
        **AFTER,
        "rilo.txt": file(b"a \nb\n"),
        "long.txt": file(b"line\n" * 1999),
        "new/deep.bin": file(b"\0\1\n"),
        "all.tar.gz": file(tar({"a.txt": b"a", "b.txt": b"c"}, compress=True)),
        "up": Entry("link", 0o777, target="rilo.txt"),
    }
    assert failures(snapshot_tests(BEFORE, AFTER), wrong, tmp_path / "wrong", monkeypatch) == [
        "all.tar.gz differs",
        "long.txt differs",
        "new/deep.bin differs",
        "rilo.txt differs",
        "up differs",
    ]


def test_a_link_to_the_right_file_is_not_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = snapshot_tests({"a": file(b"x")}, {"a": file(b"x"), "b": file(b"x")})
    linked = {"a": file(b"x"), "b": Entry("link", 0o777, target="a")}
    assert failures(tests, linked, tmp_path / "l", monkeypatch) == ["b is not a file"]


def test_a_changed_mode_is_tested_beside_changed_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = snapshot_tests({}, {"run.sh": file(b"true\n", 0o755)})
    assert failures(tests, {"run.sh": file(b"true\n")}, tmp_path / "m", monkeypatch) == [
        "run.sh has mode 0644, not 0755"
    ]


def test_changes_that_no_test_could_see_are_no_changes() -> None:
    before = {"a.txt": file(b"a\n"), "b.tar": file(tar({"x": b"1"}))}
    after = {"a.txt": file(b"a"), "b.tar": file(tar({"x": b"1"}, mtime=5))}
    with pytest.raises(TaskError, match="the solution changes nothing"):
        snapshot_tests(before, after)


def test_names_that_look_alike_get_functions_of_their_own() -> None:
    source = snapshot_tests({}, {"a.b": file(b""), "a_b": file(b""), "é'\"\\": file(b"")})["test_outputs.py"].decode()
    assert "def test_a_b():" in source and "def test_a_b_2():" in source and "def test_path():" in source
    compile(source, "test_outputs.py", "exec")


def test_too_many_changes_and_a_left_fifo_are_refused() -> None:
    with pytest.raises(TaskError, match=f"changes {MAX_TESTS + 1} paths"):
        snapshot_tests({}, {f"f{i}": file(b"") for i in range(MAX_TESTS + 1)})
    with pytest.raises(TaskError, match="no file, directory or link"):
        snapshot_tests({}, {"pipe": Entry("other", 0o644)})


def test_a_sparse_bomb_is_compared_by_its_bytes() -> None:
    member = tarfile.TarInfo("x")
    member.size = 512
    member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 40)}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member, io.BytesIO(b"0\n".ljust(512, b"\0")))
    assert b"check_hash" in snapshot_tests({}, {"a.tar": file(out.getvalue())})["test_outputs.py"]


def test_a_compressed_bomb_is_compared_by_its_bytes() -> None:
    bomb = gzip.compress(bytes(40 << 20))
    assert b"check_hash" in snapshot_tests({}, {"a.gz": file(bomb)})["test_outputs.py"]
