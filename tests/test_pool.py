import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsi.pool import JOURNAL, WEIGHT_EVEN, Pool, PoolConfig, failure, read_journal, task_folder
from rsi.types import Attempt, Group, Lineage, Stop, Task, TestResult, Trajectory, Verdict


def task(name: str, seed: bool = True, domain: str = "terminal") -> Task:
    lineage = Lineage() if seed else Lineage("sha256:parent", "a-1", 0)
    files = {"task.toml": name.encode(), "tests/test.sh": b"#!/bin/bash\n", "environment/files/b": b"\xff\0"}
    return Task(f"sha256:{name:0<64}", domain, f"Do {name}.", files, lineage=lineage)


def group(of: Task, rewards: list[float], message: str = "") -> Group:
    def attempt(reward: float) -> Attempt:
        tests = (TestResult("test_a", reward == 1.0, message),)
        return Attempt(Trajectory("t", of.id, "solver", (), Stop.DONE), Verdict(reward, tests))

    return Group("solver", of.id, tuple(map(attempt, rewards)), tuple(rewards))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_an_admitted_task_lies_on_disk_and_in_the_journal(tmp_path: Path) -> None:
    pool = Pool(PoolConfig(), tmp_path)
    assert pool.add(task("ab", seed=False), 3, [1.0, 0.0])
    assert not pool.add(task("ab", seed=False), 4)
    folder = tmp_path / "tasks" / "ab0000000000"
    assert (folder / "environment/files/b").read_bytes() == b"\xff\0"
    assert (folder / "tests/test.sh").stat().st_mode & 0o777 == 0o755
    assert read_journal(tmp_path) == [
        {
            "event": "admitted",
            "step": 3,
            "task": task("ab").id,
            "domain": "terminal",
            "lineage": {"parent": "sha256:parent", "assignment": "a-1", "revision": 0},
            "rewards": [1.0, 0.0],
            "mean": 0.5,
            "std": 0.5,
        }
    ]


def test_recorded_rewards_keep_a_window_and_the_most_common_failure(tmp_path: Path) -> None:
    pool = Pool(PoolConfig(), tmp_path)
    pool.add(task("a"), 0)
    pool.record([group(task("a"), [1.0] * 12), group(task("a"), [0.0, 0.5], "rilo.txt differs")], 1)
    pool.record([group(task("a"), [0.0], "rilo.txt is missing"), group(task("gone"), [1.0])], 2)
    (entry,) = pool.entries
    assert len(entry.rewards) == 15 and entry.mean == 12.5 / 15
    assert entry.failure == "rilo.txt differs"
    pool.record([group(task("a"), [1.0] * 16)], 3)
    assert pool.entries[0].rewards == (1.0,) * 16 and pool.entries[0].failure == ""


def test_groups_of_proposers_are_passed_over(tmp_path: Path) -> None:
    pool = Pool(PoolConfig(), tmp_path)
    pool.add(task("a"), 0)
    pool.record([Group("proposer", task("a").id, (), (1.0,))], 1)
    assert pool.entries[0].rewards == ()


def test_a_failure_is_the_message_of_the_first_failed_test() -> None:
    tests = (TestResult("a", True), TestResult("b", False, "kamo.txt differs"), TestResult("c", False, "x"))
    assert failure(Verdict(0.3, tests)) == "kamo.txt differs"
    assert failure(Verdict(0.3, (TestResult("b", False),))) == "b"
    assert failure(Verdict(0.0)) == "the tests failed"


def test_sampling_prefers_uneven_rewards_and_keeps_a_share_of_seeds(tmp_path: Path) -> None:
    pool = Pool(PoolConfig(seed_share=0.25), tmp_path)
    for name, rewards in [("seed1", [1.0] * 4), ("seed2", [1.0] * 4)]:
        pool.add(task(name), 0, rewards)
    for i in range(6):
        pool.add(task(f"a{i}", seed=False), 0, [0.0, 1.0] if i < 3 else [0.0, 0.0])
    draws = [t for seed in range(300) for t in pool.sample(4, rng(seed))]
    counts = {name: sum(t.id == task(name).id for t in draws) for name in ("a0", "a5")}
    # Ten to one by weight, over three draws of seven without replacement.
    assert counts["a5"] < 0.25 * counts["a0"]
    for seed in range(50):
        ids = [t.id for t in pool.sample(4, rng(seed))]
        assert len(set(ids)) == 4
        assert sum(i in (task("seed1").id, task("seed2").id) for i in ids) >= 1
    assert WEIGHT_EVEN == 0.1


