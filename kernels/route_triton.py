"""The router in Triton: a tile of tokens a program, all of a token's experts in registers."""
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# (to pyright a kernel is the Python function that it looks like)

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rsi_kernels.aot import BF16, F32, I32, U8, Case
from rsi_kernels.impl import on_device

FLAGS = ((True, True, False), (True, True, True), (True, False, False), (False, True, False))
"""(softmax, renorm, replay), compiled ahead of time; for bfloat16 logits, which `install` never has, only the first."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit
def _column(values, slot, k: tl.constexpr, zero):
    """Column k of a [BT, KP] register tile."""
    return tl.sum(tl.where(slot[None, :] == k, values, zero), 1)


@triton.jit
def forward_kernel(
    LOGITS, FORCED, WEIGHTS, IDS, COUNTS, PROB_SUM, T, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, BT: tl.constexpr, SOFTMAX: tl.constexpr, RENORM: tl.constexpr, REPLAY: tl.constexpr,
):  # fmt: skip
    """EP, KP: E and K rounded up to powers of two. The best are taken by logit, one after another, the lower index of
    equals. `left` is the one tile that lives through the rounds: what is -inf in it at the end was chosen."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, EP)
    slot = tl.arange(0, KP)
    ok = t < T
    row = t[:, None].to(tl.int64)
    x = tl.load(LOGITS + row * E + e[None, :], mask=ok[:, None] & (e[None, :] < E), other=0.0).to(tl.float32)
    left = tl.where(e[None, :] < E, x, -float("inf"))
    top = tl.max(left, 1)
    if SOFTMAX:
        p = tl.exp(left - top[:, None])
        total = tl.sum(p, 1)
        p = p / total[:, None]
    else:
        p = tl.sigmoid(left)
    tl.atomic_add(PROB_SUM + e, tl.sum(tl.where(ok[:, None], p, 0.0), 0), mask=e < E)
    out = row * K + slot[None, :]
    keep = ok[:, None] & (slot[None, :] < K)
    weights = tl.zeros((BT, KP), tl.float32)
    ids = tl.zeros((BT, KP), tl.int32)
    if REPLAY:
        ids = tl.load(FORCED + out, mask=keep, other=0).to(tl.int32)
    for k in tl.static_range(K):
        if REPLAY:
            chosen = _column(ids, slot, k, 0)
            logit = tl.sum(tl.where(e[None, :] == chosen[:, None], left, 0.0), 1)
        else:
            logit = tl.max(left, 1)
            chosen = tl.min(tl.where(left == logit[:, None], e[None, :], EP), 1)
            chosen = tl.minimum(chosen, E - 1)  # a row of NaN equals nothing; its id must stay in range
            ids = tl.where(slot[None, :] == k, chosen[:, None], ids)
        score = tl.exp(logit - top) / total if SOFTMAX else tl.sigmoid(logit)
        weights = tl.where(slot[None, :] == k, score[:, None], weights)
        left = tl.where(e[None, :] == chosen[:, None], -float("inf"), left)
    if RENORM:
        weights = weights / tl.sum(weights, 1)[:, None]
    tl.store(WEIGHTS + out, weights, mask=keep)
    tl.store(IDS + out, ids, mask=keep)
    hits = tl.where((left == -float("inf")) & ok[:, None], 1, 0)
    tl.atomic_add(COUNTS + e, tl.sum(hits, 0), mask=e < E)


