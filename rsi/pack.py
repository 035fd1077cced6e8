"""Samples to a Batch: laid end to end, shifted by one, and counted. Nothing else in the project shifts or counts.

A sample describes token t at position t; a batch puts everything on the position that *predicts* it, which is t - 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rsi.types import Batch, Sample


def pack(samples: Sequence[Sample]) -> Batch:
    """All samples in one Batch, in order. Raises ValueError without any loss token: a step over nothing is no step."""
    for sample in samples:
        if not len(sample.tokens) == len(sample.mask) == len(sample.logprobs):
            raise ValueError(
                f"a sample has {len(sample.tokens)} tokens, {len(sample.mask)} mask bits and {len(sample.logprobs)} "
                "logprobs; all describe its tokens one by one"
            )
        if sample.mask and sample.mask[0]:
            raise ValueError("a sample begins with a sampled token, which nothing predicts; it begins with its prompt")
    num_loss_tokens = sum(sum(sample.mask) for sample in samples)
    if not num_loss_tokens:
        raise ValueError(f"{len(samples)} samples hold no loss token; skip the update when no group is useful")
    lengths = [len(sample.tokens) for sample in samples]
    masks = [_shift(sample.mask, bool) for sample in samples]
    return Batch(
        tokens=np.concatenate([np.asarray(sample.tokens, np.int64) for sample in samples]),
        labels=np.concatenate([_shift(sample.tokens, np.int64) for sample in samples]),
        positions=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int64),
        mask=np.concatenate(masks),
        logprobs=np.concatenate([_shift(sample.logprobs, np.float32) for sample in samples]),
        advantages=np.concatenate(
            [mask * np.float32(sample.advantage) for sample, mask in zip(samples, masks, strict=True)]
        ),
        num_loss_tokens=num_loss_tokens,
        num_sequences=sum(any(sample.mask) for sample in samples),
        versions=np.asarray([sample.version for sample in samples], np.int64),
    )


def _shift(values: Sequence[float], dtype: type) -> np.ndarray:
    """[T] by token to [T] by predicting position; 0 on the last."""
    shifted = np.zeros(len(values), dtype)
    shifted[:-1] = values[1:]
    return shifted
