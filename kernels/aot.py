"""Compiles Triton kernels for sm_90 on a machine without a GPU, and reads what they take of it.

Triton learns registers and spills from a driver; `cuobjdump` and `nvdisasm`, which its wheel brings, read them from the
binary. Not to be used under TRITON_INTERPRET, where there is nothing to compile.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODULES = ("head_triton", "route_triton", "permute_triton", "combine_triton", "swiglu_triton")

F32, BF16, I32, I64, U8 = "*fp32", "*bf16", "*i32", "*i64", "*u8"


@dataclass(frozen=True)
class Case:
    """One kernel in one configuration that a launch of ours uses."""

    name: str
    kernel: Any
    signature: Mapping[str, str]
    """Triton type of each argument that is not a constant: "*bf16", "i32", "fp32", ..."""
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]
    """Pointers and sizes that are multiples of 16, as the launch finds them; without it loads come out scalar."""
    options: Mapping[str, Any]
    """As the launch gives them: num_warps, enable_fp_fusion, ..."""
    vector_loads: bool = True
    """Whether a compilation whose global loads are all scalar is a fault."""


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes."""

    name: str
    registers: int
    """Of each thread."""
    stack: int
    """Bytes of local memory of each thread; above 0, registers spill."""
    spills: int
    """Loads and stores of local memory."""
    shared: int
    """Bytes of a block."""
    warps: int
    vector_loads: int
    """Global loads of 2 or 4 words."""
    faults: tuple[str, ...] = field(default=())


def shipped() -> Iterator[Case]:
    """Every configuration that the public ops launch for Qwen3-30B-A3B and Qwen3.5/3.6-35B-A3B."""
    for module in MODULES:
        yield from importlib.import_module(f"rsi_kernels.{module}").aot_cases()


def compile_case(case: Case) -> Usage:
    """For sm_90a. Raises what Triton raises for a kernel that does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    source = ASTSource(
        fn=case.kernel,
        signature={name: case.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in case.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned},
    )
    kernel: Any = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(case.options))
    resources, assembly = _disassemble(kernel.asm["cubin"])
    found = dict(re.findall(r"(REG|STACK):(\d+)", resources))
    vector_loads = len(re.findall(r"ld\.global[^;]*\.v[24]", kernel.asm["ptx"]))
    spills = len(re.findall(r"\b(?:LDL|STL)\b", assembly))
    faults = []
    if int(found["STACK"]) or spills:
        faults.append("spills")
    if case.vector_loads and not vector_loads:
        faults.append("scalar loads")
    return Usage(
        case.name,
        int(found["REG"]),
        int(found["STACK"]),
        spills,
        kernel.metadata.shared,
        kernel.metadata.num_warps,
        vector_loads,
        tuple(faults),
    )


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """(resource usage, assembly) as text."""
    import triton.backends.nvidia as nvidia

    tools = Path(str(nvidia.__file__)).parent / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = ([tools / "cuobjdump", "--dump-resource-usage"], [tools / "nvdisasm", "-c"])
        usage, assembly = (
            subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout
            for command in commands
        )
    return usage, assembly
