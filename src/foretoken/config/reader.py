"""The one reader of settings: from what users write to frozen dataclasses, by their annotations.

Takes what Python, JSON, YAML and TOML give. A field says what is allowed with `Annotated`, such as
`Annotated[int, at_least(1)]`. Every mistake is a ConfigError with the field, what was given and
what is allowed, and the nearest name where a word or a key is wrong. Knows no setting. Torch-free.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from foretoken.errors import ConfigError, NotYetError, one_of
from foretoken.types.scalars import plain

T = TypeVar("T")

_NAMES = {int: "an integer", float: "a number", str: "text", bool: "True or False"}


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a value of a field may be, beyond its type; stands in `Annotated`."""

    text: str
    """How errors say it, after `allowed:`."""
    holds: Callable[[Any], bool]
    """Asked about values of the right type only."""
    later: tuple[str, ...] = ()
    """Words that are known and whose part is not built."""


def at_least(least: int) -> Allowed:
    """A number of at least this."""
    return Allowed(f"an integer >= {least}", lambda value: bool(value >= least))


def between(low: float, high: float) -> Allowed:
    """A number in [low, high]; an integer where `low` is one."""
    kind = "an integer" if isinstance(low, int) else "a number"
    text = f"{kind} from {low:g} to {high:g}"
    return Allowed(text, lambda value: bool(low <= value <= high))


def words(*allowed: str, later: tuple[str, ...] = ()) -> Allowed:
    """One of these words; NotYetError for those of `later`."""
    return Allowed(", ".join(allowed), lambda value: value in allowed, later)


def require(where: str, given: object, ok: bool, allowed: str) -> None:
    """Raise a ConfigError about field `where` unless `ok`."""
    if not ok:
        raise ConfigError(where, given, allowed)


def is_int(value: object, minimum: int) -> bool:
    """Whether `value` is an integer (not a bool) of at least `minimum`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTable:
    """The keys of one dictionary beyond the settings that its classes have."""

    where: str
    """How messages name the dictionary, such as `speculative_config`."""
    neutral: Mapping[str, tuple[Any, ...]]
    """Keys of other engines, and the values at which they change nothing here."""
    gone: Mapping[str, str] = field(default_factory=dict)
    """Keys that are not taken, beside their neutral values, and what to write instead."""

    def accept(self, given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
        """The part of `given` whose keys are `known`, with `_` for `-`. Raises NotYetError: a
        neutral key at another value; ConfigError: a key that is gone or unknown."""
        known = tuple(known)
        kept = {}
        for key, value in given.items():
            name = str(key).replace("-", "_")
            if name in known:
                kept[name] = value
            elif any(value == v and type(value) is type(v) for v in self.neutral.get(name, ())):
                continue
            elif name in self.gone:
                raise ConfigError(f"{self.where}.{name}", value, self.gone[name])
            elif name in self.neutral:
                allowed = " or ".join(repr(v) for v in self.neutral[name])
                raise NotYetError(f"{self.where}.{name}", value, f"{allowed} (not yet built)")
            else:
                raise ConfigError(f"{self.where}.{name}", value, one_of(name, sorted(known)))
        return kept


def flat(kind: type[T]) -> T:
    """A field whose class stands for keys of the same dictionary: settings that belong together."""
    found: T = dataclasses.field(default_factory=kind, metadata={"flat": kind})
    return found


def _keyed_fields(kind: type) -> Iterator[tuple[type, Any]]:
    """Fields that stand for keys, with their classes; for a `flat` field those of its class."""
    for spec in fields(kind):
        group = spec.metadata.get("flat")
        yield from [(kind, spec)] if group is None else _keyed_fields(group)


def keys_of(kind: type) -> tuple[str, ...]:
    """The keys that a dictionary for `kind` may have, those of its `flat` fields included."""
    return tuple(spec.name for _, spec in _keyed_fields(kind))


def defaults_of(kind: type) -> dict[str, Any]:
    """Key -> default, for the keys of `kind` that have one."""
    specs = (spec for _, spec in _keyed_fields(kind))
    return {spec.name: spec.default for spec in specs if spec.default is not MISSING}


def grouped(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for `kind` from keys that are all its own: those of `flat` fields put together."""
    found: dict[str, Any] = {}
    for spec in fields(kind):
        group = spec.metadata.get("flat")
        if group is not None:
            own = {key: given[key] for key in keys_of(group) if key in given}
            found[spec.name] = group(**grouped(group, own))
        elif spec.name in given:
            found[spec.name] = given[spec.name]
    return found


def check_fields(settings: Any, where: str = "") -> None:
    """Check every field of a dataclass instance by its annotation; called by `__post_init__`.

    Values are replaced by what they are read as: lists by tuples, integers by floats.

    Raises:
        ConfigError: a value is not allowed. `where` stands before the names of fields.
        NotYetError: a word whose part is not built.
    """
    kind: type = type(settings)
    kinds = _kinds(kind)
    for spec in fields(settings):
        value = getattr(settings, spec.name)
        read_as = _Reader().value(kinds[spec.name], value, where + spec.name)
        if read_as is not value:
            object.__setattr__(settings, spec.name, read_as)


