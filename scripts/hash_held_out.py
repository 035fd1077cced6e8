"""Hashes of tasks that must never be trained on, for `rsi validate --held-out FILE`; the tasks need not be shipped.

    python scripts/hash_held_out.py TASK_DIR... --out FILE.npy

13-grams of instructions and solutions, and the canaries of all files, 8 bytes each; no text can be read back.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rsi.admission.contamination import HeldOut
from rsi.harbor.task import TaskError, read_task


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", type=Path, metavar="TASK_DIR")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    try:
        held_out = HeldOut.from_tasks(map(read_task, args.tasks))
    except (TaskError, OSError) as error:
        parser.error(str(error))
    held_out.save(args.out)
    print(f"{args.out}: {len(held_out)} hashes of {len(args.tasks)} tasks")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
