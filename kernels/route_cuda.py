"""The router through csrc/route.cu. Called inside an op's body, on tensors of a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from rsi_kernels import cuda_library

EXPERTS = (64, 128, 256, 512)
MAX_K = 32


def fits(logits: Tensor, k: int) -> bool:
    """Whether the compiled kernels cover this shape and type."""
    return logits.shape[1] in EXPERTS and k <= MAX_K and logits.dtype in (torch.float32, torch.bfloat16)


def forward(
    logits: Tensor, k: int, softmax: bool, renorm: bool, forced_ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `route` returns; logits contiguous [T, E]."""
    tokens, experts = logits.shape
    weights = logits.new_empty((tokens, k), dtype=torch.float32)
    ids = logits.new_empty((tokens, k), dtype=torch.int32)
    counts = logits.new_zeros(experts, dtype=torch.int32)
    prob_sum = logits.new_zeros(experts, dtype=torch.float32)
    forced = None if forced_ids is None else forced_ids.int().contiguous()
    if tokens:
        pointers = (logits, forced, weights, ids, counts, prob_sum)
        _call("rsi_route_forward", pointers, logits, k, softmax, renorm)
    return weights, ids, counts, prob_sum


def backward(grad_weights: Tensor, logits: Tensor, ids: Tensor, weights: Tensor, softmax: bool, renorm: bool) -> Tensor:
    grad = torch.empty_like(logits)
    if logits.shape[0]:
        pointers = (logits, ids, weights, grad_weights, grad)
        _call("rsi_route_backward", pointers, logits, ids.shape[1], softmax, renorm)
    return grad


def _call(name: str, pointers: tuple[Tensor | None, ...], logits: Tensor, k: int, softmax: bool, renorm: bool) -> None:
    library = cuda_library.load()
    assert library is not None, "resolve() has loaded it"
    with torch.cuda.device(logits.device):
        error = getattr(library, name)(
            *(None if tensor is None else tensor.data_ptr() for tensor in pointers),
            logits.dtype == torch.bfloat16,
            *logits.shape,
            k,
            softmax,
            renorm,
            torch.cuda.current_stream().cuda_stream,
        )
    if error:
        raise RuntimeError(f"{name} on {list(logits.shape)}, k={k}: cudaError {error}")
