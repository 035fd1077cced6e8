"""Self-play: one checkpoint proposes environments, solves them, and is trained on both roles.

    torchrun --standalone --nproc-per-node=1 recipes/self_play.py recipes/tiny_cpu.yaml [--steps 4] [solve.attempts=8]

The same command goes on from the last finished step after any interruption. With several processes the first runs this
loop and the others train with it (trainer.backend=fsdp). AutoEnvScaling (arXiv 2610.14163) does not
say whether both roles share an optimizer step; here they do.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rsi.admission.contamination import HeldOut
from rsi.advantages import is_truncated, to_samples
from rsi.config import ConfigError, RunConfig, load, parse_argv
from rsi.domains import build_domain
from rsi.lab import Lab, follow, is_follower, open_lab
from rsi.pack import pack
from rsi.pool import Pool, failure
from rsi.progress import print_summary
from rsi.propose import ProposeResult, add_admitted, propose
from rsi.propose.admit import measure, open_admission
from rsi.propose.workspace import memory_files
from rsi.run import RunDir
from rsi.solve import OnProgress, SolveResult, solve
from rsi.trainer.guard import Guard
from rsi.types import Task
from rsi_eval.heldout import evaluate, load_suite


async def self_play(config: RunConfig, run: RunDir, lab: Lab) -> int:
    policy, engine, watch = lab.policy, lab.site.engine, watcher(config, run, lab)
    state = await begin(config, run, lab)
    pool = state.pool
    guard = Guard(policy, config.trainer, run.path / "skipped", state.skips)
    for step in range(state.step, config.steps):
        rng, sampled = np.random.default_rng([config.seed, step]), engine.num_generated
        await engine.load(policy.model, policy.version)
        proposed = ProposeResult()
        if config.propose.every and (step + 1) % config.propose.every == 0:
            with run.phase("propose"):
                proposed = await propose_round(config, lab, state, step, rng, watch)
                add_admitted(pool, proposed, step)
        with run.phase("solve"):
            solved = await solve_round(config, lab, pool, step, rng, watch)
        with run.phase("train"):
            samples = to_samples([*solved.groups, *proposed.groups], config.advantage)
            metrics = guard.update(pack(samples), step) if samples else {}
        if (step + 1) % config.pool.review_every == 0:
            with run.phase("review"):
                await review(config, lab, pool, step, watch)
        state = state.after(proposed, solved, guard.in_a_row)
        run.progress.admitted = state.counts["admitted"]
        run.write_trajectories(step, [*solved.measured, *proposed.measured], lab.site.chat.decode)
        run.log(step, metrics, describe(state, proposed, solved), {"tokens_sampled": engine.num_generated - sampled})
        run.save(step + 1, lambda directory: policy.save(directory / "policy"), state.to_json())
        if run.stop_requested:
            return run.leave()
    await finish(config, run, lab, state)
    return 0


@dataclass(frozen=True)
class State:
    """What a run carries from step to step besides the weights; a checkpoint holds it."""

    step: int
    """Steps done."""
    pool: Pool
    held_out: HeldOut
    counts: Counter[str]
    """Since the start: proposed, valid, admitted, solver_episodes, calibration_episodes, faults."""
    heldout_before: dict[str, Any] | None
    skips: int = 0
    """Updates in a row that were not finite."""

    def after(self, proposed: ProposeResult, solved: SolveResult, skips: int) -> State:
        counts = self.counts + Counter(
            proposed=proposed.proposed,
            valid=proposed.valid,
            admitted=len(proposed.admitted),
            solver_episodes=solved.num_episodes,
            calibration_episodes=proposed.num_calibrations,
            faults=solved.num_faults + proposed.num_faults,
        )
        return replace(self, step=self.step + 1, counts=counts, skips=skips)

    def to_json(self) -> dict[str, Any]:
        return {
            "pool": self.pool.state(),
            "counts": dict(self.counts),
            "heldout_before": self.heldout_before,
            "skips": self.skips,
        }


async def begin(config: RunConfig, run: RunDir, lab: Lab) -> State:
    """The state to go on from: the last checkpoint's, or a new run's, whose pool holds the domain's seeds."""
    suite = load_suite()
    held_out = HeldOut.from_tasks(item.task for item in suite)
    root = run.path / "pool"
    if latest := run.latest():
        step, directory, saved = latest
        lab.policy.load(directory / "policy")
        pool = Pool.restore(config.pool, root, saved["pool"])
        return State(step, pool, held_out, Counter(saved["counts"]), saved["heldout_before"], saved["skips"])
    pool = Pool(config.pool, root)
    for task in build_domain(config.domain).seeds(config.num_seeds, np.random.default_rng(config.seed)):
        pool.add(task, 0)
    before = await score(config, run, lab) if config.eval.before else None
    state = State(0, pool, held_out, Counter(), before)
    run.save(0, lambda directory: lab.policy.save(directory / "policy"), state.to_json())
    return state


async def propose_round(
    config: RunConfig, lab: Lab, state: State, step: int, rng: np.random.Generator, watch: OnProgress
) -> ProposeResult:
    """Assignments from what the solver did, the proposer's episodes at them, and the host's rulings."""
    entries = state.pool.entries
    admission = open_admission(
        lab.site,
        config.admission,
        config.calibrate,
        config.solve.episode,
        held_out=state.held_out,
        known=[entry.task for entry in entries],
        near_duplicate=config.pool.near_duplicate,
        step=step,
        seed=config.seed,
        on_progress=watch,
    )
    return await propose(
        lab.site,
        state.pool.assign(config.propose.assignments, rng, config.domain),
        admission,
        config.propose,
        step=step,
        seed=config.seed,
        memory=memory_files((entry.task, entry.mean) for entry in entries if entry.mean is not None),
        rewards=config.reward,
        on_progress=watch,
    )


