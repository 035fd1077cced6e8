"""rsi.config: what a recipe may say, and what a mistake in it is answered with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from rsi.config import ConfigError, RunConfig, differences, dump, explain, load, parse_argv, plain


@dataclass(frozen=True)
class Optimizer:
    lr: float = 1e-3
    """Step size."""
    betas: tuple[float, float] = (0.9, 0.95)
    kind: Literal["adam", "sgd"] = "adam"
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"optimizer.lr={self.lr} does not learn; use a positive number")


@dataclass(frozen=True)
class Data:
    path: str
    """Where the rows are."""
    names: tuple[str, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    steps: int
    data: Data
    shuffle: bool = True
    optimizer: Optimizer = Optimizer()


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write(tmp_path / "good.yaml", "steps: 3\ndata: {path: rows}\n")


def complaint(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(Recipe, path, overrides)
    return str(error.value)


def test_what_is_not_said_keeps_its_default(good: Path) -> None:
    assert load(Recipe, good) == Recipe(steps=3, data=Data("rows"))


def test_a_whole_recipe_is_read_into_its_types(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.yaml",
        "steps: 7\nshuffle: false\ndata:\n  path: rows\n  names: [a, b]\n  weights: {a: 1, b: 0.5}\n"
        "optimizer: {lr: 1e-6, betas: [0, 0.5], kind: sgd, clip: 1}\n",
    )
    recipe = load(Recipe, path)
    assert recipe.data == Data("rows", ("a", "b"), {"a": 1.0, "b": 0.5})
    assert recipe.optimizer == Optimizer(0.000001, (0.0, 0.5), "sgd", 1.0)
    assert recipe.shuffle is False


def test_dump_reads_back_to_an_equal_config(tmp_path: Path) -> None:
    recipe = Recipe(5, Data("123", ("true", "1e3"), {"a": 0.25}), False, Optimizer(1e-7, clip=None))
    assert load(Recipe, write(tmp_path / "dumped.yaml", dump(recipe))) == recipe


def test_the_run_config_reads_back_to_itself(tmp_path: Path) -> None:
    config = RunConfig(steps=4)
    assert load(RunConfig, write(tmp_path / "run.yaml", dump(config))) == config


def test_a_base_is_overlaid_by_the_changed_keys_only(tmp_path: Path, good: Path) -> None:
    write(tmp_path / "middle.yaml", "base: good.yaml\noptimizer: {lr: 0.5, kind: sgd}\n")
    (tmp_path / "ablations").mkdir()
    top = write(tmp_path / "ablations" / "top.yaml", "base: ../middle.yaml\noptimizer: {lr: 0.25}\n")
    assert load(Recipe, top) == Recipe(3, Data("rows"), True, Optimizer(lr=0.25, kind="sgd"))


def test_bases_in_a_circle_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "base: b.yaml\n")
    write(tmp_path / "b.yaml", "base: a.yaml\n")
    assert "a.yaml -> b.yaml -> a.yaml" in complaint(tmp_path / "a.yaml")


def test_overrides_win_and_are_read_as_yaml_scalars(good: Path) -> None:
    overrides = ["steps=9", "optimizer.lr=3e-4", "shuffle=false", "optimizer.clip=null", "data.names=[x, y]"]
    recipe = load(Recipe, good, overrides)
    assert recipe == Recipe(9, Data("rows", ("x", "y")), False, Optimizer(lr=3e-4))


def test_a_text_field_takes_an_override_as_it_was_typed(good: Path) -> None:
    assert load(Recipe, good, ["data.path=0010"]).data.path == "0010"
    assert load(Recipe, good, ["data.path=null"]).data.path == "null"


def test_an_empty_block_keeps_its_defaults(tmp_path: Path) -> None:
    assert load(Recipe, write(tmp_path / "r.yaml", "steps: 1\ndata: {path: p}\noptimizer:\n")).optimizer == Optimizer()


def test_an_unknown_key_names_the_nearest_and_its_file(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", "steps: 1\ndata: {path: p}\noptimizer: {lrr: 1}\n")
    assert complaint(path) == f"{path}:optimizer.lrr: unknown key 'lrr'; did you mean optimizer.lr?"


def test_an_unknown_key_is_found_in_the_block_where_it_lives(good: Path) -> None:
    assert complaint(good, "kind=sgd") == "the command line:kind: unknown key 'kind'; did you mean optimizer.kind?"


def test_an_unknown_key_in_a_base_names_the_base(tmp_path: Path) -> None:
    base = write(tmp_path / "base.yaml", "steps: 1\ndata: {path: p, zzz: 1}\n")
    top = write(tmp_path / "top.yaml", "base: base.yaml\nsteps: 2\n")
    assert complaint(top) == f"{base}:data.zzz: unknown key 'zzz'; known keys here: path, names, weights"


def test_a_missing_key_says_how_to_give_it(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", "steps: 1\n")
    assert complaint(path) == (
        f"{path}: data.path (text) is missing and has no default; "
        "add `path: name` below `data:`, or give data.path=name on the command line"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps=2.5", "is 2.5 (float); expected a whole number, for example `steps: 4`"),
        ("steps=true", "is True (bool); expected a whole number, for example `steps: 4`"),
        ("shuffle=1", "is 1 (int); expected true or false, for example `shuffle: true`"),
        ("optimizer.lr=fast", "is 'fast' (str); expected a number, for example `lr: 0.5`"),
        ("optimizer.kind=sdg", "is 'sdg' (str); expected one of adam, sgd, for example `kind: sgd`"),
        ("optimizer.betas=[1]", "expected a list of a number, 2 values, for example `betas: [0.5, 0.5]`"),
        ("optimizer.betas=[1, x]", "optimizer.betas.1 is 'x' (str); expected a number"),
        ("optimizer=3", "is 3 (int); expected a block of keys (lr, betas, kind, clip)"),
        ("data.weights={a: x}", "data.weights.a is 'x' (str); expected a number"),
        ("optimizer.clip=hard", "is 'hard' (str); expected a number"),
    ],
)
def test_a_wrong_type_says_found_expected_and_an_example(good: Path, override: str, expected: str) -> None:
    message = complaint(good, override)
    assert message.startswith("the command line:") and expected in message


def test_a_components_own_check_is_reported_with_its_place(good: Path) -> None:
    assert complaint(good, "optimizer.lr=-1").endswith("optimizer.lr=-1.0 does not learn; use a positive number")


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", "steps: 1\nsteps: 2\n")
    assert "'steps' stands twice" in complaint(path)


def test_what_is_not_yaml_or_not_there_is_refused_by_name(tmp_path: Path, good: Path) -> None:
    assert "bad.yaml is not YAML" in complaint(write(tmp_path / "bad.yaml", "steps: [1\n"))
    assert "expected keys" in complaint(write(tmp_path / "list.yaml", "- 1\n"))
    assert complaint(tmp_path / "goood.yaml").endswith(f"did you mean {good}?")


def test_yaml_cannot_make_python_objects(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", "steps: !!python/object/apply:os.getpid []\n")
    assert "is not YAML" in complaint(path)


def test_a_huge_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", "# " + "x" * (1 << 20))
    assert "larger than 1048576 bytes" in complaint(path)


def test_argv_becomes_a_recipe_and_overrides() -> None:
    argv = ["--steps", "4", "r.yaml", "solve.attempts=2", "--trainer.lr=1e-3", "--run-dir", "x", "--seed", "-1"]
    assert parse_argv(argv) == (
        Path("r.yaml"),
        ["steps=4", "solve.attempts=2", "trainer.lr=1e-3", "run_dir=x", "seed=-1"],
    )


@pytest.mark.parametrize("argv", [["r.yaml", "--steps"], ["r.yaml", "--steps", "--seed", "1"]])
def test_an_option_without_a_value_is_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="--steps needs a value"):
        parse_argv(argv)


@pytest.mark.parametrize("argv", [[], ["a.yaml", "b.yaml"], ["steps=3"]])
def test_exactly_one_recipe_is_wanted(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="expected one recipe"):
        parse_argv(argv)


def test_help_prints_every_key_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_argv(["r.yaml", "--help"], Recipe)
    assert end.value.code == 0
    assert "optimizer.lr: a number = 0.001" in capsys.readouterr().out


def test_explain_lists_keys_types_defaults_and_docs() -> None:
    lines = explain(Recipe).splitlines()
    assert "steps: a whole number = required" in lines
    assert "optimizer.lr: a number = 0.001" in lines
    assert lines[lines.index("optimizer.lr: a number = 0.001") + 1] == "    Step size."
    assert "optimizer.kind: one of adam, sgd = adam" in lines


def test_differences_name_dotted_keys() -> None:
    before, after = plain(Recipe(1, Data("a"))), plain(Recipe(2, Data("b")))
    assert list(differences(before, after)) == [("data.path", "a", "b"), ("steps", 1, 2)]


def test_every_recipe_in_the_repository_loads(repo: Path) -> None:
    recipes = [*(repo / "recipes").glob("tiny_cpu.yaml"), *(repo / "recipes" / "ablations").glob("*.yaml")]
    for path in recipes:
        assert load(RunConfig, path).steps > 0


def test_importing_the_config_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, rsi.config; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
