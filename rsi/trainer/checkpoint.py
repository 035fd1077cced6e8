"""Checkpoints: a Hugging Face directory that any tool loads, and beside it what training needs to go on bit-equal.

A checkpoint appears whole or not at all: it is written under a temporary name, synced, marked COMPLETE, and renamed.
The one it replaces stays until then, so a full disk or a kill costs the new one only.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

COMPLETE = "COMPLETE"
STATE = "trainer.pt"


@dataclass(frozen=True)
class TrainerState:
    """What a trainer holds besides the module and the tokenizer."""

    version: int
    optimizer: dict[str, Any]
    """`optimizer.state_dict()`."""
    masters: list[Tensor]
    """float32 copies of parameters of another dtype, in the order of `module.parameters()`; empty where there are
    none."""


def save(directory: Path, module: Any, tokenizer: Any, state: TrainerState) -> None:
    """Write `directory`, replacing a checkpoint of that name. Raises OSError, the old one untouched, if it cannot."""
    write_whole(directory, lambda path: _write(path, module, tokenizer, state))


def load_state(directory: Path) -> TrainerState:
    """The trainer's part; also restores the random state of Python, numpy and torch.

    Weights: `qwen_moe.load_model` reads the same directory.
    """
    directory = find(directory)
    parts = torch.load(directory / STATE, map_location="cpu", weights_only=True)
    restore_rng(parts)
    return TrainerState(parts["version"], parts["optimizer"], parts["masters"])


def find(directory: Path) -> Path:
    """`directory` if it is a complete checkpoint, or the one that a killed `save` had moved aside."""
    for candidate in (directory, _aside(directory)):
        if (candidate / COMPLETE).is_file():
            return candidate
    if directory.is_dir():
        raise ValueError(
            f"{directory} has no {COMPLETE} mark: it was not written whole; resume from another checkpoint"
        )
    raise ValueError(f"there is no checkpoint at {directory}; give a directory that `save` wrote")


def rng_state() -> dict[str, Any]:
    """Of Python, numpy and torch in this process, in types that torch.load reads without running code."""
    python, numpy = random.getstate(), np.random.get_state(legacy=True)
    assert isinstance(numpy, tuple)
    return {
        "python": [python[0], list(python[1]), python[2]],
        "numpy": [numpy[0], torch.from_numpy(np.asarray(numpy[1], np.int64)), *numpy[2:]],
        "rng": torch.get_rng_state(),
        "rng_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """The GPUs' part only where their number is the same."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["rng"])
    if torch.cuda.is_available() and len(state["rng_cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["rng_cuda"])


def export_bf16(module: Any, tokenizer: Any, directory: Path) -> None:
    """Weights in bfloat16 with the tokenizer, for shipping; no optimizer state. Holds a second copy of the module."""
    half = copy.deepcopy(module).to(torch.bfloat16)
    write_whole(directory, lambda path: _write_model(path, half, tokenizer))


def _write(path: Path, module: Any, tokenizer: Any, state: TrainerState) -> None:
    _write_model(path, module, tokenizer)
    parts = {
        "version": state.version,
        "optimizer": state.optimizer,
        "masters": state.masters,
        **rng_state(),
    }
    torch.save(parts, path / STATE)
    (path / COMPLETE).write_text(json.dumps({"version": state.version}) + "\n")


def _write_model(path: Path, module: Any, tokenizer: Any) -> None:
    module.save_pretrained(path)
    tokenizer.save_pretrained(path)


def write_whole(directory: Path, write: Callable[[Path], None]) -> None:
    """Call `write` on a temporary sibling, then put it in the place of `directory`."""
    from safetensors import SafetensorError

    directory = directory.absolute()
    partial = partial_of(directory)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        _sync(partial)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors wrap the system's error
        shutil.rmtree(partial, ignore_errors=True)
        number = error.errno if isinstance(error, OSError) else None
        raise OSError(
            number,
            f"could not write the checkpoint {directory} ({error}); the previous one is untouched, free space there "
            "and start again",
        ) from error
    _put_in_place(partial, directory)


def partial_of(directory: Path) -> Path:
    """Where a checkpoint is written before it takes its name."""
    directory = directory.absolute()
    return directory.with_name(f".{directory.name}.partial")


def put_in_place(partial: Path, directory: Path) -> None:
    """Sync what was written to `partial`, and let it take the place of `directory`."""
    _sync(partial)
    _put_in_place(partial, directory.absolute())


def _put_in_place(partial: Path, directory: Path) -> None:
    aside = _aside(directory)
    if directory.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(directory, aside)
    os.rename(partial, directory)
    _sync_one(directory.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _aside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.previous")


def _sync(directory: Path) -> None:
    for path in sorted(directory.rglob("*")):
        _sync_one(path)
    _sync_one(directory)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
