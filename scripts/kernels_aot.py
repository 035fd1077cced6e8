"""Compiles every Triton configuration that we ship for sm_90, and the CUDA sources, on a machine without a GPU.

    python scripts/kernels_aot.py [--only TEXT] [--json]

Prints registers, spills and shared memory of each. Exits 1 if one does not compile or spills. The CUDA sources are
compiled if nvcc is found (RSI_NVCC, or on PATH), and said to be left out otherwise. Keys of --json: triton, nvcc,
aot_configs, aot_spills, faults, configs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported: nothing could be compiled under it


def compile_one(index: int) -> Any:
    """By its place among the shipped ones: a kernel cannot be sent to another process."""
    from rsi_kernels import aot

    return aot.compile_case(next(itertools.islice(aot.shipped(), index, None)))


def report(only: str) -> dict[str, Any]:
    import triton

    from rsi_kernels import aot, cuda_library

    nvcc = cuda_library.find_nvcc()
    wanted = [i for i, case in enumerate(aot.shipped()) if only in case.name]
    usages: list[aot.Usage] = []
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        of_cuda = pool.submit(cuda_library.resources, nvcc) if nvcc else None
        for usage in pool.map(compile_one, wanted):
            usages.append(usage)
            print(f"\r{len(usages)} compiled", end="", file=sys.stderr, flush=True)
        if of_cuda:
            usages += [usage for usage in of_cuda.result() if only in usage.name]
    print(file=sys.stderr)
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
