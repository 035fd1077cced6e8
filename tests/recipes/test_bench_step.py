import json
import subprocess
import sys
from pathlib import Path


def test_the_benchmark_gives_seconds_and_tokens_a_second_by_phase(repo: Path) -> None:
    small = ["propose.every=0", "solve.envs_per_step=1", "solve.max_draws=1", "solve.attempts=2", "num_seeds=2"]
    command = [sys.executable, "scripts/bench_step.py", "--steps", "1", "--json", *small]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["seconds_by_phase"]["solve"] > 0 and found["tokens_per_s"]["generate"] > 0
