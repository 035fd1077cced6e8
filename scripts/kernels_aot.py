"""Compiles every Triton configuration that we ship for sm_90, and the CUDA sources, on a machine without a GPU.

    python scripts/kernels_aot.py [--only TEXT] [--json]

Prints registers, spills and shared memory of each. Exits 1 if one does not compile or spills. The CUDA sources are
compiled if nvcc is found (RSI_NVCC, or on PATH), and said to be left out otherwise. Keys of --json: triton, nvcc,
aot_configs, aot_spills, faults, configs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported: nothing could be compiled under it


def report(only: str) -> dict[str, Any]:
    import triton

    from rsi_kernels import aot, cuda_library

    usages = []
    for case in aot.shipped():
        if only in case.name:
            usages.append(aot.compile_case(case))
            print(f"\r{len(usages)} compiled", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    nvcc = cuda_library.find_nvcc()
    if nvcc:
        usages += [usage for usage in cuda_library.resources(nvcc) if only in usage.name]
    return {
        "triton": triton.__version__,
        "nvcc": cuda_library.version(nvcc) if nvcc else None,
        "aot_configs": len(usages),
        "aot_spills": sum(usage.spills for usage in usages),
        "faults": {usage.name: usage.faults for usage in usages if usage.faults},
        "configs": [asdict(usage) for usage in usages],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    result = report(args.only)
    if args.json:
        print(json.dumps(result))
    else:
        print(f"triton {result['triton']}, nvcc {result['nvcc'] or 'not found: CUDA sources left out'}")
        print(f"{'':44}{'regs':>5}{'spills':>8}{'stack':>7}{'shared':>8}{'warps':>7}{'vector loads':>14}")
        for usage in result["configs"]:
            numbers = [usage[key] for key in ("registers", "spills", "stack", "shared", "warps", "vector_loads")]
            cells = "".join(f"{number:>{width}}" for number, width in zip(numbers, (5, 8, 7, 8, 7, 14), strict=True))
            print(f"{usage['name']:44}{cells}  {' '.join(usage['faults'])}".rstrip())
    if result["faults"]:
        sys.exit(f"{len(result['faults'])} configurations at fault: {', '.join(result['faults'])}")


if __name__ == "__main__":
    main()
