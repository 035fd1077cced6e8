"""The `rsi` command: thin, and quick to answer `--help`; what loads torch is imported by the command that needs it."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rsi.cli.pool import add_pool
from rsi.cli.sandbox import add_sandbox
from rsi.cli.trainer import add_plan, add_upcycle
from rsi.cli.validate import add_validate

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

    add_validate(commands.add_parser("validate", help="whether environments are sound: every gate of admission"))
    add_sandbox(commands.add_parser("sandbox", help="what the sandbox can do on this machine"))

    config = commands.add_parser("config", help="check a recipe and print it whole, every default filled in")
    config.add_argument("recipe", nargs=argparse.REMAINDER, metavar="RECIPE.yaml [KEY=VALUE | --KEY VALUE ...]")
    config.set_defaults(run=_config)

    add_plan(
        commands.add_parser("plan", help="gigabytes a GPU of a recipe's trainer, part by part; refuses what cannot fit")
    )
    add_upcycle(commands.add_parser("upcycle", help="a dense Qwen as a mixture of experts with the same logits"))
    add_pool(commands.add_parser("pool", help="the environments that a run trains on: list, show, graph, export"))
    return parser


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


def _config(args: argparse.Namespace) -> int:
    from rsi.config import RunConfig, dump, load, parse_argv

    print(dump(load(RunConfig, *parse_argv(args.recipe))), end="")
    return 0
