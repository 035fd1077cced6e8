"""rsi.run: what a run leaves behind, and that a kill at any moment neither loses nor doubles any of it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rsi.run import REQUEUE_CODE, RunDir, RunError
from rsi.types import Attempt, Group, Stop, TestResult, Trajectory, Turn, Verdict


@dataclass(frozen=True)
class Inner:
    lr: float = 0.5


@dataclass(frozen=True)
class Config:
    steps: int = 3
    inner: Inner = Inner()


def open_run(
    path: Path, config: Config = Config(), keep: int = 2, clock: Callable[[], float] = time.monotonic
) -> RunDir:
    return RunDir(path, config, keep=keep, min_free_mb=1, tensorboard=False, clock=clock)


def write_weights(directory: Path) -> None:
    (directory / "weights").write_text("w")


def group(step: int) -> Group:
    turn = Turn((1, 2), (3, 4, 5), (-0.5, -0.25, -0.125), version_min=step, version_max=step)
    trajectory = Trajectory(f"episode-{step}", "task-a", "solver", (turn,), Stop.DONE)
    verdict = Verdict(0.5, (TestResult("test_one", True), TestResult("test_two", False, "b.txt is missing")))
    return Group("solver", "task-a", (Attempt(trajectory, verdict),), (0.5,))


def decode(ids: object) -> str:
    return f"<{ids}>"


def rows(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_one_json_object_a_step(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        run.log(0, {"loss": 0.5, "note": "first"}, {"reward": float("nan")})
        run.log(1, {"loss": 0.25})
    first, second = rows(tmp_path)
    assert {k: first[k] for k in ("step", "loss", "note", "reward")} == {
        "step": 0,
        "loss": 0.5,
        "note": "first",
        "reward": None,
    }
    assert (second["step"], second["loss"]) == (1, 0.25)


def test_a_trajectory_is_one_readable_line(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        run.write_trajectories(12, [group(7)], decode)
    [line] = (tmp_path / "trajectories" / "step_000012.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 12,
        "id": "episode-7",
        "role": "solver",
        "task": "task-a",
        "group": "task-a",
        "reward": 0.5,
        "verdict": 0.5,
        "failed": ["test_two"],
        "stop": "done",
        "sampled_tokens": 3,
        "versions": [7, 7],
        "turns": [{"observed": "<(1, 2)>", "sampled": "<(3, 4, 5)>"}],
    }


def test_a_checkpoint_gives_back_step_directory_and_state(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        assert run.latest() is None
        run.save(1, write_weights, {"pool": [1, 2]})
    with open_run(tmp_path) as run:
        found = run.latest()
    assert found is not None
    step, directory, state = found
    assert (step, state, (directory / "weights").read_text()) == (1, {"pool": [1, 2]}, "w")


def test_a_writer_may_put_a_directory_of_its_own_in_place(tmp_path: Path) -> None:
    def replaces(directory: Path) -> None:  # as a trainer does that writes aside and renames
        other = directory.with_name(f".{directory.name}.partial")
        other.mkdir()
        write_weights(other)
        directory.rmdir()
        other.rename(directory)

    with open_run(tmp_path) as run:
        assert (run.save(1, replaces, {}) / "weights").read_text() == "w"
        found = run.latest()
    assert found is not None and found[0] == 1


def test_only_the_last_checkpoints_stay(tmp_path: Path) -> None:
    with open_run(tmp_path, keep=2) as run:
        for step in range(1, 5):
            run.save(step, write_weights, {})
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_000003", "step_000004"]


def test_the_last_save_of_a_step_wins(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        run.save(0, write_weights, {"heldout": None})
        run.save(0, write_weights, {"heldout": 0.5})
        assert run.latest() == (0, tmp_path / "checkpoints" / "step_000000", {"heldout": 0.5})


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    def breaks(directory: Path) -> None:
        write_weights(directory)
        raise OSError(28, "No space left on device")

    with open_run(tmp_path) as run:
        run.save(1, write_weights, {})
        with pytest.raises(RunError, match="no disk space left to write step_000002"):
            run.save(2, breaks, {})
        found = run.latest()
    assert found is not None and found[0] == 1
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]


@pytest.mark.parametrize(
    ("left", "final", "survives"),
    [
        (".old_step_000002", False, True),  # killed between the two renames of a second save
        (".old_step_000002", True, True),
        (".new_step_000002", False, False),  # killed while writing
        (".gone_step_000002", False, False),  # killed while deleting
    ],
)
def test_what_a_kill_left_between_renames_is_mended(tmp_path: Path, left: str, final: bool, survives: bool) -> None:
    with open_run(tmp_path) as run:
        run.save(1, write_weights, {})
        run.save(2, write_weights, {})
    checkpoints = tmp_path / "checkpoints"
    if final:
        (checkpoints / left).mkdir()
    else:
        (checkpoints / "step_000002").rename(checkpoints / left)
    with open_run(tmp_path) as run:
        found = run.latest()
    assert found is not None and found[0] == (2 if survives else 1)
    assert not list(checkpoints.glob(".*"))


def test_opening_drops_what_came_after_the_checkpoint_and_a_torn_line(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        for step in range(3):
            run.write_trajectories(step, [group(step)], decode)
            run.log(step, {"loss": step})
            if step < 2:
                run.save(step + 1, write_weights, {})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    with open_run(tmp_path):
        pass
    assert [row["step"] for row in rows(tmp_path)] == [0, 1]
    assert sorted(p.name for p in (tmp_path / "trajectories").iterdir()) == ["step_000000.jsonl", "step_000001.jsonl"]


def test_a_torn_line_without_a_checkpoint_is_dropped_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"st')
    with open_run(tmp_path) as run:
        run.log(0, {"loss": 1.0})
    assert [row["step"] for row in rows(tmp_path)] == [0]


LOOP = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_run import Config, decode, group, open_run
import time

def main():
    with open_run(Path(sys.argv[1]), Config(steps=12)) as run:
        print("open", flush=True)
        found = run.latest()
        step, directory, state = found or (0, None, {"episodes": 0})
        weights = int((directory / "weights").read_text()) if directory else 0
        for step in range(step, 12):
            with run.phase("solve"):
                time.sleep(0.03)
            run.write_trajectories(step, [group(step)] * 3, decode)
            weights += step
            state = {"episodes": state["episodes"] + 3}
            run.log(step, {"weights": weights})
            run.save(step + 1, lambda d: (d / "weights").write_text(str(weights)), state)
            if run.stop_requested:
                sys.exit(run.leave())
        run.write_summary({"episodes": state["episodes"], "weights": weights})

main()
"""