async def solve_round(
    config: RunConfig, lab: Lab, pool: Pool, step: int, rng: np.random.Generator, watch: OnProgress
) -> SolveResult:
    """Groups of attempts at environments of the pool, which hears of every one before more are drawn."""
    return await solve(
        lab.site,
        lambda num: pool.sample(num, rng),
        config.solve,
        step=step,
        seed=config.seed,
        record=lambda groups: pool.record(groups, step),
        on_progress=watch,
    )


async def review(config: RunConfig, lab: Lab, pool: Pool, step: int, watch: OnProgress) -> None:
    """Measure the tasks that are due with the updated solver; the pool evicts those outside the band."""
    await lab.site.engine.load(lab.policy.model, lab.policy.version)

    def one(task: Task):
        name, limits = f"review-{step}", config.solve.episode
        return measure(lab.site, task, config.calibrate, limits, name=name, seed=config.seed, on_progress=watch)

    due = pool.stale(step)
    measured = await asyncio.gather(*map(one, due))
    for task, calibration in zip(due, measured, strict=True):
        failed = (made.verdict for made in calibration.attempts if made.verdict.reward != 1.0)
        pool.review(task.id, calibration.rewards, step, [failure(verdict) for verdict in failed])


async def score(config: RunConfig, run: RunDir, lab: Lab) -> dict[str, Any]:
    """The held-out suite, with the weights as they are."""
    run.progress.role = "held-out"
    with run.phase("eval"):
        await lab.site.engine.load(lab.policy.model, lab.policy.version)
        result = await evaluate(
            lab.site,
            load_suite(),
            attempts=config.eval.attempts,
            limits=config.solve.episode,
            seed=config.seed,
            temperature=config.eval.temperature,
            concurrency=config.solve.concurrency,
            on_progress=watcher(config, run, lab),
        )
    return result.to_json()


async def finish(config: RunConfig, run: RunDir, lab: Lab, state: State) -> None:
    after = await score(config, run, lab) if config.eval.after else None
    summary = {
        "heldout_before": state.heldout_before,
        "heldout_after": after,
        **{name: state.counts[name] for name in ("proposed", "valid", "admitted")},
        "wall_s": run.wall_s,
        "seconds_by_phase": run.seconds_by_phase,
        "solver_episodes": state.counts["solver_episodes"],
        "calibration_episodes": state.counts["calibration_episodes"],
        "faults": state.counts["faults"],
        "steps": state.step,
        "pool": state.pool.stats(),
        "run_dir": str(run.path),
    }
    run.write_summary(summary)
    if config.trainer.backend == "fsdp":  # a local checkpoint is a model directory, a sharded one is not
        lab.policy.export(run.path / "model")
    run.progress.stop()
    print_summary(summary)


def describe(state: State, proposed: ProposeResult, solved: SolveResult) -> dict[str, Any]:
    """What metrics.jsonl says of a step, besides the trainer's own metrics."""
    rewards, proposer = ([r for group in part.measured for r in group.rewards] for part in (solved, proposed))
    truncated = [is_truncated(attempt) for group in solved.measured for attempt in group.attempts]
    outcomes = ("broken", "duplicate", "rejected", "admitted", "unmeasured")
    return {
        "solver/reward": float(np.mean(rewards)) if rewards else None,
        "solver/pass_rate": float(np.mean([reward == 1.0 for reward in rewards])) if rewards else None,
        "solver/truncated_frac": float(np.mean(truncated)) if truncated else None,
        "solver/useful_frac": solved.useful_frac,
        "solver/groups": len(solved.groups),
        "solver/episodes": solved.num_episodes,
        "proposer/reward": float(np.mean(proposer)) if proposer else None,
        "proposer/groups": len(proposed.groups),
        "proposer/calibration_episodes": proposed.num_calibrations,
        "faults": solved.num_faults + proposed.num_faults,
        **{f"proposer/{outcome}": proposed.count(outcome) for outcome in outcomes},
        **{f"pool/{name}": value for name, value in state.pool.stats().items()},
    }


def watcher(config: RunConfig, run: RunDir, lab: Lab) -> OnProgress:
    """Keeps the live display: episodes done and alive, pass rate, valid rate."""
    progress, passed = run.progress, Counter[str]()

    def watch(role: str, event: str, reward: float | None) -> None:
        progress.role, progress.num_tokens = role, lab.site.engine.num_generated
        progress.alive += 1 if event == "start" else -1
        if event != "start":
            progress.done += 1
        if reward is not None:
            passed[role] += 1
            passed[f"{role} well"] += reward == 1.0 if role == "solver" else reward > config.reward.invalid
            rate = passed[f"{role} well"] / passed[role]
            if role == "solver":
                progress.solver_pass_rate = rate
            else:
                progress.valid_rate = rate

    return watch


async def main(argv: list[str]) -> int:
    path, overrides = parse_argv(argv)
    config = load(RunConfig, path, overrides)
    if is_follower():
        follow(config)
        return 0
    with RunDir(Path(config.run_dir or f"runs/{path.stem}"), config) as run:
        async with open_lab(config) as lab:
            return await self_play(config, run, lab)


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main(sys.argv[1:])))
    except (ConfigError, ValueError, RuntimeError, OSError) as error:
        sys.exit(f"self_play: {error}")