@triton.jit
def backward_kernel(
    LOGITS, IDS, WEIGHTS, D_WEIGHTS, D_LOGITS, T, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BT: tl.constexpr, SOFTMAX: tl.constexpr, RENORM: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, EP)
    slot = tl.arange(0, KP)
    ok = t < T
    row = t[:, None].to(tl.int64)
    of_slot = row * K + slot[None, :]
    keep = ok[:, None] & (slot[None, :] < K)
    ids = tl.load(IDS + of_slot, mask=keep, other=EP)
    w = tl.load(WEIGHTS + of_slot, mask=keep, other=0.0)
    d = w * tl.load(D_WEIGHTS + of_slot, mask=keep, other=0.0).to(tl.float32)
    total = tl.sum(d, 1)[:, None]
    grad = tl.zeros((BT, EP), tl.float32)
    in_range = ok[:, None] & (e[None, :] < E)
    if SOFTMAX and not RENORM:
        x = tl.load(LOGITS + row * E + e[None, :], mask=in_range, other=0.0).to(tl.float32)
        x = tl.where(e[None, :] < E, x, -float("inf"))
        p = tl.exp(x - tl.max(x, 1)[:, None])
        grad = -total * (p / tl.sum(p, 1)[:, None])
    if RENORM:
        d -= w * total
    if not SOFTMAX:
        chosen = tl.load(LOGITS + row * E + ids, mask=keep, other=0.0).to(tl.float32)
        d = d * tl.sigmoid(-chosen)
    for k in tl.static_range(K):
        expert = _column(ids, slot, k, 0)
        grad += tl.where(e[None, :] == expert[:, None], _column(d, slot, k, 0.0)[:, None], 0.0)
    tl.store(D_LOGITS + row * E + e[None, :], grad.to(D_LOGITS.dtype.element_ty), mask=in_range)


def _shape(experts: int, k: int) -> dict[str, Any]:
    """2,048 logits a program: with 4,096 it takes up to 215 registers a thread instead of 72 (Triton 3.7.1)."""
    padded = triton.next_power_of_2(experts)
    tokens = max(1, min(16, 2048 // padded))
    return {"E": experts, "EP": padded, "K": k, "KP": triton.next_power_of_2(k), "BT": tokens}


def forward(
    logits: Tensor, k: int, softmax: bool, renorm: bool, forced_ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `route` returns; logits contiguous [T, E]."""
    tokens, experts = logits.shape
    weights = logits.new_empty((tokens, k), dtype=torch.float32)
    ids = logits.new_empty((tokens, k), dtype=torch.int32)
    counts = logits.new_zeros(experts, dtype=torch.int32)
    prob_sum = logits.new_zeros(experts, dtype=torch.float32)
    if tokens:
        shape = _shape(experts, k)
        with on_device(logits):
            forward_kernel[(triton.cdiv(tokens, shape["BT"]),)](
                logits, ids if forced_ids is None else forced_ids.contiguous(), weights, ids, counts, prob_sum, tokens,
                **shape, SOFTMAX=softmax, RENORM=renorm, REPLAY=forced_ids is not None, **OPTIONS,
            )  # fmt: skip
    return weights, ids, counts, prob_sum


def backward(grad_weights: Tensor, logits: Tensor, ids: Tensor, weights: Tensor, softmax: bool, renorm: bool) -> Tensor:
    tokens, experts = logits.shape
    grad = torch.empty_like(logits)
    if tokens:
        shape = _shape(experts, ids.shape[1])
        with on_device(logits):
            backward_kernel[(triton.cdiv(tokens, shape["BT"]),)](
                logits, ids, weights, grad_weights, grad, tokens, **shape, SOFTMAX=softmax, RENORM=renorm, **OPTIONS
            )  # fmt: skip
    return grad


def aot_cases() -> Iterator[Case]:
    for experts in (128, 256):
        for logits in (F32, BF16):
            name = f"{logits[1:]} E={experts}"
            signature = {"LOGITS": logits, "FORCED": U8, "WEIGHTS": F32, "IDS": I32, "COUNTS": I32, "PROB_SUM": F32}
            for softmax, renorm, replay in FLAGS[: 1 if logits == BF16 else None]:
                flags = {"SOFTMAX": softmax, "RENORM": renorm}
                label = f"{name}{'' if softmax else ' sigmoid'}{' renorm' if renorm else ''}"
                yield Case(
                    f"route {label}{' replay' if replay else ''}",
                    forward_kernel,
                    signature | {"T": "i32"},
                    _shape(experts, 8) | flags | {"REPLAY": replay},
                    tuple(signature),
                    OPTIONS,
                )
                if not replay:
                    pointers = {"LOGITS": logits, "IDS": I32, "WEIGHTS": F32, "D_WEIGHTS": F32, "D_LOGITS": logits}
                    yield Case(
                        f"route backward {label}",
                        backward_kernel,
                        pointers | {"T": "i32"},
                        _shape(experts, 8) | flags,
                        tuple(pointers),
                        OPTIONS,
                        vector_loads=softmax and not renorm,  # else it loads K ids and weights a token, 1 a thread
                    )
