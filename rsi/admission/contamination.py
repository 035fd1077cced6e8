"""What must never be trained on, kept as hashes: 13-grams (stride 1) of held-out instructions and solutions.

Words are lower-cased and split on non-alphanumerics (harbor.md section 15). A text with fewer words than that has no
13-gram, and held-out tasks of a small world are that short; so a short text counts as one gram, and is found when it is
repeated whole. A benchmark's canary, the GUID that its files carry, is kept as a hash too, and looked for in every file
of a task. Complaints give counts only: the proposer reads them, and must not learn held-out text from them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from rsi.types import Task

GRAM_WORDS = 13
MIN_WORDS = 5
"""A whole text shorter than this says nothing: `set -e` is in every solution."""
GUID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE)
KNOWN_CANARIES = frozenset({0xAEE1FFA37D974361})
"""Hashes of the canaries that are looked for without a held-out set: Terminal-Bench's (harbor.md section 15)."""


class HeldOut:
    """A set of 64-bit hashes; nothing of the text can be read back from it."""

    def __init__(self, hashes: np.ndarray):
        """hashes: uint64 [N], in any order."""
        self._hashes = np.unique(hashes.astype(np.uint64))

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> HeldOut:
        return cls(np.array(sorted({gram for text in texts for gram in _grams(text)}), dtype=np.uint64))

    @classmethod
    def from_tasks(cls, tasks: Iterable[Task]) -> HeldOut:
        kept = list(tasks)
        texts = cls.from_texts(text for task in kept for text in task_texts(task))
        canaries = {_hash(guid) for task in kept for guid in _canaries(task)}
        return cls.joined([texts, cls(np.array(sorted(canaries), dtype=np.uint64))])

    @classmethod
    def joined(cls, sets: Iterable[HeldOut]) -> HeldOut:
        return cls(np.concatenate([np.zeros(0, np.uint64), *(each._hashes for each in sets)]))

    @classmethod
    def load(cls, path: Path) -> HeldOut:
        """Raises ValueError for a file that `save` did not write."""
        try:
            hashes = np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is not a file of held-out hashes ({error}); write it with HeldOut.save") from None
        if hashes.dtype != np.uint64 or hashes.ndim != 1:
            raise ValueError(f"{path} holds {hashes.dtype} {hashes.shape}, not uint64 [N]; write it with HeldOut.save")
        return cls(hashes)

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            np.save(file, self._hashes, allow_pickle=False)

    def __len__(self) -> int:
        return len(self._hashes)

    def overlap(self, text: str) -> str | None:
        """None, or how many of the text's grams are held out; never which."""
        grams = np.array(sorted(_grams(text)), dtype=np.uint64)
        shared = int(np.isin(grams, self._hashes, assume_unique=True).sum())
        return f"{shared} of {len(grams)} {GRAM_WORDS}-grams are held out" if shared else None

    def has_canary(self, guid: str) -> bool:
        return bool(np.isin(np.uint64(_hash(guid.lower())), self._hashes))


NOTHING_HELD_OUT = HeldOut(np.zeros(0, np.uint64))


def contaminated(task: Task, held_out: HeldOut | None) -> str:
    """The `contamination` gate: why the task may not be trained on; empty where no set knows it."""
    held_out = held_out or NOTHING_HELD_OUT
    for text in task_texts(task):
        if found := held_out.overlap(text):
            return f"{found}; write another task"
    for path, content in task.files.items():
        for guid in GUID.findall(content.decode(errors="replace")):
            if _hash(guid.lower()) in KNOWN_CANARIES or held_out.has_canary(guid):
                return f"{path} carries a benchmark's canary; write another task"
    return ""


def task_texts(task: Task) -> list[str]:
    """What is compared: the instruction and the files of the solution."""
    solution = [content.decode(errors="replace") for content in task.under("solution").values()]
    return [task.instruction, *solution]


def _canaries(task: Task) -> set[str]:
    """GUIDs on lines that speak of a canary, in lower case."""
    lines = (line for content in task.files.values() for line in content.decode(errors="replace").splitlines())
    return {guid.lower() for line in lines if "canary" in line.lower() for guid in GUID.findall(line)}


def _grams(text: str) -> set[int]:
    words = re.findall(r"[^\W_]+", text.lower())
    if len(words) < MIN_WORDS:
        return set()
    last = max(len(words) - GRAM_WORDS, 0)
    return {_hash(" ".join(words[start : start + GRAM_WORDS])) for start in range(last + 1)}


def _hash(gram: str) -> int:
    return int.from_bytes(hashlib.blake2b(gram.encode(), digest_size=8).digest(), "big")
