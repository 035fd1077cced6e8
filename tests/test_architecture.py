"""The house rules that a reader relies on: who imports whom, what loads lazily, what lies where.

Imports are read from the source, wherever in a file they stand (a function, a TYPE_CHECKING block): an import for types
is knowledge too. Only `test_heavy_packages_load_lazily` looks at where they stand.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for room in ("rsi", "kernels", "eval") for path in (REPO / room).rglob("*.py"))

PURE = {"rsi.types"}
LOSS = {"rsi.types", "rsi.corrections", "rsi.loss_metrics"}
BOXES = {"rsi.types", "rsi.sandbox", "rsi.harbor", "rsi.domains", "rsi.admission"}
EPISODES = {
    "rsi.advantages",
    "rsi.chat",
    "rsi.engine",
    "rsi.episode",
    "rsi.rewards",
    "rsi.solve",
    "rsi.propose",
    *BOXES,
}

MAY_IMPORT: dict[str, set[str]] = {
    "rsi.types": set(),
    "rsi.stats": set(),
    "rsi.progress": set(),
    "rsi.rewards": PURE,
    "rsi.advantages": PURE,
    "rsi.corrections": PURE,
    "rsi.loss_metrics": PURE,
    "rsi.loss": LOSS,
    "rsi.pack": PURE,
    "rsi.pool": PURE,
    "rsi.chat": PURE,
    "rsi.sandbox": {"rsi.types", "rsi.sandbox"},
    "rsi.harbor": {"rsi.types", "rsi.sandbox", "rsi.harbor"},
    "rsi.admission": BOXES | {"rsi.stats"},
    "rsi.domains": BOXES | {"rsi.chat"},  # the layout of a trace is chat's; neither knows a tokenizer
    "rsi.engine": {"rsi.types", "rsi.engine", "rsi_kernels"},
    "rsi.episode": EPISODES,
    "rsi.solve": EPISODES,
    "rsi.propose": EPISODES | {"rsi.pool"},
    "rsi.trainer": {"rsi.loss", "rsi.trainer", "rsi_kernels", *LOSS},
    "rsi.run": {"rsi.types", "rsi.config", "rsi.progress", "rsi.stats"},
    "rsi_kernels": {"rsi_kernels"},
}
"""A module's rule is that of its longest listed prefix. `rsi.config` nests every config and `rsi.lab` builds every
component, so both may import what they like; so may `rsi.cli`, recipes and eval, which nothing imports."""

NO_TORCH = (*BOXES, "rsi.episode", "rsi.solve", "rsi.propose")
NOT_IN_PURE = {"asyncio", "torch.distributed", "vllm"}
LAZY = {"vllm", "deepspeed", "docker", "harbor", "flash_attn", "accelerate", "datasets", "triton", "tensorboard"}
LAZY |= {"fla", "pyte"}
ONLY_IN_KERNELS = {"torch", "triton", "rsi_kernels"}
TRITON_SOURCES = ("rsi_kernels.*_triton",)
"""Modules that are Triton source: they import it at the top, and are themselves imported inside functions alone."""


def module_name(path: Path) -> str:
    parts = list(path.relative_to(REPO).with_suffix("").parts)
    parts[0] = {"kernels": "rsi_kernels", "eval": "rsi_eval"}.get(parts[0], parts[0])
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(module or module.name, line) of every import below `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write imports in full; relative ones hide who knows whom"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def rule_of(module: str) -> set[str] | None:
    listed = [prefix for prefix in MAY_IMPORT if within(module, prefix)]
    return MAY_IMPORT[max(listed, key=len)] if listed else None


def breaches(module: str, source: str) -> list[str]:
    """What a module's source imports against the table."""
    allowed = rule_of(module)
    found = []
    for name, line in imported(ast.parse(source)):
        top = name.split(".")[0]
        is_eval = top == "rsi_eval" and not within(module, "rsi.cli") and not within(module, "rsi_eval")
        if top in ("recipes", "tests") or is_eval:
            found.append(f"{module}:{line} imports {name}; nobody imports recipes, tests or eval")
        if allowed is not None and top in ("rsi", "rsi_kernels") and not any(within(name, p) for p in allowed):
            found.append(f"{module}:{line} imports {name}; it may import {sorted(allowed) or 'nothing of ours'}")
        if (allowed is PURE or allowed is LOSS) and any(within(name, banned) for banned in NOT_IN_PURE):
            found.append(f"{module}:{line} imports {name}; {module} is a pure function of its arguments")
        if any(within(module, prefix) for prefix in NO_TORCH) and top in ("torch", "transformers", "tokenizers"):
            found.append(f"{module}:{line} imports {name}; {module} knows no tensors")
    return found


