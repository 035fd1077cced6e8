"""Frozen records from parsed TOML, JSON and YAML, and back.

A record's fields are the format's keys, and its annotations say what may stand there. What a record does not know is
either collected, for formats whose readers ignore it (task.toml), or refused, for those that forbid it (ATIF).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

MAX_JSON_BYTES = 256 << 20
"""A trajectory with token ids of a long episode has tens of MB."""


class FormatError(ValueError):
    """What was read is not what its format says. One line: where, what was found, what to write."""


def read_record(cls: type[T], table: Any, where: str = "", unknown: list[str] | None = None) -> T:
    """`table` as a `cls`, a frozen dataclass; `where` is its dotted path, for messages. Raises FormatError.

    unknown: takes the dotted keys that no field has; None refuses them.
    """
    if not isinstance(table, Mapping):
        raise FormatError(f"{where or 'the document'} is not a table; write its keys below it")
    hints, names = _hints(cls), _names(cls)
    for key in table:
        if key not in names:
            _unknown(f"{where}.{key}" if where else str(key), str(key), names, unknown)
    values = {}
    for name, required in names.items():
        path = f"{where}.{name}" if where else name
        if name in table:
            values[name] = _value(hints[name], table[name], path, unknown)
        elif required:
            raise FormatError(f"{path} is missing; write {_expected(hints[name])}")
    try:
        return cls(**values)
    except FormatError:
        raise
    except ValueError as error:  # of a record's own check, which names the mend
        raise FormatError(f"{where}: {error}" if where else str(error)) from None


def plain(record: Any, keep_empty: bool = True) -> Any:
    """A record as TOML and JSON know it, without the fields that are None, or empty where keep_empty is False."""
    if dataclasses.is_dataclass(record):
        pairs = ((field.name, getattr(record, field.name)) for field in dataclasses.fields(record))
        return {
            name: plain(value, keep_empty)
            for name, value in pairs
            if value is not None and (keep_empty or value not in ((), {}))
        }
    if isinstance(record, Mapping):
        return {key: plain(value, keep_empty) for key, value in record.items()}
    return [plain(item, keep_empty) for item in record] if isinstance(record, list | tuple) else record


def read_json(content: bytes | str, name: str, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """A JSON document. Raises FormatError for one that is broken, too large or nested too deeply."""
    if len(content) > max_bytes:
        raise FormatError(f"{name} has {len(content)} bytes; at most {max_bytes} are read")
    try:
        return json.loads(content)
    except RecursionError:
        raise FormatError(f"{name} is nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"{name} is not JSON: {str(error)[:100]}") from None


def to_json(value: Any) -> bytes:
    """Indented, in the order of the fields, with a last newline. Raises ValueError for NaN and infinities."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _unknown(path: str, key: str, names: Mapping[str, bool], unknown: list[str] | None) -> None:
    if unknown is not None:
        unknown.append(path)
        return
    near = difflib.get_close_matches(key, names, 1)
    raise FormatError(f"{path} is no key of this format; " + (f"did you mean {near[0]}?" if near else "remove it"))


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    return get_type_hints(cls)


@functools.cache
def _names(cls: type) -> Mapping[str, bool]:
    """Field -> whether it must be given."""
    missing = dataclasses.MISSING
    return {
        field.name: field.default is missing and field.default_factory is missing
        for field in dataclasses.fields(cls)
        if field.init
    }


def _value(hint: Any, value: Any, path: str, unknown: list[str] | None) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _union(args, value, path, unknown, hint)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return read_record(hint, value, path, unknown)
    if origin is Literal:
        if isinstance(value, str | int) and value in args:
            return value
        _wrong(path, hint)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            _wrong(path, hint)
        return tuple(_value(args[0], item, f"{path}[{i}]", unknown) for i, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            _wrong(path, hint)
        keys = {_key(args[0], key, path): item for key, item in value.items()}
        return {key: _value(args[1], item, f"{path}.{key}", unknown) for key, item in keys.items()}
    return value if hint is Any else _scalar(hint, value, path)


def _key(hint: Any, key: Any, path: str) -> Any:
    """JSON has no other keys than strings, so a mapping from numbers is read from their text."""
    if hint is str or not isinstance(key, str):
        return _scalar(hint, key, path)
    try:
        return hint(key)
    except ValueError:
        _wrong(f"{path}.{key}", hint)


def _union(args: tuple[Any, ...], value: Any, path: str, unknown: list[str] | None, hint: Any) -> Any:
    if value is None and type(None) in args:
        return None
    members = [arg for arg in args if arg is not type(None)]
    if len(members) == 1:
        return _value(members[0], value, path, unknown)
    # Where one member alone can be meant, its own complaint says more than the union's.
    records = [member for member in members if dataclasses.is_dataclass(member)]
    if len(records) == 1 and isinstance(value, Mapping):
        return _value(records[0], value, path, unknown)
    lists = [member for member in members if get_origin(member) is tuple]
    if len(lists) == 1 and isinstance(value, list | tuple):
        return _value(lists[0], value, path, unknown)
    for member in members:
        try:
            return _value(member, value, path, None)
        except FormatError:
            continue
    _wrong(path, hint)


def _scalar(hint: Any, value: Any, path: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int and is_number and (isinstance(value, int) or value.is_integer()):
        return int(value)
    if hint is float and is_number:
        try:
            return float(value)
        except OverflowError:  # an integer larger than any float
            return math.inf if value > 0 else -math.inf
    if hint in (str, bool) and isinstance(value, hint):
        return value
    _wrong(path, hint)


def _wrong(path: str, hint: Any) -> NoReturn:
    raise FormatError(f"{path} is not {_expected(hint)}")


def _expected(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [arg for arg in args if arg is not type(None) and not (arg is int and float in args)]
        return " or ".join(_expected(arg) for arg in kinds)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is tuple:
        return "a list"
    if origin is not None or dataclasses.is_dataclass(hint):
        return "a table"
    return {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}[hint]