def start_loop(run_dir: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", LOOP, str(run_dir), str(Path(__file__).parent)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def assert_the_loop_counted_once(run_dir: Path) -> None:
    assert json.loads((run_dir / "summary.json").read_text()) == {"episodes": 36, "weights": 66}
    assert [(row["step"], row["weights"]) for row in rows(run_dir)] == [(s, s * (s + 1) // 2) for s in range(12)]
    for step in range(12):
        lines = (run_dir / "trajectories" / f"step_{step:06d}.jsonl").read_text().splitlines()
        assert [json.loads(line)["id"] for line in lines] == [f"episode-{step}"] * 3


def test_sigkill_at_any_moment_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    moments = random.Random(7)
    for life in range(8):
        process = start_loop(tmp_path)
        assert process.stdout is not None and process.stdout.readline() == b"open\n"
        time.sleep(moments.uniform(0, 0.15))  # at most 5 of the 12 steps: the first two lives cannot finish
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL or life >= 2
    assert start_loop(tmp_path).communicate(timeout=60)[1] == b""
    assert_the_loop_counted_once(tmp_path)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, REQUEUE_CODE), (signal.SIGUSR1, REQUEUE_CODE), (signal.SIGINT, 0)]
)
def test_the_first_signal_finishes_the_step_and_the_same_command_goes_on(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = start_loop(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    while not metrics.exists() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code and (tmp_path / "requeue").exists() is bool(code)
    assert f"{number.name}: finishing this step".encode() in errors
    assert not (tmp_path / "summary.json").exists()
    assert start_loop(tmp_path).communicate(timeout=60)[1] == b""
    assert_the_loop_counted_once(tmp_path)


def test_a_file_stops_a_run_that_no_signal_reaches(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        assert not run.stop_requested
        (tmp_path / "stop").touch()
        assert run.stop_requested and run.leave() == REQUEUE_CODE
    assert (tmp_path / "requeue").exists()
    with open_run(tmp_path) as run:  # the same command goes on
        assert not run.stop_requested and not (tmp_path / "requeue").exists()


def save_three(tmp_path: Path) -> Path:
    """Checkpoints of the steps 1, 2 and 3; returns their directory."""
    with open_run(tmp_path, keep=3) as run:
        for step in range(3):
            run.log(step, {"loss": float(step)})
            run.save(step + 1, write_weights, {"after": step + 1})
    return tmp_path / "checkpoints"


def cut(directory: Path) -> None:
    (directory / "weights").write_text("")


def change(directory: Path) -> None:
    (directory / "weights").write_text("v")


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (cut, "weights has 0 bytes, 1 were written"),
        (change, "weights has changed since it was written"),
        (lambda directory: (directory / "weights").unlink(), "weights is missing"),
        (lambda directory: (directory / "COMPLETE").unlink(), "COMPLETE is missing"),
        (lambda directory: (directory / "COMPLETE").write_text("{"), "COMPLETE does not read"),
    ],
)
def test_a_broken_checkpoint_is_refused_by_name_and_the_one_before_it_is_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], spoil: Callable[[Path], object], fault: str
) -> None:
    checkpoints = save_three(tmp_path)
    spoil(checkpoints / "step_000003")
    with open_run(tmp_path, keep=3) as run:
        assert f"refused checkpoint {checkpoints / 'step_000003'}: {fault}" in capfd.readouterr().err
        found = run.latest()
        assert found is not None and found[0] == 2 and found[2] == {"after": 2}
        assert [row["step"] for row in rows(tmp_path)] == [0, 1]
        assert (checkpoints / "refused_step_000003").is_dir()
        run.save(3, write_weights, {"after": 3})
    with open_run(tmp_path, keep=3) as run:
        found = run.latest()
        assert found is not None and found[0] == 3


