"""A pool, read from its journal and directories: what `rsi pool` shows and exports.

Nothing here needs the run to be over, or its checkpoint. What a model wrote is shown with its control characters
escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rsi.harbor.dataset import DatasetInfo, dataset_of, dataset_toml, task_folders
from rsi.pool import JOURNAL, read_journal, task_folder

Event = Mapping[str, Any]


def open_journal(run_dir: Path) -> tuple[Path, list[dict[str, Any]]]:
    """(the pool's directory, its events) of a run directory or of a pool's. Raises ValueError where there is none."""
    for root in (run_dir / "pool", run_dir):
        if (root / JOURNAL).is_file():
            return root, read_journal(root)
    raise ValueError(f"{run_dir / 'pool' / JOURNAL} is missing; name a run directory, for example runs/tiny_cpu")


def pool_rows(events: Sequence[Event]) -> list[dict[str, Any]]:
    """One row for each admission, in order, from the events of a pool's journal.

    attempts and pass_rate are of the newest measurement and what was recorded after it; evicted is a step or None, and
    reason says why.
    """
    rows: list[dict[str, Any]] = []
    newest: dict[str, dict[str, Any]] = {}
    rewards: dict[str, list[float]] = {}
    for event in events:
        task = event["task"]
        if event["event"] == "admitted":
            lineage = event["lineage"]
            newest[task] = {
                "task": task,
                "step": event["step"],
                "domain": event["domain"],
                "parent": lineage["parent"],
                "direction": event.get("assignment", {}).get("direction"),
                "revision": lineage["revision"],
                "evicted": None,
                "reason": "",
            }
            rows.append(newest[task])
        elif event["event"] == "evicted":
            newest[task] |= {"evicted": event["step"], "reason": event["reason"]}
        before = rewards[task] if event["event"] == "recorded" else []
        rewards[task] = [*before, *event["rewards"]]
        seen = rewards[task]
        newest[task] |= {"attempts": len(seen), "pass_rate": sum(seen) / len(seen) if seen else None}
    return rows


def find_task(rows: Sequence[Event], name: str) -> str:
    """The id that `name` begins, with or without `sha256:`. Raises ValueError where that is none or several."""
    ids = sorted({row["task"] for row in rows if short(row["task"], 64).startswith(name.removeprefix("sha256:"))})
    if len(ids) == 1:
        return ids[0]
    found = f"{len(ids)} environments begin so" if ids else "no environment begins so"
    raise ValueError(f"{name!r}: {found}; `rsi pool ls` lists them")


def describe_task(root: Path, events: Sequence[Event], task: str) -> dict[str, Any]:
    """What there is to know of one task: its lineage (itself first), admission, history, and the sizes of its files."""
    parents = {event["task"]: event["lineage"]["parent"] for event in events if event["event"] == "admitted"}
    lineage = [task]
    while (parent := parents.get(lineage[-1])) and parent not in lineage:
        lineage.append(parent)
    history = [dict(event) for event in events if event["event"] != "admitted" and event["task"] == task]
    admitted = next(dict(event) for event in events if event["event"] == "admitted" and event["task"] == task)
    folder = task_folder(root, task)
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*"))}
    return {"task": task, "lineage": lineage, "admitted": admitted, "history": history, "files": files}


def children(rows: Sequence[Event]) -> tuple[list[Event], dict[str, list[Event]]]:
    """(the rows without a parent in the pool, the rows below each task), one row a task."""
    rows = list({row["task"]: row for row in rows}.values())
    known = {row["task"] for row in rows}
    below: dict[str, list[Event]] = {}
    for row in rows:
        if row["parent"] in known and row["parent"] != row["task"]:
            below.setdefault(row["parent"], []).append(row)
    return [row for row in rows if row["parent"] not in known], below


def dot(rows: Sequence[Event]) -> Iterator[str]:
    """The lineage as a Graphviz graph, a line at a time."""
    yield "digraph pool {"
    yield "  node [shape=box];"
    for row in rows:
        style = ", style=dashed" if row["evicted"] is not None else ""
        yield f'  "{short(row["task"])}" [label="{label(row)}"{style}];'
        if row["parent"]:
            yield f'  "{short(row["parent"])}" -> "{short(row["task"])}" [label="{row["direction"] or ""}"];'
    yield "}"


def label(row: Event) -> str:
    rate = "unmeasured" if row["pass_rate"] is None else f"{row['pass_rate']:.0%}"
    return f"{short(row['task'])} {rate}"


def export(root: Path, rows: Sequence[Event], target: Path, evicted: bool = False) -> int:
    """Copy the active tasks (`evicted`: all) to `target` as a Harbor dataset: their directories and dataset.toml, which
    holds their digests. Returns how many; `target` must be new."""
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} is not empty; name a directory that does not exist yet")
    chosen = {row["task"]: row for row in rows if evicted or row["evicted"] is None}
    for task in chosen:
        folder = task_folder(root, task)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                copy = target / folder.name / path.relative_to(folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
                copy.chmod(path.stat().st_mode & 0o777)
    target.mkdir(parents=True, exist_ok=True)
    dataset = dataset_of(DatasetInfo("rsi/pool", description="Exported by rsi pool export."), task_folders(target))
    (target / "dataset.toml").write_bytes(dataset_toml(dataset))
    return len(chosen)


def short(task: str, length: int = 12) -> str:
    return task.removeprefix("sha256:")[:length]


def printable(text: str) -> str:
    """Control characters (a terminal would obey them) and broken surrogates as escapes."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else json.dumps(sign)[1:-1] for sign in text)
