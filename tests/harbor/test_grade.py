import asyncio
import os
from collections.abc import Mapping

import pytest

from rsi.harbor.grade import Grader
from rsi.harbor.outputs import collect, leads_to_tests, outputs_digest
from rsi.harbor.snapshot import snapshot_tests
from rsi.harbor.task import new_task_files, task_from_files
from rsi.harbor.verdict import read_graded, read_rewards
from rsi.sandbox import Backend, Entry, ExecResult, SandboxError
from rsi.types import Task

TESTS = b"""from verify import check_gone, check_text


def test_rilo():
    check_text("rilo.txt", "a\\nb")


def test_kamo():
    check_gone("kamo.txt")
"""


def task(tests: bytes = TESTS, solve: bytes = b"sort kamo.txt > rilo.txt\nrm kamo.txt\n", **extra: bytes) -> Task:
    return task_from_files(
        {
            **new_task_files("t"),
            "instruction.md": b"Sort kamo.txt into rilo.txt and remove it.",
            "environment/files/kamo.txt": b"b\na\n",
            "environment/files/sub/run.sh": b"#!/bin/sh\n",
            "solution/solve.sh": b"#!/bin/bash\nset -e\n" + solve,
            "tests/test_outputs.py": tests,
            **extra,
        }
    )


def file(content: bytes) -> Entry:
    return Entry("file", 0o644, content)


DONE = ExecResult(0, b"out", b"err", 0, False, False, False, 0.1)


@pytest.mark.parametrize(
    "logs, reward",
    [
        ({"reward.txt": file(b"0.5")}, 0.5),
        ({"reward.txt": file(b" 1.0\n")}, 1.0),
        ({"reward.txt": file(b"1e-3")}, 0.001),
        ({"reward.json": file(b'{"reward": 1}'), "reward.txt": file(b"0")}, 1.0),
        ({"reward.json": file(b'{"reward": true, "other": 3}')}, 1.0),
        ({"reward.json": file(b""), "reward.txt": file(b"1")}, None),
        *[
            ({"reward.txt": file(text)}, None)
            for text in (b"", b"\n", b"nan", b"inf", b"1e999", b"1 1", b"True", b"1_0")
        ],
        *[({"reward.txt": file(text)}, None) for text in (b"1.5", b"-0.1", b"\xff", b"0" * 70000, "\u0661".encode())],
        *[
            ({"reward.json": file(text)}, None)
            for text in (b"{}", b"1", b"[1]", b'{"x": 1}', b'{"reward": "1"}', b'{"reward": null}', b'{"reward": NaN}')
        ],
        ({"reward.json": file(b'{"reward": 1, "b": 1e309}')}, None),
        ({"reward.json": file(b'{"reward": 1' + b"0" * 400 + b"}")}, None),
        ({"reward.json": file(b"[" * 50000)}, None),
        ({"reward.txt": Entry("link", 0o777, target="/app/reward.txt")}, None),
        ({}, None),
    ],
)
def test_only_a_proper_reward_file_is_a_reward(logs: Mapping[str, Entry], reward: float | None) -> None:
    rewards, complaint = read_rewards(logs)
    assert rewards.get("reward") == reward and bool(complaint) == (reward is None)
    assert read_graded(logs, DONE).verdict.reward == reward


def test_test_results_are_read_within_limits_and_never_decide() -> None:
    tests = b'[{"name": "a", "status": "passed"}, {"name": "b", "status": "failed", "message": "m"}]'
    ctrf = b'{"results": {"tests": %s}}' % tests
    verdict = read_graded({"reward.txt": file(b"1"), "ctrf.json": file(ctrf)}, DONE).verdict
    assert [(t.name, t.passed, t.message) for t in verdict.tests] == [("a", True, ""), ("b", False, "m")]
    for broken in (
        b"{",
        b"[]",
        b'{"results": {"tests": [1]}}',
        b'{"results": {"tests": 1}}',
        b"[" * 90000,
        b" " * 300000,
    ):
        verdict = read_graded({"reward.txt": file(b"1"), "ctrf.json": file(broken)}, DONE).verdict
        assert (verdict.reward, verdict.tests) == (1.0, ())


