"""Valid-environment rate of the agent in a terminal against one completion, from one checkpoint.

    python scripts/compare_arms.py [--model DIR] [--assignments 16] [--attempts 8] [--json] [key=value ...]

The solver attempts the recipe's seeds once, assignments are drawn from what it did there, and both arms work on all of
them under the same gates. Valid means new as well: a copy of a seed is none. valid / proposed with a Wilson 95 %
interval; faults of ours are left out. Sampled tokens per valid environment stand for the cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rsi.admission.contamination import HeldOut
from rsi.config import RunConfig, load
from rsi.domains import build_domain
from rsi.lab import Lab, open_lab
from rsi.pool import Pool
from rsi.propose import propose
from rsi.propose.admit import open_admission
from rsi.propose.workspace import memory_files
from rsi.solve import solve
from rsi.stats import wilson
from rsi.types import Group
from rsi_eval.heldout import load_suite

ROOT = Path(__file__).resolve().parent.parent
ARMS = ("prompt", "agent")


async def compare(config: RunConfig, num_assignments: int, attempts: int) -> dict[str, Any]:
    rng = np.random.default_rng(config.seed)
    held_out = HeldOut.from_tasks(item.task for item in load_suite())
    async with open_lab(config) as lab:
        with tempfile.TemporaryDirectory(prefix="rsi-arms-") as directory:
            pool = Pool(config.pool, Path(directory))
            await measure_seeds(config, lab, pool, rng)
            assignments = pool.assign(num_assignments, rng, config.domain)
            rows = {}
            for arm in ARMS:
                admission = open_admission(
                    lab.site,
                    config.admission,
                    config.calibrate,
                    config.solve.episode,
                    held_out=held_out,
                    known=[entry.task for entry in pool.entries],
                    near_duplicate=config.pool.near_duplicate,
                    step=0,
                    seed=config.seed,
                )
                result = await propose(
                    lab.site,
                    assignments,
                    admission,
                    replace(config.propose, arm=arm, attempts=attempts),
                    step=0,
                    seed=config.seed,
                    memory=memory_files((entry.task, entry.mean) for entry in pool.entries if entry.mean is not None),
                    rewards=config.reward,
                )
                sampled = sum(proposal.trajectory.num_sampled for proposal in result.proposals)
                rows[arm] = {
                    "proposed": result.proposed,
                    "valid": result.valid,
                    "duplicates": result.count("duplicate"),
                    "admitted": len(result.admitted),
                    "valid_rate": result.valid / max(1, result.proposed),
                    "ci95": list(wilson(result.valid, result.proposed)),
                    "proposer_tokens_per_valid": round(sampled / max(1, result.valid)),
                    "faults": result.num_faults,
                }
    return rows


async def measure_seeds(config: RunConfig, lab: Lab, pool: Pool, rng: np.random.Generator) -> None:
    """Fill the pool with seeds and let the solver attempt each once over, so that assignments rest on what it did."""
    tasks = build_domain(config.domain).seeds(config.num_seeds, rng)
    for task in tasks:
        pool.add(task, 0)
    once = replace(config.solve, envs_per_step=len(tasks), max_draws=len(tasks))
    left = iter([tasks])

    def record(groups: Sequence[Group]) -> None:
        pool.record(groups, 0)

    await solve(lab.site, lambda num: next(left, []), once, step=0, seed=config.seed, record=record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "tiny_cpu.yaml")
    parser.add_argument("--model", default="", help="checkpoint of both roles; empty: the recipe's")
    parser.add_argument("--assignments", type=int, default=16)
    parser.add_argument("--attempts", type=int, default=8, help="proposals at each assignment, in each arm")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    model = [f"model.path={args.model}"] if args.model else []
    config = load(RunConfig, args.recipe, [*args.overrides, *model])
    rows = asyncio.run(compare(config, args.assignments, args.attempts))
    if args.json:
        print(json.dumps(rows))
        return
    for arm, row in rows.items():
        low, high = row["ci95"]
        print(
            f"{arm:7s} valid {row['valid']}/{row['proposed']} = {row['valid_rate']:.1%} [{low:.1%}, {high:.1%}]  "
            f"duplicates {row['duplicates']}  admitted {row['admitted']}  "
            f"tokens/valid {row['proposer_tokens_per_valid']}"
        )


if __name__ == "__main__":
    main()
