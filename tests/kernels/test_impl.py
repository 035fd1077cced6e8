"""Which implementation runs, and what is said where the wanted one cannot."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

from rsi_kernels import impl
from tests.kernels.checks import DEVICE

CPU = torch.device("cpu")


def test_auto_is_torch_on_a_cpu_and_says_so_once(caplog: pytest.LogCaptureFixture):
    impl._say_once.cache_clear()
    with caplog.at_level(logging.INFO):
        assert [impl.resolve("auto", CPU) for _ in range(3)] == ["torch"] * 3
    assert [record.message[:14] for record in caplog.records] == ["tensors on cpu"]


def test_triton_on_a_cpu_wants_its_interpreter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert impl.resolve("triton", CPU) == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        impl.resolve("triton", CPU)


def test_a_missing_triton_names_the_pip_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(impl, "has_triton", lambda: False)
    with pytest.raises(ValueError, match=r"pip install triton==3\.7\.1"):
        impl.resolve("triton", CPU)


def test_cuda_is_refused_without_a_source_and_without_a_gpu():
    with pytest.raises(ValueError, match="no CUDA source"):
        impl.resolve("cuda", CPU)
    with pytest.raises(ValueError, match="found one on cpu"):
        impl.resolve("cuda", CPU, has_cuda_source=True)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="auto, torch, triton, cuda"):
        impl.resolve("cutlass", CPU)


def test_auto_is_compiled_code_on_hopper_alone():
    hopper = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    assert impl.resolve("auto", torch.device(DEVICE)) == ("triton" if hopper else "torch")


def test_the_public_ops_import_without_triton_and_transformers():
    ops = "combine experts install linear_grpo linear_logprob permute route"
    code = (
        f"import sys; import {', '.join(f'rsi_kernels.{op}' for op in ops.split())}; "
        "sys.exit(any(name in sys.modules for name in ('transformers', 'rsi_kernels.head_triton')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
