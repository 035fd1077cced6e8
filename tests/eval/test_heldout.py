import asyncio
import hashlib
import json
from pathlib import Path

import pytest

from rsi.engine import EngineError
from rsi.engine.scripted import Script
from rsi.harbor.task import task_to_json
from rsi_eval.heldout import SUITE, EvalResult, HeldoutTask, evaluate, load_suite
from tests.roles import FIRST, LIMITS, SORT, one_call_each, site_of, sort_files, sort_task

OTHER = sort_task(sort_files(**{"environment/files/extra.txt": b"x"}))
TASKS = (HeldoutTask(sort_task(), 1), HeldoutTask(OTHER, 2))


def run(script: Script, attempts: int = 2) -> EvalResult:
    async def main() -> EvalResult:
        async with site_of(script) as site:
            return await evaluate(site, TASKS, attempts=attempts, limits=LIMITS, seed=0, temperature=0.0, concurrency=1)

    return asyncio.run(main())


def test_only_a_reward_of_one_is_a_pass_and_depths_are_kept_apart():
    result = run(one_call_each([f"{SORT}; {FIRST}", SORT, SORT, "true"]))
    assert result.to_json() == {
        "suite": "heldout",
        "n": 4,
        "pass_rate": {"1": 0.5, "2": 0.0},
        # Wilson, n = 2: 1 pass gives centre 0.5; 0 passes reach z²/(2 + z²)
        "ci95": {"1": pytest.approx([0.0945, 0.9055], abs=1e-4), "2": pytest.approx([0.0, 0.6576], abs=1e-4)},
        "faults": 0,
    }


def test_faults_are_left_out_and_counted():
    calls = iter(range(9))

    def script(context: str) -> str:
        if next(calls) in (0, 2):
            raise EngineError("no memory")
        return "Done."

    result = run(script, attempts=1)
    assert (result.attempts, result.num_faults) == ({2: 1}, 1)
    assert result.to_json()["pass_rate"] == {"2": 0.0}


def test_greedy_is_asked_of_the_engine():
    async def main() -> set[float | None]:
        async with site_of(lambda context: "Done.") as site:
            await evaluate(site, TASKS[:1], attempts=1, limits=LIMITS, seed=0, temperature=0.0)
            return {request.temperature for request in site.engine.requests}  # pyright: ignore[reportAttributeAccessIssue]

    assert asyncio.run(main()) == {0.0}


def write_suite(folder: Path, lines: list[str], digest: str | None = None) -> Path:
    path = folder / "small.jsonl"
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(content)
    found = digest or hashlib.sha256(content).hexdigest()
    path.with_suffix(".sha256").write_text(f"{found}  {path.name}\n")
    return path


def test_a_suite_is_read_back_with_its_depths(tmp_path: Path):
    lines = [json.dumps({**task_to_json(held.task), "depth": held.depth}) for held in TASKS]
    assert load_suite(write_suite(tmp_path, lines)) == TASKS


def test_a_suite_that_was_changed_is_refused(tmp_path: Path):
    path = write_suite(tmp_path, [json.dumps({**task_to_json(OTHER), "depth": 2})], digest="0" * 64)
    with pytest.raises(ValueError, match="restore both files"):
        load_suite(path)


def test_a_line_that_is_no_task_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="line 1 is not a held-out task"):
        load_suite(write_suite(tmp_path, [json.dumps({"id": "x", "depth": 1})]))
    with pytest.raises(ValueError, match="line 1 is not a held-out task: 'depth'"):
        load_suite(write_suite(tmp_path, [json.dumps(task_to_json(OTHER))]))


def test_a_missing_suite_is_said_so(tmp_path: Path):
    with pytest.raises(ValueError, match="is missing"):
        load_suite(tmp_path / "none.jsonl")


@pytest.mark.skipif(not SUITE.exists(), reason="the suite is data that a later commit brings")
def test_the_suite_has_fifty_tasks_at_each_depth_and_no_two_alike():
    suite = load_suite()
    assert [sum(held.depth == depth for held in suite) for depth in (1, 2, 3, 4)] == [50, 50, 50, 50]
    assert len({held.task.instruction for held in suite}) == 200
