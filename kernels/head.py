"""The LM head, a chunk of rows at a time: the matrix products that `linear_logprob` and `linear_grpo` share.

65,536 tokens over Qwen3.5's 248,320 words are 65 GB of float32 logits. Only a chunk of them lives, in one buffer that
every chunk reuses. Products accumulate in float32 (float64 for float64 operands, which gradcheck wants).
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_GPU = 4096
"""Rows of a chunk on a GPU: the float32 gradient of the head is read and written once a chunk, 4.6 ms of traffic in all
at T = 32,768, V = 151,936 (computed at 4.3 TB/s; not yet measured)."""

CHUNK_CPU_BYTES = 16 << 20
"""Logits of a chunk on a CPU: they stay in its last-level cache, and the products stay tall enough."""


def check_operands(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float, chunk: int) -> None:
    """Raises ValueError for shapes, dtypes or options that do not fit."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or target.shape != hidden.shape[:1]:
        raise ValueError(
            f"expected hidden [T, H], weight [V, H], target [T]; found {list(hidden.shape)}, {list(weight.shape)}, "
            f"{list(target.shape)}"
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}; cast one of them, both are multiplied in one product"
        )
    if target.dtype != torch.int64:
        raise ValueError(f"target is {target.dtype}; use int64")
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}; use a positive one, 1.0 to score tokens as the model gives them")
    if chunk < 0:
        raise ValueError(f"chunk={chunk} rows; use 0 for the device's default, or at least 1")


def chunks(num_rows: int, vocabulary: int, chunk: int, device: torch.device) -> list[slice]:
    if chunk == 0:
        chunk = CHUNK_GPU if device.type == "cuda" else max(16, CHUNK_CPU_BYTES // (4 * vocabulary))
    return [slice(start, min(start + chunk, num_rows)) for start in range(0, num_rows, chunk)]


class Head:
    """hidden @ weight.T and its two gradients for chunks of at most `max_rows` rows."""

    def __init__(self, weight: Tensor, max_rows: int, fp32_logits: bool):
        """fp32_logits False leaves the logits of bfloat16 operands in bfloat16: |d logp| 3e-2 instead of 1e-6."""
        self._weight = weight
        self._wide = torch.promote_types(weight.dtype, torch.float32)
        self._on_gpu = weight.is_cuda
        # torch has no mixed-precision product on a CPU: there the head is widened once
        self._operand = weight if self._on_gpu else weight.to(self._wide)
        dtype = self._wide if fp32_logits else weight.dtype
        self._buffer = torch.empty(max_rows, weight.shape[0], dtype=dtype, device=weight.device)
        narrow = weight.dtype != self._wide and dtype == self._wide and self._on_gpu
        self._dlogits = torch.empty_like(self._buffer, dtype=weight.dtype) if narrow else self._buffer

    def logits(self, x: Tensor) -> Tensor:
        """[n, V], in the shared buffer: valid until the next call."""
        z = self._buffer[: x.shape[0]]
        if not self._on_gpu and z.dtype == self._wide:
            return torch.mm(x.to(self._wide), self._operand.t(), out=z)
        if z.dtype != x.dtype:
            return torch.mm(x, self._weight.t(), out_dtype=z.dtype, out=z)
        return torch.mm(x, self._weight.t(), out=z)

    def dlogits(self, rows: int) -> Tensor:
        """Where the gradient of the last logits goes: over them, or beside them where the product wants bfloat16."""
        return self._dlogits[:rows]

    def new_weight_grad(self) -> Tensor:
        return torch.zeros(self._weight.shape, dtype=self._wide, device=self._weight.device)

    def hidden_grad(self, dz: Tensor, out: Tensor) -> None:
        """out = dz @ weight."""
        if dz.dtype == out.dtype:
            torch.mm(dz, self._weight, out=out)
        else:
            out.copy_(torch.mm(dz.to(self._wide), self._operand))

    def add_weight_grad(self, grad: Tensor, dz: Tensor, x: Tensor) -> None:
        """grad += dz.T @ x, accumulated in grad's dtype."""
        if self._on_gpu and x.dtype != grad.dtype:
            torch.addmm(grad, dz.t(), x, out_dtype=grad.dtype, out=grad)
        else:
            grad.addmm_(dz.t().to(grad.dtype), x.to(grad.dtype))