def test_sampling_is_decided_by_the_random_source_alone(tmp_path: Path) -> None:
    pool = Pool(PoolConfig(), tmp_path)
    for i in range(20):
        pool.add(task(f"a{i}"), 0)
    assert pool.sample(8, rng(5)) == pool.sample(8, rng(5)) != pool.sample(8, rng(6))


def test_a_small_pool_repeats_only_after_every_task_was_drawn(tmp_path: Path) -> None:
    pool = Pool(PoolConfig(), tmp_path)
    for name in ("a", "b", "c"):
        pool.add(task(name), 0)
    drawn = [t.id for t in pool.sample(5, rng())]
    assert len(drawn) == 5 and len(set(drawn[:3])) == 3
    with pytest.raises(ValueError, match="the pool is empty"):
        Pool(PoolConfig(), tmp_path / "other").sample(1, rng())


@pytest.mark.parametrize(
    "rewards, directions", [([0.0, 0.4], {"simplify"}), ([1.0, 0.6], {"harden"}), ([1.0, 0.0], {"simplify", "harden"})]
)
def test_hard_parents_are_simplified_and_easy_ones_hardened(
    tmp_path: Path, rewards: list[float], directions: set[str]
) -> None:
    pool = Pool(PoolConfig(), tmp_path)
    pool.add(task("a"), 0)
    pool.record([group(task("a"), rewards, "rilo.txt is missing")], 0)
    assignments = pool.assign(40, rng(), "terminal")
    assert {a.direction for a in assignments} == directions
    assert {(a.pass_rate, a.num_attempts, a.failure) for a in assignments} == {
        (sum(rewards) / 2, 2, "rilo.txt is missing")
    }
    assert len({a.id for a in assignments}) == 40


def test_assignments_spread_over_parents_and_stay_in_their_domain(tmp_path: Path) -> None:
    pool = Pool(PoolConfig(), tmp_path)
    for name in ("a", "b"):
        pool.add(task(name), 0, [0.5])
    pool.add(task("c", domain="other"), 0, [0.5])
    pool.add(task("d"), 0)
    parents = [a.parent.id for a in pool.assign(40, rng(), "terminal") if a.parent]
    assert len(parents) == 40 and set(parents) == {task("a").id, task("b").id}
    assert 12 <= parents.count(task("a").id) <= 28  # at 20 expected, with a weight that pulls to it


def test_without_a_measured_parent_the_proposer_explores(tmp_path: Path) -> None:
    pool = Pool(PoolConfig(), tmp_path)
    pool.add(task("a"), 0)
    (assignment,) = pool.assign(1, rng(), "terminal")
    assert (assignment.direction, assignment.parent, assignment.pass_rate) == ("explore", None, None)
    assert pool.assign(2, rng(7), "terminal") == pool.assign(2, rng(7), "terminal")


def test_tasks_fall_due_and_reviews_evict_what_left_the_band(tmp_path: Path) -> None:
    pool = Pool(PoolConfig(review_every=16, capacity=10, seed_share=0.1), tmp_path)
    for name in ("a", "b", "c"):
        pool.add(task(name, seed=False), 0, [0.5])
    pool.add(task("d", seed=False), 9, [0.5])
    assert pool.stale(15) == []
    assert [t.id for t in pool.stale(16)] == [task(name).id for name in ("a", "b", "c")]
    assert pool.review(task("a").id, [1.0, 1.0, 1.0, 0.5], 16) == "too easy: mean 0.88 over 4 attempts"
    assert pool.review(task("b").id, [0.0, 0.0], 16) == "too hard: mean 0.00 over 2 attempts"
    assert pool.review(task("c").id, [0.75], 16) is None
    assert [t.id for t in pool.stale(31)] == [task("d").id]
    assert task("a").id not in pool and len(pool) == 2
    assert [(e["event"], e.get("reason")) for e in read_journal(tmp_path)[-3:-1]] == [
        ("evicted", "too easy: mean 0.88 over 4 attempts"),
        ("evicted", "too hard: mean 0.00 over 2 attempts"),
    ]
    assert (tmp_path / "tasks/a00000000000").is_dir()  # a child's lineage still names it


