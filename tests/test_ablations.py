"""The table of `scripts/ablations.py`, from summaries as runs write them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def write_summary(runs: Path, arm: str, seed: int, rate: float) -> None:
    directory = runs / f"{arm}-{seed}"
    directory.mkdir(parents=True)
    after = {"suite": "heldout", "n": 50, "pass_rate": {"3": rate}, "ci95": {"3": [0.0, 1.0]}}
    spent = dict.fromkeys(
        ("solver_episodes", "calibration_episodes", "proposed", "valid", "admitted", "wall_s"), 10 * (seed + 1)
    )
    (directory / "summary.json").write_text(json.dumps({"heldout_after": after, **spent}))


def ablations(repo: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repo / "scripts" / "ablations.py"), *args]
    return subprocess.run(command, cwd=repo, capture_output=True, text=True, check=False)


def test_finished_runs_are_read_and_averaged_over_seeds(repo: Path, tmp_path: Path):
    for seed, rate in enumerate((0.5, 0.6, 0.7)):
        write_summary(tmp_path, "self_play", seed, rate)
    done = ablations(repo, "--arms", "self_play", "--seeds", "3", "--runs", str(tmp_path), "--json")
    row = json.loads(done.stdout)["self_play"]
    assert row["pass_rate"]["3"] == pytest.approx(0.6)
    assert row["half_width_95"]["3"] == pytest.approx(4.303 * 0.1 / 3**0.5)
    assert row["by_seed"]["3"] == [0.5, 0.6, 0.7] and row["admitted"] == [10, 20, 30]


def test_one_seed_has_no_interval(repo: Path, tmp_path: Path):
    write_summary(tmp_path, "self_play", 0, 0.5)
    done = ablations(repo, "--arms", "self_play", "--seeds", "1", "--runs", str(tmp_path))
    assert done.stdout.startswith("self_play") and "±" not in done.stdout


def test_a_run_that_fails_is_named_with_its_log(repo: Path, tmp_path: Path):
    done = ablations(repo, "--arms", "self_play", "--seeds", "1", "--runs", str(tmp_path), "no.such.key=1")
    assert done.returncode and "self_play with seed 0 did not finish; see" in done.stderr
    assert "unknown key 'no'" in (tmp_path / "self_play-0.log").read_text()
