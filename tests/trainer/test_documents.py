"""Packing without cross-talk: packed documents are computed as if each were alone."""

from __future__ import annotations

import pytest
import torch

from rsi.loss import LossConfig
from rsi.pack import pack
from rsi.trainer import documents, layout
from rsi.trainer.documents import check_apart, document_kwargs, keep_documents_apart
from rsi.trainer.layout import idle, packed, padded, share
from rsi.trainer.scoring import Scorer, accumulate, score
from rsi.types import Batch, Sample
from tests.trainer.models import KINDS, VOCAB, Kind, tiny_model

LENGTHS = (5, 70, 1, 9, 33)
CPU = torch.device("cpu")


def rows(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]


def bounds() -> tuple[int, ...]:
    return (0, *torch.tensor(LENGTHS).cumsum(0).tolist())


def make_batch(seed: int = 0, num: int = 9) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(num):
        length = int(torch.randint(4, 60, (), generator=generator))
        mask = torch.rand(length, generator=generator) < 0.4
        mask[0], mask[1] = False, True
        samples.append(
            Sample(
                tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist()),
                tuple(mask.tolist()),
                tuple((-5.5 * mask).tolist()),
                float(torch.randn((), generator=generator)),
                "solver",
                0,
            )
        )
    return pack(samples)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_packed_logits_equal_separate_logits(kind: Kind):
    model = tiny_model(kind)
    alone = torch.cat([model(row[None]).logits[0] for row in rows()])
    keep_documents_apart(model)
    together = model(torch.cat(rows())[None], use_cache=False, **document_kwargs(bounds(), CPU)).logits[0]
    # float32, logits up to 3: products of other heights sum in another order; a leak is of the size of the logits
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_packed_documents_leak_when_their_bounds_are_not_told(kind: Kind):
    model = tiny_model(kind)
    alone = torch.cat([model(row[None]).logits[0] for row in rows()])
    keep_documents_apart(model)
    leaked = model(torch.cat(rows())[None], use_cache=False).logits[0]
    assert (leaked - alone).abs().max() > 0.1


@torch.no_grad()
def test_what_transformers_itself_is_told_leaks_through_delta_net():
    """Why documents.py exists: on a CPU positions and cu_seqlens alone do not stop convolution and state."""
    model = tiny_model("qwen3_5_moe")
    alone = torch.cat([model(row[None]).logits[0] for row in rows()])
    told = document_kwargs(bounds(), CPU)
    told.pop("document_bounds")
    leaked = model(torch.cat(rows())[None], use_cache=False, **told).logits[0]
    assert (leaked - alone).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_packed_gradients_equal_padded_ones(kind: Kind):
    batch, model = make_batch(), tiny_model(kind)
    keep_documents_apart(model)
    scorer, grads, losses = Scorer(model), [], []
    for cut in (padded(batch, 10_000), packed(batch, 10_000), packed(batch, 80)[::-1]):
        parts = [accumulate(scorer, LossConfig(), batch, part, CPU) for part in cut]
        losses.append(sum(part["loss"] for part in parts))
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        model.zero_grad()
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)
    for other in grads[1:]:
        for name, gradient in grads[0].items():
            torch.testing.assert_close(gradient, other[name], atol=2e-6, rtol=1e-3, msg=name)


def test_a_document_stays_whole_and_no_token_is_lost():
    batch = make_batch()
    cut = packed(batch, 80)
    assert all(part.tokens.numel() <= 80 for part in cut) and len(cut) < 9
    assert sorted(torch.cat([part.source for part in cut]).tolist()) == batch.mask.nonzero()[0].tolist()
    for part in cut:
        assert part.tokens[0, part.where].tolist() == batch.tokens[part.source.numpy()].tolist()
        assert torch.equal(torch.bucketize(part.where, torch.tensor(part.bounds[1:]), right=True), part.sequence)


def test_a_row_longer_than_the_budget_gets_a_row_of_its_own():
    assert len(packed(make_batch(), 1)) == len(padded(make_batch(), 1)) == 9


def test_packing_wastes_less_than_padding():
    batch = make_batch(num=40)
    fed = [sum(part.tokens.numel() for part in cut) for cut in (packed(batch, 300), padded(batch, 300))]
    assert fed[0] < fed[1]
    assert fed[0] == sum(len(row) for row in layout.documents(batch))


def test_every_rank_gets_as_many_microbatches():
    cut = packed(make_batch(), 80)
    shares = [share(cut, rank, 4) for rank in range(4)]
    assert len({len(mine) for mine in shares}) == 1
    sources = torch.cat([part.source for mine in shares for part in mine])
    assert sorted(sources.tolist()) == make_batch().mask.nonzero()[0].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_microbatch_runs_the_whole_model_and_adds_no_gradient(kind: Kind):
    model = tiny_model(kind)
    keep_documents_apart(model)
    metrics = accumulate(Scorer(model), LossConfig(), make_batch(), idle(), CPU)
    assert metrics == {"loss": 0.0, "entropy": 0.0}
    grads = [p.grad for p in model.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in grads)


def test_what_lies_outside_the_mask_is_never_read():
    batch, model = make_batch(), tiny_model("qwen3_moe")
    keep_documents_apart(model)
    before = accumulate(Scorer(model), LossConfig(), batch, packed(batch, 10_000)[0], CPU)
    batch.logprobs[~batch.mask] = float("nan")
    batch.advantages[~batch.mask] = float("inf")
    assert accumulate(Scorer(model), LossConfig(), batch, packed(batch, 10_000)[0], CPU) == before


def test_delta_net_kernels_are_tried_before_they_train(monkeypatch: pytest.MonkeyPatch):
    check_apart(tiny_model("qwen3_moe"), CPU, torch.float32)
    model = tiny_model("qwen3_5_moe")
    check_apart(model, CPU, torch.float32)
    monkeypatch.setattr(
        documents, "_by_length", lambda forward, hidden, _: forward(hidden)
    )  # kernels that ignore bounds
    with pytest.raises(ValueError, match="leak into each other.*trainer.layout=padded"):
        check_apart(model, CPU, torch.float32)


@torch.no_grad()
def test_a_model_that_knows_documents_scores_padded_rows_as_before():
    batch, model = make_batch(), tiny_model("qwen3_5_moe")
    [part] = padded(batch, 100_000)
    before, _ = score(Scorer(model), batch, part, CPU)
    keep_documents_apart(model)
    after, _ = score(Scorer(model), batch, part, CPU)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)
