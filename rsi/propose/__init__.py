"""Proposing: assignments in, admitted environments and the proposer's groups out.

Arms: `agent` works in a terminal and hears of the first failed check, at most max_revisions times; `prompt` writes the
whole task in one completion and hears nothing. Both pass the same admission, which runs on the host.

Where the paper is silent: an episode with its revisions is one append-only trajectory, and its reward is that of the
last revision. Of twins (equal instruction, inputs and reference) in one round the first in order is admitted and the
others count as rejected; a twin of a task that the pool holds already is a duplicate. An episode that met a limit is
ruled on as it stands, like a solver's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rsi.admission.duplicates import Nearest
from rsi.advantages import is_useful
from rsi.chat import SYSTEM, invalid_message, proposer_message
from rsi.episode import EpisodeLimits, run_episode
from rsi.harbor.task import TaskError
from rsi.pool import Pool, failure
from rsi.propose import one_shot
from rsi.propose.admit import Admission, Ruling, content_key
from rsi.propose.host import Answer, serving
from rsi.propose.workspace import OUTPUT, WORKDIR, open_workspace, read_output
from rsi.rewards import Outcome, RewardConfig, proposer_reward
from rsi.sandbox import Sandbox, SandboxError
from rsi.solve import OnProgress, Site, group_of, silent
from rsi.types import Assignment, Attempt, Group, Lineage, Stop, Trajectory, Verdict


@dataclass(frozen=True)
class ProposeConfig:
    """The `propose:` block of a recipe."""

    every: int = 16
    """Solver updates between two rounds of proposing; 0: never (a static pool)."""
    assignments: int = 16
    """Of one round."""
    attempts: int = 128
    """At each assignment; their rewards are one comparison set."""
    max_revisions: int = 2
    """Failed submissions that go back to the agent; 0: the first counts."""
    arm: Literal["agent", "prompt"] = "agent"
    train: bool = True
    """False: the proposer is frozen, its trajectories get no gradient; its weights still follow the solver's."""
    max_tool_calls: int = 8
    """Calls of tools/validate and tools/snapshot-tests, together, in one episode."""
    concurrency: int = 16
    """Episodes alive at once. Each holds a sandbox while its submission is measured in others, so keep it well below
    sandbox.max_alive."""
    episode: EpisodeLimits = EpisodeLimits(max_turns=24, command_timeout_s=60.0, wall_s=900.0)

    def __post_init__(self) -> None:
        if self.every and self.train and self.attempts < 2:
            raise ValueError(
                f"propose.attempts={self.attempts} gives zero advantage; use 2 or more, or propose.train=false"
            )
        if self.episode.command_timeout_s <= TOOL_MARGIN_S:
            raise ValueError(
                f"propose.episode.command_timeout_s={self.episode.command_timeout_s:g} leaves tools/validate no time; "
                f"use more than {TOOL_MARGIN_S:g}"
            )


TOOL_MARGIN_S = 2.0
"""A tool gives up this long before the command that called it would be killed, and says so."""


@dataclass(frozen=True)
class Proposal:
    """One episode at one assignment, and the ruling on its last revision."""

    assignment: Assignment
    trajectory: Trajectory
    ruling: Ruling
    revision: int
    """Submissions that were sent back."""


@dataclass(frozen=True)
class ProposeResult:
    """groups: for training, rewards vary; none with train=False. measured: one an assignment, faults left out."""

    groups: tuple[Group, ...] = ()
    measured: tuple[Group, ...] = ()
    proposals: tuple[Proposal, ...] = ()
    num_calibrations: int = 0
    """Attempts of the solver that the round's calibrations took, of whatever became of the task."""

    def count(self, *outcomes: Outcome) -> int:
        return sum(proposal.ruling.outcome in outcomes for proposal in self.proposals)

    @property
    def proposed(self) -> int:
        """Scored proposals; faults are left out."""
        return self.count("broken", "duplicate", "rejected", "admitted")

    @property
    def valid(self) -> int:
        """Passed every gate and is new: a copy of a task in the pool is no environment more."""
        return self.count("rejected", "admitted")

    @property
    def admitted(self) -> tuple[Proposal, ...]:
        """For the pool, in order."""
        return tuple(proposal for proposal in self.proposals if proposal.ruling.outcome == "admitted")

    @property
    def num_faults(self) -> int:
        return self.count("unmeasured")


