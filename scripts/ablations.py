"""Self-play against its ablations, over seeds: the table of the README.

    python scripts/ablations.py [--seeds 3] [--jobs 2] [--runs runs/ablations] [--json] [key=value ...]

Every arm starts from the same checkpoint. Each run goes to <runs>/<arm>-<seed>; finished ones are read, not run again,
and an interrupted call goes on. A cell is the mean held-out pass rate over seeds, with a 95 % t interval of the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ARMS = {
    "self_play": "recipes/tiny_cpu.yaml",
    "static_pool": "recipes/ablations/static_pool.yaml",
    "proposer_frozen": "recipes/ablations/proposer_frozen.yaml",
}
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Two-sided 95 % quantile of Student's t by number of seeds."""


def run(arm: str, seed: int, directory: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """One run's summary; the run's output goes to <directory>.log. Raises RuntimeError when it fails."""
    summary = directory / "summary.json"
    if not summary.exists():
        command = [
            sys.executable,
            "recipes/self_play.py",
            ARMS[arm],
            f"run_dir={directory}",
            f"seed={seed}",
            *overrides,
        ]
        log = directory.with_name(directory.name + ".log")
        with log.open("w") as file:
            done = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
            )
        if done.returncode or not summary.exists():
            raise RuntimeError(f"{arm} with seed {seed} did not finish; see {log}, and give the same command again")
    return json.loads(summary.read_text())


def table(summaries: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """By arm: pass rate by depth (mean, half-width, one value a seed) and what the arm spent."""
    rows = {}
    for arm, runs in summaries.items():
        depths = sorted(runs[0]["heldout_after"]["pass_rate"])
        rates = {depth: [run["heldout_after"]["pass_rate"][depth] for run in runs] for depth in depths}
        rows[arm] = {
            "pass_rate": {depth: statistics.mean(values) for depth, values in rates.items()},
            "half_width_95": {depth: half_width(values) for depth, values in rates.items()},
            "by_seed": rates,
            **{
                name: [run[name] for run in runs]
                for name in ("solver_episodes", "calibration_episodes", "proposed", "valid", "admitted", "wall_s")
            },
        }
    return rows


def half_width(values: Sequence[float]) -> float | None:
    if len(values) not in T_95:
        return None
    return T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--jobs", type=int, default=2, help="runs at once; each takes about one core")
    parser.add_argument("--runs", type=Path, default=Path("runs/ablations"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as workers:
        jobs = {
            (arm, seed): workers.submit(run, arm, seed, (args.runs / f"{arm}-{seed}").resolve(), args.overrides)
            for seed in range(args.seeds)
            for arm in args.arms
        }
        done = {key: job.result() for key, job in jobs.items()}
    rows = table({arm: [done[arm, seed] for seed in range(args.seeds)] for arm in args.arms})
    if args.json:
        print(json.dumps(rows))
        return
    for arm, row in rows.items():
        cells = [
            f"{depth}: {rate:6.1%}" + (f" ± {width:.1%}" if (width := row["half_width_95"][depth]) is not None else "")
            for depth, rate in row["pass_rate"].items()
        ]
        episodes = [a + b for a, b in zip(row["solver_episodes"], row["calibration_episodes"], strict=True)]
        print(f"{arm:16s} {'  '.join(cells)}   solver episodes {episodes}")


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(f"ablations: {error}")
