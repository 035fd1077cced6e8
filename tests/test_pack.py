"""Two short samples, packed: every array written out."""

import numpy as np
import pytest

from rsi.pack import pack
from rsi.types import Sample

FIRST = Sample((10, 11, 12, 13), (False, False, True, True), (0.0, 0.0, -0.5, -0.25), 0.5, "solver", 0)
SECOND = Sample((20, 21, 22), (False, True, False), (0.0, -2.0, 0.0), -1.0, "proposer", 0)


def test_everything_sits_on_the_predicting_position():
    batch = pack([FIRST, SECOND])
    assert batch.tokens.tolist() == [10, 11, 12, 13, 20, 21, 22]
    assert batch.labels.tolist() == [11, 12, 13, 0, 21, 22, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 4, 7]
    assert batch.mask.tolist() == [False, True, True, False, True, False, False]
    assert batch.logprobs.tolist() == [0, -0.5, -0.25, 0, -2, 0, 0]
    assert batch.advantages.tolist() == [0, 0.5, 0.5, 0, -1, 0, 0]
    assert batch.num_loss_tokens == 3


def test_dtypes_are_those_of_the_record():
    batch = pack([FIRST])
    assert (batch.tokens.dtype, batch.labels.dtype, batch.cu_seqlens.dtype) == (np.int64,) * 3
    assert (batch.mask.dtype, batch.logprobs.dtype, batch.advantages.dtype) == (np.bool_, np.float32, np.float32)


def test_a_step_over_nothing_is_refused():
    with pytest.raises(ValueError, match="no loss token"):
        pack([])
    with pytest.raises(ValueError, match="no loss token"):
        pack([Sample((1, 2), (False, False), (0.0, 0.0), 1.0, "solver", 0)])


def test_a_sample_that_begins_with_a_sampled_token_is_refused():
    with pytest.raises(ValueError, match="begins with its prompt"):
        pack([Sample((1, 2), (True, True), (0.0, 0.0), 1.0, "solver", 0)])


def test_ragged_samples_are_refused():
    with pytest.raises(ValueError, match="2 tokens, 1 mask bits"):
        pack([Sample((1, 2), (False,), (0.0, 0.0), 1.0, "solver", 0)])


def test_sequences_and_versions_are_counted_over_the_step():
    silent = Sample((1, 2), (False, False), (0.0, 0.0), 1.0, "solver", 7)
    batch = pack([FIRST, silent, SECOND])
    assert batch.num_sequences == 2
    assert batch.versions.tolist() == [0, 7, 0]