async def propose(
    site: Site,
    assignments: Sequence[Assignment],
    admission: Admission,
    config: ProposeConfig,
    *,
    step: int,
    seed: int,
    memory: Mapping[str, bytes],
    rewards: RewardConfig,
    on_progress: OnProgress = silent,
) -> ProposeResult:
    """One round: config.attempts episodes at each assignment. `add_admitted` puts what came of it into the pool.

    memory: files for the workspace's memory/ folder (see `workspace.memory_files`).
    """
    gate = asyncio.Semaphore(config.concurrency)

    async def one(assignment: Assignment, index: int) -> Proposal:
        id = f"propose-{step}-{assignment.id}-{index}"
        async with gate:
            on_progress("proposer", "start", None)
            if config.arm == "prompt":
                proposal = await _from_prompt(site, assignment, admission, config, id, seed)
            else:
                proposal = await _from_agent(site, assignment, admission, config, id, seed, memory)
            reward = proposer_reward(proposal.ruling.outcome, rewards)
            on_progress("proposer", "fault" if reward is None else "end", reward)
            return proposal

    jobs = [one(assignment, index) for assignment in assignments for index in range(config.attempts)]
    proposals = without_twins(await asyncio.gather(*jobs), admission.near_duplicate)
    measured = tuple(proposer_groups(proposals, rewards))
    groups = tuple(filter(is_useful, measured)) if config.train else ()
    return ProposeResult(groups, measured, proposals, admission.num_episodes)


def add_admitted(pool: Pool, result: ProposeResult, step: int) -> None:
    """Put the admitted environments into the pool, with what calibration measured of them."""
    for proposal in result.admitted:
        task, calibration = proposal.ruling.task, proposal.ruling.calibration
        assert task is not None and calibration is not None, "an admitted proposal was calibrated"
        failed = (made.verdict for made in calibration.attempts if made.verdict.reward != 1.0)
        assignment = proposal.assignment
        asked = {"id": assignment.id, "direction": assignment.direction, "pass_rate": assignment.pass_rate}
        evidence = {"assignment": asked, **proposal.ruling.evidence()}
        pool.add(task, step, calibration.rewards, [failure(verdict) for verdict in failed], evidence)


def without_twins(proposals: Sequence[Proposal], near_duplicate: float) -> tuple[Proposal, ...]:
    """Of admitted twins (see admit.content_key) and near-duplicates the first stays admitted; the others become
    rejected."""
    seen, nearest = set[str](), Nearest()
    kept = []
    for proposal in proposals:
        ruling = proposal.ruling
        if ruling.outcome == "admitted" and ruling.task is not None:
            key = content_key(ruling.task)
            if key in seen or nearest.find(ruling.task)[1] > near_duplicate:
                ruling = replace(ruling, outcome="rejected", message="a twin of an earlier proposal of this round")
            else:
                nearest.add(ruling.task)
            seen.add(key)
        kept.append(replace(proposal, ruling=ruling))
    return tuple(kept)


def proposer_groups(proposals: Sequence[Proposal], rewards: RewardConfig) -> list[Group]:
    """One group an assignment, of the measured proposals."""
    members: dict[str, list[Attempt]] = {}
    for proposal in proposals:
        reward = proposer_reward(proposal.ruling.outcome, rewards)
        if reward is not None:
            attempt = Attempt(proposal.trajectory, Verdict(reward, log=proposal.ruling.message))
            members.setdefault(proposal.assignment.id, []).append(attempt)
    return [group_of("proposer", key, attempts) for key, attempts in members.items()]


# ---- the arms ---------------------------------------------------------------------------------------------------


