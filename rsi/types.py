"""The records that flow through the loop; nothing else.

All are frozen and flow forward: a stage makes a new record and never fills a field of an old one. Position t describes
token t: `logprobs[t] = log p(tokens[t] | tokens[:t])`, in nats. A fault (our side broke) is never a reward: it is a
`Verdict` whose reward is None, or a trajectory whose stop is FAULT, and it is not a member of any group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

Role = Literal["solver", "proposer"]
Direction = Literal["simplify", "harden", "explore"]


class Stop(Enum):
    """Why a trajectory ended. FAULT says nothing about the policy; every other value does."""

    DONE = "done"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    TIMEOUT = "timeout"
    FAULT = "fault"


@dataclass(frozen=True)
class Lineage:
    """Where a task came from. Seeds have neither parent nor assignment."""

    parent: str | None = None
    assignment: str | None = None
    revision: int = 0


@dataclass(frozen=True)
class TaskLimits:
    """What task.toml grants; seconds, MiB."""

    agent_timeout_s: float = 120.0
    verifier_timeout_s: float = 60.0
    build_timeout_s: float = 60.0
    cpus: float = 1.0
    memory_mb: int = 512
    storage_mb: int = 64


@dataclass(frozen=True)
class Task:
    """A Harbor task directory held in memory.

    files: every file of the directory by its POSIX path relative to it (`task.toml`, `instruction.md`,
    `environment/Dockerfile`, `environment/files/...`, `solution/solve.sh`, `tests/test.sh`, ...); the truth from which
    everything else follows. id: Harbor's content digest of them, `sha256:<64 hex>`.
    """

    id: str
    domain: str
    instruction: str
    """What the solver reads: instruction.md without leading canary lines."""
    files: Mapping[str, bytes]
    limits: TaskLimits = TaskLimits()
    workdir: str = "/app"
    lineage: Lineage = Lineage()

    def under(self, folder: str) -> dict[str, bytes]:
        """The files below `folder`, by their path relative to it: `under("tests")`, `under("solution")`."""
        prefix = folder.rstrip("/") + "/"
        return {path[len(prefix) :]: content for path, content in self.files.items() if path.startswith(prefix)}


@dataclass(frozen=True)
class Assignment:
    """What the proposer is asked for: a parent, what the solver did on it, and a direction."""

    id: str
    domain: str
    direction: Direction
    parent: Task | None
    pass_rate: float | None
    """Mean reward of the current solver on the parent; None without one."""
    num_attempts: int
    failure: str
    """The solver's most common failure on the parent, in words; empty when it did not fail."""


@dataclass(frozen=True)
class Turn:
    """One exchange: the ids the policy was shown since its last sample, then the ids it sampled (stop id included)."""

    observed: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of `sampled`, under the policy that sampled them."""
    version_min: int
    version_max: int
    experts: object | None = None
    """Routed expert ids, [len(sampled), layers, top_k], where the engine returns them."""


@dataclass(frozen=True)
class Trajectory:
    """One episode of one role. `task` is the solved task's id, or the assignment's for a proposer."""

    id: str
    task: str
    role: Role
    turns: tuple[Turn, ...]
    stop: Stop

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.sampled) for turn in self.turns)


@dataclass(frozen=True)
class TestResult:
    """One test of a verifier."""

    __test__ = False  # not a pytest class
    name: str
    passed: bool
    message: str = ""


@dataclass(frozen=True)
class Verdict:
    """reward in [0, 1]; None = not gradable (our fault or a broken verifier), which is never silently 0."""

    reward: float | None
    tests: tuple[TestResult, ...] = ()
    log: str = ""


@dataclass(frozen=True)
class Attempt:
    """A trajectory and what it earned."""

    trajectory: Trajectory
    verdict: Verdict


@dataclass(frozen=True)
class Group:
    """One comparison set: attempts at one environment, or at one assignment. Faults are not members."""

    role: Role
    key: str
    attempts: tuple[Attempt, ...]
    rewards: tuple[float, ...]


@dataclass(frozen=True)
class Sample:
    """A trajectory, flattened: all [T]. mask is True where the policy sampled; logprobs is 0 elsewhere."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    advantage: float
    role: Role
    version: int


@dataclass(frozen=True)
class Batch:
    """Samples laid end to end; N tokens, B samples. The one place where tokens are counted and shifted.

    labels[i] is the token that position i predicts, so mask, logprobs and advantages sit on the *predicting* position
    and the last position of a sample is never in the mask.
    """

    tokens: np.ndarray
    """int64 [N]."""
    labels: np.ndarray
    """int64 [N]; 0 on the last position of a sample."""
    positions: np.ndarray
    """int64 [N], restarting at 0 with each sample."""
    cu_seqlens: np.ndarray
    """int64 [B + 1]."""
    mask: np.ndarray
    """bool [N]: labels[i] was sampled by the policy."""
    logprobs: np.ndarray
    """float32 [N], of labels under the sampling policy, nats; 0 outside the mask."""
    advantages: np.ndarray
    """float32 [N]; 0 outside the mask."""
    num_loss_tokens: int
    """Sum of mask over the whole step (all ranks), the loss's one denominator."""
    num_sequences: int
    """Samples with a loss token, over the whole step: what losses that average sequences are divided by."""
    versions: np.ndarray
    """int64 [B]: the oldest policy version that sampled any of a sample."""
    experts: np.ndarray | None = field(default=None)
