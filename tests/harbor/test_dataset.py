import hashlib
import json
from pathlib import Path

import pytest

from rsi.harbor.dataset import (
    Dataset,
    DatasetInfo,
    FileRef,
    RegistryTask,
    TaskRef,
    dataset_of,
    dataset_toml,
    find_dataset,
    parse_dataset,
    parse_registry,
    task_folders,
)
from rsi.harbor.records import FormatError
from rsi.harbor.task import PEOPLE, new_task_files, read_task

ONE, TWO = "sha256:" + "1" * 64, "sha256:" + "2" * 64


def write_task_folder(path: Path, name: str) -> None:
    files = {**new_task_files(name), "instruction.md": b"x", "solution/solve.sh": b"true"}
    for relative, content in files.items():
        (path / relative).parent.mkdir(parents=True, exist_ok=True)
        (path / relative).write_bytes(content)


def test_the_hash_covers_sorted_digests_and_files() -> None:
    info = DatasetInfo("org/set")
    tasks = (TaskRef("org/b", TWO), TaskRef("org/a", ONE))
    assert Dataset(info, tasks=tasks).content_hash == hashlib.sha256(f"{'1' * 64},{'2' * 64}".encode()).hexdigest()
    files = (FileRef("z.py", TWO), FileRef("metric.py", ONE))
    text = f"{'1' * 64},{'2' * 64};metric.py:{'1' * 64},z.py:{'2' * 64}"
    assert Dataset(info, tasks=tasks, files=files).content_hash == hashlib.sha256(text.encode()).hexdigest()


def test_a_manifest_reads_back_and_unknown_keys_are_told() -> None:
    info = DatasetInfo("org/set", "1.0", "d", keywords=("k",))
    dataset = Dataset(info, tasks=(TaskRef("org/a", ONE),), files=(FileRef("m.py"),), metadata={"x": [1]})
    assert parse_dataset(dataset_toml(dataset)) == (dataset, ())
    assert parse_dataset(b'more = 1\n[dataset]\nname = "org/set"\n')[1] == ("more",)


@pytest.mark.parametrize(
    "toml, complaint",
    [
        ("", "dataset is missing"),
        ("[dataset]\nname = 'x'", "not a name"),
        ("[dataset]\nname = 'a/b'\n[[tasks]]\nname = 'a/b'\ndigest = 'x'", "not a digest"),
        ("[dataset]\nname = 'a/b'\n[[files]]\npath = 'a/b'", "not a bare file name"),
    ],
)
def test_a_broken_manifest_is_refused(toml: str, complaint: str) -> None:
    with pytest.raises(FormatError, match=complaint):
        parse_dataset(toml.encode())


def test_a_dataset_of_folders_knows_its_tasks_and_no_changed_one(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_task_folder(tmp_path / name, name)
    (tmp_path / "notes").mkdir()
    folders = task_folders(tmp_path)
    assert [folder.name for folder in folders] == ["a", "b"]
    assert task_folders(tmp_path / "a") == [tmp_path / "a"]
    (tmp_path / "metric.py").write_bytes(b"m")
    dataset = dataset_of(DatasetInfo("org/set"), folders, [tmp_path / "metric.py"])
    assert dataset.files == (FileRef("metric.py", "sha256:" + hashlib.sha256(b"m").hexdigest()),)
    dataset.check(read_task(tmp_path / "a", bounds=PEOPLE))
    (tmp_path / "a/instruction.md").write_bytes(b"y")
    with pytest.raises(FormatError, match="rsi/a is sha256:.* but org/set has sha256:.*download it again"):
        dataset.check(read_task(tmp_path / "a", bounds=PEOPLE))


def test_a_registry_is_searched_by_name_and_version() -> None:
    rows = [
        {"name": "s", "version": version, "description": "", "tasks": [{"name": "t", "path": "p", "git_url": "u"}]}
        for version in ("1.0", "2.0")
    ]
    registry = parse_registry(json.dumps(rows).encode())
    assert registry[0].tasks == (RegistryTask("t", "p", "u"),)
    assert find_dataset(registry, "s@1.0").version == "1.0" and find_dataset(registry, "s").version == "2.0"
    with pytest.raises(FormatError, match="has no s@3.0; it has s@1.0, s@2.0"):
        find_dataset(registry, "s@3.0")
    with pytest.raises(FormatError, match=r"registry.json\[0\].version is missing"):
        parse_registry(b'[{"name": "s"}]')