def test_a_review_without_measurements_changes_nothing(tmp_path: Path) -> None:
    pool = Pool(PoolConfig(), tmp_path)
    pool.add(task("a", seed=False), 0, [0.5])
    assert pool.review(task("a").id, [], 16) is None
    assert [t.id for t in pool.stale(16)] == [task("a").id]


def test_seeds_are_never_reviewed_below_their_floor(tmp_path: Path) -> None:
    pool = Pool(PoolConfig(capacity=10, seed_share=0.2), tmp_path)
    for name in ("a", "b", "c"):
        pool.add(task(name), 0)
    reasons = [pool.review(task(name).id, [1.0, 1.0], 16) for name in ("a", "b", "c")]
    assert reasons == ["too easy: mean 1.00 over 2 attempts", None, None]
    assert pool.num_seeds_kept == 2 == len(pool)


def test_a_full_pool_makes_room_by_the_task_farthest_from_the_band(tmp_path: Path) -> None:
    pool = Pool(PoolConfig(capacity=3, seed_share=0.34), tmp_path)
    pool.add(task("seed"), 0, [1.0])
    pool.add(task("far", seed=False), 0, [0.9])
    pool.add(task("near", seed=False), 0, [0.4])
    pool.add(task("new", seed=False), 1, [0.5])
    assert [entry.task.instruction for entry in pool.entries] == ["Do seed.", "Do near.", "Do new."]
    assert pool.stats()["evicted"] == 1 and pool.stats()["admitted"] == 4


def filled(root: Path) -> Pool:
    pool = Pool(PoolConfig(review_every=2), root)
    pool.add(task("a"), 0)
    pool.add(task("b", seed=False), 0, [1.0, 0.0], ["rilo.txt differs"])
    pool.record([group(task("a"), [0.0, 1.0], "x")], 1)
    pool.assign(3, rng(), "terminal")
    return pool


def redo(pool: Pool) -> None:
    pool.record([group(task("b"), [1.0, 1.0])], 2)
    pool.add(task("c", seed=False), 2, [0.5])
    pool.review(task("b").id, [1.0], 2)


def test_a_step_that_is_done_again_after_a_restore_counts_once(tmp_path: Path) -> None:
    pool = filled(tmp_path)
    state = json.loads(json.dumps(pool.state()))
    redo(pool)
    once, journal = pool.state(), (tmp_path / JOURNAL).read_bytes()
    assert task("b").id not in pool
    restored = Pool.restore(PoolConfig(review_every=2), tmp_path, state)
    assert restored.state() == state and task("b").id in restored
    assert not (tmp_path / "tasks/c00000000000").exists()
    redo(restored)
    assert restored.state() == once and (tmp_path / JOURNAL).read_bytes() == journal
    assert restored.entries == pool.entries


def test_a_torn_last_line_is_tolerated_and_cut(tmp_path: Path) -> None:
    pool = filled(tmp_path)
    state, events = pool.state(), read_journal(tmp_path)
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(b'{"event": "rec')
    (tmp_path / "tasks" / ".half.1").mkdir()
    assert read_journal(tmp_path) == events
    Pool.restore(PoolConfig(), tmp_path, state)
    assert (tmp_path / JOURNAL).read_bytes().endswith(b"}\n")
    assert sorted(path.name for path in (tmp_path / "tasks").iterdir()) == ["a00000000000", "b00000000000"]


def test_a_pool_that_is_not_the_checkpoints_is_refused(tmp_path: Path) -> None:
    state = filled(tmp_path / "one").state()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    (tmp_path / "one" / JOURNAL).write_bytes(b"")
    with pytest.raises(ValueError, match="restore the pool directory that belongs to the checkpoint"):
        Pool.restore(PoolConfig(), tmp_path / "one", state)
    (tmp_path / "two/tasks/a00000000000/task.toml").write_text("other")
    with pytest.raises(ValueError, match="is not what the checkpoint was taken of"):
        Pool.restore(PoolConfig(), tmp_path / "two", state)