def test_the_log_is_a_tail() -> None:
    long = ExecResult(0, b"x" * 9000 + b"end", b"", 0, False, False, False, 0.1)
    log = read_graded({"reward.txt": file(b"1")}, long).verdict.log
    assert len(log) == 2000 and log.endswith("end")


def test_digests_of_outputs_differ_by_content_mode_kind_and_path() -> None:
    states = [
        {"a": file(b"x")},
        {"a": file(b"y")},
        {"a": Entry("file", 0o600, b"x")},
        {"a": Entry("link", 0o644, target="x")},
        {"b": file(b"x")},
        {},
    ]
    assert len({outputs_digest(state) for state in states}) == 6
    assert outputs_digest({"a": file(b"1"), "b": file(b"2")}) == outputs_digest({"b": file(b"2"), "a": file(b"1")})


@pytest.mark.parametrize(
    "links, found",
    [
        ({"out": "/tests/expected"}, ["out"]),
        ({"out": "/tests"}, ["out"]),
        ({"out": "../tests/x"}, ["out"]),
        ({"out": "sub/../../logs/verifier"}, ["out"]),
        ({"root": "/", "out": "root/tests/x"}, ["out"]),
        ({"a": "b", "b": "c", "c": "/solution"}, ["a", "b", "c"]),
        ({"out": "/proc/self/root/tests/x"}, ["out"]),
        ({"out": "/dev/fd/3/../tests"}, ["out"]),
        ({"out": "/etc/shadow", "null": "/dev/null", "near": "tests/x", "like": "/testsuite"}, []),
        ({"loop": "pool", "pool": "loop", "self": "self"}, []),
        ({"up": "../../../../app/x"}, []),
    ],
)
def test_links_that_lead_to_the_tests_are_known(links: dict[str, str], found: list[str]) -> None:
    outputs = {path: Entry("link", 0o777, target=target) for path, target in links.items()}
    assert [path for path in outputs if leads_to_tests(path, outputs, "/app")] == found


def test_the_reference_passes_and_the_initial_state_fails(with_grader) -> None:
    async def main(grader: Grader, _: Backend) -> None:
        initial = await grader.initial(task())
        assert initial["kamo.txt"] == file(b"b\na\n")
        assert {path: entry.kind for path, entry in initial.items()} == {
            "kamo.txt": "file",
            "sub": "dir",
            "sub/run.sh": "file",
        }
        run = await grader.run_solution(task())
        assert run.exit_code == 0 and run.outputs["rilo.txt"] == file(b"a\nb\n") and "kamo.txt" not in run.outputs
        verdict = await grader.grade(task(), run.outputs)
        assert verdict.reward == 1.0 and [test.passed for test in verdict.tests] == [True, True]
        verdict = await grader.grade(task(), initial)
        assert verdict.reward == 0.0
        assert [test.message for test in verdict.tests] == ["rilo.txt is missing", "kamo.txt should be gone"]
        half = await grader.grade(task(), {**initial, "rilo.txt": file(b"a\nb\n")})
        assert half.reward == 0.5

    with_grader(main)


def test_a_dockerfile_with_a_user_is_solved_as_that_user_and_graded(with_grader) -> None:
    if os.geteuid() != 0:
        pytest.skip("a plain user's sandbox has one id")
    dockerfile = (
        b"ARG BASE=base\nFROM rsi/$BASE\nARG WHO=nobody\nWORKDIR /app\nCOPY files/ /app/\n"
        b"RUN chown -R $WHO /app\nUSER $WHO\nRUN id -un >made-by\n"
    )
    tests = b"def test_all():\n    assert open('made-by').read() == open('solved-by').read() == 'nobody\\n'\n"

    async def main(grader: Grader, _: Backend) -> None:
        asked = task(tests, b"id -un >solved-by\n", **{"environment/Dockerfile": dockerfile})
        run = await grader.run_solution(asked)
        assert (await grader.grade(asked, run.outputs)).reward == 1.0, run

    with_grader(main)


