"""The CUDA sources as one shared library: found in the wheel, else built on first use, else done without.

Standard library only, so that setup.py can run it before anything is installed. The library speaks C and brings its own
CUDA runtime, so neither torch's version nor its headers matter.

RSI_NVCC           nvcc to use (default: the one on PATH)
RSI_SKIP_CUDA=1    never build or load the library
RSI_CACHE          where built libraries are kept (default: ~/.cache/rsi_kernels)
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import re
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHIPPED = "_sm90a.so"
"""Beside this file where the wheel was built with nvcc."""
FLAGS = ("-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a")
LINK = ("-shared", "-Xcompiler", "-fPIC", "-cudart", "static")
BUILD_TIMEOUT_S = 900

POINTER, INT = ctypes.c_void_p, ctypes.c_int
LAUNCHERS = {
    "rsi_route_forward": (*[POINTER] * 6, *[INT] * 6, POINTER),
    "rsi_route_backward": (*[POINTER] * 5, *[INT] * 6, POINTER),
}

log = logging.getLogger(__name__)


def sources() -> list[Path]:
    return sorted((HERE / "csrc").glob("*.cu"))


def find_nvcc() -> str | None:
    if os.environ.get("RSI_SKIP_CUDA") == "1":
        return None
    return os.environ.get("RSI_NVCC") or shutil.which("nvcc")


def version(nvcc: str) -> str:
    """nvcc's own last line, such as "Build cuda_13.0.r13.0/compiler.36424714_0"."""
    return _run([nvcc, "--version"]).stdout.strip().splitlines()[-1]


def build(nvcc: str, out: Path) -> None:
    """Compile and link all sources into `out`. Raises RuntimeError with nvcc's words."""
    _run([nvcc, *FLAGS, *LINK, *map(str, sources()), "-o", str(out)])


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, or None, the reason logged once: a broken toolkit does not stop training."""
    try:
        path = HERE / SHIPPED
        if os.environ.get("RSI_SKIP_CUDA") == "1":
            log.info("RSI_SKIP_CUDA=1: no CUDA library")
            return None
        if not path.exists():
            nvcc = find_nvcc()
            if nvcc is None:
                log.info("no CUDA library in this install and no nvcc: Triton and torch remain")
                return None
            path = _built(nvcc)
        library = ctypes.CDLL(str(path))
        for name, argument_types in LAUNCHERS.items():
            launcher = getattr(library, name)
            launcher.argtypes, launcher.restype = argument_types, INT
        return library
    except (OSError, RuntimeError, AttributeError) as error:
        log.warning("no CUDA library, Triton and torch remain: %s", error)
        return None


def _built(nvcc: str) -> Path:
    """In the cache, under a name that changes with sources, flags and compiler."""
    key = hashlib.sha256("\n".join((version(nvcc), *FLAGS, *LINK)).encode())
    for source in sources():
        key.update(source.read_bytes())
    cache = Path(os.environ.get("RSI_CACHE") or Path.home() / ".cache" / "rsi_kernels")
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f"{key.hexdigest()[:16]}.so"
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        build(nvcc, partial)
        os.replace(partial, path)  # every rank may race here
    return path


def resources(nvcc: str) -> list:
    """Usage of each kernel in the sources, from ptxas; nothing is linked."""
    from rsi_kernels.aot import Usage

    usages = []
    for source in sources():
        text = _run([nvcc, *FLAGS, "-Xptxas", "-v", "-cubin", "-o", os.devnull, str(source)]).stderr
        for mangled, body in re.findall(r"Compiling entry function '(\S+)' for(.*?)(?=Compiling entry|\Z)", text, re.S):
            counted = {what: int(n) for n, what in re.findall(r"(\d+) (registers|bytes smem|bytes stack frame)", body)}
            spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", body))
            stack = counted.get("bytes stack frame", 0)
            faults = ("spills",) if spills or stack else ()
            name = f"cuda {_readable(mangled)}"
            usages.append(Usage(name, counted["registers"], stack, spills, counted.get("bytes smem", 0), 4, 0, faults))
    return usages


def _readable(mangled: str) -> str:
    """_ZN..13route_forwardIfLi128ELb1EEE...: "route_forward float E=128 softmax"."""
    name, dtype, experts, softmax = re.findall(
        r"(route_(?:forward|backward))I(f|\d+__nv_bfloat16)Li(\d+)ELb([01])E", mangled
    )[0]
    score = "softmax" if softmax == "1" else "sigmoid"
    return f"{name} {'fp32' if dtype == 'f' else 'bf16'} E={experts} {score}"


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done
