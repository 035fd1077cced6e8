import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rsi.chat import call_text
from rsi.engine import EngineError
from rsi.engine.scripted import Script
from rsi.sandbox import SandboxError
from rsi.solve import Site, SolveConfig, SolveResult, attempt, solve
from rsi.types import Attempt, Group, Role, Stop, Task
from tests.roles import FIRST, LIMITS, SORT, observations, one_call_each, site_of, sort_files, sort_task


def try_it(script: Script | list[str], task: Task | None = None) -> Attempt | None:
    async def run() -> Attempt | None:
        async with site_of(script) as site:
            return await attempt(site, task or sort_task(), LIMITS, id="a", seed=0)

    return asyncio.run(run())


def reward_of(made: Attempt | None) -> float | None:
    return None if made is None else made.verdict.reward


def test_doing_all_of_it_earns_one():
    made = try_it([call_text(SORT), call_text(FIRST), "Done."])
    assert made is not None and made.verdict.reward == 1.0
    assert (made.trajectory.stop, made.trajectory.role, made.trajectory.task) == (Stop.DONE, "solver", sort_task().id)


def test_doing_half_of_it_earns_half_and_names_the_other_half():
    made = try_it([call_text(SORT), "Done."])
    assert made is not None and made.verdict.reward == 0.5
    assert [test.message for test in made.verdict.tests if not test.passed] == ["first.txt is missing"]


def test_doing_nothing_earns_nothing():
    assert reward_of(try_it(["Done."])) == 0.0


def test_an_attempt_that_meets_a_limit_is_graded_as_it_stands():
    async def run() -> Attempt | None:
        async with site_of([call_text(SORT)]) as site:
            return await attempt(site, sort_task(), replace(LIMITS, max_turns=1), id="a", seed=0)

    made = asyncio.run(run())
    assert made is not None and (made.trajectory.stop, made.verdict.reward) == (Stop.MAX_TURNS, 0.5)


def test_the_solver_sees_neither_tests_nor_solution():
    look = "ls /tests /solution 2>/dev/null; ls -a /app; grep -rsl test_sorted /app /tmp /root /opt"
    made = try_it([call_text(look), "Done."])
    assert made is not None
    assert observations(made.trajectory) == [".\n..\nin.txt\n[exit 1]"]


def test_a_process_left_behind_cannot_touch_what_is_graded():
    forge = "mkdir -p /logs/verifier; while :; do echo 1 > /logs/verifier/reward.txt; done &>/dev/null &"
    assert reward_of(try_it([call_text(forge), "Done."])) == 0.0
    spoil = "setsid nohup bash -c 'sleep 1; rm -rf /app/*' &>/dev/null &"
    assert reward_of(try_it([call_text(f"{SORT}; {FIRST}"), call_text(spoil), "Done."])) == 1.0


def test_a_planted_python_module_does_not_reach_the_grading():
    plant = "for m in json os sitecustomize pytest conftest; do echo 'import sys; sys.exit(0)' > $m.py; done"
    made = try_it([call_text(plant), "Done."])
    assert reward_of(made) == 0.0


def test_an_engine_that_breaks_leaves_no_attempt():
    def script(context: str) -> str:
        raise EngineError("no memory")

    assert try_it(script) is None


def test_a_verifier_without_a_reward_leaves_no_attempt():
    files = sort_files(**{"tests/test.sh": b"#!/bin/bash\ntrue\n"})
    assert try_it(["Done."], sort_task(files)) is None


def test_a_task_whose_image_does_not_build_leaves_no_attempt():
    files = sort_files(**{"environment/Dockerfile": b"FROM rsi/base\nWORKDIR /app\nRUN false\n"})
    assert try_it(["Done."], sort_task(files)) is None


def other_task(name: str) -> Task:
    return sort_task(sort_files(**{"environment/files/extra.txt": name.encode()}))


def run_solve(script: Script, draws: list[list[Task]], config: SolveConfig) -> tuple[SolveResult, list[int]]:
    asked: list[int] = []

    def draw(num: int) -> Sequence[Task]:
        asked.append(num)
        return draws.pop(0) if draws else []

    async def run() -> SolveResult:
        async with site_of(script) as site:
            return await solve(site, draw, config, step=3, seed=0)

    return asyncio.run(run()), asked


