"""How a dictionary of settings becomes a config: known, neutral, removed and unknown keys.

Knows nothing about what any key means; the tables are beside the configs.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.errors import ConfigError, NotYetError


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTable:
    """The keys of one dictionary beyond the config's own fields."""

    where: str
    """How messages name the dictionary, such as `speculative_config`."""
    neutral: Mapping[str, tuple[Any, ...]]
    """Keys of other engines, and the values at which they change nothing here."""
    removed: Mapping[str, str]
    """Keys that were dropped upstream, and what to write instead."""

    def accept(self, given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
        """The part of `given` that belongs to our own fields.

        Raises:
            NotYetError: a neutral key at another value.
            ConfigError: a removed or an unknown key.
        """
        known = tuple(known)
        kept = {}
        for key, value in given.items():
            name = key.replace("-", "_")
            if name in known:
                kept[name] = value
            elif name in self.neutral:
                if not any(value == v and type(value) is type(v) for v in self.neutral[name]):
                    allowed = " or ".join(repr(v) for v in self.neutral[name])
                    raise NotYetError(f"{self.where}.{name}", value, f"{allowed} (not yet built)")
            elif name in self.removed:
                raise ConfigError(f"{self.where}.{name}", value, self.removed[name])
            else:
                raise ConfigError(f"{self.where}.{name}", value, one_of(name, sorted(known)))
        return kept


def one_of(given: object, allowed: Iterable[str]) -> str:
    """The words that are allowed, as an error lists them, after the one that is nearest."""
    words = tuple(allowed)
    close = difflib.get_close_matches(given, words, n=1) if isinstance(given, str) else []
    return (f"did you mean {close[0]!r}? " if close else "") + ", ".join(words)


def require(where: str, given: object, ok: bool, allowed: str) -> None:
    """Raise a ConfigError about field `where` unless `ok`."""
    if not ok:
        raise ConfigError(where, given, allowed)


def is_int(value: object, minimum: int) -> bool:
    """Whether `value` is an integer (not a bool) of at least `minimum`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum
