"""Seconds of a full validation of a small task, and how much two sandboxes at a time bring.

    python scripts/bench_validate.py [--runs 7] [--batch 8] [--json]

Two tasks, all gates, namespace backend: one whose verifier is bash, one whose verifier is pytest. The median is of one
task alone with a sandbox a CPU, in one process whose backend and base are warm. The throughput is of `--batch` tasks
that differ, so that nothing of one is kept for another, with --jobs 2 against --jobs 1. The load of the machine before
and after stands beside the figures: they mean little above one process a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rsi.admission.command import CommandConfig
from rsi.admission.start_state import Eyes
from rsi.admission.validate import validate_fully
from rsi.harbor.grade import Grader
from rsi.harbor.task import new_task_files
from rsi.sandbox import build_backend

BASH = b"""#!/bin/bash
if diff <(sort words.txt) sorted.txt >/dev/null 2>&1 && [ "$(cat first.txt)" = fig ]; then reward=1; else reward=0; fi
echo $reward >/logs/verifier/reward.txt
"""
PYTEST = b"""#!/bin/bash
cd /
if python3 -I -m pytest -q -p no:cacheprovider /tests/test_state.py; then reward=1; else reward=0; fi
echo $reward >/logs/verifier/reward.txt
"""
TEST_STATE = b"""
def test_sorted():
    assert open("/app/sorted.txt").readlines() == sorted(open("/app/words.txt"))


def test_first():
    assert open("/app/first.txt").read() == "fig\\n"
"""


def task_files(verifier: str, number: int) -> dict[str, bytes]:
    """A small task; number: makes it unlike the others."""
    tests = (
        {"tests/test.sh": BASH} if verifier == "bash" else {"tests/test.sh": PYTEST, "tests/test_state.py": TEST_STATE}
    )
    own = {path: content for path, content in new_task_files("bench").items() if not path.startswith("tests/")}
    return {
        **own,
        **tests,
        "instruction.md": b"Sort words.txt into sorted.txt, and put the first line of that into first.txt.\n",
        "environment/files/words.txt": f"pear\nplum {number}\nfig\n".encode(),
        "solution/solve.sh": b"#!/bin/bash\nset -e\nsort words.txt > sorted.txt\nhead -n 1 sorted.txt > first.txt\n",
    }


async def seconds_of(tasks: Sequence[Mapping[str, bytes]], jobs: int, at_once: int) -> tuple[float, list[float]]:
    """(wall seconds of all, seconds of each), each in its turn among `at_once`. Raises if one is not sound."""
    config = CommandConfig()
    backend = build_backend(replace(config.sandbox, max_alive=jobs))
    grader, eyes, turn = Grader(backend), Eyes(backend), asyncio.Semaphore(at_once)

    async def one(files: Mapping[str, bytes]) -> float:
        async with turn:
            started = time.monotonic()
            validation = await validate_fully(files, grader, None, config.admission, eyes)
            assert validation.valid is True, validation.complaint
            return time.monotonic() - started

    try:
        await one(task_files("bash", -1))  # the base, the limits and the shim are found once a process
        started = time.monotonic()
        each = await asyncio.gather(*(one(files) for files in tasks))
        return time.monotonic() - started, each
    finally:
        await backend.close()


def bench(num_runs: int, batch: int) -> dict[str, Any]:
    num_cpus = len(os.sched_getaffinity(0))
    figures: dict[str, Any] = {"cpus": num_cpus, "load_before": round(os.getloadavg()[0], 1)}
    for verifier in ("bash", "pytest"):
        tasks = [task_files(verifier, number) for number in range(num_runs)]
        _, each = asyncio.run(seconds_of(tasks, num_cpus, 1))
        figures[f"median_s_{verifier}"] = round(statistics.median(each), 2)
    tasks = [task_files(("bash", "pytest")[number % 2], number) for number in range(batch)]
    walls = {jobs: asyncio.run(seconds_of(tasks, jobs, jobs))[0] for jobs in (1, 2)}
    figures |= {f"tasks_per_minute_jobs_{jobs}": round(60 * batch / wall, 1) for jobs, wall in walls.items()}
    figures["jobs_2_over_1"] = round(walls[1] / walls[2], 2)
    return {**figures, "load_after": round(os.getloadavg()[0], 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="tasks whose median is taken, of each verifier (default 7)")
    parser.add_argument("--batch", type=int, default=8, help="tasks whose throughput is taken (default 8)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()
    figures = bench(args.runs, args.batch)
    if args.json:
        print(json.dumps(figures))
        return 0
    for name, figure in figures.items():
        print(f"{name:24} {figure}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
