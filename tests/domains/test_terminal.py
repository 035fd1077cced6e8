"""The world of the embedded model, held against real coreutils in a real sandbox."""

import asyncio
import re
from collections import Counter

import numpy as np

from rsi.domains import build_domain
from rsi.domains.terminal import FAMILIES, MAX_SEED_DEPTH, draw_chain, draw_tasks, split_of, write_chain
from rsi.harbor.grade import Grader
from rsi.harbor.task import task_from_files
from rsi.sandbox import SandboxConfig, build_backend

WORD = re.compile(r"\b[bdfgklmnprst][aou][bdfgklmnprst][ei]\b")


def chains_of_every_family(per_family: int):
    rng = np.random.default_rng(3)
    found: dict[str, list] = {family: [] for family in FAMILIES}
    while any(len(chains) < per_family for chains in found.values()):
        chain = draw_chain(1, "seed", rng)
        if len(found[chain.chores[0].family]) < per_family:
            found[chain.chores[0].family].append(chain)
    return [chain for chains in found.values() for chain in chains]


def test_the_world_has_at_least_twelve_families():
    assert len(FAMILIES) >= 12


def test_the_reference_of_every_family_earns_one_and_doing_nothing_earns_nothing():
    """The tests were written from a simulation of the chore; the reference runs real coreutils."""

    async def check() -> list[tuple[str, object, object, object]]:
        backend = build_backend(SandboxConfig())
        grader = Grader(backend)
        try:
            rows = []
            for chain in chains_of_every_family(1):
                task = task_from_files(write_chain(chain), "terminal")
                run = await grader.run_solution(task)
                done = await grader.grade(task, run.outputs)
                nothing = await grader.grade(task, await grader.initial(task))
                rows.append((chain.chores[0].family, done.reward, nothing.reward, done.tests))
            return rows
        finally:
            await backend.close()

    for family, done, nothing, tests in asyncio.run(check()):
        assert (done, nothing) == (1.0, 0.0), (family, tests)


def test_deep_chains_earn_one_too():
    async def check() -> list[object]:
        backend = build_backend(SandboxConfig())
        grader = Grader(backend)
        try:
            tasks = draw_tasks(12, 4, "heldout", np.random.default_rng(5))
            return [(await grader.grade(task, (await grader.run_solution(task)).outputs)).reward for task in tasks]
        finally:
            await backend.close()

    assert asyncio.run(check()) == [1.0] * 12


def test_seeds_stop_at_depth_two_and_come_in_equal_parts():
    seeds = build_domain("terminal").seeds(21, np.random.default_rng(0))
    depths = Counter(len(task.instruction.strip().splitlines()) for task in seeds)
    assert depths == {1: 11, 2: 10} and max(depths) == MAX_SEED_DEPTH
    assert len({task.id for task in seeds}) == 21


def test_seeds_and_the_heldout_suite_share_no_word():
    rng = np.random.default_rng(1)
    seeds = {word for task in draw_tasks(60, 2, "seed", rng) for word in WORD.findall(task.instruction)}
    held = {word for task in draw_tasks(60, 2, "heldout", rng) for word in WORD.findall(task.instruction)}
    phrases = {"name"}  # of the instructions themselves
    assert seeds and held and seeds & held <= phrases
    assert {split_of(word) for word in held - phrases} == {"heldout"}
