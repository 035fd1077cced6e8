"""`rsi pool` on a real pool, with hostile content in it."""

import json
from pathlib import Path

import pytest

from rsi.cli import main
from rsi.harbor.dataset import parse_dataset, task_folders
from rsi.harbor.task import new_task_files, read_task, task_from_files
from rsi.pool import Pool, PoolConfig
from rsi.report.pool import children, pool_rows
from rsi.types import Lineage, Task

EVIL = "Sort \x1b[2Jin.txt.\n"


def task(instruction: str, lineage: Lineage) -> Task:
    files = {**new_task_files("t"), "instruction.md": instruction.encode(), "solution/solve.sh": b"#!/bin/bash\ntrue\n"}
    made = task_from_files(files)
    return Task(made.id, "terminal", made.instruction, made.files, lineage=lineage)


SEED = task("Seed.\n", Lineage())
CHILD = task(EVIL, Lineage(SEED.id, "a-1", 1))
GRANDCHILD = task("Grandchild.\n", Lineage(CHILD.id, "a-2", 0))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    pool = Pool(PoolConfig(), tmp_path / "pool")
    pool.add(SEED, 0)
    evidence = {
        "assignment": {"id": "a-1", "direction": "harden", "pass_rate": 0.9},
        "gates": [{"name": "build", "passed": True, "reason": ""}],
        "calibration": {"decision": "accept", "ci95": [0.15, 0.85], "attempts": ["x"]},
    }
    pool.add(CHILD, 2, [1.0, 0.0], evidence=evidence)
    pool.add(GRANDCHILD, 3, [0.5, 0.25])
    pool.review(GRANDCHILD.id, [1.0, 1.0], 4)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["pool", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_ls_lists_what_was_admitted(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed, child, gone = map(json.loads, run(capsys, "ls", run_dir, "--json").splitlines())
    assert (seed["parent"], seed["attempts"], seed["pass_rate"]) == (None, 0, None)
    assert (child["parent"], child["step"], child["revision"], child["pass_rate"]) == (SEED.id, 2, 1, 0.5)
    assert (gone["evicted"], gone["reason"]) == (4, "too easy: mean 1.00 over 2 attempts")


def test_ls_shows_a_table_to_a_person(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, "ls", run_dir)
    assert all(word in shown for word in ("environment", "seed", "harden", "50%", "step 4"))


def test_show_tells_lineage_gates_calibration_history_and_files(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = run(capsys, "show", run_dir, CHILD.id[7:15])
    assert "harden the parent, whose pass rate was 0.90; revision 1" in shown
    assert "build: passed" in shown and "1.00 0.00: mean 0.50 [0.15, 0.85]" in shown
    assert "solution/solve.sh (17)" in shown and "\x1b" not in shown and "\\u001b[2Jin.txt" in shown
    found = json.loads(run(capsys, "show", run_dir, GRANDCHILD.id, "--json"))
    assert found["lineage"] == [GRANDCHILD.id, CHILD.id, SEED.id]
    assert [event["event"] for event in found["history"]] == ["evicted"]


def test_show_prints_a_file_that_no_terminal_obeys(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "show", run_dir, CHILD.id, "--file", "instruction.md") == "Sort \\u001b[2Jin.txt.\n\n"
    assert main(["pool", "show", str(run_dir), CHILD.id, "--file", "../journal.jsonl"]) == 2
    assert "is no file of it; there are" in capsys.readouterr().err


def test_graph_is_a_tree_from_parents_to_children(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(map(json.loads, run(capsys, "graph", run_dir, "--json").splitlines()))
    roots, below = children(rows)
    assert [row["task"] for row in roots] == [SEED.id] and [row["task"] for row in below[CHILD.id]] == [GRANDCHILD.id]
    tree = run(capsys, "graph", run_dir).splitlines()
    assert [line.index("──") for line in tree[1:]] == [1, 5, 9] and "(gone)" in tree[3]
    assert f'"{SEED.id[7:19]}" -> "{CHILD.id[7:19]}" [label="harden"];' in run(capsys, "graph", run_dir, "--dot")


def test_export_writes_harbor_tasks_that_are_the_same_tasks(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    assert run(capsys, "export", run_dir, "--harbor", target) == f"2 environments in {target}\n"
    assert {read_task(folder).id for folder in task_folders(target)} == {SEED.id, CHILD.id}
    dataset, unknown = parse_dataset((target / "dataset.toml").read_bytes())
    assert {ref.digest for ref in dataset.tasks} == {SEED.id, CHILD.id} and not unknown
    assert main(["pool", "export", str(run_dir), "--harbor", str(target)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert run(capsys, "export", run_dir, "--harbor", tmp_path / "all", "--evicted").startswith("3 environments")


def test_a_name_that_begins_no_or_many_ids_is_told_where_they_are_listed(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, said in (("zz", "no environment begins so"), ("", "3 environments begin so")):
        assert main(["pool", "show", str(run_dir), name]) == 2
        assert said in capsys.readouterr().err


def test_rows_follow_the_newest_measurement() -> None:
    lineage = {"parent": "sha256:aa", "assignment": "a1", "revision": 1}
    admitted = {"event": "admitted", "domain": "terminal", "lineage": lineage, "step": 2, "rewards": [1.0, 0.0]}
    about = {"step": 5, "task": "sha256:bb"}
    recorded = {**about, "event": "recorded", "rewards": [1.0, 1.0]}
    reviewed = {**about, "event": "reviewed", "rewards": [0.25], "outside": None}
    evicted = {**about, "event": "evicted", "rewards": [0.0, 0.0], "reason": "too hard"}
    [row] = pool_rows([about | admitted, recorded])
    assert (row["attempts"], row["pass_rate"], row["evicted"]) == (4, 0.75, None)
    [row] = pool_rows([about | admitted, recorded, reviewed])
    assert (row["attempts"], row["pass_rate"]) == (1, 0.25)
    [row] = pool_rows([about | admitted, recorded, evicted])
    assert (row["attempts"], row["pass_rate"], row["evicted"]) == (2, 0.0, 5)


def test_a_folder_without_a_pool_is_told_what_to_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "ls", str(tmp_path)]) == 2
    assert "name a run directory" in capsys.readouterr().err
