"""`rsi pool`: the environments that a run trains on."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

MAX_SHOWN = 64 << 10
"""Bytes of a file that `show --file` prints."""


def add_pool(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, text: str, run: Any) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, for example runs/tiny_cpu")
        added.set_defaults(run=run)
        return added

    listing = command("ls", "every admitted environment: when, from what, and how the solver does on it", _ls)
    listing.add_argument("--json", action="store_true", help="one JSON object a line")

    show = command("show", "one environment: lineage, gates, calibration, who solved it when, files", _show)
    show.add_argument("task", metavar="TASK", help="the beginning of its id")
    show.add_argument("--file", metavar="PATH", help="print one of its files, control characters escaped")
    show.add_argument("--json", action="store_true", help="one JSON object")

    graph = command("graph", "which environment was made from which, as a tree", _graph)
    form = graph.add_mutually_exclusive_group()
    form.add_argument("--dot", action="store_true", help="for Graphviz: rsi pool graph RUN --dot | dot -Tsvg")
    form.add_argument("--json", action="store_true", help="one row a line, with its parent")

    exporting = command("export", "copy the active environments as a Harbor dataset with its manifest", _export)
    exporting.add_argument("--harbor", type=Path, required=True, metavar="DIR", help="a new directory")
    exporting.add_argument("--evicted", action="store_true", help="those that were evicted, too")


def _ls(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from rsi.report.pool import open_journal, pool_rows, short

    rows = pool_rows(open_journal(args.run_dir)[1])
    if args.json:
        for row in rows:
            print(json.dumps(row))
        return 0
    table = Table("environment", "made from", "step", "attempts", "pass rate", "gone")
    for row in rows:
        rate = "-" if row["pass_rate"] is None else f"{row['pass_rate']:.0%}"
        origin = f"{row['direction'] or 'of'} {short(row['parent'])}" if row["parent"] else "seed"
        gone = "" if row["evicted"] is None else f"step {row['evicted']}"
        table.add_row(short(row["task"]), origin, str(row["step"]), str(row["attempts"]), rate, gone)
    Console().print(table)
    return 0


def _show(args: argparse.Namespace) -> int:
    from rsi.pool import task_folder
    from rsi.report.pool import describe_task, find_task, open_journal, pool_rows, printable

    root, events = open_journal(args.run_dir)
    task = find_task(pool_rows(events), args.task)
    found = describe_task(root, events, task)
    if args.file:
        if args.file not in found["files"]:
            raise ValueError(f"{args.file!r} is no file of it; there are {', '.join(found['files'])}")
        content = (task_folder(root, task) / args.file).read_bytes()
        print(printable(content[:MAX_SHOWN].decode(errors="replace")))
        if len(content) > MAX_SHOWN:
            print(f"[{len(content) - MAX_SHOWN} more bytes]")
    elif args.json:
        print(json.dumps(found))
    else:
        _print_task(found, (task_folder(root, task) / "instruction.md").read_text(errors="replace"))
    return 0


def _print_task(found: dict[str, Any], instruction: str) -> None:
    from rich.console import Console

    from rsi.report.pool import printable, short

    out = Console(highlight=False, markup=False, soft_wrap=True)
    admitted = found["admitted"]
    assignment, calibration = admitted.get("assignment"), admitted.get("calibration")
    out.print(f"{found['task']}\n\n{printable(instruction.strip())[:4000]}\n")
    out.print("lineage    " + " < ".join(map(short, found["lineage"])))
    if assignment:
        rate = "" if assignment["pass_rate"] is None else f", whose pass rate was {assignment['pass_rate']:.2f}"
        out.print(f"asked for  {assignment['direction']} the parent{rate}; revision {admitted['lineage']['revision']}")
    for gate in admitted.get("gates", ()):
        out.print(f"gate       {gate['name']}: {'passed' if gate['passed'] else printable(gate['reason'])}")
    if calibration:
        low, high = calibration["ci95"]
        shown = " ".join(f"{reward:.2f}" for reward in admitted["rewards"])
        out.print(f"calibrated {shown}: mean {admitted['mean']:.2f} [{low:.2f}, {high:.2f}]")
    out.print(f"admitted   step {admitted['step']}")
    for event in found["history"]:
        rewards = " ".join(f"{reward:.2f}" for reward in event["rewards"])
        why = event.get("reason") or event.get("outside") or ""
        out.print(f"{event['event']:10} step {event['step']}: {why or rewards}")
    out.print("files      " + "\n           ".join(f"{path} ({size})" for path, size in found["files"].items()))


def _graph(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.tree import Tree

    from rsi.report.pool import children, dot, label, open_journal, pool_rows

    rows = pool_rows(open_journal(args.run_dir)[1])
    if args.dot:
        print("\n".join(dot(rows)))
        return 0
    if args.json:
        for row in rows:
            print(json.dumps(row))
        return 0
    roots, below = children(rows)
    tree = Tree(f"{len(rows)} environments, {len(roots)} without a parent")
    todo = [(tree, row) for row in roots]
    while todo:
        branch, row = todo.pop(0)
        gone = "" if row["evicted"] is None else " (gone)"
        how = row["direction"] or ("from above" if row["parent"] else "seed")
        made = branch.add(f"{how}: {label(row)}{gone}", highlight=False)
        todo += [(made, child) for child in below.get(row["task"], [])]
    Console(soft_wrap=True).print(tree)
    return 0


def _export(args: argparse.Namespace) -> int:
    from rsi.report.pool import export, open_journal, pool_rows

    root, events = open_journal(args.run_dir)
    num = export(root, pool_rows(events), args.harbor, args.evicted)
    print(f"{num} environments in {args.harbor}")
    return 0
