"""A Batch cut into microbatches: rows of one document each, padded, or documents packed end to end in one row.

Every rank holds the whole Batch and takes its share of the same list, so the split depends on the Batch, the budget and
the number of ranks alone. Whole documents only: a sequence's loss never straddles two microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rsi.types import Batch


@dataclass(frozen=True)
class Microbatch:
    """R rows of length S. What follows a document's last loss token is cut: nothing depends on it."""

    tokens: Tensor
    """int64 [R, S]; 0 in the padding, which a causal model never looks at from a loss token."""
    where: Tensor
    """int64 [M]: the loss tokens' predicting positions, as indices into [R * S]."""
    source: Tensor
    """int64 [M]: the same positions as indices into the Batch."""
    sequence: Tensor
    """int64 [M]: which document of the microbatch each belongs to, from 0."""
    num_sequences: int
    bounds: tuple[int, ...] = ()
    """Packed (R = 1): document d lies at bounds[d] to bounds[d + 1]. Empty: one document a row, padded."""
    fed: Tensor | None = None
    """int64 [R * S]: the Batch position of every token fed, -1 in the padding; None in `idle`."""


def padded(batch: Batch, max_tokens: int) -> list[Microbatch]:
    """The documents that hold a loss token, longest first, as many rows as fit in `max_tokens` with their padding.

    A document longer than that is run alone.
    """
    mask = torch.from_numpy(batch.mask)
    cut: list[list[Tensor]] = []
    for row in documents(batch):
        if cut and (len(cut[-1]) + 1) * max(map(len, [*cut[-1], row])) <= max_tokens:
            cut[-1].append(row)
        else:
            cut.append([row])
    return [_pad(batch, mask, rows) for rows in cut]


def packed(batch: Batch, max_tokens: int) -> list[Microbatch]:
    """The documents that hold a loss token, longest first, each into the first row of `max_tokens` with room for it.

    First-fit decreasing wastes at most 2/9 of the rows. A document longer than `max_tokens` gets a row of its own.
    """
    mask = torch.from_numpy(batch.mask)
    bins: list[list[Tensor]] = []
    room: list[int] = []
    for row in documents(batch):
        fitting = (i for i, left in enumerate(room) if len(row) <= left)
        chosen = next(fitting, None)
        if chosen is None:
            bins.append([row])
            room.append(max_tokens - len(row))
        else:
            bins[chosen].append(row)
            room[chosen] -= len(row)
    return [_join(batch, mask, rows) for rows in bins]


def share(microbatches: list[Microbatch], rank: int, world: int) -> list[Microbatch]:
    """This rank's part. All ranks get equally many, because their forwards and backwards are collective: where there is
    none left, an idle one without a loss token."""
    rounds = -(-len(microbatches) // world)
    mine = microbatches[rank::world]
    return mine + [idle()] * (rounds - len(mine))


def idle() -> Microbatch:
    """Two tokens, no loss: a rank that has no work left still joins the others' collectives."""
    none = torch.zeros(0, dtype=torch.int64)
    return Microbatch(torch.zeros(1, 2, dtype=torch.int64), none, none, none, 0, (0, 2))


def documents(batch: Batch) -> list[Tensor]:
    """Per document with a loss token, longest first, the Batch positions of its tokens up to the last predicting
    one."""
    mask = torch.from_numpy(batch.mask)
    rows: list[Tensor] = []
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        predicting = mask[start:end].nonzero()[:, 0]
        if len(predicting):
            rows.append(torch.arange(start, start + int(predicting[-1]) + 1))
    rows.sort(key=len, reverse=True)
    return rows


def _pad(batch: Batch, mask: Tensor, rows: list[Tensor]) -> Microbatch:
    length = max(map(len, rows))
    fed = torch.full((len(rows), length), -1, dtype=torch.int64)
    for i, row in enumerate(rows):
        fed[i, : len(row)] = row
    return _microbatch(batch, mask, rows, [i * length for i in range(len(rows))], fed, ())


def _join(batch: Batch, mask: Tensor, rows: list[Tensor]) -> Microbatch:
    bounds = [0]
    for row in rows:
        bounds.append(bounds[-1] + len(row))
    return _microbatch(batch, mask, rows, bounds[:-1], torch.cat(rows)[None], tuple(bounds))


def _microbatch(
    batch: Batch, mask: Tensor, rows: list[Tensor], starts: list[int], fed: Tensor, bounds: tuple[int, ...]
) -> Microbatch:
    tokens = torch.zeros(fed.shape, dtype=torch.int64)
    tokens[fed >= 0] = torch.from_numpy(batch.tokens)[fed[fed >= 0]]
    where, source, sequence = [], [], []
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        predicting = mask[row].nonzero()[:, 0]
        where.append(start + predicting)
        source.append(row[predicting])
        sequence.append(torch.full((len(predicting),), i, dtype=torch.int64))
    return Microbatch(
        tokens, torch.cat(where), torch.cat(source), torch.cat(sequence), len(rows), bounds, fed.flatten()
    )
