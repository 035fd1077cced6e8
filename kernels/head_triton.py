"""Row kernels over a chunk of logits: statistics, gradient, and both with the policy loss between them.

One program a row. Exponentials are in base 2: with natural ones more registers spill. Everything loaded is widened to
float32 at once, and rows are addressed in int64: T * V passes 2^31.
"""
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# (to pyright a kernel is the Python function that it looks like)

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from rsi_kernels.aot import BF16, F32, I64, Case
from rsi_kernels.impl import on_device

LOG2E = 1.4426950408889634
LANES, VEC, BLOCK = 256, 8, 4096
"""LANES x VEC logits a step in the kernels that reduce, BLOCK a program in the one that does not."""
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}
"""Fusion is off by default from Triton 3.10 on."""


@triton.jit
def _statistics(z_row, V, scale2, LANES: tl.constexpr, VEC: tl.constexpr):
    """max, sum 2^(z - max), sum 2^(z - max) z over a row of z = logit * scale2, scale2 = log2(e) / temperature.

    Each lane keeps its own running three; the lanes meet once, at the end.
    """
    lane = tl.arange(0, LANES)
    j = tl.arange(0, VEC)
    m = tl.full((LANES,), -1.0e30, tl.float32)
    s = tl.zeros((LANES,), tl.float32)
    w = tl.zeros((LANES,), tl.float32)
    for start in range(0, V, LANES * VEC):
        c = start + lane[:, None] * VEC + j[None, :]
        ok = c < V
        z = tl.load(z_row + c, mask=ok, other=0.0).to(tl.float32) * scale2
        z = tl.where(ok, z, -1.0e30)
        m_new = tl.maximum(m, tl.max(z, 1))
        rescale = tl.exp2(m - m_new)
        e = tl.where(ok, tl.exp2(z - m_new[:, None]), 0.0)
        s = s * rescale + tl.sum(e, 1)
        w = w * rescale + tl.sum(e * z, 1)
        m = m_new
    top = tl.max(m, 0)
    r = tl.exp2(m - top)
    return top, tl.sum(s * r, 0), tl.sum(w * r, 0)


@triton.jit
def _target_logit(z_row, t, V):
    """NaN for a target that is no token, such as -100: louder than a read out of bounds."""
    return tl.load(z_row + t, mask=(t >= 0) & (t < V), other=float("nan")).to(tl.float32)


@triton.jit
def statistics_kernel(Z, stride, TARGET, LOGP, ENTROPY, LSE, V, scale2, LANES: tl.constexpr, VEC: tl.constexpr):
    LN2: tl.constexpr = 0.6931471805599453
    row = tl.program_id(0).to(tl.int64)
    z_row = Z + row * stride
    top, s, w = _statistics(z_row, V, scale2, LANES, VEC)
    lse2 = top + tl.log2(s)
    z_t = _target_logit(z_row, tl.load(TARGET + row), V) * scale2
    tl.store(LOGP + row, (z_t - lse2) * LN2)
    tl.store(LSE + row, lse2 * LN2)
    tl.store(ENTROPY + row, (lse2 - w / s) * LN2)


