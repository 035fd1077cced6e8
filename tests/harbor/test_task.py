import os
from pathlib import Path

import pytest

from rsi.harbor.task import (
    DOCKERFILE,
    MAX_FILE_BYTES,
    MAX_FILES,
    TaskError,
    digest,
    files_from_entries,
    new_task_files,
    read_config,
    read_task,
    strip_canary,
    task_from_files,
    task_from_json,
    task_to_json,
    task_toml,
    write_task,
)
from rsi.sandbox import Entry
from rsi.types import Lineage, TaskLimits


def files(**changed: bytes) -> dict[str, bytes]:
    return {
        **new_task_files("sort-names"),
        "instruction.md": b"Sort kamo.txt into rilo.txt.\n",
        "environment/files/kamo.txt": b"b\na\n",
        "solution/solve.sh": b"#!/bin/bash\nset -e\nsort kamo.txt > rilo.txt\n",
        "tests/test_outputs.py": b"def test_a():\n    pass\n",
    } | changed


def test_a_generated_task_is_read_with_its_explicit_limits() -> None:
    task = task_from_files(files(), "terminal", Lineage("sha256:1", "a-2", 1))
    assert task.instruction == "Sort kamo.txt into rilo.txt."
    assert task.limits == TaskLimits()
    assert (task.workdir, task.domain, task.lineage.assignment) == ("/app", "terminal", "a-2")
    assert task.under("environment/files") == {"kamo.txt": b"b\na\n"}


def test_the_digest_is_harbors() -> None:
    # By hand: sha256 of `instruction.md NUL sha256hex("a") LF tests/t NUL sha256hex("") LF`.
    assert (
        digest({"tests/t": b"", "instruction.md": b"a"})
        == "sha256:"
        + __import__("hashlib")
        .sha256(
            b"instruction.md\0ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb\n"
            b"tests/t\0e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\n"
        )
        .hexdigest()
    )


def test_what_the_digest_does_not_cover_is_not_part_of_the_task() -> None:
    extra = {"notes.txt": b"x", "environment/files/.kamo.swp": b"x", "tests/__pycache__/a.pyc": b"x", "a/b": b"x"}
    task = task_from_files({**files(), **extra})
    assert task.id == task_from_files(files()).id
    assert not extra.keys() & task.files.keys()


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "tests/../../x", "a//b", "./a", "a/", "", ".", "a\nb", "a\0b", "\ud800"]
)
def test_a_path_that_is_not_relative_and_plain_is_refused(path: str) -> None:
    with pytest.raises(TaskError, match="the (path|file name)"):
        task_from_files({**files(), path: b"x"})


@pytest.mark.parametrize(
    "missing", ["task.toml", "instruction.md", "environment/Dockerfile", "solution/solve.sh", "tests/test.sh"]
)
def test_a_missing_file_is_named(missing: str) -> None:
    left = {path: content for path, content in files().items() if path != missing}
    with pytest.raises(TaskError, match=f"^{missing} is missing$"):
        task_from_files(left)


@pytest.mark.parametrize(
    "toml, complaint",
    [
        (b"x = " + b"[" * 5000 + b"]" * 5000, "nested|cannot be read"),
        (b"a." * 4000 + b"a = 1", "more than 64 dots"),
        (b"\xff\xfe", "not utf-8"),
        (b"x = 1\nx = 2", "cannot be read"),
        (b"#" * 70000, "70000 bytes"),
        (b"[agent]\ntimeout_sec = nan", "agent.timeout_sec is not a positive finite number"),
        (b"[agent]\ntimeout_sec = -1", "agent.timeout_sec is not a positive finite number"),
        (b"[agent]\ntimeout_sec = 1" + b"0" * 400, "agent.timeout_sec is not a positive finite number"),
        (b"[environment]\ncpus = true", "environment.cpus is not a number"),
        (b"[environment]\nmemory = 'lots'", "environment.memory is not a size"),
        (b"environment = 3", "environment is not a table"),
        (b"[[steps]]\nname = 'a'", "multi-step"),
        (b"[environment]\nworkdir = '/tests'", "belongs to the system"),
        (b"[environment]\nworkdir = '/'", "belongs to the system"),
        (b"[environment]\nworkdir = '/a/../b'", "not a plain path"),
    ],
)
def test_a_hostile_task_toml_is_refused_with_its_reason(toml: bytes, complaint: str) -> None:
    with pytest.raises(TaskError, match=complaint):
        task_from_files(files(**{"task.toml": toml}))


def test_limits_are_clamped_and_unknown_keys_ignored() -> None:
    toml = b"""mystery = 1
[agent]
timeout_sec = 1e9
[environment]
memory = "900G"
storage_mb = 1
cpus = 2
"""
    limits = task_from_files(files(**{"task.toml": toml})).limits
    assert limits == TaskLimits(agent_timeout_s=600, memory_mb=4096, storage_mb=8, cpus=2)


@pytest.mark.parametrize(
    "instruction, complaint", [(b" \n", "empty"), (b"a\0b", "NUL"), (b"\xff", "utf-8"), (b"# canary 1\n\n", "empty")]
)
def test_an_instruction_that_says_nothing_is_refused(instruction: bytes, complaint: str) -> None:
    with pytest.raises(TaskError, match=complaint):
        task_from_files(files(**{"instruction.md": instruction}))


