"""The drivers against trees of plain files: what v2 does cannot be run on a hybrid host."""

from __future__ import annotations

from pathlib import Path

import pytest

from rsi.sandbox import Limits, SandboxError
from rsi.sandbox.cgroups import Groups, find_driver

LIMITS = Limits(cpus=1.5, memory_mb=512, pids=128, disk_mb=64)
SHM = 16 << 20
MEMORY = str((512 + 64 + 16) << 20)


def v2_tree(root: Path, controllers: str) -> None:
    (root / "cgroup.controllers").write_text(controllers)
    (root / "cgroup.subtree_control").write_text("memory\n")
    (root / "cgroup.procs").write_text("")


def v1_tree(root: Path, controllers: str) -> None:
    for controller in controllers.split():
        (root / controller).mkdir()
        (root / controller / "cgroup.procs").write_text("")


def test_v2_limits_the_jobs_and_not_the_supervisor(tmp_path: Path) -> None:
    v2_tree(tmp_path, "cpuset cpu io memory pids")
    driver = find_driver(root=str(tmp_path), own={"": "/"})
    assert driver.kind == "v2" and driver.why_missing == {}
    groups = Groups(driver.layout("sbx-1", LIMITS, SHM))
    top = tmp_path / "sbx-1"
    assert (top / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    written = {path.name: path.read_text() for path in (top / "jobs").iterdir()}
    assert written == {"memory.max": MEMORY, "memory.swap.max": "0", "pids.max": "128", "cpu.max": "150000 100000"}
    assert groups.layout.supervisor == (f"{top}/init",)
    assert groups.layout.commands == f"{top}/jobs"


def test_v2_counts_oom_kills_since_the_last_look(tmp_path: Path) -> None:
    v2_tree(tmp_path, "memory")
    groups = Groups(find_driver(root=str(tmp_path), own={"": "/"}).layout("sbx-1", LIMITS, SHM))
    events = tmp_path / "sbx-1" / "jobs" / "memory.events"
    assert not groups.saw_oom()
    events.write_text("low 0\noom 3\noom_kill 1\noom_group_kill 0\n")
    assert groups.saw_oom()
    assert not groups.saw_oom()


def test_v2_says_which_controller_is_not_delegated(tmp_path: Path) -> None:
    v2_tree(tmp_path, "memory pids")
    driver = find_driver(root=str(tmp_path), own={"": "/"})
    assert set(driver.parents) == {"unified", "memory", "pids"}
    assert driver.why_missing == {"cpu": f"{tmp_path} offers no cpu controller; delegate it"}


def test_v1_uses_our_own_group_where_it_is_visible(tmp_path: Path) -> None:
    v1_tree(tmp_path, "memory pids cpu unified")
    (tmp_path / "memory" / "job").mkdir()
    (tmp_path / "memory" / "job" / "cgroup.procs").write_text("")
    driver = find_driver(root=str(tmp_path), own={"memory": "/job", "pids": "/hidden", "": "/"})
    assert driver.parents == {
        "memory": f"{tmp_path}/memory/job",
        "pids": f"{tmp_path}/pids",
        "cpu": f"{tmp_path}/cpu",
        "unified": f"{tmp_path}/unified",
    }
    layout = driver.layout("sbx-1", LIMITS, SHM)
    assert layout.values == (
        (f"{tmp_path}/memory/job/sbx-1/jobs/memory.limit_in_bytes", MEMORY),
        (f"{tmp_path}/pids/sbx-1/jobs/pids.max", "128"),
    )
    assert (f"{tmp_path}/cpu/sbx-1/cpu.cfs_quota_us", "150000") in layout.optional
    assert layout.jobs == (f"{tmp_path}/memory/job/sbx-1/jobs", f"{tmp_path}/pids/sbx-1/jobs")
    assert layout.supervisor[-1] == f"{tmp_path}/unified/sbx-1/init"


def test_no_cgroups_says_why(tmp_path: Path) -> None:
    assert find_driver(enabled=False).why_missing["memory"] == "sandbox.cgroups is False; set it to True"
    driver = find_driver(root=str(tmp_path), own={})
    assert driver.kind == "none" and set(driver.why_missing) == {"memory", "pids", "cpu"}
    assert driver.layout("sbx-1", LIMITS, SHM).directories == ()


def test_groups_that_cannot_be_made_are_a_fault_and_leave_nothing(tmp_path: Path) -> None:
    v2_tree(tmp_path, "memory")
    layout = find_driver(root=str(tmp_path), own={"": "/"}).layout("sbx-1", LIMITS, SHM)
    (tmp_path / "sbx-1").mkdir()
    (tmp_path / "sbx-1" / "init").write_text("in the way")
    with pytest.raises(SandboxError, match="cannot limit the sandbox"):
        Groups(layout)