@triton.jit
def dlogits_kernel(
    Z, DZ, stride, TARGET, ENTROPY, LSE, G, H, V, scale2, inv_t, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    """dz_j = inv_t (g ([j = target] - p_j) - h p_j (ln p_j + entropy)). DZ may be Z."""
    LN2: tl.constexpr = 0.6931471805599453
    row = tl.program_id(0).to(tl.int64)
    lse2 = tl.load(LSE + row) * 1.4426950408889634
    t = tl.load(TARGET + row)
    g = tl.load(G + row)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < V
    log_p2 = tl.load(Z + row * stride + c, mask=ok, other=0.0).to(tl.float32) * scale2 - lse2
    p = tl.exp2(log_p2)
    d = g * (tl.where(c == t, 1.0, 0.0) - p)
    if HAS_ENTROPY:
        d -= tl.load(H + row) * p * (log_p2 * LN2 + tl.load(ENTROPY + row))
    tl.store(DZ + row * stride + c, (d * inv_t).to(DZ.dtype.element_ty), mask=ok)


@triton.jit
def _loss_terms(
    logp, old, ref, adv, lo, hi, beta, log_ratio_sq, CLIP: tl.constexpr, HAS_OLD: tl.constexpr, HAS_REF: tl.constexpr
):
    """(loss, d loss / d logp, k3, cut) of one token, before its weight; `linear_grpo.loss_terms` in Triton."""
    log_ratio = logp - logp
    before = logp
    if HAS_OLD:
        log_ratio = logp - old
        before = old
    ratio = tl.exp(tl.minimum(tl.maximum(log_ratio, -20.0), 20.0))
    if CLIP:
        clipped = tl.minimum(tl.maximum(ratio, 1.0 - lo), 1.0 + hi)
        cut = ratio * adv > clipped * adv
        loss = -tl.minimum(ratio * adv, clipped * adv)
    else:
        moved = tl.exp(logp) - tl.exp(before)
        cut = ((adv > 0.0) & (moved > hi)) | ((adv < 0.0) & (moved < -lo))
        loss = tl.where(cut, 0.0, -ratio * adv)
    dlogp = tl.where(cut | (tl.abs(log_ratio) > 20.0), 0.0, -ratio * adv)
    loss += log_ratio_sq * log_ratio * log_ratio
    dlogp += 2.0 * log_ratio_sq * log_ratio
    k3 = 0.0
    if HAS_REF:
        d = ref - logp
        held = tl.minimum(tl.maximum(d, -20.0), 20.0)
        e = tl.exp(held)
        k3 = e - held - 1.0
        loss += beta * k3
        dlogp += tl.where(tl.abs(d) <= 20.0, beta * (1.0 - e), 0.0)
    return loss, dlogp, k3, tl.where(cut, 1.0, 0.0)


@triton.jit
def loss_kernel(
    Z, DZ, stride, TARGET, OLD, REF, ADVANTAGE, TOKEN_WEIGHT, VALUE, METRICS, metrics_stride,
    V, scale2, inv_t, lo, hi, beta, log_ratio_sq,
    CLIP: tl.constexpr, HAS_OLD: tl.constexpr, HAS_REF: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Statistics, weighted loss, metrics (logp, entropy, k3, cut) and dlogits of a row. DZ may be Z."""
    LN2: tl.constexpr = 0.6931471805599453
    row = tl.program_id(0).to(tl.int64)
    z_row = Z + row * stride
    dz_row = DZ + row * stride
    weight = tl.load(TOKEN_WEIGHT + row)
    lane = tl.arange(0, LANES)
    j = tl.arange(0, VEC)
    if weight == 0.0:  # a masked token: zeros, whatever its logits are
        for start in range(0, V, LANES * VEC):
            c = start + lane[:, None] * VEC + j[None, :]
            tl.store(dz_row + c, tl.zeros((LANES, VEC), DZ.dtype.element_ty), mask=c < V)
        tl.store(VALUE + row, 0.0)
        for k in tl.static_range(4):
            tl.store(METRICS + k * metrics_stride + row, 0.0)
        return
    t = tl.load(TARGET + row)
    top, s, w = _statistics(z_row, V, scale2, LANES, VEC)
    lse2 = top + tl.log2(s)
    logp = (_target_logit(z_row, t, V) * scale2 - lse2) * LN2
    old = 0.0
    ref = 0.0
    if HAS_OLD:
        old = tl.load(OLD + row)
    if HAS_REF:
        ref = tl.load(REF + row)
    adv = tl.load(ADVANTAGE + row)
    loss, dlogp, k3, cut = _loss_terms(logp, old, ref, adv, lo, hi, beta, log_ratio_sq, CLIP, HAS_OLD, HAS_REF)
    tl.store(VALUE + row, loss * weight)
    tl.store(METRICS + row, logp)
    tl.store(METRICS + metrics_stride + row, (lse2 - w / s) * LN2)
    tl.store(METRICS + 2 * metrics_stride + row, k3)
    tl.store(METRICS + 3 * metrics_stride + row, cut)
    g = dlogp * weight * inv_t
    for start in range(0, V, LANES * VEC):
        c = start + lane[:, None] * VEC + j[None, :]
        ok = c < V
        p = tl.exp2(tl.load(z_row + c, mask=ok, other=0.0).to(tl.float32) * scale2 - lse2)
        dz = g * (tl.where(c == t, 1.0, 0.0) - p)
        tl.store(dz_row + c, dz.to(DZ.dtype.element_ty), mask=ok)


def statistics(z: Tensor, target: Tensor, inv_temperature: float, logp: Tensor, entropy: Tensor, lse: Tensor) -> None:
    """Of one chunk's logits [n, V], into the last three, float32 [n]."""
    with on_device(z):
        statistics_kernel[(z.shape[0],)](
            z, z.stride(0), target, logp, entropy, lse, z.shape[1], inv_temperature * LOG2E,
            LANES=LANES, VEC=VEC, **OPTIONS,
        )  # fmt: skip


def dlogits(
    z: Tensor,
    dz: Tensor,
    target: Tensor,
    entropy: Tensor,
    lse: Tensor,
    g: Tensor,
    h: Tensor | None,
    inv_temperature: float,
) -> None:
    """Gradient of one chunk's logits into dz, which may be z; g, h: gradients of logp and of entropy."""
    rows, vocabulary = z.shape
    with on_device(z):
        dlogits_kernel[(rows, triton.cdiv(vocabulary, BLOCK))](
            z, dz, z.stride(0), target, entropy, lse, g, g if h is None else h, vocabulary, inv_temperature * LOG2E,
            inv_temperature, HAS_ENTROPY=h is not None, BLOCK=BLOCK, **OPTIONS,
        )  # fmt: skip


def loss_rows(
    z: Tensor,
    dz: Tensor,
    target: Tensor,
    old: Tensor | None,
    ref: Tensor | None,
    advantage: Tensor,
    token_weight: Tensor,
    values: Tensor,
    metrics: Tensor,
    loss: str,
    lo: float,
    hi: float,
    beta: float,
    log_ratio_sq: float,
    inv_temperature: float,
) -> None:
    """One chunk: logits in, weighted losses [n], metrics [4, n] and dlogits out; dz may be z."""
    with on_device(z):
        loss_kernel[(z.shape[0],)](
            z, dz, z.stride(0), target, advantage if old is None else old, advantage if ref is None else ref, advantage,
            token_weight, values, metrics, metrics.stride(0), z.shape[1], inv_temperature * LOG2E, inv_temperature, lo,
            hi, beta, log_ratio_sq, CLIP=loss == "clip", HAS_OLD=old is not None, HAS_REF=ref is not None, LANES=LANES,
            VEC=VEC, **OPTIONS,
        )  # fmt: skip


def aot_cases() -> Iterator[Case]:
    tile = {"LANES": LANES, "VEC": VEC}
    aligned = ("Z", "DZ", "stride", "V")
    scalars = {name: "fp32" for name in ("scale2", "inv_t", "lo", "hi", "beta", "log_ratio_sq")}
    for logits in (F32, BF16):
        rows = {"Z": logits, "stride": "i32", "TARGET": I64, "V": "i32", "scale2": "fp32"}
        yield Case(
            f"statistics {logits[1:]}",
            statistics_kernel,
            rows | {name: F32 for name in ("LOGP", "ENTROPY", "LSE")},
            tile,
            ("Z", "stride", "V"),
            OPTIONS,
        )
        for entropy in (False, True):
            yield Case(
                f"dlogits {logits[1:]}{' entropy' if entropy else ''}",
                dlogits_kernel,
                rows | {"DZ": BF16, "inv_t": "fp32"} | {name: F32 for name in ("ENTROPY", "LSE", "G", "H")},
                {"BLOCK": BLOCK, "HAS_ENTROPY": entropy},
                aligned,
                OPTIONS,
            )
        floats = ("OLD", "REF", "ADVANTAGE", "TOKEN_WEIGHT", "VALUE", "METRICS")
        signature = rows | {"DZ": BF16, "metrics_stride": "i32"} | scalars | {name: F32 for name in floats}
        for clip in (False, True):
            for old, ref in ((False, False), (True, False), (True, True)):
                parts = ["clip" if clip else "dppo", *(["old"] if old else []), *(["ref"] if ref else [])]
                yield Case(
                    f"loss {logits[1:]} {' '.join(parts)}",
                    loss_kernel,
                    signature,
                    tile | {"CLIP": clip, "HAS_OLD": old, "HAS_REF": ref},
                    aligned,
                    OPTIONS,
                )
