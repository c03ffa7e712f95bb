"""Dataclasses to plain JSON values and back, checked against their annotations.

Knows no particular class. Unknown, missing and mistyped fields are ConfigErrors that name the path
of the field, so that a YAML file and a results file fail the same way.
"""

import dataclasses
import math
import types
import typing
from enum import Enum
from typing import Any, TypeVar

from foretoken.errors import ConfigError, one_of

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """JSON values of dataclasses, tuples and dicts; infinite and NaN numbers become null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def from_plain(kind: type[T], value: Any, field: str = "") -> T:
    """An instance of `kind` from JSON values; `field` names the place in messages.

    Raises:
        ConfigError: a field is unknown, missing or of another type.
    """
    built: T = _read(kind, value, field or kind.__name__)
    return built


def _read(kind: Any, value: Any, field: str) -> Any:
    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return _read_union(typing.get_args(kind), value, field)
    if origin is typing.Literal:
        if value not in typing.get_args(kind):
            raise ConfigError(field, value, one_of(value, map(str, typing.get_args(kind))))
        return value
    if origin in (tuple, list):
        return _read_list(kind, value, field)
    if origin is dict:
        _expect(isinstance(value, dict), field, value, "a mapping")
        item_kind = typing.get_args(kind)[1]
        return {str(key): _read(item_kind, item, f"{field}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, field)
    return _read_scalar(kind, value, field)


def _expect(right: bool, field: str, value: Any, allowed: str) -> None:
    if not right:
        raise ConfigError(field, value, allowed)


def _read_union(kinds: tuple[Any, ...], value: Any, field: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    rest = [kind for kind in kinds if kind is not type(None)]
    for kind in rest[:-1]:
        try:
            return _read(kind, value, field)
        except ConfigError:
            continue
    return _read(rest[-1], value, field)


def _read_list(kind: Any, value: Any, field: str) -> Any:
    _expect(isinstance(value, list | tuple), field, value, "a list")
    args = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and args[-1] is not Ellipsis:
        _expect(len(value) == len(args), field, value, f"{len(args)} values")
        return tuple(
            _read(a, v, f"{field}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True))
        )
    items = [_read(args[0], item, f"{field}[{i}]") for i, item in enumerate(value)]
    return tuple(items) if typing.get_origin(kind) is tuple else items


def _read_dataclass(kind: Any, value: Any, field: str) -> Any:
    _expect(isinstance(value, dict), field, value, "a mapping")
    known = {f.name: f for f in dataclasses.fields(kind)}
    for key in value:
        where = f"{field}.{key}" if field else str(key)
        _expect(key in known, where, value[key], one_of(key, known))
    hints = typing.get_type_hints(kind)
    given = {key: _read(hints[key], item, f"{field}.{key}") for key, item in value.items()}
    for name, spec in known.items():
        default = (spec.default, spec.default_factory)
        if name not in given and all(d is dataclasses.MISSING for d in default):
            raise ConfigError(f"{field}.{name}", None, "a value; it has no default")
    return kind(**given)


def _read_scalar(kind: Any, value: Any, field: str) -> Any:
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is float and value is None:
        return math.nan
    if kind is int and isinstance(value, bool):
        raise ConfigError(field, value, "an integer")
    if isinstance(kind, type) and issubclass(kind, Enum):
        choices = [member.value for member in kind]
        _expect(value in choices, field, value, one_of(value, map(str, choices)))
        return kind(value)
    if kind is type(None):
        _expect(value is None, field, value, "null")
        return None
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
    _expect(isinstance(value, kind), field, value, names.get(kind, str(kind)))
    return value