def test_a_failing_solution_tells_its_exit_code_and_error(with_grader) -> None:
    async def main(grader: Grader, _: Backend) -> None:
        run = await grader.run_solution(task(), b"#!/bin/bash\nset -e\nsort nowhere.txt\ntouch after\n")
        assert run.exit_code == 2 and "after" not in run.outputs
        assert run.log == "sort: cannot read: nowhere.txt: No such file or directory"
        slow = task(**{"task.toml": b"[agent]\ntimeout_sec = 1\n"}, solve=b"touch early\nsleep 60\n")
        run = await grader.run_solution(slow)
        assert run.exit_code is None and "early" in run.outputs

    with_grader(main)


def test_links_modes_and_folders_cross_over_to_the_grading_sandbox(with_grader) -> None:
    tests = b"""import os


def test_all():
    assert os.readlink("l") == "/etc/shadow" and os.stat("s").st_mode & 0o7777 == 0o1700 and os.listdir("s") == []
    assert os.listdir(".") == ["l", "s"] or sorted(os.listdir(".")) == ["l", "s"]
    assert os.getcwd() == "/app"
"""

    async def main(grader: Grader, backend: Backend) -> None:
        solve = b"rm -rf *\nln -s /etc/shadow l\nmkdir -m 1700 s\n"
        run = await grader.run_solution(task(tests, solve))
        assert run.outputs["l"].target == "/etc/shadow" and run.outputs["l"].content == b""
        verdict = await grader.grade(task(tests), run.outputs)
        assert verdict.reward == 1.0, verdict

    with_grader(main)


def test_collecting_kills_what_still_runs_and_gradings_leave_nothing_to_it(with_grader) -> None:
    async def main(grader: Grader, backend: Backend) -> None:
        sandbox = await backend.create(await grader.build(task()))
        spoil = (
            "(while :; do mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt; done) & echo x > rilo.txt"
        )
        await sandbox.exec(spoil, cwd="/app")
        outputs = await collect(sandbox, task())
        left = await sandbox.exec("ls /proc | grep -c '^[0-9]'")
        assert int(left.stdout) <= 4
        await sandbox.close()
        assert (await grader.grade(task(), outputs)).reward == 0.0

    with_grader(main)


def test_tests_do_not_land_where_a_link_of_the_solver_points(with_grader) -> None:
    async def main(grader: Grader, backend: Backend) -> None:
        outputs = {
            "tests": Entry("link", 0o777, target="/tests"),
            "rilo.txt": Entry("link", 0o777, target="/tests/verify.py"),
        }
        assert (await grader.grade(task(), outputs)).reward == 0.5  # kamo.txt is gone, rilo.txt is no file
        with pytest.raises(SandboxError, match="not below a directory"):
            await grader.grade(task(), {"l": Entry("link", 0o777, target="/tests"), "l/verify.py": file(b"x")})
        with pytest.raises(SandboxError, match="not below a directory"):
            await grader.grade(task(), {"../tests/verify.py": file(b"x")})

    with_grader(main)


class CountingBackend:
    """The real backend, counting sandboxes."""

    def __init__(self, backend: Backend):
        self.backend, self.num_created = backend, 0
        self.probe, self.build, self.close = backend.probe, backend.build, backend.close

    async def create(self, *arguments, **options):
        self.num_created += 1
        return await self.backend.create(*arguments, **options)


