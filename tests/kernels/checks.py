"""What the kernel tests share: where they run, how errors are measured, and how a fault is planted."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import rsi_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""On a GPU the same tests run the compiled kernels; elsewhere Triton's interpreter runs them (tests/conftest.py)."""

BOTH = pytest.mark.parametrize("impl", ["torch", "triton"])

FP32 = 1e-5
"""Norm-wise bound of float32 results: a few roundings of 6e-8 over sums of some thousand terms."""

BF16 = 8e-3
"""Norm-wise bound where results are stored in bfloat16: rounding is 2e-3 to 4e-3, and the interpreter truncates."""


def rel(ours: Tensor, reference: Tensor) -> float:
    """|ours - reference| / |reference|, Frobenius; NaN counts as infinitely wrong."""
    assert ours.shape == reference.shape
    difference = (ours.double().cpu() - reference.double().cpu()).norm()
    return float("inf") if difference.isnan() else (difference / reference.double().norm().clamp_min(1e-30)).item()


def off(ours: Tensor, reference: Tensor) -> float:
    """Largest absolute difference; NaN counts as infinitely wrong."""
    difference = (ours.double().cpu() - reference.double().cpu()).abs()
    return float("inf") if difference.isnan().any() else difference.max().item() if difference.numel() else 0.0


def leaf(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_()


def plant_in_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, old: str, new: str) -> None:
    """Make ops find `rsi_kernels.<name>` with `old` replaced by `new` in its source."""
    spec = importlib.util.find_spec(f"rsi_kernels.{name}")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    assert source.count(old) >= 1, f"{old!r} is not in {name}"
    path = tmp_path / f"{name}.py"
    path.write_text(source.replace(old, new))
    planted_spec = importlib.util.spec_from_file_location(f"planted_{name}", path)
    assert planted_spec is not None and planted_spec.loader is not None
    module = importlib.util.module_from_spec(planted_spec)
    monkeypatch.setitem(sys.modules, planted_spec.name, module)
    planted_spec.loader.exec_module(module)
    monkeypatch.setattr(rsi_kernels, name, module, raising=False)


def plant_in_function(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, function: Callable[..., Any], old: str, new: str
) -> None:
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) >= 1, f"{old!r} is not in {function.__name__}"
    scope = dict(vars(module))
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), scope)
    monkeypatch.setattr(module, function.__name__, scope[function.__name__])
