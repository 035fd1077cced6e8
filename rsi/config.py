"""A recipe: YAML files and dotted overrides in, one frozen config out; every mistake stops the run and says where.

`RunConfig` nests the config of each component, defined beside its reader. A recipe may name another one under `base:`
and hold the changed keys only. YAML 1.1's trap is mended: `1e-6` is a number here. Nothing in this module loads torch.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from rsi.admission.calibrate import CalibrateConfig
from rsi.admission.evidence import AdmissionConfig
from rsi.advantages import AdvantageConfig
from rsi.engine import EngineConfig
from rsi.loss import LossConfig
from rsi.pool import PoolConfig
from rsi.propose import ProposeConfig
from rsi.rewards import RewardConfig
from rsi.sandbox import SandboxConfig
from rsi.solve import SolveConfig
from rsi.trainer import ModelConfig, TrainerConfig

T = TypeVar("T")

MAX_YAML_BYTES = 1 << 20
COMMAND_LINE = "the command line"
USAGE = "usage: RECIPE.yaml [key=value | --key value]...    keys are dotted: solve.envs_per_step=4, --steps 4"


class ConfigError(ValueError):
    """A recipe or an override that cannot be used; the message names the place and the mend."""


@dataclass(frozen=True)
class EvalConfig:
    """The `eval:` block of a recipe: the held-out suite, around the run."""

    before: bool = True
    """Score the model before the first step."""
    after: bool = True
    """Score it after the last one."""
    suite: str = "heldout"
    attempts: int = 1
    """At each task."""
    temperature: float = 0.0
    """0: greedy."""


@dataclass(frozen=True)
class RunConfig:
    """A whole recipe."""

    steps: int
    """Optimizer steps of the run, those before a resume included."""
    seed: int = 0
    run_dir: str = ""
    """Where everything is written; empty: runs/<name of the recipe>."""
    domain: Literal["terminal"] = "terminal"
    """What environments are about."""
    num_seeds: int = 64
    """Environments that the domain puts into the first pool."""
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    sandbox: SandboxConfig = SandboxConfig()
    trainer: TrainerConfig = TrainerConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    solve: SolveConfig = SolveConfig()
    propose: ProposeConfig = ProposeConfig()
    admission: AdmissionConfig = AdmissionConfig()
    calibrate: CalibrateConfig = CalibrateConfig()
    pool: PoolConfig = PoolConfig()
    reward: RewardConfig = RewardConfig()
    eval: EvalConfig = EvalConfig()


def parse_argv(argv: Sequence[str], cls: type = RunConfig) -> tuple[Path, list[str]]:
    """A recipe's arguments: its YAML file, and overrides as `a.b=value`, from `--a.b value` and `--a.b=value` too.

    `--help` prints every key of `cls` and exits. Raises ConfigError.
    """
    if "-h" in argv or "--help" in argv:
        print(f"{USAGE}\n\n{explain(cls)}")
        raise SystemExit(0)
    paths: list[str] = []
    overrides: list[str] = []
    rest = iter(argv)
    for word in rest:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            if not equals:
                value = next(rest, "--")
                if value.startswith("--"):
                    raise ConfigError(f"--{key} needs a value: --{key} 4, or {key}=4")
            overrides.append(f"{key.replace('-', '_')}={value}")
        elif "=" in word:
            overrides.append(word)
        else:
            paths.append(word)
    if len(paths) != 1:
        raise ConfigError(f"expected one recipe, found {paths or 'none'}\n{USAGE}")
    return Path(paths[0]), overrides


def load(cls: type[T], path: Path | None, overrides: Sequence[str] = ()) -> T:
    """The config that `path` describes, its `base:` below it and `overrides` above it. Raises ConfigError.

    path None: defaults and overrides only.
    """
    files = [] if path is None else _read_with_bases(path, ())
    layers = [*files, *(_override_layer(text) for text in overrides)]
    tree: dict[str, Any] = {}
    for layer in layers:
        tree = _merge(tree, layer.tree)
    return _Reader(cls, layers).block(cls, tree, "")


def dump(config: Any) -> str:
    """YAML that `load` reads back to an equal config."""
    return yaml.dump(plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def plain(value: Any) -> Any:
    """Dataclasses and tuples as what YAML and JSON know."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def differences(before: Any, after: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value before, value after) wherever two plain configs differ; None where a key is missing."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}, key=str):
            yield from differences(before.get(key), after.get(key), f"{prefix}.{key}" if prefix else str(key))
    elif before != after:
        yield prefix, before, after


