"""`rsi sandbox`: what the sandbox can do on this machine, a shell in a task, and what killed hosts left."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rsi.sandbox import SandboxConfig
    from rsi.types import Task


def add_sandbox(parser: argparse.ArgumentParser) -> None:
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
