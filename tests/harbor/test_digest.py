import hashlib
from pathlib import Path

import pytest

from rsi.harbor.digest import covered, digest, directory_digest, list_tree
from rsi.harbor.records import FormatError
from rsi.harbor.task import PEOPLE, TaskError, read_task, write_task

TASK = {
    "task.toml": b'[environment]\nnetwork_mode = "no-network"\n',
    "instruction.md": b"Do it.",
    "environment/Dockerfile": b"FROM rsi/base\nWORKDIR /app\n",
    "tests/test.sh": b"#!/bin/bash\n",
    "solution/solve.sh": b"true\n",
}


def write(root: Path, files: dict[str, bytes]) -> Path:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return root


def test_a_gitignore_replaces_the_defaults() -> None:
    files = {**TASK, "tests/a.pyc": b"1", "tests/__pycache__/b": b"2", "tests/keep.log": b"3", "README.md": b"r"}
    assert set(covered(files)) == {*TASK, "tests/keep.log", "README.md"}
    ruled = {**files, ".gitignore": b"*.log\n/README.md\n"}
    assert set(covered(ruled)) == {*TASK, "tests/a.pyc", "tests/__pycache__/b"}


def test_harborignore_counts_below_tests_and_solution_alone() -> None:
    files = {
        **TASK,
        "tests/.harborignore": b"data/\n!data/keep\n*.tmp\n!kept.tmp\n",
        "tests/data/x": b"",
        "tests/data/keep": b"",  # its directory is out, so it is too
        "tests/a.tmp": b"",
        "tests/kept.tmp": b"",
        "tests/sub/.harborignore": b"!b.tmp\n/c\n",
        "tests/sub/b.tmp": b"",
        "tests/sub/c": b"",
        "tests/c": b"",
        "environment/.harborignore": b"*\n",
        "environment/a.tmp": b"",
        "steps/one/tests/.harborignore": b"z\n",
        "steps/one/tests/z": b"",
        "steps/one/z": b"",
    }
    kept = {"tests/kept.tmp", "tests/sub/b.tmp", "tests/c", "environment/a.tmp", "steps/one/z"}
    assert set(covered(files)) == {*TASK, *kept}


def test_the_digest_of_a_directory_is_that_of_its_files(tmp_path: Path) -> None:
    files = {**TASK, "tests/ü/日本": b"u", "tests/.harborignore": b"no\n", "tests/no": b"n", "notes.txt": b"x"}
    root = write(tmp_path / "t", files)
    assert directory_digest(root) == digest(files) == read_task(root, bounds=PEOPLE).id
    (root / "tests/test.sh").chmod(0o777)
    (root / "environment/empty").mkdir()
    assert directory_digest(root) == digest(files)


def test_links_to_files_are_followed_and_ignored_by_what_they_are_and_lead_to(tmp_path: Path) -> None:
    root = write(tmp_path / "t", {**TASK, "tests/.harborignore": b"hidden\n", "tests/hidden": b"h"})
    (root / "tests/link").symlink_to("../instruction.md")
    (root / "tests/shown").symlink_to("hidden")
    (root / "environment/folder").symlink_to("../solution")
    assert directory_digest(root) == digest({**TASK, "tests/link": b"Do it."})
    with pytest.raises(TaskError, match="'environment/folder' is a link to a directory"):
        read_task(root, bounds=PEOPLE)


def test_a_whole_folder_may_be_a_link(tmp_path: Path) -> None:
    root = write(tmp_path / "t", {path: content for path, content in TASK.items() if not path.startswith("tests/")})
    write(root, {"shared/test.sh": b"#!/bin/bash\n"})
    (root / "tests").symlink_to("shared")
    assert directory_digest(root) == digest(TASK)


@pytest.mark.parametrize(
    "link, target, complaint",
    [
        ("tests/out", "/etc/hostname", "leads out"),
        ("tests/gone", "nothing", "link to nothing"),
        ("tests/self", "self", "link to nothing"),
        ("tests/up", "..", "link to a directory above it"),
        ("solution/dir", "/etc", "leads out"),
    ],
)
def test_links_that_lead_out_or_in_circles_are_refused(tmp_path: Path, link: str, target: str, complaint: str) -> None:
    root = write(tmp_path / "t", TASK)
    (root / link).symlink_to(target)
    with pytest.raises(FormatError, match=complaint):
        list_tree(root, 100)


def test_a_task_with_a_gitignore_keeps_its_id_on_the_way_to_disk_and_back(tmp_path: Path) -> None:
    root = write(tmp_path / "t", {**TASK, ".gitignore": b"*.log\n", "tests/x.pyc": b"p", "tests/a.log": b"l"})
    task = read_task(root, bounds=PEOPLE)
    assert "tests/x.pyc" in task.files and "tests/a.log" not in task.files
    write_task(task, tmp_path / "copy")
    assert read_task(tmp_path / "copy", bounds=PEOPLE) == task
    assert directory_digest(tmp_path / "copy") == task.id


def test_a_broken_ignore_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="tests/.harborignore is not utf-8"):
        covered({**TASK, "tests/.harborignore": b"\xff"})


def test_the_formula_by_hand() -> None:
    line = b"task.toml\0" + hashlib.sha256(b"x").hexdigest().encode() + b"\n"
    assert digest({"task.toml": b"x", "notes": b"y"}) == "sha256:" + hashlib.sha256(line).hexdigest()