def explain(cls: type, prefix: str = "") -> str:
    """Every key of a config with its type, default and the doc line under it; what `--help` shows."""
    lines: list[str] = []
    hints, docs = get_type_hints(cls), _field_docs(cls)
    for field in dataclasses.fields(cls):
        hint, key = hints[field.name], f"{prefix}{field.name}"
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            lines += ["", explain(hint, f"{key}.")]
            continue
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default = "required" if required else _yaml(plain(_default(field)))
        lines.append(f"{key}: {_type_name(hint)} = {default}")
        lines += textwrap.wrap(docs.get(field.name, ""), 100, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


# --- files and overrides ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    name: str
    """The file, or the command line: what an error names."""
    tree: dict[str, Any]

    def has(self, dotted: str) -> bool:
        node: Any = self.tree
        for key in dotted.split("."):
            if not isinstance(node, dict) or key not in node:
                return False
            node = node[key]
        return True


@dataclass(frozen=True)
class _Typed:
    """An override's value, with the text as it was typed: a text field takes `model.path=123` as it stands."""

    text: str
    value: Any


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice and reads `1e-6` as a number (YAML 1.1 wants `1.0e-6`)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"{node.start_mark.name}: key {key!r} stands twice in one block; keep one")
        return super().construct_mapping(node, deep)


_EXPONENT = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$")


class _Dumper(yaml.SafeDumper):
    """Lists stay on one line, and text that _Loader would take for a number is quoted."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))
_Dumper.add_representer(list, lambda d, items: d.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True))


def _read_with_bases(path: Path, below: tuple[Path, ...]) -> list[_Layer]:
    """The recipe's layers, its furthest base first."""
    resolved = path.resolve()
    if resolved in below:
        chain = " -> ".join(str(p.name) for p in (*below, resolved))
        raise ConfigError(f"{path}: the bases form a circle ({chain}); remove one `base:`")
    tree = _read_yaml(path)
    base = tree.pop("base", None)
    if base is None:
        return [_Layer(str(path), tree)]
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base is {base!r}; it names a file beside this one, as in `base: tiny_cpu.yaml`")
    return [*_read_with_bases(path.parent / base, (*below, resolved)), _Layer(str(path), tree)]


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_YAML_BYTES + 1)
    except OSError as error:
        nearby = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], 1)
        hint = f"; did you mean {path.parent / nearby[0]}?" if nearby else ""
        raise ConfigError(f"cannot read the recipe {path} ({error.strerror}){hint}") from error
    if len(content) > MAX_YAML_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_YAML_BYTES} bytes; a recipe is a short file of keys")
    tree = _parse(content, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: found a {type(tree).__name__} at the top; expected keys, for example `steps: 40`")
    return tree


def _parse(content: bytes | str, name: str) -> Any:
    loader = None
    try:
        loader = _Loader(content)
        loader.name = name
        return loader.get_single_data()
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{name} is not YAML: {error}") from error
    finally:
        if loader is not None:
            loader.dispose()


def _override_layer(text: str) -> _Layer:
    dotted, equals, typed = text.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"{COMMAND_LINE}: cannot read {text!r}; write key=value, for example solve.attempts=8")
    value = _parse(typed, f"{COMMAND_LINE} ({dotted})")
    tree: Any = value if isinstance(value, dict) else _Typed(typed, value)
    for key in reversed(keys):
        tree = {key: tree}
    return _Layer(COMMAND_LINE, tree)


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


# --- values to types -------------------------------------------------------------------------------------------------