def read(kind: Any, given: object, field: str, *, null_is_nan: bool = False) -> Any:
    """A value of type `kind` from plain values; mappings become dataclasses.

    Args:
        kind: an annotation: a dataclass, a scalar, Literal, an Enum, Annotated, or unions, lists,
            tuples and dictionaries of them.
        given: as JSON, YAML or TOML give it.
        field: names the place in messages.
        null_is_nan: whether null stands for a float that is not a number.

    Raises:
        ConfigError: a field is unknown, missing, of another type or not allowed.
    """
    return _Reader(null_is_nan).value(kind, given, field)


@cache
def _kinds(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


@cache
def _key_kinds(kind: type) -> dict[str, Any]:
    """Key -> annotation, keys of `flat` fields included."""
    return {spec.name: _kinds(owner)[spec.name] for owner, spec in _keyed_fields(kind)}


def _text(kind: Any) -> str:
    """What may be given for an annotation, in words."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return next((rule.text for rule in args[1:] if isinstance(rule, Allowed)), _text(args[0]))
    if origin in (types.UnionType, typing.Union):
        rest = [_text(arg) for arg in args if arg is not types.NoneType]
        return " or ".join([*(["None"] if types.NoneType in args else []), *rest])
    if origin is Literal:
        return ", ".join(map(str, args))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(str(member.value) for member in kind)
    if is_dataclass(kind) or origin in (dict, Mapping) or kind is dict:
        return "a mapping"
    if origin in (list, tuple, Sequence):
        return "a list"
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))


@dataclass(frozen=True, slots=True)
class _Reader:
    null_is_nan: bool = False

    def value(self, kind: Any, given: Any, field: str, whole: Any = None) -> Any:
        """Read one value; errors say what `whole`, the annotation that `kind` is a part of, is."""
        if type(given) is kind:  # most values of a large file: nothing to look up
            return given
        given = plain(given)
        whole = kind if whole is None else whole
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if kind is Any:
            return given
        if origin is Annotated:
            return self._annotated(args, given, field, whole)
        if origin in (types.UnionType, typing.Union):
            return self._union(args, given, field, whole)
        if origin is Literal:
            return given if given in args else _refuse(field, given, whole)
        if origin in (list, tuple, Sequence):
            return self._listed(origin, args, given, field)
        if origin in (dict, Mapping):
            if not isinstance(given, Mapping):
                _refuse(field, given, whole)
            return {str(k): self.value(args[1], v, f"{field}.{k}") for k, v in given.items()}
        if is_dataclass(kind):
            return self._dataclass(kind, given, field)
        return self._scalar(kind, given, field, whole)

    def _annotated(self, args: tuple[Any, ...], given: Any, field: str, whole: Any) -> Any:
        found = self.value(args[0], given, field, whole)
        for rule in args[1:]:
            if not isinstance(rule, Allowed) or rule.holds(found):
                continue
            if found in rule.later:
                raise NotYetError(field, given, f"{rule.text} ({found!r} is not yet built)")
            _refuse(field, given, whole)
        return found

    def _union(self, kinds: tuple[Any, ...], given: Any, field: str, whole: Any) -> Any:
        if given is None and types.NoneType in kinds:
            return None
        rest = [kind for kind in kinds if kind is not types.NoneType]
        for kind in rest[:-1]:
            try:
                return self.value(kind, given, field, whole)
            except ConfigError:
                continue
        return self.value(rest[-1], given, field, whole)

    def _listed(self, origin: Any, args: tuple[Any, ...], given: Any, field: str) -> Any:
        listed = isinstance(given, Sequence) and not isinstance(given, str | bytes)
        require(field, given, listed, "a list")
        kinds = [args[0]] * len(given)
        if origin is tuple and args[-1] is not Ellipsis:
            require(field, given, len(given) == len(args), f"{len(args)} values")
            kinds = list(args)
        places = enumerate(zip(kinds, given, strict=True))
        found = [self.value(kind, one, f"{field}[{i}]") for i, (kind, one) in places]
        return found if origin is list else tuple(found)

    def _dataclass(self, kind: Any, given: Any, field: str) -> Any:
        require(field, given, isinstance(given, Mapping), "a mapping")
        own = _key_kinds(kind)
        found: dict[str, Any] = {}
        for key, one in given.items():
            name = str(key).replace("-", "_")
            if name not in own:
                raise ConfigError(f"{field}.{key}", one, one_of(name, own))
            found[name] = self.value(own[name], one, f"{field}.{name}")
        for spec in fields(kind):
            default = spec.default is not MISSING or spec.default_factory is not MISSING
            if not default and spec.name not in found:
                text = f"{_text(own[spec.name])}; it has no default"
                raise ConfigError(f"{field}.{spec.name}", None, text)
        return kind(**grouped(kind, found))

    def _scalar(self, kind: Any, given: Any, field: str, whole: Any) -> Any:
        if kind is float and given is None and self.null_is_nan:
            return math.nan
        if isinstance(kind, type) and issubclass(kind, Enum):
            found = next((member for member in kind if member.value == given), None)
            return _refuse(field, given, whole) if found is None else found
        is_bool = isinstance(given, bool)
        if kind is float and isinstance(given, int | float) and not is_bool:
            return float(given)
        if kind is float or not isinstance(given, kind) or (is_bool and kind is int):
            _refuse(field, given, whole)
        return given


def _refuse(field: str, given: object, kind: Any) -> NoReturn:
    """Raise a ConfigError that says what may be given for an annotation."""
    raise ConfigError(field, given, _text(kind))