CONFIG = SolveConfig(envs_per_step=2, attempts=2, max_draws=5, episode=LIMITS, concurrency=1)


def test_a_group_without_variance_is_measured_and_another_environment_is_drawn():
    a, b, c = (other_task(name) for name in "abc")
    script = one_call_each([SORT, "true", SORT, SORT, f"{SORT}; {FIRST}", SORT])
    result, asked = run_solve(script, [[a, b], [c]], CONFIG)
    assert asked == [2, 1]
    assert [(group.key, group.rewards) for group in result.groups] == [(a.id, (0.5, 0.0)), (c.id, (1.0, 0.5))]
    assert [group.key for group in result.measured] == [a.id, b.id, c.id]
    assert (result.num_draws, result.num_episodes, result.num_faults) == (3, 6, 0)
    ids = [made.trajectory.id for group in result.measured for made in group.attempts]
    assert ids == ["solve-3-0-0", "solve-3-0-1", "solve-3-1-0", "solve-3-1-1", "solve-3-2-0", "solve-3-2-1"]


def test_draws_are_capped_and_we_train_on_less():
    tasks = [other_task(str(i)) for i in range(9)]
    result, asked = run_solve(lambda context: "Done.", [tasks[0:2], tasks[2:4], tasks[4:5], tasks[5:]], CONFIG)
    assert asked == [2, 2, 1]
    assert (result.groups, result.num_draws) == ((), 5)


def test_an_empty_draw_ends_the_step():
    result, asked = run_solve(lambda context: "Done.", [], CONFIG)
    assert (result.measured, asked) == ((), [2])


def test_a_fault_is_not_a_member_of_its_group():
    calls = iter(range(9))

    def script(context: str) -> str:
        if next(calls) == 1:
            raise EngineError("no memory")
        return "Done." if "<tool_response>" in context else call_text(SORT)

    result, _ = run_solve(script, [[other_task("a")]], replace(CONFIG, envs_per_step=1, attempts=3))
    [group] = result.measured
    assert group.rewards == (0.5, 0.5) and result.num_faults == 1 and result.groups == ()


def test_record_hears_of_a_round_before_the_next_is_drawn():
    heard: list[str] = []
    tasks = [[other_task("a")], [other_task("b")]]

    def draw(num: int) -> Sequence[Task]:
        heard.append("draw")
        return tasks.pop(0) if tasks else []

    def record(groups: Sequence[Group]) -> None:
        heard.append(f"record {len(groups)}")

    async def run() -> None:
        async with site_of(lambda context: "Done.") as site:
            await solve(site, draw, CONFIG, step=0, seed=0, record=record)

    asyncio.run(run())
    assert heard == ["draw", "record 1", "draw", "record 1", "draw"]


def test_progress_is_told_of_starts_ends_and_faults():
    heard: list[tuple[str, float | None]] = []

    def hear(role: Role, event: str, reward: float | None) -> None:
        heard.append((event, reward))

    async def run(site: Site) -> None:
        await attempt(site, sort_task(), LIMITS, id="a", seed=0, on_progress=hear)

    async def both() -> None:
        async with site_of(one_call_each([SORT])) as site:
            await run(site)
            await site.backend.close()
            await run(site)

    asyncio.run(both())
    assert heard == [("start", None), ("end", 0.5), ("start", None), ("fault", None)]


def test_a_backend_that_is_gone_is_a_fault():
    async def run() -> Attempt | None:
        async with site_of(["Done."]) as site:
            await site.backend.close()
            with pytest.raises(SandboxError):
                await site.backend.create(await site.grader.build(sort_task()))
            return await attempt(site, sort_task(), LIMITS, id="a", seed=0)

    assert asyncio.run(run()) is None


def test_a_group_size_of_one_is_refused_with_the_mend():
    with pytest.raises(ValueError, match="use 2 or more"):
        SolveConfig(attempts=1)
    with pytest.raises(ValueError, match="max_draws=3"):
        SolveConfig(max_draws=3, envs_per_step=4)
