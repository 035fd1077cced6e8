"""`rsi validate`: whether environments are sound."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path


def add_validate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Exit status: 0 all are sound, 1 one is not, 2 something could not be judged."
    parser.add_argument("words", nargs="+", metavar="TASK_DIR | KEY=VALUE", help="and keys: admission.mutants=20")
    parser.add_argument("--sandbox", choices=["namespace", "docker"], help="default: namespace")
    parser.add_argument("--gates", default="", metavar="A,B", help="only these (structure is always among them)")
    parser.add_argument(
        "--strict", action="store_true", help="what the paper asks of other domains: no-op exactly 0, ..."
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="sandboxes at work at once (default: one a CPU)")
    parser.add_argument(
        "--held-out", type=Path, action="append", default=[], metavar="FILE", help="hashes, see HeldOut"
    )
    parser.add_argument("--rubric", default="", metavar="MODEL", help="ask it for a review at $OPENAI_BASE_URL")
    parser.add_argument("--json", action="store_true", help="one JSON object a task, a line each")
    parser.set_defaults(run=_validate)


def _validate(args: argparse.Namespace) -> int:
    from rsi.admission.command import CommandConfig, Printer, exit_status, validate_directories
    from rsi.admission.contamination import HeldOut
    from rsi.config import load
    from rsi_eval.heldout import load_suite

    overrides = [word for word in args.words if "=" in word and not Path(word).exists()]
    for key, value in (("sandbox.backend", args.sandbox), ("sandbox.max_alive", args.jobs)):
        overrides += [f"{key}={value}"] if value is not None else []
    config = load(CommandConfig, None, overrides).narrowed(args.gates, args.strict, args.rubric)
    sets = [HeldOut.from_tasks(item.task for item in load_suite()), *map(HeldOut.load, args.held_out)]
    paths = [Path(word) for word in args.words if word not in overrides]
    if not paths:
        raise ValueError("name at least one directory that holds task.toml")
    printer = Printer(args.json, len(paths))
    return exit_status(asyncio.run(validate_directories(paths, config, HeldOut.joined(sets), printer.show)))
