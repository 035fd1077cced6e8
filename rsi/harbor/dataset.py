"""Sets of tasks: `dataset.toml` with its hash, the older `registry.json`, and folders of task directories."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w

from rsi.harbor.config import Author, check_name, read_toml
from rsi.harbor.digest import directory_digest
from rsi.harbor.records import FormatError, plain, read_json, read_record
from rsi.harbor.task import PEOPLE, read_task, task_config
from rsi.types import Task

MAX_DATASET_BYTES = 16 << 20
_DIGEST = re.compile(r"sha256:[a-f0-9]{64}")


@dataclass(frozen=True)
class DatasetInfo:
    name: str
    version: str | None = None
    description: str = ""
    authors: tuple[Author, ...] = ()
    keywords: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.version == "":
            raise ValueError("version is empty; write a label or leave it out")


@dataclass(frozen=True)
class TaskRef:
    """A task and the digest that it must have."""

    name: str
    digest: str

    def __post_init__(self) -> None:
        check_name(self.name)
        _check_digest(self.digest)


@dataclass(frozen=True)
class FileRef:
    """A file beside dataset.toml, such as a metric; its digest may be left out until it is published."""

    path: str
    digest: str = ""

    def __post_init__(self) -> None:
        if "/" in self.path or "\\" in self.path:
            raise ValueError(f"{ascii(self.path)} is not a bare file name; put the file beside dataset.toml")
        if self.digest:
            _check_digest(self.digest)


@dataclass(frozen=True)
class Dataset:
    """dataset.toml."""

    dataset: DatasetInfo
    schema_version: str = "1.0"
    tasks: tuple[TaskRef, ...] = ()
    files: tuple[FileRef, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content_hash(self) -> str:
        """64 hex digits over the sorted digests of tasks and files; names of tasks are not covered."""
        text = ",".join(sorted(task.digest.removeprefix("sha256:") for task in self.tasks))
        if self.files:
            text += ";" + ",".join(sorted(f"{f.path}:{f.digest.removeprefix('sha256:')}" for f in self.files))
        return hashlib.sha256(text.encode()).hexdigest()

    def check(self, task: Task) -> None:
        """Raise FormatError unless the dataset has exactly this task."""
        package = task_config(task).task
        if package is None:
            raise FormatError(f"a task without a name is not in {self.dataset.name}; write task.name")
        wanted = [ref.digest for ref in self.tasks if ref.name == package.name]
        if task.id not in wanted:
            expected = f"has {wanted[0]}" if wanted else "does not have it"
            raise FormatError(f"{package.name} is {task.id}, but {self.dataset.name} {expected}; download it again")


def _check_digest(digest: str) -> None:
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{ascii(digest[:80])} is not a digest; write sha256: and 64 hex digits")


def parse_dataset(content: bytes) -> tuple[Dataset, tuple[str, ...]]:
    """dataset.toml, and the keys in it that nobody knows. Raises FormatError."""
    unknown: list[str] = []
    # A line may hold a whole inline list of references; digests have no dots, names few.
    table = read_toml(content, "dataset.toml", MAX_DATASET_BYTES)
    return read_record(Dataset, table, unknown=unknown), tuple(unknown)


def dataset_toml(dataset: Dataset) -> bytes:
    table = plain(dataset, keep_empty=False)
    order = ("schema_version", "dataset", "tasks", "files", "metadata")
    return tomli_w.dumps({key: table[key] for key in order if key in table}).encode()


def dataset_of(info: DatasetInfo, folders: Sequence[Path], files: Sequence[Path] = ()) -> Dataset:
    """The dataset of these task directories and files. Raises FormatError for a task without a name."""
    refs = []
    for folder in folders:
        package = task_config(read_task(folder, bounds=PEOPLE)).task
        if package is None:
            raise FormatError(f"{folder} has no task.name; a dataset names its tasks")
        refs.append(TaskRef(package.name, directory_digest(folder)))
    hashes = [FileRef(path.name, "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
    return Dataset(info, tasks=tuple(refs), files=tuple(hashes))


def task_folders(path: Path) -> list[Path]:
    """`path` where it is a task directory, else those of its children that are, in order of name. They may still be
    broken: reading them says so."""
    return [folder for folder in [path, *sorted(path.iterdir())] if (folder / "task.toml").is_file()]


# ---- registry.json ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RegistryTask:
    name: str
    path: str
    git_url: str | None = None
    git_commit_id: str | None = None


@dataclass(frozen=True)
class MetricRef:
    type: Literal["sum", "min", "max", "mean", "uv-script"] = "mean"
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RegistryDataset:
    name: str
    version: str
    description: str
    tasks: tuple[RegistryTask, ...]
    metrics: tuple[MetricRef, ...] = ()


def parse_registry(content: bytes) -> tuple[RegistryDataset, ...]:
    """The datasets of a registry.json. Raises FormatError."""
    rows = read_json(content, "registry.json", MAX_DATASET_BYTES)
    if not isinstance(rows, list):
        raise FormatError("registry.json is not a list of datasets")
    return tuple(read_record(RegistryDataset, row, f"registry.json[{i}]", unknown=[]) for i, row in enumerate(rows))


def find_dataset(datasets: Sequence[RegistryDataset], wanted: str) -> RegistryDataset:
    """`name@version`, or `name` for the last of that name. Raises FormatError."""
    name, _, version = wanted.partition("@")
    found = [each for each in datasets if each.name == name and version in ("", each.version)]
    if not found:
        known = ", ".join(sorted({f"{each.name}@{each.version}" for each in datasets}))
        raise FormatError(f"the registry has no {wanted}; it has {known or 'nothing'}")
    return found[-1]
