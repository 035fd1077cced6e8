"""Which implementation of an op runs: torch everywhere, Triton and CUDA on a GPU.

Each op resolves its `impl` inside its body, below torch.compile and below autograd, so that forward and backward agree
and nothing here is traced. Triton and CUDA are looked for lazily: a machine without them runs torch.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Impl = Literal["auto", "torch", "triton", "cuda"]
IMPLS = ("auto", "torch", "triton", "cuda")

log = logging.getLogger(__name__)


def resolve(impl: str, device: torch.device, has_cuda_source: bool = False) -> Literal["torch", "triton", "cuda"]:
    """ "torch", "triton" or "cuda" for tensors on `device`.

    auto: on compute capability 9.0 or newer the op's CUDA source if it has one that can be built, else Triton; torch
    everywhere else, said once in the log. Triton runs on CPU tensors only in its interpreter, and only when asked for.
    Raises ValueError where the wanted implementation cannot run.
    """
    match impl:
        case "torch":
            return impl
        case "triton":
            _require_triton(device)
            return impl
        case "cuda":
            _require_cuda(device, has_cuda_source)
            return impl
        case "auto":
            return _auto(device, has_cuda_source)
        case _:
            raise ValueError(f"impl={impl!r} is not one of {', '.join(IMPLS)}")


def _auto(device: torch.device, has_cuda_source: bool) -> Literal["torch", "triton", "cuda"]:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        _say_once(f"tensors on {device.type}: the torch path runs (Triton and CUDA want compute capability 9.0)")
        return "torch"
    if has_cuda_source and _cuda_library():
        return "cuda"
    if has_triton():
        return "triton"
    _say_once("triton is not installed: the torch path runs")
    return "torch"


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Triton reads this when it is first imported, and again at every `@triton.jit`."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def on_device(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Launches go to the current device, which need not be the tensors'."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _require_triton(device: torch.device) -> None:
    if not has_triton():
        raise ValueError("impl=triton needs triton: pip install triton==3.7.1 (the one that torch 2.13 pins)")
    if device.type != "cuda" and not interpreted():
        raise ValueError(
            f"impl=triton on {device.type} runs in Triton's interpreter alone; set TRITON_INTERPRET=1 before triton is "
            "imported, or use impl=torch"
        )


def _require_cuda(device: torch.device, has_cuda_source: bool) -> None:
    if not has_cuda_source:
        raise ValueError("impl=cuda: no CUDA source for this op and shape; use impl=auto, triton or torch")
    if device.type != "cuda":
        raise ValueError(f"impl=cuda wants tensors on a GPU, found one on {device.type}; use impl=auto")
    if not _cuda_library():
        raise ValueError("impl=cuda: no built library and no nvcc; put nvcc on PATH, set RSI_NVCC, or use impl=auto")


def _cuda_library() -> bool:
    from rsi_kernels import cuda_library

    return cuda_library.load() is not None


@functools.cache
def _say_once(message: str) -> None:
    log.info(message)