class _Reader:
    """Turns the merged tree into dataclasses; knows the layers, so that an error can say which file a key came from."""

    def __init__(self, root: type, layers: Sequence[_Layer]):
        self._root = root
        self._layers = layers

    def block(self, cls: type[T], tree: Any, dotted: str) -> T:
        fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        names = [field.name for field in fields]
        if isinstance(tree, _Typed):
            tree = tree.value
        if tree is None:  # `solve:` with nothing below it
            tree = {}
        if not isinstance(tree, dict):
            self._wrong(dotted, tree, f"a block of keys ({', '.join(names)})", "")
        hints = get_type_hints(cls)
        for key in tree:
            if key not in names:
                self._unknown(key, names, dotted)
        values: dict[str, Any] = {}
        for field in fields:
            child = f"{dotted}.{field.name}" if dotted else field.name
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if field.name in tree:
                values[field.name] = self.value(hints[field.name], tree[field.name], child)
            elif required and dataclasses.is_dataclass(hints[field.name]):
                values[field.name] = self.value(hints[field.name], {}, child)
            elif required:
                self._missing(child, hints[field.name])
        try:
            return cls(**values)
        except ConfigError:
            raise
        except ValueError as error:  # from a component's own check, which names the mend
            raise ConfigError(f"{self._where(dotted)}: {error}") from error

    def value(self, hint: Any, value: Any, dotted: str) -> Any:
        typed, value = (value.text, value.value) if isinstance(value, _Typed) else (None, value)
        origin, args = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            return self._union(args, value if typed is None else _Typed(typed, value), dotted, hint)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self.block(hint, value, dotted)
        if origin is Literal:
            for allowed in args:
                for candidate in (value, typed):
                    if type(candidate) is type(allowed) and candidate == allowed:
                        return allowed
            nearest = difflib.get_close_matches(str(value), [str(a) for a in args], 1)
            self._wrong(dotted, value, f"one of {', '.join(map(str, args))}", nearest[0] if nearest else _example(hint))
        if origin is tuple:
            return self._tuple(args, value, dotted, hint)
        if origin is list and isinstance(value, list):
            return [self.value(args[0], item, f"{dotted}.{i}") for i, item in enumerate(value)]
        if origin in (dict, Mapping) and isinstance(value, dict):
            return {self.value(args[0], k, dotted): self.value(args[1], v, f"{dotted}.{k}") for k, v in value.items()}
        if hint is Any:
            return value
        return self._scalar(hint, value, typed, dotted)

    def _scalar(self, hint: Any, value: Any, typed: str | None, dotted: str) -> Any:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if hint is float and is_number:
            return float(value)
        if hint is int and is_number and isinstance(value, float) and typed is not None and value.is_integer():
            return int(value)  # --steps 1e3
        if hint in (int, bool) and type(value) is hint:
            return value
        if hint in (str, Path):
            text = value if isinstance(value, str) else typed
            if text is not None:
                return hint(text)
        self._wrong(dotted, value, _type_name(hint), _example(hint))

    def _tuple(self, args: tuple[Any, ...], value: Any, dotted: str, hint: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            self._wrong(dotted, value, _type_name(hint), _example(hint))
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(self.value(args[0], item, f"{dotted}.{i}") for i, item in enumerate(value))
        if len(value) != len(args):
            self._wrong(dotted, value, f"{_type_name(hint)}, {len(args)} values", _example(hint))
        return tuple(self.value(args[i], item, f"{dotted}.{i}") for i, item in enumerate(value))

    def _union(self, args: tuple[Any, ...], value: Any, dotted: str, hint: Any) -> Any:
        bare = value.value if isinstance(value, _Typed) else value
        members = [arg for arg in args if arg is not type(None)]
        if bare is None and len(members) < len(args):
            return None
        if len(members) == 1:
            return self.value(members[0], value, dotted)
        for member in members:
            try:
                return self.value(member, value, dotted)
            except ConfigError:
                continue
        self._wrong(dotted, bare, _type_name(hint), _example(hint))

    def _where(self, dotted: str) -> str:
        given = dotted
        while given:  # an item of a list has no key of its own: find the key that holds it
            for layer in reversed(self._layers):
                if layer.has(given):
                    return f"{layer.name}:{dotted}"
            given = given.rpartition(".")[0]
        names = [COMMAND_LINE, *(layer.name for layer in self._layers if layer.name != COMMAND_LINE)]
        return f"{names[-1]}:{dotted}" if dotted else names[-1]

    def _wrong(self, dotted: str, found: Any, expected: str, example: str) -> NoReturn:
        key = dotted.rsplit(".", 1)[-1]
        hint = f", for example `{key}: {example}`" if example and not key.isdigit() else ""
        shown = textwrap.shorten(repr(found), 80)
        raise ConfigError(f"{self._where(dotted)} is {shown} ({type(found).__name__}); expected {expected}{hint}")

    def _missing(self, dotted: str, hint: Any) -> NoReturn:
        key = dotted.rsplit(".", 1)[-1]
        raise ConfigError(
            f"{self._where('')}: {dotted} ({_type_name(hint)}) is missing and has no default; "
            f"add `{key}: {_example(hint)}`{' below `' + dotted.rpartition('.')[0] + ':`' if '.' in dotted else ''}, "
            f"or give {dotted}={_example(hint)} on the command line"
        )

    def _unknown(self, key: Any, names: list[str], dotted: str) -> NoReturn:
        full = f"{dotted}.{key}" if dotted else str(key)
        nearest = difflib.get_close_matches(str(key), names, 1, cutoff=0.6)
        if nearest:
            mend = f"did you mean {dotted + '.' if dotted else ''}{nearest[0]}?"
        else:
            by_name = {known.rsplit(".", 1)[-1]: known for known in _dotted_keys(self._root)}
            elsewhere = difflib.get_close_matches(str(key), by_name, 1, cutoff=0.8)
            mend = f"did you mean {by_name[elsewhere[0]]}?" if elsewhere else f"known keys here: {', '.join(names)}"
        raise ConfigError(f"{self._where(full)}: unknown key {key!r}; {mend}")


def _dotted_keys(cls: type, prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _dotted_keys(hints[field.name], f"{prefix}{field.name}.")


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _type_name(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else _type_name(arg) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is tuple:
        return f"a list of {_type_name(args[0])}"
    if origin is not None and args:
        return f"{origin.__name__.lower()} of {' to '.join(_type_name(arg) for arg in args)}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _example(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _example(next(arg for arg in args if arg is not type(None)))
    if origin is Literal:
        return str(args[0])
    if origin is tuple:
        items = [args[0], args[0]] if args[1:] == (Ellipsis,) else args
        return f"[{', '.join(_example(item) for item in items)}]"
    if origin in (dict, Mapping):
        return f"{{{_example(args[0])}: {_example(args[1])}}}"
    return {int: "4", float: "0.5", bool: "true", str: "name", Path: "some/path"}.get(hint, "")


def _yaml(value: Any) -> str:
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=sys.maxsize)
    return text.removesuffix("...\n").strip()


def _field_docs(cls: type) -> dict[str, str]:
    """The string under each field, which Python itself does not keep."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            docs[field.target.id] = " ".join(below.value.value.split())
    return docs
