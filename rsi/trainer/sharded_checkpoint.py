"""Checkpoints of a sharded trainer: every rank writes its part (torch's distributed checkpoint), any number reads them.

Like a local one it appears whole or not at all: written under a temporary name on a file system that all ranks see,
synced, marked COMPLETE by the first rank when all are done, and renamed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rsi.trainer.checkpoint import COMPLETE, find, partial_of, put_in_place, restore_rng, rng_state

SHARDS = "shards"


def save_shards(
    directory: Path, scorer: Any, optimizer: Any, version: int, group: Any, write_rest: Callable[[Path], None]
) -> None:
    """Collective. write_rest(path): what the first rank adds. Raises OSError on every rank, the previous checkpoint of
    that name untouched, if any of them cannot write."""
    partial, leads = partial_of(directory), dist.get_rank() == 0

    def begin() -> None:
        if leads:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def finish() -> None:
        if leads:
            _finish(partial, directory, version, write_rest)

    for work in (begin, lambda: _write(partial, scorer, optimizer, group), finish):
        _all_or_none(work, partial, directory, group)


def load_shards(directory: Path, scorer: Any, optimizer: Any, group: Any) -> int:
    """Collective; returns the version. The ranks may be more or fewer than those that saved. Random state goes on where
    this rank's was saved; ranks that are new keep their own."""
    directory = find(directory)
    version = json.loads((directory / COMPLETE).read_text())["version"]
    model, optimizer_state = get_state_dict(scorer, optimizer)
    state = {"model": model, "optimizer": optimizer_state}
    reader = FileSystemReader(directory / SHARDS)
    try:
        load(state, storage_reader=reader, process_group=group)
    except CheckpointException as error:  # a BaseException: nothing that handles errors would see it
        raise ValueError(f"{directory} does not load: {error}; resume from another checkpoint") from error
    set_state_dict(scorer, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    own = directory / f"rng_{dist.get_rank():05d}.pt"
    if own.is_file():
        restore_rng(torch.load(own, map_location="cpu", weights_only=True))
    return version


def _write(partial: Path, scorer: Any, optimizer: Any, group: Any) -> None:
    model, optimizer_state = get_state_dict(scorer, optimizer)
    state = {"model": model, "optimizer": optimizer_state}
    writer = FileSystemWriter(partial / SHARDS, sync_files=True)
    try:
        save(state, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        raise OSError(str(error)) from error
    torch.save(rng_state(), partial / f"rng_{dist.get_rank():05d}.pt")


def _finish(partial: Path, directory: Path, version: int, write_rest: Callable[[Path], None]) -> None:
    write_rest(partial)
    (partial / COMPLETE).write_text(json.dumps({"version": version, "world": dist.get_world_size()}) + "\n")
    put_in_place(partial, directory)


def _all_or_none(work: Callable[[], None], partial: Path, directory: Path, group: Any) -> None:
    """Do it on every rank; if one of them failed, all raise."""
    failure = None
    try:
        work()
    except (OSError, RuntimeError) as error:
        failure = f"rank {dist.get_rank()}: {error}"
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure, group=group)
    told = [text for text in failures if text]
    if told:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise OSError(
            f"could not write the checkpoint {directory} ({told[0]}); the previous one is untouched, free space there "
            "and start again"
        )