async def _from_prompt(
    site: Site, assignment: Assignment, admission: Admission, config: ProposeConfig, id: str, seed: int
) -> Proposal:
    trajectory, text = await one_shot.complete(
        site.engine, site.chat, assignment, id=id, limits=config.episode, seed=seed
    )
    if trajectory.stop is Stop.FAULT:
        return Proposal(assignment, trajectory, UNMEASURED, 0)
    try:
        files = one_shot.parse_blocks(text, assignment.domain)
    except TaskError as error:
        return Proposal(assignment, trajectory, Ruling("broken", invalid_message(f"structure: {error}")), 0)
    try:
        if "tests/test_outputs.py" not in files:
            files |= await admission.snapshot(files)
        ruling = await admission.rule(files, assignment.domain, _lineage(assignment, 0))
    except TaskError as error:
        ruling = Ruling("broken", invalid_message(str(error)))
    except SandboxError:
        ruling = UNMEASURED
    return Proposal(assignment, trajectory, ruling, 0)


async def _from_agent(
    site: Site,
    assignment: Assignment,
    admission: Admission,
    config: ProposeConfig,
    id: str,
    seed: int,
    memory: Mapping[str, bytes],
) -> Proposal:
    try:
        sandbox = await open_workspace(
            site.backend, assignment, memory, config.episode.command_timeout_s - TOOL_MARGIN_S
        )
    except SandboxError:
        return Proposal(assignment, Trajectory(id, assignment.id, "proposer", (), Stop.FAULT), UNMEASURED, 0)
    desk = _Desk(sandbox, assignment, admission, config.max_revisions)
    try:
        async with serving(sandbox, desk.answer, config.max_tool_calls):
            trajectory = await run_episode(
                site.engine,
                site.chat,
                sandbox,
                id=id,
                task_id=assignment.id,
                role="proposer",
                system=SYSTEM["proposer"],
                user=proposer_message(assignment),
                limits=config.episode,
                cwd=WORKDIR,
                seed=seed,
                on_final=desk.submit,
            )
        if trajectory.stop is Stop.FAULT:
            ruling = UNMEASURED
        elif trajectory.stop is Stop.DONE and desk.last is not None:
            ruling = desk.last
        else:
            ruling = await desk.rule()
    finally:
        await sandbox.close()
    return Proposal(assignment, trajectory, ruling, desk.revision)


class _Desk:
    """The host's side of one agent episode: answers its tools, rules on its submissions."""

    def __init__(self, sandbox: Sandbox, assignment: Assignment, admission: Admission, max_revisions: int):
        self.last: Ruling | None = None
        self.revision = 0
        self._sandbox = sandbox
        self._assignment = assignment
        self._admission = admission
        self._max_revisions = max_revisions

    async def submit(self) -> str | None:
        """Rule on output/task; the message that sends it back, or None when the episode is over."""
        self.last = await self.rule()
        if self.last.outcome in ("admitted", "unmeasured") or self.revision >= self._max_revisions:
            return None
        self.revision += 1
        return self.last.message

    async def rule(self) -> Ruling:
        try:
            files = await read_output(self._sandbox)
            return await self._admission.rule(files, self._assignment.domain, _lineage(self._assignment, self.revision))
        except TaskError as error:
            return Ruling("broken", invalid_message(f"structure: {error}"))
        except SandboxError:
            return UNMEASURED

    async def answer(self, word: str) -> Answer:
        try:
            match word:
                case "validate":
                    return await self._validate()
                case "snapshot-tests":
                    return await self._snapshot_tests()
                case _:
                    return 2, "the tools are validate and snapshot-tests"
        except SandboxError:
            return 2, BROKE

    async def _validate(self) -> Answer:
        try:
            validation = await self._admission.validate(await read_output(self._sandbox))
        except TaskError as error:
            return 1, f"structure: {error}"
        if validation.valid is None:
            return 2, BROKE
        return (0, "valid") if validation.valid else (1, validation.complaint)

    async def _snapshot_tests(self) -> Answer:
        try:
            files = await read_output(self._sandbox)
        except TaskError as error:
            return 1, f"structure: {error}"
        try:
            tests = await self._admission.snapshot(files)
        except TaskError as error:
            return 1, str(error)
        await self._sandbox.put(OUTPUT, tests)
        return 0, f"wrote {tests['tests/test_outputs.py'].count(b'def test_')} tests"


UNMEASURED = Ruling("unmeasured", "")
BROKE = "the host could not do this; try again"


def _lineage(assignment: Assignment, revision: int) -> Lineage:
    return Lineage(None if assignment.parent is None else assignment.parent.id, assignment.id, revision)
