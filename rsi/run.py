"""A run's directory: settings, metrics, trajectories, checkpoints, and the way back after `kill -9`.

The rename of a finished checkpoint directory is the one commit point. Opening a run drops everything that was written
for steps after its last checkpoint, so that the same command goes on with nothing lost and nothing counted twice. A
checkpoint that has lost or changed a byte since is refused by name and the one before it is used. One process writes
(rank 0).

    config.yaml  metrics.jsonl  summary.json  tensorboard/  trajectories/step_000012.jsonl  checkpoints/step_000012/

The loop's `step` counts from 0 and names metrics and trajectories; `checkpoints/step_000012` holds the state after 12
steps, that is with steps 0 to 11 inside it, which is the policy version 12.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self

import yaml

from rsi.config import differences, dump
from rsi.progress import Progress
from rsi.types import Attempt, Group

MAY_CHANGE = frozenset({"steps", "run_dir"})
"""Keys that may differ from those the run was started with."""


COMPLETE = "COMPLETE"
"""In a checkpoint: size and CRC-32 of every other file of it, as JSON; written last."""
STOP = "stop"
"""A file of this name in the run directory stops the run as SIGUSR1 does: not every launcher passes signals on."""
REQUEUE = "requeue"
"""And a run that a scheduler may start again leaves this one there: torchrun turns every exit code into 1."""
REQUEUE_CODE = 75
"""EX_TEMPFAIL of sysexits.h: the exit code of such a run."""


class RunError(RuntimeError):
    """The run cannot start or go on (other settings, another writer, a full disk); the message names the mend."""


class RunDir:
    """Use as a context manager: `with RunDir(path, config) as run:`.

    config: a dataclass that has `steps`. keep: checkpoints that stay. min_free_mb: disk that must be free at the start
    and before each checkpoint. tensorboard: False leaves the events out (they load torch). clock: monotonic seconds.
    """

    def __init__(
        self,
        path: Path,
        config: Any,
        keep: int = 2,
        min_free_mb: int = 256,
        tensorboard: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.path = path
        self.progress = Progress(config.steps)
        self._config = config
        self._keep = keep
        self._min_free_mb = min_free_mb
        self._tensorboard = tensorboard
        self._clock = clock
        self._writer: Any = None
        self._lock: IO[str] | None = None
        self._handlers: dict[int, Any] = {}
        self._signal: int | None = None
        self._phases: dict[str, float] = {}
        self._phases_at_log: dict[str, float] = {}
        self._open_phases: dict[str, tuple[int, float]] = {}
        self._wall_before_s = 0.0
        self._first_step = 0
        self._start = self._clock()

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        try:
            self.check_disk()
            self._settle_config()
            self._mend_checkpoints()
            self._refuse_broken()
            self._rewind()
            (self.path / STOP).unlink(missing_ok=True)
            (self.path / REQUEUE).unlink(missing_ok=True)
        except BaseException:
            self._drop_lock()
            raise
        if threading.current_thread() is threading.main_thread():
            stopping = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
            self._handlers = {n: signal.signal(n, self._on_signal) for n in stopping}
        self._start = self._clock()
        self.progress.start(self._first_step)
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        if self._writer is not None:
            self._writer.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._drop_lock()

    # --- whether to go on -------------------------------------------------------------------------------------------

    @property
    def stop_requested(self) -> bool:
        """SIGINT, SIGTERM or SIGUSR1 came, or the file `stop`: finish the step, save, and leave the loop."""
        return self._signal is not None or (self.path / STOP).exists()

    def leave(self) -> int:
        """The exit code of a run that leaves its loop early, after its save: REQUEUE_CODE, and the file `requeue`,
        where a scheduler asked for that; 0 where a person did."""
        if not self.stop_requested or self._signal == signal.SIGINT:
            return 0
        _write_atomically(self.path / REQUEUE, "the same command goes on from the last checkpoint\n")
        return REQUEUE_CODE

    # --- what the loop writes ---------------------------------------------------------------------------------------

    def log(self, step: int, *metrics: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl and the TensorBoard scalars of `step`; the same key twice is our mistake."""
        row: dict[str, Any] = {"step": step}
        for part in metrics:
            twice = row.keys() & part.keys()
            assert not twice, f"metrics logged twice in one step: {sorted(twice)}"
            row.update({key: _number(value) for key, value in part.items()})
        phases = self.seconds_by_phase
        row |= {f"seconds/{name}": round(s - self._phases_at_log.get(name, 0.0), 4) for name, s in phases.items()}
        row["wall_s"] = round(self.wall_s, 3)
        self._phases_at_log = phases
        with self._writing("metrics.jsonl"), (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        if self._tensorboard:
            self._write_scalars(step, row)
        self.progress.end_step(step + 1)

    def write_trajectories(self, step: int, groups: Sequence[Group], decode: Callable[[Sequence[int]], str]) -> None:
        """One readable line each into trajectories/step_<step>.jsonl; `decode` shows special tokens."""
        path = self._trajectories(step)
        with self._writing(path.name):
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as file:
                for group in groups:
                    for attempt, reward in zip(group.attempts, group.rewards, strict=True):
                        line = trajectory_line(step, group.key, attempt, reward, decode)
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def save(self, step: int, write: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
        """The checkpoint after `step` steps: whatever `write(directory)` leaves there, and `state` as JSON.

        Written aside, synced to disk, then renamed: it is there whole or not at all. Older ones go, all but `keep`.
        """
        self.check_disk()
        final = self._checkpoint(step)
        aside = final.with_name(f".new_{final.name}")
        shutil.rmtree(aside, ignore_errors=True)
        run = {"wall_s": self.wall_s, "seconds_by_phase": self.seconds_by_phase}
        saved = json.dumps({"step": step, "run": run, "state": state}, allow_nan=False)
        with self._writing(final.name):
            aside.mkdir(parents=True)
            try:
                write(aside)
                (aside / "state.json").write_text(saved)
                (aside / COMPLETE).write_text(json.dumps(digests(aside)))
                _sync_tree(aside)
                self._sync_logs()
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
            old = final.with_name(f".old_{final.name}")
            if final.exists():  # the last save of a step wins; `_mend_checkpoints` undoes a crash between the renames
                final.rename(old)
            aside.rename(final)
            _sync_dir(final.parent)
            shutil.rmtree(old, ignore_errors=True)
        for stale in self._checkpoints()[: -self._keep]:
            gone = stale.with_name(f".gone_{stale.name}")
            stale.rename(gone)
            shutil.rmtree(gone)
        return final

    def latest(self) -> tuple[int, Path, dict[str, Any]] | None:
        """(steps done, directory, the caller's state) of the last checkpoint; None where there is none."""
        checkpoints = self._checkpoints()
        if not checkpoints:
            return None
        saved = json.loads((checkpoints[-1] / "state.json").read_text())
        return saved["step"], checkpoints[-1], saved["state"]

    def write_summary(self, summary: Mapping[str, Any]) -> Path:
        """summary.json, whole or not at all."""
        with self._writing("summary.json"):
            return _write_atomically(self.path / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")

    # --- time and space ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the wall time of the block under `name`. Blocks of one name that run at once count once."""
        depth, since = self._open_phases.get(name, (0, self._clock()))
        self._open_phases[name] = (depth + 1, since)
        try:
            yield
        finally:
            depth, since = self._open_phases.pop(name)
            if depth > 1:
                self._open_phases[name] = (depth - 1, since)
            else:
                self._phases[name] = self._phases.get(name, 0.0) + self._clock() - since

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        """Wall seconds of finished blocks since the start of the run, the time before a resume included."""
        return dict(self._phases)

    @property
    def wall_s(self) -> float:
        """Wall seconds of the run, the time before a resume included, time lost to a crash left out."""
        return self._wall_before_s + self._clock() - self._start

    def check_disk(self) -> None:
        """Raises RunError where less is free than min_free_mb, or than 1.5 times the last checkpoint."""
        checkpoints = self._checkpoints()
        last_mb = sum(f.stat().st_size for f in checkpoints[-1].rglob("*") if f.is_file()) / 2**20 if checkpoints else 0
        needed_mb = max(self._min_free_mb, math.ceil(1.5 * last_mb))
        free_mb = shutil.disk_usage(self.path).free >> 20
        if free_mb < needed_mb:
            raise RunError(
                f"{self.path} has {free_mb} MiB of disk free, and a step needs {needed_mb}; free some and give the same"
                " command again (it goes on from the last checkpoint), or start elsewhere with run_dir=<another disk>"
            )

    # --- opening ----------------------------------------------------------------------------------------------------

    def _take_lock(self) -> None:
        # A POSIX record lock, not flock: a forked child that outlives us (a sandbox) does not hold it.
        lock = (self.path / ".lock").open("a+")
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            lock.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise RunError(
                f"another process (pid {owner}) writes to {self.path}; wait for it, stop it, or set run_dir"
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock

    def _drop_lock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _settle_config(self) -> None:
        path = self.path / "config.yaml"
        text = dump(self._config)
        if path.exists():
            changed = [
                f"{key}: {before!r} there, {after!r} now"
                for key, before, after in differences(yaml.safe_load(path.read_text()), yaml.safe_load(text))
                if key not in MAY_CHANGE
            ]
            if changed:
                raise RunError(
                    f"{self.path} was started with other settings ({'; '.join(changed)}). Go on with the same settings "
                    f"({path}), or begin a new run with run_dir=<another directory>"
                )
        _write_atomically(path, text)

    def _mend_checkpoints(self) -> None:
        """Finish or undo what a crash left between two renames."""
        for left in (self.path / "checkpoints").glob(".*_step_*"):
            final = left.with_name(left.name.partition("_")[2])
            if left.name.startswith(".old_") and not final.exists():
                left.rename(final)
            else:
                shutil.rmtree(left)

    def _refuse_broken(self) -> None:
        """Set aside, from the newest back, checkpoints that are not what was saved; raise where none is left."""
        refused: list[str] = []
        for directory in reversed(self._checkpoints()):
            fault = broken(directory)
            if fault is None:
                break
            refused.append(f"{directory}: {fault}")
            shutil.rmtree(directory.with_name(f"refused_{directory.name}"), ignore_errors=True)
            directory.rename(directory.with_name(f"refused_{directory.name}"))
            os.write(2, f"refused checkpoint {refused[-1]}; it is kept as refused_{directory.name}\n".encode())
        if refused and not self._checkpoints():
            raise RunError(
                f"no checkpoint of {self.path} is whole ({'; '.join(refused)}); put one back under its own name, or "
                "begin a new run with run_dir=<another directory>"
            )

    def _rewind(self) -> None:
        """Back to the last checkpoint: later metrics and trajectories are dropped, times are taken from it."""
        checkpoints = self._checkpoints()
        saved = json.loads((checkpoints[-1] / "state.json").read_text()) if checkpoints else None
        step = saved["step"] if saved else 0
        if saved:
            self._wall_before_s = saved["run"]["wall_s"]
            self._phases = dict(saved["run"]["seconds_by_phase"])
            self._phases_at_log = dict(self._phases)
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            lines = metrics.read_text(errors="replace").splitlines(keepends=True)
            kept = [line for line in lines if _step_of(line) in range(step)]
            if kept != lines:
                _write_atomically(metrics, "".join(kept))
        for path in (self.path / "trajectories").glob("step_*.jsonl"):
            if int(path.stem.removeprefix("step_")) >= step:
                path.unlink()
        self._first_step = step

    # --- inside -----------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number
        # os.write: a signal may come in the middle of a print, and a buffered stream does not take a second writer.
        name = signal.Signals(number).name
        os.write(2, f"\n{name}: finishing this step; press Ctrl-C again to stop at once\n".encode())

    def _write_scalars(self, step: int, row: Mapping[str, Any]) -> None:
        if self._writer is None:
            try:
                from torch.utils.tensorboard.writer import SummaryWriter
            except ImportError as error:
                raise RunError("TensorBoard events need `pip install 'rsi[cpu]'` (torch and tensorboard)") from error
            self._writer = SummaryWriter(str(self.path / "tensorboard"), purge_step=self._first_step)
        for key, value in row.items():
            if key != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise RunError(
                f"no disk space left to write {what} in {self.path}; free some and give the same command again: "
                "it goes on from the last checkpoint"
            ) from error

    def _sync_logs(self) -> None:
        for path in (self.path / "metrics.jsonl", *(self.path / "trajectories").glob("step_*.jsonl")):
            if path.exists():
                _sync_file(path)

    def _trajectories(self, step: int) -> Path:
        return self.path / "trajectories" / f"step_{step:06d}.jsonl"

    def _checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step_{step:06d}"

    def _checkpoints(self) -> list[Path]:
        """Finished ones, oldest first."""
        found = (self.path / "checkpoints").glob("step_*")
        return sorted(path for path in found if re.fullmatch(r"step_\d{6,}", path.name))


def digests(directory: Path) -> dict[str, list[int]]:
    """[size, CRC-32] of every file below `directory` but its COMPLETE mark, by relative path."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / COMPLETE)
    with ThreadPoolExecutor(max_workers=8) as pool:  # zlib lets go of the interpreter while it counts
        sums = pool.map(_crc32, files)
        return {
            path.relative_to(directory).as_posix(): [path.stat().st_size, crc]
            for path, crc in zip(files, sums, strict=True)
        }


def broken(directory: Path) -> str | None:
    """What is wrong with a checkpoint; None for one that is as it was saved. Files beyond those saved do not count."""
    try:
        expected = json.loads((directory / COMPLETE).read_text())
        for name, (size, _) in expected.items():  # what a cut file costs to find is a stat
            found = (directory / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, {size} were written"
        actual = digests(directory)
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(directory)} is missing"
    except (ValueError, TypeError):
        return f"{COMPLETE} does not read"
    wrong = [name for name, digest in expected.items() if actual[name] != digest]
    return f"{wrong[0]} has changed since it was written" if wrong else None


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def trajectory_line(
    step: int, group: str, attempt: Attempt, reward: float, decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """What one line of trajectories/*.jsonl says; the text of each turn as the policy saw and wrote it."""
    trajectory, verdict = attempt.trajectory, attempt.verdict
    versions = [v for turn in trajectory.turns for v in (turn.version_min, turn.version_max)]
    return {
        "step": step,
        "id": trajectory.id,
        "role": trajectory.role,
        "task": trajectory.task,
        "group": group,
        "reward": reward,
        "verdict": verdict.reward,
        "failed": [test.name for test in verdict.tests if not test.passed],
        "stop": trajectory.stop.value,
        "sampled_tokens": trajectory.num_sampled,
        "versions": [min(versions), max(versions)] if versions else [],
        "turns": [{"observed": decode(t.observed), "sampled": decode(t.sampled)} for t in trajectory.turns],
    }


def _number(value: Any) -> Any:
    """A metric as JSON holds it: numpy scalars become numbers, NaN and infinities null."""
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    value = float(value)
    return value if math.isfinite(value) else None


def _step_of(line: str) -> int | None:
    """The step of a line of metrics.jsonl; None for one that a crash tore."""
    if not line.endswith("\n"):
        return None
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None


def _write_atomically(path: Path, text: str) -> Path:
    aside = path.with_name(f".{path.name}.new")
    try:
        with aside.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return path


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_tree(root: Path) -> None:
    for directory, _, names in os.walk(root):
        for name in names:
            _sync_file(Path(directory) / name)
        _sync_dir(Path(directory))
