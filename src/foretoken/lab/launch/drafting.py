"""What an engine is told, and what it cannot be told.

A `DraftingSetup` is how drafts are to be made, whoever makes them. `Told` is what a writer made of
it or of an option: parts of a command, and an `Unsaid` for everything that has no place in it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, final

from foretoken.config.methods import DraftingMethod, known_methods
from foretoken.lab.launch.launch import LaunchPart
from foretoken.lab.launch.values import json_text

MOST_RUNNING = 4096
"""Where the last range of a schedule ends."""

Ranges = tuple[tuple[int, int, int], ...]
"""(first, last, drafts) of running requests, from 1 on."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingSetup:
    """One drafter, and how far it drafts."""

    method: str
    """Our word."""
    model: str | None = None
    num_drafts: int
    """Draft tokens per verification; the most, where `ranges` says more."""
    ranges: Ranges = ()
    """Drafts by load; empty: the same at every load."""
    ranges_key: str = "num_speculative_tokens_per_batch_size"
    """The key that said so."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Other keys, as Foretoken and vLLM name them."""
    flags: tuple[tuple[str, str], ...] = ()
    """Flags of the engine itself with their values (empty: a switch), as somebody gave them."""

    @property
    def drafting(self) -> DraftingMethod:
        """What is known of the method."""
        return next(method for method in known_methods() if method.name == self.method)

    def as_keys(self) -> dict[str, Any]:
        """It as a `speculative_config`."""
        found: dict[str, Any] = {"method": self.method}
        found |= {"model": self.model} if self.model else {}
        found |= {"num_speculative_tokens": self.num_drafts, **self.keys}
        if self.ranges:
            found["num_speculative_tokens_per_batch_size"] = [list(one) for one in self.ranges]
        return found


@final
@dataclass(frozen=True, slots=True)
class Unsaid:
    """Something that an engine is not told."""

    name: str
    """The option or the key, as Foretoken names it."""
    why: str
    """What is missing there, and what to do instead."""


@final
@dataclass(frozen=True, slots=True)
class Told:
    """Parts of a command, and what has no place in it."""

    parts: tuple[LaunchPart, ...] = ()
    unsaid: tuple[Unsaid, ...] = ()

    @classmethod
    def flag(cls, written: str, value: Any = True) -> Self:
        """One option; True: it has no value."""
        return cls((flag_part(written, value),))

    @classmethod
    def flags(cls, pairs: Iterable[tuple[str, Any]]) -> Self:
        """Several options."""
        return cls(tuple(flag_part(written, value) for written, value in pairs))

    @classmethod
    def not_said(cls, name: str, why: str) -> Self:
        """Nothing, and why."""
        return cls(unsaid=(Unsaid(name, why),))

    def __add__(self, other: "Told") -> "Told":
        """Both, one after the other."""
        return Told(self.parts + other.parts, self.unsaid + other.unsaid)

    @property
    def words(self) -> list[str]:
        """The parts as words of a command."""
        found = []
        for part in self.parts:
            found += [part.written] if part.written else []
            found += [] if part.value is True and part.name else [_text(part.value)]
        return found


def flag_part(written: str, value: Any = True) -> LaunchPart:
    """An option of a command, with its value."""
    return LaunchPart(name=written.lstrip("-"), written=written, value=value)


def _text(value: Any) -> str:
    return json_text(value) if isinstance(value, dict | list) else str(value)


def in_groups(unsaid: Iterable[Unsaid]) -> list[str]:
    """Sentences: what is missing, for all names of which the same is to be said."""
    names: dict[str, list[str]] = {}
    for one in unsaid:
        names.setdefault(one.why, []).append(one.name)
    return [f"{', '.join(dict.fromkeys(group))}: {why}" for why, group in names.items()]