def is_triton_source(module: str) -> bool:
    return any(fnmatch(module, pattern) for pattern in TRITON_SOURCES)


def runs_on_import(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported: not the bodies of functions, not TYPE_CHECKING blocks."""
    queue: list[ast.stmt] = list(tree.body)
    while queue:
        node = queue.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        queue += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def tracked() -> list[Path]:
    """Files that git tracks, or would; every file of a copy without git."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=REPO, capture_output=True, text=True
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for line in listing.stdout.splitlines() if (path := REPO / line).is_file()]


def test_the_sources_are_found() -> None:
    assert {"rsi.types", "rsi.sandbox", "rsi_kernels.linear_logprob"} <= {module_name(path) for path in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=[module_name(path) for path in SOURCES])
def test_imports_run_the_way_the_house_is_drawn(path: Path) -> None:
    assert breaches(module_name(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rsi.rewards", "from rsi.pool import Pool"),
        ("rsi.pack", "def f():\n    import asyncio"),
        ("rsi.trainer.fsdp", "from rsi import chat"),
        ("rsi.sandbox.docker", "import torch"),
        ("rsi.solve", "from rsi.trainer import Trainer"),
        ("rsi.engine.vllm", "import rsi.sandbox"),
        ("rsi.config", "from rsi_eval.heldout import evaluate"),
        ("rsi_kernels.linear_logprob", "from rsi.types import Batch"),
    ],
)
def test_the_import_rules_catch_a_planted_breach(module: str, source: str) -> None:
    assert len(breaches(module, source)) == 1


@pytest.mark.parametrize("path", SOURCES, ids=[module_name(path) for path in SOURCES])
def test_heavy_packages_load_lazily(path: Path) -> None:
    at_import = [
        f"line {line}: {name}"
        for node in runs_on_import(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name, line in imported(node)
        if name.split(".")[0] in LAZY - ({"triton"} if is_triton_source(module_name(path)) else set())
        or is_triton_source(name)
    ]
    assert at_import == [], "import these inside the function that needs them"


@pytest.mark.parametrize("path", sorted((REPO / "kernels").rglob("*.py")), ids=lambda path: path.stem)
def test_kernels_import_torch_and_triton_only(path: Path) -> None:
    names = {name.split(".")[0] for name, _ in imported(ast.parse(path.read_text()))}
    knows_models = {"transformers"} if path.stem == "install" else set()
    assert names <= ONLY_IN_KERNELS | knows_models | set(sys.stdlib_module_names)


def test_kernels_and_eval_are_not_regular_packages() -> None:
    # A regular package named `kernels` shadows Hugging Face's distribution of that name and breaks transformers.
    assert not (REPO / "kernels" / "__init__.py").exists()
    assert not (REPO / "eval" / "__init__.py").exists()


def test_setup_lists_every_package() -> None:
    calls = [node for node in ast.walk(ast.parse((REPO / "setup.py").read_text())) if isinstance(node, ast.Call)]
    [packages] = [k.value for call in calls for k in call.keywords if k.arg == "packages"]
    with_code = {module_name(path.parent / "__init__.py") for path in SOURCES}
    assert set(ast.literal_eval(packages)) == with_code


def test_the_top_level_stays_as_it_is() -> None:
    allowed = {"setup.py", "README.md", "LICENSE", "rsi", "kernels", "recipes", "scripts", "tests", "eval"}
    top = {path.relative_to(REPO).parts[0] for path in tracked()}
    assert {name for name in top if not name.startswith(".")} <= allowed


HOSTS = [r"pypi\.org", r"pythonhosted\.org", r"download\.pytorch\.org", r"registry\.npmjs\.org", r"deb\.debian\.org"]
PATHS = [r"/opt/(wheels|pypi)", r"/work/(main|shared|venv|brief)", r"/home/[a-z]+/", r"/Users/", r"/root/\.[a-z]"]


def test_no_file_names_one_machine_or_a_package_registry() -> None:
    pattern = re.compile("|".join(HOSTS + PATHS))
    found = []
    for path in tracked():
        if path == Path(__file__).resolve() or path.stat().st_size > 1 << 20:
            continue
        for number, line in enumerate(path.read_text(errors="ignore").splitlines(), start=1):
            if pattern.search(line):
                found.append(f"{path.relative_to(REPO)}:{number}: {line.strip()[:100]}")
    assert found == []