def test_a_torn_line_inside_the_journal_is_an_error(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text('{"event": "a"}\n{"ev\n{"event": "b"}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_journal(tmp_path)


def test_a_new_pool_starts_empty_where_another_lay(tmp_path: Path) -> None:
    filled(tmp_path)
    assert len(Pool(PoolConfig(), tmp_path)) == 0
    assert read_journal(tmp_path) == [] and list((tmp_path / "tasks").iterdir()) == []


def test_a_configuration_without_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity=0"):
        PoolConfig(capacity=0)
    with pytest.raises(ValueError, match="seed_share=1.5"):
        PoolConfig(seed_share=1.5)


def test_a_domain_at_its_quota_makes_room_for_itself(tmp_path: Path) -> None:
    pool = Pool(PoolConfig(capacity=4, quotas={"terminal": 0.5}, seed_share=0.0), tmp_path)
    pool.add(task("a", domain="web"), 0, [0.0])
    pool.add(task("b", seed=False), 0, [0.5])
    pool.add(task("c", seed=False), 0, [0.25])
    pool.add(task("d", seed=False), 1, [0.5])
    assert [entry.task.instruction for entry in pool.entries] == ["Do a.", "Do b.", "Do d."]
    assert read_journal(tmp_path)[-2]["reason"] == "the quota of terminal is met"


def test_the_journal_says_what_admission_saw_and_whose_attempts_were_recorded(tmp_path: Path) -> None:
    pool = Pool(PoolConfig(), tmp_path)
    pool.add(task("a"), 0, [1.0, 0.0], evidence={"gates": [{"name": "build", "passed": True, "reason": ""}]})
    pool.record([group(task("a"), [1.0, 0.0])], 1)
    admitted, recorded = read_journal(tmp_path)
    assert admitted["gates"][0]["name"] == "build" and recorded["attempts"] == ["t", "t"]


@pytest.mark.parametrize("settings", [{"quotas": {"web": 0.0}}, {"near_duplicate": 0.0}, {"near_duplicate": 1.5}])
def test_settings_of_the_pool_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="0 < "):
        PoolConfig(**settings)


def killed_at(write: int, root: Path) -> bool:
    """Fill a pool at `root` in a child that dies right before its `write`-th write; False if it ended before."""
    pid = os.fork()
    if not pid:
        left = write
        changes = ("os.rename", "os.mkdir", "os.truncate", "os.chmod", "os.remove", "os.rmdir", "shutil.rmtree")

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            if event in changes or event == "open" and arguments[1] not in ("r", "rb"):
                left -= 1
                if left < 0:
                    os._exit(9)

        sys.addaudithook(hook)
        busy_pool(root)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def busy_pool(root: Path) -> Pool:
    pool = Pool(PoolConfig(capacity=2, seed_share=0.0), root)
    for name in "abc":
        pool.add(task(name, seed=False), 0, [0.5, 0.0])
    pool.record([group(task("c"), [1.0, 0.0])], 1)
    pool.review(task("c").id, [0.0, 0.0], 2)
    return pool


def test_a_pool_killed_at_any_write_can_be_read_and_every_admitted_task_is_whole(tmp_path: Path) -> None:
    whole = busy_pool(tmp_path / "whole")
    events = read_journal(whole.root)
    seen = set()
    killed, write = True, 0
    while killed:
        root = tmp_path / str(write)
        killed = killed_at(write, root)
        write += 1
        read = read_journal(root)
        assert read == events[: len(read)]
        for event in read:
            if event["event"] == "admitted":
                folder = task_folder(root, event["task"])
                kept = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")}
                assert kept.keys() == {"task.toml", "tests/test.sh"} and (folder / "environment/files/b").is_file()
        seen.add(len(read))
    assert seen == set(range(len(events) + 1))


def test_a_journal_torn_at_any_byte_of_its_end_gives_the_lines_before(tmp_path: Path) -> None:
    events = read_journal(busy_pool(tmp_path).root)
    raw = (tmp_path / JOURNAL).read_bytes()
    for size in range(len(raw) - len(raw.splitlines()[-1]) - 3, len(raw) + 1):
        (tmp_path / JOURNAL).write_bytes(raw[:size])
        assert read_journal(tmp_path) == events[: raw[:size].count(b"\n")]