def test_too_many_and_too_large_files_are_refused() -> None:
    with pytest.raises(TaskError, match=f"at most {MAX_FILES}"):
        task_from_files({**files(), **{f"tests/{i}": b"" for i in range(MAX_FILES)}})
    with pytest.raises(TaskError, match=f"tests/big has {MAX_FILE_BYTES + 1} bytes"):
        task_from_files({**files(), "tests/big": b"x" * (MAX_FILE_BYTES + 1)})
    with pytest.raises(TaskError, match="the task has"):
        task_from_files({**files(), **{f"tests/{i}": b"x" * MAX_FILE_BYTES for i in range(5)}})


def test_a_path_that_is_file_and_directory_is_refused() -> None:
    with pytest.raises(TaskError, match="tests/a is both"):
        task_from_files({**files(), "tests/a": b"", "tests/a/b": b""})


def test_files_that_steer_the_digest_are_refused() -> None:
    for path in (".gitignore", "tests/.harborignore"):
        with pytest.raises(TaskError, match="is not supported"):
            task_from_files({**files(), path: b"*"})


def test_leading_canary_lines_are_stripped_and_later_ones_kept() -> None:
    assert strip_canary("<!-- Canary x -->\n# a canary\n\n\nDo it.\n# canary\n") == "Do it.\n# canary\n"
    assert strip_canary("\n# canary\nDo it.") == "\n# canary\nDo it."


def test_written_tasks_read_back_and_scripts_are_executable(tmp_path: Path) -> None:
    task = task_from_files(files())
    write_task(task, tmp_path / "pool" / "t")
    write_task(task, tmp_path / "pool" / "t")
    assert read_task(tmp_path / "pool" / "t") == task
    assert (tmp_path / "pool/t/tests/test.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "pool/t/solution/solve.sh").stat().st_mode & 0o777 == 0o755
    assert [path.name for path in (tmp_path / "pool").iterdir()] == ["t"]
    other = task_from_files(files(**{"instruction.md": b"Other."}))
    with pytest.raises(FileExistsError, match="holds something else"):
        write_task(other, tmp_path / "pool" / "t")


def test_links_are_followed_inside_the_directory_and_refused_outside(tmp_path: Path) -> None:
    write_task(task_from_files(files()), tmp_path / "t")
    (tmp_path / "t/tests/inner").symlink_to("../instruction.md")
    assert read_task(tmp_path / "t").files["tests/inner"] == b"Sort kamo.txt into rilo.txt.\n"
    (tmp_path / "secret").write_text("s")
    (tmp_path / "t/tests/outer").symlink_to("../../secret")
    with pytest.raises(TaskError, match="leads out"):
        read_task(tmp_path / "t")


def test_links_to_nothing_and_fifos_are_refused(tmp_path: Path) -> None:
    write_task(task_from_files(files()), tmp_path / "t")
    (tmp_path / "t/tests/loop").symlink_to("loop")
    with pytest.raises(TaskError, match="link to nothing"):
        read_task(tmp_path / "t")
    (tmp_path / "t/tests/loop").unlink()
    os.mkfifo(tmp_path / "t/tests/fifo")
    with pytest.raises(TaskError, match="not a regular file"):
        read_task(tmp_path / "t")


def test_entries_of_a_sandbox_become_files_and_links_are_refused() -> None:
    entries = {"a": Entry("dir", 0o755), "a/b": Entry("file", 0o644, b"x")}
    assert files_from_entries(entries) == {"a/b": b"x"}
    with pytest.raises(TaskError, match="'l' is not a regular file"):
        files_from_entries({"l": Entry("link", 0o777, target="/etc/passwd")})


def test_json_records_round_trip_and_a_changed_file_is_noticed() -> None:
    task = task_from_files(files(**{"environment/files/b": b"\xff\0"}), "terminal", Lineage(revision=2))
    record = task_to_json(task)
    assert task_from_json(record) == task
    record["files"]["instruction.md"] = "Other."
    with pytest.raises(TaskError, match="but its files are"):
        task_from_json(record)
    with pytest.raises(TaskError, match="not a task"):
        task_from_json({"files": []})


def test_task_toml_holds_every_limit_and_no_network() -> None:
    config = read_config({"task.toml": task_toml("org/name", TaskLimits(cpus=0.5))})
    assert config["schema_version"] == "1.4"
    assert config["task"]["name"] == "org/name"
    assert config["environment"] == {
        "build_timeout_sec": 60.0,
        "cpus": 0.5,
        "memory_mb": 512,
        "storage_mb": 64,
        "network_mode": "no-network",
    }
    with pytest.raises(TaskError, match="not a task name"):
        task_toml('x"\ny', TaskLimits())


def test_the_workdir_comes_from_the_dockerfile() -> None:
    assert (
        task_from_files(files(**{"environment/Dockerfile": b"FROM a\nWORKDIR /srv\nWORKDIR x\n"})).workdir == "/srv/x"
    )
    assert task_from_files(files(**{"environment/Dockerfile": b"nonsense"})).workdir == "/app"
    assert DOCKERFILE == b"FROM rsi/base\nWORKDIR /app\nCOPY files/ /app/\n"