def test_a_run_whose_checkpoints_are_all_broken_does_not_start_over(tmp_path: Path) -> None:
    checkpoints = save_three(tmp_path)
    for directory in checkpoints.iterdir():
        change(directory)
    with pytest.raises(RunError, match="step_000003: weights has changed.*step_000001: weights has changed"):
        open_run(tmp_path).__enter__()


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with open_run(tmp_path) as run:
        os.kill(os.getpid(), signal.SIGINT)
        assert run.stop_requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_two_processes_do_not_write_to_one_run(tmp_path: Path) -> None:
    with open_run(tmp_path):
        _, errors = start_loop(tmp_path).communicate(timeout=60)
    assert f"another process (pid {os.getpid()}) writes to {tmp_path}" in errors.decode()


def test_other_settings_are_refused_by_name_and_more_steps_are_fine(tmp_path: Path) -> None:
    with open_run(tmp_path, Config(steps=3)):
        pass
    with open_run(tmp_path, Config(steps=9)):
        pass
    assert "steps: 9" in (tmp_path / "config.yaml").read_text()
    with pytest.raises(RunError, match=r"inner\.lr: 0\.5 there, 0\.25 now.*run_dir="):
        open_run(tmp_path, replace(Config(), inner=Inner(0.25))).__enter__()
    with open_run(tmp_path, Config(steps=9)):  # the refused one let go of the lock and changed nothing
        pass


def test_too_little_disk_stops_before_the_run_begins(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"MiB of disk free, and a step needs 1000000000; free some"):
        RunDir(tmp_path, Config(), min_free_mb=10**9, tensorboard=False).__enter__()


def test_a_full_disk_while_logging_names_the_mend(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(RunError, match=r"no disk space left to write metrics\.jsonl .*the last checkpoint"):
            run.log(0, {"loss": 1.0})


def test_phases_add_up_count_overlap_once_and_survive_a_resume(tmp_path: Path) -> None:
    clock = [100.0]
    with open_run(tmp_path, clock=lambda: clock[0]) as run:
        with run.phase("solve"):
            clock[0] += 2
            with run.phase("solve"):  # a second coroutine
                clock[0] += 1
        with run.phase("train"):
            clock[0] += 4
        run.log(0, {})
        with run.phase("solve"):
            clock[0] += 10
        run.log(1, {})
        run.save(2, write_weights, {})
    assert [(row["seconds/solve"], row["seconds/train"]) for row in rows(tmp_path)] == [(3, 4), (10, 0)]
    clock[0] += 1000
    with open_run(tmp_path, clock=lambda: clock[0]) as run:
        clock[0] += 5
        assert run.seconds_by_phase == {"solve": 13, "train": 4}
        assert run.wall_s == 22


def test_scalars_reach_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunDir(tmp_path, Config(), min_free_mb=1) as run:
        run.log(0, {"loss": 0.5, "note": "text stays in metrics.jsonl"})
        run.log(1, {"loss": 0.25})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 0.5), (1, 0.25)]
    assert "note" not in events.Tags()["scalars"]
