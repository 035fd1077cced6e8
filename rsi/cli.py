"""The `rsi` command: thin, and quick to answer `--help`; what loads torch is imported by the command that needs it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rsi.sandbox import SandboxConfig
    from rsi.trainer.plan import Cluster, Memory
    from rsi.types import Task

DESCRIPTION = """\
One model proposes terminal environments, solves them, and learns from both.

  scripts/quickstart.sh                        the whole loop on a CPU, from a clean clone
  torchrun --standalone --nproc-per-node=1 recipes/self_play.py RECIPE.yaml [key=value ...]
  rsi config RECIPE.yaml --help                every key of a recipe, with its default
  tensorboard --logdir runs                    curves of all runs
"""


def main(argv: Sequence[str] | None = None) -> int:
    """0 when all is well, 2 for a mistake of the user's or a fault of the machine, both told in one line."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError, RuntimeError) as error:  # bases of ConfigError, SandboxError, EngineError, RunError
        if args.traceback:
            raise
        print(f"rsi: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rsi", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    evaluate = commands.add_parser("eval", help="pass rate of a model on a suite of tasks")
    evaluate.add_argument("--suite", choices=["heldout"], default="heldout", help="200 tasks, 50 at each depth 1 to 4")
    evaluate.add_argument("--model", required=True, help="directory with config, weights and tokenizer, or hub name")
    evaluate.add_argument("--recipe", type=Path, help="take engine, sandbox and episode limits from this recipe")
    evaluate.add_argument("--attempts", type=int, default=1, help="at each task (default 1)")
    evaluate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    evaluate.add_argument("--seed", type=int, default=0)
    evaluate.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    evaluate.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="dotted overrides: sandbox.max_alive=8")
    evaluate.set_defaults(run=_eval)

    _add_sandbox(commands.add_parser("sandbox", help="what the sandbox can do on this machine"))

    config = commands.add_parser("config", help="check a recipe and print it whole, every default filled in")
    config.add_argument("recipe", nargs=argparse.REMAINDER, metavar="RECIPE.yaml [KEY=VALUE | --KEY VALUE ...]")
    config.set_defaults(run=_config)

    pool = commands.add_parser("pool", help="the environments that a run trains on")
    listing = pool.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "ls", help="every admitted environment: when, from what, and how the solver does on it"
    )
    listing.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, for example runs/tiny_cpu")
    listing.add_argument("--json", action="store_true", help="one JSON object a line")
    listing.set_defaults(run=_pool_ls)

    planned = commands.add_parser(
        "plan", help="gigabytes a GPU of a recipe's trainer, part by part; refuses what cannot fit"
    )
    planned.add_argument("--config", type=Path, help="a recipe; without it, its defaults")
    planned.add_argument(
        "--cluster",
        action="append",
        help="8xH200, 2x8xH100 ...; may be given more than once (default: three usual ones)",
    )
    planned.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    planned.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="model.path=Qwen/Qwen3-30B-A3B ...")
    planned.set_defaults(run=_plan)

    upcycled = commands.add_parser("upcycle", help="a dense Qwen as a mixture of experts with the same logits")
    upcycled.add_argument("source", type=Path, help="directory of a dense Qwen2 or Qwen3")
    upcycled.add_argument("target", type=Path)
    upcycled.add_argument("--experts", type=int, default=8)
    upcycled.add_argument("--top-k", type=int, default=2, help="experts a token goes through (default 2)")
    upcycled.add_argument("--every", type=int, default=1, help="layers from one mixture to the next (default 1)")
    upcycled.add_argument("--seed", type=int, default=0, help="of the router")
    upcycled.set_defaults(run=_upcycle)
    return parser


def _add_sandbox(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    keys = "of the sandbox block: backend=docker cgroups=false"

    probe = commands.add_parser("probe", help="try every limit in a throwaway sandbox")
    probe.add_argument("--json", action="store_true")
    probe.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=keys)
    probe.set_defaults(run=_probe)

    shell = commands.add_parser("shell", help="drop into a task as the solver sees it; lines from the standard input")
    shell.add_argument("task_dir", type=Path, metavar="TASK_DIR", help="a Harbor task: it holds task.toml")
    shell.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=keys)
    shell.set_defaults(run=_shell)

    bench = commands.add_parser("bench", help="cycles and episodes a second, CPU and memory, of every backend there is")
    bench.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    bench.add_argument("--cycles", type=int, default=60, help="one at a time, and as many 16 at once (default 60)")
    bench.add_argument("--episodes", type=int, default=96, help="16 at once (default 96)")
    bench.add_argument("--alive", type=int, default=50, help="idle sandboxes whose memory is measured (default 50)")
    bench.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=keys)
    bench.set_defaults(run=_bench)

    sweep = commands.add_parser(
        "sweep", help="remove what killed hosts left of the namespace backend (docker does so at every start)"
    )
    sweep.add_argument("--json", action="store_true")
    sweep.set_defaults(run=_sweep)


def _eval(args: argparse.Namespace) -> int:
    result = asyncio.run(_evaluate(args))
    if args.json:
        print(json.dumps(result))
        return 0
    from rsi.progress import print_heldout

    print_heldout(result)
    return 0


async def _evaluate(args: argparse.Namespace) -> dict[str, Any]:
    from rsi.config import RunConfig, load

    config = load(RunConfig, args.recipe, ["steps=1", *args.overrides])  # a mistake is told before torch is loaded

    from rsi.lab import open_lab
    from rsi_eval.heldout import evaluate, load_suite

    async with open_lab(replace(config, model=replace(config.model, path=args.model))) as lab:
        result = await evaluate(
            lab.site,
            load_suite(),
            attempts=args.attempts,
            limits=config.solve.episode,
            seed=args.seed,
            temperature=args.temperature,
            concurrency=config.solve.concurrency,
            suite=args.suite,
        )
    return result.to_json()


