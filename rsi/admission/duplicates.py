"""Near-duplicates: a task that says and does almost what another does teaches little that the other has not.

MinHash (Broder, 1997) over shingles of the instruction and the reference solution. A pool of hundreds could compare
sets; a dataset of a hundred thousand cannot, and the two must agree. In numpy, since the known library for it brings
scipy into a base install.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import numpy as np

from rsi.types import Task

NUM_HASHES = 256
"""An estimate of a similarity s has a standard deviation of sqrt(s (1 - s) / 256), 0.031 at most."""
SHINGLE = 3
"""Tokens (words or single signs) in a row."""
TOKEN = re.compile(r"\w+|[^\w\s]")

_random = np.random.default_rng(20_250_612)
_FACTORS = _random.integers(2**63, size=NUM_HASHES, dtype=np.uint64) | np.uint64(1)
_OFFSETS = _random.integers(2**63, size=NUM_HASHES, dtype=np.uint64)


def signature(text: str) -> np.ndarray:
    """uint64 [NUM_HASHES]: under each hash function the smallest value of a shingle of `text`."""
    tokens = TOKEN.findall(text.lower())
    last = max(1, len(tokens) - SHINGLE + 1)
    shingles = {" ".join(tokens[start : start + SHINGLE]) for start in range(last)}
    digests = [hashlib.blake2b(shingle.encode(), digest_size=8).digest() for shingle in shingles]
    values = np.frombuffer(b"".join(digests), dtype=np.uint64)
    # Multiply-shift hashing of 64-bit values: overflow is meant.
    return ((values[:, None] * _FACTORS + _OFFSETS) >> np.uint64(16)).min(axis=0)


def task_signature(task: Task) -> np.ndarray:
    solution = task.under("solution")
    scripts = [solution[path].decode(errors="replace") for path in sorted(solution)]
    return signature("\n".join([task.instruction, *scripts]))


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    """An estimate of the Jaccard similarity of the two shingle sets, in [0, 1]."""
    return float(np.mean(a == b))


class Nearest:
    """The tasks that a new one is held against."""

    def __init__(self, tasks: Iterable[Task] = ()):
        self._ids: list[str] = []
        self._signatures: list[np.ndarray] = []
        for task in tasks:
            self.add(task)

    def add(self, task: Task) -> None:
        self._ids.append(task.id)
        self._signatures.append(task_signature(task))

    def find(self, task: Task) -> tuple[str, float]:
        """(id, estimated similarity) of the most similar task; ("", 0.0) where there is none."""
        if not self._ids:
            return "", 0.0
        shares = (np.stack(self._signatures) == task_signature(task)).mean(axis=1)
        best = int(shares.argmax())
        return self._ids[best], float(shares[best])
