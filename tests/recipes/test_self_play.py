"""The real loop, small: the shipped model, real sandboxes, real optimizer steps."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

OUTCOMES = ("broken", "duplicate", "rejected", "admitted")
SMALL = [
    "steps=2",
    "num_seeds=8",
    "solve.envs_per_step=2",
    "solve.attempts=4",
    "solve.max_draws=3",
    "propose.every=2",
    "propose.assignments=1",
    "propose.attempts=3",
    "eval.before=false",
    "eval.after=false",
]


def command(repo: Path, run_dir: Path, *overrides: str) -> list[str]:
    recipe = ["recipes/self_play.py", "recipes/tiny_cpu.yaml", f"run_dir={run_dir}", *SMALL, *overrides]
    return [sys.executable, *recipe]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_everything_that_the_readme_names(repo: Path, tmp_path: Path):
    run_dir = tmp_path / "run"
    done = subprocess.run(command(repo, run_dir), cwd=repo, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["proposed"] == 3 and summary["faults"] == 0
    assert summary["admitted"] <= summary["valid"] <= summary["proposed"]
    metrics = lines(run_dir / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1]
    assert [sum(row[f"proposer/{o}"] for o in OUTCOMES) for row in metrics] == [0, 3]
    trajectories = lines(run_dir / "trajectories" / "step_000001.jsonl")
    roles = [row["role"] for row in trajectories]
    assert roles.count("proposer") == 3 and roles.count("solver") >= 8
    assert all(f"[{row['role']}]" in row["turns"][0]["observed"] for row in trajectories)
    tasks = list((run_dir / "pool" / "tasks").iterdir())
    assert len(tasks) == 8 + summary["admitted"]
    assert all((task / "instruction.md").is_file() and (task / "solution" / "solve.sh").is_file() for task in tasks)
    assert list((run_dir / "tensorboard").iterdir())
    assert (run_dir / "checkpoints" / "step_000002" / "policy" / "model.safetensors").is_file()


def test_a_killed_run_goes_on_and_ends_as_an_unbroken_one(repo: Path, tmp_path: Path):
    """kill -9 after the first checkpoint, then the same command: the same steps, each once, with the same rewards."""
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    first = subprocess.Popen(command(repo, broken), cwd=repo, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 200
    while not (broken / "checkpoints" / "step_000001").is_dir() and first.poll() is None:
        assert time.monotonic() < deadline, "the first step never ended"
        time.sleep(0.05)
    time.sleep(0.5)  # into the second step
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    for run_dir in (broken, whole):
        done = subprocess.run(command(repo, run_dir), cwd=repo, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    rows = [lines(run_dir / "metrics.jsonl") for run_dir in (broken, whole)]
    assert [row["step"] for row in rows[0]] == [0, 1]
    for key in ("solver/reward", "solver/episodes", "pool/size"):
        assert [row[key] for row in rows[0]] == [row[key] for row in rows[1]], key
    journals = [lines(run_dir / "pool" / "journal.jsonl") for run_dir in (broken, whole)]
    assert journals[0] == journals[1]


def test_ctrl_c_finishes_the_step_and_leaves_no_sandbox(repo: Path, tmp_path: Path):
    run_dir = tmp_path / "run"
    running = subprocess.Popen(
        command(repo, run_dir, "steps=50"), cwd=repo, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 200
    while not (run_dir / "checkpoints" / "step_000001").is_dir() and running.poll() is None:
        assert time.monotonic() < deadline, "the first step never ended"
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, told = running.communicate(timeout=120)
    assert running.returncode == 0 and "finishing this step" in told
    rows = lines(run_dir / "metrics.jsonl")
    assert 1 <= len(rows) < 50 and (run_dir / "checkpoints" / f"step_{len(rows):06d}").is_dir()
    sandboxes = Path(os.environ.get("TMPDIR", "/tmp")) / f"rsi-sandboxes-{os.getuid()}"
    assert not list(sandboxes.glob(f"sbx-{running.pid}-*"))


def test_a_mistake_in_the_recipe_is_told_in_one_line_with_the_mend(repo: Path, tmp_path: Path):
    done = subprocess.run(
        command(repo, tmp_path / "run", "solve.envs_per_stp=4"), cwd=repo, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "envs_per_step" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_two_processes_train_what_the_first_one_samples(repo: Path, tmp_path: Path):
    """The sharded trainer under torchrun, then the same command with one process: it goes on from the shards of two."""
    run_dir = tmp_path / "run"
    more = ["num_seeds=30", "solve.attempts=8", "solve.max_draws=20", "propose.every=0", "trainer.backend=fsdp"]
    for world, steps in ((2, 1), (1, 2)):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        recipe = command(repo, run_dir, *more, "trainer.layout=packed", f"steps={steps}")[1:]
        done = subprocess.run([*launch, *recipe], cwd=repo, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    first, second = lines(run_dir / "metrics.jsonl")
    assert first["gate_mean"] < 1e-4 and second["gate_mean"] < 1e-4  # engine and trainer agree, after the resume too
    assert first["loss"] is not None and second["staleness_max"] == 0 and second["skipped"] == 0
    assert (run_dir / "model" / "model.safetensors").is_file() and (run_dir / "model" / "tokenizer.json").is_file()