def _probe(args: argparse.Namespace) -> int:
    from rsi.config import load
    from rsi.sandbox import Capabilities, SandboxConfig, build_backend

    async def probe() -> Capabilities:
        backend = build_backend(load(SandboxConfig, None, args.overrides))
        try:
            return await backend.probe()
        finally:
            await backend.close()

    found = asyncio.run(probe())
    if args.json:
        print(json.dumps({"enforced": sorted(found.enforced), "missing": dict(found.missing)}))
        return 0
    for limit in sorted(found.enforced):
        print(f"{limit:8}  enforced")
    for limit, why in sorted(found.missing.items()):
        print(f"{limit:8}  NOT enforced: {why}")
    return 0


def _shell(args: argparse.Namespace) -> int:
    from rsi.config import load
    from rsi.harbor.task import read_task
    from rsi.sandbox import SandboxConfig

    asyncio.run(_shell_in(read_task(args.task_dir), load(SandboxConfig, None, args.overrides)))
    return 0


async def _shell_in(task: Task, config: SandboxConfig) -> None:
    from rsi.episode import EpisodeLimits, observation_text
    from rsi.harbor.image import image_spec
    from rsi.sandbox import build_backend
    from rsi.sandbox.shell import shell
    from rsi.solve import sandbox_limits

    limits = EpisodeLimits()
    backend = build_backend(config)
    try:
        image = await backend.build(image_spec(task), task.limits.build_timeout_s)
        sandbox = await backend.create(image, replace(sandbox_limits(task), wall_s=86400.0))
        print(task.instruction, end="\n\n", flush=True)
        while (line := await asyncio.to_thread(_read_line)) is not None:
            done = await shell(
                sandbox, line, timeout_s=limits.command_timeout_s, cwd=task.workdir, max_output=limits.max_output
            )
            print(observation_text(done), flush=True)
    finally:
        await backend.close()


def _read_line() -> str | None:
    """The next command; None at the end of the input, at `exit` and at ^C."""
    try:
        line = input("$ " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line.strip() == "exit" else line


def _bench(args: argparse.Namespace) -> int:
    from rsi.config import load
    from rsi.sandbox import SandboxConfig
    from rsi.sandbox.bench import BenchSizes, bench

    config = load(SandboxConfig, None, args.overrides)
    sizes = BenchSizes(cycles=args.cycles, episodes=args.episodes, alive=args.alive)
    figures = asyncio.run(bench(config, sizes))
    if args.json:
        print(json.dumps(figures))
        return 0
    for name, figure in figures.items():
        by_backend = figure.items() if isinstance(figure, dict) else [("namespace", figure)]
        shown = "   ".join(f"{backend} {'-' if value is None else value}" for backend, value in by_backend)
        print(f"{name:18} {shown}")
    return 0


def _sweep(args: argparse.Namespace) -> int:
    from rsi.sandbox import host

    top = host.runs_dir()
    swept = host.sweep(top) if os.path.isdir(top) else []
    if args.json:
        print(json.dumps({"swept": swept}))
    else:
        print("\n".join(swept) or "nothing was left behind")
    return 0


def _config(args: argparse.Namespace) -> int:
    from rsi.config import RunConfig, dump, load, parse_argv

    print(dump(load(RunConfig, *parse_argv(args.recipe))), end="")
    return 0


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


def _pool_ls(args: argparse.Namespace) -> int:
    from rsi.pool import JOURNAL, read_journal

    root = args.run_dir / "pool"
    if not (root / JOURNAL).is_file():
        raise ValueError(f"{root / JOURNAL} is missing; name a run directory, for example runs/tiny_cpu")
    rows = pool_rows(read_journal(root))
    if args.json:
        for row in rows:
            print(json.dumps(row))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("environment", "parent", "step", "revision", "attempts", "pass rate", "gone")
    for row in rows:
        rate = "-" if row["pass_rate"] is None else f"{row['pass_rate']:.0%}"
        gone = "" if row["evicted"] is None else f"step {row['evicted']}"
        parent = _short(row["parent"]) if row["parent"] else "seed"
        numbers = [str(row[key]) for key in ("step", "revision", "attempts")]
        table.add_row(_short(row["task"]), parent, *numbers, rate, gone)
    Console().print(table)
    return 0


def pool_rows(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each admitted environment, in order of admission, from the events of a pool's journal.

    attempts and pass_rate are of the newest measurement and what was recorded after it; evicted is a step or None.
    """
    rows: dict[str, dict[str, Any]] = {}
    rewards: dict[str, list[float]] = {}
    for event in events:
        task = event["task"]
        if event["event"] == "admitted":
            lineage = event["lineage"]
            rows[task] = {
                "task": task,
                "step": event["step"],
                "domain": event["domain"],
                "parent": lineage["parent"],
                "revision": lineage["revision"],
                "evicted": None,
            }
        elif event["event"] == "evicted":
            rows[task]["evicted"] = event["step"]
        before = rewards[task] if event["event"] == "recorded" else []
        rewards[task] = [*before, *event["rewards"]]
    for task, row in rows.items():
        row["attempts"] = len(rewards[task])
        row["pass_rate"] = sum(rewards[task]) / len(rewards[task]) if rewards[task] else None
    return list(rows.values())


def _short(task_id: str) -> str:
    return task_id.removeprefix("sha256:")[:12]
