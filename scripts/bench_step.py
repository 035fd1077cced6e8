"""Seconds and tokens per second of one self-play step, by phase, on this machine.

    python scripts/bench_step.py [--recipe recipes/tiny_cpu.yaml] [--steps 4] [--json] [key=value ...]

Runs the recipe's real loop in a temporary directory, without the held-out evaluations: the work is that of its first
steps. tokens_per_s: `generate` counts sampled tokens over the phases that sample (propose, solve, review), sandboxes
included; `train` counts trained tokens over the optimizer steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SAMPLING = ("propose", "solve", "review")


def measure(recipe: Path, steps: int, overrides: list[str]) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="rsi-bench-") as directory:
        run_dir = Path(directory) / "run"
        fixed = [f"steps={steps}", f"run_dir={run_dir}", "eval.before=false", "eval.after=false"]
        command = [sys.executable, "recipes/self_play.py", str(recipe.resolve()), *overrides, *fixed]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    seconds = {
        name.removeprefix("seconds/"): sum(row.get(name, 0.0) for row in rows)
        for name in sorted({name for row in rows for name in row if name.startswith("seconds/")})
    }
    sampling_s = sum(seconds.get(name, 0.0) for name in SAMPLING)
    sampled = sum(row["tokens_sampled"] for row in rows)
    trained = sum(row.get("num_tokens", 0.0) for row in rows)
    return {
        "seconds_by_phase": {name: round(value / steps, 3) for name, value in seconds.items()},
        "tokens_per_s": {
            "generate": round(sampled / max(sampling_s, 1e-9), 1),
            "train": round(trained / max(seconds.get("train", 0.0), 1e-9), 1),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "tiny_cpu.yaml")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps; seconds are the mean of one (default 4)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    result = measure(args.recipe, args.steps, args.overrides)
    if args.json:
        print(json.dumps(result))
        return
    for name, table in result.items():
        print(name, "  ".join(f"{key} {value:g}" for key, value in table.items()))


if __name__ == "__main__":
    main()
