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

from rsi.cli.pool import add_pool

if TYPE_CHECKING:
    from rsi.sandbox import SandboxConfig
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

    _add_validate(commands.add_parser("validate", help="whether environments are sound: every gate of admission"))
    _add_sandbox(commands.add_parser("sandbox", help="what the sandbox can do on this machine"))

    config = commands.add_parser("config", help="check a recipe and print it whole, every default filled in")
    config.add_argument("recipe", nargs=argparse.REMAINDER, metavar="RECIPE.yaml [KEY=VALUE | --KEY VALUE ...]")
    config.set_defaults(run=_config)

    add_pool(commands.add_parser("pool", help="the environments that a run trains on: list, show, graph, export"))
    return parser


def _add_validate(parser: argparse.ArgumentParser) -> None:
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

    sweep = commands.add_parser("sweep", help="remove what hosts that were killed left behind")
    sweep.add_argument("--json", action="store_true")
    sweep.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=keys)
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
    from rsi.config import load
    from rsi.sandbox import SandboxConfig, host

    config = load(SandboxConfig, None, args.overrides)
    if config.backend == "docker":
        swept = asyncio.run(_sweep_containers(config))
    else:
        top = host.runs_dir()
        swept = host.sweep(top) if os.path.isdir(top) else []
    if args.json:
        print(json.dumps({"swept": swept}))
    else:
        print("\n".join(swept) or "nothing was left behind")
    return 0


async def _sweep_containers(config: SandboxConfig) -> list[str]:
    from rsi.sandbox.docker import DockerBackend

    backend = DockerBackend(config)
    try:
        return await backend.sweep()
    finally:
        await backend.close()


def _config(args: argparse.Namespace) -> int:
    from rsi.config import RunConfig, dump, load, parse_argv

    print(dump(load(RunConfig, *parse_argv(args.recipe))), end="")
    return 0
