"""`rsi plan` and `rsi upcycle`: what a trainer needs before it runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rsi.trainer.plan import Cluster, Memory


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="a recipe; without it, its defaults")
    parser.add_argument(
        "--cluster",
        action="append",
        help="8xH200, 2x8xH100 ...; may be given more than once (default: three usual ones)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="model.path=Qwen/Qwen3-30B-A3B ...")
    parser.set_defaults(run=_plan)


def add_upcycle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="directory of a dense Qwen2 or Qwen3")
    parser.add_argument("target", type=Path)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2, help="experts a token goes through (default 2)")
    parser.add_argument("--every", type=int, default=1, help="layers from one mixture to the next (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the router")
    parser.set_defaults(run=_upcycle)


def _plan(args: argparse.Namespace) -> int:
    from rsi.config import RunConfig, load

    config = load(RunConfig, args.config, ["steps=1", *args.overrides])

    from rsi.trainer.plan import CLUSTERS, mend, plan, read_cluster, rows, shape_of

    clusters = [read_cluster(text) for text in args.cluster or CLUSTERS]
    shape = shape_of(config.model.path)
    plans = [plan(shape, config.model, config.trainer, cluster) for cluster in clusters]
    names = [f"{c.nodes}x{c.gpus}x{c.kind}" if c.nodes > 1 else f"{c.gpus}x{c.kind}" for c in clusters]
    fits = [made.total <= cluster.capacity_gb for made, cluster in zip(plans, clusters, strict=True)]
    if args.json:
        told = {name: {**rows(made), "fits": fit} for name, made, fit in zip(names, plans, fits, strict=True)}
        print(json.dumps({"parameters": shape.parameters, "clusters": told}))
    else:
        _print_plans(f"{config.model.path}: {shape.parameters / 1e9:.2f} B", names, plans, clusters)
    for name, fit, cluster, made in zip(names, fits, clusters, plans, strict=True):
        if not fit:
            print(
                f"rsi: {name} cannot hold it: {made.total:.1f} GB of {cluster.capacity_gb:.1f} a GPU; "
                f"use {mend(shape, config.model, config.trainer, cluster)}",
                file=sys.stderr,
            )
    return 0 if all(fits) else 2


def _print_plans(title: str, names: Sequence[str], plans: Sequence[Memory], clusters: Sequence[Cluster]) -> None:
    from rich.console import Console
    from rich.table import Table

    from rsi.trainer.plan import rows

    table = Table("GB a GPU", *names, title=title)
    for part in rows(plans[0]):
        label = "host, a node" if part == "host" else part
        table.add_row(label, *(f"{rows(made)[part]:.1f}" for made in plans))
    table.add_row("of", *(f"{cluster.capacity_gb:.1f}" for cluster in clusters))
    left = (cluster.capacity_gb - made.total for made, cluster in zip(plans, clusters, strict=True))
    table.add_row("left for an engine", *(f"{gb:.1f}" if gb >= 0 else "does not fit" for gb in left))
    Console().print(table)


def _upcycle(args: argparse.Namespace) -> int:
    from rsi.trainer.upcycle import UpcycleConfig, upcycle

    size = upcycle(args.source, args.target, UpcycleConfig(args.experts, args.top_k, args.every, seed=args.seed))
    print(f"wrote {args.target}: {size / 1e6:.1f} M parameters, logits as those of {args.source}")
    return 0