def test_equal_outputs_are_graded_once_and_fresh_gradings_again(with_grader) -> None:
    async def main(_: Grader, backend: Backend) -> None:
        counting = CountingBackend(backend)
        grader = Grader(counting)
        outputs = {"rilo.txt": file(b"a\nb\n")}
        verdicts = await asyncio.gather(*(grader.grade(task(), outputs) for _ in range(8)))
        assert counting.num_created == 1 and {verdict.reward for verdict in verdicts} == {1.0}
        await grader.grade(task(), outputs, fresh=True)
        await grader.grade(task(), {"rilo.txt": file(b"")})
        await grader.grade(task(TESTS + b"\n"), outputs)
        assert counting.num_created == 4
        await grader.initial(task())
        await grader.initial(task(TESTS + b"\n"))
        assert counting.num_created == 5

    with_grader(main)


def test_a_cancelled_attempt_does_not_take_the_verdict_from_the_others(with_grader) -> None:
    async def main(grader: Grader, _: Backend) -> None:
        outputs = {"rilo.txt": file(b"a\nb\n")}
        first = asyncio.create_task(grader.grade(task(), outputs))
        second = asyncio.create_task(grader.grade(task(), outputs))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).reward == 1.0 and first.cancelled()

    with_grader(main)


@pytest.mark.parametrize(
    "test_sh, complaint",
    [
        (b"#!/bin/bash\nsleep 60\n", "the verifier ran longer than 1 s"),
        (b"#!/bin/bash\nexit 0\n", "the verifier wrote no reward"),
        (b"#!/bin/bash\necho nan > /logs/verifier/reward.txt\n", "reward.txt is not a reward"),
        (b"#!/bin/bash\nln -s /tests/one /logs/verifier/reward.txt\necho 1 > /tests/one\n", "not a regular file"),
        (b"#!/bin/nowhere\n", "the verifier wrote no reward"),
    ],
)
def test_a_broken_verifier_gives_no_reward_and_is_not_remembered(with_grader, test_sh: bytes, complaint: str) -> None:
    async def main(_: Grader, backend: Backend) -> None:
        broken = task(**{"tests/test.sh": test_sh, "task.toml": b"[verifier]\ntimeout_sec = 1\n"})
        counting = CountingBackend(backend)
        grader = Grader(counting)
        verdict = await grader.grade(broken, {})
        assert verdict.reward is None and complaint in verdict.log
        await grader.grade(broken, {})
        assert counting.num_created == 2

    with_grader(main)


def test_snapshot_tests_hold_in_the_sandbox(with_grader) -> None:
    solve = b"""mkdir -p out/empty
sort kamo.txt > out/rilo.txt
tar -czf all.tar.gz kamo.txt out
chmod 600 kamo.txt
rm -r sub
ln -s out up
head -c 9000 /dev/urandom | od > out/noise.txt; rm out/noise.txt
"""

    async def main(grader: Grader, _: Backend) -> None:
        before = await grader.initial(task())
        run = await grader.run_solution(task(solve=solve))
        assert run.exit_code == 0, run.log
        tests = snapshot_tests(before, run.outputs)
        written = task(solve=solve, **{f"tests/{path}": content for path, content in tests.items()})
        again = await grader.run_solution(written)
        verdict = await grader.grade(written, again.outputs)
        assert verdict.reward == 1.0, verdict
        assert [test.name.partition("::")[2] for test in verdict.tests] == [
            "test_all_tar_gz",
            "test_kamo_txt",
            "test_out_empty",
            "test_out_rilo_txt",
            "test_sub",
            "test_up",
        ]
        assert (await grader.grade(written, before)).reward == 0.0

    with_grader(main)


def test_a_disk_that_the_solver_filled_is_graded(with_grader) -> None:
    async def main(grader: Grader, _: Backend) -> None:
        small = task(**{"task.toml": b"[environment]\nstorage_mb = 8\n"})
        outputs = {"rilo.txt": file(b"a\nb\n"), "big": file(bytes(8 << 20))}
        assert (await grader.grade(small, outputs)).reward == 1.0

    with_grader(main)
