"""N steps equal k steps, kill -9 and a resume, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.trainer.ranks import ROOT

STEPS = 40


def start(run_dir: Path, model_dir: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("killed_driver.py")), str(run_dir), str(model_dir)]
    return subprocess.Popen(
        [*command, str(STEPS)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_steps_with_kills_end_with_the_weights_of_steps_without(model_dir: Path, tmp_path: Path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start(whole, model_dir).wait(timeout=240) == 0
    moments, kills = random.Random(5), 0
    for _ in range(3):
        process = start(broken, model_dir)
        assert process.stdout is not None and process.stdout.readline() == b"open\n"
        time.sleep(moments.uniform(0.05, 0.5))  # 40 steps with their checkpoints take over a second
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
    assert start(broken, model_dir).wait(timeout=240) == 0
    assert kills == 3
    assert (broken / "summary.json").read_bytes() == (whole / "summary.json").read_bytes()
    assert json.loads((broken / "summary.json").read_text())["version"] == STEPS
    logged = [[json.loads(line) for line in (run / "metrics.jsonl").open()] for run in (broken, whole)]
    times = {"wall_s", "memory_peak_mb"}
    a, b = ([{key: row[key] for key in row if key not in times} for row in rows] for rows in logged)
    assert a == b and [row["step"] for row in a] == list(range(STEPS))
